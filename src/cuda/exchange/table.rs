//! Which protocol a call gets, and how many blocks: a function of what all ranks agree on, and nothing else.
#![forbid(unsafe_code)]

use super::arena::Layout;
use super::plan::{NARROW_ROOM, wide_room};
use super::points::MOVE_WARPS;
use crate::signature::Kind;

/// Up to how many bytes a call goes by which lines; above, it goes by tiles. Bytes of the whole for
/// allreduce, reduce and broadcast; of one rank's part for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// By narrow lines, everything in one step.
    pub narrow: u64,
    /// By wide lines, everything in one step.
    pub wide: u64,
    /// By wide lines, in two steps: shards to their owners, results to everybody.
    pub sharded: u64,
}

/// Bytes of calls whose memory lies in windows: those that a rank gets from the others for moves and
/// reduce_scatter, those of the whole for broadcast and allreduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBounds {
    /// Allgather and all-to-all.
    pub moves: u64,
    /// Broadcast.
    pub broadcast: u64,
    /// Allreduce.
    pub allreduce: u64,
    /// Reduce_scatter.
    pub reduce_scatter: u64,
}

/// Bytes of sums whose pieces are dealt out to the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DealtBounds {
    /// Allreduce.
    pub allreduce: u64,
    /// Reduce.
    pub reduce: u64,
}

/// The choices for a size of group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Bytes of a slot for tiles: a multiple of 4096.
    pub slot: u32,
    /// Bytes for wide lines in a slot for lines: a multiple of 4096.
    pub wide: u32,
    /// The blocks of calls that go by tiles, and the most of those that go by lines.
    pub tile_blocks: u32,
    /// See `tile_blocks`.
    pub line_blocks: u32,
    /// What a block should find to do at least, by lines.
    pub line_share: u64,
    /// Into how many parts a transfer is cut at most, in calls that move: a block has one at a time.
    pub parts: u32,
    /// Warps of such a block that send, and as many that receive; four where a call has a limit of blocks.
    pub move_warps: u32,
    /// What such a block of eight warps, or one that swaps, should find to do at least by lines; and by tiles.
    pub line_part: u64,
    /// See `line_part`.
    pub tile_part: u64,
    /// Bytes of a slot for tiles that are moved, of which each warp has its own: a multiple of 4096.
    pub move_slot: u32,
    /// From how many bytes on a broadcast between two ranks is a send from one to the other. Not for more
    /// ranks.
    pub broadcast_sends: u64,
    /// From how many bytes of each rank on the allgathers of a group are moved, one after the other. Up to
    /// there they are broadcasts from each rank, beside each other.
    pub gather_moves: u64,
    /// From how many bytes on the root of a reduction in two steps combines no piece itself. Not for two
    /// ranks.
    pub reduce_spares: u64,
    /// Of allreduce.
    pub allreduce: Bounds,
    /// Of reduce.
    pub reduce: Bounds,
    /// Of reduce_scatter.
    pub reduce_scatter: Bounds,
    /// Of broadcast.
    pub broadcast: Bounds,
    /// Of allgather and all-to-all, where lines are swapped.
    pub swaps: Bounds,
    /// Of everything else that moves between pairs of ranks.
    pub moves: Bounds,
    /// From how many bytes on sums of three or four ranks take two steps by wide lines whose pieces are dealt
    /// out to the blocks.
    pub dealt_from: DealtBounds,
    /// Up to how many.
    pub dealt_to: DealtBounds,
    /// From how many bytes on calls in windows are not staged.
    pub windows_from: WindowBounds,
    /// Up to how many.
    pub windows_to: WindowBounds,
}

/// All choices. The default is measured on two H200s and four H100s; what groups of five to eight have is
/// extrapolated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// The most blocks of a kernel that exchanges, whatever the tunings say: never more than run side by
    /// side, since they wait for each other.
    pub blocks: u32,
    /// How many tiles a block may be ahead of a peer: a power of two.
    pub depth: u32,
    /// For 2 ranks, for 3 and 4, for 5 to 8.
    pub tunings: [Tuning; 3],
}

