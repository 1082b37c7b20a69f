//! What happens when things end early: two ranks of one process, driven by hand.

mod boxed;
mod crowds;
mod given_up;
mod hauling;
mod long_calls;
mod losing;
mod pieces;
mod waiting;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::Poll;
use std::time::Duration;

use super::bootstrap::{Meeting, meet};
use super::direct::{BOARD_BYTES, DirectRun, Job, Path};
use super::endpoint::Through;
use super::group::{Calling, Group, Turn};
use super::lane::{Destination, Source, Ticket};
use super::messages::Messages;
use super::operation::{Completion, Operation, Running};
use super::point::{Message, Point};
use super::wire::{Class, Key};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::DataType;
use crate::rendezvous::hash::HashStore;
use crate::schedule::Collective;
use crate::signature::{Kind, Signature};
use crate::transport::service::Options;

/// Two ranks in one group, not linked yet.
fn pair(shm: bool) -> [Arc<Group>; 2] {
    pair_with(&Options { shm, tcp: !shm, ..Options::default() })
}

fn pair_with(options: &Options) -> [Arc<Group>; 2] {
    pair_of([options, options])
}

/// Each rank with its own.
fn pair_of(options: [&Options; 2]) -> [Arc<Group>; 2] {
    let store = HashStore::new();
    let join = |rank: u32| {
        let options = Ok(options[rank as usize].clone());
        let (size, secret) = (2, None);
        let deadline = Deadline::after(Duration::from_secs(20));
        let meeting = Meeting {
            rank,
            size,
            name: "pair",
            store: &store,
            secret,
            options,
            deadline,
            recalled: None,
            tied: false,
            once: false,
        };
        let (endpoint, job) = meet(meeting).expect("the ranks meet");
        Group::new(endpoint, job, "pair".into(), rank, [0, 1].into(), Duration::from_secs(20))
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        ranks.map(|rank| rank.join().expect("no rank panics"))
    })
}

#[test]
fn calls_are_relayed_where_all_ranks_say_that_they_may_be() {
    let [on, off] = [true, false].map(|relays| Options { relays, ..Options::default() });
    for (options, due) in [([&on, &on], true), ([&on, &off], false), ([&off, &off], false)] {
        let relay = pair_of(options).map(|group| group.endpoint().all_relay());
        assert_eq!(relay, [due; 2], "{options:?}");
    }
}

pub(super) const BARRIER: Signature = Signature {
    kind: Kind::Barrier,
    dtype: DataType::U8,
    operator: 0,
    algorithm: 0,
    root: 0,
    count: 0,
    device: false,
};

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

/// What a call is made with.
fn calling(class: Class, tag: u64, signature: Signature, timeout: Option<Duration>) -> Calling {
    Calling { class, tag, signature, timeout }
}

/// The turn of a call that has ended.
fn turn(group: &Arc<Group>, signature: Signature) -> Turn {
    let mut turn = None;
    let end = |given: &Turn| {
        turn = Some(*given);
        Scripted(Some(Ok(Completion::default())), Arc::default())
    };
    group.run(calling(Class::Ordered, 0, signature, None), end).expect("it ends at once");
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
            group.endpoint().disown(&ended);
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
    let running =
        group.start(calling(Class::PointToPoint, 0, BARRIER, None), |_| failing).expect("it starts");
    assert!(running.wait(Deadline::NEVER).expect("it ends").is_err());
    assert_eq!(abandoned.load(Ordering::Relaxed), 1);
}

#[test]
fn a_call_whose_turn_does_not_come_says_on_which_rank() {
    let [group, other] = pair(true);
    let wait = Deadline::after(Duration::from_secs(20));
    group.endpoint().open_links(&[1], wait).expect("a link");
    let start = |timeout| {
        let stuck = Scripted(None, Arc::default());
        group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts")
    };
    let [_ahead, behind] = [None, Some(Duration::from_millis(50))].map(start);
    behind.wait(wait).expect("in time").expect_err("its turn does not come");
    let told = other.endpoint().wait(wait, Through::Messages, || other.failure()).expect("in time");
    for part in ["rank 0 of 'pair'", "barrier #1 waited", "for the calls before it"] {
        assert!(told.text().contains(part), "{told}");
    }
}

