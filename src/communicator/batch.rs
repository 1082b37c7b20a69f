//! Operations that start together.

use super::Call;
use super::Completion;
use super::beside::{self, Beside};
use super::context::Context;
use super::device::{self, Candidate, PointCall, Together};
use super::hosts::Composed;
use super::staged::{Begun, Copies, End};
use super::turns::{begin_in_turns, refused};
use super::work::Work;
use crate::collective::request::{Kind, Request};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// An operation that has begun, for which its stream does not wait yet.
#[must_use = "the stream waits for the operation once this is closed"]
pub struct Pending(State);

enum State {
    Begun(Begun),
    /// A send or a receive between GPUs: given to its stream in one piece with those that are closed with it.
    Point {
        point: PointCall,
        /// Whether somebody wants to know when it is done.
        awaited: bool,
    },
    /// A call between hosts, which is given to its stream in turns with those of other ranks.
    Composed {
        call: Box<Composed>,
        /// As above.
        awaited: bool,
    },
}

/// Operations that are closed together: their streams have all that they are given. A work for each once the
/// thread has waited for the rest.
#[must_use = "what no stream may wait for is waited for"]
pub struct Closing {
    works: Vec<Option<Result<Work>>>,
    /// What the thread waits for, and its place.
    waits: Vec<(usize, Begun)>,
    /// As [`Begun::is_crowded`].
    crowded: Vec<usize>,
    end: End,
    copies: Copies,
}

impl From<Work> for Pending {
    fn from(work: Work) -> Pending {
        Begun::closed(work).into()
    }
}

impl From<Begun> for Pending {
    fn from(begun: Begun) -> Pending {
        Pending(State::Begun(begun))
    }
}

impl Pending {
    pub(super) fn point(point: PointCall) -> Pending {
        Pending(State::Point { point, awaited: true })
    }

    pub(super) fn composed(call: Box<Composed>) -> Pending {
        Pending(State::Composed { call, awaited: true })
    }

    /// The call between hosts that it is, and whether that is awaited.
    pub(super) fn as_composed(&self) -> Option<(&Composed, bool)> {
        match &self.0 {
            State::Composed { call, awaited } => Some((call, *awaited)),
            _ => None,
        }
    }

    /// Whether it is a send or a receive that waits for others.
    pub(super) fn is_point(&self) -> bool {
        matches!(self.0, State::Point { .. })
    }

    /// A call between hosts is given to its stream now.
    pub(super) fn given(self) -> Result<Pending> {
        match self.as_composed() {
            // SAFETY: who began it has promised that its memory and its stream last until it has ended.
            Some((call, awaited)) => unsafe { call.start(awaited) }.map(Pending::from),
            None => Ok(self),
        }
    }

    /// Nobody waits for it: of what the stream does by itself the work says that it is done at once, and the
    /// context has its failure.
    pub(super) fn unawaited(self) -> Pending {
        Pending(match self.0 {
            State::Point { point, .. } => State::Point { point, awaited: false },
            State::Composed { call, .. } => State::Composed { call, awaited: false },
            state @ State::Begun(_) => state,
        })
    }

    /// Has the call's stream wait for the operation, if the call named one. Returns at once; where streams
    /// may not wait for the host, when the operation is complete.
    pub fn close(self) -> Result<Work> {
        self.end(End::Close)
    }

    /// As [`Pending::close`], in the way of [`Pending::complete_all`].
    pub fn complete(self) -> Result<Work> {
        self.end(End::Complete)
    }

    fn end(self, end: End) -> Result<Work> {
        let begun = match self.0 {
            State::Begun(begun) => begun,
            state => {
                // One gives one.
                let ended = Pending::end_all(vec![Pending(state)], end).wait().pop();
                return ended.unwrap_or_else(|| Ok(Work::ended(Ok(Completion::default()))));
            }
        };
        let (is_crowded, mut copies) = (begun.is_crowded(), Copies::default());
        let work = begun.end(end, &mut copies);
        if let (true, Ok(work)) = (is_crowded, &work) {
            // Its failure is the work's to tell.
            let _ = work.wait(Deadline::NEVER);
        }
        copies.wait();
        work
    }

