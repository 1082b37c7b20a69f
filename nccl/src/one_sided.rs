//! One-sided operations of 2.29, which write into a peer's window. This library has none, and says so.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclWindow_t};
use crate::error::{Result, fail, guard};

/// Would write into a window of rank `peer` and signal it. This library answers ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclPutSignal(
    _localbuff: *const c_void,
    _count: usize,
    _datatype: ncclDataType_t,
    _peer: c_int,
    _peerWin: ncclWindow_t,
    _peerWinOffset: usize,
    _sigIdx: c_int,
    _ctx: c_int,
    _flags: c_uint,
    _comm: ncclComm_t,
    _stream: cudaStream_t,
) -> ncclResult_t {
    guard(|| unsupported("ncclPutSignal"))
}

/// Would signal rank `peer`. This library answers ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSignal(
    _peer: c_int,
    _sigIdx: c_int,
    _ctx: c_int,
    _flags: c_uint,
    _comm: ncclComm_t,
    _stream: cudaStream_t,
) -> ncclResult_t {
    guard(|| unsupported("ncclSignal"))
}

/// Which signals ncclWaitSignal waits for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclWaitSignalDesc_t {
    /// How many.
    pub opCnt: c_int,
    /// From which rank.
    pub peer: c_int,
    /// Of which number.
    pub sigIdx: c_int,
    /// Of which context.
    pub ctx: c_int,
}

/// Would wait for signals. This library answers ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWaitSignal(
    _nDesc: c_int,
    _signalDescs: *mut ncclWaitSignalDesc_t,
    _comm: ncclComm_t,
    _stream: cudaStream_t,
) -> ncclResult_t {
    guard(|| unsupported("ncclWaitSignal"))
}

fn unsupported(name: &str) -> Result<ncclResult_t> {
    fail!(
        InvalidUsage,
        "{name}: this library has no one-sided operations; use ncclSend and ncclRecv in a group"
    )
}
