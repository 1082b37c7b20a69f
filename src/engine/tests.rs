//! What happens when things end early: two ranks of one process, driven by hand.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::Poll;
use std::time::Duration;

use super::bootstrap::{Meeting, meet};
use super::direct::{DirectRun, Job, Path};
use super::endpoint::Through;
use super::group::{Group, Turn};
use super::operation::{Completion, Operation, Running};
use super::wire::Class;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::DataType;
use crate::rendezvous::hash::HashStore;
use crate::schedule::Collective;
use crate::signature::{Kind, Signature};
use crate::transport::service::Options;

/// Two ranks in one group, not linked yet.
fn pair(shm: bool) -> [Arc<Group>; 2] {
    let store = HashStore::new();
    let join = |rank| {
        let options = Options { shm, tcp: !shm, ..Options::default() };
        let (size, secret) = (2, None);
        let deadline = Deadline::after(Duration::from_secs(20));
        let meeting = Meeting { rank, size, name: "pair", store: &store, secret, options, deadline };
        let (endpoint, job) = meet(meeting).expect("the ranks meet");
        Group::new(endpoint, job, "pair".into(), rank, [0, 1].into(), Duration::from_secs(20))
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        ranks.map(|rank| rank.join().expect("no rank panics"))
    })
}

const BARRIER: Signature =
    Signature { kind: Kind::Barrier, dtype: DataType::U8, operator: 0, algorithm: 0, root: 0, count: 0 };

/// An operation that answers what it is told to, and counts how often it was abandoned.
struct Scripted(Option<Result<Completion>>, Arc<AtomicUsize>);

