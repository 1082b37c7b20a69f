//! The operation: one turn of its group, a load if need be, two exchanges.

use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::memory::{Pool, Words};
use super::order::Order;
use super::tensor::{Gathered, Shape, Tensor};
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

/// A sparse allreduce under way. First all tell how many elements they have, then all gather all elements. The ranks
/// compare dims, block, type and operator as they compare every call: they are its signature.
pub(super) struct SparseRun {
    part: Part,
    turn: Turn,
    round: Round,
}

enum Round {
    /// This rank's elements come to the host.
    Load {
        source: Source,
        counting: Box<Counting>,
    },
    /// Each rank's number of elements comes in.
    Count {
        exchange: Box<dyn Operation>,
        nnz: Vec<u64>,
        source: Source,
        order: Order,
    },
    /// Their elements come in.
    Gather {
        exchange: Box<dyn Operation>,
        all: Gathered,
    },
    Over,
}

impl SparseRun {
    /// The operation for `turn`. `counting` was made for `part`.
    pub(super) fn new(turn: &Turn, part: Part, counting: Counting, source: Source) -> SparseRun {
        SparseRun { part, turn: *turn, round: Round::Load { source, counting: Box::new(counting) } }
    }

    /// This rank's elements are there: all tell how many different ones they have.
    fn count(&mut self, group: &Group, source: Source, counting: Counting) -> Result<()> {
        let Part { shape, pool, seat, .. } = &self.part;
        // SAFETY: they are here; the caller's memory outlives a call that borrows it.
        let (indices, _) = unsafe { source.lists() };
        let order = Order::of(indices, shape.dims, pool)?;
        let Counting { mut nnz, exchange } = counting;
        nnz[seat.rank as usize] = order.different as u64;
        // SAFETY: `nnz` is what the exchange was made of; it lives beside it, and is not touched before its end.
        let exchange = unsafe { exchange.begin(group, &self.turn, 0) };
        self.round = Round::Count { exchange, nnz, source, order };
        Ok(())
    }

    /// All elements are to be gathered next.
    fn gather(&mut self, group: &Group, nnz: &[u64], source: &Source, order: &Order) -> Result<()> {
        let part = &self.part;
        let mut all = Gathered::new(&part.shape, nnz, &part.pool)?;
        // SAFETY: as in `count`.
        all.put(part.seat.rank as usize, unsafe { source.lists() }, order, &part.reducer);
        let counts = Counts::Blocks(all.counts());
        let plan = |checked: &mut Checked| planned(checked, &Call::default(), part.seat);
        let exchange = Exchange::new(group, part.class, all.address(), counts, plan)?;
        // SAFETY: as in `count`.
        let exchange = unsafe { exchange.begin(group, &self.turn, 1) };
        self.round = Round::Gather { exchange, all };
        Ok(())
    }

    fn exchange(&self) -> Option<&dyn Operation> {
        match &self.round {
            Round::Count { exchange, .. } | Round::Gather { exchange, .. } => Some(&**exchange),
            Round::Load { .. } | Round::Over => None,
        }
    }
}

impl Operation for SparseRun {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        loop {
            match &mut self.round {
                Round::Load { source, .. } => match source.is_here() {
                    Ok(true) => {}
                    Ok(false) => return Poll::Pending,
                    Err(error) => return Poll::Ready(Err(error)),
                },
                Round::Count { exchange, .. } | Round::Gather { exchange, .. } => {
                    match exchange.advance(group) {
                        Poll::Ready(Ok(_)) => {}
                        other => return other,
                    }
                }
                Round::Over => return Poll::Ready(Ok(Completion::default())),
            }
            let ended = match std::mem::replace(&mut self.round, Round::Over) {
                Round::Load { source, counting } => self.count(group, source, *counting),
                Round::Count { nnz, source, order, .. } => self.gather(group, &nnz, &source, &order),
                Round::Gather { all, .. } => {
                    let combined = all.combine(&self.part.reducer, &self.part.pool);
                    // Nobody else sets it.
                    combined.map(|tensor| drop(self.part.into.set(tensor)))
                }
                Round::Over => Ok(()),
            };
            if let Err(error) = ended {
                return Poll::Ready(Err(error));
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        if let Round::Count { exchange, .. } | Round::Gather { exchange, .. } = &mut self.round {
            exchange.abandon(group);
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.exchange().map_or_else(Vec::new, |exchange| exchange.waits_for(group))
    }

    fn through(&self) -> Through {
        // Asked when it begins: the tensor may be on its way from a device.
        self.exchange().map_or(Through::Device, Operation::through)
    }
}

/// The first exchange, made ready: each rank's number of elements.
pub(super) struct Counting {
    nnz: Vec<u64>,
    exchange: Exchange,
}

impl Counting {
    pub(super) fn new(group: &Group, part: &Part, plans: &Plans) -> Result<Counting> {
        let mut nnz: Vec<u64> = vec![0; group.size() as usize];
        let all = nnz.as_mut_ptr().cast();
        let plan = |checked: &mut Checked| plans.plan(checked, &Call::default(), part.seat);
        let exchange = Exchange::new(group, part.class, all, Counts::Uniform(1), plan)?;
        Ok(Counting { nnz, exchange })
    }
}

/// An allgather of words within a call, made ready.
enum Exchange {
    Direct(Arc<Direct>, Job, Path),
    Messages(Arc<Plan>, *const u8, *mut u8),
}

// SAFETY: it names memory of the operation that it goes with, which nobody else uses.
unsafe impl Send for Exchange {}

impl Exchange {
    /// `all` has room for the words of every rank, this rank's are in their place.
    fn new(
        group: &Group,
        class: Class,
        all: *mut u8,
        counts: Counts,
        plan: impl FnOnce(&mut Checked) -> Result<Planned>,
    ) -> Result<Exchange> {
        let rank = group.rank() as usize;
        let before: u64 = match &counts {
            Counts::Blocks(counts) => counts[..rank].iter().sum(),
            _ => rank as u64,
        };
        let request = Request {
            kind: Kind::Allgather,
            input: all.wrapping_add(before as usize * 8),
            output: all,
            counts,
            dtype: DataType::U64,
            operator: Operator::Sum,
            root: 0,
        };
        let mut checked = Checked::new(&request, group.rank(), group.size())?;
        Ok(match exchange_directly(group, &checked, &Call::default(), class)? {
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
    /// The words of [`Exchange::new`] stay valid, and nobody else touches them, until it has ended or is abandoned.
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
