//! Work handles: operations under way, as the caller sees them.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::Completion;
use super::ahead;
use crate::cuda::context::Devices;
use crate::cuda::driver::{StreamHandle, retry};
use crate::cuda::event::Event;
use crate::cuda::polling;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::callbacks::{Callback, call_back_late, call_back_when};
use crate::engine::device::GRACE_PERIOD;
use crate::engine::operation::Running;
use crate::error::{Error, Result, fail};

/// An operation under way. Cheap to clone; all methods from any thread. Dropping it lets the operation run on.
#[derive(Clone)]
pub struct Work {
    state: State,
    /// The devices of the operation's memory; `None`: those of this machine.
    devices: Option<Arc<Devices>>,
}

#[derive(Clone)]
enum State {
    Running(Arc<Running>),
    /// A stream does it, without the host.
    Enqueued(Arc<Enqueued>),
    /// It needed nobody else.
    Ended(Result<Completion>),
}

impl Work {
    pub(super) fn running(running: Arc<Running>) -> Work {
        Work { state: State::Running(running), devices: None }
    }

    pub(super) fn ended(result: Result<Completion>) -> Work {
        Work { state: State::Ended(result), devices: None }
    }

    /// What a stream was given, done when `event` is complete. `failure` tells why it will not end well, if that is so:
    /// it is asked at every look, by any thread, told whether the event is complete, does not wait, and its answer ends the work at
    /// once.
    pub(super) fn enqueued(
        event: Arc<Event>,
        failure: impl Fn(bool) -> Option<Error> + Send + Sync + 'static,
    ) -> Work {
        Work::composed(None, event, failure)
    }

    /// As [`Work::enqueued`], where the stream waits for `host`: done when both are.
    pub(super) fn composed(
        host: Option<Arc<Running>>,
        event: Arc<Event>,
        failure: impl Fn(bool) -> Option<Error> + Send + Sync + 'static,
    ) -> Work {
        let devices = Some(event.devices().clone());
        let (failure, failed_at, outcome) = (Box::new(failure), OnceLock::new(), OnceLock::new());
        let enqueued = Enqueued { host, event, failure, failed_at, outcome };
        Work { state: State::Enqueued(Arc::new(enqueued)), devices }
    }

    /// Whether the host has, or has had, a part in it.
    pub fn is_hosted(&self) -> bool {
        match &self.state {
            State::Running(_) => true,
            State::Enqueued(enqueued) => enqueued.host.is_some(),
            State::Ended(_) => false,
        }
    }

    /// The host's part.
    pub(super) fn host(&self) -> Option<Arc<Running>> {
        match &self.state {
            State::Running(running) => Some(running.clone()),
            State::Enqueued(enqueued) => enqueued.host.clone(),
            State::Ended(_) => None,
        }
    }

    /// Whether messages alone move it.
    pub(super) fn is_by_messages(&self) -> bool {
        matches!(&self.state, State::Running(running) if running.is_by_messages())
    }

    /// What moves it, where messages alone do, and its endpoint is still there.
    pub(super) fn by_messages(&self) -> Option<&Arc<Running>> {
        let State::Running(running) = &self.state else { return None };
        let endpoint = running.group().endpoint();
        let is_there = || endpoint.check_fork().is_ok() && endpoint.check_present().is_ok();
        (running.is_by_messages() && is_there()).then_some(running)
    }

    /// Whether it had ended well before anybody had it.
    pub fn had_ended(&self) -> bool {
        matches!(self.state, State::Ended(Ok(_)))
    }

    pub(super) fn on_devices(self, devices: &Arc<Devices>) -> Work {
        Work { devices: Some(devices.clone()), ..self }
    }

    /// Waits in this thread, moving the operation. An expired `deadline` (not the operation's own) is `Timeout` and
    /// leaves the operation running.
    pub fn wait(&self, deadline: Deadline) -> Result<Completion> {
        let result = match &self.state {
            State::Ended(result) => Some(result.clone()),
            State::Enqueued(enqueued) => enqueued.wait(deadline),
            State::Running(running) => running.wait(deadline),
        };
        match result {
            Some(result) => result,
            None => fail!(Timeout, "the work is still running; wait again, or longer"),
        }
    }

    /// The result if it is there. Never blocks.
    pub fn test(&self) -> Option<Result<Completion>> {
        match &self.state {
            State::Ended(result) => Some(result.clone()),
            State::Enqueued(enqueued) => {
                if let Some(host) = &enqueued.host {
                    host.test();
                }
                enqueued.look()
            }
            State::Running(running) => {
                if let Err(error) = running.group().endpoint().check_fork() {
                    return Some(Err(error));
                }
                running.test()
            }
        }
    }

    /// The result if it is there. Moves nothing, so that nothing is called back.
    pub fn peek(&self) -> Option<Result<Completion>> {
        match &self.state {
            State::Ended(result) => Some(result.clone()),
            State::Enqueued(enqueued) => enqueued.look(),
            State::Running(running) => running.result(),
        }
    }

    /// Calls `then` once with the result: at once if it is there, else from the thread that completes the operation.
    /// That may be one of the library's or one that others rely on: `then` may start operations, but must not wait for any.
    pub fn on_complete(&self, then: Callback) {
        match &self.state {
            State::Ended(result) => call_back_late(then, result.clone()),
            State::Enqueued(enqueued) => match enqueued.look() {
                Some(result) => call_back_late(then, result),
                None => {
                    let enqueued = enqueued.clone();
                    call_back_when(move || enqueued.look(), then);
                }
            },
            State::Running(running) => running.on_complete(then),
        }
    }

