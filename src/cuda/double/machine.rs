//! What the driver double knows: memory, streams, events, captures, and the tasks that are still to run.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::*;
use crate::cuda::local::Operand;
use crate::reduce::{self, Representation};

/// What memory holds before anybody wrote it, and after it was freed.
const RUBBISH: u8 = 0xdb;

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// One thing for a stream to do.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// Nothing: an event, a wait, the end of a graph.
    Mark,
    /// Bytes, each side on a device or, if none, in pinned memory.
    Copy {
        to: (u64, Option<u32>),
        from: (u64, Option<u32>),
        bytes: usize,
    },
    Fill {
        to: u64,
        bytes: Box<[u8]>,
    },
    Expect {
        at: u64,
        bytes: Box<[u8]>,
        what: String,
    },
    WriteValue {
        address: u64,
        value: u32,
    },
    WaitValue {
        address: u64,
        value: u32,
    },
    Host {
        function: HostFunction,
        user: usize,
    },
    Fold {
        device: u32,
        reducer: Reducer,
        operands: Box<[Operand]>,
        out: u64,
        representation: Representation,
        count: usize,
    },
}

impl Task {
    /// The memory that it touches.
    fn places(&self) -> Vec<Place> {
        let place = |address, bytes| Place { address, bytes };
        match self {
            Task::Mark | Task::Host { .. } => Vec::new(),
            Task::Copy { to, from, bytes } => vec![place(to.0, *bytes), place(from.0, *bytes)],
            Task::Fill { to, bytes } => vec![place(*to, bytes.len())],
            Task::Expect { at, bytes, .. } => vec![place(*at, bytes.len())],
            Task::WriteValue { address, .. } | Task::WaitValue { address, .. } => vec![place(*address, 4)],
            Task::Fold { reducer, operands, out, representation, count, .. } => {
                let size = |representation: Representation| match representation {
                    Representation::Element => reducer.element_size() * count,
                    Representation::Accumulator => reducer.accumulator_size() * count,
                };
                let mut places = vec![place(*out, size(*representation))];
                places.extend(operands.iter().map(|o| place(o.address, size(o.representation))));
                places
            }
        }
    }
}

/// A task that has not run.
pub(super) struct Pending {
    queue: Queue,
    task: Task,
    after: Vec<u64>,
}

/// What runs in turn: a stream, or what stands for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Queue {
    Stream(StreamHandle),
    Legacy(u32),
    PerThread(u32, ThreadId),
    /// One task of a graph.
    Node(u64),
}

pub(super) struct StreamState {
    pub(super) device: u32,
    blocking: bool,
    priority: Priority,
    /// How many streams of the device and priority there were before it.
    index: usize,
}

/// A queue of the hardware: of a device, for streams of a priority or for copies, by its number.
type Channel = (u32, Option<Priority>, usize);

/// What an event means.
#[derive(Clone)]
pub(super) enum Recorded {
    Never,
    Task(u64),
    /// Nodes of a capture.
    Nodes(u64, Vec<usize>),
}

pub(super) struct Allocation {
    place: Place,
    memory: Memory,
    device: u32,
    number: u64,
    freed: bool,
    /// Another process's, mapped here so many times.
    mapped: usize,
    /// Not ours to give back.
    registered: bool,
    /// A program's own mapping, within a range of addresses.
    piece: bool,
}

impl Allocation {
    pub(super) fn location(&self) -> Location {
        let Place { address: base, bytes } = self.place;
        let (memory, device, buffer, mapped) = (self.memory, self.device, self.number, self.piece);
        Location { memory, device, base, bytes: bytes as u64, buffer, mapped }
    }

    /// Whether it is to be given back here.
    fn is_own(&self) -> bool {
        self.mapped == 0 && !self.registered && !self.piece
    }

    fn layout(&self) -> Layout {
        Layout::from_size_align(self.place.bytes.max(1), 256).expect("a test's size")
    }
}

