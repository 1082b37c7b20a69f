//! Operations before or behind which this rank has something to do for itself.

use std::task::Poll;

use crate::engine::group::{Group, Lent};
use crate::engine::observed::{First, Observed};
use crate::engine::operation::{Completion, Operation};
use crate::error::Result;

/// `operation`, with `first` before it, when its turn has come, and `finish` once it has ended well. Each
/// call of these does a part, and says whether that was the last.
pub(super) fn finishing<O: Operation, F: FnMut() -> bool + Send>(
    operation: O,
    first: Option<First>,
    mut finish: F,
) -> impl Operation + use<O, F> {
    let then = move |_: &Group, answer: &Poll<Result<Completion>>| match answer {
        Poll::Ready(Ok(_)) => finish(),
        _ => true,
    };
    Observed::new(operation, first, then)
}

/// Bytes that a part reads and writes, about: a millisecond or two, as what long calls move in one look.
const PART_BYTES: usize = if cfg!(test) { 64 * 1024 } else { 8 * 1024 * 1024 };

/// Parts have a multiple of so many positions: no function of the caller's sees where they are cut.
pub(super) const GRAIN: usize = 4096;

/// Positions of a part of which so many bytes are read and written for each.
pub(super) fn part_of(bytes: usize) -> usize {
    (PART_BYTES / bytes.max(1)).max(1).next_multiple_of(GRAIN)
}

/// A result that is copied to further buffers of this rank.
pub(super) struct Copied {
    from: *const u8,
    to: Vec<*mut u8>,
    /// How many bytes,
    bytes: usize,
    /// and those that have been copied.
    done: usize,
}

// SAFETY: the pointers are the caller's, promised to be usable from the library's threads until the operation
// ends.
unsafe impl Send for Copied {}

impl Copied {
    /// Of `bytes` bytes at `from`.
    pub(super) fn new(from: *const u8, to: &[*mut u8], bytes: usize) -> Copied {
        Copied { from, to: to.to_vec(), bytes, done: 0 }
    }

    /// `operation`, whose result is copied.
    ///
    /// # Safety
    /// Every buffer holds the bytes until the operation has ended; they are the same or apart.
    pub(super) unsafe fn behind<O: Operation>(mut self, operation: O) -> impl Operation + use<O> {
        // SAFETY: the caller's promise.
        finishing(operation, None, move || unsafe { self.go_on() })
    }

    /// Copies the next part. Whether that was the last.
    ///
    /// # Safety
    /// Every buffer holds the bytes; they are the same or apart.
    unsafe fn go_on(&mut self) -> bool {
        let (from, start) = (self.from.wrapping_add(self.done), self.done);
        let count = part_of(self.to.len() + 1).min(self.bytes - start);
        for to in &self.to {
            // SAFETY: the caller's promise, of a part of the bytes.
            unsafe { spread(from, &[to.wrapping_add(start)], count) };
        }
        self.done += count;
        self.done == self.bytes
    }
}

/// Blocks of this rank that are copied one behind the other before its operation.
pub(super) struct Joined {
    workspace: Lent,
    blocks: Box<[*mut u8]>,
    /// Bytes of each.
    each: usize,
}

// SAFETY: the blocks are the caller's, promised to be usable from the library's threads until the operation
// ends.
unsafe impl Send for Joined {}

impl Joined {
    /// Of `blocks` of `each` bytes.
    pub(super) fn new(group: &Group, blocks: &[*mut u8], each: usize) -> Result<Joined> {
        // A checked call has counted them.
        let workspace = group.lend(blocks.len() * each)?;
        Ok(Joined { workspace, blocks: blocks.into(), each })
    }

    /// Where they will be.
    pub(super) fn address(&self) -> *mut u8 {
        self.workspace.address()
    }

    /// `operation`, which reads them there.
    ///
    /// # Safety
    /// Every block holds its bytes until the operation has ended.
    pub(super) unsafe fn before<O: Operation>(self, operation: O) -> impl Operation + use<O> {
        let Joined { workspace, blocks, each } = self;
        let mut joining = Joining { blocks, each, to: workspace.address(), done: 0 };
        // SAFETY: the caller's promise; the workspace is the other closure's, which lives beside this one.
        let first: First = Box::new(move |_| unsafe { joining.go_on() });
        finishing(operation, Some(first), move || {
            // Until here it is read.
            let _ = &workspace;
            true
        })
    }
}

/// What is left to be copied of them.
struct Joining {
    blocks: Box<[*mut u8]>,
    each: usize,
    to: *mut u8,
    /// Bytes of all that have been copied.
    done: usize,
}

// SAFETY: as above; the workspace is the operation's.
unsafe impl Send for Joining {}

impl Joining {
    /// Copies the next part. Whether that was the last.
    ///
    /// # Safety
    /// Every block holds its bytes, and there is room for all of them.
    unsafe fn go_on(&mut self) -> bool {
        let all = self.blocks.len() * self.each;
        let end = all.min(self.done + part_of(2));
        while self.done < end {
            let (block, start) = (self.done / self.each, self.done % self.each);
            let count = (self.each - start).min(end - self.done);
            let from = self.blocks[block].wrapping_add(start);
            // SAFETY: the caller's promise, of a part of a block.
            unsafe { std::ptr::copy_nonoverlapping(from, self.to.wrapping_add(self.done), count) };
            self.done += count;
        }
        self.done == all
    }
}

/// Copies to every buffer that is not `from` itself.
///
/// # Safety
/// Every buffer holds `bytes` bytes; they are the same or apart.
pub(super) unsafe fn spread(from: *const u8, to: &[*mut u8], bytes: usize) {
    for &to in to {
        if !std::ptr::eq(to, from) && bytes > 0 {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy(from, to, bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_copied_in_parts() {
        let from: Vec<u8> = (0..300_001usize).map(|at| (at ^ at >> 8) as u8).collect();
        let mut to = [(); 2].map(|()| vec![0; from.len()]);
        let pointers = to.each_mut().map(|to| to.as_mut_ptr());
        let mut copied = Copied::new(from.as_ptr(), &pointers, from.len());
        let mut parts = 1;
        // SAFETY: all have so many bytes, and are apart.
        while !unsafe { copied.go_on() } {
            parts += 1;
        }
        assert!(parts > 5, "{parts}");
        assert!(to.iter().all(|to| *to == from));
    }

    #[test]
    fn blocks_are_joined_in_parts() {
        for each in [1, 1000, 100_001] {
            let blocks: Vec<Vec<u8>> =
                (0..5usize).map(|block| (0..each).map(|at| (at ^ at >> 8 ^ block) as u8).collect()).collect();
            // Not in the order in which they lie.
            let order = [3, 0, 4, 1, 3];
            let due = order.map(|block| blocks[block].as_slice()).concat();
            let mut to = vec![0; due.len()];
            let blocks = order.map(|block| blocks[block].as_ptr().cast_mut()).into();
            let mut joining = Joining { blocks, each, to: to.as_mut_ptr(), done: 0 };
            let mut parts = 1;
            // SAFETY: all have so many bytes, and are apart.
            while !unsafe { joining.go_on() } {
                parts += 1;
            }
            assert!(to == due && (parts > 5) == (each > 1000), "{each}: {parts}");
        }
    }
}
