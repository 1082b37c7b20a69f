//! An operation under way: what advances it, and the handle through which others learn how it ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::callbacks::{Callback, call_back, call_back_late};
use super::endpoint::{Look, Sleeper, Through, lock};
use super::group::{Group, INQUIRY_LOOK, Inquiry, Turn};
use super::wire::Class;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::sys;

/// What a completed operation tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The rank that a receive from any took its message from.
    pub source: Option<u32>,
}

/// Something that moves on when it is looked at. A method with a default is forwarded in
/// `impl Operation for Box` below, too.
pub trait Operation: Send {
    /// Moves on as far as it can without waiting; not for long, if it can stop in the middle
    /// ([`Operation::is_at_work`]).
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>>;

    /// Gives up. Nothing touches the caller's memory after this.
    fn abandon(&mut self, group: &Group);

    /// The same, since its caller wants it. The completion if it comes to its end all the same.
    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        self.abandon(group);
        None
    }

    /// Gives up, but for streams: those wait on until it is abandoned. Asked of a message that is late: what
    /// comes from here on is for the next receive.
    fn withdraw(&mut self, group: &Group) {
        self.abandon(group);
    }

    /// The ranks of the group that it waits for, for a person who wants to know why it takes so long.
    fn waits_for(&self, group: &Group) -> Vec<u32>;

    /// Begins what touches no other rank and may come before its turn. Called while it waits for that, if it
    /// does.
    fn prepare(&mut self, _group: &Group) {}

    /// The mailbox in which all comes that it waits for, when a look at it has been in vain.
    fn mailbox(&self) -> Option<u32> {
        None
    }

    /// Whether all that is left of it concerns this rank alone, and nothing of the next call can come before
    /// that where it matters: that one may have its turn.
    fn has_exchanged(&self) -> bool {
        false
    }

    /// Whether the last look has stopped in the middle of long work, so that deadlines, failures and other
    /// operations have their turn: nothing has to come before the next look.
    fn is_at_work(&self) -> bool {
        false
    }

    /// How its condition comes true.
    fn through(&self) -> Through {
        Through::Messages
    }

    /// Whether a stream waits for it by a courier. Asked when it begins.
    fn has_courier(&self) -> bool {
        false
    }

    /// Whether whoever moves it may ask the driver something, and be held up there.
    fn asks_driver(&self) -> bool {
        self.through() == Through::Device
    }

    /// How far it has come on this rank and what it waits for here, if that may be something else than ranks;
    /// for a person.
    fn standing(&self) -> Option<String> {
        None
    }

    /// What streams wait for until it has ended. Asked when it begins, of one on a device.
    fn exits(&self) -> Arc<Exits> {
        Arc::default()
    }

    /// In the box where it lives while others move it, too: the one that it may have already.
    fn boxed(self) -> Box<dyn Operation>
    where
        Self: Sized + 'static,
    {
        Box::new(self)
    }
}

impl Operation for Box<dyn Operation> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        (**self).advance(group)
    }

    fn abandon(&mut self, group: &Group) {
        (**self).abandon(group);
    }

    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        (**self).cancel(group)
    }

    fn withdraw(&mut self, group: &Group) {
        (**self).withdraw(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        (**self).waits_for(group)
    }

    fn prepare(&mut self, group: &Group) {
        (**self).prepare(group);
    }

    fn mailbox(&self) -> Option<u32> {
        (**self).mailbox()
    }

    fn has_exchanged(&self) -> bool {
        (**self).has_exchanged()
    }

    fn is_at_work(&self) -> bool {
        (**self).is_at_work()
    }

    fn through(&self) -> Through {
        (**self).through()
    }

    fn has_courier(&self) -> bool {
        (**self).has_courier()
    }

    fn asks_driver(&self) -> bool {
        (**self).asks_driver()
    }

    fn standing(&self) -> Option<String> {
        (**self).standing()
    }

    fn exits(&self) -> Arc<Exits> {
        (**self).exits()
    }

    fn boxed(self) -> Box<dyn Operation> {
        self
    }
}

/// The words that streams wait for until an operation has ended.
#[derive(Default)]
pub struct Exits(Mutex<Vec<Weak<Word>>>);

