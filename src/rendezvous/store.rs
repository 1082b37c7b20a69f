//! A store: a small shared dictionary through which ranks publish where they are.

use crate::deadline::Deadline;
use crate::error::Result;

/// Keys to values, shared by all ranks of a job. Values are written once for each key in unisono's own use.
/// Every method may be called from several threads.
pub trait Store: Send + Sync {
    /// Writes `value` under `key` and wakes whoever waits for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists and returns its value. A timeout names the key, the store and the time waited.
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// The value if the key exists now.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Adds to the number under `key` (0 if absent; kept as decimal text) and returns the sum. Atomic over all ranks.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// What it is and where, for errors: `file store /tmp/x`, `tcp store 10.0.0.1:2950`.
    fn describe(&self) -> String;
}
