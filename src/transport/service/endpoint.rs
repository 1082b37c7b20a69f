//! One endpoint on the service thread: its listeners, its connections, the links that are open, its end. How
//! a link comes to be open is in [`super::opening`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::accepting::Listener;
use super::connection::{Connection, Frame, Kind};
use super::losing::{Ended, forget_process};
use super::opening::{BUSY_PAUSE, Opening};
use super::reactor::{Alarm, Core, Source};
use super::{Attendance, Identity, Latch, Options, Port, Recent, Shared};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::sys::door::Door;
use crate::sys::epoll::{Event, Interest};
use crate::sys::{process, random};
use crate::transport::address::PeerAddress;
use crate::transport::bell::Bell;
use crate::transport::handshake::{Handshake, Hello, Purpose};
use crate::transport::segment::Segment;
use crate::transport::tcp;

/// How long a peer may take to close behind this rank's last frame.
const LINGER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long after the port has said what it could before the goodbyes it is asked for more.
const LAST_WORDS_PAUSE: Duration = Duration::from_millis(1);

/// How many announcements are kept for peers whose links are not open.
const ANNOUNCED: usize = 4096;

/// One endpoint.
pub(super) struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) identity: Identity,
    pub(super) options: Options,
    port: Weak<dyn Port>,
    pub(super) listeners: Vec<Listener>,
    pub(super) door: Door,
    bell_token: Option<u64>,
    pub(super) conns: HashMap<u64, Conn>,
    pub(super) half_open: VecDeque<u64>,
    pub(super) peers: HashMap<u32, Peer>,
    /// What peers hear when their link opens, and which peers. The oldest give way.
    announced: VecDeque<(Arc<[u32]>, Vec<u8>)>,
    /// Peers whose state changed and is to be looked at.
    pub(super) unsettled: Vec<u32>,
    attend_at: Option<Instant>,
    /// Until when it is to be over, and until when goodbyes wait for what is to be said before them.
    leaving: Option<(Deadline, Deadline)>,
    closing: bool,
    over: bool,
    /// Data streams of links that end when it is over.
    streams: Vec<Box<dyn Send>>,
    /// Lies in private memory for as long as the endpoint lives; a peer that can read it can pull.
    pub(super) cookie: Box<[u8; 16]>,
}

/// A connection and what it is about.
pub(super) struct Conn {
    pub(super) wire: Connection,
    pub(super) stage: Stage,
    /// The peer and the purpose if this side connected.
    pub(super) outgoing: Option<Hello>,
    /// Over the Unix socket.
    pub(super) local: bool,
    /// An [`Alarm::Flush`] of it is set.
    pub(super) flush_alarm: bool,
}

/// How far a connection is.
pub(super) enum Stage {
    Connecting,
    Handshaking(Handshake),
    /// An authenticated control connection.
    Control {
        peer: u32,
    },
    /// The last word is said; waits until the peer closes, so that no reset overtakes it. While no link to
    /// this peer is open, what it says meanwhile counts.
    Lingering {
        peer: Option<u32>,
    },
}

/// What becomes of a connection after an event.
pub(super) enum Fate {
    Keep,
    Drop,
    /// A data connection is ready: its socket goes to its link.
    Lane(Hello),
}

/// A peer, as far as this endpoint has to do with it.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) opening: Opening,
    pub(super) open: Option<Open>,
}

/// An open link. Its data streams belong to the engine.
pub(super) struct Open {
    pub(super) control: u64,
    /// `rank 3 (host node7, pid 4711)`.
    pub(super) who: String,
    /// Readable once the process has ended.
    pub(super) process: Option<(u64, Arc<OwnedFd>)>,
    /// It is lost, but for what it has sent.
    pub(super) ended: Option<Ended>,
    /// The data streams are broken, the control connection is not; until this moment it may say why.
    pub(super) doubt: Option<(Instant, Error)>,
}

