//! A unique id: 128 bytes that are all a job needs to find together.
//!
//! One process creates it and serves a store as long as it keeps the handle; the others get the bytes by
//! whatever means the program has. The id carries the job's secret: whoever has it can join.
//!
//! ```text
//!   0  "UNISOID" version:1        56  addresses: 4 × 16, IPv4 as ::ffff:a.b.c.d, unused ones zero
//!   8  instance of the server:16  120 host, a fingerprint:4; 0: of a place
//!  24  secret:32                  124 the first 2 bytes of SHA-256 over all other bytes
//!                                 126 port:2, little-endian
//! ```

#![forbid(unsafe_code)]

pub mod served;

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::interface::Interface;
use super::secret::SecretKey;
use super::tcp::TcpStore;
use super::tcp_server::ServerHandle;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};

/// The size of an id in bytes.
pub const ID_BYTES: usize = 128;

const MAGIC: [u8; 7] = *b"UNISOID";
const VERSION: u8 = 1;
const ADDRESSES: usize = 4;
/// How long all addresses of an id may refuse until its maker is taken for gone: it has served before there
/// was an id.
const GONE: Duration = Duration::from_secs(30);

/// Names a job and lets its holder join it. As text, 256 hexadecimal digits; `Debug` does not show the
/// secret.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    instance: [u8; 16],
    secret: SecretKey,
    addresses: Vec<IpAddr>,
    port: u16,
    host: [u8; 4],
}

impl UniqueId {
    /// A new id and the server of its store, which lives as long as the handle. `interface` chooses, as
    /// [`Interface::choose`] does, which addresses the id names.
    pub fn create(interface: Option<&str>) -> Result<(UniqueId, ServerHandle)> {
        let interface = Interface::choose(interface)?;
        let secret = SecretKey::random()?;
        // A link-local address means nothing without a scope, which differs from host to host.
        let global = interface.addresses.iter().copied().filter(|address| !is_v6_link_local(*address));
        let addresses: Vec<IpAddr> = global.take(ADDRESSES).collect();
        if addresses.is_empty() {
            fail!(
                InvalidArgument,
                "{interface} has no address that other hosts can use. Set UNISONO_INTERFACE to a name, an address or \
                 a CIDR."
            );
        }
        // Where the others are told loopback, nobody else needs to reach the port. Else everywhere: what is
        // told may be an address behind a translation.
        let server = match addresses[0] {
            first if addresses.iter().all(IpAddr::is_loopback) => {
                ServerHandle::start(SocketAddr::new(first, 0), Some(&secret))
            }
            _ => ServerHandle::start_everywhere(0, Some(&secret)),
        }?;
        log::info!("unique id: serving a store on port {} of {interface}", server.port());
        let id = UniqueId {
            instance: server.instance(),
            secret,
            addresses,
            port: server.port(),
            host: host_fingerprint(),
        };
        Ok((id, server))
    }

    /// The id that everybody makes who knows the place of the store, `name` of a host and its port: alike,
    /// without a word between them. Its secret is none: who can reach the port can join. One of them serves
    /// it ([`UniqueId::serve`]).
    pub fn of_place(name: &str) -> Result<UniqueId> {
        let found = name.to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
        let Some(port) = found.first().map(SocketAddr::port).filter(|port| *port != 0) else {
            fail!(
                InvalidArgument,
                "\"{name}\" is no place of a store: it is an IPv4 address and a port (10.0.0.1:5000), an IPv6 address \
                 ([fd00::1]:5000) or the name of a host"
            );
        };
        let usable = found.iter().map(SocketAddr::ip).filter(|address| !is_v6_link_local(*address));
        let addresses: Vec<IpAddr> = usable.take(ADDRESSES).collect();
        if addresses.is_empty() {
            fail!(
                InvalidArgument,
                "\"{name}\" is a link-local address, which means nothing without a scope, and that differs from host to host: \
                 name another address of that host"
            );
        }
        let hash = |what: &str| Sha256::new().chain_update(what).chain_update(name).finalize();
        let mut instance = [0; 16];
        instance.copy_from_slice(&hash("unisono instance of ")[..16]);
        let secret = SecretKey::new(hash("unisono secret of ").into());
        Ok(UniqueId { instance, secret, addresses, port, host: [0; 4] })
    }

