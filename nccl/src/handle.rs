//! Handles are numbers. A client's pointer is never followed: it is looked up, and one that was never given
//! out, or was given back, is an error with a text instead of a fault. Numbers are never used again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::LocalKey;

use unisono::sys::global::Global;

/// What handles stand for, by their numbers.
pub(crate) struct Table<T: 'static> {
    entries: Global<BTreeMap<usize, Arc<T>>>,
    next: AtomicUsize,
    /// How many handles have been taken back, or stand for something else.
    taken: AtomicU64,
}

/// What a thread has found last. Whoever finds it there again takes no lock.
pub(crate) struct Found<T> {
    entries: [Entry<T>; KEPT],
    /// Which goes next.
    oldest: usize,
}

struct Entry<T> {
    number: usize,
    /// How many handles had been taken back then.
    taken: u64,
    value: Weak<T>,
}

/// How many values a thread keeps in mind: a communicator for each GPU of a host.
const KEPT: usize = 8;

impl<T> Found<T> {
    /// Nothing yet.
    pub(crate) const NOTHING: Found<T> =
        Found { entries: [const { Entry { number: 0, taken: 0, value: Weak::new() } }; KEPT], oldest: 0 };

    fn get(&self, number: usize, taken: u64) -> Option<Arc<T>> {
        let known = self.entries.iter().find(|entry| entry.number == number && entry.taken == taken);
        known?.value.upgrade()
    }

    fn keep(&mut self, entry: Entry<T>) {
        self.entries[self.oldest] = entry;
        self.oldest = (self.oldest + 1) % KEPT;
    }
}

/// "nccl" in the upper half, which no address has: who follows such a handle faults at once.
const FIRST: usize = 0x6e63_636c_0000_0010;
/// Aligned as an address would be.
const STEP: usize = 16;

impl<T: Send + Sync> Table<T> {
    /// An empty one.
    pub(crate) const fn new() -> Table<T> {
        Table {
            entries: Global::new(BTreeMap::new()),
            next: AtomicUsize::new(FIRST),
            taken: AtomicU64::new(0),
        }
    }

    /// Gives `value` a handle.
    pub(crate) fn insert<H>(&'static self, value: Arc<T>) -> *mut H {
        let number = self.next.fetch_add(STEP, Ordering::Relaxed);
        self.entries.write().insert(number, value);
        std::ptr::without_provenance_mut(number)
    }

    /// What a handle stands for.
    pub(crate) fn find<H>(&'static self, handle: *const H) -> Option<Arc<T>> {
        self.entries.read().get(&handle.addr()).cloned()
    }

    /// As [`Table::find`], by what this thread has found last.
    pub(crate) fn find_again<H>(
        &'static self,
        handle: *const H,
        found: &'static LocalKey<RefCell<Found<T>>>,
    ) -> Option<Arc<T>> {
        let (number, taken) = (handle.addr(), self.taken.load(Ordering::Acquire));
        // A thread that ends may have none any more.
        if let Ok(Some(value)) = found.try_with(|found| found.borrow().get(number, taken)) {
            return Some(value);
        }
        let value = self.find(handle)?;
        let entry = Entry { number, taken, value: Arc::downgrade(&value) };
        let _ = found.try_with(|found| found.borrow_mut().keep(entry));
        Some(value)
    }

    /// Takes the handles back of all values that `is_over` says are.
    pub(crate) fn take_all(&'static self, is_over: impl Fn(&T) -> bool) {
        let mut over = Vec::new();
        self.entries.write().retain(|_, value| {
            let stays = !is_over(value);
            if !stays {
                over.push(value.clone());
            }
            stays
        });
        self.taken.fetch_add(1, Ordering::Release);
        // What `over` holds is dropped without the lock.
    }

    /// Has a handle stand for something else from now on. What it stood for; `None`: it was taken back
    /// before.
    pub(crate) fn replace<H>(&'static self, handle: *const H, value: Arc<T>) -> Option<Arc<T>> {
        let before =
            self.entries.write().get_mut(&handle.addr()).map(|entry| std::mem::replace(entry, value));
        self.taken.fetch_add(1, Ordering::Release);
        before
    }

    /// Takes a handle back.
    pub(crate) fn take<H>(&'static self, handle: *const H) -> Option<Arc<T>> {
        let value = self.entries.write().remove(&handle.addr());
        self.taken.fetch_add(1, Ordering::Release);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static FOUND: RefCell<Found<i32>> = const { RefCell::new(Found::NOTHING) };
    }

    #[test]
    fn what_a_thread_has_found_it_finds_again_until_the_handle_is_taken_back() {
        static TABLE: Table<i32> = Table::new();
        let [first, second]: [*mut u8; 2] = [1, 2].map(|value| TABLE.insert(Arc::new(value)));
        for (handle, value) in [(first, 1), (first, 1), (second, 2), (first, 1)] {
            assert_eq!(TABLE.find_again(handle, &FOUND).as_deref(), Some(&value));
        }
        // More than it keeps in mind.
        let many: Vec<*mut u8> =
            (10..10 + 2 * KEPT as i32).map(|value| TABLE.insert(Arc::new(value))).collect();
        for _ in 0..2 {
            for (&handle, value) in many.iter().zip(10..) {
                assert_eq!(TABLE.find_again(handle, &FOUND).as_deref(), Some(&value));
            }
        }
        assert_eq!(TABLE.find_again(first, &FOUND).as_deref(), Some(&1));
        // Nobody else keeps it alive, this thread least of all.
        let number = first.addr();
        let other = std::thread::spawn(move || TABLE.take(std::ptr::without_provenance::<u8>(number)));
        assert_eq!(other.join().expect("no panic").map(Arc::into_inner), Some(Some(1)));
        assert!(TABLE.find_again(first, &FOUND).is_none());
        assert_eq!(TABLE.find_again(second, &FOUND).as_deref(), Some(&2));
        assert!(TABLE.find_again(std::ptr::null::<u8>(), &FOUND).is_none());
    }

    #[test]
    fn a_handle_that_was_given_back_is_nothing_and_never_comes_again() {
        static TABLE: Table<i32> = Table::new();
        let first: *mut u8 = TABLE.insert(Arc::new(1));
        assert_eq!(TABLE.find(first).as_deref(), Some(&1));
        assert_eq!(TABLE.take(first).as_deref(), Some(&1));
        assert!(TABLE.take(first).is_none() && TABLE.find(first).is_none());
        let second: *mut u8 = TABLE.insert(Arc::new(2));
        assert_ne!(first, second);
        assert!(TABLE.find(std::ptr::null::<u8>()).is_none());
    }
}
