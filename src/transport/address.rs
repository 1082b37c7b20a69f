//! Where a rank can be reached: what it publishes at rendezvous.

#![forbid(unsafe_code)]

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::wire::{Reader, put_text};
use crate::error::{Error, Result, Status, fail};

const VERSION: u8 = 4;

/// Names the sources that this library was built from. Ranks lay out memory that others use and run kernels
/// that wait for those of others, which differ from build to build: all ranks need the same.
const SOURCES: &str = env!("UNISONO_SOURCES");

/// The most TCP listeners that a rank publishes.
pub const MAX_ADDRESSES: usize = 16;

/// Where a rank can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its rank.
    pub rank: u32,
    /// The same for all ranks of one host: a hash of the kernel's boot id, or of the override in
    /// [`super::service::Options`].
    pub host: [u8; 16],
    /// The host's name, for errors; at most 255 bytes.
    pub hostname: String,
    /// The process, for errors: as its own pid namespace counts.
    pub pid: u32,
    /// Names its abstract Unix socket: `\0unisono-<hex>`.
    pub local: [u8; 16],
    /// The processors that it may use.
    pub processors: u16,
    /// Its threads for long messages over TCP; 0: what its share of the host's processors allows.
    pub tcp_threads: u8,
    /// Whether its calls on device memory may be relayed.
    pub relays: bool,
    /// Its TCP listeners, at most [`MAX_ADDRESSES`].
    pub addresses: Vec<SocketAddr>,
}

impl PeerAddress {
    /// As bytes, to be published. About 80 of them.
    ///
    /// # Panics
    /// When there are more than [`MAX_ADDRESSES`] addresses.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.addresses.len() <= MAX_ADDRESSES);
        let mut bytes = vec![VERSION];
        put_text(&mut bytes, SOURCES);
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.host);
        put_text(&mut bytes, &self.hostname);
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes.extend_from_slice(&self.local);
        bytes.extend_from_slice(&self.processors.to_le_bytes());
        bytes.push(self.tcp_threads);
        bytes.push(u8::from(self.relays));
        bytes.push(self.addresses.len() as u8);
        for address in &self.addresses {
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes.push(4);
                    bytes.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    bytes.push(6);
                    bytes.extend_from_slice(&ip.octets());
                    // A link-local address means nothing without its interface. The number is the
                    // publisher's: see `seen_from`.
                    let scope = if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 };
                    bytes.extend_from_slice(&scope.to_le_bytes());
                }
            }
            bytes.extend_from_slice(&address.port().to_le_bytes());
        }
        bytes
    }

    /// From bytes that anybody may have written.
    pub fn decode(bytes: &[u8]) -> Result<PeerAddress> {
        let refuse = || {
            let text = format!(
                "{} bytes at the rendezvous are no address of a rank: do all ranks run the same unisono?",
                bytes.len()
            );
            Error::new(Status::System, text)
        };
        let (sources, address) = parse(&mut Reader::new(bytes)).ok_or_else(refuse)?;
        if sources != SOURCES {
            fail!(
                Mismatch,
                "{} runs another build of unisono ({sources}) than who met it ({SOURCES}): install one build for all ranks",
                address.describe()
            );
        }
        Ok(address)
    }

    /// `rank 3 (host node7, pid 4711)`, for errors.
    pub fn describe(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.hostname, self.pid)
    }

    /// Its TCP listeners as a rank reaches them that is at `own`. On another host, a link-local address is one
    /// of the network that its own link-local address is of. On one host that is so in another network
    /// namespace alone: what was published comes first.
    pub(super) fn seen_from(&self, own: &PeerAddress) -> Vec<SocketAddr> {
        let near = |address: &SocketAddr| match address {
            SocketAddr::V6(address) if address.ip().is_unicast_link_local() => Some(*address),
            _ => None,
        };
        let scope = own.addresses.iter().find_map(near).map(|own| own.scope_id());
        let through_own = self.addresses.iter().map(|&address| match (near(&address), scope) {
            (Some(mut address), Some(scope)) => {
                address.set_scope_id(scope);
                address.into()
            }
            _ => address,
        });
        let mut seen = if self.host == own.host { self.addresses.clone() } else { Vec::new() };
        for address in through_own {
            if !seen.contains(&address) {
                seen.push(address);
            }
        }
        seen
    }

    /// The name of its Unix socket, with the zero byte that makes it abstract.
    pub(super) fn local_name(&self) -> String {
        let mut name = "\0unisono-".to_owned();
        for byte in self.local {
            write!(name, "{byte:02x}").expect("writing to a String cannot fail");
        }
        name
    }
}

