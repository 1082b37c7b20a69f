//! One rank at work on device memory: the subjects that run its calls, and how their time is taken.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use super::library::{Communicator, Library, UniqueId};
use super::memory::{Buffers, PIECE};
use crate::bench::case::Case;
use crate::bench::measure::Sample;
use crate::bench::options::{self, CallStyle, Choice, Options, Place, Transport};
use crate::bench::seat::{Seat, barrier, combine, spread, total};
use crate::bench::values;
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Call, Context, Work, start_together};
use crate::cuda::context::Devices;
use crate::cuda::driver::StreamHandle;
use crate::cuda::exchange::Table;
use crate::cuda::libcuda::measuring::{Graph, TimedEvent};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::Operator;

/// Nanoseconds that a batch of calls takes at least: the ranks start it some microseconds apart.
const BATCH: u64 = 2_000_000;
/// Calls of a batch, and of a graph.
const MOST_IN_A_BATCH: u64 = 400;
const MOST_IN_A_GRAPH: u64 = 100;
/// Batches whose times are kept.
const BATCHES: (u64, u64) = (5, 500);
/// Bytes of a result that are all looked at; of a larger one its beginning, middle and end.
const CHECKED_WHOLE: usize = 4 * PIECE;

/// What became of a case.
pub(super) enum Outcome {
    Measured(Sample),
    /// It cannot be done, on any rank: why.
    Refused(String),
}

/// One rank.
pub(super) struct Rank<'a> {
    /// First, since communicators are destroyed while everything else still is there.
    subjects: Vec<Subject>,
    options: &'a Options,
    seat: Seat,
    control: Context,
    devices: Arc<Devices>,
    stream: Stream,
    start: TimedEvent,
    end: TimedEvent,
    buffers: Buffers,
    /// How many tables were admitted.
    tables: u32,
}

/// Who runs the calls.
enum Subject {
    Native(Vec<(Transport, Context)>),
    /// With its own input and output, if it does not use those of the others.
    Library(Communicator, Option<(u64, u64)>),
}

