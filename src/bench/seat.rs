//! Where a rank sits in the job of the benchmark, and what the ranks agree on between measurements.

use std::sync::Arc;
use std::time::Duration;

use super::options::{Options, Transport};
use crate::collective::request::{Counts, Kind, Request};
use crate::communicator::{Call, Context, Options as ContextOptions, Rendezvous};
use crate::error::Result;
use crate::reduce::{DataType, Operator};
use crate::rendezvous::environment::Launch;
use crate::rendezvous::store::Store;

/// One rank among those of the job: a process that a launcher started, or a thread of this one.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) rank: u32,
    pub(super) size: u32,
    /// Where threads meet; processes meet where their launcher says.
    store: Option<Arc<dyn Store>>,
}

impl Seat {
    /// The one that the launcher has given to this process.
    pub(super) fn of_process() -> Result<Seat> {
        let launch = Launch::from_env()?;
        // A launcher's numbers are checked to be ranks of a job.
        Ok(Seat { rank: launch.rank as u32, size: launch.size as u32, store: None })
    }

    /// One of `size` threads that share `store`.
    pub(super) fn of_thread(rank: u32, size: u32, store: Arc<dyn Store>) -> Seat {
        Seat { rank, size, store: Some(store) }
    }

    /// A new group of all ranks, over this transport. `purpose` sets apart groups of the same transport.
    pub(super) fn meet(&self, options: &Options, transport: Transport, purpose: &str) -> Result<Context> {
        Context::create(ContextOptions {
            rank: self.rank,
            size: self.size,
            rendezvous: self.store.clone().map_or(Rendezvous::Environment, Rendezvous::Store),
            name: format!("unisono-bench {purpose} {}", transport.name()),
            timeout: options.timeout,
            interface: None,
            transports: (transport != Transport::Automatic).then(|| transport.name().to_owned()),
            host: None,
        })
    }
}

/// Waits for all ranks.
pub(super) fn barrier(context: &Context, timeout: Option<Duration>) -> Result<()> {
    let request = Request {
        kind: Kind::Barrier,
        input: std::ptr::null(),
        output: std::ptr::null_mut(),
        counts: Counts::Uniform(0),
        dtype: DataType::U8,
        operator: Operator::Sum,
        root: 0,
    };
    // SAFETY: a barrier accesses nothing.
    unsafe { context.run(&request, &Call { timeout, ..Call::default() }) }.map(drop)
}

/// Combines the numbers of all ranks.
pub(super) fn combine(context: &Context, operator: Operator, numbers: &mut [u64]) -> Result<()> {
    let address = numbers.as_mut_ptr().cast::<u8>();
    let request = Request {
        kind: Kind::Allreduce,
        input: address,
        output: address,
        counts: Counts::Uniform(numbers.len() as u64),
        dtype: DataType::U64,
        operator,
        root: 0,
    };
    // SAFETY: the slice has that many numbers and is borrowed until the call returns.
    unsafe { context.run(&request, &Call::default()) }.map(drop)
}

/// The sum of what every rank has.
pub(super) fn total(context: &Context, mine: u64) -> Result<u64> {
    let mut numbers = [mine];
    combine(context, Operator::Sum, &mut numbers)?;
    Ok(numbers[0])
}

/// Every rank's number.
pub(super) fn gather(context: &Context, seat: &Seat, number: u64) -> Result<Vec<u64>> {
    let mut numbers = vec![0; seat.size as usize];
    numbers[seat.rank as usize] = number;
    combine(context, Operator::Max, &mut numbers)?;
    Ok(numbers)
}

/// Gives every rank the bytes of rank 0.
pub(super) fn spread(context: &Context, bytes: &mut [u8]) -> Result<()> {
    let address = bytes.as_mut_ptr();
    let request = Request {
        kind: Kind::Broadcast,
        input: address,
        output: address,
        counts: Counts::Uniform(bytes.len() as u64),
        dtype: DataType::U8,
        operator: Operator::Sum,
        root: 0,
    };
    // SAFETY: the slice has that many bytes and is borrowed until the call returns.
    unsafe { context.run(&request, &Call::default()) }.map(drop)
}
