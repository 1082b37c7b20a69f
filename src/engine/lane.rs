//! One stream of a link with what is under way on it: frames queued to go out, and the frame that is coming
//! in.

mod intake;
mod loads;
mod outlet;
mod reading;
mod writing;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

pub use intake::{Inflow, Intake, Opened};
pub use loads::Hauled;
pub use outlet::{Outflow, Outlet};
use reading::READ_AHEAD;
pub use reading::{Event, Incoming, Target};
pub use writing::Frames;
use writing::Outgoing;

use super::wire::{FRAME_BYTES, Key};
use crate::error::{Error, Status};
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

/// The long messages from a peer and to it, whose pieces haulers move.
#[derive(Debug, Default)]
pub struct Flows {
    /// What may come.
    pub intake: Arc<Intake>,
    /// What is to go.
    pub outlet: Outlet,
}

/// Which message an outgoing frame is a piece of.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The message.
    pub key: Key,
    /// Its pieces that have not gone whole.
    pub left: Arc<AtomicUsize>,
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
    /// Whether the payload comes next, be it empty, of a frame that has been told: until somebody has said
    /// where it goes.
    untold: bool,
    closed: bool,
    /// Whether the last write did not fit.
    blocked: bool,
    /// The last read took everything that was there: another would only ask in vain. Holds until that was
    /// told once.
    drained: bool,
    /// How much to read when the next frame is waited for.
    ahead: usize,
    /// Set where loads are left to [`Lane::haul`]: the messages that they are pieces of.
    flows: Option<Arc<Flows>>,
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
            untold: false,
            closed: false,
            blocked: false,
            drained: false,
            ahead: if reads_ahead { READ_AHEAD } else { FRAME_BYTES },
            flows: None,
            offered: false,
            dry: false,
            finished: Vec::new(),
            ended: None,
            refused: None,
            takes_nothing: false,
        }
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

    /// As [`Stream::announce`].
    pub fn announce(&mut self) -> u32 {
        self.stream.announce()
    }

    /// Reads nothing more.
    pub fn shut(&mut self) {
        self.closed = true;
    }
}

/// A stream that cannot go on: whatever the system says of it, the peer or the way to it has failed.
pub(super) fn broke(why: &io::Error) -> Error {
    Error::new(
        Status::PeerFailed,
        format!("a data stream broke: {why}; its process or the network has failed"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::wire::{Class, Frame, FrameKind};
    use crate::reduce::DataType;
    use crate::signature::{Kind, Signature};

    /// The message of these tests.
    pub(super) const KEY: Key = Key { group: 7, tag: 3, sequence: 0, slot: 0, class: Class::PointToPoint };

    pub(super) fn frame(kind: FrameKind, key: Key, offset: usize, length: usize, total: usize) -> Frame {
        let (dtype, count) = (DataType::U8, total as u64);
        let signature =
            Signature { kind: Kind::Send, dtype, operator: 0, algorithm: 0, root: 0, count, device: false };
        let (offset, length) = (offset as u64, length as u32);
        Frame { kind, key, signature, total: total as u64, offset, length, announced: 0 }
    }
}
