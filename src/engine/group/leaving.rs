//! How a rank leaves a group whose other members go on: as at the end of a context, but what is still called
//! here is refused.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::Group;
use super::turn::Orders;
use crate::engine::device::Way;
use crate::engine::endpoint::lock;
use crate::error::Error;

impl Group {
    /// Fails the group with `why` on this rank alone, if nothing of this rank is under way: what others have
    /// called may be complete by what it has sent. Nothing is told but to those who wait for it; where they
    /// might not hear, and in what has failed, nothing is done. `is_at_rest` looks for what the group does
    /// not know. Whether this rank has left.
    pub fn leave(&self, why: &Error, is_at_rest: impl FnOnce() -> bool) -> bool {
        if self.endpoint.check_fork().is_err() {
            return false;
        }
        let before = self.orders.lock().numbers();
        // They see the calls before these numbers.
        if self.endpoint.has_running(self) || self.may_run_on_device() || !is_at_rest() {
            return false;
        }
        let orders = self.orders.lock();
        let numbers = orders.numbers();
        if numbers != before || orders.have_turns() || !self.is_heard_leaving(&orders) {
            return false;
        }
        let telling = lock(&self.telling);
        if self.failure.set(why.clone()).is_err() {
            return false;
        }
        self.left.store(true, Ordering::Release);
        self.failed.store(true, Ordering::Release);
        self.endpoint.note_left(self.id, numbers, why);
        drop(telling);
        // No call has begun up to here, and none will.
        drop(orders);
        self.end_kernels();
        true
    }

    /// Whether kernels of this rank may run or be launched, if as parts of graphs: nothing but a failure ends
    /// what waits for those on other ranks.
    fn may_run_on_device(&self) -> bool {
        self.devices().and_then(Way::exchange).is_some_and(|exchange| exchange.may_run())
    }

    /// Whether those who wait for this rank hear that it has left. By its goodbye, if that goes with this
    /// group; else those in collectives by asking it ([`Group::compare`]), and on devices by the boards.
    fn is_heard_leaving(&self, orders: &Orders) -> bool {
        let by_messages = orders.have_points() && !self.devices().is_some_and(Way::serves_points);
        !(self.endpoint.registration().has_several_handles() && (by_messages || orders.have_tags()))
    }
}
