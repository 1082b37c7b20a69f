//! Work handles: operations under way, as the caller sees them.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

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
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::engine::operation::Running;
use crate::error::{Error, Result, fail};
use crate::transport::service::Visits;

/// An operation under way. Cheap to clone; all methods from any thread. Dropping it lets the operation run
/// on.
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

    /// What a stream was given for a call of `group`, if it is one, done when `event` is complete. `failure`
    /// tells why it will not end well, if that is so: it is asked at every look, by any thread, told whether
    /// the event is complete, does not wait, and its answer ends the work at once.
    pub(super) fn enqueued(
        group: Option<&Group>,
        event: Arc<Event>,
        failure: impl Fn(bool) -> Option<Error> + Send + Sync + 'static,
    ) -> Work {
        Work::composed(group, None, event, failure)
    }

    /// As [`Work::enqueued`], where the stream waits for `host`: done when both are.
    pub(super) fn composed(
        group: Option<&Group>,
        host: Option<Arc<Running>>,
        event: Arc<Event>,
        failure: impl Fn(bool) -> Option<Error> + Send + Sync + 'static,
    ) -> Work {
        let (devices, is_hosted) = (Some(event.devices().clone()), host.is_some());
        let visits = group.map(|group| group.endpoint().registration().visits().clone());
        let course = Mutex::new(Some(Course { host, failure: Arc::new(failure) }));
        let (failed_at, outcome) = (OnceLock::new(), OnceLock::new());
        let enqueued = Enqueued { event, is_hosted, course, visits, failed_at, outcome };
        Work { state: State::Enqueued(Arc::new(enqueued)), devices }
    }

    /// Whether the host has, or has had, a part in it.
    pub fn is_hosted(&self) -> bool {
        match &self.state {
            State::Running(_) => true,
            State::Enqueued(enqueued) => enqueued.is_hosted,
            State::Ended(_) => false,
        }
    }

    /// The host's part, until all has ended.
    pub(super) fn host(&self) -> Option<Arc<Running>> {
        match &self.state {
            State::Running(running) => Some(running.clone()),
            State::Enqueued(enqueued) => enqueued.host(),
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

    /// Waits in this thread, moving the operation. An expired `deadline` (not the operation's own) is
    /// `Timeout` and leaves the operation running.
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
                if let Some(host) = enqueued.host() {
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

    /// Calls `then` once with the result: at once if it is there, else from the thread that completes the
    /// operation. That may be one of the library's or one that others rely on: `then` may start operations,
    /// but must not wait for any.
    pub fn on_complete(&self, then: Callback) {
        match &self.state {
            State::Ended(result) => call_back_late(then, result.clone()),
            State::Enqueued(enqueued) => match enqueued.look() {
                Some(result) => call_back_late(then, result),
                None => {
                    let enqueued = enqueued.clone();
                    call_back_when(move || enqueued.visit(), then);
                }
            },
            State::Running(running) => running.on_complete(then),
        }
    }

    /// Has what `stream` is given after this wait for the operation, instead of the host. Returns at once,
    /// unless the stream waits for many already (see [`Call::stream`](super::Call)); when the operation is
    /// complete, if side streams copy for it and the device has too few queues, as for an operation on device
    /// memory that was given no stream. A failure of the operation lets the stream go on, too: the work tells
    /// of it. The handle of a default stream means that of the calling thread's current device. A stream that
    /// is being captured is `InvalidUsage`.
    ///
    /// # Safety
    /// It is a stream, and lives.
    pub unsafe fn block_stream(&self, stream: StreamHandle) -> Result<()> {
        if self.test().is_some() {
            return Ok(());
        }
        let devices = match &self.devices {
            Some(devices) => devices.clone(),
            None => Devices::open()?,
        };
        let device = devices.device_of_stream(stream)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow(&devices, device, stream) }?;
        stream.refuse_capture("stream", "a stream in capture cannot wait for work that runs now")?;
        self.block(&stream, None)
    }

    /// As [`Work::block_stream`], of a stream that is not being captured. `timeout`: how long to wait at most
    /// until it may wait for one more; `None`: as long as the context of the operation has it.
    pub(super) fn block(&self, stream: &Stream, timeout: Option<Duration>) -> Result<()> {
        match &self.state {
            State::Ended(_) => Ok(()),
            State::Enqueued(enqueued) => stream.wait(&enqueued.event),
            State::Running(running) if !may_wait_for(running, stream)? => {
                // Its failure is the work's to tell.
                let _ = self.wait(Deadline::NEVER);
                Ok(())
            }
            State::Running(running) => {
                let (group, devices) = (running.group(), stream.devices());
                ahead::make_room(stream, group, || Deadline::after(timeout.unwrap_or(group.timeout())))?;
                let word = Arc::new(devices.word(stream.device())?);
                running.holds(&word);
                let held = devices.note_held();
                stream.wait_word(&word)?;
                ahead::note(stream, running, None);
                running.group().endpoint().kick();
                running.on_complete(Box::new(move |_| {
                    word.release();
                    drop(held);
                }));
                Ok(())
            }
        }
    }

    /// Ends this operation with `Aborted` if it still runs and is a send or a receive; a collective is
    /// everybody's and answers `InvalidUsage`, as does what a stream has been given.
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

/// Whether `stream` may wait for an operation of the host's: not for one that has the device do more on
/// streams that this one may hold up.
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
    event: Arc<Event>,
    is_hosted: bool,
    /// Until it has ended: a work that is kept keeps no group.
    course: Mutex<Option<Course>>,
    /// Of the group's endpoint.
    visits: Option<Arc<Visits>>,
    /// When the host's part was first seen to have failed.
    failed_at: OnceLock<Instant>,
    outcome: OnceLock<Result<Completion>>,
}

/// What it is looked at by, which holds its group.
#[derive(Clone)]
struct Course {
    /// What the host has to do for it.
    host: Option<Arc<Running>>,
    failure: Arc<Failure>,
}

impl Enqueued {
    /// As [`Enqueued::look`], by a thread of the library. It may be the last to hold the group then: who lets
    /// go of that waits for it.
    fn visit(&self) -> Option<Result<Completion>> {
        let _visit = self.visits.as_ref().map(Visits::enter);
        self.look()
    }

    fn course(&self) -> Option<Course> {
        lock(&self.course).clone()
    }

    fn host(&self) -> Option<Arc<Running>> {
        self.course()?.host
    }

    /// The result if it is there.
    pub(super) fn look(&self) -> Option<Result<Completion>> {
        if let Some(outcome) = self.outcome.get() {
            return Some(outcome.clone());
        }
        // It goes when the outcome is there.
        let Some(course) = self.course() else { return self.outcome.get().cloned() };
        let host = match &course.host {
            Some(host) => host.result()?.map(drop),
            None => Ok(()),
        };
        let result = match (retry(|| self.event.query()), host) {
            // The kernels behind the host's part leave, too.
            (Ok(false), Err(_)) if !self.has_had_grace() => return None,
            (_, Err(error)) | (Err(error), _) => Err(error),
            (Ok(done), Ok(())) => match (course.failure)(done) {
                Some(error) => Err(error),
                None if done => Ok(Completion::default()),
                None => return None,
            },
        };
        let outcome = self.outcome.get_or_init(|| result).clone();
        let over = lock(&self.course).take();
        // Without the lock: a group may end with it.
        drop(over);
        Some(outcome)
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
        if let Some(host) = self.host() {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;
    use crate::communicator::context::Membership;
    use crate::communicator::context::tests::pair;
    use crate::cuda::double::{Double, Order};
    use crate::error::Status;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_work_that_has_ended_holds_nothing_of_its_group() {
        let devices = Devices::over(Double::new(1, Order::RoundRobin)).expect("a device");
        // Of no stream, which is complete.
        let event = Arc::new(Event::new(&devices, 0).expect("an event"));
        let group = Arc::new(());
        let held = group.clone();
        let failure = move |_| {
            let _ = &held;
            None
        };
        let work = Work::enqueued(None, event, failure);
        let kept = work.clone();
        assert_eq!(Arc::strong_count(&group), 2);
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(Arc::strong_count(&group), 1);
        assert_eq!(kept.peek(), Some(Ok(Completion::default())));
    }

    /// The thread that looks for a callback may hold the group last.
    #[test]
    fn who_destroys_a_context_waits_for_the_thread_that_looks_at_its_work() {
        let [context, _other] = pair([PATIENCE; 2]);
        let double = Double::new(1, Order::RoundRobin);
        let devices = Devices::over(double.clone()).expect("a device");
        // SAFETY: the double trusts no handle.
        let stream = unsafe { Stream::borrow(&devices, 0, double.stream(0)) }.expect("a stream");
        let gate = devices.word(0).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        let event = Arc::new(Event::new(&devices, 0).expect("an event"));
        event.record(&stream).expect("it is recorded");

        let Membership::Group(group) = context.membership() else { panic!("two ranks") };
        let (held, has_looked) = (group.clone(), Arc::new(AtomicBool::new(false)));
        let ((here, is_here), (go_on, goes_on)) = (channel(), channel::<()>());
        let (looks, goes_on) = (has_looked.clone(), Mutex::new(goes_on));
        let work = Work::enqueued(Some(group), event, move |_| {
            if thread::current().name() != Some("unisono-watch") || looks.load(Ordering::SeqCst) {
                return None;
            }
            here.send(()).expect("the test waits");
            let _ = lock(&goes_on).recv();
            looks.store(true, Ordering::SeqCst);
            held.failure().or_else(|| Some(Error::new(Status::Aborted, "the test's end")))
        });
        work.on_complete(Box::new(|_| ()));
        is_here.recv_timeout(PATIENCE).expect("it is looked at");
        drop(work);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                drop(go_on);
            });
            drop(context);
            assert!(has_looked.load(Ordering::SeqCst), "it is still looked at");
        });
        gate.release();
    }
}
