//! Processes that die, stop or exit.

use std::time::{Duration, Instant};

use crate::support::processes::{Job, Seat, report};
use crate::support::{PATIENCE, TRANSPORTS, Verb, barrier, in_time, sum, within};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context, Options};
use unisono::reduce::DataType;
use unisono::schedule::Algorithm;

// ---- processes that die

pub(crate) fn until_it_fails(seat: &Seat, len: usize) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut data = vec![1.0f32; len];
    let verb = Verb::new(Kind::Allreduce, len as u64);
    let mut rounds = 0;
    let error = loop {
        match verb.run_in(&context, &mut data, &Call::default()) {
            Ok(_) => rounds += 1,
            Err(error) => break error,
        }
        if rounds == 5 {
            report("looping");
        }
    };
    report(format_args!("failed {:?} {error}", error.status()));
    after(seat, &context);
}

/// What a survivor of rank 1 does next: it finds that the failure stays, and makes a new context with the
/// others.
pub(crate) fn after(seat: &Seat, failed: &Context) {
    let again = Verb::new(Kind::Barrier, 0)
        .run_in::<u8>(failed, &mut [], &Call::default())
        .expect_err("a failure stays");
    assert_eq!(Some(again.status()), failed.failure().map(|error| error.status()));
    let rank = if seat.rank == 0 { 0 } else { seat.rank - 1 };
    let context = Context::create(Options { rank, size: seat.size - 1, ..seat.options("after") });
    let mut data = [1.0f32; 100];
    sum(&context.expect("the survivors meet"), &mut data);
    report(format_args!("after {}", data[99]));
}

pub(crate) fn sends_until_it_fails(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    barrier(&context);
    report("looping");
    let mut data = vec![0; 200_000];
    let error = loop {
        let done = match seat.rank {
            // Rank 1 feeds the others.
            1 => crate::support::send(&context, 0, &data, &Call::default())
                .and_then(|()| crate::support::send(&context, 2, &data, &Call::default())),
            _ => crate::support::receive(&context, 1, &mut data, &Call::default()),
        };
        if let Err(error) = done {
            break error;
        }
    };
    report(format_args!("failed {:?} {error}", error.status()));
    after(seat, &context);
}

fn survivors_of_a_kill(scenario: &str, operation: &str) {
    for transports in TRANSPORTS {
        for _ in 0..2 {
            in_time(|| survivors_of_one_kill(scenario, operation, transports, &[]));
        }
    }
}

/// How long it takes until all survivors know.
fn survivors_of_one_kill(
    scenario: &str,
    operation: &str,
    transports: &str,
    more: &[(&str, &str)],
) -> Duration {
    let mut took = Duration::ZERO;
    let mut job = Job::start_with(scenario, 3, transports, more);
    job.await_all(&[0, 1, 2], "looping");
    std::thread::sleep(Duration::from_millis(20));
    let killed = Instant::now();
    job.signal(1, libc::SIGKILL);
    for failed in job.await_all(&[0, 2], "failed") {
        let text = &failed.line;
        took = took.max(failed.at - killed);
        assert!(text.starts_with("PeerFailed"), "{transports}: {text}");
        for words in ["rank 1", &format!("pid {}", job.pid(1)), &hostname()] {
            assert!(text.contains(words), "{transports}: {text} does not say {words}");
        }
        // Between two calls there is no operation to name.
        let named = text.contains(operation) || text.contains("has failed before");
        assert!(named, "{transports}: {text} does not say {operation}");
    }
    for after in job.await_all(&[0, 2], "after") {
        assert_eq!(after.line, "2");
    }
    job.all_end_well(&[0, 2]);
    took
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name").trim().to_owned()
}

#[test]
fn all_learn_within_a_second_of_a_rank_killed_in_small_sums() {
    survivors_of_a_kill("small sums", "allreduce");
}

#[test]
fn all_learn_within_a_second_of_a_rank_killed_in_large_sums() {
    survivors_of_a_kill("large sums", "allreduce");
}

#[test]
fn all_learn_within_a_second_of_a_rank_killed_in_sums_that_several_threads_move() {
    let threads = [("UNISONO_TCP_THREADS", "4")];
    for transports in TRANSPORTS {
        for _ in 0..4 {
            in_time(|| survivors_of_one_kill("large sums", "allreduce", transports, &threads));
        }
    }
}

#[test]
fn all_learn_within_a_second_of_a_rank_killed_while_it_sends() {
    survivors_of_a_kill("sends", "receive");
}

// ---- processes that stop

pub(crate) fn stop(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut data = [1.0f32; 100];
    sum(&context, &mut data);
    report("looping");
    let error = loop {
        let verb = Verb::new(Kind::Allreduce, 100);
        if let Err(error) = verb.run_in(&context, &mut data, &within(1500)) {
            break error;
        }
    };
    report(format_args!("failed {:?} {error}", error.status()));
}

#[test]
fn a_stopped_rank_is_a_timeout_that_says_so() {
    for transports in TRANSPORTS {
        let mut job = Job::start("stop", 3, transports);
        job.await_all(&[0, 1, 2], "looping");
        job.signal(1, libc::SIGSTOP);
        for failed in job.await_all(&[0, 2], "failed") {
            let text = &failed.line;
            assert!(text.starts_with("Timeout"), "{transports}: {text}");
            for words in ["rank 1", "allreduce", &format!("pid {}", job.pid(1))] {
                assert!(text.contains(words), "{transports}: {text} does not say {words}");
            }
            assert!(text.contains("does not answer") || text.contains("last call"), "{transports}: {text}");
        }
        job.all_end_well(&[0, 2]);
    }
}

