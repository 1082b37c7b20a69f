//! Communicators give their device memory back for a while, and take it again.

use std::ffi::c_int;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator;
use crate::error::{Result, SUCCESS, fail};
use crate::group::{self, in_group};
use crate::setup::Sharing;

/// ncclCommSuspend: give memory back.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_SUSPEND_MEM: c_int = 1;

/// Gives the communicator's device memory back until ncclCommResume; it takes no calls meanwhile. All ranks call it, in a group if one thread
/// has several: it waits for what was started here, and for the others. `flags` is NCCL_SUSPEND_MEM. Memory that a graph or a window of some
/// rank refers to stays where it is, on all ranks (ncclCommMemStats tells).
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t {
    in_group(|| {
        let communicator = communicator::find(comm)?;
        communicator.open_group()?;
        if flags != NCCL_SUSPEND_MEM {
            fail!(InvalidArgument, "flags is {flags:#x}; it is NCCL_SUSPEND_MEM (1)");
        }
        let inner = communicator.clone();
        set_up(Sharing { communicator, share: Box::new(move || inner.suspend()) })
    })
}

/// Undoes ncclCommSuspend. All ranks call it, in a group if one thread has several, and it waits for them. If a rank's device has no memory left
/// by then the communicator's calls go by way of the host, as of a new one.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommResume(comm: ncclComm_t) -> ncclResult_t {
    in_group(|| {
        let communicator = communicator::find(comm)?;
        communicator.group()?;
        communicator.check_suspended()?;
        let inner = communicator.clone();
        set_up(Sharing { communicator, share: Box::new(move || inner.resume()) })
    })
}

fn set_up(sharing: Sharing) -> Result<ncclResult_t> {
    group::share(sharing).map(|()| SUCCESS)
}
