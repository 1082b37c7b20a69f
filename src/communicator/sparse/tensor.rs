//! Sparse tensors by themselves: a rank's elements made ready to travel, those of all ranks, what comes of
//! them.

use std::ops::Range;
use std::sync::Arc;

use super::memory::{self, Pool, Words};
use super::order::Order;
use super::pace::{ELEMENT_BYTES, LOOK_BYTES, Pace};
use super::pieces::{Long, Piece};
use crate::engine::joint::Team;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operand, Reducer, Representation};

/// Bytes of values that a thread combines before it looks for more.
pub(super) const PIECE: usize = 128 * 1024;

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

    /// Bytes of one element's accumulators. [`Shape::new`] has seen that it fits: no type is wider than 8
    /// bytes.
    pub(super) fn accumulator_bytes(&self) -> usize {
        self.block * self.dtype.accumulator().size()
    }

    /// Bytes that whoever puts or merges elements goes through for each.
    pub(super) fn element_bytes(&self) -> usize {
        self.accumulator_bytes().saturating_add(self.dims.saturating_mul(8)).max(ELEMENT_BYTES)
    }

    /// How many elements of one index are combined at a time where it has too many for one look. A power of
    /// two, so the canonical tree has a node over each so many of them.
    pub(super) fn portion(&self) -> usize {
        // Of long elements more than a piece: their sums are kept meanwhile.
        let bytes = self.element_bytes();
        let fitting = (PIECE.min(LOOK_BYTES) / bytes).max((LOOK_BYTES / bytes).min(64));
        1 << fitting.max(2).ilog2()
    }
}

/// The elements of all ranks, one rank's after the other's: each sorted by index, each index once. `dims` ×
/// `nnz` coordinates, laid out as the caller's, then for each element `block` accumulators, filled up to a
/// whole word.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) shape: Shape,
    words: Words,
    /// For each rank, its first word and its nnz.
    ranks: Vec<(usize, usize)>,
    pool: Arc<Pool>,
}

impl Gathered {
    /// Room for `nnz` elements of each rank.
    pub(super) fn new(shape: &Shape, nnz: &[u64], pool: &Arc<Pool>) -> Result<Gathered> {
        let mut ranks = Vec::with_capacity(nnz.len());
        let mut end = 0_usize;
        for &nnz in nnz {
            let nnz = usize::try_from(nnz).unwrap_or(usize::MAX);
            ranks.push((end, nnz));
            end = shape.words(nnz).and_then(|words| end.checked_add(words)).ok_or_else(|| too_large(nnz))?;
        }
        Ok(Gathered { shape: *shape, words: pool.take(end)?, ranks, pool: pool.clone() })
    }

    /// How many words there are of each rank.
    pub(super) fn counts(&self) -> Vec<u64> {
        let ends = self.ranks[1..].iter().map(|(first, _)| *first).chain([self.words.len()]);
        self.ranks.iter().zip(ends).map(|((first, _), end)| (end - first) as u64).collect()
    }

