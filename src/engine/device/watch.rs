//! Calls that streams were given, looked at until they are done: by whoever asks the driver, or without it.

#![forbid(unsafe_code)]

use std::sync::Mutex;

use super::exchange::{DeviceExchange, Meets};
use super::overdue::Overdue;
use super::retired::Parts;
use crate::cuda::stream::Stream;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::error::Result;

/// The calls of one exchange under observation. Its lock is not held over driver calls.
#[derive(Debug, Default)]
pub(super) struct Watch(Mutex<Observed>);

#[derive(Debug, Default)]
struct Observed {
    /// The last one,
    last: Option<Overdue>,
    /// and one that another event stands for until it is done: a program that makes calls all the time learns
    /// of one that hangs. No other that is not done has an earlier deadline, but the last.
    mark: Option<Overdue>,
    /// How many calls have been the marked one.
    marks: u64,
    /// How often calls have begun and have ended to be made: odd while one is.
    calls: u64,
}

impl Watch {
    /// From here on the call of `turn` is observed, the last of what `stream` was given. For one thread at a
    /// time.
    pub(super) fn observe(&self, parts: &Parts, stream: &Stream, turn: Turn, meets: Meets) -> Result<()> {
        let marks = {
            let mut observed = lock(&self.0);
            observed.calls += 1;
            // What comes before one that is done is done, too.
            observed.mark.as_ref().is_none_or(|mark| turn.deadline.precedes(mark.deadline()))
        };
        // Without the lock, which whoever looks needs, should the driver not answer.
        let recorded = parts.last.record(stream).and_then(|()| match marks {
            true => parts.mark.record(stream),
            false => Ok(()),
        });
        let mut observed = lock(&self.0);
        observed.calls += 1;
        recorded?;
        let overdue = || Overdue::new(turn, meets);
        if marks {
            observed.mark = Some(overdue());
            observed.marks += 1;
        }
        observed.last = Some(overdue());
        Ok(())
    }

    /// Whether all calls were seen to be done, or the group has failed. Asks nobody.
    pub(super) fn is_over(&self) -> bool {
        let observed = lock(&self.0);
        observed.calls.is_multiple_of(2) && observed.last.is_none() && observed.mark.is_none()
    }

    /// Looks after calls that nobody waits for, and asks the driver. Whether there may be some that are not
    /// done.
    pub(super) fn attend(&self, exchange: &DeviceExchange, group: &Group) -> bool {
        let (calls, any, marked) = {
            let observed = lock(&self.0);
            (observed.calls, observed.last.is_some(), observed.mark.as_ref().map(|_| observed.marks))
        };
        if !calls.is_multiple_of(2) {
            return true;
        }
        if !any {
            return false;
        }
        // Without the lock: it may take long.
        let parts = exchange.parts();
        let (done, passed) = (parts.last.query(), marked.map(|_| parts.mark.query()));
        let mut observed = lock(&self.0);
        // Whatever else has been called, the event stands for the call that it was recorded for, unless it is
        // or was recorded anew.
        let passed = passed.filter(|_| observed.calls.is_multiple_of(2) && marked == Some(observed.marks));
        let over = |mark: &mut Overdue| match passed {
            Some(Ok(true)) => true,
            Some(Ok(false)) => mark.look(exchange, group).is_some(),
            Some(Err(_)) | None => false,
        };
        if observed.mark.as_mut().is_some_and(over) {
            observed.mark = None;
        }
        if observed.calls != calls {
            return true;
        }
        match done {
            Ok(true) => {
                (observed.last, observed.mark) = (None, None);
                false
            }
            Ok(false) => {
                if observed.last.as_mut().is_some_and(|overdue| overdue.look(exchange, group).is_some()) {
                    observed.last = None;
                }
                true
            }
            Err(error) => {
                (observed.last, observed.mark) = (None, None);
                // At the end of a process, the driver goes before we do.
                if !error.text().contains("DEINITIALIZED") {
                    group.fail_here(&error);
                }
                false
            }
        }
    }

    /// Looks after them when the driver does not say whether they are done. Makes no driver call.
    pub(super) fn oversee(&self, exchange: &DeviceExchange, group: &Group) {
        let Observed { last, mark, .. } = &mut *lock(&self.0);
        mark.iter_mut().chain(last).for_each(|overdue| overdue.look_blindly(exchange, group));
    }
}
