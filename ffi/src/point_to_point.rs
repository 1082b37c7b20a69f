//! Messages between two ranks.

use std::ffi::c_void;

use unisono::collective::request::{Counts, Kind, Request};
use unisono::error::{Result, fail};
use unisono::reduce::{DataType, Operator};

use super::argument::{Extent, list};
use super::batch;
use super::call::unisono_call_t;
use super::context::unisono_context_t;
use super::datatype::unisono_dtype_t;
use super::status::{guard, unisono_status_t};
use super::work::{Launch, unisono_work_t};

/// No rank: what a source is before it is known.
pub const UNISONO_NO_RANK: u32 = u32::MAX;

/// Sends `count` elements to rank `to`, another than this one.
///
/// It meets a unisono_receive there with the same tag, count and type; messages from one rank to another with
/// the same tag arrive in the order of the calls. Completes when `sendbuf` may be written again, which may be
/// before the message was received.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_send(
    ctx: *const unisono_context_t,
    sendbuf: *const c_void,
    count: u64,
    dtype: unisono_dtype_t,
    to: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(to, "to")?;
        let request = Request {
            kind: Kind::Send,
            input: Extent::Whole(count).buffer(sendbuf, dtype, "sendbuf")?,
            output: std::ptr::null_mut(),
            counts: Counts::Uniform(count),
            dtype,
            operator: Operator::Sum,
            root: to,
        };
        // SAFETY: the buffer holds what the header asks for, until the work completes.
        unsafe { launch.run(request) }
    })
}

/// Receives `count` elements from rank `from`, another than this one: the next message of this tag that is
/// for this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_receive(
    ctx: *const unisono_context_t,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    from: u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        let dtype = DataType::from_number(dtype)?;
        launch.check_rank(from, "from")?;
        let request = Request {
            kind: Kind::Receive,
            input: std::ptr::null(),
            output: Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?,
            counts: Counts::Uniform(count),
            dtype,
            operator: Operator::Sum,
            root: from,
        };
        // SAFETY: the buffer holds what the header asks for, until the work completes.
        unsafe { launch.run(request) }
    })
}

/// Receives `count` elements from whichever rank sends first with this tag.
///
/// Without `work` and stream, `*source` is set to the rank that sent; `source` may be NULL. With them, and in
/// a batch, `source` is NULL; unisono_work_source tells the rank once the work is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_receive_any(
    ctx: *const unisono_context_t,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    source: *mut u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        // SAFETY: as above; the buffer holds what the header asks for, until the work completes.
        unsafe { receive_any(launch, recvbuf, Counts::Uniform(count), dtype, source, work) }
    })
}

/// As unisono_receive_any, from the `from_count` ranks in `from` only: takes the first message of theirs, and
/// leaves those of the others. A rank that leaves is no failure while another of the list may send. A
/// `from_count` of 0 is UNISONO_INVALID_ARGUMENT, where unisono_buffer_receive takes it for any rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_receive_any_of(
    ctx: *const unisono_context_t,
    recvbuf: *mut c_void,
    count: u64,
    dtype: unisono_dtype_t,
    from: *const u32,
    from_count: u32,
    source: *mut u32,
    call: *const unisono_call_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim
        // to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
        // SAFETY: the contract of the header: NULL or so many ranks.
        let ranks = unsafe { list(from, from_count.into(), "from") }?;
        if ranks.is_empty() {
            fail!(InvalidArgument, "from_count is 0: nobody to receive from; unisono_receive_any takes all");
        }
        for &rank in ranks {
            launch.check_rank(rank, "from")?;
        }
        let counts = Counts::From { count, ranks: ranks.into() };
        // SAFETY: as above; the buffer holds what the header asks for, until the work completes.
        unsafe { receive_any(launch, recvbuf, counts, dtype, source, work) }
    })
}

/// What the two above share.
///
/// # Safety
/// `source` is NULL or writable; `recvbuf` holds what the call receives, until the work completes.
unsafe fn receive_any(
    launch: Launch<'_>,
    recvbuf: *mut c_void,
    counts: Counts,
    dtype: unisono_dtype_t,
    source: *mut u32,
    work: *mut *mut unisono_work_t,
) -> Result<()> {
    let dtype = DataType::from_number(dtype)?;
    if !source.is_null() && !work.is_null() {
        fail!(
            InvalidArgument,
            "source is not known before the work is complete: ask unisono_work_source, and give NULL here"
        );
    }
    if !source.is_null() && !launch.options().stream.is_null() {
        fail!(
            InvalidArgument,
            "source is not known before the stream has come to the call: ask for a work, and give NULL here"
        );
    }
    if !source.is_null() && batch::is_open() {
        fail!(
            InvalidUsage,
            "source is not known before the end of the batch: ask for a work, and give NULL here"
        );
    }
    let (Counts::Uniform(count) | Counts::From { count, .. }) = counts else {
        fail!(Internal, "a receive takes one count");
    };
    let request = Request {
        kind: Kind::ReceiveAny,
        input: std::ptr::null(),
        output: Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?,
        counts,
        dtype,
        operator: Operator::Sum,
        root: 0,
    };
    // SAFETY: this function's contract.
    let completion = unsafe { launch.complete(request) }?;
    // SAFETY: this function's contract.
    if let (Some(place), Some(completion)) = (unsafe { source.as_mut() }, completion) {
        *place = completion.source.unwrap_or(UNISONO_NO_RANK);
    }
    Ok(())
}
