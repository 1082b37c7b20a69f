//! epoll with a bell: one thread waits for many descriptors, others may wake it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The token that events of the bell carry; they are not reported.
const BELL: u64 = u64::MAX;
const BATCH: usize = 256;

/// What is waited for. Errors and a close by the peer are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Bytes, connections or the end of the stream to be read.
    pub read: bool,
    /// Room to be written to.
    pub write: bool,
}

/// What happened to one descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The number given to [`Poller::add`].
    pub token: u64,
    /// There is something to read, the end of the stream included.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
    /// The peer sends nothing more, or the descriptor has failed.
    pub closed: bool,
}

/// A level-triggered epoll and an eventfd that interrupts its wait.
pub struct Poller {
    epoll: OwnedFd,
    bell: OwnedFd,
}

impl Poller {
    /// A poller that watches only its bell.
    pub fn new() -> io::Result<Poller> {
        // SAFETY: no memory of ours is involved; the result is checked before it is owned.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: as above.
        let bell = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        let poller = Poller { epoll, bell };
        poller.control(libc::EPOLL_CTL_ADD, poller.bell.as_raw_fd(), libc::EPOLLIN as u32, BELL)?;
        Ok(poller)
    }

    /// Watches `fd` until it is removed or its last descriptor is closed. `token` is not `u64::MAX`.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        debug_assert_ne!(token, BELL);
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), interest.bits(), token)
    }

    /// Changes what is waited for.
    pub fn modify(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_raw_fd(), interest.bits(), token)
    }

    /// Replaces `events` by what has happened, waiting until something does, a wake or the timeout. An interrupted
    /// wait returns without events.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        // Rounded up, so that a caller with 0.3 ms left does not spin.
        let timeout = timeout
            .map_or(-1, |timeout| i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
        events.clear();
        let mut raw = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        // SAFETY: `raw` is writable and holds BATCH entries, and the kernel writes no more than these.
        let count =
            unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), raw.as_mut_ptr(), BATCH as i32, timeout) };
        let Ok(count) = usize::try_from(count) else {
            let cause = io::Error::last_os_error();
            return if cause.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(cause) };
        };
        for event in &raw[..count] {
            // Copies, because the structure is packed.
            let (token, bits) = (event.u64, event.events);
            if token == BELL {
                self.silence();
                continue;
            }
            let any = |flags: i32| bits & flags as u32 != 0;
            events.push(Event {
                token,
                readable: any(libc::EPOLLIN),
                writable: any(libc::EPOLLOUT),
                closed: any(libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR),
            });
        }
        Ok(())
    }

    /// Ends the present or the next [`Poller::wait`]. From any thread.
    pub fn wake(&self) {
        let one = 1_u64;
        // SAFETY: reads the 8 bytes of `one`. It fails only when the counter is full, and then a wake is under way.
        let _ = unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn silence(&self) {
        let mut count = 0_u64;
        // SAFETY: writes the 8 bytes of `count`. It fails only when another wait has taken the wake already.
        let _ = unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    fn control(&self, operation: i32, fd: i32, bits: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: bits, u64: token };
        // SAFETY: the epoll descriptor is open, and `event` is read during the call only.
        if unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &raw mut event) } == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    }
}

impl Interest {
    fn bits(self) -> u32 {
        let mut bits = libc::EPOLLRDHUP;
        if self.read {
            bits |= libc::EPOLLIN;
        }
        if self.write {
            bits |= libc::EPOLLOUT;
        }
        bits as u32
    }
}

fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened this descriptor for us, and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn reports_what_happened_and_to_whom() {
        let poller = Poller::new().unwrap();
        let (mut a, b) = UnixStream::pair().unwrap();
        poller.add(b.as_fd(), 7, Interest { read: true, write: false }).unwrap();
        let mut events = Vec::new();
        poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
        a.write_all(b"x").unwrap();
        poller.wait(&mut events, None).unwrap();
        assert!(matches!(events[..], [Event { token: 7, readable: true, writable: false, closed: false }]));
        poller.modify(b.as_fd(), 7, Interest { read: false, write: true }).unwrap();
        drop(a);
        poller.wait(&mut events, None).unwrap();
        assert!(matches!(events[..], [Event { token: 7, readable: false, writable: true, closed: true }]));
    }

    #[test]
    fn a_wake_ends_one_wait_only() {
        let poller = Poller::new().unwrap();
        let mut events = Vec::new();
        poller.wake();
        poller.wake();
        poller.wait(&mut events, None).unwrap();
        assert!(events.is_empty());
        let since = std::time::Instant::now();
        poller.wait(&mut events, Some(Duration::from_millis(20))).unwrap();
        assert!(since.elapsed() >= Duration::from_millis(20), "the bell still rings");
    }
}
