//! The order of sends whose bytes are not there yet.
//!
//! Messages of one pair and tag arrive in the order of the calls. A send from device memory is posted only
//! when its bytes have come to the host; sends to the same rank with the same tag that are called meanwhile
//! wait behind it.

#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::endpoint::{Endpoint, lock};

/// A rank of the group, and a tag.
type Channel = (u32, u64);

/// The sends of one group that have not been posted.
pub struct Sends {
    waiting: Mutex<Queues>,
    count: AtomicUsize,
    endpoint: Weak<Endpoint>,
}

#[derive(Default)]
struct Queues {
    next: u64,
    queues: HashMap<Channel, VecDeque<u64>>,
}

/// A place in the order, left when it is dropped.
pub struct SendTurn {
    sends: Arc<Sends>,
    channel: Channel,
    number: u64,
}

impl Sends {
    /// None yet.
    pub fn new(endpoint: &Arc<Endpoint>) -> Arc<Sends> {
        Arc::new(Sends {
            waiting: Mutex::default(),
            count: AtomicUsize::new(0),
            endpoint: Arc::downgrade(endpoint),
        })
    }

    /// A place behind the sends to `to` with `tag` that have not been posted.
    pub fn queue(self: &Arc<Self>, to: u32, tag: u64) -> SendTurn {
        let mut waiting = lock(&self.waiting);
        let (number, channel) = (waiting.next, (to, tag));
        waiting.next += 1;
        waiting.queues.entry(channel).or_default().push_back(number);
        self.count.fetch_add(1, Ordering::Release);
        SendTurn { sends: self.clone(), channel, number }
    }

    /// As [`Sends::queue`], if there are any to wait for.
    pub fn queue_behind(self: &Arc<Self>, to: u32, tag: u64) -> Option<SendTurn> {
        if self.count.load(Ordering::Acquire) == 0 || !lock(&self.waiting).queues.contains_key(&(to, tag)) {
            return None;
        }
        Some(self.queue(to, tag))
    }
}

impl SendTurn {
    /// Whether all before it have been posted or given up.
    pub fn has_come(&self) -> bool {
        let waiting = lock(&self.sends.waiting);
        waiting.queues.get(&self.channel).and_then(VecDeque::front) == Some(&self.number)
    }
}

impl Drop for SendTurn {
    fn drop(&mut self) {
        let mut waiting = lock(&self.sends.waiting);
        let mut more = false;
        if let Some(queue) = waiting.queues.get_mut(&self.channel) {
            // Numbers go up; mostly it is the first.
            if let Ok(at) = queue.binary_search(&self.number) {
                queue.remove(at);
            }
            more = !queue.is_empty();
        }
        if !more {
            waiting.queues.remove(&self.channel);
        }
        drop(waiting);
        self.sends.count.fetch_sub(1, Ordering::Release);
        if more && let Some(endpoint) = self.sends.endpoint.upgrade() {
            endpoint.nudge();
        }
    }
}
