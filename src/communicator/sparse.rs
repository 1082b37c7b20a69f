//! Sparse allreduce: tensors in coordinate form, whose elements differ from rank to rank.
//!
//! Each rank combines its own duplicates, all gather everybody's elements, and each combines them. Partial results
//! travel as accumulators, so short floats are rounded once. An element's operands are combined in the canonical tree
//! over all ranks, with the ranks that lack it left out.

mod run;
mod tensor;

use std::sync::{Arc, OnceLock};

use self::run::{Counting, Part, SparseRun};
use self::tensor::{Elements, Gathered, Shape, Tensor};
use super::{Call, Completion, Context, Work};
use crate::engine::group::Group;
use crate::engine::wire::Class;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::{Kind, Signature};

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

/// The result of a sparse allreduce: a tensor that is sorted by its indices, each of which occurs once. It is there when
/// the operation has completed well; before that, and after a failure, it has no elements. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sparse {
    dims: u32,
    tensor: Arc<OnceLock<Tensor>>,
}

impl Sparse {
    /// Coordinates of an index.
    pub fn dims(&self) -> u32 {
        self.dims
    }

    /// How many elements.
    pub fn nnz(&self) -> u64 {
        self.tensor.get().map_or(0, |tensor| tensor.nnz as u64)
    }

    /// `dims` × `nnz` numbers, laid out as in [`Input::indices`].
    pub fn indices(&self) -> &[i64] {
        self.tensor.get().map_or(&[], |tensor| &tensor.indices)
    }

    /// `nnz` × `block` values, as bytes, aligned to 8.
    pub fn values(&self) -> &[u8] {
        self.tensor.get().map_or(&[], Tensor::values)
    }
}

impl Context {
    /// Combines the tensors of all ranks, each of which gets the same result. Collective; runs to completion in this
    /// thread. `operator` is sum, product, min, max or average, the same on every rank.
    pub fn sparse_allreduce(&self, input: &Input<'_>, operator: Operator, call: &Call) -> Result<Sparse> {
        let (result, step) = self.sparse_step(input, operator, call)?;
        if let Some(Step { group, tag, signature, part, counting }) = step {
            let (class, make) = (part.class, |turn: &_| SparseRun::new(group, turn, part, counting));
            group.run(class, tag, signature, call.timeout, make)?;
        }
        Ok(result)
    }

    /// Starts the same and returns; the library moves it when nobody waits. The input is read before this returns.
    /// The result is there when the work has completed.
    pub fn start_sparse_allreduce(
        &self,
        input: &Input<'_>,
        operator: Operator,
        call: &Call,
    ) -> Result<(Work, Sparse)> {
        let (result, step) = self.sparse_step(input, operator, call)?;
        let Some(Step { group, tag, signature, part, counting }) = step else {
            return Ok((Work::ended(Ok(Completion::default())), result));
        };
        let (class, make) = (part.class, |turn: &_| SparseRun::new(group, turn, part, counting));
        let running = group.start(class, tag, signature, call.timeout, make)?;
        Ok((Work::running(running), result))
    }

    /// Checks a call, and combines this rank's duplicates. What is left to do, if there are other ranks.
    fn sparse_step(
        &self,
        input: &Input<'_>,
        operator: Operator,
        call: &Call,
    ) -> Result<(Sparse, Option<Step<'_>>)> {
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
        let mine = Elements::coalesce(input, &shape, &reducer)?;
        let result = Sparse { dims: input.dims, tensor: Arc::default() };
        let Some(group) = self.members() else {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let mut all = Gathered::new(&shape, &[mine.nnz as u64])?;
            all.put(0, &mine);
            let _ = result.tensor.set(all.combine(&reducer)?);
            return Ok((result, None));
        };
        let (class, tag) = match call.tag {
            Some(tag) => (Class::Tagged, tag),
            None => (Class::Ordered, 0),
        };
        let signature = Signature {
            kind: Kind::SparseAllreduce,
            dtype: input.dtype,
            operator: operator.number(),
            algorithm: 0,
            root: input.dims,
            count: input.block,
            // Where a rank's tensor lies is its own affair.
            device: false,
        };
        let into = result.tensor.clone();
        let part = Part { shape, reducer, seat: self.seat(), class, mine, into };
        let counting = Counting::new(group, &part, self.plans())?;
        Ok((result, Some(Step { group, tag, signature, part, counting })))
    }
}

/// A call that takes other ranks.
struct Step<'a> {
    group: &'a Arc<Group>,
    tag: u64,
    signature: Signature,
    part: Part,
    counting: Counting,
}
