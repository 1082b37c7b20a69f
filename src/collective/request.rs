//! A call as the faces hand it down: pointers, counts, type, operator, root. Checked once, here.

use std::sync::Arc;

use crate::reduce::{DataType, Operator};
pub use crate::signature::Kind;

/// How many elements each rank contributes and obtains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// The same for every rank: the total for allreduce, reduce, broadcast, send and receive; the elements of
    /// one rank's block for allgather, gather, scatter, reduce_scatter and alltoall. Barrier ignores it.
    Uniform(u64),
    /// A block for each rank, in rank order (allgatherv, gatherv, scatterv, reduce_scatterv): the same list
    /// on every rank that needs it. Of gatherv's and scatterv's, ranks other than the root need only their
    /// own entry, and the others are ignored, unless the call names an algorithm that passes several blocks
    /// on together (binomial).
    Blocks(Vec<u64>),
    /// alltoallv: elements sent to each rank, elements received from each rank.
    Exchange {
        /// To each rank.
        send: Vec<u64>,
        /// From each rank.
        receive: Vec<u64>,
    },
    /// Receive from any, where some ranks only are meant: how many elements, and the ranks.
    From {
        /// The elements of the message.
        count: u64,
        /// Whose messages are taken.
        ranks: Arc<[u32]>,
    },
}

/// One call on one rank. Blocks lie one after the other in rank order. `input` and `output` may be the same
/// memory where the operation has an in-place form (see `unisono.h`), else they do not overlap.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which operation.
    pub kind: Kind,
    /// What this rank contributes; NULL only if nothing is read here.
    pub input: *const u8,
    /// Where this rank's result goes; NULL only if nothing is written here. Broadcast uses `output` on every
    /// rank and `input` on the root (equal to `output` in place).
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

impl Request {
    /// So many bytes of every rank, from `input` to all, at `output`.
    pub fn gathering(input: *const u8, output: *mut u8, bytes: usize) -> Request {
        let (kind, counts) = (Kind::Allgather, Counts::Uniform(bytes as u64));
        Request { kind, input, output, counts, dtype: DataType::U8, operator: Operator::Sum, root: 0 }
    }
}

// SAFETY: a request only names memory; whoever runs it promised that the memory may be used from the
// library's threads until the operation completes.
unsafe impl Send for Request {}
