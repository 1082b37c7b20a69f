//! Which of this host's addresses other hosts are told.
//!
//! A user may name an interface (`eth0`), a label of its addresses (`eth0:1`), an address (`10.0.0.5`) or a
//! network (`10.0.0.0/8`, `fd00::/8`). Without a choice it is the interface of the default route; without one,
//! the first that is up and not loopback; without one, loopback, which serves ranks of this host only. Of the
//! interface's addresses, IPv4 come first and link-local ones last: they are used only where there is nothing
//! else.

#![forbid(unsafe_code)]

use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use crate::error::{Error, Result, fail};
use crate::sys::interfaces::{self, InterfaceAddress};

const ADVICE: &str = "Set UNISONO_INTERFACE to a name, an address or a CIDR.";

/// What helps where not even loopback is up, as in a new network namespace.
const LOOPBACK: &str = "Bring loopback up: ip link set lo up";

/// A chosen interface. Displays as a line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its number, the scope of link-local addresses.
    pub index: u32,
    /// The addresses to tell others, the best first. Never empty.
    pub addresses: Vec<IpAddr>,
    /// Why this one.
    pub reason: String,
}

impl Interface {
    /// The interface that `wanted` means, or the default.
    pub fn choose(wanted: Option<&str>) -> Result<Interface> {
        let (list, route) = look()?;
        choose_from(&list, wanted, route.as_deref())
    }

    /// As [`Interface::choose`]; `None` if nobody has said which, and none is up.
    pub fn find(wanted: Option<&str>) -> Result<Option<Interface>> {
        let (list, route) = look()?;
        find_in(&list, wanted, route.as_deref())
    }

    /// At most so many of its addresses to listen on at any port, the best first. An IPv6 address that means
    /// nothing without the interface that it belongs to is among them only if there is no other, and names
    /// that interface.
    pub fn listening(&self, most: usize) -> Vec<SocketAddr> {
        let place = |address: &IpAddr| match *address {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, 0, 0, self.index).into(),
            address => SocketAddr::new(address, 0),
        };
        let (near, far): (Vec<SocketAddr>, Vec<SocketAddr>) = self.addresses.iter().map(place).partition(
            |address| matches!(address, SocketAddr::V6(address) if address.ip().is_unicast_link_local()),
        );
        let mut addresses = if far.is_empty() { near } else { far };
        addresses.truncate(most);
        addresses
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.name)?;
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{} {address}", if index == 0 { "" } else { "," })?;
        }
        write!(f, " ({})", self.reason)
    }
}

/// A network: all addresses that share the first `length` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    length: u32,
}

impl Network {
    /// `None` if the text is not of the form address/length. Bits beyond the length do not matter.
    fn parse(text: &str) -> Option<Network> {
        let (address, length) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let length: u32 = length.parse().ok()?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        (length <= bits).then_some(Network { address, length })
    }

    fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let differ = a.to_bits() ^ b.to_bits();
                differ.leading_zeros() >= self.length
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let differ = a.to_bits() ^ b.to_bits();
                differ.leading_zeros() >= self.length
            }
            _ => false,
        }
    }
}

/// What this host has, and the interface of its default route.
fn look() -> Result<(Vec<InterfaceAddress>, Option<String>)> {
    let list =
        interfaces::list().map_err(|cause| Error::system("cannot list the network interfaces", cause))?;
    // Without /proc there is no default route that we know of.
    let v4 = fs::read_to_string("/proc/net/route").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    Ok((list, default_route(&v4, &v6)))
}

fn choose_from(list: &[InterfaceAddress], wanted: Option<&str>, route: Option<&str>) -> Result<Interface> {
    match find_in(list, wanted, route)? {
        Some(interface) => Ok(interface),
        None => fail!(System, "no network interface is up; there are {}. {LOOPBACK}", shown(list)),
    }
}

fn find_in(
    list: &[InterfaceAddress],
    wanted: Option<&str>,
    route: Option<&str>,
) -> Result<Option<Interface>> {
    match wanted.map(str::trim).filter(|wanted| !wanted.is_empty()) {
        Some(wanted) => choose_wanted(list, wanted).map(Some),
        None => Ok(find_default(list, route)),
    }
}

