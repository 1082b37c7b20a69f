//! Every algorithm at every size, and the mistakes that the checker has to find.

use super::*;
use crate::schedule::{Algorithm, Kind, Shape, plan};

/// One collective of a whole group.
struct Case {
    algorithm: Algorithm,
    /// As each rank sees it.
    collectives: Vec<Collective>,
    in_place: bool,
    chunk: u64,
    ranks_per_node: u32,
}

impl Case {
    fn shape(&self, rank: Rank) -> Shape {
        Shape {
            rank,
            size: self.collectives.len() as u32,
            alias: self.in_place.then(|| self.collectives[rank as usize].in_place_alias(rank)),
            chunk: self.chunk,
            ranks_per_node: self.ranks_per_node,
        }
    }

    fn schedules(&self) -> Vec<Schedule> {
        (0..self.collectives.len() as Rank)
            .map(|rank| {
                plan(self.algorithm, &self.collectives[rank as usize], &self.shape(rank))
                    .unwrap_or_else(|error| panic!("{self}: {error}"))
            })
            .collect()
    }

    fn check(&self, schedules: &[Schedule]) -> Result<()> {
        let parts: Vec<_> = (0..)
            .zip(&self.collectives)
            .zip(schedules)
            .map(|((rank, collective), schedule)| Part {
                collective,
                alias: self.shape(rank).alias,
                schedule,
            })
            .collect();
        check(&parts, self.algorithm.canonical(&self.shape(0)))
    }

