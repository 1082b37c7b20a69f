//! The driver double: devices that are host memory, and streams that run in the worst order that CUDA allows.
//!
//! What a stream is given becomes a task with the tasks that it has to come after: the one before it in its stream, and
//! what an event meant when the stream was told to wait for it. Nothing else orders tasks, so a missing wait lets some
//! [`Order`] run them the wrong way round, and an expectation of the test fails. Misuse that a GPU may forgive (memory
//! freed while in use, a device reading another that it has no access to) is noted as a complaint.

mod machine;
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use machine::{Allocation, Capturing, Graph, Machine, Place, Queue, Recorded, Task};

use super::context::Devices;
use super::driver::{
    Capture, CaptureMode, ContextHandle, Driver, EventHandle, FunctionHandle, Grid, HostFunction, Location,
    Memory, MemoryHandle, ModuleHandle, Priority, StreamHandle,
};
use super::local::{Fold, Kernels};
use crate::error::{Error, Result, Status};
use crate::reduce::{DataType, Operator, Reducer};

/// How long a thread waits in the double's driver before it is said to wait for ever.
const STUCK: Duration = Duration::from_secs(5);

/// In which order tasks run that CUDA leaves unordered. Streams are numbered as they were created, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Each as soon as it can, while it is given.
    Eager,
    /// Nothing until the host waits; then one of each stream in turn.
    RoundRobin,
    /// Nothing until the host waits; then this stream as far as it can go before any other moves.
    First(usize),
    /// Nothing until the host waits; then this stream only when no other can move.
    Last(usize),
    /// Nothing until the host waits; then streams by number, downward.
    Backward,
    /// Nothing until the host waits; then any.
    Random(u64),
}

impl Order {
    /// The systematic ones for this many streams, and some random ones.
    pub(crate) fn all(streams: usize) -> Vec<Order> {
        let mut orders = vec![Order::Eager, Order::RoundRobin, Order::Backward];
        orders.extend((0..streams).flat_map(|stream| [Order::First(stream), Order::Last(stream)]));
        orders.extend((1..=4).map(Order::Random));
        orders
    }
}

/// The driver.
pub(crate) struct Double {
    machine: Mutex<Machine>,
}

impl Double {
    /// `devices` devices that all reach each other.
    pub(crate) fn new(devices: u32, order: Order) -> Arc<Double> {
        Arc::new(Double { machine: Mutex::new(Machine::new(devices, order)) })
    }

    /// Neither of the two devices reaches the other.
    pub(crate) fn separate(&self, a: u32, b: u32) {
        self.lock().separated.extend([(a, b), (b, a)]);
    }

    /// This process can neither export memory nor open that of others, as where the kernel or a virtual machine forbids
    /// it.
    pub(crate) fn forbid_sharing(&self) {
        self.lock().isolated = true;
    }

    /// Bytes of device memory that are allocated, those of the test included.
    pub(crate) fn allocated(&self, device: u32) -> usize {
        self.lock().allocated(device)
    }

    /// Ignores the wait for an event that is the `index`-th from now.
    pub(crate) fn ignore_wait(&self, index: usize) {
        let mut machine = self.lock();
        machine.ignored_wait = Some(machine.waits + index);
    }

    /// Streams cannot wait for values.
    pub(crate) fn forbid_wait_value(&self) {
        self.lock().no_wait_value = true;
    }

    /// Ignores the wait for a value that is the `index`-th from now.
    pub(crate) fn ignore_value(&self, index: usize) {
        let mut machine = self.lock();
        machine.ignored_value = Some(machine.values + index);
    }

    /// Ignores the record of an event, on a stream of ordinary priority, that is the `index`-th from now.
    pub(crate) fn ignore_record(&self, index: usize) {
        let mut machine = self.lock();
        machine.ignored_record = Some(machine.records + index);
    }

    /// How many events streams of ordinary priority have recorded.
    pub(crate) fn records(&self) -> usize {
        self.lock().records
    }

    /// Has the streams of each device and priority share so many queues of the hardware, to which they are dealt by
    /// turns, and all streams of a device as many queues for copies. What a queue is given runs in that order, whatever stream it is of.
    pub(crate) fn share_queues(&self, queues: usize) {
        self.lock().channels = Some(queues);
    }

