//! Device memory that another process maps.

use std::ffi::{c_char, c_int, c_uint};

use cudarc::driver::sys;

use super::Libcuda;
use crate::cuda::driver::{MemoryHandle, SharingCalls};
use crate::error::Result;

impl SharingCalls for Libcuda {
    fn is_shareable(&self, address: u64) -> Result<bool> {
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_int;
        let mut capable: c_int = 0;
        // SAFETY: fills `capable`: a bool, or an int as the driver has it. Any address may be asked about.
        let result =
            unsafe { (self.calls.cuPointerGetAttribute)((&raw mut capable).cast(), attribute, address) };
        self.check("cuPointerGetAttribute", result)?;
        Ok(capable != 0)
    }

    unsafe fn export_memory(&self, address: u64) -> Result<MemoryHandle> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: fills `handle`; the caller's promise.
        let result = unsafe { (self.calls.cuIpcGetMemHandle)(&raw mut handle, address) };
        self.check("cuIpcGetMemHandle", result)?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn open_memory(&self, handle: &MemoryHandle) -> Result<u64> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut address = 0;
        // SAFETY: fills `address`; a handle that means nothing is refused.
        let result = unsafe { (self.calls.cuIpcOpenMemHandle_v2)(&raw mut address, handle, flags) };
        self.check("cuIpcOpenMemHandle", result)?;
        Ok(address)
    }

    unsafe fn close_memory(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuIpcCloseMemHandle", unsafe { (self.calls.cuIpcCloseMemHandle)(address) })
    }
}
