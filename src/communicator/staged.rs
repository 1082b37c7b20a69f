//! Calls that name device memory or a stream: where their buffers are, and how they are handed to the engine.

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};

use once_cell::sync::OnceCell;

use super::context::{Context, Place as Membership, class_of};
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::driver::{Location, Memory, Priority};
use crate::cuda::fold::FoldKernels;
use crate::cuda::libcuda::Libcuda;
use crate::cuda::local::Kernels;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::engine::lane::{Destination, Source};
use crate::engine::operation::{Operation, Running};
use crate::engine::point::{Message, Point};
use crate::engine::staged::relay::{Combine, Gather, Limits, MAX_WIRED, MeetingPlace, Plan, Relay, Route};
use crate::engine::staged::{self, Cut, Entry, Exchange, Job, Place, Shape, Side, Staged, StreamOrder};
use crate::engine::wire::Class;
use crate::error::{Result, Status, fail};
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::Signature;
use crate::sys;

/// The devices as one context sees them.
#[derive(Default)]
pub(super) struct Cuda {
    devices: OnceCell<Arc<Devices>>,
    /// For calls without a stream: a stream of ours for each device, which waits for its default stream. What it waits for
    /// must hold up neither callers' streams nor the copies of calls, so it shares queues with neither.
    fronts: Mutex<Vec<Arc<Stream>>>,
    kernels: OnceCell<Arc<dyn Kernels>>,
    #[cfg(test)]
    piece: std::sync::atomic::AtomicUsize,
    #[cfg(test)]
    limits: std::sync::OnceLock<Limits>,
}

impl Cuda {
    /// Those of the machine's driver, unless the context was given others.
    pub(super) fn devices(&self) -> Result<&Arc<Devices>> {
        self.devices.get_or_try_init(Devices::open)
    }

    /// What CUDA knows of an address. Costs next to nothing where no driver is in the process.
    pub(super) fn locate(&self, address: u64) -> Result<Option<Location>> {
        match self.devices.get() {
            Some(devices) => devices.locate(address),
            None => Libcuda::locate_if_loaded(address),
        }
    }

    /// A stream for calls that name none.
    fn front(&self, device: u32) -> Result<Arc<Stream>> {
        let mut fronts = lock(&self.fronts);
        if let Some(front) = fronts.iter().find(|front| front.device() == device) {
            return Ok(front.clone());
        }
        let front = Arc::new(Stream::with_priority(self.devices()?, device, true, Priority::High)?);
        fronts.push(front.clone());
        Ok(front)
    }

    #[cfg(not(test))]
    fn piece_bytes(&self) -> usize {
        staged::relay::knob("UNISONO_X_PIECE", staged::PIECE_BYTES)
    }

    #[cfg(test)]
    fn piece_bytes(&self) -> usize {
        match self.piece.load(std::sync::atomic::Ordering::Relaxed) {
            0 => staged::PIECE_BYTES,
            bytes => bytes,
        }
    }

    /// What folds on the devices.
    fn kernels(&self) -> Arc<dyn Kernels> {
        self.kernels.get_or_init(|| FoldKernels::open()).clone()
    }

    /// Other kernels than the machine's.
    #[cfg(test)]
    pub(super) fn pretend_kernels(&self, kernels: Arc<dyn Kernels>) {
        let _ = self.kernels.set(kernels);
    }

    #[cfg(not(test))]
    fn limits(&self) -> Limits {
        Limits::default()
    }

    #[cfg(test)]
    fn limits(&self) -> Limits {
        self.limits.get().copied().unwrap_or_default()
    }

    /// Relays other calls than those that pay, in other pieces.
    #[cfg(test)]
    pub(super) fn pretend_limits(&self, limits: Limits) {
        let _ = self.limits.set(limits);
    }

    /// Whether devices may exchange without the host.
    #[cfg(not(test))]
    pub(super) fn exchanges(&self) -> bool {
        true
    }

    #[cfg(test)]
    pub(super) fn exchanges(&self) -> bool {
        self.devices.get().is_none()
    }

