//! What a collective ought to give, worked out the plain way, and the check that it gives that and nothing
//! else.

use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context};
use unisono::reduce::{DataType, Operator};
use unisono::schedule::Algorithm;

use super::{Verb, mix};

/// One call that all ranks make, with the data that the check invents for it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) dtype: DataType,
    pub(crate) operator: Operator,
    pub(crate) root: u32,
    pub(crate) counts: Shape,
    pub(crate) in_place: bool,
    pub(crate) algorithm: Option<Algorithm>,
    /// Bytes before the buffers' first element, so that they are not aligned.
    pub(crate) skew: usize,
}

/// How many elements each rank has.
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    /// Equally many.
    Even(u64),
    /// These: by rank, or by sender and receiver (`[s * size + r]`) for alltoall.
    Uneven(Vec<u64>),
}

impl Case {
    pub(crate) fn new(kind: Kind, count: u64) -> Case {
        Case {
            kind,
            dtype: DataType::I32,
            operator: Operator::Sum,
            root: 0,
            counts: Shape::Even(count),
            in_place: false,
            algorithm: None,
            skew: 0,
        }
    }

    fn blocks(&self, size: u32) -> Vec<u64> {
        match &self.counts {
            Shape::Even(count) => vec![*count; size as usize],
            Shape::Uneven(counts) => counts.clone(),
        }
    }

    /// Elements that `from` sends to `to` in an alltoall.
    fn pair(&self, size: u32, from: u32, to: u32) -> u64 {
        match &self.counts {
            Shape::Even(count) => *count,
            Shape::Uneven(counts) => counts[(from * size + to) as usize],
        }
    }

    fn request_counts(&self, rank: u32, size: u32) -> Counts {
        match &self.counts {
            Shape::Even(count) => Counts::Uniform(*count),
            Shape::Uneven(_) if self.kind == Kind::Alltoall => Counts::Exchange {
                send: (0..size).map(|to| self.pair(size, rank, to)).collect(),
                receive: (0..size).map(|from| self.pair(size, from, rank)).collect(),
            },
            Shape::Uneven(counts) => Counts::Blocks(counts.clone()),
        }
    }

    /// Element `index` of what `rank` contributes: small whole numbers, so that every type holds every
    /// result.
    fn value(&self, rank: u32, index: u64) -> i64 {
        let noise = mix(index << 8 | u64::from(rank));
        let noise = (noise >> 8) as i64;
        match self.operator {
            _ if !self.kind.reduces() => noise & 7,
            Operator::Sum | Operator::Average => noise & 1,
            Operator::Product => 1 + (noise & 1),
            Operator::BitAnd | Operator::BitOr | Operator::BitXor => noise & 127,
            _ => noise & 7,
        }
    }

    fn combine(&self, size: u32, index: u64) -> Number {
        let values = (0..size).map(|rank| self.value(rank, index));
        Number::Whole(match self.operator {
            Operator::Sum => values.sum(),
            Operator::Average => return Number::Ratio(values.sum(), i64::from(size)),
            Operator::Product => values.product(),
            Operator::Min => values.min().unwrap_or(0),
            Operator::Max => values.max().unwrap_or(0),
            Operator::BitAnd => values.fold(-1, |a, b| a & b),
            Operator::BitOr => values.fold(0, |a, b| a | b),
            Operator::BitXor => values.fold(0, |a, b| a ^ b),
            Operator::PreMulSum(_) | Operator::Custom(_) => unreachable!("not among the cases"),
        })
    }

    fn input_len(&self, rank: u32, size: u32) -> u64 {
        let blocks = self.blocks(size);
        match self.kind {
            Kind::Allreduce | Kind::Reduce => blocks[0],
            Kind::Broadcast => u64::from(rank == self.root) * blocks[0],
            Kind::Allgather | Kind::Gather => blocks[rank as usize],
            Kind::Scatter => u64::from(rank == self.root) * blocks.iter().sum::<u64>(),
            Kind::ReduceScatter => blocks.iter().sum(),
            Kind::Alltoall => (0..size).map(|to| self.pair(size, rank, to)).sum(),
            _ => 0,
        }
    }

