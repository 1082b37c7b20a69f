//! Which kernel runs: by type, operator, and what the processor has.

use super::kernel::{
    And, Bf16, BitLanes, Call, Codec, Combine, F8E4M3, F8E5M2, F16, FloatLanes, Kernel, Lanes, Maximum, Mean,
    Minimum, Or, Product, Same, ScaledSum, Sum, Xor, fold,
};
use super::{DataType, Operator};

/// Instruction sets that kernels are compiled for, from the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// What every processor of the architecture has.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Every level that this processor has, the best last.
    pub(super) fn available() -> impl DoubleEndedIterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            [(true, Level::Baseline), (avx2, Level::Avx2), (avx512, Level::Avx512)]
                .into_iter()
                .filter_map(|(available, level)| available.then_some(level))
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::iter::once(Level::Baseline)
    }

    /// The kernel of a type and an operator; none for a caller's own function and for bitwise operators on
    /// floats.
    pub(super) fn kernel(self, dtype: DataType, operator: &Operator) -> Option<Kernel> {
        match self {
            Level::Baseline => select::<Baseline>(dtype, operator),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => select::<Avx2>(dtype, operator),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => select::<Avx512>(dtype, operator),
        }
    }
}

/// A level at compile time.
trait Target {
    /// How many it takes at a time, by their type.
    type I8: Lanes;
    type U8: BitLanes;
    type I32: Lanes;
    type U32: BitLanes;
    type I64: Lanes;
    type U64: BitLanes;
    type F64: Lanes;
    /// What the types that accumulate in `f32` use.
    type Floats: FloatLanes;
    /// The loop, compiled for this level.
    ///
    /// # Safety
    /// As [`Kernel`].
    unsafe fn run<L: Lanes, C: Codec<L>, O: Combine<L>>(call: &Call<'_>);
}

/// What levels take at a time that processors have.
macro_rules! wide {
    () => {
        type I8 = [i8; 64];
        type U8 = [u8; 64];
        type I32 = [i32; 16];
        type U32 = [u32; 16];
        type I64 = [i64; 8];
        type U64 = [u64; 8];
        type F64 = [f64; 8];
    };
}

/// What the least level takes. Hardly any processor has no more than that: less code is better than speed.
#[cfg(target_arch = "x86_64")]
macro_rules! least {
    () => {
        type I8 = [i8; 16];
        type U8 = [u8; 16];
        type I32 = [i32; 4];
        type U32 = [u32; 4];
        type I64 = [i64; 2];
        type U64 = [u64; 2];
        type F64 = [f64; 2];
        type Floats = [f32; 4];
    };
}

/// What the only level takes.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! least {
    () => {
        wide!();
        type Floats = [f32; 16];
    };
}

struct Baseline;

impl Target for Baseline {
    least!();
    unsafe fn run<L: Lanes, C: Codec<L>, O: Combine<L>>(call: &Call<'_>) {
        // SAFETY: the caller's promise.
        unsafe { fold::<L, C, O>(call) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Target for Avx2 {
    wide!();
    type Floats = super::x86::Avx2Floats;
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn run<L: Lanes, C: Codec<L>, O: Combine<L>>(call: &Call<'_>) {
        // SAFETY: the caller's promise.
        unsafe { fold::<L, C, O>(call) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Target for Avx512 {
    wide!();
    type Floats = super::x86::Avx512Floats;
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run<L: Lanes, C: Codec<L>, O: Combine<L>>(call: &Call<'_>) {
        // SAFETY: the caller's promise.
        unsafe { fold::<L, C, O>(call) }
    }
}

fn select<T: Target>(dtype: DataType, operator: &Operator) -> Option<Kernel> {
    match dtype {
        DataType::I8 => integer::<T, T::I8, T::U8>(operator),
        DataType::U8 => integer::<T, T::U8, T::U8>(operator),
        DataType::I32 => integer::<T, T::I32, T::U32>(operator),
        DataType::U32 => integer::<T, T::U32, T::U32>(operator),
        DataType::I64 => integer::<T, T::I64, T::U64>(operator),
        DataType::U64 => integer::<T, T::U64, T::U64>(operator),
        DataType::F32 => arithmetic::<T, T::Floats, Same>(operator),
        DataType::F64 => arithmetic::<T, T::F64, Same>(operator),
        DataType::F16 => arithmetic::<T, T::Floats, F16>(operator),
        DataType::Bf16 => arithmetic::<T, T::Floats, Bf16>(operator),
        DataType::F8E4M3 => arithmetic::<T, T::Floats, F8E4M3>(operator),
        DataType::F8E5M2 => arithmetic::<T, T::Floats, F8E5M2>(operator),
    }
}

/// `U` is the unsigned twin of `L`: where the sign makes no difference, both types share a kernel.
fn integer<T: Target, L: Lanes, U: BitLanes>(operator: &Operator) -> Option<Kernel> {
    match operator {
        Operator::Sum => Some(T::run::<U, Same, Sum>),
        Operator::Product => Some(T::run::<U, Same, Product>),
        Operator::BitAnd => Some(T::run::<U, Same, And>),
        Operator::BitOr => Some(T::run::<U, Same, Or>),
        Operator::BitXor => Some(T::run::<U, Same, Xor>),
        _ => arithmetic::<T, L, Same>(operator),
    }
}

fn arithmetic<T: Target, L: Lanes, C: Codec<L>>(operator: &Operator) -> Option<Kernel> {
    match operator {
        Operator::Sum => Some(T::run::<L, C, Sum>),
        Operator::Product => Some(T::run::<L, C, Product>),
        Operator::Min => Some(T::run::<L, C, Minimum>),
        Operator::Max => Some(T::run::<L, C, Maximum>),
        Operator::Average => Some(T::run::<L, C, Mean>),
        Operator::PreMulSum(_) => Some(T::run::<L, C, ScaledSum>),
        Operator::BitAnd | Operator::BitOr | Operator::BitXor | Operator::Custom(_) => None,
    }
}