    /// Other devices than the machine's, which do not exchange, and shorter pieces.
    #[cfg(test)]
    pub(super) fn pretend(&self, devices: &Arc<Devices>, piece: usize) {
        let _ = self.devices.set(devices.clone());
        self.piece.store(piece, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Whether calls may be relayed: where UNISONO_RELAY is 1, on all ranks alike. Not otherwise, since on the only machine where it
/// was tried the first relayed call did not end.
#[cfg(not(test))]
fn relays(_: &Cuda) -> bool {
    static WANTED: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var("UNISONO_RELAY").is_ok_and(|value| value == "1"));
    *WANTED
}

/// Tests do not ask: they name kernels, or relay nothing.
#[cfg(test)]
fn relays(cuda: &Cuda) -> bool {
    cuda.kernels.get().is_some()
}

/// The memory that a call names on this rank.
#[derive(Clone, Copy)]
pub(super) struct Spans {
    input: Span,
    output: Span,
}

#[derive(Clone, Copy)]
struct Span {
    /// The argument, for errors.
    name: &'static str,
    address: *mut u8,
    bytes: usize,
}

impl Spans {
    /// Those of a collective.
    pub(super) fn of_collective(checked: &Checked) -> Spans {
        let element = checked.dtype.size();
        let names = match checked.signature.kind {
            Kind::Broadcast => ["buffer", "buffer"],
            _ => ["sendbuf", "recvbuf"],
        };
        Spans {
            input: Span {
                name: names[0],
                address: checked.input.cast_mut(),
                bytes: checked.input_len() * element,
            },
            output: Span { name: names[1], address: checked.output, bytes: checked.output_len() * element },
        }
    }

    /// Those of a sparse tensor, which is read only: both are inputs.
    pub(super) fn of_tensor(indices: (*const i64, usize), values: (*const u8, usize)) -> Spans {
        Spans {
            input: Span { name: "indices", address: indices.0.cast_mut().cast(), bytes: indices.1 },
            output: Span { name: "values", address: values.0.cast_mut(), bytes: values.1 },
        }
    }

    /// That of a send or receive.
    pub(super) fn of_message(message: &Message) -> Spans {
        let none = |name| Span { name, address: std::ptr::null_mut(), bytes: 0 };
        let (mut input, mut output) = (none("sendbuf"), none("recvbuf"));
        match *message {
            Message::Send { from, .. } => {
                (input.address, input.bytes) = (from.address.cast_mut(), from.len);
            }
            Message::Receive { into, .. } | Message::ReceiveAny { into, .. } => {
                (output.address, output.bytes) = (into.address, into.len);
            }
        }
        Spans { input, output }
    }
}

/// Where a call's memory is, and the stream that it is ordered on.
pub(super) struct Survey {
    pub(super) devices: Arc<Devices>,
    pub(super) device: u32,
    /// Whether any of it is a device's.
    on_device: bool,
    pub(super) input: Place,
    pub(super) output: Place,
    pub(super) input_bytes: usize,
    pub(super) output_bytes: usize,
    /// The caller's, or ours that waits for the default stream.
    pub(super) stream: Arc<Stream>,
    /// Whether it is the caller's.
    pub(super) ordered: bool,
}

/// A call that is staged, or ordered on a stream.
pub(super) struct StagedCall {
    pub(super) survey: Survey,
    pub(super) what: What,
}

pub(super) enum What {
    Collective(Checked),
    Message(Signature, Message),
}

impl StagedCall {
    pub(super) fn collective(survey: Survey, checked: Checked) -> StagedCall {
        StagedCall { survey, what: What::Collective(checked) }
    }

    pub(super) fn message(survey: Survey, signature: Signature, message: Message) -> StagedCall {
        StagedCall { survey, what: What::Message(signature, message) }
    }
}

/// An operation on the host that has begun, for which its stream does not wait yet.
#[must_use = "the stream waits for the operation once this is closed"]
pub(super) struct Begun {
    work: Work,
    close: Option<Close>,
}

/// What has the stream wait.
struct Close {
    stream: Arc<Stream>,
    running: Arc<Running>,
    /// `None`: streams of this device cannot wait for the host, so the host waits.
    exit: Option<Arc<Word>>,
}

impl Begun {
    pub(super) fn closed(work: Work) -> Begun {
        Begun { work, close: None }
    }

    /// Has the call's stream wait for the operation, if the call named one. Returns at once; where streams cannot wait for
    /// the host, when the operation is complete.
    pub(super) fn close(self) -> Result<Work> {
        let Some(Close { stream, running, exit }) = self.close else { return Ok(self.work) };
        let waits = match exit {
            Some(exit) if exit.is_released() => Ok(()),
            Some(exit) => stream.wait_word(&exit),
            None => return self.work.wait(Deadline::NEVER).map(|_| self.work),
        };
        if let Err(error) = waits {
            // Nothing orders the stream behind it: it must not go on.
            let error = error.context("call->stream cannot be made to wait");
            if !running.is_point_to_point() {
                running.group().fail(error.clone());
            }
            running.cancel();
            return Err(error);
        }
        Ok(self.work)
    }
}

impl Survey {
    /// Where the two spans are.
    pub(super) fn places(&self) -> (Place, Place) {
        (self.input, self.output)
    }

    /// The stream that the call is ordered on, and whether it is the caller's.
    pub(super) fn stream(&self) -> (&Stream, bool) {
        (&self.stream, self.ordered)
    }

    pub(super) fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }
}

impl Context {
    /// Whether a call is on device memory or ordered on a stream; if so, where its memory is. `None`: an ordinary call.
    pub(super) fn survey(&self, spans: Spans, call: &Call) -> Result<Option<Survey>> {
        let cuda = self.cuda();
        let locate = |span: &Span| -> Result<Option<Location>> {
            if span.bytes == 0 { Ok(None) } else { cuda.locate(span.address.expose_provenance() as u64) }
        };
        let located = [(spans.input, locate(&spans.input)?), (spans.output, locate(&spans.output)?)];
        let of_device = |location: &Option<Location>| {
            location.is_some_and(|location| matches!(location.memory, Memory::Device | Memory::Managed))
        };
        let on_device = located.iter().any(|(_, location)| of_device(location));
        if !on_device && call.stream.is_none() {
            return Ok(None);
        }
        let devices = cuda.devices()?.clone();
        let stream_device = call.stream.filter(|stream| !stream.is_default());
        let stream_device = stream_device.map(|stream| devices.device_of_stream(stream)).transpose()?;
        let mut device: Option<(u32, &str)> = None;
        let mut managed = None;
        for (span, location) in &located {
            let Some(location) = location else { continue };
            match location.memory {
                Memory::Host => continue,
                // It goes to whichever device asks for it.
                Memory::Managed => {
                    managed = Some(location.device);
                    continue;
                }
                Memory::Device => {}
            }
            let (name, found) = (span.name, location.device);
            if let Some((other, first)) = device
                && other != found
            {
                fail!(
                    InvalidArgument,
                    "{first} is memory of GPU {other}, but {name} of GPU {found}: buffers of a call share a device"
                );
            }
            device.get_or_insert((found, name));
            let room = (location.base.saturating_add(location.bytes))
                .saturating_sub(span.address.expose_provenance() as u64);
            if room < span.bytes as u64 {
                let bytes = span.bytes;
                fail!(
                    InvalidArgument,
                    "{name} has {room} bytes left in its allocation, but {bytes} are needed"
                );
            }
        }
        if let (Some((memory, name)), Some(stream)) = (device, stream_device)
            && memory != stream
        {
            fail!(
                InvalidArgument,
                "call->stream is a stream of GPU {stream}, but {name} is memory of GPU {memory}"
            );
        }
        for (span, location) in &located {
            if location.is_none() && span.bytes > 0 {
                readable(span)?;
            }
        }
        let device = match (device, stream_device, managed, call.stream) {
            (Some((device, _)), ..) | (None, Some(device), ..) => device,
            (None, None, _, Some(stream)) => devices.device_of_stream(stream)?,
            (None, None, managed, None) => managed.unwrap_or(0),
        };
        let stream = match call.stream {
            // SAFETY: whoever made the call promised a stream that lives until the operation is complete.
            Some(handle) => Arc::new(unsafe { Stream::borrow(&devices, device, handle) }?),
            None => cuda.front(device)?,
        };
        if call.stream.is_some() {
            stream.refuse_capture("call->stream", "a call by way of the host cannot be captured")?;
        }
        let place = |span: &Span, location: &Option<Location>| match of_device(location) {
            true => Place::Device(span.address.expose_provenance() as u64),
            false => Place::Host(span.address),
        };
        Ok(Some(Survey {
            device,
            on_device,
            input: place(&located[0].0, &located[0].1),
            output: place(&located[1].0, &located[1].1),
            input_bytes: spans.input.bytes,
            output_bytes: spans.output.bytes,
            stream,
            ordered: call.stream.is_some(),
            devices,
        }))
    }

