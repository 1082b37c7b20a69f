//! Calls that name device memory or a stream: where their buffers are, and how they are handed to the engine.

pub(super) mod couriers;
#[cfg(test)]
mod tests;
mod ways;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use self::ways::Way;
use super::ahead;
use super::calls::class_of;
use super::context::{Context, Place as Membership};
use super::plans::PORTION_BYTES;
use super::survey::Survey;
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked::Checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::courier::Errand;
use crate::cuda::driver::{Capture, Location, StreamHandle, least_limit};
use crate::cuda::fold::FoldKernels;
use crate::cuda::libcuda::Libcuda;
use crate::cuda::local::{Kernels, limited};
use crate::cuda::scalar;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::engine::callbacks::is_calling_back;
use crate::engine::device::Loads;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::{Operation, Running};
use crate::engine::point::{self, Message, Pieces};
use crate::engine::staged::relay::{Limits, Relay};
use crate::engine::staged::{
    self, Blocks, Cut, Entry, Exchange, Job, Lists, Shape, Side, Staged, StreamOrder,
};
use crate::engine::wire::Class;
use crate::error::{Error, Result};
use crate::reduce::Reducer;
use crate::signature::Signature;
use crate::sys;

/// The devices as one context sees them.
#[derive(Default)]
pub(super) struct Cuda {
    devices: OnceCell<Arc<Devices>>,
    kernels: OnceCell<Arc<dyn Kernels>>,
    /// When they could last not be loaded, by GPU.
    refused: Mutex<HashMap<u32, Instant>>,
    #[cfg(test)]
    piece: std::sync::atomic::AtomicUsize,
    #[cfg(test)]
    limits: std::sync::OnceLock<Limits>,
    #[cfg(test)]
    loads: std::sync::OnceLock<Loads>,
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

    /// The device of a stream, if it is one that is being captured.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn capturing(&self, stream: Option<StreamHandle>) -> Result<Option<u32>> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.device_and_capture(stream) }?;
        Ok(found.and_then(|(device, capture)| matches!(capture, Capture::Active(_)).then_some(device)))
    }

    /// The capture that a stream is in.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn capture(&self, stream: Option<StreamHandle>) -> Result<Capture> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.device_and_capture(stream) }?;
        Ok(found.map_or(Capture::None, |(_, capture)| capture))
    }

    /// The device of a stream, and the capture that it is in.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn device_and_capture(&self, stream: Option<StreamHandle>) -> Result<Option<(u32, Capture)>> {
        let Some(stream) = stream.filter(|stream| !stream.is_legacy()) else { return Ok(None) };
        let devices = self.devices()?;
        let device = devices.device_of_stream(stream)?;
        // SAFETY: the caller's promise.
        let capture = unsafe { Stream::borrow(devices, device, stream) }?.capture()?;
        Ok(Some((device, capture)))
    }

    /// Whether such a call is on host memory because this process has no driver: what most calls are on machines without
    /// GPUs, and short ones take half a microsecond in all.
    pub(super) fn has_no_part_in(&self, call: &Call) -> bool {
        call.stream.is_none() && !call.on_device && self.devices.get().is_none() && !Libcuda::is_loaded()
    }

    /// A stream for calls that name none.
    pub(super) fn front(&self, device: u32) -> Result<Arc<Stream>> {
        staged::front(self.devices()?, device)
    }

    pub(super) fn piece_bytes(&self) -> usize {
        self.pretended_piece().unwrap_or(staged::PIECE_BYTES)
    }

    /// Bytes of the messages of a long block: see [`PORTION_BYTES`].
    pub(super) fn portion_bytes(&self) -> usize {
        self.pretended_piece().unwrap_or(PORTION_BYTES)
    }

    #[cfg(not(test))]
    fn pretended_piece(&self) -> Option<usize> {
        None
    }

    #[cfg(test)]
    fn pretended_piece(&self) -> Option<usize> {
        let piece = self.piece.load(std::sync::atomic::Ordering::Relaxed);
        (piece > 0).then_some(piece)
    }

    /// What folds on the devices.
    fn kernels(&self) -> Arc<dyn Kernels> {
        self.kernels.get_or_init(|| FoldKernels::open()).clone()
    }

    /// What copies; in tests, where kernels are named.
    fn copier(&self) -> Option<Arc<dyn Kernels>> {
        if cfg!(test) { self.kernels.get().cloned() } else { Some(self.kernels()) }
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

    /// What could not be loaded was tried so much earlier.
    #[cfg(test)]
    pub(super) fn pretend_later(&self, by: Duration) {
        lock(&self.refused).values_mut().for_each(|at| *at -= by);
    }

    /// Whether devices may exchange without the host.
    #[cfg(not(test))]
    pub(super) fn exchanges(&self) -> bool {
        true
    }

    #[cfg(test)]
    pub(super) fn exchanges(&self) -> bool {
        self.devices.get().is_none() || self.loads.get().is_some()
    }

    /// Where kernels come from by which devices exchange.
    #[cfg(not(test))]
    pub(super) fn loads(&self) -> Loads {
        Loads::OWN
    }

    #[cfg(test)]
    pub(super) fn loads(&self) -> Loads {
        self.loads.get().copied().unwrap_or(Loads::OWN)
    }

    /// Other kernels than the library's.
    #[cfg(test)]
    pub(super) fn pretend_loads(&self, loads: Loads) {
        let _ = self.loads.set(loads);
    }

    /// Other devices than the machine's, which do not exchange, and shorter pieces.
    #[cfg(test)]
    pub(super) fn pretend(&self, devices: &Arc<Devices>, piece: usize) {
        let _ = self.devices.set(devices.clone());
        self.piece.store(piece, std::sync::atomic::Ordering::Relaxed);
    }
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
    /// Whether the thread waits for it, once it is closed.
    crowded: bool,
}

