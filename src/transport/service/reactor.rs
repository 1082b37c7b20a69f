//! The service thread: its queue of commands, its epoll, its timers.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::endpoint::Endpoint;
use super::{DROP_TIMEOUT, Latch, SAY_TIMEOUT, Shared};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sys::epoll::{Epoll, Event, Interest};
use crate::sys::event::EventFd;
use crate::sys::{fork, process};
use crate::transport::address::PeerAddress;

/// How long after a kick an endpoint is attended to: who waits at once is not disturbed.
const GRACE: Duration = Duration::from_micros(100);

/// The token of the command queue's eventfd.
const WAKE: u64 = 0;

thread_local! {
    static ON_SERVICE_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is the service thread: it must not wait for itself.
pub fn on_service_thread() -> bool {
    ON_SERVICE_THREAD.get()
}

/// What the service thread is told to do.
pub(super) enum Command {
    Add(Box<Endpoint>),
    Open {
        endpoint: u64,
        peer: PeerAddress,
        deadline: Deadline,
    },
    Control {
        endpoint: u64,
        peer: u32,
        message: Vec<u8>,
    },
    Announce {
        endpoint: u64,
        peers: Arc<[u32]>,
        message: Vec<u8>,
        /// Set when it is said.
        said: Arc<Latch>,
    },
    Doubt {
        endpoint: u64,
        peer: u32,
        why: Error,
    },
    HangUp {
        endpoint: u64,
        peer: u32,
        why: String,
    },
    Kick {
        endpoint: u64,
    },
    /// Sets `over` after so many rounds more.
    Rounds {
        left: u32,
        over: Arc<AtomicBool>,
    },
    Close {
        endpoint: u64,
        deadline: Deadline,
        /// Dropped when it has closed.
        streams: Box<dyn Send>,
    },
    /// Says that it has come to this, and does nothing until the other end is dropped.
    #[cfg(test)]
    Hold(mpsc::Sender<()>, mpsc::Receiver<()>),
}

/// The service of one process, as seen from its other threads. Made once and never freed.
pub(super) struct Service {
    generation: u32,
    commands: Mutex<Vec<Command>>,
    wake: EventFd,
    next_id: AtomicU64,
    /// Endpoints that may have peers to say goodbye to.
    live: Mutex<Vec<Arc<Shared>>>,
}

/// The service of this process, or of an ancestor that it was forked from.
static SERVICE: AtomicPtr<Service> = AtomicPtr::new(ptr::null_mut());

impl Service {
    /// The service of this process, started if it is not running. A forked child gets its own.
    pub(super) fn of_this_process() -> Result<&'static Service> {
        loop {
            let current = SERVICE.load(Ordering::Acquire);
            if let Some(service) = existing(current)
                && service.is_mine()
            {
                return Ok(service);
            }
            let system = |cause| Error::system("cannot start unisono's background thread", cause);
            let epoll = Epoll::new().map_err(system)?;
            let wake = EventFd::new().map_err(system)?;
            epoll
                .watch(wake.as_fd(), WAKE, Interest { read: true, ..Interest::default() })
                .map_err(system)?;
            // The thread first: without it, nothing is left behind.
            let (give, given) = mpsc::channel();
            let run = move || {
                if let Ok((service, epoll)) = given.recv() {
                    Reactor::new(service, epoll).run();
                }
            };
            process::spawn("unisono", run).map_err(system)?;
            let service: &'static Service = Box::leak(Box::new(Service {
                generation: fork::generation(),
                commands: Mutex::default(),
                wake,
                next_id: AtomicU64::new(1),
                live: Mutex::default(),
            }));
            // PROOF: the thread does nothing else than wait for it.
            give.send((service, epoll)).expect("the thread waits");
            let new = ptr::from_ref(service).cast_mut();
            // Of two threads that start one at the same time, one wins. The loser's sleeps for ever, with
            // nothing to do.
            if SERVICE.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Ok(service);
            }
        }
    }

    /// Whether it belongs to this very process. In a forked child its thread does not exist.
    pub(super) fn is_mine(&self) -> bool {
        self.generation == fork::generation()
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn add(&self, endpoint: Endpoint) {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(endpoint.shared()));
        if !WILL_SAY_GOODBYE.swap(true, Ordering::Relaxed) && !process::at_exit(say_goodbye) {
            log::warn!("atexit failed: peers will take the end of this process for a crash");
        }
        self.send(Command::Add(Box::new(endpoint)));
    }

    pub(super) fn send(&self, command: Command) {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.push(command);
        let first = commands.len() == 1;
        drop(commands);
        // Who queued before has woken the thread, and it has not looked yet.
        if first {
            self.wake.signal();
        }
    }
}

