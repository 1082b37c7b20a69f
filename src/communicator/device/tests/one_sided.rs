//! Puts into windows, signals and waits for them.

use super::leaving::behind_a_gate;
use super::windows::window;
use super::*;
use crate::cuda::double::Refusal;

fn on(stream: Option<StreamHandle>) -> Call {
    Call { stream, timeout: Some(PATIENCE), on_device: true, ..Call::default() }
}

/// A rank that puts words into the window of the one behind it.
pub(super) struct Putting<'a> {
    context: &'a Context,
    memory: u64,
    window: crate::communicator::Window,
}

impl<'a> Putting<'a> {
    /// A window of 64 words, all of them zero, and 64 words behind it.
    pub(super) fn new(context: &'a Context, double: &Double, device: u32) -> Putting<'a> {
        let memory = double.memory(device, 512);
        let stream = double.stream(device);
        double.fill(stream, device, memory, &[0; 512]);
        double.drain();
        Putting { context, memory, window: window(context, memory, 256).expect("a window") }
    }

    fn next(&self) -> u32 {
        (self.context.rank() + 1) % self.context.size()
    }

    fn before(&self) -> u32 {
        (self.context.rank() + self.context.size() - 1) % self.context.size()
    }

    /// Puts the word behind the window at `place` of the next rank's.
    pub(super) fn put(&self, place: u64, stream: Option<StreamHandle>) -> Result<()> {
        self.put_from(self.memory + 256, place, stream)
    }

    fn put_from(&self, from: u64, place: u64, stream: Option<StreamHandle>) -> Result<()> {
        // SAFETY: the double trusts no addresses.
        unsafe { self.context.put_signal(from, 4, self.next(), &self.window, 4 * place, &on(stream)) }
    }

    pub(super) fn wait(&self, count: u32, stream: Option<StreamHandle>) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.context.wait_signals(&[(self.before(), count)], &on(stream)) }
    }
}

#[test]
fn what_is_put_is_there_behind_the_wait_for_its_signal() {
    for order in Order::all(2) {
        let check = |seats: &[Seat]| {
            ranks(seats, words, |context, (double, devices, device)| {
                let putting = Putting::new(context, double, *device);
                let stream = double.stream(*device);
                for (round, place) in (1..=3).zip([0, 7, 63]) {
                    let word = 100 * round + context.rank();
                    double.fill(stream, *device, putting.memory + 256, &word.to_ne_bytes());
                    putting.put(place, Some(stream)).expect("a put");
                    putting.wait(1, Some(stream)).expect("a wait");
                    let wanted = 100 * round + putting.before();
                    double.expect(
                        stream,
                        *device,
                        putting.memory + 4 * place,
                        &wanted.to_ne_bytes(),
                        "it came",
                    );
                }
                // SAFETY: it lives.
                let borrowed = unsafe { Stream::borrow(devices, *device, stream) }.expect("a stream");
                borrowed.synchronize(Deadline::after(PATIENCE)).expect("all have put");
                context.settle(Deadline::after(PATIENCE)).expect("nothing is left");
                assert_eq!(double.complaints(), Vec::<String>::new());
            });
        };
        check(&processes_in(order, 3));
        let (double, devices) = process_in(order, 2);
        check(&[0, 1].map(|device| (double.clone(), devices.clone(), device)));
    }
}

