//! The ranks that call together: their numbering, the order of their operations, and their first failure.

mod failing;
mod inquiry;
mod leaving;
mod line;
mod making;
mod refusals;
mod sharing;
mod spare;
mod turn;

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

pub use inquiry::Inquiry;
pub(in crate::engine) use inquiry::{CATCHING_UP, INQUIRY_LOOK};
pub use leaving::Rest;
use line::Line;
pub use refusals::is_everybodys;
pub use spare::Lent;
use spare::Spare;
pub(in crate::engine) use turn::Numbers;
use turn::{Book, Locked, Orders};
pub use turn::{Calling, Turn};

use super::device::{Layout, Way};
use super::direct::Direct;
use super::endpoint::{Endpoint, Look, Through, lock};
use super::operation::{Completion, Operation, Running};
use super::recorder::{Progress, Slot};
use super::sends::Sends;
use super::staged::relay;
use super::wire::{Class, Key};
use crate::cuda::driver::retry;
use crate::deadline::{Deadline, Timeout};
use crate::error::{Error, Result, fail};
use crate::signature::Signature;
use crate::transport::service::Announced;

/// Ranks of one endpoint that call together. Ranks are numbered within the group; `members` maps them to the
/// endpoint's numbering, which links and messages use.
pub struct Group {
    id: u64,
    line: Arc<Line>,
    name: String,
    rank: u32,
    members: Arc<[u32]>,
    ranks_per_node: u32,
    timeout: Timeout,
    endpoint: Arc<Endpoint>,
    /// Set after the others were told of the failure: a thread that sees it may end the process.
    failed: AtomicBool,
    failure: OnceLock<Error>,
    /// Whether the others are told nothing of that: see [`Group::leave`].
    left: AtomicBool,
    telling: Mutex<Announced>,
    orders: Book,
    spare: Arc<Mutex<Spare>>,
    direct: OnceLock<Arc<Direct>>,
    devices: OnceLock<Way>,
    connecting: Mutex<()>,
    relay: Arc<relay::Seat>,
    sends: Arc<Sends>,
    /// Children that are being set up, which end with it.
    making: Mutex<Vec<Weak<Group>>>,
}

impl Group {
    /// A group of `members` (ranks of the endpoint, this one at index `rank`), known to the endpoint from
    /// here on.
    pub fn new(
        endpoint: Arc<Endpoint>,
        id: u64,
        name: String,
        rank: u32,
        members: Arc<[u32]>,
        timeout: Duration,
    ) -> Arc<Group> {
        Group::in_line(Line::of(id), endpoint, id, name, rank, members, timeout)
    }

    /// One of the same members that is to take this one's place, known to the endpoint from here on.
    pub fn successor(&self, id: u64, name: String, timeout: Duration) -> Arc<Group> {
        let (endpoint, members) = (self.endpoint.clone(), self.members.clone());
        Group::in_line(self.line.join(), endpoint, id, name, self.rank, members, timeout)
    }

    fn in_line(
        line: Arc<Line>,
        endpoint: Arc<Endpoint>,
        id: u64,
        name: String,
        rank: u32,
        members: Arc<[u32]>,
        timeout: Duration,
    ) -> Arc<Group> {
        debug_assert_eq!(members[rank as usize], endpoint.rank());
        let hosts: Vec<_> = members.iter().map(|&member| endpoint.host(member)).collect();
        let relay = Arc::new(relay::Seat::new(relay::Crew::all(rank, members.len() as u32)));
        let group = Arc::new(Group {
            id,
            line,
            name,
            rank,
            ranks_per_node: ranks_per_node(&hosts),
            members,
            timeout: Timeout::new(timeout),
            sends: Sends::new(&endpoint),
            endpoint,
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
            left: AtomicBool::new(false),
            telling: Mutex::default(),
            orders: Book::default(),
            spare: Arc::default(),
            direct: OnceLock::new(),
            devices: OnceLock::new(),
            connecting: Mutex::default(),
            relay,
            making: Mutex::default(),
        });
        group.endpoint.enrol(&group);
        group
    }

