//! Why transfers do not end well, and who is told.

use super::peer::PeerState;
use super::transfer::{Early, Posted, Receiving, Sending};
use super::{Messages, kept};
use crate::engine::lane::Ticket;
use crate::engine::pairs::From;
use crate::engine::wire::{Class, Key};
use crate::error::{Error, Status};
use crate::signature::Signature;

/// Why a transfer will not end well.
#[derive(Clone, Debug)]
pub enum Failure {
    /// A failure that is no one peer's.
    Error(Error),
    /// Something of one peer. The owner of the mailbox knows how to call it.
    Peer {
        /// As the endpoint counts.
        peer: u32,
        /// What kind of failure.
        status: Status,
        /// What happened: goes on after the peer's name.
        what: String,
    },
    /// A peer, as the endpoint counts, is lost; the error speaks of it as the endpoint does.
    Lost(u32, Error),
    /// The ranks' calls differ.
    Mismatch(Mismatch),
}

/// What the ranks' calls disagree about.
#[derive(Clone, Debug)]
pub struct Mismatch {
    /// The other rank, as the endpoint counts.
    pub peer: u32,
    /// What the message was for.
    pub key: Key,
    /// The other rank's call.
    pub theirs: Signature,
    /// Our call, if the disagreement is about calls.
    pub ours: Option<Signature>,
    /// Bytes that came, and bytes that were expected, if it is about lengths.
    pub bytes: Option<(u64, u64)>,
}

/// What went wrong with a peer or a group, for the endpoint to act on.
pub enum Trouble {
    /// Ranks have called different things.
    Mismatch(Mismatch),
    /// There is no memory for a message of this peer.
    Short {
        /// As the endpoint counts.
        peer: u32,
        /// Of the message.
        bytes: u32,
    },
    /// The link to this peer is of no more use.
    Broken {
        /// As the endpoint counts.
        peer: u32,
        /// What happened.
        why: Error,
    },
}

impl Messages {
    pub(super) fn mismatch(&mut self, ticket: Ticket, mismatch: Mismatch) {
        if mismatch.key.class != Class::PointToPoint {
            self.troubles.push(Trouble::Mismatch(mismatch.clone()));
        }
        self.fail(ticket, Failure::Mismatch(mismatch));
    }

    pub(super) fn fail(&mut self, ticket: Ticket, why: Failure) {
        let mailbox = &mut self.mailboxes[ticket.mailbox as usize];
        if mailbox.live && mailbox.failed.is_none() {
            mailbox.failed = Some(why);
            mailbox.wake(&self.wakes);
        }
    }

    /// A stream of the link broke. What had come before still counts, over the others too: the peer may have
    /// ended in order behind that, with something unread, of which its kernel makes a reset.
    pub(super) fn doubt(&mut self, peer: u32, why: Error) {
        // The endpoint loses the link, if nothing else ends it.
        if matches!(self.peers[peer as usize].state, PeerState::Open) {
            self.troubles.push(Trouble::Broken { peer, why });
        }
        self.note_watches(peer);
    }

    /// The peer does what no peer does: nothing of it counts any more.
    pub(super) fn broken(&mut self, peer: u32, why: Error) {
        let slot = &mut self.peers[peer as usize];
        let working = slot.lanes.iter().any(|lane| !lane.lock().closed());
        slot.lanes.iter().for_each(|lane| lane.lock().shut());
        // The endpoint knows how to call the peer, and loses the link. Of one that has left, nothing else was
        // to come.
        if working && matches!(slot.state, PeerState::Open) {
            self.troubles.push(Trouble::Broken { peer, why });
        }
        self.note_watches(peer);
    }

    /// Nothing more comes from a peer that has left: a message that it had announced, or sent a part of,
    /// before anybody asked is as good as withdrawn.
    pub(super) fn forget_begun(&mut self, peer: u32) {
        let is_begun =
            |entry: &Receiving| matches!(entry, Receiving::Early(Early::Begun(..) | Early::Request { .. }));
        let messages = self.receiving.iter().filter(|((from, key), entry)| {
            *from == peer && key.class == Class::PointToPoint && is_begun(entry)
        });
        for key in messages.map(|((_, key), _)| *key).collect::<Vec<_>>() {
            if let Some(Receiving::Early(Early::Begun(_, total))) = self.receiving.remove(&(peer, key)) {
                self.unexpected_bytes -= kept(total as usize);
            }
            self.calls.taken(peer, key);
            if key.slot == 0 {
                self.pairs.withdraw(peer, (key.group, key.tag), key.sequence);
            }
        }
    }

