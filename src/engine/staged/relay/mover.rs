//! What moves the bytes between ranks that share no memory: one thread for each stripe.
//!
//! They touch nothing but the lanes and their own connections, and say what has come on counters that the call looks at.
//! They watch out for a moment after the last byte and then sleep.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::wired::Hub;
use crate::engine::direct::Mark;
use crate::engine::endpoint::lock;
use crate::sys::epoll::{Epoll, Interest};
use crate::sys::event::EventFd;
use crate::sys::fork::Unshared;

/// A stripe's connections, by connection, those of the first stripe twice. None to this rank itself.
pub(super) type Sockets = Vec<Option<Arc<Unshared<Socket>>>>;

/// How long a mover with nothing to do looks again before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// A sleeper looks up at least this often: a guard against a lost wake-up, not a way of working.
#[cfg(not(test))]
const NAP: Duration = Duration::from_millis(500);
/// Tests do without: a wake-up that is lost shows.
#[cfg(test)]
const NAP: Duration = Duration::from_secs(20);

/// Bytes that are written or read at a time: both directions of a connection have their turn.
const TURN: usize = 256 * 1024;

const READS: Interest = Interest { read: true, write: false, close: false, once: false };

/// The token of a mover's bell.
const BELL: u64 = u64::MAX;

/// Bytes of a frame's header: mark and length (32 bits), piece and offset (64).
const HEADER: usize = 24;

/// A part of a lane on its way to a member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// What it completes, with the other stripes.
    pub(super) mark: Mark,
    /// The number of its piece.
    pub(super) piece: u64,
    /// Where it begins in the lane.
    pub(super) offset: u64,
    /// Its bytes.
    pub(super) length: u32,
}

impl Frame {
    fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&(self.mark as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.piece.to_le_bytes());
        bytes[16..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// `None`: no frame. Whether it fits its lane is the reader's to ask.
    fn decode(bytes: &[u8; HEADER]) -> Option<Frame> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mark = Mark::ALL.into_iter().find(|mark| *mark as u32 == word(0))?;
        Some(Frame { mark, length: word(4), piece: long(8), offset: long(16) })
    }
}

/// What a stripe is to send. Apart from those of other stripes: each is looked at all the time by another thread.
#[repr(align(128))]
pub(super) struct Outbox {
    posted: Mutex<Vec<Parcel>>,
    /// Set after something was posted: the mover looks at this, and does not keep the lock from who posts.
    any: AtomicBool,
    bell: EventFd,
    parked: AtomicBool,
}

/// A frame with its bytes, which stay until their piece is done everywhere.
struct Parcel {
    connection: usize,
    header: [u8; HEADER],
    bytes: *const u8,
    length: usize,
    written: usize,
}

// SAFETY: the bytes are of a lane, which the hub keeps, and which nobody writes while they are on their way.
unsafe impl Send for Parcel {}

impl Outbox {
    pub(super) fn new() -> io::Result<Outbox> {
        let (any, parked) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Outbox { posted: Mutex::default(), any, bell: EventFd::new()?, parked })
    }

    /// Sends `frame` with the bytes at `bytes` over a connection.
    ///
    /// # Safety
    /// They stay as they are until the member is done with the piece, and mapped as long as the hub.
    pub(super) unsafe fn post(&self, connection: usize, frame: Frame, bytes: *const u8) {
        let (header, length) = (frame.encode(), frame.length as usize);
        lock(&self.posted).push(Parcel { connection, header, bytes, length, written: 0 });
        self.any.store(true, Ordering::Release);
        self.rouse();
    }

    /// Takes what has been posted.
    fn take(&self) -> Vec<Parcel> {
        if !self.any.load(Ordering::Relaxed) {
            return Vec::new();
        }
        // Before the look: what comes after it sets this again.
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut *lock(&self.posted))
    }

    /// Has the mover look, if it sleeps.
    pub(super) fn rouse(&self) {
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) {
            self.bell.signal();
        }
    }

    /// Has the mover look whether it is to end.
    pub(super) fn wake(&self) {
        self.bell.signal();
    }
}

impl Parcel {
    /// Writes what fits. Whether all of it has gone.
    fn write(&mut self, socket: &Socket) -> io::Result<bool> {
        let from = self.written.saturating_sub(HEADER);
        // SAFETY: the promise of `post`; `from` is at most the length.
        let rest =
            unsafe { std::slice::from_raw_parts(self.bytes.add(from), (self.length - from).min(TURN)) };
        let parts = [IoSlice::new(&self.header[self.written.min(HEADER)..]), IoSlice::new(rest)];
        let parts = if self.written < HEADER { &parts[..] } else { &parts[1..] };
        // A closed connection is an error, not the signal that ends a C program.
        self.written += socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL)?;
        Ok(self.written == HEADER + self.length)
    }
}

/// One connection, and what is under way on it.
struct Connection<'a> {
    socket: &'a Socket,
    leaving: VecDeque<Parcel>,
    arriving: Arriving,
    /// Whether the last write did not fit, and whether the kernel is asked for room.
    blocked: bool,
    watched: bool,
    ended: bool,
}

