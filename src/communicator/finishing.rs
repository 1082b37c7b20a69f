//! Operations behind which this rank has something left to do for itself.

use std::task::Poll;

use crate::engine::endpoint::Through;
use crate::engine::group::Group;
use crate::engine::operation::{Completion, Operation};
use crate::error::Result;

/// An operation, and what is done once it has ended well.
pub(super) struct Finishing<O, F> {
    pub(super) operation: O,
    pub(super) finish: F,
}

impl<O: Operation, F: FnMut() + Send> Operation for Finishing<O, F> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let answer = self.operation.advance(group);
        if let Poll::Ready(Ok(_)) = &answer {
            (self.finish)();
        }
        answer
    }

    fn abandon(&mut self, group: &Group) {
        self.operation.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.operation.waits_for(group)
    }

    fn is_at_work(&self) -> bool {
        self.operation.is_at_work()
    }

    fn through(&self) -> Through {
        self.operation.through()
    }
}

/// A result that is copied to further buffers of this rank.
pub(super) struct Copied {
    from: *const u8,
    to: Vec<*mut u8>,
    bytes: usize,
}

// SAFETY: the pointers are the caller's, promised to be usable from the library's threads until the operation ends.
unsafe impl Send for Copied {}

impl Copied {
    /// Of `bytes` bytes at `from`.
    pub(super) fn new(from: *const u8, to: &[*mut u8], bytes: usize) -> Copied {
        Copied { from, to: to.to_vec(), bytes }
    }

    /// `operation`, whose result is copied.
    ///
    /// # Safety
    /// Every buffer holds the bytes until the operation has ended; they are the same or apart.
    pub(super) unsafe fn behind<O: Operation>(self, operation: O) -> impl Operation + use<O> {
        // SAFETY: the caller's promise.
        let finish = move || unsafe { self.make() };
        Finishing { operation, finish }
    }

    /// Copies now.
    ///
    /// # Safety
    /// Every buffer holds the bytes; they are the same or apart.
    unsafe fn make(&self) {
        // SAFETY: the caller's promise.
        unsafe { spread(self.from, &self.to, self.bytes) };
    }
}

/// Copies to every buffer that is not `from` itself.
///
/// # Safety
/// Every buffer holds `bytes` bytes; they are the same or apart.
pub(super) unsafe fn spread(from: *const u8, to: &[*mut u8], bytes: usize) {
    for &to in to {
        if !std::ptr::eq(to, from) && bytes > 0 {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy(from, to, bytes) };
        }
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
    }

    #[test]
    fn an_operation_at_work_is_looked_at_again() {
        assert!(Finishing { operation: AtWork, finish: || {} }.is_at_work());
    }
}
