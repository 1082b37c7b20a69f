//! The thread of a server: who connects, who asks, who waits for which key.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io::{self, ErrorKind, Read};
use std::mem;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::Deserted;
use super::connection::{Connection, Farewell, Output, State, Will};
use super::entries::Entries;
use super::{Limits, SHUT, Shut};
use crate::rendezvous::secret::SecretKey;
use crate::rendezvous::store::REFUSAL;
use crate::rendezvous::tcp_wire::{
    self as wire, Answer, ClientHello, Operation, RequestHead, ServerHello, Verdict,
};
use crate::sys::door::{Door, LONG};
use crate::sys::epoll::{Epoll, Event, Interest};
use crate::sys::event::EventFd;
use crate::sys::fork::Unshared;
use crate::sys::random;

const LISTENER: u64 = 0;
/// The token of what the handle signals when it is dropped.
const STOP: u64 = u64::MAX;
const NOTHING: Interest = Interest { read: false, write: false, close: true, once: false };
const READ: Interest = Interest { read: true, ..NOTHING };
/// How long accepting rests after the kernel refused, when no descriptors are left for instance.
const ACCEPT_REST: Duration = Duration::from_millis(50);
const CHUNK: usize = 64 << 10;
/// The most wills of one connection whose keys do not exist yet; of more, the first goes. Each is of a
/// meeting that its client is in.
const WILLS: usize = 64;

/// The state of the thread. Connections are known by tokens that are never used again.
pub(super) struct Server {
    listener: Unshared<TcpListener>,
    door: Door,
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
    entries: Entries,
    /// Bytes of requests that have arrived in part and are short, or not let in.
    incomplete: usize,
    /// Bytes of the long requests that are let in: there is room for the whole of each.
    let_in: usize,
    /// Whose long requests wait until others have arrived, the first first. Some may be gone.
    delayed: VecDeque<u64>,
    waiters: HashMap<Vec<u8>, HashSet<u64>>,
    /// What was last said by, or of, a rank that cannot join.
    words: Vec<u8>,
    /// Connections whose answer is ready, to be taken up by the loop: answering in place would recurse.
    runnable: Vec<u64>,
    deserted: Deserted,
}

impl Server {
    /// Serves who connects to `listener`, until `stop` is signalled.
    pub(super) fn new(
        listener: Unshared<TcpListener>,
        stop: &EventFd,
        key: Option<SecretKey>,
        instance: [u8; 16],
        limits: Limits,
        deserted: Deserted,
    ) -> io::Result<Server> {
        let epoll = Epoll::new()?;
        epoll.watch(listener.as_fd(), LISTENER, READ)?;
        epoll.watch(stop.as_fd(), STOP, READ)?;
        Ok(Server {
            listener,
            door: Door::default(),
            epoll,
            key,
            instance,
            limits,
            connections: HashMap::new(),
            next_token: LISTENER + 1,
            strangers: BTreeSet::new(),
            timers: BTreeSet::new(),
            entries: Entries::new(limits.stored),
            incomplete: 0,
            let_in: 0,
            delayed: VecDeque::new(),
            waiters: HashMap::new(),
            words: Vec::new(),
            runnable: Vec::new(),
            deserted,
        })
    }

