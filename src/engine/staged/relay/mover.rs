//! What moves the bytes between ranks that share no memory: of each stripe, one thread sends and one receives.
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
const NAP: Duration = Duration::from_millis(500);

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

/// What a stripe is to send.
pub(super) struct Outbox {
    posted: Mutex<Vec<Parcel>>,
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
        Ok(Outbox { posted: Mutex::default(), bell: EventFd::new()?, parked: AtomicBool::new(false) })
    }

    /// Sends `frame` with the bytes at `bytes` over a connection.
    ///
    /// # Safety
    /// They stay as they are until the member is done with the piece, and mapped as long as the hub.
    pub(super) unsafe fn post(&self, connection: usize, frame: Frame, bytes: *const u8) {
        let (header, length) = (frame.encode(), frame.length as usize);
        lock(&self.posted).push(Parcel { connection, header, bytes, length, written: 0 });
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) {
            self.bell.signal();
        }
    }

    /// Has the sender look whether it is to end.
    pub(super) fn wake(&self) {
        self.bell.signal();
    }
}

impl Parcel {
    /// Writes what fits. Whether all of it has gone.
    fn write(&mut self, socket: &Socket) -> io::Result<bool> {
        let from = self.written.saturating_sub(HEADER);
        // SAFETY: the promise of `post`; `from` is at most the length.
        let rest = unsafe { std::slice::from_raw_parts(self.bytes.add(from), self.length - from) };
        let parts = [IoSlice::new(&self.header[self.written.min(HEADER)..]), IoSlice::new(rest)];
        let parts = if self.written < HEADER { &parts[..] } else { &parts[1..] };
        // A closed connection is an error, not the signal that ends a C program.
        self.written += socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL)?;
        Ok(self.written == HEADER + self.length)
    }
}

/// Sends what is posted to a stripe until the hub closes.
pub(super) fn send(hub: &Hub, stripe: usize, sockets: &Sockets) -> io::Result<()> {
    let (outbox, epoll) = (hub.outbox(stripe), Epoll::new()?);
    epoll.watch(outbox.bell.as_fd(), BELL, Interest { read: true, ..Interest::default() })?;
    let mut queues: Vec<VecDeque<Parcel>> = sockets.iter().map(|_| VecDeque::new()).collect();
    let mut last = Instant::now();
    while !hub.is_closing() {
        let posted = std::mem::take(&mut *lock(&outbox.posted));
        let mut moved = !posted.is_empty();
        posted.into_iter().for_each(|parcel| queues[parcel.connection].push_back(parcel));
        let (mut blocked, mut written) = (false, 0);
        for (connection, queue) in queues.iter_mut().enumerate() {
            let Some(socket) = &sockets[connection] else { continue };
            while let Some(parcel) = queue.front_mut() {
                let before = parcel.written;
                match parcel.write(socket) {
                    Ok(true) => {
                        queue.pop_front();
                        written += 1;
                    }
                    Ok(false) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        blocked = true;
                        break;
                    }
                    Err(error) => {
                        hub.ended(connection, &error);
                        written += queue.len() as u64;
                        queue.clear();
                        break;
                    }
                }
                moved |= queue.front().is_none_or(|parcel| parcel.written != before);
            }
        }
        if written > 0 {
            hub.wrote(written, !blocked);
        }
        if moved {
            last = Instant::now();
        } else if last.elapsed() < hub.spin(SPIN) {
            std::thread::yield_now();
        } else {
            if blocked {
                let open = queues.iter().zip(sockets).filter(|(queue, _)| !queue.is_empty());
                for socket in open.filter_map(|(_, socket)| socket.as_ref()) {
                    epoll.watch(socket.as_fd(), 0, Interest { write: true, once: true, read: false })?;
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
            // What woke it is tried once.
            last = Instant::now();
        }
    }
    Ok(())
}

/// A frame that is coming in.
struct Arriving {
    header: [u8; HEADER],
    /// Bytes of header and payload that have come.
    read: usize,
    frame: Option<(Frame, *mut u8)>,
    closed: bool,
}

/// Receives what comes to a stripe until the hub closes.
pub(super) fn receive(hub: &Hub, stripe: usize, sockets: &Sockets) -> io::Result<()> {
    let epoll = Epoll::new()?;
    let reads = Interest { read: true, ..Interest::default() };
    epoll.watch(hub.ender(stripe).as_fd(), BELL, reads)?;
    for (connection, socket) in sockets.iter().enumerate() {
        if let Some(socket) = socket {
            epoll.watch(socket.as_fd(), connection as u64, reads)?;
        }
    }
    let none = || Arriving { header: [0; HEADER], read: 0, frame: None, closed: false };
    let mut arriving: Vec<Arriving> = sockets.iter().map(|_| none()).collect();
    let mut last = Instant::now();
    while !hub.is_closing() {
        let mut moved = false;
        for (connection, arriving) in arriving.iter_mut().enumerate() {
            let Some(socket) = sockets[connection].as_deref().filter(|_| !arriving.closed) else { continue };
            let before = arriving.read;
            let came = loop {
                match arriving.read(hub, connection, socket) {
                    Ok(Some(frame)) => break Ok(Some(frame)),
                    Ok(None) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(None),
                    Err(error) => break Err(error),
                }
            };
            match came {
                Ok(Some(frame)) => {
                    moved = true;
                    hub.arrived(stripe, connection, frame);
                }
                Ok(None) => moved |= arriving.read != before,
                Err(error) => {
                    arriving.closed = true;
                    epoll.unwatch(socket.as_fd());
                    hub.ended(connection, &error);
                }
            }
        }
        if moved {
            last = Instant::now();
        } else if last.elapsed() < hub.spin(SPIN) {
            std::thread::yield_now();
        } else {
            epoll.wait(Some(NAP), |_| ())?;
            last = Instant::now();
        }
    }
    Ok(())
}

impl Arriving {
    /// Reads once. The frame, once it is whole.
    fn read(&mut self, hub: &Hub, connection: usize, socket: &Socket) -> io::Result<Option<Frame>> {
        if self.read < HEADER {
            let mut bytes = [MaybeUninit::uninit(); HEADER];
            let count = some(socket.recv(&mut bytes[self.read..])?)?;
            for at in self.read..self.read + count {
                // SAFETY: the kernel wrote so many.
                self.header[at] = unsafe { bytes[at].assume_init() };
            }
            self.read += count;
            if self.read < HEADER {
                return Ok(None);
            }
            let frame = Frame::decode(&self.header).and_then(|frame| Some((frame, hub.target(connection, &frame)?)));
            let Some(frame) = frame else { return Err(io::ErrorKind::InvalidData.into()) };
            self.frame = Some(frame);
        }
        // PROOF: set with the last byte of the header.
        let (frame, target) = self.frame.expect("a header has come");
        let (done, length) = (self.read - HEADER, frame.length as usize);
        if done < length {
            // SAFETY: `target` says that the frame lies in the member's lane, which nobody reads before it has come.
            let rest = unsafe {
                std::slice::from_raw_parts_mut(target.add(done).cast::<MaybeUninit<u8>>(), length - done)
            };
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
