//! The face of the CUDA driver: the calls that the library needs, and no more.

use std::ffi::{CStr, c_void};
use std::fmt;

use crate::error::{Error, Result};

/// A context (`CUcontext`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextHandle(pub usize);

/// A stream (`CUstream`, `cudaStream_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

impl StreamHandle {
    /// NULL: the legacy default stream.
    pub const NULL: StreamHandle = StreamHandle(0);
    /// `CU_STREAM_LEGACY`.
    pub const LEGACY: StreamHandle = StreamHandle(1);
    /// `CU_STREAM_PER_THREAD`.
    pub const PER_THREAD: StreamHandle = StreamHandle(2);

    /// Whether it stands for a default stream: it belongs to whichever device is current, and is never
    /// destroyed.
    pub fn is_default(self) -> bool {
        self.0 <= StreamHandle::PER_THREAD.0
    }

    /// Whether it is the legacy default stream, which waits for every blocking stream of its device, cannot
    /// be captured, and must not be used while one of those is.
    pub fn is_legacy(self) -> bool {
        self.0 <= StreamHandle::LEGACY.0
    }
}

/// An event (`CUevent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// A loaded module (`CUmodule`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleHandle(pub usize);

/// A kernel of a loaded module (`CUfunction`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FunctionHandle(pub usize);

/// What kind of memory CUDA says an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Host memory that CUDA pinned or registered.
    Host,
    /// Memory of a device.
    Device,
    /// Managed memory, which moves between the two.
    Managed,
}

/// What CUDA knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// What kind of memory it is.
    pub memory: Memory,
    /// The device that it belongs to, or where it was allocated.
    pub device: u32,
    /// The first byte of its allocation.
    pub base: u64,
    /// Bytes of its allocation.
    pub bytes: u64,
    /// A number that no other allocation of this process has had or will have: addresses come back after a
    /// free, this does not.
    pub buffer: u64,
    /// Whether a program has mapped it piece by piece, as PyTorch its expandable segments: `base` and `bytes`
    /// are those of the range of addresses, parts of which may have no memory.
    pub mapped: bool,
}

/// What CUDA says of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is memory that CUDA knows.
    Here(Location),
    /// CUDA has not heard of it.
    Nowhere,
    /// Nothing: this driver wants a current context for the question, and the thread has none.
    NoContext,
}

impl Location {
    /// Where its allocation ends.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes)
    }

    /// The end of the memory that `start`, which is in it, begins; of mapped memory, looked at no further
    /// than `until`.
    pub fn reach(
        &self,
        start: u64,
        until: u64,
        mut locate: impl FnMut(u64) -> Result<Option<Location>>,
    ) -> Result<u64> {
        if !self.mapped {
            return Ok(self.end());
        }
        let mut is_there = |address| -> Result<bool> {
            Ok(locate(address)?.is_some_and(|found| found.mapped && found.device == self.device))
        };
        if until <= start || is_there(until - 1)? {
            return Ok(until);
        }
        let (mut there, mut beyond) = (start, until - 1);
        while beyond - there > 1 {
            let middle = there.midpoint(beyond);
            *if is_there(middle)? { &mut there } else { &mut beyond } = middle;
        }
        Ok(beyond)
    }
}

/// What a process opens another's device memory by (`CUipcMemHandle`): bytes, to be sent to it.
pub type MemoryHandle = [u8; 64];

/// Whether a stream is being captured into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// What it is given runs.
    None,
    /// What it is given is recorded, by the capture of this number.
    Active(u64),
    /// Something forbidden was done; the capture will end with an error.
    Invalidated,
}

/// A node of a graph that is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphNode(pub usize);

/// A node of a graph that is being captured which records an event, and nothing waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphRecord {
    /// It.
    pub node: GraphNode,
    /// Those that it comes right behind.
    pub behind: Vec<GraphNode>,
}

impl GraphRecord {
    /// From now on it comes right behind `last`. Behind which of these it did not come yet, and behind which
    /// of others it no longer comes.
    pub fn move_behind(&mut self, last: Vec<GraphNode>) -> (Vec<GraphNode>, Vec<GraphNode>) {
        let lacks = |nodes: &[GraphNode], node: &GraphNode| !nodes.contains(node);
        let mut added: Vec<GraphNode> = Vec::new();
        for node in last.iter().filter(|node| lacks(&self.behind, node)) {
            // They are few.
            if lacks(&added, node) {
                added.push(*node);
            }
        }
        let removed = self.behind.iter().copied().filter(|node| lacks(&last, node)).collect();
        self.behind.retain(|node| last.contains(node));
        self.behind.extend(&added);
        (added, removed)
    }
}

