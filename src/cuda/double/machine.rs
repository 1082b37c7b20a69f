//! What the driver double knows: streams, events, and the tasks that are still to run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Instant;

use super::capture::Node;
use super::heap::Heap;
use super::kernel::Kernel;
use super::*;

/// A task that has not run.
pub(super) struct Pending {
    pub(super) queue: Queue,
    pub(super) task: Task,
    pub(super) after: Vec<u64>,
    /// The queue of the hardware that it goes through,
    pub(super) channel: Option<Channel>,
    /// and what stands before it there, which leaves when it begins.
    pub(super) behind: Option<u64>,
    /// The kernel that it is a step of, where one is several tasks.
    pub(super) kernel: Option<Arc<Kernel>>,
    /// Who has given it.
    pub(super) giver: Thread,
}

impl Pending {
    /// Whether it has begun, and goes on.
    pub(super) fn has_begun(&self) -> bool {
        matches!(&self.task, Task::Carry(carrying) if carrying.has_come())
    }
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
    pub(super) context: ContextHandle,
    /// Whether that is a green one.
    pub(super) green: bool,
    /// What no other stream has had.
    pub(super) id: u64,
    blocking: bool,
    pub(super) priority: Priority,
    /// How many streams of the device there were before it.
    pub(super) index: usize,
}

/// A queue of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Channel {
    /// Of a device, by its number.
    Work(u32, usize),
    /// Of its copy engines.
    Copies(u32, usize),
}

/// What an event means.
#[derive(Clone)]
pub(super) enum Recorded {
    Never,
    Task(u64),
    /// Nodes of a capture.
    Nodes(u64, Vec<usize>),
}

