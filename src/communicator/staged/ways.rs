//! Which way a call goes by way of the host.

use std::sync::Arc;

use super::{StagedCall, What};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::Call;
use crate::communicator::calls::{class_of, exchange_directly, lists_by_messages};
use crate::communicator::context::Context;
use crate::communicator::cuda::Cuda;
use crate::communicator::plans::planned_apart;
use crate::cuda::courier::Duty;
use crate::cuda::driver::least_limit;
use crate::cuda::local::limited;
use crate::engine::group::Group;
use crate::engine::staged::Routes;
use crate::engine::staged::relay::{
    Combine, Gather, Limits, MAX_WIRED, MeetingPlace, RelayPlan, Route, Seat,
};
use crate::error::Result;
use crate::reduce::Operator;
use crate::schedule::Algorithm;
use crate::signature::Signature;

/// How a call by way of the host goes.
pub(super) enum Way {
    /// In pieces that are exchanged as on host memory.
    Staged,
    /// The devices do the work.
    Relayed(Box<RelayPlan>),
    /// Its lists may differ from rank to rank: message by message.
    Listed(Routes),
}

impl Way {
    /// What a courier of the call has to do, which moves so many bytes one way, by at most so many blocks.
    pub(super) fn duty(&self, bytes: usize, max_blocks: u32) -> Duty {
        let Way::Relayed(plan) = self else { return Duty { bytes, max_blocks, ..Duty::default() } };
        let networked = matches!(plan.place, MeetingPlace::Messages(_));
        Duty { bytes, networked, combiner: plan.combiner(), max_blocks }
    }
}

/// Tests name kernels, or relay nothing.
fn relays(cuda: &Cuda, group: &Group) -> bool {
    group.endpoint().all_relay() && (!cfg!(test) || cuda.copier().is_some())
}

impl Context {
    /// How a call goes. The same messages on every rank.
    pub(super) fn way(
        &self,
        call: &StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
        signature: &Signature,
    ) -> Result<Way> {
        if let Some(routes) = self.plan_lists(call, group, options)? {
            return Ok(Way::Listed(routes));
        }
        let relayed = self.plan_relay(call, group, request, options, signature);
        Ok(relayed.map_or(Way::Staged, |plan| Way::Relayed(Box::new(plan))))
    }

    /// What a call moves whose lists may differ from rank to rank, if it is to go message by message. No
    /// other rank need know, since the messages are those of host memory: what is short goes at once, as do
    /// calls whose ranks read each other's memory instead, those of algorithms that pass several blocks on
    /// together, and all-to-alls in place, in which what comes would overwrite what has not gone.
    fn plan_lists(&self, call: &StagedCall, group: &Arc<Group>, options: &Call) -> Result<Option<Routes>> {
        let (What::Collective(checked), survey) = (&call.what, &call.survey) else { return Ok(None) };
        let short = survey.input_bytes + survey.output_bytes <= self.cuda().piece_bytes();
        let in_place = checked.signature.kind == Kind::Alltoall && checked.alias.is_some();
        if !checked.listed || !survey.on_device || short || in_place {
            return Ok(None);
        }
        if exchange_directly(group, checked, lists_by_messages(group), options, class_of(options))?.is_some()
        {
            return Ok(None);
        }
        let (plan, algorithm) = planned_apart(checked, options, self.seat())?;
        if !matches!(algorithm, Algorithm::Linear | Algorithm::Pairwise) {
            return Ok(None);
        }
        Routes::new(plan, group.rank(), group.size(), self.cuda().portion_bytes()).map(Some)
    }

    /// How a call is relayed, if it is one that may be: ordered, its algorithm left to the library, one count
    /// for all ranks. The same answer on every rank.
    fn plan_relay(
        &self,
        call: &StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
        signature: &Signature,
    ) -> Option<RelayPlan> {
        let What::Collective(checked) = &call.what else { return None };
        let Counts::Uniform(count) = request.counts else { return None };
        let automatic = options.tag.is_none() && options.algorithm.unwrap_or(0) == 0;
        if !automatic || !signature.device {
            return None;
        }
        let place = || match group.direct() {
            Some(direct) => Some(MeetingPlace::Boards(direct.clone())),
            None if group.size() <= MAX_WIRED => Some(MeetingPlace::Messages(self.gather_words(options))),
            None => None,
        };
        let limits = match group.size() == 2 && group.direct().is_none() {
            true => self.cuda().limits().between_two(signature.kind),
            false => self.cuda().limits(),
        };
        self.plan_among(group, group.relay(), place, checked, (count, options.max_blocks), limits)
    }

    /// How the crew of a seat relays a call of its own, of `count` elements a block and at most `max_blocks`
    /// blocks a kernel, if it is one that may be. The same answer on all of them.
    pub(in crate::communicator) fn plan_among(
        &self,
        group: &Group,
        seat: &Arc<Seat>,
        place: impl FnOnce() -> Option<MeetingPlace>,
        checked: &Checked,
        (count, max_blocks): (u64, u32),
        limits: Limits,
    ) -> Option<RelayPlan> {
        let cuda = self.cuda();
        if !relays(cuda, group) {
            return None;
        }
        let combine = match checked.operator {
            Some(Operator::Custom(_)) => return None,
            Some(operator) => Some(Combine { dtype: checked.dtype, operator }),
            None => None,
        };
        let (crew, Signature { kind, root, .. }) = (seat.crew(), checked.signature);
        let (element, in_place) = (checked.dtype.size(), checked.alias.is_some());
        let route = Route::new(kind, crew.number, crew.size, root, count, element, in_place, limits)?;
        let place = place()?;
        let kernels = limited(cuda.kernels(), least_limit([self.max_blocks(), max_blocks]));
        Some(RelayPlan { seat: seat.clone(), place, route, kernels, combine })
    }

    /// Gathers a few bytes of every rank in the course of a call.
    fn gather_words(&self, options: &Call) -> Gather {
        let (context, options) = (self.clone(), options.clone());
        Arc::new(move |group, turn, input, output, bytes| {
            let request = Request::gathering(input, output, bytes);
            let mut checked = Checked::new(&request, group.rank(), group.size())?;
            // SAFETY: the meeting keeps both until the operation has ended.
            unsafe {
                let make = context.make(group, &mut checked, false, request.operator, &options, &[])?;
                Ok(make.operation(group, turn))
            }
        })
    }
}
