//! What comes before an operation that only moves data, so that no Output is written before all ranks that it
//! is made of are known to have called the same: messages without content. Each carries its rank's call, as
//! every message does, and a rank whose call is another takes none. They go over links that the algorithm
//! uses anyway, or, where those would take too many rounds, over doubling distances.

use crate::schedule::algorithm::Algorithm;
use crate::schedule::algorithms::{binomial, dissemination};
use crate::schedule::builder::{Builder, StepIndex};
use crate::schedule::collective::{Agreement, Collective, Shape};
use crate::schedule::ir::Rank;

/// What is added in front of `algorithm`'s steps, as `shape.agreement` asks.
pub(in crate::schedule) fn precede(
    b: &mut Builder,
    shape: &Shape,
    algorithm: Algorithm,
    collective: &Collective,
) {
    if shape.agreement == Agreement::Unsaid {
        return;
    }
    let meshed = matches!(algorithm, Algorithm::Linear | Algorithm::Pairwise);
    let heard = match *collective {
        Collective::Allgather { .. } | Collective::Alltoall { .. } if meshed => all_to_all(b, shape),
        Collective::Allgather { .. } | Collective::Alltoall { .. } => dissemination::spread(b, shape),
        Collective::Gather { root, .. } if meshed => all_to_one(b, shape, root),
        Collective::Gather { root, .. } => binomial::collect(b, shape, root),
        Collective::Scatter { ref counts, root } if meshed => return empty_blocks(b, shape, counts, root),
        Collective::Scatter { ref counts, root } => return binomial::empty_subtrees(b, shape, counts, root),
        _ => return,
    };
    if shape.agreement == Agreement::Awaited {
        // Of two ranks, a block says all that the other would say before it.
        b.guard_output(heard, shape.size > 2);
    }
}

fn all_to_all(b: &mut Builder, shape: &Shape) -> Vec<StepIndex> {
    for distance in 1..shape.size {
        b.signal(shape.ahead(distance));
    }
    (1..shape.size).map(|distance| b.await_signal(shape.behind(distance))).collect()
}

fn all_to_one(b: &mut Builder, shape: &Shape, root: Rank) -> Vec<StepIndex> {
    if shape.rank != root {
        b.signal(root);
        return Vec::new();
    }
    (1..shape.size).map(|distance| b.await_signal(shape.behind(distance))).collect()
}

/// A rank obtains nothing but the root's block, which says all that it has to know; where that is empty, a
/// message says so.
fn empty_blocks(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let is_empty = |rank: &Rank| counts[*rank as usize] == 0;
    if shape.rank == root {
        for rank in (0..shape.size).filter(|rank| *rank != root && is_empty(rank)) {
            b.signal(rank);
        }
    } else if is_empty(&shape.rank) {
        b.await_signal(root);
    }
}
