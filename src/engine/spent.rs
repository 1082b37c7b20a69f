//! How many calls each tag has had, of those that have none now. Programs count their tags up and use each
//! once, or a few times; some have one counter for calls of several kinds. So neighbours are kept by the
//! stretch, and stretches that are alike, one behind the other, as one.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// The counts. Those of 0 are not kept.
#[derive(Debug, Default)]
pub(super) struct Spent([Runs; 2]);

/// Where a tag is: neighbours are tags that a program may use one after the other, for calls of one kind or
/// of several.
#[derive(Clone, Copy, Debug)]
struct Place {
    family: Family,
    stretch: u64,
    within: u16,
    kind: u8,
}

#[derive(Clone, Copy, Debug)]
enum Family {
    /// Of a program that counts in ones.
    Ones,
    /// Of one that counts from bit 24 on, as the slots of gloo do.
    Slots,
}

const SLOT_BITS: u32 = 24;

/// The bits above these are a call's kind, as in the slots of gloo.
const KIND_BITS: u32 = 56;

/// So many neighbours are a stretch: what a program repeats after 2 to 8 calls, or after 10, 12 or 14, looks
/// alike in all of them.
const STRETCH: u64 = 840;

/// Those of a family, by the numbers of their first stretches.
#[derive(Debug, Default)]
struct Runs {
    runs: BTreeMap<u64, Run>,
    /// The stretch that was left without counts last. One that still has none stays, since the next call of
    /// its tag comes back to it.
    hollow: Option<u64>,
}

#[derive(Debug)]
struct Run {
    /// How many stretches.
    length: u64,
    /// Of each of them.
    counts: Counts,
}

/// Of the places of a stretch, in the order of kinds and counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts(Vec<Alike>);

/// Those of one kind that have had the same.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Alike {
    kind: u8,
    count: u32,
    places: Places,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Places {
    /// Of tags that lie far apart: in their order, [`NOWHERE`] behind them.
    Few([u16; FEW]),
    /// If they are more, a bit each.
    Many(Box<[u64; STRETCH.div_ceil(64) as usize]>),
}

/// As many as fit where the pointer to the bits would be.
const FEW: usize = 6;

const NOWHERE: u16 = u16::MAX;

impl Place {
    fn of(tag: u64) -> Place {
        let kind = (tag >> KIND_BITS) as u8;
        let number = tag & ((1 << KIND_BITS) - 1);
        let (family, number) = if tag != 0 && tag.trailing_zeros() >= SLOT_BITS {
            (Family::Slots, number >> SLOT_BITS)
        } else {
            (Family::Ones, number)
        };
        Place { family, stretch: number / STRETCH, within: (number % STRETCH) as u16, kind }
    }
}

impl Spent {
    /// How many calls a tag has had.
    pub(super) fn get(&self, tag: u64) -> u32 {
        let place = Place::of(tag);
        self.0[place.family as usize].get(place)
    }

    /// The same, and forgets it.
    pub(super) fn take(&mut self, tag: u64) -> u32 {
        let place = Place::of(tag);
        self.0[place.family as usize].take(place)
    }

    /// A tag has had so many.
    pub(super) fn put(&mut self, tag: u64, count: u32) {
        let place = Place::of(tag);
        let runs = &mut self.0[place.family as usize];
        match count {
            0 => drop(runs.take(place)),
            _ => runs.put(place, count),
        }
    }

    /// Whether no tag has had a call.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|family| family.runs.is_empty())
    }

    /// How much is kept.
    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        let runs = self.0.iter().flat_map(|family| family.runs.values());
        runs.filter(|run| !run.counts.are_none()).count()
    }
}

impl Runs {
    fn get(&self, place: Place) -> u32 {
        self.find(place.stretch).map_or(0, |(_, run)| run.counts.get(place))
    }

    fn take(&mut self, place: Place) -> u32 {
        let count = self.get(place);
        if count == 0 {
            return 0;
        }
        self.part(place.stretch);
        if let Some(alone) = self.runs.get_mut(&place.stretch) {
            alone.counts.remove(place);
            if alone.counts.are_none() {
                self.leave_hollow(place.stretch);
            }
        }
        count
    }

    /// A stretch has no counts left. The last one of which that is so goes in its stead.
    fn leave_hollow(&mut self, stretch: u64) {
        if let Some(other) = self.hollow.replace(stretch)
            && other != stretch
            && self.runs.get(&other).is_some_and(|run| run.counts.are_none())
        {
            self.runs.remove(&other);
        }
    }

    fn put(&mut self, place: Place, count: u32) {
        match self.runs.get_mut(&place.stretch) {
            Some(Run { length: 1, counts }) => counts.put(place, count),
            _ => {
                self.part(place.stretch);
                let fresh = || Run { length: 1, counts: Counts::default() };
                self.runs.entry(place.stretch).or_insert_with(fresh).counts.put(place, count);
            }
        }
        self.join(place.stretch);
    }

