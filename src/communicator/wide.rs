//! Reductions that begin or end with more than one buffer of a rank, or scale what they read: the inputs of
//! this rank are combined into accumulators first, an ordinary reduction of those follows, and the result is
//! rounded once into each output.

use std::sync::Arc;

use super::finishing::{GRAIN, finishing, part_of, spread};
use crate::collective::checked::{self, Checked};
use crate::engine::executor::{Plan, Run};
use crate::engine::group::{Group, Lent, Turn};
use crate::engine::observed::First;
use crate::engine::operation::Operation;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// What a reduction begins and ends with on this rank.
pub struct Ends {
    operands: Vec<Operand>,
    outputs: Vec<*mut u8>,
    reducer: Reducer,
    dtype: DataType,
    operator: Operator,
}

/// Bytes that a group of one reads and writes at a time, about: they stay in the second-level cache until the
/// result has gone to all outputs.
const CACHED_BYTES: usize = if cfg!(test) { 32 * 1024 } else { 256 * 1024 };

impl Ends {
    /// Of `operands`, this rank's inputs. `contributions` is how many inputs all ranks have together.
    pub fn new(
        dtype: DataType,
        operator: Operator,
        operands: Vec<Operand>,
        outputs: Vec<*mut u8>,
        contributions: u32,
    ) -> Result<Ends> {
        let reducer = Reducer::new(dtype, operator, contributions)?;
        Ok(Ends { operands, outputs, reducer, dtype, operator })
    }

    /// A group of one: `count` positions are combined and rounded into the outputs, by this thread.
    ///
    /// # Safety
    /// Operands and outputs have `count` positions. An output is apart from every operand and every other
    /// output, or the same. Nobody writes the operands or touches the outputs meanwhile.
    pub unsafe fn combine(&self, count: usize) {
        let Some((&first, others)) = self.outputs.split_first() else { return };
        let element = self.reducer.element_size();
        let buffers = self.operands.len() + self.outputs.len();
        let part = (CACHED_BYTES / (buffers * element)).max(1).next_multiple_of(GRAIN);
        let mut operands = self.operands.clone();
        for start in (0..count).step_by(part) {
            let (count, at) = (part.min(count - start), start * element);
            let output = first.wrapping_add(at);
            // SAFETY: the caller's promise, of a part of the positions: this part of every operand is read
            // before it is written.
            unsafe {
                self.reducer.fold(&operands, output, Representation::Element, count);
                for other in others {
                    spread(output, &[other.wrapping_add(at)], count * element);
                }
            }
            for operand in &mut operands {
                operand.address = operand.address.wrapping_add(count * element);
            }
        }
    }

    /// The type of the accumulators, which the ranks combine.
    fn accumulator(&self) -> DataType {
        match self.operator {
            Operator::Custom(_) => self.dtype,
            _ => self.dtype.accumulator(),
        }
    }

    /// The ordinary reduction of the accumulators that is left of the call `checked`, wherever they are.
    pub fn rest(&self, checked: &Checked) -> Checked {
        let operator = match self.operator {
            Operator::Average | Operator::PreMulSum(_) => Operator::Sum,
            other => other,
        };
        Checked { dtype: self.accumulator(), operator: Some(operator), ..checked.clone() }
    }

    /// Of the call `checked` of a larger group, which lends a workspace of so many bytes. The operands are
    /// read when the call has its turn: those before it may still write them.
    pub fn around(mut self, checked: &Checked, lend: impl FnOnce(usize) -> Result<Lent>) -> Result<Wide> {
        let accumulator = self.accumulator();
        let (input_len, output_len) = (checked.input_len(), checked.output_len());
        let workspace = lend(input_len * accumulator.size())?;
        let is_final = accumulator == self.dtype && !matches!(self.operator, Operator::Average);
        let (result, alias) = match self.outputs.first() {
            // What the ordinary reduction stores are elements: the first output has them at once.
            Some(_) if is_final && output_len > 0 => (self.outputs.remove(0), None),
            _ if output_len > 0 => {
                let alias = checked.collective.in_place_alias(checked.rank);
                let result =
                    workspace.address().wrapping_offset(alias as isize * accumulator.size() as isize);
                (result, Some(alias))
            }
            _ => (workspace.address(), None),
        };
        let finished = 0;
        Ok(Wide { ends: self, input_len, workspace, result, alias, output_len, finished })
    }
}

