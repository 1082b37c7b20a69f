//! Where the library's messages go. Nowhere, unless the environment or the program asks.

use std::ffi::{CString, c_char, c_void};
use std::io::Write;
use std::sync::Mutex;

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::error::fail;

use super::status::{c_text, guard, unisono_status_t};

/// How much is logged: one of enum unisono_log_level.
pub type unisono_log_level_t = i32;

/// The values of unisono_log_level_t: each includes those before it. The numbers never change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_log_level {
    /// Nothing.
    UNISONO_LOG_OFF = 0,
    /// What failed and cannot be told by a status.
    UNISONO_LOG_ERROR = 1,
    /// What may become a failure.
    UNISONO_LOG_WARN = 2,
    /// What was chosen: addresses, transports, algorithms.
    UNISONO_LOG_INFO = 3,
    /// What happens on each context.
    UNISONO_LOG_DEBUG = 4,
    /// What happens on each operation.
    UNISONO_LOG_TRACE = 5,
}

/// Receives the library's messages: one line without its end, valid during the call. It may be called from any thread,
/// one call at a time, and calls no function of unisono.
pub type unisono_log_function_t =
    Option<unsafe extern "C" fn(user: *mut c_void, level: unisono_log_level_t, message: *const c_char)>;

/// Sets how much the library logs in this process, and where: to `function`, called with `user`, or to standard error for
/// NULL. It replaces UNISONO_LOG of the environment (off, error, warn, info, debug, trace), which otherwise decides.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_log_set(
    level: unisono_log_level_t,
    function: unisono_log_function_t,
    user: *mut c_void,
) -> unisono_status_t {
    guard(|| {
        let filter = match level {
            0 => LevelFilter::Off,
            1 => LevelFilter::Error,
            2 => LevelFilter::Warn,
            3 => LevelFilter::Info,
            4 => LevelFilter::Debug,
            5 => LevelFilter::Trace,
            _ => fail!(InvalidArgument, "level {level} is unknown; the levels are 0 (off) to 5 (trace)"),
        };
        let mut sink = LOGGER.sink.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *sink = function.map(|function| Sink { function, user });
        log::set_max_level(filter);
        Ok(())
    })
}

static LOGGER: Logger = Logger { sink: Mutex::new(None) };

/// Makes [`LOGGER`] the process's logger, as loud as UNISONO_LOG says. A Rust program that has its own logger keeps it.
pub fn install() {
    if log::set_logger(&LOGGER).is_ok() {
        let text = std::env::var("UNISONO_LOG").unwrap_or_default();
        let level = match text.trim() {
            "" => Ok(LevelFilter::Off),
            text => text.parse(),
        };
        if let Ok(level) = level {
            log::set_max_level(level);
        } else {
            // Who misspelt it wants to read something.
            log::set_max_level(LevelFilter::Warn);
            log::warn!("UNISONO_LOG={text}: use off, error, warn, info, debug or trace");
        }
    }
}

struct Logger {
    sink: Mutex<Option<Sink>>,
}

struct Sink {
    function: unsafe extern "C" fn(*mut c_void, i32, *const c_char),
    user: *mut c_void,
}

// SAFETY: the header says that the function may be called with `user` from any thread.
unsafe impl Send for Sink {}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // Held during the call, so that one message is told at a time.
        let sink = self.sink.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match &*sink {
            Some(sink) => {
                let message: CString = c_text(&record.args().to_string());
                // SAFETY: the header's contract for the function.
                unsafe { (sink.function)(sink.user, number(record.level()), message.as_ptr()) };
            }
            None => {
                let line = format!(
                    "unisono[{}] {}: {}\n",
                    std::process::id(),
                    record.level().as_str().to_lowercase(),
                    record.args()
                );
                // Nobody can be told that the log cannot be written.
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
        }
    }

    fn flush(&self) {}
}

fn number(level: Level) -> unisono_log_level_t {
    match level {
        Level::Error => 1,
        Level::Warn => 2,
        Level::Info => 3,
        Level::Debug => 4,
        Level::Trace => 5,
    }
}