impl<'a> Rank<'a> {
    /// Meets the others, without any subject yet. `device` is current on this thread for as long as this
    /// lives.
    pub(super) fn join(
        options: &'a Options,
        seat: &Seat,
        devices: &Arc<Devices>,
        device: u32,
        largest: usize,
    ) -> Result<Rank<'a>> {
        let control = seat.meet(options, Transport::Automatic, "control")?;
        let stream = Stream::new(devices, device, false)?;
        // Before any kernel of a subject: allocations may wait for those.
        let buffers = Buffers::new(devices, device, largest + options.offset as usize)?;
        let (start, end) = (TimedEvent::new(devices, device)?, TimedEvent::new(devices, device)?);
        let (seat, devices, subjects) = (seat.clone(), devices.clone(), Vec::new());
        Ok(Rank { subjects, options, seat, control, devices, stream, start, end, buffers, tables: 0 })
    }

    /// Adds a subject: meets the others again. Answers what it says that it is.
    pub(super) fn admit(&mut self, library: &options::Library) -> Result<String> {
        let (mut subject, what) =
            Subject::join(self.options, &self.seat, &self.control, &self.subjects, library)?;
        if let (Subject::Native(contexts), true) = (&subject, self.options.operations().contains(&Kind::Send))
        {
            // Messages go from GPU to GPU where the ranks have said so before their first call.
            contexts.iter().try_for_each(|(_, context)| context.connect_device(self.stream.device()))?;
        }
        if let (Subject::Library(communicator, own), options::Library::Nccl { windows: true, .. }) =
            (&mut subject, library)
        {
            let bytes = self.buffers.input.bytes();
            *own = Some((communicator.window(bytes)?, communicator.window(bytes)?));
        }
        self.subjects.push(subject);
        Ok(what)
    }

    /// Adds this library by a table of choices for the GPUs' exchange: meets the others again, whose GPUs
    /// must exchange.
    pub(super) fn admit_by(&mut self, table: Table, device: u32) -> Result<()> {
        let transport = self.options.transports()[0];
        self.tables += 1;
        let context = self.seat.meet(self.options, transport, &format!("table {}", self.tables))?;
        context.connect_device_by(device, table)?;
        if let Some(Err(why)) = context.device_way() {
            fail!(Unsupported, "the GPUs do not exchange, because of {why}");
        }
        self.subjects.push(Subject::Native(vec![(transport, context)]));
        Ok(())
    }

    /// Lets go of all subjects, on all ranks.
    pub(super) fn dismiss(&mut self) -> Result<()> {
        self.stream.synchronize(self.deadline())?;
        barrier(&self.control, None)?;
        self.subjects.clear();
        Ok(())
    }

    /// Whether this is rank 0, which prints.
    pub(super) fn leads(&self) -> bool {
        self.seat.rank == 0
    }

    /// Waits for the others for at most `timeout`.
    pub(super) fn meet(&self, timeout: std::time::Duration) -> Result<()> {
        barrier(&self.control, Some(timeout))
    }

    /// All is measured, and no subject has anything left to do.
    pub(super) fn finish(mut self) -> Result<()> {
        self.stream.synchronize(self.deadline())?;
        barrier(&self.control, None)?;
        for subject in &mut self.subjects {
            if let Subject::Library(communicator, _) = subject {
                communicator.settle();
            }
        }
        Ok(())
    }

    /// Measures one case by one subject. Every rank calls this with the same.
    pub(super) fn measure(&mut self, case: &Case, subject: usize, check: bool) -> Result<Outcome> {
        if case.kind == Kind::SparseAllreduce {
            return self.measure_sparse(case, subject, check);
        }
        if let Some(pointers) = self.options.pointers {
            return self.measure_several(case, subject, check, u32::from(pointers.get()));
        }
        if check {
            self.prepare_check(case, subject)?;
        }
        barrier(&self.control, None)?;
        let bound = self.bind(case, subject);
        // SAFETY: the buffers hold the largest case, and every function here waits for what it has enqueued
        // before anybody else touches them.
        let first = bound.and_then(|bound| unsafe { bound.complete(self) });
        if let Err(refusal) = self.agree(first)? {
            return Ok(Outcome::Refused(refusal));
        }
        if case.call == CallStyle::Graph {
            if check {
                self.prepare_check(case, subject)?;
            }
            let captured = self.capture(case, subject, 1);
            let graph = match self.agree(captured)? {
                Ok(graph) => graph,
                Err(refusal) => return Ok(Outcome::Refused(format!("cannot be captured: {refusal}"))),
            };
            // SAFETY: as above.
            unsafe { graph.launch(&self.stream) }?;
            self.stream.synchronize(self.deadline())?;
        }
        let errors = if check { Some(self.check(case, subject)?) } else { None };
        let sample = match case.call {
            CallStyle::Stream => self.time_stream(case, subject)?,
            CallStyle::Graph => self.time_graph(case, subject)?,
            CallStyle::Blocking | CallStyle::Work => self.time_calls(case, subject)?,
        };
        Ok(Outcome::Measured(Sample { errors, ..sample }))
    }

    /// Runs one call, to its end, over what the buffers hold.
    pub(super) fn run_once(&mut self, case: &Case, subject: usize) -> Result<()> {
        barrier(&self.control, None)?;
        let bound = self.bind(case, subject)?;
        // SAFETY: as in `measure`.
        unsafe { bound.complete(self) }
    }

    pub(super) fn rank(&self) -> u32 {
        self.seat.rank
    }

    pub(super) fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The group in which this library runs a case; none if another one is the subject.
    pub(super) fn native(&self, case: &Case, subject: usize) -> Option<&Context> {
        let Subject::Native(contexts) = &self.subjects[subject] else { return None };
        let found = contexts.iter().find(|(transport, _)| *transport == case.transport);
        Some(&found.unwrap_or(&contexts[0]).1)
    }

    pub(super) fn control(&self) -> &Context {
        &self.control
    }

    /// The buffers with the stream that fills them, and until when that may take.
    pub(super) fn buffers(&mut self) -> (&mut Buffers, &Stream, Deadline) {
        let deadline = self.deadline();
        (&mut self.buffers, &self.stream, deadline)
    }

    /// Where a subject's inputs and outputs begin.
    pub(super) fn places(&self, subject: usize) -> (u64, u64) {
        let (input, output) = match &self.subjects[subject] {
            Subject::Library(_, Some(own)) => *own,
            _ => (self.buffers.input.address(), self.buffers.output.address()),
        };
        let offset = u64::from(self.options.offset);
        (input + offset, output + offset)
    }

    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.options.timeout)
    }

    /// Whether it succeeded on every rank or was refused, and why. An error if it failed on one.
    pub(super) fn agree<T>(&self, result: Result<T>) -> Result<Result<T, String>> {
        let mut worst = [became(&result)];
        combine(&self.control, Operator::Max, &mut worst)?;
        agreed(result, worst[0])
    }

    fn bind(&self, case: &Case, subject: usize) -> Result<Bound<'_>> {
        let ((from, _), (into, _)) = case.extents(self.seat.rank);
        let (input, output) = self.places(subject);
        let input = if case.place == Place::In { output } else { input } + from as u64;
        let output = output + into as u64;
        let request = Request {
            kind: case.kind,
            input: std::ptr::without_provenance(input as usize),
            output: std::ptr::without_provenance_mut(output as usize),
            counts: Counts::Uniform(case.count()),
            dtype: case.dtype,
            operator: case.operator_or_sum(),
            root: case.root_or_first(),
        };
        let on_stream = matches!(case.call, CallStyle::Stream | CallStyle::Graph);
        match &self.subjects[subject] {
            Subject::Native(_) => {
                let algorithm = case.algorithm.number();
                let stream = on_stream.then(|| self.stream.handle());
                let (max_blocks, overlap) = (self.options.max_blocks, self.options.pdl);
                let call = Call { algorithm, stream, max_blocks, overlap, ..Call::default() };
                let Some(context) = self.native(case, subject) else {
                    fail!(Internal, "a subject is native, and is not")
                };
                Ok(Bound { who: Who::Native(context, call), request, style: case.call })
            }
            Subject::Library(communicator, _) => {
                if case.algorithm != Choice::Automatic {
                    fail!(Unsupported, "NCCL's ABI names no algorithms");
                }
                let who = Who::Library(communicator, self.stream.handle());
                Ok(Bound { who, request, style: case.call })
            }
        }
    }

    /// Makes a graph of `calls` calls.
    fn capture(&self, case: &Case, subject: usize, calls: u64) -> Result<Graph> {
        let bound = self.bind(case, subject)?;
        Graph::capture(&self.devices, &self.stream, || {
            // SAFETY: as in `measure`.
            (0..calls).try_for_each(|_| unsafe { bound.enqueue() })
        })
    }

    /// Nothing of an earlier result is left in a subject's output.
    pub(super) fn spoil(&mut self, case: &Case, output: u64) -> Result<()> {
        let (bytes, deadline) = (case.bytes() as usize, self.deadline());
        let rubbish = |piece: &mut [u8]| piece.fill(0xa5);
        // SAFETY: the subject's buffers hold the largest case; nothing is under way between cases.
        unsafe { self.buffers.repeat(&self.stream, output, bytes, bytes.clamp(1, PIECE), rubbish, deadline) }
    }

    /// Nothing of an earlier result is left, and the input is there.
    fn prepare_check(&mut self, case: &Case, subject: usize) -> Result<()> {
        let (rank, deadline) = (self.seat.rank, self.deadline());
        let ((from, sent), _) = case.extents(rank);
        let (input, output) = self.places(subject);
        let input = if case.place == Place::In { output } else { input };
        self.spoil(case, output)?;
        let period = values::period(case) as usize * case.dtype.size();
        let tile = if sent <= PIECE { sent.max(1) } else { (PIECE / period).max(1) * period };
        let write = |piece: &mut [u8]| values::fill(case, rank, piece);
        // SAFETY: the subject's buffers hold the largest case; nothing is under way between cases.
        unsafe { self.buffers.repeat(&self.stream, input + from as u64, sent, tile, write, deadline) }
    }

    /// How many elements are wrong on all ranks, among those looked at.
    fn check(&mut self, case: &Case, subject: usize) -> Result<u64> {
        let deadline = self.deadline();
        let (_, (into, received)) = case.extents(self.seat.rank);
        let address = self.places(subject).1 + into as u64;
        let mut offsets: Vec<usize> = if received <= CHECKED_WHOLE {
            (0..received).step_by(PIECE).collect()
        } else {
            vec![0, received / 2, received - PIECE]
        };
        let element = case.dtype.size();
        offsets.iter_mut().for_each(|offset| *offset -= *offset % element);
        let mut wrong = 0;
        for offset in offsets {
            let bytes = PIECE.min(received - offset);
            let at = address + offset as u64;
            // SAFETY: as in `prepare_check`.
            let found = unsafe { self.buffers.read(&self.stream, at, bytes, deadline) }?;
            wrong += values::wrong(case, self.seat.rank, (offset / element) as u64, found);
        }
        total(&self.control, wrong)
    }

    fn time_stream(&self, case: &Case, subject: usize) -> Result<Sample> {
        let bound = self.bind(case, subject)?;
        // SAFETY: as in `measure`.
        let run = || unsafe { bound.enqueue() };
        let estimate = self.warm_up(&run)?;
        self.time_batches(&run, estimate, self.batch_of(estimate), 1)
    }

    fn time_graph(&self, case: &Case, subject: usize) -> Result<Sample> {
        let eager = {
            let bound = self.bind(case, subject)?;
            // SAFETY: as in `measure`.
            self.warm_up(&|| unsafe { bound.enqueue() })?
        };
        let calls = (BATCH / eager.max(1)).clamp(1, MOST_IN_A_GRAPH);
        let graph = self.capture(case, subject, calls)?;
        // SAFETY: as in `measure`.
        let run = || unsafe { graph.launch(&self.stream) };
        let estimate = self.warm_up(&run)?;
        let sample = self.time_batches(&run, estimate, self.batch_of(estimate), calls)?;
        // A graph is launched by the host, its calls are not.
        Ok(Sample { host: None, ..sample })
    }

    /// Calls that are complete when they return.
    fn time_calls(&self, case: &Case, subject: usize) -> Result<Sample> {
        let bound = self.bind(case, subject)?;
        // SAFETY: as in `measure`.
        self.time_by_clock(&mut || unsafe { bound.complete(self) })
    }

    /// Times what is complete when it returns, and what all ranks run equally often.
    pub(super) fn time_by_clock(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<Sample> {
        let mut spent = 0;
        let mut runs = self.options.warmup.map_or(1, u64::from).max(1);
        let estimate = loop {
            barrier(&self.control, None)?;
            let start = Instant::now();
            for _ in 0..runs {
                run()?;
            }
            let mut time = [start.elapsed().as_nanos() as u64];
            combine(&self.control, Operator::Max, &mut time)?;
            spent += time[0];
            if self.warm(spent) {
                break time[0] / runs;
            }
            runs *= 2;
        };
        let mut times = Vec::new();
        for _ in 0..self.batches(estimate, 1) {
            if self.options.barrier {
                barrier(&self.control, None)?;
            }
            let start = Instant::now();
            run()?;
            times.push(start.elapsed().as_nanos() as u64);
        }
        combine(&self.control, Operator::Max, &mut times)?;
        Ok(Sample::of(times, 1))
    }

    /// Runs until a fifth of the budget is spent, or as often as asked. Answers about how many nanoseconds
    /// one takes.
    fn warm_up(&self, run: &dyn Fn() -> Result<()>) -> Result<u64> {
        let mut runs = self.options.warmup.map_or(1, u64::from).max(1);
        let mut spent = 0;
        loop {
            let mut time = [self.batch(run, runs, &mut Vec::new())?];
            combine(&self.control, Operator::Max, &mut time)?;
            spent += time[0];
            if self.warm(spent) {
                return Ok(time[0] / runs);
            }
            runs = (runs * 2).min(MOST_IN_A_BATCH);
        }
    }

    fn warm(&self, spent: u64) -> bool {
        self.options.warmup.is_some() || u128::from(spent) * 5 >= self.options.budget.as_nanos()
    }

    /// How many runs a batch has.
    fn batch_of(&self, estimate: u64) -> u64 {
        in_a_batch(estimate, self.options.iterations.map(NonZeroU32::get))
    }

    /// How many batches of so many runs fit.
    fn batches(&self, estimate: u64, batch: u64) -> u64 {
        match self.options.iterations {
            Some(iterations) => u64::from(iterations.get()).div_ceil(batch),
            None => {
                let fitting = self.options.budget.as_nanos() as u64 / (estimate * batch).max(1);
                fitting.clamp(BATCHES.0, BATCHES.1)
            }
        }
    }

    /// Times batches of `batch` runs, each of `calls` calls.
    fn time_batches(
        &self,
        run: &dyn Fn() -> Result<()>,
        estimate: u64,
        batch: u64,
        calls: u64,
    ) -> Result<Sample> {
        let (mut times, mut held) = (Vec::new(), Vec::new());
        for _ in 0..self.batches(estimate, batch) {
            times.push(self.batch(run, batch, &mut held)?);
        }
        combine(&self.control, Operator::Max, &mut times)?;
        held.sort_unstable();
        let mut host = [held.get(held.len() / 2).copied().unwrap_or(0)];
        combine(&self.control, Operator::Max, &mut host)?;
        let sample = Sample::of(times, batch * calls);
        Ok(Sample { host: Some(host[0] as f64 / 1000.0), ..sample })
    }

    /// Nanoseconds that the stream takes for `runs` runs. Adds how long each held this thread to `held`.
    fn batch(&self, run: &dyn Fn() -> Result<()>, runs: u64, held: &mut Vec<u64>) -> Result<u64> {
        barrier(&self.control, None)?;
        if runs > 1 {
            // The ranks come here one after the other, and leave this together.
            run()?;
        }
        self.start.record(&self.stream)?;
        for _ in 0..runs {
            let start = Instant::now();
            run()?;
            held.push(start.elapsed().as_nanos() as u64);
        }
        self.end.record(&self.stream)?;
        self.end.synchronize(self.deadline())?;
        for subject in &self.subjects {
            subject.check_health()?;
        }
        Ok((self.end.since(&self.start)? * 1000.0) as u64)
    }
}

