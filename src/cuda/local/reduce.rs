//! Reduction of all pointers of a process into one of them, in the canonical order.

use std::sync::Arc;

use super::program::{Builder, Folding, Program};
use super::{Kernels, Operand, Pointers, ragged};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Representation};

/// How the operands meet. The result's bits are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceAlgorithm {
    /// The canonical tree: the right half of each node goes to the device of its left half, which combines the two
    /// into scratch memory. Works where devices do not reach each other, too.
    Tree,
    /// Devices fold shares of the elements from all operands and write them to the root: no scratch memory for up to 32
    /// pointers, and every link carries as much. All devices must reach each other.
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
        LocalReduce::into(pointers, root, None, dtype, operator, algorithm, kernels)
    }

    /// As [`LocalReduce::new`], but leaves accumulators in memory of its own, and no pointer changes: an average is not
    /// divided yet, and short floats are not rounded. Also answers where they are: on the device of pointer `root`, for as
    /// long as this lives, and after a run until the next one whoever's the root's stream is.
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
            ReduceAlgorithm::Direct => reduction.direct()?,
        }
        // As many as pointers, which were counted by a u32 at the ABI.
        let folding = Folding { kernels, dtype, operator, contributions: n as u32 };
        Ok(LocalReduce { program: reduction.builder.finish(Some(folding))? })
    }

    /// Enqueues the reduction and returns. It begins when each stream has done what it was given before; what the
    /// root's stream is given afterwards finds the result, and what any stream is given may overwrite its pointer.
    /// In a capture as [`super::LocalBroadcast::run`].
    pub fn run(&mut self) -> Result<()> {
        self.program.run()
    }

    /// What `stream` is given after this waits for everything that any of the pointers' streams has been given.
    pub fn join(&mut self, stream: &Stream) -> Result<()> {
        self.program.join(stream)
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
    /// Where the result goes, on the root's device, and as what.
    target: u64,
    representation: Representation,
    /// The most operands of a fold.
    widest: usize,
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

    /// A pointer that `low`'s stream has read is its user's again, unless a broadcast is to come first. Answers which.
    fn release(&mut self, low: usize, right: Option<usize>) -> Result<Option<usize>> {
        let right = right.filter(|_| !self.builder.pointers.chained);
        if let Some(right) = right {
            self.builder.order(low, right)?;
        }
        Ok(right)
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

    fn direct(&mut self) -> Result<()> {
        let n = self.builder.pointers.len();
        for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (a, b))) {
            if !self.builder.direct(a, b)? {
                let (a, b) = (self.builder.pointers.device(a), self.builder.pointers.device(b));
                fail!(Unsupported, "devices {a} and {b} do not reach each other; use the tree");
            }
        }
        let operands: Vec<Operand> = (0..n).map(|index| self.leaf(index)).collect();
        let shares = self.shares();
        self.meet(&shares, true)?;
        for &(index, begin, count) in &shares {
            self.fold_share(index, &operands, begin, count)?;
        }
        self.meet(&shares, false)
    }

    /// Which pointers' devices fold, and what: pointer, first element, count. Never empty.
    ///
    /// A device takes in what it folds, but for the operands of its own, and the root's takes in what the others have
    /// folded as well. The shares make that equal for all. Where each pointer has a device of its own, the root folds
    /// nothing: then every link carries the vector once, each way.
    fn shares(&self) -> Vec<(usize, usize, usize)> {
        let pointers = &self.builder.pointers;
        let (n, root) = (pointers.len(), self.root);
        let own = |index: usize| (0..n).filter(|&i| pointers.device(i) == pointers.device(index)).count();
        let is_first =
            |&index: &usize| (0..index).all(|before| pointers.device(before) != pointers.device(index));
        let others: Vec<usize> = (0..n)
            .filter(is_first)
            .filter(|&index| pointers.device(index) != pointers.device(root))
            .collect();
        let far = n - own(root);
        let mut weights = vec![(root, 1.0)];
        if far > 1 {
            // In units of the vector: what a device takes in when they all take in the same.
            let sum: f64 = others.iter().map(|&index| 1.0 / (n - own(index)) as f64).sum();
            let relief = 1.0 / (far - 1) as f64;
            let taken = (1.0 + relief) / (sum + relief);
            weights[0].1 = ((taken - 1.0) * relief).max(0.0);
            weights.extend(others.iter().map(|&index| (index, taken / (n - own(index)) as f64)));
        }
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        // Shares begin at multiples of 128 bytes from the pointer on, whatever the type.
        let unit = 128 / self.dtype.size();
        let units = self.count.div_ceil(unit);
        let (mut shares, mut begin, mut passed) = (Vec::new(), 0, 0.0);
        for (place, &(index, weight)) in weights.iter().enumerate() {
            passed += weight;
            let is_last = place + 1 == weights.len();
            let bound = if is_last { units } else { (units as f64 * passed / total).round() as usize };
            let end = (bound * unit).min(self.count);
            if end > begin {
                shares.push((index, begin, end - begin));
                begin = end;
            }
        }
        shares
    }

    /// Folds a share of the elements on the device of one pointer. More operands than a fold takes are folded in blocks, whole
    /// subtrees of the canonical tree, and those once more.
    fn fold_share(&mut self, on: usize, operands: &[Operand], begin: usize, count: usize) -> Result<()> {
        let element = (begin * self.dtype.size()) as u64;
        let at = |operand: &Operand| Operand { address: operand.address + element, ..*operand };
        let mut operands: Vec<Operand> = operands.iter().map(at).collect();
        let accumulator = Representation::Accumulator;
        while operands.len() > self.widest {
            let mut blocks = Vec::with_capacity(operands.len().div_ceil(self.widest));
            for block in operands.chunks(self.widest) {
                if let &[single] = block {
                    blocks.push(single);
                    continue;
                }
                let address = self.builder.scratch(on, count * self.size(accumulator))?;
                self.builder.fold(on, block, (address, accumulator), count);
                blocks.push(Operand { address, representation: accumulator, scale: 1.0 });
            }
            operands = blocks;
        }
        let target = self.target + (begin * self.size(self.representation)) as u64;
        self.builder.fold(on, &operands, (target, self.representation), count);
        Ok(())
    }

    /// Before the folds, those that fold wait for all; after them, all wait for those that fold.
    fn meet(&mut self, shares: &[(usize, usize, usize)], before: bool) -> Result<()> {
        let n = self.builder.pointers.len();
        if self.builder.pointers.bytes() / (n * n) >= self.builder.pointers.pairs_from {
            self.meet_in_pairs(shares, before)
        } else {
            self.meet_at_root(shares, before)
        }
    }

    /// Everybody waits for everybody: as soon as can be, by as many calls as there are pairs.
    fn meet_in_pairs(&mut self, shares: &[(usize, usize, usize)], before: bool) -> Result<()> {
        let (n, root, chained) = (self.builder.pointers.len(), self.root, self.builder.pointers.chained);
        let share = |a: usize, b: usize| self.builder.share_stream(a, b);
        // One pointer of each stream stands for all.
        let all: Vec<usize> = (0..n).filter(|&one| (0..one).all(|other| !share(one, other))).collect();
        let folds = |&&one: &&usize| shares.iter().any(|&(on, ..)| share(one, on));
        let folding: Vec<usize> = all.iter().filter(folds).copied().collect();
        let (first, then) = match before {
            true => (all, folding),
            false => (folding, all.into_iter().filter(|&one| !chained || share(one, root)).collect()),
        };
        let mut points = Vec::with_capacity(first.len());
        for &one in first.iter().filter(|&&one| then.iter().any(|&other| other != one)) {
            points.push((one, self.builder.record(one)?));
        }
        for &other in &then {
            for &(_, point) in points.iter().filter(|(one, _)| *one != other) {
                self.builder.wait(other, point);
            }
        }
        Ok(())
    }

    /// All by way of the root's stream: later by one wait, by few calls.
    fn meet_at_root(&mut self, shares: &[(usize, usize, usize)], before: bool) -> Result<()> {
        let (n, root) = (self.builder.pointers.len(), self.root);
        let chained = self.builder.pointers.chained;
        let folds = |index: usize| shares.iter().any(|&(on, ..)| on == index);
        let others = || (0..n).filter(move |&index| index != root);
        for index in others().filter(|&index| before || folds(index)) {
            self.builder.order(index, root)?;
        }
        let waiting: Vec<usize> = others()
            .filter(|&index| if before { folds(index) } else { !chained })
            .filter(|&index| !self.builder.share_stream(index, root))
            .collect();
        if !waiting.is_empty() {
            let all = self.builder.record(root)?;
            for index in waiting {
                self.builder.wait(index, all);
            }
        }
        Ok(())
    }

    fn size(&self, representation: Representation) -> usize {
        match representation {
            Representation::Element => self.dtype.size(),
            Representation::Accumulator => self.dtype.accumulator().size(),
        }
    }

    fn leaf(&self, index: usize) -> Operand {
        let address = self.builder.pointers.addresses[index];
        Operand { address, representation: Representation::Element, scale: self.scale }
    }
}
