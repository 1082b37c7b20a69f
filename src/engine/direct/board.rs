//! Boards: what the members of a group on one host see of each other.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::{Job, Path};
use crate::deadline::Deadline;
use crate::engine::endpoint::lock;
use crate::engine::joint::{FEWEST_PARTS, Team, share};
use crate::error::{Error, Result, Status, fail};
use crate::schedule::{Collective, total};
use crate::signature::Signature;
use crate::sys;
use crate::sys::process::has_ended;
use crate::transport::bell::PeerBell;
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

/// Bytes of one slot.
const SLOT_BYTES: usize = 64 * 1024;

/// Where the slots begin in a board.
const SLOTS_AT: usize = 4096;

/// Bytes of a member's board.
pub const BOARD_BYTES: usize = SLOTS_AT + 2 * SLOT_BYTES;

/// The most members that exchange directly.
pub const MAX_MEMBERS: usize = 64;

/// Bytes of a part of a long copy that several threads share. Shorter ones are over before the others are
/// awake.
pub(super) const PART: usize = 1024 * 1024;

/// Bytes that one thread reads between two looks whether their owner has given up.
const PULL_BYTES: usize = 4 * 1024 * 1024;

/// How long a rank of the same process may take to read what it has begun to read.
const READ: Duration = Duration::from_secs(1);

/// What a member posts for one call. Word 0 is the number of the call, stored last.
#[repr(C, align(64))]
pub(super) struct Post {
    pub(super) call: AtomicU64,
    pub(super) what: AtomicU64,
    pub(super) root: AtomicU64,
    pub(super) count: AtomicU64,
    pub(super) input: AtomicU64,
    pub(super) output: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// What its owner could not read and waits for: see [`hidden`].
    hidden: AtomicU64,
}

/// What others read of a member's memory in a long call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Input = 0,
    /// Its shard of the result.
    Shard = 1,
}

/// The word for a part of what `member` gives to a call. That of an earlier call stays in a post, and says
/// nothing.
fn hidden(call: u64, part: Part, member: usize) -> u64 {
    const { assert!(MAX_MEMBERS <= 64) };
    call << 7 | (part as u64) << 6 | member as u64
}

/// The first bytes of a board.
#[repr(C, align(64))]
struct Board {
    posts: [Post; 2],
    mark: Word,
    /// Elements of the owner's shard that are final, in the call that it has posted last.
    folded: Word,
    /// The call for which the owner has posted copies, and which: see [`Direct::give`].
    given: Word,
    /// Not 0 once the owner has given up a call.
    withdrawn: Word,
    /// Not 0 while the owner reads another member's private memory.
    reading: Word,
    /// What [`label`] has put there, for each other member, until that needs this board no more.
    goodbyes: [AtomicU64; MAX_MEMBERS],
    relay: Relay,
}

/// Says in a new board of which group it is. The others say goodbye by that: a board that was given back,
/// since they could not agree, is something else by then, and stays that.
pub fn label(board: &Region, group: u64) {
    // SAFETY: a board is BOARD_BYTES of mapped shared memory, aligned to a page; `Board` consists of atomics.
    let board = unsafe { &*board.address().as_ptr().cast::<Board>() };
    board.goodbyes.iter().for_each(|word| word.store(mark_of(group), Ordering::Release));
}

/// This rank needs the boards no more that it reaches, and has made no [`Direct`] of them.
pub fn say_goodbye(group: u64, rank: usize, peers: &[Option<Arc<PeerMemory>>], offsets: &[u64]) {
    for (memory, &offset) in peers.iter().zip(offsets) {
        if let Some(board) = memory.as_ref().and_then(|memory| board_at(memory, offset)) {
            // SAFETY: BOARD_BYTES of mapped shared memory, aligned as a board is, that `peers` keep mapped.
            unsafe { &*board.as_ptr().cast::<Board>() }.take_back(group, rank);
        }
    }
}

/// Not 0, and hardly found where a board of the group is not.
fn mark_of(group: u64) -> u64 {
    group | 1
}

impl Board {
    /// The goodbye of a member.
    fn take_back(&self, group: u64, member: usize) {
        let word = &self.goodbyes[member];
        let _ = word.compare_exchange(mark_of(group), 0, Ordering::Release, Ordering::Relaxed);
    }

    /// Whether a member has said it.
    fn is_free_of(&self, member: usize) -> bool {
        self.goodbyes[member].load(Ordering::Acquire) == 0
    }
}