impl Table {
    /// Bytes of an arena in a group of `size`.
    pub fn arena_bytes(&self, size: u32) -> usize {
        // At most a few dozen MiB.
        self.layout(size).bytes as usize
    }

    pub(super) fn layout(&self, size: u32) -> Layout {
        Layout::new(self, size)
    }

    /// Which of the choices a group of `size` has.
    pub fn group_of(size: u32) -> usize {
        match size {
            0..=2 => 0,
            3..=4 => 1,
            _ => 2,
        }
    }

    /// The choices for a group of `size`.
    pub fn tuning(&self, size: u32) -> &Tuning {
        &self.tunings[Table::group_of(size)]
    }

    /// Up to how many bytes, as [`Bounds`] counts them, lines have room for in a group of `size`: narrow,
    /// wide, and wide in two steps.
    pub fn line_room(&self, kind: Kind, size: u32) -> [u64; 3] {
        let tuning = self.tuning(size);
        let moves = matches!(kind, Kind::Gather | Kind::Scatter);
        let line_blocks = tuning.line_blocks.min(self.blocks);
        let blocks = u64::from(if moves { self.cut(size, false).line_parts } else { line_blocks });
        let [narrow, wide] = [NARROW_ROOM, wide_room(tuning.wide)].map(|room| room * blocks);
        let owners = match kind {
            Kind::Allreduce | Kind::Reduce => u64::from(size),
            Kind::Broadcast => u64::from(size) - 1,
            _ => 0,
        };
        [narrow, wide, wide * owners]
    }

    /// How a group of `size` cuts what moves. All ranks know whether a call is limited to so many blocks.
    pub(super) fn cut(&self, size: u32, limited: bool) -> Cut {
        let Tuning { parts, move_warps, line_blocks, .. } = *self.tuning(size);
        // No more than there are ever blocks for.
        let queues = parts.min(self.blocks * (MOVE_WARPS / move_warps)) * move_warps;
        let warps = if limited { MOVE_WARPS.min(queues) } else { move_warps };
        let tile_parts = queues / warps;
        Cut { warps, queues, tile_parts, line_parts: tile_parts.min(line_blocks).min(self.blocks) }
    }

    /// The same without wide lines, for GPUs between which they may arrive in parts. Arenas are as they are.
    pub fn without_wide_lines(mut self) -> Table {
        for tuning in &mut self.tunings {
            tuning.dealt_to = DealtBounds::NONE;
            let Tuning { allreduce, reduce, reduce_scatter, broadcast, swaps, moves, .. } = tuning;
            for bounds in [allreduce, reduce, reduce_scatter, broadcast, swaps, moves] {
                (bounds.wide, bounds.sharded) = (0, 0);
            }
        }
        self
    }

    pub(super) fn bounds(&self, kind: Kind, size: u32) -> &Bounds {
        let tuning = self.tuning(size);
        match kind {
            Kind::Allreduce => &tuning.allreduce,
            Kind::Reduce => &tuning.reduce,
            Kind::ReduceScatter => &tuning.reduce_scatter,
            Kind::Broadcast => &tuning.broadcast,
            Kind::Allgather | Kind::Alltoall => &tuning.swaps,
            _ => &tuning.moves,
        }
    }
}

/// How transfers between two ranks are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Of a block that send, and as many that receive.
    pub(super) warps: u32,
    /// For tiles, each way.
    pub(super) queues: u32,
    /// The most parts of what goes by tiles: each has a queue for each warp.
    pub(super) tile_parts: u32,
    /// Of what goes by lines.
    pub(super) line_parts: u32,
}

impl DealtBounds {
    /// No bytes.
    pub const NONE: DealtBounds = DealtBounds { allreduce: 0, reduce: 0 };
    /// More than any call has.
    #[cfg(test)]
    pub(super) const ALL: DealtBounds = DealtBounds { allreduce: u64::MAX, reduce: u64::MAX };
}

