//! Ranks are threads; a host is a driver double with a device for each of its ranks. The kernels that exchange are made of
//! the double's copies, folds and words.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::*;
use crate::collective::request::Counts;
use crate::communicator::device::{Candidate, connect};
use crate::communicator::{Call, Completion, Options, Pending, Rendezvous, start_together};
use crate::cuda::context::Devices;
use crate::cuda::double::{Double, DoubleKernels, Order, Waiting};
use crate::cuda::driver::StreamHandle;
use crate::cuda::exchange::{Chosen, Direction, Fault, Job, Point, Pull, Seen, Shared, Table};
use crate::cuda::local::{Fold, Kernels as Folds, Operand};
use crate::cuda::stream::Stream;
use crate::engine::device::{Kernels, Loads};
use crate::engine::endpoint::lock;
use crate::error::{Error, Status};
use crate::reduce::{DataType, Representation};
use crate::rendezvous::hash::HashStore;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a piece between hosts.
const PIECE: usize = 1024;

/// Bytes that a member gives another in one call, at most.
const SLOT: u64 = 64 << 10;

// ---- kernels

thread_local! {
    /// The driver of the rank that this thread is.
    static DRIVER: RefCell<Option<Arc<Double>>> = const { RefCell::new(None) };
}

fn driver() -> Arc<Double> {
    DRIVER.with_borrow(|double| double.clone().expect("a rank's thread"))
}

const LOADS: Loads = Loads {
    exchange: |_, _, rank, arenas, fault, _| {
        let folds = DoubleKernels(driver());
        let calls = Mutex::new(0);
        Ok(Box::new(Members { rank, arenas: arenas.to_vec(), folds, calls, fault }))
    },
    fold: |_| Arc::new(DoubleKernels(driver())),
};

fn agree(context: &Context, device: u32, devices: &Arc<Devices>) -> Result<()> {
    let candidate = Candidate { context, device, first: None };
    connect(&[candidate], || Ok(devices.clone()), choose, LOADS)
}

fn choose(_: &Devices, _: u32) -> Result<Chosen> {
    Ok(Chosen { table: Table::default(), by_hand: false })
}

/// Kernels of the double, for ranks of one process: in each call, every member puts what it gives into the others' arenas,
/// takes from its own what it was given, and says so. The arenas' first word is the latch.
#[derive(Debug)]
struct Members {
    rank: u32,
    arenas: Vec<u64>,
    folds: DoubleKernels,
    calls: Mutex<u32>,
    fault: Arc<Fault>,
}

impl Members {
    /// Where `member` has its slot in this rank's arena.
    fn slot(&self, arena: u32, member: u32) -> u64 {
        self.arenas[arena as usize] + 4096 + u64::from(member) * SLOT
    }

    /// Copies as kernels do, also from and to pinned memory.
    ///
    /// # Safety
    /// None: the double trusts no address.
    unsafe fn copy(&self, stream: &Stream, to: u64, from: u64, bytes: u64) -> Result<()> {
        let (dtype, operator, representation) = (DataType::U8, Operator::Sum, Representation::Element);
        let operands = &[Operand { address: from, representation, scale: 1.0 }];
        let count = bytes as usize;
        let fold = Fold { stream, dtype, operator, ranks: 1, operands, out: to, representation, count };
        // SAFETY: as above.
        unsafe { self.folds.fold(stream.devices(), &fold) }
    }

    /// One call: gives, takes by `take`, waits for the others to have taken.
    fn meet(
        &self,
        gives: &[(u32, u64, u64)],
        stream: &Stream,
        take: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.fault.is_aborted() {
            fail!(Aborted, "a call after the abort");
        }
        let mut calls = lock(&self.calls);
        *calls += 1;
        let members = 0..self.arenas.len() as u32;
        let word = |arena: u32, at: u32| self.arenas[arena as usize] + 4 * u64::from(at);
        let (own, size) = (self.rank, self.arenas.len() as u32);
        let mut filled = vec![0; self.arenas.len()];
        // SAFETY: arenas are mapped, and larger than this; the double trusts no other addresses.
        unsafe {
            for &(peer, from, bytes) in gives {
                let to = self.slot(peer, own) + filled[peer as usize];
                filled[peer as usize] += bytes;
                assert!(filled[peer as usize] <= SLOT);
                self.copy(stream, to, from, bytes)?;
            }
            for peer in members.clone() {
                stream.write_value(word(peer, 1 + own), *calls)?;
                stream.wait_value(word(own, 1 + peer), *calls)?;
            }
            take()?;
            for peer in members {
                stream.write_value(word(peer, 1 + size + own), *calls)?;
                stream.wait_value(word(own, 1 + size + peer), *calls)?;
            }
        }
        Ok(())
    }
}

