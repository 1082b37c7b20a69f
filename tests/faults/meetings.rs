//! Ranks that cannot meet, and what a meeting leaves.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::processes::{Job, Report, Seat, report};
use crate::support::{PATIENCE, in_time, options};
use socket2::{Domain, Socket, Type};
use unisono::communicator::{Context, Options, Rendezvous};
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
use unisono::rendezvous::file::FileStore;
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::id::UniqueId;
use unisono::rendezvous::store::Store;
use unisono::rendezvous::tcp::TcpStore;
use unisono::rendezvous::tcp_server::ServerHandle;

/// Under what launcher the ranks of a test seem to run.
const LAUNCHER: &str = "TEST_LAUNCHER";

/// What starts one job's processes, with a `TMPDIR` of its own or a port.
struct Launcher {
    folder: PathBuf,
    environment: Vec<(&'static str, String)>,
    /// Nobody else gets the port.
    _port: Option<Socket>,
}

impl Launcher {
    fn new(name: &'static str, test: &str) -> Launcher {
        let folder = std::env::temp_dir().join(format!("unisono-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let mut environment = vec![(LAUNCHER, name.to_owned())];
        let port = (name == "torchrun").then(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            socket.set_reuse_address(true).expect("an option");
            socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
            let port =
                socket.local_addr().ok().and_then(|address| address.as_socket()).expect("a port").port();
            environment.push(("MASTER_ADDR", "127.0.0.1".into()));
            environment.push(("MASTER_PORT", "1".into()));
            environment.push(("UNISONO_PORT", port.to_string()));
            socket
        });
        environment.push(("TMPDIR", folder.to_str().expect("a name").to_owned()));
        Launcher { folder, environment, _port: port }
    }

    fn start(&self, scenario: &str, size: u32) -> Job {
        let more: Vec<_> = self.environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Job::start_with(scenario, size, "shm", &more)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// How this rank comes to a context by the environment.
fn by_environment(seat: &Seat, timeout: u64) -> Options {
    let names = match std::env::var(LAUNCHER).as_deref() {
        Ok("torchrun") => ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
        _ => [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    };
    for (name, value) in names.into_iter().zip([seat.rank, seat.size, seat.rank, seat.size]) {
        // SAFETY: nothing of this process looks at its environment meanwhile: its one test has just begun.
        unsafe { std::env::set_var(name, value.to_string()) };
    }
    let timeout = Duration::from_secs(timeout);
    Options { rendezvous: Rendezvous::Environment, timeout, ..seat.options("") }
}

/// Comes to a context, tells how that ends, and ends the process as soon.
fn fail(options: Options) {
    match Context::create(options) {
        Ok(_) => report("met"),
        Err(error) => report(format_args!("failed {:?} {error}", error.status())),
    }
    std::process::exit(0);
}

fn store_of(seat: &Seat) -> Arc<dyn Store> {
    match seat.options("").rendezvous {
        Rendezvous::Store(store) => store,
        _ => unreachable!("a seat has a store"),
    }
}

/// The last comes when rank 1 is dead.
pub(crate) fn die(seat: &Seat) {
    if seat.rank + 1 == seat.size {
        store_of(seat).get("rank 1 is dead", Deadline::after(PATIENCE)).expect("the test goes on");
    }
    fail(seat.options(""));
}

#[test]
fn all_are_told_which_rank_has_died_while_they_met() {
    in_time(|| {
        let mut job = Job::start("die in the meeting", 8, "shm");
        let folder = format!("unisono-{}-die in the meeting-shm", std::process::id());
        let store = FileStore::open(std::env::temp_dir().join(folder)).expect("the job's store");
        for rank in 0..7 {
            store.get(&format!("default/0/rank/{rank}"), Deadline::after(PATIENCE)).expect("it has come");
        }
        // Those that have come link as far as they can without the last.
        std::thread::sleep(Duration::from_millis(200));
        let dead = format!("rank 1 (host {}, pid {})", hostname(), job.pid(1));
        let killed = Instant::now();
        job.signal(1, libc::SIGKILL);
        job.end(1);
        let are_told = |ranks: &[u32]| {
            let failed = job.await_all(ranks, "failed");
            for Report { rank, line, .. } in &failed {
                assert!(line.starts_with("PeerFailed") && line.contains(&dead), "rank {rank}: {line}");
            }
            failed.iter().map(|failed| failed.at - killed).max().unwrap_or_default()
        };
        let took = are_told(&[0, 2, 3, 4, 5, 6]);
        store.set("rank 1 is dead", &[], Deadline::after(PATIENCE)).expect("the last comes");
        are_told(&[7]);
        took
    });
}

/// Where the test serves a store.
const PORT: &str = "TEST_PORT";

/// A store in which rank 1 does not come to say where it is.
struct Short(TcpStore);

impl Store for Short {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        if key.ends_with("/rank/1") {
            report("comes");
            std::thread::sleep(PATIENCE);
        }
        self.0.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }

    fn try_get(&self, key: &str, deadline: Deadline) -> Result<Option<Vec<u8>>> {
        self.0.try_get(key, deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        self.0.add(key, amount, deadline)
    }

    fn will(&self, key: &str, refusal: &str, notice: &[u8], deadline: Deadline) -> Result<()> {
        self.0.will(key, refusal, notice, deadline)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

pub(crate) fn die_before_joining(seat: &Seat) {
    let port = std::env::var(PORT).expect("a port").parse().expect("a number");
    let soon = Deadline::after(PATIENCE);
    let store = TcpStore::connect("127.0.0.1", port, None, soon).expect("the test serves");
    let rendezvous = Rendezvous::Store(Arc::new(Short(store)));
    fail(Options { rendezvous, timeout: PATIENCE, ..seat.options("") });
}

#[test]
fn all_are_told_of_a_rank_that_is_killed_before_the_others_know_where_it_is() {
    in_time(|| {
        let server = ServerHandle::start((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a server");
        let port = server.port().to_string();
        let mut job = Job::start_with("die before joining", 4, "shm,tcp", &[(PORT, &port)]);
        job.await_all(&[1], "comes");
        let dead = format!("rank 1 of 4 (host {}, pid {}) has gone", hostname(), job.pid(1));
        let killed = Instant::now();
        job.signal(1, libc::SIGKILL);
        job.end(1);
        let failed = job.await_all(&[0, 2, 3], "failed");
        for Report { rank, line, .. } in &failed {
            assert!(line.starts_with("PeerFailed") && line.contains(&dead), "rank {rank}: {line}");
        }
        failed.iter().map(|failed| failed.at - killed).max().unwrap_or_default()
    });
}

/// Rank 0 serves the id. The last never comes.
pub(crate) fn serve_an_id(seat: &Seat) {
    let (store, soon) = (store_of(seat), Deadline::after(PATIENCE));
    let mut served = None;
    if seat.rank == 0 {
        let (id, server) = UniqueId::create(Some("127.0.0.1")).expect("an id");
        served = Some(server);
        store.set("id", &id.to_bytes(), soon).expect("the others read it");
    }
    if seat.rank + 1 == seat.size {
        std::thread::sleep(PATIENCE);
        return;
    }
    let id = store.get("id", soon).expect("rank 0 has made one").try_into().expect("an id");
    report("comes");
    fail(Options { rendezvous: Rendezvous::Id(id), timeout: PATIENCE, ..seat.options("") });
    drop(served);
}

#[test]
fn who_waits_for_a_late_rank_is_told_when_the_process_that_serves_the_id_has_died() {
    for size in [3, 4, 6] {
        in_time(|| {
            let job = Job::start("serve an id", size, "tcp");
            let come: Vec<u32> = (0..size - 1).collect();
            job.await_all(&come, "comes");
            // They link as far as they can without the last.
            std::thread::sleep(Duration::from_millis(300));
            let dead = format!("pid {}", job.pid(0));
            let killed = Instant::now();
            job.signal(0, libc::SIGKILL);
            let failed = job.await_all(&come[1..], "failed");
            for Report { rank, line, .. } in &failed {
                // Who is linked with rank 0 knows that it is dead, who waits in its store that this is lost.
                let named = line.contains(&dead) || line.contains("lost the tcp store");
                assert!(line.starts_with("PeerFailed") && named, "rank {rank} of {size}: {line}");
            }
            failed.iter().map(|failed| failed.at - killed).max().unwrap_or_default()
        });
    }
}

fn hostname() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").expect("a name").trim().to_owned()
}

#[test]
fn who_cannot_join_is_named_to_those_whose_calls_are_right() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let join = &|rank, interface: &str| {
        let options = options(rank, 2, store.clone(), "tcp");
        Context::create(Options { interface: Some(interface.into()), ..options }).map(drop)
    };
    let [first, second] = std::thread::scope(|scope| {
        let ranks =
            [(0, "127.0.0.1"), (1, "nosuch0")].map(|(rank, name)| scope.spawn(move || join(rank, name)));
        ranks.map(|rank| rank.join().expect("a rank").expect_err("they cannot meet"))
    });
    assert_eq!(second.status(), Status::InvalidArgument, "{second}");
    assert_eq!(first.status(), Status::PeerFailed, "{first}");
    for words in ["rank 1 of 2 (host ", "nosuch0"] {
        assert!(first.text().contains(words) && second.text().contains(words), "{first}; {second}");
    }
}

#[test]
fn ranks_that_come_twice_and_sizes_that_differ_are_told_at_once() {
    let twice = ["two processes have come to 'default' as rank 0 of 2"; 2];
    for (ranks, words) in [([(0, 2), (0, 2)], twice), ([(0, 2), (1, 3)], ["one of 2", "one of 3"])] {
        let (id, _server) = UniqueId::create(Some("127.0.0.1")).expect("an id");
        let join = &|(rank, size)| {
            let options = options(rank, size, Arc::new(HashStore::new()), "tcp");
            Context::create(Options { rendezvous: Rendezvous::Id(id.to_bytes()), ..options }).map(drop)
        };
        let errors = std::thread::scope(|scope| {
            let ranks = ranks.map(|rank| scope.spawn(move || join(rank)));
            ranks.map(|rank| rank.join().expect("a rank").expect_err("they cannot meet"))
        });
        for error in &errors {
            assert_ne!(error.status(), Status::Timeout, "{error}");
            assert!(words.iter().all(|words| error.text().contains(words)), "{error}");
        }
    }
}

/// Rank 2 never comes. Rank 0 has less patience than the last, and ends as soon as it has failed.
pub(crate) fn never_come(seat: &Seat) {
    match seat.rank {
        2 => report("stays away"),
        3 => fail(by_environment(seat, 60)),
        _ => fail(by_environment(seat, 5)),
    }
}

#[test]
fn who_waits_when_rank_0_gives_up_and_ends_is_told_who_is_missing() {
    for launcher in ["torchrun", "mpirun"] {
        let launcher = Launcher::new(launcher, "never");
        let job = launcher.start("never come", 4);
        for failed in job.await_all(&[0, 1, 3], "failed") {
            let text = &failed.line;
            assert!(text.starts_with("Timeout") && text.contains("rank 2"), "rank {}: {text}", failed.rank);
        }
    }
}

/// Rank 0 comes when the others have looked for it for long, fails, and ends.
pub(crate) fn come_last_and_fail(seat: &Seat) {
    let mut options = by_environment(seat, 60);
    if seat.rank == 0 {
        std::thread::sleep(Duration::from_secs(2));
        (options.transports, options.interface) = (Some("tcp".into()), Some("nosuch0".into()));
    }
    fail(options);
}

#[test]
fn a_rank_0_that_fails_at_once_and_ends_is_heard_by_those_who_waited_for_it() {
    let launcher = Launcher::new("mpirun", "last");
    let job = launcher.start("come last and fail", 3);
    for failed in job.await_all(&[1, 2], "failed") {
        let text = &failed.line;
        let clear = text.contains("rank 0 of 3 (host ") && text.contains("nosuch0");
        assert!(text.starts_with("PeerFailed") && clear, "rank {}: {text}", failed.rank);
    }
}

/// Rank 1 calls wrongly at first.
pub(crate) fn call_wrongly(seat: &Seat) {
    if seat.rank == 1 {
        let wrong = Options { transports: Some("pigeons".into()), ..by_environment(seat, 60) };
        let error = Context::create(wrong).err().expect("there are none");
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    }
    let context = Context::create(by_environment(seat, 20)).expect("the ranks meet");
    all_have_met(seat);
    drop(context);
    report("met");
}

#[test]
fn a_rank_that_has_called_wrongly_may_try_again() {
    for launcher in ["torchrun", "mpirun"] {
        let launcher = Launcher::new(launcher, "wrongly");
        launcher.start("call wrongly", 2).await_all(&[0, 1], "met");
    }
}

/// What of rank 1's environment is to be wrong, or other than rank 0's.
const ODD: &str = "TEST_ODD";

/// Rank 1 has an environment that no other try mends.
pub(crate) fn environment_differs(seat: &Seat) {
    let options = by_environment(seat, 60);
    if seat.rank == 1 {
        for odd in std::env::var(ODD).expect("what is odd").split(' ') {
            let (name, value) = odd.split_once('=').expect("a variable");
            // SAFETY: as in `by_environment`.
            unsafe { std::env::set_var(name, value) };
        }
    }
    fail(options);
}

#[test]
fn what_is_wrong_with_the_environment_of_one_rank_the_others_are_told() {
    let sizes = "OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3";
    for (launcher, odd, status, words) in [
        ("mpirun", "UNISONO_CMA=9", "PeerFailed", ["rank 1 of 2 (host ", "UNISONO_CMA=9"]),
        (
            "torchrun",
            "UNISONO_TCP_STREAMS=none",
            "PeerFailed",
            ["rank 1 of 2 (host ", "UNISONO_TCP_STREAMS=none"],
        ),
        // Who comes first tells the numbers.
        ("mpirun", sizes, "Mismatch", ["rank 1", "3"]),
        ("torchrun", "WORLD_SIZE=3", "Mismatch", ["rank 1", "3"]),
        (
            "mpirun",
            "UNISONO_SECRET=correct_horse_battery",
            "Mismatch",
            ["rank 1 of 2 (host ", "UNISONO_SECRET"],
        ),
    ] {
        let mut launcher = Launcher::new(launcher, "differs");
        launcher.environment.push((ODD, odd.to_owned()));
        in_time(|| {
            let failed = launcher.start("environment differs", 2).await_all(&[0, 1], "failed");
            let [zero, one] = [&failed[0], &failed[1]];
            let text = &zero.line;
            assert!(text.starts_with(status), "{odd}: {text}");
            assert!(words.iter().all(|words| text.contains(words)), "{odd}: {text}");
            zero.at.saturating_duration_since(one.at)
        });
    }
}

/// Nobody goes on before the other has met.
fn all_have_met(seat: &Seat) {
    let store = store_of(seat);
    store.set(&format!("{} has met", seat.rank), &[], Deadline::after(PATIENCE)).expect("it is told");
    store.get(&format!("{} has met", 1 - seat.rank), Deadline::after(PATIENCE)).expect("the other has met");
}

/// As a program that calls exit without destroying anything.
pub(crate) fn exit_at_once(seat: &Seat) {
    let context = Context::create(by_environment(seat, 60)).expect("the ranks meet");
    all_have_met(seat);
    std::mem::forget(context);
    // SAFETY: ends the process without running anything more.
    unsafe { libc::_exit(0) };
}

#[test]
fn a_job_on_one_host_leaves_nothing_and_removes_what_killed_ones_have_left() {
    let launcher = Launcher::new("mpirun", "nothing");
    // SAFETY: takes no pointers.
    let user = unsafe { libc::geteuid() };
    let all = launcher.folder.join(format!("unisono-{user}"));
    // The kernel gives numbers up to 2²² to processes.
    let (left, other) = (all.join("job-9999999-5"), all.join("other-9999999-5"));
    for job in [&left, &other] {
        fs::create_dir_all(job.join("run-0123456789abcdef")).expect("a run");
        fs::write(job.join("leader"), "run-0123456789abcdef").expect("its leader");
    }
    fs::set_permissions(&all, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("permissions");
    launcher.start("exit after the meeting", 2).all_end_well(&[0, 1]);
    let found: Vec<_> =
        fs::read_dir(&all).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    assert_eq!(found, [other]);
}

/// A child joins again when its parent has ended what it had.
pub(crate) fn fork_and_join(seat: &Seat) {
    let context = Context::create(by_environment(seat, 60)).expect("the ranks meet");
    let (mut is_over, ends) = std::io::pipe().expect("a pipe");
    // SAFETY: the child makes a context of its own, which unisono promises to be possible, and leaves by
    // _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(ends);
        let _ = std::io::Read::read(&mut is_over, &mut [0]);
        let timeout = Duration::from_secs(20);
        let made =
            Context::create(Options { rendezvous: Rendezvous::Environment, timeout, ..seat.options("") });
        let code = match made.map(|made| made.size()) {
            Ok(2) => 0,
            Ok(_) => 1,
            Err(error) => {
                report(format_args!("child {error}"));
                2
            }
        };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    drop(context);
    drop(ends);
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child has met the other");
    report("done");
}

#[test]
fn a_forked_child_of_rank_0_joins_anew_when_the_parents_store_is_gone() {
    let launcher = Launcher::new("torchrun", "fork");
    let mut job = launcher.start("fork and join", 2);
    job.await_all(&[0, 1], "done");
    job.all_end_well(&[0, 1]);
}
