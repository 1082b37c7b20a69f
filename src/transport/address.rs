//! Where a rank can be reached: what it publishes at rendezvous.

use std::net::SocketAddr;

use crate::error::Result;

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its rank.
    pub rank: u32,
    /// The same for all ranks of one host: a hash of the kernel's boot id, or of the override in [`super::service::Options`].
    pub host: [u8; 16],
    /// The host's name, for errors.
    pub hostname: String,
    /// The process, for errors: as its own pid namespace counts.
    pub pid: u32,
    /// Names its abstract Unix socket: `\0unisono-<hex>`.
    pub local: [u8; 16],
    /// Its TCP listeners.
    pub addresses: Vec<SocketAddr>,
}

impl PeerAddress {
    /// As bytes, to be published.
    pub fn encode(&self) -> Vec<u8> {
        todo!()
    }
    /// From bytes that anybody may have written.
    pub fn decode(_bytes: &[u8]) -> Result<PeerAddress> {
        todo!()
    }
    /// `rank 3 (host node7, pid 4711)`, for errors.
    pub fn describe(&self) -> String {
        todo!()
    }
}
