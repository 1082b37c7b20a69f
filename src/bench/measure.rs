//! One rank at work: buffers, warming up, timing, and what the ranks agree on in between.

use std::time::{Duration, Instant};

use super::case::Case;
use super::options::{CallStyle, Options, Place, Transport};
use super::seat::{Seat, barrier, combine, total};
use super::{sparse, values};
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Call, Context};
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};
use crate::reduce::{DataType, Operator};
use crate::sys::process::CpuBinding;

/// Iterations whose times are kept.
const MOST_ITERATIONS: u64 = 20_000;
/// Bytes of a call in which the library's helpers take part.
const HELPED: usize = 16 << 20;
/// Below this percentiles mean little, however slow the operation.
const LEAST_ITERATIONS: u64 = 5;

/// The times of one case in one round, on all ranks: microseconds, the largest over the ranks for each
/// iteration.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) iterations: u64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) min: f64,
    /// How long one call held the calling thread, if it only enqueues.
    pub(super) host: Option<f64>,
    /// Wrong elements on all ranks, if that was looked at.
    pub(super) errors: Option<u64>,
}

/// GB/s: bytes in a microsecond are megabytes in a second. An operation of one rank may take no time at all.
pub(super) fn bandwidth(bytes: u64, microseconds: f64) -> f64 {
    bytes as f64 / microseconds.max(0.001) / 1000.0
}

impl Sample {
    /// From nanoseconds of `calls` calls each; at least one.
    pub(super) fn of(mut times: Vec<u64>, calls: u64) -> Sample {
        times.sort_unstable();
        let at = |part: f64| {
            times[((times.len() - 1) as f64 * part).round() as usize] as f64 / calls as f64 / 1000.0
        };
        let iterations = times.len() as u64 * calls;
        Sample { iterations, p50: at(0.5), p99: at(0.99), min: at(0.0), host: None, errors: None }
    }
}

/// One rank of the benchmark.
pub(super) struct Rank {
    contexts: Vec<(Transport, Context)>,
    buffers: Buffers,
    pace: Pace,
    bind: bool,
    binding: Option<CpuBinding>,
}

impl Rank {
    /// Meets the others, once for each transport, and makes room for the largest case.
    pub(super) fn join(options: &Options, cases: &[Case], seat: &Seat) -> Result<Rank> {
        let mut contexts = Vec::new();
        for transport in options.transports() {
            if contexts.iter().all(|(known, _)| *known != transport) {
                contexts.push((transport, seat.meet(options, transport, "host")?));
            }
        }
        if options.bind {
            for (_, context) in &contexts {
                start_helpers(context)?;
            }
        }
        let largest = cases.iter().map(Case::bytes).max().unwrap_or(0) as usize;
        Ok(Rank {
            contexts,
            buffers: Buffers { input: Buffer::new(largest)?, output: Buffer::new(largest)? },
            pace: Pace {
                iterations: options.iterations.map(|iterations| u64::from(iterations.get())),
                warmup: options.warmup,
                budget: options.budget,
                barrier: options.barrier,
            },
            bind: options.bind,
            // Not yet: the library asks how many processors there are for the ranks of this host.
            binding: None,
        })
    }

    /// Whether this is rank 0, which prints.
    pub(super) fn leads(&self) -> bool {
        self.contexts.first().is_none_or(|(_, context)| context.rank() == 0)
    }

    /// Has this rank run on any processor again until it measures: other programs would inherit its binding.
    pub(super) fn unbind(&mut self) {
        self.binding = None;
    }

    /// Waits for the others for at most `timeout`.
    pub(super) fn meet(&self, timeout: Duration) -> Result<()> {
        for (_, context) in self.contexts.iter().take(1) {
            barrier(context, Some(timeout))?;
        }
        Ok(())
    }

    /// Measures one case. Every rank calls this with the same.
    pub(super) fn measure(&mut self, case: &Case, check: bool) -> Result<Sample> {
        let context = self.context(case);
        if self.bind && self.binding.is_none() {
            let bound = CpuBinding::new(context.rank() as usize);
            self.binding =
                Some(bound.map_err(|cause| Error::system("cannot bind this rank to a processor", cause))?);
        }
        if case.kind == Kind::SparseAllreduce {
            return sparse::measure(case, &context, &self.pace, check);
        }
        let errors = if check {
            Some(self.check(case, &context)?)
        } else {
            self.fill(case, context.rank());
            None
        };
        let call = self.buffers.prepare(case, context.rank());
        let sample = self.pace.time(&context, || call.run(&context))?;
        Ok(Sample { errors, ..sample })
    }

