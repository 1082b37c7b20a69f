//! The compiled kernels of local reductions: which one folds what, with which parameter, on which grid.
//!
//! A kernel folds device operands as [`crate::reduce::Reducer::fold`] folds host operands, bit for bit.
//! `kernels/` holds the sources, `scripts/kernels` compiles them into the files that are embedded here.
//! Nothing here calls the driver: the caller loads [`IMAGE`], looks [`kernel`] up in it, and launches it with
//! a [`Launch`] as its only parameter. Load the module and the functions before a kernel of the process spins
//! on the device: loading can wait for it.
#![forbid(unsafe_code)]

use std::ffi::{CStr, c_void};

use super::image::{Image, Program};
use crate::reduce::{DataType, Operand, Operator, Representation};
use crate::sys::float::by_defaults;

/// The kernels.
pub static IMAGE: Image = Image::new(
    Program::Fold,
    include_bytes!("../../kernels/fold.sm_90.xz"),
    include_bytes!("../../kernels/fold.sm_100.xz"),
);

/// The most operands that one launch folds.
pub const MAX_OPERANDS: usize = 32;

/// Words of a launch before its operands, and the operands of a sheet: the same in `kernels/combine.cu`.
const SHEET_HEAD: usize = 5;
pub(super) const SHEET_OPERANDS: usize = 8;

/// Threads of a block, at most.
const THREADS: u32 = 256;

/// What a thread should find to do: two vectors of an operand.
const BYTES_OF_A_THREAD: usize = 32;

/// The grid of a launch. Every grid gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, at least one.
    pub blocks: u32,
    /// Threads of a block: a multiple of 32.
    pub threads: u32,
}

/// The one parameter of every kernel, by value. `Arguments` of `kernels/fold.cuh` is the same.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Launch {
    out: *mut u8,
    count: u64,
    operands: u32,
    wide: u32,
    out_wide: u32,
    ranks: u32,
    scaled: u32,
    absent: u32,
    operand: [*const u8; MAX_OPERANDS],
    scale: [u64; MAX_OPERANDS],
}

impl Launch {
    /// Combines `count` positions of `operands`, in the canonical order, into `out`, which holds
    /// `representation`: exactly as [`crate::reduce::Reducer::fold`] would with a group of `ranks`, the
    /// addresses being the device's.
    ///
    /// More operands than [`MAX_OPERANDS`] take several launches: subtrees of the canonical tree into
    /// accumulators, which are operands of the last.
    ///
    /// # Panics
    /// If there are no operands, or too many.
    pub fn new(
        dtype: DataType,
        operator: &Operator,
        ranks: u32,
        operands: &[Operand],
        out: *mut u8,
        representation: Representation,
        count: usize,
    ) -> Launch {
        assert!(
            (1..=MAX_OPERANDS).contains(&operands.len()),
            "a launch folds 1 to {MAX_OPERANDS} operands, not {}",
            operands.len()
        );
        // Bitwise kernels work on bytes.
        let positions = if is_bitwise(operator) { count * dtype.size() } else { count };
        let is_element = representation == Representation::Element;
        let mut launch = Launch {
            out,
            count: positions as u64,
            operands: operands.len() as u32,
            wide: 0,
            out_wide: u32::from(!is_element),
            ranks: if is_element && *operator == Operator::Average { ranks } else { 0 },
            scaled: 0,
            absent: 0,
            operand: [std::ptr::null(); MAX_OPERANDS],
            scale: [0; MAX_OPERANDS],
        };
        for (i, operand) in operands.iter().enumerate() {
            launch.operand[i] = operand.address;
            match operand.representation {
                Representation::Accumulator => launch.wide |= 1 << i,
                Representation::Element if matches!(operator, Operator::PreMulSum(_)) => {
                    launch.scaled |= 1 << i;
                    launch.scale[i] = scalar(dtype, operand.scale);
                }
                Representation::Element => {}
            }
        }
        launch
    }

