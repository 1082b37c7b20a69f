//! The background thread of the process: it opens links, watches over peers, and moves work that nobody waits
//! for.
//!
//! One thread serves all endpoints of the process; it starts with the first and sleeps in epoll while nothing
//! happens. It alone owns the connections and their state, so there are no locks around them: everybody else
//! queues commands (`reactor`) and hears back through [`Port`]. What happens on one endpoint's connections is
//! in `endpoint`, who may come in in `accepting`, how links come to be in `opening` and `linking`, what is
//! said on a connection in `connection` and `setup`, how its end is waited for in `parting`.

mod accepting;
mod connection;
mod endpoint;
mod linking;
mod losing;
mod opening;
mod parting;
mod reactor;
mod setup;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use self::endpoint::Endpoint;
pub use self::parting::{Parting, Visit, Visits};
pub use self::reactor::on_service_thread;
use self::reactor::{Command, Service};
use super::Link;
use super::address::PeerAddress;
use super::bell::Bell;
use super::ring;
use super::segment::Segment;
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};
use crate::rendezvous::secret::SecretKey;
use crate::settings::{said, switch};
use crate::sys::{door, fork};

/// How an endpoint links to its peers. The default reads nothing from the environment.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shared memory between ranks of one host.
    pub shm: bool,
    /// TCP.
    pub tcp: bool,
    /// Why there is none if it is off: what errors say of it.
    pub no_tcp: &'static str,
    /// Reading a peer's private pages (process_vm_readv) where the kernel allows it.
    pub pull: bool,
    /// TCP data connections of one link, 1 to 64; `None`: as suits the job and this process's processors. The
    /// rank that opens the link decides.
    pub tcp_streams: Option<usize>,
    /// Threads that move long messages over TCP, the waiting one among them; `None`: this rank's share of the
    /// processors, up to 8.
    pub tcp_threads: Option<usize>,
    /// Whether calls on device memory may be relayed; they are where all ranks say so.
    pub relays: bool,
    /// The addresses to listen on, at any port if it is 0, and to publish; empty: loopback only.
    pub addresses: Vec<SocketAddr>,
    /// Stands for the host's identity instead of its boot id.
    pub host: Option<String>,
    /// Bytes of the ring that one peer writes to; a power of two in [`ring::CAPACITIES`].
    pub ring_bytes: usize,
    /// Bytes of the endpoint's segment. Only touched pages take memory.
    pub segment_bytes: usize,
}

/// The most TCP data connections of one link.
pub const MAX_TCP_STREAMS: usize = 64;
/// How many there are where one thread moves all.
const FEW_STREAMS: usize = 2;

impl Default for Options {
    fn default() -> Options {
        Options {
            shm: true,
            tcp: true,
            no_tcp: "switched off",
            pull: true,
            tcp_streams: None,
            tcp_threads: None,
            relays: true,
            addresses: Vec::new(),
            host: None,
            ring_bytes: 256 << 10,
            segment_bytes: 256 << 20,
        }
    }
}

