//! Messages that one side gives up, at whatever moment: nothing is kept for them, their memory is left alone,
//! and the next message is the next one.

use std::sync::Mutex;
use std::time::Instant;

use super::pieces::{PIECE, both_sides};
use super::*;
use crate::engine::messages::{EAGER_SHM_BYTES, EAGER_TCP_BYTES};
use crate::transport::ring::STANDING;
use crate::transport::service::hold_service;

/// A message that is announced, and fetched by its receiver.
const LONG: usize = EAGER_TCP_BYTES + 64;

/// Longer than anything here takes, and shorter than the deadline of a message.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

/// What each rank keeps.
fn entries(groups: &[Arc<Group>; 2]) -> [usize; 2] {
    groups.each_ref().map(|group| group.endpoint().messages().entries())
}

/// Moves both ranks until `there`.
pub(super) fn move_until(groups: &[Arc<Group>; 2], what: &str, mut there: impl FnMut() -> bool) {
    let end = soon();
    while !there() {
        assert!(!end.expired(), "{what}");
        for group in groups {
            group.endpoint().progress(0, Through::Messages);
        }
        std::thread::yield_now();
    }
}

/// A message of each kind from each rank to the other, with a tag that others have, too: each gets its own
/// bytes. What has been sent before has come after that.
fn in_step(groups: &[Arc<Group>; 2], tag: u64) {
    for (round, len) in [8, LONG].into_iter().enumerate() {
        for group in groups {
            let salt = 100 + 2 * round as u8 + group.rank() as u8;
            let (bytes, mut came) = (vec![salt; len], vec![0; len]);
            let sent = send(group, tag, &bytes);
            done(&receive(&groups[1 - group.rank() as usize], tag, &mut came));
            done(&sent);
            assert!(came == bytes, "bytes of another message: {} instead of {salt}", came[0]);
        }
    }
}

/// Linked ranks that have sent each other something, and what they keep.
pub(super) fn begun(shm: bool) -> ([Arc<Group>; 2], [usize; 2]) {
    let groups = linked_pair(shm);
    in_step(&groups, 1);
    let kept = entries(&groups);
    (groups, kept)
}

/// Ranks that have given up something keep what they kept before, wait for nothing, and are in step.
pub(super) fn nothing_is_left(groups: &[Arc<Group>; 2], before: [usize; 2], tag: u64) {
    in_step(groups, tag);
    // Entries of tables, bytes, transfers that are expected, frames that are queued.
    let left = || {
        groups.each_ref().map(|group| {
            let (messages, peer) = (group.endpoint().messages(), 1 - group.rank());
            [messages.entries(), messages.unexpected_bytes(), messages.expected(peer), messages.backlog(peer)]
        })
    };
    let due = before.map(|entries| [entries, 0, 0, 0]);
    let end = soon();
    while left() != due && !end.expired() {
        groups.iter().for_each(|group| while group.endpoint().progress(0, Through::Messages) {});
    }
    assert_eq!(left(), due, "something is left");
}

/// The operation of a message, which nobody moves on until it is told to: a rank that has not looked yet.
struct Drowsy(Point, Arc<AtomicUsize>);

impl Operation for Drowsy {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        if self.1.load(Ordering::Relaxed) == 0 { Poll::Pending } else { self.0.advance(group) }
    }

    fn abandon(&mut self, group: &Group) {
        self.0.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.0.waits_for(group)
    }
}

/// Starts a side of a message in pieces. A drowsy one stays at its first.
pub(super) fn begin_side(
    group: &Arc<Group>,
    tag: u64,
    len: usize,
    message: &Message,
    drowsy: bool,
) -> Arc<Running> {
    // SAFETY: the tests keep the memory until the message has ended or is cancelled.
    let point = |turn: &Turn| unsafe { Point::new(group, turn, message.clone(), PIECE) };
    let awake = Arc::new(AtomicUsize::new(usize::from(!drowsy)));
    begin(group, tag, len, message, |turn| Drowsy(point(turn), awake))
}

