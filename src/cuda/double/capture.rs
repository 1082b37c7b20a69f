//! Captures of the driver double, and the graphs that they become.

use super::*;

/// What a graph has.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// A step of a kernel, where that is several.
    Task(Task, Option<Arc<Kernel>>),
    /// Waits for what an event means as the graph is launched.
    Wait(EventHandle),
    /// What an event means from each launch on.
    Record(EventHandle),
}

/// A capture that is under way.
pub(super) struct Capturing {
    origin: Queue,
    nodes: Vec<(Node, Vec<usize>)>,
    /// The last nodes of every stream in it.
    ends: HashMap<Queue, Vec<usize>>,
    invalid: bool,
}

impl Capturing {
    pub(super) fn push(&mut self, queue: Queue, node: Node) {
        let number = self.nodes.len();
        let after = self.ends.insert(queue, vec![number]).unwrap_or_default();
        self.nodes.push((node, after));
    }

    /// A queue comes after `nodes`; it joins the capture, if it is not in it.
    pub(super) fn join(&mut self, queue: Queue, nodes: Vec<usize>) {
        self.ends.entry(queue).or_default().extend(nodes);
    }

    /// The last nodes of a queue.
    pub(super) fn ends_of(&self, queue: Queue) -> Vec<usize> {
        self.ends.get(&queue).cloned().unwrap_or_default()
    }

    /// The last nodes of a queue, each once.
    fn last(&self, queue: Queue) -> Vec<usize> {
        let mut last = self.ends_of(queue);
        last.sort_unstable();
        last.dedup();
        last
    }

    pub(super) fn invalidate(&mut self) {
        self.invalid = true;
    }
}

impl From<Queue> for Capturing {
    fn from(origin: Queue) -> Capturing {
        Capturing { origin, nodes: Vec::new(), ends: HashMap::from([(origin, Vec::new())]), invalid: false }
    }
}

/// A captured graph: nodes, each with those that it comes after. Those are earlier, but for what records an
/// event.
#[derive(Debug)]
pub(crate) struct Graph(Vec<(Node, Vec<usize>)>);

impl Machine {
    /// The capture that a queue is in.
    fn capturing(&mut self, call: &str, queue: Queue) -> Result<&mut Capturing> {
        let capture = self.capture_of(queue).and_then(|id| self.captures.get_mut(&id));
        capture.ok_or_else(|| refuse(call, "CUDA_ERROR_ILLEGAL_STATE"))
    }

    pub(super) fn wait_at_launch(&mut self, queue: Queue, event: EventHandle) -> Result<()> {
        self.capturing("cuStreamWaitEvent", queue)?.push(queue, Node::Wait(event));
        Ok(())
    }

    pub(super) fn record_at_launch(&mut self, queue: Queue, event: EventHandle) -> Result<GraphRecord> {
        let capture = self.capturing("cuGraphAddEventRecordNode", queue)?;
        let after = capture.last(queue);
        let behind = after.iter().map(|&node| GraphNode(node)).collect();
        capture.nodes.push((Node::Record(event), after));
        Ok(GraphRecord { node: GraphNode(capture.nodes.len() - 1), behind })
    }

    /// Refuses edges that are there already, and that are not, as the driver does.
    pub(super) fn put_off(&mut self, queue: Queue, record: &mut GraphRecord) -> Result<()> {
        let capture = self.capturing("cuStreamGetCaptureInfo", queue)?;
        let last = capture.last(queue).into_iter().map(GraphNode).collect();
        let (added, removed) = record.move_behind(last);
        let Some((Node::Record(_), after)) = capture.nodes.get_mut(record.node.0) else {
            return Err(refuse("cuGraphAddDependencies", "CUDA_ERROR_INVALID_VALUE"));
        };
        for GraphNode(node) in added {
            if after.contains(&node) {
                return Err(refuse("cuGraphAddDependencies", "CUDA_ERROR_INVALID_VALUE"));
            }
            after.push(node);
        }
        for GraphNode(node) in removed {
            let Some(at) = after.iter().position(|&before| before == node) else {
                return Err(refuse("cuGraphRemoveDependencies", "CUDA_ERROR_INVALID_VALUE"));
            };
            after.remove(at);
        }
        Ok(())
    }

    /// The capture that a queue is in, by its number.
    pub(super) fn capture_of(&self, queue: Queue) -> Option<u64> {
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
        let is_left =
            |(joined, (node, _)): (&bool, &(Node, Vec<usize>))| !joined && !matches!(node, Node::Record(_));
        if joined.iter().zip(&capture.nodes).any(is_left) {
            return refuse("CUDA_ERROR_STREAM_CAPTURE_UNJOINED");
        }
        Ok(Graph(capture.nodes))
    }

    pub(super) fn launch(&mut self, graph: &Graph, queue: Queue) {
        let begin = self.enqueue(queue, Task::Mark, Vec::new());
        let mut ids = vec![begin; graph.0.len()];
        // Of every launch they are others.
        let mut kernels: HashMap<*const Kernel, Arc<Kernel>> = HashMap::new();
        // What records comes last: what it waits for may have been captured after it.
        let is_record = |number: &usize| matches!(graph.0[*number].0, Node::Record(_));
        let (records, others): (Vec<usize>, Vec<usize>) = (0..graph.0.len()).partition(is_record);
        for number in others.into_iter().chain(records) {
            let (node, after) = &graph.0[number];
            let mut after: Vec<u64> = after.iter().map(|&node| ids[node]).collect();
            after.push(begin);
            let task = match node {
                Node::Task(task, _) => task.clone(),
                Node::Record(_) => Task::Mark,
                Node::Wait(event) => {
                    if let Some((_, Recorded::Task(task))) = self.events.get(event) {
                        after.push(*task);
                    }
                    Task::Mark
                }
            };
            let queue = Queue::Node(self.next_number());
            ids[number] = self.enqueue(queue, task, after);
            if let Node::Task(_, Some(captured)) = node {
                let kernel = kernels.entry(Arc::as_ptr(captured)).or_insert_with(|| captured.launched_anew());
                self.make_step(ids[number], kernel);
            }
            if let Node::Record(event) = node
                && let Some(state) = self.events.get_mut(event)
            {
                state.1 = Recorded::Task(ids[number]);
            }
        }
        self.enqueue(queue, Task::Mark, ids);
    }
}
