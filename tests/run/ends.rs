//! How jobs end, whatever ends them, and that nothing of them is left.

use std::fs;
use std::io::BufRead;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use crate::{Folder, Launcher, PATIENCE, by_rank, gone, run, send, text, until};
use unisono::deadline::Deadline;
use unisono::rendezvous::id::UniqueId;
use unisono::rendezvous::store::Store;

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
    let keeper = || {
        fs::read_dir("/proc").unwrap().find_map(|entry| {
            let pid = entry.ok()?.file_name().into_string().ok()?;
            (parent_and_name(&pid)? == (launcher.child.id(), "unisono-keeper".to_owned())).then_some(pid)
        })
    };
    // The ranks do not wait until it has its name.
    until("it has one", || keeper().is_some());
    let keeper = keeper().expect("it does not end");
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
fn the_time_of_a_job_can_be_limited() {
    let output = run(&["-n", "2", "--timeout", "0.2", "--", "sh", "-c", "[ $RANK = 0 ] || exec sleep 1000"]);
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(text(&output.stderr), "unisono-run: the time is up (--timeout); ending rank 1\n");
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
