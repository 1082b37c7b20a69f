//! The CUDA driver of this machine: libcuda, opened at run time.
//!
//! cudarc lends the types. Its loader is not used: it tries `libcuda.so` first, which may be the toolkit's stub, panics
//! at a missing symbol, and its result type is a closed enum, where a code that it has not heard of is undefined
//! behaviour. Here every function returns a plain integer, and every symbol is there before the first call.

pub mod measuring;
mod symbols;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use once_cell::sync::OnceCell;
use symbols::Calls;

use super::driver::{
    Capture, CaptureMode, ContextHandle, Driver, EventHandle, FunctionHandle, Grid, HostFunction, Location,
    Memory, MemoryHandle, ModuleHandle, Priority, StreamHandle,
};
use crate::error::{Error, Result, Status, fail};

/// What the driver is loaded as.
const LIBRARY: &CStr = c"libcuda.so.1";

/// The functions, once the library is loaded by anybody. Nothing unloads it after that: we hold a reference.
static LOADED: OnceCell<Arc<Libcuda>> = OnceCell::new();

/// The functions, once `cuInit` succeeded.
static READY: OnceCell<Arc<Libcuda>> = OnceCell::new();

/// The number of libraries that this process had ever loaded when libcuda was last found not to be among them.
static ABSENT_AT: AtomicU64 = AtomicU64::new(0);

/// The driver's functions.
pub struct Libcuda {
    calls: Calls,
    /// `cuFuncLoad`, since 12.4. Drivers before that load a kernel when it is looked up.
    load_function: Option<LoadFunction>,
    /// A context to ask about pointers with, on threads that have none.
    fallback: OnceCell<ContextHandle>,
}

type LoadFunction = unsafe extern "C" fn(sys::CUfunction) -> c_int;

impl Libcuda {
    /// Loads and initialises the driver. The first success is kept; a failure is tried again by the next call.
    pub fn open() -> Result<Arc<Libcuda>> {
        READY
            .get_or_try_init(|| {
                let cuda = LOADED.get_or_try_init(|| Libcuda::load(0))?;
                // SAFETY: takes no pointers.
                cuda.check("cuInit", unsafe { (cuda.calls.cuInit)(0) })?;
                Ok(cuda.clone())
            })
            .cloned()
    }

    /// What CUDA knows of an address, asked by calls that may be given either memory.
    ///
    /// Where nobody has loaded libcuda there is no device memory, and this neither loads it nor looks further than
    /// the count of libraries that the process has loaded.
    pub fn locate_if_loaded(address: u64) -> Result<Option<Location>> {
        match Libcuda::loaded() {
            Some(cuda) => cuda.locate(address),
            None => Ok(None),
        }
    }

    /// Whether the library is in this process already.
    pub fn is_loaded() -> bool {
        Libcuda::loaded().is_some()
    }

