//! Pairwise exchange: `n - 1` rounds, in round `d` every rank sends to the rank `d` ahead and receives from
//! the rank `d` behind. No rank is ever sent to by two at once, so no receiver's link is fought over; a round
//! starts when the one before it is over.

use crate::schedule::algorithms::linear::landing;
use crate::schedule::algorithms::{input_blocks, output_blocks};
use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;

pub(in crate::schedule) fn alltoall(
    b: &mut Builder,
    shape: &Shape,
    send_counts: &[u64],
    recv_counts: &[u64],
) {
    let (input, output) = (input_blocks(send_counts), output_blocks(recv_counts));
    let mut landed = vec![(input.of(shape.rank), output.of(shape.rank))];
    for distance in 1..shape.size {
        let (to, from) = (shape.ahead(distance), shape.behind(distance));
        let landing = landing(b, output.of(from));
        landed.push((landing, output.of(from)));
        let mut moved: Vec<_> = shape.portions(input.of(to)).filter_map(|part| b.send(to, part)).collect();
        moved.extend(shape.portions(landing).filter_map(|part| b.receive(from, part)));
        // Behind a round without anything to move stands the round before it.
        if !moved.is_empty() {
            b.fence(moved);
        }
    }
    b.fence([]);
    for (landing, block) in landed {
        b.copy(landing, block);
    }
}
