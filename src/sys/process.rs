//! Processes, processors, and the host they are on.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use super::syscall;

/// A descriptor that becomes readable when the process `pid` ends. The error is ESRCH when it is gone
/// already.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: takes no pointers.
    let fd = unsafe { syscall!(syscall(libc::SYS_pidfd_open, pid, 0)) }?;
    // SAFETY: `fd` was just opened and belongs to nobody else; descriptors fit a c_int.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// Whether the process that a [`pidfd`] is of has ended. What it had open has been closed then, also where its
/// parent has not asked how it ended, and never will.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut fd = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel writes to one pollfd, which is there.
    let ready = unsafe { syscall!(poll(&raw mut fd, 1, 0)) };
    ready.is_ok_and(|ready| ready > 0) && fd.revents & libc::POLLIN != 0
}

/// The threads of the process `pid`, which are none when it is gone. Its main thread is among them also when
/// it has ended before the others.
pub fn threads(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    tasks.into_iter().flatten().filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Ends this process at once, without what it has registered for its end.
pub fn leave(status: u8) -> ! {
    // SAFETY: takes no pointers; nothing of this process runs after it.
    unsafe { libc::_exit(status.into()) }
}

/// Lets another thread run.
pub fn yield_now() {
    // SAFETY: takes no pointers and cannot fail.
    unsafe { libc::sched_yield() };
}

/// The processors that this process may use, or as many as it has the time of where its control group limits
/// that; at least 1.
pub fn usable_cpus() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get())
}

/// Keeps the calling thread on one processor; where it could run before, it may again when this is dropped
/// there.
#[derive(Debug)]
pub struct CpuBinding {
    before: libc::cpu_set_t,
}

impl CpuBinding {
    /// To number `index`, counted round, of the processors that the thread may use.
    pub fn new(index: usize) -> io::Result<CpuBinding> {
        // SAFETY: a cpu_set_t is plain bits, for which zero is valid.
        let (mut before, mut one): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes at most the size given into `before`.
        unsafe { syscall!(sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut before)) }?;
        // SAFETY: numbers below CPU_SETSIZE are inside of the set.
        let usable = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &before) };
        let usable: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(usable).collect();
        // SAFETY: as above; a thread that runs has a processor to run on, so the list is not empty.
        unsafe { libc::CPU_SET(usable[index % usable.len()], &mut one) };
        // SAFETY: the kernel reads the size given from `one`.
        unsafe { syscall!(sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &one)) }?;
        Ok(CpuBinding { before })
    }
}

impl Drop for CpuBinding {
    fn drop(&mut self) {
        // SAFETY: the kernel reads the size given from `before`, which it has filled. Nothing is lost if it
        // refuses.
        let _ = unsafe { syscall!(sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &self.before)) };
    }
}

/// Whether the kernel has refused something because this process, or its host, has no descriptors or memory
/// left for it.
pub fn lacks(cause: &io::Error) -> bool {
    const LACKS: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS];
    cause.raw_os_error().is_some_and(|code| LACKS.contains(&code))
}

/// How many files this process may have open, unless it raises its limit.
pub fn most_open_files() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills `limit`, which is as large as it needs.
    match unsafe { syscall!(getrlimit(libc::RLIMIT_NOFILE, &mut limit)) } {
        Ok(_) => usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX),
        Err(_) => usize::MAX,
    }
}

/// A text that the kernel made at boot: the same for all processes of this host, containers included.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// The host's name, `?` if it has none.
pub fn hostname() -> String {
    let mut name = [0u8; 256];
    // SAFETY: writes at most `name.len()` bytes. The last byte stays zero, because a Linux name has at most
    // 64.
    let answer = unsafe { syscall!(gethostname(name.as_mut_ptr().cast(), name.len() - 1)) };
    match (answer, CStr::from_bytes_until_nul(&name)) {
        (Ok(_), Ok(name)) if !name.is_empty() => name.to_string_lossy().into_owned(),
        _ => "?".to_owned(),
    }
}

/// Has `handler` called when the process ends by `exit` or by returning from `main`; not when a signal kills
/// it.
pub fn at_exit(handler: extern "C" fn()) -> bool {
    // SAFETY: the handler is a plain function that lives as long as the library (linked with nodelete).
    unsafe { libc::atexit(handler) == 0 }
}

/// Starts a thread of the library's own. It takes none of the signals that are sent to the process: those go
/// to the threads of the program, which expect them and may wait for them. What a fault in the thread itself
/// raises it takes, so that a program's crash handler sees it.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    spawn_boxed(name, Box::new(body))
}

