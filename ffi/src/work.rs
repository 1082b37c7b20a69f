//! Operations under way.

use std::ffi::{CString, c_char, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::OnceLock;

use unisono::collective::request::Request;
use unisono::communicator::{Call, Completion, Context, Work};
use unisono::cuda::driver::StreamHandle;
use unisono::deadline::Deadline;
use unisono::error::{Result, Status, fail};

use super::argument::{out, wait_deadline};
use super::batch;
use super::call::{CUstream_st, call_options, unisono_call_t};
use super::context::{ContextHandle, unisono_context_t};
use super::handle::{Handle, handle};
use super::point_to_point::UNISONO_NO_RANK;
use super::status::{c_text, guard, guard_or, unisono_last_error, unisono_status_t};

/// An operation under way. Made by every call that is given a `work`; ended by unisono_work_destroy. All
/// functions may be called from any thread, also several at once.
pub struct unisono_work_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_work_t, WorkHandle);

/// What a completed work calls: `status` and `error` are what unisono_work_status and unisono_work_error
/// would answer; the text is valid during the call.
pub type unisono_work_callback_t =
    Option<unsafe extern "C" fn(user: *mut c_void, status: unisono_status_t, error: *const c_char)>;

/// A work and, once somebody has asked, its failure as C reads it.
pub(super) struct WorkHandle {
    work: Work,
    error: OnceLock<CString>,
}

impl WorkHandle {
    pub(super) fn new(work: Work) -> WorkHandle {
        WorkHandle { work, error: OnceLock::new() }
    }
}

/// The arguments that every operation ends with, and the context that it starts with.
pub(super) struct Launch<'a> {
    ctx: *const unisono_context_t,
    context: &'a Context,
    options: unisono_call_t,
    work: Option<&'a mut MaybeUninit<*mut unisono_work_t>>,
}

impl<'a> Launch<'a> {
    /// # Safety
    /// Each pointer is NULL or what its type says, until `'a` ends.
    pub(super) unsafe fn new(
        ctx: *const unisono_context_t,
        call: *const unisono_call_t,
        work: *mut *mut unisono_work_t,
    ) -> Result<Launch<'a>> {
        // SAFETY: this function's contract, as for the two below.
        let context: &ContextHandle = unsafe { Handle::borrow(ctx, "ctx") }?;
        // SAFETY: as above.
        let options = unsafe { call_options(call, "call") }?;
        // SAFETY: as above; MaybeUninit reads nothing.
        let work = unsafe { work.cast::<MaybeUninit<*mut unisono_work_t>>().as_mut() };
        Ok(Launch { ctx, context: context.inner(), options, work })
    }

    pub(super) fn options(&self) -> &unisono_call_t {
        &self.options
    }

    pub(super) fn size(&self) -> u32 {
        self.context.size()
    }

    /// This rank, to index lists that have an entry for each rank.
    pub(super) fn rank(&self) -> usize {
        self.context.rank() as usize
    }

    pub(super) fn check_rank(&self, rank: u32, name: &str) -> Result<()> {
        check_rank(self.context, rank, name)
    }

    /// What is needed on `root` alone: NULL elsewhere.
    pub(super) fn on(&self, root: u32, buffer: impl FnOnce() -> Result<*mut u8>) -> Result<*mut u8> {
        if self.context.rank() == root { buffer() } else { Ok(std::ptr::null_mut()) }
    }

    /// Runs to completion, or starts and hands out the work.
    ///
    /// # Safety
    /// As [`Context::run`] and [`Context::start`].
    pub(super) unsafe fn run(self, request: Request) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.complete(request) }.map(drop)
    }

    /// As [`Launch::run`], with the completion of what ran to completion. In a batch it waits for the batch's
    /// end.
    ///
    /// # Safety
    /// As [`Context::run`] and [`Context::start`].
    pub(super) unsafe fn complete(self, request: Request) -> Result<Option<Completion>> {
        let call = Call::from(&self.options);
        if batch::is_open() {
            let place = self.work.map(NonNull::from);
            return batch::add(self.ctx, self.context, request, call, place).map(|()| None);
        }
        match self.work {
            // SAFETY: this function's contract. What fails later is the context's failure.
            None if call.stream.is_some() => unsafe { self.context.launch(&request, &call) }.map(|()| None),
            // SAFETY: this function's contract.
            None => unsafe { self.context.run(&request, &call) }.map(Some),
            Some(place) => {
                // SAFETY: this function's contract.
                let work = unsafe { self.context.start(&request, &call) }?;
                place.write(Handle::into_handle(WorkHandle::new(work)));
                Ok(None)
            }
        }
    }
}

/// That `rank` is one of the context's.
pub(super) fn check_rank(context: &Context, rank: u32, name: &str) -> Result<()> {
    let (size, group) = (context.size(), context.name());
    match rank {
        _ if rank < size => Ok(()),
        _ if size == 1 => fail!(InvalidArgument, "{name} is {rank}, but '{group}' has one rank: 0"),
        _ => fail!(InvalidArgument, "{name} is {rank}, but '{group}' has {size} ranks: 0 to {}", size - 1),
    }
}

/// The work of a handle that this call keeps, should a callback that it leads to destroy the handle.
///
/// # Safety
/// NULL or a work that nobody but such a callback destroys meanwhile.
unsafe fn kept(work: *const unisono_work_t) -> Result<Work> {
    // SAFETY: this function's contract; nothing is called back before it returns.
    unsafe { Handle::borrow(work, "work") }.map(|handle| handle.work.clone())
}

/// Waits until the operation is complete, moving it in this thread, and returns its outcome. It ends at the
/// operation's own deadline at the latest. May be called again, and gives the same outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_wait(work: *const unisono_work_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        work.wait(Deadline::NEVER).map(drop)
    })
}

