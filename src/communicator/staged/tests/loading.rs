//! Driver calls that wait for the device, with a lock held that ours need: the program's and our own, at any
//! moment.

use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::communicator::context::Membership;
use crate::cuda::double::Waiting;
use crate::cuda::memory::DeviceBuffer;
use crate::engine::staged::Hoard;
use crate::engine::staged::Load;
use crate::engine::staged::relay::Limits;

/// Nothing moves for so long only if nothing ever will, also on a processor that has much else to do.
const STUCK: Duration = Duration::from_secs(30);

/// A thread of the program's that launches kernels for the first time and allocates, again and again.
struct Program {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<u32>>,
}

impl Program {
    fn start(rank: &Rank) -> Program {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, double, devices) = (stop.clone(), rank.double.clone(), rank.devices.clone());
        let pauses = [0, 300, 50, 1000, 7, 120].map(Duration::from_micros);
        let first = rank.rank as usize;
        let run = move || {
            let mut calls = 0;
            for pause in pauses.into_iter().cycle().skip(first) {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                double.launch_first(0);
                drop(DeviceBuffer::new(&devices, 0, 64).expect("it allocates"));
                std::thread::sleep(pause);
                calls += 1;
            }
            calls
        };
        Program { stop, thread: Some(std::thread::spawn(run)) }
    }

    /// Ends it. How often it came to make its calls.
    fn end(mut self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().expect("the program"))
    }
}

/// Elements: none, one, several pieces.
const LENGTHS: [usize; 3] = [0, 1, 201];

/// Elements of a piece for which pinned memory has to be made.
const LONG: usize = 60_000;

/// First calls of every kind and length; what side streams do is waited for. What went wrong.
fn first_calls(rank: &Rank) -> Vec<String> {
    rank.completes.store(true, Ordering::Relaxed);
    rank.double.hold_lock(Waiting::All, STUCK);
    let program = Program::start(rank);
    let mut round = 0;
    for kind in COLLECTIVES {
        for count in LENGTHS {
            exercise(rank, kind, count, round % 2 == 1, round).expect("it ends well");
            round += 1;
        }
    }
    rank.context.cuda().pretend(&rank.devices, 4 * LONG);
    exercise(rank, Kind::Broadcast, LONG, false, round).expect("it ends well");
    let (next, before) =
        ((rank.rank + 1) % rank.context.size(), (rank.rank + rank.context.size() - 1) % rank.context.size());
    let values = given(rank.rank, round, 2 * LONG);
    let (out, into) = (rank.memory(&values), rank.memory(&values));
    rank.fill(out, &values);
    let send = request(Kind::Send, out, 0, values.len() as u64, next);
    let receive = request(Kind::Receive, 0, into, values.len() as u64, before);
    // SAFETY: the double trusts no address.
    let both =
        [&send, &receive].map(|one| unsafe { rank.context.begin(one, &rank.call()) }.expect("it starts"));
    Pending::complete_all(both.into()).into_iter().for_each(|work| drop(work.expect("it ends well")));
    rank.expect(into, &given(before, round, values.len()), "received");
    assert!(program.end() > 0);
    rank.drain()
}

