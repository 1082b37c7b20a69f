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

/// A courier that may be new.
struct New {
    stream: Arc<Stream>,
    courier: Weak<Courier>,
    /// Whether it serves messages alone, beside calls that go by the GPUs.
    apart: bool,
}

thread_local! {
    /// Those of this thread. Not dropped with it, but behind all that runs there: destructors of the program make calls, too, and
    /// those of one group wait for each other if they do not share.
    static NEW: RefCell<ManuallyDrop<Vec<New>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

static FORGET: ThreadEnd = ThreadEnd::new(|| drop(NEW.with_borrow_mut(|new| take(&mut **new))));

/// Those that are to be launched on `stream`, of messages apart or of others.
fn new_on(new: &mut Vec<New>, stream: &Stream, apart: bool) -> Vec<Arc<Courier>> {
    new.retain(|one| one.courier.upgrade().is_some_and(|courier| courier.is_new()));
    let same = |one: &&New| {
        one.apart == apart && Arc::ptr_eq(one.stream.devices(), stream.devices()) && one.stream.is(stream)
    };
    new.iter().filter(same).filter_map(|one| one.courier.upgrade()).collect()
}

/// A courier that is to be launched on `stream`, for orders of `bytes` bytes, to be combined by `combiner`; one that others share may
/// combine by another. `apart`: one that serves messages alone.
pub(super) fn of(
    stream: &Arc<Stream>,
    bytes: usize,
    combiner: Option<Combiner>,
    apart: bool,
) -> Result<Errand> {
    NEW.with_borrow_mut(|new| {
        let found = new_on(new, stream, apart);
        if let Some(errand) = found.iter().find_map(|courier| courier.join(bytes, combiner)) {
            return Ok(errand);
        }
        let errand = Errand::new(stream.devices(), stream.device(), bytes, combiner)?;
        FORGET.arm();
        new.push(New { stream: stream.clone(), courier: Arc::downgrade(errand.courier()), apart });
        Ok(errand)
    })
}

/// Those that collectives on `stream` wait for which have begun and have not been closed: what the stream is given now may have its
/// turn behind them.
pub(in crate::communicator) fn ahead(stream: &Stream) -> Vec<Arc<Courier>> {
    NEW.with_borrow_mut(|new| new_on(new, stream, false))
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
