//! Couriers of calls that have begun and have not been closed. Those on one stream share one: they run beside each other.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::mem::{ManuallyDrop, take};
use std::sync::{Arc, Mutex, Weak};

use crate::cuda::courier::{Combiner, Courier, Errand};
use crate::cuda::stream::Stream;
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::error::Result;
use crate::sys::thread_end::ThreadEnd;

/// Couriers and their streams.
type Couriers = Vec<(Arc<Stream>, Weak<Courier>)>;

thread_local! {
    /// Those of this thread that may be new. Not dropped with it, but behind all that runs there: destructors of the program
    /// make calls, too, and those of one group wait for each other if they do not share.
    static NEW: RefCell<ManuallyDrop<Couriers>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

static FORGET: ThreadEnd = ThreadEnd::new(|| drop(NEW.with_borrow_mut(|new| take(&mut **new))));

/// A courier that is to be launched on `stream`, for orders of `bytes` bytes, to be combined by `combiner`; one that others share may
/// combine by another.
pub(super) fn of(stream: &Arc<Stream>, bytes: usize, combiner: Option<Combiner>) -> Result<Errand> {
    NEW.with_borrow_mut(|new| {
        new.retain(|(_, courier)| courier.upgrade().is_some_and(|courier| courier.is_new()));
        let same = |other: &Stream| Arc::ptr_eq(other.devices(), stream.devices()) && other.is(stream);
        let found = new.iter().filter(|(other, _)| same(other));
        if let Some(errand) = found.filter_map(|(_, courier)| courier.upgrade()?.join(bytes, combiner)).next()
        {
            return Ok(errand);
        }
        let errand = Errand::new(stream.devices(), stream.device(), bytes, combiner)?;
        FORGET.arm();
        new.push((stream.clone(), Arc::downgrade(errand.courier())));
        Ok(errand)
    })
}

/// The ranks of this process whose calls couriers serve, and their devices.
static SEATS: Mutex<Vec<(Weak<Group>, usize, u32)>> = Mutex::new(Vec::new());

/// Whether another rank of `group` in this process is on the device of `stream`, too, as far as it has called, and the device has
/// few queues. What the stream of one is given behind its courier may then hold up the courier of the other, which that one waits for.
pub(super) fn is_crowded(stream: &Stream, group: &Arc<Group>) -> bool {
    let devices = stream.devices();
    if devices.has_many_queues() {
        return false;
    }
    let place = (Arc::as_ptr(devices).addr(), stream.device());
    let mut seats = lock(&SEATS);
    seats.retain(|(other, ..)| other.strong_count() > 0);
    let (mut is_known, mut others) = (false, false);
    for other in seats.iter().filter(|(_, devices, device)| (*devices, *device) == place) {
        let Some(other) = other.0.upgrade() else { continue };
        is_known |= Arc::ptr_eq(&other, group);
        others |= !Arc::ptr_eq(&other, group) && other.id() == group.id();
    }
    if !is_known {
        seats.push((Arc::downgrade(group), place.0, place.1));
    }
    others
}
