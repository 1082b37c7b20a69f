//! Buffers for messages between two ranks, used for many of them.

use std::ffi::c_void;
use std::marker::{PhantomData, PhantomPinned};

use unisono::communicator::Call;
use unisono::communicator::buffer::Buffer;
use unisono::reduce::DataType;

use super::argument::{Extent, list, out, wait_deadline};
use super::call::{call_options, unisono_call_t};
use super::context::unisono_context_t;
use super::datatype::unisono_dtype_t;
use super::handle::{Handle, handle};
use super::status::{guard, unisono_status_t};
use super::work::check_rank;

/// A range of memory from which parts are sent and into which parts are received, many at a time, to and from
/// many ranks. Ended by unisono_buffer_destroy. All functions may be called from any thread, also several at
/// once.
pub struct unisono_buffer_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_buffer_t, Buffer);

/// Makes a buffer of `bytes` bytes at `pointer`, which stays the caller's and valid until
/// unisono_buffer_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_create(
    ctx: *const unisono_context_t,
    pointer: *mut c_void,
    bytes: u64,
    buffer: *mut *mut unisono_buffer_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?.inner();
        let pointer = Extent::Whole(bytes).buffer(pointer, DataType::U8, "pointer")?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(buffer, "buffer") }?;
        // SAFETY: the contract of the header: the memory is valid until the buffer is destroyed.
        place.write(Handle::into_handle(unsafe { Buffer::new(context, pointer, bytes) }));
        Ok(())
    })
}

/// Starts to send `count` elements, from `offset` bytes into the buffer on, to rank `to`;
/// unisono_buffer_wait_send waits.
///
/// It meets a unisono_buffer_receive or unisono_receive there with the same tag, count and type. `call` may
/// set tag and deadline; NULL: the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_send(
    buffer: *const unisono_buffer_t,
    offset: u64,
    count: u64,
    dtype: unisono_dtype_t,
    to: u32,
    call: *const unisono_call_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a buffer that nobody destroys meanwhile.
        let buffer = unsafe { Handle::borrow(buffer, "buffer") }?;
        // SAFETY: the contract of the header: NULL or an options struct.
        let call = unsafe { call_options(call, "call") }?;
        let dtype = DataType::from_number(dtype)?;
        check_rank(buffer.context(), to, "to")?;
        buffer.send(offset, count, dtype, to, &Call::from(&call))
    })
}

/// Starts to receive `count` elements, to `offset` bytes into the buffer, from whichever of the `from_count`
/// ranks in `from` sends first with this tag; NULL and 0: from any rank. unisono_buffer_wait_receive waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_receive(
    buffer: *const unisono_buffer_t,
    offset: u64,
    count: u64,
    dtype: unisono_dtype_t,
    from: *const u32,
    from_count: u32,
    call: *const unisono_call_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a buffer that nobody destroys meanwhile.
        let buffer = unsafe { Handle::borrow(buffer, "buffer") }?;
        // SAFETY: the contract of the header: NULL or so many ranks.
        let from = unsafe { list(from, from_count.into(), "from") }?;
        // SAFETY: the contract of the header: NULL or an options struct.
        let call = unsafe { call_options(call, "call") }?;
        let dtype = DataType::from_number(dtype)?;
        for &rank in from {
            check_rank(buffer.context(), rank, "from")?;
        }
        buffer.receive(offset, count, dtype, from, &Call::from(&call))
    })
}

/// Waits until one of the sends that were started is complete, for at most `timeout_ms` milliseconds (0 only
/// looks, unlike in options; UNISONO_FOREVER: no limit but theirs), and sets `*rank` to the rank it went to;
/// `rank` may be NULL. Each send is reported once.
///
/// UNISONO_TIMEOUT after that time: the sends go on and can be waited for again. A send's own failure is
/// returned as it is, that of its own deadline with the same status and another text, and has been reported
/// then. UNISONO_INVALID_USAGE if no send was started that has not been reported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_wait_send(
    buffer: *const unisono_buffer_t,
    timeout_ms: u64,
    rank: *mut u32,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a buffer that nobody destroys meanwhile.
        let buffer = unsafe { Handle::borrow(buffer, "buffer") }?;
        let to = buffer.wait_send(wait_deadline(timeout_ms))?;
        // SAFETY: the contract of the header: NULL or writable.
        if let Some(place) = unsafe { rank.as_mut() } {
            *place = to;
        }
        Ok(())
    })
}

/// As unisono_buffer_wait_send, for receives: `*rank` is the rank that sent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_wait_receive(
    buffer: *const unisono_buffer_t,
    timeout_ms: u64,
    rank: *mut u32,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a buffer that nobody destroys meanwhile.
        let buffer = unsafe { Handle::borrow(buffer, "buffer") }?;
        let from = buffer.wait_receive(wait_deadline(timeout_ms))?;
        // SAFETY: the contract of the header: NULL or writable.
        if let Some(place) = unsafe { rank.as_mut() } {
            *place = from;
        }
        Ok(())
    })
}

/// Ends the waits for this buffer that are under way in other threads with UNISONO_ABORTED. The messages go
/// on and can be waited for again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_abort_wait(buffer: *const unisono_buffer_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a buffer that nobody destroys meanwhile.
        unsafe { Handle::borrow(buffer, "buffer") }?.abort_wait()
    })
}

/// Ends the buffer. Messages that are under way are cancelled, as unisono_work_cancel does; what a stream has
/// been given is waited for, until its deadline at the latest. The memory is free then. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_buffer_destroy(buffer: *mut unisono_buffer_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a buffer that nobody uses any more.
        drop(unsafe { Handle::take(buffer, "buffer") }?);
        Ok(())
    });
}
