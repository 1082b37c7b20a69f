//! Operations that have something else done before the first look at them and behind each.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Poll;

use super::endpoint::Through;
use super::group::Group;
use super::operation::{Completion, Exits, Operation};
use crate::error::Result;

/// An operation, and what is done with the answer of each look at it.
pub struct Observed<O, F> {
    /// What is looked at.
    pub operation: O,
    /// What is done before the first look, when its turn has come.
    pub first: Option<First>,
    /// What is done behind each.
    pub then: F,
}

/// Done once.
pub type First = Box<dyn FnOnce() + Send>;

impl<O: Operation, F: FnMut(&Group, &Poll<Result<Completion>>) + Send> Operation for Observed<O, F> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        if let Some(first) = self.first.take() {
            first();
        }
        let answer = self.operation.advance(group);
        (self.then)(group, &answer);
        answer
    }

    fn abandon(&mut self, group: &Group) {
        self.operation.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.operation.waits_for(group)
    }

    fn prepare(&mut self, group: &Group) {
        self.operation.prepare(group);
    }

    fn has_exchanged(&self) -> bool {
        self.operation.has_exchanged()
    }

    fn is_at_work(&self) -> bool {
        self.operation.is_at_work()
    }

    fn through(&self) -> Through {
        self.operation.through()
    }

    fn has_courier(&self) -> bool {
        self.operation.has_courier()
    }

    fn asks_driver(&self) -> bool {
        self.operation.asks_driver()
    }

    fn standing(&self) -> Option<String> {
        self.operation.standing()
    }

    fn exits(&self) -> Arc<Exits> {
        self.operation.exits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation that has stopped in the middle of its work.
    struct AtWork;

    impl Operation for AtWork {
        fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
            Poll::Pending
        }

        fn abandon(&mut self, _group: &Group) {}

        fn waits_for(&self, _group: &Group) -> Vec<u32> {
            Vec::new()
        }

        fn is_at_work(&self) -> bool {
            true
        }

        fn standing(&self) -> Option<String> {
            Some("in the middle".into())
        }
    }

    #[test]
    fn an_operation_at_work_is_looked_at_again_and_says_where_it_stands() {
        let observed =
            Observed { operation: AtWork, first: None, then: |_: &Group, _: &Poll<Result<Completion>>| {} };
        assert!(observed.is_at_work());
        assert_eq!(observed.standing().as_deref(), Some("in the middle"));
    }
}
