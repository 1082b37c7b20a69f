//! Operations that start together: what a thread calls between the beginning and the end of a batch.

use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use unisono::collective::request::Request;
use unisono::communicator::{Call, Context, Part, Work, connect_devices, start_parts};
use unisono::deadline::Deadline;
use unisono::error::{Error, Result, Status, fail};
use unisono::sys::fork;

use super::context::unisono_context_t;
use super::handle::Handle;
use super::status::{guard, unisono_status_t};
use super::work::{WorkHandle, unisono_work_t};

/// Where a caller's work goes.
pub(super) type WorkPlace = NonNull<MaybeUninit<*mut unisono_work_t>>;

/// What waits for the end of its batch.
enum Step {
    Connect {
        ctx: *const unisono_context_t,
        device: u32,
    },
    Operation {
        ctx: *const unisono_context_t,
        request: Request,
        call: Call,
        /// For the work that the caller has asked for.
        place: Option<WorkPlace>,
    },
}

thread_local! {
    /// How many batches this thread is in, one within the other.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Which process they were begun in. The child of a fork is in none.
    static FORK: Cell<u32> = const { Cell::new(0) };
    static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

fn depth() -> u32 {
    if DEPTH.get() > 0 && FORK.get() != fork::generation() {
        DEPTH.set(0);
        drop(take_steps());
    }
    DEPTH.get()
}

/// Whether this thread is in a batch.
pub(super) fn is_open() -> bool {
    depth() > 0
}

/// What has been called in it.
fn take_steps() -> Vec<Step> {
    // Of a thread that ends it may be gone.
    STEPS.try_with(RefCell::take).unwrap_or_default()
}

/// The batches of a thread that is in none of them until this is dropped.
pub(super) struct Aside {
    depth: u32,
    steps: Vec<Step>,
}

/// Sets aside the batches of this thread, if it is in any: a callback that happens to come in one is in none.
pub(super) fn set_aside() -> Option<Aside> {
    is_open().then(|| Aside { depth: DEPTH.take(), steps: take_steps() })
}

impl Drop for Aside {
    fn drop(&mut self) {
        DEPTH.set(self.depth);
        let steps = std::mem::take(&mut self.steps);
        let _ = STEPS.try_with(|place| place.replace(steps));
    }
}

/// Adds an operation, checked as far as its arguments go.
pub(super) fn add(
    ctx: *const unisono_context_t,
    context: &Context,
    request: Request,
    call: Call,
    place: Option<WorkPlace>,
) -> Result<()> {
    context.check(&request, &call)?;
    push(Step::Operation { ctx, request, call, place })
}

/// Adds an agreement about devices.
pub(super) fn add_connection(ctx: *const unisono_context_t, device: u32) -> Result<()> {
    push(Step::Connect { ctx, device })
}

fn push(step: Step) -> Result<()> {
    let pushed = STEPS.try_with(|steps| steps.borrow_mut().push(step));
    pushed.map_err(|_| Error::new(Status::InvalidUsage, "a batch was left open, and its thread ends"))
}

/// Begins a batch: the operations that this thread calls from here on, of whichever contexts, start together
/// at unisono_batch_end. So a send and the receive that answers it, or both halves of an exchange, can be
/// given to one stream, or be waited for without works; one thread can have several ranks of a group; and
/// sends and receives between GPUs are one launch for each context, on the first of their streams, for which
/// the others wait. (More than 240 of a context, where what a rank sends itself counts once more, are
/// several, one behind the other: what of them waits for whom is then for both sides to have alike.)
///
/// Between the two, an operation is checked for what is wrong with its arguments, and returns: one that is
/// refused is not in the batch. `*work` is set at the end, and not touched before. Callbacks of works are in
/// no batch, whichever thread calls them. Collectives of one context run in the order of their calls; sends
/// and receives are beside everything else of the batch, also where they have a stream in common, so nothing
/// of a batch sends what another operation of it stores. (Only those between GPUs come behind others,
/// wherever the batch has them: behind its collectives on their streams, and those of their context on any;
/// and on one stream behind those of a context whose first was called before. Who calls the same one by one
/// keeps this order.) Contexts, buffers and the places of works stay until the end. Operations are those that
/// take a context, options and a work, but unisono_sparse_allreduce: that one, algorithms and unisono_buffer_
/// functions are in no batch, and neither is what waits for the others otherwise.
///
/// Before a context's first collective on device memory its GPUs agree (unisono_context_connect_device). If
/// that is in a batch, a long send of it is on its way meanwhile, and the driver may wait for that: a program
/// whose ranks receive it only behind the collective has the GPUs agree before the batch.
///
/// Batches nest: the outermost end counts.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_batch_begin() -> unisono_status_t {
    guard(|| {
        let Some(depth) = depth().checked_add(1) else {
            fail!(InvalidUsage, "batches are {} deep", u32::MAX)
        };
        DEPTH.set(depth);
        FORK.set(fork::generation());
        Ok(())
    })
}

