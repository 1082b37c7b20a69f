//! The list of algorithms, what each serves, and the entry that turns one into a schedule.

use crate::error::{Result, fail};
use crate::schedule::algorithms::{
    binomial, dissemination, linear, local, one_shot, pairwise, recursive_doubling, two_shot,
};
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Collective, Kind, Shape};
use crate::schedule::ir::Schedule;

/// An algorithm. The numbers are part of the ABI: they are never reused and never change; 0 stands for "automatic"
/// and is no algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Algorithm {
    /// No message: the group of one.
    Local = 1,
    /// Everybody sends everything to everybody.
    OneShot = 2,
    /// Everybody reduces its shard, then all gather.
    TwoShot = 3,
    /// Recursive doubling.
    RecursiveDoubling = 9,
    /// A binomial tree.
    Binomial = 10,
    /// Everything directly, at once.
    Linear = 12,
    /// One partner at a time.
    Pairwise = 16,
    /// Rounds of doubling distance.
    Dissemination = 17,
    /// To rank 0 and back.
    AllToOne = 18,
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
    match (collective, algorithm) {
        (&Collective::Allreduce { count }, Algorithm::OneShot) => one_shot::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::TwoShot) => two_shot::allreduce(b, shape, count),
        (&Collective::Allreduce { count }, Algorithm::RecursiveDoubling) => {
            recursive_doubling::allreduce(b, shape, count);
        }
        (&Collective::Allreduce { count }, Algorithm::Binomial) => binomial::allreduce(b, shape, count),
        (&Collective::Reduce { count, root }, Algorithm::Binomial) => binomial::reduce(b, shape, count, root),
        (&Collective::Reduce { count, root }, Algorithm::Linear) => linear::reduce(b, shape, count, root),
        (&Collective::Reduce { count, root }, Algorithm::TwoShot) => two_shot::reduce(b, shape, count, root),
        (&Collective::Broadcast { count, root }, Algorithm::Binomial) => {
            binomial::broadcast(b, shape, count, root);
        }
        (&Collective::Broadcast { count, root }, Algorithm::Linear) => {
            linear::broadcast(b, shape, count, root)
        }
        (Collective::Allgather { counts }, Algorithm::Linear) => linear::allgather(b, shape, counts),
        (Collective::Gather { counts, root }, Algorithm::Linear) => linear::gather(b, shape, counts, *root),
        (Collective::Gather { counts, root }, Algorithm::Binomial) => {
            binomial::gather(b, shape, counts, *root)
        }
        (Collective::Scatter { counts, root }, Algorithm::Linear) => linear::scatter(b, shape, counts, *root),
        (Collective::Scatter { counts, root }, Algorithm::Binomial) => {
            binomial::scatter(b, shape, counts, *root)
        }
        (Collective::ReduceScatter { counts }, Algorithm::Linear) => linear::reduce_scatter(b, shape, counts),
        (Collective::Alltoall { send_counts, recv_counts }, Algorithm::Linear) => {
            linear::alltoall(b, shape, send_counts, recv_counts);
        }
        (Collective::Alltoall { send_counts, recv_counts }, Algorithm::Pairwise) => {
            pairwise::alltoall(b, shape, send_counts, recv_counts);
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
    pub const ALL: [Algorithm; 9] = [
        Algorithm::Local,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::RecursiveDoubling,
        Algorithm::Binomial,
        Algorithm::Linear,
        Algorithm::Pairwise,
        Algorithm::Dissemination,
        Algorithm::AllToOne,
    ];

    /// The name that callers, errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Local => "local",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Binomial => "binomial",
            Algorithm::Linear => "linear",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Dissemination => "dissemination",
            Algorithm::AllToOne => "all-to-one",
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

    /// Whether its reductions follow the canonical order, and so give the bits that every such algorithm gives.
    pub const fn canonical(self) -> bool {
        true
    }

    /// Whether it can do that collective.
    pub const fn serves(self, kind: Kind) -> bool {
        match self {
            Algorithm::Local => true,
            Algorithm::OneShot | Algorithm::RecursiveDoubling => matches!(kind, Kind::Allreduce),
            Algorithm::TwoShot => matches!(kind, Kind::Allreduce | Kind::Reduce),
            Algorithm::Binomial => {
                matches!(
                    kind,
                    Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter
                )
            }
            Algorithm::Linear => !matches!(kind, Kind::Allreduce | Kind::Barrier),
            Algorithm::Pairwise => matches!(kind, Kind::Alltoall),
            Algorithm::Dissemination | Algorithm::AllToOne => matches!(kind, Kind::Barrier),
        }
    }
}
