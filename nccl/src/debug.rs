//! What NCCL_DEBUG asks for: VERSION, WARN, INFO or TRACE, each with what those before it tell. Without it the library is
//! silent, unless UNISONO_LOG asks. Lines go to standard output or, with NCCL_DEBUG_FILE, to that file, in whose name %h
//! stands for the host and %p for the process.

use std::fs::{File, OpenOptions};
use std::io::Write;

use log::{Level, LevelFilter, Log, Metadata, Record};
use unisono::sys::global::Global;

use crate::settings;
use crate::version::VERSION;

static LOGGER: Logger = Logger;
/// Whoever has another lock may log.
static SINK: Global<Sink> = Global::last(Sink::Stdout);

struct Logger;

enum Sink {
    Stdout,
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
                let level = unisono_log.and_then(|level| level.trim().parse().ok());
                return Wish { version: false, level: level.unwrap_or(LevelFilter::Off) };
            }
        };
        Wish { version: true, level }
    }
}

/// Makes [`LOGGER`] the process's logger, once.
pub(crate) fn install() {
    if log::set_logger(&LOGGER).is_ok() {
        read_environment();
    }
}

/// Reads NCCL_DEBUG and NCCL_DEBUG_FILE again.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {
    // A panic in here would have nowhere to go; nothing in it panics.
    install();
    read_environment();
}

/// As ncclResetDebugInit.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {
    ncclResetDebugInit();
}

fn read_environment() {
    let unisono_log = std::env::var("UNISONO_LOG").ok();
    let wish = Wish::parse(settings::get("NCCL_DEBUG").as_deref(), unisono_log.as_deref());
    let mut sink = SINK.write();
    *sink = Sink::Stdout;
    if wish.version
        && let Some(path) = settings::get("NCCL_DEBUG_FILE").filter(|path| !path.is_empty())
    {
        let path = file_name(&path, &host(), std::process::id());
        match OpenOptions::new().create(true).append(true).open(&path) {
            Ok(file) => *sink = Sink::File(file),
            Err(cause) => {
                sink.write(&line("WARN", &format!("NCCL_DEBUG_FILE {path} cannot be written: {cause}")))
            }
        }
    }
    log::set_max_level(wish.level);
    if wish.version {
        let (major, minor, patch) = (VERSION / 10000, VERSION / 100 % 100, VERSION % 100);
        let version = env!("CARGO_PKG_VERSION");
        sink.write(&format!("NCCL version {major}.{minor}.{patch}+unisono{version}\n"));
    }
}

impl Sink {
    fn write(&mut self, line: &str) {
        // Nobody can be told that the log cannot be written.
        let _ = match self {
            Sink::Stdout => {
                std::io::stdout().write_all(line.as_bytes()).and_then(|()| std::io::stdout().flush())
            }
            Sink::File(file) => file.write_all(line.as_bytes()),
        };
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = match record.level() {
                Level::Error | Level::Warn => "WARN",
                Level::Info => "INFO",
                Level::Debug | Level::Trace => "TRACE",
            };
            SINK.write().write(&line(level, &record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

/// As NCCL's readers expect lines to begin.
fn line(level: &str, text: &str) -> String {
    // SAFETY: takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() };
    format!("{}:{}:{thread} NCCL {level} {text}\n", host(), std::process::id())
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
                Some(other) => name.push(other),
                None => name.push('%'),
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
    use super::*;

    #[test]
    fn the_environment_says_how_much() {
        let wish = |debug, log| Wish::parse(debug, log);
        assert_eq!(wish(None, None), Wish { version: false, level: LevelFilter::Off });
        assert_eq!(wish(Some("version"), None), Wish { version: true, level: LevelFilter::Off });
        assert_eq!(wish(Some("WARN"), Some("trace")), Wish { version: true, level: LevelFilter::Warn });
        assert_eq!(wish(Some("INFO"), None), Wish { version: true, level: LevelFilter::Info });
        assert_eq!(wish(None, Some("debug")), Wish { version: false, level: LevelFilter::Debug });
        assert_eq!(wish(Some("nonsense"), None), Wish { version: false, level: LevelFilter::Off });
    }

    #[test]
    fn patterns_of_file_names() {
        assert_eq!(file_name("/logs/nccl.%h.%p", "node1", 42), "/logs/nccl.node1.42");
        assert_eq!(file_name("100%%", "h", 1), "100%");
    }
}
