//! What lies where in an arena.
#![forbid(unsafe_code)]

use super::stages::SIGNAL_BYTES;

/// The most ranks of an exchange.
pub const MAX_RANKS: usize = 8;

/// The latch and the claim of the fault record.
const HEADER: u64 = 4096;
/// The counters of a block: `Control` of `kernels/exchange_arena.cuh`.
const CONTROL: u64 = 1024;
/// Bytes for narrow lines in a slot for lines, behind those for wide ones; and how many slots there are: as there.
pub(super) const NARROW_BYTES: u32 = 4096;
const LINE_DEPTH: u64 = 2;

/// Where the areas of an arena begin. For each block: its counters; and for each peer, in an area each, slots for lines,
/// for tiles of inputs, and for tiles of results.
///
/// Counters and lines never share an area with payload that is not made of lines: a payload could look like a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Of the slots for lines.
    pub(super) lines: u64,
    /// Of the slots for tiles of inputs.
    pub(super) inputs: u64,
    /// Of the slots for tiles of results.
    pub(super) results: u64,
    /// Of the signals of broadcasts by stages.
    pub(super) signals: u64,
    /// All of it.
    pub(super) bytes: u64,
}

impl Layout {
    /// That of a group of `size` whose kernels have at most `blocks` blocks, `depth` slots of `slot` bytes for tiles, and
    /// `wide` bytes for wide lines in each slot for lines.
    pub(super) fn new(size: u32, blocks: u32, slot: u32, depth: u32, wide: u32) -> Layout {
        let channels = u64::from(blocks) * u64::from(size.saturating_sub(1));
        let lines = HEADER + u64::from(blocks) * CONTROL;
        let inputs = lines + channels * LINE_DEPTH * u64::from(wide + NARROW_BYTES);
        let tiles = channels * u64::from(depth) * u64::from(slot);
        let signals = inputs + 2 * tiles;
        Layout { lines, inputs, results: inputs + tiles, signals, bytes: signals + SIGNAL_BYTES }
    }
}
