//! Direct exchange between ranks of one host: each reads what it needs out of the others' memory.
//!
//! Every member has a *board* in its shared segment: two posts, a mark and two slots. A call posts what it is (its
//! signature, where its buffers lie) under the number of the call, and waits for the posts of those it depends on; a
//! post of another call is a mismatch, noticed before anything is written.
//!
//! - *Short* calls put their contribution into the slot before they post. Whoever has seen the post reads the slot:
//!   one write, one read, one wait. Allreduce is one-shot: everybody reads everything.
//! - *Long* calls read each other's private memory (process_vm_readv): no copy in between. Allreduce is two-shot: each
//!   reduces its shard, then all gather the shards. Marks say how far a rank has come; nobody leaves while others may
//!   still read from it.
//!
//! A rank that gives up a call withdraws before it lets go of its memory, for good: its group has failed. What was read
//! of its private memory counts only if it had not withdrawn by then; whoever finds that it has waits for the news of the failure.
//! Ranks of one process read each other's memory without the kernel's protection, so there the one that gives up also waits
//! until nobody reads.
//!
//! Posts and slots exist twice, for odd and even calls. A rank may enter call `e` when all others have entered `e − 1`,
//! hence have ended `e − 2` and read what it had posted there.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use super::endpoint::{Through, lock};
use super::executor::Workspace;
use super::group::{Group, Turn};
use super::messages::Mismatch;
use super::operation::{Completion, Operation};
use super::wire::Key;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status};
use crate::reduce::{DataType, Operand, Reducer, Representation};
use crate::schedule::Collective;
use crate::signature::{Kind, Signature};
use crate::sys;
use crate::transport::memory::PeerMemory;
use crate::transport::segment::Region;

/// Bytes of one slot.
pub const SLOT_BYTES: usize = 64 * 1024;

/// Where the slots begin in a board.
const SLOTS_AT: usize = 4096;

/// Bytes of a member's board.
pub const BOARD_BYTES: usize = SLOTS_AT + 2 * SLOT_BYTES;

/// The most members that exchange directly.
pub const MAX_MEMBERS: usize = 64;

/// Bytes of each operand that are read and combined at a time: they stay in the second-level cache.
const BLOCK_BYTES: usize = 64 * 1024;

/// Bytes gathered between two looks at everything else.
const PULL_BYTES: usize = 4 * 1024 * 1024;

/// Shards begin at multiples of this many elements.
const SHARD_ELEMENTS: u64 = 64;

/// Fruitless looks between two checks whether the awaited rank has left.
const PATIENCE: u32 = 8;

/// How long a rank of the same process may take to read what it has begun to read.
const READ: Duration = Duration::from_secs(1);

/// What a member posts for one call. Word 0 is the number of the call, stored last.
#[repr(C, align(64))]
struct Post {
    call: AtomicU64,
    what: AtomicU64,
    root: AtomicU64,
    count: AtomicU64,
    input: AtomicU64,
    output: AtomicU64,
    bytes: AtomicU64,
}

/// The first bytes of a board.
#[repr(C, align(64))]
struct Board {
    posts: [Post; 2],
    mark: Word,
    /// Not 0 once the owner has given up a call.
    withdrawn: Word,
    /// Not 0 while the owner reads another member's private memory.
    reading: Word,
    /// Set by each other member when it needs this board no more.
    goodbyes: [AtomicU8; MAX_MEMBERS],
}

#[repr(C, align(64))]
struct Word(AtomicU64);

/// The members of a group, all on this host, as they see each other's boards.
pub struct Direct {
    rank: usize,
    own: Option<Region>,
    retired: Arc<Retired>,
    /// Where each member's board is mapped here; this rank's own among them.
    boards: Vec<*mut u8>,
    /// Every member's memory but this rank's.
    peers: Vec<Option<Arc<PeerMemory>>>,
    /// Whether every member can read every other's private memory.
    pulls: bool,
    fork: u32,
    /// Calls that have begun so far. Only the call whose turn it is touches this.
    calls: AtomicU64,
    /// The last call that every member is known to have entered. Likewise.
    entered: AtomicU64,
}

// SAFETY: the boards live in segments that `own` and `peers` keep mapped; they are accessed as atomics and, under the
// protocol of posts, as bytes that nobody writes meanwhile.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

/// How a call is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Through the slots.
    Short,
    /// Out of private memory.
    Long,
}

