//! Reduction of all pointers of a process into one of them, in the canonical order.

use std::ops::Range;
use std::sync::Arc;

use super::program::{Builder, Folding, Program};
use super::{Kernels, Operand, Pointers, direct, ragged};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Representation};

/// How the operands meet. The result's bits are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceAlgorithm {
    /// The canonical tree: the right half of each node goes to the device of its left half, which combines
    /// the two into scratch memory. Works where devices do not reach each other, too.
    Tree,
    /// Devices fold shares of the elements from all operands and write them to the root, so that every link
    /// carries as much. Where a subtree of the canonical tree has its pointers on one device, that device
    /// folds it for the others first, if they then have fewer bytes to read. All devices must reach each
    /// other.
    Direct,
}

impl ReduceAlgorithm {
    /// Direct where all devices reach each other, else the tree.
    pub fn automatic(pointers: &Pointers) -> Result<ReduceAlgorithm> {
        Ok(if pointers.reach_each_other()? { ReduceAlgorithm::Direct } else { ReduceAlgorithm::Tree })
    }
}

/// A prepared reduction. One run at a time, which `&mut` sees to; it may be used from any thread.
#[derive(Debug)]
pub struct LocalReduce {
    program: Program,
}

impl LocalReduce {
    /// Prepares the reduction of all pointers into pointer `root`; the others are left as they are. Scratch
    /// memory is allocated here. The caller's own functions are refused: they work on host memory.
    pub fn new(
        pointers: Pointers,
        root: usize,
        dtype: DataType,
        operator: Operator,
        algorithm: ReduceAlgorithm,
        kernels: Arc<dyn Kernels>,
    ) -> Result<LocalReduce> {
        LocalReduce::into(pointers, root, None, dtype, operator, algorithm, kernels)
    }

    /// As [`LocalReduce::new`], but leaves accumulators in memory of its own, and no pointer changes: an
    /// average is not divided yet, and short floats are not rounded. Also answers where they are: on the
    /// device of pointer `root`, for as long as this lives, and after a run until the next one whoever's the
    /// root's stream is.
    pub fn partial(
        pointers: Pointers,
        root: usize,
        dtype: DataType,
        operator: Operator,
        algorithm: ReduceAlgorithm,
        kernels: Arc<dyn Kernels>,
    ) -> Result<(LocalReduce, u64)> {
        pointers.check_root(root)?;
        let count = pointers.bytes() / dtype.size();
        let (devices, device) = (&pointers.devices, pointers.device(root));
        let out = DeviceBuffer::new(devices, device, count * dtype.accumulator().size())?;
        let address = out.address();
        let reduce = LocalReduce::into(pointers, root, Some(out), dtype, operator, algorithm, kernels)?;
        Ok((reduce, address))
    }

    fn into(
        pointers: Pointers,
        root: usize,
        accumulators: Option<DeviceBuffer>,
        dtype: DataType,
        operator: Operator,
        algorithm: ReduceAlgorithm,
        kernels: Arc<dyn Kernels>,
    ) -> Result<LocalReduce> {
        pointers.check_root(root)?;
        if let Operator::Custom(_) = operator {
            fail!(Unsupported, "the caller's own function works on host memory, not on device pointers");
        }
        if !pointers.bytes().is_multiple_of(dtype.size()) {
            return Err(ragged(pointers.bytes(), dtype));
        }
        for stream in &pointers.streams {
            kernels.prepare(&pointers.devices, stream.device(), dtype, operator)?;
        }
        let count = pointers.bytes() / dtype.size();
        let scale = if let Operator::PreMulSum(scale) = operator { scale } else { 1.0 };
        let n = pointers.len();
        let (target, representation) = match &accumulators {
            Some(out) => (out.address(), Representation::Accumulator),
            None => (pointers.addresses[root], Representation::Element),
        };
        let widest = kernels.most_operands();
        let nodes = vec![Node::default(); n];
        let mut builder = Builder::new(pointers);
        if let Some(out) = accumulators {
            builder.keep(out);
        }
        let mut reduction =
            Reduction { builder, dtype, count, scale, root, target, representation, widest, nodes };
        match algorithm {
            _ if count == 0 => {}
            ReduceAlgorithm::Tree => reduction.tree()?,
            ReduceAlgorithm::Direct => direct::reduce(&mut reduction)?,
        }
        // As many as pointers, which were counted by a u32 at the ABI.
        let folding = Folding { kernels, dtype, operator, contributions: n as u32 };
        Ok(LocalReduce { program: reduction.builder.finish(Some(folding))? })
    }

