//! Stores of the caller's own functions.

use std::ffi::{c_char, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::time::Duration;

use unisono::deadline::Deadline;
use unisono::error::{Error, Result, Status, fail};
use unisono::rendezvous::store::Store;

use super::argument::{Options, list, optional_text, out, required_options, text};
use super::handle::{ENDED, tag};
use super::status::{c_text, guard, unisono_status_t};
use super::store::{into_handle, unisono_store_t};

/// Where a callback of a callback store puts its answer; valid during the callback only.
pub struct unisono_store_reply_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A store of the caller's own. Start from UNISONO_STORE_CALLBACKS_INIT and set all functions.
///
/// Each function may be called from any thread, several at once. It returns UNISONO_OK, or another status
/// after it gave the cause to unisono_store_reply_error. Keys are C strings of UTF-8, values are bytes; both
/// are valid during the callback only. No exception may leave a callback.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unisono_store_callbacks_t {
    /// sizeof(unisono_store_callbacks_t), as UNISONO_STORE_CALLBACKS_INIT sets it.
    pub size: u64,
    /// Handed to every function.
    pub user: *mut c_void,
    /// Writes `value` under `key`.
    pub set: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const c_char,
            value: *const u8,
            bytes: u64,
            reply: *mut unisono_store_reply_t,
        ) -> unisono_status_t,
    >,
    /// Waits until `key` exists, for at most `timeout_ms` (UNISONO_FOREVER: for ever), and gives its value to
    /// unisono_store_reply_value. UNISONO_TIMEOUT if it does not come.
    pub get: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const c_char,
            timeout_ms: u64,
            reply: *mut unisono_store_reply_t,
        ) -> unisono_status_t,
    >,
    /// Gives the value under `key` to unisono_store_reply_value if it exists now; does not call it, and
    /// returns UNISONO_OK, if not.
    pub try_get: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const c_char,
            reply: *mut unisono_store_reply_t,
        ) -> unisono_status_t,
    >,
    /// Adds `amount` to the number under `key`, 0 if absent, and writes the sum to `*sum`. Atomic over all
    /// ranks.
    pub add: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const c_char,
            amount: i64,
            sum: *mut i64,
            reply: *mut unisono_store_reply_t,
        ) -> unisono_status_t,
    >,
    /// Called once with `user` when nothing uses the store any more; may be NULL.
    pub release: Option<unsafe extern "C" fn(user: *mut c_void)>,
    /// What the store is, for errors; NULL: "callback store". Copied.
    pub description: *const c_char,
}

// SAFETY: repr(C) from `size: u64` on, eight bytes a field, and integers, pointers and optional functions are
// valid as zeros.
unsafe impl Options for unisono_store_callbacks_t {
    const INIT: &'static str = "UNISONO_STORE_CALLBACKS_INIT";
    const FIRST_SIZE: u64 = 64;
}

/// Creates a store from functions of the caller's own, so that ranks meet through whatever the program
/// already has. If it fails, `release` is not called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_create_callback(
    callbacks: *const unisono_store_callbacks_t,
    store: *mut *mut unisono_store_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an options struct.
        let callbacks = unsafe { required_options(callbacks, "callbacks") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(store, "store") }?;
        // SAFETY: the contract of the header: NULL or a C string.
        let description = unsafe { optional_text(callbacks.description, "callbacks->description") }?;
        let missing = |name| Error::new(Status::InvalidArgument, format!("callbacks->{name} is NULL"));
        let store = CallbackStore {
            set: callbacks.set.ok_or_else(|| missing("set"))?,
            get: callbacks.get.ok_or_else(|| missing("get"))?,
            try_get: callbacks.try_get.ok_or_else(|| missing("try_get"))?,
            add: callbacks.add.ok_or_else(|| missing("add"))?,
            release: callbacks.release,
            user: callbacks.user,
            description: description.unwrap_or("callback store").to_owned(),
        };
        place.write(into_handle(store));
        Ok(())
    })
}

/// Gives the value that a `get` or `try_get` callback found. The bytes are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_reply_value(
    reply: *mut unisono_store_reply_t,
    value: *const u8,
    bytes: u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or so many bytes.
        let value = unsafe { list(value, bytes, "value") }?;
        // SAFETY: the contract of the header: NULL or what the callback was given.
        unsafe { reply_mut(reply) }?.value = Some(value.to_vec());
        Ok(())
    })
}

/// Gives the cause of a callback's failure, in one line. The text is copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_reply_error(
    reply: *mut unisono_store_reply_t,
    cause: *const c_char,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a C string.
        let cause = unsafe { text(cause, "cause") }?;
        // SAFETY: the contract of the header: NULL or what the callback was given.
        unsafe { reply_mut(reply) }?.cause = cause.to_owned();
        Ok(())
    })
}

/// What stands behind a [`unisono_store_reply_t`] while a callback runs.
#[repr(C)]
struct Reply {
    /// As of what lasts longer, since it is mixed up with that.
    tag: u64,
    value: Option<Vec<u8>>,
    cause: String,
}

