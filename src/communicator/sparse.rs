//! Sparse allreduce: tensors in coordinate form, whose elements differ from rank to rank.
//!
//! Each rank combines its own duplicates, all gather everybody's elements, and each merges them: they come
//! sorted, and what is neighbours on all ranks that have it is combined in one go. From three ranks on, where
//! there is much to merge, each rank gets, merges and gives to all a part of the indices (shards.rs). Partial
//! results travel as accumulators, so short floats are rounded once. An element's operands are combined in
//! the canonical tree over all ranks, with the ranks that lack it left out. What a rank does by itself in
//! that, sorting, packing and merging, stops in the middle when it takes long (pace.rs): whoever moves the
//! call has other things to see to.
//!
//! A tensor in device memory is loaded into pinned memory in the order of its stream, and is one like any
//! other from there on. How many elements the result has is known on the host, when it is there: then the
//! caller has room for it on the device, and [`Sparse::copy`] brings it there.

mod memory;
mod merge;
mod order;
mod pace;
mod pieces;
mod run;
mod shards;
mod tensor;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock, Weak};

pub(super) use self::memory::Pool;
use self::merge::combined;
use self::order::Order;
use self::pace::{Pace, at_once};
use self::run::{Counting, Part, Source, SparseRun};
use self::tensor::{Gathered, Shape, Tensor};
use super::calls::{calling_collective, class_of, lists_by_messages};
use super::context::{DEFAULT_TIMEOUT, Membership};
use super::survey::Spans;
use super::{Call, Completion, Context, Work};
use crate::cuda::context::Devices;
use crate::cuda::driver::{Location, Memory, StreamHandle};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::endpoint::Endpoint;
use crate::engine::group::{Group, Turn};
use crate::engine::joint::{Alone, Team};
use crate::engine::staged::{self, Load, Place};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Reducer};
use crate::signature::{Kind, Signature};

/// This rank's tensor in host memory: `nnz` elements, in any order, the same index several times if need be.
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

impl Input<'_> {
    fn tensor(&self) -> Result<RawTensor> {
        let Input { indices, values, nnz, dims, block, dtype } = *self;
        let raw = RawTensor { indices: indices.as_ptr(), values: values.as_ptr(), nnz, dims, block, dtype };
        let shape = Shape::new(dims, block, dtype)?;
        if shape.lengths(nnz).ok() != Some((indices.len(), values.len())) {
            fail!(
                InvalidArgument,
                "nnz {nnz} of {dims} dims and blocks of {block} × {} does not fit {} indices and {} bytes of values",
                dtype.name(),
                indices.len(),
                values.len()
            );
        }
        Ok(raw)
    }
}

/// The same wherever it lies: both lists in host memory, or both in memory of one device. NULL is fine for no
/// elements. Ranks may differ in where theirs are.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor {
    /// As [`Input::indices`].
    pub indices: *const i64,
    /// As [`Input::values`].
    pub values: *const u8,
    /// As [`Input::nnz`].
    pub nnz: u64,
    /// As [`Input::dims`].
    pub dims: u32,
    /// As [`Input::block`].
    pub block: u64,
    /// As [`Input::dtype`].
    pub dtype: DataType,
}

/// The result of a sparse allreduce: a tensor that is sorted by its indices, each of which occurs once. It is
/// there when the operation has completed well; before that, and after a failure, it has no elements. Cheap
/// to clone.
#[derive(Clone, Debug)]
pub struct Sparse {
    dims: u32,
    tensor: Arc<OnceLock<Tensor>>,
    /// Those of the input, if it was in device memory.
    devices: Option<Arc<Devices>>,
    /// Whose threads copy it. None of a group of one.
    endpoint: Weak<Endpoint>,
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

    /// `dims` × `nnz` numbers in host memory, laid out as in [`Input::indices`].
    pub fn indices(&self) -> &[i64] {
        self.tensor.get().map_or(&[], Tensor::indices)
    }

    /// `nnz` × `block` values in host memory, as bytes, aligned to 8.
    pub fn values(&self) -> &[u8] {
        self.tensor.get().map_or(&[], Tensor::values)
    }

