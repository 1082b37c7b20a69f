//! What buffers are filled with, and what must come out: small whole numbers, whose sums are exact in every
//! type.

#![forbid(unsafe_code)]

use super::case::Case;
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// Writes the input of `rank`, `bytes` long.
pub(super) fn fill(case: &Case, rank: u32, bytes: &mut [u8]) {
    let dtype = case.dtype;
    let period = period(case) as usize * dtype.size();
    let (first, rest) = bytes.split_at_mut(period.min(bytes.len()));
    for (index, element) in (0..).zip(first.chunks_exact_mut(dtype.size())) {
        encode(dtype, input(case, rank, index), element);
    }
    for part in rest.chunks_mut(period) {
        part.copy_from_slice(&first[..part.len()]);
    }
}

/// After how many elements inputs repeat themselves, on every rank.
pub(super) fn period(case: &Case) -> u64 {
    // Three for what all add, three times the ranks for the numbers of products.
    ROW * 3 * u64::from(case.size)
}

/// After so many elements the numbers of a rank come again.
const ROW: u64 = 251;

/// How many elements of the output of `rank` are not what they must be. `bytes` begin with element `first`.
pub(super) fn wrong(case: &Case, rank: u32, first: u64, bytes: &[u8]) -> u64 {
    let tolerance = tolerance(case);
    (first..)
        .zip(bytes.chunks_exact(case.dtype.size()))
        .filter(|(index, element)| {
            let (expected, got) = (output(case, rank, *index), decode(case.dtype, element));
            let distance = (got - expected).abs();
            match goes_over(case.dtype, expected) {
                true => !got.is_nan(),
                false => distance.is_nan() || distance > tolerance * expected.abs(),
            }
        })
        .count() as u64
}

/// Whether it is too large for a type, of which it is NaN then. (Others have room for what any number of ranks
/// comes to.)
fn goes_over(dtype: DataType, value: f64) -> bool {
    // In the middle between the largest that there is and the one that would follow.
    dtype == DataType::F8E4M3 && value.abs() > 464.0
}

