//! Whole calls between ranks in threads, each with a driver double of its own, or with one for all.

mod ahead;
mod failure;
mod lists;
mod loading;
mod messages;
mod relay;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::super::{Call, Completion, Context, Options, Pending, Rendezvous, Work, start_together};
use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::double::{Double, DoubleKernels, Order};
use crate::cuda::driver::StreamHandle;
use crate::cuda::event::Event;
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
    /// Whether the thread that calls waits, and its stream does not.
    thread_waits: AtomicBool,
}

/// The driver of a test goes on when nobody asks it, as a device does: one task now and then.
struct Clock(Arc<AtomicBool>);

impl Clock {
    fn start(double: &Arc<Double>) -> Clock {
        let stop = Arc::new(AtomicBool::new(false));
        let (double, stopped) = (double.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if !double.step() {
                    std::thread::sleep(Duration::from_micros(200));
                } else {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
        Clock(stop)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
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
                    let _clock = Clock::start(&double);
                    let thread_waits = AtomicBool::new(false);
                    body(&Rank { context, double, devices, stream, rank, thread_waits })
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

    fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        if self.thread_waits.load(Ordering::Relaxed) {
            // SAFETY: the double trusts no address, and keeps memory until it is dropped.
            let begun = unsafe { self.context.begin(request, call) }?;
            return Pending::complete_all(vec![begun]).pop().expect("one for one");
        }
        // SAFETY: as above.
        unsafe { self.context.start(request, call) }
    }

    fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: as above.
        unsafe { self.context.run(request, call) }
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
        (0..len).map(|at| (0..size).map(|rank| given(rank, round, len)[at]).sum()).collect()
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

/// One call in the order of the stream, with work of the caller before and after it. Panics at nothing: what is wrong is
/// complained about when the stream comes to it.
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

/// Elements: none, one, odd, three pieces and a bit.
const COUNTS: [usize; 4] = [0, 1, 37, 201];

#[test]
fn every_collective_is_right() {
    for (size, transports) in [(2, "shm"), (3, "tcp")] {
        for order in [Order::Eager, Order::RoundRobin, Order::Random(7)] {
            let complaints = ranks(size, transports, order, |rank| {
                let mut round = 0;
                let mut works = Vec::new();
                for kind in COLLECTIVES {
                    for count in COUNTS {
                        for in_place in [false, true] {
                            works.push(exercise(rank, kind, count, in_place, round).expect("it starts"));
                            round += 1;
                        }
                    }
                }
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{size} over {transports}, {order:?}");
        }
    }
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

#[test]
fn lists_that_all_ranks_know_come_in_pieces_too() {
    // Of blocks: none, in one piece, some longer than others, some of several pieces.
    let lists: [[usize; 3]; 5] = [[0, 0, 0], [5, 0, 7], [201, 0, 37], [64, 300, 129], [0, 0, 500]];
    for transports in ["shm", "tcp"] {
        for order in [Order::Eager, Order::RoundRobin, Order::Random(7)] {
            let complaints = ranks(3, transports, order, |rank| {
                let mut works = Vec::new();
                for kind in [Kind::Allgather, Kind::ReduceScatter] {
                    for (round, counts) in lists.iter().enumerate() {
                        works.push(exercise_list(rank, kind, counts, round as u32).expect("it starts"));
                    }
                }
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "over {transports}, {order:?}");
        }
    }
}

/// Two calls of one kind, one after the other, on a stream that comes to them late. Without the `missing`-th entry that
/// rank `who` records (or, if `value`, its `missing`-th wait for a value). What went wrong, and how many entries are
/// recorded and values waited for by a rank.
fn twice(kind: Kind, order: Order, missing: Option<(u32, bool, usize)>) -> (Vec<String>, Vec<[usize; 2]>) {
    let answers = ranks(2, "shm", order, |rank| {
        let gate = rank.gate();
        if let Some((_, value, index)) = missing.filter(|(who, ..)| *who == rank.rank) {
            if value { rank.double.ignore_value(index) } else { rank.double.ignore_record(index) }
        }
        let before = [rank.double.records(), rank.double.values()];
        // The same root twice.
        let works = [0, 2].map(|round| exercise(rank, kind, 201, false, round).expect("it starts"));
        // Time for what comes too early.
        std::thread::sleep(Duration::from_millis(1));
        gate.release();
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        let waits = [rank.double.records() - before[0], rank.double.values() - before[1]];
        (rank.drain(), waits)
    });
    let (complaints, waits): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
    (complaints.concat(), waits)
}

#[test]
fn calls_are_right_in_every_order() {
    for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Alltoall] {
        for order in Order::all(3) {
            let (complaints, _) = twice(kind, order, None);
            assert!(complaints.is_empty(), "{kind:?}, {order:?}: {complaints:?}");
        }
    }
}

/// How often something is tried that a busy processor may hide.
const TRIES: usize = 20;

#[test]
fn every_wait_is_needed() {
    for kind in [Kind::Allreduce, Kind::Broadcast] {
        let (_, waits) = twice(kind, Order::RoundRobin, None);
        for (who, [entries, values]) in waits.into_iter().enumerate() {
            assert_eq!([entries, values], [2, 2], "{kind:?}, rank {who}");
            let all = (0..entries).map(|index| (false, index)).chain((0..values).map(|index| (true, index)));
            for (value, index) in all {
                let missing = Some((who as u32, value, index));
                let shows = |order| !twice(kind, order, missing).0.is_empty();
                // More than once: a processor that is busy elsewhere lets the streams get ahead of the call.
                let found = (0..TRIES).any(|_| Order::all(3).into_iter().any(shows));
                assert!(found, "{kind:?}: nothing goes wrong without {missing:?}");
            }
        }
    }
}

// ---- fewer queues than streams

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

/// What goes wrong when each of `doubles` has a queue for every stream of a caller and one for ours, and `body` enqueues
/// calls ahead of streams that come to them late.
fn on_few_queues(
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

/// A driver double of so many queues for each device and priority.
fn with_queues(queues: usize, order: Order) -> Arc<Double> {
    let double = Double::new(2, order);
    double.share_queues(queues);
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

#[test]
fn copy_engines_may_be_held_up_by_what_is_behind_a_call() {
    let doubles = [with_queues(1, Order::Eager), with_queues(1, Order::Eager)];
    let errors = ranks_on(&doubles, "shm", |rank| {
        let gate = rank.gate();
        let values = given(rank.rank, 0, 70);
        let memory = rank.memory(&values);
        rank.fill(memory, &values);
        let call = Call { timeout: Some(Duration::from_millis(200)), ..rank.call() };
        // It may have ended on the other rank before it begins here.
        let work = rank.start(&request(Kind::Allreduce, memory, memory, 70, 0), &call);
        rank.fill(memory, &values);
        gate.release();
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let error = result.expect_err("its copies do not run");
        // Nor will they.
        rank.double.drain();
        error
    });
    assert!(errors.iter().all(|error| error.status() == Status::Timeout), "{errors:?}");
}

#[test]
fn calls_ahead_of_their_stream_need_one_queue() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let complaints = on_few_queues(&[with_queues(1, order), with_queues(1, order)], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn ranks_of_one_process_need_one_queue_each() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(2, order);
        let complaints = on_few_queues(&[double.clone(), double], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn streams_of_two_contexts_may_wait_for_each_other() {
    for order in [Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(4, order);
        let others = [double.stream(0), double.stream(0)];
        let complaints = on_few_queues(&[double.clone(), double.clone()], "shm", |rank| {
            let second = rank.context.duplicate().expect("a second context");
            second.cuda().pretend(&rank.devices, PIECE);
            let other = Rank {
                context: second,
                double: rank.double.clone(),
                devices: rank.devices.clone(),
                stream: others[rank.rank as usize],
                rank: rank.rank,
                thread_waits: AtomicBool::new(false),
            };
            other.copy_by_kernels();
            let mut works = Vec::new();
            let follow = |one: &Rank, before: &Rank| {
                let event = Event::new(&rank.devices, 0).unwrap();
                event.record(&before.stream()).unwrap();
                one.stream().wait(&event).unwrap();
            };
            for round in 0..6 {
                works.push(exercise(rank, Kind::Allreduce, 70, false, round).expect("it starts"));
                follow(&other, rank);
                works.push(exercise(&other, Kind::Allgather, 70, false, round).expect("it starts"));
                works.extend(exchange(&other, &other.context, round));
                follow(rank, &other);
            }
            works
        });
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

// ---- without a stream, and other streams

#[test]
fn without_a_stream_the_result_is_there_on_return() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let complaints = ranks(2, "shm", order, |rank| {
            for round in 0..3 {
                let values = given(rank.rank, round, 201);
                let (input, output) = (rank.memory(&values), rank.memory(&values));
                // The caller's work on its default stream comes first.
                rank.double.fill(StreamHandle::NULL, 0, input, &bytes(&values));
                let sum = request(Kind::Allreduce, input, output, 201, 0);
                if round == 1 {
                    let work = rank.start(&sum, &Call::default()).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                } else {
                    rank.run(&sum, &Call::default()).expect("it ends well");
                }
                let due = bytes(&expected(Kind::Allreduce, 201, 2, rank.rank, 0, round));
                assert_eq!(rank.double.peek(output, due.len()), due);
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn host_memory_and_barriers_are_ordered_on_streams() {
    for order in [Order::Eager, Order::RoundRobin, Order::Last(0)] {
        let complaints = ranks(2, "shm", order, |rank| {
            // One side on the host, one on the device: every rank another.
            let values = given(rank.rank, 0, 201);
            let mut host = vec![0; 201];
            let device = rank.memory(&values);
            rank.fill(device, &values);
            let out = host.as_mut_ptr().expose_provenance() as u64;
            let work = rank.start(&request(Kind::Allreduce, device, out, 201, 0), &rank.call());
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            assert_eq!(host, expected(Kind::Allreduce, 201, 2, rank.rank, 0, 0));
            // Both on the host; the other rank makes an ordinary call.
            let mut sum = given(rank.rank, 1, 201);
            let address = sum.as_mut_ptr().expose_provenance() as u64;
            let call = if rank.rank == 0 { rank.call() } else { Call::default() };
            rank.run(&request(Kind::Allreduce, address, address, 201, 0), &call).expect("it ends well");
            assert_eq!(sum, expected(Kind::Allreduce, 201, 2, rank.rank, 0, 1));
            // A barrier tells the others when the stream has come to it.
            let flag = rank.memory(&[0]);
            rank.fill(flag, &[0]);
            let work = rank.start(&request(Kind::Barrier, 0, 0, 0, 0), &rank.call()).expect("it starts");
            rank.fill(flag, &[1]);
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn other_streams_and_callbacks_wait_for_a_work() {
    for order in Order::all(4) {
        let complaints = ranks(2, "shm", order, |rank| {
            let other = rank.double.stream(0);
            let values = given(rank.rank, 0, 201);
            let (input, output) = (rank.memory(&values), rank.memory(&values));
            rank.fill(input, &values);
            let sum = request(Kind::Allreduce, input, output, 201, 0);
            let work = rank.start(&sum, &rank.call()).expect("it starts");
            let called = Arc::new(AtomicU32::new(0));
            let counted = called.clone();
            work.on_complete(Box::new(move |result| {
                assert!(result.is_ok());
                counted.fetch_add(1, Ordering::SeqCst);
            }));
            // SAFETY: the double trusts no handle.
            unsafe { work.block_stream(other) }.expect("it waits");
            let due = bytes(&expected(Kind::Allreduce, 201, 2, rank.rank, 0, 0));
            rank.double.expect(other, 0, output, &due, "before the work was done");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            let complaints = rank.drain();
            assert_eq!(called.load(Ordering::SeqCst), 1);
            complaints
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn streams_that_cannot_wait_for_the_host_have_the_host_wait() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.double.forbid_wait_value();
        for (round, kind) in COLLECTIVES.into_iter().enumerate() {
            exercise(rank, kind, 201, round % 2 == 0, round as u32).expect("it ends well");
        }
        assert_eq!(rank.double.values(), 0);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn a_second_call_creates_nothing() {
    ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 1000);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let mut before = 0;
        for round in 0..4 {
            if round == 1 {
                before = rank.double.creations();
            }
            let sum = request(Kind::Allreduce, input, output, 1000, 0);
            let work = rank.start(&sum, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(rank.double.creations(), before);
        rank.drain()
    });
}

// ---- trouble

/// What is wrong however the call ends: streams that wait for ever, memory that is freed while in use.
fn grave(complaints: Vec<String>) -> Vec<String> {
    complaints
        .into_iter()
        .filter(|text| text.contains("for ever") || text.contains("while a stream"))
        .collect()
}

#[test]
fn a_driver_call_that_fails_is_named_on_all_ranks() {
    for failing in 0.. {
        let outcomes = ranks(2, "shm", Order::RoundRobin, |rank| {
            // Everybody is there before anything goes wrong.
            rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default()).expect("a barrier");
            if rank.rank == 0 {
                rank.double.fail_call(failing);
            }
            let result = exercise(rank, Kind::Allreduce, 201, false, 0)
                .and_then(|work| work.wait(Deadline::after(PATIENCE)));
            if result.is_err() {
                assert!(rank.context.failure().is_some(), "the group has failed");
            }
            (result.err(), grave(rank.drain()))
        });
        let errors: Vec<Error> = outcomes.iter().filter_map(|(error, _)| error.clone()).collect();
        for (_, complaints) in outcomes {
            assert_eq!(complaints, Vec::<String>::new(), "call {failing}: {errors:?}");
        }
        if errors.is_empty() {
            assert!(failing > 50, "only {failing} calls");
            return;
        }
        for error in &errors {
            assert!(error.text().contains(" failed: CUDA_ERROR_INJECTED: "), "call {failing}: {error}");
            assert_eq!(error.status(), Status::Cuda);
        }
    }
}

#[test]
fn a_deadline_lets_the_stream_go_on() {
    let outcomes = ranks(2, "shm", Order::RoundRobin, |rank| {
        let mut answer = (None, Vec::new());
        if rank.rank == 0 {
            let values = given(0, 0, 201);
            let (input, output) = (rank.memory(&values), rank.memory(&values));
            rank.fill(input, &values);
            let call = Call { timeout: Some(Duration::from_millis(100)), ..rank.call() };
            let work =
                rank.start(&request(Kind::Allreduce, input, output, 201, 0), &call).expect("it starts");
            let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not call");
            answer = (Some(error), grave(rank.drain()));
        } else {
            let until = Instant::now() + PATIENCE;
            while rank.context.failure().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        answer
    });
    let (error, complaints) = &outcomes[0];
    let error = error.as_ref().expect("it has failed");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("nothing from rank 1"), "{error}");
    assert_eq!(complaints, &Vec::<String>::new());
}

#[test]
fn a_stream_that_comes_late_to_a_failed_call_goes_on_all_the_same() {
    let outcomes = ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 201);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let gate = rank.memory(&[0]);
        rank.fill(gate, &[0]);
        let devices = Devices::over(rank.double.clone()).unwrap();
        {
            let _entered = devices.enter(0).unwrap();
            // SAFETY: the double trusts nothing.
            unsafe { devices.driver().wait_value(rank.stream, gate, 1) }.unwrap();
        }
        rank.fill(input, &values);
        let call = Call { timeout: Some(Duration::from_millis(100)), ..rank.call() };
        // It may have ended on the other rank before it begins here.
        let result = rank.start(&request(Kind::Allreduce, input, output, 201, 0), &call);
        let result = result.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let error = result.expect_err("the streams do not come to it");
        assert!(!rank.double.is_idle(), "the stream is still waiting");
        let opener = rank.double.stream(0);
        rank.double.fill(opener, 0, gate, &1u32.to_ne_bytes());
        (error.status(), grave(rank.drain()))
    });
    for (status, complaints) in outcomes {
        assert_eq!((status, complaints), (Status::Timeout, Vec::<String>::new()));
    }
}

#[test]
fn ranks_that_differ_in_their_memory_are_told() {
    let errors = ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 201);
        let mut host = values.clone();
        let address = match rank.rank {
            0 => rank.memory(&values),
            _ => host.as_mut_ptr().expose_provenance() as u64,
        };
        rank.run(&request(Kind::Allreduce, address, address, 201, 0), &Call::default())
            .expect_err("they differ")
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        let [host, device] = ["allreduce(201 × int32, sum)", "allreduce(201 × int32, sum) on device memory"];
        assert!(error.text().contains(host) && error.text().contains(device), "{error}");
    }
}

#[test]
fn wrong_memory_and_wrong_streams_are_named() {
    ranks(2, "shm", Order::Eager, |rank| {
        let (here, there) = (rank.double.memory(0, 400), rank.double.memory(1, 400));
        let refused = |input, output, call: &Call| -> (Status, String) {
            let error = rank.run(&request(Kind::Allreduce, input, output, 100, 0), call).unwrap_err();
            (error.status(), error.text().to_owned())
        };
        let argument = |text: &str| (Status::InvalidArgument, text.to_owned());
        assert_eq!(
            refused(here, there, &Call::default()),
            argument("sendbuf is memory of GPU 0, but recvbuf of GPU 1: buffers of a call share a device")
        );
        assert_eq!(
            refused(there, there, &rank.call()),
            argument("call->stream is a stream of GPU 0, but sendbuf is memory of GPU 1")
        );
        assert_eq!(
            refused(here, rank.double.memory(0, 399), &Call::default()),
            argument("recvbuf has 399 bytes left in its allocation, but 400 are needed")
        );
        let (status, text) = refused(16, here, &Call::default());
        assert_eq!(status, Status::InvalidArgument);
        assert!(text.starts_with("sendbuf (0x10) is neither memory that CUDA knows nor"), "{text}");
        rank.double.begin_capture(rank.stream, 0);
        let (status, text) = refused(here, here, &rank.call());
        assert_eq!(status, Status::InvalidUsage);
        assert_eq!(text, "call->stream is being captured: a call by way of the host cannot be captured");
        assert!(rank.double.end_capture(rank.stream, 0).is_ok(), "the capture is still good");
        // Nothing has begun: the group still works.
        exercise(rank, Kind::Allreduce, 201, true, 0)
            .and_then(|work| work.wait(Deadline::after(PATIENCE)))
            .expect("it ends well");
        assert_eq!(rank.drain(), Vec::<String>::new());
    });
}

#[test]
fn a_group_of_one_copies_on_the_stream() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        ranks(1, "shm", order, |rank| {
            for in_place in [false, true] {
                for (round, kind) in COLLECTIVES.into_iter().enumerate() {
                    let work = exercise(rank, kind, 37, in_place, round as u32).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
            }
            let (input, output) = (rank.memory(&[0; 4]), rank.memory(&[0; 4]));
            rank.fill(input, &[f32::to_bits(1.5) as i32; 4]);
            let scaled = Request {
                dtype: DataType::F32,
                operator: Operator::PreMulSum(2.0),
                ..request(Kind::Allreduce, input, output, 4, 0)
            };
            rank.run(&scaled, &rank.call()).expect("it ends well");
            rank.expect(output, &[f32::to_bits(3.0) as i32; 4], "scaled");
            assert_eq!(rank.drain(), Vec::<String>::new(), "{order:?}");
        });
    }
}
