//! Messages between two ranks.

use std::ffi::c_void;

use crate::collective::request::{Counts, Kind, Request};
use crate::error::fail;
use crate::reduce::{DataType, Operator};

use super::argument::Extent;
use super::call::unisono_call_t;
use super::context::unisono_context_t;
use super::datatype::unisono_dtype_t;
use super::status::{guard, unisono_status_t};
use super::work::{Launch, unisono_work_t};

/// No rank: what a source is before it is known.
pub const UNISONO_NO_RANK: u32 = u32::MAX;

/// Sends `count` elements to rank `to`.
///
/// It meets a unisono_receive there with the same tag, count and type; messages from one rank to another with the same
/// tag arrive in the order of the calls. Completes when `sendbuf` may be written again, which may be before the message
/// was received.
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
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim to be.
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

/// Receives `count` elements from rank `from`: the next message of this tag that is for this rank.
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
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim to be.
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
/// Without `work` and stream, `*source` is set to the rank that sent; `source` may be NULL. With them, `source` is NULL and
/// unisono_work_source tells the rank once the work is complete.
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
        // SAFETY: the contract of the header: handles, options and out-parameters are NULL or what they claim to be.
        let launch = unsafe { Launch::new(ctx, call, work) }?;
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
        let request = Request {
            kind: Kind::ReceiveAny,
            input: std::ptr::null(),
            output: Extent::Whole(count).buffer(recvbuf, dtype, "recvbuf")?,
            counts: Counts::Uniform(count),
            dtype,
            operator: Operator::Sum,
            root: 0,
        };
        // SAFETY: the buffer holds what the header asks for, until the work completes.
        let completion = unsafe { launch.complete(request) }?;
        // SAFETY: the contract of the header: NULL or writable.
        if let (Some(place), Some(completion)) = (unsafe { source.as_mut() }, completion) {
            *place = completion.source.unwrap_or(UNISONO_NO_RANK);
        }
        Ok(())
    })
}