    /// Serves the store of an id of a place, which is this host's: there alone, if it has one of the
    /// addresses.
    pub fn serve(&self) -> Result<ServerHandle> {
        ServerHandle::start_as(self.instance, &self.candidates(false), &self.secret)
    }

    /// The id that these bytes are.
    pub fn parse(bytes: &[u8; ID_BYTES]) -> Result<UniqueId> {
        if bytes[..7] != MAGIC {
            fail!(
                InvalidArgument,
                "these 128 bytes are not a unique id of unisono; pass on the bytes of one unchanged"
            );
        }
        if bytes[7] != VERSION {
            fail!(
                InvalidArgument,
                "the unique id has version {}, this library reads {VERSION}; use one version of unisono in all ranks",
                bytes[7]
            );
        }
        if bytes[124..126] != checksum(bytes) {
            fail!(
                InvalidArgument,
                "the unique id is damaged: its checksum does not match; pass on all 128 bytes"
            );
        }
        let mut instance = [0; 16];
        instance.copy_from_slice(&bytes[8..24]);
        let mut secret = [0; 32];
        secret.copy_from_slice(&bytes[24..56]);
        let mut host = [0; 4];
        host.copy_from_slice(&bytes[120..124]);
        let (slots, _) = bytes[56..120].as_chunks::<16>();
        let addresses: Vec<IpAddr> = slots
            .iter()
            .map(|slot| Ipv6Addr::from(*slot))
            .filter(|address| !address.is_unspecified())
            .map(|address| address.to_ipv4_mapped().map_or(address.into(), IpAddr::from))
            .collect();
        let port = u16::from_le_bytes([bytes[126], bytes[127]]);
        if addresses.is_empty() || port == 0 {
            fail!(InvalidArgument, "the unique id names no address");
        }
        Ok(UniqueId { instance, secret: SecretKey::new(secret), addresses, port, host })
    }

    /// The bytes, for any channel that nobody outside the job reads.
    pub fn to_bytes(&self) -> [u8; ID_BYTES] {
        let mut bytes = [0; ID_BYTES];
        bytes[..7].copy_from_slice(&MAGIC);
        bytes[7] = VERSION;
        bytes[8..24].copy_from_slice(&self.instance);
        bytes[24..56].copy_from_slice(self.secret.expose());
        let (slots, _) = bytes[56..120].as_chunks_mut::<16>();
        for (slot, address) in slots.iter_mut().zip(&self.addresses) {
            *slot = match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
        }
        bytes[120..124].copy_from_slice(&self.host);
        bytes[126..].copy_from_slice(&self.port.to_le_bytes());
        let sum = checksum(&bytes);
        bytes[124..126].copy_from_slice(&sum);
        bytes
    }

