//! Memory that sparse calls work in, kept by the context: pages that are new to the process cost more than what is done
//! with them.

use std::sync::{Arc, Mutex, Weak};

use crate::engine::endpoint::lock;
use crate::error::{Result, fail};
use crate::sys::fork;

/// Bytes that are kept between calls, at most; and in how many pieces.
const KEPT_BYTES: usize = 512 * 1024 * 1024;
const KEPT: usize = 8;

/// What calls have given back.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<u64>>>);

impl Pool {
    /// Room for so many words, whatever they are.
    pub(super) fn take(self: &Arc<Pool>, len: usize) -> Result<Words> {
        let mut kept = lock(&self.0);
        let fitting = (0..kept.len()).filter(|&at| kept[at].len() >= len);
        let memory = match fitting.min_by_key(|&at| kept[at].len()) {
            Some(at) => kept.swap_remove(at),
            None => {
                drop(kept);
                zeroed(rounded(len))?
            }
        };
        Ok(Words { memory, len, pool: Arc::downgrade(self), fork: fork::generation() })
    }

    /// Keeps the memory, rather than what is shorter.
    fn keep(&self, memory: Vec<u64>) {
        let bytes = |kept: &[Vec<u64>]| kept.iter().map(|memory| memory.len() * 8).sum::<usize>();
        if memory.is_empty() || bytes(std::slice::from_ref(&memory)) > KEPT_BYTES {
            return;
        }
        let (mut kept, mut surplus) = (lock(&self.0), Vec::new());
        kept.push(memory);
        while kept.len() > KEPT || bytes(&kept) > KEPT_BYTES {
            let shortest = (0..kept.len()).min_by_key(|&at| kept[at].len());
            surplus.extend(shortest.map(|at| kept.swap_remove(at)));
        }
        drop(kept);
    }
}

/// Memory that is looked at as bytes or as words. Dropping it gives it back, if the context is still there.
#[derive(Debug)]
pub(super) struct Words {
    memory: Vec<u64>,
    len: usize,
    pool: Weak<Pool>,
    /// In which process it was made.
    fork: u32,
}

impl Words {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn words(&self) -> &[u64] {
        &self.memory[..self.len]
    }

    pub(super) fn words_mut(&mut self) -> &mut [u64] {
        &mut self.memory[..self.len]
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let words = self.words();
        // SAFETY: the words hold so many bytes, all initialised.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytes_mut(self.words_mut())
    }

    /// The first byte, without a claim on those that were given out before.
    pub(super) fn address(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast()
    }
}

/// Words as bytes, to be written.
pub(super) fn bytes_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: the words hold so many bytes, all initialised, and any bytes are words.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

impl Drop for Words {
    fn drop(&mut self) {
        // In a forked child a thread that does not exist may have the lock.
        if self.fork == fork::generation()
            && let Some(pool) = self.pool.upgrade()
        {
            pool.keep(std::mem::take(&mut self.memory));
        }
    }
}

/// A little more than is needed, so that calls of about one size find what they need.
fn rounded(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 16).max(512);
    len.checked_next_multiple_of(grain).unwrap_or(len)
}

/// Zeros, or an error where `vec!` would end the process.
fn zeroed(count: usize) -> Result<Vec<u64>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(count) {
        Ok(()) => list.resize(count, 0),
        Err(_) => fail!(OutOfMemory, "no memory for {count} numbers of {} bytes", size_of::<u64>()),
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_taken_again() {
        let pool = Arc::new(Pool::default());
        let mut first = pool.take(100_000).expect("memory");
        let (address, other) = (first.address(), pool.take(1).expect("memory"));
        drop((first, other));
        // A little longer or a lot shorter, it is the same.
        for len in [99_000, 101_000, 20_000] {
            assert_eq!(pool.take(len).expect("memory").address(), address, "{len} words");
        }
        assert_eq!(lock(&pool.0).len(), 2);
    }

    #[test]
    fn what_has_become_too_short_makes_way() {
        let pool = Arc::new(Pool::default());
        for len in (1..40).map(|times| times * 50_000) {
            assert_eq!(pool.take(len).expect("memory").bytes().len(), len * 8);
        }
        let kept: Vec<usize> = lock(&pool.0).iter().map(Vec::len).collect();
        assert_eq!(kept.len(), KEPT);
        assert!(kept.iter().all(|len| *len > 1_000_000), "{kept:?}");
    }

    #[test]
    fn no_more_is_kept_than_is_said() {
        let pool = Arc::new(Pool::default());
        drop(pool.take(KEPT_BYTES / 8 + 1).expect("memory"));
        assert_eq!(lock(&pool.0).len(), 0);
        let many: Vec<Words> = (0..2 * KEPT).map(|_| pool.take(1).expect("memory")).collect();
        drop(many);
        assert_eq!(lock(&pool.0).len(), KEPT);
        assert!(pool.take(usize::MAX / 16).is_err());
    }
}
