//! Other programs, measured in the same run.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io::{Read, Result as IoResult};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use super::operation;
use super::options::Command;
use crate::cuda::queues;
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};
use crate::rendezvous::environment::Launcher;
use crate::signature::Kind;
use crate::sys::child::{self, Ends, Readiness};

/// What ranks are told of their hosts by, with `--hosts`; libraries with NCCL's ABI have a name of their own.
pub(super) const HOST_NAMES: [&str; 2] = ["UNISONO_HOST", "NCCL_HOSTID"];

/// One time that a peer reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Peer {
    pub(super) kind: Kind,
    pub(super) bytes: u64,
    /// Microseconds.
    pub(super) p50: f64,
    /// Microseconds.
    pub(super) p99: f64,
}

impl Peer {
    /// Runs the program once, to its end, and reads what it reports. `hosts`: our ranks have been told their
    /// hosts.
    pub(super) fn run(command: &Command, hosts: bool, timeout: Duration) -> Result<Vec<Peer>> {
        let deadline = Deadline::after(timeout);
        let mut shell = Process::new("sh");
        shell.arg("-c").arg(&command.command).stdin(Stdio::null()).stdout(Stdio::piped());
        // It may be a job with ranks of its own, and is no rank of ours.
        for name in std::env::vars_os().map(|(name, _)| name) {
            if name.to_str().is_some_and(|name| belongs_to_a_rank(name, hosts)) {
                shell.env_remove(name);
            }
        }
        if sets_queues(|name| std::env::var_os(name)) {
            shell.env_remove(queues::VARIABLE);
        }
        let system = |cause| Error::system(format!("peer '{}' cannot be run", command.name), cause);
        let guard = Guard::start().map_err(system)?;
        let mut child = shell.process_group(guard.group()).spawn().map_err(system)?;
        let ended = wait(&mut child, deadline);
        // If it runs on, it does not any more; nor does anything that it has started.
        drop(guard);
        let status = child.wait().map_err(system)?;
        let Some(text) = ended.map_err(system)? else {
            fail!(
                Timeout,
                "peer '{}' has not ended within {timeout:?}; give it more by --timeout",
                command.name
            )
        };
        if !status.success() {
            fail!(InvalidUsage, "peer '{}' failed ({status}): {}", command.name, command.command);
        }
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        lines
            .map(|line| Peer::parse(line).map_err(|error| error.context(format!("peer '{}'", command.name))))
            .collect()
    }

    fn parse(line: &str) -> Result<Peer> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, bytes, p50, p99] = words[..] else {
            fail!(InvalidUsage, "'{line}' is not \"operation bytes p50_us p99_us\"");
        };
        let time = |text: &str| text.parse().ok().filter(|time: &f64| time.is_finite() && *time > 0.0);
        match (operation::from_name(name), bytes.parse(), time(p50), time(p99)) {
            (Some(kind), Ok(bytes), Some(p50), Some(p99)) => Ok(Peer { kind, bytes, p50, p99 }),
            _ => fail!(InvalidUsage, "'{line}' is not \"operation bytes p50_us p99_us\""),
        }
    }
}

/// Leads a process group, and has all of it killed when it is dropped, or when this process ends, however it
/// does: whoever interrupts this process need not reach the group.
struct Guard(Child);

impl Guard {
    fn start() -> IoResult<Guard> {
        let mut shell = Process::new("sh");
        // Nothing comes but the end: the other side of the pipe is this process's alone.
        shell.args(["-c", "read -r _; kill -KILL 0"]).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Guard)
    }

    fn group(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = child::signal_group(&self.0, libc::SIGKILL);
        let _ = self.0.wait();
    }
}

/// What the child writes until its end; none if the deadline comes first.
fn wait(child: &mut Child, deadline: Deadline) -> IoResult<Option<String>> {
    let mut ends = Ends::new()?;
    ends.watch(child, 0)?;
    let mut text = Vec::new();
    if let Some(mut stdout) = child.stdout.take() {
        let mut piece = [0; 4096];
        loop {
            if !child::poll(&[(stdout.as_fd(), Readiness::Read)], deadline)?[0] {
                return Ok(None);
            }
            match stdout.read(&mut piece)? {
                0 => break,
                len => text.extend_from_slice(&piece[..len]),
            }
        }
    }
    let ended = child::poll(&[(ends.as_fd(), Readiness::Read)], deadline)?[0];
    Ok(ended.then(|| String::from_utf8_lossy(&text).into_owned()))
}

