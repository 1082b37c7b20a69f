//! The calls of one exchange between GPUs, as one rank makes them.
//!
//! Its members are the ranks of one host: all of the group, or consecutive ones. They are numbered from 0
//! here and by the kernels; errors speak of the group's ranks.

mod ending;
mod graphs;
mod line;
mod one_sided;
mod series;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::{Duration, Instant};

pub(super) use self::graphs::mixes_by_default;
use self::line::CallLine;
pub(super) use self::one_sided::OneSided;
pub use self::one_sided::Put;
pub use self::series::Series;
use super::board::InLaunch;
use super::compare::{Calls, Terms};
use super::overdue::Overdue;
use super::retired::{HeldMemory, Parts, retire};
use super::watch::Watch;
use super::window::Window;
use crate::cuda::context::Devices;
use crate::cuda::driver::{Location, Memory, StreamHandle, retry};
use crate::cuda::event::Event;
use crate::cuda::exchange::{Job, MAX_RANKS, Point, Pull, Seen, check_points};
use crate::cuda::quiet::Exchanging;
use crate::cuda::stream::Stream;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Rest, Turn};
use crate::engine::point::DOUBT;
use crate::engine::wire::Class;
use crate::error::{Error, Result, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::{Kind, Signature};

/// One rank's end of the exchange between its group's GPUs. All methods from any thread.
///
/// Calls run in the order in which they are made, one after the other: on one stream by the stream's order,
/// on different streams by events. Calls in a capture are ordered among themselves, and a graph with other
/// calls as it is launched, unless that is up to whoever replays it ([`DeviceExchange::mix_graphs`]).
pub struct DeviceExchange {
    /// None once it is being dropped.
    parts: Option<Parts>,
    line: Mutex<CallLine>,
    /// Whether graphs are ordered with other calls.
    mixes: AtomicBool,
    /// Calls that were not captured, until they are seen to be done.
    watch: Watch,
    /// By whoever shuts it first.
    shut: Once,
    /// By whoever aborts it first, where kernels may reach into other ranks' memory: there have been windows,
    latches: Once,
    /// or broadcasts by stages among ranks of one process.
    pulls: AtomicBool,
    /// When each member's goodbye was first seen.
    goodbyes: [OnceLock<Instant>; MAX_RANKS],
}

/// Some members of an exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Members(u32);

const _: () = assert!(MAX_RANKS <= 32);

impl Members {
    pub(super) const NONE: Members = Members(0);

    fn has(self, member: u32) -> bool {
        self.0 >> member & 1 == 1
    }

    fn iter(self) -> impl Iterator<Item = u32> {
        (0..u32::BITS).filter(move |member| self.has(*member))
    }
}

impl FromIterator<u32> for Members {
    fn from_iter<T: IntoIterator<Item = u32>>(members: T) -> Members {
        Members(members.into_iter().fold(0, |all, member| all | 1 << member))
    }
}

/// What the others have to have called for a call to be done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Meets {
    /// So many collectives of the exchange: the last of them is this one.
    All(u32),
    /// Their ends of messages.
    Ends(Members),
}

/// What may differ from call to call.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// `None`: the exchange's own, which comes after what the legacy default stream was given before.
    pub stream: Option<StreamHandle>,
    /// `None`: the group's.
    pub timeout: Option<Duration>,
    /// The argument that names the memory, for errors.
    pub memory: &'static str,
}

/// A collective, as its caller asks for it.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// What the ranks must agree on.
    pub signature: Signature,
    /// What it is here.
    pub job: Job,
    /// How it is given to its stream.
    pub caller: Caller,
}

/// A call that a stream was given.
#[derive(Debug)]
pub struct Enqueued {
    turn: Turn,
    meets: Meets,
    stream: StreamHandle,
    captured: bool,
}

impl Enqueued {
    /// Whether it went into a graph.
    pub fn is_captured(&self) -> bool {
        self.captured
    }
}

