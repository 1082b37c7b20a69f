//! Two-shot, direct: the vector is split into a shard for each rank; everybody sends its raw shard `j` to
//! rank `j`, who folds all `n` of them in canonical order and passes the result on, to all or to the root.
//! Two rounds, the least elements over every link: `2 c (n - 1) / n` out and in, `c` combined. Canonical.
//!
//! In chunks the two rounds overlap: one chunk is gathered while the next is reduced. A rank is at most a
//! *window* of chunks ahead of what it has got back from the owner, so raw chunks and results share the link
//! instead of all raw chunks going first: a chunk is folded, and its result sent on, while it still is in the
//! cache, and the memory for raw chunks is that of one window.

use crate::schedule::builder::{Builder, StepIndex};
use crate::schedule::collective::{Shape, split};
use crate::schedule::ir::{Buffer, Rank, Span};

pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    two_shot(b, shape, count, None);
}

pub(in crate::schedule) fn reduce(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    two_shot(b, shape, count, Some(root));
}

/// Chunks on their way between two ranks, when all ranks are on one node: half a megabyte of them, in the
/// chunks that calls have. More fall out of the cache, fewer leave the link idle.
const WINDOW_INSIDE: usize = 4;

/// The same when they are not: what a fast network holds between two nodes.
const WINDOW_ACROSS: usize = 32;

/// `root`: who alone gets the result.
fn two_shot(b: &mut Builder, shape: &Shape, count: u64, root: Option<Rank>) {
    let gets_result = |rank: Rank| root.is_none_or(|root| root == rank);
    let shard = |owner: Rank| split(count, shape.size, owner);
    let window = if shape.ranks_per_node >= shape.size { WINDOW_INSIDE } else { WINDOW_ACROSS };
    // A result says that the owner has room for another raw chunk; a raw chunk, that it has not fallen behind
    // by more than what it was ahead.
    let ahead = if root.is_none() { window } else { window / 2 };
    let mut flights = vec![Flight::default(); shape.size as usize];
    for index in 0..shape.most_pieces(count, shape.size) as usize {
        let piece_of = |owner: Rank| shape.piece(shard(owner), index as u64);
        for distance in 1..shape.size {
            let owner = shape.ahead(distance);
            if let Some(piece) = piece_of(owner) {
                let answers = &flights[owner as usize].answers;
                b.fence(index.checked_sub(ahead).and_then(|before| answers.get(before).copied()));
                b.send(owner, Span::of(Buffer::Input, piece));
            }
        }
        b.fence([]);
        if let Some(piece) = piece_of(shape.rank) {
            let mut operands = vec![Span::of(Buffer::Input, piece.clone()); shape.size as usize];
            for distance in 1..shape.size {
                let from = shape.behind(distance);
                let flight = &mut flights[from as usize];
                let raw = flight.room(b, index % window, piece.end - piece.start);
                let came = b.receive(from, raw);
                if root.is_some() {
                    flight.answers.extend(came);
                }
                operands[from as usize] = raw;
            }
            let result = if gets_result(shape.rank) {
                Span::of(Buffer::Output, piece)
            } else {
                b.scratch(piece.end - piece.start)
            };
            b.fold(&operands, result);
            for to in (1..shape.size).map(|distance| shape.ahead(distance)).filter(|&to| gets_result(to)) {
                b.send(to, result);
            }
        }
        if gets_result(shape.rank) {
            for owner in (1..shape.size).map(|distance| shape.behind(distance)) {
                if let Some(piece) = piece_of(owner) {
                    let came = b.receive(owner, Span::of(Buffer::Output, piece));
                    if root.is_none() {
                        flights[owner as usize].answers.extend(came);
                    }
                }
            }
        }
    }
}

/// What goes on between this rank and another.
#[derive(Clone, Debug, Default)]
struct Flight {
    /// Where the other's raw chunks come to, by turns.
    raw: Vec<Span>,
    /// For each chunk, what a later one to the other waits for.
    answers: Vec<StepIndex>,
}

impl Flight {
    /// Room for a raw chunk of `len` elements: that of the chunk a window ago, which was no shorter.
    fn room(&mut self, b: &mut Builder, turn: usize, len: u64) -> Span {
        if turn == self.raw.len() {
            self.raw.push(b.scratch(len));
        }
        self.raw[turn].part(0, len)
    }
}
