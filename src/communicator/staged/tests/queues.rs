//! Fewer queues than streams.

use super::*;
use crate::cuda::event::Event;

#[test]
fn copy_engines_may_be_held_up_by_what_is_behind_a_call() {
    let doubles = [0, 1].map(|_| with_queues(MOST, Order::Eager));
    // An engine may have as few as that.
    doubles.iter().for_each(|double| double.share_queues(MOST, 1));
    let errors = ranks_on(&doubles, "shm", |rank| {
        let gate = rank.gate();
        let values = given(rank.rank, 0, 70);
        let memory = rank.memory(&values);
        rank.fill(memory, &values);
        let call = Call { timeout: Some(Duration::from_millis(200)), ..rank.call() };
        // It may have ended on the other rank before it begins here.
        let work = rank.start(&request(Kind::Allreduce, memory, memory, 70, 0), &call);
        rank.fill(memory, &values);
        gate.release();
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let error = result.expect_err("its copies do not run");
        // Nor will they.
        rank.double.drain();
        error
    });
    assert!(errors.iter().all(|error| error.status() == Status::Timeout), "{errors:?}");
}

#[test]
fn calls_may_be_ahead_of_their_stream() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let complaints = ahead_of_streams(&[with_queues(MOST, order), with_queues(MOST, order)], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn ranks_of_one_process_may_share_queues() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(MOST, order);
        let complaints = ahead_of_streams(&[double.clone(), double], "shm", many);
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

/// Where one's stream is given something behind its courier, that would hold up the other's.
#[test]
fn ranks_of_one_process_wait_where_their_device_has_few_queues() {
    for queues in [1, 2, 8] {
        for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
            let double = with_queues(queues, order);
            let met = Barrier::new(2);
            let complaints = ranks_on(&[double.clone(), double], "shm", |rank| {
                rank.copy_by_kernels();
                // From here on each knows where the other is.
                let memory = rank.memory(&[1]);
                rank.run(&request(Kind::Allreduce, memory, memory, 1, 0), &rank.call()).expect("a sum");
                met.wait();
                let works = many(rank);
                assert!(works.iter().all(|work| work.test().is_some()), "the thread has waited for each");
                met.wait();
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{queues}, {order:?}");
        }
    }
}

#[test]
fn one_queue_is_enough_for_couriers() {
    for queues in [1, 8, MOST - 1] {
        for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
            for relays in [false, true] {
                let doubles = [with_queues(queues, order), with_queues(queues, order)];
                let complaints = ahead_of_streams(&doubles, "shm", |rank| {
                    if relays {
                        rank.relay();
                    }
                    let before = rank.double.values();
                    let works = many(rank);
                    assert_eq!(rank.double.values(), before, "no stream waits for a word of the host");
                    works
                });
                assert_eq!(complaints, Vec::<String>::new(), "{queues}, {order:?}, relays: {relays}");
            }
        }
    }
}

#[test]
fn a_call_returns_ahead_of_its_stream_however_few_queues_there_are() {
    let doubles = [with_queues(8, Order::RoundRobin), with_queues(8, Order::RoundRobin)];
    let complaints = ranks_on(&doubles, "shm", |rank| {
        rank.copy_by_kernels();
        let gate = rank.gate();
        let works: Vec<_> = COLLECTIVES
            .map(|kind| exercise(rank, kind, 700, false, 3).expect("it starts"))
            .into_iter()
            .collect();
        assert!(works.iter().any(|work| work.test().is_none()), "their stream has not come to them");
        gate.release();
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn messages_that_answer_each_other_need_no_queues() {
    const LONG: usize = 100_000;
    let doubles = [with_queues(8, Order::RoundRobin), with_queues(8, Order::RoundRobin)];
    let complaints = ranks_on(&doubles, "shm", |rank| {
        rank.copy_by_kernels();
        rank.context.cuda().pretend(&rank.devices, 4 * LONG);
        let peer = 1 - rank.rank;
        let values = given(rank.rank, 0, LONG);
        let (out, into) = (rank.memory(&values), rank.memory(&values));
        rank.fill(out, &values);
        let call = Call { timeout: Some(Duration::from_secs(20)), ..rank.call() };
        // Both send, and neither has called to receive.
        let start = |kind, from, to| {
            // SAFETY: the double trusts no address.
            unsafe { rank.context.start(&request(kind, from, to, LONG as u64, peer), &call) }
                .expect("it starts")
        };
        for work in [start(Kind::Send, out, 0), start(Kind::Receive, 0, into)] {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        rank.expect(into, &given(peer, 0, LONG), "received");
        rank.fill(out, &[-2; 100]);
        assert_eq!(rank.double.values(), 0);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn works_of_one_thread_need_no_order_among_communicators() {
    let doubles = [with_queues(8, Order::RoundRobin), with_queues(8, Order::RoundRobin)];
    let complaints = ranks_on(&doubles, "shm", |rank| {
        rank.copy_by_kernels();
        let other = rank.context.duplicate().expect("a second communicator");
        other.cuda().pretend(&rank.devices, PIECE);
        let call = Call { timeout: Some(Duration::from_secs(20)), ..rank.call() };
        let mut all = [(&rank.context, rank.memory(&[1])), (&other, rank.memory(&[1]))];
        if rank.rank == 1 {
            all.reverse();
        }
        let works = all.map(|(context, memory)| {
            rank.fill(memory, &[7]);
            let sum = request(Kind::Allreduce, memory, memory, 1, 0);
            // SAFETY: the double trusts no address.
            unsafe { context.start(&sum, &call) }.expect("it starts")
        });
        for (work, (_, memory)) in works.into_iter().zip(all) {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            rank.expect(memory, &[14], "a sum");
        }
        assert_eq!(rank.double.values(), 0);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn work_on_host_memory_blocks_a_stream_however_few_queues_there_are() {
    let doubles = [with_queues(8, Order::RoundRobin), with_queues(8, Order::RoundRobin)];
    let met = Barrier::new(2);
    ranks_on(&doubles, "shm", |rank| {
        let mut values = given(rank.rank, 0, 70);
        let memory = values.as_mut_ptr();
        let sum =
            Request { input: memory.cast(), output: memory.cast(), ..request(Kind::Allreduce, 0, 0, 70, 0) };
        if rank.rank == 1 {
            met.wait();
        }
        // SAFETY: the memory outlives the work.
        let work = unsafe { rank.context.start(&sum, &Call::default()) }.expect("it starts");
        let work = work.on_devices(&rank.devices);
        // SAFETY: the stream lives.
        unsafe { work.block_stream(rank.stream) }.expect("the stream waits");
        if rank.rank == 0 {
            assert!(work.test().is_none(), "the other rank has not called");
            assert!(!rank.stream().query().expect("a stream"));
            met.wait();
        }
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(rank.drain(), Vec::<String>::new());
        assert_eq!(values, expected(Kind::Allreduce, 70, 2, rank.rank, 0, 0));
    });
}

#[test]
fn streams_of_two_contexts_may_wait_for_each_other() {
    for order in [Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let double = with_queues(MOST, order);
        let others = [double.stream(0), double.stream(0)];
        let complaints = ahead_of_streams(&[double.clone(), double.clone()], "shm", |rank| {
            let second = rank.context.duplicate().expect("a second context");
            second.cuda().pretend(&rank.devices, PIECE);
            let other = Rank {
                context: second,
                double: rank.double.clone(),
                devices: rank.devices.clone(),
                stream: others[rank.rank as usize],
                rank: rank.rank,
                completes: AtomicBool::new(false),
            };
            other.copy_by_kernels();
            let mut works = Vec::new();
            let follow = |one: &Rank, before: &Rank| {
                let event = Event::new(&rank.devices, 0).unwrap();
                event.record(&before.stream()).unwrap();
                one.stream().wait(&event).unwrap();
            };
            for round in 0..6 {
                works.push(exercise(rank, Kind::Allreduce, 70, false, round).expect("it starts"));
                follow(&other, rank);
                works.push(exercise(&other, Kind::Allgather, 70, false, round).expect("it starts"));
                works.extend(exchange(&other, &other.context, round));
                follow(rank, &other);
            }
            works
        });
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

/// The first copy of a message that no stream waits for comes into a queue, and behind it another stream's
/// wait for the message: what is copied next may not come behind that.
#[test]
fn a_call_without_a_stream_is_held_up_by_nothing_that_came_between_its_copies() {
    const LONG: usize = 8 * PIECE / 4;
    // If there is something in both queues, streams are dealt them by turns: one of the two has that of the
    // side stream.
    for other in [2, 3] {
        let doubles = [with_queues(2, Order::RoundRobin), with_queues(2, Order::RoundRobin)];
        let met = Barrier::new(2);
        let complaints = ranks_on(&doubles, "shm", |rank| {
            rank.copy_by_kernels();
            let values = given(0, 0, LONG);
            let memory = rank.memory(&values);
            let call = Call { timeout: Some(Duration::from_secs(20)), ..Call::default() };
            if rank.rank == 0 {
                rank.fill(memory, &values);
                rank.stream().synchronize(Deadline::after(PATIENCE)).expect("it is filled");
                met.wait();
                rank.run(&request(Kind::Send, memory, 0, LONG as u64, 1), &call).expect("it is sent");
                return rank.drain();
            }
            let streams = [(); 4].map(|()| rank.double.stream(0));
            let wait = |stream| {
                let word = rank.devices.word(0).expect("a word");
                // SAFETY: it lives as long as the double.
                let stream = unsafe { Stream::borrow(&rank.devices, 0, stream) }.expect("a stream");
                stream.wait_word(&word).expect("it waits");
                word
            };
            let work = rank.start(&request(Kind::Receive, 0, memory, LONG as u64, 0), &call);
            let work = work.expect("it starts");
            let until = Instant::now() + PATIENCE;
            let wait_for = |there: &dyn Fn() -> bool, what: &str| {
                while !there() {
                    assert!(Instant::now() < until, "{what}");
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            wait_for(&|| rank.double.is_idle(), "the call comes behind nothing");
            let gates = [streams[0], streams[1]].map(wait);
            met.wait();
            wait_for(&|| rank.double.left() > gates.len(), "the first piece comes");
            let behind = wait(streams[other]);
            gates.iter().for_each(Word::release);
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            behind.release();
            assert_eq!(rank.double.peek(memory, 4 * LONG), bytes(&values));
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{other}");
    }
}
