//! Sparse allreduce: tensors in coordinate form, whose elements differ from rank to rank.
//!
//! Each rank combines its own duplicates, all gather everybody's elements, and each combines them. Partial results
//! travel as accumulators, so short floats are rounded once. An element's operands are combined in the canonical tree
//! over all ranks, with the ranks that lack it left out.

use std::cmp::Ordering;
use std::ops::Range;
use std::time::Duration;

use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Call, Context};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// This rank's tensor: `nnz` elements, in any order, the same index several times if need be.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// `dims` × `nnz` numbers: the first coordinate of every element, then the second, and so on.
    pub indices: &'a [i64],
    /// `nnz` × `block` values, as bytes at any alignment.
    pub values: &'a [u8],
    /// How many elements.
    pub nnz: u64,
    /// Coordinates of an index, at least 1. The same on every rank.
    pub dims: u32,
    /// Values of an element, at least 1. The same on every rank.
    pub block: u64,
    /// The values' type. The same on every rank.
    pub dtype: DataType,
}

/// A combined tensor: sorted by its indices, each of which occurs once.
#[derive(Debug)]
pub struct Sparse {
    dims: u32,
    nnz: usize,
    indices: Vec<i64>,
    values: Values,
}

impl Sparse {
    /// Coordinates of an index.
    pub fn dims(&self) -> u32 {
        self.dims
    }

    /// How many elements.
    pub fn nnz(&self) -> u64 {
        self.nnz as u64
    }

    /// `dims` × `nnz` numbers, laid out as in [`Input::indices`].
    pub fn indices(&self) -> &[i64] {
        &self.indices
    }

    /// `nnz` × `block` values, as bytes, aligned to 8.
    pub fn values(&self) -> &[u8] {
        self.values.bytes()
    }
}

impl Context {
    /// Combines the tensors of all ranks, each of which gets the same result. Collective; runs in this thread. `operator`
    /// is sum, product, min, max or average, the same on every rank.
    pub fn sparse_allreduce(&self, input: &Input<'_>, operator: Operator, call: &Call) -> Result<Sparse> {
        if !matches!(
            operator,
            Operator::Sum | Operator::Product | Operator::Min | Operator::Max | Operator::Average
        ) {
            let name = Operator::name_of(operator.number());
            fail!(
                InvalidArgument,
                "a sparse allreduce combines by sum, product, min, max or average, not by {name}"
            );
        }
        if call.algorithm.is_some() {
            fail!(InvalidArgument, "a sparse allreduce has one algorithm only: leave it unset");
        }
        let shape = Shape::of(input)?;
        let reducer = Reducer::new(input.dtype, operator, self.size())?;
        let mine = coalesce(input, &shape, &reducer)?;

        let steps = Steps::new(self, call);
        let nnz = steps.exchange_headers(mine.nnz, &shape, &operator)?;
        let all = steps.exchange_elements(&mine, &shape, &nnz)?;
        combine(&all, &shape, &reducer, self.size())
    }
}

/// What all tensors of one call have in common, in numbers that are known to fit.
struct Shape {
    dims: usize,
    block: usize,
    dtype: DataType,
}

impl Shape {
    fn of(input: &Input<'_>) -> Result<Shape> {
        let (dims, block) = (input.dims as usize, usize::try_from(input.block).unwrap_or(usize::MAX));
        if dims == 0 {
            fail!(InvalidArgument, "dims is 0; an index has at least one coordinate");
        }
        if block == 0 {
            fail!(InvalidArgument, "block is 0; an element has at least one value");
        }
        let nnz = usize::try_from(input.nnz).unwrap_or(usize::MAX);
        let values = nnz.checked_mul(block).and_then(|count| count.checked_mul(input.dtype.size()));
        if nnz.checked_mul(dims) != Some(input.indices.len()) || values != Some(input.values.len()) {
            fail!(
                InvalidArgument,
                "nnz {} of {dims} dims and blocks of {block} × {} does not fit {} indices and {} bytes of values",
                input.nnz,
                input.dtype.name(),
                input.indices.len(),
                input.values.len()
            );
        }
        Ok(Shape { dims, block, dtype: input.dtype })
    }

    /// Room for the accumulators of `elements` elements.
    fn accumulators(&self, elements: usize) -> Result<Values> {
        Values::zeroed(elements, self.block, self.dtype.accumulator().size())
    }

    /// Bytes of one element's accumulators. It fits where [`Shape::accumulators`] succeeded.
    fn accumulator_bytes(&self) -> usize {
        self.block * self.dtype.accumulator().size()
    }
}

