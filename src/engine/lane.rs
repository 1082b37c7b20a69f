//! One stream of a link with what is under way on it: frames queued to go out, and the frame that is coming
//! in.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use super::shelf::Shelved;
use super::wire::{FRAME_BYTES, Frame, FrameKind, Key};
use crate::error::{Error, Result, Status};
use crate::transport::Stream;

/// Who is told when a transfer has ended: a step of the operation that owns a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The operation's mailbox.
    pub mailbox: u32,
    /// The step within it.
    pub step: u32,
}

/// The caller's bytes of an outgoing message. They stay valid until the owner of the ticket is told, or
/// cancels.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// First byte.
    pub address: *const u8,
    /// How many.
    pub len: usize,
}

/// The bytes that an incoming message is written to. Valid as a [`Source`] is.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    /// First byte.
    pub address: *mut u8,
    /// How many.
    pub len: usize,
}

// SAFETY: both only name memory that the owner of the ticket keeps valid for any thread of the library.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Send for Destination {}

/// A frame on its way out.
struct Outgoing {
    header: [u8; FRAME_BYTES],
    payload: Payload,
    /// Bytes of header and payload already written.
    written: usize,
    /// Told when the payload has been written whole.
    ticket: Option<Ticket>,
    /// Set when the payload is one piece of a larger message.
    piece: Option<Key>,
}

impl Outgoing {
    /// What has not been written: of the header, and of the payload.
    fn rest(&self) -> [&[u8]; 2] {
        let payload = self.payload.bytes();
        [&self.header[self.written.min(FRAME_BYTES)..], &payload[self.written.saturating_sub(FRAME_BYTES)..]]
    }

    /// Bytes that have not been written.
    fn left(&self) -> usize {
        FRAME_BYTES + self.payload.bytes().len() - self.written
    }
}

enum Payload {
    Borrowed(Source),
    /// What was left of a cancelled message: the peer was promised these bytes.
    Owned(Vec<u8>),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::Owned(bytes) => bytes,
            Payload::Borrowed(source) if source.len == 0 => &[],
            // SAFETY: a `Source` is valid until its ticket is told or cancelled; both remove this entry or
            // make it owned first.
            Payload::Borrowed(source) => unsafe { std::slice::from_raw_parts(source.address, source.len) },
        }
    }
}

/// Where the payload that is coming in goes.
pub enum Target {
    /// To the caller's buffer, at this point of it.
    User(Destination),
    /// Nobody has asked yet.
    Kept(Shelved),
    /// Nobody wants it any more.
    Discard,
}

/// A frame whose payload is coming in.
pub struct Incoming {
    /// What was announced.
    pub frame: Frame,
    /// Where it goes.
    pub target: Target,
    /// Bytes that have come.
    pub filled: usize,
}

/// What reading a lane came upon.
pub enum Event {
    /// A frame; the reader wants to know where its payload goes ([`Lane::begin`]), if it has one.
    Frame(Frame),
    /// The payload of the frame is complete.
    Complete(Incoming),
    /// Nothing more now.
    Idle,
    /// Next comes a load: [`Lane::haul`] moves it.
    Load,
    /// The peer has closed the stream.
    Closed,
    /// Nothing more comes: the stream broke.
    Broken(Error),
}

/// How many frames of an operation are under way on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// One at most. It is found in a moment if it is among the first or the last.
    One,
    /// Any number.
    Any,
}

/// What [`Lane::haul`] has done.
#[derive(Clone, Copy, Debug)]
pub struct Hauled {
    /// Whether anything moved.
    pub moved: bool,
    /// Whether there is something for [`Lane::read`] or [`Lane::flush`] to tell.
    pub tells: bool,
    /// Whether a load is left, so that whoever hauls goes on. If not, it will be offered again.
    pub more: bool,
}

/// What the bell watches a lane's descriptor for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Nothing: it is closed, or is left unread, or has no descriptor.
    Nothing,
    /// Data and the end; room too when frames wait for it.
    Reading {
        /// Whether frames wait.
        blocked: bool,
    },
}

