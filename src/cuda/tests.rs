use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::context::Devices;
use super::double::{Double, Order, Refusal};
use super::driver::{CaptureMode, DeviceCalls, Memory, StreamHandle};
use super::event::Event;
use super::joined;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::stream::{Stream, StreamName};
use crate::deadline::Deadline;
use crate::error::Status;

fn open(order: Order) -> (Arc<Double>, Arc<Devices>) {
    let double = Double::new(2, order);
    let devices = Devices::over(double.clone()).unwrap();
    (double, devices)
}

#[test]
fn contexts_and_modes_are_put_back() {
    let (double, devices) = open(Order::Eager);
    assert_eq!(double.thread(), (vec![], CaptureMode::Global));
    {
        let _one = devices.enter(1).unwrap();
        let _relaxed = devices.relax().unwrap();
        let _zero = devices.enter(0).unwrap();
        let (contexts, mode) = double.thread();
        assert_eq!(contexts, [devices.context(1).unwrap(), devices.context(0).unwrap()]);
        assert_eq!(mode, CaptureMode::Relaxed);
    }
    assert_eq!(double.thread(), (vec![], CaptureMode::Global));
    let error = devices.enter(2).unwrap_err();
    assert_eq!(
        (error.status(), error.text()),
        (Status::InvalidArgument, "device 2 does not exist; there are 2")
    );
}

