//! The exchange between GPUs that reach each other's memory: the kernels' parameters, their choice, and their
//! launch.
//!
//! A rank's *arena* is a region of its own GPU that all ranks of the group have mapped: see
//! [`arena::Layout`]. A call is one kernel on the caller's stream on every rank; the kernels find each other
//! through the arenas and nothing else, so a call costs the host one launch, and a captured launch may be
//! replayed between others. What runs is decided by [`table::Table`] from what all ranks agree on.
//!
//! `kernels/exchange.cu` holds the kernels, and says how they work.

mod arena;
mod arguments;
mod fault;
mod functions;
mod plan;
mod points;
mod several;
mod signals;
mod stages;
mod swap;
mod table;
#[cfg(test)]
pub(super) mod tests;
mod tuning;
mod windowed;

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use self::arguments::{Call, Group};
use self::functions::Functions;
use self::plan::{Combination, Plan, Protocol};
use self::several::{Arguments, Bundler, Launch, have_one_shape};
use super::context::Devices;
use super::driver::{FunctionHandle, Grid};
use super::kernels;
use super::stream::Stream;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

pub use arena::MAX_RANKS;
pub use fault::{Fault, FaultRecord};
#[cfg(test)]
pub(in crate::cuda) use functions::{IMAGE, STAGES, WINDOWED};
use points::Blocks;
pub use points::{Direction, Point, check as check_points};
pub use signals::Counts;
pub use stages::{Overlap, Pull, Stages};
pub use table::{Bounds, DealtBounds, Table, Tuning, UNBOUNDED, WindowBounds};
pub use tuning::Chosen;
pub use windowed::{Seen, Shared};

/// A collective call as this rank makes it. All ranks agree on everything but the addresses and a
/// pre-multiplied sum's scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// Which operation; see [`Exchange::serves`].
    pub kind: Kind,
    /// The input's first byte. Not looked at where this rank gives nothing (broadcast and scatter off the
    /// root).
    pub input: u64,
    /// The output's first byte. Not looked at where this rank takes nothing (reduce and gather off the root).
    /// The input itself, or where the operation's result for this rank lies in it; no other overlap.
    pub output: u64,
    /// Elements: of the whole for allreduce, reduce and broadcast; of one rank's part for the others.
    pub count: u64,
    /// The element type; both addresses are multiples of its size.
    pub dtype: DataType,
    /// What combines; looked at by reductions only.
    pub operator: Operator,
    /// The root, for the kinds that have one.
    pub root: u32,
    /// The most blocks that the kernel may have; 0 for as many as suit it.
    pub max_blocks: u32,
}

impl Job {
    /// The scalar of a pre-multiplied sum, as an accumulator in the low bytes.
    fn scale(&self) -> Option<u64> {
        match self.operator {
            Operator::PreMulSum(scale) if self.kind.reduces() => Some(kernels::scalar(self.dtype, scale)),
            _ => None,
        }
    }

    /// Bytes of `count` elements, if any memory has so many.
    fn bytes(&self) -> Option<u64> {
        self.count.checked_mul(self.dtype.size() as u64)
    }

    /// What an average of `size` ranks divides by; 0 where nothing is divided.
    fn divisor(&self, size: u32) -> u32 {
        if self.kind.reduces() && self.operator == Operator::Average { size } else { 0 }
    }
}

/// One rank's end of the exchange of one group. Calls of one exchange run one after the other: they are
/// enqueued on one stream, or their streams wait for each other.
#[derive(Debug)]
pub struct Exchange {
    devices: Arc<Devices>,
    device: u32,
    functions: Arc<Functions>,
    table: Table,
    group: Group,
    fault: Arc<Fault>,
}

impl Exchange {
    /// The end of `rank` on `device`, by a table of choices that is the same on every rank. `arenas[r]` is
    /// rank r's arena, as this device addresses it: [`Table::arena_bytes`] each, 256-byte aligned, zeroed by
    /// its owner before anybody's first call. Loads every kernel that it will ever launch, which can wait for
    /// the device: not while kernels of the process wait for each other.
    ///
    /// # Safety
    /// The arenas stay mapped until the last call of this exchange has left its stream.
    pub unsafe fn new(
        devices: &Arc<Devices>,
        device: u32,
        rank: u32,
        arenas: &[u64],
        fault: Arc<Fault>,
        table: Table,
    ) -> Result<Exchange> {
        if !(2..=MAX_RANKS).contains(&arenas.len()) || rank as usize >= arenas.len() {
            fail!(
                InvalidArgument,
                "rank {rank} of {} arenas; an exchange has 2 to {MAX_RANKS} ranks, each with one",
                arenas.len()
            );
        }
        let functions = Functions::of(devices, device)?;
        let group = Group::new(rank, arenas, fault.device_address(), &table);
        Ok(Exchange { devices: devices.clone(), device, functions, table, group, fault })
    }

