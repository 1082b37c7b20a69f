//! System calls, one place, each with the argument for its safety.

pub mod interfaces;
pub mod lock;
pub mod poller;
pub mod random;
pub mod user;