/// Elements, by rank: within a rank sorted by index, each once.
struct Elements {
    nnz: usize,
    /// For each rank, `dims` × its nnz.
    indices: Vec<i64>,
    /// For each element, `block` accumulators.
    accumulators: Values,
    /// Each rank's elements, counted over all ranks.
    ranks: Vec<Range<usize>>,
}

impl Elements {
    /// An element's index, coordinate by coordinate.
    fn index(&self, dims: usize, rank: usize, element: usize) -> impl Iterator<Item = i64> + '_ {
        let Range { start, end } = self.ranks[rank];
        let nnz = end - start;
        let first = start * dims + (element - start);
        (0..dims).map(move |dim| self.indices[first + dim * nnz])
    }
}

/// This rank's elements, duplicates combined in the order they were given.
fn coalesce(input: &Input<'_>, shape: &Shape, reducer: &Reducer) -> Result<Elements> {
    // It is the length of slices divided by at least 1.
    let nnz = input.nnz as usize;
    let index = |element: usize| (0..shape.dims).map(move |dim| input.indices[dim * nnz + element]);
    let mut order: Vec<usize> = (0..nnz).collect();
    order.sort_by(|&a, &b| index(a).cmp(index(b)));

    let groups: Vec<&[usize]> = order.chunk_by(|&a, &b| index(a).eq(index(b))).collect();
    let mut accumulators = shape.accumulators(groups.len())?;
    let element_bytes = shape.block * shape.dtype.size();
    for (group, out) in groups.iter().zip(accumulators.chunks_mut(shape.accumulator_bytes())) {
        let operands: Vec<Operand> = group
            .iter()
            .map(|&element| Operand {
                address: input.values[element * element_bytes..][..element_bytes].as_ptr(),
                representation: Representation::Element,
                scale: 1.0,
            })
            .collect();
        // SAFETY: the slices that the addresses come from hold `block` elements, `out` holds as many accumulators and
        // overlaps none of them, and both are borrowed until here.
        unsafe { reducer.fold(&operands, out.as_mut_ptr(), Representation::Accumulator, shape.block) };
    }
    let mut indices = Vec::with_capacity(groups.len() * shape.dims);
    for dim in 0..shape.dims {
        indices.extend(groups.iter().map(|group| input.indices[dim * nnz + group[0]]));
    }
    let ranks = std::iter::once(0..groups.len()).collect();
    Ok(Elements { nnz: groups.len(), indices, accumulators, ranks })
}

/// All ranks' elements into one tensor.
fn combine(all: &Elements, shape: &Shape, reducer: &Reducer, size: u32) -> Result<Sparse> {
    let index = |&(rank, element): &Present| all.index(shape.dims, rank as usize, element);
    let mut order: Vec<Present> = (0..size)
        .zip(&all.ranks)
        .flat_map(|(rank, elements)| elements.clone().map(move |e| (rank, e)))
        .collect();
    // Stable, so the ranks of one index stay in order; and made of sorted runs, which this sort merges.
    order.sort_by(|a, b| index(a).cmp(index(b)));

    let groups: Vec<&[Present]> =
        order.chunk_by(|a, b| index(a).cmp(index(b)) == Ordering::Equal).collect();
    let mut values = Values::zeroed(groups.len(), shape.block, shape.dtype.size())?;
    let mut tree = Tree { reducer, all, shape, scratch: Vec::new() };
    for (group, out) in groups.iter().zip(values.chunks_mut(shape.block * shape.dtype.size())) {
        tree.combine(group, size, out)?;
    }
    let mut indices = vec![0; groups.len() * shape.dims];
    for (at, group) in groups.iter().enumerate() {
        for (dim, coordinate) in index(&group[0]).enumerate() {
            indices[dim * groups.len() + at] = coordinate;
        }
    }
    // It came as a u32.
    Ok(Sparse { dims: shape.dims as u32, nnz: groups.len(), indices, values })
}

/// An element that a rank has: the rank, and its place among all elements.
type Present = (u32, usize);

/// The canonical tree over all ranks, for one element at a time.
struct Tree<'a> {
    reducer: &'a Reducer,
    all: &'a Elements,
    shape: &'a Shape,
    /// Partial results, by depth.
    scratch: Vec<Values>,
}

