//! The operation: one turn of its group, a load if need be, two exchanges.

use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::memory::{Pool, Words};
use super::merge::Union;
use super::order::Order;
use super::shards::{self, Shards};
use super::tensor::{self, Gathered, Shape, Tensor};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Request};
use crate::communicator::Call;
use crate::communicator::calls::exchange_directly;
use crate::communicator::plans::{Planned, Plans, Seat, planned};
use crate::deadline::Deadline;
use crate::engine::direct::{Direct, DirectRun, Job, Path};
use crate::engine::endpoint::Through;
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

// SAFETY: it names memory that its keeper has, or that the caller promised to be usable from the library's threads.
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
        // SAFETY: this function's contract. A load's parts are aligned to 64 bytes, a copy's to 8, and the caller's have been
        // checked.
        unsafe {
            (
                std::slice::from_raw_parts(self.indices.0, self.indices.1),
                std::slice::from_raw_parts(self.values.0, self.values.1),
            )
        }
    }
}

/// A sparse allreduce under way. First all tell how many elements they have. Then all gather all elements and each merges
/// them; or each gets those of its part, merges them, and all gather the results. The ranks compare dims, block, type and
/// operator as they compare every call: they are its signature.
pub(super) struct SparseRun {
    part: Part,
    turn: Turn,
    /// The exchange under way, between memory that the stage holds,
    exchange: Option<Box<dyn Operation>>,
    /// and its number among those of the call.
    round: u32,
    stage: Stage,
}

enum Stage {
    /// This rank's elements come to the host.
    Load {
        source: Source,
        counting: Box<Counting>,
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

impl SparseRun {
    /// The operation for `turn`. `counting` was made for `part`.
    pub(super) fn new(turn: &Turn, part: Part, counting: Counting, source: Source) -> SparseRun {
        let stage = Stage::Load { source, counting: Box::new(counting) };
        SparseRun { part, turn: *turn, exchange: None, round: 0, stage }
    }

    /// Goes on, once what the stage waits for has come.
    fn go_on(&mut self, group: &Group) -> Result<()> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Load { source, counting } => self.count(group, source, *counting),
            Stage::Count { words, source, order } => match Shards::of(&words, &self.part.shape) {
                Some(shards) => self.deal(group, &shards, &source, &order),
                None => self.gather(group, &words, &source, &order),
            },
            Stage::Gather { all } => {
                let Part { shape, reducer, pool, .. } = &self.part;
                let team = &**group.endpoint();
                let union = Union::of(&all, team)?;
                let mut tensor = Tensor::new(shape, union.nnz(), pool)?;
                union.write(&all, reducer, tensor.parts_mut(), pool, team)?;
                self.end(tensor)
            }
            Stage::Deal { nnz, shards, .. } => self.swap(group, &nnz, shards),
            Stage::Swap { all, .. } => self.size(group, all),
            Stage::Size { all, union, nnz } => self.merge(group, &all, &union, nnz),
            Stage::Indices { tensor, indices, nnz } => self.values(group, tensor, &indices, &nnz),
            Stage::Values { tensor } => self.end(tensor),
            Stage::Over => Ok(()),
        }
    }