/// On whatever streams they are: what comes later is not overtaken. Each wait takes signals of its own.
#[test]
fn what_a_rank_sends_comes_in_its_order_and_each_wait_takes_signals_of_its_own() {
    for order in Order::all(4) {
        ranks(&processes_in(order, 2), words, |context, (double, devices, device)| {
            let putting = Putting::new(context, double, *device);
            let streams = [0, 1].map(|_| double.stream(*device));
            for (at, word) in (0..).zip(1u32..=6) {
                let stream = streams[at % 2];
                let from = putting.memory + 256 + 4 * at as u64;
                double.fill(stream, *device, from, &word.to_ne_bytes());
                putting.put_from(from, 0, Some(stream)).expect("a put");
            }
            // SAFETY: as above.
            let signal = || unsafe { context.signal(putting.next(), &on(Some(streams[0]))) };
            signal().expect("a signal");
            let waiting = double.stream(*device);
            putting.wait(6, Some(waiting)).expect("a wait");
            putting.wait(1, Some(double.stream(*device))).expect("another");
            double.expect(waiting, *device, putting.memory, &6u32.to_ne_bytes(), "the last one");
            // SAFETY: it lives.
            let borrowed = unsafe { Stream::borrow(devices, *device, waiting) }.expect("a stream");
            borrowed.synchronize(Deadline::after(PATIENCE)).expect("it comes");
            context.settle(Deadline::after(PATIENCE)).expect("nothing is left");
            assert_eq!(double.complaints(), Vec::<String>::new());
        });
    }
}

/// A wait may be for what another rank sends behind a call, on another stream.
#[test]
fn calls_pass_a_wait_on_another_stream() {
    let looked = std::sync::Barrier::new(2);
    ranks(&processes(2), words, |context, (double, _, device)| {
        let putting = Putting::new(context, double, *device);
        let output = double.memory(*device, 4);
        if context.rank() == 0 {
            putting.wait(1, Some(double.stream(*device))).expect("a wait");
        }
        run(&sum(context, 1, output, Some(double.stream(*device)), PATIENCE)).expect("it passes");
        if context.rank() == 0 {
            assert_eq!(context.is_settled(), Ok(false), "nothing was put");
        }
        looked.wait();
        if context.rank() == 1 {
            putting.put(0, None).expect("a put");
        }
        context.settle(Deadline::after(PATIENCE)).expect("it has come");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn a_signal_that_never_comes_fails_the_group_in_time_and_is_named() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        if context.rank() == 0 {
            let call = Call { timeout: Some(Duration::from_millis(300)), ..on(Some(double.stream(*device))) };
            // SAFETY: the double trusts no addresses.
            unsafe { context.wait_signals(&[(1, 2), (0, 0)], &call) }.expect("it is given");
        }
        until("the failure", || context.failure().is_some());
        let error = context.failure().expect("it has failed");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("for signals, 2 of rank 1 ("), "{error}");
        // SAFETY: as above.
        let later = unsafe { context.signal(0, &on(None)) }.expect_err("it has failed");
        assert_eq!(later.status(), Status::Timeout, "{later}");
    });
}

/// Without a deadline. What it has sent is not enough.
#[test]
fn a_wait_for_more_signals_than_a_rank_has_left_with_fails_and_names_it() {
    for left_before in [false, true] {
        let called = std::sync::Barrier::new(2);
        ranks(&processes(2), words, |context, (double, _, device)| {
            if context.rank() == 1 {
                // SAFETY: the double trusts no addresses.
                unsafe { context.signal(0, &on(None)) }.expect("one of two");
                context.settle(Deadline::after(PATIENCE)).expect("it is sent");
                if !left_before {
                    called.wait();
                }
                return;
            }
            if left_before {
                until_one_has_left(context);
            }
            let call = Call { timeout: Some(Duration::MAX), ..on(Some(double.stream(*device))) };
            // SAFETY: as above.
            unsafe { context.wait_signals(&[(1, 2)], &call) }.expect("it is given");
            if !left_before {
                called.wait();
            }
            until("the failure", || context.failure().is_some());
            let error = context.failure().expect("it has failed");
            assert_eq!(error.status(), Status::PeerFailed, "{error}");
            for part in ["waits for a signal that never comes", "rank 1 (", "has left"] {
                assert!(error.text().contains(part), "{error}");
            }
        });
    }
}

fn until_one_has_left(context: &Context) {
    let (group, _) = exchange(context);
    until("a rank has left", || group.endpoint().has_lost_any());
}

