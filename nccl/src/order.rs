//! The order in which ranks set up something over one communicator: children, windows. All of them call in
//! one order, and each keeps to it, whichever of its threads do the work: their rounds of messages would be
//! mixed otherwise.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use unisono::deadline::Deadline;

/// Who has yet to have its turn, by number.
#[derive(Default)]
pub(crate) struct Order {
    turns: Mutex<BTreeSet<u64>>,
    changed: Condvar,
}

impl Order {
    /// A turn after those that were taken before.
    pub(crate) fn take(self: &Arc<Self>) -> Turn {
        let mut turns = self.lock();
        let number = turns.last().map_or(0, |last| last + 1);
        turns.insert(number);
        Turn { order: self.clone(), number }
    }

    /// Whether all turns that were taken have ended.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().is_empty()
    }

    /// Waits until all turns that were taken have ended. Whether they have, by the deadline.
    pub(crate) fn drain(&self, deadline: Deadline) -> bool {
        self.wait(deadline, BTreeSet::is_empty)
    }

    fn wait(&self, deadline: Deadline, ready: impl Fn(&BTreeSet<u64>) -> bool) -> bool {
        let time = deadline.remaining().unwrap_or(Duration::MAX);
        let waited = self.changed.wait_timeout_while(self.lock(), time, |turns| !ready(turns));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // Nothing that holds the lock can leave the set half changed.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn in an order, until it is dropped.
pub(crate) struct Turn {
    order: Arc<Order>,
    number: u64,
}

impl Turn {
    /// Whether it has come.
    pub(crate) fn is_next(&self) -> bool {
        self.order.lock().first() == Some(&self.number)
    }

    /// Waits until it has come: those before it have deadlines of their own.
    pub(crate) fn wait(&self) {
        self.order.wait(Deadline::NEVER, |turns| turns.first() == Some(&self.number));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.order.lock().remove(&self.number);
        self.order.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_the_order_in_which_they_were_taken() {
        let order = Arc::new(Order::default());
        let seen = Mutex::new(Vec::new());
        let turns: Vec<(usize, Turn)> = (0..8).map(|index| (index, order.take())).collect();
        std::thread::scope(|scope| {
            // The last ones are there first.
            for (index, turn) in turns.into_iter().rev() {
                let seen = &seen;
                scope.spawn(move || {
                    turn.wait();
                    seen.lock().unwrap().push(index);
                });
            }
        });
        assert_eq!(seen.into_inner().unwrap(), (0..8).collect::<Vec<_>>());
        assert!(order.is_idle());
    }

    #[test]
    fn a_turn_that_is_given_up_lets_nobody_pass_those_before_it() {
        let order = Arc::new(Order::default());
        let (first, second, third) = (order.take(), order.take(), order.take());
        drop(second);
        assert!(first.is_next() && !third.is_next());
        drop(first);
        assert!(third.is_next());
        assert!(!order.drain(Deadline::after(Duration::from_millis(1))));
        drop(third);
        assert!(order.drain(Deadline::NEVER));
    }
}