    /// A collective that the driver keeps this rank from starting fails for all: the others would wait for it.
    pub(super) fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        if let (Err(error), Membership::Group(group)) = (&result, self.place())
            && matches!(error.status(), Status::Cuda | Status::OutOfMemory)
        {
            group.fail(error.context(format_args!("rank {} of '{}'", group.rank(), group.name())));
        }
        result
    }

    /// [`Context::run`] for a call that is staged.
    ///
    /// # Safety
    /// As [`Context::run`].
    pub(super) unsafe fn run_staged(
        &self,
        call: StagedCall,
        request: &Request,
        options: &Call,
    ) -> Result<Completion> {
        let Membership::Group(group) = self.place() else {
            // SAFETY: the caller's promise.
            return unsafe { self.alone_staged(&call, request) }?.wait(Deadline::NEVER);
        };
        if call.survey.ordered {
            // SAFETY: the caller's promise.
            return unsafe { self.begin_staged(call, request, options) }?.close()?.wait(Deadline::NEVER);
        }
        let (class, tag, signature) = self.header(&call, options)?;
        let plan = self.plan_relay(&call, group, request, options, &signature);
        let job = self.job(call, group, request, options);
        let (job, _) = if class == Class::PointToPoint { job } else { self.or_fail(job) }?;
        // SAFETY: the caller's promise.
        group.run(class, tag, signature, options.timeout, |turn| unsafe {
            operation(group, turn, job, plan, signature)
        })
    }

