//! Calls on memory that lies in windows, which all ranks have mapped: the ranks read each other's inputs and
//! write each other's outputs, and nothing is staged. `kernels/windowed.cu` says how it works.
#![forbid(unsafe_code)]

use super::Job;
use super::arena::MAX_RANKS;
use super::arguments::Group;
use super::table::{Table, Tuning};
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
/// A broadcast's chunks have at most so many sweeps, and each block at least so many chunks of a part if it
/// is long enough: the more, the sooner others pass on what comes, and the more often they are told.
const MOST_SWEEPS: u64 = 8;
const CHUNKS: u64 = 4;

/// What of a call's memory other ranks read or write, so that it has to lie in windows: bytes from the first,
/// 0 for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Of the input.
    pub input: u64,
    /// Of the output.
    pub output: u64,
}

/// Memory that a call shares, as each rank reaches it. What it does not share is not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The input.
    pub input: [u64; MAX_RANKS],
    /// The output.
    pub output: [u64; MAX_RANKS],
}

impl Shared {
    /// What a call of `size` ranks shares, if it gains by that. The same answer on every rank whose calls are
    /// alike: also in that all of them are in place, or none.
    pub fn of(job: &Job, table: &Table, size: u32) -> Option<Shared> {
        let bytes = job.count.checked_mul(job.dtype.size() as u64)?;
        let all = bytes.checked_mul(size.into())?;
        let Tuning { windows_from: from, windows_to: to, .. } = table.tuning(size);
        let (counted, from, to, input, output) = match job.kind {
            // In place, an all-to-all would be overwritten before it is read.
            Kind::Alltoall if job.input == job.output => return None,
            Kind::Allgather | Kind::Alltoall => (all - bytes, from.moves, to.moves, 0, all),
            Kind::Broadcast => (bytes, from.broadcast, to.broadcast, 0, bytes),
            Kind::Allreduce => (bytes, from.allreduce, to.allreduce, bytes, bytes),
            Kind::ReduceScatter => (all - bytes, from.reduce_scatter, to.reduce_scatter, all, 0),
            _ => return None,
        };
        (from.max(1)..=to).contains(&counted).then_some(Shared { input, output })
    }
}

/// The parameter of the kernels, as `kernels/windowed_agent.cuh` declares it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    group: Group,
    input: u64,
    output: u64,
    input_seen: [u64; MAX_RANKS],
    output_seen: [u64; MAX_RANKS],
    bytes: u64,
    stride: u64,
    chunk: u64,
    scale: u64,
    kind: u32,
    root: u32,
    scaled: u32,
    ranks: u32,
    number: u32,
}

/// The number of an operation in the kernels.
fn number(kind: Kind) -> u32 {
    match kind {
        Kind::Allgather => 0,
        Kind::Alltoall => 1,
        Kind::Broadcast => 2,
        Kind::Allreduce => 3,
        Kind::ReduceScatter => 4,
        _ => u32::MAX,
    }
}

/// The launch of a call that gains.
pub(super) fn arguments(table: &Table, group: Group, job: &Job, seen: &Seen) -> (Grid, Arguments) {
    // It gains, so its bytes have been counted.
    let bytes = job.count * job.dtype.size() as u64;
    let parts = match job.kind {
        Kind::Broadcast => u64::from(group.size()) - 1,
        Kind::Allreduce => u64::from(group.size()),
        _ => 1,
    };
    let stride = match job.kind {
        Kind::ReduceScatter => bytes,
        _ => bytes.div_ceil(parts).next_multiple_of(GRAIN),
    };
    // Ranks meet by queues of lines, and a broadcast goes on by queues of inputs.
    let tuning = table.tuning(group.size());
    let there = BLOCKS.min(tuning.line_blocks).min(tuning.tile_blocks).min(table.blocks);
    let most = if job.max_blocks == 0 { there } else { job.max_blocks.min(there) };
    let blocks = stride.div_ceil(SWEEP).clamp(1, most.into());
    let chunk = stride.div_ceil(blocks * CHUNKS).next_multiple_of(SWEEP).min(MOST_SWEEPS * SWEEP);
    let scale = job.scale();
    let arguments = Arguments {
        group,
        input: job.input,
        output: job.output,
        input_seen: seen.input,
        output_seen: seen.output,
        bytes,
        stride,
        chunk,
        scale: scale.unwrap_or(0),
        kind: number(job.kind),
        root: job.root,
        scaled: scale.is_some().into(),
        ranks: job.divisor(group.size()),
        number: job.operator.number().into(),
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
    fn long_calls_gain_by_what_they_share() {
        let table = Table::default();
        let shared = |kind, count, size| {
            Shared::of(&job(kind, count), &table, size).map(|shared| (shared.input, shared.output))
        };
        assert_eq!(shared(Kind::Allgather, 1 << 19, 3), Some((0, 3 << 19)));
        assert_eq!(shared(Kind::Allgather, (1 << 19) - 1, 3), None);
        assert_eq!(shared(Kind::Broadcast, 32 << 20, 8), Some((0, 32 << 20)));
        assert_eq!(shared(Kind::Broadcast, 16 << 20, 8), None);
        let Tuning { windows_from: from, windows_to: to, .. } = table.tuning(2);
        for bytes in [from.allreduce, to.allreduce] {
            assert_eq!(shared(Kind::Allreduce, bytes, 2), Some((bytes, bytes)));
        }
        assert_eq!(shared(Kind::Allreduce, from.allreduce - 1, 2), None);
        assert_eq!(shared(Kind::Allreduce, to.allreduce + 1, 2), None);
        assert_eq!(shared(Kind::ReduceScatter, from.reduce_scatter, 2), Some((2 * from.reduce_scatter, 0)));
        assert_eq!(shared(Kind::ReduceScatter, from.reduce_scatter - 1, 2), None);
        assert_eq!(shared(Kind::Gather, 1 << 30, 4), None);
        let in_place = Job { output: 1 << 40, ..job(Kind::Alltoall, 1 << 30) };
        assert_eq!(Shared::of(&in_place, &table, 4), None);
        assert!(shared(Kind::Alltoall, 1 << 30, 4).is_some());
    }

    #[test]
    fn parts_are_the_whole_and_blocks_are_allowed() {
        let table = Table::default();
        for (size, bytes) in
            (2..=8).flat_map(|size| [32 << 20, 50_000_001, 1 << 30].map(|bytes| (size, bytes)))
        {
            for (kind, parts) in [(Kind::Broadcast, size - 1), (Kind::Allreduce, size)] {
                for max_blocks in [0, 1, 7, 1000] {
                    let job = Job { max_blocks, ..job(kind, bytes) };
                    let group = Group::new(0, &vec![4096; size], 0, &table);
                    let (grid, arguments) = super::arguments(&table, group, &job, &Seen::default());
                    assert!(arguments.stride * parts as u64 >= bytes && arguments.stride % GRAIN == 0);
                    assert!(arguments.chunk % SWEEP == 0 && arguments.chunk > 0);
                    let most = if max_blocks == 0 { table.blocks } else { max_blocks.min(table.blocks) };
                    assert!((1..=most).contains(&grid.blocks));
                }
            }
        }
    }
}
