//! The devices as one context sees them, and what copies on them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::Call;
use super::context::Context;
use super::plans::PORTION_BYTES;
use crate::cuda::context::Devices;
use crate::cuda::driver::{Capture, Location, StreamHandle, least_limit};
use crate::cuda::fold::FoldKernels;
use crate::cuda::libcuda::Libcuda;
use crate::cuda::local::{Kernels, limited};
use crate::cuda::scalar;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::device::Loads;
use crate::engine::endpoint::lock;
use crate::engine::staged;
use crate::engine::staged::relay::Limits;
use crate::engine::wire::Class;
use crate::error::{Error, Result};

/// How long after kernels could not be loaded they are tried again.
pub(super) const LOADED_AGAIN: Duration = Duration::from_secs(60);

/// The devices as one context sees them.
#[derive(Default)]
pub(super) struct Cuda {
    devices: OnceCell<Arc<Devices>>,
    kernels: OnceCell<Arc<dyn Kernels>>,
    /// When they could last not be loaded, by GPU.
    refused: Mutex<HashMap<u32, Instant>>,
    #[cfg(test)]
    piece: std::sync::atomic::AtomicUsize,
    #[cfg(test)]
    limits: std::sync::OnceLock<Limits>,
    #[cfg(test)]
    loads: std::sync::OnceLock<Loads>,
}

impl Cuda {
    /// Those of the machine's driver, unless the context was given others.
    pub(super) fn devices(&self) -> Result<&Arc<Devices>> {
        self.devices.get_or_try_init(Devices::open)
    }

    /// What CUDA knows of an address. Costs next to nothing where no driver is in the process.
    pub(super) fn locate(&self, address: u64) -> Result<Option<Location>> {
        match self.devices.get() {
            Some(devices) => devices.locate(address),
            None => Devices::locate_if_loaded(address),
        }
    }

