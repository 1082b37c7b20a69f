//! What is kept of a transfer until it has ended.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::EAGER_TCP_BYTES;
use super::failure::{Mismatch, check};
use crate::engine::lane::{Destination, Inflow, Intake, Opened, Source, Ticket};
use crate::engine::pairs::From;
use crate::engine::shelf::Shelved;
use crate::engine::wire::{Class, Frame, FrameKind, Key};
use crate::error::{Result, fail};
use crate::signature::Signature;

pub(super) enum Receiving {
    Posted(Posted),
    /// It came before anybody asked.
    Early(Early),
    /// It is coming in, on the heap, and somebody has asked meanwhile.
    Claimed(Posted),
}

pub(super) struct Posted {
    pub(super) into: Destination,
    pub(super) signature: Signature,
    pub(super) ticket: Ticket,
    /// Set when pieces of it come over several lanes: then these are counted there.
    inflow: Option<Opened>,
    /// Bytes that have begun to come,
    begun: usize,
    /// and that are here.
    pub(super) received: usize,
    /// A receive of the caller: whose messages it takes, and its place in the order of the calls.
    pub(super) call: Option<(From, u64)>,
}

pub(super) enum Early {
    /// Coming in.
    Begun(Signature, u64),
    Eager(Signature, Shelved),
    Request {
        frame: Frame,
    },
}

pub(super) enum Sending {
    Posted {
        from: Source,
        signature: Signature,
        ticket: Ticket,
        /// Its pieces that have not gone whole, once the receiver is ready for them.
        pieces: Option<Arc<AtomicUsize>>,
        /// [`Frame::announced`]; 0 when it is not any more.
        announced: u32,
    },
    /// The receiver is ready before we are.
    Ready(Frame),
}

/// What a receive that waits for its message will do with it.
pub(super) struct Receive {
    pub(super) into: Destination,
    pub(super) signature: Signature,
}

impl Receiving {
    /// Whether it is received for this mailbox.
    pub(super) fn is_of(&self, mailbox: u32) -> bool {
        let of = |posted: &Posted| posted.ticket.mailbox == mailbox;
        matches!(self, Receiving::Posted(posted) | Receiving::Claimed(posted) if of(posted))
    }
}

impl Sending {
    /// Whether it is sent for this mailbox.
    pub(super) fn is_of(&self, mailbox: u32) -> bool {
        matches!(self, Sending::Posted { ticket, .. } if ticket.mailbox == mailbox)
    }
}

impl Posted {
    pub(super) fn new(
        into: Destination,
        signature: Signature,
        ticket: Ticket,
        call: Option<(From, u64)>,
    ) -> Posted {
        Posted { into, signature, ticket, inflow: None, begun: 0, received: 0, call }
    }

    /// So many bytes begin to come; an error if they are more than there were to be. So all that has begun is
    /// here when all is, and nothing is written there afterwards, whatever a member sends.
    pub(super) fn take(&mut self, length: u32) -> Result<()> {
        let (begun, len) = (self.begun + length as usize, self.into.len);
        if begun > len {
            fail!(Internal, "{begun} bytes came of a message that has {len}");
        }
        self.begun = begun;
        Ok(())
    }

    /// Whether anything has begun to come. More may, if it comes over several lanes.
    pub(super) fn has_begun(&self) -> bool {
        self.begun > 0 || self.inflow.as_ref().is_some_and(|opened| opened.inflow().has_begun())
    }

    /// Whether nothing has begun to come. Then nothing does any more, and its memory may be another message's.
    pub(super) fn close(&self) -> bool {
        self.begun == 0 && self.inflow.as_ref().is_none_or(|opened| opened.inflow().close())
    }

    /// Its pieces may come now, over several lanes: haulers find it by `key`.
    pub(super) fn open(&mut self, intake: &Arc<Intake>, key: Key) {
        self.inflow.get_or_insert_with(|| intake.open(key, self.into));
    }

    /// What comes of it over several lanes.
    pub(super) fn inflow(&self) -> Option<&Arc<Inflow>> {
        self.inflow.as_ref().map(Opened::inflow)
    }

    pub(super) fn check(&self, peer: u32, key: Key, theirs: Signature, total: u64) -> Option<Mismatch> {
        check(peer, key, theirs, self.signature, total, self.into.len)
    }

    /// Whether the receiver of this tells the sender unasked that it is ready. (Over TCP; in shared memory
    /// the sender asks.)
    pub(super) fn announces(&self, key: &Key) -> bool {
        self.into.len > EAGER_TCP_BYTES && key.class != Class::PointToPoint
    }

    pub(super) fn ready(&self, key: Key) -> Frame {
        Frame {
            kind: FrameKind::Ready,
            key,
            signature: self.signature,
            total: self.into.len as u64,
            offset: 0,
            length: 0,
            announced: 0,
        }
    }
}

impl Early {
    pub(super) fn signature(&self) -> Signature {
        match self {
            Early::Begun(signature, _) | Early::Eager(signature, _) => *signature,
            Early::Request { frame } => frame.signature,
        }
    }

    pub(super) fn total(&self) -> u64 {
        match self {
            Early::Begun(_, total) => *total,
            Early::Eager(_, shelved) => shelved.bytes().len() as u64,
            Early::Request { frame } => frame.total,
        }
    }
}

impl Destination {
    /// `length` bytes from `offset`.
    ///
    /// # Safety
    /// They are inside the destination.
    pub(in crate::engine) unsafe fn part(self, offset: usize, length: u32) -> Destination {
        debug_assert!(offset + length as usize <= self.len);
        // SAFETY: inside the same buffer, as the caller promised.
        Destination { address: unsafe { self.address.add(offset) }, len: length as usize }
    }
}

pub(super) fn deliver(bytes: &[u8], posted: &Posted) {
    debug_assert_eq!(bytes.len(), posted.into.len);
    if bytes.is_empty() {
        return;
    }
    // SAFETY: the lengths were found equal when the message was matched; the destination is valid until its
    // ticket is told, which is after this.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), posted.into.address, bytes.len()) };
}