/// What calls on device memory that are relayed say of themselves (see `engine::staged::relay`).
#[repr(C, align(64))]
struct Relay {
    /// Where the owner's lanes lie in its segment; 0 until it is known.
    offer: AtomicU64,
    /// Pieces that have come so far, over all calls, by [`Mark`].
    marks: [AtomicU64; 3],
}

/// How far a member has come with a piece that is relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// What others read of its contribution is in its lane.
    Given = 0,
    /// So is its share of the result.
    Folded = 1,
    /// It reads no more of anybody's lane.
    Done = 2,
}

impl Mark {
    /// In the order in which a member comes to them.
    pub const ALL: [Mark; 3] = [Mark::Given, Mark::Folded, Mark::Done];
}

#[repr(C, align(64))]
struct Word(AtomicU64);

/// The members of a group, all on this host, as they see each other's boards.
pub struct Direct {
    group: u64,
    pub(super) rank: usize,
    pub(super) own: Option<Region>,
    /// What else of its segment this rank lends to the members for as long as its board.
    lent: OnceLock<Region>,
    pub(super) retired: Arc<Retired>,
    /// Where each member's board is mapped here; this rank's own among them.
    pub(super) boards: Vec<*mut u8>,
    /// Every member's memory but this rank's.
    pub(super) peers: Vec<Option<Arc<PeerMemory>>>,
    /// Whether every member can read every other's private memory.
    pub(super) pulls: bool,
    pub(super) fork: u32,
    /// Calls that have begun so far. Only the call whose turn it is touches this.
    pub(super) calls: AtomicU64,
    /// The last call that every member is known to have entered. Likewise.
    pub(super) entered: AtomicU64,
}

// SAFETY: the boards live in segments that `own` and `peers` keep mapped; they are accessed as atomics and,
// under the protocol of posts, as bytes that nobody writes meanwhile.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

impl Direct {
    /// `offsets` are where the members' boards lie in their segments, `own`, which is [labelled](label), and
    /// the segments of `peers`, which know that of this rank.
    pub fn new(
        group: u64,
        rank: usize,
        mut own: Region,
        retired: Arc<Retired>,
        peers: Vec<Option<Arc<PeerMemory>>>,
        offsets: &[u64],
        pulls: bool,
    ) -> Result<Direct> {
        let mut boards = Vec::with_capacity(peers.len());
        for (index, (peer, &offset)) in peers.iter().zip(offsets).enumerate() {
            let board = match peer {
                _ if index == rank => Some(own.address()),
                Some(memory) => board_at(memory, offset),
                None => None,
            };
            let Some(board) = board else {
                // The others know where it is, and may write there: it is never used again.
                own.retire();
                fail!(
                    Internal,
                    "rank {index} says that its board is at {offset} of its segment, where none can be"
                );
            };
            boards.push(board.as_ptr());
        }
        let (calls, entered) = (AtomicU64::new(0), AtomicU64::new(0));
        let fork = sys::fork::generation();
        let (own, lent) = (Some(own), OnceLock::new());
        Ok(Direct { group, rank, own, lent, retired, boards, peers, pulls, fork, calls, entered })
    }

    /// How a call is exchanged; `None`: not at all, messages do it. The same answer on every member.
    pub fn path(&self, job: &Job) -> Option<Path> {
        let element = job.dtype.size() as u64;
        let size = self.size() as u64;
        let contribution = match &job.collective {
            _ if job.listed => u64::MAX,
            Collective::Allreduce { count } | Collective::Reduce { count, .. } => {
                // Everybody reads everything: with more ranks, sharing the work pays earlier.
                count.saturating_mul(size.max(2) / 2)
            }
            Collective::Broadcast { count, .. } => *count,
            Collective::Allgather { counts } => counts.iter().copied().max().unwrap_or(0),
            Collective::Gather { counts, .. } => counts[0],
            Collective::Scatter { counts, .. } | Collective::ReduceScatter { counts } => total(counts),
            Collective::Alltoall { send_counts, .. } => total(send_counts),
            Collective::Barrier => 0,
        };
        if contribution.saturating_mul(element) <= SLOT_BYTES as u64 {
            return Some(Path::Short);
        }
        self.pulls.then_some(Path::Long)
    }

    /// How many members.
    pub fn size(&self) -> usize {
        self.boards.len()
    }

    /// This rank's segment's `region` is the members' to read until all have said goodbye to the board.
    pub fn lend(&self, region: Region) {
        let _ = self.lent.set(region);
    }

