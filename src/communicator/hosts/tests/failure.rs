//! Calls that fail: what each rank is told.

use super::*;
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
