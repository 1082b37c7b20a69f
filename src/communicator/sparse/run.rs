//! The operation: one turn of its group, a load if need be, exchanges, and what this rank does by itself
//! between them.

use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::memory::{Pool, Words};
use super::merge::{Union, combined};
use super::order::Order;
use super::pace::{self, Chore, Pace, STRETCH};
use super::shards::{self, Shards};
use super::tensor::{self, Gathered, Shape, Tensor};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Request};
use crate::communicator::Call;
use crate::communicator::calls::exchange_directly;
use crate::communicator::plans::{Planned, Plans, Seat, planned};
use crate::deadline::Deadline;
use crate::engine::direct::{Direct, DirectRun, Job, Path};
use crate::engine::endpoint::{Endpoint, Through};
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Group, Turn};
use crate::engine::operation::{Completion, Operation};
use crate::engine::staged::Load;
use crate::engine::wire::Class;
use crate::error::Result;
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::Kind;

/// What a call is to the rank that makes it.
pub(super) struct Part {
    pub(super) shape: Shape,
    pub(super) reducer: Reducer,
    pub(super) seat: Seat,
    pub(super) class: Class,
    /// See [`crate::communicator::calls::lists_by_messages`].
    pub(super) by_messages: bool,
    pub(super) pool: Arc<Pool>,
    /// Told what comes of it.
    pub(super) into: Arc<OnceLock<Tensor>>,
}

/// This rank's elements as they were given: coordinates, and bytes of values.
pub(super) struct Source {
    indices: (*const i64, usize),
    values: (*const u8, usize),
    keeper: Keeper,
}

// SAFETY: it names memory that its keeper has, or that the caller promised to be usable from the library's
// threads.
unsafe impl Send for Source {}

/// Whose the memory is.
enum Keeper {
    Caller,
    Copy(#[expect(dead_code, reason = "held")] Words),
    /// Not there before it is complete.
    Load(Load),
}

impl Source {
    pub(super) fn none() -> Source {
        let (indices, values) = (std::ptr::dangling(), std::ptr::dangling());
        Source { indices: (indices, 0), values: (values, 0), keeper: Keeper::Caller }
    }

    /// The caller's memory, read when it is needed.
    ///
    /// # Safety
    /// The lists are so long and stay as they are until the source is dropped.
    pub(super) unsafe fn borrow(
        indices: (*const i64, usize),
        values: (*const u8, usize),
        _: &Arc<Pool>,
    ) -> Result<Source> {
        Ok(Source { indices, values, keeper: Keeper::Caller })
    }

    /// A copy of the caller's memory.
    ///
    /// # Safety
    /// The lists are so long.
    pub(super) unsafe fn copy(
        indices: (*const i64, usize),
        values: (*const u8, usize),
        pool: &Arc<Pool>,
    ) -> Result<Source> {
        let mut words = pool.take(indices.1.saturating_add(values.1.div_ceil(8)))?;
        let copy = words.address();
        let (numbers, bytes) = (copy.cast::<i64>(), copy.wrapping_add(indices.1 * size_of::<i64>()));
        // SAFETY: the caller's promise; there is room for both, and nobody else knows it.
        unsafe {
            numbers.copy_from_nonoverlapping(indices.0, indices.1);
            bytes.copy_from_nonoverlapping(values.0, values.1);
        }
        let keeper = Keeper::Copy(words);
        Ok(Source { indices: (numbers, indices.1), values: (bytes, values.1), keeper })
    }

    /// What `load` brings: so many numbers, so many bytes.
    pub(super) fn load(load: Load, numbers: usize, bytes: usize) -> Source {
        let (indices, values) = (load.part(0).cast(), load.part(1));
        Source { indices: (indices, numbers), values: (values, bytes), keeper: Keeper::Load(load) }
    }

    /// Whether they come from a device.
    fn is_loaded(&self) -> bool {
        matches!(self.keeper, Keeper::Load(_))
    }