fn choose_wanted(list: &[InterfaceAddress], wanted: &str) -> Result<Interface> {
    let reason = |how| format!("{how} by '{wanted}'");
    if let Some(network) = Network::parse(wanted) {
        let inside = |entry: &&InterfaceAddress| network.contains(entry.address);
        let Some(first) = list.iter().filter(inside).find(|entry| entry.up) else {
            fail!(
                InvalidArgument,
                "no address is in the network '{wanted}'; there are {}. {ADVICE}",
                shown(list)
            );
        };
        let of_first = list.iter().filter(|entry| entry.name == first.name).filter(inside);
        return Ok(gather(of_first, reason("its network was chosen")));
    }
    if wanted.contains('/') {
        fail!(InvalidArgument, "'{wanted}' is not a network such as 10.0.0.0/8 or fd00::/8. {ADVICE}");
    }
    let by_address = wanted.parse::<IpAddr>().ok();
    let matching: Vec<_> = list
        .iter()
        .filter(|entry| match by_address {
            Some(address) => entry.address == address,
            None => entry.name == wanted || entry.label == wanted,
        })
        .collect();
    let has_loopback = list.iter().any(|entry| entry.loopback && entry.up);
    match (matching.first(), by_address) {
        (_, Some(address)) if address.is_loopback() && !has_loopback => {
            fail!(
                System,
                "loopback is down, to which {address} belongs; there are {}. {LOOPBACK}",
                shown(list)
            )
        }
        (None, Some(_)) => {
            fail!(
                InvalidArgument,
                "no interface has the address '{wanted}'; there are {}. {ADVICE}",
                shown(list)
            )
        }
        (None, None) => {
            fail!(InvalidArgument, "interface '{wanted}' does not exist; there are {}. {ADVICE}", shown(list))
        }
        (Some(first), _) if !first.up => {
            fail!(InvalidArgument, "interface '{}' is down; there are {}. {ADVICE}", first.name, shown(list))
        }
        (Some(first), by_address) => {
            let how = match by_address {
                Some(_) => "its address was chosen",
                None if first.name == wanted => "its name was chosen",
                None => "a label of its addresses was chosen",
            };
            Ok(gather(matching.into_iter(), reason(how)))
        }
    }
}

/// `None` if none is up.
fn find_default(list: &[InterfaceAddress], route: Option<&str>) -> Option<Interface> {
    let outside = |entry: &&InterfaceAddress| entry.up && !entry.loopback;
    let routed = list.iter().filter(outside).find(|entry| Some(entry.name.as_str()) == route);
    let useful = |entry: &&InterfaceAddress| outside(entry) && !is_link_local(entry.address);
    let first = list.iter().find(useful).or_else(|| list.iter().find(outside));
    let (chosen, reason) = match (routed, first, list.iter().find(|entry| entry.up)) {
        (Some(routed), ..) => (routed, "it has the default route"),
        (None, Some(first), _) => (first, "the first that is up; there is no default route"),
        (None, None, Some(loopback)) => (loopback, "there is only loopback"),
        (None, None, None) => return None,
    };
    Some(gather(list.iter().filter(|entry| entry.name == chosen.name), reason.to_owned()))
}

