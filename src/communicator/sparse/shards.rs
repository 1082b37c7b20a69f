//! Who merges what, when each rank merges a part of the indices: parts that are about equally long, by what
//! all ranks have told.

#![forbid(unsafe_code)]

use super::order::{Groups, Order};
use super::pace::{Pace, STRETCH};
use super::tensor::Shape;

/// Leading coordinates that each rank tells of, of elements that are evenly far apart.
const SAMPLES: usize = 32;

/// Words that each rank tells: how many different elements it has, and its samples.
pub(super) const WORDS: usize = 1 + SAMPLES;

/// Below this many bytes of all ranks together, four more rounds take longer than what they save.
const WORTHWHILE: usize = 1024 * 1024;

/// What an element counts whose leading coordinate is looked up, somewhere in memory if the elements are not
/// in order.
const SHOWN_BYTES: usize = 32;

/// Two ranks would send as many bytes either way.
const FEWEST: usize = 3;

/// Where the parts begin: the leading coordinates of all but the first, in order. The same on every rank.
#[derive(Debug)]
pub(super) struct Shards {
    starts: Vec<i64>,
}

impl Shards {
    /// One for each rank, by the words of all. `None`: each is to merge everything.
    pub(super) fn of(words: &[u64], shape: &Shape) -> Option<Shards> {
        let told = words.as_chunks::<WORDS>().0;
        let bytes = told.iter().try_fold(0_usize, |bytes, words| {
            let nnz = usize::try_from(words[0]).ok()?;
            bytes.checked_add(shape.words(nnz)?.checked_mul(8)?)
        });
        // What no memory holds is refused where it is to be gathered.
        if told.len() < FEWEST || bytes? < WORTHWHILE {
            return None;
        }
        Some(Shards::between(told))
    }

    fn between(told: &[[u64; WORDS]]) -> Shards {
        // Each sample stands for as many elements as the rank's others.
        let mut samples: Vec<(i64, u128)> = Vec::with_capacity(told.len() * SAMPLES);
        for [nnz, list @ ..] in told {
            let count = sampled(*nnz).1;
            let weight = (u128::from(*nnz) << 32) / count.max(1) as u128;
            samples.extend(list[..count].iter().map(|number| (number.cast_signed(), weight)));
        }
        samples.sort_unstable();
        let all: u128 = samples.iter().map(|(_, weight)| weight).sum();
        let parts = told.len() as u128;
        let (mut starts, mut before) = (Vec::with_capacity(told.len() - 1), 0);
        for (leading, weight) in samples {
            // A sample lies in the middle of what it stands for. Several parts may begin at an index that
            // many ranks have; all but the last of them are empty.
            let ends = |part: u128| (2 * before + weight) * parts >= 2 * all * part;
            while (starts.len() as u128) < parts - 1 && ends(starts.len() as u128 + 1) {
                starts.push(leading);
            }
            before += weight;
        }
        starts.resize(told.len() - 1, i64::MAX);
        Shards { starts }
    }

    /// How many of a rank's different elements belong to each part.
    pub(super) async fn lengths(&self, order: &Order, leading: &[i64], pace: &Pace) -> Vec<u64> {
        let (mut lengths, mut shard, mut groups) = (vec![0; self.starts.len() + 1], 0, order.groups());
        while self.count(&mut groups, leading, &mut shard, &mut lengths) {
            pace.spend(STRETCH * SHOWN_BYTES).await;
        }
        lengths
    }

    /// Counts the next elements, of which the first belongs to the part `shard` or to one behind it. Whether
    /// there were any.
    fn count(
        &self,
        groups: &mut Groups<'_>,
        leading: &[i64],
        shard: &mut usize,
        lengths: &mut [u64],
    ) -> bool {
        let mut at = *shard;
        let any = groups.show(leading, |number| {
            while self.starts.get(at).is_some_and(|start| *start <= number) {
                at += 1;
            }
            lengths[at] += 1;
        });
        *shard = at;
        any
    }
}

/// What a rank tells of its elements, of which `leading` are the first coordinates as they were given.
pub(super) async fn words(order: &Order, leading: &[i64], pace: &Pace) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    words[0] = order.different as u64;
    let (step, count) = sampled(words[0]);
    let (mut groups, mut ahead) = (order.groups(), step / 2);
    for sample in &mut words[1..=count] {
        groups.skip(ahead as usize, pace).await;
        let Some(place) = groups.first() else { break };
        *sample = leading[place].cast_unsigned();
        ahead = step;
    }
    words
}

