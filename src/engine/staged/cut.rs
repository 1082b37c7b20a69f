//! How a call is cut into pieces, and where the bytes of a piece lie. The same cut on every rank: it depends
//! on what the ranks agree on, and nothing else.

#![forbid(unsafe_code)]

use std::sync::Arc;

/// Elements of every block of a call that are exchanged at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Elements of the longest block.
    count: u64,
    /// Elements of a block in one piece.
    step: u64,
    pieces: u32,
}

/// One piece of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its number, from 0.
    pub index: u32,
    /// Its first element of every block.
    pub start: u64,
    /// Its elements of every block, but of those that end before.
    pub len: u64,
    /// Whether it is all of the call.
    pub whole: bool,
}

impl Piece {
    /// Its elements of a block of `count` elements: the first, and how many.
    pub fn of(&self, count: u64) -> (u64, u64) {
        let start = self.start.min(count);
        (start, self.len.min(count - start))
    }
}

/// Pieces begin at multiples of so many elements.
const GRAIN: u64 = 64;

impl Cut {
    /// Blocks of `count` elements of `element` bytes; a rank has `blocks` of them at most. A piece of all
    /// blocks has about `bytes` bytes.
    pub fn even(count: u64, blocks: u64, element: usize, bytes: usize) -> Cut {
        let row = blocks.max(1).saturating_mul(element as u64);
        Cut::by(count, bytes as u64 / row)
    }

    /// Blocks of `counts` elements of `element` bytes. The first piece of all blocks, which is the longest,
    /// has about `bytes` bytes.
    pub fn listed(counts: &[u64], element: usize, bytes: usize) -> Cut {
        let mut sorted = counts.to_vec();
        sorted.sort_unstable();
        let mut left = bytes as u64 / element as u64;
        // Short blocks leave the others more.
        for (index, &count) in sorted.iter().enumerate() {
            let share = left / (sorted.len() - index) as u64;
            if count > share {
                return Cut::by(sorted.last().copied().unwrap_or(0), share);
            }
            left -= count;
        }
        Cut::whole()
    }

    /// `step` elements in a piece, or a little less.
    fn by(count: u64, step: u64) -> Cut {
        // No more pieces than can be counted.
        let least = count.div_ceil(u64::from(u32::MAX)).max(GRAIN);
        let step = (step / GRAIN * GRAIN).max(least);
        match u32::try_from(count.div_ceil(step)) {
            Ok(pieces @ 2..) => Cut { count, step, pieces },
            _ => Cut::whole(),
        }
    }

    /// Everything at once: for lists of counts, which not every rank knows ([`Lists`](super::Lists) goes by
    /// messages), and for what is exchanged where the caller has it.
    pub fn whole() -> Cut {
        Cut { count: 0, step: 0, pieces: 1 }
    }

    /// How many pieces; at least one.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// A piece by its number.
    pub fn piece(&self, index: u32) -> Piece {
        let start = u64::from(index) * self.step;
        let len = self.step.min(self.count.saturating_sub(start));
        Piece { index, start, len, whole: self.pieces == 1 }
    }
}

/// What one rank contributes to a call, or obtains from it: blocks, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// All of it.
    pub bytes: usize,
    /// How it is divided.
    pub blocks: Blocks,
}

/// How many blocks, and how long they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// So many of one length.
    Even(usize),
    /// One for each count of elements.
    Listed(Arc<[u64]>),
}

/// Bytes that lie together in the caller's memory and in that of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strip {
    /// Where in the caller's.
    pub at: usize,
    /// Where in the piece's.
    pub packed: usize,
    /// How many.
    pub bytes: usize,
}

impl Shape {
    /// Bytes of a piece.
    pub fn piece_bytes(&self, piece: Piece, element: usize) -> usize {
        match &self.blocks {
            _ if piece.whole => self.bytes,
            Blocks::Even(blocks) => blocks * piece.len as usize * element,
            Blocks::Listed(counts) => {
                counts.iter().map(|&count| piece.of(count).1 as usize).sum::<usize>() * element
            }
        }
    }

