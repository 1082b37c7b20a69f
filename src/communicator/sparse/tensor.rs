//! Sparse tensors by themselves: a rank's elements made ready to travel, and those of all ranks combined.

use std::cmp::Ordering;

use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operand, Reducer, Representation};

/// What all tensors of one call have in common, in numbers that are known to fit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) dims: usize,
    pub(super) block: usize,
    pub(super) dtype: DataType,
}

impl Shape {
    pub(super) fn new(dims: u32, block: u64, dtype: DataType) -> Result<Shape> {
        if dims == 0 {
            fail!(InvalidArgument, "dims is 0; an index has at least one coordinate");
        }
        let fits = |&block: &usize| block.checked_mul(8).is_some_and(|bytes| isize::try_from(bytes).is_ok());
        match usize::try_from(block).ok().filter(fits) {
            Some(0) => fail!(InvalidArgument, "block is 0; an element has at least one value"),
            Some(block) => Ok(Shape { dims: dims as usize, block, dtype }),
            None => fail!(InvalidArgument, "block {block} is more values than memory holds"),
        }
    }

    /// Numbers of the indices, and bytes of the values, of `nnz` elements.
    pub(super) fn lengths(&self, nnz: u64) -> Result<(usize, usize)> {
        let fits = |bytes: &usize| isize::try_from(*bytes).is_ok();
        let count = usize::try_from(nnz).ok();
        let numbers = count.and_then(|nnz| nnz.checked_mul(self.dims));
        let values = count.and_then(|nnz| nnz.checked_mul(self.block)?.checked_mul(self.dtype.size()));
        let numbers =
            numbers.filter(|numbers| numbers.checked_mul(size_of::<i64>()).as_ref().is_some_and(fits));
        match (numbers, values.filter(fits)) {
            (Some(numbers), Some(values)) => Ok((numbers, values)),
            _ => fail!(
                InvalidArgument,
                "nnz {nnz} of {} dims and blocks of {} × {} is more than memory holds",
                self.dims,
                self.block,
                self.dtype.name()
            ),
        }
    }

    /// Words that `nnz` elements travel in.
    pub(super) fn words(&self, nnz: usize) -> Option<usize> {
        let accumulators = nnz.checked_mul(self.accumulator_bytes())?.div_ceil(8);
        nnz.checked_mul(self.dims)?.checked_add(accumulators)
    }

    /// Bytes of one element's accumulators. [`Shape::new`] has seen that it fits: no type is wider than 8 bytes.
    fn accumulator_bytes(&self) -> usize {
        self.block * self.dtype.accumulator().size()
    }
}

/// A rank's elements, sorted by index, each once, as they travel: `dims` × `nnz` coordinates, laid out as the caller's, then
/// for each element `block` accumulators, filled up to a whole word.
#[derive(Debug)]
pub(super) struct Elements {
    pub(super) nnz: usize,
    pub(super) words: Words,
}

impl Elements {
    pub(super) fn none() -> Elements {
        Elements { nnz: 0, words: Words(Vec::new()) }
    }

    /// This rank's elements, duplicates combined in the order they were given. Both lists are of one number of elements.
    pub(super) fn coalesce(
        indices: &[i64],
        values: &[u8],
        shape: &Shape,
        reducer: &Reducer,
    ) -> Result<Elements> {
        let nnz = indices.len() / shape.dims;
        let index = |element: usize| (0..shape.dims).map(move |dim| indices[dim * nnz + element]);
        let mut order: Vec<usize> = (0..nnz).collect();
        order.sort_by(|&a, &b| index(a).cmp(index(b)));

        let groups: Vec<&[usize]> = order.chunk_by(|&a, &b| index(a).eq(index(b))).collect();
        let words = shape.words(groups.len()).ok_or_else(|| too_large(nnz))?;
        let mut words = Words::zeroed(words)?;
        for dim in 0..shape.dims {
            let coordinates = &mut words.0[dim * groups.len()..][..groups.len()];
            for (out, group) in coordinates.iter_mut().zip(&groups) {
                *out = indices[dim * nnz + group[0]].cast_unsigned();
            }
        }
        let element_bytes = shape.block * shape.dtype.size();
        let accumulators = &mut words.bytes_mut()[groups.len() * shape.dims * 8..];
        let mut operands: Vec<Operand> = Vec::new();
        for (group, out) in groups.iter().zip(accumulators.chunks_exact_mut(shape.accumulator_bytes())) {
            operands.clear();
            operands.extend(group.iter().map(|&element| Operand {
                address: values[element * element_bytes..][..element_bytes].as_ptr(),
                representation: Representation::Element,
                scale: 1.0,
            }));
            // SAFETY: the slices that the addresses come from hold `block` elements, `out` holds as many accumulators
            // and overlaps none of them, and both are borrowed until here.
            unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Accumulator, shape.block) };
        }
        Ok(Elements { nnz: groups.len(), words })
    }
}

