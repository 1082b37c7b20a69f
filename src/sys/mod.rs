//! System calls, one place, each with the argument for its safety.

pub mod file;
pub mod random;
