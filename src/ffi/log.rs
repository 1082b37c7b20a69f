//! Where the library's messages go. Nowhere, unless the environment or the program asks.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::error::{fail, in_one_line};
use crate::settings;
use crate::sys::fork;
use crate::sys::global::Global;

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
        let way = function.map_or(Way::StandardError, |function| Way::Program(Sink { function, user }));
        say(&TELLING, Says::Program, way, filter);
        Ok(())
    })
}

static LOGGER: Logger = Logger { telling: &TELLING };
static TELLING: Global<Telling> =
    Global::last(Telling { says: Says::Environment, way: Way::StandardError, turn: None });

/// Makes [`LOGGER`] the process's logger, as loud as UNISONO_LOG says. A Rust program that has its own logger
/// keeps it.
pub fn install() {
    if log::set_logger(&LOGGER).is_ok() {
        let Some(text) = settings::get("UNISONO_LOG") else { return };
        let level: Option<LevelFilter> = text.parse().ok();
        // Who misspelt it wants to read something.
        say(&TELLING, Says::Environment, Way::StandardError, level.unwrap_or(LevelFilter::Warn));
        if level.is_none() {
            log::warn!("UNISONO_LOG={text}: use off, error, warn, info, debug or trace");
        }
    }
}

/// For another face in one file with this one: makes [`LOGGER`] the process's logger as [`install`] does, and
/// answers whether it is.
pub fn shares_logger() -> bool {
    install();
    ptr::addr_eq(log::logger(), &LOGGER)
}