/// The elements of all ranks, one rank's after the other's, each as [`Elements`] has them.
#[derive(Debug)]
pub(super) struct Gathered {
    shape: Shape,
    words: Words,
    /// For each rank, its first word and its nnz.
    ranks: Vec<(usize, usize)>,
}

impl Gathered {
    /// Room for `nnz` elements of each rank.
    pub(super) fn new(shape: &Shape, nnz: &[u64]) -> Result<Gathered> {
        let mut ranks = Vec::with_capacity(nnz.len());
        let mut end = 0_usize;
        for &nnz in nnz {
            let nnz = usize::try_from(nnz).unwrap_or(usize::MAX);
            ranks.push((end, nnz));
            end = shape.words(nnz).and_then(|words| end.checked_add(words)).ok_or_else(|| too_large(nnz))?;
        }
        Ok(Gathered { shape: *shape, words: Words::zeroed(end)?, ranks })
    }

    /// How many words there are of each rank.
    pub(super) fn counts(&self) -> Vec<u64> {
        let ends = self.ranks[1..].iter().map(|(first, _)| *first).chain([self.words.0.len()]);
        self.ranks.iter().zip(ends).map(|((first, _), end)| (end - first) as u64).collect()
    }

    /// Puts the elements of `rank` in their place. They are as many as `new` was told.
    pub(super) fn put(&mut self, rank: usize, elements: &Elements) {
        let (first, _) = self.ranks[rank];
        self.words.0[first..][..elements.words.0.len()].copy_from_slice(&elements.words.0);
    }

    /// Where the words lie.
    pub(super) fn address(&mut self) -> *mut u8 {
        self.words.address()
    }

    /// All ranks' elements as one tensor.
    pub(super) fn combine(&self, reducer: &Reducer) -> Result<Tensor> {
        let index = |present: &Present| self.index(*present);
        let mut order: Vec<Present> = Vec::with_capacity(self.ranks.iter().map(|(_, nnz)| nnz).sum());
        for (rank, &(_, nnz)) in (0..).zip(&self.ranks) {
            order.extend((0..nnz).map(|element| (rank, element)));
        }
        // Stable, so the ranks of one index stay in order; and made of sorted runs, which this sort merges.
        order.sort_by(|a, b| index(a).cmp(index(b)));

        let groups: Vec<&[Present]> =
            order.chunk_by(|a, b| index(a).cmp(index(b)) == Ordering::Equal).collect();
        let Shape { dims, block, dtype } = self.shape;
        let element_bytes = block * dtype.size();
        let bytes = groups.len().checked_mul(element_bytes).ok_or_else(|| too_large(groups.len()))?;
        let mut values = Words::zeroed(bytes.div_ceil(8))?;
        let size = self.ranks.len() as u32;
        let mut tree = Tree { reducer, all: self, scratch: Vec::new() };
        for (group, out) in groups.iter().zip(values.bytes_mut().chunks_exact_mut(element_bytes)) {
            tree.combine(group, size, out)?;
        }
        let mut indices: Vec<i64> = zeroed(groups.len().checked_mul(dims).ok_or_else(|| too_large(bytes))?)?;
        for (at, group) in groups.iter().enumerate() {
            for (dim, coordinate) in index(&group[0]).enumerate() {
                indices[dim * groups.len() + at] = coordinate;
            }
        }
        Ok(Tensor { nnz: groups.len(), indices, values, bytes })
    }

    /// An element's index, coordinate by coordinate.
    fn index(&self, (rank, element): Present) -> impl Iterator<Item = i64> + '_ {
        let (first, nnz) = self.ranks[rank as usize];
        (0..self.shape.dims).map(move |dim| self.words.0[first + dim * nnz + element].cast_signed())
    }

    fn operand(&self, (rank, element): Present) -> Operand {
        let (first, nnz) = self.ranks[rank as usize];
        let bytes = self.shape.accumulator_bytes();
        let start = (first + nnz * self.shape.dims) * 8 + element * bytes;
        let address = self.words.bytes()[start..][..bytes].as_ptr();
        Operand { address, representation: Representation::Accumulator, scale: 1.0 }
    }
}

/// An element that a rank has: the rank, and its place among that rank's.
type Present = (u32, usize);

/// The canonical tree over all ranks, for one element at a time.
struct Tree<'a> {
    reducer: &'a Reducer,
    all: &'a Gathered,
    /// Partial results, by depth.
    scratch: Vec<Words>,
}

