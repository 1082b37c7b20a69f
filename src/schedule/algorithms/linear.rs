//! Everything directly, everything at once: one round. The root of a rooted operation moves everything
//! itself; in the others every rank moves only what it must, so that these are also the ones for large
//! vectors.

use crate::schedule::algorithms::{input_blocks, output_blocks};
use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;
use crate::schedule::ir::{Buffer, Rank, Span};

/// Raw inputs to the root, who folds them: `(n - 1) c` elements in, `n c` combined. Canonical.
pub(in crate::schedule) fn reduce(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    for piece in shape.pieces(0..count) {
        let input = Span::of(Buffer::Input, piece.clone());
        if shape.rank != root {
            b.send(root, input);
            continue;
        }
        let mut operands = vec![input; shape.size as usize];
        for from in others(shape) {
            let raw = b.scratch(input.len);
            b.receive(from, raw);
            operands[from as usize] = raw;
        }
        b.fold(&operands, Span::of(Buffer::Output, piece));
    }
}

/// One to all: `(n - 1) c` elements out of the root.
pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    let (input, output) = (Span::new(Buffer::Input, 0, count), Span::new(Buffer::Output, 0, count));
    if shape.rank != root {
        b.receive(root, output);
        return;
    }
    for to in others(shape) {
        b.send(to, input);
    }
    b.copy(input, output);
}

/// Every block from its rank to all: the least elements over every link.
pub(in crate::schedule) fn allgather(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let own = Span::new(Buffer::Input, 0, counts[shape.rank as usize]);
    let output = output_blocks(counts);
    for to in others(shape) {
        b.send(to, own);
    }
    for distance in 1..shape.size {
        let from = shape.behind(distance);
        b.receive(from, output.of(from));
    }
    b.copy(own, output.of(shape.rank));
}

pub(in crate::schedule) fn gather(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let own = Span::new(Buffer::Input, 0, counts[shape.rank as usize]);
    if shape.rank != root {
        for portion in shape.portions(own) {
            b.send(root, portion);
        }
        return;
    }
    let output = output_blocks(counts);
    for from in others(shape) {
        for portion in shape.portions(output.of(from)) {
            b.receive(from, portion);
        }
    }
    b.copy(own, output.of(root));
}

pub(in crate::schedule) fn scatter(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let own = Span::new(Buffer::Output, 0, counts[shape.rank as usize]);
    if shape.rank != root {
        for portion in shape.portions(own) {
            b.receive(root, portion);
        }
        return;
    }
    let input = input_blocks(counts);
    for to in others(shape) {
        for portion in shape.portions(input.of(to)) {
            b.send(to, portion);
        }
    }
    b.copy(input.of(root), own);
}

/// Raw block `j` of everybody to rank `j`, who folds them: the least elements over every link. Canonical.
pub(in crate::schedule) fn reduce_scatter(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let input = input_blocks(counts);
    for to in others(shape) {
        for piece in shape.pieces(0..input.of(to).len) {
            b.send(to, input.of(to).part(piece.start, piece.end - piece.start));
        }
    }
    let own = input.of(shape.rank);
    for piece in shape.pieces(0..own.len) {
        let len = piece.end - piece.start;
        let mut operands = vec![own.part(piece.start, len); shape.size as usize];
        for from in (1..shape.size).map(|distance| shape.behind(distance)) {
            let raw = b.scratch(len);
            b.receive(from, raw);
            operands[from as usize] = raw;
        }
        b.fold(&operands, Span::of(Buffer::Output, piece));
    }
}

/// All blocks at once; see [`pairwise`](super::pairwise) for one partner at a time.
pub(in crate::schedule) fn alltoall(
    b: &mut Builder,
    shape: &Shape,
    send_counts: &[u64],
    recv_counts: &[u64],
) {
    let (input, output) = (input_blocks(send_counts), output_blocks(recv_counts));
    for to in others(shape) {
        for portion in shape.portions(input.of(to)) {
            b.send(to, portion);
        }
    }
    let mut landed = Vec::new();
    for from in (1..shape.size).map(|distance| shape.behind(distance)) {
        let landing = landing(b, output.of(from));
        for portion in shape.portions(landing) {
            b.receive(from, portion);
        }
        landed.push((landing, output.of(from)));
    }
    landed.push((input.of(shape.rank), output.of(shape.rank)));
    for (landing, block) in landed {
        b.copy(landing, block);
    }
}

/// Where to receive a block of an all-to-all. In place, the block's memory is still to be sent, and two ranks
/// that each wait for the other to take its block first would wait for ever: so the block lands beside. It is
/// copied to its place behind all sends.
pub(in crate::schedule) fn landing(b: &mut Builder, block: Span) -> Span {
    if b.in_place() { b.scratch(block.len) } else { block }
}

/// All other ranks, the next one first, so that they do not all turn to the same one.
fn others(shape: &Shape) -> impl Iterator<Item = Rank> + use<'_> {
    (1..shape.size).map(|distance| shape.ahead(distance))
}
