//! Groups that fail, that are gone, and that count their members in another order.

use super::*;
use crate::engine::messages::{EAGER_SHM_BYTES, Messages};

#[test]
fn a_group_that_failed_before_it_was_made_fails_on_all_its_members() {
    let [first, second] = pair(true);
    first.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20)), || None).expect("a link");
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

#[test]
fn groups_that_are_gone_leave_nothing_behind() {
    let groups = linked_pair(true);
    let entries = || [0, 1].map(|rank| groups[rank].endpoint().messages().entries());
    for id in 1000..2000 {
        let children = [0, 1].map(|rank| {
            let endpoint = groups[rank].endpoint().clone();
            Group::new(endpoint, id, "child".into(), rank as u32, [0, 1].into(), Duration::from_secs(20))
        });
        // A call, a message that nobody asks for, and one that is announced only.
        for child in &children {
            let _ = turn(child, BARRIER);
        }
        done(&send(&children[1], 1, &[7; 16]));
        let large = [7; EAGER_SHM_BYTES + 1];
        let announced = send(&children[1], 2, &large);
        while groups[0].endpoint().progress(0, Through::Messages) {}
        assert_eq!(groups[0].endpoint().messages().unexpected_bytes(), Messages::kept(16));
        announced.cancel();
        drop((announced, children));
        assert_eq!(groups[0].endpoint().messages().unexpected_bytes(), 0);
    }
    // The service may still hold a group whose operation it has moved.
    let end = Deadline::after(Duration::from_secs(20));
    while entries() != [0, 0] && !end.expired() {
        groups[0].endpoint().progress(0, Through::Messages);
    }
    assert_eq!(entries(), [0, 0]);
}

#[test]
fn what_comes_for_a_group_that_is_gone_is_not_kept() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let endpoint = |rank: usize| groups[rank].endpoint();
        let children = [0, 1].map(|rank| {
            let endpoint = endpoint(rank).clone();
            Group::new(endpoint, 77, "child".into(), rank as u32, [0, 1].into(), Duration::from_secs(20))
        });
        let [gone, stays] = children;
        drop(gone);
        let before = endpoint(0).messages().entries();
        done(&send(&stays, 1, &[7; 16]));
        let large = vec![7; LARGE];
        let announced = send(&stays, 2, &large);
        // Rank 0 moves for other reasons, and nobody tells it when rank 1 has its answer.
        let soon = Deadline::after(Duration::from_secs(10));
        let ended = loop {
            endpoint(0).progress(0, Through::Messages);
            match announced.result() {
                None if !soon.expired() => std::thread::yield_now(),
                result => break result,
            }
        };
        let error = ended.expect("before its deadline").expect_err("nobody takes it");
        assert_eq!(error.status(), Status::PeerFailed);
        assert!(
            error.text().contains("rank 0 (") && error.text().contains("destroyed its context"),
            "{error}"
        );
        let messages = endpoint(0).messages();
        assert_eq!((messages.unexpected_bytes(), messages.entries()), (0, before));
    }
}

#[test]
fn failures_of_peers_speak_as_the_group_counts() {
    let [first, second] = linked_pair(true);
    let child = |parent: &Arc<Group>, rank, members| {
        let endpoint = parent.endpoint().clone();
        Group::new(endpoint, 77, "child".into(), rank, members, Duration::from_secs(20))
    };
    // Rank 1 of the job is rank 0 here.
    let ours = child(&first, 1, [1, 0].into());
    let mut bytes = [0; 8];
    let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
    let waiting = post(&ours, 1, bytes.len(), Message::Receive { from: 0, into });
    drop(second);
    let error =
        waiting.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect_err("it left");
    assert_eq!(error.status(), Status::PeerFailed);
    assert!(error.text().contains("rank 0 (") && error.text().contains("has left"), "{error}");
}
