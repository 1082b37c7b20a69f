//! From what the environment says to a store that the ranks of this run share, and nobody else.
//!
//! A process may join several times, and several programs may run one after the other under one launcher:
//! each time is a *run* with keys of its own. In a directory, `run_directory` tells runs apart. In a TCP
//! store, a rank counts how often it has come there, and ranks that have come equally often are of one run. A
//! TCP store that rank 0 serves dies with rank 0's process, so there are no older programs to be mistaken
//! for; who meets a server that is just ending goes on to its successor.

#![forbid(unsafe_code)]

use std::fs;
use std::mem;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::environment::{How, Launch};
use super::hash::HashStore;
use super::prefix::PrefixStore;
use super::run_directory as directory;
use super::secret::SecretKey;
use super::store::Store;
use super::tcp::TcpStore;
use super::tcp_server::ServerHandle;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::sys::fork;
use crate::sys::global::Global;

/// Under which rank 0 says that a run has begun, and how.
const OPENING: &str = "unisono/opening";
/// Begins the names of the directories of jobs on one host.
const LOCAL_JOB: &str = "job-";
/// How long rank 0 tries to get a port that is in use.
const PORT_PATIENCE: Duration = Duration::from_secs(2);

/// What a rank needs to meet the others.
pub struct Joined {
    /// The store of this run alone. Rank 0's may be the one that serves it: rank 0 keeps it until all others
    /// need it no more.
    pub store: Arc<dyn Store>,
    /// The same for all ranks of this run; authenticates its links.
    pub secret: SecretKey,
    /// Why this rank is none of rank 0's job, if so. The others are to hear it there.
    pub fits: Result<()>,
}

/// Joins the run that `launch` describes. All ranks call it equally often, and in each process one after the
/// other.
///
/// The secret is the hash of `UNISONO_SECRET`, or the id's, or made by rank 0 and put into the store; in the
/// last case whoever can read the store can join the job.
pub fn connect(launch: &Launch, deadline: Deadline) -> Result<Joined> {
    let joined = match &launch.store {
        How::Alone => {
            let secret = launch.secret.clone().map_or_else(SecretKey::random, Ok)?;
            return Ok(Joined { store: Arc::new(HashStore::new()), secret, fits: Ok(()) });
        }
        How::Local { job } => {
            let job = local_job(job, launch.launcher.rank_variable());
            let base = directory::private_base(&job)?;
            if launch.rank == 0 {
                directory::tidy(&base, launcher_is_gone);
            }
            join_directory(launch, &base, deadline)
        }
        How::File(base) => join_directory(launch, base, deadline),
        How::Id(id) => {
            let secret = launch.secret.as_ref().unwrap_or(id.secret());
            let store: Arc<dyn Store> = Arc::new(id.connect(deadline)?);
            open(launch, counted(store, launch.rank, deadline)?, Some(secret), deadline)
        }
        How::Tcp { host, port } => join_tcp(launch, host, *port, false, deadline),
        How::Rank0 { host, port } => join_tcp(launch, host, *port, true, deadline),
    };
    let joined = joined.map_err(|error| {
        let how = launch.launcher;
        error.context(format!(
            "rank {} of {} (by the variables of {how}) cannot join",
            launch.rank, launch.size
        ))
    })?;
    log::info!("rank {} of {} joined by {}", launch.rank, launch.size, joined.store.describe());
    Ok(joined)
}

/// The store of the last meeting of this process as rank 0, if that has failed: it says why, for ranks that
/// come late or have yet to look.
static FAILED: Global<Option<Arc<dyn Store>>> = Global::new(None);

/// A meeting of this process as rank 0 is over; it has failed in that store, if one is given. That is kept
/// until the next is over, or serves a store, and as it is when the process ends.
pub fn is_over(failed: Option<Arc<dyn Store>>) {
    if let Some(store) = failed.as_ref().filter(|store| store.file_of("").is_some()) {
        let _ = store.set(directory::FAILED, &[], Deadline::after(PORT_PATIENCE));
    }
    let before = mem::replace(&mut *FAILED.write(), failed);
    // Not under the lock: whoever drops the last of a server waits for its thread.
    drop(before);
}