/// It ends because the other side has given up, though its own deadline is far away.
pub(super) fn is_told(running: &Running) {
    let error = running.wait(soon()).expect("the other side has told").expect_err("it has no end");
    assert_eq!(error.status(), Status::PeerFailed, "{error}");
    assert!(error.text().contains("gave up in the middle of a message"), "{error}");
}

/// Nobody has read at the sender that its message has been taken, or it has not even been said: there is no
/// room.
#[test]
fn a_send_that_has_been_taken_is_complete_when_it_is_given_up() {
    for is_full in [false, true] {
        let (groups, before) = begun(true);
        let (bytes, mut came) = (vec![3; LONG], vec![0; LONG]);
        let held = hold_service();
        let (crowd, mut crowding) = (vec![4; EAGER_SHM_BYTES], Vec::new());
        while is_full && crowding.last().is_none_or(|sent: &Arc<Running>| sent.has_ended()) {
            crowding.push(send(&groups[1], 4, &crowd));
        }
        let received = receive(&groups[1], 5, &mut came);
        let sent = send(&groups[0], 5, &bytes);
        let end = soon();
        while !received.has_ended() {
            assert!(!end.expired(), "it is not taken");
            groups[1].endpoint().progress(0, Through::Messages);
        }
        assert!(sent.cancel());
        sent.result().expect("its end").expect("its receiver has it");
        drop(held);
        assert!(came == bytes);
        for sent in crowding {
            let mut came = vec![0; crowd.len()];
            done(&receive(&groups[0], 4, &mut came));
            done(&sent);
            assert!(came == crowd);
        }
        nothing_is_left(&groups, before, 6);
    }
}

/// Those that have no number come by way of the ring.
#[test]
fn more_messages_than_can_stand_announced_come_or_are_given_up_like_others() {
    const LEN: usize = EAGER_SHM_BYTES + 1;
    let (groups, before) = begun(true);
    let bytes: Vec<_> = (0..STANDING + 16).map(|index| vec![index as u8; LEN]).collect();
    let sent: Vec<_> = bytes.iter().map(|bytes| send(&groups[0], 4, bytes)).collect();
    // Of each kind.
    let given_up = [7, STANDING + 7];
    assert!(given_up.iter().all(|&index| sent[index].cancel()));
    for (index, bytes) in bytes.iter().enumerate().filter(|(index, _)| !given_up.contains(index)) {
        let mut came = vec![0; LEN];
        done(&receive(&groups[1], 4, &mut came));
        done(&sent[index]);
        assert!(came == *bytes, "message {index}: {}", came[0]);
    }
    for index in given_up {
        let error = sent[index].result().expect("its end").expect_err("nobody gets it");
        assert_eq!(error.status(), Status::Aborted);
    }
    nothing_is_left(&groups, before, 4);
}

/// What a receive that is late would have taken while it asks what the others do is for the next one, whoever
/// moves messages.
#[test]
fn a_message_that_comes_behind_the_deadline_is_for_the_next_receive() {
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let mut came = vec![0; 8];
        let into = Destination { address: came.as_mut_ptr(), len: came.len() };
        let message = Message::Receive { from: 0, into };
        let signature = Signature { kind: Kind::Receive, count: 8, ..BARRIER };
        let timeout = Some(Duration::from_millis(20));
        // Nobody answers.
        let held = hold_service();
        let late = std::thread::scope(|scope| {
            let group = &groups[1];
            let late = scope.spawn(move || {
                // SAFETY: `came` outlives the thread.
                let make = |turn: &Turn| unsafe { Point::new(group, turn, message, PIECE) };
                group.run(calling(Class::PointToPoint, 4, signature, timeout), make)
            });
            std::thread::sleep(Duration::from_millis(150));
            done(&send(&groups[0], 4, &[7; 8]));
            let end = Deadline::after(Duration::from_millis(50));
            while !end.expired() {
                groups[1].endpoint().progress(0, Through::Messages);
            }
            drop(held);
            late.join().expect("no panic")
        });
        assert_eq!(late.expect_err("it is late").status(), Status::Timeout);
        let mut next = [0; 8];
        done(&receive(&groups[1], 4, &mut next));
        assert_eq!((next, came.as_slice()), ([7; 8], [0; 8].as_slice()));
        nothing_is_left(&groups, before, 4);
    }
}

