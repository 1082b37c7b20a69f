//! Calls on device memory that the group's GPUs exchange among themselves: whether a call does, and how it
//! gets there. What all ranks agree on decides, and nothing else.

mod agree;
mod launches;

use std::sync::Arc;
use std::time::Instant;

use agree::First;
pub use agree::connect_devices;
pub(super) use agree::{Candidate, choose, connect};
pub use launches::{Added, Launches, Ready};

use super::batch::{Part, Pending};
use super::context::{Context, Membership};
use super::hosts::{self, Composed};
use super::staged::close_ahead;
use super::survey::{Located, Spans};
use super::{Call, Completion, Work};
use crate::collective::checked::{self, Uniform};
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::driver::{Memory, StreamHandle};
use crate::cuda::exchange::{Chosen, Direction, Job, Point, Pull, Stages, Table};
use crate::cuda::polling;
use crate::deadline::Deadline;
use crate::engine::device::{Caller, DeviceExchange, Enqueued, GRACE_PERIOD, Loads, Way};
use crate::engine::group::Group;
use crate::engine::operation::LAST_WORDS;
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::signature::Signature;

impl Context {
    /// Collective: agrees with the other ranks whether their GPUs exchange, this rank's being `device`,
    /// unless that is agreed. The first collective on device memory does it when it has to; whoever connects
    /// before has it behind them, and may have several contexts in one thread: [`connect_devices`]. Sends and
    /// receives, which are not for all ranks to call, are exchanged by GPUs only where all ranks have
    /// connected by this. That the GPUs do not reach each other is no error.
    ///
    /// May allocate device memory, and wait for the device.
    pub fn connect_device(&self, device: u32) -> Result<()> {
        connect_devices(&[(self, device)])
    }

    /// As [`Context::connect_device`], by this table, the same on all ranks, instead of what `UNISONO_TUNING`
    /// or the device says: for measuring tables.
    pub fn connect_device_by(&self, device: u32, table: Table) -> Result<()> {
        let choose = |_: &Devices, _| Ok(Chosen { table, by_hand: true });
        let candidate = Candidate { context: self, device, first: None, points: true };
        connect(&[candidate], Devices::open, choose, Loads::OWN)
    }

    /// Whether the ranks' GPUs exchange directly, with several hosts those of each host, and if not, why;
    /// `None` before it is agreed.
    pub fn device_way(&self) -> Option<Result<(), String>> {
        let Membership::Group(group) = self.membership() else { return None };
        Some(match group.devices()? {
            Way::Exchange(_) | Way::Hosts(_) => Ok(()),
            Way::Staged(why) => Err(why.clone()),
        })
    }

    /// How many bytes of its device's memory the context holds for calls that GPUs exchange.
    pub fn device_bytes(&self) -> u64 {
        let Membership::Group(group) = self.membership() else { return 0 };
        group.devices().and_then(Way::exchange).map_or(0, |exchange| exchange.arena_bytes())
    }

    /// Whether graphs that are captured from here on are ordered with other calls and other graphs of this
    /// context as they are launched, whatever their streams; all ranks launch them in one order. If not, they
    /// must not run beside each other. Without this they are, unless `UNISONO_GRAPH_MIXING` is 0. Where GPUs
    /// do not exchange nothing is captured.
    pub fn mix_graphs(&self, mixes: bool) {
        let Membership::Group(group) = self.membership() else { return };
        if let Some(exchange) = group.devices().and_then(Way::exchange) {
            exchange.mix_graphs(mixes);
        }
    }

    /// Whether the GPU has done all that its streams were given by [`Context::launch`] and other calls, and
    /// that GPUs exchange. Calls in graphs count where those are mixed with others ([`Context::mix_graphs`]).
    /// Never waits.
    pub fn is_settled(&self) -> Result<bool> {
        let Membership::Group(group) = self.membership() else { return Ok(true) };
        group.devices().and_then(Way::exchange).map_or(Ok(true), |exchange| exchange.is_idle())
    }

