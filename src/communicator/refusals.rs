//! What a rank is kept from starting, told to those that would wait for it.

use super::context::{Context, Membership};
use crate::cuda::driver::{Capture, StreamHandle};
use crate::engine::wire::Class;
use crate::error::Result;

impl Context {
    /// A collective that this rank is kept from starting fails for all: the others would wait for it.
    pub(super) fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        self.or_fail_in(Class::Ordered, result)
    }

    /// [`Group::or_fail`](crate::engine::group::Group::or_fail).
    pub(super) fn or_fail_in<T>(&self, class: Class, result: Result<T>) -> Result<T> {
        match self.membership() {
            Membership::Group(group) => group.or_fail(class, result),
            Membership::Solo => result,
        }
    }

    /// What keeps the caller from starting calls of this rank, or a stream from waiting for them, is the
    /// group's failure where the driver refuses, since others would wait. What is wrong with the arguments is
    /// not, nor what a stream in capture is refused; `capture` asks the driver for that.
    pub fn or_fail_in_list<T>(
        &self,
        result: Result<T>,
        capture: impl FnOnce() -> Result<Capture>,
    ) -> Result<T> {
        match self.membership() {
            Membership::Group(group) => group.or_fail_on(Class::Ordered, result, capture),
            Membership::Solo => result,
        }
    }

    /// [`Group::or_fail_on`](crate::engine::group::Group::or_fail_on).
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn or_fail_on<T>(
        &self,
        stream: Option<StreamHandle>,
        class: Class,
        result: Result<T>,
    ) -> Result<T> {
        match self.membership() {
            Membership::Group(group) => {
                // SAFETY: the caller's promise.
                group.or_fail_on(class, result, || unsafe { self.cuda().capture(stream) })
            }
            Membership::Solo => result,
        }
    }
}
