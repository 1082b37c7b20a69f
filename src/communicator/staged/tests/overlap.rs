//! What goes on beside a call that has not ended, and what waits for nobody.

use std::sync::Mutex;

use super::*;

const COUNT: usize = 70;

/// Whether the device comes to have `values` there.
fn comes(rank: &Rank, address: u64, values: &[i32]) -> bool {
    let (due, until) = (bytes(values), Instant::now() + PATIENCE);
    while rank.double.peek(address, due.len()) != due && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(100));
    }
    rank.double.peek(address, due.len()) == due
}

#[test]
fn the_stream_of_a_short_broadcasts_root_waits_for_no_other_rank() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let went_on = Barrier::new(2);
        let complaints = ranks(2, "shm", order, |rank| {
            rank.copy_by_kernels();
            // Of one piece; to another place, and in place.
            let values = given(0, 1, 60);
            let [one, other, marker] = [(); 3].map(|()| rank.memory(&values));
            if rank.rank == 0 {
                rank.fill(one, &values);
            }
            let from = |address| if rank.rank == 0 { address } else { 0 };
            let count = values.len() as u64;
            let calls = [
                request(Kind::Broadcast, from(one), other, count, 0),
                request(Kind::Broadcast, from(one), one, count, 0),
            ];
            if rank.rank == 1 {
                went_on.wait();
            }
            let works = calls.each_ref().map(|call| rank.start(call, &rank.call()).expect("it starts"));
            if rank.rank == 0 {
                rank.fill(marker, &values);
                assert!(comes(rank, marker, &values), "the stream waits");
                assert_eq!(rank.double.peek(other, 4 * values.len()), bytes(&values));
                went_on.wait();
            }
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            rank.expect(other, &values, "the first");
            rank.expect(one, &values, "the second");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn a_call_whose_stream_is_late_holds_up_none_behind_it() {
    for order in [Order::Eager, Order::RoundRobin] {
        let complaints = ranks(2, "shm", order, |rank| {
            rank.copy_by_kernels();
            let late = [given(0, 1, COUNT), given(0, 2, COUNT)];
            let [first, second] = [(); 2].map(|()| rank.memory(&late[0]));
            let broadcast = |address, from| request(Kind::Broadcast, from, address, COUNT as u64, 0);
            if rank.rank == 0 {
                for (memory, values) in [first, second].into_iter().zip(&late) {
                    rank.fill(memory, values);
                    let work = rank.start(&broadcast(memory, memory), &rank.call()).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                return rank.drain();
            }
            let other = rank.double.stream(0);
            let gate = rank.gate();
            let waits = rank.start(&broadcast(first, 0), &rank.call()).expect("it starts");
            let call = Call { stream: Some(other), ..Call::default() };
            let goes = rank.start(&broadcast(second, 0), &call).expect("it starts");
            goes.wait(Deadline::after(PATIENCE)).expect("it ends well");
            assert_eq!(rank.double.peek(second, 4 * COUNT), bytes(&late[1]));
            assert!(waits.test().is_none(), "its stream has not come");
            gate.release();
            waits.wait(Deadline::after(PATIENCE)).expect("it ends well");
            rank.expect(first, &late[0], "the first");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn what_is_only_sent_is_loaded_when_its_stream_comes_whoever_has_the_turn() {
    for order in [Order::Eager, Order::RoundRobin] {
        let went_on = Barrier::new(2);
        let complaints = ranks(2, "shm", order, |rank| {
            rank.copy_by_kernels();
            let [summed, sent] = [1, 2].map(|round| given(rank.rank, round, COUNT));
            let [input, output, part, marker] = [(); 4].map(|()| rank.memory(&summed));
            let all = rank.memory(&[0; 2 * COUNT]);
            let other = rank.double.stream(0);
            if rank.rank == 1 {
                went_on.wait();
            }
            rank.fill(input, &summed);
            let sum = rank.start(&request(Kind::Allreduce, input, output, COUNT as u64, 0), &rank.call());
            rank.double.fill(other, 0, part, &bytes(&sent));
            let to = if rank.rank == 1 { all } else { 0 };
            let call = Call { stream: Some(other), ..Call::default() };
            let gather = rank.start(&request(Kind::Gather, part, to, COUNT as u64, 1), &call);
            if rank.rank == 0 {
                rank.double.fill(other, 0, part, &bytes(&[-2; COUNT]));
                rank.double.fill(other, 0, marker, &bytes(&sent));
                assert!(comes(rank, marker, &sent), "the stream waits for the sum");
                went_on.wait();
            }
            for work in [sum, gather] {
                work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            rank.expect(output, &expected(Kind::Allreduce, COUNT, 2, rank.rank, 0, 1), "the sum");
            if rank.rank == 1 {
                let due = bytes(&expected(Kind::Gather, COUNT, 2, 1, 1, 2));
                rank.double.expect(other, 0, all, &due, "what was gathered");
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn a_broadcast_that_is_given_up_before_its_stream_comes_is_not_written_at_its_root() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        if rank.rank == 1 {
            return rank.drain();
        }
        let values = given(0, 1, COUNT);
        let [input, output] = [(); 2].map(|()| rank.memory(&values));
        let gate = rank.gate();
        rank.fill(input, &values);
        let before = rank.double.peek(output, 4 * COUNT);
        let call = Call { timeout: Some(Duration::from_millis(50)), ..rank.call() };
        let broadcast = request(Kind::Broadcast, input, output, COUNT as u64, 0);
        let work = rank.start(&broadcast, &call).expect("it starts");
        work.wait(Deadline::after(PATIENCE)).expect_err("the stream does not come");
        gate.release();
        let complaints = rank.drain();
        assert_eq!(rank.double.peek(output, 4 * COUNT), before, "its memory is the caller's again");
        complaints
    });
    assert_eq!(grave(complaints.concat()), Vec::<String>::new());
}

/// Whether the second of two calls finds what the first has stored, however they are started.
fn chain(order: Order, start: impl Fn(&Rank, &[Request; 2]) -> Vec<Work> + Sync) {
    let complaints = ranks(2, "shm", order, |rank| {
        rank.copy_by_kernels();
        let values = given(rank.rank, 1, COUNT);
        let [a, b, c] = [(); 3].map(|()| rank.memory(&values));
        rank.fill(a, &values);
        let calls = [(a, b), (b, c)].map(|(from, to)| request(Kind::Allreduce, from, to, COUNT as u64, 0));
        for work in start(rank, &calls) {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        let sum = expected(Kind::Allreduce, COUNT, 2, rank.rank, 0, 1);
        rank.expect(b, &sum, "the first");
        rank.expect(c, &sum.iter().map(|one| 2 * one).collect::<Vec<_>>(), "the second");
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
}

#[test]
fn calls_keep_the_order_of_their_list_and_of_their_calls() {
    for order in Order::all(2) {
        chain(order, |rank, calls| {
            calls.iter().map(|call| rank.start(call, &rank.call()).expect("it starts")).collect()
        });
        chain(order, |rank, calls| {
            let call = rank.call();
            // SAFETY: the double trusts no address, and keeps memory until it is dropped.
            let works = unsafe {
                start_together(&[(&rank.context, &calls[0], &call), (&rank.context, &calls[1], &call)])
            };
            works.expect("they start")
        });
        chain(order, |rank, calls| {
            // What they are given was written on a stream that such calls do not come after.
            rank.stream().synchronize(Deadline::after(PATIENCE)).expect("it is written");
            calls.iter().map(|call| rank.start(call, &Call::default()).expect("it starts")).collect()
        });
    }
}

#[test]
fn what_joins_a_courier_late_finds_what_was_stored_before() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let complaints = ranks(2, "shm", order, |rank| {
            rank.copy_by_kernels();
            let values = given(0, 1, 60);
            let [b, x, c] = [(); 3].map(|()| rank.memory(&values));
            let other = rank.double.stream(0);
            let from = |address| if rank.rank == 0 { address } else { 0 };
            rank.fill(b, &if rank.rank == 0 { values.clone() } else { vec![-7; 60] });
            rank.double.fill(other, 0, x, &bytes(&values));
            let broadcast = |address| request(Kind::Broadcast, from(address), address, 60, 0);
            let beside = Call { stream: Some(other), ..Call::default() };
            let calls = [
                (broadcast(b), rank.call()),
                (broadcast(x), beside),
                (request(Kind::Allreduce, b, c, 60, 0), rank.call()),
            ];
            let begun = calls.each_ref().map(|(request, call)| {
                // What the others have sent comes meanwhile.
                std::thread::sleep(Duration::from_millis(3));
                // SAFETY: the double trusts no address, and keeps memory until it is dropped.
                unsafe { rank.context.begin(request, call) }.expect("it begins")
            });
            for work in Pending::close_all(begun.into()) {
                work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            rank.expect(b, &values, "the broadcast");
            rank.expect(c, &values.iter().map(|one| 2 * one).collect::<Vec<_>>(), "the sum of it");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

/// The first call's stores at rank 0 wait until rank 0 has given what the others obtain from the second, on
/// another stream.
fn gives_while_stores_wait(size: u32, way: &str, order: Order) {
    // Two calls have all four lanes.
    const COUNT: usize = 100;
    let [warm, obtained, looked] = [(); 3].map(|()| Barrier::new(size as usize));
    let complaints = ranks(size, way, order, |rank| {
        rank.relay();
        rank.warm_up();
        let other = rank.double.stream(0);
        let values = [1, 0].map(|root| given(root, root, COUNT));
        let memory = values.each_ref().map(|values| rank.memory(values));
        for (stream, root) in [(rank.stream, 1), (other, 0)] {
            let (place, at) = (memory[1 - root], 1 - root);
            let old = if rank.rank == root as u32 { values[at].clone() } else { vec![-7; COUNT] };
            rank.double.fill(stream, 0, place, &bytes(&old));
        }
        // Couriers of earlier calls leave.
        let mut complaints = rank.drain();
        rank.double.hold_stores(rank.rank == 0);
        warm.wait();
        let broadcast = |address, root: u32| {
            let from = if rank.rank == root { address } else { 0 };
            request(Kind::Broadcast, from, address, COUNT as u64, root)
        };
        let beside = Call { stream: Some(other), ..Call::default() };
        let first = rank.start(&broadcast(memory[0], 1), &rank.call()).expect("it starts");
        let second = rank.start(&broadcast(memory[1], 0), &beside).expect("it starts");
        let mut works: Vec<Work> = Vec::new();
        for (kind, round) in COLLECTIVES.into_iter().zip(2..) {
            works.push(exercise(rank, kind, 300, round % 2 == 0, round).expect("it starts"));
        }
        if rank.rank > 0 {
            for work in [&first, &second] {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            assert_eq!(rank.double.peek(memory[1], 4 * COUNT), bytes(&values[1]), "of rank 0");
        }
        obtained.wait();
        if rank.rank == 0 {
            assert!(first.test().is_none(), "its stores have not ended");
            assert!(second.test().is_none(), "it ends behind that, so that lanes are told in order");
            assert_eq!(rank.double.peek(memory[0], 4 * COUNT), bytes(&[-7; COUNT]));
        }
        looked.wait();
        rank.double.hold_stores(false);
        works.extend([first, second]);
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        rank.expect(memory[0], &values[0], "the first");
        rank.double.expect(other, 0, memory[1], &bytes(&values[1]), "the second");
        complaints.extend(rank.drain());
        complaints
    });
    assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}, {way}, {order:?}");
}

#[test]
fn a_relayed_call_meets_and_gives_while_the_stores_of_the_one_before_have_not_ended() {
    for way in ["shm", "tcp"] {
        for (size, order) in [(2, Order::Eager), (2, Order::RoundRobin), (3, Order::Backward)] {
            gives_while_stores_wait(size, way, order);
        }
    }
}

/// One thread has both. One's device has no kernels and few queues, so that the thread waits for its call.
#[test]
fn what_a_thread_waits_for_finds_the_rest_of_its_list_given() {
    let doubles = [(); 2].map(|()| Double::new(2, Order::RoundRobin));
    doubles.iter().for_each(|double| double.share_queues(8, 8));
    let (lent, done) = (Mutex::new(None), Barrier::new(2));
    ranks_on(&doubles, "shm", |rank| {
        let values = given(rank.rank, 0, COUNT);
        let memory = rank.memory(&values);
        rank.fill(memory, &values);
        let sum = request(Kind::Allreduce, memory, memory, COUNT as u64, 0);
        let call = Call { timeout: Some(PATIENCE), ..rank.call() };
        let mut ended = Ok(());
        if rank.rank == 1 {
            rank.copy_by_kernels();
            *lent.lock().unwrap() = Some((rank.context.clone(), sum, call));
            done.wait();
        } else {
            done.wait();
            let (context, their_sum, theirs) = lent.lock().unwrap().take().expect("it was lent");
            // SAFETY: the double trusts no address.
            let works =
                unsafe { start_together(&[(&rank.context, &sum, &call), (&context, &their_sum, &theirs)]) };
            ended = works
                .and_then(|works| works.iter().try_for_each(|work| work.wait(Deadline::NEVER).map(drop)));
        }
        done.wait();
        ended.expect("they end well");
    });
}
