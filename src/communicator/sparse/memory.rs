//! Memory that sparse calls work in, kept by the context: pages that are new to the process cost more than
//! what is done with them.

use std::alloc::{self, Layout};
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
#[cfg(test)]
use std::time::Duration;

use crate::engine::endpoint::lock;
use crate::error::{Result, fail};
use crate::sys::fork;

/// Bytes that are kept between calls, at most; and in how many pieces.
const KEPT_BYTES: usize = 512 * 1024 * 1024;
const KEPT: usize = 16;

/// What a caller may keep for as long as it likes has a piece of up to so many bytes, or one of which it
/// fills at least half.
const ANY_BYTES: usize = 1024 * 1024;

/// A piece that so many calls in a row have not taken is not kept any longer.
const IDLE_CALLS: u32 = 16;

/// What calls have given back.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    kept: Mutex<Vec<Piece>>,
    /// In which process it was used first.
    fork: OnceLock<u32>,
    #[cfg(test)]
    pub(super) probe: Probe,
}

/// Memory that is kept.
#[derive(Debug)]
struct Piece {
    memory: Vec<u64>,
    /// How many calls have begun meanwhile.
    idle: u32,
}

/// How tests look at the calls of a context, and hold them up.
#[cfg(test)]
#[derive(Debug, Default)]
pub(super) struct Probe {
    /// How long the next look at local work takes,
    pub(super) stall: Mutex<Duration>,
    /// and how many there have been.
    pub(super) looks: AtomicUsize,
}

#[cfg(test)]
impl Pool {
    /// Whether this goes well in a child that is forked while the lock is taken, as other threads take it: a
    /// child that waits for it does not end well.
    pub(super) fn goes_well_in_a_child(&self, work: impl FnOnce() -> bool) -> bool {
        // Here what it holds goes when the lock has gone.
        let mut work = Some(work);
        let kept = lock(&self.kept);
        let goes_well = fork::tests::in_a_child(|| work.take().is_some_and(|work| work()));
        drop(kept);
        goes_well
    }
}

#[cfg(test)]
impl Probe {
    /// Somebody looks at local work of a call.
    pub(super) fn note(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
        let stall = std::mem::take(&mut *lock(&self.stall));
        std::thread::sleep(stall);
    }
}

impl Pool {
    /// What is kept. None in a forked child: a thread that does not exist there may have the lock.
    fn kept(&self) -> Option<MutexGuard<'_, Vec<Piece>>> {
        let now = fork::generation();
        (*self.fork.get_or_init(|| now) == now).then(|| lock(&self.kept))
    }

    /// A call begins. What the last ones had no use for is given back to the system.
    pub(super) fn begin(&self) {
        let Some(mut kept) = self.kept() else { return };
        let mut surplus = Vec::new();
        kept.iter_mut().for_each(|piece| piece.idle += 1);
        while let Some(at) = kept.iter().position(|piece| piece.idle > IDLE_CALLS) {
            surplus.push(kept.swap_remove(at));
        }
        // The surplus ends without the lock: that takes a while.
        drop(kept);
    }

    /// Room for so many words, whatever they are, until the call is over.
    pub(super) fn take(self: &Arc<Pool>, len: usize) -> Result<Words> {
        self.take_of(len, usize::MAX)
    }

    /// The same for what a caller may keep.
    pub(super) fn take_to_keep(self: &Arc<Pool>, len: usize) -> Result<Words> {
        self.take_of(len, rounded(len).saturating_mul(2).max(ANY_BYTES / 8))
    }

    /// Room for so many words, of a piece that has no more than `most`.
    fn take_of(self: &Arc<Pool>, len: usize, most: usize) -> Result<Words> {
        let memory = match self.fitting(len, most) {
            Some(memory) => memory,
            None => zeroed(rounded(len))?,
        };
        Ok(Words { memory, len, pool: Arc::downgrade(self) })
    }

    /// What is kept and has room for so many words, the shortest.
    fn fitting(&self, len: usize, most: usize) -> Option<Vec<u64>> {
        let mut kept = self.kept()?;
        let fitting = (0..kept.len()).filter(|&at| (len..=most).contains(&kept[at].memory.len()));
        let at = fitting.min_by_key(|&at| kept[at].memory.len())?;
        Some(kept.swap_remove(at).memory)
    }

    /// Keeps the memory, rather than what is shorter.
    fn keep(&self, memory: Vec<u64>) {
        let bytes = |kept: &[Piece]| kept.iter().map(|piece| piece.memory.len() * 8).sum::<usize>();
        let piece = Piece { memory, idle: 0 };
        if piece.memory.is_empty() || bytes(std::slice::from_ref(&piece)) > KEPT_BYTES {
            return;
        }
        let Some(mut kept) = self.kept() else { return };
        let mut surplus = Vec::new();
        kept.push(piece);
        while kept.len() > KEPT || bytes(&kept) > KEPT_BYTES {
            let shortest = (0..kept.len()).min_by_key(|&at| kept[at].memory.len());
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
        if let Some(pool) = self.pool.upgrade() {
            pool.keep(std::mem::take(&mut self.memory));
        }
    }
}

