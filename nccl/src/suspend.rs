//! Communicators give their device memory back for a while, and take it again.

use std::ffi::c_int;

use crate::abi::{ncclComm_t, ncclResult_t};
use crate::communicator;
use crate::error::{SUCCESS, fail};
use crate::group::{self, in_group};
use crate::setup::Sharing;

/// ncclCommSuspend: give memory back.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_SUSPEND_MEM: c_int = 1;

/// Gives the communicator's device memory back until ncclCommResume; it takes no calls meanwhile. All ranks
/// call it, in a group if one thread has several, where it comes behind the group's calls: it waits for what
/// was started here, and for the others. `flags` is NCCL_SUSPEND_MEM. If calls have ever been captured in
/// graphs on some rank, or it has sent signals, or there are windows, the memory stays on all of them, since
/// those refer to it (ncclCommMemStats tells of this rank). If a rank cannot, none is suspended. When a rank
/// is gone it can be shrunk as it is.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t {
    in_group(|| {
        let communicator = communicator::find(comm)?;
        communicator.open_group()?;
        if flags != NCCL_SUSPEND_MEM {
            fail!(InvalidArgument, "flags is {flags:#x}; it is NCCL_SUSPEND_MEM (1)");
        }
        let inner = communicator.clone();
        group::suspend(Sharing { communicator, share: Box::new(move || inner.suspend()) }).map(|()| SUCCESS)
    })
}

/// Undoes ncclCommSuspend. All ranks call it, in a group if one thread has several, and it waits for them. If
/// a rank's device has no memory left by then the communicator's calls go by way of the host, as of a new
/// one.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommResume(comm: ncclComm_t) -> ncclResult_t {
    in_group(|| {
        let communicator = communicator::find(comm)?;
        communicator.group()?;
        communicator.check_suspended()?;
        let inner = communicator.clone();
        group::share(Sharing { communicator, share: Box::new(move || inner.resume()) }).map(|()| SUCCESS)
    })
}