    /// Has what `stream` is given after this wait for the operation, instead of the host. Returns at once, unless the stream waits
    /// for many already (see [`Call::stream`](super::Call)); when the operation is complete, if side streams copy for it and the
    /// device has too few queues, as for an operation on device memory that was given no stream. A failure of the operation lets
    /// the stream go on, too: the work tells of it. The handle of a default stream means that of the calling thread's current
    /// device. A stream that is being captured is `InvalidUsage`.
    ///
    /// # Safety
    /// It is a stream, and lives.
    pub unsafe fn block_stream(&self, stream: StreamHandle) -> Result<()> {
        let running = match &self.state {
            State::Ended(_) => return Ok(()),
            _ if self.test().is_some() => return Ok(()),
            State::Enqueued(_) => None,
            State::Running(running) => Some(running),
        };
        let devices = match &self.devices {
            Some(devices) => devices.clone(),
            None => Devices::open()?,
        };
        let device = devices.device_of_stream(stream)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow(&devices, device, stream) }?;
        stream.refuse_capture("stream", "a stream in capture cannot wait for work that runs now")?;
        match (&self.state, running) {
            (State::Enqueued(enqueued), _) => stream.wait(&enqueued.event),
            (_, Some(running)) if !may_wait_for(running, &stream)? => {
                // Its failure is the work's to tell.
                let _ = self.wait(Deadline::NEVER);
                Ok(())
            }
            (_, Some(running)) => {
                ahead::make_room(&stream, running.group(), Deadline::after(running.group().timeout()))?;
                let word = Arc::new(devices.word(device)?);
                running.holds(&word);
                let held = devices.note_held();
                stream.wait_word(&word)?;
                ahead::note(&stream, running, None);
                running.group().endpoint().kick();
                running.on_complete(Box::new(move |_| {
                    word.release();
                    drop(held);
                }));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Ends this operation with `Aborted` if it still runs and is a send or a receive; a collective is everybody's and
    /// answers `InvalidUsage`, as does what a stream has been given.
    pub fn cancel(&self) -> Result<()> {
        match &self.state {
            State::Ended(_) => Ok(()),
            State::Running(running) if running.result().is_some() => Ok(()),
            State::Running(running) if running.is_point_to_point() => {
                running.group().endpoint().check_fork()?;
                running.cancel();
                Ok(())
            }
            State::Enqueued(enqueued) if enqueued.look().is_some() => Ok(()),
            State::Running(_) | State::Enqueued(_) => {
                fail!(InvalidUsage, "a collective cannot be cancelled alone; abort its context")
            }
        }
    }
}

/// Whether `stream` may wait for an operation of the host's: not for one that has the device do more on streams that this one may
/// hold up.
fn may_wait_for(running: &Running, stream: &Stream) -> Result<bool> {
    match running.asks_driver() {
        true => ahead::may_wait(stream),
        false => stream.devices().driver().can_wait_value(stream.device()),
    }
}

/// Why a work will not end well, told whether its event is complete.
type Failure = dyn Fn(bool) -> Option<Error> + Send + Sync;

/// What a stream does without the host.
pub(super) struct Enqueued {
    /// What the host has to do for it.
    host: Option<Arc<Running>>,
    event: Arc<Event>,
    failure: Box<Failure>,
    /// When the host's part was first seen to have failed.
    failed_at: OnceLock<Instant>,
    outcome: OnceLock<Result<Completion>>,
}

impl Enqueued {
    /// The result if it is there.
    pub(super) fn look(&self) -> Option<Result<Completion>> {
        if let Some(outcome) = self.outcome.get() {
            return Some(outcome.clone());
        }
        let host = match &self.host {
            Some(host) => host.result()?.map(drop),
            None => Ok(()),
        };
        let result = match (retry(|| self.event.query()), host) {
            // The kernels behind the host's part leave, too.
            (Ok(false), Err(_)) if !self.has_had_grace() => return None,
            (_, Err(error)) | (Err(error), _) => Err(error),
            (Ok(done), Ok(())) => match (self.failure)(done) {
                Some(error) => Err(error),
                None if done => Ok(Completion::default()),
                None => return None,
            },
        };
        Some(self.outcome.get_or_init(|| result).clone())
    }

    /// Whether the host's part was seen to have failed.
    fn has_failed(&self) -> bool {
        self.failed_at.get().is_some()
    }

    /// Whether kernels have had time to leave since the host's part was seen to have failed.
    fn has_had_grace(&self) -> bool {
        self.failed_at.get_or_init(Instant::now).elapsed() > GRACE_PERIOD
    }

    fn wait(&self, deadline: Deadline) -> Option<Result<Completion>> {
        if let Some(host) = &self.host {
            // Moves it.
            host.wait(deadline)?.ok();
        }
        let start = Instant::now();
        loop {
            let result = self.look();
            // Of a call that has failed it tells why, if only its kernels have yet to leave.
            if result.is_some() || deadline.expired() && !self.has_failed() {
                return result;
            }
            polling::pause(start, if deadline.expired() { Deadline::NEVER } else { deadline });
        }
    }
}

impl fmt::Debug for Enqueued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enqueued").field("outcome", &self.outcome.get()).finish_non_exhaustive()
    }
}
