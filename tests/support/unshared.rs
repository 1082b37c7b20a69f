//! Programs in a network of their own, in which nothing is up.

use std::process::{Command, Stdio};

/// What runs one: its name and arguments are to follow.
pub(crate) fn unshared() -> Command {
    let mut command = Command::new("unshare");
    command.arg("-rn").stdin(Stdio::null());
    command
}

/// Why none can be run here, if so.
pub(crate) fn refused() -> Option<String> {
    let allowed = unshared().arg("true").output();
    let works = allowed.as_ref().is_ok_and(|output| output.status.success());
    (!works).then(|| format!("'unshare -rn true' does not work here, {allowed:?}"))
}
