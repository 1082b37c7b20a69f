//! Calls that fail when their stream has been given some of them: the exchange lasts until that is done, and
//! so long nobody has the memory back.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};

use super::points::point;
use super::*;
use crate::communicator::hosts::tests::members::{DRIVER, LOADS};
use crate::cuda::double::{Clock, Refusal};
use crate::cuda::queues::MOST;
use crate::cuda::word::Word;
use crate::engine::device::{Meets, Occasion, Setup, Step};
use crate::signature::Making;

/// Runs `body` on the first of two ranks of one process, whose GPUs exchange. The other rank makes no call.
/// What it answers, and the driver; both contexts are gone.
fn first_of_two<T: Send>(body: impl Fn(&Context, &Seat) -> T + Sync) -> (T, Arc<Double>, Arc<Devices>) {
    let (double, devices) = process(2);
    let (store, met) = (Arc::new(HashStore::new()), Barrier::new(2));
    let answer = std::thread::scope(|scope| {
        let [first, second] = [0, 1].map(|rank| {
            let seat: Seat = (double.clone(), devices.clone(), rank);
            let (store, body, met) = (store.clone(), &body, &met);
            scope.spawn(move || {
                DRIVER.set(Some(seat.0.clone()));
                let context = Context::create(options(rank, 2, &store, "")).expect("ranks meet");
                meet(&[(&context, rank)], || Ok(seat.1.clone()), choose, LOADS.exchange)
                    .expect("an agreement");
                met.wait();
                if rank == 1 {
                    until("the end", || context.failure().is_some());
                    return None;
                }
                let answer = body(&context, &seat);
                context.abort();
                Some(answer)
            })
        });
        second.join().expect("a rank");
        first.join().expect("a rank").expect("the first answers")
    });
    (answer, double, devices)
}

/// Memory of the first GPU for a sum, and a stream of it whose next work waits for a gate.
pub(super) fn behind_a_gate(double: &Double, devices: &Arc<Devices>) -> (u64, StreamHandle, Word) {
    let (output, stream, gate) = (double.memory(0, 4), double.stream(0), devices.word(0).expect("a word"));
    // SAFETY: it lives as long as the double.
    let borrowed = unsafe { Stream::borrow(devices, 0, stream) }.expect("a stream");
    borrowed.wait_word(&gate).expect("it waits");
    (output, stream, gate)
}

/// Does something behind a gate. That opens in the end, so that who waits for ever ends, too, and well.
pub(super) fn while_closed<T>(gate: &Word, body: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            while !is_over.load(Ordering::Relaxed) && start.elapsed() < PATIENCE / 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
            gate.release();
        });
        let answer = body();
        is_over.store(true, Ordering::Relaxed);
        answer
    })
}

/// What a first of two ranks has launched waits for a gate.
fn sum_behind_a_gate() -> (Word, Arc<Double>, Arc<Devices>) {
    first_of_two(|context, (double, devices, _)| {
        let (output, stream, gate) = behind_a_gate(double, devices);
        // SAFETY: the double trusts no addresses.
        unsafe { sum(context, 1, output, Some(stream), PATIENCE).launch() }.expect("a launch");
        gate
    })
}

/// Tries `body` with the driver refusing one call, the first, the second and so on up to `calls`. Side by
/// side: most of them wait.
pub(super) fn refusing(calls: usize, body: impl Fn(usize) + Sync) {
    for first in (0..calls).step_by(16) {
        std::thread::scope(|scope| {
            let body = &body;
            (first..first + 16).for_each(|refused| drop(scope.spawn(move || body(refused))));
        });
    }
}

/// More driver calls than a sum is given to its stream by.
const CALLS: usize = 64;

/// Has what is over of exchanges given back: one rank says so, then the other's is, too.
pub(super) fn sweep(devices: &Arc<Devices>) {
    (0..2).for_each(|_| devices.give_back());
}

/// What has been given to `double` waits for a gate: nothing is given back before that opens. The bytes of
/// both devices that are left afterwards.
fn lasts_until_the_gate_opens(double: &Double, devices: &Arc<Devices>, open: impl FnOnce()) -> [usize; 2] {
    sweep(devices);
    assert_eq!(double.complaints(), Vec::<String>::new());
    open();
    double.drain();
    sweep(devices);
    assert_eq!(double.complaints(), Vec::<String>::new());
    [0, 1].map(|device| double.allocated(device))
}

