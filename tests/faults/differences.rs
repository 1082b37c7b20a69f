//! Calls that differ, calls that are missing, and an abort.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, TRANSPORTS, Verb, barrier, in_time, ranks, sum, within};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context};
use unisono::deadline::Deadline;
use unisono::error::{Error, Status};
use unisono::reduce::{DataType, Operator};
use unisono::schedule::Algorithm;

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

/// Rank 0 splits while the others sum: each is told of the split, and nobody that it waits for itself.
#[test]
fn a_split_that_others_do_not_call_is_named_to_all() {
    for transports in TRANSPORTS {
        for (size, first) in [(2u32, 0), (2, 1), (3, 0)] {
            let all_here = Barrier::new(size as usize);
            let met = |context: &Context| {
                sum(context, &mut [1.0; 10]);
                let patience = |rank: u32| Duration::from_millis(if rank == first { 1000 } else { 20_000 });
                context.set_timeout(patience(context.rank()));
                all_here.wait();
                let result = match context.rank() {
                    0 => context.split(Some(1), 0).map(drop),
                    _ => Verb::new(Kind::Allreduce, 10)
                        .run_in(context, &mut [1.0f32; 10], &Call::default())
                        .map(drop),
                };
                result.expect_err("the others call something else")
            };
            for (rank, error) in ranks(size, transports, met).iter().enumerate() {
                let place = format!("{transports}, rank {rank} of {size}, {first} tells first: {error}");
                assert!(error.text().contains("split"), "{place}");
                // It may be whom another waits for.
                let own = size == 2 || !error.text().contains("reports of its");
                assert!(!own || !error.text().contains(&format!("Look at rank {rank},")), "{place}");
            }
        }
    }
}

/// Every algorithm that only moves blocks to an output of many ranks', as messages: short ones that are held
/// back, and long ones before which the ranks agree. Rank 1 calls with another type, so that all agree but
/// with it.
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

/// Blocks that only two ranks count, by messages: of one length in one message, and of several, and none.
#[test]
fn blocks_that_two_ranks_count_differently_are_named_by_both() {
    for kind in [Kind::Alltoall, Kind::Gather, Kind::Scatter] {
        for transports in TRANSPORTS {
            count_differently(kind, transports);
        }
    }
}

fn count_differently(kind: Kind, transports: &'static str) {
    for (sent, expected) in [(5u64, 4u64), (300_000, 700_000), (700_000, 700_001), (9, 0), (0, 9)] {
        let all_here = Barrier::new(3);
        ranks(3, transports, |context| {
            all_here.wait();
            let rank = context.rank() as usize;
            // Rank 1 has another block for rank 0 than that one expects; all else agrees.
            let (mut send, mut receive) = (vec![2; 3], vec![2; 3]);
            match rank {
                0 => receive[1] = expected,
                1 => send[0] = sent,
                _ => {}
            }
            // The block is the sender's in a gather, the receiver's in a scatter.
            let block = if rank == 0 { expected } else { sent };
            let counts = match kind {
                Kind::Gather => Counts::Blocks(vec![2, block, 2]),
                Kind::Scatter => Counts::Blocks(vec![block, 2, 2]),
                _ => Counts::Exchange { send, receive },
            };
            let root = u32::from(kind == Kind::Scatter);
            let elements = sent.max(expected) as usize + 4;
            let verb = Verb { counts, root, ..Verb::new(kind, 0) };
            let (input, mut output) = (vec![1.0f32; elements], vec![7.0f32; elements]);
            let call = Call { tag: Some(1), ..within(40_000) };
            let mut result = verb.run(context, &input, &mut output, &call).map(drop);
            let own = result.is_err();
            while result.is_ok() {
                let barrier = Verb::new(Kind::Barrier, 0);
                result = barrier.run_in::<u8>(context, &mut [], &within(40_000)).map(drop);
            }
            let error = result.expect_err("the lists differ");
            assert_eq!(error.status(), Status::Mismatch, "{transports}: {error}");
            for (rank, count) in [(0, expected), (1, sent)] {
                let told =
                    [format!("rank {rank} counts {} bytes", 4 * count), format!("rank {rank} {}", 4 * count)];
                assert!(told.iter().any(|told| error.text().contains(told)), "{transports}: {error}");
            }
            let touched = output.iter().any(|&value| value != 7.0);
            assert!(rank != 0 || (own && !touched), "{transports}, {sent} and {expected}: {error}");
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
        in_time(|| abort_while_others_wait(transports));
    }
}

/// How long it takes until all know of an abort.
fn abort_while_others_wait(transports: &'static str) -> Duration {
    let aborted = std::sync::Mutex::new(None);
    let took = ranks(3, transports, |context| {
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
            since
        })
    });
    took.into_iter().max().expect("three ranks")
}

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
