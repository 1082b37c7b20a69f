//! One call of a direct exchange, from its post to its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use super::board::{Direct, Part, Stop};
use super::copies::Copies;
use super::watch::Watch;
use super::{Job, Path, shard};
use crate::engine::allowance::Allowance;
use crate::engine::endpoint::{Away, Through};
use crate::engine::executor::Workspace;
use crate::engine::group::{Group, Turn};
use crate::engine::joint::Team;
use crate::engine::operation::{Completion, Operation};
use crate::engine::wire::Key;
use crate::error::Result;
use crate::reduce::Reducer;
use crate::schedule::Collective;
use crate::signature::Signature;
use crate::sys;

/// Bytes of the others' operands that are read and combined at a time: they stay in the second-level cache.
const BLOCKS_BYTES: usize = 384 * 1024;

/// The least, and the most, of one operand. A block costs a system call.
const BLOCK_BYTES: (usize, usize) = (64 * 1024, 256 * 1024);

/// The same where several threads share a reduction: their system calls hold up each other.
const SHARED_BLOCK_BYTES: (usize, usize) = (256 * 1024, 1024 * 1024);

/// Bytes of a rank's part of a reduction that several threads share, at least.
const SHARED_BYTES: usize = 4 * 1024 * 1024;

/// Results of at least this many bytes do not stay in the caches until all is reduced: the others' shards are
/// read as they grow. Shorter ones are quicker one after the other.
const GATHERED_EARLY_BYTES: usize = 8 * 1024 * 1024;

/// The most bytes of a slot that are fetched ahead of its post. Of more, the processor itself fetches ahead.
const PREFETCHED_BYTES: usize = 1024;

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
    pub(super) direct: Arc<Direct>,
    pub(super) job: Job,
    pub(super) path: Path,
    pub(super) key: Key,
    pub(super) signature: Signature,
    /// Its number among the direct calls; 0 until its turn has come.
    pub(super) call: u64,
    stage: Stage,
    /// The member that is looked at next in the current stage.
    pub(super) next: usize,
    watch: Watch,
    pub(super) workspace: Option<Workspace>,
    /// How many share a long reduction.
    pub(super) threads: usize,
    /// Long calls: bytes of the block that is read, the shard that is combined or the copy that is made that
    /// are done: the next look goes on from there.
    pub(super) done: usize,
    /// Long calls: elements of each member's shard that have been read.
    pub(super) gathered: Box<[u64]>,
    /// Whether the last look has stopped in the middle.
    at_work: bool,
    /// Set once memory is found that only its owner can read.
    pub(super) copies: Option<Box<Copies>>,
}

// SAFETY: the job's pointers are the caller's, promised to be usable from the library's threads.
unsafe impl Send for DirectRun {}

impl DirectRun {
    /// A run for `turn`. Direct calls of one group run one after the other.
    ///
    /// # Safety
    /// The job's buffers stay valid until the run has ended or is abandoned.
    pub unsafe fn new(group: &Group, turn: &Turn, direct: Arc<Direct>, job: Job, path: Path) -> DirectRun {
        let key = turn.key(group);
        let signature = turn.signature;
        let (call, stage, next, watch) = (0, Stage::Enter, 0, Watch::default());
        let gathered = match path {
            Path::Short => Box::default(),
            Path::Long => vec![0; direct.size()].into_boxed_slice(),
        };
        let (workspace, threads, done, at_work) = (None, 1, 0, false);
        DirectRun {
            direct,
            job,
            path,
            key,
            signature,
            call,
            stage,
            next,
            watch,
            workspace,
            threads,
            done,
            gathered,
            at_work,
            copies: None,
        }
    }

    pub(super) fn root(&self) -> Option<usize> {
        match self.job.collective {
            Collective::Reduce { root, .. }
            | Collective::Broadcast { root, .. }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => Some(root as usize),
            _ => None,
        }
    }

    /// Whether this rank waits for `member` to have entered, marked `Gather`'s shard, or left.
    pub(super) fn depends_on(&self, member: usize) -> bool {
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
        (self.next, self.done, self.at_work) = (0, 0, false);
        self.watch = Watch::default();
        // Who has given a copy may be in its next call once this rank has set its mark: what it says of
        // copies then is of that call.
        if let Some(copies) = &mut self.copies {
            copies.asked = None;
        }
    }

