//! The collectives of 2.31 with a config of their own.

use std::ffi::{c_char, c_int, c_uint, c_void};

use unisono::collective::request::Kind;

use crate::abi::{MAGIC, UNSET, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use crate::collective::Collective;
use crate::error::{Result, fail, text};
use crate::group::in_group;

/// What a client wants of one call. Start from NCCL_COLLCONFIG_INITIALIZER.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclCollConfig_t {
    /// As the initialiser sets it.
    pub size: usize,
    /// As the initialiser sets it.
    pub magic: c_uint,
    /// As the initialiser sets it.
    pub version: c_uint,
    /// Options of other libraries. Ignored.
    pub ext: *mut c_void,
    /// Thread blocks at least. A hint.
    pub minCTAs: c_int,
    /// Thread blocks at most, and so the most multiprocessors that the call takes; the same on every rank.
    pub maxCTAs: c_int,
    /// Without effect: the library uses no NVLink multicast.
    pub nvlsCTAs: c_int,
    /// Thread blocks of a cluster. A hint.
    pub cgaClusterSize: c_int,
    /// Names of algorithms. NULL or empty: the library chooses.
    pub algSelection: *const c_char,
    /// Whether an algorithm that cannot be had is an error.
    pub forceAlgSelection: c_int,
    /// A combination of NCCL_CTA_POLICY_*. A hint.
    pub CTAPolicy: c_int,
    /// Handed to profilers. Ignored.
    pub userProfilerTag: u64,
}

/// Where `userProfilerTag` begins: no shorter struct was ever compiled.
const SMALLEST: usize = std::mem::offset_of!(ncclCollConfig_t, userProfilerTag);

/// Refuses what this library cannot do for a call. The most thread blocks that it may take, 0 for no word on
/// it.
///
/// # Safety
/// `config` is NULL or a config.
unsafe fn check(config: *const ncclCollConfig_t) -> Result<u32> {
    if config.is_null() {
        return Ok(0);
    }
    // SAFETY: this function's contract; the first fields are in every version.
    let (size, magic) = unsafe { ((*config).size, (*config).magic) };
    if magic != MAGIC || size < SMALLEST {
        fail!(InvalidArgument, "the call's config is not initialised: use NCCL_COLLCONFIG_INITIALIZER");
    }
    // SAFETY: as above, and `size` says that it is there.
    let (selection, forced, min, max) = unsafe {
        (text((*config).algSelection), (*config).forceAlgSelection, (*config).minCTAs, (*config).maxCTAs)
    };
    for (name, value) in [("minCTAs", min), ("maxCTAs", max)] {
        if value != UNSET && value < 1 {
            fail!(InvalidArgument, "config->{name} is {value}; it is 1 or more, or left unset");
        }
    }
    match selection {
        Some(names) if !names.is_empty() && forced != 0 => fail!(
            InvalidUsage,
            "config->algSelection is \"{names}\", which names NCCL's algorithms: this library has others and chooses \
             itself; leave it NULL, or set forceAlgSelection to 0"
        ),
        _ => Ok(if max == UNSET { 0 } else { max.unsigned_abs() }),
    }
}

/// Starts `call` as its config wants it, or keeps it for the end of the group.
///
/// # Safety
/// `config` is NULL or a config.
unsafe fn launch(
    call: Collective,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    in_group(|| {
        // SAFETY: this function's contract.
        let max_blocks = unsafe { check(config) }?;
        Collective { max_blocks, ..call }.launch(comm, stream)
    })
}

/// As ncclAllReduce, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Allreduce, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { op: Some(op), ..call }, comm, stream, config) }
}

/// As ncclBroadcast, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcastConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Broadcast, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { root: Some(root), ..call }, comm, stream, config) }
}

/// As ncclReduce, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Reduce, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { op: Some(op), root: Some(root), ..call }, comm, stream, config) }
}

/// As ncclAllGather, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGatherConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Allgather, sendbuff, recvbuff, sendcount, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(call, comm, stream, config) }
}

/// As ncclReduceScatter, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatterConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::ReduceScatter, sendbuff, recvbuff, recvcount, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { op: Some(op), ..call }, comm, stream, config) }
}

/// As ncclAlltoAll, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAlltoAllConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Alltoall, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(call, comm, stream, config) }
}

/// As ncclGather, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGatherConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Gather, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { root: Some(root), ..call }, comm, stream, config) }
}

/// As ncclScatter, with a config for the call; NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclScatterConfig(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
    config: *const ncclCollConfig_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Scatter, sendbuff, recvbuff, count, datatype);
    // SAFETY: the contract of the header: NULL or a config.
    unsafe { launch(Collective { root: Some(root), ..call }, comm, stream, config) }
}