/// What driver calls a thread may make while streams are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// None that are unsafe, while anybody captures in this mode.
    Global,
    /// None that are unsafe, while this thread captures.
    ThreadLocal,
    /// All.
    Relaxed,
}

/// Whose kernels go first where several could. Streams of different priorities share the queues of a device
/// all the same, see [`DeviceCalls::queues`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// That of streams whose maker says nothing.
    Ordinary,
    /// The last but one: for streams of ours that may have to wait.
    High,
    /// The highest: for streams of ours that never wait for the host.
    Highest,
}

/// The size of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of each block.
    pub shared: u32,
    /// Whether it may be launched before the kernel ahead of it in its stream has ended (programmatic
    /// dependent launch): then it waits for that itself.
    pub overlaps: bool,
}

/// The least of some limits on the blocks of kernels, of which 0 is none.
pub fn least_limit(limits: impl IntoIterator<Item = u32>) -> u32 {
    limits.into_iter().filter(|&limit| limit != 0).min().unwrap_or(0)
}

/// A function that a stream calls on a thread of the driver. It makes no CUDA calls and does not unwind.
pub type HostFunction = unsafe extern "C" fn(user: *mut c_void);

/// The driver calls, by subject.
///
/// # Calls that may wait for the device
/// What loads, makes or frees something may wait until the device has done all that it was given, with a lock
/// held that other calls of the process need, launches and copies among them:
///
/// - CUDA's programming guide says so of the first launch of a kernel, or of looking it up, where kernels are
///   loaded lazily (the driver's choice since 12.2; `cuModuleLoadData` keeps kernels for later then), and
///   lists what lets no two streams run beside each other: allocating pinned or device memory, and anything
///   on the legacy default stream. `cuMemFree` and `cuMemFreeHost` wait, too.
/// - Programs have seen `cuLibraryLoadData`, under a first launch, hold the lock of the primary context until
///   the device was idle, and `cudaMemcpyAsync` of another thread wait for that lock
///   (meta-pytorch/torchcomms#2334, with a program that shows it).
/// - We have seen (an H200, driver 580) `cuStreamCreateWithPriority` not return while two streams waited for
///   values, and events, `cuMemHostRegister` and `cuMemAlloc` return. While `cuMemFree` of one thread waited,
///   `cuEventRecord` and copies of another did, too; `cuEventQuery` and `cuPointerGetAttribute` returned
///   (tests/gpu/held.rs). Copies waited behind `cuMemFreeHost`, too.
///
/// So nothing that a stream waits for may need such a call of this process, nor any call that another
/// thread's may hold up; the methods below say which they are. [`LaunchCalls::load_function`] is how a kernel
/// is loaded before any stream waits.
///
/// Every failure is `Status::Cuda`, or `Status::OutOfMemory` if it is about memory, with the name of the
/// call and what the driver said.
///
/// All methods may be called from any thread. Those that say *current* act on the calling thread's current
/// context. A stream or an event is used with a context of its own device current.
///
/// # Safety of the methods
/// One contract for all of them. Handles given to `unsafe` methods are alive. Memory given to what a stream
/// executes stays valid, and its contents are raced with by nobody, until the stream has executed it.
pub trait Driver:
    fmt::Debug + Send + Sync + DeviceCalls + StreamCalls + MemoryCalls + SharingCalls + LaunchCalls
{
}