impl Exits {
    /// Just this one, if there is any.
    pub fn of(exit: Option<&Arc<Word>>) -> Arc<Exits> {
        let exits = Exits::default();
        exit.into_iter().for_each(|exit| exits.add(exit));
        Arc::new(exits)
    }

    /// Adds one.
    pub fn add(&self, exit: &Arc<Word>) {
        lock(&self.0).push(Arc::downgrade(exit));
    }

    /// Whether there are any.
    fn any(&self) -> bool {
        lock(&self.0).iter().any(|exit| exit.strong_count() > 0)
    }

    /// Lets the streams go on, whoever else was to do that. Whether any waited.
    fn open(&self) -> bool {
        let exits = std::mem::take(&mut *lock(&self.0));
        exits.iter().filter_map(Weak::upgrade).filter(|exit| exit.force()).count() > 0
    }
}

/// How long whoever moves an operation may take to end it, once it has failed, before it is taken to be held
/// up.
const HELD_UP: Duration = Duration::from_secs(1);

/// How long what the others had sent may take to come, when the process has said goodbye to them.
pub const LAST_WORDS: Duration = Duration::from_millis(500);

/// What is told of an operation that is held up.
const NO_ANSWER: &str = "the driver does not answer: it may wait for streams that wait for this call, while another \
                         thread of this process frees memory or loads a kernel";

/// An operation that the library moves, whether or not anybody waits.
pub struct Running {
    group: Arc<Group>,
    call: Turn,
    /// How whoever waits for it looks: at everything else, too.
    through: Through,
    /// Whether the driver may hold up whoever moves it.
    asks_driver: bool,
    has_courier: bool,
    stage: Mutex<Stage>,
    /// Whether its turn has come,
    active: AtomicBool,
    /// and has gone to the next call.
    passed: AtomicBool,
    /// Whether the endpoint does not look at it until something comes for it. Changed with the endpoint's
    /// list locked.
    dormant: AtomicBool,
    /// Whether nobody has the work of it.
    left: AtomicBool,
    done: AtomicBool,
    ending: Mutex<Ending>,
    /// What streams wait for, of one on a device.
    exits: Option<Arc<Exits>>,
    /// When it was first seen to have failed without having ended, and what the ranks are asked about that.
    held_up: OnceLock<(Instant, Inquiry)>,
}

enum Stage {
    Running {
        operation: Box<dyn Operation>,
        /// When it compares itself with the calls of those that it waits for: some time after its turn has
        /// come, then seldom.
        compare_at: Deadline,
        /// Whether it has been moved.
        begun: bool,
        /// Whether the last look has stopped in the middle of long work.
        has_worked: bool,
        /// Its deadline has passed, and the others are asked what they are doing. It is not moved any more.
        /// Streams go on when it is abandoned, and who sees that is to see why: so not before that is known.
        overdue: Option<Inquiry>,
    },
    Over,
}

#[derive(Default)]
struct Ending {
    result: Option<Result<Completion>>,
    callbacks: Vec<Callback>,
}

impl Running {
    /// An operation of `group` that answers to `call`.
    pub fn new(group: Arc<Group>, call: Turn, operation: Box<dyn Operation>) -> Arc<Running> {
        Arc::new(Running {
            group,
            call,
            through: match operation.through() {
                Through::Memory => Through::Messages,
                through => through,
            },
            asks_driver: operation.asks_driver(),
            has_courier: operation.has_courier(),
            exits: (operation.through() == Through::Device).then(|| operation.exits()),
            held_up: OnceLock::new(),
            stage: Mutex::new(Stage::Running {
                operation,
                compare_at: Deadline::NEVER,
                begun: false,
                has_worked: false,
                overdue: None,
            }),
            active: AtomicBool::new(false),
            passed: AtomicBool::new(false),
            dormant: AtomicBool::new(false),
            left: AtomicBool::new(false),
            done: AtomicBool::new(false),
            ending: Mutex::default(),
        })
    }

    /// An operation that had ended before it began.
    pub fn ended(group: Arc<Group>, call: Turn, result: Result<Completion>) -> Arc<Running> {
        Arc::new(Running {
            group,
            call,
            through: Through::Messages,
            asks_driver: false,
            has_courier: false,
            exits: None,
            held_up: OnceLock::new(),
            stage: Mutex::new(Stage::Over),
            active: AtomicBool::new(true),
            passed: AtomicBool::new(true),
            dormant: AtomicBool::new(false),
            left: AtomicBool::new(false),
            done: AtomicBool::new(true),
            ending: Mutex::new(Ending { result: Some(result), callbacks: Vec::new() }),
        })
    }

