//! How many calls each tag has had, of those that have none now. Programs count their tags up and use each once, or a few times:
//! so neighbours with the same count are kept as one.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// The counts. Those of 0 are not kept.
#[derive(Debug, Default)]
pub(super) struct Spent(BTreeMap<Place, Run>);

/// Where a tag is: neighbours are tags that a program may use one after the other.
type Place = (Family, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    /// Of a program that counts in ones.
    Ones,
    /// Of one that counts from bit 24 on, as the slots of gloo do.
    Slots,
}

const SLOT_BITS: u32 = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// How many neighbours.
    length: u64,
    /// What each has had.
    count: u32,
}

fn place(tag: u64) -> Place {
    if tag != 0 && tag.trailing_zeros() >= SLOT_BITS {
        (Family::Slots, tag >> SLOT_BITS)
    } else {
        (Family::Ones, tag)
    }
}

impl Spent {
    /// How many calls a tag has had.
    pub(super) fn get(&self, tag: u64) -> u32 {
        self.find(place(tag)).map_or(0, |(_, run)| run.count)
    }

    /// The same, and forgets it.
    pub(super) fn take(&mut self, tag: u64) -> u32 {
        let (family, at) = place(tag);
        let Some((first, Run { length, count })) = self.find((family, at)) else { return 0 };
        let (before, behind) = (at - first, length - (at - first) - 1);
        if before == 0 {
            self.0.remove(&(family, first));
        } else {
            self.0.insert((family, first), Run { length: before, count });
        }
        if behind > 0 {
            self.0.insert((family, at + 1), Run { length: behind, count });
        }
        count
    }

    /// A tag has had so many.
    pub(super) fn put(&mut self, tag: u64, count: u32) {
        self.take(tag);
        if count == 0 {
            return;
        }
        let (family, at) = place(tag);
        let next = at.checked_add(1).and_then(|next| {
            let run = self.0.get(&(family, next))?;
            (run.count == count).then_some((next, run.length))
        });
        if let Some((next, _)) = next {
            self.0.remove(&(family, next));
        }
        let added = 1 + next.map_or(0, |(_, length)| length);
        let last = self.0.range_mut(..(family, at)).next_back();
        match last {
            Some((&(other, first), run))
                if other == family && run.count == count && first + run.length == at =>
            {
                run.length += added;
            }
            _ => drop(self.0.insert((family, at), Run { length: added, count })),
        }
    }

    /// The run that a place is in, and where it begins.
    fn find(&self, (family, at): Place) -> Option<(u64, Run)> {
        let (&(other, first), run) = self.0.range(..=(family, at)).next_back()?;
        (other == family && at - first < run.length).then_some((first, *run))
    }

    /// How much is kept.
    #[cfg(test)]
    pub(super) fn runs(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tags_that_are_counted_up_are_one_run_each_way() {
        let mut spent = Spent::default();
        for number in 1..10_000u64 {
            // Ends come out of order.
            let number = number ^ 1;
            spent.put(number, 1);
            spent.put(7 << 56 | number << SLOT_BITS, 1);
        }
        assert!(spent.runs() <= 4, "{spent:?}");
        assert_eq!((spent.get(5000), spent.get(7 << 56 | 5000 << SLOT_BITS), spent.get(1 << 40)), (1, 1, 0));
    }

    fn tags() -> impl Strategy<Value = u64> {
        let near = prop_oneof![0..6u64, u64::MAX - 3..=u64::MAX];
        (near, prop::bool::ANY).prop_map(|(tag, slot)| if slot { tag << SLOT_BITS } else { tag })
    }

    proptest! {
        #[test]
        fn counts_are_those_that_were_put(steps in prop::collection::vec((tags(), 0..3u32, prop::bool::ANY), 0..60)) {
            let (mut spent, mut model) = (Spent::default(), HashMap::new());
            for (tag, count, takes) in steps {
                if takes {
                    prop_assert_eq!(spent.take(tag), model.remove(&tag).unwrap_or(0));
                } else {
                    spent.put(tag, count);
                    model.insert(tag, count);
                }
                for (tag, count) in &model {
                    prop_assert_eq!(spent.get(*tag), *count);
                }
            }
            prop_assert!(spent.runs() <= model.len());
        }
    }
}
