//! Streams that come behind what others were given.

use super::leaving::behind_a_gate;
use super::lists::{CARRIERS, Calls, Carrier, ranks_with};
use super::one_sided::Putting;
use super::*;
use crate::communicator::Work;

fn on(stream: StreamHandle) -> Call {
    Call { stream: Some(stream), timeout: Some(PATIENCE), ..Call::default() }
}

/// Whether a stream has come behind all that it was given.
fn is_through(devices: &Arc<Devices>, device: u32, stream: StreamHandle) -> bool {
    // SAFETY: the double trusts no handles.
    let stream = unsafe { Stream::borrow(devices, device, stream) }.expect("a stream");
    stream.query().expect("it is told")
}

#[test]
fn what_a_stream_is_given_comes_behind_what_another_was_given_whoever_runs_them() {
    for (carrier, staged_first) in
        CARRIERS.into_iter().flat_map(|carrier| [(carrier, true), (carrier, false)])
    {
        let stored = ranks_with(carrier, |context, (double, devices, device), calls| {
            let Calls { staged, exchanged, word: place } = calls;
            // The first of them is late.
            let ((_, first, gate), second) = (behind_a_gate(double, devices), double.stream(*device));
            let order = if staged_first { [staged, exchanged] } else { [exchanged, staged] };
            // SAFETY: the double trusts no addresses.
            let start = |request, stream| unsafe { context.start(request, &on(stream)) }.expect("it starts");
            let before = start(order[0], first);
            // Where no stream may wait for a call, the thread does.
            if matches!(carrier, Carrier::Thread) {
                gate.release();
            }
            // What GPUs exchange need not be named.
            let works: &[Work] = if staged_first { std::slice::from_ref(&before) } else { &[] };
            // SAFETY: as above.
            let lined_up = unsafe { context.line_up((*device, second), works, false, Some(PATIENCE)) };
            assert_eq!(lined_up, Ok(true), "{carrier:?}");
            let behind = start(order[1], second);
            // If it did not wait it would be done by then, mostly.
            std::thread::sleep(Duration::from_millis(20));
            gate.release();
            for work in [before, behind] {
                work.wait(Deadline::NEVER).expect("both end well");
            }
            word(double, *place)
        });
        let last = if staged_first { 1 } else { u32::from_ne_bytes([77; 4]) };
        assert_eq!(stored, [last; 2], "{carrier:?}, by way of the host first: {staged_first}");
    }
}

#[test]
fn a_call_behind_a_stream_that_was_lined_up_has_it_wait_for_nothing_more() {
    ranks(&processes(2), words, |context, (double, devices, device)| {
        let output = double.memory(*device, 4);
        let (first, second) = (double.stream(*device), double.stream(*device));
        let call = |stream| run(&sum(context, 1, output, Some(stream), PATIENCE)).expect("it ends well");
        // SAFETY: the double trusts no handles.
        let line_up = |stream| unsafe {
            context.cuda().pretend(devices, 256);
            context.line_up((*device, stream), &[], false, None)
        };
        assert_eq!(line_up(first), Ok(true));
        call(first);
        assert_eq!((line_up(first), double.waits()), (Ok(true), 0));
        assert_eq!((line_up(second), double.waits()), (Ok(true), 1));
        call(second);
        assert_eq!(double.waits(), 1);
        // It has been given nothing since.
        assert_eq!((line_up(first), double.waits()), (Ok(true), 2));
        assert_eq!((line_up(second), double.waits()), (Ok(true), 3));
    });
}

#[test]
fn a_stream_comes_behind_what_others_put_signal_and_wait_for() {
    for waits in [false, true] {
        ranks(&processes(2), words, |context, (double, devices, device)| {
            context.cuda().pretend(devices, 256);
            let putting = Putting::new(context, double, *device);
            let ((_, first, gate), second) = (behind_a_gate(double, devices), double.stream(*device));
            match waits {
                true => {
                    gate.release();
                    putting.wait(1, Some(first)).expect("it waits");
                }
                false => putting.put(0, Some(first)).expect("it puts"),
            }
            // SAFETY: the double trusts no handles.
            let lined_up = unsafe { context.line_up((*device, second), &[], true, None) };
            assert_eq!(lined_up, Ok(true));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!is_through(devices, *device, second), "waits: {waits}");
            match waits {
                true => putting.put(0, Some(double.stream(*device))).expect("it puts"),
                false => gate.release(),
            }
            until("the stream goes on", || is_through(devices, *device, second));
            if !waits {
                putting.wait(1, Some(second)).expect("it waits");
            }
        });
    }
}

/// What is captured has an order of its own.
#[test]
fn a_stream_that_is_captured_or_anothers_waits_for_nothing() {
    ranks(&[process(2), process(2)].map(|(double, devices)| (double, devices, 0)), words, |context, seat| {
        let (double, devices, device) = seat;
        context.cuda().pretend(devices, 256);
        let (output, first) = (double.memory(*device, 4), double.stream(*device));
        run(&sum(context, 1, output, Some(first), PATIENCE)).expect("it ends well");
        let (captured, others) = (double.stream(*device), double.stream(1));
        double.begin_capture(captured, *device);
        for stream in [captured, others] {
            // SAFETY: the double trusts no handles.
            let lined_up = unsafe { context.line_up((*device, stream), &[], false, None) };
            assert_eq!((lined_up, double.waits()), (Ok(false), 0));
        }
        assert!(double.end_capture(captured, *device).is_ok());
    });
}
