//! Algorithm objects: a fixed operation over fixed buffers, checked and planned once, run many times.

use std::sync::Arc;

use super::batch::Pending;
use super::calls::sends_no_elements;
use super::context::{Context, Membership};
use super::device::not_on_host;
use super::several::{Parts, Several};
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked;
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::driver::{Location, Memory, StreamHandle, least_limit};
use crate::cuda::event::Event;
use crate::cuda::exchange::Stages;
use crate::cuda::fold::FoldKernels;
use crate::cuda::local::limited;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::group::is_everybodys;
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator};

/// What an algorithm object is made from.
pub struct AlgorithmOptions {
    /// The operation.
    pub kind: Kind,
    /// ABI number of the algorithm; 0 is automatic.
    pub algorithm: i32,
    /// This rank's buffers, all in host memory or all in device memory. Allreduce, reduce and broadcast: any
    /// number, each of `count` elements, in place; any two are apart or the same. Scatter: a block for each
    /// rank, and the output; or else, as the others, input and output.
    pub buffers: Vec<*mut u8>,
    /// For device memory, a stream for each buffer, or none at all. With streams a run is ordered on them;
    /// without, it comes after what the devices' default streams were given, and its result is there when it
    /// returns.
    pub streams: Vec<StreamHandle>,
    /// Elements, as [`Counts::Uniform`].
    pub count: u64,
    /// Of which type.
    pub dtype: DataType,
    /// Combined how. Average divides by the number of all buffers of all ranks, which have equally many:
    /// others are a mismatch. Of floats shorter than 4 bytes all ranks have one buffer, or all have several:
    /// others are a mismatch, too.
    pub operator: Operator,
    /// The root rank.
    pub root: u32,
    /// Which of the root's buffers is the source of a broadcast.
    pub root_buffer: usize,
    /// As in [`Call`]; its stream is unset, and its algorithm unset or the object's.
    pub call: Call,
}

/// A fixed operation over fixed buffers. With several buffers per rank they are reduced here first, and all
/// of them receive the result.
pub struct Prepared {
    context: Context,
    request: Request,
    call: Call,
    body: Body,
    name: &'static str,
}

/// How a run goes about it.
enum Body {
    /// Host memory, with all buffers of an operation that takes several, or the blocks of a scatter; or one
    /// call on device memory without streams.
    Call(Vec<*mut u8>),
    /// One call on device memory, or on none, in the order of a stream; and that of the input, if it has
    /// another.
    Stream(Option<Apart>),
    /// Several device pointers.
    Several(Box<Several>),
}

// SAFETY: the buffers are promised to be usable from the library's threads (`Prepared::new`).
unsafe impl Send for Prepared {}
// SAFETY: as above; runs of one object are ordered by its context.
unsafe impl Sync for Prepared {}

/// Whether a rank ignores this buffer of an object's: off the root what is gathered goes nowhere, and what is
/// scattered is not its.
pub fn ignores(kind: Kind, is_root: bool, buffer: usize, buffers: usize) -> bool {
    let is_output = buffer + 1 == buffers;
    !is_root && (kind == Kind::Gather && is_output || kind == Kind::Scatter && !is_output)
}

