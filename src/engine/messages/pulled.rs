//! Long messages that the receiver reads out of the sender's memory, and those that their senders withdraw.

use std::sync::atomic::{Ordering, fence};

use super::failure::Failure;
use super::peer::spreads;
use super::transfer::{Early, Posted, Receive, Receiving, Sending};
use super::{Messages, Receivings};
use crate::engine::pairs::{From, Waiting};
use crate::engine::wire::{Class, Frame, FrameKind, Key};
use crate::error::Status;
use crate::transport::LinkKind;
use crate::transport::memory::is_readable;

/// In what a [`FrameKind::Decline`] says: it is the sender who cannot read the bytes, and so its answer to
/// one.
const NOR_CAN_I: u64 = 1 << 32;

/// Bytes pulled between two looks at everything else, with the endpoint's lock.
const PULL_BYTES: usize = if cfg!(test) { 64 * 1024 } else { 4 * 1024 * 1024 };

/// A message that is pulled, or has been.
pub(super) struct Pulled {
    pub(super) peer: u32,
    pub(super) frame: Frame,
    /// Bytes that are here; `None`: nothing more is to come.
    begun: Option<usize>,
    /// What the kernel said, if the bytes could not be read. No failure yet: the sender may have withdrawn
    /// them.
    refused: Option<std::io::Error>,
}

/// Pulls no more of messages that nobody receives any more. Their senders, who are to be told.
pub(super) fn leave(pulled: &mut [Pulled], receiving: &Receivings) -> Vec<u32> {
    let is_left = |pulled: &&mut Pulled| {
        pulled.begun.is_some() && !receiving.contains_key(&(pulled.peer, pulled.frame.key))
    };
    let stop = |pulled: &mut Pulled| {
        pulled.begun = None;
        pulled.peer
    };
    pulled.iter_mut().filter(is_left).map(stop).collect()
}

impl Messages {
    /// A large message is announced and its buffer is posted: pull it, or ask for it.
    pub(super) fn accept(&mut self, peer: u32, frame: Frame) {
        let (key, hauls) = ((peer, frame.key), self.hauls_to(peer));
        let Some(Receiving::Posted(posted)) = self.receiving.get_mut(&key) else { return };
        // Also in our own process the kernel reads: the sender may give up and unmap its bytes at any time.
        let can_read = self.peers[peer as usize].memory.as_ref().is_some_and(|memory| memory.can_read);
        if !can_read || frame.announced == 0 {
            if !posted.announces(&frame.key) || self.peers[peer as usize].kind == Some(LinkKind::Shm) {
                let ready = posted.ready(frame.key);
                if hauls {
                    posted.open(&self.peers[peer as usize].flows.intake, frame.key);
                }
                self.control(peer, &ready);
                self.flush(peer);
            }
            return;
        }
        self.pulled.push(Pulled { peer, frame, begun: Some(0), refused: None });
        self.pull_on(peer);
    }

    /// Whether some message of `peer` is only here in part.
    pub(super) fn is_pulling(&self, peer: u32) -> bool {
        self.pulled.iter().any(|pulled| pulled.peer == peer && pulled.begun.is_some())
    }