    /// [`Context::begin`] for a call that is staged.
    ///
    /// # Safety
    /// As [`Context::begin`].
    pub(super) unsafe fn begin_staged(
        &self,
        call: StagedCall,
        request: &Request,
        options: &Call,
    ) -> Result<Begun> {
        let Membership::Group(group) = self.place() else {
            // SAFETY: the caller's promise.
            return unsafe { self.alone_staged(&call, request) }.map(Begun::closed);
        };
        let (devices, stream, ordered) =
            (call.survey.devices.clone(), call.survey.stream.clone(), call.survey.ordered);
        let (class, tag, signature) = self.header(&call, options)?;
        let plan = self.plan_relay(&call, group, request, options, &signature);
        let job = self.job(call, group, request, options);
        let (job, exit) = if class == Class::PointToPoint { job } else { self.or_fail(job) }?;
        // SAFETY: the caller's promise.
        let running = group.start(class, tag, signature, options.timeout, |turn| unsafe {
            operation(group, turn, job, plan, signature)
        })?;
        let work = Work::running(running.clone()).on_devices(&devices);
        Ok(Begun { work, close: ordered.then_some(Close { stream, running, exit }) })
    }

    /// The name of a call, and what the ranks compare.
    fn header(&self, call: &StagedCall, options: &Call) -> Result<(Class, u64, Signature)> {
        match &call.what {
            What::Message(signature, _) => Ok((Class::PointToPoint, options.tag.unwrap_or(0), *signature)),
            What::Collective(checked) => {
                let mut checked = checked.clone();
                if let Some(operator) = checked.operator {
                    Reducer::new(checked.dtype, operator, self.size())?;
                }
                if options.algorithm.unwrap_or(0) != 0 {
                    // What is wrong with it is said now. It also notes the algorithm.
                    self.plans().plan(&mut checked, options, self.seat())?;
                }
                // Lists are exchanged whole, as from host memory; so ranks may differ in their memory.
                checked.signature.device = call.survey.on_device && !is_listed(&checked);
                let (class, tag) = class_of(options);
                Ok((class, tag, checked.signature))
            }
        }
    }