/// This rank's inputs, as `operator` has them combined.
pub fn operands(operator: Operator, inputs: &[*const u8]) -> Vec<Operand> {
    let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
    let element = |&address| Operand { address, representation: Representation::Element, scale };
    inputs.iter().map(element).collect()
}

/// Combines `count` elements at each of `inputs`, in the canonical order, into `output`, by this thread and
/// without other ranks.
///
/// # Safety
/// Inputs and output are NULL where there are no elements, else valid for so many, in host memory. Nobody
/// writes the inputs or touches the output meanwhile.
pub unsafe fn reduce_local(
    inputs: &[*const u8],
    output: *mut u8,
    count: u64,
    dtype: DataType,
    operator: Operator,
) -> Result<()> {
    let Some(contributions) = u32::try_from(inputs.len()).ok().filter(|&inputs| inputs > 0) else {
        fail!(InvalidArgument, "{} inputs: there is at least one, and at most {}", inputs.len(), u32::MAX);
    };
    let bytes = checked::bytes("recvbuf", count, dtype.size() as u64, dtype)?;
    let overlaps = |input: &*const u8| (1..bytes).contains(&input.addr().abs_diff(output.addr()));
    if let Some(index) = inputs.iter().position(overlaps) {
        fail!(
            InvalidArgument,
            "sendbufs[{index}] and recvbuf overlap: each has {bytes} bytes. Give buffers that are apart, or the same one"
        );
    }
    let ends = Ends::new(dtype, operator, operands(operator, inputs), vec![output], contributions)?;
    // SAFETY: the caller's promise; the output is apart from each input, or the same.
    unsafe {
        match inputs {
            // As a group of one has it, the payload of a NaN too.
            &[input] if !matches!(operator, Operator::PreMulSum(_)) => spread(input, &[output], bytes),
            _ => ends.combine(count as usize),
        }
    }
    Ok(())
}

/// This rank's part of a reduction, before and after the ordinary one.
pub struct Wide {
    /// What it begins and ends with. Outputs that have the result already are no more among them.
    ends: Ends,
    input_len: usize,
    /// What the ordinary reduction reads.
    workspace: Lent,
    /// Where it stores: in place, or in the first output.
    result: *mut u8,
    alias: Option<i64>,
    output_len: usize,
    /// Positions of the outputs that have been written.
    finished: usize,
}

// SAFETY: operands and outputs are the caller's, promised to be usable from the library's threads until the
// operation ends; the result is one of those, or in the workspace.
unsafe impl Send for Wide {}

impl Wide {
    /// The ordinary reduction that is left to do.
    pub fn rest(&self, checked: &Checked) -> Checked {
        let (input, output) = (self.workspace.address().cast_const(), self.result);
        Checked { input, output, alias: self.alias, ..self.ends.rest(checked) }
    }

    /// The operation, for `plan` made of [`Wide::rest`].
    ///
    /// # Safety
    /// The operands, which hold as many elements as the call reads, and the outputs stay valid until the
    /// operation has ended or is abandoned.
    pub unsafe fn run(self, group: &Group, turn: &Turn, plan: Arc<Plan>) -> impl Operation + use<> {
        // SAFETY: the caller's promise; the workspace lives beside the run, as long as it does.
        unsafe {
            let operation = Run::new(group, turn, plan, self.workspace.address(), self.result);
            self.around(operation)
        }
    }

    /// The operation, when `operation` does what [`Wide::rest`] says.
    ///
    /// # Safety
    /// As [`Wide::run`].
    pub unsafe fn around<O: Operation>(mut self, operation: O) -> impl Operation + use<O> {
        let mut combination = self.combination();
        let first: First = Box::new(move |group| {
            let _away = combination.reducer.calls_program().then(|| group.endpoint().go_away());
            // SAFETY: the caller's promise; the workspace is the other closure's, which lives beside this one.
            unsafe { combination.go_on() }
        });
        // SAFETY: the caller's promise; the operation has stored the result.
        finishing(operation, Some(first), move || unsafe { self.finish_on() })
    }

