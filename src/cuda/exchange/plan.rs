//! What a call becomes: who gives, who combines which part of it by which protocol, and who takes the results.
#![forbid(unsafe_code)]

use super::arena::LINE_SLOT;
use super::arguments::{Combine, Group};
use super::table::Table;
use super::{Job, kernels};
use crate::cuda::driver::Grid;
use crate::reduce::Operator;
use crate::signature::Kind;

/// Bytes of data that a slot of lines holds: of a narrow line one half, of a wide one 15 parts of 16.
pub(super) const NARROW_ROOM: u64 = LINE_SLOT / 2;
pub(super) const WIDE_ROOM: u64 = LINE_SLOT / 16 * 15;
/// Parts of calls begin at multiples of this: wide accesses, and whole elements.
const GRAIN: u64 = 128;

/// Threads of a kernel that goes by lines, at most: `LINE_THREADS` of the kernels.
const LINE_THREADS: u32 = 512;
/// Threads of a kernel that goes by tiles: `TILE_THREADS` of the kernels.
const TILE_THREADS: u32 = 768;

/// How the parts of a call travel. The numbers are the kernels'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Lines of 16 bytes, 8 of them data, 8 a number.
    Narrow = 0,
    /// Lines of 128 bytes, 120 of them data, 8 a number.
    Wide = 1,
    /// Tiles, and counters that say how many there are.
    Tiles = 2,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Nothing,
    Combine(Combination),
    Move,
}

/// A launch of a kernel that combines. *Sources* give their input, cut into one piece for each *owner*; owners combine
/// their pieces; *takers* get what the owners made. Masks of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Combination {
    pub(super) grid: Grid,
    protocol: Protocol,
    sources: u32,
    owners: u32,
    takers: u32,
    /// Every owner's piece is the whole.
    whole: bool,
    /// An owner's result begins at its output's first byte, wherever the piece lies.
    packed: bool,
    bytes: u64,
    /// From piece to piece.
    stride: u64,
    /// What one block does of a piece: by lines; by tiles, in one round.
    share: u64,
}

impl Plan {
    /// `bytes` are those of `job.count`.
    pub(super) fn of(table: &Table, job: &Job, size: u32, bytes: u64) -> Plan {
        if bytes == 0 {
            return Plan::Nothing;
        }
        let bounds = table.bounds(job.kind, size);
        let all = (1 << size) - 1;
        let root = 1 << job.root;
        // Sources, owners and takers when everything is done in one step, and when it is in two.
        let (one, two) = match job.kind {
            Kind::Allreduce => ((all, all, 0), (all, all, all)),
            Kind::Reduce => ((all, root, 0), (all, all, root)),
            Kind::ReduceScatter => ((all, all, 0), (all, all, 0)),
            Kind::Broadcast => ((root, all & !root, 0), (root, all & !root, all & !root)),
            _ => return Plan::Move,
        };
        let scatters = job.kind == Kind::ReduceScatter;
        let limit = if job.max_blocks == 0 { table.blocks } else { job.max_blocks.min(table.blocks) };
        let tuning = table.tuning(size);
        let plan = |(sources, owners, takers): (u32, u32, u32), whole: bool, protocol: Protocol| {
            let pieces = u64::from(owners.count_ones());
            let stride = match (whole, scatters) {
                (true, _) => 0,
                (false, true) => bytes,
                (false, false) => bytes.div_ceil(pieces).next_multiple_of(GRAIN),
            };
            let piece = if whole { bytes } else { stride };
            let (blocks, share, threads) = match protocol {
                Protocol::Tiles => {
                    let wanted = piece.div_ceil(GRAIN).min(u64::from(tuning.tile_blocks.min(limit)));
                    let rounds = piece.div_ceil(wanted * u64::from(tuning.slot));
                    (wanted, piece.div_ceil(wanted * rounds).next_multiple_of(GRAIN), TILE_THREADS)
                }
                Protocol::Narrow | Protocol::Wide => {
                    let wanted = piece.div_ceil(tuning.line_share).min(u64::from(limit)).max(1);
                    let share = piece.div_ceil(wanted).next_multiple_of(GRAIN.min(64));
                    (piece.div_ceil(share), share, line_threads(protocol, share))
                }
            };
            Combination {
                // At most `limit`, a u32.
                grid: Grid { blocks: blocks as u32, threads, shared: 0 },
                protocol,
                sources,
                owners,
                takers,
                whole,
                packed: scatters,
                bytes: if scatters { bytes.saturating_mul(u64::from(size)) } else { bytes },
                stride,
                share,
            }
        };
        let fits = |combination: &Combination| match combination.protocol {
            Protocol::Narrow => combination.share <= NARROW_ROOM,
            Protocol::Wide => combination.share <= WIDE_ROOM,
            Protocol::Tiles => true,
        };
        let choices = [
            (bounds.narrow, one, !scatters, Protocol::Narrow),
            (bounds.wide, one, !scatters, Protocol::Wide),
            (bounds.sharded, two, false, Protocol::Wide),
        ];
        for (bound, roles, whole, protocol) in choices {
            if bytes <= bound {
                let combination = plan(roles, whole, protocol);
                if fits(&combination) {
                    return Plan::Combine(combination);
                }
            }
        }
        // Between two ranks, two steps move as many bytes as one.
        let one_step = size == 2 && !scatters;
        Plan::Combine(plan(if one_step { one } else { two }, one_step, Protocol::Tiles))
    }
}

/// Threads of a block that moves `share` bytes by lines.
pub(super) fn line_threads(protocol: Protocol, share: u64) -> u32 {
    let threads = match protocol {
        Protocol::Wide => share.div_ceil(WIDE_ROOM / (LINE_SLOT / 16)),
        _ => share.div_ceil(8),
    };
    // At most LINE_THREADS.
    threads.min(u64::from(LINE_THREADS)).next_multiple_of(32).max(32) as u32
}

impl Combination {
    pub(super) fn arguments(&self, group: Group, job: &Job) -> Combine {
        let (scaled, scale) = match job.operator {
            Operator::PreMulSum(scale) if job.kind.reduces() => (1, kernels::scalar(job.dtype, scale)),
            _ => (0, 0),
        };
        let averages = job.kind.reduces() && job.operator == Operator::Average;
        Combine {
            input: job.input,
            output: job.output,
            bytes: self.bytes,
            stride: self.stride,
            share: self.share,
            scale,
            sources: self.sources,
            owners: self.owners,
            takers: self.takers,
            root: job.root,
            protocol: self.protocol as u32,
            whole: self.whole.into(),
            packed: self.packed.into(),
            scaled,
            ranks: if averages { group.size() } else { 0 },
            number: job.operator.number().into(),
            group,
        }
    }
}
