//! How ranks find each other: stores, unique ids, the environment of launchers, network interfaces.

#![forbid(unsafe_code)]

#[cfg(test)]
mod battery;
pub mod environment;
pub mod file;
pub mod hash;
pub mod id;
pub mod interface;
pub mod join;
pub mod prefix;
mod run_directory;
#[cfg(test)]
mod scratch;
pub mod secret;
mod slurm;
pub mod store;
pub mod tcp;
pub mod tcp_server;
mod tcp_wire;
