//! `scripts/gpu/stacks.py` tells where a program is that takes too long, and ends it.

#[path = "support/not_run.rs"]
mod not_run;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use not_run::not_run;

/// Does one thing in time, then hangs in a system call.
const STAND_IN: &str = "
import os, sys
sys.path.insert(0, sys.argv[1])
import stacks
watch = stacks.Watch(sys.argv[2])
with watch.within(600, 'what does not hang'):
    pass
reader, writer = os.pipe()
with watch.within(0.2, 'the stand-in'):
    os.read(reader, 1)
";

#[test]
fn a_program_that_hangs_is_told_with_where_its_threads_are() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/gpu");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stacks-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let mut python = Command::new("python3");
    python.arg("-c").arg(STAND_IN).arg(scripts).arg(&folder);
    python.env("PYTHONDONTWRITEBYTECODE", "1").env("STACKS_SECONDS", "5");
    let output = match python.output() {
        Ok(output) => output,
        Err(error) => return not_run("scripts/gpu/stacks.py", format_args!("python3: {error}")),
    };
    let told: String = fs::read_dir(&folder)
        .expect("the folder")
        .map(|entry| fs::read_to_string(entry.expect("an entry").path()).expect("a text"))
        .collect();
    fs::remove_dir_all(&folder).expect("it can go");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{stderr}");
    for part in ["the stand-in has taken longer than 0.2 s", "thread ", "state S", "call "] {
        assert!(told.contains(part), "there is no {part:?} in {told}");
    }
    assert!(stderr.contains("File \"<string>\", line 10 in <module>"), "{stderr}");
}
