//! The driver layer on real devices.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys;
use unisono::cuda::context::Devices;
use unisono::cuda::driver::{Capture, CaptureMode, Grid, Location, Memory, StreamHandle};
use unisono::cuda::event::Event;
use unisono::cuda::kernels::{IMAGE, Launch, kernel};
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::{DataType, Operand, Operator, Representation};

use super::cuda::{
    Graph, Noise, begin_capture, calls, current_context, devices, fewer_than, filled, ok, raw, read, soon,
    stream,
};

#[test]
fn devices_are_found() {
    let devices = devices();
    assert!(devices.count() > 0);
    for device in 0..devices.count() {
        devices.context(device).expect("a primary context");
        let (major, minor) = devices.driver().capability(device).expect("a compute capability");
        let processors = devices.driver().multiprocessors(device).expect("multiprocessors");
        println!("device {device}: compute capability {major}.{minor}, {processors} multiprocessors");
        assert!(major >= 5 && minor >= 0 && processors > 0);
    }
    let beyond = devices.count();
    assert_eq!(devices.context(beyond).unwrap_err().status(), Status::InvalidArgument);
    assert_eq!(devices.driver().capability(beyond).unwrap_err().status(), Status::Cuda);
}

/// Runs `body` on a thread of its own, where no context is current.
fn on_a_bare_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(body).join().expect("no panic"))
}

/// One of each thing that makes a context current, and a failure of each kind.
fn everything(devices: &std::sync::Arc<Devices>) {
    let device = devices.count() - 1;
    let stream = Stream::new(devices, device, true).unwrap();
    let event = Event::new(devices, device).unwrap();
    let memory = DeviceBuffer::new(devices, device, 64).unwrap();
    let pinned = PinnedBuffer::new(devices, device, 64).unwrap();
    // SAFETY: the stream is waited for below.
    unsafe {
        stream.copy_to_host(pinned.address(), memory.address(), 64).unwrap();
        stream.write_value(memory.address(), 1).unwrap();
    }
    event.record(&stream).unwrap();
    stream.wait(&event).unwrap();
    event.synchronize(soon()).unwrap();
    event.synchronize(Deadline::NEVER).unwrap();
    stream.synchronize(soon()).unwrap();
    assert_eq!(stream.capture().unwrap(), Capture::None);
    devices.locate(memory.address()).unwrap().unwrap();
    devices.locate((&raw const device).addr() as u64).unwrap();
    for peer in 0..devices.count() {
        devices.reaches(device, peer).unwrap();
    }
    let error = DeviceBuffer::new(devices, device, 1 << 50).unwrap_err();
    assert_eq!(error.status(), Status::OutOfMemory);
    let text = error.text();
    assert!(text.contains("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)"), "{text}");
    assert!(text.contains("1125899906842624 bytes of device memory"), "{text}");
    // SAFETY: the stream is live, and default streams always exist.
    unsafe {
        Stream::borrow(devices, device, stream.handle()).unwrap();
        Stream::borrow(devices, device, StreamHandle::PER_THREAD).unwrap();
    }
}

#[test]
fn the_callers_context_stays_current() {
    let devices = devices();
    on_a_bare_thread(|| {
        assert_eq!(current_context(), 0);
        everything(&devices);
        assert_eq!(current_context(), 0, "a context is left on a thread that had none");
    });
    on_a_bare_thread(|| {
        let own = devices.context(0).unwrap().0;
        // SAFETY: a retained context.
        ok("cuCtxSetCurrent", unsafe { (calls().cuCtxSetCurrent)(raw(own)) });
        everything(&devices);
        assert_eq!(current_context(), own, "the caller's context is not current any more");
        let before = devices.driver().exchange_capture_mode(CaptureMode::ThreadLocal).unwrap();
        assert_eq!(before, CaptureMode::Global);
        everything(&devices);
        let after = devices.driver().exchange_capture_mode(CaptureMode::Global).unwrap();
        assert_eq!(after, CaptureMode::ThreadLocal, "the caller's capture mode has changed");
    });
}

