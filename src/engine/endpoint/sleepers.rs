//! Threads that sleep, and who wakes which of them.
//!
//! One of them has the bell: it wakes for what peers and the kernel ring for, and moves everything. Each of
//! the others sleeps on a condition of its own, until somebody means it:
//! - who waits for nothing but what comes to a *mailbox* is told by that, whoever moves what comes, and when
//!   the mailbox is closed ([`Messages::wake_thread_for`]);
//! - who waits for *anything* else is woken whenever something moves or has ended, when a turn comes, and
//!   when the bell has rung, since a ring does not say what it is for;
//! - all are when a group fails, a peer leaves, a link opens, somebody aborts or cancels, or their own naps
//!   are over. Those end in time for what is due: deadlines, and moments to look again at.
//!
//! So nobody who sleeps has anything to move but who has the bell, and somebody has it, or is awake and comes
//! back to it:
//! - who goes to sleep takes it if it is free;
//! - who has had it, or was woken to take it, is awake until it sleeps again, or else lets go of it and wakes
//!   one of those who sleep if it is free then: when it leaves, when it turns to long work, a callback among
//!   that, and before it may be held up in the driver. That one may be about to leave itself, and does the
//!   same then. Who sleeps is here before it looks for the bell; who leaves the bell looks here afterwards:
//!   one of them sees the other;
//! - who may be held up in the driver takes it last of all, when it has asked that;
//! - who has moved something that does not ring, and does not look on, has who has the bell look: when it
//!   leaves, or has looked once only.
//!
//! Who is woken for nothing looks, and sleeps again.
//!
//! The library's threads leave what comes to those who sleep, but not to one that may not look: that has turned
//! to long work in its last look, or that the driver may hold up, there or when it has woken. When the last of
//! the others turns to long work, they are told.
//!
//! [`Messages::wake_thread_for`]: crate::engine::messages::Messages::wake_thread_for

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::lock;
use crate::transport::bell::Bell;

/// A thread that sleeps now and then, for whoever may have to wake it.
pub struct Sleeper {
    bell: Arc<Bell>,
    /// See [`this_thread`].
    thread: usize,
    /// Whether the driver may hold it up when it is woken.
    asks_driver: bool,
    /// Whether the thread has turned to long work, a callback say, in its last look before it sleeps.
    is_away: AtomicBool,
    state: Mutex<State>,
    woken: Condvar,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// Whether it sleeps, or is about to.
    asleep: bool,
    /// Whether it has the bell.
    on_bell: bool,
    woken: bool,
}

impl Sleeper {
    pub(super) fn new(bell: &Arc<Bell>, asks_driver: bool) -> Arc<Sleeper> {
        Arc::new(Sleeper {
            bell: bell.clone(),
            thread: this_thread(),
            asks_driver,
            is_away: AtomicBool::new(false),
            state: Mutex::default(),
            woken: Condvar::new(),
        })
    }

    /// Has it look, if it sleeps or is about to. Under whatever lock.
    pub fn wake(&self) {
        let mut state = lock(&self.state);
        if !state.asleep || std::mem::replace(&mut state.woken, true) {
            return;
        }
        // What rings before it parks has it come back at once.
        match state.on_bell {
            true => self.bell.ring(),
            false => self.woken.notify_one(),
        }
    }

    /// Whether it sleeps, or is about to.
    pub fn is_asleep(&self) -> bool {
        lock(&self.state).asleep
    }

    /// Whether others leave to it what comes while it sleeps, or is about to. Not to one that the driver may
    /// hold up, in its last look or when it has woken, nor to one that is away.
    pub(super) fn is_relied_on(&self) -> bool {
        !self.asks_driver && !self.is_away()
    }

    /// Whether its thread has been at long work since it lay down. Whoever had to wake one did not count on it.
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Relaxed)
    }

    /// Whether somebody has woken it since it lay down.
    pub(super) fn is_woken(&self) -> bool {
        lock(&self.state).woken
    }

    /// Sleeps without the bell until it is woken, or for so long.
    pub(super) fn sleep(&self, nap: Duration) {
        let state = lock(&self.state);
        drop(self.woken.wait_timeout_while(state, nap, |state| !state.woken));
    }
}

/// Threads that wait here, and those of them that sleep.
#[derive(Default)]
pub(super) struct Sleepers {
    /// How many wait, asleep or not, for something that is not on a device: the driver holds them up nowhere.
    pub(super) waiting: AtomicUsize,
    /// How many sleep, or are about to,
    count: AtomicUsize,
    /// of them those that anything may concern,
    count_any: AtomicUsize,
    /// and those that are relied on.
    count_relied_on: AtomicUsize,
    asleep: Mutex<Asleep>,
    /// The thread that has the bell: see [`this_thread`]. 0: none has.
    bell_of: AtomicUsize,
    /// How many of them take a last look before they do.
    pub(super) parking: AtomicUsize,
    /// When the last of them to fall asleep wakes by itself, in the endpoint's age; 0: nobody knows, since
    /// one has woken.
    pub(super) wakes_at: AtomicU64,
    /// How often one has come back.
    #[cfg(test)]
    pub(super) returns: AtomicUsize,
}

#[derive(Default)]
struct Asleep {
    /// Those that anything may concern,
    any: Vec<Arc<Sleeper>>,
    /// and those that are told by their mailboxes.
    by_mail: Vec<Arc<Sleeper>>,
}

impl Asleep {
    fn all(&self) -> impl Iterator<Item = &Arc<Sleeper>> {
        self.any.iter().chain(&self.by_mail)
    }

