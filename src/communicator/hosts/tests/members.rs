//! Kernels that exchange, made of the double's copies, folds and words.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;

use super::*;
use crate::cuda::double::DoubleKernels;
use crate::cuda::exchange::{Counts, Direction, Fault, Job, Point, Pull, Seen, Shared};
use crate::cuda::local::{Fold, Kernels as Folds, Operand};
use crate::cuda::stream::Stream;
use crate::engine::device::{Kernels, Loads};
use crate::engine::endpoint::lock;
use crate::reduce::Representation;

/// Bytes that a member gives another in one call, at most.
const SLOT: u64 = 64 << 10;

thread_local! {
    /// The driver of the rank that this thread is.
    pub(in crate::communicator) static DRIVER: RefCell<Option<Arc<Double>>> = const { RefCell::new(None) };
}

fn driver() -> Arc<Double> {
    DRIVER.with_borrow(|double| double.clone().expect("a rank's thread"))
}

thread_local! {
    /// What this thread does ahead of each launch; if that fails, so does the launch.
    pub(in crate::communicator) static AHEAD: RefCell<Option<Ahead>> = const { RefCell::new(None) };
}

pub(in crate::communicator) type Ahead = Box<dyn FnMut() -> Result<()>>;

pub(in crate::communicator) const LOADS: Loads = Loads {
    exchange: |_, _, rank, arenas, fault, _| {
        let folds = DoubleKernels(driver());
        let calls = Mutex::new(0);
        Ok(Box::new(Members { rank, arenas: arenas.to_vec(), folds, calls, fault }))
    },
    fold: |_| Arc::new(DoubleKernels(driver())),
};

/// Kernels of the double, for ranks of one process: in each call, every member puts what it gives into the
/// others' arenas, takes from its own what it was given, and says so. The arenas' first word is the latch.
#[derive(Debug)]
struct Members {
    rank: u32,
    arenas: Vec<u64>,
    folds: DoubleKernels,
    calls: Mutex<u32>,
    fault: Arc<Fault>,
}

impl Members {
    /// Where `member` has its slot in this rank's arena.
    fn slot(&self, arena: u32, member: u32) -> u64 {
        self.arenas[arena as usize] + 4096 + u64::from(member) * SLOT
    }

    /// Copies as kernels do, also from and to pinned memory.
    ///
    /// # Safety
    /// None: the double trusts no address.
    unsafe fn copy(&self, stream: &Stream, to: u64, from: u64, bytes: u64) -> Result<()> {
        let (dtype, operator, representation) = (DataType::U8, Operator::Sum, Representation::Element);
        let operands = &[Operand { address: from, representation, scale: 1.0 }];
        let count = bytes as usize;
        let fold = Fold {
            stream,
            dtype,
            operator,
            ranks: 1,
            operands,
            out: to,
            representation,
            count,
            max_blocks: 0,
        };
        // SAFETY: as above.
        unsafe { self.folds.fold(stream.devices(), &fold) }
    }

    /// One call: gives, takes by `take`, waits for the others to have taken.
    fn meet(
        &self,
        gives: &[(u32, u64, u64)],
        stream: &Stream,
        take: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        AHEAD.with_borrow_mut(|ahead| ahead.as_mut().map_or(Ok(()), |ahead| ahead()))?;
        let latch = self.arenas[self.rank as usize];
        self.folds.0.kernel(&self.fault, latch, || self.steps(gives, stream, take))
    }

    fn steps(
        &self,
        gives: &[(u32, u64, u64)],
        stream: &Stream,
        take: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.fault.is_aborted() {
            fail!(Aborted, "a call after the abort");
        }
        let mut calls = lock(&self.calls);
        *calls += 1;
        let members = 0..self.arenas.len() as u32;
        let word = |arena: u32, at: u32| self.arenas[arena as usize] + 4 * u64::from(at);
        let (own, size) = (self.rank, self.arenas.len() as u32);
        let mut filled = vec![0; self.arenas.len()];
        // SAFETY: arenas are mapped, and larger than this; the double trusts no other addresses.
        unsafe {
            for &(peer, from, bytes) in gives {
                let to = self.slot(peer, own) + filled[peer as usize];
                filled[peer as usize] += bytes;
                assert!(filled[peer as usize] <= SLOT);
                self.copy(stream, to, from, bytes)?;
            }
            for peer in members.clone() {
                stream.write_value(word(peer, 1 + own), *calls)?;
                stream.wait_value(word(own, 1 + peer), *calls)?;
            }
            take()?;
            for peer in members {
                stream.write_value(word(peer, 1 + size + own), *calls)?;
                stream.wait_value(word(own, 1 + size + peer), *calls)?;
            }
        }
        Ok(())
    }
}

