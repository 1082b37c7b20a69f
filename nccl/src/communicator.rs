//! Communicators: what a handle stands for, from the moment it is given out.

mod line;
mod making;
mod suspended;
#[cfg(test)]
mod tests;
mod waits;

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use unisono::communicator::{Completion, Context, Options, Recall, Rendezvous, Rest, Work};
use unisono::cuda::stream::StreamName;
use unisono::deadline::Deadline;
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::tcp_server::ServerHandle;
use unisono::sys::fork;

use self::line::Started;
use self::making::Children;
pub(crate) use self::making::Making;
pub(crate) use self::waits::Wait;
use self::waits::Waits;
use crate::abi::ncclComm_t;
use crate::config::Config;
use crate::engine;
use crate::error::{Error, Result, Status, caught, fail};
use crate::grow::Invitation;
use crate::handle::{Found, Table};
use crate::memory;
use crate::operator::Operators;
use crate::order::Order;
use crate::place::Place;
use crate::settings;

/// All communicators of this process that have a handle.
pub(crate) static COMMUNICATORS: Table<Communicator> = Table::new();

thread_local! {
    /// Those that this thread has called last.
    static FOUND: RefCell<Found<Communicator>> = const { RefCell::new(Found::NOTHING) };
}

/// The communicator behind a handle.
pub(crate) fn find(comm: ncclComm_t) -> Result<Arc<Communicator>> {
    let communicator = COMMUNICATORS.find_again(comm, &FOUND).ok_or_else(|| unknown(comm))?;
    if communicator.is_inherited() {
        fail!(
            InvalidUsage,
            "the communicator was made before a fork: the child has no links. Make communicators after forking"
        );
    }
    Ok(communicator)
}

/// Changes the phase of the communicator behind a handle, which another one may replace at any moment before.
pub(crate) fn change_phase(
    comm: ncclComm_t,
    change: impl Fn(&Communicator, &mut Phase) -> Result<()>,
) -> Result<Arc<Communicator>> {
    loop {
        let communicator = find(comm)?;
        let mut phase = communicator.phase();
        if *phase != Phase::Replaced {
            change(&communicator, &mut phase)?;
            drop(phase);
            return Ok(communicator);
        }
    }
}

/// The communicator behind a handle, which is none any more. `None`: it is the parent's of this forked
/// process, where nothing of it may be touched.
pub(crate) fn take(comm: ncclComm_t) -> Result<Option<Arc<Communicator>>> {
    let communicator = COMMUNICATORS.take(comm).ok_or_else(|| unknown(comm))?;
    if communicator.is_inherited() {
        std::mem::forget(communicator);
        return Ok(None);
    }
    Ok(Some(communicator))
}

fn unknown(comm: ncclComm_t) -> Error {
    let text = match comm.is_null() {
        true => "comm is NULL".to_owned(),
        false => format!(
            "comm ({:#x}) is no communicator: it was destroyed or aborted before, or never created",
            comm.addr()
        ),
    };
    Error::new(Status::InvalidArgument, text)
}

/// One rank's communicator. It has a handle before it has met the others, so that they may be met in the
/// background.
pub(crate) struct Communicator {
    /// Once it has one.
    handle: OnceLock<Arc<Handle>>,
    pub(crate) place: Place,
    pub(crate) config: Config,
    pub(crate) operators: Arc<Operators>,
    /// What came of meeting the others; unset while that is under way.
    met: OnceLock<Result<Context>>,
    phase: Mutex<Phase>,
    /// Of what all ranks set up over it.
    order: Arc<Order>,
    /// That are being made of it, and that could not be.
    children: Arc<Children>,
    /// For ranks that are to join it.
    invitation: Mutex<Option<Invitation>>,
    /// What was started on each stream last, and what the host has a part in.
    started: Arc<Mutex<Vec<Started>>>,
    /// The stream that comes behind all that its streams were given, once there is one.
    last: Mutex<Option<StreamName>>,
    /// Calls in host memory, which are not among that.
    waits: Waits,
    /// The first failure among that: a message's is not the group's.
    lost: OnceLock<Error>,
    /// A group of this rank alone, for what it sends to itself.
    alone: OnceLock<Context>,
    meeting: Mutex<Meeting>,
    /// Calls it off.
    recall: Recall,
    changed: Condvar,
    /// Serve the unique ids that it was made from, if this process made them.
    servers: Vec<Arc<ServerHandle>>,
    fork: u32,
}