/// Has a thread of the library's own do `act`, and answers where it tells what came of that: once it has let
/// go of all that `act` had. Nobody need wait for it.
pub fn aside<T: Send + 'static>(
    name: &str,
    act: impl FnOnce() -> T + Send + 'static,
) -> io::Result<mpsc::Receiver<T>> {
    let (tell, told) = mpsc::sync_channel(1);
    spawn(name, move || {
        let answer = act();
        // Who waited may have gone on.
        let _ = tell.send(answer);
    })?;
    Ok(told)
}

/// Apart, so that there is one for all.
fn spawn_boxed(name: &str, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    // A new thread has the mask of the one that starts it: blocked here, so that there is no moment before it
    // is.
    let _blocked = BlockedSignals::new();
    let run = || {
        OURS.set(true);
        RELIED_ON.set(true);
        body();
    };
    thread::Builder::new().name(name.to_owned()).spawn(run)
}

thread_local! {
    /// Whether [`spawn`] has started this thread.
    static OURS: Cell<bool> = const { Cell::new(false) };
    /// Whether it has, and not for what [`stand_in`] says.
    static RELIED_ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether the library has started this thread.
pub fn is_own_thread() -> bool {
    // A thread that is ending is nobody's to rely on.
    OURS.try_with(Cell::get).unwrap_or(false)
}

/// Whether others may rely on this thread of the library's own: it waits for nothing that they might have to
/// end.
pub fn is_relied_on() -> bool {
    RELIED_ON.try_with(Cell::get).unwrap_or(false)
}

/// From here on this thread does nothing but what the program has called, in its place: it waits as the
/// program's threads do.
pub fn stand_in() {
    RELIED_ON.set(false);
}

/// From here on this thread sleeps as long as it says, to about a microsecond: the kernel adds up to 50
/// otherwise.
pub fn sleep_on_time() {
    // SAFETY: it concerns this thread's timers alone. Where it is refused, sleeps stay long.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
}

/// Signals of this thread are blocked until it is dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn new() -> BlockedSignals {
        // SAFETY: a sigset_t is plain bits, for which zero is valid; the calls only use the sets that they
        // are given.
        unsafe {
            let (mut blocked, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
            libc::sigfillset(&mut blocked);
            for fault in FAULTS {
                libc::sigdelset(&mut blocked, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut before);
            BlockedSignals { before }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled when it was made. The call fails for an unknown `how` alone.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// What a thread raises by itself.
const FAULTS: [libc::c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_pidfd_tells_when_a_process_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let fd = pidfd(child.id()).unwrap();
        let epoll = crate::sys::epoll::Epoll::new().unwrap();
        let interest = crate::sys::epoll::Interest { read: true, ..Default::default() };
        epoll.watch(fd.as_fd(), 7, interest).unwrap();
        let mut tokens = Vec::new();
        epoll.wait(Some(std::time::Duration::ZERO), |event| tokens.push(event.token)).unwrap();
        assert!(tokens.is_empty());
        child.kill().unwrap();
        epoll.wait(Some(std::time::Duration::from_secs(20)), |event| tokens.push(event.token)).unwrap();
        assert_eq!(tokens, [7]);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_has_its_threads_until_it_ends() {
        let own = std::process::id();
        // SAFETY: takes nothing and cannot fail.
        let here = unsafe { libc::gettid() as u32 };
        let all = threads(own);
        assert!(all.contains(&own) && all.contains(&here), "{all:?}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(threads(child.id()), Vec::<u32>::new());
    }

    #[test]
    fn threads_of_the_library_take_faults_and_no_other_signals() {
        fn blocked(signal: libc::c_int) -> bool {
            // SAFETY: a sigset_t is plain bits; the calls only fill and read it.
            unsafe {
                let mut mask: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
                libc::sigismember(&mask, signal) == 1
            }
        }
        let signals = [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGRTMIN(), libc::SIGSEGV];
        let (tell, hear) = std::sync::mpsc::channel();
        spawn("masked", move || tell.send(signals.map(blocked)).unwrap()).unwrap().join().unwrap();
        let there = hear.recv().unwrap();
        assert_eq!(there, [true, true, true, true, false]);
        assert_eq!(signals.map(blocked), [false; 5], "who starts it goes on as before");
    }

    #[test]
    fn the_host_has_an_identity_and_processors() {
        assert!(boot_id().unwrap().len() >= 32);
        assert!(usable_cpus() >= 1);
        assert!(!hostname().is_empty());
    }
}