/// Devices and their contexts. The contract is that of [`Driver`].
#[allow(clippy::missing_safety_doc)] // There.
pub trait DeviceCalls {
    /// How many devices there are.
    fn device_count(&self) -> Result<u32>;
    /// The compute capability of a device: major, minor.
    fn capability(&self, device: u32) -> Result<(i32, i32)>;
    /// How many multiprocessors a device has.
    fn multiprocessors(&self, device: u32) -> Result<u32>;
    /// The primary context of a device, retained once more.
    fn retain_context(&self, device: u32) -> Result<ContextHandle>;
    /// Gives one retained reference back.
    unsafe fn release_context(&self, device: u32) -> Result<()>;
    /// Makes a context current, above the one that was.
    unsafe fn push_context(&self, context: ContextHandle) -> Result<()>;
    /// Makes current again what was before the last push.
    unsafe fn pop_context(&self) -> Result<()>;
    /// The thread's current context, if it has one.
    fn current_context(&self) -> Result<Option<ContextHandle>>;
    /// What tells a device from every other, whichever process asks.
    fn device_uuid(&self, device: u32) -> Result<[u8; 16]>;
    /// The device of a context.
    unsafe fn context_device(&self, context: ContextHandle) -> Result<u32>;
    /// The device of this thread's current context, if it has one.
    fn current_device(&self) -> Result<Option<u32>>;
    /// Whether kernels of `device` can reach memory of `peer`.
    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool>;
    /// Whether the 128 bytes that the threads of a warp of `device` store by one instruction arrive as one in
    /// memory of the GPU with this [`DeviceCalls::device_uuid`], which this process may not see. So it is
    /// over NVLink, and in the device's own memory. Over PCIe they may come in parts.
    fn stores_lines_whole(&self, device: u32, peer: [u8; 16]) -> Result<bool>;
    /// Lets the current context reach memory of `peer`. Doing it again changes nothing. `Some`: what the
    /// driver has against it, for good; a device reaches a few others at most. May wait for the devices.
    unsafe fn enable_peer_access(&self, peer: ContextHandle) -> Result<Option<Error>>;
    /// Whether streams of `device` can wait for values.
    fn can_wait_value(&self, device: u32) -> Result<bool>;
    /// How many queues of a device this process has. What a stream is given goes through one of them, which
    /// it keeps until it has done it all; what waits at the head of a queue holds up every stream in it.
    ///
    /// The driver gives a stream that has been idle a queue that nothing is in, if there is any, whatever the
    /// stream's priority. With 8 queues and 8 streams that wait, nothing of this process runs on the device;
    /// with 32, at 33 (an H200, driver 580, scripts/gpu-test, step queues). With 8 it also gives one queue to
    /// two streams if two threads give them something at the same moment: a kernel then did not run before
    /// another thread's stream had gone on. With 32 that is rare. (ARCHITECTURE.md, *Staged*, has the
    /// numbers.)
    fn queues(&self) -> usize;
}

/// Streams, events, and what streams wait for. The contract is that of [`Driver`].
#[allow(clippy::missing_safety_doc)] // There.
pub trait StreamCalls {
    /// Exchanges the thread's capture mode; answers the one before.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;
    /// A new stream of the current context. `blocking`: it and the legacy default stream wait for each other.
    /// May wait for the device.
    fn create_stream(&self, blocking: bool, priority: Priority) -> Result<StreamHandle>;
    /// Destroys a stream, once it has executed what it was given.
    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()>;
    /// The context of a stream which is not a default stream.
    unsafe fn stream_context(&self, stream: StreamHandle) -> Result<ContextHandle>;
    /// Whether a stream is of a green context: of a part of its device, and good for what is of the primary
    /// context.
    unsafe fn is_green(&self, stream: StreamHandle) -> Result<bool>;
    /// A number that no other stream of this process has had or will have: handles come back after a destroy.
    /// Default streams are those of the current context and this thread.
    unsafe fn stream_id(&self, stream: StreamHandle) -> Result<u64>;
    /// Whether a stream has done everything that it has been given. Not for one that is being captured.
    unsafe fn query_stream(&self, stream: StreamHandle) -> Result<bool>;
    /// Whether a stream is being captured.
    unsafe fn stream_capture(&self, stream: StreamHandle) -> Result<Capture>;
    /// A new event of the current context, without timing.
    fn create_event(&self) -> Result<EventHandle>;
    /// Destroys an event; a stream that waits for it goes on waiting.
    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()>;
    /// From now on the event means: what the stream has been given so far.
    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;
    /// What the stream is given after this waits for what the event means now.
    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;
    /// In a capture: what the stream is given after this waits, in each replay, for what the event means as
    /// the graph is launched.
    unsafe fn wait_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;
    /// In a capture: from each launch of the graph on, the event means what the stream has been given so far
    /// in it. Nothing waits for the node, which is valid until the capture ends.
    unsafe fn record_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<GraphRecord>;
    /// In the same capture: the record comes right behind what the stream has been given so far, and no
    /// longer behind what it came right behind until now, which that has to come behind.
    unsafe fn put_off(&self, stream: StreamHandle, record: &mut GraphRecord) -> Result<()>;
    /// Whether what the event means is complete.
    unsafe fn query_event(&self, event: EventHandle) -> Result<bool>;
    /// Waits on the host until what the event means is complete.
    unsafe fn synchronize_event(&self, event: EventHandle) -> Result<()>;
    /// Writes a 32-bit value once everything before it is done and visible.
    unsafe fn write_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()>;
    /// Waits until the 32-bit value at `address` is `value` or further on, with wrap:
    /// `(found − value) as i32 >= 0`.
    unsafe fn wait_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()>;
}

