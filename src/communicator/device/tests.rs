//! Ranks are threads, their processes driver doubles, their kernels words that they write to each other's
//! arenas.

mod captures;
mod groups;
mod leaving;
mod lined_up;
mod lists;
mod one_sided;
mod points;
mod refused;
mod stages;
mod suspended;
mod trouble;
mod windows;
mod words;

use std::time::{Duration, Instant};

use super::*;
use crate::communicator::{Options, Rendezvous, Rest};
use crate::cuda::double::{Double, Order, Waiting};
use crate::cuda::driver::StreamHandle;
use crate::cuda::event::Event;
use crate::cuda::exchange::Fault;
use crate::cuda::local::Kernels as Folds;
use crate::cuda::slab::SLAB_BYTES;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::device::Load;
use crate::error::{Error, Status};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::hash::HashStore;

use words::{late, narrow, not_on_rank_1, wide, words};

const PATIENCE: Duration = Duration::from_secs(60);

/// What a rank runs on: its process, and the device of it.
type Seat = (Arc<Double>, Arc<Devices>, u32);

fn process(devices: u32) -> (Arc<Double>, Arc<Devices>) {
    process_in(Order::RoundRobin, devices)
}

fn process_in(order: Order, devices: u32) -> (Arc<Double>, Arc<Devices>) {
    let double = Double::new(devices, order);
    let devices = Devices::over(double.clone()).unwrap();
    (double, devices)
}

/// Each rank a process with one device.
fn processes(size: u32) -> Vec<Seat> {
    processes_in(Order::RoundRobin, size)
}

fn processes_in(order: Order, size: u32) -> Vec<Seat> {
    (0..size).map(|_| process_in(order, 1)).map(|(double, devices)| (double, devices, 0)).collect()
}

/// Has the devices of ranks agree before any call.
fn meet(
    contexts: &[(&Context, u32)],
    devices: impl Fn() -> Result<Arc<Devices>> + Copy,
    choose: impl Fn(&Devices, u32) -> Result<Chosen> + Copy,
    load: Load,
) -> Result<()> {
    let candidate = |&(context, device)| Candidate { context, device, first: None, points: true };
    connect(&contexts.iter().map(candidate).collect::<Vec<_>>(), devices, choose, only(load))
}

fn options(rank: u32, size: u32, store: &Arc<HashStore>, name: &str) -> Options {
    Options {
        rank,
        size,
        rendezvous: Rendezvous::Store(store.clone()),
        name: name.into(),
        timeout: PATIENCE,
        interface: Some("127.0.0.1".into()),
        transports: Some("shm".into()),
        host: None,
    }
}

/// On one host, nothing is folded.
fn only(exchange: Load) -> Loads {
    fn none(_: &Arc<Devices>) -> Arc<dyn Folds> {
        panic!("nothing is composed here")
    }
    Loads { exchange, fold: none }
}

