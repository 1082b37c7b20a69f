//! The memory that an endpoint shares with its peers of the same host: one sparse memfd, mapped by its owner
//! and by every peer that it was passed to.
//!
//! | offset | what |
//! |---|---|
//! | 0 | header: magic, layout version, pid, size; written once, before the descriptor is passed |
//! | 128 | the `parked` word, alone on its cache line pair (see [`super::bell`]) |
//! | 4096 | the flight recorder, opaque here |
//! | 12288 | what [`Segment::allocate`] hands out: rings, staging areas |
//!
//! The descriptor is sealed against shrinking, so a mapped page stays whatever the other side does.
//!
//! Pages have no memory before they are first touched: most of a segment is never used. Where the kernel
//! counts what it has promised, that touch may find none, which would end this process or a peer's. There,
//! and only there, what is handed out is committed first: elsewhere that would cost each rank some
//! milliseconds, and megabytes, for rings that it hardly uses.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result, Status, fail};
use crate::sys::heap::Heap;
use crate::sys::memory::{self, Mapping, memfd, sealed_size};

/// Bytes kept for the flight recorder in every segment.
pub const RECORDER_BYTES: usize = 8192;

const MAGIC: [u8; 8] = *b"unisono\0";
const LAYOUT: u32 = 1;
const PARKED_AT: usize = 128;
const RECORDER_AT: usize = 4096;
const HEAP_AT: usize = RECORDER_AT + RECORDER_BYTES;
const PAGE: usize = 4096;

/// What a segment starts with.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    magic: [u8; 8],
    layout: u32,
    pid: u32,
    size: u64,
}

/// Gives a part of a memfd its memory: where it begins, and how long it is.
type Commit = fn(BorrowedFd<'_>, usize, usize) -> io::Result<()>;

/// An endpoint's own segment: a sparse memfd, mapped shared. Pages are used when first touched.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    mapping: Mapping,
    heap: Mutex<Heap>,
    /// Set where a touch may find no memory.
    commit: Option<Commit>,
}

impl Segment {
    /// A segment of `size` bytes, rounded up to pages; at least one page is left for [`Segment::allocate`].
    pub fn new(size: usize) -> Result<Arc<Segment>> {
        let commit: Commit = memory::commit;
        Segment::committed_by(memory::is_counted().then_some(commit), size)
    }

    fn committed_by(commit: Option<Commit>, size: usize) -> Result<Arc<Segment>> {
        let Some(size) = size.max(HEAP_AT + PAGE).checked_next_multiple_of(PAGE) else {
            fail!(InvalidArgument, "a segment of {size} bytes does not fit the address space")
        };
        let fd = memfd(c"unisono", size).map_err(|cause| {
            Error::system(format_args!("cannot create a shared segment of {size} bytes"), cause)
        })?;
        let mapping = Mapping::new(fd.as_fd(), size).map_err(|cause| {
            Error::system(
                format_args!("no address space for a shared segment of {size} bytes (ulimit -v)"),
                cause,
            )
        })?;
        if let Some(commit) = commit {
            commit(fd.as_fd(), 0, HEAP_AT).map_err(|cause| {
                let text = format!("no memory for the first {HEAP_AT} bytes of a shared segment: {cause}");
                Error::new(Status::OutOfMemory, text)
            })?;
        }
        let header = Header { magic: MAGIC, layout: LAYOUT, pid: std::process::id(), size: size as u64 };
        // SAFETY: the mapping starts at a page, is longer than a header, and nobody else knows of it yet.
        unsafe {
            mapping.address(0, size_of::<Header>()).expect("longer than a header").cast().write(header)
        };
        let heap = Mutex::new(Heap::new(HEAP_AT, size));
        Ok(Arc::new(Segment { fd, mapping, heap, commit }))
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.mapping.len()
    }

    /// `len` zeroed bytes at a multiple of `align` (a power of two, at most 4096), or `None` when there is no
    /// room, or no memory.
    ///
    /// # Panics
    /// When `align` is not a power of two or more than 4096.
    pub fn allocate(self: &Arc<Self>, len: usize, align: usize) -> Option<Region> {
        assert!(align.is_power_of_two() && align <= PAGE, "alignment {align}");
        let mut heap = self.heap.lock().unwrap_or_else(PoisonError::into_inner);
        let (offset, used) = heap.take(len, align)?;
        drop(heap);
        let region = Region { segment: Arc::clone(self), offset, len, retired: false };
        if let Some(commit) = self.commit
            && let Err(cause) = commit(self.fd(), offset, len.max(1))
        {
            log::warn!("no memory for {len} bytes of the shared segment: {cause}");
            return None;
        }
        // SAFETY: the heap gave this range to nobody else. The kernel's pages are zero until they are first
        // handed out.
        unsafe { region.address().write_bytes(0, used.min(len)) };
        Some(region)
    }

