//! What calls are given and what they are to make of it, by plain loops.

use super::program::{Collective, Kind};
use crate::reduce::{DataType, Operator};

/// Numbers that follow from a seed alone.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Less than `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// True once in so many times.
    pub(super) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Any bytes, for what is only moved.
pub(super) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut dice = Dice::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| dice.next().to_ne_bytes()).take(len).collect()
}

/// The seed of what one rank has for another, or for all.
fn seed(id: u64, from: usize, to: usize) -> u64 {
    Dice::new(id ^ ((from as u64) << 40) ^ ((to as u64) << 50)).next()
}

/// Elements whose combination every order of combining rounds alike.
fn numbers(call: &Collective, rank: usize, len: usize) -> Vec<i64> {
    let (size, bits) = (call.parts.len() as i64, call.dtype.size() as u32 * 8);
    let mut dice = Dice::new(seed(call.id, rank, 0));
    let float = matches!(call.dtype, DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64);
    let signed = matches!(call.dtype, DataType::I8 | DataType::I32 | DataType::I64);
    let mut number = || {
        let random = dice.next();
        let small = (random % 15) as i64;
        match (float, call.operator) {
            (true, Operator::Product) => [1, 2, -1][random as usize % 3],
            (true, Operator::Average) => size * (small % 4),
            (true, _) => small - 7,
            (false, Operator::Average) => small,
            (false, _) if signed => random as i64 >> (64 - bits),
            // Comparisons below are signed.
            (false, _) => (random >> (65 - bits.min(63))) as i64,
        }
    };
    (0..len).map(|_| number()).collect()
}

fn encode(dtype: DataType, number: i64) -> Vec<u8> {
    match dtype {
        DataType::F16 => half::f16::from_f64(number as f64).to_ne_bytes().to_vec(),
        DataType::Bf16 => half::bf16::from_f64(number as f64).to_ne_bytes().to_vec(),
        DataType::F32 => (number as f32).to_ne_bytes().to_vec(),
        DataType::F64 => (number as f64).to_ne_bytes().to_vec(),
        _ => number.to_le_bytes()[..dtype.size()].to_vec(),
    }
}

/// What `rank` contributes.
pub(super) fn input(call: &Collective, rank: usize) -> Vec<u8> {
    let size = call.parts.len();
    let one = call.dtype.size();
    if call.kind.reduces() {
        let len = if call.kind == Kind::ReduceScatter { call.lens.iter().sum() } else { call.lens[0] };
        return numbers(call, rank, len).into_iter().flat_map(|number| encode(call.dtype, number)).collect();
    }
    let block = |to: usize| bytes(seed(call.id, rank, to), call.len(rank, to) * one);
    match call.kind {
        Kind::Broadcast | Kind::Scatter if rank != call.root => Vec::new(),
        Kind::Alltoall | Kind::Scatter => (0..size).flat_map(block).collect(),
        Kind::Barrier => Vec::new(),
        _ => block(call.root),
    }
}

/// What `rank` obtains.
pub(super) fn output(call: &Collective, rank: usize) -> Vec<u8> {
    let size = call.parts.len();
    let one = call.dtype.size();
    let range = |rank: usize| {
        let start: usize = call.lens[..rank].iter().sum();
        start * one..(start + call.lens[rank]) * one
    };
    match call.kind {
        Kind::Allreduce => combined(call),
        Kind::Reduce if rank == call.root => combined(call),
        Kind::ReduceScatter => combined(call)[range(rank)].to_vec(),
        Kind::Broadcast => input(call, call.root),
        Kind::Allgather => (0..size).flat_map(|from| input(call, from)).collect(),
        Kind::Gather if rank == call.root => (0..size).flat_map(|from| input(call, from)).collect(),
        Kind::Scatter => input(call, call.root)[range(rank)].to_vec(),
        Kind::Alltoall => {
            (0..size).flat_map(|from| bytes(seed(call.id, from, rank), call.len(from, rank) * one)).collect()
        }
        _ => Vec::new(),
    }
}

/// All ranks' inputs, combined.
fn combined(call: &Collective) -> Vec<u8> {
    let size = call.parts.len();
    let len = if call.kind == Kind::ReduceScatter { call.lens.iter().sum() } else { call.lens[0] };
    let inputs: Vec<Vec<i64>> = (0..size).map(|rank| numbers(call, rank, len)).collect();
    let combine = |a: i64, b: i64| match call.operator {
        Operator::Product => a.wrapping_mul(b),
        Operator::Min => a.min(b),
        Operator::Max => a.max(b),
        Operator::BitAnd => a & b,
        Operator::BitOr => a | b,
        Operator::BitXor => a ^ b,
        _ => a.wrapping_add(b),
    };
    let element = |at: usize| {
        let all = inputs.iter().map(|input| input[at]).reduce(combine).unwrap_or(0);
        encode(call.dtype, if call.operator == Operator::Average { all / size as i64 } else { all })
    };
    (0..len).flat_map(element).collect()
}
