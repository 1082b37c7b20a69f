//! Long messages that come in over several lanes: their pieces are counted by whoever reads them, and begun
//! by a hauler without the endpoint's lock. That is taken once for a message, by whoever has read the last.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::Destination;
use crate::engine::endpoint::lock;
use crate::engine::wire::{Frame, FrameKind, Key};
use crate::sys::fork;

/// What comes of one message.
#[derive(Debug)]
pub struct Inflow {
    into: Destination,
    /// Bytes that have begun to come, or [`CLOSED`],
    begun: AtomicUsize,
    /// and that are here.
    here: AtomicUsize,
}

/// So many never come.
const CLOSED: usize = usize::MAX;

// SAFETY: it names memory that its receiver promised to be usable from the library's threads; who is given a
// part of it has that alone.
unsafe impl Sync for Inflow {}

impl Inflow {
    /// Where the bytes of a piece go, which begin to come. `None`: it is no piece of this message, or comes
    /// twice. So all that has begun is here when all is, and nothing is written there afterwards, whatever a
    /// member sends.
    pub fn begin(&self, frame: &Frame) -> Option<Destination> {
        let length = frame.length as usize;
        let fits = |begun: usize| begun.checked_add(length).filter(|&begun| begun <= self.into.len);
        if frame.kind != FrameKind::Data || frame.total != self.into.len as u64 {
            return None;
        }
        self.begun.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        // SAFETY: the frame's end is at most its total, which is the length of the buffer.
        Some(unsafe { self.into.part(frame.offset as usize, frame.length) })
    }

    /// Whether anything has begun to come.
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed) > 0
    }

    /// Whether nothing has begun to come. Then nothing begins any more: its memory may be another message's.
    pub fn close(&self) -> bool {
        self.begun.compare_exchange(0, CLOSED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// So many bytes are here. Whether all are.
    pub(super) fn add(&self, length: usize) -> bool {
        // Whoever sees the last sees the others.
        self.here.fetch_add(length, Ordering::AcqRel) + length == self.into.len
    }
}

/// The messages that may come in from one peer, since it was told that there is memory for them.
#[derive(Debug)]
pub struct Intake {
    /// Few: nearly always one.
    inflows: Mutex<Vec<(Key, Arc<Inflow>)>>,
    count: AtomicUsize,
    fork: u32,
}

impl Default for Intake {
    fn default() -> Intake {
        Intake { inflows: Mutex::default(), count: AtomicUsize::new(0), fork: fork::generation() }
    }
}

impl Intake {
    /// A message may come now, which goes there. As long as this is kept, haulers find it.
    pub fn open(self: &Arc<Intake>, key: Key, into: Destination) -> Opened {
        let inflow = Arc::new(Inflow { into, begun: AtomicUsize::new(0), here: AtomicUsize::new(0) });
        let mut inflows = lock(&self.inflows);
        inflows.push((key, inflow.clone()));
        self.count.store(inflows.len(), Ordering::Relaxed);
        Opened { intake: self.clone(), key, inflow }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// The message with this name.
    pub fn find(&self, key: &Key) -> Option<Arc<Inflow>> {
        let inflows = lock(&self.inflows);
        inflows.iter().find(|(name, _)| name == key).map(|(_, inflow)| inflow.clone())
    }
}

/// A message that haulers find. When this is dropped, none begins with a piece of it any more: who then has
/// locked each lane once, and looked what comes there, knows that nothing else is written to its memory.
#[derive(Debug)]
pub struct Opened {
    intake: Arc<Intake>,
    key: Key,
    inflow: Arc<Inflow>,
}

impl Opened {
    /// The message.
    pub fn inflow(&self) -> &Arc<Inflow> {
        &self.inflow
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // In the child of a fork there is no hauler, and one may have held the lock.
        if self.intake.fork != fork::generation() {
            return;
        }
        let mut inflows = lock(&self.intake.inflows);
        inflows.retain(|(key, _)| *key != self.key);
        self.intake.count.store(inflows.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{KEY, frame};
    use super::*;

    const OTHER: Key = Key { sequence: 1, ..KEY };

    fn piece(offset: usize, length: usize, total: usize) -> Frame {
        frame(FrameKind::Data, KEY, offset, length, total)
    }

    #[test]
    fn a_message_is_here_with_the_last_of_its_bytes_and_takes_no_more() {
        let mut memory = [0u8; 100];
        let (intake, address) = (Arc::new(Intake::default()), memory.as_mut_ptr());
        let opened = intake.open(KEY, Destination { address, len: 100 });
        assert!(intake.find(&Key { sequence: 1, ..KEY }).is_none());
        let inflow = intake.find(&KEY).expect("it is open");
        assert!(!opened.inflow().has_begun());
        // Of another message with its name.
        assert!(inflow.begin(&piece(0, 50, 99)).is_none());
        let into = inflow.begin(&piece(60, 40, 100)).expect("it fits");
        assert_eq!((into.address, into.len), (address.wrapping_add(60), 40));
        assert!(opened.inflow().has_begun());
        assert!(!inflow.add(40));
        // More than is left, though each byte has its place.
        assert!(inflow.begin(&piece(0, 61, 100)).is_none());
        assert!(inflow.begin(&piece(0, 60, 100)).is_some());
        assert!(inflow.begin(&piece(0, 1, 100)).is_none(), "all of it has begun");
        assert!(inflow.add(60));
    }

    #[test]
    fn a_message_that_is_closed_before_its_first_piece_begins_gets_none() {
        let mut memory = [0u8; 100];
        let (intake, into) = (Arc::default(), Destination { address: memory.as_mut_ptr(), len: 100 });
        let (opened, begun) = (Intake::open(&intake, KEY, into), Intake::open(&intake, OTHER, into));
        // A hauler has found it.
        let found = intake.find(&KEY).expect("it is open");
        assert!(opened.inflow().close());
        for length in [0, 1, 100] {
            assert!(found.begin(&piece(0, length, 100)).is_none());
        }
        let found = intake.find(&OTHER).expect("it is open");
        assert!(found.begin(&piece(0, 1, 100)).is_some());
        assert!(!begun.inflow().close());
        assert!(found.begin(&piece(1, 99, 100)).is_some());
    }

    #[test]
    fn nobody_finds_a_message_that_is_not_open_any_more() {
        let mut memory = [0u8; 2];
        let intake = Arc::new(Intake::default());
        let [one, two] =
            [KEY, OTHER].map(|key| intake.open(key, Destination { address: memory.as_mut_ptr(), len: 2 }));
        drop(one);
        assert!(intake.find(&KEY).is_none() && intake.find(&OTHER).is_some() && !intake.is_empty());
        drop(two);
        assert!(intake.find(&OTHER).is_none() && intake.is_empty());
    }
}