    fn is_here(&self) -> Result<bool> {
        match &self.keeper {
            Keeper::Load(load) => load.is_complete(),
            Keeper::Caller | Keeper::Copy(_) => Ok(true),
        }
    }

    /// Waits until the elements are here.
    pub(super) fn wait(&self, deadline: Deadline) -> Result<()> {
        match &self.keeper {
            Keeper::Load(load) => load.wait(deadline),
            Keeper::Caller | Keeper::Copy(_) => Ok(()),
        }
    }

    /// The elements.
    ///
    /// # Safety
    /// They are here, and what was promised when the source was made still holds.
    pub(super) unsafe fn lists(&self) -> (&[i64], &[u8]) {
        // SAFETY: this function's contract. A load's parts are aligned to 64 bytes, a copy's to 8, and the
        // caller's have been checked.
        unsafe {
            (
                std::slice::from_raw_parts(self.indices.0, self.indices.1),
                std::slice::from_raw_parts(self.values.0, self.values.1),
            )
        }
    }
}

/// A sparse allreduce under way. First all tell how many elements they have. Then all gather all elements and
/// each merges them; or each gets those of its part, merges them, and all gather the results. The ranks
/// compare dims, block, type and operator as they compare every call: they are its signature.
pub(super) struct SparseRun {
    part: Part,
    turn: Turn,
    /// Whether this rank's elements come from a device.
    loads: bool,
    /// The exchange under way, between memory that the stage holds,
    exchange: Option<Box<dyn Operation>>,
    /// and its number among those of the call.
    round: u32,
    stage: Stage,
    pace: Arc<Pace>,
    /// Whether the last look has stopped in the middle of what this rank does by itself.
    at_work: bool,
}

enum Stage {
    /// This rank's elements come to the host.
    Load {
        source: Source,
        counting: Box<Counting>,
    },
    /// This rank does something by itself,
    Work {
        chore: Chore<Made>,
        /// for a person who wants to know what takes so long.
        what: &'static str,
    },
    /// and has done it.
    Made {
        made: Made,
        what: &'static str,
    },
    /// What each rank tells of its elements comes in.
    Count {
        words: Vec<u64>,
        source: Source,
        order: Order,
    },
    /// All ranks' elements come in.
    Gather {
        all: Gathered,
    },
    /// How many elements each rank has for this one's part comes in, and this one's are told to the others.
    Deal {
        _told: Vec<u64>,
        nnz: Vec<u64>,
        shards: Gathered,
    },
    /// The elements of this rank's part come in.
    Swap {
        _shards: Gathered,
        all: Gathered,
    },
    /// How many elements each part has come to comes in.
    Size {
        all: Gathered,
        union: Union,
        nnz: Vec<u64>,
    },
    /// The indices of the parts come in, one part's after the other's.
    Indices {
        tensor: Tensor,
        indices: Words,
        nnz: Vec<u64>,
    },
    /// Their values come in.
    Values {
        tensor: Tensor,
    },
    Over,
}

const SORTS: &str = "its elements are still being sorted";
const PACKS: &str = "its elements are still being packed";
const MERGES: &str = "the ranks' elements are still being merged";

/// What work of this rank alone comes to.
enum Made {
    /// Its elements' order is found, and the words are those that it tells of them.
    Order { source: Source, counting: Box<Counting>, order: Order },
    /// Its elements are in their place among those of all.
    Given { all: Gathered },
    /// Its elements are in their place for the ranks that get them: so many for each.
    Dealt { told: Vec<u64>, shards: Gathered },
    /// It is known what its part comes to.
    United { all: Gathered, union: Union },
    /// Its part is in its place in the result.
    Merged { tensor: Tensor, indices: Words, nnz: Vec<u64> },
    /// The indices of all parts are in the result.
    Indexed { tensor: Tensor, nnz: Vec<u64> },
    /// The result is there.
    Result(Tensor),
}

/// What such work takes.
struct Tools {
    shape: Shape,
    reducer: Reducer,
    rank: usize,
    pool: Arc<Pool>,
    endpoint: Arc<Endpoint>,
    pace: Arc<Pace>,
}

impl Tools {
    /// This rank's elements are there: finds their order, and what to tell of them.
    async fn sort(self, source: Source, mut counting: Box<Counting>) -> Result<Made> {
        let dims = self.shape.dims;
        // SAFETY: they are here; the caller's memory outlives a call that borrows it.
        let (indices, _) = unsafe { source.lists() };
        let order = Order::of(indices, dims, &self.pool, &self.pace).await?;
        let words = shards::words(&order, &indices[..indices.len() / dims], &self.pace).await;
        counting.words.as_chunks_mut().0[self.rank] = words;
        Ok(Made::Order { source, counting, order })
    }

