//! Reduce-scatter.

use super::super::Composed;
use super::reduction::Reduction;
use super::{ALIGNMENT, Chunk, Parts, Steps, receive, send};
use crate::collective::request::{Kind, Request};
use crate::engine::device::Layout;
use crate::error::Result;
use crate::reduce::Operator;

/// A chunk is the same elements of every rank's block. Its workspace holds the inputs, if they are widened or
/// do not lie together, then what this host makes for the ranks of this place, then the result as an
/// accumulator. What does not lie together is packed by places, and for each by hosts: so one exchange of the
/// host makes it all.
pub(super) struct ReduceScatter {
    reduction: Reduction,
    /// Whether the inputs of a chunk do not lie together.
    packs: bool,
}

impl ReduceScatter {
    pub(super) fn new(call: &Composed, operator: Operator) -> ReduceScatter {
        let checked = &call.checked;
        let reduction = Reduction::new(checked, operator, call.hosts.layout().size());
        let together = ReduceScatter { reduction, packs: false };
        let packs = !together.holds(call, checked.signature.count);
        ReduceScatter { packs, ..together }
    }

    fn gathers(&self) -> bool {
        self.packs || self.reduction.widens
    }

    /// Bytes for one element of every block.
    pub(super) fn row(&self, layout: Layout) -> u64 {
        let gathered = if self.gathers() { layout.size() } else { 0 };
        u64::from(gathered + layout.hosts + 1) * self.reduction.accumulator
    }

    /// Whether `count` elements of each block are one chunk.
    fn holds(&self, call: &Composed, count: u64) -> bool {
        count <= call.room(self.row(call.hosts.layout()), 1)
    }

    /// Where lies what this host makes, and where the result.
    fn places(&self, layout: Layout, chunk: Chunk) -> (u64, u64) {
        let accumulator = self.reduction.accumulator;
        let gathered = if self.gathers() { u64::from(layout.size()) * chunk.len * accumulator } else { 0 };
        let made = (chunk.workspace + gathered).next_multiple_of(ALIGNMENT);
        let result = made + u64::from(layout.hosts) * chunk.len * accumulator;
        (made, result.next_multiple_of(ALIGNMENT))
    }

    /// Where the chunk's result goes.
    fn output(&self, call: &Composed, chunk: Chunk) -> u64 {
        call.checked.output.addr() as u64 + chunk.start * self.reduction.element
    }
}

impl Steps for ReduceScatter {
    unsafe fn before(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, widens, .. } = self.reduction;
        let (layout, stream, checked) = (parts.layout, parts.series.stream(), &parts.call.checked);
        let (input, count) = (checked.input.addr() as u64, checked.signature.count);
        let (made, _) = self.places(layout, chunk);
        let Layout { inside, hosts, .. } = layout;
        let (inside, hosts) = (u64::from(inside), u64::from(hosts));
        let from = if self.gathers() { chunk.workspace } else { input };
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            if self.packs {
                for (host, place) in (0..hosts).flat_map(|host| (0..inside).map(move |place| (host, place))) {
                    let at = input + ((host * inside + place) * count + chunk.start) * element;
                    let to = from + (place * hosts + host) * chunk.len * accumulator;
                    if widens {
                        self.reduction.widen(parts, at, to, chunk.len)?;
                    } else {
                        // It fits the workspace.
                        stream.copy_to_peer(to, stream.device(), at, (chunk.len * element) as usize)?;
                    }
                }
            } else if widens {
                self.reduction.widen(parts, input, from, hosts * inside * count)?;
            }
            let (launches, len) = if self.packs { (1, hosts * chunk.len) } else { (hosts, chunk.len) };
            for launch in 0..launches {
                let from = from + launch * inside * len * accumulator;
                let into = made + launch * len * accumulator;
                parts.series.enqueue(&self.reduction.job(parts, Kind::ReduceScatter, from, into, len))?;
            }
        }
        Ok(())
    }

    fn across(&self, call: &Composed, chunk: Chunk) -> Option<Request> {
        let (made, result) = self.places(call.hosts.layout(), chunk);
        let into = if self.reduction.finishes { result } else { self.output(call, chunk) };
        Some(self.reduction.request(call, Kind::ReduceScatter, made, into, chunk.len))
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let Reduction { element, accumulator, finishes, .. } = self.reduction;
        if !finishes {
            return Ok(());
        }
        let (made, result) = self.places(parts.layout, chunk);
        let rounded = if element == accumulator { result } else { made };
        let (place, bytes) = (parts.layout.place(), chunk.len * element);
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe {
            self.reduction.finish(parts, result, rounded, chunk.len)?;
            // By the kernels that do nothing once the group has failed.
            let output = self.output(parts.call, chunk);
            parts.transfer(vec![send(place, (rounded, bytes)), receive(place, (output, bytes))])
        }
    }
}