impl Tree<'_> {
    /// Combines the operands of one element, ordered by rank, into `out`, which holds `block` elements.
    fn combine(&mut self, operands: &[Present], size: u32, out: &mut [u8]) -> Result<()> {
        let (reducer, block) = (self.reducer, self.all.shape.block);
        let mut fold = |list: &[Operand]| {
            // SAFETY: each operand holds `block` accumulators, in `all` or in `scratch`, and `out` as many elements
            // apart from them; nothing touches either meanwhile.
            unsafe { reducer.fold(list, out.as_mut_ptr(), Representation::Element, block) };
        };
        match (operands, self.halves(operands, 0, size)) {
            ([single], _) => fold(&[self.all.operand(*single)]),
            (_, Some((left, right, middle))) => {
                fold(&[self.partial(left, 0, middle, 0)?, self.partial(right, middle, size - middle, 1)?]);
            }
            (_, None) => fold(&self.leaves(operands)),
        }
        Ok(())
    }

    /// The tree over the `count` ranks from `first` on, of which `operands`, at least one, have the element. Slot
    /// `slot` of the scratch and those above it are free.
    fn partial(&mut self, operands: &[Present], first: u32, count: u32, slot: usize) -> Result<Operand> {
        if let [single] = operands {
            return Ok(self.all.operand(*single));
        }
        let list = match self.halves(operands, first, count) {
            Some((left, right, middle)) => vec![
                self.partial(left, first, middle - first, slot)?,
                self.partial(right, middle, first + count - middle, slot + 1)?,
            ],
            None => self.leaves(operands),
        };
        while self.scratch.len() <= slot {
            self.scratch.push(Words::zeroed(self.all.shape.accumulator_bytes().div_ceil(8))?);
        }
        let out = self.scratch[slot].address();
        // SAFETY: as in `combine`; `out` is the left operand or apart from both.
        unsafe { self.reducer.fold(&list, out, Representation::Accumulator, self.all.shape.block) };
        Ok(Operand { address: out, representation: Representation::Accumulator, scale: 1.0 })
    }

    /// The operands of the first node below `first..first + count` that has operands on both sides, and where it
    /// parts. `None` if a fold of the list is that tree already.
    fn halves<'o>(
        &self,
        operands: &'o [Present],
        mut first: u32,
        mut count: u32,
    ) -> Option<(&'o [Present], &'o [Present], u32)> {
        loop {
            // One operand, or all there can be.
            if operands.len() == 1 || operands.len() == count as usize {
                return None;
            }
            let middle = first + (count.div_ceil(2)).next_power_of_two();
            let (left, right) = operands.split_at(operands.partition_point(|&(rank, _)| rank < middle));
            match (left.is_empty(), right.is_empty()) {
                (false, false) => return Some((left, right, middle)),
                (false, true) => count = middle - first,
                _ => (first, count) = (middle, first + count - middle),
            }
        }
    }

    fn leaves(&self, operands: &[Present]) -> Vec<Operand> {
        operands.iter().map(|&present| self.all.operand(present)).collect()
    }
}

/// A combined tensor: sorted by its indices, each of which occurs once.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) nnz: usize,
    /// `dims` × `nnz`.
    pub(super) indices: Vec<i64>,
    values: Words,
    /// Of the values.
    bytes: usize,
}

impl Tensor {
    /// `nnz` × `block` values.
    pub(super) fn values(&self) -> &[u8] {
        &self.values.bytes()[..self.bytes]
    }
}

/// Memory that is looked at as bytes or as words.
#[derive(Debug)]
pub(super) struct Words(Vec<u64>);

impl Words {
    pub(super) fn zeroed(words: usize) -> Result<Words> {
        zeroed(words).map(Words)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the words hold so many bytes, all initialised.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 8) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 8) }
    }

    /// The first byte, without a claim on those that were given out before.
    pub(super) fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

fn too_large(nnz: usize) -> Error {
    let text = format!("the ranks' sparse tensors have {nnz} elements and more: more than memory holds");
    Error::new(Status::InvalidArgument, text)
}

