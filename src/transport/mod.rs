//! Links between two ranks. A link is a set of ordered byte streams and, between ranks of one host, a view of
//! the peer's memory. The engine frames messages over the streams; nothing here knows what a message means.

pub mod address;
pub mod bell;
pub mod handshake;
pub mod memory;
pub mod ring;
pub mod segment;
pub mod service;
pub mod tcp;
mod wire;

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use socket2::Socket;

use crate::sys::fork::Unshared;

/// One ordered byte stream between two ranks: a TCP connection, a ring in shared memory, later TLS. Never
/// blocks.
pub trait Stream: Send {
    /// Writes as much of `parts`, in order, as fits now. `WouldBlock` when nothing fits.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Reads what is there, at most `into`. `WouldBlock` when nothing is there, `Ok(0)` when the peer has
    /// closed.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// What to poll. `None`: the peer rings the doorbell of this endpoint instead (see [`bell`]), both when
    /// data comes and when room comes after a write that did not fit.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Nothing will be written any more. The peer finds the end behind what was, where it would wait for that
    /// of the process.
    fn finish(&mut self) {}

    /// The connection itself, for whoever moves its bytes in another way. `None`: it is none.
    fn into_socket(self: Box<Self>) -> Option<Unshared<Socket>> {
        None
    }

    /// A number under which something of this side's stands announced, until the peer takes it or this side
    /// withdraws it, whichever comes first. 0, which is no number: memory is not shared, or as much as can
    /// stand does.
    fn announce(&mut self) -> u32 {
        0
    }

    /// Withdraws what this side has announced under a number. Whether it stood: if not, the peer has taken
    /// it.
    fn withdraw(&self, _number: u32) -> bool {
        true
    }

    /// Takes what the peer has announced under a number. Whether it stood: if not, the peer has withdrawn it.
    fn take(&self, _number: u32) -> bool {
        false
    }

    /// Whether what the peer has announced under a number stands.
    fn stands(&self, _number: u32) -> bool {
        false
    }

    /// What is there to read, in place, when the stream can show it without a copy; may be less than all that
    /// is there (a ring shows it up to its end). `Ok(None)`: this stream cannot, use [`Stream::read`]. Empty:
    /// nothing is there now. `UnexpectedEof` when the peer has closed and everything was consumed.
    fn peek(&mut self) -> io::Result<Option<&[u8]>> {
        Ok(None)
    }

    /// Gives back the first `count` bytes of what [`Stream::peek`] showed.
    ///
    /// # Panics
    /// When `count` is more than it showed.
    fn consume(&mut self, count: usize) {
        assert_eq!(count, 0, "consume without peek");
    }
}

/// How the bytes of a link travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// Rings in shared memory.
    Shm,
    /// TCP connections.
    Tcp,
}

/// What the engine is given when a link is open. Dropping it closes the data streams; the control connection
/// belongs to the service and stays.
pub struct Link {
    /// How its bytes travel.
    pub kind: LinkKind,
    /// Its data streams, at least one, in the same order on both sides.
    pub streams: Vec<Box<dyn Stream>>,
    /// The peer's memory, on the same host when shared memory is on.
    pub memory: Option<Arc<memory::PeerMemory>>,
}
