//! Messages that are longer than a piece.

use std::time::Instant;

use super::*;
use crate::engine::point::{Pieces, cut};
use crate::transport::service::Announced;

/// Bytes of a piece: more than is sent unasked.
pub(super) const PIECE: usize = 320 * 1024;

/// The two sides of a message between a pair, from rank 0 to rank 1.
pub(super) fn both_sides(from: &[u8], into: &mut [u8], any: bool) -> [Message; 2] {
    let (from, into) = (
        Source { address: from.as_ptr(), len: from.len() },
        Destination { address: into.as_mut_ptr(), len: into.len() },
    );
    let receive = match any {
        true => Message::ReceiveAny { of: None, into },
        false => Message::Receive { from: 0, into },
    };
    [Message::Send { to: 1, from }, receive]
}

#[test]
fn long_messages_come_whole_in_pieces_and_in_their_order() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        // More pieces than are under way at a time; two pieces; one; nearly two.
        let lengths = [20 * PIECE + 1, 2 * PIECE, PIECE, 2 * PIECE - 64, 3 * PIECE];
        let sources: Vec<Vec<u8>> =
            lengths.iter().map(|&len| (0..len).map(|at| (at ^ at >> 8 ^ len) as u8).collect()).collect();
        let mut came: Vec<Vec<u8>> = lengths.iter().map(|&len| vec![0; len]).collect();
        let mut all = Vec::new();
        for (index, (source, into)) in sources.iter().zip(&mut came).enumerate() {
            for (group, message) in groups.iter().zip(both_sides(source, into, index % 2 == 1)) {
                let side = message.clone();
                // SAFETY: the memory is kept until all have ended.
                let make = |turn: &Turn| unsafe { Point::new(group, turn, message, PIECE) };
                all.push((index, begin(group, 4, source.len(), &side, make)));
            }
        }
        for (index, running) in all {
            let end = running.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
            assert!(end.expect("it succeeds").source.is_none_or(|source| source == 0), "message {index}");
        }
        assert!(came == sources, "other bytes");
    }
}

/// A side of a message whose pieces behind the first are under way together, and are looked at from the last
/// on.
struct Abreast {
    pieces: Pieces,
    turn: Turn,
    address: usize,
    len: usize,
    next: u32,
    current: Vec<Box<dyn Operation>>,
    /// How many were under way at once, at most.
    most: Arc<AtomicUsize>,
}

impl Operation for Abreast {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let cut = cut(self.len, PIECE);
        loop {
            // The first by itself.
            let is_first = |next, under_way: usize| next == 1 && under_way > 0;
            while self.next < cut.pieces()
                && self.current.len() < 3
                && !is_first(self.next, self.current.len())
            {
                let piece = cut.piece(self.next);
                let address = (self.address + piece.start as usize) as *mut u8;
                // SAFETY: the test keeps the memory until both sides have ended.
                self.current.push(unsafe { self.pieces.next(group, &self.turn, piece, address) }?);
                self.next += 1;
            }
            self.most.fetch_max(self.current.len(), Ordering::Relaxed);
            let before = self.current.len();
            for index in (0..before).rev() {
                if let Poll::Ready(result) = self.current[index].advance(group) {
                    result?;
                    drop(self.current.remove(index));
                }
            }
            if self.current.is_empty() && self.next == cut.pieces() {
                return Poll::Ready(Ok(Completion::default()));
            }
            if self.current.len() == before {
                return Poll::Pending;
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        self.current.iter_mut().for_each(|piece| piece.abandon(group));
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        Vec::new()
    }
}

#[test]
fn pieces_behind_the_first_go_together_and_come_each_to_its_place() {
    const LEN: usize = 7 * PIECE + 5;
    let source: Vec<u8> = (0..LEN).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    for shm in [true, false] {
        let groups = linked_pair(shm);
        for abreast in [[true, true], [true, false], [false, true]] {
            let mut came = vec![0; LEN];
            let most = Arc::new(AtomicUsize::new(0));
            let mut all = Vec::new();
            for ((group, message), abreast) in
                groups.iter().zip(both_sides(&source, &mut came, false)).zip(abreast)
            {
                let side = message.clone();
                all.push(if abreast {
                    begin(group, 4, LEN, &side, |turn: &Turn| Abreast {
                        address: message.memory().0 as usize,
                        pieces: Pieces::new(message, PIECE, None),
                        turn: *turn,
                        len: LEN,
                        next: 0,
                        current: Vec::new(),
                        most: most.clone(),
                    })
                } else {
                    // SAFETY: the memory is kept until all have ended.
                    begin(group, 4, LEN, &side, |turn: &Turn| unsafe {
                        Point::new(group, turn, message, PIECE)
                    })
                });
            }
            for running in all {
                let end = running.wait(Deadline::after(Duration::from_secs(20))).expect("in time");
                end.expect("it succeeds");
            }
            assert!(came == source, "other bytes, shm: {shm}, {abreast:?}");
            assert_eq!(most.load(Ordering::Relaxed), 3);
        }
    }
}

/// A side of a message that stops after its first piece.
struct Stopped {
    first: Box<dyn Operation>,
    _pieces: Pieces,
    stopped: Arc<AtomicUsize>,
}

impl Operation for Stopped {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        if self.stopped.load(Ordering::Relaxed) == 0
            && let Poll::Ready(result) = self.first.advance(group)
        {
            result.expect("the first piece is taken");
            self.stopped.store(1, Ordering::Relaxed);
        }
        Poll::Pending
    }

