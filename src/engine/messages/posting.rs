//! What operations ask for: sends and receives.

use super::failure::{Failure, left};
use super::peer::PeerState;
use super::transfer::{Early, Posted, Receive, Receiving, Sending, deliver};
use super::{Messages, kept};
use crate::engine::lane::{Destination, Source, Ticket};
use crate::engine::pairs::{From, Waiting};
use crate::engine::wire::{Class, Frame, FrameKind, Key};
use crate::error::{Error, Status};
use crate::signature::Signature;
use crate::transport::LinkKind;

impl Messages {
    /// The number of the next send to `peer`.
    pub fn next_in_pair(&mut self, peer: u32, group: u64) -> u32 {
        self.pairs.number(peer, group)
    }

    /// Sends, once [`Messages::write_out`] is called. The ticket's mailbox is told when the bytes may be
    /// changed again.
    pub fn send(&mut self, peer: u32, key: Key, signature: Signature, from: Source, ticket: Ticket) {
        let frame = Frame {
            kind: FrameKind::Request,
            key,
            signature,
            total: from.len as u64,
            offset: from.address as u64,
            length: 0,
            announced: 0,
        };
        self.courses.begin(peer, &key, &signature, from.len, true);
        match &self.peers[peer as usize].state {
            PeerState::Open if self.gone_from(peer, key.group) => self.fail(ticket, left(peer)),
            PeerState::Open => {
                self.dispatch(peer, frame, from, Some(ticket));
                self.note_unwritten(peer);
            }
            PeerState::Closed | PeerState::Opening => {
                self.peers[peer as usize].waiting.push((frame, from, Some(ticket)));
                self.want(peer);
            }
            PeerState::Left => self.fail(ticket, left(peer)),
            PeerState::Lost(why) => {
                let why = Failure::Lost(peer, why.clone());
                self.fail(ticket, why);
            }
        }
    }

    /// Hands a send to an open link. The frame is that of an announcement.
    pub(super) fn dispatch(&mut self, peer: u32, frame: Frame, from: Source, ticket: Option<Ticket>) {
        let Some(ticket) = ticket else { return };
        let slot = &mut self.peers[peer as usize];
        if from.len <= slot.eager_bytes() {
            let frame = Frame { kind: FrameKind::Eager, offset: 0, length: from.len as u32, ..frame };
            slot.lanes[0].lock().push(&frame, from, Some(ticket));
            return;
        }
        slot.expected += 1;
        let announces = slot.kind == Some(LinkKind::Shm) || frame.key.class == Class::PointToPoint;
        let announced = if announces { slot.lanes[0].lock().announce() } else { 0 };
        let early = self.sending.insert(
            (peer, frame.key),
            Sending::Posted { from, signature: frame.signature, ticket, pieces: None, announced },
        );
        if let Some(Sending::Ready(ready)) = early {
            self.peer_is_ready(peer, ready);
        } else if announces {
            slot.lanes[0].lock().push_bare(&Frame { announced, ..frame });
        }
    }

    /// Tells a peer that there is a message without bytes, if it can be told; nobody waits for that.
    pub fn notify(&mut self, peer: u32, key: Key, signature: Signature) {
        if let PeerState::Open = self.peers[peer as usize].state {
            let kind = FrameKind::Eager;
            self.control(peer, &Frame { kind, key, signature, total: 0, offset: 0, length: 0, announced: 0 });
            self.flush(peer);
        }
    }

    /// Writes what has been posted: call it after the last of several sends and receives. What one peer is to
    /// get goes out together.
    pub fn write_out(&mut self) {
        while let Some(peer) = self.unwritten.pop() {
            self.flush(peer);
        }
    }

    fn note_unwritten(&mut self, peer: u32) {
        if !self.unwritten.contains(&peer) {
            self.unwritten.push(peer);
        }
    }

    /// Receives exactly `into.len` bytes. The ticket's mailbox is told when they are there.
    pub fn receive(&mut self, peer: u32, key: Key, signature: Signature, into: Destination, ticket: Ticket) {
        self.post(peer, key, Posted::new(into, signature, ticket, None));
    }