    /// Whether a call can run here: the same answer on every rank.
    pub fn serves(&self, kind: Kind, dtype: DataType, operator: &Operator) -> bool {
        match kind {
            Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter => Functions::combines(dtype, operator),
            Kind::Broadcast | Kind::Allgather | Kind::Gather | Kind::Scatter | Kind::Alltoall => true,
            Kind::Send | Kind::Receive => true,
            Kind::Barrier | Kind::ReceiveAny | Kind::SparseAllreduce => false,
        }
    }

    /// Enqueues a call: one kernel, or none where there is nothing to do. Never allocates, never waits; may
    /// be captured. After an abort it refuses, and what was captured before leaves at once.
    ///
    /// # Safety
    /// The addresses are memory that this device reaches, of the sizes that [`Job`] says, until the stream
    /// has done the call; nobody races with it. `stream` is on this exchange's device.
    pub unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()> {
        let (size, bytes) = (self.group.size(), self.check(job)?);
        match Plan::alone(&self.table, job, size, bytes) {
            Plan::Nothing => self.fault.check(),
            Plan::Combine(combination) => self.combine(job, &combination, stream),
            Plan::Swap(swapping) => {
                let mut arguments = Call { call: swapping.arguments(job, bytes, 0), group: self.group };
                self.launch(self.functions.swapper(), swapping.grid, stream, (&raw mut arguments).cast())
            }
            // SAFETY: the points lie within what the caller promised.
            Plan::Move => unsafe {
                let points = points::of_job(job, self.group.rank(), size, bytes);
                self.move_points(&points, Blocks { most: job.max_blocks, for_each_peer: false }, stream)
            },
        }
    }

    /// The bytes of a call, if it can run here.
    fn check(&self, job: &Job) -> Result<u64> {
        let size = self.group.size();
        if !self.serves(job.kind, job.dtype, &job.operator) || job.kind.point_to_point() {
            fail!(Internal, "{} of {} is not exchanged between GPUs", job.kind.name(), job.dtype.name());
        }
        if job.kind.rooted() && job.root >= size {
            fail!(InvalidArgument, "root {} of {size} ranks", job.root);
        }
        let Some(bytes) = job.bytes() else {
            fail!(InvalidArgument, "{} elements of {} do not fit any memory", job.count, job.dtype.name())
        };
        Ok(bytes)
    }

