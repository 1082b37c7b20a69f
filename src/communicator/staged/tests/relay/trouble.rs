//! Relayed calls that fail: what the driver refuses, deadlines, and ranks that do not follow.

use super::*;

both_ways! {
    a_driver_call_that_fails_is_named_on_all_ranks_or_does_no_harm,
    a_call_that_fails_midway_gives_the_memory_back,
    a_deadline_lets_the_stream_go_on,
    a_rank_that_leaves_is_named,
    calls_that_differ_are_told_before_anything_is_written,
    a_group_relays_after_another_has_given_up,
}

fn a_driver_call_that_fails_is_named_on_all_ranks_or_does_no_harm(way: &str) {
    for failing in 0.. {
        let met = Barrier::new(2);
        let outcomes = ranks(2, way, Order::RoundRobin, |rank| {
            rank.relay();
            // Everybody is there before anything goes wrong.
            rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default()).expect("a barrier");
            met.wait();
            if rank.rank == 0 {
                rank.double.fail_call(failing);
            }
            // Until the lanes are there or never will be, and once more.
            let mut last = false;
            let result = loop {
                let result = exercise(rank, Kind::Allreduce, 201, false, 0)
                    .and_then(|work| work.wait(Deadline::after(PATIENCE)));
                if last || result.is_err() {
                    break result;
                }
                last = rank.group().relay().relays().is_some();
            };
            if result.is_err() {
                assert!(rank.context.failure().is_some(), "the group has failed");
            }
            let fails = rank.double.is_to_fail();
            let complaints = rank.drain();
            let complaints = if result.is_err() { grave(complaints) } else { complaints };
            (result.err(), complaints, fails)
        });
        let errors: Vec<Error> = outcomes.iter().filter_map(|(error, ..)| error.clone()).collect();
        let never = outcomes.iter().any(|(.., fails)| *fails);
        for (_, complaints, _) in outcomes {
            assert_eq!(complaints, Vec::<String>::new(), "call {failing}: {errors:?}");
        }
        if never {
            assert!(failing > 50 && errors.is_empty(), "only {failing} calls");
            return;
        }
        for error in &errors {
            assert!(error.text().contains(" failed: CUDA_ERROR_INJECTED: "), "call {failing}: {error}");
            assert_eq!(error.status(), Status::Cuda);
        }
    }
}

fn a_call_that_fails_midway_gives_the_memory_back(way: &str) {
    for (order, first, ordered) in [
        (Order::RoundRobin, 0, false),
        (Order::Backward, 1, false),
        (Order::First(0), 2, false),
        (Order::RoundRobin, 0, true),
    ] {
        for failing in (first..).step_by(3) {
            let met = Barrier::new(2);
            let fails = relaying(2, way, order, |rank| {
                met.wait();
                let values = given(rank.rank, 0, 700);
                let (input, output) = (rank.memory(&values), rank.memory(&values));
                rank.fill(input, &values);
                if rank.rank == 0 {
                    rank.double.fail_call(failing);
                }
                let sum = request(Kind::Allreduce, input, output, 700, 0);
                let call = if ordered { rank.call() } else { Call::default() };
                let result = rank.start(&sum, &call);
                let result = result.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                let fails = rank.double.is_to_fail();
                if result.is_err() {
                    let marked = vec![-7; 700];
                    rank.fill(output, &marked);
                    assert_eq!(grave(rank.drain()), Vec::<String>::new());
                    assert!(
                        rank.double.peek(output, 2800) == bytes(&marked),
                        "call {failing}: written after its end"
                    );
                }
                fails
            });
            if fails[0] {
                assert!(failing > if ordered { 6 } else { 100 }, "only {failing} calls");
                break;
            }
        }
    }
}

/// What a call ended with that rank 1 does not take part in as it should: the caller has its memory back.
fn given_up(way: &str, kind: Kind, timeout: Duration, order: Order, other: impl Fn(&Rank) + Sync) -> Error {
    let outcomes = relaying(2, way, order, |rank| {
        if rank.rank == 1 {
            other(rank);
            return None;
        }
        let (reads, writes) = lengths(kind, 700, 2, true);
        let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
        rank.fill(input, &given(0, 0, reads));
        let call = Call { timeout: Some(timeout), ..rank.call() };
        let work = rank.start(&request(kind, input, output, 700, 0), &call).expect("it starts");
        let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not follow");
        let marked = vec![-7; writes];
        rank.fill(output, &marked);
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        assert_eq!(rank.double.peek(output, writes * 4), bytes(&marked), "written after the end");
        Some(error)
    });
    outcomes.into_iter().flatten().next().expect("rank 0 answers")
}

