//! Which message goes to which receive, for send and receive: in the order of arrival and the order of the
//! calls.
//!
//! The sender numbers its messages, but the numbers only name them. A receive takes the first message that
//! has come, or will come, from its rank with its tag; so a receive that gives up, or a send that is
//! withdrawn, leaves the pair in step.

#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::lane::Ticket;

/// Whose message a receive takes. Ranks as the endpoint counts.
#[derive(Clone, Debug)]
pub enum From {
    /// This rank's.
    Rank(u32),
    /// The first of any of these.
    Any(Arc<[u32]>),
}

impl From {
    /// Whether it takes messages of `peer`.
    pub fn accepts(&self, peer: u32) -> bool {
        match self {
            From::Rank(rank) => *rank == peer,
            From::Any(ranks) => ranks.contains(&peer),
        }
    }
}

/// A receive that no message has come for. `T` is what it needs to take one.
pub struct Waiting<T> {
    /// Whose message it takes.
    pub from: From,
    /// Its place in the order of the calls: see [`Pairs::call`].
    pub place: u64,
    /// Who is told.
    pub ticket: Ticket,
    /// What it needs to take one.
    pub receive: T,
}

/// A group and a tag.
type Channel = (u64, u64);

/// Messages and receives that have not found each other.
pub struct Pairs<T> {
    /// How many messages have been sent to a rank in a group: their numbers only name them.
    sent: HashMap<(u32, u64), u32>,
    /// Receives so far.
    calls: u64,
    /// In the order of the calls.
    waiting: HashMap<Channel, VecDeque<Waiting<T>>>,
    /// Sender and number of messages, in the order of their arrival.
    unclaimed: HashMap<Channel, VecDeque<(u32, u32)>>,
}

impl<T> Default for Pairs<T> {
    fn default() -> Pairs<T> {
        Pairs { sent: HashMap::new(), calls: 0, waiting: HashMap::new(), unclaimed: HashMap::new() }
    }
}

impl<T> Pairs<T> {
    /// The number of the next message to `peer` in `group`.
    pub fn number(&mut self, peer: u32, group: u64) -> u32 {
        let next = self.sent.entry((peer, group)).or_insert(0);
        let number = *next;
        *next = number.wrapping_add(1);
        number
    }

    /// The place of a new receive in the order of the calls, which it keeps.
    pub fn call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    /// The sender and number of the first message that has come for such a receive.
    pub fn take(&mut self, from: &From, channel: Channel) -> Option<(u32, u32)> {
        let messages = self.unclaimed.get_mut(&channel)?;
        let index = messages.iter().position(|(peer, _)| from.accepts(*peer))?;
        let message = messages.remove(index);
        if messages.is_empty() {
            self.unclaimed.remove(&channel);
        }
        message
    }

    /// A receive waits for its message, or again if that was withdrawn: behind those that were called before
    /// it.
    pub fn wait(&mut self, channel: Channel, waiting: Waiting<T>) {
        let receives = self.waiting.entry(channel).or_default();
        let behind = receives.partition_point(|other| other.place < waiting.place);
        receives.insert(behind, waiting);
    }

    /// A message has come: the receive that takes it. Without one, the message is kept for [`Pairs::take`].
    pub fn arrive(&mut self, peer: u32, channel: Channel, number: u32) -> Option<Waiting<T>> {
        let claimed = self.waiting.get_mut(&channel).and_then(|receives| {
            let index = receives.iter().position(|waiting| waiting.from.accepts(peer))?;
            receives.remove(index)
        });
        match &claimed {
            Some(_) if self.waiting[&channel].is_empty() => drop(self.waiting.remove(&channel)),
            Some(_) => {}
            None => self.unclaimed.entry(channel).or_default().push_back((peer, number)),
        }
        claimed
    }

    /// A message is withdrawn by its sender.
    pub fn withdraw(&mut self, peer: u32, channel: Channel, number: u32) {
        if let Some(messages) = self.unclaimed.get_mut(&channel) {
            messages.retain(|message| *message != (peer, number));
            if messages.is_empty() {
                self.unclaimed.remove(&channel);
            }
        }
    }

    /// The receives of `mailbox` give up; `each` is called for them.
    pub fn cancel(&mut self, mailbox: u32, mut each: impl FnMut(&From)) {
        self.waiting.retain(|_, receives| {
            receives.retain(|waiting| {
                let stays = waiting.ticket.mailbox != mailbox;
                if !stays {
                    each(&waiting.from);
                }
                stays
            });
            !receives.is_empty()
        });
    }

