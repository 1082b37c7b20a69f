//! The server of a TCP store: one thread, one dictionary, any number of clients up to a limit.
//!
//! It lives in rank 0, in whoever made a unique id, or in the launcher. A stranger can do little: a connection that has
//! not proved the secret is closed after some seconds, only so many of them are kept, and nothing is allocated for
//! bytes that have not arrived.

#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::{self, ErrorKind, IoSlice, Read};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::secret::SecretKey;
use super::tcp_wire::{self as wire, Answer, ClientHello, Operation, RequestHead, ServerHello, Verdict};
use crate::error::{Error, Result};
use crate::sys::epoll::{Epoll, Event, Interest};
use crate::sys::event::EventFd;
use crate::sys::fork::Unshared;
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
    /// Bytes of all requests that have arrived in part.
    pub incomplete: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 70_000,
            strangers: 1024,
            greeting: Duration::from_secs(10),
            stored: 1 << 30,
            incomplete: 256 << 20,
        }
    }
}

/// A running server. Dropping it closes all connections and ends its thread.
pub struct ServerHandle {
    address: SocketAddr,
    instance: [u8; 16],
    /// Watched by the thread, which ends before it is closed.
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
    /// A forked child has a copy of this handle but not the thread.
    process: u32,
}

impl ServerHandle {
    /// Serves on `address`; port 0 is any free one. With a secret, only clients who know it; without, everyone who
    /// can reach the port.
    pub fn start(address: SocketAddr, secret: Option<&SecretKey>) -> Result<ServerHandle> {
        ServerHandle::start_with(address, secret, Limits::default())
    }

    /// Serves on all addresses of this host, IPv4 and, where the host has it, IPv6.
    pub fn start_everywhere(port: u16, secret: Option<&SecretKey>) -> Result<ServerHandle> {
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        ServerHandle::start(both, secret).or_else(|first| {
            // The kernel may lack IPv6. If the cause is another, such as a port in use, IPv4 fails the same way, and
            // the first error is the one to tell.
            ServerHandle::start(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), secret).map_err(|_| first)
        })
    }

    /// Serves within `limits`.
    pub fn start_with(
        address: SocketAddr,
        secret: Option<&SecretKey>,
        limits: Limits,
    ) -> Result<ServerHandle> {
        let refused = |cause| Error::system(format!("cannot serve a tcp store on {address}"), cause);
        let listener = Unshared::new(listen(address).map_err(refused)?);
        let bound = listener.local_addr().map_err(refused)?;
        let mut instance = [0; 16];
        random::fill(&mut instance)?;
        let epoll = Epoll::new().map_err(refused)?;
        epoll.watch(listener.as_fd(), LISTENER, READ).map_err(refused)?;
        let stop = EventFd::new().map_err(refused)?;
        epoll.watch(stop.as_fd(), STOP, READ).map_err(refused)?;
        let server = Server {
            listener,
            epoll,
            key: secret.map(wire::store_key),
            instance,
            limits,
            connections: HashMap::new(),
            next_token: LISTENER + 1,
            strangers: BTreeSet::new(),
            timers: BTreeSet::new(),
            entries: HashMap::new(),
            stored: 0,
            incomplete: 0,
            waiters: HashMap::new(),
            runnable: Vec::new(),
        };
        let thread = process::spawn("unisono-store", move || server.run()).map_err(refused)?;
        Ok(ServerHandle { address: bound, instance, stop, thread: Some(thread), process: std::process::id() })
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

    /// What tells this server from all others; clients learn it when they connect.
    pub(super) fn instance(&self) -> [u8; 16] {
        self.instance
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if std::process::id() != self.process {
            return;
        }
        self.stop.signal();
        if thread.join().is_err() {
            log::error!("the thread of the tcp store on {} has panicked", self.address);
        }
    }
}

