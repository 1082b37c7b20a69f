//! What lies where in an arena.
#![forbid(unsafe_code)]

use super::plan::BY_ALL;
use super::signals::TALLY_BYTES;
use super::stages::SIGNAL_BYTES;
use super::table::{Table, Tuning};

/// The most ranks of an exchange.
pub const MAX_RANKS: usize = 8;

/// The latch, the claim of the fault record, and when the host was asked last.
const HEADER: u64 = 4096;
/// The counters of a block: `Control` of `kernels/exchange_arena.cuh`.
const CONTROL: u64 = 2048;
/// Bytes for narrow lines in a slot for lines, behind those for wide ones; and how many slots there are: as
/// there.
pub(super) const NARROW_BYTES: u32 = 4096;
const LINE_DEPTH: u64 = 2;
/// Bytes in which a block that combines by tiles lays what its rank has at addresses that packets do not
/// suit: as there.
const SCRATCH: u64 = 16384;

/// Where the areas of an arena begin. For each block: its counters; and for each peer, in an area each, slots
/// for lines, for tiles of inputs, for tiles of results, and for tiles that are moved.
///
/// Counters and lines never share an area with payload that is not made of lines: a payload could look like a
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Of the slots for lines.
    pub(super) lines: u64,
    /// Of the slots for tiles of inputs.
    pub(super) inputs: u64,
    /// Of the slots for tiles of results.
    pub(super) results: u64,
    /// What lies behind those.
    pub(super) after_results: u64,
    /// Of the slots for tiles that are moved: those for inputs, where both are cut alike. They are counted as
    /// one.
    pub(super) moves: u64,
    /// Of the blocks' scratch.
    pub(super) scratch: u64,
    /// Of the signals of broadcasts by stages.
    pub(super) signals: u64,
    /// Of what peers count there that have written into a window.
    pub(super) tally: u64,
    /// All of it.
    pub(super) bytes: u64,
}

impl Layout {
    /// That of a group of `size`.
    pub(super) fn new(table: &Table, size: u32) -> Layout {
        let Tuning { slot, wide, tile_blocks, line_blocks, move_slot, .. } = *table.tuning(size);
        let peers = u64::from(size.saturating_sub(1));
        let [tile_blocks, lined] = [tile_blocks, line_blocks].map(|blocks| blocks.min(table.blocks));
        let channels = |blocks: u32| u64::from(blocks) * peers;
        let moving = table.cut(size, false).queues;
        let slots = |depth: u64, bytes: u32| depth * u64::from(bytes);
        let depth = u64::from(table.depth);
        let tiles = channels(tile_blocks) * slots(depth, slot);
        let lines = HEADER + u64::from(tile_blocks.max(lined).max(moving)) * CONTROL;
        let inputs = lines + channels(lined) * slots(LINE_DEPTH, wide + NARROW_BYTES);
        let results = inputs + tiles;
        // Between two ranks nothing takes a second step.
        let after_results = results + if size > 2 { tiles } else { 0 };
        let (moves, scratch) = match (tile_blocks, slot) == (moving, move_slot) {
            true => (inputs, after_results),
            false => (after_results, after_results + channels(moving) * slots(depth, move_slot)),
        };
        let signals = scratch + (u64::from(tile_blocks) * SCRATCH).max(BY_ALL);
        let tally = signals + SIGNAL_BYTES;
        Layout {
            lines,
            inputs,
            results,
            after_results,
            moves,
            scratch,
            signals,
            tally,
            bytes: tally + TALLY_BYTES,
        }
    }
}
