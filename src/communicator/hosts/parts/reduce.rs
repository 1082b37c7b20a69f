//! Allreduce and reduce.

use super::super::Composed;
use super::reduction::Reduction;
use super::{ALIGNMENT, Chunk, Parts, Steps, receive, send};
use crate::collective::request::{Kind, Request};
use crate::engine::device::Layout;
use crate::error::Result;
use crate::reduce::Operator;

/// A chunk is one *shard* for each place, and the *rest*, less than a rank's worth of elements each, which
/// every place deals with. Its workspace holds the inputs as accumulators, if they are not, and behind them
/// the shard and the rest.
pub(super) struct Reduce {
    kind: Kind,
    reduction: Reduction,
    root: u32,
}

impl Reduce {
    pub(super) fn new(call: &Composed, operator: Operator) -> Reduce {
        let checked = &call.checked;
        let reduction = Reduction::new(checked, operator, call.hosts.layout().size());
        Reduce { kind: checked.signature.kind, reduction, root: checked.signature.root }
    }

    /// Bytes for one element of each shard.
    pub(super) fn row(&self, layout: Layout) -> u64 {
        let Reduction { accumulator, widens, .. } = self.reduction;
        let widened = if widens { u64::from(layout.inside) * accumulator } else { 0 };
        widened + accumulator
    }

    /// Elements of a shard and of the rest.
    fn shares(&self, layout: Layout, len: u64) -> (u64, u64) {
        let inside = u64::from(layout.inside);
        (len / inside, len % inside)
    }

    /// Where the shard lies.
    fn shard(&self, chunk: Chunk) -> u64 {
        let widened = if self.reduction.widens { chunk.len * self.reduction.accumulator } else { 0 };
        (chunk.workspace + widened).next_multiple_of(ALIGNMENT)
    }
}

impl Steps for Reduce {
    unsafe fn before(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, widens, .. } = self.reduction;
        let layout = parts.layout;
        let input = parts.call.checked.input.addr() as u64 + chunk.start * element;
        let (shard, rest) = self.shares(layout, chunk.len);
        let (from, into) = (if widens { chunk.workspace } else { input }, self.shard(chunk));
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if widens {
                self.reduction.widen(parts, input, from, chunk.len)?;
            }
            if shard > 0 {
                parts.series.enqueue(&self.reduction.job(parts, Kind::ReduceScatter, from, into, shard))?;
            }
            if rest > 0 {
                let from = from + (chunk.len - rest) * accumulator;
                let into = into + shard * accumulator;
                parts.series.enqueue(&self.reduction.job(parts, Kind::Allreduce, from, into, rest))?;
            }
        }
        Ok(())
    }

    fn across(&self, call: &Composed, chunk: Chunk) -> Option<Request> {
        let (layout, made) = (call.hosts.layout(), self.shard(chunk));
        let (shard, rest) = self.shares(layout, chunk.len);
        let request = self.reduction.request(call, self.kind, made, made, shard + rest);
        Some(Request { root: self.root / layout.inside, ..request })
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, finishes, .. } = self.reduction;
        let layout = parts.layout;
        let to_all = self.kind == Kind::Allreduce;
        if !to_all && !layout.is_here(self.root) {
            return Ok(());
        }
        let (shard, rest) = self.shares(layout, chunk.len);
        let made = self.shard(chunk);
        // Rounded over the inputs, or in place.
        let from = if finishes && element != accumulator { chunk.workspace } else { made };
        let output = parts.call.checked.output.addr() as u64 + chunk.start * element;
        let takes = |place: u32| to_all || self.root % layout.inside == place;
        let mut points = Vec::new();
        for peer in 0..layout.inside {
            if takes(peer) {
                points.push(send(peer, (from, shard * element)));
            }
            if takes(layout.place()) {
                let at = output + u64::from(peer) * shard * element;
                points.push(receive(peer, (at, shard * element)));
            }
        }
        if takes(layout.place()) && rest > 0 {
            points.push(send(layout.place(), (from + shard * element, rest * element)));
            points.push(receive(layout.place(), (output + (chunk.len - rest) * element, rest * element)));
        }
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if finishes {
                self.reduction.finish(parts, made, from, shard + rest)?;
            }
            parts.transfer(points)
        }
    }
}