    /// As [`Pending::close`], but what no stream may wait for is left to run.
    pub(super) fn part(self) -> Result<Work> {
        match self.0 {
            State::Begun(begun) => begun.part(),
            state => Pending(state).close(),
        }
    }

    /// Closes all of them, as [`start_together`] does: a work for each, in the order of the list.
    pub fn close_all(all: Vec<Pending>) -> Vec<Result<Work>> {
        Pending::closing_all(all).wait()
    }

    /// As [`Pending::close_all`], but nothing is waited for yet: of who closes several lists, which may need
    /// each other.
    pub fn closing_all(all: Vec<Pending>) -> Closing {
        Pending::end_all(all, End::Close)
    }

    /// As [`Pending::close_all`], but what side streams do is complete when this returns, and streams are not
    /// made to wait for it (but of collectives behind which GPUs had their part in another as it began). For
    /// programs that may have the driver wait for the device meanwhile, from any thread: see
    /// [`Call::stream`].
    pub fn complete_all(all: Vec<Pending>) -> Vec<Result<Work>> {
        Pending::completing_all(all).wait()
    }

    /// As [`Pending::closing_all`], in the way of [`Pending::complete_all`].
    pub fn completing_all(all: Vec<Pending>) -> Closing {
        Pending::end_all(all, End::Complete)
    }

    fn end_all(all: Vec<Pending>, end: End) -> Closing {
        let (count, mut copies) = (all.len(), Copies::default());
        let mut works: Vec<Option<Result<Work>>> = Vec::new();
        works.resize_with(count, || None);
        let (mut begun, mut points) = (Vec::new(), Vec::<Together>::new());
        for (place, Pending(state)) in all.into_iter().enumerate() {
            match state {
                State::Begun(one) => begun.push((place, one)),
                // SAFETY: who began it has promised that its memory and its stream last until it has ended.
                State::Composed { call, awaited } => works[place] = Some(unsafe { call.start(awaited) }),
                State::Point { point, awaited } => {
                    let known = points.iter().position(|others| others.takes(&point));
                    let at = known.unwrap_or_else(|| {
                        points.push(Together::new(&point, count - place));
                        points.len() - 1
                    });
                    points[at].add(place, &point, awaited);
                }
            }
        }
        let (mut waits, mut crowded) = (Vec::new(), Vec::new());
        // These come first on their streams: on every rank, whatever the order of its list.
        let (apart, others): (Vec<_>, Vec<_>) = begun.into_iter().partition(|(_, one)| one.is_apart());
        for (place, one) in apart.into_iter().chain(others) {
            if one.is_crowded() {
                crowded.push(place);
            }
            if one.keeps_waiting(end) {
                waits.push((place, one));
            } else {
                works[place] = Some(one.end(end, &mut copies));
            }
        }
        // Behind all collectives that are given to their streams, whichever way these go, and before anything
        // that the host waits for, which may need them.
        for together in points {
            // SAFETY: who began them has promised that their memory and streams last until they have ended.
            let work = unsafe { together.give() };
            together.places().iter().for_each(|&place| works[place] = Some(work.clone()));
        }
        Closing { works, waits, crowded, end, copies }
    }
}

impl Closing {
    /// Waits for what no stream may wait for. Not before all are given that this may need: they may be ranks
    /// of one thread. The works are in the order of the list.
    pub fn wait(self) -> Vec<Result<Work>> {
        let Closing { mut works, waits, crowded, end, mut copies } = self;
        for (place, one) in waits {
            works[place] = Some(one.end(end, &mut copies));
        }
        for place in crowded {
            if let Some(Ok(work)) = &works[place] {
                // Its failure is the work's to tell.
                let _ = work.wait(Deadline::NEVER);
            }
        }
        copies.wait();
        works.into_iter().flatten().collect()
    }
}

