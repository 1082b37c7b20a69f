//! What waiting and being there costs.

use std::time::{Duration, Instant};

use crate::support::processes::{Job, Seat, report};
use crate::support::{TRANSPORTS, Verb, barrier, sum};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context};
use unisono::reduce::DataType;

/// How long a rank has another wait.
const SLEEP: Duration = Duration::from_millis(1200);

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).expect("a directory of /proc").count()
}

pub(crate) fn alone(seat: &Seat) {
    let before = (entries("/proc/self/fd"), entries("/proc/self/task"));
    let context = Context::create(seat.options("")).expect("nobody to meet");
    sum(&context, &mut [1.0; 1000]);
    barrier(&context);
    let child = context.duplicate().expect("a child");
    sum(&child, &mut [1.0; 1000]);
    assert_eq!(before, (entries("/proc/self/fd"), entries("/proc/self/task")));
    report("done");
}

#[test]
fn a_group_of_one_makes_no_descriptor_and_no_thread() {
    let mut job = Job::start("alone", 1, "shm,tcp");
    job.await_all(&[0], "done");
    job.all_end_well(&[0]);
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    // SAFETY: zeros are a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it takes a pointer to a whole structure.
    let answer = unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    assert_eq!(answer, 0);
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

pub(crate) fn idle(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 1000]);
    let child = context.duplicate().expect("a child");
    let began = Instant::now();
    barrier(&context);
    let before = cpu_time();
    if seat.rank == 0 {
        sum(&context, &mut [1.0; 1000]);
    } else {
        std::thread::sleep(SLEEP);
        report(format_args!("slept {}", (cpu_time() - before).as_micros()));
        sum(&context, &mut [1.0; 1000]);
        barrier(&context);
        report("done");
        return;
    }
    assert!(began.elapsed() > SLEEP, "it waited");
    report(format_args!("slept {}", (cpu_time() - before).as_micros()));
    // Now with work that nobody waits for.
    let before = cpu_time();
    let mut data = [1.0f32; 10];
    let work = Verb::new(Kind::Allreduce, 10).start_in(&child, &mut data, &Call::default());
    std::thread::sleep(Duration::from_millis(1000));
    report(format_args!("unattended {}", (cpu_time() - before).as_micros()));
    child.abort();
    drop(work);
    barrier(&context);
    report("done");
}

#[test]
fn waiting_costs_no_processor_time() {
    for transports in TRANSPORTS {
        let job = Job::start("idle", 2, transports);
        for slept in job.await_all(&[0, 1], "slept") {
            let microseconds: u32 = slept.line.parse().expect("a number");
            assert!(microseconds <= 50_000, "{transports}: rank {}: {microseconds} µs", slept.rank);
        }
        for unattended in job.await_all(&[0], "unattended") {
            let microseconds: u32 = unattended.line.parse().expect("a number");
            assert!(microseconds <= 50_000, "{transports}: {microseconds} µs with work in flight");
        }
        job.await_all(&[0, 1], "done");
    }
}

/// This process's share of the memory it uses, in KiB.
fn share() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("the kernel's account");
    let line = text.lines().find(|line| line.starts_with("Pss:")).expect("a line");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

pub(crate) fn memory(seat: &Seat) {
    let before = share();
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut data = vec![1.0; 1000];
    for _ in 0..5 {
        sum(&context, &mut data);
        let mut all = [0u64; 8];
        Verb::new(Kind::Alltoall, 1)
            .dtype(DataType::U64)
            .run(&context, &[1u64; 8], &mut all, &Call::default())
            .expect("an alltoall");
    }
    barrier(&context);
    let after = share();
    barrier(&context);
    report(format_args!("more {}", after.saturating_sub(before)));
}

#[test]
fn eight_ranks_of_a_host_take_little_memory() {
    for transports in TRANSPORTS {
        let mut job = Job::start("memory", 8, transports);
        for more in job.await_all(&[0, 1, 2, 3, 4, 5, 6, 7], "more") {
            let kib: u64 = more.line.parse().expect("a number");
            println!("{transports}: rank {} takes {kib} KiB more", more.rank);
            assert!(kib <= 32 << 10, "{transports}: rank {} takes {kib} KiB more", more.rank);
        }
        job.all_end_well(&[0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

pub(crate) fn time(seat: &Seat) {
    let began = Instant::now();
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let met = began.elapsed();
    barrier(&context);
    report(format_args!("took {met:?} to meet, {:?} with a barrier", began.elapsed()));
}

#[test]
fn two_ranks_meet() {
    for transports in TRANSPORTS {
        let mut job = Job::start("time", 2, transports);
        for took in job.await_all(&[0, 1], "took") {
            println!("{transports}: rank {} took {}", took.rank, took.line);
        }
        job.all_end_well(&[0, 1]);
    }
}