    /// Pulls the next piece of the first message of `peer` of which some are left. Whether there was one.
    pub(super) fn pull_on(&mut self, peer: u32) -> bool {
        let Messages { pulled, receiving, peers, .. } = self;
        let left = |pulled: &Pulled| pulled.peer == peer && pulled.begun.is_some();
        let Some(index) = pulled.iter().position(left) else { return false };
        let Pulled { frame, begun, refused, .. } = &mut pulled[index];
        let memory = peers[peer as usize].memory.clone();
        let (Some(Receiving::Posted(posted)), Some(memory), Some(at)) =
            (receiving.get(&(peer, frame.key)), memory, *begun)
        else {
            *begun = None;
            return true;
        };
        let into = posted.into;
        let count = PULL_BYTES.min(into.len - at);
        // SAFETY: `at + count` is at most the length of the posted buffer, which stays valid until its ticket
        // is told or cancelled; neither happens while this runs under the endpoint's lock.
        let rest = unsafe { std::slice::from_raw_parts_mut(into.address.add(at), count) };
        match memory.read(frame.offset.wrapping_add(at as u64), rest) {
            Ok(()) if at + count < into.len => {
                *begun = Some(at + count);
                return true;
            }
            Ok(()) => *begun = None,
            // A process that has just died: the service says so in a moment, and in better words.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                pulled.remove(index);
                return true;
            }
            Err(error) => (*begun, *refused) = (None, Some(error)),
        }
        fence(Ordering::SeqCst);
        true
    }

    /// What has been pulled from `peer` counts, unless that has withdrawn it meanwhile. Whether anything
    /// counts.
    pub(super) fn count_pulled(&mut self, peer: u32) -> bool {
        let is_here = |pulled: &Pulled| pulled.peer == peer && pulled.begun.is_none();
        if !self.pulled.iter().any(is_here) {
            return false;
        }
        let Messages { pulled, receiving, peers, .. } = self;
        let Some(lane) = peers[peer as usize].lanes.first().map(|lane| lane.lock()) else { return false };
        let is_refused =
            |pulled: &Pulled| pulled.refused.is_some() && receiving.contains_key(&(peer, pulled.frame.key));
        // Of what is withdrawn the frame that says so comes, and wakes who sleeps. What could not be read is
        // left to its sender.
        let ends = |pulled: &Pulled| match is_refused(pulled) {
            true => lane.stream().stands(pulled.frame.announced),
            false => lane.stream().take(pulled.frame.announced),
        };
        let (ours, others): (Vec<_>, Vec<_>) =
            std::mem::take(pulled).into_iter().partition(|pulled| is_here(pulled) && ends(pulled));
        *pulled = others;
        drop(lane);
        if ours.is_empty() {
            return false;
        }
        for Pulled { frame, refused, .. } in ours {
            if let Some(cause) = refused.filter(|_| self.receiving.contains_key(&(peer, frame.key))) {
                // The receive stays: the sender sends the bytes after all, or says that it cannot read them
                // either.
                self.decline(peer, frame, cause.raw_os_error().unwrap_or(libc::EIO));
                continue;
            }
            // Gone if the receiver has given up meanwhile: the sender is told nevertheless that its bytes are
            // free.
            if let Some(Receiving::Posted(posted)) = self.receiving.remove(&(peer, frame.key)) {
                self.peers[peer as usize].received(posted.into.len);
                self.note_done(posted.ticket);
            }
            self.control(peer, &Frame { kind: FrameKind::Done, offset: 0, ..frame });
        }
        self.flush(peer);
        true
    }

    /// Tells the sender of an announced message that it will not be taken so. `why`: what the kernel said, or
    /// 0 when the group is gone.
    pub(super) fn decline(&mut self, peer: u32, frame: Frame, why: i32) {
        self.control(peer, &Frame { kind: FrameKind::Decline, offset: why as u64, ..frame });
        self.flush(peer);
    }

    /// The receiver of an announced message cannot read it, or will not take it; or the sender of one cannot
    /// read it either.
    pub(super) fn declined(&mut self, peer: u32, frame: Frame) {
        let key = (peer, frame.key);
        if frame.offset & NOR_CAN_I != 0 {
            // No piece of it comes, so the entry may go, if its owner has not let go meanwhile.
            let Some(Receiving::Posted(posted)) = self.receiving.get(&key) else { return };
            let (ticket, len) = (posted.ticket, posted.into.len);
            if !posted.close() {
                return;
            }
            self.receiving.remove(&key);
            self.peers[peer as usize].received(len);
            let cause = std::io::Error::from_raw_os_error(frame.offset as i32);
            let what = format!("has {len} bytes that could not be read from its memory: {cause}");
            self.fail(ticket, Failure::Peer { peer, status: Status::System, what });
            return;
        }
        let Some(Sending::Posted { from, ticket, announced, .. }) = self.sending.get(&key) else { return };
        let (from, ticket, announced) = (*from, *ticket, *announced);
        // Memory of a driver or of memfd_secret is this process's alone, and some forbid others to look into
        // theirs.
        if frame.offset != 0 && is_readable(from.address, from.len) {
            self.peer_is_ready(peer, Frame { kind: FrameKind::Ready, offset: 0, ..frame });
            return;
        }
        self.stands_no_longer(peer, announced);
        self.sending.remove(&key);
        self.peers[peer as usize].expected -= 1;
        let (status, what) = match i32::try_from(frame.offset) {
            Ok(0) => (Status::PeerFailed, "has destroyed its context and takes no more messages".into()),
            why => {
                let why = why.unwrap_or(libc::EIO);
                // Of a collective, the failure of the call is told.
                if frame.key.class == Class::PointToPoint {
                    self.control(peer, &Frame { offset: NOR_CAN_I | why as u64, ..frame });
                    self.flush(peer);
                }
                let cause = std::io::Error::from_raw_os_error(why);
                let text = format!("could not read {} bytes from this rank's memory: {cause}", frame.total);
                (Status::System, text)
            }
        };
        self.fail(ticket, Failure::Peer { peer, status, what });
    }

    /// The sender gives up a message that it has announced.
    pub(super) fn withdrawn(&mut self, peer: u32, key: Key) {
        self.pulled.retain(|pulled| (pulled.peer, pulled.frame.key) != (peer, key));
        match self.receiving.get(&(peer, key)) {
            Some(Receiving::Early(Early::Request { .. })) => {
                self.receiving.remove(&(peer, key));
                self.calls.taken(peer, key);
                if key.slot == 0 {
                    self.pairs.withdraw(peer, (key.group, key.tag), key.sequence);
                }
            }
            Some(Receiving::Posted(posted)) => {
                if posted.call.is_some() && posted.close() {
                    self.await_another(peer, key);
                    return;
                }
                if key.class != Class::PointToPoint {
                    // Its call has failed there, and why is on its way: that is the better cause.
                    return;
                }
                // The entry stays until its owner lets go: more of the message may be on its way in.
                let ticket = posted.ticket;
                let what = "gave up in the middle of a message: timed out, or cancelled".into();
                self.fail(ticket, Failure::Peer { peer, status: Status::PeerFailed, what });
            }
            _ => {}
        }
    }

    /// The message that a receive was to get is withdrawn before any of it came: it takes the next one.
    pub(super) fn await_another(&mut self, peer: u32, key: Key) {
        let Some(Receiving::Posted(posted)) = self.receiving.remove(&(peer, key)) else { return };
        let Posted { into, signature, ticket, call: Some((from, place)), .. } = posted else { return };
        self.courses.leave(peer, &key);
        self.mailboxes[ticket.mailbox as usize].source = None;
        let (channel, slot) = ((key.group, key.tag), &mut self.peers[peer as usize]);
        if let Some((peer, sequence)) = self.pairs.take(&from, channel) {
            slot.received(into.len);
            self.mailboxes[ticket.mailbox as usize].source = Some((peer, sequence));
            let key = Key { sequence, ..key };
            self.courses.begin(peer, &key, &signature, into.len, false);
            self.post(peer, key, Posted::new(into, signature, ticket, Some((from, place))));
            return;
        }
        match from {
            From::Any(_) => slot.received(into.len),
            From::Rank(_) => slot.spread -= usize::from(spreads(into.len)),
        }
        let receive = Receive { into, signature };
        self.pairs.wait(channel, Waiting { from, place, ticket, receive });
    }
}
