//! The ranks that call together: their numbering, the order of their operations, and their first failure.

mod inquiry;
mod making;
mod refusals;
mod spare;
mod turn;

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

pub use inquiry::Inquiry;
pub(in crate::engine) use inquiry::{CATCHING_UP, LOOK};
pub use refusals::is_everybodys;
use spare::Spare;
use turn::Orders;
pub use turn::Turn;

use super::device::{Layout, Way};
use super::direct::{BOARD_BYTES, Direct, MAX_MEMBERS, label, say_goodbye};
use super::endpoint::{Endpoint, Look, Through, lock};
use super::operation::{Completion, Operation, Running};
use super::recorder::{Progress, Slot};
use super::sends::Sends;
use super::staged::relay;
use super::wire::{Class, Key};
use crate::cuda::driver::retry;
use crate::deadline::{Deadline, Timeout};
use crate::error::{Error, Result, Status, fail};
use crate::signature::Signature;
use crate::transport::memory::PeerMemory;

/// Ranks of one endpoint that call together. Ranks are numbered within the group; `members` maps them to the
/// endpoint's numbering, which links and messages use.
pub struct Group {
    id: u64,
    name: String,
    rank: u32,
    members: Arc<[u32]>,
    ranks_per_node: u32,
    timeout: Timeout,
    endpoint: Arc<Endpoint>,
    /// Whether the failure is told: seen here before, it might never be.
    failed: AtomicBool,
    failure: OnceLock<Error>,
    telling: Mutex<()>,
    orders: Mutex<Orders>,
    spare: Mutex<Spare>,
    direct: OnceLock<Arc<Direct>>,
    devices: OnceLock<Way>,
    connecting: Mutex<()>,
    relay: Arc<relay::Seat>,
    sends: Arc<Sends>,
    /// Children that are being set up, which end with it.
    making: Mutex<Vec<Weak<Group>>>,
}

impl Group {
    /// A group of `members` (ranks of the endpoint, this one at index `rank`), known to the endpoint from here on.
    pub fn new(
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
            name,
            rank,
            ranks_per_node: ranks_per_node(&hosts),
            members,
            timeout: Timeout::new(timeout),
            sends: Sends::new(&endpoint),
            endpoint,
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
            telling: Mutex::default(),
            orders: Mutex::default(),
            spare: Mutex::default(),
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

    /// How many ranks share a host, if they are numbered host by host, equally many to a host but for the last; else all.
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

    // ---- failure

    /// The first failure, if there was one.
    pub fn failure(&self) -> Option<Error> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        self.latched()
    }

    /// The same when the others may not have been told yet.
    pub(super) fn latched(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// Keeps a failure if it is the first, and has `tell` tell the other members before anybody here sees it: who does may end
    /// the process. Whether it was: then whoever has no caller to tell of it logs it.
    #[must_use = "a failure that no call tells of is to be logged, once"]
    pub(super) fn latch(&self, error: &Error, tell: impl FnOnce()) -> bool {
        /// Also when telling panics.
        struct Seen<'a>(&'a AtomicBool);
        impl Drop for Seen<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let telling = lock(&self.telling);
        let seen = Seen(&self.failed);
        let first = self.failure.set(error.clone()).is_ok();
        if first {
            tell();
        }
        drop(seen);
        drop(telling);
        // Against `link_devices`: either this sees the exchange, or that sees the failure.
        fence(Ordering::SeqCst);
        if let Some(exchange) = self.devices.get().and_then(Way::exchange) {
            exchange.abort();
        }
        if first {
            self.fail_children(error);
            self.endpoint.awaken_all(self);
            self.endpoint.wake();
        }
        first
    }

    /// Latches a failure and tells the other members. Nothing in a forked child: there the locks may be held by threads that do
    /// not exist, and the members are the parent's.
    pub fn fail(&self, error: Error) {
        if self.endpoint.check_fork().is_err() {
            return;
        }
        if self.latch(&error, || self.endpoint.spread(self, &error)) {
            log::warn!("group '{}' failed: {error}", self.name);
        }
    }

    /// As [`Group::fail`], of what this rank has come upon: the others are told which rank it is.
    pub fn fail_here(&self, error: &Error) {
        self.fail(error.context(format_args!("rank {} of '{}'", self.rank, self.name)));
    }

