//! Stores: how the ranks of a group find each other.

use std::ffi::{c_char, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::time::Duration;

use unisono::deadline::Deadline;
use unisono::error::{Result, fail};
use unisono::rendezvous::file::FileStore;
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::prefix::PrefixStore;
use unisono::rendezvous::secret::SecretKey;
use unisono::rendezvous::store::Store;
use unisono::rendezvous::tcp::TcpStore;
use unisono::rendezvous::tcp_server::ServerHandle;

use super::argument::{Options, list, optional_text, out, required_options, text, timeout, wait_deadline};
use super::context::UNISONO_DEFAULT_TIMEOUT_MS;
use super::handle::{Handle, handle};
use super::status::{guard, guard_or, unisono_status_t};

/// A store: a small dictionary that all ranks of a group reach, through which they find each other. Ended by
/// unisono_store_destroy; contexts and prefix stores made from it keep what they need of it. All functions
/// may be called from any thread.
pub struct unisono_store_t {
    _private: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

// Those that have connections or locks look after that themselves.
handle!(unisono_store_t, StoreHandle, survives_fork);

/// A store, and the port of one that has a port.
pub(super) struct StoreHandle {
    store: Arc<dyn Store>,
    port: u32,
}

impl StoreHandle {
    pub(super) fn inner(&self) -> &Arc<dyn Store> {
        &self.store
    }
}

/// Where a TCP store is. Start from UNISONO_TCP_STORE_OPTIONS_INIT; what is zero or NULL is unset. Read
/// during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct unisono_tcp_store_options_t {
    /// sizeof(unisono_tcp_store_options_t), as UNISONO_TCP_STORE_OPTIONS_INIT sets it.
    pub size: u64,
    /// Name or address of the host that serves, IPv4 or IPv6; NULL: this host. The process that serves
    /// listens on this if it is an address, else on all addresses of the host.
    pub host: *const c_char,
    /// The port, 1 to 65535. 0 only with `serve`: any free port, which unisono_store_port tells.
    pub port: u32,
    /// 1 in the one process that serves the store, usually rank 0's; 0 in the others. The server ends with
    /// the last handle or context that uses it.
    pub serve: i32,
    /// A text that server and clients share; others are turned away. NULL: whoever reaches the port is let
    /// in.
    pub secret: *const c_char,
    /// Milliseconds to try to connect, since the server may start later; 0: UNISONO_DEFAULT_TIMEOUT_MS.
    pub timeout_ms: u64,
}

// SAFETY: repr(C) from `size: u64` on, eight bytes a field (two of four), and integers and pointers are valid
// as zeros.
unsafe impl Options for unisono_tcp_store_options_t {
    const INIT: &'static str = "UNISONO_TCP_STORE_OPTIONS_INIT";
    const FIRST_SIZE: u64 = 40;
}

/// Creates a store in a directory that all ranks reach, of one host or of several through a network file
/// system. The directory is made if it is missing, and is not removed: a new job needs a new one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_create_file(
    path: *const c_char,
    store: *mut *mut unisono_store_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a C string.
        let path = unsafe { text(path, "path") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(store, "store") }?;
        place.write(into_handle(FileStore::open(path)?));
        Ok(())
    })
}

/// Creates a store in the memory of this process, for groups whose ranks are its threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_create_hash(store: *mut *mut unisono_store_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(store, "store") }?;
        place.write(into_handle(HashStore::new()));
        Ok(())
    })
}

