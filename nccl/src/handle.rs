//! Handles are numbers. A client's pointer is never followed: it is looked up, and one that was never given out, or was
//! given back, is an error with a text instead of a fault. Numbers are never used again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use unisono::sys::global::Global;

/// What handles stand for, by their numbers.
pub(crate) struct Table<T: 'static> {
    entries: Global<BTreeMap<usize, Arc<T>>>,
    next: AtomicUsize,
}

/// "nccl" in the upper half, which no address has: who follows such a handle faults at once.
const FIRST: usize = 0x6e63_636c_0000_0010;
/// Aligned as an address would be.
const STEP: usize = 16;

impl<T: Send + Sync> Table<T> {
    /// An empty one.
    pub(crate) const fn new() -> Table<T> {
        Table { entries: Global::new(BTreeMap::new()), next: AtomicUsize::new(FIRST) }
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

    /// Takes a handle back.
    pub(crate) fn take<H>(&'static self, handle: *const H) -> Option<Arc<T>> {
        self.entries.write().remove(&handle.addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