    /// See [`Sleepers::wake_one`].
    fn wake_one(&self) {
        let own = this_thread();
        let others = || self.all().filter(|sleeper| sleeper.thread != own && !sleeper.is_away());
        if let Some(sleeper) = others().find(|sleeper| !sleeper.asks_driver).or_else(|| others().next()) {
            sleeper.wake();
        }
    }
}

fn take(from: &mut Vec<Arc<Sleeper>>, sleeper: &Arc<Sleeper>) -> Option<Arc<Sleeper>> {
    let at = from.iter().position(|other| Arc::ptr_eq(other, sleeper))?;
    Some(from.remove(at))
}

impl Sleepers {
    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How many.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Whether there are any who see to what comes: see [`Sleeper::is_relied_on`].
    pub(super) fn any_relied_on(&self) -> bool {
        self.count_relied_on.load(Ordering::SeqCst) > 0
    }

    /// Threads that wait here for something on the host, asleep or not.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// This one is about to sleep, for anything, until the answer is dropped. From here on it is woken.
    pub(super) fn lie_down<'a>(&'a self, sleeper: &'a Arc<Sleeper>) -> Lying<'a> {
        *lock(&sleeper.state) = State { asleep: true, ..State::default() };
        sleeper.is_away.store(false, Ordering::Relaxed);
        lock(&self.asleep).any.push(sleeper.clone());
        self.count_any.fetch_add(1, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        self.count_relied_on.fetch_add(usize::from(sleeper.is_relied_on()), Ordering::SeqCst);
        Lying { sleepers: self, sleeper }
    }

    /// Nothing concerns it but what comes to its mailbox, which has been told.
    pub(super) fn expects_mail(&self, sleeper: &Arc<Sleeper>) {
        let mut asleep = lock(&self.asleep);
        if let Some(sleeper) = take(&mut asleep.any, sleeper) {
            asleep.by_mail.push(sleeper);
            self.count_any.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The bell, until the answer is dropped or this thread lets go of it; not if another has it.
    pub(super) fn take_bell(&self, sleeper: &Sleeper) -> Option<Taken<'_>> {
        let free = self.bell_of.compare_exchange(0, this_thread(), Ordering::SeqCst, Ordering::SeqCst);
        free.ok()?;
        lock(&sleeper.state).on_bell = true;
        Some(Taken(self))
    }

    /// This thread, if it has the bell, has it no more.
    fn let_go_of_bell(&self) {
        let _ = self.bell_of.compare_exchange(this_thread(), 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// This thread does not look on, or not soon: it lets go of the bell, and another of those who sleep takes
    /// it, if any does and none has it. Whether it was the last of them that was relied on.
    pub(super) fn hand_on(&self) -> bool {
        self.let_go_of_bell();
        if !self.any() {
            return false;
        }
        let own = this_thread();
        let asleep = lock(&self.asleep);
        let mut was_last = false;
        for sleeper in asleep.all().filter(|sleeper| sleeper.thread == own) {
            let relied_on = usize::from(sleeper.is_relied_on());
            sleeper.is_away.store(true, Ordering::Relaxed);
            let before = self.count_relied_on.fetch_sub(relied_on, Ordering::SeqCst);
            was_last |= relied_on == 1 && before == 1;
        }
        if !self.bell_is_taken() {
            asleep.wake_one();
        }
        was_last
    }

    /// Whether one has the bell, who sleeps, or is about to, or comes back from that at this moment.
    pub(super) fn bell_is_taken(&self) -> bool {
        self.bell_of.load(Ordering::SeqCst) != 0
    }

    /// Wakes those that anything may concern.
    pub(super) fn wake_any(&self) {
        if self.count_any.load(Ordering::SeqCst) > 0 {
            lock(&self.asleep).any.iter().for_each(|sleeper| sleeper.wake());
        }
    }

    /// Wakes another than this thread, and if it may be one that the driver does not hold up.
    pub(super) fn wake_one(&self) {
        lock(&self.asleep).wake_one();
    }

    /// Wakes all.
    pub(super) fn wake_all(&self) {
        lock(&self.asleep).all().for_each(|sleeper| sleeper.wake());
    }
}

/// A thread sleeps, or is about to, until this is dropped.
pub(super) struct Lying<'a> {
    sleepers: &'a Sleepers,
    sleeper: &'a Arc<Sleeper>,
}

impl Drop for Lying<'_> {
    fn drop(&mut self) {
        let mut asleep = lock(&self.sleepers.asleep);
        if take(&mut asleep.any, self.sleeper).is_some() {
            self.sleepers.count_any.fetch_sub(1, Ordering::SeqCst);
        } else {
            take(&mut asleep.by_mail, self.sleeper);
        }
        drop(asleep);
        self.sleepers.count.fetch_sub(1, Ordering::SeqCst);
        let relied_on = usize::from(self.sleeper.is_relied_on());
        self.sleepers.count_relied_on.fetch_sub(relied_on, Ordering::SeqCst);
        lock(&self.sleeper.state).asleep = false;
        #[cfg(test)]
        self.sleepers.returns.fetch_add(1, Ordering::SeqCst);
    }
}

/// The bell is this thread's until this is dropped, or the thread has let go of it.
pub(super) struct Taken<'a>(&'a Sleepers);

impl Taken<'_> {
    /// Whether it still has it.
    pub(super) fn holds(&self) -> bool {
        self.0.bell_of.load(Ordering::SeqCst) == this_thread()
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.let_go_of_bell();
    }
}

/// A number that no other thread has which is there now; not 0.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}