const KIB: u64 = 1024;
/// More bytes than any call has.
pub const UNBOUNDED: u64 = 1 << 40;

impl Default for Table {
    fn default() -> Table {
        let two = Tuning {
            slot: 64 << 10,
            wide: 36 << 10,
            tile_blocks: 128,
            line_blocks: 64,
            line_share: 2 * KIB,
            parts: 64,
            move_warps: 4,
            line_part: KIB,
            tile_part: 32 * KIB,
            move_slot: 32 << 10,
            // Two H100s, sent and by tiles that are combined: 8 MiB 28.4 and 28.1 µs, 16 MiB 50.7 and 51.9,
            // 128 MiB 373 and 379, 1 GiB 2926 and 2984.
            broadcast_sends: 16 * 1024 * KIB,
            // Two H200s, in graphs, sixteen allgathers of 2, 4, 8 and 16 MiB of each rank moved 127, 211, 394
            // and 765 µs, as broadcasts 111, 213, 417 and 823.
            gather_moves: 4 * 1024 * KIB,
            // Four H100s, without a piece for the root and with one: 16 MiB 88 and 79 µs, 32 MiB 148 and 150,
            // 64 MiB 262 and 293, 1 GiB 3614 and 4573.
            reduce_spares: 32 * 1024 * KIB,
            allreduce: Bounds { narrow: 32 * KIB, wide: 2048 * KIB, sharded: 0 },
            reduce: Bounds { narrow: 4 * KIB, wide: 1024 * KIB, sharded: 0 },
            reduce_scatter: Bounds { narrow: 16 * KIB, wide: 1024 * KIB, sharded: 0 },
            broadcast: Bounds { narrow: 4 * KIB, wide: 1024 * KIB, sharded: 0 },
            swaps: Bounds { narrow: KIB, wide: 2048 * KIB, sharded: 0 },
            moves: Bounds { narrow: 4 * KIB, wide: 512 * KIB, sharded: 0 },
            dealt_from: DealtBounds::NONE,
            dealt_to: DealtBounds::NONE,
            // Two H200s, in windows and staged: an allgather of 2 MiB in all 7.8 and 8.9 µs, of 1 MiB 6.3 and
            // 6.0; an allreduce of 2 MiB 11.1 and 10.2, of 4 MiB 17.2 and 20.5; a reduce_scatter of 2 MiB in
            // all 7.6 and 6.6, of 4 MiB 10.9 and 12.9. Four: a broadcast of 16 MiB 69.5 and 67.8, of 128 MiB
            // 437 and 512.
            windows_from: WindowBounds {
                moves: 1024 * KIB,
                broadcast: 32 * 1024 * KIB,
                allreduce: 2560 * KIB,
                reduce_scatter: 1280 * KIB,
            },
            // Loads send their requests against the data, stores do not: an allreduce of 32 MiB 105.2 and
            // 105.7 µs, of 128 MiB 402 and 391; a reduce_scatter of 64 MiB in all 105 and 108, of 128 MiB 205
            // and 201.
            windows_to: WindowBounds {
                moves: UNBOUNDED,
                broadcast: UNBOUNDED,
                allreduce: 32 * 1024 * KIB,
                reduce_scatter: 32 * 1024 * KIB,
            },
        };
        let four = Tuning {
            // Four H100s, with slots of 24 KiB and of 16: an allreduce of 256 MiB 1189 and 1237 µs, of 1 GiB
            // 4599 and 4848, a reduction to one rank of them 845 and 940, 3173 and 3620, a broadcast of 1 GiB
            // 3065 and 3184, a reduce_scatter 2337 and 2481; with 20, 28, 32 and 64 an allreduce of 1 GiB
            // 4678, 4657, 4727 and 4726. Twice as many of 12 KiB: 4634, and of 64 MiB 310 instead of 318, but
            // a reduction of 1 GiB 3354.
            slot: 24 << 10,
            // Four H100s, by lines and by tiles: an allreduce of 4 MiB 32.9 and 33.8 µs, of 6 MiB 48.4 and
            // 44.5; an allgather of 4 MiB in all 15.5 and 17.7, of 6 MiB 21.7 and 22.4, of 8 MiB 28.4 and
            // 27.0; a reduce_scatter of 4 MiB in all 16.3 and 18.0; a broadcast of 3 MiB 14.3 and 15.9, of 4
            // MiB 21.3 and 19.5; a reduction of 3 MiB to one rank 20.2 and 27.1, of 8 MiB 51.3 and 51.7.
            wide: 36 << 10,
            parts: 64,
            move_warps: 2,
            // Four H100s, with slots of 24 KiB and of 16: an all-to-all of 64 MiB in all 155 and 161 µs, of 1
            // GiB 2311 and 2451, an allgather of it 2313 and 2448; with 20, 28 and 36 KiB an all-to-all of 1
            // GiB 2350, 2322 and 2301, of 16 MiB 46.2, 46.3 and 47.5.
            move_slot: 24 << 10,
            // Four H200s, in graphs, sixteen allgathers of 512 KiB, 1, 4 and 8 MiB of each rank moved 117,
            // 184, 609 and 1184 µs, as broadcasts 111, 217, 849 and 1675, as launches of their own 122, 243,
            // 734 and 1303: broadcasts go by way of the others' slots, and here have two blocks each.
            gather_moves: 1024 * KIB,
            allreduce: Bounds { narrow: 24 * KIB, wide: 384 * KIB, sharded: 4352 * KIB },
            reduce: Bounds { narrow: 128 * KIB, wide: 768 * KIB, sharded: 6144 * KIB },
            reduce_scatter: Bounds { narrow: 96 * KIB, wide: 1600 * KIB, sharded: 0 },
            broadcast: Bounds { narrow: 48 * KIB, wide: 384 * KIB, sharded: 3456 * KIB },
            swaps: Bounds { narrow: 8 * KIB, wide: 1600 * KIB, sharded: 0 },
            moves: Bounds { narrow: 4 * KIB, wide: 448 * KIB, sharded: 0 },
            // Four H200s, dealt out and not: an allreduce of 256 KiB 5.5 and 5.9 µs, of 320 KiB 5.7 and 6.3,
            // of 512 KiB 6.7 and 8.5, a reduction of 768 KiB to one rank 7.6 and 7.1, of 896 KiB 8.0 and 9.5;
            // three of them: an allreduce of 320 KiB 5.5 and 5.0, of 384 KiB 5.9 and 5.7, of 448 KiB 6.1 and
            // 7.4, a reduction of 896 KiB 7.8 and 8.5. Dealt out and by tiles: an allreduce of 12 MiB 71.3
            // and 75.4, of 16 MiB 95.5 and 92.8, a reduction of 64 MiB 246 and 258, of 128 MiB 488 and 462.
            dealt_from: DealtBounds { allreduce: 320 * KIB, reduce: 800 * KIB },
            dealt_to: DealtBounds { allreduce: 14 * 1024 * KIB, reduce: 80 * 1024 * KIB },
            ..two
        };
        let eight = Tuning {
            slot: 12 << 10,
            wide: 8 << 10,
            tile_blocks: 64,
            parts: 64,
            move_warps: 2,
            move_slot: 16 << 10,
            gather_moves: 1024 * KIB,
            allreduce: Bounds { narrow: 4 * KIB, wide: 64 * KIB, sharded: 3072 * KIB },
            reduce: Bounds { narrow: 4 * KIB, wide: 64 * KIB, sharded: 3072 * KIB },
            reduce_scatter: Bounds { narrow: 4 * KIB, wide: 384 * KIB, sharded: 0 },
            broadcast: Bounds { narrow: 4 * KIB, wide: 64 * KIB, sharded: 2048 * KIB },
            swaps: Bounds { narrow: KIB, wide: 192 * KIB, sharded: 0 },
            moves: Bounds { narrow: 4 * KIB, wide: 112 * KIB, sharded: 0 },
            ..two
        };
        Table { blocks: 128, depth: 2, tunings: [two, four, eight] }
    }
}
