//! What the members of a device exchange see of each other on the host: which calls each has given to its
//! GPU, and who needs whose arena no more.
//!
//! The GPUs exchange without the host, so nobody waits for anything here. A rank notes each call before it
//! launches it and looks whether the others' calls that its kernel will meet are the same, and have the same
//! number: whoever comes last sees a difference, before its kernel runs. Numbers differ when a rank has
//! called something else in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use crate::cuda::exchange::{Direction, MAX_RANKS};
use crate::signature::Signature;
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

/// How many of its last calls a board tells. A rank that is further ahead of another is compared with it when
/// that has come closer.
const NOTES: usize = 512;

/// The same of messages between a pair.
const POINTS: usize = 32;

/// The most members of a device exchange.
pub const MAX_MEMBERS: usize = 64;

/// Bytes of a member's board.
pub const BOARD_BYTES: usize = size_of::<Board>();

/// One call, as its rank noted it.
#[repr(C, align(32))]
struct Slot {
    /// The number of the call, plus one, above what is called; 0 while it is written. Stored last.
    head: AtomicU64,
    count: AtomicU64,
    /// The root, below how many calls the exchange has had with this one.
    root: AtomicU64,
    /// The most blocks that the caller allows, in 18 bits; the place in its launch, in 14; the digest of all
    /// calls before; the last bit: [`WINDOWED`].
    terms: AtomicU64,
}

/// What the call shares lies in windows.
const WINDOWED: u64 = 1 << 63;

/// How many blocks a note has room for: more than any kernel has.
pub const MOST_BLOCKS: u32 = (1 << BLOCK_BITS) - 1;
const BLOCK_BITS: u32 = 18;

/// Which call of a launch of several one is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InLaunch {
    /// Calls before it.
    pub before: u8,
    /// All of the launch, fewer than 128; 0 where it is alone.
    pub of: u8,
}

impl InLaunch {
    fn code(self) -> u32 {
        u32::from(self.before) << 7 | u32::from(self.of)
    }

    fn decode(code: u32) -> InLaunch {
        InLaunch { before: (code >> 7 & 127) as u8, of: (code & 127) as u8 }
    }
}

/// A call of one rank, as far as the kernels of all must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// Its number.
    pub sequence: u32,
    /// What is called.
    pub signature: Signature,
    /// The most blocks that its caller allows, of which more than [`MOST_BLOCKS`] are as many; 0: no word on
    /// it.
    pub max_blocks: u32,
    /// Which call of its launch it is.
    pub place: InLaunch,
    /// Whether what it shares lies in windows, where a call gains by that.
    pub windowed: bool,
    /// Of all calls before it, in 31 bits.
    pub digest: u32,
}

impl Noted {
    /// Of this call and all before it.
    pub fn digest_with(&self) -> u32 {
        let Noted { sequence, signature, max_blocks, place, windowed, digest } = self;
        let words = [
            u64::from(*digest) << 32 | u64::from(*sequence),
            u64::from(signature.code()) << 32 | u64::from(signature.root),
            signature.count,
            u64::from(place.code()) << 32 | u64::from(*max_blocks) << 1 | u64::from(*windowed),
        ];
        // Once more: of the last word the digest would have the lower half alone.
        (words.into_iter().chain([0]).fold(0, mix) >> 33) as u32
    }
}

/// A call as its rank notes it: what is in a [`Slot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    head: u64,
    count: u64,
    root: u64,
    terms: u64,
}

impl Note {
    /// A call after `before` others.
    fn of(before: u32, call: &Noted) -> Note {
        let Noted { sequence, signature, max_blocks, place, windowed, digest } = call;
        let windowed = if *windowed { WINDOWED } else { 0 };
        let blocks = (*max_blocks).min(MOST_BLOCKS) | place.code() << BLOCK_BITS;
        Note {
            head: u64::from(signature.code()) | u64::from(sequence.wrapping_add(1)) << 32,
            count: signature.count,
            root: u64::from(signature.root) | u64::from(before.wrapping_add(1)) << 32,
            terms: u64::from(blocks) | u64::from(*digest) << 32 | windowed,
        }
    }

