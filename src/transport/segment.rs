//! The memory that an endpoint shares with its peers of the same host.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::error::Result;

/// Bytes kept for the flight recorder in every segment.
pub const RECORDER_BYTES: usize = 8192;

/// An endpoint's own segment: a sparse memfd, mapped shared. Pages are used when first touched.
pub struct Segment {}

impl Segment {
    /// A segment of `size` bytes (rounded up to pages).
    pub fn new(_size: usize) -> Result<Arc<Segment>> {
        todo!()
    }
    /// Its length in bytes.
    pub fn size(&self) -> usize {
        todo!()
    }
    /// `len` zeroed bytes at a multiple of `align` (a power of two, at most 4096), or `None` when there is no room.
    pub fn allocate(self: &Arc<Self>, _len: usize, _align: usize) -> Option<Region> {
        todo!()
    }
    /// Where `offset..offset + len` is mapped, or `None` when it is not inside the segment.
    pub fn address(&self, _offset: usize, _len: usize) -> Option<NonNull<u8>> {
        todo!()
    }
    /// The flight recorder's area, aligned to 64 bytes; peers read it through [`PeerSegment::recorder`].
    pub fn recorder(&self) -> NonNull<[u8; RECORDER_BYTES]> {
        todo!()
    }
    /// The word that says that the owner sleeps or is about to (see [`super::bell`]).
    pub fn parked(&self) -> &AtomicU32 {
        todo!()
    }
    /// The memfd, to be passed to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

/// A part of a [`Segment`], given back when dropped.
pub struct Region {}

impl Region {
    /// From the segment's start, in bytes: what a peer is told.
    pub fn offset(&self) -> usize {
        todo!()
    }
    /// In bytes, as asked for.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// Whether it was asked for with no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where it is mapped in this process. Valid while the region lives.
    pub fn address(&self) -> NonNull<u8> {
        todo!()
    }
}

/// A peer's segment, mapped from the descriptor that it passed.
pub struct PeerSegment {}

impl PeerSegment {
    /// Maps it, after its header and true size have been checked.
    pub fn map(_fd: OwnedFd) -> Result<PeerSegment> {
        todo!()
    }
    /// Its length in bytes.
    pub fn size(&self) -> usize {
        todo!()
    }
    /// Where `offset..offset + len` of it is mapped here, or `None` when it is not inside the segment.
    pub fn address(&self, _offset: usize, _len: usize) -> Option<NonNull<u8>> {
        todo!()
    }
    /// The flight recorder's area of the peer. The peer may be writing it.
    pub fn recorder(&self) -> NonNull<[u8; RECORDER_BYTES]> {
        todo!()
    }
    /// The peer's [`Segment::parked`].
    pub fn parked(&self) -> &AtomicU32 {
        todo!()
    }
}
