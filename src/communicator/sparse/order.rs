//! The order of a tensor's elements by their indices, found without touching their values.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use super::memory::{Pool, Words};
use super::pace::{LOOKUP_BYTES, Pace, STRETCH};
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

/// An index as a number, and its place.
type Pair = [u64; 2];

impl Order {
    /// That of `dims` × `nnz` coordinates.
    pub(super) async fn of(indices: &[i64], dims: usize, pool: &Arc<Pool>, pace: &Pace) -> Result<Order> {
        let given = Given { indices, dims, nnz: indices.len() / dims };
        let nnz = given.nnz;
        if given.is_sorted(pace).await {
            return Ok(Order { places: None, nnz, different: nnz });
        }
        let places = match Linear::of(given, pace).await {
            Some(linear) => linear.sort(given, pool, pace).await?,
            None => given.sort(pool, pace).await?,
        };
        let mut different = 0;
        for places in places.words().chunks(STRETCH) {
            different += places.iter().filter(|&place| place & REPEATS == 0).count();
            pace.spend(size_of_val(places)).await;
        }
        Ok(Order { places: Some(places), nnz, different })
    }

    /// For each different index, where its elements are.
    pub(super) fn groups(&self) -> Groups<'_> {
        let places = self.places.as_ref().map(Words::words);
        Groups { places, next: 0, end: self.nnz, once: self.different == self.nnz }
    }
}

/// Indices as they were given.
#[derive(Clone, Copy)]
struct Given<'a> {
    indices: &'a [i64],
    dims: usize,
    nnz: usize,
}

impl<'a> Given<'a> {
    /// That of an element.
    fn index(self, element: usize) -> impl Iterator<Item = i64> {
        (0..self.dims).map(move |dim| self.indices[dim * self.nnz + element])
    }

    /// Whether they are sorted, each once.
    async fn is_sorted(self, pace: &Pace) -> bool {
        let mut first = 0;
        while first + 1 < self.nnz {
            let last = (first + STRETCH).min(self.nnz - 1);
            if !self.is_sorted_between(first, last) {
                return false;
            }
            pace.spend((last - first) * self.dims * size_of::<i64>()).await;
            first = last;
        }
        true
    }

    /// Whether those from one to another are, both among them.
    fn is_sorted_between(self, first: usize, last: usize) -> bool {
        match self.dims {
            1 => self.indices[first..=last].is_sorted_by(|before, after| before < after),
            _ => (first + 1..=last).all(|element| self.index(element - 1).lt(self.index(element))),
        }
    }

    /// Compares those of two places; of one index, the places.
    fn compare(self, a: u64, b: u64) -> Ordering {
        self.index(Group::place(a)).cmp(self.index(Group::place(b))).then(a.cmp(&b))
    }

    /// The elements' places, sorted by comparing and marked.
    async fn sort(self, pool: &Arc<Pool>, pace: &Pace) -> Result<Words> {
        let mut places = pool.take(self.nnz)?;
        let mut next = 0;
        for places in places.words_mut().chunks_mut(STRETCH) {
            places.iter_mut().zip(next..).for_each(|(place, element)| *place = element);
            next += places.len() as u64;
            places.sort_unstable_by(|&a, &b| self.compare(a, b));
            pace.spend(self.compared(places.len() * STRETCH.ilog2() as usize)).await;
        }
        let mut sorted = STRETCH;
        while sorted < self.nnz {
            let mut other = pool.take(self.nnz)?;
            for start in (0..self.nnz).step_by(2 * sorted) {
                let middle = (start + sorted).min(self.nnz);
                let end = (middle + sorted).min(self.nnz);
                let (mut left, mut right) = (start..middle, middle..end);
                for merged in other.words_mut()[start..end].chunks_mut(STRETCH) {
                    self.merge(places.words(), &mut left, &mut right, merged);
                    pace.spend(self.compared(merged.len())).await;
                }
            }
            places = other;
            sorted *= 2;
        }
        for start in (0..self.nnz).step_by(STRETCH) {
            let end = (start + STRETCH).min(self.nnz);
            self.mark(places.words_mut(), start.max(1)..end);
            pace.spend(self.compared(end - start)).await;
        }
        Ok(places)
    }

    /// What it counts to compare so many times.
    fn compared(self, times: usize) -> usize {
        times.saturating_mul(LOOKUP_BYTES.max(self.dims * size_of::<i64>()))
    }

    /// Merges two ranges of places, each sorted, until `merged` is full. What is left of them is left.
    fn merge(self, places: &[u64], left: &mut Range<usize>, right: &mut Range<usize>, merged: &mut [u64]) {
        for place in merged {
            let from_right = match (left.start < left.end, right.start < right.end) {
                (true, true) => self.compare(places[left.start], places[right.start]) == Ordering::Greater,
                (more, _) => !more,
            };
            let from = if from_right { &mut *right } else { &mut *left };
            *place = places[from.start];
            from.start += 1;
        }
    }

