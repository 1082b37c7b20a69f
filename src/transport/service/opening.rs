//! How a link comes to be open, seen from one endpoint.
//!
//! The side that opens tries its candidates in turn: the Unix socket when both are on one host, then each TCP
//! address. On each: connect, handshake, its setup; over TCP also the data connections. The other side
//! gathers all that and answers with its own setup: with that it counts the link as open, and the first side
//! does when the answer arrives.
//!
//! Both sides may open at once. Then each has an outgoing and an incoming attempt, and exactly one must win.
//! A rank answers a lower one in any case, and a higher one unless it has said its own setup: from then on
//! that one may count this side's attempt as open, and until then it cannot. So a way that leads nowhere does
//! not keep a rank from answering, and one whose setup is said keeps it from that until it fails. Handlers
//! only note what happened; [`Endpoint::settle`] draws the conclusions.

mod ending;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use super::MAX_TCP_STREAMS;
use super::connection::{Connection, Kind};
use super::endpoint::{Conn, Endpoint, Stage};
use super::linking::Theirs;
use super::reactor::{Alarm, Core, Source};
use super::setup::{Data, Setup};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::sys::fork::Unshared;
use crate::sys::memory::Reservation;
use crate::sys::{process, random, socket};
use crate::transport::address::PeerAddress;
use crate::transport::handshake::{Handshake, Hello, Purpose};
use crate::transport::ring::RingMemory;
use crate::transport::tcp;

/// How long a peer that has proved itself may take to complete a link.
const INCOMING_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an address may take while there are others to try: it may be another host's.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long it may take from the moment on that the peer has proved itself and may count the link as open: it
/// is the right one, and to be given up by a rank that is only late is to lose a healthy peer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// After how long an opening is slow: those who wait for the link in vain are told of it.
const SLOW: Duration = Duration::from_secs(1);
/// How long a peer may be out of reach before the engine is told: one that ends says why to those that it is
/// linked with, and they pass it on.
const OUT_OF_REACH_GRACE: Duration = Duration::from_millis(300);
/// How long a rank that lacks descriptors for its own attempts waits for the data connections of the peer's,
/// which it cannot accept either unless some are closed meanwhile. The peer would wait longer.
const LACKS_GRACE: Duration = Duration::from_secs(1);
/// How long to leave a peer alone whose Unix socket has too many connections waiting, or to which the kernel
/// passes no descriptors for now.
pub(super) const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// What is under way towards one peer.
#[derive(Default)]
pub(super) struct Opening {
    /// The engine waits for this link.
    wanted: Option<Wanted>,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    /// What became of the link that the peer began. It may have given up for that, and then what this side
    /// tries fails without telling why.
    theirs_failed: Option<String>,
    /// Why the engine was told that there will be no link. A peer that asks for one later hears it.
    given_up: Option<String>,
}

struct Wanted {
    address: PeerAddress,
    since: Instant,
    deadline: Deadline,
}

/// A way to reach a peer.
#[derive(Clone, Copy, Debug)]
enum Candidate {
    Local,
    Tcp(SocketAddr),
}

/// This side opens.
struct Outgoing {
    candidates: VecDeque<Candidate>,
    /// The ways that are none to this peer.
    excluded: Vec<String>,
    /// What became of those tried.
    failures: Vec<String>,
    /// What was tried last has failed for what this rank lacks itself, most likely descriptors.
    lacks: bool,
    /// Not before this moment: the peer is busy, or about to be given up.
    pause: Option<Instant>,
    /// Nothing is left to try.
    ends: bool,
    trial: Option<Trial>,
}

/// One candidate in progress.
struct Trial {
    candidate: Candidate,
    /// Until then the next candidate waits. The last, and the Unix socket, may take as long as the engine
    /// allows.
    until: Option<Instant>,
    /// How long that was when it was agreed.
    patience: Duration,
    attempt: u64,
    control: u64,
    /// The peer has been told how this side would have the link: it may count it as open.
    said: bool,
    ring: Option<RingMemory>,
    /// Where the peer's segment will be mapped, about.
    reserved: Option<Reservation>,
    /// The data connections that are not ready yet.
    lane_tokens: Vec<u64>,
    lanes: BTreeMap<u8, Unshared<Socket>>,
    theirs: Option<Theirs>,
    /// Why it leads nowhere, since this rank lacks something for it.
    failed: Option<Error>,
}