/// Starts operations that may run beside each other, also on one stream: all are begun before the stream
/// waits for any. So a send and the receive that answers it, or both halves of an exchange, can be given to
/// one stream. Collectives of one context still run in the order of the list, and those on one stream find
/// what those before them have stored. Sends and receives are beside them, but those between GPUs are one
/// launch for each context, on the first of their streams, for which the others wait: wherever the list has
/// them, behind its collectives on these streams, and behind those of their context that these GPUs exchange.
/// Who calls the same one by one calls the collectives first. Ranks of one group may be in one list: their
/// GPUs agree side by side, and their calls begin in turns ([`begin_in_turns`]).
///
/// The works are in the order of the list. When one cannot be begun, those that have begun run on, those
/// before it in the list among them, their streams wait for them, and the error is returned. If that is for
/// where its memory is, none has begun of a group of which several ranks are in the list.
///
/// # Safety
/// As [`Context::start`], for every operation.
pub unsafe fn start_together(operations: &[(&Context, &Request, &Call)]) -> Result<Vec<Work>> {
    let part = |&(context, request, call)| Part { context, request, call, awaited: true };
    let parts: Vec<Part<'_>> = operations.iter().map(part).collect();
    // SAFETY: the caller's promise.
    unsafe { start_parts(&parts) }.into_iter().collect()
}

/// One of several operations that start together.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Whose.
    pub context: &'a Context,
    /// What is called.
    pub request: &'a Request,
    /// In which way.
    pub call: &'a Call,
    /// Whether somebody follows it by its work. If not, as of [`Context::launch`], it has a stream, and the
    /// context has what comes of it.
    pub awaited: bool,
}

