//! The flight recorder: a rank's last calls, in its shared segment, so that others can read what it was doing
//! even when its process is stopped. Writing an entry is a few relaxed stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::wire::{Class, Key, Tag};
use crate::signature::Signature;
use crate::transport::segment::{RECORDER_BYTES, Segment};

const WORDS: usize = 8;
const ENTRIES: usize = RECORDER_BYTES / (8 * WORDS);

/// How far a recorded call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Progress {
    /// Running, or waiting for its turn.
    Running = 1,
    /// Ended well.
    Done = 2,
    /// Ended with an error.
    Failed = 3,
    /// A stream was given it, and does it without telling.
    Enqueued = 4,
}

/// What a running call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Nothing has been noted, or nothing that is a rank's.
    Unknown,
    /// A rank of the group.
    Rank(u32),
    /// Nothing: this rank is at work.
    Nothing,
}

/// Stands for [`Awaited::Nothing`] where a rank is written as the number behind its own.
const NOTHING: u64 = u32::MAX as u64;

impl Awaited {
    /// The rank, if it is one.
    pub fn rank(self) -> Option<u32> {
        if let Awaited::Rank(rank) = self { Some(rank) } else { None }
    }

    fn encode(self) -> u64 {
        match self {
            Awaited::Unknown => 0,
            Awaited::Rank(rank) => u64::from(rank) + 1,
            Awaited::Nothing => NOTHING,
        }
    }

    fn decode(word: u64) -> Awaited {
        match word {
            0 => Awaited::Unknown,
            NOTHING => Awaited::Nothing,
            _ => Awaited::Rank(word as u32 - 1),
        }
    }
}

/// One call of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The group's id.
    pub group: u64,
    /// What was called.
    pub signature: Signature,
    /// The caller's tag, or 0.
    pub tag: u64,
    /// Its number among those of its class and tag.
    pub sequence: u32,
    /// Which family the number belongs to.
    pub class: Class,
    /// How far it has come.
    pub progress: Progress,
    /// What it waited for when it last noted that.
    pub awaited: Awaited,
    /// When it was called, in nanoseconds since 1970.
    pub began: u64,
}

/// Where a call was recorded.
#[derive(Clone, Copy, Debug)]
pub struct Slot(u64);

/// The recorder of one endpoint. Any thread may write.
pub struct Recorder {
    segment: Arc<Segment>,
    next: AtomicU64,
    /// One moment on two clocks: the monotonic one, and nanoseconds since 1970. Calls read the clock once.
    epoch: (Instant, u64),
}

impl Recorder {
    /// A recorder over the segment's area for it.
    pub fn new(segment: Arc<Segment>) -> Recorder {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        Recorder { segment, next: AtomicU64::new(0), epoch: (Instant::now(), wall) }
    }

    /// Records the call that `key` names, made at `called`.
    pub fn begin(&self, key: Key, signature: Signature, called: Instant) -> Slot {
        self.record(key, signature, self.wall(called), Progress::Running)
    }

    /// Records calls that follow each other, the first of which `key` names, given to a stream at `called`:
    /// where `last` is, behind those `before`.
    pub fn enqueued(&self, key: Key, before: &[Signature], last: Signature, called: Instant) -> Slot {
        let began = self.wall(called);
        let record = |place: usize, signature| {
            let key = Key { sequence: key.sequence.wrapping_add(place as u32), ..key };
            self.record(key, signature, began, Progress::Enqueued)
        };
        for (place, signature) in before.iter().enumerate() {
            record(place, *signature);
        }
        record(before.len(), last)
    }

    /// A moment in nanoseconds since 1970.
    fn wall(&self, moment: Instant) -> u64 {
        let (start, wall) = self.epoch;
        wall + moment.saturating_duration_since(start).as_nanos() as u64
    }

    fn record(&self, key: Key, signature: Signature, began: u64, progress: Progress) -> Slot {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let words = self.entry(number);
        let packed = u64::from(signature.code()) | u64::from(key.class as u8) << 32;
        // Word 0 is written last and cleared first: a reader skips an entry that is being written.
        words[0].store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        words[1].store(key.group, Ordering::Relaxed);
        words[2].store(packed, Ordering::Relaxed);
        words[3].store(u64::from(signature.root) | u64::from(key.sequence) << 32, Ordering::Relaxed);
        words[4].store(signature.count, Ordering::Relaxed);
        words[5].store(began, Ordering::Relaxed);
        words[6].store(progress as u64, Ordering::Relaxed);
        words[7].store(key.tag, Ordering::Relaxed);
        words[0].store(number + 1, Ordering::Release);
        Slot(number)
    }

    /// Records the end of a call, or that it waits for nothing but its stream, if its entry still stands.
    pub fn end(&self, slot: Slot, progress: Progress) {
        let words = self.entry(slot.0);
        if words[0].load(Ordering::Relaxed) == slot.0 + 1 {
            words[6].store(progress as u64, Ordering::Relaxed);
        }
    }

    /// Notes what a running call waits for, if its entry still stands.
    pub fn note(&self, slot: Slot, awaited: Awaited) {
        let words = self.entry(slot.0);
        let runs = words[6].load(Ordering::Relaxed) & 0xff == Progress::Running as u64;
        if runs && words[0].load(Ordering::Relaxed) == slot.0 + 1 {
            words[6].store(Progress::Running as u64 | awaited.encode() << 32, Ordering::Relaxed);
        }
    }

    /// What a call was last seen to wait for, as [`Recorder::note`] has it.
    pub fn awaited(&self, slot: Slot) -> Awaited {
        let words = self.entry(slot.0);
        let word = words[6].load(Ordering::Relaxed);
        match words[0].load(Ordering::Relaxed) == slot.0 + 1 {
            true => Awaited::decode(word >> 32),
            false => Awaited::Unknown,
        }
    }

