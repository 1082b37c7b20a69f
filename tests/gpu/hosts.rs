//! Four ranks, processes of this machine that take themselves for those of two hosts: calls are composed of
//! exchanges between the GPUs of a host and of messages over TCP. Ranks share the GPUs that there are.

use std::time::{Duration, Instant};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::{Call, Context, Options, start_together};
use unisono::cuda::memory::DeviceBuffer;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};

use super::cuda::{devices, filled, read, soon};
use super::device::{KINDS, Rank, collective, value};
use super::support::PATIENCE;
use super::support::processes::{Job, Seat, report};

const SIZE: u32 = 4;

/// How long calls wait for a rank that is stopped.
const STOPPED_TIMEOUT: Duration = Duration::from_secs(1);

/// A context whose first ranks are on one host, the others on another.
fn meet(seat: &Seat, name: &str) -> Context {
    let host = Some(format!("host {}", seat.rank / 2));
    Context::create(Options { host, ..seat.options(name) }).expect("the ranks meet")
}

/// A context whose GPUs have agreed to compose.
fn composed(seat: &Seat, name: &str) -> Context {
    let context = meet(seat, name);
    context.connect_device(seat.rank % devices().count()).expect("an agreement");
    assert_eq!(context.device_way(), Some(Ok(())));
    context
}

