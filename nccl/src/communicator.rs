//! Communicators: what a handle stands for, from the moment it is given out.

mod making;

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use unisono::communicator::{Completion, Context, Options, Recall, Rendezvous, Work};
use unisono::deadline::Deadline;
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::tcp_server::ServerHandle;
use unisono::sys::fork;

pub(crate) use self::making::Making;
use self::making::Unmade;
use crate::abi::ncclComm_t;
use crate::config::{Config, seconds};
use crate::engine;
use crate::error::{Error, Result, Status, caught, fail};
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

/// The communicator behind a handle, which is none any more. `None`: it is the parent's of this forked process, where nothing of
/// it may be touched.
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

/// One rank's communicator. It has a handle before it has met the others, so that they may be met in the background.
pub(crate) struct Communicator {
    /// The number of its handle, once it has one.
    handle: OnceLock<usize>,
    pub(crate) place: Place,
    pub(crate) config: Config,
    pub(crate) operators: Operators,
    /// What came of meeting the others; unset while that is under way.
    met: OnceLock<Result<Context>>,
    phase: Mutex<Phase>,
    /// Of what all ranks set up over it.
    order: Arc<Order>,
    /// The children that are being made of it.
    making: Mutex<Vec<Arc<Communicator>>>,
    unmade: Mutex<Unmade>,
    /// What was started on each stream last, and what the host has a part in.
    started: Mutex<Vec<(usize, Work)>>,
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

/// How far meeting the others has come.
#[derive(Default)]
struct Meeting {
    over: bool,
    aborted: bool,
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
        Ok(())
    }

    /// Refuses what can still be done when a communicator was revoked, but not when it was finalized.
    pub(crate) fn check_unfinished(self, context: &Context) -> Result<()> {
        if self == Phase::Finalized {
            fail!(InvalidUsage, "'{}' was finalized: it can only be destroyed now", context.name());
        }
        Ok(())
    }
}

/// How long the ranks of a new communicator wait for each other, if nothing says. NCCL's wait for as long as it takes, and programs rely
/// on that: one rank prepares data while the others are already there.
const MEETING: Duration = Duration::from_secs(2 * 60 * 60);
/// Seconds that ranks wait for each other.
const MEETING_VARIABLE: &str = "UNISONO_NCCL_MEETING_TIMEOUT";
/// Seconds that an operation may take, and that ranks wait for each other if [`MEETING_VARIABLE`] does not say. Without it an operation takes as long as it
/// takes, as NCCL's do: ranks of a training wait while another one writes a checkpoint. Death is noticed without it.
const TIMEOUT_VARIABLE: &str = "UNISONO_NCCL_TIMEOUT";

impl Communicator {
    /// One that has yet to meet the others.
    pub(crate) fn new(place: Place, config: Config, servers: Vec<Arc<ServerHandle>>) -> Arc<Communicator> {
        Arc::new(Communicator {
            handle: OnceLock::new(),
            place,
            config,
            operators: Operators::default(),
            met: OnceLock::new(),
            phase: Mutex::new(Phase::Open),
            order: Arc::default(),
            making: Mutex::default(),
            unmade: Mutex::default(),
            started: Mutex::default(),
            lost: OnceLock::new(),
            alone: OnceLock::new(),
            meeting: Mutex::default(),
            recall: Recall::default(),
            changed: Condvar::new(),
            servers,
            fork: fork::generation(),
        })
    }

    /// Gives it its handle.
    pub(crate) fn give_handle(self: &Arc<Self>) -> ncclComm_t {
        let handle: ncclComm_t = COMMUNICATORS.insert(self.clone());
        // Once.
        let _ = self.handle.set(handle.addr());
        handle
    }

    /// Whether this is a child that was forked since: its locks may be held by threads that do not exist here.
    fn is_inherited(&self) -> bool {
        self.fork != fork::generation()
    }