impl Options {
    /// The defaults, changed by `UNISONO_TRANSPORT` (`shm`, `tcp` or `shm,tcp`), `UNISONO_CMA` (`0`, `1`),
    /// `UNISONO_TCP_STREAMS` and `UNISONO_TCP_THREADS` (1 to 64), `UNISONO_RELAY` (`0`, `1`) and
    /// `UNISONO_HOST`. `lookup` answers for the environment; what is empty is not set.
    pub fn from_environment(lookup: impl Fn(&str) -> Option<String>) -> Result<Options> {
        let mut options = Options::default();
        let lookup = |name: &str| said(lookup(name));
        if let Some(text) = lookup("UNISONO_TRANSPORT") {
            options.link_by("UNISONO_TRANSPORT", &text)?;
        }
        let is_on = |name| Ok::<_, Error>(switch(name, lookup(name).as_deref())?.unwrap_or(true));
        options.pull &= is_on("UNISONO_CMA")?;
        let count = |name: &str| match lookup(name) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(count) if (1..=MAX_TCP_STREAMS).contains(&count) => Ok(Some(count)),
                _ => fail!(InvalidArgument, "{name}={text}: use a number from 1 to {MAX_TCP_STREAMS}"),
            },
        };
        options.tcp_streams = count("UNISONO_TCP_STREAMS")?;
        options.tcp_threads = count("UNISONO_TCP_THREADS")?;
        options.relays = is_on("UNISONO_RELAY")?;
        options.host = lookup("UNISONO_HOST");
        Ok(options)
    }

    /// Over these transports alone: `shm`, `tcp` or `shm,tcp`. `name` is who says so.
    pub fn link_by(&mut self, name: &str, transports: &str) -> Result<()> {
        (self.shm, self.tcp) = (false, false);
        for transport in transports.split(',').map(str::trim) {
            match transport {
                "shm" => self.shm = true,
                "tcp" => self.tcp = true,
                _ => fail!(InvalidArgument, "{name}={transports}: use shm, tcp or shm,tcp"),
            }
        }
        Ok(())
    }

    /// TCP data connections of a link that a process with so many processors opens in a job of `size`. What
    /// several threads move goes faster over several; each link has them, so many ranks have fewer.
    fn streams(&self, size: u32, processors: u16) -> usize {
        self.tcp_streams.unwrap_or_else(|| match (self.tcp_threads, size) {
            (Some(1), _) => FEW_STREAMS,
            (None, _) if usize::from(processors) < 2 * FEW_STREAMS => FEW_STREAMS,
            (_, 0..=16) => 8,
            (_, 17..=64) => 4,
            _ => FEW_STREAMS,
        })
    }

    fn check(&self) -> Result<()> {
        if !self.shm && !self.tcp {
            fail!(InvalidArgument, "no transport is on: shared memory, TCP or both must be");
        }
        for (count, what) in [(self.tcp_streams, "streams for a link"), (self.tcp_threads, "threads")] {
            if let Some(count) = count.filter(|count| !(1..=MAX_TCP_STREAMS).contains(count)) {
                fail!(InvalidArgument, "{count} TCP {what}: use 1 to {MAX_TCP_STREAMS}");
            }
        }
        if !self.ring_bytes.is_power_of_two() || !ring::CAPACITIES.contains(&self.ring_bytes) {
            let (low, high) = (ring::CAPACITIES.start(), ring::CAPACITIES.end());
            fail!(
                InvalidArgument,
                "a ring of {} bytes: use a power of two from {low} to {high}",
                self.ring_bytes
            );
        }
        let most = super::address::MAX_ADDRESSES;
        if self.addresses.len() > most {
            fail!(InvalidArgument, "{} addresses to listen on: use at most {most}", self.addresses.len());
        }
        Ok(())
    }

    fn addresses(&self) -> &[SocketAddr] {
        const LOOPBACK: [SocketAddr; 1] = [SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)];
        if self.addresses.is_empty() { &LOOPBACK } else { &self.addresses }
    }
}

/// Who an endpoint is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its rank in the job.
    pub rank: u32,
    /// The ranks of the job.
    pub size: u32,
    /// What authenticates every link.
    pub secret: SecretKey,
    /// The same number on all ranks of the job, different for every job.
    pub job: u64,
}

/// The longest control message in bytes.
pub const MAX_CONTROL: usize = 64 * 1024;