/// A store, and something that has to live as long: the server, or the leader's lock.
struct Keeping<K> {
    store: Arc<dyn Store>,
    /// Dropped after the store.
    _kept: K,
}

impl<K: Send + Sync> Store for Keeping<K> {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.store.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.store.get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.store.try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.store.add(key, amount, deadline)
    }

    fn will(&self, key: &str, refusal: &str, notice: &[u8], deadline: Deadline) -> Result<()> {
        self.store.will(key, refusal, notice, deadline)
    }

    fn shut(&self) -> Option<String> {
        self.store.shut()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    fn file_of(&self, key: &str) -> Option<PathBuf> {
        self.store.file_of(key)
    }

    fn has_turns(&self) -> bool {
        self.store.has_turns()
    }
}

fn join_directory(launch: &Launch, base: &Path, deadline: Deadline) -> Result<Joined> {
    let store: Arc<dyn Store> = if launch.rank == 0 {
        let (store, mut leader) = directory::lead(base)?;
        if let How::Local { .. } = launch.store {
            leader.own_base();
        }
        Arc::new(Keeping { store: Arc::new(store), _kept: leader })
    } else {
        Arc::new(directory::follow(base, launch.rank, deadline)?)
    };
    open(launch, store, launch.secret.as_ref(), deadline)
}

fn join_tcp(launch: &Launch, host: &str, port: u16, must_serve: bool, deadline: Deadline) -> Result<Joined> {
    let secret = launch.secret.as_ref();
    if secret.is_none() {
        log::warn!(
            "the tcp store {host}:{port} has no secret: whoever reaches the port can join; set UNISONO_SECRET on all ranks"
        );
    }
    if launch.rank == 0 {
        let store = first_at_tcp(host, port, secret, must_serve, deadline)?;
        return open(launch, counted(store, launch.rank, deadline)?, secret, deadline);
    }
    loop {
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect(host, port, secret, deadline)?);
        let joined =
            counted(store, launch.rank, deadline).and_then(|store| open(launch, store, secret, deadline));
        match joined {
            // The server of an earlier run, which has ended meanwhile: the next one is about to start.
            Err(error) if error.status() == Status::PeerFailed && !deadline.expired() => {
                log::info!("{error}; trying again");
                thread::sleep(deadline.remaining_capped(Duration::from_millis(10)));
            }
            joined => return joined,
        }
    }
}

/// Rank 0's way to the store: it serves, or where somebody else may and does, it is a client.
fn first_at_tcp(
    host: &str,
    port: u16,
    secret: Option<&SecretKey>,
    must_serve: bool,
    deadline: Deadline,
) -> Result<Arc<dyn Store>> {
    // The port is this run's.
    is_over(None);
    // A port that was in use a moment ago may be free soon: its process is just ending.
    let patience = deadline.min(Deadline::after(PORT_PATIENCE));
    let mut told = false;
    loop {
        let why_not = match serve(host, port, secret, must_serve)? {
            Serving::Here(server) => {
                let local = server.local_address();
                let client = TcpStore::connect(&local.ip().to_string(), local.port(), secret, deadline)?;
                return Ok(Arc::new(Keeping { store: Arc::new(client), _kept: server }));
            }
            Serving::Elsewhere => return Ok(Arc::new(TcpStore::connect(host, port, secret, deadline)?)),
            Serving::Not(error) => error,
        };
        if !must_serve || is_inherited(port, secret) {
            match TcpStore::connect(host, port, secret, deadline.min(Deadline::after(PORT_PATIENCE))) {
                Err(error) if error.status() == Status::Timeout => {
                    // Nobody is there, so why this rank cannot be is what matters.
                    let error = error.context(why_not.text());
                    if deadline.expired() {
                        return Err(error);
                    }
                    // It may take minutes until somebody is told by an error.
                    if !std::mem::replace(&mut told, true) {
                        log::warn!("{error}; trying again until the deadline");
                    }
                }
                outcome => {
                    let store = Arc::new(outcome?);
                    // Another thread of this process may have begun to serve since this one looked.
                    return Ok(match known(port, secret) {
                        Some(server) => Arc::new(Keeping { store, _kept: server }),
                        None => store,
                    });
                }
            }
        } else if patience.expired() {
            return Err(why_not.context(format!(
                "rank 0 has to serve the job's store on port {port}; set UNISONO_PORT to a free one on all ranks"
            )));
        }
        thread::sleep(deadline.remaining_capped(Duration::from_millis(10)));
    }
}