/// The number of a handle, whichever communicator it stands for.
struct Handle {
    number: usize,
    fork: u32,
}

impl Drop for Handle {
    /// Nobody can take back any more what its client has registered and has not taken back.
    fn drop(&mut self) {
        if self.fork == fork::generation() {
            memory::forget(self.number);
        }
    }
}

/// How far meeting the others has come.
#[derive(Default)]
struct Meeting {
    over: bool,
    aborted: bool,
    /// On which that is done, if the call by which it is made has not waited for it.
    thread: Option<JoinHandle<()>>,
}

/// What may still be done with a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Everything.
    Open,
    /// What was started is waited for; then it can be destroyed.
    Finalized,
    /// Nothing runs any more, but it can be split and shrunk.
    Revoked,
    /// It holds no more memory of its device than it must, until it is resumed.
    Suspended,
    /// Its handle stands for another one, which is suspended.
    Replaced,
}

impl Phase {
    /// Refuses what needs everything of a communicator.
    pub(crate) fn check_open(self, context: &Context) -> Result<()> {
        self.check_unrevoked(context)?;
        self.check_unfinished(context)
    }

    /// Refuses what can still be done when a communicator was finalized, but not when it was revoked.
    fn check_unrevoked(self, context: &Context) -> Result<()> {
        if self == Phase::Revoked {
            fail!(
                InvalidUsage,
                "'{}' was revoked: it can only be split, shrunk or destroyed now",
                context.name()
            );
        }
        self.check_awake(context)
    }

    /// Refuses what can still be done when a communicator was revoked, but not when it was finalized.
    pub(crate) fn check_unfinished(self, context: &Context) -> Result<()> {
        self.check_ends(context)?;
        self.check_awake(context)
    }

    /// Refuses what can still be done with a communicator whatever becomes of it, but not when it was
    /// finalized.
    pub(crate) fn check_ends(self, context: &Context) -> Result<()> {
        if self == Phase::Finalized {
            fail!(InvalidUsage, "'{}' was finalized: it can only be destroyed now", context.name());
        }
        Ok(())
    }

    /// Refuses what cannot be done while a communicator is suspended.
    fn check_awake(self, context: &Context) -> Result<()> {
        if matches!(self, Phase::Suspended | Phase::Replaced) {
            fail!(InvalidUsage, "'{}' is suspended: call ncclCommResume first", context.name());
        }
        Ok(())
    }
}

/// How long the ranks of a new communicator wait for each other, if nothing says. NCCL's wait for as long as
/// it takes, and programs rely on that: one rank prepares data while the others are already there.
const MEETING: Duration = Duration::from_secs(2 * 60 * 60);
/// Seconds that ranks wait for each other.
pub(crate) const MEETING_VARIABLE: &str = "UNISONO_NCCL_MEETING_TIMEOUT";
/// Seconds that an operation may take, and that ranks wait for each other if [`MEETING_VARIABLE`] does not
/// say. Without it an operation takes as long as it takes, as NCCL's do: ranks of a training wait while
/// another one writes a checkpoint. Death is noticed without it.
const TIMEOUT_VARIABLE: &str = "UNISONO_NCCL_TIMEOUT";

impl Communicator {
    /// One that has yet to meet the others.
    pub(crate) fn new(place: Place, config: Config, servers: Vec<Arc<ServerHandle>>) -> Arc<Communicator> {
        Arc::new(Communicator::unmet(place, config, servers))
    }

    fn unmet(place: Place, config: Config, servers: Vec<Arc<ServerHandle>>) -> Communicator {
        Communicator {
            handle: OnceLock::new(),
            place,
            config,
            operators: Arc::default(),
            met: OnceLock::new(),
            phase: Mutex::new(Phase::Open),
            order: Arc::default(),
            children: Arc::default(),
            invitation: Mutex::default(),
            started: Arc::default(),
            last: Mutex::default(),
            waits: Waits::default(),
            lost: OnceLock::new(),
            alone: OnceLock::new(),
            meeting: Mutex::default(),
            recall: Recall::default(),
            changed: Condvar::new(),
            servers,
            fork: fork::generation(),
        }
    }

    /// Gives it its handle.
    pub(crate) fn give_handle(self: &Arc<Self>) -> ncclComm_t {
        let handle: ncclComm_t = COMMUNICATORS.insert(self.clone());
        // Once.
        let _ = self.handle.set(Arc::new(Handle { number: handle.addr(), fork: self.fork }));
        handle
    }