    /// Marks sorted places whose index is that of the one before.
    fn mark(self, places: &mut [u64], range: Range<usize>) {
        for at in range {
            let [before, here] = [at - 1, at].map(|at| self.index(Group::place(places[at])));
            if before.eq(here) {
                places[at] |= REPEATS;
            }
        }
    }
}

/// See [`Order::groups`].
#[derive(Clone, Debug)]
pub(super) struct Groups<'a> {
    places: Option<&'a [u64]>,
    next: usize,
    /// Behind the last element.
    end: usize,
    /// Whether each index occurs once.
    once: bool,
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
    /// How many elements.
    pub(super) fn elements(&self) -> usize {
        self.end - self.next
    }

    /// Where they are, masked by [`Group::place`]. `None`: from here on, one after the other.
    pub(super) fn places(&self) -> Option<&'a [u64]> {
        self.places.map(|places| &places[self.next..self.end])
    }

    /// Where the first of them is, if there are any.
    pub(super) fn first(&self) -> Option<usize> {
        let place = || self.places.map_or(self.next, |places| Group::place(places[self.next]));
        (self.next < self.end).then(place)
    }

    /// Leaves out the elements of the next `count` different indices, or of all that are left.
    pub(super) async fn skip(&mut self, count: usize, pace: &Pace) {
        let Some(places) = self.places.filter(|_| !self.once) else {
            self.next = self.next.saturating_add(count).min(self.end);
            return;
        };
        let mut left = count;
        while self.next < self.end {
            let stretch = &places[self.next..(self.next + STRETCH).min(self.end)];
            let found = stretch.iter().position(|place| {
                let begins = place & REPEATS == 0;
                let stays = begins && left == 0;
                left -= usize::from(begins && !stays);
                stays
            });
            self.next += found.unwrap_or(stretch.len());
            pace.spend(found.map_or(stretch.len(), |at| at + 1) * size_of::<u64>()).await;
            if found.is_some() {
                return;
            }
        }
    }

    /// Takes the first elements out, as groups of their own: whole indices, at most so many different ones of
    /// at most so many elements, or one that has more. With them, how many indices. `None` if there are none,
    /// or are to be none.
    pub(super) async fn cut(
        &mut self,
        different: usize,
        elements: usize,
        pace: &Pace,
    ) -> Option<(Groups<'a>, usize)> {
        let (start, left) = (self.next, self.elements());
        let most = elements.min(left);
        if most.min(different) == 0 {
            return None;
        }
        let (length, count) = match self.places.filter(|_| !self.once) {
            None => {
                let count = most.min(different);
                pace.spend(LOOKUP_BYTES).await;
                (count, count)
            }
            Some(places) => {
                let found = whole(&places[start..self.end], different, most);
                pace.spend(most * size_of::<u64>()).await;
                match found {
                    (0, _) => (most + repeats(&places[start + most..self.end], pace).await, 1),
                    found => found,
                }
            }
        };
        self.next = start + length;
        Some((Groups { next: start, end: self.next, ..*self }, count))
    }

    /// The next elements, of at most so many different indices. None if there are none, or are to be none.
    pub(super) fn next(&mut self, most: usize) -> Option<Group<'a>> {
        let start = self.next;
        let until = start.saturating_add(most).min(self.end);
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

    /// Shows one coordinate of each index that begins among the next [`STRETCH`] elements, in their order.
    /// `coordinates` are those of the elements as they were given. Whether there were any elements.
    pub(super) fn show(&mut self, coordinates: &[i64], mut look: impl FnMut(i64)) -> bool {
        let stretch = self.next..(self.next + STRETCH).min(self.end);
        self.next = stretch.end;
        let any = !stretch.is_empty();
        match self.places {
            None => coordinates[stretch].iter().for_each(|&coordinate| look(coordinate)),
            Some(places) => {
                let begins = places[stretch].iter().filter(|&place| place & REPEATS == 0);
                begins.for_each(|&place| look(coordinates[Group::place(place)]));
            }
        }
        any
    }
}

/// How many elements the first indices have, and how many indices those are: at most `different` of them, of
/// at most `most` elements. The first place begins an index.
fn whole(places: &[u64], different: usize, most: usize) -> (usize, usize) {
    let (mut elements, mut count) = (0, 0);
    for at in 1..=most {
        if places.get(at).is_none_or(|place| place & REPEATS == 0) {
            elements = at;
            count += 1;
            if count == different {
                break;
            }
        }
    }
    (elements, count)
}