/// Has another face tell messages by `face`, up to `level`, unless the program has said where they go
/// ([`unisono_log_set`]).
pub fn log_by(face: fn(Level, fmt::Arguments<'_>), level: LevelFilter) {
    say(&TELLING, Says::Face, Way::Face(face), level);
}

/// Not of no size: it is told from others by its address.
struct Logger {
    telling: &'static Global<Telling>,
}

/// Where messages go.
struct Telling {
    /// Who has said so.
    says: Says,
    way: Way,
    /// Had by who tells one, for as long as that takes, and the generation of forks that it is of. A child
    /// that is forked meanwhile has another: whoever has this one does not exist there.
    turn: Option<(u32, &'static Mutex<()>)>,
}

/// Who says where messages go. Whoever comes later counts more, in whatever order they speak.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Says {
    Environment,
    /// Another face of the library, by what its own environment says.
    Face,
    Program,
}

#[derive(Clone, Copy)]
enum Way {
    StandardError,
    Face(fn(Level, fmt::Arguments<'_>)),
    Program(Sink),
}

#[derive(Clone, Copy)]
struct Sink {
    function: unsafe extern "C" fn(*mut c_void, i32, *const c_char),
    user: *mut c_void,
}

// SAFETY: the header says that the function may be called with `user` from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above; there is nothing to see but numbers.
unsafe impl Sync for Sink {}

/// One message is told at a time, and none by way of a sink that is replaced.
fn turn(telling: &'static Global<Telling>) -> MutexGuard<'static, ()> {
    let generation = fork::generation();
    let mut state = telling.write();
    let turn = match state.turn {
        Some((made, turn)) if made == generation => turn,
        // One for each process: never freed.
        _ => Box::leak(Box::default()),
    };
    state.turn = Some((generation, turn));
    drop(state);
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages go this way from now on, up to `level`, unless somebody has said otherwise who counts more.
fn say(telling: &'static Global<Telling>, says: Says, way: Way, level: LevelFilter) {
    let _turn = turn(telling);
    let mut state = telling.write();
    if says >= state.says {
        (state.says, state.way) = (says, way);
        log::set_max_level(level);
    }
}

/// Tells a message in its turn.
fn tell(telling: &'static Global<Telling>, level: Level, text: fmt::Arguments<'_>) {
    let _turn = turn(telling);
    let way = telling.read().way;
    let text = in_one_line(text.to_string());
    match way {
        Way::StandardError => write(level, &text),
        Way::Face(face) => face(level, format_args!("{text}")),
        Way::Program(Sink { function, user }) => {
            let message: CString = c_text(&text);
            // SAFETY: the header's contract for the function.
            unsafe { function(user, number(level), message.as_ptr()) };
        }
    }
}

/// Writes a message to standard error.
fn write(level: Level, text: &str) {
    let line = format!("unisono[{}] {}: {text}\n", std::process::id(), level.as_str().to_lowercase());
    // SAFETY: the number is that of standard error, which is not closed here. The standard library's own has
    // a lock, which a forked child may find taken.
    let mut stderr = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDERR_FILENO) });
    // Nobody can be told that the log cannot be written.
    let _ = stderr.write_all(line.as_bytes());
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            tell(self.telling, record.level(), *record.args());
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;

    use super::*;

    static TOLD: AtomicU32 = AtomicU32::new(0);
    static GOES_ON: AtomicBool = AtomicBool::new(false);

    /// The first message takes its time.
    unsafe extern "C" fn slow(_user: *mut c_void, _level: unisono_log_level_t, _message: *const c_char) {
        if TOLD.fetch_add(1, Ordering::SeqCst) == 0 {
            while !GOES_ON.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn what_the_program_says_counts_more_than_another_face_and_that_more_than_the_environment() {
        static TELLS: Global<Telling> =
            Global::last(Telling { says: Says::Environment, way: Way::StandardError, turn: None });
        static BY_FACE: AtomicU32 = AtomicU32::new(0);
        static BY_PROGRAM: AtomicU32 = AtomicU32::new(0);
        fn face(_level: Level, text: fmt::Arguments<'_>) {
            assert_eq!(text.to_string(), "a message");
            BY_FACE.fetch_add(1, Ordering::SeqCst);
        }
        unsafe extern "C" fn program(_user: *mut c_void, _level: i32, _message: *const c_char) {
            BY_PROGRAM.fetch_add(1, Ordering::SeqCst);
        }
        let say_and_tell = |says, way| {
            say(&TELLS, says, way, log::max_level());
            tell(&TELLS, Level::Warn, format_args!("a\nmessage"));
            (BY_FACE.load(Ordering::SeqCst), BY_PROGRAM.load(Ordering::SeqCst))
        };
        let sink = Sink { function: program, user: ptr::null_mut() };
        assert_eq!(say_and_tell(Says::Face, Way::Face(face)), (1, 0));
        assert_eq!(say_and_tell(Says::Environment, Way::StandardError), (2, 0));
        assert_eq!(say_and_tell(Says::Program, Way::Program(sink)), (2, 1));
        assert_eq!(say_and_tell(Says::Face, Way::Face(face)), (2, 2));
        assert_eq!(say_and_tell(Says::Program, Way::StandardError), (2, 2));
    }

    #[test]
    fn a_child_that_is_forked_while_a_message_is_told_tells_its_own() {
        static SLOW: Global<Telling> = Global::last(Telling {
            says: Says::Program,
            way: Way::Program(Sink { function: slow, user: ptr::null_mut() }),
            turn: None,
        });
        let tells = thread::spawn(|| tell(&SLOW, Level::Warn, format_args!("the parent's")));
        while TOLD.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // SAFETY: the child tells a message, or is ended while it waits for its turn, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes no pointers.
            unsafe { libc::alarm(20) };
            tell(&SLOW, Level::Warn, format_args!("the child's"));
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(TOLD.load(Ordering::SeqCst) as libc::c_int) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: `status` outlives the call; `child` is a child of ours that nobody else reaps.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        GOES_ON.store(true, Ordering::SeqCst);
        tells.join().unwrap();
        assert!(libc::WIFEXITED(status), "it has waited for its turn");
        assert_eq!(libc::WEXITSTATUS(status), 2);
    }
}
