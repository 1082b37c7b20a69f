//! The broadcast that pulls: every rank reads the root's input out of the root's memory, in one stage, or a
//! part of it and the others' parts from the others, in two.
//!
//! By name only: the broadcast that calls get otherwise is faster. `kernels/stages.cu` says how it works.
#![forbid(unsafe_code)]

use super::arena::MAX_RANKS;
use super::arguments::Group;
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::error::{Result, fail};

/// The most blocks of the kernel, each of so many threads: `STAGE_BLOCKS` and `STAGE_THREADS` of the kernels.
const STAGE_BLOCKS: u32 = 384;
const THREADS: u32 = 256;
/// How many blocks a multiprocessor has room for, by the kernel's launch bounds.
const RESIDENT: u32 = 3;
/// Bytes of a rank's signals: `StageSignals` of the kernels. Near the end of its arena.
pub(super) const SIGNAL_BYTES: u64 = (STAGE_BLOCKS * (8 + 12 * MAX_RANKS as u32)) as u64;
/// Bytes that one access moves. Parts are multiples of it.
const PACKET: u64 = 16;

/// How many stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stages {
    /// Everybody reads everything from the root.
    One,
    /// Everybody reads a part from the root, keeps it for the others, and reads theirs. Between two ranks:
    /// one stage.
    Two,
    /// Two from three ranks up, where there are bytes enough; else one.
    Automatic,
}

impl Stages {
    /// All, in the order of their numbers.
    pub const ALL: [Stages; 3] = [Stages::One, Stages::Two, Stages::Automatic];

    /// What an algorithm's ABI number stands for, if it is one of these.
    pub fn from_number(number: i32) -> Option<Stages> {
        Stages::ALL.into_iter().find(|stages| stages.number() == number)
    }

    /// The ABI number.
    pub const fn number(self) -> i32 {
        match self {
            Stages::One => 21,
            Stages::Two => 22,
            Stages::Automatic => 23,
        }
    }

    /// The name that errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Stages::One => "broadcast-one-stage",
            Stages::Two => "broadcast-two-stage",
            Stages::Automatic => "broadcast-stages",
        }
    }

    /// Whether a call of so many bytes has two.
    pub fn are_two(self, size: u32, bytes: u64) -> bool {
        let least = match self {
            Stages::One => return false,
            Stages::Two => 0,
            Stages::Automatic if size <= 4 => 6 << 20,
            Stages::Automatic => 2 << 20,
        };
        size >= 3 && bytes >= least
    }
}

/// How far a kernel's beginning overlaps with what the stream was given before it, and its end with what
/// comes after: the levels of programmatic dependent launch. Each rank may have its own. Nothing overlaps on
/// devices whose kernels cannot wait for that: see [`crate::cuda::image::Image::awaits_streams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// Not at all.
    #[default]
    Off = 0,
    /// It is launched while the kernel before it ends, and waits for that first.
    Wait = 1,
    /// The same, and it lets the kernel after it be launched at once.
    Early = 2,
}

impl Overlap {
    /// The level behind an ABI number.
    pub fn from_number(number: i32) -> Result<Overlap> {
        match number {
            0 => Ok(Overlap::Off),
            1 => Ok(Overlap::Wait),
            2 => Ok(Overlap::Early),
            _ => fail!(
                InvalidArgument,
                "pdl {number} is unknown; the levels are 0 (off), 1 (wait first), 2 (trigger early)"
            ),
        }
    }
}

/// A broadcast by stages as this rank makes it. All ranks agree on everything but the addresses and
/// `overlap`.
#[derive(Clone, Copy, Debug)]
pub struct Pull {
    /// How many stages.
    pub stages: Stages,
    /// The input's first byte; looked at on the root alone.
    pub input: u64,
    /// The output's first byte: on the root the input itself or elsewhere.
    pub output: u64,
    /// Bytes of the whole.
    pub bytes: u64,
    /// Whose input it is.
    pub root: u32,
    /// On the root, the input as each rank reaches it. If they do not, it goes through the root's arena.
    pub seen: Option<[u64; MAX_RANKS]>,
    /// The most blocks; 0 for as many as suit it.
    pub max_blocks: u32,
    /// Multiprocessors of each GPU, at least. More blocks than fit on them at the same time would wait for
    /// each other.
    pub multiprocessors: u32,
    /// What it overlaps with.
    pub overlap: Overlap,
}

