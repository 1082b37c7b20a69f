//! The parameters of the kernels, as `kernels/exchange_arena.cuh` declares them.
#![forbid(unsafe_code)]

use super::arena::MAX_RANKS;
use super::table::Table;

/// What is the same for every launch of an exchange.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Group {
    arena: [u64; MAX_RANKS],
    page: u64,
    lines: u64,
    inputs: u64,
    results: u64,
    moves: u64,
    rank: u32,
    size: u32,
    slot: u32,
    depth: u32,
    wide: u32,
    move_slot: u32,
    scratch: u64,
}

impl Group {
    /// `page` is the device's address of the fault page.
    pub(super) fn new(rank: u32, arenas: &[u64], page: u64, table: &Table) -> Group {
        // At most MAX_RANKS.
        let size = arenas.len() as u32;
        let layout = table.layout(size);
        let mut arena = [0; MAX_RANKS];
        arena[..arenas.len()].copy_from_slice(arenas);
        Group {
            arena,
            page,
            lines: layout.lines,
            inputs: layout.inputs,
            results: layout.results,
            moves: layout.moves,
            rank,
            size,
            slot: table.tuning(size).slot,
            depth: table.depth,
            wide: table.tuning(size).wide,
            move_slot: table.tuning(size).move_slot,
            scratch: layout.scratch,
        }
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Where this rank may put what nobody wants: at least as much as a reduction by all has,
    /// [`BY_ALL`](super::plan::BY_ALL).
    pub(super) fn own_scratch(&self) -> u64 {
        self.own_arena() + self.scratch
    }

    /// Where its arena begins.
    pub(super) fn own_arena(&self) -> u64 {
        self.arena[self.rank as usize]
    }
}

/// The parameter of the kernels that do one call: the call, and its group.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Call<C> {
    pub(super) call: C,
    pub(super) group: Group,
}

/// A call that combines.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Combine {
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) bytes: u64,
    pub(super) stride: u64,
    pub(super) share: u64,
    pub(super) scale: u64,
    pub(super) sources: u32,
    pub(super) owners: u32,
    pub(super) takers: u32,
    pub(super) root: u32,
    pub(super) protocol: u32,
    pub(super) whole: u32,
    pub(super) packed: u32,
    pub(super) scaled: u32,
    pub(super) ranks: u32,
    pub(super) number: u32,
    pub(super) first: u32,
    pub(super) blocks: u32,
}

/// A call that swaps parts.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Swap {
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) bytes: u64,
    pub(super) stride: u64,
    pub(super) share: u64,
    pub(super) wide: u32,
    pub(super) first: u32,
}

/// [`Combine`] in few bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct PackedCombine {
    input: u64,
    output: u64,
    bytes: u64,
    stride: u64,
    scale: u64,
    share: u32,
    first: u16,
    blocks: u16,
    sources: u8,
    owners: u8,
    takers: u8,
    root: u8,
    protocol: u8,
    ranks: u8,
    number: u8,
    flags: u8,
}

impl Combine {
    /// In few bytes, if it goes into as many: a kernel has few blocks, which do little at once.
    pub(super) fn packed(&self) -> Option<PackedCombine> {
        let byte = |number: u32| u8::try_from(number).ok();
        let flags = [self.whole, self.packed, self.scaled];
        Some(PackedCombine {
            input: self.input,
            output: self.output,
            bytes: self.bytes,
            stride: self.stride,
            scale: self.scale,
            share: self.share.try_into().ok()?,
            first: self.first.try_into().ok()?,
            blocks: self.blocks.try_into().ok()?,
            sources: byte(self.sources)?,
            owners: byte(self.owners)?,
            takers: byte(self.takers)?,
            root: byte(self.root)?,
            protocol: byte(self.protocol)?,
            ranks: byte(self.ranks)?,
            number: byte(self.number)?,
            flags: (0..).zip(flags).map(|(bit, flag)| u8::from(flag != 0) << bit).sum(),
        })
    }
}

/// The most calls of one launch.
pub(super) const SEVERAL: usize = 64;

/// The parameter of kernels that do several calls, each by blocks of its own.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Several<C> {
    group: Group,
    begins: [u16; SEVERAL],
    calls: [C; SEVERAL],
}

impl<C: std::marker::Copy + Default> Several<C> {
    /// Of none so far.
    pub(super) fn of(group: Group) -> Several<C> {
        Several { group, begins: [u16::MAX; SEVERAL], calls: [C::default(); SEVERAL] }
    }

    /// Call number `place`, of at most [`SEVERAL`], begins with block `begin`.
    pub(super) fn set(&mut self, place: usize, begin: u32, call: C) -> Option<()> {
        (self.begins[place], self.calls[place]) = (begin.try_into().ok()?, call);
        Some(())
    }
}

// Every driver takes so much.
const _: () = assert!(size_of::<Several<PackedCombine>>() <= 4096 && size_of::<Several<Swap>>() <= 4096);

/// Memory of this rank that goes to a peer or comes from one.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Transfer {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// The parameter of the kernels that move, with room for so many transfers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Move<const ROOM: usize> {
    pub(super) group: Group,
    pub(super) narrow: u64,
    pub(super) wide: u64,
    pub(super) line_part: u64,
    pub(super) tile_part: u64,
    pub(super) line_parts: u32,
    pub(super) tile_parts: u32,
    /// How many parts the transfer has that has most.
    pub(super) parts: u32,
    /// Whether each receive goes to the bytes of the send of its turn: then it waits until those have been
    /// read.
    pub(super) in_place: u32,
    /// How many peers have blocks of their own, and how many each.
    pub(super) classes: u32,
    /// See `classes`.
    pub(super) blocks: u32,
    /// Where each list of `transfers` ends and the next begins.
    pub(super) ends: [u32; LISTS],
    pub(super) transfers: [Transfer; ROOM],
}

/// Of each peer, and of the rank itself: what goes there, and what comes from there.
pub(super) const LISTS: usize = 2 * MAX_RANKS;
