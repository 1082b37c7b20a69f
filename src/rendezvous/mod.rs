//! How ranks find each other: stores, unique ids, the environment of launchers, network interfaces.

#[cfg(test)]
mod battery;
pub mod callback;
pub mod file;
pub mod hash;
pub mod id;
pub mod interface;
pub mod prefix;
#[cfg(test)]
mod scratch;
pub mod secret;
pub mod store;
pub mod tcp;
pub mod tcp_server;
mod tcp_wire;
