//! Which algorithm a call gets when its caller names none: the cheapest by the cost model, among those that
//! keep the canonical order. Depends on what all ranks agree on, and nothing else, or ranks would choose
//! differently.

#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

use super::checked::Checked;
use crate::schedule::cost::{Link, Model, Question, Widths};
use crate::schedule::{Agreement, Algorithm, Collective, Kind, Shape, total};
use crate::sys::float::by_defaults;

/// Ranks linked by TCP, fitted from `unisono-bench` over loopback on two cores: what one link of a cluster
/// costs differs, but the proportions that decide (a message against a byte) are alike within a factor of
/// two.
pub const MODEL: Model = Model {
    inside: Link { latency: 6e-6, byte_time: 0.35e-9 },
    across: Link { latency: 20e-6, byte_time: 0.8e-9 },
    links_per_node: 1,
    step_time: 4e-6,
    combine_time: 0.08e-9,
    copy_time: 0.1e-9,
};

/// Above this many bytes no rank combines whole vectors: that goes at the speed of memory, which the model
/// does not know. At 64 MiB and 2 ranks over loopback recursive doubling took 74 ms, two-shot 39. A reduce
/// among more than [`MESH`] ranks has nothing else: by the binomial tree, which takes room for a vector a
/// level where linear would for one of each rank.
const WHOLE: u64 = 512 * 1024;

/// Up to this many bytes, of all blocks together, messages cost what sending each does, which the model has
/// as much of within a node as between nodes. Four GPUs as two hosts of two, broadcasts of 8 bytes that
/// follow each other: by Linear 18 to 21 µs, by Hierarchical 14; a reduce_scatter of 16 by Linear 35, by
/// HalvingDoubling 30.
const SHORT: u64 = 64 * 1024;

/// Above this many ranks nobody opens links to everybody for a small saving, nor do most open as many.
const MESH: u32 = 64;

/// Where the others have few, one rank has no more links than that: each takes three descriptors, of which a
/// process often has 1024, and who lacks them fails the call for all.
const LINKS: u32 = 256;

/// The algorithm for a call over `size` ranks linked by messages.
pub fn automatic(checked: &Checked, shape: &Shape) -> Algorithm {
    if shape.size == 1 {
        return Algorithm::Local;
    }
    if checked.listed {
        // Only direct messages work without knowing the other ranks' counts.
        return match checked.collective {
            Collective::Alltoall { .. } if shape.size > MESH => Algorithm::Pairwise,
            _ => Algorithm::Linear,
        };
    }
    let kind = checked.collective.kind();
    let (count, all) = match &checked.collective {
        Collective::Allreduce { count }
        | Collective::Reduce { count, .. }
        | Collective::Broadcast { count, .. } => (*count, *count),
        Collective::Allgather { counts }
        | Collective::Gather { counts, .. }
        | Collective::Scatter { counts, .. }
        | Collective::ReduceScatter { counts }
        | Collective::Alltoall { send_counts: counts, .. } => {
            (counts.iter().copied().max().unwrap_or(0), total(counts))
        }
        Collective::Barrier => (0, 0),
    };
    let element = checked.dtype.size() as u64;
    let accumulator = checked.dtype.accumulator().size() as u64;
    let question = Question {
        kind,
        size: shape.size,
        count,
        total: all,
        chunk: shape.chunk,
        ranks_per_node: shape.ranks_per_node,
        widths: Widths { element, accumulator },
    };
    let reduces = checked.operator.is_some();
    let short = all.saturating_mul(element) <= SHORT;
    let several_nodes = (2..shape.size).contains(&shape.ranks_per_node);
    let candidates = Algorithm::ALL.into_iter().filter(|algorithm| {
        let peers = algorithm.peers(kind, shape);
        let meshed = peers.usual >= MESH || peers.most > LINKS;
        let only_tree = kind == Kind::Reduce && shape.size > MESH;
        let whole = matches!(algorithm, Algorithm::OneShot | Algorithm::RecursiveDoubling)
            || (*algorithm == Algorithm::Binomial && reduces && !only_tree)
            || (*algorithm == Algorithm::Linear && kind == Kind::Reduce);
        // Where a node has several ranks, these send more messages between nodes than it takes, for some
        // roots at least.
        let crosses_often = short
            && several_nodes
            && matches!(
                (kind, algorithm),
                (Kind::Broadcast, Algorithm::Linear | Algorithm::Binomial | Algorithm::PipelinedTree)
                    | (Kind::ReduceScatter, Algorithm::Linear)
            );
        let costs_more = crosses_often || whole && count * element > WHOLE;
        // One-to-all is linear under another name. Bcube and pipelined halving-doubling price like two-shot,
        // but took 1.4 and 1.6 times as long at 16 MiB and 4 ranks over loopback: the model knows no
        // processors that ranks share.
        algorithm.serves(kind)
            && !matches!(
                algorithm,
                Algorithm::Local
                    | Algorithm::Bcube
                    | Algorithm::HalvingDoublingPipelined
                    | Algorithm::OneToAll
            )
            && !costs_more
            && (!reduces || algorithm.canonical(shape))
            && (!meshed || is_without_sparse_form(kind, *algorithm))
    });
    // However this rank's thread rounds.
    let cheapest = by_defaults(|| MODEL.cheapest(candidates, &question));
    debug_assert!(cheapest.is_some(), "nothing is left for {question:?}");
    // Every collective has an algorithm left that keeps the order, whatever its size: the tests see to that.
    cheapest.map_or(Algorithm::Linear, |(algorithm, _)| algorithm)
}

