//! Lists of calls of which GPUs exchange some, and others go by way of the host.

use super::groups::request;
use super::*;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Work, start_together};
use crate::cuda::double::{Clock, DoubleKernels};

/// What carries a call by way of the host, and waits for it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Carrier {
    /// A courier on its stream.
    Courier,
    /// Side streams, for which its stream waits,
    SideStreams,
    /// or the thread.
    Thread,
}

pub(super) const CARRIERS: [Carrier; 3] = [Carrier::Courier, Carrier::SideStreams, Carrier::Thread];

/// What the first of them stores: so much that it lasts.
const BYTES: usize = 1 << 14;

/// Starts a call by way of the host, and one that GPUs exchange, on one stream, which both store into
/// the same word: as one list, or else one after the other.
type Start<'a> = &'a dyn Fn(bool) -> Result<Vec<Work>>;

/// A call by way of the host, which the kernels do not serve, and one that GPUs exchange. Both store into one
/// word: the first 77 into each of its bytes, the other how many of its kind there have been.
pub(super) struct Calls {
    pub(super) staged: Request,
    pub(super) exchanged: Request,
    pub(super) word: u64,
}

/// Runs `body` on two ranks whose staged calls go so.
pub(super) fn ranks_with<T: Send>(
    carrier: Carrier,
    body: impl Fn(&Context, &Seat, &Calls) -> T + Sync,
) -> Vec<T> {
    ranks(&processes(2), words, |context, seat| {
        let (double, devices, device) = seat;
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
        let staged = Request {
            kind: Kind::Broadcast,
            input: std::ptr::with_exposed_provenance(given as usize),
            dtype: DataType::I64,
            counts: Counts::Uniform(BYTES as u64 / 8),
            ..request(1, memory)
        };
        let word = memory + BYTES as u64 - 8;
        body(context, seat, &Calls { staged, exchanged: request(1, word), word })
    })
}

/// Runs `body` on such ranks. It can ask for that word.
fn ranks_by<T: Send>(
    carrier: Carrier,
    body: impl Fn(&Context, Start<'_>, &dyn Fn() -> u32) -> T + Sync,
) -> Vec<T> {
    ranks_with(carrier, |context, (double, _, device), Calls { staged, exchanged, word: stored }| {
        let call = Call { stream: Some(double.stream(*device)), timeout: Some(PATIENCE), ..Call::default() };
        let start = |in_a_list| {
            // SAFETY: the double trusts no addresses.
            unsafe {
                match in_a_list {
                    true => start_together(&[(context, staged, &call), (context, exchanged, &call)]),
                    false => Ok(vec![context.start(staged, &call)?, context.start(exchanged, &call)?]),
                }
            }
        };
        body(context, &start, &|| word(double, *stored))
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