/// Element `index` of the input of `rank`.
fn input(case: &Case, rank: u32, index: u64) -> i64 {
    let (size, place) = (u64::from(case.size), u64::from(rank));
    match case.operator {
        // One rank alone brings a factor, else products would leave the range of the small types.
        Some(Operator::Product) => 1 + i64::from(index % size == place) * (index / size % 3) as i64,
        // One of four numbers, by chance: so most elements of an input, of two inputs, and of a result, differ.
        operator => {
            let seed = (place * ROW + index % ROW + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let own = (seed ^ seed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 62;
            own as i64 + shift(operator, index)
        }
    }
}

/// What all ranks add to their element, where the numbers of many ranks come to the same result.
fn shift(operator: Option<Operator>, index: u64) -> i64 {
    let turn = (index % 3) as i64;
    match operator {
        Some(Operator::Min | Operator::Max | Operator::Average) => turn,
        Some(Operator::BitAnd | Operator::BitOr) => 4 * turn,
        _ => 0,
    }
}

/// Element `index` of the output of `rank`.
fn output(case: &Case, rank: u32, index: u64) -> f64 {
    let count = case.count().max(1);
    let block = u64::from(rank) * count;
    let root = case.root_or_first();
    match case.kind {
        Kind::Allreduce | Kind::Reduce => reduced(case, index),
        Kind::ReduceScatter => reduced(case, block + index),
        Kind::Broadcast => input(case, root, index) as f64,
        Kind::Scatter => input(case, root, block + index) as f64,
        Kind::Allgather | Kind::Gather => input(case, (index / count) as u32, index % count) as f64,
        Kind::Alltoall => input(case, (index / count) as u32, block + index % count) as f64,
        Kind::Send => input(case, (rank + case.size - 1) % case.size, index) as f64,
        Kind::Barrier | Kind::Receive | Kind::ReceiveAny | Kind::SparseAllreduce => 0.0,
    }
}

/// Element `index` of all inputs combined.
fn reduced(case: &Case, index: u64) -> f64 {
    let operator = case.operator_or_sum();
    let inputs = (0..case.size).map(|rank| input(case, rank, index));
    let combined = inputs.reduce(|a, b| match operator {
        Operator::Product => a * b,
        Operator::Min => a.min(b),
        Operator::Max => a.max(b),
        Operator::BitAnd => a & b,
        Operator::BitOr => a | b,
        Operator::BitXor => a ^ b,
        Operator::Sum | Operator::Average | Operator::PreMulSum(_) | Operator::Custom(_) => a + b,
    });
    let combined = combined.unwrap_or(0);
    match operator {
        Operator::Average if case.dtype.is_float() => combined as f64 / f64::from(case.size),
        Operator::Average => (wrapped(case.dtype, combined) / i64::from(case.size)) as f64,
        Operator::PreMulSum(scale) => wrapped(case.dtype, combined * scale as i64) as f64,
        _ => wrapped(case.dtype, combined) as f64,
    }
}

/// What an integer type makes of a number that it may not hold. (Nothing here reaches 2⁵³.)
fn wrapped(dtype: DataType, value: i64) -> i64 {
    match dtype {
        DataType::I8 => i64::from(value as i8),
        DataType::U8 => i64::from(value as u8),
        _ => value,
    }
}

/// How far from the exact number a result may be, relative to it: half a unit in the last place for what is
/// rounded once, and the rounding of the accumulator's division before that.
fn tolerance(case: &Case) -> f64 {
    match Float::of(case.dtype) {
        Some(float) if case.kind.reduces() => {
            let accumulator = if case.dtype == DataType::F64 { 52 } else { 23 };
            0.5f64.powi(float.mantissa as i32 + 1) + 0.5f64.powi(accumulator + 1)
        }
        _ => 0.0,
    }
}

/// A float format: a sign, exponent bits with the usual bias, mantissa bits.
struct Float {
    exponent: u32,
    mantissa: u32,
    /// Whether the highest exponent holds infinities and NaNs only; else only its last mantissa is a NaN.
    infinity: bool,
}

impl Float {
    fn of(dtype: DataType) -> Option<Float> {
        let float = |exponent, mantissa, infinity| Some(Float { exponent, mantissa, infinity });
        match dtype {
            DataType::F8E4M3 => float(4, 3, false),
            DataType::F8E5M2 => float(5, 2, true),
            DataType::F16 => float(5, 10, true),
            DataType::Bf16 => float(8, 7, true),
            DataType::F32 => float(8, 23, true),
            DataType::F64 => float(11, 52, true),
            _ => None,
        }
    }

    /// The bits of a whole number that the format holds exactly.
    fn bits(&self, value: i64) -> u64 {
        let magnitude = value.unsigned_abs();
        if magnitude == 0 {
            return 0;
        }
        let exponent = 63 - magnitude.leading_zeros();
        let bias = (1 << (self.exponent - 1)) - 1;
        let mantissa = magnitude << self.mantissa >> exponent & ((1 << self.mantissa) - 1);
        let sign = u64::from(value < 0) << (self.exponent + self.mantissa);
        sign | u64::from(exponent + bias) << self.mantissa | mantissa
    }

    fn value(&self, bits: u64) -> f64 {
        let top = (1 << self.exponent) - 1;
        let exponent = (bits >> self.mantissa & top) as i32;
        let mantissa = bits & ((1 << self.mantissa) - 1);
        let sign = if bits >> (self.exponent + self.mantissa) & 1 == 1 { -1.0 } else { 1.0 };
        let last = mantissa == (1 << self.mantissa) - 1;
        if exponent == top as i32 && (self.infinity || last) {
            return if self.infinity && mantissa == 0 { sign * f64::INFINITY } else { f64::NAN };
        }
        let bias = (1 << (self.exponent - 1)) - 1;
        let whole = if exponent == 0 { mantissa } else { mantissa | 1 << self.mantissa };
        sign * whole as f64 * 2f64.powi(exponent.max(1) - bias - self.mantissa as i32)
    }
}

/// A whole number as an element.
pub(super) fn encode(dtype: DataType, value: i64, element: &mut [u8]) {
    let bits = match Float::of(dtype) {
        Some(float) => float.bits(value),
        None => value as u64,
    };
    element.copy_from_slice(&bits.to_le_bytes()[..element.len()]);
}

/// The number that an element is.
pub(super) fn decode(dtype: DataType, element: &[u8]) -> f64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    let bits = u64::from_le_bytes(bytes);
    match dtype {
        DataType::F64 => f64::from_bits(bits),
        DataType::F32 => f64::from(f32::from_bits(bits as u32)),
        DataType::I8 => f64::from(bits as i8),
        DataType::I32 => f64::from(bits as i32),
        DataType::I64 => bits as i64 as f64,
        DataType::U8 | DataType::U32 | DataType::U64 => bits as f64,
        DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => {
            Float::of(dtype).map_or(f64::NAN, |float| float.value(bits))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::options::{CallStyle, Choice, Place, Transport};
    use super::*;

    fn case(kind: Kind, dtype: DataType, operator: Operator) -> Case {
        Case {
            kind,
            asked: 4096,
            dtype,
            operator: kind.reduces().then_some(operator),
            root: Some(1),
            algorithm: Choice::Automatic,
            transport: Transport::Tcp,
            call: CallStyle::Blocking,
            place: Place::Out,
            size: 3,
        }
    }

    #[test]
    fn every_type_holds_the_numbers() {
        for dtype in DataType::ALL {
            for value in 0..=12 {
                let mut element = vec![0; dtype.size()];
                encode(dtype, value, &mut element);
                // f8e5m2 has three significant bits.
                if dtype != DataType::F8E5M2 || value <= 8 {
                    assert_eq!(decode(dtype, &element), value as f64, "{}", dtype.name());
                }
            }
        }
        assert_eq!(decode(DataType::F16, &half::f16::from_f32(-0.3).to_le_bytes()), -0.300_048_828_125);
        assert!(decode(DataType::F8E4M3, &[0x7f]).is_nan());
        assert_eq!(decode(DataType::F8E5M2, &[0x7c]), f64::INFINITY);
    }

    #[test]
    fn a_right_result_passes_and_each_wrong_element_counts() {
        let sum = case(Kind::Allreduce, DataType::Bf16, Operator::Sum);
        let mut result = vec![0; 4096];
        for (index, element) in (0..).zip(result.chunks_exact_mut(2)) {
            let total: i64 = (0..3).map(|rank| input(&sum, rank, index)).sum();
            element.copy_from_slice(&half::bf16::from_f32(total as f32).to_le_bytes());
        }
        assert_eq!(wrong(&sum, 0, 0, &result), 0);
        result[11] ^= 0x80;
        result[101] = 0x7f;
        result[100] = 0xff;
        assert_eq!(wrong(&sum, 0, 0, &result), 2);
    }

    #[test]
    fn what_is_too_large_for_its_type_is_to_be_nan() {
        // Two times three of each rank at most.
        let mut sum = case(Kind::Allreduce, DataType::F8E4M3, Operator::PreMulSum(2.0));
        sum.size = 160;
        let total = |index| reduced(&sum, index);
        let [over, within] =
            [true, false].map(|over| (0..ROW).find(|&at| (total(at) > 464.0) == over).unwrap());
        let wrong_at = |index, bits| wrong(&sum, 0, index, &[bits]);
        assert_eq!([wrong_at(over, 0x7f), wrong_at(over, 0x7e)], [0, 1]);
        assert_eq!(wrong_at(within, 0x7f), 1);
    }

    #[test]
    fn inputs_repeat_themselves_after_a_period() {
        for operator in [Operator::Sum, Operator::Product] {
            let case = case(Kind::Allreduce, DataType::F32, operator);
            for index in 0..5000 {
                assert_eq!(
                    input(&case, 2, index),
                    input(&case, 2, index + period(&case)),
                    "{operator:?} {index}"
                );
            }
        }
    }

    #[test]
    fn each_element_of_a_long_input_is_filled() {
        let case = case(Kind::Allreduce, DataType::F16, Operator::Product);
        let mut bytes = vec![0xee; 2 * (2 * period(&case) as usize + 5)];
        fill(&case, 1, &mut bytes);
        for (index, element) in (0..).zip(bytes.chunks_exact(2)) {
            assert_eq!(decode(DataType::F16, element), input(&case, 1, index) as f64, "{index}");
        }
    }

    #[test]
    fn a_missing_or_doubled_contribution_shows() {
        for operator in [Operator::Sum, Operator::Product] {
            let sum = case(Kind::Allreduce, DataType::F8E5M2, operator);
            for (count, absent) in [(0, true), (2, false)] {
                let differ = (0..1000).filter(|&index| {
                    let own = input(&sum, 1, index);
                    let all = reduced(&sum, index);
                    let other = match (operator, absent) {
                        (Operator::Sum, _) => all + (count as f64 - 1.0) * own as f64,
                        (_, true) => all / own as f64,
                        (_, false) => all * own as f64,
                    };
                    (other - all).abs() > tolerance(&sum) * all
                });
                assert!(differ.count() > 100, "{operator:?} {count}");
            }
        }
    }

    /// Else a block at another's place would pass.
    #[test]
    fn each_rank_has_an_input_of_its_own() {
        let sum = Case { size: 256, ..case(Kind::Allgather, DataType::F32, Operator::Sum) };
        let inputs: HashSet<Vec<i64>> =
            (0..256).map(|rank| (0..16).map(|index| input(&sum, rank, index)).collect()).collect();
        assert_eq!(inputs.len(), 256);
        for (rank, other) in (0..256).flat_map(|rank| (0..rank).map(move |other| (rank, other))) {
            let alike = (0..1000).filter(|&index| input(&sum, rank, index) == input(&sum, other, index));
            assert!(alike.count() < 500, "{rank} and {other}");
        }
    }

    /// Else one at another's place would pass.
    #[test]
    fn elements_of_a_result_differ() {
        use Operator::*;
        for size in [2, 3, 4, 8, 12, 16] {
            for operator in [Sum, Average, Min, Max, BitAnd, BitOr, BitXor, Product] {
                let case = Case { size, ..case(Kind::Allreduce, DataType::I32, operator) };
                for distance in [1, 2, 4, 16, 61, 256, 1024, 65536] {
                    let differs = |index: &u64| reduced(&case, *index) != reduced(&case, index + distance);
                    let differ = (0..1000).filter(differs).count();
                    let least = if operator == Product { 50 } else { 400 };
                    assert!(differ > least, "{size} {operator:?} {distance}: {differ}");
                }
            }
        }
    }

    #[test]
    fn integers_wrap_and_averages_truncate() {
        let large = Case { size: 200, ..case(Kind::Allreduce, DataType::I8, Operator::Average) };
        let sum: i64 = (0..200).map(|rank| input(&large, rank, 5)).sum();
        assert!(sum > 127);
        assert_eq!(reduced(&large, 5), (i64::from(sum as i8) / 200) as f64);
    }
}
