//! Work handles: waiting, testing, callbacks, many at once, tags out of order, handles and contexts that are
//! dropped.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use support::{PATIENCE, Random, TRANSPORTS, Verb, barrier, ranks, sum, tagged, within};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context, Work};
use unisono::deadline::Deadline;
use unisono::error::Status;
use unisono::reduce::DataType;

fn start_sum(context: &Context, data: &mut [f32], call: &Call) -> Work {
    Verb::new(Kind::Allreduce, data.len() as u64).start_in(context, data, call).expect("it starts")
}

fn finish(work: &Work) {
    work.wait(Deadline::after(PATIENCE)).expect("the work ends well");
}

/// Some data of this rank, and its sum over `size` ranks.
fn data(rank: u32, size: u32, salt: usize, len: usize) -> (Vec<f32>, Vec<f32>) {
    let value = |rank: u32, i: usize| ((i * 7 + salt * 3) % 13) as f32 + rank as f32;
    let mine = (0..len).map(|i| value(rank, i)).collect();
    (mine, (0..len).map(|i| (0..size).map(|rank| value(rank, i)).sum()).collect())
}

#[test]
fn many_in_flight_end_in_order_with_the_right_results() {
    for transports in TRANSPORTS {
        for size in [1, 2, 4] {
            ranks(size, transports, |context| {
                let (mut buffers, wanted): (Vec<_>, Vec<_>) =
                    (0..60).map(|salt| data(context.rank(), size, salt, [3, 1000, 50_000][salt % 3])).unzip();
                let works: Vec<Work> =
                    buffers.iter_mut().map(|buffer| start_sum(context, buffer, &Call::default())).collect();
                // Operations without a tag run in order: when the last has ended, all have.
                finish(&works[59]);
                for work in &works {
                    assert!(work.test().is_some_and(|result| result.is_ok()), "ended before the last");
                }
                assert!(buffers == wanted, "{transports}, {size} ranks");
            });
        }
    }
}

#[test]
fn tags_match_by_tag_whatever_the_order_of_the_calls() {
    const TAGS: usize = 12;
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            for round in 0..5 {
                let mut order: Vec<usize> = (0..TAGS).collect();
                let mut random = Random(u64::from(context.rank()) << 8 | round);
                for i in (1..TAGS).rev() {
                    order.swap(i, random.below(i as u64 + 1) as usize);
                }
                let (mut buffers, wanted): (Vec<_>, Vec<_>) = (0..TAGS)
                    .map(|tag| data(context.rank(), 3, tag, if tag % 2 == 0 { 10 } else { 60_000 }))
                    .unzip();
                let mut works = Vec::new();
                for &tag in &order {
                    works.push(start_sum(context, &mut buffers[tag], &tagged(tag as u64)));
                }
                random.next();
                works.iter().rev().for_each(finish);
                assert!(buffers == wanted, "{transports}, round {round}");
            }
        });
    }
}

#[test]
fn blocking_calls_wait_behind_what_is_queued_and_tags_run_beside() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let (mut first, first_sum) = data(context.rank(), 2, 1, 200_000);
            let (mut second, second_sum) = data(context.rank(), 2, 2, 10);
            let (mut third, third_sum) = data(context.rank(), 2, 3, 10);
            let work = start_sum(context, &mut first, &Call::default());
            Verb::new(Kind::Allreduce, 10).run_in(context, &mut third, &tagged(5)).expect("beside");
            sum(context, &mut second);
            assert!(work.test().is_some_and(|result| result.is_ok()), "it was called first");
            assert!(first == first_sum && second == second_sum && third == third_sum);
        });
    }
}

#[test]
fn an_operation_that_nobody_waits_for_ends_nevertheless() {
    for transports in TRANSPORTS {
        let ended = AtomicUsize::new(0);
        ranks(4, transports, |context| {
            let (mut buffer, wanted) = data(context.rank(), 4, 9, 100_000);
            let (tell, told) = mpsc::channel();
            let work = start_sum(context, &mut buffer, &Call::default());
            work.on_complete(Box::new(move |result| tell.send(result.is_ok()).expect("somebody listens")));
            drop(work);
            // No call of unisono from here: its background thread does it all.
            assert!(told.recv_timeout(PATIENCE).expect("it ends"), "{transports}");
            assert!(buffer == wanted);
            ended.fetch_add(1, Ordering::SeqCst);
            while ended.load(Ordering::SeqCst) < 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }
}

#[test]
fn callbacks_are_called_exactly_once_each() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let calls = Arc::new(AtomicU32::new(0));
            let count = |work: &Work| {
                let calls = calls.clone();
                work.on_complete(Box::new(move |result| {
                    result.expect("the work ends well");
                    calls.fetch_add(1, Ordering::SeqCst);
                }));
            };
            let mut buffers = vec![vec![1.0f32; 1000]; 50];
            let mut works = Vec::new();
            for buffer in &mut buffers {
                let work = start_sum(context, buffer, &Call::default());
                count(&work);
                works.push(work);
            }
            works.iter().for_each(finish);
            // The callback may still be running when the wait has ended in another thread.
            let until = Instant::now() + PATIENCE;
            while calls.load(Ordering::SeqCst) < 50 && Instant::now() < until {
                std::thread::yield_now();
            }
            assert_eq!(calls.load(Ordering::SeqCst), 50);
            // On work that has ended: at once, in this thread.
            works.iter().for_each(count);
            assert_eq!(calls.load(Ordering::SeqCst), 100);
        });
    }
}

