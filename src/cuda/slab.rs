//! Device memory that peers reach: large allocations, and the arenas cut out of them. Those of a process
//! share an allocation where they are small.
//!
//! Device memory is allocated and freed in few large pieces because both may wait for the device and its
//! peers, which may be running kernels that wait for each other. A peer in another process opens a slab as a
//! whole, once for each of its devices, and keeps it open for as long as it uses an arena of it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::context::Devices;
use super::driver::MemoryHandle;
use super::memory::DeviceBuffer;
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, Status};
use crate::sys::heap::Heap;
use crate::sys::{fork, process, random};

/// Bytes of a slab, unless one arena is larger. Those of exchanges with the default table are, or leave no
/// room for another (five ranks' on one host): each has a slab to itself, so that a communicator takes little
/// more than it needs.
pub const SLAB_BYTES: usize = 32 << 20;

/// Arenas begin at multiples of this many bytes.
const ALIGNMENT: usize = 4096;

/// What tells one process's devices from those of every other process.
pub type Identity = [u8; 16];

/// The slabs of a process, and those of others that it has open.
pub(super) struct Slabs {
    identity: Identity,
    numbers: AtomicU64,
    own: Mutex<Vec<Weak<Slab>>>,
    /// By owner, number and the device that they are open on.
    open: Mutex<HashMap<(Identity, u64, u32), Weak<Opened>>>,
    kept: Mutex<Vec<Waiting>>,
    giving_back: Arc<GivingBack>,
}

/// How long who finds no memory waits for what is being given back.
const GIVEN_BACK: Duration = Duration::from_secs(1);

/// What a thread of its own gives back, and asks whether it is over; and who else gives back.
struct GivingBack {
    state: Mutex<Pending>,
    /// There is no thread any more, or one less who gives back beside it.
    ended: Condvar,
    fork: u32,
}

#[derive(Default)]
struct Pending {
    /// What the thread is to take next.
    queue: Vec<Box<dyn Send>>,
    /// How much of what is kept it is to look at.
    looks: Looks,
    has_thread: bool,
    /// How many others give back what they have come by.
    others: usize,
}

/// How much of what is kept the thread is to look at.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Looks {
    #[default]
    Nothing,
    /// What has failed: the rest is for whoever comes by.
    Failed,
    All,
}

impl GivingBack {
    /// Whether this is a forked child: what there is is the parent's, and the driver is not to be asked.
    fn is_inherited(&self) -> bool {
        self.fork != fork::generation()
    }

    /// Gives `what` back in the thread, [in quiet](Devices::in_quiet). In a forked child nothing is given
    /// back.
    fn aside(self: &Arc<Self>, devices: &Arc<Devices>, what: Box<dyn Send>) {
        if self.is_inherited() {
            return std::mem::forget(what);
        }
        self.engage(devices, |state| state.queue.push(what));
    }

    /// Has the thread look at that much of what is kept, and give back what is over, as
    /// [`GivingBack::aside`].
    fn look_aside(self: &Arc<Self>, devices: &Arc<Devices>, looks: Looks) {
        if !self.is_inherited() {
            self.engage(devices, |state| state.looks = state.looks.max(looks));
        }
    }

    /// Whether there is a thread, which may have taken some of what is kept, to ask about it.
    fn is_at_work(&self) -> bool {
        lock(&self.state).has_thread
    }

    /// Has the thread do what `add` adds. Where there is none to be had that is left to the next one.
    fn engage(self: &Arc<Self>, devices: &Arc<Devices>, add: impl FnOnce(&mut Pending)) {
        let mut state = lock(&self.state);
        add(&mut state);
        if std::mem::replace(&mut state.has_thread, true) {
            return;
        }
        drop(state);
        let (this, devices) = (self.clone(), devices.clone());
        if let Err(error) = process::spawn("unisono-aside", move || this.work(&devices)) {
            log::warn!("device memory is not given back yet: {error}");
            self.end(lock(&self.state));
        }
    }

    fn end(&self, mut state: MutexGuard<'_, Pending>) {
        state.has_thread = false;
        drop(state);
        self.ended.notify_all();
    }