impl DeviceExchange {
    pub(super) fn new(parts: Parts) -> DeviceExchange {
        // Where the setting cannot be understood nobody has agreed on this.
        let mixes = AtomicBool::new(mixes_by_default().unwrap_or(true));
        DeviceExchange {
            parts: Some(parts),
            line: Mutex::default(),
            mixes,
            watch: Watch::default(),
            shut: Once::new(),
            latches: Once::new(),
            pulls: AtomicBool::new(false),
            goodbyes: Default::default(),
        }
    }

    /// Whether something of the program refers to its memory: a graph, a window, or signals of this rank.
    /// Those lie there until they are waited for, of which this rank does not know.
    pub fn is_referred_to(&self) -> bool {
        let Parts { windows, boards, .. } = self.parts();
        boards.has_captured() || boards.has_sent_signals() || lock(windows).any()
    }

    /// Whether no kernels of this rank run, nor may be launched: no calls are being given to streams, and all
    /// are done, and none can be replayed, here or elsewhere. For a rank that is to leave.
    pub fn rest(self: &Arc<Self>) -> Rest {
        // Whoever gives a call has this from before that has its number until it is launched.
        let is_free = self.line.try_lock().is_ok();
        let Parts { astray, one_sided, boards, .. } = self.parts();
        if !boards.leave_in_quiet() || !is_free {
            return Rest::Known(false);
        }
        if self.watch.is_over() && astray.is_nothing() && one_sided.is_nothing() {
            return Rest::Known(true);
        }
        let this = self.clone();
        Rest::Asked(Box::new(move || retry(|| this.is_idle()) == Ok(true)))
    }

    /// What tells when that memory has been given back.
    pub fn held_memory(&self) -> HeldMemory {
        HeldMemory::of(self.parts())
    }

    pub(super) fn parts(&self) -> &Parts {
        // PROOF: taken by `drop` alone.
        self.parts.as_ref().expect("it is not being dropped")
    }

    /// The GPU of this rank.
    pub fn device(&self) -> u32 {
        self.parts().last.device()
    }

    /// Where memory of that GPU lies. Refuses what is none, by its name.
    pub fn own_memory(&self, name: &str, address: u64, bytes: u64) -> Result<Location> {
        let own = self.device();
        let located = self.devices().locate(address)?;
        let Some(location) = located.filter(|location| location.memory == Memory::Device) else {
            fail!(InvalidArgument, "{name}: {address:#x} is no device memory, and it is to be of GPU {own}")
        };
        let device = location.device;
        if device != own {
            fail!(InvalidArgument, "{name} is of GPU {device}, but the rank's GPU is {own}");
        }
        let until = address.saturating_add(bytes);
        let end = location.reach(address, until, |next| self.devices().locate(next))?;
        let room = end.saturating_sub(address);
        if bytes > room {
            fail!(InvalidArgument, "{name} has {room} bytes left in its allocation, but {bytes} are needed");
        }
        Ok(location)
    }

    /// How many bytes of its memory others write to, and calls between hosts work in.
    pub fn arena_bytes(&self) -> u64 {
        self.parts().arena.bytes() as u64
    }

    /// Whether sends and receives can run here.
    pub fn serves_points(&self) -> bool {
        self.parts().points
    }

    /// Whether such calls can run here: the same answer on every rank.
    pub fn serves(&self, kind: Kind, dtype: DataType, operator: &Operator) -> bool {
        self.parts().kernels.serves(kind, dtype, operator)
    }