/// How many runs a batch has that take so long each: no more than are asked for.
fn in_a_batch(estimate: u64, asked: Option<u32>) -> u64 {
    (BATCH / estimate.max(1)).clamp(1, MOST_IN_A_BATCH).min(asked.map_or(u64::MAX, u64::from))
}

/// What becomes of a call, the worst last.
const DONE: u64 = 0;
const REFUSED: u64 = 1;
const FAILED: u64 = 2;

/// What became of it on this rank. What cannot be done is refused; anything else that goes wrong is a
/// failure.
fn became<T>(result: &Result<T>) -> u64 {
    match result.as_ref().map_err(Error::status) {
        Ok(_) => DONE,
        Err(Status::Unsupported | Status::InvalidArgument | Status::InvalidUsage) => REFUSED,
        Err(_) => FAILED,
    }
}

/// What all ranks make of it whose worst is `worst`.
fn agreed<T>(result: Result<T>, worst: u64) -> Result<Result<T, String>> {
    match (became(&result), worst, result) {
        (FAILED, _, Err(error)) => Err(error),
        (_, FAILED.., _) => fail!(PeerFailed, "the call has failed on another rank"),
        (_, DONE, Ok(value)) => Ok(Ok(value)),
        (.., Ok(_)) => Ok(Err("another rank could not".to_owned())),
        (.., Err(error)) => Ok(Err(error.to_string())),
    }
}

