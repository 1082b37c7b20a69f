//! Which calls this rank is in: messages of others are compared with them.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;

use super::Messages;
use super::failure::{Mismatch, Trouble};
use super::hash::KeyHasher;
use crate::engine::spent::Spent;
use crate::engine::wire::{Class, Frame, Key};
use crate::signature::Signature;

/// The calls of every (group, tag, class), and the messages of collectives that nobody has asked for yet.
#[derive(Default)]
pub(super) struct Calls {
    calling: HashMap<(u64, u64, Class), Calling, BuildHasherDefault<KeyHasher>>,
    /// How many there have been of tags that have none now, by the group.
    spent: HashMap<u64, Spent>,
}

/// The calls of one group with one tag, one after the other.
#[derive(Default)]
struct Calling {
    /// The call that this rank is in, or was in last.
    current: Option<Current>,
    /// What has come unasked, by the calls' numbers: a rank that is far ahead sends for many.
    unasked: VecDeque<Unasked>,
}

#[derive(Clone, Copy)]
struct Current {
    sequence: u32,
    signature: Signature,
}

#[derive(Clone, Copy)]
struct Unasked {
    peer: u32,
    sequence: u32,
    slot: u64,
    signature: Signature,
}

/// Whether call `sequence` comes before call `other`. Numbers start again at 0 after the last.
fn before(sequence: u32, other: u32) -> bool {
    (sequence.wrapping_sub(other) as i32) < 0
}

impl Calls {
    /// What [`Messages::begin_call`] does. The first message that is of another call, or of one that is over.
    fn begin(&mut self, name: (u64, u64, Class), sequence: u32, signature: Signature) -> Option<Mismatch> {
        let (group, tag, class) = name;
        if let (Class::Tagged, Some(spent)) = (class, self.spent.get_mut(&group)) {
            spent.take(tag);
        }
        let calling = self.calling.entry(name).or_default();
        let current = Current { sequence, signature };
        calling.current = Some(current);
        let of_now = calling.unasked.iter().take_while(|unasked| !before(sequence, unasked.sequence));
        of_now.fold(None, |found, unasked| {
            let key = Key { group, tag, class, sequence: unasked.sequence, slot: unasked.slot };
            found.or_else(|| current.compare(unasked.peer, key, unasked.signature))
        })
    }

    /// What [`Messages::forget_call`] does.
    fn forget_current(&mut self, name: (u64, u64, Class)) {
        if let Some(calling) = self.calling.get_mut(&name) {
            calling.current = None;
        }
    }

    /// Call `sequence` of a tag is over. Of one that has no more to come just their number is kept.
    fn end(&mut self, group: u64, tag: u64, sequence: u32) {
        let name = (group, tag, Class::Tagged);
        if let Some(Calling { current, unasked }) = self.calling.get(&name)
            && (!unasked.is_empty() || current.is_some_and(|current| current.sequence != sequence))
        {
            return;
        }
        self.calling.remove(&name);
        self.spent.entry(group).or_default().put(tag, sequence.wrapping_add(1));
    }

    fn compare(&self, peer: u32, key: Key, signature: Signature) -> Option<Mismatch> {
        let calling = self.calling.get(&(key.group, key.tag, key.class));
        if let Some(current) = calling.and_then(|calling| calling.current) {
            return current.compare(peer, key, signature);
        }
        let had = match key.class {
            Class::Tagged => self.spent.get(&key.group)?.get(key.tag),
            _ => 0,
        };
        let over = had > 0 && before(key.sequence, had);
        over.then(|| Mismatch { peer, key, theirs: signature.call(), ours: None, bytes: None })
    }

    /// Keeps what is known of a message that nobody has asked for, until it is taken.
    fn keep(&mut self, peer: u32, key: Key, signature: Signature) {
        let calling = self.calling.entry((key.group, key.tag, key.class)).or_default();
        let unasked = Unasked { peer, sequence: key.sequence, slot: key.slot, signature };
        // Nearly always the last: then nothing is moved.
        let at = calling.unasked.partition_point(|other| !before(key.sequence, other.sequence));
        calling.unasked.insert(at, unasked);
    }

