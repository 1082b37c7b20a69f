//! The order of a tensor's elements by their indices, found without touching their values.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::memory::{Pool, Words};
use crate::error::Result;

/// Where the elements of a tensor are, sorted by index; those of one index in the order they were given.
#[derive(Debug)]
pub(super) struct Order {
    /// `None`: they are sorted already, and each occurs once.
    places: Option<Words>,
    nnz: usize,
    /// How many different indices.
    pub(super) different: usize,
}

/// Marks a place whose index is that of the one before.
const REPEATS: u64 = 1 << 63;

/// Below this, comparing is faster than counting.
const FEW: usize = 256;

/// Bits of a digit: as many counts as fit into the first-level cache.
const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;

impl Order {
    /// That of `dims` × `nnz` coordinates.
    pub(super) fn of(indices: &[i64], dims: usize, pool: &Arc<Pool>) -> Result<Order> {
        let nnz = indices.len() / dims;
        let index = |element: usize| (0..dims).map(move |dim| indices[dim * nnz + element]);
        let sorted = match dims {
            1 => indices.is_sorted_by(|before, after| before < after),
            _ => (1..nnz).all(|element| index(element - 1).lt(index(element))),
        };
        if sorted {
            return Ok(Order { places: None, nnz, different: nnz });
        }
        let places = match Linear::of(indices, dims) {
            Some(linear) => linear.sort(indices, nnz, pool)?,
            None => {
                let mut places = pool.take(nnz)?;
                let list = places.words_mut();
                list.iter_mut().zip(0..).for_each(|(place, element)| *place = element);
                let key = |place: u64| index(Group::place(place));
                list.sort_unstable_by(|&a, &b| key(a).cmp(key(b)).then(a.cmp(&b)));
                for at in 1..nnz {
                    if key(list[at - 1]).eq(key(list[at])) {
                        list[at] |= REPEATS;
                    }
                }
                places
            }
        };
        let different = places.words().iter().filter(|&place| place & REPEATS == 0).count();
        Ok(Order { places: Some(places), nnz, different })
    }

    /// For each different index, where its elements are.
    pub(super) fn groups(&self) -> Groups<'_> {
        let places = self.places.as_ref().map(Words::words);
        Groups { places, next: 0, nnz: self.nnz, different: self.different }
    }

    /// Shows one coordinate of each different index, in their order, until `look` breaks. `coordinates` are those of the
    /// elements as they were given.
    pub(super) fn each(
        &self,
        coordinates: &[i64],
        mut look: impl FnMut(i64) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut groups = self.groups();
        while let Some(group) = groups.next(usize::MAX) {
            match group {
                Group::Run(first, count) => {
                    coordinates[first..][..count].iter().try_for_each(|&coordinate| look(coordinate))?;
                }
                Group::Same(places) => look(coordinates[Group::place(places[0])])?,
            }
        }
        ControlFlow::Continue(())
    }
}

/// See [`Order::groups`].
#[derive(Clone, Debug)]
pub(super) struct Groups<'a> {
    places: Option<&'a [u64]>,
    next: usize,
    nnz: usize,
    different: usize,
}

/// Elements of one index, or of neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group<'a> {
    /// So many different ones from this place on, each the only one of its index.
    Run(usize, usize),
    /// Several of one index; the places are masked by [`Group::place`].
    Same(&'a [u64]),
}

impl Group<'_> {
    pub(super) fn place(entry: u64) -> usize {
        (entry & !REPEATS) as usize
    }

    /// How many different indices.
    pub(super) fn different(&self) -> usize {
        match self {
            Group::Run(_, count) => *count,
            Group::Same(_) => 1,
        }
    }
}

impl<'a> Groups<'a> {
    /// Leaves out the elements of the next `count` different indices, or of all that are left.
    pub(super) fn skip(&mut self, count: usize) {
        if self.different == self.nnz {
            self.next = self.next.saturating_add(count).min(self.nnz);
            return;
        }
        let mut left = count;
        while let Some(group) = self.next(left) {
            left -= group.different();
        }
    }