    /// All elements are to be gathered, so many of each rank: puts this rank's in their place.
    async fn give(self, nnz: Vec<u64>, source: Source, order: Order) -> Result<Made> {
        let mut all = Gathered::new(&self.shape, &nnz, &self.pool)?;
        // SAFETY: as in `sort`.
        let lists = unsafe { source.lists() };
        let ranks = self.rank..self.rank + 1;
        all.put(ranks, lists, &order, &self.reducer, &*self.endpoint, &self.pace).await?;
        Ok(Made::Given { all })
    }

    /// Each rank is to get the elements of its part: puts this rank's in their place for those.
    async fn deal(self, parts: Shards, source: Source, order: Order) -> Result<Made> {
        // SAFETY: as in `sort`.
        let lists = unsafe { source.lists() };
        let leading = &lists.0[..lists.0.len() / self.shape.dims];
        let told = parts.lengths(&order, leading, &self.pace).await;
        let mut shards = Gathered::new(&self.shape, &told, &self.pool)?;
        shards.put(0..told.len(), lists, &order, &self.reducer, &*self.endpoint, &self.pace).await?;
        Ok(Made::Dealt { told, shards })
    }

    /// All elements are there: they come to the result.
    async fn combine(self, all: Gathered) -> Result<Made> {
        combined(&all, &self.reducer, &self.pool, &*self.endpoint, &self.pace).await.map(Made::Result)
    }

    /// All elements of this rank's part are there: how many different ones?
    async fn unite(self, all: Gathered) -> Result<Made> {
        let union = Union::of(&all, &*self.endpoint, &self.pace).await?;
        Ok(Made::United { all, union })
    }

    /// It is known where each part goes in the result: this rank's is merged there.
    async fn merge(self, all: Gathered, union: Union, nnz: Vec<u64>) -> Result<Made> {
        let Shape { dims, block, dtype } = self.shape;
        let add = |total: u64, nnz: &u64| total.checked_add(*nnz);
        let Some(total) = nnz.iter().try_fold(0, add) else { return Err(tensor::too_large(usize::MAX)) };
        let total = usize::try_from(total).unwrap_or(usize::MAX);
        let mut tensor = Tensor::new(&self.shape, total, &self.pool)?;
        let (before, own) = (nnz[..self.rank].iter().sum::<u64>() as usize, nnz[self.rank] as usize);
        let mut indices = self.pool.take(tensor.indices().len())?;
        let row = block * dtype.size();
        let (_, values) = tensor.parts_mut();
        let values = &mut values[before * row..][..own * row];
        let numbers = &mut indices.words_mut()[before * dims..][..own * dims];
        let place = (numbers, values);
        union.write(&all, &self.reducer, place, &self.pool, &*self.endpoint, &self.pace).await?;
        Ok(Made::Merged { tensor, indices, nnz })
    }