pub(super) struct Machine {
    /// Which process this is.
    pub(super) process: u64,
    /// Memory cannot be shared with other processes.
    pub(super) isolated: bool,
    pub(super) devices: u32,
    pub(super) multiprocessors: u32,
    pub(super) order: Order,
    pub(super) separated: HashSet<(u32, u32)>,
    /// Wide lines may arrive in parts at peers.
    pub(super) splits_lines: bool,
    pub(super) reached: HashSet<(u32, u32)>,
    /// How many others each device reaches at most.
    pub(super) most_peers: usize,
    pub(super) retained: HashMap<u32, usize>,
    /// Those that the program has made.
    pub(super) made_contexts: HashSet<ContextHandle>,
    pub(super) current: HashMap<ThreadId, Vec<ContextHandle>>,
    pub(super) modes: HashMap<ThreadId, CaptureMode>,
    pub(super) streams: HashMap<StreamHandle, StreamState>,
    pub(super) events: HashMap<EventHandle, (u32, Recorded)>,
    /// Handles of what was destroyed: they come back.
    pub(super) free_streams: Vec<StreamHandle>,
    pub(super) free_events: Vec<EventHandle>,
    pub(super) captures: BTreeMap<u64, Capturing>,
    pub(super) heap: Heap,
    pub(super) pending: BTreeMap<u64, Pending>,
    /// The kernel that a thread gives some stream the steps of.
    pub(super) giving: HashMap<ThreadId, Arc<Kernel>>,
    pub(super) complaints: Vec<String>,
    /// What streams waited for when nothing had moved for long, the first time.
    pub(super) standstill: Option<String>,
    pub(super) waits: usize,
    pub(super) ignored_wait: Option<usize>,
    pub(super) synchronizations: usize,
    pub(super) creations: usize,
    pub(super) failing: Option<Refusal>,
    pub(super) failed_at: Option<Instant>,
    pub(super) dying: Option<usize>,
    pub(super) no_wait_value: bool,
    /// As for waits for events: how many waits for values there were, and the one that is ignored.
    pub(super) values: usize,
    pub(super) ignored_value: Option<usize>,
    /// How many queues the hardware has for the streams of a device; `None`: as many as there are streams.
    pub(super) channels: Option<usize>,
    /// How many others copies have, then.
    pub(super) copy_channels: usize,
    /// The last task of each of them.
    last_of_channel: HashMap<Channel, u64>,
    /// Which of them a stream that is not idle has.
    channel_of: HashMap<Queue, Channel>,
    /// How many streams there have been of each device.
    made: HashMap<u32, usize>,
    /// For how many tasks the driver has room in the queue of a stream; `None`: for all.
    pub(super) room: Option<usize>,
    /// Who has the lock of a device's context.
    pub(super) locks: HashMap<u32, ThreadId>,
    /// The driver's lock, if there are calls that wait for a device with it.
    pub(super) driver: Option<Lock>,
    /// Whether modules are loaded.
    pub(super) modules: bool,
    /// Kernels that were looked up: their names, and whether they are loaded.
    pub(super) kernels: HashMap<FunctionHandle, (String, bool)>,
    /// The devices on which the kernels that fold are loaded.
    pub(super) folds: HashSet<u32>,
    /// How many records of events streams of ordinary priority were given, and the one that is ignored.
    pub(super) records: usize,
    pub(super) ignored_record: Option<usize>,
    /// Tasks that some thread runs just now.
    pub(super) running: HashSet<u64>,
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
            multiprocessors: 20,
            order,
            separated: HashSet::new(),
            splits_lines: false,
            reached: HashSet::new(),
            most_peers: usize::MAX,
            retained: HashMap::new(),
            made_contexts: HashSet::new(),
            current: HashMap::new(),
            modes: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            free_streams: Vec::new(),
            free_events: Vec::new(),
            captures: BTreeMap::new(),
            heap: Heap::default(),
            pending: BTreeMap::new(),
            giving: HashMap::new(),
            complaints: Vec::new(),
            standstill: None,
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
            copy_channels: 1,
            last_of_channel: HashMap::new(),
            channel_of: HashMap::new(),
            made: HashMap::new(),
            room: None,
            locks: HashMap::new(),
            driver: None,
            modules: false,
            kernels: HashMap::new(),
            folds: HashSet::new(),
            records: 0,
            ignored_record: None,
            running: HashSet::new(),
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
        let id = self.next_number();
        let stream = self.free_stream().unwrap_or(StreamHandle(id as usize));
        let made = self.made.entry(device).or_default();
        let (context, green, index) = (context_of(device), false, *made);
        *made += 1;
        self.streams.insert(stream, StreamState { device, context, green, id, blocking, priority, index });
        if !self.known.contains(&Queue::Stream(stream)) {
            self.known.push(Queue::Stream(stream));
        }
        stream
    }

    /// The handle of the stream that was destroyed last, of those that have nothing left to do: what the new
    /// one is given is in no order with what the old one was.
    fn free_stream(&mut self) -> Option<StreamHandle> {
        let is_over = |stream: &StreamHandle| {
            let queue = Queue::Stream(*stream);
            self.last_task(queue).is_none() && self.capture_of(queue).is_none()
        };
        let last = self.free_streams.iter().rposition(is_over)?;
        Some(self.free_streams.remove(last))
    }

    /// The queue of a handle, with `device` current.
    pub(super) fn queue(&mut self, stream: StreamHandle, device: u32) -> Queue {
        match stream {
            StreamHandle::NULL | StreamHandle::LEGACY => Queue::Legacy(device),
            StreamHandle::PER_THREAD => Queue::PerThread(device, std::thread::current().id()),
            _ => Queue::Stream(stream),
        }
    }

    /// As [`Machine::queue`], for the library: the stream lives, and its context is current.
    pub(super) fn queue_here(&mut self, call: &'static str, stream: StreamHandle) -> Result<Queue> {
        let queue = self.queue_on_device(call, stream)?;
        let is_foreign = |found: &StreamState| !is_primary(found.context) && !found.green;
        if self.streams.get(&stream).is_some_and(is_foreign) {
            return Err(refuse(call, "CUDA_ERROR_INVALID_HANDLE"));
        }
        let current = self.current.get(&std::thread::current().id()).and_then(|contexts| contexts.last());
        if current.is_some_and(|&context| !is_primary(context)) {
            self.complain(format!("{call} in a context of the program's"));
        }
        Ok(queue)
    }

    /// As [`Machine::queue_here`], for what is asked of a stream of any context.
    pub(super) fn queue_on_device(&mut self, call: &'static str, stream: StreamHandle) -> Result<Queue> {
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

    /// What a queue's tasks go through in the hardware, in the order in which they are given, if it has few
    /// queues. A stream that was idle takes one that nothing is in, if there is any.
    fn channel(&mut self, queue: Queue, task: &Task) -> Option<Channel> {
        let (channels, (device, _)) = (self.channels?, self.device_of_queue(queue)?);
        let index = match queue {
            Queue::Stream(stream) => self.streams.get(&stream)?.index,
            _ => 0,
        };
        if let Task::Copy { .. } | Task::Fill { .. } | Task::Expect { .. } = task {
            return Some(Channel::Copies(device, index % self.copy_channels));
        }
        let busy = |last: Option<&u64>| last.is_some_and(|last| self.pending.contains_key(last));
        let kept = self.channel_of.get(&queue).copied().filter(|_| busy(self.last.get(&queue)));
        let is_empty = |channel: &Channel| !busy(self.last_of_channel.get(channel));
        let channel = kept.unwrap_or_else(|| {
            let mut all = (0..channels).map(|number| Channel::Work(device, number));
            all.find(is_empty).unwrap_or(Channel::Work(device, index % channels))
        });
        self.channel_of.insert(queue, channel);
        Some(channel)
    }

    /// The number of the queue of the hardware that a stream has which is not idle.
    pub(super) fn queue_of(&self, stream: StreamHandle) -> Option<usize> {
        let queue = Queue::Stream(stream);
        match self.channel_of.get(&queue) {
            Some(Channel::Work(_, number)) if self.last_task(queue).is_some() => Some(*number),
            _ => None,
        }
    }

    /// Gives a queue a task; or a capture, if the queue is in one.
    pub(super) fn push(&mut self, queue: Queue, task: Task) -> Result<()> {
        let kernel = self.giving.get(&std::thread::current().id()).cloned();
        if let Some(capture) = self.capture_of(queue)
            && let Some(capture) = self.captures.get_mut(&capture)
        {
            capture.push(queue, Node::Task(task, kernel));
            return Ok(());
        }
        self.refuse_legacy("the legacy stream", queue)?;
        self.enqueue(queue, task, Vec::new());
        Ok(())
    }

    /// Refuses the legacy stream, and ends captures for it, while there are any.
    pub(super) fn refuse_legacy(&mut self, call: &str, queue: Queue) -> Result<()> {
        if let Queue::Legacy(_) = queue
            && !self.captures.is_empty()
        {
            self.captures.values_mut().for_each(Capturing::invalidate);
            return Err(refuse(call, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"));
        }
        Ok(())
    }

    pub(super) fn enqueue(&mut self, queue: Queue, task: Task, mut after: Vec<u64>) -> u64 {
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
        let channel = self.channel(queue, &task);
        let behind = channel.and_then(|channel| self.last_of_channel.insert(channel, id));
        let giver = std::thread::current();
        let kernel = self.giving.get(&giver.id()).cloned();
        self.pending.insert(id, Pending { queue, task, after, channel, behind, kernel, giver });
        self.last.insert(queue, id);
        id
    }

    /// A task is a step of `kernel`.
    pub(super) fn make_step(&mut self, task: u64, kernel: &Arc<Kernel>) {
        if let Some(pending) = self.pending.get_mut(&task) {
            pending.kernel = Some(kernel.clone());
        }
    }

    pub(super) fn record(&mut self, event: EventHandle, queue: Queue) -> Result<()> {
        let device = self.device_of_queue(queue).map(|(device, _)| device);
        match self.events.get(&event) {
            Some((owner, _)) if Some(*owner) == device => {}
            _ => return Err(refuse("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")),
        }
        self.refuse_legacy("cuEventRecord", queue)?;
        if self.priority(queue) == Priority::Ordinary {
            let index = self.records;
            self.records += 1;
            if self.ignored_record == Some(index) {
                self.events.entry(event).and_modify(|state| state.1 = Recorded::Never);
                return Ok(());
            }
        }
        let recorded = match self.capture_of(queue) {
            Some(id) => Recorded::Nodes(id, self.captures[&id].ends_of(queue)),
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
        self.refuse_legacy("cuStreamWaitEvent", queue)?;
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
                Some(capture) => capture.join(queue, nodes),
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

    /// The device whose context's lock a thread needs that gives `queue` something; none where there is no
    /// end of room.
    pub(super) fn locked_by(&self, queue: Queue) -> Option<u32> {
        self.room?;
        if self.capture_of(queue).is_some() {
            return None;
        }
        self.device_of_queue(queue).map(|(device, _)| device)
    }

    fn is_ready(&self, pending: &Pending) -> bool {
        self.is_next(pending)
            && match &pending.task {
                &Task::WaitValue { address, value } => {
                    let kernel = pending.kernel.as_ref();
                    self.is_there(address, value) || kernel.is_some_and(|kernel| self.ends(kernel))
                }
                Task::Carry(carrying) => carrying.is_ready(),
                _ => true,
            }
    }

    /// Whether nothing has to run or begin before it.
    fn is_next(&self, pending: &Pending) -> bool {
        !pending.after.iter().any(|before| self.pending.contains_key(before))
            && pending.behind.and_then(|before| self.pending.get(&before)).is_none_or(Pending::has_begun)
    }

    /// Whether the stream that goes before all others has something to do, or a thread that does it. (Code of
    /// the test's may wait for what others do.)
    fn first_moves(&self) -> bool {
        let Order::First(first) = self.order else { return false };
        let moves = |(id, pending): (&u64, &Pending)| {
            self.known.get(first) == Some(&pending.queue)
                && match self.running.contains(id) {
                    true => !matches!(pending.task, Task::Host { .. }),
                    false => self.is_ready(pending),
                }
        };
        self.pending.iter().any(moves)
    }

    /// The task to run next, by the order. None while the stream that goes before all others is busy with
    /// one.
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
            Order::First(stream) => {
                let first_moves = self.first_moves();
                let chosen = ready.iter().min_by_key(|(_, queue)| (*queue != stream, *queue));
                chosen.filter(|(_, queue)| *queue == stream || !first_moves)
            }
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
        if self.first_moves() {
            return None;
        }
        let (mut open, mut seen) = (vec![goal], HashSet::new());
        while let Some(id) = open.pop() {
            let Some(pending) = self.pending.get(&id).filter(|_| seen.insert(id)) else { continue };
            if !self.running.contains(&id) && self.is_ready(pending) {
                self.running.insert(id);
                return Some(id);
            }
            open.extend(pending.after.iter().chain(&pending.behind));
        }
        None
    }

    /// What `device`, and those that it reaches or that reach it, have been given and have not done.
    pub(super) fn given_to(&self, device: u32) -> Vec<u64> {
        let reaches = |a, b| self.reached.contains(&(a, b)) || self.reached.contains(&(b, a));
        let concerns = |pending: &Pending| {
            let owner = self.device_of_queue(pending.queue);
            owner.is_none_or(|(owner, _)| owner == device || reaches(owner, device))
        };
        self.pending.iter().filter(|(_, pending)| concerns(pending)).map(|(&task, _)| task).collect()
    }

    /// How many copies are still to run.
    pub(super) fn copies(&self) -> usize {
        self.pending.values().filter(|pending| matches!(pending.task, Task::Copy { .. })).count()
    }

    /// What a pending task is, if nothing but itself keeps it from running.
    pub(super) fn describe_head(&self, task: u64) -> Option<String> {
        let pending = self.pending.get(&task)?;
        let Pending { queue, task, .. } = pending;
        self.is_next(pending).then(|| format!("{task:?} of {queue:?}"))
    }

    /// Whether some thread runs a task just now.
    pub(super) fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// A task has run; a courier goes on until it has left.
    pub(super) fn finish(&mut self, id: u64) {
        self.running.remove(&id);
        let goes_on = |pending: &Pending| match &pending.task {
            Task::Carry(carrying) => !carrying.is_over(),
            _ => false,
        };
        if !self.pending.get(&id).is_some_and(goes_on) {
            self.pending.remove(&id);
        }
    }

    /// The task of a pending number that was chosen; it stays pending until it has run.
    pub(super) fn take(&mut self, id: u64) -> Task {
        let Pending { task, kernel, .. } = &self.pending[&id];
        let (task, kernel) = (task.clone(), kernel.clone());
        match kernel.is_some_and(|kernel| self.leaves(&kernel, &task)) {
            true => Task::Mark,
            false => task,
        }
    }

    pub(super) fn execute(&mut self, task: &Task) {
        if let Err(complaint) = task.run(&mut self.heap, &self.reached) {
            self.complain(complaint);
        }
    }

    pub(super) fn allocate(&mut self, memory: Memory, device: u32, bytes: usize) -> u64 {
        self.creations += 1;
        self.heap.allocate(memory, device, bytes)
    }

    pub(super) fn register(&mut self, device: u32, place: Place) {
        self.creations += 1;
        self.heap.register(device, place);
    }

    pub(super) fn unregister(&mut self, address: u64) -> Result<()> {
        let place = self.heap.unregister(address)?;
        self.expect_unused(place, "unregistered");
        Ok(())
    }

    pub(super) fn free(&mut self, address: u64) -> Result<()> {
        let place = self.heap.free(address)?;
        self.expect_unused(place, "freed");
        Ok(())
    }

    /// Complains if a stream is still to use memory of which this becomes.
    fn expect_unused(&mut self, place: Place, becomes: &str) {
        let Place { address, bytes } = place;
        let range = address..address + bytes as u64;
        let touches = |pending: &Pending| {
            let words = pending.kernel.iter().flat_map(|kernel| kernel.words);
            pending.task.places().into_iter().chain(words).any(|place| range.contains(&place.address))
        };
        if self.pending.values().any(touches) {
            self.complain(format!("{address:#x} is {becomes} while a stream is to use it"));
        }
    }
}
