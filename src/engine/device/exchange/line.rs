//! The order of the calls: how each is given to its stream.

use std::sync::atomic::{Ordering, fence};
use std::thread::ThreadId;

use super::graphs::Captured;
use super::{Caller, DeviceExchange, Enqueued, Meets, Members, Parts};
use crate::cuda::driver::{Capture, StreamHandle};
use crate::cuda::joined;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::device::compare::Calls;
use crate::engine::device::overdue::GRACE_PERIOD;
use crate::engine::direct::HAS_LEFT;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::signature::Signature;

/// What tells a stream from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Id {
    /// Its number, which the driver never uses again.
    Number(u64),
    /// Of a stream that is being captured the driver does not tell that: its handle, and whose default stream
    /// it is, if it is a thread's. What is in one capture lives until it ends.
    Captured(StreamHandle, Option<ThreadId>),
}

impl Id {
    /// That of a stream that is being captured.
    fn captured(handle: StreamHandle) -> Id {
        let thread = (handle == StreamHandle::PER_THREAD).then(|| std::thread::current().id());
        Id::Captured(handle, thread)
    }
}

/// The order of the calls.
#[derive(Debug, Default)]
pub(super) struct CallLine {
    /// The stream of the last call, checked.
    stream: Option<(Id, Stream)>,
    /// The stream that ran the last call that was not captured, or waits for it since.
    pub(super) ran_on: Option<Id>,
    pub(super) captured: Captured,
    pub(super) calls: Calls,
}

impl DeviceExchange {
    /// [`Group::or_fail_on`] for what keeps this rank from giving a call to its stream.
    pub(super) fn or_fail<T>(
        &self,
        group: &Group,
        class: Class,
        caller: Caller,
        result: Result<T>,
    ) -> Result<T> {
        group.or_fail_on(class, result, || {
            let _entered = self.devices().enter(self.device())?;
            // SAFETY: whoever calls has promised that the stream lives.
            unsafe { self.capture(caller) }
        })
    }