/// The part of `store` for the run that we are in when we come to it.
fn counted(store: Arc<dyn Store>, rank: usize, deadline: Deadline) -> Result<Arc<dyn Store>> {
    let run = store.add(&format!("unisono/came/{rank}"), 1, deadline)?;
    Ok(Arc::new(PrefixStore::new(store, &format!("run {run}"))))
}

/// Tells, as rank 0, or learns, as another, how the run begins: the job's size, and the secret or a proof of
/// it.
fn open(
    launch: &Launch,
    store: Arc<dyn Store>,
    secret: Option<&SecretKey>,
    deadline: Deadline,
) -> Result<Joined> {
    if launch.rank == 0 {
        let made = secret.cloned().map_or_else(SecretKey::random, Ok)?;
        let opening = Opening {
            size: launch.size as u64,
            known: secret.is_some(),
            bytes: match secret {
                Some(secret) => secret.tag(&[OPENING.as_bytes()]),
                None => *made.expose(),
            },
        };
        store.set(OPENING, &opening.bytes(), deadline)?;
        return Ok(Joined { store, secret: made, fits: Ok(()) });
    }
    let Some(opening) = Opening::parse(&store.get(OPENING, deadline)?) else {
        fail!(Mismatch, "rank 0 began the run with another version of unisono (in {})", store.describe());
    };
    let fits = opening.fits(launch, secret);
    // Of no use to a rank that does not fit.
    let secret = secret.cloned().unwrap_or_else(|| SecretKey::new(opening.bytes));
    Ok(Joined { store, secret, fits })
}

/// What rank 0 publishes first.
struct Opening {
    size: u64,
    /// Whether all ranks are to know the secret already.
    known: bool,
    /// A proof of the secret if it is known, else the secret.
    bytes: [u8; 32],
}

impl Opening {
    fn bytes(&self) -> Vec<u8> {
        [&[u8::from(self.known)][..], &self.size.to_le_bytes(), &self.bytes].concat()
    }

    /// Whether a rank that was told that, and knows this secret, is one of the job's.
    fn fits(&self, launch: &Launch, secret: Option<&SecretKey>) -> Result<()> {
        let (rank, size) = (launch.rank, launch.size);
        if self.size != size as u64 {
            fail!(
                Mismatch,
                "rank 0 has {} ranks in its job, rank {rank} has {size}; give all ranks the same size, and each job its own store",
                self.size
            );
        }
        match (secret, self.known) {
            (None, false) => Ok(()),
            (Some(secret), true) if secret.verify(&[OPENING.as_bytes()], &self.bytes) => Ok(()),
            (Some(_), true) => {
                fail!(
                    Mismatch,
                    "UNISONO_SECRET of rank {rank} differs from rank 0's; set the same on all ranks"
                )
            }
            (Some(_), false) => {
                fail!(
                    Mismatch,
                    "UNISONO_SECRET is set on rank {rank} but not on rank 0; set it on all ranks or none"
                )
            }
            (None, true) => {
                fail!(
                    Mismatch,
                    "UNISONO_SECRET is set on rank 0 but not on rank {rank}; set it on all ranks or none"
                )
            }
        }
    }

    fn parse(bytes: &[u8]) -> Option<Opening> {
        let (&[known @ 0..=1], rest) = bytes.split_first_chunk()? else { return None };
        let (size, bytes) = rest.split_first_chunk()?;
        Some(Opening { size: u64::from_le_bytes(*size), known: known == 1, bytes: bytes.try_into().ok()? })
    }
}

/// The servers of this process that are still in use. A second communicator finds the first one's store.
static SERVERS: Global<Vec<Known>> = Global::new(Vec::new());

struct Known {
    port: u16,
    secret: Option<SecretKey>,
    server: Weak<ServerHandle>,
    /// Where it was started: a forked child has a copy, of which it may be that the parent serves.
    fork: u32,
}

impl Known {
    fn is(&self, port: u16, secret: Option<&SecretKey>) -> bool {
        self.port == port && self.secret.as_ref() == secret
    }
}