    /// Whether this is a child that was forked since: its locks may be held by threads that do not exist
    /// here.
    fn is_inherited(&self) -> bool {
        self.fork != fork::generation()
    }

    /// A child's servers are its parent's: it lives on them.
    pub(crate) fn servers(&self) -> Vec<Arc<ServerHandle>> {
        self.servers.clone()
    }

    /// Meets the others by `meet`, which gives nothing if this rank turns out to have no part in it, and ends
    /// before its time when it is called off.
    pub(crate) fn meet(&self, meet: impl FnOnce(&Recall) -> Result<Option<Context>>) {
        let met = caught(|| {
            let Some(context) = meet(&self.recall)? else { return Ok(None) };
            context.limit_blocks(self.config.max_ctas.unwrap_or(0));
            if *self.phase() == Phase::Suspended {
                return Ok(Some(context));
            }
            self.connect(&context)?;
            let (rank, size, name) = (context.rank(), context.size(), context.name());
            log::info!("rank {rank} of {size} in '{name}' on {:?}", self.place);
            // As NCCL says it, which programs look for.
            log::info!("Using network Socket");
            Ok(Some(context))
        });
        if let Err(error) = &met {
            log::warn!("{error}");
        }
        self.recall.end();
        let mut late = None;
        let mut meeting = self.meeting();
        // Under the lock: whoever stops it finds it met, or is found here.
        let met = match met.transpose() {
            Some(met) if self.is_stopped() => {
                late = met.ok();
                Some(Err(revoked()))
            }
            // Clients have been told so.
            Some(Err(_)) if meeting.aborted => Some(Err(aborted())),
            met => met,
        };
        if let Some(met) = met {
            // Set once: whoever makes a communicator meets for it once.
            let _ = self.met.set(met);
        }
        meeting.over = true;
        let aborted = meeting.aborted;
        drop(meeting);
        self.changed.notify_all();
        if aborted {
            self.interrupt();
        }
        if let Some(context) = late {
            // The others believe that they have met it.
            context.abort();
        }
    }

    /// Has the ranks' devices agree on the way of their calls, which may take memory of them.
    fn connect(&self, context: &Context) -> Result<()> {
        engine::connect(context, self.place)?;
        if let Some(mixes) = settings::number("NCCL_GRAPH_MIXING_SUPPORT") {
            context.mix_graphs(mixes != 0);
        }
        Ok(())
    }

    /// Waits until it has met the others, which has a deadline of its own, or is aborted.
    pub(crate) fn wait(&self) -> Result<()> {
        let underway = |meeting: &mut Meeting| !meeting.over && !meeting.aborted;
        let meeting = self.changed.wait_while(self.meeting(), underway);
        let is_aborted = meeting.unwrap_or_else(PoisonError::into_inner).aborted;
        match self.outcome() {
            // What was revoked keeps its handle if it has met them.
            _ if is_aborted && !self.is_stopped() => Err(aborted()),
            outcome => outcome.map_or(Ok(()), |met| met.map(drop)),
        }
    }

    /// Keeps the thread on which it meets the others, for who lets go of it.
    pub(crate) fn keep_thread(&self, thread: JoinHandle<()>) {
        self.meeting().thread = Some(thread);
    }

    /// Once it has met the others, waits until the thread on which it has done so holds it no more: whoever
    /// lets go of it next is the last, and waits for what others are to hear. The program may end the process
    /// then.
    pub(crate) fn await_thread(&self) {
        if self.met().is_none() {
            return;
        }
        let thread = self.meeting().thread.take();
        // Panics are caught within.
        let _ = thread.map(JoinHandle::join);
    }

    /// What came of meeting the others, if that is known.
    pub(crate) fn met(&self) -> Option<&Result<Context>> {
        self.met.get()
    }

    /// The same. What is stopped before it has met them will not have: that is known at once.
    fn outcome(&self) -> Option<Result<&Context>> {
        let met = || self.met.get().map(|met| met.as_ref().map_err(Error::clone));
        if let Some(met) = met() {
            return Some(met);
        }
        if !self.is_stopped() {
            return None;
        }
        // Under the lock: whoever meets has let it be seen here, or finds it stopped.
        let _meeting = self.meeting();
        Some(met().unwrap_or_else(|| Err(revoked())))
    }

    /// The group, once it has met; what it was, if it has failed since.
    pub(crate) fn group(&self) -> Result<&Context> {
        match self.outcome() {
            Some(met) => met.map_err(|error| error.context(NOT_CREATED)),
            None => fail!(
                InvalidArgument,
                "the communicator is still being created: poll ncclCommGetAsyncError until it answers no more ncclInProgress"
            ),
        }
    }