impl Subject {
    fn join(
        options: &Options,
        seat: &Seat,
        control: &Context,
        earlier: &[Subject],
        library: &options::Library,
    ) -> Result<(Subject, String)> {
        match library {
            options::Library::Native => {
                let mut contexts = Vec::new();
                for transport in options.transports() {
                    if contexts.iter().all(|(known, _)| *known != transport) {
                        let name = format!("device {}", earlier.len());
                        contexts.push((transport, seat.meet(options, transport, &name)?));
                    }
                }
                Ok((Subject::Native(contexts), format!("native: unisono {}", env!("CARGO_PKG_VERSION"))))
            }
            options::Library::Nccl { name, path, .. } => {
                // SAFETY: the user says that it is one.
                let library = unsafe { Library::open(name, path) }?;
                for subject in earlier {
                    if let Subject::Library(communicator, _) = subject {
                        library.check_apart(communicator.library())?;
                    }
                }
                let mut id = if seat.rank == 0 { library.unique_id()? } else { UniqueId([0; 128]) };
                spread(control, &mut id.0)?;
                let what = format!("{name}: says that it is NCCL {}", library.version()?);
                let communicator = Communicator::new(&library, id, seat.rank, seat.size)?;
                Ok((Subject::Library(communicator, None), what))
            }
        }
    }