    fn context(&self, case: &Case) -> Context {
        let found = self.contexts.iter().find(|(transport, _)| *transport == case.transport);
        found.unwrap_or(&self.contexts[0]).1.clone()
    }

    /// Runs once and looks at the result. Answers how many elements are wrong on all ranks.
    fn check(&mut self, case: &Case, context: &Context) -> Result<u64> {
        let rank = context.rank();
        let (_, (into, received)) = case.extents(rank);
        // What is not written must not look as if it was.
        self.buffers.output.bytes(0, case.bytes() as usize).fill(0xa5);
        self.fill(case, rank);
        self.buffers.prepare(case, rank).run(context)?;
        total(context, values::wrong(case, rank, 0, self.buffers.output.bytes(into, received)))
    }

    /// Writes the input of `rank`. Other bytes may be numbers for which processors take longer.
    fn fill(&mut self, case: &Case, rank: u32) {
        let ((from, sent), _) = case.extents(rank);
        let buffer = match case.place {
            Place::Out => &mut self.buffers.input,
            Place::In => &mut self.buffers.output,
        };
        values::fill(case, rank, buffer.bytes(from, sent));
    }
}

/// Has the library start the threads of this context that help with long messages and with long local work,
/// by calls that have both on every rank: each has what processors the thread has that starts it.
fn start_helpers(context: &Context) -> Result<()> {
    let (mut input, mut output) = (Buffer::new(HELPED)?, Buffer::new(HELPED)?);
    for kind in [Kind::Broadcast, Kind::Allreduce] {
        let request = Request {
            kind,
            input: input.address(0),
            output: output.address(0),
            counts: Counts::Uniform(HELPED as u64),
            dtype: DataType::U8,
            operator: Operator::Max,
            root: 0,
        };
        // SAFETY: the buffers have so many bytes, are apart, and outlive the call.
        unsafe { context.run(&request, &Call::default()) }?;
    }
    Ok(())
}

/// How often a case is run.
pub(super) struct Pace {
    iterations: Option<u64>,
    warmup: Option<u32>,
    budget: Duration,
    /// Whether the ranks meet before each iteration.
    barrier: bool,
}

impl Pace {
    /// Times `run`, on all ranks of `context` together.
    pub(super) fn time(&self, context: &Context, mut run: impl FnMut() -> Result<()>) -> Result<Sample> {
        let mut times = Vec::new();
        let iterations = match (self.iterations, self.warm_up(context, &mut run)?) {
            (Some(iterations), _) => iterations,
            (None, Some(estimate)) => self.fitting(estimate),
            (None, None) => {
                // The first of them tell how many fit.
                self.repeat(context, &mut run, LEAST_ITERATIONS, &mut times)?;
                let mut spent = [times.iter().sum()];
                combine(context, Operator::Max, &mut spent)?;
                self.fitting(spent[0] / LEAST_ITERATIONS)
            }
        };
        self.repeat(context, &mut run, iterations - times.len() as u64, &mut times)?;
        combine(context, Operator::Max, &mut times)?;
        Ok(Sample::of(times, 1))
    }

    /// How many iterations of so many nanoseconds the budget has room for.
    fn fitting(&self, estimate: u64) -> u64 {
        (self.budget.as_nanos() as u64 / estimate.max(1)).clamp(LEAST_ITERATIONS, MOST_ITERATIONS)
    }

    /// Times so many iterations.
    fn repeat(
        &self,
        context: &Context,
        run: &mut impl FnMut() -> Result<()>,
        iterations: u64,
        times: &mut Vec<u64>,
    ) -> Result<()> {
        barrier(context, None)?;
        for _ in 0..iterations {
            if self.barrier {
                barrier(context, None)?;
            }
            let start = Instant::now();
            run()?;
            times.push(start.elapsed().as_nanos() as u64);
        }
        Ok(())
    }

    /// Runs until a fifth of the budget is spent, or as often as asked. Answers about how many nanoseconds
    /// one takes, if any was run.
    fn warm_up(&self, context: &Context, run: &mut impl FnMut() -> Result<()>) -> Result<Option<u64>> {
        if self.warmup == Some(0) {
            return Ok(None);
        }
        let mut runs = self.warmup.map_or(1, u64::from);
        let mut spent = 0;
        loop {
            barrier(context, None)?;
            let start = Instant::now();
            for _ in 0..runs {
                run()?;
            }
            let mut time = [start.elapsed().as_nanos() as u64];
            combine(context, Operator::Max, &mut time)?;
            spent += time[0];
            if self.warmup.is_some() || u128::from(spent) * 5 >= self.budget.as_nanos() {
                return Ok(Some(time[0] / runs));
            }
            runs *= 2;
        }
    }
}

