//! The engine where it is awkward: several threads, unequal buffers, forks.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{AlgorithmOptions, Call, Context, Options, Prepared, Rendezvous};
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::hash::HashStore;

/// Runs `body` on `size` ranks, a thread each, in a fresh group over shared memory.
fn with_ranks<T: Send>(size: u32, body: impl Fn(Context) -> T + Sync) -> Vec<T> {
    let store = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let context = Context::create(Options {
                        rank,
                        size,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: Duration::from_secs(20),
                        interface: None,
                        transports: Some("shm".into()),
                        host: None,
                    })
                    .expect("the ranks meet");
                    body(context)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn sum(context: &Context, data: &mut [i64], call: &Call) {
    let request = Request {
        kind: Kind::Allreduce,
        input: data.as_ptr().cast(),
        output: data.as_mut_ptr().cast(),
        counts: Counts::Uniform(data.len() as u64),
        dtype: DataType::I64,
        operator: Operator::Sum,
        root: 0,
    };
    // SAFETY: the slice outlives the call.
    unsafe { context.run(&request, call) }.expect("allreduce");
}

#[test]
fn several_threads_call_on_one_context() {
    with_ranks(2, |context| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let mut data = [1, 2, 3];
                        sum(&context, &mut data, &Call::default());
                        assert_eq!(data, [2, 4, 6]);
                    }
                });
            }
        });
    });
}

#[test]
fn ranks_may_have_different_numbers_of_buffers() {
    with_ranks(2, |context| {
        for count in [8usize, 100_000] {
            let mut memory: Vec<Vec<f32>> =
                (0..=context.rank()).map(|_| vec![context.rank() as f32 + 1.0; count]).collect();
            for kind in [Kind::Allreduce, Kind::Broadcast] {
                let options = AlgorithmOptions {
                    streams: Vec::new(),
                    kind,
                    algorithm: 0,
                    buffers: memory.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect(),
                    count: count as u64,
                    dtype: DataType::F32,
                    operator: Operator::Sum,
                    root: 0,
                    root_buffer: 0,
                    call: Call::default(),
                };
                // SAFETY: the buffers outlive the object.
                unsafe { Prepared::new(&context, options) }.expect("it is sound").run().expect("it runs");
                // One buffer of 1 and two of 2.
                assert!(memory.iter().flatten().all(|&sum| sum == 5.0), "{}", kind.name());
            }
        }
    });
}

#[test]
fn a_forked_child_that_ends_its_handles_leaves_the_links_alone() {
    unsafe extern "C" {
        safe fn fork() -> c_int;
        fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
        safe fn _exit(code: c_int) -> !;
    }
    with_ranks(2, |context| {
        let by_messages = Call { algorithm: Some(9), ..Call::default() };
        let calls = [Call::default(), by_messages];
        for call in &calls {
            sum(&context, &mut [1], call);
        }
        let child = if context.rank() == 0 { fork() } else { -1 };
        if child == 0 {
            let refused = context.duplicate().is_err();
            drop(context);
            _exit(if refused { 0 } else { 1 });
        }
        if context.rank() == 0 {
            let mut status = -1;
            // SAFETY: `status` outlives the call; the child is ours.
            assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child's handles refuse to work and go quietly");
        }
        for call in &calls {
            let mut data = [1];
            sum(&context, &mut data, call);
            assert_eq!(data, [2]);
        }
    });
}
