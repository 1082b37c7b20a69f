//! eventfd: a descriptor that is readable once somebody has signalled it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{retry, syscall};

/// An eventfd. Signals add up to one wake-up.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, not signalled.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: takes no pointers.
        let fd = unsafe { syscall!(eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }?;
        // SAFETY: `fd` was just opened and belongs to nobody else.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it readable.
    pub fn signal(&self) {
        signal(self.0.as_fd());
    }

    /// Takes all signals back: it is no longer readable.
    pub fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: the kernel writes 8 bytes into `count`, which is that long. It fails only when there is no
        // signal.
        let _ = retry(|| unsafe { syscall!(read(self.0.as_raw_fd(), (&raw mut count).cast(), 8)) });
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for EventFd {
    /// Takes a descriptor that a peer passed. If it is no eventfd, signals go astray and nothing worse
    /// happens.
    fn from(fd: OwnedFd) -> EventFd {
        EventFd(fd)
    }
}

fn signal(fd: BorrowedFd<'_>) {
    let one = 1u64;
    // SAFETY: the kernel reads 8 bytes from `one`. It fails only when the count is full, and then it is
    // readable.
    let _ = retry(|| unsafe { syscall!(write(fd.as_raw_fd(), (&raw const one).cast(), 8)) });
}
