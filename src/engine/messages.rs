//! Keyed transfers between this rank and every other: posted, matched, moved.
//!
//! Three ways a message travels, chosen alike on both sides from its length and the kind of link:
//! - *eager*, up to [`EAGER_SHM_BYTES`] or [`EAGER_TCP_BYTES`]: frame and bytes at once; kept on the heap when nobody has asked yet;
//! - *streamed*, larger, over TCP: the receiver says [`FrameKind::Ready`] as soon as it has the buffer (for a
//!   collective, without being asked), and the bytes come in pieces over all lanes, straight into the buffer;
//! - *pulled*, larger, in shared memory: the sender tells where the bytes are, the receiver copies them out of the
//!   sender's memory and says [`FrameKind::Done`]; where the kernel forbids that, it says ready instead.
//!
//! A sender that gives up a message which it has announced says [`FrameKind::Withdraw`] before it lets go of the bytes.
//! What was pulled counts only once everything that the sender had said by then has been read.
//!
//! Everything here runs under the endpoint's lock. Addresses are kept until the transfer has ended or its mailbox has
//! been cancelled, never longer.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::lane::{self, Destination, Event, Incoming, Lane, Source, Target, Ticket, Watch};
use super::pairs::{From, Pairs, Waiting};
use super::shelf::{Parcel, Shelf};
use super::wire::{Class, Frame, FrameKind, Key};
use crate::error::{Error, Result, Status};
use crate::signature::Signature;
use crate::transport::bell::Bell;
use crate::transport::memory::PeerMemory;
use crate::transport::{Link, LinkKind};

/// The longest message that is sent through shared memory before the receiver has asked for it: a longer one is better
/// copied once than twice.
pub const EAGER_SHM_BYTES: usize = 64 * 1024;

/// The same over TCP: what asking costs is lost in the time that a longer one takes.
pub const EAGER_TCP_BYTES: usize = 256 * 1024;

/// A large message is cut into pieces of this many bytes, dealt out over the lanes of the link.
const PIECE_BYTES: usize = 512 * 1024;

/// Bytes pulled between two looks at everything else.
const PULL_BYTES: usize = 4 * 1024 * 1024;

/// Messages that arrive before anybody asked may take this much memory in all; then the streams of peers that nobody
/// waits for are left unread.
const UNEXPECTED_BYTES: usize = 256 * 1024 * 1024;

/// Frames handled on one lane before the next lane has its turn.
const TURN: usize = 64;

/// What has come to an operation since it last looked.
#[derive(Default)]
pub struct Mailbox {
    /// Steps whose transfer has ended.
    pub done: Vec<u32>,
    /// The first thing that went wrong.
    pub failed: Option<Failure>,
    /// The rank of the endpoint that a receive from any was served by.
    pub source: Option<u32>,
    live: bool,
}

/// Why a transfer will not end well.
#[derive(Clone, Debug)]
pub enum Failure {
    /// A failure that is no one peer's.
    Error(Error),
    /// Something of one peer. The owner of the mailbox knows how to call it.
    Peer {
        /// As the endpoint counts.
        peer: u32,
        /// What kind of failure.
        status: Status,
        /// What happened: goes on after the peer's name.
        what: String,
    },
    /// A peer, as the endpoint counts, is lost; the error speaks of it as the endpoint does.
    Lost(u32, Error),
    /// The ranks' calls differ.
    Mismatch(Mismatch),
}

/// What the ranks' calls disagree about.
#[derive(Clone, Debug)]
pub struct Mismatch {
    /// The other rank, as the endpoint counts.
    pub peer: u32,
    /// What the message was for.
    pub key: Key,
    /// The other rank's call.
    pub theirs: Signature,
    /// Our call, if the disagreement is about calls.
    pub ours: Option<Signature>,
    /// Bytes that came, and bytes that were expected, if it is about lengths.
    pub bytes: Option<(u64, u64)>,
}

/// What went wrong with a peer or a group, for the endpoint to act on.
pub enum Trouble {
    /// Ranks have called different things.
    Mismatch(Mismatch),
    /// The link to this peer is of no more use.
    Broken {
        /// As the endpoint counts.
        peer: u32,
        /// What happened.
        why: Error,
    },
}

/// All transfers of one endpoint.
pub struct Messages {
    rank: u32,
    peers: Vec<Peer>,
    open: Vec<u32>,
    receiving: HashMap<(u32, Key), Receiving, BuildHasherDefault<KeyHasher>>,
    sending: HashMap<(u32, Key), Sending, BuildHasherDefault<KeyHasher>>,
    mailboxes: Vec<Mailbox>,
    free: Vec<u32>,
    currents: HashMap<(u64, u64, Class), Current, BuildHasherDefault<KeyHasher>>,
    pairs: Pairs<Receive>,
    /// Pulled messages that do not count yet.
    pulled: Vec<Pulled>,
    /// Unexpected messages of collectives, in the order of their arrival; entries may be gone from `receiving`.
    arrived: VecDeque<(u32, Key)>,
    unexpected_bytes: usize,
    shelf: Shelf,
    /// [`UNEXPECTED_BYTES`]
    unexpected_limit: usize,
    /// Peers whose lanes are left unread.
    held: Vec<u32>,
    /// Lanes that the bell should watch for something else than it does.
    restless: Vec<(u32, u32)>,
    /// Peers for whom something is queued that [`Messages::write_out`] has to write.
    unwritten: Vec<u32>,
    /// Peers whose link somebody needs; the endpoint opens them.
    pub wanted: Vec<u32>,
    /// What went wrong; the endpoint acts on it.
    pub troubles: Vec<Trouble>,
}

#[derive(Default)]
struct Peer {
    state: PeerState,
    lanes: Vec<Lane>,
    kind: Option<LinkKind>,
    memory: Option<Arc<PeerMemory>>,
    /// Sends that wait for the link.
    waiting: Vec<(Frame, Source, Option<Ticket>)>,
    /// Transfers posted with this peer that have not ended.
    expected: usize,
    /// It has left, and all that it had said has been read.
    drained: bool,
    /// Receives among them whose pieces come over several lanes.
    spread: usize,
}