    /// What `rank` obtains.
    fn expected(&self, rank: u32, size: u32) -> Vec<Number> {
        let blocks = self.blocks(size);
        let whole = |owner: u32, range: std::ops::Range<u64>| {
            range.map(move |index| Number::Whole(self.value(owner, index)))
        };
        let before = |rank: u32| blocks[..rank as usize].iter().sum::<u64>();
        let is_root = rank == self.root;
        match self.kind {
            Kind::Allreduce => (0..blocks[0]).map(|index| self.combine(size, index)).collect(),
            Kind::Reduce if is_root => (0..blocks[0]).map(|index| self.combine(size, index)).collect(),
            Kind::Broadcast => whole(self.root, 0..blocks[0]).collect(),
            Kind::Allgather => (0..size).flat_map(|owner| whole(owner, 0..blocks[owner as usize])).collect(),
            Kind::Gather if is_root => {
                (0..size).flat_map(|owner| whole(owner, 0..blocks[owner as usize])).collect()
            }
            Kind::Scatter => whole(self.root, before(rank)..before(rank + 1)).collect(),
            Kind::ReduceScatter => {
                (before(rank)..before(rank + 1)).map(|index| self.combine(size, index)).collect()
            }
            Kind::Alltoall => (0..size)
                .flat_map(|from| {
                    let start: u64 = (0..rank).map(|to| self.pair(size, from, to)).sum();
                    whole(from, start..start + self.pair(size, from, rank))
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Elements between the start of the input and the start of the output when the call is in place; `None`
    /// where this rank's buffers have nothing to do with each other.
    fn alias(&self, rank: u32, size: u32) -> Option<i64> {
        let before = self.blocks(size)[..rank as usize].iter().sum::<u64>() as i64;
        let is_root = rank == self.root;
        match self.kind {
            Kind::Allreduce => Some(0),
            Kind::Reduce | Kind::Broadcast => is_root.then_some(0),
            Kind::Allgather => Some(-before),
            Kind::Gather => is_root.then_some(-before),
            Kind::Scatter => is_root.then_some(before),
            Kind::ReduceScatter => Some(before),
            Kind::Alltoall => matches!(self.counts, Shape::Even(_)).then_some(0),
            _ => None,
        }
    }

    /// Runs the call on this rank and checks what it gives, and that nothing else has changed.
    pub(crate) fn check(&self, context: &Context) {
        if let Err(difference) = self.differs(context) {
            panic!("rank {} of {}: {difference}\nin {self:?}", context.rank(), context.size());
        }
    }

    fn differs(&self, context: &Context) -> Result<(), String> {
        let (rank, size) = (context.rank(), context.size());
        let element = self.dtype.size();
        let given: Vec<u8> = (0..self.input_len(rank, size))
            .flat_map(|index| Number::Whole(self.value(rank, index)).encode(self.dtype))
            .collect();
        let wanted: Vec<u8> =
            self.expected(rank, size).into_iter().flat_map(|number| number.encode(self.dtype)).collect();
        // One piece of memory: margin, input, margin, output, margin; in place, the two are inside each
        // other.
        let first = MARGIN + self.skew;
        let alias =
            self.alias(rank, size).filter(|_| self.in_place).map(|distance| distance * element as i64);
        let (input_at, output_at, len) = match alias {
            Some(distance) => {
                let input_at = first + (-distance).max(0) as usize;
                let output_at = first + distance.max(0) as usize;
                (input_at, output_at, (input_at + given.len()).max(output_at + wanted.len()) + MARGIN)
            }
            None => {
                let output_at = first + given.len() + MARGIN;
                (first, output_at, output_at + wanted.len() + MARGIN)
            }
        };
        let mut memory: Vec<u8> = (0..len).map(|i| mix(i as u64) as u8 | 0x80).collect();
        memory[input_at..input_at + given.len()].copy_from_slice(&given);
        let mut after = memory.clone();
        let verb = Verb {
            kind: self.kind,
            counts: self.request_counts(rank, size),
            dtype: self.dtype,
            operator: self.operator,
            root: self.root,
        };
        let start = after.as_mut_ptr();
        let request = verb.over(start.wrapping_add(input_at).cast_const(), start.wrapping_add(output_at));
        let call = Call { algorithm: self.algorithm.map(|algorithm| algorithm as i32), ..Call::default() };
        // SAFETY: both ranges lie in `after`, which outlives the call.
        unsafe { context.run(&request, &call) }.map_err(|error| format!("{error:?}"))?;
        if let Some(at) = (0..wanted.len()).find(|&at| after[output_at + at] != wanted[at]) {
            let index = at / element;
            let bytes = index * element..(index + 1) * element;
            return Err(format!(
                "element {index} is {:x?}, not {:x?}",
                &after[output_at..][bytes.clone()],
                &wanted[bytes]
            ));
        }
        // In place, blocks of the input that are not output are scratch for some operations.
        let scratch = match (alias, self.kind) {
            (Some(_), Kind::ReduceScatter) => input_at..input_at + given.len(),
            _ => output_at..output_at + wanted.len(),
        };
        let output = output_at..output_at + wanted.len();
        match (0..len).find(|at| !output.contains(at) && !scratch.contains(at) && after[*at] != memory[*at]) {
            Some(at) => {
                Err(format!("byte {at} changed, outside of the output {output:?}; input at {input_at}"))
            }
            None => Ok(()),
        }
    }
}

/// Bytes around the buffers that must not change.
const MARGIN: usize = 64;

/// An exact result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    Whole(i64),
    Ratio(i64, i64),
}

impl Number {
    /// As an element of `dtype`, rounded once.
    pub(crate) fn encode(self, dtype: DataType) -> Vec<u8> {
        let (whole, real, short) = match self {
            Number::Whole(value) => (value, value as f64, value as f32),
            Number::Ratio(a, b) => (a / b, a as f64 / b as f64, a as f32 / b as f32),
        };
        match dtype {
            DataType::I8 => (whole as i8).to_le_bytes().to_vec(),
            DataType::U8 => (whole as u8).to_le_bytes().to_vec(),
            DataType::I32 => (whole as i32).to_le_bytes().to_vec(),
            DataType::U32 => (whole as u32).to_le_bytes().to_vec(),
            DataType::I64 => whole.to_le_bytes().to_vec(),
            DataType::U64 => (whole as u64).to_le_bytes().to_vec(),
            DataType::F32 => short.to_le_bytes().to_vec(),
            DataType::F64 => real.to_le_bytes().to_vec(),
            narrow => narrow_to(narrow, short),
        }
    }
}

/// An accumulator rounded to a short float type, to nearest, ties to even.
pub(crate) fn narrow_to(dtype: DataType, value: f32) -> Vec<u8> {
    match dtype {
        DataType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        DataType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        DataType::F8E4M3 | DataType::F8E5M2 => vec![nearest_f8(dtype, value)],
        wide => unreachable!("{} is not short", wide.name()),
    }
}

/// An element of a short float type as an accumulator.
pub(crate) fn widen_from(dtype: DataType, bytes: &[u8]) -> f32 {
    match dtype {
        DataType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DataType::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DataType::F8E4M3 => widen_f8::<3, 7>(bytes[0]),
        DataType::F8E5M2 => widen_f8::<2, 15>(bytes[0]),
        wide => unreachable!("{} is not short", wide.name()),
    }
}

fn widen_f8<const MANTISSA: u32, const BIAS: i32>(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits & 0x7f) >> MANTISSA);
    let fraction = f32::from(bits & ((1 << MANTISSA) - 1)) / (1 << MANTISSA) as f32;
    let (lead, power) = if exponent == 0 { (0.0, 1 - BIAS) } else { (1.0, exponent - BIAS) };
    sign * (lead + fraction) * (power as f32).exp2()
}

/// The finite code nearest to a value inside the range of the type; of two equally near, the even one.
fn nearest_f8(dtype: DataType, value: f32) -> u8 {
    let highest = if dtype == DataType::F8E4M3 { 0x7e } else { 0x7b };
    let distance = |code: u8| (f64::from(widen_from(dtype, &[code])) - f64::from(value.abs())).abs();
    let code = (0..=highest)
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
        .unwrap_or(0);
    code | if value.is_sign_negative() { 0x80 } else { 0 }
}
