//! The operation: one turn of its group, a load if need be, two exchanges.

use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::tensor::{Elements, Gathered, Shape, Tensor};
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
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::Kind;

/// What a call is to the rank that makes it.
pub(super) struct Part {
    pub(super) shape: Shape,
    pub(super) reducer: Reducer,
    pub(super) seat: Seat,
    pub(super) class: Class,
    /// Told what comes of it.
    pub(super) into: Arc<OnceLock<Tensor>>,
}

/// Where this rank's elements are.
pub(super) enum Source {
    /// Here, and combined.
    Here(Elements),
    /// On their way from a device: so many numbers, so many bytes of values.
    Loading(Load, usize, usize),
}

impl Source {
    /// The elements, if they are here by now.
    fn take(&mut self, shape: &Shape, reducer: &Reducer) -> Result<Option<Elements>> {
        let (load, numbers, bytes) = match self {
            Source::Here(elements) => return Ok(Some(std::mem::replace(elements, Elements::none()))),
            Source::Loading(load, _, _) if !load.is_complete()? => return Ok(None),
            Source::Loading(load, numbers, bytes) => (load, *numbers, *bytes),
        };
        // SAFETY: the load is complete, so its parts are there, as long as they were ordered and aligned to 64 bytes; they
        // stay as they are for as long as it lives.
        let (indices, values) = unsafe {
            (
                std::slice::from_raw_parts(load.part(0).cast::<i64>(), numbers),
                std::slice::from_raw_parts(load.part(1), bytes),
            )
        };
        let elements = Elements::coalesce(indices, values, shape, reducer)?;
        *self = Source::Here(Elements::none());
        Ok(Some(elements))
    }

    /// The elements, when they are here.
    pub(super) fn wait(mut self, shape: &Shape, reducer: &Reducer, deadline: Deadline) -> Result<Elements> {
        if let Source::Loading(load, _, _) = &self {
            load.wait(deadline)?;
        }
        match self.take(shape, reducer)? {
            Some(elements) => Ok(elements),
            None => fail!(Internal, "a load is complete, and is not"),
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
        source: Box<Source>,
        counting: Box<Counting>,
    },
    /// Each rank's number of elements comes in.
    Count {
        exchange: Box<dyn Operation>,
        nnz: Vec<u64>,
        mine: Elements,
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
        SparseRun {
            part,
            turn: *turn,
            round: Round::Load { source: Box::new(source), counting: Box::new(counting) },
        }
    }

    /// This rank's elements are there: all tell how many they have.
    fn count(&mut self, group: &Group, mine: Elements, counting: Counting) {
        let Counting { mut nnz, exchange } = counting;
        nnz[self.part.seat.rank as usize] = mine.nnz as u64;
        // SAFETY: `nnz` is what the exchange was made of; it lives beside it, and is not touched before its end.
        let exchange = unsafe { exchange.begin(group, &self.turn, 0) };
        self.round = Round::Count { exchange, nnz, mine };
    }

    /// All elements are to be gathered next.
    fn gather(&mut self, group: &Group, nnz: &[u64], mine: &Elements) -> Result<()> {
        let part = &self.part;
        let mut all = Gathered::new(&part.shape, nnz)?;
        all.put(part.seat.rank as usize, mine);
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
                Round::Load { source, .. } => match source.take(&self.part.shape, &self.part.reducer) {
                    Ok(Some(mine)) => {
                        let Round::Load { counting, .. } = std::mem::replace(&mut self.round, Round::Over)
                        else {
                            continue;
                        };
                        self.count(group, mine, *counting);
                        continue;
                    }
                    Ok(None) => return Poll::Pending,
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
                Round::Count { nnz, mine, .. } => self.gather(group, &nnz, &mine),
                Round::Gather { all, .. } => {
                    // Nobody else sets it.
                    all.combine(&self.part.reducer).map(|tensor| drop(self.part.into.set(tensor)))
                }
                Round::Load { .. } | Round::Over => Ok(()),
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
