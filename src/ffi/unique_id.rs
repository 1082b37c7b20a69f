//! The 128 bytes that are enough for a group to meet.

use std::ffi::c_char;
use std::sync::{Arc, Weak};

use crate::error::{Result, fail};
use crate::rendezvous::id::{ID_BYTES, UniqueId};
use crate::rendezvous::tcp_server::ServerHandle;
use crate::sys::global::Global;

use super::argument::{optional_text, out};
use super::status::{guard, unisono_status_t};

/// A unique id: one rank makes it, the program carries it to the others by any means, all create their context from it.
/// It holds an address and a secret: whoever has it can join the group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unisono_unique_id_t {
    /// What it consists of means nothing outside the library.
    pub bytes: [u8; 128],
}

/// Makes a unique id. The process that makes it serves the meeting until its own context of that id is destroyed or has failed
/// to meet the others, or the process ends. The id has the addresses of the interface of UNISONO_INTERFACE, or of one that the library chooses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_create(id: *mut unisono_unique_id_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(id, "id") }?;
        place.write(served_on(None)?);
        Ok(())
    })
}

/// As unisono_unique_id_create, on `interface`: a name, an address or a CIDR, as in the options of a context. NULL: as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_create_on(
    interface: *const c_char,
    id: *mut unisono_unique_id_t,
) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(id, "id") }?;
        // SAFETY: the contract of the header: NULL or a C string.
        let interface = unsafe { optional_text(interface, "interface") }?;
        place.write(served_on(interface)?);
        Ok(())
    })
}

/// Ends the serving of an id that this process has made and that nobody will meet by, since the program could not pass it on. A context
/// that is being made from it, or has been, keeps it served. For an id of another process there is nothing to do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_release(id: *const unisono_unique_id_t) -> unisono_status_t {
    guard(|| {
        if id.is_null() {
            fail!(InvalidArgument, "id is NULL");
        }
        // SAFETY: not NULL, so the contract of the header has it readable; bytes have no alignment.
        claim(&unsafe { id.read() }.bytes);
        Ok(())
    })
}

/// A new id, which this process serves.
fn served_on(interface: Option<&str>) -> Result<unisono_unique_id_t> {
    let (id, server) = UniqueId::create(interface)?;
    let bytes = id.to_bytes();
    let server = Arc::new(server);
    let mut served = SERVED.write();
    served.retain(|served| served.server.strong_count() > 0);
    served.push(Served { bytes, server: Arc::downgrade(&server), unclaimed: Some(server) });
    Ok(unisono_unique_id_t { bytes })
}

/// The servers of the ids that this process made, for the contexts that are made from them.
static SERVED: Global<Vec<Served>> = Global::new(Vec::new());

struct Served {
    bytes: [u8; ID_BYTES],
    server: Weak<ServerHandle>,
    /// Keeps the server until the first context does, or could not.
    unclaimed: Option<Arc<ServerHandle>>,
}

/// The server of an id, if this process serves it.
pub(super) fn server(bytes: &[u8; ID_BYTES]) -> Option<Arc<ServerHandle>> {
    SERVED.write().iter().find(|served| served.bytes == *bytes)?.server.upgrade()
}

/// That a context keeps the server of this id from now on, or that nobody needs it any more.
pub(super) fn claim(bytes: &[u8; ID_BYTES]) {
    let find = |served: &mut Vec<Served>| {
        served.iter_mut().find(|served| served.bytes == *bytes).and_then(|served| served.unclaimed.take())
    };
    let unclaimed = find(&mut SERVED.write());
    // Not under the lock: whoever drops the last of it waits for its thread.
    drop(unclaimed);
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::error::Status;
    use crate::ffi::context::{unisono_context_create, unisono_context_options_t};

    /// Rank 0 of 2 meets nobody; what the attempt comes to.
    fn meet_nobody(id: &unisono_unique_id_t, transports: &std::ffi::CStr) -> unisono_status_t {
        let options = unisono_context_options_t {
            size: size_of::<unisono_context_options_t>() as u64,
            rank: 0,
            rank_count: 2,
            store: ptr::null(),
            id,
            name: ptr::null(),
            timeout_ms: 50,
            interface: c"lo".as_ptr(),
            transports: transports.as_ptr(),
            max_blocks: 0,
            reserved: 0,
        };
        let mut context = ptr::null_mut();
        // SAFETY: the options and what they point to outlive the call.
        unsafe { unisono_context_create(&options, &mut context) }
    }

    #[test]
    fn an_id_that_is_let_go_is_served_no_more() {
        let id = served_on(Some("lo")).unwrap();
        // SAFETY: it lives.
        assert_eq!(unsafe { unisono_unique_id_release(&id) }, Status::Ok as i32);
        assert!(server(&id.bytes).is_none());
        // SAFETY: as above, and NULL may be given.
        let again = unsafe { [unisono_unique_id_release(&id), unisono_unique_id_release(ptr::null())] };
        assert_eq!(again, [Status::Ok as i32, Status::InvalidArgument as i32]);
    }

    #[test]
    fn a_meeting_that_fails_ends_its_server_and_a_wrong_argument_does_not() {
        let id = served_on(Some("lo")).unwrap();
        assert_eq!(meet_nobody(&id, c"carrier pigeon"), Status::InvalidArgument as i32);
        assert!(server(&id.bytes).is_some(), "the caller may try again");
        assert_eq!(meet_nobody(&id, c"tcp"), Status::Timeout as i32);
        assert!(server(&id.bytes).is_none(), "nobody would end it");
    }
}
