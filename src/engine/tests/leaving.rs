//! Ranks that leave a group whose other members go on.

use super::*;
use crate::engine::group::Rest;

const SOON: Duration = Duration::from_secs(20);

fn why() -> Error {
    Error::new(Status::Aborted, "rank 1 goes home")
}

/// The two ends of another group of these ranks.
fn child(parents: &[Arc<Group>; 2], id: u64) -> [Arc<Group>; 2] {
    [0, 1].map(|rank: usize| {
        let endpoint = parents[rank].endpoint().clone();
        Group::new(endpoint, id, "child".into(), rank as u32, [0, 1].into(), SOON)
    })
}

/// Waits until both ranks have read what the other one has told so far, and rank 0 what rank 1 answers.
fn catch_up(parents: &[Arc<Group>; 2]) {
    for (id, fails) in [(101, 0), (102, 1)] {
        let both = child(parents, id);
        both[fails].fail(why());
        let hears = &both[1 - fails];
        hears.endpoint().wait(Deadline::after(SOON), Through::Messages, || hears.failure()).expect("in time");
    }
}

#[test]
fn a_rank_that_leaves_tells_those_alone_who_wait_for_calls_that_it_never_makes() {
    for shm in [true, false] {
        let parents = linked_pair(shm);
        let [stays, leaves] = child(&parents, 77);
        let made = [&stays, &leaves].map(|group| turn(group, BARRIER));
        assert!(leaves.leave(&why(), || Rest::Known(true)));
        assert_eq!(leaves.failure(), Some(why()));
        let called = leaves
            .run(calling(Class::Ordered, 0, BARRIER, None), |_| -> Scripted { panic!("it is refused") });
        assert!(called.is_err());
        // What it has sent for that one may be under way, also when nothing else holds the group.
        stays.compare(&made[0], &[1]);
        drop(leaves);
        stays.compare(&made[0], &[1]);
        catch_up(&parents);
        assert_eq!(stays.failure(), None);
        let waits = calling(Class::Ordered, 0, BARRIER, Some(SOON));
        let error = stays.run(waits, |_| Scripted(None, Arc::default())).expect_err("rank 1 never calls");
        assert!(error.text().contains("goes home"), "{error}");
    }
}

#[test]
fn a_rank_does_not_leave_while_something_of_it_is_under_way_or_where_all_have_failed() {
    let [first, second] = linked_pair(true);
    let mut bytes = [0; 4];
    let waits = receive(&first, 5, &mut bytes);
    assert!(!first.leave(&why(), || Rest::Known(true)));
    waits.cancel();
    assert!(!first.leave(&why(), || Rest::Known(false)));
    // The driver does not answer, and something else does not wait for that.
    let (_silent, hears) = std::sync::mpsc::channel::<()>();
    assert!(!first.leave(&why(), || Rest::Asked(Box::new(move || hears.recv().is_err()))));
    // A call that begins meanwhile.
    assert!(!first.leave(&why(), || Rest::Known(turn(&first, BARRIER).sequence == 0)));
    assert_eq!(first.failure(), None);
    assert!(first.leave(&why(), || Rest::Known(true)));
    assert!(!first.leave(&why(), || Rest::Known(true)));
    second.fail(Error::new(Status::Aborted, "enough"));
    assert!(!second.leave(&why(), || Rest::Known(true)));
}