fn belongs_to_a_rank(name: &str, hosts: bool) -> bool {
    let ours = [
        "UNISONO_RANK",
        "UNISONO_SIZE",
        "UNISONO_ID",
        "UNISONO_LOCAL_RANK",
        "UNISONO_LOCAL_SIZE",
        queues::SET_BY_LAUNCHER,
    ];
    let theirs = ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let launchers = [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Mpich, Launcher::Slurm]
        .map(Launcher::rank_variable);
    ours.contains(&name)
        || hosts && HOST_NAMES.contains(&name)
        || theirs.contains(&name)
        || launchers.contains(&name)
        || ["OMPI_", "PMI_", "PMIX_"].iter().any(|prefix| name.starts_with(prefix))
}

/// Whether the queues of a device are as many as `unisono-run` has said: not so where somebody has said
/// otherwise since.
fn sets_queues(get: impl Fn(&str) -> Option<OsString>) -> bool {
    let set = get(queues::SET_BY_LAUNCHER);
    set.is_some() && set == get(queues::VARIABLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(command: &str) -> Result<Vec<Peer>> {
        let command = Command { name: "stub".into(), command: command.into() };
        Peer::run(&command, false, Duration::from_secs(60))
    }

    #[test]
    fn what_our_ranks_were_told_is_not_for_peers() {
        for name in ["UNISONO_RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE"] {
            assert!(belongs_to_a_rank(name, false) && belongs_to_a_rank(name, true), "{name}");
        }
        for name in HOST_NAMES {
            assert!(!belongs_to_a_rank(name, false) && belongs_to_a_rank(name, true), "{name}");
        }
        assert!(!belongs_to_a_rank("UNISONO_TRANSPORT", true) && !belongs_to_a_rank(queues::VARIABLE, true));
        let told = |set: Option<&str>, has: Option<&str>| {
            sets_queues(|name| if name == queues::VARIABLE { has } else { set }.map(OsString::from))
        };
        assert!(told(Some("32"), Some("32")));
        assert!(!told(None, Some("32")) && !told(Some("32"), Some("1")) && !told(None, None));
    }

    #[test]
    fn what_a_peer_prints_is_read() {
        let peers = run("echo allreduce 1024 3.5 7; echo; echo barrier 0 1 2").expect("it is in order");
        assert_eq!(peers[0], Peer { kind: Kind::Allreduce, bytes: 1024, p50: 3.5, p99: 7.0 });
        assert_eq!((peers.len(), peers[1].kind), (2, Kind::Barrier));
    }

    #[test]
    fn a_peer_that_fails_or_babbles_is_named() {
        let told = |command| run(command).expect_err("it is not in order").to_string();
        assert!(told("exit 3").contains("peer 'stub' failed"));
        assert!(told("echo hello").contains("peer 'stub': 'hello' is not"));
        assert!(told("echo allreduce 8 -1 1").contains("allreduce 8 -1 1"));
    }

    #[test]
    fn a_peer_that_does_not_end_is_ended() {
        let command = Command { name: "sleeper".into(), command: "exec sleep 100".into() };
        let error = Peer::run(&command, false, Duration::from_millis(100)).expect_err("it sleeps");
        assert!(error.text().contains("'sleeper' has not ended"), "{error}");
    }

    #[test]
    fn what_a_peer_has_started_ends_with_it() {
        // Found by what no other process is told.
        let told = format!("1000.{}", std::process::id());
        let runs = || {
            let processes = std::fs::read_dir("/proc").expect("the kernel's list");
            let lines =
                processes.filter_map(|process| std::fs::read(process.ok()?.path().join("cmdline")).ok());
            lines.filter(|line| line.split(|&byte| byte == 0).any(|word| word == told.as_bytes())).count()
        };
        for (rest, timeout, ends) in [("wait", 1, false), ("true", 60, true)] {
            let text = format!("sleep {told} >/dev/null & {rest}");
            let command = Command { name: "starter".into(), command: text };
            let ended = Peer::run(&command, false, Duration::from_secs(timeout));
            assert_eq!(ended.is_ok(), ends, "{ended:?}");
            let late = Deadline::after(Duration::from_secs(20));
            while runs() > 0 && !late.expired() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(runs(), 0, "{rest}");
        }
    }
}