impl Peer {
    /// The longest message that is sent to it unasked, when it is linked.
    fn eager_bytes(&self) -> usize {
        match self.kind {
            Some(LinkKind::Shm) => EAGER_SHM_BYTES,
            _ => EAGER_TCP_BYTES,
        }
    }

    /// A receive of `len` bytes has been posted.
    fn receives(&mut self, len: usize) {
        self.expected += 1;
        self.spread += usize::from(len > PIECE_BYTES);
    }

    /// It has ended.
    fn received(&mut self, len: usize) {
        self.expected -= 1;
        self.spread -= usize::from(len > PIECE_BYTES);
    }
}

#[derive(Default)]
enum PeerState {
    #[default]
    Closed,
    Opening,
    Open,
    /// It said goodbye: what it has sent still counts.
    Left,
    Lost(Error),
}

enum Receiving {
    Posted(Posted),
    /// It came before anybody asked.
    Early(Early),
    /// It is coming in, on the heap, and somebody has asked meanwhile.
    Claimed(Posted),
}

struct Posted {
    into: Destination,
    signature: Signature,
    ticket: Ticket,
    received: usize,
    /// A receive of the caller: whose messages it takes.
    from: Option<From>,
}

enum Early {
    /// Coming in.
    Begun(Signature, u64),
    Eager(Signature, Parcel),
    Request {
        frame: Frame,
    },
}

enum Sending {
    Posted {
        from: Source,
        signature: Signature,
        ticket: Ticket,
        pieces: usize,
    },
    /// The receiver is ready before we are.
    Ready(Frame),
}

struct Current {
    sequence: u32,
    signature: Signature,
}

/// A message that has been pulled.
struct Pulled {
    peer: u32,
    frame: Frame,
    /// What the kernel said, if the bytes could not be read. No failure yet: the sender may have withdrawn them.
    refused: Option<std::io::Error>,
}

/// What a receive that waits for its message will do with it.
struct Receive {
    into: Destination,
    signature: Signature,
}

impl Messages {
    /// No links, no transfers.
    pub fn new(rank: u32, size: u32) -> Messages {
        Messages {
            rank,
            peers: (0..size).map(|_| Peer::default()).collect(),
            open: Vec::new(),
            receiving: HashMap::default(),
            sending: HashMap::default(),
            mailboxes: Vec::new(),
            free: Vec::new(),
            currents: HashMap::default(),
            pairs: Pairs::default(),
            pulled: Vec::new(),
            arrived: VecDeque::new(),
            unexpected_bytes: 0,
            shelf: Shelf::default(),
            unexpected_limit: UNEXPECTED_BYTES,
            held: Vec::new(),
            restless: Vec::new(),
            unwritten: Vec::new(),
            wanted: Vec::new(),
            troubles: Vec::new(),
        }
    }

    // ---- mailboxes

