//! Lanes of `f32` in AVX2 and AVX-512 registers, with the conversions that compilers do not find.
//!
//! Every method agrees bit for bit with the arrays of `plain`, NaN payloads in accumulators aside.

use std::arch::x86_64::*;

use super::convert::{E4M3, E5M2};
use super::kernel::{FloatLanes, Lanes};
use super::plain::store_each;

/// 16 lanes for processors with AVX2 and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2Floats([__m256; 2]);

/// 32 lanes for processors with AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512Floats([__m512; 2]);

/// The arithmetic, which differs between the two in names only. `$nan_where_either` gives its first argument,
/// but NaN where one of the others is.
macro_rules! arithmetic {
    (
        $lanes:ident, $width:literal, $load:ident, $store:ident, $splat:ident, $add:ident, $multiply:ident,
        $divide:ident, $minimum:ident, $maximum:ident, $and:ident, $or:ident, $nan_where_either:ident
    ) => {
        impl Lanes for $lanes {
            type Scalar = f32;
            const COUNT: usize = 2 * $width;

            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                let from = from.cast::<f32>();
                // SAFETY: the caller's promise, as in every method here: instruction set and memory.
                unsafe { $lanes([$load(from), $load(from.add($width))]) }
            }

            #[inline(always)]
            unsafe fn store(self, into: *mut u8) {
                let into = into.cast::<f32>();
                // SAFETY: the caller's promise.
                unsafe {
                    $store(into, self.0[0]);
                    $store(into.add($width), self.0[1]);
                }
            }

            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { $lanes([$add(self.0[0], other.0[0]), $add(self.0[1], other.0[1])]) }
            }

            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { $lanes([$multiply(self.0[0], other.0[0]), $multiply(self.0[1], other.0[1])]) }
            }

            /// The instruction gives its second operand for two zeros or a NaN, as the choices of the scalar
            /// do.
            #[inline(always)]
            unsafe fn minimum(mut self, other: Self) -> Self {
                for (a, b) in self.0.iter_mut().zip(other.0) {
                    // SAFETY: the caller's promise.
                    unsafe { *a = $or($minimum(*a, b), $minimum(b, *a)) };
                }
                self
            }

            #[inline(always)]
            unsafe fn maximum(mut self, other: Self) -> Self {
                for (a, b) in self.0.iter_mut().zip(other.0) {
                    // SAFETY: the caller's promise.
                    unsafe { *a = $nan_where_either($and($maximum(*a, b), $maximum(b, *a)), *a, b) };
                }
                self
            }

            #[inline(always)]
            unsafe fn scale(self, scale: f64) -> Self {
                // SAFETY: the caller's promise.
                unsafe { self.multiply($lanes([$splat(scale as f32); 2])) }
            }

            #[inline(always)]
            unsafe fn divide(self, ranks: u32) -> Self {
                // SAFETY: the caller's promise.
                unsafe {
                    let ranks = $splat(ranks as f32);
                    $lanes([$divide(self.0[0], ranks), $divide(self.0[1], ranks)])
                }
            }

            #[inline(always)]
            unsafe fn canonical(self) -> Self {
                let [low, high] = self.0;
                // SAFETY: the caller's promise.
                unsafe { $lanes([$nan_where_either(low, low, low), $nan_where_either(high, high, high)]) }
            }
        }
    };
}

arithmetic!(
    Avx2Floats,
    8,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_mul_ps,
    _mm256_div_ps,
    _mm256_min_ps,
    _mm256_max_ps,
    _mm256_and_ps,
    _mm256_or_ps,
    nan_where_either_256
);
arithmetic!(
    Avx512Floats,
    16,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_mul_ps,
    _mm512_div_ps,
    _mm512_min_ps,
    _mm512_max_ps,
    _mm512_and_ps,
    _mm512_or_ps,
    nan_where_either_512
);

#[inline(always)]
unsafe fn nan_where_either_256(value: __m256, a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b)) }
}

#[inline(always)]
unsafe fn nan_where_either_512(value: __m512, a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b), _mm512_set1_ps(f32::NAN)) }
}

impl Avx2Floats {
    #[inline(always)]
    unsafe fn from_f16(bits: __m256i) -> Self {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let low = _mm256_castsi256_si128(bits);
            let high = _mm256_extracti128_si256::<1>(bits);
            Avx2Floats([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)])
        }
    }

    /// For the conversions that the compiler vectorises well enough from plain arithmetic.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; 16] {
        // SAFETY: registers are arrays of lanes.
        unsafe { std::mem::transmute(self) }
    }
}