    /// Its group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// How its condition comes true.
    pub fn through(&self) -> Through {
        self.through
    }

    /// Whether whoever moves it may be held up in the driver.
    pub fn asks_driver(&self) -> bool {
        self.asks_driver
    }

    /// Whether it is a send or a receive.
    pub fn is_point_to_point(&self) -> bool {
        self.call.class == Class::PointToPoint
    }

    /// How long ago it was called.
    pub fn age(&self) -> Duration {
        self.call.called.elapsed()
    }

    /// The same at this moment.
    pub fn age_at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.call.called)
    }

    /// Whether it has its turn, or has had it.
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst)
    }

    /// Its call's deadline.
    pub fn due(&self) -> Deadline {
        self.call.deadline
    }

    /// When it will not have its turn any more.
    pub fn gives_up_at(&self) -> Deadline {
        self.call.gives_up_at()
    }

    /// Whether it will not have its turn any more: it would have been given up by `now`, if what runs before
    /// it is not late, too.
    pub fn gives_up(&self, now: Instant) -> bool {
        self.gives_up_at().expired_by(now)
    }

    /// Whether nobody looks at it until something comes for it.
    pub fn is_dormant(&self) -> bool {
        self.dormant.load(Ordering::SeqCst)
    }

    /// For the endpoint.
    pub fn set_dormant(&self, dormant: bool) {
        self.dormant.store(dormant, Ordering::SeqCst);
    }

    /// If all that it waits for comes to its mailbox, has `lie_down` called, with the moment when it is to be
    /// looked at whatever comes; and then `sleeper` told of what does, if that says so. Nobody moves it
    /// meanwhile.
    pub fn lie_down(&self, sleeper: u64, lie_down: impl FnOnce(Deadline) -> bool) {
        let Ok(stage) = self.stage.try_lock() else { return };
        let Stage::Running { operation, compare_at, has_worked: false, overdue: None, .. } = &*stage else {
            return;
        };
        if let Some(mailbox) = operation.mailbox().filter(|_| self.is_active())
            && lie_down(self.call.deadline.min(*compare_at))
        {
            self.group.endpoint().messages().wake_for(mailbox, sleeper);
        }
    }

    /// When somebody has to look at it next, if nothing comes for it.
    pub fn deadline(&self) -> Deadline {
        match self.stage.try_lock().as_deref() {
            _ if !self.active.load(Ordering::Acquire) => match self.call.gives_up_at() {
                // What runs before it is about to say why it is late.
                at if at.expired() => Deadline::after(INQUIRY_LOOK),
                at => at,
            },
            Ok(Stage::Running { overdue: Some(inquiry), .. }) => inquiry.until(),
            Ok(Stage::Running { compare_at, .. }) => self.call.deadline.min(*compare_at),
            _ => self.call.deadline,
        }
    }

    /// It waits for its turn, and does meanwhile what it can.
    pub fn prepare(&self) {
        if let Stage::Running { operation, .. } = &mut *lock(&self.stage) {
            operation.prepare(&self.group);
        }
    }

    /// Its turn has come. Whether it had ended before, so that the turn is to be passed on.
    #[must_use = "the calls behind it wait for their turn"]
    pub fn activate(&self) -> bool {
        let mut stage = lock(&self.stage);
        if let Stage::Running { compare_at, .. } = &mut *stage {
            self.group.begin(&self.call);
            *compare_at = self.call.compare_at(Instant::now());
        }
        self.active.store(true, Ordering::SeqCst);
        let has_ended = matches!(*stage, Stage::Over);
        drop(stage);
        // Against one that lets it lie dormant meanwhile: either this sees that, or that sees that its turn
        // has come.
        if self.is_dormant() {
            self.group.endpoint().awaken(self);
        }
        has_ended && !self.passed.swap(true, Ordering::AcqRel)
    }

    /// Moves it. Over: it has ended, now or before.
    pub fn advance(&self) -> Look<()> {
        if self.done.load(Ordering::Acquire) {
            return Look::Over(());
        }
        if !self.active.load(Ordering::Acquire) {
            let gives_up = self.call.gives_up_at().expired() && !self.group.may_yet_tell(&self.call);
            if gives_up && self.group.failure().is_none() {
                // What runs before it ends with the group's failure, and then this has its turn to end.
                self.group.fail_here(&self.group.stuck(&self.call));
            }
            return Look::Waits;
        }
        let Ok(mut stage) = self.stage.try_lock() else { return Look::Waits };
        let mut standing = None;
        let result = match &mut *stage {
            Stage::Over => return Look::Over(()),
            // Asking takes a while, and this may be the thread that the answers come through: it does not
            // wait for them.
            Stage::Running { overdue: Some(inquiry), .. } if !self.group.answered(inquiry) => {
                return Look::Waits;
            }
            Stage::Running { overdue: Some(inquiry), operation, .. } => {
                let error = self.group.overdue(&self.call, inquiry);
                let is_first = self.group.failure().is_none();
                self.spread(&error, None);
                operation.abandon(&self.group);
                // If that has taken so long that streams have gone on without it.
                standing = (is_first && self.is_held_up()).then(|| NO_ANSWER.into());
                Err(error)
            }
            Stage::Running { operation, compare_at, begun, has_worked, overdue } => {
                // What had not begun when its group failed does not begin: a call that failed before its
                // first step has left a number of those that ranks count for themselves, which this one would
                // take.
                let refused = if *begun { None } else { self.group.failure() };
                *begun = true;
                let result = match refused {
                    Some(error) => Some(Err(error)),
                    None => match operation.advance(&self.group) {
                        Poll::Ready(result) => Some(result),
                        Poll::Pending => self.group.failure().map(Err),
                    },
                };
                let now = Instant::now();
                match result {
                    Some(Ok(completion)) => Ok(completion),
                    Some(Err(error)) => {
                        standing = operation.standing();
                        self.spread(&error, standing.as_deref());
                        operation.abandon(&self.group);
                        Err(error)
                    }
                    None if self.call.deadline.expired_by(now) => {
                        *overdue = Some(self.group.ask_late(&self.call, operation));
                        return Look::Waits;
                    }
                    None => {
                        if compare_at.expired_by(now) {
                            *compare_at = self.call.compare_again_at();
                            self.group.compare(&self.call, &operation.waits_for(&self.group));
                        }
                        let passes = !self.has_passed()
                            && operation.has_exchanged()
                            && self.group.is_followed(&self.call);
                        if passes {
                            self.group.note_exchanged(&self.call);
                        }
                        let look = self.group.looked(&self.call, operation, has_worked);
                        drop(stage);
                        if passes {
                            self.pass_on();
                        }
                        return look;
                    }
                }
            }
        };
        *stage = Stage::Over;
        drop(stage);
        self.finish(result, standing);
        Look::Over(())
    }

    /// Ends it if its group has failed, also before its turn: whoever moves the call that has the turn may be
    /// held up in the driver, which may wait for a stream that waits for this one. Only for one that asks no
    /// driver. Whether it has ended: another thread may be at it.
    pub fn end_in_failure(&self) -> bool {
        let Some(error) = self.group.failure() else { return false };
        let Ok(mut stage) = self.stage.try_lock() else { return false };
        let standing = match &mut *stage {
            Stage::Over => return self.has_ended(),
            Stage::Running { operation, .. } => {
                let standing = operation.standing();
                operation.abandon(&self.group);
                standing
            }
        };
        *stage = Stage::Over;
        let active = self.is_active();
        drop(stage);
        self.end(Err(error), standing, active);
        true
    }

    /// Whether its turn has gone to the next call.
    pub fn has_passed(&self) -> bool {
        self.passed.load(Ordering::Relaxed)
    }

    /// The next call has its turn.
    fn pass_on(&self) {
        if !self.passed.swap(true, Ordering::AcqRel) {
            self.group.pass_on(&self.call);
        }
    }

    /// A stream will wait for this word until it has ended.
    pub fn holds(&self, exit: &Arc<Word>) {
        self.exits.iter().for_each(|exits| exits.add(exit));
    }

    /// Whether a courier serves it.
    pub fn has_courier(&self) -> bool {
        self.has_courier
    }

    /// Whether streams wait for it.
    pub fn streams_wait(&self) -> bool {
        self.has_courier || self.exits.as_ref().is_some_and(|exits| exits.any())
    }

    /// Looks whether an operation on a device that has failed does not end, since nobody comes back from the
    /// driver who could end it. Then streams stop waiting for it: that may be what the driver waits for.
    /// Makes no driver call.
    pub fn oversee(&self) {
        let Some(exits) = self.exits.as_ref().filter(|_| !self.done.load(Ordering::Acquire)) else { return };
        let late = self.active.load(Ordering::Acquire) && self.call.deadline.expired();
        if !late && self.group.failure().is_none() {
            return;
        }
        match self.stage.try_lock().as_deref() {
            Ok(Stage::Over) => return,
            // It fails when the others have answered.
            Ok(Stage::Running { overdue: Some(inquiry), .. }) if !self.group.answered(inquiry) => return,
            _ => {}
        }
        let (since, inquiry) =
            self.held_up.get_or_init(|| (Instant::now(), self.group.ask_about(&self.call, NO_ANSWER)));
        if since.elapsed() < HELD_UP {
            return;
        }
        if self.group.failure().is_none() {
            if !self.group.answered(inquiry) {
                return;
            }
            self.group.fail(self.group.overdue(&self.call, inquiry).context(self.group.describe(&self.call)));
        }
        if exits.open() {
            log::warn!("{}: streams go on without it", self.group.describe(&self.call));
        }
    }

    /// Ends it with `Aborted` before its time; a send that goes whole all the same, as complete. Whether it
    /// was running.
    pub fn cancel(&self) -> bool {
        let mut stage = lock(&self.stage);
        let Stage::Running { operation, .. } = &mut *stage else { return false };
        let completion = operation.cancel(&self.group);
        *stage = Stage::Over;
        drop(stage);
        let result = completion.ok_or_else(|| Error::new(Status::Aborted, "cancelled by its caller"));
        self.finish(result, None);
        self.group.endpoint().wake();
        self.group.endpoint().see_out();
        true
    }

    /// Nobody has the work of it: what it fails with is its group's failure, also of a message.
    pub fn leave_to_group(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Makes what it has failed with the group's failure, if it is everybody's. Before it is abandoned:
    /// streams go on then, and who sees that is to see the failure.
    fn spread(&self, error: &Error, standing: Option<&str>) {
        self.group.spread(&self.call, error);
        if self.left.load(Ordering::Acquire) {
            self.group.fail(beside(error.context(self.group.describe(&self.call)), standing));
        }
    }

    /// `standing`: where it stood when it failed.
    fn finish(&self, result: Result<Completion>, standing: Option<String>) {
        self.end(result, standing, true);
    }

    /// As [`Running::finish`]. What had no turn passes it on when it comes: see [`Running::activate`].
    fn end(&self, result: Result<Completion>, standing: Option<String>, had_turn: bool) {
        let result = self.group.end_turn_record(&self.call, result);
        let result = result.map_err(|error| beside(error, standing.as_deref()));
        if let Err(error) = &result {
            log::debug!("'{}': {} #{}: {error}", self.group.name(), self.call.signature, self.call.sequence);
        }
        if had_turn {
            self.pass_on();
        }
        // The endpoint's list holds this, and this holds the endpoint: the circle ends here, whoever moved it
        // last.
        self.group.endpoint().disown(self);
        let mut ending = lock(&self.ending);
        ending.result = Some(result.clone());
        let callbacks = std::mem::take(&mut ending.callbacks);
        self.done.store(true, Ordering::Release);
        drop(ending);
        // Who found it being moved sleeps for anything.
        self.group.endpoint().wake_any();
        let _away = (!callbacks.is_empty()).then(|| self.group.endpoint().go_away());
        for callback in callbacks {
            call_back(callback, result.clone());
        }
    }

    /// Whether it should have ended a while ago, as [`Running::oversee`] has found, and has not.
    pub fn is_held_up(&self) -> bool {
        let late = |(since, _): &(Instant, Inquiry)| since.elapsed() >= HELD_UP;
        !self.done.load(Ordering::Acquire) && self.held_up.get().is_some_and(late)
    }

    /// Whether its result is there.
    pub fn has_ended(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Moves what is under way; the result if it is there then. Never blocks.
    pub fn test(&self) -> Option<Result<Completion>> {
        let endpoint = self.group.endpoint();
        // Whoever looked meanwhile, and found what this moved held by it, has gone to sleep.
        let moved = endpoint.progress(0, self.through());
        if moved {
            endpoint.kick();
        }
        let result = self.result();
        match result {
            Some(_) => endpoint.see_out(),
            None if !moved => endpoint.make_way(),
            None => {}
        }
        result
    }

    /// The result if it is there.
    pub fn result(&self) -> Option<Result<Completion>> {
        if !self.done.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.ending).result.clone()
    }

    /// Calls `callback` with the result: now if it is there, else from the thread that ends the operation.
    pub fn on_complete(&self, callback: Callback) {
        let mut ending = lock(&self.ending);
        match ending.result.clone() {
            Some(result) => {
                drop(ending);
                call_back_late(callback, result);
            }
            None => ending.callbacks.push(callback),
        }
    }

    /// Waits in this thread, moving everything. `None` when `deadline` has passed before the operation ended.
    pub fn wait(&self, deadline: Deadline) -> Option<Result<Completion>> {
        if let Err(error) = self.group.endpoint().check_fork() {
            return Some(Err(error));
        }
        let endpoint = self.group.endpoint();
        let follow = |deadline| {
            endpoint.follow(deadline, self.through, |sleeper| self.look_for(sleeper, || self.result()))
        };
        if let Err(error) = endpoint.check_present() {
            let ended = follow(deadline.min(Deadline::after(LAST_WORDS)));
            if ended.is_some() || deadline.expired() {
                return ended;
            }
            self.group.fail(error);
        }
        follow(deadline)
    }

    /// Waits in this thread while the attendant moves it, for so long at most. Whether it has ended.
    pub fn watch(&self, patience: Duration) -> bool {
        let endpoint = self.group.endpoint();
        let mut begun = None;
        while !self.has_ended() {
            if !endpoint.is_attended() || begun.get_or_insert_with(Instant::now).elapsed() >= patience {
                return false;
            }
            sys::process::yield_now();
        }
        true
    }

    /// Whether messages alone move it.
    pub fn is_by_messages(&self) -> bool {
        self.through == Through::Messages
    }

    /// Waits in this thread, moving it and everything else, until `is_over` or the deadline has passed. For
    /// what [is by messages](Running::is_by_messages), in the process that made it. `is_alone`: whether that
    /// waits for nothing but this one, and for what has all who wait here woken; asked before this thread
    /// sleeps.
    pub fn wait_until(
        &self,
        deadline: Deadline,
        mut is_alone: impl FnMut() -> bool,
        mut is_over: impl FnMut() -> bool,
    ) {
        self.group.endpoint().follow(deadline, self.through, |sleeper| {
            let sleeper = sleeper.filter(|_| is_alone());
            self.look_for(sleeper, || is_over().then_some(()))
        });
    }

    /// Moves it, then looks whether what is waited for is there. If not, `sleeper` waits for nothing but it.
    fn look_for<T>(&self, sleeper: Option<&Arc<Sleeper>>, answer: impl FnOnce() -> Option<T>) -> Look<T> {
        let look = self.advance();
        if let (Some(sleeper), Look::Waits) = (sleeper, look) {
            self.sleep_for_mail(sleeper);
        }
        match answer() {
            Some(answer) => Look::Over(answer),
            None if look == Look::AtWork => Look::AtWork,
            None => Look::Waits,
        }
    }

    /// If all that it waits for comes to its mailbox, what comes there wakes this thread, and its end does:
    /// whoever ends it closes that.
    fn sleep_for_mail(&self, sleeper: &Arc<Sleeper>) {
        // Who moves it at this moment may be about to close it.
        let Ok(stage) = self.stage.try_lock() else { return };
        if let Stage::Running { operation, has_worked: false, overdue: None, .. } = &*stage
            && let Some(mailbox) = operation.mailbox().filter(|_| self.is_active())
        {
            self.group.endpoint().sleep_for_mail(mailbox, sleeper);
        }
    }
}

/// An error, and what its call waited for on this rank.
fn beside(error: Error, standing: Option<&str>) -> Error {
    match standing {
        Some(standing) => Error::new(error.status(), format!("{error}; here, {standing}")),
        None => error,
    }
}
