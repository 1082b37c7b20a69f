//! The calls of one exchange between GPUs, as one rank makes them.
//!
//! Its members are the ranks of one host: all of the group, or consecutive ones. They are numbered from 0 here and by the
//! kernels; errors speak of the group's ranks.

mod graphs;
mod series;

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, Once, mpsc};
use std::time::{Duration, Instant};

use self::graphs::{Captured, mixes_by_default};
pub use self::series::Series;
use super::board::InLaunch;
use super::compare::{Calls, Terms};
use super::overdue::{GRACE_PERIOD, Overdue};
use super::retired::{Parts, retire};
use super::watch::Watch;
use super::window::Window;
use crate::cuda::context::Devices;
use crate::cuda::driver::{Capture, StreamHandle, retry};
use crate::cuda::event::Event;
use crate::cuda::exchange::{Job, MAX_RANKS, Point, Pull, Seen, check_points};
use crate::cuda::joined;
use crate::cuda::polling;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::{Kind, Signature};
use crate::sys::process;

/// One rank's end of the exchange between its group's GPUs. All methods from any thread.
///
/// Calls run in the order in which they are made, one after the other: on one stream by the stream's order, on different
/// streams by events. Calls in a capture are ordered among themselves, and a graph with other calls as it is launched, unless
/// that is up to whoever replays it ([`DeviceExchange::mix_graphs`]).
pub struct DeviceExchange {
    /// None once it is being dropped.
    parts: Option<Parts>,
    lane: Mutex<Lane>,
    /// Whether graphs are ordered with other calls.
    mixes: AtomicBool,
    /// Calls that were not captured, until they are seen to be done.
    watch: Watch,
    /// By whoever shuts it first.
    shut: Once,
}

/// How long [`DeviceExchange::shut`] waits for the device.
const LATCHING: Duration = Duration::from_millis(20);

/// Marks what stands for the id of a stream that is being captured: user space has no such addresses.
const CAPTURED: u64 = 1 << 63;

/// The order of the calls.
#[derive(Debug, Default)]
struct Lane {
    /// The stream of the last call, checked, by its id: ids are never used again.
    stream: Option<(u64, Stream)>,
    /// The stream that ran the last call that was not captured.
    ran_on: Option<u64>,
    captured: Captured,
    calls: Calls,
}

/// Some members of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct Members(u32);

const _: () = assert!(MAX_RANKS <= 32);

impl Members {
    pub(super) const NONE: Members = Members(0);

    fn iter(self) -> impl Iterator<Item = u32> {
        (0..u32::BITS).filter(move |member| self.0 >> member & 1 == 1)
    }
}