const LISTENER: u64 = 0;
/// The token of what the handle signals when it is dropped.
const STOP: u64 = u64::MAX;
const NOTHING: Interest = Interest { read: false, write: false, close: true, once: false };
const READ: Interest = Interest { read: true, ..NOTHING };
/// How long accepting rests after the kernel refused, when no descriptors are left for instance.
const ACCEPT_REST: Duration = Duration::from_millis(50);
const CHUNK: usize = 64 << 10;

/// The state of the thread. Connections are known by tokens that are never used again.
struct Server {
    listener: Unshared<TcpListener>,
    epoll: Epoll,
    key: Option<SecretKey>,
    instance: [u8; 16],
    limits: Limits,
    connections: HashMap<u64, Connection>,
    next_token: u64,
    /// Those that have not proved the secret; tokens grow, so the first is the oldest.
    strangers: BTreeSet<u64>,
    /// When to look at a connection, or with the token LISTENER, when to accept again.
    timers: BTreeSet<(Instant, u64)>,
    entries: HashMap<Vec<u8>, Arc<[u8]>>,
    stored: usize,
    incomplete: usize,
    waiters: HashMap<Vec<u8>, HashSet<u64>>,
    /// Connections whose answer is ready, to be taken up by the loop: answering in place would recurse.
    runnable: Vec<u64>,
}

struct Connection {
    stream: Unshared<TcpStream>,
    state: State,
    timer: Option<Instant>,
    interest: Interest,
    /// What has arrived and is not yet understood.
    input: Vec<u8>,
    output: Output,
}

enum State {
    /// Has been greeted with this and has not answered yet.
    Stranger(ServerHello),
    /// Between two requests.
    Ready,
    /// Waits for this key.
    Waiting(Vec<u8>),
    /// To be closed once the output is written.
    Leaving,
}

/// An answer on its way. The body is shared with the dictionary: many clients may wait for one large value.
#[derive(Default)]
struct Output {
    head: Vec<u8>,
    body: Option<Arc<[u8]>>,
    written: usize,
}

/// Why a connection is closed. Nobody but the log is told.
type Farewell = &'static str;

impl Server {
    fn run(mut self) {
        let mut events = Vec::new();
        loop {
            let timeout = self.timers.first().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            if let Err(cause) = self.epoll.wait(timeout, |event| events.push(event)) {
                log::error!("tcp store: epoll_wait: {cause}; the store stops");
                return;
            }
            for event in mem::take(&mut events) {
                match event.token {
                    STOP => return,
                    LISTENER => self.accept(),
                    _ => self.attend(event),
                }
            }
            self.expire();
            while let Some(token) = self.runnable.pop() {
                self.with(token, |server, connection| server.advance(token, connection));
            }
        }
    }