/// One call, as far as the exchange is concerned.
#[derive(Clone, Debug)]
pub struct Job {
    /// What is asked for.
    pub collective: Collective,
    /// Whether counts may differ between ranks in a way that not every rank knows.
    pub listed: bool,
    /// What this rank contributes.
    pub input: *const u8,
    /// Where its result goes.
    pub output: *mut u8,
    /// Whether output and input share memory.
    pub in_place: bool,
    /// Type of the elements.
    pub dtype: DataType,
    /// Set when the operation reduces.
    pub reducer: Option<Reducer>,
}

impl Direct {
    /// `offsets` are where the members' boards lie in their segments. `None` when one of them is not reachable.
    pub fn new(
        rank: usize,
        own: Region,
        retired: Arc<Retired>,
        peers: Vec<Option<Arc<PeerMemory>>>,
        offsets: &[u64],
        pulls: bool,
    ) -> Option<Direct> {
        let mut boards = Vec::with_capacity(peers.len());
        for (index, (peer, &offset)) in peers.iter().zip(offsets).enumerate() {
            boards.push(match peer {
                _ if index == rank => own.address().as_ptr(),
                Some(memory) => memory.segment.address(usize::try_from(offset).ok()?, BOARD_BYTES)?.as_ptr(),
                None => return None,
            });
        }
        let (calls, entered) = (AtomicU64::new(0), AtomicU64::new(0));
        let fork = sys::fork::generation();
        Some(Direct { rank, own: Some(own), retired, boards, peers, pulls, fork, calls, entered })
    }

    /// How a call is exchanged; `None`: not at all, messages do it. The same answer on every member.
    pub fn path(&self, job: &Job) -> Option<Path> {
        let element = job.dtype.size() as u64;
        let size = self.size() as u64;
        let contribution = match &job.collective {
            _ if job.listed => u64::MAX,
            Collective::Allreduce { count } | Collective::Reduce { count, .. } => {
                // Everybody reads everything: with more ranks, sharing the work pays earlier.
                count * (size.max(2) / 2)
            }
            Collective::Broadcast { count, .. } => *count,
            Collective::Allgather { counts } => counts.iter().copied().max().unwrap_or(0),
            Collective::Gather { counts, .. } => counts[0],
            Collective::Scatter { counts, .. } | Collective::ReduceScatter { counts } => counts.iter().sum(),
            Collective::Alltoall { send_counts, .. } => send_counts.iter().sum(),
            Collective::Barrier => 0,
        };
        if contribution.saturating_mul(element) <= SLOT_BYTES as u64 {
            return Some(Path::Short);
        }
        self.pulls.then_some(Path::Long)
    }

    fn size(&self) -> usize {
        self.boards.len()
    }

    fn board(&self, member: usize) -> &Board {
        // SAFETY: a board is BOARD_BYTES of mapped, zero-initialised shared memory, aligned to a page, that lives as long as
        // `self`; `Board` consists of atomics.
        unsafe { &*self.boards[member].cast::<Board>() }
    }

    fn post(&self, member: usize, call: u64) -> &Post {
        &self.board(member).posts[(call & 1) as usize]
    }

    /// The slot of `member` for `call`.
    fn slot(&self, member: usize, call: u64) -> *mut u8 {
        self.boards[member].wrapping_add(SLOTS_AT + (call & 1) as usize * SLOT_BYTES)
    }

    fn ring(&self) {
        for memory in self.peers.iter().flatten() {
            memory.bell.ring_if_parked();
        }
    }

    /// Says that this rank has come to `phase` of `call`.
    fn mark(&self, call: u64, phase: u64) {
        self.board(self.rank).mark.0.store(call * 4 + phase, Ordering::Release);
        self.ring();
    }

    fn has_marked(&self, member: usize, call: u64, phase: u64) -> bool {
        self.board(member).mark.0.load(Ordering::Acquire) >= call * 4 + phase
    }

    /// Whether `member` has entered `call`.
    fn has_entered(&self, member: usize, call: u64) -> bool {
        // A member that has posted a later call of the same parity has entered this one, too.
        self.post(member, call).call.load(Ordering::Acquire) >= call
    }

    fn has_withdrawn(&self, member: usize) -> bool {
        self.board(member).withdrawn.0.load(Ordering::SeqCst) != 0
    }

