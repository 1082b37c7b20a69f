//! Send, receive, receive from any: one message each.

use std::sync::Arc;
use std::task::Poll;

use super::group::{Group, Turn};
use super::lane::{Destination, Source, Ticket};
use super::operation::{Completion, Operation};
use super::pairs::From;
use super::wire::{Class, Key};
use crate::error::Result;
use crate::signature::Signature;

/// What the one message is.
#[derive(Clone, Debug)]
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
    /// From whichever rank sends first: the message of theirs that comes first, or has come first of those that nobody
    /// has taken.
    ReceiveAny {
        /// Of these ranks; `None`: of the group.
        of: Option<Arc<[u32]>>,
        /// Where to.
        into: Destination,
    },
}

/// One message under way.
pub struct Point {
    message: Message,
    tag: u64,
    signature: Signature,
    mailbox: Option<u32>,
}

impl Point {
    /// Posts the message at once, so that messages of one pair and tag keep the order of the calls.
    ///
    /// # Safety
    /// The message's memory stays valid until the operation has ended or is abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, message: Message) -> Point {
        let mut messages = group.endpoint().messages();
        let mailbox = messages.mailbox();
        let ticket = Ticket { mailbox, step: 0 };
        let signature = turn.signature;
        let peer = |rank: u32| group.members()[rank as usize];
        let channel = (group.id(), turn.tag);
        match &message {
            &Message::Send { to, from } => {
                let sequence = messages.next_in_pair(peer(to), group.id(), turn.tag);
                let (group, tag) = channel;
                let key = Key { group, tag, sequence, slot: 0, class: Class::PointToPoint };
                messages.send(peer(to), key, signature, from, ticket);
            }
            &Message::Receive { from, into } => {
                messages.receive_next(channel, From::Rank(peer(from)), signature, into, ticket);
            }
            Message::ReceiveAny { of: None, into } => {
                let from = From::Any(group.members().clone());
                messages.receive_next(channel, from, signature, *into, ticket);
            }
            Message::ReceiveAny { of: Some(ranks), into } => {
                let peers: Arc<[u32]> = ranks.iter().map(|&rank| peer(rank)).collect();
                // A rank that was named is watched, so that its end is noticed even if it never sends.
                for &peer in peers.iter().filter(|&&peer| peer != group.endpoint().rank()) {
                    messages.want(peer);
                }
                messages.receive_next(channel, From::Any(peers), signature, *into, ticket);
            }
        }
        messages.write_out();
        drop(messages);
        group.endpoint().settle();
        Point { message, tag: turn.tag, signature, mailbox: Some(mailbox) }
    }
}

impl Operation for Point {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let Some(mailbox) = self.mailbox else { return Poll::Ready(Ok(Completion::default())) };
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
        self.mailbox = None;
        Poll::Ready(Ok(Completion { source }))
    }

    fn abandon(&mut self, group: &Group) {
        if let Some(mailbox) = self.mailbox.take() {
            group.endpoint().messages().cancel(mailbox);
        }
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        match self.message {
            Message::Send { to: rank, .. } | Message::Receive { from: rank, .. } => vec![rank],
            Message::ReceiveAny { ref of, .. } => of.as_deref().unwrap_or_default().to_vec(),
        }
    }
}