/// What has the stream wait.
struct Close {
    stream: Arc<Stream>,
    running: Arc<Running>,
    exit: Exit,
}

/// What a stream waits for until a call has ended.
enum Exit {
    /// A courier, once it is launched.
    Courier(Launch),
    /// A word that side streams release.
    Word(Arc<Word>),
    /// Nothing: the stream may not wait for the host, so the host waits.
    Thread,
}

/// A courier that is to be launched, by this call or another one that shares it.
pub(super) struct Launch {
    errand: Errand,
    kernels: Arc<dyn Kernels>,
}

impl Launch {
    pub(super) fn new(errand: Errand, kernels: Arc<dyn Kernels>) -> Launch {
        errand.courier().promise();
        Launch { errand, kernels }
    }

    /// Gives it to `stream`, if no other call has: several share it.
    ///
    /// # Safety
    /// As [`Courier::launch`](crate::cuda::courier::Courier::launch).
    pub(super) unsafe fn give(self, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.errand.courier().launch(stream, &*self.kernels) }
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        self.errand.courier().withdraw();
    }
}

impl Begun {
    pub(super) fn closed(work: Work) -> Begun {
        Begun { work, close: None, crowded: false }
    }

    /// As [`Begun::close`], but waits itself for what the driver is asked to do meanwhile.
    pub(super) fn complete(self, copies: &mut Copies) -> Result<Work> {
        match self.close {
            Some(Close { exit: Exit::Word(exit), .. }) => {
                let ended = self.work.wait(Deadline::NEVER);
                ended.inspect_err(|_| copies.add(exit)).map(|_| self.work)
            }
            _ => self.close(copies),
        }
    }

    /// Whether it has a courier [apart](couriers::apart).
    pub(super) fn is_apart(&self) -> bool {
        let is_apart =
            |running: &Running| couriers::apart(running.group(), !running.is_point_to_point()).is_some();
        self.close.as_ref().is_some_and(|close| is_apart(&close.running))
    }

    /// Whether whoever closes it is to wait for it: what its stream is given next may hold up what it waits for.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded && !is_calling_back()
    }

    /// As [`Begun::close`], but leaves it to run where its stream may not wait.
    pub(super) fn part(self) -> Result<Work> {
        match &self.close {
            Some(Close { exit: Exit::Thread, .. }) => Ok(self.work),
            _ => self.close_alone(),
        }
    }

    /// As [`Begun::close`], of a call that is closed with no other.
    fn close_alone(self) -> Result<Work> {
        let mut copies = Copies::default();
        let closed = self.close(&mut copies);
        copies.wait();
        closed
    }

    /// Has the call's stream wait for the operation, if the call named one. Returns at once; where streams may not wait for
    /// the host, when the operation is complete. If it fails its caller has the memory back when `copies` have been waited for.
    pub(super) fn close(self, copies: &mut Copies) -> Result<Work> {
        let Some(Close { stream, running, exit }) = self.close else { return Ok(self.work) };
        let noted = || ahead::note(&stream, &running);
        let waits = match exit {
            Exit::Courier(launch) => {
                // SAFETY: whoever began the call has promised its memory and its stream until it has ended.
                let given = unsafe { launch.give(&stream) };
                given.inspect(|()| noted()).map_err(|error| (error, None))
            }
            Exit::Word(exit) if exit.is_released() => Ok(()),
            Exit::Word(exit) => {
                stream.wait_word(&exit).inspect(|()| noted()).map_err(|error| (error, Some(exit)))
            }
            Exit::Thread => return self.work.wait(Deadline::NEVER).map(|_| self.work),
        };
        if let Err((error, exit)) = waits {
            // Nothing orders the stream behind it: it must not go on.
            let error = error.context("call->stream cannot be made to wait");
            let group = running.group();
            group.fail(error.context(format_args!("rank {} of '{}'", group.rank(), group.name())));
            running.cancel();
            exit.into_iter().for_each(|exit| copies.add(exit));
            return Err(error);
        }
        Ok(self.work)
    }
}