/// Runs `body` on a thread for each rank, its context connected with `load`.
fn ranks<T: Send>(seats: &[Seat], load: Load, body: impl Fn(&Context, &Seat) -> T + Sync) -> Vec<T> {
    let store = Arc::new(HashStore::new());
    let size = seats.len() as u32;
    std::thread::scope(|scope| {
        let spawn = |(rank, seat): (usize, &'_ Seat)| {
            let (store, body, seat) = (store.clone(), &body, seat.clone());
            scope.spawn(move || {
                let context = Context::create(options(rank as u32, size, &store, "")).expect("ranks meet");
                meet(&[(&context, seat.2)], || Ok(seat.1.clone()), choose, load).expect("an agreement");
                body(&context, &seat)
            })
        };
        let threads: Vec<_> = seats.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// Where a link may split a line whose parts have one number, no rank sends such lines.
#[test]
fn wide_lines_go_only_where_all_gpus_store_them_whole() {
    ranks(&processes(3), wide, |context, _| drop(exchange(context)));
    let seats = processes(3);
    seats[1].0.split_lines();
    ranks(&seats, narrow, |context, _| drop(exchange(context)));
}

fn exchange(context: &Context) -> (Arc<Group>, Arc<DeviceExchange>) {
    let Membership::Group(group) = context.membership() else { panic!("a group") };
    let Some(Way::Exchange(exchange)) = group.devices() else { panic!("{:?}", group.devices()) };
    (group.clone(), exchange.clone())
}

/// A sum of one word, on a stream.
fn sum(
    context: &Context,
    count: u64,
    output: u64,
    stream: Option<StreamHandle>,
    timeout: Duration,
) -> OnDevices {
    let (group, exchange) = exchange(context);
    let job = Job {
        kind: Kind::Allreduce,
        input: output,
        output,
        count,
        dtype: DataType::U32,
        operator: Operator::Sum,
        root: 0,
        max_blocks: 0,
    };
    let signature = Signature {
        kind: Kind::Allreduce,
        dtype: DataType::U32,
        operator: Operator::Sum.number(),
        algorithm: 0,
        root: 0,
        count,
        device: true,
    };
    let caller = Caller { stream, timeout: Some(timeout), memory: "sendbuf" };
    OnDevices { group, exchange, caller, what: What::Collective(job, signature) }
}

fn run(call: &OnDevices) -> Result<()> {
    // SAFETY: the double trusts no addresses.
    let enqueued = unsafe { call.enqueue() }?;
    call.work(enqueued)?.wait(Deadline::NEVER).map(drop)
}

fn word(double: &Double, address: u64) -> u32 {
    u32::from_ne_bytes(double.peek(address, 4).try_into().unwrap())
}

/// Waits until something is so.
fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn processes_agree_and_calls_meet_through_the_arenas() {
    let seats = processes(3);
    ranks(&seats, words, |context, (double, _, device)| {
        assert_eq!(context.device_way(), Some(Ok(())));
        let output = double.memory(*device, 4);
        for call in 1..=5 {
            run(&sum(context, 1, output, None, PATIENCE)).expect("a sum");
            assert_eq!(word(double, output), call);
        }
        assert!(double.allocated(*device) <= SLAB_BYTES + 4);
        // Destroyed side by side, as programs do.
    });
    for (double, devices, device) in &seats {
        // What a rank left behind is dropped when memory is asked for again, at the latest.
        let arena = crate::cuda::slab::Arena::new(devices, *device, 64, Deadline::NEVER).unwrap();
        drop(arena);
        assert_eq!(double.allocated(*device), 4, "the slab is gone");
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn calls_of_threads_without_a_context_make_none_on_another_device() {
    let seats: Vec<Seat> = (0..2).map(|_| process(2)).map(|(double, devices)| (double, devices, 1)).collect();
    ranks(&seats, words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 0);
        context.cuda().pretend_loads(only(words));
        let (output, stream) = (double.memory(*device, 4), double.stream(*device));
        let call = Call { stream: Some(stream), timeout: Some(PATIENCE), ..Call::default() };
        // SAFETY: the double trusts no addresses.
        let run = || unsafe { context.run(&groups::request(1, output), &call) }.map(drop);
        std::thread::scope(|scope| scope.spawn(run).join()).expect("it has called").expect("a sum");
        context.settle(Deadline::after(PATIENCE)).expect("all have called");
        assert_eq!(word(double, output), 1);
        assert!(!double.has_context(0), "it is not this rank's");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn devices_of_one_process_use_peer_access_and_one_slab_each() {
    let (double, devices) = process(4);
    let seats: Vec<Seat> = (0..4).map(|device| (double.clone(), devices.clone(), device)).collect();
    ranks(&seats, words, |context, (double, _, device)| {
        assert_eq!(context.device_way(), Some(Ok(())));
        let other = context.duplicate().expect("a child");
        meet(&[(&other, *device)], || Ok(seats[0].1.clone()), choose, words).expect("an agreement");
        assert_eq!(double.allocated(*device), SLAB_BYTES);
    });
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// What frees memory may wait for the process's GPUs, and their kernels for the rank that frees.
#[test]
fn ranks_of_one_process_free_nothing_once_others_may_call() {
    for _ in 0..5 {
        let (double, devices) = process(3);
        double.hold_lock(Waiting::All, Duration::from_secs(30));
        let seats: Vec<Seat> = (0..3).map(|device| (double.clone(), devices.clone(), device)).collect();
        ranks(&seats, words, |context, (double, _, device)| {
            let output = double.memory(*device, 4);
            run(&sum(context, 1, output, None, PATIENCE)).expect("a sum");
            assert_eq!(word(double, output), 1);
        });
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

/// The same where they agree that they do not exchange: what each has brought is freed before any may call.
#[test]
fn ranks_of_one_process_that_do_not_exchange_free_nothing_once_others_may_call() {
    // Both on one device; each on its own, where one has no kernels.
    for (load, count) in [(words as Load, 1), (not_on_rank_1, 2)] {
        for _ in 0..10 {
            let (double, devices) = process(count);
            let seats: Vec<Seat> =
                (0..2).map(|rank| (double.clone(), devices.clone(), rank % count)).collect();
            let streams = [0, 1].map(|rank| Stream::new(&devices, seats[rank].2, false).expect("a stream"));
            let words = [0, 1].map(|rank| devices.word(seats[rank].2).expect("a word"));
            double.hold_lock(Waiting::All, Duration::from_secs(30));
            let both = std::sync::Barrier::new(2);
            ranks(&seats, load, |context, _| {
                let rank = context.rank() as usize;
                assert!(context.device_way().expect("agreed").is_err());
                // As a call's stream waits for the other rank's call.
                streams[rank].wait_word(&words[rank]).expect("it waits");
                both.wait();
                words[rank].release();
            });
            assert_eq!(double.complaints(), Vec::<String>::new());
        }
    }
}

/// The one reason that all ranks give.
fn reason(seats: &[Seat], load: Load) -> String {
    let reasons = ranks(seats, load, |context, _| context.device_way().expect("agreed").unwrap_err());
    assert!(reasons.iter().all(|reason| *reason == reasons[0]), "{reasons:?}");
    for (double, _, device) in seats {
        assert_eq!(double.allocated(*device), 0, "{}: nothing is kept", reasons[0]);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
    reasons[0].clone()
}

#[test]
fn where_one_rank_cannot_no_rank_does() {
    let seats = processes(3);
    seats[1].0.forbid_sharing();
    let why = reason(&seats, words);
    assert!(why.contains("rank 0") && why.contains("rank 1's GPU shares no memory"), "{why}");

    let why = reason(&processes(3), not_on_rank_1);
    assert!(why.starts_with("rank 1 (") && why.contains("no kernels for this device"), "{why}");

    let (double, devices) = process(2);
    double.separate(0, 1);
    let why = reason(&[(double.clone(), devices.clone(), 0), (double, devices, 1)], words);
    assert!(why.contains("GPU 0 does not reach GPU 1"), "{why}");

    let (double, devices) = process(1);
    let why = reason(&[(double.clone(), devices.clone(), 0), (double, devices, 0)], words);
    assert_eq!(why, "ranks 0 and 1 are one process on one GPU (0)");

    // The first driver calls of a rank fail, one after the other.
    for index in [0, 5, 10, 15, 20, 25] {
        let seats = processes(2);
        seats[1].0.fail_call(index);
        let ways = ranks(&seats, words, |context, _| context.device_way().expect("agreed"));
        assert_eq!(ways[0], ways[1], "call {index}");
        if let Err(why) = &ways[0] {
            assert!(why.contains("rank 1") && why.contains("CUDA_ERROR_INJECTED"), "{why}");
        }
    }
}

/// How a rank chooses its table.
type Choose = fn(&Devices, u32) -> Result<Chosen>;

/// What connecting answers on two ranks that choose so.
fn choices(of: [Choose; 2]) -> Vec<Result<Result<(), String>>> {
    let seats = processes(2);
    let store = Arc::new(HashStore::new());
    let answers = std::thread::scope(|scope| {
        let spawn = |(rank, choose): (u32, Choose)| {
            let (store, devices) = (store.clone(), seats[rank as usize].1.clone());
            scope.spawn(move || {
                let context = Context::create(options(rank, 2, &store, "")).expect("ranks meet");
                meet(&[(&context, 0)], || Ok(devices.clone()), choose, words)?;
                Ok(context.device_way().expect("agreed"))
            })
        };
        let threads: Vec<_> = (0..).zip(of).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    for (double, _, _) in seats {
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
    answers
}

#[test]
fn ranks_exchange_by_one_table() {
    fn other(blocks: u32, by_hand: bool) -> Result<Chosen> {
        Ok(Chosen { table: Table { blocks, ..Table::default() }, by_hand })
    }
    let mine = |_: &Devices, _| other(8, true);
    assert_eq!(choices([mine, mine]), [Ok(Ok(())), Ok(Ok(()))]);

    for error in choices([mine, |_, _| other(16, true)]).into_iter().map(Result::unwrap_err) {
        assert_eq!(error.status(), Status::Mismatch);
        let text = error.text();
        assert!(text.contains("different tables: rank 0 (") && text.contains("rank 1 ("), "{text}");
        assert!(text.contains("give all ranks one UNISONO_TUNING"), "{text}");
    }
    for error in choices([mine, choose]).into_iter().map(Result::unwrap_err) {
        assert!(
            error.text().contains("has a file of its own") && error.text().contains("has no file"),
            "{error}"
        );
    }
    // Nobody has asked for that: they have different devices.
    for way in choices([|_, _| other(8, false), |_, _| other(16, false)]) {
        assert!(way.unwrap().unwrap_err().contains("different kinds of GPU"));
    }
    let bad =
        |_: &Devices, _| "unisono-tuning 1\nblocks 0".parse().map(|table| Chosen { table, by_hand: true });
    for error in choices([bad, mine]).into_iter().map(Result::unwrap_err) {
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.text().contains("rank 0 (") && error.text().contains("line 2: blocks 0"), "{error}");
    }
}

#[test]
fn one_thread_connects_all_its_ranks() {
    let (double, devices) = process(4);
    let store = Arc::new(HashStore::new());
    let contexts: Vec<Context> = std::thread::scope(|scope| {
        let create = |rank| Context::create(options(rank, 4, &store, "")).expect("ranks meet");
        let threads: Vec<_> = (0..4).map(|rank| scope.spawn(move || create(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: Vec<(&Context, u32)> = contexts.iter().zip(0..).collect();
    meet(&all, || Ok(devices.clone()), choose, words).expect("an agreement");
    // Again, it has nothing to do.
    meet(&all, || Ok(devices.clone()), choose, words).expect("an agreement");
    let calls: Vec<OnDevices> = contexts
        .iter()
        .zip(0..)
        .map(|(context, device)| sum(context, 1, double.memory(device, 4), None, PATIENCE))
        .collect();
    // SAFETY: the double trusts no addresses.
    let works: Vec<Work> =
        calls.iter().map(|call| call.work(unsafe { call.enqueue() }?)).collect::<Result<_>>().unwrap();
    for work in works {
        work.wait(Deadline::after(PATIENCE)).expect("a sum");
    }
    assert_eq!(double.complaints(), Vec::<String>::new());
}

#[test]
fn calls_on_two_streams_run_one_after_the_other() {
    let seats = processes(2);
    let words = ranks(&seats, words, |context, (double, _, device)| {
        let output = double.memory(*device, 4);
        let (first, second) = (double.stream(*device), double.stream(*device));
        let calls =
            [first, second, second, first].map(|stream| sum(context, 1, output, Some(stream), PATIENCE));
        // SAFETY: the double trusts no addresses.
        let given: Vec<Enqueued> = calls.iter().map(|call| unsafe { call.enqueue() }.unwrap()).collect();
        for (call, enqueued) in calls.iter().zip(given) {
            call.work(enqueued).unwrap().wait(Deadline::after(PATIENCE)).unwrap();
        }
        // Only where the stream changes, it waits.
        assert_eq!(double.waits(), 2);
        word(double, output)
    });
    // In turn, streams write 1, 2, 3, 4. A call that ran early would take its number back from a peer, and
    // hang.
    assert_eq!(words, [4, 4]);
}

#[test]
fn a_context_settles_when_its_device_has_done_what_it_was_given() {
    let [first_has_looked, both_have_settled] = [(); 2].map(|()| std::sync::Barrier::new(2));
    ranks(&processes(2), words, |context, (double, _, device)| {
        context.settle(Deadline::NEVER).expect("nothing was given");
        let call = sum(context, 1, double.memory(*device, 4), None, PATIENCE);
        let launch = || {
            // SAFETY: the double trusts no addresses.
            unsafe { call.launch() }.expect("a launch");
        };
        if context.rank() == 0 {
            launch();
            let error =
                context.settle(Deadline::after(Duration::from_millis(5))).expect_err("rank 1 is missing");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            assert!(!context.is_settled().expect("an answer"));
            first_has_looked.wait();
        } else {
            first_has_looked.wait();
            launch();
        }
        context.settle(Deadline::after(PATIENCE)).expect("both have called");
        // Or the other would hear of the failure before it has looked.
        both_have_settled.wait();
        if context.rank() == 0 {
            launch();
            context.abort();
            let error = context.settle(Deadline::after(PATIENCE)).expect_err("it was aborted");
            assert_eq!(error.status(), Status::Aborted, "{error}");
        } else {
            until("the news", || context.failure().is_some());
        }
    });
}

/// The driver would wait for the kernel then, with a lock that the other rank's launch may need, if they are
/// of one process.
#[test]
fn nothing_is_done_in_quiet_until_all_ranks_have_launched_what_one_has() {
    let check = |seats: &[Seat]| {
        let met = std::sync::Barrier::new(2);
        ranks(seats, words, |context, (double, devices, device)| {
            let is_quiet = |within: Duration| {
                let until = Deadline::after(within);
                devices.in_quiet(&|| !until.expired(), || ()).is_some()
            };
            let call = sum(context, 1, double.memory(*device, 4), None, PATIENCE);
            met.wait();
            if context.rank() == 0 {
                // SAFETY: the double trusts no addresses.
                unsafe { call.enqueue() }.expect("it is launched");
                assert!(!is_quiet(Duration::from_millis(50)), "the other rank has launched nothing");
                met.wait();
            } else {
                met.wait();
                // SAFETY: as above.
                unsafe { call.enqueue() }.expect("it is launched");
            }
            assert!(is_quiet(PATIENCE), "both have launched it");
            context.settle(Deadline::after(PATIENCE)).expect("it is done");
        });
    };
    check(&processes(2));
    let (double, devices) = process(2);
    let seats: Vec<Seat> = (0..2).map(|device| (double.clone(), devices.clone(), device)).collect();
    check(&seats);
}

#[test]
fn calls_that_differ_fail_on_both_sides_and_name_both() {
    fail_and_name_both(words);
}

#[test]
fn a_call_that_others_fail_before_its_launch_says_why() {
    fail_and_name_both(late);
}

/// Ranks that call with other counts.
fn fail_and_name_both(load: Load) {
    let errors = ranks(&processes(2), load, |context, (double, _, device)| {
        let output = double.memory(*device, 8);
        let count = u64::from(context.rank()) + 1;
        let error = run(&sum(context, count, output, None, PATIENCE)).unwrap_err();
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        // From here on nothing is launched.
        let later = run(&sum(context, 1, output, None, PATIENCE)).unwrap_err();
        assert!(later.text().contains("has failed before"), "{later}");
        error
    });
    for error in errors {
        for part in ["rank 0 called allreduce(1 ×", "rank 1 called allreduce(2 ×", "call #0"] {
            assert!(error.text().contains(part), "{error}");
        }
    }
}

#[test]
fn a_rank_that_does_not_call_is_named_whether_or_not_anybody_waits() {
    for waits in [true, false] {
        let store = Arc::new(HashStore::new());
        let seats = processes(2);
        std::thread::scope(|scope| {
            let (done, stay) = std::sync::mpsc::channel::<()>();
            let idle = {
                let (store, seat) = (store.clone(), seats[1].clone());
                scope.spawn(move || {
                    let context = Context::create(options(1, 2, &store, "")).unwrap();
                    meet(&[(&context, 0)], || Ok(seat.1.clone()), choose, words).unwrap();
                    stay.recv().unwrap();
                    until("the news", || context.failure().is_some());
                })
            };
            let (double, devices, device) = &seats[0];
            let context = Context::create(options(0, 2, &store, "")).unwrap();
            meet(&[(&context, 0)], || Ok(devices.clone()), choose, words).unwrap();
            let call = sum(&context, 1, double.memory(*device, 4), None, Duration::from_millis(300));
            let error: Error = if waits {
                run(&call).unwrap_err()
            } else {
                // SAFETY: the double trusts no addresses.
                unsafe { call.enqueue() }.unwrap();
                until("the watch", || context.failure().is_some());
                context.failure().unwrap()
            };
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for part in
                ["allreduce #0", "nothing from rank 1 (", "it has called nothing yet", "Look at rank 1"]
            {
                assert!(error.text().contains(part), "{error}");
            }
            done.send(()).unwrap();
            idle.join().unwrap();
        });
    }
}

#[test]
fn an_abort_reaches_the_kernels_and_ends_the_wait() {
    let met = std::sync::Barrier::new(2);
    ranks(&processes(2), words, |context, (double, _, device)| {
        let (_, exchange) = exchange(context);
        // Else the abort may end the other's setup.
        met.wait();
        if context.rank() == 1 {
            // Never calls; the other aborts from another thread.
            until("the news", || context.failure().is_some());
            return;
        }
        let call = sum(context, 1, double.memory(*device, 4), None, PATIENCE);
        let started = Instant::now();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| run(&call).unwrap_err());
            until("the call", || exchange.attend(&call.group));
            context.abort();
            let error = waiting.join().unwrap();
            assert_eq!(error.status(), Status::Aborted, "{error}");
        });
        assert!(started.elapsed() < PATIENCE);
    });
}

/// The program waits in the driver for the GPU, with the driver's lock, and the GPU for another rank.
#[test]
fn deadlines_hold_while_the_driver_does_not_answer() {
    let seats = processes(2);
    ranks(&seats, words, |context, (double, _, device)| {
        let output = double.memory(*device, 4);
        run(&sum(context, 1, output, None, PATIENCE)).expect("a sum");
        if context.rank() == 1 {
            until("the failure", || context.failure().is_some());
            return;
        }
        let held = Duration::from_secs(10);
        double.hold_lock(Waiting::All, held);
        let start = Instant::now();
        // SAFETY: the double trusts no addresses.
        unsafe { sum(context, 1, output, None, Duration::from_millis(500)).enqueue() }.expect("it is given");
        std::thread::scope(|scope| {
            scope.spawn(|| double.launch_first(*device));
            until("the failure", || context.failure().is_some());
            assert!(start.elapsed() < held / 2, "{:?}", start.elapsed());
        });
        let error = context.failure().expect("it has failed");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("rank 1"), "{error}");
    });
}

/// Rank 0 makes `calls`, which rank 1 does not, and is told in time that they hang.
fn told(calls: impl Fn(&Context, u64, Instant) + Sync) {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let output = double.memory(*device, 4);
        run(&sum(context, 1, output, None, PATIENCE)).expect("a sum");
        if context.rank() == 1 {
            until("the failure", || context.failure().is_some());
            return;
        }
        let start = Instant::now();
        calls(context, output, start);
        until("the failure", || context.failure().is_some());
        assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
        let error = context.failure().expect("it has failed");
        assert_eq!(error.status(), Status::Timeout, "{error}");
    });
}

/// The call with the earliest deadline is neither the first that hangs nor the last.
#[test]
fn a_deadline_holds_although_those_before_and_behind_are_later() {
    told(|context, output, _| {
        for timeout in [PATIENCE, PATIENCE / 2, Duration::from_millis(500), PATIENCE, PATIENCE] {
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, None, timeout).enqueue() }.expect("it is given");
        }
    });
}

/// One call hangs, and the program goes on making calls, whose deadlines are later each.
#[test]
fn a_call_that_hangs_is_told_although_others_follow() {
    told(|context, output, start| {
        let timeout = Duration::from_millis(500);
        while context.failure().is_none() {
            assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
            // Refused once the group has failed.
            // SAFETY: the double trusts no addresses.
            let _ = unsafe { sum(context, 1, output, None, timeout).enqueue() };
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
