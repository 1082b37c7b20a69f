//! A program that frees memory while a stream waits for a call: the free waits for the stream, and holds up
//! what other threads have the driver do, the library's among them. What the call waits for must end all the
//! same.

use std::time::{Duration, Instant};

use unisono::collective::request::Kind;
use unisono::communicator::Call;
use unisono::cuda::event::Event;
use unisono::cuda::memory::{DeviceBuffer, PinnedBuffer, RegisteredBuffer};
use unisono::deadline::Deadline;

use super::cuda::{devices, filled, read, soon, stream};
use super::staged::{Rank, request};
use super::support::processes::{Job, Seat, report};

/// How long after it is due a failure may come.
const LATE: Duration = Duration::from_secs(8);

/// Rank 0 calls, and frees memory meanwhile; rank 1 does not call. The seconds are the call's limit.
fn free_beside(seat: &Seat, limit: u64) {
    let rank = Rank::new(seat);
    let memory = filled(rank.device, &vec![0; 1 << 20]);
    let sum = request(Kind::Allreduce, memory.address(), memory.address(), 1 << 18, 0);
    rank.start(&sum, &rank.call()).wait(soon()).expect("a sum");
    let until_failed = || {
        let begun = Instant::now();
        loop {
            match rank.context.failure() {
                Some(error) => return error,
                None => assert!(begun.elapsed() < Duration::from_secs(40), "it does not fail"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    report("up");
    if rank.rank == 1 {
        report(format_args!("failed {}", until_failed()));
        return;
    }
    let freed = filled(rank.device, &[0; 4096]);
    let call = Call { timeout: Some(Duration::from_secs(limit)), ..rank.call() };
    let begun = Instant::now();
    let work = rank.start(&sum, &call);
    let took = std::thread::scope(|scope| {
        let free = scope.spawn(|| {
            drop(freed);
            begun.elapsed()
        });
        std::thread::sleep(Duration::from_millis(200));
        report("called");
        // This thread may be held up now, as the free is.
        // SAFETY: the memory outlives the call.
        let second = unsafe { rank.context.start(&sum, &call) };
        let error = until_failed();
        report(format_args!("failed {:?} after {:.2?}: {error}", error.status(), begun.elapsed()));
        drop(second);
        free.join().expect("it frees")
    });
    rank.stream.synchronize(Deadline::after(Duration::from_secs(5))).expect("the stream goes on");
    work.wait(soon()).expect_err("rank 1 has not called");
    report(format_args!("freed after {took:.2?}"));
}

pub(crate) fn scenario_absent(seat: &Seat) {
    free_beside(seat, 2);
}

pub(crate) fn scenario_killed(seat: &Seat) {
    free_beside(seat, 60);
}

/// Runs a scenario where GPUs exchange and where they do not, with `trouble` when rank 0 has called. The call
/// ends with `status` and names rank 1, the free returns within `limit` and [`LATE`], and all of `left` end
/// well.
fn ends_with(scenario: &str, trouble: impl Fn(&Job), status: &str, limit: Duration, left: &[u32]) {
    for p2p in ["0", "1"] {
        let mut job = Job::start_with(scenario, 2, "shm", &[("UNISONO_P2P", p2p)]);
        job.await_all(&[0, 1], "up");
        job.await_all(&[0], "called");
        trouble(&job);
        let begun = Instant::now();
        let failed = &job.await_all(&[0], "failed")[0];
        let freed = &job.await_all(&[0], "freed")[0];
        println!("held: UNISONO_P2P={p2p}: {}; freed {}", failed.line, freed.line);
        assert!(failed.line.starts_with(status) && failed.line.contains("rank 1"), "{}", failed.line);
        assert!(freed.at - begun < limit + LATE, "{:?}", freed.at - begun);
        job.await_all(&left[1..], "failed");
        job.all_end_well(left);
    }
}

#[test]
fn a_deadline_holds_while_memory_is_freed() {
    ends_with("held absent", |_| {}, "Timeout", Duration::from_secs(2), &[0, 1]);
}

#[test]
fn the_death_of_a_rank_is_heard_while_memory_is_freed() {
    ends_with("held killed", |job| job.signal(1, libc::SIGKILL), "PeerFailed", Duration::ZERO, &[0]);
}

/// The first long call, for which rank 1 is late. Rank 0 frees memory before that.
pub(crate) fn scenario_first(seat: &Seat) {
    const COUNT: usize = 1 << 21;
    let rank = Rank::new(seat);
    let memory = filled(rank.device, &(rank.rank + 1).to_ne_bytes().repeat(COUNT));
    let short = filled(rank.device, &[0; 64]);
    let sum = |buffer: &DeviceBuffer, count: usize| {
        request(Kind::Allreduce, buffer.address(), buffer.address(), count, 0)
    };
    rank.launch(&sum(&short, 16), &rank.call());
    rank.stream.synchronize(soon()).expect("a short call");
    let freed = filled(rank.device, &[0; 4096]);
    report("up");
    let begun = Instant::now();
    std::thread::scope(|scope| {
        if rank.rank == 1 {
            std::thread::sleep(Duration::from_secs(1));
        } else {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(500));
                drop(freed);
            });
        }
        rank.launch(&sum(&memory, COUNT), &rank.call());
        rank.stream.synchronize(soon()).expect("it ends");
    });
    let took = begun.elapsed();
    assert!(read(&rank.stream, memory.address(), 4 * COUNT) == 3u32.to_ne_bytes().repeat(COUNT));
    report(format_args!("summed after {took:.2?}"));
}

#[test]
fn a_first_long_call_ends_while_memory_is_freed() {
    for transports in ["shm", "tcp"] {
        let mut job = Job::start_with("held first", 2, transports, &[("UNISONO_P2P", "0")]);
        for summed in job.await_all(&[0, 1], "summed") {
            println!("held: a first long call over {transports}, rank {}: {}", summed.rank, summed.line);
        }
        job.all_end_well(&[0, 1]);
    }
}

/// How long a stream is kept waiting in what follows.
const HELD: Duration = Duration::from_millis(200);

/// Keeps a stream waiting, and does `one` meanwhile and, on another thread and somewhat later, `other`. How
/// long they took.
fn while_a_stream_waits(one: impl FnOnce() + Send, other: impl FnOnce() + Send) -> [Duration; 2] {
    fn timed(body: impl FnOnce()) -> Duration {
        let begun = Instant::now();
        body();
        begun.elapsed()
    }
    let waiting = stream(0);
    let gate = devices().word(0).expect("a word");
    waiting.wait_word(&gate).expect("a wait");
    let took = std::thread::scope(|scope| {
        let opener = scope.spawn(|| {
            std::thread::sleep(HELD);
            gate.release();
        });
        let one = scope.spawn(|| timed(one));
        std::thread::sleep(HELD / 4);
        let other = timed(other);
        opener.join().expect("it opens");
        [one.join().expect("it returns"), other]
    });
    waiting.synchronize(soon()).expect("it goes on");
    took
}

type DriverCall = Box<dyn FnOnce() + Send>;

/// Which calls of the driver wait for a stream, and which wait behind one that frees memory. Printed, for
/// src/cuda/driver.rs: the library relies on none of it.
#[test]
fn what_waits_while_a_stream_does() {
    let (side, size) = (stream(0), 1 << 20);
    let memory = filled(0, &[0; 4096]);
    let pinned = PinnedBuffer::new(&devices(), 0, 4096).expect("pinned memory");
    let event = Event::new(&devices(), 0).expect("an event");
    event.record(&side).expect("a record");
    let print = |name: &str, took: Duration| println!("held: {name}: {took:.1?} of {HELD:.0?}");

    let device_memory = DeviceBuffer::new(&devices(), 0, size).expect("device memory");
    let host_memory = PinnedBuffer::new(&devices(), 0, size).expect("pinned memory");
    let registered = RegisteredBuffer::new(&devices(), 0, size).expect("registered memory");
    let spare = Event::new(&devices(), 0).expect("an event");
    let alone: [(&str, DriverCall); 8] = [
        ("cuMemFree", Box::new(|| drop(device_memory))),
        ("cuMemFreeHost", Box::new(|| drop(host_memory))),
        ("cuMemHostUnregister", Box::new(|| drop(registered))),
        ("cuEventDestroy", Box::new(|| drop(spare))),
        ("cuMemAlloc", Box::new(move || std::mem::forget(DeviceBuffer::new(&devices(), 0, size)))),
        ("cuMemHostAlloc", Box::new(move || std::mem::forget(PinnedBuffer::new(&devices(), 0, size)))),
        ("cuMemHostRegister", Box::new(move || std::mem::forget(RegisteredBuffer::new(&devices(), 0, size)))),
        ("cuEventCreate", Box::new(|| std::mem::forget(Event::new(&devices(), 0)))),
    ];
    for (name, call) in alone {
        print(name, while_a_stream_waits(call, || {})[0]);
    }

    let ask = || assert!(event.query().is_ok());
    let locate = || assert!(devices().locate(memory.address()).is_ok());
    let record = || event.record(&side).expect("a record");
    // SAFETY: both outlive the stream's work, which is waited for.
    let copy = || unsafe { side.copy_to_host(pinned.address(), memory.address(), 4096) }.expect("a copy");
    let behind: [(&str, &(dyn Fn() + Sync)); 4] = [
        ("cuEventQuery", &ask),
        ("cuPointerGetAttribute", &locate),
        ("cuEventRecord", &record),
        ("a copy", &copy),
    ];
    for (name, call) in behind {
        let freed = DeviceBuffer::new(&devices(), 0, size).expect("device memory");
        let [free, took] = while_a_stream_waits(|| drop(freed), call);
        print(&format!("{name} beside a cuMemFree of {free:.1?}"), took);
        side.synchronize(soon()).expect("it ends");
    }
}