/// A capture that is under way.
pub(super) struct Capturing {
    origin: Queue,
    nodes: Vec<(Task, Vec<usize>)>,
    /// The last nodes of every stream in it.
    ends: HashMap<Queue, Vec<usize>>,
    invalid: bool,
}

impl Capturing {
    pub(super) fn invalidate(&mut self) {
        self.invalid = true;
    }
}

impl From<Queue> for Capturing {
    fn from(origin: Queue) -> Capturing {
        Capturing { origin, nodes: Vec::new(), ends: HashMap::from([(origin, Vec::new())]), invalid: false }
    }
}

/// A captured graph: tasks, each with the earlier ones that it comes after.
#[derive(Debug)]
pub(crate) struct Graph(Vec<(Task, Vec<usize>)>);

pub(super) struct Machine {
    /// Which process this is.
    pub(super) process: u64,
    /// Memory cannot be shared with other processes.
    pub(super) isolated: bool,
    pub(super) devices: u32,
    pub(super) order: Order,
    pub(super) separated: HashSet<(u32, u32)>,
    pub(super) reached: HashSet<(u32, u32)>,
    pub(super) retained: HashMap<u32, usize>,
    pub(super) current: HashMap<ThreadId, Vec<ContextHandle>>,
    pub(super) modes: HashMap<ThreadId, CaptureMode>,
    pub(super) streams: HashMap<StreamHandle, StreamState>,
    pub(super) events: HashMap<EventHandle, (u32, Recorded)>,
    pub(super) captures: BTreeMap<u64, Capturing>,
    pub(super) pending: BTreeMap<u64, Pending>,
    pub(super) complaints: Vec<String>,
    pub(super) waits: usize,
    pub(super) ignored_wait: Option<usize>,
    pub(super) synchronizations: usize,
    pub(super) creations: usize,
    pub(super) failing: Option<usize>,
    pub(super) failed_at: Option<Instant>,
    pub(super) dying: Option<usize>,
    pub(super) no_wait_value: bool,
    /// As for waits for events: how many waits for values there were, and the one that is ignored.
    pub(super) values: usize,
    pub(super) ignored_value: Option<usize>,
    /// How many queues the hardware has for the streams of a device and priority; `None`: as many as there are streams.
    pub(super) channels: Option<usize>,
    /// The last task of each of them.
    last_of_channel: HashMap<Channel, u64>,
    /// How many streams there have been of each device and priority.
    made: HashMap<(u32, Priority), usize>,
    /// For how many tasks the driver has room in the queue of a stream; `None`: for all.
    pub(super) room: Option<usize>,
    /// Who has the lock of a device's context.
    pub(super) locks: HashMap<u32, ThreadId>,
    /// How many records of events streams of ordinary priority were given, and the one that is ignored.
    pub(super) records: usize,
    pub(super) ignored_record: Option<usize>,
    /// Tasks that some thread runs just now.
    running: HashSet<u64>,
    allocations: BTreeMap<u64, Allocation>,
    /// What mapped pieces lie in.
    ranges: Vec<Allocation>,
    /// The last task of each queue.
    last: HashMap<Queue, u64>,
    /// Queues in the order of their first use.
    known: Vec<Queue>,
    turn: usize,
    dice: u64,
    number: u64,
}

