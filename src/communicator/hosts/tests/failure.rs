//! Calls that fail: what each rank is told.

use super::*;
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::error::Error;

/// By whom what crosses is combined.
const WAYS: [Carriers; 2] = [Carriers::SideStreams, Carriers::Relays];

/// What each rank's call comes to.
fn errors(carriers: Carriers, body: impl Fn(&Rank) -> Result<Completion> + Sync) -> Vec<Error> {
    let started = Instant::now();
    let errors = ranks_that_fail(carriers, |rank| {
        let error = body(rank).expect_err("this cannot go well");
        let later = rank.run(&rank.sum(1).1, &rank.call()).unwrap_err();
        assert!(later.text().contains("has failed before"), "{later}");
        assert!(rank.has_ended_all(), "messages are under way");
        error
    });
    assert!(started.elapsed() < PATIENCE / 2, "nobody waits for the deadline");
    errors
}

#[test]
fn calls_that_differ_name_both_ranks_by_their_numbers() {
    // Within a host, between hosts, and another operation altogether, which is staged.
    for (carriers, odd) in WAYS.into_iter().flat_map(|carriers| [(carriers, 1), (carriers, 2)]) {
        for other in [false, true] {
            let found = errors(carriers, |rank| {
                let mine = rank.context.rank() / odd % 2 == 1;
                let (_, mut request) = rank.sum(if mine && !other { 128 } else { 64 });
                if mine && other {
                    request.kind = Kind::Alltoall;
                    request.counts = Counts::Uniform(4);
                    let apart = rank.double.memory(rank.device, 256);
                    request.output = pointer(apart);
                }
                rank.run(&request, &rank.call())
            });
            for error in found {
                assert_eq!(error.status(), Status::Mismatch, "{error}");
                let text = error.text();
                let theirs = if other { "called alltoall(4 ×" } else { "called allreduce(128 ×" };
                // The first, but for those that have made the lanes.
                let first = ["call #0 of 'default' differs", "of 'default' differs"];
                let differs = first[usize::from(carriers == Carriers::Relays)];
                for part in [differs, "called allreduce(64 ×", theirs] {
                    assert!(text.contains(part), "{carriers:?}, odd {odd}, other {other}: {error}");
                }
            }
        }
    }
}

/// As between the ranks of one group: host 1 calls something else, and host 2 calls when host 0 has given its
/// call up.
#[test]
fn hosts_that_meet_in_vain_leave_no_messages_to_what_they_met_in() {
    let given_up = Barrier::new(4);
    let (left, _) = ranks_of(3, 2, Order::RoundRobin, 1, Carriers::Relays, |rank| {
        let host = rank.context.rank() / 2;
        let (_, request) = rank.sum(if host == 1 { 128 } else { 64 });
        if host == 2 {
            given_up.wait();
        }
        let start = Instant::now();
        // Or the other rank of this host was faster, and has failed.
        while host == 0 && !rank.has_unexpected() && rank.context.failure().is_none() {
            assert!(start.elapsed() < PATIENCE, "nothing from host 1");
            std::thread::yield_now();
        }
        let result = rank.run(&request, &rank.call());
        let ended = rank.has_ended_all();
        if host == 0 {
            given_up.wait();
        }
        (result.err().map(|error| error.status()), ended)
    });
    assert_eq!(left, [(Some(Status::Mismatch), true); 6], "how it ended, and whether nothing is under way");
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    for (carriers, absent) in WAYS.into_iter().flat_map(|carriers| [(carriers, 1), (carriers, 2)]) {
        let found = ranks_that_fail(carriers, |rank| {
            if rank.context.rank() == absent {
                let until = Instant::now() + PATIENCE;
                while rank.context.failure().is_none() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return rank.context.failure().expect("the news");
            }
            let (_, request) = rank.sum(1000);
            let timeout = Some(Duration::from_millis(500));
            rank.run(&request, &Call { timeout, ..rank.call() }).expect_err("one is missing")
        });
        for error in found {
            assert_eq!(error.status(), Status::Timeout, "{error}");
            // Also those that wait for a rank that waits for it, and may have called long before that one.
            let told = [
                format!("nothing from rank {absent} ("),
                format!("still running, waiting for rank {absent}"),
            ];
            assert!(told.iter().any(|text| error.text().contains(text)), "{error}");
            assert!(error.text().contains(&format!("Look at rank {absent}")), "{error}");
        }
    }
}

#[test]
fn an_abort_ends_all_of_it() {
    for carriers in WAYS {
        let started = Instant::now();
        ranks_that_fail(carriers, |rank| {
            if rank.context.rank() == 3 {
                std::thread::sleep(Duration::from_millis(50));
                rank.context.abort();
                return;
            }
            let (_, request) = rank.sum(1000);
            let error = rank.run(&request, &rank.call()).expect_err("aborted");
            assert_eq!(error.status(), Status::Aborted, "{error}");
            assert!(error.text().contains("rank 3"), "{error}");
        });
        assert!(started.elapsed() < PATIENCE / 2);
    }
}