impl Kernels for Members {
    fn serves(&self, _: Kind, _: DataType, operator: &Operator) -> bool {
        !matches!(operator, Operator::Custom(_))
    }

    unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()> {
        let bytes = job.count * job.dtype.size() as u64;
        let members = 0..self.arenas.len() as u32;
        let gives: Vec<_> = match job.kind {
            Kind::Broadcast if self.rank != job.root => Vec::new(),
            Kind::ReduceScatter => {
                members.clone().map(|peer| (peer, job.input + u64::from(peer) * bytes, bytes)).collect()
            }
            _ => members.clone().map(|peer| (peer, job.input, bytes)).collect(),
        };
        self.meet(&gives, stream, || {
            if job.kind == Kind::Broadcast {
                let from = self.slot(self.rank, job.root);
                // SAFETY: the double trusts no address.
                return unsafe { self.copy(stream, job.output, from, bytes) };
            }
            let operand = |member| Operand {
                address: self.slot(self.rank, member),
                representation: Representation::Element,
                scale: 1.0,
            };
            let operands: Vec<Operand> = members.map(operand).collect();
            let fold = Fold {
                stream,
                dtype: job.dtype,
                operator: job.operator,
                ranks: 1,
                operands: &operands,
                out: job.output,
                representation: Representation::Element,
                count: job.count as usize,
                max_blocks: 0,
            };
            // SAFETY: as above.
            unsafe { self.folds.fold(stream.devices(), &fold) }
        })
    }

    fn bundles(&self, jobs: &[Job], _windows: bool) -> Result<Vec<Range<usize>>> {
        Ok((0..jobs.len()).map(|call| call..call + 1).collect())
    }

    unsafe fn enqueue_several(&self, _: &[Job], _: &Stream) -> Result<()> {
        panic!("each is alone")
    }

    fn shares(&self, _: &Job) -> Option<Shared> {
        None
    }

    unsafe fn enqueue_windowed(&self, _: &Job, _: &Seen, _: &Stream) -> Result<()> {
        panic!("there are no windows here")
    }

    unsafe fn enqueue_pull(&self, _: &Pull, _: &Stream) -> Result<()> {
        panic!("there are several hosts")
    }

    fn enqueue_signals(&self, _: &Counts, _: &Stream) -> Result<()> {
        panic!("there are several hosts")
    }

    fn enqueue_wait(&self, _: &Counts, _: &Stream) -> Result<()> {
        panic!("there are several hosts")
    }

    unsafe fn enqueue_points(&self, points: &[Point], _: u32, stream: &Stream) -> Result<()> {
        let sends = points.iter().filter(|point| point.direction == Direction::Send);
        let gives: Vec<_> = sends.map(|point| (point.peer, point.address, point.bytes)).collect();
        if points.iter().all(|point| point.peer == self.rank) {
            // Nobody else has to do with it.
            for pair in points.chunks_exact(2) {
                // SAFETY: the double trusts no address.
                unsafe { self.copy(stream, pair[1].address, pair[0].address, pair[0].bytes) }?;
            }
            return Ok(());
        }
        self.meet(&gives, stream, || {
            let mut taken = vec![0; self.arenas.len()];
            for point in points.iter().filter(|point| point.direction == Direction::Receive) {
                let from = self.slot(self.rank, point.peer) + taken[point.peer as usize];
                taken[point.peer as usize] += point.bytes;
                // SAFETY: as above.
                unsafe { self.copy(stream, point.address, from, point.bytes) }?;
            }
            Ok(())
        })
    }
}
