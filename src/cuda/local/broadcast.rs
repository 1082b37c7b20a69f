//! Broadcast from one pointer of a process to its others.

use std::sync::Arc;

use super::program::{Builder, Folding, Program};
use super::{Kernels, Operand, Pointers};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::reduce::{DataType, Operator, Representation};

/// How the bytes spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BroadcastAlgorithm {
    /// A binary tree of whole copies, ⌈log₂ n⌉ deep. Least calls; every link of a path waits for the one
    /// before.
    Tree,
    /// A chain in chunks: each device forwards a chunk while it receives the next. Most bandwidth.
    Chain {
        /// Bytes of a chunk.
        chunk: usize,
    },
}

impl BroadcastAlgorithm {
    /// The tree for few bytes, two pointers, or one device; else the chain.
    pub fn automatic(pointers: &Pointers) -> BroadcastAlgorithm {
        if pointers.len() <= 2 || devices(pointers) == 1 || pointers.bytes() < SMALLEST_CHAIN {
            BroadcastAlgorithm::Tree
        } else {
            BroadcastAlgorithm::chain(pointers)
        }
    }

    /// A chain with chunks of the best size.
    ///
    /// A chunk takes each link a fixed time besides its bytes, and the chain takes a chunk to fill for each
    /// device but two (copies within a device take next to no time): the best size is a square root. And the
    /// host has to enqueue a chunk for every pointer in the time that a link needs for one.
    pub fn chain(pointers: &Pointers) -> BroadcastAlgorithm {
        let fill = devices(pointers).saturating_sub(2).max(1);
        let best = (pointers.bytes() as f64 * BYTES_LOST / fill as f64).sqrt() as usize;
        let least = pointers.len() * BYTES_ENQUEUED;
        BroadcastAlgorithm::Chain { chunk: best.max(least).next_multiple_of(4096) }
    }
}

/// How many devices the pointers are on.
fn devices(pointers: &Pointers) -> usize {
    let mut devices: Vec<u32> = (0..pointers.len()).map(|index| pointers.device(index)).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.len()
}

/// What a link of an H200 could carry in the time (3.7 µs) that it loses between two chunks.
const BYTES_LOST: f64 = 1.4e6;

/// What it carries while the host enqueues a chunk for one pointer (3 µs).
const BYTES_ENQUEUED: usize = 1 << 20;

/// Bytes from which on a chain of three devices beats two whole copies in turn.
const SMALLEST_CHAIN: usize = 16 << 20;

/// The last step of a reduction whose result is in accumulators.
#[derive(Debug)]
pub struct Rounding {
    /// Where they are, on the root's device.
    pub from: u64,
    /// What the pointers hold.
    pub dtype: DataType,
    /// The reduction's operator.
    pub operator: Operator,
    /// What an average divides by.
    pub contributions: u32,
    /// What folds.
    pub kernels: Arc<dyn Kernels>,
}

/// A prepared broadcast. One run at a time, which `&mut` sees to; it may be used from any thread.
#[derive(Debug)]
pub struct LocalBroadcast {
    program: Program,
}

impl LocalBroadcast {
    /// Prepares the broadcast of pointer `root`'s bytes to all others.
    pub fn new(pointers: Pointers, root: usize, algorithm: BroadcastAlgorithm) -> Result<LocalBroadcast> {
        LocalBroadcast::after(pointers, root, algorithm, None)
    }

    /// Prepares the broadcast of a result that is still in accumulators: pointer `root` receives it first, by
    /// the last step of the reduction.
    ///
    /// # Safety
    /// The accumulators are as many as a pointer has elements, stay valid for as long as this lives and what
    /// it enqueued is not done, and are touched on the root's stream only, or in order with it.
    pub unsafe fn rounded(
        pointers: Pointers,
        root: usize,
        algorithm: BroadcastAlgorithm,
        rounding: Rounding,
    ) -> Result<LocalBroadcast> {
        LocalBroadcast::after(pointers, root, algorithm, Some(rounding))
    }

