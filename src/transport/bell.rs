//! The doorbell of an endpoint: what a thread with nothing to do sleeps on, and how peers wake it.
//!
//! A sleeper and a peer that has something for it must not miss each other. Each writes, fences, and then
//! reads what the other writes:
//!
//! | sleeper | peer |
//! |---|---|
//! | `parked` = 1 ([`Bell::prepare_park`]) | publish the data |
//! | fence | fence ([`PeerBell::ring_if_parked`]) |
//! | look for data once more | look at `parked`; if 1: set 0, signal the eventfd |
//! | sleep if there was none ([`Bell::park`]) | |
//!
//! Whatever the order, at least one of them sees the other's write. While the sleeper is awake a peer pays
//! for a fence and a load, no system call; of several peers that find it asleep, one signals.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::segment::{PeerSegment, Segment};
use crate::error::{Error, Result};
use crate::sys::epoll::{Epoll, Interest};
use crate::sys::event::EventFd;

/// The token of the eventfd itself.
const RINGER: u64 = u64::MAX;

/// What a watched descriptor is ready for. A hang-up or error counts as both: the next call tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// A read gets something, or the end, or an error.
    pub readable: bool,
    /// A write gets somewhere, or an error.
    pub writable: bool,
}

/// The doorbell of this endpoint. Any thread may call any method, but one at a time parks: of several, a
/// peer's ring wakes all, and the first to wake takes the `parked` word down for the others.
#[derive(Debug)]
pub struct Bell {
    segment: Arc<Segment>,
    epoll: Epoll,
    ringer: EventFd,
}

impl Bell {
    /// A bell whose parked word lives in `segment`.
    pub fn new(segment: Arc<Segment>) -> Result<Bell> {
        let make = || -> io::Result<Bell> {
            let (epoll, ringer) = (Epoll::new()?, EventFd::new()?);
            epoll.watch(ringer.as_fd(), RINGER, Interest { read: true, ..Interest::default() })?;
            Ok(Bell { segment, epoll, ringer })
        };
        make().map_err(|cause| Error::system("cannot create the doorbell of an endpoint", cause))
    }

    /// Watches `fd` (level-triggered), or changes what it is watched for. `token` is any value but
    /// `u64::MAX`.
    pub fn watch(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) -> io::Result<()> {
        debug_assert_ne!(token, RINGER);
        self.epoll.watch(fd, token, Interest { read, write, ..Interest::default() })
    }

    /// Stops watching `fd`. Not watched is no error.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        self.epoll.unwatch(fd);
    }

    /// Says that this endpoint is about to sleep. Check every condition once more after this call, then
    /// [`Bell::park`] or [`Bell::cancel_park`].
    pub fn prepare_park(&self) {
        self.segment.parked().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes it back.
    pub fn cancel_park(&self) {
        self.segment.parked().store(0, Ordering::Relaxed);
    }

    /// Sleeps until rung, until a watched descriptor is ready, until a signal, or until `timeout` (`None`:
    /// for ever). Events are appended as (token, what for); a ring by itself appends none.
    pub fn park(&self, timeout: Option<Duration>, events: &mut Vec<(u64, Ready)>) -> io::Result<()> {
        let answer = self.wait(timeout, events, || self.ringer.drain());
        self.cancel_park();
        answer
    }

    /// The events that are there now. A ring stays for whoever parks: it may be about what this caller does
    /// not look at.
    pub fn poll(&self, events: &mut Vec<(u64, Ready)>) -> io::Result<()> {
        self.wait(Some(Duration::ZERO), events, || {})
    }

    /// Takes back the rings so far, for who watches [`Bell::fd`] and looks at everything afterwards. If
    /// another thread parks, ring again: it may have missed them.
    pub fn answer(&self) {
        self.ringer.drain();
    }

    /// Wakes whoever parks here, from a thread of this process.
    pub fn ring(&self) {
        self.ringer.signal();
    }

    /// The same if somebody parks or is about to. Call it after publishing.
    pub fn ring_if_parked(&self) {
        fence(Ordering::SeqCst);
        let parked = self.segment.parked();
        if parked.load(Ordering::Relaxed) != 0 && parked.swap(0, Ordering::Relaxed) != 0 {
            self.ringer.signal();
        }
    }

    /// Readable while there are events or rings: it nests in another epoll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The eventfd, to be passed to a peer.
    pub fn ringer(&self) -> BorrowedFd<'_> {
        self.ringer.as_fd()
    }

    fn wait(
        &self,
        timeout: Option<Duration>,
        events: &mut Vec<(u64, Ready)>,
        rung: impl Fn(),
    ) -> io::Result<()> {
        self.epoll.wait(timeout, |event| match event.token {
            RINGER => rung(),
            token => events.push((token, Ready { readable: event.readable, writable: event.writable })),
        })
    }
}

