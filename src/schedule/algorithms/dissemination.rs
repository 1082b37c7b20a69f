//! Barriers. A barrier's messages hold nothing; what counts is who has heard of whom.

use crate::schedule::builder::{Builder, StepIndex};
use crate::schedule::collective::Shape;

/// See [`spread`].
pub(in crate::schedule) fn barrier(b: &mut Builder, shape: &Shape) {
    spread(b, shape);
}

/// Dissemination (Hensgen, Finkel and Manber): in round `k` every rank tells the rank `2^k` ahead about
/// everyone it has heard of. `ceil(log2 n)` rounds of one message. When the steps that it gives back have
/// ended, this rank has heard of all.
pub(in crate::schedule) fn spread(b: &mut Builder, shape: &Shape) -> Vec<StepIndex> {
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < shape.size {
        b.fence(heard.iter().copied());
        b.signal(shape.ahead(distance));
        b.fence([]);
        heard.push(b.await_signal(shape.behind(distance)));
        distance *= 2;
    }
    heard
}

/// All to one and back: two rounds, `n - 1` messages in and out of rank 0.
pub(in crate::schedule) fn all_to_one(b: &mut Builder, shape: &Shape) {
    if shape.rank > 0 {
        b.signal(0);
        b.await_signal(0);
        return;
    }
    let heard: Vec<_> = (1..shape.size).map(|from| b.await_signal(from)).collect();
    b.fence(heard);
    for to in 1..shape.size {
        b.signal(to);
    }
}
