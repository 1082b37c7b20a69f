//! Couriers of calls that have begun and have not been closed. Those on one stream share one: they run beside each other.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use crate::cuda::courier::{Courier, Errand};
use crate::cuda::stream::Stream;
use crate::error::Result;

thread_local! {
    /// Those of this thread that may be new, with their streams.
    static NEW: RefCell<Vec<(Arc<Stream>, Weak<Courier>)>> = const { RefCell::new(Vec::new()) };
}

/// A courier that is to be launched on `stream`, for orders of `bytes` bytes.
pub(super) fn of(stream: &Arc<Stream>, bytes: usize) -> Result<Errand> {
    NEW.with_borrow_mut(|new| {
        new.retain(|(_, courier)| courier.upgrade().is_some_and(|courier| courier.is_new()));
        let same = |other: &Stream| Arc::ptr_eq(other.devices(), stream.devices()) && other.is(stream);
        let found = new.iter().filter(|(other, _)| same(other));
        if let Some(errand) = found.filter_map(|(_, courier)| courier.upgrade()?.join(bytes)).next() {
            return Ok(errand);
        }
        let errand = Errand::new(stream.devices(), stream.device(), bytes)?;
        new.push((stream.clone(), Arc::downgrade(errand.courier())));
        Ok(errand)
    })
}