/// Asked on a thread with a context, on one without, and in the way of calls that may be given either memory.
fn locate(address: u64) -> Option<Location> {
    let devices = devices();
    let bare = on_a_bare_thread(|| devices.locate(address).unwrap());
    let any = on_a_bare_thread(|| Devices::locate_if_loaded(address).unwrap());
    let _entered = devices.enter(0).unwrap();
    let here = devices.locate(address).unwrap();
    assert_eq!((here, here), (bare, any), "{address:#x}");
    here
}

#[test]
fn device_memory_is_located() {
    let devices = devices();
    for device in 0..devices.count() {
        let buffer = DeviceBuffer::new(&devices, device, 1000).unwrap();
        let start = locate(buffer.address()).expect("device memory");
        assert_eq!((start.memory, start.device, start.base), (Memory::Device, device, buffer.address()));
        assert!(start.bytes >= 1000, "{start:?}");
        let inside = locate(buffer.address() + 999).expect("device memory");
        assert_eq!(inside, start);

        let address = buffer.address();
        drop(buffer);
        assert_eq!(locate(address), None, "freed memory");
        let again = DeviceBuffer::new(&devices, device, 1000).unwrap();
        let again = locate(again.address()).expect("device memory");
        assert_ne!(again.buffer, start.buffer, "another allocation has the same number");
    }
}

#[test]
fn host_memory_is_located() {
    let devices = devices();
    let pinned = PinnedBuffer::new(&devices, 0, 4096).unwrap();
    assert_eq!(locate(pinned.address().addr() as u64 + 5).expect("pinned memory").memory, Memory::Host);

    let mut plain = vec![7u8; 1 << 20];
    let address = plain.as_mut_ptr();
    assert_eq!(locate(address.addr() as u64), None, "plain host memory");
    {
        let _entered = devices.enter(0).unwrap();
        // SAFETY: a live allocation, unregistered before it is freed.
        ok("cuMemHostRegister", unsafe { (calls().cuMemHostRegister_v2)(address.cast(), plain.len(), 0) });
    }
    assert_eq!(locate(address.addr() as u64 + 100).expect("registered memory").memory, Memory::Host);
    {
        let _entered = devices.enter(0).unwrap();
        // SAFETY: registered above.
        ok("cuMemHostUnregister", unsafe { (calls().cuMemHostUnregister)(address.cast()) });
    }
    assert_eq!(locate(address.addr() as u64), None, "host memory that is not registered any more");
    assert_eq!(locate(0), None);
    assert_eq!(locate(u64::MAX), None);
}

#[test]
fn managed_memory_is_located() {
    let devices = devices();
    let mut address = 0;
    let _entered = devices.enter(0).unwrap();
    // SAFETY: fills `address`; 1 is CU_MEM_ATTACH_GLOBAL.
    let result = unsafe { (calls().cuMemAllocManaged)(&raw mut address, 65536, 1) };
    if result == sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as i32 {
        println!("skipped: no managed memory here");
        return;
    }
    ok("cuMemAllocManaged", result);
    assert_eq!(locate(address + 8).expect("managed memory").memory, Memory::Managed);
    // SAFETY: allocated above.
    ok("cuMemFree", unsafe { (calls().cuMemFree_v2)(address) });
    assert_eq!(locate(address), None);
}

#[test]
fn memory_of_pools_is_located() {
    let stream = stream(devices().count() - 1);
    let mut address = 0;
    {
        let devices = devices();
        let _entered = devices.enter(stream.device()).unwrap();
        // SAFETY: fills `address`; the stream is live.
        ok("cuMemAllocAsync", unsafe {
            (calls().cuMemAllocAsync)(&raw mut address, 1 << 20, raw(stream.handle().0))
        });
    }
    stream.synchronize(soon()).unwrap();
    let found = locate(address + 4096).expect("memory of a pool");
    assert_eq!((found.memory, found.device), (Memory::Device, stream.device()));
    assert!(found.base <= address && found.base + found.bytes >= address + (1 << 20), "{found:?}");
    // SAFETY: allocated above.
    ok("cuMemFreeAsync", unsafe { (calls().cuMemFreeAsync)(address, raw(stream.handle().0)) });
    stream.synchronize(soon()).unwrap();
}