    /// Puts elements in the places of `ranks`, one rank after the other, duplicates combined in the order
    /// they were given. Both lists are of one number of elements; `order` is that of the indices, and has as
    /// many different ones as `new` was told for these ranks.
    pub(super) async fn put(
        &mut self,
        ranks: Range<usize>,
        given: (&[i64], &[u8]),
        order: &Order,
        reducer: &Reducer,
        team: &(dyn Team + Sync),
        pace: &Pace,
    ) -> Result<()> {
        let (shape, places) = (self.shape, &self.ranks[ranks]);
        let room: usize = places.iter().map(|(_, nnz)| nnz).sum();
        assert_eq!(room, order.different, "the order is of other elements");
        let bytes = shape.accumulator_bytes();
        // Elements as they were given, duplicates among them: all of those are gone through.
        let each = PIECE / bytes.min(PIECE);
        let mut words = &mut self.words.words_mut()[places.first().map_or(0, |(first, _)| *first)..];
        let (mut groups, mut tasks, mut long) = (order.groups(), Vec::new(), Vec::new());
        for &(_, nnz) in places {
            if nnz == 0 {
                // There may be more dims than one would count.
                continue;
            }
            let (numbers, rest) = words.split_at_mut(nnz * shape.dims);
            let (values, rest) = rest.split_at_mut((nnz * bytes).div_ceil(8));
            if let Some(last) = values.last_mut() {
                // What fills it up is sent, too.
                *last = 0;
            }
            words = rest;
            let mut lists: Vec<&mut [u64]> = numbers.chunks_exact_mut(nnz).collect();
            let mut values = &mut memory::bytes_mut(values)[..nnz * bytes];
            let mut left = nnz;
            while let Some((groups, count)) = groups.cut(left, each, pace).await {
                left -= count;
                let coordinates = lists.iter_mut().filter_map(|list| list.split_off_mut(..count)).collect();
                let values = values.split_off_mut(..count * bytes).unwrap_or_default();
                let goes_through = groups.elements().saturating_mul(shape.element_bytes());
                match groups.places().filter(|places| count == 1 && places.len() > shape.portion()) {
                    Some(places) if goes_through > LOOK_BYTES => {
                        long.push(Long { coordinates, values, places });
                    }
                    _ => tasks.push((Piece { coordinates, values, groups }, goes_through)),
                }
            }
        }
        let put = |piece: Piece<'_>| {
            piece.put(&shape, given, reducer);
            Ok(())
        };
        pace.share(team, tasks, put).await?;
        for long in long {
            long.put(&shape, given, reducer, &self.pool, team, pace).await?;
        }
        Ok(())
    }

    /// Where the words lie.
    pub(super) fn address(&mut self) -> *mut u8 {
        self.words.address()
    }

    /// How many ranks.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// How many elements a rank has.
    pub(super) fn nnz(&self, rank: usize) -> usize {
        self.ranks[rank].1
    }

    /// A coordinate of elements of a rank, from the first on.
    pub(super) fn coordinates(&self, rank: usize, dim: usize) -> &[u64] {
        let (first, nnz) = self.ranks[rank];
        &self.words.words()[first + dim * nnz..][..nnz]
    }

    /// The accumulators of `count` elements of a rank, from `element` on, without the first `skipped`
    /// positions.
    pub(super) fn operand(&self, rank: usize, element: usize, count: usize, skipped: usize) -> Operand {
        let (first, nnz) = self.ranks[rank];
        let bytes = self.shape.accumulator_bytes();
        let start = (first + nnz * self.shape.dims) * 8 + element * bytes;
        let elements = &self.words.bytes()[start..][..count * bytes];
        let address = elements[skipped * self.shape.dtype.accumulator().size()..].as_ptr();
        Operand { address, representation: Representation::Accumulator, scale: 1.0 }
    }
}

/// A combined tensor: sorted by its indices, each of which occurs once.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) nnz: usize,
    /// `dims` × `nnz` coordinates, then the values.
    words: Words,
    numbers: usize,
    /// Of the values.
    bytes: usize,
}

impl Tensor {
    /// Room for so many elements.
    pub(super) fn new(shape: &Shape, nnz: usize, pool: &Arc<Pool>) -> Result<Tensor> {
        let (numbers, bytes) = shape.lengths(nnz as u64).map_err(|_| too_large(nnz))?;
        let words = numbers.checked_add(bytes.div_ceil(8)).ok_or_else(|| too_large(nnz))?;
        Ok(Tensor { nnz, words: pool.take_to_keep(words)?, numbers, bytes })
    }

    /// `dims` × `nnz` numbers.
    pub(super) fn indices(&self) -> &[i64] {
        let numbers = &self.words.words()[..self.numbers];
        // SAFETY: a signed number is as long as one without a sign, and any bits are one.
        unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
    }

    /// `nnz` × `block` values.
    pub(super) fn values(&self) -> &[u8] {
        &self.words.bytes()[self.numbers * 8..][..self.bytes]
    }

    /// The first byte of the values.
    pub(super) fn address(&mut self) -> *mut u8 {
        self.words.address().wrapping_add(self.numbers * 8)
    }

    /// The coordinates and the values, to be written.
    pub(super) fn parts_mut(&mut self) -> (&mut [u64], &mut [u8]) {
        let (numbers, values) = self.words.bytes_mut().split_at_mut(self.numbers * 8);
        // SAFETY: words as they were before they were looked at as bytes.
        let numbers = unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), self.numbers) };
        (numbers, &mut values[..self.bytes])
    }
}

