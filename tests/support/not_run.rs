//! What a test says that cannot do its work here.

use std::fmt::Display;
use std::io::Write;

/// Says that `check` could not be made, past libtest, which keeps what tests print: `dev` counts such lines.
pub(crate) fn not_run(check: &str, why: impl Display) {
    // Where nobody reads it nobody can be told.
    let _ = std::io::stderr().write_all(format!("\nNOT RUN: {check}: {why}\n").as_bytes());
}