fn a_deadline_lets_the_stream_go_on(way: &str) {
    for (kind, order) in [(Kind::Allreduce, Order::RoundRobin), (Kind::Alltoall, Order::Eager)] {
        let give_up = |timeout| {
            given_up(way, kind, timeout, order, |rank| {
                // It calls, but its stream does not come to it.
                let gate = rank.gate();
                let (reads, writes) = lengths(kind, 700, 2, false);
                let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
                // If rank 0 has not given up before.
                let work = rank.start(&request(kind, input, output, 700, 0), &rank.call());
                let began = work.is_ok();
                let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                let error = result.expect_err("rank 0 has given up");
                assert!(!began || error.text().contains("; here, "), "where this rank stands: {error}");
                gate.release();
                assert_eq!(grave(rank.drain()), Vec::<String>::new());
            })
        };
        // A rank that has not come itself to where it waits for the other tells of that, and has longer then.
        let timeouts =
            (0..).map(|times| Duration::from_millis(100 << times)).take_while(|timeout| *timeout < PATIENCE);
        let mut errors = timeouts.map(give_up);
        let error = errors.find(|error| !error.text().contains("not done after")).expect("in time");
        assert_eq!(error.status(), Status::Timeout);
        for part in ["nothing from rank 1", "; here, "] {
            assert!(error.text().contains(part), "{error}");
        }
    }
}

fn a_rank_that_leaves_is_named(way: &str) {
    for order in [Order::Eager, Order::RoundRobin] {
        let error = given_up(way, Kind::Allreduce, PATIENCE, order, |_| ());
        assert_eq!(error.status(), Status::PeerFailed);
        assert!(error.text().contains("rank 1"), "{error}");
    }
}

fn calls_that_differ_are_told_before_anything_is_written(way: &str) {
    let (sum, bits) = (Kind::Allreduce, Kind::Reduce);
    for (theirs, count) in [(sum, 699), (bits, 700), (sum, 3)] {
        let error = given_up(way, sum, PATIENCE, Order::RoundRobin, |rank| {
            let memory = rank.memory(&[0; 700]);
            let work = rank.start(&request(theirs, memory, memory, count, 0), &rank.call());
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect_err("they differ");
            assert_eq!(rank.double.peek(memory, 4), [0xdb; 4], "written");
            assert_eq!(grave(rank.drain()), Vec::<String>::new());
        });
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.text().contains("allreduce(700 × int32, sum)"), "{error}");
    }
}

/// Rank 1 calls something else, and rank 2 calls when rank 0 has given its call up: what it says then is of
/// nobody.
#[test]
fn ranks_that_meet_in_vain_leave_no_messages_to_what_they_met_in() {
    let (met, given_up) = (Barrier::new(3), Barrier::new(2));
    let left = relaying(3, "tcp", Order::RoundRobin, |rank| {
        met.wait();
        let (memory, endpoint) = (rank.memory(&[0; 700]), rank.group().endpoint());
        if rank.rank == 2 {
            given_up.wait();
        }
        let start = Instant::now();
        while rank.rank == 0 && endpoint.messages().unexpected_bytes() == 0 && start.elapsed() < PATIENCE {
            endpoint.progress(0, Through::Messages);
        }
        let count = if rank.rank == 1 { 699 } else { 700 };
        let work = rank.start(&request(Kind::Allreduce, memory, memory, count, 0), &rank.call());
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let operations = endpoint.messages().operations();
        if rank.rank == 0 {
            given_up.wait();
        }
        let status = result.err().map(|error| error.status());
        (status, operations, grave(rank.drain()))
    });
    assert_eq!(left, vec![(Some(Status::Mismatch), 0, vec![]); 3], "how it ended, and what is under way");
}

/// How a broadcast ends whose root has so much time, and whose movers do nothing.
fn held_up(timeout: Duration) -> Error {
    let told = Barrier::new(2);
    let mut errors = relaying(2, "tcp", Order::RoundRobin, |rank| {
        let is_root = rank.rank == 0;
        // No more pieces than lanes: the root needs nothing of rank 1.
        let memory = rank.memory(&[0; 200]);
        rank.group().relay().hold_movers(if is_root { Held::All } else { Held::None });
        let broadcast = request(Kind::Broadcast, if is_root { memory } else { 0 }, memory, 200, 0);
        let timeout = if is_root { timeout } else { PATIENCE };
        let work = rank.start(&broadcast, &Call { timeout: Some(timeout), ..rank.call() });
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        told.wait();
        rank.group().relay().hold_movers(Held::None);
        let error = result.expect_err("nothing moves");
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        error
    });
    errors.swap_remove(0)
}