/// What is left when all is given back: the test's own.
const OWN: [usize; 2] = [4, 0];

/// A watchdog aborts one communicator after the other. What frees memory waits for all that runs on the GPU,
/// also for kernels of a communicator that its thread comes to next.
#[test]
fn who_ends_an_aborted_communicator_does_not_wait_for_another_on_its_gpu() {
    let seats = processes(2);
    let (stores, all) = ([(); 2].map(|()| Arc::new(HashStore::new())), Barrier::new(2));
    std::thread::scope(|scope| {
        for (rank, (double, devices, device)) in (0..).zip(&seats) {
            let (stores, all, device) = (&stores, &all, *device);
            scope.spawn(move || {
                let [first, second] = stores.each_ref().map(|store| {
                    let context = Context::create(options(rank, 2, store, "")).expect("ranks meet");
                    meet(&[(&context, device)], || Ok(devices.clone()), choose, words).expect("an agreement");
                    context
                });
                let (output, stream) = (double.memory(device, 4), double.stream(device));
                // SAFETY: the double trusts no addresses.
                let launch = || unsafe { sum(&second, 1, output, Some(stream), PATIENCE).launch() };
                if rank == 0 {
                    double.hold_lock(Waiting::Seen, Duration::from_secs(2));
                    launch().expect("a launch");
                    first.abort();
                }
                until("the abort", || first.failure().is_some());
                // Whoever is the last to leave it finds it over.
                let first = (rank == 0).then_some(first);
                all.wait();
                drop(first);
                all.wait();
                if rank == 1 {
                    launch().expect("a launch");
                }
                second.settle(Deadline::after(PATIENCE)).expect("both have launched");
                double.free(output);
            });
        }
    });
    for (double, devices, device) in &seats {
        assert_eq!(double.complaints(), Vec::<String>::new());
        until("all is given back", || {
            sweep(devices);
            double.allocated(*device) == 0
        });
    }
}

/// Nothing else ends the kernel for which a thread of the program waits with the driver's lock. The double
/// complains when nothing moves any more.
#[test]
fn who_aborts_or_leaves_while_the_driver_does_not_answer_ends_its_kernels() {
    for ends in [Context::abort, |context: &Context| context.leave(|| Rest::Known(true))] {
        let ((), double, _) = first_of_two(|context, (double, _, _)| {
            let (output, stream) = (double.memory(0, 4), double.stream(0));
            double.hold_lock(Waiting::All, PATIENCE / 4);
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, Some(stream), Duration::MAX).launch() }.expect("a launch");
            std::thread::scope(|scope| {
                scope.spawn(|| double.launch_first(0));
                until("the lock", || double.is_held());
                ends(context);
            });
        });
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

/// The same where the kernel is of another communicator: the driver answers nobody before that is aborted.
#[test]
fn who_ends_an_aborted_communicator_does_not_wait_for_a_driver_that_waits_for_another() {
    for has_window in [false, true] {
        let stores = [(); 2].map(|()| Arc::new(HashStore::new()));
        std::thread::scope(|scope| {
            for (rank, seat) in (0..).zip(processes(2)) {
                let stores = &stores;
                scope.spawn(move || end_one_after_the_other(rank, &seat, stores, has_window));
            }
        });
    }
}

/// As a rank of two communicators: the kernel is of the second.
fn end_one_after_the_other(rank: u32, seat: &Seat, stores: &[Arc<HashStore>; 2], has_window: bool) {
    let (double, devices, device) = seat;
    DRIVER.set(Some(double.clone()));
    let [first, second] = stores.each_ref().map(|store| {
        let context = Context::create(options(rank, 2, store, "")).expect("ranks meet");
        meet(&[(&context, *device)], || Ok(devices.clone()), choose, LOADS.exchange).expect("an agreement");
        context
    });
    let window = has_window.then(|| {
        let memory = double.memory(*device, 5 * windows::MIB as usize);
        windows::window(&first, memory, 4 * windows::MIB).expect("a window")
    });
    captures::barrier(&second);
    if rank == 1 {
        until("the news", || second.failure().is_some());
        return;
    }
    double.hold_lock(Waiting::All, PATIENCE / 4);
    let (output, stream) = (double.memory(*device, 4), double.stream(*device));
    // SAFETY: the double trusts no addresses.
    unsafe { sum(&second, 1, output, Some(stream), Duration::MAX).launch() }.expect("a launch");
    std::thread::scope(|scope| {
        scope.spawn(|| double.launch_first(*device));
        until("the lock", || double.is_held());
        first.abort();
        drop((window, first));
        second.abort();
    });
    assert_eq!(double.complaints(), Vec::<String>::new());
    drop(second);
    until("all to be given back", || {
        devices.give_back();
        double.mapped_memory() == 0
    });
}

