//! The driver double: devices that are host memory, and streams that run in the worst order that CUDA allows.
//!
//! What a stream is given becomes a task with the tasks that it has to come after: the one before it in its
//! stream, and what an event meant when the stream was told to wait for it. Nothing else orders tasks, so a
//! missing wait lets some [`Order`] run them the wrong way round, and an expectation of the test fails.
//! Misuse that a GPU may forgive (memory freed while in use, a device reading another that it has no access
//! to) is noted as a complaint.

mod capture;
mod clock;
mod driver;
mod heap;
mod kernel;
mod lock;
mod machine;
mod standstill;
mod task;
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use capture::{Capturing, Graph};
pub(crate) use clock::Clock;
use heap::Place;
use kernel::Kernel;
use lock::Lock;
pub(crate) use lock::{Barred, Waiting};
use machine::{Channel, Machine, Pending, Queue, Recorded};
use task::{Carrying, Task};

use super::context::Devices;
use super::courier::{self, Combiner};
use super::driver::{
    Capture, CaptureMode, ContextHandle, Driver, EventHandle, Found, FunctionHandle, GraphNode, GraphRecord,
    Grid, HostFunction, Memory, MemoryHandle, ModuleHandle, Priority, StreamHandle,
};
use super::exchange::Fault;
use super::local::{Fold, Kernels};
use super::stream::Stream;
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

/// GPU code that a double is given, and what becomes of launches.
pub(crate) trait Code: fmt::Debug + Send + Sync {
    /// A function by its name.
    fn function(&self, name: &CStr) -> FunctionHandle;
    /// A launch with one parameter, which is to be copied.
    fn launch(&self, function: FunctionHandle, grid: Grid, parameter: *const c_void);
}

/// Which driver calls fail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    /// So many go well first.
    pub(crate) after: usize,
    /// So many fail then, one after the other.
    pub(crate) times: usize,
    /// Calls of this name alone count; `None`: of any.
    pub(crate) call: Option<&'static str>,
    /// `Status::OutOfMemory` or `Status::Cuda`.
    pub(crate) status: Status,
}

impl Default for Refusal {
    fn default() -> Refusal {
        Refusal { after: 0, times: 1, call: None, status: Status::Cuda }
    }
}

impl Refusal {
    /// Whether `call` fails, which is made now.
    fn strikes(&mut self, call: &str) -> bool {
        if self.times == 0 || self.call.is_some_and(|name| name != call) {
            return false;
        }
        match self.after.checked_sub(1) {
            Some(after) => self.after = after,
            None => {
                self.times -= 1;
                return true;
            }
        }
        false
    }

    fn error(&self, call: &str) -> Error {
        let error = refuse(call, "CUDA_ERROR_INJECTED");
        Error::new(self.status, error.text())
    }
}

/// The driver.
pub(crate) struct Double {
    machine: Mutex<Machine>,
    code: OnceLock<Arc<dyn Code>>,
    /// Whether couriers store nothing.
    holds: Arc<AtomicBool>,
}

impl Double {
    /// `devices` devices that all reach each other.
    pub(crate) fn new(devices: u32, order: Order) -> Arc<Double> {
        let (machine, holds) = (Mutex::new(Machine::new(devices, order)), Arc::default());
        Arc::new(Double { machine, code: OnceLock::new(), holds })
    }

    /// Has modules load: their functions are of `code`. Launches go there, and to no stream.
    pub(crate) fn run_code(&self, code: Arc<dyn Code>) {
        assert!(self.code.set(code).is_ok(), "a double has one code");
    }

    /// Neither of the two devices reaches the other.
    pub(crate) fn separate(&self, a: u32, b: u32) {
        self.lock().separated.extend([(a, b), (b, a)]);
    }

    /// Each device may be let reach so many others and no more, which is not told before.
    pub(crate) fn limit_peers(&self, most: usize) {
        self.lock().most_peers = most;
    }

    /// Its devices are linked by something else than NVLink.
    pub(crate) fn split_lines(&self) {
        self.lock().splits_lines = true;
    }

    /// Couriers store nothing, nor leave, as long as this `holds`.
    pub(crate) fn hold_stores(&self, holds: bool) {
        self.holds.store(holds, Ordering::SeqCst);
    }

