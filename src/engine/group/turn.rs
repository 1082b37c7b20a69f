//! The order of calls: each has a turn among those of its class and tag.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Group;
use super::inquiry::HEARSAY;
use crate::deadline::Deadline;
use crate::engine::operation::Running;
use crate::engine::recorder::Slot;
use crate::engine::wire::{Class, Key};
use crate::signature::Signature;

/// One call's place in the order, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Which family of numbers.
    pub class: Class,
    /// The caller's tag, or 0.
    pub tag: u64,
    /// Its number.
    pub sequence: u32,
    /// What is called.
    pub signature: Signature,
    /// When it gives up.
    pub deadline: Deadline,
    /// When it was called.
    pub called: Instant,
    /// Which piece of the call, when it is run in several, one after the other; else 0.
    pub piece: u32,
    pub(super) slot: Slot,
}

/// Pieces are told apart by the upper bits of their messages' slots. A rank is never so many pieces ahead of another
/// that they meet again.
const PIECES: u32 = 1 << 10;

impl Turn {
    /// Names its messages in `group`: their slots begin here.
    pub fn key(&self, group: &Group) -> Key {
        let slot = self.piece % PIECES * (u32::MAX / PIECES + 1);
        Key { group: group.id, tag: self.tag, sequence: self.sequence, slot, class: self.class }
    }

    /// The same call, about to run this piece.
    pub fn at_piece(self, piece: u32) -> Turn {
        Turn { piece, ..self }
    }

    /// The same call, if it has until `deadline`.
    pub fn until(self, deadline: Deadline) -> Turn {
        Turn { deadline, ..self }
    }

    /// When it gives up if its turn has not come: what runs before it says first why it is late.
    pub fn gives_up_at(&self) -> Deadline {
        self.deadline.postponed(HEARSAY + Duration::from_millis(100))
    }

    /// When a call that is under way since `began` compares itself with those of the ranks that it waits for. Sends and
    /// receives have nothing to compare before they meet.
    pub fn compare_at(&self, began: Instant) -> Deadline {
        match self.class {
            Class::PointToPoint => Deadline::NEVER,
            _ => Deadline::since(began, COMPARE_AFTER),
        }
    }

    /// When it does so again: once it has waited for twice as long.
    pub fn compare_again_at(&self) -> Deadline {
        Deadline::after(self.called.elapsed())
    }
}

/// A call that has waited this long tells those that it waits for what it is: ranks that only wait for each other
/// exchange nothing else that could be compared.
const COMPARE_AFTER: Duration = Duration::from_millis(250);

/// The calls of a group, in the order in which they were made.
#[derive(Default)]
pub(super) struct Orders {
    ordered: Order,
    others: HashMap<(Class, u64), Order>,
}

/// Those of one class and tag: one runs at a time.
#[derive(Default)]
pub(super) struct Order {
    /// The number of the next one.
    pub(super) next: u32,
    pub(super) busy: bool,
    /// Those that wait for their turn.
    pub(super) queue: VecDeque<Arc<Running>>,
}

impl Orders {
    pub(super) fn of(&mut self, class: Class, tag: u64) -> &mut Order {
        match class {
            Class::Ordered => &mut self.ordered,
            _ => self.others.entry((class, tag)).or_default(),
        }
    }
}