    /// Gives back whatever there is.
    fn work(&self, devices: &Arc<Devices>) {
        let over = RefCell::new(Vec::new());
        loop {
            let state = lock(&self.state);
            if state.queue.is_empty() && state.looks == Looks::Nothing {
                return self.end(state);
            }
            drop(state);
            self.gather(devices, &over);
            if !over.borrow().is_empty() {
                // It may be long until all is quiet, and others wait for the goodbyes of what is over.
                let gathers = || {
                    self.gather(devices, &over);
                    true
                };
                devices.in_quiet(&gathers, || drop(over.take()));
            }
        }
    }

    /// Adds to `over` what is to be given back by now.
    fn gather(&self, devices: &Arc<Devices>, over: &RefCell<Vec<Box<dyn Send>>>) {
        let mut state = lock(&self.state);
        let looks = std::mem::take(&mut state.looks);
        over.borrow_mut().append(&mut state.queue);
        drop(state);
        if looks > Looks::Nothing {
            let is_wanted = |kept: &mut Waiting| kept.aside || looks == Looks::All;
            let kept = lock(&devices.slabs().kept).extract_if(.., is_wanted).collect();
            let found = devices.slabs().take_over(kept);
            over.borrow_mut().extend(found.into_iter().map(|kept| -> Box<dyn Send> { Box::new(kept) }));
        }
    }

    /// Gives back in this thread.
    fn here(&self, over: Vec<Waiting>) {
        if !over.is_empty() {
            lock(&self.state).others += 1;
            drop(over);
            lock(&self.state).others -= 1;
            self.ended.notify_all();
        }
    }

    /// Waits until nothing is given back, no longer than `until`. Whether anything was.
    fn await_end(&self, until: Deadline) -> bool {
        let mut state = lock(&self.state);
        let is_at_work = |state: &Pending| state.has_thread || state.others > 0;
        let any = is_at_work(&state);
        while is_at_work(&state) && !until.expired() {
            let left = until.remaining_capped(GIVEN_BACK);
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        any
    }
}

/// What is kept until it is over.
struct Waiting {
    what: Box<dyn Kept>,
    /// Whether whoever comes by may have to go on, so that another thread asks whether it is over, and drops
    /// it: what it was of has failed.
    aside: bool,
}

/// What must not be dropped yet, because somebody may still use it.
pub trait Kept: Send {
    /// Whether nobody does any more. May ask the driver, which may be waiting for a device; else it does not
    /// wait.
    fn is_over(&self) -> bool;
}

impl Devices {
    /// Drops `what` once it is over: now, or when memory is given out or kept later. That may wait for a
    /// device, and so may whoever asks the driver whether it is over, and the device may wait for who would:
    /// so another thread asks that and drops what is of an exchange that `has_failed`, whoever comes to it,
    /// and all there is where one that fails or a thread of the library's own comes to it. In a forked child
    /// nothing is asked or dropped: it is the parent's.
    pub fn keep(self: &Arc<Self>, what: Box<dyn Kept>, has_failed: bool) {
        let new = vec![Waiting { what, aside: has_failed }];
        self.drop_over(has_failed || process::is_own_thread(), new);
    }

    /// Drops what is over by now, as [`Devices::keep`].
    pub fn look_after_kept(self: &Arc<Self>) {
        self.drop_over(process::is_own_thread(), Vec::new());
    }

    /// Drops what is over, of what is `new`, too, which is kept else; what has failed, or all, is another
    /// thread's to ask and to drop.
    fn drop_over(self: &Arc<Self>, all_aside: bool, new: Vec<Waiting>) {
        let slabs = self.slabs();
        if slabs.giving_back.is_inherited() {
            return std::mem::forget(new);
        }
        // Asked before the lock: what the thread has taken is not there, and is to be looked at once more.
        let is_at_work = slabs.giving_back.is_at_work();
        let mut here = new;
        let mut kept = lock(&slabs.kept);
        match all_aside {
            true => kept.append(&mut here),
            false => here.extend(kept.extract_if(.., |kept| !kept.aside)),
        }
        let others = !kept.is_empty();
        drop(kept);
        if others || is_at_work {
            let looks = if all_aside { Looks::All } else { Looks::Failed };
            slabs.giving_back.look_aside(self, looks);
        }
        // Not under the lock: dropping may wait for the device.
        slabs.giving_back.here(slabs.take_over(here));
    }

