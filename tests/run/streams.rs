//! What ranks read and write, and readers that stop or leave.

use std::ffi::CStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStderr, Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

use crate::{Folder, Launcher, by_rank, gone, run, text, until};

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

/// More than a pipe takes, and less than ranks have to wait for.
const MUCH: usize = 800_000;

/// A launcher whose one rank has written that much and ended, its standard error, and what has been read there.
fn with_much_to_read(options: &[&str]) -> (Launcher, BufReader<ChildStderr>, String) {
    let script = format!("echo $$ >&2; head -c {MUCH} /dev/zero");
    let arguments = [&["-n", "1", "--no-prefix"], options, &["--", "sh", "-c", &script]].concat();
    let mut launcher = Launcher::start(&arguments);
    let mut stderr = BufReader::new(launcher.child.stderr.take().unwrap());
    let mut said = String::new();
    stderr.read_line(&mut said).unwrap();
    until("the rank has ended", || gone(said.trim()));
    (launcher, stderr, said)
}

#[test]
fn a_reader_that_rests_when_the_time_is_up_is_waited_for_no_longer_than_ranks() {
    let (mut launcher, mut stderr, mut said) = with_much_to_read(&["--timeout", "3", "--grace", "0.2"]);
    let status = launcher.wait();
    stderr.read_to_string(&mut said).unwrap();
    // A rank that was slower has been ended.
    if !said.contains("the time is up") {
        assert!(said.contains("nobody has read"), "{said}");
        assert_eq!(status.code(), Some(125), "{said}");
    }
}

#[test]
fn a_signal_leaves_what_ended_ranks_have_written_to_who_reads_it() {
    let (mut launcher, ..) = with_much_to_read(&["--grace", "1000"]);
    // To notice the end. A launcher that is slower is told to end before, and the test shows less.
    thread::sleep(Duration::from_millis(300));
    launcher.signal(libc::SIGTERM);
    let mut shown = Vec::new();
    launcher.stdout().read_to_end(&mut shown).unwrap();
    assert_eq!((shown.len(), launcher.wait().code()), (MUCH, Some(0)));
}

#[test]
fn a_second_signal_drops_what_nobody_reads_and_that_is_no_success() {
    let (mut launcher, mut stderr, mut said) = with_much_to_read(&["--grace", "1000"]);
    until("the launcher ends", || {
        launcher.signal(libc::SIGTERM);
        // Not as if it were the same.
        thread::sleep(Duration::from_millis(300));
        launcher.child.try_wait().unwrap().is_some()
    });
    stderr.read_to_string(&mut said).unwrap();
    assert!(said.contains("nobody has read"), "{said}");
    assert_eq!(launcher.wait().code(), Some(125), "{said}");
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
