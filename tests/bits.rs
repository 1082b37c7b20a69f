//! The same bits: a reduction's result depends on the inputs and the number of ranks alone.

mod support;

use support::reference::{narrow_to, widen_from};
use support::{Random, TRANSPORTS, Verb, ranks};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context};
use unisono::reduce::{DataType, Operator};
use unisono::schedule::{Algorithm, Kind as Planned, Shape};

const FLOATS: [DataType; 6] =
    [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64, DataType::F8E4M3, DataType::F8E5M2];

/// Elements in all; the longest call of the tests.
const ALL: usize = 40_000;

/// The elements of a rank: random bits whose exponents spread so far that every order of additions gives
/// another sum.
fn elements(dtype: DataType, rank: u32) -> Vec<u8> {
    let mut random = Random(u64::from(rank) << 8 | dtype as u64);
    let mut bytes = Vec::with_capacity(ALL * dtype.size());
    for _ in 0..ALL {
        let bits = random.next();
        let sign = bits >> 63;
        match dtype {
            DataType::F32 => {
                let exponent = 110 + (bits >> 40) % 30;
                let value = (sign << 31) as u32 | (exponent << 23) as u32 | (bits as u32 & 0x7f_ffff);
                bytes.extend(value.to_le_bytes());
            }
            DataType::F64 => {
                let exponent = 1000 + (bits >> 53) % 50;
                bytes.extend((sign << 63 | exponent << 52 | bits & 0xf_ffff_ffff_ffff).to_le_bytes());
            }
            DataType::F16 => {
                // Up to 2^9, so that sums of eight stay finite; subnormals among them.
                let exponent = (bits >> 40) % 25;
                bytes.extend(((sign << 15 | exponent << 10 | bits & 0x3ff) as u16).to_le_bytes());
            }
            DataType::Bf16 => {
                let exponent = 110 + (bits >> 40) % 30;
                bytes.extend(((sign << 15 | exponent << 7 | bits & 0x7f) as u16).to_le_bytes());
            }
            DataType::F8E4M3 => bytes.push((sign << 7 | ((bits >> 40) % 11) << 3 | bits & 7) as u8),
            _ => bytes.push((sign << 7 | ((bits >> 40) % 26) << 2 | bits & 3) as u8),
        }
    }
    bytes
}

/// The canonical tree: the left part is the largest power of two below.
fn tree<T: Copy>(leaves: &[T], combine: &impl Fn(T, T) -> T) -> T {
    if leaves.len() == 1 {
        return leaves[0];
    }
    let left = leaves.len().next_power_of_two() / 2;
    combine(tree(&leaves[..left], combine), tree(&leaves[left..], combine))
}

/// What all ranks' elements come to, worked out here and one element at a time.
fn expected(dtype: DataType, operator: Operator, size: u32) -> Vec<u8> {
    let inputs: Vec<Vec<u8>> = (0..size).map(|rank| elements(dtype, rank)).collect();
    let width = dtype.size();
    let leaf = |index: usize, rank: usize| &inputs[rank][index * width..(index + 1) * width];
    let mut result = Vec::with_capacity(ALL * width);
    for index in 0..ALL {
        if dtype == DataType::F64 {
            let values: Vec<f64> = (0..size as usize)
                .map(|rank| f64::from_le_bytes(leaf(index, rank).try_into().expect("8 bytes")))
                .collect();
            let value = match operator {
                Operator::Product => tree(&values, &|a, b| a * b),
                Operator::Average => tree(&values, &|a, b| a + b) / f64::from(size),
                _ => tree(&values, &|a, b| a + b),
            };
            result.extend(value.to_le_bytes());
            continue;
        }
        let values: Vec<f32> = (0..size as usize)
            .map(|rank| match dtype {
                DataType::F32 => f32::from_le_bytes(leaf(index, rank).try_into().expect("4 bytes")),
                short => widen_from(short, leaf(index, rank)),
            })
            .collect();
        let value = match operator {
            Operator::Product => tree(&values, &|a, b| a * b),
            Operator::Average => tree(&values, &|a, b| a + b) / size as f32,
            _ => tree(&values, &|a, b| a + b),
        };
        match dtype {
            DataType::F32 => result.extend(value.to_le_bytes()),
            short => result.extend(narrow_to(short, value)),
        }
    }
    result
}

