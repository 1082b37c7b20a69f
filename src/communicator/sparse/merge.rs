//! The elements of all ranks as one sorted list, with as little work for each of them as neighbours allow, in
//! parts that several threads share.

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use super::memory::{Pool, Words};
use super::pace::{LOOK_BYTES, LOOKUP_BYTES, Pace};
use super::tensor::{Gathered, PIECE, Shape, Tensor};
use crate::engine::joint::Team;
use crate::error::Result;
use crate::reduce::{Operand, Reducer, Representation};

/// Positions that are combined at a time where partial results are kept apart: they stay in the second-level
/// cache.
const PART: usize = 4096;

/// The most parts of a union, unless they are longer than what a thread goes through in one look.
const MOST_PARTS: usize = 64;

/// Elements that are looked at for each part, to find parts of about one length.
const SAMPLES: usize = 4;

/// What the ranks' elements come to: which of them make which part, and how many different ones each has.
#[derive(Debug)]
pub(super) struct Union {
    parts: Vec<Bounds>,
}

/// Each rank's elements of a part, and how many different ones they come to.
type Bounds = (Vec<Range<usize>>, usize);

impl Union {
    /// That of `all`.
    pub(super) async fn of(all: &Gathered, team: &(dyn Team + Sync), pace: &Pace) -> Result<Union> {
        let elements = elements(all);
        let each = PIECE / all.shape.accumulator_bytes().min(PIECE);
        let bytes = elements.saturating_mul(all.shape.element_bytes());
        let most = MOST_PARTS.max(bytes.div_ceil(LOOK_BYTES));
        let parts = elements.div_ceil(each).clamp(1, most);
        let mut union = Union { parts: bounds(all, elements, parts, pace).await };
        let mut tasks = Vec::with_capacity(parts);
        for part in &mut union.parts {
            let bytes = length(&part.0).saturating_mul(LOOKUP_BYTES);
            tasks.push((part, bytes));
        }
        let count = |(ranges, different): &mut Bounds| {
            let mut merge = Merge::new(all, ranges);
            while merge.advance() {
                *different += merge.count;
            }
            Ok(())
        };
        pace.share(team, tasks, count).await?;
        Ok(union)
    }

    /// How many different elements there are.
    pub(super) fn nnz(&self) -> usize {
        self.parts.iter().map(|(_, different)| different).sum()
    }

    /// Writes them as one tensor.
    pub(super) async fn write(
        &self,
        all: &Gathered,
        reducer: &Reducer,
        (indices, mut values): (&mut [u64], &mut [u8]),
        pool: &Arc<Pool>,
        team: &(dyn Team + Sync),
        pace: &Pace,
    ) -> Result<()> {
        let nnz = self.nnz();
        if nnz == 0 {
            // There may be more dims than one would count.
            return Ok(());
        }
        let row = all.shape.block * all.shape.dtype.size();
        let mut coordinates: Vec<&mut [u64]> = indices.chunks_exact_mut(nnz).collect();
        let mut tasks = Vec::with_capacity(self.parts.len());
        for (ranges, different) in &self.parts {
            let here =
                coordinates.iter_mut().map(|list| list.split_off_mut(..*different).unwrap_or_default());
            let here: Vec<&mut [u64]> = here.collect();
            let out = values.split_off_mut(..*different * row).unwrap_or_default();
            let bytes = length(ranges).saturating_mul(all.shape.element_bytes());
            tasks.push(((ranges, here, out), bytes));
        }
        let write = |(ranges, coordinates, values): (&Vec<Range<usize>>, Vec<&mut [u64]>, &mut [u8])| {
            Merge::new(all, ranges).write(reducer, coordinates, values, pool)
        };
        pace.share(team, tasks, write).await
    }
}

/// All elements, combined into one tensor.
pub(super) async fn combined(
    all: &Gathered,
    reducer: &Reducer,
    pool: &Arc<Pool>,
    team: &(dyn Team + Sync),
    pace: &Pace,
) -> Result<Tensor> {
    let union = Union::of(all, team, pace).await?;
    let mut tensor = Tensor::new(&all.shape, union.nnz(), pool)?;
    union.write(all, reducer, tensor.parts_mut(), pool, team, pace).await?;
    Ok(tensor)
}

/// How many elements all ranks have.
fn elements(all: &Gathered) -> usize {
    (0..all.size()).map(|rank| all.nnz(rank)).sum()
}