    /// How a call is relayed, if it is one that may be: ordered, its algorithm left to the library, one count for all ranks.
    /// The same answer on every rank.
    fn plan_relay(
        &self,
        call: &StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
        signature: &Signature,
    ) -> Option<Plan> {
        let What::Collective(checked) = &call.what else { return None };
        if !relays(self.cuda()) {
            return None;
        }
        let (device, devices) = (call.survey.device, &call.survey.devices);
        // Before any stream waits for a call: loading waits for the device.
        if let Err(error) = self.cuda().kernels().prepare(devices, device, DataType::U8, Operator::Sum) {
            log::debug!("reductions on GPU {device} are not loaded: {error}");
        }
        let Counts::Uniform(count) = request.counts else { return None };
        let automatic = options.tag.is_none() && options.algorithm.unwrap_or(0) == 0;
        let combine = match checked.operator {
            Some(Operator::Custom(_)) => return None,
            Some(operator) => Some(Combine { dtype: checked.dtype, operator }),
            None => None,
        };
        if !automatic || !signature.device {
            return None;
        }
        let place = match group.direct() {
            Some(direct) => MeetingPlace::Boards(direct.clone()),
            None if group.size() <= MAX_WIRED => MeetingPlace::Messages(self.gather_words(options)),
            None => return None,
        };
        let (rank, size, in_place) = (group.rank(), group.size(), checked.alias.is_some());
        let (element, limits) = (checked.dtype.size(), self.cuda().limits());
        let route = Route::new(signature.kind, rank, size, signature.root, count, element, in_place, limits)?;
        Some(Plan { place, route, kernels: self.cuda().kernels(), combine })
    }

    /// Gathers a few bytes of every rank in the course of a call.
    fn gather_words(&self, options: &Call) -> Gather {
        let (context, options) = (self.clone(), options.clone());
        Arc::new(move |group, turn, input, output, bytes| {
            let request = Request {
                kind: Kind::Allgather,
                input,
                output,
                counts: Counts::Uniform(bytes as u64),
                dtype: DataType::U8,
                operator: Operator::Sum,
                root: 0,
            };
            let mut checked = Checked::new(&request, group.rank(), group.size())?;
            // SAFETY: the meeting keeps both until the operation has ended.
            unsafe {
                let make = context.make(group, &mut checked, request.operator, &options, &[])?;
                Ok(make.operation(group, turn))
            }
        })
    }

    /// What the engine is to do, and the word that the stream is to wait for.
    fn job(
        &self,
        call: StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
    ) -> Result<(Job, Option<Arc<Word>>)> {
        let StagedCall { survey, what } = call;
        let Survey { devices, device, on_device, input, output, stream, .. } = survey;
        let entry = match survey.ordered {
            true => Entry::of_caller(&stream, group.endpoint()),
            false => Entry::of_front(&stream, group.endpoint()),
        }?;
        let exit = match survey.ordered && devices.driver().can_wait_value(device)? {
            true => Some(Arc::new(devices.word(device)?)),
            false => None,
        };
        let order = StreamOrder { devices, device, entry, exit: exit.clone() };
        let shape = |bytes, blocks| Shape { bytes, blocks };
        let job = match what {
            What::Message(_, message) => {
                let sends = matches!(message, Message::Send { .. });
                Job {
                    order,
                    input: Side { place: input, shape: shape(survey.input_bytes, 1) },
                    output: Side { place: output, shape: shape(survey.output_bytes, 1) },
                    forwards: false,
                    // A receive has to be posted before the stream has come to it.
                    unstaged: !on_device && sends,
                    element: 1,
                    cut: Cut::whole(),
                    exchange: exchange_message(group, message, options.tag.unwrap_or(0)),
                }
            }
            What::Collective(checked) => {
                let size = group.size() as usize;
                let (reads, writes) = match checked.signature.kind {
                    Kind::Scatter | Kind::ReduceScatter => (size, 1),
                    Kind::Allgather | Kind::Gather => (1, size),
                    Kind::Alltoall => (size, size),
                    _ => (1, 1),
                };
                let element = checked.dtype.size();
                let cut = match request.counts {
                    Counts::Uniform(count) if on_device => {
                        Cut::even(count, reads.max(writes) as u64, element, self.cuda().piece_bytes())
                    }
                    // Ranks with host memory do not cut, and not every rank knows a list.
                    _ => Cut::whole(),
                };
                // A broadcast's root has its result already, unless it is to go elsewhere.
                let forwards = checked.signature.kind == Kind::Broadcast && survey.input_bytes > 0;
                let written = if forwards && checked.alias.is_some() { 0 } else { survey.output_bytes };
                Job {
                    order,
                    input: Side { place: input, shape: shape(survey.input_bytes, reads) },
                    output: Side { place: output, shape: shape(written, writes) },
                    forwards,
                    unstaged: !on_device,
                    element,
                    cut,
                    exchange: self.exchange_pieces(request, options),
                }
            }
        };
        Ok((job, exit))
    }

