//! How ranks find each other: stores, unique ids, the environment of launchers, network interfaces.

#[cfg(test)]
mod battery;
pub mod file;
pub mod hash;
pub mod prefix;
#[cfg(test)]
mod scratch;
pub mod secret;
pub mod store;
