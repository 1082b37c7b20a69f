//! The exchange between GPUs through contexts, as programs use it: ranks as processes and as threads, on
//! streams of their own and on none, in graphs, and when something goes wrong. Ranks share the GPUs that
//! there are.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, connect_devices, start_together};
use unisono::cuda::memory::DeviceBuffer;
use unisono::cuda::stream::Stream;
use unisono::error::{Error, Status};
use unisono::reduce::{DataType, Operator};

use super::cuda::{
    Graph, begin_capture, current_context, devices, fewer_than, filled, read, soon, stream, write,
};
use super::support::processes::{Job, Seat, report};
use super::support::{PATIENCE, barrier, options, within};

/// A rank with its GPU.
pub(crate) struct Rank<'a> {
    pub(crate) context: &'a Context,
    pub(crate) device: u32,
    pub(crate) stream: Stream,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(context: &'a Context) -> Rank<'a> {
        let device = context.rank() % devices().count();
        Rank { context, device, stream: stream(device) }
    }

    pub(crate) fn on_stream(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..Call::default() }
    }

    pub(crate) fn buffer(&self, values: &[f32]) -> DeviceBuffer {
        filled(self.device, &values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>())
    }

    pub(crate) fn values(&self, buffer: &DeviceBuffer) -> Vec<f32> {
        let bytes = read(&self.stream, buffer.address(), buffer.bytes());
        bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().expect("four bytes"))).collect()
    }

    pub(crate) fn request(
        &self,
        kind: Kind,
        count: usize,
        root: u32,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
    ) -> Request {
        Request {
            kind,
            input: std::ptr::without_provenance(from.address() as usize),
            output: std::ptr::without_provenance_mut(to.address() as usize),
            counts: Counts::Uniform(count as u64),
            dtype: DataType::F32,
            operator: Operator::Sum,
            root,
        }
    }

    pub(crate) fn allreduce(&self, buffer: &DeviceBuffer) -> Request {
        self.request(Kind::Allreduce, buffer.bytes() / 4, 0, buffer, buffer)
    }

    /// A blocking sum of one word in place.
    pub(crate) fn sum(&self, buffer: &DeviceBuffer, call: &Call) -> Result<(), Error> {
        // SAFETY: the buffer outlives the call.
        unsafe { self.context.run(&self.allreduce(buffer), call) }.map(drop)
    }
}

/// What rank `rank` has at position `i`: small whole numbers, so that every order of adding gives the same.
pub(crate) fn value(rank: u32, i: usize) -> f32 {
    ((i * 7 + rank as usize * 13) % 64) as f32
}

/// One collective, once on a stream and once without, against what it is.
pub(crate) fn collective(rank: &Rank<'_>, kind: Kind, count: usize, root: u32) {
    let (me, size) = (rank.context.rank(), rank.context.size());
    let ranks = size as usize;
    let parts = |many: bool| if many { ranks } else { 1 };
    let given = parts(matches!(kind, Kind::ReduceScatter | Kind::Alltoall | Kind::Scatter)) * count;
    let taken = parts(matches!(kind, Kind::Allgather | Kind::Alltoall | Kind::Gather)) * count;
    let sum = |i: usize| (0..size).map(|rank| value(rank, i)).sum::<f32>();
    let mine = me as usize * count;
    let expected: Option<Vec<f32>> = match kind {
        Kind::Allreduce => Some((0..count).map(sum).collect()),
        Kind::Reduce => (me == root).then(|| (0..count).map(sum).collect()),
        Kind::ReduceScatter => Some((mine..mine + count).map(sum).collect()),
        Kind::Broadcast => Some((0..count).map(|i| value(root, i)).collect()),
        Kind::Scatter => Some((mine..mine + count).map(|i| value(root, i)).collect()),
        Kind::Allgather => Some((0..taken).map(|i| value((i / count) as u32, i % count)).collect()),
        Kind::Gather => {
            (me == root).then(|| (0..taken).map(|i| value((i / count) as u32, i % count)).collect())
        }
        _ => Some((0..taken).map(|i| value((i / count) as u32, mine + i % count)).collect()),
    };
    let input = rank.buffer(&(0..given).map(|i| value(me, i)).collect::<Vec<f32>>());
    for call in [rank.on_stream(), Call::default()] {
        let output = rank.buffer(&vec![-1.0; taken]);
        let request = rank.request(kind, count, root, &input, &output);
        // SAFETY: the buffers outlive the call.
        unsafe { rank.context.run(&request, &call) }
            .unwrap_or_else(|error| panic!("{kind:?} of {count}: {error}"));
        if let Some(expected) = &expected {
            assert!(rank.values(&output) == *expected, "{kind:?} of {count}, root {root}");
        }
    }
}