/// Moves what a stripe sends and receives until the hub closes.
pub(super) fn run(hub: &Hub, stripe: usize, sockets: &Sockets) -> io::Result<()> {
    let (outbox, epoll) = (hub.outbox(stripe), Epoll::new()?);
    epoll.watch(outbox.bell.as_fd(), BELL, READS)?;
    let mut connections: Vec<Option<Connection<'_>>> = Vec::new();
    for (index, socket) in sockets.iter().enumerate() {
        let Some(socket) = socket else {
            connections.push(None);
            continue;
        };
        epoll.watch(socket.as_fd(), index as u64, READS)?;
        connections.push(Some(Connection::new(socket)));
    }
    let mut last = Instant::now();
    while !hub.is_closing() {
        let mut moved = false;
        for parcel in outbox.take() {
            moved = true;
            if let Some(Some(connection)) = connections.get_mut(parcel.connection) {
                connection.leaving.push_back(parcel);
            }
        }
        for (index, connection) in connections.iter_mut().enumerate() {
            let Some(connection) = connection else { continue };
            match connection.step(hub, stripe, index) {
                Ok(more) => moved |= more,
                Err(error) => {
                    connection.end(hub);
                    epoll.unwatch(connection.socket.as_fd());
                    hub.ended(index, &error);
                }
            }
        }
        if moved {
            last = Instant::now();
        } else if last.elapsed() < hub.spin(SPIN) {
            std::thread::yield_now();
        } else {
            for (index, connection) in connections.iter_mut().enumerate() {
                if let Some(connection) = connection {
                    connection.watch(&epoll, index as u64)?;
                }
            }
            outbox.parked.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if lock(&outbox.posted).is_empty() && !hub.is_closing() {
                epoll.wait(Some(NAP), |event| {
                    if event.token == BELL {
                        outbox.bell.drain();
                    }
                })?;
            }
            outbox.parked.store(false, Ordering::Relaxed);
            // What woke it is tried for a while.
            last = Instant::now();
        }
    }
    Ok(())
}

impl Connection<'_> {
    fn new(socket: &Socket) -> Connection<'_> {
        let leaving = VecDeque::new();
        Connection {
            socket,
            leaving,
            arriving: Arriving::default(),
            blocked: false,
            watched: false,
            ended: false,
        }
    }

    /// Writes and reads a little. Whether anything moved.
    fn step(&mut self, hub: &Hub, stripe: usize, index: usize) -> io::Result<bool> {
        if self.ended {
            // Nobody waits for what was to go there.
            hub.wrote(self.leaving.len() as u64);
            self.leaving.clear();
            return Ok(false);
        }
        let mut moved = false;
        self.blocked = false;
        if let Some(parcel) = self.leaving.front_mut() {
            match unless_blocked(parcel.write(self.socket))? {
                Some(whole) => {
                    moved = true;
                    if whole {
                        self.leaving.pop_front();
                        hub.wrote(1);
                    }
                }
                None => self.blocked = true,
            }
        }
        match unless_blocked(self.arriving.read(hub, index, self.socket))? {
            Some(Some(frame)) => hub.arrived(stripe, index, frame),
            Some(None) => {}
            None => return Ok(moved),
        }
        Ok(true)
    }

    /// Nothing more goes or comes.
    fn end(&mut self, hub: &Hub) {
        self.ended = true;
        hub.wrote(self.leaving.len() as u64);
        self.leaving.clear();
    }

    /// Has the kernel wake for what is waited for.
    fn watch(&mut self, epoll: &Epoll, token: u64) -> io::Result<()> {
        if !self.ended && self.blocked != self.watched {
            epoll.watch(self.socket.as_fd(), token, Interest { write: self.blocked, ..READS })?;
            self.watched = self.blocked;
        }
        Ok(())
    }
}

/// `None`: not now.
fn unless_blocked<T>(answer: io::Result<T>) -> io::Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// A frame that is coming in.
#[derive(Default)]
struct Arriving {
    header: [u8; HEADER],
    /// Bytes of header and payload that have come.
    read: usize,
    frame: Option<(Frame, *mut u8)>,
}

impl Arriving {
    /// Reads once. The frame, once it is whole.
    fn read(&mut self, hub: &Hub, connection: usize, socket: &Socket) -> io::Result<Option<Frame>> {
        if self.read < HEADER {
            let mut bytes = [MaybeUninit::uninit(); HEADER];
            let count = some(socket.recv(&mut bytes[self.read..])?)?;
            for (to, from) in self.header[self.read..].iter_mut().zip(&bytes[self.read..]).take(count) {
                // SAFETY: the kernel wrote so many.
                *to = unsafe { from.assume_init() };
            }
            self.read += count;
            if self.read < HEADER {
                return Ok(None);
            }
            let frame =
                Frame::decode(&self.header).and_then(|frame| Some((frame, hub.target(connection, &frame)?)));
            let Some(frame) = frame else { return Err(io::ErrorKind::InvalidData.into()) };
            self.frame = Some(frame);
        }
        // PROOF: set with the last byte of the header.
        let (frame, target) = self.frame.expect("a header has come");
        let (done, length) = (self.read - HEADER, frame.length as usize);
        if done < length {
            let most = (length - done).min(TURN);
            // SAFETY: `target` says that the frame lies in the member's lane, which nobody reads before it has come.
            let rest =
                unsafe { std::slice::from_raw_parts_mut(target.add(done).cast::<MaybeUninit<u8>>(), most) };
            self.read += some(socket.recv(rest)?)?;
        }
        if self.read < HEADER + length {
            return Ok(None);
        }
        self.read = 0;
        self.frame = None;
        Ok(Some(frame))
    }
}

/// No bytes are the end of a connection.
fn some(count: usize) -> io::Result<usize> {
    if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(count) }
}
