//! System calls, one place, each with the argument for its safety.

pub mod file;
pub mod interfaces;
pub mod poller;
pub mod random;
pub mod user;
