//! Ranks as streams of one process, and calls whose results are known.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use unisono::cuda::context::Devices;
use unisono::cuda::exchange::{
    Exchange, Fault, FaultRecord, Job, Overlap, Point, Pull, Seen, Stages, Table, WindowBounds,
};
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::error::Result;
use unisono::reduce::{DataType, Operand, Operator, Reducer, Representation};
use unisono::signature::Kind;

/// How many GPUs there are.
pub(super) fn gpus() -> u32 {
    Devices::open().expect("a CUDA driver").count()
}

/// Whether a call's count is of one rank's part.
pub(super) fn is_partial(kind: Kind) -> bool {
    !matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast)
}

/// Bytes that are the same in every run.
pub(super) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut all = Vec::with_capacity(bytes + 8);
    while all.len() < bytes {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        all.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    all.truncate(bytes);
    all
}

/// A call of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) dtype: DataType,
    pub(super) operator: Operator,
    pub(super) count: u64,
    pub(super) root: u32,
    pub(super) in_place: bool,
    /// Bytes before the first element.
    pub(super) skew: usize,
}

impl Case {
    /// The longer of input and output.
    pub(super) fn bytes(&self, size: u32) -> u64 {
        self.part() * if is_partial(self.kind) { u64::from(size) } else { 1 }
    }

    fn part(&self) -> u64 {
        self.count * self.dtype.size() as u64
    }
}

struct Rank {
    exchange: Exchange,
    stream: Stream,
    fault: Arc<Fault>,
    input: DeviceBuffer,
    output: DeviceBuffer,
    host: PinnedBuffer,
    _arena: DeviceBuffer,
}

/// A group of ranks, spread over the GPUs.
pub(super) struct World {
    devices: Arc<Devices>,
    ranks: Vec<Rank>,
    calls: Cell<u64>,
    max_blocks: Cell<u32>,
}

/// A captured call, ready to be replayed on its rank's stream.
pub(super) struct Graph {
    devices: Arc<Devices>,
    device: u32,
    stream: sys::CUstream,
    executable: sys::CUgraphExec,
}

impl Graph {
    /// Records what `body` enqueues on the stream.
    pub(super) fn capture(devices: &Arc<Devices>, stream: &Stream, body: impl FnOnce()) -> Graph {
        let _entered = devices.enter(stream.device()).expect("a context");
        let handle = stream.handle().0 as sys::CUstream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream with its context current; the graph is instantiated and destroyed here.
        unsafe {
            sys::cuStreamBeginCapture_v2(handle, mode).result().expect("a capture");
            body();
            let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
            sys::cuStreamEndCapture(handle, &raw mut graph).result().expect("a graph");
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
                .result()
                .expect("an executable graph");
            sys::cuGraphUpload(executable, handle).result().expect("an uploaded graph");
            sys::cuGraphDestroy(graph).result().expect("a graph");
            Graph { devices: devices.clone(), device: stream.device(), stream: handle, executable }
        }
    }

