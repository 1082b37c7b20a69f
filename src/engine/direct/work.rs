//! What a call of a direct exchange reads, and where it puts it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::board::{MAX_MEMBERS, PART, Part, Stop};
use super::run::DirectRun;
use crate::engine::allowance::Allowance;
use crate::engine::joint::{self, Alone, Shared, Team, share};
use crate::error::{Error, Result, Status};
use crate::reduce::{Operand, Representation};
use crate::schedule::{Collective, total};

const EMPTY: Operand =
    Operand { address: std::ptr::null(), representation: Representation::Element, scale: 1.0 };

/// Groups of up to so many members are common, and their calls short.
const FEW_MEMBERS: usize = 4;

/// What this rank obtains from one member without combining it.
struct Given {
    /// Where it begins in what the member gives, in bytes.
    start: u64,
    /// Where it goes.
    to: *mut u8,
    len: usize,
}

impl DirectRun {
    /// Short calls: reads what the others have posted.
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
            // SAFETY: lengths come from the call's own counts, for which the caller's buffers are valid, and
            // which fit the slots (`Direct::path`). Input and output are the same (excluded) or apart.
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
        // SAFETY: contributions hold `start + count` elements and fit the slots; nobody writes the slots
        // before all have entered the next call; the output is this rank's, its own input or apart from all
        // operands.
        unsafe {
            reducer.fold(&operands[..size], self.job.output, Representation::Element, count as usize);
        }
    }

    /// Long calls: reads on in what the others have posted, as far as `allowance` goes. Whether all of it has
    /// been read.
    pub(super) fn work_long(&mut self, allowance: &mut Allowance, team: &dyn Team) -> Result<bool, Stop> {
        let (rank, output) = (self.direct.rank, self.job.output);
        let (start, len, to) = match &self.job.collective {
            Collective::Barrier => return Ok(true),
            Collective::Allreduce { count } => {
                let (start, len) = self.shard(*count, rank);
                (start, len, output.wrapping_add(self.bytes(start)))
            }
            Collective::Reduce { count, root } => {
                let (start, len) = self.shard(*count, rank);
                let to = match &self.workspace {
                    Some(workspace) if rank != *root as usize => workspace.address(),
                    _ => output.wrapping_add(self.bytes(start)),
                };
                (start, len, to)
            }
            Collective::ReduceScatter { counts } => (total(&counts[..rank]), counts[rank], output),
            _ => return self.take_blocks(allowance, team),
        };
        self.fold_private(start, len, to, allowance, team)
    }

    /// Reads on in what the members give, one after the other.
    fn take_blocks(&mut self, allowance: &mut Allowance, team: &dyn Team) -> Result<bool, Stop> {
        while self.next < self.direct.size() {
            if let Some(given) = self.given_by(self.next)?
                && !self.take(self.next, &given, allowance, team)?
            {
                return Ok(false);
            }
            (self.next, self.done) = (self.next + 1, 0);
        }
        Ok(true)
    }

    /// What this rank obtains from `member`, if anything. An error if the two count it differently.
    fn given_by(&self, member: usize) -> Result<Option<Given>> {
        let rank = self.direct.rank;
        let block = |start: u64, before: &[u64], count: u64| {
            let to = self.job.output.wrapping_add(self.bytes(total(before)));
            Some(Given { start, to, len: self.bytes(count) })
        };
        Ok(match &self.job.collective {
            Collective::Broadcast { count, root } if member == *root as usize => block(0, &[], *count),
            Collective::Allgather { counts } => block(0, &counts[..member], counts[member]),
            Collective::Gather { counts, root } if rank == *root as usize => {
                if self.job.listed && member != rank {
                    let posted = self.direct.post(member, self.call).bytes.load(Ordering::Relaxed);
                    self.expect(member, posted, self.bytes(counts[member]))?;
                }
                block(0, &counts[..member], counts[member])
            }
            Collective::Scatter { counts, root } if member == *root as usize => {
                let len = self.bytes(counts[rank]) as u64;
                let (start, sent) = match self.job.listed && member != rank {
                    true => self.table(member),
                    // Of a list, only the root knows this.
                    false => (self.bytes(total(&counts[..rank])) as u64, len),
                };
                self.expect(member, sent, len as usize)?;
                block(start, &[], counts[rank])
            }
            // In place it is where it belongs.
            Collective::Alltoall { .. } if member == rank && self.job.in_place => None,
            Collective::Alltoall { send_counts, recv_counts } => {
                let len = self.bytes(recv_counts[member]) as u64;
                let (start, sent) = match self.job.listed {
                    _ if member == rank => (self.bytes(total(&send_counts[..rank])) as u64, len),
                    true => self.table(member),
                    false => (rank as u64 * len, len),
                };
                self.expect(member, sent, len as usize)?;
                block(start, &recv_counts[..member], recv_counts[member])
            }
            _ => None,
        })
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

    /// Reads on in what `member` gives, from where the look before has stopped. Whether all of it is here.
    fn take(
        &mut self,
        member: usize,
        given: &Given,
        allowance: &mut Allowance,
        team: &dyn Team,
    ) -> Result<bool, Stop> {
        if member == self.direct.rank {
            let from = self.job.input.wrapping_add(given.start as usize);
            return Ok(self.copy_on(from, given.to, given.len, allowance, team));
        }
        let count = allowance.grant(given.len - self.done, team);
        if count == 0 {
            return Ok(self.done == given.len);
        }
        let from = self.posted(Part::Input, member).wrapping_add(given.start + self.done as u64);
        let to = given.to.wrapping_add(self.done);
        self.direct.while_reading([member].into_iter(), || {
            // SAFETY: the member has entered this call and leaves it only after this rank's mark; it does not
            // write its input in between. `to` is inside this rank's output, of which nobody else has a part.
            unsafe { self.direct.pull(member, from, slice(to, count), team) }
        })?;
        self.done += count;
        Ok(self.done == given.len)
    }

    /// Goes on with a copy of `len` bytes within this rank, by several threads if it is long, from where the
    /// look before has stopped. Whether all of it has been made. What is there already is not copied.
    pub(super) fn copy_on(
        &mut self,
        from: *const u8,
        to: *mut u8,
        len: usize,
        allowance: &mut Allowance,
        team: &dyn Team,
    ) -> bool {
        if std::ptr::eq(from, to) {
            return true;
        }
        let count = allowance.grant(len - self.done, team);
        if count > 0 {
            let (from, to) = (from.wrapping_add(self.done), to.wrapping_add(self.done));
            // SAFETY: the caller's buffers are valid for the lengths of the call, a workspace for those that
            // it was taken for; they are apart.
            unsafe { joint::copy(team, from, to, count, PART) };
        }
        self.done += count;
        self.done == len
    }

    /// Combines `len` elements from element `start` of everybody's input into `to`: a block for each thread,
    /// and again, as far as `allowance` goes. Whether all are combined.
    fn fold_private(
        &mut self,
        start: u64,
        len: u64,
        to: *mut u8,
        allowance: &mut Allowance,
        team: &dyn Team,
    ) -> Result<bool, Stop> {
        let (Some(reducer), Some(workspace)) = (self.job.reducer, &self.workspace) else {
            return Err(Error::new(Status::Internal, "a reduction without its operator").into());
        };
        let (rank, size) = (self.direct.rank, self.direct.size());
        let (threads, each) = (self.threads as u64, self.blocks_of_a_thread());
        let blocks = workspace.address().wrapping_add(workspace.bytes() - self.blocks());
        let (block_bytes, early) = (self.block(), self.gathers_early());
        let per_block = (block_bytes / self.job.dtype.size()) as u64;
        let inputs: Vec<u64> = (0..size).map(|member| self.posted(Part::Input, member)).collect();
        let memory = Shared((self.job.input, to, blocks));
        let (direct, element) = (self.direct.clone(), self.job.dtype.size());
        let mut done = (self.done / element) as u64;
        while done < len && !allowance.is_over() {
            let left = len - done;
            let parts = left.div_ceil(per_block).min(threads);
            let folded = AtomicBool::new(false);
            // SAFETY: the blocks of a thread hold so many bytes for each other member, and no two parts have
            // the same; `to` holds `len` elements and is apart from the operands, or is this rank's own input
            // at the same place. What is read: as in `take`.
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
                folded.store(true, Ordering::Relaxed);
                Ok(())
            };
            let others = (0..size).filter(|&member| member != rank);
            direct
                .while_reading(others, || match parts {
                    1 => combine(0),
                    _ => share(team, (0..parts).collect(), combine),
                })
                .map_err(|stop| match stop {
                    // What is combined in place cannot be again. (Of memory that is hidden as a whole,
                    // nothing has been.)
                    Stop::Hidden(_, error) if folded.load(Ordering::Relaxed) => Stop::Failed(error),
                    other => other,
                })?;
            allowance.spend(self.bytes(per_block.min(left)) * (size - 1));
            done += (parts * per_block).min(left);
            self.done = self.bytes(done);
            if early {
                self.direct.note_folded(done);
                for distance in 1..size {
                    let member = (rank + distance) % size;
                    match self.gather_from(member, self.direct.folded(member), allowance, team) {
                        // A copy is asked for in the next stage, should this rank still need one.
                        Err(Stop::Hidden(..)) => {}
                        other => _ = other?,
                    }
                }
            }
        }
        Ok(done == len)
    }

    /// Reads the shards of the others as they become ready, as far as `allowance` goes. Whether all are here.
    pub(super) fn gather(&mut self, allowance: &mut Allowance, team: &dyn Team) -> Result<bool, Stop> {
        let size = self.direct.size();
        while self.next < size {
            // Everybody begins with another one, so that not all read from the same rank at once.
            let member = (self.direct.rank + self.next) % size;
            if self.depends_on(member) {
                if !self.direct.has_marked(member, self.call, 1) {
                    return Ok(false);
                }
                if !self.gather_from(member, u64::MAX, allowance, team)? {
                    return Ok(false);
                }
            }
            self.next += 1;
        }
        Ok(true)
    }

    /// Reads the shard of `member` as far as its first `until` elements, which are final, and which nobody
    /// changes before this rank's mark. Nobody reads the same place of this rank's input any more, should
    /// that be its output. Whether it has come so far.
    fn gather_from(
        &mut self,
        member: usize,
        until: u64,
        allowance: &mut Allowance,
        team: &dyn Team,
    ) -> Result<bool, Stop> {
        let (Collective::Allreduce { count } | Collective::Reduce { count, .. }) = self.job.collective else {
            return Ok(true);
        };
        let (start, len) = self.shard(count, member);
        let (before, until) = (self.gathered[member], until.min(len));
        if before >= until {
            return Ok(true);
        }
        let offset = self.bytes(start + before);
        let theirs = if self.root().is_some() { self.bytes(before) } else { offset };
        let posted = self.posted(Part::Shard, member);
        let (from, to) = (posted.wrapping_add(theirs as u64), self.job.output.wrapping_add(offset));
        let bytes = allowance.grant(self.bytes(until - before), team);
        if bytes == 0 {
            return Ok(false);
        }
        self.direct.while_reading([member].into_iter(), || {
            // SAFETY: these elements are final, and the member leaves after this rank's mark. `to` is inside
            // this rank's output, where the member's shard belongs: only the member reads there, and it has.
            unsafe { self.direct.pull(member, from, slice(to, bytes), team) }
        })?;
        let here = before + (bytes / self.job.dtype.size()) as u64;
        self.gathered[member] = here;
        Ok(here == until)
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
