//! The word that ends kernels, and what they say when it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::context::Devices;
use crate::cuda::memory::PinnedBuffer;
use crate::error::{Result, fail};

/// The page: the abort word, and on another line the record. `Page` of `kernels/exchange_memory.cuh` is the
/// same.
#[repr(C)]
struct Page {
    abort: AtomicU64,
    apart: [u64; 15],
    /// 1 once the rest of the record is there.
    recorded: AtomicU64,
    phase: AtomicU64,
    block: AtomicU64,
    peer: AtomicU64,
    sequence: AtomicU64,
}

/// A page of pinned memory through which the host ends the kernels of an exchange, and a kernel that was
/// ended says what it waited for. One for each exchange. All methods from any thread.
#[derive(Debug)]
pub struct Fault {
    page: PinnedBuffer,
}

/// What a kernel waited for when it was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// What the part of the kernel waits for; the peer's name comes next.
    pub phase: &'static str,
    /// The block.
    pub block: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// The number of the packet or tile between the two ranks, counted from the group's first.
    pub sequence: u64,
}

impl FaultRecord {
    /// What it waited for, for a person, where `first` is the group's number of the exchange's first rank.
    pub fn describe(&self, first: u32) -> String {
        let FaultRecord { phase, peer, block, sequence } = self;
        format!("{phase} rank {} (#{sequence} between the two, block {block})", first + peer)
    }
}

impl Fault {
    /// A page for kernels of `device`.
    pub fn new(devices: &Arc<Devices>, device: u32) -> Result<Fault> {
        let page = PinnedBuffer::new(devices, device, size_of::<Page>())?;
        // SAFETY: pinned pages are as long as asked for, aligned to pages, and nobody else knows this one
        // yet.
        unsafe { page.address().write_bytes(0, size_of::<Page>()) };
        Ok(Fault { page })
    }

    /// Ends what spins now within a millisecond or so, and whatever starts later at once. There is no way
    /// back.
    pub fn abort(&self) {
        self.page().abort.store(1, Ordering::Release);
    }

    /// Whether [`Fault::abort`] was called.
    pub fn is_aborted(&self) -> bool {
        self.page().abort.load(Ordering::Acquire) != 0
    }

    /// What the first block that was ended waited for; none if none was, or none yet.
    pub fn record(&self) -> Option<FaultRecord> {
        let page = self.page();
        if page.recorded.load(Ordering::Acquire) == 0 {
            return None;
        }
        let phase = match page.phase.load(Ordering::Relaxed) {
            0 => "room in the line slots of",
            1 => "lines from",
            2 => "room in the tile slots of",
            3 => "tiles from",
            4 => "room for results in the tile slots of",
            5 => "results from",
            6 => "the barrier of a broadcast by stages with",
            7 => "signals from",
            _ => "something unknown of",
        };
        // The kernel wrote 32-bit values.
        let (block, peer) =
            (page.block.load(Ordering::Relaxed) as u32, page.peer.load(Ordering::Relaxed) as u32);
        Some(FaultRecord { phase, block, peer, sequence: page.sequence.load(Ordering::Relaxed) })
    }

    /// Refuses once aborted.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_aborted() {
            fail!(Aborted, "the exchange between GPUs was aborted; make a new communicator");
        }
        Ok(())
    }

    /// Where kernels see the page: pinned memory has one address for the host and every device.
    pub(in crate::cuda) fn device_address(&self) -> u64 {
        self.page.address() as u64
    }

    fn page(&self) -> &Page {
        // SAFETY: as long as `page`, aligned, initialised by `new`, and touched as atomics by the host.
        unsafe { &*self.page.address().cast::<Page>() }
    }
}
