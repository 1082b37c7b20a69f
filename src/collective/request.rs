//! A call as the faces hand it down: pointers, counts, type, operator, root. Checked once, here.

use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// The operations. The numbers are part of the wire protocol and of the ABI (algorithm objects name them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Kind {
    Allreduce = 0,
    Reduce = 1,
    Broadcast = 2,
    Allgather = 3,
    Gather = 4,
    Scatter = 5,
    ReduceScatter = 6,
    Alltoall = 7,
    Barrier = 8,
    Send = 9,
    Receive = 10,
    ReceiveAny = 11,
}

impl Kind {
    /// Every operation, in the order of the numbers.
    pub const ALL: [Kind; 12] = [
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
        Kind::Receive,
        Kind::ReceiveAny,
    ];

    /// The operation behind a number.
    pub fn from_number(number: i32) -> Result<Kind> {
        match usize::try_from(number).ok().and_then(|n| Kind::ALL.get(n)) {
            Some(&kind) => Ok(kind),
            None => fail!(
                InvalidArgument,
                "operation {number} is unknown; the operations are 0 (allreduce) to 11"
            ),
        }
    }

    /// The name that errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Allreduce => "allreduce",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::Allgather => "allgather",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Alltoall => "alltoall",
            Kind::Barrier => "barrier",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::ReceiveAny => "receive_any",
        }
    }

    /// Whether an operator applies.
    pub const fn reduces(self) -> bool {
        matches!(self, Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Whether a root applies.
    pub const fn rooted(self) -> bool {
        matches!(self, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter)
    }

    /// Whether it is between two ranks only.
    pub const fn point_to_point(self) -> bool {
        matches!(self, Kind::Send | Kind::Receive | Kind::ReceiveAny)
    }
}

/// How many elements each rank contributes and obtains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// The same for every rank: the total for allreduce, reduce, broadcast, send and receive; the elements of one
    /// rank's block for allgather, gather, scatter, reduce_scatter and alltoall. Barrier ignores it.
    Uniform(u64),
    /// A block for each rank, in rank order (allgatherv, gatherv, scatterv, reduce_scatterv): the same list on every
    /// rank that needs it. For gatherv and scatterv, ranks other than the root may give only their own count (a
    /// list whose other entries are ignored).
    Blocks(Vec<u64>),
    /// alltoallv: elements sent to each rank, elements received from each rank.
    Exchange {
        /// To each rank.
        send: Vec<u64>,
        /// From each rank.
        receive: Vec<u64>,
    },
}

/// One call on one rank. Blocks lie one after the other in rank order. `input` and `output` may be the same memory
/// where the operation has an in-place form (see `unisono.h`), else they do not overlap.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which operation.
    pub kind: Kind,
    /// What this rank contributes; NULL only if nothing is read here.
    pub input: *const u8,
    /// Where this rank's result goes; NULL only if nothing is written here. Broadcast uses `output` on every rank
    /// and `input` on the root (equal to `output` in place).
    pub output: *mut u8,
    /// How many elements.
    pub counts: Counts,
    /// Of which type.
    pub dtype: DataType,
    /// Combined how; ignored by operations that do not reduce.
    pub operator: Operator,
    /// The root, or the peer of a send or receive; ignored by the others.
    pub root: u32,
}

// SAFETY: a request only names memory; whoever runs it promised that the memory may be used from the library's threads
// until the operation completes.
unsafe impl Send for Request {}
