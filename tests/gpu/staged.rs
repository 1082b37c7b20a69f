//! Calls on device memory by way of the host: ranks as processes, which share the GPUs that there are.

use std::time::{Duration, Instant};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, Work, start_together};
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer};
use unisono::cuda::queues;
use unisono::cuda::stream::Stream;
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};
use unisono::schedule::Algorithm;

use super::cuda::{begin_capture, current_context, devices, filled, most_ranks, read, stream, write};
use super::support::PATIENCE;
use super::support::processes::{Job, Seat, report};

/// Elements: none, one, odd, three pieces and a bit.
const COUNTS: [usize; 5] = [0, 1, 1003, 70_001, 3_200_007];

pub(crate) const COLLECTIVES: [Kind; 8] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
];

/// A rank on its GPU.
pub(crate) struct Rank {
    pub(crate) context: Context,
    pub(crate) device: u32,
    pub(crate) stream: Stream,
    pub(crate) rank: u32,
    pub(crate) size: u32,
}

impl Rank {
    pub(crate) fn new(seat: &Seat) -> Rank {
        let context = Context::create(seat.options("")).expect("the ranks meet");
        let device = seat.rank % devices().count();
        let (rank, size) = (context.rank(), context.size());
        Rank { context, device, stream: stream(device), rank, size }
    }

    pub(crate) fn call(&self) -> Call {
        Call { stream: Some(self.stream.handle()), ..Call::default() }
    }

    pub(crate) fn start(&self, request: &Request, call: &Call) -> Work {
        // SAFETY: the tests keep the memory until the work has ended.
        unsafe { self.context.start(request, call) }.expect("it starts")
    }

    /// What the stream is given next comes after it.
    pub(crate) fn launch(&self, request: &Request, call: &Call) {
        // SAFETY: as above.
        unsafe { self.context.launch(request, call) }.expect("it starts");
    }
}

fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

pub(crate) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

pub(crate) fn request(kind: Kind, input: u64, output: u64, count: usize, root: u32) -> Request {
    Request {
        kind,
        input: pointer(input).cast_const(),
        output: pointer(output),
        counts: Counts::Uniform(count as u64),
        dtype: DataType::I32,
        operator: Operator::Sum,
        root,
    }
}

fn given(rank: u32, round: u32, len: usize) -> Vec<i32> {
    (0..len as i32).map(|index| index.wrapping_mul(7) + rank as i32 * 1009 + round as i32 * 100_003).collect()
}

fn bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

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

