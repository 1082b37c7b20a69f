//! Halving-doubling: at level `k` a rank trades with the rank whose number differs in bit `k`; each sends the
//! half of its range of the vector that the other keeps, and combines the half that it keeps itself. After
//! the last level everybody holds a small range of the result; going back through the levels, the halves are
//! gathered. `2 log2 n` rounds and `2 c (n - 1) / n` elements: few rounds and the least elements at once.
//!
//! The distance doubles while the range halves, so level `k` joins aligned blocks of `2^k` neighbours:
//! canonical.
//!
//! *Other sizes: binary blocks.* The ranks form a block for each bit of `n`, the largest first, and each
//! block reduces by itself. The canonical tree joins them from the smallest up: each block gives its sum to
//! the next larger one, where rank `q` takes its range from rank `q mod b` of the smaller block (of `b`
//! ranks), whose range contains it. The largest block finishes and sends every other block its ranges. That
//! adds two rounds, and one for each bit of `n` beyond the second.

use std::ops::Range;

use crate::schedule::algorithms::representation_of;
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, displacements, split};
use crate::schedule::ir::{Buffer, Rank, Representation, Span};

/// Whole.
pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    allreduce_piece(b, shape, 0..count);
}

/// In pieces, each through all levels by itself: while one is gathered another is reduced. No message is
/// larger than a chunk.
pub(in crate::schedule) fn allreduce_in_pieces(b: &mut Builder, shape: &Shape, count: u64) {
    let twice = Shape { chunk: shape.chunk.saturating_mul(2), ..shape.clone() };
    for piece in twice.pieces(0..count) {
        allreduce_piece(b, shape, piece);
    }
}

fn allreduce_piece(b: &mut Builder, shape: &Shape, piece: Range<u64>) {
    let blocks = BinaryBlocks::new(shape);
    let cells: Vec<u64> = (0..blocks.largest)
        .map(|cell| split(piece.end - piece.start, blocks.largest, cell).start + piece.start)
        .chain([piece.end])
        .collect();
    let output = |cells_of: Range<u32>| {
        Span::of(Buffer::Output, cells[cells_of.start as usize]..cells[cells_of.end as usize])
    };
    let own = blocks.cells(blocks.index, blocks.len);
    reduce(b, &blocks, Buffer::Input, &cells, output(own.clone()));
    if blocks.first > 0 {
        for from in blocks.counterparts() {
            b.receive(from, output(blocks.cells(from, blocks.largest)));
        }
    } else {
        for (first, len) in blocks.smaller() {
            b.send(first + blocks.index % len, output(own.clone()));
        }
    }
    let mut have = own;
    for level in (0..blocks.len.trailing_zeros()).rev() {
        let partner = blocks.index ^ (1 << level);
        let whole = blocks.cells(blocks.index, 1 << level);
        let other = if have.start == whole.start { have.end..whole.end } else { whole.start..have.start };
        b.send(blocks.first + partner, output(have.clone()));
        b.receive(blocks.first + partner, output(other));
        have = whole;
    }
}

/// The first half alone. A block's place in the vector must follow the halving, so the blocks are first
/// copied into that order.
pub(in crate::schedule) fn reduce_scatter(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let blocks = BinaryBlocks::new(shape);
    // A cell holds the block of the rank that ends with it, and of the rank outside of the largest block that
    // it finishes for.
    let owners = |cell: u32| {
        let rank = blocks.rank_of_cell(cell);
        [rank, rank + blocks.largest].into_iter().filter(|&rank| rank < shape.size)
    };
    let starts = displacements(counts);
    let staged = b.scratch(starts[counts.len()]);
    let mut cells = vec![0];
    let mut end = 0;
    for cell in 0..blocks.largest {
        for owner in owners(cell) {
            let block = Span::of(Buffer::Input, starts[owner as usize]..starts[owner as usize + 1]);
            b.copy(block, staged.part(end, block.len));
            end += block.len;
        }
        cells.push(end);
    }
    let own = Span::new(Buffer::Output, 0, counts[shape.rank as usize]);
    if blocks.first > 0 {
        let unused = b.scratch(0);
        reduce(b, &blocks, Buffer::Scratch, &cells, unused);
        b.receive(shape.rank - blocks.largest, own);
        return;
    }
    let guest = shape.rank + blocks.largest;
    if guest >= shape.size {
        reduce(b, &blocks, Buffer::Scratch, &cells, own);
        return;
    }
    let guest_len = counts[guest as usize];
    let results = b.scratch(own.len + guest_len);
    reduce(b, &blocks, Buffer::Scratch, &cells, results);
    b.send(guest, results.part(own.len, guest_len));
    b.copy(results.part(0, own.len), own);
}

/// No rank has to do with more others, but for a few of the largest block. One of another block has its share
/// from, or for, all who divide it among them: in the next larger block, and in the largest one if results
/// are gathered.
pub(in crate::schedule) fn most_peers(size: u32, gathers: bool) -> u32 {
    let largest = 1u32 << size.ilog2();
    let (mut larger, mut most) = (largest, 0);
    for len in (0..largest.trailing_zeros()).rev().map(|level| 1u32 << level).filter(|len| size & len != 0) {
        let results = if gathers && larger != largest { largest / len } else { 0 };
        // Besides, those of its own block, and one of the next smaller.
        most = most.max(larger / len + results + len.trailing_zeros() + 1);
        larger = len;
    }
    most
}