#[test]
fn a_program_may_load_kernels_at_any_moment() {
    for (size, transports, relays) in [(2, "shm", true), (2, "tcp", false), (3, "tcp", true)] {
        let complaints = ranks(size, transports, Order::RoundRobin, |rank| {
            if relays {
                rank.relay();
            } else {
                rank.copy_by_kernels();
                rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
            }
            first_calls(rank)
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}, {transports}, relays: {relays}");
    }
}

#[test]
fn first_calls_make_no_streams_and_load_nothing_while_their_stream_waits() {
    for transports in ["shm", "tcp"] {
        let complaints = ranks(2, transports, Order::RoundRobin, |rank| {
            rank.relay();
            rank.double.hold_lock(Waiting::Seen, STUCK);
            let mut works = Vec::new();
            for (round, kind) in (0..).zip(COLLECTIVES) {
                for count in LENGTHS {
                    works.push(exercise(rank, kind, count, false, round).expect("it starts"));
                }
            }
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{transports}");
    }
}

#[test]
fn a_call_without_a_stream_makes_none_while_a_stream_waits() {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        rank.double.hold_lock(Waiting::Seen, STUCK);
        if rank.rank == 1 {
            // The other's stream waits by then for its first call; if it does not, the test finds less.
            std::thread::sleep(Duration::from_millis(50));
        }
        let first = exercise(rank, Kind::Allreduce, 37, false, 0).expect("it starts");
        let memory = rank.memory(&[1]);
        rank.run(&request(Kind::Broadcast, memory, memory, 1, 0), &Call::default()).expect("it ends well");
        first.wait(Deadline::after(PATIENCE)).expect("it ends well");
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// The program waits in the driver for a stream, with the lock, and the stream for a call that `other`, on
/// rank 1, keeps from ending. `knows`: not before the call knows what it waits for. What became of the call
/// on rank 0.
fn held_up(timeout: Duration, knows: bool, couriers: bool, other: impl Fn(&Rank) + Sync) -> Error {
    let [is_held, is_answered, is_over] = [(); 3].map(|()| AtomicBool::new(false));
    let mut answers = ranks(2, "shm,tcp", Order::RoundRobin, |rank| {
        if couriers {
            rank.copy_by_kernels();
        }
        exercise(rank, Kind::Allreduce, 37, false, 0)
            .expect("it starts")
            .wait(deadline())
            .expect("a good call");
        assert_eq!(rank.drain(), Vec::<String>::new());
        let mut words = [[rank.rank as u8 + 1; 4], [0; 4]];
        let message = |kind, word: &mut [u8; 4], tag| {
            let (address, peer) = (word.as_mut_ptr() as u64, 1 - rank.rank);
            let (from, to) = if kind == Kind::Send { (address, 0) } else { (0, address) };
            let request = Request { dtype: DataType::U8, ..request(kind, from, to, 4, peer) };
            // SAFETY: the words outlive the calls.
            unsafe { rank.context.start(&request, &Call { tag: Some(tag), ..Call::default() }) }
                .expect("it starts")
        };
        if rank.rank == 1 {
            wait_for(&is_held);
            message(Kind::Send, &mut words[0], 7).wait(deadline()).expect("a message");
            // What becomes of this rank would overtake the message.
            wait_for(&is_answered);
            other(rank);
            wait_for(&is_over);
            return None;
        }
        let _over = SetAtEnd(&is_over);
        rank.double.hold_lock(Waiting::All, STUCK);
        let memory = rank.memory(&[1]);
        let call = Call { timeout: Some(timeout), ..rank.call() };
        let [answered, unanswered] =
            [(0, 7), (1, 8)].map(|(at, tag)| message(Kind::Receive, &mut words[at], tag));
        let work = rank.start(&request(Kind::Allreduce, memory, memory, 1, 0), &call).expect("it starts");
        let start = Instant::now();
        let Membership::Group(group) = rank.context.membership() else { panic!("a group") };
        let recorder = group.endpoint().recorder();
        let known = || recorder.find(|entry| entry.group == group.id() && entry.awaited.rank().is_some());
        while knows && known().is_none() {
            assert!(start.elapsed() < PATIENCE, "it does not know whom it waits for");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::scope(|scope| {
            let program = scope.spawn(|| rank.double.launch_first(0));
            // By then it waits; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            is_held.store(true, Ordering::Release);
            // Messages on host memory do not wait for the driver, whoever moves them.
            let (tell, told) = std::sync::mpsc::channel();
            unanswered.on_complete(Box::new(move |result| tell.send(result.is_ok()).unwrap_or_default()));
            answered.wait(deadline()).expect("a message");
            is_answered.store(true, Ordering::Release);
            assert_eq!(told.recv_timeout(PATIENCE), Ok(false), "it fails with its group");
            program.join().expect("the program goes on");
        });
        let error = work.wait(deadline()).expect_err("it cannot end well");
        assert!(start.elapsed() < STUCK / 2, "{:?}: {error}", start.elapsed());
        assert_eq!(words[0], [2; 4]);
        assert_eq!(rank.drain(), Vec::<String>::new());
        Some(error)
    });
    answers.swap_remove(0).expect("of rank 0")
}

/// Tells others that a rank is through, also when it panics.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn wait_for(flag: &AtomicBool) {
    let until = deadline();
    while !flag.load(Ordering::Acquire) && !until.expired() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn deadline() -> Deadline {
    Deadline::after(PATIENCE)
}

#[test]
fn a_stream_for_which_the_driver_waits_goes_on_after_the_deadline_of_its_call() {
    // The other is there and does not call.
    for (knows, couriers) in [(true, false), (false, false), (true, true)] {
        let error = held_up(Duration::from_secs(2), knows, couriers, |_| {});
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("nothing from rank 1 ("), "{error}");
        // For couriers nobody asks it.
        assert!(couriers || error.text().contains("here, the driver does not answer"), "{knows}: {error}");
    }
}

#[test]
fn a_stream_for_which_the_driver_waits_goes_on_when_another_rank_fails() {
    for couriers in [false, true] {
        let error = held_up(PATIENCE, true, couriers, |rank| rank.context.abort());
        assert_eq!(error.status(), Status::Aborted, "{error}");
        assert!(error.text().contains("rank 1 aborted"), "{error}");
    }
}

/// Who gives up the call before it is held up in the driver, and that waits for this one's courier.
#[test]
fn a_courier_leaves_although_its_call_stands_behind_one_that_is_held_up() {
    let [is_held, is_over] = [(); 2].map(|()| AtomicBool::new(false));
    let complaints = ranks(2, "shm,tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let memory = rank.memory(&[1]);
        let sum = request(Kind::Allreduce, memory, memory, 1, 0);
        // On side streams, then by a courier.
        let start = || [Call::default(), rank.call()].map(|call| rank.start(&sum, &call).expect("it starts"));
        for work in start() {
            work.wait(deadline()).expect("a good call");
        }
        if rank.rank == 1 {
            wait_for(&is_held);
            rank.context.abort();
            wait_for(&is_over);
            return Vec::new();
        }
        let _over = SetAtEnd(&is_over);
        rank.double.hold_lock(Waiting::All, STUCK);
        let (begun, works) = (Instant::now(), start());
        std::thread::scope(|scope| {
            scope.spawn(|| rank.double.launch_first(0));
            // By then it waits; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            is_held.store(true, Ordering::Release);
        });
        for work in works {
            let error = work.wait(deadline()).expect_err("the other does not call");
            assert_eq!(error.status(), Status::Aborted, "{error}");
        }
        assert!(begun.elapsed() < STUCK / 2, "{:?}", begun.elapsed());
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// A thread of the library is in the driver with that one, while another looks at all the rest.
#[test]
fn a_courier_leaves_although_somebody_looks_who_passes_over_the_call_that_is_held_up() {
    let [is_held, is_over] = [(); 2].map(|()| AtomicBool::new(false));
    let complaints = ranks(2, "shm,tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
        let long = rank.memory(&[1; LONG]);
        let sum = |count| request(Kind::Allreduce, long, long, count, 0);
        let start = |count, call: &Call| rank.start(&sum(count), call).expect("it starts");
        for call in [Call::default(), rank.call()] {
            start(1, &call).wait(deadline()).expect("a good call");
        }
        if rank.rank == 1 {
            wait_for(&is_held);
            // By then the other looks; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            rank.context.abort();
            wait_for(&is_over);
            return Vec::new();
        }
        let _over = SetAtEnd(&is_over);
        rank.double.hold_lock(Waiting::All, STUCK);
        // SAFETY: the double trusts no handle.
        let default = unsafe { Stream::borrow(&rank.devices, 0, StreamHandle::LEGACY) }.expect("a stream");
        let gate = rank.devices.word(0).expect("a word");
        default.wait_word(&gate).expect("it waits");
        let first = start(LONG as u64, &Call::default());
        let second = start(1, &rank.call());
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| rank.double.launch_first(0));
            while !rank.double.is_held() && begun.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            gate.release();
            is_held.store(true, Ordering::Release);
            for work in [second, first] {
                let error = work.wait(deadline()).expect_err("the other does not call");
                assert_eq!(error.status(), Status::Aborted, "{error}");
            }
        });
        assert!(begun.elapsed() < STUCK / 2, "{:?}", begun.elapsed());
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// There is no pinned memory for calls of `LONG` elements, which couriers carry.
fn make_pinned_memory_scarce(rank: &Rank) {
    rank.copy_by_kernels();
    make_it_scarce(rank, LONG);
}

/// There is none for pieces of so many elements.
fn make_it_scarce(rank: &Rank, elements: usize) {
    rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
    let first = exercise(rank, Kind::Allreduce, 37, false, 0).expect("it starts");
    first.wait(deadline()).expect("it ends well");
    assert_eq!(rank.drain(), Vec::<String>::new());
    rank.context.cuda().pretend(&rank.devices, 4 * elements);
}

/// What begins behind calls of which one asks the driver: every collective, lists, messages either way, a
/// call without a stream.
const BEHIND: usize = COLLECTIVES.len() + 4;

/// Starts one of them, of several pieces. What it is to leave where, if it has no stream.
fn start_behind(rank: &Rank, which: usize) -> (Work, Option<(u64, Vec<i32>)>) {
    let (count, own, other) = (2 * LONG + 5, rank.rank, 1 - rank.rank);
    if let Some(&kind) = COLLECTIVES.get(which) {
        return (exercise(rank, kind, count, false, which as u32).expect("it starts"), None);
    }
    let (from, into) = (rank.memory(&vec![0; 2 * count]), rank.memory(&vec![0; 2 * count]));
    rank.double.fill(StreamHandle::LEGACY, 0, from, &bytes(&given(own, 0, 2 * count)));
    let counts = Counts::Exchange { send: vec![count as u64; 2], receive: vec![count as u64; 2] };
    let sends = (which + own as usize).is_multiple_of(2);
    let (request, call, due) = match which - COLLECTIVES.len() {
        0 => (
            Request { counts, ..request(Kind::Alltoall, from, into, 0, 0) },
            rank.call(),
            expected(Kind::Alltoall, count, 2, own, 0, 0),
        ),
        1 | 2 if sends => (request(Kind::Send, from, 0, count as u64, other), rank.call(), Vec::new()),
        1 | 2 => (request(Kind::Receive, 0, into, count as u64, other), rank.call(), given(other, 0, count)),
        _ => {
            let sum = expected(Kind::Allreduce, 2 * count, 2, own, 0, 0);
            (request(Kind::Allreduce, from, into, 2 * count as u64, 0), Call::default(), sum)
        }
    };
    (rank.start(&request, &call).expect("it starts"), Some((into, due)))
}

/// A stream waits for a call that has its turn behind one whose mover asks the driver. Whoever had pinned
/// memory made then would wait for that stream in the driver, with a lock that the mover needs.
#[test]
fn no_pinned_memory_is_made_while_a_stream_waits_behind_a_call_that_asks_the_driver() {
    let (double, begun) = (OnceLock::new(), AtomicUsize::new(0));
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        make_pinned_memory_scarce(rank);
        rank.double.hold_lock(Waiting::All, Duration::from_secs(3));
        for (hoards, which) in
            [false, true].into_iter().flat_map(|hoards| (0..BEHIND).map(move |which| (hoards, which)))
        {
            let step = which + if hoards { BEHIND } else { 0 };
            // The other calls when this rank has begun all, or cannot.
            let is_held = || double.get().is_some_and(|double: &Arc<Double>| double.is_held());
            let until = deadline();
            while rank.rank == 1 && begun.load(Ordering::Acquire) <= step && !is_held() && !until.expired() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let memory = rank.memory(&[1]);
            let sum = request(Kind::Allreduce, memory, memory, 1, 0);
            let first =
                [Call::default(), rank.call()].map(|call| rank.start(&sum, &call).expect("it starts"));
            let pinned = rank.double.registered();
            if rank.rank == 0 {
                double.get_or_init(|| rank.double.clone());
            }
            // Nor has it short pieces of what there is.
            let hoard = hoards.then(|| Hoard::of(&rank.devices, 0));
            let (last, due) = start_behind(rank, which);
            if rank.rank == 0 {
                begun.store(step + 1, Ordering::Release);
            }
            for work in first.into_iter().chain([last]) {
                work.wait(deadline()).expect("it ends well");
            }
            if rank.rank == 0 {
                assert_eq!(rank.double.registered(), pinned, "call {which}");
            }
            drop(hoard);
            if let Some((into, due)) = due {
                rank.expect(into, &due, &format!("call {which} on rank {}", rank.rank));
            }
            assert_eq!(rank.drain(), Vec::<String>::new(), "call {which}");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Elements of a piece of which no message goes unasked, by whatever algorithm.
const ASKED: usize = 204_800;

/// What goes wrong when the last piece of a broadcast's root finds pinned memory, while the first waits for
/// some to be stored from.
fn store_last_first(couriers: bool) -> Vec<String> {
    let met = Barrier::new(2);
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        if couriers {
            rank.copy_by_kernels();
        }
        make_it_scarce(rank, ASKED);
        let memory = rank.memory(&[1]);
        let sum = request(Kind::Allreduce, memory, memory, 1, 0);
        let start = || [Call::default(), rank.call()].map(|call| rank.start(&sum, &call).expect("it starts"));
        let broadcast = || exercise(rank, Kind::Broadcast, 2 * ASKED, false, 0).expect("it starts");
        if rank.rank == 1 {
            // The other has begun all, and has no pinned memory made for the last.
            met.wait();
            for work in start() {
                work.wait(deadline()).expect("it ends well");
            }
            met.wait();
            let result = broadcast().wait(deadline());
            met.wait();
            result.expect("it ends well");
            return rank.drain();
        }
        let first = start();
        let before = rank.double.registered();
        let last = broadcast();
        let made = rank.double.registered() - before;
        met.wait();
        for work in first {
            work.wait(deadline()).expect("it ends well");
        }
        // The first piece has been loaded by way of the spare lane, and waits for the other rank.
        let Membership::Group(group) = rank.context.membership() else { panic!("a group") };
        let until = deadline();
        while group.endpoint().messages().operations() == 0 && !until.expired() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let spare = Hoard::of_spare(&rank.devices, 0);
        // The last one has a lane of its own.
        drop(Hoard::of_new(&rank.devices, 0, 2 * 4 * ASKED));
        met.wait();
        // And the other rank has both.
        met.wait();
        // Time for what comes too early.
        std::thread::sleep(Duration::from_millis(50));
        assert!(made == 0 && spare.is_some(), "{made} bytes were pinned for it, or the spare lane is in use");
        drop(spare);
        last.wait(deadline()).expect("it ends well");
        rank.drain()
    });
    complaints.concat()
}

#[test]
fn a_root_whose_first_piece_waits_for_pinned_memory_keeps_its_stream_though_the_last_is_stored() {
    for couriers in [true, false] {
        assert_eq!(store_last_first(couriers), Vec::<String>::new(), "couriers: {couriers}");
    }
}

/// It would ask the driver in its course, which would wait for the courier behind it.
#[test]
fn a_call_without_a_stream_has_its_pinned_memory_made_before_it_begins() {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        make_pinned_memory_scarce(rank);
        let long = rank.memory(&[1; LONG]);
        let sum = |count| request(Kind::Allreduce, long, long, count, 0);
        let counts = Counts::Exchange { send: vec![LONG as u64; 2], receive: vec![LONG as u64; 2] };
        let [from, into] = [(); 2].map(|()| rank.memory(&[1; 2 * LONG]));
        let lists = Request { counts, ..request(Kind::Alltoall, from, into, 0, 0) };
        let gate = rank.gate_default(0);
        let works = [(sum(LONG as u64), Call::default()), (lists, Call::default()), (sum(1), rank.call())]
            .map(|(request, call)| rank.start(&request, &call).expect("it starts"));
        let pinned = rank.double.registered();
        rank.double.hold_lock(Waiting::All, Duration::from_secs(3));
        gate.release();
        for work in works {
            work.wait(deadline()).expect("it ends well");
        }
        assert_eq!(rank.double.registered(), pinned);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn a_call_that_is_refused_waits_for_no_stream() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let first = exercise(rank, Kind::Allreduce, 201, false, 0).expect("it starts");
        first.wait(deadline()).expect("it ends well");
        assert_eq!(rank.drain(), Vec::<String>::new());
        met.wait();
        // The program's stream waits for something that has nothing to do with the group, or comes behind the
        // refused calls.
        rank.double.hold_lock(Waiting::Seen, Duration::from_secs(3));
        let gate = rank.gate();
        rank.context.abort();
        let memory = rank.memory(&[0; 2000]);
        let stream = Some(rank.double.stream(0));
        let refused = |request: &Request| {
            let refused = rank.start(request, &Call { stream, ..Call::default() });
            assert!(refused.is_err(), "the group has failed");
        };
        refused(&request(Kind::Allreduce, memory, memory, 2000, 0));
        // Message by message.
        let counts = Counts::Blocks(vec![500; 2]);
        refused(&Request { counts, ..request(Kind::Gather, memory, memory + 4000, 0, rank.rank) });
        gate.release();
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn a_call_whose_stream_waits_asks_nothing_of_what_others_have_left() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
        exercise(rank, Kind::Allreduce, 201, false, 0)
            .expect("it starts")
            .wait(deadline())
            .expect("it ends well");
        // A load that nobody waits for any more, to which its stream has not come: as of a sparse call that
        // was given up. SAFETY: a stream of the double lives as long as that.
        let other = unsafe { Stream::borrow(&rank.devices, 0, rank.double.stream(0)) }.expect("a stream");
        let memory = rank.memory(&[0; 16]);
        // SAFETY: the double keeps its memory.
        let load = || drop(unsafe { Load::begin(&other, &[(memory, 64)], None) }.expect("it begins"));
        let late = rank.devices.word(0).expect("a word");
        other.wait_word(&late).expect("it waits");
        load();
        let gate = rank.gate();
        let works =
            [1, 2].map(|round| exercise(rank, Kind::Allreduce, 201, false, round).expect("it starts"));
        // Both have one pool: what is asked of one's driver by then is not held up by the other's.
        met.wait();
        rank.double.hold_lock(Waiting::All, Duration::from_secs(3));
        std::thread::scope(|scope| {
            scope.spawn(|| rank.double.launch_first(0));
            // By then it waits in the driver; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            scope.spawn(load);
            std::thread::sleep(Duration::from_millis(20));
            gate.release();
            for work in works {
                work.wait(deadline()).expect("it ends well");
            }
            late.release();
        });
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// What the driver waits for may be a stream, and that for a call of the group that has to end: the double
/// complains of driver calls that keep those from it.
#[test]
fn a_receive_whose_message_is_there_begins_with_nothing_locked() {
    let complaints = ranks(2, "shm,tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        let (into, mut words) = (rank.memory(&[0; 2]), [7i32, 8]);
        let host = words.as_mut_ptr().addr() as u64;
        let message = |kind, address, count, tag| {
            let (from, to) = if kind == Kind::Send { (address, 0) } else { (0, address) };
            (request(kind, from, to, count, 1 - rank.rank), Call { tag: Some(tag), ..Call::default() })
        };
        let run = |(request, call): (Request, Call)| rank.run(&request, &call).expect("a message");
        for (tag, kind) in (0..).step_by(2).zip([Kind::Receive, Kind::ReceiveAny]) {
            if rank.rank == 1 {
                run(message(Kind::Send, host, 2, tag));
                run(message(Kind::Send, host, 1, tag + 1));
                continue;
            }
            // The first comes before it.
            run(message(Kind::Receive, host, 1, tag + 1));
            let (request, call) = message(kind, into, 2, tag);
            rank.start(&request, &call).expect("it starts").wait(deadline()).expect("a message");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