/// What the service tells an endpoint. Called on the service thread, no lock of the service held; must not
/// block.
pub trait Port: Send + Sync {
    /// A link is open: asked for by [`Registration::open`] or by the peer. At most one for each peer at a
    /// time. The peer may have written to it already and rung the bell in vain: look at its streams before
    /// sleeping.
    fn link_opened(&self, peer: u32, link: Link);
    /// Opening failed. `open` may be called again.
    fn link_refused(&self, peer: u32, why: Error);
    /// The peer said goodbye. Its data streams may hold bytes that were not read yet.
    fn peer_left(&self, peer: u32);
    /// The control connection ended without a goodbye; the data streams may hold unread bytes. `why` names
    /// the host, the pid and whether the process is gone.
    fn peer_lost(&self, peer: u32, why: Error);
    /// A control message from the peer's engine.
    fn control(&self, peer: u32, message: &[u8]);
    /// Move work that nobody waits for.
    fn attend(&self) -> Attendance;
    /// Say what is left to be said before a goodbye; whether some of it still is. Asked again soon then, but
    /// not for long.
    fn has_last_words(&self) -> bool {
        false
    }
    /// The goodbyes are said, and taken if peers take them. Data streams on which nothing more is to be said
    /// may end.
    fn end_streams(&self) {}
}

/// When an endpoint wants [`Port::attend`] next. A [`Registration::kick`] has it called in any case, but for
/// `Leave`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attendance {
    /// Not before the next kick.
    Idle,
    /// At this moment.
    Again(Instant),
    /// At this moment, and no sooner for kicks: they cost their callers nothing until then.
    Leave(Instant),
    /// At this moment, or as soon as the bell's descriptor is readable. `attend` has called
    /// [`Bell::prepare_park`] and checked again; on the next call it answers the bell.
    Watch(Instant),
}

/// An endpoint's presence in the service. Dropping it closes it. Any thread may call any method; in a forked
/// child all of them do nothing.
pub struct Registration {
    shared: Arc<Shared>,
    service: &'static Service,
}

/// Rounds of the service thread in which a question that it has sent is read, answered, and the answer read,
/// if it serves both sides; and one.
const ROUNDS: u32 = 3;

/// How long dropping a registration may take: a goodbye is a few bytes.
const DROP_TIMEOUT: Duration = Duration::from_millis(500);

/// How much longer when the service thread has not come to say it. What had failed here may still be unsaid
/// then, too.
const SAY_TIMEOUT: Duration = Duration::from_secs(2);

impl Registration {
    /// Listens, starts the service thread if this is the first endpoint, and accepts links from now on.
    pub fn new(identity: Identity, options: Options, port: Weak<dyn Port>) -> Result<Registration> {
        options.check()?;
        if identity.rank >= identity.size {
            fail!(InvalidArgument, "rank {} of a job of {}", identity.rank, identity.size);
        }
        let service = Service::of_this_process()?;
        let endpoint = Endpoint::new(service.next_id(), identity, options, port)?;
        let shared = Arc::clone(endpoint.shared());
        service.add(endpoint);
        Ok(Registration { shared, service })
    }

    /// Where this endpoint is reached.
    pub fn address(&self) -> &PeerAddress {
        &self.shared.address
    }

