//! Whether this process is a fork of the one that made a handle.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Counts the forks between the first call in any ancestor and this process. A handle remembers the number and
/// refuses to work where it differs: in a child, the threads and the peers behind the handle do not exist.
pub fn generation() -> u32 {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as the library (linked with nodelete), and all
        // it does is an atomic addition, which is safe between fork and exec.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(count)) };
        if failed != 0 {
            log::warn!(
                "pthread_atfork failed with {failed}: handles used after a fork will not be recognised"
            );
        }
    });
    GENERATION.load(Ordering::Relaxed)
}

extern "C" fn count() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_sees_another_generation() {
        let before = generation();
        // SAFETY: the child only compares two integers and leaves by _exit, all of it async-signal-safe: the handler
        // is registered, so `generation` takes no lock.
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
