//! Calls that GPUs do alone, gathered to be launched together: what is wrong with one is told as it is added,
//! where its memory is once all are there, and then they are given to their streams. Nothing is done before
//! that.

use std::sync::Arc;
use std::{fmt, mem};

use super::{Together, caller, collective, fits};
use crate::collective::checked::Uniform;
use crate::collective::request::{Kind, Request};
use crate::communicator::Call;
use crate::communicator::context::{Context, Membership};
use crate::communicator::survey::{Located, Spans};
use crate::cuda::driver::{Location, StreamHandle};
use crate::cuda::exchange::Point;
use crate::engine::device::{Asked, Caller, DeviceExchange, Way};
use crate::engine::group::Group;
use crate::engine::wire::Class;
use crate::error::{Result, fail};
use crate::reduce::Operator;
use crate::signature::Signature;

/// Calls of one context that its GPUs do alone, as they are gathered.
#[must_use = "nothing is given before it is asked for"]
pub struct Launches {
    group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    collectives: Calls<Asked>,
    messages: Calls<Message>,
}

/// The same, once the memory of all is found. Collectives are given to their streams together, in their order
/// and in few launches: all ranks gather the same ones. Sends and receives are one launch, whatever stands
/// between them.
#[must_use = "nothing is given before it is asked for"]
pub struct Ready {
    group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    collectives: Vec<Asked>,
    messages: Vec<Message>,
}

/// Calls, and where each has its memory.
struct Calls<C> {
    calls: Vec<C>,
    spans: Vec<Spans>,
}

/// A send or a receive.
struct Message {
    point: Point,
    signature: Signature,
    caller: Caller,
}

/// What has become of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// It is the collective of this number, or the send or receive.
    As(usize),
    /// It has no elements, so there is nothing to do.
    Empty,
    /// The GPUs do not do it alone: it is to be started another way. The answer is the same on every rank.
    Not,
}

/// How many calls there is room for when there is one.
const ROOM: usize = 32;

impl Context {
    /// Where calls of this context are gathered; `None` if its GPUs do nothing alone, or have not agreed on
    /// that: see [`Context::connect_device`].
    pub fn launches(&self) -> Option<Launches> {
        let Membership::Group(group) = self.membership() else { return None };
        let Some(Way::Exchange(exchange)) = group.devices() else { return None };
        let (group, exchange) = (group.clone(), exchange.clone());
        Some(Launches { group, exchange, collectives: Calls::NONE, messages: Calls::NONE })
    }
}

impl<C> Calls<C> {
    const NONE: Calls<C> = Calls { calls: Vec::new(), spans: Vec::new() };

    /// Adds one; its number.
    fn add(&mut self, call: C, spans: Spans) -> usize {
        if self.calls.is_empty() {
            self.calls.reserve(ROOM);
            self.spans.reserve(ROOM);
        }
        self.calls.push(call);
        self.spans.push(spans);
        self.calls.len() - 1
    }

    /// The calls, of `class`, each with the argument that names its memory noted in its `caller`; or what is
    /// wrong with the first whose memory `exchange` does not reach.
    ///
    /// # Safety
    /// Their streams live.
    unsafe fn located(
        self,
        context: &Context,
        exchange: &DeviceExchange,
        class: Class,
        caller: impl Fn(&mut C) -> &mut Caller,
    ) -> Result<Vec<C>> {
        let Calls { mut calls, spans } = self;
        let mut known = None;
        for (call, spans) in calls.iter_mut().zip(spans) {
            let caller = caller(call);
            // SAFETY: the caller's promise.
            caller.memory = unsafe {
                let found = locate(context, exchange, spans, caller.stream, &mut known);
                context.or_fail_on(caller.stream, class, found)
            }?;
        }
        Ok(calls)
    }
}

impl Launches {
    /// Adds a call on device memory of `context`, whose launches these are, checked but for where its memory
    /// is.
    pub fn add(&mut self, context: &Context, request: &Request, call: &Call) -> Result<Added> {
        self.check_context(context)?;
        if !fits(request, call) || call.algorithm.unwrap_or(0) != 0 {
            return Ok(Added::Not);
        }
        // What their memory is called is known when that is.
        let caller = caller(call, "the memory");
        if request.kind.point_to_point() {
            if !self.exchange.serves_points() {
                return Ok(Added::Not);
            }
            let (point, signature, spans) = context.device_point(request, call)?;
            return Ok(Added::As(self.messages.add(Message { point, signature, caller }, spans)));
        }
        if !self.exchange.serves(request.kind, request.dtype, &request.operator) {
            return Ok(Added::Not);
        }
        let Some(uniform) = Uniform::new(request, self.group.rank(), self.group.size())? else {
            return Ok(Added::Not);
        };
        if uniform.signature.count == 0 {
            return Ok(Added::Empty);
        }
        let (job, signature) = collective(request, call, &uniform);
        let spans = Spans::of_buffers(request.kind, &uniform.buffers);
        Ok(Added::As(self.collectives.add(Asked { signature, job, caller }, spans)))
    }

