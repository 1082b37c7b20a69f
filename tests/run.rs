//! `unisono-run` as its users meet it: real processes, real signals.
#![allow(missing_docs)]

#[path = "support/not_run.rs"]
mod not_run;
#[path = "support/unshared.rs"]
mod unshared;

use std::ffi::CStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use not_run::not_run;
use unisono::deadline::Deadline;
use unisono::rendezvous::id::UniqueId;
use unisono::rendezvous::store::Store;
use unshared::{refused, unshared};

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

#[test]
fn every_rank_gets_its_variables_and_its_prefix() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR; \
                  echo $UNISONO_RANK $UNISONO_SIZE $UNISONO_LOCAL_RANK $UNISONO_LOCAL_SIZE; \
                  echo $MASTER_PORT $UNISONO_ID; echo to stderr >&2";
    let output = run(&["-n", "3", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let lines = by_rank(&output, 3);
    for (rank, lines) in lines.iter().enumerate() {
        assert_eq!(lines[0], format!("{rank} 3 {rank} 3 127.0.0.1"));
        assert_eq!(lines[1], format!("{rank} 3 {rank} 3"));
    }
    let (port, id) = lines[0][2].split_once(' ').unwrap();
    assert_ne!(port.parse::<u16>().unwrap(), 0);
    assert_eq!(id.len(), 256);
    assert!(lines.iter().all(|of_rank| of_rank[2] == lines[0][2]), "{lines:?}");
    let mut complaints: Vec<_> = text(&output.stderr).lines().collect();
    complaints.sort_unstable();
    assert_eq!(complaints, ["[0] to stderr", "[1] to stderr", "[2] to stderr"]);
}

#[test]
fn every_rank_has_all_queues_of_its_gpu_unless_told_otherwise() {
    let script = "echo ${CUDA_DEVICE_MAX_CONNECTIONS-unset}";
    let command = ["-n", "2", "--", "sh", "-c", script];
    for (given, found) in [(None, "32"), (Some(""), "32"), (Some("1"), "1")] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
        program.args(command).env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        given.map(|given| program.env("CUDA_DEVICE_MAX_CONNECTIONS", given));
        let output = program.output().unwrap();
        assert_eq!(by_rank(&output, 2), [[found], [found]]);
    }
}

