//! Pools of what calls run in, for the calls behind them, and what of it was left by calls that ended before
//! the device had done with it.

use std::sync::{Mutex, MutexGuard};

use crate::cuda::driver::retry;
use crate::engine::endpoint::lock;
use crate::error::Result;

/// What a pool is made of.
pub(super) trait Stock {
    /// What a call has left.
    type Left: Left;
    /// What is dropped without the pool's lock, since that may ask the driver.
    type Rest;

    /// Takes back what calls have left, with which the device has done.
    fn keep(&mut self, left: Vec<Self::Left>) -> Self::Rest;
}

/// What was in use when its call ended.
pub(super) trait Left {
    /// Whether it still is, where that is known without the driver.
    fn is_used(&self) -> Option<bool>;

    /// Whether it is not any more, as the driver says.
    fn has_ended(&self) -> Result<bool>;
}

/// A pool of the process.
pub(super) struct Pool<S: Stock> {
    shelves: Mutex<Shelves<S>>,
    /// Those who ask the driver what has ended do so one after the other: what they ask about is not in the
    /// pool meanwhile, and another would make something instead of it.
    asking: Mutex<()>,
}

/// What is in a pool.
pub(super) struct Shelves<S: Stock> {
    /// For the next calls.
    pub(super) stock: S,
    left: Vec<S::Left>,
    /// Whether somebody asks the driver about what was left, which is not in the pool meanwhile.
    is_asked_about: bool,
}

impl<S: Stock> Pool<S> {
    pub(super) const fn new(stock: S) -> Pool<S> {
        Pool {
            shelves: Mutex::new(Shelves { stock, left: Vec::new(), is_asked_about: false }),
            asking: Mutex::new(()),
        }
    }

    /// The pool, locked. The driver is asked for nothing meanwhile.
    pub(super) fn lock(&self) -> MutexGuard<'_, Shelves<S>> {
        lock(&self.shelves)
    }

    /// Whether nobody has it locked.
    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        self.shelves.try_lock().is_ok()
    }

    /// Takes back what a call has left, when the device has done with it.
    pub(super) fn park(&self, left: S::Left) {
        self.lock().left.push(left);
    }

    /// Looks what the device has done with of what calls have left: without `asks_driver` only where that is
    /// known without it.
    ///
    /// The driver is asked without the pool's lock: it may be long in coming back, and calls that need
    /// nothing of it take and give back meanwhile.
    pub(super) fn unpark(&self, asks_driver: bool) {
        let mut shelves = self.lock();
        // Mostly there is nothing.
        if shelves.left.is_empty() && !shelves.is_asked_about {
            return;
        }
        let unused = shelves.left.extract_if(.., |left| left.is_used() == Some(false)).collect();
        let rest = shelves.stock.keep(unused);
        drop(shelves);
        drop(rest);
        if !asks_driver {
            return;
        }
        let _asking = lock(&self.asking);
        let mut shelves = self.lock();
        let open: Vec<S::Left> = shelves.left.extract_if(.., |left| left.is_used().is_none()).collect();
        if open.is_empty() {
            return;
        }
        shelves.is_asked_about = true;
        drop(shelves);
        let (mut unused, mut used) = (Vec::new(), Vec::new());
        for left in open {
            match retry(|| left.has_ended()) {
                Ok(true) => unused.push(left),
                Ok(false) => used.push(left),
                // The device is lost to this process, and what it was given with it.
                Err(_) => std::mem::forget(left),
            }
        }
        let mut shelves = self.lock();
        shelves.is_asked_about = false;
        shelves.left.extend(used);
        let rest = shelves.stock.keep(unused);
        drop(shelves);
        drop(rest);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    enum Thing {
        /// Tells that the driver is asked about it, which is long in coming back.
        Asks(Sender<()>, Receiver<()>),
        Knows(Arc<AtomicBool>),
    }

    impl Left for Thing {
        fn is_used(&self) -> Option<bool> {
            match self {
                Thing::Asks(..) => None,
                Thing::Knows(is_used) => Some(is_used.load(Ordering::Relaxed)),
            }
        }

        fn has_ended(&self) -> Result<bool> {
            if let Thing::Asks(asked, answer) = self {
                asked.send(()).expect("the test waits");
                answer.recv().expect("the test answers");
            }
            Ok(true)
        }
    }

    impl Stock for Vec<Thing> {
        type Left = Thing;
        type Rest = ();

        fn keep(&mut self, left: Vec<Thing>) {
            self.extend(left);
        }
    }

    #[test]
    fn what_needs_no_driver_is_taken_back_while_others_ask() {
        let pool: Pool<Vec<Thing>> = Pool::new(Vec::new());
        let kept = || pool.lock().stock.len();
        let ((ask, asked), (answer, answered)) = (channel(), channel());
        let is_used = Arc::new(AtomicBool::new(true));
        pool.park(Thing::Asks(ask, answered));
        pool.park(Thing::Knows(is_used.clone()));
        std::thread::scope(|scope| {
            scope.spawn(|| pool.unpark(true));
            asked.recv().expect("the driver is asked");
            pool.unpark(false);
            assert_eq!(kept(), 0);
            is_used.store(false, Ordering::Relaxed);
            pool.unpark(false);
            let early = kept();
            answer.send(()).expect("it is awaited");
            assert_eq!(early, 1);
        });
        assert_eq!(kept(), 2);
    }

    /// What is asked about may be what it needs.
    #[test]
    fn who_may_ask_the_driver_waits_for_another_that_asks() {
        let pool: Pool<Vec<Thing>> = Pool::new(Vec::new());
        let ((ask, asked), (answer, answered)) = (channel(), channel());
        pool.park(Thing::Asks(ask, answered));
        std::thread::scope(|scope| {
            scope.spawn(|| pool.unpark(true));
            asked.recv().expect("the driver is asked");
            let other = scope.spawn(|| {
                pool.unpark(true);
                pool.lock().stock.len()
            });
            // It has time to come back too early.
            std::thread::sleep(std::time::Duration::from_millis(50));
            answer.send(()).expect("it is awaited");
            assert_eq!(other.join().expect("it ends"), 1);
        });
    }
}
