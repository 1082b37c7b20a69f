//! The end of an endpoint, for the program that lets go of it.
//!
//! Threads of the library hold an endpoint while they work for it, and one of them may be the last to. The
//! program that has destroyed its context goes on meanwhile, and may end the process without handlers
//! (`_exit`): the goodbyes would never be said. So the last handle to go waits for those threads, and for the
//! goodbyes if the endpoint has gone with it.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::reactor::Service;
use super::{DROP_TIMEOUT, Shared};
use crate::deadline::Deadline;
use crate::sys::process;

/// Threads of the library that hold an endpoint for a moment.
#[derive(Default)]
pub struct Visits {
    count: Mutex<Count>,
    none_left: Condvar,
}

#[derive(Default)]
struct Count {
    under_way: usize,
    /// How often none was left.
    ends: u64,
}

/// A thread holds the endpoint, if at all, from after this has begun until before it is dropped.
pub struct Visit(Arc<Visits>);

impl Visits {
    /// Begins one.
    pub fn enter(self: &Arc<Self>) -> Visit {
        self.lock().under_way += 1;
        Visit(Arc::clone(self))
    }

    /// Waits for a moment at which there is none: who holds the endpoint then will go on to.
    fn wait(&self, deadline: Deadline) {
        let mut count = self.lock();
        let before = count.ends;
        while count.under_way > 0 && count.ends == before && !deadline.expired() {
            let left = deadline.remaining_capped(DROP_TIMEOUT);
            count = self.none_left.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut count = self.0.lock();
        count.under_way -= 1;
        if count.under_way == 0 {
            count.ends += 1;
            drop(count);
            self.0.none_left.notify_all();
        }
    }
}

/// Belongs to a handle by which the program holds an endpoint, and goes behind that. The last one waits as
/// said above; not if operations that still run keep the endpoint, nor on a thread of the library that others
/// rely on.
pub struct Parting {
    shared: Arc<Shared>,
    service: &'static Service,
}

impl Parting {
    pub(super) fn new(shared: Arc<Shared>, service: &'static Service) -> Parting {
        shared.handles.fetch_add(1, Ordering::Relaxed);
        Parting { shared, service }
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        let others = self.shared.handles.fetch_sub(1, Ordering::AcqRel) - 1;
        if others > 0 || !self.service.is_mine() || process::is_relied_on() {
            return;
        }
        self.shared.visits.wait(Deadline::after(DROP_TIMEOUT));
        if let Some(&(closed, said)) = self.shared.closes.get() {
            self.shared.await_end(closed, said);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn visits_are_waited_for_until_there_is_none_or_it_takes_too_long() {
        let visits = Arc::<Visits>::default();
        visits.wait(Deadline::NEVER);
        let first = visits.enter();
        let begun = Instant::now();
        visits.wait(Deadline::after(Duration::from_millis(20)));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        // The second begins before the first ends, and may have what that had.
        let second = visits.enter();
        let ended = Mutex::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                drop(first);
                thread::sleep(Duration::from_millis(20));
                *ended.lock().unwrap() = true;
                drop(second);
            });
            visits.wait(Deadline::after(LONG));
            assert!(*ended.lock().unwrap());
        });
    }
}