/// An operation that waits, and notes what is done with it, and whether its group has failed by then.
struct Noting(Arc<Mutex<Vec<(&'static str, bool)>>>);

impl Noting {
    fn note(&self, group: &Group, what: &'static str) {
        self.0.lock().expect("no panic").push((what, group.failure().is_some()));
    }
}

impl Operation for Noting {
    fn advance(&mut self, _group: &Group) -> Poll<Result<Completion>> {
        Poll::Pending
    }

    fn abandon(&mut self, group: &Group) {
        self.note(group, "abandoned");
    }

    fn withdraw(&mut self, group: &Group) {
        self.note(group, "withdrawn");
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        vec![1]
    }
}

/// A stream that waits for it goes on then: whoever sees that is to see the failure, if it is everybody's.
#[test]
fn what_is_late_is_abandoned_when_its_group_has_failed() {
    for (class, is_left, due) in [
        (Class::Ordered, false, vec![("abandoned", true)]),
        // The failure of a message is its work's, unless nobody has that.
        (Class::PointToPoint, false, vec![("withdrawn", false), ("abandoned", false)]),
        (Class::PointToPoint, true, vec![("withdrawn", false), ("abandoned", true)]),
    ] {
        let groups = linked_pair(true);
        let notes: Arc<Mutex<_>> = Arc::default();
        let calling = calling(class, 0, BARRIER, Some(Duration::from_millis(20)));
        let running = groups[0].start(calling, |_| Noting(notes.clone())).expect("it starts");
        if is_left {
            running.leave_to_group();
        }
        let error = running.wait(soon()).expect("in time").expect_err("it is late");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert_eq!(*notes.lock().expect("no panic"), due, "{class:?}, left to its group: {is_left}");
    }
}

#[test]
fn what_runs_in_a_group_that_is_aborted_has_ended_when_that_returns() {
    for shm in [true, false].into_iter().cycle().take(20) {
        let groups = linked_pair(shm);
        let (bytes, mut came) = (vec![1; 8 * LONG], vec![0; 8 * LONG]);
        let sent = send(&groups[0], 4, &bytes);
        let received = receive(&groups[1], 4, &mut came);
        let in_vain = receive(&groups[1], 5, &mut []);
        let (told, tells) = std::sync::mpsc::channel();
        in_vain.on_complete(Box::new(move |result| {
            told.send((std::thread::current().id(), result)).expect("the test waits");
        }));
        groups[1].fail(Error::new(Status::Aborted, "aborted"));
        groups[1].end_all();
        // That it has ended may not have been told yet, where another thread was at it.
        let _ = received.wait(soon()).expect("in time");
        let (thread, result) = tells.recv_timeout(PATIENCE).expect("it is called back");
        assert_eq!(result.expect_err("it is aborted").status(), Status::Aborted);
        assert_ne!(thread, std::thread::current().id(), "who aborts may hold what a callback wants");
        let _ = sent.wait(soon()).expect("in time");
    }
}

/// So many that those lie dormant which wait for their turn.
#[test]
fn what_waits_for_its_turn_when_its_group_is_aborted_has_ended_when_that_returns() {
    for _ in 0..20 {
        let groups = linked_pair(true);
        let abandoned = Arc::new(AtomicUsize::new(0));
        let stuck = |_: &Turn| Scripted(None, abandoned.clone());
        let start = |_| groups[0].start(calling(Class::Ordered, 0, BARRIER, None), stuck).expect("it starts");
        let all: Vec<_> = (0..100).map(start).collect();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    groups[0].endpoint().progress(0, Through::Messages);
                }
            });
            std::thread::sleep(Duration::from_millis(2));
            groups[0].fail(Error::new(Status::Aborted, "aborted"));
            groups[0].end_all();
            let ended = abandoned.load(Ordering::Relaxed);
            over.store(true, Ordering::Relaxed);
            assert_eq!(ended, all.len());
        });
    }
}

