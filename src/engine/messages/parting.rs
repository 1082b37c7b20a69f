//! Groups that are gone from this rank, and members that have let go of theirs.
//!
//! A member that lets go of a group tells the others by a [`FrameKind::Part`] on each lane, behind all that it
//! has sent for it, as its goodbye is behind all that it has sent. Whoever waits for it, or comes to, waits in
//! vain. With the last group of a line (engine/group/line.rs) that it has, it tells of the line, which has a
//! number as groups have. Of a group that has failed the members know; over its line they may yet meet.

#![forbid(unsafe_code)]

use std::collections::{HashSet, VecDeque};
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Messages;
use super::courses::drop_early;
use super::failure::{Failure, left};
use super::peer::PeerState;
use super::transfer::{Early, Receiving, Sending};
use crate::engine::pairs::From;
use crate::engine::wire::{Class, Frame, FrameKind, Key};
use crate::reduce::DataType;
use crate::signature::{Kind, Signature};

/// So many groups and lines, mostly one of each, are remembered that are gone here: those whose last messages
/// may still be under way. And so many that are not, of which members are gone.
const REMEMBERED: usize = 2 * 4096;

/// Groups and lines that are gone from this rank. Nobody asks for what still comes for them.
#[derive(Default)]
pub(super) struct Departed {
    ids: HashSet<u64>,
    /// The same, the oldest first, with the members that are told when their links open.
    order: VecDeque<(u64, Arc<[u32]>)>,
}

impl Departed {
    pub(super) fn contains(&self, group: u64) -> bool {
        self.ids.contains(&group)
    }

    fn add(&mut self, group: u64, members: Arc<[u32]>) {
        if !self.ids.insert(group) {
            return;
        }
        self.order.push_back((group, members));
        if self.order.len() > REMEMBERED
            && let Some((oldest, _)) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }

    /// Those that `peer` is to be told of.
    fn of(&self, peer: u32) -> Vec<u64> {
        let with = self.order.iter().filter(|(_, members)| members.contains(&peer));
        with.map(|(group, _)| *group).collect()
    }
}

/// Members that have let go of groups and lines which are not gone here.
#[derive(Default)]
pub(super) struct Parted {
    /// Sorted by group and member: the lanes on which it has said so, a bit for each. There are few, if any.
    members: Vec<(u64, u32, u64)>,
    /// The groups, the oldest first: one may never be made here.
    order: VecDeque<u64>,
    /// Groups that are being made here, and of which groups or lines.
    children: Vec<(u64, u64)>,
}

impl Parted {
    /// A member says so on a lane. Whether it has not before.
    fn hear(&mut self, group: u64, peer: u32, lane: usize) -> bool {
        if self.of(group).is_empty() {
            self.order.push_back(group);
            if self.order.len() > REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.remove(oldest);
            }
        }
        let at = self.place(group, peer);
        if self.members.get(at).is_none_or(|(of, member, _)| (*of, *member) != (group, peer)) {
            self.members.insert(at, (group, peer, 0));
        }
        let (.., heard) = &mut self.members[at];
        let before = std::mem::replace(heard, *heard | 1 << lane);
        before != *heard
    }

    /// Where a member is, or would be.
    fn place(&self, group: u64, peer: u32) -> usize {
        self.members.partition_point(|(of, member, _)| (*of, *member) < (group, peer))
    }

    /// The places of a group's members.
    fn of(&self, group: u64) -> Range<usize> {
        let start = self.place(group, 0);
        start..start + self.members[start..].partition_point(|(of, ..)| *of == group)
    }

    fn remove(&mut self, group: u64) {
        let members = self.of(group);
        self.members.drain(members);
    }

    /// Whether a member has said so on each of so many lanes.
    fn contains(&self, group: u64, peer: u32, lanes: usize) -> bool {
        let heard = self.members.get(self.place(group, peer));
        heard.is_some_and(|(of, member, heard)| {
            (*of, *member) == (group, peer) && heard.count_ones() as usize == lanes
        })
    }

    /// Whether a member has let go of a group, or makes it no more since it has let go of what that is made
    /// of: it would have done all that it does there before.
    fn lacks(&self, group: u64, peer: u32, lanes: usize) -> bool {
        let mut parents = self.children.iter().filter(|(child, _)| *child == group);
        self.contains(group, peer, lanes) || parents.any(|(_, parent)| self.contains(*parent, peer, lanes))
    }

    /// Whether a group is this one, or is being made of this one or this line.
    fn is_of(&self, group: u64, gone: u64) -> bool {
        group == gone || self.children.contains(&(group, gone))
    }

    fn forget(&mut self, group: u64) {
        if !self.of(group).is_empty() {
            self.remove(group);
            self.order.retain(|other| *other != group);
        }
    }

    /// Members, of all groups.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.members.len()
    }
}

/// The word that this rank has let go of a group or a line.
fn word(group: u64) -> Frame {
    let signature = Signature {
        kind: Kind::Barrier,
        dtype: DataType::U8,
        operator: 0,
        algorithm: 0,
        root: 0,
        count: 0,
        device: false,
    };
    let key = Key { group, tag: 0, sequence: 0, slot: 0, class: Class::Internal };
    Frame { kind: FrameKind::Part, key, signature, total: 0, offset: 0, length: 0, announced: 0 }
}