    /// This rank's memory is about to be its caller's again: what others read from here on does not count.
    fn withdraw(&self) {
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

    /// Reads from the private memory of `member`.
    ///
    /// # Safety
    /// The member has posted the address for a call that it has not left, and does not write there unless it withdraws.
    unsafe fn pull(&self, member: usize, address: u64, into: *mut u8, len: usize) -> Result<(), Stop> {
        let reading = &self.board(self.rank).reading.0;
        // Against `withdraw`: either this sees the withdrawal, or the member sees this read.
        reading.store(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        let result = unsafe { self.pull_parts(member, address, into, len) };
        reading.store(0, Ordering::Release);
        fence(Ordering::Acquire);
        if self.has_withdrawn(member) { Err(Stop::Withdrawn(member)) } else { result }
    }

    /// # Safety
    /// As [`Direct::pull`].
    unsafe fn pull_parts(&self, member: usize, address: u64, into: *mut u8, len: usize) -> Result<(), Stop> {
        let Some(memory) = &self.peers[member] else { return Ok(()) };
        let mut done = 0;
        while done < len {
            if self.has_withdrawn(member) {
                return Err(Stop::Withdrawn(member));
            }
            let count = PULL_BYTES.min(len - done);
            // SAFETY: the destination is this rank's, of `len` bytes; the source is promised by the caller.
            let result = unsafe {
                let rest = std::slice::from_raw_parts_mut(into.add(done), count);
                memory.pull(address.wrapping_add(done as u64), rest)
            };
            result.map_err(|cause| match cause.raw_os_error() {
                // The process is gone. How it ended is about to be told.
                Some(libc::ESRCH) => Stop::Withdrawn(member),
                _ => Stop::Failed(Error::system(
                    format!("{count} bytes at {address:#x} could not be read from rank {member}'s memory"),
                    cause,
                )),
            })?;
            done += count;
        }
        Ok(())
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
            if let Some(own) = &mut self.own {
                own.retire();
            }
            return;
        }
        for member in 0..self.size() {
            if member != self.rank {
                self.board(member).goodbyes[self.rank].store(1, Ordering::Release);
            }
        }
        if let Some(own) = self.own.take() {
            self.retired.add(own, self.rank, self.size());
        }
    }
}

/// Boards of groups that are gone, each kept until every member has said goodbye to it: a member that is slow may
/// still read from it.
#[derive(Default)]
pub struct Retired(Mutex<Vec<(Region, usize, usize)>>);

impl Retired {
    fn add(&self, board: Region, rank: usize, size: usize) {
        lock(&self.0).push((board, rank, size));
    }

    /// Gives back the boards that nobody reads any more.
    pub fn sweep(&self) {
        lock(&self.0).retain(|(region, rank, size)| {
            // SAFETY: a board is BOARD_BYTES of mapped shared memory that consists of atomics here.
            let board = unsafe { &*region.address().as_ptr().cast::<Board>() };
            (0..*size).any(|member| member != *rank && board.goodbyes[member].load(Ordering::Acquire) == 0)
        });
    }
}

impl Post {
    fn write(&self, call: u64, signature: &Signature, input: u64, output: u64, bytes: u64) {
        let what = u64::from(signature.kind as u8)
            | u64::from(signature.dtype as u8) << 8
            | u64::from(signature.operator) << 16
            | u64::from(signature.algorithm) << 24;
        self.what.store(what, Ordering::Relaxed);
        self.root.store(u64::from(signature.root), Ordering::Relaxed);
        self.count.store(signature.count, Ordering::Relaxed);
        self.input.store(input, Ordering::Relaxed);
        self.output.store(output, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.call.store(call, Ordering::Release);
    }

    fn signature(&self) -> Option<Signature> {
        let what = self.what.load(Ordering::Relaxed);
        Some(Signature {
            kind: Kind::from_number((what & 0xff) as i32).ok()?,
            dtype: DataType::from_number((what >> 8 & 0xff) as i32).ok()?,
            operator: (what >> 16) as u8,
            algorithm: (what >> 24) as u8,
            root: self.root.load(Ordering::Relaxed) as u32,
            count: self.count.load(Ordering::Relaxed),
        })
    }
}

/// Why a call does not go on.
enum Stop {
    /// This member has given up, or is gone: the news are on their way.
    Withdrawn(usize),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

/// How far a call has come here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waiting until the post of two calls ago is no more needed.
    Enter,
    /// Posted; waiting for the posts of those that this rank depends on.
    Arrive,
    /// Reading.
    Work,
    /// Long reductions: reading the others' shards as they become ready.
    Gather,
    /// Waiting until nobody reads from this rank any more.
    Leave,
    /// A member has given up: waiting to hear why.
    Forsaken,
}

/// One call under way.
pub struct DirectRun {
    direct: Arc<Direct>,
    job: Job,
    path: Path,
    key: Key,
    signature: Signature,
    /// Its number among the direct calls; 0 until its turn has come.
    call: u64,
    stage: Stage,
    /// The member that is looked at next in the current stage.
    next: usize,
    looks: u32,
    /// The awaited member, once it is seen to have left. What it did before is there at the next look.
    leaver: Option<usize>,
    workspace: Option<Workspace>,
}

// SAFETY: the job's pointers are the caller's, promised to be usable from the library's threads.
unsafe impl Send for DirectRun {}

impl DirectRun {
    /// A run for `turn`. Direct calls of one group run one after the other.
    ///
    /// # Safety
    /// The job's buffers stay valid until the run has ended or is abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, direct: Arc<Direct>, job: Job, path: Path) -> DirectRun {
        let key =
            Key { group: group.id(), tag: turn.tag, sequence: turn.sequence, slot: 0, class: turn.class };
        let signature = turn.signature;
        let (call, stage, next, looks, leaver) = (0, Stage::Enter, 0, 0, None);
        DirectRun { direct, job, path, key, signature, call, stage, next, looks, leaver, workspace: None }
    }