#[test]
fn mapped_memory_is_located() {
    let devices = devices();
    let device = devices.count() - 1;
    let _entered = devices.enter(device).unwrap();
    // SAFETY: plain data, for which zeros are valid.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device as i32;
    let access = sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let (mut unit, mut handle, mut address) = (0, 0, 0);
    let call = calls();
    // SAFETY: each call fills what it is given, and what is made here is ended below.
    unsafe {
        let granularity = (call.cuMemGetAllocationGranularity)(&raw mut unit, &raw const properties, 0);
        ok("cuMemGetAllocationGranularity", granularity);
        ok("cuMemCreate", (call.cuMemCreate)(&raw mut handle, unit, &raw const properties, 0));
        ok("cuMemAddressReserve", (call.cuMemAddressReserve)(&raw mut address, 4 * unit, 0, 0, 0));
        ok("cuMemMap", (call.cuMemMap)(address, unit, 0, handle, 0));
        ok("cuMemSetAccess", (call.cuMemSetAccess)(address, unit, &raw const access, 1));
    }
    let found = locate(address + 64).expect("mapped memory");
    println!("mapped {unit} of {} bytes at {address:#x}: {found:?}", 4 * unit);
    assert_eq!((found.memory, found.device), (Memory::Device, device));
    assert!(found.base <= address && found.base + found.bytes >= address + unit as u64, "{found:?}");
    // SAFETY: made above, and used by nobody.
    unsafe {
        ok("cuMemUnmap", (call.cuMemUnmap)(address, unit));
        ok("cuMemRelease", (call.cuMemRelease)(handle));
        ok("cuMemAddressFree", (call.cuMemAddressFree)(address, 4 * unit));
    }
    assert_eq!(locate(address + 64), None);
}

#[test]
fn bytes_go_to_every_device_and_back() {
    let devices = devices();
    let payload = Noise(5).bytes((1 << 20) + 3);
    for from in 0..devices.count() {
        for to in 0..devices.count() {
            let direct = devices.reaches(from, to).unwrap();
            let source = filled(from, &payload);
            let target = filled(to, &vec![0; payload.len()]);
            let streams = [stream(from), stream(to)];
            // SAFETY: the buffers outlive the streams' work, which `read` waits for.
            unsafe { streams[0].copy_to_peer(target.address(), to, source.address(), payload.len()) }
                .unwrap();
            let event = Event::new(&devices, from).unwrap();
            event.record(&streams[0]).unwrap();
            streams[1].wait(&event).unwrap();
            let found = read(&streams[1], target.address(), payload.len());
            assert!(found == payload, "from {from} to {to}, direct {direct}");
        }
    }
}

#[test]
fn memory_that_is_not_there_is_refused_and_breaks_nothing() {
    let devices = devices();
    let bytes = 1usize << 45;
    let error = DeviceBuffer::new(&devices, 0, bytes).expect_err("nobody has so much");
    assert_eq!(error.status(), Status::OutOfMemory, "{error}");
    assert!(
        error.text().starts_with(&format!("GPU 0: {bytes} bytes of device memory: cuMemAlloc")),
        "{error}"
    );
    let memory = filled(0, b"still alive");
    assert_eq!(read(&stream(0), memory.address(), 11), b"still alive");
}