#[test]
fn messages_that_nobody_has_taken_are_given_up_without_a_trace() {
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let (bytes, mut came) = (vec![1; LONG], vec![0; LONG]);
        for tag in 10..1010 {
            // A receive that nothing comes for, and a long send that nobody asks for, which the other has
            // heard of or not.
            assert!(receive(&groups[1], tag, &mut came[..8]).cancel());
            let sent = send(&groups[0], tag, &bytes);
            if tag % 2 == 0 {
                groups[1].endpoint().progress(0, Through::Messages);
            }
            assert!(sent.cancel());
        }
        nothing_is_left(&groups, before, 10);
    }
}

#[test]
fn what_has_not_begun_at_its_deadline_is_for_the_next_receive_or_was_never_sent() {
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let timeout = Some(Duration::from_millis(20));
        let (bytes, mut never) = (vec![1; LONG], vec![vec![0; LONG]; 20]);
        // Each with a tag of its own, all at a time: who is late asks the other what it does first.
        let mut late = Vec::new();
        for (tag, never) in (10..).zip(&mut never) {
            let messages = both_sides(&bytes, never, false);
            // Only one side of each.
            let (group, message) = (&groups[tag as usize % 2], &messages[tag as usize % 2]);
            let kind = if tag % 2 == 0 { Kind::Send } else { Kind::Receive };
            let signature = Signature { kind, count: LONG as u64, ..BARRIER };
            // SAFETY: the memory is kept until all have ended.
            let make = |turn: &Turn| unsafe { Point::new(group, turn, message.clone(), PIECE) };
            late.push(
                group.start(calling(Class::PointToPoint, tag, signature, timeout), make).expect("it starts"),
            );
        }
        for running in late {
            let error = running.wait(soon()).expect("in time").expect_err("nobody is there");
            assert_eq!(error.status(), Status::Timeout, "{error}");
        }
        assert!(groups.iter().all(|group| group.failure().is_none()), "one message is no end of the group");
        // What comes late is for the next receive, as it would be if that were the first.
        let (early, mut came) = ([7; 16], [0; 16]);
        done(&send(&groups[0], 11, &early));
        done(&receive(&groups[1], 11, &mut came));
        assert_eq!(came, early);
        for tag in 10..30 {
            in_step(&groups, tag);
        }
        assert!(never.iter().flatten().all(|&byte| byte == 0), "written after it was given up");
        nothing_is_left(&groups, before, 10);
    }
}

#[test]
fn a_send_of_which_a_part_has_gone_is_complete_when_it_is_given_up() {
    // Sent unasked.
    const LEN: usize = 60_000;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        // Nobody reads: at some point a part of a message fits.
        let held = hold_service();
        let mut bytes = Vec::new();
        let partly = loop {
            bytes.push(vec![bytes.len() as u8; LEN]);
            let sent = send(&groups[0], 4, bytes.last().expect("a message"));
            if !sent.has_ended() {
                break sent;
            }
        };
        let mut last = vec![0xee; LEN];
        let not_at_all = send(&groups[0], 4, &last);
        assert!(not_at_all.cancel() && partly.cancel());
        let aborted = not_at_all.result().expect("its end").expect_err("nothing of it has gone");
        assert_eq!(aborted.status(), Status::Aborted);
        // The memory is the caller's again.
        partly.result().expect("its end").expect("the rest of it goes from a copy");
        let due = bytes.clone();
        bytes.iter_mut().chain([&mut last]).for_each(|bytes| bytes.fill(0xdd));
        drop(held);
        for due in due {
            let mut came = vec![0; LEN];
            done(&receive(&groups[1], 4, &mut came));
            assert!(came == due, "shm: {shm}, {} instead of {}", came[LEN - 1], due[0]);
        }
        nothing_is_left(&groups, before, 4);
    }
}

