use super::*;
use crate::rendezvous::hash::HashStore;

const PATIENCE: Duration = Duration::from_secs(60);
/// Within what time ranks are to hear what is wrong, far from their deadline.
const SOON: Duration = Duration::from_secs(20);

type Met = Result<(Arc<Endpoint>, u64)>;

fn come(store: &HashStore, (rank, size): (u32, u32), patience: Duration, once: bool) -> Met {
    meet(Meeting {
        rank,
        size,
        name: "ranks",
        store,
        secret: None,
        options: Ok(Options { shm: true, tcp: false, ..Options::default() }),
        deadline: Deadline::after(patience),
        recalled: None,
        tied: false,
        once,
    })
}

/// They come one after the other, each when it is counted that the one before has come.
fn all_come(store: &HashStore, ranks: &[(u32, u32)]) -> Vec<Met> {
    thread::scope(|scope| {
        let come = |&(rank, size): &(u32, u32)| {
            let comes = scope.spawn(move || come(store, (rank, size), PATIENCE, false));
            let key = format!("ranks/0/rank/{rank}/came");
            store.get(&key, Deadline::after(PATIENCE)).expect("it comes");
            comes
        };
        let come: Vec<_> = ranks.iter().map(come).collect();
        come.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// The ranks of one meeting, which is none of `before`.
fn all_meet(store: &HashStore, size: u32, before: &mut Vec<u64>) {
    let met = thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..size).map(|rank| scope.spawn(move || come(store, (rank, size), PATIENCE, false))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic").expect("they meet")).collect::<Vec<_>>()
    });
    let job = met[0].1;
    assert!(met.iter().all(|met| met.1 == job) && !before.contains(&job));
    before.push(job);
}

#[test]
fn numbers_of_ranks_that_differ_are_told_to_all_whoever_comes_when() {
    for ranks in [
        [(0, 3), (2, 3), (1, 2)],
        [(1, 2), (0, 3), (2, 3)],
        [(0, 3), (1, 2), (2, 3)],
        // It alone has the secret.
        [(1, 3), (2, 3), (0, 2)],
        [(0, 2), (1, 3), (2, 3)],
    ] {
        let (store, began) = (HashStore::new(), Instant::now());
        for met in all_come(&store, &ranks) {
            let error = met.err().expect("they differ");
            assert_eq!(error.status(), Status::Mismatch, "{ranks:?}: {error}");
            for number in ["as one of 2", "as one of 3"] {
                assert!(error.text().contains(number), "{ranks:?}: {error}");
            }
        }
        assert!(began.elapsed() < SOON, "{ranks:?}");
        // Those that have failed there meet when they are told the same.
        all_meet(&store, 3, &mut Vec::new());
    }
}

#[test]
fn ranks_that_have_waited_in_vain_meet_those_who_come_when_they_try_again() {
    let store = &HashStore::new();
    for (alone, meeting) in
        [(&[(0, 2)][..], 1), (&[(1, 2)], 3), (&[(0, 2), (0, 2)], 6), (&[(2, 3), (0, 3)], 8)]
    {
        for &rank in alone {
            let error = come(store, rank, Duration::from_millis(50), false).err().expect("it is alone");
            assert_eq!(error.status(), Status::Timeout, "{error}");
        }
        let ((first, size), began) = (alone[0], Instant::now());
        thread::scope(|scope| {
            let again = scope.spawn(move || come(store, (first, size), PATIENCE, false));
            let key = format!("ranks/{meeting}/first");
            store.get(&key, Deadline::after(PATIENCE)).expect("it begins another meeting");
            // One may have been there, and the others have not.
            let others = (0..size).filter(|&rank| rank != first);
            let others = others.map(|rank| scope.spawn(move || come(store, (rank, size), PATIENCE, false)));
            for rank in others.collect::<Vec<_>>().into_iter().chain([again]) {
                rank.join().expect("no panic").expect("they meet");
            }
        });
        assert!(began.elapsed() < SOON);
    }
}

#[test]
fn meetings_of_one_name_have_each_their_number_of_ranks() {
    let (store, mut before) = (HashStore::new(), Vec::new());
    for size in [2, 4, 3, 3, 2, 5] {
        all_meet(&store, size, &mut before);
    }
}

#[test]
fn of_many_processes_that_come_as_one_rank_none_waits_for_the_others() {
    let (store, began) = (HashStore::new(), Instant::now());
    for met in all_come(&store, &[(0, 8); 5]) {
        let error = met.err().expect("they are one rank");
        assert!(error.text().contains("two processes have come to 'ranks' as rank 0 of 8"), "{error}");
    }
    assert!(began.elapsed() < SOON);
}

#[test]
fn who_comes_to_a_meeting_that_was_the_only_one_is_refused() {
    let (store, began) = (HashStore::new(), Instant::now());
    let once = |rank| come(&store, rank, PATIENCE, true).err().expect("it comes too late");
    all_meet(&store, 2, &mut Vec::new());
    for rank in [(1, 2), (2, 3)] {
        let error = once(rank);
        assert_eq!(error.status(), Status::InvalidUsage, "{error}");
        assert!(error.text().contains("all 2 ranks have come there before it"), "{error}");
    }
    // Nor does it wait for another try of one that has failed.
    let store = HashStore::new();
    come(&store, (0, 2), Duration::from_millis(50), true).err().expect("it is alone");
    let error = come(&store, (0, 2), PATIENCE, true).err().expect("it is alone");
    assert_eq!(error.status(), Status::Timeout, "{error}");
    assert!(began.elapsed() < SOON);
}