    /// The group, for a call.
    pub(crate) fn open_group(&self) -> Result<&Context> {
        let context = self.group()?;
        self.phase().check_open(context)?;
        Ok(context)
    }

    /// The group, for a call that was made while it was open: its thread's group may have finalized it behind
    /// the call.
    pub(crate) fn called_group(&self) -> Result<&Context> {
        let context = self.group()?;
        self.phase().check_unrevoked(context)?;
        Ok(context)
    }

    /// The order of what all ranks set up over it.
    pub(crate) fn order(&self) -> &Arc<Order> {
        &self.order
    }

    /// By what ranks are to join it when it grows, if this rank has made that.
    pub(crate) fn invitation(&self) -> MutexGuard<'_, Option<Invitation>> {
        self.invitation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something is being set up over it, or children are being made of it that nobody has aborted.
    pub(crate) fn is_setting_up(&self) -> bool {
        self.making().iter().any(|child| !child.meeting().aborted) || !self.order.is_idle()
    }

    /// Ends everything that runs, on purpose: as [`Communicator::abort`], but it has not failed, and what
    /// becomes of children that were begun before is behind it.
    pub(crate) fn stop(&self) {
        let mut unmade = self.unmade();
        unmade.first = None;
        unmade.stops += 1;
        let stops = unmade.stops;
        drop(unmade);
        // Children that are made of what was stopped before need nothing of it.
        if stops == 1 {
            self.interrupt();
        }
    }

    /// Whether it was stopped on purpose.
    pub(crate) fn is_stopped(&self) -> bool {
        self.unmade().stops > 0
    }

    /// Its phase, to look at or to change.
    pub(crate) fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure, if there was one; of what was stopped on purpose only those of its children, and
    /// that it has not met the others.
    pub(crate) fn failure(&self) -> Option<Error> {
        let own = match self.outcome() {
            Some(Err(error)) => Some(error),
            _ if self.is_stopped() => None,
            None => self.meeting().aborted.then(aborted),
            Some(Ok(context)) => context.failure().or_else(|| {
                self.started().retain(|one| !self.has_ended(&one.work));
                self.lost.get().cloned()
            }),
        };
        own.or_else(|| self.unmade().first.clone())
    }

    /// A group of this rank alone.
    pub(crate) fn alone(&self) -> Result<&Context> {
        if let Some(context) = self.alone.get() {
            return Ok(context);
        }
        let context = Context::create(Options {
            rank: 0,
            size: 1,
            rendezvous: Rendezvous::Store(Arc::new(HashStore::new())),
            name: "self".into(),
            timeout: MEETING,
            interface: None,
            transports: None,
            host: None,
        })?;
        let context = self.alone.get_or_init(|| context);
        // Who aborts this sees that group, or is seen here.
        if self.meeting().aborted {
            context.abort();
        }
        Ok(context)
    }

    /// Ends everything that runs, here at once and soon on the other ranks; also children that are being
    /// made, which clients may know nothing else to end by. Waits for nobody.
    pub(crate) fn abort(&self) {
        // Before it looks for children: see `Making::of`.
        self.unmade().ended = true;
        self.interrupt();
    }

    /// Ends everything that runs for good: as [`Communicator::abort`], but where nothing of this rank is under
    /// way the other ranks hear of it only if they wait for it.
    pub(crate) fn leave(&self) {
        // As there.
        self.unmade().ended = true;
        if let Some(Ok(context)) = self.met.get() {
            context.leave(|| self.rest());
        }
        self.interrupt();
    }

    /// Whether all that the native context does not know of is at rest and has ended well.
    fn rest(&self) -> Rest {
        let is_over = self.making().is_empty() && self.order.is_idle() && self.waits.are_over();
        if !is_over || self.lost.get().is_some() || self.unmade().first.is_some() {
            return Rest::Known(false);
        }
        // Who has it locked may be asking the driver.
        if self.started.try_lock().is_ok_and(|started| started.is_empty()) {
            return Rest::Known(true);
        }
        let started = self.started.clone();
        Rest::Asked(Box::new(move || {
            let started: Vec<Work> = works_of(&started.lock().unwrap_or_else(PoisonError::into_inner));
            started.iter().all(|work| matches!(work.peek(), Some(Ok(_))))
        }))
    }