    /// Leaves out the operands of these bits: each stands in a place whose subtree is what an operand before
    /// it is the sum of, and has that operand's address and representation. The first is never left out.
    pub fn without(self, absent: u32) -> Launch {
        Launch { absent: absent & !1, ..self }
    }

    /// What it does, if it combines two operands that are elements, and nothing else.
    pub(super) fn pair(&self) -> Option<Pair> {
        let Launch { operands: 2, wide: 0, out_wide: 0, scaled: 0, absent: 0, .. } = *self else {
            return None;
        };
        let operand = |at: usize| self.operand[at].expose_provenance() as u64;
        let out = self.out.expose_provenance() as u64;
        Some(Pair { out, count: self.count, operands: [operand(0), operand(1)], ranks: self.ranks })
    }

    /// Words of a sheet: the head, as many operands as couriers combine, and as many scalars.
    pub(super) const SHEET_WORDS: usize = SHEET_HEAD + 2 * SHEET_OPERANDS;

    /// It, as couriers read it.
    pub(super) fn sheet(&self) -> [u64; Launch::SHEET_WORDS] {
        let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = [0; Launch::SHEET_WORDS];
        let (head, rest) = words.split_at_mut(SHEET_HEAD);
        head.copy_from_slice(&[
            self.out.expose_provenance() as u64,
            self.count,
            both(self.operands, self.wide),
            both(self.out_wide, self.ranks),
            both(self.scaled, self.absent),
        ]);
        let (operands, scales) = rest.split_at_mut(SHEET_OPERANDS);
        for (word, operand) in operands.iter_mut().zip(&self.operand) {
            *word = operand.expose_provenance() as u64;
        }
        scales.copy_from_slice(&self.scale[..SHEET_OPERANDS]);
        words
    }

    /// What [`Launch::sheet`] gave, for the driver double.
    #[cfg(test)]
    pub(super) fn told(words: &[u64; Launch::SHEET_WORDS], dtype: DataType) -> Told {
        let (operands, scaled) = (words[2] as u32 as usize, words[4] as u32);
        let operand = |index: usize| {
            let scale = words[SHEET_HEAD + SHEET_OPERANDS + index];
            let is_scaled = scaled >> index & 1 == 1;
            (words[SHEET_HEAD + index], if is_scaled { scale_of(dtype, scale) } else { 1.0 })
        };
        Told {
            out: words[0],
            count: words[1],
            ranks: (words[3] >> 32) as u32,
            operands: (0..operands).map(operand).collect(),
        }
    }

    /// A grid for this launch of at most `blocks` blocks: one small block for small counts.
    /// Two blocks for each of the device's multiprocessors run at the memory's speed.
    pub fn grid(&self, dtype: DataType, blocks: u32) -> Grid {
        // A bound on the bytes of one operand; what it is exactly does not matter.
        let bytes = usize::try_from(self.count).unwrap_or(usize::MAX).saturating_mul(dtype.size());
        let threads = bytes.div_ceil(BYTES_OF_A_THREAD).max(1);
        if threads <= THREADS as usize {
            return Grid { blocks: 1, threads: (threads as u32).next_multiple_of(32) };
        }
        let wanted = u32::try_from(threads.div_ceil(THREADS as usize)).unwrap_or(u32::MAX);
        Grid { blocks: wanted.min(blocks).max(1), threads: THREADS }
    }

    /// For the array of parameters that `cuLaunchKernel` takes: good as long as `self` stays where it is.
    pub fn parameter(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }
}

/// What a launch of two operands says that are elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) out: u64,
    /// Positions.
    pub(super) count: u64,
    pub(super) operands: [u64; 2],
    /// What an average divides by, or 0.
    pub(super) ranks: u32,
}

#[cfg(test)]
impl From<Pair> for Told {
    fn from(Pair { out, count, operands, ranks }: Pair) -> Told {
        Told { out, count, ranks, operands: operands.map(|operand| (operand, 1.0)).into() }
    }
}

