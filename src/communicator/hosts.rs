//! Calls on device memory between ranks on several hosts: composed of what the GPUs of each host exchange by
//! kernels, and of what the hosts exchange by way of pinned memory: by messages, or if it is long by lanes
//! that the ranks of a place have among themselves.
//!
//! The ranks of a host, `inside` of them, share the work: each deals with the ranks of its own *place* on the
//! other hosts, so that every byte crosses once and all ranks send and receive at the same time.
//!
//! | call | before, by kernels | across | after, by kernels |
//! |---|---|---|---|
//! | allreduce | reduce-scatter | allreduce of this place's shard | shards to all |
//! | reduce | reduce-scatter | reduce of the shard to the root's host | shards to the root |
//! | reduce-scatter | reduce-scatter, for each host | reduce-scatter of what it made | |
//! | allgather | | allgather of this place's blocks | blocks to all |
//! | broadcast | on the root's host: broadcast | broadcast of this place's shard | elsewhere: shards to all |
//!
//! It is one call to everybody: one number, one signature, one deadline; the messages of the hosts are its
//! pieces, between ranks of the group. The kernels and what waits for the parts between them are on the
//! caller's stream. Long calls are cut into chunks that fit one half of the group's workspace: what comes
//! before a chunk is given to the stream ahead of the wait for the one before.
//!
//! Reductions keep the canonical order where a host's ranks are an inner node of its tree, so where they are
//! a power of two. What a host makes of its inputs are accumulators, and the last step rounds: so inputs of
//! short floats are widened first.

mod across;
mod parts;
#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;
use std::time::Duration;

use self::across::{Across, Queue};
use self::parts::{Course, Parts, Supplies};
use super::Call;
use super::ahead;
use super::context::Context;
use super::staged::close_ahead;
use super::work::Work;
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::deadline::Deadline;
use crate::engine::callbacks::{HeldBack, hold_back};
use crate::engine::device::{Caller, Hosts, Layout};
use crate::engine::group::{Calling, Group, Turn};
use crate::engine::operation::Running;
use crate::engine::wire::Class;
use crate::error::{Result, fail};
use crate::reduce::{Operator, Reducer};
use crate::signature::Signature;

/// How much longer than the hosts' part the kernels behind it may take before they are missed, and how long a
/// call that fails waits for both.
const LATE: Duration = Duration::from_secs(1);

/// Up to how many bytes calls are staged: all else is quicker composed.
struct Bounds {
    allreduce: u64,
    reduce: u64,
    broadcast: u64,
    /// Of all blocks together.
    reduce_scatter: u64,
}

/// On two pretended hosts of two H100s each, three times in one run, a broadcast of 8 bytes takes 13 to 15 µs
/// staged and 20 composed, of 16 KiB 14 to 19 and 20 to 22, of 32 KiB 20 to 24 and 21 to 23; a reduction to
/// one rank of 16 KiB 24 to 25 and 29 to 31, of 32 KiB 36 to 41 and 32 to 35; an allreduce of 8 KiB 35 to 36
/// and 39 to 41, of 16 KiB 42 to 48 and 41 to 46; a reduce_scatter of 16 KiB 34 to 37 and 37 to 40, of 32 KiB
/// 41 to 43 and 39 to 41. An allgather of 16 bytes takes 33 to 37 and 32 to 33.
const BOUNDS: Bounds =
    Bounds { allreduce: 8 << 10, reduce: 16 << 10, broadcast: 16 << 10, reduce_scatter: 16 << 10 };

/// Whether a call among `ranks` is too short to be worth composing.
fn is_short(request: &Request, ranks: u32, bounds: &Bounds) -> bool {
    let Counts::Uniform(count) = request.counts else { return true };
    let bytes = count.saturating_mul(request.dtype.size() as u64);
    match request.kind {
        Kind::Allreduce => bytes <= bounds.allreduce,
        Kind::Reduce => bytes <= bounds.reduce,
        Kind::Broadcast => bytes <= bounds.broadcast,
        Kind::ReduceScatter => bytes.saturating_mul(u64::from(ranks)) <= bounds.reduce_scatter,
        _ => false,
    }
}

/// Whether a call is composed; it is one that GPUs of one host would exchange. The same answer on every rank.
pub(super) fn composes(hosts: &Hosts, request: &Request) -> bool {
    // Tests compose short calls.
    let Layout { hosts: on, inside, .. } = hosts.layout();
    if !cfg!(test) && is_short(request, on * inside, &BOUNDS) {
        return false;
    }
    match request.kind {
        Kind::Broadcast | Kind::Allgather => true,
        Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter => {
            let accumulator = request.dtype.accumulator();
            hosts.layout().keeps_order()
                && hosts.exchange().serves(request.kind, accumulator, &between(request.operator))
        }
        _ => false,
    }
}