    /// The device of a stream, if it is one that is being captured.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn capturing(&self, stream: Option<StreamHandle>) -> Result<Option<u32>> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.device_and_capture(stream) }?;
        Ok(found.and_then(|(device, capture)| matches!(capture, Capture::Active(_)).then_some(device)))
    }

    /// The capture that a stream is in.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn capture(&self, stream: Option<StreamHandle>) -> Result<Capture> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.device_and_capture(stream) }?;
        Ok(found.map_or(Capture::None, |(_, capture)| capture))
    }

    /// The device of a stream, and the capture that it is in.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn device_and_capture(&self, stream: Option<StreamHandle>) -> Result<Option<(u32, Capture)>> {
        let Some(stream) = stream.filter(|stream| !stream.is_legacy()) else { return Ok(None) };
        let devices = self.devices()?;
        let device = devices.device_of_stream(stream)?;
        // SAFETY: the caller's promise.
        let capture = unsafe { Stream::borrow(devices, device, stream) }?.capture()?;
        Ok(Some((device, capture)))
    }

    /// Whether such a call is on host memory because this process has no driver: what most calls are on
    /// machines without GPUs, and short ones take half a microsecond in all.
    pub(super) fn has_no_part_in(&self, call: &Call) -> bool {
        call.stream.is_none() && !call.on_device && self.devices.get().is_none() && !Libcuda::is_loaded()
    }

    /// A stream for calls that name none.
    pub(super) fn front(&self, device: u32) -> Result<Arc<Stream>> {
        let devices = self.devices()?;
        devices.check_default_stream(device)?;
        staged::front(devices, device)
    }

    pub(super) fn piece_bytes(&self) -> usize {
        self.pretended_piece().unwrap_or(staged::PIECE_BYTES)
    }

    /// Bytes of the messages of a long block: see [`PORTION_BYTES`].
    pub(super) fn portion_bytes(&self) -> usize {
        self.pretended_piece().unwrap_or(PORTION_BYTES)
    }

    #[cfg(not(test))]
    fn pretended_piece(&self) -> Option<usize> {
        None
    }

    #[cfg(test)]
    fn pretended_piece(&self) -> Option<usize> {
        let piece = self.piece.load(std::sync::atomic::Ordering::Relaxed);
        (piece > 0).then_some(piece)
    }

    /// What folds on the devices.
    pub(super) fn kernels(&self) -> Arc<dyn Kernels> {
        self.kernels.get_or_init(|| FoldKernels::open()).clone()
    }

    /// What copies; in tests, where kernels are named.
    pub(super) fn copier(&self) -> Option<Arc<dyn Kernels>> {
        if cfg!(test) { self.kernels.get().cloned() } else { Some(self.kernels()) }
    }

    /// Other kernels than the machine's.
    #[cfg(test)]
    pub(super) fn pretend_kernels(&self, kernels: Arc<dyn Kernels>) {
        let _ = self.kernels.set(kernels);
    }

    #[cfg(not(test))]
    pub(super) fn limits(&self) -> Limits {
        Limits::default()
    }

    #[cfg(test)]
    pub(super) fn limits(&self) -> Limits {
        self.limits.get().copied().unwrap_or_default()
    }

    /// Relays other calls than those that pay, in other pieces.
    #[cfg(test)]
    pub(super) fn pretend_limits(&self, limits: Limits) {
        let _ = self.limits.set(limits);
    }

    /// What could not be loaded was tried so much earlier.
    #[cfg(test)]
    pub(super) fn pretend_later(&self, by: Duration) {
        lock(&self.refused).values_mut().for_each(|at| *at -= by);
    }

    /// Whether devices may exchange without the host.
    #[cfg(not(test))]
    pub(super) fn exchanges(&self) -> bool {
        true
    }

    #[cfg(test)]
    pub(super) fn exchanges(&self) -> bool {
        self.devices.get().is_none() || self.loads.get().is_some()
    }

    /// Where kernels come from by which devices exchange.
    #[cfg(not(test))]
    pub(super) fn loads(&self) -> Loads {
        Loads::OWN
    }

    #[cfg(test)]
    pub(super) fn loads(&self) -> Loads {
        self.loads.get().copied().unwrap_or(Loads::OWN)
    }

    /// Other kernels than the library's.
    #[cfg(test)]
    pub(super) fn pretend_loads(&self, loads: Loads) {
        let _ = self.loads.set(loads);
    }

    /// Other devices than the machine's, which do not exchange, and shorter pieces.
    #[cfg(test)]
    pub(super) fn pretend(&self, devices: &Arc<Devices>, piece: usize) {
        let _ = self.devices.set(devices.clone());
        self.piece.store(piece, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Context {
    /// What copies on a call's device, each copy with at most `max_blocks` blocks, and no more than the
    /// context allows; `None`: it has no kernels. The answer may be another one for the next call.
    pub(super) fn copier(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        max_blocks: u32,
    ) -> Option<Arc<dyn Kernels>> {
        let kernels = self.load_copier(devices, device)?;
        Some(limited(kernels, least_limit([self.max_blocks(), max_blocks])))
    }

    /// Loads what copies on a call's device, before any stream waits for a call of ours, since loading waits
    /// for the device. A call that follows one for which that failed does not try again at once: it would
    /// wait for it as long.
    pub(super) fn load_copier(&self, devices: &Arc<Devices>, device: u32) -> Option<Arc<dyn Kernels>> {
        let (dtype, operator) = staged::COPY;
        let kernels = self.cuda().copier()?;
        let refused = || lock(&self.cuda().refused);
        if refused().get(&device).is_some_and(|at| at.elapsed() < LOADED_AGAIN) {
            return None;
        }
        match kernels.prepare(devices, device, dtype, operator) {
            Ok(()) => Some(kernels),
            Err(error) => {
                refused().insert(device, Instant::now());
                log::warn!("GPU {device} copies by its copy engines in calls of '{}': {error}", self.name());
                None
            }
        }
    }

    /// The element of `bytes` bytes at `address`, memory of `device`, that a collective on `stream` takes as
    /// its factor, as it is when the stream has come this far. Waits for that, as long as the call may take.
    /// A rank that is kept from it fails the group, as [`Context::or_fail_on`] has it.
    ///
    /// # Safety
    /// The memory is valid until then, and the stream lives.
    pub unsafe fn read_factor(
        &self,
        (device, address, bytes): (u32, u64, usize),
        stream: StreamHandle,
        timeout: Option<Duration>,
    ) -> Result<[u8; scalar::MOST_BYTES]> {
        let deadline = Deadline::after(timeout.unwrap_or(self.timeout()));
        // Whether it is captured is asked in there, too.
        let entered = self.cuda().devices().and_then(|devices| Ok((devices, devices.enter(device)?)));
        let read = entered.as_ref().map_err(Error::clone).and_then(|(devices, _)| {
            // SAFETY: the caller's promise.
            let stream = unsafe { Stream::borrow(devices, device, stream) }?;
            stream.refuse_capture(
                "stream",
                "a PreMulSum whose factor is in device memory reads it on the host, which a graph cannot: give it as ncclScalarHostImmediate",
            )?;
            // SAFETY: as above.
            let read = unsafe { stream.read_scalar(address, bytes, deadline, &|| self.failure()) };
            read.map_err(|error| error.context("reading the factor of a PreMulSum"))
        });
        // SAFETY: as above.
        unsafe { self.or_fail_on(Some(stream), Class::Ordered, read) }
    }
}
