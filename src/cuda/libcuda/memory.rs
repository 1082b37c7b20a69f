//! Memory: what an address is, allocating, pinning, copying.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys;

use super::{INVALID_CONTEXT, Libcuda, raw};
use crate::cuda::driver::{ContextHandle, Found, Location, Memory, MemoryCalls, StreamHandle};
use crate::error::Result;

const NOT_INITIALIZED: c_int = sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as c_int;
const HOST: c_uint = sys::CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
const DEVICE: c_uint = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;

impl MemoryCalls for Libcuda {
    fn locate(&self, address: u64) -> Result<Found> {
        use sys::CUpointer_attribute as Attribute;
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_uint,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as c_uint,
        ];
        let (mut kind, mut device, mut managed) = (0 as c_uint, -1 as c_int, 0 as c_uint);
        let (mut buffer, mut base, mut bytes, mut whole) = (0u64, 0u64, 0usize, 0 as c_uint);
        let mut pool = std::ptr::null_mut::<c_void>();
        let mut data: [*mut c_void; 8] = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut managed).cast(),
            (&raw mut buffer).cast(),
            (&raw mut base).cast(),
            (&raw mut bytes).cast(),
            (&raw mut whole).cast(),
            (&raw mut pool).cast(),
        ];
        // SAFETY: fills what `data` points to, each as wide as its attribute or wider. Any address may be
        // asked about.
        let result = unsafe {
            let count = attributes.len() as c_uint;
            (self.calls.cuPointerGetAttributes)(count, attributes.as_mut_ptr(), data.as_mut_ptr(), address)
        };
        match result {
            // It says nothing about the pointer. (Driver 580 answers without a context.)
            INVALID_CONTEXT => return Ok(Found::NoContext),
            // Loaded, but nobody has used it: no device memory exists.
            NOT_INITIALIZED => return Ok(Found::Nowhere),
            result => self.check("cuPointerGetAttributes", result)?,
        }
        let memory = match kind {
            _ if managed != 0 => Memory::Managed,
            HOST => Memory::Host,
            DEVICE => Memory::Device,
            // Zero: memory that CUDA has not heard of.
            _ => return Ok(Found::Nowhere),
        };
        let device = u32::try_from(device).unwrap_or(0);
        // What is allocated in one piece can be shared by a legacy handle, or is a pool's.
        let mapped = memory == Memory::Device && whole & 0xff == 0 && pool.is_null();
        Ok(Found::Here(Location { memory, device, base, bytes: bytes as u64, buffer, mapped }))
    }

    fn allocate_device(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: fills `address`.
        let result = unsafe { (self.calls.cuMemAlloc_v2)(&raw mut address, bytes) };
        self.check("cuMemAlloc", result)
            .map_err(|e| e.context(format_args!("{bytes} bytes of device memory")))?;
        Ok(address)
    }

    unsafe fn free_device(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemFree", unsafe { (self.calls.cuMemFree_v2)(address) })
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let mut address = std::ptr::null_mut();
        // SAFETY: fills `address`.
        let result =
            unsafe { (self.calls.cuMemHostAlloc)(&raw mut address, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        self.check("cuMemHostAlloc", result)
            .map_err(|e| e.context(format_args!("{bytes} bytes of pinned host memory")))?;
        Ok(address.cast())
    }

    unsafe fn free_host(&self, address: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemFreeHost", unsafe { (self.calls.cuMemFreeHost)(address.cast()) })
    }

    unsafe fn fill(&self, address: u64, value: u8, bytes: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuMemsetD8Async)(address, value, bytes, raw(stream.0)) };
        self.check("cuMemsetD8Async", result)
    }

    unsafe fn register_host(&self, address: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            (self.calls.cuMemHostRegister_v2)(address.cast(), bytes, flags)
        };
        self.check("cuMemHostRegister", result)
            .map_err(|e| e.context(format_args!("{bytes} bytes of pinned memory")))
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuMemHostUnregister", unsafe { (self.calls.cuMemHostUnregister)(address.cast()) })
    }

    unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, raw(stream.0)) };
        self.check("cuMemcpyHtoDAsync", result)
    }

    unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, raw(stream.0)) };
        self.check("cuMemcpyDtoHAsync", result)
    }

    unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuMemcpyDtoDAsync_v2)(to, from, bytes, raw(stream.0)) };
        self.check("cuMemcpyDtoDAsync", result)
    }

    unsafe fn copy_on_host(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let (to, from) = (to.expose_provenance() as u64, from.expose_provenance() as u64);
        // SAFETY: the caller's promise. What memory it is the driver tells by the addresses.
        self.check("cuMemcpyAsync", unsafe { (self.calls.cuMemcpyAsync)(to, from, bytes, raw(stream.0)) })
    }

    /// By the one address space that all devices share: the call that takes contexts cannot be captured.
    unsafe fn copy_to_peer(
        &self,
        (to, _): (u64, ContextHandle),
        (from, _): (u64, ContextHandle),
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuMemcpyDtoDAsync_v2)(to, from, bytes, raw(stream.0)) };
        self.check("cuMemcpyDtoDAsync", result)
    }
}
