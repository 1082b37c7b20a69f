//! System calls, one place, each with the argument for its safety.

pub mod fork;
pub mod file;
pub mod random;
