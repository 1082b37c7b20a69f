//! What NCCL_DEBUG asks for: VERSION, WARN, INFO or TRACE, each with what those before it tell. Lines go to
//! standard output or, with NCCL_DEBUG_FILE, to that file, in whose name %h stands for the host and %p for
//! the process. Without it the library is silent, unless UNISONO_LOG asks: its lines go to standard error, as
//! in libunisono.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use log::{Level, LevelFilter};
use unisono::logging;
use unisono::sys::global::Global;

use crate::error::with_variables;
use crate::settings;
use crate::version::VERSION;

/// Whoever has another lock may log.
static SINK: Global<Sink> = Global::last(Sink::Stdout);

enum Sink {
    Stdout,
    Stderr,
    File(File),
}

/// What the environment asks for.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    version: bool,
    level: LevelFilter,
}

impl Wish {
    fn parse(nccl_debug: Option<&str>, unisono_log: Option<&str>) -> Wish {
        let level = match nccl_debug.map(|wish| wish.trim().to_ascii_uppercase()).as_deref() {
            Some("VERSION") => LevelFilter::Off,
            Some("WARN") => LevelFilter::Warn,
            Some("INFO") => LevelFilter::Info,
            Some("ABORT" | "TRACE") => LevelFilter::Trace,
            _ => {
                let level = unisono_log.map_or(Ok(LevelFilter::Off), str::parse);
                // Who misspelt it has been told so, and wants to read something.
                return Wish { version: false, level: level.unwrap_or(LevelFilter::Warn) };
            }
        };
        Wish { version: true, level }
    }
}

/// Has messages told as the environment asks, once. A Rust program that has its own logger keeps it.
pub(crate) fn install() {
    if !READ.swap(true, Ordering::Relaxed) {
        read_environment();
    }
}

static READ: AtomicBool = AtomicBool::new(false);

/// Reads NCCL_DEBUG and NCCL_DEBUG_FILE again.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {
    // A panic in here would have nowhere to go; nothing in it panics.
    READ.store(true, Ordering::Relaxed);
    read_environment();
}

/// As ncclResetDebugInit.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {
    ncclResetDebugInit();
}

fn read_environment() {
    if !logging::install() {
        return;
    }
    let unisono_log = unisono::settings::get("UNISONO_LOG");
    let wish = Wish::parse(settings::get("NCCL_DEBUG").as_deref(), unisono_log.as_deref());
    let mut sink = SINK.write();
    *sink = if wish.version { Sink::Stdout } else { Sink::Stderr };
    // As in NCCL, whose version alone goes into no file.
    if wish.version && wish.level > LevelFilter::Off {
        let given = pattern(settings::get("NCCL_DEBUG_FILE"));
        match unisono::settings::anything("NCCL_DEBUG_FILE", given) {
            Ok(Some(pattern)) => {
                let path = file_name(&pattern, &host(), std::process::id());
                match Sink::of_path(&path) {
                    Ok(named) => *sink = named,
                    Err(cause) => {
                        let text = format!("NCCL_DEBUG_FILE {path} cannot be written: {cause}");
                        sink.write(&line("WARN", &text));
                    }
                }
            }
            Ok(None) => {}
            Err(error) => sink.write(&line("WARN", error.text())),
        }
    }
    if wish.version {
        let (major, minor, patch) = (VERSION / 10000, VERSION / 100 % 100, VERSION % 100);
        let version = env!("CARGO_PKG_VERSION");
        sink.write(&format!("NCCL version {major}.{minor}.{patch}+unisono{version}\n"));
    }
    // Whoever tells a message takes it in its turn, for which this waits.
    drop(sink);
    logging::tell_by(Some(Arc::new(tell)), wish.level);
}

/// Tells a message, in its turn.
fn tell(level: Level, text: &str) {
    let level = match level {
        Level::Error | Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Debug | Level::Trace => "TRACE",
    };
    let line = line(level, &with_variables(text));
    SINK.write().write(&line);
}

impl Sink {
    fn of_path(path: &str) -> std::io::Result<Sink> {
        match path {
            // What is behind them has its place to go on from; opened anew it would have another.
            "/dev/stdout" => Ok(Sink::Stdout),
            "/dev/stderr" => Ok(Sink::Stderr),
            _ => Ok(Sink::File(OpenOptions::new().create(true).append(true).open(path)?)),
        }
    }