/// How many elements of all ranks a part has.
fn length(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Each rank's elements of each part, parts of about one length; none counted yet.
async fn bounds(all: &Gathered, elements: usize, parts: usize, pace: &Pace) -> Vec<Bounds> {
    let (indices, size) = (Indices::of(all), all.size());
    let mut samples = Vec::new();
    if parts > 1 {
        let step = elements.div_ceil(parts * SAMPLES);
        for rank in 0..size {
            samples.extend((step / 2..all.nnz(rank)).step_by(step).map(|at| (rank, at)));
        }
        samples.sort_unstable_by(|&a, &b| indices.compare(a, b));
    }
    let mut starts = vec![0; size];
    // In which a rank's end of a part is found, at most.
    let steps = (usize::BITS - elements.leading_zeros()) as usize;
    let mut list = Vec::with_capacity(parts);
    for part in 1..=parts {
        let cut = if part < parts { samples.get(part * samples.len() / parts) } else { None };
        let ends: Vec<usize> = (0..size)
            .map(|rank| {
                let is_before =
                    |at| cut.is_none_or(|&cut| indices.compare((rank, at), cut) == Ordering::Less);
                partition_point(starts[rank]..all.nnz(rank), is_before)
            })
            .collect();
        let ranges = starts.iter().zip(&ends).map(|(start, end)| *start..*end).collect();
        list.push((ranges, 0));
        starts = ends;
        pace.spend(size * steps * LOOKUP_BYTES).await;
    }
    list
}

/// The first of a range of which `is_before` does not hold, as it does for all before and none behind.
fn partition_point(mut range: Range<usize>, is_before: impl Fn(usize) -> bool) -> usize {
    while !range.is_empty() {
        let middle = range.start.midpoint(range.end);
        if is_before(middle) {
            range.start = middle + 1;
        } else {
            range.end = middle;
        }
    }
    range.start
}

/// The indices of all ranks' elements.
struct Indices<'a> {
    all: &'a Gathered,
    /// Each rank's first coordinates, which mostly decide.
    leading: Vec<&'a [u64]>,
}

impl<'a> Indices<'a> {
    fn of(all: &'a Gathered) -> Indices<'a> {
        Indices { all, leading: (0..all.size()).map(|rank| all.coordinates(rank, 0)).collect() }
    }

    /// Compares those of two elements, each of a rank.
    fn compare(&self, (a, at): (usize, usize), (b, bt): (usize, usize)) -> Ordering {
        let leading = self.leading[a][at].cast_signed().cmp(&self.leading[b][bt].cast_signed());
        (1..self.all.shape.dims).fold(leading, |order, dim| {
            order.then_with(|| {
                let [a, b] = [self.all.coordinates(a, dim)[at], self.all.coordinates(b, dim)[bt]];
                a.cast_signed().cmp(&b.cast_signed())
            })
        })
    }
}

/// Goes through the union of some elements of the ranks, stretch by stretch: a stretch is so many
/// neighbouring elements that all of the same ranks have.
struct Merge<'a> {
    all: &'a Gathered,
    indices: Indices<'a>,
    /// Each rank's next element.
    heads: Vec<usize>,
    /// Behind each rank's last one.
    ends: Vec<usize>,
    /// The ranks that have one, as a heap: the least index first, the lower rank of those that have it.
    waiting: Vec<u32>,
    /// The ranks of the stretch, in their order, and how long it is. Their next elements are behind it.
    present: Vec<u32>,
    count: usize,
}

