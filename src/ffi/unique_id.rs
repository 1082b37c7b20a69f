//! The 128 bytes that are enough for a group to meet.

use super::argument::out;
use super::status::{guard, unisono_status_t};

/// A unique id: one rank makes it, the program carries it to the others by any means, all create their context from it.
/// It holds an address and a secret: whoever has it can join the group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unisono_unique_id_t {
    /// What it consists of means nothing outside the library.
    pub bytes: [u8; 128],
}

/// Makes a unique id. The process that makes it serves the meeting until its own context of that id is destroyed, or the
/// process ends; it listens on the interface of UNISONO_INTERFACE, or one that the library chooses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_unique_id_create(id: *mut unisono_unique_id_t) -> unisono_status_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(id, "id") }?;
        place.write(unisono_unique_id_t { bytes: todo!() });
        Ok(())
    })
}
