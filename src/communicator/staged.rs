//! Calls that name device memory or a stream: how they are handed to the engine.

mod begun;
mod combined;
mod couriers;
#[cfg(test)]
mod tests;
mod ways;

use std::sync::Arc;

pub(super) use self::begun::{Begun, Copies, End, Launch, close_ahead};
use self::begun::{Close, Exit};
use self::combined::Combining;
use self::ways::Way;
use super::ahead;
use super::calls::{calling_collective, calling_message, lists_by_messages};
use super::context::{Context, Membership};
use super::survey::Survey;
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::driver::least_limit;
use crate::deadline::Deadline;
use crate::engine::group::{Calling, Group, Turn};
use crate::engine::operation::Operation;
use crate::engine::point::{self, Message, Pieces};
use crate::engine::staged::relay::Relay;
use crate::engine::staged::{
    self, Blocks, Cut, Entry, Exchange, Job, Lists, Shape, Side, Staged, StreamOrder,
};
use crate::error::Result;
use crate::reduce::Reducer;
use crate::signature::Signature;

/// A call that is staged, or ordered on a stream.
pub(super) struct StagedCall {
    pub(super) survey: Survey,
    pub(super) what: What,
}

pub(super) enum What {
    Collective(Checked),
    Message(Signature, Message),
}

impl StagedCall {
    pub(super) fn collective(survey: Survey, checked: Checked) -> StagedCall {
        StagedCall { survey, what: What::Collective(checked) }
    }

    pub(super) fn message(survey: Survey, signature: Signature, message: Message) -> StagedCall {
        StagedCall { survey, what: What::Message(signature, message) }
    }
}

impl Context {
    /// [`Context::run`] for a call that is staged.
    ///
    /// # Safety
    /// As [`Context::run`].
    pub(super) unsafe fn run_staged(
        &self,
        call: StagedCall,
        request: &Request,
        options: &Call,
    ) -> Result<Completion> {
        let Membership::Group(group) = self.membership() else {
            // SAFETY: the caller's promise.
            return unsafe { self.alone_staged(&call, request, options) }?.wait(Deadline::NEVER);
        };
        if call.survey.ordered {
            // SAFETY: the caller's promise.
            return unsafe { self.begin_staged(call, request, options) }?
                .close_alone()?
                .wait(Deadline::NEVER);
        }
        let calling = self.calling(&call, options)?;
        let (class, signature) = (calling.class, &calling.signature);
        let way = self.or_fail_in(class, self.way(&call, group, request, options, signature))?;
        let job = self.job(call, group, request, options, &way);
        let (job, _) = self.or_fail_in(class, job)?;
        // SAFETY: the caller's promise.
        let draft = self.or_fail_in(class, unsafe { Draft::new(job, way, *signature, true) })?;
        group.run(calling, |turn| draft.begin(group, turn))
    }

    /// [`Context::begin`] for a call that is staged.
    ///
    /// # Safety
    /// As [`Context::begin`].
    pub(super) unsafe fn begin_staged(
        &self,
        call: StagedCall,
        request: &Request,
        options: &Call,
    ) -> Result<Begun> {
        let Membership::Group(group) = self.membership() else {
            // SAFETY: the caller's promise.
            return unsafe { self.alone_staged(&call, request, options) }.map(Begun::closed);
        };
        let (stream, ordered) = (call.survey.stream.clone(), call.survey.ordered);
        let calling = self.calling(&call, options)?;
        let (class, signature) = (calling.class, &calling.signature);
        // Its stream waits for no call ahead of it.
        let until = || Deadline::after(options.timeout.unwrap_or(group.timeout()));
        let first = !ordered || !self.or_fail_in(class, ahead::make_room(&stream, group, until))?;
        let way = self.or_fail_in(class, self.way(&call, group, request, options, signature))?;
        let job = self.job(call, group, request, options, &way);
        let (job, exit) = self.or_fail_in(class, job)?;
        // SAFETY: the caller's promise.
        let draft = self.or_fail_in(class, unsafe { Draft::new(job, way, *signature, first) })?;
        let running = group.start(calling, |turn| draft.begin(group, turn))?;
        let work = Work::running(running.clone()).on_devices(stream.devices());
        let crowded = matches!(exit, Exit::Courier(_)) && couriers::is_crowded(&stream, group);
        Ok(Begun::new(work, ordered.then_some(Close { stream, running, exit }), crowded))
    }