impl Kernels for Members {
    fn serves(&self, _: Kind, _: DataType, operator: &Operator) -> bool {
        !matches!(operator, Operator::Custom(_))
    }

    unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()> {
        let bytes = job.count * job.dtype.size() as u64;
        let members = 0..self.arenas.len() as u32;
        let gives: Vec<_> = match job.kind {
            Kind::Broadcast if self.rank != job.root => Vec::new(),
            Kind::ReduceScatter => {
                members.clone().map(|peer| (peer, job.input + u64::from(peer) * bytes, bytes)).collect()
            }
            _ => members.clone().map(|peer| (peer, job.input, bytes)).collect(),
        };
        self.meet(&gives, stream, || {
            if job.kind == Kind::Broadcast {
                let from = self.slot(self.rank, job.root);
                // SAFETY: the double trusts no address.
                return unsafe { self.copy(stream, job.output, from, bytes) };
            }
            let operand = |member| Operand {
                address: self.slot(self.rank, member),
                representation: Representation::Element,
                scale: 1.0,
            };
            let operands: Vec<Operand> = members.map(operand).collect();
            let fold = Fold {
                stream,
                dtype: job.dtype,
                operator: job.operator,
                ranks: 1,
                operands: &operands,
                out: job.output,
                representation: Representation::Element,
                count: job.count as usize,
            };
            // SAFETY: as above.
            unsafe { self.folds.fold(stream.devices(), &fold) }
        })
    }

    fn shares(&self, _: &Job) -> Option<Shared> {
        None
    }

    unsafe fn enqueue_windowed(&self, _: &Job, _: &Seen, _: &Stream) -> Result<()> {
        panic!("there are no windows here")
    }

    unsafe fn enqueue_pull(&self, _: &Pull, _: &Stream) -> Result<()> {
        panic!("there are several hosts")
    }

    unsafe fn enqueue_points(&self, points: &[Point], _: u32, stream: &Stream) -> Result<()> {
        let sends = points.iter().filter(|point| point.direction == Direction::Send);
        let gives: Vec<_> = sends.map(|point| (point.peer, point.address, point.bytes)).collect();
        if points.iter().all(|point| point.peer == self.rank) {
            // Nobody else has to do with it.
            for pair in points.chunks_exact(2) {
                // SAFETY: the double trusts no address.
                unsafe { self.copy(stream, pair[1].address, pair[0].address, pair[0].bytes) }?;
            }
            return Ok(());
        }
        self.meet(&gives, stream, || {
            let mut taken = vec![0; self.arenas.len()];
            for point in points.iter().filter(|point| point.direction == Direction::Receive) {
                let from = self.slot(self.rank, point.peer) + taken[point.peer as usize];
                taken[point.peer as usize] += point.bytes;
                // SAFETY: as above.
                unsafe { self.copy(stream, point.address, from, point.bytes) }?;
            }
            Ok(())
        })
    }
}

// ---- ranks

struct Rank {
    context: Context,
    double: Arc<Double>,
    device: u32,
    stream: StreamHandle,
    /// Whether the thread that calls waits, and its stream does not.
    thread_waits: bool,
}

/// The drivers go on when nobody asks them, as devices do.
struct Clock(Arc<AtomicBool>);