impl Machine {
    pub(super) fn new(devices: u32, order: Order) -> Machine {
        let dice = if let Order::Random(seed) = order { seed } else { 1 };
        static PROCESSES: AtomicU64 = AtomicU64::new(1);
        Machine {
            process: PROCESSES.fetch_add(1, Ordering::Relaxed),
            isolated: false,
            devices,
            order,
            separated: HashSet::new(),
            reached: HashSet::new(),
            retained: HashMap::new(),
            current: HashMap::new(),
            modes: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            captures: BTreeMap::new(),
            pending: BTreeMap::new(),
            complaints: Vec::new(),
            waits: 0,
            ignored_wait: None,
            synchronizations: 0,
            creations: 0,
            failing: None,
            failed_at: None,
            dying: None,
            no_wait_value: false,
            values: 0,
            ignored_value: None,
            channels: None,
            last_of_channel: HashMap::new(),
            made: HashMap::new(),
            room: None,
            locks: HashMap::new(),
            records: 0,
            ignored_record: None,
            running: HashSet::new(),
            allocations: BTreeMap::new(),
            ranges: Vec::new(),
            last: HashMap::new(),
            known: Vec::new(),
            turn: 0,
            dice: dice.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            // Handles begin above those of the default streams.
            number: 0x1000,
        }
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    pub(super) fn complain(&mut self, complaint: String) {
        self.complaints.push(complaint);
    }

    pub(super) fn mode(&self, thread: ThreadId) -> CaptureMode {
        self.modes.get(&thread).copied().unwrap_or(CaptureMode::Global)
    }

    /// The device of the thread's current context.
    pub(super) fn device_here(&self, call: &str) -> Result<u32> {
        let current = self.current.get(&std::thread::current().id()).and_then(|contexts| contexts.last());
        current.map(|&context| device_of(context)).ok_or_else(|| refuse(call, "CUDA_ERROR_INVALID_CONTEXT"))
    }

    pub(super) fn create_stream(&mut self, device: u32, blocking: bool, priority: Priority) -> StreamHandle {
        let stream = StreamHandle(self.next_number() as usize);
        let made = self.made.entry((device, priority)).or_default();
        self.streams.insert(stream, StreamState { device, blocking, priority, index: *made });
        *made += 1;
        self.known.push(Queue::Stream(stream));
        stream
    }

    /// The queue of a handle, with `device` current.
    pub(super) fn queue(&mut self, stream: StreamHandle, device: u32) -> Queue {
        match stream {
            StreamHandle::NULL | StreamHandle::LEGACY => Queue::Legacy(device),
            StreamHandle::PER_THREAD => Queue::PerThread(device, std::thread::current().id()),
            _ => Queue::Stream(stream),
        }
    }

    /// As [`Machine::queue`], for the library: the stream lives, and its device is current.
    pub(super) fn queue_here(&mut self, call: &'static str, stream: StreamHandle) -> Result<Queue> {
        let device = self.device_here(call)?;
        let queue = self.queue(stream, device);
        if let Queue::Stream(stream) = queue {
            match self.streams.get(&stream) {
                None => return Err(refuse(call, "CUDA_ERROR_INVALID_HANDLE")),
                Some(found) if found.device != device => {
                    return Err(refuse(call, "CUDA_ERROR_INVALID_CONTEXT"));
                }
                Some(_) => {}
            }
        }
        Ok(queue)
    }

    /// The device of a queue, and whether the legacy stream waits for it.
    fn device_of_queue(&self, queue: Queue) -> Option<(u32, bool)> {
        match queue {
            Queue::Stream(stream) => self.streams.get(&stream).map(|s| (s.device, s.blocking)),
            Queue::Legacy(device) => Some((device, false)),
            Queue::PerThread(device, _) => Some((device, true)),
            Queue::Node(_) => None,
        }
    }

    /// The priority of a queue's stream.
    fn priority(&self, queue: Queue) -> Priority {
        match queue {
            Queue::Stream(stream) => self.streams.get(&stream).map_or(Priority::Ordinary, |s| s.priority),
            _ => Priority::Ordinary,
        }
    }

    /// What a queue's tasks go through in the hardware, in the order in which they are given, if it has few queues.
    fn channel(&self, queue: Queue, task: &Task) -> Option<Channel> {
        let (channels, (device, _)) = (self.channels?, self.device_of_queue(queue)?);
        let index = match queue {
            Queue::Stream(stream) => self.streams.get(&stream)?.index,
            _ => 0,
        };
        // Copy engines have queues of their own, the same for all priorities.
        let copies = matches!(task, Task::Copy { .. } | Task::Fill { .. } | Task::Expect { .. });
        Some((device, (!copies).then(|| self.priority(queue)), index % channels))
    }

    /// Gives a queue a task; or a capture, if the queue is in one.
    pub(super) fn push(&mut self, queue: Queue, task: Task) -> Result<()> {
        if let Some(capture) = self.capture_of(queue)
            && let Some(capture) = self.captures.get_mut(&capture)
        {
            let node = capture.nodes.len();
            let after = capture.ends.insert(queue, vec![node]).unwrap_or_default();
            capture.nodes.push((task, after));
            return Ok(());
        }
        if let Queue::Legacy(_) = queue
            && !self.captures.is_empty()
        {
            self.captures.values_mut().for_each(Capturing::invalidate);
            return Err(refuse("the legacy stream", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"));
        }
        self.enqueue(queue, task, Vec::new());
        Ok(())
    }

    fn enqueue(&mut self, queue: Queue, task: Task, mut after: Vec<u64>) -> u64 {
        if !self.known.contains(&queue) && !matches!(queue, Queue::Node(_)) {
            self.known.push(queue);
        }
        after.extend(self.last.get(&queue));
        match (queue, self.device_of_queue(queue)) {
            (Queue::Legacy(device), _) => {
                let blocking = |queue: &&Queue| self.device_of_queue(**queue) == Some((device, true));
                after.extend(self.known.iter().filter(blocking).filter_map(|queue| self.last.get(queue)));
            }
            (_, Some((device, true))) => after.extend(self.last.get(&Queue::Legacy(device))),
            _ => {}
        }
        let id = self.next_number();
        if let Some(channel) = self.channel(queue, &task) {
            after.extend(self.last_of_channel.insert(channel, id));
        }
        self.pending.insert(id, Pending { queue, task, after });
        self.last.insert(queue, id);
        id
    }

    pub(super) fn record(&mut self, event: EventHandle, queue: Queue) -> Result<()> {
        let device = self.device_of_queue(queue).map(|(device, _)| device);
        match self.events.get(&event) {
            Some((owner, _)) if Some(*owner) == device => {}
            _ => return Err(refuse("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")),
        }
        if self.priority(queue) == Priority::Ordinary {
            let index = self.records;
            self.records += 1;
            if self.ignored_record == Some(index) {
                self.events.entry(event).and_modify(|state| state.1 = Recorded::Never);
                return Ok(());
            }
        }
        let recorded = match self.capture_of(queue) {
            Some(id) => {
                let nodes = self.captures[&id].ends.get(&queue).cloned().unwrap_or_default();
                Recorded::Nodes(id, nodes)
            }
            None => Recorded::Task(self.enqueue(queue, Task::Mark, Vec::new())),
        };
        if let Some(state) = self.events.get_mut(&event) {
            state.1 = recorded;
        }
        Ok(())
    }

    pub(super) fn wait(&mut self, queue: Queue, event: EventHandle) -> Result<()> {
        let refuse = |name| Err(refuse("cuStreamWaitEvent", name));
        let Some((_, recorded)) = self.events.get(&event).cloned() else {
            return refuse("CUDA_ERROR_INVALID_HANDLE");
        };
        let index = self.waits;
        self.waits += 1;
        if self.ignored_wait == Some(index) {
            return Ok(());
        }
        match (recorded, self.capture_of(queue)) {
            (Recorded::Never, _) => {}
            (Recorded::Task(task), None) => {
                self.enqueue(queue, Task::Mark, vec![task]);
            }
            (Recorded::Task(_), Some(capture)) => {
                self.captures.entry(capture).and_modify(Capturing::invalidate);
                return refuse("CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
            }
            (Recorded::Nodes(id, _), other) if other.is_some_and(|other| other != id) => {
                return refuse("CUDA_ERROR_STREAM_CAPTURE_MERGE");
            }
            (Recorded::Nodes(id, nodes), _) => match self.captures.get_mut(&id) {
                // The stream joins the capture, if it is not in it.
                Some(capture) => capture.ends.entry(queue).or_default().extend(nodes),
                None => return refuse("CUDA_ERROR_CAPTURED_EVENT"),
            },
        }
        Ok(())
    }

    /// The last task of a queue, if it has not run.
    pub(super) fn last_task(&self, queue: Queue) -> Option<u64> {
        self.last.get(&queue).copied().filter(|task| self.pending.contains_key(task))
    }

    /// The task that stands for what an event means, if any.
    pub(super) fn recorded_task(&self, call: &str, event: EventHandle) -> Result<Option<u64>> {
        match self.events.get(&event) {
            None => Err(refuse(call, "CUDA_ERROR_INVALID_HANDLE")),
            Some((_, Recorded::Never)) => Ok(None),
            Some((_, Recorded::Task(task))) => Ok(Some(*task)),
            Some((_, Recorded::Nodes(..))) => Err(refuse(call, "CUDA_ERROR_CAPTURED_EVENT")),
        }
    }

    /// Whether there is no room for one more task of a queue.
    pub(super) fn is_full(&self, queue: Queue) -> bool {
        let Some(room) = self.room else { return false };
        self.pending.values().filter(|pending| pending.queue == queue).count() >= room
    }

    /// The device whose context's lock a thread needs that gives `queue` something; none where there is no end of room.
    pub(super) fn locked_by(&self, queue: Queue) -> Option<u32> {
        self.room?;
        if self.capture_of(queue).is_some() {
            return None;
        }
        self.device_of_queue(queue).map(|(device, _)| device)
    }

    fn capture_of(&self, queue: Queue) -> Option<u64> {
        self.captures.iter().find(|(_, capture)| capture.ends.contains_key(&queue)).map(|(&id, _)| id)
    }

    pub(super) fn capture_state(&self, queue: Queue) -> Capture {
        match self.capture_of(queue) {
            None => Capture::None,
            Some(id) if self.captures[&id].invalid => Capture::Invalidated,
            Some(id) => Capture::Active(id),
        }
    }

    pub(super) fn end_capture(&mut self, origin: Queue) -> Result<Graph> {
        let refuse = |name| Err(refuse("cuStreamEndCapture", name));
        let id = self.captures.iter().find(|(_, capture)| capture.origin == origin).map(|(&id, _)| id);
        let Some(capture) = id.and_then(|id| self.captures.remove(&id)) else {
            return refuse("CUDA_ERROR_ILLEGAL_STATE");
        };
        if capture.invalid {
            return refuse("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
        }
        // Whatever any stream did has to come before the end of the origin.
        let mut joined = vec![false; capture.nodes.len()];
        let mut open: Vec<usize> = capture.ends[&origin].clone();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut joined[node], true) {
                open.extend(&capture.nodes[node].1);
            }
        }
        if joined.contains(&false) {
            return refuse("CUDA_ERROR_STREAM_CAPTURE_UNJOINED");
        }
        Ok(Graph(capture.nodes))
    }

    pub(super) fn launch(&mut self, graph: &Graph, queue: Queue) {
        let begin = self.enqueue(queue, Task::Mark, Vec::new());
        let mut ids: Vec<u64> = Vec::with_capacity(graph.0.len());
        for (task, after) in &graph.0 {
            let mut after: Vec<u64> = after.iter().map(|&node| ids[node]).collect();
            after.push(begin);
            let node = Queue::Node(self.next_number());
            ids.push(self.enqueue(node, task.clone(), after));
        }
        self.enqueue(queue, Task::Mark, ids);
    }

    fn is_ready(&self, pending: &Pending) -> bool {
        let free = pending.after.iter().all(|before| !self.pending.contains_key(before));
        free && match pending.task {
            Task::WaitValue { address, value } => match self.slice(Place { address, bytes: 4 }) {
                Ok(found) => {
                    let found = u32::from_ne_bytes(found.try_into().expect("four bytes"));
                    found.wrapping_sub(value) as i32 >= 0
                }
                // Ready to be complained about.
                Err(_) => true,
            },
            _ => true,
        }
    }

    /// The task to run next, by the order.
    pub(super) fn choose(&mut self) -> Option<u64> {
        let mut ready: Vec<(u64, usize)> = Vec::new();
        for (&id, pending) in &self.pending {
            if !self.running.contains(&id) && self.is_ready(pending) {
                let known = self.known.iter().position(|queue| *queue == pending.queue);
                ready.push((id, known.unwrap_or(self.known.len())));
            }
        }
        let queues = self.known.len() + 1;
        let chosen = match self.order {
            Order::Eager => ready.first(),
            Order::RoundRobin => {
                let turn = self.turn;
                ready.iter().min_by_key(|(_, queue)| (queue + queues - turn) % queues)
            }
            Order::First(stream) => ready.iter().min_by_key(|(_, queue)| (*queue != stream, *queue)),
            Order::Last(stream) => ready.iter().min_by_key(|(_, queue)| (*queue == stream, *queue)),
            Order::Backward => ready.iter().max_by_key(|(_, queue)| *queue),
            Order::Random(_) => {
                self.dice ^= self.dice << 13;
                self.dice ^= self.dice >> 7;
                self.dice ^= self.dice << 17;
                let sides = ready.len().max(1) as u64;
                ready.get((self.dice % sides) as usize)
            }
        };
        let (id, queue) = *chosen?;
        self.turn = (queue + 1) % queues;
        self.running.insert(id);
        Some(id)
    }

    /// A ready task that has to run before `goal` is done, if one is ready.
    pub(super) fn needed_for(&mut self, goal: u64) -> Option<u64> {
        let (mut open, mut seen) = (vec![goal], HashSet::new());
        while let Some(id) = open.pop() {
            let Some(pending) = self.pending.get(&id).filter(|_| seen.insert(id)) else { continue };
            if !self.running.contains(&id) && self.is_ready(pending) {
                self.running.insert(id);
                return Some(id);
            }
            open.extend(&pending.after);
        }
        None
    }

    /// Whether some thread runs a task just now.
    pub(super) fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// A task has run.
    pub(super) fn finish(&mut self, id: u64) {
        self.running.remove(&id);
        self.pending.remove(&id);
    }

    /// The task of a pending number that was chosen; it stays pending until it has run.
    pub(super) fn take(&self, id: u64) -> Task {
        self.pending[&id].task.clone()
    }

    pub(super) fn execute(&mut self, task: &Task) {
        if let Err(complaint) = self.try_execute(task) {
            self.complain(complaint);
        }
    }

    fn try_execute(&mut self, task: &Task) -> Result<(), String> {
        task.places().into_iter().try_for_each(|place| self.slice(place).map(drop))?;
        match task {
            Task::Mark | Task::WaitValue { .. } | Task::Host { .. } => {}
            Task::Copy { to, from, bytes } => {
                for (address, device) in [*to, *from] {
                    let place = Place { address, bytes: *bytes };
                    let found = self.allocation(place).map(Allocation::location);
                    let found = found.map(|at| match at.memory {
                        Memory::Host => None,
                        Memory::Device => Some(at.device),
                        Memory::Managed => device,
                    });
                    if found != Some(device) {
                        return Err(format!("{address:#x} copied as of {device:?}, but it is of {found:?}"));
                    }
                }
                let bytes_read = self.slice(Place { address: from.0, bytes: *bytes })?.to_vec();
                self.slice_mut(Place { address: to.0, bytes: *bytes })?.copy_from_slice(&bytes_read);
            }
            Task::Fill { to, bytes } => {
                self.slice_mut(Place { address: *to, bytes: bytes.len() })?.copy_from_slice(bytes);
            }
            Task::Expect { at, bytes, what } => {
                let found = self.slice(Place { address: *at, bytes: bytes.len() })?;
                if let Some(index) = (0..bytes.len()).find(|&index| found[index] != bytes[index]) {
                    let (found, due) = (found[index], bytes[index]);
                    return Err(format!("{what}: byte {index} is {found:#x}, but {due:#x} is due"));
                }
            }
            Task::WriteValue { address, value } => {
                self.slice_mut(Place { address: *address, bytes: 4 })?.copy_from_slice(&value.to_ne_bytes());
            }
            Task::Fold { device, reducer, operands, out, representation, count } => {
                for place in task.places() {
                    let owner = self.allocation(place).map_or(*device, |allocation| allocation.device);
                    if owner != *device && !self.reached.contains(&(*device, owner)) {
                        return Err(format!("device {device} has no access to device {owner}"));
                    }
                }
                let operand = |operand: &Operand| reduce::Operand {
                    address: pointer(operand.address),
                    representation: operand.representation,
                    scale: operand.scale,
                };
                let operands: Vec<reduce::Operand> = operands.iter().map(operand).collect();
                // SAFETY: every place is live memory, as found above; one task runs at a time.
                unsafe { reducer.fold(&operands, pointer(*out), *representation, *count) };
            }
        }
        Ok(())
    }

    pub(super) fn allocate(&mut self, memory: Memory, device: u32, bytes: usize) -> u64 {
        self.creations += 1;
        let number = self.next_number();
        let place = Place { address: 0, bytes };
        let mut allocation = Allocation {
            place,
            memory,
            device,
            number,
            freed: false,
            mapped: 0,
            registered: false,
            piece: false,
        };
        // SAFETY: the layout has a size.
        let address = unsafe { std::alloc::alloc(allocation.layout()) };
        assert!(!address.is_null(), "no memory for the test");
        // SAFETY: just allocated, this long.
        unsafe { address.write_bytes(RUBBISH, bytes) };
        allocation.place.address = address.expose_provenance() as u64;
        let address = allocation.place.address;
        self.allocations.insert(address, allocation);
        address
    }

    /// Maps pieces of device memory one after the other, all in a range of addresses.
    pub(super) fn map_pieces(&mut self, device: u32, bytes: usize, pieces: usize) -> u64 {
        let start = self.allocate(Memory::Device, device, bytes * pieces);
        let range = self.allocations.remove(&start);
        self.ranges.extend(range);
        for address in (start..).step_by(bytes).take(pieces) {
            let number = self.next_number();
            let (memory, place) = (Memory::Device, Place { address, bytes });
            let (freed, mapped, registered, piece) = (false, 0, false, true);
            let new = Allocation { place, memory, device, number, freed, mapped, registered, piece };
            self.allocations.insert(address, new);
        }
        start
    }

    /// Takes in memory that its owner gives back, when it is no more registered.
    pub(super) fn register(&mut self, device: u32, address: u64, bytes: usize) {
        self.creations += 1;
        let number = self.next_number();
        let place = Place { address, bytes };
        let registered = Allocation {
            place,
            memory: Memory::Host,
            device,
            number,
            freed: false,
            mapped: 0,
            registered: true,
            piece: false,
        };
        self.allocations.insert(address, registered);
    }

    pub(super) fn unregister(&mut self, address: u64) -> Result<()> {
        let Some(found) = self.allocations.get(&address).filter(|found| found.registered) else {
            return Err(refuse("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"));
        };
        let range = address..address + found.place.bytes as u64;
        let touches = |task: &Task| task.places().iter().any(|place| range.contains(&place.address));
        if self.pending.values().any(|pending| touches(&pending.task)) {
            self.complain(format!("{address:#x} is unregistered while a stream is to use it"));
        }
        self.allocations.remove(&address);
        Ok(())
    }

    /// Marks memory as freed. It comes back when the double is dropped, so a late access harms nothing.
    pub(super) fn free(&mut self, address: u64) -> Result<()> {
        let bytes = match self.allocations.get(&address) {
            Some(allocation) if !allocation.freed && allocation.is_own() => allocation.place.bytes,
            _ => return Err(refuse("cuMemFree", "CUDA_ERROR_INVALID_VALUE")),
        };
        let range = address..address + bytes as u64;
        let touches = |task: &Task| task.places().iter().any(|place| range.contains(&place.address));
        if self.pending.values().any(|pending| touches(&pending.task)) {
            self.complain(format!("{address:#x} is freed while a stream is to use it"));
        }
        if let Ok(memory) = self.slice_mut(Place { address, bytes }) {
            memory.fill(RUBBISH);
        }
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.freed = true;
        }
        Ok(())
    }

    /// Maps another process's memory where it is.
    pub(super) fn map(&mut self, device: u32, address: u64, bytes: usize) {
        let number = self.next_number();
        let place = Place { address, bytes };
        let memory = Memory::Device;
        let new = Allocation {
            place,
            memory,
            device,
            number,
            freed: false,
            mapped: 0,
            registered: false,
            piece: false,
        };
        self.allocations.entry(address).or_insert(new).mapped += 1;
    }

    pub(super) fn unmap(&mut self, address: u64) -> Result<()> {
        match self.allocations.get_mut(&address) {
            Some(allocation) if allocation.mapped > 1 => allocation.mapped -= 1,
            Some(allocation) if allocation.mapped == 1 => drop(self.allocations.remove(&address)),
            _ => return Err(refuse("cuIpcCloseMemHandle", "CUDA_ERROR_INVALID_VALUE")),
        }
        Ok(())
    }

    /// Bytes of device memory that are allocated and not freed.
    pub(super) fn allocated(&self, device: u32) -> usize {
        let own = |found: &&Allocation| found.mapped == 0 && !found.freed && found.device == device;
        let device_memory = |found: &&Allocation| found.memory == Memory::Device;
        self.allocations.values().filter(own).filter(device_memory).map(|found| found.place.bytes).sum()
    }

    /// The live allocation that a place lies in, or its first piece.
    pub(super) fn allocation(&self, place: Place) -> Option<&Allocation> {
        let (_, found) = self.allocations.range(..=place.address).next_back()?;
        let mut end = found.place.address + found.place.bytes as u64;
        while let Some(next) = self.allocations.get(&end).filter(|next| next.piece && found.piece) {
            end += next.place.bytes as u64;
        }
        let inside = place.address < end && place.address + place.bytes as u64 <= end;
        (inside && !found.freed).then_some(found)
    }

    /// The memory of a place that lies in a live allocation.
    pub(super) fn slice(&self, place: Place) -> Result<&[u8], String> {
        match self.allocation(place) {
            // SAFETY: within a live allocation, which was filled; writing one takes `&mut self`.
            Some(_) => Ok(unsafe { std::slice::from_raw_parts(pointer(place.address), place.bytes) }),
            None => Err(format!("{place:x?} is no live memory")),
        }
    }

    fn slice_mut(&mut self, place: Place) -> Result<&mut [u8], String> {
        match self.allocation(place) {
            // SAFETY: as above, and `self` lends it to nobody else meanwhile.
            Some(_) => Ok(unsafe { std::slice::from_raw_parts_mut(pointer(place.address), place.bytes) }),
            None => Err(format!("{place:x?} is no live memory")),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let own = self.allocations.values().filter(|allocation| allocation.is_own());
        for allocation in own.chain(&self.ranges) {
            // SAFETY: allocated with this layout, and not given back before.
            unsafe { std::alloc::dealloc(pointer(allocation.place.address), allocation.layout()) };
        }
    }
}

/// Memory by its address.
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
