//! Which NCCL this library stands for.

use std::ffi::c_int;

use crate::abi::ncclResult_t;
use crate::error::{SUCCESS, guard, out};

/// NCCL's number of the surface that this library has whole: 2.28.9. Later names are exported too, for
/// clients that were built with later headers; they are given this number, so that they ask for nothing that
/// it does not promise.
pub(crate) const VERSION: c_int = 22809;

/// Writes the version of the NCCL surface, 22809, to `*version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        unsafe { out(version, "version") }?.write(VERSION);
        Ok(SUCCESS)
    })
}
