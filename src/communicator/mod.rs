//! Who is in the group and in which order its operations run: contexts, their children, work handles.

mod ahead;
mod alone;
#[cfg(test)]
mod away;
pub mod batch;
pub mod beside;
pub mod buffer;
mod calls;
pub mod context;
mod cuda;
pub mod device;
mod finishing;
mod growth;
mod hosts;
mod limits;
mod lined_up;
#[cfg(test)]
mod medley;
mod meeting;
mod one_sided;
pub mod plans;
mod point;
pub mod prepared;
mod recall;
mod refusals;
mod several;
pub mod sparse;
mod staged;
mod survey;
mod turns;
pub mod wide;
pub mod window;
pub mod work;

pub use batch::{Closing, Part, Pending, start_parts, start_together};
pub use beside::Beside;
pub use context::{Child, Context};
pub use device::{Added, Launches, Ready, connect_devices};
pub use prepared::{AlgorithmOptions, Prepared, ignores};
pub use recall::Recall;
pub use turns::begin_in_turns;
pub use wide::reduce_local;
pub use window::Window;
pub use work::Work;

use std::sync::Arc;
use std::time::Duration;

use crate::cuda::driver::StreamHandle;
pub use crate::cuda::exchange::Overlap;
pub use crate::engine::device::HeldMemory;
pub use crate::engine::group::Rest;
pub use crate::engine::operation::Completion;
use crate::reduce::DataType;
use crate::rendezvous::store::Store;
use crate::signature::Signature;

/// How the ranks of a new context find each other.
pub enum Rendezvous {
    /// Through a store that every rank has.
    Store(Arc<dyn Store>),
    /// Through the unique id alone, 128 bytes that one rank made and all have.
    Id([u8; 128]),
    /// Through a unique id by which ranks meet only once: who comes later is refused.
    Invitation([u8; 128]),
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
    /// The deadline of creation and of every operation that names none. All steps of a creation have it
    /// together; once all ranks have come, they have a second more for what they set up. So has the making of
    /// a child.
    pub timeout: Duration,
    /// Name, address or CIDR of the interface for TCP; `None`: UNISONO_INTERFACE, else chosen.
    pub interface: Option<String>,
    /// Transports allowed, as in UNISONO_TRANSPORT ("shm,tcp"); `None`: the environment's, else all.
    pub transports: Option<String>,
    /// A name for this host: ranks that give the same name share memory. `None`: UNISONO_HOST, else the
    /// kernel tells.
    pub host: Option<String>,
}

/// What may differ from call to call.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Operations with a tag match operations with the same tag, in the order of calls with that tag, and run
    /// beside all others. Without one, operations run in the order of the calls. Send and receive: `None` is
    /// tag 0.
    pub tag: Option<u64>,
    /// `None`: the context's.
    pub timeout: Option<Duration>,
    /// An algorithm by its ABI number; 0 or `None` is automatic.
    pub algorithm: Option<i32>,
    /// The most blocks of a kernel by which GPUs exchange a collective, and so the most multiprocessors that
    /// it takes; 0: no more word on it than [`Context::limit_blocks`]. The same on every rank. By way of the
    /// host, too; there it takes two at least, or three where it combines.
    pub max_blocks: u32,
    /// What the kernel of a broadcast by stages (algorithms 21 to 23) overlaps with; looked at by no other.
    pub overlap: Overlap,
    /// A stream that the operation is ordered on: it starts when the stream comes to the call, and what the
    /// stream is given afterwards waits for it. Without one, an operation on device memory comes after what
    /// the default stream of its device was given before; so does one of no elements, where GPUs exchange.
    ///
    /// A thread may be so far ahead of the stream as the driver has room for what it gives the stream. Where
    /// calls go by way of the host, a call waits while its stream waits for 16 earlier ones; for 50 ms at
    /// first, since those may need what the thread does next. At 64 it waits until one has ended, or fails
    /// with [`Status::Timeout`](crate::error::Status). What the caller itself gives the stream behind such a
    /// call is not counted: a few hundred launches and copies at most.
    ///
    /// By way of the host, the stream is given a courier ([`crate::cuda::courier`]). GPUs without kernels
    /// need side streams: the stream waits for those only if the process has 32 queues on a device
    /// (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set when the driver begins) and not 16 other streams of that
    /// device wait, else this thread until the operation is complete (not [`Context::start`]): a stream that
    /// waits holds up others in its queue, maybe the library's own, for which it waits. Calls on two streams
    /// come in one order on all ranks, as if the two were one, or there are no more such streams than queues.
    ///
    /// Where streams wait for side streams, no kernel is launched for the first time meanwhile, unless
    /// CUDA_MODULE_LOADING is EAGER: the driver would load it, and may wait for the device with a lock held
    /// that the library's copies need. The same goes for what makes streams, and may for what allocates or
    /// frees pinned memory or a device's. [`Pending::complete_all`] is for programs that cannot promise that.
    pub stream: Option<StreamHandle>,
    /// Whether the call is on what GPUs reach, whatever its pointers look like: memory of the device, managed
    /// memory, or pinned memory of the host. Other memory is refused then. Otherwise a call is one on device
    /// memory if a pointer is of device or managed memory.
    pub on_device: bool,
    /// Of an average over several buffers of each rank, how many this rank has: the ranks compare that. 0 for
    /// any other call; [`Prepared`] sees to it.
    pub averaged: u32,
    /// Of a reduction over what this rank has combined already, in another type or by another operator than
    /// the request's, that type and the operator's number: the ranks compare them in place of the request's.
    /// `None` for any other call; [`Prepared`] sees to it.
    pub combined: Option<(DataType, u8)>,
}

impl Call {
    /// What the ranks compare of such a call, whose request has this signature.
    fn compared(&self, signature: Signature) -> Signature {
        let signature = signature.averaging(self.averaged);
        match self.combined {
            Some((dtype, operator)) => signature.over_combined(dtype, operator),
            None => signature,
        }
    }
}
