//! Long messages that go out over several lanes: whoever hauls a lane that has nothing to send takes the next
//! piece, so one that is late holds up no more than its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};

use super::{Piece, Source, Ticket};
use crate::engine::endpoint::lock;
use crate::engine::wire::{Frame, FrameKind, Key};
use crate::signature::Signature;

/// A message that the receiver is ready for.
#[derive(Debug)]
pub struct Outflow {
    key: Key,
    /// Of the call that it is sent for.
    signature: Signature,
    from: Source,
    /// Who is told when all of it has gone.
    ticket: Ticket,
    /// Bytes of a piece.
    piece: usize,
    /// Bytes that have been taken.
    next: usize,
    left: Arc<AtomicUsize>,
}

impl Outflow {
    /// A message in pieces of so many bytes.
    pub fn new(key: Key, signature: Signature, from: Source, ticket: Ticket, piece: usize) -> Outflow {
        let left = Arc::new(AtomicUsize::new(from.len.div_ceil(piece)));
        Outflow { key, signature, from, ticket, piece, next: 0, left }
    }

    /// How many of its pieces have not gone whole.
    pub fn left(&self) -> &Arc<AtomicUsize> {
        &self.left
    }

    /// The next piece.
    pub fn take(&mut self) -> Option<(Frame, Source, Ticket, Piece)> {
        let length = self.piece.min(self.from.len - self.next);
        if length == 0 {
            return None;
        }
        let offset = self.next;
        self.next += length;
        let frame = Frame {
            kind: FrameKind::Data,
            key: self.key,
            signature: self.signature,
            total: self.from.len as u64,
            offset: offset as u64,
            length: length as u32,
            announced: 0,
        };
        let part = Source { address: self.from.address.wrapping_add(offset), len: length };
        Some((frame, part, self.ticket, Piece { key: self.key, left: self.left.clone() }))
    }

    fn untaken(&self) -> usize {
        (self.from.len - self.next).div_ceil(self.piece)
    }
}

/// The messages that go to one peer, in their order, as far as nobody has taken their pieces.
#[derive(Debug, Default)]
pub struct Outlet {
    outflows: Mutex<VecDeque<Outflow>>,
    /// How many pieces nobody has taken, changed with them.
    pieces: AtomicUsize,
}

impl Outlet {
    /// One more. The caller offers the lanes to their haulers, but those that are locked, whose haulers look
    /// for it when they have let go of them.
    pub fn post(&self, outflow: Outflow) {
        let mut outflows = lock(&self.outflows);
        self.pieces.fetch_add(outflow.untaken(), Ordering::Relaxed);
        outflows.push_back(outflow);
        drop(outflows);
        fence(Ordering::SeqCst);
    }

    pub(super) fn take(&self) -> Option<(Frame, Source, Ticket, Piece)> {
        if self.is_empty() {
            return None;
        }
        let mut outflows = lock(&self.outflows);
        let first = outflows.front_mut()?;
        let taken = first.take();
        if first.untaken() == 0 {
            outflows.pop_front();
        }
        self.pieces.fetch_sub(usize::from(taken.is_some()), Ordering::Relaxed);
        taken
    }

    /// Nobody takes a piece for `mailbox` any more. The messages of which some had not been taken.
    pub fn cancel(&self, mailbox: u32) -> Vec<Key> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut outflows = lock(&self.outflows);
        let mut keys = Vec::new();
        outflows.retain(|outflow| {
            let stays = outflow.ticket.mailbox != mailbox;
            if !stays {
                keys.push(outflow.key);
                self.pieces.fetch_sub(outflow.untaken(), Ordering::Relaxed);
            }
            stays
        });
        keys
    }

    /// How many pieces nobody has taken.
    pub fn pieces(&self) -> usize {
        self.pieces.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pieces() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{KEY, frame};
    use super::*;

    fn outflow(sequence: u32, mailbox: u32, bytes: &[u8], piece: usize) -> Outflow {
        let key = Key { sequence, ..KEY };
        let Frame { signature, .. } = frame(FrameKind::Data, key, 0, 0, bytes.len());
        let from = Source { address: bytes.as_ptr(), len: bytes.len() };
        Outflow::new(key, signature, from, Ticket { mailbox, step: 0 }, piece)
    }

    #[test]
    fn every_byte_is_taken_once_one_message_after_the_other() {
        let (outlet, bytes) = (Outlet::default(), [0; 100]);
        assert!(outlet.is_empty() && outlet.take().is_none());
        outlet.post(outflow(0, 1, &bytes, 40));
        outlet.post(outflow(1, 2, &bytes[..40], 40));
        let mut taken = Vec::new();
        while let Some((frame, part, ticket, piece)) = outlet.take() {
            assert_eq!(frame.length as usize, part.len);
            assert_eq!(part.address, bytes.as_ptr().wrapping_add(frame.offset as usize));
            assert_eq!(piece.key, frame.key);
            taken.push((frame.key.sequence, frame.offset, part.len, ticket.mailbox, piece.left));
        }
        let parts: Vec<_> = taken.iter().map(|(of, at, len, box_, _)| (*of, *at, *len, *box_)).collect();
        assert_eq!(parts, [(0, 0, 40, 1), (0, 40, 40, 1), (0, 80, 20, 1), (1, 0, 40, 2)]);
        let left = |index: usize| taken[index].4.load(Ordering::Relaxed);
        assert!(left(0) == 3 && left(3) == 1 && Arc::ptr_eq(&taken[0].4, &taken[2].4));
        assert!(outlet.is_empty());
    }

    #[test]
    fn what_is_cancelled_is_not_taken_and_what_lacks_something_is_told() {
        let (outlet, bytes) = (Outlet::default(), [0; 100]);
        outlet.post(outflow(0, 1, &bytes, 50));
        outlet.post(outflow(1, 2, &bytes, 50));
        outlet.post(outflow(2, 1, &bytes, 50));
        assert_eq!(outlet.take().map(|(frame, ..)| frame.key.sequence), Some(0));
        let keys: Vec<u32> = outlet.cancel(1).iter().map(|key| key.sequence).collect();
        assert_eq!(keys, [0, 2]);
        let left: Vec<u32> =
            std::iter::from_fn(|| outlet.take()).map(|(frame, ..)| frame.key.sequence).collect();
        assert_eq!(left, [1, 1]);
        assert!(outlet.cancel(2).is_empty(), "all of it has been taken");
    }
}