/// As unisono_work_wait, for at most `timeout_ms` milliseconds: UNISONO_TIMEOUT then, and the operation runs
/// on (so does a failure with UNISONO_TIMEOUT of its own deadline read: unisono_work_status tells the two
/// apart). 0 only looks; UNISONO_FOREVER is unisono_work_wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_wait_for(
    work: *const unisono_work_t,
    timeout_ms: u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        work.wait(wait_deadline(timeout_ms)).map(drop)
    })
}

/// Sets `*done` to 1 if the operation is complete, successfully or not, else to 0. Never blocks. Returns
/// UNISONO_OK in both cases; unisono_work_status has the outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_test(work: *const unisono_work_t, done: *mut i32) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        // SAFETY: the contract of the header: NULL or writable.
        let done = unsafe { out(done, "done") }?;
        done.write(work.test().is_some().into());
        Ok(())
    })
}

/// The outcome of the operation, UNISONO_IN_PROGRESS while it runs. Never blocks. UNISONO_INVALID_ARGUMENT
/// for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_status(work: *const unisono_work_t) -> unisono_status_t {
    guard_or(
        |error| error.status() as unisono_status_t,
        || {
            // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
            let work = unsafe { kept(work) }?;
            Ok(match work.test() {
                None => Status::InProgress,
                Some(Ok(_)) => Status::Ok,
                Some(Err(error)) => error.status(),
            } as unisono_status_t)
        },
    )
}

/// The text of the operation's failure; empty while it runs and after success. Never NULL. Valid until
/// unisono_work_destroy. For NULL, or what is no work, it is that of unisono_last_error, which says so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_error(work: *const unisono_work_t) -> *const c_char {
    guard_or(
        |_| unisono_last_error(),
        || {
            // SAFETY: the contract of the header: NULL or a work that nobody destroys meanwhile.
            let work = unsafe { Handle::borrow(work, "work") }?;
            Ok(match work.work.peek() {
                Some(Err(error)) => work.error.get_or_init(|| c_text(error.text())).as_ptr(),
                _ => c"".as_ptr(),
            })
        },
    )
}

/// The rank that a completed unisono_receive_any took its message from; UNISONO_NO_RANK for other operations.
/// UNISONO_INVALID_USAGE while it runs, and its failure if it failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_source(
    work: *const unisono_work_t,
    source: *mut u32,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(source, "source") }?;
        match work.test() {
            None => fail!(InvalidUsage, "the source is not known yet: the receive is still running"),
            Some(completion) => place.write(completion?.source.unwrap_or(UNISONO_NO_RANK)),
        };
        Ok(())
    })
}

/// Calls `callback` once, with `user`, when the operation is complete: at once, in this thread, if it already
/// is and this is no callback, else from the thread that completes it or one of the library's. The callback
/// does not block; it may start operations (with a `work`) and destroy works, this one included. May be
/// called several times for several callbacks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_on_complete(
    work: *const unisono_work_t,
    callback: unisono_work_callback_t,
    user: *mut c_void,
) -> unisono_status_t {
    /// The caller's pointer on its way to another thread.
    struct User(*mut c_void);
    // SAFETY: the header says that the callback may run in any thread with `user`.
    unsafe impl Send for User {}

    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody destroys meanwhile.
        let work = unsafe { Handle::borrow(work, "work") }?;
        let Some(callback) = callback else { fail!(InvalidArgument, "callback is NULL") };
        let user = User(user);
        // A clone, since the callback may destroy the handle.
        work.work.clone().on_complete(Box::new(move |outcome| {
            // The whole of it, not its field alone, moves here: the field is not Send.
            let User(user) = { user };
            let (status, text) = match outcome {
                Ok(_) => (Status::Ok, CString::default()),
                Err(error) => (error.status(), c_text(error.text())),
            };
            let _aside = batch::set_aside();
            // SAFETY: the header's contract for callbacks.
            unsafe { callback(user, status as unisono_status_t, text.as_ptr()) };
        }));
        Ok(())
    })
}

/// Ends a send or receive with UNISONO_ABORTED, so that its buffer may be used again at once. A message that
/// has begun to move is lost: what came of a receive means nothing, and the other side of it fails with
/// UNISONO_PEER_FAILED, if it has not ended; one that has not is for the next receive, or was never sent. A
/// send that goes whole all the same, the rest of it from a copy, ends as complete. UNISONO_INVALID_USAGE for
/// other operations, and for those that GPUs exchange: they end by themselves, by their deadline, or by
/// unisono_context_abort. Of one that goes by way of the host on a stream the buffer is free in the order of
/// that stream. A completed operation stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_cancel(work: *const unisono_work_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        work.cancel()
    })
}

/// Has what the CUDA stream `stream` is given after this wait for the operation, in place of the host.
/// Returns at once, unless the stream waits for many operations already: see the `stream` of a call. For an
/// operation on device memory that goes through the host and was given no stream, it returns when that is
/// complete, unless CUDA_DEVICE_MAX_CONNECTIONS is 32. A failed operation lets the stream go on;
/// unisono_work_status tells. UNISONO_INVALID_USAGE when the stream is being captured. NULL is the default
/// stream of the thread's current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_block_stream(
    work: *const unisono_work_t,
    stream: *mut CUstream_st,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a work that nobody else destroys meanwhile.
        let work = unsafe { kept(work) }?;
        // SAFETY: the contract of the header: a stream.
        unsafe { work.block_stream(StreamHandle(stream.expose_provenance())) }
    })
}

/// Ends the handle, not the operation: one that still runs, runs on, and its buffers stay in use. NULL is
/// fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_work_destroy(work: *mut unisono_work_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a work that nobody uses any more.
        drop(unsafe { Handle::take(work, "work") }?);
        Ok(())
    });
}