/// Behind other work, and beside a rank that is there and takes its time. What graphs send nobody counts.
#[test]
fn signals_of_a_rank_that_has_left_are_there_for_whoever_waits_later() {
    for captured in [false, true] {
        let looked = std::sync::Barrier::new(2);
        ranks(&processes(3), words, |context, (double, devices, device)| {
            let stream = double.stream(*device);
            // SAFETY: the double trusts no addresses.
            let signal = || unsafe { context.signal(0, &on(Some(stream))) }.expect("a signal");
            match context.rank() {
                1 if captured => {
                    double.begin_capture(stream, *device);
                    signal();
                    let graph = double.end_capture(stream, *device).expect("a graph");
                    double.launch_graph(&graph, stream, *device);
                }
                1 => signal(),
                2 => {
                    looked.wait();
                    signal();
                }
                _ => {
                    let (_, stream, gate) = behind_a_gate(double, devices);
                    let call = Call { timeout: Some(Duration::MAX), ..on(Some(stream)) };
                    // SAFETY: as above.
                    unsafe { context.wait_signals(&[(1, 1), (2, 1)], &call) }.expect("it is given");
                    until_one_has_left(context);
                    // Some looks of the library.
                    std::thread::sleep(Duration::from_millis(200));
                    gate.release();
                    std::thread::sleep(Duration::from_millis(200));
                    let failure = context.failure();
                    looked.wait();
                    assert_eq!(failure, None);
                    context.settle(Deadline::after(PATIENCE)).expect("both have signalled");
                    return;
                }
            }
            // SAFETY: it lives.
            let borrowed = unsafe { Stream::borrow(devices, *device, stream) }.expect("a stream");
            borrowed.synchronize(Deadline::after(PATIENCE)).expect("it is sent");
        });
    }
}

/// The program waits in the driver for the GPU, with the driver's lock, and the GPU for a signal.
#[test]
fn the_deadline_of_a_wait_holds_while_the_driver_does_not_answer() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        if context.rank() == 0 {
            let held = Duration::from_secs(10);
            double.hold_lock(Waiting::All, held);
            let start = Instant::now();
            let call = Call { timeout: Some(Duration::from_millis(500)), ..on(Some(double.stream(*device))) };
            // SAFETY: the double trusts no addresses.
            unsafe { context.wait_signals(&[(1, 1)], &call) }.expect("it is given");
            std::thread::scope(|scope| {
                scope.spawn(|| double.launch_first(*device));
                until("the failure", || context.failure().is_some());
                assert!(start.elapsed() < held / 2, "{:?}", start.elapsed());
            });
        }
        until("the failure", || context.failure().is_some());
        let error = context.failure().expect("it has failed");
        assert!(error.text().contains("for signals, 1 of rank 1 ("), "{error}");
    });
}

