//! Every kernel against an evaluation of its own: element by element, in wide integers, with the `half`
//! crate's conversions and a search through all values of the 8-bit floats.

use std::ffi::c_void;

use super::select::Level;
use super::*;
use crate::error::Status;

/// A value in accumulator precision.
#[derive(Clone, Copy, Debug)]
enum Value {
    Integer(i128),
    Single(f32),
    Double(f64),
}

impl Value {
    fn is_nan(self) -> bool {
        match self {
            Value::Integer(_) => false,
            Value::Single(v) => v.is_nan(),
            Value::Double(v) => v.is_nan(),
        }
    }
}

/// The reference's view of a type.
#[derive(Clone, Copy)]
struct Oracle(DataType);

impl Oracle {
    /// An integer brought into the type's range, as wrapping arithmetic does.
    fn wrap(self, value: i128) -> i128 {
        match self.0 {
            DataType::I8 => i128::from(value as i8),
            DataType::U8 => i128::from(value as u8),
            DataType::I32 => i128::from(value as i32),
            DataType::U32 => i128::from(value as u32),
            DataType::I64 => i128::from(value as i64),
            DataType::U64 => i128::from(value as u64),
            _ => unreachable!("a float"),
        }
    }

    fn decode(self, bytes: &[u8]) -> Value {
        let mut wide = [0; 16];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u128::from_le_bytes(wide);
        match self.0 {
            DataType::F16 => Value::Single(half::f16::from_bits(bits as u16).to_f32()),
            DataType::Bf16 => Value::Single(half::bf16::from_bits(bits as u16).to_f32()),
            DataType::F8E4M3 => Value::Single(decode_f8(self.0, bits as u8)),
            DataType::F8E5M2 => Value::Single(decode_f8(self.0, bits as u8)),
            DataType::F32 => Value::Single(f32::from_bits(bits as u32)),
            DataType::F64 => Value::Double(f64::from_bits(bits as u64)),
            _ => Value::Integer(self.wrap(bits as i128)),
        }
    }

    /// The bytes of an element, the lowest first, as an integer.
    fn encode(self, value: Value) -> u64 {
        match (self.0, value) {
            (DataType::F16, Value::Single(v)) if v.is_nan() => 0x7e00,
            (DataType::F16, Value::Single(v)) => half::f16::from_f32(v).to_bits().into(),
            (DataType::Bf16, Value::Single(v)) if v.is_nan() => 0x7fc0,
            (DataType::Bf16, Value::Single(v)) => half::bf16::from_f32(v).to_bits().into(),
            (DataType::F8E4M3 | DataType::F8E5M2, Value::Single(v)) => nearest_f8(self.0, v).into(),
            (DataType::F32, Value::Single(v)) if v.is_nan() => 0x7fc0_0000,
            (DataType::F32, Value::Single(v)) => v.to_bits().into(),
            (DataType::F64, Value::Double(v)) if v.is_nan() => 0x7ff8_0000_0000_0000,
            (DataType::F64, Value::Double(v)) => v.to_bits(),
            (_, Value::Integer(v)) => v as u64 & (u64::MAX >> (64 - 8 * self.0.size())),
            other => unreachable!("{other:?}"),
        }
    }

    fn combine(self, operator: &Operator, left: Value, right: Value) -> Value {
        match (left, right) {
            (Value::Integer(a), Value::Integer(b)) => Value::Integer(self.wrap(match operator {
                Operator::Sum | Operator::Average | Operator::PreMulSum(_) => a + b,
                Operator::Product => a.wrapping_mul(b),
                Operator::Min => a.min(b),
                Operator::Max => a.max(b),
                Operator::BitAnd => a & b,
                Operator::BitOr => a | b,
                Operator::BitXor => a ^ b,
                Operator::Custom(_) => unreachable!(),
            })),
            (Value::Single(a), Value::Single(b)) => Value::Single(match operator {
                Operator::Sum | Operator::Average | Operator::PreMulSum(_) => a + b,
                Operator::Product => a * b,
                // Every `f32` is an `f64`, so the choice can be made there.
                _ => choose(operator, a.into(), b.into()) as f32,
            }),
            (Value::Double(a), Value::Double(b)) => Value::Double(match operator {
                Operator::Sum | Operator::Average | Operator::PreMulSum(_) => a + b,
                Operator::Product => a * b,
                _ => choose(operator, a, b),
            }),
            other => unreachable!("{other:?}"),
        }
    }

