//! The collectives: each export says what it reads and writes, [`Launch`] does what they share.

use std::ffi::c_void;

use unisono::collective::request::{Counts, Kind, Request};
use unisono::communicator::reduce_local;
use unisono::error::Result;
use unisono::reduce::{DataType, Operator};

use super::argument::{Extent, list};
use super::call::{call_options, unisono_call_t};
use super::context::unisono_context_t;
use super::datatype::{operator, unisono_dtype_t, unisono_op_t};
use super::status::{guard, unisono_status_t};
use super::work::{Launch, unisono_work_t};

/// Combines `count` elements of every rank and gives the result to every rank.
///
/// `sendbuf` and `recvbuf` hold `count` elements each. In place: sendbuf == recvbuf. `count`, `dtype` and
/// `op` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_allreduce(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, launch.options())?;
        let input = Extent::Whole(count).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Uniform(count);
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::Allreduce, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// Combines what this rank has at several addresses, in their order, without the other ranks.
///
/// `sendbufs` names `sendbuf_count` buffers of `count` elements, at least one; the list is read during the
/// call only. `recvbuf` holds `count`, and is any of the buffers, or apart from them. All are in host memory.
/// The bits are those of an allreduce among as many ranks with these buffers. Of `call`, what
/// UNISONO_PREMULSUM and UNISONO_CUSTOM ask for is read, and nothing else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce_local(
    sendbufs: *const *const c_void,
    sendbuf_count: u64,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    call: *const unisono_call_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an options struct.
        let call = unsafe { call_options(call, "call") }?;
        // SAFETY: the contract of the header: NULL or so many pointers.
        let inputs = unsafe { list(sendbufs, sendbuf_count, "sendbufs") }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, &call)?;
        let input = |(index, &input): (usize, &*const c_void)| {
            let input = Extent::Whole(count).buffer(input, dtype, &format!("sendbufs[{index}]"))?;
            Ok(input.cast_const())
        };
        let inputs: Vec<*const u8> = inputs.iter().enumerate().map(input).collect::<Result<_>>()?;
        let output = Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?;
        // SAFETY: the buffers hold what the header asks for.
        unsafe { reduce_local(&inputs, output, count, dtype, operator) }
    })
}

/// Combines `count` elements of every rank and gives the result to `root`.
///
/// `sendbuf` holds `count` elements. `recvbuf` holds as many on the root and is ignored elsewhere. In place:
/// sendbuf == recvbuf on the root. `count`, `dtype`, `op` and `root` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, launch.options())?;
        launch.check_rank(root, "root")?;
        let input = Extent::Whole(count).buffer(sendbuf, dtype, "sendbuf")?;
        let output = launch.on(root, || Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf"))?;
        let counts = Counts::Uniform(count);
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Reduce, input, output, counts, dtype, operator, root }) }
    })
}

/// Copies `count` elements of `buffer` on `root` into `buffer` on every other rank.
///
/// `count`, `dtype` and `root` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_broadcast(
    ctx: *const unisono_context_t,
    buffer: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(root, "root")?;
        let output = Extent::Whole(count).buffer(buffer, dtype, "buffer")?;
        let input = launch.on(root, || Ok(output))?;
        let counts = Counts::Uniform(count);
        let operator = Operator::Sum;
        // SAFETY: the buffer holds what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Broadcast, input, output, counts, dtype, operator, root }) }
    })
}

/// Gives the blocks of all ranks, `count` elements each, in rank order, to every rank.
///
/// `sendbuf` holds `count` elements, `recvbuf` `count` × size. In place: sendbuf == recvbuf + rank × `count`
/// elements. `count` and `dtype` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_allgather(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let input = Extent::Whole(count).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::Each(count, launch.size()).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Uniform(count);
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::Allgather, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// As unisono_allgather, with blocks of `counts[rank]` elements.
///
/// `counts` has an entry for each rank, the same on every rank; it is read during the call only. `sendbuf`
/// holds `counts[rank]` elements, `recvbuf` their sum. In place: sendbuf == recvbuf + the sum of the counts
/// of lower ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_allgatherv(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    counts: *const u64,
    dtype: unisono_dtype_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        // SAFETY: as above, a count for each rank.
        let counts = unsafe { list(counts, launch.size().into(), "counts") }?;
        let input = Extent::Entry("counts", launch.rank(), counts[launch.rank()])
            .buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::List("counts", counts).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Blocks(counts.to_vec());
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::Allgather, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// Gives the blocks of all ranks, `count` elements each, in rank order, to `root`.
///
/// `sendbuf` holds `count` elements. `recvbuf` holds `count` × size on the root and is ignored elsewhere. In
/// place: sendbuf == recvbuf + root × `count` elements on the root. `count`, `dtype` and `root` are the same
/// on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_gather(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(root, "root")?;
        let input = Extent::Whole(count).buffer(sendbuf, dtype, "sendbuf")?;
        let output =
            launch.on(root, || Extent::Each(count, launch.size()).buffer(recvbuf, dtype, "recvbuf"))?;
        let counts = Counts::Uniform(count);
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Gather, input, output, counts, dtype, operator, root }) }
    })
}