    /// The call that it is of; `None` if its words are of none.
    pub fn call(&self) -> Option<Noted> {
        let Note { head, count, root, terms } = *self;
        let signature = Signature::decode(head as u32, root as u32, count).ok()?;
        let sequence = ((head >> 32) as u32).wrapping_sub(1);
        let (windowed, digest) = (terms & WINDOWED != 0, ((terms & !WINDOWED) >> 32) as u32);
        let (max_blocks, place) = (terms as u32 & MOST_BLOCKS, InLaunch::decode(terms as u32 >> BLOCK_BITS));
        Some(Noted { sequence, signature, max_blocks, place, windowed, digest })
    }
}

/// A digest with one more word.
fn mix(digest: u64, word: u64) -> u64 {
    (digest ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

#[repr(C, align(64))]
struct Board {
    /// How many calls have been noted. Their numbers would not do: between two of them the group may have had
    /// any number of others.
    called: AtomicU32,
    /// Set by each other member when it needs this member's arena no more; its own by a member that has given
    /// the exchange up before it had it.
    goodbyes: [AtomicU8; MAX_MEMBERS],
    /// Set when this member captures a call,
    captures: AtomicU8,
    /// and when it is to leave, and replays nothing.
    leaves: AtomicU8,
    /// How many signals were sent to each member; with [`UNCOUNTED`], if graphs send it others.
    signals: [AtomicU64; MAX_RANKS],
    notes: [Slot; NOTES],
    /// What was sent to each member and received from it, by [`Direction`].
    points: [[[PointNote; POINTS]; MAX_RANKS]; 2],
}

/// A send or a receive, as its rank noted it.
#[repr(C, align(32))]
struct PointNote {
    /// Which it is of its pair and direction, plus one, above how many collectives there were before it;
    /// [`WRITING`] while it is written, 0 before it has been. Stored last.
    head: AtomicU64,
    bytes: AtomicU64,
    /// Of all before it.
    digest: AtomicU64,
}

/// Of a note that is being written, perhaps over another: no head of one that stands.
const WRITING: u64 = u64::MAX;

/// Of signals: a graph sends them in each replay, which nobody counts.
const UNCOUNTED: u64 = 1 << 63;

/// Whether a count that wraps is another or comes after it. Those of two ranks are never half of all apart:
/// of calls and messages of the exchange, kernels of one rank wait for those of the other.
fn has_come_to(number: u32, other: u32) -> bool {
    number.wrapping_sub(other) as i32 >= 0
}

/// A send or a receive, as far as both ends must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotedPoint {
    /// How many bytes.
    pub bytes: u64,
    /// How many collectives there were before it.
    pub collectives: u32,
    /// Of all messages before it.
    pub digest: u64,
}

/// How many messages of a direction a pair has had, and what they were.
#[derive(Clone, Copy, Debug, Default)]
pub struct Past {
    messages: u32,
    digest: u64,
}

impl Past {
    /// The number of the next message, and what there is to note of it.
    pub fn next(&mut self, bytes: u64, collectives: u32) -> (u32, NotedPoint) {
        let (number, digest) = (self.messages, self.digest);
        self.messages = number.wrapping_add(1);
        for word in [bytes, collectives.into()] {
            self.digest = mix(self.digest, word);
        }
        (number, NotedPoint { bytes, collectives, digest })
    }

    /// How many there have been.
    pub fn messages(&self) -> u32 {
        self.messages
    }
}

/// Gives up the exchange of a board, of the member of this number, when others may have it already: they say
/// goodbye there when they end it, whenever that is, so that nobody is given this memory again. This member
/// needs nothing of them, which they read there: it knows of none whether it has the exchange, and must not
/// write to a board that may be another's by now.
pub fn give_up(mut board: Region, member: usize) {
    board.retire();
    // SAFETY: BOARD_BYTES of mapped, aligned, zero-initialised shared memory; a board consists of atomics.
    let board: &Board = unsafe { board.address().cast().as_ref() };
    board.goodbyes[member].store(1, Ordering::Release);
}

/// The boards of all members, as one of them sees them.
pub struct Boards {
    rank: usize,
    own: Region,
    boards: Vec<*const Board>,
    /// Every member's memory but this rank's: keeps their boards mapped.
    peers: Vec<Option<Arc<PeerMemory>>>,
}

// SAFETY: the boards consist of atomics and lie in memory that `own` and `peers` keep mapped.
unsafe impl Send for Boards {}
// SAFETY: as above.
unsafe impl Sync for Boards {}

impl Boards {
    /// `offsets` are where the members' boards lie in their segments. `None` when one of them is not
    /// reachable.
    pub fn new(
        rank: usize,
        own: Region,
        peers: Vec<Option<Arc<PeerMemory>>>,
        offsets: &[u64],
    ) -> Option<Boards> {
        let mut boards = Vec::with_capacity(peers.len());
        for (member, (peer, &offset)) in peers.iter().zip(offsets).enumerate() {
            let board = match peer {
                _ if member == rank => own.address(),
                Some(memory) => memory.segment.address(usize::try_from(offset).ok()?, BOARD_BYTES)?,
                None => return None,
            };
            // An offset from outside may be anything.
            if !board.addr().get().is_multiple_of(align_of::<Board>()) {
                return None;
            }
            boards.push(board.as_ptr().cast_const().cast());
        }
        Some(Boards { rank, own, boards, peers })
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.boards.len()
    }

    fn board(&self, member: usize) -> &Board {
        // SAFETY: BOARD_BYTES of mapped, aligned, zero-initialised shared memory that lives as long as
        // `self`; a board consists of atomics.
        unsafe { &*self.boards[member] }
    }

    /// Notes this rank's call of the exchange after `before` others, for the others to see.
    pub fn note(&self, before: u32, call: &Noted) -> Note {
        let board = self.board(self.rank);
        let slot = &board.notes[before as usize % NOTES];
        let note = Note::of(before, call);
        slot.head.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        slot.count.store(note.count, Ordering::Relaxed);
        slot.root.store(note.root, Ordering::Relaxed);
        slot.terms.store(note.terms, Ordering::Relaxed);
        slot.head.store(note.head, Ordering::Release);
        board.called.store(before.wrapping_add(1), Ordering::Relaxed);
        note
    }

    /// Between what this rank notes and what it looks at: so one of two ranks sees the other's note.
    pub fn look(&self) {
        fence(Ordering::SeqCst);
    }

    /// The first of the others who has noted another call than this one, which this rank has made after
    /// `before` others, and that.
    pub fn differing(&self, before: u32, ours: &Note) -> Option<(usize, Noted)> {
        (0..self.size()).find_map(|member| {
            if member == self.rank {
                return None;
            }
            let theirs = self.noted(member, before)?;
            if theirs == *ours { None } else { Some((member, theirs.call()?)) }
        })
    }

    /// What `member` has noted after `before` calls, if it has and the note still stands.
    fn noted(&self, member: usize, before: u32) -> Option<Note> {
        let slot = &self.board(member).notes[before as usize % NOTES];
        let head = slot.head.load(Ordering::Acquire);
        let (count, root) = (slot.count.load(Ordering::Relaxed), slot.root.load(Ordering::Relaxed));
        let terms = slot.terms.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stands = head != 0
            && root >> 32 == u64::from(before.wrapping_add(1))
            && slot.head.load(Ordering::Relaxed) == head;
        stands.then_some(Note { head, count, root, terms })
    }

    /// Notes this rank's message number `number` to or from `peer`, and compares it with what that one has
    /// noted of it, if it has: what that is, if it differs.
    pub fn note_point(
        &self,
        direction: Direction,
        peer: usize,
        number: u32,
        point: &NotedPoint,
    ) -> Option<NotedPoint> {
        let note = self.point(self.rank, direction, peer, number);
        note.head.store(WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        note.bytes.store(point.bytes, Ordering::Relaxed);
        note.digest.store(point.digest, Ordering::Relaxed);
        let theirs = self.point(peer, direction.back(), self.rank, number);
        let number = u64::from(number.wrapping_add(1)) << 32;
        note.head.store(number | u64::from(point.collectives), Ordering::Release);
        self.look();
        let head = theirs.head.load(Ordering::Acquire);
        let (bytes, digest) = (theirs.bytes.load(Ordering::Relaxed), theirs.digest.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if head >> 32 << 32 != number || theirs.head.load(Ordering::Relaxed) != head {
            return None;
        }
        let theirs = NotedPoint { bytes, collectives: head as u32, digest };
        (theirs != *point).then_some(theirs)
    }

    fn point(&self, rank: usize, direction: Direction, other: usize, number: u32) -> &PointNote {
        &self.board(rank).points[direction as usize][other][number as usize % POINTS]
    }

    /// Whether `peer` has noted the collective that comes after as many others as this rank's message has
    /// before it, and the other end of that message not: to be asked when it has been noted.
    pub fn is_passed_by(&self, direction: Direction, peer: usize, number: u32, collectives: u32) -> bool {
        let slot = &self.board(peer).notes[collectives as usize % NOTES];
        let stands = slot.head.load(Ordering::Acquire) != 0;
        let noted = (slot.root.load(Ordering::Relaxed) >> 32) as u32;
        if !stands || !has_come_to(noted, collectives.wrapping_add(1)) {
            return false;
        }
        fence(Ordering::Acquire);
        // Written before the other, if it was.
        let head = self.point(peer, direction.back(), self.rank, number).head.load(Ordering::Relaxed);
        head == 0 || head != WRITING && !has_come_to((head >> 32) as u32, number.wrapping_add(1))
    }

    /// A message between this rank and another that the other has noted before the collective that comes
    /// after `before` others, and this rank has not: its direction here, the other, its number, and how many
    /// collectives there were before it. `messages` tells how many this rank has noted. To be asked when the
    /// collective has been noted.
    pub fn missed(
        &self,
        before: u32,
        messages: impl Fn(Direction, usize) -> u32,
    ) -> Option<(Direction, usize, u32, u32)> {
        let others = (0..self.size()).filter(|&member| member != self.rank);
        let all = others.flat_map(|peer| [Direction::Send, Direction::Receive].map(|way| (way, peer)));
        let mut of_each = all.map(|(way, peer)| (way, peer, messages(way, peer)));
        of_each.find_map(|(way, peer, number)| {
            let head = self.point(peer, way.back(), self.rank, number).head.load(Ordering::Acquire);
            let (is_next, collectives) = ((head >> 32) as u32 == number.wrapping_add(1), head as u32);
            (head != 0 && is_next && has_come_to(before, collectives)).then_some((
                way,
                peer,
                number,
                collectives,
            ))
        })
    }

    /// Whether `member` has noted so many calls, or more.
    pub fn has_called(&self, member: usize, calls: u32) -> bool {
        has_come_to(self.board(member).called.load(Ordering::Relaxed), calls)
    }

    /// Whether every other member has come as far as this rank, in calls and messages: its kernels wait for
    /// none that is still to be called.
    pub fn are_met(&self) -> bool {
        let called = self.board(self.rank).called.load(Ordering::Relaxed);
        let has_come = |member: usize| has_come_to(self.board(member).called.load(Ordering::Relaxed), called);
        let mut others = (0..self.size()).filter(|&member| member != self.rank);
        others.all(|member| has_come(member) && !self.is_alone_with(member))
    }

    /// Notes a signal to `member`, before it is sent: once, or in each replay of a graph.
    pub fn note_signal(&self, member: usize, is_captured: bool) {
        let signals = &self.board(self.rank).signals[member];
        match is_captured {
            true => signals.fetch_or(UNCOUNTED, Ordering::Relaxed),
            false => signals.fetch_add(1, Ordering::Relaxed),
        };
    }

    /// Whether `member` has noted so many signals to this rank, or graphs of it may send them.
    pub fn has_signalled(&self, member: usize, signals: u64) -> bool {
        self.board(member).signals[self.rank].load(Ordering::Relaxed) >= signals
    }

    /// Whether this rank has noted any.
    pub fn has_sent_signals(&self) -> bool {
        self.board(self.rank).signals.iter().any(|signals| signals.load(Ordering::Relaxed) > 0)
    }

    /// Notes that there are graphs with calls of this rank. From here on no other leaves in quiet.
    pub fn note_capture(&self) {
        // Against `leave_in_quiet`, as the load in `leaves`: one of the two sees the other.
        self.board(self.rank).captures.store(1, Ordering::SeqCst);
    }

    /// Whether there are graphs with calls of this rank.
    pub fn has_captured(&self) -> bool {
        self.board(self.rank).captures.load(Ordering::Relaxed) != 0
    }

    /// Whether a member is to leave, or has left, and replays nothing. To be asked when the capture is noted.
    pub fn leaves(&self, member: usize) -> bool {
        self.board(member).leaves.load(Ordering::SeqCst) != 0
    }

    /// This rank is to leave: in quiet, if no member that stays has graphs with calls, whose replays would wait
    /// for its own. Whether that is so; it is to make no call any more, either way.
    pub fn leave_in_quiet(&self) -> bool {
        self.board(self.rank).leaves.store(1, Ordering::SeqCst);
        let has_none = |member| self.board(member).captures.load(Ordering::SeqCst) == 0;
        (0..self.size()).all(|member| has_none(member) || self.has_left(member))
    }

    /// This rank needs the others' arenas no more.
    pub fn say_goodbye(&self) {
        for member in (0..self.size()).filter(|&member| member != self.rank) {
            self.board(member).goodbyes[self.rank].store(1, Ordering::Release);
        }
    }

    /// Whether `member` has ended its part in the exchange: it has done what it has noted, and notes nothing
    /// more.
    pub fn has_left(&self, member: usize) -> bool {
        // Its board is others' only after it has said goodbye here: whatever is read there then is true.
        let is_said = |board: usize| self.board(board).goodbyes[member].load(Ordering::Acquire) != 0;
        is_said(self.rank) || is_said(member)
    }

    /// Whether this rank has noted a message to or from `peer` whose other end that has not noted.
    pub fn is_alone_with(&self, peer: usize) -> bool {
        [Direction::Send, Direction::Receive].into_iter().any(|way| {
            let heads = (0..POINTS as u32)
                .map(|at| self.point(self.rank, way, peer, at).head.load(Ordering::Acquire));
            let counts = heads.filter(|head| ![0, WRITING].contains(head)).map(|head| (head >> 32) as u32);
            let Some(count) =
                counts.reduce(|last, count| if has_come_to(count, last) { count } else { last })
            else {
                return false;
            };
            let theirs =
                self.point(peer, way.back(), self.rank, count.wrapping_sub(1)).head.load(Ordering::Acquire);
            theirs == 0 || theirs != WRITING && !has_come_to((theirs >> 32) as u32, count)
        })
    }

    /// Whether nobody needs this rank's arena any more. Members whose process has ended need nothing: what it
    /// ran on GPUs has ended as what it had open was closed.
    pub fn is_forsaken(&self) -> bool {
        self.peers.iter().enumerate().all(|(member, peer)| {
            member == self.rank || self.has_left(member) || peer.as_ref().is_some_and(|peer| peer.has_ended())
        })
    }

    /// The board of this rank must not be handed out again: it belongs to the parent of this forked process.
    pub fn abandon(&mut self) {
        self.own.retire();
    }
}

impl std::fmt::Debug for Boards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Boards(rank {} of {})", self.rank, self.size())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::deadline::Deadline;
    use crate::reduce::DataType;
    use crate::signature::Kind;
    use crate::transport::memory::tests::memory_of;
    use crate::transport::segment::Segment;

    /// Places in launches: calls before, and all.
    fn places() -> impl Iterator<Item = (u8, u8)> {
        (0..128_u8).flat_map(|of| (0..of.max(1)).map(move |before| (before, of)))
    }

    fn noted(before: u8, of: u8) -> Noted {
        let signature = Signature {
            kind: Kind::Allreduce,
            dtype: DataType::F32,
            operator: 0,
            algorithm: 0,
            root: 0,
            count: 8,
            device: true,
        };
        let place = InLaunch { before, of };
        Noted { sequence: 7, signature, max_blocks: MOST_BLOCKS, place, windowed: of % 2 == 1, digest: 12345 }
    }

    #[test]
    fn a_note_has_all_of_its_call() {
        for (before, of) in places() {
            let call = noted(before, of);
            assert_eq!(Note::of(3, &call).call(), Some(call));
        }
    }

    /// The boards of two ranks, as each sees them.
    fn pair() -> [Boards; 2] {
        let segment = Segment::new(4 * BOARD_BYTES).expect("a segment");
        let owned = [0, 1].map(|_| segment.allocate(BOARD_BYTES, 64).expect("there is room"));
        let boards = owned.each_ref().map(|region| region.address().as_ptr().cast_const().cast());
        let mut rank = 0..;
        owned.map(|own| Boards {
            rank: rank.next().expect("without end"),
            own,
            boards: boards.to_vec(),
            peers: vec![None, None],
        })
    }

    #[test]
    fn who_has_not_called_is_known_however_many_calls_of_the_host_came_between() {
        for between in [0, 1, 0x7fff_fffe, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            let [here, there] = pair();
            let first = noted(0, 0);
            here.note(0, &first);
            there.note(0, &first);
            assert!(here.has_called(1, 1) && here.are_met());
            let second = Noted { sequence: first.sequence.wrapping_add(1).wrapping_add(between), ..first };
            here.note(1, &second);
            assert!(!here.has_called(1, 2) && !here.are_met(), "{between} between the two");
            assert!(
                there.has_called(0, 2) && there.are_met(),
                "it waits for nobody, {between} between the two"
            );
            there.note(1, &second);
            assert!(here.has_called(1, 2) && here.are_met(), "{between} between the two");
        }
    }

    /// Whether anybody asks how it has ended, and whoever has its number by then: here this process.
    #[test]
    fn nobody_needs_an_arena_when_the_processes_of_the_others_have_ended() {
        for has_successor in [false, true] {
            let mut other = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
            let mut memory = memory_of(other.id());
            if has_successor {
                memory.pid = std::process::id();
            }
            let [mut here, _there] = pair();
            here.peers[1] = Some(Arc::new(memory));
            assert!(!here.is_forsaken(), "it runs");
            other.kill().expect("it is there");
            let until = Deadline::after(Duration::from_secs(60));
            while !here.is_forsaken() {
                assert!(!until.expired(), "nobody has asked how it has ended");
                std::thread::sleep(Duration::from_millis(1));
            }
            other.wait().expect("it has ended");
            assert!(here.is_forsaken());
        }
    }

    #[test]
    fn a_digest_tells_places_in_launches_apart() {
        let digest = |before, of| noted(before, of).digest_with();
        let alike: Vec<_> = places()
            .filter(|&(before, of)| (before, of) != (0, 0) && digest(before, of) == digest(0, 0))
            .collect();
        assert_eq!(alike, [], "these places have the digest of a call that is alone");
    }
}