/// A little more than is needed, so that calls of about one size find what they need.
fn rounded(len: usize) -> usize {
    let grain = (len.next_power_of_two() / 16).max(512);
    len.checked_next_multiple_of(grain).unwrap_or(len)
}

/// Zeros, or an error where `vec!` would end the process. The pages of a long list come as they are touched:
/// all at once they would take a while.
fn zeroed(count: usize) -> Result<Vec<u64>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let memory = match Layout::array::<u64>(count) {
        // SAFETY: it is a layout of some bytes.
        Ok(layout) => unsafe { alloc::alloc_zeroed(layout) },
        Err(_) => std::ptr::null_mut(),
    };
    if memory.is_null() {
        fail!(OutOfMemory, "no memory for {count} numbers of {} bytes", size_of::<u64>());
    }
    // SAFETY: the global allocator has just given it, for so many numbers, and zeros are numbers.
    Ok(unsafe { Vec::from_raw_parts(memory.cast(), count, count) })
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
        assert_eq!(lock(&pool.kept).len(), 2);
    }

    #[test]
    fn what_is_much_too_long_is_left_for_others() {
        let pool = Arc::new(Pool::default());
        let mut large = pool.take(8 << 20).expect("memory");
        let address = large.address();
        drop(large);
        let small = pool.take_to_keep(10).expect("memory");
        assert!(small.memory.len() * 8 <= ANY_BYTES, "{} words for 10", small.memory.len());
        let kept: Vec<usize> = lock(&pool.kept).iter().map(|piece| piece.memory.len()).collect();
        assert_eq!(kept.len(), 1);
        assert!(kept[0] >= 8 << 20, "{kept:?}");
        // What fills half of it has it.
        assert_eq!(pool.take_to_keep(4 << 20).expect("memory").address(), address);
    }

    #[test]
    fn what_no_call_has_a_use_for_is_given_back_to_the_system() {
        let pool = Arc::new(Pool::default());
        drop(pool.take(8 << 20).expect("memory"));
        let longest = || lock(&pool.kept).iter().map(|piece| piece.memory.len()).max();
        for call in 0..=IDLE_CALLS {
            let longest = longest().expect("something is kept");
            assert!(longest >= 8 << 20, "after {call} calls it may be wanted again");
            pool.begin();
            drop(pool.take_to_keep(10).expect("memory"));
        }
        assert!(longest().is_some_and(|longest| longest * 8 <= ANY_BYTES), "{:?}", longest());
        assert_eq!(lock(&pool.kept).len(), 1, "what they take is kept");
    }

    #[test]
    fn what_has_become_too_short_makes_way() {
        let pool = Arc::new(Pool::default());
        for len in (1..40).map(|times| times * 50_000) {
            assert_eq!(pool.take(len).expect("memory").bytes().len(), len * 8);
        }
        let kept: Vec<usize> = lock(&pool.kept).iter().map(|piece| piece.memory.len()).collect();
        assert_eq!(kept.len(), KEPT);
        assert!(kept.iter().all(|len| *len > 500_000), "{kept:?}");
    }

    #[test]
    fn a_forked_child_does_not_wait_for_who_has_the_lock() {
        let pool = Arc::new(Pool::default());
        let words = pool.take(10).expect("memory");
        let goes_well = pool.goes_well_in_a_child(|| {
            pool.begin();
            let taken = pool.take(20).is_ok();
            drop(words);
            taken
        });
        assert!(goes_well);
    }

    #[test]
    fn no_more_is_kept_than_is_said() {
        let pool = Arc::new(Pool::default());
        drop(pool.take(KEPT_BYTES / 8 + 1).expect("memory"));
        assert_eq!(lock(&pool.kept).len(), 0);
        let many: Vec<Words> = (0..2 * KEPT).map(|_| pool.take(1).expect("memory")).collect();
        drop(many);
        assert_eq!(lock(&pool.kept).len(), KEPT);
        assert!(pool.take(usize::MAX / 16).is_err());
    }
}