impl<'a> Merge<'a> {
    /// Before the first stretch of these elements of each rank.
    fn new(all: &'a Gathered, ranges: &[Range<usize>]) -> Merge<'a> {
        let size = all.size();
        let mut merge = Merge {
            all,
            indices: Indices::of(all),
            heads: ranges.iter().map(|range| range.start).collect(),
            ends: ranges.iter().map(|range| range.end).collect(),
            waiting: Vec::with_capacity(size),
            present: Vec::with_capacity(size),
            count: 0,
        };
        for rank in 0..size {
            merge.wait(rank as u32);
        }
        merge
    }

    /// Goes to the next stretch. Whether there is one.
    fn advance(&mut self) -> bool {
        for at in 0..self.present.len() {
            self.wait(self.present[at]);
        }
        self.present.clear();
        let Some(first) = self.pop() else { return false };
        self.present.push(first);
        while let Some(&rank) = self.waiting.first()
            && self.compare_heads(first, rank) == Ordering::Equal
        {
            self.pop();
            self.present.push(rank);
        }
        self.count = 1;
        match self.all.shape.dims {
            1 => self.count = self.numbers_that_go_on(),
            _ => {
                while self.goes_on() {
                    self.count += 1;
                }
            }
        }
        for &rank in &self.present {
            self.heads[rank as usize] += self.count;
        }
        true
    }

    /// How long the stretch is where indices are numbers.
    fn numbers_that_go_on(&self) -> usize {
        let rest = |&rank: &u32| {
            let rank = rank as usize;
            &self.indices.leading[rank][self.heads[rank]..self.ends[rank]]
        };
        let limit = self.waiting.first().map(|rank| rest(rank)[0].cast_signed());
        let belongs = |number: &u64| limit.is_none_or(|limit| number.cast_signed() < limit);
        let (first, others) = (rest(&self.present[0]), &self.present[1..]);
        let number_goes_on = |at: usize| others.iter().all(|other| rest(other).get(at) == Some(&first[at]));
        (1..first.len()).find(|&at| !belongs(&first[at]) || !number_goes_on(at)).unwrap_or(first.len())
    }

    /// Whether the element behind the stretch belongs to it.
    fn goes_on(&self) -> bool {
        let place = |rank: u32| (rank as usize, self.heads[rank as usize] + self.count);
        let first = place(self.present[0]);
        let is_there = |(rank, element): (usize, usize)| element < self.ends[rank];
        let same = |&rank: &u32| {
            let other = place(rank);
            is_there(other) && self.indices.compare(first, other) == Ordering::Equal
        };
        let before = |&rank: &u32| {
            let other = (rank as usize, self.heads[rank as usize]);
            self.indices.compare(first, other) == Ordering::Less
        };
        is_there(first) && self.present[1..].iter().all(same) && self.waiting.first().is_none_or(before)
    }

    /// Writes the union, from the first stretch on: there is room for as many elements as it has.
    fn write(
        mut self,
        reducer: &Reducer,
        mut coordinates: Vec<&mut [u64]>,
        mut values: &mut [u8],
        pool: &Arc<Pool>,
    ) -> Result<()> {
        let Shape { block, dtype, .. } = self.all.shape;
        let mut tree = Tree { reducer, all: self.all, pool, operands: Vec::new(), scratch: Vec::new() };
        let mut done = 0;
        while self.advance() {
            let count = self.count;
            let first = self.present[0] as usize;
            for (dim, list) in coordinates.iter_mut().enumerate() {
                let from = &self.all.coordinates(first, dim)[self.heads[first] - count..][..count];
                list[done..][..count].copy_from_slice(from);
            }
            let (out, rest) = values.split_at_mut(count * block * dtype.size());
            tree.combine(&Stretch { ranks: &self.present, ends: &self.heads, count }, out)?;
            values = rest;
            done += count;
        }
        Ok(())
    }

    /// Notes that a rank has a next element, if it has.
    fn wait(&mut self, rank: u32) {
        if self.heads[rank as usize] == self.ends[rank as usize] {
            return;
        }
        let mut at = self.waiting.len();
        self.waiting.push(rank);
        while at > 0 {
            let above = (at - 1) / 2;
            if self.is_before(self.waiting[above], rank) {
                break;
            }
            self.waiting.swap(at, above);
            at = above;
        }
    }

    /// Takes the rank out that has the least index.
    fn pop(&mut self) -> Option<u32> {
        let last = self.waiting.pop()?;
        let Some(top) = self.waiting.first_mut() else { return Some(last) };
        let least = std::mem::replace(top, last);
        let mut at = 0;
        loop {
            let below = (2 * at + 1..2 * at + 3).filter(|&below| below < self.waiting.len());
            let Some(lesser) = below.reduce(|left, right| {
                if self.is_before(self.waiting[left], self.waiting[right]) { left } else { right }
            }) else {
                break;
            };
            if self.is_before(self.waiting[at], self.waiting[lesser]) {
                break;
            }
            self.waiting.swap(at, lesser);
            at = lesser;
        }
        Some(least)
    }

    fn is_before(&self, a: u32, b: u32) -> bool {
        self.compare_heads(a, b).then(a.cmp(&b)) == Ordering::Less
    }

    /// Compares the indices of two ranks' next elements.
    fn compare_heads(&self, a: u32, b: u32) -> Ordering {
        let head = |rank: u32| (rank as usize, self.heads[rank as usize]);
        self.indices.compare(head(a), head(b))
    }
}

/// Neighbouring elements that all of the same ranks have.
#[derive(Clone, Copy)]
struct Stretch<'a> {
    /// In their order.
    ranks: &'a [u32],
    /// For every rank of the group, the element behind its last of the stretch.
    ends: &'a [usize],
    count: usize,
}