    fn tree(self, operator: &Operator, values: &[Value]) -> Value {
        if let [single] = values {
            return *single;
        }
        let mut half = 1;
        while half * 2 < values.len() {
            half *= 2;
        }
        let (left, right) = values.split_at(half);
        self.combine(operator, self.tree(operator, left), self.tree(operator, right))
    }

    fn scale(self, value: Value, scale: f64) -> Value {
        match value {
            Value::Integer(v) => {
                let (low, high) = match self.0 {
                    DataType::I8 | DataType::I32 | DataType::I64 => {
                        (-(1i128 << (8 * self.0.size() - 1)), (1i128 << (8 * self.0.size() - 1)) - 1)
                    }
                    _ => (0, (1i128 << (8 * self.0.size())) - 1),
                };
                Value::Integer(self.wrap(v.wrapping_mul((scale as i128).clamp(low, high))))
            }
            Value::Single(v) => Value::Single(v * scale as f32),
            Value::Double(v) => Value::Double(v * scale),
        }
    }

    fn divide(self, value: Value, ranks: u32) -> Value {
        match value {
            Value::Integer(v) => Value::Integer(v / i128::from(ranks)),
            Value::Single(v) => Value::Single(v / ranks as f32),
            Value::Double(v) => Value::Double(v / f64::from(ranks)),
        }
    }
}

fn choose(operator: &Operator, a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    match operator {
        Operator::Min if a.total_cmp(&b).is_lt() => a,
        Operator::Max if a.total_cmp(&b).is_gt() => a,
        Operator::Min | Operator::Max => b,
        other => unreachable!("{other:?}"),
    }
}

fn decode_f8(dtype: DataType, bits: u8) -> f32 {
    let (mantissa_bits, bias) = if dtype == DataType::F8E4M3 { (3, 7) } else { (2, 15) };
    let magnitude = i32::from(bits & 0x7f);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let unit = 2f32.powi(exponent.max(1) - bias - mantissa_bits);
    match (dtype, exponent, mantissa) {
        (DataType::F8E4M3, 15, 7) => f32::NAN,
        (DataType::F8E5M2, 31, 0) => sign * f32::INFINITY,
        (DataType::F8E5M2, 31, _) => f32::NAN,
        (_, 0, _) => sign * mantissa as f32 * unit,
        _ => sign * (mantissa + (1 << mantissa_bits)) as f32 * unit,
    }
}

fn nearest_f8(dtype: DataType, value: f32) -> u8 {
    let (last, beyond, nan) =
        if dtype == DataType::F8E4M3 { (0x7e, 480.0, 0x7f) } else { (0x7b, 65536.0, 0x7e) };
    if value.is_nan() {
        return nan;
    }
    let magnitude = f64::from(value.abs()).min(beyond);
    let worth = |bits: u8| if bits > last { beyond } else { f64::from(decode_f8(dtype, bits)) };
    let nearest = (0..=last + 1)
        .min_by(|&a, &b| {
            let (far_a, far_b) = ((worth(a) - magnitude).abs(), (worth(b) - magnitude).abs());
            far_a.total_cmp(&far_b).then((a & 1).cmp(&(b & 1)))
        })
        .unwrap();
    // Past the last comes infinity, or NaN where there is none.
    if nearest == 0x7f { nan } else { nearest | if value.is_sign_negative() { 0x80 } else { 0 } }
}

