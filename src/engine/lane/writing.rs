//! What goes out on a lane.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;

use super::{Lane, Piece, Source, Ticket};
use crate::engine::wire::{FRAME_BYTES, Frame, Key};

/// A frame on its way out.
pub(super) struct Outgoing {
    header: [u8; FRAME_BYTES],
    payload: Payload,
    /// Bytes of header and payload already written.
    pub(super) written: usize,
    /// Told when the payload has been written whole.
    pub(super) ticket: Option<Ticket>,
    /// Set when the payload is one piece of a larger message.
    pub(super) piece: Option<Piece>,
}

impl Outgoing {
    /// What has not been written: of the header, and of the payload.
    pub(super) fn rest(&self) -> [&[u8]; 2] {
        let payload = self.payload.bytes();
        [&self.header[self.written.min(FRAME_BYTES)..], &payload[self.written.saturating_sub(FRAME_BYTES)..]]
    }

    /// It has gone whole. Who is told now: of pieces when the last of their message has gone, with its key.
    pub(super) fn tells(self) -> Option<(Ticket, Option<Key>)> {
        let ticket = self.ticket?;
        let Some(Piece { key, left }) = self.piece else { return Some((ticket, None)) };
        // Whoever tells of the last has seen the others.
        (left.fetch_sub(1, Ordering::AcqRel) == 1).then_some((ticket, Some(key)))
    }

    /// Bytes that have not been written.
    pub(super) fn left(&self) -> usize {
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

/// How many frames of an operation are under way on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// One at most. It is found in a moment if it is among the first or the last.
    One,
    /// Any number.
    Any,
}

/// Frames written in one system call.
const GATHERED: usize = 8;

impl Lane {
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
    pub fn push_piece(&mut self, (frame, payload, ticket, piece): (Frame, Source, Ticket, Piece)) {
        self.push(&frame, payload, Some(ticket));
        if let Some(last) = self.outgoing.back_mut() {
            last.piece = Some(piece);
        }
    }

    /// Queues a frame without payload.
    pub fn push_bare(&mut self, frame: &Frame) {
        self.push(frame, Source { address: std::ptr::null(), len: 0 }, None);
    }

    /// Writes what fits; `done` is called for each payload that has gone whole, of pieces for the last of a
    /// message, with its key. Whether anything was written. An error is told once: nothing is written from
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
        let leaves = self.flows.is_some() && self.can_haul();
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
                        self.owed -= usize::from(front.ticket.is_none());
                        if let Some((ticket, piece)) = self.outgoing.pop_front().and_then(Outgoing::tells) {
                            done(ticket, piece);
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

    /// The owner of `mailbox` is about to let go of its buffers: nothing may touch them from here on.
    /// Messages that have begun are finished for the stream's sake, from a copy or into nothing. Whether any
    /// has begun to go out, or has gone whole without anybody having been told. `drop` is called for each
    /// frame of which nothing had gone, with the key of its message when it was a piece.
    pub fn cancel(&mut self, mailbox: u32, frames: Frames, mut drop: impl FnMut(Option<Key>)) -> bool {
        let is_its = |out: &Outgoing| out.ticket.is_some_and(|ticket| ticket.mailbox == mailbox);
        let mut begun = 0;
        let mut stays = |out: &mut Outgoing| {
            if out.written == 0 {
                drop(out.piece.as_ref().map(|piece| piece.key));
                return false;
            }
            begun += 1;
            out.payload = Payload::Owned(out.payload.bytes().to_vec());
            // No load any more: whoever flushes sees it out.
            (out.ticket, out.piece) = (None, None);
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
        let untold = self.finished.len();
        self.finished.retain(|(ticket, _)| ticket.mailbox != mailbox);
        self.blocked &= !self.outgoing.is_empty();
        begun > 0 || self.finished.len() < untold
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

    /// Writes nothing more, and lets the peer know. Not if words still wait for room.
    pub fn finish(&mut self) {
        if self.outgoing.is_empty() && !self.takes_nothing {
            self.takes_nothing = true;
            self.stream.finish();
        }
    }
}
