//! unisono: collective communications on host memory and on the memory of CUDA devices, behind a C ABI.
//!
//! `include/unisono.h` is the public face; the Rust modules below are its implementation and may change at
//! any time. ARCHITECTURE.md tells how they fit together.

// A file of tests that `tests/gpu` includes, too, names the library as that does.
#[cfg(test)]
extern crate self as unisono;

pub mod bench;
pub mod collective;
pub mod communicator;
pub mod cuda;
pub mod deadline;
pub mod engine;
pub mod error;
pub mod logging;
#[cfg(test)]
#[path = "../tests/support/not_run.rs"]
mod not_run;
pub mod panics;
pub mod reduce;
pub mod rendezvous;
pub mod run;
pub mod schedule;
pub mod settings;
pub mod signature;
pub mod sys;
pub mod transport;
