//! Send and receive. Sends to a rank match its receives from here in the order of the calls.

use std::ffi::{c_int, c_void};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::reduce::{DataType, Operator};

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t};
use crate::collective::{datatype, stream};
use crate::communicator;
use crate::engine::Launch;
use crate::error::{Result, fail};
use crate::group::{self, in_group};

/// Sends `count` elements to rank `peer`, which receives as many bytes. Sends and receives that need each
/// other to complete belong into one group; there their order does not matter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let buffers = (sendbuff, std::ptr::null_mut());
    in_group(|| exchange(Kind::Send, buffers, count, datatype, peer, comm, stream))
}

/// Receives `count` elements from rank `peer`, which sends as many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let buffers = (std::ptr::null(), recvbuff);
    in_group(|| exchange(Kind::Receive, buffers, count, datatype, peer, comm, stream))
}

fn exchange(
    kind: Kind,
    (sendbuff, recvbuff): (*const c_void, *mut c_void),
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let communicator = communicator::find(comm)?;
    let size = communicator.open_group()?.size();
    // What is too large is refused with the rest.
    let Ok(root) = u32::try_from(peer) else {
        fail!(InvalidArgument, "peer {peer} is out of range: the group has {size} ranks, 0 to {}", size - 1);
    };
    // Both ends may count the bytes of a message by types of their own, as with NCCL.
    let dtype = self::datatype(datatype)?;
    let Some(bytes) = (count as u64).checked_mul(dtype.size() as u64) else {
        fail!(InvalidArgument, "count {count} of {} is more than there is memory", dtype.name());
    };
    let request = Request {
        kind,
        input: sendbuff.cast(),
        output: recvbuff.cast(),
        counts: Counts::Uniform(bytes),
        dtype: DataType::U8,
        operator: Operator::Sum,
        root,
    };
    let stream = self::stream(communicator.place, stream)?;
    group::launch(Launch { communicator, request, stream, factor: None, max_blocks: 0 })
}
