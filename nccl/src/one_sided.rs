//! One-sided operations of 2.29: a rank writes into a window of another one and signals it, which waits for
//! signals.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use unisono::communicator::{Call, Context};
use unisono::cuda::driver::StreamHandle;

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclWindow_t};
use crate::collective::{datatype, stream};
use crate::communicator::{self, Communicator, operation_timeout};
use crate::error::{Result, fail};
use crate::group::{self, in_group};
use crate::memory::window_of;
use crate::place::Place;

/// Writes `count` elements of device memory into rank `peer`'s part of the window `peerWin`, `peerWinOffset`
/// bytes from where that begins, and then signals that rank. The window is one that all ranks have registered
/// with NCCL_WIN_COLL_SYMMETRIC, by this rank's handle. Returns once that is enqueued; `localbuff` is the
/// caller's again when the stream has done it. What a rank puts and signals goes in the order of the calls.
/// `sigIdx`, `ctx` and `flags` are 0. Between GPUs of one host that reach each other; else ncclInvalidUsage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclPutSignal(
    localbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    peerWin: ncclWindow_t,
    peerWinOffset: usize,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    in_group(|| {
        let from = OneSided::new(comm, stream)?;
        let peer = from.peer(peer)?;
        check_zeros(&[("sigIdx", sigIdx.into()), ("ctx", ctx.into()), ("flags", flags.into())])?;
        let Some(bytes) = count.checked_mul(self::datatype(datatype)?.size()) else {
            fail!(InvalidArgument, "count is {count}: no memory has so many elements");
        };
        if bytes > 0 && localbuff.is_null() {
            fail!(InvalidArgument, "localbuff is NULL");
        }
        let window = window_of(comm, peerWin, "peerWin")?;
        window.window()?;
        let (address, offset) = (localbuff.addr() as u64, peerWinOffset as u64);
        if group::is_open() {
            // At the group's end it would be refused behind what has been sent.
            from.communicator.group()?.check_put(address, bytes as u64, peer, window.window()?, offset)?;
        }
        group::put_or_signal(from.communicator.clone(), from.stream, move || {
            let (context, call) = from.called()?;
            // SAFETY: the client's promise: the memory is valid until the stream has done it, and the stream
            // lives.
            unsafe { context.put_signal(address, bytes as u64, peer, window.window()?, offset, &call) }
        })
    })
}

/// Signals rank `peer`, which may be this one, behind what this rank has put and signalled before. `sigIdx`,
/// `ctx` and `flags` are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSignal(
    peer: c_int,
    sigIdx: c_int,
    ctx: c_int,
    flags: c_uint,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    in_group(|| {
        let from = OneSided::new(comm, stream)?;
        let peer = from.peer(peer)?;
        check_zeros(&[("sigIdx", sigIdx.into()), ("ctx", ctx.into()), ("flags", flags.into())])?;
        group::put_or_signal(from.communicator.clone(), from.stream, move || {
            let (context, call) = from.called()?;
            // SAFETY: the client's promise: the stream lives.
            unsafe { context.signal(peer, &call) }
        })
    })
}

/// Which signals ncclWaitSignal waits for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclWaitSignalDesc_t {
    /// How many.
    pub opCnt: c_int,
    /// From which rank.
    pub peer: c_int,
    /// Of which number: 0.
    pub sigIdx: c_int,
    /// Of which context: 0.
    pub ctx: c_int,
}

/// Has the stream wait for signals, as many of each rank as the `nDesc` descriptors say; no other wait gets
/// the same ones. What was put before them is there then. Returns once that is enqueued. In a group it comes
/// behind all that the group puts and signals, and before its other calls. What this rank puts, signals and
/// calls afterwards comes behind it, also on other streams. If they do not come within
/// UNISONO_NCCL_TIMEOUT, or a rank, no graph of which signals this one, destroys its communicator without
/// sending them, the communicator fails; else, and in a graph, the stream waits as long as all ranks are
/// well.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWaitSignal(
    nDesc: c_int,
    signalDescs: *mut ncclWaitSignalDesc_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    in_group(|| {
        let on = OneSided::new(comm, stream)?;
        let Ok(count) = usize::try_from(nDesc) else { fail!(InvalidArgument, "nDesc is {nDesc}") };
        if count > 0 && signalDescs.is_null() {
            fail!(InvalidArgument, "signalDescs is NULL");
        }
        let mut from = Vec::with_capacity(count.min(64));
        for at in 0..count {
            // SAFETY: the contract of the header: so many are there.
            let ncclWaitSignalDesc_t { opCnt, peer, sigIdx, ctx } = unsafe { signalDescs.add(at).read() };
            check_zeros(&[("sigIdx", sigIdx.into()), ("ctx", ctx.into())])?;
            let Ok(signals) = u32::try_from(opCnt) else {
                fail!(InvalidArgument, "signalDescs[{at}].opCnt is {opCnt}");
            };
            from.push((on.peer(peer)?, signals));
        }
        group::wait_signals(on.communicator.clone(), on.stream, move || {
            let (context, call) = on.called()?;
            // SAFETY: the client's promise: the stream lives.
            unsafe { context.wait_signals(&from, &call) }
        })
    })
}

/// Whose stream is to do something.
struct OneSided {
    communicator: Arc<Communicator>,
    stream: usize,
}

impl OneSided {
    fn new(comm: ncclComm_t, stream: cudaStream_t) -> Result<OneSided> {
        let communicator = communicator::find(comm)?;
        communicator.open_group()?;
        let stream = self::stream(communicator.place, stream)?;
        if matches!(communicator.place, Place::Host(_)) {
            fail!(InvalidUsage, "one-sided operations are between GPUs, and this communicator has none");
        }
        Ok(OneSided { communicator, stream })
    }

    fn peer(&self, peer: c_int) -> Result<u32> {
        let size = self.communicator.group()?.size();
        match u32::try_from(peer) {
            Ok(rank) if rank < size => Ok(rank),
            _ => fail!(
                InvalidArgument,
                "peer {peer} is out of range: the group has {size} ranks, 0 to {}",
                size - 1
            ),
        }
    }

    /// For the call, which may have been made before a group's end.
    fn called(&self) -> Result<(&Context, Call)> {
        let stream = Some(StreamHandle(self.stream));
        let call = Call { timeout: Some(operation_timeout()), stream, on_device: true, ..Call::default() };
        Ok((self.communicator.called_group()?, call))
    }
}

/// What NCCL has for later.
fn check_zeros(words: &[(&str, i64)]) -> Result<()> {
    match words.iter().find(|(_, word)| *word != 0) {
        Some((name, word)) => fail!(InvalidArgument, "{name} is {word}: there is but 0"),
        None => Ok(()),
    }
}
