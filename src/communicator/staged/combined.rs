//! Reductions to one of two ranks: what the other one sends is all that the root needs of others. Its courier
//! combines that with the root's own input where this lies, so the host neither loads the one nor reads the
//! other.

use std::sync::Arc;

use super::{StagedCall, Way, What};
use crate::collective::request::{Counts, Kind};
use crate::communicator::Call;
use crate::communicator::context::Context;
use crate::cuda::courier::{Combiner, Courier};
use crate::engine::executor::{Plan, Run};
use crate::engine::group::Group;
use crate::engine::staged::relay::Combine;
use crate::engine::staged::{Combined, Exchange, Place};
use crate::reduce::Operator;

/// Up to so many bytes a courier that carries is there sooner than one that combines gains. Two H200s as two
/// hosts, on a stream, combined and by the processor: 16 KiB 18.9 to 19.1 and 19.0 to 20.6 µs, 32 KiB 20.5 to
/// 21.5 and 26.9 to 27.2, 64 KiB 32.5 and 37.1 to 39.6.
const SHORT: usize = 16 * 1024;

/// What a root does whose courier combines.
pub(super) struct Combining {
    combine: Combine,
    combiner: Combiner,
    /// What the other rank sends is received, and no more.
    plan: Arc<Plan>,
    own: u64,
    own_is_left: bool,
}

impl Combining {
    /// What the courier has to be able to do.
    pub(super) fn combiner(&self) -> Combiner {
        self.combiner
    }

    /// Whether it can: others, which do something else, may have joined it first.
    pub(super) fn is_done_by(&self, courier: &Courier) -> bool {
        courier.combines_by(self.combiner)
    }

    /// What it is given.
    pub(super) fn combined(&self) -> Combined {
        Combined { combine: self.combine, own: self.own, own_is_left: self.own_is_left }
    }

    /// Receives what the other rank sends.
    pub(super) fn exchange(self) -> Exchange {
        Box::new(move |group, turn, _, _, output| {
            // SAFETY: the engine gives memory of the piece's size, the only one, and keeps it until the
            // operation has ended. The plan reads no input.
            Ok(Box::new(unsafe { Run::new(group, turn, self.plan.clone(), output, output) }))
        })
    }
}

impl Context {
    /// How this rank's courier combines what it is sent, if it may and this rank is the root. The other ranks
    /// need not know.
    pub(super) fn combining(
        &self,
        call: &StagedCall,
        group: &Arc<Group>,
        options: &Call,
        (way, counts): (&Way, &Counts),
    ) -> Option<Combining> {
        let (Way::Staged, What::Collective(checked), survey) = (way, &call.what, &call.survey) else {
            return None;
        };
        let is_root = checked.signature.kind == Kind::Reduce && checked.signature.root == group.rank();
        if !is_root || group.size() != 2 || !survey.ordered || group.direct().is_some() {
            return None;
        }
        let (Counts::Uniform(count), Place::Device(own), Place::Device(output)) =
            (counts, survey.input, survey.output)
        else {
            return None;
        };
        // The other's scalar is not known here.
        let operator = checked
            .operator
            .filter(|operator| !matches!(operator, Operator::Custom(_) | Operator::PreMulSum(_)))?;
        let (dtype, element) = (checked.dtype, checked.dtype.size());
        let bytes = *count as usize * element;
        let gains = if cfg!(test) { bytes > 0 } else { bytes > SHORT };
        if !gains
            || bytes > self.cuda().piece_bytes()
            || [own, output].iter().any(|address| address % element as u64 != 0)
        {
            return None;
        }
        // Tests name kernels.
        let kernels = self.cuda().copier()?;
        let combiner = kernels.combiner(dtype, operator)?;
        kernels.prepare(&survey.devices, survey.device, dtype, operator).ok()?;
        let (plan, _) = self.plans().plan(&mut checked.clone(), options, self.seat()).ok()?;
        let plan = plan.received()?;
        let combine = Combine { dtype, operator };
        Some(Combining { combine, combiner, plan, own, own_is_left: group.rank() == 0 })
    }
}
