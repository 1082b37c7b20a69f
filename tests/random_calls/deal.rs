//! What calls are given and give, and the memory that they have it in.

use std::ops::Range;

use crate::support::reference::{Case, Number, Shape};
use crate::support::{mix, pattern};
use unisono::collective::request::{Counts, Kind};
use unisono::reduce::Operator;

/// Bytes around buffers, which must not change.
const MARGIN: usize = 64;

/// Elements after which inputs are the same again: no piece is a multiple of so many.
const PERIOD: u64 = 251;

/// Part of what one rank has, or of what all have together: from this element on, so many.
struct Part {
    of: Option<u32>,
    from: u64,
    len: u64,
}

/// A call's data, on one rank.
pub(crate) struct Deal<'a> {
    pub(crate) case: &'a Case,
    pub(crate) salt: u64,
    pub(crate) rank: u32,
    pub(crate) size: u32,
}

impl Deal<'_> {
    /// Elements that `from` has for `to`.
    fn block(&self, from: u32, to: u32) -> u64 {
        match (&self.case.counts, self.case.kind) {
            (Shape::Even(count), _) => *count,
            (Shape::Uneven(counts), Kind::Alltoall) => counts[(from * self.size + to) as usize],
            (Shape::Uneven(counts), Kind::Scatter | Kind::ReduceScatter) => counts[to as usize],
            (Shape::Uneven(counts), _) => counts[from as usize],
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        match &self.case.counts {
            Shape::Even(count) => Counts::Uniform(*count),
            Shape::Uneven(_) if self.case.kind == Kind::Alltoall => Counts::Exchange {
                send: (0..self.size).map(|to| self.block(self.rank, to)).collect(),
                receive: (0..self.size).map(|from| self.block(from, self.rank)).collect(),
            },
            Shape::Uneven(counts) => Counts::Blocks(counts.clone()),
        }
    }

    fn is_root(&self) -> bool {
        self.rank == self.case.root
    }

    /// Elements of this rank's input.
    fn input_len(&self) -> u64 {
        let all = || (0..self.size).map(|to| self.block(self.rank, to)).sum();
        match self.case.kind {
            Kind::Broadcast | Kind::Scatter if !self.is_root() => 0,
            Kind::Barrier => 0,
            Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall => all(),
            _ => self.block(self.rank, self.rank),
        }
    }

    fn wanted(&self) -> Vec<Part> {
        let part = |of, from, len| Part { of, from, len };
        let before = |from: u32, to: u32| (0..to).map(|to| self.block(from, to)).sum();
        let (rank, root) = (self.rank, self.case.root);
        let count = self.block(rank, rank);
        match self.case.kind {
            Kind::Reduce | Kind::Gather if !self.is_root() => Vec::new(),
            Kind::Allreduce | Kind::Reduce => vec![part(None, 0, count)],
            Kind::Broadcast => vec![part(Some(root), 0, count)],
            Kind::Allgather | Kind::Gather => {
                (0..self.size).map(|owner| part(Some(owner), 0, self.block(owner, owner))).collect()
            }
            Kind::Scatter => vec![part(Some(root), before(root, rank), count)],
            Kind::ReduceScatter => vec![part(None, before(rank, rank), count)],
            Kind::Alltoall => (0..self.size)
                .map(|from| part(Some(from), before(from, rank), self.block(from, rank)))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The ranks without which this one has no result.
    pub(crate) fn needs(&self) -> Vec<u32> {
        let others = || (0..self.size).filter(|&other| other != self.rank);
        let parts = self.wanted();
        match self.case.kind {
            Kind::Barrier => others().collect(),
            _ => others()
                .filter(|&other| {
                    parts.iter().any(|part| part.len > 0 && part.of.is_none_or(|of| of == other))
                })
                .collect(),
        }
    }

    /// Elements from the start of the input to that of the output, in place; `None`: there is no such form
    /// here.
    fn in_place(&self) -> Option<i64> {
        let before: u64 = match self.case.kind {
            Kind::Scatter | Kind::ReduceScatter => (0..self.rank).map(|to| self.block(self.rank, to)).sum(),
            _ => (0..self.rank).map(|owner| self.block(owner, owner)).sum(),
        };
        let before = before as i64;
        match self.case.kind {
            Kind::Allreduce => Some(0),
            Kind::Reduce | Kind::Broadcast => self.is_root().then_some(0),
            Kind::Allgather => Some(-before),
            Kind::Gather => self.is_root().then_some(-before),
            Kind::Scatter => self.is_root().then_some(before),
            Kind::ReduceScatter => Some(before),
            Kind::Alltoall => matches!(self.case.counts, Shape::Even(_)).then_some(0),
            _ => None,
        }
        .filter(|_| self.case.in_place)
    }

    /// Small whole numbers, so that every type holds every result.
    fn value(&self, rank: u32, index: u64) -> i64 {
        let noise = (mix(self.salt << 32 | u64::from(rank) << 16 | index) >> 8) as i64;
        match self.case.operator {
            Operator::Sum | Operator::Average => noise & 1,
            Operator::Product => 1 + (noise & 1),
            Operator::BitAnd | Operator::BitOr | Operator::BitXor => noise & 127,
            _ => noise & 7,
        }
    }

    fn combine(&self, index: u64) -> Number {
        let values = (0..self.size).map(|rank| self.value(rank, index));
        Number::Whole(match self.case.operator {
            Operator::Sum => values.sum(),
            Operator::Average => return Number::Ratio(values.sum(), self.size.into()),
            Operator::Product => values.product(),
            Operator::Min => values.min().unwrap_or(0),
            Operator::Max => values.max().unwrap_or(0),
            Operator::BitAnd => values.fold(-1, |a, b| a & b),
            Operator::BitOr => values.fold(0, |a, b| a | b),
            Operator::BitXor => values.fold(0, |a, b| a ^ b),
            Operator::PreMulSum(_) | Operator::Custom(_) => unreachable!("not among the cases"),
        })
    }

    /// The bytes of a part. What is only moved is any bytes at all.
    fn bytes(&self, part: &Part) -> Vec<u8> {
        let element = self.case.dtype.size();
        let period: Vec<u8> = match part.of {
            Some(rank) if !self.case.kind.reduces() => noise(self.salt << 8 | u64::from(rank), element),
            Some(rank) => (0..PERIOD)
                .flat_map(|index| Number::Whole(self.value(rank, index)).encode(self.case.dtype))
                .collect(),
            None => (0..PERIOD).flat_map(|index| self.combine(index).encode(self.case.dtype)).collect(),
        };
        tile(&period, (part.from % PERIOD) as usize * element, part.len as usize * element)
    }
}

pub(crate) fn noise(seed: u64, element: usize) -> Vec<u8> {
    pattern(mix(seed) >> 32, PERIOD as usize * element)
}

/// `len` bytes of what repeats, from there on.
pub(crate) fn tile(period: &[u8], from: usize, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + period.len());
    bytes.extend_from_slice(&period[from..]);
    while bytes.len() < len {
        bytes.extend_from_slice(period);
    }
    bytes.truncate(len);
    bytes
}

/// The memory of a call.
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    pub(crate) before: Vec<u8>,
    pub(crate) input: usize,
    pub(crate) output: Range<usize>,
    pub(crate) wanted: Vec<u8>,
}

