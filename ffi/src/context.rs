//! Contexts: one rank's membership in a group.

use std::ffi::{CStr, CString, c_char};
use std::marker::{PhantomData, PhantomPinned};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use unisono::communicator::{Context, Options as ContextOptions, Rendezvous};
use unisono::error::{Result, Status, fail};
use unisono::rendezvous::id::served;
use unisono::rendezvous::tcp_server::ServerHandle;

use super::argument::{self, Options, list, optional_text, out, required_options, text, timeout};
use super::batch;
use super::handle::{Handle, handle};
use super::point_to_point::UNISONO_NO_RANK;
use super::status::{c_text, guard, guard_or, unisono_last_error, unisono_status_t};
use super::store::unisono_store_t;
use super::unique_id::unisono_unique_id_t;

/// A context: this rank's membership in a group, a communicator. Ended by unisono_context_destroy. All
/// functions may be called from any thread; operations that must match across ranks are called in the same
/// order on each of them, or with tags.
pub struct unisono_context_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

handle!(unisono_context_t, ContextHandle);

/// A context with its texts as C reads them.
pub(super) struct ContextHandle {
    context: Context,
    name: CString,
    failure: OnceLock<CString>,
    /// Serves the unique id that the group met by, if this process made it, as long as the context or a child
    /// lives.
    server: Option<Arc<ServerHandle>>,
}

impl ContextHandle {
    fn new(context: Context, server: Option<Arc<ServerHandle>>) -> ContextHandle {
        let name = c_text(context.name());
        ContextHandle { context, name, failure: OnceLock::new(), server }
    }

    /// A child, as C gets it.
    fn child(&self, context: Context) -> *mut unisono_context_t {
        Handle::into_handle(ContextHandle::new(context, self.server.clone()))
    }

    pub(super) fn inner(&self) -> &Context {
        &self.context
    }
}

/// The colour of a rank that joins no child in unisono_context_split.
pub const UNISONO_NO_COLOR: u32 = u32::MAX;

/// Milliseconds of a context's timeout if its options name none: 5 minutes.
pub const UNISONO_DEFAULT_TIMEOUT_MS: u64 = 300_000;

/// What a context is made from. Start from UNISONO_CONTEXT_OPTIONS_INIT; what is zero or NULL is unset. The
/// struct and what it points to are read during the call only, but for the store, which the context keeps by
/// itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct unisono_context_options_t {
    /// sizeof(unisono_context_options_t), as UNISONO_CONTEXT_OPTIONS_INIT sets it.
    pub size: u64,
    /// This rank, from 0.
    pub rank: u32,
    /// How many ranks the group has, the same on every rank; at most 65536.
    pub rank_count: u32,
    /// How the ranks find each other: a store that all of them reach, or else `id`.
    pub store: *const unisono_store_t,
    /// The unique id that one rank made and all have, or else `store`.
    pub id: *const unisono_unique_id_t,
    /// The group's name, for errors and logs, the same on every rank; NULL: "default". Groups that meet in
    /// the same store have different names. One whose meeting has failed is spent in that store: the ranks
    /// try again with another.
    pub name: *const c_char,
    /// Milliseconds until the creation, and each operation that names no other deadline, fails with
    /// UNISONO_TIMEOUT; 0: UNISONO_DEFAULT_TIMEOUT_MS; UNISONO_FOREVER: never. All steps of a creation have
    /// them together; once all ranks have come, they have a second more for what they set up. So has the
    /// making of a child. See unisono_context_set_timeout.
    pub timeout_ms: u64,
    /// The network interface for TCP, by name, address or CIDR; NULL: UNISONO_INTERFACE of the environment,
    /// else chosen.
    pub interface: *const c_char,
    /// The transports allowed, such as "shm,tcp"; NULL: UNISONO_TRANSPORT of the environment, else all.
    pub transports: *const c_char,
    /// The most thread blocks of a kernel by which the ranks' GPUs exchange, and so the most multiprocessors
    /// that it takes; 0: as many as suit it. The ranks agree on the least that any of them gives. Children
    /// have it, too. Of kernels that carry by way of the host, which take two at least, or three where they
    /// combine, and of those that copy or combine by themselves, as of several pointers of a process, each
    /// rank obeys its own. Sends and receives between GPUs have a block for each rank of the group at least.
    pub max_blocks: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: repr(C) from `size: u64` on, eight bytes a field (pairs of four), and integers and pointers are