/// Ends a batch, and starts what was called in it, if it is the outermost. Operations without a work and
/// without a stream are complete when this returns.
///
/// The first failure is returned: of devices that cannot agree (unisono_context_connect_device), and then no
/// operation is started; of an operation that cannot be, and then those after it are not (but for some that
/// have been by then, where ranks of a group begin in turns, or devices agree for a collective of the batch);
/// or of one that this has waited for. Of a group of which several ranks are in the batch no operation is
/// started if the memory or the stream of one is refused. `*work` is NULL for what is not started; what has
/// been started runs on. UNISONO_INVALID_USAGE if this thread is in no batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_batch_end() -> unisono_status_t {
    guard(|| {
        match depth() {
            0 => fail!(
                InvalidUsage,
                "there is no batch to end: unisono_batch_begin comes first, in this thread"
            ),
            depth => DEPTH.set(depth - 1),
        }
        if is_open() {
            return Ok(());
        }
        // Those that a callback adds meanwhile are in no batch.
        let steps = take_steps();
        // SAFETY: the contract of the header: what the calls of the batch were given is there until this has
        // returned, and what they use until they are complete.
        unsafe { start(&steps) }
    })
}

/// # Safety
/// The contexts are there, the places of works can be written, and the buffers are there until the operations
/// are complete.
unsafe fn start(steps: &[Step]) -> Result<()> {
    let (mut connections, mut parts, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let mut refused = Ok(());
    for step in steps {
        match step {
            Step::Connect { ctx, device } => {
                // SAFETY: this function's contract.
                let context = unsafe { context(*ctx) };
                refused = refused.and(context.map(|context| connections.push((context, *device))));
            }
            Step::Operation { ctx, request, call, place } => {
                places.push(*place);
                // SAFETY: this function's contract.
                let context = unsafe { context(*ctx) };
                let awaited = place.is_some() || call.stream.is_none();
                let part = context.map(|context| parts.push(Part { context, request, call, awaited }));
                refused = refused.and(part);
            }
        }
    }
    for place in places.iter().flatten() {
        // SAFETY: this function's contract.
        unsafe { place.as_ptr().write(MaybeUninit::new(std::ptr::null_mut())) };
    }
    refused?;
    connect_devices(&connections)?;
    // SAFETY: this function's contract.
    let works = unsafe { start_parts(&parts) };
    let mut outcome = Ok(());
    let mut waited: Vec<Work> = Vec::new();
    for ((work, place), part) in works.into_iter().zip(places).zip(&parts) {
        match (work, place) {
            (Ok(work), Some(place)) => {
                let handle = <unisono_work_t as Handle>::into_handle(WorkHandle::new(work));
                // SAFETY: this function's contract.
                unsafe { place.as_ptr().write(MaybeUninit::new(handle)) };
            }
            (Ok(work), None) if part.call.stream.is_none() => waited.push(work),
            (Ok(_), None) => {}
            (Err(error), _) => outcome = outcome.and(Err(error)),
        }
    }
    for work in waited {
        // It ends at its own deadline.
        outcome = outcome.and(work.wait(Deadline::NEVER).map(drop));
    }
    outcome
}

/// # Safety
/// The context is there, or the handle of something else is.
unsafe fn context<'a>(ctx: *const unisono_context_t) -> Result<&'a Context> {
    // SAFETY: this function's contract.
    unsafe { Handle::borrow(ctx, "ctx") }.map(super::context::ContextHandle::inner)
}