/// How many of the first places are of the index of the one before.
async fn repeats(places: &[u64], pace: &Pace) -> usize {
    let mut count = 0;
    for stretch in places.chunks(STRETCH) {
        let more = stretch.iter().take_while(|&place| place & REPEATS != 0).count();
        count += more;
        pace.spend(size_of_val(stretch)).await;
        if more < stretch.len() {
            break;
        }
    }
    count
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
    async fn of(given: Given<'_>, pace: &Pace) -> Option<Linear> {
        let Given { indices, dims, nnz } = given;
        let mut coordinates = vec![(0, 0); dims];
        let mut numbers: u128 = 1;
        for dim in (0..dims).rev() {
            let (mut least, mut most) = (i64::MAX, i64::MIN);
            for list in indices[dim * nnz..][..nnz].chunks(STRETCH) {
                (least, most) = list.iter().fold((least, most), |(least, most), &coordinate| {
                    (least.min(coordinate), most.max(coordinate))
                });
                pace.spend(size_of_val(list)).await;
            }
            coordinates[dim] = (least, u64::try_from(numbers).ok()?);
            numbers = numbers.checked_mul(u128::from(most.abs_diff(least)) + 1)?;
        }
        let largest = u64::try_from(numbers - 1).ok()?;
        Some(Linear { coordinates, bits: u64::BITS - largest.leading_zeros() })
    }

    /// The elements' places, sorted and marked.
    async fn sort(&self, given: Given<'_>, pool: &Arc<Pool>, pace: &Pace) -> Result<Words> {
        let nnz = given.nnz;
        let mut pairs = pool.take(2 * nnz)?;
        let mut first = 0;
        for pairs in pairs.words_mut().as_chunks_mut::<2>().0.chunks_mut(STRETCH) {
            self.number(given, first, pairs);
            first += pairs.len();
            pace.spend(size_of_val(pairs)).await;
        }
        if nnz <= FEW {
            pairs.words_mut().as_chunks_mut::<2>().0.sort_unstable();
        } else {
            self.count_out(&mut pairs, pool, pace).await?;
        }
        let mut places = pool.take(nnz)?;
        let mut before = None;
        let pairs = pairs.words().as_chunks::<2>().0;
        for (places, pairs) in places.words_mut().chunks_mut(STRETCH).zip(pairs.chunks(STRETCH)) {
            before = marked(places, pairs, before);
            pace.spend(size_of_val(pairs)).await;
        }
        Ok(places)
    }

    /// Numbers the elements from the first on, as many as there are pairs.
    fn number(&self, given: Given<'_>, first: usize, pairs: &mut [Pair]) {
        for (pair, element) in pairs.iter_mut().zip(first as u64..) {
            *pair = [0, element];
        }
        for (&(least, unit), list) in self.coordinates.iter().zip(given.indices.chunks_exact(given.nnz)) {
            for (pair, &coordinate) in pairs.iter_mut().zip(&list[first..]) {
                pair[0] += coordinate.wrapping_sub(least).cast_unsigned().wrapping_mul(unit);
            }
        }
    }

    /// Sorts pairs by the numbers' digits, the least significant first. Places of one number keep their
    /// order.
    async fn count_out(&self, pairs: &mut Words, pool: &Arc<Pool>, pace: &Pace) -> Result<()> {
        let mut other = pool.take(pairs.len())?;
        for shift in (0..self.bits).step_by(DIGIT_BITS as usize) {
            let list = pairs.words().as_chunks::<2>().0;
            let mut ends = Box::new([0_usize; DIGITS]);
            for pairs in list.chunks(STRETCH) {
                count(pairs, shift, &mut ends);
                pace.spend(size_of_val(pairs)).await;
            }
            if list.first().is_some_and(|pair| ends[digit(pair, shift)] == list.len()) {
                continue;
            }
            let mut start = 0;
            for end in ends.iter_mut() {
                start += std::mem::replace(end, start);
            }
            let sorted = other.words_mut().as_chunks_mut::<2>().0;
            for pairs in list.chunks(STRETCH) {
                deal(pairs, shift, &mut ends, sorted);
                pace.spend(2 * size_of_val(pairs)).await;
            }
            std::mem::swap(pairs, &mut other);
        }
        Ok(())
    }
}

/// A digit of a pair's number.
fn digit(pair: &Pair, shift: u32) -> usize {
    (pair[0] >> shift) as usize % DIGITS
}

/// Counts pairs by a digit.
fn count(pairs: &[Pair], shift: u32, counts: &mut [usize; DIGITS]) {
    pairs.iter().for_each(|pair| counts[digit(pair, shift)] += 1);
}

/// Deals pairs out to where those of their digit end so far.
fn deal(pairs: &[Pair], shift: u32, ends: &mut [usize; DIGITS], sorted: &mut [Pair]) {
    for pair in pairs {
        let at = &mut ends[digit(pair, shift)];
        sorted[*at] = *pair;
        *at += 1;
    }
}

