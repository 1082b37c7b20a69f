//! `unisono-run` as its users meet it: real processes, real signals.
#![allow(missing_docs)]

mod ends;
#[path = "../support/not_run.rs"]
mod not_run;
mod signals;
mod starting;
mod streams;
#[path = "../support/unshared.rs"]
mod unshared;

use std::io::{BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Far beyond what a busy machine needs; a test that waits so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A launcher that a failing test does not leave behind.
struct Launcher {
    child: Child,
}

impl Launcher {
    fn start(arguments: &[&str]) -> Launcher {
        Launcher::start_with(arguments, Stdio::null())
    }

    fn start_with(arguments: &[&str], stdin: Stdio) -> Launcher {
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
        command.args(arguments).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Shells have what they start in the background ignore these, and nohup the last, which is inherited.
        // SAFETY: only makes system calls.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                libc::signal(libc::SIGQUIT, libc::SIG_DFL);
                libc::signal(libc::SIGHUP, libc::SIG_DFL);
                Ok(())
            });
        }
        Launcher { child: command.spawn().unwrap() }
    }

    fn signal(&self, signal: i32) {
        send(self.child.id(), signal);
    }

    fn stdout(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.child.stdout.take().unwrap())
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the launcher ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Waits for the end and gives what it said on standard error.
    fn complaint(&mut self) -> (ExitStatus, String) {
        let status = self.wait();
        let mut complaint = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
        (status, complaint)
    }

    fn output(mut self) -> Output {
        let read = |mut from: Box<dyn Read + Send>| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                from.read_to_end(&mut bytes).unwrap();
                bytes
            })
        };
        let stdout = read(Box::new(self.child.stdout.take().unwrap()));
        let stderr = read(Box::new(self.child.stderr.take().unwrap()));
        let status = self.wait();
        Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // Without effect on one that has ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("run-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn join(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(arguments: &[&str]) -> Output {
    Launcher::start(arguments).output()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn send(pid: u32, signal: i32) {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0, "signal {signal} to {pid}");
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited for {PATIENCE:?} until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The letter that the kernel gives for a process's state; `None` when there is no such process.
fn state(pid: &str) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn gone(pid: &str) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// What each rank printed, prefixes taken off.
fn by_rank(output: &Output, ranks: usize) -> Vec<Vec<&str>> {
    let mut lines = vec![Vec::new(); ranks];
    for line in text(&output.stdout).lines() {
        let (rank, rest) = line.strip_prefix('[').and_then(|line| line.split_once("] ")).expect(line);
        lines[rank.parse::<usize>().unwrap()].push(rest);
    }
    lines
}