    /// Gives a collective to the caller's stream and returns. A call that differs from those of other ranks
    /// fails the group.
    ///
    /// # Safety
    /// As [`crate::cuda::exchange::Exchange::enqueue`]; the stream lives.
    pub unsafe fn enqueue(
        &self,
        group: &Group,
        signature: Signature,
        job: &Job,
        caller: Caller,
    ) -> Result<Enqueued> {
        let parts = self.parts();
        let asked = job.max_blocks;
        let job = &Job { max_blocks: parts.room.blocks(asked), ..*job };
        let seen = self.or_fail(group, Class::Ordered, caller, self.in_windows(job))?;
        let launch = |stream: &Stream| match seen {
            // SAFETY: the caller's promise; all ranks have theirs in windows, or the call fails before it is
            // launched. Of a captured one that is the caller's promise, too.
            Some(seen) => unsafe { parts.kernels.enqueue_windowed(job, &seen, stream) },
            // SAFETY: the caller's promise.
            None => unsafe { parts.kernels.enqueue(job, stream) },
        };
        let terms = Terms { max_blocks: asked, windowed: seen.is_some(), ..Terms::default() };
        let compare = |turn: &Turn, calls: &mut Calls| calls.compare(parts, group, turn, terms);
        self.give(group, Class::Ordered, &[signature], Members::NONE, (caller, &[]), compare, launch)
    }

    /// Gives the collectives of a group to their streams, in their order and in few launches, as
    /// [`DeviceExchange::enqueue`] gives one; all ranks group the same calls. What is launched together is on
    /// the stream of its first, for which the others wait. Ends at the first that fails; those before it have
    /// been given.
    ///
    /// # Safety
    /// As there, for all of them. Calls that follow each other do not need each other's results.
    pub unsafe fn enqueue_several(&self, group: &Group, calls: &[Asked]) -> Result<()> {
        if let [Asked { signature, job, caller }] = calls {
            // SAFETY: the caller's promise.
            return unsafe { self.enqueue(group, *signature, job, *caller) }.map(drop);
        }
        if calls.is_empty() {
            return Ok(());
        }
        let parts = self.parts();
        let jobs: Vec<Job> = calls
            .iter()
            .map(|Asked { job, .. }| Job { max_blocks: parts.room.blocks(job.max_blocks), ..*job })
            .collect();
        let windows = lock(&parts.windows).have_been();
        for bundle in parts.kernels.bundles(&jobs, windows)? {
            match &calls[bundle.clone()] {
                [Asked { signature, job, caller }] => {
                    // SAFETY: the caller's promise.
                    unsafe { self.enqueue(group, *signature, job, *caller) }?
                }
                // SAFETY: the caller's promise.
                calls => unsafe { self.enqueue_bundle(group, calls, &jobs[bundle]) }?,
            };
        }
        Ok(())
    }

    /// Gives several collectives to a stream as one launch: `jobs`, of these calls.
    ///
    /// # Safety
    /// As [`DeviceExchange::enqueue_several`].
    unsafe fn enqueue_bundle(&self, group: &Group, calls: &[Asked], jobs: &[Job]) -> Result<Enqueued> {
        let parts = self.parts();
        let Some(&Asked { caller, .. }) = calls.first() else { fail!(Internal, "a launch has no calls") };
        let signatures: Vec<Signature> = calls.iter().map(|call| call.signature).collect();
        let mut beside = Vec::new();
        for Asked { caller: other, .. } in calls {
            if other.stream != caller.stream && !beside.contains(&other.stream) {
                beside.push(other.stream);
            }
        }
        // SAFETY: the caller's promise.
        let beside = self.or_fail(group, Class::Ordered, caller, unsafe { self.beside(caller, &beside) })?;
        let compare = |last: &Turn, known: &mut Calls| {
            let calls = calls.iter().enumerate().map(|(place, Asked { signature, job, .. })| {
                // A launch has few.
                let place = InLaunch { before: place as u8, of: calls.len() as u8 };
                (*signature, Terms { max_blocks: job.max_blocks, windowed: false, place })
            });
            known.compare_several(parts, group, last, calls)
        };
        // SAFETY: the caller's promise.
        let launch = |stream: &Stream| unsafe { parts.kernels.enqueue_several(jobs, stream) };
        self.give(group, Class::Ordered, &signatures, Members::NONE, (caller, &beside), compare, launch)
    }

