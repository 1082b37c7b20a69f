//! Collectives that GPUs do alone, gathered to be launched together: what is wrong with a call is told as it is added, where its
//! memory is when all are given. Nothing is done before that.

use std::fmt;
use std::sync::Arc;

use super::{caller, collective, fits};
use crate::collective::checked::Uniform;
use crate::collective::request::{Kind, Request};
use crate::communicator::Call;
use crate::communicator::context::{Context, Place};
use crate::communicator::survey::{Located, Spans};
use crate::cuda::driver::Location;
use crate::engine::device::{Asked, DeviceExchange, Way};
use crate::engine::group::Group;
use crate::error::{Result, fail};
use crate::reduce::Operator;

/// Collectives of one context that its GPUs do alone: given to their streams together, in their order and in few launches. All
/// ranks gather the same calls.
pub struct Launches {
    group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    calls: Vec<Asked>,
    /// Where each has its memory.
    spans: Vec<Spans>,
}

/// What has become of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// It is the call of this number.
    As(usize),
    /// It has no elements, so there is nothing to do.
    Empty,
    /// The GPUs do not do it alone: it is to be started another way. The answer is the same on every rank.
    Not,
}

/// How many calls there is room for at first.
const ROOM: usize = 32;

impl Context {
    /// Where collectives are gathered of this context; `None` if its GPUs do not do them alone, or have not agreed on that:
    /// see [`Context::connect_device`].
    pub fn launches(&self) -> Option<Launches> {
        let Place::Group(group) = self.place() else { return None };
        let Some(Way::Exchange(exchange)) = group.devices() else { return None };
        let (group, exchange) = (group.clone(), exchange.clone());
        let (calls, spans) = (Vec::with_capacity(ROOM), Vec::with_capacity(ROOM));
        Some(Launches { group, exchange, calls, spans })
    }
}

impl Launches {
    /// Adds a call on device memory of this context, checked but for where its memory is.
    pub fn add(&mut self, request: &Request, call: &Call) -> Result<Added> {
        if !fits(request, call)
            || request.kind.point_to_point()
            || call.algorithm.unwrap_or(0) != 0
            || !self.exchange.serves(request.kind, request.dtype, &request.operator)
        {
            return Ok(Added::Not);
        }
        let Some(uniform) = Uniform::new(request, self.group.rank(), self.group.size())? else {
            return Ok(Added::Not);
        };
        if uniform.signature.count == 0 {
            return Ok(Added::Empty);
        }
        let (job, signature) = collective(request, call, &uniform);
        self.calls.push(Asked { signature, job, caller: caller(call, "the memory") });
        self.spans.push(Spans::of_buffers(request.kind, &uniform.buffers));
        Ok(Added::As(self.calls.len() - 1))
    }

    /// The operator of the call of this number, a pre-multiplied sum, is known by now.
    pub fn set_operator(&mut self, number: usize, operator: Operator) {
        if let Some(call) = self.calls.get_mut(number) {
            call.job.operator = operator;
        }
    }

    /// What was added: kinds, and bytes of what they count.
    pub fn sizes(&self) -> impl Iterator<Item = (Kind, u64)> {
        self.calls.iter().map(|Asked { job, .. }| (job.kind, job.count * job.dtype.size() as u64))
    }

    /// Gives the calls to their streams, all of which can be given: the first error. What comes of them is known when their
    /// streams have done them, or from [`Context::failure`]; none comes behind one that failed.
    ///
    /// # Safety
    /// The memory of the calls is valid for what they access, and their streams live, until they have ended.
    pub unsafe fn give(self, context: &Context) -> Result<()> {
        let Launches { group, exchange, mut calls, spans } = self;
        if !matches!(context.place(), Place::Group(own) if Arc::ptr_eq(own, &group)) {
            fail!(Internal, "calls of '{}' are given to '{}'", group.name(), context.name());
        }
        let (mut known, mut first, mut refused) = (None, None, Vec::new());
        for (place, (call, spans)) in calls.iter_mut().zip(spans).enumerate() {
            match locate(context, &exchange, spans, &mut known) {
                Ok(name) => call.caller.memory = name,
                Err(error) => {
                    first.get_or_insert(error);
                    refused.push(place);
                }
            }
        }
        for place in refused.into_iter().rev() {
            calls.remove(place);
        }
        // SAFETY: the caller's promise.
        let given = unsafe { exchange.enqueue_several(&group, &calls) };
        first.map_or(given, Err)
    }
}

/// The argument that names the memory, which the exchange reaches. `known` is what CUDA has said of memory before.
fn locate(
    context: &Context,
    exchange: &DeviceExchange,
    spans: Spans,
    known: &mut Option<Location>,
) -> Result<&'static str> {
    if let Some(location) = known
        && location.device == exchange.device()
        && let Some(name) = spans.within(location)
    {
        return Ok(name);
    }
    let located = Located::new(spans, context.cuda(), *known)?;
    *known = located.any().or(*known);
    let (device, name) = located.reachable(context.cuda())?;
    context.check_device(exchange, device, name)?;
    Ok(name)
}

impl fmt::Debug for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Launches({} of '{}')", self.calls.len(), self.group.name())
    }
}
