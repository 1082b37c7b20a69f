//! What moves the bytes between ranks that share no memory: threads, each with a connection of its own to
//! every member.
//!
//! Who has nothing under way to a member takes the next parcel for it, so a slow one holds up no more than
//! its own. They touch nothing but the lanes and their own connections, and say what has come on counters
//! that the call looks at. They watch out for a moment after the last byte and then sleep.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use socket2::Socket;

use super::wired::Hub;
use crate::engine::direct::Mark;
use crate::engine::endpoint::lock;
use crate::sys::epoll::{Epoll, Interest};
use crate::sys::event::EventFd;
use crate::sys::fork::Unshared;

/// A mover's connections, by member. None to this rank itself.
pub(super) type Sockets = Vec<Option<Arc<Unshared<Socket>>>>;

/// How long a mover with nothing to do looks again before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// A sleeper looks up at least this often: a guard against a lost wake-up, not a way of working.
#[cfg(not(test))]
const NAP: Duration = Duration::from_millis(500);
/// Tests do without: a wake-up that is lost shows.
#[cfg(test)]
const NAP: Duration = Duration::from_secs(90);

/// The most bytes of a parcel that is dealt out: both directions of a connection have their turn, and movers
/// end together.
pub(super) const PARCEL: usize = 256 * 1024;

const READS: Interest = Interest { read: true, write: false, close: false, once: false };

/// The token of a mover's bell.
const BELL: u64 = u64::MAX;

/// Bytes of a frame's header: mark and length (32 bits), piece (64), offset and whole (32).
const HEADER: usize = 24;

/// A part of a lane on its way to a member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// What it completes, with others of the same piece.
    pub(super) mark: Mark,
    /// The number of its piece.
    pub(super) piece: u64,
    /// Where it begins in the lane.
    pub(super) offset: u32,
    /// Its bytes.
    pub(super) length: u32,
    /// Those of all of them.
    pub(super) whole: u32,
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&(self.mark as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.piece.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.offset.to_le_bytes());
        bytes[20..].copy_from_slice(&self.whole.to_le_bytes());
        bytes
    }

    /// `None`: no frame. Whether it fits its lane is the reader's to ask.
    fn decode(bytes: &[u8; HEADER]) -> Option<Frame> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let mark = Mark::ALL.into_iter().find(|mark| *mark as u32 == word(0))?;
        let piece = u64::from(word(8)) | u64::from(word(12)) << 32;
        Some(Frame { mark, length: word(4), piece, offset: word(16), whole: word(20) })
    }
}

/// What is to go to a member. Apart from others: movers look at it all the time.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Outbox {
    parcels: Mutex<VecDeque<Parcel>>,
    /// Whether there are any, changed with them: who looks does not keep the lock from who posts.
    any: AtomicBool,
}

/// How a mover that sleeps is told that there is something to do.
pub(super) struct Bell {
    event: EventFd,
    parked: AtomicBool,
    /// How often it has woken.
    #[cfg(test)]
    woken: AtomicUsize,
}

/// A frame with its bytes, which stay until their piece is done everywhere.
pub(super) struct Parcel {
    header: [u8; HEADER],
    bytes: *const u8,
    length: usize,
    written: usize,
    member: usize,
    account: Account,
}

/// Who is told that a parcel has gone.
pub(super) enum Account {
    /// A call, which has so many fewer.
    Call(Parcels),
    /// All calls: the member has been told of so many pieces.
    Told(Told, u64),
}

/// By member, of how many pieces of all calls it has been told that this rank is done with them, as far as
/// the kernel has that, or it never will. That is told in the order of the pieces.
pub(super) type Told = Arc<[AtomicU64]>;

/// What a call has sent that the kernel does not have yet. What it has is delivered even if this process
/// ends.
#[derive(Clone, Debug)]
pub(super) struct Parcels(Arc<Unwritten>);

/// Parcels that the kernel does not have yet.
#[derive(Debug)]
struct Unwritten {
    /// All of them: whoever writes the last one sees that it is the last.
    all: AtomicUsize,
    /// By member.
    to: Box<[AtomicUsize]>,
}

impl Parcels {
    /// None yet, of a call of so many members.
    pub(super) fn new(members: usize) -> Parcels {
        let to = (0..members).map(|_| AtomicUsize::new(0)).collect();
        Parcels(Arc::new(Unwritten { all: AtomicUsize::new(0), to }))
    }

    pub(super) fn are_written(&self) -> bool {
        self.0.all.load(Ordering::Acquire) == 0
    }

    /// The members whose parcels are not.
    pub(super) fn unwritten(&self) -> impl Iterator<Item = usize> + '_ {
        let to = self.0.to.iter().enumerate();
        to.filter(|(_, count)| count.load(Ordering::Relaxed) > 0).map(|(member, _)| member)
    }

    fn add(&self, member: usize) {
        self.0.to[member].fetch_add(1, Ordering::Relaxed);
        self.0.all.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self, member: usize) {
        self.0.to[member].fetch_sub(1, Ordering::Relaxed);
        self.0.all.fetch_sub(1, Ordering::AcqRel);
    }
}

