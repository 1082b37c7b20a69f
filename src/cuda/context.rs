//! The devices of this process: their primary contexts, and which of them reach which.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use once_cell::sync::OnceCell;

use super::courier::Stands;
use super::driver::{CaptureMode, ContextHandle, Driver, Found, Location, MemoryCalls, StreamHandle};
use super::libcuda::Libcuda;
use super::quiet::Quiet;
use super::scalar::Slots;
use super::slab::Slabs;
use super::word::Words;
use crate::error::{Result, fail};
use crate::settings::{self, switch};

/// The devices of this process. Primary contexts are retained at first use, once for each device, until this
/// is dropped. All methods from any thread.
pub struct Devices {
    driver: Arc<dyn Driver>,
    contexts: Box<[OnceCell<ContextHandle>]>,
    multiprocessors: Box<[OnceCell<u32>]>,
    /// Whether `device` reaches `peer`, at `device * count + peer`.
    reach: Box<[OnceCell<bool>]>,
    /// Whether no device is to reach another.
    apart: bool,
    slabs: Slabs,
    words: Mutex<Words>,
    stands: Mutex<Stands>,
    slots: Mutex<Slots>,
    /// Whoever has an idle stream of a device do something that waits for somebody else: see
    /// [`Devices::rousing`].
    rousing: Box<[Mutex<()>]>,
    /// How many calls ask the driver in their course.
    asking: AtomicUsize,
    /// Held by whoever makes what the driver may wait for streams with.
    making: Mutex<()>,
    quiet: Quiet,
}