pub(crate) const KINDS: [Kind; 8] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::ReduceScatter,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Alltoall,
    Kind::Gather,
    Kind::Scatter,
];

/// Held by the thread that captures.
static CAPTURING: Mutex<()> = Mutex::new(());

/// All collectives, graphs, points, two communicators.
fn calls(context: &Context) {
    let rank = Rank::new(context);
    let size = context.size();
    context.connect_device(rank.device).expect("an agreement");
    let before = current_context();
    for (index, kind) in KINDS.into_iter().enumerate() {
        for count in [1, 3000, 200_001] {
            collective(&rank, kind, count, index as u32 % size);
        }
    }
    assert_eq!(context.device_way(), Some(Ok(())));
    assert_eq!(current_context(), before, "the caller's context is as before");

    // Calls in a graph and others, mixed: each multiplies by the number of ranks.
    let buffer = rank.buffer(&[1.0; 1000]);
    let reset = || write(rank.device, buffer.address(), &1.0f32.to_ne_bytes().repeat(1000));
    let launch = || {
        // SAFETY: the buffer outlives what the stream does.
        unsafe { context.launch(&rank.allreduce(&buffer), &rank.on_stream()) }.expect("a launch");
    };
    launch();
    rank.stream.synchronize(soon()).expect("the stream ends");
    // While a thread captures in this mode, no other may copy or instantiate a graph; nor may another's
    // capture end between.
    barrier(context);
    let graph = {
        let _alone = CAPTURING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let devices = devices();
        let _entered = devices.enter(rank.device).expect("a context");
        begin_capture(&rank.stream);
        launch();
        launch();
        Graph::end_capture(&rank.stream)
    };
    barrier(context);
    for _ in 0..10 {
        rank.stream.synchronize(soon()).expect("the stream ends");
        reset();
        launch();
        graph.launch(rank.stream.handle());
        launch();
        graph.launch(rank.stream.handle());
        assert_eq!(rank.values(&buffer)[999], (size as f32).powi(6));
    }

    // Both halves of an exchange with the neighbours, as one launch.
    let (to, from) = ((context.rank() + 1) % size, (context.rank() + size - 1) % size);
    for count in [10, 500_000] {
        let sent = rank.buffer(&(0..count).map(|i| value(context.rank(), i)).collect::<Vec<f32>>());
        let received = rank.buffer(&vec![0.0; count]);
        let send = rank.request(Kind::Send, count, to, &sent, &sent);
        let receive = rank.request(Kind::Receive, count, from, &received, &received);
        let call = rank.on_stream();
        // SAFETY: the buffers outlive the works.
        let works = unsafe { start_together(&[(context, &send, &call), (context, &receive, &call)]) };
        for work in works.expect("both begin") {
            work.wait(soon()).expect("both end");
        }
        assert_eq!(rank.values(&received), (0..count).map(|i| value(from, i)).collect::<Vec<f32>>());
    }

    // Two communicators on two streams, and one of them on both.
    let other = Rank {
        context: &context.duplicate().expect("a child"),
        device: rank.device,
        stream: stream(rank.device),
    };
    let (mine, theirs) = (rank.buffer(&[1.0; 100_000]), rank.buffer(&[1.0; 100_000]));
    for _ in 0..6 {
        // SAFETY: the buffers outlive the calls.
        unsafe {
            context.launch(&rank.allreduce(&mine), &rank.on_stream()).expect("a launch");
            other.context.launch(&other.allreduce(&theirs), &other.on_stream()).expect("a launch");
        }
    }
    // SAFETY: as above.
    unsafe { context.launch(&rank.allreduce(&mine), &other.on_stream()).expect("a launch") };
    other.stream.synchronize(soon()).expect("the stream ends");
    assert_eq!(rank.values(&mine)[99_999], (size as f32).powi(7));
    assert_eq!(rank.values(&theirs)[99_999], (size as f32).powi(6));
}