impl Prepared {
    /// Checks everything and builds the schedule. On device memory, everything that runs need is made here.
    ///
    /// # Safety
    /// The buffers and the streams stay valid until the object is dropped and its runs have ended.
    pub unsafe fn new(context: &Context, mut options: AlgorithmOptions) -> Result<Prepared> {
        let (kind, is_root) = (options.kind, context.rank() == options.root);
        let buffers = options.buffers.len();
        for (_, buffer) in options
            .buffers
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| ignores(kind, is_root, *index, buffers))
        {
            *buffer = std::ptr::null_mut();
        }
        check(&options, is_root, context.size())?;
        let (mut request, mut call) = (request_of(&options, is_root), call_of(&options));
        let name = match blocks_of(&options, is_root) {
            [] if takes_many(kind) => context.algorithm(&request, &call, &options.buffers)?,
            [] => context.algorithm(&request, &call, &[])?,
            blocks => context.algorithm_of_blocks(&request, &call, blocks)?,
        };
        // SAFETY: the caller's promise.
        let body = unsafe { body_of(context, options, &mut request, &mut call) }?;
        Ok(Prepared { context: context.clone(), request, call, body, name })
    }

    /// Runs once: with streams, until everything is enqueued, else to completion.
    pub fn run(&self) -> Result<()> {
        match &self.body {
            Body::Call(buffers) => {
                // SAFETY: `new`'s promise.
                unsafe { self.context.run_buffers(&self.request, &self.call, buffers) }.map(|_| ())
            }
            Body::Stream(apart) => self.enqueue_one(apart.as_ref()).map(|_| ()),
            Body::Several(several) => {
                let work = self.enqueue(several)?;
                if !several.synchronous() {
                    return Ok(());
                }
                let result = work.map_or(Ok(Completion::default()), |work| work.wait(Deadline::NEVER));
                // Also after a failure: what is enqueued touches the pointers.
                result.and(self.wait_for_streams(several))
            }
        }
    }

    /// Starts a run.
    pub fn start(&self) -> Result<Work> {
        match &self.body {
            // SAFETY: `new`'s promise.
            Body::Call(buffers) => unsafe { self.context.start_buffers(&self.request, &self.call, buffers) },
            Body::Stream(apart) => self.enqueue_one(apart.as_ref()),
            Body::Several(several) => {
                let work = self.enqueue(several)?;
                // Streams may be done before it: a root's wait for no other rank.
                let host = work.as_ref().and_then(Work::host);
                let group = match self.context.membership() {
                    Membership::Group(group) => Some(group.clone()),
                    Membership::Solo => None,
                };
                // In a group of one nobody else looks. Another's context is its callers' alone.
                let alone = group.is_none().then(|| self.context.clone());
                let (name, patience) = (self.context.name().to_owned(), self.patience());
                let failure = move |done: bool| {
                    let failed = match (&work, &alone) {
                        // The call between the ranks is the main stream's alone. A look calls nothing back.
                        (Some(work), _) => work.peek()?.err(),
                        (None, Some(context)) if !done => context.failure(),
                        (None, _) => None,
                    };
                    failed.or_else(|| (!done && patience.expired()).then(|| late(&name)))
                };
                let joined = several.join();
                if let Err(error) = &joined {
                    self.give_up(several, error);
                }
                Ok(match joined? {
                    Some(joined) => Work::composed(group.as_deref(), host, joined, failure),
                    // In a group of one: it is done whenever its graph is replayed.
                    None => Work::ended(Ok(Completion::default())),
                })
            }
        }
    }

    /// The name of the algorithm.
    pub fn algorithm(&self) -> &'static str {
        self.name
    }

    /// Enqueues what several pointers need, with the call between the ranks. The work is that call's.
    fn enqueue(&self, several: &Several) -> Result<Option<Work>> {
        // In a group of one no call between ranks refuses it.
        if let Some(error) = self.context.failure() {
            return Err(error);
        }
        // SAFETY: `new`'s promise; `several` owns what the request names besides.
        let begin = || unsafe { self.context.begin(&self.request, &self.call) };
        let enqueued = several.enqueue(begin, Pending::close);
        if let Err(error) = &enqueued {
            self.give_up(several, error);
        }
        enqueued
    }

    /// A run over several pointers has failed on this rank in its course.
    fn give_up(&self, several: &Several, error: &Error) {
        // SAFETY: `new`'s promise.
        let capture = || unsafe { self.context.cuda().capture(self.call.stream) };
        if is_everybodys(error, Class::Ordered, capture) {
            // The others wait for this rank, which will not come.
            self.context.fail(error.context(format_args!("rank {}", self.context.rank())));
        }
        if several.synchronous()
            && let Err(error) = self.wait_for_streams(several)
        {
            log::warn!("what a run that failed was given may still touch its pointers: {error}");
        }
    }

    /// Waits until the streams of `several`, which are the library's, have done what they were given.
    fn wait_for_streams(&self, several: &Several) -> Result<()> {
        several.wait(self.patience())
    }

    fn patience(&self) -> Deadline {
        Deadline::after(self.call.timeout.unwrap_or(self.context.timeout()))
    }

    fn enqueue_one(&self, apart: Option<&Apart>) -> Result<Work> {
        let ready = apart.map_or(Ok(()), Apart::before);
        // SAFETY: `new`'s promise.
        unsafe { self.context.or_fail_on(self.call.stream, Class::Ordered, ready) }?;
        // SAFETY: as above.
        let work = unsafe { self.context.begin(&self.request, &self.call) }?.close()?;
        // SAFETY: as above.
        let after = unsafe {
            self.context.or_fail_on(self.call.stream, Class::Ordered, apart.map_or(Ok(()), Apart::after))
        };
        if let (Err(_), Some(apart)) = (&after, apart) {
            // It is under way, and its memory the caller's when this returns. Copies may go on behind a work
            // that has failed.
            let _ = work.wait(self.patience());
            if let Err(error) = apart.output.synchronize(self.patience()) {
                log::warn!("what a run that failed was given may still touch its memory: {error}");
            }
        }
        after.map(|()| work)
    }
}

