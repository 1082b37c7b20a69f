//! Keyed transfers between this rank and every other: posted, matched, moved.
//!
//! Three ways a message travels, chosen alike on both sides from its length and the kind of link:
//! - *eager*, up to [`EAGER_SHM_BYTES`] or [`EAGER_TCP_BYTES`]: frame and bytes at once; kept on the heap
//!   when nobody has asked yet;
//! - *streamed*, larger, over TCP: the receiver says [`FrameKind::Ready`] as soon as it has the buffer (for a
//!   collective, without being asked), and the bytes come in pieces over all lanes, straight into the buffer;
//! - *pulled*, larger, in shared memory: the sender tells where the bytes are, the receiver copies them out
//!   of the sender's memory and says [`FrameKind::Done`]; where the kernel forbids that, it says ready
//!   instead.
//!
//! A sender that gives up a message which it has announced withdraws it before it lets go of the bytes,
//! unless its receiver has taken it: a word beside the ring says at once which was first.
//! [`FrameKind::Withdraw`] follows, which may have to wait for room.
//!
//! `posting` takes what operations ask for, `lanes` reads and writes the streams, `arrival` matches what
//! comes, `streamed` and `pulled` move what is long; `transfer` is what is kept of each, `peer` what is known
//! of a rank and its link, `calls` compares calls, `courses` knows which messages of several pieces are under
//! way, `failure` ends what will not end well, `parting` knows whose groups are gone.
//!
//! Everything here runs under the endpoint's lock. Addresses are kept until the transfer has ended or its
//! mailbox has been cancelled, never longer.

mod arrival;
mod calls;
mod courses;
mod failure;
mod hash;
mod lanes;
mod parting;
mod peer;
mod posting;
mod pulled;
mod streamed;
mod transfer;
mod wakes;

pub use courses::{RECEIVER_GAVE_UP, SENDER_GAVE_UP};
pub use failure::{Failure, Mismatch, Trouble};
pub use wakes::Wakes;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Instant;

use self::calls::Calls;
use self::courses::Courses;
use self::hash::KeyHasher;
use self::parting::{Departed, Parted};
use self::peer::{Peer, PeerState};
use self::pulled::Pulled;
use self::transfer::{Receive, Receiving, Sending};
use super::endpoint::Sleeper;
use super::hauling::Track;
use super::lane::Frames;
use super::pairs::{From, Pairs};
use super::shelf::Shelf;
use super::wire::{Frame, FrameKind, Key};

/// The longest message that is sent through shared memory before the receiver has asked for it: a longer one
/// is better copied once than twice.
pub const EAGER_SHM_BYTES: usize = 64 * 1024;

/// The same over TCP: what asking costs is lost in the time that a longer one takes.
pub const EAGER_TCP_BYTES: usize = 256 * 1024;

/// Messages that arrive before anybody asked may take this much memory in all; then the streams of peers that
/// nobody waits for are left unread.
const UNEXPECTED_BYTES: usize = 256 * 1024 * 1024;

/// What one of them takes beside its bytes, about: its places in the tables. Most of it, if it is short.
const UNEXPECTED_EACH: usize = 256;

/// What a message of so many bytes counts while it is kept, before anybody has asked for it.
fn kept(len: usize) -> usize {
    len + UNEXPECTED_EACH
}

/// What has come to an operation since it last looked.
#[derive(Default)]
pub struct Mailbox {
    /// Steps whose transfer has ended.
    pub done: Vec<u32>,
    /// The first thing that went wrong.
    pub failed: Option<Failure>,
    /// Of a message of send and receive: the rank of the endpoint on the other side, and the message's
    /// number.
    pub source: Option<(u32, u32)>,
    live: bool,
    /// Who is to be told when something comes: an operation that lies dormant,
    sleeper: Option<u64>,
    /// and a thread that sleeps.
    thread: Option<Arc<Sleeper>>,
}

/// What becomes of what an operation has sent that gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// Nothing had left: it is as if nothing had been sent. Or all had come to its end.
    Nothing,
    /// A peer knows of it, and does not get it.
    Part,
    /// All of it goes, as far as it has not gone, out of copies; or its receiver has it.
    Whole,
}

