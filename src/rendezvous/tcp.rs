//! The client of a TCP store.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::secret::SecretKey;
use super::store::{self, REFUSAL, Store};
use super::tcp_server;
use super::tcp_wire::{self as wire, Answer, ClientHello, Operation, RequestHead, ServerHello, Verdict};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::sys::child::{self, Readiness};
use crate::sys::door;
use crate::sys::fork::{self, Unshared};
use crate::sys::{process, random};

/// How long one address may take to accept and to greet before the next is tried. A host that drops packets
/// must not use up the time of the others.
const ONE_TRY: Duration = Duration::from_secs(5);
/// How long a server may take for an answer that waits for nothing, whatever the caller's deadline: after
/// that it is lost.
const ANSWER: Duration = Duration::from_secs(60);
/// How long the server's host may leave unacknowledged what was sent to it. Probes are sent where nothing is
/// on its way, and give up as soon.
const SILENCE: Duration = Duration::from_secs(50);
/// How much later than asked a server may say that a key did not come.
const GRACE: Duration = Duration::from_millis(500);
/// Within what time this host itself says that there is no way to an address. Later it is the network that
/// says so, and it may say something else soon.
const AT_ONCE: Duration = Duration::from_millis(500);
/// How often whoever waits for a greeting looks whether the server, if it is this process's, lets nobody in.
const LOOK: Duration = Duration::from_millis(100);
/// Who serves a store, as errors name it: one at a place that the ranks know, and an id's.
const OF_JOB: &str = "the process that hosts it (rank 0 or the launcher)";
const OF_ID: &str = "the process that made the id, or the launcher";
/// Idle connections that are kept.
const KEPT: usize = 4;

/// A connection to a [`tcp_server::ServerHandle`], here or elsewhere.
///
/// Threads do not wait for each other: each call under way has a connection of its own, opened when there is
/// none idle. There is no reconnecting: once the server is lost, every call fails with the first cause, since
/// what was in the dictionary is lost as well. A server that is silent until a caller's deadline is not lost:
/// the next call asks it again.
pub struct TcpStore {
    /// As the caller named it, for errors.
    name: String,
    address: SocketAddr,
    /// Who serves it, for errors.
    host: &'static str,
    key: Option<SecretKey>,
    instance: [u8; 16],
    /// Where it was connected. In a forked child the connections are the parent's.
    fork: u32,
    shared: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    idle: Vec<Line>,
    /// Those of no more use whose end would say that this process has gone.
    kept: Vec<Line>,
    lost: Option<Error>,
    /// What ranks say that cannot join, by its key: the last that has been passed on.
    words: Vec<u8>,
}

/// One connection.
struct Line {
    stream: Unshared<TcpStream>,
    /// The server has a will by it.
    has_will: bool,
}

impl Line {
    fn new(stream: Unshared<TcpStream>) -> Line {
        Line { stream, has_will: false }
    }
}

impl TcpStore {
    /// Connects to `host` (a name or an address) and `port`, trying again until the deadline: the server may
    /// start later. What cannot become better by waiting, such as a wrong secret, fails at once. A slow name
    /// server may delay the return beyond the deadline.
    pub fn connect(
        host: &str,
        port: u16,
        secret: Option<&SecretKey>,
        deadline: Deadline,
    ) -> Result<TcpStore> {
        let name = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let resolve = || Ok((host, port).to_socket_addrs()?.collect());
        TcpStore::connect_to(name, resolve, secret, None, None, &|| false, deadline)
    }

    /// Connects to the first of `addresses` that answers, which has to be the server with this `instance`, as
    /// long as it is not `recalled`. With `patience` it was there before: it is gone when for so long nobody,
    /// or another, has been at any address that there is a way to.
    pub(super) fn connect_any(
        addresses: &[SocketAddr],
        secret: &SecretKey,
        instance: [u8; 16],
        patience: Option<Duration>,
        recalled: &dyn Fn() -> bool,
        deadline: Deadline,
    ) -> Result<TcpStore> {
        let names: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        TcpStore::connect_to(
            names.join(" or "),
            || Ok(addresses.to_vec()),
            Some(secret),
            Some(instance),
            patience,
            recalled,
            deadline,
        )
    }

