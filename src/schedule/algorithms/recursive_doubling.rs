//! Recursive doubling for any number of ranks: before level `k` every rank of an aligned block of `2^k` ranks
//! holds the block's sum; at level `k` two neighbouring blocks trade sums. `ceil(log2 n)` rounds, as many
//! times `c` elements.
//!
//! A block at the end may be short. Then rank `i` of the right block takes from rank `i` of the left one, and
//! rank `i` of the left block from rank `i mod r` of the right one, which has `r` ranks. The blocks are those
//! of the canonical tree, so the order is canonical for every `n`.

use crate::schedule::algorithms::representation_of;
use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;
use crate::schedule::ir::{Buffer, Span};

pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    for piece in shape.pieces(0..count) {
        let output = Span::of(Buffer::Output, piece.clone());
        reduce_piece(b, shape, Span::of(Buffer::Input, piece), output);
    }
}

/// No rank has to do with more others. The first of a short block at the end sends to several of the block
/// beside it; the last rank is in all of these.
pub(in crate::schedule) fn most_peers(size: u32) -> u32 {
    let halves = (0..u32::BITS).map(|level| 1u32 << level).filter(|half| size & half != 0);
    let fan = |half: u32| match size % half {
        0 => half.trailing_zeros(),
        short => half.div_ceil(short),
    };
    halves.map(fan).sum()
}

fn reduce_piece(b: &mut Builder, shape: &Shape, input: Span, output: Span) {
    let (rank, size) = (shape.rank, shape.size);
    // One holds the sum while the other takes the next: a sum is sent and replaced in the same level.
    let buffers = [b.partial(input.len), b.partial(input.len)];
    let mut sum = input;
    for level in 0..size.next_power_of_two().trailing_zeros() {
        let half = 1 << level;
        let left = rank / (2 * half) * (2 * half);
        let right = left + half;
        if right >= size {
            continue;
        }
        let right_len = half.min(size - right);
        let last = 2 * half >= size;
        // In place, the last level may not replace an input that it still sends.
        let into = if last && !(b.in_place() && sum == input) { output } else { buffers[level as usize % 2] };
        if rank < right {
            let index = rank - left;
            if index < right_len {
                b.send(right + index, sum);
            }
            b.receive_reduce_right(right + index % right_len, representation_of(right_len), sum, into);
        } else {
            let index = rank - right;
            for to in (index..half).step_by(right_len as usize) {
                b.send(left + to, sum);
            }
            b.receive_reduce_left(left + index, representation_of(half), sum, into);
        }
        sum = into;
    }
    if sum != output {
        b.fold(&[sum], output);
    }
}
