//! Side streams that no stream waits for: each has one copy to do at a time, and nothing else.
//!
//! The driver gives a stream that has been idle a queue of the device that nothing is in, if there is any,
//! and a stream that has something left to do keeps its own. That queue may be another stream's, too: two
//! threads that give two streams something at the same moment get one for both, and the double deals out one
//! that is empty while its stream waits elsewhere. Then what the other stream is given behind something that
//! waits (a courier behind another, a kernel of the program behind a courier) stands in the queue, and what a
//! side stream is given next stands behind it, for ever if that is what the other waits for: the next piece
//! of a message, or the event that tells that a copy has ended. So a side stream is given nothing while it
//! has something to do, and every copy finds a queue anew. That it has ended is learned from the stream,
//! which is idle then.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::StreamOrder;
use super::resources::{self, Bay, PinnedLane};
use crate::cuda::courier::Desk;
use crate::cuda::stream::Stream;
use crate::error::Result;

/// How a side stream is given one thing at a time.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Who gives it something now.
    giving: Mutex<()>,
    /// How many things it has been given,
    given: AtomicU64,
    /// and how many of those are known to have ended.
    ended: AtomicU64,
}

impl Turns {
    /// Gives `stream`, whose turns these are, something if it has nothing to do. Its number; `None` if
    /// nothing was given.
    pub(super) fn give(&self, stream: &Stream, give: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
        let Some(_giving) = self.begin() else { return Ok(None) };
        if !stream.query()? {
            return Ok(None);
        }
        // Others may find it busy with this, whenever they look.
        self.end(self.given());
        let _alone = stream.devices().rousing(stream)?;
        self.count(give()).map(Some)
    }

    /// As [`Turns::give`], whatever the stream has to do: where nothing that waits is to be feared in its
    /// queue.
    pub(super) fn give_behind(&self, give: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
        let Some(_giving) = self.begin() else { return Ok(None) };
        self.count(give()).map(Some)
    }

    /// The right to give something, if nobody else does.
    fn begin(&self) -> Option<MutexGuard<'_, ()>> {
        // Another thread may be held up in the driver.
        match self.giving.try_lock() {
            Ok(giving) => Some(giving),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The number of what has been `given`. What the driver refuses it may have begun.
    fn count(&self, given: Result<()>) -> Result<u64> {
        let number = self.given.load(Ordering::Relaxed) + 1;
        self.given.store(number, Ordering::Release);
        given.map(|()| number)
    }

    /// What has numbers up to this has ended.
    pub(super) fn end(&self, number: u64) {
        self.ended.fetch_max(number, Ordering::AcqRel);
    }

    /// How many things it has been given.
    pub(super) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// Whether what has this number has ended.
    pub(super) fn has_ended(&self, stream: &Stream, number: u64) -> Result<bool> {
        if self.ended.load(Ordering::Acquire) < number {
            // Before the driver is asked: what another thread gives meanwhile may come behind the answer.
            let given = self.given();
            if !stream.query()? {
                return Ok(false);
            }
            self.end(given);
        }
        Ok(true)
    }
}

/// From where to where a copy goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    ToHost,
    ToDevice,
    OnDevice,
}

/// A copy that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copying {
    pub(super) way: Way,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: usize,
}

/// What one call has copied on one side stream.
#[derive(Default)]
struct Line {
    /// Copies that the stream has not been given, in their order.
    waiting: VecDeque<Copying>,
    /// The number of the one that it has been given last, as its [`Turns`] count, until that is known to have
    /// ended.
    under_way: Option<u64>,
    /// How many there have been.
    ordered: u32,
    /// How many have ended.
    ended: u32,
}

/// What carries a call's bytes.
pub(super) struct Porter {
    bay: Arc<Bay>,
    /// For loads, and for stores.
    lines: [RefCell<Line>; 2],
}

impl Porter {
    pub(super) fn new(bay: Arc<Bay>) -> Porter {
        Porter { bay, lines: Default::default() }
    }

    fn line(&self, desk: Desk) -> RefMut<'_, Line> {
        self.lines[usize::from(desk != Desk::Load)].borrow_mut()
    }

    /// Has something copied, behind what was ordered at the same desk before, for what is in `lane`.
    ///
    /// # Safety
    /// As [`Stream`] says, until the copy has ended or [`Porter::leave`] has come back.
    pub(super) unsafe fn order(
        &self,
        order: &StreamOrder,
        desk: Desk,
        lane: &PinnedLane,
        copy: Copying,
    ) -> Result<()> {
        let mut line = self.line(desk);
        line.waiting.push_back(copy);
        line.ordered = line.ordered.wrapping_add(1);
        lane.note(desk, line.ordered);
        drop(line);
        self.move_on(order, desk).map(drop)
    }

    /// Whether what was ordered last for `lane` was known to have ended when the porter was last moved on.
    pub(super) fn has_ended(&self, desk: Desk, lane: &PinnedLane) -> bool {
        let ended = self.line(desk).ended;
        // Of a piece in which this rank has no bytes nothing is ordered.
        lane.ordered(desk).is_none_or(|number| ended.wrapping_sub(number) as i32 >= 0)
    }

    /// Gives a side stream the next copy if it has done what it had. Whether it could.
    pub(super) fn move_on(&self, order: &StreamOrder, desk: Desk) -> Result<bool> {
        let mut line = self.line(desk);
        let (stream, turns) = self.bay.side(desk);
        if let Some(number) = line.under_way {
            if !turns.has_ended(stream, number)? {
                return Ok(false);
            }
            line.under_way = None;
            line.ended = line.ended.wrapping_add(1);
        }
        let Some(&copy) = line.waiting.front() else { return Ok(false) };
        // SAFETY: the promise that it was ordered with.
        let given = turns.give(stream, || unsafe { order.copy(stream, copy) })?;
        if given.is_some() {
            line.under_way = given;
            line.waiting.pop_front();
        }
        Ok(given.is_some())
    }

    /// Lets go of what a call ran in that is given up. What waits is not copied any more.
    pub(super) fn leave(self, lanes: Vec<PinnedLane>) {
        let given = [Desk::Load, Desk::Store].map(|desk| (desk, self.bay.side(desk).1.given()));
        resources::leave_behind(Rest { bay: self.bay, given }, lanes);
    }
}

