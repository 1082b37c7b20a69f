//! The parts of composed calls: what all kinds share. Each kind has a file below.

mod allgather;
mod broadcast;
mod reduce;
mod reduce_scatter;
mod reduction;

use std::collections::VecDeque;
use std::sync::Arc;

use self::allgather::Allgather;
use self::broadcast::Broadcast;
use self::reduce::Reduce;
use self::reduce_scatter::ReduceScatter;
use super::Composed;
use super::across::{ACTIVE, Part, Queue};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::Call;
use crate::communicator::context::Context;
use crate::communicator::plans::Seat;
use crate::communicator::staged::Launch;
use crate::cuda::courier::{Courier, Duty, Errand};
use crate::cuda::driver::{least_limit, retry};
use crate::cuda::exchange::{self, Direction, Point};
use crate::cuda::local::Kernels;
use crate::cuda::word::Word;
use crate::engine::device::{Layout, Series};
use crate::engine::endpoint::Through;
use crate::engine::executor::Run;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::Operation;
use crate::engine::staged::relay::{Gather, MAX_WIRED, MeetingPlace, Relay, RelayPlan};
use crate::engine::staged::{
    Blocks, Cut, Entry, Exchange, Job, LANES, Place, Provision, Shape, Side, Staged, StreamOrder,
};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// Parts of the workspace begin at multiples of so many bytes.
const ALIGNMENT: u64 = 256;

/// One composed call, being given to its stream.
pub(super) struct Parts<'a> {
    call: &'a Composed,
    layout: Layout,
    series: Series<'a>,
    turn: Turn,
    queue: Arc<Queue>,
    /// How many pieces the hosts exchange in their parts so far.
    pieces: u32,
    supplies: Supplies,
    /// Words that are released when the hosts' parts so far have ended, where no couriers carry them.
    exits: Vec<Arc<Word>>,
    /// The courier that the stream was given last.
    last: Option<Arc<Courier>>,
}

/// Some elements of a call.
#[derive(Clone, Copy)]
struct Chunk {
    /// The first, of the whole or of each rank's block.
    start: u64,
    /// How many.
    len: u64,
    /// Device memory to work in, until the chunk is done.
    workspace: u64,
}

/// The steps of a chunk that are the GPUs'.
trait Steps {
    /// Up to where the hosts exchange.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn before(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()>;

    /// What the hosts exchange, if this place has a part in that.
    fn across(&self, call: &Composed, chunk: Chunk) -> Option<Request>;

    /// From there on.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()>;
}

/// What the stream waits for while the hosts exchange.
enum Crossing {
    /// A courier between device and pinned memory, which is to be launched now.
    Courier(Launch),
    /// A word of the host, where side streams copy.
    Word(Arc<Word>),
}

/// What the hosts' parts of a call run in, taken before anything of it is on its stream: the driver may wait
/// for the device when it makes something, and for those that reach it, and a kernel of one rank waits for
/// what other ranks of the process are yet to launch.
pub(super) struct Supplies {
    /// What carries them; `None`: side streams do. The same for all parts: whoever moves them knows.
    copier: Option<Arc<dyn Kernels>>,
    /// Couriers of the next parts: all that the stream can be given before the first of them have left.
    errands: VecDeque<Errand>,
    /// Pinned memory of those that are under way first. Those behind are moved when these have ended, and
    /// find what they ran in.
    lanes: VecDeque<Provision>,
}

/// So many parts a stream can be given at most, as the driver has room for some thousand launches: each has
/// its courier and a kernel of the exchange.
const AHEAD: u64 = 512;

impl Supplies {
    pub(super) fn new(call: &Composed, course: &Course) -> Result<Supplies> {
        let exchange = call.hosts.exchange();
        let (devices, device) = (exchange.devices(), exchange.device());
        let copier = call.context.copier(devices, device, call.max_blocks);
        let (chunks, mut lanes) = (course.chunks(), VecDeque::new());
        for index in 0..chunks.min(ACTIVE as u64) {
            let Some(request) = course.steps.across(call, course.chunk(call, index)) else { continue };
            let Outline { sides, cut, element, plan, .. } = call.outline(&request, 0)?;
            // What is relayed has lanes of its own.
            let needs = plan.is_none_or(|plan| index == 0 && !plan.has_lanes());
            let most = if index == 0 { LANES } else { 1 };
            let order = (devices, device);
            lanes.push_back(Provision::take(order, &sides, (&cut, element), if needs { most } else { 0 })?);
        }
        let parts = if copier.is_some() && !lanes.is_empty() { chunks.min(AHEAD) } else { 0 };
        let errand = |_| Errand::new(devices, device, Duty::default());
        let errands = (0..parts).map(errand).collect::<Result<_>>()?;
        if copier.is_none() {
            // Side streams take them when the stream has come.
            lanes.clear();
        }
        Ok(Supplies { copier, errands, lanes })
    }