    /// Copies the indices and the values out, to host memory or to memory of one device; NULL for what is not
    /// wanted. To a device the copies are in the order of `stream`, and this returns at once; without one
    /// they come after what the device's default stream was given before, and are there on return. The result
    /// may be dropped in any case.
    ///
    /// # Safety
    /// The destinations have room for what [`Sparse::indices`] and [`Sparse::values`] have; they stay valid,
    /// and nobody else touches them, until the copies are done. The stream lives until then.
    pub unsafe fn copy(
        &self,
        indices: *mut i64,
        values: *mut u8,
        stream: Option<StreamHandle>,
    ) -> Result<()> {
        if self.tensor.get().is_none() {
            fail!(InvalidUsage, "the result is not there: its work is not complete, or has failed");
        }
        // SAFETY: any numbers are bytes.
        let numbers = unsafe {
            let indices = self.indices();
            std::slice::from_raw_parts(indices.as_ptr().cast::<u8>(), size_of_val(indices))
        };
        let mut parts: Vec<(&str, &[u8], *mut u8)> =
            vec![("indices", numbers, indices.cast()), ("values", self.values(), values)];
        parts.retain(|(_, bytes, to)| !bytes.is_empty() && !to.is_null());
        let mut device = None;
        for &(name, bytes, to) in &parts {
            let found = self
                .locate(to.expose_provenance() as u64)?
                .filter(|location| location.memory != Memory::Host);
            if let Some(location) = &found {
                let (start, bytes) = (to.expose_provenance() as u64, bytes.len());
                let end =
                    location.reach(start, start.saturating_add(bytes as u64), |next| self.locate(next))?;
                let room = end.saturating_sub(start);
                if room < bytes as u64 {
                    fail!(
                        InvalidArgument,
                        "{name} has {room} bytes left in its allocation, but {bytes} are needed"
                    );
                }
            }
            let found = found.map(|location| location.device);
            if *device.get_or_insert(found) != found {
                fail!(InvalidArgument, "indices and values are not memory of one device, or of the host");
            }
        }
        let Some(device) = device.flatten() else {
            if stream.is_some() && !parts.is_empty() {
                fail!(
                    InvalidArgument,
                    "a stream is given, but the destinations are host memory: leave it NULL"
                );
            }
            for (_, bytes, to) in parts {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            }
            return Ok(());
        };
        let devices = self.devices.clone().map_or_else(Devices::open, Ok)?;
        let parts: Vec<(&[u8], u64)> =
            parts.iter().map(|(_, bytes, to)| (*bytes, to.expose_provenance() as u64)).collect();
        let endpoint = self.endpoint.upgrade();
        let team: &dyn Team = endpoint.as_deref().map_or(&Alone, |endpoint| endpoint);
        // SAFETY: the caller's promise, for both.
        unsafe {
            match stream {
                Some(handle) => {
                    let stream = Stream::borrow(&devices, device, handle)?;
                    stream.refuse_capture("stream", "a copy of a result cannot be captured")?;
                    staged::store(&stream, &parts, team)
                }
                None => {
                    devices.check_default_stream(device)?;
                    // Making one may wait for other streams.
                    let stream = staged::front(&devices, device)?;
                    staged::store(&stream, &parts, team)?;
                    stream.synchronize(Deadline::after(DEFAULT_TIMEOUT))
                }
            }
        }
    }

    fn locate(&self, address: u64) -> Result<Option<Location>> {
        match &self.devices {
            Some(devices) => devices.locate(address),
            None => Devices::locate_if_loaded(address),
        }
    }
}

impl Context {
    /// Combines the tensors of all ranks, each of which gets the same result. Collective; runs to completion
    /// in this thread. `operator` is sum, product, min, max or average, the same on every rank.
    pub fn sparse_allreduce(&self, input: &Input<'_>, operator: Operator, call: &Call) -> Result<Sparse> {
        // SAFETY: the lists are borrowed until the call returns, and have the lengths that it says.
        unsafe { self.run_sparse(&input.tensor()?, operator, call) }
    }

    /// Starts the same and returns; the library moves it when nobody waits. The input is read before this
    /// returns. The result is there when the work has completed. For programs in Rust: from C it is
    /// [`Context::start_sparse`].
    pub fn start_sparse_allreduce(
        &self,
        input: &Input<'_>,
        operator: Operator,
        call: &Call,
    ) -> Result<(Work, Sparse)> {
        // SAFETY: as above; host memory is read before the call returns.
        unsafe { self.start_sparse(&input.tensor()?, operator, call) }
    }

    /// As [`Context::sparse_allreduce`], for tensors in host or device memory. Waits for the result with a
    /// stream, too.
    ///
    /// # Safety
    /// As [`Context::start_sparse`].
    pub unsafe fn run_sparse(&self, input: &RawTensor, operator: Operator, call: &Call) -> Result<Sparse> {
        // SAFETY: the caller's promise.
        let (result, step) = unsafe { self.sparse_step(input, operator, call, Source::borrow) }?;
        if let Some(Step { group, signature, part, counting, source }) = step {
            group.run(calling_collective(call, signature), |turn| {
                SparseRun::new(turn, part, counting, source)
            })?;
        }
        Ok(result)
    }

    /// As [`Context::start_sparse_allreduce`], for tensors in host or device memory. Device memory is read
    /// when the call's stream comes to the call, and what the stream is given next waits until it has been
    /// read, not for the result. (A group of one waits for the stream here.)
    ///
    /// # Safety
    /// The lists hold what their lengths say, and nobody writes to them: host memory until the call returns;
    /// device memory until what the stream is given next, or, without a stream, until the work completes. The
    /// stream lives until the work completes.
    pub unsafe fn start_sparse(
        &self,
        input: &RawTensor,
        operator: Operator,
        call: &Call,
    ) -> Result<(Work, Sparse)> {
        // SAFETY: the caller's promise.
        let (result, step) = unsafe { self.sparse_step(input, operator, call, Source::copy) }?;
        let Some(Step { group, signature, part, counting, source }) = step else {
            return Ok((Work::ended(Ok(Completion::default())), result));
        };
        let make = |turn: &Turn| SparseRun::new(turn, part, counting, source);
        let running = group.start(calling_collective(call, signature), make)?;
        let work = Work::running(running);
        Ok(match &result.devices {
            Some(devices) => (work.on_devices(devices), result),
            None => (work, result),
        })
    }

