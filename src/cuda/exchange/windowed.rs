//! Calls whose outputs lie in windows, memory that all ranks have mapped: the ranks write each other's outputs, and nothing
//! is staged. `kernels/windowed.cu` says how it works.
#![forbid(unsafe_code)]

use super::Job;
use super::arena::MAX_RANKS;
use super::arguments::Group;
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::signature::Kind;

/// Threads of a block: `WINDOWED_THREADS` of the kernels.
const THREADS: u32 = 512;
/// Blocks, if the caller allows as many.
const BLOCKS: u32 = 64;
/// Bytes that a block moves by one access of each thread.
const SWEEP: u64 = 16 * THREADS as u64;
/// Parts begin at multiples of this.
const GRAIN: u64 = 128;
/// A broadcast's chunks have at most so many sweeps, and each block at least so many chunks of a part if it is long enough: the
/// more, the sooner others pass on what comes, and the more often they are told.
const MOST_SWEEPS: u64 = 8;
const CHUNKS: u64 = 4;

/// Below so many bytes that a rank gets from the others in all, what is staged is as fast or faster: on 4 H200s an allgather of 1 MiB
/// in all took 9.7 µs either way, of 4 MiB 16.3 beside 20.6; a broadcast of 16 MiB 69.5 beside 67.8, of 128 MiB 437 beside 512.
const LEAST_BYTES: u64 = 2 << 20;
const LEAST_BROADCAST: u64 = 32 << 20;

/// The parameter of the kernel, as `kernels/windowed.cu` declares it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    group: Group,
    input: u64,
    output: u64,
    seen: [u64; MAX_RANKS],
    bytes: u64,
    stride: u64,
    chunk: u64,
    kind: u32,
    root: u32,
}

/// The number of an operation in the kernel.
fn number(kind: Kind) -> Option<u32> {
    match kind {
        Kind::Allgather => Some(0),
        Kind::Alltoall => Some(1),
        Kind::Broadcast => Some(2),
        _ => None,
    }
}

/// Whether such a call gains by windows; `bytes` are those of `job.count`. The same answer on every rank whose calls are alike: also
/// in that all of them are in place, or none.
pub(super) fn gains(job: &Job, size: u32, bytes: u64) -> bool {
    let (all, least) = match job.kind {
        Kind::Broadcast => (bytes, LEAST_BROADCAST),
        _ => (bytes.saturating_mul(u64::from(size).saturating_sub(1)), LEAST_BYTES),
    };
    // In place, an all-to-all would be overwritten before it is read.
    let aliased = job.kind == Kind::Alltoall && job.input == job.output;
    number(job.kind).is_some() && all >= least && !aliased
}

/// The launch of a call that gains: `seen` is its output as each rank reaches it.
pub(super) fn arguments(
    table: &Table,
    group: Group,
    job: &Job,
    bytes: u64,
    seen: [u64; MAX_RANKS],
) -> (Grid, Arguments) {
    let parts = match job.kind {
        Kind::Broadcast => u64::from(group.size()) - 1,
        _ => 1,
    };
    let stride = bytes.div_ceil(parts).next_multiple_of(GRAIN);
    // Queues of inputs are there for those that combine by tiles.
    let there = BLOCKS.min(table.tuning(group.size()).tile_blocks).min(table.blocks);
    let most = if job.max_blocks == 0 { there } else { job.max_blocks.min(there) };
    let blocks = stride.div_ceil(SWEEP).clamp(1, most.into());
    let chunk = stride.div_ceil(blocks * CHUNKS).next_multiple_of(SWEEP).min(MOST_SWEEPS * SWEEP);
    let arguments = Arguments {
        group,
        input: job.input,
        output: job.output,
        seen,
        bytes,
        stride,
        chunk,
        kind: number(job.kind).unwrap_or(u32::MAX),
        root: job.root,
    };
    // At most `most`, a u32.
    (Grid { blocks: blocks as u32, threads: THREADS, shared: 0, overlaps: false }, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::{DataType, Operator};

    fn job(kind: Kind, count: u64) -> Job {
        Job {
            kind,
            input: 1 << 40,
            output: 1 << 41,
            count,
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: 1,
            max_blocks: 0,
        }
    }

    #[test]
    fn long_moves_gain_and_nothing_else() {
        assert!(gains(&job(Kind::Allgather, 1 << 20), 3, 1 << 20));
        assert!(!gains(&job(Kind::Allgather, 1 << 20), 3, (1 << 20) - 1));
        assert!(gains(&job(Kind::Broadcast, 32 << 20), 8, 32 << 20));
        assert!(!gains(&job(Kind::Broadcast, 16 << 20), 8, 16 << 20));
        assert!(!gains(&job(Kind::Allreduce, 1 << 30), 8, 1 << 30));
        let in_place = Job { output: 1 << 40, ..job(Kind::Alltoall, 1 << 30) };
        assert!(!gains(&in_place, 4, 1 << 30) && gains(&job(Kind::Alltoall, 1 << 30), 4, 1 << 30));
    }

    #[test]
    fn parts_are_the_whole_and_blocks_are_allowed() {
        let table = Table::default();
        for (size, bytes) in
            (2..=8).flat_map(|size| [32 << 20, 50_000_001, 1 << 30].map(|bytes| (size, bytes)))
        {
            for max_blocks in [0, 1, 7, 1000] {
                let job = Job { max_blocks, ..job(Kind::Broadcast, bytes) };
                let group = Group::new(0, &vec![4096; size], 0, &table);
                let (grid, arguments) = super::arguments(&table, group, &job, bytes, [0; MAX_RANKS]);
                assert!(arguments.stride * (size as u64 - 1) >= bytes && arguments.stride % GRAIN == 0);
                assert!(arguments.chunk % SWEEP == 0 && arguments.chunk > 0);
                let most = if max_blocks == 0 { table.blocks } else { max_blocks.min(table.blocks) };
                assert!((1..=most).contains(&grid.blocks));
            }
        }
    }
}
