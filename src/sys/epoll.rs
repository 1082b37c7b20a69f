//! epoll: waiting for many descriptors at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::syscall;

/// What to wait for on a descriptor. Level-triggered unless `once`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Readable.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// The end of what the peer sends, also when `read` is not asked for.
    pub close: bool,
    /// Report once, then not again until [`Epoll::watch`] is called again.
    pub once: bool,
}

/// One report: the token of the descriptor and what it is ready for. Hang-ups and errors count as both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// As given to [`Epoll::watch`].
    pub token: u64,
    /// Readable, hung up or failed.
    pub readable: bool,
    /// Writable, hung up or failed.
    pub writable: bool,
    /// The peer sends nothing more, hung up, or the descriptor has failed.
    pub closed: bool,
}

/// How many events have room on the stack.
const FEW: usize = 64;

const NOTHING: libc::epoll_event = libc::epoll_event { events: 0, u64: 0 };

/// An epoll instance.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// A new one that watches nothing.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: takes no pointers.
        let fd = unsafe { syscall!(epoll_create1(libc::EPOLL_CLOEXEC)) }?;
        // SAFETY: `fd` was just opened and belongs to nobody else.
        Ok(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Watches `fd` under `token`, or changes what it is watched for.
    pub fn watch(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        let mut events = 0;
        if interest.read {
            events |= libc::EPOLLIN | libc::EPOLLRDHUP;
        }
        if interest.write {
            events |= libc::EPOLLOUT;
        }
        if interest.close {
            events |= libc::EPOLLRDHUP;
        }
        if interest.once {
            events |= libc::EPOLLONESHOT;
        }
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        let control = |operation, event: &mut libc::epoll_event| {
            // SAFETY: `event` outlives the call; a bad descriptor is an error, not undefined.
            unsafe { syscall!(epoll_ctl(self.0.as_raw_fd(), operation, fd.as_raw_fd(), event)) }
        };
        match control(libc::EPOLL_CTL_MOD, &mut event) {
            Err(cause) if cause.raw_os_error() == Some(libc::ENOENT) => {
                control(libc::EPOLL_CTL_ADD, &mut event).map(drop)
            }
            answer => answer.map(drop),
        }
    }

    /// Stops watching `fd`. Not watched is no error.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        let nothing = std::ptr::null_mut();
        // SAFETY: EPOLL_CTL_DEL ignores the event pointer.
        let _ =
            unsafe { syscall!(epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), nothing)) };
    }

    /// Waits until something is ready or `timeout` has passed (`None`: for ever), and calls `each` for what
    /// is, up to [`FEW`] of it. A signal ends the wait early, as if the timeout had passed.
    pub fn wait(&self, timeout: Option<Duration>, each: impl FnMut(Event)) -> io::Result<()> {
        self.wait_for(&mut [NOTHING; FEW], timeout, each)
    }

    /// The same for all that is ready, if no more than `most` descriptors are watched.
    pub fn wait_all(
        &self,
        most: usize,
        timeout: Option<Duration>,
        each: impl FnMut(Event),
    ) -> io::Result<()> {
        if most <= FEW {
            return self.wait(timeout, each);
        }
        self.wait_for(&mut vec![NOTHING; most], timeout, each)
    }

    fn wait_for(
        &self,
        events: &mut [libc::epoll_event],
        timeout: Option<Duration>,
        mut each: impl FnMut(Event),
    ) -> io::Result<()> {
        let count = match self.wait_raw(events, timeout) {
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => 0,
            answer => answer?,
        };
        for event in &events[..count] {
            let bits = event.events as i32;
            let over = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            each(Event {
                token: event.u64,
                readable: over || bits & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0,
                writable: over || bits & libc::EPOLLOUT != 0,
                closed: over || bits & libc::EPOLLRDHUP != 0,
            });
        }
        Ok(())
    }

    fn wait_raw(&self, events: &mut [libc::epoll_event], timeout: Option<Duration>) -> io::Result<usize> {
        /// Whether the kernel knows epoll_pwait2 (5.11), which counts in nanoseconds.
        static FINE: AtomicBool = AtomicBool::new(true);
        // Whole milliseconds, never and not at all need no fine clock.
        let coarse = timeout.is_none_or(|timeout| timeout.subsec_nanos().is_multiple_of(1_000_000));
        if let Some(timeout) = timeout
            && !coarse
            && FINE.load(Ordering::Relaxed)
        {
            let time = libc::timespec {
                tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
                tv_nsec: timeout.subsec_nanos() as libc::c_long,
            };
            let no_mask: *const libc::sigset_t = std::ptr::null();
            // SAFETY: `events` is writable for the length given, `time` outlives the call, no signal mask is
            // passed.
            let answer = unsafe {
                syscall!(syscall(
                    libc::SYS_epoll_pwait2,
                    self.0.as_raw_fd(),
                    events.as_mut_ptr(),
                    events.len() as libc::c_int,
                    &raw const time,
                    no_mask,
                    0usize,
                ))
            };
            match answer {
                // EPERM: what an old sandbox's filter says for a call that it does not know.
                Err(cause) if matches!(cause.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                    FINE.store(false, Ordering::Relaxed);
                }
                answer => return answer.map(|count| count as usize),
            }
        }
        // Rounded up: waking early would spin until the moment.
        let milliseconds = timeout.map_or(-1, |timeout| {
            timeout.as_nanos().div_ceil(1_000_000).min(libc::c_int::MAX as u128) as libc::c_int
        });
        // SAFETY: `events` is writable for the length given.
        let count = unsafe {
            syscall!(epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, milliseconds))
        }?;
        Ok(count as usize)
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn events(epoll: &Epoll) -> Vec<Event> {
        let mut events = Vec::new();
        epoll.wait(Some(Duration::ZERO), |event| events.push(event)).unwrap();
        events
    }

    #[test]
    fn reports_what_happened_and_to_whom() {
        let epoll = Epoll::new().unwrap();
        let (mut a, b) = UnixStream::pair().unwrap();
        epoll.watch(b.as_fd(), 7, Interest { read: true, ..Interest::default() }).unwrap();
        assert_eq!(events(&epoll), []);
        a.write_all(b"x").unwrap();
        assert_eq!(events(&epoll), [Event { token: 7, readable: true, writable: false, closed: false }]);
        epoll.watch(b.as_fd(), 7, Interest { write: true, ..Interest::default() }).unwrap();
        assert_eq!(events(&epoll), [Event { token: 7, readable: false, writable: true, closed: false }]);
        epoll.unwatch(b.as_fd());
        assert_eq!(events(&epoll), []);
    }

    #[test]
    fn tells_of_the_end_when_nothing_else_is_asked_for() {
        let epoll = Epoll::new().unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        epoll.watch(b.as_fd(), 7, Interest::default()).unwrap();
        a.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(events(&epoll), []);
        epoll.watch(b.as_fd(), 7, Interest { close: true, ..Interest::default() }).unwrap();
        assert!(matches!(events(&epoll)[..], [Event { token: 7, closed: true, .. }]));
    }
}