/// What keeps the output of a call as it was, if the ranks' calls differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caution {
    /// The output is written at once, at the end.
    pub holds_output: bool,
    /// Whether the ranks tell each other first what they have called. The same on all ranks.
    pub agreement: Agreement,
}

/// An output of blocks from several ranks is held back if it has at most this many bytes a rank. Longer
/// blocks are asked for, and so can wait; shorter ones come unasked, and would be copied too, and no less, if
/// they had to wait.
const HELD_BLOCK_BYTES: u64 = 256 * 1024;

/// The most that is held back, however many ranks there are.
const HELD_BYTES: u64 = 16 * 1024 * 1024;

/// The same where all comes from one rank, and of two ranks: then nothing has to wait but the own block, and
/// not long.
const HELD_OF_ONE_BYTES: u64 = 16 * 1024;

/// How a call by messages sees to it that nothing is written before the calls are known to agree. Reductions
/// need nothing: what they write is made of all ranks' inputs. What is short is held back, which costs a
/// copy; before what is long the ranks tell each other, which costs the time of a short message.
pub fn caution(checked: &Checked) -> Caution {
    let element = checked.dtype.size() as u64;
    let own = checked.output_len() as u64 * element;
    let (limit, all) = match &checked.collective {
        Collective::Allgather { counts: blocks }
        | Collective::Gather { counts: blocks, .. }
        | Collective::Alltoall { recv_counts: blocks, .. } => {
            let limit = match blocks.len() as u64 {
                0..=2 => HELD_OF_ONE_BYTES,
                ranks => HELD_BYTES.min(ranks * HELD_BLOCK_BYTES),
            };
            (limit, total(blocks))
        }
        // In place, the root has its part already.
        Collective::Broadcast { root, .. } | Collective::Scatter { root, .. }
            if *root == checked.rank && checked.alias.is_some() =>
        {
            (0, 0)
        }
        Collective::Broadcast { .. } | Collective::Scatter { .. } => (HELD_OF_ONE_BYTES, 0),
        _ => (0, 0),
    };
    let holds_output = own > 0 && own <= limit;
    // With lists that differ from rank to rank, one rank's output may be long where another's is short.
    let agreement = match (checked.listed || all.saturating_mul(element) > limit, holds_output) {
        (false, _) => Agreement::Unsaid,
        (true, true) => Agreement::Told,
        (true, false) => Agreement::Awaited,
    };
    Caution { holds_output, agreement }
}

/// Whether the collective has nothing that needs fewer links, whatever its length. Of reduce_scatters that
/// keep the order this is halving-doubling, by which few ranks have many.
fn is_without_sparse_form(kind: Kind, algorithm: Algorithm) -> bool {
    match kind {
        Kind::Alltoall => true,
        Kind::ReduceScatter => algorithm == Algorithm::HalvingDoubling,
        _ => false,
    }
}

