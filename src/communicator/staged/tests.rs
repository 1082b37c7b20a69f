//! Whole calls between ranks in threads, each with a driver double of its own, or with one for all.

mod ahead;
mod collectives;
mod combined;
mod failure;
mod limits;
mod lists;
mod loading;
mod messages;
mod overlap;
mod queues;
mod relay;
mod streams;
mod trouble;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::super::{
    AlgorithmOptions, Call, Completion, Context, Options, Pending, Prepared, Rendezvous, Work, start_together,
};
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::double::{Clock, Double, DoubleKernels, Order};
use crate::cuda::driver::StreamHandle;
use crate::cuda::queues::MOST;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::{DataType, Operator};
use crate::rendezvous::hash::HashStore;
use crate::rendezvous::store::Store;

/// Bytes of a piece in these tests: 64 elements of 4 bytes.
const PIECE: usize = 256;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank: its context, its devices, a stream of its caller's.
struct Rank {
    context: Context,
    double: Arc<Double>,
    devices: Arc<Devices>,
    stream: StreamHandle,
    rank: u32,
    /// Whether the thread that calls waits for what side streams do, and its stream does not.
    completes: AtomicBool,
}

/// Runs `body` on `size` ranks, each with devices of its own. What they return, by rank.
fn ranks<T: Send>(size: u32, transports: &str, order: Order, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let doubles: Vec<_> = (0..size).map(|_| Double::new(2, order)).collect();
    ranks_on(&doubles, transports, body)
}

/// Runs `body` on a rank for each of `doubles`, which may be the same. What they return, by rank.
fn ranks_on<T: Send>(doubles: &[Arc<Double>], transports: &str, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let mut all: Vec<Arc<Devices>> = Vec::new();
    for (index, double) in doubles.iter().enumerate() {
        let same = doubles[..index].iter().position(|other| Arc::ptr_eq(other, double));
        let devices = same.map(|same| all[same].clone());
        all.push(devices.unwrap_or_else(|| Devices::over(double.clone()).unwrap()));
    }
    // Streams of callers are made before any of ours.
    let streams: Vec<StreamHandle> = doubles.iter().map(|double| double.stream(0)).collect();
    let size = doubles.len() as u32;
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                let (double, stream) = (doubles[rank as usize].clone(), streams[rank as usize]);
                let devices = all[rank as usize].clone();
                scope.spawn(move || {
                    let context = join(rank, size, Rendezvous::Store(store), transports);
                    context.cuda().pretend(&devices, PIECE);
                    let _clock = Clock::start_slow(&double);
                    let completes = AtomicBool::new(false);
                    body(&Rank { context, double, devices, stream, rank, completes })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// A rank's context.
fn join(rank: u32, size: u32, rendezvous: Rendezvous, transports: &str) -> Context {
    Context::create(Options {
        rank,
        size,
        rendezvous,
        name: String::new(),
        timeout: PATIENCE,
        interface: Some("127.0.0.1".into()),
        transports: Some(transports.into()),
        host: None,
    })
    .expect("the ranks meet")
}

impl Rank {
    fn call(&self) -> Call {
        Call { stream: Some(self.stream), ..Call::default() }
    }

    fn memory(&self, values: &[i32]) -> u64 {
        self.double.memory(0, values.len().max(1) * 4)
    }

    fn fill(&self, address: u64, values: &[i32]) {
        self.double.fill(self.stream, 0, address, &bytes(values));
    }

    fn expect(&self, address: u64, values: &[i32], what: &str) {
        self.double.expect(self.stream, 0, address, &bytes(values), what);
    }

    /// The caller's stream.
    fn stream(&self) -> Stream {
        // SAFETY: it lives as long as the double.
        unsafe { Stream::borrow(&self.devices, 0, self.stream) }.unwrap()
    }

    /// Has the caller's stream wait until the answer is released.
    fn gate(&self) -> Word {
        let gate = self.devices.word(0).unwrap();
        self.stream().wait_word(&gate).unwrap();
        gate
    }

    /// Has the default stream of `device` wait until the answer is released.
    fn gate_default(&self, device: u32) -> Word {
        let gate = self.devices.word(device).expect("a word");
        // SAFETY: a default stream lives as long as its device.
        let default = unsafe { Stream::borrow(&self.devices, device, StreamHandle::LEGACY) };
        default.expect("a stream").wait_word(&gate).expect("it waits");
        gate
    }

    fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        if self.completes.load(Ordering::Relaxed) {
            // SAFETY: the double trusts no address, and keeps memory until it is dropped.
            let begun = unsafe { self.context.begin(request, call) }?;
            return begun.complete();
        }
        // SAFETY: as above.
        unsafe { self.context.begin(request, call) }?.close()
    }

    fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: as above.
        unsafe { self.context.run(request, call) }
    }

    /// An algorithm object.
    fn prepare(&self, options: AlgorithmOptions) -> Prepared {
        // SAFETY: as above.
        unsafe { Prepared::new(&self.context, options) }.expect("an algorithm")
    }

    /// Copies go through the queues of kernels.
    fn copy_by_kernels(&self) {
        self.context.cuda().pretend_kernels(Arc::new(DoubleKernels(self.double.clone())));
    }

    /// Waits until the streams have nothing left to do.
    fn drain(&self) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        while !self.double.is_idle() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(100));
        }
        // Complains if they wait for each other.
        self.double.drain();
        self.double.complaints()
    }
}

