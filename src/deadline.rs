//! When to give up. Every wait in the library takes one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A moment, or never. "Never" exists only where a caller asked for it by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline: the caller accepts to wait for ever.
    pub const NEVER: Deadline = Deadline(None);

    /// `after` from now; a duration too long to be a moment is never.
    pub fn after(after: Duration) -> Deadline {
        Deadline::since(Instant::now(), after)
    }

    /// `after` from `start`; a duration too long to be a moment is never.
    pub fn since(start: Instant, after: Duration) -> Deadline {
        Deadline(start.checked_add(after))
    }

    /// This moment.
    pub fn at(moment: Instant) -> Deadline {
        Deadline(Some(moment))
    }

    /// The moment, if there is one.
    pub fn moment(self) -> Option<Instant> {
        self.0
    }

    /// Whether the moment has passed.
    pub fn expired(self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// Whether the moment has passed by `now`.
    pub fn expired_by(self, now: Instant) -> bool {
        self.0.is_some_and(|at| now >= at)
    }

    /// What is left; zero when expired, `None` when there is no deadline.
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// What is left, at most `cap`: how long one sleep may be.
    pub fn remaining_capped(self, cap: Duration) -> Duration {
        self.remaining().map_or(cap, |left| left.min(cap))
    }

    /// Whether it is the earlier of the two.
    pub fn precedes(self, other: Deadline) -> bool {
        self.0.is_some_and(|at| other.0.is_none_or(|other| at < other))
    }

    /// So much later.
    pub fn postponed(self, by: Duration) -> Deadline {
        Deadline(self.0.and_then(|moment| moment.checked_add(by)))
    }

    /// The earlier of the two.
    pub fn min(self, other: Deadline) -> Deadline {
        match (self.0, other.0) {
            (Some(a), Some(b)) => Deadline(Some(a.min(b))),
            (a, b) => Deadline(a.or(b)),
        }
    }
}

/// How long something may take for which nothing else is said. It may be said anew at any time.
#[derive(Debug)]
pub struct Timeout(AtomicU64);

impl Timeout {
    /// One of `timeout`.
    pub fn new(timeout: Duration) -> Timeout {
        Timeout(AtomicU64::new(nanoseconds(timeout)))
    }

    /// What was said last.
    pub fn get(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            u64::MAX => Duration::MAX,
            nanoseconds => Duration::from_nanos(nanoseconds),
        }
    }

    /// From now on it is `timeout`.
    pub fn set(&self, timeout: Duration) {
        self.0.store(nanoseconds(timeout), Ordering::Relaxed);
    }
}

/// Centuries are as long as for ever.
fn nanoseconds(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}