    /// Enqueues the reduction and returns. It begins when each stream has done what it was given before; what
    /// the root's stream is given afterwards finds the result, and what any stream is given may overwrite its
    /// pointer. In a capture as [`super::LocalBroadcast::run`].
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

/// A reduction while its program is written.
pub(super) struct Reduction {
    pub(super) builder: Builder,
    pub(super) dtype: DataType,
    pub(super) count: usize,
    scale: f64,
    pub(super) root: usize,
    /// Where the result goes, on the root's device, and as what.
    pub(super) target: u64,
    pub(super) representation: Representation,
    /// The most operands of a fold.
    pub(super) widest: usize,
    nodes: Vec<Node>,
}

/// Scratch memory of one pointer, which all the nodes of the tree that it is the leftmost of use in turn.
#[derive(Clone, Copy, Default)]
struct Node {
    /// Accumulators.
    partial: Option<u64>,
    /// What comes from a device that is not reached.
    incoming: Option<u64>,
}

impl Reduction {
    fn tree(&mut self) -> Result<()> {
        let (n, root) = (self.builder.pointers.len(), self.root);
        let (target, representation) = (self.target, self.representation);
        let (operands, right) = if n == 1 { (vec![self.leaf(0)], None) } else { self.halves(0, n)? };
        if root == 0 || self.builder.direct(0, root)? {
            self.builder.fold(0, &operands, (target, representation), self.count);
            let released = self.release(0, right)?;
            if root != 0 && released != Some(root) {
                self.builder.order(0, root)?;
            }
            return Ok(());
        }
        let bytes = self.count * self.size(representation);
        let result = self.builder.scratch(0, bytes)?;
        self.builder.fold(0, &operands, (result, representation), self.count);
        self.release(0, right)?;
        // The root's operand has come this far, and with it all that the root's stream did in earlier runs.
        if self.builder.transfer((0, result), (root, target), bytes)? {
            self.builder.order(0, root)?;
        }
        Ok(())
    }

    /// The value of the subtree over `n` pointers from `low` on, at the device of `low`.
    fn subtree(&mut self, low: usize, n: usize) -> Result<Operand> {
        if n == 1 {
            return Ok(self.leaf(low));
        }
        let (operands, right) = self.halves(low, n)?;
        let representation = Representation::Accumulator;
        let partial = match self.nodes[low].partial {
            Some(partial) => partial,
            None => self.builder.scratch(low, self.count * self.dtype.accumulator().size())?,
        };
        self.nodes[low].partial = Some(partial);
        self.builder.fold(low, &operands, (partial, representation), self.count);
        self.release(low, right)?;
        Ok(Operand { address: partial, representation, scale: 1.0 })
    }

    /// A pointer that `low`'s stream has read is its user's again, unless a broadcast is to come first.
    /// Answers which.
    fn release(&mut self, low: usize, right: Option<usize>) -> Result<Option<usize>> {
        let right = right.filter(|_| !self.builder.pointers.chained);
        if let Some(right) = right {
            self.builder.order(low, right)?;
        }
        Ok(right)
    }

    /// Both halves of a node, ready on `low`'s stream; and the pointer whose memory its fold will read in
    /// place.
    fn halves(&mut self, low: usize, n: usize) -> Result<(Vec<Operand>, Option<usize>)> {
        let middle = n.next_power_of_two() / 2;
        let left = self.subtree(low, middle)?;
        let right = self.subtree(low + middle, n - middle)?;
        let from = low + middle;
        if self.builder.direct(from, low)? {
            self.builder.order(from, low)?;
            return Ok((vec![left, right], Some(from)));
        }
        let size = self.size(right.representation);
        let incoming = match self.nodes[low].incoming {
            Some(incoming) => incoming,
            None => self.builder.scratch(low, self.count * self.dtype.accumulator().size())?,
        };
        self.nodes[low].incoming = Some(incoming);
        // The pinned pieces are free when `low` has read them in the last run.
        self.builder.order(low, from)?;
        self.builder.transfer((from, right.address), (low, incoming), self.count * size)?;
        Ok((vec![left, Operand { address: incoming, ..right }], None))
    }

    /// Folds elements on the device of one pointer into a target, which is that of the first of them. More
    /// operands than a fold takes are folded in blocks, whole subtrees of the canonical tree, and those once
    /// more.
    pub(super) fn fold(
        &mut self,
        on: usize,
        operands: &[Operand],
        elements: Range<usize>,
        target: (u64, Representation),
    ) -> Result<()> {
        let at = |operand: &Operand| match *operand {
            Operand::ABSENT => Operand::ABSENT,
            Operand { address, representation, .. } => {
                let address = address + (elements.start * self.size(representation)) as u64;
                Operand { address, ..*operand }
            }
        };
        let mut operands: Vec<Operand> = operands.iter().map(at).collect();
        let representation = Representation::Accumulator;
        while operands.len() > self.widest {
            let mut blocks = Vec::with_capacity(operands.len().div_ceil(self.widest));
            for block in operands.chunks(self.widest) {
                if block[1..].iter().all(|operand| *operand == Operand::ABSENT) {
                    blocks.push(block[0]);
                    continue;
                }
                let address = self.builder.scratch(on, elements.len() * self.size(representation))?;
                self.builder.fold(on, block, (address, representation), elements.len());
                blocks.push(Operand { address, representation, scale: 1.0 });
            }
            operands = blocks;
        }
        self.builder.fold(on, &operands, target, elements.len());
        Ok(())
    }

    pub(super) fn size(&self, representation: Representation) -> usize {
        match representation {
            Representation::Element => self.dtype.size(),
            Representation::Accumulator => self.dtype.accumulator().size(),
        }
    }

    pub(super) fn leaf(&self, index: usize) -> Operand {
        let address = self.builder.pointers.addresses[index];
        Operand { address, representation: Representation::Element, scale: self.scale }
    }
}