/// Who puts behind a wait until the stream has no room left waits in the driver, and its own deadline ends
/// that.
#[test]
fn the_deadline_of_a_wait_holds_while_its_rank_waits_in_the_driver() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let putting = Putting::new(context, double, *device);
        if context.rank() == 0 {
            double.limit_queues(16);
            let stream = Some(double.stream(*device));
            let call = Call { timeout: Some(Duration::from_millis(300)), ..on(stream) };
            // SAFETY: the double trusts no addresses.
            unsafe { context.wait_signals(&[(1, 1)], &call) }.expect("it is given");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    until("the failure", || context.failure().is_some());
                    // As when the kernel that waits has ended.
                    double.limit_queues(usize::MAX);
                });
                let refused = (0..64).find_map(|_| putting.put(0, stream).err()).expect("it has failed");
                assert_eq!(refused.status(), Status::Timeout, "{refused}");
            });
        }
        until("the failure", || context.failure().is_some());
        let error = context.failure().expect("it has failed");
        assert!(error.text().contains("for signals, 1 of rank 1 ("), "{error}");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn what_is_wrong_with_a_put_is_told_and_sends_nothing() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        let mut putting = Putting::new(context, double, *device);
        let refused = |result: Result<()>, part: &str| {
            let error = result.expect_err(part);
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains(part), "{error}");
        };
        refused(putting.put(64, None), "has 256 on rank");
        refused(context.check_put(putting.memory, 4, 0, &putting.window, 253), "has 256 on rank");
        context.check_put(putting.memory, 4, 0, &putting.window, 252).expect("there is room");
        // SAFETY: the double trusts no addresses.
        unsafe {
            refused(context.signal(2, &on(None)), "peer 2 is out of range");
            refused(context.wait_signals(&[(2, 1)], &on(None)), "peer 2 is out of range");
            refused(context.wait_signals(&[(1, u32::MAX), (1, 1)], &on(None)), "more than");
            let put = |from, bytes| {
                let checked = context.check_put(from, bytes, 0, &putting.window, 0);
                let put = context.put_signal(from, bytes, 0, &putting.window, 0, &on(None));
                assert_eq!(checked, put);
                put
            };
            refused(put(putting.memory + 256, 257), "localbuff has 256 bytes left");
            // What is mapped, of a range of addresses that may be longer.
            refused(put(double.mapped(*device, 128, 3), 385), "localbuff has 384 bytes left");
            refused(put(double.memory_of(Memory::Host, *device, 64), 4), "is no device memory");
        }
        // A window of another context, and one that has ended.
        let other = context.duplicate().expect("a child");
        meet(&[(&other, *device)], || Ok(devices.clone()), choose, words).expect("an agreement");
        let foreign = window(&other, putting.memory, 256).expect("a window");
        let own = std::mem::replace(&mut putting.window, foreign);
        refused(putting.put(0, None), "of another communicator");
        putting.window = own;
        putting.put(0, None).expect("a put");
        putting.wait(1, None).expect("a wait");
        context.settle(Deadline::after(PATIENCE)).expect("one signal has come, and no other");
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn a_put_that_the_driver_refuses_fails_the_group() {
    let barrier = std::sync::Barrier::new(2);
    ranks(&processes(2), words, |context, (double, _, device)| {
        let putting = Putting::new(context, double, *device);
        barrier.wait();
        if context.rank() == 0 {
            double.refuse(Refusal { call: Some("cuMemcpyDtoDAsync"), ..Refusal::default() });
            let error = putting.put(0, Some(double.stream(*device))).expect_err("it is refused");
            assert_eq!(error.status(), Status::Cuda, "{error}");
        }
        until("the failure", || context.failure().is_some());
        let error = context.failure().expect("it has failed");
        assert!(error.text().contains("rank 0"), "{error}");
    });
}

/// What a stream has been given, and nobody could follow, fails the group: a wait would have no deadline, and
/// later signals no order.
#[test]
fn one_sided_operations_that_cannot_be_followed_fail_the_group() {
    for (waits, call) in [(true, "cuEventRecord"), (false, "cuEventRecord"), (false, "cuStreamWriteValue32")]
    {
        let barrier = std::sync::Barrier::new(2);
        ranks(&processes(2), words, |context, (double, _, device)| {
            run(&sum(context, 1, double.memory(*device, 4), None, PATIENCE)).expect("a sum");
            barrier.wait();
            if context.rank() == 0 {
                let stream = on(Some(double.stream(*device)));
                double.refuse(Refusal {
                    call: Some(call),
                    status: Status::OutOfMemory,
                    ..Refusal::default()
                });
                // SAFETY: the double trusts no addresses.
                let given = unsafe {
                    if waits { context.wait_signals(&[(1, 1)], &stream) } else { context.signal(1, &stream) }
                };
                given.expect_err("it is refused");
                assert!(context.failure().is_some(), "it would be there unseen");
            }
            until("the failure", || context.failure().is_some());
        });
    }
}

#[test]
fn ranks_without_an_exchange_say_so() {
    let alone = Context::create(options(0, 1, &Arc::new(HashStore::new()), "")).expect("one rank");
    // SAFETY: nothing is given to any stream.
    let error = unsafe { alone.signal(0, &on(None)) }.expect_err("there is nobody");
    assert_eq!(error.status(), Status::Unsupported, "{error}");
}