/// How long calls that their streams do not wait for are waited for on the host, once they are given up.
const COPIES: Duration = Duration::from_secs(1);

/// How long after kernels could not be loaded they are tried again.
const LOADED_AGAIN: Duration = Duration::from_secs(60);

/// The copies of calls that have failed and for which no stream waits: the words that are released behind them.
#[derive(Default)]
pub(super) struct Copies(Vec<Arc<Word>>);

impl Copies {
    fn add(&mut self, exit: Arc<Word>) {
        self.0.push(exit);
    }

    /// Waits for all of them, for [`COPIES`] at most: the caller has the memory back then.
    pub(super) fn wait(self) {
        let until = Deadline::after(COPIES);
        while !self.0.iter().all(|exit| exit.is_released()) && !until.expired() {
            sys::process::yield_now();
        }
    }
}

impl Context {
    /// A collective that this rank is kept from starting fails for all: the others would wait for it.
    pub(super) fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        self.or_fail_in(Class::Ordered, result)
    }

    /// [`Group::or_fail`].
    pub(super) fn or_fail_in<T>(&self, class: Class, result: Result<T>) -> Result<T> {
        match self.place() {
            Membership::Group(group) => group.or_fail(class, result),
            Membership::Solo => result,
        }
    }

    /// [`Group::or_fail_on`].
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn or_fail_on<T>(
        &self,
        stream: Option<StreamHandle>,
        class: Class,
        result: Result<T>,
    ) -> Result<T> {
        match self.place() {
            // SAFETY: the caller's promise.
            Membership::Group(group) => {
                group.or_fail_on(class, result, || unsafe { self.cuda().capture(stream) })
            }
            Membership::Solo => result,
        }
    }

    /// The element of `bytes` bytes at `address`, memory of `device`, that a collective on `stream` takes as its factor, as it is when the
    /// stream has come this far. Waits for that, as long as the call may take. A rank that is kept from it fails the group, as
    /// [`Context::or_fail_on`] has it.
    ///
    /// # Safety
    /// The memory is valid until then, and the stream lives.
    pub unsafe fn read_factor(
        &self,
        (device, address, bytes): (u32, u64, usize),
        stream: StreamHandle,
        timeout: Option<Duration>,
    ) -> Result<[u8; scalar::MOST_BYTES]> {
        let deadline = Deadline::after(timeout.unwrap_or(self.timeout()));
        // Whether it is captured is asked in there, too.
        let entered = self.cuda().devices().and_then(|devices| Ok((devices, devices.enter(device)?)));
        let read = entered.as_ref().map_err(Error::clone).and_then(|(devices, _)| {
            // SAFETY: the caller's promise.
            let stream = unsafe { Stream::borrow(devices, device, stream) }?;
            stream.refuse_capture(
                "stream",
                "a PreMulSum whose factor is in device memory reads it on the host, which a graph cannot: give it as ncclScalarHostImmediate",
            )?;
            // SAFETY: as above.
            let read = unsafe { stream.read_scalar(address, bytes, deadline) };
            read.map_err(|error| error.context("reading the factor of a PreMulSum"))
        });
        // SAFETY: as above.
        unsafe { self.or_fail_on(Some(stream), Class::Ordered, read) }
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
            return unsafe { self.alone_staged(&call, request, options) }?.wait(Deadline::NEVER);
        };
        if call.survey.ordered {
            // SAFETY: the caller's promise.
            return unsafe { self.begin_staged(call, request, options) }?
                .close_alone()?
                .wait(Deadline::NEVER);
        }
        let (class, tag, signature) = self.header(&call, options)?;
        let way = self.or_fail_in(class, self.way(&call, group, request, options, &signature))?;
        let job = self.job(call, group, request, options, &way);
        let (job, _) = self.or_fail_in(class, job)?;
        // SAFETY: the caller's promise.
        let draft = self.or_fail_in(class, unsafe { Draft::new(job, way, signature, true) })?;
        group.run(class, tag, signature, options.timeout, |turn| draft.begin(group, turn))
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
            return unsafe { self.alone_staged(&call, request, options) }.map(Begun::closed);
        };
        let (devices, stream, ordered) =
            (call.survey.devices.clone(), call.survey.stream.clone(), call.survey.ordered);
        let (class, tag, signature) = self.header(&call, options)?;
        if ordered {
            let deadline = Deadline::after(options.timeout.unwrap_or(group.timeout()));
            self.or_fail_in(class, ahead::make_room(&stream, group, deadline))?;
        }
        let way = self.or_fail_in(class, self.way(&call, group, request, options, &signature))?;
        let job = self.job(call, group, request, options, &way);
        let (job, exit) = self.or_fail_in(class, job)?;
        let first = !ordered || !ahead::waits(&stream);
        // SAFETY: the caller's promise.
        let draft = self.or_fail_in(class, unsafe { Draft::new(job, way, signature, first) })?;
        let running = group.start(class, tag, signature, options.timeout, |turn| draft.begin(group, turn))?;
        let work = Work::running(running.clone()).on_devices(&devices);
        let crowded = matches!(exit, Exit::Courier(_)) && couriers::is_crowded(&stream, group);
        Ok(Begun { work, close: ordered.then_some(Close { stream, running, exit }), crowded })
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
                // Lists that not every rank knows are exchanged as from host memory; so ranks may differ in
                // their memory.
                checked.signature.device = call.survey.on_device && !checked.listed;
                let (class, tag) = class_of(options);
                Ok((class, tag, checked.signature))
            }
        }
    }

    /// What copies on a call's device, each copy with at most `max_blocks` blocks, and no more than the context allows; `None`: it has no
    /// kernels. The answer may be another one for the next call.
    pub(super) fn copier(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        max_blocks: u32,
    ) -> Option<Arc<dyn Kernels>> {
        let kernels = self.load_copier(devices, device)?;
        Some(limited(kernels, least_limit([self.max_blocks(), max_blocks])))
    }

    /// Loads what copies on a call's device, before any stream waits for a call of ours, since loading waits for the device. A call that
    /// follows one for which that failed does not try again at once: it would wait for it as long.
    fn load_copier(&self, devices: &Arc<Devices>, device: u32) -> Option<Arc<dyn Kernels>> {
        let (dtype, operator) = staged::COPY;
        let kernels = self.cuda().copier()?;
        let refused = || lock(&self.cuda().refused);
        if refused().get(&device).is_some_and(|at| at.elapsed() < LOADED_AGAIN) {
            return None;
        }
        match kernels.prepare(devices, device, dtype, operator) {
            Ok(()) => Some(kernels),
            Err(error) => {
                refused().insert(device, Instant::now());
                log::warn!("GPU {device} copies by its copy engines in calls of '{}': {error}", self.name());
                None
            }
        }
    }

    /// What the engine is to do, and what the stream is to wait for.
    fn job(
        &self,
        call: StagedCall,
        group: &Arc<Group>,
        request: &Request,
        options: &Call,
        way: &Way,
    ) -> Result<(Job, Exit)> {
        let Survey { devices, device, on_device, ordered, .. } = &call.survey;
        let copier = match way {
            _ if !*on_device && !*ordered => None,
            // Limited already.
            Way::Relayed(plan) => self.load_copier(devices, *device).map(|_| plan.kernels.clone()),
            _ => self.copier(devices, *device, options.max_blocks),
        };
        let StagedCall { survey, what } = call;
        let Survey { devices, device, on_device, input, output, stream, .. } = survey;
        staged::prepare(&devices, device)?;
        let (mut errand, mut word) = (None, None);
        let entry = match (survey.ordered, &copier) {
            (true, Some(_)) => {
                let max_blocks = least_limit([self.max_blocks(), options.max_blocks]);
                let duty = way.duty(survey.input_bytes.max(survey.output_bytes), max_blocks);
                let apart = couriers::apart(group, matches!(what, What::Collective(_)));
                let courier = couriers::of(&stream, duty, apart)?;
                Entry::of_courier(errand.insert(courier).courier(), group.endpoint())
            }
            (true, None) => Entry::of_caller(&stream, group.endpoint())?,
            (false, _) => Entry::of_front(&stream, group.endpoint())?,
        };
        let exit = match (&errand, &copier) {
            (Some(errand), Some(kernels)) => Exit::Courier(Launch::new(errand.clone(), kernels.clone())),
            _ if survey.ordered && ahead::may_wait(&stream)? => {
                Exit::Word(word.insert(Arc::new(devices.word(device)?)).clone())
            }
            _ => Exit::Thread,
        };
        let order = StreamOrder { devices, device, entry, errand, exit: word, copier };
        let shape = |bytes, blocks| Shape { bytes, blocks: Blocks::Even(blocks) };
        let job = match what {
            What::Message(_, message) => {
                let sends = matches!(message, Message::Send { .. });
                // A receive has to be posted before the stream has come to it.
                let unstaged = !on_device && sends;
                let piece = self.cuda().piece_bytes();
                let bytes = survey.input_bytes.max(survey.output_bytes);
                Job {
                    order,
                    input: Side { place: input, shape: shape(survey.input_bytes, 1) },
                    output: Side { place: output, shape: shape(survey.output_bytes, 1) },
                    forwards: false,
                    unstaged,
                    element: 1,
                    cut: if unstaged { Cut::whole() } else { point::cut(bytes, piece) },
                    exchange: exchange_message(group, message, options.tag.unwrap_or(0), piece),
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
                let (element, piece) = (checked.dtype.size(), self.cuda().piece_bytes());
                let shape = |bytes, blocks| match &request.counts {
                    // What is one block is this rank's.
                    Counts::Blocks(counts) => {
                        let own = checked.rank as usize;
                        let counts = if blocks == 1 { &counts[own..=own] } else { counts };
                        Shape { bytes, blocks: Blocks::Listed(counts.into()) }
                    }
                    _ => shape(bytes, blocks),
                };
                let cut = match &request.counts {
                    Counts::Uniform(count) if on_device => {
                        Cut::even(*count, reads.max(writes) as u64, element, piece)
                    }
                    Counts::Blocks(counts) if on_device && !checked.listed => {
                        Cut::listed(counts, element, piece)
                    }
                    // Ranks with host memory do not cut, and not every rank knows other lists.
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
            let counts = match &request.counts {
                counts if piece.whole => counts.clone(),
                Counts::Blocks(counts) => {
                    Counts::Blocks(counts.iter().map(|&count| piece.of(count).1).collect())
                }
                _ => Counts::Uniform(piece.len),
            };
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

/// The operation of a call that is staged, before its turn.
enum Draft {
    Staged(Staged),
    /// Begins as soon as it has its turn.
    Receive(Staged),
    Relay(Box<Relay>),
    Lists(Lists),
}

impl Draft {
    /// Has what the call needs of the driver made: others wait for nobody's turn meanwhile. Whether it is the `first` that its
    /// stream waits for.
    ///
    /// # Safety
    /// As [`Staged::new`].
    unsafe fn new(job: Job, way: Way, signature: Signature, first: bool) -> Result<Draft> {
        if let Way::Listed(routes) = way {
            // SAFETY: the caller's promise.
            return unsafe { Lists::new(job, routes) }.provided().map(Draft::Lists);
        }
        // SAFETY: the caller's promise.
        let staged = unsafe { Staged::new(job) };
        match (signature.kind, way) {
            (Kind::Receive | Kind::ReceiveAny, _) => staged.provided(true).map(Draft::Receive),
            (_, Way::Relayed(plan)) => {
                Relay::new(staged, *plan, first).map(|relay| Draft::Relay(Box::new(relay)))
            }
            _ => staged.provided(first).map(Draft::Staged),
        }
    }

    fn begin(self, group: &Group, turn: &Turn) -> Box<dyn Operation> {
        match self {
            Draft::Staged(staged) => Box::new(staged.at(turn)),
            Draft::Receive(staged) => Box::new(staged.at(turn).begun(group)),
            Draft::Relay(relay) => Box::new(relay.at(turn)),
            Draft::Lists(lists) => Box::new(lists.at(turn)),
        }
    }
}

/// Exchanges a message, in pieces of `piece` bytes if it is longer.
fn exchange_message(group: &Arc<Group>, message: Message, tag: u64, piece: usize) -> Exchange {
    let place = match message {
        Message::Send { to, .. } => Some(group.sends().queue(to, tag)),
        _ => None,
    };
    let mut pieces = Pieces::new(message, piece, place);
    Box::new(move |group, turn, piece, input, output| {
        let address = if input.is_null() { output } else { input };
        // SAFETY: the engine gives memory of the piece's size, and keeps it until the operation has ended.
        unsafe { pieces.next(group, turn, piece, address) }
    })
}