    fn root(&self) -> Option<usize> {
        match self.job.collective {
            Collective::Reduce { root, .. }
            | Collective::Broadcast { root, .. }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => Some(root as usize),
            _ => None,
        }
    }

    /// Whether this rank waits for `member` to have entered, marked `Gather`'s shard, or left.
    fn depends_on(&self, member: usize) -> bool {
        let rank = self.direct.rank;
        if member == rank {
            return false;
        }
        match (self.root(), self.stage) {
            (None, _) | (_, Stage::Forsaken) => true,
            (Some(_), Stage::Enter) => true,
            // The root hears from all, so that a call with another root is noticed there.
            (Some(root), Stage::Arrive) if self.path == Path::Short || !self.shares_work() => {
                rank == root || member == root
            }
            (Some(_), Stage::Arrive) => true,
            (Some(root), Stage::Gather) => rank == root,
            (Some(root), Stage::Leave | Stage::Work) => match self.job.collective {
                Collective::Reduce { .. } => true,
                Collective::Gather { .. } => member == root,
                _ => rank == root,
            },
        }
    }

    /// Whether every rank reduces a shard.
    fn shares_work(&self) -> bool {
        matches!(self.job.collective, Collective::Allreduce { .. } | Collective::Reduce { .. })
    }

    /// Goes through the members from `next` on; stops at the first that is not `there`.
    fn all(&mut self, there: impl Fn(&Direct, usize) -> bool) -> bool {
        while self.next < self.direct.size() {
            if self.depends_on(self.next) && !there(&self.direct, self.next) {
                return false;
            }
            self.next += 1;
        }
        true
    }

    fn step(&mut self, stage: Stage) {
        self.stage = stage;
        self.next = 0;
        self.looks = 0;
        self.leaver = None;
    }

    fn bytes(&self, elements: u64) -> usize {
        elements as usize * self.job.dtype.size()
    }

    /// Shard `index` of a long reduction of `count` elements: first element and length.
    fn shard(&self, count: u64, index: usize) -> (u64, u64) {
        let members = self.direct.size() as u64;
        let each = count.div_ceil(members).next_multiple_of(SHARD_ELEMENTS);
        let start = (each * index as u64).min(count);
        (start, each.min(count - start))
    }

    // ---- the stages

    /// Puts down what others will read, and posts.
    fn enter(&mut self, group: &Group) {
        let rank = self.direct.rank as u32;
        let contribution = self.bytes(self.job.collective.input_len(rank));
        let (mut input, mut output) = (self.job.input as u64, self.job.output as u64);
        match self.path {
            Path::Short => {
                let contributes = match self.root() {
                    Some(root) => match self.job.collective {
                        Collective::Broadcast { .. } | Collective::Scatter { .. } => root == self.direct.rank,
                        _ => root != self.direct.rank,
                    },
                    None => true,
                };
                if contributes && contribution > 0 {
                    let slot = self.direct.slot(self.direct.rank, self.call);
                    // SAFETY: `Direct::path` chose the slots because every contribution fits; the input holds
                    // `contribution` bytes; nobody reads the slot of this parity any more (`Stage::Enter`).
                    unsafe { std::ptr::copy_nonoverlapping(self.job.input, slot, contribution) };
                }
            }
            Path::Long => {
                match &self.job.collective {
                    // The shard that is reduced here for the root; and the blocks that are combined.
                    Collective::Reduce { count, root } => {
                        let (_, len) = self.shard(*count, self.direct.rank);
                        let shard = self.bytes(len).next_multiple_of(64);
                        let workspace = group.workspace(shard + self.blocks());
                        if rank != *root {
                            output = workspace.address() as u64;
                        }
                        self.workspace = Some(workspace);
                    }
                    Collective::Allreduce { .. } | Collective::ReduceScatter { .. } => {
                        self.workspace = Some(group.workspace(self.blocks()));
                    }
                    // What others will read would be overwritten here.
                    Collective::Alltoall { .. } if self.job.in_place => {
                        let workspace = group.workspace(contribution);
                        // SAFETY: both hold `contribution` bytes.
                        unsafe {
                            std::ptr::copy_nonoverlapping(self.job.input, workspace.address(), contribution);
                        }
                        input = workspace.address() as u64;
                        self.workspace = Some(workspace);
                    }
                    _ => {}
                }
                if self.job.listed {
                    self.write_table();
                }
            }
        }
        let post = self.direct.post(self.direct.rank, self.call);
        post.write(self.call, &self.signature, input, output, contribution as u64);
        self.direct.ring();
    }

