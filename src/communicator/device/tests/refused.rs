//! Calls that the driver keeps a rank from: whoever would wait for them is told before their caller is.

use std::sync::{Barrier, Mutex};

use super::groups::{give, request};
use super::leaving::{behind_a_gate, refusing, sweep, while_closed};
use super::points::point;
use super::stages::by_stages;
use super::windows::{MIB, allgather, window};
use super::*;
use crate::cuda::double::Refusal;
use crate::cuda::driver::DeviceCalls;

/// What a rank does that has this memory on its device.
type Deed = fn(&Context, &Seat, u64) -> Result<()>;

/// More driver calls than a rank needs until its call has a number.
const FIRST: usize = 16;

/// Has the driver refuse rank 0 one call of a deed. The other rank does nothing. What came back before the
/// group had failed.
fn untold(what: &str, status: Status, deed: Deed) -> Vec<String> {
    let untold = Mutex::new(Vec::new());
    refusing(FIRST, |after| {
        let (met, seats) = (Barrier::new(2), processes(2));
        ranks(&seats, words, |context, seat| {
            let (double, devices, device) = seat;
            context.cuda().pretend(devices, 256);
            context.cuda().pretend_loads(only(words));
            let memory = double.memory(*device, 5 * MIB as usize);
            let _window = window(context, memory, 4 * MIB).expect("a window");
            met.wait();
            if context.rank() == 1 {
                return until("rank 0 fails it at last", || context.failure().is_some());
            }
            double.refuse(Refusal { after, status, ..Refusal::default() });
            let result = deed(context, seat, memory);
            double.fail_call(usize::MAX);
            let is_told = context.failure().is_some();
            context.abort();
            if let Err(error) = result {
                assert_eq!(error.status(), status, "{what}: {error}");
                if !is_told {
                    untold.lock().expect("no panic").push(format!("{what}, call {after}: {error}"));
                }
            }
        });
        // They are many.
        seats.iter().for_each(|(double, ..)| double.drain());
        seats.iter().for_each(|(_, devices, _)| sweep(devices));
        seats.iter().for_each(|(_, devices, _)| sweep(devices));
    });
    untold.into_inner().expect("no panic")
}

fn send(context: &Context, address: u64) -> Request {
    let root = 1 - context.rank();
    Request { kind: Kind::Send, output: std::ptr::null_mut(), root, ..request(1, address) }
}

#[test]
fn nobody_waits_for_a_collective_that_the_driver_keeps_a_rank_from() {
    // SAFETY: the double trusts no addresses.
    let calls: [(&str, Deed); 6] = unsafe {
        [
            ("on a stream", |context, (double, _, device), memory| {
                let call = Call { stream: Some(double.stream(*device)), ..Call::default() };
                context.start(&request(1, memory), &call).map(drop)
            }),
            ("on none", |context, _, memory| context.start(&request(1, memory), &Call::default()).map(drop)),
            ("by stages", |context, _, memory| by_stages(context, memory, 0).enqueue().map(drop)),
            ("in a window", |context, _, memory| allgather(context, MIB, memory, memory).enqueue().map(drop)),
            ("whose factor a device has", |context, (double, _, device), memory| {
                context.read_factor((*device, memory, 4), double.stream(*device), None).map(drop)
            }),
            ("of a group", |context, seat, memory| {
                let (double, _, device) = seat;
                give(context, seat, &[0, 8].map(|at| (1, memory + at, Some(double.stream(*device)))))
            }),
        ]
    };
    let all = calls.into_iter().flat_map(|call| [(call, Status::Cuda), (call, Status::OutOfMemory)]);
    let untold: Vec<String> = all.flat_map(|((what, deed), status)| untold(what, status, deed)).collect();
    assert_eq!(untold, Vec::<String>::new());
}

/// One that is not sent concerns two ranks, but the device that is lost serves all.
#[test]
fn a_driver_that_refuses_a_message_is_everybodys() {
    // SAFETY: the double trusts no addresses.
    let calls: [(&str, Deed); 2] = unsafe {
        [
            ("on a stream", |context, (double, _, device), memory| {
                let call = Call { stream: Some(double.stream(*device)), ..Call::default() };
                context.start(&send(context, memory), &call).map(drop)
            }),
            ("on two streams", |context, (double, _, device), memory| {
                let on = |at| point(context, memory + at, 4, Direction::Send, Some(double.stream(*device)));
                let begun = [0, 8].map(|at| on(at).begin().expect("it joins others"));
                Pending::close_all(begun.into()).into_iter().try_for_each(|work| work.map(drop))
            }),
        ]
    };
    let untold: Vec<String> =
        calls.into_iter().flat_map(|(what, deed)| untold(what, Status::Cuda, deed)).collect();
    assert_eq!(untold, Vec::<String>::new());
}

