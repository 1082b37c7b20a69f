use super::*;
use crate::cuda::driver::{MemoryCalls, StreamCalls};
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;

/// Two streams of device 0, and four bytes of memory that hold 0 when all that was given is done.
fn two(order: Order) -> (Arc<Double>, Arc<Devices>, [Stream; 2], u64) {
    let double = Double::new(2, order);
    let devices = Devices::over(double.clone()).unwrap();
    let memory = double.memory(0, 4);
    // SAFETY: the double trusts no handles.
    let stream = || unsafe { Stream::borrow(&devices, 0, double.stream(0)).unwrap() };
    let streams = [stream(), stream()];
    double.fill(streams[0].handle(), 0, memory, &[0; 4]);
    streams[0].synchronize(crate::deadline::Deadline::NEVER).unwrap();
    (double, devices, streams, memory)
}

/// What is in the memory after stream 0 wrote 1 and stream 1 wrote 2, with `between` called after the first.
fn written(order: Order, between: impl Fn(&Arc<Devices>, &[Stream; 2])) -> u8 {
    let (double, devices, streams, memory) = two(order);
    double.fill(streams[0].handle(), 0, memory, &[1]);
    between(&devices, &streams);
    double.fill(streams[1].handle(), 0, memory, &[2]);
    double.drain();
    assert_eq!(double.complaints(), Vec::<String>::new());
    double.peek(memory, 1)[0]
}

fn order_by_event(devices: &Arc<Devices>, streams: &[Stream; 2]) {
    let event = Event::new(devices, 0).unwrap();
    event.record(&streams[0]).unwrap();
    streams[1].wait(&event).unwrap();
}

#[test]
fn unordered_streams_run_either_way_round() {
    let outcomes = |between: fn(&Arc<Devices>, &[Stream; 2])| {
        let mut outcomes: Vec<u8> = Order::all(2).into_iter().map(|order| written(order, between)).collect();
        outcomes.sort_unstable();
        outcomes.dedup();
        outcomes
    };
    assert_eq!(outcomes(|_, _| {}), [1, 2]);
    assert_eq!(outcomes(order_by_event), [2]);
    // An event that was never recorded orders nothing.
    assert_eq!(
        outcomes(|devices, streams| streams[1].wait(&Event::new(devices, 0).unwrap()).unwrap()),
        [1, 2]
    );
}

