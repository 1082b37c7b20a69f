//! Calls on device memory that are relayed through lanes of pinned memory: ranks as processes, whose GPUs, if
//! they have several, are told not to reach each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unisono::collective::request::{Kind, Request};
use unisono::communicator::Call;
use unisono::cuda::memory::DeviceBuffer;
use unisono::reduce::{DataType, Operator};

use super::cuda::{Noise, devices, most_ranks, read, write};
use super::staged::{COLLECTIVES, Rank, Way, check, pointer, request};
use super::support::processes::{Job, Seat, report};

/// Elements: relayed in one piece, in a few odd ones, in more than there are lanes.
const COUNTS: [usize; 4] = [17_001, 70_001, 1_500_007, 7_000_001];

/// Notices that the lanes are there.
struct Ear;

static RELAYS: AtomicBool = AtomicBool::new(false);

impl log::Log for Ear {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let text = record.args().to_string();
        if std::env::var_os("RELAY_LOG").is_some() {
            eprintln!("{} {text}", std::process::id());
        }
        if text.contains("relays calls on device memory: true") {
            RELAYS.store(true, Ordering::Relaxed);
        }
        if text.contains("not relayed") || text.contains("relays nothing") {
            report(format_args!("panic: {text}"));
        }
    }

    fn flush(&self) {}
}

/// Everything that one job of ranks does.
pub(crate) fn calls(seat: &Seat) {
    log::set_logger(&Ear).expect("the only logger");
    log::set_max_level(log::LevelFilter::Debug);
    let rank = Rank::new(seat);
    let mut round = 0;
    for kind in COLLECTIVES {
        for count in COUNTS {
            let count = if count > 1_000_000 && kind == Kind::Alltoall { count / 3 } else { count };
            for (in_place, way) in [(false, Way::Stream), (true, Way::Work), (true, Way::Stream)] {
                check(&rank, kind, count, in_place, way, round);
                round += 1;
            }
        }
    }
    assert!(RELAYS.load(Ordering::Relaxed), "nothing was relayed");
    report("collectives");
    let dtypes =
        [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64, DataType::F8E4M3, DataType::I32];
    for dtype in dtypes {
        for kind in [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter] {
            let scale = 0.37 + f64::from(rank.rank);
            for operator in [
                Operator::Sum,
                Operator::Average,
                Operator::PreMulSum(scale),
                Operator::Product,
                Operator::Max,
            ] {
                // Aligned as the kernels like it, and off by one element.
                for shift in [0, 1] {
                    bits(&rank, kind, dtype, operator, shift);
                }
            }
        }
    }
    report("bits");
    enqueued(&rank);
    report("done");
}

/// The bits of host memory.
fn bits(rank: &Rank, kind: Kind, dtype: DataType, operator: Operator, shift: usize) {
    let (count, element) = (1_000_003 / dtype.size(), dtype.size());
    let blocks = if kind == Kind::ReduceScatter { rank.size as usize } else { 1 };
    let mut noise = Noise(u64::from(rank.rank) + 1);
    // Small exponents, so that nothing overflows.
    let input: Vec<u8> = noise.bytes(count * element * blocks).iter().map(|byte| byte & 0x3f).collect();
    let mut host = vec![0u8; count * element];
    let on_host = Request {
        dtype,
        operator,
        input: input.as_ptr(),
        output: host.as_mut_ptr(),
        ..request(kind, 0, 0, count, 1)
    };
    // SAFETY: both hold what the call reads and writes.
    unsafe { rank.context.run(&on_host, &Call::default()) }.expect("on the host");
    let [from, to] = [input.len(), host.len()]
        .map(|len| DeviceBuffer::new(&devices(), rank.device, len + element).expect("device memory"));
    let [source, target] = [&from, &to].map(|buffer| buffer.address() + (shift * element) as u64);
    write(rank.device, source, &input);
    let on_device = Request { input: pointer(source), output: pointer(target), ..on_host };
    rank.launch(&on_device, &rank.call());
    let got = read(&rank.stream, target, host.len());
    let is_result = kind != Kind::Reduce || rank.rank == 1;
    assert!(!is_result || got == host, "{kind:?}, {dtype:?}, {operator:?}, off by {shift}");
}

/// Many calls at once on one stream, and what they take.
fn enqueued(rank: &Rank) {
    for shift in [16, 20, 22, 24, 26] {
        let len = 1usize << shift;
        let memory = DeviceBuffer::new(&devices(), rank.device, len).expect("device memory");
        let sum = request(Kind::Allreduce, memory.address(), memory.address(), len / 4, 0);
        let rounds = if shift > 22 { 8 } else { 40 };
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            for _ in 0..rounds {
                rank.launch(&sum, &rank.call());
            }
            rank.stream.synchronize(super::cuda::soon()).expect("it ends");
            best = best.min(began.elapsed() / rounds);
        }
        if rank.rank == 0 {
            report(format_args!("time of {len} bytes: {:.1} us", best.as_secs_f64() * 1e6));
        }
    }
}

#[test]
fn relayed_calls_are_right() {
    are_right("shm");
}

#[test]
fn calls_relayed_over_connections_are_right() {
    are_right("tcp");
}

fn are_right(transports: &str) {
    for size in [2, 3, 4].into_iter().filter(|&size| size <= most_ranks()) {
        let mut job = Job::start_with("relay", size, transports, &[("UNISONO_P2P", "0")]);
        let all: Vec<u32> = (0..size).collect();
        let began = Instant::now();
        for _ in 0..5 {
            println!(
                "relay: {size} ranks over {transports}: allreduce, {}",
                job.await_all(&[0], "time of ")[0].line
            );
        }
        job.await_all(&all, "done");
        job.all_end_well(&all);
        println!("relay: {size} ranks over {transports}: {:.1} s", began.elapsed().as_secs_f64());
    }
}