    /// What is to be done first.
    fn combination(&mut self) -> Combination {
        let operands = std::mem::take(&mut self.ends.operands);
        let (reducer, to) = (self.ends.reducer, self.workspace.address());
        Combination { reducer, operands, to, len: self.input_len }
    }

    /// Rounds the next part of the result into the outputs that lack it. Whether that was the last.
    ///
    /// # Safety
    /// The outputs are valid, and the result is there.
    unsafe fn finish_on(&mut self) -> bool {
        let Ends { reducer, outputs, .. } = &self.ends;
        if outputs.is_empty() {
            return true;
        }
        let (element, accumulator) = (reducer.element_size(), reducer.accumulator_size());
        let (start, bytes) = (self.finished, accumulator + outputs.len() * element);
        let count = part_of(bytes).min(self.output_len - start);
        let address = self.result.wrapping_add(start * accumulator).cast_const();
        let operand = Operand { address, representation: Representation::Accumulator, scale: 1.0 };
        for output in outputs {
            let output = output.wrapping_add(start * element);
            // SAFETY: the caller's promise; an output holds as many elements as the result has positions. If
            // the result is an output, this one is that or apart, and of the same size.
            unsafe { reducer.fold(&[operand], output, Representation::Element, count) };
        }
        self.finished += count;
        self.finished == self.output_len
    }
}

/// What this rank's inputs come to: the rest of it.
struct Combination {
    reducer: Reducer,
    operands: Vec<Operand>,
    to: *mut u8,
    len: usize,
}

// SAFETY: the operands are the caller's, promised to be usable from the library's threads until the operation
// ends; the workspace is the operation's.
unsafe impl Send for Combination {}

