//! Allreduce of sparse tensors.

use std::ffi::c_void;
use std::marker::{PhantomData, PhantomPinned};
use std::mem::MaybeUninit;

use unisono::communicator::Call;
use unisono::communicator::sparse::{RawTensor, Sparse};
use unisono::cuda::driver::StreamHandle;
use unisono::reduce::DataType;

use super::argument::out;
use super::call::{CUstream_st, call_options, unisono_call_t};
use super::context::unisono_context_t;
use super::datatype::{operator, unisono_dtype_t, unisono_op_t};
use super::handle::{Handle, handle};
use super::status::{guard, guard_or, unisono_status_t};
use super::work::{WorkHandle, unisono_work_t};

/// The result of a sparse allreduce: a sparse tensor in coordinate form, sorted by its indices, each of which
/// occurs once. It belongs to the caller and is ended by unisono_sparse_destroy. Once complete it does not
/// change. Any thread may read it.
pub struct unisono_sparse_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_sparse_t, Sparse, survives_fork);

/// Combines the sparse tensors of all ranks: where several ranks have an element, as unisono_allreduce would;
/// where one has it, it stays. Every rank gets the same result.
///
/// A tensor has `nnz` elements, each at an index of `dims` coordinates: `indices` holds `dims` × `nnz`
/// numbers, first the first coordinate of every element, then the second, and so on. Each element is a block
/// of `block` values of `dtype`: `values` holds `nnz` × `block`, in the same order. `nnz` may differ from
/// rank to rank and be 0; an index that occurs several times on a rank is summed there first (combined, for
/// the other operators). `dims`, `block`, `dtype` and `op` are the same on every rank.
///
/// Operators: sum, product, max, min and average (the combination over the ranks that have the element,
/// divided by the size of the group). `call` may set tag and deadline; NULL: the defaults.
///
/// Without `work` it runs in this thread, until it is complete, and sets `*result`. With `work` it returns at
/// once and sets both. `*result` is empty (`nnz` 0) until the work is complete, and stays so if it fails; in
/// every case the caller ends it, before or after the work. Nothing is set when the call itself fails.
///
/// `indices` and `values` are both in host memory, or both in memory of one device; ranks may differ in that.
/// Host memory has been read when the call returns. Device memory is read when the stream of `call` comes to
/// the call, and what the stream is given next waits until it has been read; without a stream, after what the
/// device's default stream was given before, and it stays as it is until the operation is complete. The
/// result is in host memory, and unisono_sparse_copy brings it to a device: how much room it needs there is
/// known when it is complete. So a call without `work` waits for the result with a stream, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_allreduce(
    ctx: *const unisono_context_t,
    indices: *const i64,
    values: *const c_void,
    nnz: u64,
    dims: u32,
    block: u64,
    dtype: unisono_dtype_t,
    op: unisono_op_t,
    call: *const unisono_call_t,
    result: *mut *mut unisono_sparse_t,
    work: *mut *mut unisono_work_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?.inner();
        // SAFETY: the contract of the header: NULL or an options struct.
        let call = unsafe { call_options(call, "call") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(result, "result") }?;
        let dtype = DataType::from_number(dtype)?;
        let operator = operator(op, dtype, &call)?;
        let input = RawTensor { indices, values: values.cast(), nnz, dims, block, dtype };
        let call = Call::from(&call);
        // SAFETY: the contract of the header: NULL or writable; MaybeUninit reads nothing.
        let combined = match unsafe { work.cast::<MaybeUninit<*mut unisono_work_t>>().as_mut() } {
            // SAFETY: the contract of the header: NULL, or lists as long as the arguments say.
            None => unsafe { context.run_sparse(&input, operator, &call) }?,
            Some(handle) => {
                // SAFETY: as above, for as long as the header says.
                let (work, result) = unsafe { context.start_sparse(&input, operator, &call) }?;
                handle.write(Handle::into_handle(WorkHandle::new(work)));
                result
            }
        };
        place.write(Handle::into_handle(combined));
        Ok(())
    })
}

/// How many coordinates an index has; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_dims(sparse: *const unisono_sparse_t) -> u32 {
    // SAFETY: the contract of the header: NULL or a result that nobody destroys meanwhile.
    guard_or(|_| 0, || Ok(unsafe { Handle::borrow(sparse, "sparse") }?.dims()))
}

/// How many elements there are; 0 for NULL, and before the work that makes the result is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_nnz(sparse: *const unisono_sparse_t) -> u64 {
    // SAFETY: the contract of the header: NULL or a result that nobody destroys meanwhile.
    guard_or(|_| 0, || Ok(unsafe { Handle::borrow(sparse, "sparse") }?.nnz()))
}

/// The indices in host memory, dims × nnz numbers laid out as in unisono_sparse_allreduce; NULL for NULL, and
/// not to be read where there are no elements. Valid until unisono_sparse_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_indices(sparse: *const unisono_sparse_t) -> *const i64 {
    // SAFETY: the contract of the header: NULL or a result that nobody destroys meanwhile.
    guard_or(|_| std::ptr::null(), || Ok(unsafe { Handle::borrow(sparse, "sparse") }?.indices().as_ptr()))
}

/// The values in host memory, nnz × block of them, aligned to 8 bytes; NULL for NULL, and not to be read
/// where there are no elements. Valid until unisono_sparse_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_values(sparse: *const unisono_sparse_t) -> *const c_void {
    // SAFETY: the contract of the header: NULL or a result that nobody destroys meanwhile.
    guard_or(
        |_| std::ptr::null(),
        || Ok(unsafe { Handle::borrow(sparse, "sparse") }?.values().as_ptr().cast()),
    )
}

/// Copies the result to `indices` (dims × nnz numbers) and `values` (nnz × block values), both in host memory
/// or both in memory of one device; NULL for what is not wanted. The result may be ended as soon as this
/// returns.
///
/// To a device the copies are in the order of `stream`, and this returns at once. With NULL they come after
/// what the device's default stream was given before, and are there on return. For host memory `stream` is
/// NULL. UNISONO_INVALID_USAGE while the result is not there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_copy(
    sparse: *const unisono_sparse_t,
    indices: *mut i64,
    values: *mut c_void,
    stream: *mut CUstream_st,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a result that nobody destroys meanwhile.
        let sparse = unsafe { Handle::borrow(sparse, "sparse") }?;
        let stream = (!stream.is_null()).then(|| StreamHandle(stream.expose_provenance()));
        // SAFETY: the contract of the header: NULL or room for so much, and NULL or a stream.
        unsafe { sparse.copy(indices, values.cast(), stream) }
    })
}

/// Ends the result, also before its work is complete. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_sparse_destroy(sparse: *mut unisono_sparse_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a result that nobody uses any more.
        drop(unsafe { Handle::take(sparse, "sparse") }?);
        Ok(())
    });
}