/// The doorbell of a peer on this host. Any thread may ring it.
#[derive(Debug)]
pub struct PeerBell {
    segment: Arc<PeerSegment>,
    ringer: EventFd,
}

impl PeerBell {
    /// From the peer's segment and the eventfd that it passed.
    pub fn new(segment: Arc<PeerSegment>, ringer: OwnedFd) -> PeerBell {
        PeerBell { segment, ringer: ringer.into() }
    }

    /// Wakes the peer if it sleeps or is about to. Call it after publishing.
    pub fn ring_if_parked(&self) {
        fence(Ordering::SeqCst);
        self.ring_if_seen_parked();
    }

    /// Wakes each of `bells` whose owner sleeps or is about to, at the price of one fence.
    pub fn ring_all<'a>(bells: impl Iterator<Item = &'a PeerBell>) {
        fence(Ordering::SeqCst);
        bells.for_each(PeerBell::ring_if_seen_parked);
    }

    fn ring_if_seen_parked(&self) {
        let parked = self.segment.parked();
        if parked.load(Ordering::Relaxed) != 0 && parked.swap(0, Ordering::Relaxed) != 0 {
            self.ringer.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    fn pair() -> (Bell, PeerBell) {
        let segment = Segment::new(0).unwrap();
        let peer = Arc::new(PeerSegment::map(segment.fd().try_clone_to_owned().unwrap()).unwrap());
        let bell = Bell::new(segment).unwrap();
        let ringer = bell.ringer().try_clone_to_owned().unwrap();
        (bell, PeerBell::new(peer, ringer))
    }

    /// Whether `bell` has something within `timeout`.
    fn rung(bell: &Bell) -> bool {
        let outer = Epoll::new().unwrap();
        outer.watch(bell.fd(), 1, Interest { read: true, ..Interest::default() }).unwrap();
        let mut any = false;
        outer.wait(Some(Duration::ZERO), |_| any = true).unwrap();
        any
    }

    #[test]
    fn a_peer_rings_only_who_is_parked() {
        let (bell, peer) = pair();
        peer.ring_if_parked();
        assert!(!rung(&bell));
        bell.prepare_park();
        bell.cancel_park();
        peer.ring_if_parked();
        assert!(!rung(&bell));
        bell.prepare_park();
        peer.ring_if_parked();
        assert!(rung(&bell), "readable from an outer epoll");
        bell.park(None, &mut Vec::new()).unwrap();
        assert!(!rung(&bell), "drained");
        bell.ring();
        assert!(rung(&bell));
    }

    #[test]
    fn a_ring_stays_until_it_is_answered() {
        let (bell, peer) = pair();
        bell.prepare_park();
        peer.ring_if_parked();
        // Whoever looks at the descriptors now does not look at what the peer has rung for.
        bell.poll(&mut Vec::new()).unwrap();
        assert!(rung(&bell), "the one who parks would sleep");
        bell.answer();
        assert!(!rung(&bell));
    }

    #[test]
    fn watched_descriptors_wake_with_their_token() {
        let (bell, _peer) = pair();
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        bell.watch(near.as_fd(), 9, true, false).unwrap();
        let mut events = Vec::new();
        bell.poll(&mut events).unwrap();
        assert!(events.is_empty());
        far.write_all(b"x").unwrap();
        bell.park(Some(Duration::from_secs(20)), &mut events).unwrap();
        assert_eq!(events, [(9, Ready { readable: true, writable: false })]);
        bell.watch(near.as_fd(), 10, false, true).unwrap();
        events.clear();
        bell.poll(&mut events).unwrap();
        assert_eq!(events, [(10, Ready { readable: false, writable: true })]);
        bell.unwatch(near.as_fd());
        bell.unwatch(near.as_fd());
        events.clear();
        bell.poll(&mut events).unwrap();
        assert!(events.is_empty());
    }

    #[test]
    fn no_wake_up_is_lost() {
        // Ping-pong: each side publishes a number and sleeps for ever until the other's arrives. A lost
        // wake-up hangs.
        const ROUNDS: u64 = 20_000;
        let ((left, to_left), (right, to_right)) = (pair(), pair());
        let ball = AtomicU64::new(0);
        let play = |bell: &Bell, other: &PeerBell, parity: u64| {
            let mut events = Vec::new();
            loop {
                let at = ball.load(Ordering::Acquire);
                if at >= ROUNDS {
                    return;
                }
                if at % 2 == parity {
                    ball.store(at + 1, Ordering::Release);
                    other.ring_if_parked();
                    continue;
                }
                bell.prepare_park();
                if ball.load(Ordering::Acquire) != at {
                    bell.cancel_park();
                } else {
                    bell.park(None, &mut events).unwrap();
                }
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| play(&left, &to_right, 0));
            scope.spawn(|| play(&right, &to_left, 1));
        });
        assert!(ball.load(Ordering::Relaxed) >= ROUNDS);
    }
}
