//! The parts of composed calls, kind by kind.

use std::sync::Arc;

use super::across::Queue;
use super::{Composed, between};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::Call;
use crate::communicator::plans::Seat;
use crate::cuda::exchange::{self, Direction, Point};
use crate::cuda::local::{Fold, Operand};
use crate::cuda::word::Word;
use crate::engine::device::{Berth, Layout, Series};
use crate::engine::endpoint::Through;
use crate::engine::executor::Run;
use crate::engine::group::Turn;
use crate::engine::staged::{Blocks, Cut, Entry, Exchange, Job, Place, Shape, Side, Staged, StreamOrder};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Representation};

/// Parts of the workspace begin at multiples of so many bytes.
const ALIGNMENT: u64 = 256;

/// Shards of a broadcast have at least so many bytes: fewer are not worth a message each.
const SHARD_BYTES: u64 = 16 << 10;

/// One composed call, being given to its stream.
pub(super) struct Parts<'a> {
    call: &'a Composed,
    layout: Layout,
    series: &'a Series<'a>,
    turn: Turn,
    queue: &'a Queue,
    /// How many pieces the hosts exchange in the parts so far.
    pieces: u32,
    /// Where the next part crosses, if it is not from and to device memory.
    berth: Option<Berth>,
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
    /// Up to where the hosts exchange; the stream then waits for the word.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn before(&self, parts: &mut Parts<'_>, chunk: Chunk) -> Result<Arc<Word>>;

    /// From there on.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()>;
}

