//! Which calls this rank is in: messages of others are compared with them.

use std::collections::{HashSet, VecDeque};

use super::Messages;
use super::failure::{Mismatch, Trouble};
use super::transfer::{Early, Receiving, Sending};
use crate::engine::wire::{Class, Frame, Key};
use crate::signature::Signature;

#[derive(Clone, Copy)]
pub(super) struct Current {
    pub(super) sequence: u32,
    pub(super) signature: Signature,
}

impl Current {
    /// Whether a peer's message that nobody has asked for is neither of this call nor of one to come.
    fn compare(&self, peer: u32, key: Key, theirs: Signature) -> Option<Mismatch> {
        let over = (key.sequence.wrapping_sub(self.sequence) as i32) < 0;
        let theirs = theirs.call();
        let differs = key.sequence == self.sequence && theirs != self.signature;
        let ours = differs.then_some(self.signature);
        (over || differs).then_some(Mismatch { peer, key, theirs, ours, bytes: None })
    }
}

/// Groups that are gone from this rank. Nobody asks for what still comes for them.
#[derive(Default)]
pub(super) struct Departed {
    ids: HashSet<u64>,
    /// The same, the oldest first.
    order: VecDeque<u64>,
}

/// So many groups are remembered: those whose last messages may still be under way.
const REMEMBERED: usize = 4096;

impl Departed {
    pub(super) fn contains(&self, group: u64) -> bool {
        self.ids.contains(&group)
    }

    fn add(&mut self, group: u64) {
        if !self.ids.insert(group) {
            return;
        }
        self.order.push_back(group);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }
}

impl Messages {
    /// Says which call is now number `sequence` of (group, class, tag). Messages of another call with that number, or
    /// of numbers that are over, are mismatches from here on, those that have arrived among them. Calls that end before
    /// anybody looks at messages are left out.
    pub fn begin_call(&mut self, group: u64, class: Class, tag: u64, sequence: u32, signature: Signature) {
        let current = Current { sequence, signature };
        self.currents.insert((group, tag, class), current);
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
            same.then(|| current.compare(*peer, *key, theirs)).flatten()
        });
        if let Some(mismatch) = found {
            self.troubles.push(Trouble::Mismatch(mismatch));
        }
    }

    /// A group is gone from this rank: what has come for it and was not asked for, and what is known of its calls, is
    /// given up, and what still comes is not kept. Transfers under way stay; their owner ends them.
    pub fn forget(&mut self, group: u64) {
        self.departed.add(group);
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

    /// A message nobody has asked for: is it of the call that this rank makes, or of one to come?
    pub(super) fn check_call(&mut self, peer: u32, frame: &Frame) {
        let key = frame.key;
        let Some(current) = self.currents.get(&(key.group, key.tag, key.class)) else { return };
        if let Some(mismatch) = current.compare(peer, key, frame.signature) {
            self.troubles.push(Trouble::Mismatch(mismatch));
        }
    }

    /// Drops entries whose message has been taken.
    pub(super) fn prune_arrived(&mut self) {
        let receiving = &self.receiving;
        self.arrived.retain(|key| matches!(receiving.get(key), Some(Receiving::Early(_))));
    }
}