impl Combination {
    /// Combines the next part. Whether that was the last. Each position is combined as in one go.
    ///
    /// # Safety
    /// The operands hold `len` elements, and `to` has room for as many accumulators.
    unsafe fn go_on(&mut self) -> bool {
        let (element, accumulator) = (self.reducer.element_size(), self.reducer.accumulator_size());
        let count = part_of(self.operands.len() * element + accumulator).min(self.len);
        // SAFETY: the caller's promise, of the first of what is left.
        unsafe { self.reducer.fold(&self.operands, self.to, Representation::Accumulator, count) };
        for operand in &mut self.operands {
            operand.address = operand.address.wrapping_add(count * element);
        }
        self.to = self.to.wrapping_add(count * accumulator);
        self.len -= count;
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::request::{Counts, Kind, Request};

    const COUNT: usize = 50_001;
    const BUFFERS: usize = 3;

    /// Elements whose sums are rounded.
    fn given(dtype: DataType, buffer: usize) -> Vec<u8> {
        let value = |index: usize| ((index * 37 + buffer * 53) % 97) as f32 / 7.0;
        let encode = |value: f32| match dtype {
            DataType::F32 => value.to_ne_bytes().to_vec(),
            _ => half::bf16::from_f32(value).to_ne_bytes().to_vec(),
        };
        (0..COUNT).flat_map(|index| encode(value(index))).collect()
    }

    #[test]
    fn buffers_are_combined_and_written_in_parts_with_the_same_bits() {
        let (element, accumulator) = (Representation::Element, Representation::Accumulator);
        for dtype in [DataType::F32, DataType::Bf16] {
            for operator in [Operator::Sum, Operator::Average, Operator::PreMulSum(0.3)] {
                let case = format!("{operator:?} of {}", dtype.name());
                let mut buffers: Vec<Vec<u8>> = (0..BUFFERS).map(|buffer| given(dtype, buffer)).collect();
                let pointers: Vec<*mut u8> = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect();
                let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
                let operand = |address, representation, scale| Operand { address, representation, scale };
                let operands: Vec<Operand> =
                    pointers.iter().map(|pointer| operand(pointer.cast_const(), element, scale)).collect();
                let contributions = 2 * BUFFERS as u32;
                let reducer = Reducer::new(dtype, operator, contributions).expect("a reduction");
                let in_one = |operands: &[Operand], to, size: usize| {
                    let mut out = vec![0u8; COUNT * size];
                    // SAFETY: operands and output have this many positions.
                    unsafe { reducer.fold(operands, out.as_mut_ptr(), to, COUNT) };
                    out
                };
                let combined = in_one(&operands, accumulator, reducer.accumulator_size());
                let result = [operand(combined.as_ptr(), accumulator, 1.0)];
                let rounded = in_one(&result, element, reducer.element_size());
                let request = Request {
                    kind: Kind::Allreduce,
                    input: pointers[0].cast_const(),
                    output: pointers[0],
                    counts: Counts::Uniform(COUNT as u64),
                    dtype,
                    operator,
                    root: 0,
                };
                let checked = Checked::new(&request, 0, 2).expect("a sound call");
                let ends = Ends::new(dtype, operator, operands, pointers, contributions).expect("room");
                let mut wide = ends.around(&checked, Lent::alone).expect("room");
                let mut combination = wide.combination();
                let mut parts = [1; 2];
                // SAFETY: the buffers and the workspace have this many positions.
                while !unsafe { combination.go_on() } {
                    parts[0] += 1;
                }
                // SAFETY: as above; it has been written.
                let found = unsafe { std::slice::from_raw_parts(wide.workspace.address(), combined.len()) };
                assert!(found == combined, "{case}");
                // What the reduction among the ranks would store: in place, or in the first output.
                let stored = if wide.alias.is_some() { &combined } else { &rounded };
                // SAFETY: both have so many bytes, and they are apart.
                unsafe { wide.result.copy_from_nonoverlapping(stored.as_ptr(), stored.len()) };
                // SAFETY: as above.
                while !unsafe { wide.finish_on() } {
                    parts[1] += 1;
                }
                assert!(buffers.iter().all(|buffer| *buffer == rounded), "{case}");
                assert!(parts.iter().all(|&parts| parts > 5), "{case}: {parts:?}");
            }
        }
    }

    /// Where the operands of a group of one are, and its outputs: indices of buffers.
    const PLACES: [(&[usize], &[usize]); 8] = [
        (&[0], &[0]),
        (&[0], &[1]),
        (&[0, 1], &[0, 1]),
        (&[0, 1, 2], &[3]),
        (&[0, 1, 2, 3], &[2]),
        (&[0, 1, 0, 2, 1], &[1, 3, 1, 0]),
        (&[0, 1, 2, 3, 0, 1, 2, 3, 0], &[0, 1, 2, 3]),
        (&[0, 1], &[]),
    ];

    /// However few positions of all of them the cache holds.
    #[test]
    fn any_number_of_inputs_is_combined() {
        const INPUTS: usize = 2 * CACHED_BYTES / size_of::<f64>();
        let (inputs, mut output) = (vec![1.0f64; INPUTS], 0.0f64);
        let addresses: Vec<*const u8> = inputs.iter().map(|input| (&raw const *input).cast()).collect();
        // SAFETY: each is an element, and the output is apart.
        unsafe { reduce_local(&addresses, (&raw mut output).cast(), 1, DataType::F64, Operator::Sum) }
            .expect("a reduction");
        assert_eq!(output, INPUTS as f64);
    }

    #[test]
    fn one_input_is_the_result_bit_for_bit() {
        // NaNs of all kinds among them.
        let input: Vec<u32> =
            (0..20_003u32).map(|at| at.wrapping_mul(0x9e37_79b9)).chain([0xffc1_2345]).collect();
        for operator in [Operator::Sum, Operator::Average, Operator::Max] {
            for dtype in [DataType::F32, DataType::Bf16, DataType::F8E5M2] {
                let mut output = vec![0u32; input.len()];
                let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
                let count = (input.len() * 4 / dtype.size()) as u64;
                // SAFETY: both have so many elements, and are apart.
                unsafe { reduce_local(&[from], to, count, dtype, operator) }.expect("a reduction");
                assert!(output == input, "{operator:?} of {}", dtype.name());
            }
        }
    }

    /// Which result is what: through accumulators, which are rounded when all are combined.
    #[test]
    fn a_group_of_one_combines_in_place_and_apart_with_the_same_bits() {
        const POSITIONS: usize = 20_003;
        let operators = [
            Operator::Sum,
            Operator::Product,
            Operator::Min,
            Operator::Max,
            Operator::Average,
            Operator::PreMulSum(3.0),
            Operator::BitAnd,
            Operator::BitOr,
            Operator::BitXor,
        ];
        let cases = DataType::ALL.into_iter().flat_map(|dtype| operators.map(|operator| (dtype, operator)));
        for (dtype, operator) in cases {
            for (from, to) in PLACES {
                let contributions = from.len() as u32;
                // Bitwise operators are for integers.
                let Ok(reducer) = Reducer::new(dtype, operator, contributions) else { continue };
                let case = format!("{operator:?} of {} from {from:?} to {to:?}", dtype.name());
                // Any bits are elements, NaNs too.
                let value = |buffer: usize, at: usize| ((at * 131 + buffer * 89) ^ (at >> 7)) as u8;
                let bytes = POSITIONS * dtype.size();
                let fill = |buffer| (0..bytes).map(|at| value(buffer, at)).collect::<Vec<u8>>();
                let mut buffers: Vec<Vec<u8>> = (0..4).map(fill).collect();
                let mut due = buffers.clone();
                let inputs: Vec<*const u8> = from.iter().map(|&index| due[index].as_ptr()).collect();
                let mut combined = vec![0u8; POSITIONS * reducer.accumulator_size()];
                let mut rounded = vec![0u8; bytes];
                let all = operands(operator, &inputs);
                let address = combined.as_mut_ptr();
                let accumulators = Representation::Accumulator;
                let one = Operand { address, representation: accumulators, scale: 1.0 };
                // SAFETY: all have this many positions, and are apart.
                unsafe {
                    reducer.fold(&all, address, accumulators, POSITIONS);
                    reducer.fold(&[one], rounded.as_mut_ptr(), Representation::Element, POSITIONS);
                }
                to.iter().for_each(|&index| due[index].clone_from(&rounded));
                let pointers: Vec<*mut u8> = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect();
                let inputs: Vec<*const u8> = from.iter().map(|&index| pointers[index].cast_const()).collect();
                let outputs = to.iter().map(|&index| pointers[index]).collect();
                let all = operands(operator, &inputs);
                let ends = Ends::new(dtype, operator, all, outputs, contributions).expect("a reduction");
                // SAFETY: all have this many positions; any two are apart or the same.
                unsafe { ends.combine(POSITIONS) };
                assert!(buffers == due, "{case}");
            }
        }
    }

    #[test]
    fn what_overlaps_in_part_is_refused() {
        let mut memory = [1.0f32, 2.0, 4.0, 8.0, 16.0, 32.0];
        let start = memory.as_mut_ptr();
        let at = |index: usize| start.wrapping_add(index).cast::<u8>();
        let inputs = [at(0).cast_const(), at(2).cast_const()];
        let reduce = |inputs: &[*const u8], output| {
            // SAFETY: all is in the array; what is refused touches nothing.
            unsafe { reduce_local(inputs, at(output), 2, DataType::F32, Operator::Sum) }
        };
        for (output, named) in [(1, 0), (3, 1)] {
            let error = reduce(&inputs, output).expect_err("it overlaps");
            let text = format!("sendbufs[{named}] and recvbuf overlap: each has 8 bytes");
            assert!(error.text().starts_with(&text), "{error}");
        }
        assert!(reduce(&[], 4).is_err());
        reduce(&inputs, 4).expect("they are apart");
        reduce(&inputs, 2).expect("one is the output");
        assert_eq!(memory, [1.0, 2.0, 5.0, 10.0, 5.0, 10.0]);
    }
}