impl FromIterator<u32> for Members {
    fn from_iter<T: IntoIterator<Item = u32>>(members: T) -> Members {
        Members(members.into_iter().fold(0, |all, member| all | 1 << member))
    }
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
    peers: Members,
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
        let mixes = AtomicBool::new(mixes_by_default());
        DeviceExchange {
            parts: Some(parts),
            lane: Mutex::default(),
            mixes,
            watch: Watch::default(),
            shut: Once::new(),
        }
    }

    pub(super) fn parts(&self) -> &Parts {
        // PROOF: taken by `drop` alone.
        self.parts.as_ref().expect("it is not being dropped")
    }

    /// The GPU of this rank.
    pub fn device(&self) -> u32 {
        self.parts().last.device()
    }

    /// Whether sends and receives can run here.
    pub fn serves_points(&self) -> bool {
        self.parts().points
    }

    /// Whether such calls can run here: the same answer on every rank.
    pub fn serves(&self, kind: Kind, dtype: DataType, operator: &Operator) -> bool {
        self.parts().kernels.serves(kind, dtype, operator)
    }

    /// Gives a collective to the caller's stream and returns. A call that differs from those of other ranks fails the group.
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
            // SAFETY: the caller's promise; all ranks have theirs in windows, or the call fails before it is launched. Of a captured one
            // that is the caller's promise, too.
            Some(seen) => unsafe { parts.kernels.enqueue_windowed(job, &seen, stream) },
            // SAFETY: the caller's promise.
            None => unsafe { parts.kernels.enqueue(job, stream) },
        };
        let terms = Terms { max_blocks: asked, windowed: seen.is_some(), ..Terms::default() };
        let compare = |turn: &Turn, calls: &mut Calls| calls.compare(parts, group, turn, terms);
        self.give(group, Class::Ordered, &[signature], Members::NONE, (caller, &[]), compare, launch)
    }

    /// Gives the collectives of a group to their streams, in their order and in few launches, as [`DeviceExchange::enqueue`] gives
    /// one; all ranks group the same calls. What is launched together is on the stream of its first, for which the others wait.
    /// Ends at the first that fails; those before it have been given.
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
        if found.is_none()
            && self.parts().room.one_process
            && self.devices().driver().is_shareable(pull.input)?
        {
            return Ok(Some([pull.input; MAX_RANKS]));
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

    /// Ends the window of this number, of this rank. May wait for the GPU.
    pub fn end_window(&self, number: u64) {
        let parts = self.parts();
        lock(&parts.windows).end(number);
        // What still runs may use it: then it goes with the next one, or with the exchange.
        if parts.is_idle().unwrap_or(false) {
            let over = lock(&parts.windows).sweep();
            drop(over);
        }
    }

    /// Gives sends and receives to the caller's stream, to run beside each other, and returns. They come after what the streams
    /// `beside` were given before, which come after them in turn. `signatures` are theirs, for the record; the points' peers are
    /// members.
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
            // What has been noted has to be launched, since others wait for it, so that nothing but the driver may refuse it.
            check_points(group.rank() - first, boards.size() as u32, points)?;
            calls.compare_points(self.parts(), group, points)
        };
        self.give(group, class, signatures, peers, (caller, &beside), compare, launch)
    }

    /// [`Group::or_fail_on`] for what keeps this rank from giving a call to its stream.
    fn or_fail<T>(&self, group: &Group, class: Class, caller: Caller, result: Result<T>) -> Result<T> {
        group.or_fail_on(class, result, || {
            let _entered = self.devices().enter(self.device())?;
            // SAFETY: whoever calls has promised that the stream lives.
            unsafe { self.capture(caller) }
        })
    }

    /// Whether the caller's stream is being captured.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn capture(&self, caller: Caller) -> Result<Capture> {
        let handle = caller.stream.unwrap_or(self.parts().stream.handle());
        if handle.is_legacy() {
            // It is never captured, and must not even be asked while others are.
            return Ok(Capture::None);
        }
        // SAFETY: the caller's promise.
        let capture = unsafe { self.devices().driver().stream_capture(handle) };
        capture.map_err(|error| self.foreign(caller, error))
    }

    /// The streams beside a call's own in one launch; all are in one capture, or in none.
    ///
    /// # Safety
    /// The streams live.
    unsafe fn beside(&self, caller: Caller, others: &[Option<StreamHandle>]) -> Result<Vec<Stream>> {
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let borrow = |stream: Option<StreamHandle>| {
            let handle = stream.unwrap_or(self.parts().stream.handle());
            // SAFETY: the caller's promise.
            let borrowed = unsafe { Stream::borrow(self.devices(), self.device(), handle) };
            borrowed.map_err(|error| self.foreign(Caller { stream, ..caller }, error))
        };
        let (first, others) = (borrow(caller.stream)?, others.iter().map(|&other| borrow(other)));
        let others = others.collect::<Result<Vec<Stream>>>()?;
        joined::in_one_capture(&first, &others)?;
        Ok(others)
    }

    /// Gives a call to its stream, between what the streams beside it were given before and what they are given next. Others are told of
    /// it by `compare`: a message that fails up to there is not there for them, unless the device is lost.
    #[expect(clippy::too_many_arguments, reason = "few callers, above")]
    fn give(
        &self,
        group: &Group,
        class: Class,
        signatures: &[Signature],
        peers: Members,
        (caller, beside): (Caller, &[Stream]),
        compare: impl FnOnce(&Turn, &mut Calls) -> Result<()>,
        launch: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Enqueued> {
        let parts = self.parts();
        // Once for all that follows.
        let entered = parts.last.devices().enter(self.device());
        let _entered = self.or_fail(group, class, caller, entered)?;
        let mut lane = lock(&self.lane);
        let found = self.find_stream(&mut lane, caller);
        let (handle, id, capture) = self.or_fail(group, class, caller, found)?;
        let Lane { stream: Some((_, stream)), ran_on, captured, calls } = &mut *lane else {
            fail!(Internal, "a stream that was put there is not there")
        };
        if let Some(capture) = capture {
            captured.admit(id, capture)?;
            // It is no call yet, and may never be one, or many: others need not capture it, and it is compared with nothing.
            let turn = group.number(Class::Captured, signatures, caller.timeout)?;
            let mixes = self.mixes.load(Ordering::Relaxed);
            let launch = |stream: &Stream| joined::between(stream, beside, || launch(stream));
            let given = captured.give(parts, (stream, id), capture, mixes, launch);
            // No kernel runs, so that it fails concerns nobody else.
            given.map_err(|error| group.failure().unwrap_or(error).context(group.describe(&turn)))?;
            return Ok(Enqueued { turn, peers, stream: handle, captured: true });
        }
        let turn = group.number(class, signatures, caller.timeout)?;
        let mut begun = false;
        // Before anybody is told of the call: a stream that only waits for what others were given has nothing of it.
        let wait = || {
            if ran_on.is_some_and(|before| before != id) {
                stream.wait(&parts.last)?;
            }
            captured.precede(parts, stream)?;
            joined::gather(stream, beside)
        };
        let given = wait().and_then(|()| compare(&turn, calls)).and_then(|()| {
            begun = true;
            launch(stream)?;
            joined::release(stream, beside)?;
            *ran_on = Some(id);
            self.watch.observe(parts, stream, turn, peers)
        });
        if given.is_err() && begun {
            // Part of it may be there.
            parts.astray.add(stream);
        }
        drop(lane);
        if let Err(error) = given {
            if !begun {
                return Err(group.blame(&turn, error));
            }
            let error = group.blame_launched(&turn, error);
            self.await_end(Deadline::after(GRACE_PERIOD));
            return Err(error);
        }
        // Against `Endpoint::attend`: either it sees the call, or this sees that it is not looking.
        fence(Ordering::SeqCst);
        group.endpoint().watch_devices();
        Ok(Enqueued { turn, peers, stream: handle, captured: false })
    }

    /// The caller's stream, which the lane has then, its id, and the capture that it is in.
    fn find_stream(&self, lane: &mut Lane, caller: Caller) -> Result<(StreamHandle, u64, Option<u64>)> {
        let (parts, devices) = (self.parts(), self.devices());
        let handle = caller.stream.unwrap_or(parts.stream.handle());
        // SAFETY: whoever calls has promised that it lives.
        let capture = match unsafe { self.capture(caller) }? {
            Capture::None => None,
            Capture::Active(capture) => Some(capture),
            Capture::Invalidated => {
                fail!(InvalidUsage, "the capture of the call's stream has failed; end it, and begin again")
            }
        };
        let id = match capture {
            // SAFETY: as above.
            None => unsafe { devices.driver().stream_id(handle) }?,
            // Then the driver does not tell. What is in one capture lives until it ends.
            Some(_) => CAPTURED | handle.0 as u64,
        };
        if lane.stream.as_ref().is_none_or(|(known, _)| *known != id) {
            // SAFETY: as above; it is not used for a later call unless it lives then.
            let stream = unsafe { Stream::borrow(devices, self.device(), handle) };
            lane.stream = Some((id, stream.map_err(|error| self.foreign(caller, error))?));
        }
        Ok((handle, id, capture))
    }

    /// Why the caller's stream cannot be used: it may be one of another device.
    #[cold]
    fn foreign(&self, caller: Caller, error: Error) -> Error {
        let (own, devices) = (self.device(), self.parts().last.devices());
        let stream = caller.stream.filter(|stream| !stream.is_default());
        // SAFETY: the caller has promised that it lives.
        match stream.map(|stream| unsafe { devices.driver().stream_device(stream) }) {
            Some(Ok(other)) if other != own => {
                let name = caller.memory;
                let text =
                    format!("call->stream is a stream of GPU {other}, but {name} is memory of GPU {own}");
                Error::new(Status::InvalidArgument, text)
            }
            _ => error,
        }
    }

    /// Waits until streams have done what they were given, no longer than `until`: a call has failed, and its caller has the memory
    /// back then. The group has failed, so the kernels leave.
    pub fn await_end(&self, until: Deadline) {
        let start = Instant::now();
        // Of a device that is lost nobody will know more.
        while matches!(retry(|| self.is_idle()), Ok(false)) && !until.expired() {
            polling::pause(start, until);
        }
    }

    /// An event that is complete when the call is done, and what answers [`crate::error::Error`] if it will not be, told whether the
    /// event is complete. Not for captured calls. A call that cannot be followed fails; whoever made it waits for its end.
    pub fn follow(
        self: &Arc<Self>,
        group: &Arc<Group>,
        enqueued: Enqueued,
    ) -> Result<(Arc<Event>, impl Fn(bool) -> Option<Error> + Send + Sync + use<>)> {
        let Enqueued { turn, peers, stream, .. } = enqueued;
        let event = self.event_behind(stream).map_err(|error| group.blame_launched(&turn, error))?;
        let (this, group) = (self.clone(), group.clone());
        let overdue = Mutex::new(Overdue::new(turn, peers));
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

    /// Whether a graph that is captured from here on is ordered with other calls and other graphs of this exchange as they are
    /// launched, whatever their streams; all ranks launch them in one order. Else they must not run beside each other.
    pub fn mix_graphs(&self, mixes: bool) {
        self.mixes.store(mixes, Ordering::Relaxed);
    }

    /// Whether the GPU has done all calls that were not captured, and all replays of graphs that are mixed with them.
    pub fn is_idle(&self) -> Result<bool> {
        self.parts().is_idle()
    }

    /// The ranks of the group that have not come to call number `sequence`.
    pub fn missing(&self, sequence: u32) -> Vec<u32> {
        let boards = &self.parts().boards;
        // There are at most MAX_RANKS.
        let members = (0..boards.size()).filter(|&member| !boards.has_called(member, sequence));
        self.ranks(members.map(|member| member as u32).collect())
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

    /// As [`DeviceExchange::abort`], also for kernels that would find all that they wait for: what streams come to from now
    /// on leaves the caller's memory alone. Waits until that is so, a few milliseconds at most: the driver may be waiting for what
    /// whoever calls this is to end, and is asked by another thread. Once that is done, later calls do nothing.
    pub fn shut(self: &Arc<Self>) {
        self.abort();
        if self.parts().urgent.is_some() {
            self.shut.call_once(|| self.latch_aside());
        }
    }

    /// Sets the kernels' latch from another thread, and waits for that.
    fn latch_aside(self: &Arc<Self>) {
        let (this, (tell, told)) = (self.clone(), mpsc::sync_channel(1));
        let latch = move || {
            let latched = this.latch();
            // The exchange may end here, which is nobody's to wait for.
            drop(this);
            // Who waited may have gone on.
            let _ = tell.send(latched);
        };
        let latched =
            process::spawn("unisono-latch", latch).map_err(|cause| cause.to_string()).and_then(|_| {
                told.recv_timeout(2 * LATCHING)
                    .map_err(|cause| cause.to_string())?
                    .map_err(|error| error.to_string())
            });
        if let Err(cause) = latched {
            log::debug!("kernels that are launched already may run: {cause}");
        }
    }

    fn latch(&self) -> Result<()> {
        let parts = self.parts();
        let Some(stream) = &parts.urgent else { return Ok(()) };
        // SAFETY: the arena's first word, which is the kernels' latch; the arena outlives this group's streams.
        unsafe { stream.write_value(parts.arena.address(), 1) }?;
        stream.synchronize(Deadline::after(LATCHING))
    }

    /// Ends the kernels of this rank, now and from now on. Returns at once; from any thread.
    pub fn abort(&self) {
        self.parts().fault.abort();
    }

    /// Looks after calls that nobody waits for, and asks the driver. Whether there may be some that are not done.
    pub fn attend(&self, group: &Group) -> bool {
        self.watch.attend(self, group)
    }

    /// Looks after them when the driver does not say whether they are done. Makes no driver call.
    pub fn oversee(&self, group: &Group) {
        self.watch.oversee(self, group);
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