    /// Waits until [`Context::is_settled`]. An expired `deadline` is `Timeout`; the failure of the context
    /// ends the wait.
    pub fn settle(&self, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        loop {
            let settled = self.is_settled()?;
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if settled {
                return Ok(());
            }
            if let Membership::Group(group) = self.membership()
                && start.elapsed() > LAST_WORDS
            {
                // Nobody would hear any more that a rank is lost.
                group.endpoint().check_present()?;
            }
            if deadline.expired() {
                fail!(Timeout, "the GPU still runs calls of '{}'; wait again, or longer", self.name());
            }
            polling::pause(start, deadline);
        }
    }

    /// What `request` is on the group's devices, if they exchange it. A broadcast by stages is exchanged or
    /// refused.
    pub(super) fn on_devices(
        &self,
        request: &Request,
        call: &Call,
        buffers: &[*mut u8],
    ) -> Result<Option<OnDevices>> {
        let found = self.exchanged(request, call, buffers)?;
        match (Stages::from_number(call.algorithm.unwrap_or(0)), self.membership()) {
            (Some(stages), Membership::Group(group)) if found.is_none() => {
                let name = stages.name();
                check_stages(stages, request.kind, call)?;
                match group.devices() {
                    Some(Way::Hosts(_)) => {
                        fail!(
                            Unsupported,
                            "algorithm '{name}' is for GPUs of one host, but there are several"
                        )
                    }
                    Some(Way::Staged(why)) => {
                        fail!(
                            Unsupported,
                            "algorithm '{name}' is for GPUs that reach each other, but there is {why}"
                        )
                    }
                    _ => Err(not_on_host(stages)),
                }
            }
            _ => Ok(found),
        }
    }

    /// The exchange that `request` runs on, if it is a call on device memory for which the GPUs have one.
    /// Agrees on that with the others at the first such call.
    fn exchanged(&self, request: &Request, call: &Call, buffers: &[*mut u8]) -> Result<Option<OnDevices>> {
        let Membership::Group(group) = self.membership() else { return Ok(None) };
        let several = buffers.len() > 1 && !is_of_nothing(request);
        if !fits(request, call) || several || !self.cuda().exchanges() {
            return Ok(None);
        }
        if request.kind.point_to_point() && !group.devices().is_some_and(Way::serves_points) {
            return Ok(None);
        }
        let is_point = request.kind.point_to_point();
        let serves =
            |exchange: &DeviceExchange| exchange.serves(request.kind, request.dtype, &request.operator);
        let by_stages = Stages::from_number(call.algorithm.unwrap_or(0)).is_some();
        let takes = |way: &Way| match way {
            Way::Exchange(exchange) => serves(exchange),
            Way::Hosts(hosts) if is_point => hosts.layout().is_here(request.root),
            Way::Hosts(hosts) => !by_stages && serves(hosts.exchange()) && hosts::composes(hosts, request),
            Way::Staged(_) => false,
        };
        if group.devices().is_some_and(|way| !takes(way)) {
            return Ok(None);
        }
        let found = self.on_memory(group, request, call)?;
        let Some(OnMemory { what, device, name, .. }) = found else { return Ok(None) };
        if group.devices().is_none() {
            let Some(device) = device else { return Ok(None) };
            let first = Some(First { signature: what.signature(), timeout: call.timeout });
            let candidate = Candidate { context: self, device, first, points: true };
            connect(&[candidate], || self.cuda().devices().cloned(), choose, self.cuda().loads())?;
        }
        let Some(way) = group.devices() else {
            fail!(Internal, "the ranks have connected, and agreed on nothing")
        };
        let Some(exchange) = way.exchange().filter(|_| takes(way)) else { return Ok(None) };
        self.check_device(exchange, device, name)?;
        let caller = caller(call, name);
        let what = match (way, what) {
            (Way::Hosts(hosts), What::Point(point, signature)) => {
                What::Point(Point { peer: point.peer - hosts.layout().first(), ..point }, signature)
            }
            (Way::Hosts(hosts), What::Collective(..)) => {
                What::Composed(Box::new(Composed::new(self, group, hosts, request, caller, call)?))
            }
            // A broadcast by stages is within one host.
            (Way::Hosts(_), What::Pull(..)) => return Ok(None),
            (_, what) => what,
        };
        Ok(Some(OnDevices { group: group.clone(), exchange: exchange.clone(), caller, what }))
    }

