//! What the library moves when nobody waits for it: operations that were started, and calls that streams do.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Endpoint, Through, lock};
use crate::deadline::Deadline;
use crate::engine::device::{DeviceExchange, Way};
use crate::engine::group::Group;
use crate::engine::operation::Running;
use crate::transport::service::Attendance;

/// How often calls that streams do are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// After so many looks at nothing it takes a call to look again.
const QUIET: u32 = 20;

/// Operations that were started and have not ended.
#[derive(Default)]
pub(super) struct Unattended {
    list: Mutex<Vec<Arc<Running>>>,
    /// Its length. Changed with the list locked.
    count: AtomicUsize,
    /// How many of them wait for devices, which ring nobody.
    on_devices: AtomicUsize,
}

impl Unattended {
    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Whether any waits for a device.
    pub(super) fn any_on_devices(&self) -> bool {
        self.on_devices.load(Ordering::Relaxed) > 0
    }

    fn add(&self, running: Arc<Running>) {
        let mut list = lock(&self.list);
        if running.through() == Through::Device {
            self.on_devices.fetch_add(1, Ordering::Relaxed);
        }
        list.push(running);
        // Under the lock: nobody takes it off the list before it is counted.
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self, running: &Running) {
        let mut list = lock(&self.list);
        let before = list.len();
        list.retain(|other| !std::ptr::eq(&**other, running));
        let gone = before - list.len();
        self.count.fetch_sub(gone, Ordering::Relaxed);
        if running.through() == Through::Device {
            self.on_devices.fetch_sub(gone, Ordering::Relaxed);
        }
    }

    /// When one of them is to be looked at, if nothing comes for it.
    pub(super) fn next_deadline(&self) -> Deadline {
        if !self.any() {
            return Deadline::NEVER;
        }
        self.all().iter().fold(Deadline::NEVER, |next, running| next.min(running.deadline()))
    }

    fn all(&self) -> Vec<Arc<Running>> {
        lock(&self.list).clone()
    }
}

/// Whether calls that streams do are looked after.
#[derive(Default)]
pub(super) struct Watch {
    on: AtomicBool,
    /// Looks in a row that found none of them.
    quiet: AtomicU32,
}

impl Endpoint {
    /// Has the library move an operation.
    pub fn adopt(&self, running: Arc<Running>) {
        self.unattended.add(running);
    }

    /// Has the service thread see to the operations that nobody waits for.
    pub fn kick(&self) {
        self.registration().kick();
    }

    /// An operation has ended: nobody moves it any more.
    pub fn disown(&self, running: &Running) {
        self.unattended.remove(running);
    }

    /// Moves them. Whether any has ended.
    pub(super) fn advance_running(&self) -> bool {
        if !self.unattended.any() {
            return false;
        }
        let mut moved = false;
        for running in self.unattended.all() {
            if running.advance() {
                moved = true;
                self.disown(&running);
            }
        }
        moved
    }

    // ---- what streams do

    /// A stream was given a call: it is looked after until it is done. Costs next to nothing while others are.
    pub fn watch_devices(&self) {
        // Against who stops looking: either that sees the call, or this sees that it has stopped.
        fence(Ordering::SeqCst);
        if !self.watch.on.load(Ordering::Relaxed) && !self.watch.on.swap(true, Ordering::SeqCst) {
            self.kick();
        }
    }

    /// Looks after calls that streams do; when to look again, if at all.
    pub(super) fn attend_devices(&self) -> Option<Instant> {
        if !self.watch.on.load(Ordering::SeqCst) {
            return None;
        }
        if self.look_at_devices() {
            self.watch.quiet.store(0, Ordering::Relaxed);
        } else if self.watch.quiet.fetch_add(1, Ordering::Relaxed) >= QUIET {
            self.watch.on.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !self.look_at_devices() {
                return None;
            }
            self.watch.on.store(true, Ordering::SeqCst);
        }
        Some(Instant::now() + LOOK)
    }

    /// Whether any may not be done.
    fn look_at_devices(&self) -> bool {
        let live = lock(&self.roster).live();
        let exchange = |group: &Arc<Group>| group.devices().and_then(Way::exchange).cloned();
        let mut busy = false;
        for group in &live {
            let exchange: Option<Arc<DeviceExchange>> = exchange(group);
            busy |= exchange.is_some_and(|exchange| exchange.attend(group));
        }
        busy
    }

    /// Moves operations that nobody waits for; what is to be watched until there is more to move.
    pub(super) fn attend_running(&self) -> Attendance {
        if !self.unattended.any() {
            return Attendance::Idle;
        }
        let soon = Instant::now();
        if self.progress(0) {
            return Attendance::Again(soon);
        }
        if !self.unattended.any() {
            return Attendance::Idle;
        }
        if self.is_stirred() {
            return Attendance::Again(soon);
        }
        let Some(bell) = self.bell.get() else { return Attendance::Idle };
        // What rings is for whoever sleeps here, who then moves everything and has this called again on leaving.
        if self.sleepers.any() {
            return Attendance::Again(self.next_look());
        }
        bell.answer();
        // Against one who has begun to sleep since: either that rang for a look of its own, or it is counted here.
        fence(Ordering::SeqCst);
        if self.sleepers.any() {
            self.wake();
            return Attendance::Again(self.next_look());
        }
        bell.prepare_park();
        if self.progress_parking() {
            return Attendance::Again(soon);
        }
        Attendance::Watch(self.next_look())
    }

    /// When operations that nobody waits for are to be looked at, whatever comes.
    fn next_look(&self) -> Instant {
        Instant::now() + self.nap(false)
    }
}