#[test]
fn receives_whose_messages_are_withdrawn_take_the_next_ones_in_the_order_of_the_calls() {
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let mut came = [(); 2].map(|()| vec![9u8; LONG]);
        let given_up = vec![7; LONG];
        // Nobody else moves them: what is taken back has not come.
        let held = hold_service();
        let took = came.each_mut().map(|into| receive(&groups[1], 4, into));
        let sent = [(); 2].map(|()| send(&groups[0], 4, &given_up));
        for sent in sent {
            assert!(sent.cancel(), "nobody has taken it");
        }
        // Rank 1 learns of both messages, and that they are withdrawn.
        while groups[1].endpoint().progress(0, Through::Messages) {}
        drop(held);
        let next = [1, 2].map(|value| vec![value; LONG]);
        let sent = next.each_ref().map(|bytes| send(&groups[0], 4, bytes));
        took.iter().chain(&sent).for_each(|running| done(running));
        assert_eq!(came.each_ref().map(|came| came[0]), [1, 2], "shm: {shm}");
        assert!(came == next);
        nothing_is_left(&groups, before, 4);
    }
}

#[test]
fn a_peer_that_does_not_read_is_not_sent_heaps_of_what_was_given_up() {
    let groups = linked_pair(true);
    let endpoint = groups[0].endpoint();
    let bytes = vec![1; LONG];
    // By hand, so that nobody moves rank 1: more than its ring holds.
    let mut messages = endpoint.messages();
    for _ in 0..20_000 {
        let mailbox = messages.mailbox();
        let sequence = messages.next_in_pair(1, groups[0].id());
        let key = Key { group: groups[0].id(), tag: 1, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: LONG as u64, ..BARRIER };
        let from = Source { address: bytes.as_ptr(), len: LONG };
        messages.send(1, key, signature, from, Ticket { mailbox, step: 0 });
        messages.write_out();
        messages.cancel(mailbox);
    }
    assert!(messages.backlog(1) <= 2, "{} frames wait", messages.backlog(1));
    drop(messages);
    let before = [1, 0];
    let mut came = vec![0; LONG];
    let sent = send(&groups[0], 1, &bytes);
    done(&receive(&groups[1], 1, &mut came));
    done(&sent);
    assert!(came == bytes);
    move_until(&groups, "something is kept", || entries(&groups) == before);
}

#[test]
fn an_answer_to_a_send_that_is_given_up_meanwhile_is_not_kept() {
    let (groups, before) = begun(false);
    for round in 0..200 {
        let (bytes, next) = (vec![1; LONG], vec![round as u8; LONG]);
        let mut came = vec![0; LONG];
        // By hand, so that rank 0 does not see the answer before it gives up.
        let mut messages = groups[0].endpoint().messages();
        let mailbox = messages.mailbox();
        let sequence = messages.next_in_pair(1, groups[0].id());
        let key = Key { group: groups[0].id(), tag: 1, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: LONG as u64, ..BARRIER };
        let from = Source { address: bytes.as_ptr(), len: LONG };
        messages.send(1, key, signature, from, Ticket { mailbox, step: 0 });
        messages.write_out();
        let announced = Deadline::after(PATIENCE);
        while entries_of(&groups[1]) == before[1] {
            assert!(!announced.expired(), "it is announced");
            groups[1].endpoint().messages().serve(0, 0);
        }
        let took = receive(&groups[1], 1, &mut came);
        messages.cancel(mailbox);
        drop(messages);
        // The receive is for the next one.
        let sent = send(&groups[0], 1, &next);
        done(&took);
        done(&sent);
        assert!(came == next, "bytes of what was given up");
    }
    nothing_is_left(&groups, before, 1);
}

pub(super) fn entries_of(group: &Group) -> usize {
    group.endpoint().messages().entries()
}

