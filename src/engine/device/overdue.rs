//! A call that a stream was given, looked at from outside until it is done: whether it is late, and who is
//! missing.

use std::time::{Duration, Instant};

use super::exchange::{DeviceExchange, Meets};
use crate::deadline::Deadline;
use crate::engine::direct::HAS_LEFT;
use crate::engine::group::{Group, Inquiry, Turn};
use crate::error::{Error, Status};

/// How long kernels may take to leave after their group has failed, before the caller is told all the same.
pub const GRACE_PERIOD: Duration = Duration::from_millis(500);

/// One call under observation.
#[derive(Debug)]
pub(super) struct Overdue {
    turn: Turn,
    meets: Meets,
    compared: bool,
    inquiry: Option<Inquiry>,
    failed_at: Option<Instant>,
    /// Whether it is this call that the failure of the group tells of.
    told: bool,
}

impl Overdue {
    /// A call that was just made.
    pub(super) fn new(turn: Turn, meets: Meets) -> Overdue {
        Overdue { turn, meets, compared: false, inquiry: None, failed_at: None, told: false }
    }

    /// When it should be done.
    pub(super) fn deadline(&self) -> Deadline {
        self.turn.deadline
    }

    /// Looks at a call that is not done. An error when it will not be done, as soon as its kernels have left
    /// or should have: the group has failed then. Never waits.
    pub(super) fn look(&mut self, exchange: &DeviceExchange, group: &Group) -> Option<Error> {
        if let Some(error) = self.error(exchange, group) {
            let since = *self.failed_at.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE_PERIOD).then_some(error);
        }
        if let Some(inquiry) = &self.inquiry {
            if group.answered(inquiry) {
                let error = self.late(exchange, group, inquiry);
                self.told = true;
                group.fail(error.context(group.describe(&self.turn)));
            }
            return None;
        }
        if self.turn.deadline.expired() {
            let missing = self.missing(exchange);
            self.inquiry = Some(group.ask(&self.turn, missing, None));
        } else if let Some(rank) = exchange.deserter(group, self.meets) {
            let who = group.describe_rank(rank);
            let error = Error::new(Status::PeerFailed, format!("{who} {HAS_LEFT}"));
            self.told = true;
            group.fail(error.context(group.describe(&self.turn)));
        } else if !self.compared && self.turn.compare_at(self.turn.called).expired() {
            self.compared = true;
            group.compare(&self.turn, &self.missing(exchange));
        }
        None
    }

    /// Looks at a call of which nobody knows whether it is done, since the driver does not answer. It is not
    /// done for sure if there are ranks that have not called it, or their end of it.
    pub(super) fn look_blindly(&mut self, exchange: &DeviceExchange, group: &Group) {
        let is_missed = match self.meets {
            Meets::Ends(peers) => exchange.is_alone_with_any(peers),
            Meets::All(collectives) => !exchange.missing(collectives).is_empty(),
        };
        if is_missed {
            self.look(exchange, group);
        }
    }

    /// What the group has failed with, told with this call, and with what a kernel of this rank waited for
    /// that was ended.
    pub(super) fn error(&self, exchange: &DeviceExchange, group: &Group) -> Option<Error> {
        let mut error = group.failure()?;
        if let Some(waited_for) = exchange.waited_for() {
            error = error.context(format_args!("a kernel of this rank waited for {waited_for}"));
        }
        Some(if self.told { error } else { error.context(group.describe(&self.turn)) })
    }

    /// Whom it waits for: those who have not called it. Of messages all peers: one may have called its end,
    /// and wait for another before.
    fn missing(&self, exchange: &DeviceExchange) -> Vec<u32> {
        match self.meets {
            Meets::Ends(peers) => exchange.ranks(peers),
            Meets::All(collectives) => exchange.missing(collectives),
        }
    }

    fn late(&self, exchange: &DeviceExchange, group: &Group, inquiry: &Inquiry) -> Error {
        if let Meets::All(collectives) = self.meets
            && exchange.missing(collectives).is_empty()
        {
            let waited = self.turn.called.elapsed().as_secs_f64();
            let text = format!(
                "every rank has called it, but after {waited:.1} s it is not done on GPU {}: look at what the streams \
                 were given before it, on every rank, and at long calls of other groups beside it, for which a GPU may \
                 have no room; or raise timeout_ms",
                exchange.device()
            );
            return Error::new(Status::Timeout, text);
        }
        group.overdue(&self.turn, inquiry)
    }
}
