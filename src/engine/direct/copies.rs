//! Memory that only its owner can read: long calls go on from a copy.
//!
//! Such is what a driver maps (pinned memory, registers) and what memfd_secret gives: the kernel refuses it
//! to process_vm_readv. Who comes upon it says so in its post. The owner, which stays until everybody has
//! read, copies that part into memory of its own and posts where the copy is. So nobody looks at memory
//! before a call, and nothing is remembered of it.

use std::sync::atomic::Ordering;

use super::board::{PART, Part};
use super::run::DirectRun;
use crate::engine::allowance::Allowance;
use crate::engine::executor::Workspace;
use crate::engine::group::Group;
use crate::engine::joint;
use crate::error::{Error, Result};
use crate::schedule::Collective;
use crate::transport::memory::is_readable;

/// Copies that this rank gives, and those that it needs.
#[derive(Default)]
pub(super) struct Copies {
    /// By [`Part`]; how many bytes of it are there.
    pub(super) given: [Option<(Workspace, usize)>; 2],
    /// What was asked for last in this stage, and of whom.
    pub(super) asked: Option<(Part, usize)>,
    /// The members that have been asked, by [`Part`]: a bit for each.
    known: [u64; 2],
}

impl DirectRun {
    /// Where `member` says that a part of what it gives is.
    pub(super) fn posted(&self, part: Part, member: usize) -> u64 {
        self.direct.post(member, self.call).place(part).load(Ordering::Acquire)
    }

    /// Asks a member for a copy of what the kernel refuses, with this `error`. Once: it is not the member
    /// that cannot read a copy.
    pub(super) fn ask(&mut self, part: Part, member: usize, error: Error) -> Result<()> {
        let copies = self.copies.get_or_insert_default();
        let (known, bit) = (&mut copies.known[part as usize], 1 << member);
        if *known & bit != 0 {
            return Err(error);
        }
        *known |= bit;
        copies.asked = Some((part, member));
        self.direct.ask(self.call, part, member);
        Ok(())
    }

    /// The member whose copy this rank waits for, unless it has given up.
    pub(super) fn awaited_copy(&self) -> Option<usize> {
        let (part, member) = self.copies.as_ref()?.asked?;
        let waits = !self.direct.has_given(member, self.call, part) && !self.direct.has_withdrawn(member);
        waits.then_some(member)
    }

    /// Copies what others have asked for, as far as `allowance` goes. Whether all of it is there.
    ///
    /// It is not too late: what this rank has overwritten of its input meanwhile nobody reads any more, and
    /// who asks for a shard has seen the mark behind it.
    pub(super) fn give_copies(&mut self, group: &Group, allowance: &mut Allowance) -> Result<bool> {
        let rank = self.direct.rank;
        for part in [Part::Input, Part::Shard] {
            if !self.direct.is_asked(self.call, part) {
                continue;
            }
            let (start, len) = match (part, &self.job.collective) {
                (Part::Input, collective) => (0, self.bytes(collective.input_len(rank as u32))),
                (Part::Shard, Collective::Allreduce { count }) => {
                    let (start, len) = self.shard(*count, rank);
                    (self.bytes(start), self.bytes(len))
                }
                // It is in a workspace.
                (Part::Shard, _) => continue,
            };
            let given = &mut self.copies.get_or_insert_default().given[part as usize];
            let (copy, done) = match given {
                Some(given) => given,
                None => given.insert((group.workspace(len)?, 0)),
            };
            let team = &**group.endpoint();
            let count = allowance.grant(len - *done, team);
            if count > 0 {
                let place = self.direct.post(rank, self.call).place(part);
                let from = place.load(Ordering::Relaxed) as usize + start + *done;
                let from: *const u8 = std::ptr::with_exposed_provenance(from);
                if !is_readable(from, count) {
                    let text = format!("{count} bytes at {from:?} of this rank's memory could not be read");
                    return Err(Error::system(text, std::io::Error::from_raw_os_error(libc::EFAULT)));
                }
                // SAFETY: the caller's buffers are valid for the lengths of the call, and nobody writes them
                // but this run; the copy has `len` bytes.
                unsafe { joint::copy(team, from, copy.address().wrapping_add(*done), count, PART) };
                *done += count;
                if *done == len {
                    // A shard is looked for behind those before it. Who has not heard of the copy and finds
                    // it here may have it.
                    place.store((copy.address() as u64).wrapping_sub(start as u64), Ordering::Release);
                    self.direct.give(self.call, part);
                }
            }
            if *done < len {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
