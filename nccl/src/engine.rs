//! Starts calls: the only module that gives anything to unisono's contexts.
//!
//! On devices a call is enqueued and this returns. In host memory it returns when the call is complete. Calls
//! of one group are all begun before any stream is made to wait, or any is waited for: they may depend on
//! each other. For the streams of one communicator a group is one operation: it begins when all have come to
//! it, and they go on when it is done. What `communicator::start_together` does for one device is done here
//! for several, whose default streams have one name.

mod calls;
#[cfg(test)]
mod tests;

use std::sync::{Arc, LazyLock};

use unisono::collective::checked::{self, Checked};
use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::beside::given_up;
use unisono::communicator::{Beside, Call, Closing, Context, Pending, Work, begin_in_turns};
use unisono::cuda::context::{Devices, Entered};
use unisono::cuda::driver::{Capture, StreamHandle};
use unisono::cuda::event::Event;
use unisono::cuda::queues;
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::reduce::{DataType, Operator};

pub(crate) use self::calls::Calls;
use crate::communicator::{Communicator, Wait, operation_timeout};
use crate::error::{Error, Result, fail};
use crate::operator;
use crate::place::{Place, devices};

/// A call that is ready to be started.
pub(crate) struct Launch {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) request: Request,
    /// The client's stream.
    pub(crate) stream: usize,
    /// Where the device has the factor of a PreMulSum, if that is not in the request.
    pub(crate) factor: Option<u64>,
    /// Blocks of a kernel at most; 0: as the communicator's config says.
    pub(crate) max_blocks: u32,
}

/// Has a stream put, signal or wait.
pub(crate) struct OneSided {
    pub(crate) communicator: Arc<Communicator>,
    /// The client's stream.
    pub(crate) stream: usize,
    pub(crate) start: Box<dyn FnOnce() -> Result<()>>,
}

impl Launch {
    /// The group, if it can be called: whoever made this has seen that the communicator is open.
    fn working_group(&self) -> Result<&Context> {
        let context = self.communicator.group()?;
        check_working(context)?;
        Ok(context)
    }

    /// Refuses what can be seen to be wrong without starting anything.
    fn check(&self) -> Result<()> {
        self.check_in(self.working_group()?)
    }

    /// The same, in a group that can be called.
    fn check_in(&self, context: &Context) -> Result<()> {
        let Request { kind, counts, dtype, .. } = &self.request;
        if !kind.point_to_point() {
            return Checked::new(&self.request, context.rank(), context.size()).map(drop);
        }
        let (peer, size) = (self.request.root, context.size());
        if peer >= size {
            fail!(
                InvalidArgument,
                "peer {peer} is out of range: the group has {size} ranks, 0 to {}",
                size - 1
            );
        }
        let Counts::Uniform(count) = *counts else { return Ok(()) };
        let (name, null) = match kind {
            Kind::Send => ("sendbuff", self.request.input.is_null()),
            _ => ("recvbuff", self.request.output.is_null()),
        };
        let bytes = checked::bytes(name, count, dtype.size() as u64, *dtype)?;
        if null && bytes > 0 {
            fail!(InvalidArgument, "{name} is NULL, but count is {count}");
        }
        Ok(())
    }

    /// The request with the factor that the device has.
    fn resolve(&mut self) -> Result<()> {
        if let Some(address) = self.factor.take() {
            let (dtype, stream) = (self.request.dtype, StreamHandle(self.stream));
            let factor = read_factor(&self.communicator, address, dtype, stream)?;
            self.request.operator = Operator::PreMulSum(factor);
        }
        Ok(())
    }

    /// Whether it moves nothing: collectives of no elements, which agree on that everywhere.
    fn is_empty(&self) -> bool {
        !self.request.kind.point_to_point() && self.request.counts == Counts::Uniform(0)
    }

    /// Whether it sends to, or receives from, its own rank.
    fn is_to_itself(&self, context: &Context) -> bool {
        self.request.kind.point_to_point() && self.request.root == context.rank()
    }

    /// Refuses what [`Launch::begin`] would refuse for where its memory is, or its stream.
    fn check_memory(&self) -> Result<()> {
        // SAFETY: the client's promise: the stream lives.
        self.at_place(|context, call| unsafe { context.check_memory(&self.request, call) })
    }

