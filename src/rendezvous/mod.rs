//! How ranks find each other: stores, unique ids, the environment of launchers, network interfaces.

pub mod secret;
pub mod store;