/// Whether the operation takes any number of buffers, each of which is input and output.
fn takes_many(kind: Kind) -> bool {
    matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast)
}

/// Refuses what can be seen to be wrong in the options alone.
fn check(options: &AlgorithmOptions, is_root: bool, size: u32) -> Result<()> {
    let AlgorithmOptions { kind, buffers, root_buffer, .. } = options;
    let many = takes_many(*kind);
    let expected = if *kind == Kind::Barrier { 0 } else { 2 };
    let has_blocks = *kind == Kind::Scatter && buffers.len() == size as usize + 1;
    if kind.point_to_point() {
        fail!(InvalidArgument, "an algorithm object is for a collective, not for {}", kind.name());
    }
    if many && buffers.is_empty() {
        fail!(InvalidArgument, "pointer_count is 0, but {} needs at least one buffer", kind.name());
    }
    if !many && !has_blocks && buffers.len() != expected {
        let or_blocks = if *kind == Kind::Scatter { " (or a block for each rank and that)" } else { "" };
        fail!(
            InvalidArgument,
            "pointer_count is {}, but {} takes {expected}: what to send, where to receive{or_blocks}",
            buffers.len(),
            kind.name()
        );
    }
    if *kind == Kind::Broadcast && is_root && *root_buffer >= buffers.len() {
        fail!(
            InvalidArgument,
            "root_pointer {root_buffer} is out of range: there are {} pointers",
            buffers.len()
        );
    }
    for (index, buffer) in buffers.iter().enumerate() {
        if buffer.is_null() && options.count > 0 && !ignores(*kind, is_root, index, buffers.len()) {
            fail!(InvalidArgument, "pointer {index} is NULL, but count is {}", options.count);
        }
    }
    if many {
        check_apart(buffers, options.count, options.dtype)?;
    }
    if let Some(other) = options.call.algorithm.filter(|&named| named != 0 && named != options.algorithm) {
        fail!(
            InvalidArgument,
            "options->call->algorithm is {other}, but options->algorithm, by which the object goes, is {}: name it there, and \
             leave that of the call unset",
            options.algorithm
        );
    }
    Ok(())
}

/// The ranks' blocks of a scatter whose root, this rank, has them at addresses of their own.
fn blocks_of(options: &AlgorithmOptions, is_root: bool) -> &[*mut u8] {
    match options.buffers.split_last() {
        Some((_, blocks)) if options.kind == Kind::Scatter && is_root && blocks.len() > 1 => blocks,
        _ => &[],
    }
}

/// Which buffer the call between the ranks reads.
fn main_of(options: &AlgorithmOptions, is_root: bool) -> usize {
    if options.kind == Kind::Broadcast && is_root { options.root_buffer } else { 0 }
}

