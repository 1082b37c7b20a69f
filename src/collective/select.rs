//! Which algorithm a call gets when its caller names none. Depends on what all ranks agree on, and nothing else.

use crate::schedule::Algorithm;
use crate::schedule::Collective;

/// Up to this many ranks everybody may talk to everybody at once.
const FEW: u32 = 16;

/// Up to this many bytes latency decides.
const SHORT: u64 = 8 * 1024;

/// The algorithm for `collective` with elements of `element` bytes over `size` ranks linked by messages. Reductions
/// keep the canonical order.
pub fn automatic(collective: &Collective, element: u64, size: u32) -> Algorithm {
    if size == 1 {
        return Algorithm::Local;
    }
    let few = size <= FEW;
    match collective {
        Collective::Allreduce { count } if count * element <= SHORT => {
            if size <= 4 {
                Algorithm::OneShot
            } else {
                Algorithm::RecursiveDoubling
            }
        }
        Collective::Allreduce { .. } => Algorithm::TwoShot,
        Collective::Reduce { count, .. } if count * element <= SHORT => {
            if size <= 4 {
                Algorithm::Linear
            } else {
                Algorithm::Binomial
            }
        }
        Collective::Reduce { .. } => Algorithm::TwoShot,
        Collective::Broadcast { .. } if size <= 4 => Algorithm::Linear,
        Collective::Broadcast { .. } => Algorithm::Binomial,
        Collective::Allgather { .. } => Algorithm::Linear,
        Collective::Gather { .. } | Collective::Scatter { .. } if few => Algorithm::Linear,
        Collective::Gather { .. } | Collective::Scatter { .. } => Algorithm::Binomial,
        Collective::ReduceScatter { .. } => Algorithm::Linear,
        Collective::Alltoall { .. } if few => Algorithm::Linear,
        Collective::Alltoall { .. } => Algorithm::Pairwise,
        Collective::Barrier => Algorithm::Dissemination,
    }
}

/// Elements of one pipelined piece.
pub fn chunk(element: u64) -> u64 {
    (256 * 1024) / element
}
