//! Signals to the launcher, and what the ranks hear of them.

use std::io::BufRead;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{Launcher, state, text, until};

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
    for (second, words) in [(libc::SIGINT, "SIGINT again"), (libc::SIGTERM, "SIGTERM after SIGINT")] {
        let mut launcher = Launcher::start(&["-n", "1", "--grace", "1000", "--", "sh", "-c", script]);
        let mut lines = launcher.stdout().lines().map(Result::unwrap);
        assert_eq!(lines.next().unwrap(), "[0] ready");
        launcher.signal(libc::SIGINT);
        assert_eq!(lines.next().unwrap(), "[0] heard");
        // Not as if it were the same.
        std::thread::sleep(Duration::from_millis(300));
        launcher.signal(second);
        let (status, complaint) = launcher.complaint();
        assert_eq!(status.code(), Some(137));
        assert!(complaint.contains(&format!("{words}; killing rank 0")), "{complaint}");
    }
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
