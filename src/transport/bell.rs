//! The doorbell of an endpoint: what a thread with nothing to do sleeps on, and how peers wake it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::segment::{PeerSegment, Segment};
use crate::error::Result;

/// What a watched descriptor is ready for. A hang-up or error counts as both: the next call tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// A read gets something, or the end, or an error.
    pub readable: bool,
    /// A write gets somewhere, or an error.
    pub writable: bool,
}

/// The doorbell of this endpoint. Any thread may call any method.
pub struct Bell {}

impl Bell {
    /// A bell whose parked word lives in `segment`.
    pub fn new(_segment: Arc<Segment>) -> Result<Bell> {
        todo!()
    }
    /// Watches `fd` (level-triggered), or changes what it is watched for. `token` is any value but `u64::MAX`.
    pub fn watch(&self, _fd: BorrowedFd<'_>, _token: u64, _read: bool, _write: bool) -> io::Result<()> {
        todo!()
    }
    /// Stops watching `fd`. Not watched is no error.
    pub fn unwatch(&self, _fd: BorrowedFd<'_>) {
        todo!()
    }
    /// Says that this endpoint is about to sleep. Check every condition once more after this call, then
    /// [`Bell::park`] or [`Bell::cancel_park`].
    pub fn prepare_park(&self) {
        todo!()
    }
    /// Takes it back.
    pub fn cancel_park(&self) {
        todo!()
    }
    /// Sleeps until rung, until a watched descriptor is ready, or until `timeout` (`None`: for ever). Events are
    /// appended as (token, what for); a ring by itself appends none.
    pub fn park(&self, _timeout: Option<Duration>, _events: &mut Vec<(u64, Ready)>) -> io::Result<()> {
        todo!()
    }
    /// The events that are there now.
    pub fn poll(&self, _events: &mut Vec<(u64, Ready)>) -> io::Result<()> {
        todo!()
    }
    /// Wakes whoever parks here, from a thread of this process.
    pub fn ring(&self) {
        todo!()
    }
    /// Readable while there are events or rings: it nests in another epoll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// The eventfd, to be passed to a peer.
    pub fn ringer(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

/// The doorbell of a peer on this host.
pub struct PeerBell {}

impl PeerBell {
    /// From the peer's segment and the eventfd that it passed.
    pub fn new(_segment: Arc<PeerSegment>, _ringer: OwnedFd) -> PeerBell {
        todo!()
    }
    /// Wakes the peer if it sleeps or is about to. Call it after publishing.
    pub fn ring_if_parked(&self) {
        todo!()
    }
}