/// The peer opens.
struct Incoming {
    attempt: u64,
    control: u64,
    until: Instant,
    lanes: BTreeMap<u8, Unshared<Socket>>,
    theirs: Option<Theirs>,
}

impl Opening {
    /// `; TCP to 10.0.0.1:5: refused; …`: what has failed so far.
    fn failures(&self) -> String {
        let tried = self.outgoing.iter().flat_map(|outgoing| &outgoing.failures);
        let mut text: String = tried.map(|failure| format!("; {failure}")).collect();
        if let Some(why) = &self.theirs_failed {
            text.push_str(&format!("; the link that it began itself failed here: {why}"));
        }
        text
    }

    /// What was tried so far, and what is being tried; `crowded`: it waits to pass descriptors.
    fn describe(&self, crowded: bool) -> String {
        let excluded = self.outgoing.iter().flat_map(|outgoing| &outgoing.excluded);
        let mut text: String = excluded.map(|way| format!("; {way}")).collect();
        text.push_str(&self.failures());
        let trial = self.outgoing.as_ref().and_then(|outgoing| outgoing.trial.as_ref());
        match trial.map(|trial| trial.candidate) {
            Some(Candidate::Local) if crowded => {
                text.push_str("; shared memory: too many descriptors of this user are under way (ulimit -n)");
            }
            Some(Candidate::Local) => text.push_str("; shared memory: no answer yet"),
            Some(Candidate::Tcp(address)) => text.push_str(&format!("; TCP to {address}: no answer yet")),
            None => {}
        }
        text
    }

    /// Keeps the ring of the trial in progress from being used for something else: the peer may write to it.
    pub(super) fn retire_ring(&mut self) {
        self.outgoing.iter_mut().for_each(Outgoing::retire_ring);
    }
}

impl Outgoing {
    /// Keeps the ring of the trial in progress from being used for something else.
    fn retire_ring(&mut self) {
        if let Some(ring) = self.trial.as_mut().and_then(|trial| trial.ring.as_mut()) {
            ring.retire();
        }
    }
}

impl Trial {
    fn is_complete(&self, streams: usize) -> bool {
        let lanes = if matches!(self.candidate, Candidate::Local) { 0 } else { streams };
        self.theirs.is_some() && self.lanes.len() == lanes
    }
}

impl Incoming {
    fn is_complete(&self) -> bool {
        self.theirs.as_ref().is_some_and(|theirs| match theirs.setup.data {
            Data::Shm { .. } => true,
            Data::Tcp { lanes } => self.lanes.len() == usize::from(lanes),
        })
    }
}

impl Endpoint {
    /// Opens the link to a peer, unless it is open or being opened.
    pub(super) fn open(&mut self, core: &mut Core, address: PeerAddress, deadline: Deadline) {
        let peer = address.rank;
        if self.is_closing() {
            return;
        }
        if peer >= self.identity.size || peer == self.identity.rank {
            let (rank, size) = (self.identity.rank, self.identity.size);
            let text = format!("rank {rank} cannot open a link to rank {peer} in a job of {size}");
            self.tell(|port| port.link_refused(peer, Error::new(Status::InvalidArgument, text)));
            return;
        }
        let state = self.peers.entry(peer).or_default();
        if state.open.is_some() || state.opening.wanted.is_some() {
            return;
        }
        (state.opening.wanted, state.opening.given_up) =
            (Some(Wanted { address, since: Instant::now(), deadline }), None);
        core.alarm(Instant::now() + SLOW, self.shared.id, Alarm::Peer { peer });
        if let Some(left) = deadline.remaining() {
            core.alarm(Instant::now() + left, self.shared.id, Alarm::Peer { peer });
        }
        self.unsettled.push(peer);
        self.settle(core);
    }