/// The server of this process at that port.
fn known(port: u16, secret: Option<&SecretKey>) -> Option<Arc<ServerHandle>> {
    let mut servers = SERVERS.write();
    servers.retain(|known| known.server.strong_count() > 0);
    let known = servers.iter().find(|known| known.is(port, secret) && known.fork == fork::generation());
    known.and_then(|known| known.server.upgrade())
}

/// Whether an ancestor of this process had its server at that port when it forked. Who has it now may be that
/// ancestor.
fn is_inherited(port: u16, secret: Option<&SecretKey>) -> bool {
    SERVERS.read().iter().any(|known| known.is(port, secret) && known.fork != fork::generation())
}

/// Who serves a TCP store.
enum Serving {
    /// This process.
    Here(Arc<ServerHandle>),
    /// The host is not ours.
    Elsewhere,
    /// We cannot: most likely somebody uses the port, or the host's name is not known yet.
    Not(Error),
}

/// Serves at `host`, as rank 0, if that can be.
fn serve(host: &str, port: u16, secret: Option<&SecretKey>, must_serve: bool) -> Result<Serving> {
    if let Some(server) = known(port, secret) {
        return Ok(Serving::Here(server));
    }
    // Where the others are told loopback, nobody else needs to reach the port. A name that resolves to
    // loopback here says nothing about the others: many hosts list their own name so. Else everywhere: the
    // name may stand for an address that this host does not know as its own, behind a translation, and who
    // has to serve need not know what it stands for.
    let is_loopback =
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let resolved = (is_loopback || !must_serve).then(|| (host, port).to_socket_addrs()).transpose();
    let addresses: Vec<SocketAddr> = match resolved {
        Ok(addresses) => addresses.into_iter().flatten().collect(),
        Err(cause) => {
            let what = format!("rank 0 cannot resolve '{host}', where it should serve the store");
            return Ok(Serving::Not(Error::system(what, cause)));
        }
    };
    let loopback = addresses.first().filter(|_| is_loopback);
    let started = match loopback {
        Some(address) => ServerHandle::start(*address, secret),
        None if must_serve || addresses.iter().any(is_ours) => ServerHandle::start_everywhere(port, secret),
        None => return Ok(Serving::Elsewhere),
    };
    Ok(match started {
        Ok(server) => {
            let server = Arc::new(server);
            let fork = fork::generation();
            let known = Known { port, secret: secret.cloned(), server: Arc::downgrade(&server), fork };
            SERVERS.write().push(known);
            Serving::Here(server)
        }
        Err(error) => Serving::Not(error),
    })
}

/// Whether the address is one of this host's: only such can be bound to.
fn is_ours(address: &SocketAddr) -> bool {
    // With its scope, without which a link-local address means nothing.
    let mut any_port = *address;
    any_port.set_port(0);
    std::net::UdpSocket::bind(any_port).is_ok()
}

/// A name for the job that no other job of this user has: the launcher's name for it, and the launcher's
/// process.
fn local_job(job: &str, rank_variable: &str) -> String {
    let launcher = launcher_process(rank_variable);
    let text: String =
        job.chars().take(64).map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
    if text.is_empty() { format!("{LOCAL_JOB}{launcher}") } else { format!("{LOCAL_JOB}{launcher}-{text}") }
}

/// Whether the launcher has ended that a name by [`local_job`] is of. Not where the time of its start was not
/// to be had.
fn launcher_is_gone(job: &str) -> bool {
    let mut numbers = job.strip_prefix(LOCAL_JOB).unwrap_or_default().split('-');
    let process = numbers.next().and_then(|process| process.parse().ok());
    let started = numbers.next().and_then(|started| started.parse().ok()).filter(|&started| started != 0);
    process.zip(started).is_some_and(|(process, started)| stat(process).map(|(_, now)| now) != Some(started))
}

/// The nearest ancestor that was not started with a rank: the launcher, or its agent on this host. A process
/// number comes back after a while, together with the time of its start only once in a boot. Wrappers between
/// the launcher and the program carry the rank, so all ranks find the same process.
fn launcher_process(rank_variable: &str) -> String {
    let mut process = std::os::unix::process::parent_id();
    // No real tree is as deep.
    for _ in 0..64 {
        match parent_with_rank(process, rank_variable) {
            Some(parent) if parent > 0 => process = parent,
            _ => break,
        }
    }
    // Without /proc, the number alone has to do.
    let started = stat(process).map_or(0, |(_, started)| started);
    format!("{process}-{started}")
}

