//! What a collective costs, without running it: by simulating its schedules message by message, or by a
//! closed form that is quick enough to choose with, and reaches as far as there are ranks to imagine.

mod estimate;
mod simulation;

use crate::error::Result;
use crate::schedule::ir::Schedule;
use crate::schedule::{Algorithm, Kind};

/// How fast messages of one sort travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds from when both sides are ready until the first byte is there.
    pub latency: f64,
    /// Seconds a byte.
    pub byte_time: f64,
}

/// A machine: plain numbers, to be fitted from measurements. A rank sends one message and receives one at a
/// time, at the speed of the link between the two; messages between nodes also share the nodes' links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Between ranks of one node.
    pub inside: Link,
    /// Between ranks of different nodes: one link.
    pub across: Link,
    /// Links of a node to the others; each carries one message out and one in at a time.
    pub links_per_node: u32,
    /// Seconds of a rank's processor for each step.
    pub step_time: f64,
    /// Seconds to combine, for each byte of operand.
    pub combine_time: f64,
    /// Seconds to copy a byte.
    pub copy_time: f64,
}

/// What is to be priced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// Which collective.
    pub kind: Kind,
    /// How many ranks.
    pub size: u32,
    /// Elements of the vector; of the longest block where there is one for each rank.
    pub count: u64,
    /// Elements of all blocks, whose lengths may differ: then `count` is the longest one's. Without blocks as
    /// `count`.
    pub total: u64,
    /// As in [`Shape::chunk`](crate::schedule::Shape::chunk).
    pub chunk: u64,
    /// As in [`Shape::ranks_per_node`](crate::schedule::Shape::ranks_per_node).
    pub ranks_per_node: u32,
    /// Bytes of an element and of an accumulator.
    pub widths: Widths,
}

/// Bytes of what buffers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Bytes of an element.
    pub element: u64,
    /// Bytes of an accumulator.
    pub accumulator: u64,
}

impl Model {
    /// Seconds until the last rank is done, by simulation of the schedules of all ranks, in order of rank.
    /// Good for some hundred ranks. Fails if the schedules do not fit each other.
    pub fn simulate(&self, schedules: &[&Schedule], ranks_per_node: u32, widths: Widths) -> Result<f64> {
        simulation::simulate(self, schedules, ranks_per_node, widths)
    }

    /// Seconds until the last rank is done, by closed form: the rounds' latencies, the bytes through the
    /// busiest port, what the busiest processor does. Takes no time for any number of ranks. None if the
    /// algorithm does not serve the collective.
    pub fn estimate(&self, algorithm: Algorithm, question: &Question) -> Option<f64> {
        estimate::profile(algorithm, question, self.links_per_node).map(|profile| profile.time(self))
    }

    /// The candidate with the least estimate, and the estimate; the first one where several are alike.
    /// Depends on nothing but the arguments: ranks that ask alike choose alike.
    pub fn cheapest(
        &self,
        candidates: impl IntoIterator<Item = Algorithm>,
        question: &Question,
    ) -> Option<(Algorithm, f64)> {
        candidates
            .into_iter()
            .filter_map(|algorithm| Some((algorithm, self.estimate(algorithm, question)?)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}

#[cfg(test)]
mod tests;