    /// As [`Pairs::cancel`], where there is one, of this channel.
    pub fn cancel_in(&mut self, channel: Channel, mailbox: u32, each: impl FnOnce(&From)) {
        let Some(receives) = self.waiting.get_mut(&channel) else { return };
        let at = receives.iter().position(|waiting| waiting.ticket.mailbox == mailbox);
        if let Some(waiting) = at.and_then(|at| receives.remove(at)) {
            each(&waiting.from);
        }
        if receives.is_empty() {
            self.waiting.remove(&channel);
        }
    }

    /// A group is gone: the numbers of its messages and the messages that nobody has taken go with it.
    pub fn forget(&mut self, group: u64) {
        self.sent.retain(|(_, other), _| *other != group);
        self.unclaimed.retain(|channel, _| channel.0 != group);
    }

    /// Entries of all tables.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        let unclaimed = self.unclaimed.values().map(VecDeque::len).sum::<usize>();
        self.sent.len() + self.waiting().count() + unclaimed
    }

    /// The receives that wait.
    pub fn waiting(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.waiting.values().flatten()
    }

    /// The same, each with its group.
    pub fn waiting_in_groups(&self) -> impl Iterator<Item = (u64, &Waiting<T>)> {
        self.waiting
            .iter()
            .flat_map(|(channel, receives)| receives.iter().map(|waiting| (channel.0, waiting)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANNEL: Channel = (1, 2);

    fn pairs(receives: impl IntoIterator<Item = (u32, From)>) -> Pairs<()> {
        let mut pairs = Pairs::default();
        for (mailbox, from) in receives {
            let (place, ticket) = (pairs.call(), Ticket { mailbox, step: 0 });
            pairs.wait(CHANNEL, Waiting { from, place, ticket, receive: () });
        }
        pairs
    }

    #[test]
    fn messages_go_to_receives_in_the_order_of_the_calls() {
        let any: Arc<[u32]> = [3, 4].into();
        let mut pairs = pairs([(0, From::Rank(4)), (1, From::Any(any)), (2, From::Rank(3))]);
        let mailboxes: Vec<_> = [3, 3, 4, 4]
            .into_iter()
            .enumerate()
            .map(|(number, peer)| {
                pairs.arrive(peer, CHANNEL, number as u32).map(|waiting| waiting.ticket.mailbox)
            })
            .collect();
        assert_eq!(mailboxes, [Some(1), Some(2), Some(0), None]);
        assert_eq!(pairs.take(&From::Rank(3), CHANNEL), None);
        assert_eq!(pairs.take(&From::Rank(4), CHANNEL), Some((4, 3)));
    }

    #[test]
    fn receives_whose_messages_are_withdrawn_keep_their_order() {
        let mut pairs = pairs((0..4).map(|mailbox| (mailbox, From::Rank(3))));
        let taken: Vec<_> = (0..3).filter_map(|number| pairs.arrive(3, CHANNEL, number)).collect();
        // In the order of the calls and not, with one in between that has its message, and one behind that
        // waits.
        for order in [[0, 2], [2, 0]] {
            for index in order {
                let Waiting { ref from, place, ticket, .. } = taken[index];
                pairs.wait(CHANNEL, Waiting { from: from.clone(), place, ticket, receive: () });
            }
            let again = (4..6).map(|number| pairs.arrive(3, CHANNEL, number));
            let again: Vec<_> = again.map(|found| found.map(|waiting| waiting.ticket.mailbox)).collect();
            assert_eq!(again, [Some(0), Some(2)], "{order:?}");
        }
        assert_eq!(pairs.arrive(3, CHANNEL, 6).map(|waiting| waiting.ticket.mailbox), Some(3));
    }

    #[test]
    fn who_gives_up_takes_nothing() {
        let mut pairs = pairs([(0, From::Rank(3)), (1, From::Rank(3))]);
        let mut cancelled = 0;
        pairs.cancel(0, |_| cancelled += 1);
        assert_eq!(cancelled, 1);
        assert_eq!(pairs.arrive(3, CHANNEL, 0).map(|waiting| waiting.ticket.mailbox), Some(1));
        assert!(pairs.arrive(3, CHANNEL, 1).is_none());
        pairs.withdraw(3, CHANNEL, 1);
        assert_eq!(pairs.take(&From::Rank(3), CHANNEL), None);
    }
}
