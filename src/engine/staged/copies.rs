//! Copies between a device and pinned memory, by kernels where the device has any.
//!
//! A device's copy engines have few queues, and all streams share them, whatever their priority. What a
//! caller's stream was given behind a call, a copy of the result to the host say, waits at the head of one of
//! them; a copy of ours behind it in the same queue would never run. Kernels have more queues. And they are
//! no slower.

use super::StreamOrder;
use super::porter::{Copying, Way};
use crate::cuda::local::{Fold, Kernels, Operand};
use crate::cuda::stream::Stream;
use crate::error::Result;
use crate::reduce::{DataType, Operator, Representation};

/// What must have been prepared for a copy: a sum of one operand.
pub const COPY: (DataType, Operator) = (DataType::U8, Operator::Sum);

impl StreamOrder {
    /// Copies so, in the order of `stream`.
    ///
    /// # Safety
    /// As [`Stream`] says.
    pub(super) unsafe fn copy(&self, stream: &Stream, copy: Copying) -> Result<()> {
        let Copying { way, to, from, bytes } = copy;
        let pinned = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        match way {
            // SAFETY: the caller's promise.
            Way::ToHost => unsafe { self.copy_to_host(stream, pinned(to), from, bytes) },
            // SAFETY: the caller's promise.
            Way::ToDevice => unsafe { self.copy_to_device(stream, to, pinned(from), bytes) },
            // SAFETY: the caller's promise.
            Way::OnDevice => unsafe { self.copy_on_device(stream, to, from, bytes) },
        }
    }

    /// Copies from the call's device to pinned memory, in the order of `stream`.
    ///
    /// # Safety
    /// As [`Stream`] says.
    pub(super) unsafe fn copy_to_host(
        &self,
        stream: &Stream,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        match &self.copier {
            // SAFETY: the caller's promise; a copier has been prepared.
            Some(kernels) => unsafe { copy(&**kernels, stream, to.expose_provenance() as u64, from, bytes) },
            // SAFETY: the caller's promise.
            None => unsafe { stream.copy_to_host(to, from, bytes) },
        }
    }

    /// Copies from pinned memory to the call's device, in the order of `stream`.
    ///
    /// # Safety
    /// As [`Stream`] says.
    pub(super) unsafe fn copy_to_device(
        &self,
        stream: &Stream,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        match &self.copier {
            // SAFETY: as above.
            Some(kernels) => unsafe { copy(&**kernels, stream, to, from.expose_provenance() as u64, bytes) },
            // SAFETY: the caller's promise.
            None => unsafe { stream.copy_to_device(to, from, bytes) },
        }
    }

    /// Copies from one place of the call's device to another, in the order of `stream`.
    ///
    /// # Safety
    /// As [`Stream`] says.
    pub(super) unsafe fn copy_on_device(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        match &self.copier {
            // SAFETY: as above.
            Some(kernels) => unsafe { copy(&**kernels, stream, to, from, bytes) },
            // SAFETY: the caller's promise.
            None => unsafe { stream.copy_to_peer(to, self.device, from, bytes) },
        }
    }
}

/// Copies in the order of a stream, between its device and memory that is pinned, which is reached at its own
/// address.
///
/// # Safety
/// As [`Stream`] says. [`COPY`] has been prepared on its device.
pub(super) unsafe fn copy(
    kernels: &dyn Kernels,
    stream: &Stream,
    to: u64,
    from: u64,
    bytes: usize,
) -> Result<()> {
    // The largest elements that the addresses allow.
    let dtype = match (to | from | bytes as u64).trailing_zeros() {
        0 | 1 => DataType::U8,
        2 => DataType::U32,
        _ => DataType::U64,
    };
    let operand = Operand { address: from, representation: Representation::Element, scale: 1.0 };
    let fold = Fold {
        stream,
        dtype,
        operator: COPY.1,
        ranks: 1,
        operands: &[operand],
        out: to,
        representation: Representation::Element,
        count: bytes / dtype.size(),
        max_blocks: 0,
    };
    let _entered = stream.devices().enter(stream.device())?;
    // SAFETY: the caller's promise.
    unsafe { kernels.fold(stream.devices(), &fold) }
}