    /// Whether GPUs exchange a send or a receive, if it is on device memory; where its memory is, is only
    /// asked for `exactly`.
    pub(super) fn is_point(&self, request: &Request, call: &Call, exactly: bool) -> bool {
        let Membership::Group(group) = self.membership() else { return false };
        let takes = |way: &Way| match way {
            Way::Hosts(hosts) => hosts.layout().is_here(request.root),
            _ => true,
        };
        fits(request, call)
            && self.cuda().exchanges()
            && group.devices().is_some_and(|way| way.serves_points() && takes(way))
            && !(exactly && matches!(self.on_devices(request, call, &[]), Ok(None)))
    }

    /// Whether the GPUs have not agreed, and are to before such a call, if it is on device memory.
    pub(super) fn is_to_agree(&self, request: &Request, call: &Call) -> bool {
        matches!(self.membership(), Membership::Group(group) if group.devices().is_none())
            && fits(request, call)
            && !request.kind.point_to_point()
            && self.cuda().exchanges()
    }

    /// Refuses memory of another GPU than this rank's, named so.
    fn check_device(&self, exchange: &DeviceExchange, device: Option<u32>, name: &str) -> Result<()> {
        if let Some(device) = device.filter(|device| *device != exchange.device()) {
            fail!(
                InvalidArgument,
                "{name} is memory of GPU {device}, but rank {} of '{}' is on GPU {}: give each GPU a rank of its own",
                self.rank(),
                self.name(),
                exchange.device()
            );
        }
        Ok(())
    }

    /// The call, if it is one on device memory, and where that is. A driver that does not tell keeps this
    /// rank from it.
    pub(super) fn on_memory(
        &self,
        group: &Group,
        request: &Request,
        call: &Call,
    ) -> Result<Option<OnMemory>> {
        let class = if request.kind.point_to_point() { Class::PointToPoint } else { Class::Ordered };
        // SAFETY: whoever made the call promised a stream that lives until the operation is complete.
        unsafe { self.or_fail_on(call.stream, class, self.find_memory(group, request, call)) }
    }

    fn find_memory(&self, group: &Group, request: &Request, call: &Call) -> Result<Option<OnMemory>> {
        let cuda = self.cuda();
        let mut known = None;
        // A call of nothing has no memory, and ranks may give any pointers and streams, or none: GPUs that
        // exchange have it.
        let nothing = is_of_nothing(request);
        let mut on_device = call.on_device || nothing && matches!(group.devices(), Some(Way::Exchange(_)));
        // Told by the pointers alone: most calls are on host memory, and parsed later.
        for address in [request.output.addr(), request.input.addr()] {
            if !on_device && !nothing && address != 0 {
                known = cuda.locate(address as u64)?;
                on_device = known.is_some_and(|found| found.memory != Memory::Host);
            }
        }
        // SAFETY: whoever made the call promised a stream that lives until the operation is complete.
        if !on_device && unsafe { cuda.capturing(call.stream) }?.is_none() {
            return Ok(None);
        }
        let (what, spans) = self.parse(request, call)?;
        // SAFETY: as above.
        let located = unsafe { Located::new(spans, cuda, known)?.in_graph(cuda, call.stream) }?;
        // A pointer that this rank does not use says nothing.
        if !nothing && !call.on_device && !located.is_on_device() {
            return Ok(None);
        }
        let (mut device, name) = located.reachable(cuda)?;
        if device.is_none() && group.devices().is_none() {
            device = match call.stream.filter(|stream| !stream.is_default()) {
                Some(stream) => Some(cuda.devices()?.device_of_stream(stream)?),
                None => located.allocated_on(),
            };
        }
        Ok(Some(OnMemory { what, device, name }))
    }

    /// A send or a receive, as the kernels and as the ranks see it.
    fn device_point(&self, request: &Request, call: &Call) -> Result<(Point, Signature, Spans)> {
        let (_, signature, message) = self.point(request, call)?;
        let spans = Spans::of_message(&message);
        let (direction, address) = match request.kind {
            Kind::Send => (Direction::Send, request.input.addr()),
            _ => (Direction::Receive, request.output.addr()),
        };
        let (peer, address, bytes) = (request.root, address as u64, spans.bytes() as u64);
        let point = Point { direction, peer, address, bytes };
        Ok((point, Signature { device: true, ..signature }, spans))
    }

