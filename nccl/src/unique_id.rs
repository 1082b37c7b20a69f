//! Unique ids, and the servers behind them.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use unisono::rendezvous::id::{ID_BYTES, UniqueId};
use unisono::rendezvous::tcp_server::ServerHandle;

use crate::abi::{ncclResult_t, ncclUniqueId};
use crate::error::{Result, SUCCESS, guard, out};

/// Makes a unique id and writes it to `*uniqueId`. One rank calls it and gives the 128 bytes to the others.
///
/// This process serves the meeting until its communicator of that id is destroyed, or it ends. It listens on the
/// interface that UNISONO_INTERFACE or NCCL_SOCKET_IFNAME names, or on one that the library chooses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(uniqueId, "uniqueId") }?;
        let (id, server) = UniqueId::create(interface().as_deref())?;
        let bytes = id.to_bytes();
        let server = Arc::new(server);
        let mut served = lock();
        served.retain(|served| served.server.strong_count() > 0);
        served.push(Served { bytes, server: Arc::downgrade(&server), unclaimed: Some(server) });
        place.write(ncclUniqueId { internal: bytes.map(|byte| byte as c_char) });
        Ok(SUCCESS)
    })
}

/// The interface that the environment names: UNISONO_INTERFACE or, as NCCL's users do it, NCCL_SOCKET_IFNAME with a
/// name, a prefix of one, or "=" and a name. What excludes interfaces ("^") and lists are left to the library's choice.
pub(crate) fn interface() -> Option<String> {
    if let Ok(wanted) = std::env::var("UNISONO_INTERFACE") {
        return Some(wanted);
    }
    let named = std::env::var("NCCL_SOCKET_IFNAME").ok()?;
    let named = named.trim();
    if named.is_empty() || named.starts_with('^') || named.contains([',', ':']) {
        log::info!("NCCL_SOCKET_IFNAME={named} names no single interface: the library chooses one");
        return None;
    }
    if let Some(exact) = named.strip_prefix('=') {
        return Some(exact.to_owned());
    }
    let interfaces = unisono::sys::interfaces::list().unwrap_or_default();
    let found = interfaces.into_iter().find(|interface| interface.up && interface.name.starts_with(named));
    Some(found.map_or(named.to_owned(), |interface| interface.name))
}

/// The bytes of an id, refused if they are none.
pub(crate) fn bytes(id: &ncclUniqueId) -> Result<[u8; ID_BYTES]> {
    let bytes = id.internal.map(|byte| byte as u8);
    UniqueId::parse(&bytes)?;
    Ok(bytes)
}

/// The servers of the ids that this process made, for the communicators that are made from them.
static SERVED: Mutex<Vec<Served>> = Mutex::new(Vec::new());

struct Served {
    bytes: [u8; ID_BYTES],
    server: Weak<ServerHandle>,
    /// Keeps the server until the first communicator does.
    unclaimed: Option<Arc<ServerHandle>>,
}

/// The server of an id, if this process serves it; it lives as long as the answer from now on.
pub(crate) fn claim(bytes: &[u8; ID_BYTES]) -> Option<Arc<ServerHandle>> {
    let mut served = lock();
    let served = served.iter_mut().find(|served| served.bytes == *bytes)?;
    let server = served.server.upgrade();
    served.unclaimed = None;
    server
}

fn lock() -> MutexGuard<'static, Vec<Served>> {
    // Nothing that holds the lock can leave the list half changed.
    SERVED.lock().unwrap_or_else(PoisonError::into_inner)
}
