//! Which calls this rank is in: messages of others are compared with them.

use std::collections::{HashSet, VecDeque};

use super::Messages;
use super::failure::{Mismatch, Trouble};
use super::transfer::{Early, Receiving, Sending};
use crate::engine::wire::{Class, Frame};
use crate::signature::Signature;

pub(super) struct Current {
    pub(super) sequence: u32,
    pub(super) signature: Signature,
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

    /// Drops entries whose message has been taken.
    pub(super) fn prune_arrived(&mut self) {
        let receiving = &self.receiving;
        self.arrived.retain(|key| matches!(receiving.get(key), Some(Receiving::Early(_))));
    }
}
