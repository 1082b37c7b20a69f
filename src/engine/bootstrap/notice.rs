//! What a rank that cannot join leaves in the store, for those who wait for it.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::control::Control;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::Store;

/// How long a rank waits before it looks for a notice: at first, ranks one after the other, and at most. Each time twice as long.
const FIRST: Duration = Duration::from_millis(1500);
const APART: Duration = Duration::from_millis(20);
const LAST: Duration = Duration::from_secs(16);

/// How long a store may take beyond a rank's deadline.
const GRACE: Duration = Duration::from_millis(500);

/// Where one job's ranks leave notices, and how often this one looks.
pub(super) struct Notice<'a> {
    store: &'a dyn Store,
    key: String,
    pause: Cell<Duration>,
}

impl<'a> Notice<'a> {
    pub(super) fn new(store: &'a dyn Store, prefix: &str, rank: u32) -> Notice<'a> {
        let pause = Cell::new(FIRST + (rank % 64) * APART);
        Notice { store, key: format!("{prefix}/refused"), pause }
    }

    /// Where it is.
    pub(super) fn store(&self) -> &'a dyn Store {
        self.store
    }

    /// Why some rank cannot join, if one says so.
    fn read(&self) -> Option<Error> {
        let bytes = self.store.try_get(&self.key, Deadline::after(GRACE)).ok()??;
        match Control::decode(&bytes) {
            Some(Control::Failure { error, .. }) => Some(error),
            _ => None,
        }
    }

    /// Why this rank cannot join; the others are told, if nobody has told anything. That another rank has left, or has not come in
    /// time, may follow from what somebody knows better.
    pub(super) fn leave(&self, error: Error) -> Error {
        let told = self.read();
        match (error.status(), told) {
            (Status::PeerFailed | Status::Timeout, Some(told)) => return told,
            (Status::PeerFailed, None) | (_, Some(_)) => {}
            (_, None) => {
                let bytes = Control::Failure { group: 0, error: error.clone() }.encode();
                let _ = self.store.set(&self.key, &bytes, Deadline::after(GRACE));
            }
        }
        error
    }

    /// Waits by `wait`, which gives up at a deadline, and looks now and then; `None` at `deadline`. Not for waits of the store itself: one
    /// that a program brings may not tell a wait that is over from a failure.
    pub(super) fn watch<T>(
        &self,
        deadline: Deadline,
        mut wait: impl FnMut(Deadline) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        loop {
            let until = Deadline::after(self.pause.get()).min(deadline);
            if let Some(result) = wait(until) {
                return Some(result);
            }
            if deadline.expired() {
                return None;
            }
            if let Some(error) = self.read() {
                return Some(Err(error));
            }
            self.pause.set((2 * self.pause.get()).min(LAST));
        }
    }
}