#[test]
fn a_wait_means_what_was_recorded_when_it_was_called() {
    for order in Order::all(2) {
        let (double, devices, streams, memory) = two(order);
        let event = Event::new(&devices, 0).unwrap();
        event.record(&streams[0]).unwrap();
        streams[1].wait(&event).unwrap();
        // Recorded again behind a wait for stream 1: were it this that counts, both would wait for ever.
        // SAFETY: the memory lives until the double is dropped.
        unsafe { streams[0].wait_value(memory, 5).unwrap() };
        event.record(&streams[0]).unwrap();
        // SAFETY: as above.
        unsafe { streams[1].write_value(memory, 5).unwrap() };
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

#[test]
fn a_kernel_whose_steps_are_not_all_given_has_none_of_what_comes_later() {
    let (double, devices, [stream, _], memory) = two(Order::RoundRobin);
    let fault = Fault::new(&devices, 0).expect("a page");
    let latch = double.memory(0, 4);
    // So that it leaves at once, with all that it has.
    double.fill(stream.handle(), 0, latch, &[1; 4]);
    let give = || double.kernel(&fault, latch, || panic!("the test means this one"));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(give)).expect_err("it panics");
    double.fill(stream.handle(), 0, memory, &[1; 4]);
    double.drain();
    assert_eq!(double.peek(memory, 4), [1; 4]);
}

#[test]
fn streams_that_wait_for_ever_are_found() {
    let (double, _devices, streams, memory) = two(Order::RoundRobin);
    // SAFETY: the memory lives until the double is dropped.
    unsafe { streams[0].wait_value(memory, 5).unwrap() };
    double.drain();
    let [complaint] = &double.complaints()[..] else { panic!("one complaint") };
    assert!(
        complaint.starts_with("1 tasks wait for each other for ever: stream 0 of device 0"),
        "{complaint}"
    );
    assert!(complaint.contains("a wait for 5 at"), "{complaint}");
    assert!(complaint.ends_with("waits for that word, which is 0"), "{complaint}");
}

#[test]
fn what_holds_up_a_stream_is_told() {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    double.share_queues(1, 1);
    let event = Event::new(&devices, 0).unwrap();
    // SAFETY: the memory lives until the double is dropped.
    unsafe {
        streams[0].wait_value(memory, 5).unwrap();
        event.record(&streams[0]).unwrap();
        streams[1].write_value(memory, 9).unwrap();
    }
    assert_eq!(double.standstill(), None, "nobody has looked");
    double.note_standstill();
    let told = double.standstill().expect("streams have something left to do");
    let [first, second] = &told.split("; ").collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert!(first.contains("stream 0 of device 0") && first.contains("before 1 more"), "{first}");
    assert!(second.starts_with("stream 1 of device 0 (Ordinary priority): a write of 9 at"), "{second}");
    assert!(second.contains("an event, or the wait for one in queue 0"), "{second}");
    assert!(
        second.ends_with("of stream 0 of device 0 (Ordinary priority), which is ahead of it in that queue"),
        "{second}"
    );
}

#[test]
fn what_waits_in_a_queue_holds_up_other_streams_whatever_their_priority() {
    for (queues, priority, done) in
        [(1, Priority::Ordinary, 1), (1, Priority::Highest, 1), (2, Priority::Ordinary, 9)]
    {
        let (double, devices, streams, memory) = two(Order::RoundRobin);
        double.share_queues(queues, 1);
        let third = Stream::with_priority(&devices, 0, false, priority).unwrap();
        double.fill(streams[0].handle(), 0, memory, &[1]);
        // SAFETY: the memory lives until the double is dropped.
        unsafe {
            streams[0].wait_value(memory, 5).unwrap();
            third.write_value(memory, 9).unwrap();
        }
        double.drain();
        assert_eq!(double.peek(memory, 1), [done], "{queues} queues, {priority:?}");
    }
}

#[test]
fn a_copy_that_cannot_start_holds_up_other_copies_whatever_their_priority() {
    for priority in [Priority::Ordinary, Priority::High] {
        let (double, devices, streams, memory) = two(Order::RoundRobin);
        double.share_queues(8, 2);
        let third = Stream::with_priority(&devices, 0, false, priority).unwrap();
        double.fill(streams[0].handle(), 0, memory, &[1]);
        // SAFETY: the memory lives until the double is dropped.
        unsafe { streams[0].wait_value(memory, 5).unwrap() };
        double.fill(streams[0].handle(), 0, memory, &[2]);
        double.fill(third.handle(), 0, memory, &[9]);
        double.drain();
        assert_eq!(double.peek(memory, 1), [1], "{priority:?}");
    }
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_only() {
    for order in Order::all(3) {
        let double = Double::new(1, order);
        let devices = Devices::over(double.clone()).unwrap();
        let memory = double.memory(0, 1);
        let blocking = Stream::new(&devices, 0, true).unwrap();
        for (stream, value) in [(blocking.handle(), 1), (StreamHandle::LEGACY, 2), (blocking.handle(), 3)] {
            let before: &[u8] = if value == 1 { &[RUBBISH_NOW] } else { &[value - 1] };
            double.expect(stream, 0, memory, before, "order");
            double.fill(stream, 0, memory, &[value]);
        }
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
        assert_eq!(double.peek(memory, 1), [3]);
    }
}

/// What new memory holds.
const RUBBISH_NOW: u8 = 0xdb;

#[test]
fn misuse_is_complained_about() {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    let buffer = super::super::memory::DeviceBuffer::new(&devices, 0, 4).unwrap();
    // SAFETY: it is the test that this is wrong; the double checks.
    unsafe { streams[0].copy_to_peer(memory, 0, buffer.address(), 4).unwrap() };
    drop(buffer);
    let complaints = double.complaints();
    assert!(complaints[0].ends_with("is freed while a stream is to use it"), "{complaints:?}");
    double.drain();
    assert!(double.complaints()[0].ends_with("is no live memory"));

    // Memory of another device, as if it were this one's.
    let far = double.memory(1, 4);
    // SAFETY: as above.
    unsafe { streams[0].copy_to_peer(far, 0, memory, 4).unwrap() };
    double.drain();
    assert!(double.complaints()[0].contains("copied as of Some(0), but it is of Some(Some(1))"));
}

#[test]
fn captured_streams_are_joined_and_apart() {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    let handle = streams[0].handle();
    let event = Event::new(&devices, 0).unwrap();

    // A stream outside cannot be waited for.
    event.record(&streams[1]).unwrap();
    double.begin_capture(handle, 0);
    assert!(streams[0].wait(&event).unwrap_err().text().contains("CAPTURE_ISOLATION"));
    assert!(double.end_capture(handle, 0).unwrap_err().text().contains("CAPTURE_INVALIDATED"));

    // A stream that joined has to come back.
    double.begin_capture(handle, 0);
    order_by_event(&devices, &streams);
    double.fill(streams[1].handle(), 0, memory, &[7]);
    assert!(double.end_capture(handle, 0).unwrap_err().text().contains("CAPTURE_UNJOINED"));

    // What is forbidden in a capture breaks it, unless the thread's mode is relaxed, as it is for all of
    // ours.
    double.begin_capture(handle, 0);
    assert!(streams[0].capture().unwrap() != Capture::None);
    drop(super::super::memory::DeviceBuffer::new(&devices, 0, 4).unwrap());
    drop(Stream::new(&devices, 1, true).unwrap());
    assert!(event.query().is_ok());
    double.fill(handle, 0, memory, &[9]);
    let graph = double.end_capture(handle, 0).unwrap();
    assert_eq!(double.peek(memory, 1), [0]);
    double.launch_graph(&graph, handle, 0);
    double.drain();
    assert_eq!(double.peek(memory, 1), [9]);
    double.begin_capture(handle, 0);
    {
        let _entered = devices.enter(0).unwrap();
        assert!(double.allocate_device(4).unwrap_err().text().contains("CAPTURE_UNSUPPORTED"));
    }
    assert!(double.end_capture(handle, 0).is_err());
}

/// Whatever the mode of the thread that does it.
#[test]
fn a_capture_ends_with_what_it_forbids() {
    let (double, devices, [stream, other], _) = two(Order::RoundRobin);
    let handle = stream.handle();
    let event = Event::new(&devices, 0).unwrap();
    event.record(&other).unwrap();
    // SAFETY: the double trusts no handles.
    let legacy = unsafe { Stream::borrow(&devices, 0, StreamHandle::LEGACY) }.unwrap();
    let number = || {
        let _entered = devices.enter(0)?;
        // SAFETY: as above.
        unsafe { double.stream_id(handle) }.map(drop)
    };
    let forbidden: [&dyn Fn() -> Result<()>; 5] = [
        &|| stream.query().map(drop),
        &|| legacy.query().map(drop),
        &|| event.record(&legacy),
        &|| legacy.wait(&event),
        &number,
    ];
    for (number, forbidden) in forbidden.into_iter().enumerate() {
        double.begin_capture(handle, 0);
        let refused = forbidden().expect_err("it is forbidden");
        assert!(refused.text().contains("CUDA_ERROR_STREAM_CAPTURE_"), "{refused}");
        assert!(double.end_capture(handle, 0).is_err(), "{number}");
    }
}

#[test]
fn handles_and_addresses_come_back_and_numbers_do_not() {
    let (double, devices, ..) = two(Order::RoundRobin);
    let _entered = devices.enter(0).unwrap();
    let stream = || {
        let stream = Stream::new(&devices, 0, false).unwrap();
        // SAFETY: the double trusts no handles.
        (stream.handle(), unsafe { double.stream_id(stream.handle()) }.unwrap())
    };
    let (first, second) = (stream(), stream());
    assert!(first.0 == second.0 && first.1 != second.1, "{first:?}, {second:?}");
    let event = || Event::new(&devices, 0).unwrap().handle();
    assert_eq!(event(), event());
    let memory = || {
        let address = double.memory(0, 64);
        let number = devices.locate(address).unwrap().expect("it is there").buffer;
        double.free(address);
        (address, number)
    };
    let (first, second) = (memory(), memory());
    assert!(first.0 == second.0 && first.1 != second.1, "{first:?}, {second:?}");
    assert!(devices.locate(first.0).unwrap().is_none(), "it is freed");
}

/// The driver refuses edges that are there already, and that are not there.
#[test]
fn a_record_in_a_graph_comes_behind_the_last_of_a_stream_alone_whatever_that_joins() {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    let [stream, other] = &streams;
    let event = Event::new(&devices, 0).unwrap();
    let fill = |stream: &Stream| double.fill(stream.handle(), 0, memory, &[7]);
    double.begin_capture(stream.handle(), 0);
    fill(stream);
    let mut record = stream.record_at_launch(&event).unwrap();
    let first = record.behind.clone();
    // Nothing since.
    stream.put_off(&mut record).unwrap();
    assert_eq!(record.behind, first);
    // Nothing but what another stream was given.
    order_by_event(&devices, &streams);
    fill(other);
    let join = || {
        let event = Event::new(&devices, 0).unwrap();
        event.record(other).unwrap();
        stream.wait(&event).unwrap();
    };
    join();
    stream.put_off(&mut record).unwrap();
    assert!(record.behind.len() == 2 && record.behind.contains(&first[0]), "{record:?}");
    other.put_off(&mut record).unwrap();
    stream.put_off(&mut record).unwrap();
    fill(stream);
    stream.put_off(&mut record).unwrap();
    assert!(record.behind.len() == 1 && !record.behind.contains(&first[0]), "{record:?}");
    let graph = double.end_capture(stream.handle(), 0).unwrap();
    double.launch_graph(&graph, stream.handle(), 0);
    double.drain();
    assert_eq!(double.complaints(), Vec::<String>::new());
}

/// Stream 0 waits for a word that this thread has stream 1 write, while another thread is in `call`.
fn waits_with_the_lock(calls: Waiting, call: impl Fn(&Arc<Double>, &Arc<Devices>) + Sync) -> String {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    double.hold_lock(calls, Duration::from_secs(2));
    // SAFETY: the memory lives until the double is dropped.
    unsafe { streams[0].wait_value(memory, 5).unwrap() };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| call(&double, &devices));
        while !double.is_held() && !other.is_finished() {
            std::thread::yield_now();
        }
        // SAFETY: as above.
        unsafe { streams[1].write_value(memory, 5).unwrap() };
    });
    double.drain();
    double.complaints().concat()
}

