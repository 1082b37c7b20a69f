//! Algorithms as data. An algorithm is a pure function of (rank, size, counts, options) that returns a
//! [`Schedule`]: steps over spans of named buffers, with the order they must keep. Nothing here does I/O or
//! knows how bytes move; the engine runs any schedule over any link, the checker proves it symbolically, the
//! cost model prices it.
//!
//! [`plan`] is the entry. An algorithm states in program order what one rank moves, through a
//! [`builder::Builder`], which numbers the messages and derives the dependencies. All ranks plan with the
//! same collective (their own view of it), the same algorithm, chunk and node size; then sends and receives
//! of different ranks meet.

#![forbid(unsafe_code)]

mod algorithm;
mod algorithms;
pub mod builder;
pub mod checker;
mod collective;
pub mod cost;
pub mod ir;

pub use algorithm::{Algorithm, Peers, plan};
pub use collective::{Agreement, Collective, Kind, Shape, total};
pub use ir::Schedule;