    fn prove(&self) {
        if let Err(error) = self.check(&self.schedules()) {
            panic!("{self}: {error}");
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { algorithm, collectives, in_place, chunk, ranks_per_node } = self;
        write!(
            f,
            "{} of {} ranks: {:?}, in place {in_place}, chunk {chunk}, {ranks_per_node} ranks per node",
            algorithm.name(),
            collectives.len(),
            collectives[0]
        )
    }
}

/// What each rank calls, with counts near `count` for collectives that have a count for each rank.
fn collectives(kind: Kind, size: u32, count: u64, root: Rank, uniform: bool) -> Vec<Collective> {
    // Some ranks have nothing; neighbours differ; in all about `count`.
    let block = |index: u32| {
        if uniform {
            count / 8
        } else {
            (u64::from(index) * 7 + count) % (count / 4 + 2) * u64::from(index % 5 != 3)
        }
    };
    let counts: Vec<u64> = (0..size).map(block).collect();
    (0..size)
        .map(|rank| match kind {
            Kind::Allreduce => Collective::Allreduce { count },
            Kind::Reduce => Collective::Reduce { count, root },
            Kind::Broadcast => Collective::Broadcast { count, root },
            Kind::Allgather => Collective::Allgather { counts: counts.clone() },
            Kind::Gather => Collective::Gather { counts: counts.clone(), root },
            Kind::Scatter => Collective::Scatter { counts: counts.clone(), root },
            Kind::ReduceScatter => Collective::ReduceScatter { counts: counts.clone() },
            Kind::Alltoall => Collective::Alltoall {
                // Symmetric, so that it may be in place.
                send_counts: (0..size).map(|to| block((rank ^ to) + rank * to)).collect(),
                recv_counts: (0..size).map(|from| block((rank ^ from) + rank * from)).collect(),
            },
            Kind::Barrier => Collective::Barrier,
        })
        .collect()
}

/// Proves the algorithm for a collective, at every size and every awkward count; the options (in place, chunk, root,
/// node) are all tried at small sizes, and take turns at larger ones.
fn prove(kind: Kind, algorithm: Algorithm) {
    for size in 1..=64u32 {
        let n = u64::from(size);
        let mut counts = vec![0, 1, 2, n - 1, n, n + 1, 2 * n + 3, 1000];
        counts.dedup();
        for (turn, &count) in counts.iter().enumerate() {
            let turn = turn + size as usize;
            let roots = [0, size - 1, size / 2];
            let chunks = [0, 7, 1];
            let nodes = [size, 1, 2, 3, 4, 8, 5];
            let options = if size <= 9 { 0..6 } else { turn % 6..turn % 6 + 1 };
            for option in options {
                // A chunk of one element makes many steps: small sizes are enough for it.
                let chunk = match chunks[(turn + option) % 3] {
                    0 => 0,
                    1 if n * count > 64 => count / 3 + 1,
                    chunk => chunk.max(count / 12),
                };
                let case = Case {
                    algorithm,
                    collectives: collectives(
                        kind,
                        size,
                        count,
                        roots[(option + turn / 2) % 3],
                        needs_uniform_counts(kind, algorithm),
                    ),
                    in_place: option % 2 == 1,
                    chunk,
                    ranks_per_node: nodes[(turn + option) % nodes.len()],
                };
                case.prove();
            }
        }
    }
}

fn needs_uniform_counts(kind: Kind, algorithm: Algorithm) -> bool {
    (kind, algorithm) == (Kind::Alltoall, Algorithm::Bruck)
}

macro_rules! prove_each {
    ($($name:ident: $kind:ident by $algorithm:ident;)*) => {
        $(
            #[test]
            fn $name() {
                prove(Kind::$kind, Algorithm::$algorithm);
            }
        )*

        /// What has a proof above.
        const PROVED: &[(Kind, Algorithm)] = &[$((Kind::$kind, Algorithm::$algorithm)),*];
    };
}

prove_each! {
    allreduce_one_shot: Allreduce by OneShot;
    allreduce_two_shot: Allreduce by TwoShot;
    allreduce_ring: Allreduce by Ring;
    allreduce_ring_chunked: Allreduce by RingChunked;
    allreduce_halving_doubling: Allreduce by HalvingDoubling;
    allreduce_halving_doubling_pipelined: Allreduce by HalvingDoublingPipelined;
    allreduce_bcube: Allreduce by Bcube;
    allreduce_recursive_doubling: Allreduce by RecursiveDoubling;
    allreduce_binomial: Allreduce by Binomial;
    allreduce_pipelined_tree: Allreduce by PipelinedTree;
    allreduce_hierarchical: Allreduce by Hierarchical;
    reduce_binomial: Reduce by Binomial;
    reduce_linear: Reduce by Linear;
    reduce_two_shot: Reduce by TwoShot;
    broadcast_linear: Broadcast by Linear;
    broadcast_binomial: Broadcast by Binomial;
    broadcast_chain: Broadcast by Chain;
    broadcast_pipelined_tree: Broadcast by PipelinedTree;
    broadcast_scatter_allgather: Broadcast by ScatterAllgather;
    broadcast_hierarchical: Broadcast by Hierarchical;
    allgather_linear: Allgather by Linear;
    allgather_ring: Allgather by Ring;
    allgather_bruck: Allgather by Bruck;
    gather_linear: Gather by Linear;
    gather_binomial: Gather by Binomial;
    scatter_linear: Scatter by Linear;
    scatter_binomial: Scatter by Binomial;
    reduce_scatter_linear: ReduceScatter by Linear;
    reduce_scatter_halving_doubling: ReduceScatter by HalvingDoubling;
    reduce_scatter_ring: ReduceScatter by Ring;
    alltoall_linear: Alltoall by Linear;
    alltoall_pairwise: Alltoall by Pairwise;
    alltoall_bruck: Alltoall by Bruck;
    barrier_dissemination: Barrier by Dissemination;
    barrier_all_to_one: Barrier by AllToOne;
}

#[test]
fn every_algorithm_is_proved_for_everything_that_it_serves() {
    for kind in Kind::ALL {
        for algorithm in Algorithm::ALL {
            if algorithm != Algorithm::Local {
                assert_eq!(
                    algorithm.serves(kind),
                    PROVED.contains(&(kind, algorithm)),
                    "{} for {}",
                    algorithm.name(),
                    kind.name()
                );
            }
        }
    }
}
