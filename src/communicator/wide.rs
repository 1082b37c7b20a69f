//! Reductions that begin or end with more than one buffer of a rank, or scale what they read: the inputs of
//! this rank are combined into accumulators first, an ordinary reduction of those follows, and the result is
//! rounded once into each output.

use std::sync::Arc;

use super::finishing::{finishing, part_of};
use crate::collective::checked::Checked;
use crate::engine::executor::{Plan, Run, Workspace};
use crate::engine::group::{Group, Turn};
use crate::engine::observed::First;
use crate::engine::operation::Operation;
use crate::error::Result;
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// This rank's part of a reduction, before and after the ordinary one.
pub struct Wide {
    operands: Vec<Operand>,
    input_len: usize,
    input: Workspace,
    output: Workspace,
    last: Reducer,
    outputs: Vec<*mut u8>,
    output_len: usize,
    /// Positions of the outputs that have been written.
    finished: usize,
    accumulator: DataType,
    operator: Operator,
}

// SAFETY: operands and outputs are the caller's, promised to be usable from the library's threads until the
// operation ends.
unsafe impl Send for Wide {}

impl Wide {
    /// Of `operands`, this rank's inputs for the call `checked`. They are read when the call has its turn:
    /// those before it may still write them. `contributions` is how many inputs all ranks have together.
    pub fn new(
        checked: &Checked,
        operator: Operator,
        operands: Vec<Operand>,
        outputs: Vec<*mut u8>,
        contributions: u32,
    ) -> Result<Wide> {
        let last = Reducer::new(checked.dtype, operator, contributions)?;
        let accumulator = match operator {
            Operator::Custom(_) => checked.dtype,
            _ => checked.dtype.accumulator(),
        };
        let (input_len, output_len) = (checked.input_len(), checked.output_len());
        let input = Workspace::new(input_len * accumulator.size())?;
        let output = Workspace::new(output_len * accumulator.size())?;
        let finished = 0;
        Ok(Wide {
            operands,
            input_len,
            input,
            output,
            last,
            outputs,
            output_len,
            finished,
            accumulator,
            operator,
        })
    }

    /// The ordinary reduction that is left to do.
    pub fn rest(&self, checked: &Checked) -> Checked {
        let operator = match self.operator {
            Operator::Average | Operator::PreMulSum(_) => Operator::Sum,
            other => other,
        };
        Checked {
            input: self.input.address(),
            output: self.output.address(),
            alias: None,
            dtype: self.accumulator,
            operator: Some(operator),
            ..checked.clone()
        }
    }

    /// The operation, for `plan` made of [`Wide::rest`].
    ///
    /// # Safety
    /// The operands, which hold as many elements as the call reads, and the outputs stay valid until the
    /// operation has ended or is abandoned.
    pub unsafe fn run(self, group: &Group, turn: &Turn, plan: Arc<Plan>) -> impl Operation + use<> {
        // SAFETY: the caller's promise; the workspaces live beside the run, as long as it does.
        unsafe {
            let operation = Run::new(group, turn, plan, self.input.address(), self.output.address());
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
        // SAFETY: the caller's promise; the operation has filled the output workspace.
        finishing(operation, Some(first), move || unsafe { self.finish_on(self.output.address()) })
    }

    /// What is to be done first.
    fn combination(&mut self) -> Combination {
        let operands = std::mem::take(&mut self.operands);
        Combination { reducer: self.last, operands, to: self.input.address(), len: self.input_len }
    }

    /// Rounds the next part of the result into the outputs. Whether that was the last.
    ///
    /// # Safety
    /// The outputs are valid, and `from` (the output workspace, or the input one in a group of one) holds the
    /// result.
    unsafe fn finish_on(&mut self, from: *mut u8) -> bool {
        let (element, accumulator) = (self.last.element_size(), self.last.accumulator_size());
        let (start, bytes) = (self.finished, accumulator + self.outputs.len() * element);
        let count = part_of(bytes).min(self.output_len - start);
        let address = from.wrapping_add(start * accumulator).cast_const();
        let operand = Operand { address, representation: Representation::Accumulator, scale: 1.0 };
        for output in &self.outputs {
            let output = output.wrapping_add(start * element);
            // SAFETY: the caller's promise; an output holds as many elements as the workspace accumulators.
            unsafe { self.last.fold(&[operand], output, Representation::Element, count) };
        }
        self.finished += count;
        self.finished == self.output_len
    }

    /// A group of one: the result is this rank's combination.
    ///
    /// # Safety
    /// As [`Wide::run`], until this returns.
    pub unsafe fn alone(mut self) {
        let mut combination = self.combination();
        // SAFETY: the caller's promise; in a group of one input and output have the same length.
        unsafe {
            while !combination.go_on() {}
            while !self.finish_on(self.input.address()) {}
        }
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
                let mut wide =
                    Wide::new(&checked, operator, operands, pointers, contributions).expect("room");
                let mut combination = wide.combination();
                let mut parts = [1; 2];
                // SAFETY: the buffers and the workspaces have this many positions.
                while !unsafe { combination.go_on() } {
                    parts[0] += 1;
                }
                // SAFETY: as above; it has been written.
                let found = unsafe { std::slice::from_raw_parts(wide.input.address(), combined.len()) };
                assert!(found == combined, "{case}");
                let from = wide.input.address();
                // SAFETY: as above.
                while !unsafe { wide.finish_on(from) } {
                    parts[1] += 1;
                }
                assert!(buffers.iter().all(|buffer| *buffer == rounded), "{case}");
                assert!(parts.iter().all(|&parts| parts > 5), "{case}: {parts:?}");
            }
        }
    }
}