/// A message: the other rank, as the endpoint counts, and its name.
pub type Transfer = (u32, Key);

/// What is received or has come, by sender and key.
type Receivings = HashMap<Transfer, Receiving, BuildHasherDefault<KeyHasher>>;

/// A receive gives up that waited for a message.
fn await_no_more(peers: &mut [Peer], from: &From) {
    if let From::Rank(peer) = from {
        peers[*peer as usize].expected -= 1;
    }
}

/// All transfers of one endpoint.
pub struct Messages {
    rank: u32,
    peers: Vec<Peer>,
    open: Vec<u32>,
    receiving: Receivings,
    sending: HashMap<(u32, Key), Sending, BuildHasherDefault<KeyHasher>>,
    mailboxes: Vec<Mailbox>,
    free: Vec<u32>,
    calls: Calls,
    departed: Departed,
    parted: Parted,
    courses: Courses,
    pairs: Pairs<Receive>,
    /// Messages that are pulled, and those that have been and do not count yet.
    pulled: Vec<Pulled>,
    unexpected_bytes: usize,
    shelf: Shelf,
    /// [`UNEXPECTED_BYTES`]
    unexpected_limit: usize,
    /// Peers whose lanes are left unread.
    held: Vec<u32>,
    /// When memory is asked for again that there was not. Until then nothing is read from those who sent what
    /// needs it.
    pub asks_again_at: Option<Instant>,
    /// Lanes that the bell should watch for something else than it does.
    restless: Vec<(u32, u32)>,
    /// Peers for whom something is queued that [`Messages::write_out`] has to write.
    unwritten: Vec<u32>,
    /// Peers whose link somebody needs; the endpoint opens them.
    pub wanted: Vec<u32>,
    /// What went wrong; the endpoint acts on it.
    pub troubles: Vec<Trouble>,
    /// Whether loads are left to several threads.
    hauls: bool,
    /// Lanes with loads that nobody has been told of yet; the endpoint has them moved.
    pub loads: Vec<Arc<Track>>,
    /// Whether anything may wait for room to go out.
    pub backlog: Arc<AtomicBool>,
    /// Whether a member may have let go of a group that is here.
    pub misses: Arc<AtomicBool>,
    /// Those to be told that something has come to their mailboxes.
    pub wakes: Arc<Wakes>,
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
            calls: Calls::default(),
            departed: Departed::default(),
            parted: Parted::default(),
            courses: Courses::default(),
            pairs: Pairs::default(),
            pulled: Vec::new(),
            unexpected_bytes: 0,
            shelf: Shelf::default(),
            unexpected_limit: UNEXPECTED_BYTES,
            held: Vec::new(),
            asks_again_at: None,
            restless: Vec::new(),
            unwritten: Vec::new(),
            wanted: Vec::new(),
            troubles: Vec::new(),
            hauls: false,
            loads: Vec::new(),
            backlog: Arc::default(),
            misses: Arc::default(),
            wakes: Arc::default(),
        }
    }

    /// Leaves loads to several threads from here on.
    pub fn leave_loads(&mut self) {
        self.hauls = true;
        for peer in &self.peers {
            peer.lanes.iter().for_each(|lane| lane.lock().leave_loads(&peer.flows));
        }
    }

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
        slot.sleeper = None;
        // Whoever moves the operation closes it: another thread may wait for that.
        slot.wake_thread();
        self.free.push(mailbox);
    }

    /// Ends the mailbox of an operation that gives up: no transfer of it touches its memory after this. What
    /// becomes of what it has sent and has not come to its end.
    pub fn cancel(&mut self, mailbox: u32) -> Remains {
        let receives = |(key, entry): (&Transfer, &Receiving)| entry.is_of(mailbox).then_some(*key);
        let received: Vec<Transfer> = self.receiving.iter().filter_map(receives).collect();
        let sends = |(key, entry): (&Transfer, &Sending)| entry.is_of(mailbox).then_some(*key);
        let sent: Vec<Transfer> = self.sending.iter().filter_map(sends).collect();
        let peers = 0..self.peers.len() as u32;
        self.pairs.cancel(mailbox, |from| await_no_more(&mut self.peers, from));
        self.give_up(mailbox, &received, &sent, (peers, Frames::Any))
    }

    /// As [`Messages::cancel`], of an operation that has one message, with this channel: `transfer` if it has
    /// found its other side. Takes no longer for others that are under way.
    pub fn cancel_one(&mut self, mailbox: u32, channel: (u64, u64), transfer: Option<Transfer>) -> Remains {
        let Some(transfer) = transfer else {
            self.pairs.cancel_in(channel, mailbox, |from| await_no_more(&mut self.peers, from));
            return self.give_up(mailbox, &[], &[], (0..0, Frames::One));
        };
        let peers = transfer.0..transfer.0 + 1;
        let is_received = self.receiving.get(&transfer).is_some_and(|entry| entry.is_of(mailbox));
        match self.sending.get(&transfer).filter(|entry| entry.is_of(mailbox)) {
            _ if is_received => self.give_up(mailbox, &[transfer], &[], (0..0, Frames::One)),
            Some(Sending::Posted { pieces: Some(_), .. }) => {
                self.give_up(mailbox, &[], &[transfer], (peers, Frames::Any))
            }
            // It is announced, and no frame of its own is under way.
            Some(_) => self.give_up(mailbox, &[], &[transfer], (0..0, Frames::One)),
            None => self.give_up(mailbox, &[], &[], (peers, Frames::One)),
        }
    }

    /// What is received and sent for a mailbox, and its frames to `peers`.
    fn give_up(
        &mut self,
        mailbox: u32,
        received: &[Transfer],
        sent: &[Transfer],
        (peers, frames): (Range<u32>, Frames),
    ) -> Remains {
        for transfer in received {
            if let Some(Receiving::Posted(posted) | Receiving::Claimed(posted)) =
                self.receiving.remove(transfer)
            {
                let (peer, key) = transfer;
                let peer = &mut self.peers[*peer as usize];
                peer.received(posted.into.len);
                // No hauler begins with a piece of it when the lanes are looked at.
                drop(posted);
                for lane in &peer.lanes {
                    lane.lock().discard(|frame| frame.key == *key);
                }
            }
        }
        let unpulled = pulled::leave(&mut self.pulled, &self.receiving);
        // Whether a peer may know of anything, and whether anything does not go.
        let (mut known, mut lacks, mut torn) = (false, false, Vec::new());
        for index in peers {
            let peer = &mut self.peers[index as usize];
            let before = peer.waiting.len();
            peer.waiting.retain(|(_, _, ticket)| ticket.is_none_or(|ticket| ticket.mailbox != mailbox));
            lacks |= peer.waiting.len() < before;
            // Before the lanes: what has been taken is there.
            torn.extend(peer.flows.outlet.cancel(mailbox).into_iter().map(|key| (index, key)));
            for lane in &peer.lanes {
                known |= lane.lock().cancel(mailbox, frames, |piece| match piece {
                    Some(key) => torn.push((index, key)),
                    None => lacks = true,
                });
            }
        }
        for &(peer, key) in sent {
            let Some(Sending::Posted { from, signature, pieces, announced, .. }) =
                self.sending.remove(&(peer, key))
            else {
                continue;
            };
            self.peers[peer as usize].expected -= 1;
            // All pieces that are left have begun to go.
            if pieces.is_some() && !torn.contains(&(peer, key)) {
                known = true;
                continue;
            }
            let (total, offset) = (from.len as u64, from.address as u64);
            let kind = FrameKind::Request;
            let remains =
                self.withdraw(peer, &Frame { kind, key, signature, total, offset, length: 0, announced });
            known |= remains != Remains::Nothing;
            lacks |= remains != Remains::Whole;
        }
        // The caller may change its bytes from here on: whoever sees the change finds the withdrawal.
        fence(Ordering::SeqCst);
        for peer in unpulled {
            self.count_pulled(peer);
        }
        self.close_mailbox(mailbox);
        match (known, lacks) {
            (false, _) => Remains::Nothing,
            (true, true) => Remains::Part,
            (true, false) => Remains::Whole,
        }
    }

    /// Takes the announcement of a message back; if it has left, its withdrawal follows it. Unless the
    /// receiver has taken the message: it has said so, but that may have to wait for room, or to be read.
    fn withdraw(&mut self, peer: u32, announcement: &Frame) -> Remains {
        let slot = &self.peers[peer as usize];
        let Some(mut lane) = slot.lanes.first().map(|lane| lane.lock()) else { return Remains::Nothing };
        if !lane.stream().withdraw(announcement.announced) {
            return Remains::Whole;
        }
        // It would else go out some day, and its withdrawal behind it: a peer that does not read would have
        // them heap up here.
        if !matches!(slot.state, PeerState::Open) || lane.take_back(announcement) {
            return Remains::Nothing;
        }
        lane.push_bare(&Frame { kind: FrameKind::Withdraw, offset: 0, ..*announcement });
        drop(lane);
        self.flush(peer);
        Remains::Part
    }

    /// What has been announced under this number is sent otherwise now, or not at all.
    fn stands_no_longer(&self, peer: u32, announced: u32) {
        if announced != 0
            && let Some(lane) = self.peers[peer as usize].lanes.first()
        {
            lane.lock().stream().withdraw(announced);
        }
    }

    /// Lowers the limit of what may arrive before anybody asked.
    #[cfg(test)]
    pub fn limit_unexpected(&mut self, bytes: usize) {
        self.unexpected_limit = bytes;
    }

    /// What messages take that have arrived before anybody asked.
    #[cfg(test)]
    pub fn unexpected_bytes(&self) -> usize {
        self.unexpected_bytes
    }

    /// What one of so many bytes takes.
    #[cfg(test)]
    pub fn kept(len: usize) -> usize {
        kept(len)
    }

    /// What a member could send that is none of ours.
    #[cfg(test)]
    pub fn forge(&mut self, peer: u32, lane: usize, frame: &Frame, from: super::lane::Source) {
        let ticket = super::lane::Ticket { mailbox: self.mailbox(), step: 0 };
        let Some(lane) = self.peers[peer as usize].lanes.get(lane) else { return };
        let mut lane = lane.lock();
        let announced = if frame.kind == FrameKind::Request { lane.announce() } else { 0 };
        let piece = super::lane::Piece { key: frame.key, left: Arc::new(1.into()) };
        lane.push_piece((Frame { announced, ..*frame }, from, ticket, piece));
        drop(lane);
        self.peers[peer as usize].strews = true;
        self.flush(peer);
    }

    /// The lanes to a peer.
    #[cfg(test)]
    pub fn lanes(&self, peer: u32) -> Vec<Arc<super::hauling::Track>> {
        self.peers[peer as usize].lanes.clone()
    }

    /// Reads one frame and handles it, and nothing behind it: the next look at the lane is somebody else's.
    #[cfg(test)]
    pub fn read_frame(&mut self, peer: u32, lane: usize) -> bool {
        let event = self.peers[peer as usize].lanes[lane].lock().read();
        let Ok(super::lane::Event::Frame(frame)) = event else { return false };
        self.arrive(peer, lane, frame).is_ok()
    }

    /// What may come from a peer over several lanes.
    #[cfg(test)]
    pub fn intake(&self, peer: u32) -> Arc<super::lane::Intake> {
        self.peers[peer as usize].flows.intake.clone()
    }

    /// Entries of all tables, and mailboxes of operations.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        let calls = self.calls.entries() + self.pairs.entries() + self.courses.entries();
        calls
            + self.parted.entries()
            + self.operations()
            + self.receiving.len()
            + self.sending.len()
            + self.pulled.len()
    }

    /// Operations that messages are under way for.
    pub fn operations(&self) -> usize {
        self.mailboxes.len() - self.free.len()
    }

    /// Whether any lane to a peer has come to its end.
    #[cfg(test)]
    pub fn has_ended(&self, peer: u32) -> bool {
        self.peers[peer as usize].lanes.iter().any(|lane| lane.lock().closed())
    }

    /// Frames that wait to be written to a peer.
    #[cfg(test)]
    pub fn backlog(&self, peer: u32) -> usize {
        self.peers[peer as usize].lanes.iter().map(|lane| lane.lock().backlog()).sum()
    }
}
