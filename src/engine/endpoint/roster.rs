//! Which groups this rank is in, and how groups and peers have failed: what a group that is made later has to
//! know.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use crate::engine::group::{Group, Numbers};
use crate::engine::wire::Key;
use crate::error::Error;

/// How many failures of groups that are not here are kept.
const REMEMBERED: usize = 256;

/// The groups of an endpoint.
#[derive(Default)]
pub(super) struct Roster {
    live: HashMap<u64, Weak<Group>>,
    /// Failures of groups that this rank has not made yet, or has no more. The oldest give way.
    early: VecDeque<(u64, Error)>,
    /// Failed groups that are gone here. The oldest give way.
    ended: VecDeque<u64>,
    /// Groups that this rank has left, what it has called in them, and why. The oldest give way.
    left: VecDeque<(u64, Numbers, Error)>,
    /// Peers that are dead: groups made later must not wait for them.
    lost: HashMap<u32, Error>,
}

/// A group that is found here must not be dropped while the roster is locked: its end takes this lock.
impl Roster {
    /// Takes in a group. A failure that came before it is its failure: that is returned.
    pub(super) fn enrol(&mut self, group: &Arc<Group>) -> Option<Error> {
        self.live.insert(group.id(), Arc::downgrade(group));
        let early = self.early.iter().position(|(id, _)| *id == group.id());
        let early = early.and_then(|index| self.early.remove(index)).map(|(_, error)| error);
        early.or_else(|| group.members().iter().find_map(|peer| self.lost.get(peer)).cloned())
    }

    /// How a group has failed that is not here yet.
    pub(super) fn early(&self, id: u64) -> Option<Error> {
        self.early.iter().find(|(early, _)| *early == id).map(|(_, error)| error.clone())
    }

    /// Forgets a group, but not at once that it failed.
    pub(super) fn dismiss(&mut self, group: &Group) {
        self.live.remove(&group.id());
        if group.has_told() {
            remember(&mut self.ended, group.id());
        }
    }

    /// This rank has left a group, of which it has made the calls before these.
    pub(super) fn leave(&mut self, id: u64, numbers: Numbers, why: &Error) {
        remember(&mut self.left, (id, numbers, why.clone()));
    }

    /// Why this rank will never make a call, if it has left the group without.
    pub(super) fn why_never(&self, call: Key) -> Option<&Error> {
        let left = self.left.iter().find(|(id, ..)| *id == call.group);
        left.filter(|(_, numbers, _)| numbers.lack(call)).map(|(.., why)| why)
    }

    /// The group with this id.
    pub(super) fn find(&self, id: u64) -> Option<Arc<Group>> {
        self.live.get(&id).and_then(Weak::upgrade)
    }

    /// Whether a failed group of this id is gone here.
    pub(super) fn has_ended(&self, id: u64) -> bool {
        self.ended.contains(&id)
    }

    /// Whether there is any group.
    pub(super) fn has_any(&self) -> bool {
        !self.live.is_empty()
    }

    /// All groups.
    pub(super) fn live(&self) -> Vec<Arc<Group>> {
        self.live.values().filter_map(Weak::upgrade).collect()
    }

    /// The group with this id, which has failed. If it is not here, it hears of that when it is made: whoever
    /// makes it just now comes before this or after it.
    pub(super) fn find_failed(&mut self, id: u64, error: &Error) -> Option<Arc<Group>> {
        let group = self.find(id);
        if group.is_none() && !self.has_ended(id) && self.early.iter().all(|(other, _)| *other != id) {
            remember(&mut self.early, (id, error.clone()));
        }
        group
    }

    /// A peer is dead. What is said first of it holds.
    pub(super) fn lose(&mut self, peer: u32, why: Error) {
        self.lost.entry(peer).or_insert(why);
    }

    /// Why a peer is dead, if any is: the first by rank, so that those who look alike say the same.
    pub(super) fn death(&self) -> Option<Error> {
        self.lost.iter().min_by_key(|(peer, _)| **peer).map(|(_, why)| why.clone())
    }
}

fn remember<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == REMEMBERED {
        list.pop_front();
    }
    list.push_back(item);
}
