//! A byte stream over TCP. The kernel's buffers grow by themselves (a fixed size would switch that off). A
//! byte is copied twice: into the sending socket's buffer and out of the receiving one's; the network's own
//! copies are extra.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::Stream;
use crate::sys::fork::Unshared;
use crate::sys::retry;

/// How long the host of a peer may answer nothing before its control connection fails.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a data connection may carry nothing before the kernel asks whether it is there: firewalls on the
/// way forget connections of which they see nothing for some minutes. Longer than [`SILENCE`], so that the
/// control connection, which says more, speaks first of a host that is gone.
const QUIET: Duration = Duration::from_secs(60);

/// The most parts that the kernel takes in one call.
const MAX_PARTS: usize = 1024;

/// One data connection of a link.
#[derive(Debug)]
pub struct TcpLane {
    socket: Unshared<Socket>,
}

impl TcpLane {
    /// Over a connected, non-blocking socket.
    pub fn new(socket: Unshared<Socket>) -> TcpLane {
        TcpLane { socket }
    }
}

impl Stream for TcpLane {
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let parts = &parts[..parts.len().min(MAX_PARTS)];
        // A write to a closed connection must be an error, not the signal that ends a C program.
        retry(|| self.socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL))
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut socket: &Socket = &self.socket;
        retry(|| socket.read(into))
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn finish(&mut self) {
        // Of one that has ended already nobody waits for the end.
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn into_socket(self: Box<Self>) -> Option<Unshared<Socket>> {
        Some(self.socket)
    }
}

/// A non-blocking socket that listens on `address` (port 0: any).
pub(super) fn listen(address: SocketAddr) -> io::Result<Unshared<Socket>> {
    let socket = new_socket(address)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Connections that the kernel keeps for a listener until they are accepted; it applies its own limit too.
pub(super) const BACKLOG: i32 = 4096;

/// Begins to connect to `address`. The socket is writable once that has succeeded or failed.
pub(super) fn connect(address: SocketAddr) -> io::Result<Unshared<Socket>> {
    let socket = new_socket(address)?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&address.into()) {
        Err(cause) if cause.raw_os_error() != Some(libc::EINPROGRESS) => Err(cause),
        _ => Ok(socket),
    }
}

/// Sets what a connection needs: no delay for small messages, a sign of life now and then while it is idle,
/// and, when it is a control connection, an error once the peer's host has been silent for [`SILENCE`]. A
/// data connection has no such limit: its peer may leave it full for as long as it computes, and
/// TCP_USER_TIMEOUT would count that too.
pub(super) fn configure(socket: &Socket, control: bool) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let idle = if control { SILENCE / 3 } else { QUIET };
    let probes = TcpKeepalive::new().with_time(idle).with_interval(SILENCE / 6).with_retries(4);
    socket.set_tcp_keepalive(&probes)?;
    if control {
        socket.set_tcp_user_timeout(Some(SILENCE))?;
    }
    Ok(())
}

/// A non-blocking Unix socket: the control connection of ranks that share memory.
pub(super) fn unix_socket() -> io::Result<Unshared<Socket>> {
    Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None).map(Unshared::new)
}

fn new_socket(address: SocketAddr) -> io::Result<Unshared<Socket>> {
    let kind = Type::STREAM.nonblocking().cloexec();
    Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP)).map(Unshared::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn pair() -> (TcpLane, TcpLane) {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let near = connect(listener.local_addr().unwrap().as_socket().unwrap()).unwrap();
        listener.set_nonblocking(false).unwrap();
        let (far, _) = listener.accept().unwrap();
        far.set_nonblocking(true).unwrap();
        configure(&near, true).unwrap();
        configure(&far, false).unwrap();
        (TcpLane::new(near), TcpLane::new(Unshared::new(far)))
    }

    #[test]
    fn bytes_cross_in_order_in_any_chunking() {
        let (mut near, mut far) = pair();
        let source: Vec<u8> = (0..3_000_000u32).map(|place| (place ^ (place >> 9)) as u8).collect();
        let (mut sent, mut got) = (0, Vec::new());
        let mut buffer = [0; 70_001];
        while got.len() < source.len() {
            let rest = &source[sent..];
            let parts: Vec<IoSlice> = rest.chunks(777).take(2000).map(IoSlice::new).collect();
            match near.write(&parts) {
                Ok(count) => sent += count,
                Err(cause) => assert_eq!(cause.kind(), io::ErrorKind::WouldBlock),
            }
            match far.read(&mut buffer) {
                Ok(count) => got.extend_from_slice(&buffer[..count]),
                Err(cause) => assert_eq!(cause.kind(), io::ErrorKind::WouldBlock),
            }
        }
        assert!(got == source);
    }

    #[test]
    fn idle_connections_stay_known_and_full_ones_have_no_limit() {
        let (near, far) = pair();
        assert!(near.socket.keepalive().unwrap() && far.socket.keepalive().unwrap());
        assert!(near.socket.tcp_keepalive_time().unwrap() < far.socket.tcp_keepalive_time().unwrap());
        assert_eq!(near.socket.tcp_user_timeout().unwrap(), Some(SILENCE));
        assert_eq!(far.socket.tcp_user_timeout().unwrap(), None);
    }

    #[test]
    fn what_is_finished_ends_behind_what_was_written_and_reads_on() {
        let (mut near, mut far) = pair();
        near.write(&[IoSlice::new(b"last")]).unwrap();
        near.finish();
        far.socket.set_nonblocking(false).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(far.read(&mut bytes).unwrap(), 4);
        assert_eq!(far.read(&mut bytes).unwrap(), 0);
        far.write(&[IoSlice::new(b"more")]).unwrap();
        near.socket.set_nonblocking(false).unwrap();
        assert_eq!(near.read(&mut bytes).unwrap(), 4);
        assert!(near.write(&[IoSlice::new(b"x")]).is_err(), "and raises no signal");
    }

    #[test]
    fn a_closed_connection_is_an_end_and_an_error_and_no_signal() {
        let (mut near, mut far) = pair();
        near.write(&[IoSlice::new(b"last")]).unwrap();
        drop(near);
        let mut bytes = [0; 8];
        assert_eq!(far.read(&mut bytes).unwrap(), 4);
        assert_eq!(far.read(&mut bytes).unwrap(), 0);
        // The first write may still go out; the answer to it is a reset.
        let failed = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            far.write(&[IoSlice::new(b"x")]).is_err()
        });
        assert!(failed);
    }
}