#[test]
fn a_call_that_waits_for_its_parcels_alone_names_whom_they_are_for() {
    // A root that has not come so far tells of that, and has longer then; so does one whose attendant has had no
    // processor for a second, which is taken for a driver that does not answer.
    let early = ["not done after", "have not all told what they call", "the driver does not answer"];
    let timeouts =
        (0..).map(|times| Duration::from_millis(300 << times)).take_while(|timeout| *timeout < PATIENCE);
    let mut errors = timeouts.map(held_up);
    let error = errors.find(|error| !early.iter().any(|part| error.text().contains(part))).expect("in time");
    assert_eq!(error.status(), Status::Timeout, "{error}");
    for part in ["nothing from rank 1 ", "parcels to rank 1 are not written"] {
        assert!(error.text().contains(part), "{error}");
    }
}

/// Waits for a call that [`Rank::begin_alone`] has begun.
fn fails(work: Work) {
    work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not follow");
}

/// Lanes stay pinned while a device may use them, for a call that was given up; what moves pieces between the
/// ranks does not stay.
#[test]
fn connections_end_with_their_group_whatever_was_given_up() {
    let met = Barrier::new(2);
    let movers = relaying(2, "tcp", Order::RoundRobin, |rank| {
        rank.begin_alone().into_iter().for_each(fails);
        // Nobody leaves before.
        met.wait();
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        rank.group().relay().movers().expect("movers")
    });
    let start = Instant::now();
    while movers.iter().any(|movers| movers.strong_count() > 0) {
        assert!(start.elapsed() < PATIENCE, "movers are left");
        std::thread::yield_now();
    }
}

impl Rank {
    /// The same rank of another job, on the same devices and the same stream, which relays.
    fn beside(&self, store: &Arc<dyn Store>, way: &str) -> Rank {
        let beside = self.within(join(self.rank, 2, Rendezvous::Store(store.clone()), way));
        beside.warm_up();
        beside
    }
}

/// What a call ran in that was given up is kept until lanes are made or a call is relayed, which there is only
/// if lanes are made without that.
fn a_group_relays_after_another_has_given_up(way: &str) {
    let stores = [(); 2].map(|()| Arc::new(HashStore::new()) as Arc<dyn Store>);
    let met = Barrier::new(2);
    let complaints = ranks(2, way, Order::RoundRobin, |rank| {
        let first = rank.beside(&stores[0], way);
        first.begin_alone().into_iter().for_each(fails);
        // Nobody leaves before.
        met.wait();
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        drop(first);
        let second = rank.beside(&stores[1], way);
        let before = second.relayed();
        second.first_call();
        assert!(second.relayed() > before);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// Though no group has had room for its lanes since, and so none has relayed a call.
#[test]
fn groups_relay_again_after_calls_of_as_many_as_can_have_been_given_up() {
    let met = Barrier::new(2);
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        // On streams of their own, so that all calls are under way at once.
        let child = || Rank { stream: rank.double.stream(0), ..rank.child() };
        let all: Vec<Rank> = std::iter::repeat_with(child).take_while(Rank::has_lanes).collect();
        assert!(!all.is_empty());
        let begun: Vec<Work> = all.iter().filter_map(Rank::begin_alone).collect();
        begun.into_iter().for_each(fails);
        // Nobody leaves before.
        met.wait();
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        drop(all);
        let start = Instant::now();
        while !rank.child().has_lanes() {
            assert!(start.elapsed() < PATIENCE, "there is no room");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// What lets the others use this rank's lanes may be late, but has gone when a call ends that needs it: the
/// second of four pieces each, the fifth of one.
#[test]
fn a_call_ends_when_the_others_can_end_it_whatever_becomes_of_this_rank() {
    for (bytes, calls) in [(200, 1), (16, 4)] {
        relaying(2, "tcp", Order::RoundRobin, |rank| {
            let is_root = rank.rank == 0;
            let memory = rank.memory(&vec![7; bytes as usize]);
            let broadcast = || request(Kind::Broadcast, if is_root { memory } else { 0 }, memory, bytes, 0);
            if is_root {
                let start = Instant::now();
                while !rank.group().relay().has_told_all() {
                    assert!(start.elapsed() < PATIENCE, "what was called before is not told of");
                    std::thread::yield_now();
                }
                rank.group().relay().hold_movers(Held::Marks);
            }
            let start = || rank.start(&broadcast(), &rank.call()).expect("it starts");
            for _ in 0..calls {
                start().wait(Deadline::after(PATIENCE)).expect("only later calls need the marks");
            }
            let work = start();
            if is_root {
                let early = work.wait(Deadline::after(Duration::from_millis(200)));
                assert_eq!(early.expect_err("rank 1 has no lanes for it yet").status(), Status::Timeout);
                rank.group().relay().hold_movers(Held::None);
            }
            work.wait(Deadline::after(PATIENCE)).expect("it ends");
            assert_eq!(grave(rank.drain()), Vec::<String>::new());
        });
    }
}