impl Memory {
    /// Margin, input, margin, output, margin; or one inside the other, so many bytes apart.
    pub(crate) fn new(given: &[u8], wanted: Vec<u8>, apart: Option<i64>, skew: usize) -> Memory {
        let first = MARGIN + skew;
        let (input, output) = match apart {
            Some(apart) => (first + (-apart).max(0) as usize, first + apart.max(0) as usize),
            None => (first, first + given.len() + MARGIN),
        };
        let len = (input + given.len()).max(output + wanted.len()) + MARGIN;
        let mut bytes = tile(&noise(7, 1), 0, len);
        bytes[input..input + given.len()].copy_from_slice(given);
        let before = bytes.clone();
        Memory { bytes, before, input, output: output..output + wanted.len(), wanted }
    }

    pub(crate) fn of(deal: &Deal) -> Memory {
        let input = Part { of: Some(deal.rank), from: 0, len: deal.input_len() };
        let wanted = deal.wanted().iter().flat_map(|part| deal.bytes(part)).collect();
        let apart = deal.in_place().map(|elements| elements * deal.case.dtype.size() as i64);
        Memory::new(&deal.bytes(&input), wanted, apart, deal.case.skew)
    }

    /// What is not output is as it was.
    pub(crate) fn check_rest(&self, what: &str) {
        let Range { start, end } = self.output;
        let same = self.bytes[..start] == self.before[..start] && self.bytes[end..] == self.before[end..];
        if !same {
            let at = (0..self.bytes.len())
                .find(|&at| !(start..end).contains(&at) && self.bytes[at] != self.before[at]);
            panic!("{what}: byte {at:?} has changed; input from {}, output {:?}", self.input, self.output);
        }
    }

    pub(crate) fn check_result(&self, what: &str) {
        let output = &self.bytes[self.output.clone()];
        if *output != self.wanted {
            let at = (0..output.len()).find(|&at| output[at] != self.wanted[at]).expect("one");
            panic!("{what}: byte {at} of {} is {}, not {}", output.len(), output[at], self.wanted[at]);
        }
    }
}
