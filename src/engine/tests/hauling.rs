//! Long messages over TCP that several threads move.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::*;
use crate::engine::endpoint::lock;
use crate::engine::messages::Remains;
use crate::engine::wire::{Frame, FrameKind};
use crate::transport::service::hold_service;

/// Shorter than what a sleeper sleeps at most: who needs longer has not been woken.
const LOST: Duration = Duration::from_secs(10);

/// Threads of each rank, the waiting one among them.
const THREADS: usize = 4;

/// Helpers are found by their name in this process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = lock(&ALONE);
    // Those of the test before may be about to end.
    count_helpers(0);
    alone
}

/// Two linked ranks with several threads each. The second lane of each thread is one more than there are
/// threads.
fn threaded_pair() -> [Arc<Group>; 2] {
    let (tcp_streams, tcp_threads) = (Some(THREADS + 1), Some(THREADS));
    linked(pair_with(&Options { shm: false, tcp_streams, tcp_threads, ..Options::default() }))
}

/// The process's helpers: their processor time so far, in ticks.
fn helpers() -> Vec<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the kernel's list");
    let stat = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("stat")).ok() // It may have ended.
    };
    let of_helper = |stat: String| {
        let fields: Vec<&str> = stat.split_once("(unisono-helper) ")?.1.split(' ').collect();
        Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
    };
    tasks.filter_map(stat).filter_map(of_helper).collect()
}

/// How many helpers there are, as soon as it is so many: they have their name when they run.
fn count_helpers(expected: usize) -> usize {
    let end = Deadline::after(LOST);
    while helpers().len() != expected && !end.expired() {
        std::thread::sleep(Duration::from_millis(1));
    }
    helpers().len()
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ at >> 8 ^ at >> 16 ^ salt) as u8).collect()
}

fn end_in_time(running: &Running) {
    running
        .wait(Deadline::after(LOST))
        .expect("nobody sleeps while there is something to move")
        .expect("it succeeds");
}

#[test]
fn long_messages_both_ways_come_whole_by_several_threads() {
    let _alone = alone();
    let groups = threaded_pair();
    // Unasked; a piece for some lanes; for each; several for each, and a short one behind them.
    let lengths = [1000, 256 * 1024 + 1, 1 << 20, (9 << 20) + 5];
    for round in 0..10 {
        let sources: Vec<Vec<u8>> = lengths.iter().map(|&len| pattern(len, len + round)).collect();
        let mut came: Vec<Vec<Vec<u8>>> = vec![lengths.iter().map(|&len| vec![0; len]).collect(); 2];
        let mut all = Vec::new();
        for (group, into) in groups.iter().zip(&mut came) {
            for (tag, (source, into)) in sources.iter().zip(into).enumerate() {
                all.extend([send(group, tag as u64, source), receive(group, tag as u64, into)]);
            }
        }
        all.iter().for_each(|running| end_in_time(running));
        assert!(came.iter().all(|came| *came == sources), "other bytes");
    }
    assert_eq!(count_helpers(2 * (THREADS - 1)), 2 * (THREADS - 1));
}

#[test]
fn no_helper_touches_the_memory_of_a_message_that_was_given_up() {
    let _alone = alone();
    let groups = threaded_pair();
    let len = 16 << 20;
    let mut midway = 0;
    for round in 0..20 {
        let (from, into) = (mapped(len), mapped(len));
        let source = Source { address: from.cast_const(), len };
        let target = Destination { address: into, len };
        let sent = post(&groups[0], 1, len, Message::Send { to: 1, from: source });
        let came = post(&groups[1], 1, len, Message::Receive { from: 0, into: target });
        // From before the first byte to behind the last.
        let until = Instant::now() + Duration::from_micros(400 * round);
        while Instant::now() < until {
            groups[round as usize % 2].endpoint().progress(0, Through::Messages);
        }
        midway += usize::from(sent.cancel());
        came.cancel();
        // Whoever touched it would break its connection.
        unmap(from, len);
        unmap(into, len);
        let (bytes, mut word) = (pattern(1 << 20, 3), vec![0; 1 << 20]);
        let after = [send(&groups[0], 2, &bytes), receive(&groups[1], 2, &mut word)];
        after.iter().for_each(|running| end_in_time(running));
        assert!(word == bytes, "other bytes");
    }
    assert!(midway > 0, "each was over before it was given up");
}