/// It has been written, or never will be.
impl Drop for Parcel {
    fn drop(&mut self) {
        match &self.account {
            Account::Call(parcels) => parcels.remove(self.member),
            Account::Told(told, pieces) => drop(told[self.member].fetch_max(*pieces, Ordering::AcqRel)),
        }
    }
}

// SAFETY: the bytes are of a lane, which the hub keeps, and which nobody writes while they are on their way.
unsafe impl Send for Parcel {}

impl Outbox {
    /// More to send.
    pub(super) fn post(&self, more: impl Iterator<Item = Parcel>) {
        let mut parcels = lock(&self.parcels);
        parcels.extend(more);
        self.any.store(!parcels.is_empty(), Ordering::SeqCst);
    }

    /// The next parcel is the caller's.
    fn take(&self) -> Option<Parcel> {
        if !self.any.load(Ordering::SeqCst) {
            return None;
        }
        let mut parcels = lock(&self.parcels);
        let first = parcels.pop_front();
        self.any.store(!parcels.is_empty(), Ordering::SeqCst);
        first
    }

    /// What is in it will not be sent.
    pub(super) fn clear(&self) {
        while self.take().is_some() {}
    }
}

impl Bell {
    pub(super) fn new() -> io::Result<Bell> {
        Ok(Bell {
            event: EventFd::new()?,
            parked: AtomicBool::new(false),
            #[cfg(test)]
            woken: AtomicUsize::new(0),
        })
    }

    /// Has the mover look, if it sleeps. As for [`Bell::claim`], the caller has a fence behind what there is
    /// to see.
    pub(super) fn rouse(&self) {
        if self.parked.load(Ordering::Relaxed) {
            self.event.signal();
        }
    }

    /// Has the mover look, if it sleeps and nobody else does. Whether that was so.
    pub(super) fn claim(&self) -> bool {
        let claimed = self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::Relaxed);
        if claimed {
            self.event.signal();
        }
        claimed
    }

    #[cfg(test)]
    pub(super) fn woken(&self) -> usize {
        self.woken.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Relaxed)
    }

    /// Has the mover look whether it is to end.
    pub(super) fn wake(&self) {
        self.event.signal();
    }
}

impl Parcel {
    /// `frame` with the bytes at `bytes`, for a member. `account` is told when it has gone.
    ///
    /// # Safety
    /// They stay as they are until the member is done with the piece, and mapped as long as the hub.
    pub(super) unsafe fn new(frame: Frame, bytes: *const u8, member: usize, account: Account) -> Parcel {
        if let Account::Call(parcels) = &account {
            parcels.add(member);
        }
        let (header, length) = (frame.encode(), frame.length as usize);
        Parcel { header, bytes, length, written: 0, member, account }
    }

    /// Writes what fits. Whether all of it has gone.
    fn write(&mut self, socket: &Socket) -> io::Result<bool> {
        let from = self.written.saturating_sub(HEADER);
        // SAFETY: the promise of `new`; `from` is at most the length.
        let rest = unsafe { std::slice::from_raw_parts(self.bytes.add(from), self.length - from) };
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
    outbox: &'a Outbox,
    leaving: Option<Parcel>,
    arriving: Arriving,
    /// Why nothing more can be written. What the member has sent before it went is still read.
    gone: Option<io::Error>,
    /// Whether the last write did not fit, and whether the kernel is asked for room.
    blocked: bool,
    watched: bool,
    ended: bool,
}

/// What a mover works with, and all that it needs of the kernel: the others learn whether it has that before
/// anything is to move.
pub(super) struct Mover {
    pub(super) number: usize,
    sockets: Sockets,
    epoll: Epoll,
}

impl Mover {
    /// The one of this number.
    pub(super) fn new(hub: &Hub, number: usize, sockets: Sockets) -> io::Result<Mover> {
        let epoll = Epoll::new()?;
        epoll.watch(hub.bell(number).event.as_fd(), BELL, READS)?;
        for (member, socket) in sockets.iter().enumerate() {
            if let Some(socket) = socket {
                epoll.watch(socket.as_fd(), member as u64, READS)?;
            }
        }
        Ok(Mover { number, sockets, epoll })
    }
}

/// Moves what goes over a mover's connections until the hub closes.
pub(super) fn run(hub: &Hub, mover: &Mover) -> io::Result<()> {
    let Mover { number, sockets, epoll } = mover;
    let (mover, bell) = (*number, hub.bell(*number));
    let sockets = sockets.iter().enumerate();
    let mut connections: Vec<Option<Connection<'_>>> = sockets
        .map(|(member, socket)| Some(Connection::new(socket.as_ref()?, hub.outbox(mover, member))))
        .collect();
    let (mut last, mut announced, mut passed) = (Instant::now(), 0, 0);
    while !hub.is_closing() {
        #[cfg(test)]
        if hub.is_held() {
            std::thread::yield_now();
            continue;
        }
        let mut moved = false;
        for (member, connection) in connections.iter_mut().enumerate() {
            let Some(connection) = connection else { continue };
            match connection.step(hub, member) {
                Ok(more) => moved |= more,
                Err(error) => {
                    connection.ended = true;
                    // Others' parcels may be lost with it: the member is told, whatever this side's end has
                    // come of.
                    let _ = connection.socket.shutdown(Shutdown::Both);
                    connection.forget(hub);
                    epoll.unwatch(connection.socket.as_fd());
                    hub.ended(mover, member, &error);
                }
            }
        }
        let told = hub.announced();
        if moved || told != announced {
            (last, announced) = (Instant::now(), told);
        } else if last.elapsed() < hub.spin(SPIN) {
            std::thread::yield_now();
        } else {
            for (member, connection) in connections.iter_mut().enumerate() {
                if let Some(connection) = connection {
                    connection.watch(epoll, member as u64)?;
                }
            }
            bell.parked.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let has_more = connections.iter().flatten().any(Connection::has_more);
            if !has_more && hub.announced() == announced && !hub.is_closing() {
                epoll.wait(Some(NAP), |event| {
                    if event.token == BELL {
                        bell.event.drain();
                    }
                })?;
                #[cfg(test)]
                bell.woken.fetch_add(1, Ordering::Relaxed);
            }
            // Whoever claims it has rung before.
            if !bell.parked.swap(false, Ordering::Acquire) {
                passed = hub.pass_on(mover, passed);
            }
            // What woke it is tried for a while.
            last = Instant::now();
        }
    }
    Ok(())
}

impl<'a> Connection<'a> {
    fn new(socket: &'a Socket, outbox: &'a Outbox) -> Connection<'a> {
        Connection {
            socket,
            outbox,
            leaving: None,
            arriving: Arriving::default(),
            gone: None,
            blocked: false,
            watched: false,
            ended: false,
        }
    }

