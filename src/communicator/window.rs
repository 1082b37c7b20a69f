//! Windows: device memory that the other ranks' kernels read and write where it is.

use std::sync::{Arc, Weak};

use super::context::{Context, Place};
use super::device::connect_devices;
use crate::cuda::driver::Memory;
use crate::engine::device::{DeviceExchange, Registration, Way};
use crate::engine::endpoint::lock;
use crate::error::{Result, fail};

/// A rank's part of a window: ended when dropped. Dropping waits for no other rank.
#[derive(Debug)]
pub struct Window {
    /// None where GPUs do not exchange, or do not map this memory.
    served: Option<(Weak<DeviceExchange>, u64)>,
}

impl Context {
    /// Collective: makes `bytes` bytes of device memory from `address` on a window. Collectives of the ranks' GPUs stage nothing where
    /// windows hold what they share and they gain by it: the outputs of allgather, all-to-all and broadcast, the inputs of
    /// reduce_scatter, both of allreduce; for how many bytes is in the table ([`crate::cuda::exchange::WindowBounds`]).
    /// Where GPUs do not exchange, or the memory cannot be mapped (it is not from cudaMalloc, cuMemAlloc or ncclMemAlloc),
    /// a window changes nothing.
    ///
    /// The ranks promise: in every call, either all of them have what it shares in windows, or none has; and a window is made, and
    /// ended, on all of them between the same two calls. A rank that breaks it gets, and all others get, a
    /// mismatch. The memory stays allocated until the window is ended and everything that used it is done, graphs too.
    ///
    /// May wait for the device.
    pub fn register_window(&self, address: u64, bytes: u64) -> Result<Window> {
        if address == 0 || bytes == 0 {
            fail!(InvalidArgument, "a window has memory: {bytes} bytes from {address:#x} on are none");
        }
        if address.checked_add(bytes).is_none() {
            fail!(InvalidArgument, "{bytes} bytes from {address:#x} on end beyond the address space");
        }
        let Some(device) = self.cuda().locate(address)?.filter(|found| found.memory == Memory::Device) else {
            fail!(InvalidArgument, "{address:#x} is no device memory: windows are")
        };
        let Place::Group(group) = self.place() else { return Ok(Window { served: None }) };
        if group.devices().is_none() {
            connect_devices(&[(self, device.device)])?;
        }
        let Some(Way::Exchange(exchange)) = group.devices() else { return Ok(Window { served: None }) };
        self.register_at(exchange, address, bytes)
    }

    /// [`Context::register_window`] where the GPUs exchange.
    pub(super) fn register_at(
        &self,
        exchange: &Arc<DeviceExchange>,
        address: u64,
        bytes: u64,
    ) -> Result<Window> {
        let Place::Group(group) = self.place() else { return Ok(Window { served: None }) };
        let mut registration = Registration::begin(exchange, self.rank(), address, bytes)?;
        // Its two rounds are not to be mixed with those of another thread's window.
        let _turn = lock(group.connecting());
        let offers = self.gather_all(group, &registration.message())?;
        registration.map(&offers)?;
        let mapped = self.gather_all(group, &registration.message())?;
        Ok(match registration.finish(&mapped)? {
            Ok(number) => Window { served: Some((Arc::downgrade(exchange), number)) },
            Err(why) => {
                log::info!("group '{}': a window serves no calls, because of {why}", self.name());
                Window { served: None }
            }
        })
    }
}

impl Window {
    /// Whether calls are written there directly: the same on every rank.
    pub fn serves(&self) -> bool {
        self.served.is_some()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some((exchange, number)) = &self.served
            && let Some(exchange) = exchange.upgrade()
        {
            exchange.end_window(*number);
        }
    }
}
