//! A store made of a caller's functions: how a program brings its own dictionary.

use std::ffi::c_void;
use std::time::Instant;

use super::store::{self, Store};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};

/// The functions of a caller's store.
///
/// Each returns a status: 0 (`UNISONO_OK`) is success, any other number of the library's statuses its meaning. They are
/// called from several threads, also at the same time, and must neither unwind nor call back into the same context.
/// Keys are UTF-8, `key_length` bytes long and not terminated. Whatever a pointer leads to belongs to the library and
/// is valid during the call only.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CallbackTable {
    /// `sizeof` this structure, so that later versions may append to it.
    pub size: usize,
    /// Passed to every function; the library does nothing else with it.
    pub user: *mut c_void,
    /// Writes the value of a key and wakes who waits for it.
    pub set: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const u8,
            key_length: usize,
            value: *const u8,
            value_length: usize,
        ) -> i32,
    >,
    /// Waits at most `timeout_ms` milliseconds (-1: for ever) until the key exists; then writes its value to `value` and
    /// its length to `*value_length`. A value longer than `capacity` is not written, only its length is, and the
    /// function returns success: it is called again with more room. Returns 4 (`UNISONO_TIMEOUT`) when the time is over.
    pub get: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const u8,
            key_length: usize,
            value: *mut u8,
            capacity: usize,
            value_length: *mut usize,
            timeout_ms: i64,
        ) -> i32,
    >,
    /// As `get`, without waiting: sets `*found` to 0 when the key does not exist, else to 1.
    pub try_get: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const u8,
            key_length: usize,
            value: *mut u8,
            capacity: usize,
            value_length: *mut usize,
            found: *mut i32,
        ) -> i32,
    >,
    /// Adds to the decimal number under the key, 0 if it is absent, and writes the sum to `*sum`; atomically over all
    /// ranks.
    pub add: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            key: *const u8,
            key_length: usize,
            amount: i64,
            sum: *mut i64,
        ) -> i32,
    >,
    /// Called once, when the library needs the store no more. May be NULL.
    pub destroy: Option<unsafe extern "C" fn(user: *mut c_void)>,
}

type Set = unsafe extern "C" fn(*mut c_void, *const u8, usize, *const u8, usize) -> i32;
type Get = unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut u8, usize, *mut usize, i64) -> i32;
type TryGet =
    unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut u8, usize, *mut usize, *mut i32) -> i32;
type Add = unsafe extern "C" fn(*mut c_void, *const u8, usize, i64, *mut i64) -> i32;

/// The room offered for a value at first; what ranks publish is smaller.
const FIRST_ROOM: usize = 4096;
/// No value is larger: a length beyond it is a mistake of the callback, not a value.
const LARGEST: usize = 1 << 30;

/// A [`CallbackTable`] whose functions are all there.
pub struct CallbackStore {
    user: *mut c_void,
    set: Set,
    get: Get,
    try_get: TryGet,
    add: Add,
    destroy: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: whoever made the store promised that its functions may be called with `user` from any thread.
unsafe impl Send for CallbackStore {}
// SAFETY: and from several threads at the same time.
unsafe impl Sync for CallbackStore {}

impl CallbackStore {
    /// Takes over `table.user`: `destroy` is called when the store is dropped. On an error it is not called, and the
    /// caller keeps it.
    ///
    /// # Safety
    ///
    /// The functions keep what [`CallbackTable`] says of them, from any thread, until `destroy` is called.
    pub unsafe fn new(table: &CallbackTable) -> Result<CallbackStore> {
        if table.size < size_of::<CallbackTable>() {
            fail!(
                InvalidArgument,
                "the callback table's size is {}, expected {}; set it to sizeof the structure",
                table.size,
                size_of::<CallbackTable>()
            );
        }
        let missing =
            |name| Error::new(Status::InvalidArgument, format!("the callback table's '{name}' is NULL"));
        Ok(CallbackStore {
            user: table.user,
            set: table.set.ok_or_else(|| missing("set"))?,
            get: table.get.ok_or_else(|| missing("get"))?,
            try_get: table.try_get.ok_or_else(|| missing("try_get"))?,
            add: table.add.ok_or_else(|| missing("add"))?,
            destroy: table.destroy,
        })
    }