    /// Drops what is over, and returns when that is done.
    #[cfg(test)]
    pub fn give_back(self: &Arc<Self>) {
        struct Last(std::sync::mpsc::Sender<()>);
        impl Kept for Last {
            fn is_over(&self) -> bool {
                true
            }
        }
        impl Drop for Last {
            fn drop(&mut self) {
                self.0.send(()).expect("somebody listens");
            }
        }
        let (tell, hear) = std::sync::mpsc::channel();
        // One thread asks and drops, this behind the others.
        self.keep(Box::new(Last(tell)), true);
        hear.recv_timeout(std::time::Duration::from_secs(60)).expect("all is dropped");
    }
}

impl Slabs {
    pub(super) fn new() -> Result<Slabs> {
        let mut identity = [0; 16];
        random::fill(&mut identity)?;
        Ok(Slabs {
            identity,
            numbers: AtomicU64::new(0),
            own: Mutex::default(),
            open: Mutex::default(),
            kept: Mutex::default(),
            giving_back: Arc::new(GivingBack {
                state: Mutex::default(),
                ended: Condvar::new(),
                fork: fork::generation(),
            }),
        })
    }

    /// Those of what was `kept` that are over; the others are kept on. Asks without the lock: the driver may
    /// not answer.
    fn take_over(&self, kept: Vec<Waiting>) -> Vec<Waiting> {
        let (over, others): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| kept.what.is_over());
        lock(&self.kept).extend(others);
        over
    }
}

/// One allocation. Freed when the last arena is gone.
#[derive(Debug)]
struct Slab {
    number: u64,
    memory: DeviceBuffer,
    handle: Result<MemoryHandle>,
    heap: Mutex<Heap>,
}

/// Device memory that peers may be given. Given back when dropped: nobody uses it any more by then.
#[derive(Debug)]
pub struct Arena {
    slab: Arc<Slab>,
    offset: usize,
    bytes: usize,
}

/// Where an arena lies, for another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Whose it is.
    pub process: Identity,
    /// The slab's number among those of its process.
    pub slab: u64,
    /// What opens the slab.
    pub handle: MemoryHandle,
    /// Where the arena begins in it.
    pub offset: u64,
}

impl Arena {
    /// `bytes` zeroed bytes of `device`, from a slab that has room for them, or from a new one. May wait for
    /// the device.
    pub fn new(devices: &Arc<Devices>, device: u32, bytes: usize, deadline: Deadline) -> Result<Arena> {
        let arena = match Arena::take(devices, device, bytes) {
            // What is being given back may be that of an exchange which this one is made instead of.
            Err(error) if error.status() == Status::OutOfMemory => {
                let until = deadline.min(Deadline::after(GIVEN_BACK));
                if !devices.slabs().giving_back.await_end(until) {
                    return Err(error);
                }
                Arena::take(devices, device, bytes)?
            }
            taken => taken?,
        };
        let zeroed = arena.zero(devices, device, deadline);
        match zeroed {
            Ok(()) => Ok(arena),
            Err(error) => {
                // The device may still come to it.
                std::mem::forget(arena);
                Err(error.context(format_args!("clearing {bytes} bytes of GPU {device}")))
            }
        }
    }

