//! How a rank ended, in words and as an exit status.

use crate::sys::child::Exit;

/// The signals that a person may meet, by name.
const NAMES: [(i32, &str); 25] = [
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGQUIT, "SIGQUIT"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGTRAP, "SIGTRAP"),
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGKILL, "SIGKILL"),
    (libc::SIGUSR1, "SIGUSR1"),
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGUSR2, "SIGUSR2"),
    (libc::SIGPIPE, "SIGPIPE"),
    (libc::SIGALRM, "SIGALRM"),
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGSTKFLT, "SIGSTKFLT"),
    (libc::SIGCONT, "SIGCONT"),
    (libc::SIGTSTP, "SIGTSTP"),
    (libc::SIGXCPU, "SIGXCPU"),
    (libc::SIGXFSZ, "SIGXFSZ"),
    (libc::SIGVTALRM, "SIGVTALRM"),
    (libc::SIGPROF, "SIGPROF"),
    (libc::SIGPOLL, "SIGPOLL"),
    (libc::SIGPWR, "SIGPWR"),
    (libc::SIGSYS, "SIGSYS"),
];

/// `SIGKILL` for 9; `signal 40` for one without a name.
pub(super) fn signal_name(signal: i32) -> String {
    match NAMES.iter().find(|(number, _)| *number == signal) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("signal {signal}"),
    }
}

/// What the survivors' errors say of the rank: `was killed by signal 9`, `exited with code 3`.
pub(super) fn cause(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Signal(signal, _) => format!("was killed by signal {signal}"),
    }
}

/// The cause with what a person wants to know besides.
pub(super) fn cause_in_full(exit: Exit) -> String {
    match exit {
        Exit::Code(_) => cause(exit),
        Exit::Signal(signal, core) => {
            format!("{} ({}{})", cause(exit), signal_name(signal), if core { ", core dumped" } else { "" })
        }
    }
}

/// The exit status that a shell would give it: 128 + N for signal N.
pub(super) fn status(exit: Exit) -> u8 {
    match exit {
        Exit::Code(code) => code as u8,
        Exit::Signal(signal, _) => (128 + signal) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_happened() {
        assert_eq!(cause_in_full(Exit::Code(3)), "exited with code 3");
        assert_eq!(cause_in_full(Exit::Signal(9, false)), "was killed by signal 9 (SIGKILL)");
        assert_eq!(cause_in_full(Exit::Signal(11, true)), "was killed by signal 11 (SIGSEGV, core dumped)");
        assert_eq!(cause(Exit::Signal(15, false)), "was killed by signal 15");
        assert_eq!((status(Exit::Code(7)), status(Exit::Signal(9, false))), (7, 137));
    }
}