    /// The failure of what was enqueued, if it is known.
    fn check_health(&self) -> Result<()> {
        let Subject::Native(contexts) = self else { return Ok(()) };
        match contexts.iter().find_map(|(_, context)| context.failure()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

/// A call with everything that it needs.
struct Bound<'a> {
    who: Who<'a>,
    request: Request,
    style: CallStyle,
}

enum Who<'a> {
    Native(&'a Context, Call),
    Library(&'a Communicator, StreamHandle),
}

impl Bound<'_> {
    /// Gives the call to the stream.
    ///
    /// # Safety
    /// The buffers are there and left alone until the stream is done.
    unsafe fn enqueue(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.who {
                Who::Native(context, call) if self.request.kind == Kind::Send => {
                    self.exchange(context, call).map(drop)
                }
                Who::Native(context, call) => context.launch(&self.request, call),
                Who::Library(communicator, stream) => communicator.run(&self.request, *stream),
            }
        }
    }

    /// Runs the call to its end.
    ///
    /// # Safety
    /// The buffers are there and left alone until this returns.
    unsafe fn complete(&self, rank: &Rank<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match (&self.who, self.style) {
                (Who::Native(context, call), CallStyle::Blocking) if self.request.kind != Kind::Send => {
                    context.run(&self.request, call).map(drop)
                }
                (Who::Native(context, call), CallStyle::Work) if self.request.kind != Kind::Send => {
                    // The operation's own deadline ends the wait.
                    context.start(&self.request, call)?.wait(Deadline::NEVER).map(drop)
                }
                (Who::Native(context, call), CallStyle::Blocking | CallStyle::Work) => {
                    let works = self.exchange(context, call)?;
                    works.iter().try_for_each(|work| work.wait(Deadline::NEVER).map(drop))
                }
                _ => {
                    self.enqueue()?;
                    rank.stream.synchronize(rank.deadline())
                }
            }
        }
    }

