//! The operations as users of the benchmark name them, and how much data they are said to move.

#![forbid(unsafe_code)]

use crate::signature::Kind;

/// What can be measured. `Kind::Send` stands for "sendrecv": each rank sends to the next and receives from
/// the one before.
pub(super) const ALL: [Kind; 10] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
    Kind::Barrier,
    Kind::Send,
];

/// The name on the command line and in tables.
pub(super) fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Send => "sendrecv",
        kind => kind.name(),
    }
}

/// The operation of that name.
pub(super) fn from_name(name_given: &str) -> Option<Kind> {
    ALL.into_iter().chain(APART).find(|&kind| name(kind) == name_given)
}

/// What is measured only where it is asked for by name.
pub(super) const APART: [Kind; 1] = [Kind::SparseAllreduce];

/// Whether its count is that of one rank's block, while its size is that of all blocks together.
pub(super) fn in_blocks(kind: Kind) -> bool {
    matches!(kind, Kind::Allgather | Kind::Gather | Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall)
}

/// Bus bandwidth over algorithm bandwidth, as nccl-tests counts: what each rank's link would have to carry at
/// least.
pub(super) fn bus_factor(kind: Kind, size: u32) -> f64 {
    let others = f64::from(size - 1) / f64::from(size);
    match kind {
        Kind::Allreduce => 2.0 * others,
        Kind::Broadcast | Kind::Reduce | Kind::Send => 1.0,
        // Each rank learns what all others have.
        Kind::SparseAllreduce => f64::from(size - 1),
        _ => others,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_their_operation() {
        for kind in ALL.into_iter().chain(APART) {
            assert_eq!(from_name(name(kind)), Some(kind));
        }
        assert_eq!(from_name("sendrecv"), Some(Kind::Send));
        assert_eq!(from_name("send"), None);
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(bus_factor(Kind::Allreduce, 4), 1.5);
        assert_eq!(bus_factor(Kind::Allgather, 4), 0.75);
        assert_eq!(bus_factor(Kind::Broadcast, 4), 1.0);
        assert_eq!(bus_factor(Kind::Allreduce, 1), 0.0);
    }
}
