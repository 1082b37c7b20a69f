//! The types that both sides of the ABI know. Enums travel as integers: a client may send any number.

use std::ffi::{c_char, c_int, c_uint};
use std::marker::{PhantomData, PhantomPinned};

/// A communicator, seen from outside.
pub struct ncclComm {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// Names a communicator. Made by ncclCommInitRank and its kin, ended by ncclCommDestroy or ncclCommAbort.
pub type ncclComm_t = *mut ncclComm;

/// A registered window, seen from outside.
pub struct ncclWindow_vidmem {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// Names a window. Made by ncclCommWindowRegister, ended by ncclCommWindowDeregister.
pub type ncclWindow_t = *mut ncclWindow_vidmem;

/// CUDA's stream.
pub struct CUstream_st {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A CUDA stream.
pub type cudaStream_t = *mut CUstream_st;

/// Bytes of a unique id.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// What a group needs to meet: made by one rank, given to all of them unchanged. It holds an address and a
/// secret.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    /// What it consists of means nothing outside the library.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

/// What came of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclResult {
    /// Done, or enqueued.
    ncclSuccess = 0,
    /// The CUDA driver refused.
    ncclUnhandledCudaError = 1,
    /// The operating system refused.
    ncclSystemError = 2,
    /// A bug in the library.
    ncclInternalError = 3,
    /// An argument is wrong by itself.
    ncclInvalidArgument = 4,
    /// The arguments are fine, the moment or the combination is not; or this library does not serve the call.
    ncclInvalidUsage = 5,
    /// Another rank died, left, aborted, or did not answer in time.
    ncclRemoteError = 6,
    /// The communicator is still at it; poll ncclCommGetAsyncError.
    ncclInProgress = 7,
    /// How many results there are.
    ncclNumResults = 8,
}

/// One of [`ncclResult`].
pub type ncclResult_t = c_int;

/// How elements are combined. Operators of ncclRedOpCreatePreMulSum have larger numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclRedOp {
    /// Sum; integers wrap.
    ncclSum = 0,
    /// Product; integers wrap.
    ncclProd = 1,
    /// The larger; a NaN on either side gives NaN.
    ncclMax = 2,
    /// The smaller; a NaN on either side gives NaN.
    ncclMin = 3,
    /// The sum divided by the number of ranks; integers truncate towards zero.
    ncclAvg = 4,
    /// The first number of operators made at run time.
    ncclNumOps = 5,
    /// The last one.
    ncclMaxRedOp = 0x7fff_ffff,
}

/// One of [`ncclRedOp`], or an operator made at run time.
pub type ncclRedOp_t = c_int;

/// Element types.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names say it")]
pub enum ncclDataType {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
}

/// One of [`ncclDataType`].
pub type ncclDataType_t = c_int;

/// Where a scalar is, and when it is read.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclScalarResidence {
    /// In memory of the device; read when the operation is launched, after what its stream was given before.
    ncclScalarDevice = 0,
    /// In memory of the host; read before the call returns.
    ncclScalarHostImmediate = 1,
}

/// One of [`ncclScalarResidence`].
pub type ncclScalarResidence_t = c_int;

/// How a communicator is to be. Start from NCCL_CONFIG_INITIALIZER; what is left as it sets it is unset.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclConfig_t {
    /// As the initialiser sets it.
    pub size: usize,
    /// As the initialiser sets it.
    pub magic: c_uint,
    /// As the initialiser sets it.
    pub version: c_uint,
    /// 1: calls return when they are done; 0: creating, splitting and finalizing may answer ncclInProgress.
    pub blocking: c_int,
    /// Thread blocks of a cluster, 0 or more. Taken, without effect.
    pub cgaClusterSize: c_int,
    /// Thread blocks of a kernel at least, no more than maxCTAs. Taken, without effect.
    pub minCTAs: c_int,
    /// Thread blocks of a kernel at most.
    pub maxCTAs: c_int,
    /// The network between hosts. "Socket" is there, no other.
    pub netName: *const c_char,
    /// Whether children share their parent's resources. They always do.
    pub splitShare: c_int,
    /// Taken, without effect.
    pub trafficClass: c_int,
    /// Named in errors and logs. Ranks may give different names. Children without one are named after their
    /// parent and colour.
    pub commName: *const c_char,
    /// Taken, without effect.
    pub collnetEnable: c_int,
    /// A combination of NCCL_CTA_POLICY_*. Taken, without effect.
    pub CTAPolicy: c_int,
    /// Whether shrunken children share their parent's resources. They always do.
    pub shrinkShare: c_int,
    /// Taken, without effect: the library uses no NVLink multicast.
    pub nvlsCTAs: c_int,
    /// Taken, without effect.
    pub nChannelsPerNetPeer: c_int,
    /// Taken, without effect.
    pub nvlinkCentricSched: c_int,
}

/// What ncclGroupSimulateEnd tells. Start from NCCL_SIM_INFO_INITIALIZER.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclSimInfo_t {
    /// As the initialiser sets it.
    pub size: usize,
    /// As the initialiser sets it.
    pub magic: c_uint,
    /// As the initialiser sets it.
    pub version: c_uint,
    /// Microseconds that the group is expected to take.
    pub estimatedTime: f32,
}

/// In every struct that a client initialises.
pub(crate) const MAGIC: c_uint = 0xcafe_beef;
/// In [`ncclSimInfo_t`].
pub(crate) const SIM_MAGIC: c_uint = 0x7468_5283;
/// An integer that is not set.
pub(crate) const UNSET: c_int = c_int::MIN;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Programs were compiled with these numbers.
    #[test]
    fn layouts_never_change() {
        assert_eq!(size_of::<ncclUniqueId>(), 128);
        assert_eq!(size_of::<ncclSimInfo_t>(), 24);
        let offsets = [
            (offset_of!(ncclConfig_t, size), 0),
            (offset_of!(ncclConfig_t, magic), 8),
            (offset_of!(ncclConfig_t, version), 12),
            (offset_of!(ncclConfig_t, blocking), 16),
            (offset_of!(ncclConfig_t, cgaClusterSize), 20),
            (offset_of!(ncclConfig_t, minCTAs), 24),
            (offset_of!(ncclConfig_t, maxCTAs), 28),
            (offset_of!(ncclConfig_t, netName), 32),
            (offset_of!(ncclConfig_t, splitShare), 40),
            (offset_of!(ncclConfig_t, trafficClass), 44),
            (offset_of!(ncclConfig_t, commName), 48),
            (offset_of!(ncclConfig_t, collnetEnable), 56),
            (offset_of!(ncclConfig_t, CTAPolicy), 60),
            (offset_of!(ncclConfig_t, shrinkShare), 64),
            (offset_of!(ncclConfig_t, nvlsCTAs), 68),
            (offset_of!(ncclConfig_t, nChannelsPerNetPeer), 72),
            (offset_of!(ncclConfig_t, nvlinkCentricSched), 76),
            (size_of::<ncclConfig_t>(), 80),
        ];
        for (ours, theirs) in offsets {
            assert_eq!(ours, theirs);
        }
    }
}
