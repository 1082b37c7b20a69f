//! Calls in host memory, in which threads of the program wait until they are complete.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use unisono::deadline::Deadline;

/// How many there are.
#[derive(Default)]
pub(super) struct Waits {
    count: Mutex<usize>,
    over: Condvar,
}

impl Waits {
    pub(super) fn begin(&self) -> Wait<'_> {
        *self.lock() += 1;
        Wait(self)
    }

    pub(super) fn are_over(&self) -> bool {
        *self.lock() == 0
    }

    /// Waits until there are none. Whether there are, by the deadline.
    pub(super) fn drain(&self, deadline: Deadline) -> bool {
        let time = deadline.remaining().unwrap_or(Duration::MAX);
        let waited = self.over.wait_timeout_while(self.lock(), time, |count| *count > 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of them, until it is dropped.
pub(crate) struct Wait<'a>(&'a Waits);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut count = self.0.lock();
        *count -= 1;
        if *count == 0 {
            self.0.over.notify_all();
        }
    }
}