    /// Begins it as one of several that are closed together, at this place of their list.
    fn begin(&self, beside: &Beside, place: usize) -> Result<Option<Pending>> {
        self.at_place(|context, call| {
            let call = beside.call(place, call);
            // SAFETY: the client's promise: the buffers are valid until the call is complete, and the stream
            // lives.
            unsafe { context.begin_launch_together(&self.request, &call) }
        })
    }

    /// Does something with it where a default stream is that of its device.
    fn at_place<T>(&self, with: impl FnOnce(&Context, &Call) -> Result<T>) -> Result<T> {
        let context = self.communicator.called_group()?;
        let current = Current::of(self)?;
        let _entered = current.as_ref().map(Current::enter).transpose()?;
        with(context, &self.call())
    }

    fn call(&self) -> Call {
        let (stream, on_device) = match self.communicator.place {
            Place::Host(_) => (None, false),
            Place::Device(_) => (Some(StreamHandle(self.stream)), true),
        };
        let max_blocks = self.max_blocks;
        Call { timeout: Some(operation_timeout()), stream, on_device, max_blocks, ..Call::default() }
    }
}

/// Refuses what has failed.
fn check_working(context: &Context) -> Result<()> {
    match context.failure() {
        Some(error) => Err(error.context(format!("'{}' has failed before", context.name()))),
        None => Ok(()),
    }
}

/// Starts a call that is in no group.
pub(crate) fn launch_one(mut launch: Launch) -> Result<()> {
    let communicator = launch.communicator.clone();
    let context = communicator.called_group()?;
    if launch.is_to_itself(context) {
        launch.check()?;
        fail!(
            InvalidUsage,
            "rank {} {}s to itself outside of a group: put the send and the receive between ncclGroupStart and ncclGroupEnd",
            context.rank(),
            launch.request.kind.name()
        );
    }
    if launch.is_empty() {
        return launch.check();
    }
    communicator.line_up(launch.stream, launch.request.kind.point_to_point())?;
    launch.resolve()?;
    let call = launch.call();
    match communicator.place {
        Place::Host(_) => {
            let _wait = communicator.begin_wait();
            // SAFETY: the client's promise: the buffers are valid until the call is complete.
            unsafe { context.run(&launch.request, &call) }.map(drop)
        }
        Place::Device(_) => {
            let current = Current::of(&launch)?;
            let _entered = current.as_ref().map(Current::enter).transpose()?;
            // SAFETY: as above, and the stream lives.
            let hosted = unsafe { context.begin_launch(&launch.request, &call) }?;
            if let Some(pending) = hosted {
                communicator.keep(launch.stream, [end(pending)?]);
            }
            Ok(())
        }
    }
}

/// Has a stream put, signal or wait, in no group.
pub(crate) fn start_one_sided(one: OneSided) -> Result<()> {
    one.communicator.line_up(one.stream, true)?;
    (one.start)()
}

/// What has failed of a group's calls.
#[derive(Default)]
struct Failed {
    first: Option<Error>,
    /// Of these nothing more is started, nor of other ranks of theirs, for which this thread would wait.
    stopped: Vec<Arc<Communicator>>,
}

impl Failed {
    /// Notes what all that is left of the group goes on behind.
    fn note(&mut self, error: Error) {
        self.first.get_or_insert(error);
    }

    /// Notes what keeps a call of this communicator from starting. Another one behind it would take its place
    /// on the other ranks, or signal what was not put, so none is started.
    fn stop(&mut self, communicator: &Arc<Communicator>, error: Error) {
        self.note(error);
        if !self.stops(communicator) {
            self.stopped.push(communicator.clone());
        }
    }

    /// Starts calls of this communicator, if any are started.
    fn or_start(&mut self, communicator: &Arc<Communicator>, start: impl FnOnce() -> Result<()>) {
        if !self.stops(communicator)
            && let Err(error) = start()
        {
            self.stop(communicator, error);
        }
    }

    /// Whether calls of this communicator are not started any more.
    fn stops(&self, communicator: &Arc<Communicator>) -> bool {
        let group = calls::id(communicator);
        let is_of = |stopped: &Arc<Communicator>| {
            Arc::ptr_eq(stopped, communicator) || group != 0 && calls::id(stopped) == group
        };
        self.stopped.iter().any(is_of)
    }
}