/// What it is refused for is this rank's program's alone.
#[test]
fn a_stream_of_a_context_that_the_program_has_made_concerns_no_other() {
    let seats = processes(2);
    ranks(&seats, words, |context, (double, _, device)| {
        let output = double.memory(*device, 4);
        let refused = |stream: Option<StreamHandle>| {
            let error = run(&sum(context, 1, output, stream, PATIENCE)).expect_err("it is refused");
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains("that the program has made"), "{error}");
        };
        if context.rank() == 0 {
            let own = double.make_context(*device);
            let stream = double.stream_of(own, false);
            refused(Some(stream));
            // SAFETY: the double trusts no addresses.
            let sent = unsafe { point(context, output, 4, Direction::Send, Some(stream)).begin() };
            let error = Pending::close_all(vec![sent.expect("it joins others")]).remove(0).map(drop);
            assert_eq!(error.expect_err("it is refused").status(), Status::InvalidArgument);
            // SAFETY: it lives as long as the double.
            unsafe { double.push_context(own) }.expect("it is there");
            for stream in [None, Some(StreamHandle::LEGACY), Some(StreamHandle::PER_THREAD)] {
                refused(stream);
            }
            // SAFETY: pushed above.
            unsafe { double.pop_context() }.expect("what was pushed");
        }
        let green = double.stream_of(double.make_context(*device), true);
        for (call, stream) in (1..).zip([Some(double.stream(*device)), Some(green), None]) {
            run(&sum(context, 1, output, stream, PATIENCE)).expect("a sum");
            assert_eq!(word(double, output), call);
        }
        assert_eq!(double.complaints(), Vec::<String>::new());
    });
}

#[test]
fn a_factor_that_its_stream_does_not_come_to_is_missed_at_the_deadline_of_its_call() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 256);
        if context.rank() == 1 {
            return until("rank 0 fails it at last", || context.failure().is_some());
        }
        let (memory, stream, gate) = behind_a_gate(double, devices);
        let timeout = Some(Duration::from_millis(50));
        // SAFETY: the double trusts no addresses.
        let read = || unsafe { context.read_factor((*device, memory, 4), stream, timeout) };
        let error = while_closed(&gate, read).expect_err("its stream waits");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("the factor of a PreMulSum"), "{error}");
        assert_eq!(context.failure().map(|error| error.status()), Some(Status::Timeout));
    });
}

#[test]
fn whoever_waits_for_a_factor_hears_of_an_abort() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 256);
        if context.rank() == 1 {
            return until("rank 0 aborts", || context.failure().is_some());
        }
        let (memory, stream, gate) = behind_a_gate(double, devices);
        // SAFETY: the double trusts no addresses.
        let read = || unsafe { context.read_factor((*device, memory, 4), stream, None) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                context.abort();
            });
            let error = while_closed(&gate, read).expect_err("its stream waits");
            assert_eq!(error.status(), Status::Aborted, "{error}");
        });
    });
}

/// It is no call yet, and may never be one.
#[test]
fn a_capture_that_the_driver_refuses_concerns_no_other() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        context.cuda().pretend(devices, 256);
        context.cuda().pretend_loads(only(words));
        let memory = double.memory(*device, 8);
        let mut refused = [0; 2];
        for (after, of) in (0..2 * FIRST).map(|at| (at / 2, at % 2)).filter(|_| context.rank() == 0) {
            let stream = double.stream(*device);
            double.begin_capture(stream, *device);
            double.fail_call(after);
            let call = Call { stream: Some(stream), ..Call::default() };
            // SAFETY: the double trusts no addresses.
            let ended = unsafe {
                match of {
                    0 => context.start(&request(1, memory), &call).map(drop),
                    _ => context.read_factor((*device, memory, 4), stream, None).map(drop),
                }
            };
            double.fail_call(usize::MAX);
            drop(double.end_capture(stream, *device));
            refused[of] += usize::from(ended.is_err_and(|error| error.status() == Status::Cuda));
        }
        assert!(
            context.rank() == 1 || refused.iter().all(|&refused| refused > 1),
            "{refused:?} driver calls"
        );
        captures::barrier(context);
        assert_eq!(context.failure(), None);
        captures::barrier(context);
    });
}