    fn parse(&self, request: &Request, call: &Call) -> Result<(What, Spans)> {
        if request.kind.point_to_point() {
            let (point, signature, spans) = self.device_point(request, call)?;
            return Ok((What::Point(point, signature), spans));
        }
        let Some(uniform) = Uniform::new(request, self.rank(), self.size())? else {
            fail!(Internal, "{} of such counts is not exchanged between GPUs", request.kind.name())
        };
        let spans = Spans::of_buffers(request.kind, &uniform.buffers);
        let what = match Stages::from_number(call.algorithm.unwrap_or(0)) {
            Some(stages) => {
                let (pull, signature) = pull(stages, request, call, &uniform)?;
                What::Pull(pull, signature)
            }
            None => {
                let (job, signature) = collective(request, call, &uniform);
                What::Collective(job, signature)
            }
        };
        Ok((what, spans))
    }
}

/// A call on device memory.
pub(super) struct OnMemory {
    what: What,
    /// Whose memory it is; `None`: any device's that asks for it.
    device: Option<u32>,
    /// The argument that names it.
    name: &'static str,
}

/// Those operations before which devices have to agree.
pub(super) fn to_agree<'a>(operations: &[Part<'a>]) -> Vec<Candidate<'a>> {
    let mut open: Vec<Candidate<'_>> = Vec::new();
    for &Part { context, request, call, .. } in operations {
        let Membership::Group(group) = context.membership() else { continue };
        if !context.is_to_agree(request, call) {
            continue;
        }
        match context.on_memory(group, request, call) {
            Ok(Some(OnMemory { what, device: Some(device), .. })) => {
                let first = Some(First { signature: what.signature(), timeout: call.timeout });
                open.push(Candidate { context, device, first, points: true });
            }
            Ok(_) => {}
            // Nothing behind it is begun.
            Err(_) => break,
        }
    }
    open
}