    /// Sends to the next rank and receives from the one before, beside each other.
    ///
    /// # Safety
    /// As [`Bound::enqueue`].
    unsafe fn exchange(&self, context: &Context, call: &Call) -> Result<Vec<Work>> {
        let (rank, size) = (context.rank(), context.size());
        if size == 1 {
            return Ok(Vec::new());
        }
        let receive = Request { kind: Kind::Receive, root: (rank + size - 1) % size, ..self.request.clone() };
        let send = Request { root: (rank + 1) % size, ..self.request.clone() };
        // SAFETY: the caller's promise.
        unsafe { start_together(&[(context, &receive, call), (context, &send, call)]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_no_longer_than_what_is_asked_for() {
        assert_eq!((in_a_batch(10_000, None), in_a_batch(1, None)), (200, 400));
        assert_eq!((in_a_batch(10_000, Some(5)), in_a_batch(1, Some(5))), (5, 5));
        assert_eq!((in_a_batch(10_000, Some(1000)), in_a_batch(10 * BATCH, Some(5))), (200, 1));
    }

    #[test]
    fn what_cannot_be_done_is_refused_and_what_goes_wrong_is_not() {
        let not = |status| Err(Error::new(status, "why"));
        assert_eq!(agreed(Ok(7), became(&Ok(7))), Ok(Ok(7)));
        for status in [Status::Unsupported, Status::InvalidArgument, Status::InvalidUsage] {
            let refused: Result<u32> = not(status);
            assert_eq!(became(&refused), REFUSED, "{status:?}");
            // On some ranks or on all.
            assert!(agreed(refused, REFUSED).is_ok_and(|told| told.is_err_and(|why| why.contains("why"))));
            assert_eq!(agreed(Ok(7), REFUSED), Ok(Err("another rank could not".into())));
        }
        for status in
            [Status::Timeout, Status::PeerFailed, Status::Cuda, Status::OutOfMemory, Status::Internal]
        {
            let failed: Result<u32> = not(status);
            assert_eq!(became(&failed), FAILED, "{status:?}");
            assert_eq!(agreed(failed, FAILED), Err(Error::new(status, "why")));
            // A rank that could, or that refused, does not go on as if nothing had been.
            for other in [Ok(7), not(Status::Unsupported)] {
                assert!(agreed(other, FAILED).is_err_and(|error| error.text().contains("another rank")));
            }
        }
    }
}
