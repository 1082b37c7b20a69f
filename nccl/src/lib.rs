//! The NCCL face: `libnccl.so.2`. Only the `nccl*` names live here; what they do is unisono's engine.
//!
//! So far the library answers for its version alone; the collectives follow with the device engine.

use std::ffi::c_int;

/// NCCL's numeric version of the surface that this library reports: 2.28.9.
const VERSION: c_int = 22809;

/// `ncclSuccess`.
const SUCCESS: c_int = 0;
/// `ncclInvalidArgument`.
const INVALID_ARGUMENT: c_int = 4;

/// Writes the version of the NCCL surface, 22809, to `*version`. A NULL pointer is an invalid argument.
///
/// # Safety
/// `version` is NULL or points to a writable `int`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    if version.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not NULL, so by the contract above it points to a writable int.
    unsafe { version.write(VERSION) };
    SUCCESS
}