    /// What carries the parts, if it is not side streams.
    pub(super) fn copier(&self) -> Option<&Arc<dyn Kernels>> {
        self.copier.as_ref()
    }
}

/// What the hosts make of a chunk.
struct Outline {
    checked: Checked,
    seat: Seat,
    /// What it reads and writes,
    sides: [Side; 2],
    /// cut so,
    cut: Cut,
    /// with elements of so many bytes.
    element: usize,
    /// Whether this rank has its result.
    forwards: bool,
    /// How it is relayed, if it may be.
    plan: Option<RelayPlan>,
}

/// The chunks of a call, which are given to its stream in their order.
pub(super) struct Course {
    steps: Box<dyn Steps>,
    /// Elements of the call,
    count: u64,
    /// and of a chunk at most.
    most: u64,
    /// The chunk that comes next.
    next: u64,
    /// What the one before it waits for.
    crossing: Option<Crossing>,
}

impl Course {
    pub(super) fn new(call: &Composed) -> Course {
        let (checked, layout) = (&call.checked, call.hosts.layout());
        let count = checked.signature.count;
        let (steps, most): (Box<dyn Steps>, u64) = match (checked.signature.kind, checked.operator) {
            (Kind::ReduceScatter, Some(operator)) => {
                let steps = ReduceScatter::new(call, operator);
                let most = call.room(steps.row(layout), 1);
                (Box::new(steps), most)
            }
            (_, Some(operator)) => {
                let steps = Reduce::new(call, operator);
                // What a whole number of shards needs.
                let most = call.room(steps.row(layout), u64::from(layout.inside));
                (Box::new(steps), most)
            }
            (Kind::Broadcast, None) => (Box::new(Broadcast), count.max(1)),
            (_, None) => {
                let steps = Allgather::new(checked.dtype);
                let most = call.room(steps.row(layout), 1);
                (Box::new(steps), most)
            }
        };
        Course { steps, count, most, next: 0, crossing: None }
    }

    fn chunks(&self) -> u64 {
        self.count.div_ceil(self.most)
    }

    /// A chunk of the call.
    fn chunk(&self, call: &Composed, index: u64) -> Chunk {
        let (workspace, bytes) = call.hosts.workspace();
        let start = index * self.most;
        let workspace = workspace + index % 2 * (bytes as u64 / 2);
        Chunk { start, len: self.most.min(self.count - start), workspace }
    }

    /// Gives the next chunk up to where the hosts exchange, and the rest of the one before. Whether there is
    /// more to give.
    ///
    /// # Safety
    /// As [`Composed::start`].
    pub(super) unsafe fn go_on(&mut self, parts: &mut Parts<'_>) -> Result<bool> {
        let exchange = parts.call.hosts.exchange();
        let _entered = exchange.devices().enter(exchange.device())?;
        let (call, index, chunks) = (parts.call, self.next, self.chunks());
        // SAFETY: the caller's promise; the half of the workspace is the last chunk's but one, whose launches
        // come first.
        unsafe {
            let mut next = None;
            if index < chunks {
                let chunk = self.chunk(call, index);
                self.steps.before(parts, chunk)?;
                next = self.steps.across(call, chunk).map(|request| parts.across(request)).transpose()?;
            }
            let last = std::mem::replace(&mut self.crossing, next);
            if index > 0 {
                last.map_or(Ok(()), |last| parts.wait(last))?;
                self.steps.after(parts, self.chunk(call, index - 1))?;
            }
        }
        self.next += 1;
        Ok(index < chunks)
    }
}

