//! Algorithm objects: a fixed operation over fixed buffers, checked and planned once, run many times.

use std::task::Poll;

use super::context::Context;
use super::work::Work;
use super::{Call, Completion};
use crate::collective::request::{Counts, Kind, Request};
use crate::engine::endpoint::Through;
use crate::engine::group::Group;
use crate::engine::operation::Operation;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// What an algorithm object is made from.
pub struct AlgorithmOptions {
    /// The operation.
    pub kind: Kind,
    /// ABI number of the algorithm; 0 is automatic.
    pub algorithm: i32,
    /// This rank's buffers. Allreduce, reduce and broadcast: any number, each of `count` elements, in place. The others:
    /// input and output.
    pub buffers: Vec<*mut u8>,
    /// Elements, as [`Counts::Uniform`].
    pub count: u64,
    /// Of which type.
    pub dtype: DataType,
    /// Combined how. Average divides by the number of all buffers of all ranks, which have equally many.
    pub operator: Operator,
    /// The root rank.
    pub root: u32,
    /// Which of the root's buffers is the source of a broadcast.
    pub root_buffer: usize,
    /// As in [`Call`].
    pub call: Call,
}

/// A fixed operation over fixed buffers. With several buffers per rank they are reduced here first, and all of them
/// receive the result.
pub struct Prepared {
    context: Context,
    request: Request,
    call: Call,
    buffers: Vec<*mut u8>,
    name: &'static str,
}

// SAFETY: the buffers are promised to be usable from the library's threads (`Prepared::new`).
unsafe impl Send for Prepared {}
// SAFETY: as above; runs of one object are ordered by its context.
unsafe impl Sync for Prepared {}

impl Prepared {
    /// Checks everything and builds the schedule.
    ///
    /// # Safety
    /// The buffers stay valid until the object is dropped and its runs have ended.
    pub unsafe fn new(context: &Context, options: AlgorithmOptions) -> Result<Prepared> {
        let AlgorithmOptions { kind, buffers, root_buffer, .. } = &options;
        let many = matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast);
        let expected = if *kind == Kind::Barrier { 0 } else { 2 };
        if kind.point_to_point() {
            fail!(InvalidArgument, "an algorithm object is for a collective, not for {}", kind.name());
        }
        if many && buffers.is_empty() {
            fail!(InvalidArgument, "pointer_count is 0, but {} needs at least one buffer", kind.name());
        }
        if !many && buffers.len() != expected {
            fail!(
                InvalidArgument,
                "pointer_count is {}, but {} takes {expected}: what to send, where to receive",
                buffers.len(),
                kind.name()
            );
        }
        let is_root = context.rank() == options.root;
        if *kind == Kind::Broadcast && is_root && *root_buffer >= buffers.len() {
            fail!(
                InvalidArgument,
                "root_pointer {root_buffer} is out of range: there are {} pointers",
                buffers.len()
            );
        }
        for (index, buffer) in buffers.iter().enumerate() {
            if buffer.is_null() && options.count > 0 {
                fail!(InvalidArgument, "pointer {index} is NULL, but count is {}", options.count);
            }
        }
        let main = match kind {
            Kind::Broadcast if is_root => *root_buffer,
            _ => 0,
        };
        let output = match (many, buffers.get(1)) {
            (false, Some(&output)) => output,
            _ => buffers.get(main).copied().unwrap_or(std::ptr::null_mut()),
        };
        let input = buffers.get(main).copied().unwrap_or(std::ptr::null_mut()).cast_const();
        let request = Request {
            kind: *kind,
            input,
            output,
            counts: Counts::Uniform(options.count),
            dtype: options.dtype,
            operator: options.operator,
            root: options.root,
        };
        let call = Call { algorithm: Some(options.algorithm), ..options.call.clone() };
        let name = context.algorithm(&request, &call)?;
        let buffers = if many { options.buffers } else { Vec::new() };
        Ok(Prepared { context: context.clone(), request, call, buffers, name })
    }

    /// Runs once, to completion.
    pub fn run(&self) -> Result<()> {
        // SAFETY: `new`'s promise.
        unsafe { self.context.run_buffers(&self.request, &self.call, &self.buffers) }.map(|_| ())
    }

    /// Starts a run.
    pub fn start(&self) -> Result<Work> {
        // SAFETY: `new`'s promise.
        unsafe { self.context.start_buffers(&self.request, &self.call, &self.buffers) }
    }

    /// The name of the algorithm.
    pub fn algorithm(&self) -> &'static str {
        self.name
    }
}

/// An operation whose result is copied to further buffers of this rank.
pub(super) struct Copied<O> {
    pub(super) operation: O,
    pub(super) from: *const u8,
    pub(super) to: Vec<*mut u8>,
    pub(super) bytes: usize,
}

// SAFETY: the pointers are the caller's, promised to be usable from the library's threads until the operation ends.
unsafe impl<O: Send> Send for Copied<O> {}

impl<O> Copied<O> {
    /// Copies now.
    ///
    /// # Safety
    /// Every buffer holds `bytes` bytes; they are the same or apart.
    pub(super) unsafe fn spread(from: *const u8, to: &[*mut u8], bytes: usize) {
        for &to in to {
            if !std::ptr::eq(to, from) && bytes > 0 {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::copy(from, to, bytes) };
            }
        }
    }
}

impl<O: Operation> Operation for Copied<O> {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let answer = self.operation.advance(group);
        if let Poll::Ready(Ok(_)) = &answer {
            // SAFETY: whoever made this promised that the buffers hold `bytes` bytes until the operation ends.
            unsafe { Copied::<O>::spread(self.from, &self.to, self.bytes) };
        }
        answer
    }

    fn abandon(&mut self, group: &Group) {
        self.operation.abandon(group);
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.operation.waits_for(group)
    }

    fn through(&self) -> Through {
        self.operation.through()
    }
}