/// The call between the ranks, over one buffer of each.
fn request_of(options: &AlgorithmOptions, is_root: bool) -> Request {
    let (kind, buffers) = (options.kind, &options.buffers);
    let main = buffers.get(main_of(options, is_root)).copied().unwrap_or(std::ptr::null_mut());
    let output = match (takes_many(kind), buffers.last()) {
        (false, Some(&output)) => output,
        _ => main,
    };
    Request {
        kind,
        input: main.cast_const(),
        output,
        counts: Counts::Uniform(options.count),
        dtype: options.dtype,
        operator: options.operator,
        root: options.root,
    }
}

/// How that is made.
fn call_of(options: &AlgorithmOptions) -> Call {
    let AlgorithmOptions { kind, buffers, operator, .. } = options;
    let averages = takes_many(*kind) && kind.reduces() && matches!(operator, Operator::Average);
    let averaged = if averages { u32::try_from(buffers.len()).unwrap_or(u32::MAX) } else { 0 };
    Call { algorithm: Some(options.algorithm), averaged, ..options.call.clone() }
}

/// How runs go about it, and what that changes in the call between the ranks. On device memory, makes what
/// they need.
///
/// # Safety
/// As [`Prepared::new`].
unsafe fn body_of(
    context: &Context,
    options: AlgorithmOptions,
    request: &mut Request,
    call: &mut Call,
) -> Result<Body> {
    let AlgorithmOptions { kind, buffers, streams, .. } = &options;
    let (many, cuda) = (takes_many(*kind), context.cuda());
    if !on_devices(&options, &mut |address| cuda.locate(address))? {
        let stages = Stages::from_number(options.algorithm).filter(|_| options.count > 0);
        if let (Some(stages), Membership::Group(_)) = (stages, context.membership()) {
            return Err(not_on_host(stages));
        }
        let blocks = blocks_of(&options, context.rank() == options.root).to_vec();
        return Ok(Body::Call(if many { options.buffers } else { blocks }));
    }
    if *kind == Kind::Scatter && buffers.len() > 2 {
        fail!(
            Unsupported,
            "the blocks of a scatter at addresses of their own are in host memory, and have no streams: give one input"
        );
    }
    let devices = cuda.devices()?;
    if many && buffers.len() > 1 && options.count > 0 {
        let max_blocks = least_limit([context.max_blocks(), call.max_blocks]);
        let kernels = limited(FoldKernels::open(), max_blocks);
        let parts = Parts {
            kind: *kind,
            pointers: buffers,
            streams,
            count: options.count,
            dtype: options.dtype,
            operator: options.operator,
            root: options.root,
            root_pointer: options.root_buffer,
            rank: context.rank(),
            size: context.size(),
        };
        // SAFETY: the caller's promise.
        let several = unsafe { Several::new(devices, &kernels, &parts) }?;
        let call_between = several.request();
        let own = (request.dtype, request.operator.number());
        let left = (call_between.dtype, call_between.operator.number());
        call.combined = (own != left).then_some(own);
        *request = call_between.clone();
        call.stream = Some(several.main());
        return Ok(Body::Several(Box::new(several)));
    }
    let is_root = context.rank() == options.root;
    let of = if many || request.output.is_null() { main_of(&options, is_root) } else { 1 };
    let Some(&stream) = streams.get(of) else { return Ok(Body::Call(Vec::new())) };
    call.stream = Some(stream);
    if options.count == 0 {
        // Several buffers are compared as in a call on host memory, which another rank may make of it.
        let operator = kind.reduces().then_some(request.operator);
        let sends_others = sends_no_elements(request.dtype, operator, buffers);
        call.combined = sends_others.then_some((request.dtype, request.operator.number()));
        return Ok(Body::Stream(None));
    }
    // SAFETY: the caller's promise.
    Ok(Body::Stream(unsafe { Apart::new(devices, &options) }?))
}