/// One stream of a link.
pub struct Lane {
    /// What the bell was told.
    pub watched: Watch,
    /// Whether it is left unread for now.
    pub held: bool,
    stream: Box<dyn Stream>,
    outgoing: VecDeque<Outgoing>,
    /// How many of them belong to no operation.
    owed: usize,
    /// Bytes read ahead. Streams that cost a system call a read are read in large pieces.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    reads_ahead: bool,
    incoming: Option<Incoming>,
    closed: bool,
    /// Whether the last write did not fit.
    blocked: bool,
    /// The last read took everything that was there: another would only ask in vain. Holds until that was
    /// told once.
    drained: bool,
    /// How much to read when the next frame is waited for.
    ahead: usize,
    /// Whether loads are left to [`Lane::haul`].
    hauled: bool,
    /// Whether its hauler has been told that there is a load, and has not done with it.
    offered: bool,
    /// Whether a load was given back for nothing comes: then the kernel says when something does.
    dry: bool,
    /// What was hauled whole, until [`Lane::flush`] tells; and what ended the hauling.
    finished: Vec<(Ticket, Option<Key>)>,
    ended: Option<io::Error>,
    /// What the system refused to take from a hauler, until [`Lane::flush`] tells.
    refused: Option<io::Error>,
    /// Nothing can be written any more. What has come may still be read.
    takes_nothing: bool,
}

/// Frames written in one system call.
const GATHERED: usize = 8;

/// Bytes read ahead from a stream that costs a system call a read.
const READ_AHEAD: usize = 64 * 1024;

/// The same when frames are large: then the payload is to be read straight to where it goes, not through the
/// buffer.
const READ_BEFORE_LARGE: usize = 4 * 1024;

/// A frame with this much payload is large: the next one is taken to be too.
const LARGE: usize = 64 * 1024;

/// A payload of which at least this much is missing is read straight to where it goes.
const DIRECT: usize = 16 * 1024;

/// The same, of a piece of a large message: a load.
const LOAD: usize = 64 * 1024;

/// Bytes that are hauled in one system call: each direction has its turn, and who wants the lane does not
/// wait long.
const HAUL: usize = 256 * 1024;

impl Lane {
    /// A lane over `stream`, nothing under way.
    pub fn new(stream: Box<dyn Stream>) -> Lane {
        let reads_ahead = stream.poll_fd().is_some();
        let buffer = vec![0; if reads_ahead { READ_AHEAD } else { FRAME_BYTES }].into_boxed_slice();
        Lane {
            watched: Watch::Nothing,
            held: false,
            stream,
            outgoing: VecDeque::new(),
            owed: 0,
            buffer,
            start: 0,
            end: 0,
            reads_ahead,
            incoming: None,
            closed: false,
            blocked: false,
            drained: false,
            ahead: if reads_ahead { READ_AHEAD } else { FRAME_BYTES },
            hauled: false,
            offered: false,
            dry: false,
            finished: Vec::new(),
            ended: None,
            refused: None,
            takes_nothing: false,
        }
    }

    /// Leaves loads, the pieces of large messages, to [`Lane::haul`] from here on. Not where data costs no
    /// system call.
    pub fn leave_loads(&mut self) {
        self.hauled = self.reads_ahead;
    }

    /// The stream itself, to watch its descriptor.
    pub fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    /// What the bell should watch it for.
    pub fn watch(&self) -> Watch {
        // A hauler tries by itself.
        match (self.reads_ahead, self.closed || self.held, self.blocked && !self.offered) {
            (false, ..) | (_, true, false) => Watch::Nothing,
            (.., blocked) => Watch::Reading { blocked },
        }
    }

    /// Whether the peer has closed it.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// Whether nothing more comes: its peer has gone, and what was in shared memory was there before.
    pub fn is_drained(&self) -> bool {
        self.closed || self.stream.poll_fd().is_none()
    }

    /// Whether the next event takes no system call, since enough has been read ahead.
    pub fn is_ahead(&self) -> bool {
        let have = self.end - self.start;
        match &self.incoming {
            None => have >= FRAME_BYTES,
            Some(incoming) => incoming.frame.length as usize - incoming.filled <= have,
        }
    }

    /// Frames that have not been written whole, or of which nobody has been told; one more where nobody has
    /// been told of an error.
    pub fn backlog(&self) -> usize {
        self.outgoing.len() + self.finished.len() + usize::from(self.refused.is_some())
    }

    /// Whether anything waits to go out that belongs to no operation: a word behind the end of one.
    pub fn owes(&self) -> bool {
        !self.takes_nothing && self.owed > 0
    }

    /// The tickets of the frames that have not been written whole.
    pub fn tickets(&self) -> impl Iterator<Item = Ticket> {
        let finished = self.finished.iter().map(|(ticket, _)| *ticket);
        self.outgoing.iter().filter_map(|out| out.ticket).chain(finished)
    }