    /// The next elements, of at most so many different indices. None if there are none, or are to be none.
    pub(super) fn next(&mut self, most: usize) -> Option<Group<'a>> {
        let start = self.next;
        let until = start.saturating_add(most).min(self.nnz);
        if start == until {
            return None;
        }
        let Some(places) = self.places else {
            self.next = until;
            return Some(Group::Run(start, until - start));
        };
        let repeats = |at: usize| places.get(at).is_some_and(|place| place & REPEATS != 0);
        let mut end = start + 1;
        if repeats(end) {
            while repeats(end) {
                end += 1;
            }
            self.next = end;
            return Some(Group::Same(&places[start..end]));
        }
        while end < until && places[end] == places[end - 1] + 1 && !repeats(end + 1) {
            end += 1;
        }
        self.next = end;
        Some(Group::Run(places[start] as usize, end - start))
    }
}

/// Indices as numbers of the same order.
struct Linear {
    /// For each coordinate the least, and what one more of it counts.
    coordinates: Vec<(i64, u64)>,
    /// How many bits the numbers have.
    bits: u32,
}

impl Linear {
    /// `None` if 64 bits are too few.
    fn of(indices: &[i64], dims: usize) -> Option<Linear> {
        let nnz = indices.len() / dims;
        let mut coordinates = vec![(0, 0); dims];
        let mut numbers: u128 = 1;
        for dim in (0..dims).rev() {
            let list = &indices[dim * nnz..][..nnz];
            let bounds = list.iter().fold((i64::MAX, i64::MIN), |(least, most), &coordinate| {
                (least.min(coordinate), most.max(coordinate))
            });
            coordinates[dim] = (bounds.0, u64::try_from(numbers).ok()?);
            numbers = numbers.checked_mul(u128::from(bounds.1.abs_diff(bounds.0)) + 1)?;
        }
        let largest = u64::try_from(numbers - 1).ok()?;
        Some(Linear { coordinates, bits: u64::BITS - largest.leading_zeros() })
    }

    /// The elements' places, sorted and marked.
    fn sort(&self, indices: &[i64], nnz: usize, pool: &Arc<Pool>) -> Result<Words> {
        let mut pairs = pool.take(2 * nnz)?;
        let entries = pairs.words_mut().as_chunks_mut::<2>().0;
        for (entry, element) in entries.iter_mut().zip(0..) {
            *entry = [0, element];
        }
        for (&(least, unit), list) in self.coordinates.iter().zip(indices.chunks_exact(nnz)) {
            for (entry, &coordinate) in entries.iter_mut().zip(list) {
                entry[0] += coordinate.wrapping_sub(least).cast_unsigned().wrapping_mul(unit);
            }
        }
        if nnz <= FEW {
            entries.sort_unstable();
        } else {
            self.count_out(&mut pairs, pool)?;
        }
        let mut places = pool.take(nnz)?;
        let mut before = None;
        for (place, &[number, element]) in places.words_mut().iter_mut().zip(pairs.words().as_chunks().0) {
            *place = if before == Some(number) { element | REPEATS } else { element };
            before = Some(number);
        }
        Ok(places)
    }

