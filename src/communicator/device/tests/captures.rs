//! Calls on streams that are being captured, and graphs of them.

use super::*;

#[test]
fn a_capture_holds_the_kernels_alone_and_mixes_with_other_calls() {
    let seats = processes(2);
    ranks(&seats, words, |context, (double, _, device)| {
        let output = double.memory(*device, 4);
        let (stream, other) = (double.stream(*device), double.stream(*device));
        let call = |stream| sum(context, 1, output, Some(stream), PATIENCE);
        run(&call(stream)).expect("a sum");
        run(&call(other)).expect("a sum");
        let (created, synchronized) = (double.creations(), double.synchronizations());
        double.begin_capture(stream, *device);
        for _ in 0..3 {
            // SAFETY: the double trusts no addresses.
            let enqueued = unsafe { call(stream).enqueue() }.expect("captured");
            assert!(enqueued.is_captured());
            assert!(call(stream).work(enqueued).unwrap().test().is_some());
        }
        let graph = double.end_capture(stream, *device).expect("a graph");
        assert_eq!((double.creations(), double.synchronizations()), (created, synchronized));
        assert!(word(double, output) == 2, "nothing has run");
        // The double's kernels have their numbers from the capture: it is replayed once.
        double.launch_graph(&graph, stream, *device);
        run(&call(stream)).expect("a sum");
        assert_eq!(word(double, output), 6);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// The double's kernels have their numbers from when they are captured or called: one that ran early would
/// take its number back from a peer, and hang.
#[test]
fn graphs_that_are_mixed_with_other_calls_run_in_the_order_of_their_launches() {
    for order in Order::all(3) {
        ranks(&processes_in(order, 2), words, |context, (double, _, device)| {
            let output = double.memory(*device, 4);
            let (stream, other) = (double.stream(*device), double.stream(*device));
            let call = |stream| {
                // SAFETY: the double trusts no addresses.
                unsafe { sum(context, 1, output, Some(stream), PATIENCE).enqueue() }.expect("it is given");
            };
            let graph = |stream, calls: u32| {
                double.begin_capture(stream, *device);
                (0..calls).for_each(|_| call(stream));
                double.end_capture(stream, *device).expect("a graph")
            };
            call(other);
            let [long, short] = [3, 1].map(|calls| graph(stream, calls));
            double.launch_graph(&long, stream, *device);
            double.launch_graph(&short, other, *device);
            call(stream);
            let last = graph(stream, 2);
            double.launch_graph(&last, other, *device);
            // What was replayed is waited for, too.
            context.settle(Deadline::after(PATIENCE)).expect("all have called");
            assert_eq!(word(double, output), 8, "{order:?}");
            assert_eq!(double.complaints(), Vec::<String>::new());
        });
    }
}

/// Replays of graphs have no numbers: nothing but a failure ends those of other ranks.
#[test]
fn a_rank_that_leaves_fails_the_others_where_graphs_have_calls() {
    for captures in [false, true] {
        let done = std::sync::Barrier::new(2);
        ranks(&processes(2), words, |context, (double, _, device)| {
            let (output, stream) = (double.memory(*device, 4), double.stream(*device));
            let call = sum(context, 1, output, Some(stream), PATIENCE);
            run(&call).expect("a sum");
            if captures {
                double.begin_capture(stream, *device);
                // SAFETY: the double trusts no addresses.
                unsafe { call.enqueue() }.expect("captured");
                double.end_capture(stream, *device).expect("a graph");
            }
            let exchange = call.group.devices().and_then(Way::exchange).expect("they exchange");
            // Whoever leaves asks the driver else, and does not wait long for its answer.
            until("it is seen to be done", || !exchange.attend(&call.group));
            done.wait();
            if context.rank() == 0 {
                context.leave(|| Rest::Known(true));
                let error = context.failure().expect("it has left");
                assert_eq!(error.status(), Status::Aborted, "{error}");
            } else if captures {
                until("the news", || context.failure().is_some());
            } else {
                let error = run(&call).expect_err("rank 0 has left");
                assert_eq!(error.status(), Status::PeerFailed, "{error}");
                assert!(error.text().contains("rank 0 ("), "{error}");
            }
        });
    }
}

/// Has `to` go on behind what `from` has been given: both are in its capture then.
fn follow(devices: &Arc<Devices>, device: u32, from: StreamHandle, to: StreamHandle) {
    // SAFETY: the double trusts no handles.
    let [from, to] = [from, to].map(|handle| unsafe { Stream::borrow(devices, device, handle) }.unwrap());
    let event = Event::new(devices, device).unwrap();
    event.record(&from).unwrap();
    to.wait(&event).unwrap();
}

#[test]
fn streams_of_one_capture_take_turns() {
    for order in Order::all(2) {
        ranks(&processes_in(order, 2), words, |context, (double, devices, device)| {
            let output = double.memory(*device, 4);
            let (stream, other) = (double.stream(*device), double.stream(*device));
            let call = |stream, count| {
                // SAFETY: the double trusts no addresses.
                unsafe { sum(context, count, output, Some(stream), PATIENCE).enqueue() }
                    .expect("it is given");
            };
            double.begin_capture(stream, *device);
            call(stream, 1);
            follow(devices, *device, stream, other);
            for stream in [other, stream, other] {
                call(stream, 0);
                call(stream, 1);
                call(stream, 0);
            }
            follow(devices, *device, other, stream);
            call(stream, 0);
            let graph = double.end_capture(stream, *device).expect("a graph");
            call(other, 1);
            double.launch_graph(&graph, stream, *device);
            call(other, 1);
            context.settle(Deadline::after(PATIENCE)).expect("all have called");
            assert_eq!(double.complaints(), Vec::<String>::new());
        });
    }
}

/// They have one handle.
#[test]
fn the_default_streams_of_two_threads_in_one_capture_take_turns() {
    for order in Order::all(2) {
        ranks(&processes_in(order, 2), words, |context, (double, devices, device)| {
            let output = double.memory(*device, 4);
            // SAFETY: a default stream always exists.
            let own =
                unsafe { Stream::borrow(devices, *device, StreamHandle::PER_THREAD) }.expect("a stream");
            let [begun, done] = [(); 2].map(|()| Event::new(devices, *device).expect("an event"));
            let call = || {
                // SAFETY: the double trusts no addresses.
                unsafe { sum(context, 1, output, Some(StreamHandle::PER_THREAD), PATIENCE).enqueue() }
                    .expect("it is captured");
            };
            let other = || {
                own.wait(&begun).expect("it joins");
                call();
                done.record(&own).expect("it is recorded");
            };
            double.begin_capture(StreamHandle::PER_THREAD, *device);
            // Before the call, which nothing that the program does puts before the other thread's.
            begun.record(&own).expect("it is recorded");
            call();
            std::thread::scope(|scope| scope.spawn(other).join()).expect("it has called");
            call();
            own.wait(&done).expect("it comes back");
            let graph = double.end_capture(StreamHandle::PER_THREAD, *device).expect("a graph");
            double.launch_graph(&graph, double.stream(*device), *device);
            context.settle(Deadline::after(PATIENCE)).expect("all have called");
            assert_eq!(word(double, output), 3, "{order:?}");
            assert_eq!(double.complaints(), Vec::<String>::new());
        });
    }
}

#[test]
fn captures_that_alternate_keep_to_their_streams() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        let output = double.memory(*device, 4);
        let [first, second, beside] = [(); 3].map(|()| double.stream(*device));
        let call = |stream| {
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, Some(stream), PATIENCE).enqueue() }
        };
        [first, second].into_iter().for_each(|stream| double.begin_capture(stream, *device));
        for stream in [first, second, first, second] {
            call(stream).expect("it is captured");
        }
        follow(devices, *device, first, beside);
        let error = call(beside).expect_err("another stream");
        assert_eq!(error.status(), Status::InvalidUsage, "{error}");
        assert!(error.text().contains("alternate between this capture and another"), "{error}");
        // It is as if it had not been called.
        follow(devices, *device, beside, first);
        call(first).expect("it is captured");
        // The double's kernels have their numbers from the captures, which alternate: neither graph can run
        // by itself.
        for stream in [first, second] {
            double.end_capture(stream, *device).expect("a graph");
        }
    });
}