    /// Where `offset..offset + len` of a member's segment is mapped here.
    pub fn lent_by(&self, member: usize, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        match &self.peers[member] {
            Some(memory) => memory.segment.address(offset, len).map(NonNull::as_ptr),
            None => self.lent.get().filter(|region| region.len() >= len).map(|own| own.address().as_ptr()),
        }
    }

    // ---- calls that are relayed

    /// The number of the call whose turn it is.
    pub fn next_call(&self) -> u64 {
        let call = self.calls.load(Ordering::Relaxed) + 1;
        self.calls.store(call, Ordering::Relaxed);
        call
    }

    /// The first member that has not entered `call` yet.
    pub fn absent(&self, call: u64) -> Option<usize> {
        if self.entered.load(Ordering::Relaxed) >= call {
            return None;
        }
        let absent = (0..self.size()).find(|&member| !self.has_entered(member, call));
        if absent.is_none() {
            self.entered.store(call, Ordering::Relaxed);
        }
        absent
    }

    /// Enters `call` with two words for the others.
    pub fn enter(&self, call: u64, signature: &Signature, words: [u64; 2], bytes: u64) {
        self.post(self.rank, call).write(call, signature, words[0], words[1], bytes);
        self.ring();
    }

    /// The two words of a member that has entered `call`.
    pub fn words(&self, member: usize, call: u64) -> [u64; 2] {
        let post = self.post(member, call);
        [post.input.load(Ordering::Relaxed), post.output.load(Ordering::Relaxed)]
    }

    /// Says where this rank's lanes are.
    pub fn offer(&self, offer: u64) {
        self.board(self.rank).relay.offer.store(offer, Ordering::Release);
        self.ring();
    }

    /// Where a member's lanes are; 0 until it has said so.
    pub fn offered(&self, member: usize) -> u64 {
        self.board(member).relay.offer.load(Ordering::Acquire)
    }

    /// This rank has come so far with so many pieces, the first ones.
    pub fn reach(&self, mark: Mark, pieces: u64) {
        self.board(self.rank).relay.marks[mark as usize].store(pieces, Ordering::Release);
        self.ring();
    }

    /// With how many pieces a member has come so far.
    pub fn reached(&self, member: usize, mark: Mark) -> u64 {
        self.board(member).relay.marks[mark as usize].load(Ordering::Acquire)
    }

    fn board(&self, member: usize) -> &Board {
        // SAFETY: a board is BOARD_BYTES of mapped, zero-initialised shared memory, aligned to a page, that
        // lives as long as `self`; `Board` consists of atomics.
        unsafe { &*self.boards[member].cast::<Board>() }
    }

    pub(super) fn post(&self, member: usize, call: u64) -> &Post {
        &self.board(member).posts[(call & 1) as usize]
    }

    /// The slot of `member` for `call`.
    pub(super) fn slot(&self, member: usize, call: u64) -> *mut u8 {
        self.boards[member].wrapping_add(SLOTS_AT + (call & 1) as usize * SLOT_BYTES)
    }

    pub(super) fn ring(&self) {
        PeerBell::ring_all(self.peers.iter().flatten().map(|memory| &memory.bell));
    }

    /// Says that this rank has come to `phase` of `call`.
    pub(super) fn mark(&self, call: u64, phase: u64) {
        self.board(self.rank).mark.0.store(call * 4 + phase, Ordering::Release);
        self.ring();
    }

    pub(super) fn has_marked(&self, member: usize, call: u64, phase: u64) -> bool {
        self.board(member).mark.0.load(Ordering::Acquire) >= call * 4 + phase
    }

    /// Says how much of this rank's shard is final; 0 before it posts. Wakes nobody: it helps who is awake,
    /// and the mark comes when all is done.
    pub(super) fn note_folded(&self, elements: u64) {
        self.board(self.rank).folded.0.store(elements, Ordering::Release);
    }

    /// What `member`, which has posted the current call and not left it, has noted.
    pub(super) fn folded(&self, member: usize) -> u64 {
        self.board(member).folded.0.load(Ordering::Acquire)
    }

    /// Whether `member` has entered `call`.
    pub(super) fn has_entered(&self, member: usize, call: u64) -> bool {
        // A member that has posted a later call of the same parity has entered this one, too.
        self.post(member, call).call.load(Ordering::Acquire) >= call
    }

    /// Asks `member` for a copy of a part that cannot be read.
    pub(super) fn ask(&self, call: u64, part: Part, member: usize) {
        self.post(self.rank, call).hidden.store(hidden(call, part, member), Ordering::Relaxed);
        self.ring();
    }

