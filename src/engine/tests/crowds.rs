//! Many operations under way at a time: they are looked at when something comes for them, and then all of
//! them end as few do.

use std::time::Instant;

use super::losing::unlinked_of;
use super::*;

/// Of the many.
const MANY: usize = 200;

/// So many are looked at each time.
const FEW: usize = 32;

/// An operation, and how often it, or one of the others, has been looked at.
struct Looked<O>(O, Arc<AtomicUsize>);

impl<O: Operation> Operation for Looked<O> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.advance(group)
    }

    fn abandon(&mut self, group: &Group) {
        self.0.abandon(group);
    }

    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        self.0.cancel(group)
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.0.waits_for(group)
    }

    fn mailbox(&self) -> Option<u32> {
        self.0.mailbox()
    }
}

/// Starts a receive for each piece of memory, with a tag of its own.
fn receives(
    group: &Arc<Group>,
    into: &mut [[u8; 8]],
    timeout: Option<Duration>,
) -> (Vec<Arc<Running>>, Arc<AtomicUsize>) {
    let looks = Arc::new(AtomicUsize::new(0));
    let start = |(tag, into): (usize, &mut [u8; 8])| {
        let into = Destination { address: into.as_mut_ptr(), len: into.len() };
        let message = Message::Receive { from: 1 - group.rank(), into };
        let signature = Signature { kind: Kind::Receive, count: 8, ..BARRIER };
        // SAFETY: the tests keep the memory until the messages have ended.
        let make =
            |turn: &Turn| unsafe { Looked(Point::new(group, turn, message, usize::MAX), looks.clone()) };
        group.start(calling(Class::PointToPoint, tag as u64, signature, timeout), make).expect("it starts")
    };
    (into.iter_mut().enumerate().map(start).collect(), looks)
}

/// More threads poll than there are processors, each for a rank of its own: one that loses its processor
/// while it has what others need keeps the service thread, which opens the links of all of them, from its
/// work.
#[test]
fn ranks_of_one_process_that_poll_leave_the_others_their_turns() {
    const RANKS: u32 = 32;
    let groups = unlinked_of(&vec![Options { shm: false, ..Options::default() }; RANKS as usize]);
    groups.iter().for_each(|group| group.endpoint().share_processors());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for group in &groups {
            group.set_timeout(Duration::from_secs(60));
            scope.spawn(move || {
                let bytes = [group.rank() as u8; 100];
                let mut came = [[0; 100]; RANKS as usize];
                let from = Source { address: bytes.as_ptr(), len: bytes.len() };
                let mut works = Vec::new();
                for (peer, came) in (0..).zip(&mut came).filter(|(peer, _)| *peer != group.rank()) {
                    let into = Destination { address: came.as_mut_ptr(), len: came.len() };
                    works.push(post(group, 1, came.len(), Message::Receive { from: peer, into }));
                    works.push(post(group, 1, bytes.len(), Message::Send { to: peer, from }));
                }
                for work in &works {
                    let result = std::iter::repeat_with(|| work.test()).find_map(|result| result);
                    result.expect("it is polled").unwrap_or_else(|error| panic!("{error}"));
                }
            });
        }
    });
    // A second or two.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

/// Has all but a few of the many lie dormant.
fn until_dormant(group: &Group) {
    let end = Deadline::after(Duration::from_secs(10));
    while group.endpoint().dormant() < MANY - FEW {
        assert!(!end.expired(), "{} lie dormant", group.endpoint().dormant());
        group.endpoint().progress(0, Through::Messages);
        std::thread::yield_now();
    }
}

#[test]
fn of_many_operations_those_are_looked_at_that_something_comes_for() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let mut came = [[0; 8]; MANY];
        let (running, looks) = receives(&groups[1], &mut came, None);
        until_dormant(&groups[1]);
        looks.store(0, Ordering::Relaxed);
        for _ in 0..100 {
            groups[1].endpoint().progress(0, Through::Messages);
        }
        let looks = looks.load(Ordering::Relaxed);
        assert!(looks <= 2 * 100 * FEW, "{looks} looks, though nothing has come");
        // In another order, and the last two are waited for by who has not sent yet.
        for tag in (2..MANY).rev() {
            done(&send(&groups[0], tag as u64, &[tag as u8; 8]));
            done(&running[tag]);
        }
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| running[..2].iter().for_each(|running| done(running)));
            std::thread::sleep(Duration::from_millis(5));
            (0..2).for_each(|tag| done(&send(&groups[0], tag as u64, &[tag as u8; 8])));
            waits.join().expect("no panic");
        });
        assert!((0..MANY).all(|tag| came[tag] == [tag as u8; 8]));
        assert_eq!(groups[1].endpoint().dormant(), 0);
    }
}

#[test]
fn many_operations_end_at_their_deadlines_though_nobody_looks_at_them() {
    let groups = linked_pair(true);
    let mut came = [[0; 8]; MANY];
    let (running, _) = receives(&groups[1], &mut came, Some(Duration::from_millis(60)));
    until_dormant(&groups[1]);
    // Nobody waits: a thread of the library ends them.
    let end = Deadline::after(Duration::from_secs(20));
    for running in &running {
        while !running.has_ended() {
            assert!(!end.expired(), "it has not ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = running.result().expect("its end").expect_err("nobody has sent");
        assert_eq!(error.status(), Status::Timeout, "{error}");
    }
    assert!(groups[1].failure().is_none());
}

#[test]
fn many_operations_end_when_their_group_fails_and_when_they_are_cancelled() {
    let groups = linked_pair(true);
    let entries = || groups[1].endpoint().messages().entries();
    let before = entries();
    let mut came = [[0; 8]; MANY];
    let (running, _) = receives(&groups[1], &mut came, None);
    until_dormant(&groups[1]);
    // Every other.
    running.iter().step_by(2).for_each(|running| assert!(running.cancel()));
    groups[1].fail(Error::new(Status::System, "no more"));
    for (tag, running) in running.iter().enumerate() {
        let ended = running.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
        let due = if tag % 2 == 0 { Status::Aborted } else { Status::System };
        assert_eq!(ended.expect_err("it has failed").status(), due);
    }
    assert_eq!((groups[1].endpoint().dormant(), entries()), (0, before));
}

/// An operation that ends when it is told to.
struct Told(Arc<AtomicUsize>);

impl Operation for Told {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        if self.0.load(Ordering::Relaxed) == 0 {
            Poll::Pending
        } else {
            Poll::Ready(Ok(Completion::default()))
        }
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

#[test]
fn each_of_many_operations_has_its_turn() {
    let groups = linked_pair(true);
    let (told, looks) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let running: Vec<_> = (0..MANY)
        .map(|_| {
            let make = |_: &Turn| Looked(Told(told.clone()), looks.clone());
            groups[0].start(calling(Class::Ordered, 0, BARRIER, None), make).expect("it starts")
        })
        .collect();
    until_dormant(&groups[0]);
    told.store(1, Ordering::Relaxed);
    // The last one's turn comes last; who moves one gives its turn away before it says so.
    for running in running.iter().rev() {
        done(running);
    }
    assert_eq!(groups[0].endpoint().dormant(), 0);
}