/// Bytes of the GPU that are taken.
fn taken(device: u32) -> usize {
    let devices = devices();
    let _entered = devices.enter(device).expect("a context");
    let (mut free, mut total) = (0, 0);
    // SAFETY: fills both.
    unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }.result().expect("an answer");
    total - free
}

pub(crate) fn scenario_calls(seat: &Seat) {
    let context = Context::create(seat.options("calls")).expect("the ranks meet");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&[1.0; 2]);
    let before = taken(rank.device);
    let start = Instant::now();
    context.connect_device(rank.device).expect("an agreement");
    let connected = start.elapsed();
    rank.sum(&buffer, &Call::default()).expect("a sum");
    let first = start.elapsed();
    let memory = taken(rank.device).saturating_sub(before) >> 20;
    calls(&context);
    // Small calls, one by one.
    let call = rank.on_stream();
    let request = rank.allreduce(&buffer);
    let mut best = Duration::MAX;
    for _ in 0..5 {
        rank.sum(&buffer, &call).expect("a sum");
        let start = Instant::now();
        for _ in 0..200 {
            // SAFETY: the buffer outlives the stream's work.
            unsafe { context.launch(&request, &call) }.expect("a launch");
        }
        best = best.min(start.elapsed());
        rank.stream.synchronize(soon()).expect("the stream ends");
    }
    report(format_args!(
        "fine connected {connected:.1?} first {first:.1?} memory {memory} MiB launch {:.2} us",
        best.as_secs_f64() * 1e6 / 200.0
    ));
}

