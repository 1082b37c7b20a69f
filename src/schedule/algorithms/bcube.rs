//! BCube (after the network of Guo and others): ranks are the corners of a cube with up to four along each
//! edge. Stage by stage the ranks of an edge split their common range among them, each folding its part from
//! all, then they gather in reverse. Half as many rounds as halving-doubling and the same elements, with more
//! messages a round.
//!
//! The edges' lengths multiply to `n`: fours, a two, and last what is odd in `n`, as one edge. An edge joins
//! neighbouring aligned blocks of a power of two ranks, in the canonical tree's own order: canonical for
//! every `n`. For an odd `n` it is one edge, which is two-shot.

use std::ops::Range;

use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, split};
use crate::schedule::ir::{Buffer, Rank, Span};

pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    for piece in shape.pieces(0..count) {
        allreduce_piece(b, shape, piece);
    }
}

fn allreduce_piece(b: &mut Builder, shape: &Shape, piece: Range<u64>) {
    let edges = edges(shape);
    let mut ranges = vec![piece.clone()];
    let mut sum = Span::of(Buffer::Input, piece);
    for (stage, edge) in edges.iter().enumerate() {
        let range = ranges[stage].clone();
        let own = edge.part(&range, edge.own);
        let part_of_sum = |part: Range<u64>| sum.part(part.start - range.start, part.end - part.start);
        for peer in edge.others() {
            b.send(edge.rank(peer), part_of_sum(edge.part(&range, peer)));
        }
        let mut operands = vec![part_of_sum(own.clone()); edge.len as usize];
        for peer in edge.others() {
            let len = own.end - own.start;
            let operand = if stage == 0 { b.scratch(len) } else { b.partial(len) };
            b.receive(edge.rank(peer), operand);
            operands[peer as usize] = operand;
        }
        sum = if stage + 1 == edges.len() {
            Span::of(Buffer::Output, own.clone())
        } else {
            b.partial(own.end - own.start)
        };
        b.fold(&operands, sum);
        ranges.push(own);
    }
    for (stage, edge) in edges.iter().enumerate().rev() {
        for peer in edge.others() {
            b.send(edge.rank(peer), Span::of(Buffer::Output, ranges[stage + 1].clone()));
        }
        for peer in edge.others() {
            b.receive(edge.rank(peer), Span::of(Buffer::Output, edge.part(&ranges[stage], peer)));
        }
    }
}

/// Ranks of the edge that takes what is odd in a number of them.
pub(in crate::schedule) fn odd_edge(size: u32) -> u32 {
    size >> size.trailing_zeros()
}

/// The ranks that this rank meets in one stage: every `stride`-th.
struct Edge {
    first: Rank,
    stride: u32,
    len: u32,
    /// This rank's place on the edge.
    own: u32,
}

impl Edge {
    fn rank(&self, place: u32) -> Rank {
        self.first + place * self.stride
    }

    /// The other places, the next one first.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (own, len) = (self.own, self.len);
        (1..len).map(move |distance| (own + distance) % len)
    }

    fn part(&self, range: &Range<u64>, place: u32) -> Range<u64> {
        let part = split(range.end - range.start, self.len, place);
        range.start + part.start..range.start + part.end
    }
}

fn edges(shape: &Shape) -> Vec<Edge> {
    let mut edges = Vec::new();
    let mut stride = 1;
    while stride < shape.size {
        let rest = shape.size / stride;
        let len = match rest.trailing_zeros() {
            0 => rest,
            1 => 2,
            _ => 4,
        };
        let own = shape.rank / stride % len;
        edges.push(Edge { first: shape.rank - own * stride, stride, len, own });
        stride *= len;
    }
    edges
}
