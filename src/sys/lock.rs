//! What the standard library leaves out about files: advisory locks and the result of closing.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};

/// An open file, to take the exclusive advisory lock of. The lock lasts until this is dropped, at the latest when the
/// process and the children that it has forked meanwhile have ended.
pub struct Lock {
    file: File,
    /// A forked child has a copy of this, and must not end its parent's lock.
    process: u32,
}

impl Lock {
    /// For a file whose lock is not taken yet.
    pub fn on(file: File) -> Lock {
        Lock { file, process: std::process::id() }
    }

    /// Takes the lock if it is free, and says whether we have it.
    pub fn try_take(&self) -> io::Result<bool> {
        flock(&self.file, libc::LOCK_EX)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            // Closing would leave it to a child that was forked meanwhile. Unlocking an open file does not fail.
            let _ = flock(&self.file, libc::LOCK_UN);
        }
    }
}

/// Whether another opening of the file holds the exclusive lock. Askers do not disturb each other.
pub fn is_locked(file: &File) -> io::Result<bool> {
    let free = flock(file, libc::LOCK_SH)?;
    if free {
        flock(file, libc::LOCK_UN)?;
    }
    Ok(!free)
}

fn flock(file: &File, operation: i32) -> io::Result<bool> {
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
        if unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) } == 0 {
            return Ok(true);
        }
        let cause = io::Error::last_os_error();
        match cause.kind() {
            io::ErrorKind::WouldBlock => return Ok(false),
            io::ErrorKind::Interrupted => {}
            _ => return Err(cause),
        }
    }
}

/// Closes `file` and tells what dropping it would hide: network file systems report a full disk only here.
pub fn close(file: File) -> io::Result<()> {
    // SAFETY: `into_raw_fd` gave up the ownership, so this is the only close of the descriptor.
    if unsafe { libc::close(file.into_raw_fd()) } == 0 {
        return Ok(());
    }
    let cause = io::Error::last_os_error();
    // On Linux an interrupted close has closed the descriptor.
    if cause.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(cause) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_belongs_to_one_opening_and_ends_with_it() {
        let path = std::env::temp_dir().join(format!("unisono-test-lock-{}", std::process::id()));
        let a = Lock::on(File::create(&path).unwrap());
        let (b, c) = (File::open(&path).unwrap(), Lock::on(File::open(&path).unwrap()));
        std::fs::remove_file(&path).unwrap();
        assert!(!is_locked(&b).unwrap());
        assert!(a.try_take().unwrap());
        assert!(!c.try_take().unwrap());
        assert!(is_locked(&b).unwrap());
        drop(a);
        assert!(!is_locked(&b).unwrap());
        assert!(c.try_take().unwrap());
    }
}
