//! The thread that asks the driver, for calls that nobody waits for.
//!
//! A driver call may not return until a device is done, since another thread of the program frees memory,
//! say, and the device may wait for this process. So the service thread makes none, or nothing would hear
//! that a peer has died, answer those who ask, or see a deadline pass; nor does a thread that waits for
//! something else. This thread moves operations on devices unless a thread that waits for one does, and looks
//! at calls that streams do. It may be held up; the service thread sees that from outside
//! ([`Endpoint::oversee_devices`]), and ends what the devices wait for.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::away::Waits;
use super::unattended::Leave;
use super::{Endpoint, Visitor, lock};
use crate::deadline::Deadline;
use crate::sys;

/// How often calls that streams do are looked at.
pub(super) const ATTENDANT_LOOK: Duration = Duration::from_millis(50);

/// A look that takes longer is held up.
const HELD_UP: Duration = Duration::from_secs(1);

/// The thread, which begins with its first work, and what others know of it.
pub(super) struct Attendant {
    shared: Arc<Shared>,
    /// Threads that wait for devices, itself among them: one is enough.
    waiting: AtomicUsize,
    fork: u32,
}

/// What the thread does: it sleeps until it is engaged,
const ASLEEP: u8 = 0;
/// leaves a program alone that waits for what it begins, unless streams wait,
const PAUSING: u8 = 1;
/// or will look for work before it does either.
const AWAKE: u8 = 2;

/// What it is to do next.
pub(super) enum Next {
    /// There is nothing to move.
    Rest,
    /// Leave the program alone for so long.
    Leave(Duration),
    /// Look again.
    Again,
}

#[derive(Default)]
struct Shared {
    /// One of the three.
    mood: AtomicU8,
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
    pub(super) fn wait(&self) -> Waits<'_> {
        Waits::among(&self.waiting)
    }

    /// Where such threads are counted.
    pub(super) fn count(&self) -> &AtomicUsize {
        &self.waiting
    }

    /// How many threads do.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Has it look for work; if it leaves the program alone, only if that is `urgent`.
    pub(super) fn engage(&self, endpoint: &Weak<Endpoint>, urgent: bool) {
        let wake = |mood| (mood == ASLEEP || mood == PAUSING && urgent).then_some(AWAKE);
        let mood = &self.shared.mood;
        if mood.fetch_update(Ordering::SeqCst, Ordering::SeqCst, wake).is_err()
            || self.fork != sys::fork::generation()
        {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.looked_at = Some(Instant::now());
        if !state.begun {
            let (shared, endpoint) = (self.shared.clone(), Visitor::of(endpoint));
            match sys::process::spawn("unisono-gpu", move || shared.attend(&endpoint)) {
                Ok(_) => state.begun = true,
                Err(cause) => {
                    mood.store(ASLEEP, Ordering::SeqCst);
                    log::error!("no thread can be had for calls on GPUs that nobody waits for: {cause}");
                }
            }
        }
        drop(state);
        self.shared.changed.notify_one();
    }

    /// Whether it looks for work, or works.
    pub(super) fn is_awake(&self) -> bool {
        self.shared.mood.load(Ordering::Relaxed) == AWAKE
    }

    /// Whether it has not come back from the driver for long.
    pub(super) fn is_held_up(&self) -> bool {
        let looked_at = lock(&self.shared.state).looked_at;
        self.shared.mood.load(Ordering::Relaxed) == AWAKE
            && looked_at.is_some_and(|at| at.elapsed() > HELD_UP)
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
    fn attend(&self, endpoint: &Visitor) {
        sys::process::sleep_on_time();
        let (mut leave, mut looked_at, mut looks) = (Leave::default(), Instant::now(), true);
        loop {
            let Some(this) = endpoint.enter() else { return };
            let next = this.attend_devices(&mut leave);
            if !looks || looked_at.elapsed() >= ATTENDANT_LOOK {
                looks = this.look_at_streams();
                looked_at = Instant::now();
            }
            lock(&self.state).looked_at = Some(Instant::now());
            let (mood, nap) = match next {
                Next::Again => continue,
                Next::Leave(time) => (PAUSING, Some(time)),
                Next::Rest => (ASLEEP, looks.then_some(ATTENDANT_LOOK)),
            };
            self.mood.store(mood, Ordering::SeqCst);
            // Against `engage`: either it finds this asleep, or this finds what it is to do.
            fence(Ordering::SeqCst);
            let wanted = match mood {
                PAUSING => this.streams_wait(),
                _ => this.needs_attendant() || !looks && this.watches_devices(),
            };
            if wanted {
                self.mood.store(AWAKE, Ordering::SeqCst);
                continue;
            }
            drop(this);
            if !self.sleep(nap) {
                return;
            }
        }
    }

    /// Sleeps until there is work, or for so long. Not if the endpoint is gone.
    fn sleep(&self, nap: Option<Duration>) -> bool {
        let until = nap.map_or(Deadline::NEVER, Deadline::after);
        let mut state = lock(&self.state);
        while !state.closing && self.mood.load(Ordering::SeqCst) != AWAKE && !until.expired() {
            state = match until.remaining() {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        self.mood.store(AWAKE, Ordering::SeqCst);
        !state.closing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_streams_wait_for_calls_the_thread_while_it_leaves_a_program_alone() {
        let attendant = Attendant::new();
        // The test is the thread.
        lock(&attendant.shared.state).begun = true;
        let mood = || attendant.shared.mood.load(Ordering::SeqCst);
        let nobody = Weak::new();
        attendant.shared.mood.store(PAUSING, Ordering::SeqCst);
        attendant.engage(&nobody, false);
        assert_eq!(mood(), PAUSING, "what the program may wait for itself calls nobody");
        let long = Duration::from_secs(60);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| attendant.shared.sleep(Some(long)));
            attendant.engage(&nobody, true);
            assert!(pause.join().expect("sleeps"));
        });
        assert!(begun.elapsed() < long);
        assert_eq!(mood(), AWAKE);
        // Asleep, it comes for either.
        attendant.shared.mood.store(ASLEEP, Ordering::SeqCst);
        attendant.engage(&nobody, false);
        assert_eq!(mood(), AWAKE);
    }
}
