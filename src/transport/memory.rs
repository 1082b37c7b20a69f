//! A peer's memory on the same host: its segment, its bell, and its private pages where the kernel allows it.

use std::io;
use std::sync::Arc;

use super::bell::PeerBell;
use super::segment::PeerSegment;

/// What a rank can reach of a peer on the same host.
pub struct PeerMemory {
    /// The peer's segment.
    pub segment: Arc<PeerSegment>,
    /// The peer's doorbell.
    pub bell: PeerBell,
    /// The peer's process, as seen from here.
    pub pid: u32,
    /// Whether [`PeerMemory::pull`] works: proved when the link opened.
    pub can_pull: bool,
}

impl PeerMemory {
    /// Copies `into.len()` bytes at `remote_address` of the peer's address space. An error when they are not mapped there.
    ///
    /// # Safety
    /// When the peer is this very process, the bytes must be readable and nobody may write them meanwhile.
    /// In any other process the kernel checks.
    pub unsafe fn pull(&self, _remote_address: u64, _into: &mut [u8]) -> io::Result<()> {
        todo!()
    }
}
