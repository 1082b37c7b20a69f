//! Events: points in what a stream was given, for other streams and the host to wait for.

use std::sync::Arc;
use std::time::Instant;

use super::context::Devices;
use super::driver::EventHandle;
use super::polling;
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};

/// An event of one device, without timing, destroyed on drop. Before it is first recorded it counts as
/// complete.
#[derive(Debug)]
pub struct Event {
    devices: Arc<Devices>,
    device: u32,
    handle: EventHandle,
}

impl Event {
    /// An event to be recorded on streams of `device`.
    pub fn new(devices: &Arc<Devices>, device: u32) -> Result<Event> {
        let handle = {
            let _entered = devices.enter(device)?;
            devices.driver().create_event()?
        };
        Ok(Event { devices: devices.clone(), device, handle })
    }

    /// The devices that it is of.
    pub fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    /// The device whose streams record it.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Its handle, valid for as long as this lives.
    pub fn handle(&self) -> EventHandle {
        self.handle
    }

    /// From now on it means what `stream` has been given so far. The stream is of the event's device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live.
        unsafe { self.devices.driver().record_event(self.handle, stream.handle()) }
    }

    /// Whether what it means is complete. Not for events recorded in a capture: those are never complete.
    pub fn query(&self) -> Result<bool> {
        let _relaxed = self.devices.relax()?;
        // SAFETY: it lives.
        unsafe { self.devices.driver().query_event(self.handle) }
    }

    /// Waits on the host until what it means is complete.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        if deadline == Deadline::NEVER {
            let _relaxed = self.devices.relax()?;
            // SAFETY: it lives.
            return unsafe { self.devices.driver().synchronize_event(self.handle) };
        }
        let start = Instant::now();
        while !self.query()? {
            if deadline.expired() {
                fail!(
                    Timeout,
                    "device {} has not finished what it was given after {:.1} s of waiting",
                    self.device,
                    start.elapsed().as_secs_f64()
                );
            }
            polling::pause(start, deadline);
        }
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it after this.
        if let Err(error) = unsafe { self.devices.driver().destroy_event(self.handle) } {
            log::warn!("{error}");
        }
    }
}