    /// Whether any member asks this rank for a copy of the part.
    pub(super) fn is_asked(&self, call: u64, part: Part) -> bool {
        let word = hidden(call, part, self.rank);
        (0..self.size()).any(|member| self.post(member, call).hidden.load(Ordering::Relaxed) == word)
    }

    /// Says that a copy of a part is where this rank has posted that it is.
    pub(super) fn give(&self, call: u64, part: Part) {
        let given = &self.board(self.rank).given.0;
        let others = given.load(Ordering::Relaxed);
        let others = if others >> 2 == call { others & 3 } else { 0 };
        given.store(call << 2 | others | 1 << part as u64, Ordering::Release);
        self.ring();
    }

    /// Whether `member` has said so.
    pub(super) fn has_given(&self, member: usize, call: u64, part: Part) -> bool {
        let given = self.board(member).given.0.load(Ordering::Acquire);
        given >> 2 == call && given >> part as u64 & 1 == 1
    }

    pub(super) fn has_withdrawn(&self, member: usize) -> bool {
        self.board(member).withdrawn.0.load(Ordering::SeqCst) != 0
    }

    /// This rank's memory is about to be its caller's again: what others read from here on does not count.
    pub(super) fn withdraw(&self) {
        self.board(self.rank).withdrawn.0.store(1, Ordering::SeqCst);
        // Whoever reads what the caller writes from here on finds the withdrawal afterwards.
        fence(Ordering::SeqCst);
        let until = Deadline::after(READ);
        for (member, memory) in self.peers.iter().enumerate() {
            let here = memory.as_ref().is_some_and(|memory| memory.pid == std::process::id());
            while here && self.board(member).reading.0.load(Ordering::SeqCst) != 0 && !until.expired() {
                sys::process::yield_now();
            }
        }
    }

    /// Does something that reads the private memory of `members` ([`Direct::pull`]). What it has read counts
    /// if they have not withdrawn meanwhile.
    pub(super) fn while_reading(
        &self,
        mut members: impl Iterator<Item = usize>,
        read: impl FnOnce() -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let reading = &self.board(self.rank).reading.0;
        // Against `withdraw`: either this sees the withdrawal, or the member sees this read.
        reading.store(1, Ordering::SeqCst);
        let result = read();
        reading.store(0, Ordering::Release);
        fence(Ordering::Acquire);
        match members.find(|&member| self.has_withdrawn(member)) {
            Some(member) => Err(Stop::Withdrawn(member)),
            None => result,
        }
    }

    /// Reads from the private memory of `member`, by several threads if it is much.
    ///
    /// # Safety
    /// Within [`Direct::while_reading`]. The member has posted the address for a call that it has not left,
    /// and does not write there unless it withdraws.
    pub(super) unsafe fn pull(
        &self,
        member: usize,
        address: u64,
        into: &mut [u8],
        team: &dyn Team,
    ) -> Result<(), Stop> {
        let shared = into.len() >= FEWEST_PARTS * PART && team.threads() > 1;
        let each = if shared { PART } else { PULL_BYTES };
        // SAFETY: the caller's promise, here and below.
        let pull = |address, into: &mut [u8]| unsafe { self.pull_part(member, address, into) };
        if into.len() <= each {
            return pull(address, into);
        }
        let parts = (address..).step_by(each).zip(into.chunks_mut(each)).collect();
        share(team, parts, |(address, into)| pull(address, into))
    }

    /// # Safety
    /// As [`Direct::pull`].
    unsafe fn pull_part(&self, member: usize, address: u64, into: &mut [u8]) -> Result<(), Stop> {
        let Some(memory) = &self.peers[member] else { return Ok(()) };
        if self.has_withdrawn(member) {
            return Err(Stop::Withdrawn(member));
        }
        let count = into.len();
        // SAFETY: the caller's promise.
        let Err(cause) = (unsafe { memory.pull(address, into) }) else { return Ok(()) };
        let code = cause.raw_os_error();
        // The process is gone. How it ended is about to be told.
        if code == Some(libc::ESRCH) {
            return Err(Stop::Withdrawn(member));
        }
        let text =
            format!("{count} bytes at {address:#x} could not be read from rank {member}'s memory: {cause}");
        let advice = match code {
            Some(libc::EPERM) => {
                ". It could be before: processes that change their user or PR_SET_DUMPABLE do so before they create a \
                 context, or set UNISONO_CMA=0"
            }
            _ => "",
        };
        let error = Error::new(Status::System, text + advice);
        Err(if code == Some(libc::EFAULT) { Stop::Hidden(member, error) } else { Stop::Failed(error) })
    }
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Direct(rank {} of {})", self.rank, self.size())
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        if self.fork != sys::fork::generation() {
            // The boards are the parent's, who has not left.
            self.own.iter_mut().chain(self.lent.get_mut()).for_each(Region::retire);
            return;
        }
        for member in 0..self.size() {
            if member != self.rank {
                self.board(member).take_back(self.group, self.rank);
            }
        }
        if let Some(board) = self.own.take() {
            let process = |memory: &Option<Arc<PeerMemory>>| memory.as_ref()?.process.clone();
            let processes = self.peers.iter().map(process).collect();
            self.retired.add(Remains { board, _lent: self.lent.take(), rank: self.rank, processes });
        }
    }
}