    /// Offers room to `read` until the value fits. `read` writes at most the given capacity and returns the value's
    /// length, or `None` when there is no value.
    fn value(
        &self,
        name: &str,
        key: &str,
        mut read: impl FnMut(&mut [u8]) -> Result<Option<usize>>,
    ) -> Result<Option<Vec<u8>>> {
        let mut value = vec![0; FIRST_ROOM];
        // A value may grow between two calls, but each time is rarer; a callback that only ever asks for more is wrong.
        for _ in 0..8 {
            let Some(length) = read(&mut value)? else { return Ok(None) };
            if length <= value.len() {
                value.truncate(length);
                return Ok(Some(value));
            }
            if length > LARGEST {
                break;
            }
            value.resize(length, 0);
        }
        fail!(
            InvalidUsage,
            "the store callback '{name}' asks for ever more room, or beyond {LARGEST} bytes, for key {}",
            store::quoted(key)
        )
    }

    fn check(&self, name: &str, key: &str, status: i32) -> Result<()> {
        if status == Status::Ok as i32 {
            return Ok(());
        }
        let known = [
            Status::InvalidArgument,
            Status::InvalidUsage,
            Status::Timeout,
            Status::PeerFailed,
            Status::Aborted,
            Status::Unsupported,
            Status::OutOfMemory,
        ];
        let known = known.into_iter().find(|known| *known as i32 == status).unwrap_or(Status::System);
        let text =
            format!("the store callback '{name}' returned status {status} for key {}", store::quoted(key));
        Err(Error::new(known, text))
    }
}

impl Store for CallbackStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        // SAFETY: both slices are readable for their lengths during the call, as the table promises its functions.
        let status = unsafe { (self.set)(self.user, key.as_ptr(), key.len(), value.as_ptr(), value.len()) };
        self.check("set", key, status)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let since = Instant::now();
        let value = self.value("get", key, |into| {
            let timeout = deadline
                .remaining()
                .map_or(-1, |left| i64::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(-1));
            let mut length = 0;
            // SAFETY: the key is readable, `into` is writable for the capacity given, and so is `length`.
            let status = unsafe {
                (self.get)(
                    self.user,
                    key.as_ptr(),
                    key.len(),
                    into.as_mut_ptr(),
                    into.len(),
                    &raw mut length,
                    timeout,
                )
            };
            if status == Status::Timeout as i32 {
                return Err(store::timed_out(self, key, since));
            }
            self.check("get", key, status)?;
            Ok(Some(length))
        })?;
        // The closure above never gives `None`.
        value.ok_or_else(|| store::timed_out(self, key, since))
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.value("try_get", key, |into| {
            let (mut length, mut found) = (0, 0);
            // SAFETY: the key is readable, `into` is writable for the capacity given, and so are both numbers.
            let status = unsafe {
                (self.try_get)(
                    self.user,
                    key.as_ptr(),
                    key.len(),
                    into.as_mut_ptr(),
                    into.len(),
                    &raw mut length,
                    &raw mut found,
                )
            };
            self.check("try_get", key, status)?;
            Ok((found != 0).then_some(length))
        })
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let mut sum = 0;
        // SAFETY: the key is readable and `sum` writable during the call.
        let status = unsafe { (self.add)(self.user, key.as_ptr(), key.len(), amount, &raw mut sum) };
        self.check("add", key, status)?;
        Ok(sum)
    }

    fn describe(&self) -> String {
        "callback store".to_owned()
    }
}

impl Drop for CallbackStore {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: this is the only call, and no other function is called after it.
            unsafe { destroy(self.user) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::battery;
    use crate::rendezvous::hash::HashStore;

    /// What the user pointer of the test's callbacks leads to.
    struct User {
        store: HashStore,
        /// Counts, by its references, the users that are not destroyed.
        _alive: Arc<()>,
    }

    fn status(error: &Error) -> i32 {
        error.status() as i32
    }

    /// # Safety
    /// As the table's functions are called.
    unsafe fn parts<'a>(user: *mut c_void, key: *const u8, key_length: usize) -> (&'a HashStore, &'a str) {
        // SAFETY: `user` is a `User` that lives until `destroy`, and the key is what the library passed.
        unsafe {
            let store = &(*user.cast::<User>()).store;
            (store, std::str::from_utf8(slice::from_raw_parts(key, key_length)).unwrap())
        }
    }

    unsafe extern "C" fn set(
        user: *mut c_void,
        key: *const u8,
        length: usize,
        value: *const u8,
        n: usize,
    ) -> i32 {
        // SAFETY: called as the table says.
        let ((store, key), value) = unsafe { (parts(user, key, length), slice::from_raw_parts(value, n)) };
        store.set(key, value).map_or_else(|error| status(&error), |()| 0)
    }

    /// # Safety
    /// `into` is writable for `capacity` bytes, and `length` for one number.
    unsafe fn give(value: &[u8], into: *mut u8, capacity: usize, length: *mut usize) {
        // SAFETY: as the caller says; nothing is written beyond the capacity.
        unsafe {
            *length = value.len();
            if value.len() <= capacity {
                into.copy_from_nonoverlapping(value.as_ptr(), value.len());
            }
        }
    }