/// The parent of `process` if `process` itself has a rank. One whose environment we may not read is not ours
/// to have one.
fn parent_with_rank(process: u32, rank_variable: &str) -> Option<u32> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let has_rank = environment
        .split(|byte| *byte == 0)
        .any(|entry| entry.strip_prefix(rank_variable.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")));
    if has_rank { stat(process).map(|(parent, _)| parent) } else { None }
}

/// The parent of a process, and when it started, in ticks since the boot.
fn stat(process: u32) -> Option<(u32, u64)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the fields after it are numbers. The parent is the 4th
    // of all, the start the 22nd; the first after the name is the 3rd.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::not_run::not_run;
    use crate::rendezvous::environment::Launcher;
    use crate::rendezvous::id::UniqueId;
    use crate::rendezvous::scratch::{Scratch, reserved};

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn launch(rank: usize, size: usize, store: &How) -> Launch {
        let (local_rank, local_size) = (Some(rank), Some(size));
        Launch {
            rank,
            size,
            local_rank,
            local_size,
            launcher: Launcher::Unisono,
            store: store.clone(),
            secret: None,
        }
    }

    /// Three ranks, as threads, join `runs` times and see only what their own run wrote.
    fn joins(store: &How, runs: usize) {
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    scope.spawn(move || {
                        let mut secrets = Vec::new();
                        for run in 0..runs {
                            let joined = connect(&launch(rank, 3, store), soon()).unwrap();
                            let store = &joined.store;
                            assert_eq!(joined.fits, Ok(()));
                            assert_eq!(
                                store.try_get(&format!("from {rank}"), soon()).unwrap(),
                                None,
                                "an older run's key"
                            );
                            store.set(&format!("from {rank}"), &[run as u8], soon()).unwrap();
                            for other in 0..3 {
                                assert_eq!(store.get(&format!("from {other}"), soon()).unwrap(), [run as u8]);
                            }
                            // Rank 0 keeps its store until the others need it no more.
                            store.add("done", 1, soon()).unwrap();
                            while rank == 0 && store.get("done", soon()).unwrap() != b"3" {
                                thread::sleep(Duration::from_millis(1));
                            }
                            secrets.push(joined.secret);
                        }
                        secrets
                    })
                })
                .collect();
            let secrets: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert!(secrets.iter().all(|of_rank| *of_rank == secrets[0]), "one secret in each run");
        });
    }

    #[test]
    fn again_and_again_in_one_directory() {
        let scratch = Scratch::new();
        let runs = scratch.path().join("runs");
        joins(&How::File(runs.clone()), 4);
        assert!(fs::read_dir(&runs).map_or(0, Iterator::count) == 0, "something is left");
    }

    /// The mode of what is at `base` after a run there, in `store`, if it was a directory of 0750 before.
    fn after_a_run(store: &How, base: &Path) -> Option<u32> {
        fs::create_dir(base).unwrap();
        fs::set_permissions(base, Permissions::from_mode(0o750)).unwrap();
        drop(connect(&launch(0, 2, store), soon()).unwrap());
        fs::metadata(base).ok().map(|found| found.permissions().mode() & 0o7777)
    }

    #[test]
    fn a_directory_that_somebody_made_for_a_run_stays_as_it_is() {
        let scratch = Scratch::new();
        let base = scratch.path().join("runs");
        assert_eq!(after_a_run(&How::File(base.clone()), &base), Some(0o750));
        assert_eq!(fs::read_dir(&base).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_for_the_runs_on_one_host_goes_whoever_made_it() {
        let job = format!("left @/{}", std::process::id());
        let base = directory::private_base(&local_job(&job, Launcher::Unisono.rank_variable())).unwrap();
        assert_eq!(after_a_run(&How::Local { job }, &base), None);
    }

    #[test]
    fn again_and_again_on_one_host() {
        joins(&How::Local { job: format!("test @/{}", std::process::id()) }, 2);
    }

    #[test]
    fn again_and_again_at_rank_0s_server() {
        let (_place, address) = reserved();
        joins(&How::Rank0 { host: "127.0.0.1".to_owned(), port: address.port() }, 4);
        let (_place, address) = reserved();
        joins(&How::Tcp { host: "127.0.0.1".to_owned(), port: address.port() }, 2);
    }

    /// Set where fe80::1 is an address of loopback.
    const LINK_LOCAL: &str = "UNISONO_TEST_LINK_LOCAL";

    /// Not a test by itself: what [`again_and_again_at_a_link_local_address_of_rank_0s`] runs.
    #[test]
    fn joins_at_a_link_local_address() {
        if std::env::var_os(LINK_LOCAL).is_some() {
            joins(&How::Tcp { host: "fe80::1%lo".to_owned(), port: 7005 }, 2);
        }
    }

    #[test]
    fn again_and_again_at_a_link_local_address_of_rank_0s() {
        const NAME: &str = "again_and_again_at_a_link_local_address_of_rank_0s";
        let there = |program: &Path, arguments: &[&str]| {
            let script = "ip link set lo up && ip address add fe80::1/64 dev lo && exec \"$0\" \"$@\"";
            let mut command = std::process::Command::new("unshare");
            command.args(["-rn", "sh", "-c", script]).arg(program).args(arguments).env(LINK_LOCAL, "1");
            command.output()
        };
        let allowed = there(Path::new("true"), &[]);
        if !allowed.as_ref().is_ok_and(|output| output.status.success()) {
            return not_run(NAME, format!("no network of one's own, {allowed:?}"));
        }
        let test = "rendezvous::join::tests::joins_at_a_link_local_address";
        let output = there(&std::env::current_exe().unwrap(), &["--exact", test]).unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }

    #[test]
    fn at_a_server_that_somebody_else_runs() {
        let server = ServerHandle::start(([127, 0, 0, 1], 0).into(), None).unwrap();
        joins(&How::Tcp { host: "127.0.0.1".to_owned(), port: server.port() }, 3);
        let (id, _server) = UniqueId::create(Some("127.0.0.1")).unwrap();
        joins(&How::Id(Box::new(id.clone())), 3);
        let mut one = launch(0, 2, &How::Id(Box::new(id.clone())));
        assert_eq!(connect(&one, soon()).unwrap().secret, *id.secret());
        one.store = How::Alone;
        assert_ne!(connect(&one, soon()).unwrap().secret, *id.secret());
    }

    #[test]
    fn a_port_taken_from_rank_0_is_named_with_what_to_set() {
        let server = ServerHandle::start(([127, 0, 0, 1], 0).into(), None).unwrap();
        let store = How::Rank0 { host: "127.0.0.1".to_owned(), port: server.port() };
        let error = connect(&launch(0, 2, &store), soon()).err().expect("the port is taken");
        for part in ["rank 0 of 2", "UNISONO_PORT", &server.port().to_string(), "in use"] {
            assert!(error.text().contains(part), "{error}");
        }
    }

    #[test]
    fn who_can_neither_serve_nor_find_a_server_hears_why_it_cannot_serve() {
        // Bound but not listening, and not to be shared: a server gets no port, a client nobody.
        let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        taken.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let port = taken.local_addr().unwrap().as_socket().unwrap().port();
        let store = How::Tcp { host: "127.0.0.1".to_owned(), port };
        let deadline = Deadline::after(Duration::from_millis(50));
        let error = connect(&launch(0, 2, &store), deadline).err().expect("there is nobody");
        assert_eq!(error.status(), Status::Timeout);
        for part in ["cannot serve a tcp store", "in use", "Connection refused"] {
            assert!(error.text().contains(part), "{error}");
        }
    }

    #[test]
    fn a_name_that_nobody_knows_yet_keeps_rank_0_from_nothing() {
        let host = "no-such-host.invalid".to_owned();
        let (_place, address) = reserved();
        let store = How::Rank0 { host: host.clone(), port: address.port() };
        let first = connect(&launch(0, 2, &store), soon()).expect("it serves everywhere");
        let store = How::Rank0 { host: "127.0.0.1".to_owned(), port: address.port() };
        let second = connect(&launch(1, 2, &store), soon()).expect("the store is there");
        assert!(first.secret == second.secret);
        // Whether the store is to be here the name says: it is looked up again until the deadline.
        let (_place, address) = reserved();
        let store = How::Tcp { host, port: address.port() };
        let deadline = Deadline::after(Duration::from_millis(50));
        let error = connect(&launch(0, 2, &store), deadline).err().expect("there is nobody");
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("cannot resolve 'no-such-host.invalid'"), "{error}");
    }

    #[test]
    fn ranks_that_disagree_are_told_so() {
        let (a, b) = (SecretKey::new([1; 32]), SecretKey::new([2; 32]));
        for (first, second, size, part) in [
            (None, None, 3, "rank 0 has 2 ranks in its job, rank 1 has 3"),
            (Some(&a), Some(&b), 2, "rank 1 differs from rank 0's"),
            (Some(&a), None, 2, "set on rank 0 but not on rank 1"),
            (None, Some(&a), 2, "set on rank 1 but not on rank 0"),
        ] {
            let scratch = Scratch::new();
            let store = How::File(scratch.path().to_owned());
            let zero = Launch { secret: first.cloned(), ..launch(0, 2, &store) };
            let one = Launch { secret: second.cloned(), ..launch(1, size, &store) };
            let _joined = connect(&zero, soon()).unwrap();
            let joined = connect(&one, soon()).expect("it finds where it can say so");
            let error = joined.fits.expect_err("they disagree");
            assert_eq!(error.status(), Status::Mismatch);
            assert!(error.text().contains(part), "{error}");
        }
    }

    #[test]
    fn a_secret_by_the_environment_guards_the_tcp_store_and_is_the_jobs() {
        let (_place, address) = reserved();
        let secret = SecretKey::from_text("correct horse battery staple");
        let store = How::Rank0 { host: "127.0.0.1".to_owned(), port: address.port() };
        let zero = Launch { secret: Some(secret.clone()), ..launch(0, 2, &store) };
        let first = connect(&zero, soon()).unwrap();
        let second = connect(&Launch { rank: 1, ..zero.clone() }, soon()).unwrap();
        assert_eq!([first.secret, second.secret], [secret.clone(), secret]);
        let error = connect(&launch(1, 2, &store), soon()).err().expect("it has no secret");
        assert!(error.text().contains("asks for a secret"), "{error}");
    }

    #[test]
    fn a_rank_0_that_never_comes_is_a_timeout() {
        let scratch = Scratch::new();
        let (_place, address) = reserved();
        for store in [
            How::File(scratch.path().to_owned()),
            How::Rank0 { host: "127.0.0.1".to_owned(), port: address.port() },
        ] {
            let deadline = Deadline::after(Duration::from_millis(50));
            let error = connect(&launch(1, 2, &store), deadline).err().expect("there is nobody");
            assert_eq!(error.status(), Status::Timeout);
            assert!(error.text().contains("rank 1 of 2"), "{error}");
        }
    }

    #[test]
    fn the_launcher_is_the_first_ancestor_without_a_rank() {
        // Our parent was not started with a variable of this name.
        let parent = std::os::unix::process::parent_id();
        assert!(launcher_process("UNISONO_TEST_RANK").starts_with(&format!("{parent}-")));
        // A child that carries the variable is passed over: its parent is us.
        let mut child =
            std::process::Command::new("sleep").arg("30").env("UNISONO_TEST_RANK", "3").spawn().unwrap();
        // The new environment is there once the program has been started, shortly after the fork.
        let found = (0..2000).find_map(|_| {
            thread::sleep(Duration::from_millis(1));
            parent_with_rank(child.id(), "UNISONO_TEST_RANK")
        });
        let other = parent_with_rank(child.id(), "UNISONO_TEST");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((found, other), (Some(std::process::id()), None));
        let name = local_job("a@b/c d", "UNISONO_TEST_RANK");
        assert!(name.ends_with("-a-b-c-d"), "{name}");
        assert!(!launcher_is_gone(&name), "{name}");
        for (name, is_gone) in [
            (format!("job-{parent}-1-a"), true),
            (format!("job-{parent}-1"), true),
            (format!("job-{parent}-0"), false),
            (format!("job-{parent}"), false),
            ("job-".to_owned(), false),
            ("other".to_owned(), false),
        ] {
            assert_eq!(launcher_is_gone(&name), is_gone, "{name}");
        }
    }
}
