//! A store inside one process, for ranks that are threads.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::store::{self, Store};
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::sys::fork;

type Entries = HashMap<String, Vec<u8>>;

/// A dictionary in memory. Share it between the ranks by `Arc`.
pub struct HashStore {
    entries: Mutex<Entries>,
    changed: Condvar,
    /// Where it was made. In a forked child a thread that does not exist there may have the lock, and have
    /// changed the entries by half.
    fork: u32,
}

impl HashStore {
    /// An empty store.
    pub fn new() -> HashStore {
        HashStore { entries: Mutex::default(), changed: Condvar::new(), fork: fork::generation() }
    }

    fn lock(&self) -> Result<MutexGuard<'_, Entries>> {
        if self.fork != fork::generation() {
            fail!(
                InvalidUsage,
                "the {} was made before a fork: it is for the threads of the parent. Make another in the child",
                self.describe()
            );
        }
        // No code panics between two states of the map, so a poisoned one is whole.
        Ok(self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Default for HashStore {
    fn default() -> HashStore {
        HashStore::new()
    }
}

impl Drop for HashStore {
    fn drop(&mut self) {
        if self.fork != fork::generation() {
            // They may be half changed: they stay where they are.
            let entries = self.entries.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(entries));
        }
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        self.lock()?.insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let since = Instant::now();
        let mut entries = self.lock()?;
        loop {
            if let Some(value) = entries.get(key) {
                return Ok(value.clone());
            }
            if deadline.expired() {
                return Err(store::timed_out(self, key, since));
            }
            entries = match deadline.remaining() {
                Some(left) => {
                    self.changed.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn try_get(&self, key: &str, _deadline: Deadline) -> Result<Option<Vec<u8>>> {
        Ok(self.lock()?.get(key).cloned())
    }

    fn add(&self, key: &str, amount: i64, _deadline: Deadline) -> Result<i64> {
        let mut entries = self.lock()?;
        let sum = store::sum(self, key, entries.get(key).map(Vec::as_slice), amount)?;
        entries.insert(key.to_owned(), sum.to_string().into_bytes());
        drop(entries);
        self.changed.notify_all();
        Ok(sum)
    }

    fn describe(&self) -> String {
        "in-process store".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rendezvous::battery;

    #[test]
    fn passes_the_battery() {
        let store = Arc::new(HashStore::new());
        battery::run(|| store.clone());
    }
}
