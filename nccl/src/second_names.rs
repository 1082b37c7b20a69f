//! The second name of every function, by which profilers that stand in for the first reach it.
//!
//! Each is one jump to the function itself, whatever its arguments, and never to somebody else's function of
//! the first name: build.rs binds the library's own names to it.

use std::arch::naked_asm;

/// `second = first;` for each.
macro_rules! second_names {
    ($($second:ident = $first:path;)*) => {
        $(
            #[doc = concat!("The second name of [`", stringify!($first), "`], with the same arguments and result.")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub extern "C" fn $second() {
                #[cfg(target_arch = "x86_64")]
                naked_asm!("jmp {}", sym $first);
                #[cfg(target_arch = "aarch64")]
                naked_asm!("b {}", sym $first);
            }
        )*
    };
}

second_names! {
    pncclAllGather = crate::collective::ncclAllGather;
    pncclAllGatherConfig = crate::collective_config::ncclAllGatherConfig;
    pncclAllReduce = crate::collective::ncclAllReduce;
    pncclAllReduceConfig = crate::collective_config::ncclAllReduceConfig;
    pncclAlltoAll = crate::collective::ncclAlltoAll;
    pncclAlltoAllConfig = crate::collective_config::ncclAlltoAllConfig;
    pncclBcast = crate::collective::ncclBcast;
    pncclBroadcast = crate::collective::ncclBroadcast;
    pncclBroadcastConfig = crate::collective_config::ncclBroadcastConfig;
    pncclCommAbort = crate::end::ncclCommAbort;
    pncclCommCount = crate::query::ncclCommCount;
    pncclCommCuDevice = crate::query::ncclCommCuDevice;
    pncclCommDeregister = crate::memory::ncclCommDeregister;
    pncclCommDestroy = crate::end::ncclCommDestroy;
    pncclCommFinalize = crate::end::ncclCommFinalize;
    pncclCommGetAsyncError = crate::query::ncclCommGetAsyncError;
    pncclCommGetUniqueId = crate::grow::ncclCommGetUniqueId;
    pncclCommGrow = crate::grow::ncclCommGrow;
    pncclCommInitAll = crate::create::ncclCommInitAll;
    pncclCommInitRank = crate::create::ncclCommInitRank;
    pncclCommInitRankConfig = crate::create::ncclCommInitRankConfig;
    pncclCommInitRankScalable = crate::create::ncclCommInitRankScalable;
    pncclCommMemStats = crate::query::ncclCommMemStats;
    pncclCommQueryProperties = crate::device_api::ncclCommQueryProperties;
    pncclCommRegister = crate::memory::ncclCommRegister;
    pncclCommResume = crate::suspend::ncclCommResume;
    pncclCommRevoke = crate::end::ncclCommRevoke;
    pncclCommShrink = crate::create::ncclCommShrink;
    pncclCommSplit = crate::create::ncclCommSplit;
    pncclCommSuspend = crate::suspend::ncclCommSuspend;
    pncclCommUserRank = crate::query::ncclCommUserRank;
    pncclCommWindowDeregister = crate::memory::ncclCommWindowDeregister;
    pncclCommWindowRegister = crate::memory::ncclCommWindowRegister;
    pncclDevCommCreate = crate::device_api::ncclDevCommCreate;
    pncclDevCommDestroy = crate::device_api::ncclDevCommDestroy;
    pncclGather = crate::collective::ncclGather;
    pncclGatherConfig = crate::collective_config::ncclGatherConfig;
    pncclGetErrorString = crate::error::ncclGetErrorString;
    pncclGetLastError = crate::error::ncclGetLastError;
    pncclGetLsaDevicePointer = crate::device_api::ncclGetLsaDevicePointer;
    pncclGetLsaMultimemDevicePointer = crate::device_api::ncclGetLsaMultimemDevicePointer;
    pncclGetMultimemDevicePointer = crate::device_api::ncclGetMultimemDevicePointer;
    pncclGetPeerDevicePointer = crate::device_api::ncclGetPeerDevicePointer;
    pncclGetUniqueId = crate::unique_id::ncclGetUniqueId;
    pncclGetVersion = crate::version::ncclGetVersion;
    pncclGinBarrierCreateRequirement = crate::device_api::ncclGinBarrierCreateRequirement;
    pncclGroupEnd = crate::group::ncclGroupEnd;
    pncclGroupSimulateEnd = crate::group::ncclGroupSimulateEnd;
    pncclGroupStart = crate::group::ncclGroupStart;
    pncclLLA2ACalcSlots = crate::device_api::ncclLLA2ACalcSlots;
    pncclLLA2ACreateRequirement = crate::device_api::ncclLLA2ACreateRequirement;
    pncclLsaBarrierCreateRequirement = crate::device_api::ncclLsaBarrierCreateRequirement;
    pncclMemAlloc = crate::memory::ncclMemAlloc;
    pncclMemFree = crate::memory::ncclMemFree;
    pncclPutSignal = crate::one_sided::ncclPutSignal;
    pncclRecv = crate::point_to_point::ncclRecv;
    pncclRedOpCreatePreMulSum = crate::operator::ncclRedOpCreatePreMulSum;
    pncclRedOpDestroy = crate::operator::ncclRedOpDestroy;
    pncclReduce = crate::collective::ncclReduce;
    pncclReduceConfig = crate::collective_config::ncclReduceConfig;
    pncclReduceScatter = crate::collective::ncclReduceScatter;
    pncclReduceScatterConfig = crate::collective_config::ncclReduceScatterConfig;
    pncclResetDebugInit = crate::debug::ncclResetDebugInit;
    pncclScatter = crate::collective::ncclScatter;
    pncclScatterConfig = crate::collective_config::ncclScatterConfig;
    pncclSend = crate::point_to_point::ncclSend;
    pncclSignal = crate::one_sided::ncclSignal;
    pncclTeamLsa = crate::device_api::ncclTeamLsa;
    pncclTeamRail = crate::device_api::ncclTeamRail;
    pncclTeamRankToLsa = crate::device_api::ncclTeamRankToLsa;
    pncclTeamRankToWorld = crate::device_api::ncclTeamRankToWorld;
    pncclTeamWorld = crate::device_api::ncclTeamWorld;
    pncclWaitSignal = crate::one_sided::ncclWaitSignal;
    pncclWinGetUserPtr = crate::memory::ncclWinGetUserPtr;
}
