//! Reduction of all pointers of a process into one of them, in the canonical order.

use std::sync::Arc;

use super::program::{Builder, Folding, Program};
use super::{Kernels, Operand, Pointers, ragged};
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Representation};

/// How the operands meet. The result's bits are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceAlgorithm {
    /// The canonical tree: the right half of each node goes to the device of its left half, which combines the two
    /// into scratch memory. Works where devices do not reach each other, too.
    Tree,
    /// Every device folds its share of the elements from all operands and writes it to the root: no scratch memory,
    /// and every link carries a share. All devices must reach each other.
    Direct,
}

/// A prepared reduction. One run at a time, which `&mut` sees to; it may be used from any thread.
#[derive(Debug)]
pub struct LocalReduce {
    program: Program,
}

impl LocalReduce {
    /// Prepares the reduction of all pointers into pointer `root`; the others are left as they are. Scratch memory is
    /// allocated here. The caller's own functions are refused: they work on host memory.
    pub fn new(
        pointers: Pointers,
        root: usize,
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
        let nodes = vec![Node::default(); n];
        let mut reduction = Reduction { builder: Builder::new(pointers), dtype, count, scale, root, nodes };
        match algorithm {
            _ if count == 0 => {}
            ReduceAlgorithm::Tree => reduction.tree()?,
            ReduceAlgorithm::Direct => reduction.direct()?,
        }
        let folding = Folding { kernels, dtype, operator };
        Ok(LocalReduce { program: reduction.builder.finish(Some(folding))? })
    }

    /// Enqueues the reduction and returns. It begins when each stream has done what it was given before; what the
    /// root's stream is given afterwards finds the result, and what any stream is given may overwrite its pointer.
    /// In a capture as [`super::LocalBroadcast::run`].
    pub fn run(&mut self) -> Result<()> {
        self.program.run()
    }

    /// Waits on the host until every stream has done what it was given. Only callers without streams need it.
    pub fn wait(&mut self, deadline: Deadline) -> Result<()> {
        self.program.finish(deadline)
    }
}

/// A reduction while its program is written.
struct Reduction {
    builder: Builder,
    dtype: DataType,
    count: usize,
    scale: f64,
    root: usize,
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
        let element = Representation::Element;
        let (operands, right) = if n == 1 { (vec![self.leaf(0)], None) } else { self.halves(0, n)? };
        let target = self.builder.pointers.addresses[root];
        if root == 0 || self.builder.direct(0, root)? {
            self.builder.fold(0, &operands, (target, element), self.count);
            if let Some(right) = right {
                self.builder.order(0, right)?;
            }
            if root != 0 && right != Some(root) {
                self.builder.order(0, root)?;
            }
            return Ok(());
        }
        let bytes = self.builder.pointers.bytes();
        let result = self.builder.scratch(0, bytes)?;
        self.builder.fold(0, &operands, (result, element), self.count);
        if let Some(right) = right {
            self.builder.order(0, right)?;
        }
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
        if let Some(right) = right {
            // Its pointer is its user's again.
            self.builder.order(low, right)?;
        }
        Ok(Operand { address: partial, representation, scale: 1.0 })
    }

    /// Both halves of a node, ready on `low`'s stream; and the pointer whose memory its fold will read in place.
    fn halves(&mut self, low: usize, n: usize) -> Result<(Vec<Operand>, Option<usize>)> {
        let middle = n.next_power_of_two() / 2;
        let left = self.subtree(low, middle)?;
        let right = self.subtree(low + middle, n - middle)?;
        let from = low + middle;
        if self.builder.direct(from, low)? {
            self.builder.order(from, low)?;
            return Ok((vec![left, right], Some(from)));
        }
        let positions = match right.representation {
            Representation::Element => self.dtype,
            Representation::Accumulator => self.dtype.accumulator(),
        };
        let incoming = match self.nodes[low].incoming {
            Some(incoming) => incoming,
            None => self.builder.scratch(low, self.count * self.dtype.accumulator().size())?,
        };
        self.nodes[low].incoming = Some(incoming);
        // The pinned pieces are free when `low` has read them in the last run.
        self.builder.order(low, from)?;
        self.builder.transfer((from, right.address), (low, incoming), self.count * positions.size())?;
        Ok((vec![left, Operand { address: incoming, ..right }], None))
    }

    fn direct(&mut self) -> Result<()> {
        let n = self.builder.pointers.len();
        for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (a, b))) {
            if !self.builder.direct(a, b)? {
                let (a, b) = (self.builder.pointers.device(a), self.builder.pointers.device(b));
                fail!(Unsupported, "devices {a} and {b} do not reach each other; use the tree");
            }
        }
        let operands: Vec<Operand> = (0..n).map(|index| self.leaf(index)).collect();
        let target = self.builder.pointers.addresses[self.root];
        // Shares begin at multiples of 128 bytes from the pointer on, whatever the type.
        let unit = 128 / self.dtype.size();
        let units = self.count.div_ceil(unit);
        let count = self.count;
        let bound = |index: usize| (units * index / n * unit).min(count);
        // Everybody reads from everybody: each begins when all are there, and ends when all are done.
        self.meet()?;
        for index in 0..n {
            let begin = bound(index);
            let count = bound(index + 1) - begin;
            if count > 0 {
                let offset = (begin * self.dtype.size()) as u64;
                let part =
                    operands.iter().map(|operand| Operand { address: operand.address + offset, ..*operand });
                let part: Vec<Operand> = part.collect();
                self.builder.fold(index, &part, (target + offset, Representation::Element), count);
            }
        }
        self.meet()
    }

    /// Every stream waits for every other, by way of the root's.
    fn meet(&mut self) -> Result<()> {
        let (n, root) = (self.builder.pointers.len(), self.root);
        let others = || (0..n).filter(move |&index| index != root);
        for index in others() {
            self.builder.order(index, root)?;
        }
        if n > 1 {
            let all = self.builder.record(root)?;
            for index in others() {
                if !self.builder.share_stream(index, root) {
                    self.builder.wait(index, all);
                }
            }
        }
        Ok(())
    }

    fn leaf(&self, index: usize) -> Operand {
        let address = self.builder.pointers.addresses[index];
        Operand { address, representation: Representation::Element, scale: self.scale }
    }
}
