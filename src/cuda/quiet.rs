//! When the driver may be kept waiting for a device: while nothing that a device was given waits for what
//! other ranks are still to launch.
//!
//! Who pins memory or gives it back has the driver wait for all that the device was given before, with a lock
//! that launches need. One courier may wait, by way of another rank, for one that this rank is still to
//! launch: calls of a group are launched one by one, on as many streams as they have. So may a kernel of an
//! exchange, for one of another rank whose launch waits for such a lock itself. So where the program did not
//! ask for it at that moment, such things are done between calls, or when all ranks have launched what they
//! were called for. Graphs are launched by the program, unseen.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak,
};
use std::time::{Duration, Instant};

use super::context::Devices;
use super::courier::Courier;
use super::driver::retry;
use crate::deadline::Deadline;
use crate::error::{Result, Status};
use crate::sys::process;

/// How long launches may be kept waiting until what has been launched has ended, and how long they go on then
/// at least, at first and at most.
const HELD: Duration = Duration::from_millis(2);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// From when on who waits does so at leisure.
const LATE: Duration = Duration::from_secs(5);
const LATE_PAUSE: Duration = Duration::from_millis(500);

/// How often who waits asks whether the devices are still there.
const ASKS_DEVICES: Duration = Duration::from_secs(1);

/// What is on its way.
#[derive(Default)]
pub(super) struct Quiet {
    /// Held for reading by who launches something.
    launching: RwLock<()>,
    /// How many couriers have been launched and not been dropped,
    launched: AtomicUsize,
    /// which they are, among others,
    couriers: Mutex<Vec<Weak<Courier>>>,
    /// and the exchanges.
    exchanges: Mutex<Vec<Weak<dyn Exchanging>>>,
    /// How many streams wait for what the host does.
    held: AtomicUsize,
    /// Devices of which nothing is on its way any more.
    lost: Mutex<Vec<u32>>,
    /// Had by who locks launches out, and when somebody may next.
    turn: Mutex<Option<Instant>>,
}

/// Held by who launches something.
pub type Launching<'a> = RwLockReadGuard<'a, ()>;

/// Ranks whose kernels wait for each other.
pub trait Exchanging: Send + Sync {
    /// Whether none of this rank is under way.
    fn is_at_rest(&self) -> bool;

    /// Whether one of this rank may wait for one that another has yet to launch. One that has been launched
    /// may do so in turn, for a third rank's: of that this knows nothing.
    fn may_wait(&self) -> bool;
}

/// A stream that waits for what the host does, until this is dropped.
pub struct HeldStream(Arc<Devices>);

impl Drop for HeldStream {
    fn drop(&mut self) {
        self.0.quiet().held.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Quiet {
    /// One is about to be launched.
    pub(super) fn begin(&self, courier: &Arc<Courier>) {
        let mut couriers = lock(&self.couriers);
        if couriers.len() == couriers.capacity() {
            couriers.retain(|courier| courier.strong_count() > 0);
        }
        couriers.push(Arc::downgrade(courier));
        self.launched.fetch_add(1, Ordering::SeqCst);
    }

    /// One that had begun has not been launched, or is known to the stands.
    pub(super) fn end(&self) {
        self.launched.fetch_sub(1, Ordering::SeqCst);
    }

    /// The right to lock launches out, if nobody has it and nobody has had it just now.
    fn take_turn(&self) -> Option<MutexGuard<'_, Option<Instant>>> {
        let turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        turn.is_none_or(|next| next <= Instant::now()).then_some(turn)
    }

    /// Whether a device is lost, as far as is known.
    pub(super) fn is_lost(&self, device: u32) -> bool {
        lock(&self.lost).contains(&device)
    }

    /// How many of those that were launched have left, or are lost, and have not been dropped.
    fn gone(&self) -> usize {
        let known: Vec<Arc<Courier>> = lock(&self.couriers).iter().filter_map(Weak::upgrade).collect();
        known
            .iter()
            .filter(|courier| courier.was_launched() && (courier.is_gone() || self.is_lost(courier.device())))
            .count()
    }
}

impl Devices {
    /// For whoever launches a courier or a kernel of an exchange, until the answer is dropped: waits for what
    /// is done [in quiet](Devices::in_quiet). A thread may have several: whoever does something in quiet only
    /// tries to lock them out.
    pub fn launching(&self) -> Launching<'_> {
        self.quiet().launching.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a stream that is about to wait for what the host does, which may wait for other ranks.
    pub fn note_held(self: &Arc<Devices>) -> HeldStream {
        let _launching = self.launching();
        self.quiet().held.fetch_add(1, Ordering::SeqCst);
        HeldStream(self.clone())
    }

    /// Kernels of an exchange are launched from now on.
    pub fn note_exchange(&self, exchange: Weak<dyn Exchanging>) {
        let mut exchanges = lock(&self.quiet().exchanges);
        exchanges.retain(|exchange| exchange.strong_count() > 0);
        exchanges.push(exchange);
    }