    /// The same on all members, and on no other group of the job.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// For errors and logs.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks.
    pub fn size(&self) -> u32 {
        self.members.len() as u32
    }

    /// How many ranks share a host, if they are numbered host by host, equally many to a host but for the
    /// last; else all.
    pub fn ranks_per_node(&self) -> u32 {
        self.ranks_per_node
    }

    /// The members as the endpoint numbers them, in this group's order.
    pub fn members(&self) -> &Arc<[u32]> {
        &self.members
    }

    /// The deadline of a call that names none.
    pub fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    /// From now on it is another.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// Its endpoint.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// The group's number of an endpoint's rank.
    pub fn rank_of(&self, peer: u32) -> Option<u32> {
        self.members.iter().position(|&member| member == peer).map(|rank| rank as u32)
    }

    // ---- calls

    /// Runs an operation to its end in this thread. `make` builds it once its number is known.
    pub fn run<O: Operation + 'static>(
        self: &Arc<Self>,
        calling: Calling,
        make: impl FnOnce(&Turn) -> O,
    ) -> Result<Completion> {
        let (turn, orders) = self.begin_call(calling)?;
        if let Some(orders) = orders {
            return self.wait_in_line(&Running::new(self.clone(), turn, make(&turn).boxed()), &turn, orders);
        }
        let mut operation = make(&turn);
        let result = self.glance(&mut operation).unwrap_or_else(|| self.complete(&turn, &mut operation));
        if let Err(cause) = &result {
            self.spread(&turn, cause);
            operation.abandon(self);
            self.endpoint.see_out();
        }
        self.conclude(&turn, result)
    }

    /// The turn of a call; with the orders, if it has to wait for that. What has its turn may begin as it is
    /// made, and ask the driver: others end their calls meanwhile.
    fn begin_call(&self, calling: Calling) -> Result<(Turn, Option<Locked<'_>>)> {
        let mut orders = self.orders(&calling.signature)?;
        let (turn, free) = self.take_turn(&mut orders, calling);
        Ok((turn, (!free).then_some(orders)))
    }

    /// Has an operation wait for its turn, and waits for its end.
    fn wait_in_line(
        &self,
        running: &Arc<Running>,
        turn: &Turn,
        mut orders: Locked<'_>,
    ) -> Result<Completion> {
        self.endpoint.adopt(running.clone());
        orders.of(turn.class, turn.tag).queue.push_back(running.clone());
        drop(orders);
        running.wait(Deadline::NEVER).unwrap_or_else(|| Err(self.overdue(turn, &Inquiry::none())))
    }

    /// Moves an operation in this thread to its end, or its call's deadline.
    fn complete<O: Operation>(&self, turn: &Turn, operation: &mut O) -> Result<Completion> {
        self.begin(turn);
        let mut answer = self.follow(turn, operation, turn.deadline.min(turn.compare_at(turn.called)));
        while answer.is_none() && !turn.deadline.expired() {
            self.compare(turn, &operation.waits_for(self));
            answer = self.follow(turn, operation, turn.deadline.min(turn.compare_again_at()));
        }
        answer.unwrap_or_else(|| {
            let inquiry = self.ask_late(turn, operation);
            while !self.answered(&inquiry) {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(self.overdue(turn, &inquiry))
        })
    }

    /// Moves an operation that goes through shared memory for a moment. If it ends in that, nobody has looked
    /// at messages, and they need not know of the call.
    fn glance<O: Operation>(&self, operation: &mut O) -> Option<Result<Completion>> {
        if operation.through() != Through::Memory {
            return None;
        }
        for _ in 0..self.endpoint.burst() {
            match operation.advance(self) {
                Poll::Ready(result) => return Some(result),
                Poll::Pending if operation.is_at_work() => return None,
                Poll::Pending => std::hint::spin_loop(),
            }
        }
        None
    }

    /// Moves an operation in this thread until it ends or `until` has come.
    fn follow<O: Operation>(
        &self,
        turn: &Turn,
        operation: &mut O,
        until: Deadline,
    ) -> Option<Result<Completion>> {
        let (through, mut has_worked) = (operation.through(), false);
        self.endpoint.follow(until, through, |sleeper| match operation.advance(self) {
            Poll::Ready(result) => Look::Over(result),
            Poll::Pending => match self.failure() {
                Some(error) => Look::Over(Err(error)),
                None => {
                    // Nobody else moves it.
                    if let (Some(sleeper), Some(mailbox)) = (sleeper, operation.mailbox()) {
                        self.endpoint.sleep_for_mail(mailbox, sleeper);
                    }
                    self.looked(turn, operation, &mut has_worked)
                }
            },
        })
    }

    /// Starts an operation; the library moves it.
    pub fn start<O: Operation + 'static>(
        self: &Arc<Self>,
        calling: Calling,
        make: impl FnOnce(&Turn) -> O,
    ) -> Result<Arc<Running>> {
        let (turn, orders) = self.begin_call(calling)?;
        let running = Running::new(self.clone(), turn, make(&turn).boxed());
        self.set_off(&running, &turn, orders);
        Ok(running)
    }

    /// Has an operation run, now or when its turn comes.
    fn set_off(&self, running: &Arc<Running>, turn: &Turn, orders: Option<Locked<'_>>) {
        self.endpoint.adopt(running.clone());
        if let Some(mut orders) = orders {
            orders.of(turn.class, turn.tag).queue.push_back(running.clone());
            drop(orders);
            running.prepare();
            return self.endpoint.kick();
        }
        if running.activate() {
            self.pass_on(turn);
        }
        if running.has_courier() && self.endpoint.is_attended() {
            // It needs its courier, which is still to be launched: the next look is the attendant's.
            running.prepare();
            return self.endpoint.kick();
        }
        let moved = self.endpoint.progress(0, running.through());
        let has_ended = running.has_ended();
        if moved || !has_ended {
            self.endpoint.kick();
        }
        if has_ended {
            self.endpoint.see_out();
        }
    }

    /// The orders, for a call that may have a turn: a group that had failed when the last one passed on gives
    /// none.
    fn orders(&self, signature: &Signature) -> Result<Locked<'_>> {
        // A child may find the lock taken for ever.
        self.endpoint.check_fork()?;
        let orders = self.orders.lock();
        self.check(signature)?;
        Ok(orders)
    }

    fn check(&self, signature: &Signature) -> Result<()> {
        self.endpoint.check_fork()?;
        let Some(error) = self.failure() else { return self.endpoint.check_present() };
        let here = self.endpoint.hostname(self.endpoint.rank());
        let (name, rank, size) = (signature.kind.name(), self.rank, self.size());
        let place = format!("{name} of '{}' (rank {rank} of {size} on {here})", self.name);
        Err(error.context(format!("{place} is refused, the group has failed before")))
    }

    fn take_turn(&self, orders: &mut Orders, calling: Calling) -> (Turn, bool) {
        let Calling { class, tag, .. } = calling;
        let order = orders.of(class, tag);
        let (sequence, era) = order.take(1);
        if era {
            self.endpoint.messages().forget_call(self.id, class, tag);
        }
        let turn = self.turn(calling, sequence);
        // Sends and receives are ordered by their pair and tag alone.
        (turn, class == Class::PointToPoint || order.enter(turn.deadline))
    }

    /// The turn of a call that is made now.
    fn turn(&self, calling: Calling, sequence: u32) -> Turn {
        let (Calling { class, tag, signature, .. }, called) = (calling, Instant::now());
        let key = Key { group: self.id, tag, sequence, slot: 0, class };
        let slot = self.endpoint.recorder().begin(key, signature, called);
        self.recorded(slot, calling, sequence, called)
    }

    /// The turn of a call that has been recorded.
    fn recorded(&self, slot: Slot, calling: Calling, sequence: u32, called: Instant) -> Turn {
        let Calling { class, tag, signature, timeout } = calling;
        let deadline = Deadline::since(called, timeout.unwrap_or(self.timeout()));
        Turn { class, tag, sequence, signature, deadline, called, piece: 0, slot }
    }

    /// Gives calls their numbers that wait for no others on the host, and end without word: streams do them.
    /// That of the last.
    pub(super) fn number(
        &self,
        class: Class,
        signatures: &[Signature],
        timeout: Option<Duration>,
    ) -> Result<Turn> {
        let Some((&last, before)) = signatures.split_last() else {
            fail!(InvalidArgument, "no operations were given")
        };
        let (first, era) = self.orders(&last)?.of(class, 0).take(signatures.len() as u32);
        if era {
            self.endpoint.messages().forget_call(self.id, class, 0);
        }
        let called = Instant::now();
        let key = Key { group: self.id, tag: 0, sequence: first, slot: 0, class };
        let slot = self.endpoint.recorder().enqueued(key, before, last, called);
        let calling = Calling { class, tag: 0, signature: last, timeout };
        Ok(self.recorded(slot, calling, first.wrapping_add(before.len() as u32), called))
    }

    /// Makes the next ordered call of this rank known before it has its number: others that have called
    /// something else under that number find out. For one thread at a time.
    pub fn announce(&self, signature: Signature, timeout: Option<Duration>) -> Result<Turn> {
        self.check(&signature)?;
        let sequence = self.orders.lock().of(Class::Ordered, 0).next();
        Ok(self.turn(Calling { class: Class::Ordered, tag: 0, signature, timeout }, sequence))
    }

    /// A call that was announced is about to be made.
    pub fn retract(&self, turn: &Turn) {
        self.endpoint.recorder().forget(turn.slot);
    }

    /// A call that was announced is not made, since the devices could not agree. Unless the group has failed
    /// with that, its number is the next call's, whatever that is.
    pub fn miscarry(&self, turn: &Turn, cause: &Error) -> Error {
        match self.latched() {
            Some(_) => self.endpoint.recorder().end(turn.slot, Progress::Failed),
            None => self.retract(turn),
        }
        cause.context(format!("{}, the first on device memory", self.describe(turn)))
    }

    /// A call's turn has come.
    pub fn begin(&self, turn: &Turn) {
        if turn.class != Class::PointToPoint {
            let mut messages = self.endpoint.messages();
            messages.begin_call(self.id, turn.class, turn.tag, turn.sequence, turn.signature);
        }
    }

    /// A call of this thread has ended: the next one has its turn, and a failure is everybody's.
    fn conclude(&self, turn: &Turn, result: Result<Completion>) -> Result<Completion> {
        let result = self.end_turn_record(turn, result);
        if self.pass_on(turn) {
            // This thread does not look on, and those who sleep have looked before.
            self.endpoint.nudge();
        }
        result
    }

    /// A call has ended, which the record says from here on; a failure is everybody's.
    pub fn end_turn_record(&self, turn: &Turn, result: Result<Completion>) -> Result<Completion> {
        let progress = if result.is_ok() { Progress::Done } else { Progress::Failed };
        // First why: a rank that asks this one meanwhile is not to hear that it has failed, and no more.
        let result = result.map_err(|cause| self.blame(turn, cause));
        self.endpoint.recorder().end(turn.slot, progress);
        if turn.class == Class::Tagged {
            self.endpoint.messages().end_call(self.id, turn.tag, turn.sequence);
        }
        result
    }

    /// What is left of a call concerns this rank alone: it does not keep others waiting.
    pub fn note_exchanged(&self, turn: &Turn) {
        self.endpoint.recorder().end(turn.slot, Progress::Enqueued);
    }

    /// Whether another call waits for the turn of one that has not ended. None of a tag does: what is kept
    /// for that goes with its last call.
    pub fn is_followed(&self, turn: &Turn) -> bool {
        turn.class == Class::Ordered && !self.orders.lock().of(Class::Ordered, 0).queue.is_empty()
    }

    /// Gives the next call its turn: once for each turn. Whether there is one, which is to be looked at.
    pub fn pass_on(&self, turn: &Turn) -> bool {
        if turn.class == Class::PointToPoint {
            return false;
        }
        loop {
            let next = self.orders.lock().end(turn.class, turn.tag);
            match next {
                // It needs no turn any more.
                Some(next) if next.activate() => {}
                Some(_) => {
                    self.endpoint.kick();
                    return true;
                }
                None => return false,
            }
        }
    }

    /// As if there had been so many collectives.
    #[cfg(test)]
    pub(super) fn pretend_calls(&self, count: u32) {
        self.orders.lock().of(Class::Ordered, 0).pretend(count);
    }

    /// Tags of which something is kept for their next calls, neighbours as one.
    #[cfg(test)]
    pub(super) fn kept_tags(&self) -> usize {
        self.orders.lock().entries()
    }

    /// Sends that have not been posted.
    pub fn sends(&self) -> &Arc<Sends> {
        &self.sends
    }

    // ---- devices

    /// How the members sit on hosts, if a device exchange could make use of it: on one, sharing memory there,
    /// or on several, equally many on each, host by host. The same on all members.
    pub fn layout(&self) -> Option<Layout> {
        if self.direct.get().is_some() {
            return Layout::new(self.rank, self.size(), self.size());
        }
        let shared = 2..self.size();
        if shared.contains(&self.ranks_per_node) {
            return Layout::new(self.rank, self.size(), self.ranks_per_node);
        }
        None
    }

    /// Whether the members' devices exchange, once that is agreed.
    pub fn devices(&self) -> Option<&Way> {
        self.devices.get()
    }

    /// Held by whoever makes the members agree on that.
    pub fn connecting(&self) -> &Mutex<()> {
        &self.connecting
    }

    /// Nobody will call any more. What streams were given of it before comes to an end all the same: calls at
    /// their deadlines at the latest, and these and replays of graphs when a rank is lost.
    pub fn see_off(self: &Arc<Self>) {
        if self.endpoint.check_fork().is_ok() && self.is_on_streams() {
            self.endpoint.see_off(self.clone());
        }
    }

    /// Whether streams still do what they were given, and may not come to its end by themselves.
    pub(super) fn is_on_streams(&self) -> bool {
        let Some(exchange) = self.devices().and_then(Way::exchange) else { return false };
        // The kernels of one that has failed have been told to leave. Of a device that is lost nobody will
        // know more.
        self.failure().is_none() && matches!(retry(|| exchange.is_idle()), Ok(false))
    }

    /// It is agreed.
    pub(super) fn link_devices(&self, way: Way) {
        let _ = self.devices.set(way);
        fence(Ordering::SeqCst);
        if let (true, Some(exchange)) =
            (self.failed.load(Ordering::Relaxed), self.devices.get().and_then(Way::exchange))
        {
            exchange.abort();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // In a forked child the locks may be held by threads that do not exist.
        if self.endpoint.check_fork().is_ok() {
            self.endpoint.dismiss(self);
            // The members are told by the endpoint's goodbye, where that goes, too.
            let is_last = Arc::strong_count(&self.endpoint) == 1;
            let untold = if is_last { Arc::default() } else { self.members.clone() };
            self.endpoint.messages().forget(self.id, self.line.leave(), untold, self.has_told());
            self.endpoint.see_out();
            self.endpoint.await_last_words();
        }
    }
}

/// See [`Group::ranks_per_node`]. The same on all ranks, which know the same hosts.
fn ranks_per_node<H: Eq + Hash>(hosts: &[H]) -> u32 {
    let first = hosts.iter().take_while(|&host| *host == hosts[0]).count().max(1);
    let mut seen = HashSet::new();
    let regular =
        hosts.chunks(first).all(|node| seen.insert(&node[0]) && node.iter().all(|host| *host == node[0]));
    if regular { first as u32 } else { hosts.len() as u32 }
}

#[cfg(test)]
mod tests {
    use super::ranks_per_node;

    #[test]
    fn nodes_are_found_where_ranks_are_numbered_host_by_host() {
        assert_eq!(ranks_per_node(b"aaaa"), 4);
        assert_eq!(ranks_per_node(b"aabbcc"), 2);
        assert_eq!(ranks_per_node(b"aaabbbcc"), 3, "the last may have fewer");
        assert_eq!(ranks_per_node(b"abc"), 1);
        for irregular in [b"abab", b"abba", b"abbb"] {
            assert_eq!(ranks_per_node(irregular), 4, "{irregular:?}");
        }
    }
}
