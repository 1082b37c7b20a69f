//! The proof that GPUs reach each other: each writes into every other's arena, raises a flag behind it, and
//! reads from it. What the driver answers when it is asked for peer access is not enough: behind some bridges
//! writes get lost.

use std::sync::Arc;

use crate::cuda::context::Devices;
use crate::cuda::memory::PinnedBuffer;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};

use super::board::MAX_MEMBERS;

/// Bytes that one member writes to another.
const SLOT: usize = 64;
/// The last word of a slot is the flag.
const FLAG_AT: usize = SLOT - 4;
const AREA: usize = SLOT * MAX_MEMBERS;
/// Here every other member writes its slot; this rank's own is for the others to read.
const INBOX: usize = 0;
/// From here it is written to the others.
const OUTBOX: usize = AREA;
/// To here the others' own slots are read.
const READ: usize = 2 * AREA;

/// Bytes at an arena's end for this.
pub(super) const PROBE_BYTES: usize = 3 * AREA;

/// One rank's part in it.
pub(super) struct Probe {
    stream: Stream,
    memory: PinnedBuffer,
    /// Its area on its own GPU.
    area: u64,
    rank: usize,
    /// Different from group to group, so that nothing old passes for new.
    salt: u64,
}

impl Probe {
    /// Writes what the others will read.
    pub(super) fn new(
        devices: &Arc<Devices>,
        device: u32,
        area: u64,
        rank: usize,
        salt: u64,
        deadline: Deadline,
    ) -> Result<Probe> {
        let stream = Stream::new(devices, device, false)?;
        let memory = PinnedBuffer::new(devices, device, PROBE_BYTES)?;
        let probe = Probe { stream, memory, area, rank, salt };
        for member in 0..MAX_MEMBERS {
            probe.put(
                INBOX + member * SLOT,
                &if member == rank { probe.pattern(rank, rank) } else { [0; SLOT] },
            );
            probe.put(OUTBOX + member * SLOT, &probe.pattern(rank, member));
        }
        // SAFETY: the area and the pinned memory have this many bytes, and live until the stream is done with
        // them: a probe that gets stuck is kept (`Setup`).
        unsafe { probe.stream.copy_to_device(area, probe.memory.address(), READ) }?;
        probe.stream.synchronize(deadline)?;
        Ok(probe)
    }

    /// Writes to the areas of the others, each given with the device that it is reached as.
    pub(super) fn write(&self, areas: &[(u64, u32)], deadline: Deadline) -> Result<()> {
        for (member, &(area, device)) in areas.iter().enumerate().filter(|(member, _)| *member != self.rank) {
            let to = area + (INBOX + self.rank * SLOT) as u64;
            let from = self.area + (OUTBOX + member * SLOT) as u64;
            // SAFETY: inside of both areas; they live until the stream is done with them, as above.
            unsafe {
                self.stream.copy_to_peer(to, device, from, FLAG_AT)?;
                self.stream.write_value(to + FLAG_AT as u64, FLAG)?;
            }
        }
        self.stream.synchronize(deadline)
    }

    /// Reads what the others have written here, and what they keep for it; compares.
    pub(super) fn read(&self, areas: &[(u64, u32)], deadline: Deadline) -> Result<()> {
        let others = || areas.iter().enumerate().filter(|(member, _)| *member != self.rank);
        for (member, &(area, device)) in others() {
            let from = area + (INBOX + member * SLOT) as u64;
            // SAFETY: as above.
            unsafe {
                self.stream.copy_from_peer(self.area + (READ + member * SLOT) as u64, from, device, SLOT)
            }?;
        }
        // SAFETY: as above.
        unsafe { self.stream.copy_to_host(self.memory.address(), self.area, PROBE_BYTES) }?;
        self.stream.synchronize(deadline)?;
        for (member, _) in others() {
            let mut written = self.pattern(member, self.rank);
            written[FLAG_AT..].copy_from_slice(&FLAG.to_le_bytes());
            let wrong = if self.get(INBOX + member * SLOT) != written {
                "was written to it by"
            } else if self.get(READ + member * SLOT) != self.pattern(member, member) {
                "it reads from"
            } else {
                continue;
            };
            let device = self.stream.device();
            let text =
                format!("GPU {device} does not find what {wrong} rank {member}: peer access is broken here");
            return Err(Error::new(Status::Cuda, text));
        }
        Ok(())
    }

    /// What `from` writes to `to`.
    fn pattern(&self, from: usize, to: usize) -> [u8; SLOT] {
        let seed = self.salt ^ (from as u64) << 32 ^ (to as u64 + 1) << 48;
        let mut bytes = [0; SLOT];
        for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            let word = seed.wrapping_add(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            chunk.copy_from_slice(&(word | 1).to_le_bytes());
        }
        bytes
    }

    fn put(&self, at: usize, slot: &[u8; SLOT]) {
        // SAFETY: inside of the pinned memory, which the stream does not use now.
        unsafe { self.memory.address().add(at).copy_from_nonoverlapping(slot.as_ptr(), SLOT) };
    }

    fn get(&self, at: usize) -> [u8; SLOT] {
        // SAFETY: as above; it was written by the copy that has ended.
        unsafe { self.memory.address().add(at).cast::<[u8; SLOT]>().read() }
    }
}

const FLAG: u32 = 0x7570_6f6e;
