//! The thread that asks the driver, for calls that nobody waits for.
//!
//! A driver call may not return until a device is done, since another thread of the program frees memory, say, and the
//! device may wait for this process. So the service thread makes none, or nothing would hear that a peer has died, answer
//! those who ask, or see a deadline pass; nor does a thread that waits for something else. This thread moves operations
//! on devices unless a thread that waits for one does, and looks at calls that streams do. It may be held up; the service
//! thread sees that from outside ([`Endpoint::oversee_devices`]), and ends what the devices wait for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::unattended::Leave;
use super::waiting::Counted;
use super::{Endpoint, lock};
use crate::deadline::Deadline;
use crate::sys;

/// How often calls that streams do are looked at.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// A look that takes longer is held up.
const HELD_UP: Duration = Duration::from_secs(1);

/// The thread, which begins with its first work, and what others know of it.
pub(super) struct Attendant {
    shared: Arc<Shared>,
    /// Threads that wait for devices, itself among them: one is enough.
    waiting: AtomicUsize,
    fork: u32,
}

#[derive(Default)]
struct Shared {
    /// Whether it will look for work before it sleeps for long.
    awake: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    begun: bool,
    closing: bool,
    /// When it last knew what the driver says.
    looked_at: Option<Instant>,
}

impl Attendant {
    pub(super) fn new() -> Attendant {
        Attendant { shared: Arc::default(), waiting: AtomicUsize::new(0), fork: sys::fork::generation() }
    }

    /// This thread waits for devices, and moves what is on them, until the answer is dropped.
    pub(super) fn wait(&self) -> Counted<'_> {
        Counted::among(&self.waiting)
    }

    /// How many threads do.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Has it look for work.
    pub(super) fn engage(&self, endpoint: &Weak<Endpoint>) {
        if self.shared.awake.swap(true, Ordering::SeqCst) || self.fork != sys::fork::generation() {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.looked_at = Some(Instant::now());
        if !state.begun {
            let (shared, endpoint) = (self.shared.clone(), endpoint.clone());
            match sys::process::spawn("unisono-gpu", move || shared.attend(&endpoint)) {
                Ok(_) => state.begun = true,
                Err(cause) => {
                    self.shared.awake.store(false, Ordering::SeqCst);
                    log::error!("no thread can be had for calls on GPUs that nobody waits for: {cause}");
                }
            }
        }
        drop(state);
        self.shared.changed.notify_one();
    }

    /// Whether it has not come back from the driver for long.
    pub(super) fn is_held_up(&self) -> bool {
        let looked_at = lock(&self.shared.state).looked_at;
        self.shared.awake.load(Ordering::Relaxed) && looked_at.is_some_and(|at| at.elapsed() > HELD_UP)
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        // In the child of a fork there is no such thread, and it may have held the lock.
        if self.fork == sys::fork::generation() {
            lock(&self.shared.state).closing = true;
            self.shared.changed.notify_one();
        }
    }
}

impl Shared {
    /// What the thread does. It keeps the endpoint only while it works for it.
    fn attend(&self, endpoint: &Weak<Endpoint>) {
        let (mut leave, mut looked_at, mut looks) = (Leave::default(), Instant::now(), true);
        loop {
            let Some(this) = endpoint.upgrade() else { return };
            let pause = this.attend_devices(&mut leave);
            if !looks || looked_at.elapsed() >= LOOK {
                looks = this.look_at_streams();
                looked_at = Instant::now();
            }
            lock(&self.state).looked_at = Some(Instant::now());
            if let Some(pause) = pause {
                drop(this);
                // Who has work for it finds it awake, and goes on.
                std::thread::sleep(pause);
                continue;
            }
            self.awake.store(false, Ordering::SeqCst);
            // Against `engage`: either it finds this asleep, or this finds what it is to do.
            fence(Ordering::SeqCst);
            if this.needs_attendant() || !looks && this.watches_devices() {
                self.awake.store(true, Ordering::SeqCst);
                continue;
            }
            drop(this);
            if !self.sleep(looks.then_some(LOOK)) {
                return;
            }
        }
    }

    /// Sleeps until there is work, or for so long. Not if the endpoint is gone.
    fn sleep(&self, nap: Option<Duration>) -> bool {
        let until = nap.map_or(Deadline::NEVER, Deadline::after);
        let mut state = lock(&self.state);
        while !state.closing && !self.awake.load(Ordering::SeqCst) && !until.expired() {
            state = match until.remaining() {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        self.awake.store(true, Ordering::SeqCst);
        !state.closing
    }
}
