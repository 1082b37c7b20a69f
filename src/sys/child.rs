//! Other processes, for the launcher: starting them so that none outlives this one, seeing them end in the
//! order in which they did, and signals as events.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr;
use std::time::Duration;

use crate::deadline::Deadline;

/// Turns the −1 of a system call into the error it left in errno.
macro_rules! check {
    ($call:expr) => {
        match $call {
            -1 => Err(io::Error::last_os_error()),
            value => Ok(value),
        }
    };
}

/// Signals that arrive as readable events instead of interrupting.
///
/// They stay blocked in the thread that took them and in the threads which it starts later, so take them
/// before any thread exists. Children started by [`spawn_tied`] get the mask that was there before.
pub struct Signals {
    events: OwnedFd,
    before: libc::sigset_t,
}

impl Signals {
    /// Takes those of `signals` that this process does not ignore. One that is ignored from birth (`nohup`, a
    /// shell's `&`) was ignored on purpose and stays so, here and in the children.
    pub fn take(signals: &[i32]) -> io::Result<Signals> {
        let mut set = empty_set();
        for &signal in signals {
            if !ignored(signal)? {
                // SAFETY: `set` was initialised by sigemptyset.
                check!(unsafe { libc::sigaddset(&mut set, signal) })?;
            }
        }
        let mut before = empty_set();
        // SAFETY: both sets live across the call; changing this thread's mask touches no memory.
        let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        // SAFETY: −1 asks for a new descriptor; `set` lives across the call.
        let fd = check!(unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        Ok(Signals { events: unsafe { OwnedFd::from_raw_fd(fd) }, before })
    }

    /// The next signal that has arrived, if there is one.
    pub fn next(&self) -> io::Result<Option<i32>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer has room for the `size` bytes that the kernel may write.
        match check!(unsafe { libc::read(self.events.as_raw_fd(), info.as_mut_ptr().cast(), size) }) {
            // SAFETY: a signalfd gives whole records only, and any bytes make a valid record of integers.
            Ok(_) => Ok(Some(unsafe { info.assume_init() }.ssi_signo as i32)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

/// The files that this process may have open: as many as the system lets it, for a few belong to each child.
/// Children started by [`spawn_tied`] may have as many as this process before, since some go through all that
/// they may have.
pub struct OpenFiles {
    /// `None`: there are no more than before.
    before: Option<libc::rlimit>,
}

impl OpenFiles {
    /// Has there be as many as may be.
    pub fn most() -> io::Result<OpenFiles> {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel fills `before`, which is as large as it needs.
        check!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut before) })?;
        let most = libc::rlimit { rlim_cur: before.rlim_max, ..before };
        // SAFETY: the kernel reads `most`, which outlives the call. It refuses where the system's own limit
        // (fs.nr_open) has been lowered since: then there are as many as before.
        let raised = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &most) } == 0;
        Ok(OpenFiles { before: raised.then_some(before) })
    }
}

/// A small process that outlives this one by a moment: when this process ends without [`Keeper::dismiss`],
/// however it ends, the keeper kills the process groups of all children started by [`spawn_tied`].
///
/// The children report to it themselves before they become their program, so no moment exists in which a
/// child runs and the keeper does not know it. It is deaf to signals other than SIGKILL and has a session of
/// its own.
pub struct Keeper {
    reports: OwnedFd,
    pid: libc::pid_t,
    /// Whether this process was started with SIGCHLD ignored, as its children are then.
    forgets: bool,
}

impl Keeper {
    /// Starts it, with room for `children`. The process must not have started a thread yet.
    pub fn start(children: usize) -> io::Result<Keeper> {
        let forgets = keep_ended()?;
        let (reader, writer) = io::pipe()?;
        let (reader, reports) = (OwnedFd::from(reader), OwnedFd::from(writer));
        let nowhere = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        let mut groups = Vec::with_capacity(children);
        // SAFETY: the process has one thread (documented above), so its copy is as consistent as itself; the
        // copy allocates nothing, calls only async-signal-safe functions and never returns from `keep`.
        match check!(unsafe { libc::fork() })? {
            0 => keep(reader, reports, nowhere.into(), &mut groups),
            pid => Ok(Keeper { reports, pid, forgets }),
        }
    }

    /// Ends it, and it kills nothing. Whether it runs, is stopped, or was killed before.
    pub fn dismiss(self) {
        // SAFETY: no memory is involved and no status is asked for; `pid` is our own child, waited for by
        // nobody else, so the number is still its own.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, ptr::null_mut(), 0);
        }
    }
}

