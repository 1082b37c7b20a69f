//! A peer's memory on the same host: its segment, its bell, and its private pages where the kernel allows it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::bell::PeerBell;
use super::segment::PeerSegment;
use crate::error::Result;
use crate::sys::memory::read_process;
use crate::sys::process::{has_ended, pidfd, threads};
use crate::sys::syscall;

/// What a rank can reach of a peer on the same host.
#[derive(Debug)]
pub struct PeerMemory {
    /// The peer's segment.
    pub segment: Arc<PeerSegment>,
    /// The peer's doorbell.
    pub bell: PeerBell,
    /// The peer's process, as seen from here; 0 when it cannot be seen (another pid namespace).
    pub pid: u32,
    /// Readable once that process has ended, whoever has its number then. None of this very process, and where
    /// it cannot be had.
    pub process: Option<Arc<OwnedFd>>,
    /// Whether [`PeerMemory::pull`] works: proved when the link opened.
    pub can_pull: bool,
    /// Whether [`PeerMemory::read`] works: proved when the link opened.
    pub can_read: bool,
}

impl PeerMemory {
    /// Maps the segment that a peer passed. It cannot be pulled from until that is proved.
    pub fn new(segment: OwnedFd, ringer: OwnedFd, pid: u32) -> Result<PeerMemory> {
        let segment = Arc::new(PeerSegment::map(segment)?);
        let bell = PeerBell::new(Arc::clone(&segment), ringer);
        let is_other = pid != 0 && pid != std::process::id();
        let process = is_other.then(|| pidfd(pid).ok().map(Arc::new)).flatten();
        Ok(PeerMemory { segment, bell, pid, process, can_pull: false, can_read: false })
    }

    /// Whether the peer's process is known to have ended. A number that nobody has says so; the next process
    /// that has it does not, if the peer could not be watched.
    pub fn has_ended(&self) -> bool {
        match &self.process {
            Some(process) => has_ended(process.as_fd()),
            None if self.pid == 0 => false,
            None => match pidfd(self.pid) {
                Ok(process) => has_ended(process.as_fd()),
                Err(cause) => cause.raw_os_error() == Some(libc::ESRCH),
            },
        }
    }

    /// Tries to read the peer's private memory: `cookie` is there at `address`, as the peer said over its
    /// authenticated connection.
    pub fn prove_pull(&mut self, address: u64, cookie: &[u8]) {
        let mut seen = vec![0; cookie.len()];
        // Through the kernel even in our own process: `address` came from outside and may be anything.
        let answer = self.read(address, &mut seen);
        self.can_read = self.pid != 0 && answer.is_ok() && seen == cookie;
        self.can_pull = self.is_own_process() || self.can_read;
        if !self.can_pull {
            log::debug!("process {} cannot be read ({answer:?}): messages from it take two copies", self.pid);
        }
    }