impl Endpoint {
    /// Listens. Nothing is accepted before [`Endpoint::listen`].
    pub(super) fn new(
        id: u64,
        identity: Identity,
        options: Options,
        port: Weak<dyn Port>,
    ) -> Result<Endpoint> {
        // Without shared memory nobody maps it, and a rank that may not have so much (`ulimit -f`, `-v`) can
        // join all the same.
        let segment = Segment::new(if options.shm { options.segment_bytes } else { 0 })?;
        let bell = Arc::new(Bell::new(Arc::clone(&segment))?);
        let (mut local, mut cookie) = ([0; 16], Box::new([0; 16]));
        random::fill(&mut local)?;
        random::fill(&mut cookie[..])?;
        let mut address = PeerAddress {
            rank: identity.rank,
            host: host_id(options.host.as_deref())?,
            hostname: process::hostname(),
            pid: std::process::id(),
            local,
            processors: u16::try_from(process::usable_cpus()).unwrap_or(u16::MAX),
            // Checked: at most 64.
            tcp_threads: options.tcp_threads.map_or(0, |threads| threads as u8),
            relays: options.relays,
            addresses: Vec::new(),
        };
        let listeners = Listener::all(&options, &mut address)?;
        Ok(Endpoint {
            shared: Arc::new(Shared {
                id,
                address,
                segment,
                bell,
                kicked: AtomicBool::default(),
                closes: OnceLock::new(),
                visits: Arc::default(),
                handles: AtomicUsize::new(0),
                said: Latch::default(),
                closed: Latch::default(),
                has_left: AtomicBool::default(),
                refusal: Recent::default(),
                shut: Recent::default(),
                obstacle: Recent::default(),
                slow: Mutex::default(),
            }),
            identity,
            options,
            port,
            listeners,
            door: Door::default(),
            bell_token: None,
            conns: HashMap::new(),
            half_open: VecDeque::new(),
            peers: HashMap::new(),
            announced: VecDeque::new(),
            unsettled: Vec::new(),
            attend_at: None,
            leaving: None,
            closing: false,
            over: false,
            streams: Vec::new(),
            cookie,
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether it has closed and can be dropped.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Whether goodbyes are being said: nothing new begins.
    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Begins to accept.
    pub(super) fn listen(&mut self, core: &mut Core) {
        for listener in &mut self.listeners {
            let source = if listener.local { Source::LocalListener } else { Source::TcpListener };
            listener.token = core.token(self.shared.id, source);
        }
        self.accept_again(core);
    }

    /// An event of one of its descriptors.
    pub(super) fn ready(&mut self, core: &mut Core, event: Event, source: Source) {
        match source {
            Source::TcpListener | Source::LocalListener => self.accept(core, event.token),
            Source::Connection => self.conn_ready(core, event.token, event),
            Source::Process { peer } => self.process_ended(core, peer),
            Source::Bell => self.attend(core),
        }
        self.settle(core);
    }

    /// A timer of its own.
    pub(super) fn alarm(&mut self, core: &mut Core, what: Alarm) {
        match what {
            Alarm::Attend => {
                if self.attend_at.is_some_and(|at| at <= Instant::now()) {
                    self.attend(core);
                }
            }
            Alarm::Accept => self.accept_again(core),
            Alarm::HalfOpen { token } => {
                if self.is_half_open(token) || self.is_lingering(token) {
                    log::debug!("rank {}: a stranger took too long", self.identity.rank);
                    self.drop_conn(core, token);
                }
            }
            Alarm::Flush { token } => {
                if let Some(conn) = self.conns.get_mut(&token) {
                    conn.flush_alarm = false;
                    if conn.wire.is_crowded() {
                        self.conn_ready(core, token, Event { token, writable: true, ..Event::default() });
                    }
                }
            }
            Alarm::Peer { peer } => {
                self.verdict(core, peer);
                self.end_doubt(core, peer);
                self.unsettled.push(peer);
            }
            Alarm::Leave => self.leave(core),
            Alarm::Close => {
                if self.closing {
                    self.finish(core);
                }
            }
        }
        self.settle(core);
    }

    /// Has the port attend at `at`, or before if that is agreed already.
    pub(super) fn attend_at(&mut self, core: &mut Core, at: Instant) {
        if !self.closing && self.attend_at.is_none_or(|agreed| at < agreed) {
            self.attend_at = Some(at);
            core.alarm(at, self.shared.id, Alarm::Attend);
        }
    }

    /// Queues a control message.
    pub(super) fn send_control(&mut self, core: &mut Core, peer: u32, message: &[u8]) {
        let Some(open) = self.peers.get(&peer).and_then(|peer| peer.open.as_ref()) else { return };
        if open.ended.is_some() {
            return;
        }
        let (token, rank) = (open.control, self.identity.rank);
        let Some(conn) = self.conns.get_mut(&token) else { return };
        if !conn.wire.queue_frame(Kind::Message, message, Vec::new()) {
            log::warn!("rank {rank}: {} does not read its control messages: one is dropped", open.who);
        }
        self.conn_ready(core, token, Event { token, writable: true, ..Event::default() });
        self.settle(core);
    }

    /// Tells these peers, now or as soon as their links open.
    pub(super) fn announce(&mut self, core: &mut Core, peers: Arc<[u32]>, message: Vec<u8>) {
        for &peer in &*peers {
            self.send_control(core, peer, &message);
        }
        if self.announced.len() == ANNOUNCED {
            self.announced.pop_front();
        }
        self.announced.push_back((peers, message));
    }

    /// Queues what is announced for a peer that has not heard of it, since its link was not open.
    pub(super) fn catch_up(&mut self, peer: u32, token: u64) {
        let Some(conn) = self.conns.get_mut(&token) else { return };
        for (peers, message) in &self.announced {
            if peers.contains(&peer) && !conn.wire.queue_frame(Kind::Message, message, Vec::new()) {
                log::warn!("rank {}: too much for rank {peer} to hear at once", self.identity.rank);
            }
        }
    }

    /// Says goodbye to everybody, behind the port's last words. [`Endpoint::is_over`] when all is said, at
    /// the latest at `deadline`; `streams` are kept until then.
    pub(super) fn close(&mut self, core: &mut Core, deadline: Deadline, streams: Box<dyn Send>) {
        self.streams.push(streams);
        if self.leaving.is_none() {
            let words = Deadline::after(deadline.remaining_capped(super::DROP_TIMEOUT) / 2);
            self.leaving = Some((deadline, words));
            self.leave(core);
        }
    }

    fn leave(&mut self, core: &mut Core) {
        let Some((deadline, words)) = self.leaving else { return };
        if self.tell(|port| port.has_last_words()) == Some(true) && !words.expired() {
            core.alarm(Instant::now() + LAST_WORDS_PAUSE, self.shared.id, Alarm::Leave);
            return;
        }
        self.closing = true;
        let mut peers = std::mem::take(&mut self.peers);
        let mut open = HashSet::new();
        for peer in peers.values_mut() {
            if let Some(link) = &peer.open {
                forget_process(core, link);
                open.insert(link.control);
            }
            peer.opening.retire_ring();
        }
        // A peer whose link is still being opened hears of the end as well: it may count the link as open, or
        // wait for it. And of what this rank may leave for.
        let proved = |token: &u64| control_peer(&self.conns[token]).is_some();
        let (leaving, strangers): (Vec<u64>, Vec<u64>) = self.conns.keys().partition(|token| proved(token));
        for token in leaving {
            if let Some(peer) = control_peer(&self.conns[&token]).filter(|_| !open.contains(&token)) {
                self.catch_up(peer, token);
            }
            self.say_last(core, token, Kind::Goodbye, "", None);
        }
        // Behind that: to a peer whose data connections end first, this rank is out of reach.
        drop(peers);
        for token in strangers {
            self.drop_conn(core, token);
        }
        for listener in self.listeners.drain(..) {
            core.forget(listener.token, listener.socket.as_fd());
        }
        self.stop_watching_bell(core);
        let end = Instant::now() + deadline.remaining_capped(super::DROP_TIMEOUT);
        core.alarm(end, self.shared.id, Alarm::Close);
        self.over |= self.conns.is_empty();
        self.shared.said.set();
    }

    /// It is over: the data streams of its links end. In a process that ends the engine has them still.
    pub(super) fn end_streams(&mut self) {
        self.tell(|port| port.end_streams());
        self.streams.clear();
    }

    /// Sends a last frame on a control connection and waits for the peer to close. What `peer` has said, and
    /// says meanwhile, counts while no link to it is open.
    pub(super) fn say_last(&mut self, core: &mut Core, token: u64, kind: Kind, why: &str, peer: Option<u32>) {
        let Some(conn) = self.conns.get_mut(&token) else { return };
        conn.wire.queue_frame(kind, why.as_bytes(), Vec::new());
        conn.stage = Stage::Lingering { peer };
        core.alarm(Instant::now() + LINGER_TIMEOUT, self.shared.id, Alarm::HalfOpen { token });
        self.look_at(core, token);
    }

    /// Sends what a connection has to send and reads what has come on it, without waiting for its event.
    pub(super) fn look_at(&mut self, core: &mut Core, token: u64) {
        self.conn_ready(core, token, Event { token, readable: true, writable: true, ..Event::default() });
    }

    /// Calls the port if it still exists. A panic of it ends here: other endpoints need the thread.
    pub(super) fn tell<T>(&self, call: impl FnOnce(&dyn Port) -> T) -> Option<T> {
        let _visit = self.shared.visits.enter();
        let port = self.port.upgrade()?;
        let answer = catch_unwind(AssertUnwindSafe(|| call(&*port)));
        if answer.is_err() {
            log::error!("rank {}: a panic in unisono's engine on the background thread", self.identity.rank);
        }
        answer.ok()
    }

    fn attend(&mut self, core: &mut Core) {
        self.attend_at = None;
        if self.closing {
            return;
        }
        // Before the call: a kick that comes during it is answered by another. What was done before a kick
        // that has been taken for this one is seen by the call.
        self.shared.kicked.swap(false, Ordering::AcqRel);
        match self.tell(|port| port.attend()) {
            None | Some(Attendance::Idle) => self.stop_watching_bell(core),
            Some(Attendance::Again(at)) => {
                self.stop_watching_bell(core);
                self.attend_at(core, at);
            }
            Some(Attendance::Leave(at)) => {
                self.stop_watching_bell(core);
                self.shared.kicked.store(true, Ordering::Release);
                self.attend_at(core, at);
            }
            Some(Attendance::Watch(at)) => {
                self.attend_at(core, at);
                let token = *self.bell_token.get_or_insert_with(|| core.token(self.shared.id, Source::Bell));
                // Once: a bell that nobody answers must not keep this thread awake.
                let interest = Interest { read: true, once: true, ..Interest::default() };
                if let Err(cause) = core.watch(token, self.shared.bell.fd(), interest) {
                    log::error!("rank {}: cannot watch the endpoint's bell: {cause}", self.identity.rank);
                }
            }
        }
    }

    fn stop_watching_bell(&mut self, core: &mut Core) {
        if let Some(token) = self.bell_token.take() {
            core.forget(token, self.shared.bell.fd());
        }
    }

    /// Watches a connection for what it waits for and keeps it.
    pub(super) fn insert(&mut self, core: &mut Core, token: u64, mut conn: Conn) -> io::Result<()> {
        let crowded = conn.wire.is_crowded();
        let write = conn.wire.has_output() && !crowded || matches!(conn.stage, Stage::Connecting);
        let read = control_peer(&conn).is_none_or(|peer| !self.awaits_lanes(peer, token));
        let interest = Interest { read, write, ..Interest::default() };
        if let Err(cause) = core.watch(token, conn.wire.socket().as_fd(), interest) {
            core.forget(token, conn.wire.socket().as_fd());
            return Err(cause);
        }
        // One at a time, however often it is tried meanwhile.
        if crowded && !std::mem::replace(&mut conn.flush_alarm, true) {
            core.alarm(Instant::now() + BUSY_PAUSE, self.shared.id, Alarm::Flush { token });
        }
        self.conns.insert(token, conn);
        Ok(())
    }

    /// Closes a connection without a word.
    pub(super) fn drop_conn(&mut self, core: &mut Core, token: u64) {
        if let Some(conn) = self.conns.remove(&token) {
            core.forget(token, conn.wire.socket().as_fd());
        }
        self.over |= self.closing && self.conns.is_empty();
    }

    /// Moves a connection on.
    pub(super) fn conn_ready(&mut self, core: &mut Core, token: u64, event: Event) {
        // Out of the map, so that what it says can change the rest of the endpoint.
        let Some(mut conn) = self.conns.remove(&token) else { return };
        let fate = self.advance(core, token, &mut conn, event);
        let failed = match fate {
            Ok(Fate::Keep) => {
                let about = (conn.outgoing, control_peer(&conn));
                match self.insert(core, token, conn) {
                    Ok(()) => None,
                    Err(cause) => Some((about, Error::system("cannot watch a connection", cause))),
                }
            }
            Ok(Fate::Drop) => {
                core.forget(token, conn.wire.socket().as_fd());
                None
            }
            Ok(Fate::Lane(hello)) => {
                core.forget(token, conn.wire.socket().as_fd());
                self.lane_ready(&hello, conn.outgoing.is_some(), conn.wire.into_socket());
                None
            }
            Err(why) => {
                core.forget(token, conn.wire.socket().as_fd());
                Some(((conn.outgoing, control_peer(&conn)), why))
            }
        };
        if let Some(((outgoing, peer), why)) = failed {
            self.conn_failed(core, token, outgoing, peer, why);
        }
        self.over |= self.closing && self.conns.is_empty();
    }

    fn advance(&mut self, core: &mut Core, token: u64, conn: &mut Conn, event: Event) -> Result<Fate> {
        let io_error = |cause: io::Error| Error::new(Status::PeerFailed, cause.to_string());
        if matches!(conn.stage, Stage::Connecting) {
            if !event.writable {
                return Ok(Fate::Keep);
            }
            if let Some(cause) = conn.wire.socket().take_error().map_err(io_error)? {
                return Err(io_error(cause));
            }
            self.greet(conn)?;
        }
        let flushed = conn.wire.flush().map_err(io_error);
        match conn.stage {
            Stage::Lingering { peer } => return self.linger(core, conn, peer, event, flushed),
            // A peer that takes nothing any more may have said goodbye before: that counts.
            Stage::Control { .. } if flushed.is_err() => {}
            _ if !event.readable => return flushed.map(|()| Fate::Keep),
            _ => flushed.clone()?,
        }
        while let Stage::Handshaking(handshake) = &mut conn.stage {
            let message = match conn.wire.take_exactly(handshake.needs()) {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(Fate::Keep),
                Err(cause) if conn.outgoing.is_some() => {
                    // All that a stranger is told, so all that a rank of another job is.
                    let hint = "before it proved itself: is it of another job, or is it ending?";
                    return Err(Error::new(Status::PeerFailed, format!("{cause} {hint}")));
                }
                Err(cause) => return Err(io_error(cause)),
            };
            let step = handshake.advance(&message)?;
            conn.wire.queue(step.send);
            if let Some(hello) = step.done {
                let control = hello.purpose == Purpose::Control;
                // One that this side began is since it was there.
                if !conn.local && conn.outgoing.is_none() {
                    tcp::configure(conn.wire.socket(), control).map_err(io_error)?;
                }
                conn.wire.flush().map_err(io_error)?;
                if !control {
                    // A proof of 32 bytes fits any fresh socket buffer.
                    return Ok(if conn.wire.has_output() { Fate::Drop } else { Fate::Lane(hello) });
                }
                self.control_ready(core, token, conn, hello)?;
            }
            conn.wire.flush().map_err(io_error)?;
        }
        while let Stage::Control { peer } = conn.stage {
            if self.awaits_lanes(peer, token) {
                break;
            }
            let Some(Frame { kind, payload, fds }) = conn.wire.take_frame()? else { break };
            let is_open = self.open_on(peer, token).is_some();
            match kind {
                // Also before the link is open: it never will be if the peer leaves.
                Kind::Message => {
                    self.tell(|port| port.control(peer, &payload));
                }
                Kind::Goodbye => {
                    self.hear_goodbye(core, peer);
                    return Ok(Fate::Drop);
                }
                Kind::Refuse => {
                    let why = String::from_utf8_lossy(&payload);
                    if is_open {
                        self.given_up(core, peer, &why);
                        return Ok(Fate::Drop);
                    }
                    return Err(Error::new(Status::PeerFailed, why));
                }
                Kind::Setup if !is_open => {
                    self.setup_arrived(peer, token, &payload, fds, conn)?;
                    // What follows is for the open link, which it becomes when the endpoint settles. It is
                    // still in the kernel, so there will be another event.
                    return Ok(Fate::Keep);
                }
                Kind::Setup => {
                    return Err(Error::new(Status::PeerFailed, "it sent a control frame out of order"));
                }
            }
        }
        flushed.map(|()| Fate::Keep)
    }

    /// After the last word: sends what is left, says that nothing follows, and waits for the peer to close.
    fn linger(
        &mut self,
        core: &mut Core,
        conn: &mut Conn,
        peer: Option<u32>,
        event: Event,
        flushed: Result<()>,
    ) -> Result<Fate> {
        if flushed.is_ok() {
            // What waits on a crowded connection waits for others: the peer's own end must not be overlooked
            // for that.
            if conn.wire.has_output() && !conn.wire.is_crowded() {
                return Ok(Fate::Keep);
            }
            if !conn.wire.has_output() {
                // Said already, or the peer is gone: both fine.
                let _ = conn.wire.socket().shutdown(std::net::Shutdown::Write);
            }
        }
        // One that takes nothing any more may have said goodbye before.
        if event.readable || flushed.is_err() {
            // An error or the end is what this waits for.
            while let Some(Frame { kind, payload, .. }) = conn.wire.take_frame()? {
                // Where a link to it has opened meanwhile, it says all of that there.
                let has_link = |peer: &u32| self.peers.get(peer).is_some_and(|peer| peer.open.is_some());
                match (kind, peer.filter(|peer| !has_link(peer))) {
                    (Kind::Message, Some(peer)) => {
                        self.tell(|port| port.control(peer, &payload));
                    }
                    (Kind::Goodbye, Some(peer)) => {
                        self.hear_goodbye(core, peer);
                        return Ok(Fate::Drop);
                    }
                    // For nobody.
                    _ => {}
                }
            }
        }
        flushed.map(|()| Fate::Keep)
    }

    /// A peer has left. Whatever connects it with this rank is over, and that is told once.
    fn hear_goodbye(&mut self, core: &mut Core, peer: u32) {
        self.note_failures(peer);
        self.want_no_more(peer);
        self.abandon(core, peer);
        // On these it says so as well.
        let refused = |conn: &Conn| matches!(conn.stage, Stage::Lingering { peer: Some(of) } if of == peer);
        let tokens: Vec<u64> =
            self.conns.iter().filter_map(|(&token, conn)| refused(conn).then_some(token)).collect();
        for token in tokens {
            self.drop_conn(core, token);
        }
        if let Some(open) = self.peers.remove(&peer).and_then(|peer| peer.open) {
            forget_process(core, &open);
        }
        self.tell(|port| port.peer_left(peer));
    }

    /// The open link to `peer`, if `token` is its control connection.
    pub(super) fn open_on(&mut self, peer: u32, token: u64) -> Option<&mut Open> {
        self.peers.get_mut(&peer)?.open.as_mut().filter(|open| open.control == token)
    }

    /// Closing has taken long enough, or is done.
    fn finish(&mut self, core: &mut Core) {
        let tokens: Vec<u64> = self.conns.keys().copied().collect();
        for token in tokens {
            self.drop_conn(core, token);
        }
        self.over = true;
    }
}

fn control_peer(conn: &Conn) -> Option<u32> {
    if let Stage::Control { peer } = conn.stage { Some(peer) } else { None }
}

/// The same for all ranks of this host, and not the boot id itself: it goes to other hosts.
fn host_id(name: Option<&str>) -> Result<[u8; 16]> {
    let (label, text) = match name {
        Some(name) => ("name", name.to_owned()),
        None => {
            let boot = process::boot_id().map_err(|cause| {
                Error::system("cannot read /proc/sys/kernel/random/boot_id (set UNISONO_HOST instead)", cause)
            })?;
            ("boot", boot)
        }
    };
    let mut hash = Sha256::new();
    hash.update(format!("unisono host {label}\0{text}"));
    let digest: [u8; 32] = hash.finalize().into();
    Ok(*digest.first_chunk().expect("16 of 32 bytes"))
}
