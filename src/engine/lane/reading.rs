//! What comes in on a lane.

use std::io;
use std::sync::Arc;

use super::{Destination, Inflow, Lane, broke};
use crate::engine::shelf::Shelved;
use crate::engine::wire::{FRAME_BYTES, Frame, FrameKind};
use crate::error::{Error, Result};
use crate::transport::Stream;

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
    /// The message that it is a piece of, where its pieces are counted by who reads them.
    pub(super) inflow: Option<Arc<Inflow>>,
    /// Whether it was the last of them, if it has been counted.
    pub(super) last: Option<bool>,
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

/// Bytes read ahead from a stream that costs a system call a read.
pub(super) const READ_AHEAD: usize = 64 * 1024;

/// The same when frames are large: then the payload is to be read straight to where it goes, not through the
/// buffer.
const READ_BEFORE_LARGE: usize = 4 * 1024;

/// A frame with this much payload is large: the next one is taken to be too.
const LARGE: usize = 64 * 1024;

/// A payload of which at least this much is missing is read straight to where it goes.
const DIRECT: usize = 16 * 1024;

impl Lane {
    /// Whether the next event takes no system call, since enough has been read ahead.
    pub fn is_ahead(&self) -> bool {
        let have = self.end - self.start;
        match &self.incoming {
            None => have >= FRAME_BYTES,
            Some(incoming) => incoming.frame.length as usize - incoming.filled <= have,
        }
    }

    /// Reads on until there is something to tell. After [`Event::Frame`] of data or an eager message the
    /// caller calls [`Lane::begin`] before the next `read`, and nobody hauls in before that.
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
                // Also without a payload: whoever is told says of these where it goes.
                self.untold = matches!(frame.kind, FrameKind::Eager | FrameKind::Data);
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
        (self.dry, self.untold) = (false, false);
        self.incoming = Some(Incoming { frame, target, filled: 0, inflow: None, last: None });
    }

    /// The same for a piece of `inflow`, which is its message.
    pub fn begin_piece(&mut self, frame: Frame, into: Destination, inflow: Arc<Inflow>) {
        self.begin(frame, Target::User(into));
        if let Some(incoming) = &mut self.incoming {
            incoming.inflow = Some(inflow);
        }
    }

    /// As [`Lane::cancel`], for the message that is coming in with this key.
    pub fn discard(&mut self, matches: impl Fn(&Frame) -> bool) {
        if let Some(incoming) = &mut self.incoming
            && matches(&incoming.frame)
            && matches!(incoming.target, Target::User(_))
        {
            incoming.target = Target::Discard;
            incoming.inflow = None;
        }
    }

    pub(super) fn fill(&mut self) -> io::Result<usize> {
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

    fn end(&mut self, why: &io::Error) -> Event {
        self.shut();
        Event::Broken(broke(why))
    }

    fn close(&mut self) -> Event {
        self.shut();
        Event::Closed
    }
}

impl Incoming {
    /// Counts a piece that is here, once. Whether its message is, whole; `None`: it is counted elsewhere.
    pub fn count(&mut self) -> Option<bool> {
        let inflow = self.inflow.as_ref()?;
        let length = self.frame.length as usize;
        Some(*self.last.get_or_insert_with(|| inflow.add(length)))
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
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

    pub(super) fn read_from(
        &mut self,
        stream: &mut dyn Stream,
        missing: usize,
        spare: &mut [u8],
    ) -> io::Result<usize> {
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
