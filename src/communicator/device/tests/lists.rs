//! Lists of calls of which GPUs exchange some, and others go by way of the host.

use super::groups::request;
use super::*;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Work, start_together};
use crate::cuda::double::{Clock, DoubleKernels};

/// What carries a call by way of the host, and waits for it.
#[derive(Clone, Copy, Debug)]
enum Carrier {
    /// A courier on its stream.
    Courier,
    /// Side streams, for which its stream waits,
    SideStreams,
    /// or the thread.
    Thread,
}

const CARRIERS: [Carrier; 3] = [Carrier::Courier, Carrier::SideStreams, Carrier::Thread];

/// What the first of them stores: so much that it lasts.
const BYTES: usize = 1 << 14;

/// Starts a call by way of the host, and one that GPUs exchange, on one stream, which both store into
/// the same word: as one list, or else one after the other.
type Start<'a> = &'a dyn Fn(bool) -> Result<Vec<Work>>;

/// Runs `body` on two ranks whose staged calls go so. It can ask for that word.
fn ranks_by<T: Send>(
    carrier: Carrier,
    body: impl Fn(&Context, Start<'_>, &dyn Fn() -> u32) -> T + Sync,
) -> Vec<T> {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 256);
        context.cuda().pretend_loads(only(words));
        match carrier {
            Carrier::Courier => context.cuda().pretend_kernels(Arc::new(DoubleKernels(double.clone()))),
            Carrier::SideStreams => {}
            Carrier::Thread => double.share_queues(8, 8),
        }
        let _clock = Clock::start_slow(double);
        let stream = double.stream(*device);
        let [memory, given] = [0, 77].map(|byte| {
            let memory = double.memory(*device, BYTES);
            double.fill(stream, *device, memory, &[byte; BYTES]);
            memory
        });
        let call = Call { stream: Some(stream), timeout: Some(PATIENCE), ..Call::default() };
        // The kernels have none for these.
        let staged = Request {
            kind: Kind::Broadcast,
            input: std::ptr::with_exposed_provenance(given as usize),
            dtype: DataType::I64,
            counts: Counts::Uniform(BYTES as u64 / 8),
            ..request(1, memory)
        };
        let last = memory + BYTES as u64 - 8;
        let exchanged = request(1, last);
        let start = |in_a_list| {
            // SAFETY: the double trusts no addresses.
            unsafe {
                match in_a_list {
                    true => start_together(&[(context, &staged, &call), (context, &exchanged, &call)]),
                    false => Ok(vec![context.start(&staged, &call)?, context.start(&exchanged, &call)?]),
                }
            }
        };
        body(context, &start, &|| word(double, last))
    })
}

fn ended(works: Result<Vec<Work>>) {
    for work in works.expect("both start") {
        work.wait(Deadline::NEVER).expect("both end well");
    }
}

#[test]
fn collectives_of_a_list_keep_their_order_on_one_stream_whoever_runs_them() {
    for carrier in CARRIERS {
        let found = ranks_by(carrier, |_, start, stored| {
            ended(start(true));
            stored()
        });
        // The last is the exchange's: it stores how many there have been.
        assert_eq!(found, [1, 1], "{carrier:?}");
    }
}

/// On the stream of one rank they would stand the other way round. (Where streams may not wait, what is started
/// alone is waited for by whoever needs it.)
#[test]
fn collectives_are_a_list_on_one_rank_and_single_calls_on_another() {
    for carrier in [Carrier::Courier, Carrier::SideStreams] {
        ranks_by(carrier, |context, start, _| ended(start(context.rank() == 0)));
    }
}
