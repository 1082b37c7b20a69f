//! A range of memory for many messages: parts of it are sent and received, and waited for as they complete.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::context::Membership;
use crate::communicator::{Call, Context, Work};
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};
use crate::sys::fork;

/// How long a wait stays with one message before it looks at the others of its buffer and whether it was
/// aborted, where they are not all by messages. The wait for one message moves them all, so this bounds how
/// late another's completion is seen, not how fast it moves.
const SLICE: Duration = Duration::from_millis(1);

/// A range of memory from which parts are sent, and into which parts are received, many at a time. All
/// methods from any thread. Dropping it waits for the messages that are moving, until their deadlines at the
/// latest.
pub struct Buffer {
    context: Context,
    base: *mut u8,
    bytes: u64,
    sends: Queue,
    receives: Queue,
    /// In which process it was made.
    fork: u32,
}

// SAFETY: `base` only names memory, and who made the buffer promised that it may be used from any thread.
unsafe impl Send for Buffer {}
// SAFETY: as above; what changes is behind locks.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// The `bytes` bytes from `base` on.
    ///
    /// # Safety
    /// They stay valid until the buffer is dropped, and whoever sends or receives parts keeps the rules of a
    /// send's and a receive's memory.
    pub unsafe fn new(context: &Context, base: *mut u8, bytes: u64) -> Buffer {
        let (sends, receives) = (Queue::new("send"), Queue::new("receive"));
        Buffer { context: context.clone(), base, bytes, sends, receives, fork: fork::generation() }
    }

    /// The context whose ranks it exchanges messages with.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Starts to send `count` elements from `offset` bytes on.
    pub fn send(&self, offset: u64, count: u64, dtype: DataType, to: u32, call: &Call) -> Result<()> {
        let part = self.part(offset, count, dtype)?;
        let request = Request {
            kind: Kind::Send,
            input: part,
            output: std::ptr::null_mut(),
            counts: Counts::Uniform(count),
            dtype,
            operator: Operator::Sum,
            root: to,
        };
        // SAFETY: the part is within the buffer, which is valid until dropped, and dropping waits.
        let work = unsafe { self.context.start(&request, call) }?;
        self.sends.push(Message { work, on_stream: call.stream.is_some(), peers: vec![to] }, &self.context);
        Ok(())
    }

    /// Starts to receive `count` elements to `offset` bytes from the start, from whichever rank of `from`
    /// sends first; of all ranks if that is empty.
    pub fn receive(&self, offset: u64, count: u64, dtype: DataType, from: &[u32], call: &Call) -> Result<()> {
        let part = self.part(offset, count, dtype)?;
        let request = Request {
            kind: if from.len() == 1 { Kind::Receive } else { Kind::ReceiveAny },
            input: std::ptr::null(),
            output: part,
            counts: match from.len() {
                0 | 1 => Counts::Uniform(count),
                _ => Counts::From { count, ranks: from.into() },
            },
            dtype,
            operator: Operator::Sum,
            root: from.first().copied().unwrap_or(0),
        };
        // SAFETY: the part is within the buffer, which is valid until dropped, and dropping waits.
        let work = unsafe { self.context.start(&request, call) }?;
        let message = Message { work, on_stream: call.stream.is_some(), peers: from.to_vec() };
        self.receives.push(message, &self.context);
        Ok(())
    }

    /// Waits until one of the sends is complete, and tells to whom it went. Each send is told once; its
    /// failure is returned as it is.
    pub fn wait_send(&self, deadline: Deadline) -> Result<u32> {
        self.sends.wait(deadline)
    }

    /// As [`Buffer::wait_send`], for receives: tells who sent.
    pub fn wait_receive(&self, deadline: Deadline) -> Result<u32> {
        self.receives.wait(deadline)
    }

    /// Ends the waits that are under way with `Aborted`. The messages go on.
    pub fn abort_wait(&self) -> Result<()> {
        // Before anything is locked: in a child, by a thread that is not there.
        if let Membership::Group(group) = self.context.membership() {
            group.endpoint().check_fork()?;
        }
        self.sends.abort();
        self.receives.abort();
        self.context.wake();
        Ok(())
    }

    /// Where a part begins.
    fn part(&self, offset: u64, count: u64, dtype: DataType) -> Result<*mut u8> {
        let part = u128::from(count) * dtype.size() as u128;
        if u128::from(offset) + part <= u128::from(self.bytes) {
            // The offset is within memory that exists, so it fits.
            return Ok(self.base.wrapping_add(offset as usize));
        }
        let from = if offset == 0 { String::new() } else { format!(" from offset {offset}") };
        fail!(
            InvalidArgument,
            "count {count} of {} is {part} bytes{from}, but the buffer given to unisono_buffer_create has {}",
            dtype.name(),
            self.bytes
        )
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // In a forked child the messages are the parent's.
        if self.fork != fork::generation() {
            return;
        }
        for queue in [&self.sends, &self.receives] {
            for message in std::mem::take(&mut queue.lock().pending) {
                if message.on_stream || message.work.cancel().is_err() {
                    // A stream has it, or what the device is given beside one: it is done with the memory by
                    // its own deadline.
                    let _ = message.work.wait(Deadline::NEVER);
                }
            }
        }
    }
}

