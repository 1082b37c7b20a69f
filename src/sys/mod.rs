//! System calls, one place, each with the argument for its safety. Descriptors are owned by types that close
//! them.

pub mod aside;
pub mod child;
pub mod door;
pub mod epoll;
pub mod event;
pub mod float;
pub mod fork;
pub mod global;
pub mod heap;
pub mod interfaces;
pub mod lock;
pub mod memory;
pub mod process;
pub mod random;
pub mod socket;
pub mod thread_end;
pub mod user;

/// Calls a function of libc that answers −1 and sets `errno` when it fails; gives an `io::Result` of what it
/// returned. The caller writes the `unsafe` block around it, with its argument.
macro_rules! syscall {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let answer = libc::$name($($argument),*);
        if answer == -1 { Err(std::io::Error::last_os_error()) } else { Ok(answer) }
    }};
}
pub(crate) use syscall;

/// Calls `attempt` again for as long as a signal interrupts it.
pub(crate) fn retry<T>(mut attempt: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match attempt() {
            Err(cause) if cause.kind() == std::io::ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
}