/// The memory of a call is its kernels' until they have left, those behind the hosts' part, too; or until
/// that takes long.
#[test]
fn a_call_whose_hosts_have_failed_ends_when_its_stream_is_through_with_it() {
    for (carriers, comes) in WAYS.into_iter().flat_map(|carriers| [(carriers, true), (carriers, false)]) {
        let given = Barrier::new(4);
        ranks_that_fail(carriers, |rank| {
            if rank.context.rank() == 3 {
                given.wait();
                return rank.context.abort();
            }
            let (_, request) = rank.sum(1000);
            // SAFETY: the stream lives as long as the double.
            let stream =
                unsafe { Stream::borrow(&rank.devices, rank.device, rank.stream) }.expect("a stream");
            let gate = rank.devices.word(rank.device).expect("a word");
            stream.wait_word(&gate).expect("it waits");
            let work = rank.start(&request, &rank.call()).expect("it starts");
            given.wait();
            let host = work.host().expect("the hosts have a part in it");
            host.wait(Deadline::after(PATIENCE)).expect("it ends").expect_err("rank 3 aborts");
            assert!(work.peek().is_none(), "the stream has not come to it");
            if comes {
                gate.release();
            }
            let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 3 aborts");
            assert_eq!(error.status(), Status::Aborted, "{error}");
            gate.release();
        });
    }
}

/// As two ranks of the other host do that others wait for: they wait for something else, each for the other,
/// until the group has failed. Whoever asks them has no answer that tells why, for a while.
fn wait_for_each_other(rank: &Rank) -> Error {
    let (mut word, other) = ([0u8; 8], 5 - rank.context.rank());
    let (kind, dtype, operator) = (Kind::Receive, DataType::U8, Operator::Sum);
    let receive = What { kind, count: 8, dtype, operator, root: other };
    let call = Call { tag: Some(7), ..Call::default() };
    rank.run(&receive.request(std::ptr::null(), word.as_mut_ptr()), &call).expect_err("nobody sends");
    rank.context.failure().expect("that has ended it")
}

/// What it goes on with is nobody's result. That is known then, and why: another call does not hide it.
#[test]
fn a_stream_that_goes_on_behind_a_late_call_finds_that_its_group_has_failed_and_why() {
    for (carriers, kind) in [
        (Carriers::SideStreams, Kind::Allreduce),
        (Carriers::Couriers, Kind::Allreduce),
        (Carriers::Relays, Kind::Allreduce),
        (Carriers::SideStreams, Kind::Alltoall),
        (Carriers::Couriers, Kind::Alltoall),
    ] {
        let failures = ranks_that_fail(carriers, |rank| {
            if rank.context.rank() >= 2 {
                return wait_for_each_other(rank);
            }
            let (_, mut request) = rank.sum(1000);
            if kind == Kind::Alltoall {
                let apart = pointer(rank.double.memory(rank.device, 256));
                request = Request { kind, counts: Counts::Uniform(8), output: apart, ..request };
            }
            // SAFETY: the stream lives as long as the double.
            let stream =
                unsafe { Stream::borrow(&rank.devices, rank.device, rank.stream) }.expect("a stream");
            let event = Event::new(&rank.devices, rank.device).expect("an event");
            let call = Call { timeout: Some(Duration::from_millis(500)), ..rank.call() };
            // The other rank of this host may have failed before.
            // SAFETY: the double trusts no address.
            let launched = unsafe { rank.context.launch(&request, &call) };
            event.record(&stream).expect("it is recorded");
            let start = Instant::now();
            while !event.query().expect("it can be asked") {
                assert!(start.elapsed() < PATIENCE / 2, "the stream hangs");
                std::thread::sleep(Duration::from_millis(1));
            }
            let failure = rank.context.failure();
            let failure =
                failure.unwrap_or_else(|| panic!("{carriers:?}, {kind:?}: {launched:?}, no failure"));
            let (_, request) = rank.sum(1000);
            // SAFETY: as above.
            let next = unsafe { rank.context.launch(&request, &rank.call()) }.expect_err("it is refused");
            assert!(next.text().contains("has failed before"), "{next}");
            failure
        });
        for failure in failures {
            assert_eq!(failure.status(), Status::Timeout, "{carriers:?}, {kind:?}: {failure}");
            assert!(failure.text().contains("raise timeout_ms"), "{carriers:?}, {kind:?}: {failure}");
        }
    }
}

/// Its kernels leave with the others.
#[test]
fn a_message_within_a_host_behind_a_late_call_does_not_end_well() {
    for carriers in WAYS {
        ranks_that_fail(carriers, |rank| {
            let me = rank.context.rank();
            if me >= 2 {
                wait_for_each_other(rank);
                return;
            }
            let (_, late) = rank.sum(1000);
            let call = Call { timeout: Some(Duration::from_millis(500)), ..rank.call() };
            let memory = pointer(rank.double.memory(rank.device, 64));
            let kind = if me == 0 { Kind::Send } else { Kind::Receive };
            let (dtype, operator) = (DataType::U8, Operator::Sum);
            let message = What { kind, count: 64, dtype, operator, root: 1 - me }.request(memory, memory);
            // Or the other rank has failed before this one calls.
            let Ok(first) = rank.start(&late, &call) else { return };
            if let Ok(second) = rank.start(&message, &rank.call()) {
                let ended = second.wait(Deadline::after(PATIENCE));
                assert!(ended.is_err(), "{carriers:?}, rank {me}: nothing was moved");
            }
            let error = first.wait(Deadline::after(PATIENCE)).expect_err("it is late");
            assert_eq!(error.status(), Status::Timeout, "{error}");
        });
    }
}