/// A call under way that asks the driver: see [`Devices::note_asking`].
#[derive(Debug)]
pub struct Asking(Arc<Devices>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Devices {
    /// Those of this machine's driver, the same for everybody. Without a driver: `Status::Cuda`. With
    /// UNISONO_P2P=0 in the environment no device reaches another, for machines where that is broken.
    pub fn open() -> Result<Arc<Devices>> {
        static DEVICES: OnceCell<Arc<Devices>> = OnceCell::new();
        let apart = || matches!(apart_by(), Ok(Some(_)));
        DEVICES.get_or_try_init(|| Devices::of(Libcuda::open()?, apart())).cloned()
    }

    /// Those of a driver.
    pub fn over(driver: Arc<dyn Driver>) -> Result<Arc<Devices>> {
        Devices::of(driver, false)
    }

    fn of(driver: Arc<dyn Driver>, apart: bool) -> Result<Arc<Devices>> {
        let count = driver.device_count()? as usize;
        Ok(Arc::new(Devices {
            driver,
            contexts: (0..count).map(|_| OnceCell::new()).collect(),
            multiprocessors: (0..count).map(|_| OnceCell::new()).collect(),
            reach: (0..count * count).map(|_| OnceCell::new()).collect(),
            apart,
            slabs: Slabs::new()?,
            words: Mutex::default(),
            stands: Mutex::default(),
            slots: Mutex::default(),
            rousing: (0..count).map(|_| Mutex::default()).collect(),
            asking: AtomicUsize::new(0),
            making: Mutex::default(),
            quiet: Quiet::default(),
        }))
    }

    /// See [`Devices::rousing`]; `None`: there is no such device.
    pub(super) fn one_rouses(&self, device: u32) -> Option<&Mutex<()>> {
        self.rousing.get(device as usize)
    }

    /// Notes a call that asks the driver in its course, until the answer is dropped. Streams may come to wait
    /// for it: so this waits for whoever makes something just now.
    pub fn note_asking(self: &Arc<Devices>) -> Asking {
        self.asking.fetch_add(1, Ordering::SeqCst);
        drop(self.making.lock().unwrap_or_else(PoisonError::into_inner));
        Asking(self.clone())
    }

    /// Makes something with which the driver may wait for streams, unless these may wait for calls that ask
    /// the driver, other than the caller's `own`.
    pub(crate) fn make<T>(
        &self,
        own: usize,
        streams_wait: impl FnOnce() -> bool,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.asking.load(Ordering::SeqCst) > own && streams_wait() {
            return Ok(None);
        }
        make().map(Some)
    }

    /// As who makes something does, if nobody does just now.
    pub(super) fn try_making(&self) -> Option<MutexGuard<'_, ()>> {
        match self.making.try_lock() {
            Ok(making) => Some(making),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether any call asks the driver in its course.
    pub(super) fn is_asked(&self) -> bool {
        self.asking.load(Ordering::SeqCst) > 0
    }

    /// What couriers are on their way.
    pub(super) fn quiet(&self) -> &Quiet {
        &self.quiet
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        // It came from a u32.
        self.contexts.len() as u32
    }

    /// The driver that they belong to.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Memory of these devices that peers map.
    pub(super) fn slabs(&self) -> &Slabs {
        &self.slabs
    }

    /// The primary context of a device.
    pub fn context(&self, device: u32) -> Result<ContextHandle> {
        let Some(context) = self.contexts.get(device as usize) else {
            fail!(InvalidArgument, "device {device} does not exist; there are {}", self.count())
        };
        context
            .get_or_try_init(|| {
                let _relaxed = self.relax()?;
                self.driver.retain_context(device)
            })
            .copied()
    }

    /// How many multiprocessors a device has. The driver is asked once.
    pub fn multiprocessors(&self, device: u32) -> Result<u32> {
        let Some(known) = self.multiprocessors.get(device as usize) else {
            fail!(InvalidArgument, "device {device} does not exist; there are {}", self.count())
        };
        known.get_or_try_init(|| self.driver.multiprocessors(device)).copied()
    }

    /// Makes a device's primary context current on this thread until the answer is dropped.
    pub fn enter(&self, device: u32) -> Result<Entered<'_>> {
        let context = self.context(device)?;
        // Asking costs less than pushing and popping.
        let pushed = self.driver.current_context()? != Some(context);
        if pushed {
            // SAFETY: retained until `self` is dropped, which the answer does not outlive.
            unsafe { self.driver.push_context(context) }?;
        }
        Ok(Entered { driver: &*self.driver, pushed, thread: PhantomData })
    }

    /// Allows this thread calls that captures forbid, until the answer is dropped: what is done in between
    /// has nothing to do with what anybody captures.
    pub fn relax(&self) -> Result<Relaxed<'_>> {
        let before = self.driver.exchange_capture_mode(CaptureMode::Relaxed)?;
        Ok(Relaxed { driver: &*self.driver, before, thread: PhantomData })
    }

    /// Whether `device` reaches memory of `peer` directly; makes it so where it can be, once for each pair.
    pub fn reaches(&self, device: u32, peer: u32) -> Result<bool> {
        let (own, other) = (self.context(device)?, self.context(peer)?);
        if own == other {
            return Ok(true);
        }
        // Both exist, or they would have no contexts.
        let pair = &self.reach[device as usize * self.contexts.len() + peer as usize];
        pair.get_or_try_init(|| {
            if self.apart || !self.driver.can_access_peer(device, peer)? {
                return Ok(false);
            }
            let _relaxed = self.relax()?;
            let _entered = self.enter(device)?;
            // SAFETY: a retained context.
            let refusal = unsafe { self.driver.enable_peer_access(other) }?;
            if let Some(refusal) = &refusal {
                log::warn!("GPU {device} does not reach GPU {peer}: {refusal}");
            }
            Ok(refusal.is_none())
        })
        .copied()
    }

    /// The device of a stream. A default stream is of the device that is current on the calling thread, or of
    /// the first. Refuses one of a context that the program has made: nothing of ours runs there, nor is
    /// recorded.
    pub fn device_of_stream(&self, stream: StreamHandle) -> Result<u32> {
        if stream.is_default() {
            return Ok(self.driver.current_device()?.unwrap_or(0));
        }
        // SAFETY: whoever hands a stream in has promised that it lives.
        let context = unsafe { self.driver.stream_context(stream) }?;
        if let Some(device) = self.device_of_primary(context) {
            return Ok(device);
        }
        // SAFETY: as above; a stream keeps its context.
        let (device, is_green) =
            unsafe { (self.driver.context_device(context)?, self.driver.is_green(stream)?) };
        if !is_green && self.context(device)? != context {
            fail!(
                InvalidArgument,
                "the stream is of a context that the program has made on GPU {device} (cuCtxCreate): give one of the GPU's primary \
                 context, which is the CUDA runtime's"
            );
        }
        Ok(device)
    }

    /// The device whose primary context this is, if it is one that is used here.
    fn device_of_primary(&self, context: ContextHandle) -> Option<u32> {
        let device = self.contexts.iter().position(|known| known.get() == Some(&context));
        // It came from a u32.
        device.map(|device| device as u32)
    }

    /// Refuses the default stream of a device on a thread whose current context is one that the program has
    /// made there: that has a default stream of its own, which nothing of ours waits for.
    pub fn check_default_stream(&self, device: u32) -> Result<()> {
        let Some(current) = self.driver.current_context()? else { return Ok(()) };
        let is_primary = self.device_of_primary(current).is_some();
        if !is_primary && self.driver.current_device()? == Some(device) && self.context(device)? != current {
            fail!(
                InvalidArgument,
                "this thread's context on GPU {device} is one that the program has made (cuCtxCreate), whose default stream is \
                 another than that of the GPU's primary context: make that current, or give a stream of it"
            );
        }
        Ok(())
    }

    /// Pinned memory of zeros for words, stands and slots, which free it with these devices: where it begins.
    /// `device` is any that will use it.
    pub(super) fn pinned_page(&self, device: u32, bytes: usize) -> Result<usize> {
        let page = {
            let _relaxed = self.relax()?;
            let _entered = self.enter(device)?;
            self.driver().allocate_host(bytes)?
        };
        // SAFETY: the page was just allocated, this long, and is nobody else's.
        unsafe { page.write_bytes(0, bytes) };
        Ok(page.expose_provenance())
    }

    pub(super) fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stands(&self) -> MutexGuard<'_, Stands> {
        self.stands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What CUDA knows of an address; `None` for memory that it has not heard of.
    pub fn locate(&self, address: u64) -> Result<Option<Location>> {
        match self.driver.locate(address)? {
            Found::Here(location) => Ok(Some(location)),
            Found::Nowhere => Ok(None),
            Found::NoContext => self.locate_in_a_context(address),
        }
    }

    /// As [`Devices::locate`], on a thread without a context: in one that is there, whichever. The first
    /// device's is made if none is.
    #[cold]
    fn locate_in_a_context(&self, address: u64) -> Result<Option<Location>> {
        let made = self.contexts.iter().position(|context| context.get().is_some());
        let entered = match made {
            // The device came from a u32.
            Some(device) => self.enter(device as u32),
            None => self.enter(0).map_err(|error| {
                error.context("the context of GPU 0, in which a thread that has none asks about a pointer")
            }),
        };
        let _entered = entered?;
        match self.driver.locate(address)? {
            Found::Here(location) => Ok(Some(location)),
            Found::Nowhere => Ok(None),
            Found::NoContext => fail!(Internal, "the driver finds no context where one is current"),
        }
    }

    /// As [`Devices::locate`], of this machine's driver, asked by calls that may be given either memory.
    ///
    /// Where nobody has loaded libcuda there is no device memory, and this neither loads it nor looks further
    /// than the count of libraries that the process has loaded.
    pub fn locate_if_loaded(address: u64) -> Result<Option<Location>> {
        match Libcuda::loaded().map_or(Ok(Found::Nowhere), |driver| driver.locate(address))? {
            Found::Here(location) => Ok(Some(location)),
            Found::Nowhere => Ok(None),
            // Somebody uses the driver, then.
            Found::NoContext => Devices::open()?.locate(address),
        }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        let mut pages = self.words.get_mut().unwrap_or_else(PoisonError::into_inner).pages();
        pages.extend(self.stands.get_mut().unwrap_or_else(PoisonError::into_inner).pages());
        pages.extend(self.slots.get_mut().unwrap_or_else(PoisonError::into_inner).pages());
        if !pages.is_empty() {
            let freed = self.relax().and_then(|_relaxed| {
                let _entered = self.enter(0)?;
                pages.into_iter().try_for_each(|page| {
                    // SAFETY: ours; uses hold the devices, so there are none.
                    unsafe { self.driver.free_host(std::ptr::with_exposed_provenance_mut(page)) }
                })
            });
            if let Err(error) = freed {
                log::warn!("{error}");
            }
        }
        for (device, context) in self.contexts.iter().enumerate() {
            if context.get().is_some() {
                // SAFETY: retained once, by `context`. The device came from a u32.
                if let Err(error) = unsafe { self.driver.release_context(device as u32) } {
                    log::warn!("{error}");
                }
            }
        }
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").field("count", &self.count()).field("driver", &self.driver).finish()
    }
}