/// A rank that is stopped around a deadline finds all its calls late at once.
#[test]
fn a_call_that_is_late_with_the_one_before_it_leaves_it_to_that_to_say_why() {
    let [group, _other] = pair(true);
    let wait = Deadline::after(Duration::from_secs(20));
    group.endpoint().open_links(&[1], wait).expect("a link");
    let start = |_| {
        let (stuck, timeout) = (Scripted(None, Arc::default()), Some(Duration::from_millis(100)));
        group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts")
    };
    let [_ahead, _between, behind] = [(); 3].map(start);
    // Nobody looks meanwhile.
    let held = group.endpoint().messages();
    std::thread::sleep(Duration::from_millis(1100));
    drop(held);
    let error = behind.wait(wait).expect("in time").expect_err("its turn does not come");
    assert!(error.text().contains("nothing from rank 1"), "{error}");
    assert!(!error.text().contains("for the calls before it"), "{error}");
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
    let running = group.start(calling(Class::Ordered, 0, BARRIER, timeout), |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("nobody came");
    assert_eq!(error.status(), Status::Timeout);
    assert!(error.text().contains("its last call is allgather(7 × uint8) #0, done"), "{error}");
}

#[test]
fn a_rank_whose_calls_in_a_group_are_long_ago_has_called_something() {
    let [group, other] = linked_pair(true);
    let (late, _) = (turn(&group, BARRIER), turn(&other, BARRIER));
    let asked = |group: &Group| {
        let inquiry = group.ask(&late, vec![1], None);
        while !group.answered(&inquiry) {
            std::thread::sleep(Duration::from_millis(2));
        }
        group.overdue(&late, &inquiry).text().to_owned()
    };
    assert!(asked(&group).contains("its last call is barrier() #0"));
    let key = Key { group: group.id() + 1, tag: 0, sequence: 0, slot: 0, class: Class::Ordered };
    for _ in 0..200 {
        other.endpoint().recorder().begin(key, BARRIER, late.called);
    }
    let text = asked(&group);
    assert!(text.contains("not known any more") && text.contains("128 in other groups"), "{text}");
}

#[test]
fn calls_that_nobody_waits_for_are_compared_though_nothing_is_sent() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    let _ = turn(&other, Signature { kind: Kind::Allgather, count: 7, ..BARRIER });
    let stuck = Scripted(None, Arc::default());
    let running = group.start(calling(Class::Ordered, 0, BARRIER, None), |_| stuck).expect("it starts");
    let (tell, told) = mpsc::channel();
    running.on_complete(Box::new(move |result| tell.send(result).expect("the test waits")));
    let error = told.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("the calls differ");
    assert_eq!(error.status(), Status::Mismatch);
    assert!(error.text().contains("rank 0 called barrier()"), "{error}");
    assert!(error.text().contains("rank 1 called allgather(7 × uint8)"), "{error}");
}

