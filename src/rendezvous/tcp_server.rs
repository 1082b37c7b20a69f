//! The server of a TCP store: one thread, one dictionary, any number of clients up to a limit.
//!
//! It lives in rank 0, in whoever made a unique id, or in the launcher. A stranger can do little: a
//! connection that has not proved the secret is closed after some seconds, only so many of them are kept, and
//! nothing is allocated for bytes that have not arrived.

#![forbid(unsafe_code)]

mod connection;
mod entries;
mod server;

use std::io::{self, IoSlice};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use server::Server;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::secret::SecretKey;
use super::tcp_wire as wire;
use crate::error::{Error, Result, fail};
use crate::sys::door;
use crate::sys::event::EventFd;
use crate::sys::fork::{self, Unshared};
use crate::sys::global::Global;
use crate::sys::{process, random};

/// What one server gives to its clients at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections, strangers included.
    pub connections: usize,
    /// Connections that have not yet proved the secret; when another comes, the oldest goes.
    pub strangers: usize,
    /// How long a connection may remain a stranger.
    pub greeting: Duration,
    /// Bytes of all keys and values together.
    pub stored: usize,
    /// Bytes of all requests that have arrived in part: of the short ones, and of the long ones, which wait
    /// for each other.
    pub incomplete: usize,
}

/// The most strangers that a server has by default,
const STRANGERS: usize = 1024;
/// and their most part of the descriptors of this process, whose program has to go on whoever connects.
const STRANGERS_PART: usize = 8;

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 70_000,
            strangers: (process::most_open_files() / STRANGERS_PART).clamp(1, STRANGERS),
            greeting: Duration::from_secs(10),
            stored: 1 << 30,
            incomplete: 256 << 20,
        }
    }
}

/// Since when a server that has had clients has none.
#[derive(Clone, Default)]
struct Deserted(Arc<Mutex<Option<Instant>>>);

impl Deserted {
    fn since(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, since: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

/// Who was shut last.
static SHUT: Global<Option<Shut>> = Global::new(None);

/// A server of this process that nobody gets through to: the kernel has refused to accept connections for a
/// while.
struct Shut {
    instance: [u8; 16],
    at: Instant,
    why: String,
}

/// Why nobody gets through to the server that is this `instance`, if it is this process's and that is so now.
pub(super) fn shut(instance: [u8; 16]) -> Option<String> {
    let shut = SHUT.read();
    let is_now = |shut: &&Shut| shut.instance == instance && shut.at.elapsed() < door::LONG;
    shut.as_ref().filter(is_now).map(|shut| shut.why.clone())
}

/// A running server. Dropping it closes all connections and ends its thread.
pub struct ServerHandle {
    address: SocketAddr,
    instance: [u8; 16],
    /// Watched by the thread, which ends before it is closed.
    stop: EventFd,
    deserted: Deserted,
    thread: Option<JoinHandle<()>>,
    /// Where it was started: a forked child has a copy of this handle but not the thread.
    fork: u32,
}

impl ServerHandle {
    /// Serves on `address`; port 0 is any free one. With a secret, only clients who know it; without,
    /// everyone who can reach the port.
    pub fn start(address: SocketAddr, secret: Option<&SecretKey>) -> Result<ServerHandle> {
        ServerHandle::start_with(address, secret, Limits::default())
    }

    /// Serves on all addresses of this host, IPv4 and, where the host has it, IPv6.
    pub fn start_everywhere(port: u16, secret: Option<&SecretKey>) -> Result<ServerHandle> {
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        ServerHandle::start(both, secret).or_else(|first| {
            // The kernel may lack IPv6. If the cause is another, such as a port in use, IPv4 fails the same
            // way, and the first error is the one to tell.
            ServerHandle::start(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), secret).map_err(|_| first)
        })
    }

    /// Serves as the `instance` that clients expect, on the first of these addresses that is one of this
    /// host's.
    pub(super) fn start_as(
        instance: [u8; 16],
        addresses: &[SocketAddr],
        secret: &SecretKey,
    ) -> Result<ServerHandle> {
        let start = |&address: &SocketAddr| {
            ServerHandle::start_instance(instance, address, Some(secret), Limits::default())
        };
        let mut started = addresses.iter().map(start);
        let first = started.next().unwrap_or_else(|| fail!(InvalidArgument, "a store has no address"));
        first.or_else(|error| started.find_map(Result::ok).ok_or(error))
    }

    /// Serves within `limits`.
    pub fn start_with(
        address: SocketAddr,
        secret: Option<&SecretKey>,
        limits: Limits,
    ) -> Result<ServerHandle> {
        let mut instance = [0; 16];
        random::fill(&mut instance)?;
        ServerHandle::start_instance(instance, address, secret, limits)
    }

    fn start_instance(
        instance: [u8; 16],
        address: SocketAddr,
        secret: Option<&SecretKey>,
        limits: Limits,
    ) -> Result<ServerHandle> {
        let refused = |cause| Error::system(format!("cannot serve a tcp store on {address}"), cause);
        let listener = Unshared::new(listen(address).map_err(refused)?);
        let bound = listener.local_addr().map_err(refused)?;
        let stop = EventFd::new().map_err(refused)?;
        let key = secret.map(wire::store_key);
        let deserted = Deserted::default();
        let server =
            Server::new(listener, &stop, key, instance, limits, deserted.clone()).map_err(refused)?;
        let thread = process::spawn("unisono-store", move || server.run()).map_err(refused)?;
        let (thread, fork) = (Some(thread), fork::generation());
        Ok(ServerHandle { address: bound, instance, stop, deserted, thread, fork })
    }

    /// Where it listens, with the port that was free.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// An address for clients in this process and on this host.
    pub fn local_address(&self) -> SocketAddr {
        let ip = match self.address.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            // Bound to both families, and IPv4 loopback exists wherever there is loopback at all.
            IpAddr::V6(_) => Ipv4Addr::LOCALHOST.into(),
        };
        SocketAddr::new(ip, self.port())
    }

    /// Since when it has had no clients, if it had any before.
    pub(super) fn deserted_since(&self) -> Option<Instant> {
        self.deserted.since()
    }

    /// What tells this server from all others; clients learn it when they connect.
    pub(super) fn instance(&self) -> [u8; 16] {
        self.instance
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.fork != fork::generation() {
            // To drop it would detach the thread, of which nothing is here but a number: its memory is
            // another's by now, or nobody's.
            mem::forget(thread);
            return;
        }
        self.stop.signal();
        if thread.join().is_err() {
            log::error!("the thread of the tcp store on {} has panicked", self.address);
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        // [::] takes IPv4 as well, whatever the system's default.
        socket.set_only_v6(false)?;
    }
    // A server that starts where one has just ended must not wait for its last connections to fade.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Writes what fits of two parts that belong together. A peer that has gone is an error, never SIGPIPE, which
/// would end a program that does not expect it.
pub(super) fn write(stream: &TcpStream, first: &[u8], second: &[u8]) -> io::Result<usize> {
    let parts = [IoSlice::new(first), IoSlice::new(second)];
    SockRef::from(stream).send_vectored_with_flags(&parts, libc::MSG_NOSIGNAL)
}

/// What both ends of a connection want: small messages at once, and a dead host noticed within a minute.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(20))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}
