//! Pairwise exchange: `n - 1` rounds, in round `d` every rank sends to the rank `d` ahead and receives from the rank
//! `d` behind. No rank is ever sent to by two at once, so no receiver's link is fought over; a round starts when the
//! one before it is over.

use crate::schedule::algorithms::linear::receive_block;
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
    b.copy(input.of(shape.rank), output.of(shape.rank));
    let mut round = Vec::new();
    for distance in 1..shape.size {
        let (to, from) = (shape.ahead(distance), shape.behind(distance));
        // A rank with nothing to move in a round has the round before as its fence still.
        let sent = b.send(to, input.of(to));
        let received = receive_block(b, from, output.of(from));
        let moved: Vec<_> = sent.into_iter().chain(received).collect();
        if !moved.is_empty() {
            round = moved;
        }
        b.fence(round.iter().copied());
    }
}
