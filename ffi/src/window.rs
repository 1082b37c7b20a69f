//! Windows: device memory that the other ranks' kernels write where it is.

use std::ffi::c_void;
use std::marker::{PhantomData, PhantomPinned};

use unisono::communicator::Window;

use super::argument::out;
use super::context::unisono_context_t;
use super::handle::{Handle, handle};
use super::status::{guard, unisono_status_t};

/// A window: device memory of this rank that the GPUs of other ranks read and write where it is. Ended by
/// unisono_window_destroy.
pub struct unisono_window_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_window_t, WindowHandle);

/// A registered window.
pub(super) struct WindowHandle(#[expect(dead_code, reason = "it is ended when dropped")] Window);

/// Makes a window of `bytes` bytes of device memory at `pointer`. Every rank of the group calls it, each with
/// memory of its own.
///
/// Long calls share memory where windows hold it, and stage nothing: the receive buffers of allgather,
/// alltoall and broadcast, the send buffers of reduce_scatter, both of allreduce. Where GPUs do not reach
/// each other, or the memory is not from cudaMalloc, cuMemAlloc or ncclMemAlloc, a window changes nothing.
/// Where GPUs exchange and a rank gives what is no memory of its GPU, all get UNISONO_INVALID_ARGUMENT, with
/// a text that names it.
///
/// The ranks promise: in each call, either all of them have what it shares in windows, or none has; an
/// alltoall is in place on all of them, or on none; windows are created and destroyed on all between the same
/// two calls. Otherwise calls fail with UNISONO_MISMATCH, but for captured ones: those are not compared, and
/// what they do is undefined: where they differ, in this or otherwise, a kernel that shares memory in windows
/// may take the data of the other call for addresses, and read and write there. The memory stays allocated
/// until the window is destroyed and everything that used it is done, graphs too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_create(
    ctx: *const unisono_context_t,
    pointer: *mut c_void,
    bytes: u64,
    window: *mut *mut unisono_window_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?.inner();
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(window, "window") }?;
        let registered = context
            .register_window(pointer.expose_provenance() as u64, bytes)
            .map_err(|error| error.context("pointer"))?;
        place.write(Handle::into_handle(WindowHandle(registered)));
        Ok(())
    })
}

/// Ends a window; waits for no other rank. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_window_destroy(window: *mut unisono_window_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a window that nobody uses any more.
        drop(unsafe { Handle::take(window, "window") }?);
        Ok(())
    });
}