#[test]
fn the_first_failure_ends_all_and_gives_the_status() {
    let script = "if [ $RANK = 2 ]; then echo last words; exit 7; fi; exec sleep 1000";
    let output = run(&["-n", "4", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(text(&output.stdout), "[2] last words\n");
    let complaint = text(&output.stderr);
    assert!(complaint.starts_with("unisono-run: rank 2 (pid "), "{complaint}");
    assert!(complaint.ends_with(") exited with code 7; ending the other 3\n"), "{complaint}");
}

#[test]
fn a_signal_that_kills_a_rank_is_named() {
    let script = "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 1000";
    let output = run(&["-n", "4", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(137));
    let complaint = text(&output.stderr);
    assert!(complaint.contains("rank 1 (pid "), "{complaint}");
    assert!(complaint.ends_with(") was killed by signal 9 (SIGKILL); ending the other 3\n"), "{complaint}");
}

#[test]
fn a_rank_that_was_killed_is_named_even_if_the_others_give_up_at_once() {
    let folder = Folder::new("order");
    let fifo = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // The readers see the end of the FIFO while rank 2 is dying, and fail too.
    let script =
        format!("if [ $RANK = 2 ]; then exec 3>{fifo}; kill -9 $$; fi; exec 3<{fifo}; read line <&3; exit 1");
    for _ in 0..5 {
        let output = run(&["-n", "3", "--", "sh", "-c", &script]);
        assert_eq!(output.status.code(), Some(137), "{output:?}");
        assert!(text(&output.stderr).contains("rank 2 (pid "), "{output:?}");
    }
}

#[test]
fn survivors_have_time_for_their_own_errors() {
    let folder = Folder::new("words");
    let fifo = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let script = format!(
        "if [ $RANK = 0 ]; then exec 3>{fifo}; exit 3; fi; exec 3<{fifo}; read line <&3; echo rank 0 left me; exit 4"
    );
    let output = run(&["-n", "2", "--", "sh", "-c", &script]);
    assert_eq!(text(&output.stdout), "[1] rank 0 left me\n");
    assert!([3, 4].contains(&output.status.code().unwrap()), "{output:?}");
}

#[test]
fn a_rank_deaf_to_sigterm_is_killed_after_the_grace() {
    let script = "trap '' TERM; if [ $RANK = 0 ]; then exit 5; fi; echo $$; while :; do sleep 0.05; done";
    let output = run(&["-n", "3", "--grace", "0.3", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output.stderr).contains("killing ranks 1, 2, still there 300ms after"), "{output:?}");
    for pid in by_rank(&output, 3).into_iter().flatten() {
        assert!(gone(pid), "{pid} is left");
    }
}

#[test]
fn no_orphan_is_left_when_the_launcher_is_killed() {
    // Each rank has a child, and one of its own which ignores every polite signal.
    let script = "trap '' TERM HUP INT; sleep 1000 & echo $$ $!; wait";
    let mut launcher = Launcher::start(&["-n", "3", "--", "sh", "-c", script]);
    let lines: Vec<String> = launcher.stdout().lines().take(3).map(Result::unwrap).collect();
    let pids: Vec<&str> = lines.iter().flat_map(|line| line.split(' ').skip(1)).collect();
    assert_eq!(pids.len(), 6);
    assert!(pids.iter().all(|pid| !gone(pid)), "{pids:?}");
    launcher.signal(libc::SIGKILL);
    assert_eq!(launcher.wait().signal(), Some(libc::SIGKILL));
    until("all processes of the job are gone", || pids.iter().all(|pid| gone(pid)));
}

#[test]
fn what_a_rank_left_running_ends_with_the_job() {
    let output = run(&["-n", "2", "--", "sh", "-c", "sleep 1000 & echo $!"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    for pid in by_rank(&output, 2).into_iter().flatten() {
        until("it is gone", || gone(pid));
    }
}

#[test]
fn signals_are_passed_on_to_every_process_of_every_rank() {
    // The child in the background is in the rank's group and must get the signal too.
    let script = "(trap 'echo child; exit' USR1; echo ready; while :; do sleep 0.02; done) & \
                  trap 'echo parent; wait; exit 0' USR1; echo ready; while :; do sleep 0.02; done";
    let mut launcher = Launcher::start(&["-n", "2", "--", "sh", "-c", script]);
    let mut lines = launcher.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().take(4).filter(|line| line.ends_with("ready")).count(), 4);
    launcher.signal(libc::SIGUSR1);
    let mut rest: Vec<String> = lines.collect();
    rest.sort_unstable();
    assert_eq!(rest, ["[0] child", "[0] parent", "[1] child", "[1] parent"]);
    assert_eq!(launcher.wait().code(), Some(0));
}

#[test]
fn an_interrupt_ends_the_job_and_shows_to_the_shell() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        let mut launcher = Launcher::start(&["-n", "2", "--", "sh", "-c", "echo ready; exec sleep 1000"]);
        assert_eq!(launcher.stdout().lines().take(2).count(), 2);
        launcher.signal(signal);
        let (status, complaint) = launcher.complaint();
        assert_eq!(status.signal(), Some(signal), "{complaint}");
        assert_eq!(complaint, "");
    }
}

#[test]
fn a_job_may_end_well_when_told_to_end() {
    let script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut launcher = Launcher::start(&["-n", "2", "--", "sh", "-c", script]);
    let mut lines = launcher.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().take(2).count(), 2);
    launcher.signal(libc::SIGTERM);
    assert_eq!(lines.filter(|line| line.ends_with("saved")).count(), 2);
    assert_eq!(launcher.wait().code(), Some(0));
}

/// As `timeout` sends it: to the launcher, and to its process group.
#[test]
fn a_signal_that_comes_twice_at_once_leaves_ranks_their_time() {
    let script = "trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut launcher = Launcher::start(&["-n", "1", "--", "sh", "-c", script]);
    let mut lines = launcher.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "[0] ready");
    for _ in 0..2 {
        launcher.signal(libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(lines.next().unwrap(), "[0] saved");
    assert_eq!(launcher.wait().code(), Some(0));
}

#[test]
fn a_second_interrupt_kills() {
    let script = "trap 'echo heard' INT; echo ready; while :; do sleep 0.02; done";
    let mut launcher = Launcher::start(&["-n", "1", "--grace", "1000", "--", "sh", "-c", script]);
    let mut lines = launcher.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "[0] ready");
    launcher.signal(libc::SIGINT);
    assert_eq!(lines.next().unwrap(), "[0] heard");
    // Not as if it were the same.
    std::thread::sleep(Duration::from_millis(300));
    launcher.signal(libc::SIGINT);
    let (status, complaint) = launcher.complaint();
    assert_eq!(status.code(), Some(137));
    assert!(complaint.contains("SIGINT again; killing rank 0"), "{complaint}");
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    let script = "echo ready; kill -HUP $PPID; kill -HUP $$; echo alive";
    let mut command = Command::new("nohup");
    command
        .args([env!("CARGO_BIN_EXE_unisono-run"), "-n", "1", "--", "sh", "-c", script])
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(text(&output.stdout), "[0] ready\n[0] alive\n");
}

/// Whoever started the launcher may have left that to it: then the kernel tells nobody how a child ended.
#[test]
fn ends_are_seen_where_those_of_children_are_ignored() {
    let run = |program: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
        command.args(["-n", "1", "--"]).args(program).stdin(Stdio::null());
        // SAFETY: only makes a system call.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            });
        }
        command.output().unwrap().status.code()
    };
    assert_eq!(run(&["sh", "-c", "exit 3"]), Some(3));
    // It is the seventeenth, and stays what it was for the ranks.
    assert_eq!(run(&["grep", "-q", "^SigIgn:.*[13579bdf]....$", "/proc/self/status"]), Some(0));
}

