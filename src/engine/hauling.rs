//! Several threads for the bytes of long messages over TCP.
//!
//! A thread moves 2 to 4 GB/s through a socket. So where ranks leave processors idle, *helpers* take part:
//! whoever reads or writes a lane under the endpoint's lock leaves the payload of long frames, a *load*, to
//! the lane's hauler, who moves it with only that lane locked, and takes the next piece by itself
//! (`lane::outlet`, `lane::intake`). What has come or gone whole is told under the endpoint's lock, by
//! whoever has moved the last piece of it. Each lane has one hauler, a helper or, for the first, whoever
//! waits: what several processors send over one connection overtakes itself, and TCP takes that for loss. The
//! helpers of an endpoint begin with its first load, or with the first local work that they are asked to
//! share (`joint`). One that finds nothing to move for a moment gives its loads back and sleeps; when the
//! kernel says that there is something, they are offered again.

use std::collections::VecDeque;
use std::ops::Deref;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use super::endpoint::{Endpoint, Visitor, lock};
use super::joint::{Finish, Joint};
use super::lane::{Flows, Hauled, Lane};
use crate::sys;

/// The most helpers of an endpoint, whatever processors there are.
const MOST_HELPERS: usize = 7;

/// How long a helper with nothing to move looks again before it sleeps: after it has moved something, and
/// when it was woken.
const SPIN: Duration = Duration::from_micros(100);
const GLANCE: Duration = Duration::from_micros(20);

/// A lane of a link that several threads may move. Lock order: the endpoint's messages, then a lane.
pub struct Track {
    /// The rank of the endpoint on the other side.
    pub peer: u32,
    /// Which of the link's lanes.
    pub index: usize,
    lane: Mutex<Lane>,
    /// How many wait for it.
    wanted: AtomicUsize,
    flows: Arc<Flows>,
}

impl Track {
    /// The lane with this number to `peer`, and what goes over all lanes to it.
    pub fn new(peer: u32, index: usize, lane: Lane, flows: Arc<Flows>) -> Arc<Track> {
        Arc::new(Track { peer, index, lane: Mutex::new(lane), wanted: AtomicUsize::new(0), flows })
    }

    /// The lane: at once, or when whoever hauls has made a system call.
    pub fn lock(&self) -> MutexGuard<'_, Lane> {
        self.try_lock().unwrap_or_else(|| {
            self.wanted.fetch_add(1, Ordering::Relaxed);
            let lane = lock(&self.lane);
            self.wanted.fetch_sub(1, Ordering::Relaxed);
            lane
        })
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// Moves a part of its loads. A lock goes to whoever asks first, and that would be who hauls, again and
    /// again: others come before.
    fn haul(&self) -> Hauled {
        while self.is_wanted() {
            sys::process::yield_now();
        }
        let mut hauled = lock(&self.lane).haul(&|| self.is_wanted());
        hauled.more = hauled.more || self.has_more();
        hauled
    }

    /// Whether there is a load that was posted while a hauler had the lane, so that it could not be offered.
    fn has_more(&self) -> bool {
        fence(Ordering::SeqCst);
        !self.flows.outlet.is_empty() && self.lock().offers(&mut 1)
    }