/// Creates a store that one process serves over TCP, and connects to it. A server that does not answer is
/// UNISONO_TIMEOUT, a wrong secret UNISONO_INVALID_USAGE; both texts name the address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_create_tcp(
    options: *const unisono_tcp_store_options_t,
    store: *mut *mut unisono_store_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or an options struct.
        let options = unsafe { required_options(options, "options") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(store, "store") }?;
        // SAFETY: the contract of the header: NULL or C strings, as for the next.
        let host = unsafe { optional_text(options.host, "options->host") }?;
        // SAFETY: as above.
        let secret = unsafe { optional_text(options.secret, "options->secret") }?.map(SecretKey::from_text);
        let deadline =
            timeout(options.timeout_ms).unwrap_or(Duration::from_millis(UNISONO_DEFAULT_TIMEOUT_MS));
        let deadline = Deadline::after(deadline);
        let port = match u16::try_from(options.port) {
            Ok(port) if port != 0 || options.serve != 0 => port,
            _ => fail!(InvalidArgument, "options->port is {}; a port is 1 to 65535", options.port),
        };
        let handle = match options.serve {
            0 => {
                let store = TcpStore::connect(host.unwrap_or("localhost"), port, secret.as_ref(), deadline)?;
                StoreHandle { store: Arc::new(store), port: port.into() }
            }
            1 => {
                let store = ServedStore::start(host, port, secret.as_ref(), deadline)?;
                let port = store.server.port().into();
                StoreHandle { store: Arc::new(store), port }
            }
            other => fail!(InvalidArgument, "options->serve is {other}; it is 1 to serve the store, or 0"),
        };
        place.write(Handle::into_handle(handle));
        Ok(())
    })
}

/// Creates a part of another store: its keys are those of `parent` that begin with `prefix`, so that several
/// groups use one store without meeting. `parent` may be destroyed before it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_create_prefix(
    parent: *const unisono_store_t,
    prefix: *const c_char,
    store: *mut *mut unisono_store_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let parent = unsafe { Handle::borrow(parent, "parent") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let prefix = unsafe { text(prefix, "prefix") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(store, "store") }?;
        place.write(into_handle(PrefixStore::new(parent.clone(), prefix)));
        Ok(())
    })
}

/// Writes `bytes` bytes of `value` under `key`, and wakes whoever waits for it. Waits for the store's answer,
/// for UNISONO_DEFAULT_TIMEOUT_MS at most; functions of the caller's own have no limit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_set(
    store: *const unisono_store_t,
    key: *const c_char,
    value: *const c_void,
    bytes: u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let store = unsafe { Handle::borrow(store, "store") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the contract of the header: NULL or so many bytes.
        let value = unsafe { list(value.cast::<u8>(), bytes, "value") }?;
        store.set(key, value, patience())
    })
}

/// Waits until `key` exists, for at most `timeout_ms` milliseconds (0 only looks, unlike in options;
/// UNISONO_FOREVER: for ever; a server that does not answer is given half a second more), and gives a copy of
/// its value: `*value` is freed by unisono_free and is never NULL, `*bytes` is its length. Neither `value`
/// nor `bytes` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_get(
    store: *const unisono_store_t,
    key: *const c_char,
    timeout_ms: u64,
    value: *mut *mut c_void,
    bytes: *mut u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let store = unsafe { Handle::borrow(store, "store") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the contract of the header: NULL or writable, as for the next.
        let value = unsafe { out(value, "value") }?;
        // SAFETY: as above.
        let bytes = unsafe { out(bytes, "bytes") }?;
        let found = store.get(key, wait_deadline(timeout_ms))?;
        value.write(hand_out(&found)?);
        bytes.write(found.len() as u64);
        Ok(())
    })
}

/// The file that a store of unisono_store_create_file, or a part of one, keeps `key` in, whether it is there
/// or not: `*path`, absolute, is freed by unisono_free. Programs remove the files of what they have set once
/// nobody looks for it any more, so that the keys serve again; which is nothing for keys that are added to.
/// Other stores: UNISONO_UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_key_file(
    store: *const unisono_store_t,
    key: *const c_char,
    path: *mut *mut c_char,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let store = unsafe { Handle::borrow(store, "store") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the contract of the header: NULL or writable.
        let path = unsafe { out(path, "path") }?;
        let Some(file) = store.file_of(key) else {
            fail!(Unsupported, "{} keeps no key in a file of its own", store.describe());
        };
        let mut bytes = file.into_os_string().into_vec();
        bytes.push(0);
        path.write(hand_out(&bytes)?.cast());
        Ok(())
    })
}

