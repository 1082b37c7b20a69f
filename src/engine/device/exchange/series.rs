//! Calls that take several launches.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, MutexGuard};

use super::line::Id;
use super::{CallLine, Caller, DeviceExchange, Enqueued, Meets};
use crate::cuda::exchange::{Job, Point};
use crate::cuda::quiet::Launching;
use crate::cuda::stream::Stream;
use crate::engine::device::compare::Terms;
use crate::engine::endpoint::lock;
use crate::engine::group::{Group, Turn};
use crate::error::{Error, Result};

/// The launches of one call. The exchange is this call's until it is dropped.
#[derive(Debug)]
pub struct Series<'a> {
    exchange: &'a Arc<DeviceExchange>,
    line: MutexGuard<'a, CallLine>,
    /// As in `give`. Couriers that are launched in between are, too, by the same thread.
    _launching: Launching<'a>,
    stream: Stream,
    id: Id,
    /// Whether the stream has been given something for which no event stands.
    open: bool,
}

impl DeviceExchange {
    /// Begins a call that takes several launches, with its device entered: its stream has been checked
    /// ([`DeviceExchange::check_default_stream`]). No other call of this exchange comes between them.
    ///
    /// # Safety
    /// The caller's stream lives until the series is dropped.
    pub unsafe fn series(self: &Arc<Self>, caller: Caller) -> Result<Series<'_>> {
        let parts = self.parts();
        let devices = parts.last.devices();
        let handle = caller.stream.unwrap_or(parts.stream.handle());
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow(devices, self.device(), handle) };
        let stream = stream.map_err(|error| self.foreign(caller, error))?;
        stream.refuse_capture("call->stream", "a call between hosts cannot be captured")?;
        let line = lock(&self.line);
        // SAFETY: as above.
        let id = Id::Number(unsafe { devices.driver().stream_id(handle) }?);
        let _launching = self.devices().launching();
        Ok(Series { exchange: self, line, _launching, stream, id, open: false })
    }
}

impl Series<'_> {
    /// The stream that the call is on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// How many collectives of the exchange there will have been with the call, before that is noted: see
    /// [`DeviceExchange::missing`].
    pub fn number(&self) -> u32 {
        self.line.calls.collectives().wrapping_add(1)
    }

    /// Notes the call, compares it with those of the other members, and has the stream wait for what ran
    /// before.
    pub fn begin(&mut self, group: &Group, turn: &Turn, max_blocks: u32) -> Result<()> {
        let terms = Terms { max_blocks, ..Terms::default() };
        self.line.calls.compare(self.exchange.parts(), group, turn, terms)?;
        self.open = true;
        if self.line.ran_on.is_some_and(|before| before != self.id) {
            self.stream.wait(&self.exchange.parts().last)?;
        }
        self.line.captured.precede(self.exchange.parts(), &self.stream)
    }

    /// A part of the call that is a collective of the members.
    ///
    /// # Safety
    /// As [`crate::cuda::exchange::Exchange::enqueue`].
    pub unsafe fn enqueue(&self, job: &Job) -> Result<()> {
        let parts = self.exchange.parts();
        let job = Job { max_blocks: parts.room.blocks(job.max_blocks), ..*job };
        // SAFETY: the caller's promise.
        unsafe { parts.kernels.enqueue(&job, &self.stream) }
    }

    /// A part of the call that consists of sends and receives between members.
    ///
    /// # Safety
    /// As [`crate::cuda::exchange::Exchange::enqueue_points`].
    pub unsafe fn enqueue_points(&self, points: &[Point], max_blocks: u32) -> Result<()> {
        let parts = self.exchange.parts();
        // SAFETY: the caller's promise.
        unsafe { parts.kernels.enqueue_points(points, parts.room.blocks(max_blocks), &self.stream) }
    }

    /// The call fails in its course, and the stream cannot be made to wait for what `error` tells of: nobody
    /// will know when that is done.
    pub fn lose(&self, error: &Error) {
        self.exchange.parts().astray.lose(error);
    }

    /// All parts have been given. `turn` says until when they are to be done.
    pub fn end(mut self, group: &Group, turn: Turn) -> Result<Enqueued> {
        self.line.ran_on = Some(self.id);
        let meets = Meets::All(self.line.calls.collectives());
        self.exchange.watch.observe(self.exchange.parts(), &self.stream, turn, meets)?;
        self.open = false;
        // As in `give`.
        fence(Ordering::SeqCst);
        group.endpoint().watch_devices();
        Ok(Enqueued { turn, meets, stream: self.stream.handle(), captured: false })
    }
}

impl Drop for Series<'_> {
    fn drop(&mut self) {
        if self.open {
            self.exchange.parts().astray.add(&self.stream);
        }
    }
}