/// A stream of bits that is the same in every run (SplitMix64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Elements of every kind: moderate values, any bits, and the corners.
fn element(dtype: DataType, noise: &mut Noise) -> u64 {
    let bits = noise.next();
    let moderate = (bits >> 8) as i16;
    let corner = (bits >> 32) as usize % 12;
    match bits % 4 {
        0 => noise.next() & (u64::MAX >> (64 - 8 * dtype.size())),
        1 if dtype.is_float() => {
            let (f32s, f64s) = (corner_f32(corner), f64::from(corner_f32(corner)));
            match dtype {
                DataType::F64 => Oracle(dtype).encode(Value::Double(if corner == 6 { 5e-324 } else { f64s })),
                _ => Oracle(dtype).encode(Value::Single(f32s)),
            }
        }
        _ => match dtype {
            DataType::F64 => (f64::from(moderate) / 1000.0).to_bits(),
            _ if dtype.is_float() => Oracle(dtype).encode(Value::Single(f32::from(moderate) / 1000.0)),
            _ => Oracle(dtype).encode(Value::Integer(Oracle(dtype).wrap(moderate.into()))),
        },
    }
}

fn corner_f32(index: usize) -> f32 {
    let corners =
        [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1), 6e-8, -3e-5, 448.0];
    corners.get(index).copied().unwrap_or(f32::NAN)
}

fn operators(dtype: DataType) -> Vec<Operator> {
    let mut all = vec![
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(0.0),
    ];
    if !dtype.is_float() {
        all.extend([Operator::BitAnd, Operator::BitOr, Operator::BitXor]);
    }
    all
}

/// Bytes at a chosen distance from an aligned address, with a margin behind that must stay as it is.
struct Area {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Area {
    const MARGIN: u8 = 0xa5;

    fn new(len: usize, misaligned: usize) -> Area {
        let bytes = vec![Area::MARGIN; len + 192];
        let start = bytes.as_ptr().align_offset(64) + 64 + misaligned;
        Area { bytes, start, len }
    }