    /// Sorts pairs of number and place by the numbers' digits, the least significant first. Places of one number keep
    /// their order.
    fn count_out(&self, pairs: &mut Words, pool: &Arc<Pool>) -> Result<()> {
        let mut other = pool.take(pairs.len())?;
        for shift in (0..self.bits).step_by(DIGIT_BITS as usize) {
            let digit = |entry: &[u64; 2]| (entry[0] >> shift) as usize % DIGITS;
            let entries = pairs.words().as_chunks::<2>().0;
            let mut ends = [0_usize; DIGITS];
            entries.iter().for_each(|entry| ends[digit(entry)] += 1);
            if entries.first().is_some_and(|entry| ends[digit(entry)] == entries.len()) {
                continue;
            }
            let mut start = 0;
            for end in &mut ends {
                start += std::mem::replace(end, start);
            }
            let sorted = other.words_mut().as_chunks_mut::<2>().0;
            for entry in entries {
                let at = &mut ends[digit(entry)];
                sorted[*at] = *entry;
                *at += 1;
            }
            std::mem::swap(pairs, &mut other);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of each different index, in order, taken by at most `most`.
    fn groups_by(most: usize, indices: &[i64], dims: usize) -> Vec<Vec<usize>> {
        let pool = Arc::new(Pool::default());
        let order = Order::of(indices, dims, &pool).expect("memory");
        let (mut groups, mut left) = (Vec::new(), order.groups());
        while let Some(group) = left.next(most) {
            match group {
                Group::Run(first, count) => {
                    assert!(count <= most);
                    groups.extend((first..first + count).map(|place| vec![place]));
                }
                Group::Same(places) => groups.push(places.iter().map(|&place| Group::place(place)).collect()),
            }
        }
        assert_eq!(order.different, groups.len());
        for skipped in [1, 2, groups.len() / 2, groups.len(), groups.len() + 1] {
            let mut left = order.groups();
            left.skip(skipped);
            let first = left.next(1).map(|group| match group {
                Group::Run(first, _) => first,
                Group::Same(places) => Group::place(places[0]),
            });
            assert_eq!(first, groups.get(skipped).map(|group| group[0]));
        }
        let mut leading = Vec::new();
        let _ = order.each(&indices[..indices.len() / dims], |number| {
            leading.push(number);
            ControlFlow::Continue(())
        });
        assert!(groups.iter().map(|group| indices[group[0]]).eq(leading));
        groups
    }

    fn groups(indices: &[i64], dims: usize) -> Vec<Vec<usize>> {
        let groups = groups_by(usize::MAX, indices, dims);
        assert_eq!(groups_by(3, indices, dims), groups);
        groups
    }

    /// The same by comparing.
    fn plainly(indices: &[i64], dims: usize) -> Vec<Vec<usize>> {
        let nnz = indices.len() / dims;
        let index = |place: usize| -> Vec<i64> { (0..dims).map(|dim| indices[dim * nnz + place]).collect() };
        let mut places: Vec<usize> = (0..nnz).collect();
        places.sort_by_key(|&place| index(place));
        places.chunk_by(|&a, &b| index(a) == index(b)).map(<[usize]>::to_vec).collect()
    }

    #[test]
    fn elements_are_in_the_order_of_their_indices() {
        let mut state = 1_u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 11
        };
        for nnz in [0, 1, 2, 7, FEW, FEW + 1, 3000] {
            for dims in 1..=3 {
                for places in [1, 5, nnz as u64 + 1, 1 << 20, u64::MAX >> 11] {
                    // Far apart the coordinates of several dims are more than 64 bits number.
                    let spread = if places == 5 { i64::MAX / 5 } else { 1 };
                    let indices: Vec<i64> = (0..nnz * dims)
                        .map(|_| ((random() % places) as i64).wrapping_mul(spread) - 1000)
                        .collect();
                    assert_eq!(groups(&indices, dims), plainly(&indices, dims), "{nnz} × {dims} of {places}");
                }
            }
        }
    }

    #[test]
    fn what_is_sorted_stays_and_what_is_backwards_is_turned() {
        let up: Vec<i64> = (-500..500).collect();
        let down: Vec<i64> = up.iter().rev().copied().collect();
        assert_eq!(groups(&up, 1), (0..1000).map(|place| vec![place]).collect::<Vec<_>>());
        assert_eq!(groups(&down, 1), (0..1000).rev().map(|place| vec![place]).collect::<Vec<_>>());
        assert_eq!(groups(&[i64::MAX, i64::MIN, 0, i64::MIN], 1), [vec![1, 3], vec![2], vec![0]]);
        // Sorted but for one that occurs twice.
        let mut twice = up.clone();
        twice[7] = twice[6];
        assert_eq!(groups(&twice, 1), plainly(&twice, 1));
        assert_eq!(groups(&twice, 2), plainly(&twice, 2));
    }
}