/// The parameter of the kernel, as `kernels/stages.cu` declares it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    group: Group,
    input: u64,
    output: u64,
    bytes: u64,
    /// Where the signals and the payload begin in an arena, and how long the payload may be.
    signals: u64,
    payload: u64,
    room: u64,
    root: u32,
    two: u32,
    overlap: u32,
    reserved: u32,
    seen: [u64; MAX_RANKS],
}

impl Pull {
    pub(super) fn arguments(&self, group: Group, table: &Table) -> (Grid, Arguments) {
        let size = group.size();
        let layout = table.layout(size);
        let two = self.stages.are_two(size, self.bytes);
        let part = if two { self.bytes / u64::from(size) } else { self.bytes };
        let most = STAGE_BLOCKS.min(self.multiprocessors.saturating_mul(RESIDENT));
        let most = if self.max_blocks == 0 { most } else { most.min(self.max_blocks) };
        let blocks = part.div_ceil(PACKET * u64::from(THREADS)).clamp(1, most.max(1).into());
        // At most `most`, a u32.
        let grid = Grid { blocks: blocks as u32, threads: THREADS, shared: 0, overlaps: false };
        let arguments = Arguments {
            group,
            input: self.input,
            output: self.output,
            bytes: self.bytes,
            signals: layout.signals,
            payload: layout.inputs,
            // Tiles of inputs and of results: nobody uses them while all ranks are in this kernel, since what
            // was sent before it has been received before it, too.
            room: layout.after_results - layout.inputs,
            root: self.root,
            two: two.into(),
            overlap: self.overlap as u32,
            reserved: 0,
            seen: self.seen.unwrap_or_default(),
        };
        (grid, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull(stages: Stages, bytes: u64, max_blocks: u32, multiprocessors: u32) -> Pull {
        Pull {
            stages,
            input: 0,
            output: 0,
            bytes,
            root: 0,
            seen: None,
            max_blocks,
            multiprocessors,
            overlap: Overlap::Off,
        }
    }

    fn planned(size: usize, pull: &Pull) -> (Grid, Arguments) {
        let table = Table::default();
        pull.arguments(Group::new(0, &vec![4096; size], 0, &table), &table)
    }

    #[test]
    fn two_stages_begin_with_three_ranks_and_by_size() {
        let two = |stages: Stages, size, bytes| stages.are_two(size, bytes);
        assert!(!two(Stages::Two, 2, 1 << 30) && two(Stages::Two, 3, 1) && !two(Stages::One, 8, 1 << 30));
        for (size, least) in [(4, 6 << 20), (8, 2 << 20)] {
            assert!(!two(Stages::Automatic, size, least - 1) && two(Stages::Automatic, size, least));
        }
        assert!(!two(Stages::Automatic, 2, 1 << 30));
    }

    #[test]
    fn blocks_are_no_more_than_allowed_needed_or_resident() {
        let blocks = |stages, bytes, max_blocks, multiprocessors| {
            planned(4, &pull(stages, bytes, max_blocks, multiprocessors)).0.blocks
        };
        assert_eq!(blocks(Stages::One, 1, 0, 132), 1);
        assert_eq!(blocks(Stages::One, 4097, 0, 132), 2);
        assert_eq!(blocks(Stages::Two, 16 << 10, 0, 132), 1);
        assert_eq!(blocks(Stages::Two, 1 << 30, 0, 132), 384);
        assert_eq!(blocks(Stages::Two, 1 << 30, 0, 100), 300);
        assert_eq!(blocks(Stages::Two, 1 << 30, 24, 132), 24);
        assert_eq!(blocks(Stages::Two, 1 << 30, 1000, 132), 384);
    }

    #[test]
    fn signals_and_payload_are_apart_and_within_the_arena() {
        let table = Table::default();
        for size in 2..=8 {
            let (_, arguments) = planned(size, &pull(Stages::Two, 1 << 30, 0, 132));
            let layout = table.layout(size as u32);
            assert_eq!(arguments.payload + arguments.room, layout.after_results);
            assert_eq!(arguments.signals + SIGNAL_BYTES, layout.tally);
            assert!(arguments.payload % 128 == 0 && arguments.signals % 128 == 0);
            assert!(arguments.room >= 1 << 20, "pieces are long enough");
        }
    }

    #[test]
    fn numbers_and_names_stand_for_one_another() {
        for stages in Stages::ALL {
            assert_eq!(Stages::from_number(stages.number()), Some(stages));
        }
        assert_eq!(Stages::from_number(20), None);
        assert_eq!(Overlap::from_number(2), Ok(Overlap::Early));
        assert!(Overlap::from_number(3).is_err_and(|error| error.text().contains("trigger early")));
    }
}