    /// All parts' indices are there: brings them to their place in the result.
    async fn index(self, mut tensor: Tensor, indices: Words, nnz: Vec<u64>) -> Result<Made> {
        let (all, dims) = (tensor.nnz, self.shape.dims);
        let (numbers, _) = tensor.parts_mut();
        let (mut from, mut at) = (indices.words(), 0);
        for &nnz in &nnz {
            let nnz = nnz as usize;
            if nnz == 0 {
                // There may be more dims than one would count.
                continue;
            }
            for dim in 0..dims {
                let (here, rest) = from.split_at(nnz);
                let there = &mut numbers[dim * all + at..][..nnz];
                for (to, from) in there.chunks_mut(STRETCH).zip(here.chunks(STRETCH)) {
                    to.copy_from_slice(from);
                    self.pace.spend(2 * size_of_val(from)).await;
                }
                from = rest;
            }
            at += nnz;
        }
        Ok(Made::Indexed { tensor, nnz })
    }
}

impl SparseRun {
    /// The operation for `turn`. `counting` was made for `part`.
    pub(super) fn new(turn: &Turn, part: Part, counting: Counting, source: Source) -> SparseRun {
        let loads = source.is_loaded();
        let stage = Stage::Load { source, counting: Box::new(counting) };
        let pace = Arc::new(Pace::of_looks());
        SparseRun { part, turn: *turn, loads, exchange: None, round: 0, stage, pace, at_work: false }
    }

    /// Goes on, once what the stage waits for has come.
    fn go_on(&mut self, group: &Group) -> Result<()> {
        let tools = || Tools {
            shape: self.part.shape,
            reducer: self.part.reducer,
            rank: self.part.seat.rank as usize,
            pool: self.part.pool.clone(),
            endpoint: group.endpoint().clone(),
            pace: self.pace.clone(),
        };
        let work = |what: &'static str, chore: Chore<Made>| Stage::Work { chore, what };
        self.stage = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Load { source, counting } => work(SORTS, Box::pin(tools().sort(source, counting))),
            Stage::Count { words, source, order } => match Shards::of(&words, &self.part.shape) {
                Some(parts) => work(PACKS, Box::pin(tools().deal(parts, source, order))),
                None => {
                    let nnz = words.iter().step_by(shards::WORDS).copied().collect();
                    work(PACKS, Box::pin(tools().give(nnz, source, order)))
                }
            },
            Stage::Gather { all } => work(MERGES, Box::pin(tools().combine(all))),
            Stage::Deal { nnz, shards, .. } => return self.swap(group, &nnz, shards),
            Stage::Swap { all, .. } => work(MERGES, Box::pin(tools().unite(all))),
            Stage::Size { all, union, nnz } => work(MERGES, Box::pin(tools().merge(all, union, nnz))),
            Stage::Indices { tensor, indices, nnz } => {
                work(MERGES, Box::pin(tools().index(tensor, indices, nnz)))
            }
            Stage::Values { tensor } => return self.end(tensor),
            Stage::Work { mut chore, what } => {
                #[cfg(test)]
                self.part.pool.probe.note();
                match pace::look(chore.as_mut()) {
                    Poll::Ready(made) => Stage::Made { made: made?, what },
                    Poll::Pending => {
                        self.at_work = true;
                        Stage::Work { chore, what }
                    }
                }
            }
            Stage::Made { made: Made::Result(tensor), .. } => return self.end(tensor),
            // One that its own work has made late begins nothing more: it would seem to wait for other ranks.
            Stage::Made { made, what } if self.turn.deadline.expired() => {
                self.at_work = true;
                Stage::Made { made, what }
            }
            Stage::Made { made, .. } => return self.follow(group, made),
            Stage::Over => Stage::Over,
        };
        Ok(())
    }