    /// Has the driver have room for so many tasks of a stream. A thread that gives it one more waits until there is room,
    /// with the lock of the device's context held, which every thread needs that gives any stream of the device anything.
    /// Drivers are not known to be as strict with all that a stream can be given.
    pub(crate) fn limit_queues(&self, room: usize) {
        self.lock().room = Some(room);
    }

    /// How many waits for values streams have been given.
    pub(crate) fn values(&self) -> usize {
        self.lock().values
    }

    /// Whether streams have something left to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().pending.is_empty()
    }

    /// Lets the call fail that is the `index`-th from now. The calls that restore the caller's state never fail.
    pub(crate) fn fail_call(&self, index: usize) {
        self.lock().failing = Some(index);
    }

    /// Whether the call that is to fail is still to come.
    pub(crate) fn is_to_fail(&self) -> bool {
        self.lock().failing.is_some()
    }

    /// When a call failed that was to fail.
    pub(crate) fn failed_at(&self) -> Option<Instant> {
        self.lock().failed_at
    }

    /// Has the process die in the call that is the `index`-th from now.
    pub(crate) fn die_in_call(&self, index: usize) {
        self.lock().dying = Some(index);
    }

    /// How many waits for events streams have been given.
    pub(crate) fn waits(&self) -> usize {
        self.lock().waits
    }

    /// How often the host waited, or asked whether it had to.
    pub(crate) fn synchronizations(&self) -> usize {
        self.lock().synchronizations
    }

    /// How many allocations and events there have been.
    pub(crate) fn creations(&self) -> usize {
        self.lock().creations
    }

    /// What was wrong so far, and forgets it.
    pub(crate) fn complaints(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().complaints)
    }

    /// This thread's contexts, the current one last, and its capture mode.
    pub(crate) fn thread(&self) -> (Vec<ContextHandle>, CaptureMode) {
        let machine = self.lock();
        let thread = std::thread::current().id();
        let contexts = machine.current.get(&thread).cloned().unwrap_or_default();
        (contexts, machine.mode(thread))
    }

    /// Device memory that counts as the caller's, filled with rubbish.
    pub(crate) fn memory(&self, device: u32, bytes: usize) -> u64 {
        self.lock().allocate(Memory::Device, device, bytes)
    }

    /// As [`Double::memory`], of another kind.
    pub(crate) fn memory_of(&self, memory: Memory, device: u32, bytes: usize) -> u64 {
        self.lock().allocate(memory, device, bytes)
    }

    /// Device memory of the caller's that it has mapped in pieces, each `bytes` long.
    pub(crate) fn mapped(&self, device: u32, bytes: usize, pieces: usize) -> u64 {
        self.lock().map_pieces(device, bytes, pieces)
    }

    /// Frees memory of the caller's.
    pub(crate) fn free(&self, address: u64) {
        self.lock().free(address).expect("the test has allocated it");
    }

    /// A stream that counts as the caller's.
    pub(crate) fn stream(&self, device: u32) -> StreamHandle {
        self.lock().create_stream(device, false, Priority::Ordinary)
    }

    /// Writes `bytes` when the stream comes to it.
    pub(crate) fn fill(&self, stream: StreamHandle, device: u32, address: u64, bytes: &[u8]) {
        let task = Task::Fill { to: address, bytes: bytes.into() };
        self.push_as_caller(stream, device, task);
    }

    /// Complains if the memory does not hold `bytes` when the stream comes to it.
    pub(crate) fn expect(&self, stream: StreamHandle, device: u32, address: u64, bytes: &[u8], what: &str) {
        let task = Task::Expect { at: address, bytes: bytes.into(), what: what.into() };
        self.push_as_caller(stream, device, task);
    }

    /// What the memory holds now.
    pub(crate) fn peek(&self, address: u64, bytes: usize) -> Vec<u8> {
        let machine = self.lock();
        machine.slice(Place { address, bytes }).expect("the test asks for memory that exists").to_vec()
    }

    /// Runs everything that streams were given. Complains when they wait for each other for ever.
    pub(crate) fn drain(&self) {
        while self.step() {}
        let mut machine = self.lock();
        let stuck = machine.pending.len();
        if stuck > 0 {
            machine.complain(format!("{stuck} tasks wait for each other for ever"));
        }
    }

    /// Runs one task, if one can run or another thread runs one. Whether that was so.
    pub(crate) fn step(&self) -> bool {
        let Some(task) = self.choose() else { return self.lock().is_busy() };
        self.run(task);
        true
    }

    /// Starts to record what the stream is given.
    pub(crate) fn begin_capture(&self, stream: StreamHandle, device: u32) {
        let mut machine = self.lock();
        let queue = machine.queue(stream, device);
        let id = machine.next_number();
        machine.captures.insert(id, Capturing::from(queue));
    }

    /// Ends the capture that began with the stream.
    pub(crate) fn end_capture(&self, stream: StreamHandle, device: u32) -> Result<Graph> {
        let mut machine = self.lock();
        let queue = machine.queue(stream, device);
        machine.end_capture(queue)
    }

    /// Gives the stream a graph.
    pub(crate) fn launch_graph(&self, graph: &Graph, stream: StreamHandle, device: u32) {
        {
            let mut machine = self.lock();
            let queue = machine.queue(stream, device);
            machine.launch(graph, queue);
        }
        self.settle();
    }

    fn push_as_caller(&self, stream: StreamHandle, device: u32, task: Task) {
        {
            let mut machine = self.lock();
            let queue = machine.queue(stream, device);
            machine = self.find_room(machine, queue);
            if let Err(error) = machine.push(queue, task) {
                machine.complain(error.to_string());
            }
        }
        self.settle();
    }

    /// Enqueues what the library gives, with the stream's device current.
    fn push(&self, call: &'static str, stream: StreamHandle, task: Task) -> Result<()> {
        {
            let mut machine = self.begin(call)?;
            let queue = machine.queue_here(call, stream)?;
            machine = self.find_room(machine, queue);
            machine.push(queue, task)?;
        }
        self.settle();
        Ok(())
    }

    /// Waits as the driver does until `queue` has room for one more task.
    fn find_room<'a>(
        &'a self,
        mut machine: MutexGuard<'a, Machine>,
        queue: Queue,
    ) -> MutexGuard<'a, Machine> {
        let Some(device) = machine.locked_by(queue) else { return machine };
        let (thread, since) = (std::thread::current().id(), Instant::now());
        loop {
            let holder = *machine.locks.entry(device).or_insert(thread);
            if holder == thread && !machine.is_full(queue) {
                break;
            }
            if since.elapsed() > STUCK {
                machine.complain(
                    "a thread waits in the driver for ever, for room or for the context's lock".into(),
                );
                // So that the test ends.
                machine.room = None;
                break;
            }
            drop(machine);
            std::thread::sleep(Duration::from_micros(50));
            machine = self.lock();
        }
        if machine.locks.get(&device) == Some(&thread) {
            machine.locks.remove(&device);
        }
        machine
    }

    /// Runs what can run, if that is the order.
    fn settle(&self) {
        if self.lock().order == Order::Eager {
            while let Some(task) = self.choose() {
                self.run(task);
            }
        }
    }

    fn choose(&self) -> Option<u64> {
        self.lock().choose()
    }

    fn run(&self, id: u64) {
        let task = self.lock().take(id);
        if let Task::Host { function, user } = task {
            // Not under the lock: it is the test's own code.
            // SAFETY: the promise of `launch_host`.
            unsafe { function(std::ptr::with_exposed_provenance_mut(user)) };
        } else {
            self.lock().execute(&task);
        }
        self.lock().finish(id);
    }

    /// Runs what is needed for `goal`, and as little else as possible.
    fn demand(&self, goal: u64) -> Result<()> {
        loop {
            let task = {
                let mut machine = self.lock();
                if !machine.pending.contains_key(&goal) {
                    return Ok(());
                }
                machine.needed_for(goal)
            };
            let Some(task) = task.or_else(|| self.choose()) else {
                if self.lock().is_busy() {
                    std::thread::yield_now();
                    continue;
                }
                return Err(refuse("cuEventSynchronize", "CUDA_ERROR_DEADLOCK_OF_THE_DOUBLE"));
            };
            self.run(task);
        }
    }

    /// Starts a driver call.
    fn begin(&self, call: &'static str) -> Result<MutexGuard<'_, Machine>> {
        let mut machine = self.lock();
        if let Some(left) = machine.dying {
            match left.checked_sub(1) {
                Some(left) => machine.dying = Some(left),
                None => std::process::abort(),
            }
        }
        if let Some(left) = machine.failing {
            machine.failing = left.checked_sub(1);
            if left == 0 {
                machine.failed_at = Some(Instant::now());
                return Err(refuse(call, "CUDA_ERROR_INJECTED"));
            }
        }
        Ok(machine)
    }

    /// Starts a driver call that captures forbid.
    fn begin_unsafe(&self, call: &'static str) -> Result<MutexGuard<'_, Machine>> {
        let mut machine = self.begin(call)?;
        let relaxed = machine.mode(std::thread::current().id()) == CaptureMode::Relaxed;
        if !machine.captures.is_empty() && !relaxed {
            machine.captures.values_mut().for_each(Capturing::invalidate);
            return Err(refuse(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
        }
        Ok(machine)
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The methods trust no handle and no address: what does not exist is refused, or complained about when it is used.
impl Driver for Double {
    fn device_count(&self) -> Result<u32> {
        Ok(self.begin("cuDeviceGetCount")?.devices)
    }

    fn capability(&self, _: u32) -> Result<(i32, i32)> {
        Ok((9, 0))
    }

    fn multiprocessors(&self, _: u32) -> Result<u32> {
        Ok(4)
    }

    fn retain_context(&self, device: u32) -> Result<ContextHandle> {
        let mut machine = self.begin_unsafe("cuDevicePrimaryCtxRetain")?;
        if device >= machine.devices {
            return Err(refuse("cuDevicePrimaryCtxRetain", "CUDA_ERROR_INVALID_DEVICE"));
        }
        *machine.retained.entry(device).or_default() += 1;
        Ok(context_of(device))
    }

    unsafe fn release_context(&self, device: u32) -> Result<()> {
        let mut machine = self.begin("cuDevicePrimaryCtxRelease")?;
        match machine.retained.get_mut(&device) {
            Some(count) if *count > 0 => *count -= 1,
            _ => machine.complain(format!("device {device}: context released, but not retained")),
        }
        Ok(())
    }

    unsafe fn push_context(&self, context: ContextHandle) -> Result<()> {
        let mut machine = self.begin("cuCtxPushCurrent")?;
        if machine.retained.get(&device_of(context)).is_none_or(|&count| count == 0) {
            return Err(refuse("cuCtxPushCurrent", "CUDA_ERROR_INVALID_CONTEXT"));
        }
        machine.current.entry(std::thread::current().id()).or_default().push(context);
        Ok(())
    }

    unsafe fn pop_context(&self) -> Result<()> {
        let mut machine = self.lock();
        match machine.current.entry(std::thread::current().id()).or_default().pop() {
            Some(_) => Ok(()),
            None => Err(refuse("cuCtxPopCurrent", "CUDA_ERROR_INVALID_CONTEXT")),
        }
    }

    fn current_context(&self) -> Result<Option<ContextHandle>> {
        let machine = self.begin("cuCtxGetCurrent")?;
        Ok(machine.current.get(&std::thread::current().id()).and_then(|contexts| contexts.last().copied()))
    }

    fn device_uuid(&self, device: u32) -> Result<[u8; 16]> {
        if device >= self.begin("cuDeviceGetUuid")?.devices {
            return Err(refuse("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE"));
        }
        Ok([device as u8; 16])
    }

    fn current_device(&self) -> Result<Option<u32>> {
        Ok(self.begin("cuCtxGetDevice")?.device_here("cuCtxGetDevice").ok())
    }

    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool> {
        let machine = self.begin("cuDeviceCanAccessPeer")?;
        Ok(device != peer && !machine.separated.contains(&(device, peer)))
    }

    unsafe fn enable_peer_access(&self, peer: ContextHandle) -> Result<()> {
        let mut machine = self.begin_unsafe("cuCtxEnablePeerAccess")?;
        let device = machine.device_here("cuCtxEnablePeerAccess")?;
        let pair = (device, device_of(peer));
        if machine.separated.contains(&pair) {
            return Err(refuse("cuCtxEnablePeerAccess", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"));
        }
        if !machine.reached.insert(pair) {
            machine.complain(format!("peer access of {pair:?} enabled twice"));
        }
        Ok(())
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut machine = self.lock();
        let thread = std::thread::current().id();
        let before = machine.mode(thread);
        machine.modes.insert(thread, mode);
        Ok(before)
    }

    fn locate(&self, address: u64) -> Result<Option<Location>> {
        let machine = self.begin("cuPointerGetAttributes")?;
        Ok(machine.allocation(Place { address, bytes: 0 }).map(Allocation::location))
    }

    fn create_stream(&self, blocking: bool, priority: Priority) -> Result<StreamHandle> {
        let mut machine = self.begin_unsafe("cuStreamCreateWithPriority")?;
        let device = machine.device_here("cuStreamCreateWithPriority")?;
        Ok(machine.create_stream(device, blocking, priority))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        let mut machine = self.begin("cuStreamDestroy")?;
        match machine.streams.remove(&stream) {
            Some(_) => Ok(()),
            None => Err(refuse("cuStreamDestroy", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn stream_device(&self, stream: StreamHandle) -> Result<u32> {
        match self.begin("cuStreamGetCtx")?.streams.get(&stream) {
            Some(stream) => Ok(stream.device),
            None => Err(refuse("cuStreamGetCtx", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn stream_id(&self, stream: StreamHandle) -> Result<u64> {
        let mut machine = self.begin("cuStreamGetId")?;
        Ok(match machine.queue_here("cuStreamGetId", stream) {
            Ok(Queue::Legacy(device)) => u64::from(device),
            Ok(Queue::PerThread(device, thread)) => {
                let mut hasher = DefaultHasher::new();
                (device, thread).hash(&mut hasher);
                hasher.finish() | 1 << 63
            }
            // One of another device has an id, too.
            _ => stream.0 as u64,
        })
    }

    unsafe fn query_stream(&self, stream: StreamHandle) -> Result<bool> {
        let (queue, next) = {
            let mut machine = self.begin_unsafe("cuStreamQuery")?;
            machine.synchronizations += 1;
            // Time passes while the host asks.
            (machine.queue_here("cuStreamQuery", stream)?, machine.choose())
        };
        if let Some(next) = next {
            self.run(next);
        }
        Ok(self.lock().last_task(queue).is_none())
    }

    unsafe fn stream_capture(&self, stream: StreamHandle) -> Result<Capture> {
        let mut machine = self.begin("cuStreamGetCaptureInfo")?;
        let queue = machine.queue_here("cuStreamGetCaptureInfo", stream)?;
        Ok(machine.capture_state(queue))
    }

    fn create_event(&self) -> Result<EventHandle> {
        let mut machine = self.begin("cuEventCreate")?;
        let device = machine.device_here("cuEventCreate")?;
        let event = EventHandle(machine.next_number() as usize);
        machine.creations += 1;
        machine.events.insert(event, (device, Recorded::Never));
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        match self.begin("cuEventDestroy")?.events.remove(&event) {
            Some(_) => Ok(()),
            None => Err(refuse("cuEventDestroy", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        {
            let mut machine = self.begin("cuEventRecord")?;
            let queue = machine.queue_here("cuEventRecord", stream)?;
            machine = self.find_room(machine, queue);
            machine.record(event, queue)?;
        }
        self.settle();
        Ok(())
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        {
            let mut machine = self.begin("cuStreamWaitEvent")?;
            let queue = machine.queue_here("cuStreamWaitEvent", stream)?;
            machine = self.find_room(machine, queue);
            machine.wait(queue, event)?;
        }
        self.settle();
        Ok(())
    }

    unsafe fn query_event(&self, event: EventHandle) -> Result<bool> {
        let (task, next) = {
            let mut machine = self.begin_unsafe("cuEventQuery")?;
            machine.synchronizations += 1;
            let task = machine.recorded_task("cuEventQuery", event)?;
            // Time passes while the host asks.
            (task, machine.choose())
        };
        if let Some(next) = next {
            self.run(next);
        }
        Ok(task.is_none_or(|task| !self.lock().pending.contains_key(&task)))
    }

    unsafe fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        let task = {
            let mut machine = self.begin_unsafe("cuEventSynchronize")?;
            machine.synchronizations += 1;
            machine.recorded_task("cuEventSynchronize", event)?
        };
        task.map_or(Ok(()), |task| self.demand(task))
    }

    fn allocate_device(&self, bytes: usize) -> Result<u64> {
        let mut machine = self.begin_unsafe("cuMemAlloc")?;
        let device = machine.device_here("cuMemAlloc")?;
        Ok(machine.allocate(Memory::Device, device, bytes))
    }

    unsafe fn free_device(&self, address: u64) -> Result<()> {
        self.begin_unsafe("cuMemFree")?.free(address)
    }

    fn is_shareable(&self, address: u64) -> Result<bool> {
        let machine = self.begin("cuPointerGetAttribute")?;
        Ok(machine.allocation(Place { address, bytes: 1 }).is_some() && !machine.isolated)
    }

    unsafe fn export_memory(&self, address: u64) -> Result<MemoryHandle> {
        let machine = self.begin("cuIpcGetMemHandle")?;
        match machine.allocation(Place { address, bytes: 1 }).map(Allocation::location) {
            Some(found) if found.base == address && !machine.isolated => {
                let mut handle = [0; 64];
                let numbers = [address, found.bytes, machine.process];
                for (part, number) in handle.chunks_exact_mut(8).zip(numbers) {
                    part.copy_from_slice(&number.to_le_bytes());
                }
                Ok(handle)
            }
            _ => Err(refuse("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED")),
        }
    }

    /// Doubles are processes: memory of another one is mapped where it is.
    fn open_memory(&self, handle: &MemoryHandle) -> Result<u64> {
        let mut machine = self.begin_unsafe("cuIpcOpenMemHandle")?;
        let device = machine.device_here("cuIpcOpenMemHandle")?;
        let mut numbers = handle.chunks_exact(8).map(|part| u64::from_le_bytes(part.try_into().unwrap()));
        let (Some(address), Some(bytes), Some(process)) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return Err(refuse("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE"));
        };
        if process == machine.process || machine.isolated {
            return Err(refuse("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_CONTEXT"));
        }
        machine.map(device, address, bytes as usize);
        Ok(address)
    }

    unsafe fn close_memory(&self, address: u64) -> Result<()> {
        self.begin_unsafe("cuIpcCloseMemHandle")?.unmap(address)
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let mut machine = self.begin_unsafe("cuMemHostAlloc")?;
        let device = machine.device_here("cuMemHostAlloc")?;
        Ok(machine::pointer(machine.allocate(Memory::Host, device, bytes)))
    }

    unsafe fn free_host(&self, address: *mut u8) -> Result<()> {
        self.begin_unsafe("cuMemFreeHost")?.free(address.expose_provenance() as u64)
    }

    unsafe fn fill(&self, address: u64, value: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        let bytes = vec![value; bytes].into();
        self.push("cuMemsetD8Async", stream, Task::Fill { to: address, bytes })
    }

    unsafe fn register_host(&self, address: *mut u8, bytes: usize) -> Result<()> {
        let mut machine = self.begin_unsafe("cuMemHostRegister")?;
        let device = machine.device_here("cuMemHostRegister")?;
        machine.register(device, address.expose_provenance() as u64, bytes);
        Ok(())
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.begin_unsafe("cuMemHostUnregister")?.unregister(address.expose_provenance() as u64)
    }

    fn can_wait_value(&self, _: u32) -> Result<bool> {
        let machine = self.begin("cuDeviceGetAttribute")?;
        Ok(!machine.no_wait_value)
    }

    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let from = (from.expose_provenance() as u64, None);
        let to = (to, Some(self.lock().device_here("cuMemcpyHtoDAsync")?));
        self.push("cuMemcpyHtoDAsync", stream, Task::Copy { to, from, bytes })
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: StreamHandle) -> Result<()> {
        let from = (from, Some(self.lock().device_here("cuMemcpyDtoHAsync")?));
        let to = (to.expose_provenance() as u64, None);
        self.push("cuMemcpyDtoHAsync", stream, Task::Copy { to, from, bytes })
    }

    unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize, stream: StreamHandle) -> Result<()> {
        let device = Some(self.lock().device_here("cuMemcpyDtoDAsync")?);
        let (to, from) = ((to, device), (from, device));
        self.push("cuMemcpyDtoDAsync", stream, Task::Copy { to, from, bytes })
    }

    unsafe fn copy_to_peer(
        &self,
        to: (u64, ContextHandle),
        from: (u64, ContextHandle),
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let pair = (device_of(from.1), device_of(to.1));
        let mut machine = self.lock();
        if !machine.reached.contains(&pair) {
            // CUDA goes through the host then, on its own and slowly.
            machine.complain(format!("peer copy between {pair:?}, which have no access"));
        }
        drop(machine);
        let (to, from) = ((to.0, Some(pair.1)), (from.0, Some(pair.0)));
        self.push("cuMemcpyPeerAsync", stream, Task::Copy { to, from, bytes })
    }

    unsafe fn write_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        self.push("cuStreamWriteValue32", stream, Task::WriteValue { address, value })
    }

    unsafe fn wait_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        let ignored = {
            let mut machine = self.lock();
            let index = machine.values;
            machine.values += 1;
            machine.ignored_value == Some(index)
        };
        let task = if ignored { Task::Mark } else { Task::WaitValue { address, value } };
        self.push("cuStreamWaitValue32", stream, task)
    }

    unsafe fn launch_host(
        &self,
        stream: StreamHandle,
        function: HostFunction,
        user: *mut c_void,
    ) -> Result<()> {
        self.push("cuLaunchHostFunc", stream, Task::Host { function, user: user.expose_provenance() })
    }

    /// The double runs no GPU code; folds come through [`DoubleKernels`].
    unsafe fn load_module(&self, _: &[u8]) -> Result<ModuleHandle> {
        Err(refuse("cuModuleLoadData", "CUDA_ERROR_NOT_SUPPORTED"))
    }

    unsafe fn function(&self, _: ModuleHandle, _: &CStr) -> Result<FunctionHandle> {
        Err(refuse("cuModuleGetFunction", "CUDA_ERROR_NOT_SUPPORTED"))
    }

    unsafe fn launch(
        &self,
        _: FunctionHandle,
        _: Grid,
        _: StreamHandle,
        _: &mut [*mut c_void],
    ) -> Result<()> {
        Err(refuse("cuLaunchKernel", "CUDA_ERROR_NOT_SUPPORTED"))
    }
}

impl fmt::Debug for Double {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Double")
    }
}

/// Folds by the host's own loops, when the stream comes to them.
#[derive(Debug)]
pub(crate) struct DoubleKernels(pub(crate) Arc<Double>);

impl Kernels for DoubleKernels {
    fn prepare(&self, _: &Arc<Devices>, _: u32, dtype: DataType, operator: Operator) -> Result<()> {
        Reducer::new(dtype, operator, 1).map(drop)
    }

    /// Few, so that the tests come to what many pointers need.
    fn most_operands(&self) -> usize {
        4
    }

    unsafe fn fold(&self, _: &Devices, fold: &Fold<'_>) -> Result<()> {
        let task = Task::Fold {
            device: fold.stream.device(),
            reducer: Reducer::new(fold.dtype, fold.operator, fold.ranks)?,
            operands: fold.operands.into(),
            out: fold.out,
            representation: fold.representation,
            count: fold.count,
        };
        self.0.push("cuLaunchKernel", fold.stream.handle(), task)
    }
}

/// A failed call, told as the driver would.
fn refuse(call: &str, name: &str) -> Error {
    Error::new(Status::Cuda, format!("{call} failed: {name}: the driver double refuses"))
}

/// A device's primary context.
fn context_of(device: u32) -> ContextHandle {
    ContextHandle(device as usize + 1)
}

fn device_of(context: ContextHandle) -> u32 {
    context.0 as u32 - 1
}