#[test]
fn a_callback_may_call_again() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            const ROUNDS: u32 = 20;
            fn again(context: Context, left: u32, done: mpsc::Sender<f32>) {
                let mut buffer = Box::new([1.0f32; 64]);
                let work = start_sum(&context, &mut buffer[..], &Call::default());
                work.on_complete(Box::new(move |result| {
                    result.expect("the work ends well");
                    let value = buffer[63];
                    match left {
                        0 => done.send(value).expect("somebody listens"),
                        _ => again(context, left - 1, done),
                    }
                }));
            }
            let (tell, told) = mpsc::channel();
            again(context.clone(), ROUNDS, tell);
            assert_eq!(told.recv_timeout(PATIENCE), Ok(2.0), "{transports}");
        });
    }
}

#[test]
fn a_wait_that_ends_early_leaves_the_work_running() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let mut buffer = [1.0f32; 8];
            if context.rank() == 0 {
                let work = start_sum(context, &mut buffer, &Call::default());
                let error = work.wait(Deadline::after(Duration::from_millis(30))).expect_err("too early");
                assert_eq!(error.status(), Status::Timeout);
                assert!(work.test().is_none());
                let cancelled = work.cancel().expect_err("it is everybody's");
                assert_eq!(cancelled.status(), Status::InvalidUsage);
                // Rank 1 waits for this message, which is of another order than the sum.
                support::send(context, 1, &[1], &Call::default()).expect("a send");
                finish(&work);
            } else {
                support::receive(context, 0, &mut [0], &Call::default()).expect("a receive");
                sum(context, &mut buffer);
            }
            assert_eq!(buffer, [2.0; 8]);
        });
    }
}

#[test]
fn several_threads_wait_for_one_work_and_for_different_ones() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            for round in 0..10 {
                let (mut shared, shared_sum) = data(context.rank(), 2, round, 30_000);
                let shared_work = start_sum(context, &mut shared, &Call::default());
                std::thread::scope(|scope| {
                    for tag in 0..3 {
                        let work = shared_work.clone();
                        scope.spawn(move || {
                            let (mut own, own_sum) = data(context.rank(), 2, 50 + tag, 2000);
                            finish(&work);
                            Verb::new(Kind::Allreduce, 2000)
                                .run_in(context, &mut own, &tagged(tag as u64))
                                .expect("of this thread alone");
                            assert!(own == own_sum, "{transports}, round {round}, tag {tag}");
                        });
                    }
                });
                assert!(shared == shared_sum);
            }
        });
    }
}

#[test]
fn two_threads_of_a_rank_use_two_contexts_at_the_same_time() {
    for transports in TRANSPORTS {
        ranks(3, transports, |context| {
            let other = context.duplicate().expect("a second context");
            std::thread::scope(|scope| {
                for context in [context, &other] {
                    scope.spawn(move || {
                        for round in 0..100 {
                            let len = if round % 10 == 0 { 40_000 } else { 10 };
                            let (mut mine, wanted) = data(context.rank(), 3, round, len);
                            sum(context, &mut mine);
                            assert!(mine == wanted, "{transports}, round {round}");
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn two_jobs_of_one_process_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for transports in ["shm", "tcp", "shm,tcp"] {
            scope.spawn(move || {
                ranks(3, transports, |context| {
                    for round in 0..50 {
                        let (mut mine, wanted) = data(context.rank(), 3, round, 3000);
                        sum(context, &mut mine);
                        assert!(mine == wanted, "{transports}, round {round}");
                    }
                });
            });
        }
    });
}

#[test]
fn a_context_dropped_with_work_in_flight_lets_the_work_end() {
    for transports in TRANSPORTS {
        let buffers = ranks(2, transports, |context| {
            let child = context.duplicate().expect("a second context");
            let mut buffer = vec![1.0f32; 70_000];
            let work = start_sum(&child, &mut buffer, &Call::default());
            drop(child);
            finish(&work);
            barrier(context);
            buffer
        });
        for buffer in buffers {
            assert!(buffer.iter().all(|&value| value == 2.0), "{transports}");
        }
    }
}

#[test]
fn queued_work_gives_up_at_its_own_deadline() {
    ranks(2, "shm", |context| {
        let child = context.duplicate().expect("a second context");
        if context.rank() == 0 {
            // The first waits for long; the second stands in the queue behind it.
            let (mut first, mut second) = ([0.0f32; 4], [0.0f32; 4]);
            let _first = start_sum(&child, &mut first, &within(8000));
            let work = start_sum(&child, &mut second, &within(200));
            let began = Instant::now();
            let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 never calls");
            assert_eq!(error.status(), Status::Timeout, "{error}");
            assert!(began.elapsed() < Duration::from_secs(5), "at its own deadline, not the other's");
            child.abort();
        }
        barrier(context);
    });
}

#[test]
fn works_started_by_many_threads_with_tags_all_end() {
    for transports in TRANSPORTS {
        ranks(2, transports, |context| {
            let seen = std::sync::Mutex::new(HashSet::new());
            std::thread::scope(|scope| {
                for thread in 0..4u64 {
                    let seen = &seen;
                    scope.spawn(move || {
                        for turn in 0..25 {
                            let mut value = [thread << 32 | turn];
                            let verb = Verb::new(Kind::Allreduce, 1).dtype(DataType::U64);
                            let work =
                                verb.start_in(context, &mut value, &tagged(thread)).expect("it starts");
                            finish(&work);
                            assert_eq!(value[0], 2 * (thread << 32 | turn));
                            assert!(seen.lock().expect("no panic").insert(value[0]));
                        }
                    });
                }
            });
            assert_eq!(seen.into_inner().expect("no panic").len(), 100);
        });
    }
}
