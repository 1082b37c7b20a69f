//! The first failure of a group: kept, told to the other members, and told with the call that it ended.
//!
//! What each does with an error (a collective is everybody's call, a message that of its two ranks):
//!
//! | | makes it the group's | tells the others | adds the call's text | ends the turn |
//! |---|---|---|---|---|
//! | [`Group::latch`] | if it is the first | as its caller does | | |
//! | [`Group::leave`] | if it is the first | only who waits | | |
//! | [`Group::fail`] | if it is the first | as it is | | |
//! | [`Group::fail_here`] | as `fail` | with this rank's number | | |
//! | [`Group::or_fail`], [`Group::or_fail_on`] | if [it is everybody's](super::is_everybodys) | as `fail_here` | | |
//! | [`Group::spread_to_all`] | if it is the first | with this rank and its host | | |
//! | [`Group::spread`] | if the call is everybody's, or the driver refuses | as `spread_to_all` | | |
//! | [`Group::blame`] | as `spread` | as `spread_to_all` | yes | |
//! | [`Group::blame_launched`] | as `spread`, and if the driver has no memory | as `spread_to_all` | yes | |
//! | [`Group::tell_of`] | | | yes | |
//! | [`Group::end_turn_record`] | as `blame` | as `blame` | yes | its record, not the turn |
//! | [`Group::conclude`] | as `blame` | as `blame` | yes | yes |
//! | [`Group::note_exchanged`] | | | | its record, as enqueued |
//!
//! The last three are for calls that have ended well, too. What goes by `fail` is logged, since no call may
//! tell of it.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::{Group, Turn};
use crate::deadline::Deadline;
use crate::engine::callbacks::hold_back;
use crate::engine::device::Way;
use crate::engine::endpoint::{TELLING, lock};
use crate::engine::wire::Class;
use crate::error::{Error, Status};
use crate::transport::service::Announced;

impl Group {
    /// The first failure, if there was one.
    pub fn failure(&self) -> Option<Error> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        self.latched()
    }

    /// The same when the others may not have been told yet.
    pub(in crate::engine) fn latched(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// Whether there was one that the others were told of.
    pub(in crate::engine) fn has_told(&self) -> bool {
        self.failure().is_some() && !self.left.load(Ordering::Acquire)
    }

    /// Keeps a failure if it is the first, and has `tell` tell the other members before anybody here sees it:
    /// who does may end the process, and without a goodbye. So it is waited for a moment until they are told,
    /// but for the service thread, which tells them. Whether it was the first: then whoever has no caller to
    /// tell of it logs it.
    #[must_use = "a failure that no call tells of is to be logged, once"]
    pub(in crate::engine) fn latch(&self, error: &Error, tell: impl FnOnce() -> Announced) -> bool {
        /// Also when telling panics.
        struct Seen<'a>(&'a AtomicBool);
        impl Drop for Seen<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let mut telling = lock(&self.telling);
        let seen = Seen(&self.failed);
        let first = self.failure.set(error.clone()).is_ok();
        if first {
            *telling = tell();
        }
        let told = telling.clone();
        drop(telling);
        told.wait(Deadline::after(TELLING));
        drop(seen);
        self.end_kernels();
        if first {
            self.fail_children(error);
            self.endpoint.awaken_all(self);
            self.endpoint.wake();
        }
        first
    }

    /// Ends this rank's kernels, now that a failure can be seen.
    pub(super) fn end_kernels(&self) {
        // Against `link_devices`: either this sees the exchange, or that sees the failure.
        fence(Ordering::SeqCst);
        if let Some(exchange) = self.devices.get().and_then(Way::exchange) {
            exchange.abort();
        }
    }

    /// Latches a failure and tells the other members. Nothing in a forked child: there the locks may be held
    /// by threads that do not exist, and the members are the parent's.
    pub fn fail(&self, error: Error) {
        if self.endpoint.check_fork().is_err() {
            return;
        }
        if self.latch(&error, || self.endpoint.tell_members(self, &error)) {
            log::warn!("group '{}' failed: {error}", self.name);
        }
    }

    /// Ends the works of a group that has failed: see [`Endpoint::end_all`]. Their callbacks are called by
    /// another thread: the caller may hold what they want.
    pub fn end_all(&self) {
        if self.endpoint.check_fork().is_ok() {
            let _held_back = hold_back();
            self.endpoint.end_all(self);
        }
    }

    /// As [`Group::fail`], of what this rank has come upon: the others are told which rank it is.
    pub fn fail_here(&self, error: &Error) {
        self.fail(error.context(format_args!("rank {} of '{}'", self.rank, self.name)));
    }

    /// Tells a failure with its call, after making it the group's if the call was everybody's.
    pub fn blame(&self, turn: &Turn, cause: Error) -> Error {
        self.spread(turn, &cause);
        self.tell_of(turn, cause)
    }

    /// As [`Group::blame`], where a stream may have been given some of the call: that the driver has no
    /// memory for the rest is everybody's then, also if the call is a message. Its kernels may wait for other
    /// ranks, and have the caller's memory until they end, which only a failure of the group has them do.
    pub fn blame_launched(&self, turn: &Turn, cause: Error) -> Error {
        match cause.status() {
            Status::OutOfMemory => self.spread_to_all(turn, &cause),
            _ => self.spread(turn, &cause),
        }
        self.tell_of(turn, cause)
    }

    /// A failure with its call.
    fn tell_of(&self, turn: &Turn, cause: Error) -> Error {
        let cause = match turn.class {
            // What a message failed with is its own; that its peer is gone may come of what the group has
            // failed with.
            Class::PointToPoint if cause.status() != Status::PeerFailed => cause,
            _ => self.failure().unwrap_or(cause),
        };
        cause.context(self.describe(turn))
    }

    /// Makes what a call failed with the group's failure, if the call was everybody's, and tells the others.
    /// What an operation runs in is let go of after that: copies under way may take a while. What the driver
    /// refuses is everybody's even if the call is a message: the device that it is about serves the group's
    /// other calls, too.
    pub fn spread(&self, turn: &Turn, cause: &Error) {
        if turn.class != Class::PointToPoint || cause.status() == Status::Cuda {
            self.spread_to_all(turn, cause);
        }
    }

    fn spread_to_all(&self, turn: &Turn, cause: &Error) {
        // Whether or not it was the first, the call tells of it.
        let _ = self.latch(cause, || {
            let here = self.endpoint.hostname(self.endpoint.rank());
            // What a late call waits for says nothing of the call itself, which may be what others wait for.
            let call = match cause.status() {
                Status::Timeout => format!(" of its {}", turn.signature),
                _ => String::new(),
            };
            let told = cause.context(format!("rank {} on {here} reports{call}", self.rank));
            self.endpoint.tell_members(self, &told)
        });
    }
}