    /// Whether streams wait for what the host does, or it for them: couriers that are on their way, or may
    /// be, among them.
    fn awaits_host(&self) -> bool {
        self.is_asked() || self.are_streams_held()
    }

    /// Whether streams wait for what the host does: those that have couriers among them.
    fn are_streams_held(&self) -> bool {
        // In this order: who drops a courier has told the stands before.
        let launched = self.quiet().launched.load(Ordering::SeqCst);
        self.quiet().held.load(Ordering::SeqCst) > 0
            || launched > self.quiet().gone()
            || self.stands().has_parked(&|device| self.quiet().is_lost(device))
    }

    /// Has `act` give streams something, if no stream waits for what the host is still to do, as far as is
    /// known, nor begins to meanwhile: then it stands behind nothing that waits for it. Asks no driver.
    pub fn while_no_stream_waits<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let _locked_out = self.try_launching()?;
        // Kernels of exchanges may be in graphs, unseen, and wait for ranks that have another call before.
        let exchanges = lock(&self.quiet().exchanges).iter().any(|exchange| exchange.strong_count() > 0);
        let wait = exchanges || self.are_streams_held();
        (!wait).then(act)
    }

    /// Whether a kernel of an exchange may wait for what another rank has yet to launch; or, `strictly`, is
    /// under way at all.
    fn do_exchanges_wait(&self, strictly: bool) -> bool {
        // Not under the lock: they ask the driver.
        let exchanges: Vec<Arc<dyn Exchanging>> =
            lock(&self.quiet().exchanges).iter().filter_map(Weak::upgrade).collect();
        exchanges.iter().any(|exchange| if strictly { !exchange.is_at_rest() } else { exchange.may_wait() })
    }

    /// Locks launches out if all is quiet, or is soon.
    fn try_quiet(&self, strictly: bool) -> Option<(RwLockWriteGuard<'_, ()>, MutexGuard<'_, ()>)> {
        // What other ranks are to launch comes no sooner for holding up what this one does.
        if self.do_exchanges_wait(strictly) {
            return None;
        }
        let locked_out = (self.try_launching()?, self.try_making()?);
        let held = Deadline::after(HELD);
        while !self.do_exchanges_wait(strictly) {
            if !self.awaits_host() {
                return Some(locked_out);
            }
            if held.expired() {
                break;
            }
            process::yield_now();
        }
        None
    }

