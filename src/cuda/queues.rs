//! The queues of a device: how many this process has, and whether streams may wait in them for the host.

use std::env;
use std::sync::{LazyLock, MutexGuard, PoisonError};

use super::context::Devices;
use super::stream::Stream;
use crate::error::Result;

/// What the driver reads when it begins.
pub const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// What `unisono-run` has set that to, where it has: what a rank starts that is no rank may want to be
/// without.
pub const SET_BY_LAUNCHER: &str = "UNISONO_RUN_QUEUES";

/// How many the driver makes unless told otherwise,
const ORDINARY: usize = 8;
/// and at most.
pub const MOST: usize = 32;

/// How many streams of a device may wait for the host at a time. The other queues are for streams that wait
/// for those, and for what the host has the device do meanwhile.
pub const WAITING: usize = 16;

/// How many queues of each device this process has.
pub(super) fn of_process() -> usize {
    static QUEUES: LazyLock<usize> =
        LazyLock::new(|| parse(env::var(VARIABLE).ok().as_deref()).unwrap_or(ORDINARY).min(MOST));
    *QUEUES
}

fn parse(value: Option<&str>) -> Option<usize> {
    value?.trim().parse().ok().filter(|queues| *queues > 0)
}

/// Whether there are so many that streams may wait for the host: with fewer, copies that would end the wait
/// may come behind it.
pub fn are_many() -> bool {
    of_process() >= MOST
}

impl Devices {
    /// Whether streams may wait for the host, if they can. Asks no driver.
    pub fn has_many_queues(&self) -> bool {
        self.driver().queues() >= MOST
    }

    /// For whoever is about to give `stream` something that waits for others, until the answer is dropped.
    /// The driver gives a stream that has been idle a queue, and may give two streams the same when two
    /// threads give them something at the same moment: then one waits for what is behind it. So one thread at
    /// a time rouses a stream of a device. Only of that device: whoever gives it something may stand behind
    /// the lock of its context, until another device has done its part. `None` where the stream has something
    /// to do, and a queue: giving it more may take as long as that.
    pub fn rousing(&self, stream: &Stream) -> Result<Option<MutexGuard<'_, ()>>> {
        if !stream.query()? {
            return Ok(None);
        }
        let lock = self.one_rouses(stream.device());
        Ok(lock.map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Whether streams of `device` may wait for the host, which has the device do more before they go on.
    /// Else the host waits: for copies that stand behind a stream which waits for them, that would be for
    /// ever.
    pub fn streams_may_wait(&self, device: u32) -> Result<bool> {
        Ok(self.has_many_queues() && self.driver().can_wait_value(device)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_as_if_it_were_not_there() {
        assert_eq!(parse(None), None);
        for (value, queues) in
            [("32", Some(32)), (" 1 ", Some(1)), ("0", None), ("", None), ("many", None), ("-8", None)]
        {
            assert_eq!(parse(Some(value)), queues, "{value:?}");
        }
    }
}