    fn interrupt(&self) {
        // Under the lock: whoever meets either sees this, or has let the group be seen here.
        self.meeting().aborted = true;
        self.changed.notify_all();
        self.recall.recall();
        if let Some(Ok(context)) = self.met.get() {
            context.abort();
        }
        if let Some(context) = self.alone.get() {
            context.abort();
        }
        let making = self.making().clone();
        making.iter().for_each(|child| child.give_up_meeting());
    }

    /// It is to meet nobody any more. One that has met stays: a client may know of it already.
    fn give_up_meeting(&self) {
        let mut meeting = self.meeting();
        let is_over = meeting.over;
        meeting.aborted |= !is_over;
        drop(meeting);
        self.changed.notify_all();
        if !is_over {
            self.recall.recall();
        }
    }

    /// The calling thread waits in a call until that is dropped: whoever ends the communicator waits for it.
    pub(crate) fn begin_wait(&self) -> Wait<'_> {
        self.waits.begin()
    }

    /// Whether a work has ended.
    fn has_ended(&self, work: &Work) -> bool {
        self.is_ended(work.test())
    }

    /// Whether this is the end of a work; notes how it ended, if that is not well.
    fn is_ended(&self, result: Option<Result<Completion>>) -> bool {
        if let Some(Err(error)) = &result {
            let _ = self.lost.set(error.clone());
        }
        result.is_some()
    }

    /// Whether everything that was started has ended, also what others need of this rank to set up their
    /// children.
    pub(crate) fn idle(&self) -> bool {
        if !self.order.is_idle() || !self.waits.are_over() {
            return false;
        }
        let mut started = self.started();
        started.retain(|one| !self.has_ended(&one.work));
        // What the driver cannot tell any more does not run.
        started.is_empty() && self.group().map_or(true, |context| context.is_settled().unwrap_or(true))
    }

    /// Waits for everything that was started, as [`Communicator::idle`] says.
    pub(crate) fn drain(&self, deadline: Deadline) -> Result<()> {
        let in_time = self.order.drain(deadline);
        self.finish_started(deadline)?;
        if !in_time {
            fail!(Timeout, "a child of the communicator is still being made");
        }
        Ok(())
    }

    /// Waits for everything that was called, but not for what others set up.
    fn finish_started(&self, deadline: Deadline) -> Result<()> {
        // They stay in sight: other threads ask for failures meanwhile, or wait, too.
        let started = works_of(&self.started());
        // All are waited for, also when one has failed; each ends by its own deadline, or when somebody
        // aborts.
        let mut results: Vec<_> = started.iter().map(|work| work.wait(deadline).map(drop)).collect();
        if !self.waits.drain(deadline) {
            results.push(Err(Error::new(Status::Timeout, "a call on the communicator is still under way")));
        }
        self.started().retain(|one| !self.has_ended(&one.work));
        if let Ok(context) = self.group() {
            results.push(context.settle(deadline));
        }
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        results.into_iter().collect()
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn started(&self) -> MutexGuard<'_, Vec<Started>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn works_of(started: &[Started]) -> Vec<Work> {
    started.iter().map(|one| one.work.clone()).collect()
}

const NOT_CREATED: &str = "the communicator could not be created";

fn revoked() -> Error {
    let text = "it was revoked before it had met the other ranks, and can only be destroyed now";
    Error::new(Status::InvalidUsage, text)
}

fn aborted() -> Error {
    Error::new(Status::Aborted, "the communicator was aborted while it met the other ranks")
}

/// How long ranks that meet wait for each other; an error where the environment cannot be understood.
pub(crate) fn meeting_timeout() -> Result<Duration> {
    static GIVEN: OnceLock<Result<Option<Duration>>> = OnceLock::new();
    let operation = given_timeout()?;
    let given = GIVEN.get_or_init(|| read_seconds(MEETING_VARIABLE)).clone()?;
    Ok(given.or(operation).unwrap_or(MEETING))
}

/// How long an operation may take.
pub(crate) fn operation_timeout() -> Duration {
    // Where it cannot be understood there is no communicator, so nobody asks.
    given_timeout().ok().flatten().unwrap_or(Duration::MAX)
}

fn given_timeout() -> Result<Option<Duration>> {
    static GIVEN: OnceLock<Result<Option<Duration>>> = OnceLock::new();
    GIVEN.get_or_init(|| read_seconds(TIMEOUT_VARIABLE)).clone()
}

fn read_seconds(variable: &str) -> Result<Option<Duration>> {
    unisono::settings::seconds(variable, unisono::settings::get(variable).as_deref())
}