    /// Each device has so many multiprocessors.
    pub(crate) fn shrink(&self, multiprocessors: u32) {
        self.lock().multiprocessors = multiprocessors;
    }

    /// This process can neither export memory nor open that of others, as where the kernel or a virtual
    /// machine forbids it.
    pub(crate) fn forbid_sharing(&self) {
        self.lock().isolated = true;
    }

    /// Whether a device has a context.
    pub(crate) fn has_context(&self, device: u32) -> bool {
        self.lock().retained.get(&device).is_some_and(|&count| count > 0)
    }

    /// Bytes of device memory that are allocated, those of the test included.
    pub(crate) fn allocated(&self, device: u32) -> usize {
        self.lock().heap.allocated(device)
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

    /// Has the streams of each device share so many queues of the hardware, whatever their priority. What a
    /// queue is given runs in that order, whatever stream it is of. A stream that was idle takes an empty
    /// one, if there is any. Copies have `copies` others, to which streams are dealt by turns.
    pub(crate) fn share_queues(&self, queues: usize, copies: usize) {
        let mut machine = self.lock();
        machine.channels = Some(queues);
        machine.copy_channels = copies;
    }

    /// The queue that a stream has which is not idle, if there are few.
    pub(crate) fn queue_of(&self, stream: StreamHandle) -> Option<usize> {
        self.lock().queue_of(stream)
    }

    /// Has the driver have room for so many tasks of a stream. A thread that gives it one more waits until
    /// there is room, with the lock of the device's context held, which every thread needs that gives any
    /// stream of the device anything. Drivers are not known to be as strict with all that a stream can be
    /// given.
    pub(crate) fn limit_queues(&self, room: usize) {
        self.lock().room = Some(room);
    }

    /// How many waits for values streams have been given.
    pub(crate) fn values(&self) -> usize {
        self.lock().values
    }

    /// How many copies streams have left to do.
    pub(crate) fn copies(&self) -> usize {
        self.lock().copies()
    }

    /// How many things streams have left to do.
    pub(crate) fn left(&self) -> usize {
        self.lock().pending.len()
    }

    /// Whether streams have something left to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().pending.is_empty()
    }

    /// Lets the call fail that is the `index`-th from now. The calls that restore the caller's state never
    /// fail.
    pub(crate) fn fail_call(&self, index: usize) {
        self.refuse(Refusal { after: index, ..Refusal::default() });
    }

    /// As [`Double::fail_call`], for other failures than that of one call.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        self.lock().failing = Some(refusal);
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

    /// Loads modules, whose kernels do nothing; else it refuses them.
    pub(crate) fn load_modules(&self) {
        self.lock().modules = true;
    }

    /// The names of the kernels that are loaded when they are first launched, and have not been launched.
    pub(crate) fn unloaded(&self) -> Vec<String> {
        let machine = self.lock();
        let unloaded = machine.kernels.values().filter(|(_, loaded)| !loaded);
        unloaded.map(|(name, _)| name.clone()).collect()
    }

    /// How many allocations and events there have been.
    pub(crate) fn creations(&self) -> usize {
        self.lock().creations
    }

    /// Bytes of the program's memory that are registered.
    pub(crate) fn registered(&self) -> usize {
        self.lock().heap.registered()
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
        self.lock().heap.map_pieces(device, bytes, pieces)
    }

    /// How often memory of other processes is mapped here.
    pub(crate) fn mapped_memory(&self) -> usize {
        self.lock().heap.mapped()
    }

    /// Makes memory known that the caller has mapped.
    pub(crate) fn map(&self, device: u32, address: u64, bytes: usize) {
        self.lock().heap.map(device, Place { address, bytes });
    }

    /// Frees memory of the caller's.
    pub(crate) fn free(&self, address: u64) {
        self.lock().free(address).expect("the test has allocated it");
    }

    /// A stream that counts as the caller's.
    pub(crate) fn stream(&self, device: u32) -> StreamHandle {
        self.lock().create_stream(device, false, Priority::Ordinary)
    }

    /// A context of a device that the program has made.
    pub(crate) fn make_context(&self, device: u32) -> ContextHandle {
        let mut machine = self.lock();
        let number = machine.made_contexts.len() + 1;
        let context = ContextHandle(context_of(device).0 + (number << 16));
        machine.made_contexts.insert(context);
        context
    }

