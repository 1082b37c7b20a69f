//! The direct reduction: devices read what they fold from each other, and write results to the root.
//!
//! What counts is the bytes that a device takes in: operands that are elsewhere, and, for the root's, what
//! others have folded. So a device first folds a subtree of the canonical tree whose pointers are all its
//! own, if the sum is fewer bytes than its operands, and the elements are dealt out so that all devices take
//! in the same.

use std::ops::Range;

use super::Operand;
use super::reduce::Reduction;
use crate::error::{Result, fail};
use crate::reduce::Representation;

/// The most chunks in which partial sums are made ahead of what reads them. Each is twice as long as the one
/// before: a device folds more than twice as much of its own in the time that the links take.
const CHUNKS: u32 = 4;

/// Writes the program.
pub(super) fn reduce(reduction: &mut Reduction) -> Result<()> {
    let pointers = &reduction.builder.pointers;
    let n = pointers.len();
    for (a, b) in (0..n).flat_map(|a| (0..a).map(move |b| (a, b))) {
        if !reduction.builder.direct(a, b)? {
            let (one, other) = (pointers.device(a), pointers.device(b));
            fail!(
                Unsupported,
                "devices {one} and {other} do not reach each other, or not what pointers[{b}] and pointers[{a}] have there (memory of \
                 a pool, or mapped by the program); use the tree"
            );
        }
    }
    let is_long = pointers.bytes() / (n * n) >= pointers.pairs_from;
    let mut direct = Direct::new(reduction);
    if is_long { direct.write_long() } else { direct.write_short() }
}

/// A subtree whose pointers are all on one device, which folds it for the others.
struct Partial {
    /// The pointer that leads on that device.
    lead: usize,
    /// In the order of operands.
    places: Range<usize>,
    /// Accumulators of all elements.
    sum: u64,
}

/// Elements that a device folds.
struct Share {
    lead: usize,
    elements: Range<usize>,
}

struct Direct<'a> {
    reduction: &'a mut Reduction,
    /// For each pointer, whose stream does all that is done on its device: the root's, or that of the first
    /// that is there.
    leads: Vec<usize>,
    /// The pointers in the order in which they are combined.
    order: Vec<usize>,
    partials: Vec<Partial>,
}

