//! Devices and their contexts.

use std::ffi::c_int;

use cudarc::driver::sys;

use super::{INVALID_CONTEXT, Libcuda, links, ordinal, raw};
use crate::cuda::driver::{ContextHandle, DeviceCalls};
use crate::cuda::queues;
use crate::error::{Error, Result, fail};

const ALREADY_ENABLED: c_int = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as c_int;
const ACCESS_UNSUPPORTED: c_int = sys::CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as c_int;
const TOO_MANY_PEERS: c_int = sys::CUresult::CUDA_ERROR_TOO_MANY_PEERS as c_int;

impl DeviceCalls for Libcuda {
    fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: fills `count`.
        self.check("cuDeviceGetCount", unsafe { (self.calls.cuDeviceGetCount)(&raw mut count) })?;
        // A negative count does not exist; none is the same to us.
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn capability(&self, device: u32) -> Result<(i32, i32)> {
        use sys::CUdevice_attribute as Attribute;
        let major = self.attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major, minor))
    }

    fn multiprocessors(&self, device: u32) -> Result<u32> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // A negative count does not exist.
        Ok(u32::try_from(self.attribute(device, attribute)?).unwrap_or(0))
    }

    fn retain_context(&self, device: u32) -> Result<ContextHandle> {
        let mut context = std::ptr::null_mut();
        // SAFETY: fills `context`; a device that does not exist is refused. Ordinals and devices are the same
        // numbers.
        let result = unsafe { (self.calls.cuDevicePrimaryCtxRetain)(&raw mut context, ordinal(device)) };
        self.check("cuDevicePrimaryCtxRetain", result)?;
        Ok(ContextHandle(context.expose_provenance()))
    }

    unsafe fn release_context(&self, device: u32) -> Result<()> {
        // SAFETY: the caller retained it.
        self.check("cuDevicePrimaryCtxRelease", unsafe {
            (self.calls.cuDevicePrimaryCtxRelease_v2)(ordinal(device))
        })
    }

    unsafe fn push_context(&self, context: ContextHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuCtxPushCurrent", unsafe { (self.calls.cuCtxPushCurrent_v2)(raw(context.0)) })
    }

    unsafe fn pop_context(&self) -> Result<()> {
        let mut popped = std::ptr::null_mut();
        // SAFETY: fills `popped`.
        self.check("cuCtxPopCurrent", unsafe { (self.calls.cuCtxPopCurrent_v2)(&raw mut popped) })
    }

    fn current_context(&self) -> Result<Option<ContextHandle>> {
        let mut context = std::ptr::null_mut();
        // SAFETY: fills `context`.
        self.check("cuCtxGetCurrent", unsafe { (self.calls.cuCtxGetCurrent)(&raw mut context) })?;
        Ok((!context.is_null()).then(|| ContextHandle(context.expose_provenance())))
    }

    fn device_uuid(&self, device: u32) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: fills `uuid`; a device that does not exist is refused.
        let result = unsafe { (self.calls.cuDeviceGetUuid_v2)(&raw mut uuid, ordinal(device)) };
        self.check("cuDeviceGetUuid", result)?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    unsafe fn context_device(&self, context: ContextHandle) -> Result<u32> {
        // SAFETY: the caller's promise; pushed and popped here.
        let device = unsafe {
            self.push_context(context)?;
            let device = self.current_device();
            self.pop_context()?;
            device
        };
        match device? {
            Some(device) => Ok(device),
            None => fail!(Cuda, "cuCtxGetDevice answered no device"),
        }
    }

    fn current_device(&self) -> Result<Option<u32>> {
        let mut device = -1;
        // SAFETY: fills `device`.
        let result = unsafe { (self.calls.cuCtxGetDevice)(&raw mut device) };
        if result == INVALID_CONTEXT {
            return Ok(None);
        }
        self.check("cuCtxGetDevice", result)?;
        Ok(u32::try_from(device).ok())
    }

    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool> {
        let mut can = 0;
        // SAFETY: fills `can`; devices that do not exist are refused.
        let result =
            unsafe { (self.calls.cuDeviceCanAccessPeer)(&raw mut can, ordinal(device), ordinal(peer)) };
        self.check("cuDeviceCanAccessPeer", result)?;
        Ok(can != 0)
    }

    fn stores_lines_whole(&self, device: u32, peer: [u8; 16]) -> Result<bool> {
        let own = self.device_uuid(device)?;
        if own == peer {
            return Ok(true);
        }
        for other in 0..self.device_count()? {
            // What the links of NVIDIA's GPUs have in common that support atomic operations: they are
            // NVLinks.
            if self.device_uuid(other)? == peer && self.has_native_atomics(device, other)? {
                return Ok(true);
            }
        }
        Ok(links::are_linked(own, peer))
    }

    unsafe fn enable_peer_access(&self, peer: ContextHandle) -> Result<Option<Error>> {
        const CALL: &str = "cuCtxEnablePeerAccess";
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuCtxEnablePeerAccess)(raw(peer.0), 0) };
        match result {
            ALREADY_ENABLED => Ok(None),
            TOO_MANY_PEERS | ACCESS_UNSUPPORTED => Ok(Some(self.error(CALL, result))),
            result => self.check(CALL, result).map(|()| None),
        }
    }

    fn queues(&self) -> usize {
        queues::of_process()
    }

    fn can_wait_value(&self, device: u32) -> Result<bool> {
        // Devices that have the one have the 32-bit operations, which nothing else tells since CUDA 12.
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        Ok(self.attribute(device, attribute)? != 0)
    }
}

impl Libcuda {
    fn attribute(&self, device: u32, attribute: sys::CUdevice_attribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: fills `value`; a device that does not exist is refused.
        let result =
            unsafe { (self.calls.cuDeviceGetAttribute)(&raw mut value, attribute as c_int, ordinal(device)) };
        self.check("cuDeviceGetAttribute", result)?;
        Ok(value)
    }

    /// Whether the link from `device` to `peer` carries atomic operations.
    fn has_native_atomics(&self, device: u32, peer: u32) -> Result<bool> {
        let attribute = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let mut value = 0;
        // SAFETY: fills `value`; devices that do not exist are refused.
        let result = unsafe {
            (self.calls.cuDeviceGetP2PAttribute)(
                &raw mut value,
                attribute as c_int,
                ordinal(device),
                ordinal(peer),
            )
        };
        self.check("cuDeviceGetP2PAttribute", result)?;
        Ok(value != 0)
    }
}