#[test]
fn many_ranks_start_where_few_files_may_be_open_and_find_what_was_there() {
    let script = "ulimit -Sn 40; exec \"$0\" -n 20 -- sh -c 'ulimit -Sn'";
    let output = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_unisono-run")]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(by_rank(&output, 20), [["40"]; 20]);
}

/// The parent of a process, and its name.
fn parent_and_name(pid: &str) -> Option<(u32, String)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, rest) = stat.split_once(" (")?.1.rsplit_once(") ")?;
    Some((rest.split(' ').nth(1)?.parse().ok()?, name.to_owned()))
}

#[test]
fn a_job_ends_as_its_ranks_do_though_its_keeper_was_killed() {
    let script = "trap 'exit 0' USR1; echo ready; while :; do sleep 0.02; done";
    let mut launcher = Launcher::start(&["-n", "2", "--", "sh", "-c", script]);
    assert_eq!(launcher.stdout().lines().take(2).count(), 2);
    let keeper = fs::read_dir("/proc").unwrap().find_map(|entry| {
        let pid = entry.ok()?.file_name().into_string().ok()?;
        (parent_and_name(&pid)? == (launcher.child.id(), "unisono-keeper".to_owned())).then_some(pid)
    });
    let keeper = keeper.expect("it has one");
    send(keeper.parse().unwrap(), libc::SIGKILL);
    until("the keeper is gone", || gone(&keeper));
    launcher.signal(libc::SIGUSR1);
    let (status, complaint) = launcher.complaint();
    assert_eq!(status.code(), Some(0), "{complaint}");
    assert!(!complaint.contains("unisono-run"), "{complaint}");
}

#[test]
fn a_rank_that_cannot_be_watched_is_named_and_ended() {
    let folder = Folder::new("unwatched");
    let file = folder.join("pid");
    let script = format!("sleep 1000 & echo $! > {file}; wait");
    let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
    command.args(["-n", "2", "--", "sh", "-c", &script]).stdin(Stdio::null());
    // As an old sandbox: the number of the call, and then the answer, an error for the one and all others as
    // ever.
    let instruction = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let filter = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_pidfd_open as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: only makes system calls, the kernel copies the filter.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: 4, filter: filter.as_ptr().cast_mut() };
            let made = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0;
            if made { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).starts_with("unisono-run: cannot watch rank 0: "), "{output:?}");
    if let Ok(pid) = fs::read_to_string(&file) {
        until("what it started is gone", || pid.is_empty() || gone(pid.trim()));
    }
}