    /// The functions, if the library is in this process already.
    fn loaded() -> Option<&'static Arc<Libcuda>> {
        if let Some(cuda) = LOADED.get() {
            return Some(cuda);
        }
        // Counted before it is looked for: who loads it in between changes the count.
        let libraries = libraries_ever_loaded();
        if ABSENT_AT.load(Ordering::Relaxed) == libraries {
            return None;
        }
        let found = LOADED.get_or_try_init(|| Libcuda::load(libc::RTLD_NOLOAD)).ok();
        if found.is_none() {
            // Asking with RTLD_NOLOAD loads nothing, so the count still stands for what was seen.
            ABSENT_AT.store(libraries, Ordering::Relaxed);
        }
        found
    }

    fn load(flags: c_int) -> Result<Arc<Libcuda>> {
        // SAFETY: a C string, and a library whose constructors NVIDIA made for being loaded at any time.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | flags) };
        if library.is_null() {
            // SAFETY: takes no pointers; the answer is NULL or a C string that this thread's next dl call ends.
            let cause = unsafe { text(libc::dlerror()) };
            let cause = cause.as_deref().unwrap_or("libcuda.so.1: not found");
            let cause = cause.strip_suffix(": No such file or directory").unwrap_or(cause);
            fail!(Cuda, "device memory was given, but no CUDA driver could be loaded ({cause}).");
        }
        // SAFETY: an open library and a C string.
        let symbol = unsafe { libc::dlsym(library, c"cuFuncLoad".as_ptr()) };
        // SAFETY: a symbol of this name has this signature; a CUresult is an int.
        let load_function =
            (!symbol.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, LoadFunction>(symbol) });
        // SAFETY: an open library, which stays open.
        let calls = unsafe { Calls::resolve(library) }?;
        Ok(Arc::new(Libcuda { calls, load_function, fallback: OnceCell::new() }))
    }

    /// [`Driver::launch`] of a kernel that may be launched before the one ahead of it has ended.
    ///
    /// # Safety
    /// As there.
    unsafe fn launch_overlapping(
        &self,
        function: FunctionHandle,
        grid: Grid,
        stream: StreamHandle,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: raw(stream.0),
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: the caller's promise; config and parameters are copied before the call returns.
        let result = unsafe {
            (self.calls.cuLaunchKernelEx)(
                &raw const config,
                raw(function.0),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernelEx", result)
    }

    fn attribute(&self, device: u32, attribute: sys::CUdevice_attribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: fills `value`; a device that does not exist is refused.
        let result =
            unsafe { (self.calls.cuDeviceGetAttribute)(&raw mut value, attribute as c_int, ordinal(device)) };
        self.check("cuDeviceGetAttribute", result)?;
        Ok(value)
    }

    /// Makes an error of any result but success.
    fn check(&self, call: &'static str, result: c_int) -> Result<()> {
        if result == SUCCESS { Ok(()) } else { Err(self.error(call, result)) }
    }

    #[cold]
    fn error(&self, call: &'static str, result: c_int) -> Error {
        let describe = |ask: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut answer = std::ptr::null();
            // SAFETY: any number may be asked about; the answer is NULL or a constant of the library.
            unsafe {
                let known = ask(result, &raw mut answer) == SUCCESS;
                if known { text(answer) } else { None }
            }
        };
        let name = describe(self.calls.cuGetErrorName).unwrap_or_else(|| "an unknown CUresult".into());
        let text = describe(self.calls.cuGetErrorString).unwrap_or_else(|| "no description".into());
        let status = if result == OUT_OF_MEMORY { Status::OutOfMemory } else { Status::Cuda };
        Error::new(status, format!("{call} failed: {name} ({result}): {text}"))
    }
}

const SUCCESS: c_int = sys::CUresult::CUDA_SUCCESS as c_int;
const OUT_OF_MEMORY: c_int = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;

impl Driver for Libcuda {
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
        // SAFETY: fills `context`; a device that does not exist is refused. Ordinals and devices are the same numbers.
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

