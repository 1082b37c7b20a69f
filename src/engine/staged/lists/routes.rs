//! What a rank has for each other and obtains from it, read out of the steps that it would run on host
//! memory: the same messages under the same names, so that nobody need know which memory the others have.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::executor::Plan;
use crate::error::{Result, fail};
use crate::schedule::ir::Action;

/// Bytes that travel as one message; of the own block, as many as are copied at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// The step of the plan.
    pub(super) step: u32,
    /// The message of the pair.
    pub(super) slot: u32,
    /// Where in the input, of what is sent or stays.
    pub(super) from: usize,
    /// Where in the output, of what is received or stays.
    pub(super) into: usize,
    /// How many.
    pub(super) bytes: usize,
}

/// A message without content: it says what its rank has called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal {
    pub(super) peer: u32,
    pub(super) step: u32,
    pub(super) slot: u32,
}

/// What is under way together: to one rank, and from one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Round {
    /// To this rank, which may be the own,
    pub(super) to: u32,
    pub(super) out: VecDeque<Part>,
    /// and from this one.
    pub(super) from: u32,
    pub(super) into: VecDeque<Part>,
}

/// Everything that a call moves on a rank.
pub struct Routes {
    /// What it would run on host memory.
    pub(super) plan: Arc<Plan>,
    /// This rank.
    pub(super) rank: u32,
    /// Who is told what this rank has called.
    pub(super) said: Vec<Signal>,
    /// Who tells it.
    pub(super) heard: Vec<Signal>,
    /// By distance: to the rank so far ahead, from the one so far behind. All ranks take them in this
    /// order, or all at once (those on host memory), so the first one that some rank is not through with can
    /// always go on, however few a rank has under way.
    pub(super) rounds: VecDeque<Round>,
}

impl Routes {
    /// Those of rank `rank` of `size`, whose plan is for an output apart from the input. The own block is
    /// copied `portion` bytes at a time.
    pub fn new(plan: Arc<Plan>, rank: u32, size: u32, portion: usize) -> Result<Routes> {
        let (mut said, mut heard) = (Vec::new(), Vec::new());
        let round = |distance| Round {
            to: (rank + distance) % size,
            from: (rank + size - distance) % size,
            ..Round::default()
        };
        let mut rounds: Vec<Round> = (0..size).map(round).collect();
        let element = plan.element();
        let bytes = |elements: u64| elements as usize * element;
        for (step, of) in (0..).zip(plan.steps()) {
            match of.action {
                Action::Send { to, from, slot } if from.len == 0 => {
                    said.push(Signal { peer: to, step, slot });
                }
                Action::Receive { from, into, slot } if into.len == 0 => {
                    heard.push(Signal { peer: from, step, slot });
                }
                Action::Send { to, from, slot } => {
                    let part = Part {
                        step,
                        slot,
                        from: bytes(from.start),
                        bytes: bytes(from.len),
                        ..Part::default()
                    };
                    rounds[((to + size - rank) % size) as usize].out.push_back(part);
                }
                Action::Receive { from, into, slot } => {
                    let part = Part {
                        step,
                        slot,
                        into: bytes(into.start),
                        bytes: bytes(into.len),
                        ..Part::default()
                    };
                    rounds[((rank + size - from) % size) as usize].into.push_back(part);
                }
                Action::Copy { from, into } => {
                    let (all, portion) = (bytes(from.len), portion.max(1));
                    rounds[0].out.extend((0..all).step_by(portion).map(|at| Part {
                        step,
                        slot: 0,
                        from: bytes(from.start) + at,
                        into: bytes(into.start) + at,
                        bytes: portion.min(all - at),
                    }));
                }
                Action::ReceiveReduce { .. } | Action::Fold { .. } => {
                    fail!(Internal, "a call that only moves blocks combines them")
                }
            }
        }
        let rounds = rounds.into_iter().filter(|round| !round.is_empty()).collect();
        Ok(Routes { plan, rank, said, heard, rounds })
    }
}

impl Round {
    /// Whether it moves nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.out.is_empty() && self.into.is_empty()
    }
}