/// Rank 2 is stopped. Whoever is farthest from it in the ring gives up first, and has heard of ranks that
/// wait only.
pub(crate) fn stop_across_hosts(seat: &Seat) {
    for (name, algorithm) in [("a ring", Some(Algorithm::Ring)), ("any way", None)] {
        let host = Some(format!("host {}", seat.rank / 2));
        let options = Options { host, ..seat.options(name) };
        let context = Context::create(options).expect("the ranks meet");
        let from_stopped = (seat.rank + 2) % 4;
        let timeout = 1000 + 50 * u64::from(from_stopped);
        let algorithm = algorithm.map(|algorithm| algorithm as i32);
        let mut data = [1.0f32; 4000];
        sum(&context, &mut data);
        report("looping");
        let (error, took) = loop {
            let called = Instant::now();
            let call = Call { algorithm, ..within(timeout) };
            if let Err(error) = Verb::new(Kind::Allreduce, 4000).run_in(&context, &mut data, &call) {
                break (error, called.elapsed());
            }
        };
        report(format_args!("failed {:?} after {took:.1?}: {error}", error.status()));
    }
}

#[test]
fn a_stopped_rank_of_another_host_is_named_by_all() {
    let mut job = Job::start("stop across hosts", 4, "shm,tcp");
    for _ in 0..2 {
        job.await_all(&[0, 1, 2, 3], "looping");
        job.signal(2, libc::SIGSTOP);
        for failed in job.await_all(&[0, 1, 3], "failed Timeout") {
            let text = &failed.line;
            for words in ["nothing from rank 2 (", &format!("pid {}", job.pid(2)), "Look at rank 2"] {
                assert!(text.contains(words), "rank {}: {text} does not say {words}", failed.rank);
            }
        }
        job.signal(2, libc::SIGCONT);
        job.await_all(&[2], "failed");
    }
    job.all_end_well(&[0, 1, 2, 3]);
}

/// The root gives up while rank 1 is stopped, and uses its memory for something else.
pub(crate) fn stop_in_broadcasts(seat: &Seat, call: &Call) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut data = vec![0u64; 4 << 20];
    let verb = Verb::new(Kind::Broadcast, data.len() as u64).dtype(DataType::U64);
    for round in 1.. {
        // The first are to succeed, on a busy machine, too.
        let timeout = if round > 3 { Duration::from_secs(1) } else { PATIENCE };
        let call = Call { timeout: Some(timeout), ..call.clone() };
        if seat.rank == 0 {
            data.fill(round);
        }
        let result = verb.run_in(&context, &mut data, &call);
        if result.is_ok() {
            let wrong = data.iter().find(|&&value| value != round);
            assert!(wrong.is_none(), "round {round} gave {wrong:x?}");
        }
        data.fill(0xdead);
        if let Err(error) = result {
            report(format_args!("failed {:?} {error}", error.status()));
            break;
        }
        if round == 3 {
            report("looping");
        }
    }
    // The memory stays: what reads it now would find the wrong bytes there, not none.
    std::thread::sleep(Duration::from_millis(1500));
    report(format_args!("ends {}", data[0]));
}

#[test]
fn a_rank_that_was_stopped_does_not_take_what_is_no_longer_there() {
    for transports in TRANSPORTS {
        for scenario in ["stop in order", "stop in a tag"] {
            for (pause, threads) in [(3, "4"), (8, "1"), (15, "4")] {
                let mut job = Job::start_with(scenario, 2, transports, &[("UNISONO_TCP_THREADS", threads)]);
                job.await_all(&[0, 1], "looping");
                std::thread::sleep(Duration::from_millis(pause));
                job.signal(1, libc::SIGSTOP);
                job.await_all(&[0], "failed");
                job.signal(1, libc::SIGCONT);
                job.await_all(&[1], "failed");
                job.all_end_well(&[0, 1]);
            }
        }
    }
}

// ---- processes that exit

/// Rank 1 is done and exits without a goodbye, as scripts do.
pub(crate) fn exit_early(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    for _ in 0..20 {
        sum(&context, &mut vec![1.0; 1000]);
    }
    // The root's message is all that rank 1 has to say.
    let mut data = vec![seat.rank as f32; 200];
    Verb::new(Kind::Broadcast, 200)
        .root(1)
        .run_in(&context, &mut data, &Call::default())
        .expect("a broadcast");
    assert_eq!(data[199], 1.0);
    report("done");
    std::process::exit(0);
}

#[test]
fn a_rank_may_exit_when_nobody_needs_it_any_more() {
    for transports in TRANSPORTS {
        for _ in 0..5 {
            let mut job = Job::start("exit early", 3, transports);
            job.await_all(&[0, 1, 2], "done");
            job.all_end_well(&[0, 1, 2]);
        }
    }
}

pub(crate) fn exit_while_needed(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let verb = Verb::new(Kind::Allreduce, 10);
    let call = || verb.run_in(&context, &mut [1.0f32; 10], &Call::default());
    let first = call();
    if seat.rank == 1 {
        first.expect("all have called it");
        std::process::exit(0);
    }
    // A rank that is slow may hear of the end when it is in the first call yet.
    let error = first.and_then(|_| call()).expect_err("rank 1 is gone");
    report(format_args!("failed {:?} {error}", error.status()));
}

#[test]
fn a_rank_that_exits_while_it_is_needed_fails_the_others() {
    for transports in TRANSPORTS {
        let mut job = Job::start("exit", 3, transports);
        for failed in job.await_all(&[0, 2], "failed") {
            let text = &failed.line;
            assert!(text.starts_with("PeerFailed") && text.contains("rank 1"), "{transports}: {text}");
        }
        job.all_end_well(&[0, 1, 2]);
    }
}
