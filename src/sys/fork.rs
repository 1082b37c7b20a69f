//! Whether this process is a fork of the one that made a handle.

/// Counts the forks between the first process and this one. Handles remember it and refuse to work in a child.
pub fn generation() -> u32 {
    todo!()
}