/// Starts the calls of a group. What stands behind one that cannot be started is not, if it is of the same
/// communicator; calls of others are. The first error is returned.
pub(crate) fn launch_all(mut calls: Calls, one_sided: Vec<OneSided>) -> Result<()> {
    one_sided.iter().for_each(|one| calls.note_stream(&one.communicator, one.stream));
    let joined = calls.joined(&one_sided)?;
    let copies = take_messages_to_itself(&mut calls.others)?;
    if one_sided.is_empty()
        && let Some(only) = calls.only_other()
    {
        return launch_one(only);
    }
    calls.others.retain(|launch| !launch.is_empty());
    let mut failed = Failed::default();
    calls.find(&mut failed);
    calls.line_up(&mut failed);
    // Calls that nothing orders are not to begin.
    let meet = |failed: &mut Failed| {
        for streams in &joined {
            failed.or_start(streams.communicator(), || streams.meet());
        }
    };
    if !one_sided.is_empty() {
        meet(&mut failed);
    }
    // Before all calls, as NCCL has them: calls of other ranks may be behind a wait for what this one sends,
    // and calls of this one need what it waits for.
    for OneSided { communicator, start, .. } in one_sided {
        failed.or_start(&communicator, start);
    }
    meet(&mut failed);
    // If the memory of one is refused, nothing else of its communicator is to have been started.
    for copy in &copies {
        failed.or_start(&copy.communicator, || copy.start());
    }
    // A factor may come from another of these streams.
    calls.resolve(&mut failed);
    calls.order();
    let launches = std::mem::take(&mut calls.others);
    let in_host_memory = |launch: &&Launch| matches!(launch.communicator.place, Place::Host(_));
    let _waits: Vec<Wait<'_>> =
        launches.iter().filter(in_host_memory).map(|launch| launch.communicator.begin_wait()).collect();
    let device_of = |at: usize| Some(launches[at].communicator.place.number());
    let listed = |at: usize| {
        let launch = &launches[at];
        let is_on_device = matches!(launch.communicator.place, Place::Device(_));
        Some((launch.communicator.group().ok().filter(|_| is_on_device)?, &launch.request, launch.call()))
    };
    // SAFETY: the client's streams live.
    let beside = unsafe { Beside::of(launches.len(), &listed, false, &device_of) };
    let begun = begin_by_place(&launches, &beside, &mut failed);
    calls.give_collectives(&mut failed);
    // What this thread waits for at one place may need what streams of another are given.
    let mut closing = Vec::with_capacity(begun.len());
    for Begun { place, launches, pending } in begun {
        match close(place, pending) {
            Ok(closed) => closing.push((launches, closed)),
            Err(error) => failed.note(error),
        }
    }
    // Behind all collectives, also those by way of the host. What the host waits for may need these.
    calls.give_messages(&mut failed);
    let unordered = beside.join();
    let mut works: Vec<(&Launch, Work)> = Vec::new();
    for (same, closed) in closing {
        for (launch, work) in same.into_iter().zip(closed.wait()) {
            let is_it = |(at, _): &&(usize, Error)| std::ptr::eq(&launches[*at], launch);
            let work = match unordered.iter().find(is_it) {
                Some((_, error)) => given_up(work, error),
                None => work,
            };
            match work {
                Ok(work) if work.had_ended() => {}
                Ok(work) => works.push((launch, work)),
                Err(error) => failed.note(error),
            }
        }
    }
    leave(works, |error| failed.note(error));
    joined.iter().filter_map(|streams| streams.meet().err()).for_each(|error| failed.note(error));
    failed.first.map_or(Ok(()), Err)
}

/// Agrees with the other ranks how the group's devices reach each other. Part of making a communicator: later
/// there may be no thread for each rank.
pub(crate) fn connect(context: &Context, place: Place) -> Result<()> {
    match place {
        Place::Device(device) => {
            // Before any call, which may wait for the other ranks on the device. Whoever needs it would try
            // again.
            if let Err(error) = devices().and_then(|devices| devices.prepare_scalars(device)) {
                log::warn!("{error}");
            }
            context.connect_device(device)
        }
        Place::Host(_) => Ok(()),
    }
}

/// Calls of one place that have begun, in their order.
struct Begun<'a> {
    place: Place,
    launches: Vec<&'a Launch>,
    pending: Vec<Pending>,
}