    fn filled(content: &[u8], misaligned: usize) -> Area {
        let mut area = Area::new(content.len(), misaligned);
        area.bytes[area.start..][..content.len()].copy_from_slice(content);
        area
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn assert_margins(&self) {
        let around = self.bytes[..self.start].iter().chain(&self.bytes[self.start + self.len..]);
        assert!(around.into_iter().all(|&byte| byte == Area::MARGIN), "a byte beside the output changed");
    }
}

/// Folds copies of `operands`, each at its own alignment, with operand `in_place` as the output if there is
/// one.
fn fold(
    reducer: &Reducer,
    operands: &[(Vec<u8>, Representation, f64)],
    representation: Representation,
    count: usize,
    misaligned: usize,
    in_place: Option<usize>,
) -> Vec<u8> {
    let mut areas: Vec<Area> = operands
        .iter()
        .enumerate()
        .map(|(i, (bytes, r, _))| {
            Area::filled(&bytes[..count * size(reducer, *r)], misaligned * (i + 1) % 61)
        })
        .collect();
    let mut out = Area::new(count * size(reducer, representation), misaligned);
    let mut list: Vec<Operand> = areas
        .iter_mut()
        .zip(operands)
        .map(|(area, &(_, representation, scale))| Operand { address: area.pointer(), representation, scale })
        .collect();
    if let Some(i) = in_place {
        out.pointer(); // The output area is the operand's.
        std::mem::swap(&mut out, &mut areas[i]);
        list[i].address = out.pointer();
    }
    let pointer = out.pointer();
    // SAFETY: the areas hold `count` positions each.
    unsafe { reducer.fold(&list, pointer, representation, count) };
    out.assert_margins();
    for (i, area) in areas.iter().enumerate().filter(|&(i, _)| Some(i) != in_place) {
        assert_eq!(area.content(), &operands[i].0[..area.content().len()], "operand {i} changed");
    }
    out.content().to_vec()
}

fn size(reducer: &Reducer, representation: Representation) -> usize {
    match representation {
        Representation::Element => reducer.element_size(),
        Representation::Accumulator => reducer.accumulator_size(),
    }
}

const POSITIONS: usize = 1100;

fn inputs(dtype: DataType, k: usize, count: usize) -> Vec<(Vec<u8>, Representation, f64)> {
    let mut noise = Noise(dtype as u64 * 1000 + k as u64);
    (0..k)
        .map(|i| {
            let elements = (0..count)
                .flat_map(|_| element(dtype, &mut noise).to_le_bytes().into_iter().take(dtype.size()));
            (elements.collect(), Representation::Element, [1.0, -0.5, 3.25, 2.0, -1e12][i % 5])
        })
        .collect()
}

fn expected(
    dtype: DataType,
    operator: &Operator,
    ranks: u32,
    operands: &[(Vec<u8>, Representation, f64)],
    count: usize,
) -> Vec<u8> {
    let oracle = Oracle(dtype);
    let position = |at: usize| {
        let values: Vec<Value> = operands
            .iter()
            .map(|(bytes, _, scale)| {
                let value = oracle.decode(&bytes[at * dtype.size()..][..dtype.size()]);
                if matches!(operator, Operator::PreMulSum(_)) { oracle.scale(value, *scale) } else { value }
            })
            .collect();
        let folded = oracle.tree(operator, &values);
        oracle.encode(if *operator == Operator::Average { oracle.divide(folded, ranks) } else { folded })
    };
    (0..count).flat_map(|at| position(at).to_le_bytes().into_iter().take(dtype.size())).collect()
}

/// All operators, operand counts, levels, counts and alignments of one type.
fn check_type(dtype: DataType) {
    for operator in operators(dtype) {
        for k in [1, 2, 3, 4, 5, 7, 8, 16, 33] {
            let many = if k == 2 || k == 5 || k == 33 { POSITIONS } else { 150 };
            let operands = inputs(dtype, k, many);
            let ranks = if k == 33 { 300 } else { k as u32 };
            let wanted = expected(dtype, &operator, ranks, &operands, many);
            for level in Level::available() {
                let reducer = Reducer::at_level(level, dtype, operator, ranks).unwrap();
                for (count, misaligned) in [
                    (0, 0),
                    (1, 0),
                    (3, 1),
                    (15, 7),
                    (16, 3),
                    (17, 2),
                    (64, 0),
                    (65, 4),
                    (many, 1),
                    (many - 1, 0),
                ] {
                    let got = fold(&reducer, &operands, Representation::Element, count, misaligned, None);
                    let wanted = &wanted[..count * dtype.size()];
                    assert_eq!(got, wanted, "{dtype:?} {operator:?} k={k} {level:?} count={count}");
                }
                for in_place in [0, k / 2, k - 1] {
                    let got = fold(&reducer, &operands, Representation::Element, many, 1, Some(in_place));
                    assert_eq!(got, wanted, "{dtype:?} {operator:?} k={k} {level:?} into operand {in_place}");
                }
            }
        }
    }
}

macro_rules! check_types {
    ($($name:ident: $dtype:ident),*) => {
        $(
            #[test]
            fn $name() {
                check_type(DataType::$dtype);
            }
        )*
    };
}
check_types!(
    folds_i8: I8, folds_u8: U8, folds_i32: I32, folds_u32: U32, folds_i64: I64, folds_u64: U64,
    folds_f16: F16, folds_f32: F32, folds_f64: F64, folds_bf16: Bf16, folds_f8e4m3: F8E4M3, folds_f8e5m2: F8E5M2
);

#[test]
fn a_tree_cut_into_pairs_of_accumulators_gives_the_same_bits() {
    for dtype in DataType::ALL {
        for operator in operators(dtype) {
            for (k, level) in
                [2, 3, 5, 8, 11].into_iter().zip(Level::available().collect::<Vec<_>>().into_iter().cycle())
            {
                let operands = inputs(dtype, k, 75);
                let reducer = Reducer::at_level(level, dtype, operator, k as u32).unwrap();
                let whole = fold(&reducer, &operands, Representation::Element, 75, 0, None);
                let (accumulated, ..) = pairwise(&reducer, &operands, 75);
                let last = [(accumulated, Representation::Accumulator, 7.0)];
                let cut = fold(&reducer, &last, Representation::Element, 75, 3, None);
                assert_eq!(whole, cut, "{dtype:?} {operator:?} k={k} {level:?}");
            }
        }
    }
}

/// The tree over `operands`, every combination a fold of its own: raw elements on one side, accumulators on
/// the other.
fn pairwise(
    reducer: &Reducer,
    operands: &[(Vec<u8>, Representation, f64)],
    count: usize,
) -> (Vec<u8>, Representation, f64) {
    if let [single] = operands {
        return single.clone();
    }
    let (left, right) = operands.split_at(operands.len().next_power_of_two() / 2);
    let halves = [pairwise(reducer, left, count), pairwise(reducer, right, count)];
    let folded = fold(reducer, &halves, Representation::Accumulator, count, 1, None);
    (folded, Representation::Accumulator, f64::NAN)
}

#[test]
fn averages_of_integers_truncate_as_division_does() {
    let ranks = (1..=70).chain([127, 128, 129, 255, 256, 300, 1000, 65_535, 65_537, 1 << 30, u32::MAX]);
    for ranks in ranks {
        // Around the multiples of what it is divided by, where an inexact quotient would be one off; each
        // type takes its low bits of them.
        let multiples = (0..63).flat_map(|power| [1, 3, 5, 7].map(|odd| i128::from(ranks) * (odd << power)));
        let around = multiples.flat_map(|m| [m - 1, m, m + 1, -m - 1, -m, -m + 1]);
        let extremes = (0..64).flat_map(|power| [(1 << power) - 1, -(1 << power), 1 << power]);
        let values: Vec<i128> = (0..256).chain(around).chain(extremes).collect();
        for dtype in DataType::ALL.into_iter().filter(|dtype| !dtype.is_float()) {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes().into_iter().take(dtype.size()));
            let operands = [(bytes.collect(), Representation::Element, 1.0)];
            let wanted = expected(dtype, &Operator::Average, ranks, &operands, values.len());
            for level in Level::available() {
                let reducer = Reducer::at_level(level, dtype, Operator::Average, ranks).unwrap();
                let got = fold(&reducer, &operands, Representation::Element, values.len(), 0, None);
                assert_eq!(got, wanted, "{dtype:?} by {ranks} {level:?}");
            }
        }
    }
}

#[test]
fn every_short_float_survives_the_accumulator() {
    for dtype in [DataType::F16, DataType::Bf16, DataType::F8E4M3, DataType::F8E5M2] {
        let all: Vec<u8> = match dtype.size() {
            1 => (0..=u8::MAX).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        };
        let count = all.len() / dtype.size();
        let oracle = Oracle(dtype);
        for level in Level::available() {
            let reducer = Reducer::at_level(level, dtype, Operator::Sum, 1).unwrap();
            let elements = [(all.clone(), Representation::Element, 1.0)];
            let wide = fold(&reducer, &elements, Representation::Accumulator, count, 0, None);
            for (element, accumulator) in all.chunks(dtype.size()).zip(wide.chunks(4)) {
                let (Value::Single(wanted), Value::Single(got)) =
                    (oracle.decode(element), Oracle(DataType::F32).decode(accumulator))
                else {
                    unreachable!()
                };
                let same = wanted.to_bits() == got.to_bits() || wanted.is_nan() && got.is_nan();
                assert!(same, "{dtype:?} {element:x?} {level:?}: {got} for {wanted}");
            }
            let accumulators = [(wide, Representation::Accumulator, 1.0)];
            let back = fold(&reducer, &accumulators, Representation::Element, count, 0, None);
            for (element, back) in all.chunks(dtype.size()).zip(back.chunks(dtype.size())) {
                let value = oracle.decode(element);
                let wanted = if value.is_nan() { oracle.encode(value) } else { from_le(element) };
                assert_eq!(from_le(back), wanted, "{dtype:?} {level:?}");
            }
        }
    }
}

fn from_le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |wide, &byte| wide << 8 | u64::from(byte))
}