    /// The strips of a piece, in the order of the blocks. None is empty.
    pub fn strips(&self, piece: Piece, element: usize) -> impl Iterator<Item = Strip> + use<> {
        let blocks = match &self.blocks {
            _ if piece.whole => Blocks::Even(1),
            blocks => blocks.clone(),
        };
        let number = match &blocks {
            Blocks::Even(blocks) => *blocks,
            Blocks::Listed(counts) => counts.len(),
        };
        let length = self.bytes.checked_div(number).unwrap_or(0);
        let (mut block, mut packed) = (0, 0);
        (0..number)
            .map(move |index| {
                let (start, bytes, length) = match &blocks {
                    _ if piece.whole => (0, length, length),
                    Blocks::Even(_) => (piece.start as usize * element, piece.len as usize * element, length),
                    Blocks::Listed(counts) => {
                        let (start, len) = piece.of(counts[index]);
                        (start as usize * element, len as usize * element, counts[index] as usize * element)
                    }
                };
                let strip = Strip { at: block + start, packed, bytes };
                block += length;
                packed += bytes;
                strip
            })
            .filter(|strip| strip.bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_element_once() {
        for (count, blocks, bytes) in
            [(1, 1, 1024), (255, 1, 1024), (256, 1, 1024), (1000, 3, 1024), (65, 7, 1)]
        {
            let cut = Cut::even(count, blocks, 4, bytes);
            let blocks = blocks as usize;
            let shape = Shape { bytes: count as usize * blocks * 4, blocks: Blocks::Even(blocks) };
            cover(cut, &shape, bytes.max(blocks * 4 * GRAIN as usize));
        }
    }

    /// Sees to it that the pieces cover a shape of 4-byte elements once, each in `most` bytes.
    fn cover(cut: Cut, shape: &Shape, most: usize) {
        let mut seen = vec![0; shape.bytes];
        for index in 0..cut.pieces() {
            let piece = cut.piece(index);
            let mut packed = 0;
            for strip in shape.strips(piece, 4) {
                assert_eq!(strip.packed, packed);
                packed += strip.bytes;
                seen[strip.at..strip.at + strip.bytes].iter_mut().for_each(|times| *times += 1);
            }
            assert_eq!(packed, shape.piece_bytes(piece, 4));
            assert!(piece.whole || packed <= most, "{packed} bytes of {shape:?}");
        }
        assert!(seen.iter().all(|times| *times == 1), "{shape:?}");
    }

    #[test]
    fn pieces_of_lists_cover_every_element_once() {
        for (counts, bytes, pieces) in [
            (vec![5, 0, 7], 1024, 1),
            (vec![1000], 1024, 4),
            (vec![1000, 0, 3], 1024, 6),
            (vec![100, 1000, 200, 0], 4096, 2),
            (vec![300, 300, 300], 1, 5),
        ] {
            let cut = Cut::listed(&counts, 4, bytes);
            assert_eq!(cut.pieces(), pieces, "{counts:?}");
            let all = counts.iter().sum::<u64>() as usize * 4;
            let most = bytes.max(counts.len() * 4 * GRAIN as usize);
            for own in &counts {
                // What a rank gives of it.
                let blocks = Blocks::Listed([*own].into());
                cover(cut, &Shape { bytes: *own as usize * 4, blocks }, most);
            }
            cover(cut, &Shape { bytes: all, blocks: Blocks::Listed(counts.into()) }, most);
        }
    }

    #[test]
    fn nothing_is_one_piece() {
        let cut = Cut::even(0, 4, 8, 1024);
        assert_eq!((cut.pieces(), cut.piece(0).whole), (1, true));
        assert_eq!(Shape { bytes: 0, blocks: Blocks::Even(0) }.strips(cut.piece(0), 8).count(), 0);
    }

    #[test]
    fn the_longest_call_has_pieces_that_can_be_counted() {
        let cut = Cut::even(u64::MAX / 8, 1, 1, 1);
        let last = cut.piece(cut.pieces() - 1);
        assert!(last.len > 0 && last.start + last.len == u64::MAX / 8);
    }
}
