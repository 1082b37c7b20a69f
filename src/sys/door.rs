//! Listeners through which the kernel lets nobody, as when the process has no descriptors left.

#![forbid(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use super::child::{self, Readiness};
use crate::deadline::Deadline;

/// How long somebody waits in vain before it counts: descriptors may be short for a moment.
pub const LONG: Duration = Duration::from_secs(1);

/// Whether one listener, or several that are served together, are shut.
#[derive(Debug, Default)]
pub struct Door {
    shut: Option<Instant>,
}

impl Door {
    /// The kernel has refused to accept from `listener`: how long somebody has waited there. `None`: nobody
    /// does, and the kernel refuses all the same.
    pub fn refuses(&mut self, listener: BorrowedFd<'_>) -> Option<Duration> {
        let waits = child::poll(&[(listener, Readiness::Read)], Deadline::after(Duration::ZERO));
        if !waits.is_ok_and(|waits| waits[0]) {
            self.shut = None;
            return None;
        }
        Some(self.shut.get_or_insert_with(Instant::now).elapsed())
    }

    /// All who waited have been accepted, or somebody can be now.
    pub fn opens(&mut self) {
        self.shut = None;
    }
}
