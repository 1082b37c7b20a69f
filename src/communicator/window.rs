//! Windows: device memory that the other ranks' kernels read and write where it is.

use std::sync::{Arc, Weak};

use super::context::{Context, Membership};
use super::device::{Candidate, choose, connect};
use crate::cuda::driver::Memory;
use crate::engine::device::{DeviceExchange, Registration, Way};
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::error::{Error, Result, Status, fail};
use crate::signature::Making;

/// A rank's part of a window: ended when dropped. Dropping waits for no other rank.
#[derive(Debug, Default)]
pub struct Window {
    /// None where GPUs do not exchange, or do not map this memory.
    served: Option<(Weak<DeviceExchange>, u64)>,
    /// Whose calls use it.
    group: Weak<Group>,
}

impl Context {
    /// Collective: makes `bytes` bytes of device memory from `address` on a window. Collectives of the ranks'
    /// GPUs stage nothing where windows hold what they share and they gain by it: the outputs of allgather,
    /// all-to-all and broadcast, the inputs of reduce_scatter, both of allreduce; for how many bytes is in
    /// the table ([`crate::cuda::exchange::WindowBounds`]). Where GPUs do not exchange, or the memory cannot
    /// be mapped (it is not from cudaMalloc, cuMemAlloc or ncclMemAlloc), a window changes nothing. Where
    /// GPUs exchange and a rank gives what is no memory of its GPU, all get an error that names it, at once.
    ///
    /// The ranks promise: in every call, either all of them have what it shares in windows, or none has; and
    /// a window is made, and ended, on all of them between the same two calls. A rank that breaks it gets,
    /// and all others get, a mismatch. The memory stays allocated until the window is ended and everything
    /// that used it is done, graphs too.
    ///
    /// May wait for the device.
    pub fn register_window(&self, address: u64, bytes: u64) -> Result<Window> {
        let found = self.device_of_window(address, bytes);
        let Membership::Group(group) = self.membership() else { return found.map(|_| Window::default()) };
        if group.devices().is_none() {
            self.connect_for_window(&found)?;
        }
        let Some(Way::Exchange(exchange)) = group.devices() else {
            return found.map(|_| Window::default());
        };
        self.register_at(exchange, found.map(|_| (address, bytes)))
    }

    /// The device whose memory this is.
    fn device_of_window(&self, address: u64, bytes: u64) -> Result<u32> {
        if address == 0 || bytes == 0 {
            fail!(InvalidArgument, "a window has memory: {bytes} bytes from {address:#x} on are none");
        }
        if address.checked_add(bytes).is_none() {
            fail!(InvalidArgument, "{bytes} bytes from {address:#x} on end beyond the address space");
        }
        let Some(device) = self.cuda().locate(address)?.filter(|found| found.memory == Memory::Device) else {
            fail!(InvalidArgument, "{address:#x} is no device memory: windows are")
        };
        Ok(device.device)
    }

    /// Has the GPUs agree, which the ranks have not done before. One whose window is refused takes part, and
    /// says so.
    fn connect_for_window(&self, found: &Result<u32>) -> Result<()> {
        let (device, refused) = match found {
            Ok(device) => (*device, None),
            Err(error) => (0, Some(error)),
        };
        let devices = || match refused {
            None => self.cuda().devices().cloned(),
            // Nothing else is an error everywhere: else the ranks would agree to do without their GPUs.
            Some(error) => Err(Error::new(Status::InvalidArgument, error.text())),
        };
        // Messages stay where those of host memory are, and those from any rank.
        let candidate = Candidate { context: self, device, first: None, points: false };
        let connected = connect(&[candidate], devices, choose, self.cuda().loads());
        // This rank's caller hears of its own first.
        connected.map_err(|error| refused.cloned().unwrap_or(error))
    }

    /// [`Context::register_window`] where the GPUs exchange; `memory` may have been refused.
    pub(super) fn register_at(
        &self,
        exchange: &Arc<DeviceExchange>,
        memory: Result<(u64, u64)>,
    ) -> Result<Window> {
        let Membership::Group(group) = self.membership() else { return memory.map(|_| Window::default()) };
        let mut registration = Registration::begin(exchange, self.rank(), memory);
        // Its two rounds are not to be mixed with those of another thread's window.
        let _turn = lock(group.connecting());
        let offers = self.gather_all(group, &registration.message(), Making::Window)?;
        registration.map(&offers)?;
        let mapped = self.gather_all(group, &registration.message(), Making::Window)?;
        Ok(match registration.finish(&mapped)? {
            Ok(number) => {
                Window { served: Some((Arc::downgrade(exchange), number)), group: Arc::downgrade(group) }
            }
            Err(why) => {
                log::info!("group '{}': a window serves no calls, because of {why}", self.name());
                Window::default()
            }
        })
    }
}

impl Window {
    /// Whether calls are written there directly: the same on every rank.
    pub fn serves(&self) -> bool {
        self.served.is_some()
    }

    /// Its number, among the windows of `exchange`.
    pub(super) fn number(&self, exchange: &Arc<DeviceExchange>) -> Result<u64> {
        match &self.served {
            Some((of, number)) if Weak::as_ptr(of) == Arc::as_ptr(exchange) => Ok(*number),
            Some(_) => fail!(InvalidArgument, "the window is one of another communicator"),
            None => {
                fail!(InvalidUsage, "not all ranks' GPUs have mapped the window, so nothing can be put there")
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some((exchange, number)) = &self.served
            && let Some(exchange) = exchange.upgrade()
            && exchange.end_window(*number)
            && let Some(group) = self.group.upgrade()
        {
            group.endpoint().watch_devices();
        }
    }
}