    fn after(
        pointers: Pointers,
        root: usize,
        algorithm: BroadcastAlgorithm,
        rounding: Option<Rounding>,
    ) -> Result<LocalBroadcast> {
        pointers.check_root(root)?;
        let mut builder = Builder::new(pointers);
        let mut folding = None;
        if builder.pointers.bytes() > 0 {
            if let Some(Rounding { from, dtype, operator, contributions, kernels }) = rounding {
                let pointers = &builder.pointers;
                kernels.prepare(&pointers.devices, pointers.device(root), dtype, operator)?;
                let (out, count) = (pointers.addresses[root], pointers.bytes() / dtype.size());
                let operand =
                    Operand { address: from, representation: Representation::Accumulator, scale: 1.0 };
                builder.fold(root, &[operand], (out, Representation::Element), count);
                folding = Some(Folding { kernels, dtype, operator, contributions });
            }
            match algorithm {
                BroadcastAlgorithm::Tree => tree(&mut builder, root)?,
                BroadcastAlgorithm::Chain { chunk } => chain(&mut builder, root, chunk.max(1))?,
            }
        }
        Ok(LocalBroadcast { program: builder.finish(folding)? })
    }

    /// Enqueues the broadcast and returns. It begins when each stream has done what it was given before; what
    /// a stream is given afterwards finds its pointer complete, and may overwrite it.
    ///
    /// Streams in a capture are all in the same one; then the broadcast becomes part of the graph. This lives
    /// for as long as the graph is launched.
    pub fn run(&mut self) -> Result<()> {
        self.program.run()
    }

    /// Whether the pointers' streams are being captured.
    pub fn is_captured(&self) -> Result<bool> {
        self.program.is_captured()
    }

    /// What `stream` is given after this waits for everything that any of the pointers' streams has been
    /// given.
    pub fn join(&mut self, stream: &Stream) -> Result<()> {
        self.program.join(stream)
    }

    /// Waits on the host until every stream has done what it was given. Only callers without streams need it.
    pub fn wait(&mut self, deadline: Deadline) -> Result<()> {
        self.program.finish(deadline)
    }
}

/// The pointers in the order in which they receive: from the root, around, those of one device together, so
/// that each device is sent the bytes once.
fn line(builder: &Builder, root: usize) -> Vec<usize> {
    let n = builder.pointers.len();
    let around: Vec<usize> = (0..n).map(|position| (root + position) % n).collect();
    let device = |index: usize| builder.pointers.device(index);
    let mut line = Vec::with_capacity(n);
    for &first in &around {
        if !line.contains(&first) {
            line.extend(around.iter().filter(|&&index| device(index) == device(first)));
        }
    }
    line
}

/// Positions are those of [`line`]. In the step of size s (the largest power of two below n first, then
/// halved down to 1) every holder j, a multiple of 2s, copies to j + s. For n that is no power of two,
/// targets beyond the last pointer are left out: nobody else would have had anything from them in that step.
fn tree(builder: &mut Builder, root: usize) -> Result<()> {
    let (n, line) = (builder.pointers.len(), line(builder, root));
    let mut size = n.next_power_of_two() / 2;
    while size > 0 {
        for holder in (0..n - size).step_by(2 * size) {
            let (from, to) = (line[holder], line[holder + size]);
            if !builder.pointers.chained {
                // Whatever still uses the target's memory comes first.
                builder.order(to, from)?;
            }
            let (source, target) = (builder.pointers.addresses[from], builder.pointers.addresses[to]);
            if builder.transfer((from, source), (to, target), builder.pointers.bytes())? {
                // The target may pass it on in the next step, and its user may read it after that.
                builder.order(from, to)?;
            }
        }
        size /= 2;
    }
    Ok(())
}

/// Each pointer of [`line`] copies every chunk to the next.
fn chain(builder: &mut Builder, root: usize, chunk: usize) -> Result<()> {
    let (n, line) = (builder.pointers.len(), line(builder, root));
    let bytes = builder.pointers.bytes();
    if !builder.pointers.chained {
        for hop in 1..n {
            // Whatever still uses the target's memory comes first.
            builder.order(line[hop], line[hop - 1])?;
        }
    }
    for offset in (0..bytes).step_by(chunk) {
        let part = chunk.min(bytes - offset);
        for hop in 1..n {
            let (from, to) = (line[hop - 1], line[hop]);
            let source = builder.pointers.addresses[from] + offset as u64;
            let target = builder.pointers.addresses[to] + offset as u64;
            let direct = builder.transfer((from, source), (to, target), part)?;
            // The last of the chain forwards nothing: for it the last chunk's event stands for all.
            let needed = hop + 1 < n || offset + part == bytes;
            if direct && needed {
                builder.order(from, to)?;
            }
        }
    }
    Ok(())
}
