//! Who is in the group and in which order its operations run: contexts, their children, work handles.

pub mod buffer;
pub mod sparse;

use std::sync::Arc;
use std::time::Duration;

use crate::collective::request::Request;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rendezvous::store::Store;

/// How the ranks of a new context find each other.
pub enum Rendezvous {
    /// Through a store that every rank has.
    Store(Arc<dyn Store>),
    /// Through the unique id alone, 128 bytes that one rank made and all have.
    Id([u8; 128]),
    /// From the launcher's environment, which also gives rank and size.
    Environment,
}

/// What a context is made from. Every rank gives the same `size`, `name` and rendezvous.
pub struct Options {
    /// This rank; ignored with [`Rendezvous::Environment`].
    pub rank: u32,
    /// How many ranks; ignored with [`Rendezvous::Environment`].
    pub size: u32,
    /// How they find each other.
    pub rendezvous: Rendezvous,
    /// Named in errors and logs; "default" if empty.
    pub name: String,
    /// The deadline of creation and of every operation that names none.
    pub timeout: Duration,
    /// Name, address or CIDR of the interface for TCP; `None`: UNISONO_INTERFACE, else chosen.
    pub interface: Option<String>,
    /// Transports allowed, as in UNISONO_TRANSPORT ("shm,tcp"); `None`: the environment's, else all.
    pub transports: Option<String>,
}

/// What may differ from call to call.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Operations with a tag match operations with the same tag, in the order of calls with that tag, and run beside
    /// all others. Without one, operations run in the order of the calls. Send and receive: `None` is tag 0.
    pub tag: Option<u64>,
    /// `None`: the context's.
    pub timeout: Option<Duration>,
    /// An algorithm by its ABI number; 0 or `None` is automatic.
    pub algorithm: Option<i32>,
}

/// What a completed operation tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The rank that a receive from any took its message from.
    pub source: Option<u32>,
}

/// One rank's membership in a group: a communicator. Cheap to clone; all methods from any thread.
#[derive(Clone)]
pub struct Context {}

impl Context {
    /// Meets the other ranks and returns when the group stands (all ranks have arrived).
    pub fn create(options: Options) -> Result<Context> {
        let _ = options;
        todo!()
    }
    /// This rank within the group.
    pub fn rank(&self) -> u32 {
        todo!()
    }
    /// How many ranks the group has.
    pub fn size(&self) -> u32 {
        todo!()
    }
    /// The group's name.
    pub fn name(&self) -> &str {
        todo!()
    }
    /// Collective over this group: a child group for each colour, ranks ordered by key, then by rank here.
    /// `None`: this rank takes part in no child.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Context>> {
        let _ = (color, key);
        todo!()
    }
    /// A named child group of the listed ranks, in that order; called by its members only. Another rank's call is
    /// `NotMember` and names rank and group.
    pub fn group(&self, name: &str, ranks: &[u32]) -> Result<Context> {
        let _ = (name, ranks);
        todo!()
    }
    /// Collective: the same ranks, independent operations.
    pub fn duplicate(&self) -> Result<Context> {
        todo!()
    }
    /// Fails everything that is running or to come on this context, on this rank and (within a second) on the others.
    /// Returns at once; from any thread.
    pub fn abort(&self) {
        todo!()
    }
    /// The first failure of this context, if there was one.
    pub fn failure(&self) -> Option<Error> {
        todo!()
    }
    /// Runs to completion in this thread.
    ///
    /// # Safety
    /// The request's pointers are NULL where nothing is accessed, else valid for what the operation accesses until
    /// it returns.
    pub unsafe fn run(&self, request: &Request, call: &Call) -> Result<Completion> {
        let _ = (request, call);
        todo!()
    }
    /// Starts and returns; the library moves it when nobody waits.
    ///
    /// # Safety
    /// As [`Context::run`], until the work completes.
    pub unsafe fn start(&self, request: &Request, call: &Call) -> Result<Work> {
        let _ = (request, call);
        todo!()
    }
}

/// An operation under way. Cheap to clone; all methods from any thread. Dropping it lets the operation run on.
#[derive(Clone)]
pub struct Work {}

impl Work {
    /// Waits in this thread, moving the operation. An expired `deadline` (not the operation's own) is `Timeout` and leaves the operation
    /// running.
    pub fn wait(&self, deadline: Deadline) -> Result<Completion> {
        let _ = deadline;
        todo!()
    }
    /// The result if it is there. Never blocks.
    pub fn test(&self) -> Option<Result<Completion>> {
        todo!()
    }
    /// Calls `then` once with the result: at once if it is there, else from the thread that completes the operation.
    pub fn on_complete(&self, then: Box<dyn FnOnce(Result<Completion>) + Send>) {
        let _ = then;
        todo!()
    }
    /// Ends this operation with `Aborted` if it still runs (only receives and sends that have moved nothing yet;
    /// others: `InvalidUsage`).
    pub fn cancel(&self) -> Result<()> {
        todo!()
    }
}

/// A fixed algorithm over fixed buffers, prepared once, run many times. With several host buffers per rank they are
/// reduced locally first and all receive the result.
pub struct Prepared {}

/// What an algorithm object is made from.
pub struct AlgorithmOptions {
    /// The operation; `input`, `output` and `counts` of the request are replaced by `buffers` and `count`.
    pub kind: crate::collective::request::Kind,
    /// ABI number of the algorithm; 0 is automatic.
    pub algorithm: i32,
    /// This rank's buffers, each of `count` elements (allreduce, broadcast, reduce); for allgather and the like the
    /// first is the input and the second the output.
    pub buffers: Vec<*mut u8>,
    /// Elements, as `Counts::Uniform`.
    pub count: u64,
    /// Of which type.
    pub dtype: crate::reduce::DataType,
    /// Combined how.
    pub operator: crate::reduce::Operator,
    /// The root rank.
    pub root: u32,
    /// Which of the root's buffers is the source of a broadcast.
    pub root_buffer: usize,
    /// As in [`Call`].
    pub call: Call,
}

impl Prepared {
    /// Checks everything, builds the schedule, reserves what it needs.
    ///
    /// # Safety
    /// The buffers stay valid until the object is dropped.
    pub unsafe fn new(context: &Context, options: AlgorithmOptions) -> Result<Prepared> {
        let _ = (context, options);
        todo!()
    }
    /// Runs once, to completion.
    pub fn run(&self) -> Result<()> {
        todo!()
    }
    /// Starts a run.
    pub fn start(&self) -> Result<Work> {
        todo!()
    }
    /// The name of the algorithm that was chosen.
    pub fn algorithm(&self) -> &'static str {
        todo!()
    }
}
