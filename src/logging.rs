//! Where the library's messages go. Nowhere, unless the environment or the program asks.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::error::in_one_line;
use crate::settings;
use crate::sys::fork;
use crate::sys::global::Global;

/// Tells a message: one line without its end. It is called by one thread at a time.
pub type Teller = Arc<dyn Fn(Level, &str) + Send + Sync>;

static LOGGER: Logger = Logger { telling: &TELLING };
static TELLING: Global<Telling> = Global::last(Telling { teller: None, turn: None });

/// Makes this the process's logger, as loud as UNISONO_LOG says, and answers whether it is. A Rust program that
/// has its own logger keeps it.
pub fn install() -> bool {
    if log::set_logger(&LOGGER).is_err() {
        return ptr::addr_eq(log::logger(), &LOGGER);
    }
    if let Some(text) = settings::get("UNISONO_LOG") {
        let level: Option<LevelFilter> = text.parse().ok();
        // Who misspelt it wants to read something.
        tell_by(None, level.unwrap_or(LevelFilter::Warn));
        if level.is_none() {
            log::warn!("UNISONO_LOG={text}: use off, error, warn, info, debug or trace");
        }
    }
    true
}

/// Has messages up to `level` told by `teller` from now on, or else on standard error.
pub fn tell_by(teller: Option<Teller>, level: LevelFilter) {
    redirect(&TELLING, teller);
    log::set_max_level(level);
}

/// Not of no size: it is told from others by its address.
struct Logger {
    telling: &'static Global<Telling>,
}

/// Where messages go.
struct Telling {
    teller: Option<Teller>,
    /// Had by who tells one, for as long as that takes, and the generation of forks that it is of. A child
    /// that is forked meanwhile has another: whoever has this one does not exist there.
    turn: Option<(u32, &'static Mutex<()>)>,
}

/// One message is told at a time, and none by a teller that is replaced.
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

fn redirect(telling: &'static Global<Telling>, teller: Option<Teller>) {
    let _turn = turn(telling);
    telling.write().teller = teller;
}

/// Tells a message in its turn.
fn tell(telling: &'static Global<Telling>, level: Level, text: fmt::Arguments<'_>) {
    let _turn = turn(telling);
    let teller = telling.read().teller.clone();
    let text = in_one_line(text.to_string());
    match teller {
        None => write(level, &text),
        Some(teller) => teller(level, &text),
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn a_message_is_one_line_and_told_by_who_was_named_last() {
        static TELLS: Global<Telling> = Global::last(Telling { teller: None, turn: None });
        let told = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        for (at, counts) in [[1, 0], [1, 1]].into_iter().enumerate() {
            let told_here = told[at].clone();
            let teller = move |level, text: &str| {
                assert_eq!((level, text), (Level::Warn, "a message"));
                told_here.fetch_add(1, Ordering::SeqCst);
            };
            redirect(&TELLS, Some(Arc::new(teller)));
            tell(&TELLS, Level::Warn, format_args!("a\nmessage"));
            assert_eq!(told.each_ref().map(|told| told.load(Ordering::SeqCst)), counts);
        }
    }

    #[test]
    fn a_child_that_is_forked_while_a_message_is_told_tells_its_own() {
        static SLOW: Global<Telling> = Global::last(Telling { teller: None, turn: None });
        static TOLD: AtomicU32 = AtomicU32::new(0);
        static GOES_ON: AtomicBool = AtomicBool::new(false);
        let slow = |_level, _text: &str| {
            // The first message takes its time.
            if TOLD.fetch_add(1, Ordering::SeqCst) == 0 {
                while !GOES_ON.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            }
        };
        redirect(&SLOW, Some(Arc::new(slow)));
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
