//! Short allgathers and all-to-alls: a part from everybody to everybody else, by lines.
//! `kernels/exchange_swap.cuh` says how it works.
#![forbid(unsafe_code)]

use super::Job;
use super::arguments::Swap;
use super::plan::{LINE_GRAIN, NARROW_ROOM, Protocol, line_packets, wide_room};
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::signature::Kind;

/// Threads of a block, at most: `SWAP_THREADS` of the kernels.
const THREADS: u32 = 512;
const WARP: u32 = 32;

/// A launch of the kernel that swaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Swapping {
    pub(super) grid: Grid,
    protocol: Protocol,
    /// What a block does of a part.
    share: u64,
}

impl Swapping {
    /// That of an allgather or an all-to-all of `size` ranks with parts of `bytes`, unless tiles are faster
    /// or lines have no room for it.
    pub(super) fn of(table: &Table, job: &Job, size: u32, bytes: u64) -> Option<Swapping> {
        let (tuning, bounds) = (table.tuning(size), table.bounds(job.kind, size));
        let limit = if job.max_blocks == 0 { table.blocks } else { job.max_blocks.min(table.blocks) };
        let most = u64::from(tuning.line_blocks.min(limit));
        let share =
            bytes.div_ceil(bytes.div_ceil(tuning.line_part).clamp(1, most)).next_multiple_of(LINE_GRAIN);
        let ways = [
            (Protocol::Narrow, bounds.narrow, NARROW_ROOM),
            (Protocol::Wide, bounds.wide, wide_room(tuning.wide)),
        ];
        let (protocol, ..) = ways.into_iter().find(|&(_, bound, room)| bytes <= bound && share <= room)?;
        // Each warp serves one peer, or the copy of the own part.
        let warps = line_packets(protocol, share).div_ceil(WARP.into()).min((THREADS / WARP / size).into());
        // At most `most` and THREADS.
        let (blocks, threads) = (bytes.div_ceil(share) as u32, warps as u32 * WARP * size);
        let grid = Grid { blocks, threads, shared: 0, overlaps: false };
        Some(Swapping { grid, protocol, share })
    }

    /// By the blocks from `first` on.
    pub(super) fn arguments(&self, job: &Job, bytes: u64, first: u32) -> Swap {
        Swap {
            input: job.input,
            output: job.output,
            bytes,
            stride: if job.kind == Kind::Alltoall { bytes } else { 0 },
            share: self.share,
            wide: (self.protocol == Protocol::Wide).into(),
            first,
        }
    }
}