    /// Checks a call. What is left to do, if there are other ranks. `on_host` has lists that are in host
    /// memory.
    ///
    /// # Safety
    /// As [`Context::start_sparse`].
    unsafe fn sparse_step(
        &self,
        input: &RawTensor,
        operator: Operator,
        call: &Call,
        on_host: OnHost,
    ) -> Result<(Sparse, Option<Step<'_>>)> {
        // Before anything is locked: in a child, by a thread that is not there.
        if let Some(endpoint) = self.endpoint() {
            endpoint.check_fork()?;
        }
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
        let shape = Shape::new(input.dims, input.block, input.dtype)?;
        let reducer = Reducer::new(input.dtype, operator, self.size())?;
        self.sparse_memory().begin();
        // SAFETY: the caller's promise.
        let (source, devices) = unsafe { self.source(input, &shape, call, on_host) }?;
        let endpoint = self.endpoint().map_or_else(Weak::new, Arc::downgrade);
        let result = Sparse { dims: input.dims, tensor: Arc::default(), devices, endpoint };
        let Membership::Group(group) = self.membership() else {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let deadline = Deadline::after(call.timeout.unwrap_or(self.timeout()));
            source.wait(deadline)?;
            let pool = self.sparse_memory();
            // SAFETY: it is here, and the caller's promise.
            let lists = unsafe { source.lists() };
            let pace = Pace::free();
            let tensor = at_once(async {
                let order = Order::of(lists.0, shape.dims, pool, &pace).await?;
                let mut all = Gathered::new(&shape, &[order.different as u64], pool)?;
                all.put(0..1, lists, &order, &reducer, &Alone, &pace).await?;
                combined(&all, &reducer, pool, &Alone, &pace).await
            })?;
            let _ = result.tensor.set(tensor);
            return Ok((result, None));
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
        let pool = self.sparse_memory().clone();
        let (class, by_messages) = (class_of(call), lists_by_messages(group));
        let part = Part { shape, reducer, seat: self.seat(), class, by_messages, pool, into };
        let counting = Counting::new(group, &part, self.plans())?;
        Ok((result, Some(Step { group, signature, part, counting, source })))
    }

    /// This rank's elements: as `on_host` has them if they are in host memory, else on their way there.
    ///
    /// # Safety
    /// As [`Context::start_sparse`].
    unsafe fn source(
        &self,
        input: &RawTensor,
        shape: &Shape,
        call: &Call,
        on_host: OnHost,
    ) -> Result<(Source, Option<Arc<Devices>>)> {
        let (numbers, bytes) = shape.lengths(input.nnz)?;
        for (name, missing) in [("indices", input.indices.is_null()), ("values", input.values.is_null())] {
            if missing && numbers > 0 {
                fail!(InvalidArgument, "{name} is NULL, but nnz is {}", input.nnz);
            }
        }
        if numbers == 0 {
            return Ok((Source::none(), None));
        }
        if !input.indices.is_aligned() {
            fail!(InvalidArgument, "indices is not aligned to {} bytes", align_of::<i64>());
        }
        let spans = Spans::of_tensor((input.indices, numbers * size_of::<i64>()), (input.values, bytes));
        let Some(survey) = self.or_fail(self.survey(spans, call))? else {
            // SAFETY: the caller's promise.
            let source =
                unsafe { on_host((input.indices, numbers), (input.values, bytes), self.sparse_memory()) };
            return Ok((self.or_fail(source)?, None));
        };
        let parts = match survey.places() {
            (Place::Device(indices), Place::Device(values)) => {
                [(indices, numbers * size_of::<i64>()), (values, bytes)]
            }
            (Place::Host(_), Place::Host(_)) => fail!(
                InvalidArgument,
                "call->stream is set, but the tensor is in host memory, which is read at once: leave it NULL"
            ),
            _ => fail!(InvalidArgument, "one of indices and values is device memory, the other is not"),
        };
        let (stream, _) = survey.stream();
        // SAFETY: the caller's promise.
        let load = self.or_fail(unsafe { Load::begin(stream, &parts, self.endpoint()) })?;
        Ok((Source::load(load, numbers, bytes), Some(survey.devices().clone())))
    }

    fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        match self.membership() {
            Membership::Group(group) => Some(group.endpoint()),
            Membership::Solo => None,
        }
    }
}

/// What becomes of lists in host memory.
type OnHost = unsafe fn((*const i64, usize), (*const u8, usize), &Arc<Pool>) -> Result<Source>;

/// A call that takes other ranks.
struct Step<'a> {
    group: &'a Arc<Group>,
    signature: Signature,
    part: Part,
    counting: Counting,
    source: Source,
}