/// What combines accumulators: the rest of an operator comes before or after.
fn between(operator: Operator) -> Operator {
    match operator {
        Operator::Average | Operator::PreMulSum(_) => Operator::Sum,
        other => other,
    }
}

/// A call that is composed, checked.
pub(super) struct Composed {
    context: Context,
    group: Arc<Group>,
    hosts: Arc<Hosts>,
    caller: Caller,
    /// As [`Call::max_blocks`].
    max_blocks: u32,
    checked: Checked,
    /// What the ranks agree on.
    signature: Signature,
}

// SAFETY: the pointers name memory of devices, which nothing here reads through them.
unsafe impl Send for Composed {}
// SAFETY: as above.
unsafe impl Sync for Composed {}

impl Composed {
    pub(super) fn new(
        context: &Context,
        group: &Arc<Group>,
        hosts: &Arc<Hosts>,
        request: &Request,
        caller: Caller,
        call: &Call,
    ) -> Result<Composed> {
        // As the thread is now: it may be given to its stream later.
        let stream = hosts.exchange().check_default_stream(caller);
        // SAFETY: whoever calls has promised that it lives.
        unsafe { context.or_fail_on(caller.stream, Class::Ordered, stream) }?;
        let mut checked = Checked::new(request, group.rank(), group.size())?;
        if let Some(operator) = checked.operator {
            Reducer::new(checked.dtype, operator, group.size())?;
        }
        checked.signature.device = true;
        let (signature, max_blocks) = (call.compared(checked.signature), call.max_blocks);
        let (context, group, hosts) = (context.clone(), group.clone(), hosts.clone());
        Ok(Composed { context, group, hosts, caller, max_blocks, checked, signature })
    }

    /// What the ranks agree on.
    pub(super) fn signature(&self) -> Signature {
        self.signature
    }

    /// Gives it to its stream. If it is `awaited`, the work ends when it is done; else it is not followed
    /// beyond the hosts' part, which the work is: its kernels are, for the whole context.
    ///
    /// # Safety
    /// The call's memory is valid for what it accesses, and its stream lives, until it has ended.
    pub(super) unsafe fn start(&self, awaited: bool) -> Result<Work> {
        // SAFETY: the caller's promise.
        let mut giving = unsafe { self.begin(self.ready()?) }?;
        // SAFETY: as above.
        while unsafe { giving.go_on() } {}
        giving.end(awaited)
    }

    /// As [`Composed::start`], of calls that may be those of ranks of one host: each is given a chunk in
    /// turn, so that none of their streams is far ahead of another, for whose kernels its own wait. A work
    /// for each.
    ///
    /// # Safety
    /// As there, for all of them.
    pub(super) unsafe fn start_in_turns(calls: &[(&Composed, bool)]) -> Vec<Result<Work>> {
        let mut works: Vec<Option<Result<Work>>> = Vec::new();
        let mut under_way = Vec::with_capacity(calls.len());
        // All of them, before a kernel of one waits for those of another.
        // SAFETY: the caller's promise.
        let ready: Vec<Result<Ready>> = calls.iter().map(|(call, _)| unsafe { call.ready() }).collect();
        for (place, ((call, _), ready)) in calls.iter().zip(ready).enumerate() {
            // SAFETY: the caller's promise.
            match ready.and_then(|ready| unsafe { call.begin(ready) }) {
                Ok(giving) => {
                    under_way.push((place, giving));
                    works.push(None);
                }
                Err(error) => works.push(Some(Err(error))),
            }
        }
        while !under_way.is_empty() {
            // SAFETY: the caller's promise.
            let is_given = |one: &mut (usize, Giving<'_>)| !unsafe { one.1.go_on() };
            // Each ends at once: if it has failed, the others wait for what says so.
            for (place, giving) in under_way.extract_if(.., is_given) {
                works[place] = Some(giving.end(calls[place].1));
            }
        }
        works.into_iter().flatten().collect()
    }

    /// Takes what it runs in.
    ///
    /// # Safety
    /// The call's stream lives.
    unsafe fn ready(&self) -> Result<Ready> {
        let course = Course::new(self);
        let supplies = Supplies::new(self, &course);
        // SAFETY: the caller's promise.
        let supplies = unsafe { self.context.or_fail_on(self.caller.stream, Class::Ordered, supplies) }?;
        Ok((course, supplies))
    }

    /// Begins to give it to its stream.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn begin(&self, (course, supplies): Ready) -> Result<Giving<'_>> {
        let (group, exchange) = (&self.group, self.hosts.exchange());
        close_ahead(group.id())?;
        // The series is locked, and a callback may want to make the next call.
        let held_back = hold_back();
        let entered = exchange.devices().enter(exchange.device());
        // SAFETY: the caller's promise.
        let _entered = unsafe { self.context.or_fail_on(self.caller.stream, Class::Ordered, entered) }?;
        // SAFETY: the caller's promise.
        let mut series = unsafe {
            self.context.or_fail_on(self.caller.stream, Class::Ordered, exchange.series(self.caller))
        }?;
        let until = Deadline::after(self.caller.timeout.unwrap_or(group.timeout()));
        self.context.or_fail(ahead::make_room(series.stream(), group, || until))?;
        let queue = Arc::new(Queue::default());
        let mut turn = None;
        let (class, signature, timeout) = (Class::Ordered, self.signature, self.caller.timeout);
        let calling = Calling { class, tag: 0, signature, timeout };
        let by_couriers = supplies.copier().is_some();
        // The series is held: calls have their numbers in the order of their launches.
        let number = series.number();
        let running = group.start(calling, |its| {
            turn = Some(*its);
            Across::new(number, exchange.clone(), queue.clone(), !by_couriers)
        })?;
        let Some(turn) = turn else { fail!(Internal, "an operation was started without a turn") };
        let begun = series.begin(group, &turn, self.max_blocks);
        let parts = Parts::new(self, series, turn, queue, supplies);
        let more = begun.map(|()| true);
        Ok(Giving { course, parts, more, running, turn, _held_back: held_back })
    }