// valid as zeros.
unsafe impl Options for unisono_context_options_t {
    const INIT: &'static str = "UNISONO_CONTEXT_OPTIONS_INIT";
    const FIRST_SIZE: u64 = 64;
}

/// What is common to both ways of creation.
///
/// # Safety
/// The texts are NULL or C strings.
unsafe fn parsed(options: &unisono_context_options_t, rendezvous: Rendezvous) -> Result<ContextOptions> {
    if options.reserved != 0 {
        fail!(
            InvalidArgument,
            "options->reserved is {}; initialise the struct with UNISONO_CONTEXT_OPTIONS_INIT",
            options.reserved
        );
    }
    // SAFETY: this function's contract, as for the two below.
    let name = unsafe { optional_text(options.name, "options->name") }?;
    // SAFETY: as above.
    let interface = unsafe { optional_text(options.interface, "options->interface") }?;
    // SAFETY: as above.
    let transports = unsafe { optional_text(options.transports, "options->transports") }?;
    Ok(ContextOptions {
        rank: options.rank,
        size: options.rank_count,
        rendezvous,
        name: name.unwrap_or_default().to_owned(),
        timeout: or_default(options.timeout_ms),
        interface: interface.map(str::to_owned),
        transports: transports.map(str::to_owned),
        host: None,
    })
}

fn or_default(timeout_ms: u64) -> Duration {
    timeout(timeout_ms).unwrap_or(Duration::from_millis(UNISONO_DEFAULT_TIMEOUT_MS))
}

/// Creates a context: meets the other ranks through a store or a unique id, and returns when all have
/// arrived.
///
/// `*ctx` is set on success and ended by unisono_context_destroy. A rank that does not come is
/// UNISONO_TIMEOUT, and the text names it. A meeting that has failed is not repeated under its name in its
/// store, where the ranks that came are counted: try again with another name, or in a store of
/// unisono_store_create_prefix, or with a new id, alike on all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_create(
    options: *const unisono_context_options_t,
    ctx: *mut *mut unisono_context_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an options struct.
        let options = unsafe { required_options(options, "options") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(ctx, "ctx") }?;
        let (rank, size) = (options.rank, options.rank_count);
        if size == 0 {
            fail!(InvalidArgument, "options->rank_count is 0: say how many ranks the group has");
        }
        if rank >= size {
            fail!(
                InvalidArgument,
                "options->rank is {rank}, but options->rank_count is {size}: ranks are 0 to {}",
                size - 1
            );
        }
        let rendezvous = match (options.store.is_null(), options.id.is_null()) {
            (false, true) => {
                // SAFETY: the contract of the header: a store.
                Rendezvous::Store(unsafe { Handle::borrow(options.store, "options->store") }?.inner().clone())
            }
            // SAFETY: the contract of the header: not NULL, so a unique id.
            (true, false) => Rendezvous::Id(unsafe { options.id.read() }.bytes),
            (true, true) => {
                fail!(InvalidArgument, "options->store and options->id are NULL: one of them is needed")
            }
            (false, false) => {
                fail!(InvalidArgument, "options->store and options->id are both set: give one of them")
            }
        };
        let id = if let Rendezvous::Id(bytes) = rendezvous { Some(bytes) } else { None };
        let server = id.as_ref().and_then(served::server);
        let max_blocks = options.max_blocks;
        // SAFETY: the contract of the header: texts.
        let options = unsafe { parsed(&options, rendezvous) }?;
        let context = Context::create(options);
        // Also where this rank, or another, was given wrong arguments: that can be put right while the id is
        // served.
        served::is_over(server.as_slice(), context.is_ok());
        let context = context?;
        context.limit_blocks(max_blocks);
        place.write(Handle::into_handle(ContextHandle::new(context, server)));
        Ok(())
    })
}