/// The interface of `entries`, which are one interface's and not empty.
fn gather<'a>(entries: impl Iterator<Item = &'a InterfaceAddress>, reason: String) -> Interface {
    let mut chosen = Interface { name: String::new(), index: 0, addresses: Vec::new(), reason };
    let mut addresses = Vec::new();
    for entry in entries {
        chosen.name.clone_from(&entry.name);
        chosen.index = entry.index;
        addresses.push(entry.address);
    }
    for wanted in [(false, false), (false, true), (true, false), (true, true)] {
        let is_wanted = |address: &IpAddr| (is_link_local(*address), address.is_ipv6()) == wanted;
        chosen.addresses.extend(addresses.iter().copied().filter(is_wanted));
    }
    chosen
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

fn shown(list: &[InterfaceAddress]) -> String {
    if list.is_empty() {
        return "none".to_owned();
    }
    let shown: Vec<String> = list
        .iter()
        .map(|entry| format!("{} {}{}", entry.label, entry.address, if entry.up { "" } else { " (down)" }))
        .collect();
    shown.join(", ")
}

/// The interface of the default route with the least metric, from the kernel's tables; IPv4's if there is
/// one.
fn default_route(v4: &str, v6: &str) -> Option<String> {
    const UP: u32 = 1;
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    let v4 = v4.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[name, destination, _, flags, _, _, metric, mask, ..] = fields.as_slice() else { return None };
        let default = hex(destination)? == 0 && hex(mask)? == 0 && hex(flags)? & UP != 0;
        default.then_some((metric.parse::<u32>().ok()?, name))
    });
    let v6 = v6.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[destination, length, _, _, _, metric, _, _, flags, name] = fields.as_slice() else {
            return None;
        };
        // The kernel lists an unreachable default on loopback where there is no real one.
        let default = destination.bytes().all(|byte| byte == b'0') && length == "00" && hex(flags)? & UP != 0;
        (default && name != "lo").then_some((hex(metric)?, name))
    });
    let name = v4.min().or_else(|| v6.min()).map(|(_, name)| name)?;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, index: u32, address: &str) -> InterfaceAddress {
        InterfaceAddress {
            name: name.to_owned(),
            label: name.to_owned(),
            index,
            address: address.parse().unwrap(),
            up: name != "eth2",
            loopback: name == "lo",
        }
    }

    fn host() -> Vec<InterfaceAddress> {
        vec![
            entry("lo", 1, "127.0.0.1"),
            entry("docker0", 4, "172.17.0.1"),
            entry("eth0", 2, "fe80::5"),
            entry("eth0", 2, "fd00::5"),
            entry("eth0", 2, "10.0.0.5"),
            entry("eth1", 3, "192.168.7.5"),
            entry("eth2", 5, "192.168.8.5"),
        ]
    }

    fn chosen(wanted: &str) -> (String, Vec<String>) {
        let interface = choose_from(&host(), Some(wanted), None).unwrap();
        (interface.name, interface.addresses.iter().map(IpAddr::to_string).collect())
    }

    #[test]
    fn by_name_address_and_network() {
        let all = vec!["10.0.0.5".to_owned(), "fd00::5".to_owned(), "fe80::5".to_owned()];
        assert_eq!(chosen("eth0"), ("eth0".to_owned(), all));
        for (wanted, name, address) in [
            ("192.168.7.5", "eth1", "192.168.7.5"),
            ("fd00::5", "eth0", "fd00::5"),
            ("10.0.0.0/8", "eth0", "10.0.0.5"),
            ("10.9.9.9/8", "eth0", "10.0.0.5"),
            ("192.168.0.0/16", "eth1", "192.168.7.5"),
            ("192.168.7.5/32", "eth1", "192.168.7.5"),
            ("0.0.0.0/0", "lo", "127.0.0.1"),
            ("fd00::/8", "eth0", "fd00::5"),
            ("fe80::/10", "eth0", "fe80::5"),
            (" eth1 ", "eth1", "192.168.7.5"),
        ] {
            assert_eq!(chosen(wanted), (name.to_owned(), vec![address.to_owned()]), "{wanted}");
        }
    }

    #[test]
    fn a_label_means_its_addresses_and_the_interfaces_name_those_of_all_labels() {
        let labelled = |address| InterfaceAddress { label: "eth0:1".to_owned(), ..entry("eth0", 2, address) };
        let list = [
            entry("lo", 1, "127.0.0.1"),
            entry("eth0", 2, "10.0.0.5"),
            labelled("10.1.2.3"),
            labelled("10.1.2.4"),
        ];
        let line = |wanted| choose_from(&list, Some(wanted), None).map(|interface| interface.to_string());
        assert_eq!(
            line("eth0:1").expect("it is there"),
            "interface eth0 10.1.2.3, 10.1.2.4 (a label of its addresses was chosen by 'eth0:1')"
        );
        assert_eq!(
            line("eth0").expect("it is there"),
            "interface eth0 10.0.0.5, 10.1.2.3, 10.1.2.4 (its name was chosen by 'eth0')"
        );
        let text = line("eth0:2").expect_err("there is none").to_string();
        let part = "'eth0:2' does not exist; there are lo 127.0.0.1, eth0 10.0.0.5, eth0:1 10.1.2.3, eth0:1 ";
        assert!(text.contains(part), "{text}");
    }

    #[test]
    fn the_default_follows_the_route_then_order_then_loopback() {
        let choose = |list: &[InterfaceAddress], route| choose_from(list, None, route).unwrap();
        assert_eq!(choose(&host(), Some("eth1")).name, "eth1");
        assert_eq!(choose(&host(), None).name, "docker0");
        assert_eq!(
            choose(&host(), Some("eth2")).name,
            "docker0",
            "a route over a downed interface does not count"
        );
        assert_eq!(choose(&host()[..1], None).name, "lo");
        assert_eq!(choose_from(&host(), Some(""), Some("eth1")).unwrap().name, "eth1");
        let line = choose(&host(), Some("eth1")).to_string();
        assert_eq!(line, "interface eth1 192.168.7.5 (it has the default route)");
    }

    #[test]
    fn mistakes_are_answered_with_what_there_is() {
        let list = [entry("lo", 1, "127.0.0.1"), entry("eth0", 2, "10.0.0.5"), entry("eth0", 2, "fe80::5")];
        let text = |list: &[InterfaceAddress], wanted| {
            choose_from(list, Some(wanted), None).unwrap_err().to_string()
        };
        assert_eq!(
            text(&list, "eth9"),
            "interface 'eth9' does not exist; there are lo 127.0.0.1, eth0 10.0.0.5, eth0 fe80::5. Set \
             UNISONO_INTERFACE to a name, an address or a CIDR."
        );
        for (wanted, part) in [
            ("10.0.0.6", "no interface has the address '10.0.0.6'"),
            ("11.0.0.0/8", "no address is in the network '11.0.0.0/8'"),
            ("10.0.0.0/33", "not a network"),
            ("fd00::/129", "not a network"),
            ("eth0/8", "not a network"),
            ("10.0.0.0/-1", "not a network"),
        ] {
            let text = text(&list, wanted);
            assert!(text.contains(part) && text.ends_with(ADVICE), "{text}");
        }
        assert!(text(&host(), "eth2").contains("'eth2' is down"));
    }

    #[test]
    fn where_loopback_is_down_that_is_said_with_what_brings_it_up() {
        let lo = InterfaceAddress { up: false, ..entry("lo", 1, "127.0.0.1") };
        for list in [vec![], vec![lo], vec![entry("eth0", 2, "10.0.0.5")]] {
            for wanted in ["127.0.0.1", "::1"] {
                let text = choose_from(&list, Some(wanted), None).unwrap_err().to_string();
                assert!(text.contains("loopback is down") && text.ends_with(LOOPBACK), "{text}");
                assert!(text.contains(wanted) && !text.contains("UNISONO_INTERFACE"), "{text}");
            }
        }
        // Another address of it than it has.
        let text = choose_from(&host(), Some("127.0.0.9"), None).unwrap_err().to_string();
        assert!(
            text.contains("no interface has the address '127.0.0.9'") && text.ends_with(ADVICE),
            "{text}"
        );
    }

    #[test]
    fn where_none_is_up_none_is_found_and_a_choice_fails() {
        let lo = InterfaceAddress { up: false, ..entry("lo", 1, "127.0.0.1") };
        for list in [vec![], vec![lo, entry("eth2", 5, "192.168.8.5")]] {
            for wanted in [None, Some(""), Some(" ")] {
                assert_eq!(find_in(&list, wanted, Some("eth2")).unwrap(), None);
                let text = choose_from(&list, wanted, Some("eth2")).unwrap_err().to_string();
                assert!(text.contains("no network interface is up") && text.ends_with(LOOPBACK), "{text}");
            }
            assert!(find_in(&list, Some("eth0"), None).is_err(), "what was named is to be there");
        }
        assert!(find_in(&host(), None, None).unwrap().is_some());
    }

    #[test]
    fn link_local_addresses_are_listened_on_where_there_is_no_other_and_carry_their_interface() {
        let listening = |list: &[InterfaceAddress]| {
            let addresses = choose_from(list, Some("eth0"), None).unwrap().listening(16);
            addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(listening(&host()), ["10.0.0.5:0", "[fd00::5]:0"]);
        assert_eq!(listening(&[entry("eth0", 2, "fe80::5")]), ["[fe80::5%2]:0"]);
    }

    #[test]
    fn of_many_addresses_the_first_are_listened_on() {
        let list: Vec<_> = (1..=30).map(|last| entry("eth0", 2, &format!("10.0.0.{last}"))).collect();
        let addresses = choose_from(&list, Some("eth0"), None).unwrap().listening(16);
        assert_eq!((addresses.len(), addresses[15]), (16, "10.0.0.16:0".parse().unwrap()));
    }

    #[test]
    fn the_real_loopback_is_found_by_network() {
        let interface = Interface::choose(Some("127.0.0.0/8")).unwrap();
        assert_eq!(interface.name, "lo");
        assert!(interface.addresses.contains(&IpAddr::from([127, 0, 0, 1])));
        assert!(!Interface::choose(None).unwrap().addresses.is_empty());
    }

    #[test]
    fn default_routes_are_read_from_the_kernels_tables() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let v4 = format!(
            "{head}eth1\t00000000\t0100A8C0\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
             eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
             eth2\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
        );
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000003     eth3\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
        );
        assert_eq!(default_route(&v4, &v6).as_deref(), Some("eth0"));
        assert_eq!(default_route(head, &v6).as_deref(), Some("eth3"));
        assert_eq!(default_route("", "garbage\n").as_deref(), None);
    }
}