    /// How much of it is handed out to nobody.
    #[cfg(test)]
    pub fn free_bytes(&self) -> usize {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner).free_bytes()
    }

    /// As [`Segment::allocate`], for what others can do without: `None` also when less than `spared` bytes
    /// would be left.
    pub fn allocate_sparing(self: &Arc<Self>, len: usize, align: usize, spared: usize) -> Option<Region> {
        let left = self.heap.lock().unwrap_or_else(PoisonError::into_inner).free_bytes();
        (left >= len.saturating_add(spared)).then(|| self.allocate(len, align)).flatten()
    }

    /// Where `offset..offset + len` is mapped, or `None` when it is not inside the segment.
    pub fn address(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        self.mapping.address(offset, len)
    }

    /// The flight recorder's area, aligned to 4096 bytes; peers read it through [`PeerSegment::recorder`].
    pub fn recorder(&self) -> NonNull<[u8; RECORDER_BYTES]> {
        recorder(&self.mapping)
    }

    /// The word that says that the owner sleeps or is about to (see [`super::bell`]).
    pub fn parked(&self) -> &AtomicU32 {
        parked(&self.mapping)
    }

    /// The memfd, to be passed to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A part of a [`Segment`], given back when dropped.
#[derive(Debug)]
pub struct Region {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
    retired: bool,
}

impl Region {
    /// From the segment's start, in bytes: what a peer is told.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// In bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it was asked for with no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Has it never be handed out again, even when dropped: a peer may still write to it.
    pub fn retire(&mut self) {
        self.retired = true;
    }

    /// Where it is mapped in this process. Valid while the region lives.
    pub fn address(&self) -> NonNull<u8> {
        self.segment.address(self.offset, self.len).expect("the heap hands out what is inside")
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.retired {
            self.segment.heap.lock().unwrap_or_else(PoisonError::into_inner).give_back(self.offset, self.len);
        }
    }
}

/// A peer's segment, mapped from the descriptor that it passed.
#[derive(Debug)]
pub struct PeerSegment {
    mapping: Mapping,
    pid: u32,
}

impl PeerSegment {
    /// Maps it, after its header and true size have been checked.
    pub fn map(fd: OwnedFd) -> Result<PeerSegment> {
        let size = sealed_size(fd.as_fd())
            .map_err(|cause| Error::system("the descriptor that the peer passed is no segment", cause))?;
        if size < HEAP_AT {
            fail!(System, "the peer's segment has {size} bytes, fewer than its header and recorder take");
        }
        let mapping = Mapping::new(fd.as_fd(), size).map_err(|cause| {
            Error::system(format_args!("cannot map the peer's segment of {size} bytes"), cause)
        })?;
        let at = mapping.address(0, size_of::<Header>()).expect("checked to be longer than a header");
        // SAFETY: inside the mapping, page-aligned, and any bytes are a valid Header. A hostile peer that
        // writes it meanwhile gets a torn value checked, never a wider access: the bounds come from the
        // mapping.
        let header: Header = unsafe { at.cast::<Header>().as_ptr().read_volatile() };
        if header.magic != MAGIC || header.layout != LAYOUT {
            fail!(System, "the peer's segment has another layout: run the same unisono on all ranks");
        }
        if header.size != size as u64 {
            fail!(System, "the peer's segment says {} bytes and has {size}", header.size);
        }
        Ok(PeerSegment { mapping, pid: header.pid })
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.mapping.len()
    }

    /// The process that made it, as its own pid namespace counts.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Where `offset..offset + len` of it is mapped here, or `None` when it is not inside the segment.
    pub fn address(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        self.mapping.address(offset, len)
    }

    /// The flight recorder's area of the peer. The peer may be writing it.
    pub fn recorder(&self) -> NonNull<[u8; RECORDER_BYTES]> {
        recorder(&self.mapping)
    }

    /// The peer's [`Segment::parked`].
    pub fn parked(&self) -> &AtomicU32 {
        parked(&self.mapping)
    }
}

fn recorder(mapping: &Mapping) -> NonNull<[u8; RECORDER_BYTES]> {
    mapping.address(RECORDER_AT, RECORDER_BYTES).expect("every segment is longer").cast()
}

