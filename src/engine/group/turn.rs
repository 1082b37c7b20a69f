//! The order of calls: each has a turn among those of its class and tag.

use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Group;
use super::inquiry::{CATCHING_UP, HEARSAY, INQUIRY};
#[cfg(test)]
use crate::cuda::double::Barred;
use crate::deadline::Deadline;
use crate::engine::endpoint::lock;
use crate::engine::operation::Running;
use crate::engine::recorder::Slot;
use crate::engine::spent::Spent;
use crate::engine::wire::{Class, Key};
use crate::signature::Signature;

/// What a call is made with.
#[derive(Clone, Copy, Debug)]
pub struct Calling {
    /// Which family of numbers.
    pub class: Class,
    /// The caller's tag, or 0.
    pub tag: u64,
    /// What is called.
    pub signature: Signature,
    /// How long it has; `None`: as long as the group's calls have.
    pub timeout: Option<Duration>,
}

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
    /// Names its messages in `group`: their slots begin here. No two pieces share any, however far one rank
    /// is ahead of another.
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

    /// When it gives up if its turn has not come: what runs before it says first why it is late, and has
    /// longer if that is late itself ([`Group::may_yet_tell`]).
    pub fn gives_up_at(&self) -> Deadline {
        self.deadline.postponed(HEARSAY + Duration::from_millis(100))
    }

    /// When a call that is under way since `began` compares itself with those of the ranks that it waits for.
    /// Sends and receives have nothing to compare before they meet.
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

/// A call that has waited this long tells those that it waits for what it is: ranks that only wait for each
/// other exchange nothing else that could be compared.
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

/// The numbers of the next calls without a tag, modulo 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Numbers {
    ordered: u32,
    points: u32,
    internal: u32,
    captured: u32,
}

impl Numbers {
    /// Whether a collective is none of the calls before these: who makes no more will never make it.
    pub(in crate::engine) fn lack(self, call: Key) -> bool {
        let next = match call.class {
            Class::Ordered => self.ordered,
            Class::Internal => self.internal,
            Class::Tagged | Class::PointToPoint | Class::Captured => return false,
        };
        call.sequence.wrapping_sub(next) < 1 << 31
    }
}

/// Where the orders of a group are.
#[derive(Default)]
pub(super) struct Book(Mutex<Orders>);

impl Book {
    /// The orders. Whoever has them asks the driver for nothing: it may wait for streams, these for calls,
    /// and calls for the orders, to give the next one its turn.
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked::of(lock(&self.0))
    }

    /// The same, if no thread has them.
    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        self.0.try_lock().ok().map(Locked::of)
    }
}

/// The orders of a group, which one thread has.
pub(super) struct Locked<'a> {
    orders: MutexGuard<'a, Orders>,
    #[cfg(test)]
    _barred: Barred,
}

impl Locked<'_> {
    fn of(orders: MutexGuard<'_, Orders>) -> Locked<'_> {
        Locked {
            orders,
            #[cfg(test)]
            _barred: Barred::new(),
        }
    }
}

impl Deref for Locked<'_> {
    type Target = Orders;

    fn deref(&self) -> &Orders {
        &self.orders
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Orders {
        &mut self.orders
    }
}

/// Those of one class and tag: one runs at a time.
#[derive(Default)]
pub(super) struct Order {
    /// The number of the next one, modulo 2^32.
    next: u32,
    /// When the call gives up that has its turn, if one has.
    due: Option<Deadline>,
    /// Since when it is known to those behind it that it is late.
    late: Option<Instant>,
    /// Those that wait for their turn.
    pub(super) queue: VecDeque<Arc<Running>>,
}

/// How long a late call may take to say why, from the moment on that somebody looks: it asks the others
/// behind its own deadline, and only when it is looked at.
const TELLING: Duration = INQUIRY.saturating_add(CATCHING_UP).saturating_add(HEARSAY);

/// So many calls are an era. Messages are told when one begins: they compare numbers with that of a call that
/// they heard of, which goes wrong from 2^31 calls behind it on.
const ERA: u32 = 1 << 30;

