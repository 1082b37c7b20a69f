//! Ranks as processes: the test program starts itself, a process a rank, and listens to what they report.
//!
//! A test file that uses this has one test named `rank`, which calls [`enter`] and returns when the process
//! was not started by [`Job::start`].

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use unisono::communicator::Options;
use unisono::rendezvous::file::FileStore;

use super::PATIENCE;

/// Marks a report among the other lines of a test program.
const MARK: &str = "@report ";

const SCENARIO: &str = "TEST_SCENARIO";

/// What a rank's process knows of its job.
pub(crate) struct Seat {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) transports: String,
    directory: PathBuf,
}

impl Seat {
    /// How this rank comes to a context named `name`.
    pub(crate) fn options(&self, name: &str) -> Options {
        let store = Arc::new(FileStore::open(&self.directory).expect("the store's directory"));
        Options { name: name.into(), ..super::options(self.rank, self.size, store, &self.transports) }
    }
}

/// Tells the test that started this process.
pub(crate) fn report(line: impl std::fmt::Display) {
    let text = format!("\n{MARK}{}\n", line.to_string().replace('\n', " "));
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).expect("the test listens");
}

/// What a rank does in a process of its own, by name.
pub(crate) type Scenario = (&'static str, fn(&Seat));

/// Runs the scenario that this process was started for, if it was started for one.
pub(crate) fn enter(scenarios: &[Scenario]) {
    let Ok(name) = std::env::var(SCENARIO) else { return };
    let variable = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set"));
    let number = |name| variable(name).parse().unwrap_or_else(|_| panic!("{name} is a number"));
    let seat = Seat {
        rank: number("TEST_RANK"),
        size: number("TEST_SIZE"),
        transports: variable("TEST_TRANSPORTS"),
        directory: variable("TEST_DIRECTORY").into(),
    };
    std::panic::set_hook(Box::new(|info| report(format_args!("panic: {info}"))));
    let (_, body) = scenarios.iter().find(|(known, _)| *known == name).expect("a scenario");
    body(&seat);
}

/// One line of one rank.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) rank: u32,
    pub(crate) line: String,
    pub(crate) at: Instant,
}

/// The processes of a test. Those that still run are killed when it ends.
pub(crate) struct Job {
    children: Vec<Child>,
    reports: Receiver<Report>,
    /// What nobody has asked for yet.
    early: RefCell<VecDeque<Report>>,
    directory: PathBuf,
    what: String,
}

impl Job {
    /// Starts `size` processes that run `scenario`.
    pub(crate) fn start(scenario: &str, size: u32, transports: &str) -> Job {
        Job::start_with(scenario, size, transports, &[])
    }

    /// [`Job::start`] with more in the environment.
    pub(crate) fn start_with(scenario: &str, size: u32, transports: &str, more: &[(&str, &str)]) -> Job {
        let unique = format!("unisono-{}-{scenario}-{transports}", std::process::id());
        let directory = std::env::temp_dir().join(unique);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a directory");
        let (tell, reports) = channel();
        let children =
            (0..size).map(|rank| start(scenario, rank, size, transports, &directory, &tell, more)).collect();
        let what = format!("{scenario} over {transports}");
        Job { children, reports, early: RefCell::default(), directory, what }
    }

    /// The process of a rank.
    pub(crate) fn pid(&self, rank: u32) -> u32 {
        self.children[rank as usize].id()
    }

    /// Sends a signal to a rank.
    pub(crate) fn signal(&self, rank: u32, signal: i32) {
        // SAFETY: kill takes numbers only; the child is not reaped before the job ends or `end` is called for
        // it, so the number is its own.
        let answer = unsafe { libc::kill(self.pid(rank) as i32, signal) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    }

    fn next(&self) -> Report {
        self.reports
            .recv_timeout(2 * PATIENCE)
            .unwrap_or_else(|_| panic!("{}: nothing is reported any more", self.what))
    }

    /// Waits until each of `ranks` has reported a line that begins with `start`. The lines, without it.
    pub(crate) fn await_all(&self, ranks: &[u32], start: &str) -> Vec<Report> {
        let mut found: Vec<Report> = Vec::new();
        let mut early = std::mem::take(&mut *self.early.borrow_mut());
        while found.len() < ranks.len() {
            let mut report = early.pop_front().unwrap_or_else(|| self.next());
            assert!(
                !report.line.starts_with("panic"),
                "{}: rank {}: {}",
                self.what,
                report.rank,
                report.line
            );
            let wanted = ranks.contains(&report.rank) && found.iter().all(|other| other.rank != report.rank);
            match report.line.strip_prefix(start).filter(|_| wanted) {
                Some(rest) => {
                    report.line = rest.trim().to_owned();
                    found.push(report);
                }
                None => self.early.borrow_mut().push_back(report),
            }
        }
        self.early.borrow_mut().extend(early);
        found.sort_by_key(|report| report.rank);
        found
    }

    /// Waits for the end of a rank's process.
    pub(crate) fn end(&mut self, rank: u32) -> ExitStatus {
        let child = &mut self.children[rank as usize];
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < until, "{}: rank {rank} does not end", self.what);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the good end of these ranks' processes.
    pub(crate) fn all_end_well(&mut self, ranks: &[u32]) {
        for &rank in ranks {
            let status = self.end(rank);
            assert!(status.success(), "{}: rank {rank} ends with {status}", self.what);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It may have ended long ago.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn start(
    scenario: &str,
    rank: u32,
    size: u32,
    transports: &str,
    directory: &std::path::Path,
    tell: &Sender<Report>,
    more: &[(&str, &str)],
) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "rank", "--nocapture", "--test-threads=1"])
        .env(SCENARIO, scenario)
        .env("TEST_RANK", rank.to_string())
        .env("TEST_SIZE", size.to_string())
        .env("TEST_TRANSPORTS", transports)
        .env("TEST_DIRECTORY", directory)
        .env("RUST_BACKTRACE", "0")
        .envs(more.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let tell = tell.clone();
    std::thread::spawn(move || {
        for line in lines.lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix(MARK) {
                let report = Report { rank, line: line.to_owned(), at: Instant::now() };
                if tell.send(report).is_err() {
                    return;
                }
            }
        }
    });
    child
}
