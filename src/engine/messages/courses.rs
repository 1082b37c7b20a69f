//! Messages of several pieces that are under way, and what has come for them before anybody asked.
//!
//! The pieces behind the first, and the word that a side has given up, are named by their message's number
//! (see [`point`](crate::engine::point)). They may come before this side asks for them, and are kept then;
//! but only while their message is under way here. Of one that this side has given up, or has had whole,
//! nobody will ask for anything any more.

use std::collections::HashSet;

use super::transfer::{Early, Receiving};
use super::{Messages, kept};
use crate::engine::shelf::Shelf;
use crate::engine::wire::{Class, Key};
use crate::signature::Signature;

/// The slot of the word that the sender has given up,
pub const SENDER_GAVE_UP: u32 = u32::MAX;
/// and of the word that the receiver has: no message has so many pieces.
pub const RECEIVER_GAVE_UP: u32 = u32::MAX - 1;

/// The messages of several pieces that are under way on this side.
#[derive(Default)]
pub(super) struct Courses(HashSet<Course>);

/// Names one: by its peer and group, and its number among those that the sender has sent there.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Course {
    peer: u32,
    group: u64,
    sequence: u32,
    /// Whether this side sends it: the two directions have numbers of their own.
    sends: bool,
}

impl Course {
    fn of(peer: u32, key: &Key, sends: bool) -> Course {
        Course { peer, group: key.group, sequence: key.sequence, sends }
    }

    /// Whether this is of it, and of the pieces behind the first, or the other side's word.
    fn has(&self, peer: u32, key: &Key) -> bool {
        is_behind_first(key) && Course::of(peer, key, is_to_sender(key)) == *self
    }
}

/// Whether a key names a piece behind the first of a message, or a word about it.
fn is_behind_first(key: &Key) -> bool {
    key.class == Class::PointToPoint && key.slot != 0
}

/// Whether it comes to the side that sends the message.
fn is_to_sender(key: &Key) -> bool {
    key.slot == u64::from(RECEIVER_GAVE_UP)
}

impl Courses {
    /// The first piece of a message has its number: it has `bytes` bytes. Nothing, if they are all of it.
    pub(super) fn begin(&mut self, peer: u32, key: &Key, signature: &Signature, bytes: usize, sends: bool) {
        let all = signature.count.saturating_mul(signature.dtype.size() as u64);
        if key.class == Class::PointToPoint && key.slot == 0 && all > bytes as u64 {
            self.0.insert(Course::of(peer, key, sends));
        }
    }

    /// The message that a receive was to get is withdrawn: it takes another.
    pub(super) fn leave(&mut self, peer: u32, key: &Key) {
        self.0.remove(&Course::of(peer, key, false));
    }

    pub(super) fn forget(&mut self, group: u64) {
        self.0.retain(|course| course.group != group);
    }

    /// How many.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.0.len()
    }
}

impl Messages {
    /// A message of several pieces is over on this side; `key` is its first piece's. If it has not been had
    /// `whole`, pieces may have come that nobody will ask for.
    pub fn end_course(&mut self, peer: u32, key: Key, sends: bool, whole: bool) {
        let course = Course::of(peer, &key, sends);
        self.courses.0.remove(&course);
        // The other side's word may have come after the last look at it.
        let word = if sends { RECEIVER_GAVE_UP } else { SENDER_GAVE_UP };
        let word = Key { slot: u64::from(word), ..key };
        let Messages { receiving, unexpected_bytes, shelf, .. } = self;
        if let Some(Receiving::Early(early)) = receiving.get_mut(&(peer, word)) {
            drop_early(early, unexpected_bytes, shelf);
            receiving.remove(&(peer, word));
        }
        if whole {
            return;
        }
        receiving.retain(|(from, key), entry| match entry {
            Receiving::Early(early) if course.has(*from, key) => {
                drop_early(early, unexpected_bytes, shelf);
                false
            }
            _ => true,
        });
    }

    /// Whether what is named so is of a message of several pieces that is not, or no more, under way here.
    /// The sender of one that was given up here is told of that, and waits for no other answer.
    pub(super) fn is_of_no_course(&self, peer: u32, key: &Key) -> bool {
        is_behind_first(key)
            && !self.courses.0.contains(&Course::of(peer, key, is_to_sender(key)))
            // Of one that nobody has asked for yet, the first piece is here.
            && (is_to_sender(key) || !self.receiving.contains_key(&(peer, Key { slot: 0, ..*key })))
    }
}

/// What came unasked is not kept any more.
pub(super) fn drop_early(early: &mut Early, unexpected_bytes: &mut usize, shelf: &mut Shelf) {
    match early {
        // What is still coming in is counted until it is complete, and dropped then.
        Early::Begun(..) | Early::Request { .. } => {}
        Early::Eager(_, shelved) => {
            *unexpected_bytes -= kept(shelved.bytes().len());
            shelf.give_back(std::mem::take(shelved));
        }
    }
}