    /// As if a call had not been recorded.
    pub fn forget(&self, slot: Slot) {
        // Unless another has the entry by now.
        let _ = self.entry(slot.0)[0].compare_exchange(slot.0 + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The last call of this rank in `group`; one of the engine's own only while it runs.
    pub fn last(&self, group: u64) -> Option<Entry> {
        let over = |entry: &Entry| entry.class == Class::Internal && entry.progress == Progress::Done;
        self.find(|entry| entry.group == group && !over(entry))
    }

    /// The call of this rank in `group` that runs; those that have been called after it wait for their turn.
    pub fn running(&self, group: u64) -> Option<Entry> {
        let next = self.next.load(Ordering::Relaxed);
        (next.saturating_sub(ENTRIES as u64)..next)
            .filter_map(|number| decode(self.entry(number), number + 1))
            .find(|entry| entry.group == group && entry.progress == Progress::Running)
    }

    /// The call of this rank that runs in the group other than `group` in which it has called something last,
    /// of those in which any does.
    pub fn running_beside(&self, group: u64) -> Option<Entry> {
        let last = self.find(|entry| entry.group != group && entry.progress == Progress::Running)?;
        self.running(last.group)
    }

    /// The last group that this rank makes, or shares something with for the first time, and has not done
    /// with: its call there.
    pub fn setting_up(&self) -> Option<Entry> {
        self.find(|entry| entry.class == Class::Internal && entry.progress == Progress::Running)
    }

    /// How many calls it holds, if older ones have been lost for them.
    pub fn has_forgotten(&self) -> Option<usize> {
        (self.next.load(Ordering::Relaxed) > ENTRIES as u64).then_some(ENTRIES)
    }

    /// What this rank called, or will call in its turn, under the name `key`. Sends and receives have no such
    /// names.
    pub fn call(&self, key: Key) -> Option<Signature> {
        let same = |entry: &Entry| {
            (entry.group, entry.class, entry.tag, entry.sequence)
                == (key.group, key.class, key.tag, key.sequence)
        };
        self.find(same).map(|entry| entry.signature)
    }

    /// The last call that `wanted` accepts.
    pub fn find(&self, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
        let next = self.next.load(Ordering::Relaxed);
        (next.saturating_sub(ENTRIES as u64)..next)
            .rev()
            .filter_map(|number| decode(self.entry(number), number + 1))
            .find(wanted)
    }

    fn entry(&self, number: u64) -> &[AtomicU64; WORDS] {
        let area = self.segment.recorder();
        // SAFETY: the area is RECORDER_BYTES long, aligned to 64 and lives as long as the segment, which
        // `self` holds. It is only ever accessed as atomic words.
        unsafe { &*area.as_ptr().cast::<[AtomicU64; WORDS]>().add(number as usize % ENTRIES) }
    }
}

fn decode(words: &[AtomicU64; WORDS], expected: u64) -> Option<Entry> {
    if words[0].load(Ordering::Acquire) != expected {
        return None;
    }
    let word = |index: usize| words[index].load(Ordering::Relaxed);
    let packed = word(2);
    let entry = Entry {
        group: word(1),
        signature: Signature::decode(packed as u32, word(3) as u32, word(4)).ok()?,
        tag: word(7),
        sequence: (word(3) >> 32) as u32,
        class: match packed >> 32 & 0xff {
            0 => Class::Ordered,
            1 => Class::Tagged,
            2 => Class::PointToPoint,
            4 => Class::Captured,
            _ => Class::Internal,
        },
        progress: match word(6) & 0xff {
            1 => Progress::Running,
            2 => Progress::Done,
            4 => Progress::Enqueued,
            _ => Progress::Failed,
        },
        awaited: Awaited::decode(word(6) >> 32),
        began: word(5),
    };
    // Overwritten while it was read: then it is another call's, or half of two.
    fence(Ordering::Acquire);
    (words[0].load(Ordering::Relaxed) == expected).then_some(entry)
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match self.progress {
            Progress::Running => "still running",
            Progress::Done => "done",
            Progress::Failed => "failed",
            Progress::Enqueued => "given to its stream",
        };
        let Entry { signature, sequence, tag, .. } = self;
        write!(f, "{signature}")?;
        // Nobody but the engine counts its own.
        if self.class != Class::Internal {
            write!(f, " #{sequence}")?;
        }
        // Messages without a tag have 0.
        if self.class == Class::Tagged || self.class == Class::PointToPoint && *tag != 0 {
            write!(f, " with tag {}", Tag(*tag))?;
        }
        write!(f, ", {state}")?;
        match self.awaited {
            Awaited::Unknown => Ok(()),
            Awaited::Rank(rank) => write!(f, ", waiting for rank {rank}"),
            Awaited::Nothing => write!(f, ", at work by itself"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::BARRIER;

    #[test]
    fn a_call_is_told_with_its_tag_where_it_has_one() {
        let told = |class, tag| {
            let (progress, awaited, signature) = (Progress::Running, Awaited::Rank(2), BARRIER);
            let entry = Entry { group: 1, signature, tag, sequence: 4, class, progress, awaited, began: 0 };
            entry.to_string()
        };
        for class in [Class::Ordered, Class::PointToPoint] {
            assert_eq!(told(class, 0), "barrier() #4, still running, waiting for rank 2");
        }
        assert_eq!(told(Class::Tagged, 0), "barrier() #4 with tag 0, still running, waiting for rank 2");
        for class in [Class::Tagged, Class::PointToPoint] {
            let text = told(class, 1 << 32 | 7);
            assert_eq!(text, "barrier() #4 with tag 0x100000007, still running, waiting for rank 2");
        }
    }
}