/// As when a rank is run by `sudo`: its launcher may not signal it.
#[test]
fn a_rank_that_has_become_another_user_may_end_well() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
    command.args(["-n", "2", "--", "setpriv", "--reuid=65534", "true"]).stdin(Stdio::null());
    // SAFETY: only makes a system call.
    unsafe {
        command.pre_exec(|| {
            const CAP_KILL: libc::c_ulong = 5;
            match libc::prctl(libc::PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let output = match command.output() {
        // A root that may not even give up what it may do: a sandbox's.
        Err(cause) if cause.kind() == std::io::ErrorKind::PermissionDenied => return,
        output => output.unwrap(),
    };
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
}

#[test]
fn a_stop_stops_the_ranks_and_a_continue_continues_them() {
    let script = "echo $$; exec sleep 1000";
    let mut launcher = Launcher::start(&["-n", "2", "--", "sh", "-c", script]);
    let lines: Vec<String> = launcher.stdout().lines().take(2).map(Result::unwrap).collect();
    let ranks: Vec<&str> = lines.iter().map(|line| &line[4..]).collect();
    let all_are = |letters: &[char]| ranks.iter().all(|pid| letters.contains(&state(pid).unwrap()));
    launcher.signal(libc::SIGTSTP);
    until("all are stopped", || all_are(&['T']) && state(&launcher.child.id().to_string()) == Some('T'));
    launcher.signal(libc::SIGCONT);
    until("all go on", || all_are(&['S', 'R']));
    launcher.signal(libc::SIGTERM);
    assert_eq!(launcher.wait().signal(), Some(libc::SIGTERM));
}

#[test]
fn lines_of_a_mebibyte_stay_whole() {
    let script =
        "head -c 1048576 /dev/zero | tr '\\0' $RANK; echo; head -c 1048575 /dev/zero | tr '\\0' $RANK; echo";
    let output = run(&["-n", "3", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0));
    for (rank, lines) in by_rank(&output, 3).iter().enumerate() {
        let digit = rank.to_string();
        assert_eq!(lines.len(), 2);
        assert!(*lines[0] == digit.repeat(1 << 20), "rank {rank}: {} bytes", lines[0].len());
        assert!(*lines[1] == digit.repeat((1 << 20) - 1), "rank {rank}: {} bytes", lines[1].len());
    }
}

#[test]
fn any_bytes_come_through_unchanged() {
    let folder = Folder::new("bytes");
    let file = folder.join("bytes");
    let bytes: Vec<u8> = (0..3_000_001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(&file, &bytes).unwrap();
    let output = run(&["-n", "1", "--no-prefix", "--", "cat", &file]);
    assert!(output.stdout == bytes, "{} of {} bytes", output.stdout.len(), bytes.len());

    let ranks = folder.join("ranks");
    let output =
        run(&["-n", "2", "--output-dir", &ranks, "--", "sh", "-c", &format!("cat {file}; echo $RANK >&2")]);
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    for rank in 0..2 {
        assert!(fs::read(format!("{ranks}/{rank}.out")).unwrap() == bytes);
        assert_eq!(fs::read_to_string(format!("{ranks}/{rank}.err")).unwrap(), format!("{rank}\n"));
    }
}

#[test]
fn only_rank_0_reads_standard_input_and_only_if_asked() {
    let input = vec![b'x'; 3_000_000];
    let script = "echo $RANK $(cat | wc -c)";
    for (option, expected) in [(Some("--stdin"), "3000000"), (None, "0")] {
        let mut arguments = vec!["-n", "2", "--no-prefix"];
        arguments.extend(option);
        arguments.extend(["--", "sh", "-c", script]);
        let mut launcher = Launcher::start_with(&arguments, Stdio::piped());
        let mut pipe = launcher.child.stdin.take().unwrap();
        let bytes = input.clone();
        // Without --stdin nobody reads it: the pipe breaks, which is as it should be.
        let writer = thread::spawn(move || pipe.write_all(&bytes).is_ok());
        let output = launcher.output();
        assert_eq!(writer.join().unwrap(), option.is_some());
        let mut lines: Vec<_> = text(&output.stdout).lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, [format!("0 {expected}"), "1 0".to_owned()]);
    }
}

#[test]
fn a_program_that_cannot_run_is_named() {
    let folder = Folder::new("exec");
    let (plain, orphan) = (folder.join("plain"), folder.join("orphan"));
    fs::write(&plain, "text").unwrap();
    fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
    assert!(Command::new("chmod").args(["+x", &orphan]).status().unwrap().success());
    let cases = [
        ("no-such-program", 127, "program 'no-such-program' not found in PATH"),
        ("./no-such-program", 127, "program './no-such-program' not found"),
        (&plain, 126, "no permission to execute it"),
        (&orphan, 127, "the interpreter that it names does not exist"),
    ];
    for (program, status, complaint) in cases {
        let output = run(&["-n", "2", "--", program]);
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        assert!(text(&output.stderr).contains(complaint), "{output:?}");
        assert_eq!(text(&output.stderr).lines().count(), 1);
    }
}

#[test]
fn a_wrong_command_line_is_refused() {
    for arguments in
        [&["-n", "0", "--", "true"][..], &["-n", "2"], &["--", "true"], &["-n", "1", "--grace", "-1", "true"]]
    {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?} {output:?}");
    }
}

#[test]
fn the_time_of_a_job_can_be_limited() {
    let output = run(&["-n", "2", "--timeout", "0.2", "--", "sh", "-c", "[ $RANK = 0 ] || exec sleep 1000"]);
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(text(&output.stderr), "unisono-run: the time is up (--timeout); ending rank 1\n");
}

#[test]
fn a_reader_that_has_stopped_does_not_stop_the_launcher() {
    let mut launcher = Launcher::start(&["-n", "2", "--grace", "0.2", "--", "yes"]);
    // Its standard output is a pipe that nobody reads. Let it fill.
    thread::sleep(Duration::from_millis(300));
    launcher.signal(libc::SIGTERM);
    // Again, for what is still to be shown and never will be.
    until("the ranks are told", || {
        thread::sleep(Duration::from_millis(100));
        launcher.child.try_wait().unwrap().is_some() || {
            launcher.signal(libc::SIGTERM);
            false
        }
    });
}

#[test]
fn a_reader_that_has_stopped_does_not_stop_a_launcher_whose_outputs_are_one_pipe() {
    const PIECE: usize = 4096;
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // As many pages as a pipe has.
    writer.write_all(&[b'.'; 16 * PIECE]).unwrap();
    let output = writer.try_clone().unwrap();
    let mut launcher = Launcher {
        child: Command::new(env!("CARGO_BIN_EXE_unisono-run"))
            .args(["-n", "1", "--grace", "0.2", "--", "sh", "-c", "yes & exec yes >&2"])
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(writer)
            .spawn()
            .unwrap(),
    };
    // Both outputs have something to write, and then room for one piece.
    thread::sleep(Duration::from_millis(300));
    reader.read_exact(&mut [0; PIECE]).unwrap();
    thread::sleep(Duration::from_millis(100));
    until("the launcher ends", || {
        launcher.signal(libc::SIGTERM);
        thread::sleep(Duration::from_millis(100));
        launcher.child.try_wait().unwrap().is_some()
    });
}

#[test]
fn a_reader_that_leaves_ends_the_job_as_it_would_end_the_program() {
    let mut launcher = Launcher::start(&["-n", "2", "--", "yes"]);
    let mut line = String::new();
    launcher.stdout().read_line(&mut line).unwrap();
    let (status, complaint) = launcher.complaint();
    assert_eq!(status.code(), Some(128 + libc::SIGPIPE), "{complaint}");
    assert!(complaint.contains("was killed by signal 13 (SIGPIPE)"), "{complaint}");
}

#[test]
fn output_that_cannot_be_written_is_no_success() {
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let start = |script| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
        command.args(["-n", "1", "--", "sh", "-c", script]).stdin(Stdio::null());
        command
    };
    let output = start("echo result").stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let complaint = text(&output.stderr);
    assert!(complaint.contains("cannot write to standard output: No space left"), "{complaint}");
    let status = start("echo result >&2").stdout(Stdio::null()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(125));
    // Nor is it the rank's fault that nobody reads on.
    let output = start("exec yes").stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(!text(&output.stderr).contains("rank 0"), "{}", text(&output.stderr));
    // What a rank failed with says more.
    let status = start("echo result; exit 3").stdout(full()).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(3));
}

