//! What the standard library leaves out about files: advisory locks and the result of closing.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};

use super::fork::Unshared;

/// An open file, to take the exclusive advisory lock of. The lock lasts until this is dropped, at the latest
/// until the process has ended: children that it has forked do not keep it.
pub struct Lock {
    file: Unshared<File>,
    /// A forked child has a copy of this, and must not end its parent's lock.
    process: u32,
}

impl Lock {
    /// For a file whose lock is not taken yet.
    pub fn on(file: File) -> Lock {
        Lock { file: Unshared::new(file), process: std::process::id() }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Takes the lock if it is free, and says whether we have it.
    pub fn try_take(&self) -> io::Result<bool> {
        flock(&self.file, libc::LOCK_EX)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            // Closing would leave it to a child that was forked meanwhile. Unlocking an open file does not
            // fail.
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
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of
        // ours.
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
    use std::io::{Read, Write};

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

    #[test]
    fn a_lock_ends_with_its_process_though_a_child_of_it_lives() {
        let path = std::env::temp_dir().join(format!("unisono-test-lock-of-a-parent-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        let (mut told, mut tells) = io::pipe().unwrap();
        // SAFETY: the processes make system calls, take locks that are free in children, and leave by _exit.
        let parent = unsafe { libc::fork() };
        if parent == 0 {
            let lock = File::open(&path).map(Lock::on);
            let taken = lock.as_ref().is_ok_and(|lock| lock.try_take().unwrap_or(false));
            // SAFETY: as above.
            if unsafe { libc::fork() } == 0 {
                let _ = tells.write_all(&std::process::id().to_le_bytes());
                // SAFETY: takes no pointers; a child that nobody kills ends after a while.
                unsafe { (libc::alarm(60), libc::pause()) };
            }
            // SAFETY: ends the process without running anything of the test's.
            unsafe { libc::_exit(i32::from(!taken)) };
        }
        drop(tells);
        let (mut status, mut child) = (0, [0; 4]);
        // SAFETY: `status` outlives the call; `parent` is a child of ours that nobody else reaps.
        assert_eq!(unsafe { libc::waitpid(parent, &mut status, 0) }, parent);
        told.read_exact(&mut child).unwrap();
        let locked = is_locked(&file).unwrap();
        // SAFETY: takes no pointers; the process waits for that.
        unsafe { libc::kill(i32::from_le_bytes(child), libc::SIGKILL) };
        std::fs::remove_file(&path).unwrap();
        assert_eq!((status, locked), (0, false));
    }
}
