//! The 128 bytes that are enough for a group to meet.

use std::ffi::c_char;
use std::sync::{Arc, Weak};

use crate::error::Result;
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
    if let Some(served) = SERVED.write().iter_mut().find(|served| served.bytes == *bytes) {
        served.unclaimed = None;
    }
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
    fn a_meeting_that_fails_ends_its_server_and_a_wrong_argument_does_not() {
        let id = served_on(Some("lo")).unwrap();
        assert_eq!(meet_nobody(&id, c"carrier pigeon"), Status::InvalidArgument as i32);
        assert!(server(&id.bytes).is_some(), "the caller may try again");
        assert_eq!(meet_nobody(&id, c"tcp"), Status::Timeout as i32);
        assert!(server(&id.bytes).is_none(), "nobody would end it");
    }
}
