//! A store: a small shared dictionary through which ranks publish where they are.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};

/// The end of the key under which a rank that cannot join says why. A TCP store ends the waits for all keys
/// that begin as it does, and passes on at once what it says, for who looks when the store is gone.
pub const REFUSAL: &str = "unisono/refused";

/// Keys to values, shared by all ranks of a job. Values are written once for each key in unisono's own use.
/// Every method may be called from several threads.
///
/// `deadline` is when to give up on a store that does not answer. What was asked of it may still happen
/// afterwards.
pub trait Store: Send + Sync {
    /// Writes `value` under `key` and wakes whoever waits for it.
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()>;

    /// Waits until `key` exists and returns its value. A timeout names the key, the store and the time
    /// waited. What is there already is given also when the deadline has passed.
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// The value if the key exists now.
    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>>;

    /// Adds to the number under `key` (0 if absent; kept as decimal text) and returns the sum. Atomic over
    /// all ranks.
    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64>;

    /// What is to be said if this process goes before `key` exists: `notice` under `refusal`, unless
    /// something is there, and nothing under `key`. For stores that learn of a process's end.
    fn will(&self, _key: &str, _refusal: &str, _notice: &[u8], _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// Why nobody gets through to it, if this process serves it and that is so now and has been for a while.
    fn shut(&self) -> Option<String> {
        None
    }

    /// What it is and where, for errors: `file store /tmp/x`, `tcp store 10.0.0.1:2950`.
    fn describe(&self) -> String;

    /// The file that `key` is in, whether it exists or not, if each has one.
    fn file_of(&self, _key: &str) -> Option<PathBuf> {
        None
    }

    /// Whether a `get` that its deadline ends is told from one that failed, by [`Status::Timeout`], and the
    /// next is as good: then a long wait may be cut into turns. The library's own are so.
    fn has_turns(&self) -> bool {
        true
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        (**self).set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        (**self).get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        (**self).try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        (**self).add(key, amount, deadline)
    }

    fn will(&self, key: &str, refusal: &str, notice: &[u8], deadline: Deadline) -> Result<()> {
        (**self).will(key, refusal, notice, deadline)
    }

    fn shut(&self) -> Option<String> {
        (**self).shut()
    }

    fn describe(&self) -> String {
        (**self).describe()
    }

    fn file_of(&self, key: &str) -> Option<PathBuf> {
        (**self).file_of(key)
    }

    fn has_turns(&self) -> bool {
        (**self).has_turns()
    }
}

/// The sum that `add` stores, from the value under `key` now.
pub(super) fn sum(store: &dyn Store, key: &str, current: Option<&[u8]>, amount: i64) -> Result<i64> {
    let number = match current {
        None => 0,
        Some(value) => match std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()) {
            Some(number) => number,
            None => fail!(
                InvalidUsage,
                "add to key {}: its {} bytes are not a decimal number (in {})",
                quoted(key),
                value.len(),
                store.describe()
            ),
        },
    };
    match number.checked_add(amount) {
        Some(sum) => Ok(sum),
        None => fail!(
            InvalidUsage,
            "add to key {}: {number} + {amount} does not fit 64 bits (in {})",
            quoted(key),
            store.describe()
        ),
    }
}

/// The error of a `get` whose deadline passed.
pub fn timed_out(store: &dyn Store, key: &str, since: Instant) -> Error {
    let text = format!(
        "key {} was not set within {:.1} s in {}; look at the rank that should set it, or raise the timeout",
        quoted(key),
        since.elapsed().as_secs_f64(),
        store.describe()
    );
    Error::new(Status::Timeout, text)
}

/// A key as errors show it: escaped, in quotes, the end of a very long one left out.
pub(super) fn quoted(key: &str) -> String {
    const SHOWN: usize = 100;
    let mut text = String::from("'");
    text.extend(key.chars().take(SHOWN).flat_map(char::escape_debug));
    text.push_str(if key.chars().nth(SHOWN).is_some() { "…'" } else { "'" });
    text
}