pub(super) fn too_large(nnz: usize) -> Error {
    let text = format!("the ranks' sparse tensors have {nnz} elements and more: more than memory holds");
    Error::new(Status::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::communicator::sparse::merge::combined;
    use crate::communicator::sparse::pace::{at_once, in_looks};
    use crate::engine::joint::Alone;
    use crate::reduce::Operator;

    /// Three threads, each of which does every third part.
    struct Three;

    impl Team for Three {
        fn threads(&self) -> usize {
            3
        }

        fn together(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|scope| {
                for first in 0..3.min(parts) {
                    scope.spawn(move || (first..parts).step_by(3).for_each(work));
                }
            });
        }
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    /// What comes of some ranks' lists, if all that is long is done in many looks.
    fn combine(lists: &[(&[i64], &[u8])], shape: &Shape, reducer: &Reducer, pool: &Arc<Pool>) -> Tensor {
        at_once(async {
            let pace = Pace::of_looks();
            let mut orders = Vec::new();
            for (indices, _) in lists {
                orders.push(Order::of(indices, shape.dims, pool, &pace).await?);
            }
            let nnz: Vec<u64> = orders.iter().map(|order| order.different as u64).collect();
            let mut all = Gathered::new(shape, &nnz, pool)?;
            for (rank, (list, order)) in lists.iter().zip(&orders).enumerate() {
                all.put(rank..rank + 1, *list, order, reducer, &Three, &pace).await?;
            }
            combined(&all, reducer, pool, &Three, &pace).await
        })
        .unwrap()
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
        let values: Vec<Vec<u8>> = tensors.iter().map(|(_, values)| bytes(values)).collect();
        let lists: Vec<(&[i64], &[u8])> =
            tensors.iter().zip(&values).map(|((indices, _), values)| (*indices, &values[..])).collect();
        let tensor = combine(&lists, &shape, &reducer, &Arc::new(Pool::default()));
        (tensor.indices().to_vec(), floats(tensor.values()))
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

    /// Elements as bytes, by index.
    type Places = BTreeMap<Vec<i64>, Vec<u8>>;

    /// A rank's tensor of small numbers: indices and values.
    type Lists = (Vec<i64>, Vec<u8>);

    /// An element's values, if there is one.
    type Block = Option<Vec<u8>>;

    /// What comes of the ranks' tensors, one index after the other and two operands at a time.
    fn plainly(tensors: &[Lists], shape: &Shape, reducer: &Reducer) -> Places {
        let Shape { dims, block, dtype } = *shape;
        let fold = |parts: &[&[u8]], from, to| {
            let size = if to == Representation::Element { dtype } else { dtype.accumulator() }.size();
            let mut out = vec![0; block * size];
            let operands: Vec<Operand> = parts
                .iter()
                .map(|part| Operand { address: part.as_ptr(), representation: from, scale: 1.0 })
                .collect();
            // SAFETY: each part holds a block of `from`, `out` one of `to`.
            unsafe { reducer.fold(&operands, out.as_mut_ptr(), to, block) };
            out
        };
        fn tree(parts: &[Block], fold: &impl Fn(&[u8], &[u8]) -> Vec<u8>) -> Block {
            if let [single] = parts {
                return single.clone();
            }
            let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
            match (tree(left, fold), tree(right, fold)) {
                (Some(left), Some(right)) => Some(fold(&left, &right)),
                (left, right) => left.or(right),
            }
        }
        let (element, accumulator) = (Representation::Element, Representation::Accumulator);
        let pair = |left: &[u8], right: &[u8]| fold(&[left, right], accumulator, accumulator);
        let mut ranks_of: BTreeMap<Vec<i64>, Vec<Vec<Block>>> = BTreeMap::new();
        for (rank, (indices, values)) in tensors.iter().enumerate() {
            let nnz = indices.len() / dims;
            for (at, value) in values.chunks_exact(block * dtype.size()).enumerate() {
                let index = (0..dims).map(|dim| indices[dim * nnz + at]).collect();
                let ranks = ranks_of.entry(index).or_insert_with(|| vec![vec![]; tensors.len()]);
                ranks[rank].push(Some(fold(&[value], element, accumulator)));
            }
        }
        ranks_of
            .into_iter()
            .map(|(index, ranks)| {
                let combined: Vec<_> = ranks
                    .iter()
                    .map(|given| if given.is_empty() { None } else { tree(given, &pair) })
                    .collect();
                (index, fold(&[&tree(&combined, &pair).expect("somebody has it")], accumulator, element))
            })
            .collect()
    }

    #[test]
    fn every_type_and_operator_gives_the_bits_of_the_plain_tree() {
        let mut state = 7_u64;
        let mut below = move |limit: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % limit
        };
        let operators = [Operator::Sum, Operator::Product, Operator::Min, Operator::Max, Operator::Average];
        let pool = Arc::new(Pool::default());
        for dtype in DataType::ALL {
            for operator in operators {
                for (size, dims, block, nnz) in [
                    (1, 1, 1, 300),
                    (2, 1, 3, 50),
                    (3, 2, 1, 40),
                    (5, 3, 2, 20),
                    (7, 1, 5, 9),
                    (5, 1, 3000, 6),
                ] {
                    let shape = Shape::new(dims as u32, block as u64, dtype).unwrap();
                    let reducer = Reducer::new(dtype, operator, size).unwrap();
                    let tensors: Vec<Lists> = (0..u64::from(size))
                        .map(|rank| {
                            // Some have none; some are sorted; neighbours are shared, and some occur twice.
                            let given = nnz * ((rank as usize + 1) % 3) / 2;
                            let mut indices: Vec<i64> = (0..given * dims)
                                .map(|_| below(if dims == 1 { nnz as u64 } else { 4 }) as i64 - 2)
                                .collect();
                            if rank % 2 == 0 && dims == 1 {
                                indices.sort_unstable();
                            }
                            // Any bits but those of numbers without end, whose sums are none.
                            let values =
                                (0..given * block * dtype.size()).map(|_| 1 + below(60) as u8).collect();
                            (indices, values)
                        })
                        .collect();
                    check(&tensors, &shape, &reducer, &pool);
                }
            }
        }
    }

    /// Compares what comes of the ranks' tensors with what comes of them plainly.
    fn check(tensors: &[Lists], shape: &Shape, reducer: &Reducer, pool: &Arc<Pool>) {
        let Shape { dims, block, dtype } = *shape;
        let lists: Vec<(&[i64], &[u8])> =
            tensors.iter().map(|(indices, values)| (&indices[..], &values[..])).collect();
        let tensor = combine(&lists, shape, reducer, pool);
        let index = |at: usize| -> Vec<i64> {
            (0..dims).map(|dim| tensor.indices()[dim * tensor.nnz + at]).collect()
        };
        let values = tensor.values().chunks_exact(block * dtype.size());
        assert_eq!(values.len(), tensor.nnz);
        let found: Vec<_> = values.enumerate().map(|(at, value)| (index(at), value.to_vec())).collect();
        let due: Vec<_> = plainly(tensors, shape, reducer).into_iter().collect();
        assert!(
            found == due,
            "{} {reducer:?}, {} ranks, {dims} dims of {block}",
            dtype.name(),
            tensors.len()
        );
    }

    #[test]
    fn several_threads_give_the_bits_of_the_plain_tree() {
        let pool = Arc::new(Pool::default());
        let operators = [(DataType::F32, Operator::Sum), (DataType::Bf16, Operator::Average)];
        // Many pieces: of each rank's, and of the union. All ranks have the same few, none has what another
        // has, one has most.
        let same: fn(usize, usize) -> i64 = |_, at| (at as i64 * 7919) % 300;
        let apart: fn(usize, usize) -> i64 = |rank, at| (rank * 10_000) as i64 - at as i64;
        let mixed: fn(usize, usize) -> i64 = |rank, at| (at as i64 * 31) % (500 << (3 * (rank % 2)));
        for (dtype, operator) in operators {
            for (index, block) in [(same, 100), (apart, 200), (mixed, 150), (mixed, 40_000)] {
                for (size, dims) in [(2, 1), (3, 2), (5, 1)] {
                    let shape = Shape::new(dims as u32, block, dtype).unwrap();
                    let reducer = Reducer::new(dtype, operator, size as u32).unwrap();
                    let tensors: Vec<Lists> = (0..size)
                        .map(|rank| {
                            let nnz = if block > 1000 { 12 } else { [700, 0, 1500, 90, 1][rank] };
                            let leading = (0..nnz).map(|at| index(rank, at));
                            // The second coordinate decides where the first does not.
                            let further = (0..nnz * (dims - 1)).map(|at| at as i64 % 3);
                            let values =
                                (0..nnz * block as usize * dtype.size()).map(|at| 1 + (at % 61) as u8);
                            (leading.chain(further).collect(), values.collect())
                        })
                        .collect();
                    check(&tensors, &shape, &reducer, &pool);
                }
            }
        }
    }

    #[test]
    fn an_index_with_more_elements_than_a_look_goes_through_has_the_bits_of_the_plain_tree() {
        let pool = Arc::new(Pool::default());
        for (dtype, operator) in [
            (DataType::F32, Operator::Sum),
            (DataType::Bf16, Operator::Average),
            (DataType::F64, Operator::Max),
            (DataType::I8, Operator::Product),
        ] {
            let shape = Shape::new(2, 1500, dtype).unwrap();
            let reducer = Reducer::new(dtype, operator, 2).unwrap();
            let portion = shape.portion();
            // A portion, some, as many as it has elements, and a few more each time.
            for times in [portion, portion + 1, 3 * portion + 1, portion * portion, portion * portion + 2] {
                let tensors: Vec<Lists> = [5, 6]
                    .map(|often| {
                        // Every third time with another one behind.
                        let others = |time: i64| (time % 3 == 0).then_some(time % 4);
                        let mut indices: Vec<i64> = (0..times as i64)
                            .flat_map(|time| [often].into_iter().chain(others(time)))
                            .collect();
                        let nnz = indices.len();
                        indices.resize(2 * nnz, -7);
                        let values = (0..nnz * 1500 * dtype.size()).map(|at| 1 + (at * at % 61) as u8);
                        (indices, values.collect())
                    })
                    .into();
                check(&tensors, &shape, &reducer, &pool);
            }
        }
    }

    #[test]
    fn duplicates_are_put_in_as_many_looks_as_their_bytes_ask_for() {
        const NNZ: usize = 20_000;
        let shape = Shape::new(1, 64, DataType::F32).unwrap();
        let reducer = Reducer::new(DataType::F32, Operator::Sum, 2).unwrap();
        let (pool, pace) = (Arc::new(Pool::default()), Pace::of_looks());
        let values = bytes(&vec![1.0; NNZ * shape.block]);
        for different in [1, 5, 1000] {
            let indices: Vec<i64> = (0..NNZ as i64).map(|at| at % different).collect();
            let order = at_once(Order::of(&indices, 1, &pool, &Pace::free())).unwrap();
            let mut all = Gathered::new(&shape, &[different as u64], &pool).unwrap();
            let list: (&[i64], &[u8]) = (&indices, &values);
            let (done, looks) = in_looks(&pace, all.put(0..1, list, &order, &reducer, &Alone, &pace));
            done.unwrap();
            // A look is no longer than two pieces.
            assert!(looks >= values.len() / PIECE / 2, "{different}: {looks} looks");
            let tensor = at_once(combined(&all, &reducer, &pool, &Alone, &Pace::free())).unwrap();
            let due = NNZ as f32 / different as f32;
            assert!(
                tensor.nnz == different as usize && floats(tensor.values()).iter().all(|sum| *sum == due)
            );
        }
    }

    #[test]
    fn long_blocks_are_merged_in_as_many_looks_as_their_bytes_ask_for() {
        const NNZ: usize = 4000;
        let shape = Shape::new(1, 1024, DataType::F32).unwrap();
        let reducer = Reducer::new(DataType::F32, Operator::Sum, 2).unwrap();
        let (pool, pace) = (Arc::new(Pool::default()), Pace::of_looks());
        let values = bytes(&vec![1.0; NNZ * shape.block]);
        let mut all = Gathered::new(&shape, &[NNZ as u64; 2], &pool).unwrap();
        for rank in 0..2 {
            let indices: Vec<i64> = (0..NNZ as i64).map(|at| 2 * at + rank as i64).collect();
            let order = at_once(Order::of(&indices, 1, &pool, &Pace::free())).unwrap();
            let list: (&[i64], &[u8]) = (&indices, &values);
            at_once(all.put(rank..rank + 1, list, &order, &reducer, &Alone, &Pace::free())).unwrap();
        }
        let (tensor, looks) = in_looks(&pace, combined(&all, &reducer, &pool, &Alone, &pace));
        assert_eq!(tensor.unwrap().nnz, 2 * NNZ);
        // A look is no longer than two pieces, and this is the work of two ranks.
        assert!(looks >= values.len() / PIECE, "{looks} looks");
    }

    #[test]
    fn counts_of_elements_that_no_memory_holds_are_refused() {
        assert!(Shape::new(1, u64::MAX / 8, DataType::F32).is_err());
        let shape = Shape::new(3, 2, DataType::F64).unwrap();
        assert!(shape.lengths(u64::MAX / 8).is_err());
        for nnz in [&[u64::MAX][..], &[u64::MAX / 40, u64::MAX / 40 * 8]] {
            let error = Gathered::new(&shape, nnz, &Arc::default()).unwrap_err();
            assert!(matches!(error.status(), Status::InvalidArgument | Status::OutOfMemory), "{error}");
        }
    }
}