/// Memory: what an address is, allocating, pinning, copying. The contract is that of [`Driver`].
#[allow(clippy::missing_safety_doc)] // There.
pub trait MemoryCalls {
    /// What CUDA says of an address. Any number may be asked about.
    fn locate(&self, address: u64) -> Result<Found>;
    /// Memory of the current context's device. May wait for the device and its peers.
    fn allocate_device(&self, bytes: usize) -> Result<u64>;
    /// Frees device memory. May wait for the device and its peers.
    unsafe fn free_device(&self, address: u64) -> Result<()>;
    /// Pinned host memory that every context may copy from and to. May wait for the devices.
    fn allocate_host(&self, bytes: usize) -> Result<*mut u8>;
    /// Frees pinned host memory. May wait for the devices.
    unsafe fn free_host(&self, address: *mut u8) -> Result<()>;
    /// Pins host memory of ours, so that every context may copy from and to it. May wait for the devices.
    unsafe fn register_host(&self, address: *mut u8, bytes: usize) -> Result<()>;
    /// Ends that. May wait for the devices.
    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()>;
    /// Writes `value` to `bytes` bytes of device memory.
    unsafe fn fill(&self, address: u64, value: u8, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// Copies from the host to the current device.
    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()>;
    /// Copies from the current device to the host.
    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// Copies within a device.
    unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize, stream: StreamHandle) -> Result<()>;
    /// In a capture: copies within pinned host memory. Outside of one the driver itself waits for the stream.
    unsafe fn copy_on_host(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()>;
    /// Copies between two devices, each given with its context.
    unsafe fn copy_to_peer(
        &self,
        to: (u64, ContextHandle),
        from: (u64, ContextHandle),
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()>;
}

/// Device memory that another process maps. The contract is that of [`Driver`].
#[allow(clippy::missing_safety_doc)] // There.
pub trait SharingCalls {
    /// Whether device memory was allocated in a way that other processes can open, and every peer that has
    /// access to its device reaches: not from a pool, and not mapped page by page. A context is current.
    fn is_shareable(&self, address: u64) -> Result<bool>;
    /// What other processes open device memory by: `address` is the first byte of an allocation.
    unsafe fn export_memory(&self, address: u64) -> Result<MemoryHandle>;
    /// Maps memory that another process has exported, for the current context. Refused in the process that
    /// exported it. May wait for the device.
    fn open_memory(&self, handle: &MemoryHandle) -> Result<u64>;
    /// Undoes one [`SharingCalls::open_memory`]. May wait for the device.
    unsafe fn close_memory(&self, address: u64) -> Result<()>;
}

/// Modules, their kernels, and functions that a stream calls. The contract is that of [`Driver`].
#[allow(clippy::missing_safety_doc)] // There.
pub trait LaunchCalls {
    /// Loads a cubin or PTX image (which ends with a zero byte if PTX) into the current context. May wait for
    /// the device.
    unsafe fn load_module(&self, image: &[u8]) -> Result<ModuleHandle>;
    /// A kernel of a module by its name. May wait for the device.
    unsafe fn function(&self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle>;
    /// Has a kernel loaded now, and not when it is first launched. May wait for the device.
    unsafe fn load_function(&self, function: FunctionHandle) -> Result<()>;
    /// Launches a kernel. `parameters` holds the address of each of its parameters. May wait for the device
    /// if the kernel is not loaded.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        grid: Grid,
        stream: StreamHandle,
        parameters: &mut [*mut c_void],
    ) -> Result<()>;
    /// Calls `function(user)` on the host when everything before it is done.
    unsafe fn launch_host(
        &self,
        stream: StreamHandle,
        function: HostFunction,
        user: *mut c_void,
    ) -> Result<()>;
}

/// Makes a driver call, and once more if it is refused: what the driver refuses once it may do. Of a device
/// that is lost to this process, with everything that ran on it, it refuses whatever it is asked. For calls
/// that may be made twice.
pub fn retry<T>(call: impl Fn() -> Result<T>) -> Result<T> {
    call().or_else(|_| call())
}