fn bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn request(kind: Kind, input: u64, output: u64, count: u64, root: u32) -> Request {
    Request {
        kind,
        input: pointer(input).cast_const(),
        output: pointer(output),
        counts: Counts::Uniform(count),
        dtype: DataType::I32,
        operator: Operator::Sum,
        root,
    }
}

/// Of an algorithm object over these pointers, with a stream for each or none.
fn algorithm(kind: Kind, pointers: [u64; 2], streams: &[StreamHandle], count: usize) -> AlgorithmOptions {
    AlgorithmOptions {
        kind,
        algorithm: 0,
        buffers: pointers.map(pointer).into(),
        streams: streams.to_vec(),
        count: count as u64,
        dtype: DataType::I32,
        operator: Operator::Sum,
        root: 0,
        root_buffer: 0,
        call: Call::default(),
    }
}

/// What `rank` contributes: `len` numbers.
fn given(rank: u32, round: u32, len: usize) -> Vec<i32> {
    (0..len as i32).map(|index| index * 7 + rank as i32 * 1009 + round as i32 * 100_003).collect()
}

const COLLECTIVES: [Kind; 8] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
];

/// Elements that a rank reads and writes.
fn lengths(kind: Kind, count: usize, size: u32, is_root: bool) -> (usize, usize) {
    let all = count * size as usize;
    match kind {
        Kind::Allreduce => (count, count),
        Kind::Reduce => (count, if is_root { count } else { 0 }),
        Kind::Broadcast => (if is_root { count } else { 0 }, count),
        Kind::Allgather => (count, all),
        Kind::Gather => (count, if is_root { all } else { 0 }),
        Kind::Scatter => (if is_root { all } else { 0 }, count),
        Kind::ReduceScatter => (all, count),
        _ => (all, all),
    }
}

/// What `rank` obtains.
fn expected(kind: Kind, count: usize, size: u32, rank: u32, root: u32, round: u32) -> Vec<i32> {
    let sum = |len: usize| -> Vec<i32> {
        let all: Vec<Vec<i32>> = (0..size).map(|rank| given(rank, round, len)).collect();
        (0..len).map(|at| all.iter().map(|one| one[at]).sum()).collect()
    };
    let all = count * size as usize;
    let block = |rank: u32| rank as usize * count..(rank as usize + 1) * count;
    match kind {
        Kind::Allreduce | Kind::Reduce => sum(count),
        Kind::Broadcast => given(root, round, count),
        Kind::Allgather | Kind::Gather => (0..size).flat_map(|rank| given(rank, round, count)).collect(),
        Kind::Scatter => given(root, round, all)[block(rank)].to_vec(),
        Kind::ReduceScatter => sum(all)[block(rank)].to_vec(),
        _ => (0..size).flat_map(|from| given(from, round, all)[block(rank)].to_vec()).collect(),
    }
}

