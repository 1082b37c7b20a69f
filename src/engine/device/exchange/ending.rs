//! How calls are ended before their time, and their end is waited for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::DeviceExchange;
use crate::cuda::driver::retry;
use crate::cuda::polling;
use crate::deadline::Deadline;
use crate::engine::endpoint::lock;
use crate::error::Result;
use crate::sys::process;

/// How long [`DeviceExchange::shut`] waits for the device.
const LATCHING: Duration = Duration::from_millis(20);

impl DeviceExchange {
    /// Waits until streams have done what they were given, no longer than `until`: a call has failed, and its
    /// caller has the memory back then. The group has failed, so the kernels leave.
    pub fn await_end(&self, until: Deadline) {
        let start = Instant::now();
        // Of a device that is lost nobody will know more.
        while matches!(retry(|| self.is_idle()), Ok(false)) && !until.expired() {
            polling::pause(start, until);
        }
    }

    /// As [`DeviceExchange::abort`], also for kernels that would find all that they wait for: what streams
    /// come to from now on leaves the caller's memory alone. Waits until that is so, a few milliseconds at
    /// most: the driver may be waiting for what whoever calls this is to end, and is asked by another thread.
    /// Once that is done, later calls do nothing.
    pub fn shut(self: &Arc<Self>) {
        self.abort();
        if self.parts().urgent.get().is_some() {
            self.shut.call_once(|| {
                let latched = self.latch_aside().and_then(|told| {
                    told.recv_timeout(2 * LATCHING).unwrap_or_else(|cause| Err(cause.to_string()))
                });
                if let Err(cause) = latched {
                    log::debug!("kernels that are launched already may run: {cause}");
                }
            });
        }
    }

    /// Sets the kernels' latch from another thread, which tells how that went.
    fn latch_aside(self: &Arc<Self>) -> Result<mpsc::Receiver<Result<(), String>>, String> {
        let this = self.clone();
        let latch = move || this.latch().map_err(|error| error.to_string());
        process::aside("unisono-latch", latch).map_err(|cause| cause.to_string())
    }

    /// Makes what [`DeviceExchange::shut`] and [`DeviceExchange::abort`] need for kernels that write into
    /// other ranks' memory. May wait for the GPU.
    pub(in crate::engine::device) fn prepare_to_latch(&self) -> Result<()> {
        self.parts().prepare_urgent()
    }

    /// Where the kernels' latch lies.
    #[cfg(test)]
    pub fn latch_address(&self) -> u64 {
        self.parts().arena.address()
    }

    fn latch(&self) -> Result<()> {
        let parts = self.parts();
        let Some(stream) = parts.urgent.get() else { return Ok(()) };
        // SAFETY: the arena's first word, which is the kernels' latch; the arena outlives this group's
        // streams.
        unsafe { stream.write_value(parts.arena.address(), 1) }?;
        stream.synchronize(Deadline::after(LATCHING))
    }

    /// Ends the kernels of this rank, now and from now on. Returns at once; from any thread. A kernel that is
    /// launched already and finds all that it waits for does not ask the host, and may still have its results
    /// written: into windows, too, until the latch is set, a moment later; until then it may read what other
    /// ranks of its process have given to broadcasts by stages.
    pub fn abort(self: &Arc<Self>) {
        let parts = self.parts();
        parts.fault.abort();
        if self.pulls.load(Ordering::SeqCst) || lock(&parts.windows).have_been() {
            self.latches.call_once(|| {
                if let Err(cause) = self.latch_aside() {
                    log::debug!(
                        "kernels that are launched already may reach into memory of other ranks: {cause}"
                    );
                }
            });
        }
    }
}
