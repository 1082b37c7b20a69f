//! Links between two ranks. A link is a set of ordered byte streams and, between ranks of one host, a view of the
//! peer's memory. The engine frames messages over the streams; nothing here knows what a message means.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

/// One ordered byte stream between two ranks: a TCP connection, a ring in shared memory, later TLS. Never blocks.
pub trait Stream: Send {
    /// Writes as much of `parts`, in order, as fits now. `WouldBlock` when nothing fits.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads what is there, at most `into`. `WouldBlock` when nothing is there, `Ok(0)` when the peer has closed.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// What to poll. `None`: the peer rings the doorbell of this endpoint instead (see `bell`), both when data comes
    /// and when room comes after a write that did not fit.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>>;
}