/// Messages do not hear of calls on devices, nor of those on the host that end at their first look.
#[test]
fn a_rank_may_be_ahead_after_any_number_of_calls_that_messages_have_not_heard_of() {
    struct AtOnce;

    impl Operation for AtOnce {
        fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
            Poll::Ready(Ok(Completion::default()))
        }

        fn abandon(&mut self, _group: &Group) {}

        fn waits_for(&self, _group: &Group) -> Vec<u32> {
            Vec::new()
        }

        fn through(&self) -> Through {
            Through::Memory
        }
    }

    for on_devices in [true, false] {
        let groups = linked_pair(true);
        for group in &groups {
            assert_eq!(turn(group, BARRIER).sequence, 0);
            // A quarter and half of all numbers.
            for calls in [1 << 30, 1 << 31] {
                group.pretend_calls(calls - 1);
                let called = match on_devices {
                    true => group.number(Class::Ordered, &[BARRIER], None).map(drop),
                    false => group.run(calling(Class::Ordered, 0, BARRIER, None), |_| AtOnce).map(drop),
                };
                called.expect("a call");
            }
        }
        let here = groups[0].endpoint();
        let before = here.messages().entries();
        let next = Key { group: groups[1].id(), tag: 0, sequence: 1 << 31, slot: 0, class: Class::Ordered };
        groups[1].endpoint().messages().notify(0, next, BARRIER);
        let soon = Deadline::after(Duration::from_secs(20));
        while here.messages().entries() == before {
            assert!(!soon.expired(), "nothing comes");
            here.progress(0, Through::Messages);
        }
        here.settle();
        assert_eq!(groups[0].failure(), None);
        assert_eq!(turn(&groups[0], BARRIER).sequence, 1 << 31);
        here.settle();
        assert_eq!(groups[0].failure(), None);
        // What is over by now is told as it was.
        let over = Key { sequence: next.sequence - 1, ..next };
        groups[1].endpoint().messages().notify(0, over, BARRIER);
        while groups[0].failure().is_none() {
            assert!(!soon.expired(), "it is not told");
            here.progress(0, Through::Messages);
        }
    }
}

#[test]
fn tags_that_are_used_once_leave_nothing_behind() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    for tag in 1..1000 {
        let ending = || Scripted(Some(Ok(Completion::default())), Arc::default());
        let turn = group.start(calling(Class::Tagged, tag, BARRIER, None), |_| ending()).expect("it starts");
        assert!(turn.wait(Deadline::NEVER).expect("it ends").is_ok());
        group.run(calling(Class::PointToPoint, tag, BARRIER, None), |_| ending()).expect("it ends at once");
    }
    // Two stretches of them, of which neither is full.
    assert_eq!(group.kept_tags(), 2);
    // What is kept of messages, this rank's last call aside.
    assert!(group.endpoint().messages().entries() <= 3, "{}", group.endpoint().messages().entries());
    // A tag has its number all the same.
    let mut number = None;
    let again = |turn: &Turn| {
        number = Some(turn.sequence);
        Scripted(Some(Ok(Completion::default())), Arc::default())
    };
    group.run(calling(Class::Tagged, 500, BARRIER, None), again).expect("it ends at once");
    assert_eq!(number, Some(1));
    drop(other);
}

/// As PyTorch calls gloo: one counter for calls of all kinds, whose tags lie apart, and some of them are made
/// of two.
#[test]
fn tags_of_several_kinds_that_share_a_counter_leave_nothing_behind() {
    let [group, other] = pair(true);
    group.endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    for number in 0..5000u64 {
        let tag = (4 + number % 3) << 56 | number << 24;
        for sequence in 0..1 + number % 2 {
            let ending = |turn: &Turn| {
                assert_eq!(u64::from(turn.sequence), sequence);
                Scripted(Some(Ok(Completion::default())), Arc::default())
            };
            let turn = group.start(calling(Class::Tagged, tag, BARRIER, None), ending).expect("it starts");
            assert!(turn.wait(Deadline::NEVER).expect("it ends").is_ok());
        }
    }
    // The full stretches, and the last one.
    assert_eq!(group.kept_tags(), 2);
    assert!(group.endpoint().messages().entries() <= 3, "{}", group.endpoint().messages().entries());
    drop(other);
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
                let exchange = |mine, _| {
                    both.wait();
                    words.lock().expect("no panic")[group.rank() as usize] = mine;
                    both.wait();
                    Ok(words.lock().expect("no panic").to_vec())
                };
                let soon = Deadline::after(Duration::from_secs(20));
                group.share_memory(soon, soon, exchange).expect("the ranks share memory");
            });
        }
    });
    groups
}

