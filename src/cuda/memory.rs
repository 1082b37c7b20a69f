//! Memory of our own: on a device, and on the host where devices copy from and to.

use std::ptr::NonNull;
use std::sync::Arc;

use super::context::Devices;
use crate::error::{Error, Result, Status};
use crate::sys::memory::Mapping;

/// Device memory, freed on drop. Whoever gave it to a stream keeps it until the stream is done with it.
#[derive(Debug)]
pub struct DeviceBuffer {
    devices: Arc<Devices>,
    device: u32,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// `bytes` bytes of `device`, at least one, with any contents. May wait for the device: not while kernels
    /// of ours wait for each other.
    pub fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<DeviceBuffer> {
        let address = {
            let _relaxed = devices.relax()?;
            let _entered = devices.enter(device)?;
            let allocated = devices.driver().allocate_device(bytes.max(1));
            allocated.map_err(|error| error.context(format_args!("GPU {device}")))?
        };
        Ok(DeviceBuffer { devices: devices.clone(), device, address, bytes })
    }

    /// The device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let freed = self.devices.relax().and_then(|_relaxed| {
            let _entered = self.devices.enter(self.device)?;
            // SAFETY: ours, and nobody uses it after this.
            unsafe { self.devices.driver().free_device(self.address) }
        });
        if let Err(error) = freed {
            log::warn!("{error}");
        }
    }
}

/// Pinned host memory, freed on drop. Every device copies from and to it. Whoever gave it to a stream keeps
/// it until the stream is done with it.
#[derive(Debug)]
pub struct PinnedBuffer {
    devices: Arc<Devices>,
    device: u32,
    address: *mut u8,
    bytes: usize,
}

// SAFETY: it is an address range, valid in every thread; who touches which byte when is up to its users.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; the methods only tell the address.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` bytes, at least one, with any contents. `device` is any that will use it.
    pub fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<PinnedBuffer> {
        let address = {
            let _relaxed = devices.relax()?;
            let _entered = devices.enter(device)?;
            devices.driver().allocate_host(bytes.max(1))?
        };
        Ok(PinnedBuffer { devices: devices.clone(), device, address, bytes })
    }

    /// The first byte.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let freed = self.devices.relax().and_then(|_relaxed| {
            let _entered = self.devices.enter(self.device)?;
            // SAFETY: ours, and nobody uses it after this.
            unsafe { self.devices.driver().free_host(self.address) }
        });
        if let Err(error) = freed {
            log::warn!("{error}");
        }
    }
}

/// What memory is pinned in.
const PAGE: usize = 4096;

/// Host memory of somebody else's that is pinned: devices copy from and to it, and their kernels read and
/// write it at its own address. Ended on drop, which may wait for the devices.
#[derive(Debug)]
pub struct Registration {
    devices: Arc<Devices>,
    device: u32,
    address: *mut u8,
}

// SAFETY: it is an address range, valid in every thread; who touches which byte when is up to its users.
unsafe impl Send for Registration {}
// SAFETY: as above; nothing is done with it but to end it.
unsafe impl Sync for Registration {}

impl Registration {
    /// Pins whole pages. `device` is any that will use them.
    ///
    /// # Safety
    /// They are mapped, and stay so until this is dropped.
    pub unsafe fn new(
        devices: &Arc<Devices>,
        device: u32,
        address: *mut u8,
        bytes: usize,
    ) -> Result<Registration> {
        let _relaxed = devices.relax()?;
        let _entered = devices.enter(device)?;
        // SAFETY: the caller's promise.
        unsafe { devices.driver().register_host(address, bytes) }?;
        Ok(Registration { devices: devices.clone(), device, address })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let unregistered = self.devices.relax().and_then(|_relaxed| {
            let _entered = self.devices.enter(self.device)?;
            // SAFETY: registered by `new`, and nobody uses it after this.
            unsafe { self.devices.driver().unregister_host(self.address) }
        });
        if let Err(error) = unregistered {
            log::warn!("{error}");
        }
    }
}

/// Ordinary memory of this process, pinned: devices copy from and to it, and so may other processes of the
/// host with process_vm_readv, which cannot read what the driver allocates. Children made by fork do not have
/// it. Freed on drop, which may wait for the devices.
#[derive(Debug)]
pub struct RegisteredBuffer {
    /// Ends before the mapping.
    _registration: Registration,
    mapping: Mapping,
}

impl RegisteredBuffer {
    /// `bytes` zero bytes, rounded up to pages. `device` is any that will use it.
    pub fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<RegisteredBuffer> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let mapping = Mapping::unshared(bytes)
            .map_err(|e| Error::new(Status::OutOfMemory, format!("{bytes} bytes to be pinned: {e}")))?;
        // SAFETY: just mapped, and stays so until the registration has ended.
        let registration = unsafe { Registration::new(devices, device, start(&mapping), bytes) }?;
        Ok(RegisteredBuffer { _registration: registration, mapping })
    }

    /// The first byte.
    pub fn address(&self) -> *mut u8 {
        start(&self.mapping)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }
}

fn start(mapping: &Mapping) -> *mut u8 {
    // PROOF: offset 0 lies inside every mapping.
    mapping.address(0, 0).map_or(std::ptr::null_mut(), NonNull::as_ptr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::double::{Double, Order};
    use crate::sys::fork::tests::in_a_child;
    use crate::transport::memory::is_readable;

    #[test]
    fn a_forked_child_has_no_memory_that_its_parent_has_pinned() {
        let devices = Devices::over(Double::new(1, Order::Eager)).expect("a driver");
        let buffer = RegisteredBuffer::new(&devices, 0, 3 * PAGE).expect("memory");
        let (address, bytes) = (buffer.address(), buffer.bytes());
        assert!(is_readable(address, bytes));
        let mut inherited = Some(buffer);
        assert!(in_a_child(|| {
            if (0..bytes).step_by(PAGE).any(|at| is_readable(address.wrapping_add(at), 1)) {
                return false;
            }
            // What the child maps there is its own, also when it ends what it has from its parent.
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: nothing is mapped there, as was just seen.
            let mapped = unsafe {
                libc::mmap(address.cast(), bytes, protection, flags | libc::MAP_FIXED_NOREPLACE, -1, 0)
            };
            drop(inherited.take());
            mapped == address.cast() && is_readable(address, bytes)
        }));
        drop(inherited);
        assert!(!is_readable(address, bytes), "it is given back where it was made");
    }
}