    /// Draws the conclusions from what happened to the links that are being opened.
    pub(super) fn settle(&mut self, core: &mut Core) {
        while let Some(peer) = self.unsettled.pop() {
            if !self.is_closing() {
                self.settle_peer(core, peer);
            }
        }
    }

    /// The data connections of a link that this rank opens.
    pub(super) fn tcp_streams(&self) -> usize {
        self.options.streams(self.identity.size, self.shared.address.processors)
    }

    fn settle_peer(&mut self, core: &mut Core, peer: u32) {
        let (rank, streams) = (self.identity.rank, self.tcp_streams());
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.open.is_some() {
            self.want_no_more(peer);
            self.abandon(core, peer);
            return;
        }
        let trial = state.opening.outgoing.as_mut().and_then(|outgoing| outgoing.trial.as_mut());
        if let Some(why) = trial.and_then(|trial| trial.failed.take()) {
            self.give_up_trial(core, peer, why.text());
            return self.settle_peer(core, peer);
        }
        let opening = &mut state.opening;
        let trial = opening.outgoing.as_mut().and_then(|outgoing| outgoing.trial.as_mut());
        if trial.is_some_and(|trial| trial.is_complete(streams)) {
            return self.finish_outgoing(core, peer);
        }
        let own = opening.outgoing.as_ref().and_then(|outgoing| outgoing.trial.as_ref());
        let said = own.is_some_and(|trial| trial.said);
        let crowded =
            own.and_then(|trial| self.conns.get(&trial.control)).is_some_and(|conn| conn.wire.is_crowded());
        if let Some(incoming) = &opening.incoming {
            // Who is to hear that this rank has given up need not open its data connections for that.
            let is_vain = opening.given_up.is_some() && incoming.theirs.is_some();
            if is_vain || incoming.is_complete() && (!said || peer < rank) {
                return self.finish_incoming(core, peer);
            }
            if incoming.until <= Instant::now() {
                log::debug!("rank {rank}: rank {peer} took too long to open its link");
                self.abandon_incoming(core, peer);
                return self.settle_peer(core, peer);
            }
        }
        let Some(wanted) = &opening.wanted else { return };
        if wanted.deadline.expired() {
            let tried = opening.describe(crowded);
            let text = format!("opening the link to {} took too long{tried}", wanted.address.describe());
            // The peer may just have answered, and write to the ring until it hears that this side gave up.
            opening.retire_ring();
            return self.refuse(core, peer, Error::new(Status::Timeout, text));
        }
        if wanted.since.elapsed() >= SLOW {
            let (who, tried) = (wanted.address.describe(), opening.describe(crowded));
            let text = format!("the link to {who} does not open{tried}");
            self.shared.slow().insert(peer, text);
        }
        match &opening.outgoing {
            Some(Outgoing { trial: Some(trial), .. }) => {
                if trial.until.is_some_and(|until| until <= Instant::now()) {
                    let patience = trial.patience;
                    let why = if trial.said {
                        format!("no link {patience:.0?} after it had proved itself")
                    } else {
                        format!("no answer for {patience:.0?}")
                    };
                    self.give_up_trial(core, peer, &why);
                    // The peer's attempt may have waited for that.
                    self.settle_peer(core, peer);
                }
            }
            Some(Outgoing { pause: Some(until), .. }) if *until > Instant::now() => {}
            Some(_) => self.try_next(core, peer),
            // Theirs is on its way. If it fails, this side tries.
            None if opening.incoming.is_some() => {}
            None => {
                let address = wanted.address.clone();
                let outgoing = self.candidates(&address);
                self.peers.entry(peer).or_default().opening.outgoing = Some(outgoing);
                self.try_next(core, peer);
            }
        }
    }

