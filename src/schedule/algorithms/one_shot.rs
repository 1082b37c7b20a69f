//! One-shot allreduce: everybody sends its raw input to everybody, and each folds all of them. One round,
//! `(n - 1) c` elements out and in, `n c` combined on every rank: the least latency, for small vectors.
//! Canonical.

use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;
use crate::schedule::ir::{Buffer, Span};

pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    for piece in shape.pieces(0..count) {
        let input = Span::of(Buffer::Input, piece.clone());
        let mut operands = vec![input; shape.size as usize];
        for distance in 1..shape.size {
            b.send(shape.ahead(distance), input);
        }
        for distance in 1..shape.size {
            let from = shape.behind(distance);
            let raw = b.scratch(input.len);
            b.receive(from, raw);
            operands[from as usize] = raw;
        }
        b.fold(&operands, Span::of(Buffer::Output, piece));
    }
}