    /// Waits until nothing uses the memory of this call, which has failed, for [`LATE`] at most: the caller
    /// has it back then.
    fn await_end(&self, running: &Running) {
        let until = Deadline::after(LATE);
        // Whoever moves it sets the latch, too, unless the driver holds that thread up: kernels that come
        // later leave the memory alone.
        self.hosts.exchange().shut();
        // Its failure has been told.
        let _ = running.wait(until);
        self.hosts.exchange().await_end(until);
    }

    /// When the call is missed that has `turn`.
    fn late(&self, turn: &Turn) -> Deadline {
        let timeout = self.caller.timeout.unwrap_or(self.group.timeout());
        Deadline::since(turn.called, timeout.saturating_add(LATE))
    }
}

/// A call's chunks, and what they run in.
type Ready = (Course, Supplies);

/// A call that is being given to its stream.
struct Giving<'a> {
    course: Course,
    parts: Parts<'a>,
    /// Whether there is more to give, or what has gone wrong.
    more: Result<bool>,
    running: Arc<Running>,
    turn: Turn,
    _held_back: HeldBack,
}

impl Giving<'_> {
    /// Gives its next chunk. Whether there is more to give.
    ///
    /// # Safety
    /// As [`Composed::start`].
    unsafe fn go_on(&mut self) -> bool {
        if self.more.is_ok() {
            // SAFETY: the caller's promise.
            self.more = unsafe { self.course.go_on(&mut self.parts) };
        }
        self.more == Ok(true)
    }

    /// All of it has been given, or something has gone wrong: as [`Composed::start`].
    fn end(self, awaited: bool) -> Result<Work> {
        let Giving { course, parts, more, running, turn, _held_back } = self;
        // With what was to be launched.
        drop(course);
        let call = parts.call();
        let (group, exchange) = (&call.group, call.hosts.exchange());
        if more.is_err() {
            parts.leave();
        }
        ahead::note(parts.series().stream(), &running, parts.last_courier());
        let series = parts.close();
        let enqueued = more.and_then(|_| series.end(group, turn.until(call.late(&turn))));
        let enqueued = enqueued.map_err(|cause| group.blame(&turn, cause));
        // No thread may be waiting: has a thread of the library move it.
        group.endpoint().kick();
        let followed = match (enqueued, awaited) {
            (Ok(_), false) => return Ok(Work::running(running)),
            (Ok(enqueued), true) => exchange.follow(group, enqueued),
            (Err(error), _) => Err(error),
        };
        match followed {
            Ok((event, failure)) => Ok(Work::composed(Some(group), Some(running), event, failure)),
            Err(error) => {
                call.await_end(&running);
                Err(error)
            }
        }
    }
}