    fn candidates(&self, address: &PeerAddress) -> Outgoing {
        let (mut candidates, mut excluded) = (VecDeque::new(), Vec::new());
        let same_host = address.host == self.shared.address.host;
        match (self.options.shm, same_host) {
            (true, true) => candidates.push_back(Candidate::Local),
            (true, false) => excluded.push("shared memory: it is on another host".to_owned()),
            (false, _) => excluded.push("shared memory: switched off".to_owned()),
        }
        match (self.options.tcp, address.addresses.is_empty()) {
            (true, false) => {
                candidates.extend(address.seen_from(&self.shared.address).into_iter().map(Candidate::Tcp));
            }
            (true, true) => excluded.push("TCP: it listens nowhere".to_owned()),
            (false, _) => excluded.push(format!("TCP: {}", self.options.no_tcp)),
        }
        Outgoing {
            candidates,
            excluded,
            failures: Vec::new(),
            lacks: false,
            pause: None,
            ends: false,
            trial: None,
        }
    }

    /// Tries the next candidate, or gives up.
    fn try_next(&mut self, core: &mut Core, peer: u32) {
        loop {
            let Some(opening) = self.peers.get_mut(&peer).map(|peer| &mut peer.opening) else { return };
            let Opening { wanted: Some(wanted), outgoing: Some(outgoing), incoming, .. } = opening else {
                return;
            };
            outgoing.pause = None;
            let Some(candidate) = outgoing.candidates.pop_front() else {
                let theirs = incoming.as_ref().map(|incoming| incoming.control);
                let who = wanted.address.describe();
                let (status, what) = match outgoing.lacks {
                    true => {
                        let rank = self.identity.rank;
                        (Status::System, format!("rank {rank} lacks what a link to {who} takes (ulimit -n)"))
                    }
                    false => (Status::PeerFailed, format!("cannot reach {who}")),
                };
                let text = format!("{what}{}", opening.describe(false));
                if let Some(control) = theirs {
                    log::debug!("rank {}: {text}; but it is opening the link itself", self.identity.rank);
                    // That one wants more descriptors over TCP alone.
                    if status == Status::PeerFailed || self.conns.get(&control).is_some_and(|conn| conn.local)
                    {
                        self.abandon_outgoing(core, peer);
                        self.unsettled.push(peer);
                        return;
                    }
                    if self.puts_off(core, peer, LACKS_GRACE) {
                        return;
                    }
                } else if status == Status::PeerFailed && self.puts_off(core, peer, OUT_OF_REACH_GRACE) {
                    return;
                }
                return self.refuse(core, peer, Error::new(status, text));
            };
            let name = wanted.address.local_name();
            match self.start(core, peer, candidate, &name) {
                Ok(trial) => {
                    if let Some(outgoing) = self.outgoing(peer) {
                        (outgoing.trial, outgoing.lacks) = (Some(trial), false);
                    }
                    return;
                }
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                    let until = Instant::now() + BUSY_PAUSE;
                    if let Some(outgoing) = self.outgoing(peer) {
                        outgoing.candidates.push_front(candidate);
                        outgoing.pause = Some(until);
                    }
                    core.alarm(until, self.shared.id, Alarm::Peer { peer });
                    return;
                }
                Err(cause) => {
                    self.note_lack(peer, process::lacks(&cause));
                    self.note_failure(peer, candidate, &cause.to_string());
                }
            }
        }
    }

    /// Whether a peer is given up only so much later, now that nothing is left to try.
    fn puts_off(&mut self, core: &mut Core, peer: u32, time: Duration) -> bool {
        let Some(outgoing) = self.outgoing(peer) else { return false };
        if outgoing.failures.is_empty() || std::mem::replace(&mut outgoing.ends, true) {
            return false;
        }
        let until = Instant::now() + time;
        outgoing.pause = Some(until);
        core.alarm(until, self.shared.id, Alarm::Peer { peer });
        true
    }

    fn start(&mut self, core: &mut Core, peer: u32, candidate: Candidate, name: &str) -> io::Result<Trial> {
        let mut attempt = [0; 8];
        random::fill(&mut attempt).map_err(io::Error::other)?;
        let attempt = u64::from_le_bytes(attempt);
        let (socket, local) = match candidate {
            Candidate::Tcp(address) => (tcp::connect(address)?, false),
            Candidate::Local => {
                let socket = tcp::unix_socket()?;
                socket.connect(&SockAddr::unix(name)?)?;
                (socket, true)
            }
        };
        let control = self.connect(core, peer, attempt, Purpose::Control, socket, local)?;
        let (lane_tokens, lanes) = (Vec::new(), BTreeMap::new());
        let others = self.outgoing(peer).is_some_and(|outgoing| !outgoing.candidates.is_empty());
        // A process of this host that is slow to answer here is no faster over TCP.
        let until = (others && !local).then(|| Instant::now() + TRIAL_TIMEOUT);
        if let Some(until) = until {
            core.alarm(until, self.shared.id, Alarm::Peer { peer });
        }
        Ok(Trial {
            candidate,
            until,
            patience: TRIAL_TIMEOUT,
            attempt,
            control,
            said: false,
            ring: None,
            reserved: None,
            lane_tokens,
            lanes,
            theirs: None,
            failed: None,
        })
    }

    /// Has a socket that is connecting watched.
    fn connect(
        &mut self,
        core: &mut Core,
        peer: u32,
        attempt: u64,
        purpose: Purpose,
        socket: Unshared<Socket>,
        local: bool,
    ) -> io::Result<u64> {
        let hello =
            Hello { purpose, initiator: self.identity.rank, target: peer, job: self.identity.job, attempt };
        let token = core.token(self.shared.id, Source::Connection);
        let wire = Connection::new(socket);
        let stage = Stage::Connecting;
        let conn = Conn { wire, stage, outgoing: Some(hello), local, flush_alarm: false };
        self.insert(core, token, conn)?;
        Ok(token)
    }

    /// A connection that this side began is there: begins the handshake.
    pub(super) fn greet(&self, conn: &mut Conn) -> Result<()> {
        let Some(hello) = conn.outgoing else { fail!(Internal, "an accepted connection is connecting") };
        if !conn.local {
            // Now, since nothing else ends the wait for the answer of a host that is gone.
            tcp::configure(conn.wire.socket(), hello.purpose == Purpose::Control)
                .map_err(|cause| Error::new(Status::PeerFailed, cause.to_string()))?;
        }
        let mut nonce = [0; 32];
        random::fill(&mut nonce)?;
        let (handshake, first) = Handshake::initiate(&self.identity.secret, hello, nonce);
        conn.wire.queue(first);
        conn.stage = Stage::Handshaking(handshake);
        Ok(())
    }

    /// A control connection has proved itself.
    pub(super) fn control_ready(
        &mut self,
        core: &mut Core,
        token: u64,
        conn: &mut Conn,
        hello: Hello,
    ) -> Result<()> {
        if conn.outgoing.is_some() {
            let peer = hello.target;
            conn.stage = Stage::Control { peer };
            let Err(why) = self.send_first_setup(core, token, conn, hello) else { return Ok(()) };
            // The peer may have said by now that it leaves, and on this connection: that goes before.
            let Some(trial) = self.trial(peer, token) else { return Err(why) };
            trial.failed = Some(why);
            self.unsettled.push(peer);
            return Ok(());
        }
        let peer = hello.initiator;
        if peer >= self.identity.size || peer == self.identity.rank {
            fail!(PeerFailed, "it says that it is rank {peer} of a job of {}", self.identity.size);
        }
        if self.peers.get(&peer).is_some_and(|peer| peer.open.is_some()) {
            fail!(PeerFailed, "the link to rank {peer} is open already");
        }
        conn.stage = Stage::Control { peer };
        // One that it began before is given up by now.
        self.abandon_incoming(core, peer);
        let until = Instant::now() + INCOMING_TIMEOUT;
        core.alarm(until, self.shared.id, Alarm::Peer { peer });
        let incoming =
            Incoming { attempt: hello.attempt, control: token, until, lanes: BTreeMap::new(), theirs: None };
        self.peers.entry(peer).or_default().opening.incoming = Some(incoming);
        Ok(())
    }

    /// Tells the peer how this side would have the link, and opens its data connections.
    fn send_first_setup(&mut self, core: &mut Core, token: u64, conn: &mut Conn, hello: Hello) -> Result<()> {
        let peer = hello.target;
        let Some(trial) = self.trial(peer, token) else {
            fail!(Internal, "the attempt that this connection is for is over")
        };
        trial.said = true;
        let candidate = trial.candidate;
        // Should this fail, it is not for the peer, which has just proved itself.
        self.note_lack(peer, true);
        match candidate {
            Candidate::Local => {
                // Before the peer may count the link as open: where there is no room, TCP is next.
                let reserved = self.reserve()?;
                let ring = self.allocate_ring()?;
                let (setup, fds) = self.shm_setup(&ring)?;
                conn.wire.queue_frame(Kind::Setup, &setup.encode(), fds);
                if let Some(trial) = self.trial(peer, token) {
                    (trial.ring, trial.reserved) = (Some(ring), Some(reserved));
                }
            }
            Candidate::Tcp(address) => {
                self.have_patience(core, peer, token);
                let lanes = self.tcp_streams() as u8;
                let setup = self.setup(Data::Tcp { lanes });
                conn.wire.queue_frame(Kind::Setup, &setup.encode(), Vec::new());
                for lane in 0..lanes {
                    let refuse = |cause| Error::system("cannot open a data connection", cause);
                    let socket = tcp::connect(address).map_err(refuse)?;
                    let purpose = Purpose::Data(lane);
                    let lane_token =
                        self.connect(core, peer, hello.attempt, purpose, socket, false).map_err(refuse)?;
                    if let Some(trial) = self.trial(peer, token) {
                        trial.lane_tokens.push(lane_token);
                    }
                }
            }
        }
        self.note_lack(peer, false);
        Ok(())
    }

    /// From now on the peer may count the link as open: it has longer to answer.
    fn have_patience(&mut self, core: &mut Core, peer: u32, token: u64) {
        let id = self.shared.id;
        let Some(Opening { wanted, outgoing: Some(outgoing), .. }) =
            self.peers.get_mut(&peer).map(|peer| &mut peer.opening)
        else {
            return;
        };
        let Some(trial) = outgoing.trial.as_mut().filter(|trial| trial.control == token) else { return };
        if trial.until.is_none() {
            return;
        }
        // No more than half of what is left to who waits for the link: the next candidate needs some of it.
        let half = wanted.as_ref().map(|wanted| wanted.deadline.remaining_capped(2 * ANSWER_TIMEOUT) / 2);
        trial.patience = half.unwrap_or(ANSWER_TIMEOUT).max(TRIAL_TIMEOUT);
        let until = Instant::now() + trial.patience;
        trial.until = Some(until);
        core.alarm(until, id, Alarm::Peer { peer });
    }

    /// Whether the peer counts the link on this control connection as open and this side does not yet, since
    /// another of its connections is not ready: what the peer says next is for the open link.
    pub(super) fn awaits_lanes(&self, peer: u32, token: u64) -> bool {
        let trial = self.peers.get(&peer).and_then(|peer| peer.opening.outgoing.as_ref()?.trial.as_ref());
        trial.is_some_and(|trial| trial.control == token && trial.theirs.is_some())
    }

    /// The peer's setup has come.
    pub(super) fn setup_arrived(
        &mut self,
        peer: u32,
        token: u64,
        payload: &[u8],
        fds: Vec<OwnedFd>,
        conn: &Conn,
    ) -> Result<()> {
        let Some(setup) = Setup::decode(payload) else { fail!(PeerFailed, "its setup makes no sense") };
        let fits = match setup.data {
            Data::Shm { .. } => conn.local,
            Data::Tcp { lanes } => !conn.local && (1..=MAX_TCP_STREAMS).contains(&usize::from(lanes)),
        };
        if !fits {
            fail!(PeerFailed, "its setup does not fit the connection that it came on");
        }
        let pid = if conn.local { socket::peer_pid(conn.wire.socket().as_fd()).ok().flatten() } else { None };
        let theirs = Some(Theirs { setup, fds, pid });
        if let Some(trial) = self.trial(peer, token) {
            trial.theirs = theirs;
        } else if let Some(Opening { incoming: Some(incoming), .. }) =
            self.peers.get_mut(&peer).map(|peer| &mut peer.opening)
            && incoming.control == token
        {
            incoming.theirs = theirs;
        }
        self.unsettled.push(peer);
        Ok(())
    }

    /// A data connection has proved itself. One of an attempt that is over is closed.
    pub(super) fn lane_ready(&mut self, hello: &Hello, outgoing: bool, socket: Unshared<Socket>) {
        let peer = if outgoing { hello.target } else { hello.initiator };
        let (Purpose::Data(lane), Some(state)) = (hello.purpose, self.peers.get_mut(&peer)) else { return };
        let opening = &mut state.opening;
        let lanes = if outgoing {
            let trial = opening.outgoing.as_mut().and_then(|outgoing| outgoing.trial.as_mut());
            trial.filter(|trial| trial.attempt == hello.attempt).map(|trial| &mut trial.lanes)
        } else {
            let incoming = opening.incoming.as_mut();
            incoming.filter(|incoming| incoming.attempt == hello.attempt).map(|incoming| &mut incoming.lanes)
        };
        if let Some(lanes) = lanes {
            lanes.insert(lane, socket);
            self.unsettled.push(peer);
        }
    }

    /// A connection of a link that is being opened has failed.
    pub(super) fn opening_failed(&mut self, core: &mut Core, peer: u32, token: u64, why: &Error) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.opening.incoming.as_ref().is_some_and(|incoming| incoming.control == token) {
            log::debug!("rank {}: rank {peer} did not open its link: {why}", self.identity.rank);
            state.opening.theirs_failed = Some(why.text().to_owned());
            self.abandon_incoming(core, peer);
        } else if let Some(Outgoing { trial: Some(trial), .. }) = &state.opening.outgoing
            && (trial.control == token || trial.lane_tokens.contains(&token))
        {
            let control = trial.control;
            if token != control {
                // The end of a data connection overtakes what the control connection still brings: that is
                // the cause, and may have ended the trial.
                self.look_at(core, control);
            }
            if self.trial(peer, control).is_some() {
                self.give_up_trial(core, peer, why.text());
            }
        }
        self.unsettled.push(peer);
    }

    /// The candidate in progress does not lead to a link.
    fn give_up_trial(&mut self, core: &mut Core, peer: u32, why: &str) {
        let Some(outgoing) = self.outgoing(peer) else { return };
        outgoing.retire_ring();
        let Some(trial) = outgoing.trial.take() else { return };
        let candidate = trial.candidate;
        self.end_trial(core, peer, trial, why);
        self.note_failure(peer, candidate, why);
    }

    #[cold]
    fn note_lack(&mut self, peer: u32, lacks: bool) {
        if let Some(outgoing) = self.outgoing(peer) {
            outgoing.lacks = lacks;
        }
    }

    fn note_failure(&mut self, peer: u32, candidate: Candidate, why: &str) {
        let rank = self.identity.rank;
        let Some(outgoing) = self.outgoing(peer) else { return };
        let failure = match candidate {
            Candidate::Local => format!("shared memory: {why}"),
            Candidate::Tcp(address) => format!("TCP to {address}: {why}"),
        };
        log::debug!("rank {rank}: no link to rank {peer} over {failure}");
        outgoing.failures.push(failure);
    }

    fn outgoing(&mut self, peer: u32) -> Option<&mut Outgoing> {
        self.peers.get_mut(&peer)?.opening.outgoing.as_mut()
    }

    /// The trial in progress towards `peer`, if `token` is its control connection.
    fn trial(&mut self, peer: u32, token: u64) -> Option<&mut Trial> {
        self.outgoing(peer)?.trial.as_mut().filter(|trial| trial.control == token)
    }
}