/// Begins calls. Those of one place are closed with it current, all that are together at once.
fn begin_by_place<'a>(launches: &'a [Launch], beside: &Beside, failed: &mut Failed) -> Vec<Begun<'a>> {
    let mut begun: Vec<Begun<'_>> = Vec::new();
    let contexts: Vec<Option<&Context>> =
        launches.iter().map(|launch| launch.communicator.group().ok()).collect();
    let device_of = |at: usize| match launches[at].communicator.place {
        Place::Device(device) => Some(device),
        Place::Host(_) => None,
    };
    let check = |place: usize| launches[place].check_memory();
    let all = begin_in_turns(&contexts, &device_of, false, &check, &mut |place| {
        launches[place].begin(beside, place)
    });
    for (launch, one) in launches.iter().zip(all) {
        match one {
            Ok(None) => {}
            Ok(Some(pending)) => {
                let place = launch.communicator.place;
                let known = begun.iter().position(|others| others.place == place);
                let at = known.unwrap_or_else(|| {
                    let (same, pending) =
                        (Vec::with_capacity(launches.len()), Vec::with_capacity(launches.len()));
                    begun.push(Begun { place, launches: same, pending });
                    begun.len() - 1
                });
                begun[at].launches.push(launch);
                begun[at].pending.push(pending);
            }
            Err(error) => failed.stop(&launch.communicator, error),
        }
    }
    begun
}

/// Leaves works to their communicators, those of one stream together; what is in host memory is waited for.
/// `note` is told what fails.
fn leave(mut works: Vec<(&Launch, Work)>, mut note: impl FnMut(Error)) {
    while let Some((launch, _)) = works.first() {
        let (communicator, stream) = (&launch.communicator, launch.stream);
        let (same, others) = works
            .into_iter()
            .partition(|(other, _)| Arc::ptr_eq(&other.communicator, communicator) && other.stream == stream);
        works = others;
        let same: Vec<(&Launch, Work)> = same;
        let same = same.into_iter().map(|(_, work)| work);
        match communicator.place {
            Place::Device(_) => communicator.keep(stream, same),
            // Each ends by its own deadline, or when somebody aborts.
            Place::Host(_) => same.filter_map(|work| work.wait(Deadline::NEVER).err()).for_each(&mut note),
        }
    }
}

/// Closes calls of one place together, but waits for none.
fn close(place: Place, pending: Vec<Pending>) -> Result<Closing> {
    match place {
        Place::Host(_) => Ok(Pending::closing_all(pending)),
        Place::Device(device) => {
            let devices = devices()?;
            let _entered = devices.enter(device)?;
            Ok(end_all(pending))
        }
    }
}

/// Whether streams wait for what side streams do, and not the client's thread. Only if the driver loads all
/// kernels of a module with it: else it loads each when it is launched first, and may then wait for the
/// device with a lock held that side streams need; the client's kernels are not ours to load beforehand. And
/// only if there are queues enough.
static STREAMS_WAIT: LazyLock<bool> = LazyLock::new(|| {
    std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER") && queues::are_many()
});

/// Ends what has begun on a device.
fn end(begun: Pending) -> Result<Work> {
    if *STREAMS_WAIT { begun.close() } else { begun.complete() }
}

/// As [`end`], of calls that are closed together.
fn end_all(begun: Vec<Pending>) -> Closing {
    if *STREAMS_WAIT { Pending::closing_all(begun) } else { Pending::completing_all(begun) }
}

/// A default stream is that of the current device: the communicator's, here, whatever the client's is.
struct Current {
    devices: Arc<Devices>,
    device: u32,
}

impl Current {
    /// Where a call is on the default stream of a device.
    fn of(launch: &Launch) -> Result<Option<Current>> {
        match launch.communicator.place {
            Place::Device(device) if StreamHandle(launch.stream).is_default() => {
                Ok(Some(Current { devices: devices()?, device }))
            }
            _ => Ok(None),
        }
    }

    fn enter(&self) -> Result<Entered<'_>> {
        self.devices.enter(self.device)
    }
}

/// What a rank sends to itself, and where that goes.
struct Copy {
    communicator: Arc<Communicator>,
    request: Request,
    from: usize,
    to: usize,
}