    /// The run that a stretch is in, and where it begins.
    fn find(&self, stretch: u64) -> Option<(u64, &Run)> {
        let (&first, run) = self.runs.range(..=stretch).next_back()?;
        (stretch - first < run.length).then_some((first, run))
    }

    /// A stretch that is in a run with others is one of its own.
    fn part(&mut self, stretch: u64) {
        let Some((first, Run { length: length @ 2.., counts })) = self.find(stretch) else { return };
        let (before, behind) = (stretch - first, length - (stretch - first) - 1);
        let counts = counts.clone();
        if before > 0 {
            self.runs.insert(first, Run { length: before, counts: counts.clone() });
        }
        if behind > 0 {
            self.runs.insert(stretch + 1, Run { length: behind, counts: counts.clone() });
        }
        self.runs.insert(stretch, Run { length: 1, counts });
    }

    /// A run of one stretch becomes one with its neighbours that are like it.
    fn join(&mut self, stretch: u64) {
        let mut near = self.runs.range(..=stretch + 1).rev();
        let (mut behind, mut own) = (None, near.next());
        if own.is_some_and(|(&first, _)| first > stretch) {
            (behind, own) = (own, near.next());
        }
        let (Some((_, own)), before) = (own, near.next()) else { return };
        let behind = behind.filter(|(_, run)| run.counts == own.counts).map(|(_, run)| run.length);
        let before = before
            .filter(|&(first, run)| first + run.length == stretch && run.counts == own.counts)
            .map(|(&first, _)| first);
        if behind.is_none() && before.is_none() {
            return;
        }
        let first = before.unwrap_or(stretch);
        if before.is_some() {
            self.runs.remove(&stretch);
        }
        if behind.is_some() {
            self.runs.remove(&(stretch + 1));
        }
        if let Some(run) = self.runs.get_mut(&first) {
            run.length = stretch + 1 + behind.unwrap_or(0) - first;
        }
    }
}

impl Counts {
    fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    fn get(&self, place: Place) -> u32 {
        self.0.iter().find(|alike| alike.has(place)).map_or(0, |alike| alike.count)
    }

    fn remove(&mut self, place: Place) {
        let own = self.0.iter().position(|alike| alike.has(place));
        if let Some(at) = own {
            self.0[at].places.remove(place.within);
            if self.0[at].places.are_none() {
                self.0.remove(at);
            }
        }
    }

    fn put(&mut self, place: Place, count: u32) {
        self.remove(place);
        let own = (place.kind, count);
        let at = self.0.partition_point(|alike| (alike.kind, alike.count) < own);
        if self.0.get(at).is_none_or(|alike| (alike.kind, alike.count) != own) {
            self.0.reserve_exact(1);
            self.0.insert(at, Alike { kind: place.kind, count, places: Places::Few([NOWHERE; FEW]) });
        }
        self.0[at].places.add(place.within);
    }
}

impl Alike {
    fn has(&self, place: Place) -> bool {
        self.kind == place.kind && self.places.has(place.within)
    }
}

impl Places {
    fn has(&self, place: u16) -> bool {
        match self {
            Places::Few(few) => few.contains(&place),
            Places::Many(bits) => bits[usize::from(place / 64)] & 1 << (place % 64) != 0,
        }
    }

    /// One that is not among them.
    fn add(&mut self, place: u16) {
        match self {
            Places::Few(few) if few[FEW - 1] == NOWHERE => {
                let at = few.partition_point(|&other| other < place);
                few.copy_within(at..FEW - 1, at + 1);
                few[at] = place;
            }
            Places::Few(few) => {
                let mut bits = Box::new([0; _]);
                for place in few.iter().chain([&place]) {
                    bits[usize::from(place / 64)] |= 1 << (place % 64);
                }
                *self = Places::Many(bits);
            }
            Places::Many(bits) => bits[usize::from(place / 64)] |= 1 << (place % 64),
        }
    }

    /// One that is among them.
    fn remove(&mut self, place: u16) {
        match self {
            Places::Few(few) => {
                let at = few.partition_point(|&other| other < place);
                few.copy_within(at + 1.., at);
                few[FEW - 1] = NOWHERE;
            }
            Places::Many(bits) => {
                bits[usize::from(place / 64)] &= !(1 << (place % 64));
                let left = bits.iter().map(|word| word.count_ones() as usize).sum::<usize>();
                if left == FEW {
                    let mut all = (0..STRETCH as u16).filter(|&place| self.has(place));
                    *self = Places::Few(std::array::from_fn(|_| all.next().unwrap_or(NOWHERE)));
                }
            }
        }
    }