    fn accept(&mut self) {
        // A bounded number at a time, so that a flood of strangers does not starve the clients.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if let Err(cause) = self.admit(stream) {
                        log::debug!("tcp store: cannot serve {peer}: {cause}");
                    }
                }
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => return,
                Err(cause)
                    if matches!(cause.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(cause) => {
                    log::warn!("tcp store: accept: {cause}");
                    self.drop_oldest_stranger();
                    self.listen_for(NOTHING);
                    self.timers.insert((Instant::now() + ACCEPT_REST, LISTENER));
                    return;
                }
            }
        }
    }

    fn listen_for(&self, interest: Interest) {
        if let Err(cause) = self.epoll.watch(self.listener.as_fd(), LISTENER, interest) {
            log::error!("tcp store: epoll_ctl: {cause}");
        }
    }

    fn admit(&mut self, stream: TcpStream) -> io::Result<()> {
        // Of the parent alone: a forked child that outlives it would keep its clients waiting, and its port taken.
        let stream = Unshared::new(stream);
        stream.set_nonblocking(true)?;
        prepare(&stream)?;
        let mut nonce = [0; 32];
        random::fill(&mut nonce).map_err(io::Error::other)?;
        let secret = if self.key.is_some() { wire::WITH_SECRET } else { 0 };
        let hello = ServerHello { flags: secret, instance: self.instance, nonce };
        if self.connections.len() >= self.limits.connections {
            log::warn!(
                "tcp store: {} connections is the limit; another one is refused",
                self.limits.connections
            );
            // One small write into an empty socket buffer; the client learns why if it gets there.
            let _ = write(&stream, &ServerHello { flags: secret | wire::FULL, ..hello }.bytes(), &[]);
            return Ok(());
        }
        if self.strangers.len() >= self.limits.strangers {
            self.drop_oldest_stranger();
        }
        let token = self.next_token;
        self.next_token += 1;
        self.epoll.watch(stream.as_fd(), token, READ)?;
        let connection = Connection {
            stream,
            state: State::Stranger(hello),
            timer: None,
            interest: READ,
            input: Vec::new(),
            output: Output { head: hello.bytes().to_vec(), ..Output::default() },
        };
        self.connections.insert(token, connection);
        self.strangers.insert(token);
        self.with(token, |server, connection| {
            server.set_timer(token, connection, Instant::now().checked_add(server.limits.greeting));
            server.advance(token, connection)
        });
        Ok(())
    }

    fn attend(&mut self, event: Event) {
        self.with(event.token, |server, connection| {
            if event.readable && connection.wants_input() {
                server.read(connection)?;
            } else if event.closed {
                return Err("closed by the client");
            }
            server.advance(event.token, connection)
        });
    }

    /// Lets `act` work on a connection, then waits for what it needs next, or closes it.
    fn with(
        &mut self,
        token: u64,
        act: impl FnOnce(&mut Server, &mut Connection) -> std::result::Result<(), Farewell>,
    ) {
        // Taken out of the map meanwhile, so that `act` may change both.
        let Some(mut connection) = self.connections.remove(&token) else { return };
        let outcome = act(self, &mut connection).and_then(|()| {
            let interest =
                Interest { read: connection.wants_input(), write: !connection.output.is_empty(), ..NOTHING };
            if interest != connection.interest {
                let stream = connection.stream.as_fd();
                self.epoll.watch(stream, token, interest).map_err(|_| "epoll_ctl failed")?;
                connection.interest = interest;
            }
            Ok(())
        });
        match outcome {
            Ok(()) => {
                self.connections.insert(token, connection);
            }
            Err(farewell) => self.forget(token, connection, farewell),
        }
    }

    fn forget(&mut self, token: u64, mut connection: Connection, farewell: Farewell) {
        log::debug!("tcp store: connection {token} ends: {farewell}");
        self.set_timer(token, &mut connection, None);
        self.strangers.remove(&token);
        self.incomplete -= connection.input.len();
        if let State::Waiting(key) = &connection.state {
            self.stop_waiting(token, key);
        }
    }

    fn stop_waiting(&mut self, token: u64, key: &[u8]) {
        if let Some(tokens) = self.waiters.get_mut(key) {
            tokens.remove(&token);
            if tokens.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    fn drop_oldest_stranger(&mut self) {
        if let Some(&token) = self.strangers.first() {
            self.with(token, |_, _| Err("a newer stranger takes its place"));
        }
    }

    fn set_timer(&mut self, token: u64, connection: &mut Connection, at: Option<Instant>) {
        if let Some(old) = mem::replace(&mut connection.timer, at) {
            self.timers.remove(&(old, token));
        }
        if let Some(at) = at {
            self.timers.insert((at, token));
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(&(at, token)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.remove(&(at, token));
            if token == LISTENER {
                self.listen_for(READ);
                continue;
            }
            self.with(token, |server, connection| {
                connection.timer = None;
                match mem::replace(&mut connection.state, State::Ready) {
                    State::Waiting(key) => {
                        server.stop_waiting(token, &key);
                        connection.answer(Answer::TimedOut, None);
                        server.advance(token, connection)
                    }
                    _ => Err("it did not greet in time"),
                }
            });
        }
    }

    fn read(&mut self, connection: &mut Connection) -> std::result::Result<(), Farewell> {
        let mut chunk = [0; CHUNK];
        match (&*connection.stream).read(&mut chunk) {
            Ok(0) => Err("closed by the client"),
            Ok(count) => {
                connection.input.extend_from_slice(&chunk[..count]);
                self.incomplete += count;
                if self.incomplete > self.limits.incomplete {
                    return Err("too many bytes of incomplete requests");
                }
                Ok(())
            }
            Err(cause) if matches!(cause.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(_) => Err("it cannot be read"),
        }
    }

    /// Writes what is to be written and takes up what has arrived, until one of them has to wait.
    fn advance(&mut self, token: u64, connection: &mut Connection) -> std::result::Result<(), Farewell> {
        loop {
            if !connection.flush()? {
                return Ok(());
            }
            let used = match &connection.state {
                State::Leaving => return Err("it was refused"),
                State::Waiting(_) => return Ok(()),
                State::Stranger(hello) => {
                    let Some(bytes) = connection.input.first_chunk() else { return Ok(()) };
                    let (hello, client) =
                        (*hello, ClientHello::parse(bytes).ok_or("it speaks something else")?);
                    self.judge(token, connection, hello, client);
                    wire::CLIENT_HELLO
                }
                State::Ready => {
                    let Some(head) = connection.input.first_chunk() else { return Ok(()) };
                    let head = RequestHead::parse(*head).ok_or("it asks what no client asks")?;
                    if connection.input.len() < head.length() {
                        return Ok(());
                    }
                    self.execute(token, connection, head);
                    head.length()
                }
            };
            connection.input.drain(..used);
            if connection.input.is_empty() {
                // One large value must not keep its memory for as long as the client stays.
                connection.input.shrink_to(CHUNK);
            }
            self.incomplete -= used;
        }
    }

    /// Answers a greeting.
    fn judge(&mut self, token: u64, connection: &mut Connection, hello: ServerHello, client: ClientHello) {
        let claims = client.flags & wire::WITH_SECRET != 0;
        let mut tag = [0; 32];
        let verdict = match &self.key {
            None if claims => Verdict::NoSecretHere,
            None => Verdict::Welcome,
            Some(_) if !claims => Verdict::SecretNeeded,
            Some(key) if key.verify(&wire::transcript("client", &hello, &client.nonce), &client.tag) => {
                tag = key.tag(&wire::transcript("server", &hello, &client.nonce));
                Verdict::Welcome
            }
            Some(_) => Verdict::WrongSecret,
        };
        connection.output.head.push(verdict as u8);
        connection.output.head.extend_from_slice(&tag);
        if verdict == Verdict::Welcome {
            connection.state = State::Ready;
            self.strangers.remove(&token);
            self.set_timer(token, connection, None);
        } else {
            log::warn!("tcp store: refused {:?}: {verdict:?}", connection.stream.peer_addr().ok());
            // The greeting's timer still runs: a client who does not read its refusal is closed by it.
            connection.state = State::Leaving;
        }
    }

    /// Does what a whole request at the head of the input asks for.
    fn execute(&mut self, token: u64, connection: &mut Connection, head: RequestHead) {
        let (key, body) = connection.input[wire::REQUEST_HEAD..head.length()].split_at(head.key);
        let number = body.first_chunk().copied().unwrap_or_default();
        match head.operation {
            Operation::Set => {
                let outcome = self.store(key, body);
                connection.answer_done(outcome.map(|()| None));
            }
            Operation::Add => {
                let outcome = self.add(key, i64::from_le_bytes(number));
                connection.answer_done(outcome.map(|sum| Some(sum.to_le_bytes().into())));
            }
            Operation::TryGet | Operation::Get => match self.entries.get(key) {
                Some(value) => {
                    let value = value.clone();
                    connection.answer(Answer::Done, Some(value));
                }
                None if head.operation == Operation::TryGet => connection.answer(Answer::Absent, None),
                None => {
                    let key = key.to_vec();
                    let wait = Duration::from_millis(u64::from_le_bytes(number));
                    self.waiters.entry(key.clone()).or_default().insert(token);
                    connection.state = State::Waiting(key);
                    // `u64::MAX` milliseconds reach beyond any clock: no timer, as meant.
                    self.set_timer(token, connection, Instant::now().checked_add(wait));
                }
            },
        }
    }

    fn store(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<(), String> {
        let old = self.entries.get(key).map_or(0, |old| key.len() + old.len());
        let stored = self.stored - old + key.len() + value.len();
        if stored > self.limits.stored {
            return Err(format!(
                "the store is full ({} of {} bytes are used)",
                self.stored, self.limits.stored
            ));
        }
        self.stored = stored;
        let value: Arc<[u8]> = value.into();
        self.entries.insert(key.to_vec(), value.clone());
        for token in self.waiters.remove(key).unwrap_or_default() {
            let Some(mut waiter) = self.connections.remove(&token) else { continue };
            waiter.state = State::Ready;
            self.set_timer(token, &mut waiter, None);
            waiter.answer(Answer::Done, Some(value.clone()));
            self.connections.insert(token, waiter);
            self.runnable.push(token);
        }
        Ok(())
    }

    fn add(&mut self, key: &[u8], amount: i64) -> std::result::Result<i64, String> {
        let number = match self.entries.get(key) {
            None => 0,
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or_else(|| format!("its {} bytes are not a decimal number", value.len()))?,
        };
        let sum =
            number.checked_add(amount).ok_or_else(|| format!("{number} + {amount} does not fit 64 bits"))?;
        self.store(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Closing is not enough: a child that was forked at a bad moment has copies of the descriptors, and with them the
        // port would stay taken and the clients would not see the end. A socket that is closed already needs nothing.
        let _ = SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        for connection in self.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Connection {
    /// Whether the next request may be read. Not while an answer is due: a client that never reads its answers could
    /// fill our memory with requests.
    fn wants_input(&self) -> bool {
        self.output.is_empty() && matches!(self.state, State::Stranger(_) | State::Ready)
    }

    fn answer(&mut self, answer: Answer, body: Option<Arc<[u8]>>) {
        let length = body.as_ref().map_or(0, |body| body.len());
        self.output.head.extend_from_slice(&answer.head(length));
        self.output.body = body;
    }

    fn answer_done(&mut self, outcome: std::result::Result<Option<Arc<[u8]>>, String>) {
        match outcome {
            Ok(body) => self.answer(Answer::Done, body),
            Err(text) => self.answer(Answer::Refused, Some(text.into_bytes().into())),
        }
    }

    /// Writes; whether everything has been written.
    fn flush(&mut self) -> std::result::Result<bool, Farewell> {
        while !self.output.is_empty() {
            let (head, body) = self.output.rest();
            match write(&self.stream, head, body) {
                Ok(0) => return Err("it takes no bytes"),
                Ok(count) => self.output.advance(count),
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err("it cannot be written to"),
            }
        }
        Ok(true)
    }
}

impl Output {
    fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    fn rest(&self) -> (&[u8], &[u8]) {
        let body = self.body.as_deref().unwrap_or_default();
        match self.written.checked_sub(self.head.len()) {
            None => (&self.head[self.written..], body),
            Some(written) => (&[], &body[written..]),
        }
    }

    fn advance(&mut self, count: usize) {
        self.written += count;
        let length = self.head.len() + self.body.as_ref().map_or(0, |body| body.len());
        if self.written == length {
            *self = Output::default();
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

/// Writes what fits of two parts that belong together. A peer that has gone is an error, never SIGPIPE, which would end
/// a program that does not expect it.
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