    unsafe fn enable_peer_access(&self, peer: ContextHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuCtxEnablePeerAccess)(raw(peer.0), 0) };
        if result == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as c_int {
            return Ok(());
        }
        self.check("cuCtxEnablePeerAccess", result)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        use sys::CUstreamCaptureMode as Mode;
        let mut number = match mode {
            CaptureMode::Global => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        } as c_uint;
        // SAFETY: reads and fills `number`.
        let result = unsafe { (self.calls.cuThreadExchangeStreamCaptureMode)(&raw mut number) };
        self.check("cuThreadExchangeStreamCaptureMode", result)?;
        match number {
            0 => Ok(CaptureMode::Global),
            1 => Ok(CaptureMode::ThreadLocal),
            2 => Ok(CaptureMode::Relaxed),
            _ => fail!(Cuda, "cuThreadExchangeStreamCaptureMode answered {number}, a mode we do not know"),
        }
    }

    fn locate(&self, address: u64) -> Result<Option<Location>> {
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
        let mut ask = || {
            let count = attributes.len() as c_uint;
            // SAFETY: fills what `data` points to, each as wide as its attribute or wider. Any address may be asked about.
            unsafe {
                (self.calls.cuPointerGetAttributes)(
                    count,
                    attributes.as_mut_ptr(),
                    data.as_mut_ptr(),
                    address,
                )
            }
        };
        let result = match ask() {
            // No context is current on this thread, which says nothing about the pointer.
            INVALID_CONTEXT => {
                // Never released: making one takes long.
                let context = *self.fallback.get_or_try_init(|| self.retain_context(0))?;
                // SAFETY: retained, pushed and popped here.
                unsafe {
                    self.push_context(context)?;
                    let result = ask();
                    self.pop_context()?;
                    result
                }
            }
            result => result,
        };
        if result == NOT_INITIALIZED {
            // Loaded, but nobody has used it: no device memory exists.
            return Ok(None);
        }
        self.check("cuPointerGetAttributes", result)?;
        let memory = match kind {
            _ if managed != 0 => Memory::Managed,
            HOST => Memory::Host,
            DEVICE => Memory::Device,
            // Zero: memory that CUDA has not heard of.
            _ => return Ok(None),
        };
        let device = u32::try_from(device).unwrap_or(0);
        // What is allocated in one piece can be shared by a legacy handle, or is a pool's.
        let mapped = memory == Memory::Device && whole & 0xff == 0 && pool.is_null();
        Ok(Some(Location { memory, device, base, bytes: bytes as u64, buffer, mapped }))
    }

    fn create_stream(&self, blocking: bool, priority: Priority) -> Result<StreamHandle> {
        use sys::CUstream_flags as Flags;
        let flags = if blocking { Flags::CU_STREAM_DEFAULT } else { Flags::CU_STREAM_NON_BLOCKING } as c_uint;
        // The smaller, the higher. Streams are ordinary at 0.
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: fills both.
        let result = unsafe { (self.calls.cuCtxGetStreamPriorityRange)(&raw mut lowest, &raw mut highest) };
        self.check("cuCtxGetStreamPriorityRange", result)?;
        let priority = match priority {
            Priority::Ordinary => 0,
            Priority::High => highest.saturating_add(1).min(0),
            Priority::Highest => highest,
        };
        let mut stream = std::ptr::null_mut();
        // SAFETY: fills `stream`.
        let result = unsafe { (self.calls.cuStreamCreateWithPriority)(&raw mut stream, flags, priority) };
        self.check("cuStreamCreateWithPriority", result)?;
        Ok(StreamHandle(stream.expose_provenance()))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuStreamDestroy", unsafe { (self.calls.cuStreamDestroy_v2)(raw(stream.0)) })
    }

    unsafe fn stream_device(&self, stream: StreamHandle) -> Result<u32> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; fills `context`.
        let result = unsafe { (self.calls.cuStreamGetCtx)(raw(stream.0), &raw mut context) };
        self.check("cuStreamGetCtx", result)?;
        let mut device = -1;
        // SAFETY: the stream keeps its context; pushed and popped here.
        unsafe {
            self.push_context(ContextHandle(context.expose_provenance()))?;
            let result = (self.calls.cuCtxGetDevice)(&raw mut device);
            self.pop_context()?;
            self.check("cuCtxGetDevice", result)?;
        }
        match u32::try_from(device) {
            Ok(device) => Ok(device),
            Err(_) => fail!(Cuda, "cuCtxGetDevice answered device {device}"),
        }
    }

    unsafe fn stream_id(&self, stream: StreamHandle) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the caller's promise; fills `id`.
        self.check("cuStreamGetId", unsafe { (self.calls.cuStreamGetId)(raw(stream.0), &raw mut id) })?;
        Ok(id)
    }

    unsafe fn query_stream(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamQuery)(raw(stream.0)) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.check("cuStreamQuery", result)?;
        Ok(true)
    }

    unsafe fn stream_capture(&self, stream: StreamHandle) -> Result<Capture> {
        let (mut status, mut id) = (0 as c_uint, 0u64);
        let none = std::ptr::null_mut;
        // SAFETY: the caller's promise; fills `status` and `id`, and the outputs that are NULL may be.
        let result = unsafe {
            (self.calls.cuStreamGetCaptureInfo_v2)(
                raw(stream.0),
                &raw mut status,
                &raw mut id,
                none(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuStreamGetCaptureInfo", result)?;
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active(id),
            _ => Capture::Invalidated,
        })
    }

    fn create_event(&self) -> Result<EventHandle> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let mut event = std::ptr::null_mut();
        // SAFETY: fills `event`.
        self.check("cuEventCreate", unsafe { (self.calls.cuEventCreate)(&raw mut event, flags) })?;
        Ok(EventHandle(event.expose_provenance()))
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventDestroy", unsafe { (self.calls.cuEventDestroy_v2)(raw(event.0)) })
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventRecord", unsafe { (self.calls.cuEventRecord)(raw(event.0), raw(stream.0)) })
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamWaitEvent)(raw(stream.0), raw(event.0), 0) };
        self.check("cuStreamWaitEvent", result)
    }

    unsafe fn query_event(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuEventQuery)(raw(event.0)) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.check("cuEventQuery", result)?;
        Ok(true)
    }

    unsafe fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventSynchronize", unsafe { (self.calls.cuEventSynchronize)(raw(event.0)) })
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

    fn can_wait_value(&self, device: u32) -> Result<bool> {
        use sys::CUdevice_attribute as Attribute;
        // Devices that have the one have the 32-bit operations, which nothing else tells since CUDA 12.
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as c_int;
        let mut can = 0;
        // SAFETY: fills `can`; a device that does not exist is refused.
        let result = unsafe { (self.calls.cuDeviceGetAttribute)(&raw mut can, attribute, ordinal(device)) };
        self.check("cuDeviceGetAttribute", result)?;
        Ok(can != 0)
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

    unsafe fn write_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        // SAFETY: the caller's promise. Flag 0 keeps the order with everything before it.
        let result = unsafe { (self.calls.cuStreamWriteValue32_v2)(raw(stream.0), address, value, 0) };
        self.check("cuStreamWriteValue32", result)
    }

    unsafe fn wait_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamWaitValue32_v2)(raw(stream.0), address, value, flags) };
        self.check("cuStreamWaitValue32", result)
    }

    unsafe fn launch_host(
        &self,
        stream: StreamHandle,
        function: HostFunction,
        user: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuLaunchHostFunc", unsafe {
            (self.calls.cuLaunchHostFunc)(raw(stream.0), function, user)
        })
    }

    unsafe fn load_module(&self, image: &[u8]) -> Result<ModuleHandle> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the caller's promise; a cubin tells its own length, PTX ends with a zero.
        let result = unsafe { (self.calls.cuModuleLoadData)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", result)?;
        Ok(ModuleHandle(module.expose_provenance()))
    }

    unsafe fn function(&self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        let result =
            unsafe { (self.calls.cuModuleGetFunction)(&raw mut function, raw(module.0), name.as_ptr()) };
        self.check("cuModuleGetFunction", result)
            .map_err(|e| e.context(format_args!("kernel {}", name.to_string_lossy())))?;
        Ok(FunctionHandle(function.expose_provenance()))
    }

    unsafe fn load_function(&self, function: FunctionHandle) -> Result<()> {
        let Some(load) = self.load_function else { return Ok(()) };
        // SAFETY: the caller's promise.
        self.check("cuFuncLoad", unsafe { load(raw(function.0)) })
    }

    unsafe fn launch(
        &self,
        function: FunctionHandle,
        grid: Grid,
        stream: StreamHandle,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        if grid.overlaps {
            // SAFETY: the caller's promise.
            return unsafe { self.launch_overlapping(function, grid, stream, parameters) };
        }
        // SAFETY: the caller's promise; the parameters are copied before the call returns.
        let result = unsafe {
            (self.calls.cuLaunchKernel)(
                raw(function.0),
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                grid.shared,
                raw(stream.0),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", result)
    }
}

impl fmt::Debug for Libcuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Libcuda")
    }
}