/// What a launch says of elements.
#[cfg(test)]
pub(super) struct Told {
    pub(super) out: u64,
    pub(super) count: u64,
    /// What an average divides by, or 0.
    pub(super) ranks: u32,
    /// Where they are, and by what they are multiplied.
    pub(super) operands: Vec<(u64, f64)>,
}

/// What [`scalar`] was given, rounded.
#[cfg(test)]
fn scale_of(dtype: DataType, scalar: u64) -> f64 {
    match dtype {
        DataType::I8 => f64::from(scalar as i8),
        DataType::U8 => f64::from(scalar as u8),
        DataType::I32 => f64::from(scalar as i32),
        DataType::U32 => f64::from(scalar as u32),
        DataType::I64 => scalar as i64 as f64,
        DataType::U64 => scalar as f64,
        DataType::F64 => f64::from_bits(scalar),
        _ => f64::from(f32::from_bits(scalar as u32)),
    }
}

/// What has the same kernel as a type and an operator, for all that share one. None for a caller's own
/// function, and for bitwise operators on floats.
///
/// Where the sign makes no difference, it is the unsigned type; where nothing but the bits does, bytes. A sum
/// of floats also divides and scales, as [`Launch`] says; for integers, a division costs too much to be
/// carried along.
pub(super) fn representative(dtype: DataType, operator: Operator) -> Option<(DataType, Operator)> {
    let unsigned = match dtype {
        DataType::I8 => DataType::U8,
        DataType::I32 => DataType::U32,
        DataType::I64 => DataType::U64,
        other => other,
    };
    Some(match operator {
        Operator::Sum | Operator::PreMulSum(_) => (unsigned, Operator::Sum),
        Operator::Average if dtype.is_float() => (dtype, Operator::Sum),
        Operator::Product => (unsigned, operator),
        Operator::Average | Operator::Min | Operator::Max => (dtype, operator),
        Operator::BitAnd | Operator::BitOr | Operator::BitXor if !dtype.is_float() => {
            (DataType::U8, operator)
        }
        Operator::BitAnd | Operator::BitOr | Operator::BitXor | Operator::Custom(_) => return None,
    })
}

/// The name of the kernel for a type and an operator, which several share; see [`representative`].
pub fn kernel(dtype: DataType, operator: &Operator) -> Option<&'static CStr> {
    let (dtype, operator) = representative(dtype, *operator)?;
    Some(match operator {
        Operator::Sum | Operator::PreMulSum(_) => sum(dtype),
        Operator::Average => average(dtype)?,
        Operator::Product => product(dtype),
        Operator::Min => min(dtype),
        Operator::Max => max(dtype),
        Operator::BitAnd => c"unisono_fold_And_U8",
        Operator::BitOr => c"unisono_fold_Or_U8",
        Operator::BitXor => c"unisono_fold_Xor_U8",
        Operator::Custom(_) => return None,
    })
}

/// Every type and operator that has a kernel. Some share theirs.
pub(super) fn all() -> impl Iterator<Item = (DataType, Operator)> {
    let operators = [
        Operator::Sum,
        Operator::Average,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::BitAnd,
        Operator::BitOr,
        Operator::BitXor,
    ];
    let pairs = DataType::ALL.into_iter().flat_map(move |dtype| operators.map(|operator| (dtype, operator)));
    pairs.filter(|(dtype, operator)| kernel(*dtype, operator).is_some())
}

const fn sum(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 | DataType::U8 => c"unisono_fold_Sum_U8",
        DataType::I32 | DataType::U32 => c"unisono_fold_Sum_U32",
        DataType::I64 | DataType::U64 => c"unisono_fold_Sum_U64",
        DataType::F16 => c"unisono_fold_Sum_F16",
        DataType::F32 => c"unisono_fold_Sum_F32",
        DataType::F64 => c"unisono_fold_Sum_F64",
        DataType::Bf16 => c"unisono_fold_Sum_Bf16",
        DataType::F8E4M3 => c"unisono_fold_Sum_F8E4M3",
        DataType::F8E5M2 => c"unisono_fold_Sum_F8E5M2",
    }
}