    /// What a call is called with.
    fn calling(&self, call: &StagedCall, options: &Call) -> Result<Calling> {
        match &call.what {
            What::Message(signature, _) => Ok(calling_message(options, *signature)),
            What::Collective(checked) => {
                let mut checked = checked.clone();
                if let Some(operator) = checked.operator {
                    Reducer::new(checked.dtype, operator, self.size())?;
                }
                if options.algorithm.unwrap_or(0) != 0 {
                    // What is wrong with it is said now. It also notes the algorithm.
                    self.plans().plan(&mut checked, options, self.seat())?;
                }
                // Lists that not every rank knows are exchanged as from host memory; so ranks may differ in
                // their memory.
                checked.signature.device = call.survey.on_device && !checked.listed;
                Ok(calling_collective(options, options.compared(checked.signature)))
            }
        }
    }

    /// What the engine is to do, and what the stream is to wait for.
    fn job(
        &self,
        call: StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
        way: &Way,
    ) -> Result<(Job, Exit)> {
        let Survey { devices, device, on_device, ordered, .. } = &call.survey;
        let copier = match way {
            _ if !*on_device && !*ordered => None,
            // The relay's kernels already obey `max_blocks`.
            Way::Relayed(plan) => self.load_copier(devices, *device).map(|_| plan.kernels.clone()),
            _ => self.copier(devices, *device, options.max_blocks),
        };
        let mut combining =
            copier.as_ref().and_then(|_| self.combining(&call, group, options, (way, &request.counts)));
        let StagedCall { survey, what } = call;
        let Survey { devices, device, on_device, input, output, stream, .. } = survey;
        staged::prepare(&devices, device)?;
        let (mut errand, mut word) = (None, None);
        let entry = match (survey.ordered, &copier) {
            (true, Some(_)) => {
                let max_blocks = least_limit([self.max_blocks(), options.max_blocks]);
                let mut duty = way.duty(survey.input_bytes.max(survey.output_bytes), max_blocks);
                duty.combiner = duty.combiner.or(combining.as_ref().map(Combining::combiner));
                let apart = couriers::apart(group, matches!(what, What::Collective(_)));
                let courier = couriers::of(&stream, duty, apart)?;
                combining = combining.filter(|combining| combining.is_done_by(courier.courier()));
                Entry::of_courier(errand.insert(courier).courier(), group.endpoint())
            }
            (true, None) => Entry::of_caller(&stream, group.endpoint())?,
            (false, _) => Entry::of_front(&stream, group.endpoint())?,
        };
        let exit = match (&errand, &copier) {
            (Some(errand), Some(kernels)) => {
                Exit::Courier(Launch::new(errand.courier().clone(), kernels.clone()))
            }
            _ if survey.ordered && ahead::may_wait(&stream)? => {
                Exit::Word(word.insert(Arc::new(devices.word(device)?)).clone())
            }
            _ => Exit::Thread,
        };
        let asking = errand.is_none().then(|| devices.note_asking());
        let order = StreamOrder { devices, device, entry, errand, exit: word, copier, asking };
        let shape = |bytes, blocks| Shape { bytes, blocks: Blocks::Even(blocks) };
        let job = match what {
            What::Message(_, message) => {
                let sends = matches!(message, Message::Send { .. });
                // A receive has to be posted before the stream has come to it.
                let unstaged = !on_device && sends;
                let piece = self.cuda().piece_bytes();
                let bytes = survey.input_bytes.max(survey.output_bytes);
                Job {
                    order,
                    input: Side { place: input, shape: shape(survey.input_bytes, 1) },
                    output: Side { place: output, shape: shape(survey.output_bytes, 1) },
                    forwards: false,
                    combined: None,
                    unstaged,
                    element: 1,
                    cut: if unstaged { Cut::whole() } else { point::cut(bytes, piece) },
                    abreast: staged::MESSAGE_ABREAST,
                    exchange: exchange_message(group, message, options.tag.unwrap_or(0), piece),
                }
            }
            What::Collective(checked) => {
                let size = group.size() as usize;
                let (reads, writes) = match checked.signature.kind {
                    Kind::Scatter | Kind::ReduceScatter => (size, 1),
                    Kind::Allgather | Kind::Gather => (1, size),
                    Kind::Alltoall => (size, size),
                    _ => (1, 1),
                };
                let (element, piece) = (checked.dtype.size(), self.cuda().piece_bytes());
                let shape = |bytes, blocks| match &request.counts {
                    // A side of one block is this rank's own block.
                    Counts::Blocks(counts) => {
                        let own = checked.rank as usize;
                        let counts = if blocks == 1 { &counts[own..=own] } else { counts };
                        Shape { bytes, blocks: Blocks::Listed(counts.into()) }
                    }
                    _ => shape(bytes, blocks),
                };
                let cut = match &request.counts {
                    Counts::Uniform(count) if on_device => {
                        Cut::even(*count, reads.max(writes) as u64, element, piece)
                    }
                    Counts::Blocks(counts) if on_device && !checked.listed => {
                        Cut::listed(counts, element, piece)
                    }
                    // Ranks with host memory do not cut, and not every rank knows other lists.
                    _ => Cut::whole(),
                };
                // A broadcast's root has its result already, unless it is to go elsewhere.
                let forwards = checked.signature.kind == Kind::Broadcast && survey.input_bytes > 0;
                let written = if forwards && checked.alias.is_some() { 0 } else { survey.output_bytes };
                let read = if combining.is_some() { 0 } else { survey.input_bytes };
                Job {
                    order,
                    input: Side { place: input, shape: shape(read, reads) },
                    output: Side { place: output, shape: shape(written, writes) },
                    forwards,
                    combined: combining.as_ref().map(Combining::combined),
                    unstaged: !on_device,
                    element,
                    cut,
                    abreast: 1,
                    exchange: match combining {
                        Some(combining) => combining.exchange(),
                        None => self.exchange_pieces(request, options),
                    },
                }
            }
        };
        Ok((job, exit))
    }

