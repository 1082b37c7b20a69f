//! libcuda's symbols, with the signatures of CUDA 12.0.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;

use crate::cuda::driver::HostFunction;
use crate::error::{Result, fail};

/// The functions by the names of their symbols. Numbers that the driver answers are integers here, never
/// enums.
macro_rules! calls {
    ($($name:ident($($argument:ty),* $(,)?);)*) => {
        #[allow(non_snake_case)]
        pub(super) struct Calls {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Calls {
            /// # Safety
            /// `library` is libcuda, open for as long as the process lives.
            pub(super) unsafe fn resolve(library: *mut c_void) -> Result<Calls> {
                Ok(Calls {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name ends with a zero byte.
                        let symbol = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                        if symbol.is_null() {
                            fail!(
                                Cuda,
                                "the CUDA driver has no {}: it is too old; install driver 525 (CUDA 12.0) or newer, on GPUs of compute capability 8 driver 550 (CUDA 12.4)",
                                stringify!($name)
                            );
                        }
                        // SAFETY: a symbol of this name has this signature; a CUresult is an int.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

calls! {
    cuInit(c_uint);
    cuGetErrorName(c_int, *mut *const c_char);
    cuGetErrorString(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGetUuid_v2(*mut sys::CUuuid, sys::CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_int, sys::CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice);
    cuDeviceGetP2PAttribute(*mut c_int, c_int, sys::CUdevice, sys::CUdevice);
    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    cuCtxPushCurrent_v2(sys::CUcontext);
    cuCtxPopCurrent_v2(*mut sys::CUcontext);
    cuCtxGetDevice(*mut sys::CUdevice);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxEnablePeerAccess(sys::CUcontext, c_uint);
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuPointerGetAttribute(*mut c_void, c_int, sys::CUdeviceptr);
    cuPointerGetAttributes(c_uint, *mut c_uint, *mut *mut c_void, sys::CUdeviceptr);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamQuery(sys::CUstream);
    cuStreamGetCtx(sys::CUstream, *mut sys::CUcontext);
    cuStreamGetId(sys::CUstream, *mut c_ulonglong);
    cuStreamGetCaptureInfo_v2(
        sys::CUstream,
        *mut c_uint,
        *mut c_ulonglong,
        *mut sys::CUgraph,
        *mut *const sys::CUgraphNode,
        *mut usize,
    );
    cuGraphAddEventRecordNode(
        *mut sys::CUgraphNode,
        sys::CUgraph,
        *const sys::CUgraphNode,
        usize,
        sys::CUevent,
    );
    cuGraphAddDependencies(sys::CUgraph, *const sys::CUgraphNode, *const sys::CUgraphNode, usize);
    cuGraphRemoveDependencies(sys::CUgraph, *const sys::CUgraphNode, *const sys::CUgraphNode, usize);
    cuStreamBeginCapture_v2(sys::CUstream, c_uint);
    cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    cuStreamWriteValue32_v2(sys::CUstream, sys::CUdeviceptr, c_uint, c_uint);
    cuStreamWaitValue32_v2(sys::CUstream, sys::CUdeviceptr, c_uint, c_uint);
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventElapsedTime(*mut f32, sys::CUevent, sys::CUevent);
    cuEventDestroy_v2(sys::CUevent);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventQuery(sys::CUevent);
    cuEventSynchronize(sys::CUevent);
    cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    cuMemFree_v2(sys::CUdeviceptr);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuIpcGetMemHandle(*mut sys::CUipcMemHandle, sys::CUdeviceptr);
    cuIpcOpenMemHandle_v2(*mut sys::CUdeviceptr, sys::CUipcMemHandle, c_uint);
    cuIpcCloseMemHandle(sys::CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemsetD8Async(sys::CUdeviceptr, c_uchar, usize, sys::CUstream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream);
    cuMemcpyAsync(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);
    cuMemcpyDtoDAsync_v2(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);
    cuLaunchHostFunc(sys::CUstream, HostFunction, *mut c_void);
    cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
    cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    cuGraphDestroy(sys::CUgraph);
    cuGraphExecDestroy(sys::CUgraphExec);
    cuModuleLoadData(*mut sys::CUmodule, *const c_void);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuLaunchKernelEx(
        *const sys::CUlaunchConfig,
        sys::CUfunction,
        *mut *mut c_void,
        *mut *mut c_void,
    );
    cuLaunchKernel(
        sys::CUfunction,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        sys::CUstream,
        *mut *mut c_void,
        *mut *mut c_void,
    );
}
