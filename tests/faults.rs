//! What happens when something goes wrong: processes that die, stop, exit or fork, calls that differ, strangers, no
//! descriptors. And what waiting and being there costs.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use support::processes::{Job, Seat, enter, report};
use support::{PATIENCE, TRANSPORTS, Verb, barrier, ranks, sum, tagged, within};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context, Options};
use unisono::deadline::Deadline;
use unisono::error::{Error, Status};
use unisono::reduce::{DataType, Operator};
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::secret::SecretKey;
use unisono::rendezvous::store::Store;
use unisono::schedule::Algorithm;
use unisono::transport::address::PeerAddress;
use unisono::transport::handshake::{Handshake, Hello, Purpose};

/// Within this time everybody learns of a failure.
const SOON: Duration = Duration::from_secs(1);

#[test]
fn rank() {
    enter(&[
        ("small sums", |seat| until_it_fails(seat, 16)),
        ("large sums", |seat| until_it_fails(seat, 3_000_000)),
        ("sends", sends_until_it_fails),
        ("stop", stop),
        ("stop across hosts", stop_across_hosts),
        ("stop in order", |seat| stop_in_broadcasts(seat, &Call::default())),
        ("stop in a tag", |seat| stop_in_broadcasts(seat, &tagged(7))),
        ("exit early", exit_early),
        ("exit", exit_while_needed),
        ("descriptors", descriptors),
        ("fork", fork),
        ("alone", alone),
        ("idle", idle),
        ("memory", memory),
        ("time", time),
    ]);
}

// ---- processes that die