/// The driver refuses one call, or the next, too, by which the exchange would know when what is left is done.
/// Then it is kept.
#[test]
fn an_exchange_lasts_until_what_a_call_has_left_that_failed_in_its_course_is_done() {
    for times in [1, 2] {
        let [refused, kept] = [(); 2].map(|()| AtomicUsize::new(0));
        refusing(CALLS, |after| {
            let (gate, double, devices) = first_of_two(|context, (double, devices, _)| {
                let (output, stream, gate) = behind_a_gate(double, devices);
                double.refuse(Refusal { after, times, ..Refusal::default() });
                // SAFETY: the double trusts no addresses.
                drop(unsafe { sum(context, 1, output, Some(stream), PATIENCE).start() });
                refused.fetch_add(usize::from(!double.is_to_fail()), Ordering::Relaxed);
                double.fail_call(usize::MAX);
                gate
            });
            lasts_until_the_gate_opens(&double, &devices, || gate.release());
            // What was over when its context ended is another thread's to give back.
            let patience = if times == 1 { PATIENCE } else { Duration::from_millis(100) };
            let (start, left) = (Instant::now(), || [0, 1].map(|device| double.allocated(device)));
            while left() != OWN && start.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(1));
            }
            kept.fetch_add(usize::from(left() != OWN), Ordering::Relaxed);
        });
        let [refused, kept] = [refused, kept].map(AtomicUsize::into_inner);
        assert!((20..CALLS).contains(&refused), "{refused} calls were refused, and not all were needed");
        match times {
            1 => assert_eq!(kept, 0, "all is given back in the end"),
            _ => assert!(kept > 10, "{kept} were kept"),
        }
    }
}

/// What becomes of a rank that makes no call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Other {
    Stays,
    Leaves,
    Aborts,
}

/// What a stream is given.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Given {
    Sum,
    Receive,
    Graph,
}

/// A graph has no deadline, nor need a call have one where the other has left.
#[test]
fn what_streams_were_given_ends_though_its_context_is_gone() {
    for (given, other) in [
        (Given::Sum, Other::Stays),
        (Given::Sum, Other::Leaves),
        (Given::Receive, Other::Leaves),
        (Given::Graph, Other::Aborts),
    ] {
        let (double, devices) = process(2);
        let _clock = Clock::start(&double);
        let (store, gone, ended) = (Arc::new(HashStore::new()), Barrier::new(2), Barrier::new(2));
        let join = |rank: u32, store: &Arc<HashStore>| {
            DRIVER.set(Some(double.clone()));
            let context = Context::create(options(rank, 2, store, "")).expect("ranks meet");
            meet(&[(&context, rank)], || Ok(devices.clone()), choose, LOADS.exchange).expect("an agreement");
            context
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let context = join(0, &store);
                let (output, stream) = (double.memory(0, 4), double.stream(0));
                if given == Given::Graph {
                    double.begin_capture(stream, 0);
                }
                let timeout = if other == Other::Leaves { Duration::MAX } else { Duration::from_millis(200) };
                let mut call = match given {
                    Given::Receive => point(&context, output, 4, Direction::Receive, Some(stream)),
                    Given::Sum | Given::Graph => sum(&context, 1, output, Some(stream), timeout),
                };
                call.caller.timeout = Some(timeout);
                // SAFETY: the double trusts no addresses.
                unsafe { call.launch() }.expect("a launch");
                if given == Given::Graph {
                    let graph = double.end_capture(stream, 0).expect("a graph");
                    double.launch_graph(&graph, stream, 0);
                }
                drop(context);
                gone.wait();
                until("the stream's end", || double.is_idle());
                ended.wait();
            });
            scope.spawn(|| {
                let context = join(1, &store);
                gone.wait();
                if other == Other::Aborts {
                    context.abort();
                }
                let _kept = (other != Other::Leaves).then_some(context);
                ended.wait();
            });
        });
        // Then their groups are gone, too.
        until("what they had", || {
            sweep(&devices);
            [0, 1].map(|device| double.allocated(device)) == OWN
        });
        assert_eq!(double.complaints(), Vec::<String>::new(), "{given:?}, the other {other:?}");
    }
}