fn parked(mapping: &Mapping) -> &AtomicU32 {
    let at = mapping.address(PARKED_AT, size_of::<AtomicU32>()).expect("every segment is longer");
    // SAFETY: inside the mapping, aligned, and only ever accessed as an atomic, here and in every peer.
    unsafe { at.cast::<AtomicU32>().as_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_peer_sees_the_same_bytes() {
        let own = Segment::new(1 << 20).unwrap();
        let peer = PeerSegment::map(own.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!((peer.size(), peer.pid()), (1 << 20, std::process::id()));
        let region = own.allocate(100, 64).unwrap();
        // SAFETY: both addresses are inside the mapping, and this thread alone uses it.
        unsafe {
            region.address().add(99).write(42);
            assert_eq!(peer.address(region.offset() + 99, 1).unwrap().read(), 42);
        }
        own.parked().store(1, Ordering::SeqCst);
        assert_eq!(peer.parked().load(Ordering::SeqCst), 1);
        assert!(peer.address(1 << 20, 1).is_none());
        assert!(peer.address(usize::MAX, 2).is_none());
        assert!(own.address((1 << 20) - 1, 1).is_some());
    }

    #[test]
    fn reused_memory_is_zero_and_a_full_segment_says_so() {
        let own = Segment::new(1 << 20).unwrap();
        let region = own.allocate(1 << 16, 64).unwrap();
        // SAFETY: this test alone uses the region.
        unsafe { region.address().write_bytes(7, 1 << 16) };
        drop(region);
        let region = own.allocate(1 << 17, 4096).unwrap();
        assert_eq!(region.offset() % 4096, 0);
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(region.address().as_ptr(), region.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        assert!(own.allocate(1 << 20, 64).is_none());
        assert!(own.allocate_sparing(1 << 17, 64, 1 << 20).is_none(), "too little would be left");
        assert!(own.allocate_sparing(1 << 17, 64, 1 << 17).is_some());
        assert!(own.allocate(usize::MAX, 64).is_none());
    }

    #[test]
    fn where_memory_is_counted_what_is_handed_out_has_it() {
        use std::os::unix::fs::MetadataExt;

        let own = Segment::committed_by(Some(memory::commit), 1 << 20).unwrap();
        let file = std::fs::File::from(own.fd().try_clone_to_owned().unwrap());
        let bytes = || file.metadata().unwrap().blocks() as usize * 512;
        assert!(bytes() >= HEAP_AT, "{} bytes", bytes());
        let region = own.allocate(1 << 18, 64).unwrap();
        assert!(bytes() >= HEAP_AT + region.len(), "{} bytes", bytes());
        assert!(own.allocate(0, 64).is_some());
    }

    #[test]
    fn where_there_is_no_memory_nothing_is_handed_out() {
        let nothing: Commit = |_, _, _| Err(io::ErrorKind::StorageFull.into());
        let error = Segment::committed_by(Some(nothing), 1 << 20).unwrap_err();
        assert_eq!(error.status(), Status::OutOfMemory, "{error}");
        let little: Commit = |_, offset, len| match offset + len {
            ..=HEAP_AT => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        };
        let own = Segment::committed_by(Some(little), 1 << 20).unwrap();
        let free = || own.heap.lock().unwrap().free_bytes();
        let before = free();
        assert!(own.allocate(1 << 18, 64).is_none());
        assert!(own.allocate_sparing(100, 64, 100).is_none());
        assert_eq!(free(), before, "it is free again");
    }

    #[test]
    fn hostile_segments_are_refused() {
        let refuse = |header: Header, size: usize| {
            let fd = memfd(c"test", size).unwrap();
            let mapping = Mapping::new(fd.as_fd(), size).unwrap();
            // SAFETY: page-aligned and inside; nobody else uses it.
            unsafe { mapping.address(0, size_of::<Header>()).unwrap().cast().write(header) };
            PeerSegment::map(fd).unwrap_err()
        };
        let good = Header { magic: MAGIC, layout: LAYOUT, pid: 1, size: 65536 };
        assert!(refuse(Header { magic: *b"whatever", ..good }, 65536).text().contains("layout"));
        assert!(refuse(Header { layout: 2, ..good }, 65536).text().contains("layout"));
        assert!(refuse(Header { size: 1 << 40, ..good }, 65536).text().contains("says"));
        assert!(refuse(Header { size: 4096, ..good }, 4096).text().contains("fewer"));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(PeerSegment::map(file.into()).is_err());
    }
}