impl<'a> Parts<'a> {
    pub(super) fn new(call: &'a Composed, series: &'a Series<'a>, turn: Turn, queue: &'a Queue) -> Parts<'a> {
        Parts { call, layout: call.hosts.layout(), series, turn, queue, pieces: 0, berth: None }
    }

    /// Gives all parts to the stream.
    ///
    /// # Safety
    /// As [`Composed::start`].
    pub(super) unsafe fn give(&mut self) -> Result<()> {
        let stream = self.series.stream();
        let _entered = stream.devices().enter(stream.device())?;
        let checked = &self.call.checked;
        let (kind, count) = (checked.signature.kind, checked.signature.count);
        // SAFETY: the caller's promise.
        unsafe {
            match (kind, checked.operator) {
                (Kind::ReduceScatter, Some(operator)) => {
                    let reduction = Reduction::new(checked, operator, self.layout.size());
                    let mut steps = ReduceScatter { reduction, packs: false };
                    if !steps.holds(self, count) {
                        steps.packs = true;
                    }
                    self.give_chunks(count, steps.row(self.layout), 1, &steps)
                }
                (_, Some(operator)) => {
                    let reduction = Reduction::new(checked, operator, self.layout.size());
                    let steps = Reduce { kind, reduction, root: checked.signature.root };
                    let grain = u64::from(self.layout.inside);
                    // What a whole number of shards needs.
                    self.give_chunks(count, steps.row(self.layout), grain, &steps)
                }
                (Kind::Broadcast, None) => self.broadcast(count, checked.signature.root),
                (_, None) => {
                    let row = u64::from(self.layout.hosts) * checked.dtype.size() as u64;
                    self.give_chunks(count, row, 1, &Allgather { element: checked.dtype.size() as u64 })
                }
            }
        }
    }

    /// The elements that a chunk may have of which `grain` need `row` bytes.
    fn room(&self, row: u64, grain: u64) -> u64 {
        let bytes = self.call.hosts.workspace().1 as u64 / 2 - 3 * ALIGNMENT;
        (bytes / row * grain).max(grain)
    }

    /// Gives the chunks of `count` elements, of which `grain` need `row` bytes.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn give_chunks(&mut self, count: u64, row: u64, grain: u64, steps: &dyn Steps) -> Result<()> {
        let (workspace, bytes) = self.call.hosts.workspace();
        let most = self.room(row, grain);
        let chunk = |index: u64| {
            let start = index * most;
            let workspace = workspace + index % 2 * (bytes as u64 / 2);
            Chunk { start, len: most.min(count - start), workspace }
        };
        let chunks = count.div_ceil(most);
        let mut exit = None;
        for index in 0..=chunks {
            // SAFETY: the caller's promise; the half of the workspace is the last chunk's but one, whose launches come first.
            unsafe {
                let next = match index < chunks {
                    true => Some(steps.before(self, chunk(index))?),
                    false => None,
                };
                if let Some(last) = std::mem::replace(&mut exit, next) {
                    self.wait(&last)?;
                    steps.after(self, chunk(index - 1))?;
                }
            }
        }
        Ok(())
    }

    /// The root's host has all of it by kernels; each place passes its shard on to the other hosts, where the shards are
    /// gathered. Between outputs: there is nothing to work in. A short one crosses by a berth.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn broadcast(&mut self, count: u64, root: u32) -> Result<()> {
        let checked = &self.call.checked;
        let (dtype, element) = (checked.dtype, checked.dtype.size() as u64);
        let (input, output) = (checked.input.addr() as u64, checked.output.addr() as u64);
        let Layout { inside, .. } = self.layout;
        let shard = count.div_ceil(u64::from(inside)).max(SHARD_BYTES / element);
        let shard = |place: u32| {
            let start = (u64::from(place) * shard).min(count);
            (start, shard.min(count - start))
        };
        let (start, len) = shard(self.layout.place());
        let here = self.layout.is_here(root);
        let from = if self.layout.rank() == root { input } else { output };
        // SAFETY: the caller's promise.
        unsafe {
            if here {
                let job = self.job(Kind::Broadcast, input, output, count, dtype, Operator::Sum);
                self.series.enqueue(&exchange::Job { root: root % inside, ..job })?;
            }
            let mut at = from + start * element;
            if len > 0 {
                self.berth = self.call.hosts.berth(len * element)?;
                if let Some(berth) = &self.berth {
                    if here {
                        let place = self.layout.place();
                        let (from, to) = ((at, len * element), (berth.address, len * element));
                        self.transfer(vec![send(place, from), receive(place, to)])?;
                    }
                    at = berth.address;
                }
                let request = self.request(Kind::Broadcast, at, at, len, dtype, Operator::Sum);
                let exit = self.across(Request { root: root / inside, ..request })?;
                self.wait(&exit)?;
            }
            if !here {
                let mut points = Vec::new();
                for peer in 0..inside {
                    let (start, shard) = shard(peer);
                    points.push(send(peer, (at, len * element)));
                    points.push(receive(peer, (output + start * element, shard * element)));
                }
                self.transfer(points)?;
            }
        }
        let berth = self.berth.take();
        berth.map_or(Ok(()), |berth| self.series.stream().release_word(&berth.left))
    }

    /// Has this place's ranks make the call `request` among the hosts once the stream has come so far. The stream is to
    /// wait for the word.
    ///
    /// # Safety
    /// As [`Composed::start`], for the request's memory.
    unsafe fn across(&mut self, request: Request) -> Result<Arc<Word>> {
        let (group, stream) = (&self.call.group, self.series.stream());
        let (devices, device) = (stream.devices(), stream.device());
        let Layout { hosts, inside, .. } = self.layout;
        let checked = Checked::new(&request, self.layout.host(), hosts)?;
        let (reads, writes) = match request.kind {
            Kind::ReduceScatter => (hosts as usize, 1),
            Kind::Allgather => (1, hosts as usize),
            _ => (1, 1),
        };
        let (element, count) = (request.dtype.size(), checked.signature.count);
        // The root of a broadcast has its result.
        let forwards = request.kind == Kind::Broadcast && checked.input_len() > 0;
        let written = if forwards { 0 } else { checked.output_len() * element };
        let seat =
            Seat { numbering: (self.layout.place(), inside), ..Seat::new(self.layout.host(), hosts, 1) };
        let exit = Arc::new(devices.word(device)?);
        let (entry, copier, cut) = match &self.berth {
            Some(berth) => (self.enter_berth(berth, checked.input_len() > 0)?, None, Cut::whole()),
            None => {
                let copier = self.call.context.copier(devices, device);
                let blocks = reads.max(writes) as u64;
                let cut = Cut::even(count, blocks, element, self.call.context.cuda().piece_bytes());
                (Entry::of_caller(stream, group.endpoint())?, copier, cut)
            }
        };
        let side = |address: usize, bytes, blocks| Side {
            place: match self.berth {
                Some(_) => Place::Host(std::ptr::with_exposed_provenance_mut(address)),
                None => Place::Device(address as u64),
            },
            shape: Shape { bytes, blocks: Blocks::Even(blocks) },
        };
        let job = Job {
            order: StreamOrder { devices: devices.clone(), device, entry, exit: Some(exit.clone()), copier },
            input: side(checked.input.addr(), checked.input_len() * element, reads),
            output: side(checked.output.addr(), written, writes),
            forwards,
            unstaged: self.berth.is_some(),
            element,
            cut,
            exchange: self.exchange_pieces(request, seat, count),
        };
        self.pieces = self.pieces.wrapping_add(cut.pieces());
        // SAFETY: the caller's promise.
        self.queue.push(group, unsafe { Staged::new(&self.turn, job) });
        Ok(exit)
    }

    /// When the host may use the berth: if it sends, when the kernels so far have written; else as soon as those of the call that
    /// had it before have read.
    fn enter_berth(&self, berth: &Berth, sends: bool) -> Result<Entry> {
        let (stream, endpoint) = (self.series.stream(), self.call.group.endpoint());
        if !sends {
            return Ok(Entry::of_word(berth.before.clone(), endpoint));
        }
        let written = Arc::new(stream.devices().word(stream.device())?);
        stream.release_word(&written)?;
        Ok(Entry::of_word(Some(written), endpoint))
    }

    /// Exchanges pieces by messages between the ranks of `seat`, numbered on from those of the parts before.
    fn exchange_pieces(&self, request: Request, seat: Seat, count: u64) -> Exchange {
        let (context, before) = (self.call.context.clone(), self.pieces);
        Box::new(move |group, turn, piece, input, output| {
            let counts = Counts::Uniform(if piece.whole { count } else { piece.len });
            let request = Request { input, output, counts, ..request.clone() };
            let mut checked = Checked::new(&request, seat.rank, seat.size)?;
            let (plan, _) = context.plans_across().plan(&mut checked, &Call::default(), seat)?;
            let turn = turn.at_piece(before.wrapping_add(turn.piece));
            // SAFETY: the engine gives memory of the piece's size, and keeps it until the operation has ended.
            Ok(Box::new(unsafe { Run::new(group, &turn, plan, checked.input, checked.output) }))
        })
    }

    /// Moves bytes between the GPUs of this host.
    ///
    /// # Safety
    /// As [`Composed::start`], for the points' memory.
    unsafe fn transfer(&self, mut points: Vec<Point>) -> Result<()> {
        points.retain(|point| point.bytes > 0);
        // SAFETY: the caller's promise.
        unsafe { self.series.enqueue_points(&points) }
    }

    /// What comes next waits for a part of the hosts: its stream does, or this thread.
    fn wait(&self, exit: &Word) -> Result<()> {
        if exit.is_released() {
            return Ok(());
        }
        if !self.call.thread_waits {
            return self.series.stream().wait_word(exit);
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
        exchange::Job { kind, input, output, count, dtype, operator, root: 0, max_blocks: 0 }
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
}

fn send(peer: u32, (address, bytes): (u64, u64)) -> Point {
    Point { direction: Direction::Send, peer, address, bytes }
}

fn receive(peer: u32, (address, bytes): (u64, u64)) -> Point {
    Point { direction: Direction::Receive, peer, address, bytes }
}

/// How a reduction's elements become accumulators, and these elements again.
struct Reduction {
    dtype: DataType,
    operator: Operator,
    ranks: u32,
    /// Bytes of an element.
    element: u64,
    /// Bytes of an accumulator.
    accumulator: u64,
    /// Whether inputs are not the accumulators that they count as.
    widens: bool,
    /// Whether something is left to do with what all ranks made.
    finishes: bool,
}

impl Reduction {
    fn new(checked: &Checked, operator: Operator, ranks: u32) -> Reduction {
        let (dtype, accumulator) = (checked.dtype, checked.dtype.accumulator());
        let short = accumulator != dtype;
        Reduction {
            dtype,
            operator,
            ranks,
            element: dtype.size() as u64,
            accumulator: accumulator.size() as u64,
            widens: short || matches!(operator, Operator::PreMulSum(_)),
            finishes: short || operator == Operator::Average,
        }
    }

    /// A collective of accumulators.
    fn job(&self, parts: &Parts<'_>, kind: Kind, input: u64, output: u64, count: u64) -> exchange::Job {
        parts.job(kind, input, output, count, self.dtype.accumulator(), between(self.operator))
    }

    fn request(&self, parts: &Parts<'_>, kind: Kind, input: u64, output: u64, count: u64) -> Request {
        parts.request(kind, input, output, count, self.dtype.accumulator(), between(self.operator))
    }

    /// Makes accumulators of elements.
    ///
    /// # Safety
    /// The device has both.
    unsafe fn widen(&self, parts: &Parts<'_>, from: u64, to: u64, count: u64) -> Result<()> {
        let scale = if let Operator::PreMulSum(scale) = self.operator { scale } else { 1.0 };
        let operand = Operand { address: from, representation: Representation::Element, scale };
        // SAFETY: the caller's promise.
        unsafe { self.fold(parts, operand, to, Representation::Accumulator, count) }
    }

    /// Makes elements of accumulators: the operator's last step.
    ///
    /// # Safety
    /// The device has both.
    unsafe fn finish(&self, parts: &Parts<'_>, from: u64, to: u64, count: u64) -> Result<()> {
        let operand = Operand { address: from, representation: Representation::Accumulator, scale: 1.0 };
        // SAFETY: the caller's promise.
        unsafe { self.fold(parts, operand, to, Representation::Element, count) }
    }

    unsafe fn fold(
        &self,
        parts: &Parts<'_>,
        operand: Operand,
        out: u64,
        representation: Representation,
        count: u64,
    ) -> Result<()> {
        let stream = parts.series.stream();
        let fold = Fold {
            stream,
            dtype: self.dtype,
            operator: self.operator,
            ranks: self.ranks,
            operands: &[operand],
            out,
            representation,
            // It fits the workspace.
            count: count as usize,
        };
        // SAFETY: the caller's promise.
        unsafe { parts.call.hosts.folds().fold(stream.devices(), &fold) }
    }
}

/// Allreduce and reduce.
///
/// A chunk is one *shard* for each place, and the *rest*, less than a rank's worth of elements each, which every place deals
/// with. Its workspace holds the inputs as accumulators, if they are not, and behind them the shard and the rest.
struct Reduce {
    kind: Kind,
    reduction: Reduction,
    root: u32,
}

impl Reduce {
    /// Bytes for one element of each shard.
    fn row(&self, layout: Layout) -> u64 {
        let Reduction { accumulator, widens, .. } = self.reduction;
        let widened = if widens { u64::from(layout.inside) * accumulator } else { 0 };
        widened + accumulator
    }

    /// Elements of a shard and of the rest.
    fn shares(&self, layout: Layout, len: u64) -> (u64, u64) {
        let inside = u64::from(layout.inside);
        (len / inside, len % inside)
    }

    /// Where the shard lies.
    fn shard(&self, chunk: Chunk) -> u64 {
        let widened = if self.reduction.widens { chunk.len * self.reduction.accumulator } else { 0 };
        (chunk.workspace + widened).next_multiple_of(ALIGNMENT)
    }
}

impl Steps for Reduce {
    unsafe fn before(&self, parts: &mut Parts<'_>, chunk: Chunk) -> Result<Arc<Word>> {
        let Reduction { element, accumulator, widens, .. } = self.reduction;
        let layout = parts.layout;
        let input = parts.call.checked.input.addr() as u64 + chunk.start * element;
        let (shard, rest) = self.shares(layout, chunk.len);
        let (from, into) = (if widens { chunk.workspace } else { input }, self.shard(chunk));
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if widens {
                self.reduction.widen(parts, input, from, chunk.len)?;
            }
            if shard > 0 {
                parts.series.enqueue(&self.reduction.job(parts, Kind::ReduceScatter, from, into, shard))?;
            }
            if rest > 0 {
                let from = from + (chunk.len - rest) * accumulator;
                let into = into + shard * accumulator;
                parts.series.enqueue(&self.reduction.job(parts, Kind::Allreduce, from, into, rest))?;
            }
            let request = self.reduction.request(parts, self.kind, into, into, shard + rest);
            parts.across(Request { root: self.root / layout.inside, ..request })
        }
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, finishes, .. } = self.reduction;
        let layout = parts.layout;
        let to_all = self.kind == Kind::Allreduce;
        if !to_all && !layout.is_here(self.root) {
            return Ok(());
        }
        let (shard, rest) = self.shares(layout, chunk.len);
        let made = self.shard(chunk);
        // Rounded over the inputs, or in place.
        let from = if finishes && element != accumulator { chunk.workspace } else { made };
        let output = parts.call.checked.output.addr() as u64 + chunk.start * element;
        let takes = |place: u32| to_all || self.root % layout.inside == place;
        let mut points = Vec::new();
        for peer in 0..layout.inside {
            if takes(peer) {
                points.push(send(peer, (from, shard * element)));
            }
            if takes(layout.place()) {
                let at = output + u64::from(peer) * shard * element;
                points.push(receive(peer, (at, shard * element)));
            }
        }
        if takes(layout.place()) && rest > 0 {
            points.push(send(layout.place(), (from + shard * element, rest * element)));
            points.push(receive(layout.place(), (output + (chunk.len - rest) * element, rest * element)));
        }
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if finishes {
                self.reduction.finish(parts, made, from, shard + rest)?;
            }
            parts.transfer(points)
        }
    }
}

