//! Bruck's algorithms: `ceil(log2 n)` rounds for any number of ranks, one message each way a round, for small
//! blocks. They copy more than direct exchanges do, and all-to-all also sends more.

use crate::error::{Result, fail};
use crate::schedule::algorithms::{coalesce, input_blocks, output_blocks};
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Blocks, Shape};
use crate::schedule::ir::{Buffer, Rank, Span};

/// A rank collects blocks in the order of the ranks from itself on: in the round of distance `d` it has the
/// first `d`, sends them to the rank `d` behind, and receives the following ones from the rank `d` ahead.
/// Elements over every link as with direct exchanges; two copies of everything.
pub(in crate::schedule) fn allgather(b: &mut Builder, shape: &Shape, counts: &[u64]) {
    let output = output_blocks(counts);
    let rotated: Vec<u64> = (0..shape.size).map(|d| counts[shape.ahead(d) as usize]).collect();
    let collected = Blocks::within(b.scratch(counts.iter().sum()), &rotated);
    b.copy(Span::new(Buffer::Input, 0, rotated[0]), collected.of(0));
    let mut distance = 1;
    while distance < shape.size {
        let moved = distance.min(shape.size - distance);
        b.send(shape.behind(distance), collected.range(0, moved));
        b.receive(shape.ahead(distance), collected.range(distance, distance + moved));
        distance *= 2;
    }
    // In place, the own block is there already.
    let first = u32::from(b.in_place());
    let wrap = shape.size - shape.rank;
    b.copy(collected.range(first, wrap), output.range(shape.rank + first, shape.size));
    b.copy(collected.range(wrap, shape.size), output.range(0, shape.rank));
}

/// The block for the rank `d` ahead travels the distances that are the bits of `d`: in each round half of all
/// blocks move together. `c / 2` elements a round, for `c` elements of Input. All blocks must have one length
/// on all ranks, since blocks pass ranks that are not told their counts.
pub(in crate::schedule) fn alltoall(
    b: &mut Builder,
    shape: &Shape,
    send_counts: &[u64],
    recv_counts: &[u64],
) -> Result<()> {
    let len = send_counts[0];
    if let Some(other) = send_counts.iter().chain(recv_counts).find(|&&other| other != len) {
        fail!(
            InvalidArgument,
            "algorithm 'bruck' does alltoall with equal counts only; here are {len} and {other} elements. \
             Ask for 'pairwise' or 'linear'"
        );
    }
    let (input, output) = (input_blocks(send_counts), output_blocks(recv_counts));
    // Where the block with so far to go lies.
    let mut at: Vec<Span> = (0..shape.size).map(|d| input.of(shape.ahead(d))).collect();
    let mut distance = 1;
    while distance < shape.size {
        let moving: Vec<usize> = (0..at.len()).filter(|d| d & distance as usize != 0).collect();
        let total = len * moving.len() as u64;
        let (packed, received) = (b.scratch(total), b.scratch(total));
        let mut offset = 0;
        for run in coalesce(moving.iter().map(|&d| at[d])) {
            b.copy(run, packed.part(offset, run.len));
            offset += run.len;
        }
        b.send(shape.ahead(distance), packed);
        b.receive(shape.behind(distance), received);
        for (index, &d) in moving.iter().enumerate() {
            at[d] = received.part(index as u64 * len, len);
        }
        distance *= 2;
    }
    for (d, block) in at.into_iter().enumerate() {
        b.copy(block, output.of(shape.behind(d as Rank)));
    }
    Ok(())
}