/// Pairs the sends of each rank to itself with its receives from itself, in their order, and takes them out
/// of the list.
fn take_messages_to_itself(launches: &mut Vec<Launch>) -> Result<Vec<Copy>> {
    let to_itself =
        |launch: &mut Launch| launch.communicator.group().is_ok_and(|context| launch.is_to_itself(context));
    let (sends, mut receives): (Vec<Launch>, Vec<Launch>) =
        launches.extract_if(.., to_itself).partition(|launch| launch.request.kind == Kind::Send);
    let mut copies = Vec::with_capacity(sends.len());
    for send in sends {
        let answers = |receive: &Launch| Arc::ptr_eq(&receive.communicator, &send.communicator);
        let Some(found) = receives.iter().position(answers) else {
            fail!(
                InvalidUsage,
                "rank {} sends to itself, but does not receive that in the group",
                send.request.root
            )
        };
        let receive = receives.remove(found);
        let (given, wanted) = (&send.request, &receive.request);
        if (&given.counts, given.dtype) != (&wanted.counts, wanted.dtype) {
            fail!(
                InvalidUsage,
                "rank {} sends itself {:?} {} but receives {:?} {}",
                given.root,
                given.counts,
                given.dtype.name(),
                wanted.counts,
                wanted.dtype.name()
            );
        }
        copies.push(Copy {
            communicator: send.communicator,
            request: Request { kind: Kind::Broadcast, input: given.input, root: 0, ..wanted.clone() },
            from: send.stream,
            to: receive.stream,
        });
    }
    if let Some(receive) = receives.first() {
        let rank = receive.request.root;
        fail!(InvalidUsage, "rank {rank} receives from itself, but does not send that in the group");
    }
    Ok(copies)
}

impl Copy {
    /// A broadcast in a group of one, on the receive's stream, between what the send's stream was given
    /// before and what it is given afterwards.
    fn start(&self) -> Result<()> {
        let communicator = &self.communicator;
        // The copy goes over another group.
        let context = communicator.called_group()?;
        check_working(context)?;
        if self.request.counts == Counts::Uniform(0) || self.request.input == self.request.output.cast_const()
        {
            return Ok(());
        }
        let alone = communicator.alone()?;
        let Place::Device(device) = communicator.place else {
            // SAFETY: the client's promise: the buffers are valid until the call is complete.
            return unsafe { alone.run(&self.request, &Call::default()) }.map(drop);
        };
        let devices = devices()?;
        // Its own group has nobody who would hear of a failure.
        context.or_fail_in_list(self.start_on(&devices, device, alone), || self.capture(&devices, device))
    }

    /// The streams, that of the send first.
    fn streams(&self, devices: &Arc<Devices>, device: u32) -> Result<[Stream; 2]> {
        // SAFETY: the client's streams live.
        let borrow = |stream| unsafe { Stream::borrow(devices, device, StreamHandle(stream)) };
        Ok([borrow(self.from)?, borrow(self.to)?])
    }

    /// What one of the streams is captured in, if one is.
    fn capture(&self, devices: &Arc<Devices>, device: u32) -> Result<Capture> {
        let [from, to] = self.streams(devices, device)?;
        Ok(match from.capture()? {
            Capture::None => to.capture()?,
            captured => captured,
        })
    }

    fn start_on(&self, devices: &Arc<Devices>, device: u32, alone: &Context) -> Result<()> {
        let (from, to) = (StreamHandle(self.from), StreamHandle(self.to));
        let _entered = devices.enter(device)?;
        if from != to {
            let [from, to] = self.streams(devices, device)?;
            let event = Event::new(devices, device)?;
            event.record(&from)?;
            to.wait(&event)?;
        }
        let call =
            Call { timeout: Some(operation_timeout()), stream: Some(to), on_device: true, ..Call::default() };
        // SAFETY: the client's promise: the buffers are valid until the call is complete, and the streams
        // live.
        let work = unsafe { alone.start(&self.request, &call) }?;
        if from != to {
            // SAFETY: the client's streams live.
            unsafe { work.block_stream(from) }?;
        }
        self.communicator.keep(self.to, [work]);
        Ok(())
    }
}

/// The factor of a PreMulSum that the device has, as it is when the stream has come this far. Waits for that.
fn read_factor(
    communicator: &Communicator,
    address: u64,
    dtype: DataType,
    stream: StreamHandle,
) -> Result<f64> {
    let Place::Device(device) = communicator.place else {
        fail!(Internal, "a communicator in host memory has a factor in device memory")
    };
    let (context, bytes) = (communicator.called_group()?, dtype.size());
    // SAFETY: the client's stream lives; it promised one element there, until the call is complete.
    let element =
        unsafe { context.read_factor((device, address, bytes), stream, Some(operation_timeout())) }?;
    operator::factor(&element[..bytes], dtype)
}
