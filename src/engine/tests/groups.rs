//! Groups that fail, that are gone, and that count their members in another order.

use super::losing::{receive_any, unlinked};
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
        // Before it is known here that nobody takes it.
        done(&send(&stays, 1, &[7; 16]));
        let large = vec![7; LARGE];
        let announced = send(&stays, 2, &large);
        drop(gone);
        let before = endpoint(0).messages().entries();
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

/// As `parent`, under another number.
fn child_of(parent: &Arc<Group>, id: u64) -> Arc<Group> {
    let (endpoint, members) = (parent.endpoint().clone(), parent.members().clone());
    Group::new(endpoint, id, "child".into(), parent.rank(), members, Duration::from_secs(20))
}

/// A receive from rank 0 of a group that this has let go of: it has failed with this.
fn fails_with(waiting: &Running) -> Error {
    let error = waiting.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
    let error = error.expect_err("nothing comes");
    assert_eq!(error.status(), Status::PeerFailed, "{error}");
    error
}

#[test]
fn a_member_that_had_no_link_when_it_let_go_of_a_group_says_so_as_it_opens() {
    for shm in [true, false] {
        let groups = unlinked(3, &Options { shm, tcp: !shm, ..Options::default() });
        let children: Vec<_> = groups.iter().map(|group| child_of(group, 77)).collect();
        let mut children = children.into_iter();
        drop(children.next());
        for child in children {
            let mut bytes = [0; 8];
            let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
            let waiting = post(&child, 1, bytes.len(), Message::Receive { from: 0, into });
            assert!(fails_with(&waiting).text().contains("rank 0"));
            assert_eq!(child.failure(), None, "a goodbye alone fails no group");
        }
        assert!(groups.iter().all(|group| group.failure().is_none()));
    }
}

#[test]
fn a_receive_from_any_waits_as_long_as_one_member_is_left() {
    for shm in [true, false] {
        let groups = unlinked(3, &Options { shm, tcp: !shm, ..Options::default() });
        let children: Vec<_> = groups.iter().map(|group| child_of(group, 77)).collect();
        let [gone, stays, receives] = <[_; 3]>::try_from(children).ok().expect("three");
        let (mut came, mut never) = ([0; 3], [0; 3]);
        let any = receive_any(&receives, &[0, 1], &mut came);
        let in_vain = receive_any(&receives, &[0], &mut never);
        drop(gone);
        fails_with(&in_vain);
        let from = Source { address: b"yes".as_ptr(), len: 3 };
        done(&post(&stays, 1, 3, Message::Send { to: 2, from }));
        done(&any);
        assert_eq!(&came, b"yes");
        let last = receive_any(&receives, &[0, 1], &mut never);
        drop(stays);
        fails_with(&last);
    }
}

#[test]
fn who_makes_a_group_that_another_has_no_more_is_told() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        drop(child_of(&groups[0], 77));
        let mut bytes = [0; 8];
        fails_with(&receive(&child_of(&groups[1], 77), 1, &mut bytes));
        // One that had failed, of which too long ago for this rank to know, is only told to those who ask.
        child_of(&groups[0], 78).fail(Error::new(Status::Aborted, "enough"));
        for id in 1000..1300 {
            child_of(&groups[0], id).fail(Error::new(Status::Aborted, "enough"));
        }
        let heard = Deadline::after(Duration::from_secs(20));
        while groups[1].endpoint().warning(1299).is_none() {
            assert!(!heard.expired(), "it hears of them");
            std::thread::sleep(Duration::from_millis(1));
        }
        let late = child_of(&groups[1], 78);
        let waiting = receive(&late, 1, &mut bytes);
        let call = turn(&late, BARRIER);
        let inquiry = late.ask(&call, vec![0], None);
        while !late.answered(&inquiry) {
            std::thread::sleep(Duration::from_millis(2));
        }
        fails_with(&waiting);
        let error = late.overdue(&call, &inquiry);
        assert!(error.text().contains("it has destroyed its context"), "{error}");
    }
}

#[test]
fn a_group_that_is_tied_to_its_parent_fails_as_that_does_though_a_member_lets_go_of_it_first() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let [gone, parent] = [0, 1].map(|rank: usize| child_of(&groups[rank], 77));
        let [tied, free] = [78, 79].map(|id| child_of(&parent, id));
        let _making = [parent.make(&tied, true), parent.make(&free, false)];
        let mut word = [0; 8];
        let into = Destination { address: word.as_mut_ptr(), len: word.len() };
        let endpoint = parent.endpoint();
        let [of_tied, of_free] = [&tied, &free].map(|group| {
            let mut messages = endpoint.messages();
            let mailbox = messages.mailbox();
            let key = Key { group: group.id(), tag: 0, sequence: 0, slot: 0, class: Class::Internal };
            messages.receive(0, key, BARRIER, into, Ticket { mailbox, step: 0 });
            mailbox
        });
        let has_failed = |mailbox| endpoint.messages().look(mailbox).failed.is_some();
        // As where its notice of the failure is still under way.
        let members = gone.members().clone();
        gone.endpoint().messages().forget(gone.id(), Some(gone.line()), members, true);
        let soon = Deadline::after(Duration::from_secs(20));
        endpoint.wait(soon, Through::Messages, || has_failed(of_free).then_some(())).expect("in time");
        assert!(!has_failed(of_tied));
        gone.fail(Error::new(Status::Aborted, "enough"));
        let error = endpoint.wait(soon, Through::Messages, || tied.failure()).expect("in time");
        assert!(error.text().contains("enough"), "{error}");
        for mailbox in [of_tied, of_free] {
            endpoint.messages().cancel(mailbox);
        }
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