/// What a rank sends from and receives into. In place, both is `output`.
struct Buffers {
    input: Buffer,
    output: Buffer,
}

impl Buffers {
    /// The call of `rank`.
    fn prepare(&mut self, case: &Case, rank: u32) -> Prepared<'_> {
        let ((from, _), (into, _)) = case.extents(rank);
        let output = self.output.address(into);
        let input = match case.place {
            Place::Out => self.input.address(from),
            Place::In => self.output.address(from),
        };
        let request = Request {
            kind: case.kind,
            input,
            output,
            counts: Counts::Uniform(case.count()),
            dtype: case.dtype,
            operator: case.operator_or_sum(),
            root: case.root_or_first(),
        };
        let algorithm = case.algorithm.number();
        let call = Call { algorithm, ..Call::default() };
        Prepared { request, call, style: case.call, _buffers: self }
    }
}

/// A call whose buffers are held for it.
struct Prepared<'a> {
    request: Request,
    call: Call,
    style: CallStyle,
    _buffers: &'a mut Buffers,
}

impl Prepared<'_> {
    /// Runs once, to completion.
    fn run(&self, context: &Context) -> Result<()> {
        if self.request.kind == Kind::Send {
            return self.exchange(context);
        }
        // SAFETY: the buffers hold the largest case, are borrowed for as long as `self` lives, and no
        // operation outlives this function: it waits for the end of what it starts.
        unsafe {
            match self.style {
                CallStyle::Work => {
                    // The operation's own deadline ends the wait.
                    context.start(&self.request, &self.call)?.wait(Deadline::NEVER)?
                }
                _ => context.run(&self.request, &self.call)?,
            };
        }
        Ok(())
    }

    /// Sends to the next rank and receives from the one before.
    fn exchange(&self, context: &Context) -> Result<()> {
        let (rank, size) = (context.rank(), context.size());
        if size == 1 {
            return Ok(());
        }
        let receive = Request { kind: Kind::Receive, root: (rank + size - 1) % size, ..self.request.clone() };
        let send = Request { root: (rank + 1) % size, ..self.request.clone() };
        // SAFETY: as in `run`; the receive is waited for whatever becomes of the send.
        unsafe {
            let receive = context.start(&receive, &self.call)?;
            let sent = match self.style {
                CallStyle::Work => {
                    context.start(&send, &self.call).and_then(|send| send.wait(Deadline::NEVER))
                }
                _ => context.run(&send, &self.call),
            };
            receive.wait(Deadline::NEVER).and(sent)?;
        }
        Ok(())
    }
}

/// A buffer that begins at a page, as those of the peers do.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    const PAGE: usize = 4096;

    /// At least `len` bytes, all of them touched.
    fn new(len: usize) -> Result<Buffer> {
        let all = len.saturating_add(2 * Buffer::PAGE);
        let mut memory = Vec::new();
        if memory.try_reserve_exact(all).is_err() {
            fail!(OutOfMemory, "no memory for a buffer of {len} bytes");
        }
        memory.resize(all, 1);
        let start = memory.as_ptr().align_offset(Buffer::PAGE);
        Ok(Buffer { memory, start })
    }

    fn bytes(&mut self, from: usize, len: usize) -> &mut [u8] {
        &mut self.memory[self.start + from..][..len]
    }

    fn address(&mut self, from: usize) -> *mut u8 {
        self.memory[self.start + from..].as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::{Options as ContextOptions, Rendezvous};
    use crate::error::Status;
    use crate::rendezvous::hash::HashStore;

    #[test]
    fn a_size_that_no_memory_has_is_an_error() {
        let error = Buffer::new(usize::MAX / 4).err().expect("there is no memory");
        assert_eq!(error.status(), Status::OutOfMemory);
    }

    #[test]
    fn the_budget_bounds_iterations_also_where_nothing_is_run_before() {
        let context = Context::create(ContextOptions {
            rank: 0,
            size: 1,
            rendezvous: Rendezvous::Store(std::sync::Arc::new(HashStore::new())),
            name: "alone".into(),
            timeout: Duration::from_secs(20),
            interface: None,
            transports: None,
            host: None,
        });
        let budget = Duration::from_millis(20);
        let pace = Pace { iterations: None, warmup: Some(0), budget, barrier: false };
        let mut runs = 0;
        let run = || {
            runs += 1;
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let sample = pace.time(&context.expect("a group of one"), run).expect("it is measured");
        // One takes a millisecond at least.
        assert!((LEAST_ITERATIONS..=20).contains(&sample.iterations), "{sample:?}");
        assert_eq!(sample.iterations, runs);
    }
}