#[test]
fn bytes_go_to_a_peer_and_back() {
    for order in Order::all(2) {
        let (double, devices) = open(order);
        let streams = [0, 1].map(|device| Stream::new(&devices, device, false).unwrap());
        let buffers = [0, 1].map(|device| DeviceBuffer::new(&devices, device, 8).unwrap());
        let pinned = PinnedBuffer::new(&devices, 0, 16).unwrap();
        // Asked twice, enabled once: the double complains about a second time.
        assert!(devices.reaches(0, 1).unwrap() && devices.reaches(0, 1).unwrap());
        let back = pinned.address().wrapping_add(8);
        // SAFETY: the buffers outlive the streams' work, which is waited for below.
        unsafe {
            pinned.address().copy_from(b"unisono!".as_ptr(), 8);
            streams[0].copy_to_device(buffers[0].address(), pinned.address(), 8).unwrap();
            streams[0].copy_to_peer(buffers[1].address(), 1, buffers[0].address(), 8).unwrap();
            let event = Event::new(&devices, 0).unwrap();
            event.record(&streams[0]).unwrap();
            streams[1].wait(&event).unwrap();
            streams[1].copy_to_host(back, buffers[1].address(), 8).unwrap();
        }
        streams[1].synchronize(Deadline::after(Duration::from_secs(20))).unwrap();
        // SAFETY: the stream has written it.
        assert_eq!(unsafe { std::slice::from_raw_parts(back, 8) }, b"unisono!");
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn waiting_for_a_device_ends_at_the_deadline() {
    let (double, devices) = open(Order::RoundRobin);
    let stream = Stream::new(&devices, 1, false).unwrap();
    let flag = DeviceBuffer::new(&devices, 1, 4).unwrap();
    double.fill(stream.handle(), 1, flag.address(), &[0; 4]);
    // SAFETY: the flag outlives the wait, which ends below.
    unsafe { stream.wait_value(flag.address(), 1).unwrap() };
    let error = stream.synchronize(Deadline::after(Duration::from_millis(5))).unwrap_err();
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().starts_with("device 1 has not finished what it was given after "), "{error}");
    let other = Stream::new(&devices, 1, false).unwrap();
    // SAFETY: as above.
    unsafe { other.write_value(flag.address(), 1).unwrap() };
    stream.synchronize(Deadline::after(Duration::from_secs(20))).unwrap();
}

#[test]
fn a_host_function_runs_in_its_place() {
    unsafe extern "C" fn count(user: *mut c_void) {
        // SAFETY: the counter below, which outlives the stream's work.
        unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    }
    let (double, devices) = open(Order::RoundRobin);
    let stream = Stream::new(&devices, 0, false).unwrap();
    let counter = AtomicU32::new(0);
    // SAFETY: the counter outlives the stream's work, which is waited for below.
    unsafe { stream.launch_host(count, (&raw const counter).cast_mut().cast()).unwrap() };
    assert_eq!(counter.load(Ordering::Relaxed), 0);
    stream.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(counter.load(Ordering::Relaxed), 1);
    assert_eq!(double.synchronizations(), 1);
}

#[test]
fn memory_is_located() {
    let (_double, devices) = open(Order::Eager);
    let buffer = DeviceBuffer::new(&devices, 1, 64).unwrap();
    let pinned = PinnedBuffer::new(&devices, 0, 64).unwrap();
    let inside = devices.locate(buffer.address() + 63).unwrap().unwrap();
    assert_eq!((inside.memory, inside.device, inside.base), (Memory::Device, 1, buffer.address()));
    assert_eq!(devices.locate(pinned.address().addr() as u64).unwrap().unwrap().memory, Memory::Host);
    assert_eq!(devices.locate((&raw const buffer).addr() as u64).unwrap(), None);
    let address = buffer.address();
    drop(buffer);
    assert_eq!(devices.locate(address).unwrap(), None);
}

#[test]
fn a_host_pointer_is_not_device_memory() {
    let here = 7u8;
    let address = (&raw const here).addr() as u64;
    assert_eq!(Devices::locate_if_loaded(address).unwrap(), None);
    // A second time, by the count of libraries.
    assert_eq!(Devices::locate_if_loaded(address).unwrap(), None);
}

/// Another one would take memory of a device that the process may have no business with.
#[test]
fn a_thread_without_a_context_asks_about_memory_in_one_that_is_there() {
    let (double, devices) = open(Order::Eager);
    let buffer = DeviceBuffer::new(&devices, 1, 64).unwrap();
    let here = buffer.address();
    let ask = || devices.locate(here).map(|found| found.map(|found| found.device));
    assert_eq!(std::thread::scope(|scope| scope.spawn(ask).join()).unwrap().unwrap(), Some(1));
    assert_eq!(ask().unwrap(), Some(1));
    assert!(!double.has_context(0) && double.has_context(1));
    assert_eq!(double.thread(), (vec![], CaptureMode::Global));
}

#[test]
fn where_there_is_no_context_the_first_devices_is_made_to_ask_about_memory() {
    let (double, devices) = open(Order::Eager);
    let memory = double.memory(1, 64);
    double.refuse(Refusal { call: Some("cuDevicePrimaryCtxRetain"), ..Refusal::default() });
    let error = devices.locate(memory).unwrap_err();
    assert_eq!(error.status(), Status::Cuda);
    assert!(
        error.text().starts_with("the context of GPU 0, in which a thread that has none asks"),
        "{error}"
    );
    // Whatever is captured just now.
    double.begin_capture(double.stream(1), 1);
    assert_eq!(devices.locate(memory).unwrap().unwrap().device, 1);
    assert!(double.has_context(0) && !double.has_context(1));
    assert_eq!(double.thread(), (vec![], CaptureMode::Global));
}

#[test]
fn default_streams_are_of_the_device_they_are_used_with() {
    let (_double, devices) = open(Order::Eager);
    // SAFETY: default streams always exist.
    let borrow = |device, handle| unsafe { Stream::borrow(&devices, device, handle).unwrap() };
    let [null, legacy] = [StreamHandle::NULL, StreamHandle::LEGACY].map(|handle| borrow(0, handle));
    assert!(null.is(&legacy));
    assert!(!null.is(&borrow(1, StreamHandle::NULL)));
    assert!(!null.is(&borrow(0, StreamHandle::PER_THREAD)));
}

/// A word is dropped before the stream that is to release it has come so far: it is used again after that.
#[test]
fn streams_of_contexts_that_the_program_has_made_are_refused_by_name() {
    let (double, devices) = open(Order::Eager);
    // SAFETY: the double trusts no handles.
    let borrow = |device, handle| unsafe { Stream::borrow(&devices, device, handle) }.map(drop);
    let own = double.make_context(1);
    let error = borrow(1, double.stream_of(own, false)).expect_err("it is of another context");
    assert_eq!(
        (error.status(), error.text()),
        (
            Status::InvalidArgument,
            "the stream is of a context that the program has made on GPU 1 (cuCtxCreate): give one of the GPU's primary \
             context, which is the CUDA runtime's"
        )
    );
    borrow(1, double.stream(1)).expect("it is the primary context's");
    borrow(1, double.stream_of(double.make_context(1), true)).expect("a part of the device");
    for handle in [StreamHandle::NULL, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        borrow(1, handle).expect("this thread has no context");
        // SAFETY: it lives as long as the double.
        unsafe { double.push_context(own) }.expect("it is there");
        let error = borrow(1, handle).expect_err("it has another default stream");
        assert_eq!(error.status(), Status::InvalidArgument);
        let starts = "this thread's context on GPU 1 is one that the program has made (cuCtxCreate)";
        assert!(error.text().starts_with(starts), "{error}");
        borrow(0, handle).expect("the context is of another device");
        {
            let _entered = devices.enter(1).expect("its primary context");
            borrow(1, handle).expect("that is current");
        }
        // SAFETY: pushed above.
        unsafe { double.pop_context() }.expect("what was pushed");
    }
}

#[test]
fn a_stream_has_another_name_than_the_one_that_had_its_handle() {
    let (double, devices) = open(Order::RoundRobin);
    // SAFETY: the double trusts no handles.
    let name = |handle| unsafe { StreamName::of(&devices, 0, handle) };
    let made = || {
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        assert_eq!(name(stream.handle()), name(stream.handle()));
        (stream.handle(), name(stream.handle()))
    };
    let (first, second) = (made(), made());
    assert!(first.0 == second.0 && first.1 != second.1, "{first:?}, {second:?}");
    assert_eq!(name(StreamHandle::NULL), name(StreamHandle::LEGACY));
    let of_a_thread = || std::thread::scope(|scope| scope.spawn(|| name(StreamHandle::PER_THREAD)).join());
    assert_ne!(of_a_thread().expect("no panic"), of_a_thread().expect("no panic"));
    let handle = double.stream(0);
    double.begin_capture(handle, 0);
    assert_eq!(name(handle), StreamName::Unknown(handle));
    double.end_capture(handle, 0).expect("it is captured");
}

#[test]
fn words_that_streams_release_late_are_used_again() {
    let (double, devices) = open(Order::RoundRobin);
    let stream = Stream::new(&devices, 0, false).expect("a stream");
    let addresses: Vec<u64> = (0..10_000)
        .map(|_| {
            let word = devices.word(0).expect("a word");
            stream.release_word(&word).expect("it is given");
            let address = word.address();
            drop(word);
            double.drain();
            address
        })
        .collect();
    let distinct: std::collections::HashSet<u64> = addresses.into_iter().collect();
    assert!(distinct.len() <= 256, "a page of words serves: {}", distinct.len());
    assert_eq!(double.complaints(), Vec::<String>::new());
}

const STREAMS: usize = 3;

/// Streams that write their numbers, do `then`, and copy what all have written: what each has found.
fn found(order: Order, then: impl FnOnce(&Stream, &[Stream], u64)) -> Vec<Vec<u32>> {
    let (double, devices) = open(order);
    let streams = [(); STREAMS].map(|()| Stream::new(&devices, 0, false).expect("a stream"));
    let words = DeviceBuffer::new(&devices, 0, 4 * (STREAMS + 1)).expect("memory");
    let copies = [(); STREAMS].map(|()| PinnedBuffer::new(&devices, 0, 4 * (STREAMS + 1)).expect("memory"));
    double.fill(streams[0].handle(), 0, words.address(), &[0; 4 * (STREAMS + 1)]);
    streams[0].synchronize(Deadline::NEVER).expect("it is done");
    for (number, stream) in streams.iter().enumerate() {
        // SAFETY: the memory outlives the streams' work, which is waited for below.
        unsafe { stream.write_value(words.address() + 4 * number as u64, 1 + number as u32) }
            .expect("it is given");
    }
    then(&streams[0], &streams[1..], words.address() + 4 * STREAMS as u64);
    for (stream, copy) in streams.iter().zip(&copies) {
        // SAFETY: as above.
        unsafe { stream.copy_to_host(copy.address(), words.address(), 4 * (STREAMS + 1)) }
            .expect("it is given");
    }
    streams.iter().for_each(|stream| stream.synchronize(Deadline::NEVER).expect("it is done"));
    assert_eq!(double.complaints(), Vec::<String>::new());
    let read = |copy: &PinnedBuffer| {
        // SAFETY: the stream has written it.
        unsafe { std::slice::from_raw_parts(copy.address().cast::<u32>(), STREAMS + 1) }.to_vec()
    };
    copies.iter().map(read).collect()
}

#[test]
fn streams_that_meet_wait_for_all_that_each_was_given() {
    let mut apart = 0;
    for order in Order::all(STREAMS) {
        let met = found(order, |first, others, _| joined::meet(first, others).expect("they meet"));
        assert_eq!(met, [[1, 2, 3, 0]; STREAMS], "{order:?}");
        apart += u32::from(found(order, |_, _, _| ()) != [[1, 2, 3, 0]; STREAMS]);
    }
    assert!(apart > 0, "they find out when they do not");
}

#[test]
fn what_is_given_between_streams_comes_after_all_of_them_and_before_what_follows() {
    for order in Order::all(STREAMS) {
        let met = found(order, |first, others, last| {
            // SAFETY: the memory lives as long as the streams.
            joined::between(first, others, || unsafe { first.write_value(last, 4) }).expect("it is given");
        });
        assert_eq!(met, [[1, 2, 3, 4]; STREAMS], "{order:?}");
    }
}

#[test]
fn streams_of_several_captures_are_no_one_stream() {
    let (double, devices) = open(Order::RoundRobin);
    let streams = [(); 2].map(|()| Stream::new(&devices, 0, false).expect("a stream"));
    let in_one = |first: usize| joined::in_one_capture(&streams[first], &streams[1 - first..=1 - first]);
    in_one(0).expect("neither is captured");
    double.begin_capture(streams[0].handle(), 0);
    for first in [0, 1] {
        assert_eq!(in_one(first).expect_err("one is captured").status(), Status::InvalidUsage);
    }
    // What waits for a capture is in it.
    let event = Event::new(&devices, 0).expect("an event");
    event.record(&streams[0]).expect("it is recorded");
    streams[1].wait(&event).expect("it joins");
    in_one(0).expect("both are captured");
    event.record(&streams[1]).expect("it is recorded");
    streams[0].wait(&event).expect("it comes back");
    double.end_capture(streams[0].handle(), 0).expect("a graph");
}
