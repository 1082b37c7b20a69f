//! Operations before or behind which this rank has something to do for itself.

use std::task::Poll;

use crate::engine::group::Group;
use crate::engine::observed::{First, Observed};
use crate::engine::operation::{Completion, Operation};
use crate::error::Result;

/// `operation`, with `first` before it, when its turn has come, and `finish` once it has ended well.
pub(super) fn finishing<O: Operation, F: FnMut() + Send>(
    operation: O,
    first: Option<First>,
    mut finish: F,
) -> impl Operation + use<O, F> {
    let then = move |_: &Group, answer: &Poll<Result<Completion>>| {
        if let Poll::Ready(Ok(_)) = answer {
            finish();
        }
    };
    Observed { operation, first, then }
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
        finishing(operation, None, move || unsafe { self.make() })
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
