//! A part of a store: several jobs, or several communicators, in one dictionary without meeting.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use super::store::Store;
use crate::deadline::Deadline;
use crate::error::Result;

/// The keys of another store that begin with a prefix and a `/`, seen without them.
pub struct PrefixStore<S> {
    store: S,
    prefix: String,
}

impl<S: Store> PrefixStore<S> {
    /// The part of `store` under `prefix`. No key of another prefix is reachable, unless one prefix continues
    /// another after a `/`.
    pub fn new(store: S, prefix: &str) -> PrefixStore<S> {
        PrefixStore { store, prefix: prefix.to_owned() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl<S: Store> Store for PrefixStore<S> {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.set(&self.key(key), value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.store.try_get(&self.key(key), deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.store.add(&self.key(key), amount, deadline)
    }

    fn will(&self, key: &str, refusal: &str, notice: &[u8], deadline: Deadline) -> Result<()> {
        self.store.will(&self.key(key), &self.key(refusal), notice, deadline)
    }

    fn shut(&self) -> Option<String> {
        self.store.shut()
    }

    fn describe(&self) -> String {
        format!("{} under '{}'", self.store.describe(), self.prefix)
    }

    fn file_of(&self, key: &str) -> Option<PathBuf> {
        self.store.file_of(&self.key(key))
    }

    fn has_turns(&self) -> bool {
        self.store.has_turns()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rendezvous::battery;
    use crate::rendezvous::hash::HashStore;

    #[test]
    fn passes_the_battery() {
        let store = Arc::new(HashStore::new());
        battery::run(|| PrefixStore::new(store.clone(), "job 7"));
    }

    #[test]
    fn prefixes_do_not_meet() {
        let shared = Arc::new(HashStore::new());
        let a = PrefixStore::new(shared.clone(), "a");
        let b = PrefixStore::new(shared.clone(), "b");
        a.set("k", b"1", Deadline::NEVER).unwrap();
        assert_eq!(b.try_get("k", Deadline::NEVER).unwrap(), None);
        assert_eq!(shared.try_get("a/k", Deadline::NEVER).unwrap().as_deref(), Some(&b"1"[..]));
        let error = a.get("absent", Deadline::after(std::time::Duration::ZERO)).unwrap_err();
        assert!(error.text().contains("'a/absent'"), "{error}");
    }
}
