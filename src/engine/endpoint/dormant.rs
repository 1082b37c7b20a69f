//! Operations that are not looked at until something comes for them.
//!
//! Each look at everything looks at each operation. Of a few that takes less than to know which of them it
//! may be of use to. Of more than [`CROWD`], those that have been looked at in vain lie dormant here,
//! whatever their number, until one of these comes: something in their mailbox, their turn, the failure of
//! their group, or the moment at which they are to be looked at whatever comes.

#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use crate::deadline::Deadline;

/// So many are looked at each time; in tests few, so that all of them have some that lie dormant.
pub(super) const CROWD: usize = if cfg!(test) { 2 } else { 32 };

/// Names of operations; each of one as long as it lies here.
pub(super) type Name = u64;

/// Those that lie dormant, each with the moment at which it is due.
pub(super) struct Dormant<T> {
    all: HashMap<Name, (T, Deadline)>,
    /// Those that are ever due, the next one first.
    due: BTreeSet<(Instant, Name)>,
}

impl<T> Default for Dormant<T> {
    fn default() -> Dormant<T> {
        Dormant { all: HashMap::new(), due: BTreeSet::new() }
    }
}

impl<T> Dormant<T> {
    /// How many.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// One more, which is due at its deadline.
    pub(super) fn add(&mut self, name: Name, operation: T, due: Deadline) {
        self.due.extend(due.moment().map(|moment| (moment, name)));
        self.all.insert(name, (operation, due));
    }

    /// Takes one out, if it is here.
    pub(super) fn take(&mut self, name: Name) -> Option<T> {
        let (operation, due) = self.all.remove(&name)?;
        if let Some(moment) = due.moment() {
            self.due.remove(&(moment, name));
        }
        Some(operation)
    }

    /// Takes out one that is due by `now`.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<T> {
        let &(_, name) = self.due.first().filter(|(moment, _)| *moment <= now)?;
        self.take(name)
    }

    /// Takes out those that are `wanted`. Looks at all.
    pub(super) fn take_all(&mut self, wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let names: Vec<Name> =
            self.all.iter().filter(|(_, (operation, _))| wanted(operation)).map(|(name, _)| *name).collect();
        names.into_iter().filter_map(|name| self.take(name)).collect()
    }

    /// Whether any is `wanted`.
    pub(super) fn any(&self, wanted: impl Fn(&T) -> bool) -> bool {
        self.all.values().any(|(operation, _)| wanted(operation))
    }

    /// When the next one is due.
    pub(super) fn next_due(&self) -> Deadline {
        self.due.first().map_or(Deadline::NEVER, |(moment, _)| Deadline::at(*moment))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn those_that_are_due_come_first_and_once() {
        let now = Instant::now();
        let after = |millis| Deadline::since(now, Duration::from_millis(millis));
        let mut dormant = Dormant::default();
        for (name, due) in
            [(1, after(30)), (2, after(10)), (3, Deadline::NEVER), (4, after(10)), (5, after(20))]
        {
            dormant.add(name, name, due);
        }
        assert_eq!(dormant.next_due(), after(10));
        assert_eq!(dormant.take_due(now), None);
        // Two at one moment, and one that has gone before it was due.
        assert_eq!((dormant.take(5), dormant.take(5)), (Some(5), None));
        let by = |dormant: &mut Dormant<_>, millis| dormant.take_due(now + Duration::from_millis(millis));
        assert_eq!([(); 3].map(|()| by(&mut dormant, 29)), [Some(2), Some(4), None]);
        assert_eq!(dormant.next_due(), after(30));
        assert_eq!(dormant.take_all(|name| *name != 3), [1]);
        assert_eq!((dormant.next_due(), dormant.len()), (Deadline::NEVER, 1));
        assert_eq!((dormant.take(3), dormant.len()), (Some(3), 0));
        assert!(dormant.due.is_empty());
    }
}
