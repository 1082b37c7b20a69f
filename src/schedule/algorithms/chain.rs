//! Pipelined chain broadcast: every rank passes each chunk on to the next. The root and every link move the
//! vector once, the least there is; `n - 1` rounds before the last rank sees the first chunk.

use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;
use crate::schedule::ir::{Buffer, Rank, Span};

pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    let label = shape.behind(root);
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        let have = if label == 0 { input } else { output };
        if label > 0 {
            b.receive(shape.behind(1), output);
        }
        if label + 1 < shape.size {
            b.send(shape.ahead(1), have);
        }
        if label == 0 {
            b.copy(input, output);
        }
    }
}