    fn abandon(&mut self, _group: &Group) {}

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        Vec::new()
    }
}

/// Starts a side that stops after its first piece: and how many of these it has had.
pub(super) fn begin_stopped(
    group: &Arc<Group>,
    tag: u64,
    message: &Message,
) -> (Arc<Running>, Arc<AtomicUsize>) {
    let stopped = Arc::new(AtomicUsize::new(0));
    let (address, len) = message.memory();
    let mut pieces = Pieces::new(message.clone(), PIECE, None);
    let running = begin(group, tag, len, message, |turn: &Turn| {
        // SAFETY: the tests keep the memory until the message has ended or is cancelled.
        let first = unsafe { pieces.next(group, turn, cut(len, PIECE).piece(0), address) };
        Stopped { first: first.expect("it begins"), _pieces: pieces, stopped: stopped.clone() }
    });
    (running, stopped)
}

#[test]
fn who_gives_up_in_the_middle_of_a_message_is_told_of() {
    const LEN: usize = 4 * PIECE;
    for (shm, stops) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let groups = linked_pair(shm);
        let (source, mut came) = (vec![7; LEN], vec![0; LEN]);
        let entries = || groups.each_ref().map(|group| group.endpoint().messages().entries());
        let [mut before, mut after] = [[0; 2]; 2];
        // The second time, nothing may have been left by the first.
        for round in [&mut before, &mut after] {
            let sides = both_sides(&source, &mut came, false);
            let (other, message) = (&groups[1 - stops], sides[1 - stops].clone());
            let (gives_up, stopped) = begin_stopped(&groups[stops], 4, &sides[stops]);
            // SAFETY: the memory is kept until both have ended.
            let make = |turn: &Turn| unsafe { Point::new(other, turn, message, PIECE) };
            let is_told = begin(other, 4, LEN, &sides[1 - stops], make);
            let first_is_there = || (stopped.load(Ordering::Relaxed) > 0).then_some(());
            let wait = Deadline::after(Duration::from_secs(20));
            groups[stops].endpoint().wait(wait, Through::Messages, first_is_there).expect("in time");
            assert!(gives_up.cancel());
            let told = Instant::now();
            let other = is_told.wait(wait).expect("in time").expect_err("it has no end");
            assert!(
                told.elapsed() < Duration::from_secs(10),
                "a sleeper has not looked up before it would by itself"
            );
            assert_eq!(other.status(), Status::PeerFailed);
            assert!(other.text().contains("gave up in the middle of a message"), "{other}");
            // The pair is in step.
            let mut word = [0; 8];
            let sent = send(&groups[0], 4, &[5; 8]);
            done(&receive(&groups[1], 4, &mut word));
            done(&sent);
            assert_eq!(word, [5; 8]);
            *round = entries();
        }
        assert_eq!(before, after, "something is left, shm: {shm}, {stops} stops");
    }
}

#[test]
fn a_message_that_ends_with_its_group_ends_with_the_failure_of_the_group() {
    for shm in [true, false] {
        let groups = linked_pair(shm);
        let (source, mut came) = (vec![7; 4 * PIECE], vec![0; 4 * PIECE]);
        let [send, receive] = both_sides(&source, &mut came, false);
        let (sends, stopped) = begin_stopped(&groups[0], 4, &send);
        let side = receive.clone();
        // SAFETY: the memory is kept until both have ended.
        let make = |turn: &Turn| unsafe { Point::new(&groups[1], turn, receive, PIECE) };
        let receives = begin(&groups[1], 4, source.len(), &side, make);
        let first_is_there = || (stopped.load(Ordering::Relaxed) > 0).then_some(());
        let wait = Deadline::after(Duration::from_secs(20));
        groups[0].endpoint().wait(wait, Through::Messages, first_is_there).expect("in time");
        // The news takes its time: longer than a word that the sender has given up would be believed.
        let cause = Error::new(Status::Cuda, "the device is gone");
        assert!(groups[0].latch(&cause, Announced::default));
        // Unless it has ended: the library may have looked at it meanwhile.
        sends.cancel();
        assert_eq!(receives.wait(Deadline::after(Duration::from_millis(400))), None);
        groups[0].endpoint().tell_members(&groups[0], &cause).wait(wait);
        let error = receives.wait(wait).expect("in time").expect_err("the group has failed");
        assert_eq!(error.status(), Status::Cuda, "{error}");
    }
}
