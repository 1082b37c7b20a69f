//! How communicators end.

use std::ffi::c_int;
use std::sync::Arc;

use unisono::deadline::Deadline;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator::{self, Communicator, Phase};
use crate::error::{IN_PROGRESS, Result, SUCCESS, fail, guard};
use crate::group::{self, in_group};

/// ncclCommRevoke: the only flag there is.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_REVOKE_DEFAULT: c_int = 0;

/// Waits until everything that was started on the communicator here is complete; in a group, at its end, also
/// for what was called before in the group. From this call on it can only be destroyed. One that does not
/// block answers ncclInProgress; ncclCommGetAsyncError tells when it is done. A second time, or when it was
/// revoked, is ncclInvalidArgument. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    in_group(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let communicator = communicator::change_phase(comm, |communicator, phase| {
            let context = communicator.group()?;
            let ended = match *phase {
                Phase::Open | Phase::Suspended | Phase::Replaced => {
                    *phase = Phase::Finalized;
                    return Ok(());
                }
                Phase::Finalized => "finalized",
                Phase::Revoked => "revoked",
            };
            fail!(InvalidArgument, "'{}' was {ended} before: it can only be destroyed now", context.name());
        })?;
        group::finalize(communicator)
    })
}

/// Waits for what was started on communicators that are finalized, but not where they do not block.
pub(crate) fn finish(finalized: impl IntoIterator<Item = Arc<Communicator>>) -> Result<ncclResult_t> {
    let mut all = Ok(SUCCESS);
    for communicator in finalized {
        let one = match communicator.config.blocking {
            true => match communicator.drain(Deadline::NEVER) {
                Err(error) if !communicator.is_stopped() => Err(error),
                _ => Ok(SUCCESS),
            },
            false if communicator.idle() => Ok(SUCCESS),
            false => Ok(IN_PROGRESS),
        };
        all = match (all, one) {
            (Err(first), _) => Err(first),
            (Ok(SUCCESS), one) => one,
            (Ok(other), one) => one.map(|_| other),
        };
    }
    all
}

/// Ends the handle, once what was enqueued is complete: this process may end next, and others may need what
/// it has yet to give. As long as they are well it waits for them, however late they come, or until another
/// thread calls ncclCommAbort. What was called before in a group is started and waited for at the group's
/// end, when nobody can abort it any more. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let Ok(communicator) = communicator::find(comm) else {
            // No communicator, or the parent's of this forked process.
            return communicator::take(comm).map(|_| SUCCESS);
        };
        if communicator.met().is_none() {
            // It still meets the others, in the background; whoever does that holds the rest.
            communicator.abort();
        }
        // With its handle: another thread may abort it meanwhile, and has ended it then.
        drain_destroyed(&communicator);
        communicator.await_thread();
        let _ = communicator::take(comm);
        group::destroy(communicator);
        Ok(SUCCESS)
    })
}

/// Waits for what was started on a communicator that is destroyed.
pub(crate) fn drain_destroyed(communicator: &Communicator) {
    if let Err(error) = communicator.drain(Deadline::NEVER) {
        // It is destroyed all the same; whoever wants to know asks ncclCommGetAsyncError before.
        log::warn!("{error}");
    }
}

/// Ends the handle and everything that runs on the communicator: here at once, on the other ranks within a
/// second. If nothing of it is under way here, only what waits for this rank fails there; calls that a thread
/// has in a group which it has not ended are not under way. But all of it fails if a graph of any rank has
/// calls of it, or if the driver does not say within 50 ms that its GPU is done. Children that are being made
/// of it end here. From any thread, also while others wait in calls on it. Waits for no other rank. NULL is
/// fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let Some(communicator) = communicator::take(comm)? else { return Ok(SUCCESS) };
        communicator.leave();
        communicator.await_thread();
        Ok(SUCCESS)
    })
}

/// Ends everything that runs on the communicator, as ncclCommAbort does, but keeps the handle: it can be
/// split and shrunk, if all ranks have revoked it that take part, destroyed or aborted. Also while it is
/// being created, which ends that: then there is nothing to split or shrink, which ncclCommGetAsyncError
/// tells, and it can only be destroyed. `revokeFlags` is NCCL_REVOKE_DEFAULT. A second time, or when it was
/// finalized, is ncclInvalidArgument. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t {
    guard(|| {
        if comm.is_null() {
            return Ok(SUCCESS);
        }
        let communicator = communicator::change_phase(comm, |_, phase| {
            if revokeFlags != NCCL_REVOKE_DEFAULT {
                fail!(InvalidArgument, "revokeFlags is {revokeFlags}; it is NCCL_REVOKE_DEFAULT (0)");
            }
            match *phase {
                Phase::Open | Phase::Suspended | Phase::Replaced => *phase = Phase::Revoked,
                Phase::Finalized => {
                    fail!(InvalidArgument, "the communicator was finalized: it can only be destroyed now")
                }
                Phase::Revoked => fail!(InvalidArgument, "the communicator was revoked before"),
            }
            Ok(())
        })?;
        communicator.stop();
        Ok(SUCCESS)
    })
}