    /// Receives the next message of a send with this tag.
    pub fn receive_next(
        &mut self,
        (group, tag): (u64, u64),
        from: From,
        signature: Signature,
        into: Destination,
        ticket: Ticket,
    ) {
        let place = self.pairs.call();
        if let Some((peer, sequence)) = self.pairs.take(&from, (group, tag)) {
            let key = Key { group, tag, sequence, slot: 0, class: Class::PointToPoint };
            self.mailboxes[ticket.mailbox as usize].source = Some((peer, sequence));
            self.courses.begin(peer, &key, &signature, into.len, false);
            self.post(peer, key, Posted::new(into, signature, ticket, Some((from, place))));
            return;
        }
        match &from {
            From::Rank(peer) => {
                if !self.can_come(*peer, group, ticket) {
                    return;
                }
                self.peers[*peer as usize].expected += 1;
            }
            From::Any(_) => {
                if self.is_in_vain(&from, group) {
                    let why = Error::new(Status::PeerFailed, "every rank that could send has left");
                    self.fail(ticket, Failure::Error(why));
                    return;
                }
            }
        }
        let receive = Receive { into, signature };
        self.pairs.wait((group, tag), Waiting { from, place, ticket, receive });
    }

    pub(super) fn post(&mut self, peer: u32, key: Key, mut posted: Posted) {
        let len = posted.into.len;
        let ticket = posted.ticket;
        if let Some(entry) = self.receiving.get_mut(&(peer, key)) {
            let Receiving::Early(early) = entry else {
                let why = Error::new(Status::Internal, "a message was asked for twice");
                self.fail(ticket, Failure::Error(why));
                return;
            };
            self.calls.taken(peer, key);
            if let Some(mismatch) = posted.check(peer, key, early.signature(), early.total()) {
                let Some(Receiving::Early(early)) = self.receiving.remove(&(peer, key)) else { return };
                match early {
                    Early::Begun(..) => {}
                    Early::Eager(_, shelved) => self.unexpected_bytes -= kept(shelved.bytes().len()),
                    Early::Request { .. } => self.refuse(peer, &posted, key),
                }
                self.mismatch(ticket, mismatch);
                return;
            }
            if let (Some(why), Early::Begun(..) | Early::Request { .. }) =
                (self.peers[peer as usize].why_gone(peer), &early)
            {
                self.fail(ticket, why);
                return;
            }
            match early {
                Early::Begun(..) => {
                    *entry = Receiving::Claimed(posted);
                    self.peers[peer as usize].receives(len);
                }
                Early::Eager(_, shelved) => {
                    deliver(shelved.bytes(), &posted);
                    self.unexpected_bytes -= kept(shelved.bytes().len());
                    self.shelf.give_back(std::mem::take(shelved));
                    self.receiving.remove(&(peer, key));
                    self.note_done(ticket);
                }
                Early::Request { frame } => {
                    let frame = *frame;
                    self.receiving.insert((peer, key), Receiving::Posted(posted));
                    self.peers[peer as usize].receives(len);
                    self.accept(peer, frame);
                }
            }
            return;
        }
        if !self.can_come(peer, key.group, ticket) {
            return;
        }
        let tells = posted.announces(&key) && self.linked(peer) && !self.pulls(peer);
        let ready = posted.ready(key);
        if tells && self.hauls_to(peer) {
            posted.open(&self.peers[peer as usize].flows.intake, key);
        }
        self.receiving.insert((peer, key), Receiving::Posted(posted));
        self.peers[peer as usize].receives(len);
        if tells {
            self.control(peer, &ready);
            self.note_unwritten(peer);
        }
    }

    /// Whether a message that is not here yet can still come from `peer`; fails the ticket if not.
    fn can_come(&mut self, peer: u32, group: u64, ticket: Ticket) -> bool {
        let Some(why) = self.why_gone_from(peer, group) else {
            self.want(peer);
            return true;
        };
        self.fail(ticket, why);
        false
    }
}