/// Messages of one direction, in the order they were started.
struct Queue {
    verb: &'static str,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Message>,
    /// How many of them are not by messages alone.
    others: usize,
    /// How often the waits were aborted.
    aborts: u64,
    /// Threads that wait.
    waiting: usize,
}

/// A thread that waits, until this is dropped.
struct Waits<'a>(&'a Queue);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting -= 1;
    }
}

struct Message {
    work: Work,
    on_stream: bool,
    /// Who the other side may be; empty: any rank.
    peers: Vec<u32>,
}

impl Queue {
    fn new(verb: &'static str) -> Queue {
        Queue { verb, state: Mutex::default() }
    }

    fn push(&self, message: Message, context: &Context) {
        let mut state = self.lock();
        // Who waits may have looked for the last time before this was in the list, and sleep for another
        // alone; and whoever ended this one may have told before that.
        let is_missed = state.waiting > 0;
        state.others += usize::from(!message.work.is_by_messages());
        state.pending.push_back(message);
        drop(state);
        if is_missed {
            context.wake();
        }
    }

    fn abort(&self) {
        self.lock().aborts += 1;
    }

    fn wait(&self, deadline: Deadline) -> Result<u32> {
        let since = Instant::now();
        let aborts = {
            let mut state = self.lock();
            state.waiting += 1;
            state.aborts
        };
        let _waits = Waits(self);
        let mut late = false;
        loop {
            let (oldest, peers, others, alike) = {
                let mut state = self.lock();
                if state.aborts != aborts {
                    fail!(Aborted, "the wait for a {} of this buffer was aborted", self.verb);
                }
                // Nothing is moved under the lock: callbacks may want it.
                if let Some(done) = state.pending.iter().position(|message| message.work.peek().is_some()) {
                    // `position` found it under this lock.
                    let Some(Message { work, peers, .. }) = state.pending.remove(done) else { continue };
                    state.others -= usize::from(!work.is_by_messages());
                    drop(state);
                    let completion = work.wait(Deadline::NEVER)?;
                    // A send has no source, but one peer.
                    return match completion.source.or(peers.first().copied()) {
                        Some(rank) => Ok(rank),
                        None => fail!(Internal, "a receive completed without a source"),
                    };
                }
                match state.pending.front() {
                    Some(Message { work, peers, .. }) => {
                        (work.clone(), peers.clone(), state.pending.len() - 1, state.others == 0)
                    }
                    None => fail!(InvalidUsage, "no {} of this buffer is under way", self.verb),
                }
            };
            if late {
                let whom = match &peers[..] {
                    [] => "any rank".to_owned(),
                    [rank] => format!("rank {rank}"),
                    ranks => format!("any of the ranks {ranks:?}"),
                };
                let direction = if self.verb == "send" { "to" } else { "from" };
                let others = if others == 0 { String::new() } else { format!(" (and {others} others)") };
                fail!(
                    Timeout,
                    "the {} {direction} {whom}{others} is not complete after {:.1} s of waiting",
                    self.verb,
                    since.elapsed().as_secs_f64()
                );
            }
            late = deadline.expired();
            // Whatever comes of this, the loop looks at what is complete.
            match oldest.by_messages().filter(|_| alike) {
                // What comes to be under way beside it wakes this thread.
                Some(running) => running.wait_until(
                    deadline,
                    || self.lock().pending.len() == 1,
                    || {
                        let State { pending, others, aborts: now, .. } = &*self.lock();
                        let is_over = |message: &Message| message.work.peek().is_some();
                        // Another thread may have had it, or have begun one that is moved in another way; or all
                        // are lost by now.
                        *now != aborts
                            || pending.is_empty()
                            || *others > 0
                            || oldest.by_messages().is_none()
                            || pending.iter().any(is_over)
                    },
                ),
                None => drop(oldest.wait(Deadline::after(SLICE).min(deadline))),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves the list as it was or longer by one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