/// One of two ranks of a process, whose GPUs exchange.
fn join(rank: u32, store: &Arc<HashStore>, (double, devices): (&Arc<Double>, &Arc<Devices>)) -> Context {
    DRIVER.set(Some(double.clone()));
    let context = Context::create(options(rank, 2, store, "")).expect("ranks meet");
    meet(&[(&context, rank)], || Ok(devices.clone()), choose, LOADS.exchange).expect("an agreement");
    context
}

/// Its board says that it leaves, before its part in the exchange ends.
#[test]
fn who_waits_for_a_gpu_whose_rank_has_left_hears_though_it_holds_its_context() {
    for given in [Given::Sum, Given::Receive] {
        let (double, devices) = process(2);
        let _clock = Clock::start(&double);
        let (store, ended) = (Arc::new(HashStore::new()), Barrier::new(2));
        let join = |rank: u32| join(rank, &store, (&double, &devices));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let context = join(0);
                let (output, stream) = (double.memory(0, 4), double.stream(0));
                let mut call = match given {
                    Given::Receive => point(&context, output, 4, Direction::Receive, Some(stream)),
                    _ => sum(&context, 1, output, Some(stream), Duration::MAX),
                };
                call.caller.timeout = Some(Duration::MAX);
                // SAFETY: the double trusts no addresses.
                unsafe { call.launch() }.expect("a launch");
                let start = Instant::now();
                while context.failure().is_none() && start.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let why = context.failure();
                ended.wait();
                let error = why.expect("rank 1 never comes");
                // Of a collective it may be told why, if it has asked by then.
                assert!([Status::PeerFailed, Status::Aborted].contains(&error.status()), "{error}");
                assert!(error.text().contains("rank 1"), "{error}");
                until("the stream's end", || double.is_idle());
            });
            scope.spawn(|| {
                let context = join(1);
                context.leave(|| Rest::Known(true));
                ended.wait();
                drop(context);
            });
        });
        assert_eq!(double.complaints(), Vec::<String>::new(), "{given:?}");
    }
}

/// Its own would have to be replayed with them, and a replay has no deadline.
#[test]
fn graphs_of_others_do_not_wait_for_who_leaves_at_rest() {
    for captures_first in [true, false] {
        let (double, devices) = process(2);
        let _clock = Clock::start(&double);
        let (store, captured, left) = (Arc::new(HashStore::new()), Barrier::new(2), Barrier::new(2));
        let join = |rank: u32| join(rank, &store, (&double, &devices));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let context = join(0);
                let (output, stream) = (double.memory(0, 4), double.stream(0));
                if !captures_first {
                    left.wait();
                }
                double.begin_capture(stream, 0);
                // SAFETY: the double trusts no addresses.
                let launched = unsafe { sum(&context, 1, output, Some(stream), Duration::MAX).launch() };
                let graph = double.end_capture(stream, 0).expect("a graph");
                if captures_first {
                    launched.expect("rank 1 is there");
                    double.launch_graph(&graph, stream, 0);
                    captured.wait();
                    until("the failure", || context.failure().is_some());
                } else {
                    let error = launched.err().expect("a replay would wait for rank 1");
                    assert_eq!(error.status(), Status::PeerFailed, "{error}");
                    assert!(error.text().contains("rank 1") && error.text().contains("has left"), "{error}");
                }
                until("the stream's end", || double.is_idle());
            });
            scope.spawn(|| {
                let context = join(1);
                if captures_first {
                    captured.wait();
                }
                context.leave(|| Rest::Known(true));
                if !captures_first {
                    left.wait();
                }
            });
        });
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

