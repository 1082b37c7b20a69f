//! How much a long call moves in one look.

use super::joint::{FEWEST_PARTS, Team};

/// Bytes that a thread moves in one look: a millisecond or two, which is what deadlines, aborts and the other
/// calls of the thread wait at most. A look at everything else takes some microseconds.
const LOOK_BYTES: usize = if cfg!(test) { GRAIN } else { 8 * 1024 * 1024 };

/// What is moved counts in multiples of this. So an element is never cut.
const GRAIN: usize = 64 * 1024;

/// Less is moved by one thread.
const SHARED_BYTES: usize = FEWEST_PARTS * 1024 * 1024;

/// What a call may still move in this look.
#[derive(Debug)]
pub(super) struct Allowance {
    /// Bytes of each thread, a multiple of [`GRAIN`].
    left: usize,
}

impl Allowance {
    /// That of a new look.
    pub(super) fn of_a_look() -> Allowance {
        Allowance { left: LOOK_BYTES }
    }

    /// Whether nothing more may be moved.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// How many of `len` bytes are to be moved now, by `team` if they are many: all, or a multiple of
    /// [`GRAIN`].
    pub(super) fn grant(&mut self, len: usize, team: &dyn Team) -> usize {
        self.grant_each(len, 1, team)
    }

    /// As [`Allowance::grant`], of what takes as long as moving it so many `times`.
    pub(super) fn grant_each(&mut self, len: usize, times: usize, team: &dyn Team) -> usize {
        if self.is_over() {
            return 0;
        }
        let threads = if len < SHARED_BYTES { 1 } else { team.threads() };
        let most = (self.left * threads / times).next_multiple_of(GRAIN);
        // What is left for the next look is not so short that one thread would have to move it.
        let rest = if threads > 1 { SHARED_BYTES } else { 0 };
        let count = if len < most + rest { len } else { len.min(most) };
        self.spend((count * times).div_ceil(threads));
        count
    }

    /// So many bytes have been moved by each thread.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes.next_multiple_of(GRAIN));
    }
}
