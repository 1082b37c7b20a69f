//! Signals between ranks, by which one hears that another has written into its window, and waits for them.
//! `kernels/signals.cuh` says how they work.
#![forbid(unsafe_code)]

use super::arena::MAX_RANKS;
use super::arguments::Group;
use super::table::Table;
use crate::cuda::driver::Grid;

/// How many signals, to each rank or from it.
pub type Counts = [u32; MAX_RANKS];

/// Threads of the one block: `SIGNAL_THREADS` of the kernels.
const THREADS: u32 = 32;
/// Bytes of what a rank counts: `Tally` of the kernels. At the end of its arena.
pub(super) const TALLY_BYTES: u64 = 4 * 8 * MAX_RANKS as u64;

/// The parameter of the kernels, as `kernels/signals.cuh` declares it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    group: Group,
    tally: u64,
    counts: Counts,
}

/// The launch of either kernel.
pub(super) fn arguments(group: Group, table: &Table, counts: &Counts) -> (Grid, Arguments) {
    let tally = table.layout(group.size()).tally;
    let grid = Grid { blocks: 1, threads: THREADS, shared: 0, overlaps: false };
    (grid, Arguments { group, tally, counts: *counts })
}