    /// This rank has done its work: what comes of it is exchanged.
    fn follow(&mut self, group: &Group, made: Made) -> Result<()> {
        let (stage, exchange) = match made {
            Made::Order { source, counting, order } => {
                let Counting { words, exchange } = *counting;
                (Stage::Count { words, source, order }, exchange)
            }
            Made::Given { mut all } => {
                let exchange = self.gathering(group, all.address(), all.counts(), DataType::U64)?;
                (Stage::Gather { all }, exchange)
            }
            Made::Dealt { told, shards } => {
                let mut nnz = vec![0; told.len()];
                let counts = Counts::Uniform(1);
                let request = swapping(told.as_ptr().cast(), nnz.as_mut_ptr().cast(), counts);
                let exchange = Exchange::new(group, &self.part, &request, |checked| self.plan(checked))?;
                (Stage::Deal { _told: told, nnz, shards }, exchange)
            }
            Made::United { all, union } => {
                let mut nnz = vec![0; all.size()];
                nnz[self.part.seat.rank as usize] = union.nnz() as u64;
                let counts = vec![1; nnz.len()];
                let exchange = self.gathering(group, nnz.as_mut_ptr().cast(), counts, DataType::U64)?;
                (Stage::Size { all, union, nnz }, exchange)
            }
            Made::Merged { tensor, mut indices, nnz } => {
                let dims = self.part.shape.dims as u64;
                let counts = nnz.iter().map(|nnz| nnz * dims).collect();
                let exchange = self.gathering(group, indices.address(), counts, DataType::U64)?;
                (Stage::Indices { tensor, indices, nnz }, exchange)
            }
            Made::Indexed { mut tensor, nnz } => {
                let Shape { block, dtype, .. } = self.part.shape;
                let row = (block * dtype.size()) as u64;
                let counts = nnz.iter().map(|nnz| nnz * row).collect();
                let exchange = self.gathering(group, tensor.address(), counts, DataType::U8)?;
                (Stage::Values { tensor }, exchange)
            }
            Made::Result(tensor) => return self.end(tensor),
        };
        self.stage = stage;
        // SAFETY: the stage holds the memory that the exchange was made of.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// It is known who has how many elements for whom: they change hands.
    fn swap(&mut self, group: &Group, nnz: &[u64], mut shards: Gathered) -> Result<()> {
        let Part { shape, pool, .. } = &self.part;
        let mut all = Gathered::new(shape, nnz, pool)?;
        let counts = Counts::Exchange { send: shards.counts(), receive: all.counts() };
        let request = swapping(shards.address().cast_const(), all.address(), counts);
        let exchange = Exchange::new(group, &self.part, &request, |checked| self.plan(checked))?;
        self.stage = Stage::Swap { _shards: shards, all };
        // SAFETY: as in `follow`.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    fn end(&self, tensor: Tensor) -> Result<()> {
        // Nobody else sets it.
        let _ = self.part.into.set(tensor);
        Ok(())
    }

    /// An allgather of blocks of these counts, the first of which is at `all`.
    fn gathering(&self, group: &Group, all: *mut u8, counts: Vec<u64>, dtype: DataType) -> Result<Exchange> {
        let Part { seat, .. } = &self.part;
        let request = gathering(seat.rank, all, Counts::Blocks(counts), dtype);
        Exchange::new(group, &self.part, &request, |checked| self.plan(checked))
    }

    fn plan(&self, checked: &mut Checked) -> Result<Planned> {
        planned(checked, &Call::default(), self.part.seat)
    }

    /// Begins the next exchange of the call.
    ///
    /// # Safety
    /// The stage holds the memory that it was made of.
    unsafe fn begin(&mut self, group: &Group, exchange: Exchange) {
        // SAFETY: the caller's promise. The stage touches nothing before its end.
        self.exchange = Some(unsafe { exchange.begin(group, &self.turn, self.round) });
        self.round += 1;
    }
}

impl Operation for SparseRun {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.at_work = false;
        self.pace.renew();
        loop {
            if let Some(exchange) = &mut self.exchange {
                match exchange.advance(group) {
                    Poll::Ready(Ok(_)) => self.exchange = None,
                    other => return other,
                }
            }
            match &self.stage {
                Stage::Load { source, .. } => match source.is_here() {
                    Ok(true) => {}
                    Ok(false) => return Poll::Pending,
                    Err(error) => return Poll::Ready(Err(error)),
                },
                Stage::Over => return Poll::Ready(Ok(Completion::default())),
                _ => {}
            }
            match self.go_on(group) {
                Ok(()) if self.at_work => return Poll::Pending,
                Ok(()) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        if let Some(exchange) = &mut self.exchange {
            exchange.abandon(group);
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.exchange.as_ref().map_or_else(Vec::new, |exchange| exchange.waits_for(group))
    }

    fn is_at_work(&self) -> bool {
        self.at_work || self.exchange.as_ref().is_some_and(|exchange| exchange.is_at_work())
    }

    fn through(&self) -> Through {
        if self.loads { Through::Device } else { Through::Messages }
    }

    fn asks_driver(&self) -> bool {
        self.loads && matches!(self.stage, Stage::Load { .. })
    }

    fn standing(&self) -> Option<String> {
        match (&self.exchange, &self.stage) {
            (Some(exchange), _) => exchange.standing(),
            (None, Stage::Work { what, .. } | Stage::Made { what, .. }) => Some((*what).to_owned()),
            (None, _) => None,
        }
    }
}

/// The first exchange, made ready: what each rank tells of its elements.
pub(super) struct Counting {
    words: Vec<u64>,
    exchange: Exchange,
}

impl Counting {
    pub(super) fn new(group: &Group, part: &Part, plans: &Plans) -> Result<Counting> {
        let mut words: Vec<u64> = vec![0; group.size() as usize * shards::WORDS];
        let counts = Counts::Uniform(shards::WORDS as u64);
        let request = gathering(group.rank(), words.as_mut_ptr().cast(), counts, DataType::U64);
        let plan = |checked: &mut Checked| plans.plan(checked, &Call::default(), part.seat);
        let exchange = Exchange::new(group, part, &request, plan)?;
        Ok(Counting { words, exchange })
    }
}

/// Each rank gets its block of words from all.
fn swapping(input: *const u8, output: *mut u8, counts: Counts) -> Request {
    let (dtype, operator) = (DataType::U64, Operator::Sum);
    Request { kind: Kind::Alltoall, input, output, counts, dtype, operator, root: 0 }
}

/// `all` has room for the blocks of every rank, this rank's is in its place.
fn gathering(rank: u32, all: *mut u8, counts: Counts, dtype: DataType) -> Request {
    let before: u64 = match &counts {
        Counts::Blocks(counts) => counts[..rank as usize].iter().sum(),
        Counts::Uniform(count) => u64::from(rank) * count,
        Counts::Exchange { .. } | Counts::From { .. } => 0,
    };
    let input = all.wrapping_add(before as usize * dtype.size()).cast_const();
    Request { kind: Kind::Allgather, input, output: all, counts, dtype, operator: Operator::Sum, root: 0 }
}

/// An exchange within a call, made ready.
enum Exchange {
    Direct(Arc<Direct>, Job, Path),
    Messages(Arc<Plan>, *const u8, *mut u8),
}

// SAFETY: it names memory of the operation that it goes with, which nobody else uses.
unsafe impl Send for Exchange {}

impl Exchange {
    fn new(
        group: &Group,
        part: &Part,
        request: &Request,
        plan: impl FnOnce(&mut Checked) -> Result<Planned>,
    ) -> Result<Exchange> {
        let mut checked = Checked::new(request, group.rank(), group.size())?;
        let Part { by_messages, class, .. } = part;
        Ok(match exchange_directly(group, &checked, *by_messages, &Call::default(), *class)? {
            Some((direct, job, path)) => Exchange::Direct(direct, job, path),
            None => {
                let (plan, _) = plan(&mut checked)?;
                Exchange::Messages(plan, checked.input, checked.output)
            }
        })
    }

    /// The operation, as round `round` of the call that has this turn.
    ///
    /// # Safety
    /// The memory of the request stays valid, and nobody else touches it, until the operation has ended or is
    /// abandoned.
    unsafe fn begin(self, group: &Group, turn: &Turn, round: u32) -> Box<dyn Operation> {
        let turn = turn.at_piece(round);
        // SAFETY: this function's contract.
        unsafe {
            match self {
                Exchange::Direct(direct, job, path) => {
                    Box::new(DirectRun::new(group, &turn, direct, job, path))
                }
                Exchange::Messages(plan, input, output) => {
                    Box::new(Run::new(group, &turn, plan, input, output))
                }
            }
        }
    }
}