/// As unisono_store_get, without waiting for the key: if it does not exist, the status is UNISONO_OK,
/// `*value` NULL and `*bytes` 0. Waits for the store's answer as unisono_store_set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_try_get(
    store: *const unisono_store_t,
    key: *const c_char,
    value: *mut *mut c_void,
    bytes: *mut u64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let store = unsafe { Handle::borrow(store, "store") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the contract of the header: NULL or writable, as for the next.
        let value = unsafe { out(value, "value") }?;
        // SAFETY: as above.
        let bytes = unsafe { out(bytes, "bytes") }?;
        let (memory, length) = match store.try_get(key, patience())? {
            Some(found) => (hand_out(&found)?, found.len()),
            None => (std::ptr::null_mut(), 0),
        };
        value.write(memory);
        bytes.write(length as u64);
        Ok(())
    })
}

/// Adds `amount` to the number under `key`, 0 if absent, and sets `*sum`. Atomic over all ranks. `sum` may be
/// NULL. Waits for the store's answer as unisono_store_set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_add(
    store: *const unisono_store_t,
    key: *const c_char,
    amount: i64,
    sum: *mut i64,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
        let store = unsafe { Handle::borrow(store, "store") }?.inner();
        // SAFETY: the contract of the header: NULL or a C string.
        let key = unsafe { text(key, "key") }?;
        let total = store.add(key, amount, patience())?;
        // SAFETY: the contract of the header: NULL or writable.
        if let Some(place) = unsafe { sum.as_mut() } {
            *place = total;
        }
        Ok(())
    })
}

/// The port of a TCP store, also one that the server chose; 0 for other stores and for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_port(store: *const unisono_store_t) -> u32 {
    // SAFETY: the contract of the header: NULL or a store that nobody destroys meanwhile.
    guard_or(|_| 0, || Ok(unsafe { Handle::borrow(store, "store") }?.port))
}

/// Ends the handle. Contexts and prefix stores made from it keep what they need. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_store_destroy(store: *mut unisono_store_t) {
    guard(|| {
        // SAFETY: the contract of the header: NULL, or a store that nobody uses any more.
        drop(unsafe { Handle::take(store, "store") }?);
        Ok(())
    });
}

/// How long a call that names no time waits for the store's answer.
fn patience() -> Deadline {
    Deadline::after(Duration::from_millis(UNISONO_DEFAULT_TIMEOUT_MS))
}

/// A store without a port, as C gets it.
pub(super) fn into_handle(store: impl Store + 'static) -> *mut unisono_store_t {
    Handle::into_handle(StoreHandle { store: Arc::new(store), port: 0 })
}

/// A TCP store that this process serves: the server lives as long as anything uses the store.
struct ServedStore {
    // Dropped in this order: the client leaves before the server ends.
    client: TcpStore,
    server: ServerHandle,
}

impl ServedStore {
    /// Serves on `host` if that is an address, else on all addresses of this host.
    fn start(
        host: Option<&str>,
        port: u16,
        secret: Option<&SecretKey>,
        deadline: Deadline,
    ) -> Result<ServedStore> {
        let server = match host.and_then(|host| host.parse::<IpAddr>().ok()) {
            Some(address) => ServerHandle::start(SocketAddr::new(address, port), secret)?,
            None => ServerHandle::start_everywhere(port, secret)?,
        };
        let address = server.local_address();
        let client = TcpStore::connect(&address.ip().to_string(), address.port(), secret, deadline)?;
        Ok(ServedStore { client, server })
    }
}

impl Store for ServedStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.client.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.client.get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.client.try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.client.add(key, amount, deadline)
    }

    fn shut(&self) -> Option<String> {
        self.client.shut()
    }

    fn describe(&self) -> String {
        self.client.describe()
    }
}

/// A copy for C, from `malloc`, so that `unisono_free` needs no length. Never NULL.
fn hand_out(bytes: &[u8]) -> Result<*mut c_void> {
    // SAFETY: malloc takes any size.
    let memory = unsafe { libc::malloc(bytes.len().max(1)) };
    if memory.is_null() {
        fail!(OutOfMemory, "no memory for a value of {} bytes", bytes.len());
    }
    // SAFETY: the new memory holds at least so many bytes and overlaps nothing.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.cast(), bytes.len()) };
    Ok(memory)
}
