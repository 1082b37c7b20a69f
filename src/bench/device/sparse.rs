//! Sparse allreduce of tensors in device memory: rows of an index each, as the gradients of an embedding.

use super::memory::PIECE;
use super::rank::{Outcome, Rank};
use crate::bench::case::Case;
use crate::bench::measure::Sample;
use crate::bench::seat::{barrier, total};
use crate::bench::sparse::{ROW, Rows};
use crate::bench::values::{decode, encode};
use crate::communicator::sparse::RawTensor;
use crate::communicator::{Call, Context};
use crate::cuda::memory::DeviceBuffer;
use crate::error::{Result, fail};
use crate::reduce::Operator;

/// A rank's tensor, and room for the result.
struct Tensors {
    indices: DeviceBuffer,
    values: DeviceBuffer,
    all_indices: DeviceBuffer,
    all_values: DeviceBuffer,
}

impl Rank<'_> {
    /// As [`Rank::measure`]: a call is over when its result lies in the memory of the device.
    pub(super) fn measure_sparse(&mut self, case: &Case, subject: usize, check: bool) -> Result<Outcome> {
        let Some(context) = self.native(case, subject).cloned() else {
            return Ok(Outcome::Refused("NCCL's ABI has no sparse allreduce".to_owned()));
        };
        let rows = Rows::of(case);
        let tensors = self.tensors(rows)?;
        barrier(self.control(), None)?;
        let first = self.sum_sparse(&context, rows, &tensors);
        if let Err(refusal) = self.agree(first)? {
            return Ok(Outcome::Refused(refusal));
        }
        let errors = if check { Some(self.check_sparse(rows, &tensors)?) } else { None };
        let sample = self.time_by_clock(&mut || self.sum_sparse(&context, rows, &tensors))?;
        Ok(Outcome::Measured(Sample { errors, ..sample }))
    }

    fn tensors(&mut self, rows: Rows) -> Result<Tensors> {
        let (rank, devices, device) = (self.rank(), self.devices().clone(), self.stream().device());
        let buffer = |bytes: u64| DeviceBuffer::new(&devices, device, bytes as usize);
        let row = rows.row() as u64;
        let tensors = Tensors {
            indices: buffer(rows.count * 8)?,
            values: buffer(rows.count * row)?,
            all_indices: buffer(rows.all() * 8)?,
            all_values: buffer(rows.all() * row)?,
        };
        let held = rows.of_rank(rank);
        // Backwards: nobody promises an order.
        let row_at = |place: u64| held.end - 1 - place;
        let indices = |offset: usize, piece: &mut [u8]| {
            for (place, number) in (offset as u64 / 8..).zip(piece.chunks_exact_mut(8)) {
                number.copy_from_slice(&(row_at(place) as i64).to_ne_bytes());
            }
        };
        let values = |offset: usize, piece: &mut [u8]| {
            let element = rows.dtype.size();
            for (at, value) in ((offset / element) as u64..).zip(piece.chunks_exact_mut(element)) {
                encode(rows.dtype, Rows::value(rank, row_at(at / ROW), at % ROW), value);
            }
        };
        let (buffers, stream, deadline) = self.buffers();
        // SAFETY: buffers of ours, so long; nobody else knows them.
        unsafe {
            let bytes = tensors.indices.bytes();
            buffers.fill(stream, tensors.indices.address(), bytes, indices, deadline)?;
            buffers.fill(stream, tensors.values.address(), tensors.values.bytes(), values, deadline)?;
            // Memory that is allocated again may hold an earlier result.
            for buffer in [&tensors.all_indices, &tensors.all_values] {
                let (bytes, rubbish) = (buffer.bytes(), |_, piece: &mut [u8]| piece.fill(0xa5));
                buffers.fill(stream, buffer.address(), bytes, rubbish, deadline)?;
            }
        }
        Ok(tensors)
    }

    fn sum_sparse(&self, context: &Context, rows: Rows, tensors: &Tensors) -> Result<()> {
        let handle = self.stream().handle();
        let input = RawTensor {
            indices: std::ptr::without_provenance(tensors.indices.address() as usize),
            values: std::ptr::without_provenance(tensors.values.address() as usize),
            nnz: rows.count,
            dims: 1,
            block: ROW,
            dtype: rows.dtype,
        };
        let call = Call { stream: Some(handle), ..Call::default() };
        // SAFETY: the tensors are as long as their shape says, and outlive what the stream is given, for
        // which this waits.
        let result = unsafe { context.run_sparse(&input, Operator::Sum, &call) }?;
        if result.nnz() != rows.all() {
            fail!(Internal, "the sum has {} rows, but {} are due", result.nnz(), rows.all());
        }
        let indices = std::ptr::without_provenance_mut(tensors.all_indices.address() as usize);
        let values = std::ptr::without_provenance_mut(tensors.all_values.address() as usize);
        // SAFETY: there is room for as many rows.
        unsafe { result.copy(indices, values, Some(handle)) }?;
        self.stream().synchronize(self.deadline())
    }

    /// How many indices and values are wrong on all ranks.
    fn check_sparse(&mut self, rows: Rows, tensors: &Tensors) -> Result<u64> {
        let mut wrong = 0;
        let (buffers, stream, deadline) = self.buffers();
        let element = rows.dtype.size();
        let indices = tensors.all_indices.bytes();
        for offset in (0..indices).step_by(PIECE) {
            let (at, bytes) = (tensors.all_indices.address() + offset as u64, PIECE.min(indices - offset));
            // SAFETY: ours, so long, and done.
            let found = unsafe { buffers.read(stream, at, bytes, deadline) }?;
            let due = (offset as u64 / 8..).map(|row| (row as i64).to_ne_bytes());
            wrong += found.chunks_exact(8).zip(due).filter(|(found, due)| found != due).count() as u64;
        }
        let values = tensors.all_values.bytes();
        for offset in (0..values).step_by(PIECE) {
            let (at, bytes) = (tensors.all_values.address() + offset as u64, PIECE.min(values - offset));
            // SAFETY: as above.
            let found = unsafe { buffers.read(stream, at, bytes, deadline) }?;
            let due = ((offset / element) as u64..).map(|at| rows.sum(at / ROW, at % ROW) as f64);
            let found = found.chunks_exact(element).map(|value| decode(rows.dtype, value));
            wrong += found.zip(due).filter(|(found, due)| found != due).count() as u64;
        }
        total(self.control(), wrong)
    }
}
