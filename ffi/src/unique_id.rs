//! The 128 bytes that are enough for a group to meet.

use std::ffi::c_char;

use unisono::error::{Result, fail};
use unisono::rendezvous::id::{ID_BYTES, served};
use unisono::settings;

use super::argument::{optional_text, out};
use super::status::{guard, unisono_status_t};

/// A unique id: one rank makes it, the program carries it to the others by any means, all create their
/// context from it. It holds an address and a secret: whoever has it can join the group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unisono_unique_id_t {
    /// What it consists of means nothing outside the library.
    pub bytes: [u8; 128],
}

/// Makes a unique id. The process that makes it serves the meeting until its own context of that id is
/// destroyed, or the process ends; if it is no rank of it, until it makes an id a minute or more after the
/// last rank has gone from there. Meetings that have failed are served for a minute or more, so that ranks
/// that come late are told why, but no more than the last eight. The id has the addresses of the interface of
/// UNISONO_INTERFACE, or of one that the library chooses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_create(id: *mut unisono_unique_id_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(id, "id") }?;
        place.write(unisono_unique_id_t { bytes: create(None)? });
        Ok(())
    })
}

/// As unisono_unique_id_create, on `interface`: a name, an address or a CIDR, as in the options of a context.
/// NULL: as there.
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
        place.write(unisono_unique_id_t { bytes: create(interface)? });
        Ok(())
    })
}

/// Makes and serves an id, on this interface or else on that of the environment.
fn create(interface: Option<&str>) -> Result<[u8; ID_BYTES]> {
    let interface = interface.map(str::to_owned).or_else(|| settings::read("UNISONO_INTERFACE"));
    served::create(interface.as_deref())
}

/// Ends the serving of an id that this process has made and that nobody will meet by, since the program could
/// not pass it on. A context that is being made from it, or has been, keeps it served. For an id of another
/// process there is nothing to do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_release(id: *const unisono_unique_id_t) -> unisono_status_t {
    guard(|| {
        if id.is_null() {
            fail!(InvalidArgument, "id is NULL");
        }
        // SAFETY: not NULL, so the contract of the header has it readable; bytes have no alignment.
        served::release(&unsafe { id.read() }.bytes);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::net::Ipv4Addr;
    use std::process::Command;
    use std::ptr;
    use std::time::Duration;

    use super::*;
    use crate::context::{
        unisono_context_create, unisono_context_destroy, unisono_context_options_t, unisono_context_t,
    };
    use crate::status::unisono_last_error;
    use unisono::deadline::Deadline;
    use unisono::error::Status;
    use unisono::rendezvous::id::UniqueId;

    fn made() -> unisono_unique_id_t {
        unisono_unique_id_t { bytes: served::create(Some("lo")).unwrap() }
    }

    /// Names the interface on which [`process_that_makes_ids`] is to find its ids.
    const WANTED: &str = "UNISONO_TEST_WANTED";

    /// Not a test by itself: what [`an_id_is_on_the_interface_of_the_environment`] runs.
    #[test]
    fn process_that_makes_ids() {
        let Ok(wanted) = std::env::var(WANTED) else { return };
        let loopback = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let mut id = unisono_unique_id_t { bytes: [0; 128] };
        // SAFETY: the id may be written, and NULL given for an interface.
        let make: [&dyn Fn(*mut unisono_unique_id_t) -> unisono_status_t; 2] =
            [&|id| unsafe { unisono_unique_id_create(id) }, &|id| unsafe {
                unisono_unique_id_create_on(ptr::null(), id)
            }];
        for make in make {
            let status = make(&mut id);
            if wanted == "lo" {
                assert_eq!(status, Status::Ok as i32);
                assert!(id.bytes.windows(16).any(|address| address == loopback), "{:?}", id.bytes);
            } else {
                assert_eq!(status, Status::InvalidArgument as i32);
                // SAFETY: a C string until the next call of this thread.
                let why = unsafe { CStr::from_ptr(unisono_last_error()) }.to_str().unwrap();
                assert!(why.contains(&wanted), "{why}");
            }
        }
        // What the call says goes first.
        // SAFETY: as above; the name is a C string.
        let status = unsafe { unisono_unique_id_create_on(c"127.0.0.1".as_ptr(), &mut id) };
        assert_eq!(status, Status::Ok as i32);
        assert!(id.bytes.windows(16).any(|address| address == loopback), "{:?}", id.bytes);
    }

    #[test]
    fn an_id_is_on_the_interface_of_the_environment() {
        for interface in ["lo", "nosuch0"] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "unique_id::tests::process_that_makes_ids", "--nocapture"])
                .env("UNISONO_INTERFACE", interface)
                .env(WANTED, interface)
                .output()
                .unwrap();
            let [written, told] =
                [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            assert!(output.status.success() && written.contains("1 passed"), "{interface}: {written}{told}");
        }
    }

    /// Rank 0 of `size` meets nobody; what the attempt comes to.
    fn meet_nobody(
        id: &unisono_unique_id_t,
        size: u32,
        transports: &CStr,
    ) -> (unisono_status_t, *mut unisono_context_t) {
        let options = unisono_context_options_t {
            size: size_of::<unisono_context_options_t>() as u64,
            rank: 0,
            rank_count: size,
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
        let status = unsafe { unisono_context_create(&options, &mut context) };
        (status, context)
    }

    #[test]
    fn an_id_that_is_let_go_is_served_no_more() {
        let id = made();
        // SAFETY: it lives.
        assert_eq!(unsafe { unisono_unique_id_release(&id) }, Status::Ok as i32);
        assert!(served::server(&id.bytes).is_none());
        // SAFETY: as above, and NULL may be given.
        let again = unsafe { [unisono_unique_id_release(&id), unisono_unique_id_release(ptr::null())] };
        assert_eq!(again, [Status::Ok as i32, Status::InvalidArgument as i32]);
    }

    #[test]
    fn an_id_is_served_as_long_as_the_context_that_was_made_from_it() {
        let id = made();
        let (status, context) = meet_nobody(&id, 1, c"tcp");
        assert_eq!(status, Status::Ok as i32);
        assert!(served::server(&id.bytes).is_some());
        // SAFETY: it was just made, and nobody else has it.
        unsafe { unisono_context_destroy(context) };
        assert!(served::server(&id.bytes).is_none());
    }

    #[test]
    fn a_meeting_that_fails_is_served_for_those_who_come_later_and_for_who_tries_again() {
        let id = made();
        for (transports, status) in [(c"carrier pigeon", Status::InvalidArgument), (c"tcp", Status::Timeout)]
        {
            assert_eq!(meet_nobody(&id, 2, transports), (status as i32, ptr::null_mut()));
            assert!(served::server(&id.bytes).is_some(), "{status:?}");
        }
        let soon = Deadline::after(Duration::from_secs(20));
        UniqueId::parse(&id.bytes).unwrap().connect(soon).expect("a rank that comes later finds the store");
    }
}
