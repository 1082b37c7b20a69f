//! Allgather.

use super::super::Composed;
use super::{Chunk, Parts, Steps, receive, send};
use crate::collective::request::{Kind, Request};
use crate::engine::device::Layout;
use crate::error::Result;
use crate::reduce::{DataType, Operator};

/// A chunk is the same elements of every rank's block; its workspace holds those of this place's ranks.
pub(super) struct Allgather {
    /// Bytes.
    element: u64,
}

impl Allgather {
    pub(super) fn new(dtype: DataType) -> Allgather {
        Allgather { element: dtype.size() as u64 }
    }

    /// Bytes for one element of every block.
    pub(super) fn row(&self, layout: Layout) -> u64 {
        u64::from(layout.hosts) * self.element
    }
}

impl Steps for Allgather {
    unsafe fn before(&self, _parts: &Parts<'_>, _chunk: Chunk) -> Result<()> {
        Ok(())
    }

    fn across(&self, call: &Composed, chunk: Chunk) -> Option<Request> {
        let checked = &call.checked;
        let input = checked.input.addr() as u64 + chunk.start * self.element;
        let dtype = checked.dtype;
        Some(call.request(Kind::Allgather, input, chunk.workspace, chunk.len, dtype, Operator::Sum))
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let checked = &parts.call.checked;
        let (output, count) = (checked.output.addr() as u64, checked.signature.count);
        let Layout { inside, hosts, .. } = parts.layout;
        let bytes = chunk.len * self.element;
        let mut points = Vec::new();
        for (host, peer) in (0..hosts).flat_map(|host| (0..inside).map(move |peer| (host, peer))) {
            let rank = u64::from(host * inside + peer);
            points.push(send(peer, (chunk.workspace + u64::from(host) * bytes, bytes)));
            points.push(receive(peer, (output + (rank * count + chunk.start) * self.element, bytes)));
        }
        // SAFETY: the caller's promise; the chunk fits the workspace.
        unsafe { parts.transfer(points) }
    }
}
