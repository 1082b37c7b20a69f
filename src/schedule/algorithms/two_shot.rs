//! Two-shot, direct: the vector is split into a shard for each rank; everybody sends its raw shard `j` to rank `j`,
//! who folds all `n` of them in canonical order and passes the result on, to all or to the root. Two rounds, the
//! least elements over every link: `2 c (n - 1) / n` out and in, `c` combined. Canonical.
//!
//! In chunks the two rounds overlap: one chunk is gathered while the next is reduced.

use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, split};
use crate::schedule::ir::{Buffer, Rank, Span};

pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    two_shot(b, shape, count, None);
}

pub(in crate::schedule) fn reduce(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    two_shot(b, shape, count, Some(root));
}

/// `root`: who alone gets the result.
fn two_shot(b: &mut Builder, shape: &Shape, count: u64, root: Option<Rank>) {
    let gets_result = |rank: Rank| root.is_none_or(|root| root == rank);
    let shard = |owner: Rank| split(count, shape.size, owner);
    // No shard is longer than the first.
    for index in 0..shape.pieces(shard(0)).count() as u64 {
        let piece_of = |owner: Rank| shape.piece(shard(owner), index);
        for distance in 1..shape.size {
            let owner = shape.ahead(distance);
            if let Some(piece) = piece_of(owner) {
                b.send(owner, Span::of(Buffer::Input, piece));
            }
        }
        if let Some(piece) = piece_of(shape.rank) {
            let mut operands = vec![Span::of(Buffer::Input, piece.clone()); shape.size as usize];
            for distance in 1..shape.size {
                let from = shape.behind(distance);
                let raw = b.scratch(piece.end - piece.start);
                b.receive(from, raw);
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
                    b.receive(owner, Span::of(Buffer::Output, piece));
                }
            }
        }
    }
}
