//! The order of calls: each has a turn among those of its class and tag.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Group;
use super::inquiry::HEARSAY;
use crate::deadline::Deadline;
use crate::engine::operation::Running;
use crate::engine::recorder::Slot;
use crate::engine::spent::Spent;
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

impl Turn {
    /// Names its messages in `group`: their slots begin here. No two pieces share any, however far one rank is ahead of another.
    pub fn key(&self, group: &Group) -> Key {
        let slot = u64::from(self.piece) << 32;
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

    /// The call so many numbers before, made with it: to compare what is called.
    pub fn before(self, calls: u32, signature: Signature) -> Turn {
        Turn { sequence: self.sequence.wrapping_sub(calls), signature, ..self }
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
    /// Sends and receives, whatever their tags: these order them in another way.
    points: Order,
    internal: Order,
    captured: Order,
    /// Of tags that have calls now,
    tagged: HashMap<u64, Order>,
    /// and of the others.
    spent: Spent,
}

/// Those of one class and tag: one runs at a time.
#[derive(Default)]
pub(super) struct Order {
    /// The number of the next one, modulo 2^32.
    next: u32,
    pub(super) busy: bool,
    /// Those that wait for their turn.
    pub(super) queue: VecDeque<Arc<Running>>,
}

/// So many calls are an era. Messages are told when one begins: they compare numbers with that of a call that they heard of, which
/// goes wrong from 2^31 calls behind it on.
const ERA: u32 = 1 << 30;

impl Order {
    /// The number of the next one.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Takes the numbers of so many, fewer than an era has. The first, and whether an era begins behind them.
    pub(super) fn take(&mut self, count: u32) -> (u32, bool) {
        let first = self.next;
        self.next = first.wrapping_add(count);
        (first, first / ERA != self.next / ERA)
    }

    /// As if there had been so many.
    #[cfg(test)]
    pub(in crate::engine) fn pretend(&mut self, count: u32) {
        self.next = count;
    }
}

impl Orders {
    pub(super) fn of(&mut self, class: Class, tag: u64) -> &mut Order {
        match class {
            Class::Ordered => &mut self.ordered,
            Class::PointToPoint => &mut self.points,
            Class::Internal => &mut self.internal,
            Class::Captured => &mut self.captured,
            Class::Tagged => self
                .tagged
                .entry(tag)
                .or_insert_with(|| Order { next: self.spent.take(tag), ..Order::default() }),
        }
    }

    /// A call has ended. The one that has its turn now, if one waits.
    pub(super) fn end(&mut self, class: Class, tag: u64) -> Option<Arc<Running>> {
        let order = self.of(class, tag);
        let next = order.queue.pop_front();
        order.busy = next.is_some();
        if let (Class::Tagged, None) = (class, &next) {
            let had = order.next;
            self.tagged.remove(&tag);
            self.spent.put(tag, had);
        }
        next
    }

    /// Tags of which something is kept, neighbours as one.
    #[cfg(test)]
    pub(in crate::engine) fn entries(&self) -> usize {
        self.tagged.len() + self.spent.runs()
    }
}