    /// The id as 256 hexadecimal digits, for a variable of the environment.
    pub fn to_hex(&self) -> String {
        self.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The job's secret.
    pub fn secret(&self) -> &SecretKey {
        &self.secret
    }

    /// Connects to the id's store. On the creator's host, loopback is tried first. Where all addresses
    /// refuse, the creator is gone, or they are not its own from here: that is an error long before a late
    /// deadline.
    pub fn connect(&self, deadline: Deadline) -> Result<TcpStore> {
        self.connect_unless(&|| false, deadline)
    }

    /// [`UniqueId::connect`], as long as it is not `recalled`.
    pub fn connect_unless(&self, recalled: &dyn Fn() -> bool, deadline: Deadline) -> Result<TcpStore> {
        self.connect_within(GONE, recalled, deadline)
    }

    /// [`UniqueId::connect_unless`], which takes the creator for gone after `patience`.
    fn connect_within(
        &self,
        patience: Duration,
        recalled: &dyn Fn() -> bool,
        deadline: Deadline,
    ) -> Result<TcpStore> {
        let is_here = self.host == host_fingerprint();
        let candidates = self.candidates(is_here);
        // Tried all the same: some containers have a boot of their own and share loopback.
        let is_elsewhere = !is_here && !self.is_of_place() && self.addresses.iter().all(IpAddr::is_loopback);
        let patience = match patience {
            // A place may be served later.
            _ if self.is_of_place() => None,
            _ if is_elsewhere => Some(Duration::ZERO),
            patience => Some(patience),
        };
        let connected =
            TcpStore::connect_any(&candidates, &self.secret, self.instance, patience, recalled, deadline);
        connected.map_err(|error| match error.status() {
            Status::PeerFailed if is_elsewhere => Error::new(
                Status::InvalidArgument,
                format!(
                    "the unique id names loopback alone, port {}, and was made on another host, or where loopback is another \
                     (in a container): set UNISONO_INTERFACE where it is made. unisono-run's are for its own host",
                    self.port
                ),
            ),
            _ => error,
        })
    }

    /// Whether it is one that everybody makes alike. Such an id names no host.
    fn is_of_place(&self) -> bool {
        self.host == [0; 4]
    }

    fn candidates(&self, same_host: bool) -> Vec<SocketAddr> {
        let loopback = same_host.then_some(IpAddr::from(Ipv4Addr::LOCALHOST));
        let others = self.addresses.iter().copied().filter(|address| Some(*address) != loopback);
        loopback.into_iter().chain(others).map(|address| SocketAddr::new(address, self.port)).collect()
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<UniqueId> {
        let digits: Option<Vec<u8>> = text
            .trim()
            .chars()
            .map(|digit| digit.to_digit(16).and_then(|value| u8::try_from(value).ok()))
            .collect();
        let bytes: Option<[u8; ID_BYTES]> =
            digits.filter(|digits| digits.len() == 2 * ID_BYTES).and_then(|digits| {
                let (pairs, _) = digits.as_chunks::<2>();
                pairs.iter().map(|[high, low]| high << 4 | low).collect::<Vec<u8>>().try_into().ok()
            });
        match bytes {
            Some(bytes) => UniqueId::parse(&bytes),
            None => Err(Error::new(
                Status::InvalidArgument,
                format!(
                    "a unique id as text has {} hexadecimal digits; this one has {} characters or other signs",
                    2 * ID_BYTES,
                    text.trim().chars().count()
                ),
            )),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:?} port {}, …)", self.addresses, self.port)
    }
}

fn is_v6_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn checksum(bytes: &[u8; ID_BYTES]) -> [u8; 2] {
    let hash = Sha256::new().chain_update(&bytes[..124]).chain_update(&bytes[126..]).finalize();
    [hash[0], hash[1]]
}

/// The same for processes that share a loopback device: one boot of one kernel, and one network namespace.
/// Where the system does not tell, hosts look alike; then loopback is tried in vain, and refused by the
/// instance at worst.
fn host_fingerprint() -> [u8; 4] {
    let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let hash =
        Sha256::new().chain_update(boot).chain_update(namespace.as_os_str().as_encoded_bytes()).finalize();
    [hash[0], hash[1], hash[2], hash[3]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::scratch::reserved;
    use crate::rendezvous::store::Store;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn example() -> UniqueId {
        UniqueId {
            instance: [3; 16],
            secret: SecretKey::new([0xab; 32]),
            addresses: vec!["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
            port: 2950,
            host: [1, 2, 3, 4],
        }
    }

    /// One that was made on this host.
    fn example_here(address: SocketAddr) -> UniqueId {
        UniqueId {
            addresses: vec![address.ip()],
            port: address.port(),
            host: host_fingerprint(),
            ..example()
        }
    }

    #[test]
    fn joins_by_bytes_and_by_text() {
        let (id, _server) = UniqueId::create(Some("127.0.0.1")).unwrap();
        let a = UniqueId::parse(&id.to_bytes()).unwrap().connect(soon()).unwrap();
        let b = id.to_hex().parse::<UniqueId>().unwrap().connect(soon()).unwrap();
        a.set("k", b"v", soon()).unwrap();
        assert_eq!(b.get("k", soon()).unwrap(), b"v");
        drop(UniqueId::create(None).unwrap());
    }

    #[test]
    fn what_tells_others_loopback_alone_is_not_reached_from_elsewhere() {
        let (_, server) = UniqueId::create(Some("127.0.0.1")).unwrap();
        assert_eq!(server.address().ip(), Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn survives_the_way_and_hides_its_secret() {
        let id = example();
        assert_eq!(UniqueId::parse(&id.to_bytes()).unwrap(), id);
        assert_eq!(id.to_hex().to_uppercase().parse::<UniqueId>().unwrap(), id);
        let debug = format!("{id:?}");
        assert!(debug.contains("10.0.0.5") && !debug.contains("abab") && !debug.contains("171"), "{debug}");
    }

    #[test]
    fn any_changed_byte_is_refused() {
        let bytes = example().to_bytes();
        for index in 0..ID_BYTES {
            let mut bytes = bytes;
            bytes[index] ^= 0x40;
            let error = UniqueId::parse(&bytes).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "byte {index}");
        }
        assert!(UniqueId::parse(&[0; 128]).unwrap_err().text().contains("not a unique id"));
    }

    #[test]
    fn who_knows_the_place_makes_the_same_id_and_meets_there() {
        let (_place, address) = reserved();
        let made = || UniqueId::of_place(&address.to_string()).unwrap();
        assert_eq!(made(), UniqueId::parse(&made().to_bytes()).unwrap());
        let _server = made().serve().unwrap();
        let [a, b] = [(); 2].map(|()| made().connect(soon()).unwrap());
        a.set("k", b"v", soon()).unwrap();
        assert_eq!(b.get("k", soon()).unwrap(), b"v");
        let other = UniqueId::of_place("127.0.0.1:1").unwrap();
        assert!(other.secret() != made().secret() && other.instance != made().instance);
        for name in ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "[::1]", "no such host:1"] {
            let error = UniqueId::of_place(name).unwrap_err();
            assert!(error.status() == Status::InvalidArgument && error.text().contains(name), "{error}");
        }
        for name in ["[fe80::1]:5000", "[fe80::1%2]:5000"] {
            let error = UniqueId::of_place(name).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument);
            assert!(error.text().contains(&format!("\"{name}\" is a link-local address")), "{error}");
        }
    }

    #[test]
    fn odd_texts_are_refused() {
        let hex = example().to_hex();
        for text in
            ["", "zz", &hex[1..], &format!("{hex}00"), &hex.replacen('a', "g", 1), &hex.replacen('a', "é", 1)]
        {
            let error = text.parse::<UniqueId>().unwrap_err();
            assert!(error.text().contains("256 hexadecimal digits"), "{error}");
        }
    }

    #[test]
    fn loopback_comes_first_on_the_same_host_only() {
        let text = |same| example().candidates(same).iter().map(SocketAddr::to_string).collect::<Vec<_>>();
        assert_eq!(text(true), ["127.0.0.1:2950", "10.0.0.5:2950", "[fd00::5]:2950"]);
        assert_eq!(text(false), ["10.0.0.5:2950", "[fd00::5]:2950"]);
    }

    #[test]
    fn an_id_whose_server_is_gone_is_a_timeout_that_names_the_addresses() {
        let (_place, address) = reserved();
        let id = example_here(address);
        let error = id.connect(Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert_eq!(error.status(), Status::Timeout);
        assert!(error.text().contains(&format!("127.0.0.1:{}", id.port)), "{error}");
    }

    #[test]
    fn an_id_whose_maker_is_gone_says_so_long_before_the_deadline() {
        let (_place, address) = reserved();
        let id = example_here(address);
        let refused = || id.connect_within(Duration::from_millis(100), &|| false, soon()).unwrap_err();
        let by_nobody = refused();
        let _another = ServerHandle::start(address, Some(&id.secret)).unwrap();
        for error in [by_nobody, refused()] {
            assert_eq!(error.status(), Status::PeerFailed, "{error}");
            for part in [&format!("127.0.0.1:{}", id.port), "the process that made the id is gone"] {
                assert!(error.text().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn an_id_that_names_loopback_alone_is_refused_elsewhere_unless_its_maker_answers() {
        let (_place, address) = reserved();
        let id = UniqueId { host: example().host, ..example_here(address) };
        let error = id.connect(Deadline::NEVER).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        for part in ["loopback alone", "made on another host", "UNISONO_INTERFACE"] {
            assert!(error.text().contains(part), "{error}");
        }
        let (made, _server) = UniqueId::create(Some("127.0.0.1")).unwrap();
        let id = UniqueId { host: example().host, ..made };
        id.connect(soon()).unwrap().set("k", b"v", soon()).unwrap();
    }

    #[test]
    fn a_place_that_is_not_served_yet_is_waited_for_until_the_deadline() {
        let (_place, address) = reserved();
        let id = UniqueId::of_place(&address.to_string()).unwrap();
        let id = UniqueId::parse(&id.to_bytes()).unwrap();
        let deadline = Deadline::after(Duration::from_millis(50));
        let error = id.connect_within(Duration::ZERO, &|| false, deadline).unwrap_err();
        assert_eq!(error.status(), Status::Timeout, "{error}");
    }
}