impl FloatLanes for Avx2Floats {
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::from_f16(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = self.canonical().0;
            _mm_storeu_si128(into.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low));
            _mm_storeu_si128(into.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high));
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16).cast()));
            let [low, high] = [_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high)];
            Avx2Floats([_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)])
        }
    }

    /// The canonical NaN passes through the rounding unchanged.
    #[inline(always)]
    unsafe fn store_bf16(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = self.canonical().0;
            let [mut low, mut high] = [_mm256_castps_si256(low), _mm256_castps_si256(high)];
            for bits in [&mut low, &mut high] {
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(*bits), _mm256_set1_epi32(1));
                let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                *bits = _mm256_srli_epi32::<16>(_mm256_add_epi32(*bits, bias));
            }
            // Packing works within halves of the register: put the quarters in order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(into.cast(), packed);
        }
    }

    /// An E4M3 below its exponent bias is an `f16` 2^8 times smaller.
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(bytes, magnitude));
            let is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let scaled = _mm256_or_si256(sign, _mm256_slli_epi16::<7>(magnitude));
            let scaled = Self::from_f16(_mm256_or_si256(scaled, is_nan));
            scaled.multiply(Avx2Floats([_mm256_set1_ps(256.0); 2]))
        }
    }

    #[inline(always)]
    unsafe fn store_e4m3(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { store_each(self.to_array(), |lane| E4M3::narrow(lane) as u8, into) }
    }

    /// An E5M2 is the upper half of an `f16`.
    #[inline(always)]
    unsafe fn load_e5m2(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            Self::from_f16(_mm256_slli_epi16::<8>(bytes))
        }
    }

    #[inline(always)]
    unsafe fn store_e5m2(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { store_each(self.to_array(), |lane| E5M2::narrow(lane) as u8, into) }
    }
}

/// Which word goes where: the words of the lower half into the upper halves of 16 lanes; those of the upper
/// half; and back, the upper halves of the lanes of two registers.
const SPREAD_LOW: [u16; 32] = every_word(0, 1);
const SPREAD_HIGH: [u16; 32] = every_word(16, 1);
const UPPER: [u16; 32] = every_word(1, 4);

/// `first`, and `step` more for every two words.
const fn every_word(first: u16, step: u16) -> [u16; 32] {
    let mut words = [0; 32];
    let mut at = 0;
    while at < 32 {
        words[at] = first + at as u16 * step / 2;
        at += 1;
    }
    words
}

#[inline(always)]
unsafe fn words(words: [u16; 32]) -> __m512i {
    // SAFETY: a register is 32 words.
    unsafe { std::mem::transmute(words) }
}

impl Avx512Floats {
    #[inline(always)]
    unsafe fn from_f16(bits: __m512i) -> Self {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let low = _mm512_castsi512_si256(bits);
            let high = _mm512_extracti64x4_epi64::<1>(bits);
            Avx512Floats([_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)])
        }
    }

    /// For the conversions that the compiler vectorises well enough from plain arithmetic.
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; 32] {
        // SAFETY: registers are arrays of lanes.
        unsafe { std::mem::transmute(self) }
    }
}

impl FloatLanes for Avx512Floats {
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            let high = _mm512_cvtph_ps(_mm256_loadu_si256(from.add(32).cast()));
            Avx512Floats([low, high])
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = self.canonical().0;
            _mm256_storeu_si256(into.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low));
            _mm256_storeu_si256(into.add(32).cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high));
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_loadu_si512(from.cast());
            let low = _mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, words(SPREAD_LOW), bits);
            let high = _mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, words(SPREAD_HIGH), bits);
            Avx512Floats([_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)])
        }
    }

    /// The canonical NaN passes through the rounding unchanged. The instruction for this conversion of
    /// AVX512_BF16 is of no use: it takes subnormal numbers for zero.
    #[inline(always)]
    unsafe fn store_bf16(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = self.canonical().0;
            let [mut low, mut high] = [_mm512_castps_si512(low), _mm512_castps_si512(high)];
            for bits in [&mut low, &mut high] {
                let odd = _mm512_test_epi32_mask(*bits, _mm512_set1_epi32(1 << 16));
                let bias = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000));
                *bits = _mm512_add_epi32(*bits, bias);
            }
            let packed = _mm512_permutex2var_epi16(low, words(UPPER), high);
            _mm512_storeu_si512(into.cast(), packed);
        }
    }

    /// An E4M3 below its exponent bias is an `f16` 2^8 times smaller.
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
            let magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
            let sign = _mm512_slli_epi16::<8>(_mm512_xor_si512(bytes, magnitude));
            let is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
            let scaled = _mm512_or_si512(sign, _mm512_slli_epi16::<7>(magnitude));
            let scaled = Self::from_f16(_mm512_mask_mov_epi16(scaled, is_nan, _mm512_set1_epi16(0x7e00)));
            scaled.multiply(Avx512Floats([_mm512_set1_ps(256.0); 2]))
        }
    }

    #[inline(always)]
    unsafe fn store_e4m3(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { store_each(self.to_array(), |lane| E4M3::narrow(lane) as u8, into) }
    }

    /// An E5M2 is the upper half of an `f16`.
    #[inline(always)]
    unsafe fn load_e5m2(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
            Self::from_f16(_mm512_slli_epi16::<8>(bytes))
        }
    }

    #[inline(always)]
    unsafe fn store_e5m2(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { store_each(self.to_array(), |lane| E5M2::narrow(lane) as u8, into) }
    }
}