/// Reduces within the block and across blocks. Cell `i` of `source` is `cells[i]..cells[i + 1]`; a rank of
/// the largest block ends with the result of its cell in `result`, the others end without.
fn reduce(b: &mut Builder, blocks: &BinaryBlocks, source: Buffer, cells: &[u64], result: Span) {
    let positions = |range: Range<u32>| cells[range.start as usize]..cells[range.end as usize];
    let mut have = blocks.cells(blocks.index, 1);
    let mut sum = Span::of(source, positions(have.clone()));
    let levels = blocks.len.trailing_zeros();
    let alone = blocks.len == blocks.size;
    for level in 0..levels {
        let partner = blocks.index ^ (1 << level);
        let keep = blocks.cells(blocks.index, 2 << level);
        let give = blocks.cells(partner, 2 << level);
        let offset = |part: &Range<u32>| positions(part.clone()).start - positions(have.clone()).start;
        let len = |part: &Range<u32>| positions(part.clone()).end - positions(part.clone()).start;
        b.send(blocks.first + partner, sum.part(offset(&give), len(&give)));
        let local = sum.part(offset(&keep), len(&keep));
        let into = if alone && level + 1 == levels {
            result
        } else if level == 0 {
            b.partial(local.len)
        } else {
            local
        };
        let wire = representation_of(1 << level);
        if blocks.index < partner {
            b.receive_reduce_right(blocks.first + partner, wire, local, into);
        } else {
            b.receive_reduce_left(blocks.first + partner, wire, local, into);
        }
        (have, sum) = (keep, into);
    }
    if let Some((first, len)) = blocks.next_smaller() {
        // What stands right of this block: the next block with all that is right of that one.
        let wire = representation_of(blocks.size - first);
        let into = if blocks.first == 0 {
            result
        } else if sum.representation() == Representation::Element {
            b.partial(sum.len)
        } else {
            sum
        };
        b.receive_reduce_right(first + blocks.index % len, wire, sum, into);
        sum = into;
    }
    if let Some((first, len)) = blocks.next_larger() {
        let start = positions(have).start;
        for to in (blocks.index..len).step_by(blocks.len as usize) {
            let range = positions(blocks.cells(to, len));
            b.send(first + to, sum.part(range.start - start, range.end - range.start));
        }
    }
}

/// The ranks cut into a run for each bit of their number, the largest first.
struct BinaryBlocks {
    size: u32,
    /// Ranks of the largest block, which starts at rank 0; also the number of cells of the vector.
    largest: u32,
    /// First rank, and number of ranks, of the block of this rank.
    first: Rank,
    len: u32,
    /// This rank's number within its block.
    index: u32,
}

impl BinaryBlocks {
    fn new(shape: &Shape) -> BinaryBlocks {
        let size = shape.size;
        let largest = 1 << size.ilog2();
        let (mut first, mut len) = (0, largest);
        while shape.rank >= first + len {
            first += len;
            len = 1 << (size - first).ilog2();
        }
        BinaryBlocks { size, largest, first, len, index: shape.rank - first }
    }

    /// The cells that rank `index` of a block keeps when `parts` (a power of two) ranks share the vector: the
    /// lowest bit of the index chooses the half, the next one the quarter of it.
    fn cells(&self, index: u32, parts: u32) -> Range<u32> {
        let each = self.largest / parts;
        let part = reverse_bits(index % parts, parts);
        part * each..(part + 1) * each
    }

    /// Who of the largest block ends with that cell.
    fn rank_of_cell(&self, cell: u32) -> Rank {
        reverse_bits(cell, self.largest)
    }

    /// First rank and number of ranks of each block behind this one.
    fn smaller(&self) -> impl Iterator<Item = (Rank, u32)> + use<> {
        let size = self.size;
        let after = move |first: Rank| (first < size).then(|| (first, 1 << (size - first).ilog2()));
        std::iter::successors(after(self.first + self.len), move |&(first, len)| after(first + len))
    }

    fn next_smaller(&self) -> Option<(Rank, u32)> {
        self.smaller().next()
    }

    fn next_larger(&self) -> Option<(Rank, u32)> {
        // The bits of `first` are the blocks before this one; the last of them is the lowest bit.
        (self.first > 0).then(|| {
            let len = 1 << self.first.trailing_zeros();
            (self.first - len, len)
        })
    }

    /// The ranks of the largest block that share this rank's range among them.
    fn counterparts(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.index..self.largest).step_by(self.len as usize)
    }
}

/// The bits of a number below `parts`, a power of two, in reverse.
fn reverse_bits(number: u32, parts: u32) -> u32 {
    if parts == 1 { 0 } else { number.reverse_bits() >> (u32::BITS - parts.trailing_zeros()) }
}