#[test]
fn a_receive_that_is_given_up_in_its_first_piece_tells_the_sender() {
    const LEN: usize = 40 * PIECE;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let (source, mut came) = (vec![7; LEN], vec![0; LEN]);
        for looked in [false, true] {
            let [out, into] = both_sides(&source, &mut came, false);
            let sends = begin_side(&groups[0], 4, LEN, &out, false);
            move_until(&groups, "it is announced", || entries_of(&groups[1]) > before[1]);
            // It takes the message at once.
            let receives = begin_side(&groups[1], 4, LEN, &into, true);
            if looked {
                let whole = || came_is_there(&into, PIECE - 1);
                move_until(&groups, "the first piece comes", whole);
            }
            assert!(receives.cancel());
            // SAFETY: the message is over on this side: nobody writes there any more.
            let then = unsafe { std::slice::from_raw_parts(into.memory().0, LEN) }.to_vec();
            is_told(&sends);
            nothing_is_left(&groups, before, 4);
            assert!(came == then, "written after it was given up");
            came.fill(0);
        }
    }
}

/// Whether what is received has come so far.
pub(super) fn came_is_there(message: &Message, at: usize) -> bool {
    // SAFETY: inside the buffer, which the test keeps and reads nowhere else meanwhile.
    unsafe { message.memory().0.add(at).read_volatile() != 0 }
}

#[test]
fn what_comes_after_half_of_a_message_is_read_into_nothing() {
    let shm = Options { tcp: false, ring_bytes: 16 * 1024, ..Options::default() };
    let tcp = Options { shm: false, ..Options::default() };
    // More than there is room for on the way: sent unasked; in parts, through the ring; in parts, over all
    // connections.
    for (len, options) in [(60_000, shm.clone()), (LONG, Options { pull: false, ..shm }), (48 << 20, tcp)] {
        let groups = linked(pair_with(&options));
        in_step(&groups, 1);
        let before = entries(&groups);
        let (source, mut came) = (vec![7; len], vec![0u8; len]);
        // By hand, with both ranks locked: nothing moves but what is told to.
        let [mut sender, mut receiver] = groups.each_ref().map(|group| group.endpoint().messages());
        let [sends, receives] = [sender.mailbox(), receiver.mailbox()];
        let group = groups[0].id();
        let sequence = sender.next_in_pair(1, group);
        let key = Key { group, tag: 4, sequence, slot: 0, class: Class::PointToPoint };
        let signature = |kind| Signature { kind, count: len as u64, ..BARRIER };
        let from = Source { address: source.as_ptr(), len };
        sender.send(1, key, signature(Kind::Send), from, Ticket { mailbox: sends, step: 0 });
        sender.write_out();
        let address = came.as_mut_ptr();
        let (into, ticket) = (Destination { address, len }, Ticket { mailbox: receives, step: 0 });
        let rank = crate::engine::pairs::From::Rank(0);
        receiver.receive_next((group, 4), rank, signature(Kind::Receive), into, ticket);
        receiver.write_out();
        let end = soon();
        // SAFETY: the first byte and the last, which nobody but this thread writes.
        let [first, last] = [0, len - 1].map(|at| move || unsafe { address.add(at).read_volatile() });
        while first() == 0 {
            assert!(!end.expired(), "nothing comes");
            sender.serve(1, 0);
            receiver.serve(0, 0);
        }
        assert!(last() == 0, "all of it has come");
        receiver.cancel(receives);
        came.fill(9);
        while sender.look(sends).done.is_empty() {
            assert!(!end.expired(), "the sender waits for a receive that is over");
            sender.serve(1, 0);
            receiver.serve(0, 0);
        }
        sender.close_mailbox(sends);
        drop((sender, receiver));
        nothing_is_left(&groups, before, 4);
        let written = came.iter().filter(|&&byte| byte != 9).count();
        assert_eq!(written, 0, "bytes were written to memory that the receive had let go of");
    }
}

