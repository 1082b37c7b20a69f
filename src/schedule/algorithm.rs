//! The list of algorithms, what each serves, and the entry that turns one into a schedule.

use crate::error::{Result, fail};
use crate::schedule::algorithms::{
    agreement, bcube, binomial, bruck, chain, dissemination, halving_doubling, hierarchical, linear, local,
    one_shot, pairwise, pipelined_tree, recursive_doubling, ring, scatter_allgather, two_shot,
};
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Collective, Kind, Shape, check_block_counts};
use crate::schedule::ir::Schedule;

/// An algorithm. The numbers are part of the ABI: they are never reused and never change; 0 stands for
/// "automatic" and is no algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Algorithm {
    /// No message: the group of one.
    Local = 1,
    /// Everybody sends everything to everybody: the least latency.
    OneShot = 2,
    /// Everybody reduces its shard, then all gather: the least elements in two rounds.
    TwoShot = 3,
    /// Round the ring. Not canonical.
    Ring = 4,
    /// Round the ring, in pieces. Not canonical for reductions.
    RingChunked = 5,
    /// Halves of the vector over doubling distances, and back.
    HalvingDoubling = 6,
    /// The same in pieces.
    HalvingDoublingPipelined = 7,
    /// Four ranks along each edge of a cube.
    Bcube = 8,
    /// The whole vector over doubling distances.
    RecursiveDoubling = 9,
    /// A binomial tree.
    Binomial = 10,
    /// A tree with two children at most, in pieces.
    PipelinedTree = 11,
    /// Everything directly, at once.
    Linear = 12,
    /// From rank to rank, in pieces.
    Chain = 13,
    /// A part to each, then all gather.
    ScatterAllgather = 14,
    /// Many small blocks in few messages.
    Bruck = 15,
    /// One partner at a time.
    Pairwise = 16,
    /// News over doubling distances.
    Dissemination = 17,
    /// To rank 0 and back.
    AllToOne = 18,
    /// Inside the nodes, across them, inside again.
    Hierarchical = 19,
    /// The root to everybody, at once.
    OneToAll = 20,
}

/// With how many others ranks exchange messages. What grows as the logarithm of the ranks is counted roughly,
/// never too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peers {
    /// A root, and most ranks.
    pub usual: u32,
    /// Whoever has to do with the most.
    pub most: u32,
}