/// Has the devices agree for these, side by side. What keeps one from that keeps it from beginning, too, and
/// is told then: those before it are begun.
pub(super) fn connect_for(open: &[Candidate<'_>]) {
    let Some(Candidate { context, .. }) = open.first() else { return };
    let cuda = context.cuda();
    if let Err(error) = connect(open, || cuda.devices().cloned(), choose, cuda.loads()) {
        log::debug!("not all devices have agreed: {error}");
    }
}

/// Whether such calls can be exchanged between devices: all ranks make the same.
fn fits(request: &Request, call: &Call) -> bool {
    call.tag.is_none()
        && match call.algorithm.unwrap_or(0) {
            0 => true,
            number => request.kind == Kind::Broadcast && Stages::from_number(number).is_some(),
        }
        && matches!(request.counts, Counts::Uniform(_))
        && !matches!(request.kind, Kind::Barrier | Kind::ReceiveAny)
}

/// Whether a call has no elements on any rank.
fn is_of_nothing(request: &Request) -> bool {
    request.counts == Counts::Uniform(0)
}

/// Refuses a call that no GPUs run by these stages.
pub(super) fn check_stages(stages: Stages, kind: Kind, call: &Call) -> Result<()> {
    let name = stages.name();
    if kind != Kind::Broadcast {
        fail!(InvalidArgument, "algorithm '{name}' serves broadcast, not {}", kind.name());
    }
    if call.tag.is_some() {
        fail!(InvalidArgument, "algorithm '{name}' takes no tag: GPUs run its calls in their order");
    }
    Ok(())
}

/// Why these stages serve no call on host memory.
pub(super) fn not_on_host(stages: Stages) -> Error {
    let text = format!("algorithm '{}' is for device memory, one pointer on each rank", stages.name());
    Error::new(Status::InvalidArgument, text)
}

/// How a call is given to its stream; `name` names its memory.
pub(super) fn caller(call: &Call, name: &'static str) -> Caller {
    Caller { stream: call.stream, timeout: call.timeout, memory: name }
}

/// A collective, as the kernels and as the ranks see it.
fn collective(request: &Request, call: &Call, uniform: &Uniform) -> (Job, Signature) {
    let Uniform { signature, buffers } = uniform;
    let job = Job {
        kind: request.kind,
        input: buffers.input.addr() as u64,
        output: buffers.output.addr() as u64,
        count: signature.count,
        dtype: request.dtype,
        operator: request.operator,
        root: signature.root,
        max_blocks: call.max_blocks,
    };
    (job, Signature { device: true, ..call.compared(*signature) })
}

/// A broadcast by stages.
fn pull(stages: Stages, request: &Request, call: &Call, uniform: &Uniform) -> Result<(Pull, Signature)> {
    let Uniform { signature, buffers } = uniform;
    let Signature { count, root, .. } = *signature;
    let pull = Pull {
        stages,
        input: buffers.input.addr() as u64,
        output: buffers.output.addr() as u64,
        bytes: checked::bytes("buffer", count, request.dtype.size() as u64, request.dtype)? as u64,
        root,
        seen: None,
        max_blocks: call.max_blocks,
        // The exchange knows.
        multiprocessors: 0,
        overlap: call.overlap,
    };
    // Three numbers, which fit.
    let algorithm = stages.number() as u8;
    Ok((pull, Signature { device: true, algorithm, ..*signature }))
}

/// A call that GPUs exchange, checked.
pub(super) struct OnDevices {
    pub(super) group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    caller: Caller,
    what: What,
}

enum What {
    Collective(Job, Signature),
    Pull(Pull, Signature),
    Point(Point, Signature),
    Composed(Box<Composed>),
}

impl What {
    fn signature(&self) -> Signature {
        match self {
            What::Collective(_, signature) | What::Pull(_, signature) | What::Point(_, signature) => {
                *signature
            }
            What::Composed(composed) => composed.signature(),
        }
    }
}

impl OnDevices {
    /// Gives it to its stream. What comes back is the host's part, if it has one.
    ///
    /// # Safety
    /// The request's memory is valid for what the operation accesses, and the call's stream lives, until the
    /// operation has ended.
    pub(super) unsafe fn launch(&self) -> Result<Option<Pending>> {
        match &self.what {
            // SAFETY: the caller's promise.
            What::Composed(composed) => unsafe { composed.start(false) }.map(|work| Some(work.into())),
            // SAFETY: the caller's promise.
            _ => unsafe { self.enqueue() }.map(|_| None),
        }
    }

    /// As [`OnDevices::launch`]; the work ends when it is done.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn start(&self) -> Result<Work> {
        match &self.what {
            // SAFETY: the caller's promise.
            What::Composed(composed) => unsafe { composed.start(true) },
            // SAFETY: the caller's promise.
            _ => self.work(unsafe { self.enqueue() }?),
        }
    }

    fn work(&self, enqueued: Enqueued) -> Result<Work> {
        work_of(&self.group, &self.exchange, enqueued)
    }

    /// Gives what is not composed to its stream.
    ///
    /// # Safety
    /// As [`OnDevices::launch`].
    unsafe fn enqueue(&self) -> Result<Enqueued> {
        if !matches!(self.what, What::Point(..)) {
            close_ahead(self.group.id())?;
        }
        match &self.what {
            What::Composed(_) => fail!(Internal, "a composed call is more than one launch"),
            // SAFETY: the caller's promise.
            What::Collective(job, signature) => unsafe {
                self.exchange.enqueue(&self.group, *signature, job, self.caller)
            },
            // SAFETY: the caller's promise.
            What::Pull(pull, signature) => unsafe {
                self.exchange.enqueue_pull(&self.group, *signature, pull, self.caller)
            },
            // SAFETY: the caller's promise.
            What::Point(point, signature) => unsafe {
                self.exchange.enqueue_points(&self.group, &[*signature], &[*point], self.caller, &[])
            },
        }
    }

    /// As [`OnDevices::start`], but what others may join waits for them: a send or a receive, or a call
    /// between hosts.
    ///
    /// # Safety
    /// As [`OnDevices::launch`].
    pub(super) unsafe fn begin(self) -> Result<Pending> {
        match self.into_joint() {
            Ok(pending) => Ok(pending),
            // SAFETY: the caller's promise.
            Err(other) => unsafe { other.start() }.map(Pending::from),
        }
    }

    /// As [`OnDevices::launch`], in the way of [`OnDevices::begin`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn begin_launch(self) -> Result<Option<Pending>> {
        match self.into_joint() {
            Ok(pending) => Ok(Some(pending.unawaited())),
            // SAFETY: the caller's promise.
            Err(other) => unsafe { other.launch() },
        }
    }

    /// What others may join.
    #[expect(clippy::result_large_err, reason = "it is no error, and is looked at at once")]
    fn into_joint(self) -> Result<Pending, OnDevices> {
        match self.what {
            What::Point(point, signature) => {
                let OnDevices { group, exchange, caller, .. } = self;
                Ok(Pending::point(PointCall { group, exchange, caller, point, signature }))
            }
            What::Composed(composed) => Ok(Pending::composed(composed)),
            _ => Err(self),
        }
    }
}