/// What a run ends with whose streams are not through with it at its deadline, in a context of this name.
fn late(name: &str) -> Error {
    let text = format!(
        "the streams of an algorithm object of '{name}' are not through with its run, and have its pointers in use until then. Raise \
         timeout_ms, or look at what they were given before"
    );
    Error::new(Status::Timeout, text)
}

/// Refuses buffers that have a part of their memory in common.
fn check_apart(buffers: &[*mut u8], count: u64, dtype: DataType) -> Result<()> {
    let bytes = checked::bytes("options->pointers", count, dtype.size() as u64, dtype)?;
    let place = |(index, buffer): (usize, &*mut u8)| [buffer.addr() as u64, index as u64];
    let mut places: Vec<[u64; 2]> = buffers.iter().enumerate().map(place).collect();
    places.sort_unstable();
    // If any two overlap, two neighbours do.
    for pair in places.windows(2) {
        let [[before, first], [behind, second]] = [pair[0], pair[1]];
        let distance = behind - before;
        if (1..bytes as u64).contains(&distance) {
            fail!(
                InvalidArgument,
                "options->pointers[{first}] and options->pointers[{second}] overlap: each has {bytes} bytes, and the second of \
                 the two starts {distance} bytes behind the first. Give buffers that are apart, or the same one twice"
            );
        }
    }
    Ok(())
}

/// Whether the buffers are device memory. All are, or none is; what is not has no streams. Where they are
/// does not matter if nothing is in them: then, whether they have streams.
fn on_devices(
    options: &AlgorithmOptions,
    locate: &mut dyn FnMut(u64) -> Result<Option<Location>>,
) -> Result<bool> {
    let AlgorithmOptions { buffers, streams, count, .. } = options;
    if !streams.is_empty() && streams.len() != buffers.len() {
        fail!(InvalidArgument, "{} streams were given for {} pointers", streams.len(), buffers.len());
    }
    if *count == 0 {
        return Ok(!streams.is_empty());
    }
    let mut first = None;
    let given = |(_, buffer): &(usize, &*mut u8)| !buffer.is_null();
    for (index, buffer) in buffers.iter().enumerate().filter(given) {
        let location = locate(buffer.addr() as u64)?;
        let device = match location {
            Some(Location { memory: Memory::Device | Memory::Managed, device, .. }) => Some(device),
            _ => None,
        };
        if device.is_none() && !streams.is_empty() {
            fail!(
                InvalidArgument,
                "options->pointers[{index}] is no device memory (a host pointer, or freed), but options->streams is set: leave \
                 streams NULL for host memory"
            );
        }
        let first = *first.get_or_insert(device);
        let memory = |device: Option<u32>| match device {
            Some(device) => format!("memory of GPU {device}"),
            None => "host memory (or freed)".to_owned(),
        };
        if first.is_some() != device.is_some() {
            fail!(
                InvalidArgument,
                "options->pointers[{index}] is {}, but options->pointers[0] is {}: give one kind of memory",
                memory(device),
                memory(first)
            );
        }
    }
    Ok(first.flatten().is_some())
}

/// An input and an output with different streams: the call runs on the output's.
struct Apart {
    input: Stream,
    output: Stream,
    ready: Event,
    done: Event,
}

impl Apart {
    /// None if they have one stream, or are the same buffer, or one of them is ignored. Refuses streams of
    /// other devices than their memory.
    ///
    /// # Safety
    /// The streams stay valid for as long as this.
    unsafe fn new(devices: &Arc<Devices>, options: &AlgorithmOptions) -> Result<Option<Apart>> {
        let borrow = |index: usize| {
            let name = || format!("options->streams[{index}]");
            let Some(location) = devices.locate(options.buffers[index].addr() as u64)? else {
                fail!(InvalidArgument, "options->pointers[{index}] is no device memory any more")
            };
            // SAFETY: the caller's promise.
            unsafe { Stream::borrow(devices, location.device, options.streams[index]) }
                .map_err(|error| Error::context(&error, name()))
        };
        if let Some(index) = options.buffers.iter().position(|buffer| buffer.is_null()) {
            return borrow(1 - index).map(|_| None);
        }
        let input = borrow(0)?;
        if options.buffers.len() < 2 {
            return Ok(None);
        }
        let output = borrow(1)?;
        if input.is(&output) {
            return Ok(None);
        }
        let (ready, done) = (Event::new(devices, input.device())?, Event::new(devices, output.device())?);
        Ok(Some(Apart { input, output, ready, done }))
    }