/// Reduce-scatter. A chunk is the same elements of every rank's block. Its workspace holds the inputs, if they are
/// widened or do not lie together, then what this host makes for the ranks of this place, then the result as an
/// accumulator.
struct ReduceScatter {
    reduction: Reduction,
    /// Whether the inputs of a chunk do not lie together.
    packs: bool,
}

impl ReduceScatter {
    fn gathers(&self) -> bool {
        self.packs || self.reduction.widens
    }

    /// Bytes for one element of every block.
    fn row(&self, layout: Layout) -> u64 {
        let gathered = if self.gathers() { layout.size() } else { 0 };
        u64::from(gathered + layout.hosts + 1) * self.reduction.accumulator
    }

    /// Whether `count` elements of each block are one chunk.
    fn holds(&self, parts: &Parts<'_>, count: u64) -> bool {
        count <= parts.room(self.row(parts.layout), 1)
    }

    /// Where lies what this host makes, and where the result.
    fn places(&self, layout: Layout, chunk: Chunk) -> (u64, u64) {
        let accumulator = self.reduction.accumulator;
        let gathered = if self.gathers() { u64::from(layout.size()) * chunk.len * accumulator } else { 0 };
        let made = (chunk.workspace + gathered).next_multiple_of(ALIGNMENT);
        let result = made + u64::from(layout.hosts) * chunk.len * accumulator;
        (made, result.next_multiple_of(ALIGNMENT))
    }