/// Elements from the start of the input to that of the output in place.
fn alias(kind: Kind, count: usize, rank: u32) -> i64 {
    let before = i64::from(rank) * count as i64;
    match kind {
        Kind::Allgather | Kind::Gather => -before,
        Kind::Scatter | Kind::ReduceScatter => before,
        _ => 0,
    }
}

/// One call in the order of the stream, with work of the caller before and after it. Panics at nothing: what
/// is wrong is complained about when the stream comes to it.
fn exercise(rank: &Rank, kind: Kind, count: usize, in_place: bool, round: u32) -> Result<Work> {
    let size = rank.context.size();
    let root = round % size;
    let is_root = rank.rank == root;
    let (reads, writes) = lengths(kind, count, size, is_root);
    let input_values = given(rank.rank, round, reads);
    let result = expected(kind, count, size, rank.rank, root, round);
    let result = &result[..writes];
    let (input, output) = if in_place && reads > 0 && writes > 0 {
        let base = rank.memory(&vec![0; reads.max(writes)]);
        match alias(kind, count, rank.rank) * 4 {
            distance if distance < 0 => (base + distance.unsigned_abs(), base),
            distance => (base, base + distance as u64),
        }
    } else {
        (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]))
    };
    let old = vec![-1; writes];
    let separate = !in_place || reads == 0;
    if separate {
        rank.fill(output, &old);
        rank.expect(output, &old, "the output was written before its time");
    }
    rank.fill(input, &vec![-2; reads]);
    rank.fill(input, &input_values);
    let (from, to) = match kind {
        Kind::Broadcast if !is_root => (0, output),
        _ => (input, if writes > 0 { output } else { 0 }),
    };
    let work = rank.start(&request(kind, from, to, count as u64, root), &rank.call())?;
    rank.expect(output, result, &format!("{kind:?} of {count} on rank {} of {size}", rank.rank));
    // The caller goes on with its input.
    rank.fill(input, &vec![-3; reads]);
    Ok(work)
}

/// As [`exercise`], for a call with a block of another length for each rank.
fn exercise_list(rank: &Rank, kind: Kind, counts: &[usize], round: u32) -> Result<Work> {
    let (own, all) = (counts[rank.rank as usize], counts.iter().sum());
    let start = counts[..rank.rank as usize].iter().sum::<usize>();
    let gathers = kind == Kind::Allgather;
    let (reads, writes) = if gathers { (own, all) } else { (all, own) };
    let result: Vec<i32> = if gathers {
        let given = |(other, &count)| given(other as u32, round, count);
        counts.iter().enumerate().flat_map(given).collect()
    } else {
        let sum = |at| (0..counts.len() as u32).map(|other| given(other, round, all)[at]).sum();
        (start..start + own).map(sum).collect()
    };
    let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
    rank.fill(input, &vec![-2; reads]);
    rank.fill(input, &given(rank.rank, round, reads));
    let counts = Counts::Blocks(counts.iter().map(|&count| count as u64).collect());
    let request = Request { counts, ..request(kind, input, output, 0, 0) };
    let work = rank.start(&request, &rank.call())?;
    rank.expect(output, &result, &format!("{kind:?} of {:?} on rank {}", request.counts, rank.rank));
    rank.fill(input, &vec![-3; reads]);
    Ok(work)
}

/// What a rank's stream is told of its calls and a test leaves out: of rank `.0` the entry that it records of
/// the `.2`-th call, or, if `.1`, its wait for the call's end.
type Missing = (u32, bool, usize);

