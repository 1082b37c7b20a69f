//! What happens when things end early: two ranks of one process, driven by hand.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use super::bootstrap::{Meeting, meet};
use super::endpoint::Through;
use super::group::{Group, Turn};
use super::operation::{Completion, Operation, Running};
use super::wire::Class;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::DataType;
use crate::rendezvous::hash::HashStore;
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
    let _ = turn(&other, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    let timeout = Some(Duration::from_millis(50));
    let stuck = Scripted(None, Arc::default());
    let running = group.start(Class::Ordered, 0, BARRIER, timeout, |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("nobody came");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("its last call is allgather(7 × uint8) #0, done"), "{error}");
}
