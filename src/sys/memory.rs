//! Shared memory that is nameless, and the private memory of other processes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use super::{fork, retry, syscall};

/// A memfd of `size` zero bytes that nobody can shrink: once mapped, its pages stay.
pub fn memfd(name: &std::ffi::CStr, size: usize) -> io::Result<OwnedFd> {
    // It holds for memfds as well, and who goes beyond it is ended by SIGXFSZ.
    let limit = file_size_limit()?;
    if size as u64 > limit {
        return Err(io::Error::other(format!("files may have {limit} bytes (ulimit -f), {size} are needed")));
    }
    // SAFETY: `name` is a C string that outlives the call.
    let fd = unsafe { syscall!(memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)) }?;
    // SAFETY: `fd` was just opened and belongs to nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let length = libc::off_t::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: takes no pointers.
    retry(|| unsafe { syscall!(ftruncate(fd.as_raw_fd(), length)) })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: takes no pointers.
    unsafe { syscall!(fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals)) }?;
    Ok(fd)
}

/// Whether the kernel counts all memory that it has promised, and promises no more than it has
/// (vm.overcommit_memory is 2). A memfd's page is promised when it is first touched, or committed before;
/// where the kernel has none left, a touch is SIGBUS, in whichever process.
pub fn is_counted() -> bool {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2")
}

/// Gives the pages of a part of a memfd their memory, or says that there is none.
pub fn commit(fd: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<()> {
    let number = |bytes| libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput);
    let (offset, len) = (number(offset)?, number(len)?);
    // SAFETY: takes no pointers.
    retry(|| unsafe { syscall!(fallocate(fd.as_raw_fd(), 0, offset, len)) })?;
    Ok(())
}

/// How long a file may become that this process makes longer (RLIMIT_FSIZE).
fn file_size_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills `limit`, which is as large as it needs.
    unsafe { syscall!(getrlimit(libc::RLIMIT_FSIZE, &mut limit)) }?;
    Ok(limit.rlim_cur)
}

/// The size of a memfd that somebody passed, provided that it can no longer shrink. Otherwise an access to a
/// mapping of it could raise SIGBUS at any time.
pub fn sealed_size(fd: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: takes no pointers. Fails with EINVAL on what is no memfd.
    let seals = unsafe { syscall!(fcntl(fd.as_raw_fd(), libc::F_GET_SEALS)) }?;
    if seals & libc::F_SEAL_SHRINK == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the memfd is not sealed against shrinking"));
    }
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills `status`, which is as large as it needs.
    unsafe { syscall!(fstat(fd.as_raw_fd(), status.as_mut_ptr())) }?;
    // SAFETY: fstat succeeded, so `status` is filled.
    let size = unsafe { status.assume_init() }.st_size;
    usize::try_from(size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Has the processor begin to fetch `bytes` bytes from `address` into its nearest cache. Reads nothing: any
/// address will do.
pub fn prefetch(address: *const u8, bytes: usize) {
    const LINE: usize = 64;
    for at in (0..bytes).step_by(LINE) {
        let line = address.wrapping_add(at);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has the instruction, and it faults nowhere.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

/// A writable mapping: of a whole memfd, shared, or of memory of its own. Unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// The generation of forks that has it, if its children have not.
    unshared: Option<u32>,
}

// SAFETY: a mapping is an address range, valid in every thread. Who touches which byte when is up to the
// users of the addresses.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`, which has at least that many.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Mapping::anywhere(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// `len` zero bytes of this process alone, which others may read with the kernel's leave, as any of its
    /// memory.
    pub fn private(len: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Mapping::anywhere(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// As [`Mapping::private`], and children made by fork have nothing there: where one shares a page until
    /// somebody writes it, a write of this process may give it another page, and a device that has the page
    /// pinned goes on with the old one (Linux before 5.10).
    pub fn unshared(len: usize) -> io::Result<Mapping> {
        let mut mapping = Mapping::private(len)?;
        // SAFETY: just mapped, this long; its bytes stay what they are.
        unsafe { syscall!(madvise(mapping.start.as_ptr().cast(), len, libc::MADV_DONTFORK)) }?;
        mapping.unshared = Some(fork::generation());
        Ok(mapping)
    }

    /// `flags` are without MAP_FIXED.
    fn anywhere(
        len: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        fd: libc::c_int,
    ) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory in use.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, len, unshared: None })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes. It never is: mmap refuses.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where `offset..offset + len` is, or `None` when that is not inside.
    pub fn address(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        // SAFETY: `offset` is at most the length of the mapping, which is one allocation.
        (end <= self.len).then(|| unsafe { self.start.add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.unshared.is_some_and(|fork| fork != fork::generation()) {
            // What is there by now in this child is somebody else's.
            return;
        }
        // SAFETY: the range was mapped by `anywhere` and is unmapped once. Those who hold addresses into it
        // keep it alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Room in the address space, without memory: until it is dropped nothing else is mapped there, and it counts
/// (`ulimit -v`).
#[derive(Debug)]
pub struct Reservation {
    _room: Mapping,
}

impl Reservation {
    /// Room for `len` bytes.
    pub fn new(len: usize) -> io::Result<Reservation> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Ok(Reservation { _room: Mapping::anywhere(len, libc::PROT_NONE, flags, -1)? })
    }
}

/// Copies `into.len()` bytes at `address` of the process `pid`. Partial copies go on; an unmapped page is an
/// error.
pub fn read_process(pid: u32, address: u64, into: &mut [u8]) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        let from = address.checked_add(done as u64).and_then(|from| usize::try_from(from).ok());
        let from = from.ok_or(io::ErrorKind::InvalidInput)?;
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(from), iov_len: rest.len() };
        // SAFETY: `local` describes a live, writable slice; the kernel checks `remote` against the other
        // process.
        let count = retry(|| unsafe { syscall!(process_vm_readv(pid, &local, 1, &remote, 1, 0)) })?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => done += count,
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_memfd_keeps_its_size() {
        let fd = memfd(c"test", 8192).unwrap();
        assert_eq!(sealed_size(fd.as_fd()).unwrap(), 8192);
        // SAFETY: takes no pointers.
        assert!(unsafe { syscall!(ftruncate(fd.as_raw_fd(), 0)) }.is_err());
        assert!(sealed_size(std::fs::File::open("/proc/self/exe").unwrap().as_fd()).is_err());
    }

    #[test]
    fn what_is_committed_has_its_memory_before_it_is_touched() {
        use std::os::unix::fs::MetadataExt;

        let fd = memfd(c"test", 1 << 20).unwrap();
        let file = std::fs::File::from(fd.try_clone().unwrap());
        let bytes = || file.metadata().unwrap().blocks() * 512;
        assert_eq!(bytes(), 0);
        commit(fd.as_fd(), 5000, 1 << 18).unwrap();
        assert!(bytes() >= 1 << 18, "{} bytes", bytes());
        assert!(commit(fd.as_fd(), 1 << 20, 1).is_err(), "it cannot grow");
    }

    #[test]
    fn reading_a_process_stops_at_unmapped_pages() {
        let source: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        let mut copy = vec![0; source.len()];
        let own = std::process::id();
        // Some sandboxes forbid the call even towards oneself: then there is nothing to test.
        match read_process(own, source.as_ptr() as u64, &mut copy) {
            Ok(()) => assert_eq!(copy, source),
            Err(cause) => {
                assert!(matches!(cause.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)), "{cause}")
            }
        }
        assert!(read_process(own, 16, &mut copy).is_err());
        assert!(read_process(own, u64::MAX - 4, &mut copy).is_err());
    }
}