/// Memory that a graph will have: addresses of this process, behind which nothing is before that.
struct Promised {
    address: u64,
    bytes: usize,
}

impl Promised {
    fn new(bytes: usize) -> Promised {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Promised { address: start.expose_provenance() as u64, bytes }
    }

    /// Has it there, as when the graph is launched.
    fn keep(&self, double: &Double, device: u32) {
        let start = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: it is the mapping of `new`.
        let result = unsafe { libc::mprotect(start, self.bytes, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(result, 0);
        double.map(device, self.address, self.bytes);
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: it is the mapping of `new`, and nobody uses it any more.
        unsafe { libc::munmap(start, self.bytes) };
    }
}

/// One that allocates has the addresses before there is memory. CUDA knows nothing of those until the graph
/// is launched.
#[test]
fn memory_that_a_graph_allocates_is_its_devices() {
    ranks(&processes(2), words, |context, seat| {
        let (double, _, device) = seat;
        let stream = double.stream(*device);
        let memory = Promised::new(4096);
        let call =
            |on_device| Call { stream: Some(stream), on_device, timeout: Some(PATIENCE), ..Call::default() };
        // SAFETY: the double trusts no addresses.
        let run = |call: &Call| unsafe { context.run(&groups::request(1, memory.address), call) }.map(drop);
        context.cuda().pretend(&seat.1, 0);
        context.cuda().pretend_loads(only(words));
        double.begin_capture(stream, *device);
        for on_device in [true, false] {
            run(&call(on_device)).expect("it is captured");
        }
        groups::give(context, seat, &[(1, memory.address, Some(stream))]).expect("it is captured");
        let graph = double.end_capture(stream, *device).expect("a graph");
        // Elsewhere it is nothing.
        let error = run(&call(true)).expect_err("no memory");
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(error.text().contains("is neither memory that CUDA knows"), "{error}");
        memory.keep(double, *device);
        double.launch_graph(&graph, stream, *device);
        context.settle(Deadline::after(PATIENCE)).expect("all have called");
        assert_eq!(word(double, memory.address), 3);
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

/// A call of all ranks by way of the host.
pub(super) fn barrier(context: &Context) {
    let request = Request { kind: Kind::Barrier, ..groups::request(0, 0) };
    // SAFETY: it has no memory.
    unsafe { context.run(&request, &Call::default()) }.expect("all come");
}

/// What one rank captures and gives up is no call: others need not have it, whatever they call next.
#[test]
fn a_graph_that_one_rank_gives_up_concerns_no_other() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let output = double.memory(*device, 16);
        let [captured, stream] = [(); 2].map(|()| double.stream(*device));
        let call = |count, stream| {
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, count, output, Some(stream), PATIENCE).enqueue() }.map(drop)
        };
        if context.rank() == 0 {
            double.begin_capture(captured, *device);
            call(1, captured).expect("it is captured");
            drop(double.end_capture(captured, *device).expect("a graph"));
        }
        // By the device, and by the host.
        for _ in 0..2 {
            call(2, stream).expect("ranks call alike");
            barrier(context);
        }
    });
}

/// Nothing runs, so a driver that refuses fails the call alone.
#[test]
fn a_call_that_cannot_be_captured_fails_no_other() {
    ranks(&processes(2), words, |context, (double, _, device)| {
        let output = double.memory(*device, 16);
        let call = |stream| {
            // SAFETY: the double trusts no addresses.
            unsafe { sum(context, 1, output, Some(stream), PATIENCE).enqueue() }.map(drop)
        };
        let mut refused = 0;
        if context.rank() == 0 {
            // Each driver call of one fails once.
            for index in 0..100 {
                let captured = double.stream(*device);
                double.begin_capture(captured, *device);
                double.fail_call(index);
                let end = call(captured);
                double.fail_call(usize::MAX);
                drop(double.end_capture(captured, *device));
                if end.is_ok() {
                    break;
                }
                refused += 1;
            }
            assert!(refused > 3, "{refused} driver calls");
        }
        barrier(context);
        call(double.stream(*device)).expect("the group is well");
        barrier(context);
    });
}
