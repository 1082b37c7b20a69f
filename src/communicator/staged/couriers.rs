//! Couriers of calls that have begun and have not been closed. Those on one stream share one: they run beside
//! each other.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::mem::{ManuallyDrop, take};
use std::sync::{Arc, Mutex, Weak};

use crate::cuda::courier::{Courier, Duty, Errand};
use crate::cuda::stream::Stream;
use crate::engine::device::Way;
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::error::Result;
use crate::sys::thread_end::ThreadEnd;

/// A courier that may be new.
struct New {
    stream: Arc<Stream>,
    courier: Weak<Courier>,
    /// The group whose collectives alone it serves; `None`: what is not [`apart`].
    group: Option<u64>,
}

/// Whether such a call has a courier apart from what else starts with it, and its group then: where the GPUs
/// of each host have a part in other collectives, those are given to their streams as they begin, behind what
/// has its turn before them.
pub(super) fn apart(group: &Group, is_collective: bool) -> Option<u64> {
    let composes = || matches!(group.devices(), Some(Way::Hosts(_)));
    (is_collective && composes()).then(|| group.id())
}

thread_local! {
    /// Those of this thread. Not dropped with it, but behind all that runs there: destructors of the program
    /// make calls, too, and those of one group wait for each other if they do not share.
    static NEW: RefCell<ManuallyDrop<Vec<New>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

static FORGET: ThreadEnd = ThreadEnd::new(|| drop(NEW.with_borrow_mut(|new| take(&mut **new))));

impl New {
    fn is_on(&self, stream: &Stream) -> bool {
        Arc::ptr_eq(self.stream.devices(), stream.devices()) && self.stream.is(stream)
    }
}

/// Forgets those that are not new any more.
fn tidy(new: &mut Vec<New>) {
    new.retain(|one| one.courier.upgrade().is_some_and(|courier| courier.is_new()));
}

/// A courier that is to be launched on `stream` and do what `duty` says; one that others share may combine by
/// another's way. `group`: of a call that is [`apart`].
pub(super) fn of(stream: &Arc<Stream>, duty: Duty, group: Option<u64>) -> Result<Errand> {
    NEW.with_borrow_mut(|new| {
        tidy(new);
        let mut found = new.iter().filter(|one| one.group == group && one.is_on(stream));
        if let Some(errand) = found.find_map(|one| one.courier.upgrade()?.join(duty)) {
            return Ok(errand);
        }
        let errand = Errand::new(stream.devices(), stream.device(), duty)?;
        FORGET.arm();
        new.push(New { stream: stream.clone(), courier: Arc::downgrade(errand.courier()), group });
        Ok(errand)
    })
}

/// Those of a group's collectives that have begun and have not been closed, with their streams: what is given
/// to a stream now may have its turn behind them.
pub(in crate::communicator) fn ahead(group: u64) -> Vec<(Arc<Stream>, Arc<Courier>)> {
    NEW.with_borrow_mut(|new| {
        tidy(new);
        let of_group = new.iter().filter(|one| one.group == Some(group));
        of_group.filter_map(|one| Some((one.stream.clone(), one.courier.upgrade()?))).collect()
    })
}

/// A rank of this process whose calls couriers serve.
struct Seat {
    group: Weak<Group>,
    id: u64,
    /// Its devices, and the one that it calls on.
    place: (usize, u32),
}

static SEATS: Mutex<Vec<Seat>> = Mutex::new(Vec::new());

/// Whether another rank of `group` in this process is on the device of `stream`, too, as far as it has
/// called, and the device has few queues. What the stream of one is given behind its courier may then hold up
/// the courier of the other, which that one waits for.
pub(super) fn is_crowded(stream: &Stream, group: &Arc<Group>) -> bool {
    let devices = stream.devices();
    if devices.has_many_queues() {
        return false;
    }
    let place = (Arc::as_ptr(devices).addr(), stream.device());
    let is_own = |seat: &Seat| std::ptr::eq(seat.group.as_ptr(), Arc::as_ptr(group));
    let mut seats = lock(&SEATS);
    if !seats.iter().any(|seat| is_own(seat) && seat.place == place) {
        seats.retain(|seat| seat.group.strong_count() > 0);
        seats.push(Seat { group: Arc::downgrade(group), id: group.id(), place });
    }
    let is_other = |seat: &Seat| {
        seat.place == place && seat.id == group.id() && !is_own(seat) && seat.group.strong_count() > 0
    };
    seats.iter().any(is_other)
}