    pub(super) fn bytes(&self, elements: u64) -> usize {
        elements as usize * self.job.dtype.size()
    }

    /// Shard `index` of a long reduction of `count` elements: first element and length.
    pub(super) fn shard(&self, count: u64, index: usize) -> (u64, u64) {
        shard(count, index, self.direct.size())
    }

    // ---- the stages

    /// Puts down what others will read, as far as `allowance` goes, and posts when all of it is there.
    /// Whether it has.
    fn enter(&mut self, group: &Group, allowance: &mut Allowance) -> Result<bool> {
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
                if contribution / self.direct.size() >= SHARED_BYTES {
                    self.threads = group.endpoint().threads();
                }
                match &self.job.collective {
                    // The shard that is reduced here for the root; and the blocks that are combined.
                    Collective::Reduce { count, root } => {
                        let (_, len) = self.shard(*count, self.direct.rank);
                        let shard = self.bytes(len).next_multiple_of(64);
                        let workspace = group.workspace(shard + self.blocks())?;
                        if rank != *root {
                            output = workspace.address() as u64;
                        }
                        self.workspace = Some(workspace);
                    }
                    Collective::Allreduce { .. } | Collective::ReduceScatter { .. } => {
                        self.workspace = Some(group.workspace(self.blocks())?);
                    }
                    // What others will read would be overwritten here.
                    Collective::Alltoall { .. } if self.job.in_place => {
                        let workspace = match self.workspace.take() {
                            Some(workspace) => workspace,
                            None => group.workspace(contribution)?,
                        };
                        let to = workspace.address();
                        self.workspace = Some(workspace);
                        if !self.copy_on(self.job.input, to, contribution, allowance, &**group.endpoint()) {
                            return Ok(false);
                        }
                        input = to as u64;
                    }
                    _ => {}
                }
                if self.job.listed {
                    self.write_table();
                }
                self.direct.note_folded(0);
            }
        }
        let post = self.direct.post(self.direct.rank, self.call);
        post.write(self.call, &self.signature, input, output, contribution as u64);
        self.direct.ring();
        Ok(true)
    }

    /// Begins to fetch what the awaited member puts into its slot, which it does just before it posts: else
    /// that would be a second wait for the other processor. Before it does, the lines are in this one's
    /// cache, as they were two calls ago.
    fn prefetch(&self) {
        if self.path == Path::Short && self.next < self.direct.size() && self.next != self.direct.rank {
            let bytes = self.bytes(self.job.collective.input_len(self.next as u32));
            let slot = self.direct.slot(self.next, self.call);
            sys::memory::prefetch(slot, bytes.min(PREFETCHED_BYTES));
        }
    }

    /// Bytes of the blocks that a long reduction combines at a time.
    pub(super) fn blocks(&self) -> usize {
        self.blocks_of_a_thread() * self.threads
    }

    /// Those of one of its threads.
    pub(super) fn blocks_of_a_thread(&self) -> usize {
        self.block() * (self.direct.size() - 1)
    }

    /// Bytes of one of them: a multiple of every element's size.
    pub(super) fn block(&self) -> usize {
        let others = (self.direct.size() - 1).max(1);
        if self.threads == 1 {
            let (least, most) = BLOCK_BYTES;
            return (BLOCKS_BYTES / others).clamp(least, most).next_multiple_of(least);
        }
        let (least, most) = SHARED_BLOCK_BYTES;
        (2 * most / others).clamp(least, most).next_multiple_of(least)
    }

    /// Whether the others' shards are read while this rank still reduces its own.
    pub(super) fn gathers_early(&self) -> bool {
        match self.job.collective {
            Collective::Allreduce { count } => self.bytes(count) >= GATHERED_EARLY_BYTES,
            _ => false,
        }
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

    pub(super) fn table(&self, member: usize) -> (u64, u64) {
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
            let own = self.bytes(self.job.collective.input_len(self.direct.rank as u32)) as u64;
            self.direct.compare(group, member, self.call, self.key, &self.signature, own)?;
        }
        Ok(())
    }

    /// What becomes of a call that has stopped reading. What cannot be read is asked for.
    fn stopped(&mut self, group: &Group, stop: Stop) -> Poll<Result<Completion>> {
        let asked = match stop {
            Stop::Withdrawn(member) => {
                self.forsake(member);
                Ok(())
            }
            Stop::Hidden(member, error) => {
                let part = if self.stage == Stage::Gather { Part::Shard } else { Part::Input };
                self.ask(part, member, error)
            }
            Stop::Failed(error) => Err(error),
        };
        match asked {
            Ok(()) => self.pending(group),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn forsake(&mut self, member: usize) {
        self.step(Stage::Forsaken);
        self.next = member;
    }

    /// Which mark of the others this rank waits for before it leaves, and which it sets itself when its work
    /// is done.
    fn last_phase(&self) -> u64 {
        if self.shares_work() { 2 } else { 1 }
    }

    fn ended(&mut self, group: &Group) -> Poll<Result<Completion>> {
        self.keep_workspaces(group);
        Poll::Ready(Ok(Completion::default()))
    }

    fn keep_workspaces(&mut self, group: &Group) {
        let copies = self.copies.take().into_iter().flat_map(|copies| copies.given);
        let copies = copies.flatten().map(|(copy, _)| copy);
        self.workspace.take().into_iter().chain(copies).for_each(|workspace| group.keep_workspace(workspace));
    }

    /// This thread combines what the others have posted, by the program's function if that is given.
    fn go_away<'a>(&self, group: &'a Group) -> Option<Away<'a>> {
        let calls_program = self.job.reducer.as_ref().is_some_and(Reducer::calls_program);
        calls_program.then(|| group.endpoint().go_away())
    }

    /// A long call does not come further in this look: it has done as much as it may, or it waits.
    fn pause(&mut self, group: &Group, allowance: &Allowance) -> Poll<Result<Completion>> {
        self.at_work = allowance.is_over();
        if self.at_work { Poll::Pending } else { self.pending(group) }
    }

    /// Nothing yet. Now and then, looks whether the awaited rank has left for good.
    fn pending(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let member = match self.stage {
            Stage::Gather => (self.direct.rank + self.next) % self.direct.size(),
            _ => self.next,
        };
        let member = self.awaited_copy().unwrap_or(member);
        match self.watch.look(group, member) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Operation for DirectRun {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let mut allowance = Allowance::of_a_look();
        if self.path == Path::Long && !matches!(self.stage, Stage::Enter | Stage::Forsaken) {
            self.at_work = false;
            match self.give_copies(group, &mut allowance) {
                Ok(true) if self.awaited_copy().is_none() => {}
                Ok(_) => return self.pause(group, &allowance),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        loop {
            match self.stage {
                Stage::Enter => {
                    if self.call == 0 {
                        self.call = self.direct.next_call();
                    }
                    let before = self.call - 1;
                    if self.direct.entered.load(Ordering::Relaxed) < before {
                        if !self.all(|direct, member| direct.has_entered(member, before)) {
                            return self.pending(group);
                        }
                        self.direct.entered.store(before, Ordering::Relaxed);
                    }
                    match self.enter(group, &mut allowance) {
                        Ok(true) => {}
                        Ok(false) => return self.pause(group, &allowance),
                        Err(error) => return Poll::Ready(Err(error)),
                    }
                    self.step(Stage::Arrive);
                }
                Stage::Arrive => {
                    let call = self.call;
                    self.prefetch();
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
                Stage::Work if self.path == Path::Short => {
                    let _away = self.go_away(group);
                    self.work_short();
                    return self.ended(group);
                }
                Stage::Work => {
                    let _away = self.go_away(group);
                    match self.work_long(&mut allowance, &**group.endpoint()) {
                        Ok(true) => {}
                        Ok(false) => return self.pause(group, &allowance),
                        Err(stop) => return self.stopped(group, stop),
                    }
                    self.direct.mark(self.call, 1);
                    self.step(if self.shares_work() { Stage::Gather } else { Stage::Leave });
                }
                Stage::Gather => {
                    match self.gather(&mut allowance, &**group.endpoint()) {
                        Ok(true) => {}
                        Ok(false) => return self.pause(group, &allowance),
                        Err(stop) => return self.stopped(group, stop),
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
        self.keep_workspaces(group);
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        if let Some(member) = self.awaited_copy() {
            return vec![member as u32];
        }
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

    fn is_at_work(&self) -> bool {
        self.at_work
    }

    fn through(&self) -> Through {
        Through::Memory
    }

    fn standing(&self) -> Option<String> {
        self.at_work.then(|| "its bytes are still being moved".into())
    }
}