    /// Where the server is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn connect_to(
        name: String,
        candidates: impl Fn() -> io::Result<Vec<SocketAddr>>,
        secret: Option<&SecretKey>,
        instance: Option<[u8; 16]>,
        patience: Option<Duration>,
        recalled: &dyn Fn() -> bool,
        deadline: Deadline,
    ) -> Result<TcpStore> {
        let since = Instant::now();
        let key = secret.map(wire::store_key);
        let host = if instance.is_some() { OF_ID } else { OF_JOB };
        let mut pause = Duration::from_millis(2);
        let mut last = String::new();
        let (mut gone_since, mut lacking_since) = (None, None);
        loop {
            let tried = Instant::now();
            let (mut is_refused, mut is_unclear, mut is_lacking) = (false, false, false);
            match candidates() {
                Ok(addresses) => {
                    for address in addresses {
                        let asked = Instant::now();
                        let (cause, sign) = match dial(address, key.as_ref(), instance, deadline) {
                            Ok((stream, instance)) => {
                                let idle = vec![Line::new(stream)];
                                let shared = Mutex::new(Shared { idle, ..Shared::default() });
                                let fork = fork::generation();
                                return Ok(TcpStore { name, address, host, key, instance, fork, shared });
                            }
                            Err(Refusal::ForGood(error)) => {
                                return Err(error.context(format!("tcp store {name}")));
                            }
                            Err(Refusal::OtherServer) => {
                                (io::Error::other("another job's store answers there"), Sign::Gone)
                            }
                            Err(Refusal::ForNow(cause)) => {
                                let sign = Sign::of(&cause, asked.elapsed());
                                (cause, sign)
                            }
                        };
                        is_refused |= sign == Sign::Gone;
                        is_unclear |= matches!(sign, Sign::Unclear | Sign::Lacking);
                        is_lacking |= sign == Sign::Lacking;
                        // The last try may be cut short by the deadline, and then knows less than those
                        // before.
                        let says_more = cause.kind() != ErrorKind::TimedOut && sign != Sign::Nothing;
                        if last.is_empty() || says_more {
                            last = format!("{address}: {cause}");
                        }
                        // Each may have taken seconds.
                        if recalled() {
                            break;
                        }
                    }
                }
                Err(cause) => {
                    is_unclear = true;
                    last = format!("cannot resolve the name: {cause}");
                }
            }
            if recalled() {
                fail!(
                    Aborted,
                    "no connection to the tcp store {name} before the meeting there was called off"
                );
            }
            lacking_since = is_lacking.then(|| lacking_since.unwrap_or(tried));
            if lacking_since.is_some_and(|since| since.elapsed() >= door::LONG) {
                fail!(System, "no connection to the tcp store {name}: {last}");
            }
            gone_since = (is_refused && !is_unclear).then(|| gone_since.unwrap_or(tried));
            if let (Some(patience), Some(gone_since)) = (patience, gone_since)
                && gone_since.elapsed() >= patience
            {
                fail!(
                    PeerFailed,
                    "no connection to the tcp store {name}: {last}, for {:.1} s: the process that made the id is gone or has \
                     given the meeting up, or these are not its addresses as seen from this host (loopback, a bridge that \
                     every host has, a firewall): set UNISONO_INTERFACE where it is made",
                    gone_since.elapsed().as_secs_f64()
                );
            }
            if deadline.expired() {
                fail!(
                    Timeout,
                    "no connection to the tcp store {name} within {:.1} s: {last}; is the process that hosts it running, \
                     and its port reachable from here?",
                    since.elapsed().as_secs_f64()
                );
            }
            thread::sleep(deadline.remaining_capped(pause));
            pause = (pause * 3 / 2).min(Duration::from_millis(500));
        }
    }

    /// Sends one request and returns its answer. `body` is what the operation takes, `deadline` when the
    /// answer has to be there. An answer that is not for waiting also has to be there in time for [`ANSWER`].
    fn call(
        &self,
        operation: Operation,
        key: &str,
        body: &[u8],
        deadline: Deadline,
    ) -> Result<(Answer, Vec<u8>)> {
        if key.len() > wire::MAX_KEY {
            fail!(
                InvalidArgument,
                "key {} has {} bytes; a tcp store takes at most {}",
                store::quoted(key),
                key.len(),
                wire::MAX_KEY
            );
        }
        if body.len() > wire::MAX_VALUE {
            fail!(
                InvalidArgument,
                "the value of key {} has {} bytes; a tcp store takes at most {}",
                store::quoted(key),
                body.len(),
                wire::MAX_VALUE
            );
        }
        // Before the lock, which a thread that does not exist here may hold.
        if self.fork != fork::generation() {
            fail!(
                InvalidUsage,
                "the {} was opened before a fork: its connections are the parent's. Open it again in the child",
                self.describe()
            );
        }
        let idle = {
            let mut shared = self.shared();
            if let Some(error) = &shared.lost {
                return Err(error.clone());
            }
            shared.idle.pop()
        };
        let since = Instant::now();
        let mut line = match idle {
            Some(line) => line,
            None => Line::new(self.another(deadline)?),
        };
        line.has_will |= operation == Operation::Will;
        let patience = match operation {
            Operation::Get => deadline,
            Operation::Set | Operation::TryGet | Operation::Add | Operation::Will => {
                deadline.min(Deadline::after(ANSWER))
            }
        };
        let head = RequestHead { operation, key: key.len(), body: body.len() };
        let mut words = Vec::new();
        let exchanged = exchange(&line.stream, head, key, body, &mut words, patience);
        if !words.is_empty() {
            self.shared().words = words;
        }
        match exchanged {
            Ok(answer) => {
                let mut shared = self.shared();
                if shared.idle.len() < KEPT || line.has_will {
                    shared.idle.push(line);
                }
                Ok(answer)
            }
            // The answer may still come: this connection is of no more use, the server is.
            Err(cause) if is_late(&cause) && deadline.expired() => {
                if line.has_will {
                    self.shared().kept.push(line);
                }
                Err(self.silent(operation, key, since))
            }
            Err(cause) => Err(self.broken(operation, key, cause)),
        }
    }

    /// One more connection to the same server.
    fn another(&self, deadline: Deadline) -> Result<Unshared<TcpStream>> {
        let since = Instant::now();
        let mut pause = Duration::from_millis(2);
        let deadline = deadline.min(Deadline::after(ANSWER));
        loop {
            match dial(self.address, self.key.as_ref(), Some(self.instance), deadline) {
                Ok((stream, _)) => return Ok(stream),
                Err(Refusal::ForGood(error)) => return Err(error.context(self.describe())),
                // The server was up, so these two mean that it is gone.
                Err(Refusal::OtherServer) => {
                    return Err(self.lose("connecting once more", "another has its place"));
                }
                Err(Refusal::ForNow(cause)) if cause.kind() == ErrorKind::ConnectionRefused => {
                    return Err(self.lose("connecting once more", &cause.to_string()));
                }
                Err(Refusal::ForNow(cause)) if deadline.expired() => {
                    let after = since.elapsed().as_secs_f64();
                    // It has greeted before.
                    let cause = if is_late(&cause) {
                        format!("no answer; look at {}: it may be stopped", self.host)
                    } else {
                        cause.to_string()
                    };
                    fail!(Timeout, "{}: no further connection after {after:.1} s: {cause}", self.describe())
                }
                Err(Refusal::ForNow(_)) => thread::sleep(deadline.remaining_capped(pause)),
            }
            pause = (pause * 3 / 2).min(Duration::from_millis(500));
        }
    }

    /// What a broken connection means: the server is lost.
    fn broken(&self, operation: Operation, key: &str, cause: io::Error) -> Error {
        let doing = doing(operation, key);
        match cause.kind() {
            ErrorKind::UnexpectedEof => self.lose(&doing, "the server has closed the connection"),
            _ if is_late(&cause) => self.lose(&doing, "the server does not answer"),
            _ => self.lose(&doing, &cause.to_string()),
        }
    }

    /// The error of a call whose deadline passed without an answer.
    fn silent(&self, operation: Operation, key: &str, since: Instant) -> Error {
        let text = format!(
            "{}: no answer within {:.1} s while {}; look at {}, or raise the timeout",
            self.describe(),
            since.elapsed().as_secs_f64(),
            doing(operation, key),
            self.host
        );
        Error::new(Status::Timeout, text)
    }

    /// Remembers that the server is lost; the first cause stays.
    fn lose(&self, doing: &str, what: &str) -> Error {
        let text = format!("lost the {} while {doing}: {what}; look at {}", self.describe(), self.host);
        let mut shared = self.shared();
        shared.idle.clear();
        shared.lost.get_or_insert_with(|| Error::new(Status::PeerFailed, text)).clone()
    }

    /// What is under `key`, if it has been passed on before the server was lost.
    fn words(&self, key: &str) -> Option<Vec<u8>> {
        // As in `call`.
        if !key.ends_with(REFUSAL) || self.fork != fork::generation() {
            return None;
        }
        let shared = self.shared();
        let (known, value) = wire::parse_words(&shared.words)?;
        (known == key.as_bytes()).then(|| value.to_vec())
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // Nothing panics with the lock held.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, verb: &str, key: &str, body: &[u8]) -> Error {
        let text = format!(
            "{verb} key {}: {} (in {})",
            store::quoted(key),
            String::from_utf8_lossy(body).escape_debug(),
            self.describe()
        );
        Error::new(Status::InvalidUsage, text)
    }

    fn unexpected(&self, operation: Operation, key: &str) -> Error {
        self.broken(
            operation,
            key,
            io::Error::new(ErrorKind::InvalidData, "the server answers something else"),
        )
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        match self.call(Operation::Set, key, value, deadline)? {
            (Answer::Done, _) => Ok(()),
            (Answer::Refused, text) => Err(self.refused("set", key, &text)),
            _ => Err(self.unexpected(Operation::Set, key)),
        }
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let since = Instant::now();
        let left = deadline.remaining();
        // Rounded up: the server must not give up before the caller would.
        let wait = left
            .map_or(u64::MAX, |left| u64::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX));
        // The server says when the time is over; it gets a little longer to say so.
        let answer = left.map_or(Deadline::NEVER, |left| Deadline::after(left.saturating_add(GRACE)));
        match self.call(Operation::Get, key, &wait.to_le_bytes(), answer)? {
            (Answer::Done, value) => Ok(value),
            (Answer::TimedOut, _) => Err(store::timed_out(self, key, since)),
            (Answer::Refused, _) => {
                let text = format!(
                    "{}: key {} will not be set: a rank cannot join",
                    self.describe(),
                    store::quoted(key)
                );
                Err(Error::new(Status::PeerFailed, text))
            }
            _ => Err(self.unexpected(Operation::Get, key)),
        }
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let answer = self.call(Operation::TryGet, key, &[], deadline);
        match answer.or_else(|error| Ok((Answer::Done, self.words(key).ok_or(error)?)))? {
            (Answer::Done, value) => Ok(Some(value)),
            (Answer::Absent, _) => Ok(None),
            _ => Err(self.unexpected(Operation::TryGet, key)),
        }
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        match self.call(Operation::Add, key, &amount.to_le_bytes(), deadline)? {
            (Answer::Done, sum) => match sum.try_into() {
                Ok(sum) => Ok(i64::from_le_bytes(sum)),
                Err(_) => Err(self.unexpected(Operation::Add, key)),
            },
            (Answer::Refused, text) => Err(self.refused("add to", key, &text)),
            _ => Err(self.unexpected(Operation::Add, key)),
        }
    }

    fn will(&self, key: &str, refusal: &str, notice: &[u8], deadline: Deadline) -> Result<()> {
        let body = wire::words(refusal.as_bytes(), notice);
        match self.call(Operation::Will, key, &body, deadline)? {
            (Answer::Done, _) => Ok(()),
            (Answer::Refused, text) => Err(self.refused("a will for", key, &text)),
            _ => Err(self.unexpected(Operation::Will, key)),
        }
    }

    fn shut(&self) -> Option<String> {
        tcp_server::shut(self.instance)
    }

    fn describe(&self) -> String {
        format!("tcp store {}", self.name)
    }
}