impl Clock {
    fn start(double: &Arc<Double>) -> Clock {
        let stop = Arc::new(AtomicBool::new(false));
        let (double, stopped) = (double.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if !double.step() {
                    std::thread::sleep(Duration::from_micros(100));
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

/// Runs `body` on `inside` ranks of each of `hosts` hosts; what it answers, by rank. Streams come to an end.
fn ranks<T: Send>(hosts: u32, inside: u32, order: Order, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let (answers, doubles) = ranks_of(hosts, inside, order, 1, body);
    for double in doubles {
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new(), "{order:?}");
    }
    answers
}

/// As [`ranks`]; what streams were given may wait for ever, since nothing ends the kernels of the double.
fn ranks_that_fail<T: Send>(body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    ranks_of(2, 2, Order::RoundRobin, 1, body).0
}

/// Runs `body` on `inside` ranks of each of `hosts` hosts, which has so many processes: a driver double for each, with a device
/// for each of its ranks. What it answers, by rank, and the doubles.
fn ranks_of<T: Send>(
    hosts: u32,
    inside: u32,
    order: Order,
    processes: u32,
    body: impl Fn(&Rank) -> T + Sync,
) -> (Vec<T>, Vec<Arc<Double>>) {
    let seats = inside / processes;
    let doubles: Vec<_> = (0..hosts * processes).map(|_| Double::new(seats, order)).collect();
    let devices: Vec<_> = doubles.iter().map(|double| Devices::over(double.clone()).unwrap()).collect();
    let streams: Vec<StreamHandle> =
        (0..hosts * inside).map(|rank| doubles[(rank / seats) as usize].stream(rank % seats)).collect();
    let store = Arc::new(HashStore::new());
    let answers = std::thread::scope(|scope| {
        let clocks: Vec<_> = doubles.iter().map(Clock::start).collect();
        let threads: Vec<_> = (0..hosts * inside)
            .map(|rank| {
                let (store, body, host, stream) =
                    (store.clone(), &body, rank / inside, streams[rank as usize]);
                let process = (rank / seats) as usize;
                let (double, devices) = (doubles[process].clone(), devices[process].clone());
                scope.spawn(move || {
                    DRIVER.set(Some(double.clone()));
                    let context = Context::create(Options {
                        rank,
                        size: hosts * inside,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: PATIENCE,
                        interface: Some("127.0.0.1".into()),
                        transports: Some("shm,tcp".into()),
                        host: Some(format!("host {host}")),
                    })
                    .expect("the ranks meet");
                    let device = rank % seats;
                    context.cuda().pretend(&devices, PIECE);
                    context.cuda().pretend_loads(LOADS);
                    agree(&context, device, &devices).expect("an agreement");
                    assert_eq!(context.device_way(), Some(Ok(())));
                    body(&Rank { context, double, device, stream, thread_waits: processes > 1 })
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let answers: Vec<T> = threads.into_iter().map(join).collect();
        drop(clocks);
        answers
    });
    (answers, doubles)
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// A call, without its memory.
#[derive(Clone, Copy, Debug)]
struct What {
    kind: Kind,
    count: u64,
    dtype: DataType,
    operator: Operator,
    root: u32,
}

impl What {
    fn request(&self, input: *const u8, output: *mut u8) -> Request {
        let What { kind, count, dtype, operator, root } = *self;
        Request { kind, input, output, counts: Counts::Uniform(count), dtype, operator, root }
    }

    /// Bytes that a rank reads and writes.
    fn lengths(&self, size: u32, is_root: bool) -> (usize, usize) {
        let one = self.count as usize * self.dtype.size();
        let all = one * size as usize;
        match self.kind {
            Kind::Reduce => (one, if is_root { one } else { 0 }),
            Kind::Allgather => (one, all),
            Kind::ReduceScatter => (all, one),
            Kind::Alltoall => (all, all),
            _ => (one, one),
        }
    }
}

/// Elements of about the same size, with all their digits.
fn elements(dtype: DataType, count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        let random = next();
        let word = match dtype {
            DataType::F16 => random & 0x8bff | 0x3400,
            DataType::Bf16 => random & 0x80ff | 0x3f00,
            DataType::F8E4M3 => random & 0x8f | 0x30,
            DataType::F8E5M2 => random & 0x87 | 0x38,
            DataType::F32 => random & 0x80ff_ffff | 0x3f00_0000,
            DataType::F64 => random & 0x800f_ffff_ffff_ffff | 0x3fe0_0000_0000_0000,
            _ => random,
        };
        bytes.extend_from_slice(&word.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

impl Rank {
    fn call(&self) -> Call {
        Call { stream: Some(self.stream), thread_waits: self.thread_waits, ..Call::default() }
    }

    fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        // SAFETY: the double trusts no address.
        let begun = unsafe { self.context.begin(request, call) }?;
        match self.thread_waits {
            true => Pending::complete_all(vec![begun]).pop().expect("one for one"),
            false => begun.close(),
        }
    }

    /// Runs it on a stream and on none, apart and in place, and compares with what host memory has.
    fn exercise(&self, what: What, seed: u64) {
        let (rank, size) = (self.context.rank(), self.context.size());
        let (reads, writes) = what.lengths(size, rank == what.root);
        let input = elements(what.dtype, reads / what.dtype.size(), seed + u64::from(rank));
        let mut due = vec![0u8; writes];
        if what.kind == Kind::Broadcast {
            due.copy_from_slice(&input);
        }
        let to = if writes > 0 { due.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: both are as long as the request says.
        unsafe { self.context.run(&what.request(input.as_ptr(), to), &Call::default()) }
            .unwrap_or_else(|error| panic!("{what:?} on host memory: {error}"));
        let apart = Call { stream: None, ..self.call() };
        for (call, in_place) in [(self.call(), false), (self.call(), true), (apart, false)] {
            let before = u64::from(rank) * what.count * what.dtype.size() as u64;
            let (from, to) = if in_place {
                let base = self.double.memory(self.device, reads.max(writes).max(1));
                match what.kind {
                    Kind::Allgather => (base + before, base),
                    Kind::ReduceScatter => (base, base + before),
                    _ => (base, base),
                }
            } else {
                let memory = |bytes: usize| self.double.memory(self.device, bytes.max(1));
                (memory(reads), memory(writes))
            };
            // The exchange's own stream comes after the default stream.
            let stream = call.stream.unwrap_or(StreamHandle::NULL);
            self.double.fill(stream, self.device, from, &input);
            let request = what.request(pointer(from).cast_const(), pointer(to));
            if call.stream.is_some() {
                let work = self.start(&request, &call).expect("it starts");
                if writes > 0 {
                    self.double.expect(
                        stream,
                        self.device,
                        to,
                        &due,
                        &format!("{what:?}, in place: {in_place}"),
                    );
                }
                if !in_place {
                    self.double.fill(stream, self.device, from, &vec![0xee; reads]);
                }
                work.wait(Deadline::after(PATIENCE)).unwrap_or_else(|error| panic!("{what:?}: {error}"));
            } else {
                self.run(&request, &call).unwrap_or_else(|error| panic!("{what:?}: {error}"));
                assert!(writes == 0 || self.double.peek(to, writes) == due, "{what:?}");
            }
        }
    }

    fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        // SAFETY: the double trusts no address.
        unsafe { self.context.run(request, call) }
    }

    /// A sum of words, in place.
    fn sum(&self, count: u64) -> (u64, Request) {
        let memory = self.double.memory(self.device, count as usize * 4);
        self.double.fill(self.stream, self.device, memory, &vec![1; count as usize * 4]);
        let (kind, dtype, operator, root) = (Kind::Allreduce, DataType::U32, Operator::Sum, 0);
        let what = What { kind, count, dtype, operator, root };
        (memory, what.request(pointer(memory).cast_const(), pointer(memory)))
    }
}

/// Counts with and without a rest, of one chunk and of several.
const COUNTS: [u64; 3] = [1, 37, 4001];

// ---- tests

#[test]
fn composed_calls_have_the_bits_of_host_memory() {
    let kinds = [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter, Kind::Broadcast, Kind::Allgather];
    for (hosts, inside, order) in [(2, 2, Order::RoundRobin), (2, 2, Order::Random(7)), (3, 2, Order::Eager)]
    {
        ranks(hosts, inside, order, |rank| {
            for (seed, kind) in (1..).zip(kinds) {
                for count in COUNTS {
                    let (dtype, operator) = (DataType::F32, Operator::Sum);
                    let root = (seed + count) as u32 % rank.context.size();
                    rank.exercise(What { kind, count, dtype, operator, root }, seed);
                }
            }
        });
    }
}

#[test]
fn every_type_and_operator_is_rounded_once() {
    let operators = [
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(0.7),
        Operator::BitXor,
    ];
    ranks(2, 2, Order::RoundRobin, |rank| {
        for dtype in DataType::ALL {
            for operator in operators {
                if operator == Operator::BitXor && dtype.is_float() {
                    continue;
                }
                for (kind, count) in [(Kind::Allreduce, 301), (Kind::Reduce, 37), (Kind::ReduceScatter, 150)]
                {
                    rank.exercise(What { kind, count, dtype, operator, root: 3 }, count);
                }
            }
        }
    });
}

#[test]
fn what_is_not_composed_goes_another_way() {
    // Three ranks are no inner node of the tree; alltoall is staged; lists and tags are.
    ranks(2, 3, Order::RoundRobin, |rank| {
        for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::Alltoall, Kind::Reduce] {
            let (count, dtype, operator, root) = (100, DataType::Bf16, Operator::Sum, 4);
            rank.exercise(What { kind, count, dtype, operator, root }, 5);
        }
        let (memory, request) = rank.sum(64);
        rank.run(&request, &Call { tag: Some(3), ..rank.call() }).expect("a sum with a tag");
        assert_eq!(rank.double.peek(memory, 4), [6; 4]);
    });
}

#[test]
fn messages_go_by_kernels_within_a_host_and_staged_between_hosts() {
    ranks(2, 2, Order::RoundRobin, |rank| {
        let (me, call) = (rank.context.rank(), rank.call());
        for distance in [1, 2] {
            let peer = me ^ distance;
            let [out, into] = [0, 1].map(|_| rank.double.memory(rank.device, 300));
            rank.double.fill(rank.stream, rank.device, out, &[me as u8; 300]);
            let what =
                |kind| What { kind, count: 300, dtype: DataType::U8, operator: Operator::Sum, root: peer };
            let send = what(Kind::Send).request(pointer(out).cast_const(), std::ptr::null_mut());
            let receive = what(Kind::Receive).request(std::ptr::null(), pointer(into));
            let calls = [(&rank.context, &send, &call), (&rank.context, &receive, &call)];
            // SAFETY: the double trusts no address.
            for work in unsafe { start_together(&calls) }.expect("both start") {
                work.wait(Deadline::after(PATIENCE)).expect("both end");
            }
            assert_eq!(rank.double.peek(into, 300), vec![peer as u8; 300]);
        }
    });
}

/// Nothing moves for so long only if nothing ever will, also on a processor that has much else to do.
const STUCK: Duration = Duration::from_secs(30);

/// The program launches kernels for the first time: the driver then waits for the device, with a lock held that copies through the
/// host need.
#[test]
fn kernels_may_be_loaded_while_a_thread_waits_for_a_composed_call() {
    let (_, doubles) = ranks_of(2, 2, Order::RoundRobin, 2, |rank| {
        rank.double.hold_lock(Waiting::All, STUCK);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    rank.double.launch_first(rank.device);
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            for (seed, kind) in (1..).zip([
                Kind::Allreduce,
                Kind::Broadcast,
                Kind::ReduceScatter,
                Kind::Reduce,
                Kind::Allgather,
            ]) {
                for count in COUNTS {
                    let (dtype, operator, root) = (DataType::Bf16, Operator::Sum, (seed % 4) as u32);
                    rank.exercise(What { kind, count, dtype, operator, root }, seed);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
    for double in doubles {
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}

/// A stream that waits for the call waits for its end: what ends it makes no stream, for which the driver may wait for that one.
#[test]
fn a_failure_makes_no_stream_while_streams_wait() {
    let (_, doubles) = ranks_of(2, 2, Order::RoundRobin, 1, |rank| {
        rank.double.hold_lock(Waiting::Seen, Duration::from_secs(2));
        if rank.context.rank() == 3 {
            std::thread::sleep(Duration::from_millis(50));
            rank.context.abort();
            return;
        }
        let (_, request) = rank.sum(1000);
        let error = rank.run(&request, &rank.call()).expect_err("aborted");
        assert_eq!(error.status(), Status::Aborted, "{error}");
    });
    for double in doubles {
        let complaints = double.complaints().concat();
        assert!(!complaints.contains("cuStreamCreate"), "{complaints}");
    }
}

/// What each rank's call comes to.
fn errors(body: impl Fn(&Rank) -> Result<Completion> + Sync) -> Vec<Error> {
    let started = Instant::now();
    let errors = ranks_that_fail(|rank| {
        let error = body(rank).expect_err("this cannot go well");
        let later = rank.run(&rank.sum(1).1, &rank.call()).unwrap_err();
        assert!(later.text().contains("has failed before"), "{later}");
        error
    });
    assert!(started.elapsed() < PATIENCE / 2, "nobody waits for the deadline");
    errors
}

#[test]
fn calls_that_differ_name_both_ranks_by_their_numbers() {
    // Within a host, between hosts, and another operation altogether, which is staged.
    for odd in [1, 2] {
        for other in [false, true] {
            let found = errors(|rank| {
                let mine = rank.context.rank() / odd % 2 == 1;
                let (_, mut request) = rank.sum(if mine && !other { 128 } else { 64 });
                if mine && other {
                    request.kind = Kind::Alltoall;
                    request.counts = Counts::Uniform(4);
                    let apart = rank.double.memory(rank.device, 256);
                    request.output = pointer(apart);
                }
                rank.run(&request, &rank.call())
            });
            for error in found {
                assert_eq!(error.status(), Status::Mismatch, "{error}");
                let text = error.text();
                let theirs = if other { "called alltoall(4 ×" } else { "called allreduce(128 ×" };
                for part in ["call #0 of 'default' differs", "called allreduce(64 ×", theirs] {
                    assert!(text.contains(part), "odd {odd}, other {other}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    for absent in [1, 2] {
        let found = ranks_that_fail(|rank| {
            if rank.context.rank() == absent {
                let until = Instant::now() + PATIENCE;
                while rank.context.failure().is_none() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return rank.context.failure().expect("the news");
            }
            let (_, request) = rank.sum(1000);
            let timeout = Some(Duration::from_millis(500));
            rank.run(&request, &Call { timeout, ..rank.call() }).expect_err("one is missing")
        });
        for error in found {
            assert_eq!(error.status(), Status::Timeout, "{error}");
            // Also those that wait for a rank that waits for it, and may have called long before that one.
            let told = [
                format!("nothing from rank {absent} ("),
                format!("still running, waiting for rank {absent}"),
            ];
            assert!(told.iter().any(|text| error.text().contains(text)), "{error}");
            assert!(error.text().contains(&format!("Look at rank {absent}")), "{error}");
        }
    }
}

#[test]
fn an_abort_ends_all_of_it() {
    let started = Instant::now();
    ranks_that_fail(|rank| {
        if rank.context.rank() == 3 {
            std::thread::sleep(Duration::from_millis(50));
            rank.context.abort();
            return;
        }
        let (_, request) = rank.sum(1000);
        let error = rank.run(&request, &rank.call()).expect_err("aborted");
        assert_eq!(error.status(), Status::Aborted, "{error}");
        assert!(error.text().contains("rank 3"), "{error}");
    });
    assert!(started.elapsed() < PATIENCE / 2);
}

#[test]
fn where_a_host_cannot_all_is_staged() {
    let store = Arc::new(HashStore::new());
    let ways: Vec<_> = std::thread::scope(|scope| {
        let doubles = [0, 1].map(|_| Double::new(2, Order::RoundRobin));
        doubles[1].separate(0, 1);
        let devices = doubles.clone().map(|double| Devices::over(double).unwrap());
        let threads: Vec<_> = (0..4)
            .map(|rank: u32| {
                let (store, host) = (store.clone(), rank / 2);
                let (double, devices) = (doubles[host as usize].clone(), devices[host as usize].clone());
                scope.spawn(move || {
                    DRIVER.set(Some(double));
                    let context = Context::create(Options {
                        rank,
                        size: 4,
                        rendezvous: Rendezvous::Store(store),
                        name: String::new(),
                        timeout: PATIENCE,
                        interface: Some("127.0.0.1".into()),
                        transports: None,
                        host: Some(format!("host {host}")),
                    })
                    .expect("the ranks meet");
                    agree(&context, rank % 2, &devices).expect("an agreement");
                    context.device_way()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    });
    for way in ways {
        let why = way.expect("agreed").expect_err("staged");
        assert!(why.contains("rank 2 (") && why.contains("GPU 0 does not reach GPU 1"), "{why}");
    }
}