    /// As [`Double::stream`], of a context that the program has made; or of a green one, which this is then.
    pub(crate) fn stream_of(&self, context: ContextHandle, green: bool) -> StreamHandle {
        let mut machine = self.lock();
        let stream = machine.create_stream(device_of(context), false, Priority::Ordinary);
        machine.streams.entry(stream).and_modify(|state| (state.context, state.green) = (context, green));
        stream
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

    /// What `give` gives some stream are the steps of one kernel. It leaves where it waits once the host has
    /// said so by `fault`, and at once if the word at `latch`, of a device, is not 0: it sets that when it
    /// leaves.
    pub(crate) fn kernel<T>(&self, fault: &Fault, latch: u64, give: impl FnOnce() -> T) -> T {
        let thread = std::thread::current().id();
        self.lock().giving.insert(thread, Arc::new(Kernel::new(fault.device_address(), latch)));
        let _giving = Giving(self);
        give()
    }

    /// What the memory holds now.
    pub(crate) fn peek(&self, address: u64, bytes: usize) -> Vec<u8> {
        let machine = self.lock();
        machine.heap.slice(Place { address, bytes }).expect("the test asks for memory that exists").to_vec()
    }

    /// Runs everything that streams were given. Complains when they wait for each other for ever.
    pub(crate) fn drain(&self) {
        loop {
            match self.look() {
                Look::Ready(task) => self.run(task),
                Look::Busy => {}
                Look::Idle(0) => return,
                Look::Idle(stuck) => {
                    let mut machine = self.lock();
                    let standing = machine.describe_standstill();
                    return machine
                        .complain(format!("{stuck} tasks wait for each other for ever: {standing}"));
                }
            }
        }
    }

    /// Runs one task, if one can run or another thread runs one. Whether that was so.
    pub(crate) fn step(&self) -> bool {
        match self.look() {
            Look::Ready(task) => self.run(task),
            Look::Busy => {}
            Look::Idle(_) => return false,
        }
        true
    }

    /// What there is to do, all of one moment: a thread may give streams tasks, and run them, at any other.
    fn look(&self) -> Look {
        let mut machine = self.lock();
        match machine.choose() {
            Some(task) => Look::Ready(task),
            None if machine.is_busy() => Look::Busy,
            None => Look::Idle(machine.pending.len()),
        }
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
            let mut machine = self.admit("a call of the program");
            let queue = machine.queue(stream, device);
            machine = self.find_room(machine, queue);
            if let Err(error) = machine.push(queue, task) {
                machine.complain(error.to_string());
            }
        }
        self.settle();
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

    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What there is to do.
enum Look {
    /// This task, which nobody else will run.
    Ready(u64),
    /// Another thread runs one.
    Busy,
    /// Nothing, though so many are left.
    Idle(usize),
}

/// While this thread gives some stream the steps of a kernel, however that ends.
struct Giving<'a>(&'a Double);

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        self.0.lock().giving.remove(&std::thread::current().id());
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
    fn prepare(&self, _: &Arc<Devices>, device: u32, dtype: DataType, operator: Operator) -> Result<()> {
        Reducer::new(dtype, operator, 1)?;
        self.0.load_folds("cuModuleLoadData", device);
        Ok(())
    }

    /// Few, so that the tests come to what many pointers need.
    fn most_operands(&self) -> usize {
        4
    }

    unsafe fn fold(&self, _: &Devices, fold: &Fold<'_>) -> Result<()> {
        self.0.load_folds("cuLaunchKernel for the first time", fold.stream.device());
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

    /// Anything but what only the host can call.
    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        (!matches!(operator, Operator::Custom(_))).then_some((dtype, operator))
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        self.0.load_folds("cuLaunchKernel for the first time", stream.device());
        let carrying = Carrying::new(stream.device(), call, combiner, &self.0.holds);
        self.0.push("cuLaunchKernel", stream.handle(), Task::Carry(Arc::new(carrying)))
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

/// Whether it is a device's primary one.
fn is_primary(context: ContextHandle) -> bool {
    context.0 < 1 << 16
}

fn device_of(context: ContextHandle) -> u32 {
    (context.0 & 0xffff) as u32 - 1
}