    /// Writes and reads a little. Whether anything moved.
    fn step(&mut self, hub: &Hub, member: usize) -> io::Result<bool> {
        if self.ended {
            // Nobody waits for what was to go there.
            self.forget(hub);
            return Ok(false);
        }
        if hub.is_cut(member) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let moved = self.write(hub)?;
        let read = match self.arriving.read(hub, member, self.socket) {
            Err(error) if !is_for_now(&error) => Err(self.gone.take().unwrap_or(error)),
            answer => unless_blocked(answer),
        };
        match read? {
            Some(Some(frame)) => hub.arrived(member, frame)?,
            Some(None) => {}
            None => return Ok(moved),
        }
        Ok(true)
    }

    /// Writes a little. Whether anything moved.
    fn write(&mut self, hub: &Hub) -> io::Result<bool> {
        self.blocked = false;
        if self.gone.is_some() {
            self.forget(hub);
            return Ok(false);
        }
        #[cfg(test)]
        if hub.holds_back(self.outbox) {
            return Ok(false);
        }
        self.leaving = self.leaving.take().or_else(|| self.outbox.take());
        let Some(parcel) = &mut self.leaving else { return Ok(false) };
        let whole = match unless_blocked(parcel.write(self.socket)) {
            Ok(Some(whole)) => whole,
            Ok(None) => {
                self.blocked = true;
                return Ok(false);
            }
            Err(error) if is_gone(&error) => {
                self.forget(hub);
                self.gone = Some(error);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if whole {
            let parcels = match &parcel.account {
                Account::Call(parcels) => Some(parcels.clone()),
                Account::Told(..) => None,
            };
            self.leaving = None;
            if parcels.is_none_or(|parcels| parcels.are_written()) {
                hub.rouse();
            }
        }
        Ok(true)
    }

    /// Whether there is something to send that it has not tried to.
    fn has_more(&self) -> bool {
        self.leaving.is_none() && self.outbox.any.load(Ordering::SeqCst)
    }

    /// What is to go there never will.
    fn forget(&mut self, hub: &Hub) {
        while self.leaving.take().or_else(|| self.outbox.take()).is_some() {
            hub.rouse();
        }
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
        Err(error) if is_for_now(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Whether the other side has closed the connection without having read all that was written to it.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
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
    fn read(&mut self, hub: &Hub, member: usize, socket: &Socket) -> io::Result<Option<Frame>> {
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
                Frame::decode(&self.header).and_then(|frame| Some((frame, hub.target(member, &frame)?)));
            let Some(frame) = frame else { return Err(io::ErrorKind::InvalidData.into()) };
            self.frame = Some(frame);
        }
        // PROOF: set with the last byte of the header.
        let (frame, target) = self.frame.expect("a header has come");
        let (done, length) = (self.read - HEADER, frame.length as usize);
        if done < length {
            // SAFETY: `target` says that the frame lies in the member's lane, which nobody reads before it
            // has come.
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