const fn product(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 | DataType::U8 => c"unisono_fold_Product_U8",
        DataType::I32 | DataType::U32 => c"unisono_fold_Product_U32",
        DataType::I64 | DataType::U64 => c"unisono_fold_Product_U64",
        DataType::F16 => c"unisono_fold_Product_F16",
        DataType::F32 => c"unisono_fold_Product_F32",
        DataType::F64 => c"unisono_fold_Product_F64",
        DataType::Bf16 => c"unisono_fold_Product_Bf16",
        DataType::F8E4M3 => c"unisono_fold_Product_F8E4M3",
        DataType::F8E5M2 => c"unisono_fold_Product_F8E5M2",
    }
}

const fn min(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 => c"unisono_fold_Min_I8",
        DataType::U8 => c"unisono_fold_Min_U8",
        DataType::I32 => c"unisono_fold_Min_I32",
        DataType::U32 => c"unisono_fold_Min_U32",
        DataType::I64 => c"unisono_fold_Min_I64",
        DataType::U64 => c"unisono_fold_Min_U64",
        DataType::F16 => c"unisono_fold_Min_F16",
        DataType::F32 => c"unisono_fold_Min_F32",
        DataType::F64 => c"unisono_fold_Min_F64",
        DataType::Bf16 => c"unisono_fold_Min_Bf16",
        DataType::F8E4M3 => c"unisono_fold_Min_F8E4M3",
        DataType::F8E5M2 => c"unisono_fold_Min_F8E5M2",
    }
}

const fn max(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 => c"unisono_fold_Max_I8",
        DataType::U8 => c"unisono_fold_Max_U8",
        DataType::I32 => c"unisono_fold_Max_I32",
        DataType::U32 => c"unisono_fold_Max_U32",
        DataType::I64 => c"unisono_fold_Max_I64",
        DataType::U64 => c"unisono_fold_Max_U64",
        DataType::F16 => c"unisono_fold_Max_F16",
        DataType::F32 => c"unisono_fold_Max_F32",
        DataType::F64 => c"unisono_fold_Max_F64",
        DataType::Bf16 => c"unisono_fold_Max_Bf16",
        DataType::F8E4M3 => c"unisono_fold_Max_F8E4M3",
        DataType::F8E5M2 => c"unisono_fold_Max_F8E5M2",
    }
}

/// Integers only.
const fn average(dtype: DataType) -> Option<&'static CStr> {
    Some(match dtype {
        DataType::I8 => c"unisono_fold_Average_I8",
        DataType::U8 => c"unisono_fold_Average_U8",
        DataType::I32 => c"unisono_fold_Average_I32",
        DataType::U32 => c"unisono_fold_Average_U32",
        DataType::I64 => c"unisono_fold_Average_I64",
        DataType::U64 => c"unisono_fold_Average_U64",
        _ => return None,
    })
}

/// The scalar of a pre-multiplied sum, as an accumulator in the low bytes: rounded to a float, truncated and
/// saturated to an integer.
pub(super) fn scalar(dtype: DataType, scale: f64) -> u64 {
    // As where processors fold, whatever this thread does with floats otherwise.
    by_defaults(|| match dtype {
        DataType::I8 => u64::from(scale as i8 as u8),
        DataType::U8 => u64::from(scale as u8),
        DataType::I32 => u64::from(scale as i32 as u32),
        DataType::U32 => u64::from(scale as u32),
        DataType::I64 => scale as i64 as u64,
        DataType::U64 => scale as u64,
        DataType::F64 => scale.to_bits(),
        DataType::F32 | DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => {
            u64::from((scale as f32).to_bits())
        }
    })
}

pub(super) const fn is_bitwise(operator: &Operator) -> bool {
    matches!(operator, Operator::BitAnd | Operator::BitOr | Operator::BitXor)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::sys::float::flushing;

    #[test]
    fn a_scalar_does_not_depend_on_how_its_thread_treats_floats() {
        let tiny = 1e-40;
        assert_eq!(flushing(|| scalar(DataType::F32, tiny)), u64::from((tiny as f32).to_bits()));
    }
}
