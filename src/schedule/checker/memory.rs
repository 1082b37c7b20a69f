//! One rank's memory, cut at every position where some span starts or ends, so that all positions of a cell
//! are always touched together.

use std::ops::Range;

use crate::schedule::checker::symbols::Symbol;
use crate::schedule::ir::{Buffer, Span};

/// What neighbouring positions hold: `symbol` over the inputs' elements from `element` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) len: u64,
    pub(super) symbol: Symbol,
    pub(super) element: u64,
}

impl Run {
    /// No positions.
    pub(super) const EMPTY: Run = Run { len: 0, symbol: 0, element: 0 };

    /// Adds a run behind others: to the last one, when it goes on like that.
    pub(super) fn append(self, runs: &mut Vec<Run>) {
        match runs.last_mut() {
            Some(last) if last.symbol == self.symbol && last.element + last.len == self.element => {
                last.len += self.len;
            }
            _ => runs.push(self),
        }
    }
}

/// What the caller was promised for a cell of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Promise {
    /// This, and nothing else.
    Exactly(Symbol, u64),
    /// Every input once, in any order, from that element on.
    Complete(u64),
}

impl Promise {
    /// The promise for the positions from `offset` on.
    pub(super) fn at(self, offset: u64) -> Promise {
        match self {
            Promise::Exactly(symbol, element) => Promise::Exactly(symbol, element + offset),
            Promise::Complete(element) => Promise::Complete(element + offset),
        }
    }
}

/// A cell's contents and who touched it last.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    /// Empty while nothing was written.
    pub(super) holds: Vec<Run>,
    pub(super) promise: Option<Promise>,
    pub(super) writer: Option<u32>,
    pub(super) readers: Vec<u32>,
}

/// The memories of a rank: the caller's input (with the output, when in place), the output, the engine's two.
pub(super) struct Memory {
    alias: Option<i64>,
    bounds: [Vec<i64>; 4],
    cells: [Vec<Cell>; 4],
}

impl Memory {
    /// Memory cut at the ends of `spans`.
    pub(super) fn new(alias: Option<i64>, spans: impl Iterator<Item = Span>) -> Memory {
        let mut memory = Memory { alias, bounds: Default::default(), cells: Default::default() };
        for span in spans {
            let (space, range) = memory.locate(span);
            memory.bounds[space].extend([range.start, range.end]);
        }
        for (bounds, cells) in memory.bounds.iter_mut().zip(&mut memory.cells) {
            bounds.sort_unstable();
            bounds.dedup();
            cells.resize(bounds.len().saturating_sub(1), Cell::default());
        }
        memory
    }

    /// The cells of a span, in order, with their lengths. The span is one of those that the memory was cut
    /// for.
    pub(super) fn cells(&mut self, span: Span) -> impl Iterator<Item = (u64, &mut Cell)> {
        let (space, range) = self.locate(span);
        let (bounds, cells) = (&self.bounds[space], &mut self.cells[space]);
        let first = bounds.partition_point(|&bound| bound < range.start);
        let end = first + bounds[first..].partition_point(|&bound| bound < range.end);
        let lens = bounds[first..].windows(2).map(|pair| (pair[1] - pair[0]) as u64);
        lens.zip(&mut cells[first..end])
    }

    /// Whether two spans share a position.
    pub(super) fn overlap(&self, a: Span, b: Span) -> bool {
        let ((a_space, a), (b_space, b)) = (self.locate(a), self.locate(b));
        a_space == b_space && a.start < b.end && b.start < a.end
    }

    /// Whether two spans are the same positions.
    pub(super) fn coincide(&self, a: Span, b: Span) -> bool {
        self.locate(a) == self.locate(b)
    }

    fn locate(&self, span: Span) -> (usize, Range<i64>) {
        let (space, shift) = match (span.buffer, self.alias) {
            (Buffer::Input, _) => (0, 0),
            (Buffer::Output, Some(alias)) => (0, alias),
            (Buffer::Output, None) => (1, 0),
            (Buffer::Scratch, _) => (2, 0),
            (Buffer::Partial, _) => (3, 0),
        };
        (space, span.start as i64 + shift..span.end() as i64 + shift)
    }
}