    /// A message that had come unasked is taken, or withdrawn.
    pub(super) fn taken(&mut self, peer: u32, key: Key) {
        let name = (key.group, key.tag, key.class);
        let Some(calling) = self.calling.get_mut(&name) else { return };
        let first = calling.unasked.partition_point(|other| before(other.sequence, key.sequence));
        let of_call = calling.unasked.range(first..).take_while(|other| other.sequence == key.sequence);
        let found = of_call.enumerate().find(|(_, other)| other.peer == peer && other.slot == key.slot);
        if let Some((offset, _)) = found {
            calling.unasked.remove(first + offset);
        }
        if calling.current.is_none() && calling.unasked.is_empty() {
            self.calling.remove(&name);
        }
    }

    pub(super) fn forget(&mut self, group: u64) {
        self.calling.retain(|(other, ..), _| *other != group);
        self.spent.remove(&group);
    }

    /// Calls and messages.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        let known = |calling: &Calling| usize::from(calling.current.is_some()) + calling.unasked.len();
        let calling: usize = self.calling.values().map(known).sum();
        calling + self.spent.values().map(Spent::runs).sum::<usize>()
    }
}

impl Current {
    /// Whether a peer's message that nobody has asked for is neither of this call nor of one to come.
    fn compare(&self, peer: u32, key: Key, theirs: Signature) -> Option<Mismatch> {
        let over = before(key.sequence, self.sequence);
        let theirs = theirs.call();
        let differs = key.sequence == self.sequence && theirs != self.signature;
        let ours = differs.then_some(self.signature);
        (over || differs).then_some(Mismatch { peer, key, theirs, ours, bytes: None })
    }
}

impl Messages {
    /// Says which call is now number `sequence` of (group, class, tag). Messages of another call with that
    /// number, or of numbers that are over, are mismatches from here on, those that have arrived among them.
    /// Calls that end before anybody looks at messages are left out.
    pub fn begin_call(&mut self, group: u64, class: Class, tag: u64, sequence: u32, signature: Signature) {
        let mismatch = self.calls.begin((group, tag, class), sequence, signature);
        self.troubles.extend(mismatch.map(Trouble::Mismatch));
    }

    /// The call of (group, class, tag) that was begun last is so long over that the numbers of those to come
    /// would soon be taken for ones before it. Nothing is compared with it any more.
    pub fn forget_call(&mut self, group: u64, class: Class, tag: u64) {
        self.calls.forget_current((group, tag, class));
    }

    /// Call `sequence` of (group, tag) is over.
    pub fn end_call(&mut self, group: u64, tag: u64, sequence: u32) {
        self.calls.end(group, tag, sequence);
    }

    /// A message has come that nobody has asked for.
    pub(super) fn unasked(&mut self, peer: u32, frame: &Frame) {
        if frame.key.class != Class::PointToPoint {
            self.check_call(peer, frame);
            self.calls.keep(peer, frame.key, frame.signature);
        }
    }

