//! unisono: collective communications over host memory (and, to come, CUDA device memory) behind a C ABI.
//!
//! `include/unisono.h` is the public face; the Rust modules below are its implementation and may change at any time.
//! ARCHITECTURE.md tells how they fit together.

pub mod collective;
pub mod communicator;
pub mod cuda;
pub mod deadline;
pub mod engine;
pub mod error;
pub mod ffi;
pub mod reduce;
pub mod rendezvous;
pub mod run;
pub mod schedule;
pub mod signature;
pub mod sys;
pub mod transport;