/// Has children that end stay until they are waited for: where SIGCHLD is ignored, the kernel forgets how
/// they ended. Whether it was.
fn keep_ended() -> io::Result<bool> {
    // SAFETY: the default action runs no code.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        before => Ok(before == libc::SIG_IGN),
    }
}

/// What the keeper does: remembers the groups reported, and kills them when the last writer of the pipe is
/// gone.
fn keep(reader: OwnedFd, writer: OwnedFd, nowhere: OwnedFd, groups: &mut Vec<libc::pid_t>) -> ! {
    // SAFETY: plain system calls on descriptors and integers that this process owns; the name is
    // NUL-terminated.
    unsafe {
        let mut all = MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut());
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"unisono-keeper".as_ptr());
        // Whoever reads our launcher's output must see its end when the launcher ends.
        for fd in 0..=2 {
            libc::dup2(nowhere.as_raw_fd(), fd);
        }
    }
    drop(writer);
    let mut pid: libc::pid_t = 0;
    loop {
        // SAFETY: the kernel writes at most the size of `pid` into it. Reports are shorter than PIPE_BUF, so
        // they arrive whole.
        let count = unsafe { libc::read(reader.as_raw_fd(), (&raw mut pid).cast(), size_of_val(&pid)) };
        match (count, pid) {
            // Never grows: an allocation could wait for a lock.
            (1.., pid) if groups.len() < groups.capacity() => groups.push(pid),
            (1.., _) => {}
            _ => break,
        }
    }
    for &group in groups.iter() {
        // SAFETY: no memory is involved. A group number is not reused while a process of the group lives.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    // SAFETY: ends this process at once, without running what the launcher registered for its own end.
    unsafe { libc::_exit(0) }
}

fn report(pipe: i32, pid: libc::pid_t) -> io::Result<()> {
    // SAFETY: `pid` lives across the call. The call is async-signal-safe.
    check!(unsafe { libc::write(pipe, (&raw const pid).cast(), size_of_val(&pid)) }).map(drop)
}

/// Starts `command` in a process group of its own, with the signal mask from before `signals` and the limit
/// from before `files`, known to `keeper`, and such that the kernel kills it when this thread ends. Call it
/// from a thread that lives as long as the process.
pub fn spawn_tied(
    command: &mut Command,
    signals: &Signals,
    files: &OpenFiles,
    keeper: &Keeper,
) -> io::Result<Child> {
    let (mask, reports, parent) = (signals.before, keeper.reports.as_raw_fd(), std::process::id());
    let (forgets, files) = (keeper.forgets, files.before);
    let tie = move || {
        // SAFETY: system calls on integers and on `mask` and `files`, which the closure owns; all are
        // async-signal-safe.
        unsafe {
            check!(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // A parent that died before the line above will never send that signal.
            if libc::getppid() as u32 != parent {
                libc::_exit(1);
            }
            report(reports, libc::getpid())?;
            if let Some(files) = &files {
                check!(libc::setrlimit(libc::RLIMIT_NOFILE, files))?;
            }
            if forgets {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            match libc::pthread_sigmask(libc::SIG_SETMASK, &mask, ptr::null_mut()) {
                0 => Ok(()),
                code => Err(io::Error::from_raw_os_error(code)),
            }
        }
    };
    // SAFETY: `tie` runs between fork and exec; it only makes async-signal-safe calls and allocates nothing.
    unsafe { command.process_group(0).pre_exec(tie) }.spawn()
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It returned from main or called exit.
    Code(i32),
    /// A signal killed it; whether it left a core.
    Signal(i32, bool),
}

/// Tells which children have ended, in the order in which they did.
pub struct Ends {
    epoll: OwnedFd,
    /// Keeps the descriptors that epoll watches open.
    watched: Vec<OwnedFd>,
}

impl Ends {
    /// With no child yet.
    pub fn new() -> io::Result<Ends> {
        // SAFETY: no memory is involved.
        let fd = check!(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        Ok(Ends { epoll: unsafe { OwnedFd::from_raw_fd(fd) }, watched: Vec::new() })
    }

    /// Watches `child` from now on; [`Ends::next`] will answer with `name`.
    pub fn watch(&mut self, child: &Child, name: usize) -> io::Result<()> {
        // SAFETY: no memory is involved. The child has not been waited for, so the number is still its own.
        let fd = check!(unsafe { libc::syscall(libc::SYS_pidfd_open, child.id() as libc::pid_t, 0) })?;
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        // Edge-triggered: each end is told once. The kernel queues them as they happen.
        let mut event =
            libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: name as u64 };
        // SAFETY: `event` lives across the call.
        check!(unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, pidfd.as_raw_fd(), &mut event)
        })?;
        self.watched.push(pidfd);
        Ok(())
    }

    /// The name of the next child that has ended, if there is one.
    pub fn next(&self) -> io::Result<Option<usize>> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for the one event asked for.
        let count = check!(unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &mut event, 1, 0) })?;
        Ok((count == 1).then_some(event.u64 as usize))
    }
}