/// As [`start_together`], with a result for each. When one cannot be begun, those behind it that have not
/// begun have its error.
///
/// # Safety
/// As there.
pub unsafe fn start_parts(parts: &[Part<'_>]) -> Vec<Result<Work>> {
    let mut open = device::to_agree(parts);
    // SAFETY: the caller's promise.
    let early = if open.is_empty() { Vec::new() } else { unsafe { ahead_of_agreement(parts, &mut open) } };
    let listed = |place: usize| {
        let Part { context, request, call, .. } = parts[place];
        Some((context, request, call.clone()))
    };
    let device_of = |place: usize| {
        let Part { context, request, call, .. } = parts[place];
        context.device_of(request, call)
    };
    // SAFETY: the caller's promise.
    let beside = unsafe { Beside::of(parts.len(), &listed, !early.is_empty(), &device_of) };
    let mut works: Vec<Option<Result<Work>>> = Vec::new();
    works.resize_with(parts.len(), || None);
    let (mut stopped, mut closing) = (None, Vec::new());
    let others: Vec<usize> = (0..parts.len()).filter(|place| !early.contains(place)).collect();
    // SAFETY: the caller's promise.
    let begun = unsafe { begin_some(parts, &beside, &early, &mut stopped, &mut works) };
    // The host takes in what comes for receives. Their streams would wait, perhaps for who is behind the
    // agreement, and the driver for these when it is asked for what that needs.
    let sends = |&(place, _): &(usize, _)| parts[place].request.kind == Kind::Send;
    let (sends, receives): (Vec<_>, Vec<_>) = begun.into_iter().partition(sends);
    closing.push(close_some(sends));
    device::connect_for(&open);
    closing.push(close_some(receives));
    // SAFETY: the caller's promise.
    let begun = unsafe { begin_some(parts, &beside, &others, &mut stopped, &mut works) };
    closing.push(close_some(begun));
    let unordered = beside.join();
    for (places, closing) in closing {
        for (place, work) in places.into_iter().zip(closing.wait()) {
            if let (false, Ok(work)) = (parts[place].awaited, &work) {
                parts[place].context.keep_failure(parts[place].request, work);
            }
            works[place] = Some(work);
        }
    }
    for (place, error) in unordered {
        works[place] = works[place].take().map(|work| beside::given_up(work, &error));
    }
    works.into_iter().flatten().collect()
}

/// The messages of a list in which devices are to agree that need not know on what: other ranks may come to
/// the agreement behind these. None that stands behind a call whose memory is refused. `open` are the calls
/// for which they are to agree; those that are not begun for the memory of another rank are taken out.
///
/// # Safety
/// As [`start_parts`].
unsafe fn ahead_of_agreement(parts: &[Part<'_>], open: &mut Vec<Candidate<'_>>) -> Vec<usize> {
    let contexts: Vec<Option<&Context>> = parts.iter().map(|part| Some(part.context)).collect();
    // SAFETY: the caller's promise.
    let check = |place: usize| unsafe { parts[place].check_memory() };
    let refused = refused(&contexts, &check);
    let is_refused = |context: &Context| refused.iter().any(|(group, _)| *group == context.id());
    open.retain(|candidate| !is_refused(candidate.context));
    let until = (0..parts.len()).find(|&place| check(place).is_err()).unwrap_or(parts.len());
    let is_early = |&place: &usize| {
        let Part { context, request, call, .. } = parts[place];
        request.kind.point_to_point() && !context.is_point(request, call, true) && !is_refused(context)
    };
    (0..until).filter(is_early).collect()
}

/// Begins some of the operations of a list: these, each with its place. Of the others it notes the works.
/// `stopped`: the first that could not be begun, and why.
///
/// # Safety
/// As [`start_parts`].
unsafe fn begin_some(
    parts: &[Part<'_>],
    beside: &Beside,
    some: &[usize],
    stopped: &mut Option<(usize, Error)>,
    works: &mut [Option<Result<Work>>],
) -> Vec<(usize, Pending)> {
    let contexts: Vec<Option<&Context>> = some.iter().map(|&place| Some(parts[place].context)).collect();
    let device_of =
        |at: usize| parts[some[at]].context.device_of(parts[some[at]].request, parts[some[at]].call);
    // SAFETY: the caller's promise.
    let check = |at: usize| unsafe { parts[some[at]].check_memory() };
    let mut begin = |at: usize| match stopped {
        Some((before, error)) if *before < some[at] => Err(error.clone()),
        // SAFETY: the caller's promise.
        _ => unsafe { parts[some[at]].begin(beside, some[at]) },
    };
    let begun = begin_in_turns(&contexts, &device_of, true, &check, &mut begin);
    let mut pending = Vec::new();
    for (&place, begun) in some.iter().zip(begun) {
        if let (None, Err(error)) = (&stopped, &begun) {
            *stopped = Some((place, error.clone()));
        }
        works[place] = Some(begun.map(|begun| {
            pending.extend(begun.map(|begun| (place, begun)));
            // Of what has been given to its stream.
            Work::ended(Ok(Completion::default()))
        }));
    }
    pending
}

/// Closes operations of a list, each with its place, but for what the thread waits for: these places, too.
fn close_some(begun: Vec<(usize, Pending)>) -> (Vec<usize>, Closing) {
    let (places, pending) = begun.into_iter().unzip();
    (places, Pending::closing_all(pending))
}

impl Part<'_> {
    /// As the one at this place of its list, on the stream that it has there.
    ///
    /// # Safety
    /// As [`start_together`].
    unsafe fn begin(&self, beside: &Beside, place: usize) -> Result<Option<Pending>> {
        let Part { context, request, call, awaited } = *self;
        let call = &beside.call(place, call);
        // SAFETY: the caller's promise.
        unsafe {
            match awaited {
                true => context.begin_together(request, call).map(Some),
                false => context.begin_launch_together(request, call),
            }
        }
    }

    /// # Safety
    /// As [`Context::check_memory`].
    unsafe fn check_memory(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.context.check_memory(self.request, self.call) }
    }
}