    /// A mailbox for one operation.
    pub fn mailbox(&mut self) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.mailboxes.push(Mailbox::default());
            (self.mailboxes.len() - 1) as u32
        });
        self.mailboxes[index as usize].live = true;
        index
    }

    /// What has come.
    pub fn look(&mut self, mailbox: u32) -> &mut Mailbox {
        &mut self.mailboxes[mailbox as usize]
    }

    /// Ends the mailbox of an operation whose transfers have all ended.
    pub fn close_mailbox(&mut self, mailbox: u32) {
        let slot = &mut self.mailboxes[mailbox as usize];
        slot.done.clear();
        slot.failed = None;
        slot.source = None;
        slot.live = false;
        self.free.push(mailbox);
    }

    /// Ends the mailbox of an operation that gives up: no transfer of it touches its memory after this.
    pub fn cancel(&mut self, mailbox: u32) {
        let peers = &mut self.peers;
        self.receiving.retain(|(peer, key), entry| match entry {
            Receiving::Posted(posted) | Receiving::Claimed(posted) if posted.ticket.mailbox == mailbox => {
                let peer = &mut peers[*peer as usize];
                peer.received(posted.into.len);
                for lane in &mut peer.lanes {
                    lane.discard(|frame| frame.key == *key);
                }
                false
            }
            _ => true,
        });
        let mut withdrawn = Vec::new();
        self.sending.retain(|&(peer, key), entry| match *entry {
            Sending::Posted { from, signature, ticket, .. } if ticket.mailbox == mailbox => {
                peers[peer as usize].expected -= 1;
                let total = from.len as u64;
                let kind = FrameKind::Withdraw;
                withdrawn.push((peer, Frame { kind, key, signature, total, offset: 0, length: 0 }));
                false
            }
            _ => true,
        });
        self.pairs.cancel(mailbox, |from| {
            if let From::Rank(peer) = from {
                peers[*peer as usize].expected -= 1;
            }
        });
        for peer in peers {
            peer.waiting.retain(|(_, _, ticket)| ticket.is_none_or(|ticket| ticket.mailbox != mailbox));
            for lane in &mut peer.lanes {
                lane.cancel(mailbox);
            }
        }
        for (peer, frame) in withdrawn {
            if matches!(self.peers[peer as usize].state, PeerState::Open) {
                self.control(peer, &frame);
                self.flush(peer);
            }
        }
        // The caller may change its bytes from here on: whoever sees the change finds the withdrawal.
        fence(Ordering::SeqCst);
        self.close_mailbox(mailbox);
    }

    // ---- links

    /// A link is there: what waited for it goes out.
    pub fn link_opened(&mut self, peer: u32, link: Link) {
        let slot = &mut self.peers[peer as usize];
        if !matches!(slot.state, PeerState::Closed | PeerState::Opening) {
            return;
        }
        slot.state = PeerState::Open;
        slot.kind = Some(link.kind);
        slot.memory = link.memory;
        slot.lanes = link.streams.into_iter().map(Lane::new).collect();
        self.open.push(peer);
        let waiting = std::mem::take(&mut slot.waiting);
        let pulls = self.pulls(peer);
        for (frame, from, ticket) in waiting {
            self.dispatch(peer, frame, from, ticket);
        }
        // Receives of large messages that were posted before the kind of the link was known.
        if !pulls {
            let posted: Vec<Frame> = self
                .receiving
                .iter()
                .filter_map(|((from, key), entry)| match entry {
                    Receiving::Posted(posted) if *from == peer && posted.announces(key) => {
                        Some(posted.ready(*key))
                    }
                    _ => None,
                })
                .collect();
            for frame in posted {
                self.control(peer, &frame);
            }
        }
        self.flush(peer);
    }

    /// The link cannot be had, or is gone: everything with this peer fails.
    pub fn link_lost(&mut self, peer: u32, why: Error) {
        let slot = &mut self.peers[peer as usize];
        if matches!(slot.state, PeerState::Lost(_)) {
            return;
        }
        slot.state = PeerState::Lost(why.clone());
        self.open.retain(|&open| open != peer);
        self.fail_with(peer, &Failure::Lost(peer, why));
    }

    /// The peer has said goodbye: what it sent before still arrives, nothing else will.
    pub fn peer_left(&mut self, peer: u32) {
        let slot = &mut self.peers[peer as usize];
        if matches!(slot.state, PeerState::Closed | PeerState::Opening | PeerState::Open) {
            slot.state = PeerState::Left;
            self.progress(peer);
        }
    }

    /// Whether nothing more comes from the peer.
    pub fn gone(&self, peer: u32) -> bool {
        let slot = &self.peers[peer as usize];
        match slot.state {
            PeerState::Lost(_) => true,
            PeerState::Left => slot.drained,
            _ => false,
        }
    }

    /// Whether the link is open.
    pub fn linked(&self, peer: u32) -> bool {
        !self.peers[peer as usize].lanes.is_empty()
    }

    /// The peer's memory, when it is on this host and linked.
    pub fn memory(&self, peer: u32) -> Option<&Arc<PeerMemory>> {
        self.peers[peer as usize].memory.as_ref()
    }

    /// Peers with an open link.
    pub fn open_peers(&self) -> &[u32] {
        &self.open
    }

    /// Whether reading from this peer costs no system call.
    pub fn polls(&self, peer: u32) -> bool {
        self.peers[peer as usize].kind == Some(LinkKind::Shm)
    }

    /// Links over TCP.
    pub fn tcp_links(&self) -> usize {
        self.open.iter().filter(|&&peer| !self.polls(peer)).count()
    }

    /// Has `bell` watch what the lanes need: readable unless they are left unread, writable while something waits for
    /// room.
    pub fn watch(&mut self, bell: &Bell) {
        self.release();
        for (peer, index) in std::mem::take(&mut self.restless) {
            let Some(lane) = self.peers[peer as usize].lanes.get_mut(index as usize) else { continue };
            let wanted = lane.watch();
            let Some(fd) = lane.stream().poll_fd() else { continue };
            let token = u64::from(peer) << 8 | u64::from(index);
            let result = match wanted {
                Watch::Nothing => {
                    bell.unwatch(fd);
                    Ok(())
                }
                Watch::Reading { blocked } => bell.watch(fd, token, !lane.closed(), blocked),
            };
            match result {
                Ok(()) => lane.watched = wanted,
                Err(error) => log::error!("a stream cannot be watched: {error}"),
            }
        }
    }

    /// Whether what `peer` sends is read now. What a transfer waits for may come behind any number of messages that
    /// nobody has asked for, so where one waits, the limit does not count. (One that writes counts too: its peer may
    /// be reading only as fast as we do.) What is left of a peer that has gone is bounded by the system's buffers.
    fn reads(&self, peer: u32) -> bool {
        let slot = &self.peers[peer as usize];
        self.unexpected_bytes <= self.unexpected_limit
            || slot.expected > 0
            || !matches!(slot.state, PeerState::Open)
            || slot.lanes.iter().any(|lane| lane.backlog() > 0)
            || self.pulled.iter().any(|pulled| pulled.peer == peer)
            || self.pairs.waiting().any(|waiting| waiting.from.accepts(peer))
    }

    /// Leaves the lanes of `peer` unread and unwatched: what waits there would wake every sleeper at once.
    fn hold(&mut self, peer: u32) {
        if !self.held.contains(&peer) {
            log::debug!("rank {}: what comes from rank {peer} waits until somebody asks for it", self.rank);
            self.held.push(peer);
            self.peers[peer as usize].lanes.iter_mut().for_each(|lane| lane.held = true);
        }
    }

    /// Ends [`Messages::hold`] where it has lost its reason.
    fn release(&mut self) {
        for peer in std::mem::take(&mut self.held) {
            if self.reads(peer) {
                self.peers[peer as usize].lanes.iter_mut().for_each(|lane| lane.held = false);
                self.note_watches(peer);
            } else {
                self.held.push(peer);
            }
        }
    }

    fn note_watches(&mut self, peer: u32) {
        for (index, lane) in self.peers[peer as usize].lanes.iter().enumerate() {
            if lane.watch() != lane.watched {
                self.restless.push((peer, index as u32));
            }
        }
    }

    /// Has the endpoint open the link to `peer`, if nobody has.
    pub fn want(&mut self, peer: u32) {
        if matches!(self.peers[peer as usize].state, PeerState::Closed) {
            self.peers[peer as usize].state = PeerState::Opening;
            self.wanted.push(peer);
        }
    }

    // ---- calls

    /// Says which call is now number `sequence` of (group, class, tag). Messages of another call with that number, or
    /// of numbers that are over, are mismatches from here on, those that have arrived among them.
    pub fn begin_call(&mut self, group: u64, class: Class, tag: u64, sequence: u32, signature: Signature) {
        self.currents.insert((group, tag, class), Current { sequence, signature });
        if self.arrived.is_empty() {
            return;
        }
        self.prune_arrived();
        let found = self.arrived.iter().find_map(|(peer, key)| {
            let theirs = match self.receiving.get(&(*peer, *key))? {
                Receiving::Early(early) => early.signature(),
                _ => return None,
            };
            let same = key.group == group && key.tag == tag && key.class == class;
            (same && key.sequence == sequence && theirs != signature).then_some(Mismatch {
                peer: *peer,
                key: *key,
                theirs,
                ours: Some(signature),
                bytes: None,
            })
        });
        if let Some(mismatch) = found {
            self.troubles.push(Trouble::Mismatch(mismatch));
        }
    }

    /// A group is gone from this rank: what has come for it and was not asked for, and what is known of its calls, is
    /// given up. Transfers under way stay; their owner ends them.
    pub fn forget(&mut self, group: u64) {
        self.currents.retain(|(other, ..), _| *other != group);
        self.pairs.forget(group);
        let unexpected_bytes = &mut self.unexpected_bytes;
        self.receiving.retain(|(_, key), entry| match entry {
            Receiving::Early(early) if key.group == group => {
                // What is still coming in is counted until it is complete, and dropped then.
                if let Early::Eager(_, parcel) = early {
                    *unexpected_bytes -= parcel.bytes().len();
                }
                false
            }
            _ => true,
        });
        self.sending.retain(|(_, key), entry| key.group != group || !matches!(entry, Sending::Ready(_)));
        self.arrived.retain(|(_, key)| key.group != group);
    }

    /// The number of the next send to `peer` with this tag.
    pub fn next_in_pair(&mut self, peer: u32, group: u64, tag: u64) -> u32 {
        self.pairs.number(peer, (group, tag))
    }

    // ---- posting

    /// Sends, once [`Messages::write_out`] is called. The ticket's mailbox is told when the bytes may be changed again.
    pub fn send(&mut self, peer: u32, key: Key, signature: Signature, from: Source, ticket: Ticket) {
        let frame = Frame {
            kind: FrameKind::Request,
            key,
            signature,
            total: from.len as u64,
            offset: from.address as u64,
            length: 0,
        };
        match &self.peers[peer as usize].state {
            PeerState::Open => {
                self.dispatch(peer, frame, from, Some(ticket));
                self.note_unwritten(peer);
            }
            PeerState::Closed | PeerState::Opening => {
                self.peers[peer as usize].waiting.push((frame, from, Some(ticket)));
                self.want(peer);
            }
            PeerState::Left => self.fail(ticket, left(peer)),
            PeerState::Lost(why) => {
                let why = Failure::Lost(peer, why.clone());
                self.fail(ticket, why);
            }
        }
    }

    /// Receives exactly `into.len` bytes. The ticket's mailbox is told when they are there.
    pub fn receive(&mut self, peer: u32, key: Key, signature: Signature, into: Destination, ticket: Ticket) {
        self.post(peer, key, Posted { into, signature, ticket, received: 0, from: None });
    }

    fn post(&mut self, peer: u32, key: Key, posted: Posted) {
        let len = posted.into.len;
        let ticket = posted.ticket;
        if let Some(entry) = self.receiving.get_mut(&(peer, key)) {
            let Receiving::Early(early) = entry else {
                let why = Error::new(Status::Internal, "a message was asked for twice");
                self.fail(ticket, Failure::Error(why));
                return;
            };
            if let Some(mismatch) = posted.check(peer, key, early.signature(), early.total()) {
                let Some(Receiving::Early(early)) = self.receiving.remove(&(peer, key)) else { return };
                match early {
                    Early::Begun(..) => {}
                    Early::Eager(_, parcel) => self.unexpected_bytes -= parcel.bytes().len(),
                    Early::Request { .. } => self.refuse(peer, &posted, key),
                }
                self.mismatch(ticket, mismatch);
                return;
            }
            if let (PeerState::Lost(why), Early::Begun(..) | Early::Request { .. }) =
                (&self.peers[peer as usize].state, &early)
            {
                let why = Failure::Lost(peer, why.clone());
                self.fail(ticket, why);
                return;
            }
            match early {
                Early::Begun(..) => {
                    *entry = Receiving::Claimed(posted);
                    self.peers[peer as usize].receives(len);
                }
                Early::Eager(_, parcel) => {
                    deliver(parcel.bytes(), &posted);
                    self.unexpected_bytes -= parcel.bytes().len();
                    self.shelf.give_back(std::mem::take(parcel));
                    self.receiving.remove(&(peer, key));
                    self.mailboxes[ticket.mailbox as usize].done.push(ticket.step);
                }
                Early::Request { frame } => {
                    let frame = *frame;
                    self.receiving.insert((peer, key), Receiving::Posted(posted));
                    self.peers[peer as usize].receives(len);
                    self.accept(peer, frame);
                }
            }
            return;
        }
        if !self.can_come(peer, ticket) {
            return;
        }
        let announces = posted.announces(&key);
        let ready = posted.ready(key);
        self.receiving.insert((peer, key), Receiving::Posted(posted));
        self.peers[peer as usize].receives(len);
        if announces && self.linked(peer) && !self.pulls(peer) {
            self.control(peer, &ready);
            self.note_unwritten(peer);
        }
    }

    /// Writes what has been posted: call it after the last of several sends and receives. What one peer is to get goes
    /// out together.
    pub fn write_out(&mut self) {
        while let Some(peer) = self.unwritten.pop() {
            self.flush(peer);
        }
    }

    fn note_unwritten(&mut self, peer: u32) {
        if !self.unwritten.contains(&peer) {
            self.unwritten.push(peer);
        }
    }

    /// Receives the next message of a send with this tag.
    pub fn receive_next(
        &mut self,
        (group, tag): (u64, u64),
        from: From,
        signature: Signature,
        into: Destination,
        ticket: Ticket,
    ) {
        if let Some((peer, sequence)) = self.pairs.take(&from, (group, tag)) {
            let key = Key { group, tag, sequence, slot: 0, class: Class::PointToPoint };
            self.mailboxes[ticket.mailbox as usize].source = Some(peer);
            self.post(peer, key, Posted { into, signature, ticket, received: 0, from: Some(from) });
            return;
        }
        match &from {
            From::Rank(peer) => {
                if !self.can_come(*peer, ticket) {
                    return;
                }
                self.peers[*peer as usize].expected += 1;
            }
            From::Any(members) => {
                if members.iter().all(|&peer| peer == self.rank || self.gone(peer)) {
                    let why = Error::new(Status::PeerFailed, "every rank that could send has left");
                    self.fail(ticket, Failure::Error(why));
                    return;
                }
            }
        }
        let receive = Receive { into, signature };
        self.pairs.wait((group, tag), Waiting { from, ticket, receive });
    }

    /// Whether a message that is not here yet can still come from `peer`; fails the ticket if not.
    fn can_come(&mut self, peer: u32, ticket: Ticket) -> bool {
        let slot = &self.peers[peer as usize];
        let why = match &slot.state {
            PeerState::Lost(why) => Failure::Lost(peer, why.clone()),
            PeerState::Left if slot.drained => left(peer),
            _ => {
                self.want(peer);
                return true;
            }
        };
        self.fail(ticket, why);
        false
    }

    // ---- moving

    /// Reads and writes what it can on the lanes of `peer` that are in use. Whether anything moved.
    pub fn progress(&mut self, peer: u32) -> bool {
        let slot = &self.peers[peer as usize];
        // Nothing but the pieces of large messages, and the end, comes over other lanes than the first.
        let all = slot.spread > 0 || matches!(slot.state, PeerState::Left);
        let lanes = if all { slot.lanes.len() } else { slot.lanes.len().min(1) };
        self.progress_lanes(peer, lanes)
    }

    /// The same for all lanes, for a peer that the kernel says is ready.
    pub fn serve(&mut self, peer: u32) -> bool {
        self.progress_lanes(peer, self.peers[peer as usize].lanes.len())
    }

    fn progress_lanes(&mut self, peer: u32, lanes: usize) -> bool {
        let mut moved = false;
        for lane in 0..lanes {
            moved |= self.read_lane(peer, lane);
        }
        self.note_watches(peer);
        if self.peers[peer as usize].lanes.iter().any(|lane| lane.backlog() > 0) {
            moved |= self.flush(peer);
        }
        let slot = &mut self.peers[peer as usize];
        if matches!(slot.state, PeerState::Left) && !moved {
            // A goodbye may overtake data on other connections; their end comes behind the data. What is in shared
            // memory was there before the goodbye.
            slot.drained = slot.lanes.iter().all(|lane| lane.closed() || lane.stream().poll_fd().is_none());
            if slot.drained {
                self.strand(peer);
            }
        }
        moved
    }

    /// Transfers posted with `peer` that have not ended.
    pub fn expected(&self, peer: u32) -> usize {
        self.peers[peer as usize].expected
    }

    fn read_lane(&mut self, peer: u32, lane: usize) -> bool {
        let mut moved = false;
        for _ in 0..TURN {
            if !self.reads(peer) {
                self.hold(peer);
                return moved;
            }
            let event = match self.peers[peer as usize].lanes[lane].read() {
                Ok(event) => event,
                Err(why) => {
                    self.broken(peer, why);
                    return true;
                }
            };
            match event {
                Event::Idle | Event::Closed => return moved | (lane == 0 && self.count_pulled(peer)),
                Event::Frame(frame) => {
                    moved = true;
                    if let Err(why) = self.arrive(peer, lane, frame) {
                        self.broken(peer, why);
                        return true;
                    }
                }
                Event::Complete(incoming) => {
                    moved = true;
                    self.completed(peer, incoming);
                }
            }
        }
        moved
    }

    /// A frame has come; if a payload follows, says where it goes.
    fn arrive(&mut self, peer: u32, lane: usize, frame: Frame) -> Result<()> {
        match frame.kind {
            FrameKind::Ready => self.peer_is_ready(peer, frame),
            FrameKind::Done => {
                if let Some(Sending::Posted { ticket, .. }) = self.sending.remove(&(peer, frame.key)) {
                    self.peers[peer as usize].expected -= 1;
                    self.mailboxes[ticket.mailbox as usize].done.push(ticket.step);
                }
            }
            FrameKind::Refuse => {
                if let Some(Sending::Posted { from, signature, ticket, .. }) =
                    self.sending.remove(&(peer, frame.key))
                {
                    self.peers[peer as usize].expected -= 1;
                    let bytes = Some((frame.total, from.len as u64)).filter(|(theirs, ours)| theirs != ours);
                    let (key, theirs, ours) = (frame.key, frame.signature, Some(signature));
                    self.mismatch(ticket, Mismatch { peer, key, theirs, ours, bytes });
                }
            }
            FrameKind::Withdraw => self.withdrawn(peer, frame.key),
            FrameKind::Data => {
                let target = match self.receiving.get(&(peer, frame.key)) {
                    Some(Receiving::Posted(posted)) if posted.into.len as u64 == frame.total => {
                        // SAFETY: the frame's end is at most its total, which is the length of the buffer.
                        Target::User(unsafe { posted.into.part(frame.offset as usize, frame.length) })
                    }
                    _ => Target::Discard,
                };
                self.peers[peer as usize].lanes[lane].begin(frame, target);
            }
            FrameKind::Eager | FrameKind::Request => return self.message(peer, lane, frame),
        }
        Ok(())
    }

    /// A message has come, or the announcement of one.
    fn message(&mut self, peer: u32, lane: usize, frame: Frame) -> Result<()> {
        let key = (peer, frame.key);
        let eager = frame.kind == FrameKind::Eager;
        if eager && frame.total > self.peers[peer as usize].eager_bytes() as u64 {
            return Err(Error::new(
                Status::Internal,
                format!("a message of {} bytes came unasked", frame.total),
            ));
        }
        if frame.key.class == Class::PointToPoint && !self.receiving.contains_key(&key) {
            self.offer(peer, &frame);
        }
        match self.receiving.get(&key) {
            Some(Receiving::Posted(posted)) => {
                if let Some(mismatch) = posted.check(peer, frame.key, frame.signature, frame.total) {
                    let Some(Receiving::Posted(posted)) = self.receiving.remove(&key) else { return Ok(()) };
                    self.peers[peer as usize].received(posted.into.len);
                    if eager {
                        self.peers[peer as usize].lanes[lane].begin(frame, Target::Discard);
                    } else {
                        self.refuse(peer, &posted, frame.key);
                    }
                    self.mismatch(posted.ticket, mismatch);
                } else if eager {
                    let target = Target::User(posted.into);
                    self.peers[peer as usize].lanes[lane].begin(frame, target);
                } else {
                    self.accept(peer, frame);
                }
            }
            Some(_) => return Err(Error::new(Status::Internal, "a message came twice")),
            None => {
                if frame.key.class != Class::PointToPoint {
                    self.check_call(peer, &frame);
                    if self.arrived.len() > 1024 && self.arrived.len() > 2 * self.receiving.len() {
                        self.prune_arrived();
                    }
                    self.arrived.push_back(key);
                }
                let early = if eager {
                    self.unexpected_bytes += frame.length as usize;
                    let parcel = self.shelf.take(frame.length as usize);
                    self.peers[peer as usize].lanes[lane].begin(frame, Target::Kept(parcel));
                    Early::Begun(frame.signature, frame.total)
                } else {
                    Early::Request { frame }
                };
                self.receiving.insert(key, Receiving::Early(early));
            }
        }
        Ok(())
    }

    fn completed(&mut self, peer: u32, incoming: Incoming) {
        let key = (peer, incoming.frame.key);
        match incoming.target {
            Target::Discard => {}
            Target::Kept(parcel) => match self.receiving.remove(&key) {
                Some(Receiving::Claimed(posted)) => {
                    deliver(parcel.bytes(), &posted);
                    self.unexpected_bytes -= parcel.bytes().len();
                    self.shelf.give_back(parcel);
                    self.peers[peer as usize].received(posted.into.len);
                    self.mailboxes[posted.ticket.mailbox as usize].done.push(posted.ticket.step);
                }
                Some(Receiving::Early(_)) => {
                    let early = Early::Eager(incoming.frame.signature, parcel);
                    self.receiving.insert(key, Receiving::Early(early));
                }
                // Its receiver claimed it and gave up.
                _ => {
                    self.unexpected_bytes -= parcel.bytes().len();
                    self.shelf.give_back(parcel);
                }
            },
            Target::User(_) => {
                if let Some(Receiving::Posted(posted)) = self.receiving.get_mut(&key) {
                    posted.received += incoming.frame.length as usize;
                    if posted.received == posted.into.len {
                        let (ticket, len) = (posted.ticket, posted.into.len);
                        self.receiving.remove(&key);
                        self.peers[peer as usize].received(len);
                        self.mailboxes[ticket.mailbox as usize].done.push(ticket.step);
                    }
                }
            }
        }
    }

    /// A large message is announced and its buffer is posted: pull it, or ask for it.
    fn accept(&mut self, peer: u32, frame: Frame) {
        let key = (peer, frame.key);
        let Some(Receiving::Posted(posted)) = self.receiving.get(&key) else { return };
        let into = posted.into;
        // Also in our own process the kernel reads: the sender may give up and unmap its bytes at any time.
        let memory = self.peers[peer as usize].memory.clone().filter(|memory| memory.can_read);
        let Some(memory) = memory else {
            if !posted.announces(&frame.key) || self.peers[peer as usize].kind == Some(LinkKind::Shm) {
                let ready = posted.ready(frame.key);
                self.control(peer, &ready);
                self.flush(peer);
            }
            return;
        };
        let (mut done, mut refused) = (0, None);
        while done < into.len {
            let count = PULL_BYTES.min(into.len - done);
            // SAFETY: `done + count` is at most the length of the posted buffer, which stays valid until its ticket
            // is told or cancelled; neither happens while this runs under the endpoint's lock.
            let rest = unsafe { std::slice::from_raw_parts_mut(into.address.add(done), count) };
            if let Err(error) = memory.read(frame.offset.wrapping_add(done as u64), rest) {
                // A process that has just died: the service says so in a moment, and in better words.
                if error.raw_os_error() == Some(libc::ESRCH) {
                    return;
                }
                refused = Some(error);
                break;
            }
            done += count;
        }
        fence(Ordering::SeqCst);
        self.pulled.push(Pulled { peer, frame, refused });
    }

    /// Everything that `peer` has said so far has been read: what was pulled from it before counts. Whether there was
    /// anything.
    fn count_pulled(&mut self, peer: u32) -> bool {
        if self.pulled.iter().all(|pulled| pulled.peer != peer) {
            return false;
        }
        let (ours, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.pulled).into_iter().partition(|pulled| pulled.peer == peer);
        self.pulled = others;
        for Pulled { frame, refused, .. } in ours {
            // Gone if the receiver has given up meanwhile: the sender is told nevertheless that its bytes are free.
            if let Some(Receiving::Posted(posted)) = self.receiving.remove(&(peer, frame.key)) {
                self.peers[peer as usize].received(posted.into.len);
                match refused {
                    Some(cause) => {
                        let bytes = posted.into.len;
                        let what =
                            format!("has {bytes} bytes that could not be read from its memory: {cause}");
                        self.fail(posted.ticket, Failure::Peer { peer, status: Status::System, what });
                        continue;
                    }
                    None => self.mailboxes[posted.ticket.mailbox as usize].done.push(posted.ticket.step),
                }
            }
            self.control(peer, &Frame { kind: FrameKind::Done, offset: 0, ..frame });
        }
        self.flush(peer);
        true
    }

    /// The sender gives up a message that it has announced.
    fn withdrawn(&mut self, peer: u32, key: Key) {
        self.pulled.retain(|pulled| (pulled.peer, pulled.frame.key) != (peer, key));
        match self.receiving.get(&(peer, key)) {
            Some(Receiving::Early(Early::Request { .. })) => {
                self.receiving.remove(&(peer, key));
                self.pairs.withdraw(peer, (key.group, key.tag), key.sequence);
            }
            Some(Receiving::Posted(posted)) => {
                let lanes = &self.peers[peer as usize].lanes;
                let begun = posted.received > 0 || lanes.iter().any(|lane| lane.is_receiving(key));
                if !begun && posted.from.is_some() {
                    self.await_another(peer, key);
                    return;
                }
                // The entry stays until its owner lets go: more of the message may be on its way in.
                let ticket = posted.ticket;
                let what = "gave up in the middle of a message: timed out, or cancelled".into();
                self.fail(ticket, Failure::Peer { peer, status: Status::PeerFailed, what });
            }
            _ => {}
        }
    }

    /// The message that a receive was to get is withdrawn before any of it came: it takes the next one.
    fn await_another(&mut self, peer: u32, key: Key) {
        let Some(Receiving::Posted(posted)) = self.receiving.remove(&(peer, key)) else { return };
        let Posted { into, signature, ticket, from: Some(from), .. } = posted else { return };
        let (channel, slot) = ((key.group, key.tag), &mut self.peers[peer as usize]);
        if let Some((peer, sequence)) = self.pairs.take(&from, channel) {
            slot.received(into.len);
            self.mailboxes[ticket.mailbox as usize].source = Some(peer);
            let key = Key { sequence, ..key };
            self.post(peer, key, Posted { into, signature, ticket, received: 0, from: Some(from) });
            return;
        }
        match from {
            From::Any(_) => slot.received(into.len),
            From::Rank(_) => slot.spread -= usize::from(into.len > PIECE_BYTES),
        }
        let receive = Receive { into, signature };
        self.pairs.wait_again(channel, Waiting { from, ticket, receive });
    }

    /// Tells the sender of an announced message that the receiver's call is another.
    fn refuse(&mut self, peer: u32, posted: &Posted, key: Key) {
        let frame = Frame { kind: FrameKind::Refuse, ..posted.ready(key) };
        self.control(peer, &frame);
        self.flush(peer);
    }

    /// The receiver has its buffer: the bytes go out in pieces.
    fn peer_is_ready(&mut self, peer: u32, frame: Frame) {
        let key = (peer, frame.key);
        let Some(Sending::Posted { from, signature, ticket, .. }) = self.sending.get(&key) else {
            self.check_call(peer, &frame);
            self.sending.insert(key, Sending::Ready(frame));
            return;
        };
        let (from, signature, ticket) = (*from, *signature, *ticket);
        if let Some(mismatch) = check(peer, frame.key, frame.signature, signature, frame.total, from.len) {
            self.sending.remove(&key);
            self.peers[peer as usize].expected -= 1;
            self.mismatch(ticket, mismatch);
            return;
        }
        self.stream_out(peer, frame.key, signature, from, ticket);
        self.flush(peer);
    }

    fn stream_out(&mut self, peer: u32, key: Key, signature: Signature, from: Source, ticket: Ticket) {
        let slot = &mut self.peers[peer as usize];
        let lanes = slot.lanes.len();
        let pieces = from.len.div_ceil(PIECE_BYTES);
        for piece in 0..pieces {
            let offset = piece * PIECE_BYTES;
            let length = PIECE_BYTES.min(from.len - offset);
            let frame = Frame {
                kind: FrameKind::Data,
                key,
                signature,
                total: from.len as u64,
                offset: offset as u64,
                length: length as u32,
            };
            // SAFETY: `offset` is inside the source.
            let part = Source { address: unsafe { from.address.add(offset) }, len: length };
            slot.lanes[piece % lanes].push_piece(&frame, part, ticket);
        }
        self.sending.insert((peer, key), Sending::Posted { from, signature, ticket, pieces });
    }

    /// Hands a send to an open link. The frame is that of an announcement.
    fn dispatch(&mut self, peer: u32, frame: Frame, from: Source, ticket: Option<Ticket>) {
        let Some(ticket) = ticket else { return };
        let slot = &mut self.peers[peer as usize];
        if from.len <= slot.eager_bytes() {
            let frame = Frame { kind: FrameKind::Eager, offset: 0, length: from.len as u32, ..frame };
            slot.lanes[0].push(&frame, from, Some(ticket));
            return;
        }
        slot.expected += 1;
        let announced = slot.kind == Some(LinkKind::Shm) || frame.key.class == Class::PointToPoint;
        let early = self.sending.insert(
            (peer, frame.key),
            Sending::Posted { from, signature: frame.signature, ticket, pieces: 0 },
        );
        if let Some(Sending::Ready(ready)) = early {
            self.peer_is_ready(peer, ready);
        } else if announced {
            slot.lanes[0].push_bare(&frame);
        }
    }

    /// Writes what fits on the lanes of `peer`.
    fn flush(&mut self, peer: u32) -> bool {
        let mut moved = false;
        let mut broken = None;
        let slot = &mut self.peers[peer as usize];
        for lane in &mut slot.lanes {
            let result = lane.flush(|ticket, piece| {
                if let Some(key) = piece {
                    let Some(Sending::Posted { pieces, .. }) = self.sending.get_mut(&(peer, key)) else {
                        return;
                    };
                    *pieces -= 1;
                    if *pieces > 0 {
                        return;
                    }
                    self.sending.remove(&(peer, key));
                    slot.expected -= 1;
                }
                self.mailboxes[ticket.mailbox as usize].done.push(ticket.step);
            });
            match result {
                Ok(progress) => moved |= progress,
                Err(error) => broken = Some(lane::broke(&error)),
            }
        }
        self.note_watches(peer);
        if let Some(why) = broken {
            self.broken(peer, why);
        }
        moved
    }

    fn control(&mut self, peer: u32, frame: &Frame) {
        if let Some(lane) = self.peers[peer as usize].lanes.first_mut() {
            lane.push_bare(frame);
        }
    }

    fn pulls(&self, peer: u32) -> bool {
        self.peers[peer as usize].kind == Some(LinkKind::Shm)
    }

    /// If a receive waits for a message like this one, it gets it.
    fn offer(&mut self, peer: u32, frame: &Frame) {
        let key = frame.key;
        let Some(waiting) = self.pairs.arrive(peer, (key.group, key.tag), key.sequence) else { return };
        let Waiting { from, ticket, receive: Receive { into, signature } } = waiting;
        self.mailboxes[ticket.mailbox as usize].source = Some(peer);
        let slot = &mut self.peers[peer as usize];
        match from {
            From::Any(_) => slot.receives(into.len),
            // Counted as expected since it was posted.
            From::Rank(_) => slot.spread += usize::from(into.len > PIECE_BYTES),
        }
        let posted = Posted { into, signature, ticket, received: 0, from: Some(from) };
        self.receiving.insert((peer, key), Receiving::Posted(posted));
    }

    /// A message nobody has asked for: is it of the call that this rank makes, or of one to come?
    fn check_call(&mut self, peer: u32, frame: &Frame) {
        let key = frame.key;
        let Some(current) = self.currents.get(&(key.group, key.tag, key.class)) else { return };
        let over = (key.sequence.wrapping_sub(current.sequence) as i32) < 0;
        let differs = key.sequence == current.sequence && frame.signature != current.signature;
        if over || differs {
            let ours = differs.then_some(current.signature);
            self.troubles.push(Trouble::Mismatch(Mismatch {
                peer,
                key,
                theirs: frame.signature,
                ours,
                bytes: None,
            }));
        }
    }

    fn mismatch(&mut self, ticket: Ticket, mismatch: Mismatch) {
        if mismatch.key.class != Class::PointToPoint {
            self.troubles.push(Trouble::Mismatch(mismatch.clone()));
        }
        self.fail(ticket, Failure::Mismatch(mismatch));
    }

    fn fail(&mut self, ticket: Ticket, why: Failure) {
        let mailbox = &mut self.mailboxes[ticket.mailbox as usize];
        if mailbox.live && mailbox.failed.is_none() {
            mailbox.failed = Some(why);
        }
    }

    fn broken(&mut self, peer: u32, why: Error) {
        let slot = &mut self.peers[peer as usize];
        let working = slot.lanes.iter().any(|lane| !lane.closed());
        slot.lanes.iter_mut().for_each(Lane::shut);
        // The endpoint knows how to call the peer, and loses the link. Of one that has left, nothing else was to come.
        if working && matches!(slot.state, PeerState::Open) {
            self.troubles.push(Trouble::Broken { peer, why });
        }
    }

    /// The peer has left and nothing more comes from it: whoever still waits for it waits in vain.
    fn strand(&mut self, peer: u32) {
        let slot = &self.peers[peer as usize];
        let backlog = slot.lanes.iter().any(|lane| lane.backlog() > 0);
        if slot.expected > 0 || backlog || !slot.waiting.is_empty() || self.pairs.waiting().next().is_some() {
            self.fail_with(peer, &left(peer));
        }
    }

    fn fail_with(&mut self, peer: u32, why: &Failure) {
        let mut tickets = Vec::new();
        for ((from, _), entry) in &self.receiving {
            if let (true, Receiving::Posted(posted) | Receiving::Claimed(posted)) = (*from == peer, entry) {
                tickets.push(posted.ticket);
            }
        }
        for ((to, _), entry) in &self.sending {
            if let (true, Sending::Posted { ticket, .. }) = (*to == peer, entry) {
                tickets.push(*ticket);
            }
        }
        let slot = &self.peers[peer as usize];
        tickets.extend(slot.waiting.iter().filter_map(|(_, _, ticket)| *ticket));
        tickets.extend(slot.lanes.iter().flat_map(Lane::tickets));
        tickets.extend(self.pairs.waiting().filter_map(|waiting| {
            let in_vain = match &waiting.from {
                From::Rank(rank) => *rank == peer,
                From::Any(ranks) => ranks.iter().all(|&rank| rank == self.rank || self.gone(rank)),
            };
            in_vain.then_some(waiting.ticket)
        }));
        for ticket in tickets {
            self.fail(ticket, why.clone());
        }
    }

    /// Lowers the limit of what may arrive before anybody asked.
    #[cfg(test)]
    pub fn limit_unexpected(&mut self, bytes: usize) {
        self.unexpected_limit = bytes;
    }

    /// Bytes that have arrived before anybody asked.
    #[cfg(test)]
    pub fn unexpected_bytes(&self) -> usize {
        self.unexpected_bytes
    }

    /// Entries of all tables.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        let calls = self.currents.len() + self.arrived.len() + self.pairs.entries();
        calls + self.receiving.len() + self.sending.len() + self.pulled.len()
    }

    /// Drops entries whose message has been taken.
    fn prune_arrived(&mut self) {
        let receiving = &self.receiving;
        self.arrived.retain(|key| matches!(receiving.get(key), Some(Receiving::Early(_))));
    }
}