impl Operation for Scripted {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        self.0.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn abandon(&mut self, _group: &Group) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

/// The turn of a call that has ended.
fn turn(group: &Arc<Group>, signature: Signature) -> Turn {
    let mut turn = None;
    let end = |given: &Turn| {
        turn = Some(*given);
        Scripted(Some(Ok(Completion::default())), Arc::default())
    };
    group.run(Class::Ordered, 0, signature, None, end).expect("it ends at once");
    turn.expect("its turn came")
}

#[test]
fn a_wait_ends_at_its_deadline_though_there_is_always_something_to_do() {
    let [group, _other] = pair(true);
    let ended = Running::ended(group.clone(), turn(&group, BARRIER), Ok(Completion::default()));
    let answer = group.endpoint().wait(
        Deadline::after(Duration::from_millis(20)),
        Through::Messages,
        || -> Option<()> {
            // Moving it on counts as progress.
            group.endpoint().adopt(ended.clone());
            None
        },
    );
    assert_eq!(answer, None);
}

#[test]
fn an_operation_that_fails_lets_go_of_its_buffers() {
    let [group, _other] = pair(true);
    let abandoned = Arc::new(AtomicUsize::new(0));
    let failing = Scripted(Some(Err(Error::new(Status::System, "no"))), abandoned.clone());
    let running = group.start(Class::PointToPoint, 0, BARRIER, None, |_| failing).expect("it starts");
    assert!(running.wait(Deadline::NEVER).expect("it ends").is_err());
    assert_eq!(abandoned.load(Ordering::Relaxed), 1);
}

#[test]
fn an_overdue_operation_that_nobody_waits_for_tells_what_the_others_do() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    for group in [&group, &other] {
        let _ = turn(group, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    }
    let timeout = Some(Duration::from_millis(50));
    let stuck = Scripted(None, Arc::default());
    let running = group.start(Class::Ordered, 0, BARRIER, timeout, |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("nobody came");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("its last call is allgather(7 × uint8) #0, done"), "{error}");
}

#[test]
fn calls_that_nobody_waits_for_are_compared_though_nothing_is_sent() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    let _ = turn(&other, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    let stuck = Scripted(None, Arc::default());
    let running = group.start(Class::Ordered, 0, BARRIER, None, |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("the calls differ");
    assert_eq!(error.status(), Status::Mismatch);
    assert!(error.text().contains("rank 0 called barrier()"), "{error}");
    assert!(error.text().contains("rank 1 called allgather(7 × uint8)"), "{error}");
}

/// As [`pair`], exchanging directly.
fn direct_pair() -> [Arc<Group>; 2] {
    let groups = pair(true);
    // Stands for the exchange by messages.
    let (both, words) = (Barrier::new(2), std::sync::Mutex::new([[0; 2]; 2]));
    std::thread::scope(|scope| {
        for group in &groups {
            let (both, words) = (&both, &words);
            scope.spawn(move || {
                let exchange = |mine| {
                    both.wait();
                    words.lock().expect("no panic")[group.rank() as usize] = mine;
                    both.wait();
                    Ok(words.lock().expect("no panic").to_vec())
                };
                group.share_memory(exchange).expect("the ranks share memory");
            });
        }
    });
    groups
}

const LARGE: usize = 1 << 20;

/// A broadcast from rank 0 out of and into `memory`, through private memory.
fn broadcast(group: &Arc<Group>, memory: &mut [u8]) -> DirectRun {
    let count = memory.len() as u64;
    let signature = Signature { kind: Kind::Broadcast, count, ..BARRIER };
    let turn = turn(group, signature);
    let job = Job {
        collective: Collective::Broadcast { count, root: 0 },
        listed: false,
        input: memory.as_ptr(),
        output: memory.as_mut_ptr(),
        in_place: true,
        dtype: DataType::U8,
        reducer: None,
    };
    let direct = group.direct().expect("shared memory").clone();
    // SAFETY: the tests keep the memory until the run has ended or is abandoned.
    unsafe { DirectRun::new(group, &turn, direct, job, Path::Long) }
}

#[test]
fn what_is_read_from_a_rank_that_gave_up_does_not_count() {
    let [group, other] = direct_pair();
    let (mut source, mut target) = (vec![7; LARGE], vec![0; LARGE]);
    let mut root = broadcast(&group, &mut source);
    assert!(root.advance(&group).is_pending(), "nobody has read yet");
    root.abandon(&group);
    source.fill(9);
    let mut leaf = broadcast(&other, &mut target);
    for _ in 0..3 {
        assert!(leaf.advance(&other).is_pending(), "a result that is not the broadcast's");
    }
    assert_eq!(leaf.waits_for(&other), [0]);
}

#[test]
fn nobody_lets_go_of_memory_while_a_rank_of_its_process_reads_it() {
    // Without care, the reader finds bytes that were written after the root had given up, or unmapped memory.
    for round in 0..40 {
        let [group, other] = direct_pair();
        let (mut source, mut target) = (vec![7; LARGE], vec![0; LARGE]);
        let mut root = broadcast(&group, &mut source);
        assert!(root.advance(&group).is_pending());
        let mut leaf = broadcast(&other, &mut target);
        let both = Barrier::new(2);
        let ended = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                both.wait();
                leaf.advance(&other).is_ready()
            });
            both.wait();
            for _ in 0..round * 500 {
                std::hint::spin_loop();
            }
            root.abandon(&group);
            source.fill(9);
            reader.join().expect("no panic")
        });
        assert!(!ended || target.iter().all(|&byte| byte == 7), "bytes of another call");
    }
}

#[test]
fn a_group_that_failed_before_it_was_made_fails_on_all_its_members() {
    let [first, second] = pair(true);
    first.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    let child = |parent: &Arc<Group>, rank| {
        let endpoint = parent.endpoint().clone();
        Group::new(endpoint, 77, "child".into(), rank, [0, 1].into(), Duration::from_secs(20))
    };
    let early = child(&first, 0);
    early.fail(Error::new(Status::Aborted, "enough"));
    let failed = |group: &Arc<Group>| {
        let wait = Deadline::after(Duration::from_secs(20));
        group.endpoint().wait(wait, Through::Messages, || group.failure())
    };
    let late = child(&second, 1);
    assert_eq!(failed(&late).expect("it heard").text(), "enough");
}
