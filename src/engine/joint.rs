//! Local work that several threads of a rank do together: whoever waits and the helpers that have time just
//! then (`hauling`). Nobody waits for a helper that has not begun.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use super::endpoint::lock;
use crate::sys;

/// Threads that share local work.
pub trait Team {
    /// How many there may be, at least one.
    fn threads(&self) -> usize;

    /// Calls `work` for each part from 0 on, each once, by whichever threads. All have returned when this
    /// returns.
    fn together(&self, parts: usize, work: &(dyn Fn(usize) + Sync));
}

/// One thread: the caller.
#[derive(Debug)]
pub struct Alone;

impl Team for Alone {
    fn threads(&self) -> usize {
        1
    }

    fn together(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..parts).for_each(work);
    }
}

/// Does each task once. An error if one of them has failed: whichever was first.
pub fn share<T: Send, E: Send + Sync>(
    team: &dyn Team,
    tasks: Vec<T>,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let tasks: Vec<Mutex<Option<T>>> = tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    let failure: OnceLock<E> = OnceLock::new();
    team.together(tasks.len(), &|part| {
        let task = lock(&tasks[part]).take();
        if let Some(Err(error)) = task.map(&work) {
            let _ = failure.set(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Shorter copies than so many parts are done by one thread: others may have to be woken.
pub(super) const FEWEST_PARTS: usize = 4;

/// What several threads read and write, each another part of it.
pub(super) struct Shared<T>(pub(super) T);

// SAFETY: it names memory that the threads of the library may use, of which no two have the same part (the
// promise of whoever makes one).
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    pub(super) fn get(&self) -> T {
        self.0
    }
}

/// Copies, by several threads if it is long, each `part` bytes at a time.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`], from any thread.
pub(super) unsafe fn copy(team: &dyn Team, from: *const u8, to: *mut u8, len: usize, part: usize) {
    if len < FEWEST_PARTS * part {
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    let ends = Shared((from, to));
    team.together(len.div_ceil(part), &|number| {
        let ((from, to), start) = (ends.get(), number * part);
        // SAFETY: the caller's promise; `start` is below the length.
        unsafe { std::ptr::copy_nonoverlapping(from.add(start), to.add(start), part.min(len - start)) };
    });
}

/// A call of `work` for each part from 0 on, each once.
pub(super) struct Joint {
    work: *const (dyn Fn(usize) + Sync),
    parts: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    panicked: AtomicBool,
}

// SAFETY: `work` is called by several threads, which its type allows, and only for parts that are taken
// before `Joint::finish` has returned, until when it is there (the promise of `Joint::new`).
unsafe impl Send for Joint {}
// SAFETY: as above.
unsafe impl Sync for Joint {}

impl Joint {
    /// None taken yet.
    ///
    /// # Safety
    /// `work` stays valid until [`Joint::finish`] has returned.
    pub(super) unsafe fn new(parts: usize, work: &(dyn Fn(usize) + Sync)) -> Joint {
        // SAFETY: only the lifetime changes; the caller's promise is what it stood for.
        let work = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(work)
        };
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Joint { work, parts, next, done, panicked: AtomicBool::new(false) }
    }

    fn take(&self) -> Option<Part<'_>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Made only where there is one: it counts when it is dropped.
        (number < self.parts).then(|| Part { of: self, number })
    }

    /// Takes parts until there are none.
    pub(super) fn help(&self) {
        while let Some(part) = self.take() {
            // SAFETY: the part is not done, so `finish` has not returned.
            unsafe { (*self.work)(part.number) };
        }
    }

    /// Whether `work` has panicked for a part, in any thread. Known once [`Joint::finish`] has returned.
    pub(super) fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Relaxed)
    }

    /// Waits until the parts that were taken are over. No other is taken after that.
    pub(super) fn finish(&self) {
        while self.take().is_some() {}
        for looks in 0_u32.. {
            if self.done.load(Ordering::Acquire) >= self.parts {
                return;
            }
            match looks {
                0..1000 => std::hint::spin_loop(),
                _ => sys::process::yield_now(),
            }
        }
    }
}

/// A part that somebody has taken: over when this is dropped, also by a panic.
struct Part<'a> {
    of: &'a Joint,
    number: usize,
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.of.panicked.store(true, Ordering::Relaxed);
        }
        self.of.done.fetch_add(1, Ordering::Release);
    }
}

/// Finishes, also when whoever has asked for help panics.
pub(super) struct Finish<'a>(pub(super) &'a Joint);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU8;
    use std::time::Duration;

    #[test]
    fn each_part_is_done_once_by_whoever_has_time() {
        for helpers in 0..4 {
            for parts in [0, 1, 2, 5, 40] {
                let counts: Vec<AtomicU8> = (0..parts).map(|_| AtomicU8::new(0)).collect();
                let work = |part: usize| {
                    // Some are still at work when there is no part left.
                    std::thread::sleep(Duration::from_millis(part as u64 % 3));
                    counts[part].fetch_add(1, Ordering::Relaxed);
                };
                // SAFETY: `work` outlives the call of `finish` below.
                let joint = Arc::new(unsafe { Joint::new(parts, &work) });
                std::thread::scope(|scope| {
                    for _ in 0..helpers {
                        scope.spawn(|| joint.help());
                    }
                    joint.help();
                    joint.finish();
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                });
                assert!(joint.take().is_none(), "a late helper does nothing");
            }
        }
    }

    #[test]
    fn a_panic_leaves_no_part_undone() {
        let work = |part: usize| assert_ne!(part, 3, "as told");
        // SAFETY: `work` outlives both calls of `finish` below.
        let joint = unsafe { Joint::new(8, &work) };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _finish = Finish(&joint);
            joint.help();
        }));
        assert!(panicked.is_err() && joint.has_panicked());
        joint.finish();
    }
}