impl<'a> Direct<'a> {
    fn new(reduction: &'a mut Reduction) -> Direct<'a> {
        let pointers = &reduction.builder.pointers;
        let device = |index: usize| pointers.device(index);
        let root = reduction.root;
        let lead = |index: usize| match (0..index).find(|&other| device(other) == device(index)) {
            _ if device(index) == device(root) => root,
            Some(first) => first,
            None => index,
        };
        let leads = (0..pointers.len()).map(lead).collect();
        let mut order: Vec<usize> = (0..pointers.len()).collect();
        // Integers give the same bits in any order.
        if !reduction.dtype.is_float() {
            let mut places: Vec<(usize, usize)> =
                order.iter().map(|&index| (device(index) as usize, index)).collect();
            places.sort_unstable();
            order = places.into_iter().map(|(_, index)| index).collect();
        }
        Direct { reduction, leads, order, partials: Vec::new() }
    }

    /// All streams meet at the root's: few calls.
    fn write_short(&mut self) -> Result<()> {
        let shares = self.shares(0..self.reduction.count, &self.weights(&[]));
        let folding: Vec<usize> = shares.iter().map(|share| share.lead).collect();
        self.meet_at_root(&folding, true)?;
        self.fold_shares(&shares, &[])?;
        self.meet_at_root(&folding, false)
    }

    /// Streams wait for those that concern them, as soon as can be, and devices fold for each other.
    fn write_long(&mut self) -> Result<()> {
        let mut subtrees = Vec::new();
        self.find_subtrees(0..self.order.len(), &mut subtrees);
        let weights = self.weights(&subtrees);
        for places in subtrees {
            let lead = self.leads[self.order[places.start]];
            if weights.iter().any(|&(other, _)| other != lead) {
                let bytes = self.reduction.count * self.reduction.size(Representation::Accumulator);
                let sum = self.reduction.builder.scratch(lead, bytes)?;
                self.partials.push(Partial { lead, places, sum });
            }
        }
        let chunks: Vec<Vec<Share>> =
            self.chunks().into_iter().map(|elements| self.shares(elements, &weights)).collect();
        let mut folding: Vec<usize> = chunks.iter().flatten().map(|share| share.lead).collect();
        folding.sort_unstable();
        folding.dedup();
        self.relate(&self.edges_before(&folding))?;
        let mut ready = self.fold_partials(&chunks[0])?;
        for (index, shares) in chunks.iter().enumerate() {
            // Ahead, so that they are there when their turn comes.
            let next = chunks.get(index + 1).map_or(Ok(Vec::new()), |next| self.fold_partials(next))?;
            self.fold_shares(shares, &ready)?;
            ready = next;
        }
        self.relate(&self.edges_after(&folding))
    }

    /// The largest subtrees of these places whose pointers are all on one device, and more bytes than their
    /// sum.
    fn find_subtrees(&self, places: Range<usize>, found: &mut Vec<Range<usize>>) {
        let accumulator = self.reduction.size(Representation::Accumulator);
        if places.len() * self.reduction.dtype.size() <= accumulator {
            return;
        }
        let mut leads = self.order[places.clone()].iter().map(|&index| self.leads[index]);
        let first = leads.next();
        if leads.all(|lead| Some(lead) == first) {
            found.push(places);
        } else {
            let middle = places.start + places.len().next_power_of_two() / 2;
            self.find_subtrees(places.start..middle, found);
            self.find_subtrees(middle..places.end, found);
        }
    }

    /// Whose devices fold results, and how much in proportion; never empty. Where each pointer has a device
    /// of its own, the root's folds nothing: then every link carries the vector once, each way.
    fn weights(&self, subtrees: &[Range<usize>]) -> Vec<(usize, f64)> {
        let (root, n) = (self.reduction.root, self.order.len());
        let accumulator = self.reduction.size(Representation::Accumulator) as f64;
        let sum = accumulator / self.reduction.dtype.size() as f64;
        // How much stands in a place, in units of a pointer.
        let mut sizes = vec![1.0; n];
        for places in subtrees {
            sizes[places.clone()].fill(0.0);
            sizes[places.start] = sum;
        }
        // What a device takes in if it folds all.
        let far = |lead: usize| -> f64 {
            let places = self.order.iter().zip(&sizes);
            places.filter(|&(&index, _)| self.leads[index] != lead).map(|(_, size)| size).sum()
        };
        let mut weights = vec![(root, 1.0)];
        if far(root) > 1.0 {
            // What a device takes in when all take in the same.
            let others = (0..n).filter(|&index| index != root && self.leads[index] == index);
            let others: Vec<(usize, f64)> = others.map(|lead| (lead, 1.0 / far(lead))).collect();
            if let [other] = others[..] {
                // Results take whoever writes them as long as the root: between two devices only operands
                // count. Measured for 8 pointers in turn: 2.18 ms for 2.29.
                return vec![(root, 1.0 / far(root)), other];
            }
            let rates: f64 = others.iter().map(|(_, rate)| rate).sum();
            let relief = 1.0 / (far(root) - 1.0);
            let taken = (1.0 + relief) / (rates + relief);
            weights[0].1 = ((taken - 1.0) * relief).max(0.0);
            weights.extend(others.iter().map(|&(lead, rate)| (lead, taken * rate)));
        }
        weights
    }

    /// The chunks of the elements; never empty.
    fn chunks(&self) -> Vec<Range<usize>> {
        let (count, bytes) = (self.reduction.count, self.reduction.builder.pointers.bytes());
        let first = self.reduction.builder.pointers.first_chunk;
        let parts = if self.partials.is_empty() { 1 } else { (bytes / first + 1).ilog2().clamp(1, CHUNKS) };
        let total = (1 << parts) - 1;
        let bound = |part: u32| match part == parts {
            true => count,
            false => self.aligned(count as f64 * f64::from((1 << part) - 1) / f64::from(total)).min(count),
        };
        (0..parts).map(|part| bound(part)..bound(part + 1)).collect()
    }

    /// Deals elements out; nobody gets an empty share.
    fn shares(&self, elements: Range<usize>, weights: &[(usize, f64)]) -> Vec<Share> {
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let (mut shares, mut begin, mut passed) = (Vec::new(), elements.start, 0.0);
        for (place, &(lead, weight)) in weights.iter().enumerate() {
            passed += weight;
            let is_last = place + 1 == weights.len();
            let end = match is_last {
                true => elements.end,
                false => {
                    let dealt = self.aligned(elements.len() as f64 * passed / total);
                    (elements.start + dealt).min(elements.end)
                }
            };
            if end > begin {
                shares.push(Share { lead, elements: begin..end });
                begin = end;
            }
        }
        shares
    }

    /// So many elements, rounded to 128 bytes of the pointers, whatever the type.
    fn aligned(&self, elements: f64) -> usize {
        let unit = 128 / self.reduction.dtype.size();
        (elements / unit as f64).round() as usize * unit
    }

    /// Folds what the others will read of the partial sums. Answers after which event of which lead they are
    /// there.
    fn fold_partials(&mut self, shares: &[Share]) -> Result<Vec<(usize, usize)>> {
        let accumulator = Representation::Accumulator;
        let size = self.reduction.size(accumulator);
        for index in 0..self.partials.len() {
            let Partial { lead, ref places, sum } = self.partials[index];
            let operands: Vec<Operand> =
                self.order[places.clone()].iter().map(|&pointer| self.reduction.leaf(pointer)).collect();
            let foreign = |share: &Share| share.lead != lead;
            for run in shares.chunk_by(|a, b| foreign(a) == foreign(b)).filter(|run| foreign(&run[0])) {
                let elements = run[0].elements.start..run[run.len() - 1].elements.end;
                let target = (sum + (elements.start * size) as u64, accumulator);
                self.reduction.fold(lead, &operands, elements, target)?;
            }
        }
        let is_read = |lead: &usize| shares.iter().any(|share| share.lead != *lead);
        let mut leads: Vec<usize> =
            self.partials.iter().map(|partial| partial.lead).filter(is_read).collect();
        leads.sort_unstable();
        leads.dedup();
        leads.into_iter().map(|lead| Ok((lead, self.reduction.builder.record(lead)?))).collect()
    }

    /// Folds results, once the partial sums of others are there.
    fn fold_shares(&mut self, shares: &[Share], ready: &[(usize, usize)]) -> Result<()> {
        let (target, representation) = (self.reduction.target, self.reduction.representation);
        let size = self.reduction.size(representation);
        for &Share { lead, ref elements } in shares {
            for &(_, event) in ready.iter().filter(|&&(other, _)| other != lead) {
                self.reduction.builder.wait(lead, event);
            }
            let mut operands: Vec<Operand> =
                self.order.iter().map(|&pointer| self.reduction.leaf(pointer)).collect();
            for partial in self.partials.iter().filter(|partial| partial.lead != lead) {
                operands[partial.places.clone()].fill(Operand::ABSENT);
                operands[partial.places.start] =
                    Operand { address: partial.sum, representation: Representation::Accumulator, scale: 1.0 };
            }
            let target = (target + (elements.start * size) as u64, representation);
            self.reduction.fold(lead, &operands, elements.clone(), target)?;
        }
        Ok(())
    }

    /// Which streams' work comes before whose folds, by their pointers, when `folding` fold results. Who
    /// reads a partial sum waits for it, and so for all that its lead waited for.
    fn edges_before(&self, folding: &[usize]) -> Vec<(usize, usize)> {
        let mut edges = Vec::new();
        for (index, &lead) in self.leads.iter().enumerate() {
            if self.partials.iter().any(|partial| partial.lead == lead) {
                edges.push((index, lead));
            } else {
                edges.extend(folding.iter().map(|&lead| (index, lead)));
            }
        }
        edges
    }

    /// Which streams wait for whose folds: the root's for the result, and, unless a broadcast sees to it, the
    /// others until what is theirs has been read.
    fn edges_after(&self, folding: &[usize]) -> Vec<(usize, usize)> {
        let mut edges: Vec<(usize, usize)> = Vec::new();
        let read_by_all = |index: usize| folding.iter().map(move |&lead| (lead, index));
        edges.extend(read_by_all(self.reduction.root));
        if self.reduction.builder.pointers.chained {
            return edges;
        }
        let mut guarded = Vec::new();
        for (place, &index) in self.order.iter().enumerate() {
            match self.partials.iter().find(|partial| partial.places.contains(&place)) {
                Some(partial) => edges.push((partial.lead, index)),
                None => {
                    edges.extend(read_by_all(index));
                    guarded.push(self.leads[index]);
                }
            }
        }
        // The next run writes the sums again, after all that its lead waits for: that may be a pointer which
        // all have read.
        let bare = self.partials.iter().map(|partial| partial.lead).filter(|lead| !guarded.contains(lead));
        edges.extend(bare.flat_map(read_by_all));
        edges
    }

    /// Has streams wait for each other, each pair of them once.
    fn relate(&mut self, edges: &[(usize, usize)]) -> Result<()> {
        let builder = &mut self.reduction.builder;
        // One pointer of each stream stands for all.
        let first =
            |index: usize| (0..index).find(|&other| builder.share_stream(other, index)).unwrap_or(index);
        let mut pairs: Vec<(usize, usize)> =
            edges.iter().map(|&(from, to)| (first(from), first(to))).collect();
        pairs.retain(|(from, to)| from != to);
        pairs.sort_unstable();
        pairs.dedup();
        let mut points = Vec::with_capacity(pairs.len());
        for of_one in pairs.chunk_by(|a, b| a.0 == b.0) {
            let point = builder.record(of_one[0].0)?;
            points.extend(of_one.iter().map(|&(_, to)| (to, point)));
        }
        points.into_iter().for_each(|(to, point)| builder.wait(to, point));
        Ok(())
    }

    /// All by way of the root's stream: later by one wait, by few calls.
    fn meet_at_root(&mut self, folding: &[usize], before: bool) -> Result<()> {
        let root = self.reduction.root;
        let builder = &mut self.reduction.builder;
        let chained = builder.pointers.chained;
        let others = || (0..self.leads.len()).filter(move |&index| index != root);
        for index in others().filter(|index| before || folding.contains(index)) {
            builder.order(index, root)?;
        }
        let waiting: Vec<usize> = others()
            .filter(|index| if before { folding.contains(index) } else { !chained })
            .filter(|&index| !builder.share_stream(index, root))
            .collect();
        if !waiting.is_empty() {
            let all = builder.record(root)?;
            waiting.into_iter().for_each(|index| builder.wait(index, all));
        }
        Ok(())
    }
}