impl Messages {
    /// A group is gone from this rank, and its `line` if it was the last of that here: what has come for it
    /// and was not asked for, and what is known of its calls, is given up, and what still comes is not kept.
    /// The `members` to be told are told now, or when their links open. Not of the group, nor that a message
    /// which they have announced is not taken, if it has `failed`: they are told of that, which is the better
    /// cause. Transfers under way stay; their owner ends them.
    pub fn forget(&mut self, group: u64, line: Option<u64>, members: Arc<[u32]>, failed: bool) {
        let mut untold = Vec::new();
        for gone in iter::once(group).chain(line) {
            let is_told = failed && gone == group;
            self.departed.add(gone, if is_told { Arc::default() } else { members.clone() });
            self.parted.forget(gone);
            untold.extend((!is_told).then_some(gone));
        }
        self.misses.store(!self.parted.members.is_empty(), Ordering::Relaxed);
        self.calls.forget(group);
        self.pairs.forget(group);
        self.courses.forget(group);
        let mut announced = Vec::new();
        let Messages { receiving, unexpected_bytes, shelf, .. } = self;
        receiving.retain(|(peer, key), entry| match entry {
            Receiving::Early(early) if key.group == group => {
                if let (Early::Request { frame }, false) = (&*early, failed) {
                    announced.push((*peer, *frame));
                }
                drop_early(early, unexpected_bytes, shelf);
                false
            }
            _ => true,
        });
        for (peer, frame) in announced {
            self.decline(peer, frame, 0);
        }
        self.sending.retain(|(_, key), entry| key.group != group || !matches!(entry, Sending::Ready(_)));
        for &peer in members.iter() {
            self.part(peer, &untold);
        }
    }

    /// A group is being made here, in vain once a member lets go of `parent`: a group or a line.
    pub fn begin_child(&mut self, group: u64, parent: u64) {
        self.parted.children.push((group, parent));
    }

    /// It has been made, or has not.
    pub fn end_child(&mut self, group: u64) {
        self.parted.children.retain(|(child, _)| *child != group);
    }

    /// Whether a group is gone from this rank, as far as that is remembered.
    pub fn has_departed(&self, group: u64) -> bool {
        self.departed.contains(group)
    }

    /// Tells a peer, which may wait for this rank, if a group of its is gone here.
    pub fn tell_departed(&mut self, peer: u32, group: u64) {
        if self.departed.contains(group) {
            self.part(peer, &[group]);
        }
    }

    /// The link to a peer has opened: it has not been told of anything yet.
    pub(super) fn tell_all_departed(&mut self, peer: u32) {
        let groups = self.departed.of(peer);
        self.part(peer, &groups);
    }

    /// Tells a peer, if it is linked, that this rank has let go of groups and lines.
    fn part(&mut self, peer: u32, gone: &[u64]) {
        let slot = &mut self.peers[peer as usize];
        if gone.is_empty() || !matches!(slot.state, PeerState::Open) {
            return;
        }
        for lane in &slot.lanes {
            let mut lane = lane.lock();
            gone.iter().for_each(|&gone| lane.push_bare(&word(gone)));
        }
        slot.strews = true;
        self.flush(peer);
    }

    /// A peer has let go of a group or a line: nothing more comes for that on this lane. If on none, whoever
    /// waits for it waits in vain.
    pub(super) fn parts(&mut self, peer: u32, lane: usize, group: u64) {
        // What this rank has let go of concerns nobody here.
        if self.departed.contains(group) {
            return;
        }
        let is_news = self.parted.hear(group, peer, lane);
        self.misses.store(true, Ordering::Relaxed);
        if !is_news || !self.parted.contains(group, peer, self.peers[peer as usize].lanes.len()) {
            return;
        }
        let mut tickets = Vec::new();
        // What is pulled is the sender's no more: it ends by itself.
        let is_pulled =
            |key: &Key| self.pulled.iter().any(|pulled| (pulled.peer, pulled.frame.key) == (peer, *key));
        for ((from, key), entry) in &self.receiving {
            if let Receiving::Posted(posted) | Receiving::Claimed(posted) = entry
                && *from == peer
                && self.parted.is_of(key.group, group)
                && !is_pulled(key)
            {
                tickets.push(posted.ticket);
            }
        }
        for ((to, key), entry) in &self.sending {
            // What it had asked for goes, and is dropped there.
            if let Sending::Posted { ticket, pieces: None, .. } = entry
                && *to == peer
                && self.parted.is_of(key.group, group)
            {
                tickets.push(*ticket);
            }
        }
        tickets.extend(self.pairs.waiting_in_groups().filter_map(|(of, waiting)| {
            let concerns = of == group && waiting.from.accepts(peer);
            (concerns && self.is_in_vain(&waiting.from, group)).then_some(waiting.ticket)
        }));
        for ticket in tickets {
            self.fail(ticket, left(peer));
        }
    }

    /// Why nothing more comes from a peer for a group, if that is so.
    pub(super) fn why_gone_from(&self, peer: u32, group: u64) -> Option<Failure> {
        let slot = &self.peers[peer as usize];
        let has_parted = || self.parted.lacks(group, peer, slot.lanes.len());
        slot.why_gone(peer).or_else(|| has_parted().then(|| left(peer)))
    }

    /// Whether nothing more comes from a peer for a group.
    pub fn gone_from(&self, peer: u32, group: u64) -> bool {
        self.why_gone_from(peer, group).is_some()
    }

    /// Whether nothing more comes for a receive.
    pub(super) fn is_in_vain(&self, from: &From, group: u64) -> bool {
        match from {
            From::Rank(rank) => self.gone_from(*rank, group),
            From::Any(ranks) => ranks.iter().all(|&rank| rank == self.rank || self.gone_from(rank, group)),
        }
    }
}
