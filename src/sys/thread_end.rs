//! What is done when a thread ends.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::panics::caught;

/// Something to do when a thread ends, behind the destructors of all its thread-locals.
///
/// A thread-local that has a destructor is gone for whatever runs after it: destructors of the program's own
/// thread-locals and, on the thread that calls `exit`, all of its atexit handlers and static destructors.
/// They may call the library. So what calls need of their thread lies in thread-locals without one, and is
/// given back by this. `exit` does not run it: the process is at its end, and what runs there finds
/// everything as it was.
#[derive(Debug)]
pub struct ThreadEnd {
    /// The key whose destructor does it, and 1; 0 while there is none. Whoever needs it first makes it
    /// without a lock, which a child forked meanwhile would find locked for ever.
    key: AtomicU64,
    then: fn(),
}

impl ThreadEnd {
    /// `then` is done on the thread that ends.
    pub const fn new(then: fn()) -> ThreadEnd {
        ThreadEnd { key: AtomicU64::new(0), then }
    }

    /// Has it done once, when this thread ends. It may be asked for again while it is done, by what runs
    /// later still: a few times, after which the C library stops. Where the system has no key left it is not
    /// done.
    pub fn arm(&'static self) {
        let Some(key) = self.key() else { return };
        // SAFETY: the key was made by `key` and is never deleted; the value is only passed on, to `run`.
        let failed = unsafe { libc::pthread_setspecific(key, ptr::from_ref(self).cast()) };
        if failed != 0 {
            log::warn!(
                "pthread_setspecific failed with {failed}: this thread leaves memory behind when it ends"
            );
        }
    }

    fn key(&self) -> Option<libc::pthread_key_t> {
        let known = self.key.load(Ordering::Relaxed);
        if known != 0 {
            return Some((known - 1) as libc::pthread_key_t);
        }
        let mut key = 0;
        // SAFETY: `key` outlives the call. `run` lives as long as the library (linked with nodelete), and
        // gets what `arm` has set.
        let failed = unsafe { libc::pthread_key_create(&mut key, Some(run)) };
        if failed != 0 {
            log::warn!("pthread_key_create failed with {failed}: threads leave memory behind when they end");
            return None;
        }
        match self.key.compare_exchange(0, u64::from(key) + 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(key),
            Err(other) => {
                // SAFETY: made above, and nobody else has it.
                unsafe { libc::pthread_key_delete(key) };
                Some((other - 1) as libc::pthread_key_t)
            }
        }
    }
}

extern "C" fn run(end: *mut c_void) {
    // SAFETY: what `arm` has set for this key: a `ThreadEnd` that is never dropped.
    let end = unsafe { &*end.cast::<ThreadEnd>() };
    if let Err(error) = caught(|| {
        (end.then)();
        Ok(())
    }) {
        log::error!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    #[test]
    fn it_is_done_once_behind_all_thread_locals_on_threads_that_asked_for_it() {
        static SEEN: Mutex<Vec<&str>> = Mutex::new(Vec::new());
        static END: ThreadEnd = ThreadEnd::new(|| SEEN.lock().unwrap().push("end"));
        struct Local;
        impl Drop for Local {
            fn drop(&mut self) {
                SEEN.lock().unwrap().push("local");
                END.arm();
            }
        }
        thread_local! {
            static LOCAL: Local = const { Local };
        }
        let ends = |body: fn()| {
            thread::spawn(body).join().unwrap();
            std::mem::take(&mut *SEEN.lock().unwrap())
        };
        assert!(ends(|| {}).is_empty());
        assert_eq!(ends(|| [(); 3].iter().for_each(|()| END.arm())), ["end"]);
        assert_eq!(ends(|| LOCAL.with(|_| END.arm())), ["local", "end"]);
        assert_eq!(ends(|| LOCAL.with(|_| {})), ["local", "end"]);
    }

    #[test]
    fn it_may_ask_for_itself_again() {
        thread_local! {
            static LEFT: Cell<u32> = const { Cell::new(2) };
        }
        static DONE: Mutex<u32> = Mutex::new(0);
        static END: ThreadEnd = ThreadEnd::new(|| {
            *DONE.lock().unwrap() += 1;
            if LEFT.replace(LEFT.get() - 1) > 1 {
                END.arm();
            }
        });
        thread::spawn(|| END.arm()).join().unwrap();
        assert_eq!(*DONE.lock().unwrap(), 2);
    }

    #[test]
    fn a_panic_stays_inside() {
        static END: ThreadEnd = ThreadEnd::new(|| panic!("at the end of a thread"));
        thread::spawn(|| END.arm()).join().unwrap();
    }
}