    fn try_launching(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.quiet().launching.try_write() {
            Ok(launching) => Some(launching),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Has `act` do what the driver may wait for a device with, when nothing on one waits for what is yet to
    /// be launched, and no call asks the driver in its course. Waits for that, as long as it `is_wanted`, and
    /// at worst for as long as the program leaves no gap: so in a thread that nobody waits for.
    pub fn in_quiet<T>(&self, is_wanted: &dyn Fn() -> bool, act: impl FnOnce() -> T) -> Option<T> {
        let began = Instant::now();
        let (mut pause, mut asked, mut told) = (FIRST_PAUSE, began, false);
        while is_wanted() {
            // Programs that always have something under way are not waited for so strictly in the end.
            let is_late = began.elapsed() > LATE;
            if let Some(mut turn) = self.quiet().take_turn() {
                if let Some(_locked_out) = self.try_quiet(!is_late) {
                    return Some(act());
                }
                *turn = Some(Instant::now() + pause);
            }
            if asked.elapsed() > ASKS_DEVICES {
                self.note_lost();
                asked = Instant::now();
            }
            if is_late && !std::mem::replace(&mut told, true) {
                log::info!(
                    "memory that is to be pinned, or given back, waits for GPUs, whose work waits for other ranks"
                );
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(if is_late { LATE_PAUSE } else { LONGEST_PAUSE });
        }
        None
    }

    /// Notes the devices that are lost to this process: what was on its way there never tells that it has
    /// left.
    fn note_lost(&self) {
        let mut devices = self.stands().parked_devices();
        let couriers: Vec<Arc<Courier>> =
            lock(&self.quiet().couriers).iter().filter_map(Weak::upgrade).collect();
        devices.extend(couriers.iter().map(|courier| courier.device()));
        devices.sort_unstable();
        devices.dedup();
        for device in devices.into_iter().filter(|device| !self.quiet().is_lost(*device)) {
            // One that has no memory is there.
            if let Err(error) = retry(|| self.touch(device))
                && error.status() != Status::OutOfMemory
            {
                log::debug!("GPU {device} is lost: {error}");
                lock(&self.quiet().lost).push(device);
            }
        }
    }

    /// Fails on a device that is lost.
    fn touch(&self, device: u32) -> Result<()> {
        let _entered = self.enter(device)?;
        let event = self.driver().create_event()?;
        // SAFETY: it was just made, and nobody else knows it.
        unsafe { self.driver().destroy_event(event) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;

    use super::*;
    use crate::cuda::courier::{Duty, Errand};
    use crate::cuda::double::{Double, DoubleKernels, Order, Refusal};
    use crate::cuda::stream::Stream;

    const SOON: Duration = Duration::from_secs(20);
    const MEANWHILE: Duration = Duration::from_millis(50);

    /// A device and a stream of it.
    fn device() -> (Arc<Double>, Arc<Devices>, Stream) {
        let double = Double::new(1, Order::Eager);
        let devices = Devices::over(double.clone()).expect("a device");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        (double, devices, stream)
    }

    /// A courier on its way.
    fn launched(double: &Arc<Double>, stream: &Stream) -> Errand {
        let errand = Errand::new(stream.devices(), 0, Duty::default()).expect("a courier");
        // SAFETY: nothing is ordered.
        unsafe { errand.courier().launch(stream, false, &DoubleKernels(double.clone())) }
            .expect("it is launched");
        errand
    }

    /// Whether something can be done in quiet before that.
    fn is_quiet(devices: &Devices, within: Duration) -> bool {
        let until = Deadline::after(within);
        devices.in_quiet(&|| !until.expired(), || ()).is_some()
    }

    #[test]
    fn what_the_driver_waits_with_is_done_while_no_courier_is_on_its_way() {
        let (double, devices, stream) = device();
        let first = launched(&double, &stream);
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
            let second = scope.spawn(|| launched(&double, &stream));
            std::thread::sleep(MEANWHILE);
            assert!(!second.is_finished(), "it is launched meanwhile");
            drop(hold);
            drop(second.join().expect("no panic"));
        });
        stream.synchronize(Deadline::after(SOON)).expect("the second leaves");
    }

    #[test]
    fn what_nobody_wants_any_more_is_not_done() {
        let (double, devices, stream) = device();
        let _errand = launched(&double, &stream);
        assert!(!is_quiet(&devices, MEANWHILE));
    }

    /// As those of calls that were given up are.
    #[test]
    fn a_courier_that_has_left_does_not_count_though_it_is_kept() {
        let (double, devices, stream) = device();
        let errand = launched(&double, &stream);
        let kept = errand.courier().clone();
        drop(errand);
        assert!(!is_quiet(&devices, MEANWHILE));
        stream.synchronize(Deadline::after(SOON)).expect("it leaves");
        assert!(is_quiet(&devices, SOON));
        drop(kept);
        assert!(is_quiet(&devices, SOON));
    }

    #[test]
    fn couriers_of_a_device_that_is_lost_do_not_count() {
        let (double, devices, stream) = device();
        let (kept, left) = (launched(&double, &stream), launched(&double, &stream));
        drop(left);
        double.refuse(Refusal { times: usize::MAX, ..Refusal::default() });
        assert!(is_quiet(&devices, SOON));
        double.refuse(Refusal { times: 0, ..Refusal::default() });
        drop(kept);
    }

    #[test]
    fn streams_that_wait_for_what_the_host_does_are_waited_for() {
        let (_double, devices, _stream) = device();
        let held = devices.note_held();
        assert!(!is_quiet(&devices, MEANWHILE));
        drop(held);
        assert!(is_quiet(&devices, SOON));
    }

    #[test]
    fn what_a_stream_is_given_where_none_waits_comes_behind_no_courier() {
        let (double, devices, stream) = device();
        let errand = launched(&double, &stream);
        assert_eq!(devices.while_no_stream_waits(|| ()), None, "a courier is on its way");
        drop(errand);
        stream.synchronize(Deadline::after(SOON)).expect("it leaves");
        let held = devices.note_held();
        assert_eq!(devices.while_no_stream_waits(|| ()), None, "a stream waits");
        drop(held);
        std::thread::scope(|scope| {
            let meanwhile = || {
                let launching = scope.spawn(|| launched(&double, &stream));
                std::thread::sleep(MEANWHILE);
                assert!(!launching.is_finished(), "it is launched meanwhile");
                launching
            };
            let launching = devices.while_no_stream_waits(meanwhile).expect("none waits");
            drop(launching.join().expect("no panic"));
        });
        stream.synchronize(Deadline::after(SOON)).expect("it leaves, too");
    }

    #[test]
    fn kernels_that_wait_for_what_is_yet_to_be_launched_are_waited_for() {
        struct Kernels(AtomicBool);
        impl Exchanging for Kernels {
            fn is_at_rest(&self) -> bool {
                !self.0.load(Ordering::Relaxed)
            }

            fn may_wait(&self) -> bool {
                self.0.load(Ordering::Relaxed)
            }
        }
        let (_double, devices, _stream) = device();
        let kernels = Arc::new(Kernels(AtomicBool::new(true)));
        let known: Weak<Kernels> = Arc::downgrade(&kernels);
        devices.note_exchange(known);
        assert!(!is_quiet(&devices, MEANWHILE));
        assert_eq!(devices.while_no_stream_waits(|| ()), None);
        kernels.0.store(false, Ordering::Relaxed);
        assert!(is_quiet(&devices, SOON));
        kernels.0.store(true, Ordering::Relaxed);
        drop(kernels);
        assert!(is_quiet(&devices, SOON));
    }
}
