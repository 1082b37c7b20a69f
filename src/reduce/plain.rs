//! Lanes as arrays: plain arithmetic that the compiler vectorises for whatever instruction set is enabled
//! around it.

use super::convert::{E4M3, E5M2, Half, narrow_bf16, widen_bf16};
use super::kernel::{BitLanes, Bits, FloatLanes, Lanes, Scalar};

macro_rules! lane_by_lane {
    ($($name:ident),*) => {
        $(
            #[inline(always)]
            unsafe fn $name(mut self, other: Self) -> Self {
                for lane in 0..N {
                    self[lane] = self[lane].$name(other[lane]);
                }
                self
            }
        )*
    };
}

impl<T: Scalar, const N: usize> Lanes for [T; N] {
    type Scalar = T;
    const COUNT: usize = N;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { into.cast::<Self>().write_unaligned(self) }
    }

    lane_by_lane!(add, multiply, minimum, maximum);

    #[inline(always)]
    unsafe fn scale(mut self, scale: f64) -> Self {
        let scale = T::from_scale(scale);
        for lane in &mut self {
            *lane = lane.multiply(scale);
        }
        self
    }

    #[inline(always)]
    unsafe fn divide(mut self, ranks: u32) -> Self {
        for lane in &mut self {
            *lane = lane.divide(ranks);
        }
        self
    }

    #[inline(always)]
    unsafe fn canonical(mut self) -> Self {
        for lane in &mut self {
            *lane = lane.canonical();
        }
        self
    }
}

impl<T: Bits, const N: usize> BitLanes for [T; N] {
    lane_by_lane!(and, or, xor);
}

macro_rules! short_float {
    ($load:ident, $store:ident, $bits:ty, $widen:path, $narrow:path) => {
        // Where the least of several levels alone uses it, less code is better than speed.
        #[cfg_attr(target_arch = "x86_64", inline(never))]
        #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
        unsafe fn $load(from: *const u8) -> Self {
            // SAFETY: the caller's promise.
            let bits = unsafe { from.cast::<[$bits; N]>().read_unaligned() };
            let mut lanes = [0.0; N];
            for lane in 0..N {
                lanes[lane] = $widen(u32::from(bits[lane]));
            }
            lanes
        }

        #[cfg_attr(target_arch = "x86_64", inline(never))]
        #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
        unsafe fn $store(self, into: *mut u8) {
            // SAFETY: the caller's promise.
            unsafe { store_each(self, |lane| $narrow(lane) as $bits, into) }
        }
    };
}

/// Stores what `narrow` makes of each lane.
///
/// # Safety
/// `into` is writable for so many.
#[inline(always)]
pub(super) unsafe fn store_each<T: Copy + Default, const N: usize>(
    lanes: [f32; N],
    narrow: impl Fn(f32) -> T,
    into: *mut u8,
) {
    let mut bits = [T::default(); N];
    for lane in 0..N {
        bits[lane] = narrow(lanes[lane]);
    }
    // SAFETY: the caller's promise.
    unsafe { into.cast::<[T; N]>().write_unaligned(bits) }
}

impl<const N: usize> FloatLanes for [f32; N] {
    short_float!(load_f16, store_f16, u16, Half::widen, Half::narrow);
    short_float!(load_bf16, store_bf16, u16, widen_bf16, narrow_bf16);
    short_float!(load_e4m3, store_e4m3, u8, E4M3::widen, E4M3::narrow);
    short_float!(load_e5m2, store_e5m2, u8, E5M2::widen, E5M2::narrow);
}

macro_rules! float_scalar {
    ($t:ty) => {
        impl Scalar for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            /// −0 is below +0; a NaN on either side gives NaN. Each choice gives its second operand when
            /// neither is smaller, so the two differ for zeros and NaNs alone: there the bits of both sides
            /// meet, which leaves the sign of −0 and a NaN a NaN.
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let first = if self < other { self } else { other };
                let second = if other < self { other } else { self };
                Self::from_bits(first.to_bits() | second.to_bits())
            }
            /// As the minimum, but that the bits two NaNs share need not make a NaN.
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let first = if self > other { self } else { other };
                let second = if other > self { other } else { self };
                let either = Self::from_bits(first.to_bits() & second.to_bits());
                if self.is_nan() | other.is_nan() { Self::NAN } else { either }
            }
            #[inline(always)]
            fn divide(self, ranks: u32) -> Self {
                self / ranks as $t
            }
            #[inline(always)]
            fn from_scale(scale: f64) -> Self {
                scale as $t
            }
            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { Self::NAN } else { self }
            }
        }
    };
}
float_scalar!(f32);
float_scalar!(f64);

/// Division of 64-bit integers, in which any number of ranks fits.
macro_rules! divide_long {
    ($t:ty) => {
        #[inline(always)]
        fn divide(self, ranks: u32) -> Self {
            self / <$t>::from(ranks)
        }
    };
}

/// Division of shorter integers as one multiplication of floats, which is vectorised where a division of
/// integers is not. The reciprocal is too large by `$excess`: by more than it is rounded, so that no whole
/// quotient falls short, and by less than one part in the largest value of the type, so that no other
/// quotient reaches the next whole number, which is at least `1 / ranks` away.
macro_rules! divide_short {
    ($float:ty, $excess:expr) => {
        #[inline(always)]
        fn divide(self, ranks: u32) -> Self {
            let reciprocal = (1.0 + $excess) / ranks.max(1) as $float;
            // SAFETY: `ranks` is not 0, so the quotient has at most the size of the dividend and, being less
            // than one above it, is in the type's range once truncated.
            unsafe { (self as $float * reciprocal).to_int_unchecked() }
        }
    };
}

macro_rules! integer_scalar {
    ($t:ty, $divide:ident!($($how:tt)*)) => {
        impl Scalar for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }
            $divide!($($how)*);
            #[inline(always)]
            fn from_scale(scale: f64) -> Self {
                scale as $t
            }
            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }
        }

        impl Bits for $t {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    };
}
integer_scalar!(i8, divide_short!(f32, 4.0 * f32::EPSILON));
integer_scalar!(u8, divide_short!(f32, 4.0 * f32::EPSILON));
integer_scalar!(i32, divide_short!(f64, 4.0 * f64::EPSILON));
integer_scalar!(u32, divide_short!(f64, 4.0 * f64::EPSILON));
integer_scalar!(i64, divide_long!(i64));
integer_scalar!(u64, divide_long!(u64));
