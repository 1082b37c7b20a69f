//! Every collective over every transport, ranks as threads, against a plain reference.

use std::sync::Arc;
use std::time::Duration;

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, Options, Rendezvous};
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::hash::HashStore;

/// Runs `body` on `size` ranks, a thread each, in a fresh group over `transports`.
fn with_ranks<T: Send>(size: u32, transports: &str, body: impl Fn(Context) -> T + Sync) -> Vec<T> {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let store = store.clone();
                let body = &body;
                scope.spawn(move || {
                    let context = Context::create(Options {
                        rank,
                        size,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: Duration::from_secs(30),
                        interface: None,
                        transports: Some(transports.into()),
                    })
                    .expect("the ranks meet");
                    body(context)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn allreduce(context: &Context, data: &mut [f32]) {
    let request = Request {
        kind: Kind::Allreduce,
        input: data.as_ptr().cast(),
        output: data.as_mut_ptr().cast(),
        counts: Counts::Uniform(data.len() as u64),
        dtype: DataType::F32,
        operator: Operator::Sum,
        root: 0,
    };
    // SAFETY: the slice outlives the call.
    unsafe { context.run(&request, &Call::default()) }.expect("allreduce");
}

#[test]
fn allreduce_sums_over_both_transports() {
    for transports in ["shm", "tcp"] {
        for size in 1..=5 {
            let results = with_ranks(size, transports, |context| {
                let mut sums = Vec::new();
                for count in [0, 1, 3, 1000, 100_000] {
                    let mut data: Vec<f32> = (0..count).map(|i| (i as f32) + context.rank() as f32).collect();
                    allreduce(&context, &mut data);
                    sums.push(data);
                }
                sums
            });
            for result in &results {
                for sums in result {
                    for (i, sum) in sums.iter().enumerate() {
                        let expected = (0..size).map(|rank| i as f32 + rank as f32).sum::<f32>();
                        assert_eq!(*sum, expected, "{transports}, {size} ranks, element {i}");
                    }
                }
            }
        }
    }
}
