//! Which library this is, and the memory that it hands out.

use std::ffi::{c_char, c_void};

/// The version of the library as one number: major × 10000 + minor × 100 + patch. Compare it with
/// UNISONO_VERSION, the version of the header.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_version() -> u32 {
    UNISONO_VERSION
}

/// The version of the library as a text, such as "0.1.0". The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_version_string() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Frees memory that a function of the library has handed out and documents as freed by unisono_free. NULL is
/// fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_free(memory: *mut c_void) {
    // SAFETY: NULL, or by the contract from `malloc` (see `store::hand_out`) and freed once.
    unsafe { libc::free(memory) };
}

/// The version of this header: major × 10000 + minor × 100 + patch.
pub const UNISONO_VERSION: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_the_packages() {
        let part = |text: &str| text.parse::<u32>().unwrap();
        let number = part(env!("CARGO_PKG_VERSION_MAJOR")) * 10000
            + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
            + part(env!("CARGO_PKG_VERSION_PATCH"));
        assert_eq!(UNISONO_VERSION, number);
    }
}