/// What ran on it is over.
#[test]
fn an_exchange_whose_device_is_lost_is_given_back() {
    let (gate, double, devices) = sum_behind_a_gate();
    sweep(&devices);
    assert_ne!([0, 1].map(|device| double.allocated(device)), OWN, "the stream has not come to it");
    double.refuse(Refusal { times: usize::MAX, call: Some("cuEventQuery"), ..Refusal::default() });
    sweep(&devices);
    assert_eq!([0, 1].map(|device| double.allocated(device)), OWN);
    gate.release();
}

#[test]
fn an_exchange_lasts_though_the_driver_refuses_to_say_whether_it_is_done() {
    for failing in 0..12 {
        let (gate, double, devices) = sum_behind_a_gate();
        double.fail_call(failing);
        sweep(&devices);
        double.fail_call(usize::MAX);
        let left = lasts_until_the_gate_opens(&double, &devices, || gate.release());
        assert_eq!(left, OWN, "all is given back in the end");
    }
}

/// Those that name a stream and those that do not, in turn.
#[test]
fn a_call_that_the_driver_refuses_ends_when_its_stream_is_through_with_it() {
    refusing(CALLS, |failing| {
        let ((), double, _) = first_of_two(|context, (double, _, _)| {
            let (output, stream) = (double.memory(0, 4), (failing % 2 == 0).then(|| double.stream(0)));
            double.fail_call(failing);
            let call = sum(context, 1, output, stream, Duration::from_millis(100));
            // SAFETY: the double trusts no addresses.
            let ended = unsafe { call.start() }.and_then(|work| work.wait(Deadline::after(PATIENCE)));
            ended.expect_err("the other rank does not call");
            double.fail_call(usize::MAX);
            // Its memory is the caller's again.
            double.free(output);
        });
        assert_eq!(double.complaints(), Vec::<String>::new(), "call {failing}");
    });
}

/// A message concerns two ranks, but its kernels end by the failure of all.
#[test]
fn a_message_that_the_driver_has_no_memory_for_ends_when_its_stream_is_through_with_it() {
    refusing(CALLS, |after| {
        let ((), double, _) = first_of_two(|context, (double, _, _)| {
            let (memory, stream) = (double.memory(0, 4), (after % 2 == 0).then(|| double.stream(0)));
            let direction = if after % 4 < 2 { Direction::Send } else { Direction::Receive };
            double.refuse(Refusal { after, status: Status::OutOfMemory, ..Refusal::default() });
            let message = point(context, memory, 4, direction, stream);
            let caller = Caller { timeout: Some(Duration::from_millis(100)), ..message.caller };
            // SAFETY: the double trusts no addresses.
            let work = unsafe { OnDevices { caller, ..message }.start() };
            let ended = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
            ended.expect_err("the other rank does not call");
            double.fail_call(usize::MAX);
            // Its memory is the caller's again.
            double.free(memory);
        });
        assert_eq!(double.complaints(), Vec::<String>::new(), "call {after}");
    });
}

#[test]
fn a_driver_that_does_not_say_whether_a_call_is_done_is_told_with_its_rank() {
    let failures = ranks(&processes(2), words, |context, (double, _, device)| {
        if context.rank() == 0 {
            let output = double.memory(*device, 4);
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, None, PATIENCE).launch() }.expect("a launch");
            double.refuse(Refusal { times: usize::MAX, call: Some("cuEventQuery"), ..Refusal::default() });
        }
        until("it is told", || context.failure().is_some());
        double.fail_call(usize::MAX);
        context.failure().expect("it has failed")
    });
    for failure in failures {
        assert_eq!(failure.status(), Status::Cuda);
        assert!(failure.text().contains("rank 0 of 'default'"), "{failure}");
    }
}

/// A copy within a rank, of 400 bytes.
fn copy_alone(input: u64, output: u64) -> Request {
    Request {
        kind: Kind::Allreduce,
        input: std::ptr::with_exposed_provenance(input as usize),
        output: std::ptr::with_exposed_provenance_mut(output as usize),
        counts: Counts::Uniform(100),
        dtype: DataType::U32,
        operator: Operator::Sum,
        root: 0,
    }
}

