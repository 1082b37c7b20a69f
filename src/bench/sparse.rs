//! Sparse allreduce: rows of an index each, as the gradients of an embedding. On host memory here.

use std::ops::Range;

use super::case::Case;
use super::measure::{Pace, Sample};
use super::seat::{barrier, total};
use super::values::{decode, encode};
use crate::communicator::sparse::{Input, Sparse};
use crate::communicator::{Call, Context};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// Values of a row.
pub(super) const ROW: u64 = 64;

/// The tensors of a case.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) dtype: DataType,
    size: u32,
    /// Of each rank.
    pub(super) count: u64,
}

impl Rows {
    pub(super) fn of(case: &Case) -> Rows {
        Rows { dtype: case.dtype, size: case.size, count: case.count() / ROW }
    }

    /// Bytes of one.
    pub(super) fn row(&self) -> usize {
        ROW as usize * self.dtype.size()
    }

    /// The rows that a rank has: the later half is also the next rank's.
    pub(super) fn of_rank(&self, rank: u32) -> Range<u64> {
        let first = u64::from(rank) * self.count.div_ceil(2);
        first..first + self.count
    }

    /// How many different rows all ranks have: a range without gaps.
    pub(super) fn all(&self) -> u64 {
        self.of_rank(self.size - 1).end
    }

    pub(super) fn value(rank: u32, row: u64, column: u64) -> i64 {
        ((row * 7 + column * 3 + u64::from(rank)) % 4) as i64
    }

    pub(super) fn sum(&self, row: u64, column: u64) -> i64 {
        let having = (0..self.size).filter(|&rank| self.of_rank(rank).contains(&row));
        having.map(|rank| Rows::value(rank, row, column)).sum()
    }

    /// The tensor of `rank`, backwards: nobody promises an order.
    fn tensor(&self, rank: u32) -> (Vec<i64>, Vec<u8>) {
        let rows = self.of_rank(rank).rev();
        let mut values = vec![0; self.count as usize * self.row()];
        for (row, bytes) in rows.clone().zip(values.chunks_exact_mut(self.row())) {
            for (column, value) in (0..).zip(bytes.chunks_exact_mut(self.dtype.size())) {
                encode(self.dtype, Rows::value(rank, row, column), value);
            }
        }
        (rows.map(|row| row as i64).collect(), values)
    }

    /// How many indices and values are wrong.
    fn wrong(&self, result: &Sparse) -> u64 {
        let indices = (0..).zip(result.indices()).filter(|(row, found)| row != *found).count();
        let values = (0..).zip(result.values().chunks_exact(self.dtype.size())).filter(|(at, found)| {
            let due = self.sum(at / ROW, at % ROW) as f64;
            decode(self.dtype, found) != due
        });
        (indices + values.count()) as u64
    }
}

/// Measures one case. Every rank calls this with the same.
pub(super) fn measure(case: &Case, context: &Context, pace: &Pace, check: bool) -> Result<Sample> {
    let rows = Rows::of(case);
    let (indices, values) = rows.tensor(context.rank());
    let (nnz, dims, block, dtype) = (rows.count, 1, ROW, rows.dtype);
    let input = Input { indices: &indices, values: &values, nnz, dims, block, dtype };
    let sum = || context.sparse_allreduce(&input, Operator::Sum, &Call::default());
    barrier(context, None)?;
    let mut errors = None;
    if check {
        errors = Some(total(context, rows.wrong(&sum()?))?);
    }
    let sample = pace.time(context, || {
        let found = sum()?.nnz();
        if found != rows.all() {
            fail!(Internal, "the sum has {found} rows, but {} are due", rows.all());
        }
        Ok(())
    })?;
    Ok(Sample { errors, ..sample })
}