    unsafe extern "C" fn get(
        user: *mut c_void,
        key: *const u8,
        key_length: usize,
        into: *mut u8,
        capacity: usize,
        length: *mut usize,
        timeout_ms: i64,
    ) -> i32 {
        // SAFETY: called as the table says.
        let (store, key) = unsafe { parts(user, key, key_length) };
        let deadline = match u64::try_from(timeout_ms) {
            Ok(timeout) => Deadline::after(Duration::from_millis(timeout)),
            Err(_) => Deadline::NEVER,
        };
        match store.get(key, deadline) {
            Ok(value) => {
                // SAFETY: called as the table says.
                unsafe { give(&value, into, capacity, length) };
                0
            }
            Err(error) => status(&error),
        }
    }

    unsafe extern "C" fn try_get(
        user: *mut c_void,
        key: *const u8,
        key_length: usize,
        into: *mut u8,
        capacity: usize,
        length: *mut usize,
        found: *mut i32,
    ) -> i32 {
        // SAFETY: called as the table says.
        let (store, key) = unsafe { parts(user, key, key_length) };
        let value = store.try_get(key).unwrap();
        // SAFETY: called as the table says.
        unsafe {
            *found = i32::from(value.is_some());
            give(&value.unwrap_or_default(), into, capacity, length);
        }
        0
    }

    unsafe extern "C" fn add(user: *mut c_void, key: *const u8, n: usize, amount: i64, sum: *mut i64) -> i32 {
        // SAFETY: called as the table says.
        let (store, key) = unsafe { parts(user, key, n) };
        match store.add(key, amount) {
            Ok(value) => {
                // SAFETY: called as the table says.
                unsafe { *sum = value };
                0
            }
            Err(error) => status(&error),
        }
    }

    unsafe extern "C" fn destroy(user: *mut c_void) {
        // SAFETY: made by `Box::into_raw`, and this is called once.
        drop(unsafe { Box::from_raw(user.cast::<User>()) });
    }

    fn table() -> (CallbackTable, Arc<()>) {
        let destroyed = Arc::new(());
        let user = Box::new(User { store: HashStore::new(), _alive: destroyed.clone() });
        let table = CallbackTable {
            size: size_of::<CallbackTable>(),
            user: Box::into_raw(user).cast(),
            set: Some(set),
            get: Some(get),
            try_get: Some(try_get),
            add: Some(add),
            destroy: Some(destroy),
        };
        (table, destroyed)
    }

    #[test]
    fn passes_the_battery_and_is_destroyed_once() {
        let (table, destroyed) = table();
        // SAFETY: the functions are those above.
        let store = Arc::new(unsafe { CallbackStore::new(&table) }.unwrap());
        battery::run(|| store.clone());
        assert_eq!(Arc::strong_count(&destroyed), 2);
        drop(store);
        assert_eq!(Arc::strong_count(&destroyed), 1);
    }

    #[test]
    fn an_incomplete_table_is_refused_and_stays_the_callers() {
        let (table, destroyed) = table();
        for (broken, text) in [
            (CallbackTable { add: None, ..table }, "'add' is NULL"),
            (CallbackTable { get: None, ..table }, "'get' is NULL"),
            (CallbackTable { size: 8, ..table }, "size is 8"),
        ] {
            // SAFETY: the functions are those above.
            let error = unsafe { CallbackStore::new(&broken) }.err().expect("the table is broken");
            assert_eq!(error.status(), Status::InvalidArgument);
            assert!(error.text().contains(text), "{error}");
        }
        assert_eq!(Arc::strong_count(&destroyed), 2);
        // SAFETY: nobody has taken it over.
        unsafe { destroy(table.user) };
    }

    #[test]
    fn a_callback_that_lies_about_lengths_ends_in_an_error() {
        unsafe extern "C" fn endless(
            _: *mut c_void,
            _: *const u8,
            _: usize,
            _: *mut u8,
            capacity: usize,
            length: *mut usize,
            found: *mut i32,
        ) -> i32 {
            // SAFETY: called as the table says.
            unsafe { (*length, *found) = (capacity + 1, 1) };
            0
        }
        let (table, _destroyed) = table();
        // SAFETY: the functions are those above.
        let store =
            unsafe { CallbackStore::new(&CallbackTable { try_get: Some(endless), ..table }) }.unwrap();
        let error = store.try_get("k").unwrap_err();
        assert!(error.text().contains("ever more room"), "{error}");
    }
}
