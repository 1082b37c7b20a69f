//! What a call of a direct exchange reads, and where it puts it.

use std::sync::atomic::Ordering;

use super::Path;
use super::board::{MAX_MEMBERS, PART, Stop};
use super::run::DirectRun;
use crate::engine::joint::{self, Alone, Shared, Team, share};
use crate::error::{Error, Result, Status};
use crate::reduce::{Operand, Representation};
use crate::schedule::{Collective, total};

const EMPTY: Operand =
    Operand { address: std::ptr::null(), representation: Representation::Element, scale: 1.0 };

/// Groups of up to so many members are common, and their calls short.
const FEW_MEMBERS: usize = 4;

impl DirectRun {
    /// Reads what the others have posted. Whether there is more to do ([`Stage::Gather`]).
    pub(super) fn work(&mut self, team: &dyn Team) -> Result<bool, Stop> {
        match self.path {
            Path::Short => {
                self.work_short();
                Ok(false)
            }
            Path::Long => self.work_long(team),
        }
    }

    pub(super) fn work_short(&mut self) {
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
                let start = total(&counts[..rank]);
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
                let (root, start) = (*root as usize, self.bytes(total(&counts[..rank])));
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
    pub(super) fn copy(&self, from: *const u8, to: *mut u8, len: usize) {
        if len > 0 && !std::ptr::eq(from, to) {
            // SAFETY: lengths come from the call's own counts, for which the caller's buffers are valid, and which
            // fit the slots (`Direct::path`). Input and output are the same (excluded) or apart.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        }
    }

    /// Combines `count` elements from element `start` of all contributions into the output.
    fn fold_slots(&self, start: u64, count: u64) {
        // Filling a list for the most members takes longer than combining a few elements of two.
        match self.direct.size() {
            ..=FEW_MEMBERS => self.fold_slots_of::<FEW_MEMBERS>(start, count),
            _ => self.fold_slots_of::<MAX_MEMBERS>(start, count),
        }
    }

    /// The same, for at most `MEMBERS` members.
    fn fold_slots_of<const MEMBERS: usize>(&self, start: u64, count: u64) {
        let Some(reducer) = &self.job.reducer else { return };
        let offset = self.bytes(start);
        let mut operands = [EMPTY; MEMBERS];
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

    pub(super) fn work_long(&mut self, team: &dyn Team) -> Result<bool, Stop> {
        let (rank, size) = (self.direct.rank, self.direct.size());
        let (input, output) = (self.job.input, self.job.output);
        if let Collective::Allreduce { count } = self.job.collective {
            let (start, len) = self.shard(count, rank);
            return self
                .fold_private(start, len, output.wrapping_add(self.bytes(start)), team)
                .map(|()| true);
        }
        let collective = std::mem::replace(&mut self.job.collective, Collective::Barrier);
        let result = match &collective {
            Collective::Barrier | Collective::Allreduce { .. } => Ok(false),
            Collective::Reduce { count, root } => {
                let (start, len) = self.shard(*count, rank);
                let to = match &self.workspace {
                    Some(workspace) if rank != *root as usize => workspace.address(),
                    _ => output.wrapping_add(self.bytes(start)),
                };
                self.fold_private(start, len, to, team).map(|()| true)
            }
            Collective::ReduceScatter { counts } => {
                let start = total(&counts[..rank]);
                self.fold_private(start, counts[rank], output, team).map(|()| false)
            }
            Collective::Broadcast { count, root } => {
                let len = self.bytes(*count);
                if rank == *root as usize {
                    self.copy_long(input, output, len, team);
                    Ok(false)
                } else {
                    self.take(*root as usize, 0, output, len, team).map(|()| false)
                }
            }
            Collective::Allgather { counts } => self.take_blocks(counts, false, team),
            Collective::Gather { counts, root } => {
                if rank == *root as usize {
                    self.take_blocks(counts, self.job.listed, team)
                } else {
                    Ok(false)
                }
            }
            Collective::Scatter { counts, root } => {
                let (root, len) = (*root as usize, self.bytes(counts[rank]));
                // Of a list, only the root knows this.
                let mine = || self.bytes(total(&counts[..rank]));
                if rank == root {
                    self.copy_long(input.wrapping_add(mine()), output, len, team);
                    Ok(false)
                } else {
                    let (start, sent) =
                        if self.job.listed { self.table(root) } else { (mine() as u64, len as u64) };
                    self.expect(root, sent, len)
                        .map_err(Stop::Failed)
                        .and_then(|()| self.take(root, start, output, len, team))
                        .map(|()| false)
                }
            }
            Collective::Alltoall { send_counts, recv_counts } => {
                let mut to = output;
                let own = total(&send_counts[..rank]);
                (0..size)
                    .try_for_each(|member| {
                        let len = self.bytes(recv_counts[member]);
                        let target = to;
                        to = to.wrapping_add(len);
                        if member == rank {
                            // In place it is where it belongs.
                            if !self.job.in_place {
                                self.copy_long(input.wrapping_add(self.bytes(own)), target, len, team);
                            }
                            return Ok(());
                        }
                        let (start, sent) = match self.job.listed {
                            true => self.table(member),
                            false => ((rank * len) as u64, len as u64),
                        };
                        self.expect(member, sent, len)?;
                        self.take(member, start, target, len, team)
                    })
                    .map(|()| false)
            }
        };
        self.job.collective = collective;
        result
    }

    /// Reads a block from every other rank; `listed`: lengths are checked against what they posted.
    pub(super) fn take_blocks(&self, counts: &[u64], listed: bool, team: &dyn Team) -> Result<bool, Stop> {
        let mut to = self.job.output;
        for (member, &count) in counts.iter().enumerate() {
            let len = self.bytes(count);
            if member == self.direct.rank {
                self.copy_long(self.job.input, to, len, team);
            } else {
                if listed {
                    let posted = self.direct.post(member, self.call).bytes.load(Ordering::Relaxed);
                    self.expect(member, posted, len)?;
                }
                self.take(member, 0, to, len, team)?;
            }
            to = to.wrapping_add(len);
        }
        Ok(false)
    }

    /// A rank sends as much as this one expects, or the call fails.
    pub(super) fn expect(&self, member: usize, sent: u64, expected: usize) -> Result<()> {
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
    fn take(&self, member: usize, start: u64, to: *mut u8, len: usize, team: &dyn Team) -> Result<(), Stop> {
        let from = self.posted_input(member).wrapping_add(start);
        self.direct.while_reading([member].into_iter(), || {
            // SAFETY: the member has entered this call and leaves it only after this rank's mark; it does not write its input
            // in between. `to` is inside this rank's output, of which nobody else has a part.
            unsafe { self.direct.pull(member, from, slice(to, len), team) }
        })
    }

    /// Where `member` said that its input is.
    fn posted_input(&self, member: usize) -> u64 {
        self.direct.post(member, self.call).input.load(Ordering::Relaxed)
    }

    /// As [`DirectRun::copy`], by several threads if it is long.
    fn copy_long(&self, from: *const u8, to: *mut u8, len: usize, team: &dyn Team) {
        if len > 0 && !std::ptr::eq(from, to) {
            // SAFETY: as there.
            unsafe { joint::copy(team, from, to, len, PART) };
        }
    }

    /// Combines `len` elements from element `start` of everybody's input into `to`: a block for each thread, and again.
    fn fold_private(&mut self, start: u64, len: u64, to: *mut u8, team: &dyn Team) -> Result<(), Stop> {
        let (Some(reducer), Some(workspace)) = (self.job.reducer, &self.workspace) else {
            return Err(Error::new(Status::Internal, "a reduction without its operator").into());
        };
        let (rank, size) = (self.direct.rank, self.direct.size());
        let (threads, each) = (self.threads as u64, self.blocks_of_a_thread());
        let blocks = workspace.address().wrapping_add(workspace.bytes() - self.blocks());
        let (block_bytes, early) = (self.block(), self.gathers_early());
        let per_block = (block_bytes / self.job.dtype.size()) as u64;
        let inputs: Vec<u64> = (0..size).map(|member| self.posted_input(member)).collect();
        let memory = Shared((self.job.input, to, blocks));
        let (direct, element) = (self.direct.clone(), self.job.dtype.size());
        let mut done = 0;
        while done < len {
            let left = len - done;
            let parts = left.div_ceil(per_block).min(threads);
            // SAFETY: the blocks of a thread hold so many bytes for each other member, and no two parts have the same; `to` holds
            // `len` elements and is apart from the operands, or is this rank's own input at the same place. What is read: as in
            // `take`.
            let combine = |part: u64| unsafe {
                let (input, to, blocks) = memory.get();
                let (before, count) = (done + part * per_block, per_block.min(left - part * per_block));
                let [offset, bytes] = [start + before, count].map(|elements| elements as usize * element);
                let mut block = blocks.wrapping_add(part as usize * each);
                let mut operands = [EMPTY; MAX_MEMBERS];
                for (member, operand) in operands[..size].iter_mut().enumerate() {
                    if member == rank {
                        operand.address = input.wrapping_add(offset);
                        continue;
                    }
                    let from = inputs[member].wrapping_add(offset as u64);
                    direct.pull(member, from, slice(block, bytes), &Alone)?;
                    operand.address = block.cast_const();
                    block = block.wrapping_add(block_bytes);
                }
                let to = to.wrapping_add(before as usize * element);
                reducer.fold(&operands[..size], to, Representation::Element, count as usize);
                Ok(())
            };
            let others = (0..size).filter(|&member| member != rank);
            direct.while_reading(others, || match parts {
                1 => combine(0),
                _ => share(team, (0..parts).collect(), combine),
            })?;
            done += (parts * per_block).min(left);
            if early {
                self.direct.note_folded(done);
                for distance in 1..size {
                    let member = (rank + distance) % size;
                    self.gather_from(member, self.direct.folded(member), team)?;
                }
            }
        }
        Ok(())
    }

    /// Reads the shards of the others as they become ready. Whether all are here.
    pub(super) fn gather(&mut self, team: &dyn Team) -> Result<bool, Stop> {
        let size = self.direct.size();
        while self.next < size {
            // Everybody begins with another one, so that not all read from the same rank at once.
            let member = (self.direct.rank + self.next) % size;
            if self.depends_on(member) {
                if !self.direct.has_marked(member, self.call, 1) {
                    return Ok(false);
                }
                self.gather_from(member, u64::MAX, team)?;
            }
            self.next += 1;
        }
        Ok(true)
    }

    /// Reads the shard of `member` as far as its first `until` elements, which are final, and which nobody changes before
    /// this rank's mark. Nobody reads the same place of this rank's input any more, should that be its output.
    fn gather_from(&mut self, member: usize, until: u64, team: &dyn Team) -> Result<(), Stop> {
        let (Collective::Allreduce { count } | Collective::Reduce { count, .. }) = self.job.collective else {
            return Ok(());
        };
        let (start, len) = self.shard(count, member);
        let (before, until) = (self.gathered[member], until.min(len));
        if before >= until {
            return Ok(());
        }
        let offset = self.bytes(start + before);
        let theirs = if self.root().is_some() { self.bytes(before) } else { offset };
        let posted = self.direct.post(member, self.call).output.load(Ordering::Relaxed);
        let (from, to) = (posted.wrapping_add(theirs as u64), self.job.output.wrapping_add(offset));
        let bytes = self.bytes(until - before);
        self.direct.while_reading([member].into_iter(), || {
            // SAFETY: these elements are final, and the member leaves after this rank's mark. `to` is inside this rank's
            // output, where the member's shard belongs: only the member reads there, and it has.
            unsafe { self.direct.pull(member, from, slice(to, bytes), team) }
        })?;
        self.gathered[member] = until;
        Ok(())
    }
}

/// # Safety
/// The memory is valid for so long, and nobody else has this part of it.
unsafe fn slice<'a>(address: *mut u8, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(address, len) }
}