/// What `rank` obtains, the plain way.
fn expected(kind: Kind, count: usize, size: u32, rank: u32, root: u32, round: u32) -> Vec<i32> {
    let sum = |len: usize| -> Vec<i32> {
        let inputs: Vec<Vec<i32>> = (0..size).map(|rank| given(rank, round, len)).collect();
        (0..len).map(|at| inputs.iter().fold(0i32, |sum, input| sum.wrapping_add(input[at]))).collect()
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

fn alias(kind: Kind, count: usize, rank: u32) -> i64 {
    let before = i64::from(rank) * count as i64;
    match kind {
        Kind::Allgather | Kind::Gather => -before,
        Kind::Scatter | Kind::ReduceScatter => before,
        _ => 0,
    }
}

/// How a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// On a stream, and forgotten.
    Stream,
    /// On a stream, with its work waited for.
    Work,
    /// Without a stream.
    Blocking,
}

pub(crate) fn check(rank: &Rank, kind: Kind, count: usize, in_place: bool, way: Way, round: u32) {
    let what =
        format!("{kind:?} of {count}, in place {in_place}, {way:?}, rank {} of {}", rank.rank, rank.size);
    let root = round % rank.size;
    let is_root = rank.rank == root;
    let (reads, writes) = lengths(kind, count, rank.size, is_root);
    let values = bytes(&given(rank.rank, round, reads));
    let due = bytes(&expected(kind, count, rank.size, rank.rank, root, round)[..writes]);
    let room = (reads.max(writes) + 1) * 4;
    let first = DeviceBuffer::new(&devices(), rank.device, room).expect("device memory");
    let second = DeviceBuffer::new(&devices(), rank.device, room).expect("device memory");
    let (input, output) = match alias(kind, count, rank.rank) * 4 {
        _ if !in_place || reads == 0 || writes == 0 => (first.address(), second.address()),
        distance if distance < 0 => (first.address() + distance.unsigned_abs(), first.address()),
        distance => (first.address(), first.address() + distance as u64),
    };
    if reads > 0 {
        write(rank.device, input, &values);
    }
    let (from, to) = match kind {
        Kind::Broadcast if !is_root => (0, output),
        _ => (input, if writes > 0 { output } else { 0 }),
    };
    let request = request(kind, from, to, count, root);
    let before = current_context();
    match way {
        Way::Stream => rank.launch(&request, &rank.call()),
        Way::Work => {
            rank.start(&request, &rank.call()).wait(soon()).expect(&what);
        }
        Way::Blocking => {
            // SAFETY: the memory outlives the call.
            unsafe { rank.context.run(&request, &Call::default()) }.expect(&what);
        }
    }
    assert_eq!(current_context(), before, "{what}");
    if writes > 0 {
        assert!(read(&rank.stream, to, due.len()) == due, "{what}: wrong");
    } else {
        rank.stream.synchronize(soon()).expect(&what);
    }
}

/// Everything that one job of ranks does.
pub(crate) fn collectives(seat: &Seat) {
    let rank = Rank::new(seat);
    // A context of the caller's is current all the time.
    let devices = devices();
    let _callers = devices.enter(devices.count() - 1).expect("a context");
    let mut round = 0;
    for kind in COLLECTIVES {
        for count in COUNTS {
            let count = if count > 1_000_000 && kind == Kind::Alltoall { count / 3 } else { count };
            for in_place in [false, true] {
                for way in [Way::Stream, Way::Work, Way::Blocking] {
                    check(&rank, kind, count, in_place, way, round);
                    round += 1;
                }
            }
        }
    }
    report("collectives");
    named_algorithms(&rank);
    default_streams(&rank);
    behind_the_legacy_stream(&rank);
    other_streams(&rank);
    lists(&rank);
    messages(&rank);
    refusals(&rank);
    report("done");
}

/// Algorithms by name, types and operators: the bits of host memory.
fn named_algorithms(rank: &Rank) {
    let cases = [
        (0, DataType::F32, Operator::Sum),
        (Algorithm::Ring as i32, DataType::I32, Operator::Sum),
        (0, DataType::F16, Operator::Average),
        (0, DataType::Bf16, Operator::PreMulSum(0.37)),
        (0, DataType::F64, Operator::Max),
    ];
    for (algorithm, dtype, operator) in cases {
        let count = 5_000_000 / dtype.size();
        let mut noise = super::cuda::Noise(u64::from(rank.rank) + 1);
        // Small exponents, so that nothing overflows.
        let input: Vec<u8> = noise.bytes(count * dtype.size()).iter().map(|byte| byte & 0x3f).collect();
        let mut host = vec![0u8; input.len()];
        let call = Call { algorithm: (algorithm != 0).then_some(algorithm), ..Call::default() };
        let on_host = Request {
            dtype,
            operator,
            input: input.as_ptr(),
            output: host.as_mut_ptr(),
            ..request(Kind::Allreduce, 0, 0, count, 0)
        };
        // SAFETY: both hold `count` elements.
        unsafe { rank.context.run(&on_host, &call) }.expect("an allreduce");
        let device = filled(rank.device, &input);
        let on_device =
            Request { input: pointer(device.address()), output: pointer(device.address()), ..on_host };
        rank.launch(&on_device, &Call { stream: Some(rank.stream.handle()), ..call });
        let got = read(&rank.stream, device.address(), host.len());
        assert!(got == host, "algorithm {algorithm}, {dtype:?}, {operator:?}");
    }
    report("algorithms");
}

/// The handles of default streams.
fn default_streams(rank: &Rank) {
    let devices = devices();
    let _entered = devices.enter(rank.device).expect("a context");
    for handle in [StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        let values = bytes(&given(rank.rank, 0, 70_001));
        let memory = filled(rank.device, &values);
        let sum = request(Kind::Allreduce, memory.address(), memory.address(), 70_001, 0);
        rank.launch(&sum, &Call { stream: Some(handle), ..Call::default() });
        // SAFETY: default streams always exist.
        let default = unsafe { Stream::borrow(&devices, rank.device, handle) }.expect("a stream");
        let due = bytes(&expected(Kind::Allreduce, 70_001, rank.size, rank.rank, 0, 0));
        assert!(read(&default, memory.address(), due.len()) == due, "{handle:?}");
    }
    report("default streams");
}

/// Work on the legacy stream comes before calls on a blocking one, which are launched before what is ahead of
/// them has ended.
fn behind_the_legacy_stream(rank: &Rank) {
    const ROUNDS: usize = 40;
    const COUNT: usize = 1024;
    const LONG: usize = 8 << 20;
    let devices = devices();
    let _entered = devices.enter(rank.device).expect("a context");
    // SAFETY: the legacy stream always exists.
    let legacy = unsafe { Stream::borrow(&devices, rank.device, StreamHandle::LEGACY) }.expect("a stream");
    let blocking = Stream::new(&devices, rank.device, true).expect("a stream");
    let [input, output] = [(); 2].map(|()| filled(rank.device, &[0; COUNT * 4]));
    let long = filled(rank.device, &vec![0; LONG]);
    let [given_rounds, got] = [ROUNDS * COUNT * 4, ROUNDS * COUNT * 4]
        .map(|len| PinnedBuffer::new(&devices, rank.device, len).expect("pinned memory"));
    let slow = PinnedBuffer::new(&devices, rank.device, LONG).expect("pinned memory");
    let call = Call { stream: Some(blocking.handle()), ..Call::default() };
    let sum = request(Kind::Allreduce, input.address(), output.address(), COUNT, 0);
    for round in 0..ROUNDS {
        let values = bytes(&given(rank.rank, round as u32, COUNT));
        let [from, to] =
            [&given_rounds, &got].map(|pinned| pinned.address().wrapping_add(round * values.len()));
        // SAFETY: all of it lives until the streams are waited for; each round has pinned memory of its own.
        unsafe {
            from.copy_from_nonoverlapping(values.as_ptr(), values.len());
            legacy.copy_to_device(long.address(), slow.address(), LONG).expect("a copy");
            legacy.copy_to_device(input.address(), from, values.len()).expect("a copy");
            // Two, so that each is behind another, or behind the legacy stream alone.
            rank.launch(&sum, &call);
            rank.launch(&sum, &call);
            blocking.copy_to_host(to, output.address(), values.len()).expect("a copy");
        }
    }
    blocking.synchronize(soon()).expect("the stream ends");
    for round in 0..ROUNDS {
        let due = bytes(&expected(Kind::Allreduce, COUNT, rank.size, rank.rank, 0, round as u32));
        // SAFETY: the copies are complete, and fill it.
        let got =
            unsafe { std::slice::from_raw_parts(got.address().wrapping_add(round * due.len()), due.len()) };
        assert!(got == due, "round {round}");
    }
    report("behind the legacy stream");
}

/// A stream that is held up holds up the call, and nothing else; another waits for the work.
fn other_streams(rank: &Rank) {
    let values = bytes(&given(rank.rank, 0, 3_200_007));
    let (memory, other) = (filled(rank.device, &vec![0; values.len()]), filled(rank.device, &values));
    let gate = filled(rank.device, &[0; 4]);
    let pinned = PinnedBuffer::new(&devices(), rank.device, values.len()).expect("pinned memory");
    let [beside, last, opener] = [(); 3].map(|()| stream(rank.device));
    // SAFETY: the gate is opened below; the memory outlives the streams' work, which is waited for.
    unsafe {
        pinned.address().copy_from_nonoverlapping(values.as_ptr(), values.len());
        rank.stream.wait_value(gate.address(), 1).expect("a wait");
        rank.stream.copy_to_device(memory.address(), pinned.address(), values.len()).expect("a copy");
    }
    let count = values.len() / 4;
    let sum = |memory: &DeviceBuffer| request(Kind::Allreduce, memory.address(), memory.address(), count, 0);
    let work = rank.start(&sum(&memory), &rank.call());
    // Beside it, with a tag, while the first stream is held up: new lanes are made meanwhile.
    let tagged = Call { stream: Some(beside.handle()), tag: Some(5), ..Call::default() };
    rank.start(&sum(&other), &tagged).wait(soon()).expect("a call beside one that is held up");
    assert!(work.test().is_none(), "it waits for its stream");
    // SAFETY: the gate lives.
    let open = || unsafe { opener.write_value(gate.address(), 1) }.expect("a write");
    if !queues::are_many() {
        // The host waits.
        open();
    }
    // SAFETY: a live stream.
    unsafe { work.block_stream(last.handle()) }.expect("it waits");
    open();
    let due = bytes(&expected(Kind::Allreduce, count, rank.size, rank.rank, 0, 0));
    assert!(read(&last, memory.address(), due.len()) == due, "by another stream");
    work.wait(soon()).expect("it ends well");
    assert!(read(&beside, other.address(), due.len()) == due, "beside");
    report("other streams");
}

/// Blocks that differ from rank to rank: none, a few elements, several pieces.
fn lists(rank: &Rank) {
    const COUNTS: [usize; 4] = [1_500_001, 0, 70_003, 5];
    let (size, me, root) = (rank.size as usize, rank.rank as usize, rank.size as usize - 1);
    let words = |list: &[usize]| list.iter().map(|&count| count as u64).collect::<Vec<u64>>();
    let block = |list: &[usize], index: usize, values: &[i32]| {
        let start = list[..index].iter().sum::<usize>();
        values[start..start + list[index]].to_vec()
    };
    let counts: Vec<usize> = (0..size).map(|other| COUNTS[other % 4]).collect();
    let all = counts.iter().sum::<usize>();
    let blocks = || Counts::Blocks(words(&counts));
    let gathered: Vec<i32> = (0..size).flat_map(|other| given(other as u32, 0, counts[other])).collect();
    let summed = (0..rank.size)
        .map(|other| given(other, 1, all))
        .reduce(|sum, values| sum.iter().zip(values).map(|(sum, value)| sum.wrapping_add(value)).collect());
    let scattered = given(root as u32, 2, all);
    // What a rank has for each other.
    let from = |one: usize| (0..size).map(|other| COUNTS[(one + other) % 4]).collect::<Vec<usize>>();
    let input = |one: usize| given(one as u32, 3, from(one).iter().sum());
    let receive: Vec<usize> = (0..size).map(|other| from(other)[me]).collect();
    let exchange = Counts::Exchange { send: words(&from(me)), receive: words(&receive) };
    let own = given(rank.rank, 0, counts[me]);
    let only = |is_root: bool, values: &[i32]| if is_root { values.to_vec() } else { Vec::new() };
    let cases: [(Kind, Counts, Vec<i32>, Vec<i32>); 5] = [
        (Kind::Allgather, blocks(), own.clone(), gathered.clone()),
        (
            Kind::ReduceScatter,
            blocks(),
            given(rank.rank, 1, all),
            block(&counts, me, &summed.unwrap_or_default()),
        ),
        (Kind::Gather, blocks(), own, only(me == root, &gathered)),
        (Kind::Scatter, blocks(), only(me == root, &scattered), block(&counts, me, &scattered)),
        (
            Kind::Alltoall,
            exchange,
            input(me),
            (0..size).flat_map(|other| block(&from(other), me, &input(other))).collect(),
        ),
    ];
    for (kind, counts, values, due) in cases {
        let due = bytes(&due);
        for on_stream in [true, false] {
            let input = filled(rank.device, &bytes(&values));
            let output = filled(rank.device, &vec![0xa5; due.len()]);
            let plain = request(kind, input.address(), output.address(), 0, root as u32);
            let request = Request { counts: counts.clone(), ..plain };
            if on_stream {
                rank.launch(&request, &rank.call());
            } else {
                // SAFETY: the memory outlives the call.
                unsafe { rank.context.run(&request, &Call::default()) }.expect("it ends well");
            }
            assert!(read(&rank.stream, output.address(), due.len()) == due, "{kind:?} of lists: wrong");
        }
    }
    report("lists");
}

/// To the next rank, from the one before, on one stream; host and device memory meet.
fn messages(rank: &Rank) {
    let (next, before) = ((rank.rank + 1) % rank.size, (rank.rank + rank.size - 1) % rank.size);
    for count in [1usize, 1003, 3_200_007] {
        let out = filled(rank.device, &bytes(&given(rank.rank, 0, count)));
        let into = filled(rank.device, &vec![0; count * 4]);
        let send = request(Kind::Send, out.address(), 0, count, next);
        let receive = request(Kind::Receive, 0, into.address(), count, before);
        let call = rank.call();
        // SAFETY: the memory outlives the works.
        let works =
            unsafe { start_together(&[(&rank.context, &send, &call), (&rank.context, &receive, &call)]) };
        let due = bytes(&given(before, 0, count));
        assert!(read(&rank.stream, into.address(), due.len()) == due, "{count} from device to device");
        for work in works.expect("they start") {
            work.wait(soon()).expect("it ends well");
        }
        // From device to host.
        let mut host = vec![0u8; count * 4];
        let send = rank.start(&request(Kind::Send, out.address(), 0, count, next), &rank.call());
        let address = host.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the vector outlives the call.
        unsafe { rank.context.run(&request(Kind::Receive, 0, address, count, before), &Call::default()) }
            .expect("it ends well");
        assert!(host == due, "{count} from device to host");
        send.wait(soon()).expect("it ends well");
    }
    report("messages");
}

fn refusals(rank: &Rank) {
    let memory = filled(rank.device, &[0; 4096]);
    let captured = stream(rank.device);
    begin_capture(&captured);
    let sum = request(Kind::Allreduce, memory.address(), memory.address(), 1024, 0);
    let call = Call { stream: Some(captured.handle()), ..Call::default() };
    // SAFETY: it is refused.
    let error = unsafe { rank.context.start(&sum, &call) }.err().expect("a capture");
    assert_eq!(error.status(), Status::InvalidUsage, "{error}");
    drop(super::cuda::Graph::end_capture(&captured));
    let long = request(Kind::Allreduce, memory.address(), memory.address(), 1 << 30, 0);
    // SAFETY: it is refused.
    let error = unsafe { rank.context.start(&long, &rank.call()) }.err().expect("too long");
    assert!(error.text().starts_with("sendbuf has "), "{error}");
    if devices().count() > 1 {
        let elsewhere = stream((rank.device + 1) % devices().count());
        let call = Call { stream: Some(elsewhere.handle()), ..Call::default() };
        // SAFETY: it is refused.
        let error = unsafe { rank.context.start(&sum, &call) }.err().expect("another device");
        assert!(error.text().starts_with("call->stream is a stream of GPU "), "{error}");
    }
    report("refusals");
}

/// Ranks, and what links them.
fn jobs() -> impl Iterator<Item = (u32, &'static str)> {
    [(2, "shm"), (2, "tcp"), (4, "shm"), (4, "tcp")].into_iter().filter(|&(size, _)| size <= most_ranks())
}

#[test]
fn collectives_of_processes_are_right() {
    for (size, transports) in jobs() {
        let mut job = Job::start_with("staged", size, transports, &[("UNISONO_P2P", "0")]);
        let all: Vec<u32> = (0..size).collect();
        let began = Instant::now();
        job.await_all(&all, "done");
        job.all_end_well(&all);
        println!("staged: {size} ranks over {transports}: {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// Sums until the peer dies; then the stream is free and the error names the peer.
pub(crate) fn death(seat: &Seat) {
    let rank = Rank::new(seat);
    let memory = filled(rank.device, &vec![0; 16 << 20]);
    let sum = request(Kind::Allreduce, memory.address(), memory.address(), 4 << 20, 0);
    report("up");
    let error = loop {
        // SAFETY: the memory outlives the works.
        match unsafe { rank.context.start(&sum, &rank.call()) } {
            Ok(work) => {
                if let Err(error) = work.wait(soon()) {
                    break error;
                }
            }
            Err(error) => break error,
        }
    };
    rank.stream.synchronize(Deadline::after(Duration::from_secs(5))).expect("the stream goes on");
    report(format_args!("failed {:?}: {error}", error.status()));
}

#[test]
fn the_death_of_a_rank_frees_the_streams() {
    for transports in ["shm", "tcp"] {
        let mut job = Job::start_with("staged death", 2, transports, &[("UNISONO_P2P", "0")]);
        job.await_all(&[0, 1], "up");
        std::thread::sleep(Duration::from_millis(300));
        job.signal(1, libc::SIGKILL);
        let killed = Instant::now();
        let reports = job.await_all(&[0], "failed");
        let took = reports[0].at - killed;
        assert!(reports[0].line.starts_with("PeerFailed"), "{}", reports[0].line);
        println!("staged: {transports}: told after {:.0} ms: {}", took.as_secs_f64() * 1e3, reports[0].line);
        job.all_end_well(&[0]);
    }
}

/// Times of allreduces on a stream and of all-to-alls of lists, and of the same on host memory.
pub(crate) fn speed(seat: &Seat) {
    let rank = Rank::new(seat);
    for shift in [10, 16, 20, 22, 24, 26, 28] {
        let len = 1usize << shift;
        let memory = filled(rank.device, &vec![0; len]);
        let mut host = vec![0u8; len];
        let sum = |address: u64| request(Kind::Allreduce, address, address, len / 4, 0);
        let rounds = if shift > 24 { 5 } else { 30 };
        let mut times = [f64::MAX; 2];
        for _ in 0..rounds {
            let began = Instant::now();
            rank.start(&sum(memory.address()), &rank.call()).wait(soon()).expect("an allreduce");
            times[0] = times[0].min(began.elapsed().as_secs_f64());
        }
        let address = host.as_mut_ptr().expose_provenance() as u64;
        for _ in 0..rounds {
            let began = Instant::now();
            // SAFETY: the vector outlives the call.
            unsafe { rank.context.run(&sum(address), &Call::default()) }.expect("an allreduce");
            times[1] = times[1].min(began.elapsed().as_secs_f64());
        }
        if rank.rank == 0 {
            let [device, host] = times.map(|time| time * 1e6);
            report(format_args!("{len} bytes: device {device:.1} us, host {host:.1} us"));
        }
    }
    for len in [1usize << 20, 16 << 20, 64 << 20] {
        let report_times = |what: &str, time: f64| {
            if rank.rank == 0 {
                report(format_args!("{len} bytes: {what} {:.1} us", time * 1e6));
            }
        };
        report_times("alltoallv", uneven_time(&rank, len, true));
        report_times("alltoallv of host memory", uneven_time(&rank, len, false));
    }
    report("end");
}

/// Seconds of an all-to-all of about `len` bytes in blocks of different lengths.
fn uneven_time(rank: &Rank, len: usize, on_device: bool) -> f64 {
    let (size, me) = (rank.size as usize, rank.rank as usize);
    let block = |from: usize, to: usize| (len / 4 / size + 64 * from + to) as u64;
    let send: Vec<u64> = (0..size).map(|other| block(me, other)).collect();
    let receive: Vec<u64> = (0..size).map(|other| block(other, me)).collect();
    let [given, taken] = [&send, &receive].map(|counts| counts.iter().sum::<u64>() as usize * 4);
    let (mut from, mut to) = (vec![1u8; given], vec![0u8; taken]);
    let [input, output] = [given, taken].map(|bytes| filled(rank.device, &vec![0; bytes]));
    let addresses = match on_device {
        true => (input.address(), output.address()),
        false => (from.as_mut_ptr().expose_provenance() as u64, to.as_mut_ptr().expose_provenance() as u64),
    };
    let plain = request(Kind::Alltoall, addresses.0, addresses.1, 0, 0);
    let request = Request { counts: Counts::Exchange { send, receive }, ..plain };
    let time = || {
        let began = Instant::now();
        // SAFETY: the memory outlives the call.
        unsafe { rank.context.run(&request, &Call::default()) }.expect("an alltoallv");
        began.elapsed().as_secs_f64()
    };
    (0..8).map(|_| time()).fold(f64::MAX, f64::min)
}

#[test]
fn how_long_calls_take() {
    for (size, transports) in jobs() {
        let mut job = Job::start_with("staged speed", size, transports, &[("UNISONO_P2P", "0")]);
        let all: Vec<u32> = (0..size).collect();
        for _ in 0..13 {
            let line = &job.await_all(&[0], "")[0].line;
            println!("staged: {size} ranks over {transports}: {line}");
        }
        job.await_all(&all, "end");
        job.all_end_well(&all);
    }
}
