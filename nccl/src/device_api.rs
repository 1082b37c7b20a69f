//! The device API: what NCCL's headers compile into clients' kernels reads structures of NCCL's own making,
//! whose layout changes with each version. This library does not make them, and every call that would says
//! so. What is plain arithmetic on ranks is answered.
//!
//! None of this is in our header: clients of the device API compile against NVIDIA's.

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{MAGIC, ncclComm_t, ncclResult_t, ncclWindow_t};
use crate::communicator;
use crate::error::{Result, SUCCESS, fail, guard, guard_or};

/// Ranks with the same distance between neighbours.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ncclTeam_t {
    /// How many.
    pub nRanks: c_int,
    /// This rank's number among them.
    pub rank: c_int,
    /// From one to the next, as ranks of the communicator.
    pub stride: c_int,
}

/// Would make a communicator for kernels: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclDevCommCreate(
    _comm: ncclComm_t,
    _requirements: *const c_void,
    _devComm: *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclDevCommCreate"))
}

/// Would end a communicator for kernels: ncclInvalidUsage, since there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclDevCommDestroy(_comm: ncclComm_t, _devComm: *const c_void) -> ncclResult_t {
    guard(|| unsupported("ncclDevCommDestroy"))
}

/// Would say what barriers for kernels need: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclLsaBarrierCreateRequirement(
    _team: ncclTeam_t,
    _nBarriers: c_int,
    _outHandle: *mut c_void,
    _outReq: *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclLsaBarrierCreateRequirement"))
}

/// Would say what barriers for kernels need: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGinBarrierCreateRequirement(
    _comm: ncclComm_t,
    _team: ncclTeam_t,
    _nBarriers: c_int,
    _outHandle: *mut c_void,
    _outReq: *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclGinBarrierCreateRequirement"))
}

/// Would say what an all-to-all of kernels needs: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclLLA2ACreateRequirement(
    _nBlocks: c_int,
    _nSlots: c_int,
    _outHandle: *mut c_void,
    _outReq: *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclLLA2ACreateRequirement"))
}

/// Slots of eight bytes for `maxElts` elements of up to `maxEltSize` bytes.
#[unsafe(no_mangle)]
pub extern "C" fn ncclLLA2ACalcSlots(maxElts: c_int, maxEltSize: c_int) -> c_int {
    maxElts.saturating_mul(maxEltSize.saturating_add(7) / 8)
}

/// Would give a window's address in the memory of a rank that shares it: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLsaDevicePointer(
    _window: ncclWindow_t,
    _offset: usize,
    _lsaRank: c_int,
    _outPtr: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclGetLsaDevicePointer"))
}

/// Would give a window's address in a peer's memory: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetPeerDevicePointer(
    _window: ncclWindow_t,
    _offset: usize,
    _peer: c_int,
    _outPtr: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclGetPeerDevicePointer"))
}

/// Would give a window's multicast address: ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLsaMultimemDevicePointer(
    _window: ncclWindow_t,
    _offset: usize,
    _outPtr: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclGetLsaMultimemDevicePointer"))
}

/// Would give a window's multicast address: ncclInvalidUsage. The handle is one pointer, passed by value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetMultimemDevicePointer(
    _window: ncclWindow_t,
    _offset: usize,
    _multimem: *mut c_void,
    _outPtr: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| unsupported("ncclGetMultimemDevicePointer"))
}

fn unsupported(name: &str) -> Result<ncclResult_t> {
    fail!(
        InvalidUsage,
        "{name}: this library has no device API, whose structures are NCCL's own; use the host calls, which are as fast on \
         ordinary memory, or run this program with NVIDIA's NCCL"
    )
}

/// All ranks. All zero for what is no communicator; ncclGetLastError says so.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamWorld(comm: ncclComm_t) -> ncclTeam_t {
    team(comm, |rank, size| ncclTeam_t { nRanks: size, rank, stride: 1 })
}

/// The ranks whose memory kernels reach by windows: this one alone, since there are no such windows.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamLsa(comm: ncclComm_t) -> ncclTeam_t {
    team(comm, |_, _| ALONE)
}