/// Sharing memory fails here when others know already where this rank's board is: what they write there
/// later, if they could agree, must not be in what is at that place then.
#[test]
fn a_board_that_others_know_is_not_handed_out_again() {
    for misplaced in [false, true] {
        let [group, other] = pair(true);
        let told = std::cell::Cell::new(None);
        let exchange = |mine: [u64; 2], _| match told.get() {
            None => {
                told.set(Some(mine[0]));
                Ok(vec![mine, [if misplaced { mine[0] + 8 } else { mine[0] }, 0]])
            }
            Some(_) if misplaced => Ok(vec![mine, [1, 1]]),
            Some(_) => Err(Error::new(Status::PeerFailed, "rank 1 is gone")),
        };
        let soon = Deadline::after(Duration::from_secs(20));
        let error = group.share_memory(soon, soon, exchange).expect_err("it cannot");
        assert_eq!(error.status(), if misplaced { Status::Internal } else { Status::PeerFailed }, "{error}");
        let next =
            group.endpoint().registration().segment().allocate(BOARD_BYTES, 4096).expect("there is room");
        assert_ne!(Some(next.offset() as u64), told.get());
        drop(other);
    }
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
                let mut answer = leaf.advance(&other);
                while leaf.is_at_work() {
                    answer = leaf.advance(&other);
                }
                answer.is_ready()
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

/// Ranks with an open link.
fn linked_pair(shm: bool) -> [Arc<Group>; 2] {
    linked(pair(shm))
}

fn linked(groups: [Arc<Group>; 2]) -> [Arc<Group>; 2] {
    groups[0].endpoint().open_links(&[1], Deadline::after(Duration::from_secs(20))).expect("a link");
    groups[1].endpoint().open_links(&[0], Deadline::after(Duration::from_secs(20))).expect("a link");
    groups
}

/// Starts a message with `tag` of `len` bytes.
fn post(group: &Arc<Group>, tag: u64, len: usize, message: Message) -> Arc<Running> {
    // SAFETY: the tests keep the memory until the message has ended or is cancelled.
    begin(group, tag, len, &message.clone(), |turn| unsafe { Point::new(group, turn, message, usize::MAX) })
}

/// Starts the operation of a message with `tag` of `len` bytes.
fn begin<O: Operation + 'static>(
    group: &Arc<Group>,
    tag: u64,
    len: usize,
    message: &Message,
    make: impl FnOnce(&Turn) -> O,
) -> Arc<Running> {
    let kind = if matches!(message, Message::Send { .. }) { Kind::Send } else { Kind::Receive };
    let signature = Signature { kind, count: len as u64, ..BARRIER };
    group.start(calling(Class::PointToPoint, tag, signature, None), make).expect("it starts")
}

/// Starts a send to the other rank of a pair.
fn send(group: &Arc<Group>, tag: u64, bytes: &[u8]) -> Arc<Running> {
    let from = Source { address: bytes.as_ptr(), len: bytes.len() };
    post(group, tag, bytes.len(), Message::Send { to: 1 - group.rank(), from })
}

/// Starts a receive from the other rank of a pair.
fn receive(group: &Arc<Group>, tag: u64, bytes: &mut [u8]) -> Arc<Running> {
    let into = Destination { address: bytes.as_mut_ptr(), len: bytes.len() };
    post(group, tag, bytes.len(), Message::Receive { from: 1 - group.rank(), into })
}

fn done(running: &Running) {
    running.wait(Deadline::after(Duration::from_secs(20))).expect("in time").expect("it succeeds");
}

const FLOOD: usize = 128;
const LIMIT: usize = 1 << 20;

