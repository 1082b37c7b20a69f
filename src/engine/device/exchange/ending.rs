//! How calls are ended before their time, and their end is waited for.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::DeviceExchange;
use crate::cuda::driver::retry;
use crate::cuda::polling;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sys::process;

/// How long [`DeviceExchange::shut`] waits for the device.
const LATCHING: Duration = Duration::from_millis(20);

impl DeviceExchange {
    /// Waits until streams have done what they were given, no longer than `until`: a call has failed, and its caller has the memory
    /// back then. The group has failed, so the kernels leave.
    pub fn await_end(&self, until: Deadline) {
        let start = Instant::now();
        // Of a device that is lost nobody will know more.
        while matches!(retry(|| self.is_idle()), Ok(false)) && !until.expired() {
            polling::pause(start, until);
        }
    }

    /// As [`DeviceExchange::abort`], also for kernels that would find all that they wait for: what streams come to from now
    /// on leaves the caller's memory alone. Waits until that is so, a few milliseconds at most: the driver may be waiting for what
    /// whoever calls this is to end, and is asked by another thread. Once that is done, later calls do nothing.
    pub fn shut(self: &Arc<Self>) {
        self.abort();
        if self.parts().urgent.is_some() {
            self.shut.call_once(|| self.latch_aside());
        }
    }

    /// Sets the kernels' latch from another thread, and waits for that.
    fn latch_aside(self: &Arc<Self>) {
        let (this, (tell, told)) = (self.clone(), mpsc::sync_channel(1));
        let latch = move || {
            let latched = this.latch();
            // The exchange may end here, which is nobody's to wait for.
            drop(this);
            // Who waited may have gone on.
            let _ = tell.send(latched);
        };
        let latched =
            process::spawn("unisono-latch", latch).map_err(|cause| cause.to_string()).and_then(|_| {
                told.recv_timeout(2 * LATCHING)
                    .map_err(|cause| cause.to_string())?
                    .map_err(|error| error.to_string())
            });
        if let Err(cause) = latched {
            log::debug!("kernels that are launched already may run: {cause}");
        }
    }

    fn latch(&self) -> Result<()> {
        let parts = self.parts();
        let Some(stream) = &parts.urgent else { return Ok(()) };
        // SAFETY: the arena's first word, which is the kernels' latch; the arena outlives this group's streams.
        unsafe { stream.write_value(parts.arena.address(), 1) }?;
        stream.synchronize(Deadline::after(LATCHING))
    }

    /// Ends the kernels of this rank, now and from now on. Returns at once; from any thread.
    pub fn abort(&self) {
        self.parts().fault.abort();
    }
}