    fn write(&mut self, line: &str) {
        // Nobody can be told that the log cannot be written.
        let _ = match self {
            Sink::Stdout => {
                std::io::stdout().write_all(line.as_bytes()).and_then(|()| std::io::stdout().flush())
            }
            Sink::Stderr => std::io::stderr().write_all(line.as_bytes()),
            Sink::File(file) => file.write_all(line.as_bytes()),
        };
    }
}

/// As NCCL's readers expect lines to begin.
fn line(level: &str, text: &str) -> String {
    // SAFETY: takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() };
    format!("{}:{}:{thread} NCCL {level} {text}\n", host(), std::process::id())
}

/// The pattern that NCCL_DEBUG_FILE gives, if it says something.
fn pattern(text: Option<String>) -> Option<String> {
    // Blanks around a name are the name's.
    text.filter(|text| !text.trim().is_empty())
}

/// The name of a file, with what its pattern stands for.
fn file_name(pattern: &str, host: &str, process: u32) -> String {
    let mut name = String::new();
    let mut rest = pattern.chars();
    while let Some(letter) = rest.next() {
        match letter {
            '%' => match rest.next() {
                Some('h') => name.push_str(host),
                Some('p') => name.push_str(&process.to_string()),
                Some('%') | None => name.push('%'),
                // Nothing that it stands for.
                Some(other) => name.extend(['%', other]),
            },
            other => name.push(other),
        }
    }
    name
}

/// This host's name, up to the first dot.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use unisono::signature::Making;

    use super::*;

    #[test]
    fn the_environment_says_how_much() {
        let wish = |debug, log| Wish::parse(debug, log);
        let native = |level| Wish { version: false, level };
        let asked = |level| Wish { version: true, level };
        assert_eq!(wish(None, None), native(LevelFilter::Off));
        assert_eq!(wish(Some("version"), None), asked(LevelFilter::Off));
        assert_eq!(wish(Some("WARN"), Some("trace")), asked(LevelFilter::Warn));
        assert_eq!(wish(Some("INFO"), None), asked(LevelFilter::Info));
        assert_eq!(wish(None, Some("debug")), native(LevelFilter::Debug));
        assert_eq!(wish(Some("nonsense"), None), native(LevelFilter::Off));
        assert_eq!(wish(None, Some("loud")), native(LevelFilter::Warn));
    }

    /// The rank that others wait for is in no call, and has nothing but the log to read.
    #[test]
    fn lines_name_the_settings_that_there_are_here() {
        const LOGS: &str = "UNISONO_TEST_LOGS";
        let (call, meeting) = ("rank 1 waits: raise timeout_ms", format!("or {}", Making::LIMIT));
        if std::env::var_os(LOGS).is_some() {
            install();
            log::warn!("{call}");
            log::info!("{meeting}");
            return;
        }
        let logs = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "debug::tests::lines_name_the_settings_that_there_are_here", "--nocapture"])
            .env(LOGS, "1")
            .env("NCCL_DEBUG", "INFO")
            .env_remove("NCCL_DEBUG_FILE")
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&logs.stdout);
        for line in [
            "NCCL WARN rank 1 waits: raise UNISONO_NCCL_TIMEOUT\n",
            "NCCL INFO or UNISONO_NCCL_MEETING_TIMEOUT\n",
        ] {
            assert!(said.contains(line), "{said}");
        }
    }

    #[test]
    fn an_empty_name_is_none() {
        let given = |text: &str| pattern(Some(text.to_owned()));
        assert_eq!((pattern(None), given(""), given(" ")), (None, None, None));
        assert_eq!(given("/logs/nccl.%p").as_deref(), Some("/logs/nccl.%p"));
    }

    #[test]
    fn the_names_of_standard_streams_are_those() {
        let same = |path, wanted: &Sink| {
            let sink = Sink::of_path(path).expect("a stream");
            std::mem::discriminant(&sink) == std::mem::discriminant(wanted)
        };
        assert!(same("/dev/stdout", &Sink::Stdout) && same("/dev/stderr", &Sink::Stderr));
    }

    #[test]
    fn patterns_of_file_names() {
        assert_eq!(file_name("/logs/nccl.%h.%p", "node1", 42), "/logs/nccl.node1.42");
        assert_eq!(file_name("100%%", "h", 1), "100%");
        assert_eq!(file_name("log.%r.%%p.%p%", "h", 1), "log.%r.%p.1%");
    }
}
