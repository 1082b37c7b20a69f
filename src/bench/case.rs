//! What is measured: one operation with everything that a call of it needs.

#![forbid(unsafe_code)]

use super::options::{CallStyle, Choice, Options, Place, Transport};
use super::{operation, sparse};
use crate::reduce::{DataType, Operator, Reducer};
use crate::schedule;
use crate::signature::Kind;

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Case {
    pub(super) kind: Kind,
    /// The size that was asked for; [`Case::bytes`] is what is moved.
    pub(super) asked: u64,
    pub(super) dtype: DataType,
    /// Set when the operation reduces.
    pub(super) operator: Option<Operator>,
    /// Set when the operation has a root.
    pub(super) root: Option<u32>,
    pub(super) algorithm: Choice,
    pub(super) transport: Transport,
    pub(super) call: CallStyle,
    pub(super) place: Place,
    /// How many ranks.
    pub(super) size: u32,
}

impl Case {
    /// Elements, as the call counts them. At least one for a size above zero; sparse tensors consist of whole
    /// rows, one at least.
    pub(super) fn count(&self) -> u64 {
        let parts = if operation::in_blocks(self.kind) { u64::from(self.size) } else { 1 };
        let elements = self.asked / self.dtype.size() as u64 / parts;
        match (self.kind, self.asked) {
            (Kind::SparseAllreduce, _) => (elements / sparse::ROW).max(1) * sparse::ROW,
            (_, 0) => 0,
            _ => elements.max(1),
        }
    }

    /// The size: bytes of the vector, or of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        let parts = if operation::in_blocks(self.kind) { u64::from(self.size) } else { 1 };
        self.count() * parts * self.dtype.size() as u64
    }

    /// The operator, or one that stands for none.
    pub(super) fn operator_or_sum(&self) -> Operator {
        self.operator.unwrap_or(Operator::Sum)
    }

    /// The root, or rank 0 where none is asked for.
    pub(super) fn root_or_first(&self) -> u32 {
        self.root.unwrap_or(0)
    }

    /// Where input and output start in the one buffer of an in-place call of `rank`, in elements.
    fn starts_in_place(&self, rank: u32) -> (u64, u64) {
        let own = u64::from(rank) * self.count();
        match self.kind {
            Kind::Allgather => (own, 0),
            Kind::ReduceScatter => (0, own),
            Kind::Gather if self.root == Some(rank) => (own, 0),
            Kind::Scatter if self.root == Some(rank) => (0, own),
            _ => (0, 0),
        }
    }

    /// Start and length in bytes of the input and of the output of `rank`, each in its buffer, in place both
    /// in one.
    pub(super) fn extents(&self, rank: u32) -> ((usize, usize), (usize, usize)) {
        let element = self.dtype.size() as u64;
        let (from, into) = match self.place {
            Place::Out => (0, 0),
            Place::In => self.starts_in_place(rank),
        };
        let (one, all) = (self.count() * element, self.bytes());
        let here = self.root == Some(rank);
        let (sent, received) = match self.kind {
            Kind::Broadcast => (if here { all } else { 0 }, all),
            Kind::Reduce => (all, if here { all } else { 0 }),
            Kind::Gather => (one, if here { all } else { 0 }),
            Kind::Scatter => (if here { all } else { 0 }, one),
            Kind::Allgather => (one, all),
            Kind::ReduceScatter => (all, one),
            kind => {
                debug_assert!(!operation::in_blocks(kind) || kind == Kind::Alltoall);
                (all, all)
            }
        };
        (((from * element) as usize, sent as usize), ((into * element) as usize, received as usize))
    }
}

/// The cases of one operation, a list for each size and combination of type, operator and root: those that
/// only differ in how the work is done.
pub(super) fn sweeps<'a>(
    options: &'a Options,
    kind: Kind,
    size: u32,
) -> impl Iterator<Item = Vec<Case>> + 'a {
    let (only_type, only_size) = ([DataType::U8], vec![0]);
    let types = if kind == Kind::Barrier { only_type.to_vec() } else { options.types.clone() };
    let sizes = if kind == Kind::Barrier { only_size } else { options.sizes() };
    let operators: Vec<Option<Operator>> =
        if kind.reduces() { options.operators.iter().copied().map(Some).collect() } else { vec![None] };
    let roots: Vec<Option<u32>> =
        if kind.rooted() { options.roots.iter().copied().map(Some).collect() } else { vec![None] };
    // What is complete when it returns, and has no buffers to choose.
    let (calls, places) = match (kind, options.several()) {
        (Kind::SparseAllreduce, _) => (vec![CallStyle::Blocking], vec![Place::Out]),
        (_, true) => (vec![CallStyle::Blocking], vec![Place::In]),
        (_, false) => (options.calls(), options.places.clone()),
    };
    let mut sweeps = Vec::new();
    for &dtype in &types {
        for &operator in &operators {
            let possible = operator.is_none_or(|operator| Reducer::new(dtype, operator, size).is_ok());
            for &root in roots.iter().filter(|_| possible) {
                for &asked in &sizes {
                    sweeps.push((dtype, operator, root, asked));
                }
            }
        }
    }
    sweeps.into_iter().map(move |(dtype, operator, root, asked)| {
        let mut cases = Vec::new();
        for &algorithm in options.algorithms.iter().filter(|choice| serves(**choice, kind)) {
            for &call in &calls {
                for &place in places.iter().filter(|place| exists(**place, kind)) {
                    for transport in options.transports() {
                        cases.push(Case {
                            kind,
                            asked,
                            dtype,
                            operator,
                            root,
                            algorithm,
                            transport,
                            call,
                            place,
                            size,
                        });
                    }
                }
            }
        }
        cases
    })
}

