//! Operations that have something else done before the first look at them and behind each. What is much is
//! done in parts, one a look: so whoever moves the operation is not held up.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Poll;

use super::endpoint::Through;
use super::group::Group;
use super::operation::{Completion, Exits, Operation};
use crate::error::Result;

/// An operation, and what is done with the answer of each look at it.
pub struct Observed<O, F> {
    operation: O,
    first: Option<First>,
    then: F,
    /// How the operation has ended, until `then` is done with that.
    ended: Option<Result<Completion>>,
    /// Whether the last look has stopped in the middle of what is done besides.
    at_work: bool,
}

/// Does a part of something. Whether that was the last.
pub type First = Box<dyn FnMut(&Group) -> bool + Send>;

impl<O, F> Observed<O, F> {
    /// `operation`, with `first` before the first look, when its turn has come, and `then` behind each. That
    /// says whether it is done with the answer; with an end with which it is not, it is called again in the
    /// next look.
    pub fn new(operation: O, first: Option<First>, then: F) -> Observed<O, F> {
        Observed { operation, first, then, ended: None, at_work: false }
    }
}

impl<O: Operation, F: FnMut(&Group, &Poll<Result<Completion>>) -> bool + Send> Operation for Observed<O, F> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.at_work = self.first.as_mut().is_some_and(|first| !first(group));
        if self.at_work {
            return Poll::Pending;
        }
        self.first = None;
        let answer = self.ended.take().map_or_else(|| self.operation.advance(group), Poll::Ready);
        match ((self.then)(group, &answer), answer) {
            (false, Poll::Ready(ended)) => {
                (self.ended, self.at_work) = (Some(ended), true);
                Poll::Pending
            }
            (_, answer) => answer,
        }
    }

    fn abandon(&mut self, group: &Group) {
        if self.ended.is_none() {
            self.operation.abandon(group);
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        if self.at_work { Vec::new() } else { self.operation.waits_for(group) }
    }

    fn prepare(&mut self, group: &Group) {
        self.operation.prepare(group);
    }

    fn has_exchanged(&self) -> bool {
        self.operation.has_exchanged()
    }

    fn is_at_work(&self) -> bool {
        self.at_work || self.operation.is_at_work()
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
        match self.at_work {
            true => Some("buffers of this rank are still being combined or copied".into()),
            false => self.operation.standing(),
        }
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
        let observed = Observed::new(AtWork, None, |_: &Group, _: &Poll<Result<Completion>>| true);
        assert!(observed.is_at_work());
        assert_eq!(observed.standing().as_deref(), Some("in the middle"));
    }
}
