//! The operation: one turn of its group, two exchanges.

use std::sync::{Arc, OnceLock};
use std::task::Poll;

use super::tensor::{Elements, Gathered, Shape, Tensor};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Request};
use crate::communicator::Call;
use crate::communicator::context::exchange_directly;
use crate::communicator::plans::{Planned, Plans, Seat, planned};
use crate::engine::direct::{Direct, DirectRun, Job, Path};
use crate::engine::endpoint::Through;
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Group, Turn};
use crate::engine::operation::{Completion, Operation};
use crate::engine::wire::Class;
use crate::error::Result;
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::Kind;

/// What one rank brings to a call, before its turn is known.
pub(super) struct Part {
    pub(super) shape: Shape,
    pub(super) reducer: Reducer,
    pub(super) seat: Seat,
    pub(super) class: Class,
    pub(super) mine: Elements,
    /// Told what comes of it.
    pub(super) into: Arc<OnceLock<Tensor>>,
}

/// A sparse allreduce under way. First all tell how many elements they have, then all gather all elements. The ranks
/// compare dims, block, type and operator as they compare every call: they are its signature.
pub(super) struct SparseRun {
    part: Part,
    turn: Turn,
    round: Round,
}

enum Round {
    /// Each rank's number of elements comes in.
    Count {
        exchange: Box<dyn Operation>,
        nnz: Vec<u64>,
    },
    /// Their elements come in.
    Gather {
        exchange: Box<dyn Operation>,
        all: Gathered,
    },
    Over,
}

impl SparseRun {
    /// The operation for `turn`. `counting` is of [`Counting::new`].
    pub(super) fn new(group: &Group, turn: &Turn, part: Part, counting: Counting) -> SparseRun {
        let Counting { nnz, exchange } = counting;
        // SAFETY: `nnz` is what the exchange was made of; it lives beside it, and is not touched before its end.
        let exchange = unsafe { exchange.begin(group, turn, 0) };
        SparseRun { part, turn: *turn, round: Round::Count { exchange, nnz } }
    }

    /// All elements are to be gathered next.
    fn gather(&mut self, group: &Group, nnz: &[u64]) -> Result<()> {
        let part = &mut self.part;
        let mut all = Gathered::new(&part.shape, nnz)?;
        all.put(part.seat.rank as usize, &std::mem::replace(&mut part.mine, Elements::none()));
        let counts = Counts::Blocks(all.counts());
        let plan = |checked: &mut Checked| planned(checked, &Call::default(), part.seat);
        let exchange = Exchange::new(group, part.class, all.address(), counts, plan)?;
        // SAFETY: as in `new`.
        let exchange = unsafe { exchange.begin(group, &self.turn, 1) };
        self.round = Round::Gather { exchange, all };
        Ok(())
    }

    fn exchange(&self) -> Option<&dyn Operation> {
        match &self.round {
            Round::Count { exchange, .. } | Round::Gather { exchange, .. } => Some(&**exchange),
            Round::Over => None,
        }
    }
}

impl Operation for SparseRun {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        loop {
            let (Round::Count { exchange, .. } | Round::Gather { exchange, .. }) = &mut self.round else {
                return Poll::Ready(Ok(Completion::default()));
            };
            match exchange.advance(group) {
                Poll::Ready(Ok(_)) => {}
                other => return other,
            }
            match std::mem::replace(&mut self.round, Round::Over) {
                Round::Count { nnz, .. } => {
                    if let Err(error) = self.gather(group, &nnz) {
                        return Poll::Ready(Err(error));
                    }
                }
                Round::Gather { all, .. } => match all.combine(&self.part.reducer) {
                    // Nobody else sets it.
                    Ok(tensor) => drop(self.part.into.set(tensor)),
                    Err(error) => return Poll::Ready(Err(error)),
                },
                Round::Over => {}
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
        self.exchange().map_or(Through::Messages, Operation::through)
    }
}

/// The first exchange, made ready: each rank's number of elements.
pub(super) struct Counting {
    nnz: Vec<u64>,
    exchange: Exchange,
}

impl Counting {
    pub(super) fn new(group: &Group, part: &Part, plans: &Plans) -> Result<Counting> {
        let mut nnz = vec![0; group.size() as usize];
        nnz[group.rank() as usize] = part.mine.nnz as u64;
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
        // SAFETY: this function's contract.
        unsafe {
            match self {
                // A direct exchange has a number of its own.
                Exchange::Direct(direct, job, path) => {
                    Box::new(DirectRun::new(group, turn, direct, job, path))
                }
                Exchange::Messages(plan, input, output) => {
                    Box::new(Run::new(group, turn, plan, input, output).in_round(round))
                }
            }
        }
    }
}