    fn are_none(&self) -> bool {
        matches!(self, Places::Few([NOWHERE, ..]))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// A slot as gloo counts them.
    fn slot(kind: u64, number: u64) -> u64 {
        kind << KIND_BITS | number << SLOT_BITS
    }

    /// What is kept of tags that have had so many calls each.
    fn kept(calls: impl Iterator<Item = (u64, u32)>) -> (usize, Spent) {
        let mut spent = Spent::default();
        let all: Vec<_> = calls.collect();
        for &(tag, count) in &all {
            spent.put(tag, count);
        }
        for (tag, count) in all {
            assert_eq!(spent.get(tag), count, "{tag:#x}");
        }
        (spent.runs(), spent)
    }

    #[test]
    fn tags_that_are_counted_up_are_a_few_runs_each_way() {
        // Ends come out of order.
        let numbers = || (1..100_000).map(|number| number ^ 1);
        let (runs, spent) = kept(numbers().flat_map(|number| [(number, 1), (slot(7, number), 1)]));
        assert!(runs <= 6, "{spent:?}");
        assert_eq!((spent.get(100_000), spent.get(slot(7, 100_000)), spent.get(slot(6, 5000))), (0, 0, 0));
    }

    /// By the turn and how many there are: the kind of the call, and how many it is made of.
    type OfTurn = fn(u64, u64) -> (u64, u32);

    #[test]
    fn kinds_of_calls_that_take_turns_by_one_counter_are_a_few_runs() {
        for period in 1..=8u64 {
            // Each another kind, one of them mostly, and some made of two.
            let turns: [OfTurn; 3] = [
                |turn, _| (turn, 1),
                |turn, period| (u64::from(turn + 1 == period), 1),
                |turn, period| (turn / 2, 1 + u32::from(turn % 3 == period % 2)),
            ];
            for of_turn in turns {
                let (runs, spent) = kept((0..100_000).map(|number| {
                    let (kind, count) = of_turn(number % period, period);
                    (slot(4 + kind, number), count)
                }));
                assert!(runs <= 2, "{period}: {spent:?}");
            }
        }
    }

    #[test]
    fn kinds_of_calls_in_no_order_take_a_run_in_hundreds_of_calls() {
        let kinds = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        let (runs, _) =
            kept((0..100_000).map(|number| (slot(4 + kinds(number), number), 1 + kinds(number) as u32 % 2)));
        assert_eq!(runs as u64, 100_000u64.div_ceil(STRETCH));
    }

    #[test]
    fn a_tag_that_is_used_again_and_again_leaves_no_stretch_without_counts() {
        let mut spent = Spent::default();
        for number in 0..1000 {
            spent.put(number * STRETCH, 1);
        }
        for number in 0..1000 {
            assert_eq!(spent.take(number * STRETCH), 1);
            assert!(spent.0[0].runs.len() <= 1000 - number as usize, "{number}");
        }
        assert_eq!(spent.runs(), 0);
    }

    fn tags() -> impl Strategy<Value = u64> {
        let near = prop_oneof![0..6u64, STRETCH - 3..STRETCH + 3, u64::MAX - 3..=u64::MAX];
        (near, prop::bool::ANY).prop_map(|(tag, slot)| if slot { tag << SLOT_BITS } else { tag })
    }

    /// Those of a kind that are counted up, by ones or more: a few, or stretches full.
    fn counted() -> impl Strategy<Value = Vec<u64>> {
        let numbers = (0..3 * STRETCH, 1..4usize, 0..4 * STRETCH);
        (numbers, 0..3u64, prop::bool::ANY).prop_map(|((first, step, last), kind, slot)| {
            let tag = |number| {
                if slot { kind << KIND_BITS | number << SLOT_BITS } else { kind << KIND_BITS | number }
            };
            (first..last).step_by(step).map(tag).collect()
        })
    }

    fn check(steps: Vec<(Vec<u64>, u32, bool)>) -> std::result::Result<(), TestCaseError> {
        let (mut spent, mut model) = (Spent::default(), HashMap::new());
        for (tags, count, takes) in steps {
            for tag in tags {
                if takes {
                    prop_assert_eq!(spent.take(tag), model.remove(&tag).unwrap_or(0));
                } else {
                    spent.put(tag, count);
                    model.insert(tag, count);
                }
            }
            for (tag, count) in &model {
                prop_assert_eq!(spent.get(*tag), *count);
            }
        }
        model.retain(|_, count| *count > 0);
        prop_assert!(spent.runs() <= model.len());
        for tag in model.keys() {
            spent.take(*tag);
        }
        prop_assert_eq!(spent.runs(), 0);
        Ok(())
    }

    proptest! {
        #[test]
        fn counts_are_those_that_were_put(steps in prop::collection::vec((tags(), 0..3u32, prop::bool::ANY), 0..60)) {
            check(steps.into_iter().map(|(tag, count, takes)| (vec![tag], count, takes)).collect())?;
        }

        #[test]
        fn counts_of_whole_stretches_are_those_that_were_put(steps in prop::collection::vec((counted(), 0..3u32, prop::bool::ANY), 0..20)) {
            check(steps)?;
        }
    }
}