#[test]
fn nobody_writes_to_a_receive_or_reads_a_send_that_is_over() {
    // In one piece, and in several.
    let lengths = [PIECE, 5 * PIECE];
    let mut midway = [0; 2];
    for (shm, len) in [true, false].into_iter().flat_map(|shm| lengths.map(|len| (shm, len))) {
        let (groups, before) = begun(shm);
        for round in 0..24 {
            let (from, into) = (mapped(len), mapped(len));
            let (out, target) = (
                Message::Send { to: 1, from: Source { address: from.cast_const(), len } },
                Message::Receive { from: 0, into: Destination { address: into, len } },
            );
            let sends = begin_side(&groups[0], 4, len, &out, false);
            let receives = begin_side(&groups[1], 4, len, &target, false);
            let until = Instant::now() + Duration::from_micros(40 * round);
            while Instant::now() < until {
                groups[round as usize % 2].endpoint().progress(0, Through::Messages);
            }
            // One gives up and lets go of its memory; the other goes on, and whoever touched that memory
            // would end this process, or its link.
            let sides = [(&sends, from), (&receives, into)];
            let (gives_up, memory) = sides[round as usize / 2 % 2];
            let (other, others) = sides[1 - round as usize / 2 % 2];
            midway[usize::from(shm)] += usize::from(gives_up.cancel());
            unmap(memory, len);
            if Arc::ptr_eq(gives_up, &sends) && gives_up.result().expect("its end").is_ok() {
                // All of it has gone, or goes.
                done(other);
            }
            other.wait(Deadline::after(Duration::from_millis(2)));
            other.cancel();
            unmap(others, len);
            in_step(&groups, 4);
        }
        nothing_is_left(&groups, before, 4);
    }
    assert!(midway.iter().all(|&midway| midway > 0), "each was over before it was given up: {midway:?}");
}

#[test]
fn a_receive_that_ends_by_its_deadline_is_not_written_to_afterwards() {
    const LEN: usize = 5 * PIECE;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let (source, into) = (vec![7; LEN], mapped(LEN));
        let target = Message::Receive { from: 0, into: Destination { address: into, len: LEN } };
        let out = Message::Send { to: 1, from: Source { address: source.as_ptr(), len: LEN } };
        let timeout = Some(Duration::from_millis(30));
        let signature = Signature { kind: Kind::Receive, count: LEN as u64, ..BARRIER };
        // The sender stays at its first piece until the receiver has given up.
        let awake = Arc::new(AtomicUsize::new(0));
        // SAFETY: the memory is kept until the message has ended.
        let point = |turn: &Turn| unsafe { Point::new(&groups[0], turn, out.clone(), PIECE) };
        let sends = begin(&groups[0], 4, LEN, &out, |turn| Drowsy(point(turn), awake.clone()));
        move_until(&groups, "it is announced", || entries_of(&groups[1]) > before[1]);
        // SAFETY: as above.
        let make = |turn: &Turn| unsafe { Point::new(&groups[1], turn, target.clone(), PIECE) };
        let receives =
            groups[1].start(calling(Class::PointToPoint, 4, signature, timeout), make).expect("it starts");
        let error = receives.wait(soon()).expect("in time").expect_err("no more comes");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        unmap(into, LEN);
        awake.store(1, Ordering::Relaxed);
        is_told(&sends);
        nothing_is_left(&groups, before, 4);
    }
}

#[test]
fn short_messages_that_nobody_asks_for_count_with_all_that_they_take() {
    const LIMIT: usize = 64 * 1024;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        groups[1].endpoint().messages().limit_unexpected(LIMIT);
        let words: Vec<[u8; 8]> = (0..1000u64).map(u64::to_le_bytes).collect();
        words.iter().for_each(|word| done(&send(&groups[0], 9, word)));
        move_until(&groups, "they come", || entries_of(&groups[1]) > before[1]);
        while groups[1].endpoint().progress(0, Through::Messages) {}
        // Each is in two tables.
        let kept = (entries_of(&groups[1]) - before[1]) / 2;
        assert!(kept <= LIMIT / 200, "{kept} messages are kept");
        for word in &words {
            let mut came = [0; 8];
            done(&receive(&groups[1], 9, &mut came));
            assert_eq!(came, *word);
        }
        nothing_is_left(&groups, before, 9);
    }
}