/// The others of three ranks after one has failed them: what they hear, whether CUDA is well, whether they
/// can go on.
fn survive(seat: &Seat, call: &Call, before: Duration) {
    let context = Context::create(seat.options("first")).expect("the ranks meet");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&[1.0; 1000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    report("ready");
    if seat.rank == 1 {
        std::thread::sleep(PATIENCE);
        return;
    }
    std::thread::sleep(before);
    let start = Instant::now();
    let error = rank.sum(&buffer, call).expect_err("rank 1 does not call");
    report(format_args!("error {:?} after {:.1?}: {error}", error.status(), start.elapsed()));
    let later = rank.sum(&buffer, call).expect_err("the group has failed");
    assert!(later.text().contains("has failed before"), "{later}");
    drop(context);
    // The same process, the same GPU, a new communicator.
    let others = Seat::options(seat, "second");
    let others = unisono::communicator::Options { rank: seat.rank / 2, size: 2, ..others };
    let context = Context::create(others).expect("the others meet");
    let rank = Rank { context: &context, device: seat.rank % devices().count(), stream: stream(0) };
    let rank = Rank { stream: stream(rank.device), ..rank };
    let buffer = rank.buffer(&[1.0; 1000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    assert_eq!(rank.values(&buffer), [2.0; 1000]);
    assert_eq!(context.device_way(), Some(Ok(())));
    report("well");
}

pub(crate) fn scenario_death(seat: &Seat) {
    survive(seat, &Call::default(), Duration::ZERO);
}

pub(crate) fn scenario_stop(seat: &Seat) {
    survive(seat, &within(1000), Duration::from_millis(300));
}

/// Kills or stops rank 1 of three; what the others say.
fn lose(scenario: &str, signal: i32) -> Vec<String> {
    let mut job = Job::start(scenario, 3, "shm");
    job.await_all(&[0, 1, 2], "ready");
    // Those that do not wait for this are in their call by then.
    std::thread::sleep(Duration::from_millis(100));
    job.signal(1, signal);
    let said = job.await_all(&[0, 2], "error");
    job.await_all(&[0, 2], "well");
    job.all_end_well(&[0, 2]);
    said.into_iter().map(|report| report.line).collect()
}

#[test]
fn device_calls_between_processes() {
    let most = devices().count().max(2);
    for size in [2, 4, 8].into_iter().filter(|&size| size <= most) {
        let mut job = Job::start("device calls", size, "shm");
        let all: Vec<u32> = (0..size).collect();
        for fine in job.await_all(&all, "fine") {
            println!("{size} processes, rank {}: {}", fine.rank, fine.line);
        }
        job.all_end_well(&all);
    }
}

#[test]
fn device_calls_between_threads() {
    if fewer_than(2) {
        return;
    }
    super::support::ranks(devices().count().min(8), "shm", calls);
}

#[test]
fn device_calls_of_one_thread_for_all_its_ranks() {
    if fewer_than(2) {
        return;
    }
    let store = std::sync::Arc::new(unisono::rendezvous::hash::HashStore::new());
    let size = devices().count().min(8);
    let contexts: Vec<Context> = std::thread::scope(|scope| {
        let create = |rank| Context::create(options(rank, size, store.clone(), "shm")).expect("ranks meet");
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || create(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    let ranks: Vec<Rank<'_>> = contexts.iter().map(Rank::new).collect();
    connect_devices(&ranks.iter().map(|rank| (rank.context, rank.device)).collect::<Vec<_>>())
        .expect("an agreement");
    let buffers: Vec<DeviceBuffer> = ranks.iter().map(|rank| rank.buffer(&[1.0; 5000])).collect();
    for (rank, buffer) in ranks.iter().zip(&buffers) {
        // SAFETY: the buffers outlive the streams' work.
        unsafe { rank.context.launch(&rank.allreduce(buffer), &rank.on_stream()) }.expect("a launch");
    }
    for (rank, buffer) in ranks.iter().zip(&buffers) {
        assert_eq!(rank.values(buffer), vec![size as f32; 5000]);
    }
}

#[test]
fn device_death_is_told_and_survived() {
    for line in lose("device death", libc::SIGKILL) {
        println!("{line}");
        assert!(line.contains("PeerFailed") && line.contains("rank 1 ("), "{line}");
    }
}

#[test]
fn device_stop_is_told_and_survived() {
    for line in lose("device stop", libc::SIGSTOP) {
        println!("{line}");
        assert!(line.contains("Timeout") && line.contains("rank 1 ("), "{line}");
    }
}

pub(crate) fn scenario_mismatch(seat: &Seat) {
    let context = Context::create(seat.options("mismatch")).expect("the ranks meet");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&vec![1.0; 2000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    let count = 1000 + seat.rank as usize;
    let request = rank.request(Kind::Allreduce, count, 0, &buffer, &buffer);
    // SAFETY: the buffer outlives the call.
    let error = unsafe { context.run(&request, &rank.on_stream()) }.expect_err("they differ");
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    rank.stream.synchronize(soon()).expect("the kernels have left");
    report(format_args!("error {error}"));
}

#[test]
fn device_mismatch_names_both() {
    let mut job = Job::start("device mismatch", 2, "shm");
    for error in job.await_all(&[0, 1], "error") {
        println!("{}", error.line);
        for part in ["rank 0 called allreduce(1000 ×", "rank 1 called allreduce(1001 ×"] {
            assert!(error.line.contains(part), "{}", error.line);
        }
    }
    job.all_end_well(&[0, 1]);
}

pub(crate) fn scenario_abort(seat: &Seat) {
    let context = Context::create(seat.options("abort")).expect("the ranks meet");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&vec![1.0; 1_000_000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    if seat.rank == 0 {
        // Kernels that wait for a rank that does not call.
        for _ in 0..3 {
            // SAFETY: the buffer outlives the stream's work.
            unsafe { context.launch(&rank.allreduce(&buffer), &rank.on_stream()) }.expect("a launch");
        }
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| context.abort());
        });
        let told = start.elapsed();
        rank.stream.synchronize(soon()).expect("the kernels have left");
        let left = start.elapsed();
        drop(context);
        let all = start.elapsed();
        assert!(all < Duration::from_secs(1), "{all:?}");
        report(format_args!("over abort {told:.1?}, kernels gone {left:.1?}, destroyed {all:.1?}"));
    } else {
        let start = Instant::now();
        while context.failure().is_none() {
            assert!(start.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
        report("over");
    }
    let context = Context::create(seat.options("after")).expect("the ranks meet");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&[1.0; 10]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    assert_eq!(rank.values(&buffer), [2.0; 10]);
}

#[test]
fn device_abort_ends_kernels_at_once() {
    let mut job = Job::start("device abort", 2, "shm");
    for over in job.await_all(&[0, 1], "over") {
        println!("rank {}: {}", over.rank, over.line);
    }
    job.all_end_well(&[0, 1]);
}