/// A terminal: the side that shows it, and the one that programs write to.
fn terminal() -> (fs::File, fs::File) {
    let master = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open("/dev/ptmx");
    let (master, mut name) = (master.unwrap(), [0; 64]);
    // SAFETY: the descriptor is a terminal's; the name is written into the array, whose length is given.
    unsafe {
        assert_eq!(libc::grantpt(master.as_raw_fd()), 0);
        assert_eq!(libc::unlockpt(master.as_raw_fd()), 0);
        assert_eq!(libc::ptsname_r(master.as_raw_fd(), name.as_mut_ptr(), name.len()), 0);
    }
    // SAFETY: it was written, with its end.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
    let slave = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name);
    (master, slave.unwrap())
}

#[test]
fn a_terminal_that_nobody_reads_stops_nothing() {
    for (interrupted, opens) in [(false, true), (true, true), (false, false), (true, false)] {
        let folder = Folder::new(&format!("unread-{interrupted}-{opens}"));
        let (master, slave) = terminal();
        if !opens {
            slave.set_permissions(fs::Permissions::from_mode(0o000)).unwrap();
        }
        let script =
            format!("echo $$ >{0}/$RANK.part; mv {0}/$RANK.part {0}/$RANK; exec yes", folder.0.display());
        let timeout = if interrupted { "1000" } else { "1" };
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-run"));
        command.args(["-n", "2", "--grace", "1", "--timeout", timeout, "--", "sh", "-c", &script]);
        command.stdin(Stdio::null()).stdout(slave.try_clone().unwrap()).stderr(slave);
        // SAFETY: only makes system calls.
        unsafe {
            // Root may open what nobody may (CAP_DAC_OVERRIDE); others have nothing to lose.
            command.pre_exec(|| {
                libc::prctl(libc::PR_CAPBSET_DROP, 1);
                Ok(())
            });
        }
        let mut launcher = Launcher { child: command.spawn().unwrap() };
        let pid = |rank: usize| fs::read_to_string(folder.join(&rank.to_string())).ok();
        if interrupted {
            until("the ranks run", || pid(0).is_some() && pid(1).is_some());
            // To fill the terminal. Where that takes longer, the test shows less, and does not fail.
            thread::sleep(Duration::from_millis(300));
            launcher.signal(libc::SIGTERM);
        }
        let status = launcher.wait();
        let due = if interrupted { (None, Some(libc::SIGTERM)) } else { (Some(124), None) };
        assert_eq!((status.code(), status.signal()), due);
        assert!((0..2).all(|rank| gone(pid(rank).expect("it has run").trim())));
        drop(master);
    }
}