/// How far samples of so many elements are apart, and how many there are.
fn sampled(nnz: u64) -> (u64, usize) {
    let step = nnz.div_ceil(SAMPLES as u64).max(1);
    // The first lies in the middle of its step.
    (step, (nnz.saturating_sub(step / 2)).div_ceil(step).min(SAMPLES as u64) as usize)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::communicator::sparse::memory::Pool;
    use crate::communicator::sparse::pace::{LOOK_BYTES, at_once, in_looks};
    use crate::reduce::DataType;

    fn order(list: &[i64]) -> Order {
        at_once(Order::of(list, 1, &Arc::new(Pool::default()), &Pace::free())).expect("memory")
    }

    fn words(list: &[i64]) -> [u64; WORDS] {
        at_once(super::words(&order(list), list, &Pace::free()))
    }

    fn lengths_of(shards: &Shards, list: &[i64]) -> Vec<u64> {
        at_once(shards.lengths(&order(list), list, &Pace::free()))
    }

    /// The words of all ranks.
    fn told(lists: &[Vec<i64>]) -> Vec<u64> {
        lists.iter().flat_map(|list| words(list)).collect()
    }

    #[test]
    fn parts_are_about_equally_long_however_indices_are_spread() {
        let size = 4;
        let even = |rank: i64| (0..10_000).map(|at| at * 4 + rank).collect::<Vec<i64>>();
        let squares = |rank: i64| (0..10_000).map(|at| (at * at) - rank).collect::<Vec<i64>>();
        let one_by_one = |rank: i64| (0..10_000).map(|at| rank * 1_000_000 - at).collect::<Vec<i64>>();
        let one_has_most = |rank: i64| (0..if rank == 2 { 37_000 } else { 1000 }).collect::<Vec<i64>>();
        for lists in [
            (0..size).map(even).collect::<Vec<_>>(),
            (0..size).map(squares).collect(),
            (0..size).map(one_by_one).collect(),
            (0..size).map(one_has_most).collect(),
        ] {
            let shards = Shards::between(told(&lists).as_chunks().0);
            let mut lengths = vec![0; size as usize];
            for list in &lists {
                let list = lengths_of(&shards, list);
                lengths.iter_mut().zip(list).for_each(|(all, more)| *all += more);
            }
            let fair: u64 = lists.iter().map(|list| list.len() as u64).sum::<u64>() / size as u64;
            assert!(lengths.iter().all(|length| length.abs_diff(fair) < fair / 4), "{lengths:?}");
        }
    }

    #[test]
    fn every_element_belongs_to_one_part_and_parts_follow_each_other() {
        for lists in [
            vec![vec![5; 100], vec![5], vec![]],
            vec![vec![], vec![], vec![]],
            vec![vec![i64::MAX, i64::MIN], vec![0], vec![i64::MAX]],
            vec![(0..17).collect(), (0..33).collect(), (0..3).rev().collect()],
        ] {
            let shards = Shards::between(told(&lists).as_chunks().0);
            assert_eq!(shards.starts.len(), 2);
            assert!(shards.starts.is_sorted());
            for list in &lists {
                assert_eq!(lengths_of(&shards, list).iter().sum::<u64>(), order(list).different as u64);
            }
        }
    }

    #[test]
    fn samples_are_as_many_as_are_told() {
        for nnz in (0..200).chain([1000, 4095, 4096, 4097]) {
            let list: Vec<i64> = (1..nnz + 1).collect();
            let words = words(&list);
            let (_, count) = sampled(words[0]);
            assert_eq!((words[0], count), (nnz as u64, count.min(nnz as usize)));
            assert!(words[1..=count].iter().all(|&sample| sample != 0), "{nnz}: {words:?}");
            assert!(words[1 + count..].iter().all(|&none| none == 0), "{nnz}: {words:?}");
            assert!(count > 0 || nnz == 0);
        }
    }

    #[test]
    fn an_index_that_has_many_elements_is_gone_through_in_many_looks() {
        const NNZ: usize = 200_000;
        let list = vec![7_i64; NNZ];
        let (order, pace) = (order(&list), Pace::of_looks());
        let shards = Shards::between(told(&[vec![5], vec![6], vec![8]]).as_chunks().0);
        let (lengths, looks) = in_looks(&pace, shards.lengths(&order, &list, &pace));
        assert_eq!(lengths.iter().sum::<u64>(), 1);
        // Half of what the bytes ask for.
        assert!(looks >= NNZ * SHOWN_BYTES / LOOK_BYTES / 2, "{looks} looks");
    }

    #[test]
    fn short_tensors_and_two_ranks_are_merged_by_everybody() {
        let shape = Shape::new(1, 64, DataType::F32).expect("a shape");
        let of = |nnz: &[u64]| {
            let words: Vec<u64> = nnz.iter().flat_map(|&nnz| [&[nnz][..], &[7; SAMPLES]].concat()).collect();
            Shards::of(&words, &shape).is_some()
        };
        assert!(of(&[4000, 0, 0]) && of(&[1400; 3]));
        assert!(!of(&[100; 3]) && !of(&[100_000; 2]) && !of(&[u64::MAX; 3]));
    }
}