const REPLY: u64 = tag("unisono_store_reply_t");

/// # Safety
/// `reply` is NULL, or the [`Reply`] that the running callback was given, used by its thread alone, or came
/// from [`Handle::into_handle`](super::handle::Handle::into_handle), of whichever type.
unsafe fn reply_mut<'a>(reply: *mut unisono_store_reply_t) -> Result<&'a mut Reply> {
    if reply.is_null() {
        fail!(InvalidArgument, "reply is NULL");
    }
    let tagged = reply.cast::<u64>();
    // SAFETY: this function's contract: both begin with their tag. Volatile, since a caller who keeps a reply
    // longer than its callback runs should rather meet what is written over it then.
    if !tagged.is_aligned() || unsafe { tagged.read_volatile() } != REPLY {
        fail!(InvalidArgument, "reply is no unisono_store_reply_t of a callback that runs");
    }
    // SAFETY: the tag says that it is one, and the contract that nobody else uses it.
    Ok(unsafe { &mut *reply.cast() })
}

type Set =
    unsafe extern "C" fn(*mut c_void, *const c_char, *const u8, u64, *mut unisono_store_reply_t) -> i32;
type Get = unsafe extern "C" fn(*mut c_void, *const c_char, u64, *mut unisono_store_reply_t) -> i32;
type TryGet = unsafe extern "C" fn(*mut c_void, *const c_char, *mut unisono_store_reply_t) -> i32;
type Add = unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64, *mut unisono_store_reply_t) -> i32;

/// A store whose methods are the caller's functions.
struct CallbackStore {
    set: Set,
    get: Get,
    try_get: TryGet,
    add: Add,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    user: *mut c_void,
    description: String,
}

// SAFETY: the header says that the functions may be called with `user` from any thread.
unsafe impl Send for CallbackStore {}
// SAFETY: as above, several at once.
unsafe impl Sync for CallbackStore {}

impl CallbackStore {
    /// Calls one of the functions and turns its status into a result.
    fn ask(
        &self,
        verb: &str,
        key: &str,
        function: impl FnOnce(*const c_char, *mut unisono_store_reply_t) -> unisono_status_t,
    ) -> Result<Reply> {
        let mut reply = Reply { tag: REPLY, value: None, cause: String::new() };
        let status = function(c_text(key).as_ptr(), (&raw mut reply).cast());
        // SAFETY: it is there. Volatile, since only a caller who uses it from here on may see it.
        unsafe { (&raw mut reply.tag).write_volatile(ENDED) };
        // What a store may mean; anything else is an ordinary failure of it.
        let known = [
            Status::InvalidArgument,
            Status::InvalidUsage,
            Status::Timeout,
            Status::Aborted,
            Status::OutOfMemory,
        ];
        let status = match status {
            0 => return Ok(reply),
            status => known.into_iter().find(|&known| known as i32 == status).unwrap_or(Status::System),
        };
        let cause = if reply.cause.is_empty() { "the callback gave no cause" } else { &reply.cause };
        Err(Error::new(
            status,
            format!("{}: {verb} of key '{}' failed: {cause}", self.description, key.escape_debug()),
        ))
    }
}

impl Store for CallbackStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        // SAFETY: the header's contract for callbacks; the pointers are valid during the call.
        let set =
            |key, reply| unsafe { (self.set)(self.user, key, value.as_ptr(), value.len() as u64, reply) };
        self.ask("set", key, set).map(drop)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let milliseconds = deadline.remaining().map_or(u64::MAX, milliseconds_rounded_up);
        // SAFETY: the header's contract for callbacks; the pointers are valid during the call.
        let get = |key, reply| unsafe { (self.get)(self.user, key, milliseconds, reply) };
        match self.ask("get", key, get)?.value {
            Some(value) => Ok(value),
            None => fail!(
                System,
                "{}: get of key '{}' succeeded without a value",
                self.description,
                key.escape_debug()
            ),
        }
    }

    fn try_get(&self, key: &str, _deadline: Deadline) -> Result<Option<Vec<u8>>> {
        // SAFETY: the header's contract for callbacks; the pointers are valid during the call.
        let try_get = |key, reply| unsafe { (self.try_get)(self.user, key, reply) };
        Ok(self.ask("try_get", key, try_get)?.value)
    }

    fn add(&self, key: &str, amount: i64, _deadline: Deadline) -> Result<i64> {
        let mut sum = 0;
        // SAFETY: the header's contract for callbacks; the pointers are valid during the call.
        let add = |key, reply| unsafe { (self.add)(self.user, key, amount, &mut sum, reply) };
        self.ask("add", key, add)?;
        Ok(sum)
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn has_turns(&self) -> bool {
        false
    }
}

impl Drop for CallbackStore {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the header's contract: once, with `user`, when nothing uses the store any more.
            unsafe { release(self.user) };
        }
    }
}

/// So that a wait never ends before its deadline, and never becomes "for ever".
fn milliseconds_rounded_up(left: Duration) -> u64 {
    u64::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX - 1).min(u64::MAX - 1)
}