    fn take(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<Arena> {
        devices.drop_over(false, Vec::new());
        let slabs = devices.slabs();
        // Held while a slab is allocated, so that two threads share one.
        let mut own = lock(&slabs.own);
        own.retain(|slab| slab.strong_count() > 0);
        for slab in own.iter().filter_map(Weak::upgrade) {
            let suits = slab.memory.device() == device;
            let taken = if suits { lock(&slab.heap).take(bytes, ALIGNMENT) } else { None };
            if let Some((offset, _)) = taken {
                return Ok(Arena { slab, offset, bytes });
            }
            // Who had the last of its arenas may have let go of it meanwhile, and this thread is not to wait
            // for the device.
            if let Some(slab) = Arc::into_inner(slab) {
                slabs.giving_back.aside(devices, Box::new(slab));
            }
        }
        let size = bytes.max(SLAB_BYTES).next_multiple_of(2 << 20);
        let memory = DeviceBuffer::new(devices, device, size)?;
        let handle = {
            let _entered = devices.enter(device)?;
            // SAFETY: an allocation's first byte.
            unsafe { devices.driver().export_memory(memory.address()) }
        };
        let number = slabs.numbers.fetch_add(1, Ordering::Relaxed);
        let mut heap = Heap::new(0, size);
        // PROOF: the slab is at least as large, and its first byte is aligned.
        let (offset, _) = heap.take(bytes, ALIGNMENT).unwrap_or((0, 0));
        let slab = Arc::new(Slab { number, memory, handle, heap: Mutex::new(heap) });
        own.push(Arc::downgrade(&slab));
        Ok(Arena { slab, offset, bytes })
    }

    fn zero(&self, devices: &Arc<Devices>, device: u32, deadline: Deadline) -> Result<()> {
        let stream = Stream::new(devices, device, false)?;
        {
            let _entered = devices.enter(device)?;
            // SAFETY: this arena's own memory, which outlives the stream's work: `new` sees to it.
            unsafe { devices.driver().fill(self.address(), 0, self.bytes, stream.handle()) }?;
        }
        stream.synchronize(deadline)
    }

    /// The first byte, for this process.
    pub fn address(&self) -> u64 {
        self.slab.memory.address() + self.offset as u64
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// For other processes; an error where the driver exports no memory.
    pub fn place(&self, devices: &Devices) -> Result<Place> {
        let handle = self.slab.handle.clone()?;
        let (process, offset) = (devices.slabs().identity, self.offset as u64);
        Ok(Place { process, slab: self.slab.number, handle, offset })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        lock(&self.slab.heap).give_back(self.offset, self.bytes);
    }
}

/// A slab of another process, open on one of this process's devices until this is dropped.
#[derive(Debug)]
pub struct Opened {
    devices: Arc<Devices>,
    device: u32,
    address: u64,
}

impl Opened {
    /// Opens the slab that `place` lies in for `device`, or finds it open. May wait for the device.
    pub fn new(devices: &Arc<Devices>, device: u32, place: &Place) -> Result<Arc<Opened>> {
        let key = (place.process, place.slab, device);
        // Held while it is opened, so that two threads share it.
        let mut open = lock(&devices.slabs().open);
        open.retain(|_, opened| opened.strong_count() > 0);
        if let Some(opened) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(opened);
        }
        let address = {
            let _relaxed = devices.relax()?;
            let _entered = devices.enter(device)?;
            devices.driver().open_memory(&place.handle)?
        };
        let opened = Arc::new(Opened { devices: devices.clone(), device, address });
        open.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }

    /// Where the arena at `place` is mapped.
    pub fn address(&self, place: &Place) -> u64 {
        self.address + place.offset
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let closed = self.devices.relax().and_then(|_relaxed| {
            let _entered = self.devices.enter(self.device)?;
            // SAFETY: opened once by `new`, and nobody uses it after this.
            unsafe { self.devices.driver().close_memory(self.address) }
        });
        if let Err(error) = closed {
            log::warn!("{error}");
        }
    }
}

/// What tells this process's devices from others'.
pub fn identity(devices: &Devices) -> Identity {
    devices.slabs().identity
}

/// Locks, also after a panic elsewhere: the lists are whole between statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::cuda::double::{Double, Order, Refusal};
    use crate::error::Status;

    fn process(order: Order) -> (Arc<Double>, Arc<Devices>) {
        let double = Double::new(2, order);
        let devices = Devices::over(double.clone()).unwrap();
        (double, devices)
    }

    /// Tells which thread drops it.
    struct Tells(std::sync::mpsc::Sender<std::thread::ThreadId>, Arc<AtomicBool>);