    /// This rank's elements are there: all tell of theirs.
    fn count(&mut self, group: &Group, source: Source, counting: Counting) -> Result<()> {
        let Part { shape, pool, seat, .. } = &self.part;
        // SAFETY: they are here; the caller's memory outlives a call that borrows it.
        let (indices, _) = unsafe { source.lists() };
        let order = Order::of(indices, shape.dims, pool)?;
        let Counting { mut words, exchange } = counting;
        let leading = &indices[..indices.len() / shape.dims];
        words.as_chunks_mut().0[seat.rank as usize] = shards::words(&order, leading);
        self.stage = Stage::Count { words, source, order };
        // SAFETY: the words are what it was made of.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// All elements are to be gathered next.
    fn gather(&mut self, group: &Group, words: &[u64], source: &Source, order: &Order) -> Result<()> {
        let Part { shape, reducer, seat, pool, .. } = &self.part;
        let nnz: Vec<u64> = words.iter().step_by(shards::WORDS).copied().collect();
        let mut all = Gathered::new(shape, &nnz, pool)?;
        let rank = seat.rank as usize;
        // SAFETY: as in `count`.
        all.put(rank..rank + 1, unsafe { source.lists() }, order, reducer, &**group.endpoint())?;
        let exchange = self.gathering(group, all.address(), all.counts(), DataType::U64)?;
        self.stage = Stage::Gather { all };
        // SAFETY: the stage holds what it was made of, here and below.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// Each rank is to get the elements of its part: all tell it how many they have for it.
    fn deal(&mut self, group: &Group, parts: &Shards, source: &Source, order: &Order) -> Result<()> {
        let Part { shape, reducer, pool, .. } = &self.part;
        // SAFETY: as in `count`.
        let lists = unsafe { source.lists() };
        let mine = parts.lengths(order, &lists.0[..lists.0.len() / shape.dims]);
        let mut shards = Gathered::new(shape, &mine, pool)?;
        shards.put(0..mine.len(), lists, order, reducer, &**group.endpoint())?;
        let mut nnz = vec![0; mine.len()];
        let counts = Counts::Uniform(1);
        let request = swapping(mine.as_ptr().cast(), nnz.as_mut_ptr().cast(), counts);
        let exchange = Exchange::new(group, &self.part, &request, |checked| self.plan(checked))?;
        self.stage = Stage::Deal { _told: mine, nnz, shards };
        // SAFETY: as above.
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
        // SAFETY: as above.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// This rank's part is there: all tell how many elements theirs come to.
    fn size(&mut self, group: &Group, all: Gathered) -> Result<()> {
        let union = Union::of(&all, &**group.endpoint())?;
        let mut nnz = vec![0; all.size()];
        nnz[self.part.seat.rank as usize] = union.nnz() as u64;
        let counts = vec![1; nnz.len()];
        let exchange = self.gathering(group, nnz.as_mut_ptr().cast(), counts, DataType::U64)?;
        self.stage = Stage::Size { all, union, nnz };
        // SAFETY: as above.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// It is known where each part goes in the result: this rank's is merged there, and all give theirs to all.
    fn merge(&mut self, group: &Group, all: &Gathered, union: &Union, nnz: Vec<u64>) -> Result<()> {
        let Part { shape, reducer, seat, pool, .. } = &self.part;
        let add = |total: u64, nnz: &u64| total.checked_add(*nnz);
        let Some(total) = nnz.iter().try_fold(0, add) else { return Err(tensor::too_large(usize::MAX)) };
        let mut tensor = Tensor::new(shape, usize::try_from(total).unwrap_or(usize::MAX), pool)?;
        let rank = seat.rank as usize;
        let (before, own) = (nnz[..rank].iter().sum::<u64>() as usize, nnz[rank] as usize);
        let mut indices = pool.take(tensor.indices().len())?;
        let row = shape.block * shape.dtype.size();
        let (_, values) = tensor.parts_mut();
        let values = &mut values[before * row..][..own * row];
        let numbers = &mut indices.words_mut()[before * shape.dims..][..own * shape.dims];
        union.write(all, reducer, (numbers, values), pool, &**group.endpoint())?;
        let counts = nnz.iter().map(|nnz| nnz * shape.dims as u64).collect();
        let exchange = self.gathering(group, indices.address(), counts, DataType::U64)?;
        self.stage = Stage::Indices { tensor, indices, nnz };
        // SAFETY: as above.
        unsafe { self.begin(group, exchange) };
        Ok(())
    }

    /// All indices are there; the values come next.
    fn values(&mut self, group: &Group, mut tensor: Tensor, indices: &Words, nnz: &[u64]) -> Result<()> {
        let Shape { dims, block, dtype } = self.part.shape;
        let all = tensor.nnz;
        let (numbers, _) = tensor.parts_mut();
        let (mut from, mut at) = (indices.words(), 0);
        for nnz in nnz.iter().map(|&nnz| nnz as usize).filter(|&nnz| nnz > 0) {
            for dim in 0..dims {
                let (here, rest) = from.split_at(nnz);
                numbers[dim * all + at..][..nnz].copy_from_slice(here);
                from = rest;
            }
            at += nnz;
        }
        let row = (block * dtype.size()) as u64;
        let counts = nnz.iter().map(|nnz| nnz * row).collect();
        let exchange = self.gathering(group, tensor.address(), counts, DataType::U8)?;
        self.stage = Stage::Values { tensor };
        // SAFETY: as above.
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
            if let Err(error) = self.go_on(group) {
                return Poll::Ready(Err(error));
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
        self.exchange.as_ref().is_some_and(|exchange| exchange.is_at_work())
    }

    fn through(&self) -> Through {
        // Asked when it begins: the tensor may be on its way from a device.
        self.exchange.as_ref().map_or(Through::Device, |exchange| exchange.through())
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
    /// The memory of the request stays valid, and nobody else touches it, until the operation has ended or is abandoned.
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