    /// Bytes of the blocks that a long reduction combines at a time.
    fn blocks(&self) -> usize {
        BLOCK_BYTES * (self.direct.size() - 1)
    }

    /// Where each rank finds its block in this rank's input, and how long it is.
    fn write_table(&self) {
        let counts = match &self.job.collective {
            Collective::Scatter { counts, root } if *root as usize == self.direct.rank => counts,
            Collective::Alltoall { send_counts, .. } => send_counts,
            _ => return,
        };
        let table = self.direct.slot(self.direct.rank, self.call).cast::<[u64; 2]>();
        let mut start = 0;
        for (index, &count) in counts.iter().enumerate() {
            let entry = [self.bytes(start) as u64, self.bytes(count) as u64];
            // SAFETY: a table of MAX_MEMBERS entries fits a slot, which is aligned to a page.
            unsafe { table.add(index).write(entry) };
            start += count;
        }
    }

    fn table(&self, member: usize) -> (u64, u64) {
        let table = self.direct.slot(member, self.call).cast::<[u64; 2]>();
        // SAFETY: the member has written its table before it posted, and `rank` is below MAX_MEMBERS.
        let [start, len] = unsafe { table.add(self.direct.rank).read() };
        (start, len)
    }

    /// Compares the posts of those that this rank depends on with its own call.
    fn compare(&self, group: &Group) -> Result<()> {
        for member in 0..self.direct.size() {
            if !self.depends_on(member) {
                continue;
            }
            let post = self.direct.post(member, self.call);
            let (theirs, bytes) = (post.signature(), post.bytes.load(Ordering::Relaxed));
            let own = self.bytes(self.job.collective.input_len(self.direct.rank as u32)) as u64;
            // Accumulators of several buffers are longer than the elements of one.
            let bytes = (self.signature.kind.reduces() && bytes != own).then_some((bytes, own));
            if theirs == Some(self.signature) && bytes.is_none() {
                continue;
            }
            let Some(theirs) = theirs else {
                return Err(Error::new(
                    Status::Internal,
                    format!("rank {member} has posted something unknown"),
                ));
            };
            let peer = group.members()[member];
            let bytes = bytes.filter(|_| theirs == self.signature);
            let mismatch = Mismatch { peer, key: self.key, theirs, ours: Some(self.signature), bytes };
            return Err(group.explain(&mismatch, group.endpoint().recorder()));
        }
        Ok(())
    }

    /// Reads what the others have posted. Whether there is more to do ([`Stage::Gather`]).
    fn work(&mut self) -> Result<bool, Stop> {
        match self.path {
            Path::Short => {
                self.work_short();
                Ok(false)
            }
            Path::Long => self.work_long(),
        }
    }

    fn work_short(&mut self) {
        let (rank, size) = (self.direct.rank, self.direct.size());
        let (input, output) = (self.job.input, self.job.output);
        let call = self.call;
        match &self.job.collective {
            Collective::Barrier => {}
            Collective::Allreduce { count } => self.fold_slots(0, *count),
            Collective::Reduce { count, root } => {
                if rank == *root as usize {
                    self.fold_slots(0, *count);
                }
            }
            Collective::ReduceScatter { counts } => {
                let start = counts[..rank].iter().sum();
                self.fold_slots(start, counts[rank]);
            }
            Collective::Broadcast { count, root } => {
                let root = *root as usize;
                let from = if rank == root { input } else { self.direct.slot(root, call).cast_const() };
                self.copy(from, output, self.bytes(*count));
            }
            Collective::Allgather { counts } | Collective::Gather { counts, .. } => {
                if self.root().is_some_and(|root| root != rank) {
                    return;
                }
                let mut to = output;
                for (member, &count) in counts.iter().enumerate() {
                    let len = self.bytes(count);
                    let from =
                        if member == rank { input } else { self.direct.slot(member, call).cast_const() };
                    self.copy(from, to, len);
                    to = to.wrapping_add(len);
                }
            }
            Collective::Scatter { counts, root } => {
                let (root, start) = (*root as usize, self.bytes(counts[..rank].iter().sum()));
                let base = if rank == root { input } else { self.direct.slot(root, call).cast_const() };
                self.copy(base.wrapping_add(start), output, self.bytes(counts[rank]));
            }
            Collective::Alltoall { send_counts, .. } => {
                let block = self.bytes(send_counts[rank]);
                for member in 0..size {
                    let to = output.wrapping_add(member * block);
                    // In place, this rank's own input is already being overwritten: its slot holds it, too.
                    let from = self.direct.slot(member, call).wrapping_add(rank * block);
                    self.copy(from, to, block);
                }
            }
        }
    }

