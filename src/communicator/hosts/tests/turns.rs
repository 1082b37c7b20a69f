//! One thread has all ranks of its host: these take turns.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::members::AHEAD;
use super::*;
use crate::communicator::{Part, start_parts};
use crate::cuda::double::Waiting;
use crate::engine::endpoint::lock;
use crate::engine::staged::Hoard;

/// For how many things of a stream the driver has room: more than a chunk is, and much less than a call of
/// [`CHUNKS`].
const ROOM: usize = 100;

/// Chunks of a long call.
const CHUNKS: u64 = 12;

/// Words of a chunk of a sum.
const WORDS: u64 = 3712;

/// A rank, its second group with all others, and one that knows of no devices.
struct Seat {
    rank: Rank,
    second: Context,
    on_host: Context,
}

impl Seat {
    fn new(rank: &Rank) -> Seat {
        let Rank { context, double, devices, device, stream } = rank;
        let second = context.duplicate().expect("a second group");
        second.cuda().pretend(devices, PIECE);
        second.cuda().pretend_loads(LOADS);
        second.cuda().pretend_kernels(Arc::new(DoubleKernels(double.clone())));
        agree(&second, *device, devices).expect("an agreement");
        let on_host = context.duplicate().expect("a third group");
        let (context, double, devices) = (context.clone(), double.clone(), devices.clone());
        Seat { rank: Rank { context, double, devices, device: *device, stream: *stream }, second, on_host }
    }
}

/// Runs `body` for each of two hosts, in the thread of one of its two ranks, once all ranks have their groups:
/// what fails in it fails what others are still making.
fn threads_of_hosts(body: impl Fn(&[Seat; 2]) + Sync) -> Vec<Arc<Double>> {
    let (others, made) = ([const { Mutex::new(None) }; 2], AtomicU32::new(0));
    let (_, doubles) = ranks_of(2, 2, Order::RoundRobin, 1, Carriers::Couriers, |rank| {
        let (me, seat, start) = (rank.context.rank() as usize, Seat::new(rank), Instant::now());
        made.fetch_add(1, Ordering::Relaxed);
        if me % 2 == 1 {
            *lock(&others[me / 2]) = Some(seat);
            return;
        }
        let other = loop {
            if made.load(Ordering::Relaxed) == rank.context.size()
                && let Some(other) = lock(&others[me / 2]).take()
            {
                break other;
            }
            assert!(start.elapsed() < PATIENCE, "the other ranks do not come");
            std::thread::sleep(Duration::from_millis(1));
        };
        rank.double.limit_queues(ROOM);
        body(&[seat, other]);
    });
    doubles
}