/// The operation as schedules know it; sends are no collective.
pub(super) fn scheduled(kind: Kind) -> Option<schedule::Kind> {
    Some(match kind {
        Kind::Allreduce => schedule::Kind::Allreduce,
        Kind::Reduce => schedule::Kind::Reduce,
        Kind::Broadcast => schedule::Kind::Broadcast,
        Kind::Allgather => schedule::Kind::Allgather,
        Kind::Gather => schedule::Kind::Gather,
        Kind::Scatter => schedule::Kind::Scatter,
        Kind::ReduceScatter => schedule::Kind::ReduceScatter,
        Kind::Alltoall => schedule::Kind::Alltoall,
        Kind::Barrier => schedule::Kind::Barrier,
        Kind::Send | Kind::Receive | Kind::ReceiveAny | Kind::SparseAllreduce => return None,
    })
}

/// Whether there are algorithm objects of it over several pointers per rank.
pub(super) fn over_several(kind: Kind) -> bool {
    matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast)
}

fn serves(choice: Choice, kind: Kind) -> bool {
    match (choice, scheduled(kind)) {
        (Choice::Automatic, _) => true,
        (Choice::Named(algorithm), Some(kind)) => algorithm.serves(kind),
        (Choice::Stages(_), kind) => kind == Some(schedule::Kind::Broadcast),
        (Choice::Named(_), None) => false,
    }
}

/// A barrier has no place and is measured once, under "out".
fn exists(place: Place, kind: Kind) -> bool {
    place == Place::Out || !matches!(kind, Kind::Barrier | Kind::Send)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cases(arguments: &[&str], kind: Kind, size: u32) -> Vec<Case> {
        let options = Options::parse_from(["unisono-bench"].iter().chain(arguments));
        sweeps(&options, kind, size).flatten().collect()
    }

    #[test]
    fn sizes_are_of_all_blocks_and_counts_of_one() {
        let case = cases(&["--sizes", "1K"], Kind::Allgather, 3)[0];
        assert_eq!((case.count(), case.bytes()), (85, 1020));
        let case = cases(&["--sizes", "1"], Kind::Alltoall, 4)[0];
        assert_eq!((case.count(), case.bytes()), (1, 16));
        let case = cases(&["--sizes", "1K"], Kind::Allreduce, 3)[0];
        assert_eq!((case.count(), case.bytes()), (256, 1024));
    }

    #[test]
    fn sizes_of_sparse_tensors_are_those_of_the_rows_that_are_moved() {
        for (asked, moved) in [("0", 256), ("8", 256), ("1000", 768), ("1K", 1024)] {
            let case = cases(&["--sizes", asked], Kind::SparseAllreduce, 2)[0];
            assert_eq!(case.bytes(), moved, "{asked}");
            assert_eq!(sparse::Rows::of(&case).count * sparse::ROW * 4, moved, "{asked}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let bits = cases(&["-d", "float32,int32", "-o", "sum,xor", "--sizes", "8"], Kind::Allreduce, 2);
        assert_eq!(bits.len(), 3);
        assert_eq!(cases(&["-a", "bruck", "--sizes", "8"], Kind::Allreduce, 2), []);
        assert_eq!(cases(&["-o", "sum,max", "-r", "0,1", "--places", "in,out"], Kind::Barrier, 2).len(), 1);
    }

    #[test]
    fn what_is_compared_is_measured_next_to_each_other() {
        let both = cases(&["-t", "shm,tcp", "--sizes", "8,16"], Kind::Allreduce, 2);
        let order: Vec<_> = both.iter().map(|case| (case.asked, case.transport.name())).collect();
        assert_eq!(order, [(8, "shm"), (8, "tcp"), (16, "shm"), (16, "tcp")]);
    }
}