    /// Exchanges pieces as calls on host memory.
    fn exchange_pieces(&self, request: &Request, options: &Call) -> Exchange {
        let (context, request, options) = (self.clone(), request.clone(), options.clone());
        Box::new(move |group, turn, piece, input, output| {
            let counts = if piece.whole { request.counts.clone() } else { Counts::Uniform(piece.len) };
            let request = Request { input, output, counts, ..request.clone() };
            let mut checked = Checked::new(&request, group.rank(), group.size())?;
            // SAFETY: the engine gives memory of the piece's size, and keeps it until the operation has ended.
            unsafe {
                let make = context.make(group, &mut checked, request.operator, &options, &[])?;
                Ok(make.operation(group, turn))
            }
        })
    }
}

/// Whether not every rank knows how much every other has.
fn is_listed(checked: &Checked) -> bool {
    checked.listed || checked.signature.count & crate::signature::COUNT_IS_DIGEST != 0
}

/// The operation of a call that is staged.
///
/// # Safety
/// As [`Staged::new`].
unsafe fn operation(
    group: &Group,
    turn: &Turn,
    job: Job,
    plan: Option<Plan>,
    signature: Signature,
) -> Box<dyn Operation> {
    // SAFETY: the caller's promise.
    let staged = unsafe { Staged::new(turn, job) };
    match (signature.kind, plan) {
        (Kind::Receive | Kind::ReceiveAny, _) => Box::new(staged.begun(group)),
        (_, Some(plan)) => Box::new(Relay::new(turn, staged, plan)),
        (_, None) => Box::new(staged),
    }
}

/// Exchanges a message whole.
fn exchange_message(group: &Arc<Group>, message: Message, tag: u64) -> Exchange {
    let mut place = match message {
        Message::Send { to, .. } => Some(group.sends().queue(to, tag)),
        _ => None,
    };
    Box::new(move |group, turn, _, input, output| -> Result<Box<dyn Operation>> {
        let message = match &message {
            &Message::Send { to, from } => {
                Message::Send { to, from: Source { address: input.cast_const(), len: from.len } }
            }
            &Message::Receive { from, into } => {
                Message::Receive { from, into: Destination { address: output, len: into.len } }
            }
            Message::ReceiveAny { of, into } => {
                let into = Destination { address: output, len: into.len };
                Message::ReceiveAny { of: of.clone(), into }
            }
        };
        // SAFETY: the engine gives memory of the message's size, and keeps it until the operation has ended.
        Ok(Box::new(unsafe { Point::in_turn(group, turn, message, place.take()) }))
    })
}

/// Host memory that a call names beside a device or a stream must be there: freed device memory looks like it.
fn readable(span: &Span) -> Result<()> {
    let mut byte = [0u8];
    let address = span.address.expose_provenance() as u64;
    match sys::memory::read_process(std::process::id(), address, &mut byte) {
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::EFAULT)) => {
            let name = span.name;
            fail!(
                InvalidArgument,
                "{name} ({address:#x}) is neither memory that CUDA knows nor memory of this process: has it been freed?"
            )
        }
        // The kernel may forbid the question.
        _ => Ok(()),
    }
}
