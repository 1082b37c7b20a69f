//! Messages of several pieces that one side gives up in the middle: the other is told of it, whenever the word
//! comes, and nothing is left.

use std::collections::VecDeque;

use super::given_up::*;
use super::pieces::{PIECE, begin_stopped, both_sides};
use super::*;
use crate::engine::messages::{RECEIVER_GAVE_UP, SENDER_GAVE_UP};
use crate::engine::point::{DOUBT, Pieces, cut};

#[test]
fn a_send_that_is_given_up_before_it_knows_that_its_first_piece_is_taken_tells_the_receiver() {
    const LEN: usize = 4 * PIECE;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let (source, mut came) = (vec![7; LEN], vec![0; LEN]);
        for _ in 0..3 {
            came.fill(0);
            let [out, into] = both_sides(&source, &mut came, false);
            let sends = begin_side(&groups[0], 4, LEN, &out, true);
            let receives = begin_side(&groups[1], 4, LEN, &into, false);
            // All of the first piece is there, and rank 0 has heard of it or has not.
            move_until(&groups, "the first piece comes", || came_is_there(&into, PIECE - 1));
            assert!(sends.cancel());
            is_told(&receives);
            nothing_is_left(&groups, before, 4);
        }
    }
}

#[test]
fn a_receive_that_is_given_up_when_the_sender_has_ended_leaves_nothing() {
    // The last piece is sent unasked.
    const LEN: usize = PIECE + 4096;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let (source, mut came) = (vec![7; LEN], vec![0; LEN]);
        for _ in 0..50 {
            let [out, into] = both_sides(&source, &mut came, false);
            let (receives, stopped) = begin_stopped(&groups[1], 4, &into);
            done(&begin_side(&groups[0], 4, LEN, &out, false));
            move_until(&groups, "the first is there", || stopped.load(Ordering::Relaxed) > 0);
            assert!(receives.cancel());
        }
        nothing_is_left(&groups, before, 4);
    }
}

/// The sender's side, by hand: nothing goes but what is told to.
struct ByHand<'a> {
    group: &'a Group,
    bytes: Vec<u8>,
    key: Key,
    signature: Signature,
    mailbox: u32,
}

impl ByHand<'_> {
    /// A message of so many pieces to rank 1, of which nothing has gone.
    fn of(group: &Group, tag: u64, pieces: usize) -> ByHand<'_> {
        let mut messages = group.endpoint().messages();
        let (mailbox, sequence) = (messages.mailbox(), messages.next_in_pair(1, group.id()));
        let key = Key { group: group.id(), tag, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: (pieces * PIECE) as u64, ..BARRIER };
        ByHand { group, bytes: vec![3; PIECE], key, signature, mailbox }
    }

    fn sends(&self, piece: u32) {
        let mut messages = self.group.endpoint().messages();
        let key = Key { slot: u64::from(piece), ..self.key };
        let from = Source { address: self.bytes.as_ptr(), len: PIECE };
        messages.send(1, key, self.signature, from, Ticket { mailbox: self.mailbox, step: piece });
        messages.write_out();
    }

    fn says(&self) {
        let word = Key { slot: u64::from(SENDER_GAVE_UP), ..self.key };
        self.group.endpoint().messages().notify(1, word, self.signature);
    }

    fn ends(self) {
        let mut messages = self.group.endpoint().messages();
        messages.cancel(self.mailbox);
        messages.end_course(1, self.key, true, false);
    }
}

#[test]
fn a_word_that_comes_after_the_last_look_goes_with_its_message() {
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let bytes = vec![1; PIECE];
        // By hand: the first of two pieces, and the receiver's word.
        let mut messages = groups[0].endpoint().messages();
        let (group, mailbox, sequence) =
            (groups[0].id(), messages.mailbox(), messages.next_in_pair(1, groups[0].id()));
        let key = Key { group, tag: 1, sequence, slot: 0, class: Class::PointToPoint };
        let signature = Signature { kind: Kind::Send, count: 2 * PIECE as u64, ..BARRIER };
        let from = Source { address: bytes.as_ptr(), len: PIECE };
        messages.send(1, key, signature, from, Ticket { mailbox, step: 0 });
        messages.cancel(mailbox);
        drop(messages);
        let says = || {
            let word = Key { slot: u64::from(RECEIVER_GAVE_UP), ..key };
            groups[1].endpoint().messages().notify(0, word, signature);
        };
        says();
        // The message and the word.
        move_until(&groups, "it is kept", || entries_of(&groups[0]) == before[0] + 2);
        groups[0].endpoint().messages().end_course(1, key, true, true);
        assert_eq!(entries_of(&groups[0]), before[0]);
        says();
        nothing_is_left(&groups, before, 1);
    }
}