/// The canonical tree over all ranks, for one stretch at a time.
struct Tree<'a> {
    reducer: &'a Reducer,
    all: &'a Gathered,
    pool: &'a Arc<Pool>,
    /// Of the fold that is next.
    operands: Vec<Operand>,
    /// Partial results of a part, by depth.
    scratch: Vec<Words>,
}

/// Some positions of a stretch: the first, and how many.
type Part = (usize, usize);

impl Tree<'_> {
    /// Combines the operands of a stretch into `out`, which holds its elements.
    fn combine(&mut self, stretch: &Stretch<'_>, out: &mut [u8]) -> Result<()> {
        let (reducer, size) = (self.reducer, self.all.size() as u32);
        let positions = stretch.count * self.all.shape.block;
        let Some((left, right, middle)) = halves(stretch.ranks, 0, size) else {
            let operands = self.leaves(stretch, stretch.ranks, 0);
            // SAFETY: each operand holds as many accumulators as `out` elements, in `all`, apart from `out`;
            // nothing touches either meanwhile.
            unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, positions) };
            self.operands = operands;
            return Ok(());
        };
        let element = self.all.shape.dtype.size();
        for (at, out) in (0..).step_by(PART).zip(out.chunks_mut(PART * element)) {
            let part = (at, out.len() / element);
            let operands = [
                self.partial(stretch, part, (left, 0, middle), 0)?,
                self.partial(stretch, part, (right, middle, size - middle), 1)?,
            ];
            // SAFETY: as above, the operands being in `all` or in `scratch`.
            unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Element, part.1) };
        }
        Ok(())
    }

    /// The tree over the `count` ranks from `first` on, of which `ranks`, at least one, have the elements.
    /// Slot `slot` of the scratch and those above it are free.
    fn partial(
        &mut self,
        stretch: &Stretch<'_>,
        part: Part,
        (ranks, first, count): (&[u32], u32, u32),
        slot: usize,
    ) -> Result<Operand> {
        if let [single] = ranks {
            return Ok(self.leaf(stretch, *single, part.0));
        }
        let Some((left, right, middle)) = halves(ranks, first, count) else {
            let operands = self.leaves(stretch, ranks, part.0);
            let folded = self.fold(&operands, part, slot);
            self.operands = operands;
            return folded;
        };
        let operands = [
            self.partial(stretch, part, (left, first, middle - first), slot)?,
            self.partial(stretch, part, (right, middle, first + count - middle), slot + 1)?,
        ];
        self.fold(&operands, part, slot)
    }

    /// Folds into a slot of the scratch. The first operand may be there.
    fn fold(&mut self, operands: &[Operand], part: Part, slot: usize) -> Result<Operand> {
        while self.scratch.len() <= slot {
            let bytes = PART * self.all.shape.dtype.accumulator().size();
            self.scratch.push(self.pool.take(bytes.div_ceil(8))?);
        }
        let address = self.scratch[slot].address();
        // SAFETY: each operand holds the part's accumulators, in `all` or in `scratch`, which has room for
        // the longest part; `address` is the first operand's or apart from all.
        unsafe { self.reducer.fold(operands, address, Representation::Accumulator, part.1) };
        Ok(Operand { address, representation: Representation::Accumulator, scale: 1.0 })
    }

    /// The ranks' elements, in the list that is kept for it.
    fn leaves(&mut self, stretch: &Stretch<'_>, ranks: &[u32], skipped: usize) -> Vec<Operand> {
        let mut operands = std::mem::take(&mut self.operands);
        operands.clear();
        operands.extend(ranks.iter().map(|&rank| self.leaf(stretch, rank, skipped)));
        operands
    }

    /// A rank's elements of the stretch, without the first `skipped` positions.
    fn leaf(&self, stretch: &Stretch<'_>, rank: u32, skipped: usize) -> Operand {
        let rank = rank as usize;
        self.all.operand(rank, stretch.ends[rank] - stretch.count, stretch.count, skipped)
    }
}

/// The ranks on either side of the first node below `first..first + count` that has some of `ranks` on both,
/// and where it parts. `None` if a fold over `ranks` is that tree already.
fn halves(ranks: &[u32], mut first: u32, mut count: u32) -> Option<(&[u32], &[u32], u32)> {
    loop {
        // One operand, or all there can be.
        if ranks.len() == 1 || ranks.len() == count as usize {
            return None;
        }
        let middle = first + (count.div_ceil(2)).next_power_of_two();
        let (left, right) = ranks.split_at(ranks.partition_point(|&rank| rank < middle));
        match (left.is_empty(), right.is_empty()) {
            (false, false) => return Some((left, right, middle)),
            (false, true) => count = middle - first,
            _ => (first, count) = (middle, first + count - middle),
        }
    }
}
