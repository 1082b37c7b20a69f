//! How a call is cut into pieces, and where the bytes of a piece lie. The same cut on every rank: it depends on what
//! the ranks agree on, and nothing else.

#![forbid(unsafe_code)]

/// Elements of every block of a call that are exchanged at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Elements of a block.
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
    /// Its elements of every block.
    pub len: u64,
    /// Whether it is all of the call.
    pub whole: bool,
}

/// Pieces begin at multiples of so many elements.
const GRAIN: u64 = 64;

impl Cut {
    /// Blocks of `count` elements of `element` bytes; a rank has `blocks` of them at most. A piece of all blocks has about
    /// `bytes` bytes.
    pub fn even(count: u64, blocks: u64, element: usize, bytes: usize) -> Cut {
        let row = blocks.max(1).saturating_mul(element as u64);
        // No more pieces than can be counted.
        let least = count.div_ceil(u64::from(u32::MAX)).max(GRAIN);
        let step = (bytes as u64 / row / GRAIN * GRAIN).max(least);
        match u32::try_from(count.div_ceil(step)) {
            Ok(pieces @ 2..) => Cut { count, step, pieces },
            _ => Cut::whole(),
        }
    }

    /// Everything at once: for lists of counts, which not every rank knows, and for messages.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// All of it.
    pub bytes: usize,
    /// How many blocks.
    pub blocks: usize,
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
        if piece.whole { self.bytes } else { self.blocks * piece.len as usize * element }
    }

    /// The strips of a piece, in the order of the blocks. None is empty.
    pub fn strips(&self, piece: Piece, element: usize) -> impl Iterator<Item = Strip> + use<> {
        let block = self.bytes.checked_div(self.blocks).unwrap_or(0);
        let (blocks, from, bytes) = match piece.whole {
            true => (1, 0, self.bytes),
            false => (self.blocks, piece.start as usize * element, piece.len as usize * element),
        };
        (0..blocks)
            .map(move |index| Strip { at: index * block + from, packed: index * bytes, bytes })
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
            let shape = Shape { bytes: (count * blocks) as usize * 4, blocks: blocks as usize };
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
                assert!(piece.whole || packed <= bytes.max(blocks as usize * 4 * GRAIN as usize));
            }
            assert!(seen.iter().all(|times| *times == 1), "{count} of {blocks}");
        }
    }

    #[test]
    fn nothing_is_one_piece() {
        let cut = Cut::even(0, 4, 8, 1024);
        assert_eq!((cut.pieces(), cut.piece(0).whole), (1, true));
        assert_eq!(Shape { bytes: 0, blocks: 0 }.strips(cut.piece(0), 8).count(), 0);
    }

    #[test]
    fn the_longest_call_has_pieces_that_can_be_counted() {
        let cut = Cut::even(u64::MAX / 8, 1, 1, 1);
        let last = cut.piece(cut.pieces() - 1);
        assert!(last.len > 0 && last.start + last.len == u64::MAX / 8);
    }
}
