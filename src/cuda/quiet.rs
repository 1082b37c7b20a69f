//! When the driver may be kept waiting for a device: while no courier is on one.
//!
//! Who pins memory or gives it back has the driver wait for all that the device was given before, with a lock that launches need. One
//! courier may wait, by way of another rank, for one that this rank is still to launch: calls of a group are launched one by one, on as
//! many streams as they have. So where the program did not ask for it at that moment, such things are done between two calls.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::context::Devices;
use crate::deadline::Deadline;
use crate::sys::process;

/// How long launches may be kept waiting until what has been launched has ended, and how long they go on then at least, at first and at
/// most.
const HELD: Duration = Duration::from_millis(2);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// What couriers are on their way.
#[derive(Default)]
pub(super) struct Quiet {
    /// Held for reading by who launches one.
    launching: RwLock<()>,
    /// How many have been launched and not been dropped.
    couriers: AtomicUsize,
}

impl Quiet {
    /// One is about to be launched.
    pub(super) fn begin(&self) {
        self.couriers.fetch_add(1, Ordering::SeqCst);
    }

    /// It has not been, or has left, or is known to the stands.
    pub(super) fn end(&self) {
        self.couriers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Devices {
    /// For whoever launches a courier, until the answer is dropped: waits for what is done [in quiet](Devices::in_quiet).
    pub(super) fn launching(&self) -> RwLockReadGuard<'_, ()> {
        self.quiet().launching.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a courier is on its way, or may be.
    fn has_couriers(&self) -> bool {
        // In this order: who drops one has told the stands before.
        self.quiet().couriers.load(Ordering::SeqCst) > 0 || self.stands().has_parked()
    }

    /// Has `act` do what the driver may wait for a device with, when no courier is on one and no call asks the driver in its course. Waits for
    /// that, as long as it `is_wanted`, and at worst for as long as the program leaves no gap: so in a thread that nobody waits for.
    pub fn in_quiet<T>(&self, is_wanted: &dyn Fn() -> bool, act: impl FnOnce() -> T) -> Option<T> {
        let mut pause = FIRST_PAUSE;
        while is_wanted() {
            if let (Ok(_launching), Some(_making)) = (self.quiet().launching.try_write(), self.try_making()) {
                let held = Deadline::after(HELD);
                loop {
                    if !self.has_couriers() && !self.is_asked() {
                        return Some(act());
                    }
                    if held.expired() {
                        break;
                    }
                    process::yield_now();
                }
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        None
    }
}

/// What ends in quiet, and so is dropped where nobody waits for that.
#[derive(Debug)]
pub struct Quietly<T> {
    devices: Arc<Devices>,
    /// Until the drop.
    value: Option<T>,
}

impl<T> Quietly<T> {
    /// Holds `value`.
    pub fn new(devices: &Arc<Devices>, value: T) -> Quietly<T> {
        Quietly { devices: devices.clone(), value: Some(value) }
    }
}

impl<T> Deref for Quietly<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // PROOF: nothing but the drop takes it.
        self.value.as_ref().expect("held until the drop")
    }
}

impl<T> Drop for Quietly<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        self.devices.in_quiet(&|| true, || drop(value));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::cuda::courier::{Duty, Errand};
    use crate::cuda::double::{Double, DoubleKernels, Order};
    use crate::cuda::stream::Stream;

    const SOON: Duration = Duration::from_secs(20);
    const MEANWHILE: Duration = Duration::from_millis(50);

    #[test]
    fn what_the_driver_waits_with_is_done_while_no_courier_is_on_its_way() {
        let double = Double::new(1, Order::Eager);
        let devices = Devices::over(double.clone()).expect("a device");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        let kernels = DoubleKernels(double);
        let launched = || {
            let errand = Errand::new(&devices, 0, Duty::default()).expect("a courier");
            // SAFETY: nothing is ordered.
            unsafe { errand.courier().launch(&stream, &kernels) }.expect("it is launched");
            errand
        };
        let first = launched();
        let ((tell, hear), (hold, held)) = (mpsc::channel(), mpsc::channel::<()>());
        let until = Deadline::after(2 * SOON);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let act = move || {
                    tell.send(()).expect("the test listens");
                    held.recv().expect_err("it is dropped");
                };
                devices.in_quiet(&|| !until.expired(), act).expect("it is done");
            });
            assert!(hear.recv_timeout(MEANWHILE).is_err(), "a courier is on its way");
            drop(first);
            // The double's devices do nothing unless somebody asks.
            stream.synchronize(Deadline::after(SOON)).expect("it leaves");
            hear.recv_timeout(SOON).expect("it has left");
            // And now nothing is launched, and something is again when that is over.
            let second = scope.spawn(launched);
            std::thread::sleep(MEANWHILE);
            assert!(!second.is_finished(), "it is launched meanwhile");
            drop(hold);
            drop(second.join().expect("no panic"));
        });
        stream.synchronize(Deadline::after(SOON)).expect("the second leaves");
    }

    #[test]
    fn what_nobody_wants_any_more_is_not_done() {
        let double = Double::new(1, Order::Eager);
        let devices = Devices::over(double.clone()).expect("a device");
        let _errand = {
            let errand = Errand::new(&devices, 0, Duty::default()).expect("a courier");
            let stream = Stream::new(&devices, 0, false).expect("a stream");
            // SAFETY: nothing is ordered.
            unsafe { errand.courier().launch(&stream, &DoubleKernels(double)) }.expect("it is launched");
            errand
        };
        let until = Deadline::after(MEANWHILE);
        assert_eq!(devices.in_quiet(&|| !until.expired(), || ()), None);
    }
}