impl AsFd for Ends {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// How `child`, which has ended, did so. It stays a zombie, so that its number and its group's stay its own.
pub fn exit_of(child: &Child) -> io::Result<Exit> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: `info` has room for what the kernel writes; the child is ours and not yet waited for.
    check!(unsafe {
        libc::waitid(libc::P_PID, child.id(), info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT)
    })?;
    // SAFETY: zeroed, then filled by a waitid that succeeded, so the fields for SIGCHLD are there.
    let (status, code) = unsafe { (info.assume_init_ref().si_status(), info.assume_init_ref().si_code) };
    Ok(match code {
        libc::CLD_EXITED => Exit::Code(status),
        code => Exit::Signal(status, code == libc::CLD_DUMPED),
    })
}

/// Sends `signal` to every process of the group that `child` leads. A group with no process left is no error.
pub fn signal_group(child: &Child, signal: i32) -> io::Result<()> {
    // SAFETY: no memory is involved. The child has not been waited for, so the group's number is still its
    // own.
    match check!(unsafe { libc::kill(-(child.id() as libc::pid_t), signal) }) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
        _ => Ok(()),
    }
}

/// Stops this process as Ctrl-Z would; returns when it is continued.
pub fn stop_here() -> io::Result<()> {
    // SAFETY: no memory is involved.
    check!(unsafe { libc::raise(libc::SIGSTOP) }).map(drop)
}

/// Ends this process by `signal`, so that the shell above sees the true cause. Returns only if the signal is
/// ignored.
pub fn die_by(signal: i32) {
    let mut set = empty_set();
    // SAFETY: `set` is initialised and lives across the calls; the default action of these signals ends the
    // process.
    unsafe {
        libc::sigaddset(&mut set, signal);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
    }
}

/// Makes a system call that may block, on the main thread, and interrupts it each time that so long has
/// passed.
pub fn interrupted<T>(every: Duration, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    extern "C" fn nothing(_signal: i32) {}
    let mut set = empty_set();
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `action` is zeroed, which is a valid one without flags (so calls are not begun anew) and with
    // an empty mask; the handler does nothing. Both it and `set` live across the calls.
    unsafe {
        (*action.as_mut_ptr()).sa_sigaction = nothing as extern "C" fn(i32) as libc::sighandler_t;
        check!(libc::sigaction(libc::SIGALRM, action.as_ptr(), ptr::null_mut()))?;
        libc::sigaddset(&mut set, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
    }
    // Again and again: the first may come before the call.
    alarm(every)?;
    let result = call();
    alarm(Duration::ZERO)?;
    result
}

/// Has SIGALRM come each time that so long has passed; never, if that is zero.
fn alarm(every: Duration) -> io::Result<()> {
    let every = libc::timeval { tv_sec: every.as_secs() as _, tv_usec: every.subsec_micros() as _ };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the kernel reads `timer`, which outlives the call.
    check!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, ptr::null_mut()) }).map(drop)
}

/// What a descriptor is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// A read would not block.
    Read,
    /// A write of up to 4096 bytes (PIPE_BUF) would not block.
    Write,
}

/// Waits until one of `waits` is ready or the deadline passes; says for each whether it is. A descriptor
/// whose other side is gone is ready, and so is one in error.
pub fn poll(waits: &[(BorrowedFd<'_>, Readiness)], deadline: Deadline) -> io::Result<Vec<bool>> {
    let mut fds: Vec<libc::pollfd> = waits
        .iter()
        .map(|(fd, readiness)| {
            let events = if *readiness == Readiness::Read { libc::POLLIN } else { libc::POLLOUT };
            libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
        })
        .collect();
    // Rounded up: waking a little early would spin through the rest of the millisecond.
    let milliseconds =
        deadline.remaining().map_or(-1, |left| left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32);
    // SAFETY: `fds` is a live slice of the length given; its descriptors are borrowed for the whole call.
    match check!(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, milliseconds) }) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
        _ => {}
    }
    Ok(fds.iter().map(|fd| fd.revents != 0).collect())
}

fn empty_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the whole set and cannot fail on a valid pointer.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

fn ignored(signal: i32) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only asks; `action` has room for the answer.
    check!(unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) })?;
    // SAFETY: zeroed, then filled by a sigaction that succeeded.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}
