//! The dictionary of a server, of a limited size. What it refuses it says in a text for the client.

use std::collections::HashMap;
use std::sync::Arc;

/// Values by their keys. Values are shared with the answers on their way.
pub(super) struct Entries {
    values: HashMap<Vec<u8>, Arc<[u8]>>,
    /// Bytes of all keys and values.
    stored: usize,
    limit: usize,
}

impl Entries {
    /// None, and room for `limit` bytes of keys and values.
    pub(super) fn new(limit: usize) -> Entries {
        Entries { values: HashMap::new(), stored: 0, limit }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<Arc<[u8]>> {
        self.values.get(key).cloned()
    }

    /// Puts `value` under `key`, in place of what was there, and gives it as it is shared from now on.
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Result<Arc<[u8]>, String> {
        let old = self.values.get(key).map_or(0, |old| key.len() + old.len());
        let stored = self.stored - old + key.len() + value.len();
        if stored > self.limit {
            return Err(format!("the store is full ({} of {} bytes are used)", self.stored, self.limit));
        }
        self.stored = stored;
        let value: Arc<[u8]> = value.into();
        self.values.insert(key.to_vec(), value.clone());
        Ok(value)
    }

    /// The decimal number under `key`, 0 if absent, and `amount` together. Changes nothing.
    pub(super) fn sum(&self, key: &[u8], amount: i64) -> Result<i64, String> {
        let number = match self.values.get(key) {
            None => 0,
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or_else(|| format!("its {} bytes are not a decimal number", value.len()))?,
        };
        number.checked_add(amount).ok_or_else(|| format!("{number} + {amount} does not fit 64 bits"))
    }
}
