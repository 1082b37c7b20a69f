//! Children of a context whose members are few of many ranks, on several hosts.

use std::time::{Duration, Instant};

use crate::support::processes::{Job, Seat, report};
use crate::support::{PATIENCE, Verb, in_time, within};
use unisono::collective::request::Kind;
use unisono::communicator::{Context, Options};

/// One rank of each host: distances at which nothing else has linked them.
const MEMBERS: [u32; 3] = [0, 3, 6];

/// The last member's end is awaited by the second, in a broadcast of the first, which does nothing. So is
/// that of a duplicate.
fn lose_the_last(seat: &Seat, last: impl FnOnce([&Context; 2])) {
    let host = Some(format!("host {}", seat.rank / 3));
    let context = Context::create(Options { host, ..seat.options("") }).expect("the ranks meet");
    if !MEMBERS.contains(&seat.rank) {
        report("ready");
        std::thread::sleep(PATIENCE);
        return;
    }
    let child = context.group("column", &MEMBERS).expect("the members meet");
    let duplicate = child.duplicate().expect("the members meet");
    let both = [&child, &duplicate];
    report("ready");
    match seat.rank {
        0 => {
            let told = |context: &&Context| context.failure().is_some();
            while !both.iter().all(told) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        3 => std::thread::scope(|scope| {
            for context in both {
                let call = within(PATIENCE.as_millis() as u64);
                let verb = Verb::new(Kind::Broadcast, 4).root(0);
                scope.spawn(move || {
                    verb.run_in(context, &mut [0.0f32; 4], &call).expect_err("it has no root")
                });
            }
        }),
        _ => return last(both),
    }
    let failures = both.map(|context| context.failure().expect("it has failed"));
    report(format_args!("failed {:?} {} {:?}", failures[0].status(), failures[0], failures[1].status()));
}

pub(crate) fn abort_a_child(seat: &Seat) {
    lose_the_last(seat, |children| {
        // The other waits by then.
        std::thread::sleep(Duration::from_millis(200));
        report("aborts");
        children.iter().for_each(|child| child.abort());
        std::thread::sleep(PATIENCE);
    });
}

pub(crate) fn die_in_a_child(seat: &Seat) {
    lose_the_last(seat, |_| {
        std::thread::sleep(Duration::from_millis(200));
        report("dies");
        std::thread::sleep(PATIENCE);
    });
}

#[test]
fn all_members_of_a_child_across_hosts_learn_within_a_second_of_an_abort() {
    in_time(|| {
        let job = Job::start("abort a child", 9, "shm,tcp");
        let began = job.await_all(&[6], "aborts")[0].at;
        told(&job, "Aborted", began)
    });
}

#[test]
fn all_members_of_a_child_across_hosts_learn_within_a_second_of_a_rank_killed() {
    in_time(|| {
        let job = Job::start("die in a child", 9, "shm,tcp");
        job.await_all(&[6], "dies");
        let killed = Instant::now();
        job.signal(6, libc::SIGKILL);
        told(&job, "PeerFailed", killed)
    });
}

/// How long after `since` the others know.
fn told(job: &Job, status: &str, since: Instant) -> Duration {
    let failed = job.await_all(&[0, 3], "failed");
    for told in &failed {
        let text = &told.line;
        // Of the child the last member is rank 2.
        let named = text.contains("rank 2") || text.contains(&format!("pid {}", job.pid(6)));
        assert!(text.starts_with(status) && text.ends_with(status) && named, "rank {}: {text}", told.rank);
    }
    failed.iter().map(|told| told.at.saturating_duration_since(since)).max().unwrap_or_default()
}
