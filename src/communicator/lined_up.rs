//! Streams that come behind what other streams were given for the same context: for clients whose calls are
//! in one order, whatever their streams.

use std::time::Duration;

use super::context::{Context, Membership};
use super::work::Work;
use crate::cuda::driver::{Capture, StreamHandle};
use crate::cuda::stream::{Stream, StreamName};
use crate::engine::device::{Caller, Way};
use crate::engine::wire::Class;
use crate::error::Result;

impl Context {
    /// What tells a stream of `device` from others.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn stream_name(&self, device: u32, stream: StreamHandle) -> StreamName {
        match self.cuda().devices() {
            // SAFETY: the caller's promise.
            Ok(devices) => unsafe { StreamName::of(devices, device, stream) },
            Err(_) => StreamName::Unknown(stream),
        }
    }

    /// Has `stream`, of `device`, come behind these works, and behind all that the context's GPUs exchange,
    /// for what it is given after this. Whether it does: a stream that is being captured waits for nothing
    /// that runs, and one of another device is its call's to refuse. Returns at once, unless the stream waits
    /// for many calls already (see [`Call::stream`](super::Call)), for as long as `timeout` at most, or may
    /// not wait for what is under way. A rank that is kept from it fails the group as one that is kept from
    /// the call behind it: unless that is of `messages` alone, others wait for it.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn line_up(
        &self,
        (device, stream): (u32, StreamHandle),
        works: &[Work],
        messages: bool,
        timeout: Option<Duration>,
    ) -> Result<bool> {
        let class = if messages { Class::PointToPoint } else { Class::Ordered };
        // SAFETY: the caller's promise.
        unsafe {
            let lined_up = self.come_behind((device, stream), works, timeout);
            self.or_fail_on(Some(stream), class, lined_up)
        }
    }

    /// # Safety
    /// As [`Context::line_up`].
    unsafe fn come_behind(
        &self,
        (device, handle): (u32, StreamHandle),
        works: &[Work],
        timeout: Option<Duration>,
    ) -> Result<bool> {
        let devices = self.cuda().devices()?;
        let _entered = devices.enter(device)?;
        if devices.device_of_stream(handle)? != device {
            return Ok(false);
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow(devices, device, handle) }?;
        if stream.capture()? != Capture::None {
            return Ok(false);
        }
        works
            .iter()
            .filter(|work| work.test().is_none())
            .try_for_each(|work| work.block(&stream, timeout))?;
        if let Membership::Group(group) = self.membership()
            && let Some(exchange) = group.devices().and_then(Way::exchange)
        {
            let caller = Caller { stream: Some(handle), timeout, memory: "the stream" };
            // SAFETY: the caller's promise.
            unsafe { exchange.line_up(caller) }?;
        }
        Ok(true)
    }
}
