//! Values of the whole process, behind locks that a forked child finds free.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::fork;

/// A value of the whole process behind a lock.
///
/// A child that is forked while another thread has an ordinary lock finds it taken for ever, by a thread that
/// does not exist there, and what it guards half changed. So whoever forks takes all of these before, and
/// gives them back in both processes. For that, a thread that has one of them takes no other, but for one
/// made by [`Global::last`]; it does not fork, and it does not keep it for long.
pub struct Global<T: 'static> {
    value: RwLock<T>,
    is_last: bool,
    is_listed: AtomicBool,
    /// The lock, while its process forks.
    held: UnsafeCell<Option<RwLockWriteGuard<'static, T>>>,
}

// SAFETY: as an `RwLock`; only a thread that has it for writing touches `held`: see there.
unsafe impl<T: Send + Sync> Sync for Global<T> {}

impl<T: Send + Sync + 'static> Global<T> {
    /// Behind a lock that is taken alone.
    pub const fn new(value: T) -> Global<T> {
        Global::made(value, false)
    }

    /// Behind a lock that may be taken with another.
    pub const fn last(value: T) -> Global<T> {
        Global::made(value, true)
    }

    const fn made(value: T, is_last: bool) -> Global<T> {
        Global {
            value: RwLock::new(value),
            is_last,
            is_listed: AtomicBool::new(false),
            held: UnsafeCell::new(None),
        }
    }

    /// To look at. A panic elsewhere does not matter: nothing that has the lock can leave the value half
    /// changed.
    pub fn read(&'static self) -> RwLockReadGuard<'static, T> {
        self.enlist();
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// To change.
    pub fn write(&'static self) -> RwLockWriteGuard<'static, T> {
        self.enlist();
        self.value.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn enlist(&'static self) {
        if self.is_listed.load(Ordering::Acquire) {
            return;
        }
        fork::generation();
        let mut list = LIST.value.write().unwrap_or_else(PoisonError::into_inner);
        if !self.is_listed.load(Ordering::Relaxed) {
            let others =
                if self.is_last { list.len() } else { list.iter().take_while(|it| !it.is_last()).count() };
            list.insert(others, self);
            self.is_listed.store(true, Ordering::Release);
        }
    }
}

/// What is done with it at a fork.
trait Hold: Sync {
    fn is_last(&self) -> bool;
    fn hold(&'static self);
    fn release(&'static self);
}

impl<T: Send + Sync> Hold for Global<T> {
    fn is_last(&self) -> bool {
        self.is_last
    }

    fn hold(&'static self) {
        let guard = self.value.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this thread has the lock for writing from here until `release`, and nobody else comes to
        // `held` meanwhile.
        unsafe { *self.held.get() = Some(guard) };
    }

    fn release(&'static self) {
        // SAFETY: called by the thread that `hold` has given the lock, or by its copy in the child.
        drop(unsafe { (*self.held.get()).take() });
    }
}

/// All that have been taken before, those that are last behind the others.
static LIST: Global<Vec<&'static dyn Hold>> = Global::new(Vec::new());

/// Before a fork: takes all.
pub(super) extern "C" fn hold_all() {
    loop {
        let known = LIST.value.read().unwrap_or_else(PoisonError::into_inner).clone();
        known.iter().for_each(|each| each.hold());
        // Not before: whoever has one of them may be about to enlist another.
        LIST.hold();
        // SAFETY: as in `release`: this thread has the lock.
        let count = unsafe { (*LIST.held.get()).as_ref() }.map_or(0, |list| list.len());
        if count == known.len() {
            return;
        }
        LIST.release();
        known.iter().for_each(|each| each.release());
    }
}

/// After it, in both processes: gives them back.
pub(super) extern "C" fn release_all() {
    // SAFETY: as in `release`.
    let list = unsafe { (*LIST.held.get()).take() };
    list.iter().flat_map(|list| list.iter()).for_each(|each| each.release());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;

    /// How a child ends that does `body`.
    fn child(body: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child only takes locks that are held for it, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes no pointers; whoever waits for ever is ended.
            unsafe { libc::alarm(20) };
            let code = i32::from(!body());
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: `status` outlives the call; `child` is a child of ours that nobody else reaps.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status
    }

    #[test]
    fn a_child_finds_the_locks_free_and_the_values_whole() {
        static PAIR: Global<(u32, u32)> = Global::new((0, 0));
        static LOG: Global<u32> = Global::last(0);
        static STOP: AtomicBool = AtomicBool::new(false);
        static TAKEN: AtomicU32 = AtomicU32::new(0);
        let threads = [(); 2].map(|()| {
            thread::spawn(|| {
                while !STOP.load(Ordering::Relaxed) {
                    let mut pair = PAIR.write();
                    pair.0 += 1;
                    *LOG.write() += 1;
                    thread::yield_now();
                    pair.1 += 1;
                    TAKEN.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        while TAKEN.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        for _ in 0..20 {
            let whole = || {
                let pair = *PAIR.read();
                pair.0 == pair.1 && *LOG.write() == pair.0
            };
            assert_eq!(child(whole), 0);
        }
        // Here they are given back, too.
        let before = PAIR.read().0;
        while PAIR.read().0 == before {
            thread::yield_now();
        }
        STOP.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
