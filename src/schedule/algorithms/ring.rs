//! Rings: every rank sends to the next and receives from the one before. The least elements over every link,
//! and one neighbour each way only; `n - 1` rounds to reduce and as many to gather.
//!
//! A part is combined in the order in which it passes the ranks, from the rank ahead of its owner round to
//! the owner. So reductions are NOT canonical: the parts of one vector are combined in different orders, and
//! other algorithms give other bits. The owner of a part, the last to add to it, applies the operator's final
//! step, once.

use crate::schedule::algorithms::{output_blocks, representation_of};
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, displacements, split};
use crate::schedule::ir::{Buffer, Rank, Span};

/// `2 (n - 1)` rounds, `2 c (n - 1) / n` elements out and in. Whole parts.
pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    allreduce_in_pieces(b, &Shape { chunk: 0, ..shape.clone() }, count);
}

/// The same with each part in pieces, which follow one another round the ring: while one is combined the next
/// is on its way.
pub(in crate::schedule) fn allreduce_in_pieces(b: &mut Builder, shape: &Shape, count: u64) {
    let part = |owner: Rank| split(count, shape.size, owner);
    let own = part(shape.rank);
    reduce(b, shape, |owner| Span::of(Buffer::Input, part(owner)), Span::of(Buffer::Output, own));
    let output = |owner| Span::of(Buffer::Output, part(owner));
    gather(b, shape, output(shape.rank), output);
}

/// `n - 1` rounds, everybody else's blocks out and in once.
pub(in crate::schedule) fn reduce_scatter(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let starts = displacements(counts);
    let input = |owner: Rank| Span::of(Buffer::Input, starts[owner as usize]..starts[owner as usize + 1]);
    reduce(b, shape, input, Span::new(Buffer::Output, 0, counts[shape.rank as usize]));
}

/// `n - 1` rounds, every block past every rank once.
pub(in crate::schedule) fn allgather(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let output = output_blocks(counts);
    let own = Span::new(Buffer::Input, 0, counts[shape.rank as usize]);
    gather(b, shape, own, |owner| output.of(owner));
    b.copy(own, output.of(shape.rank));
}

/// Combines the part of each rank on its way round to it. The own part ends in `result`.
fn reduce(b: &mut Builder, shape: &Shape, input: impl Fn(Rank) -> Span, result: Span) {
    let (next, previous) = (shape.ahead(1), shape.behind(1));
    let mut sum = input(previous);
    for round in 1..shape.size {
        // What was received in the last round goes on.
        for piece in shape.pieces(0..sum.len) {
            b.send(next, sum.part(piece.start, piece.end - piece.start));
        }
        let local = input(shape.behind(round + 1));
        let into = if round + 1 == shape.size { result } else { b.partial(local.len) };
        for piece in shape.pieces(0..local.len) {
            let (start, len) = (piece.start, piece.end - piece.start);
            let wire = representation_of(round);
            b.receive_reduce_left(previous, wire, local.part(start, len), into.part(start, len));
        }
        sum = into;
    }
}

/// Passes the finished part of each rank round, from `own` of this one.
fn gather(b: &mut Builder, shape: &Shape, own: Span, output: impl Fn(Rank) -> Span) {
    let (next, previous) = (shape.ahead(1), shape.behind(1));
    for round in 0..shape.size - 1 {
        let sent = if round == 0 { own } else { output(shape.behind(round)) };
        let received = output(shape.behind(round + 1));
        for piece in shape.pieces(0..sent.len) {
            b.send(next, sent.part(piece.start, piece.end - piece.start));
        }
        for piece in shape.pieces(0..received.len) {
            b.receive(previous, received.part(piece.start, piece.end - piece.start));
        }
    }
}