/// A device's primary context is current on this thread; dropping it makes current what was before.
#[derive(Debug)]
#[must_use]
pub struct Entered<'a> {
    driver: &'a dyn Driver,
    pushed: bool,
    /// What is current is a thread's own.
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        // SAFETY: pushed by `enter` on this thread, and guards are dropped in turn.
        if let Err(error) = unsafe { self.driver.pop_context() } {
            log::error!("the caller's context could not be restored: {error}");
        }
    }
}

/// This thread's capture mode is relaxed; dropping it restores what it was.
#[derive(Debug)]
#[must_use]
pub struct Relaxed<'a> {
    driver: &'a dyn Driver,
    before: CaptureMode,
    thread: PhantomData<*const ()>,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.exchange_capture_mode(self.before) {
            log::error!("the caller's capture mode could not be restored: {error}");
        }
    }
}

/// What keeps devices apart where UNISONO_P2P does not say, as its user knows it.
static APART_BY: OnceCell<&str> = OnceCell::new();

/// Keeps devices from reaching each other, as UNISONO_P2P=0 does, unless that is set: for a setting of
/// another library's, in the words of its user. Before [`Devices::open`].
pub fn keep_apart(setting: &'static str) {
    // Whoever was first has had its way.
    let _ = APART_BY.set(setting);
}

/// The setting that keeps devices from reaching each other, if one does.
pub fn apart_by() -> Result<Option<&'static str>> {
    Ok(match switch("UNISONO_P2P", settings::get("UNISONO_P2P").as_deref())? {
        None => APART_BY.get().copied(),
        Some(true) => None,
        Some(false) => Some("UNISONO_P2P=0"),
    })
}
