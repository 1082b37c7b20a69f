//! Groups that take each other's place.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::engine::endpoint::lock;

/// A group and those that take its place, one after the other. They make the same children, so that ranks go
/// on together though some of them have the one and some the other. So who has let go of one of them may yet
/// make children; who has let go of all that it had makes none. Which those were the others need not know: it
/// says so of the line.
pub(super) struct Line {
    id: u64,
    /// How many of its groups are here.
    groups: AtomicU32,
    /// How often each named child was made: makes the next one different.
    children: Mutex<HashMap<(String, Vec<u32>), u32>>,
}

impl Line {
    /// That of a group which takes nobody's place. Its number is the same on all members, and (with the
    /// certainty that no two groups have one) no group's and no other line's.
    pub(super) fn of(first: u64) -> Arc<Line> {
        Arc::new(Line { id: !first, groups: AtomicU32::new(1), children: Mutex::default() })
    }

    /// For a group that takes the place of one which is there.
    pub(super) fn join(self: &Arc<Line>) -> Arc<Line> {
        self.groups.fetch_add(1, Ordering::Relaxed);
        self.clone()
    }

    /// One of its groups goes. The line's number, if that was the last one here.
    pub(super) fn leave(&self) -> Option<u64> {
        (self.groups.fetch_sub(1, Ordering::Relaxed) == 1).then_some(self.id)
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// How many children of this name and these ranks there are, with a new one.
    pub(super) fn count(&self, name: &str, ranks: &[u32]) -> u32 {
        let mut children = lock(&self.children);
        let count = children.entry((name.to_string(), ranks.to_vec())).or_insert(0);
        *count += 1;
        *count
    }
}
