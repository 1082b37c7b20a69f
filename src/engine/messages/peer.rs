//! What is known of each other rank, and its link.

use std::sync::Arc;

use super::failure::{Failure, left};
use super::transfer::Receiving;
use super::{EAGER_SHM_BYTES, EAGER_TCP_BYTES, Messages};
use crate::engine::hauling::Track;
use crate::engine::lane::{Flows, Lane, Source, Ticket};
use crate::engine::wire::Frame;
use crate::error::Error;
use crate::transport::memory::PeerMemory;
use crate::transport::{Link, LinkKind};

#[derive(Default)]
pub(super) struct Peer {
    pub(super) state: PeerState,
    pub(super) lanes: Vec<Arc<Track>>,
    /// The messages whose pieces haulers move.
    pub(super) flows: Arc<Flows>,
    pub(super) kind: Option<LinkKind>,
    pub(super) memory: Option<Arc<PeerMemory>>,
    /// Sends that wait for the link.
    pub(super) waiting: Vec<(Frame, Source, Option<Ticket>)>,
    /// Transfers posted with this peer that have not ended.
    pub(super) expected: usize,
    /// It has left, and all that it had said has been read.
    pub(super) drained: bool,
    /// Receives among them whose pieces may come over several lanes.
    pub(super) spread: usize,
    /// Whether pieces that go out may wait on other lanes than the first.
    pub(super) strews: bool,
    /// A message that there was no memory for, and the lane that it comes over: nothing else is read before
    /// it.
    pub(super) short: Option<(usize, Frame)>,
}

#[derive(Default)]
pub(super) enum PeerState {
    #[default]
    Closed,
    Opening,
    Open,
    /// It said goodbye: what it has sent still counts.
    Left,
    Lost(Error),
}

/// Whether the pieces of a message of so many bytes may come over several lanes.
pub(super) fn spreads(len: usize) -> bool {
    len > EAGER_TCP_BYTES
}

impl Peer {
    /// The longest message that is sent to it unasked, when it is linked.
    pub(super) fn eager_bytes(&self) -> usize {
        match self.kind {
            Some(LinkKind::Shm) => EAGER_SHM_BYTES,
            _ => EAGER_TCP_BYTES,
        }
    }

    /// The lanes that anything comes over: nothing but the pieces of large messages, and the end, comes over
    /// others than the first.
    pub(super) fn reads_from(&self) -> &[Arc<Track>] {
        let all = self.spread > 0 || matches!(self.state, PeerState::Left);
        if all { &self.lanes } else { &self.lanes[..self.lanes.len().min(1)] }
    }

    /// Those, or all if anything may wait to go out over others. Mostly it is one of several, and each look
    /// at one takes its lock.
    pub(super) fn in_use(&self) -> &[Arc<Track>] {
        if self.strews { &self.lanes } else { self.reads_from() }
    }

    /// Whether anything waits to go out, or somebody hauls.
    pub(super) fn has_backlog(&self) -> bool {
        let waits = |lane: &Arc<Track>| lane.try_lock().is_none_or(|lane| lane.backlog() > 0);
        !self.flows.outlet.is_empty() || self.in_use().iter().any(waits)
    }

    /// Why nothing more comes from it, which is rank `peer`, if that is so.
    pub(super) fn why_gone(&self, peer: u32) -> Option<Failure> {
        match &self.state {
            PeerState::Lost(why) => Some(Failure::Lost(peer, why.clone())),
            PeerState::Left if self.drained => Some(left(peer)),
            _ => None,
        }
    }

    /// A receive of `len` bytes has been posted.
    pub(super) fn receives(&mut self, len: usize) {
        self.expected += 1;
        self.spread += usize::from(spreads(len));
    }

    /// It has ended.
    pub(super) fn received(&mut self, len: usize) {
        self.expected -= 1;
        self.spread -= usize::from(spreads(len));
    }
}

impl Messages {
    /// A link is there: what waited for it goes out.
    pub fn link_opened(&mut self, peer: u32, link: Link) {
        let slot = &mut self.peers[peer as usize];
        if !matches!(slot.state, PeerState::Closed | PeerState::Opening) {
            return;
        }
        slot.state = PeerState::Open;
        slot.kind = Some(link.kind);
        slot.memory = link.memory;
        let (hauls, flows) = (self.hauls, slot.flows.clone());
        let track = |(index, stream)| {
            let mut lane = Lane::new(stream);
            if hauls {
                lane.leave_loads(&flows);
            }
            Track::new(peer, index, lane, flows.clone())
        };
        slot.lanes = link.streams.into_iter().enumerate().map(track).collect();
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
                .iter_mut()
                .filter_map(|((from, key), entry)| match entry {
                    Receiving::Posted(posted) if *from == peer && posted.announces(key) => {
                        if hauls {
                            posted.open(&flows.intake, *key);
                        }
                        Some(posted.ready(*key))
                    }
                    _ => None,
                })
                .collect();
            for frame in posted {
                self.control(peer, &frame);
            }
        }
        self.tell_all_departed(peer);
        self.flush(peer);
        self.note_watches(peer);
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

    /// The lanes to all peers: this rank leaves.
    pub fn take_lanes(&mut self) -> Vec<Arc<Track>> {
        self.peers.iter_mut().flat_map(|peer| std::mem::take(&mut peer.lanes)).collect()
    }

    /// Whether nothing more comes from the peer.
    pub fn gone(&self, peer: u32) -> bool {
        self.peers[peer as usize].why_gone(peer).is_some()
    }

    /// Whether the peer has said goodbye.
    pub fn has_left(&self, peer: u32) -> bool {
        matches!(self.peers[peer as usize].state, PeerState::Left)
    }

    /// Why there is no link to the peer and will be none, unless it has left.
    pub fn why_lost(&self, peer: u32) -> Option<Error> {
        match &self.peers[peer as usize].state {
            PeerState::Lost(why) => Some(why.clone()),
            _ => None,
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

    pub(super) fn pulls(&self, peer: u32) -> bool {
        self.peers[peer as usize].kind == Some(LinkKind::Shm)
    }

    /// Whether several threads move what goes to this peer and comes from it.
    pub(super) fn hauls_to(&self, peer: u32) -> bool {
        self.hauls && !self.pulls(peer)
    }

    /// Links over TCP.
    pub fn tcp_links(&self) -> usize {
        self.open.iter().filter(|&&peer| !self.polls(peer)).count()
    }

    /// Has the endpoint open the link to `peer`, if nobody has.
    pub fn want(&mut self, peer: u32) {
        if matches!(self.peers[peer as usize].state, PeerState::Closed) {
            self.peers[peer as usize].state = PeerState::Opening;
            self.wanted.push(peer);
        }
    }
}
