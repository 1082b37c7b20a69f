//! Runs schedules over links, and direct exchanges in shared memory.
//!
//! `wire` is what a message looks like, `messages` matches and moves them, `executor` runs a schedule over
//! messages, `direct` exchanges through the segments of one host, `device` through the memory of its GPUs,
//! `staged` brings device memory to the host's engine and back, `endpoint` owns all of it for one rank of one
//! job and is where threads wait, `callbacks` calls what a program wants called at an operation's end,
//! `hauling` has several threads move long messages, `joint` has them share local work, `allowance` says how
//! much of that is done in one look. `bootstrap` makes an endpoint out of a store.

mod allowance;
pub mod bootstrap;
pub mod callbacks;
pub mod control;
pub mod device;
pub mod direct;
pub mod endpoint;
pub mod executor;
pub mod group;
pub mod hauling;
pub mod joint;
pub mod lane;
pub mod messages;
pub mod observed;
pub mod operation;
pub mod pairs;
pub mod point;
pub mod recorder;
pub mod sends;
pub mod shelf;
mod spent;
pub mod staged;
pub mod wire;

#[cfg(test)]
mod tests;