impl Order {
    /// The number of the next one.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// A call that is due then has its turn if no other has. Whether it does.
    pub(super) fn enter(&mut self, due: Deadline) -> bool {
        let free = self.due.is_none();
        if free {
            (self.due, self.late) = (Some(due), None);
        }
        free
    }

    /// See [`Group::may_yet_tell`].
    fn may_yet_tell(&mut self, now: Instant) -> bool {
        self.due.is_some_and(|due| due.expired_by(now))
            && now.saturating_duration_since(*self.late.get_or_insert(now)) < TELLING
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
        (order.due, order.late) = (next.as_ref().map(|next| next.due()), None);
        if let (Class::Tagged, None) = (class, &next) {
            let had = order.next;
            self.tagged.remove(&tag);
            self.spent.put(tag, had);
        }
        next
    }

    /// See [`Group::may_yet_tell`]. Keeps nothing of a tag that has no calls any more.
    pub(super) fn may_yet_tell(&mut self, class: Class, tag: u64, now: Instant) -> bool {
        match class {
            Class::Tagged => self.tagged.get_mut(&tag).is_some_and(|order| order.may_yet_tell(now)),
            _ => self.of(class, tag).may_yet_tell(now),
        }
    }

    /// Whether there has been any call but the engine's own.
    pub(super) fn have_begun(&self) -> bool {
        let numbered = [&self.ordered, &self.points, &self.captured];
        numbered.iter().any(|order| order.next > 0) || self.have_tags()
    }

    /// The numbers of the calls to come.
    pub(super) fn numbers(&self) -> Numbers {
        let Orders { ordered, points, internal, captured, .. } = self;
        let [ordered, points, internal, captured] =
            [ordered, points, internal, captured].map(|order| order.next);
        Numbers { ordered, points, internal, captured }
    }

    /// Whether any call but a send or a receive has its turn.
    pub(super) fn have_turns(&self) -> bool {
        self.ordered.due.is_some() || self.internal.due.is_some() || !self.tagged.is_empty()
    }

    /// Whether there has been any call with a tag.
    pub(super) fn have_tags(&self) -> bool {
        !self.tagged.is_empty() || !self.spent.is_empty()
    }

    /// Tags of which something is kept, neighbours as one.
    #[cfg(test)]
    pub(in crate::engine) fn entries(&self) -> usize {
        self.tagged.len() + self.spent.runs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lack_the_collectives_to_come() {
        let mut orders = Orders::default();
        orders.of(Class::Ordered, 0).next = 2;
        orders.of(Class::Internal, 0).next = u32::MAX;
        orders.of(Class::PointToPoint, 0).next = 1;
        let numbers = orders.numbers();
        let lacks = |class, sequence| numbers.lack(Key { group: 1, tag: 0, sequence, slot: 0, class });
        assert_eq!(
            [u32::MAX, 0, 1, 2, 3].map(|at| lacks(Class::Ordered, at)),
            [false, false, false, true, true]
        );
        assert_eq!([u32::MAX - 1, u32::MAX, 0].map(|at| lacks(Class::Internal, at)), [false, true, true]);
        assert!(!lacks(Class::PointToPoint, 5), "they are numbered in another way");
    }

    #[test]
    fn a_call_waits_for_a_late_one_to_say_why_and_not_for_ever() {
        let (mut order, now) = (Order::default(), Instant::now());
        assert!(order.enter(Deadline::at(now)));
        assert!(!order.enter(Deadline::NEVER), "it has its turn");
        let before = now - Duration::from_millis(1);
        assert!(!order.may_yet_tell(before), "it is not late");
        // However late it is seen to be.
        let seen = now + Duration::from_secs(100);
        assert!(order.may_yet_tell(seen));
        assert!(order.may_yet_tell(seen + TELLING / 2));
        assert!(!order.may_yet_tell(seen + TELLING), "nobody looks at it");
    }
}