    /// A child's servers are its parent's: it lives on them.
    pub(crate) fn servers(&self) -> Vec<Arc<ServerHandle>> {
        self.servers.clone()
    }

    /// Meets the others by `meet`, which gives nothing if this rank turns out to have no part in it, and ends before its time when it is
    /// called off.
    pub(crate) fn meet(&self, meet: impl FnOnce(&Recall) -> Result<Option<Context>>) {
        let met = caught(|| {
            let Some(context) = meet(&self.recall)? else { return Ok(None) };
            context.limit_blocks(self.config.max_ctas.unwrap_or(0));
            engine::connect(&context, self.place)?;
            if let Some(mixes) = settings::number("NCCL_GRAPH_MIXING_SUPPORT") {
                context.mix_graphs(mixes != 0);
            }
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

    /// The group, for a call that was made while it was open: its thread's group may have finalized it behind the call.
    pub(crate) fn called_group(&self) -> Result<&Context> {
        let context = self.group()?;
        self.phase().check_unrevoked(context)?;
        Ok(context)
    }

    /// The order of what all ranks set up over it.
    pub(crate) fn order(&self) -> &Arc<Order> {
        &self.order
    }

    /// Whether something is being set up over it, or children are being made of it that nobody has aborted.
    pub(crate) fn is_setting_up(&self) -> bool {
        self.making().iter().any(|child| !child.meeting().aborted) || !self.order.is_idle()
    }

    /// Ends everything that runs, on purpose: as [`Communicator::abort`], but it has not failed, and what becomes of children that were
    /// begun before is behind it.
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

    /// The first failure, if there was one; of what was stopped on purpose only those of its children, and that it has not met the others.
    pub(crate) fn failure(&self) -> Option<Error> {
        let own = match self.outcome() {
            Some(Err(error)) => Some(error),
            _ if self.is_stopped() => None,
            None => self.meeting().aborted.then(aborted),
            Some(Ok(context)) => context.failure().or_else(|| {
                self.started().retain(|(_, work)| !self.has_ended(work));
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
        Ok(self.alone.get_or_init(|| context))
    }

    /// Ends everything that runs, here at once and soon on the other ranks; also children that are being made, which clients may know
    /// nothing else to end by. Waits for nobody.
    pub(crate) fn abort(&self) {
        // Before it looks for children: see `Making::of`.
        self.unmade().ended = true;
        self.interrupt();
    }

    fn interrupt(&self) {
        // Under the lock: whoever meets either sees this, or has let the group be seen here.
        self.meeting().aborted = true;
        self.changed.notify_all();
        self.recall.recall();
        if let Some(Ok(context)) = self.met.get() {
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

    /// Keeps in sight what was started together on `stream`. What the stream was given before is done before it. What GPUs
    /// do alone need not be kept.
    pub(crate) fn keep(&self, stream: usize, works: impl IntoIterator<Item = Work>) {
        let mut works = works.into_iter().peekable();
        if works.peek().is_none() {
            return;
        }
        let mut started = self.started();
        // Only looks, and no further than to the first that runs: each call has up to 64 before it.
        let mut runs = false;
        started.retain(|(other, work)| {
            if *other != stream {
                return true;
            }
            runs |= work.is_hosted() && !self.is_ended(work.peek());
            runs && work.is_hosted()
        });
        started.extend(works.map(|work| (stream, work)));
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

    /// Whether everything that was started has ended, also what others need of this rank to set up their children.
    pub(crate) fn idle(&self) -> bool {
        if !self.order.is_idle() {
            return false;
        }
        let mut started = self.started();
        started.retain(|(_, work)| !self.has_ended(work));
        // What the driver cannot tell any more does not run.
        started.is_empty() && self.group().map_or(true, |context| context.is_settled().unwrap_or(true))
    }

    /// Waits for everything that was started, as [`Communicator::idle`] says.
    pub(crate) fn drain(&self, deadline: Deadline) -> Result<()> {
        let in_time = self.order.drain(deadline);
        // They stay in sight: other threads ask for failures meanwhile, or wait, too.
        let started: Vec<Work> = self.started().iter().map(|(_, work)| work.clone()).collect();
        // All are waited for, also when one has failed; each ends by its own deadline, or when somebody aborts.
        let mut results: Vec<_> = started.iter().map(|work| work.wait(deadline).map(drop)).collect();
        self.started().retain(|(_, work)| !self.has_ended(work));
        if let Ok(context) = self.group() {
            results.push(context.settle(deadline));
        }
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        if !in_time {
            fail!(Timeout, "a child of the communicator is still being made");
        }
        results.into_iter().collect()
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn started(&self) -> MutexGuard<'_, Vec<(usize, Work)>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    /// Nobody can take back any more what its client has registered and has not taken back.
    fn drop(&mut self) {
        if let (Some(&handle), false) = (self.handle.get(), self.is_inherited()) {
            memory::forget(handle);
        }
    }
}

const NOT_CREATED: &str = "the communicator could not be created";

fn revoked() -> Error {
    let text = "it was revoked before it had met the other ranks, and can only be destroyed now";
    Error::new(Status::InvalidUsage, text)
}

fn aborted() -> Error {
    Error::new(Status::Aborted, "the communicator was aborted while it met the other ranks")
}

/// How long ranks that meet wait for each other.
pub(crate) fn meeting_timeout() -> Duration {
    static GIVEN: OnceLock<Option<Duration>> = OnceLock::new();
    GIVEN.get_or_init(|| seconds(MEETING_VARIABLE)).or_else(given_timeout).unwrap_or(MEETING)
}

/// How long an operation may take.
pub(crate) fn operation_timeout() -> Duration {
    given_timeout().unwrap_or(Duration::MAX)
}

fn given_timeout() -> Option<Duration> {
    static GIVEN: OnceLock<Option<Duration>> = OnceLock::new();
    *GIVEN.get_or_init(|| seconds(TIMEOUT_VARIABLE))
}

#[cfg(test)]
mod tests {
    use unisono::collective::request::{Counts, Kind, Request};
    use unisono::communicator::Call;
    use unisono::reduce::{DataType, Operator};
    use unisono::rendezvous::store::Store;

    use super::*;
    use crate::error::{SUCCESS, result};

    fn options(rank: u32, store: Arc<HashStore>, timeout: Duration) -> Options {
        Options {
            rank,
            size: 2,
            rendezvous: Rendezvous::Store(store),
            name: "pair".into(),
            timeout,
            interface: None,
            transports: None,
            host: None,
        }
    }

    fn pair(rank: u32, store: Arc<HashStore>) -> Context {
        Context::create(options(rank, store, SOON)).expect("the ranks meet")
    }

    const SOON: Duration = Duration::from_secs(30);

    /// What comes of `body`, which ends long before the ranks' own deadline.
    fn soon<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
        let (give, given) = std::sync::mpsc::channel();
        std::thread::spawn(move || give.send(body()));
        given.recv_timeout(2 * SOON).expect("it ends")
    }

    fn message(context: &Context, kind: Kind, bytes: &mut [u8]) -> Work {
        let request = Request {
            kind,
            input: bytes.as_ptr(),
            output: bytes.as_mut_ptr(),
            counts: Counts::Uniform(bytes.len() as u64),
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: 1 - context.rank(),
        };
        // SAFETY: the callers keep the bytes until the work has ended.
        unsafe { context.start(&request, &Call::default()) }.expect("a message is started")
    }

    /// A message that fails does not fail its group, and its stream goes on: nobody else would tell.
    #[test]
    fn the_failure_of_a_message_is_the_communicators() {
        let store = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let context = pair(1, store.clone());
                let mut long = [7; 8];
                let _ = message(&context, Kind::Send, &mut long).wait(Deadline::NEVER);
                let mut short = [8; 4];
                let sent = message(&context, Kind::Send, &mut short).wait(Deadline::NEVER);
                sent.expect("a message of the right length");
                context
            });
            let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
            communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
            let context = communicator.group().expect("they have met");
            let (mut first, mut second) = ([0; 4], [0; 4]);
            // The second is behind the first on its stream, and well.
            let works = [&mut first, &mut second].map(|bytes| message(context, Kind::Receive, bytes));
            for work in &works {
                communicator.keep(5, [work.clone()]);
            }
            let _stays = sender.join().expect("no panic");
            let results = works.map(|work| work.wait(Deadline::NEVER));
            assert!(results[0].is_err() && results[1].is_ok(), "{results:?}");
            assert!(context.failure().is_none());
            assert_eq!(communicator.failure().as_ref(), results[0].as_ref().err());
            assert!(communicator.drain(Deadline::NEVER).is_err() && communicator.idle());
        });
    }

    /// One thread ends a communicator, and another one, which looks after it, is to abort it: nobody else knows of the failure.
    #[test]
    fn the_failure_of_a_message_is_seen_while_another_thread_waits_for_the_rest() {
        let store = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| pair(1, store.clone()));
            let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
            communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
            let sender = sender.join().expect("no panic");
            let context = communicator.group().expect("they have met");
            let (mut first, mut second) = ([0; 4], [0; 4]);
            let works = [&mut first, &mut second].map(|bytes| message(context, Kind::Receive, bytes));
            communicator.keep(5, works.clone());
            let ended = communicator.clone();
            let drains = scope.spawn(move || ended.drain(Deadline::NEVER));
            // It has begun to wait by then, mostly.
            std::thread::sleep(Duration::from_millis(50));
            let mut long = [7; 8];
            let sent = message(&sender, Kind::Send, &mut long);
            let why = works[0].wait(Deadline::NEVER).expect_err("it is too long");
            let (failure, is_idle) = (communicator.failure(), communicator.idle());
            communicator.abort();
            let drained = drains.join().expect("no panic");
            let _ = sent.wait(Deadline::NEVER);
            assert_eq!((failure, is_idle), (Some(why.clone()), false));
            assert_eq!(drained, Err(why));
        });
    }

    /// Nobody has looked before.
    #[test]
    fn the_failure_of_a_message_that_ending_has_waited_for_is_the_communicators() {
        let store = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let context = pair(1, store.clone());
                let _ = message(&context, Kind::Send, &mut [7; 8]).wait(Deadline::NEVER);
                context
            });
            let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
            communicator.meet(|_| Ok(Some(pair(0, store.clone()))));
            let mut bytes = [0; 4];
            let received = message(communicator.group().expect("they have met"), Kind::Receive, &mut bytes);
            communicator.keep(5, [received]);
            let drained = communicator.drain(Deadline::NEVER);
            let _stays = sender.join().expect("no panic");
            assert!(drained.is_err() && communicator.idle());
            assert_eq!(communicator.failure(), drained.err());
        });
    }

    /// Also if the others come after all.
    #[test]
    fn what_is_revoked_before_it_has_met_the_others_says_that_it_cannot_be_shrunk() {
        let config = Config { blocking: false, ..Config::unset() };
        let communicator = Communicator::new(Place::Host(0), config, Vec::new());
        let told = std::cell::RefCell::new(Vec::new());
        let handle = COMMUNICATORS.insert(communicator.clone());
        let ask = || {
            let (mut state, mut child, mut excluded) = (SUCCESS, std::ptr::null_mut(), 0);
            // SAFETY: live memory.
            let shrunk = unsafe {
                assert_eq!(crate::query::ncclCommGetAsyncError(handle, &mut state), SUCCESS);
                let config = std::ptr::null_mut();
                crate::create::ncclCommShrink(handle, &mut excluded, 1, &mut child, config, 0)
            };
            let why = communicator.group().map(Context::id).expect_err("it has not met them");
            assert_eq!(communicator.wait(), Err(revoked()));
            told.borrow_mut().push(([state, shrunk], why.text().to_owned()));
        };
        communicator.meet(|_| {
            assert_eq!(crate::end::ncclCommRevoke(handle, crate::end::NCCL_REVOKE_DEFAULT), SUCCESS);
            ask();
            Communicator::alone(&communicator).cloned().map(Some)
        });
        ask();
        COMMUNICATORS.take(handle);
        for (results, why) in told.take() {
            assert_eq!(results, [result(Status::InvalidUsage); 2], "{why}");
            assert!(why.contains("was revoked before it had met the other ranks"), "{why}");
        }
        // The others hear of it.
        assert_eq!(communicator.alone().map(|group| group.failure().is_some()), Ok(true));
    }

    #[test]
    fn what_is_revoked_in_the_instant_in_which_it_meets_the_others_has_met_them() {
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        std::thread::scope(|scope| {
            // As whoever meets has it, and has seen that nobody has revoked it.
            let meeting = communicator.meeting();
            let revokes = scope.spawn(|| communicator.stop());
            while !communicator.is_stopped() {
                std::thread::yield_now();
            }
            let asks = [
                scope.spawn(|| communicator.group().map(Context::size)),
                scope.spawn(|| communicator.failure().map_or(Ok(1), Err)),
            ];
            std::thread::sleep(Duration::from_millis(50));
            let _ = communicator.met.set(communicator.alone().cloned());
            drop(meeting);
            assert_eq!(asks.map(|asks| asks.join().expect("no panic")), [Ok(1), Ok(1)]);
            revokes.join().expect("no panic");
        });
    }

    /// They wait for two hours otherwise, and so does the thread that meets them here.
    #[test]
    fn who_is_aborted_while_it_meets_the_others_goes_soon_and_they_hear_of_it() {
        let store = Arc::new(HashStore::new());
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        let meet = {
            let (communicator, options) = (communicator.clone(), options(0, store.clone(), MEETING));
            move || communicator.meet(|recall| Context::create_unless(recall, options, None).map(Some))
        };
        let meets = std::thread::spawn(meet);
        // It has come, and waits for the other.
        store.get("pair/0/rank/0", Deadline::after(SOON)).expect("it comes");
        communicator.abort();
        assert_eq!(communicator.wait(), Err(aborted()));
        soon(move || meets.join()).expect("no panic");
        assert_eq!(communicator.failure(), Some(aborted()));
        let late = options(1, store, MEETING);
        let late = soon(|| Context::create_unless(&Recall::default(), late, None).map(drop));
        let error = late.expect_err("there is nobody");
        assert_eq!(error.status(), Status::Aborted, "{error}");
        assert!(error.text().contains("rank 0 has called the meeting off"), "{error}");
    }

    #[test]
    fn a_child_that_is_aborted_while_it_meets_the_others_goes_soon_and_they_hear_of_it() {
        for pause in [0, 50].map(Duration::from_millis) {
            let store = Arc::new(HashStore::new());
            let other = options(1, store.clone(), MEETING);
            let other = std::thread::spawn(|| Context::create(other));
            let parent = Context::create(options(0, store, MEETING)).expect("the ranks meet");
            let other = other.join().expect("no panic").expect("the ranks meet");
            let child = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
            let meet = {
                let (parent, child) = (parent.clone(), child.clone());
                move || {
                    child.meet(|recall| parent.begin_regroup("pair", &[0, 1])?.meet_unless(recall).map(Some));
                }
            };
            let meets = std::thread::spawn(meet);
            std::thread::sleep(pause);
            child.abort();
            soon(move || meets.join()).expect("no panic");
            assert_eq!(child.failure(), Some(aborted()));
            let late = soon(move || other.regroup("pair", &[0, 1]).map(drop));
            assert_eq!(late.map_err(|error| error.status()), Err(Status::Aborted));
            assert!(parent.failure().is_none());
        }
    }
}