    /// Copies `into.len()` bytes at `remote_address` of the peer's address space. An error when they are not
    /// mapped there.
    ///
    /// # Safety
    /// When the peer is this very process, the bytes must be readable, lie outside `into`, and nobody may
    /// write them meanwhile. In any other process the kernel checks.
    pub unsafe fn pull(&self, remote_address: u64, into: &mut [u8]) -> io::Result<()> {
        if !self.is_own_process() {
            return self.read(remote_address, into);
        }
        let from = usize::try_from(remote_address).map_err(|_| io::ErrorKind::InvalidInput)?;
        let from: *const u8 = std::ptr::with_exposed_provenance(from);
        // SAFETY: the caller promises that the source is readable, quiet and apart from `into`.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// As [`PeerMemory::pull`], through the kernel even in our own process: the bytes may change or be
    /// unmapped meanwhile, which gives other bytes or an error; ESRCH when the process is gone.
    pub fn read(&self, remote_address: u64, into: &mut [u8]) -> io::Result<()> {
        let gone = |answer: &io::Result<()>| {
            answer.as_ref().is_err_and(|cause| cause.raw_os_error() == Some(libc::ESRCH))
        };
        let answer = read_process(self.pid, remote_address, into);
        if !gone(&answer) {
            return answer;
        }
        // A process whose main thread has ended before the others is there for those alone.
        threads(self.pid)
            .into_iter()
            .map(|thread| read_process(thread, remote_address, into))
            .find(|answer| !gone(answer))
            .unwrap_or(answer)
    }

    fn is_own_process(&self) -> bool {
        self.pid == std::process::id()
    }
}

/// Whether this process itself can read `len` bytes at `address`, of which it asks the kernel: a look of its
/// own would end it if not. It need not be memory that others may read.
pub fn is_readable(address: *const u8, len: usize) -> bool {
    const PAGE: usize = 4096;
    const WORD: usize = size_of::<u64>();
    /// There is no such way to change a set of signals, which the kernel says when it has read the set.
    const NO_WAY: libc::c_int = -1;
    let offset = address.addr() % PAGE;
    let end = if len > 0 { offset + len } else { 0 };
    (0..end).step_by(PAGE).all(|page| {
        let word = address.wrapping_sub(offset).wrapping_add(page);
        let none = std::ptr::null_mut::<u8>();
        // SAFETY: the kernel reads a word of the page, whatever there is, and changes nothing.
        let answer = unsafe { syscall!(syscall(libc::SYS_rt_sigprocmask, NO_WAY, word, none, WORD)) };
        // A null pointer it takes for no set.
        !word.is_null() && !answer.is_err_and(|cause| cause.raw_os_error() == Some(libc::EFAULT))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sys::memory::Mapping;
    use crate::transport::bell::Bell;
    use crate::transport::segment::Segment;

    /// That of a peer whose process this is said to be; there is room for a board.
    pub(crate) fn memory_of(pid: u32) -> PeerMemory {
        let segment = Segment::new(1 << 20).unwrap();
        let bell = Bell::new(Arc::clone(&segment)).unwrap();
        let ringer = bell.ringer().try_clone_to_owned().unwrap();
        PeerMemory::new(segment.fd().try_clone_to_owned().unwrap(), ringer, pid).unwrap()
    }

    #[test]
    fn own_memory_is_copied() {
        let mut memory = memory_of(std::process::id());
        memory.prove_pull(16, b"not there");
        assert!(memory.can_pull, "a process can always read itself");
        assert!(!memory.can_read, "not proved");
        let source = [1, 2, 3, 4, 5u8];
        let mut copy = [0; 5];
        // SAFETY: `source` is alive, unchanging, and not `copy`.
        unsafe { memory.pull(source.as_ptr().expose_provenance() as u64, &mut copy) }.unwrap();
        assert_eq!(copy, source);
    }

    #[test]
    fn the_kernel_says_what_can_be_read() {
        let memory = Mapping::private(3 * 4096).unwrap();
        let start = memory.address(0, 3 * 4096).unwrap().as_ptr();
        assert!(is_readable(start, 3 * 4096) && is_readable(start.wrapping_add(100), 1));
        // SAFETY: nobody uses the last page.
        assert_eq!(unsafe { libc::mprotect(start.wrapping_add(8192).cast(), 4096, libc::PROT_NONE) }, 0);
        assert!(is_readable(start.wrapping_add(4), 8188), "all but the last page");
        assert!(!is_readable(start.wrapping_add(4), 8189));
        assert!(is_readable(start.wrapping_add(9000), 0), "nothing");
        assert!(!is_readable(std::ptr::without_provenance(0x10), 1), "the page of the null pointer");
    }

    #[test]
    fn a_wrong_cookie_an_unmapped_page_or_an_unseen_process_proves_nothing() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut memory = memory_of(child.id());
        memory.prove_pull(16, b"cookie");
        assert!(!memory.can_pull);
        // SAFETY: another process: the kernel checks.
        assert!(unsafe { memory.pull(16, &mut [0; 4]) }.is_err());
        let mut memory = memory_of(0);
        memory.prove_pull(b"cookie".as_ptr() as u64, b"cookie");
        assert!(!memory.can_pull);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
