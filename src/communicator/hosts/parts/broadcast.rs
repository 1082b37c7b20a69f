//! Broadcast.

use super::{Parts, receive, send};
use crate::collective::request::{Kind, Request};
use crate::cuda::exchange;
use crate::engine::device::Layout;
use crate::error::Result;
use crate::reduce::Operator;

/// Shards have at least so many bytes: fewer are not worth a message each.
const SHARD_BYTES: u64 = 16 << 10;

impl Parts<'_> {
    /// The root's host has all of it by kernels; each place passes its shard on to the other hosts, where the
    /// shards are gathered. Between outputs: there is nothing to work in.
    ///
    /// # Safety
    /// As [`Parts::give`].
    pub(super) unsafe fn broadcast(&mut self, count: u64, root: u32) -> Result<()> {
        let checked = &self.call.checked;
        let (dtype, element) = (checked.dtype, checked.dtype.size() as u64);
        let (input, output) = (checked.input.addr() as u64, checked.output.addr() as u64);
        let Layout { inside, .. } = self.layout;
        let shard = count.div_ceil(u64::from(inside)).max(SHARD_BYTES / element);
        let shard = |place: u32| {
            let start = (u64::from(place) * shard).min(count);
            (start, shard.min(count - start))
        };
        let (start, len) = shard(self.layout.place());
        let here = self.layout.is_here(root);
        let from = if self.layout.rank() == root { input } else { output };
        // SAFETY: the caller's promise.
        unsafe {
            if here {
                let job = self.job(Kind::Broadcast, input, output, count, dtype, Operator::Sum);
                self.series.enqueue(&exchange::Job { root: root % inside, ..job })?;
            }
            let at = from + start * element;
            if len > 0 {
                let request = self.request(Kind::Broadcast, at, at, len, dtype, Operator::Sum);
                let crossing = self.across(Request { root: root / inside, ..request })?;
                self.wait(crossing)?;
            }
            if !here {
                let mut points = Vec::new();
                for peer in 0..inside {
                    let (start, shard) = shard(peer);
                    points.push(send(peer, (at, len * element)));
                    points.push(receive(peer, (output + start * element, shard * element)));
                }
                self.transfer(points)?;
            }
        }
        Ok(())
    }
}
