//! Sparse allreduce: tensors in coordinate form.

use crate::communicator::{Call, Context};
use crate::error::Result;
use crate::reduce::{DataType, Operator};

/// This rank's tensor.
pub struct Input<'a> {
    /// dims × nnz, coordinate by coordinate.
    pub indices: &'a [i64],
    /// nnz × block values, as bytes.
    pub values: &'a [u8],
    /// Elements.
    pub nnz: u64,
    /// Coordinates of an index.
    pub dims: u32,
    /// Values of an element.
    pub block: u64,
    /// Of which type.
    pub dtype: DataType,
}

/// The combined tensor.
pub struct Sparse {}

impl Sparse {
    /// Coordinates of an index.
    pub fn dims(&self) -> u32 {
        todo!()
    }
    /// Elements.
    pub fn nnz(&self) -> u64 {
        todo!()
    }
    /// dims × nnz.
    pub fn indices(&self) -> &[i64] {
        todo!()
    }
    /// nnz × block, as bytes.
    pub fn values(&self) -> &[u8] {
        todo!()
    }
}

impl Context {
    /// Combines the tensors of all ranks.
    pub fn sparse_allreduce(&self, input: &Input<'_>, operator: Operator, call: &Call) -> Result<Sparse> {
        let _ = (input, operator, call);
        todo!()
    }
}