    /// The lane, unless somebody hauls.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Lane>> {
        match self.lane.try_lock() {
            Ok(lane) => Some(lane),
            Err(TryLockError::Poisoned(lane)) => Some(lane.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The loads of an endpoint, and who moves them.
pub(super) struct Hauling {
    helpers: AtomicUsize,
    /// The first is of whoever waits, the others of a helper each.
    haulers: OnceLock<Vec<Arc<Hauler>>>,
    fork: u32,
}

/// The loads that one thread moves.
#[derive(Default)]
struct Hauler {
    loads: Mutex<Loads>,
    /// How many there are.
    count: AtomicUsize,
    awaken: Condvar,
    closing: AtomicBool,
    /// Whether there is other work for it.
    asked: AtomicBool,
}

#[derive(Default)]
struct Loads {
    tracks: VecDeque<Arc<Track>>,
    parked: bool,
    joint: Option<Arc<Joint>>,
}

impl Hauling {
    pub(super) fn new() -> Hauling {
        Hauling { helpers: AtomicUsize::new(0), haulers: OnceLock::new(), fork: sys::fork::generation() }
    }

    /// Has so many threads help whoever waits.
    pub(super) fn set_helpers(&self, helpers: usize) {
        self.helpers.store(helpers.min(MOST_HELPERS), Ordering::Relaxed);
    }

    fn haulers(&self, endpoint: &Weak<Endpoint>) -> &[Arc<Hauler>] {
        self.haulers.get_or_init(|| begin(self.helpers(), endpoint))
    }

    /// How many threads help whoever waits.
    pub(super) fn helpers(&self) -> usize {
        self.helpers.load(Ordering::Relaxed)
    }

    /// Calls `work` for each part from 0 on, each once, by this thread and helpers that have time.
    pub(super) fn together(&self, endpoint: &Weak<Endpoint>, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: `work` is borrowed until this returns, which is after `finish`.
        let joint = Arc::new(unsafe { Joint::new(parts, work) });
        let finish = Finish(&joint);
        for helper in self.haulers(endpoint)[1..].iter().take(parts.saturating_sub(1)) {
            helper.ask(joint.clone());
        }
        joint.help();
        drop(finish);
        // What a helper left undone is missing here.
        assert!(!joint.has_panicked(), "a thread that helped has panicked");
    }

    /// Has loads moved.
    pub(super) fn offer(&self, endpoint: &Weak<Endpoint>, tracks: Vec<Arc<Track>>) {
        let haulers = self.haulers(endpoint);
        for track in tracks {
            haulers[track.index % haulers.len()].add(track);
        }
    }

    /// Moves a part of a load, if whoever waits has any. Whether anything moved.
    pub(super) fn haul(&self, endpoint: &Endpoint) -> bool {
        self.haulers.get().is_some_and(|haulers| haulers[0].haul(|| Some(endpoint)))
    }

    /// Whoever waits sleeps until the kernel says that there is something to move; not if something moves.
    pub(super) fn give_back(&self, endpoint: &Endpoint) -> bool {
        self.haulers.get().is_some_and(|haulers| haulers[0].give_back(endpoint))
    }
}

/// Starts so many helpers, or as many as can be.
fn begin(helpers: usize, endpoint: &Weak<Endpoint>) -> Vec<Arc<Hauler>> {
    let mut haulers = vec![Arc::<Hauler>::default()];
    for _ in 0..helpers {
        let (hauler, endpoint) = (Arc::<Hauler>::default(), Visitor::of(endpoint));
        let helper = hauler.clone();
        if let Err(cause) = sys::process::spawn("unisono-helper", move || helper.help(&endpoint)) {
            log::warn!("no more than {} threads for long messages: {cause}", haulers.len());
            break;
        }
        haulers.push(hauler);
    }
    haulers
}

impl Drop for Hauling {
    fn drop(&mut self) {
        // In the child of a fork there are no helpers, and one may have held a lock.
        if self.fork != sys::fork::generation() {
            return;
        }
        for hauler in self.haulers.get().into_iter().flatten() {
            let mut loads = lock(&hauler.loads);
            hauler.closing.store(true, Ordering::Relaxed);
            let left = std::mem::take(&mut loads.tracks);
            drop(loads);
            hauler.awaken.notify_all();
            drop(left);
        }
    }
}

impl Hauler {
    fn add(&self, track: Arc<Track>) {
        let mut loads = lock(&self.loads);
        loads.tracks.push_back(track);
        self.count.store(loads.tracks.len(), Ordering::Relaxed);
        if loads.parked {
            self.awaken.notify_one();
        }
    }

    /// Asks it to help with other work.
    fn ask(&self, joint: Arc<Joint>) {
        let mut loads = lock(&self.loads);
        loads.joint = Some(joint);
        self.asked.store(true, Ordering::Relaxed);
        if loads.parked {
            self.awaken.notify_one();
        }
    }

    /// Helps with other work, if it has been asked to.
    fn help_out(&self) -> bool {
        if !self.asked.load(Ordering::Relaxed) {
            return false;
        }
        let mut loads = lock(&self.loads);
        self.asked.store(false, Ordering::Relaxed);
        let joint = loads.joint.take();
        drop(loads);
        joint.is_some_and(|joint| {
            // A panic is for whoever has asked, who learns of it; this thread goes on.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| joint.help()));
            true
        })
    }

    fn take(&self) -> Option<Arc<Track>> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut loads = lock(&self.loads);
        let track = loads.tracks.pop_front();
        self.count.store(loads.tracks.len(), Ordering::Relaxed);
        track
    }

    /// One turn of one load. Whether anything moved.
    fn haul<E: Deref<Target = Endpoint>>(&self, endpoint: impl FnOnce() -> Option<E>) -> bool {
        let Some(track) = self.take() else { return false };
        let hauled = track.haul();
        self.went_on(track, hauled, endpoint);
        hauled.moved
    }

    /// Tells what there is to tell, and keeps a load that is not given back.
    fn went_on<E>(&self, track: Arc<Track>, hauled: Hauled, endpoint: impl FnOnce() -> Option<E>)
    where
        E: Deref<Target = Endpoint>,
    {
        if hauled.tells
            && let Some(endpoint) = endpoint()
        {
            endpoint.attend_lane(track.peer, track.index);
        }
        if hauled.more {
            self.add(track);
        }
    }

    /// Has the kernel say when there is something to move. Whether something moved after all.
    fn give_back(&self, endpoint: &Endpoint) -> bool {
        let (mut peers, mut moved) = (Vec::new(), false);
        for _ in 0..self.count.load(Ordering::Relaxed) {
            let Some(track) = self.take() else { break };
            let mut lane = track.lock();
            let mut hauled = lane.haul(&|| false);
            if hauled.more && !hauled.moved {
                lane.give_back();
                peers.push(track.peer);
                hauled.more = false;
            }
            drop(lane);
            hauled.more = hauled.more || track.has_more();
            moved |= hauled.moved;
            self.went_on(track, hauled, || Some(endpoint));
        }
        if !peers.is_empty() {
            endpoint.watch_lanes(&peers);
        }
        moved
    }

    /// What a helper does. It keeps the endpoint only while it tells it something.
    fn help(&self, endpoint: &Visitor) {
        let (mut last, mut spin) = (Instant::now(), GLANCE);
        while !self.closing.load(Ordering::Relaxed) {
            if self.haul(|| endpoint.enter()) | self.help_out() {
                (last, spin) = (Instant::now(), SPIN);
            } else if last.elapsed() < spin {
                sys::process::yield_now();
            } else if !endpoint.enter().is_some_and(|endpoint| self.give_back(&endpoint)) {
                self.park();
                (last, spin) = (Instant::now(), GLANCE);
            }
        }
    }

    fn park(&self) {
        let mut loads = lock(&self.loads);
        loads.parked = true;
        while loads.tracks.is_empty() && loads.joint.is_none() && !self.closing.load(Ordering::Relaxed) {
            loads = self.awaken.wait(loads).unwrap_or_else(PoisonError::into_inner);
        }
        loads.parked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_panic_of_a_helper_is_told_to_whoever_has_asked() {
        let hauling = Hauling::new();
        hauling.set_helpers(1);
        let asker = thread::current().id();
        for panics in [true, false, true] {
            let begun = AtomicUsize::new(0);
            let work = |_: usize| {
                begun.fetch_add(1, Ordering::Relaxed);
                // Each thread has one of the two parts.
                let start = Instant::now();
                while begun.load(Ordering::Relaxed) < 2 && start.elapsed() < Duration::from_secs(20) {
                    thread::yield_now();
                }
                assert!(thread::current().id() == asker || !panics, "as told");
            };
            let together = || hauling.together(&Weak::new(), 2, &work);
            assert_eq!(panic::catch_unwind(AssertUnwindSafe(together)).is_err(), panics);
        }
    }
}