    /// Something nobody has asked for: is it of the call that this rank makes, or of one to come?
    pub(super) fn check_call(&mut self, peer: u32, frame: &Frame) {
        let mismatch = self.calls.compare(peer, frame.key, frame.signature);
        self.troubles.extend(mismatch.map(Trouble::Mismatch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::DataType;
    use crate::signature::Kind;

    const SUM: Signature = Signature {
        kind: Kind::Allreduce,
        dtype: DataType::F32,
        operator: 0,
        algorithm: 0,
        root: 0,
        count: 2,
        device: false,
    };
    const OTHER: Signature = Signature { count: 3, ..SUM };

    fn key(sequence: u32, slot: u64) -> Key {
        Key { group: 7, tag: 0, sequence, slot, class: Class::Ordered }
    }

    /// The call that a mismatch is of.
    fn begin(calls: &mut Calls, sequence: u32) -> Option<u32> {
        calls.begin((7, 0, Class::Ordered), sequence, SUM).map(|mismatch| mismatch.key.sequence)
    }

    #[test]
    fn messages_of_calls_to_come_wait_for_theirs_and_those_of_calls_that_are_over_are_told() {
        // The numbers start again in the middle.
        for first in [0u32, 0x7fff_fffe, 0xffff_fffe] {
            let call = |number: u32| first.wrapping_add(number);
            let mut calls = Calls::default();
            // Two ranks that are ahead, one of them further.
            let ahead = [(1, 0), (1, 1), (2, 0), (1, 2), (1, 3), (2, 1)];
            for (peer, number) in ahead {
                calls.keep(peer, key(call(number), 5), SUM);
            }
            assert_eq!(calls.entries(), 6);
            for number in 0..2 {
                assert_eq!(begin(&mut calls, call(number)), None);
                for peer in [2, 1] {
                    calls.taken(peer, key(call(number), 5));
                }
            }
            // One for each of two calls, and the call itself.
            assert_eq!(calls.entries(), 3);
            assert!(calls.compare(3, key(call(1), 0), SUM).is_none(), "of this call");
            assert!(calls.compare(3, key(call(1), 0), OTHER).is_some(), "of another with its number");
            assert!(calls.compare(3, key(call(0), 0), SUM).is_some(), "of one that is over");
            // Nobody takes the message of call 2.
            assert_eq!(begin(&mut calls, call(2)), None);
            assert_eq!(begin(&mut calls, call(3)), Some(call(2)));
        }
    }

    #[test]
    fn a_message_of_another_call_is_told_when_its_number_is_called() {
        let mut calls = Calls::default();
        calls.keep(1, key(1, 0), SUM);
        calls.keep(2, key(1, 0), OTHER);
        assert_eq!(begin(&mut calls, 0), None);
        let mismatch = calls.begin((7, 0, Class::Ordered), 1, SUM).expect("told");
        assert_eq!((mismatch.peer, mismatch.theirs, mismatch.ours), (2, OTHER, Some(SUM)));
    }

    #[test]
    fn of_tags_that_are_used_once_hardly_anything_is_kept_and_what_comes_late_is_told() {
        let mut calls = Calls::default();
        let key = |tag: u64, sequence| Key { group: 7, tag, sequence, slot: 0, class: Class::Tagged };
        for tag in 1..1000 {
            calls.keep(1, key(tag, 0), SUM);
            assert!(calls.begin((7, tag, Class::Tagged), 0, SUM).is_none());
            calls.taken(1, key(tag, 0));
            calls.end(7, tag, 0);
        }
        // Two stretches of tags, of which neither is full.
        assert_eq!(calls.entries(), 2);
        assert!(calls.compare(2, key(500, 0), SUM).is_some(), "of a call that is over");
        assert!(calls.compare(2, key(500, 1), SUM).is_none(), "of the next");
        assert!(calls.compare(2, key(1000, 0), SUM).is_none(), "of one to come");
        // One that has come for the next call stays when this one ends.
        assert!(calls.begin((7, 500, Class::Tagged), 1, SUM).is_none());
        calls.keep(1, key(500, 2), OTHER);
        calls.end(7, 500, 1);
        assert!(calls.begin((7, 500, Class::Tagged), 2, SUM).is_some(), "it differs");
        calls.forget(7);
        assert_eq!(calls.entries(), 0);
    }

    #[test]
    fn nothing_is_compared_with_a_call_that_is_forgotten() {
        let mut calls = Calls::default();
        assert_eq!(begin(&mut calls, 5), None);
        calls.forget_current((7, 0, Class::Ordered));
        for number in [6, 5 + (1 << 31)] {
            assert!(calls.compare(1, key(number, 0), SUM).is_none());
        }
        calls.keep(1, key(5 + (1 << 31), 0), SUM);
        assert_eq!(begin(&mut calls, 5 + (1 << 31)), None);
        assert!(calls.compare(1, key(4 + (1 << 31), 0), SUM).is_some(), "of one that is over");
    }

    #[test]
    fn messages_of_what_is_never_called_leave_nothing_behind() {
        let mut calls = Calls::default();
        for slot in 0..3 {
            calls.keep(1, key(0, slot), SUM);
        }
        for slot in [1, 0, 2] {
            calls.taken(1, key(0, slot));
        }
        assert!(calls.calling.is_empty());
        calls.taken(1, key(0, 0));
        assert!(calls.calling.is_empty());
    }
}