    /// Copies `len` bytes from this rank's input or a slot to this rank's output, unless they are there.
    fn copy(&self, from: *const u8, to: *mut u8, len: usize) {
        if len > 0 && !std::ptr::eq(from, to) {
            // SAFETY: lengths come from the call's own counts, for which the caller's buffers are valid, and which
            // fit the slots (`Direct::path`). Input and output are the same (excluded) or apart.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        }
    }

    /// Combines `count` elements from element `start` of all contributions into the output.
    fn fold_slots(&self, start: u64, count: u64) {
        let Some(reducer) = &self.job.reducer else { return };
        let offset = self.bytes(start);
        let mut operands = [EMPTY; MAX_MEMBERS];
        let size = self.direct.size();
        for (member, operand) in operands[..size].iter_mut().enumerate() {
            let base = if member == self.direct.rank {
                self.job.input
            } else {
                self.direct.slot(member, self.call).cast_const()
            };
            operand.address = base.wrapping_add(offset);
        }
        // SAFETY: contributions hold `start + count` elements and fit the slots; nobody writes the slots before all have
        // entered the next call; the output is this rank's, its own input or apart from all operands.
        unsafe {
            reducer.fold(&operands[..size], self.job.output, Representation::Element, count as usize);
        }
    }

    fn work_long(&mut self) -> Result<bool, Stop> {
        let (rank, size) = (self.direct.rank, self.direct.size());
        let (input, output) = (self.job.input, self.job.output);
        let collective = std::mem::replace(&mut self.job.collective, Collective::Barrier);
        let result = match &collective {
            Collective::Barrier => Ok(false),
            Collective::Allreduce { count } => {
                let (start, len) = self.shard(*count, rank);
                self.fold_private(start, len, output.wrapping_add(self.bytes(start))).map(|()| true)
            }
            Collective::Reduce { count, root } => {
                let (start, len) = self.shard(*count, rank);
                let to = match &self.workspace {
                    Some(workspace) if rank != *root as usize => workspace.address(),
                    _ => output.wrapping_add(self.bytes(start)),
                };
                self.fold_private(start, len, to).map(|()| true)
            }
            Collective::ReduceScatter { counts } => {
                let start = counts[..rank].iter().sum();
                self.fold_private(start, counts[rank], output).map(|()| false)
            }
            Collective::Broadcast { count, root } => {
                let len = self.bytes(*count);
                if rank == *root as usize {
                    self.copy(input, output, len);
                    Ok(false)
                } else {
                    self.take(*root as usize, 0, output, len).map(|()| false)
                }
            }
            Collective::Allgather { counts } => self.take_blocks(counts, false),
            Collective::Gather { counts, root } => {
                if rank == *root as usize {
                    self.take_blocks(counts, self.job.listed)
                } else {
                    Ok(false)
                }
            }
            Collective::Scatter { counts, root } => {
                let (root, len) = (*root as usize, self.bytes(counts[rank]));
                let mine = self.bytes(counts[..rank].iter().sum());
                if rank == root {
                    self.copy(input.wrapping_add(mine), output, len);
                    Ok(false)
                } else {
                    let (start, sent) =
                        if self.job.listed { self.table(root) } else { (mine as u64, len as u64) };
                    self.expect(root, sent, len)
                        .map_err(Stop::Failed)
                        .and_then(|()| self.take(root, start, output, len))
                        .map(|()| false)
                }
            }
            Collective::Alltoall { send_counts, recv_counts } => {
                let mut to = output;
                let own: u64 = send_counts[..rank].iter().sum();
                (0..size)
                    .try_for_each(|member| {
                        let len = self.bytes(recv_counts[member]);
                        let target = to;
                        to = to.wrapping_add(len);
                        if member == rank {
                            // In place it is where it belongs.
                            if !self.job.in_place {
                                self.copy(input.wrapping_add(self.bytes(own)), target, len);
                            }
                            return Ok(());
                        }
                        let (start, sent) = match self.job.listed {
                            true => self.table(member),
                            false => ((rank * len) as u64, len as u64),
                        };
                        self.expect(member, sent, len)?;
                        self.take(member, start, target, len)
                    })
                    .map(|()| false)
            }
        };
        self.job.collective = collective;
        result
    }

    /// Reads a block from every other rank; `listed`: lengths are checked against what they posted.
    fn take_blocks(&self, counts: &[u64], listed: bool) -> Result<bool, Stop> {
        let mut to = self.job.output;
        for (member, &count) in counts.iter().enumerate() {
            let len = self.bytes(count);
            if member == self.direct.rank {
                self.copy(self.job.input, to, len);
            } else {
                if listed {
                    let posted = self.direct.post(member, self.call).bytes.load(Ordering::Relaxed);
                    self.expect(member, posted, len)?;
                }
                self.take(member, 0, to, len)?;
            }
            to = to.wrapping_add(len);
        }
        Ok(false)
    }

    /// A rank sends as much as this one expects, or the call fails.
    fn expect(&self, member: usize, sent: u64, expected: usize) -> Result<()> {
        if sent == expected as u64 {
            return Ok(());
        }
        let name = self.signature.kind.name();
        let text = format!(
            "rank {member} gives {sent} bytes to {name} where rank {} expects {expected}",
            self.direct.rank
        );
        Err(Error::new(Status::Mismatch, text))
    }

    /// Reads `len` bytes from byte `start` of what `member` posted as its input.
    fn take(&self, member: usize, start: u64, to: *mut u8, len: usize) -> Result<(), Stop> {
        let from = self.direct.post(member, self.call).input.load(Ordering::Relaxed);
        // SAFETY: the member has entered this call and leaves it only after this rank's mark; it does not write its input in
        // between. `to` is inside this rank's output.
        unsafe { self.direct.pull(member, from.wrapping_add(start), to, len) }
    }

    /// Combines `len` elements from element `start` of everybody's input into `to`, block by block.
    fn fold_private(&self, start: u64, len: u64, to: *mut u8) -> Result<(), Stop> {
        let (Some(reducer), Some(workspace)) = (&self.job.reducer, &self.workspace) else {
            return Err(Error::new(Status::Internal, "a reduction without its operator").into());
        };
        let (rank, size) = (self.direct.rank, self.direct.size());
        let blocks = workspace.address().wrapping_add(workspace.bytes() - self.blocks());
        let per_block = (BLOCK_BYTES / self.job.dtype.size()) as u64;
        let mut operands = [EMPTY; MAX_MEMBERS];
        let mut done = 0;
        while done < len {
            let count = per_block.min(len - done);
            let (offset, bytes) = (self.bytes(start + done), self.bytes(count));
            let mut block = blocks;
            for member in 0..size {
                if member == rank {
                    operands[member].address = self.job.input.wrapping_add(offset);
                    continue;
                }
                self.take(member, offset as u64, block, bytes)?;
                operands[member].address = block.cast_const();
                block = block.wrapping_add(BLOCK_BYTES);
            }
            // SAFETY: the blocks hold `bytes` bytes each; `to` holds `len` elements and is apart from the operands, or is
            // this rank's own input at the same place.
            unsafe {
                let to = to.wrapping_add(self.bytes(done));
                reducer.fold(&operands[..size], to, Representation::Element, count as usize);
            }
            done += count;
        }
        Ok(())
    }

    /// Reads the shards of the others as they become ready. Whether all are here.
    fn gather(&mut self) -> Result<bool, Stop> {
        let count = match self.job.collective {
            Collective::Allreduce { count } | Collective::Reduce { count, .. } => count,
            _ => return Ok(true),
        };
        let (rank, size) = (self.direct.rank, self.direct.size());
        let in_workspace = self.root().is_some();
        while self.next < size {
            // Everybody begins with another one, so that not all read from the same rank at once.
            let member = (rank + self.next) % size;
            if self.depends_on(member) {
                if !self.direct.has_marked(member, self.call, 1) {
                    return Ok(false);
                }
                let (start, len) = self.shard(count, member);
                let offset = self.bytes(start);
                let posted = self.direct.post(member, self.call).output.load(Ordering::Relaxed);
                let from = if in_workspace { posted } else { posted.wrapping_add(offset as u64) };
                let to = self.job.output.wrapping_add(offset);
                // SAFETY: the member has marked its shard as done and leaves after this rank's mark.
                unsafe { self.direct.pull(member, from, to, self.bytes(len)) }?;
            }
            self.next += 1;
        }
        Ok(true)
    }

    fn forsake(&mut self, member: usize) {
        self.step(Stage::Forsaken);
        self.next = member;
    }

    /// Which mark of the others this rank waits for before it leaves, and which it sets itself when its work is done.
    fn last_phase(&self) -> u64 {
        if self.shares_work() { 2 } else { 1 }
    }

    fn ended(&mut self, group: &Group) -> Poll<Result<Completion>> {
        if let Some(workspace) = self.workspace.take() {
            group.keep_workspace(workspace);
        }
        Poll::Ready(Ok(Completion::default()))
    }

    /// Nothing yet. Now and then, looks whether the awaited rank has left for good.
    fn pending(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.looks += 1;
        if self.looks.is_multiple_of(PATIENCE) && group.endpoint().has_lost_any() {
            let member = match self.stage {
                Stage::Gather => (self.direct.rank + self.next) % self.direct.size(),
                _ => self.next,
            };
            if let Some(&peer) = group.members().get(member)
                && group.endpoint().messages().gone(peer)
                && self.leaver.replace(member) == Some(member)
            {
                let who = group.describe_rank(member as u32);
                return Poll::Ready(Err(Error::new(
                    Status::PeerFailed,
                    format!("{who} has left: it destroyed its context, or its process ended"),
                )));
            }
        }
        Poll::Pending
    }
}

const EMPTY: Operand =
    Operand { address: std::ptr::null(), representation: Representation::Element, scale: 1.0 };

impl Operation for DirectRun {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        loop {
            match self.stage {
                Stage::Enter => {
                    if self.call == 0 {
                        self.call = self.direct.calls.fetch_add(1, Ordering::Relaxed) + 1;
                    }
                    let before = self.call - 1;
                    if self.direct.entered.load(Ordering::Relaxed) < before {
                        if !self.all(|direct, member| direct.has_entered(member, before)) {
                            return self.pending(group);
                        }
                        self.direct.entered.store(before, Ordering::Relaxed);
                    }
                    self.enter(group);
                    self.step(Stage::Arrive);
                }
                Stage::Arrive => {
                    let call = self.call;
                    if !self.all(|direct, member| direct.has_entered(member, call)) {
                        return self.pending(group);
                    }
                    if let Err(error) = self.compare(group) {
                        return Poll::Ready(Err(error));
                    }
                    if self.root().is_none() {
                        self.direct.entered.store(call, Ordering::Relaxed);
                    }
                    self.step(Stage::Work);
                }
                Stage::Work => {
                    let more = match self.work() {
                        Ok(more) => more,
                        Err(Stop::Withdrawn(member)) => {
                            self.forsake(member);
                            continue;
                        }
                        Err(Stop::Failed(error)) => return Poll::Ready(Err(error)),
                    };
                    if self.path == Path::Short {
                        return self.ended(group);
                    }
                    self.direct.mark(self.call, 1);
                    self.step(if more { Stage::Gather } else { Stage::Leave });
                }
                Stage::Gather => {
                    match self.gather() {
                        Ok(true) => {}
                        Ok(false) => return self.pending(group),
                        Err(Stop::Withdrawn(member)) => {
                            self.forsake(member);
                            continue;
                        }
                        Err(Stop::Failed(error)) => return Poll::Ready(Err(error)),
                    }
                    self.direct.mark(self.call, 2);
                    self.step(Stage::Leave);
                }
                // The failure of the group ends it.
                Stage::Forsaken => return self.pending(group),
                Stage::Leave => {
                    let (call, phase) = (self.call, self.last_phase());
                    if !self.all(|direct, member| direct.has_marked(member, call, phase)) {
                        return self.pending(group);
                    }
                    return self.ended(group);
                }
            }
        }
    }

    fn abandon(&mut self, group: &Group) {
        if self.path == Path::Long && self.call > 0 && self.stage != Stage::Enter {
            self.direct.withdraw();
        }
        if let Some(workspace) = self.workspace.take() {
            group.keep_workspace(workspace);
        }
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        let there = |member: usize| match self.stage {
            Stage::Forsaken => member != self.next,
            Stage::Enter => self.direct.has_entered(member, self.call.saturating_sub(1)),
            Stage::Arrive | Stage::Work => self.direct.has_entered(member, self.call),
            Stage::Gather => self.direct.has_marked(member, self.call, 1),
            Stage::Leave => self.direct.has_marked(member, self.call, self.last_phase()),
        };
        (0..self.direct.size())
            .filter(|&member| self.depends_on(member) && !there(member))
            .map(|m| m as u32)
            .collect()
    }

    fn through(&self) -> Through {
        Through::Memory
    }
}