#[test]
fn accumulators_round_once_to_the_nearest_even() {
    // Every short float, the middle to its neighbour, and the `f32` to both sides of each; and some of any
    // bits.
    for dtype in [DataType::F16, DataType::Bf16, DataType::F8E4M3, DataType::F8E5M2] {
        let oracle = Oracle(dtype);
        let mut noise = Noise(5);
        let mut accumulators: Vec<u32> = (0..2000).map(|_| noise.next() as u32).collect();
        let (step, shift) = if dtype.size() == 1 { (1, 8) } else { (7, 16) };
        for bits in (0..1u64 << shift).step_by(step) {
            let Value::Single(value) = oracle.decode(&bits.to_le_bytes()[..dtype.size()]) else {
                unreachable!()
            };
            let Value::Single(next) = oracle.decode(&(bits + 1).to_le_bytes()[..dtype.size()]) else {
                unreachable!()
            };
            for value in [value, ((f64::from(value) + f64::from(next)) / 2.0) as f32] {
                accumulators.extend([-1i32, 0, 1].map(|by| value.to_bits().wrapping_add_signed(by)));
            }
        }
        accumulators.extend([464.0f32, 480.0, 61440.0, 65504.0, 65520.0, 1e30].map(f32::to_bits));
        let bytes: Vec<u8> = accumulators.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        for level in Level::available() {
            let reducer = Reducer::at_level(level, dtype, Operator::Max, 1).unwrap();
            let operand = [(bytes.clone(), Representation::Accumulator, 1.0)];
            let got = fold(&reducer, &operand, Representation::Element, accumulators.len(), 0, None);
            for (&bits, got) in accumulators.iter().zip(got.chunks(dtype.size())) {
                let value = f32::from_bits(bits);
                let wanted = oracle.encode(Value::Single(value));
                assert_eq!(from_le(got), wanted, "{dtype:?} {level:?} {value:e} ({bits:#x})");
            }
        }
    }
}

