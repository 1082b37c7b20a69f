//! Modules, their kernels, and functions that a stream calls.

use std::ffi::{CStr, c_int, c_void};

use cudarc::driver::sys;

use super::{Libcuda, raw};
use crate::cuda::driver::{FunctionHandle, Grid, HostFunction, LaunchCalls, ModuleHandle, StreamHandle};
use crate::error::Result;

/// PTX has a version that the driver does not know yet.
const TEXT_TOO_NEW: c_int = sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_int;

impl LaunchCalls for Libcuda {
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
        self.check("cuModuleLoadData", result).map_err(|error| match result {
            // What comes first is told in any case: others are told no more than some 250 bytes.
            TEXT_TOO_NEW => error.context(
                "the driver compiles what runs on this GPU, and is too old for that: install driver 550 (CUDA 12.4) or newer",
            ),
            _ => error,
        })?;
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

impl Libcuda {
    /// [`LaunchCalls::launch`] of a kernel that may be launched before the one ahead of it has ended.
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
}