/// Writes the places of sorted pairs, those marked that repeat the number before. The last number.
fn marked(places: &mut [u64], pairs: &[Pair], mut before: Option<u64>) -> Option<u64> {
    for (place, &[number, element]) in places.iter_mut().zip(pairs) {
        *place = if before == Some(number) { element | REPEATS } else { element };
        before = Some(number);
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::sparse::pace::{LOOK_BYTES, at_once, in_looks};

    /// The places of each different index, taken by at most `most`.
    fn list(mut left: Groups<'_>, most: usize) -> Vec<Vec<usize>> {
        let mut groups = Vec::new();
        while let Some(group) = left.next(most) {
            match group {
                Group::Run(first, count) => {
                    assert!(count <= most);
                    groups.extend((first..first + count).map(|place| vec![place]));
                }
                Group::Same(places) => groups.push(places.iter().map(|&place| Group::place(place)).collect()),
            }
        }
        groups
    }

    /// The places of each different index of an order, in order, taken by at most `most`.
    fn groups_by(most: usize, indices: &[i64], dims: usize) -> Vec<Vec<usize>> {
        let pool = Arc::new(Pool::default());
        let order = at_once(Order::of(indices, dims, &pool, &Pace::of_looks())).expect("memory");
        let groups = list(order.groups(), most);
        assert_eq!(order.different, groups.len());
        for skipped in [1, 2, groups.len() / 2, groups.len(), groups.len() + 1] {
            let mut left = order.groups();
            at_once(left.skip(skipped, &Pace::of_looks()));
            assert_eq!(left.first(), groups.get(skipped).map(|group| group[0]));
        }
        for (different, elements) in [(1, most), (2, 3), (most, most), (usize::MAX, 150)] {
            let (mut left, mut pieces) = (order.groups(), Vec::new());
            while let Some((piece, count)) = at_once(left.cut(different, elements, &Pace::of_looks())) {
                let found = list(piece.clone(), usize::MAX);
                assert!(found.len() == count && (1..=different).contains(&count));
                assert!(piece.elements() <= elements || count == 1);
                assert_eq!(piece.elements(), found.iter().map(Vec::len).sum::<usize>());
                pieces.extend(found);
            }
            assert_eq!(pieces, groups, "{different} of {elements} elements");
        }
        let (mut leading, mut left) = (Vec::new(), order.groups());
        while left.show(&indices[..indices.len() / dims], |number| leading.push(number)) {}
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

    #[test]
    fn a_long_order_is_found_in_many_looks() {
        let numbers: Vec<i64> = (0..20_000).map(|at| at * 7919 % 20_011).collect();
        // More than 64 bits number.
        let pairs: Vec<i64> =
            [i64::MIN, i64::MAX].into_iter().chain(0..9998).rev().cycle().take(20_000).collect();
        for (indices, dims) in [(&numbers, 1), (&pairs, 2)] {
            let (pool, pace) = (Arc::new(Pool::default()), Pace::of_looks());
            let (order, looks) = in_looks(&pace, Order::of(indices, dims, &pool, &pace));
            order.expect("memory");
            assert!(looks > 20, "{looks} looks at {dims} dims");
            assert_eq!(groups(indices, dims), plainly(indices, dims));
        }
    }

    #[test]
    fn indices_that_have_many_elements_are_gone_through_in_many_looks() {
        const NNZ: usize = 200_000;
        let (pool, pace) = (Arc::new(Pool::default()), Pace::of_looks());
        // Half of what the bytes of the places ask for.
        let fewest = NNZ * size_of::<u64>() / LOOK_BYTES / 2;
        for different in [1, 3] {
            let indices: Vec<i64> = (0..NNZ as i64).map(|at| at % different).collect();
            let order = at_once(Order::of(&indices, 1, &pool, &Pace::free())).expect("memory");
            let skip = async {
                let mut groups = order.groups();
                groups.skip(different as usize, &pace).await;
                groups.first()
            };
            let (first, looks) = in_looks(&pace, skip);
            assert_eq!(first, None);
            assert!(looks >= fewest, "{looks} looks");
            let cut = async {
                let (mut groups, mut counts) = (order.groups(), Vec::new());
                while let Some((piece, count)) = groups.cut(usize::MAX, 10, &pace).await {
                    counts.push((piece.elements(), count));
                }
                counts
            };
            let (counts, looks) = in_looks(&pace, cut);
            assert_eq!(counts.len(), different as usize);
            assert!(counts.iter().all(|(_, count)| *count == 1));
            assert_eq!(counts.iter().map(|(elements, _)| elements).sum::<usize>(), NNZ);
            assert!(looks >= fewest, "{looks} looks");
        }
    }
}