    impl Kept for Tells {
        fn is_over(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }
    }

    impl Drop for Tells {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).expect("the test listens");
        }
    }

    fn flag(set: bool) -> Arc<AtomicBool> {
        Arc::new(AtomicBool::new(set))
    }

    #[test]
    fn threads_of_the_library_do_not_wait_for_the_device_to_let_go() {
        let (_double, devices) = process(Order::RoundRobin);
        let (tell, hear) = std::sync::mpsc::channel();
        let here = || std::thread::current().id();
        devices.keep(Box::new(Tells(tell.clone(), flag(true))), false);
        assert_eq!(hear.try_recv(), Ok(here()), "a caller finds it done");
        let run = move || devices.keep(Box::new(Tells(tell, flag(true))), false);
        let own = crate::sys::process::spawn("a thread of the library", run).expect("it starts");
        assert_ne!(hear.recv(), Ok(own.thread().id()));
        own.join().expect("it ends");
    }

    /// Whoever frees what has failed may wait for a device that waits for what it does next.
    #[test]
    fn nobody_who_comes_by_waits_for_what_has_failed_to_be_given_back() {
        type Deed = fn(&Arc<Devices>, std::thread::ThreadId);
        let (_double, devices) = process(Order::RoundRobin);
        let here = std::thread::current().id();
        let later: [Deed; 2] = [
            |devices, here| {
                let (tell, hear) = std::sync::mpsc::channel();
                devices.keep(Box::new(Tells(tell, flag(true))), false);
                assert_eq!(hear.try_recv(), Ok(here), "a healthy end finds its own done");
            },
            |devices, _| drop(Arena::new(devices, 0, 64, Deadline::NEVER).expect("an arena")),
        ];
        for come_by in later {
            let ((tell, hear), is_over) = (std::sync::mpsc::channel(), flag(false));
            devices.keep(Box::new(Tells(tell, is_over.clone())), true);
            is_over.store(true, Ordering::Relaxed);
            come_by(&devices, here);
            assert_ne!(hear.recv(), Ok(here));
        }
    }

    /// The driver does not say whether it is over, until somebody has.
    struct Silent {
        answer: mpsc::Receiver<()>,
        /// Who is to go on, and whether that one has asked.
        other: (std::thread::ThreadId, Arc<AtomicBool>),
        _tells: Tells,
    }

    impl Kept for Silent {
        fn is_over(&self) -> bool {
            if std::thread::current().id() == self.other.0 {
                self.other.1.store(true, Ordering::Relaxed);
                return false;
            }
            self.answer.recv_timeout(Duration::from_secs(60)).is_ok()
        }
    }

    #[test]
    fn nobody_who_comes_by_asks_whether_what_has_failed_is_over() {
        let (_double, devices) = process(Order::RoundRobin);
        let here = std::thread::current().id();
        let ((say, silent), (tell, hear)) = (mpsc::channel(), mpsc::channel());
        let has_asked = flag(false);
        let failed = Silent {
            answer: silent,
            other: (here, has_asked.clone()),
            _tells: Tells(tell.clone(), flag(true)),
        };
        devices.keep(Box::new(failed), true);
        for _ in 0..2 {
            devices.keep(Box::new(Tells(tell.clone(), flag(true))), false);
            assert_eq!(hear.try_recv(), Ok(here), "what is well is dropped at once");
            devices.look_after_kept();
            drop(Arena::new(&devices, 0, 64, Deadline::NEVER).expect("an arena"));
        }
        assert!(!has_asked.load(Ordering::Relaxed));
        say.send(()).expect("another thread waits for it");
        assert_ne!(hear.recv_timeout(Duration::from_secs(60)).expect("it is dropped"), here);
    }

    /// Tells when somebody asks whether it is over.
    struct Asked {
        tell: mpsc::Sender<()>,
        _tells: Tells,
    }

    impl Kept for Asked {
        fn is_over(&self) -> bool {
            self.tell.send(()).expect("the test listens");
            true
        }
    }

    /// Other ranks wait for the goodbye that is said then.
    #[test]
    fn what_has_failed_is_asked_while_other_memory_waits_for_quiet() {
        const LONG: Duration = Duration::from_secs(60);
        let (_double, devices) = process(Order::RoundRobin);
        let held = devices.note_held();
        let ((tell, hear), (ask, asked)) = (mpsc::channel(), mpsc::channel());
        for _ in 0..3 {
            let what = Asked { tell: ask.clone(), _tells: Tells(tell.clone(), flag(true)) };
            devices.keep(Box::new(what), true);
            asked.recv_timeout(LONG).expect("somebody asks");
        }
        assert!(hear.try_recv().is_err(), "a stream waits for the host");
        drop(held);
        for _ in 0..3 {
            hear.recv_timeout(LONG).expect("all is dropped when it is quiet");
        }
    }

    /// Tells the test when another thread than the test's asks whether it is over, and answers as that says.
    struct Answers(std::thread::ThreadId, mpsc::Sender<()>, mpsc::Receiver<bool>);

    impl Kept for Answers {
        fn is_over(&self) -> bool {
            assert_ne!(std::thread::current().id(), self.0, "that is not this thread's to ask");
            // The test may be over.
            let _ = self.1.send(());
            self.2.recv().unwrap_or(true)
        }
    }

    /// Notes who asks whether it is over.
    struct Noted(Tells, mpsc::Sender<std::thread::ThreadId>);

    impl Kept for Noted {
        fn is_over(&self) -> bool {
            self.1.send(std::thread::current().id()).expect("the test listens");
            self.0.is_over()
        }
    }

    /// Else it would wait for quiet with what has failed, and that may stay for as long as the program runs.
    #[test]
    fn what_is_well_is_for_who_comes_by_also_while_what_has_failed_is_kept() {
        const LONG: Duration = Duration::from_secs(60);
        let here = std::thread::current().id();
        let ((tell, hear), (note, noted), is_over) = (mpsc::channel(), mpsc::channel(), flag(false));
        let ((ask, asked), (answer, answers)) = (mpsc::channel(), mpsc::channel());
        let (_double, devices) = process(Order::RoundRobin);
        devices.keep(Box::new(Answers(here, ask, answers)), true);
        asked.recv_timeout(LONG).expect("another thread asks");
        // It finds this when it looks again.
        devices.keep(Box::new(Noted(Tells(tell, is_over.clone()), note)), false);
        devices.look_after_kept();
        answer.send(false).expect("it waits for that");
        asked.recv_timeout(LONG).expect("who came by while it was asked has it asked again");
        assert!(noted.try_iter().all(|who| who == here));
        let _held = devices.note_held();
        is_over.store(true, Ordering::Relaxed);
        devices.look_after_kept();
        assert_eq!(hear.try_recv(), Ok(here), "it is dropped at once, though a stream waits for the host");
    }

    /// Of an exchange that failed: does something when another thread gives it back.
    struct GivenBack<F: FnMut() + Send>(F);

    impl<F: FnMut() + Send> Kept for GivenBack<F> {
        fn is_over(&self) -> bool {
            true
        }
    }

    impl<F: FnMut() + Send> Drop for GivenBack<F> {
        fn drop(&mut self) {
            self.0();
        }
    }

    /// A process whose device has no memory left.
    fn full() -> (Arc<Double>, Arc<Devices>) {
        let (double, devices) = process(Order::RoundRobin);
        let (call, status) = (Some("cuMemAlloc"), Status::OutOfMemory);
        double.refuse(Refusal { times: usize::MAX, call, status, ..Refusal::default() });
        (double, devices)
    }

    #[test]
    fn who_finds_no_memory_waits_for_what_is_being_given_back() {
        const LONG: Duration = Duration::from_secs(60);
        // By a thread of the library, or by whoever comes by.
        for has_failed in [true, false] {
            let (double, devices) = full();
            let (begin, begun) = mpsc::channel();
            // There is room again once somebody has found none.
            let make_room = move || {
                let _ = begin.send(());
                let start = Instant::now();
                while double.failed_at().is_none() && start.elapsed() < LONG {
                    std::thread::sleep(Duration::from_millis(1));
                }
                double.fail_call(usize::MAX);
            };
            let kept = devices.clone();
            let other = std::thread::spawn(move || kept.keep(Box::new(GivenBack(make_room)), has_failed));
            begun.recv_timeout(LONG).expect("it is being given back");
            Arena::new(&devices, 0, 64, Deadline::after(LONG)).expect("there is room by then");
            other.join().expect("it ends");
        }
    }

    #[test]
    fn who_finds_no_memory_does_not_wait_long() {
        let start = Instant::now();
        for deadline in [Deadline::after(Duration::from_millis(50)), Deadline::NEVER] {
            let (_double, devices) = full();
            let (end, ended) = mpsc::channel::<()>();
            // Not before the end of the test.
            let stay = move || {
                let _ = ended.recv_timeout(Duration::from_secs(60));
            };
            devices.keep(Box::new(GivenBack(stay)), true);
            let error = Arena::new(&devices, 0, 64, deadline).expect_err("there is no room");
            assert_eq!(error.status(), Status::OutOfMemory, "{error}");
            drop(end);
        }
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn arenas_share_slabs_and_come_zeroed() {
        let (double, devices) = process(Order::RoundRobin);
        let arena = |bytes| Arena::new(&devices, 0, bytes, Deadline::NEVER).unwrap();
        let first = arena(10 << 20);
        let second = arena(10 << 20);
        assert_eq!(double.allocated(0), SLAB_BYTES);
        assert!(double.peek(second.address(), 10 << 20).iter().all(|&byte| byte == 0));
        assert!(first.address().abs_diff(second.address()) >= 10 << 20);
        // No room for a third of this size; then one that is larger than a slab.
        let third = arena(20 << 20);
        assert_eq!(double.allocated(0), 2 * SLAB_BYTES);
        let large = arena(SLAB_BYTES + 1);
        assert_eq!(double.allocated(0), 3 * SLAB_BYTES + (2 << 20));
        // What is given back is used again, zeroed again.
        let place = first.place(&devices).unwrap();
        let stream = Stream::new(&devices, 0, false).unwrap();
        double.fill(stream.handle(), 0, first.address(), &[7; 100]);
        stream.synchronize(Deadline::NEVER).unwrap();
        drop(first);
        let again = arena(10 << 20);
        assert_eq!(again.place(&devices).unwrap(), place);
        assert_eq!(double.peek(again.address(), 100), [0; 100]);
        drop((again, second, third, large));
        assert_eq!(double.allocated(0), 0);
        drop(stream);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn a_slab_is_opened_once_for_its_arenas_and_closed_with_the_last() {
        let ((_, here), (double, there)) = (process(Order::Eager), process(Order::Eager));
        let arena = |bytes| Arena::new(&here, 1, bytes, Deadline::NEVER).unwrap();
        let (first, second) = (arena(4096), arena(4096));
        let places = [&first, &second].map(|arena| arena.place(&here).unwrap());
        let open = |place| Opened::new(&there, 0, place).unwrap();
        let (a, b) = (open(&places[0]), open(&places[1]));
        assert!(Arc::ptr_eq(&a, &b));
        assert_eq!([a.address(&places[0]), b.address(&places[1])], [first.address(), second.address()]);
        let address = a.address(&places[0]);
        drop(a);
        assert!(there.locate(address).unwrap().is_some());
        drop(b);
        assert_eq!(there.locate(address).unwrap(), None);
        assert_eq!(double.complaints(), Vec::<String>::new());
        // A process does not open its own.
        assert!(Opened::new(&here, 0, &places[0]).is_err());
    }

    #[test]
    fn where_memory_cannot_be_shared_arenas_still_serve_their_own_process() {
        let (double, devices) = process(Order::Eager);
        double.forbid_sharing();
        let arena = Arena::new(&devices, 0, 64, Deadline::NEVER).unwrap();
        assert_eq!(arena.bytes(), 64);
        assert!(arena.place(&devices).unwrap_err().text().contains("cuIpcGetMemHandle"));
    }
}
