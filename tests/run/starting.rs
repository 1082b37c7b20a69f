//! What ranks find when they start, and launchers that cannot start any.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use crate::not_run::not_run;
use crate::unshared::{refused, unshared};
use crate::{Folder, by_rank, run, text};

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
fn many_ranks_start_where_few_files_may_be_open_and_find_what_was_there() {
    let script = "ulimit -Sn 40; exec \"$0\" -n 20 -- sh -c 'ulimit -Sn'";
    let output = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_unisono-run")]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(by_rank(&output, 20), [["40"]; 20]);
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
        .args(["--exact", "starting::loopback_carries_a_connection"])
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