/// What a call is about, for errors.
fn doing(operation: Operation, key: &str) -> String {
    let doing = match operation {
        Operation::Set => "setting",
        Operation::Get => "waiting for",
        Operation::TryGet => "looking for",
        Operation::Add => "adding to",
        Operation::Will => "leaving a will for",
    };
    format!("{doing} key {}", store::quoted(key))
}

/// Whether the time for a system call on a blocking socket was over.
fn is_late(cause: &io::Error) -> bool {
    matches!(cause.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Why there is no connection.
enum Refusal {
    /// It may come if we wait.
    ForNow(io::Error),
    /// A store answers, but not the one that was meant.
    OtherServer,
    /// Waiting does not help.
    ForGood(Error),
}

/// What a try in vain says of a server that was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    /// It is not there.
    Gone,
    /// Nothing: there is no way from this host to that address.
    Nothing,
    /// It may be there.
    Unclear,
    /// It may be there: this process lacks what a connection takes, most likely descriptors.
    Lacking,
}

impl Sign {
    /// What this cause says that came `after` so long.
    fn of(cause: &io::Error, after: Duration) -> Sign {
        match cause.kind() {
            ErrorKind::ConnectionRefused => Sign::Gone,
            ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable | ErrorKind::AddrNotAvailable
                if after < AT_ONCE =>
            {
                Sign::Nothing
            }
            // As where the kernel has no IPv6.
            _ if cause.raw_os_error() == Some(libc::EAFNOSUPPORT) => Sign::Nothing,
            _ if process::lacks(cause) => Sign::Lacking,
            _ => Sign::Unclear,
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(cause: io::Error) -> Refusal {
        Refusal::ForNow(cause)
    }
}

/// One try to connect and to greet. Returns the connection and the server's instance.
fn dial(
    address: SocketAddr,
    key: Option<&SecretKey>,
    instance: Option<[u8; 16]>,
    deadline: Deadline,
) -> std::result::Result<(Unshared<TcpStream>, [u8; 16]), Refusal> {
    // At the end of the time, one short try is still made: a caller with no time left learns what is wrong.
    let patience = deadline.remaining_capped(ONE_TRY).max(Duration::from_millis(20));
    let deadline = Deadline::after(patience);
    // A forked child that kept it would keep the server from seeing that this process has gone.
    let stream = Unshared::new(TcpStream::connect_timeout(&address, patience)?);
    // A connect to a free port of this host may, by chance, pick the same port as its own end: that is
    // nobody.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::Error::from(ErrorKind::ConnectionRefused).into());
    }
    tcp_server::prepare(&stream)?;
    SockRef::from(&*stream).set_tcp_user_timeout(Some(SILENCE))?;
    await_greeting(&stream, instance, deadline)?;
    let mut timed = Timed { stream: &stream, deadline };
    let mut bytes = [0; wire::SERVER_HELLO];
    timed.read_exact(&mut bytes).map_err(|cause| greeting(cause, "no greeting"))?;
    let Some(hello) = ServerHello::parse(&bytes) else {
        if bytes.starts_with(wire::FAMILY) {
            let text = format!(
                "the store at {address} is of another version of unisono: install one build for all ranks and for unisono-run"
            );
            return Err(Refusal::ForGood(Error::new(Status::Mismatch, text)));
        }
        return Err(Refusal::ForGood(Error::new(
            Status::System,
            format!(
                "what answers at {address} is not a store of this version of unisono; choose another port"
            ),
        )));
    };
    if hello.flags & wire::FULL != 0 {
        return Err(io::Error::other("it has no room for another connection").into());
    }
    if instance.is_some_and(|instance| instance != hello.instance) {
        return Err(Refusal::OtherServer);
    }
    let mut nonce = [0; 32];
    random::fill(&mut nonce).map_err(Refusal::ForGood)?;
    let flags = if key.is_some() { wire::WITH_SECRET } else { 0 };
    let tag = key.map_or([0; 32], |key| key.tag(&wire::transcript("client", &hello, &nonce)));
    timed.write_all(&ClientHello { flags, nonce, tag }.bytes())?;
    let mut bytes = [0; wire::VERDICT];
    timed.read_exact(&mut bytes).map_err(|cause| greeting(cause, "no answer to our greeting"))?;
    let text = match Verdict::parse(bytes[0]) {
        Some(Verdict::Welcome) => match key {
            Some(key) if !key.verify(&wire::transcript("server", &hello, &nonce), &bytes[1..]) => {
                "the server does not know the secret"
            }
            _ => return Ok((stream, hello.instance)),
        },
        Some(Verdict::WrongSecret) => {
            "our secret is not the server's; give all ranks the same UNISONO_SECRET or id"
        }
        Some(Verdict::SecretNeeded) => {
            "the server asks for a secret; give it in the options, or UNISONO_SECRET where a launcher starts ranks"
        }
        Some(Verdict::NoSecretHere) => "we have a secret, the server has none; set UNISONO_SECRET there too",
        None => "the server answers our greeting with something unknown",
    };
    Err(Refusal::ForGood(Error::new(Status::InvalidUsage, text)))
}

/// Waits for the greeting of the server that is this `instance`, until the deadline. One of this process that
/// nobody gets through to is not waited for.
fn await_greeting(
    stream: &TcpStream,
    instance: Option<[u8; 16]>,
    deadline: Deadline,
) -> std::result::Result<(), Refusal> {
    let Some(instance) = instance else { return Ok(()) };
    loop {
        let look = deadline.min(Deadline::after(LOOK));
        if child::poll(&[(stream.as_fd(), Readiness::Read)], look)?[0] || deadline.expired() {
            return Ok(());
        }
        if let Some(why) = tcp_server::shut(instance) {
            return Err(Refusal::ForGood(Error::new(Status::System, why)));
        }
    }
}

/// What a failure during the greeting means.
fn greeting(cause: io::Error, what: &str) -> io::Error {
    match cause.kind() {
        ErrorKind::UnexpectedEof => {
            io::Error::new(cause.kind(), format!("{what}, the connection was closed"))
        }
        _ if is_late(&cause) => {
            io::Error::new(ErrorKind::TimedOut, format!("{what}; another program may use the port"))
        }
        _ => cause,
    }
}

fn exchange(
    stream: &TcpStream,
    head: RequestHead,
    key: &str,
    body: &[u8],
    words: &mut Vec<u8>,
    deadline: Deadline,
) -> io::Result<(Answer, Vec<u8>)> {
    let mut timed = Timed { stream, deadline };
    let start = [&head.bytes(), key.as_bytes()].concat();
    let written = timed.write_both(&start, body);
    loop {
        // A server that has ended may have said something before.
        match read_answer(&mut timed) {
            Ok((Answer::Words, value)) => *words = value,
            Ok(answer) => return written.map(|()| answer),
            Err(cause) => return Err(written.err().unwrap_or(cause)),
        }
    }
}

fn read_answer(from: &mut Timed<'_>) -> io::Result<(Answer, Vec<u8>)> {
    let mut bytes = [0; wire::ANSWER_HEAD];
    from.read_exact(&mut bytes)?;
    let [code, length @ ..] = bytes;
    let answer = Answer::parse(code).ok_or(ErrorKind::InvalidData)?;
    let length = u32::from_le_bytes(length) as usize;
    // Words are of a key and its value.
    if length > wire::MAX_VALUE + wire::MAX_KEY + 4 {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut value = vec![0; length];
    from.read_exact(&mut value)?;
    Ok((answer, value))
}

/// A blocking stream whose calls, all together, end at a deadline.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl Timed<'_> {
    /// What one system call may take. The kernel takes zero for "for ever", so it is never zero.
    fn patience(&self) -> io::Result<Option<Duration>> {
        match self.deadline.remaining() {
            Some(Duration::ZERO) => Err(ErrorKind::TimedOut.into()),
            left => Ok(left.map(|left| left.max(Duration::from_millis(1)))),
        }
    }

    /// Writes two parts, in one packet where they fit.
    fn write_both(&mut self, first: &[u8], second: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < first.len() {
            self.stream.set_write_timeout(self.patience()?)?;
            match tcp_server::write(self.stream, &first[done..], second) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause),
            }
        }
        self.write_all(&second[done - first.len()..])
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.patience()?)?;
        self.stream.read(into)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.patience()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