    pub(super) fn launch(&self) {
        let _entered = self.devices.enter(self.device).expect("a context");
        // SAFETY: both live.
        unsafe { sys::cuGraphLaunch(self.executable, self.stream).result().expect("a launch") };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: ours; what was launched has been waited for.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

impl World {
    /// `bytes` is the longest buffer.
    pub(super) fn new(size: u32, bytes: usize) -> World {
        World::tuned(size, bytes, Table::default())
    }

    /// One where calls of any size gain by windows.
    pub(super) fn of_windows(size: u32, bytes: usize) -> World {
        let mut table = Table::default();
        for tuning in &mut table.tunings {
            tuning.windows_from = WindowBounds { moves: 0, broadcast: 0, allreduce: 0, reduce_scatter: 0 };
        }
        World::tuned(size, bytes, table)
    }

    fn tuned(size: u32, bytes: usize, mut table: Table) -> World {
        let share = size.div_ceil(gpus());
        if share > 1 {
            // All blocks of all ranks of a GPU run at the same time.
            table.blocks = 100 / share;
            for tuning in &mut table.tunings {
                tuning.parts = tuning.parts.min(table.blocks / size).max(1);
            }
        }
        World::with_table(size, bytes, table)
    }

    pub(super) fn with_table(size: u32, bytes: usize, table: Table) -> World {
        let devices = Devices::open().expect("a CUDA driver");
        let count = devices.count();
        let device = |rank: u32| rank % count;
        for a in 0..count {
            for b in 0..count {
                assert!(devices.reaches(a, b).expect("an answer"), "devices {a} and {b}");
            }
        }
        let buffer = |rank, bytes| DeviceBuffer::new(&devices, device(rank), bytes).expect("device memory");
        let arenas: Vec<DeviceBuffer> = (0..size).map(|rank| buffer(rank, table.arena_bytes(size))).collect();
        let addresses: Vec<u64> = arenas.iter().map(DeviceBuffer::address).collect();
        let ranks = arenas
            .into_iter()
            .enumerate()
            .map(|(rank, arena)| {
                let rank = rank as u32;
                let fault = Arc::new(Fault::new(&devices, device(rank)).expect("a page"));
                let stream = Stream::new(&devices, device(rank), false).expect("a stream");
                // SAFETY: the arenas live as long as the world.
                let exchange =
                    unsafe { Exchange::new(&devices, device(rank), rank, &addresses, fault.clone(), table) };
                // SAFETY: device memory of this size.
                unsafe {
                    let _entered = devices.enter(device(rank)).expect("a context");
                    sys::cuMemsetD8_v2(arena.address(), 0, arena.bytes()).result().expect("zeros");
                    sys::cuCtxSynchronize().result().expect("done");
                }
                Rank {
                    exchange: exchange.expect("an exchange"),
                    stream,
                    fault,
                    input: buffer(rank, bytes + 64),
                    output: buffer(rank, bytes + 64),
                    host: PinnedBuffer::new(&devices, device(rank), bytes + 64).expect("pinned memory"),
                    _arena: arena,
                }
            })
            .collect();
        World { devices, ranks, calls: Cell::new(0), max_blocks: Cell::new(0) }
    }

    /// Calls have at most so many blocks from now on; 0: as many as suit them.
    pub(super) fn limit_blocks(&self, max_blocks: u32) {
        self.max_blocks.set(max_blocks);
    }

    pub(super) fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    pub(super) fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    pub(super) fn stream(&self, rank: u32) -> &Stream {
        &self.ranks[rank as usize].stream
    }

    pub(super) fn input(&self, rank: u32) -> u64 {
        self.ranks[rank as usize].input.address()
    }

    pub(super) fn output(&self, rank: u32) -> u64 {
        self.ranks[rank as usize].output.address()
    }

    fn write(&self, rank: u32, address: u64, bytes: &[u8]) {
        let rank = &self.ranks[rank as usize];
        // SAFETY: buffers of this size; waited for.
        unsafe {
            rank.host.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            rank.stream.copy_to_device(address, rank.host.address(), bytes.len()).expect("a copy");
        }
        rank.stream.synchronize(Deadline::after(Duration::from_secs(20))).expect("a copy");
    }

    fn read(&self, rank: u32, address: u64, bytes: usize) -> Vec<u8> {
        let rank = &self.ranks[rank as usize];
        // SAFETY: buffers of this size; waited for before the slice is made.
        unsafe {
            rank.stream.copy_to_host(rank.host.address(), address, bytes).expect("a copy");
            rank.stream.synchronize(Deadline::after(Duration::from_secs(20))).expect("a copy");
            std::slice::from_raw_parts(rank.host.address(), bytes).to_vec()
        }
    }

    /// Puts bytes at the start of a rank's input, and poison into its output.
    pub(super) fn fill(&self, rank: u32, bytes: &[u8]) {
        self.write(rank, self.input(rank), bytes);
        self.write(rank, self.output(rank), &vec![0xa5; bytes.len()]);
    }

    pub(super) fn result(&self, rank: u32, bytes: usize) -> Vec<u8> {
        self.read(rank, self.output(rank), bytes)
    }

    /// What a rank calls.
    pub(super) fn job(&self, rank: u32, case: &Case) -> Job {
        let own = u64::from(rank) * case.part();
        let (mut input, mut output) =
            (self.input(rank) + case.skew as u64, self.output(rank) + case.skew as u64);
        if case.in_place {
            match case.kind {
                Kind::Allgather => input = output + own,
                Kind::Gather if rank == case.root => input = output + own,
                Kind::ReduceScatter => output = input + own,
                Kind::Scatter if rank == case.root => output = input + own,
                Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Alltoall => output = input,
                _ => {}
            }
        }
        let operator = match case.operator {
            Operator::PreMulSum(_) => Operator::PreMulSum(scale_of(rank)),
            other => other,
        };
        Job {
            kind: case.kind,
            input,
            output,
            count: case.count,
            dtype: case.dtype,
            operator,
            root: case.root,
            max_blocks: self.max_blocks.get(),
        }
    }

    pub(super) fn try_enqueue(&self, rank: u32, case: &Case) -> Result<()> {
        let job = self.job(rank, case);
        let rank = &self.ranks[rank as usize];
        // SAFETY: the buffers live as long as the world, which waits for its streams.
        unsafe { rank.exchange.enqueue(&job, &rank.stream) }
    }

    pub(super) fn enqueue(&self, rank: u32, case: &Case) {
        self.try_enqueue(rank, case).expect("a launch");
    }

    pub(super) fn send_and_receive(&self, rank: u32, points: &[Point]) {
        let rank = &self.ranks[rank as usize];
        // SAFETY: as above.
        unsafe { rank.exchange.enqueue_points(points, self.max_blocks.get(), &rank.stream) }
            .expect("a launch");
    }

    /// A broadcast by stages; `readable`: out of the root's input.
    pub(super) fn enqueue_pull(
        &self,
        rank: u32,
        case: &Case,
        stages: Stages,
        readable: bool,
        overlap: Overlap,
    ) {
        let job = self.job(rank, case);
        let pull = Pull {
            stages,
            input: job.input,
            output: job.output,
            bytes: case.part(),
            root: case.root,
            seen: readable.then_some([job.input; 8]),
            max_blocks: job.max_blocks,
            // All blocks of all ranks of a GPU run at the same time.
            multiprocessors: 132 / self.size().div_ceil(gpus()),
            overlap,
        };
        let rank = &self.ranks[rank as usize];
        // SAFETY: the buffers live as long as the world, which waits for its streams, and its GPUs reach each other.
        unsafe { rank.exchange.enqueue_pull(&pull, &rank.stream) }.expect("a launch");
    }

    /// A call of memory that every rank reaches.
    pub(super) fn enqueue_windowed(&self, rank: u32, case: &Case) {
        let job = self.job(rank, case);
        let rank = &self.ranks[rank as usize];
        // SAFETY: the buffers live as long as the world, which waits for its streams, and its GPUs reach each other.
        unsafe {
            let seen = Seen { input: [job.input; 8], output: [job.output; 8] };
            rank.exchange.enqueue_windowed(&job, &seen, &rank.stream).expect("a launch");
        }
    }

    /// The call of every rank as a graph.
    pub(super) fn captured(&self, case: &Case) -> Vec<Graph> {
        (0..self.size())
            .map(|rank| Graph::capture(&self.devices, self.stream(rank), || self.enqueue(rank, case)))
            .collect()
    }

    pub(super) fn wait_for(&self, rank: u32) {
        let stream = self.stream(rank);
        if let Err(error) = stream.synchronize(Deadline::after(Duration::from_secs(10))) {
            for rank in &self.ranks {
                rank.fault.abort();
            }
            std::thread::sleep(Duration::from_millis(200));
            let records: Vec<_> = self.ranks.iter().map(|rank| rank.fault.record()).collect();
            panic!("rank {rank}: {error}; {records:?}");
        }
    }

    pub(super) fn wait(&self) {
        (0..self.size()).for_each(|rank| self.wait_for(rank));
    }

    pub(super) fn abort(&self, rank: u32) {
        self.ranks[rank as usize].fault.abort();
    }

    pub(super) fn record(&self, rank: u32) -> Option<FaultRecord> {
        self.ranks[rank as usize].fault.record()
    }

    pub(super) fn check(&self, case: &Case) {
        self.check_by(case, || (0..self.size()).for_each(|rank| self.enqueue(rank, case)));
    }

    /// Checks a call that `run` launches on every rank.
    pub(super) fn check_by(&self, case: &Case, run: impl FnOnce()) {
        let size = self.size();
        self.calls.set(self.calls.get() + 1);
        let whole = case.bytes(size) as usize;
        let part = case.part() as usize;
        let inputs: Vec<Vec<u8>> = (0..size)
            .map(|rank| numbers(case.dtype, self.calls.get() * 8 + u64::from(rank), whole))
            .collect();
        let mut outside = Vec::new();
        for rank in 0..size {
            let job = self.job(rank, case);
            let poison = vec![0xa5; whole + 16];
            self.write(rank, self.output(rank) + case.skew as u64, &poison);
            self.write(rank, self.input(rank) + case.skew as u64, &poison);
            let gives = match case.kind {
                Kind::Allgather | Kind::Gather => part,
                _ => whole,
            };
            // A rank that gives nothing has poison there.
            if !matches!(case.kind, Kind::Broadcast | Kind::Scatter) || rank == case.root {
                self.write(rank, job.input, &inputs[rank as usize][..gives]);
            }
            outside.push(job);
        }
        run();
        self.wait();
        for rank in 0..size {
            let job = outside[rank as usize];
            let Some(wanted) = self.wanted(case, rank, &inputs) else { continue };
            let mut got = self.read(rank, job.output, wanted.len() + 1);
            let after = got.pop();
            let differs = got.iter().zip(&wanted).position(|(a, b)| a != b);
            if let Some(at) = differs {
                let count = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
                let end = (at + 8).min(got.len());
                panic!(
                    "{case:?}: rank {rank} of {size}, byte {at} of {}, {count} differ: {:x?}, not {:x?}",
                    wanted.len(),
                    &got[at..end],
                    &wanted[at..end]
                );
            }
            if !case.in_place {
                assert_eq!(after, Some(0xa5), "{case:?}: rank {rank} of {size} wrote past the end");
            }
        }
    }

    /// What a rank's output holds afterwards; `None` where it has none.
    fn wanted(&self, case: &Case, rank: u32, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
        let part = case.part() as usize;
        let own = rank as usize * part;
        let root = case.root as usize;
        Some(match case.kind {
            Kind::Allreduce => fold(case, inputs, 0, part),
            Kind::Reduce if rank != case.root => return None,
            Kind::Reduce => fold(case, inputs, 0, part),
            Kind::ReduceScatter => fold(case, inputs, own, part),
            Kind::Broadcast => inputs[root][..part].to_vec(),
            Kind::Allgather => inputs.iter().flat_map(|input| &input[..part]).copied().collect(),
            Kind::Gather if rank != case.root => return None,
            Kind::Gather => inputs.iter().flat_map(|input| &input[..part]).copied().collect(),
            Kind::Scatter => inputs[root][own..own + part].to_vec(),
            Kind::Alltoall => inputs.iter().flat_map(|input| &input[own..own + part]).copied().collect(),
            other => panic!("{other:?} is no collective"),
        })
    }
}

fn scale_of(rank: u32) -> f64 {
    [1.5, -2.0, 3.0, 0.25, 1.0, 5.0, -1.0, 2.5][rank as usize]
}

fn fold(case: &Case, inputs: &[Vec<u8>], from: usize, bytes: usize) -> Vec<u8> {
    let reducer = Reducer::new(case.dtype, case.operator, inputs.len() as u32).expect("a reducer");
    let operands: Vec<Operand> = inputs
        .iter()
        .enumerate()
        .map(|(rank, input)| Operand {
            address: input[from..].as_ptr(),
            representation: Representation::Element,
            scale: scale_of(rank as u32),
        })
        .collect();
    let mut out = vec![0; bytes];
    // SAFETY: every operand and `out` have `count` elements.
    unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, case.count as usize) };
    out
}

/// Elements of any bits for integers; moderate numbers, now and then a special one, for floats.
fn numbers(dtype: DataType, seed: u64, bytes: usize) -> Vec<u8> {
    let mut all = noise(seed, bytes);
    match dtype {
        DataType::F32 => all.chunks_exact_mut(4).for_each(|c| {
            if c[0] != 7 {
                c[3] = c[3] & 0x80 | 0x3f;
            }
        }),
        DataType::F64 => all.chunks_exact_mut(8).for_each(|c| {
            if c[0] != 7 {
                c[7] = c[7] & 0x80 | 0x3f;
            }
        }),
        DataType::F16 | DataType::Bf16 => all.chunks_exact_mut(2).for_each(|c| {
            if c[0] != 7 {
                c[1] = c[1] & 0x87 | 0x38;
            }
        }),
        _ => {}
    }
    all
}