/// The service behind the pointer, if there is one.
fn existing(service: *mut Service) -> Option<&'static Service> {
    // SAFETY: SERVICE holds null or what Box::leak gave, which lives as long as the process.
    unsafe { service.as_ref() }
}

/// Whether [`say_goodbye`] is still to run. What is made after it, by the program's handlers that run later,
/// has it run again.
static WILL_SAY_GOODBYE: AtomicBool = AtomicBool::new(false);

/// Runs when the process ends normally: its peers learn that it left, and do not take it for dead.
extern "C" fn say_goodbye() {
    WILL_SAY_GOODBYE.store(false, Ordering::Relaxed);
    let Some(service) = existing(SERVICE.load(Ordering::Acquire)) else { return };
    if !service.is_mine() || on_service_thread() {
        return;
    }
    let deadline = Deadline::after(DROP_TIMEOUT);
    let live = std::mem::take(&mut *service.live.lock().unwrap_or_else(PoisonError::into_inner));
    for shared in &live {
        shared.has_left.store(true, Ordering::Relaxed);
        service.send(Command::Close { endpoint: shared.id, deadline, streams: Box::new(()) });
    }
    // For all of them.
    let said = Deadline::after(DROP_TIMEOUT + SAY_TIMEOUT);
    for shared in &live {
        shared.await_end(deadline, said);
    }
}

/// A moment at which something is to be looked at. What it is about may be gone by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timer {
    pub(super) endpoint: u64,
    pub(super) what: Alarm,
}

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Alarm {
    /// Have the port attend.
    Attend,
    /// Accept connections again.
    Accept,
    /// This connection has had its time to prove itself, or to end.
    HalfOpen { token: u64 },
    /// Try again to pass the descriptors that wait on this connection.
    Flush { token: u64 },
    /// This peer's link has something to look at: a deadline, another attempt, a verdict.
    Peer { peer: u32 },
    /// Something was left to be said before the goodbyes.
    Leave,
    /// The goodbyes have had their time.
    Close,
}

/// What an epoll token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    TcpListener,
    LocalListener,
    Connection,
    /// The process of a peer on this host.
    Process {
        peer: u32,
    },
    Bell,
}

/// What the endpoints share of the thread.
pub(super) struct Core {
    epoll: Epoll,
    timers: BinaryHeap<Reverse<(Instant, Timer)>>,
    /// Token to endpoint and source. A token is never used twice, so a late event finds nothing.
    sources: HashMap<u64, (u64, Source)>,
    last_token: u64,
}

impl Core {
    /// A token for something of `endpoint`; not watched yet.
    pub(super) fn token(&mut self, endpoint: u64, source: Source) -> u64 {
        self.last_token += 1;
        self.sources.insert(self.last_token, (endpoint, source));
        self.last_token
    }

    pub(super) fn watch(&self, token: u64, fd: BorrowedFd<'_>, interest: Interest) -> std::io::Result<()> {
        self.epoll.watch(fd, token, interest)
    }

    /// Pauses what [`Core::watch`] began; the token stays.
    pub(super) fn pause(&self, fd: BorrowedFd<'_>) {
        self.epoll.unwatch(fd);
    }

    /// Ends what [`Core::token`] began.
    pub(super) fn forget(&mut self, token: u64, fd: BorrowedFd<'_>) {
        self.sources.remove(&token);
        self.epoll.unwatch(fd);
    }

    pub(super) fn alarm(&mut self, at: Instant, endpoint: u64, what: Alarm) {
        self.timers.push(Reverse((at, Timer { endpoint, what })));
    }

    /// The next timer that is due at `now`.
    fn due(&mut self, now: Instant) -> Option<Timer> {
        let &Reverse((at, timer)) = self.timers.peek()?;
        if at > now {
            return None;
        }
        self.timers.pop();
        Some(timer)
    }
}

