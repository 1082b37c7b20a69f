//! The exchange between the GPUs of one host, seen from the host: who may take part, which memory they share,
//! which call comes when, and what happens when it goes wrong. The kernels that do it are in
//! [`crate::cuda::exchange`].
//!
//! A group's ranks agree once whether their GPUs exchange ([`Setup`]): each gives an arena of device memory,
//! maps those of the others, and proves that it reaches them. After that a call is one kernel on the caller's
//! stream, on every rank; the host is in its way no more ([`DeviceExchange`]). What the host does keep is the
//! order of the calls, and notes of them on boards in shared memory ([`board`]), so that ranks whose calls
//! differ find out before their kernels meet.
//!
//! A failure of the group sets a word that kernels look at while they wait: they end, the streams go on, and
//! no later call is launched. Arenas are given back when all members have said that they need them no more.

pub mod board;
mod compare;
mod exchange;
pub mod hosts;
mod offer;
mod overdue;
mod probe;
mod retired;
mod setup;
mod watch;
mod window;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cuda::context::Devices;
use crate::cuda::exchange::{Counts, Exchange, Fault, Job, Point, Pull, Seen, Shared, Table};
use crate::cuda::fold::FoldKernels;
use crate::cuda::local::Kernels as Folds;
use crate::cuda::stream::Stream;
use crate::error::Result;
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

#[cfg(test)]
pub(crate) use exchange::Meets;
pub use exchange::{Asked, Caller, DeviceExchange, Enqueued, Put, Series};
pub use hosts::{Hosts, Layout};
pub use overdue::GRACE_PERIOD;
pub use retired::HeldMemory;
pub use setup::{MESSAGE_BYTES, Occasion, Setup, Step};
pub use window::Registration;

/// What the ranks of a group have agreed on.
#[derive(Clone, Debug)]
pub enum Way {
    /// Their GPUs exchange.
    Exchange(Arc<DeviceExchange>),
    /// Those of each host exchange, and the hosts by way of their memory.
    Hosts(Arc<Hosts>),
    /// They do not, for this reason.
    Staged(String),
}

impl Way {
    /// Whether sends and receives go this way: all ranks knew of it before their first call.
    pub fn serves_points(&self) -> bool {
        self.exchange().is_some_and(|exchange| exchange.serves_points())
    }

    /// The exchange of this rank's GPU with those of its host.
    pub fn exchange(&self) -> Option<&Arc<DeviceExchange>> {
        match self {
            Way::Exchange(exchange) => Some(exchange),
            Way::Hosts(hosts) => Some(hosts.exchange()),
            Way::Staged(_) => None,
        }
    }
}

/// The kernels of one rank of one exchange. [`Exchange`] is one; tests without GPUs have others.
pub trait Kernels: fmt::Debug + Send + Sync {
    /// As [`Exchange::serves`].
    fn serves(&self, kind: Kind, dtype: DataType, operator: &Operator) -> bool;

    /// As [`Exchange::enqueue`].
    ///
    /// # Safety
    /// As there.
    unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()>;

    /// As [`Exchange::bundles`].
    fn bundles(&self, jobs: &[Job], windows: bool) -> Result<Vec<Range<usize>>>;

    /// As [`Exchange::enqueue_several`].
    ///
    /// # Safety
    /// As there.
    unsafe fn enqueue_several(&self, jobs: &[Job], stream: &Stream) -> Result<()>;

    /// As [`Exchange::shares`].
    fn shares(&self, job: &Job) -> Option<Shared>;

    /// As [`Exchange::enqueue_windowed`].
    ///
    /// # Safety
    /// As there.
    unsafe fn enqueue_windowed(&self, job: &Job, seen: &Seen, stream: &Stream) -> Result<()>;

    /// As [`Exchange::enqueue_pull`].
    ///
    /// # Safety
    /// As there.
    unsafe fn enqueue_pull(&self, pull: &Pull, stream: &Stream) -> Result<()>;

    /// As [`Exchange::enqueue_points`].
    ///
    /// # Safety
    /// As there.
    unsafe fn enqueue_points(&self, points: &[Point], max_blocks: u32, stream: &Stream) -> Result<()>;

    /// As [`Exchange::enqueue_signals`].
    fn enqueue_signals(&self, counts: &Counts, stream: &Stream) -> Result<()>;

    /// As [`Exchange::enqueue_wait`].
    fn enqueue_wait(&self, counts: &Counts, stream: &Stream) -> Result<()>;
}

impl Kernels for Exchange {
    fn serves(&self, kind: Kind, dtype: DataType, operator: &Operator) -> bool {
        Exchange::serves(self, kind, dtype, operator)
    }

    unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Exchange::enqueue(self, job, stream) }
    }

    fn bundles(&self, jobs: &[Job], windows: bool) -> Result<Vec<Range<usize>>> {
        Exchange::bundles(self, jobs, windows)
    }

    unsafe fn enqueue_several(&self, jobs: &[Job], stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Exchange::enqueue_several(self, jobs, stream) }
    }

    fn shares(&self, job: &Job) -> Option<Shared> {
        Exchange::shares(self, job)
    }

    unsafe fn enqueue_windowed(&self, job: &Job, seen: &Seen, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Exchange::enqueue_windowed(self, job, seen, stream) }
    }

    unsafe fn enqueue_pull(&self, pull: &Pull, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Exchange::enqueue_pull(self, pull, stream) }
    }

    unsafe fn enqueue_points(&self, points: &[Point], max_blocks: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { Exchange::enqueue_points(self, points, max_blocks, stream) }
    }

    fn enqueue_signals(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        Exchange::enqueue_signals(self, counts, stream)
    }

    fn enqueue_wait(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        Exchange::enqueue_wait(self, counts, stream)
    }
}

/// Loads the kernels of `rank` on `device`, which reaches all `arenas` until what it gives is dropped.
pub type Load =
    fn(&Arc<Devices>, device: u32, rank: u32, arenas: &[u64], Arc<Fault>, Table) -> Result<Box<dyn Kernels>>;

/// Where kernels come from.
#[derive(Clone, Copy)]
pub struct Loads {
    /// Those that exchange.
    pub exchange: Load,
    /// Those that fold.
    pub fold: fn(&Arc<Devices>) -> Arc<dyn Folds>,
}

impl Loads {
    /// This library's.
    pub const OWN: Loads = Loads { exchange: load, fold: |_| FoldKernels::open() };
}

/// Loads the kernels of this library.
pub fn load(
    devices: &Arc<Devices>,
    device: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    table: Table,
) -> Result<Box<dyn Kernels>> {
    // SAFETY: who sets an exchange up keeps the arenas mapped for longer than its kernels (`Setup`,
    // `Retired`).
    Ok(Box::new(unsafe { Exchange::new(devices, device, rank, arenas, fault, table) }?))
}