#[test]
fn a_call_that_waits_with_the_lock_for_a_stream_that_needs_another_call_is_found() {
    let allocates = |_: &Arc<Double>, devices: &Arc<Devices>| {
        std::mem::forget(super::super::memory::DeviceBuffer::new(devices, 0, 4).unwrap());
    };
    let loads = |double: &Arc<Double>, _: &Arc<Devices>| double.launch_first(0);
    let creates = |_: &Arc<Double>, devices: &Arc<Devices>| drop(Event::new(devices, 0).unwrap());
    let complaint = waits_with_the_lock(Waiting::All, allocates);
    for part in ["cuMemAlloc waits for device 0 for ever", "[cuStreamWriteValue32] need", "WaitValue"] {
        assert!(complaint.contains(part), "{complaint}");
    }
    let complaint = waits_with_the_lock(Waiting::Seen, loads);
    assert!(complaint.contains("cuLaunchKernel of the program waits"), "{complaint}");
    assert_eq!(waits_with_the_lock(Waiting::Seen, allocates), "");
    assert_eq!(waits_with_the_lock(Waiting::All, creates), "");
}

#[test]
fn a_call_that_waits_goes_on_when_the_device_has_done_what_it_was_given() {
    let (double, devices, streams, memory) = two(Order::RoundRobin);
    double.hold_lock(Waiting::All, Duration::from_secs(20));
    double.fill(streams[0].handle(), 0, memory, &[7]);
    let _buffer = super::super::memory::DeviceBuffer::new(&devices, 0, 4).unwrap();
    assert_eq!((double.peek(memory, 1), double.complaints()), (vec![7], Vec::new()));
}
