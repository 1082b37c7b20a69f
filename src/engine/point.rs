//! Send, receive, receive from any: one message each.

use std::task::Poll;

use super::group::{Group, Turn};
use super::lane::{Destination, Source, Ticket};
use super::operation::{Completion, Operation};
use super::pairs::From;
use super::sends::SendTurn;
use super::wire::{Class, Key};
use crate::error::Result;
use crate::signature::Signature;

/// What the one message is.
#[derive(Clone, Copy, Debug)]
pub enum Message {
    /// To a rank of the group.
    Send {
        /// The rank.
        to: u32,
        /// What.
        from: Source,
    },
    /// From a rank of the group.
    Receive {
        /// The rank.
        from: u32,
        /// Where to.
        into: Destination,
    },
    /// From whichever rank of the group sends first.
    ReceiveAny {
        /// Where to.
        into: Destination,
    },
}

/// One message under way.
pub struct Point {
    message: Message,
    tag: u64,
    signature: Signature,
    state: State,
}

enum State {
    /// Behind sends that have not been posted.
    Queued(SendTurn),
    /// With its mailbox.
    Posted(u32),
    Ended,
}

impl Point {
    /// Posts the message at once, so that messages of one pair and tag keep the order of the calls; a send behind others
    /// that have not been posted, as soon as they have.
    ///
    /// # Safety
    /// The message's memory stays valid until the operation has ended or is abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, message: Message) -> Point {
        let behind = match message {
            Message::Send { to, .. } => group.sends().queue_behind(to, turn.tag),
            _ => None,
        };
        // SAFETY: the caller's promise.
        unsafe { Point::in_turn(group, turn, message, behind) }
    }

    /// As [`Point::new`], for a send that has had its place in the order before its bytes were there.
    ///
    /// # Safety
    /// As [`Point::new`].
    pub unsafe fn in_turn(group: &Group, turn: &Turn, message: Message, place: Option<SendTurn>) -> Point {
        let (tag, signature) = (turn.tag, turn.signature);
        let mut point = Point { message, tag, signature, state: State::Ended };
        match place {
            Some(place) => {
                point.state = State::Queued(place);
                point.post_in_turn(group);
            }
            None => point.post(group),
        }
        point
    }

    /// Posts the message if its turn has come.
    fn post_in_turn(&mut self, group: &Group) {
        if let State::Queued(place) = &self.state
            && place.has_come()
        {
            // The place is left when the message is posted, without the lock.
            let State::Queued(place) = std::mem::replace(&mut self.state, State::Ended) else { return };
            self.post(group);
            drop(place);
        }
    }

    fn post(&mut self, group: &Group) {
        let mut messages = group.endpoint().messages();
        let mailbox = messages.mailbox();
        let ticket = Ticket { mailbox, step: 0 };
        let signature = self.signature;
        let peer = |rank: u32| group.members()[rank as usize];
        let channel = (group.id(), self.tag);
        match self.message {
            Message::Send { to, from } => {
                let sequence = messages.next_in_pair(peer(to), group.id(), self.tag);
                let (group, tag) = channel;
                let key = Key { group, tag, sequence, slot: 0, class: Class::PointToPoint };
                messages.send(peer(to), key, signature, from, ticket);
            }
            Message::Receive { from, into } => {
                messages.receive_next(channel, From::Rank(peer(from)), signature, into, ticket);
            }
            Message::ReceiveAny { into } => {
                let from = From::Any(group.members().clone());
                messages.receive_next(channel, from, signature, into, ticket);
            }
        }
        messages.write_out();
        drop(messages);
        group.endpoint().settle();
        self.state = State::Posted(mailbox);
    }
}

impl Operation for Point {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.post_in_turn(group);
        let mailbox = match self.state {
            State::Posted(mailbox) => mailbox,
            State::Queued(_) => return Poll::Pending,
            State::Ended => return Poll::Ready(Ok(Completion::default())),
        };
        let mut messages = group.endpoint().messages();
        let mail = messages.look(mailbox);
        if let Some(failure) = mail.failed.take() {
            let error = group.tell(failure);
            log::debug!("{} with tag {} failed: {error}", self.signature, self.tag);
            return Poll::Ready(Err(error));
        }
        if mail.done.is_empty() {
            return Poll::Pending;
        }
        let source = match self.message {
            Message::Send { .. } => None,
            Message::Receive { from, .. } => Some(from),
            Message::ReceiveAny { .. } => mail.source.and_then(|peer| group.rank_of(peer)),
        };
        messages.close_mailbox(mailbox);
        self.state = State::Ended;
        Poll::Ready(Ok(Completion { source }))
    }

    fn abandon(&mut self, group: &Group) {
        if let State::Posted(mailbox) = std::mem::replace(&mut self.state, State::Ended) {
            group.endpoint().messages().cancel(mailbox);
        }
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        match self.message {
            Message::Send { to: rank, .. } | Message::Receive { from: rank, .. } => vec![rank],
            Message::ReceiveAny { .. } => Vec::new(),
        }
    }
}