/// The ranks of the same number in their ncclTeamLsa: all.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRail(comm: ncclComm_t) -> ncclTeam_t {
    team(comm, |rank, size| ncclTeam_t { nRanks: size, rank, stride: 1 })
}

/// A team of one.
const ALONE: ncclTeam_t = ncclTeam_t { nRanks: 1, rank: 0, stride: 1 };

fn team(comm: ncclComm_t, make: impl FnOnce(c_int, c_int) -> ncclTeam_t) -> ncclTeam_t {
    guard_or(
        |_| ncclTeam_t::default(),
        || {
            let communicator = communicator::find(comm)?;
            let context = communicator.group()?;
            // Both were given as ints.
            Ok(make(context.rank() as c_int, context.size() as c_int))
        },
    )
}

/// The rank in the communicator of rank `rank` of `team`; −1 for what is no communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToWorld(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int {
    rank_in(comm, team, rank, |own| own)
}

/// The rank in ncclTeamLsa of rank `rank` of `team`: 0 is this rank.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToLsa(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int {
    rank_in(comm, team, rank, |_| ALONE.rank)
}

/// As far from `own(this rank)` as rank `rank` of `team` is from this one.
fn rank_in(comm: ncclComm_t, team: ncclTeam_t, rank: c_int, own: impl FnOnce(c_int) -> c_int) -> c_int {
    guard_or(
        |_| -1,
        || {
            let communicator = communicator::find(comm)?;
            let here = own(communicator.group()?.rank() as c_int);
            Ok(rank.wrapping_sub(team.rank).wrapping_mul(team.stride).wrapping_add(here))
        },
    )
}

/// What ncclCommQueryProperties tells, as far as this library has something to tell. Later versions go on
/// from here with what is all zero for it: features that it does not have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclCommProperties_t {
    /// Bytes of the client's struct.
    pub size: usize,
    /// As the client's initialiser sets it.
    pub magic: c_uint,
    /// As the client's initialiser sets it.
    pub version: c_uint,
    /// This rank.
    pub rank: c_int,
    /// How many ranks.
    pub nRanks: c_int,
    /// The communicator's device.
    pub cudaDev: c_int,
    /// Its number for NVML; −1: not known.
    pub nvmlDev: c_int,
    /// Whether ncclDevCommCreate works, whether there is multicast, and how kernels reach the network (no),
    /// and padding.
    pub no: [u8; 8],
}

/// Writes what the communicator is and can do to `*props`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommQueryProperties(
    comm: ncclComm_t,
    props: *mut ncclCommProperties_t,
) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        let context = communicator.group()?;
        if props.is_null() {
            fail!(InvalidArgument, "props is NULL");
        }
        // SAFETY: the contract of the header: an initialised struct, whose first fields are in every version.
        let (size, magic, version) = unsafe { ((*props).size, (*props).magic, (*props).version) };
        let ours = size_of::<ncclCommProperties_t>();
        if magic != MAGIC || !(ours..=4096).contains(&size) {
            fail!(InvalidArgument, "props is not initialised: use NCCL_COMM_PROPERTIES_INITIALIZER");
        }
        let known = ncclCommProperties_t {
            size,
            magic,
            version,
            rank: context.rank() as c_int,
            nRanks: context.size() as c_int,
            cudaDev: communicator.place.number() as c_int,
            nvmlDev: -1,
            no: [0; 8],
        };
        // SAFETY: the client's struct has `size` bytes, at least as many as ours.
        unsafe {
            props.write(known);
            props.cast::<u8>().add(ours).write_bytes(0, size - ours);
        }
        Ok(SUCCESS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_hold_eight_bytes() {
        assert_eq!(
            [ncclLLA2ACalcSlots(4, 16), ncclLLA2ACalcSlots(3, 1), ncclLLA2ACalcSlots(0, 8)],
            [8, 3, 0]
        );
        assert_eq!(ncclLLA2ACalcSlots(c_int::MAX, c_int::MAX), c_int::MAX);
    }

    #[test]
    fn layouts_never_change() {
        assert_eq!((size_of::<ncclTeam_t>(), size_of::<ncclCommProperties_t>()), (12, 40));
    }
}
