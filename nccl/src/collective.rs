//! The collectives. Each returns once the operation is enqueued on its stream, or, in a group, kept for the
//! group's end. In host memory (see `place`) each returns when the operation is complete.

use std::ffi::{c_int, c_void};

use unisono::collective::request::{Counts, Kind, Request};
use unisono::reduce::{DataType, Operator};

use crate::abi::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use crate::communicator;
use crate::engine::Launch;
use crate::error::{Result, fail};
use crate::group::{self, in_group};
use crate::place::Place;

/// Combines `count` elements of every rank, and gives the result to all: the same bits. In place: recvbuff =
/// sendbuff.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Allreduce, sendbuff, recvbuff, count, datatype);
    in_group(|| Collective { op: Some(op), ..call }.launch(comm, stream))
}

/// Combines `count` elements of every rank on rank `root`. On other ranks recvbuff may be NULL. In place:
/// recvbuff = sendbuff.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Reduce, sendbuff, recvbuff, count, datatype);
    in_group(|| Collective { op: Some(op), root: Some(root), ..call }.launch(comm, stream))
}

/// Copies `count` elements of rank `root` to all. sendbuff is used on the root alone. In place: recvbuff =
/// sendbuff.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Broadcast, sendbuff, recvbuff, count, datatype);
    in_group(|| Collective { root: Some(root), ..call }.launch(comm, stream))
}

/// As ncclBroadcast, in place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Broadcast, buff, buff, count, datatype);
    in_group(|| Collective { root: Some(root), ..call }.launch(comm, stream))
}

/// Gives every rank the blocks of `sendcount` elements of all, in order of rank. In place: sendbuff =
/// recvbuff + rank · sendcount.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Allgather, sendbuff, recvbuff, sendcount, datatype);
    in_group(|| call.launch(comm, stream))
}

/// Combines `recvcount` · ranks elements of every rank, and gives each rank its block of the result. In
/// place: recvbuff = sendbuff + rank · recvcount.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::ReduceScatter, sendbuff, recvbuff, recvcount, datatype);
    in_group(|| Collective { op: Some(op), ..call }.launch(comm, stream))
}

/// Sends block i of `count` elements to rank i, and receives the block of rank i as block i.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAlltoAll(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Alltoall, sendbuff, recvbuff, count, datatype);
    in_group(|| call.launch(comm, stream))
}

/// Gives rank `root` the blocks of `count` elements of all, in order of rank. recvbuff is used on the root
/// alone. In place, on the root: sendbuff = recvbuff + root · count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Gather, sendbuff, recvbuff, count, datatype);
    in_group(|| Collective { root: Some(root), ..call }.launch(comm, stream))
}

/// Gives rank i block i, of `count` elements, of rank `root`. sendbuff is used on the root alone. In place,
/// on the root: recvbuff = sendbuff + root · count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let call = Collective::new(Kind::Scatter, sendbuff, recvbuff, count, datatype);
    in_group(|| Collective { root: Some(root), ..call }.launch(comm, stream))
}

/// A call as the client made it, nothing checked.
#[derive(Clone, Copy)]
pub(crate) struct Collective {
    pub(crate) kind: Kind,
    pub(crate) sendbuff: *const c_void,
    pub(crate) recvbuff: *mut c_void,
    pub(crate) count: usize,
    pub(crate) datatype: ncclDataType_t,
    pub(crate) op: Option<ncclRedOp_t>,
    pub(crate) root: Option<c_int>,
    /// Blocks of a kernel at most; 0: as the communicator's config says.
    pub(crate) max_blocks: u32,
}

impl Collective {
    /// A call without operator and root.
    pub(crate) fn new(
        kind: Kind,
        sendbuff: *const c_void,
        recvbuff: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
    ) -> Collective {
        Collective { kind, sendbuff, recvbuff, count, datatype, op: None, root: None, max_blocks: 0 }
    }

    /// Starts it, now or at the end of the group.
    pub(crate) fn launch(self, comm: ncclComm_t, stream: cudaStream_t) -> Result<ncclResult_t> {
        let communicator = communicator::find(comm)?;
        let size = communicator.open_group()?.size();
        let dtype = datatype(self.datatype)?;
        let (operator, factor) = match self.op {
            Some(op) => communicator.operators.resolve(op, dtype)?,
            None => (Operator::Sum, None),
        };
        let root = match self.root.map(u32::try_from) {
            None => 0,
            Some(Ok(root)) if root < size => root,
            Some(_) => fail!(
                InvalidArgument,
                "root {} is out of range: the group has {size} ranks, 0 to {}",
                self.root.unwrap_or_default(),
                size - 1
            ),
        };
        let request = Request {
            kind: self.kind,
            input: self.sendbuff.cast(),
            output: self.recvbuff.cast(),
            counts: Counts::Uniform(self.count as u64),
            dtype,
            operator,
            root,
        };
        let stream = self::stream(communicator.place, stream)?;
        group::launch(Launch { communicator, request, stream, factor, max_blocks: self.max_blocks })
    }
}

/// The type behind NCCL's number.
pub(crate) fn datatype(number: ncclDataType_t) -> Result<DataType> {
    match DataType::from_number(number) {
        Ok(dtype) => Ok(dtype),
        Err(_) => fail!(
            InvalidArgument,
            "datatype {number} is unknown; the types are 0 (ncclInt8) to 11 (ncclFloat8e5m2)"
        ),
    }
}

/// A client's stream, as a number.
pub(crate) fn stream(place: Place, stream: cudaStream_t) -> Result<usize> {
    if matches!(place, Place::Host(_)) && !stream.is_null() {
        fail!(InvalidArgument, "stream is not NULL, but communicators in host memory know no streams");
    }
    Ok(stream.expose_provenance())
}