#[test]
fn the_end_of_a_rank_is_published_in_the_store_of_the_job() {
    let script = "echo $UNISONO_ID; if [ $RANK = 1 ]; then kill -9 $$; fi; trap '' TERM; sleep 1000 & wait; sleep 1000";
    let mut launcher =
        Launcher::start(&["-n", "2", "--no-prefix", "--grace", "1000", "--", "sh", "-c", script]);
    let mut id = String::new();
    launcher.stdout().read_line(&mut id).unwrap();
    let store = id.trim().parse::<UniqueId>().unwrap().connect(Deadline::after(PATIENCE)).unwrap();
    assert_eq!(store.get("exit/1", Deadline::after(PATIENCE)).unwrap(), b"was killed by signal 9");
    assert_eq!(store.try_get("exit/0", Deadline::after(PATIENCE)).unwrap(), None);
}

/// Not a test by itself: passes where loopback is up. What
/// [`a_launcher_without_loopback_says_what_brings_it_up`] runs.
#[test]
fn loopback_carries_a_connection() {
    if std::env::var_os("UNISONO_TEST_LOOPBACK").is_some() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    }
}

#[test]
fn a_launcher_without_loopback_says_what_brings_it_up() {
    const NAME: &str = "a_launcher_without_loopback_says_what_brings_it_up";
    if let Some(why) = refused() {
        return not_run(NAME, why);
    }
    let connection = unshared()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "loopback_carries_a_connection"])
        .env("UNISONO_TEST_LOOPBACK", "1")
        .output()
        .unwrap();
    if connection.status.success() && text(&connection.stdout).contains("1 passed") {
        return not_run(NAME, "loopback is up in a new network namespace here");
    }
    let launcher = env!("CARGO_BIN_EXE_unisono-run");
    let output = unshared().args([launcher, "-n", "2", "--", "true"]).output().unwrap();
    let complaint = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{complaint}");
    assert!(complaint.contains("loopback is down") && complaint.contains("ip link set lo up"), "{complaint}");
    assert!(!complaint.contains("UNISONO_INTERFACE"), "{complaint}");
}