/// Two calls, one after the other, on a stream that comes to each of them late. What went wrong, and how many
/// entries are recorded and values waited for by a rank.
fn twice(
    transports: &str,
    order: Order,
    missing: Option<Missing>,
    call: impl Fn(&Rank, u32) -> Work + Sync,
) -> (Vec<String>, Vec<[usize; 2]>) {
    let answers = ranks(2, transports, order, |rank| {
        let missing = missing.filter(|(who, ..)| *who == rank.rank);
        let first_gate = rank.gate();
        if let Some((_, value, index)) = missing {
            // The second gate is a wait for a value, too.
            if value { rank.double.ignore_value(2 * index) } else { rank.double.ignore_record(index) }
        }
        let before = [rank.double.records(), rank.double.values()];
        let first = call(rank, 0);
        let gates = [first_gate, rank.gate()];
        // The same root.
        let works = [first, call(rank, 2)];
        // Time for what comes too early.
        std::thread::sleep(Duration::from_millis(1));
        let held = missing.and_then(|(_, value, index)| (!value).then_some(index));
        for index in (0..2).rev().filter(|index| Some(*index) != held) {
            gates[index].release();
        }
        if let Some(index) = held {
            // It knows nothing of its stream, and ends without it.
            let until = Instant::now() + PATIENCE;
            while works[index].test().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(100));
            }
            gates[index].release();
        }
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        let waits = [rank.double.records() - before[0], rank.double.values() - before[1] - 1];
        (rank.drain(), waits)
    });
    let (complaints, waits): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
    (complaints.concat(), waits)
}

/// Something goes wrong in some order of the streams without any one of what `twice` leaves out.
fn each_wait_is_needed(twice: impl Fn(Order, Option<Missing>) -> (Vec<String>, Vec<[usize; 2]>)) {
    let (_, waits) = twice(Order::RoundRobin, None);
    for (who, [entries, values]) in waits.into_iter().enumerate() {
        assert_eq!([entries, values], [2, 2], "rank {who}");
        let all = (0..entries).map(|index| (false, index)).chain((0..values).map(|index| (true, index)));
        for (value, index) in all {
            let missing = Some((who as u32, value, index));
            let shows = |order| !twice(order, missing).0.is_empty();
            assert!(Order::all(3).into_iter().any(shows), "nothing goes wrong without {missing:?}");
        }
    }
}

/// How often something is tried that a busy processor may hide.
const TRIES: usize = 20;

/// Both halves of an exchange with `peer`, as a group, with work of the caller before and after it.
fn exchange(rank: &Rank, context: &Context, round: u32) -> Vec<Work> {
    const LEN: usize = 100;
    let peer = 1 - rank.rank;
    let values = given(rank.rank, round, LEN);
    let (out, into) = (rank.memory(&values), rank.memory(&values));
    rank.fill(out, &values);
    let send = request(Kind::Send, out, 0, LEN as u64, peer);
    let receive = request(Kind::Receive, 0, into, LEN as u64, peer);
    let call = rank.call();
    // SAFETY: the double trusts no address, and keeps memory until it is dropped.
    let works = unsafe { start_together(&[(context, &send, &call), (context, &receive, &call)]) };
    rank.expect(into, &given(peer, round, LEN), "received");
    rank.fill(out, &[-2; LEN]);
    works.expect("they start")
}

/// What goes wrong when `body` enqueues calls ahead of streams that come to them late.
fn ahead_of_streams(
    doubles: &[Arc<Double>],
    transports: &str,
    body: impl Fn(&Rank) -> Vec<Work> + Sync,
) -> Vec<String> {
    let met = Barrier::new(doubles.len());
    let complaints = ranks_on(doubles, transports, |rank| {
        rank.copy_by_kernels();
        let gate = rank.gate();
        let works = body(rank);
        gate.release();
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        met.wait();
        rank.drain()
    });
    complaints.concat()
}

/// A driver double of so many queues.
fn with_queues(queues: usize, order: Order) -> Arc<Double> {
    let double = Double::new(2, order);
    double.share_queues(queues, queues);
    double
}

/// Many calls, in groups and alone.
fn many(rank: &Rank) -> Vec<Work> {
    let mut works = Vec::new();
    for round in 0..8 {
        works.extend(exchange(rank, &rank.context, round));
        for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Alltoall] {
            works.push(exercise(rank, kind, 70, round % 2 == 0, round).expect("it starts"));
        }
        works.extend(exchange(rank, &rank.context, round));
    }
    works
}

/// What is wrong however the call ends: streams that wait for ever, memory that is freed while in use.
fn grave(complaints: Vec<String>) -> Vec<String> {
    complaints
        .into_iter()
        .filter(|text| text.contains("for ever") || text.contains("while a stream"))
        .collect()
}
