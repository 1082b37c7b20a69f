//! The double as a driver: what the library calls.

use super::heap::{Allocation, pointer};
use super::*;
use crate::cuda::driver::{DeviceCalls, LaunchCalls, MemoryCalls, SharingCalls, StreamCalls};

impl Double {
    /// Enqueues what the library gives, with the stream's device current.
    pub(super) fn push(&self, call: &'static str, stream: StreamHandle, task: Task) -> Result<()> {
        {
            let mut machine = self.begin(call)?;
            let queue = machine.queue_here(call, stream)?;
            machine = self.find_room(machine, queue);
            machine.push(queue, task)?;
        }
        self.settle();
        Ok(())
    }

    /// Starts a driver call.
    fn begin(&self, call: &'static str) -> Result<MutexGuard<'_, Machine>> {
        self.count(call, self.admit(call))
    }

    /// Counts a driver call, which may be one that is to fail.
    fn count<'a>(
        &self,
        call: &'static str,
        mut machine: MutexGuard<'a, Machine>,
    ) -> Result<MutexGuard<'a, Machine>> {
        if let Some(left) = machine.dying {
            match left.checked_sub(1) {
                Some(left) => machine.dying = Some(left),
                None => std::process::abort(),
            }
        }
        if let Some(refusal) = &mut machine.failing
            && refusal.strikes(call)
        {
            let (error, is_last) = (refusal.error(call), refusal.times == 0);
            machine.failed_at = Some(Instant::now());
            machine.failing = machine.failing.filter(|_| !is_last);
            return Err(error);
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

    /// Starts a driver call that captures forbid, and that may wait for the current device.
    fn begin_waiting(&self, call: &'static str) -> Result<MutexGuard<'_, Machine>> {
        let machine = self.begin_unsafe(call)?;
        let device = machine.device_here(call)?;
        Ok(self.wait_for_device(call, machine, device))
    }

    /// Has a kernel loaded, if it is not.
    fn load(&self, call: &'static str, function: FunctionHandle) -> Result<()> {
        let mut machine = self.begin_unsafe(call)?;
        let device = machine.device_here(call)?;
        match machine.kernels.get(&function) {
            None => return Err(refuse(call, "CUDA_ERROR_INVALID_HANDLE")),
            Some((_, true)) => return Ok(()),
            Some((_, false)) => {}
        }
        machine = self.wait_for_device(call, machine, device);
        machine.kernels.entry(function).and_modify(|(_, loaded)| *loaded = true);
        Ok(())
    }

    /// Runs what is needed for `goal`, and as little else as possible.
    fn demand(&self, goal: u64) -> Result<()> {
        loop {
            let mut machine = self.lock();
            if !machine.pending.contains_key(&goal) {
                return Ok(());
            }
            let task = machine.needed_for(goal).or_else(|| machine.choose());
            let busy = machine.is_busy();
            drop(machine);
            match task {
                Some(task) => self.run(task),
                None if busy => std::thread::yield_now(),
                None => return Err(refuse("cuEventSynchronize", "CUDA_ERROR_DEADLOCK_OF_THE_DOUBLE")),
            }
        }
    }
}

/// The methods trust no handle and no address: what does not exist is refused, or complained about when it is
/// used.
impl Driver for Double {}

impl DeviceCalls for Double {
    fn device_count(&self) -> Result<u32> {
        Ok(self.begin("cuDeviceGetCount")?.devices)
    }

    fn capability(&self, _: u32) -> Result<(i32, i32)> {
        Ok((9, 0))
    }

    fn multiprocessors(&self, _: u32) -> Result<u32> {
        Ok(self.lock().multiprocessors)
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
        // A thread's own: it needs no lock.
        let mut machine = self.count("cuCtxPushCurrent", self.lock())?;
        let is_retained = machine.retained.get(&device_of(context)).is_some_and(|&count| count > 0);
        if !machine.made_contexts.contains(&context) && (!is_primary(context) || !is_retained) {
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
        // A thread's own: it needs no lock.
        let machine = self.count("cuCtxGetCurrent", self.lock())?;
        Ok(machine.current.get(&std::thread::current().id()).and_then(|contexts| contexts.last().copied()))
    }

    fn device_uuid(&self, device: u32) -> Result<[u8; 16]> {
        if device >= self.begin("cuDeviceGetUuid")?.devices {
            return Err(refuse("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE"));
        }
        Ok([device as u8; 16])
    }

    unsafe fn context_device(&self, context: ContextHandle) -> Result<u32> {
        drop(self.begin("cuCtxGetDevice")?);
        Ok(device_of(context))
    }

    fn current_device(&self) -> Result<Option<u32>> {
        Ok(self.begin("cuCtxGetDevice")?.device_here("cuCtxGetDevice").ok())
    }

    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool> {
        let machine = self.begin("cuDeviceCanAccessPeer")?;
        Ok(device != peer && !machine.separated.contains(&(device, peer)))
    }

    fn stores_lines_whole(&self, _: u32, _: [u8; 16]) -> Result<bool> {
        Ok(!self.begin("cuDeviceGetP2PAttribute")?.splits_lines)
    }

    unsafe fn enable_peer_access(&self, peer: ContextHandle) -> Result<Option<Error>> {
        let mut machine = self.begin_waiting("cuCtxEnablePeerAccess")?;
        let device = machine.device_here("cuCtxEnablePeerAccess")?;
        let pair = (device, device_of(peer));
        let against = |name| Ok(Some(refuse("cuCtxEnablePeerAccess", name)));
        if machine.separated.contains(&pair) {
            return against("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED");
        }
        let peers = machine.reached.iter().filter(|(reaching, _)| *reaching == device).count();
        if peers >= machine.most_peers {
            return against("CUDA_ERROR_TOO_MANY_PEERS");
        }
        if !machine.reached.insert(pair) {
            machine.complain(format!("peer access of {pair:?} enabled twice"));
        }
        Ok(None)
    }

    fn queues(&self) -> usize {
        self.lock().channels.unwrap_or(usize::MAX)
    }

    fn can_wait_value(&self, _: u32) -> Result<bool> {
        let machine = self.begin("cuDeviceGetAttribute")?;
        Ok(!machine.no_wait_value)
    }
}

impl StreamCalls for Double {
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut machine = self.lock();
        let thread = std::thread::current().id();
        let before = machine.mode(thread);
        machine.modes.insert(thread, mode);
        Ok(before)
    }

    fn create_stream(&self, blocking: bool, priority: Priority) -> Result<StreamHandle> {
        let mut machine = self.begin_waiting("cuStreamCreateWithPriority")?;
        let device = machine.device_here("cuStreamCreateWithPriority")?;
        Ok(machine.create_stream(device, blocking, priority))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        let mut machine = self.begin("cuStreamDestroy")?;
        match machine.streams.remove(&stream) {
            Some(_) => {
                machine.free_streams.push(stream);
                Ok(())
            }
            None => Err(refuse("cuStreamDestroy", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn stream_context(&self, stream: StreamHandle) -> Result<ContextHandle> {
        match self.begin("cuStreamGetCtx")?.streams.get(&stream) {
            Some(stream) => Ok(stream.context),
            None => Err(refuse("cuStreamGetCtx", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn is_green(&self, stream: StreamHandle) -> Result<bool> {
        match self.begin("cuStreamGetGreenCtx")?.streams.get(&stream) {
            Some(stream) => Ok(stream.green),
            None => Err(refuse("cuStreamGetGreenCtx", "CUDA_ERROR_INVALID_HANDLE")),
        }
    }

    unsafe fn stream_id(&self, stream: StreamHandle) -> Result<u64> {
        let mut machine = self.begin("cuStreamGetId")?;
        // One of another device has an id, too.
        let device = machine.device_here("cuStreamGetId")?;
        let queue = machine.queue(stream, device);
        if let Some(id) = machine.capture_of(queue) {
            machine.captures.entry(id).and_modify(Capturing::invalidate);
            return Err(refuse("cuStreamGetId", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
        }
        Ok(match queue {
            Queue::Legacy(device) => u64::from(device),
            Queue::PerThread(device, thread) => {
                let mut hasher = DefaultHasher::new();
                (device, thread).hash(&mut hasher);
                hasher.finish() | 1 << 63
            }
            _ => match machine.streams.get(&stream) {
                Some(stream) => stream.id,
                None => return Err(refuse("cuStreamGetId", "CUDA_ERROR_INVALID_HANDLE")),
            },
        })
    }

    unsafe fn query_stream(&self, stream: StreamHandle) -> Result<bool> {
        let (queue, next) = {
            let mut machine = self.begin_unsafe("cuStreamQuery")?;
            machine.synchronizations += 1;
            let queue = machine.queue_here("cuStreamQuery", stream)?;
            machine.refuse_legacy("cuStreamQuery", queue)?;
            if let Some(capture) = machine.capture_of(queue) {
                machine.captures.entry(capture).and_modify(Capturing::invalidate);
                return Err(refuse("cuStreamQuery", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
            }
            // Time passes while the host asks.
            (queue, machine.choose())
        };
        if let Some(next) = next {
            self.run(next);
        }
        Ok(self.lock().last_task(queue).is_none())
    }

    unsafe fn stream_capture(&self, stream: StreamHandle) -> Result<Capture> {
        let mut machine = self.begin("cuStreamGetCaptureInfo")?;
        let queue = machine.queue_on_device("cuStreamGetCaptureInfo", stream)?;
        Ok(machine.capture_state(queue))
    }

    fn create_event(&self) -> Result<EventHandle> {
        let mut machine = self.begin("cuEventCreate")?;
        let device = machine.device_here("cuEventCreate")?;
        let number = machine.next_number() as usize;
        // Those that were destroyed come back, the last first.
        let event = machine.free_events.pop().unwrap_or(EventHandle(number));
        machine.creations += 1;
        machine.events.insert(event, (device, Recorded::Never));
        Ok(event)
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        let mut machine = self.begin("cuEventDestroy")?;
        match machine.events.remove(&event) {
            Some(_) => {
                machine.free_events.push(event);
                Ok(())
            }
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

    unsafe fn wait_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let mut machine = self.begin("cuStreamWaitEvent")?;
        let queue = machine.queue_here("cuStreamWaitEvent", stream)?;
        machine.wait_at_launch(queue, event)
    }

    unsafe fn record_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<GraphRecord> {
        let mut machine = self.begin("cuGraphAddEventRecordNode")?;
        let queue = machine.queue_here("cuGraphAddEventRecordNode", stream)?;
        machine.record_at_launch(queue, event)
    }

    unsafe fn put_off(&self, stream: StreamHandle, record: &mut GraphRecord) -> Result<()> {
        let mut machine = self.begin("cuGraphAddDependencies")?;
        let queue = machine.queue_here("cuGraphAddDependencies", stream)?;
        machine.put_off(queue, record)
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
}

impl MemoryCalls for Double {
    fn locate(&self, address: u64) -> Result<Found> {
        let machine = self.begin("cuPointerGetAttributes")?;
        if machine.device_here("cuPointerGetAttributes").is_err() {
            return Ok(Found::NoContext);
        }
        let found = machine.heap.find(Place { address, bytes: 0 });
        Ok(found.map_or(Found::Nowhere, |found| Found::Here(found.location())))
    }

    fn allocate_device(&self, bytes: usize) -> Result<u64> {
        let mut machine = self.begin_waiting("cuMemAlloc")?;
        let device = machine.device_here("cuMemAlloc")?;
        Ok(machine.allocate(Memory::Device, device, bytes))
    }

    unsafe fn free_device(&self, address: u64) -> Result<()> {
        self.begin_waiting("cuMemFree")?.free(address)
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let mut machine = self.begin_waiting("cuMemHostAlloc")?;
        let device = machine.device_here("cuMemHostAlloc")?;
        Ok(pointer(machine.allocate(Memory::Host, device, bytes)))
    }

    unsafe fn free_host(&self, address: *mut u8) -> Result<()> {
        self.begin_waiting("cuMemFreeHost")?.free(address.expose_provenance() as u64)
    }

    unsafe fn fill(&self, address: u64, value: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        let bytes = vec![value; bytes].into();
        self.push("cuMemsetD8Async", stream, Task::Fill { to: address, bytes })
    }

    unsafe fn register_host(&self, address: *mut u8, bytes: usize) -> Result<()> {
        let mut machine = self.begin_waiting("cuMemHostRegister")?;
        let device = machine.device_here("cuMemHostRegister")?;
        machine.register(device, Place { address: address.expose_provenance() as u64, bytes });
        Ok(())
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.begin_waiting("cuMemHostUnregister")?.unregister(address.expose_provenance() as u64)
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

    unsafe fn copy_on_host(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let mut machine = self.lock();
        let queue = machine.queue_here("cuMemcpyAsync", stream)?;
        if machine.capture_of(queue).is_none() {
            machine
                .complain("a copy within the host, for which the driver waits, outside of a capture".into());
        }
        drop(machine);
        let (to, from) = ((to.expose_provenance() as u64, None), (from.expose_provenance() as u64, None));
        self.push("cuMemcpyAsync", stream, Task::Copy { to, from, bytes })
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
}

impl SharingCalls for Double {
    fn is_shareable(&self, address: u64) -> Result<bool> {
        let machine = self.begin("cuPointerGetAttribute")?;
        machine.device_here("cuPointerGetAttribute")?;
        let found = machine.heap.find(Place { address, bytes: 1 }).map(Allocation::location);
        Ok(found.is_some_and(|found| !found.mapped) && !machine.isolated)
    }

    unsafe fn export_memory(&self, address: u64) -> Result<MemoryHandle> {
        let machine = self.begin("cuIpcGetMemHandle")?;
        machine.device_here("cuIpcGetMemHandle")?;
        match machine.heap.find(Place { address, bytes: 1 }).map(Allocation::location) {
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
        let mut machine = self.begin_waiting("cuIpcOpenMemHandle")?;
        let device = machine.device_here("cuIpcOpenMemHandle")?;
        let mut numbers = handle.chunks_exact(8).map(|part| u64::from_le_bytes(part.try_into().unwrap()));
        let (Some(address), Some(bytes), Some(process)) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return Err(refuse("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE"));
        };
        if process == machine.process || machine.isolated {
            return Err(refuse("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_CONTEXT"));
        }
        machine.heap.map(device, Place { address, bytes: bytes as usize });
        Ok(address)
    }

    unsafe fn close_memory(&self, address: u64) -> Result<()> {
        self.begin_waiting("cuIpcCloseMemHandle")?.heap.unmap(address)
    }
}

impl LaunchCalls for Double {
    unsafe fn launch_host(
        &self,
        stream: StreamHandle,
        function: HostFunction,
        user: *mut c_void,
    ) -> Result<()> {
        self.push("cuLaunchHostFunc", stream, Task::Host { function, user: user.expose_provenance() })
    }

    /// Without [`Double::run_code`] or [`Double::load_modules`] it refuses; folds come through
    /// [`DoubleKernels`].
    unsafe fn load_module(&self, _: &[u8]) -> Result<ModuleHandle> {
        let mut machine = self.begin_waiting("cuModuleLoadData")?;
        if !machine.modules && self.code.get().is_none() {
            return Err(refuse("cuModuleLoadData", "CUDA_ERROR_NOT_SUPPORTED"));
        }
        Ok(ModuleHandle(machine.next_number() as usize))
    }

    unsafe fn function(&self, _: ModuleHandle, name: &CStr) -> Result<FunctionHandle> {
        let mut machine = self.begin("cuModuleGetFunction")?;
        let function = match self.code.get() {
            Some(code) => code.function(name),
            None => FunctionHandle(machine.next_number() as usize),
        };
        machine.kernels.insert(function, (name.to_string_lossy().into_owned(), false));
        Ok(function)
    }

    unsafe fn load_function(&self, function: FunctionHandle) -> Result<()> {
        self.load("cuFuncLoad", function)
    }

    /// Without [`Double::run_code`] such a kernel does nothing.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        grid: Grid,
        stream: StreamHandle,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        self.load("cuLaunchKernel for the first time", function)?;
        match (self.code.get(), parameters) {
            (Some(code), [parameter]) => {
                code.launch(function, grid, *parameter);
                Ok(())
            }
            _ => self.push("cuLaunchKernel", stream, Task::Mark),
        }
    }
}