/// A receive whose pieces come one by one, as those at a device do: looked at in their order, and only as
/// often as it may.
struct Paced {
    pieces: Pieces,
    turn: Turn,
    address: usize,
    len: usize,
    /// Pieces behind the first that are under way at a time.
    abreast: usize,
    current: VecDeque<Box<dyn Operation>>,
    pace: Arc<Pace>,
}

struct Pace {
    /// How many more times it looks.
    looks: AtomicUsize,
    /// Pieces that it has begun.
    begun: AtomicUsize,
}

impl Operation for Paced {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let may = |looks: usize| looks.checked_sub(1);
        if self.pace.looks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, may).is_err() {
            return Poll::Pending;
        }
        let cut = cut(self.len, PIECE);
        loop {
            let begun = self.pace.begun.load(Ordering::Relaxed) as u32;
            let is_first = begun == 1 && !self.current.is_empty();
            if begun < cut.pieces() && self.current.len() < self.abreast && !is_first {
                let piece = cut.piece(begun);
                let address = (self.address + piece.start as usize) as *mut u8;
                // SAFETY: the tests keep the memory until the message has ended or is cancelled.
                self.current.push_back(unsafe { self.pieces.next(group, &self.turn, piece, address) }?);
                self.pace.begun.store(begun as usize + 1, Ordering::Relaxed);
                continue;
            }
            let Some(first) = self.current.front_mut() else { return Poll::Ready(Ok(Completion::default())) };
            match first.advance(group) {
                Poll::Ready(result) => drop((result?, self.current.pop_front())),
                Poll::Pending => return Poll::Pending,
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

const MANY: usize = usize::MAX / 2;

/// Starts such a receive of a message.
fn begin_paced(group: &Arc<Group>, message: &Message, abreast: usize) -> (Arc<Running>, Arc<Pace>) {
    let pace = Arc::new(Pace { looks: AtomicUsize::new(MANY), begun: AtomicUsize::new(0) });
    let (address, len) = message.memory();
    let running = begin(group, 4, len, message, |turn: &Turn| Paced {
        pieces: Pieces::new(message.clone(), PIECE, None),
        turn: *turn,
        address: address as usize,
        len,
        abreast,
        current: VecDeque::new(),
        pace: pace.clone(),
    });
    (running, pace)
}

/// A message whose first piece has come, sent by hand, and a receive of it that looks no more: so many pieces
/// behind the first are under way. And what the receiver keeps for them.
fn behind_the_first<'a>(
    groups: &'a [Arc<Group>; 2],
    into: &Message,
    abreast: usize,
) -> (ByHand<'a>, Arc<Running>, Arc<Pace>, usize) {
    let sender = ByHand::of(&groups[0], 4, 4);
    let (receives, pace) = begin_paced(&groups[1], into, abreast);
    sender.sends(0);
    move_until(groups, "the first comes", || pace.begun.load(Ordering::Relaxed) == 1 + abreast);
    pace.looks.store(0, Ordering::Relaxed);
    let awaited = entries_of(&groups[1]);
    (sender, receives, pace, awaited)
}

#[test]
fn a_word_that_comes_with_a_piece_is_for_those_behind_it() {
    const LEN: usize = 4 * PIECE;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let mut came = vec![0; LEN];
        let [_, into] = both_sides(&[], &mut came, false);
        let (sender, receives, pace, awaited) = behind_the_first(&groups, &into, 1);
        sender.sends(1);
        sender.says();
        // The piece and the word.
        move_until(&groups, "both come", || entries_of(&groups[1]) == awaited - 2);
        pace.looks.store(MANY, Ordering::Relaxed);
        is_told(&receives);
        sender.ends();
        nothing_is_left(&groups, before, 4);
    }
}

#[test]
fn what_ends_a_message_is_told_though_the_piece_that_is_looked_at_has_come() {
    const LEN: usize = 4 * PIECE;
    for shm in [true, false] {
        let (groups, before) = begun(shm);
        let mut came = vec![0; LEN];
        let [_, into] = both_sides(&[], &mut came, false);
        let (sender, receives, pace, awaited) = behind_the_first(&groups, &into, 3);
        sender.says();
        move_until(&groups, "the word comes", || entries_of(&groups[1]) == awaited - 1);
        pace.looks.store(1, Ordering::Relaxed);
        move_until(&groups, "it is read", || pace.looks.load(Ordering::Relaxed) == 0);
        sender.sends(1);
        move_until(&groups, "the piece comes", || entries_of(&groups[1]) == awaited - 2);
        // Until then the failure of the group would be the better cause.
        std::thread::sleep(2 * DOUBT);
        pace.looks.store(MANY, Ordering::Relaxed);
        is_told(&receives);
        sender.ends();
        nothing_is_left(&groups, before, 4);
    }
}