/// Zeros, or an error where `vec!` would end the process.
fn zeroed<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match list.try_reserve_exact(count) {
        Ok(()) => list.resize(count, T::default()),
        Err(_) => fail!(OutOfMemory, "no memory for {count} numbers of {} bytes", size_of::<T>()),
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::Operator;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    /// What a group would do, without the messages between its ranks.
    fn together(
        tensors: &[(&[i64], &[f32])],
        dims: u32,
        block: usize,
        operator: Operator,
    ) -> (Vec<i64>, Vec<f32>) {
        let size = tensors.len() as u32;
        let reducer = Reducer::new(DataType::F32, operator, size).unwrap();
        let shape = Shape::new(dims, block as u64, DataType::F32).unwrap();
        let (mut nnz, mut joined) = (Vec::new(), Vec::new());
        for (indices, values) in tensors {
            let values = bytes(values);
            let mine = Elements::coalesce(indices, &values, &shape, &reducer).unwrap();
            nnz.push(mine.nnz as u64);
            joined.extend(mine.words.0);
        }
        let mut all = Gathered::new(&shape, &nnz).unwrap();
        assert_eq!(all.counts().iter().sum::<u64>(), joined.len() as u64);
        all.words.0.copy_from_slice(&joined);
        let tensor = all.combine(&reducer).unwrap();
        (tensor.indices.clone(), floats(tensor.values()))
    }

    #[test]
    fn elements_of_all_ranks_are_sorted_and_combined() {
        let (indices, values) = together(
            &[(&[7, 2, 7], &[1.0, 2.0, 3.0]), (&[], &[]), (&[2, -1], &[10.0, 20.0])],
            1,
            1,
            Operator::Sum,
        );
        assert_eq!(indices, [-1, 2, 7]);
        assert_eq!(values, [20.0, 12.0, 4.0]);
    }

    #[test]
    fn indices_of_several_coordinates_lie_coordinate_by_coordinate() {
        // (1, 5) (0, 9) and (1, 5) (1, 4), blocks of two.
        let (indices, values) = together(
            &[(&[1, 0, 5, 9], &[1.0, 2.0, 3.0, 4.0]), (&[1, 1, 5, 4], &[10.0, 20.0, 30.0, 40.0])],
            2,
            2,
            Operator::Sum,
        );
        assert_eq!(indices, [0, 1, 1, 9, 4, 5]);
        assert_eq!(values, [3.0, 4.0, 30.0, 40.0, 11.0, 22.0]);
    }

    #[test]
    fn an_average_divides_by_the_size_of_the_group() {
        let one: (&[i64], &[f32]) = (&[3], &[8.0]);
        let none: (&[i64], &[f32]) = (&[], &[]);
        assert_eq!(together(&[one, none, none, one], 1, 1, Operator::Average), (vec![3], vec![4.0]));
        assert_eq!(together(&[none, one, none, none], 1, 1, Operator::Average), (vec![3], vec![2.0]));
    }

    #[test]
    fn nothing_gives_nothing() {
        assert_eq!(together(&[(&[], &[]), (&[], &[])], 1, 1, Operator::Max), (vec![], vec![]));
    }

    /// A dense allreduce of zeros elsewhere gives the same bits, whichever ranks have the element.
    #[test]
    fn sums_have_the_bits_of_the_dense_tree() {
        fn dense(values: &[f32]) -> f32 {
            match values {
                [single] => *single,
                _ => {
                    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
                    dense(left) + dense(right)
                }
            }
        }
        let value = |rank: usize| 0.1_f32 + (rank as f32 * 1.7).sin() * 10_f32.powi(rank as i32 % 5 * 2);
        for size in 1..=9_usize {
            for present in 1..1_u32 << size {
                let has = |rank: usize| present >> rank & 1 == 1;
                let values: Vec<Vec<f32>> =
                    (0..size).map(|rank| if has(rank) { vec![value(rank)] } else { vec![] }).collect();
                let indices: Vec<Vec<i64>> = values.iter().map(|values| vec![5; values.len()]).collect();
                let tensors: Vec<(&[i64], &[f32])> =
                    indices.iter().zip(&values).map(|(i, v)| (&i[..], &v[..])).collect();
                let (_, sum) = together(&tensors, 1, 1, Operator::Sum);
                let zeros: Vec<f32> =
                    (0..size).map(|rank| if has(rank) { value(rank) } else { 0.0 }).collect();
                assert_eq!(sum[0].to_bits(), dense(&zeros).to_bits(), "{size} ranks, present {present:b}");
            }
        }
    }

    #[test]
    fn counts_of_elements_that_no_memory_holds_are_refused() {
        assert!(Shape::new(1, u64::MAX / 8, DataType::F32).is_err());
        let shape = Shape::new(3, 2, DataType::F64).unwrap();
        assert!(shape.lengths(u64::MAX / 8).is_err());
        for nnz in [&[u64::MAX][..], &[u64::MAX / 40, u64::MAX / 40 * 8]] {
            let error = Gathered::new(&shape, nnz).unwrap_err();
            assert!(matches!(error.status(), Status::InvalidArgument | Status::OutOfMemory), "{error}");
        }
    }
}
