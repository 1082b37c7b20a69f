//! Who knocks at an endpoint: its listeners, and the strangers that have not proved themselves yet.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use super::Options;
use super::connection::Connection;
use super::endpoint::{Conn, Endpoint, Stage};
use super::reactor::{Alarm, Core, Source};
use crate::error::{Error, Result};
use crate::sys::door::LONG;
use crate::sys::epoll::Interest;
use crate::sys::fork::Unshared;
use crate::sys::random;
use crate::transport::address::PeerAddress;
use crate::transport::handshake::Handshake;
use crate::transport::tcp;

/// How many strangers may be in the middle of a handshake at a time, at the least.
pub(super) const MIN_HALF_OPEN: usize = 256;
/// How long a stranger may take to prove itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long nothing is accepted after the descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections accepted in a row before something else gets its turn.
const ACCEPT_BATCH: usize = 64;
/// A socket that accepts connections.
pub(super) struct Listener {
    pub(super) socket: Unshared<Socket>,
    pub(super) local: bool,
    pub(super) token: u64,
}

impl Listener {
    /// Those that `options` ask for. Their TCP addresses are added to `address`.
    pub(super) fn all(options: &Options, address: &mut PeerAddress) -> Result<Vec<Listener>> {
        let (rank, mut listeners) = (address.rank, Vec::new());
        if options.shm {
            let socket = listen_local(address).map_err(|cause| {
                Error::system(format_args!("rank {rank} cannot listen on a Unix socket"), cause)
            })?;
            listeners.push(Listener { socket, local: true, token: 0 });
        }
        let mut out_of_use = None;
        for &wanted in if options.tcp { options.addresses() } else { &[] } {
            match tcp::listen(wanted).and_then(|socket| Ok((socket.local_addr()?, socket))) {
                Ok((bound, socket)) => {
                    address.addresses.extend(bound.as_socket());
                    listeners.push(Listener { socket, local: false, token: 0 });
                }
                Err(cause) => {
                    let is_out_of_use = cause.kind() == io::ErrorKind::AddrNotAvailable;
                    let error = Error::system(format_args!("rank {rank} cannot listen on {wanted}"), cause);
                    if !is_out_of_use {
                        return Err(error);
                    }
                    // An interface has those, too, that the kernel does not use (yet): another host may have
                    // them.
                    log::warn!("{error}");
                    out_of_use.get_or_insert(error);
                }
            }
        }
        match out_of_use {
            Some(error) if address.addresses.is_empty() => Err(error),
            _ => Ok(listeners),
        }
    }
}

impl Endpoint {
    pub(super) fn accept_again(&mut self, core: &mut Core) {
        for listener in &self.listeners {
            let interest = Interest { read: true, ..Interest::default() };
            if let Err(cause) = core.watch(listener.token, listener.socket.as_fd(), interest) {
                log::error!("rank {}: cannot watch a listener: {cause}", self.identity.rank);
            }
        }
    }

    pub(super) fn accept(&mut self, core: &mut Core, token: u64) {
        let Some(index) = self.listeners.iter().position(|listener| listener.token == token) else { return };
        let local = self.listeners[index].local;
        for _ in 0..ACCEPT_BATCH {
            let accepted = self.listeners[index].socket.accept().and_then(|(socket, _)| {
                socket.set_nonblocking(true)?;
                Ok(Unshared::new(socket))
            });
            match accepted {
                Ok(socket) => self.welcome(core, socket, local),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                    self.door.opens();
                    return;
                }
                // That one connection has failed already; the next may be fine.
                Err(cause)
                    if matches!(
                        cause.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(cause) => {
                    let text = format!("rank {} cannot accept connections: {cause}", self.identity.rank);
                    log::warn!("{text}; trying again in {ACCEPT_PAUSE:?}");
                    let waited = self.door.refuses(self.listeners[index].socket.as_fd());
                    if waited.is_some_and(|waited| waited >= LONG) {
                        self.shared.shut.note(text.clone());
                    }
                    self.shared.refusal.note(text);
                    for listener in &self.listeners {
                        core.pause(listener.socket.as_fd());
                    }
                    core.alarm(Instant::now() + ACCEPT_PAUSE, self.shared.id, Alarm::Accept);
                    return;
                }
            }
        }
    }

    /// A stranger has connected.
    fn welcome(&mut self, core: &mut Core, socket: Unshared<Socket>, local: bool) {
        let mut nonce = [0; 32];
        if let Err(why) = random::fill(&mut nonce) {
            log::warn!("rank {}: {why}", self.identity.rank);
            return;
        }
        let handshake =
            Handshake::respond(&self.identity.secret, self.identity.rank, self.identity.job, nonce);
        let stage = Stage::Handshaking(handshake);
        let wire = Connection::new(socket);
        let conn = Conn { wire, stage, outgoing: None, local, flush_alarm: false };
        let token = core.token(self.shared.id, Source::Connection);
        if let Err(cause) = self.insert(core, token, conn) {
            let text = format!("rank {} cannot watch a connection: {cause}", self.identity.rank);
            log::warn!("{text}");
            self.shared.refusal.note(text);
            return;
        }
        core.alarm(Instant::now() + HANDSHAKE_TIMEOUT, self.shared.id, Alarm::HalfOpen { token });
        self.half_open.push_back(token);
        let most = self.max_half_open();
        if self.half_open.len() > most {
            let mut half_open = std::mem::take(&mut self.half_open);
            half_open.retain(|&token| self.is_half_open(token));
            if half_open.len() > most
                && let Some(oldest) = half_open.pop_front()
            {
                log::debug!("rank {}: too many strangers: the oldest is dropped", self.identity.rank);
                self.drop_conn(core, oldest);
            }
            self.half_open = half_open;
        }
    }

    /// Strangers that may be in the middle of a handshake at a time; of more, the oldest is dropped. All
    /// ranks of the job may come at once, each with all connections of its link, while as many strangers
    /// stand around.
    fn max_half_open(&self) -> usize {
        MIN_HALF_OPEN.max(2 * self.identity.size as usize * (1 + self.tcp_streams()))
    }

    pub(super) fn is_half_open(&self, token: u64) -> bool {
        self.conns
            .get(&token)
            .is_some_and(|conn| conn.outgoing.is_none() && matches!(conn.stage, Stage::Handshaking(_)))
    }

    pub(super) fn is_lingering(&self, token: u64) -> bool {
        self.conns.get(&token).is_some_and(|conn| matches!(conn.stage, Stage::Lingering { .. }))
    }
}

fn listen_local(address: &PeerAddress) -> io::Result<Unshared<Socket>> {
    let socket = tcp::unix_socket()?;
    socket.bind(&SockAddr::unix(address.local_name())?)?;
    socket.listen(tcp::BACKLOG)?;
    Ok(socket)
}
