//! Broadcast.

use super::super::Composed;
use super::{Chunk, Parts, Steps, receive, send};
use crate::collective::request::{Kind, Request};
use crate::cuda::exchange;
use crate::engine::device::Layout;
use crate::error::Result;
use crate::reduce::Operator;

/// Shards have at least so many bytes: fewer are not worth a message each.
const SHARD_BYTES: u64 = 16 << 10;

/// The root's host has all of it by kernels; each place passes its shard on to the other hosts, where the
/// shards are gathered. Between outputs: there is nothing to work in, so a call is one chunk.
pub(super) struct Broadcast;

impl Broadcast {
    /// Where the shard of a place begins, and its elements.
    fn shard(call: &Composed, count: u64, place: u32) -> (u64, u64) {
        let element = call.checked.dtype.size() as u64;
        let shard = count.div_ceil(u64::from(call.hosts.layout().inside)).max(SHARD_BYTES / element);
        let start = (u64::from(place) * shard).min(count);
        (start, shard.min(count - start))
    }

    /// Where the shard of this rank lies.
    fn own(call: &Composed, count: u64) -> (u64, u64) {
        let (checked, layout) = (&call.checked, call.hosts.layout());
        let (start, len) = Broadcast::shard(call, count, layout.place());
        let is_root = layout.rank() == checked.signature.root;
        let from = if is_root { checked.input.addr() } else { checked.output.addr() };
        (from as u64 + start * checked.dtype.size() as u64, len)
    }
}

impl Steps for Broadcast {
    unsafe fn before(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let checked = &parts.call.checked;
        let (dtype, root) = (checked.dtype, checked.signature.root);
        let (input, output) = (checked.input.addr() as u64, checked.output.addr() as u64);
        let Layout { inside, .. } = parts.layout;
        if !parts.layout.is_here(root) {
            return Ok(());
        }
        let job = parts.job(Kind::Broadcast, input, output, chunk.len, dtype, Operator::Sum);
        // SAFETY: the caller's promise.
        unsafe { parts.series.enqueue(&exchange::Job { root: root % inside, ..job }) }
    }

    fn across(&self, call: &Composed, chunk: Chunk) -> Option<Request> {
        let (at, len) = Broadcast::own(call, chunk.len);
        let (dtype, root) = (call.checked.dtype, call.checked.signature.root / call.hosts.layout().inside);
        let request = || call.request(Kind::Broadcast, at, at, len, dtype, Operator::Sum);
        (len > 0).then(|| Request { root, ..request() })
    }

    unsafe fn after(&self, parts: &Parts<'_>, chunk: Chunk) -> Result<()> {
        let checked = &parts.call.checked;
        if parts.layout.is_here(checked.signature.root) {
            return Ok(());
        }
        let (output, element) = (checked.output.addr() as u64, checked.dtype.size() as u64);
        let (at, len) = Broadcast::own(parts.call, chunk.len);
        let mut points = Vec::new();
        for peer in 0..parts.layout.inside {
            let (start, shard) = Broadcast::shard(parts.call, chunk.len, peer);
            points.push(send(peer, (at, len * element)));
            points.push(receive(peer, (output + start * element, shard * element)));
        }
        // SAFETY: the caller's promise.
        unsafe { parts.transfer(points) }
    }
}
