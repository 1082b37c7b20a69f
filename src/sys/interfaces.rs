//! The network interfaces of this host.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// One address of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name, `eth0`.
    pub name: String,
    /// What the address is called: `eth0:1` if it has a label, and else as the interface.
    pub label: String,
    /// The interface's number in the kernel, which link-local IPv6 addresses need.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Whether the interface is up.
    pub up: bool,
    /// Whether it leads back to this host.
    pub loopback: bool,
}

/// All IPv4 and IPv6 addresses, in the kernel's order.
pub fn list() -> io::Result<Vec<InterfaceAddress>> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: `first` is writable; on success it is the head of a list that is ours until we free it.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut addresses = Vec::new();
    let mut next = first;
    // SAFETY: each element is valid until the list is freed below, and nobody else writes to it.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: `ifa_addr` is NULL or a socket address as long as its family says.
        let Some(address) = (unsafe { address(entry.ifa_addr) }) else { continue };
        // SAFETY: the name is terminated and valid until the list is freed.
        let label = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
        let has = |flag: i32| entry.ifa_flags & flag as u32 != 0;
        addresses.push(InterfaceAddress {
            name: interface_of(&label).to_owned(),
            label: label.into_owned(),
            // SAFETY: as above; the call only reads the name, of which the kernel takes the interface's.
            index: unsafe { libc::if_nametoindex(entry.ifa_name) },
            address,
            up: has(libc::IFF_UP),
            loopback: has(libc::IFF_LOOPBACK),
        });
    }
    // SAFETY: `first` came from getifaddrs, and nothing refers to the list any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(addresses)
}

/// The interface of an address that has this label: `eth0` of `eth0` and of `eth0:1`. An interface's own name
/// has no colon.
fn interface_of(label: &str) -> &str {
    label.split_once(':').map_or(label, |(name, _)| name)
}

/// # Safety
///
/// `raw` is NULL or valid for reads of the structure that its family names.
unsafe fn address(raw: *const libc::sockaddr) -> Option<IpAddr> {
    if raw.is_null() {
        return None;
    }
    // SAFETY: not NULL, and every socket address begins with its family.
    match i32::from(unsafe { (*raw).sa_family }) {
        libc::AF_INET => {
            // SAFETY: of this family, so of this structure; read without assuming its alignment.
            let address = unsafe { raw.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { raw.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::not_run::not_run;
    use crate::sys::fork::tests::in_a_child;

    #[test]
    fn loopback_is_listed_as_such() {
        let list = list().unwrap();
        let lo = list.iter().find(|entry| entry.address == IpAddr::from([127, 0, 0, 1])).unwrap();
        assert!(lo.loopback && lo.up && lo.index > 0, "{lo:?}");
    }

    const LABELLED: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 3);

    /// Has this process be in a network of its own, where it may do as it likes.
    fn enter_new_network() -> bool {
        // SAFETY: takes no pointers.
        unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) == 0 }
    }

    /// As `ip address add 10.1.2.3/8 dev lo label lo:1` does.
    fn label_loopback() -> bool {
        // SAFETY: both are plain bytes and numbers, for which zero is valid.
        let (mut request, mut address): (libc::ifreq, libc::sockaddr_in) = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo:1") {
            *to = *from as libc::c_char;
        }
        address.sin_family = libc::AF_INET as libc::sa_family_t;
        address.sin_addr.s_addr = u32::from(LABELLED).to_be();
        // SAFETY: a sockaddr_in is as long as the place for it.
        unsafe { (&raw mut request.ifr_ifru).cast::<libc::sockaddr_in>().write_unaligned(address) };
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        // SAFETY: the kernel reads the request, which outlives the call.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &request) == 0 }
    }

    #[test]
    fn an_address_with_a_label_is_its_interfaces() {
        if !in_a_child(enter_new_network) {
            return not_run("an_address_with_a_label_is_its_interfaces", "no network of one's own");
        }
        assert!(in_a_child(|| {
            let is_ours = |entry: &InterfaceAddress| {
                let called = (entry.name.as_str(), entry.label.as_str());
                entry.address == LABELLED && called == ("lo", "lo:1") && entry.index == 1
            };
            enter_new_network() && label_loopback() && list().is_ok_and(|list| list.iter().any(is_ours))
        }));
    }
}