#[test]
fn a_call_of_a_group_of_one_without_a_stream_has_its_deadline_and_touches_nothing_beyond_it() {
    let (double, devices) = process(1);
    let context = Context::create(options(0, 1, &Arc::new(HashStore::new()), "")).expect("a group of one");
    context.cuda().pretend(&devices, 256);
    let [input, output] = [(); 2].map(|()| double.memory(0, 400));
    let (before, request) = (double.peek(output, 400), copy_alone(input, output));
    double.fill(StreamHandle::LEGACY, 0, input, &[7; 400]);
    let gate = devices.word(0).expect("a word");
    // SAFETY: it is there as long as the device.
    let stream = unsafe { Stream::borrow(&devices, 0, StreamHandle::LEGACY) }.expect("the default stream");
    stream.wait_word(&gate).expect("it waits");
    let call = Call { timeout: Some(Duration::from_millis(50)), on_device: true, ..Call::default() };
    let nothing = Request { counts: Counts::Uniform(0), ..request.clone() };
    // SAFETY: the double trusts no addresses.
    let run = |request| unsafe { context.run(request, &call) };
    for ended in while_closed(&gate, || [&request, &nothing].map(run)) {
        let error = ended.map(drop).expect_err("the default stream does not come to it");
        assert_eq!(error.status(), Status::Timeout, "{error}");
    }
    double.drain();
    assert_eq!(double.peek(output, 400), before);
    // The context goes on.
    // SAFETY: as above.
    unsafe { context.run(&request, &Call::default()) }.expect("a copy");
    assert_eq!(double.peek(output, 400), [7; 400]);
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// A deadline of the call's own, of its context, or of that one's parent.
#[test]
fn the_work_of_a_group_of_one_ends_at_its_deadline() {
    for whose in ["call", "context", "parent"] {
        let (double, devices) = process(1);
        let short = Duration::from_millis(50);
        let mut made = options(0, 1, &Arc::new(HashStore::new()), "");
        if whose != "call" {
            made.timeout = short;
        }
        let mut context = Context::create(made).expect("a group of one");
        if whose == "parent" {
            context = context.split(Some(0), 0).expect("a child").expect("it is a member");
        }
        context.cuda().pretend(&devices, 256);
        let [input, output] = [(); 2].map(|()| double.memory(0, 400));
        let (_, stream, gate) = behind_a_gate(&double, &devices);
        let call =
            Call { timeout: (whose == "call").then_some(short), stream: Some(stream), ..Call::default() };
        // SAFETY: the double trusts no addresses.
        let work = unsafe { context.start(&copy_alone(input, output), &call) }.expect("it is given");
        let error = while_closed(&gate, || work.wait(Deadline::NEVER)).map(drop).expect_err("it is late");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("call->stream of GPU 0 is not through with a call of"), "{error}");
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
        context.abort();
        let child = context.split(Some(1), 0).map(|child| child.is_some());
        assert_eq!(child.map_err(|error| error.status()), Err(Status::Aborted));
    }
}

