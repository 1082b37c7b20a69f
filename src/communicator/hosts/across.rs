//! What the hosts do among themselves in one composed call: its parts as one operation. The next call has its
//! turn when all of them have ended, stores too, so the pieces of a crew's lanes are counted by one call at a
//! time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use crate::cuda::word::Word;
use crate::engine::device::DeviceExchange;
use crate::engine::endpoint::{Through, lock};
use crate::engine::group::Group;
use crate::engine::operation::{Completion, Exits, Operation};
use crate::engine::staged::Staged;
use crate::engine::staged::relay::Relay;
use crate::error::Result;

/// A part of a call.
pub(super) enum Part {
    Staged(Box<Staged>),
    /// By the devices, through lanes that the ranks of this place have among themselves.
    Relayed(Box<Relay>),
}

impl Part {
    /// What the stream waits for until it has ended, if it is not a courier.
    fn exit(&self) -> Option<&Arc<Word>> {
        match self {
            Part::Staged(staged) => staged.exit(),
            Part::Relayed(relay) => relay.exit(),
        }
    }

    fn operation(&mut self) -> &mut dyn Operation {
        match self {
            Part::Staged(staged) => &mut **staged,
            Part::Relayed(relay) => &mut **relay,
        }
    }

    fn as_operation(&self) -> &dyn Operation {
        match self {
            Part::Staged(staged) => &**staged,
            Part::Relayed(relay) => &**relay,
        }
    }

    /// Whether the part behind it may go on: pieces go through the lanes in the order of the parts. One on
    /// side streams has them until it has ended.
    fn lets_others(&self) -> bool {
        match self {
            Part::Staged(_) => true,
            Part::Relayed(relay) => relay.leaves_lanes(),
        }
    }
}

/// The parts that have been given to the stream and have not been begun.
#[derive(Default)]
pub(super) struct Queue {
    parts: Mutex<Parts>,
    exits: Arc<Exits>,
}

#[derive(Default)]
struct Parts {
    waiting: VecDeque<Part>,
    /// Whether no more will come.
    closed: bool,
    /// Whether the operation was given up.
    abandoned: bool,
}

impl Queue {
    /// Adds a part, whose exit the stream may wait for from now on: it will be released in any case.
    pub(super) fn push(&self, group: &Group, mut part: Part) {
        part.exit().into_iter().for_each(|exit| self.exits.add(exit));
        let mut parts = lock(&self.parts);
        if parts.abandoned {
            drop(parts);
            part.operation().abandon(group);
        } else {
            parts.waiting.push_back(part);
        }
    }

    /// All parts have been added.
    pub(super) fn close(&self) {
        lock(&self.parts).closed = true;
    }
}

/// Parts under way: as many as the workspace has room for.
pub(super) const ACTIVE: usize = 2;

/// The operation.
pub(super) struct Across {
    /// How many collectives of the exchange there are with it.
    number: u32,
    exchange: Arc<DeviceExchange>,
    queue: Arc<Queue>,
    active: VecDeque<Part>,
    asks_driver: bool,
}

impl Across {
    /// The parts that come through `queue`, between launches of `exchange` for its collective of this
    /// `number`. Whether any may ask the driver.
    pub(super) fn new(
        number: u32,
        exchange: Arc<DeviceExchange>,
        queue: Arc<Queue>,
        asks_driver: bool,
    ) -> Across {
        Across { number, exchange, queue, active: VecDeque::with_capacity(ACTIVE), asks_driver }
    }

    /// Takes parts that can begin. Whether there are any under way, or more may come.
    fn take(&mut self) -> bool {
        let mut parts = lock(&self.queue.parts);
        let free = ACTIVE - self.active.len();
        let taken = free.min(parts.waiting.len());
        self.active.extend(parts.waiting.drain(..taken));
        !self.active.is_empty() || !parts.closed
    }
}

impl Operation for Across {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        loop {
            if !self.take() {
                return Poll::Ready(Ok(Completion::default()));
            }
            let before = self.active.len();
            let mut index = 0;
            while let Some(part) = self.active.get_mut(index) {
                match part.operation().advance(group) {
                    Poll::Ready(Ok(_)) => drop(self.active.remove(index)),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending if !part.lets_others() => break,
                    Poll::Pending => index += 1,
                }
            }
            if self.active.len() == before {
                return Poll::Pending;
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        // What the stream comes to behind the parts must not take their memory for results.
        self.exchange.shut();
        let mut parts = lock(&self.queue.parts);
        parts.abandoned = true;
        let waiting = std::mem::take(&mut parts.waiting);
        drop(parts);
        for mut part in self.active.drain(..).chain(waiting) {
            part.operation().abandon(group);
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        let mut ranks: Vec<u32> =
            self.active.iter().flat_map(|part| part.as_operation().waits_for(group)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        // Or its stream has not come so far: then it may be the other ranks of this host that have not
        // called.
        if ranks.is_empty() { self.exchange.missing(self.number) } else { ranks }
    }

    fn is_at_work(&self) -> bool {
        self.active.iter().any(|part| part.as_operation().is_at_work())
    }

    fn through(&self) -> Through {
        Through::Device
    }

    fn has_courier(&self) -> bool {
        !self.asks_driver
    }

    fn asks_driver(&self) -> bool {
        self.asks_driver
    }

    fn exits(&self) -> Arc<Exits> {
        self.queue.exits.clone()
    }

    fn standing(&self) -> Option<String> {
        let parts: Vec<String> =
            self.active.iter().filter_map(|part| part.as_operation().standing()).collect();
        (!parts.is_empty()).then(|| parts.join(", and "))
    }
}
