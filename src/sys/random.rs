//! Random bytes from the kernel.

use std::io;

use crate::error::{Error, Result};

/// Fills `bytes` from the kernel's generator. Blocks only in the first moments after the machine booted.
pub fn fill(bytes: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: `rest` is a live, writable slice, and the kernel writes at most `rest.len()` bytes into it.
        let count = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => filled += count,
            Err(_) => {
                let cause = io::Error::last_os_error();
                if cause.kind() != io::ErrorKind::Interrupted {
                    return Err(Error::system("no random bytes from getrandom", cause));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_every_byte_and_never_repeats() {
        let (mut a, mut b) = ([0; 64], [0; 64]);
        fill(&mut a).unwrap();
        fill(&mut b).unwrap();
        assert_ne!(a, b);
        // 16 zero bytes in a row at the end would be a buffer left unfilled (chance 2⁻¹²⁸ otherwise).
        assert_ne!(a[48..], [0; 16]);
        fill(&mut []).unwrap();
    }
}