    /// The peer has left and nothing more comes from it: whoever still waits for it waits in vain, but for
    /// receives that may take another's message.
    pub(super) fn strand(&mut self, peer: u32) {
        let takes_another = |posted: &Posted, group| match &posted.call {
            Some((from @ From::Any(_), _)) => !posted.has_begun() && !self.is_in_vain(from, group),
            _ => false,
        };
        let in_vain = self.receiving.iter().filter_map(|((from, key), entry)| match entry {
            Receiving::Posted(posted) if *from == peer && takes_another(posted, key.group) => Some(*key),
            _ => None,
        });
        for key in in_vain.collect::<Vec<_>>() {
            self.pulled.retain(|pulled| (pulled.peer, pulled.frame.key) != (peer, key));
            self.await_another(peer, key);
        }
        let slot = &self.peers[peer as usize];
        let backlog = slot.has_backlog();
        if slot.expected > 0 || backlog || !slot.waiting.is_empty() || self.pairs.waiting().next().is_some() {
            self.fail_with(peer, &left(peer));
        }
    }

    pub(super) fn fail_with(&mut self, peer: u32, why: &Failure) {
        let mut tickets = Vec::new();
        for ((from, _), entry) in &self.receiving {
            if let (true, Receiving::Posted(posted) | Receiving::Claimed(posted)) = (*from == peer, entry) {
                tickets.push(posted.ticket);
            }
        }
        for ((to, _), entry) in &self.sending {
            if let (true, Sending::Posted { ticket, .. }) = (*to == peer, entry) {
                tickets.push(*ticket);
            }
        }
        let slot = &self.peers[peer as usize];
        tickets.extend(slot.waiting.iter().filter_map(|(_, _, ticket)| *ticket));
        slot.lanes.iter().for_each(|lane| tickets.extend(lane.lock().tickets()));
        tickets.extend(
            self.pairs.waiting_in_groups().filter_map(|(group, waiting)| {
                self.is_in_vain(&waiting.from, group).then_some(waiting.ticket)
            }),
        );
        for ticket in tickets {
            self.fail(ticket, why.clone());
        }
        self.pulled.retain(|pulled| pulled.peer != peer);
    }
}

pub(super) fn check(
    peer: u32,
    key: Key,
    theirs: Signature,
    ours: Signature,
    total: u64,
    len: usize,
) -> Option<Mismatch> {
    let same = agree(key.class, theirs, ours) && total == len as u64;
    (!same).then(|| differing(peer, key, theirs, ours, total, len))
}

fn agree(class: Class, theirs: Signature, ours: Signature) -> bool {
    match class {
        Class::PointToPoint => theirs.dtype == ours.dtype && theirs.count == ours.count,
        _ => theirs == ours,
    }
}

/// Two ends of a message that differ, in their calls or else in its length, or that of the block that it is a
/// part of, or in their lists.
pub(super) fn differing(
    peer: u32,
    key: Key,
    theirs: Signature,
    ours: Signature,
    total: u64,
    len: usize,
) -> Mismatch {
    if theirs.is_about_list() && ours.is_about_list() && theirs != ours {
        // What is said of the lists tells them apart, and no bytes do.
        return Mismatch { peer, key, theirs, ours: Some(ours), bytes: None };
    }
    let blocks = theirs.block_bytes().zip(ours.block_bytes()).filter(|(theirs, ours)| theirs != ours);
    let (theirs, ours) = (theirs.call(), ours.call());
    let bytes = agree(key.class, theirs, ours).then(|| blocks.unwrap_or((total, len as u64)));
    Mismatch { peer, key, theirs, ours: Some(ours), bytes }
}

pub(super) fn left(peer: u32) -> Failure {
    let what = "has left: it destroyed its context, or its process ended".into();
    Failure::Peer { peer, status: Status::PeerFailed, what }
}