/// Its stream has come to it; then the device does not get on. By copies, or scaled on the host.
#[test]
fn a_group_of_one_waits_for_its_own_copies_no_longer_than_for_its_stream() {
    for scaled in [false, true] {
        let (double, devices) = process(1);
        let context =
            Context::create(options(0, 1, &Arc::new(HashStore::new()), "")).expect("a group of one");
        context.cuda().pretend(&devices, 256);
        let [input, output] = [(); 2].map(|()| double.memory(0, 404));
        double.fill(StreamHandle::LEGACY, 0, input, &[7; 404]);
        // Copies stand in one queue, behind one that waits.
        double.share_queues(MOST, 1);
        let (held, gate) =
            (Stream::new(&devices, 0, false).expect("a stream"), devices.word(0).expect("a word"));
        held.wait_word(&gate).expect("it waits");
        double.fill(held.handle(), 0, double.memory(0, 4), &[0; 4]);
        // No kernel scales what does not lie at a multiple of an element's size.
        let request = match scaled {
            true => Request {
                dtype: DataType::F32,
                operator: Operator::PreMulSum(1.0),
                ..copy_alone(input + 2, output + 2)
            },
            false => copy_alone(input, output),
        };
        let call = Call { timeout: Some(Duration::from_millis(500)), on_device: true, ..Call::default() };
        // SAFETY: the double trusts no addresses.
        let ended = while_closed(&gate, || unsafe { context.run(&request, &call) });
        let error = ended.map(drop).expect_err("its copies wait");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("has begun a call of"), "{error}");
        double.drain();
        // The context goes on.
        // SAFETY: as above.
        unsafe { context.run(&copy_alone(input, output), &Call::default()) }.expect("a copy");
        assert_eq!(double.peek(output, 400), [7; 400]);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn a_copy_that_nobody_else_takes_part_in_ends_when_its_stream_is_through_with_it() {
    for failing in 0..48 {
        let (double, devices) = process(1);
        let context =
            Context::create(options(0, 1, &Arc::new(HashStore::new()), "")).expect("a group of one");
        context.cuda().pretend(&devices, 256);
        let [input, output] = [(); 2].map(|()| double.memory(0, 400));
        let request = copy_alone(input, output);
        let call = Call { stream: Some(double.stream(0)), ..Call::default() };
        double.fail_call(failing);
        // SAFETY: the double trusts no addresses.
        let work = unsafe { context.start(&request, &call) };
        let _ = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        double.fail_call(usize::MAX);
        // Its memory is the caller's again.
        double.free(output);
        assert_eq!(double.complaints(), Vec::<String>::new(), "call {failing}");
    }
}

/// It may leave for what the group has failed with, and the news of that takes longer.
#[test]
fn a_rank_that_says_goodbye_to_the_exchange_is_not_the_cause_at_once() {
    let (left, ended) = (OnceLock::new(), Barrier::new(2));
    ranks(&processes(2), words, |context, (_, devices, device)| {
        // Whose links stay when it is gone.
        let context_of_both = context.duplicate().expect("the same ranks");
        meet(&[(&context_of_both, *device)], || Ok(devices.clone()), choose, words).expect("an agreement");
        let mut time = Duration::MAX;
        if context.rank() == 0 {
            let Membership::Group(group) = context_of_both.membership() else { panic!("two ranks") };
            let exchange = group.devices().and_then(Way::exchange).expect("they exchange");
            until("rank 1 to be missed", || exchange.deserter(group, Meets::All(1)) == Some(1));
            time = left.get().map_or(Duration::ZERO, Instant::elapsed);
        } else {
            left.set(Instant::now()).expect("once");
            drop(context_of_both);
        }
        ended.wait();
        assert!(time >= Duration::from_millis(100), "{time:?}");
    });
}

/// Has the ranks' GPUs agree, but that this one `gives_up` before it has heard the last round.
fn agree_in_part(context: &Context, (_, devices, device): &Seat, gives_up: bool) {
    let Membership::Group(group) = context.membership() else { panic!("a group") };
    let occasion = Occasion { first: None, points: true };
    let (mut setup, mut step) =
        Setup::begin(group, Ok(devices.clone()), *device, choose, only(words), occasion, 0);
    for round in 0..3 {
        let Step::Gather(message) = step else { panic!("it has no round {round}") };
        let gathered = context.gather_all(group, &message, Making::Connect).expect("all tell");
        if round == 2 && gives_up {
            return;
        }
        step = setup.next(&gathered).expect("they go on");
    }
    assert!(matches!(step, Step::Agreed(Way::Exchange(_))));
}

/// Whoever has it ends it when the ranks have another, whose boards may lie where the first one's were.
#[test]
fn a_rank_that_gives_an_exchange_up_is_gone_for_who_has_it_and_hears_of_its_end_in_no_other() {
    ranks(&processes(2), words, |context, seat| {
        let (double, devices, device) = seat;
        let gives_up = context.rank() == 0;
        let [first, second] = [(); 2].map(|()| context.duplicate().expect("the same ranks"));
        agree_in_part(&first, seat, gives_up);
        meet(&[(&second, *device)], || Ok(devices.clone()), choose, words).expect("an agreement");
        let memory = first.held_memory();
        assert_eq!(memory.is_none(), gives_up);
        drop(first);
        sweep(devices);
        captures::barrier(context);
        if !gives_up {
            // Longer than it takes until who has left is missed.
            std::thread::sleep(Duration::from_millis(300));
        }
        let output = double.memory(*device, 4);
        run(&sum(&second, 1, output, None, PATIENCE)).expect("the other rank comes");
        assert_eq!(word(double, output), 1);
        let is_back = memory.is_none_or(|memory| memory.await_return(Deadline::after(PATIENCE / 4)));
        assert!(is_back, "nobody needs the memory of the first");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}
