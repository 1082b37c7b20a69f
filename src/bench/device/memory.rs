//! The buffers of a rank on its device, and how they are filled and read.

use std::sync::Arc;

use crate::cuda::context::Devices;
use crate::cuda::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::Result;

/// Bytes that go to or come from a device at once.
pub(super) const PIECE: usize = 4 << 20;

/// A rank's input and output, and pinned memory between them and the host.
pub(super) struct Buffers {
    pub(super) input: DeviceBuffer,
    pub(super) output: DeviceBuffer,
    staging: PinnedBuffer,
}

impl Buffers {
    /// Input and output of `bytes` each.
    pub(super) fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<Buffers> {
        Ok(Buffers {
            input: DeviceBuffer::new(devices, device, bytes)?,
            output: DeviceBuffer::new(devices, device, bytes)?,
            staging: PinnedBuffer::new(devices, device, PIECE)?,
        })
    }

    /// Fills `bytes` bytes from `address` with repetitions of what `write` makes of `tile` bytes (at most
    /// [`PIECE`]).
    ///
    /// # Safety
    /// They are device memory of the stream's device, and nobody else uses them meanwhile.
    pub(super) unsafe fn repeat(
        &mut self,
        stream: &Stream,
        address: u64,
        bytes: usize,
        tile: usize,
        write: impl FnOnce(&mut [u8]),
        deadline: Deadline,
    ) -> Result<()> {
        write(&mut self.staging()[..tile]);
        for offset in (0..bytes).step_by(tile) {
            let (to, part) = (address + offset as u64, tile.min(bytes - offset));
            // SAFETY: the caller's promise; the staging is left alone until the stream is done.
            unsafe { stream.copy_to_device(to, self.staging.address(), part) }?;
        }
        stream.synchronize(deadline)
    }

    /// Fills `bytes` bytes from `address`, a piece at a time: `write` is told at which byte it is.
    ///
    /// # Safety
    /// As [`Buffers::repeat`].
    pub(super) unsafe fn fill(
        &mut self,
        stream: &Stream,
        address: u64,
        bytes: usize,
        mut write: impl FnMut(usize, &mut [u8]),
        deadline: Deadline,
    ) -> Result<()> {
        for offset in (0..bytes).step_by(PIECE) {
            let part = PIECE.min(bytes - offset);
            let write = |piece: &mut [u8]| write(offset, piece);
            // SAFETY: the caller's promise.
            unsafe { self.repeat(stream, address + offset as u64, part, part, write, deadline) }?;
        }
        Ok(())
    }

    /// Reads `bytes` bytes, at most [`PIECE`], from `address`.
    ///
    /// # Safety
    /// As [`Buffers::repeat`].
    pub(super) unsafe fn read(
        &mut self,
        stream: &Stream,
        address: u64,
        bytes: usize,
        deadline: Deadline,
    ) -> Result<&[u8]> {
        // SAFETY: as in `repeat`.
        unsafe { stream.copy_to_host(self.staging.address(), address, bytes) }?;
        stream.synchronize(deadline)?;
        Ok(&self.staging()[..bytes])
    }

    fn staging(&mut self) -> &mut [u8] {
        // SAFETY: PIECE bytes of ours, which no stream uses: every function waits for what it has enqueued.
        unsafe { std::slice::from_raw_parts_mut(self.staging.address(), PIECE) }
    }
}