/// What side streams had been given when a call was given up.
pub(super) struct Rest {
    bay: Arc<Bay>,
    given: [(Desk, u64); 2],
}

impl Rest {
    /// Whether that has ended.
    pub(super) fn has_ended(&self) -> Result<bool> {
        self.given.iter().try_fold(true, |ended, &(desk, number)| {
            let (stream, turns) = self.bay.side(desk);
            Ok(ended && turns.has_ended(stream, number)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::parting::tests::order_of_nothing;
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::double::{Double, Order};

    /// A porter of a device that does nothing until somebody asks, and a lane whose first byte is 7.
    fn begin() -> (Arc<Double>, StreamOrder, Porter, PinnedLane) {
        let double = Double::new(1, Order::RoundRobin);
        double.share_queues(8, 8);
        let devices = Devices::over(double.clone()).expect("a driver");
        let porter = Porter::new(Bay::take(&devices, 0).expect("side streams"));
        let lane = PinnedLane::take(&devices, 0, 1).expect("a lane");
        // SAFETY: it is the test's, and has as many bytes.
        unsafe { lane.address().write(7) };
        (double, order_of_nothing(&devices, None), porter, lane)
    }

    /// Has a lane's first byte stored.
    fn store(porter: &Porter, order: &StreamOrder, lane: &PinnedLane, to: u64) -> Result<()> {
        let from = lane.address().expose_provenance() as u64;
        // SAFETY: the double keeps its memory, and lanes are never freed.
        unsafe { porter.order(order, Desk::Store, lane, Copying { way: Way::ToDevice, to, from, bytes: 1 }) }
    }

    #[test]
    fn a_side_stream_has_one_copy_at_a_time_of_all_calls() {
        let (double, order, porter, lane) = begin();
        let other = Porter::new(porter.bay.clone());
        let memory: Vec<u64> = (0..6).map(|_| double.memory(0, 1)).collect();
        for pair in memory.chunks(2) {
            store(&porter, &order, &lane, pair[0]).expect("it is ordered");
            store(&other, &order, &lane, pair[1]).expect("it is ordered");
        }
        // Both count alike.
        while !porter.has_ended(Desk::Store, &lane) || !other.has_ended(Desk::Store, &lane) {
            assert!(double.left() <= 1, "{} at a time", double.left());
            porter.move_on(&order, Desk::Store).expect("it moves on");
            other.move_on(&order, Desk::Store).expect("it moves on");
        }
        assert!(memory.iter().all(|&at| double.peek(at, 1) == [7]));
        assert_eq!(double.complaints(), Vec::<String>::new());
        resources::give_back(vec![lane]);
    }

    #[test]
    fn what_waits_when_its_call_is_given_up_is_not_copied() {
        let (double, order, porter, lane) = begin();
        let bay = porter.bay.clone();
        let memory = [(); 2].map(|()| double.memory(0, 1));
        let old = memory.map(|at| double.peek(at, 1));
        let gate = order.devices.word(0).expect("a word");
        bay.store.wait_word(&gate).expect("it waits");
        memory.iter().for_each(|&to| store(&porter, &order, &lane, to).expect("it is ordered"));
        porter.leave(vec![lane]);
        gate.release();
        double.drain();
        assert_eq!(memory.map(|at| double.peek(at, 1)), old);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn what_is_given_up_writes_nothing_later_whatever_fails() {
        for failing in 0.. {
            let (double, order, porter, lane) = begin();
            let memory = [(); 3].map(|()| double.memory(0, 1));
            double.fail_call(failing);
            let ordered = memory.iter().try_for_each(|&to| store(&porter, &order, &lane, to));
            porter.leave(vec![lane]);
            let left = memory.map(|at| double.peek(at, 1));
            double.drain();
            assert_eq!(memory.map(|at| double.peek(at, 1)), left, "call {failing} was refused: {ordered:?}");
            assert_eq!(double.complaints(), Vec::<String>::new());
            if double.is_to_fail() {
                assert_eq!(left[0], [7], "nothing was refused");
                assert!(failing > 5, "only {failing} calls");
                break;
            }
        }
    }
}
