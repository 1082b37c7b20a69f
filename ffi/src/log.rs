//! What the library tells a program while it runs.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use log::{Level, LevelFilter};
use unisono::error::fail;
use unisono::logging::{self, Teller};

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
    /// What was chosen: interfaces, how GPUs exchange.
    UNISONO_LOG_INFO = 3,
    /// What happens on each context: how ranks joined, their links, what failed.
    UNISONO_LOG_DEBUG = 4,
    /// For what may come: nothing so far.
    UNISONO_LOG_TRACE = 5,
}

/// Receives the library's messages: one line without its end, valid during the call. It may be called from
/// any thread, one call at a time, and calls no function of unisono.
pub type unisono_log_function_t =
    Option<unsafe extern "C" fn(user: *mut c_void, level: unisono_log_level_t, message: *const c_char)>;

/// Sets how much the library logs in this process, and where: to `function`, called with `user`, or to
/// standard error for NULL. It replaces UNISONO_LOG of the environment (off, error, warn, info, debug,
/// trace), which otherwise decides.
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
        logging::tell_by(function.map(|function| Sink { function, user }.teller()), filter);
        Ok(())
    })
}

/// The function that a program has given.
#[derive(Clone, Copy)]
struct Sink {
    function: unsafe extern "C" fn(*mut c_void, i32, *const c_char),
    user: *mut c_void,
}

// SAFETY: the header says that the function may be called with `user` from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above; there is nothing to see but numbers.
unsafe impl Sync for Sink {}

impl Sink {
    fn teller(self) -> Teller {
        Arc::new(move |level, text| self.tell(level, text))
    }

    fn tell(&self, level: Level, text: &str) {
        let message = c_text(text);
        // SAFETY: the header's contract for the function.
        unsafe { (self.function)(self.user, number(level), message.as_ptr()) };
    }
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
