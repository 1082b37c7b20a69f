//! How communicators end.

use std::ffi::c_int;
use std::time::Duration;

use unisono::deadline::Deadline;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator::{self, Phase};
use crate::error::{IN_PROGRESS, SUCCESS, fail, guard};

/// How long a communicator that is destroyed waits for what was enqueued on it.
const FAREWELL: Duration = Duration::from_secs(30);

/// ncclCommRevoke: the only flag there is.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_REVOKE_DEFAULT: c_int = 0;

/// Waits until everything that was started on the communicator here is complete. It can only be destroyed then. One that
/// does not block answers ncclInProgress; ncclCommGetAsyncError tells when it is done. A second time is ncclInvalidArgument.
/// NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let communicator = communicator::find(comm)?;
        let context = communicator.group()?;
        let mut phase = communicator.phase();
        if *phase == Phase::Finalized {
            fail!(InvalidArgument, "'{}' was finalized before: it can only be destroyed now", context.name());
        }
        phase.check_open(context)?;
        *phase = Phase::Finalized;
        drop(phase);
        if communicator.config.blocking {
            communicator.drain(Deadline::NEVER)?;
            return Ok(SUCCESS);
        }
        Ok(if communicator.idle() { SUCCESS } else { IN_PROGRESS })
    })
}

/// Ends the handle, once what was enqueued is complete: this process may end next, and others may need what it has yet to
/// give. After half a minute it waits no longer; what was enqueued runs on, and keeps what it needs. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let Some(communicator) = communicator::take(comm)? else { return Ok(SUCCESS) };
        if communicator.met().is_none() {
            // It still meets the others, in the background; whoever does that holds the rest.
            communicator.abort();
        }
        if let Err(error) = communicator.drain(Deadline::after(FAREWELL)) {
            // It is destroyed all the same; whoever wants to know asks ncclCommGetAsyncError before.
            log::warn!("{error}");
        }
        Ok(SUCCESS)
    })
}

/// Ends the handle and everything that runs on the communicator: here at once, on the other ranks within a second. From any
/// thread, also while others wait in calls on it. Waits for no other rank. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let Some(communicator) = communicator::take(comm)? else { return Ok(SUCCESS) };
        communicator.abort();
        Ok(SUCCESS)
    })
}

/// Ends everything that runs on the communicator, as ncclCommAbort does, but keeps the handle: it can be shrunk, destroyed or
/// aborted. `revokeFlags` is NCCL_REVOKE_DEFAULT.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        let context = communicator.group()?;
        if revokeFlags != NCCL_REVOKE_DEFAULT {
            fail!(InvalidArgument, "revokeFlags is {revokeFlags}; it is NCCL_REVOKE_DEFAULT (0)");
        }
        let mut phase = communicator.phase();
        phase.check_unfinished(context)?;
        *phase = Phase::Revoked;
        drop(phase);
        communicator.abort();
        Ok(SUCCESS)
    })
}