/// Boards of groups that are gone, and what was lent with them, each kept until every member has said goodbye
/// to it, or its process has ended: a member that is slow may still read from it.
#[derive(Default)]
pub struct Retired(Mutex<Vec<Remains>>);

/// What is left of a member's [`Direct`].
struct Remains {
    board: Region,
    _lent: Option<Region>,
    rank: usize,
    /// By member, where it is another's and can be watched: one that was killed says no goodbye.
    processes: Vec<Option<Arc<OwnedFd>>>,
}

impl Retired {
    fn add(&self, remains: Remains) {
        lock(&self.0).push(remains);
    }

    /// Gives back the boards that nobody reads any more.
    pub fn sweep(&self) {
        lock(&self.0).retain(|Remains { board: region, rank, processes, .. }| {
            // SAFETY: a board is BOARD_BYTES of mapped shared memory that consists of atomics here.
            let board = unsafe { &*region.address().as_ptr().cast::<Board>() };
            processes.iter().enumerate().any(|(member, process)| {
                let is_over = || process.as_ref().is_some_and(|process| has_ended(process.as_fd()));
                member != *rank && !board.is_free_of(member) && !is_over()
            })
        });
    }
}

/// Where the board at `offset` of a member's segment is mapped here, if it is inside, and aligned as `Board`
/// is.
fn board_at(memory: &PeerMemory, offset: u64) -> Option<NonNull<u8>> {
    let board = memory.segment.address(usize::try_from(offset).ok()?, BOARD_BYTES)?;
    board.addr().get().is_multiple_of(align_of::<Board>()).then_some(board)
}

impl Post {
    pub(super) fn write(&self, call: u64, signature: &Signature, input: u64, output: u64, bytes: u64) {
        self.what.store(signature.code().into(), Ordering::Relaxed);
        self.root.store(u64::from(signature.root), Ordering::Relaxed);
        self.count.store(signature.count, Ordering::Relaxed);
        self.input.store(input, Ordering::Relaxed);
        self.output.store(output, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.call.store(call, Ordering::Release);
    }

    /// Where a part of what its owner gives is.
    pub(super) fn place(&self, part: Part) -> &AtomicU64 {
        match part {
            Part::Input => &self.input,
            Part::Shard => &self.output,
        }
    }

    pub(super) fn signature(&self) -> Option<Signature> {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Signature::decode(word(&self.what) as u32, word(&self.root) as u32, word(&self.count)).ok()
    }
}

/// Why a call does not go on.
pub(super) enum Stop {
    /// This member has given up, or is gone: the news are on their way.
    Withdrawn(usize),
    /// The kernel does not let others read what this member has posted, though the member itself may.
    Hidden(usize, Error),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::memory::tests::memory_of;
    use crate::transport::segment::Segment;

    #[test]
    fn what_was_lent_to_a_member_that_was_killed_is_given_back() {
        let mut other = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        let segment = Segment::new(4 << 20).expect("a segment");
        let free = segment.free_bytes();
        let [board, lanes] =
            [BOARD_BYTES, 1 << 20].map(|bytes| segment.allocate(bytes, 4096).expect("there is room"));
        let group = 7;
        label(&board, group);
        let (retired, peers) = (Arc::<Retired>::default(), vec![None, Some(Arc::new(memory_of(other.id())))]);
        let direct = Direct::new(group, 0, board, retired.clone(), peers, &[0; 2], false).expect("boards");
        direct.lend(lanes);
        drop(direct);
        retired.sweep();
        let lent = free - segment.free_bytes();
        assert!(lent >= BOARD_BYTES + (1 << 20), "it runs, and has not said goodbye: {lent} bytes");
        other.kill().expect("it is there");
        other.wait().expect("it has ended");
        retired.sweep();
        assert_eq!(segment.free_bytes(), free);
    }
}