/// As [`threads_of_hosts`]; streams come to an end.
fn threads_of_hosts_that_end(body: impl Fn(&[Seat; 2]) + Sync) {
    for double in threads_of_hosts(body) {
        see_out(&double);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

/// What one thread calls for its ranks: a context, the request, and how.
type List<'a> = Vec<(&'a Context, Request, Call)>;

fn start(list: &List<'_>, awaited: bool) -> Vec<Result<Work>> {
    let part = |(context, request, call)| Part { context, request, call, awaited };
    let parts: Vec<Part<'_>> =
        list.iter().map(|(context, request, call)| part((*context, request, call))).collect();
    // SAFETY: the double trusts no address.
    unsafe { start_parts(&parts) }
}

#[test]
fn long_calls_of_ranks_of_one_thread_begin_in_turns() {
    threads_of_hosts_that_end(|seats| {
        for kind in [Kind::Allreduce, Kind::ReduceScatter, Kind::Allgather, Kind::Reduce, Kind::Broadcast] {
            let count = match kind {
                Kind::Allreduce | Kind::Reduce => CHUNKS * WORDS,
                Kind::Broadcast => WORDS,
                _ => CHUNKS * WORDS / 8,
            };
            let what = What { kind, count, dtype: DataType::U32, operator: Operator::Sum, root: 0 };
            let mut list: List<'_> = Vec::new();
            let mut outputs = Vec::new();
            for Seat { rank, .. } in seats {
                let (reads, writes) = what.lengths(4, rank.context.rank() == 0);
                let [from, to] = [reads, writes].map(|bytes| rank.double.memory(rank.device, bytes.max(1)));
                rank.double.fill(rank.stream, rank.device, from, &vec![1; reads]);
                list.push((
                    &rank.context,
                    what.request(pointer(from).cast_const(), pointer(to)),
                    rank.call(),
                ));
                outputs.push((rank, to, writes));
            }
            for work in start(&list, true) {
                work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            let due = if matches!(kind, Kind::Allgather | Kind::Broadcast) { 1 } else { 4 };
            for (rank, to, bytes) in outputs {
                assert!(bytes == 0 || rank.double.peek(to, bytes) == vec![due; bytes], "{kind:?}");
            }
        }
    });
}

#[test]
fn many_calls_of_ranks_of_one_thread_begin_in_turns() {
    const CALLS: usize = 30;
    threads_of_hosts_that_end(|seats| {
        let mut list: List<'_> = Vec::new();
        for Seat { rank, .. } in seats {
            let requests = (0..CALLS).map(|_| rank.sum(100).1);
            list.extend(requests.map(|request| (&rank.context, request, rank.call())));
        }
        for work in start(&list, true) {
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        for (_, request, _) in list {
            assert_eq!(seats[0].rank.double.peek(request.output.addr() as u64, 400), [4; 400]);
        }
    });
}

/// Their kernels would wait for its.
#[test]
fn nothing_of_a_group_is_begun_if_the_memory_of_one_of_its_ranks_is_refused() {
    threads_of_hosts_that_end(|seats| {
        for refused in [Some(0), Some(1), None] {
            let mut list: List<'_> = Vec::new();
            for (at, Seat { rank, .. }) in seats.iter().enumerate() {
                let (_, first) = rank.sum(100);
                let (_, mut last) = rank.sum(100);
                if refused == Some(at) {
                    last.counts = Counts::Uniform(101);
                }
                list.extend([first, last].map(|request| (&rank.context, request, rank.call())));
            }
            for started in start(&list, true) {
                if refused.is_none() {
                    started.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
                    continue;
                }
                let error = started.err().expect("it is refused");
                assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                assert!(error.text().contains("has 400 bytes left"), "{error}");
            }
        }
        assert!(seats.iter().all(|seat| seat.rank.context.failure().is_none()));
    });
}

/// Each call finds what the one before it on its stream has stored, whosever group that is of, and however
/// the calls of the ranks are mixed.
#[test]
fn what_is_on_one_device_keeps_its_order_when_ranks_take_turns() {
    threads_of_hosts_that_end(|seats| {
        for (by_rank, awaited) in [(true, true), (true, false), (false, true)] {
            let (mut list, mut all): (List<'_>, _) = (Vec::new(), Vec::new());
            for Seat { rank, second, .. } in seats {
                let (memory, sum) = rank.sum(3 * WORDS);
                let all_to_all = Request {
                    kind: Kind::Alltoall,
                    counts: Counts::Uniform(3 * WORDS / 4),
                    output: pointer(rank.double.memory(rank.device, 12 * WORDS as usize)),
                    ..sum.clone()
                };
                let back = Request {
                    input: all_to_all.output.cast_const(),
                    output: sum.output,
                    ..all_to_all.clone()
                };
                let calls = [
                    (&rank.context, sum.clone()),
                    (second, sum.clone()),
                    (&rank.context, all_to_all),
                    (&rank.context, back),
                    (&rank.context, sum),
                ];
                all.push((rank, memory));
                list.extend(calls.map(|(context, request)| (context, request, rank.call())));
            }
            if !by_rank {
                let [first, other] = [&list[..5], &list[5..]];
                list =
                    first.iter().zip(other).flat_map(|(one, other)| [one.clone(), other.clone()]).collect();
            }
            for work in start(&list, awaited) {
                work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            for (rank, memory) in all {
                rank.context.settle(Deadline::after(PATIENCE)).expect("it ends well");
                assert!(
                    rank.double.peek(memory, 12 * WORDS as usize) == vec![64; 12 * WORDS as usize],
                    "{by_rank}"
                );
            }
        }
    });
}

/// The kernels of the first rank wait for those of the second, whatever is called between the two.
#[test]
fn a_call_on_host_memory_between_those_of_two_ranks_takes_no_turn() {
    threads_of_hosts_that_end(|seats| {
        let mut words = [[1u32; 4]; 2];
        let what =
            What { kind: Kind::Allreduce, count: 4, dtype: DataType::U32, operator: Operator::Sum, root: 0 };
        let mut list: List<'_> = Vec::new();
        for (Seat { rank, on_host, .. }, words) in seats.iter().zip(&mut words) {
            let at = words.as_mut_ptr().cast::<u8>();
            list.push((&rank.context, rank.sum(CHUNKS * WORDS).1, rank.call()));
            list.push((on_host, what.request(at.cast_const(), at), Call::default()));
        }
        for work in start(&list, true) {
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(words, [[4; 4]; 2]);
    });
}

/// Two hosts, in one thread each, call sums of so many chunks, the second when the first has made its call;
/// from then on the driver waits for devices where it may.
fn threads_of_hosts_under_lock(chunks: u64, hoards: bool) {
    let is_called = AtomicBool::new(false);
    threads_of_hosts_that_end(|seats| {
        let is_first = seats[0].rank.context.rank() == 0;
        let hoard = |Seat { rank, .. }: &Seat| hoards.then(|| Hoard::of(&rank.devices, rank.device));
        let _hoards = seats.each_ref().map(hoard);
        let mut list: List<'_> = Vec::new();
        for Seat { rank, .. } in seats {
            list.push((&rank.context, rank.sum(chunks * WORDS).1, rank.call()));
        }
        let begun = Instant::now();
        while !is_first && !is_called.load(Ordering::Acquire) && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        seats[0].rank.double.limit_queues(100_000);
        seats[0].rank.double.hold_lock(Waiting::All, PATIENCE / 2);
        let works = start(&list, true);
        is_called.store(true, Ordering::Release);
        for work in works {
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
    });
}

/// There, the driver waits for the first rank's kernel, and that for the second rank's.
#[test]
fn no_memory_is_pinned_behind_a_kernel_that_waits_for_another_rank_of_the_thread() {
    threads_of_hosts_under_lock(1, true);
}

/// It does so also where it makes room for orders to couriers.
#[test]
fn a_long_call_makes_nothing_in_its_course_though_the_other_host_is_late() {
    threads_of_hosts_under_lock(30, false);
}

/// The others' kernels wait for those of the one that has failed.
#[test]
fn a_rank_whose_call_fails_in_its_turn_keeps_no_other_waiting() {
    for fails_at in [2, 5, 12] {
        let doubles = threads_of_hosts(|seats| {
            let begun = Instant::now();
            let mut list: List<'_> = Vec::new();
            for Seat { rank, .. } in seats {
                list.push((&rank.context, rank.sum(CHUNKS * WORDS).1, rank.call()));
            }
            if seats[0].rank.context.rank() == 0 {
                let mut launches = 0;
                AHEAD.set(Some(Box::new(move || {
                    launches += 1;
                    if launches == fails_at { fail!(Cuda, "no such launch") } else { Ok(()) }
                })));
            }
            let works = start(&list, true);
            assert_eq!(works.len(), list.len());
            for work in works {
                let ended = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                assert!(ended.is_err(), "launch {fails_at}");
            }
            assert!(begun.elapsed() < PATIENCE / 2, "nobody waits for the deadline");
        });
        for double in doubles {
            let complaints = double.complaints().concat();
            assert!(!complaints.contains("waits in the driver"), "{complaints}");
        }
    }
}
