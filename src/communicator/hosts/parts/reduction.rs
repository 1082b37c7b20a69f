//! What the reductions share.

use super::super::{Composed, between};
use super::Parts;
use crate::collective::checked::Checked;
use crate::collective::request::{Kind, Request};
use crate::cuda::driver::least_limit;
use crate::cuda::exchange;
use crate::cuda::local::{Fold, Operand};
use crate::error::Result;
use crate::reduce::{DataType, Operator, Representation};

/// How a reduction's elements become accumulators, and these elements again.
pub(super) struct Reduction {
    dtype: DataType,
    operator: Operator,
    ranks: u32,
    /// Bytes of an element.
    pub(super) element: u64,
    /// Bytes of an accumulator.
    pub(super) accumulator: u64,
    /// Whether inputs are not the accumulators that they count as.
    pub(super) widens: bool,
    /// Whether something is left to do with what all ranks made.
    pub(super) finishes: bool,
}

impl Reduction {
    pub(super) fn new(checked: &Checked, operator: Operator, ranks: u32) -> Reduction {
        let (dtype, accumulator) = (checked.dtype, checked.dtype.accumulator());
        let short = accumulator != dtype;
        Reduction {
            dtype,
            operator,
            ranks,
            element: dtype.size() as u64,
            accumulator: accumulator.size() as u64,
            widens: short || matches!(operator, Operator::PreMulSum(_)),
            finishes: short || operator == Operator::Average,
        }
    }

    /// A collective of accumulators.
    pub(super) fn job(
        &self,
        parts: &Parts<'_>,
        kind: Kind,
        input: u64,
        output: u64,
        count: u64,
    ) -> exchange::Job {
        parts.job(kind, input, output, count, self.dtype.accumulator(), between(self.operator))
    }

    pub(super) fn request(
        &self,
        call: &Composed,
        kind: Kind,
        input: u64,
        output: u64,
        count: u64,
    ) -> Request {
        call.request(kind, input, output, count, self.dtype.accumulator(), between(self.operator))
    }

    /// Makes accumulators of elements.
    ///
    /// # Safety
    /// The device has both.
    pub(super) unsafe fn widen(&self, parts: &Parts<'_>, from: u64, to: u64, count: u64) -> Result<()> {
        let scale = if let Operator::PreMulSum(scale) = self.operator { scale } else { 1.0 };
        let operand = Operand { address: from, representation: Representation::Element, scale };
        // SAFETY: the caller's promise.
        unsafe { self.fold(parts, operand, to, Representation::Accumulator, count) }
    }

    /// Makes elements of accumulators: the operator's last step.
    ///
    /// # Safety
    /// The device has both.
    pub(super) unsafe fn finish(&self, parts: &Parts<'_>, from: u64, to: u64, count: u64) -> Result<()> {
        let operand = Operand { address: from, representation: Representation::Accumulator, scale: 1.0 };
        // SAFETY: the caller's promise.
        unsafe { self.fold(parts, operand, to, Representation::Element, count) }
    }

    unsafe fn fold(
        &self,
        parts: &Parts<'_>,
        operand: Operand,
        out: u64,
        representation: Representation,
        count: u64,
    ) -> Result<()> {
        let stream = parts.series.stream();
        let fold = Fold {
            stream,
            dtype: self.dtype,
            operator: self.operator,
            ranks: self.ranks,
            operands: &[operand],
            out,
            representation,
            // It fits the workspace.
            count: count as usize,
            max_blocks: least_limit([parts.call.max_blocks, parts.call.context.max_blocks()]),
        };
        // SAFETY: the caller's promise.
        unsafe { parts.call.hosts.folds().fold(stream.devices(), &fold) }
    }
}