impl Tree<'_> {
    /// Combines the operands of one element, ordered by rank, into `out`, which holds `block` elements.
    fn combine(&mut self, operands: &[Present], size: u32, out: &mut [u8]) -> Result<()> {
        let mut list = Vec::with_capacity(2);
        match self.halves(operands, 0, size) {
            Some((left, right, middle)) => {
                list.push(self.partial(left, 0, middle, 0)?);
                list.push(self.partial(right, middle, size - middle, 1)?);
            }
            None => list.extend(operands.iter().map(|&(_, element)| self.operand(element))),
        }
        // SAFETY: each operand holds `block` accumulators, in `all` or in `scratch`, and `out` as many elements apart
        // from them; nothing touches either meanwhile.
        unsafe { self.reducer.fold(&list, out.as_mut_ptr(), Representation::Element, self.shape.block) };
        Ok(())
    }

    /// The tree over the `count` ranks from `first` on, of which `operands`, at least one, have the element. Slot
    /// `slot` of the scratch and those above it are free.
    fn partial(&mut self, operands: &[Present], first: u32, count: u32, slot: usize) -> Result<Operand> {
        if let [(_, single)] = operands {
            return Ok(self.operand(*single));
        }
        let mut list = Vec::with_capacity(2);
        match self.halves(operands, first, count) {
            Some((left, right, middle)) => {
                list.push(self.partial(left, first, middle - first, slot)?);
                list.push(self.partial(right, middle, first + count - middle, slot + 1)?);
            }
            None => list.extend(operands.iter().map(|&(_, element)| self.operand(element))),
        }
        while self.scratch.len() <= slot {
            self.scratch.push(self.shape.accumulators(1)?);
        }
        let out = self.scratch[slot].address();
        // SAFETY: as in `combine`; `out` is the left operand or apart from both.
        unsafe { self.reducer.fold(&list, out, Representation::Accumulator, self.shape.block) };
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

    fn operand(&self, element: usize) -> Operand {
        let bytes = self.shape.accumulator_bytes();
        let address = self.all.accumulators.bytes()[element * bytes..][..bytes].as_ptr();
        Operand { address, representation: Representation::Accumulator, scale: 1.0 }
    }
}

/// The collectives that a sparse allreduce is made of, under one deadline.
struct Steps<'a> {
    context: &'a Context,
    call: &'a Call,
    deadline: Option<Deadline>,
}

impl<'a> Steps<'a> {
    fn new(context: &'a Context, call: &'a Call) -> Steps<'a> {
        Steps { context, call, deadline: call.timeout.map(Deadline::after) }
    }

    /// How many elements each rank has, and that all called the same.
    fn exchange_headers(&self, nnz: usize, shape: &Shape, operator: &Operator) -> Result<Vec<usize>> {
        let header = Header {
            nnz: nnz as u64,
            dims: shape.dims as u64,
            block: shape.block as u64,
            dtype: shape.dtype as u64,
            operator: operator.number().into(),
        };
        let mine = header.to_words();
        let mut all = vec![0_u64; mine.len() * self.context.size() as usize];
        let counts = Counts::Uniform(mine.len() as u64);
        // SAFETY: `mine` holds the words of one rank, `all` those of every rank, until the call returns.
        unsafe { self.allgather(mine.as_ptr().cast(), all.as_mut_ptr().cast(), counts, DataType::U64) }?;
        let mut nnz = Vec::with_capacity(self.context.size() as usize);
        for (rank, words) in all.chunks_exact(mine.len()).enumerate() {
            let theirs = Header::from_words(words);
            if !theirs.agrees_with(&header) {
                fail!(
                    Mismatch,
                    "sparse allreduce of '{}' differs: rank {} called {header}, rank {rank} called {theirs}",
                    self.context.name(),
                    self.context.rank()
                );
            }
            nnz.push(usize::try_from(theirs.nnz).map_err(|_| too_large(theirs.nnz))?);
        }
        Ok(nnz)
    }

    /// All ranks' elements.
    fn exchange_elements(&self, mine: &Elements, shape: &Shape, nnz: &[usize]) -> Result<Elements> {
        let mut ranks = Vec::with_capacity(nnz.len());
        let mut total = 0_usize;
        for &nnz in nnz {
            let end = total.checked_add(nnz).ok_or_else(|| too_large(u64::MAX))?;
            ranks.push(total..end);
            total = end;
        }
        let numbers = total.checked_mul(shape.dims).ok_or_else(|| too_large(total as u64))?;
        let mut indices: Vec<i64> = zeroed(numbers)?;
        let mut accumulators = shape.accumulators(total)?;
        if total > 0 {
            // The products fit: they count parts of what was just allocated.
            let blocks = |each: usize| Counts::Blocks(nnz.iter().map(|&nnz| (nnz * each) as u64).collect());
            let (from, to) = (mine.indices.as_ptr().cast(), indices.as_mut_ptr().cast());
            // SAFETY: `from` holds this rank's block and `to` all blocks, until the call returns.
            unsafe { self.allgather(from, to, blocks(shape.dims), DataType::I64) }?;
            let from = mine.accumulators.bytes().as_ptr();
            let to = accumulators.bytes_mut().as_mut_ptr();
            // SAFETY: as above.
            unsafe { self.allgather(from, to, blocks(shape.block), shape.dtype.accumulator()) }?;
        }
        Ok(Elements { nnz: total, indices, accumulators, ranks })
    }

    /// # Safety
    /// As [`Context::run`].
    unsafe fn allgather(
        &self,
        input: *const u8,
        output: *mut u8,
        counts: Counts,
        dtype: DataType,
    ) -> Result<()> {
        let left = self.deadline.and_then(Deadline::remaining);
        let call = Call {
            // Zero would be no deadline, or none of ours.
            timeout: left.map(|left| left.max(Duration::from_millis(1))).or(self.call.timeout),
            ..self.call.clone()
        };
        let operator = Operator::Sum;
        let request = Request { kind: Kind::Allgather, input, output, counts, dtype, operator, root: 0 };
        // SAFETY: this function's contract.
        unsafe { self.context.run(&request, &call) }.map(drop)
    }
}