#[test]
fn streams_wait_for_values() {
    let devices = devices();
    let device = 0;
    let flag = filled(device, &[0; 4]);
    let pinned = PinnedBuffer::new(&devices, device, 4).unwrap();
    // SAFETY: four bytes of our own.
    unsafe { pinned.address().cast::<u32>().write_volatile(u32::MAX - 1) };
    let (first, second) = (stream(device), stream(device));
    let target = filled(device, &[0; 4]);
    for (address, before) in [(flag.address(), 0u32), (pinned.address().addr() as u64, u32::MAX - 1)] {
        // The second value wraps past zero.
        for value in [before.wrapping_add(1), before.wrapping_add(3)] {
            // SAFETY: the memory outlives the streams' work, which is waited for below.
            unsafe {
                first.wait_value(address, value).unwrap();
                first.write_value(target.address(), value ^ 0x5555).unwrap();
            }
            let error = first.synchronize(Deadline::after(Duration::from_millis(20))).unwrap_err();
            assert_eq!(error.status(), Status::Timeout, "{error}");
            // SAFETY: as above.
            unsafe { second.write_value(address, value).unwrap() };
            first.synchronize(soon()).unwrap();
            second.synchronize(soon()).unwrap();
            assert_eq!(read(&first, target.address(), 4), (value ^ 0x5555).to_ne_bytes());
        }
    }
    // The host can release a stream that waits for pinned memory.
    // SAFETY: as above; the host writes four bytes of its own memory.
    unsafe {
        first.wait_value(pinned.address().addr() as u64, 100).unwrap();
        pinned.address().cast::<u32>().write_volatile(100);
    }
    first.synchronize(soon()).unwrap();
}