    /// Exchanges pieces as calls on host memory.
    fn exchange_pieces(&self, request: &Request, options: &Call) -> Exchange {
        let (context, request, options) = (self.clone(), request.clone(), options.clone());
        let by_messages = matches!(self.membership(), Membership::Group(group) if lists_by_messages(group));
        Box::new(move |group, turn, piece, input, output| {
            let counts = match &request.counts {
                counts if piece.whole => counts.clone(),
                Counts::Blocks(counts) => {
                    Counts::Blocks(counts.iter().map(|&count| piece.of(count).1).collect())
                }
                _ => Counts::Uniform(piece.len),
            };
            let request = Request { input, output, counts, ..request.clone() };
            let mut checked = Checked::new(&request, group.rank(), group.size())?;
            // SAFETY: the engine gives memory of the piece's size, and keeps it until the operation has
            // ended.
            unsafe {
                let make = context.make(group, &mut checked, by_messages, request.operator, &options, &[])?;
                Ok(make.operation(group, turn))
            }
        })
    }
}

/// The operation of a call that is staged, before its turn.
enum Draft {
    Staged(Staged),
    /// Begins as soon as it has its turn.
    Receive(Staged),
    Relay(Box<Relay>),
    Lists(Lists),
}

impl Draft {
    /// Has what the call needs of the driver made: others wait for nobody's turn meanwhile. Whether it is the
    /// `first` that its stream waits for.
    ///
    /// # Safety
    /// As [`Staged::new`].
    unsafe fn new(job: Job, way: Way, signature: Signature, first: bool) -> Result<Draft> {
        let devices = Arc::as_ptr(&job.order.devices);
        let streams_wait: &dyn Fn() -> bool = &|| ahead::any_waits(devices);
        if let Way::Listed(routes) = way {
            // SAFETY: the caller's promise.
            return unsafe { Lists::new(job, routes) }.provided(streams_wait).map(Draft::Lists);
        }
        // SAFETY: the caller's promise.
        let staged = unsafe { Staged::new(job) };
        match (signature.kind, way) {
            (Kind::Receive | Kind::ReceiveAny, _) => staged.provided(true, streams_wait).map(Draft::Receive),
            (_, Way::Relayed(plan)) => {
                Relay::new(staged, *plan, first, streams_wait).map(|relay| Draft::Relay(Box::new(relay)))
            }
            _ => staged.provided(first, streams_wait).map(Draft::Staged),
        }
    }

    fn begin(self, group: &Group, turn: &Turn) -> Box<dyn Operation> {
        match self {
            Draft::Staged(staged) => Box::new(staged.at(turn)),
            Draft::Receive(staged) => Box::new(staged.at(turn).begun(group)),
            Draft::Relay(relay) => Box::new(relay.at(turn)),
            Draft::Lists(lists) => Box::new(lists.at(turn)),
        }
    }
}

/// Exchanges a message, in pieces of `piece` bytes if it is longer.
fn exchange_message(group: &Arc<Group>, message: Message, tag: u64, piece: usize) -> Exchange {
    let place = match message {
        Message::Send { to, .. } => Some(group.sends().queue(to, tag)),
        _ => None,
    };
    let mut pieces = Pieces::new(message, piece, place);
    Box::new(move |group, turn, piece, input, output| {
        let address = if input.is_null() { output } else { input };
        // SAFETY: the engine gives memory of the piece's size, and keeps it until the operation has ended.
        unsafe { pieces.next(group, turn, piece, address) }
    })
}
