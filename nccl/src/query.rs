//! What can be asked of a communicator.

use std::ffi::c_int;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator::{self, Phase};
use crate::error::{IN_PROGRESS, SUCCESS, fail, guard, out, result, tell};

/// Writes to `*asyncError` what became of the communicator: ncclSuccess, ncclInProgress while it is being
/// created, split, shrunk or finalized in the background, or the result of its first failure, on whichever
/// rank that was. ncclGetLastError then has the text. Never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    asyncError: *mut ncclResult_t,
) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(asyncError, "asyncError") }?;
        let phase = *communicator.phase();
        // What one that blocks sets up is waited for by another thread.
        let splitting = !communicator.config.blocking && communicator.is_setting_up();
        let finalizing = phase == Phase::Finalized && !communicator.idle();
        place.write(match (communicator.met(), communicator.failure()) {
            (None, None) => IN_PROGRESS,
            (_, Some(failure)) => {
                tell(&failure);
                result(failure.status())
            }
            _ if splitting || finalizing => IN_PROGRESS,
            _ => SUCCESS,
        });
        Ok(SUCCESS)
    })
}

/// Writes the number of ranks to `*count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    guard(|| {
        let size = communicator::find(comm)?.group()?.size();
        // SAFETY: the contract of the header: NULL or writable. It was given as an int.
        unsafe { out(count, "count") }?.write(size as c_int);
        Ok(SUCCESS)
    })
}

/// Writes the number of the communicator's device to `*device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t {
    guard(|| {
        let number = communicator::find(comm)?.place.number();
        // SAFETY: the contract of the header: NULL or writable. Devices are few.
        unsafe { out(device, "device") }?.write(number as c_int);
        Ok(SUCCESS)
    })
}

/// Writes this rank's number to `*rank`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t {
    guard(|| {
        let number = communicator::find(comm)?.group()?.rank();
        // SAFETY: the contract of the header: NULL or writable. It was given as an int.
        unsafe { out(rank, "rank") }?.write(number as c_int);
        Ok(SUCCESS)
    })
}

/// Which of a communicator's memory is asked for.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclCommMemStat {
    /// Bytes that ncclCommSuspend would give back.
    ncclStatGpuMemSuspend = 0,
    /// 1 while the communicator is suspended, else 0.
    ncclStatGpuMemSuspended = 1,
    /// Bytes that it would keep: graphs, windows or signals of this rank refer to them.
    ncclStatGpuMemPersist = 2,
    /// Bytes in all.
    ncclStatGpuMemTotal = 3,
}

/// One of [`ncclCommMemStat`].
pub type ncclCommMemStat_t = c_int;

/// Writes to `*value` how much device memory the communicator holds on this rank. None if its GPUs do not
/// exchange, or while it is suspended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommMemStats(
    comm: ncclComm_t,
    stat: ncclCommMemStat_t,
    value: *mut u64,
) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        if !(0..=3).contains(&stat) {
            fail!(InvalidArgument, "stat {stat} is unknown; the statistics are 0 to 3");
        }
        // SAFETY: the contract of the header: NULL or writable.
        let value = unsafe { out(value, "value") }?;
        let context = communicator.group()?;
        let (bytes, stays) = (context.device_bytes(), context.is_referred_to());
        value.write(match stat {
            0 if stays => 0,
            1 => u64::from(*communicator.phase() == Phase::Suspended),
            2 if !stays => 0,
            _ => bytes,
        });
        Ok(SUCCESS)
    })
}