/// Bytes of a pipelined piece of which several stay in the second-level cache, where they are combined.
const CACHED_PIECE: u64 = 128 * 1024;

/// Pieces of what is only moved, or what several threads move: longer than what is sent unasked. A sender
/// that runs ahead does not fill its receiver's memory then, and pieces go over several lanes.
const ASKED_PIECES: RangeInclusive<u64> = 512 * 1024..=4 * 1024 * 1024;

/// The same where they are combined, too.
const COMBINED_PIECE: u64 = 1024 * 1024;

/// Elements of one pipelined piece. `hauled`: each rank has several threads for long messages.
pub fn chunk(checked: &Checked, hauled: bool) -> u64 {
    let element = checked.dtype.size() as u64;
    let bytes = match &checked.collective {
        Collective::Allreduce { count }
        | Collective::Reduce { count, .. }
        | Collective::Broadcast { count, .. } => count * element,
        Collective::Allgather { counts } | Collective::ReduceScatter { counts } => total(counts) * element,
        // What not all ranks know goes in portions.
        _ if checked.listed => 0,
        Collective::Gather { counts, .. } | Collective::Scatter { counts, .. } => total(counts) * element,
        Collective::Alltoall { send_counts, .. } => total(send_counts) * element,
        Collective::Barrier => 0,
    };
    let asked = bytes > *ASKED_PIECES.start() && (hauled || checked.operator.is_none());
    let most = if checked.operator.is_none() { *ASKED_PIECES.end() } else { COMBINED_PIECE };
    let piece = match asked {
        true => (bytes / 16).next_power_of_two().clamp(*ASKED_PIECES.start(), most),
        false => CACHED_PIECE,
    };
    piece / element
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::request::{Counts, Request};
    use crate::reduce::{DataType, Operator};
    use crate::schedule::ir::{Action, Step};
    use crate::schedule::plan;
    use crate::signature::Kind;

    fn choice(kind: Kind, count: u64, size: u32) -> Algorithm {
        choice_on(kind, count, size, 0)
    }

    fn choice_on(kind: Kind, count: u64, size: u32, ranks_per_node: u32) -> Algorithm {
        choice_for(&call(kind, Counts::Uniform(count), size), size, ranks_per_node)
    }

    fn choice_for(checked: &Checked, size: u32, ranks_per_node: u32) -> Algorithm {
        let chunk = chunk(checked, false);
        automatic(checked, &Shape { chunk, ranks_per_node, ..Shape::new(0, size) })
    }

    fn call(kind: Kind, counts: Counts, size: u32) -> Checked {
        let at = std::ptr::without_provenance_mut(1 << 40);
        let request = Request {
            kind,
            input: std::ptr::without_provenance(1 << 45),
            output: at,
            counts,
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
        };
        Checked::new(&request, 0, size).expect("a sound call")
    }

    #[test]
    fn short_calls_cross_between_nodes_once() {
        for (size, ranks_per_node) in [(4, 2), (6, 3), (7, 4), (64, 8)] {
            let choice = |kind| choice_on(kind, 2, size, ranks_per_node);
            assert_eq!(choice(Kind::Broadcast), Algorithm::Hierarchical, "{size} by {ranks_per_node}");
            assert_eq!(choice(Kind::ReduceScatter), Algorithm::HalvingDoubling, "{size} by {ranks_per_node}");
        }
        // A rank a node, or one node: nothing is saved.
        for ranks_per_node in [0, 1, 4, 8] {
            assert_eq!(choice_on(Kind::Broadcast, 2, 4, ranks_per_node), choice(Kind::Broadcast, 2, 4));
        }
    }

    /// Blocks of halving-doubling that are on other nodes give and take whole vectors.
    #[test]
    fn a_node_that_is_not_full_is_not_sent_whole_vectors_for_each_of_its_blocks() {
        for (size, ranks_per_node) in [(3, 2), (5, 4), (13, 8)] {
            let choice = choice_on(Kind::Allreduce, 1 << 21, size, ranks_per_node);
            assert_ne!(choice, Algorithm::HalvingDoubling, "{size} by {ranks_per_node}");
        }
        assert_eq!(choice_on(Kind::Allreduce, 1 << 21, 13, 8), Algorithm::Hierarchical);
        for (size, ranks_per_node) in [(3, 2), (5, 4)] {
            assert_eq!(choice_on(Kind::ReduceScatter, 1 << 21, size, ranks_per_node), Algorithm::Linear);
        }
        // As long as a node has many ranks, each of which would send to all of the others, it is what crosses
        // least.
        assert_eq!(choice_on(Kind::ReduceScatter, 1 << 21, 13, 8), Algorithm::HalvingDoubling);
    }

    #[test]
    fn short_reductions_take_few_rounds_and_long_ones_few_bytes() {
        assert_eq!(choice(Kind::Allreduce, 1 << 24, 2), Algorithm::TwoShot);
        assert_eq!(choice(Kind::Reduce, 1 << 24, 2), Algorithm::TwoShot);
        assert_eq!(choice(Kind::Reduce, 1 << 24, 64), Algorithm::TwoShot);
        assert_eq!(choice(Kind::Reduce, 1 << 24, 65), Algorithm::Binomial);
        assert_eq!(choice(Kind::Allreduce, 16, 4), Algorithm::RecursiveDoubling);
        assert_eq!(choice(Kind::Allreduce, 1 << 18, 4), Algorithm::TwoShot);
        assert_eq!(choice(Kind::Allreduce, 16, 4096), Algorithm::RecursiveDoubling);
    }

    #[test]
    fn every_collective_gets_an_algorithm_that_serves_it_and_keeps_the_order() {
        for kind in
            Kind::ALL.into_iter().filter(|kind| !kind.point_to_point() && *kind != Kind::SparseAllreduce)
        {
            for size in [2, 3, 8, 64, 65, 4096] {
                for count in [0, 1, 1000, 1 << 20] {
                    let algorithm = choice(kind, count, size);
                    let schedule_kind = crate::schedule::Kind::ALL
                        .into_iter()
                        .find(|other| other.name() == kind.name())
                        .expect("every collective has schedules");
                    assert!(algorithm.serves(schedule_kind), "{algorithm:?} for {kind:?}");
                    assert!(!kind.reduces() || algorithm.canonical(&Shape::new(0, size)));
                }
            }
        }
    }

    /// Links take descriptors. An all-to-all has to do with everybody, and a reduce_scatter has no other
    /// algorithm that keeps the order.
    #[test]
    fn ranks_of_many_are_given_links_to_few() {
        for kind in [
            Kind::Allreduce,
            Kind::Reduce,
            Kind::Broadcast,
            Kind::Allgather,
            Kind::Gather,
            Kind::Scatter,
            Kind::ReduceScatter,
            Kind::Barrier,
        ] {
            for size in [65, 70, 73, 96, 128, 129, 193, 464, 512, 513, 1000, 4096] {
                for ranks_per_node in [1, 2, 4, 8, size] {
                    let mut seen = Vec::new();
                    for count in [16, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 28] {
                        let call = call(kind, Counts::Uniform(count), size);
                        let algorithm = choice_for(&call, size, ranks_per_node);
                        if seen.contains(&algorithm) {
                            continue;
                        }
                        seen.push(algorithm);
                        let what = format!("{algorithm:?} for {kind:?} among {size} by {ranks_per_node}");
                        if kind == Kind::ReduceScatter {
                            assert_eq!(algorithm, Algorithm::HalvingDoubling, "{what}");
                            continue;
                        }
                        let collective = &call.collective;
                        let (usual, most) = (MESH as usize - 1, LINKS as usize);
                        // Blocks and nodes that are short are at the end.
                        let last = [(size - 2, most), (size - 1, most)];
                        for (rank, most) in
                            [(0, usual), (1, usual), (size / 2, usual)].into_iter().chain(last)
                        {
                            let shape = Shape { ranks_per_node, ..Shape::new(rank, size) };
                            let peers = plan(algorithm, collective, &shape).expect("a plan").peers().len();
                            assert!(peers <= most, "{what}: rank {rank} has {peers} peers");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn lists_of_equal_blocks_get_what_their_count_gets() {
        for kind in [Kind::Allgather, Kind::ReduceScatter] {
            for size in (2..=16).chain([31, 32, 48, 63, 64, 65, 100, 1000]) {
                for count in [0, 1, 3, 100, 1 << 10, (1 << 12) + 1, 1 << 14, 1 << 17, 1 << 20, 1 << 24] {
                    for ranks_per_node in [1, 2, 8, size] {
                        let even = call(kind, Counts::Blocks(vec![count; size as usize]), size);
                        let found = choice_for(&even, size, ranks_per_node);
                        let expected = choice_on(kind, count, size, ranks_per_node);
                        assert_eq!(found, expected, "{kind:?} of {count} among {size} by {ranks_per_node}");
                    }
                }
            }
        }
    }

    /// By the simulation: what a call takes where one rank has all, and where rank `i` has `1 / (i + 1)`.
    #[test]
    fn blocks_of_unlike_lengths_are_not_taken_for_as_long_as_the_longest() {
        const COUNT: u64 = 1 << 20;
        for kind in [Kind::Allgather, Kind::ReduceScatter] {
            for size in [8u32, 13, 32] {
                let alone = (0..size).map(|rank| if rank == 1 { COUNT } else { 0 }).collect();
                let falling = (1..=u64::from(size)).map(|rank| COUNT / rank).collect();
                for counts in [alone, falling] {
                    let checked = call(kind, Counts::Blocks(counts), size);
                    let times = |algorithm: Algorithm| {
                        let chunk = chunk(&checked, false);
                        let shape = |rank| Shape { chunk, ..Shape::new(rank, size) };
                        let plan = |rank| plan(algorithm, &checked.collective, &shape(rank)).expect("a plan");
                        let schedules: Vec<_> = (0..size).map(plan).collect();
                        let schedules: Vec<_> = schedules.iter().collect();
                        let widths = Widths { element: 4, accumulator: 4 };
                        MODEL.simulate(&schedules, size, widths).expect("the schedules fit")
                    };
                    let chosen = choice_for(&checked, size, size);
                    let others: &[Algorithm] = match kind {
                        Kind::Allgather => &[Algorithm::Linear, Algorithm::Ring, Algorithm::Bruck],
                        _ => &[Algorithm::Linear, Algorithm::HalvingDoubling],
                    };
                    let least = others.iter().map(|&other| times(other)).fold(f64::INFINITY, f64::min);
                    let taken = times(chosen);
                    assert!(taken < 1.5 * least, "{chosen:?} for {:?}: {taken}, {least}", checked.collective);
                }
            }
        }
    }

    /// Where none is left, the choice itself says so.
    #[test]
    fn something_is_left_to_choose_from_at_every_size() {
        for kind in
            Kind::ALL.into_iter().filter(|kind| !kind.point_to_point() && *kind != Kind::SparseAllreduce)
        {
            for size in 1..=1024 {
                // An empty call, one that is short, one that just is not, and long ones.
                for count in [0, 3, 1 << 14, 1 << 18, 1 << 24] {
                    for ranks_per_node in [0, 8] {
                        let _ = choice_on(kind, count, size, ranks_per_node);
                    }
                }
            }
        }
    }

    #[test]
    fn a_long_reduction_among_many_ranks_takes_room_for_a_vector_a_level() {
        const COUNT: u64 = 1 << 20;
        for size in [65u32, 100, 128, 1000] {
            let levels = u64::from(u32::BITS - (size - 1).leading_zeros());
            for root in [0, size / 2 + 3, size - 1] {
                let collective = Collective::Reduce { count: COUNT, root };
                // The root, and those that combine the most, are among them.
                for rank in (0..size).step_by(16).chain([root]) {
                    let shape = Shape { chunk: 1 << 15, ..Shape::new(rank, size) };
                    let schedule = plan(Algorithm::Binomial, &collective, &shape).expect("a plan");
                    // What a step receives to combine it has room of its own.
                    let staged = |step: &Step| match step.action {
                        Action::ReceiveReduce { local, .. } => local.len,
                        _ => 0,
                    };
                    let staged: u64 = schedule.steps.iter().map(staged).sum();
                    let room = schedule.scratch + schedule.partial + staged;
                    assert!(room <= (levels + 1) * COUNT, "{room} for rank {rank} of {size}, root {root}");
                }
            }
        }
    }
}