fn until_it_fails(seat: &Seat, len: usize) {
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

/// What a survivor of rank 1 does next: it finds that the failure stays, and makes a new context with the others.
fn after(seat: &Seat, failed: &Context) {
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

fn sends_until_it_fails(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    barrier(&context);
    report("looping");
    let mut data = vec![0; 200_000];
    let error = loop {
        let done = match seat.rank {
            // Rank 1 feeds the others.
            1 => support::send(&context, 0, &data, &Call::default())
                .and_then(|()| support::send(&context, 2, &data, &Call::default())),
            _ => support::receive(&context, 1, &mut data, &Call::default()),
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
            let mut job = Job::start(scenario, 3, transports);
            job.await_all(&[0, 1, 2], "looping");
            std::thread::sleep(Duration::from_millis(20));
            let killed = Instant::now();
            job.signal(1, libc::SIGKILL);
            for failed in job.await_all(&[0, 2], "failed") {
                let (text, took) = (&failed.line, failed.at - killed);
                assert!(took < SOON, "{transports}: rank {} took {took:?}: {text}", failed.rank);
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
        }
    }
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
fn all_learn_within_a_second_of_a_rank_killed_while_it_sends() {
    survivors_of_a_kill("sends", "receive");
}

// ---- processes that stop

fn stop(seat: &Seat) {
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

/// Rank 2 is stopped. Whoever is farthest from it in the ring gives up first, and has heard of ranks that wait only.
fn stop_across_hosts(seat: &Seat) {
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
fn stop_in_broadcasts(seat: &Seat, call: &Call) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    let mut data = vec![0u64; 4 << 20];
    let verb = Verb::new(Kind::Broadcast, data.len() as u64).dtype(DataType::U64);
    let call = Call { timeout: Some(Duration::from_millis(1000)), ..call.clone() };
    for round in 1.. {
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
            for pause in [3, 8, 15] {
                let mut job = Job::start(scenario, 2, transports);
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
fn exit_early(seat: &Seat) {
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

fn exit_while_needed(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    if seat.rank == 1 {
        std::process::exit(0);
    }
    let verb = Verb::new(Kind::Allreduce, 10);
    let error = verb.run_in(&context, &mut [1.0f32; 10], &Call::default()).expect_err("rank 1 is gone");
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

// ---- calls that differ

/// One call of [`calls_that_differ`], and how errors name it.
fn differing() -> Vec<(Verb, Verb, &'static str, &'static str)> {
    let sum = Verb::new(Kind::Allreduce, 1024);
    let broadcast = Verb::new(Kind::Broadcast, 1024);
    let text = "allreduce(1024 × float32, sum)";
    vec![
        (sum.clone(), broadcast.clone(), text, "broadcast(1024 × float32, root 0)"),
        (sum.clone(), Verb::new(Kind::Barrier, 0), text, "barrier()"),
        (sum.clone(), Verb::new(Kind::Allreduce, 1000), text, "allreduce(1000 × float32, sum)"),
        (sum.clone(), sum.clone().operator(Operator::Max), text, "allreduce(1024 × float32, max)"),
        (sum.clone(), sum.dtype(DataType::I32), text, "allreduce(1024 × int32, sum)"),
        (
            Verb::new(Kind::Reduce, 1024),
            Verb::new(Kind::Reduce, 1024).root(2),
            "reduce(1024 × float32, sum, root 0)",
            "reduce(1024 × float32, sum, root 2)",
        ),
        (broadcast.clone(), broadcast.root(2), "broadcast(1024 × float32, root 0)", "root 2)"),
        (
            Verb::new(Kind::Allreduce, 400_000),
            Verb::new(Kind::Allreduce, 400_001),
            "allreduce(400000 × float32, sum)",
            "allreduce(400001 × float32, sum)",
        ),
        (
            Verb::new(Kind::Allgather, 10),
            Verb::new(Kind::Alltoall, 10),
            "allgather(10 × float32)",
            "alltoall(10 × float32)",
        ),
    ]
}

#[test]
fn calls_that_differ_are_a_mismatch_on_every_rank() {
    for transports in TRANSPORTS {
        for size in [2u32, 3, 5] {
            for odd in [0, size - 1] {
                for (usual, other, usual_text, other_text) in differing() {
                    if odd == 0 && other.root == 2 || other.root >= size {
                        continue;
                    }
                    let all_here = Barrier::new(size as usize);
                    ranks(size, transports, |context| {
                        all_here.wait();
                        let verb = if context.rank() == odd { &other } else { &usual };
                        let (input, mut output) = (vec![1.0f32; 400_001], vec![7.0f32; 400_001]);
                        let began = Instant::now();
                        let mut result = verb.run(context, &input, &mut output, &within(40_000)).map(drop);
                        let own = result.is_err();
                        // A rank that needed nobody's answer learns of it in its next calls.
                        while result.is_ok() && began.elapsed() < PATIENCE {
                            let verb = Verb::new(Kind::Barrier, 0);
                            result = verb.run_in::<u8>(context, &mut [], &within(40_000)).map(drop);
                        }
                        let error = result.expect_err("the calls differ");
                        let place = format!("{transports}, rank {} of {size}, {odd} is odd", context.rank());
                        assert_eq!(error.status(), Status::Mismatch, "{place}: {error}");
                        let odd = format!("rank {odd} called");
                        for words in [usual_text, other_text, &odd] {
                            assert!(error.text().contains(words), "{place}: {error} does not say {words}");
                        }
                        assert!(began.elapsed() < Duration::from_secs(20), "{place}: not by a timeout");
                        let touched = output.iter().position(|&value| value != 7.0);
                        assert!(!own || touched.is_none(), "{place}: element {touched:?} changed: {error}");
                    });
                }
            }
        }
    }
}

/// Every algorithm that only moves blocks to an output of many ranks', as messages: short ones that are held back, and long ones
/// before which the ranks agree. Rank 1 calls with another type, so that all agree but with it.
#[test]
fn nothing_is_written_when_calls_differ_however_blocks_travel() {
    let algorithms = [
        (Kind::Allgather, Algorithm::Linear),
        (Kind::Allgather, Algorithm::Ring),
        (Kind::Allgather, Algorithm::Bruck),
        (Kind::Alltoall, Algorithm::Linear),
        (Kind::Alltoall, Algorithm::Pairwise),
        (Kind::Alltoall, Algorithm::Bruck),
        (Kind::Gather, Algorithm::Linear),
        (Kind::Gather, Algorithm::Binomial),
        (Kind::Broadcast, Algorithm::Binomial),
        (Kind::Scatter, Algorithm::Binomial),
    ];
    for transports in TRANSPORTS {
        for (kind, algorithm) in algorithms {
            for size in [2u32, 4] {
                for count in [10, 3000, 30_000, 150_000] {
                    // What a rank has of the root is its own, whatever the others call.
                    if matches!(kind, Kind::Broadcast | Kind::Scatter) && count > 3000 {
                        continue;
                    }
                    ranks(size, transports, |context| {
                        let rank = context.rank();
                        // Rank 1 comes when the others have had time to do what they should not.
                        barrier(context);
                        if rank == 1 {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        let dtype = if rank == 1 { DataType::I32 } else { DataType::F32 };
                        let verb = Verb::new(kind, count).dtype(dtype);
                        let call = Call { algorithm: Some(algorithm as i32), tag: Some(7), ..within(40_000) };
                        let elements = count as usize * size as usize;
                        let (input, mut output) = (vec![1.0f32; elements], vec![7.0f32; elements]);
                        let mut result = verb.run(context, &input, &mut output, &call).map(drop);
                        let own = result.is_err();
                        while result.is_ok() {
                            let barrier = Verb::new(Kind::Barrier, 0);
                            result = barrier.run_in::<u8>(context, &mut [], &within(40_000)).map(drop);
                        }
                        let place = format!(
                            "{transports}, {} of {count} by {}, rank {rank} of {size}",
                            kind.name(),
                            algorithm.name()
                        );
                        let error = result.expect_err("the calls differ");
                        assert_eq!(error.status(), Status::Mismatch, "{place}: {error}");
                        // Who only gives away what it has may have ended well.
                        let hears = match kind {
                            Kind::Allgather | Kind::Alltoall => true,
                            Kind::Gather => rank == 0,
                            _ => rank == 1,
                        };
                        assert!(own || !hears, "{place}: it ended well");
                        let touched = output.iter().position(|&value| value != 7.0);
                        assert!(!own || touched.is_none(), "{place}: element {touched:?} changed: {error}");
                    });
                }
            }
        }
    }
}

#[test]
fn roots_that_wait_for_each_other_differ_before_they_are_late() {
    for transports in TRANSPORTS {
        let all_here = Barrier::new(3);
        let over = Barrier::new(3);
        ranks(3, transports, |context| {
            let mut data = vec![1.0f32; 1024];
            let verb = |root| Verb::new(Kind::Reduce, 1024).root(root);
            let result = match context.rank() {
                2 => {
                    let work = verb(2).start_in(context, &mut data, &within(40_000)).expect("it starts");
                    all_here.wait();
                    work.wait(Deadline::after(PATIENCE)).map(drop)
                }
                // Its time is over before it would compare its call unasked.
                0 => {
                    all_here.wait();
                    verb(0).run_in(context, &mut data, &within(100)).map(drop)
                }
                // It only sends: what comes of it is the others' affair.
                _ => {
                    all_here.wait();
                    let _ = verb(0).run_in(context, &mut data, &within(40_000));
                    over.wait();
                    return;
                }
            };
            over.wait();
            let error = result.expect_err("the roots differ");
            assert_eq!(error.status(), Status::Mismatch, "{transports}, rank {}: {error}", context.rank());
            for words in [
                "rank 2 called reduce(1024 × float32, sum, root 2)",
                "called reduce(1024 × float32, sum, root 0)",
            ] {
                assert!(error.text().contains(words), "{transports}: {error} does not say {words}");
            }
        });
    }
}

#[test]
fn uneven_counts_that_differ_are_a_mismatch() {
    for transports in TRANSPORTS {
        let all_here = Barrier::new(3);
        ranks(3, transports, |context| {
            all_here.wait();
            let list = if context.rank() == 2 { vec![1, 2, 4] } else { vec![1, 2, 3] };
            let verb = Verb { counts: Counts::Blocks(list), ..Verb::new(Kind::Allgather, 0) };
            let mut output = [7.0f32; 7];
            let error =
                verb.run(context, &[1.0f32; 4], &mut output, &within(40_000)).expect_err("the lists differ");
            assert_eq!(error.status(), Status::Mismatch, "{error}");
            assert!(error.text().contains("allgatherv"), "{error}");
        });
    }
}

#[test]
fn a_rank_that_never_calls_is_named_with_its_last_call() {
    for transports in TRANSPORTS {
        let waiting = AtomicU32::new(2);
        ranks(3, transports, |context| {
            sum(context, &mut [1.0; 77]);
            if context.rank() == 2 {
                while waiting.load(Ordering::SeqCst) > 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return;
            }
            let verb = Verb::new(Kind::Allreduce, 10);
            let result = verb.run_in(context, &mut [1.0f32; 10], &within(300));
            waiting.fetch_sub(1, Ordering::SeqCst);
            let error = result.expect_err("rank 2 never calls");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for words in ["rank 2", "allreduce(77 × float32, sum)", "done", "timeout_ms"] {
                assert!(error.text().contains(words), "{transports}: {error} does not say {words}");
            }
        });
    }
}

#[test]
fn abort_from_another_thread_ends_all_waits() {
    for transports in TRANSPORTS {
        let aborted = std::sync::Mutex::new(None);
        ranks(3, transports, |context| {
            barrier(context);
            std::thread::scope(|scope| {
                if context.rank() == 0 {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(100));
                        *aborted.lock().expect("no panic") = Some(Instant::now());
                        context.abort();
                    });
                }
                // Rank 2 never calls, so ranks 0 and 1 wait.
                let error = match context.rank() {
                    2 => loop {
                        match context.failure() {
                            Some(error) => break error,
                            None => std::thread::sleep(Duration::from_millis(1)),
                        }
                    },
                    _ => Verb::new(Kind::Barrier, 0)
                        .run_in::<u8>(context, &mut [], &Call::default())
                        .expect_err("it is aborted"),
                };
                let since = aborted.lock().expect("no panic").expect("after the abort").elapsed();
                assert_eq!(error.status(), Status::Aborted, "{error}");
                assert!(error.text().contains("rank 0 aborted 'default'"), "{error}");
                assert!(since < SOON, "{transports}: rank {} took {since:?}", context.rank());
            });
        });
    }
}

// ---- strangers

#[test]
fn strangers_are_turned_away_and_do_no_harm() {
    for transports in TRANSPORTS {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (store, over) = (store.clone(), &over);
                scope.spawn(move || {
                    let context = Context::create(support::options(rank, 2, store, transports));
                    let context = context.expect("the ranks meet");
                    // Rank 0 decides when it is over; all the while sums are right.
                    loop {
                        let mut data =
                            vec![f32::from(u8::from(over.load(Ordering::SeqCst) && rank == 0)); 5000];
                        sum(&context, &mut data);
                        if data[4999] == 1.0 {
                            return;
                        }
                        assert_eq!(data[4999], 0.0);
                    }
                });
            }
            let key = "default/0/rank/0";
            let bytes =
                store.get(key, unisono::deadline::Deadline::after(PATIENCE)).expect("the address of rank 0");
            let address = PeerAddress::decode(&bytes).expect("an address");
            // The connections stay open while others come: nobody waits for them.
            let visits: Vec<_> = (0..5).flat_map(|_| (0..5).map(|kind| visit(&address, kind))).collect();
            for mut visitor in visits {
                let mut said = Vec::new();
                // A challenge at most, then the end. A stranger that says nothing is shown out after a while.
                let end = visitor.read_to_end(&mut said);
                let reset = end.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset);
                assert!(end.is_ok() || reset, "{transports}: {end:?}");
                assert!(said.len() <= 42, "{transports}: {} bytes for a stranger", said.len());
            }
            over.store(true, Ordering::SeqCst);
        });
    }
}

trait Visitor: Read + Write + Send {}
impl<T: Read + Write + Send> Visitor for T {}

fn visit(address: &PeerAddress, kind: u32) -> Box<dyn Visitor> {
    let mut visitor: Box<dyn Visitor> = match address.addresses.first() {
        Some(address) => {
            let stream = TcpStream::connect(address).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
        None => {
            let hex: String = address.local.iter().map(|byte| format!("{byte:02x}")).collect();
            let name = SocketAddr::from_abstract_name(format!("unisono-{hex}")).expect("a name");
            let stream = UnixStream::connect_addr(&name).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
    };
    let secret = SecretKey::from_text("a guess");
    let hello = Hello { purpose: Purpose::Control, initiator: 1, target: 0, job: 7, attempt: 1 };
    let (_, hello) = Handshake::initiate(&secret, hello, [3; 32]);
    let words = match kind {
        0 => b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".repeat(100),
        // Half a hello, then silence.
        1 => hello[..hello.len() / 2].to_vec(),
        // A hello, and a proof made of nothing.
        2 => [&hello[..], &[0; 32]].concat(),
        3 => support::pattern(1, 100_000),
        _ => Vec::new(),
    };
    // It may hang up in the middle.
    let _ = visitor.write_all(&words);
    visitor
}

// ---- no descriptors left

fn descriptors(seat: &Seat) {
    for spare in [0, 3, 6, 9] {
        if seat.rank == 1 {
            limit_descriptors(Some(limit_for(spare)));
        }
        // Rank 1 fails at once and is ahead; rank 0 comes when it has waited in vain.
        let timeout = Duration::from_secs(if seat.rank == 0 { 2 } else { 5 });
        let options = Options { timeout, ..seat.options(&format!("with {spare}")) };
        let result = Context::create(options).and_then(|context| {
            let verb = Verb::new(Kind::Allreduce, 10);
            verb.run_in(&context, &mut [1.0f32; 10], &within(2000))
        });
        limit_descriptors(None);
        report(match result {
            Ok(_) => format!("spare {spare} ok"),
            Err(error) => format!("spare {spare} {:?} {error}", error.status()),
        });
    }
    let context = Context::create(seat.options("enough again")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    report("done");
}

/// The limit that leaves `spare` numbers free.
fn limit_for(spare: usize) -> u64 {
    let open: Vec<u64> = std::fs::read_dir("/proc/self/fd")
        .expect("the descriptors")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let free = |number: &u64| !open.contains(number);
    // The listing's own descriptor is among them and free again.
    (0..).filter(free).nth(spare).expect("numbers do not end").saturating_sub(1)
}

fn limit_descriptors(limit: Option<u64>) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both take a pointer to a whole structure.
    let answer = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits);
        limits.rlim_cur = limit.unwrap_or(limits.rlim_max);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limits)
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_rank_without_descriptors_says_so_and_recovers() {
    for transports in TRANSPORTS {
        let mut job = Job::start("descriptors", 2, transports);
        for spare in ["spare 0 ", "spare 3 ", "spare 6 ", "spare 9 "] {
            let lines = job.await_all(&[0, 1], spare);
            let text = &lines[1].line;
            // Further on they may suffice.
            let clear = text.contains("oo many open files");
            let enough = text.ends_with("ok") && matches!(spare, "spare 6 " | "spare 9 ");
            assert!(clear || enough, "{transports}, {spare}: {text}");
        }
        job.await_all(&[0, 1], "done");
        job.all_end_well(&[0, 1]);
    }
}

// ---- forks

fn fork(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 10]);
    // SAFETY: the child calls what unisono promises to refuse, writes, and ends without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let error = Verb::new(Kind::Allreduce, 10)
            .run_in(&context, &mut [1.0f32; 10], &Call::default())
            .expect_err("it has no links");
        let clear = error.status() == Status::InvalidUsage && error.text().contains("fork");
        drop(context);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if clear { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child's call fails clearly");
    for _ in 0..10 {
        let mut data = vec![1.0; 50_000];
        sum(&context, &mut data);
        assert_eq!(data[49_999], 2.0);
    }
    report("done");
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    for transports in TRANSPORTS {
        let mut job = Job::start("fork", 2, transports);
        job.await_all(&[0, 1], "done");
        job.all_end_well(&[0, 1]);
    }
}

// ---- what it costs

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).expect("a directory of /proc").count()
}

fn alone(seat: &Seat) {
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

fn idle(seat: &Seat) {
    let context = Context::create(seat.options("")).expect("the ranks meet");
    sum(&context, &mut [1.0; 1000]);
    let child = context.duplicate().expect("a child");
    barrier(&context);
    let (began, before) = (Instant::now(), cpu_time());
    if seat.rank == 0 {
        sum(&context, &mut [1.0; 1000]);
    } else {
        std::thread::sleep(Duration::from_millis(1200));
        report(format_args!("slept {}", (cpu_time() - before).as_micros()));
        sum(&context, &mut [1.0; 1000]);
        barrier(&context);
        report("done");
        return;
    }
    assert!(began.elapsed() > SOON, "it waited");
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

fn memory(seat: &Seat) {
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

fn time(seat: &Seat) {
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

/// Errors say what happened in one line.
#[test]
fn errors_are_one_line() {
    ranks(2, "shm", |context| {
        let verb = Verb::new(Kind::Allreduce, 10);
        let error: Error = if context.rank() == 0 {
            verb.run_in(context, &mut [1.0f32; 10], &within(100)).expect_err("rank 1 does not call")
        } else {
            loop {
                match context.failure() {
                    Some(error) => break error,
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        };
        assert!(!error.text().contains('\n') && error.text().len() < 1000, "{error}");
    });
}