/// The work of what a stream was given.
fn work_of(group: &Arc<Group>, exchange: &Arc<DeviceExchange>, enqueued: Enqueued) -> Result<Work> {
    if enqueued.is_captured() {
        // It is done whenever its graph is replayed.
        return Ok(Work::ended(Ok(Completion::default())));
    }
    let followed = exchange.follow(group, enqueued);
    let (event, failure) = followed.inspect_err(|_| exchange.await_end(Deadline::after(GRACE_PERIOD)))?;
    Ok(Work::enqueued(Some(group), event, failure))
}

/// A send or a receive between GPUs, checked.
pub(super) struct PointCall {
    group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    caller: Caller,
    point: Point,
    signature: Signature,
}

/// Points of one exchange, given in one piece whatever stands between them in the caller's list: of two
/// pieces the second would wait for the first, and that for a rank whose answer is in its own second.
pub(super) struct Together {
    group: Arc<Group>,
    exchange: Arc<DeviceExchange>,
    /// That of the first, whose stream gets it.
    caller: Caller,
    /// The other streams that they name: these wait.
    beside: Vec<Option<StreamHandle>>,
    signatures: Vec<Signature>,
    points: Vec<Point>,
    /// Where they are in the caller's list.
    places: Vec<usize>,
    awaited: bool,
}

impl Together {
    /// None yet, of the exchange that `first` is of, and up to `room`.
    pub(super) fn new(first: &PointCall, room: usize) -> Together {
        Together::of(first.group.clone(), first.exchange.clone(), first.caller, room)
    }

    /// None yet, of this exchange, and up to `room`; `caller` is that of the first.
    fn of(group: Arc<Group>, exchange: Arc<DeviceExchange>, caller: Caller, room: usize) -> Together {
        Together {
            group,
            exchange,
            caller,
            beside: Vec::new(),
            signatures: Vec::with_capacity(room),
            points: Vec::with_capacity(room),
            places: Vec::new(),
            awaited: false,
        }
    }

    pub(super) fn takes(&self, other: &PointCall) -> bool {
        Arc::ptr_eq(&self.exchange, &other.exchange)
    }

    /// Adds one that it takes. `awaited`: somebody wants to know when it is done.
    pub(super) fn add(&mut self, place: usize, other: &PointCall, awaited: bool) {
        self.push(other.point, other.signature, other.caller.stream);
        self.places.push(place);
        self.awaited |= awaited;
    }

    /// Adds one that is in no list.
    fn push(&mut self, point: Point, signature: Signature, stream: Option<StreamHandle>) {
        if stream != self.caller.stream && !self.beside.contains(&stream) {
            self.beside.push(stream);
        }
        self.signatures.push(signature);
        self.points.push(point);
    }

    /// Where they are in the caller's list.
    pub(super) fn places(&self) -> &[usize] {
        &self.places
    }

    /// Gives them to their streams. The work is that of all; where nobody waits for them, it has ended.
    ///
    /// # Safety
    /// As [`OnDevices::launch`], for all of them.
    pub(super) unsafe fn give(&self) -> Result<Work> {
        let Together { group, exchange, caller, beside, signatures, points, .. } = self;
        // SAFETY: the caller's promise.
        let enqueued = unsafe { exchange.enqueue_points(group, signatures, points, *caller, beside) }?;
        match self.awaited {
            true => work_of(group, exchange, enqueued),
            false => Ok(Work::ended(Ok(Completion::default()))),
        }
    }
}

#[cfg(test)]
mod tests;
