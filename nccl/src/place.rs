//! Where a communicator's buffers are: on the device that was current when it was made or, if the process
//! says so, in host memory.

use std::sync::{Arc, Once, OnceLock};

use unisono::cuda::context::{self, Devices};
use unisono::settings::switch;

use crate::error::{Result, fail};
use crate::settings;

/// Set to 1, it makes every communicator of the process work on host memory: for programs that are written
/// for NCCL, on machines without GPUs. Calls take NULL for a stream, and complete before they return.
pub(crate) const HOST_VARIABLE: &str = "UNISONO_NCCL_HOST";

/// Where buffers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In host memory; the number stands for a device's.
    Host(u32),
    /// On this device.
    Device(u32),
}

impl Place {
    /// The calling thread's: its current device, or the first one if it has none.
    pub(crate) fn here() -> Result<Place> {
        if on_host()? {
            return Ok(Place::Host(0));
        }
        let devices = devices()?;
        Ok(Place::Device(devices.driver().current_device()?.unwrap_or(0)))
    }

    /// That of device `number`.
    pub(crate) fn of_device(number: u32) -> Result<Place> {
        if on_host()? {
            return Ok(Place::Host(number));
        }
        let devices = devices()?;
        if number >= devices.count() {
            fail!(InvalidArgument, "device {number} does not exist; there are {}", devices.count());
        }
        Ok(Place::Device(number))
    }

    /// The device's number.
    pub(crate) fn number(self) -> u32 {
        match self {
            Place::Host(number) | Place::Device(number) => number,
        }
    }
}

/// How many devices a communicator can be made on; no limit in host memory.
pub(crate) fn device_count() -> Result<Option<u32>> {
    if on_host()? { Ok(None) } else { Ok(Some(devices()?.count())) }
}

/// This machine's devices.
pub(crate) fn devices() -> Result<Arc<Devices>> {
    static APART: Once = Once::new();
    APART.call_once(|| {
        if settings::number("NCCL_P2P_DISABLE").is_some_and(|number| number != 0) {
            context::keep_apart("NCCL_P2P_DISABLE=1");
        }
    });
    Devices::open().map_err(|error| {
        let cause = error.text().strip_prefix("device memory was given, but ").unwrap_or(error.text());
        let cause = cause.trim_end_matches('.');
        unisono::error::Error::new(
            error.status(),
            format!(
                "no GPU can be used: {cause}. Run where the NVIDIA driver is installed and a GPU is visible, or set \
                 {HOST_VARIABLE}=1 to work on host memory"
            ),
        )
    })
}

fn on_host() -> Result<bool> {
    static ON_HOST: OnceLock<Result<bool>> = OnceLock::new();
    let read = || switch(HOST_VARIABLE, unisono::settings::get(HOST_VARIABLE).as_deref());
    ON_HOST.get_or_init(|| Ok(read()?.unwrap_or(false))).clone()
}
