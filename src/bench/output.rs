//! What goes to standard output. Whoever reads it may stop at any time (`| head -1`): then this process ends,
//! quietly.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use super::FAILED;
use crate::sys::process;

/// The exit status when nobody reads any more: that of a program that SIGPIPE ends.
const UNREAD: u8 = 128 + libc::SIGPIPE as u8;

/// Prints a line, as println does where somebody reads.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::bench::output::line(format_args!($($text)*))
    };
}
pub(super) use say;

/// What [`say`] does.
pub(super) fn line(text: fmt::Arguments<'_>) {
    match writeln!(io::stdout().lock(), "{text}") {
        Ok(()) => {}
        Err(cause) if cause.kind() == ErrorKind::BrokenPipe => process::leave(UNREAD),
        Err(cause) => {
            // Nobody can be told that this cannot be written either.
            let _ = writeln!(io::stderr(), "unisono-bench: cannot write to standard output: {cause}");
            process::leave(FAILED)
        }
    }
}
