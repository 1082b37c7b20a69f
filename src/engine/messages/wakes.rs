//! Who is told that something has come to a mailbox at which nobody looks.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{Mailbox, Messages};
use crate::engine::endpoint::{Sleeper, lock};
use crate::engine::lane::Ticket;

/// The names of those to whose mailboxes something has come, until somebody takes them.
#[derive(Default)]
pub struct Wakes {
    any: AtomicBool,
    names: Mutex<Vec<u64>>,
}

impl Wakes {
    fn add(&self, name: u64) {
        lock(&self.names).push(name);
        self.any.store(true, Ordering::Release);
    }

    /// Whether any have come.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Those that have come.
    pub fn take(&self) -> Vec<u64> {
        if !self.any() {
            return Vec::new();
        }
        // Before they are taken: of one that comes behind that is told again.
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.names))
    }
}

impl Mailbox {
    /// The transfer of a step has ended.
    pub(super) fn tell(&mut self, step: u32, wakes: &Wakes) {
        self.done.push(step);
        self.wake(wakes);
    }

    /// Something has come.
    pub(super) fn wake(&mut self, wakes: &Wakes) {
        if let Some(sleeper) = self.sleeper.take() {
            wakes.add(sleeper);
        }
        self.wake_thread();
    }

    pub(super) fn wake_thread(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.wake();
        }
    }
}

impl Messages {
    /// A transfer has ended.
    pub(super) fn note_done(&mut self, ticket: Ticket) {
        self.mailboxes[ticket.mailbox as usize].tell(ticket.step, &self.wakes);
    }

    /// [`Wakes`] has the name of `sleeper` as soon as there is something in this mailbox.
    pub fn wake_for(&mut self, mailbox: u32, sleeper: u64) {
        let slot = &mut self.mailboxes[mailbox as usize];
        slot.sleeper = Some(sleeper);
        if !slot.done.is_empty() || slot.failed.is_some() {
            slot.wake(&self.wakes);
        }
    }

    /// This thread, which is about to sleep, is woken as soon as there is something in this mailbox, or it is
    /// closed. Not if another sleeps for that: then this one sleeps for anything.
    pub fn wake_thread_for(&mut self, mailbox: u32, thread: &Arc<Sleeper>) -> bool {
        let slot = &mut self.mailboxes[mailbox as usize];
        // One that was woken by something else is still noted.
        let is_other = |other: &Arc<Sleeper>| !Arc::ptr_eq(other, thread) && other.is_asleep();
        if slot.thread.as_ref().is_some_and(is_other) {
            return false;
        }
        slot.thread = Some(thread.clone());
        if !slot.done.is_empty() || slot.failed.is_some() {
            slot.wake_thread();
        }
        true
    }
}