/// Elements of about the same size, with all their digits.
fn elements(dtype: DataType, count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = match dtype {
            DataType::F16 => state & 0x8bff | 0x3400,
            DataType::Bf16 => state & 0x80ff | 0x3f00,
            DataType::F8E4M3 => state & 0x8f | 0x30,
            DataType::F8E5M2 => state & 0x87 | 0x38,
            DataType::F32 => state & 0x80ff_ffff | 0x3f00_0000,
            DataType::F64 => state & 0x800f_ffff_ffff_ffff | 0x3fe0_0000_0000_0000,
            _ => state,
        };
        bytes.extend_from_slice(&word.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

/// A reduction has the bits that it has on host memory.
fn same_bits(rank: &Rank<'_>, kind: Kind, count: usize, dtype: DataType, operator: Operator) {
    let blocks = if kind == Kind::ReduceScatter { SIZE as usize } else { 1 };
    let input = elements(dtype, count * blocks, u64::from(rank.context.rank()) + 3);
    let mut due = vec![0u8; count * dtype.size()];
    let request = |input: u64, output: u64| Request {
        kind,
        input: std::ptr::without_provenance(input as usize),
        output: std::ptr::without_provenance_mut(output as usize),
        counts: Counts::Uniform(count as u64),
        dtype,
        operator,
        root: 0,
    };
    let host = Request { input: input.as_ptr(), output: due.as_mut_ptr(), ..request(0, 0) };
    // SAFETY: both are as long as the request says.
    unsafe { rank.context.run(&host, &Call::default()) }.expect("on host memory");
    let (from, to) = (filled(rank.device, &input), filled(rank.device, &vec![0; due.len()]));
    // SAFETY: as above.
    unsafe { rank.context.run(&request(from.address(), to.address()), &rank.on_stream()) }
        .unwrap_or_else(|error| panic!("{kind:?} of {count} {}: {error}", dtype.name()));
    let found = read(&rank.stream, to.address(), due.len());
    let differing = found.iter().zip(&due).filter(|(a, b)| a != b).count();
    assert_eq!(differing, 0, "{kind:?} of {count} {}, {operator:?}: bytes differ", dtype.name());
}

/// Both halves of an exchange with a rank of this host, and one of the other, in one group.
fn messages(rank: &Rank<'_>, count: usize) {
    let me = rank.context.rank();
    let call = rank.on_stream();
    let mine = rank.buffer(&(0..count).map(|i| value(me, i)).collect::<Vec<f32>>());
    let peers = [me ^ 1, me ^ 2];
    let taken: Vec<DeviceBuffer> = peers.iter().map(|_| rank.buffer(&vec![0.0; count])).collect();
    let mut requests = Vec::new();
    for (&peer, into) in peers.iter().zip(&taken) {
        requests.push(rank.request(Kind::Send, count, peer, &mine, &mine));
        requests.push(rank.request(Kind::Receive, count, peer, into, into));
    }
    let all: Vec<_> = requests.iter().map(|request| (rank.context, request, &call)).collect();
    // SAFETY: the buffers outlive the works.
    for work in unsafe { start_together(&all) }.expect("all begin") {
        work.wait(soon()).expect("all end");
    }
    for (peer, into) in peers.into_iter().zip(&taken) {
        assert!(rank.values(into) == (0..count).map(|i| value(peer, i)).collect::<Vec<f32>>());
    }
}

pub(crate) fn calls(seat: &Seat) {
    let context = composed(seat, "calls");
    let rank = Rank::new(&context);
    for (index, kind) in KINDS.into_iter().enumerate() {
        for count in [1, 3000, 200_001] {
            collective(&rank, kind, count, index as u32 % SIZE);
        }
    }
    // Several chunks.
    for kind in [Kind::Allreduce, Kind::Reduce, Kind::Broadcast] {
        collective(&rank, kind, 20_000_003, 2);
    }
    for kind in [Kind::Allgather, Kind::ReduceScatter] {
        collective(&rank, kind, 3_000_001, 0);
    }
    for dtype in DataType::ALL {
        for operator in [Operator::Sum, Operator::Average, Operator::Max, Operator::PreMulSum(0.7)] {
            same_bits(&rank, Kind::Allreduce, 10_007, dtype, operator);
        }
        same_bits(&rank, Kind::ReduceScatter, 5003, dtype, Operator::Sum);
    }
    same_bits(&rank, Kind::Allreduce, 5_000_001, DataType::Bf16, Operator::Sum);
    messages(&rank, 1000);
    messages(&rank, 300_000);
    // Far ahead of the stream; every call multiplies.
    let buffer = rank.buffer(&vec![1.0; 100_000]);
    for _ in 0..10 {
        // SAFETY: the buffer outlives what the stream does.
        unsafe { context.launch(&rank.allreduce(&buffer), &rank.on_stream()) }.expect("a launch");
    }
    rank.stream.synchronize(soon()).expect("the stream ends");
    assert!(rank.values(&buffer) == vec![4f32.powi(10); 100_000]);
    let small = rank.buffer(&[0.0; 256]);
    let start = Instant::now();
    for _ in 0..200 {
        rank.sum(&small, &rank.on_stream()).expect("a sum");
    }
    report(format_args!("fine {:.1} us a call of 1 KiB", start.elapsed().as_secs_f64() * 1e6 / 200.0));
}

pub(crate) fn death(seat: &Seat) {
    let context = composed(seat, "death");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&vec![1.0; 100_000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    report("ready");
    if seat.rank == 3 {
        std::thread::sleep(PATIENCE);
        return;
    }
    let start = Instant::now();
    let error = rank.sum(&buffer, &rank.on_stream()).expect_err("rank 3 does not call");
    report(format_args!("error {:?} after {:.1?}: {error}", error.status(), start.elapsed()));
    rank.stream.synchronize(soon()).expect("the stream goes on");
    report("well");
}

/// Rank 3 is stopped; others wait for ranks that wait for it.
pub(crate) fn stopped(seat: &Seat) {
    let context = composed(seat, "stopped");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&vec![1.0; 100_000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    report("ready");
    if seat.rank == 3 {
        std::thread::sleep(PATIENCE);
        return;
    }
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    let call = Call { timeout: Some(STOPPED_TIMEOUT), ..rank.on_stream() };
    let error = rank.sum(&buffer, &call).expect_err("rank 3 does not call");
    report(format_args!("error {} {:?} {error}", start.elapsed().as_millis(), error.status()));
    rank.stream.synchronize(soon()).expect("the stream goes on");
    report("well");
}

/// Ranks of one host call something else than those of the other.
pub(crate) fn mismatch(seat: &Seat) {
    let context = composed(seat, "mismatch");
    let rank = Rank::new(&context);
    let buffer = rank.buffer(&vec![1.0; 100_000]);
    rank.sum(&buffer, &Call::default()).expect("a sum");
    let count = if seat.rank < 2 { 99_999 } else { 100_000 };
    let (from, to) = (rank.buffer(&vec![1.0; count]), rank.buffer(&vec![-1.0; count]));
    let request = rank.request(Kind::Allreduce, count, 0, &from, &to);
    // SAFETY: the buffers outlive the call.
    let error = unsafe { context.run(&request, &rank.on_stream()) }.expect_err("they differ");
    assert_eq!(error.status(), Status::Mismatch, "{error}");
    for part in ["called allreduce(99999 ×", "called allreduce(100000 ×"] {
        assert!(error.text().contains(part), "{error}");
    }
    rank.stream.synchronize(soon()).expect("the stream goes on");
    assert!(rank.values(&to) == vec![-1.0; count], "the output is as it was");
    report(format_args!("told {error}"));
}

fn start(scenario: &str) -> Job {
    Job::start(scenario, SIZE, "shm,tcp")
}

#[test]
fn hosts_compose_every_call() {
    let mut job = start("hosts");
    for fine in job.await_all(&[0, 1, 2, 3], "fine") {
        println!("rank {}: {}", fine.rank, fine.line);
    }
    job.all_end_well(&[0, 1, 2, 3]);
}

#[test]
fn hosts_hear_of_a_death() {
    let mut job = start("hosts death");
    job.await_all(&[0, 1, 2, 3], "ready");
    std::thread::sleep(Duration::from_millis(200));
    job.signal(3, libc::SIGKILL);
    for said in job.await_all(&[0, 1, 2], "error") {
        println!("rank {}: {}", said.rank, said.line);
        assert!(said.line.starts_with("PeerFailed") && said.line.contains("rank 3"), "{}", said.line);
    }
    job.await_all(&[0, 1, 2], "well");
    job.all_end_well(&[0, 1, 2]);
}

#[test]
fn hosts_name_a_stopped_rank() {
    let mut job = start("hosts stopped");
    job.await_all(&[0, 1, 2, 3], "ready");
    job.signal(3, libc::SIGSTOP);
    for said in job.await_all(&[0, 1, 2], "error") {
        println!("rank {}: after ms {}", said.rank, said.line);
        let took = said.line.split(' ').next().and_then(|took| took.parse().ok()).expect("milliseconds");
        assert!(Duration::from_millis(took) < STOPPED_TIMEOUT + Duration::from_secs(1), "{}", said.line);
        for words in ["Timeout", "nothing from rank 3 (", "does not answer", "Look at rank 3"] {
            assert!(said.line.contains(words), "{}", said.line);
        }
    }
    job.await_all(&[0, 1, 2], "well");
    job.all_end_well(&[0, 1, 2]);
}

#[test]
fn hosts_whose_calls_differ_are_told() {
    let mut job = start("hosts mismatch");
    for told in job.await_all(&[0, 1, 2, 3], "told") {
        println!("rank {}: {}", told.rank, told.line);
    }
    job.all_end_well(&[0, 1, 2, 3]);
}