    /// The call comes after what the input's stream was given.
    fn before(&self) -> Result<()> {
        self.ready.record(&self.input)?;
        self.output.wait(&self.ready)
    }

    /// What the input's stream is given from now on comes after the call.
    fn after(&self) -> Result<()> {
        self.done.record(&self.output)?;
        self.input.wait(&self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// Addresses below 10 are host memory, tens are of that GPU, hundreds are managed, and nothing is known
    /// of 7.
    fn locate(address: u64) -> Result<Option<Location>> {
        let (memory, device) = match address {
            7 => return Ok(None),
            0..10 => (Memory::Host, 0),
            10..100 => (Memory::Device, address as u32 / 10),
            _ => (Memory::Managed, 0),
        };
        Ok(Some(Location { memory, device, base: address, bytes: 1, buffer: address, mapped: false }))
    }

    fn found(addresses: &[usize], streams: usize) -> Result<bool> {
        let options = AlgorithmOptions {
            kind: Kind::Allreduce,
            algorithm: 0,
            buffers: addresses.iter().map(|&address| std::ptr::without_provenance_mut(address)).collect(),
            streams: vec![StreamHandle::NULL; streams],
            count: 1,
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
            root_buffer: 0,
            call: Call::default(),
        };
        on_devices(&options, &mut locate)
    }

    #[test]
    fn buffers_that_overlap_in_part_are_refused_by_name() {
        let check = |starts: &[usize]| {
            let buffers: Vec<_> =
                starts.iter().map(|&start| std::ptr::without_provenance_mut(start)).collect();
            check_apart(&buffers, 10, DataType::F32)
        };
        for apart in [&[][..], &[100], &[100, 140, 60], &[140, 100, 140, 100]] {
            assert_eq!(check(apart), Ok(()), "{apart:?}");
        }
        let refused = |starts: &[usize]| {
            let error = check(starts).expect_err("they overlap");
            assert_eq!(error.status(), Status::InvalidArgument);
            error.text().to_owned()
        };
        assert_eq!(
            refused(&[500, 139, 100]),
            "options->pointers[2] and options->pointers[1] overlap: each has 40 bytes, and the second of the two starts 39 bytes \
             behind the first. Give buffers that are apart, or the same one twice"
        );
        let text = refused(&[100, 500, 100, 101]);
        assert!(text.starts_with("options->pointers[2] and options->pointers[3] overlap"), "{text}");
    }

    #[test]
    fn one_kind_of_memory_is_taken() {
        assert_eq!(found(&[10, 20, 11], 0), Ok(true));
        assert_eq!(found(&[10, 20, 11], 3), Ok(true));
        assert_eq!(found(&[1, 7], 0), Ok(false));
        assert_eq!(found(&[100, 10], 0), Ok(true));
        assert_eq!(found(&[], 0), Ok(false));
    }

    #[test]
    fn mixed_memory_is_refused_by_name() {
        let refused = |addresses: &[usize], streams: usize| {
            let error = found(addresses, streams).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument);
            error.text().to_owned()
        };
        assert_eq!(
            refused(&[10, 20, 7, 30], 0),
            "options->pointers[2] is host memory (or freed), but options->pointers[0] is memory of GPU 1: give one kind of \
             memory"
        );
        assert_eq!(
            refused(&[1, 30], 0),
            "options->pointers[1] is memory of GPU 3, but options->pointers[0] is host memory (or freed): give one kind of \
             memory"
        );
        let text = refused(&[10, 1], 2);
        assert!(text.starts_with("options->pointers[1] is no device memory"), "{text}");
        assert_eq!(refused(&[10, 20], 1), "1 streams were given for 2 pointers");
    }
}
