//! Reductions that begin or end with more than one buffer of a rank, or scale what they read: the inputs of this rank
//! are combined into accumulators first, an ordinary reduction of those follows, and the result is rounded once into
//! each output.

use std::sync::Arc;

use super::finishing::finishing;
use crate::collective::checked::Checked;
use crate::engine::executor::{Plan, Run, Workspace};
use crate::engine::group::{Group, Turn};
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
    accumulator: DataType,
    operator: Operator,
}

// SAFETY: operands and outputs are the caller's, promised to be usable from the library's threads until the operation ends.
unsafe impl Send for Wide {}

impl Wide {
    /// Of `operands`, this rank's inputs for the call `checked`. They are read when the call has its turn: those before it may still
    /// write them. `contributions` is how many inputs all ranks have together.
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
        Ok(Wide { operands, input_len, input, output, last, outputs, output_len, accumulator, operator })
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
    /// The operands, which hold as many elements as the call reads, and the outputs stay valid until the operation has ended or is
    /// abandoned.
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
        let combination = self.combination();
        // SAFETY: the caller's promise; the workspace is the other closure's, which lives beside this one.
        let first = Box::new(move || unsafe { combination.make() });
        // SAFETY: the caller's promise; the operation has filled the output workspace.
        finishing(operation, Some(first), move || unsafe { self.finish(&self.output) })
    }

    /// What is to be done first.
    fn combination(&mut self) -> Combination {
        let operands = std::mem::take(&mut self.operands);
        Combination { reducer: self.last, operands, to: self.input.address(), len: self.input_len }
    }

    /// Rounds the result into the outputs.
    ///
    /// # Safety
    /// The outputs are valid, and `from` (the output workspace, or the input one in a group of one) holds the result.
    unsafe fn finish(&self, from: &Workspace) {
        let address = from.address().cast_const();
        let operand = Operand { address, representation: Representation::Accumulator, scale: 1.0 };
        for &output in &self.outputs {
            // SAFETY: the caller's promise; an output holds as many elements as the workspace accumulators.
            unsafe { self.last.fold(&[operand], output, Representation::Element, self.output_len) };
        }
    }

    /// A group of one: the result is this rank's combination.
    ///
    /// # Safety
    /// As [`Wide::run`], until this returns.
    pub unsafe fn alone(mut self) {
        // SAFETY: the caller's promise; in a group of one input and output have the same length.
        unsafe {
            self.combination().make();
            self.finish(&self.input);
        }
    }
}

/// What this rank's inputs come to.
struct Combination {
    reducer: Reducer,
    operands: Vec<Operand>,
    to: *mut u8,
    len: usize,
}

// SAFETY: the operands are the caller's, promised to be usable from the library's threads until the operation ends; the workspace is
// the operation's.
unsafe impl Send for Combination {}

impl Combination {
    /// # Safety
    /// The operands hold `len` elements, and `to` has room for as many accumulators.
    unsafe fn make(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.reducer.fold(&self.operands, self.to, Representation::Accumulator, self.len) };
    }
}