/// What a rank tells about its tensor before the elements.
struct Header {
    nnz: u64,
    dims: u64,
    block: u64,
    dtype: u64,
    operator: u64,
}

impl Header {
    fn to_words(&self) -> [u64; 5] {
        [self.nnz, self.dims, self.block, self.dtype, self.operator]
    }

    /// `words` are those of [`Header::to_words`].
    fn from_words(words: &[u64]) -> Header {
        Header { nnz: words[0], dims: words[1], block: words[2], dtype: words[3], operator: words[4] }
    }

    fn agrees_with(&self, other: &Header) -> bool {
        self.to_words()[1..] == other.to_words()[1..]
    }
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dtype = i32::try_from(self.dtype).ok().and_then(|number| DataType::from_number(number).ok());
        let dtype = dtype.map_or("unknown type", DataType::name);
        let operator = Operator::name_of(u8::try_from(self.operator).unwrap_or(u8::MAX));
        write!(f, "({} dims, blocks of {} × {dtype}, {operator})", self.dims, self.block)
    }
}

fn too_large(nnz: u64) -> Error {
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

/// Values of any type, as bytes aligned to 8.
#[derive(Debug)]
struct Values {
    words: Vec<u64>,
    bytes: usize,
}

impl Values {
    /// Zeros for `elements` elements of `block` values of `size` bytes.
    fn zeroed(elements: usize, block: usize, size: usize) -> Result<Values> {
        match elements.checked_mul(block).and_then(|count| count.checked_mul(size)) {
            Some(bytes) => Ok(Values { words: zeroed(bytes.div_ceil(8))?, bytes }),
            None => Err(too_large(elements as u64)),
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the words hold at least so many bytes, all initialised.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }

    /// The first byte, without a claim on those that were given out before.
    fn address(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast()
    }

    fn chunks_mut(&mut self, bytes: usize) -> impl Iterator<Item = &mut [u8]> {
        self.bytes_mut().chunks_exact_mut(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let shape = Shape { dims: dims as usize, block, dtype: DataType::F32 };
        let mut all =
            Elements { nnz: 0, indices: vec![], accumulators: shape.accumulators(0).unwrap(), ranks: vec![] };
        let mut joined = Vec::new();
        for (indices, values) in tensors {
            let values = bytes(values);
            let nnz = (indices.len() / dims as usize) as u64;
            let (block, dtype) = (block as u64, DataType::F32);
            let mine = Input { indices, values: &values, nnz, dims, block, dtype };
            let mine = coalesce(&mine, &Shape::of(&mine).unwrap(), &reducer).unwrap();
            all.ranks.push(all.nnz..all.nnz + mine.nnz);
            all.nnz += mine.nnz;
            all.indices.extend(&mine.indices);
            joined.extend_from_slice(mine.accumulators.bytes());
        }
        all.accumulators = shape.accumulators(all.nnz).unwrap();
        all.accumulators.bytes_mut().copy_from_slice(&joined);
        let sparse = combine(&all, &shape, &reducer, size).unwrap();
        (sparse.indices().to_vec(), floats(sparse.values()))
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
    fn lists_of_the_wrong_length_are_refused() {
        let input =
            Input { indices: &[1, 2], values: &[0; 4], nnz: 2, dims: 1, block: 1, dtype: DataType::F32 };
        let error = Shape::of(&input).err().unwrap();
        assert!(error.text().contains("4 bytes of values"), "{error}");
        assert!(Shape::of(&Input { dims: 0, ..input }).is_err());
        assert!(Shape::of(&Input { block: 0, values: &[], ..input }).is_err());
    }
}