    /// Its segment.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.shared.segment
    }

    /// Its bell.
    pub fn bell(&self) -> &Arc<Bell> {
        &self.shared.bell
    }

    /// Threads of the library that hold what holds this, for a moment.
    pub fn visits(&self) -> &Arc<Visits> {
        &self.shared.visits
    }

    /// For a handle by which the program holds what holds this.
    pub fn parting(&self) -> Parting {
        Parting::new(Arc::clone(&self.shared), self.service)
    }

    /// Opens the link to `peer`. Answered by [`Port::link_opened`] or [`Port::link_refused`]; nothing happens
    /// when it is open or opening already.
    pub fn open(&self, peer: PeerAddress, deadline: Deadline) {
        self.send(Command::Open { endpoint: self.shared.id, peer, deadline });
    }

    /// Queues a control message of at most [`MAX_CONTROL`] bytes; dropped when there is no link. Never
    /// blocks.
    ///
    /// # Panics
    /// When the message is too long.
    pub fn send_control(&self, peer: u32, message: &[u8]) {
        assert!(message.len() <= MAX_CONTROL, "a control message of {} bytes", message.len());
        self.send(Command::Control { endpoint: self.shared.id, peer, message: message.to_vec() });
    }

    /// Queues a control message for each of these peers: for those linked now, for the others as soon as their
    /// link opens, or before the goodbye where that does not come to its end. Of very many, the oldest are
    /// told to nobody any more. Never blocks; whoever may end the process behind it waits until it is said.
    ///
    /// # Panics
    /// When the message is too long.
    pub fn announce(&self, peers: Arc<[u32]>, message: Vec<u8>) -> Announced {
        assert!(message.len() <= MAX_CONTROL, "a control message of {} bytes", message.len());
        if !self.service.is_mine() {
            return Announced::default();
        }
        let said = Arc::new(Latch::default());
        self.send(Command::Announce { endpoint: self.shared.id, peers, message, said: said.clone() });
        Announced(Some(said))
    }

    /// The engine cannot use the link's data streams any more, because of `why`. Whatever the control
    /// connection says in the next moment (a goodbye, a control message with the cause, the end of the
    /// process) goes before; [`Port::peer_lost`] follows with `why` if nothing else ends the link. Nothing
    /// happens when there is none.
    pub fn doubt(&self, peer: u32, why: Error) {
        self.send(Command::Doubt { endpoint: self.shared.id, peer, why });
    }

    /// Ends the link to `peer` and tells it why, if there is one. The port is not told.
    pub fn hang_up(&self, peer: u32, why: &Error) {
        self.send(Command::HangUp { endpoint: self.shared.id, peer, why: why.text().to_owned() });
    }

    /// Why somebody may wait for a link in vain, or for what a peer that has left would have sent: what the
    /// kernel last refused while this endpoint accepted connections or messages, or what failed of the link
    /// to a peer that then left, if that was less than `within` ago; and that a link has not opened for a
    /// while.
    pub fn refusal(&self, within: Duration) -> Option<String> {
        let slow = self.shared.slow();
        let first = slow.first_key_value().map(|(_, text)| match slow.len() - 1 {
            0 => text.clone(),
            others => format!("{text}; {others} more do not open either"),
        });
        let lately = [&self.shared.refusal, &self.shared.obstacle].map(|noted| noted.within(within));
        let texts: Vec<String> = lately.into_iter().flatten().chain(first).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// Why nobody gets through to this rank, if that is so now and has been for a while: the kernel refuses
    /// to accept connections.
    pub fn shut(&self) -> Option<String> {
        self.shared.shut.within(door::LONG)
    }

    /// The kernel has refused what a message needs that has come.
    pub fn note_refusal(&self, text: String) {
        self.shared.refusal.note(text);
    }

    /// Has [`Port::attend`] called soon: after about 100 µs, so that a caller who waits at once is not
    /// disturbed.
    pub fn kick(&self) {
        if !self.shared.kicked.swap(true, Ordering::AcqRel) {
            self.send(Command::Kick { endpoint: self.shared.id });
        }
    }

    /// True after the service thread has sent what it was told to send before, has read what had come, and
    /// has answered it, also where it serves the peer, too: from then on silence is the peer's.
    pub fn caught_up(&self) -> Arc<AtomicBool> {
        let over = Arc::new(AtomicBool::new(false));
        self.send(Command::Rounds { left: ROUNDS, over: Arc::clone(&over) });
        over
    }

    /// Says goodbye to every peer, flushes and closes. Returns when that is done, at the latest half a second
    /// from now or at `deadline`, or when it is said, if the service thread is so late. Later calls only
    /// wait. Hold no lock that the methods of [`Port`] take. Called from within one of them, it does not
    /// wait.
    pub fn close(&self, deadline: Deadline) {
        self.close_before(deadline, Box::new(()));
    }

    /// The same, and `streams` are dropped when it is done, however long that takes: the end of the data
    /// streams, of which the kernel may tell the peer as a reset, does not come before this rank's last
    /// words.
    pub fn close_before(&self, deadline: Deadline, streams: Box<dyn Send>) {
        let deadline = deadline.min(Deadline::after(DROP_TIMEOUT));
        let said = Deadline::after(DROP_TIMEOUT + SAY_TIMEOUT);
        // Of several calls, the first counts.
        let _ = self.shared.closes.set((deadline, said));
        self.send(Command::Close { endpoint: self.shared.id, deadline, streams });
        if self.service.is_mine() && !on_service_thread() {
            self.shared.await_end(deadline, said);
        }
    }

    /// Whether the process is ending and has said goodbye to the peers: from them comes what they had sent,
    /// and no more.
    pub fn has_left(&self) -> bool {
        self.shared.has_left.load(Ordering::Relaxed)
    }

    fn send(&self, command: Command) {
        if self.service.is_mine() {
            self.service.send(command);
        } else {
            log::warn!(
                "rank {}: its endpoint belongs to the parent of this forked process",
                self.shared.address.rank
            );
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.service.generation() == fork::generation() && self.shared.closes.get().is_none() {
            self.close(Deadline::after(DROP_TIMEOUT));
        }
    }
}

/// A message that was given to [`Registration::announce`].
#[derive(Clone, Default)]
pub struct Announced(Option<Arc<Latch>>);

impl Announced {
    /// Waits until it is with the kernel for all that are linked, as far as it takes that, or until `deadline`.
    /// The service thread, which says it, does not wait.
    pub fn wait(&self, deadline: Deadline) {
        if let Some(said) = self.0.as_ref().filter(|_| !on_service_thread()) {
            said.wait(deadline);
        }
    }
}

/// The service thread does nothing, behind all that it was told before, until the answer is dropped.
#[cfg(test)]
pub fn hold_service() -> std::sync::mpsc::Sender<()> {
    use std::sync::mpsc::channel;
    let ((here, is_here), (hold, held)) = (channel(), channel());
    Service::of_this_process().expect("it runs").send(Command::Hold(here, held));
    is_here.recv().expect("it comes to this");
    hold
}

/// What a registration and the service thread both see of an endpoint.
struct Shared {
    id: u64,
    address: PeerAddress,
    segment: Arc<Segment>,
    bell: Arc<Bell>,
    /// A kick is on its way: more of them add nothing.
    kicked: AtomicBool,
    /// Once it has been told to close: until when that, and the goodbyes, are waited for.
    closes: OnceLock<(Deadline, Deadline)>,
    visits: Arc<Visits>,
    /// How many [`Parting`]s there are.
    handles: AtomicUsize,
    /// All goodbyes are with the kernel, as far as it takes them.
    said: Latch,
    closed: Latch,
    /// The process ends, and says goodbye for it.
    has_left: AtomicBool,
    /// What the kernel last refused while connections were accepted, or messages.
    refusal: Recent,
    /// The same, if somebody has waited in vain for longer than a moment.
    shut: Recent,
    /// What failed of the link to a peer that then left.
    obstacle: Recent,
    /// Peers whose links are wanted and do not open, and what has been tried.
    slow: Mutex<BTreeMap<u32, String>>,
}

impl Shared {
    /// Waits until it has closed, but not beyond `deadline` once it has said goodbye.
    fn await_end(&self, deadline: Deadline, said: Deadline) {
        self.closed.wait(deadline);
        self.said.wait(said);
    }

    fn slow(&self) -> MutexGuard<'_, BTreeMap<u32, String>> {
        self.slow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last text of its kind, and when it was noted.
#[derive(Default)]
struct Recent(Mutex<Option<(Instant, String)>>);

impl Recent {
    fn note(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), text));
    }

    fn within(&self, time: Duration) -> Option<String> {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.as_ref().filter(|(at, _)| at.elapsed() < time).map(|(_, text)| text.clone())
    }
}

/// Becomes true once and wakes who waits for it.
#[derive(Default)]
struct Latch {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Latch {
    fn set(&self) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait(&self, deadline: Deadline) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        while !*set && !deadline.expired() {
            let left = deadline.remaining_capped(DROP_TIMEOUT);
            set = self.changed.wait_timeout(set, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests;