/// Creates a context from the environment of the launcher: unisono-run, torchrun, mpirun (Open MPI, MPICH),
/// srun.
///
/// Collective over the whole job: every rank calls it equally often and, in each process, one call after the
/// other; the n-th calls of all ranks meet. For more contexts duplicate or split the first. `options` may be
/// NULL; its rank, rank_count, store and id are unset. A process that no launcher started is
/// UNISONO_INVALID_USAGE, and the text says which variables were looked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_create_from_env(
    options: *const unisono_context_options_t,
    ctx: *mut *mut unisono_context_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an options struct.
        let options = unsafe { argument::options(options, "options") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(ctx, "ctx") }?;
        // SAFETY: all fields are valid as zeros, by `Options`.
        let options = options.unwrap_or_else(|| unsafe { std::mem::zeroed() });
        if options.rank != 0 || options.rank_count != 0 || !options.store.is_null() || !options.id.is_null() {
            fail!(
                InvalidArgument,
                "options->rank, rank_count, store and id come from the environment here: leave them unset, or call unisono_context_create"
            );
        }
        let max_blocks = options.max_blocks;
        // SAFETY: the contract of the header: texts.
        let options = unsafe { parsed(&options, Rendezvous::Environment) }?;
        let context = Context::create(options)?;
        context.limit_blocks(max_blocks);
        place.write(Handle::into_handle(ContextHandle::new(context, None)));
        Ok(())
    })
}

/// Splits the group: the ranks that give the same `color` form a child, ordered by `key`, then by their rank
/// here.
///
/// Every rank of the group calls it, and several splits of one group in the same order, so not from two
/// threads at once. With UNISONO_NO_COLOR this rank joins no child and `*child` is set to NULL. The deadline
/// is the group's timeout, which the child has, too, as it has `max_blocks`. It is called NAME/COLOR.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_split(
    ctx: *const unisono_context_t,
    color: u32,
    key: i64,
    child: *mut *mut unisono_context_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(child, "child") }?;
        let color = (color != UNISONO_NO_COLOR).then_some(color);
        let child = context.context.split(color, key)?;
        place.write(child.map_or(std::ptr::null_mut(), |child| context.child(child)));
        Ok(())
    })
}

/// Forms a named child of the `rank_count` listed ranks of this group, in that order.
///
/// Its members alone call it, with the same name and list; another rank's call is UNISONO_NOT_MEMBER and
/// names the rank and the group. Children of the same name and list come in the same order on all of them.
/// Deadline, timeout and `max_blocks` as in unisono_context_split. A group that has failed forms none: its
/// failure is returned. One that fails meanwhile fails the child.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_group(
    ctx: *const unisono_context_t,
    name: *const c_char,
    ranks: *const u32,
    rank_count: u32,
    child: *mut *mut unisono_context_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?;
        // SAFETY: the contract of the header: NULL or a C string.
        let name = unsafe { text(name, "name") }?;
        // SAFETY: the contract of the header: NULL or so many ranks.
        let ranks = unsafe { list(ranks, rank_count.into(), "ranks") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(child, "child") }?;
        place.write(context.child(context.context.group(name, ranks)?));
        Ok(())
    })
}

/// Makes a child of the same ranks whose operations are independent of this context's. Every rank of the
/// group calls it, several times in the same order, so not from two threads at once. It is called NAME+;
/// deadline, timeout, `max_blocks` and a group that has failed as in unisono_context_group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_duplicate(
    ctx: *const unisono_context_t,
    child: *mut *mut unisono_context_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let context = unsafe { Handle::borrow(ctx, "ctx") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(child, "child") }?;
        place.write(context.child(context.context.duplicate()?));
        Ok(())
    })
}

/// This rank within the group, from 0; UNISONO_NO_RANK for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_rank(ctx: *const unisono_context_t) -> u32 {
    // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
    guard_or(|_| UNISONO_NO_RANK, || Ok(unsafe { Handle::look(ctx, "ctx") }?.context.rank()))
}

/// How many ranks the group has; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_size(ctx: *const unisono_context_t) -> u32 {
    // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
    guard_or(|_| 0, || Ok(unsafe { Handle::look(ctx, "ctx") }?.context.size()))
}

/// The group's name; empty for NULL. Valid until unisono_context_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_name(ctx: *const unisono_context_t) -> *const c_char {
    // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
    guard_or(|_| c"".as_ptr(), || Ok(unsafe { Handle::look(ctx, "ctx") }?.name.as_ptr()))
}