/// The service thread.
struct Reactor {
    service: &'static Service,
    core: Core,
    endpoints: HashMap<u64, Box<Endpoint>>,
}

impl Reactor {
    fn new(service: &'static Service, epoll: Epoll) -> Reactor {
        let core = Core { epoll, timers: BinaryHeap::new(), sources: HashMap::new(), last_token: WAKE };
        Reactor { service, core, endpoints: HashMap::new() }
    }

    fn run(mut self) {
        ON_SERVICE_THREAD.set(true);
        let mut events = Vec::new();
        loop {
            // What is due now has its turn behind the events that are there now: a peer is not late because
            // this thread is. What the timers set for at once comes in the next round.
            let now = Instant::now();
            let next = self.core.timers.peek().map(|Reverse((at, _))| *at);
            let timeout = next.map(|at| at.saturating_duration_since(now));
            // All of them: what did not fit would come behind the timers, a peer's last words behind its
            // verdict.
            let most = self.core.sources.len() + 1;
            if let Err(cause) = self.core.epoll.wait_all(most, timeout, |event| events.push(event)) {
                // Cannot happen with a valid epoll and buffer; if it does, it must not spin.
                log::error!("unisono's background thread cannot wait: {cause}");
                thread::sleep(Duration::from_millis(100));
            }
            for event in events.drain(..) {
                self.event(event);
            }
            self.commands();
            while let Some(timer) = self.core.due(now) {
                if let Some(endpoint) = self.endpoints.get_mut(&timer.endpoint) {
                    endpoint.alarm(&mut self.core, timer.what);
                }
            }
            let service = self.service;
            self.endpoints.retain(|&id, endpoint| {
                let over = endpoint.is_over();
                if over {
                    service.live.lock().unwrap_or_else(PoisonError::into_inner).retain(|it| it.id != id);
                    endpoint.end_streams();
                    endpoint.shared().closed.set();
                }
                !over
            });
        }
    }

    fn event(&mut self, event: Event) {
        if event.token == WAKE {
            self.service.wake.drain();
            return;
        }
        let Some(&(endpoint, source)) = self.core.sources.get(&event.token) else { return };
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            endpoint.ready(&mut self.core, event, source);
        }
    }

    fn commands(&mut self) {
        let commands =
            std::mem::take(&mut *self.service.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            match command {
                Command::Add(mut endpoint) => {
                    endpoint.listen(&mut self.core);
                    self.endpoints.insert(endpoint.shared().id, endpoint);
                }
                Command::Open { endpoint, peer, deadline } => {
                    self.with(endpoint, |endpoint, core| endpoint.open(core, peer, deadline));
                }
                Command::Control { endpoint, peer, message } => {
                    self.with(endpoint, |endpoint, core| endpoint.send_control(core, peer, &message));
                }
                Command::Announce { endpoint, peers, message, said } => {
                    self.with(endpoint, |endpoint, core| endpoint.announce(core, peers, message));
                    said.set();
                }
                Command::Doubt { endpoint, peer, why } => {
                    self.with(endpoint, |endpoint, core| endpoint.doubt(core, peer, why));
                }
                Command::HangUp { endpoint, peer, why } => {
                    self.with(endpoint, |endpoint, core| endpoint.hang_up(core, peer, &why));
                }
                Command::Kick { endpoint } => {
                    self.with(endpoint, |endpoint, core| endpoint.attend_at(core, Instant::now() + GRACE));
                }
                Command::Rounds { left: 0, over } => over.store(true, Ordering::Release),
                Command::Rounds { left, over } => {
                    self.service.send(Command::Rounds { left: left - 1, over });
                }
                Command::Close { endpoint, deadline, streams } => {
                    self.with(endpoint, |endpoint, core| endpoint.close(core, deadline, streams));
                }
                #[cfg(test)]
                Command::Hold(here, until) => {
                    let _ = here.send(());
                    let _ = until.recv();
                }
            }
        }
    }

    fn with(&mut self, endpoint: u64, call: impl FnOnce(&mut Endpoint, &mut Core)) {
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            call(endpoint, &mut self.core);
        }
    }
}