#[test]
fn what_a_helper_has_found_of_a_withdrawn_message_is_not_written_where_the_next_goes() {
    const LEN: usize = 1 << 20;
    let _alone = alone();
    let groups = threaded_pair();
    let (bytes, mut came) = (pattern(LEN, 4), vec![0; LEN]);
    let held = hold_service();
    // By hand: announced, and withdrawn when the receiver is ready for it.
    let mut messages = groups[0].endpoint().messages();
    let (group, mailbox) = (groups[0].id(), messages.mailbox());
    let key =
        Key { group, tag: 1, sequence: messages.next_in_pair(1, group), slot: 0, class: Class::PointToPoint };
    let signature = Signature { kind: Kind::Send, count: LEN as u64, ..BARRIER };
    let from = Source { address: bytes.as_ptr(), len: LEN };
    messages.send(1, key, signature, from, Ticket { mailbox, step: 0 });
    messages.write_out();
    drop(messages);
    let received = receive(&groups[1], 1, &mut came);
    let intake = groups[1].endpoint().messages().intake(0);
    let moves_until = |is_there: &dyn Fn() -> bool| {
        let end = Deadline::after(LOST);
        while !is_there() {
            assert!(!end.expired(), "it does not come");
            groups[1].endpoint().progress(0, Through::Messages);
        }
    };
    moves_until(&|| intake.find(&key).is_some());
    let found = intake.find(&key).expect("it is open");
    groups[0].endpoint().messages().cancel(mailbox);
    moves_until(&|| intake.find(&key).is_none());
    let (kind, total) = (FrameKind::Data, LEN as u64);
    let piece = Frame { kind, key, signature, total, offset: 0, length: 4096, announced: 0 };
    assert!(found.begin(&piece).is_none(), "the receive waits for another message");
    drop(held);
    let sent = send(&groups[0], 1, &bytes);
    [sent, received].iter().for_each(|running| end_in_time(running));
    assert!(came == bytes, "other bytes");
}

#[test]
fn a_send_that_a_helper_has_written_whole_is_complete_when_it_is_given_up() {
    let _alone = alone();
    let groups = threaded_pair();
    let (held, bytes) = (hold_service(), pattern(1000, 5));
    let mut messages = groups[0].endpoint().messages();
    let (group, mailbox) = (groups[0].id(), messages.mailbox());
    let sequence = messages.next_in_pair(1, group);
    let key = Key { group, tag: 1, sequence, slot: 0, class: Class::PointToPoint };
    let signature = Signature { kind: Kind::Send, count: 1000, ..BARRIER };
    let from = Source { address: bytes.as_ptr(), len: bytes.len() };
    messages.send(1, key, signature, from, Ticket { mailbox, step: 0 });
    // By whoever hauls the lane: it has yet to tell.
    let hauled = messages.lanes(1)[0].lock().haul(&|| false);
    assert!(hauled.moved && hauled.tells);
    assert_eq!(messages.cancel(mailbox), Remains::Whole);
    drop((messages, held));
    let mut came = vec![0; 1000];
    end_in_time(&receive(&groups[1], 1, &mut came));
    assert!(came == bytes, "other bytes");
}

#[test]
fn a_word_is_there_with_its_frame_whoever_looks_at_the_lane_next() {
    let _alone = alone();
    let groups = threaded_pair();
    let _held = hold_service();
    let key = |tag| Key { group: groups[0].id(), tag, sequence: 0, slot: 1, class: Class::Tagged };
    let signature = Signature { kind: Kind::Barrier, ..BARRIER };
    // One that is awaited, and one that nobody has asked for yet.
    let mut messages = groups[1].endpoint().messages();
    let mailbox = messages.mailbox();
    let nothing = Destination { address: std::ptr::null_mut(), len: 0 };
    messages.receive(0, key(1), signature, nothing, Ticket { mailbox, step: 1 });
    for tag in [1, 2] {
        groups[0].endpoint().messages().notify(1, key(tag), signature);
        let end = Deadline::after(LOST);
        while !messages.read_frame(0, 0) {
            assert!(!end.expired(), "it does not come");
        }
    }
    messages.receive(0, key(2), signature, nothing, Ticket { mailbox, step: 2 });
    assert_eq!(messages.look(mailbox).done, [1, 2]);
    messages.cancel(mailbox);
}

#[test]
fn helpers_sleep_while_a_message_is_stuck_and_go_on_when_it_is_not() {
    let _alone = alone();
    let groups = threaded_pair();
    let (bytes, mut came) = (pattern(64 << 20, 1), vec![0; 64 << 20]);
    let receive = receive(&groups[1], 1, &mut came);
    let sent = send(&groups[0], 1, &bytes);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| end_in_time(&sent));
        let begun = Deadline::after(LOST);
        while helpers().len() < 2 * (THREADS - 1) && !begun.expired() {
            std::thread::yield_now();
        }
        // Nobody of rank 1 reads.
        let lanes = groups[1].endpoint().messages().lanes(0);
        let stuck: Vec<_> = lanes.iter().map(|lane| lane.lock()).collect();
        std::thread::sleep(Duration::from_millis(100));
        let before: u64 = helpers().iter().sum();
        std::thread::sleep(Duration::from_millis(500));
        let ticks = helpers().iter().sum::<u64>() - before;
        assert!(!sending.is_finished(), "it was over before it was stuck");
        drop(stuck);
        assert!(ticks <= 5, "{ticks} ticks of processor time in half a second");
        sending.join().expect("it is sent");
    });
    end_in_time(&receive);
    assert!(came == bytes, "other bytes");
}

#[test]
fn helpers_end_with_their_endpoint() {
    let _alone = alone();
    let groups = threaded_pair();
    let (bytes, mut came) = (pattern(1 << 20, 2), vec![0; 1 << 20]);
    let both = [send(&groups[0], 1, &bytes), receive(&groups[1], 1, &mut came)];
    both.iter().for_each(|running| end_in_time(running));
    assert_eq!(count_helpers(2 * (THREADS - 1)), 2 * (THREADS - 1));
    drop((both, groups));
    assert_eq!(count_helpers(0), 0);
}
