//! Calls that have begun and have not been closed, and their couriers. Those on one stream share a courier:
//! they run beside each other.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::mem::{ManuallyDrop, replace};
use std::sync::{Arc, Mutex, Weak};

use super::begun::{Close, Open};
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

/// Whether such a call has a courier apart from what else starts with it, and its group then: where GPUs
/// exchange other collectives, or those of each host have a part in them, those are given to their streams as
/// they begin, behind what has its turn before them.
pub(super) fn apart(group: &Group, is_collective: bool) -> Option<u64> {
    let have_others = || matches!(group.devices(), Some(Way::Exchange(_) | Way::Hosts(_)));
    (is_collective && have_others()).then(|| group.id())
}

/// What a thread has begun and not closed.
struct Unclosed {
    couriers: Vec<New>,
    /// Calls that are [`apart`], and their groups.
    calls: Vec<(u64, Weak<Mutex<Option<Close>>>)>,
}

thread_local! {
    /// This thread. Not dropped with it, but behind all that runs there: destructors of the program make
    /// calls, too, and those of one group wait for each other if they do not share.
    static UNCLOSED: RefCell<ManuallyDrop<Unclosed>> =
        const { RefCell::new(ManuallyDrop::new(Unclosed::NONE)) };
}

static FORGET: ThreadEnd =
    ThreadEnd::new(|| drop(UNCLOSED.with_borrow_mut(|unclosed| replace(&mut **unclosed, Unclosed::NONE))));

impl Unclosed {
    const NONE: Unclosed = Unclosed { couriers: Vec::new(), calls: Vec::new() };
}

impl New {
    fn is_on(&self, stream: &Stream) -> bool {
        Arc::ptr_eq(self.stream.devices(), stream.devices()) && self.stream.is(stream)
    }
}

/// A courier that is to be launched on `stream` and do what `duty` says; one that others share may combine by
/// another's way. `group`: of a call that is [`apart`].
pub(super) fn of(stream: &Arc<Stream>, duty: Duty, group: Option<u64>) -> Result<Errand> {
    UNCLOSED.with_borrow_mut(|unclosed| {
        let new = &mut unclosed.couriers;
        new.retain(|one| one.courier.upgrade().is_some_and(|courier| courier.is_new()));
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

/// Notes a call of `group` that is [`apart`].
pub(super) fn note_open(group: u64, open: &Open) {
    FORGET.arm();
    UNCLOSED.with_borrow_mut(|unclosed| {
        unclosed.calls.retain(|(_, open)| open.strong_count() > 0);
        unclosed.calls.push((group, Arc::downgrade(open)));
    });
}

/// Those of `group` that have been noted, in their order; they are not any more.
pub(super) fn take_open(group: u64) -> Vec<Open> {
    UNCLOSED.with_borrow_mut(|unclosed| {
        let of_group = unclosed.calls.extract_if(.., |(of, _)| *of == group);
        of_group.filter_map(|(_, open)| open.upgrade()).collect()
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