impl<'a> Parts<'a> {
    pub(super) fn new(
        call: &'a Composed,
        series: Series<'a>,
        turn: Turn,
        queue: Arc<Queue>,
        supplies: Supplies,
    ) -> Parts<'a> {
        let layout = call.hosts.layout();
        Parts { call, layout, series, turn, queue, pieces: 0, supplies, exits: Vec::new(), last: None }
    }

    /// The courier that the stream was given last, of those of this call.
    pub(super) fn last_courier(&self) -> Option<&Arc<Courier>> {
        self.last.as_ref()
    }

    /// Whose they are.
    pub(super) fn call(&self) -> &'a Composed {
        self.call
    }

    /// The call's launches.
    pub(super) fn series(&self) -> &Series<'a> {
        &self.series
    }

    /// No more parts come: what is left is to end the launches.
    pub(super) fn close(self) -> Series<'a> {
        self.queue.close();
        self.series
    }

    /// Has this place's ranks make the call `request` among the hosts once the stream has come so far.
    ///
    /// # Safety
    /// As [`Composed::start`], for the request's memory.
    unsafe fn across(&mut self, request: Request) -> Result<Crossing> {
        let (group, stream) = (&self.call.group, self.series.stream());
        let (devices, device) = (stream.devices(), stream.device());
        let Outline { checked, seat, sides: [input, output], cut, element, forwards, plan } =
            self.call.outline(&request, self.pieces)?;
        let (mut errand, mut exit) = (None, None);
        let (entry, crossing) = match self.supplies.copier.clone() {
            Some(kernels) => {
                let bytes = checked.input_len().max(checked.output_len()) * element;
                let combiner = plan.as_ref().and_then(RelayPlan::combiner);
                let max_blocks = least_limit([self.call.max_blocks, self.call.context.max_blocks()]);
                let duty = Duty { bytes, networked: plan.is_some(), combiner, max_blocks };
                let kept = self.supplies.errands.pop_front().map(|errand| errand.with(duty));
                let courier = errand.insert(kept.map_or_else(|| Errand::new(devices, device, duty), Ok)?);
                let entry = Entry::of_courier(courier.courier(), group.endpoint());
                (entry, Crossing::Courier(Launch::new(courier.courier().clone(), kernels)))
            }
            None => {
                let word = exit.insert(Arc::new(devices.word(device)?)).clone();
                (Entry::of_caller(stream, group.endpoint())?, Crossing::Word(word))
            }
        };
        let asking = errand.is_none().then(|| devices.note_asking());
        // The ranks meet by one more message.
        let greeting = u32::from(plan.is_some());
        let job = Job {
            order: StreamOrder {
                devices: devices.clone(),
                device,
                entry,
                errand,
                exit,
                copier: None,
                asking,
            },
            input,
            output,
            forwards,
            combined: None,
            unstaged: false,
            element,
            cut,
            abreast: 1,
            exchange: self.exchange_pieces(
                request,
                seat,
                checked.signature.count,
                self.pieces.wrapping_add(greeting),
            ),
        };
        self.pieces = self.pieces.wrapping_add(cut.pieces() + greeting);
        // SAFETY: the caller's promise.
        let part = unsafe { Staged::new(job) };
        let part = match self.supplies.lanes.pop_front() {
            Some(lanes) => part.with(lanes),
            None => part,
        };
        let part = match plan {
            Some(plan) => Part::Relayed(Box::new(Relay::new(part, plan, false, &|| true)?.at(&self.turn))),
            None => Part::Staged(Box::new(part.at(&self.turn))),
        };
        self.queue.push(group, part);
        if let Crossing::Word(exit) = &crossing {
            self.exits.push(exit.clone());
        }
        Ok(crossing)
    }

    /// The call has failed in its course: what the stream is given next comes behind all that the hosts have
    /// begun, as behind the kernels, though nothing waits for that yet.
    pub(super) fn leave(&self) {
        let stream = self.series.stream();
        if let Ok(false) = stream.devices().driver().can_wait_value(stream.device()) {
            // Whoever waits for the call does.
            return;
        }
        for exit in self.exits.iter().filter(|exit| !exit.is_released()) {
            if let Err(error) = retry(|| stream.wait_word(exit)) {
                return self.series.lose(&error);
            }
        }
    }

    /// Exchanges pieces by messages between the ranks of `seat`, numbered on from those of the parts before.
    fn exchange_pieces(&self, request: Request, seat: Seat, count: u64, before: u32) -> Exchange {
        let context = self.call.context.clone();
        Box::new(move |group, turn, piece, input, output| {
            let counts = Counts::Uniform(if piece.whole { count } else { piece.len });
            let request = Request { input, output, counts, ..request.clone() };
            let turn = turn.at_piece(before.wrapping_add(turn.piece));
            by_messages(&context, group, &turn, request, seat)
        })
    }

    /// Moves bytes between the GPUs of this host.
    ///
    /// # Safety
    /// As [`Composed::start`], for the points' memory.
    unsafe fn transfer(&self, mut points: Vec<Point>) -> Result<()> {
        points.retain(|point| point.bytes > 0);
        // SAFETY: the caller's promise.
        unsafe { self.series.enqueue_points(&points, self.call.max_blocks) }
    }

    /// What comes next in the stream waits for a part of the hosts.
    ///
    /// # Safety
    /// As [`Composed::start`], for the part's memory.
    unsafe fn wait(&mut self, crossing: Crossing) -> Result<()> {
        let stream = self.series.stream();
        let exit = match crossing {
            Crossing::Courier(launch) => {
                self.last = Some(launch.courier().clone());
                // SAFETY: the caller's promise.
                return unsafe { launch.give(stream) };
            }
            Crossing::Word(exit) => exit,
        };
        if exit.is_released() {
            return Ok(());
        }
        if stream.devices().driver().can_wait_value(stream.device())? {
            return stream.wait_word(&exit);
        }
        let is_released = || exit.is_released().then_some(());
        // Whoever moves the part releases it in any case, at its own deadline at last.
        match self.call.group.endpoint().wait(self.call.late(&self.turn), Through::Device, is_released) {
            Some(()) => Ok(()),
            None => fail!(
                Timeout,
                "GPU {} has not stored what came from other hosts",
                self.series.stream().device()
            ),
        }
    }

    fn job(
        &self,
        kind: Kind,
        input: u64,
        output: u64,
        count: u64,
        dtype: DataType,
        operator: Operator,
    ) -> exchange::Job {
        exchange::Job {
            kind,
            input,
            output,
            count,
            dtype,
            operator,
            root: 0,
            max_blocks: self.call.max_blocks,
        }
    }
}