    /// Gives a broadcast by stages to the caller's stream and returns, as [`DeviceExchange::enqueue`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn enqueue_pull(
        &self,
        group: &Group,
        signature: Signature,
        pull: &Pull,
        caller: Caller,
    ) -> Result<Enqueued> {
        let parts = self.parts();
        let terms = Terms { max_blocks: pull.max_blocks, windowed: false, ..Terms::default() };
        let compare = |turn: &Turn, calls: &mut Calls| calls.compare(parts, group, turn, terms);
        let (max_blocks, multiprocessors) = (parts.room.allowed(pull.max_blocks), parts.room.multiprocessors);
        let mut pull = Pull { max_blocks, multiprocessors, ..*pull };
        if group.rank() == pull.root && pull.bytes > 0 {
            pull.seen = self.or_fail(group, Class::Ordered, caller, self.seen_by_all(&pull))?;
        }
        self.pulls.fetch_or(parts.room.one_process, Ordering::SeqCst);
        // SAFETY: the caller's promise; ranks of one process reach each other's shareable memory (`Setup`).
        let launch = |stream: &Stream| unsafe { parts.kernels.enqueue_pull(&pull, stream) };
        self.give(group, Class::Ordered, &[signature], Members::NONE, (caller, &[]), compare, launch)
    }

    /// What a call shares, as each rank reaches it, if it gains by windows and all of that lies in some.
    fn in_windows(&self, job: &Job) -> Result<Option<Seen>> {
        let Some(shared) = self.parts().kernels.shares(job) else { return Ok(None) };
        let mut seen = Seen::default();
        for (address, bytes, place) in
            [(job.input, shared.input, &mut seen.input), (job.output, shared.output, &mut seen.output)]
        {
            if bytes > 0 {
                let Some(found) = self.in_window(address, bytes)? else { return Ok(None) };
                *place = found;
            }
        }
        Ok(Some(seen))
    }

    /// The root's input of a broadcast by stages, as each rank reaches it, if all do where it lies.
    fn seen_by_all(&self, pull: &Pull) -> Result<Option<[u64; MAX_RANKS]>> {
        let found = self.in_window(pull.input, pull.bytes)?;
        if found.is_none() && self.parts().room.one_process {
            let _entered = self.devices().enter(self.device())?;
            if self.devices().driver().is_shareable(pull.input)? {
                return Ok(Some([pull.input; MAX_RANKS]));
            }
        }
        Ok(found)
    }

    /// Memory that lies in a window, as each rank reaches it.
    fn in_window(&self, address: u64, bytes: u64) -> Result<Option<[u64; MAX_RANKS]>> {
        if !lock(&self.parts().windows).may_hold(address, bytes) {
            return Ok(None);
        }
        let Some(location) = self.devices().locate(address)? else { return Ok(None) };
        Ok(lock(&self.parts().windows).find(address, bytes, location.buffer))
    }

    /// Adds a window that all ranks have mapped; answers its number.
    pub(super) fn add_window(&self, window: Window) -> u64 {
        lock(&self.parts().windows).add(window)
    }

    /// Ends the window of this number, of this rank. May wait for the GPU, but not once the exchange is
    /// aborted. Whether it is still mapped, for kernels that run, which is to be attended to: else it goes
    /// with the next one, or with the exchange.
    pub fn end_window(&self, number: u64) -> bool {
        let parts = self.parts();
        lock(&parts.windows).end(number);
        // The driver may wait for kernels of another group, which whoever ends this one may be about to end:
        // it is not even asked here then.
        parts.fault.is_aborted() || self.unmap_ended(false)
    }

    /// Lets go of windows that have ended, in another thread if that is to be `aside`, unless kernels that
    /// run may use them. Whether those keep some.
    fn unmap_ended(&self, aside: bool) -> bool {
        let parts = self.parts();
        // Before the GPU is asked: calls that are launched after that may use what ends after that.
        let ended = lock(&parts.windows).take_ended();
        if ended.is_empty() {
            return false;
        }
        match parts.is_idle() {
            Ok(true) if aside => self.devices().keep(Box::new(ended), true),
            Ok(true) => drop(ended),
            answer => {
                lock(&parts.windows).put_back(ended);
                // What the driver refuses to say it may never say.
                return answer.is_ok();
            }
        }
        false
    }

    /// Gives sends and receives to the caller's stream, to run beside each other, and returns. They come
    /// after what the streams `beside` were given before, which come after them in turn. `signatures` are
    /// theirs, for the record; the points' peers are members.
    ///
    /// # Safety
    /// As [`DeviceExchange::enqueue`], for all streams.
    pub unsafe fn enqueue_points(
        &self,
        group: &Group,
        signatures: &[Signature],
        points: &[Point],
        caller: Caller,
        beside: &[Option<StreamHandle>],
    ) -> Result<Enqueued> {
        let class = Class::PointToPoint;
        // SAFETY: the caller's promise.
        let beside = self.or_fail(group, class, caller, unsafe { self.beside(caller, beside) })?;
        let peers = points.iter().map(|point| point.peer).collect();
        let launch = |stream: &Stream| {
            let blocks = self.parts().room.blocks(0);
            // SAFETY: the caller's promise.
            unsafe { self.parts().kernels.enqueue_points(points, blocks, stream) }
        };
        let compare = |_: &Turn, calls: &mut Calls| {
            let Parts { boards, first, .. } = self.parts();
            // What has been noted has to be launched, since others wait for it, so that nothing but the
            // driver may refuse it.
            check_points(group.rank() - first, boards.size() as u32, points)?;
            calls.compare_points(self.parts(), group, points)
        };
        self.give(group, class, signatures, peers, (caller, &beside), compare, launch)
    }

    /// An event that is complete when the call is done, and what answers [`crate::error::Error`] if it will
    /// not be, told whether the event is complete. Not for captured calls. A call that cannot be followed
    /// fails; whoever made it waits for its end.
    pub fn follow(
        self: &Arc<Self>,
        group: &Arc<Group>,
        enqueued: Enqueued,
    ) -> Result<(Arc<Event>, impl Fn(bool) -> Option<Error> + Send + Sync + use<>)> {
        let Enqueued { turn, meets, stream, .. } = enqueued;
        let event = self.event_behind(stream).map_err(|error| group.blame_launched(&turn, error))?;
        let (this, group) = (self.clone(), group.clone());
        let overdue = Mutex::new(Overdue::new(turn, meets));
        let failure = move |done: bool| {
            // A kernel that was ended looks as one that has done its work.
            let failed = group.failure().filter(|_| done);
            // Another thread may be at it.
            let Ok(mut overdue) = overdue.try_lock() else {
                return failed.map(|error| error.context(group.describe(&turn)));
            };
            if failed.is_some() { overdue.error(&this, &group) } else { overdue.look(&this, &group) }
        };
        Ok((Arc::new(event), failure))
    }

    /// An event behind what a stream was given.
    fn event_behind(&self, stream: StreamHandle) -> Result<Event> {
        let event = Event::new(self.devices(), self.device())?;
        // SAFETY: the stream lives until the call returns to its caller.
        let stream = unsafe { Stream::borrow(self.devices(), self.device(), stream) }?;
        event.record(&stream)?;
        Ok(event)
    }

    /// Whether a graph that is captured from here on is ordered with other calls and other graphs of this
    /// exchange as they are launched, whatever their streams; all ranks launch them in one order. Else they
    /// must not run beside each other.
    pub fn mix_graphs(&self, mixes: bool) {
        self.mixes.store(mixes, Ordering::Relaxed);
    }

    /// Whether the GPU has done all calls that were not captured, and all replays of graphs that are mixed
    /// with them.
    pub fn is_idle(&self) -> Result<bool> {
        self.parts().is_idle()
    }

    /// The ranks of the group that have not noted so many collectives of the exchange.
    pub fn missing(&self, collectives: u32) -> Vec<u32> {
        let boards = &self.parts().boards;
        // There are at most MAX_RANKS.
        let members = (0..boards.size()).filter(|&member| !boards.has_called(member, collectives));
        self.ranks(members.map(|member| member as u32).collect())
    }

    /// Whether any of `peers` has not come to as many messages with this rank as it has called.
    pub(super) fn is_alone_with_any(&self, peers: Members) -> bool {
        peers.iter().any(|member| self.parts().boards.is_alone_with(member as usize))
    }

    /// A rank of the group that a call waits for and that has left without it: that never comes.
    pub(crate) fn deserter(&self, group: &Group, meets: Meets) -> Option<u32> {
        let Parts { boards, first, .. } = self.parts();
        // Before what they have noted is looked at: they note nothing more.
        let gone = self.gone(group);
        let lacks = |member: &u32| match meets {
            Meets::Ends(peers) => peers.has(*member) && boards.is_alone_with(*member as usize),
            Meets::All(collectives) => !boards.has_called(*member as usize, collectives),
        };
        gone.iter().find(lacks).map(|member| first + member)
    }

    /// The others that have ended their part in the exchange, or are to leave, or have left the job. What the
    /// boards say of that overtakes the news of what a rank may leave for: it counts when that has had its time.
    fn gone(&self, group: &Group) -> Members {
        let Parts { boards, first, .. } = self.parts();
        let is_out = |member| boards.has_left(member) || boards.leaves(member);
        let has_left = |member: u32| {
            let since = || self.goodbyes[member as usize].get_or_init(Instant::now);
            is_out(member as usize) && since().elapsed() >= DOUBT
        };
        let (endpoint, own) = (group.endpoint(), group.rank() - first);
        let others = (0..boards.size() as u32).filter(|member| *member != own);
        match endpoint.has_lost_any() {
            true => {
                let messages = endpoint.messages();
                let is_gone = |member: &u32| messages.gone(group.members()[(first + member) as usize]);
                others.filter(|member| has_left(*member) || is_gone(member)).collect()
            }
            false => others.filter(|member| has_left(*member)).collect(),
        }
    }

    /// Members by the numbers of the group.
    pub(super) fn ranks(&self, members: Members) -> Vec<u32> {
        members.iter().map(|member| self.parts().first + member).collect()
    }

    /// What the kernel waited for that was ended first, if one was.
    pub(super) fn waited_for(&self) -> Option<String> {
        let Parts { fault, first, .. } = self.parts();
        fault.record().map(|record| record.describe(*first))
    }

    /// The driver's devices.
    pub fn devices(&self) -> &Arc<Devices> {
        self.parts().last.devices()
    }

    /// Looks after calls that nobody waits for, and windows that have ended under them, and asks the driver.
    /// Whether there may be calls that are not done, or such windows.
    pub fn attend(&self, group: &Group) -> bool {
        let waits = self.attend_waits(group);
        let calls = self.watch.attend(self, group);
        self.unmap_ended(true) || calls || waits
    }

    /// Looks after them when the driver does not say whether they are done. Makes no driver call.
    pub fn oversee(&self, group: &Group) {
        self.watch.oversee(self, group);
        self.oversee_waits(group);
    }
}

impl Exchanging for DeviceExchange {
    fn is_at_rest(&self) -> bool {
        // The kernels of one that has failed leave. Of a device that is lost nobody will know more.
        self.parts().fault.is_aborted() || retry(|| self.is_idle()).unwrap_or(true)
    }

    fn may_wait(&self) -> bool {
        let Parts { replayed, one_sided, boards, .. } = self.parts();
        if self.is_at_rest() {
            return false;
        }
        // Replays have no numbers, nor have waits for signals.
        let are_done = || Ok(replayed.query()? && one_sided.is_done()?);
        !(retry(are_done).unwrap_or(true) && boards.are_met())
    }
}

impl std::fmt::Debug for DeviceExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceExchange").field("parts", &self.parts).finish_non_exhaustive()
    }
}

impl Drop for DeviceExchange {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            retire(parts);
        }
    }
}