#[test]
fn a_host_function_runs_in_its_place() {
    unsafe extern "C" fn count(user: *mut c_void) {
        // SAFETY: the counter below, which outlives the stream's work.
        unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    }
    let flag = filled(0, &[0; 4]);
    let (first, second) = (stream(0), stream(0));
    let counter = AtomicU32::new(0);
    // SAFETY: counter and flag outlive the streams' work, which is waited for below.
    unsafe {
        first.wait_value(flag.address(), 1).unwrap();
        first.launch_host(count, (&raw const counter).cast_mut().cast()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(counter.load(Ordering::Relaxed), 0);
    // SAFETY: as above.
    unsafe { second.write_value(flag.address(), 1).unwrap() };
    first.synchronize(soon()).unwrap();
    assert_eq!(counter.load(Ordering::Relaxed), 1);
}

#[test]
fn captures_are_seen_and_survive_what_the_library_does() {
    let devices = devices();
    let stream = stream(0);
    let memory = filled(0, &[0; 4]);
    assert_eq!(stream.capture().unwrap(), Capture::None);
    begin_capture(&stream);
    let Capture::Active(id) = stream.capture().unwrap() else { panic!("it is being captured") };
    // All that captures forbid, on the capturing thread.
    everything(&devices);
    // SAFETY: the memory outlives the graph.
    unsafe { stream.write_value(memory.address(), 42).unwrap() };
    assert_eq!(stream.capture().unwrap(), Capture::Active(id));
    let graph = Graph::end_capture(&stream);
    assert_eq!(stream.capture().unwrap(), Capture::None);
    assert_eq!(read(&stream, memory.address(), 4), [0; 4]);
    graph.launch(stream.handle());
    assert_eq!(read(&stream, memory.address(), 4), 42u32.to_ne_bytes());

    begin_capture(&stream);
    assert_ne!(stream.capture().unwrap(), Capture::Active(id));
    // SAFETY: a live stream; asking it is what breaks the capture.
    assert_ne!(unsafe { (calls().cuStreamQuery)(raw(stream.handle().0)) }, 0);
    assert_eq!(stream.capture().unwrap(), Capture::Invalidated);
    let mut graph = std::ptr::null_mut();
    // SAFETY: a live stream; fills `graph`.
    assert_ne!(unsafe { (calls().cuStreamEndCapture)(raw(stream.handle().0), &raw mut graph) }, 0);
    assert_eq!(stream.capture().unwrap(), Capture::None);
}

#[test]
fn a_graph_copies_pinned_memory_each_time() {
    let devices = devices();
    let stream = stream(0);
    let [from, to] = [(); 2].map(|()| PinnedBuffer::new(&devices, 0, 4).expect("pinned memory"));
    begin_capture(&stream);
    // SAFETY: both outlive the graph.
    unsafe { stream.copy_on_host(to.address(), from.address(), 4) }.expect("it is captured");
    let graph = Graph::end_capture(&stream);
    for round in 1..4u32 {
        // SAFETY: four bytes; the stream is done with both.
        unsafe { from.address().cast::<u32>().write_volatile(round) };
        graph.launch(stream.handle());
        stream.synchronize(soon()).expect("it is launched");
        // SAFETY: as above.
        assert_eq!(unsafe { to.address().cast::<u32>().read_volatile() }, round);
    }
}

#[test]
fn a_context_that_a_program_has_made_is_told_from_the_primary_one() {
    let devices = devices();
    // SAFETY: handles of the library's and of the test's, which live.
    let borrow = |handle| unsafe { Stream::borrow(&devices, 0, handle) }.map(drop);
    borrow(stream(0).handle()).expect("it is the primary context's");
    on_a_bare_thread(|| {
        borrow(StreamHandle::LEGACY).expect("this thread has no context");
        let (mut own, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: fills both; the context is current from then on.
        unsafe {
            ok("cuCtxCreate", (calls().cuCtxCreate_v2)(&raw mut own, 0, 0));
            ok("cuStreamCreate", (calls().cuStreamCreate)(&raw mut stream, 1));
        }
        for handle in [StreamHandle(stream.expose_provenance()), StreamHandle::LEGACY] {
            let error = borrow(handle).expect_err("it is of another context");
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains("that the program has made"), "{error}");
        }
        assert_eq!(current_context(), own.expose_provenance());
        // SAFETY: the test's own, with its stream.
        ok("cuCtxDestroy", unsafe { (calls().cuCtxDestroy_v2)(own) });
    });
}

#[test]
fn kernels_load_and_run() {
    let devices = devices();
    for device in 0..devices.count() {
        let count = 70_001usize;
        let value = |index: usize, operand: usize| (index % 1000) as f32 * 0.37 + operand as f32;
        let bytes =
            |operand| -> Vec<u8> { (0..count).flat_map(|i| value(i, operand).to_ne_bytes()).collect() };
        let inputs: Vec<DeviceBuffer> = (0..3).map(|operand| filled(device, &bytes(operand))).collect();
        let out = filled(device, &vec![0xa5; 4 * count]);
        let operand = |buffer: &DeviceBuffer| Operand {
            address: std::ptr::without_provenance(buffer.address() as usize),
            representation: Representation::Element,
            scale: 1.0,
        };
        let operands: Vec<Operand> = inputs.iter().map(operand).collect();
        let (dtype, to) = (DataType::F32, std::ptr::without_provenance_mut(out.address() as usize));
        let mut launch = Launch::new(dtype, &Operator::Sum, 3, &operands, to, Representation::Element, count);
        let grid = launch.grid(dtype, 264);
        let stream = stream(device);
        {
            let _entered = devices.enter(device).unwrap();
            // SAFETY: the image is whole; the memory outlives the launch, which `read` waits for.
            unsafe {
                let image = IMAGE.of_device(devices.driver(), device).unwrap();
                let module = devices.driver().load_module(image).unwrap();
                let name = kernel(dtype, &Operator::Sum).unwrap();
                let function = devices.driver().function(module, name).unwrap();
                let grid = Grid { blocks: grid.blocks, threads: grid.threads, shared: 0, overlaps: false };
                let mut parameters = [launch.parameter()];
                devices.driver().launch(function, grid, stream.handle(), &mut parameters).unwrap();
                let error = devices.driver().function(module, c"no_such_kernel").unwrap_err();
                assert!(error.text().contains("kernel no_such_kernel"), "{error}");
                assert!(error.text().contains("cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND"), "{error}");
            }
        }
        let expected: Vec<u8> =
            (0..count).flat_map(|i| ((value(i, 0) + value(i, 1)) + value(i, 2)).to_ne_bytes()).collect();
        assert!(read(&stream, out.address(), 4 * count) == expected, "device {device}");
    }
}

#[test]
fn a_stream_of_another_device_is_refused() {
    if fewer_than(2) {
        return;
    }
    let foreign = stream(1);
    // SAFETY: it is live.
    let error = unsafe { Stream::borrow(&devices(), 0, foreign.handle()) }.unwrap_err();
    assert_eq!(
        (error.status(), error.text()),
        (Status::InvalidArgument, "the memory is on device 0, but its stream on device 1")
    );
}