/// Not commutative, so the order shows; and it fails on what `CustomFunction` does not promise.
unsafe extern "C" fn left_times_three_plus_right(
    accumulator: *mut c_void,
    operand: *const c_void,
    count: u64,
    dtype: i32,
    user: *mut c_void,
) {
    assert_eq!((dtype, user.addr()), (DataType::U32 as i32, 42));
    let (accumulator, operand) = (accumulator.cast::<u32>(), operand.cast::<u32>());
    assert!(accumulator.is_aligned() && operand.is_aligned());
    for i in 0..count as usize {
        // SAFETY: the contract of `CustomFunction`.
        unsafe { *accumulator.add(i) = (*accumulator.add(i)).wrapping_mul(3).wrapping_add(*operand.add(i)) };
    }
}

#[test]
fn a_custom_function_sees_left_on_the_left_and_aligned_elements() {
    let user = std::ptr::without_provenance_mut(42);
    let operator = Operator::Custom(Custom { function: left_times_three_plus_right, user });
    let reducer = Reducer::new(DataType::U32, operator, 3).unwrap();
    assert_eq!((reducer.element_size(), reducer.accumulator_size()), (4, 4));
    fn tree(values: &[u32]) -> u32 {
        if let [single] = values {
            return *single;
        }
        let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
        tree(left).wrapping_mul(3).wrapping_add(tree(right))
    }
    for k in [1, 2, 3, 6, 9] {
        let operands = inputs(DataType::U32, k, POSITIONS);
        let wanted: Vec<u8> = (0..POSITIONS)
            .flat_map(|at| {
                let here: Vec<u32> =
                    operands.iter().map(|(bytes, ..)| from_le(&bytes[at * 4..][..4]) as u32).collect();
                tree(&here).to_le_bytes()
            })
            .collect();
        for (misaligned, in_place) in [(0, None), (1, None), (0, Some(0)), (0, Some(k - 1)), (3, Some(k / 2))]
        {
            let got = fold(&reducer, &operands, Representation::Accumulator, POSITIONS, misaligned, in_place);
            assert_eq!(got, wanted, "k={k} misaligned={misaligned} in_place={in_place:?}");
        }
    }
}

#[test]
fn bitwise_operators_refuse_floats_by_name() {
    for dtype in DataType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        let error = Reducer::new(dtype, Operator::BitXor, 2).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.text().contains("'xor'") && error.text().contains(dtype.name()), "{error}");
    }
    assert_eq!(Reducer::new(DataType::F32, Operator::Sum, 0).unwrap_err().status(), Status::InvalidArgument);
}