    /// Queues a frame with its payload; [`Lane::flush`] writes.
    pub fn push(&mut self, frame: &Frame, payload: Source, ticket: Option<Ticket>) {
        debug_assert_eq!(frame.length as usize, payload.len);
        self.owed += usize::from(ticket.is_none());
        self.outgoing.push_back(Outgoing {
            header: frame.encode(),
            payload: Payload::Borrowed(payload),
            written: 0,
            ticket,
            piece: None,
        });
    }

    /// Queues one piece of a large message.
    pub fn push_piece(&mut self, frame: &Frame, payload: Source, ticket: Ticket) {
        self.push(frame, payload, Some(ticket));
        if let Some(last) = self.outgoing.back_mut() {
            last.piece = Some(frame.key);
        }
    }

    /// Queues a frame without payload.
    pub fn push_bare(&mut self, frame: &Frame) {
        self.push(frame, Source { address: std::ptr::null(), len: 0 }, None);
    }

    /// As [`Stream::announce`].
    pub fn announce(&mut self) -> u32 {
        self.stream.announce()
    }

    /// Writes what fits; `done` is called for each payload that has gone whole, with the key of its message
    /// when it was a piece. Whether anything was written. An error is told once: nothing is written from
    /// there on, but what has come is read.
    pub fn flush(&mut self, mut done: impl FnMut(Ticket, Option<Key>)) -> io::Result<bool> {
        let mut moved = false;
        for (ticket, piece) in self.finished.drain(..) {
            moved = true;
            done(ticket, piece);
        }
        if let Some(error) = self.refused.take() {
            return Err(error);
        }
        if self.takes_nothing {
            return Ok(moved);
        }
        let leaves = self.hauled && self.can_haul();
        while self.outgoing.front().is_some_and(|front| !leaves || front.piece.is_none()) {
            let mut parts = [IoSlice::new(&[]); 2 * GATHERED];
            let mut used = 0;
            self.blocked = false;
            for out in self.outgoing.iter().take(GATHERED).take_while(|out| !leaves || out.piece.is_none()) {
                for part in out.rest() {
                    if !part.is_empty() {
                        parts[used] = IoSlice::new(part);
                        used += 1;
                    }
                }
            }
            match self.stream.write(&parts[..used]) {
                Ok(mut count) => {
                    moved |= count > 0;
                    while let Some(front) = self.outgoing.front_mut() {
                        let left = front.left();
                        if count < left {
                            front.written += count;
                            break;
                        }
                        count -= left;
                        let (ticket, piece) = (front.ticket, front.piece);
                        self.outgoing.pop_front();
                        match ticket {
                            Some(ticket) => done(ticket, piece),
                            None => self.owed -= 1,
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.takes_nothing = true;
                    return Err(error);
                }
            }
        }
        Ok(moved)
    }

    /// Reads on until there is something to tell. After [`Event::Frame`] with a payload the caller calls
    /// [`Lane::begin`] before the next `read`.
    pub fn read(&mut self) -> Result<Event> {
        if let Some(error) = self.ended.take() {
            return Ok(self.end(&error));
        }
        if self.closed {
            return Ok(Event::Closed);
        }
        loop {
            if self.has_load_in() {
                return Ok(Event::Load);
            }
            if let Some(incoming) = &mut self.incoming {
                let missing = incoming.frame.length as usize - incoming.filled;
                if missing == 0 {
                    // PROOF: `incoming` is Some, as matched above.
                    let incoming = self.incoming.take().expect("an incoming frame");
                    return Ok(Event::Complete(incoming));
                }
                if self.start < self.end {
                    let count = missing.min(self.end - self.start);
                    incoming.put(&self.buffer[self.start..self.start + count]);
                    self.start += count;
                    continue;
                }
                if std::mem::take(&mut self.drained) {
                    return Ok(Event::Idle);
                }
                if !self.reads_ahead || missing >= DIRECT {
                    match incoming.read_from(&mut *self.stream, missing, &mut self.buffer) {
                        Ok(0) => return Ok(self.close()),
                        Ok(count) => {
                            self.drained = self.reads_ahead && count < missing;
                            continue;
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Event::Idle),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) => return Ok(self.end(&error)),
                    }
                }
            } else if let Some(header) = self.buffer[self.start..self.end].first_chunk::<FRAME_BYTES>() {
                let frame = Frame::decode(header)?;
                self.start += FRAME_BYTES;
                return Ok(Event::Frame(frame));
            }
            if std::mem::take(&mut self.drained) {
                return Ok(Event::Idle);
            }
            match self.fill() {
                Ok(0) => return Ok(self.close()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Event::Idle),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Ok(self.end(&error)),
            }
        }
    }

    /// Says where the payload of the frame that [`Lane::read`] told goes.
    pub fn begin(&mut self, frame: Frame, target: Target) {
        if self.reads_ahead {
            self.ahead = if frame.length as usize >= LARGE { READ_BEFORE_LARGE } else { READ_AHEAD };
        }
        self.dry = false;
        self.incoming = Some(Incoming { frame, target, filled: 0 });
    }

    /// The owner of `mailbox` is about to let go of its buffers: nothing may touch them from here on.
    /// Messages that have begun are finished for the stream's sake, from a copy or into nothing. Whether any
    /// has begun to go out. `drop` is called for each frame of which nothing had gone, with the key of its
    /// message when it was a piece.
    pub fn cancel(&mut self, mailbox: u32, frames: Frames, mut drop: impl FnMut(Option<Key>)) -> bool {
        let is_its = |out: &Outgoing| out.ticket.is_some_and(|ticket| ticket.mailbox == mailbox);
        let mut begun = 0;
        let mut stays = |out: &mut Outgoing| {
            if out.written == 0 {
                drop(out.piece);
                return false;
            }
            begun += 1;
            out.payload = Payload::Owned(out.payload.bytes().to_vec());
            out.ticket = None;
            true
        };
        match frames {
            Frames::Any => self.outgoing.retain_mut(|out| !is_its(out) || stays(out)),
            Frames::One => {
                if let Some(at) = self.find(is_its)
                    && !stays(&mut self.outgoing[at])
                {
                    self.outgoing.remove(at);
                }
            }
        }
        self.owed += begun;
        self.finished.retain(|(ticket, _)| ticket.mailbox != mailbox);
        self.blocked &= !self.outgoing.is_empty();
        begun > 0
    }

    /// Where a frame waits. What is given up is most often what was called last, or first.
    fn find(&self, is_it: impl Fn(&Outgoing) -> bool) -> Option<usize> {
        let last = self.outgoing.len().wrapping_sub(1);
        let places = (0..self.outgoing.len().div_ceil(2)).flat_map(|at| [last - at, at]);
        places.into_iter().find(|&at| is_it(&self.outgoing[at]))
    }

    /// Takes a frame without payload out of the queue if none of it has been written. Whether it was there.
    pub fn take_back(&mut self, frame: &Frame) -> bool {
        let header = frame.encode();
        let found = self.find(|out| out.written == 0 && out.header == header);
        if let Some(index) = found {
            let taken = self.outgoing.remove(index);
            self.owed -= usize::from(taken.is_some_and(|out| out.ticket.is_none()));
            self.blocked &= !self.outgoing.is_empty();
        }
        found.is_some()
    }

    /// As [`Lane::cancel`], for the message that is coming in with this key.
    pub fn discard(&mut self, matches: impl Fn(&Frame) -> bool) {
        if let Some(incoming) = &mut self.incoming
            && matches(&incoming.frame)
            && matches!(incoming.target, Target::User(_))
        {
            incoming.target = Target::Discard;
        }
    }

    fn fill(&mut self) -> io::Result<usize> {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        // Behind a payload that has begun, the next header comes along.
        let until = if self.incoming.is_some() { self.buffer.len() } else { self.ahead };
        let count = self.stream.read(&mut self.buffer[self.end..until])?;
        self.end += count;
        self.drained = self.reads_ahead && self.end < until;
        Ok(count)
    }

    /// Whether there is a load that can be moved and that its hauler has not been told of. Whoever asks tells
    /// it.
    pub fn offers(&mut self) -> bool {
        let moves = self.has_load_in() && !self.dry || self.has_load_out() && !self.blocked;
        let offers = moves && !self.offered;
        self.offered |= offers;
        offers
    }

    /// The hauler gives up loads that do not move. [`Lane::revive`] has them offered again.
    pub fn give_back(&mut self) {
        self.offered = false;
        self.dry = self.has_load_in();
    }

    /// The kernel says that something moves.
    pub fn revive(&mut self) {
        self.dry = false;
        self.blocked &= !self.has_load_out();
    }

    /// Moves a part of the loads, each direction's. Whoever has been told of them calls this until there is
    /// no more.
    pub fn haul(&mut self) -> Hauled {
        let mut moved = false;
        if self.has_load_out() {
            match self.haul_out() {
                Ok(count) => moved |= count > 0,
                Err(error) if is_for_now(&error) => {}
                Err(error) => {
                    (self.blocked, self.takes_nothing) = (false, true);
                    self.refused = Some(error);
                }
            }
        }
        if self.has_load_in()
            && let Some(incoming) = &mut self.incoming
        {
            let missing = incoming.frame.length as usize - incoming.filled;
            match incoming.read_from(&mut *self.stream, missing.min(HAUL), &mut self.buffer) {
                Ok(0) => self.shut(),
                Ok(_) => (moved, self.drained) = (true, false),
                Err(error) if is_for_now(&error) => {}
                Err(error) => self.ended = Some(error),
            }
        }
        let more = self.has_load_in() || self.has_load_out();
        self.offered = more;
        let tells = !self.has_load_in() && self.incoming.is_some()
            || !self.finished.is_empty()
            || !self.outgoing.is_empty() && !self.takes_nothing && !self.has_load_out()
            || self.closed
            || self.ended.is_some()
            || self.refused.is_some();
        Hauled { moved, tells, more }
    }

    fn haul_out(&mut self) -> io::Result<usize> {
        let Some(front) = self.outgoing.front_mut() else { return Ok(0) };
        let [header, payload] = front.rest();
        let parts = [IoSlice::new(header), IoSlice::new(&payload[..payload.len().min(HAUL)])];
        let parts = if header.is_empty() { &parts[1..] } else { &parts[..] };
        self.blocked = true;
        let count = self.stream.write(parts)?;
        self.blocked = false;
        front.written += count;
        if front.left() == 0
            && let Some(Outgoing { ticket, piece, .. }) = self.outgoing.pop_front()
        {
            match ticket {
                Some(ticket) => self.finished.push((ticket, piece)),
                None => self.owed -= 1,
            }
        }
        Ok(count)
    }

    /// Whether what comes next is the payload of a frame, and a load. The last of it is hauled with the rest.
    fn has_load_in(&self) -> bool {
        let goes_on = |incoming: &Incoming| {
            let missing = incoming.frame.length as usize - incoming.filled;
            let begun = self.offered && missing > 0 && incoming.filled > 0;
            let is_piece =
                incoming.frame.kind == FrameKind::Data && matches!(incoming.target, Target::User(_));
            is_piece && (missing >= LOAD || begun)
        };
        self.hauled
            && self.can_haul()
            && self.start == self.end
            && self.incoming.as_ref().is_some_and(goes_on)
    }

    fn has_load_out(&self) -> bool {
        self.hauled
            && self.can_haul()
            && !self.takes_nothing
            && self.outgoing.front().is_some_and(|front| front.piece.is_some())
    }

    fn can_haul(&self) -> bool {
        !self.closed && self.ended.is_none()
    }

    /// Writes nothing more, and lets the peer know. Not if words still wait for room.
    pub fn finish(&mut self) {
        if self.outgoing.is_empty() && !self.takes_nothing {
            self.takes_nothing = true;
            self.stream.finish();
        }
    }

    /// Reads nothing more.
    pub fn shut(&mut self) {
        self.closed = true;
    }

    fn end(&mut self, why: &io::Error) -> Event {
        self.shut();
        Event::Broken(broke(why))
    }

    fn close(&mut self) -> Event {
        self.shut();
        Event::Closed
    }
}

/// Whether an error says only that nothing moves now.
fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A stream that cannot go on: whatever the system says of it, the peer or the way to it has failed.
pub(super) fn broke(why: &io::Error) -> Error {
    Error::new(
        Status::PeerFailed,
        format!("a data stream broke: {why}; its process or the network has failed"),
    )
}

impl Incoming {
    fn put(&mut self, bytes: &[u8]) {
        match &mut self.target {
            Target::User(to) => {
                debug_assert!(self.filled + bytes.len() <= to.len);
                // SAFETY: the destination holds `frame.length` bytes (checked when it was matched), of which
                // `filled` are used; its owner keeps it valid until told or cancelled.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.address.add(self.filled), bytes.len());
                }
            }
            Target::Kept(shelved) => {
                shelved.bytes_mut()[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
            }
            Target::Discard => {}
        }
        self.filled += bytes.len();
    }

    fn read_from(&mut self, stream: &mut dyn Stream, missing: usize, spare: &mut [u8]) -> io::Result<usize> {
        let count = match &mut self.target {
            Target::User(to) => {
                // SAFETY: as in `put`: `missing` bytes are left of the destination.
                let rest = unsafe { std::slice::from_raw_parts_mut(to.address.add(self.filled), missing) };
                stream.read(rest)?
            }
            Target::Kept(shelved) => {
                stream.read(&mut shelved.bytes_mut()[self.filled..self.filled + missing])?
            }
            Target::Discard => {
                let len = missing.min(spare.len());
                stream.read(&mut spare[..len])?
            }
        };
        self.filled += count;
        Ok(count)
    }
}
