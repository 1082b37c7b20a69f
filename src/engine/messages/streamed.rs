//! Long messages in pieces, once the receiver is ready.

use super::Messages;
use super::failure::check;
use super::transfer::Sending;
use crate::engine::lane::{Outflow, Source, Ticket};
use crate::engine::wire::{Class, Frame, Key};
use crate::signature::Signature;

/// A large message is cut into pieces of this many bytes, dealt out over the lanes of the link.
const PIECE_BYTES: usize = 512 * 1024;
/// Where several threads move them, which take one after the other, into smaller ones, down to this if that
/// makes one for each lane.
const HAULED_MOST: usize = 256 * 1024;
const HAULED_LEAST: usize = 128 * 1024;
/// Pieces begin at multiples of this.
const GRAIN: usize = 4096;

impl Messages {
    /// The receiver has its buffer: the bytes go out in pieces.
    pub(super) fn peer_is_ready(&mut self, peer: u32, frame: Frame) {
        let key = (peer, frame.key);
        let Some(Sending::Posted { from, signature, ticket, announced, .. }) = self.sending.get(&key) else {
            // To a message of send and receive it is an answer: that has been withdrawn meanwhile.
            if self.departed.contains(frame.key.group) || frame.key.class == Class::PointToPoint {
                return;
            }
            self.check_call(peer, &frame);
            self.sending.insert(key, Sending::Ready(frame));
            return;
        };
        let (from, signature, ticket, announced) = (*from, *signature, *ticket, *announced);
        self.stands_no_longer(peer, announced);
        if let Some(mismatch) = check(peer, frame.key, frame.signature, signature, frame.total, from.len) {
            self.sending.remove(&key);
            self.peers[peer as usize].expected -= 1;
            self.mismatch(ticket, mismatch);
            return;
        }
        self.stream_out(peer, frame.key, signature, from, ticket);
        self.flush(peer);
    }

    fn stream_out(&mut self, peer: u32, key: Key, signature: Signature, from: Source, ticket: Ticket) {
        let hauls = self.hauls_to(peer);
        let slot = &mut self.peers[peer as usize];
        let lanes = slot.lanes.len();
        let (least, most) = if hauls { (HAULED_LEAST, HAULED_MOST) } else { (PIECE_BYTES, PIECE_BYTES) };
        let bytes = from.len.div_ceil(lanes).next_multiple_of(GRAIN).clamp(least, most);
        let mut outflow = Outflow::new(key, signature, from, ticket, bytes);
        let is_several = from.len > bytes;
        slot.strews |= is_several;
        let pieces = Some(outflow.left().clone());
        // For one alone nobody else is to wake.
        if hauls && is_several {
            slot.flows.outlet.post(outflow);
        } else {
            for lane in slot.lanes.iter().cycle() {
                let Some(piece) = outflow.take() else { break };
                lane.lock().push_piece(piece);
            }
        }
        self.sending.insert((peer, key), Sending::Posted { from, signature, ticket, pieces, announced: 0 });
    }
}
