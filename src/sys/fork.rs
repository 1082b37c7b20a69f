//! What a fork does to the library: handles of the parent are void in the child, and the child must not keep
//! the parent's connections open.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::event::EventFd;
use super::global;

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A bit for each descriptor that is [`Unshared`]; higher ones than there are bits stay open in children.
static UNSHARED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// A descriptor without meaning, to put in the place of others. −1 before the first call of [`generation`].
static PLUG: AtomicI32 = AtomicI32::new(-1);

/// Counts the forks between the first call in any ancestor and this process. A handle remembers the number
/// and refuses to work where it differs: in a child, the threads and the peers behind the handle do not
/// exist.
pub fn generation() -> u32 {
    static REGISTERED: Once = Once::new();
    let mut failed = 0;
    REGISTERED.call_once(|| {
        if let Ok(plug) = EventFd::new().and_then(|event| event.as_fd().try_clone_to_owned()) {
            PLUG.store(plug.into_raw_fd(), Ordering::Relaxed);
        }
        // SAFETY: the handlers are plain functions that live as long as the library (linked with nodelete).
        // The parent's take locks and give them back. What the child's does is safe in the child of a process
        // with threads: atomic operations, dup3, and giving back locks that its own thread has taken.
        failed = unsafe {
            libc::pthread_atfork(Some(global::hold_all), Some(global::release_all), Some(in_child))
        };
    });
    // Not above: the log asks for the number, too.
    if failed != 0 {
        log::warn!("pthread_atfork failed with {failed}: handles used after a fork will not be recognised");
    }
    GENERATION.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let plug = PLUG.load(Ordering::Relaxed);
    for (index, word) in UNSHARED.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 && plug >= 0 {
            let fd = index as libc::c_int * 64 + bits.trailing_zeros() as libc::c_int;
            bits &= bits - 1;
            // SAFETY: takes no pointers. The number stays taken, so its owner in the child may still close
            // it.
            unsafe { libc::dup3(plug, fd, libc::O_CLOEXEC) };
        }
    }
    global::release_all();
}

/// A descriptor that children made by fork do not keep: while one did, the other end would not notice that
/// this process has ended. In the child its number stands for something that no call succeeds on.
#[derive(Debug)]
pub struct Unshared<T: AsRawFd>(T);

impl<T: AsRawFd> Unshared<T> {
    /// Takes care of an open descriptor.
    pub fn new(fd: T) -> Unshared<T> {
        generation();
        if let Some((word, bit)) = place(&fd) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Unshared(fd)
    }
}

impl<T: AsRawFd> Deref for Unshared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> Drop for Unshared<T> {
    fn drop(&mut self) {
        // Before the descriptor closes: from then on the number may be somebody else's.
        if let Some((word, bit)) = place(&self.0) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

fn place(fd: &impl AsRawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd.as_raw_fd()).ok()?;
    Some((UNSHARED.get(fd / 64)?, 1 << (fd % 64)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Whether `work` comes to an end, and says yes, in a child that is forked here.
    pub(crate) fn in_a_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child allocates, which the system's allocator is made for, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes no pointers. It ends who waits for ever.
            unsafe { libc::alarm(30) };
            let code = if work() { 0 } else { 1 };
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "a fork");
        let mut status = 0;
        // SAFETY: `status` outlives the call; `child` is a child of ours that nobody else reaps.
        let ended = unsafe { libc::waitpid(child, &mut status, 0) };
        ended == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }

    /// Does `work` while a child lives that was forked before it.
    pub(crate) fn beside_a_child(work: impl FnOnce()) {
        struct Child(libc::pid_t);
        impl Drop for Child {
            fn drop(&mut self) {
                // SAFETY: ends and reaps a child of ours.
                unsafe {
                    libc::kill(self.0, libc::SIGKILL);
                    libc::waitpid(self.0, std::ptr::null_mut(), 0);
                }
            }
        }
        // SAFETY: the child only pauses until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: takes no pointers.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0, "a fork");
        let _child = Child(child);
        work();
    }

    #[test]
    fn a_child_does_not_keep_unshared_descriptors() {
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        let near = Unshared::new(near);
        beside_a_child(|| {
            drop(near);
            // Without the care, the child's copy would keep the stream open, and this would wait for ever.
            far.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
            assert_eq!(std::io::Read::read(&mut far, &mut [0; 1]).unwrap(), 0);
        });
    }

    #[test]
    fn a_child_sees_another_generation() {
        let before = generation();
        // SAFETY: the child only compares two integers and leaves by _exit, all of it async-signal-safe: the
        // handler is registered, so `generation` takes no lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if generation() == before + 1 { 0 } else { 1 };
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: `status` outlives the call; `child` is a child of ours that nobody else reaps.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert_eq!(generation(), before);
    }
}