    /// Whether the caller's stream is being captured.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn capture(&self, caller: Caller) -> Result<Capture> {
        let handle = caller.stream.unwrap_or(self.parts().stream.handle());
        if handle.is_legacy() {
            // It is never captured, and must not even be asked while others are.
            return Ok(Capture::None);
        }
        // SAFETY: the caller's promise.
        let capture = unsafe { self.devices().driver().stream_capture(handle) };
        if let Ok(Capture::Active(_)) = capture {
            self.parts().boards.note_capture();
        }
        capture.map_err(|error| self.foreign(caller, error))
    }

    /// The streams beside a call's own in one launch; all are in one capture, or in none.
    ///
    /// # Safety
    /// The streams live.
    pub(super) unsafe fn beside(
        &self,
        caller: Caller,
        others: &[Option<StreamHandle>],
    ) -> Result<Vec<Stream>> {
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let borrow = |stream: Option<StreamHandle>| {
            let handle = stream.unwrap_or(self.parts().stream.handle());
            // SAFETY: the caller's promise.
            let borrowed = unsafe { Stream::borrow(self.devices(), self.device(), handle) };
            borrowed.map_err(|error| self.foreign(Caller { stream, ..caller }, error))
        };
        let (first, others) = (borrow(caller.stream)?, others.iter().map(|&other| borrow(other)));
        let others = others.collect::<Result<Vec<Stream>>>()?;
        joined::in_one_capture(&first, &others)?;
        Ok(others)
    }

    /// Gives a call to its stream, between what the streams beside it were given before and what they are
    /// given next. Others are told of it by `compare`: a message that fails up to there is not there for
    /// them, unless the device is lost.
    #[expect(clippy::too_many_arguments, reason = "few callers, above")]
    pub(super) fn give(
        &self,
        group: &Group,
        class: Class,
        signatures: &[Signature],
        peers: Members,
        (caller, beside): (Caller, &[Stream]),
        compare: impl FnOnce(&Turn, &mut Calls) -> Result<()>,
        launch: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Enqueued> {
        let parts = self.parts();
        let checked = self.check_default_stream(caller);
        self.or_fail(group, class, caller, checked)?;
        // Once for all that follows.
        let entered = parts.last.devices().enter(self.device());
        let _entered = self.or_fail(group, class, caller, entered)?;
        let mut line = lock(&self.line);
        let found = self.find_stream(&mut line, caller);
        let (handle, id, capture) = self.or_fail(group, class, caller, found)?;
        let CallLine { stream: Some((_, stream)), ran_on, captured, calls } = &mut *line else {
            fail!(Internal, "a stream that was put there is not there")
        };
        if let Some(capture) = capture {
            captured.admit(id, capture)?;
            // It is no call yet, and may never be one, or many: others need not capture it, and it is
            // compared with nothing.
            let turn = group.number(Class::Captured, signatures, caller.timeout)?;
            self.check_company(group, class, peers).map_err(|error| error.context(group.describe(&turn)))?;
            let mixes = self.mixes.load(Ordering::Relaxed);
            let launch = |stream: &Stream| joined::between(stream, beside, || launch(stream));
            let given = captured.give(parts, (stream, id), capture, mixes, launch);
            // No kernel runs, so that it fails concerns nobody else.
            given.map_err(|error| group.failure().unwrap_or(error).context(group.describe(&turn)))?;
            return Ok(Enqueued { turn, meets: Meets::Ends(peers), stream: handle, captured: true });
        }
        let turn = group.number(class, signatures, caller.timeout)?;
        let (mut begun, mut meets) = (false, Meets::Ends(peers));
        // What others are told of is launched, and an event stands for it, before anything is done in quiet.
        let launching = self.devices().launching();
        // Before anybody is told of the call: a stream that only waits for what others were given has nothing
        // of it.
        let wait = || {
            if ran_on.is_some_and(|before| before != id) {
                stream.wait(&parts.last)?;
            }
            captured.precede(parts, stream)?;
            joined::gather(stream, beside)
        };
        let given = wait().and_then(|()| compare(&turn, calls)).and_then(|()| {
            begun = true;
            if class != Class::PointToPoint {
                meets = Meets::All(calls.collectives());
            }
            launch(stream)?;
            joined::release(stream, beside)?;
            *ran_on = Some(id);
            self.watch.observe(parts, stream, turn, meets)
        });
        if given.is_err() && begun {
            // Part of it may be there.
            parts.astray.add(stream);
        }
        drop(launching);
        drop(line);
        if let Err(error) = given {
            if !begun {
                return Err(group.blame(&turn, error));
            }
            let error = group.blame_launched(&turn, error);
            self.await_end(Deadline::after(GRACE_PERIOD));
            return Err(error);
        }
        // Against `Endpoint::attend`: either it sees the call, or this sees that it is not looking.
        fence(Ordering::SeqCst);
        group.endpoint().watch_devices();
        Ok(Enqueued { turn, meets, stream: handle, captured: false })
    }

    /// Has the caller's stream, which is not being captured, come behind all that streams of this exchange were
    /// given: calls, replays and one-sided operations. For what it is given next that is in no order with
    /// those otherwise.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn line_up(&self, caller: Caller) -> Result<()> {
        let parts = self.parts();
        let mut line = lock(&self.line);
        let (_, id, _) = self.find_stream(&mut line, caller)?;
        let CallLine { stream: Some((_, stream)), ran_on, captured, .. } = &mut *line else {
            fail!(Internal, "a stream that was put there is not there")
        };
        if ran_on.is_some_and(|before| before != id) {
            stream.wait(&parts.last)?;
            // The next call need not wait for that again.
            *ran_on = Some(id);
        }
        captured.precede(parts, stream)?;
        let Id::Number(number) = id else { return Ok(()) };
        parts.one_sided.precede(stream, number)
    }

    /// An error if a rank leaves that a captured call is with: it replays none, and a replay has no deadline.
    fn check_company(&self, group: &Group, class: Class, peers: Members) -> Result<()> {
        let Parts { boards, first, .. } = self.parts();
        let is_met = |member: u32| class != Class::PointToPoint || peers.has(member);
        let others = (0..boards.size() as u32).filter(|member| first + member != group.rank());
        match others.filter(|&member| is_met(member)).find(|&member| boards.leaves(member as usize)) {
            Some(member) => fail!(PeerFailed, "{} {HAS_LEFT}", group.describe_rank(first + member)),
            None => Ok(()),
        }
    }

    /// The caller's stream, which the line has then, its id, and the capture that it is in.
    fn find_stream(&self, line: &mut CallLine, caller: Caller) -> Result<(StreamHandle, Id, Option<u64>)> {
        let (parts, devices) = (self.parts(), self.devices());
        let handle = caller.stream.unwrap_or(parts.stream.handle());
        // SAFETY: whoever calls has promised that it lives.
        let capture = match unsafe { self.capture(caller) }? {
            Capture::None => None,
            Capture::Active(capture) => Some(capture),
            Capture::Invalidated => {
                fail!(InvalidUsage, "the capture of the call's stream has failed; end it, and begin again")
            }
        };
        let id = match capture {
            // SAFETY: as above.
            None => Id::Number(unsafe { devices.driver().stream_id(handle) }?),
            Some(_) => Id::captured(handle),
        };
        if line.stream.as_ref().is_none_or(|(known, _)| *known != id) {
            // SAFETY: as above; it is not used for a later call unless it lives then.
            let stream = unsafe { Stream::borrow(devices, self.device(), handle) };
            line.stream = Some((id, stream.map_err(|error| self.foreign(caller, error))?));
        }
        Ok((handle, id, capture))
    }

    /// Refuses a call in the order of a default stream that is not this thread's: before its device is
    /// entered.
    pub fn check_default_stream(&self, caller: Caller) -> Result<()> {
        match caller.stream {
            Some(stream) if !stream.is_default() => Ok(()),
            _ => self.devices().check_default_stream(self.device()),
        }
    }

    /// Why the caller's stream cannot be used: it may be one of another device, or of another context.
    #[cold]
    pub(super) fn foreign(&self, caller: Caller, error: Error) -> Error {
        let (own, devices) = (self.device(), self.parts().last.devices());
        let stream = caller.stream.filter(|stream| !stream.is_default());
        match stream.map(|stream| devices.device_of_stream(stream)) {
            Some(Ok(other)) if other != own => {
                let name = caller.memory;
                let text =
                    format!("call->stream is a stream of GPU {other}, but {name} is memory of GPU {own}");
                Error::new(Status::InvalidArgument, text)
            }
            Some(Err(refusal)) if refusal.status() == Status::InvalidArgument => refusal,
            _ => error,
        }
    }
}