/// Reduces the elements `range` of all ranks, in place or not, and checks the bits of the result.
fn check(
    context: &Context,
    (dtype, operator): (DataType, Operator),
    (own, wanted): (&[u8], &[u8]),
    range: std::ops::Range<usize>,
    in_place: bool,
    algorithm: Option<Algorithm>,
) {
    let width = dtype.size();
    let bytes = range.start * width..range.end * width;
    let verb = Verb::new(Kind::Allreduce, range.len() as u64).dtype(dtype).operator(operator);
    let call = Call { algorithm: algorithm.map(|algorithm| algorithm as i32), ..Call::default() };
    let mut got = own[bytes.clone()].to_vec();
    if in_place {
        verb.run_in(context, &mut got, &call).expect("an allreduce");
    } else {
        verb.run(context, &own[bytes.clone()], &mut got, &call).expect("an allreduce");
    }
    let wanted = &wanted[bytes];
    if let Some(at) = (0..got.len()).find(|&at| got[at] != wanted[at]) {
        let first = at / width * width;
        panic!(
            "rank {} of {}, {}, {operator:?}, elements {range:?}, {algorithm:?}: element {} is {:x?}, not {:x?}",
            context.rank(),
            context.size(),
            dtype.name(),
            at / width,
            &got[first..first + width],
            &wanted[first..first + width]
        );
    }
}

#[test]
fn every_canonical_algorithm_gives_the_bits_of_the_tree() {
    for size in 1..=8u32 {
        for dtype in FLOATS {
            let wanted = expected(dtype, Operator::Sum, size);
            for transports in TRANSPORTS {
                ranks(size, transports, |context| {
                    let own = elements(dtype, context.rank());
                    let shape = Shape { ranks_per_node: size, ..Shape::new(context.rank(), size) };
                    let canonical = Algorithm::ALL.into_iter().filter(|&algorithm| {
                        algorithm != Algorithm::Local
                            && algorithm.serves(Planned::Allreduce)
                            && algorithm.canonical(&shape)
                    });
                    for (turn, algorithm) in std::iter::once(None).chain(canonical.map(Some)).enumerate() {
                        let data = (&own[..], &wanted[..]);
                        check(context, (dtype, Operator::Sum), data, 0..1000, turn % 2 == 0, algorithm);
                    }
                });
            }
        }
    }
}

#[test]
fn neither_length_nor_place_in_the_message_matters() {
    for size in [2u32, 3, 5, 8] {
        for dtype in [DataType::F32, DataType::Bf16, DataType::F64, DataType::F8E4M3] {
            let wanted = expected(dtype, Operator::Sum, size);
            for transports in TRANSPORTS {
                ranks(size, transports, |context| {
                    let own = elements(dtype, context.rank());
                    // Every length from here to there meets the same elements at other places of other
                    // chunks.
                    for range in [0..1, 7..8, 0..3, 5..22, 1..1000, 999..3000, 17..20_000, 0..ALL, 1..ALL - 1]
                    {
                        for in_place in [false, true] {
                            let data = (&own[..], &wanted[..]);
                            check(context, (dtype, Operator::Sum), data, range.clone(), in_place, None);
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn other_operators_follow_the_tree_too() {
    for size in [3u32, 6] {
        for dtype in FLOATS {
            for operator in [Operator::Average, Operator::Product] {
                // Products of such small types leave their range; what infinities become is tested elsewhere.
                if operator == Operator::Product && !matches!(dtype, DataType::F32 | DataType::F64) {
                    continue;
                }
                let wanted = expected(dtype, operator, size);
                for transports in TRANSPORTS {
                    ranks(size, transports, |context| {
                        let own = elements(dtype, context.rank());
                        for range in [0..100, 3..30_000] {
                            check(context, (dtype, operator), (&own, &wanted), range, true, None);
                        }
                    });
                }
            }
        }
    }
}

#[test]
fn reduce_and_reduce_scatter_give_the_bits_of_allreduce() {
    for size in [1u32, 2, 3, 5, 8] {
        for dtype in [DataType::F32, DataType::F16] {
            let (width, wanted) = (dtype.size(), expected(dtype, Operator::Sum, size));
            for transports in TRANSPORTS {
                ranks(size, transports, |context| {
                    let own = elements(dtype, context.rank());
                    for count in [1, 1000, 4000] {
                        for algorithm in [Algorithm::Linear, Algorithm::Binomial, Algorithm::TwoShot] {
                            let call = Call { algorithm: Some(algorithm as i32), ..Call::default() };
                            let root = size - 1;
                            let mut got = vec![0u8; count * width];
                            Verb::new(Kind::Reduce, count as u64)
                                .dtype(dtype)
                                .root(root)
                                .run(context, &own, &mut got, &call)
                                .expect("a reduce");
                            let same = got == wanted[..got.len()];
                            assert!(same || context.rank() != root, "reduce by {}", algorithm.name());
                        }
                        for algorithm in [None, Some(Algorithm::Linear), Some(Algorithm::HalvingDoubling)] {
                            let algorithm = algorithm.map(|algorithm| algorithm as i32);
                            let mut got = vec![0u8; count * width];
                            Verb::new(Kind::ReduceScatter, count as u64)
                                .dtype(dtype)
                                .run(context, &own, &mut got, &Call { algorithm, ..Call::default() })
                                .expect("a reduce_scatter");
                            let start = context.rank() as usize * got.len();
                            assert!(
                                got == wanted[start..start + got.len()],
                                "reduce_scatter by {algorithm:?}"
                            );
                        }
                    }
                });
            }
        }
    }
}