/// Rank 1 sends rank 0 more than it has room for, with tag 1: the messages and the sends.
fn flood(groups: &[Arc<Group>; 2]) -> (Vec<Vec<u8>>, Vec<Arc<Running>>) {
    groups[0].endpoint().messages().limit_unexpected(LIMIT);
    let messages: Vec<Vec<u8>> = (0..FLOOD).map(|i| vec![i as u8; 64 * 1024]).collect();
    let sends = messages.iter().map(|message| send(&groups[1], 1, message)).collect();
    let full = || (groups[0].endpoint().messages().unexpected_bytes() > LIMIT).then_some(());
    let wait = Deadline::after(Duration::from_secs(20));
    groups[0].endpoint().wait(wait, Through::Messages, full).expect("it fills up");
    (messages, sends)
}

/// Rank 0 takes them.
fn drain(groups: &[Arc<Group>; 2], messages: &[Vec<u8>], sends: &[Arc<Running>]) {
    for message in messages {
        let mut came = vec![0; message.len()];
        done(&receive(&groups[0], 1, &mut came));
        assert!(came == *message, "another message");
    }
    sends.iter().for_each(|send| done(send));
    assert_eq!(groups[0].endpoint().messages().unexpected_bytes(), 0);
}

#[test]
fn what_nobody_asked_for_stays_outside_and_wakes_nobody() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let endpoint = groups[0].endpoint();
        let (messages, sends) = flood(&groups);
        while endpoint.progress(0, Through::Messages) {}
        let kept = endpoint.messages().unexpected_bytes();
        assert!(kept <= LIMIT + Messages::kept(messages[0].len()), "{kept} bytes are kept");
        let mut events = Vec::new();
        endpoint.registration().bell().poll(&mut events).expect("the bell works");
        assert!(events.is_empty(), "a sleeper is woken for what it does not read: {events:?}");
        drain(&groups, &messages, &sends);
    }
}

#[test]
fn what_a_call_waits_for_is_read_though_it_comes_behind_what_nobody_asked_for() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let (messages, sends) = flood(&groups);
        // Rank 1's answer that it has the large message, or wants it, comes behind the flood.
        let (mut small, mut large) = ([0; 8], vec![0; LARGE]);
        let (word, source) = ([3; 8], vec![5; LARGE]);
        let sent = [send(&groups[1], 2, &word), send(&groups[0], 3, &source)];
        let took = [receive(&groups[1], 3, &mut large), receive(&groups[0], 2, &mut small)];
        sent.iter().chain(&took).for_each(|running| done(running));
        assert!(small == word && large == source);
        drain(&groups, &messages, &sends);
    }
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
        let large = [7; super::messages::EAGER_SHM_BYTES + 1];
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
fn a_message_whose_sender_of_the_same_process_unmapped_it_is_skipped() {
    let groups = linked_pair(true);
    let len = LARGE;
    let memory = mapped(len);
    let source = Source { address: memory.cast_const(), len };
    let given_up = post(&groups[1], 1, len, Message::Send { to: 0, from: source });
    assert!(given_up.cancel());
    unmap(memory, len);
    let mut came = vec![0; len];
    let receive = receive(&groups[0], 1, &mut came);
    let bytes = vec![9; len];
    done(&send(&groups[1], 1, &bytes));
    done(&receive);
    assert!(came == bytes);
}

/// Memory that only the tests' pages lie in, so that it can go away.
fn mapped(len: usize) -> *mut u8 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, of nothing that is there.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}

/// As if it were unmapped, but no other test's memory comes there.
fn unmap(memory: *mut u8, len: usize) {
    // SAFETY: mapped by the test, which uses it no more.
    assert_eq!(unsafe { libc::mprotect(memory.cast(), len, libc::PROT_NONE) }, 0);
}