impl Composed {
    /// The elements that a chunk may have of which `grain` need `row` bytes.
    fn room(&self, row: u64, grain: u64) -> u64 {
        let bytes = self.hosts.workspace().1 as u64 / 2 - 3 * ALIGNMENT;
        (bytes / row * grain).max(grain)
    }

    fn request(
        &self,
        kind: Kind,
        input: u64,
        output: u64,
        count: u64,
        dtype: DataType,
        operator: Operator,
    ) -> Request {
        Request {
            kind,
            input: std::ptr::without_provenance(input as usize),
            output: std::ptr::without_provenance_mut(output as usize),
            counts: Counts::Uniform(count),
            dtype,
            operator,
            root: 0,
        }
    }

    /// The call `request` of this place's ranks, behind so many pieces of other parts.
    fn outline(&self, request: &Request, pieces: u32) -> Result<Outline> {
        let layout = self.hosts.layout();
        let Layout { hosts, inside, .. } = layout;
        let checked = Checked::new(request, layout.host(), hosts)?;
        let (reads, writes) = match request.kind {
            Kind::ReduceScatter => (hosts as usize, 1),
            Kind::Allgather => (1, hosts as usize),
            _ => (1, 1),
        };
        let element = request.dtype.size();
        // The root of a broadcast has its result.
        let forwards = request.kind == Kind::Broadcast && checked.input_len() > 0;
        let written = if forwards { 0 } else { checked.output_len() };
        let side = |address: usize, len: usize, blocks| Side {
            place: Place::Device(address as u64),
            shape: Shape { bytes: len * element, blocks: Blocks::Even(blocks) },
        };
        let sides = [
            side(checked.input.addr(), checked.input_len(), reads),
            side(checked.output.addr(), written, writes),
        ];
        let blocks = reads.max(writes) as u64;
        let cut = Cut::even(checked.signature.count, blocks, element, self.context.cuda().piece_bytes());
        let seat = Seat { numbering: (layout.place(), inside), ..Seat::new(layout.host(), hosts, 1) };
        let plan = self.plan_relay(&checked, seat, pieces);
        Ok(Outline { checked, seat, sides, cut, element, forwards, plan })
    }

    /// How this place's ranks relay a call, if it is one that may be: the same answer on all of them.
    fn plan_relay(&self, checked: &Checked, seat: Seat, pieces: u32) -> Option<RelayPlan> {
        if seat.size > MAX_WIRED {
            return None;
        }
        let place = || Some(MeetingPlace::Messages(self.gather_words(seat, pieces)));
        let Composed { context, group, hosts, .. } = self;
        let (count, max_blocks) = (checked.signature.count, self.max_blocks);
        context.plan_among(group, hosts.relay(), place, checked, (count, max_blocks), context.cuda().limits())
    }

    /// Gathers a few bytes of each of this place's ranks, ahead of the pieces of the next part.
    fn gather_words(&self, seat: Seat, piece: u32) -> Gather {
        let context = self.context.clone();
        Arc::new(move |group, turn, input, output, bytes| {
            let request = Request::gathering(input, output, bytes);
            by_messages(&context, group, &turn.at_piece(piece), request, seat)
        })
    }
}

/// The call `request` by messages between the ranks of `seat`.
fn by_messages(
    context: &Context,
    group: &Group,
    turn: &Turn,
    request: Request,
    seat: Seat,
) -> Result<Box<dyn Operation>> {
    let mut checked = Checked::new(&request, seat.rank, seat.size)?;
    let (plan, _) = context.plans_across().plan(&mut checked, &Call::default(), seat)?;
    // SAFETY: the engine gives memory of the request's size, and keeps it until the operation has ended.
    Ok(Box::new(unsafe { Run::new(group, turn, plan, checked.input, checked.output) }))
}

fn send(peer: u32, (address, bytes): (u64, u64)) -> Point {
    Point { direction: Direction::Send, peer, address, bytes }
}

fn receive(peer: u32, (address, bytes): (u64, u64)) -> Point {
    Point { direction: Direction::Receive, peer, address, bytes }
}
