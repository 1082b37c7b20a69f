//! Ranks as streams of one process, and the calls that they make.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use unisono::cuda::context::Devices;
use unisono::cuda::exchange::{Exchange, Fault, FaultRecord, Job, Point, Table, WindowBounds};
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::error::Result;

use super::super::cuda::Noise;
use super::case::{Case, POISON, difference, numbers};

/// How many GPUs there are.
pub(super) fn gpus() -> u32 {
    Devices::open().expect("a CUDA driver").count()
}

/// Bytes that are the same in every run.
pub(super) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).bytes(bytes)
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
        World { devices, ranks, calls: Cell::new(0) }
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
        self.write(rank, self.output(rank), &vec![POISON; bytes.len()]);
    }

    pub(super) fn result(&self, rank: u32, bytes: usize) -> Vec<u8> {
        self.read(rank, self.output(rank), bytes)
    }

    fn job(&self, rank: u32, case: &Case) -> Job {
        case.job(rank, [self.input(rank), self.output(rank)])
    }

    pub(super) fn try_enqueue(&self, rank: u32, case: &Case) -> Result<()> {
        let job = self.job(rank, case);
        // All blocks of all ranks of a GPU run at the same time.
        let multiprocessors = 132 / self.size().div_ceil(gpus());
        let rank = &self.ranks[rank as usize];
        // SAFETY: the buffers live as long as the world, which waits for its streams, and its GPUs reach each
        // other.
        unsafe { case.enqueue(&rank.exchange, &job, multiprocessors, &rank.stream) }
    }

    pub(super) fn enqueue(&self, rank: u32, case: &Case) {
        self.try_enqueue(rank, case).expect("a launch");
    }

    pub(super) fn send_and_receive(&self, rank: u32, points: &[Point]) {
        let rank = &self.ranks[rank as usize];
        // SAFETY: as above.
        unsafe { rank.exchange.enqueue_points(points, 0, &rank.stream) }.expect("a launch");
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
        let whole = case.whole(size);
        let input = |rank| numbers(case.dtype, noise(self.calls.get() * 8 + u64::from(rank), whole));
        let inputs: Vec<Vec<u8>> = (0..size).map(input).collect();
        for rank in 0..size {
            let poison = vec![POISON; whole + 16];
            self.write(rank, self.output(rank) + case.skew + case.apart, &poison);
            self.write(rank, self.input(rank) + case.skew, &poison);
            // A rank that gives nothing has poison there.
            let given = case.given(rank, size);
            if given > 0 {
                self.write(rank, self.job(rank, case).input, &inputs[rank as usize][..given]);
            }
        }
        run();
        self.wait();
        for rank in 0..size {
            let Some(wanted) = case.wanted(rank, &inputs) else { continue };
            let mut got = self.read(rank, self.job(rank, case).output, wanted.len() + 1);
            let after = got.pop();
            if let Some(difference) = difference(&got, &wanted) {
                panic!("{case:?}: rank {rank} of {size}, {difference}");
            }
            if !case.in_place {
                assert_eq!(after, Some(POISON), "{case:?}: rank {rank} of {size} wrote past the end");
            }
        }
    }
}