#[test]
fn a_message_that_the_kernel_does_not_let_the_receiver_read_fails_on_both_sides_at_once() {
    let groups = linked_pair(true);
    let memory = mapped(LARGE);
    let sent = post(
        &groups[1],
        1,
        LARGE,
        Message::Send { to: 0, from: Source { address: memory.cast_const(), len: LARGE } },
    );
    // The caller breaks its promise, which is the simplest way to have the kernel refuse.
    unmap(memory, LARGE);
    let mut came = vec![0; LARGE];
    let took = receive(&groups[0], 1, &mut came);
    for (running, words) in [(took, "rank 1 ("), (sent, "from this rank's memory")] {
        let soon = Deadline::after(Duration::from_secs(10));
        let error = running.wait(soon).expect("before its own deadline").expect_err("it cannot be read");
        assert_eq!(error.status(), Status::System);
        assert!(error.text().contains(words), "{error} does not say {words}");
    }
}

#[test]
fn a_message_withdrawn_behind_a_full_ring_does_not_count() {
    let groups = linked_pair(true);
    let (mut source, flood) = (vec![7; LARGE], vec![1; 64 * 1024]);
    // By hand, so that nobody moves rank 1 in the background.
    let mut messages = groups[1].endpoint().messages();
    let (given_up, stuck) = (messages.mailbox(), messages.mailbox());
    let mut send_by_hand = |mailbox, tag, bytes: &[u8]| {
        let sequence = messages.next_in_pair(0, groups[1].id());
        let key = Key { group: groups[1].id(), tag, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: bytes.len() as u64, ..BARRIER };
        let from = Source { address: bytes.as_ptr(), len: bytes.len() };
        messages.send(0, key, signature, from, Ticket { mailbox, step: 0 });
    };
    send_by_hand(given_up, 1, &source);
    for _ in 0..FLOOD {
        send_by_hand(stuck, 2, &flood);
    }
    messages.write_out();
    assert!(messages.look(stuck).done.len() < FLOOD, "the ring is full");
    messages.cancel(given_up);
    drop(messages);
    source.fill(9);
    let mut came = vec![0; LARGE];
    let took = receive(&groups[0], 1, &mut came);
    let early = took.wait(Deadline::after(Duration::from_millis(100)));
    assert!(early.is_none(), "it took bytes that were no longer the message's: {early:?}");
    // Rank 1 moves again: the withdrawal comes through, and the next message is taken.
    let next = vec![5; LARGE];
    let sent = send(&groups[1], 1, &next);
    done(&took);
    done(&sent);
    assert!(came == next);
    let mut messages = groups[1].endpoint().messages();
    assert_eq!(messages.look(stuck).done.len(), FLOOD);
    messages.close_mailbox(stuck);
}

#[test]
fn a_receive_that_is_given_up_while_it_is_pulled_leaves_its_buffer_alone() {
    let groups = linked_pair(true);
    let (bytes, mut came) = (vec![7; LARGE], vec![0u8; LARGE]);
    let sent = send(&groups[1], 1, &bytes);
    // By hand, piece by piece.
    let mut messages = groups[0].endpoint().messages();
    let mailbox = messages.mailbox();
    let (address, len) = (came.as_mut_ptr(), LARGE);
    let signature = Signature { kind: Kind::Receive, count: LARGE as u64, ..BARRIER };
    let (into, ticket) = (Destination { address, len }, Ticket { mailbox, step: 0 });
    messages.receive_next((groups[0].id(), 1), super::pairs::From::Rank(1), signature, into, ticket);
    let soon = Deadline::after(Duration::from_secs(10));
    // SAFETY: it lies in `came`, which nobody but this thread writes.
    while unsafe { address.read_volatile() } == 0 {
        assert!(!soon.expired(), "nothing comes");
        messages.progress(1);
    }
    assert!(messages.progress(1), "there is more");
    messages.cancel(mailbox);
    drop(messages);
    // It is told that its bytes are free.
    done(&sent);
    let begun = came.iter().position(|&byte| byte == 0).expect("not all of it");
    assert!(begun > 0 && came[begun..].iter().all(|&byte| byte == 0), "{begun}");
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