/// Sets the group's timeout on this rank, `timeout_ms` as in the options that a context is created from: what
/// is called from now on has it, and so have the children that are made from now on, and their making. What
/// runs, and children that are there, keep theirs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_set_timeout(
    ctx: *const unisono_context_t,
    timeout_ms: u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let handle = unsafe { Handle::borrow(ctx, "ctx") }?;
        handle.context.set_timeout(or_default(timeout_ms));
        Ok(())
    })
}

/// Collective: has the ranks' GPUs agree whether they exchange directly. `device` is this rank's, by CUDA's
/// number. May allocate device memory, and wait for the device. That GPUs do not reach each other, or that a
/// rank has no driver, is no error: then calls on device memory go through the host, or tell what they lack.
///
/// The first collective on device memory does it where it has to. Called before that, this also has messages
/// go from GPU to GPU: sends and unisono_receive, without a tag. All ranks promise then that such messages are
/// in device memory on both sides, and that those who receive them name the sender; those of no elements are
/// among them, whatever their pointers, and wait for nobody. Two that wait for each other on one stream belong
/// in a batch (unisono_batch_begin): on GPUs a long send ends when it is received. Once agreed, it changes
/// nothing. In a batch it is done at its end, before the operations.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_connect_device(
    ctx: *const unisono_context_t,
    device: u32,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let handle = unsafe { Handle::borrow(ctx, "ctx") }?;
        match batch::is_open() {
            true => batch::add_connection(ctx, device),
            false => handle.context.connect_device(device),
        }
    })
}

/// Fails everything that runs or is called on this context, here at once and on the other ranks within a
/// second. Returns at once; from any thread, also while others wait. The library touches no host memory of
/// works of this context any more then, whether they are waited for or not, unless a reduction is in a
/// function of the program's that takes long. The context can only be destroyed afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_abort(ctx: *const unisono_context_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        unsafe { Handle::borrow(ctx, "ctx") }?.context.abort();
        Ok(())
    })
}

/// As unisono_context_abort, with a cause in one line, which the failure tells on every rank. NULL: none.
/// What is not UTF-8 in it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_abort_because(
    ctx: *const unisono_context_t,
    cause: *const c_char,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
        let handle = unsafe { Handle::borrow(ctx, "ctx") }?;
        // SAFETY: the contract of the header: NULL or a C string that does not change meanwhile.
        let cause = (!cause.is_null()).then(|| unsafe { CStr::from_ptr(cause) }.to_string_lossy());
        handle.context.abort_because(cause.as_deref());
        Ok(())
    })
}

/// The status of the first failure that ended this context, on whichever rank; UNISONO_OK if none did. Never
/// blocks. UNISONO_INVALID_ARGUMENT for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_status(ctx: *const unisono_context_t) -> unisono_status_t {
    guard_or(
        |error| error.status() as unisono_status_t,
        || {
            // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
            let failure = unsafe { Handle::borrow(ctx, "ctx") }?.context.failure();
            Ok(failure.map_or(Status::Ok, |error| error.status()) as unisono_status_t)
        },
    )
}

/// The text of that failure; empty if there was none. Never NULL. Valid until unisono_context_destroy. For
/// NULL, or what is no context, it is that of unisono_last_error, which says so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_error(ctx: *const unisono_context_t) -> *const c_char {
    guard_or(
        |_| unisono_last_error(),
        || {
            // SAFETY: the contract of the header: NULL or a context that nobody destroys meanwhile.
            let handle = unsafe { Handle::borrow(ctx, "ctx") }?;
            Ok(match handle.context.failure() {
                Some(error) => handle.failure.get_or_init(|| c_text(error.text())).as_ptr(),
                None => c"".as_ptr(),
            })
        },
    )
}

/// Ends this rank's membership. NULL is fine.
///
/// Not collective, and waits for no other rank. Operations that still run, run on, to their deadlines at the
/// latest; until then the library keeps what they need, links and threads included, and their buffers stay in
/// use. unisono_context_abort before this ends them at once, but for what streams were given. Works, children and buffers made from the
/// context stay valid. No function may be using the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_context_destroy(ctx: *mut unisono_context_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a context that nobody uses any more.
        drop(unsafe { Handle::take(ctx, "ctx") }?);
        Ok(())
    });
}