    fn bundler(&self, windows: bool) -> Bundler<'_> {
        Bundler { table: &self.table, group: self.group, functions: &self.functions, windows }
    }

    /// Which of a group's calls are a launch each, in their order: the same on all ranks that group the same
    /// calls. Several are for [`Exchange::enqueue_several`], a single one for [`Exchange::enqueue`] or
    /// [`Exchange::enqueue_windowed`]. `windows`: whether the group may have some, the same on all ranks.
    pub fn bundles(&self, jobs: &[Job], windows: bool) -> Result<Vec<Range<usize>>> {
        // Of calls that differ in their addresses alone, one.
        jobs.chunk_by(have_one_shape).try_for_each(|alike| self.check(&alike[0]).map(drop))?;
        Ok(self.bundler(windows).bundles(jobs))
    }

    /// Enqueues several calls that are one launch, to run beside each other, or one after the other.
    ///
    /// # Safety
    /// As [`Exchange::enqueue`], for each call.
    pub unsafe fn enqueue_several(&self, jobs: &[Job], stream: &Stream) -> Result<()> {
        // What is for windows has been found before.
        match self.bundler(false).launch(jobs) {
            Some(Launch::Kernel { function, grid, mut arguments }) => {
                let arguments = match &mut arguments {
                    Arguments::Combine(calls) => (&raw mut **calls).cast(),
                    Arguments::Swap(calls) => (&raw mut **calls).cast(),
                };
                self.launch(function, grid, stream, arguments)
            }
            // SAFETY: the points lie within what the caller promised.
            Some(Launch::Points { points, max_blocks }) => unsafe {
                self.move_points(&points, Blocks { most: max_blocks, for_each_peer: false }, stream)
            },
            None => fail!(Internal, "these {} calls are no single launch", jobs.len()),
        }
    }

    /// Enqueues the sends and receives of a group, as one kernel unless there are very many: up to 240, and
    /// what a rank sends itself counts once more. Between two ranks, the i-th send meets the i-th receive, of
    /// as many bytes; between different pairs of ranks there is no order. A kernel has at most `max_blocks`
    /// blocks, the same on all ranks, but one for each rank at least; 0 for as many as suit it.
    ///
    /// # Safety
    /// As [`Exchange::enqueue`].
    pub unsafe fn enqueue_points(&self, points: &[Point], max_blocks: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.move_points(points, Blocks { most: max_blocks, for_each_peer: true }, stream) }
    }

    /// # Safety
    /// As [`Exchange::enqueue`].
    unsafe fn move_points(&self, points: &[Point], blocks: Blocks, stream: &Stream) -> Result<()> {
        for mut round in points::rounds(&self.table, &self.group, points, blocks)? {
            let (function, grid) = (self.functions.mover(round.is_small()), round.grid);
            self.launch(function, grid, stream, round.parameter())?;
        }
        Ok(())
    }

    /// What of a call has to lie in windows, where it gains by that: the same answer on every rank.
    pub fn shares(&self, job: &Job) -> Option<Shared> {
        Shared::of(job, &self.table, self.group.size())
    }

    /// Enqueues a call that gains ([`Exchange::shares`]) without staging, as all ranks enqueue it. `seen` is
    /// what it shares of this rank's memory, as each rank reaches it.
    ///
    /// # Safety
    /// As [`Exchange::enqueue`], for what each rank shares.
    pub unsafe fn enqueue_windowed(&self, job: &Job, seen: &Seen, stream: &Stream) -> Result<()> {
        if self.shares(job).is_none() || (job.kind.rooted() && job.root >= self.group.size()) {
            fail!(
                Internal,
                "{} of {} elements from root {} is not for windows",
                job.kind.name(),
                job.count,
                job.root
            );
        }
        let function = match job.kind.reduces() {
            true => self.functions.combine(job.dtype, &job.operator)?.windowed,
            false => self.functions.windowed(),
        };
        let (grid, mut arguments) = windowed::arguments(&self.table, self.group, job, seen);
        self.launch(function, grid, stream, (&raw mut arguments).cast())
    }

    /// Enqueues a broadcast by stages: one kernel, or none for no bytes.
    ///
    /// # Safety
    /// As [`Exchange::enqueue`]; if the input is said to be readable, by every rank's device.
    pub unsafe fn enqueue_pull(&self, pull: &Pull, stream: &Stream) -> Result<()> {
        if pull.root >= self.group.size() {
            fail!(InvalidArgument, "root {} of {} ranks", pull.root, self.group.size());
        }
        if pull.bytes == 0 {
            return self.fault.check();
        }
        let (grid, mut arguments) = pull.arguments(self.group, &self.table);
        let overlaps = pull.overlap != Overlap::Off && self.functions.await_streams();
        self.launch(self.functions.pull(), Grid { overlaps, ..grid }, stream, (&raw mut arguments).cast())
    }

    /// Enqueues the sending of so many signals to each rank: one kernel. Who has seen one sees what the
    /// stream was given before it. Those of one exchange are enqueued on one stream, or their streams wait
    /// for each other.
    pub fn enqueue_signals(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        let (grid, mut arguments) = signals::arguments(self.group, &self.table, counts);
        self.launch(self.functions.signal(), grid, stream, (&raw mut arguments).cast())
    }

    /// Enqueues a wait for so many signals of each rank, others than any other wait is for: one kernel. In no
    /// order with other calls but that of its stream.
    pub fn enqueue_wait(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        let (grid, mut arguments) = signals::arguments(self.group, &self.table, counts);
        self.launch(self.functions.await_signals(), grid, stream, (&raw mut arguments).cast())
    }

    /// Where this rank counts the signals of each.
    #[cfg(test)]
    fn tally(&self) -> u64 {
        self.group.own_arena() + self.table.layout(self.group.size()).tally
    }

    fn combine(&self, job: &Job, combination: &Combination, stream: &Stream) -> Result<()> {
        let pair = || match job.kind {
            Kind::Broadcast => Ok(self.functions.relay()),
            _ => self.functions.combine(job.dtype, &job.operator).map(|kernels| kernels.staged),
        };
        let function = match combination.protocol() {
            Protocol::Narrow | Protocol::Wide => pair()?.lines,
            Protocol::Tiles => pair()?.tiles,
            Protocol::Dealt => self.functions.dealt(job.dtype)?,
        };
        let mut arguments = Call { call: combination.arguments(&self.group, job, 0), group: self.group };
        self.launch(function, combination.grid, stream, (&raw mut arguments).cast())
    }

    fn launch(
        &self,
        function: FunctionHandle,
        grid: Grid,
        stream: &Stream,
        arguments: *mut c_void,
    ) -> Result<()> {
        self.fault.check()?;
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the arguments are those of the function, and are copied before this returns; what they
        // point to stays, by the promises of `new` and of who enqueues.
        unsafe { self.devices.driver().launch(function, grid, stream.handle(), &mut [arguments]) }
    }
}