impl Posted {
    fn check(&self, peer: u32, key: Key, theirs: Signature, total: u64) -> Option<Mismatch> {
        check(peer, key, theirs, self.signature, total, self.into.len)
    }

    /// Whether the receiver of this tells the sender unasked that it is ready. (Over TCP; in shared memory the sender
    /// asks.)
    fn announces(&self, key: &Key) -> bool {
        self.into.len > EAGER_TCP_BYTES && key.class != Class::PointToPoint
    }

    fn ready(&self, key: Key) -> Frame {
        Frame {
            kind: FrameKind::Ready,
            key,
            signature: self.signature,
            total: self.into.len as u64,
            offset: 0,
            length: 0,
        }
    }
}

impl Early {
    fn signature(&self) -> Signature {
        match self {
            Early::Begun(signature, _) | Early::Eager(signature, _) => *signature,
            Early::Request { frame } => frame.signature,
        }
    }

    fn total(&self) -> u64 {
        match self {
            Early::Begun(_, total) => *total,
            Early::Eager(_, parcel) => parcel.bytes().len() as u64,
            Early::Request { frame } => frame.total,
        }
    }
}

impl Destination {
    /// `length` bytes from `offset`.
    ///
    /// # Safety
    /// They are inside the destination.
    unsafe fn part(self, offset: usize, length: u32) -> Destination {
        debug_assert!(offset + length as usize <= self.len);
        // SAFETY: inside the same buffer, as the caller promised.
        Destination { address: unsafe { self.address.add(offset) }, len: length as usize }
    }
}

fn check(
    peer: u32,
    key: Key,
    theirs: Signature,
    ours: Signature,
    total: u64,
    len: usize,
) -> Option<Mismatch> {
    let same = match key.class {
        Class::PointToPoint => theirs.dtype == ours.dtype && theirs.count == ours.count,
        _ => theirs == ours,
    };
    if !same {
        return Some(Mismatch { peer, key, theirs, ours: Some(ours), bytes: None });
    }
    let bytes = Some((total, len as u64));
    (total != len as u64).then_some(Mismatch { peer, key, theirs, ours: Some(ours), bytes })
}

fn deliver(bytes: &[u8], posted: &Posted) {
    debug_assert_eq!(bytes.len(), posted.into.len);
    if bytes.is_empty() {
        return;
    }
    // SAFETY: the lengths were found equal when the message was matched; the destination is valid until its ticket is
    // told, which is after this.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), posted.into.address, bytes.len()) };
}

fn left(peer: u32) -> Failure {
    let what = "has left: it destroyed its context, or its process ended".into();
    Failure::Peer { peer, status: Status::PeerFailed, what }
}

/// Mixes the few words of a key. Keys come from authenticated peers, so it need not resist floods.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 29;
    }
}