    /// Whether nothing was added that is to be given.
    pub fn is_empty(&self) -> bool {
        self.collectives.calls.is_empty() && self.messages.calls.is_empty()
    }

    /// Whether collectives were added.
    pub fn has_collectives(&self) -> bool {
        !self.collectives.calls.is_empty()
    }

    /// What was added: kinds, and bytes of what they count.
    pub fn sizes(&self) -> impl Iterator<Item = (Kind, u64)> {
        let collective = |Asked { job, .. }: &Asked| (job.kind, job.count * job.dtype.size() as u64);
        let message = |Message { point, signature, .. }: &Message| (signature.kind, point.bytes);
        self.collectives.calls.iter().map(collective).chain(self.messages.calls.iter().map(message))
    }

    /// Finds the memory of the calls. If that of one is refused, none is to be given, and this is its error:
    /// what stands behind it would take its place on the other ranks, and what stands before it would be
    /// called twice by whoever gathers them all again.
    ///
    /// # Safety
    /// The streams of the calls live.
    pub unsafe fn located(self, context: &Context) -> Result<Ready> {
        self.check_context(context)?;
        let Launches { group, exchange, collectives, messages } = self;
        // A message that is refused keeps the collectives from being given, too.
        let class = if collectives.calls.is_empty() { Class::PointToPoint } else { Class::Ordered };
        // SAFETY: the caller's promise.
        let (collectives, messages) = unsafe {
            (
                collectives.located(context, &exchange, class, |call| &mut call.caller)?,
                messages.located(context, &exchange, class, |message| &mut message.caller)?,
            )
        };
        Ok(Ready { group, exchange, collectives, messages })
    }

    fn check_context(&self, context: &Context) -> Result<()> {
        if matches!(context.membership(), Membership::Group(own) if Arc::ptr_eq(own, &self.group)) {
            return Ok(());
        }
        fail!(Internal, "a call of '{}' is not one of '{}'", context.name(), self.group.name())
    }
}

impl Ready {
    /// The factor of the collective of this number, a pre-multiplied sum, is known by now.
    pub fn set_factor(&mut self, number: usize, factor: f64) -> Result<()> {
        match self.collectives.get_mut(number).map(|call| &mut call.job.operator) {
            Some(Operator::PreMulSum(old)) => *old = factor,
            _ => fail!(Internal, "call {number} is no pre-multiplied sum"),
        }
        Ok(())
    }

    /// Gives the collectives to their streams; behind one that cannot be given, none is. What comes of them
    /// is known when their streams have done them, or from [`Context::failure`].
    ///
    /// # Safety
    /// The memory of the calls is valid for what they access, and their streams live, until they have ended.
    pub unsafe fn give_collectives(&mut self) -> Result<()> {
        let calls = mem::take(&mut self.collectives);
        // SAFETY: the caller's promise.
        unsafe { self.exchange.enqueue_several(&self.group, &calls) }
    }

    /// Gives the sends and receives to their streams, as [`Ready::give_collectives`], and after the
    /// collectives of all contexts that are given something together: so they are in one order everywhere.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn give_messages(&mut self) -> Result<()> {
        let messages = mem::take(&mut self.messages);
        let Some(first) = messages.first() else { return Ok(()) };
        let (group, exchange) = (self.group.clone(), self.exchange.clone());
        let mut together = Together::of(group, exchange, first.caller, messages.len());
        for Message { point, signature, caller } in messages {
            together.push(point, signature, caller.stream);
        }
        // SAFETY: the caller's promise.
        unsafe { together.give() }.map(drop)
    }
}

/// The argument that names the memory, which the exchange reaches. `known` is what CUDA has said of memory
/// before.
///
/// # Safety
/// The stream lives.
unsafe fn locate(
    context: &Context,
    exchange: &DeviceExchange,
    spans: Spans,
    stream: Option<StreamHandle>,
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
    // SAFETY: the caller's promise.
    let located = unsafe { located.in_graph(context.cuda(), stream) }?;
    let (device, name) = located.reachable(context.cuda())?;
    context.check_device(exchange, device, name)?;
    Ok(name)
}

impl fmt::Debug for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (collectives, messages) = (self.collectives.calls.len(), self.messages.calls.len());
        write!(f, "Launches({collectives} collectives and {messages} messages of '{}')", self.group.name())
    }
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (collectives, messages) = (self.collectives.len(), self.messages.len());
        write!(f, "Ready({collectives} collectives and {messages} messages of '{}')", self.group.name())
    }
}