    pub(super) fn run(mut self) {
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
                Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                    self.door.opens();
                    return;
                }
                Err(cause)
                    if matches!(cause.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(cause) => {
                    // Where nobody waits, who was accepted last must not have to go.
                    let Some(waited) = self.door.refuses(self.listener.as_fd()) else { return };
                    log::warn!("tcp store: accept: {cause}");
                    if !self.strangers.is_empty() {
                        // Several, so that some of those who come next stay for longer than a moment.
                        for _ in 0..self.strangers.len().div_ceil(2) {
                            self.drop_oldest_stranger();
                        }
                        self.door.opens();
                        continue;
                    }
                    if waited >= LONG {
                        let place =
                            self.listener.local_addr().map_or_else(|_| "?".into(), |at| at.to_string());
                        let why = format!("the tcp store on {place} cannot accept connections: {cause}");
                        *SHUT.write() = Some(Shut { instance: self.instance, at: Instant::now(), why });
                    }
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
        // Of the parent alone: a forked child that outlives it would keep its clients waiting, and its port
        // taken.
        let stream = Unshared::new(stream);
        stream.set_nonblocking(true)?;
        super::prepare(&stream)?;
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
            let _ = super::write(&stream, &ServerHello { flags: secret | wire::FULL, ..hello }.bytes(), &[]);
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
            let_in: 0,
            delayed: false,
            wills: Vec::new(),
            untold: false,
            output: Output::of(hello.bytes().to_vec()),
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
        let was_client = !self.strangers.remove(&token);
        if was_client && self.connections.len() == self.strangers.len() {
            self.deserted.set(Some(Instant::now()));
        }
        if connection.let_in == 0 {
            self.incomplete -= connection.input.len();
        }
        if let State::Waiting(key) = &connection.state {
            self.stop_waiting(token, key);
        }
        self.has_arrived(&mut connection);
        for will in connection.wills {
            self.carry_out(will);
        }
    }

    /// Says of a client that has gone what it wanted to be said.
    fn carry_out(&mut self, will: Will) {
        if self.entries.get(&will.key).is_some() {
            return;
        }
        // What another has said may be why. There is nobody to hear that the store is full.
        if self.entries.get(&will.refusal).is_none() {
            let _ = self.store(&will.refusal, &will.notice);
        }
        let _ = self.store(&will.key, &[]);
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
                if connection.let_in == 0 {
                    self.incomplete += count;
                    if self.incomplete > self.limits.incomplete {
                        return Err("too many bytes of incomplete requests");
                    }
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
            if connection.untold {
                connection.tell(&self.words);
                continue;
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
                        self.let_in(token, connection, head.length());
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
            if connection.let_in == 0 {
                self.incomplete -= used;
            } else {
                // What follows the request is of the next one.
                self.incomplete += connection.input.len();
                self.has_arrived(connection);
            }
        }
    }

    /// A request of this length has arrived in part. What is long is read on once there is room for the whole
    /// of it, which its client does not notice: else many that come at once would be left half read, and none
    /// could be answered.
    fn let_in(&mut self, token: u64, connection: &mut Connection, length: usize) {
        if length <= CHUNK || connection.let_in > 0 || connection.delayed {
            return;
        }
        if self.delayed.is_empty() && self.has_room(length) {
            self.let_in += length;
            self.incomplete -= connection.input.len();
            connection.let_in = length;
        } else {
            connection.delayed = true;
            self.delayed.push_back(token);
        }
    }

    /// One is let in however long it is.
    fn has_room(&self, length: usize) -> bool {
        self.let_in == 0 || self.let_in + length <= self.limits.incomplete
    }

    /// The request of a connection is there, or will not be: others may have its room.
    fn has_arrived(&mut self, connection: &mut Connection) {
        self.let_in -= mem::take(&mut connection.let_in);
        while let Some(&token) = self.delayed.front() {
            let head = self.connections.get(&token).and_then(|next| next.input.first_chunk().copied());
            if let Some(head) = head.and_then(RequestHead::parse) {
                if !self.has_room(head.length()) {
                    return;
                }
                self.let_in_delayed(token, head.length());
            }
            self.delayed.pop_front();
        }
    }

    fn let_in_delayed(&mut self, token: u64, length: usize) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.delayed = false;
        connection.let_in = length;
        self.let_in += length;
        self.incomplete -= connection.input.len();
        self.runnable.push(token);
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
            connection.untold = !self.words.is_empty();
            self.strangers.remove(&token);
            self.deserted.set(None);
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
            Operation::Will => {
                let outcome = match wire::parse_words(body) {
                    Some((refusal, notice)) => {
                        connection.wills.retain(|will| self.entries.get(&will.key).is_none());
                        if connection.wills.len() == WILLS {
                            connection.wills.remove(0);
                        }
                        let [key, refusal, notice] = [key, refusal, notice].map(<[u8]>::to_vec);
                        connection.wills.push(Will { key, refusal, notice });
                        Ok(None)
                    }
                    None => Err("it names no key".to_owned()),
                };
                connection.answer_done(outcome);
            }
            Operation::TryGet | Operation::Get => match self.entries.get(key) {
                Some(value) => connection.answer(Answer::Done, Some(value)),
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
        let value = self.entries.set(key, value)?;
        self.end_waits(key, Answer::Done, Some(&value));
        if let Some(place) = key.strip_suffix(REFUSAL.as_bytes()) {
            self.words = wire::words(key, &value);
            self.pass_on();
            let vain: Vec<_> = self.waiters.keys().filter(|key| key.starts_with(place)).cloned().collect();
            for key in vain {
                self.end_waits(&key, Answer::Refused, None);
            }
        }
        Ok(())
    }

    /// Tells all clients, those that ask nothing now, too: this server may have ended when they do. Who
    /// connects later is told then, and whose answer is on its way behind that.
    fn pass_on(&mut self) {
        for (&token, client) in &mut self.connections {
            if matches!(client.state, State::Ready | State::Waiting(_)) {
                client.untold = true;
                if !client.output.is_empty() {
                    continue;
                }
                client.tell(&self.words);
                // Before who says it is answered, whose process may end then, and this server with it. What
                // fails now does so again.
                let _ = client.flush();
                self.runnable.push(token);
            }
        }
    }

    fn end_waits(&mut self, key: &[u8], answer: Answer, value: Option<&Arc<[u8]>>) {
        for token in self.waiters.remove(key).unwrap_or_default() {
            let Some(mut waiter) = self.connections.remove(&token) else { continue };
            waiter.state = State::Ready;
            self.set_timer(token, &mut waiter, None);
            waiter.answer(answer, value.cloned());
            let _ = waiter.flush();
            self.connections.insert(token, waiter);
            self.runnable.push(token);
        }
    }

    fn add(&mut self, key: &[u8], amount: i64) -> std::result::Result<i64, String> {
        let sum = self.entries.sum(key, amount)?;
        self.store(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Closing is not enough: a child that was forked at a bad moment has copies of the descriptors, and
        // with them the port would stay taken and the clients would not see the end. A socket that is closed
        // already needs nothing.
        let _ = SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        for connection in self.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}