    /// Where the chunk's result goes.
    fn output(&self, parts: &Parts<'_>, chunk: Chunk) -> u64 {
        parts.call.checked.output.addr() as u64 + chunk.start * self.reduction.element
    }
}

impl Steps for ReduceScatter {
    unsafe fn before(&self, parts: &mut Parts<'_>, chunk: Chunk) -> Result<Arc<Word>> {
        let Reduction { element, accumulator, widens, finishes, .. } = self.reduction;
        let (layout, stream, checked) = (parts.layout, parts.series.stream(), &parts.call.checked);
        let (input, count) = (checked.input.addr() as u64, checked.signature.count);
        let (made, result) = self.places(layout, chunk);
        let whole = chunk.len == count;
        let from = if self.gathers() { chunk.workspace } else { input };
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if widens && whole {
                self.reduction.widen(parts, input, from, u64::from(layout.size()) * count)?;
            } else if self.gathers() {
                for rank in 0..u64::from(layout.size()) {
                    let at = input + (rank * count + chunk.start) * element;
                    let to = from + rank * chunk.len * accumulator;
                    if widens {
                        self.reduction.widen(parts, at, to, chunk.len)?;
                    } else {
                        // It fits the workspace.
                        stream.copy_to_peer(to, stream.device(), at, (chunk.len * element) as usize)?;
                    }
                }
            }
            let block = chunk.len * accumulator;
            for host in 0..u64::from(layout.hosts) {
                let from = from + host * u64::from(layout.inside) * block;
                let into = made + host * block;
                let job = self.reduction.job(parts, Kind::ReduceScatter, from, into, chunk.len);
                parts.series.enqueue(&job)?;
            }
            let into = if finishes { result } else { self.output(parts, chunk) };
            let request = self.reduction.request(parts, Kind::ReduceScatter, made, into, chunk.len);
            parts.across(request)
        }
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, finishes, .. } = self.reduction;
        if !finishes {
            return Ok(());
        }
        let (made, result) = self.places(parts.layout, chunk);
        let rounded = if element == accumulator { result } else { made };
        let (place, bytes) = (parts.layout.place(), chunk.len * element);
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            self.reduction.finish(parts, result, rounded, chunk.len)?;
            // By the kernels that do nothing once the group has failed.
            let output = self.output(parts, chunk);
            parts.transfer(vec![send(place, (rounded, bytes)), receive(place, (output, bytes))])
        }
    }
}

/// Allgather. A chunk is the same elements of every rank's block; its workspace holds those of this place's ranks.
struct Allgather {
    /// Bytes.
    element: u64,
}

impl Steps for Allgather {
    unsafe fn before(&self, parts: &mut Parts<'_>, chunk: Chunk) -> Result<Arc<Word>> {
        let checked = &parts.call.checked;
        let input = checked.input.addr() as u64 + chunk.start * self.element;
        let dtype = checked.dtype;
        let request = parts.request(Kind::Allgather, input, chunk.workspace, chunk.len, dtype, Operator::Sum);
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe { parts.across(request) }
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let checked = &parts.call.checked;
        let (output, count) = (checked.output.addr() as u64, checked.signature.count);
        let Layout { inside, hosts, .. } = parts.layout;
        let bytes = chunk.len * self.element;
        let mut points = Vec::new();
        for (host, peer) in (0..hosts).flat_map(|host| (0..inside).map(move |peer| (host, peer))) {
            let rank = u64::from(host * inside + peer);
            points.push(send(peer, (chunk.workspace + u64::from(host) * bytes, bytes)));
            points.push(receive(peer, (output + (rank * count + chunk.start) * self.element, bytes)));
        }
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe { parts.transfer(points) }
    }
}
