//! The algorithms, one family a file. Each is a pure function that adds one rank's steps to a builder.
//!
//! What they share: raw inputs travel as elements, partial results as accumulators; Output and Scratch take
//! complete results only, since storing there applies the operator's final step. `n` is the number of ranks,
//! `c` the elements of the vector, a *round* a message that waits for another.

pub(super) mod agreement;
pub(super) mod bcube;
pub(super) mod binomial;
pub(super) mod bruck;
pub(super) mod chain;
pub(super) mod dissemination;
pub(super) mod halving_doubling;
pub(super) mod hierarchical;
pub(super) mod linear;
pub(super) mod one_shot;
pub(super) mod pairwise;
pub(super) mod pipelined_tree;
pub(super) mod recursive_doubling;
pub(super) mod ring;
pub(super) mod scatter_allgather;
pub(super) mod two_shot;

use crate::schedule::builder::Builder;
use crate::schedule::collective::{Blocks, Collective};
use crate::schedule::ir::{Buffer, Representation, Span};

/// What a message or an operand holds that covers `ranks` ranks: one alone is a raw input.
pub(super) fn representation_of(ranks: u32) -> Representation {
    if ranks == 1 { Representation::Element } else { Representation::Accumulator }
}

/// The group of one: what needs no message. A reduction still applies the operator's final step.
pub(super) fn local(b: &mut Builder, collective: &Collective) {
    let len = collective.input_len(0);
    let (input, output) = (Span::new(Buffer::Input, 0, len), Span::new(Buffer::Output, 0, len));
    match collective {
        Collective::Allreduce { .. } | Collective::Reduce { .. } | Collective::ReduceScatter { .. } => {
            b.fold(&[input], output);
        }
        _ => b.copy(input, output),
    }
}

/// Runs of neighbouring spans as one span each: messages and copies are then as few as can be.
pub(super) fn coalesce(spans: impl IntoIterator<Item = Span>) -> Vec<Span> {
    let mut runs: Vec<Span> = Vec::new();
    for span in spans {
        match runs.last_mut() {
            Some(run) if run.buffer == span.buffer && run.end() == span.start => run.len += span.len,
            _ => runs.push(span),
        }
    }
    runs
}

/// The blocks of `counts` in the caller's output.
pub(super) fn output_blocks(counts: &[u64]) -> Blocks {
    Blocks::new(Buffer::Output, counts)
}

/// The blocks of `counts` in the caller's input.
pub(super) fn input_blocks(counts: &[u64]) -> Blocks {
    Blocks::new(Buffer::Input, counts)
}