const NOT_INITIALIZED: c_int = sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as c_int;
const INVALID_CONTEXT: c_int = sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as c_int;
const HOST: c_uint = sys::CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
const DEVICE: c_uint = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;

/// A handle as the driver knows it.
fn raw<T>(handle: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(handle)
}

/// A device as the driver counts it. What does not fit becomes a number that the driver refuses.
fn ordinal(device: u32) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

/// A copy of a C string, if there is one.
///
/// # Safety
/// `text` is NULL or a C string.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// How many libraries this process has loaded since it began; it grows with every `dlopen` that maps something.
fn libraries_ever_loaded() -> u64 {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: libc::size_t, count: *mut c_void) -> c_int {
        // SAFETY: the loader gives a filled structure, and `count` is what was given below.
        unsafe { *count.cast::<u64>() = (*info).dlpi_adds };
        // One library is enough: the count is the same in all.
        1
    }
    let mut count = 0u64;
    // SAFETY: `first` writes the u64 that it is given.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_pointer_is_not_device_memory() {
        let here = 7u8;
        let address = (&raw const here).addr() as u64;
        assert_eq!(Libcuda::locate_if_loaded(address).unwrap(), None);
        // A second time, by the count of libraries.
        assert_eq!(Libcuda::locate_if_loaded(address).unwrap(), None);
    }

    #[test]
    fn without_a_driver_the_status_says_so() {
        if let Err(error) = Libcuda::open() {
            // Either there is no driver, or there is one without a device that it can use.
            assert_eq!(error.status(), Status::Cuda);
            let expected = [
                "device memory was given, but no CUDA driver could be loaded (libcuda.so.1: ",
                "cuInit failed: CUDA_ERROR_",
            ];
            assert!(expected.iter().any(|start| error.text().starts_with(start)), "{error}");
        }
    }
}
