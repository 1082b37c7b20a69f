//! Scatter-allgather broadcast (after van de Geijn): the root sends every other rank one part of the vector,
//! and they pass their parts on to each other. Two rounds; the root sends `c` elements, the others less: for
//! large vectors. In chunks the rounds overlap.

use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, split};
use crate::schedule::ir::{Buffer, Rank, Span};

pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    // The root has no part: it needs none, and would only send it more often.
    let others =
        |start: Rank| (0..shape.size).map(move |d| (start + d) % shape.size).filter(move |&r| r != root);
    let label = |rank: Rank| (rank + shape.size - root) % shape.size - 1;
    let part = |owner: Rank| split(count, shape.size - 1, label(owner));
    let input = Span::new(Buffer::Input, 0, count);
    if shape.rank == root {
        for index in 0..shape.most_pieces(count, shape.size - 1) {
            for owner in others(shape.ahead(1)) {
                if let Some(piece) = shape.piece(part(owner), index) {
                    b.send(owner, Span::of(Buffer::Input, piece));
                }
            }
        }
        b.copy(input, Span::new(Buffer::Output, 0, count));
        return;
    }
    for piece in shape.pieces(part(shape.rank)) {
        let own = Span::of(Buffer::Output, piece);
        b.receive(root, own);
        for to in others(shape.ahead(1)).filter(|&to| to != shape.rank) {
            b.send(to, own);
        }
    }
    for from in others(shape.rank).filter(|&from| from != shape.rank) {
        for piece in shape.pieces(part(from)) {
            b.receive(from, Span::of(Buffer::Output, piece));
        }
    }
}