/// As unisono_gather, with blocks of `counts[rank]` elements.
///
/// `counts` has an entry for each rank; ranks other than the root need only their own entry to be true,
/// unless the call names UNISONO_ALGORITHM_BINOMIAL, for which the lists are the same. `counts` is read
/// during the call only. `sendbuf` holds `counts[rank]` elements, `recvbuf` their sum, on the root. In place:
/// sendbuf == recvbuf + the sum of the counts of lower ranks, on the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_gatherv(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    counts: *const u64,
    dtype: unisono_dtype_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(root, "root")?;
        // SAFETY: as above, a count for each rank.
        let counts = unsafe { list(counts, launch.size().into(), "counts") }?;
        let input = Extent::Entry("counts", launch.rank(), counts[launch.rank()])
            .buffer(sendbuf, dtype, "sendbuf")?;
        let output = launch.on(root, || Extent::List("counts", counts).buffer(recvbuf, dtype, "recvbuf"))?;
        let counts = Counts::Blocks(counts.to_vec());
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Gather, input, output, counts, dtype, operator, root }) }
    })
}

/// Gives each rank its block, `count` elements, of `root`'s buffer.
///
/// `sendbuf` holds `count` × size elements on the root, in rank order, and is ignored elsewhere. `recvbuf`
/// holds `count`. In place: recvbuf == sendbuf + root × `count` elements on the root. `count`, `dtype` and
/// `root` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_scatter(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(root, "root")?;
        let input =
            launch.on(root, || Extent::Each(count, launch.size()).buffer(sendbuf, dtype, "sendbuf"))?;
        let output = Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Uniform(count);
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Scatter, input, output, counts, dtype, operator, root }) }
    })
}

/// As unisono_scatter, with blocks of `counts[rank]` elements.
///
/// `counts` has an entry for each rank; ranks other than the root need only their own entry to be true,
/// unless the call names UNISONO_ALGORITHM_BINOMIAL, for which the lists are the same. `counts` is read
/// during the call only. `sendbuf` holds their sum, on the root; `recvbuf` holds `counts[rank]` elements. In
/// place: recvbuf == sendbuf + the sum of the counts of lower ranks, on the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_scatterv(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    counts: *const u64,
    dtype: unisono_dtype_t,
    root: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(root, "root")?;
        // SAFETY: as above, a count for each rank.
        let counts = unsafe { list(counts, launch.size().into(), "counts") }?;
        let input = launch.on(root, || Extent::List("counts", counts).buffer(sendbuf, dtype, "sendbuf"))?;
        let output = Extent::Entry("counts", launch.rank(), counts[launch.rank()])
            .buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Blocks(counts.to_vec());
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe { launch.run(Request { kind: Kind::Scatter, input, output, counts, dtype, operator, root }) }
    })
}

/// Combines size blocks of `count` elements of every rank and gives each rank the block of its number.
///
/// `sendbuf` holds `count` × size elements, `recvbuf` `count`. In place: recvbuf == sendbuf + rank × `count`
/// elements; the other blocks of `sendbuf` keep their values. `count`, `dtype` and `op` are the same on every
/// rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce_scatter(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, launch.options())?;
        let input = Extent::Each(count, launch.size()).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Uniform(count);
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::ReduceScatter, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// As unisono_reduce_scatter, with blocks of `counts[rank]` elements.
///
/// `counts` has an entry for each rank, the same on every rank; it is read during the call only. `sendbuf`
/// holds their sum, `recvbuf` `counts[rank]`. In place: recvbuf == sendbuf + the sum of the counts of lower
/// ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_reduce_scatterv(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    counts: *const u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, launch.options())?;
        // SAFETY: as above, a count for each rank.
        let counts = unsafe { list(counts, launch.size().into(), "counts") }?;
        let input = Extent::List("counts", counts).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::Entry("counts", launch.rank(), counts[launch.rank()])
            .buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Blocks(counts.to_vec());
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::ReduceScatter, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// Sends block r of `sendbuf` to rank r, and receives rank r's block for this rank as block r of `recvbuf`.
///
/// `sendbuf` and `recvbuf` hold `count` × size elements each. In place: sendbuf == recvbuf. `count` and
/// `dtype` are the same on every rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_alltoall(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        let input = Extent::Each(count, launch.size()).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::Each(count, launch.size()).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Uniform(count);
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::Alltoall, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// As unisono_alltoall, with `send_counts[r]` elements for rank r and `recv_counts[r]` from it.
///
/// Both lists have an entry for each rank and are read during the call only; `send_counts[r]` here equals
/// `recv_counts[rank]` on rank r. Blocks lie one after the other, in rank order. In place where
/// the two lists are the same on this rank: sendbuf == recvbuf.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_alltoallv(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    send_counts: *const u64,
    recv_counts: *const u64,
    dtype: unisono_dtype_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        // SAFETY: as above, a count for each rank.
        let send_counts = unsafe { list(send_counts, launch.size().into(), "send_counts") }?;
        // SAFETY: as above, a count for each rank.
        let recv_counts = unsafe { list(recv_counts, launch.size().into(), "recv_counts") }?;
        let input = Extent::List("send_counts", send_counts).buffer(sendbuf, dtype, "sendbuf")?;
        let output = Extent::List("recv_counts", recv_counts).buffer(recvbuf, dtype, "recvbuf")?;
        let counts = Counts::Exchange { send: send_counts.to_vec(), receive: recv_counts.to_vec() };
        let operator = Operator::Sum;
        // SAFETY: the buffers hold what the header asks for, until the work completes.
        unsafe {
            launch.run(Request { kind: Kind::Alltoall, input, output, counts, dtype, operator, root: 0 })
        }
    })
}

/// Returns (or completes the work) when every rank has called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_barrier(
    ctx: *const unisono_context_t,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        // SAFETY: a barrier names no memory.
        unsafe {
            launch.run(Request {
                kind: Kind::Barrier,
                input: std::ptr::null(),
                output: std::ptr::null_mut(),
                counts: Counts::Uniform(0),
                dtype: DataType::U8,
                operator: Operator::Sum,
                root: 0,
            })
        }
    })
}
