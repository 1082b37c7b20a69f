//! Conversions between the short float types and `f32`, in arithmetic that compilers vectorise.
//!
//! Every value of a short type is an `f32`, so widening is exact. Narrowing rounds once, to nearest, ties to
//! even; every NaN becomes the type's canonical quiet NaN, whose sign is positive. What is too large becomes
//! infinity, or NaN in `f8e4m3`, which has no infinity (as PyTorch converts to `float8_e4m3fn`).

/// A float format of at most 16 bits: a sign, `EXPONENT` bits with the usual bias, `MANTISSA` bits.
#[derive(Clone, Copy)]
pub(super) struct Format<const EXPONENT: u32, const MANTISSA: u32, const INFINITY: bool>;

/// IEEE binary16.
pub(super) type Half = Format<5, 10, true>;
/// OCP 8-bit float E5M2.
pub(super) type E5M2 = Format<5, 2, true>;
/// OCP 8-bit float E4M3: no infinities, one NaN of each sign.
pub(super) type E4M3 = Format<4, 3, false>;

impl<const EXPONENT: u32, const MANTISSA: u32, const INFINITY: bool> Format<EXPONENT, MANTISSA, INFINITY> {
    const SIGN: u32 = 1 << (EXPONENT + MANTISSA);
    const BIAS: u32 = (1 << (EXPONENT - 1)) - 1;
    /// How far the mantissa lies below that of an `f32`.
    const SHIFT: u32 = 23 - MANTISSA;
    /// All exponent bits: infinity where the format has one.
    const TOP: u32 = ((1 << EXPONENT) - 1) << MANTISSA;
    /// The canonical NaN.
    const NAN: u32 = if INFINITY { Self::TOP | 1 << (MANTISSA - 1) } else { Self::SIGN - 1 };
    /// The magnitude above which there are NaNs only.
    const LAST: u32 = if INFINITY { Self::TOP } else { Self::SIGN - 2 };
    /// The value of the lowest mantissa bit of a subnormal number: 2^(1 − bias − mantissa).
    const STEP: f32 = f32::from_bits((127 + 1 - Self::BIAS - MANTISSA) << 23);
    /// 2^23 steps: adding it to a smaller number rounds that number to a multiple of the step.
    const MAGIC: f32 = f32::from_bits((127 + 1 - Self::BIAS - MANTISSA + 23) << 23);

    /// The `f32` of the same value. Infinity and NaN keep their kind, NaN its sign.
    #[inline(always)]
    pub(super) fn widen(bits: u32) -> f32 {
        let magnitude = bits & (Self::SIGN - 1);
        let sign = (bits & Self::SIGN) << (31 - EXPONENT - MANTISSA);
        let normal = (magnitude << Self::SHIFT) + ((127 - Self::BIAS) << 23);
        let subnormal = (magnitude as i32 as f32 * Self::STEP).to_bits();
        let finite = if magnitude < 1 << MANTISSA { subnormal } else { normal };
        let special = if INFINITY { 0x7f80_0000 | magnitude << Self::SHIFT } else { 0x7fc0_0000 };
        let special_from = if INFINITY { Self::TOP } else { Self::NAN };
        f32::from_bits(sign | if magnitude >= special_from { special } else { finite })
    }

    /// The nearest value of this format, ties to even.
    #[inline(always)]
    pub(super) fn narrow(value: f32) -> u32 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let sign = bits >> 31 << (EXPONENT + MANTISSA);
        let smallest_normal = (127 + 1 - Self::BIAS) << 23;
        // Normal: rebase the exponent, then round the mantissa; a carry moves into the exponent as it should.
        let odd = magnitude >> Self::SHIFT & 1;
        let rebased = magnitude.wrapping_sub((127 - Self::BIAS) << 23);
        let normal = rebased.wrapping_add((1 << (Self::SHIFT - 1)) - 1 + odd) >> Self::SHIFT;
        // Subnormal: the addition of an `f32` does the rounding.
        let subnormal =
            (f32::from_bits(magnitude) + Self::MAGIC).to_bits().wrapping_sub(Self::MAGIC.to_bits());
        let rounded = if magnitude < smallest_normal { subnormal } else { normal };
        // Signed comparisons: the vector units of older processors have no others, and the top bit is clear.
        let too_large = if INFINITY { Self::TOP } else { Self::NAN };
        let narrowed = if rounded as i32 > Self::LAST as i32 { too_large } else { rounded };
        let is_nan = magnitude > 0x7f80_0000 || (!INFINITY && narrowed == Self::NAN);
        if is_nan { Self::NAN } else { sign | narrowed }
    }
}

/// The `f32` whose upper half these bits are.
#[inline(always)]
pub(super) fn widen_bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// The nearest bfloat16, ties to even.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fc0 } else { rounded }
}