/// The schedule of one rank. All ranks of the group plan with the same algorithm, their own view of the same
/// collective, and shapes that agree on size, chunk and ranks per node.
pub fn plan(algorithm: Algorithm, collective: &Collective, shape: &Shape) -> Result<Schedule> {
    collective.check(shape)?;
    let kind = collective.kind();
    let mut builder = Builder::new(shape.alias);
    let b = &mut builder;
    if !algorithm.serves(kind) {
        let able: Vec<_> =
            Algorithm::ALL.into_iter().filter(|a| a.serves(kind)).map(Algorithm::name).collect();
        fail!(
            InvalidArgument,
            "algorithm '{}' does not serve {}; these do: {}",
            algorithm.name(),
            kind.name(),
            able.join(", ")
        );
    }
    if shape.size == 1 {
        local(b, collective);
        return Ok(builder.finish());
    }
    agreement::precede(b, shape, algorithm, collective);
    match (collective, algorithm) {
        (&Collective::Allreduce { count }, Algorithm::OneShot) => one_shot::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::TwoShot) => two_shot::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::Ring) => ring::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::RingChunked) => {
            ring::allreduce_in_pieces(b, shape, count)
        }
        (&Collective::Allreduce { count }, Algorithm::HalvingDoubling) => {
            halving_doubling::allreduce(b, shape, count)
        }
        (&Collective::Allreduce { count }, Algorithm::HalvingDoublingPipelined) => {
            halving_doubling::allreduce_in_pieces(b, shape, count)
        }
        (&Collective::Allreduce { count }, Algorithm::Bcube) => bcube::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::RecursiveDoubling) => {
            recursive_doubling::allreduce(b, shape, count)
        }
        (&Collective::Allreduce { count }, Algorithm::Binomial) => binomial::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::PipelinedTree) => {
            pipelined_tree::allreduce(b, shape, count)
        }
        (&Collective::Allreduce { count }, Algorithm::Hierarchical) => {
            hierarchical::allreduce(b, shape, count)
        }
        (&Collective::Reduce { count, root }, Algorithm::Binomial) => binomial::reduce(b, shape, count, root),
        (&Collective::Reduce { count, root }, Algorithm::Linear) => linear::reduce(b, shape, count, root),
        (&Collective::Reduce { count, root }, Algorithm::TwoShot) => two_shot::reduce(b, shape, count, root),
        (&Collective::Broadcast { count, root }, Algorithm::Linear | Algorithm::OneToAll) => {
            linear::broadcast(b, shape, count, root)
        }
        (&Collective::Broadcast { count, root }, Algorithm::Binomial) => {
            binomial::broadcast(b, shape, count, root)
        }
        (&Collective::Broadcast { count, root }, Algorithm::Chain) => chain::broadcast(b, shape, count, root),
        (&Collective::Broadcast { count, root }, Algorithm::PipelinedTree) => {
            pipelined_tree::broadcast(b, shape, count, root)
        }
        (&Collective::Broadcast { count, root }, Algorithm::ScatterAllgather) => {
            scatter_allgather::broadcast(b, shape, count, root)
        }
        (&Collective::Broadcast { count, root }, Algorithm::Hierarchical) => {
            hierarchical::broadcast(b, shape, count, root)
        }
        (Collective::Allgather { counts }, Algorithm::Linear) => linear::allgather(b, shape, counts),
        (Collective::Allgather { counts }, Algorithm::Ring) => ring::allgather(b, shape, counts),
        (Collective::Allgather { counts }, Algorithm::Bruck) => bruck::allgather(b, shape, counts),
        (Collective::Gather { counts, root }, Algorithm::Linear) => linear::gather(b, shape, counts, *root),
        (Collective::Gather { counts, root }, Algorithm::Binomial) => {
            check_block_counts("counts", counts, shape.size)?;
            binomial::gather(b, shape, counts, *root)
        }
        (Collective::Scatter { counts, root }, Algorithm::Linear) => linear::scatter(b, shape, counts, *root),
        (Collective::Scatter { counts, root }, Algorithm::Binomial) => {
            check_block_counts("counts", counts, shape.size)?;
            binomial::scatter(b, shape, counts, *root)
        }
        (Collective::ReduceScatter { counts }, Algorithm::Linear) => linear::reduce_scatter(b, shape, counts),
        (Collective::ReduceScatter { counts }, Algorithm::HalvingDoubling) => {
            halving_doubling::reduce_scatter(b, shape, counts)
        }
        (Collective::ReduceScatter { counts }, Algorithm::Ring) => ring::reduce_scatter(b, shape, counts),
        (Collective::Alltoall { send_counts, recv_counts }, Algorithm::Linear) => {
            linear::alltoall(b, shape, send_counts, recv_counts)
        }
        (Collective::Alltoall { send_counts, recv_counts }, Algorithm::Pairwise) => {
            pairwise::alltoall(b, shape, send_counts, recv_counts)
        }
        (Collective::Alltoall { send_counts, recv_counts }, Algorithm::Bruck) => {
            bruck::alltoall(b, shape, send_counts, recv_counts)?
        }
        (Collective::Barrier, Algorithm::Dissemination) => dissemination::barrier(b, shape),
        (Collective::Barrier, Algorithm::AllToOne) => dissemination::all_to_one(b, shape),
        _ => fail!(
            InvalidArgument,
            "algorithm '{}' needs a group of one; this one has {} ranks",
            algorithm.name(),
            shape.size
        ),
    }
    Ok(builder.finish())
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 20] = [
        Algorithm::Local,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::Ring,
        Algorithm::RingChunked,
        Algorithm::HalvingDoubling,
        Algorithm::HalvingDoublingPipelined,
        Algorithm::Bcube,
        Algorithm::RecursiveDoubling,
        Algorithm::Binomial,
        Algorithm::PipelinedTree,
        Algorithm::Linear,
        Algorithm::Chain,
        Algorithm::ScatterAllgather,
        Algorithm::Bruck,
        Algorithm::Pairwise,
        Algorithm::Dissemination,
        Algorithm::AllToOne,
        Algorithm::Hierarchical,
        Algorithm::OneToAll,
    ];

    /// The name that callers, errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Local => "local",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::Ring => "ring",
            Algorithm::RingChunked => "ring-chunked",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::HalvingDoublingPipelined => "halving-doubling-pipelined",
            Algorithm::Bcube => "bcube",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Binomial => "binomial",
            Algorithm::PipelinedTree => "pipelined-tree",
            Algorithm::Linear => "linear",
            Algorithm::Chain => "chain",
            Algorithm::ScatterAllgather => "scatter-allgather",
            Algorithm::Bruck => "bruck",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Dissemination => "dissemination",
            Algorithm::AllToOne => "all-to-one",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::OneToAll => "one-to-all",
        }
    }

    /// The algorithm of that name.
    pub fn from_name(name: &str) -> Result<Algorithm> {
        match Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name) {
            Some(algorithm) => Ok(algorithm),
            None => fail!(
                InvalidArgument,
                "algorithm '{name}' is unknown; there are {}",
                Algorithm::ALL.map(Algorithm::name).join(", ")
            ),
        }
    }

    /// The algorithm behind an ABI number.
    pub fn from_number(number: i32) -> Result<Algorithm> {
        match Algorithm::ALL.into_iter().find(|&algorithm| algorithm as i32 == number) {
            Some(algorithm) => Ok(algorithm),
            None => fail!(InvalidArgument, "algorithm {number} is unknown"),
        }
    }

    /// Whether its reductions follow the canonical order in such a group, and so give the bits that every
    /// other such algorithm gives. True of whatever reduces nothing.
    pub fn canonical(self, shape: &Shape) -> bool {
        match self {
            Algorithm::Ring | Algorithm::RingChunked => shape.size == 1,
            Algorithm::Hierarchical => {
                shape.ranks_per_node.is_power_of_two()
                    || shape.ranks_per_node == 0
                    || shape.ranks_per_node >= shape.size
            }
            _ => true,
        }
    }

    /// Whom it has ranks of such a group exchange messages with.
    pub fn peers(self, kind: Kind, shape: &Shape) -> Peers {
        let others = shape.size.saturating_sub(1);
        let few = 2 * (u32::BITS - others.leading_zeros());
        let (usual, most) = match self {
            Algorithm::OneShot
            | Algorithm::TwoShot
            | Algorithm::Linear
            | Algorithm::OneToAll
            | Algorithm::AllToOne
            | Algorithm::ScatterAllgather
            | Algorithm::Pairwise => (others, others),
            Algorithm::Bcube => (few + bcube::odd_edge(shape.size), few + bcube::odd_edge(shape.size)),
            Algorithm::RecursiveDoubling => (few, recursive_doubling::most_peers(shape.size)),
            Algorithm::HalvingDoubling | Algorithm::HalvingDoublingPipelined => {
                (few, halving_doubling::most_peers(shape.size, kind == Kind::Allreduce))
            }
            Algorithm::Hierarchical if kind == Kind::Allreduce => hierarchical::peers(shape),
            _ => (few, few),
        };
        Peers { usual: usual.min(others), most: most.max(usual).min(others) }
    }

    /// Whether it can do that collective.
    pub const fn serves(self, kind: Kind) -> bool {
        use Kind::{
            Allgather, Allreduce, Alltoall, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
        };
        match self {
            Algorithm::Local => true,
            Algorithm::OneShot
            | Algorithm::RingChunked
            | Algorithm::HalvingDoublingPipelined
            | Algorithm::Bcube
            | Algorithm::RecursiveDoubling => matches!(kind, Allreduce),
            Algorithm::TwoShot => matches!(kind, Allreduce | Reduce),
            Algorithm::Ring => matches!(kind, Allreduce | Allgather | ReduceScatter),
            Algorithm::HalvingDoubling => matches!(kind, Allreduce | ReduceScatter),
            Algorithm::Binomial => matches!(kind, Allreduce | Reduce | Broadcast | Gather | Scatter),
            Algorithm::PipelinedTree | Algorithm::Hierarchical => matches!(kind, Allreduce | Broadcast),
            Algorithm::Linear => !matches!(kind, Allreduce | Barrier),
            Algorithm::Chain | Algorithm::ScatterAllgather | Algorithm::OneToAll => {
                matches!(kind, Broadcast)
            }
            Algorithm::Bruck => matches!(kind, Allgather | Alltoall),
            Algorithm::Pairwise => matches!(kind, Alltoall),
            Algorithm::Dissemination | Algorithm::AllToOne => matches!(kind, Barrier),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_find_their_algorithm() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(algorithm.name()), Ok(algorithm));
            assert_eq!(Algorithm::from_number(algorithm as i32), Ok(algorithm));
        }
        assert!(Algorithm::from_number(0).is_err());
        assert!(Algorithm::from_name("quantum").is_err_and(|error| error.text().contains("two-shot")));
    }

    #[test]
    fn the_wrong_algorithm_is_refused_with_those_that_serve() {
        let error =
            plan(Algorithm::Pairwise, &Collective::Barrier, &Shape::new(0, 4)).expect_err("it is wrong");
        assert!(error.text().contains("dissemination, all-to-one"), "{error}");
        let error = plan(Algorithm::Local, &Collective::Barrier, &Shape::new(0, 4)).expect_err("it is wrong");
        assert!(error.text().contains("group of one"), "{error}");
        let uneven = Collective::Alltoall { send_counts: vec![1, 2], recv_counts: vec![1, 2] };
        let error = plan(Algorithm::Bruck, &uneven, &Shape::new(0, 2)).expect_err("it is uneven");
        assert!(error.text().contains("equal counts"), "{error}");
    }

    #[test]
    fn a_group_of_one_needs_no_message_whatever_the_algorithm() {
        let shape = Shape::new(0, 1);
        let sum = plan(Algorithm::TwoShot, &Collective::Allreduce { count: 7 }, &shape).expect("it is right");
        // The operator's final step is still to be done.
        assert_eq!(sum.steps.len(), 1);
        let in_place = Shape { alias: Some(0), ..shape };
        let broadcast = Collective::Broadcast { count: 7, root: 0 };
        let nothing = plan(Algorithm::Chain, &broadcast, &in_place).expect("it is right");
        assert_eq!(nothing.steps, []);
    }

    #[test]
    fn no_rank_has_more_peers_than_are_told() {
        for kind in Kind::ALL {
            for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.serves(kind)) {
                let nodes: &[u32] =
                    if algorithm == Algorithm::Hierarchical { &[1, 2, 4, 8, 64] } else { &[1] };
                for size in (2..=24).chain([33, 37, 64, 65, 66, 73, 98]) {
                    for &ranks_per_node in nodes {
                        let shape = Shape { ranks_per_node, ..Shape::new(0, size) };
                        if algorithm == Algorithm::Local {
                            continue;
                        }
                        let Peers { usual, most } = algorithm.peers(kind, &shape);
                        let found = sorted_peers(algorithm, kind, &shape);
                        let (middle, last) = (found[found.len() / 2], found[found.len() - 1]);
                        let what = format!("{} {algorithm:?} {size} by {ranks_per_node}", kind.name());
                        assert!(last <= most && middle <= usual, "{what}: {most}, {usual}, but {found:?}");
                        let few = 2 * (u32::BITS - size.leading_zeros());
                        assert!(most <= last + few, "{what}: {most}, but {found:?}");
                    }
                }
            }
        }
    }

    /// How many each rank of the group has, by the schedules, the most last.
    fn sorted_peers(algorithm: Algorithm, kind: Kind, shape: &Shape) -> Vec<u32> {
        let (count, root) = (5 * u64::from(shape.size), shape.size / 2);
        let collective = Collective::of(kind, vec![count; shape.size as usize], root);
        let peers = |rank: u32| {
            let shape = Shape { rank, ..shape.clone() };
            plan(algorithm, &collective, &shape).expect("it serves").peers().len() as u32
        };
        let mut all: Vec<_> = (0..shape.size).map(peers).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn counts_beyond_32_bits_are_planned_in_few_steps() {
        let count = 5 << 32;
        for algorithm in Algorithm::ALL.into_iter().filter(|a| a.serves(Kind::Allreduce)) {
            let shape = Shape { chunk: 1 << 20, ranks_per_node: 2, ..Shape::new(3, 4) };
            if let Ok(schedule) = plan(algorithm, &Collective::Allreduce { count }, &shape) {
                assert!(schedule.steps.len() < 200_000, "{}: {}", algorithm.name(), schedule.steps.len());
            }
        }
    }
}