    // ---- calls

    /// Runs an operation to its end in this thread. `make` builds it once its number is known.
    pub fn run<O: Operation + 'static>(
        self: &Arc<Self>,
        class: Class,
        tag: u64,
        signature: Signature,
        timeout: Option<Duration>,
        make: impl FnOnce(&Turn) -> O,
    ) -> Result<Completion> {
        let mut orders = self.orders(&signature)?;
        let (turn, free) = self.take_turn(&mut orders, class, tag, signature, timeout);
        if !free {
            let running = Running::new(self.clone(), turn, Box::new(make(&turn)));
            self.endpoint.adopt(running.clone());
            orders.of(class, tag).queue.push_back(running.clone());
            drop(orders);
            return running
                .wait(Deadline::NEVER)
                .unwrap_or_else(|| Err(self.overdue(&turn, &Inquiry::none())));
        }
        drop(orders);
        let mut operation = make(&turn);
        let mut given_up = false;
        let result = self
            .glance(&mut operation)
            .unwrap_or_else(|| self.complete(&turn, &mut operation, &mut given_up));
        if let Err(cause) = &result {
            self.spread(&turn, cause);
            if !given_up {
                operation.abandon(self);
            }
            self.endpoint.see_out();
        }
        self.conclude(&turn, result)
    }

    /// Moves an operation in this thread to its end, or its call's deadline. `given_up`: whether it has been abandoned.
    fn complete<O: Operation>(
        &self,
        turn: &Turn,
        operation: &mut O,
        given_up: &mut bool,
    ) -> Result<Completion> {
        self.begin(turn);
        let mut answer = self.follow(turn, operation, turn.deadline.min(turn.compare_at(turn.called)));
        while answer.is_none() && !turn.deadline.expired() {
            self.compare(turn, &operation.waits_for(self));
            answer = self.follow(turn, operation, turn.deadline.min(turn.compare_again_at()));
        }
        answer.unwrap_or_else(|| {
            let (awaited, standing) = (operation.waits_for(self), operation.standing());
            // Other threads move messages while the others are asked: what comes from here on is for the next receive.
            if turn.class == Class::PointToPoint {
                operation.abandon(self);
                *given_up = true;
            }
            let inquiry = self.ask(turn, awaited, standing);
            while !self.answered(&inquiry) {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(self.overdue(turn, &inquiry))
        })
    }

    /// Moves an operation that goes through shared memory for a moment. If it ends in that, nobody has looked at messages, and
    /// they need not know of the call.
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
        self.endpoint.follow(until, through, || match operation.advance(self) {
            Poll::Ready(result) => Look::Over(result),
            Poll::Pending => match self.failure() {
                Some(error) => Look::Over(Err(error)),
                None => {
                    let at_work = operation.is_at_work();
                    if std::mem::replace(&mut has_worked, at_work) || at_work {
                        self.note_look(turn, operation, at_work);
                    }
                    if at_work { Look::AtWork } else { Look::Waits }
                }
            },
        })
    }

    /// Starts an operation; the library moves it.
    pub fn start<O: Operation + 'static>(
        self: &Arc<Self>,
        class: Class,
        tag: u64,
        signature: Signature,
        timeout: Option<Duration>,
        make: impl FnOnce(&Turn) -> O,
    ) -> Result<Arc<Running>> {
        let mut orders = self.orders(&signature)?;
        let (turn, free) = self.take_turn(&mut orders, class, tag, signature, timeout);
        let running = Running::new(self.clone(), turn, Box::new(make(&turn)));
        self.endpoint.adopt(running.clone());
        if !free {
            orders.of(class, tag).queue.push_back(running.clone());
            drop(orders);
            running.prepare();
            self.endpoint.kick();
            return Ok(running);
        }
        drop(orders);
        if running.activate() {
            self.pass_on(&turn);
        }
        if running.has_courier() && self.endpoint.is_attended() {
            // It needs its courier, which is still to be launched: the next look is the attendant's.
            running.prepare();
            self.endpoint.kick();
            return Ok(running);
        }
        let moved = self.endpoint.progress(0, running.through());
        let has_ended = running.has_ended();
        if moved || !has_ended {
            self.endpoint.kick();
        }
        if has_ended {
            self.endpoint.see_out();
        }
        Ok(running)
    }

    /// The orders, for a call that may have a turn: a group that had failed when the last one passed on gives none.
    fn orders(&self, signature: &Signature) -> Result<MutexGuard<'_, Orders>> {
        // A child may find the lock taken for ever.
        self.endpoint.check_fork()?;
        let orders = lock(&self.orders);
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

    fn take_turn(
        &self,
        orders: &mut Orders,
        class: Class,
        tag: u64,
        signature: Signature,
        timeout: Option<Duration>,
    ) -> (Turn, bool) {
        let order = orders.of(class, tag);
        let (sequence, era) = order.take(1);
        if era {
            self.endpoint.messages().forget_call(self.id, class, tag);
        }
        let turn = self.turn(Instant::now(), class, tag, sequence, signature, timeout);
        // Sends and receives are ordered by their pair and tag alone.
        (turn, class == Class::PointToPoint || order.enter(turn.deadline))
    }

    fn turn(
        &self,
        called: Instant,
        class: Class,
        tag: u64,
        sequence: u32,
        signature: Signature,
        timeout: Option<Duration>,
    ) -> Turn {
        let key = Key { group: self.id, tag, sequence, slot: 0, class };
        let slot = self.endpoint.recorder().begin(key, signature, called);
        self.recorded(slot, key, signature, called, timeout)
    }

    /// The turn of a call that has been recorded.
    fn recorded(
        &self,
        slot: Slot,
        key: Key,
        signature: Signature,
        called: Instant,
        timeout: Option<Duration>,
    ) -> Turn {
        let Key { tag, sequence, class, .. } = key;
        let deadline = Deadline::since(called, timeout.unwrap_or(self.timeout()));
        Turn { class, tag, sequence, signature, deadline, called, piece: 0, slot }
    }

    /// Gives calls their numbers that wait for no others on the host, and end without word: streams do them. That of the last.
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
        let key = Key { sequence: first.wrapping_add(before.len() as u32), ..key };
        Ok(self.recorded(slot, key, last, called, timeout))
    }

    /// Makes the next ordered call of this rank known before it has its number: others that have called something else
    /// under that number find out. For one thread at a time.
    pub fn announce(&self, signature: Signature, timeout: Option<Duration>) -> Result<Turn> {
        self.check(&signature)?;
        let sequence = lock(&self.orders).of(Class::Ordered, 0).next();
        Ok(self.turn(Instant::now(), Class::Ordered, 0, sequence, signature, timeout))
    }

    /// A call that was announced is about to be made.
    pub fn retract(&self, turn: &Turn) {
        self.endpoint.recorder().forget(turn.slot);
    }

    /// A call that was announced is not made, since the devices could not agree. Unless the group has failed with that, its number is
    /// the next call's, whatever that is.
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
        let result = self.note_end(turn, result);
        self.pass_on(turn);
        result
    }

    /// A call has ended; a failure is everybody's.
    pub fn note_end(&self, turn: &Turn, result: Result<Completion>) -> Result<Completion> {
        let progress = if result.is_ok() { Progress::Done } else { Progress::Failed };
        self.endpoint.recorder().end(turn.slot, progress);
        let result = result.map_err(|cause| self.blame(turn, cause));
        if turn.class == Class::Tagged {
            self.endpoint.messages().end_call(self.id, turn.tag, turn.sequence);
        }
        result
    }

    /// What is left of a call concerns this rank alone: it does not keep others waiting.
    pub fn note_exchanged(&self, turn: &Turn) {
        self.endpoint.recorder().end(turn.slot, Progress::Enqueued);
    }

    /// Whether another call waits for the turn of one that has not ended. None of a tag does: what is kept for that goes with
    /// its last call.
    pub fn is_followed(&self, turn: &Turn) -> bool {
        turn.class == Class::Ordered && !lock(&self.orders).of(Class::Ordered, 0).queue.is_empty()
    }

    /// The call after this one has its turn. Once.
    pub fn pass_on(&self, turn: &Turn) {
        if turn.class == Class::PointToPoint {
            return;
        }
        loop {
            let next = lock(&self.orders).end(turn.class, turn.tag);
            match next {
                // It needs no turn any more.
                Some(next) if next.activate() => {}
                Some(_) => return self.endpoint.kick(),
                None => return,
            }
        }
    }

    /// As if there had been so many collectives.
    #[cfg(test)]
    pub(super) fn pretend_calls(&self, count: u32) {
        lock(&self.orders).of(Class::Ordered, 0).pretend(count);
    }

    /// Tags of which something is kept for their next calls, neighbours as one.
    #[cfg(test)]
    pub(super) fn kept_tags(&self) -> usize {
        lock(&self.orders).entries()
    }

    /// Tells a failure with its call, after making it the group's if the call was everybody's.
    pub fn blame(&self, turn: &Turn, cause: Error) -> Error {
        self.spread(turn, &cause);
        self.tell_of(turn, cause)
    }

    /// As [`Group::blame`], where a stream may have been given some of the call: that the driver has no memory for the rest is
    /// everybody's then, also if the call is a message. Its kernels may wait for other ranks, and have the caller's memory until they
    /// end, which only a failure of the group has them do.
    pub fn blame_launched(&self, turn: &Turn, cause: Error) -> Error {
        match cause.status() {
            Status::OutOfMemory => self.spread_to_all(turn, &cause),
            _ => self.spread(turn, &cause),
        }
        self.tell_of(turn, cause)
    }

    /// A failure with its call.
    fn tell_of(&self, turn: &Turn, cause: Error) -> Error {
        let cause = match turn.class {
            // What a message failed with is its own; that its peer is gone may come of what the group has failed with.
            Class::PointToPoint if cause.status() != Status::PeerFailed => cause,
            _ => self.failure().unwrap_or(cause),
        };
        cause.context(self.describe(turn))
    }

    /// Makes what a call failed with the group's failure, if the call was everybody's, and tells the others. What an
    /// operation runs in is let go of after that: copies under way may take a while. What the driver refuses is
    /// everybody's even if the call is a message: the device that it is about serves the group's other calls, too.
    pub fn spread(&self, turn: &Turn, cause: &Error) {
        if turn.class != Class::PointToPoint || cause.status() == Status::Cuda {
            self.spread_to_all(turn, cause);
        }
    }

    fn spread_to_all(&self, turn: &Turn, cause: &Error) {
        // Whether or not it was the first, the call tells of it.
        let _ = self.latch(cause, || {
            let here = self.endpoint.hostname(self.endpoint.rank());
            // What a late call waits for says nothing of the call itself, which may be what others wait for.
            let call = match cause.status() {
                Status::Timeout => format!(" of its {}", turn.signature),
                _ => String::new(),
            };
            let told = cause.context(format!("rank {} on {here} reports{call}", self.rank));
            self.endpoint.spread(self, &told);
        });
    }

    /// Sends that have not been posted.
    pub fn sends(&self) -> &Arc<Sends> {
        &self.sends
    }

    // ---- direct exchange

    /// The members' shared memory, when all are on this host and it could be set up.
    pub fn direct(&self) -> Option<&Arc<Direct>> {
        self.direct.get()
    }

    /// What is kept for calls on device memory that are relayed.
    pub fn relay(&self) -> &Arc<relay::Seat> {
        &self.relay
    }

    /// Sets up the direct exchange if the members are all on this host, and can. `exchange` gathers two words from
    /// every member by a deadline; every member calls this at the same point, to which they `come` by the first deadline, and the rest
    /// is done by the second. Whether they have exchanged anything. A failure is everybody's: the others may wait for this rank.
    pub fn share_memory(
        &self,
        come: Deadline,
        settled: Deadline,
        exchange: impl Fn([u64; 2], Deadline) -> Result<Vec<[u64; 2]>>,
    ) -> Result<bool> {
        self.find_memory(come, settled, exchange).inspect_err(|error| self.fail_here(error))
    }

    fn find_memory(
        &self,
        come: Deadline,
        settled: Deadline,
        exchange: impl Fn([u64; 2], Deadline) -> Result<Vec<[u64; 2]>>,
    ) -> Result<bool> {
        let local = self.members.iter().all(|&peer| self.endpoint.is_local(peer));
        if !local || self.members.len() < 2 || self.members.len() > MAX_MEMBERS {
            return Ok(false);
        }
        self.endpoint.retired().sweep();
        let segment = self.endpoint.registration().segment();
        let board = if self.endpoint.shares_memory() { segment.allocate(BOARD_BYTES, 4096) } else { None };
        board.iter().for_each(|board| label(board, self.id));
        let offset = board.as_ref().map_or(u64::MAX, |board| board.offset() as u64);
        let offsets: Vec<u64> = exchange([offset, 0], come)?.into_iter().map(|[offset, _]| offset).collect();
        if offsets.contains(&u64::MAX) {
            return Ok(true);
        }
        // PROOF: this rank's offset is among them, so it has a board.
        let Some(board) = board else { return Ok(true) };
        let (peers, agreed) = self.reach_memory(settled, |mine| exchange(mine, settled));
        let reached = peers.iter().flatten().count() + 1 == self.members.len();
        // If all said that they reach all; where this rank has not heard them, they may have agreed with it.
        let shared = agreed.as_ref().map_or(reached, |pulls| pulls.is_some());
        if !shared {
            say_goodbye(self.id, self.rank as usize, &peers, &offsets);
            return agreed.map(|_| true);
        }
        let pulls = matches!(agreed, Ok(Some(true)));
        let retired = self.endpoint.retired().clone();
        let direct = Direct::new(self.id, self.rank as usize, board, retired, peers, &offsets, pulls);
        // This rank's goodbye, without which those that have agreed keep their boards, is said as `direct` is dropped.
        agreed?;
        let direct = direct?;
        log::debug!("group '{}' exchanges through shared memory, pulls: {pulls}", self.name);
        let _ = self.direct.set(Arc::new(direct));
        Ok(true)
    }

    /// [`Endpoint::open_links`]; a member that does not link is told by its rank here, too.
    pub(super) fn open_links(&self, peers: &[u32], deadline: Deadline) -> Result<()> {
        self.endpoint.open_links(peers, deadline).map_err(|error| match error.status() {
            Status::Timeout => {
                let missing = self.endpoint.unlinked(peers);
                missing.map_or(error.clone(), |peer| self.lost(peer, error))
            }
            _ => error,
        })
    }

    /// Every member's memory that this rank reaches, but its own. And if all members reach each other's, whether they can read what is
    /// private there.
    fn reach_memory(
        &self,
        deadline: Deadline,
        exchange: impl Fn([u64; 2]) -> Result<Vec<[u64; 2]>>,
    ) -> (Vec<Option<Arc<PeerMemory>>>, Result<Option<bool>>) {
        let others: Vec<u32> =
            self.members.iter().copied().filter(|&peer| peer != self.endpoint.rank()).collect();
        let linked = self.open_links(&others, deadline);
        let peers: Vec<Option<Arc<PeerMemory>>> = {
            let messages = self.endpoint.messages();
            self.members.iter().map(|&peer| messages.memory(peer).cloned()).collect()
        };
        let reachable = peers.iter().flatten().count() == others.len();
        let pulls = reachable && peers.iter().flatten().all(|memory| memory.can_pull);
        let agreed = linked.and_then(|()| exchange([u64::from(reachable), u64::from(pulls)]));
        let pulls = agreed.map(|agreed| {
            let all = agreed.iter().all(|[reachable, _]| *reachable == 1);
            all.then(|| agreed.iter().all(|[_, pulls]| *pulls == 1))
        });
        (peers, pulls)
    }

    // ---- devices

    /// How the members sit on hosts, if a device exchange could make use of it: on one, sharing memory there, or on
    /// several, equally many on each, host by host. The same on all members.
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

    /// Nobody will call any more. What streams were given of it before comes to an end all the same: calls at their deadlines at the
    /// latest, and these and replays of graphs when a rank is lost.
    pub fn see_off(self: &Arc<Self>) {
        if self.endpoint.check_fork().is_ok() && self.is_on_streams() {
            self.endpoint.see_off(self.clone());
        }
    }

    /// Whether streams still do what they were given, and may not come to its end by themselves.
    pub(super) fn is_on_streams(&self) -> bool {
        let Some(exchange) = self.devices().and_then(Way::exchange) else { return false };
        // The kernels of one that has failed have been told to leave. Of a device that is lost nobody will know more.
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
            self.endpoint.messages().forget(self.id, self.failed.load(Ordering::Acquire));
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