/// The sources of who wrote it, and the address.
fn parse(reader: &mut Reader<'_>) -> Option<(String, PeerAddress)> {
    if reader.u8()? != VERSION {
        return None;
    }
    let sources = reader.text()?;
    let rank = reader.u32()?;
    let host = reader.array()?;
    let hostname = reader.text()?;
    let pid = reader.u32()?;
    let local = reader.array()?;
    let (processors, tcp_threads) = (reader.u16()?, reader.u8()?);
    let relays = match reader.u8()? {
        0 => false,
        1 => true,
        _ => return None,
    };
    let count = usize::from(reader.u8()?);
    if count > MAX_ADDRESSES {
        return None;
    }
    let mut addresses = Vec::with_capacity(count);
    for _ in 0..count {
        addresses.push(match reader.u8()? {
            4 => SocketAddr::from((Ipv4Addr::from(reader.array::<4>()?), reader.u16()?)),
            6 => {
                let (ip, scope) = (Ipv6Addr::from(reader.array::<16>()?), reader.u32()?);
                SocketAddrV6::new(ip, reader.u16()?, 0, scope).into()
            }
            _ => return None,
        });
    }
    let address =
        PeerAddress { rank, host, hostname, pid, local, processors, tcp_threads, relays, addresses };
    reader.is_done().then_some((sources, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> PeerAddress {
        PeerAddress {
            rank: 3,
            host: [7; 16],
            hostname: "node7".into(),
            pid: 4711,
            local: [0xab; 16],
            processors: 300,
            tcp_threads: 4,
            relays: true,
            addresses: vec!["10.0.0.1:2950".parse().unwrap(), "[fe80::1%3]:80".parse().unwrap()],
        }
    }

    #[test]
    fn survives_the_trip() {
        let address = sample();
        assert_eq!(PeerAddress::decode(&address.encode()).unwrap(), address);
        assert_eq!(address.describe(), "rank 3 (host node7, pid 4711)");
        assert_eq!(address.local_name(), format!("\0unisono-{}", "ab".repeat(16)));
    }

    /// How a rank that listens at `own` alone sees the sample's addresses.
    fn seen(own: &str, same_host: bool) -> Vec<String> {
        let host = if same_host { sample().host } else { [8; 16] };
        let own = PeerAddress { host, addresses: vec![own.parse().unwrap()], ..sample() };
        sample().seen_from(&own).iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn a_link_local_address_is_seen_through_the_interface_of_who_looks() {
        assert_eq!(seen("[fe80::2%7]:90", false), ["10.0.0.1:2950", "[fe80::1%7]:80"]);
        assert_eq!(seen("10.0.0.2:90", false), ["10.0.0.1:2950", "[fe80::1%3]:80"]);
    }

    #[test]
    fn on_one_host_a_link_local_address_is_first_as_it_is_published() {
        assert_eq!(seen("[fe80::2%7]:90", true), ["10.0.0.1:2950", "[fe80::1%3]:80", "[fe80::1%7]:80"]);
        for own in ["[fe80::2%3]:90", "10.0.0.2:90"] {
            assert_eq!(seen(own, true), ["10.0.0.1:2950", "[fe80::1%3]:80"]);
        }
    }

    #[test]
    fn a_rank_of_another_build_is_named() {
        let mut bytes = sample().encode();
        // Behind the version and the length of the text.
        bytes[2] = if bytes[2] == b'0' { b'1' } else { b'0' };
        let error = PeerAddress::decode(&bytes).unwrap_err();
        assert_eq!(error.status(), Status::Mismatch);
        assert!(error.text().contains("rank 3 (host node7, pid 4711) runs another build"), "{error}");
        assert!(error.text().contains(SOURCES), "{error}");
    }

    #[test]
    fn a_cut_or_padded_address_is_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            assert!(PeerAddress::decode(&bytes[..len]).is_err());
        }
        assert!(PeerAddress::decode(&[&bytes[..], &[0]].concat()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(address) = PeerAddress::decode(&bytes) {
                prop_assert_eq!(address.encode(), bytes);
            }
        }

        #[test]
        fn no_altered_byte_causes_a_panic(place in 0usize..100, value in any::<u8>()) {
            let mut bytes = sample().encode();
            let place = place % bytes.len();
            bytes[place] = value;
            if let Ok(address) = PeerAddress::decode(&bytes) {
                prop_assert_eq!(address.encode(), bytes);
            }
        }
    }
}
