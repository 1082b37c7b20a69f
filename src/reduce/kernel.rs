//! The loop that folds a few operands, written once for every type, operator and instruction set.
//!
//! A kernel walks over the positions in groups of lanes that fit in a few registers: it loads the group of
//! every operand, combines them in the canonical order, applies the final step if an element is wanted, and
//! stores. So every operand is read once, the output is written once, and the output may be one of the
//! operands. The last, partial group goes through the same code by way of a padded copy; hence equal inputs
//! give equal bits wherever they lie.

use std::sync::atomic::{Ordering, compiler_fence};

use super::{Operand, Representation};

/// What a kernel works on; see [`super::Reducer::fold`].
pub(super) struct Call<'a> {
    /// One, two, or (where the operator is [`Combine::WIDE`]) [`WIDEST`] of them.
    pub(super) operands: &'a [Operand],
    pub(super) out: *mut u8,
    pub(super) representation: Representation,
    pub(super) count: usize,
    /// What an average divides by.
    pub(super) ranks: u32,
}

/// A compiled loop for one type, operator and instruction set.
///
/// # Safety
/// The processor has the instruction set, and the pointers are valid as [`super::Reducer::fold`] wants them.
pub(super) type Kernel = unsafe fn(&Call<'_>);

/// The most operands of one kernel call. More are folded by way of blocks in the first-level cache; kernels
/// for more, or for all operators, were no faster by what they cost in size and in time to compile.
pub(super) const WIDEST: usize = 4;

/// One accumulator.
pub(super) trait Scalar: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn divide(self, ranks: u32) -> Self;
    /// The scalar of a pre-multiplied sum: rounded to a float, truncated and saturated to an integer.
    fn from_scale(scale: f64) -> Self;
    /// Itself, or the canonical NaN.
    fn canonical(self) -> Self;
}

/// Integers, which also have bitwise operators.
pub(super) trait Bits: Scalar {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// Accumulators that are worked on together.
pub(super) trait Lanes: Copy {
    type Scalar: Scalar;
    const COUNT: usize;
    /// # Safety
    /// `from` is readable for [`Lanes::COUNT`] accumulators; this and every other method: the instruction set
    /// is there.
    unsafe fn load(from: *const u8) -> Self;
    /// # Safety
    /// `into` is writable for [`Lanes::COUNT`] accumulators.
    unsafe fn store(self, into: *mut u8);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    unsafe fn minimum(self, other: Self) -> Self;
    unsafe fn maximum(self, other: Self) -> Self;
    unsafe fn scale(self, scale: f64) -> Self;
    unsafe fn divide(self, ranks: u32) -> Self;
    unsafe fn canonical(self) -> Self;
}

/// Lanes of integers.
pub(super) trait BitLanes: Lanes {
    unsafe fn and(self, other: Self) -> Self;
    unsafe fn or(self, other: Self) -> Self;
    unsafe fn xor(self, other: Self) -> Self;
}

/// Lanes of `f32`, which the short float types widen to and are rounded from.
pub(super) trait FloatLanes: Lanes<Scalar = f32> {
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn store_f16(self, into: *mut u8);
    unsafe fn load_bf16(from: *const u8) -> Self;
    unsafe fn store_bf16(self, into: *mut u8);
    unsafe fn load_e4m3(from: *const u8) -> Self;
    unsafe fn store_e4m3(self, into: *mut u8);
    unsafe fn load_e5m2(from: *const u8) -> Self;
    unsafe fn store_e5m2(self, into: *mut u8);
}

/// How elements of a type become lanes, and lanes elements.
pub(super) trait Codec<L: Lanes> {
    /// Bytes of an element.
    const SIZE: usize;
    /// Whether an element is an accumulator.
    const SAME: bool = false;
    unsafe fn load(from: *const u8) -> L;
    unsafe fn store(lanes: L, into: *mut u8);
}

/// Elements that are accumulators.
pub(super) struct Same;

impl<L: Lanes> Codec<L> for Same {
    const SIZE: usize = size_of::<L::Scalar>();
    const SAME: bool = true;
    #[inline(always)]
    unsafe fn load(from: *const u8) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn store(lanes: L, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { lanes.canonical().store(into) }
    }
}

macro_rules! short_codec {
    ($name:ident, $size:literal, $load:ident, $store:ident) => {
        pub(super) struct $name;

        impl<L: FloatLanes> Codec<L> for $name {
            const SIZE: usize = $size;
            #[inline(always)]
            unsafe fn load(from: *const u8) -> L {
                // SAFETY: the caller's promise.
                unsafe { L::$load(from) }
            }
            #[inline(always)]
            unsafe fn store(lanes: L, into: *mut u8) {
                // SAFETY: the caller's promise.
                unsafe { lanes.$store(into) }
            }
        }
    };
}
short_codec!(F16, 2, load_f16, store_f16);
short_codec!(Bf16, 2, load_bf16, store_bf16);
short_codec!(F8E4M3, 1, load_e4m3, store_e4m3);
short_codec!(F8E5M2, 1, load_e5m2, store_e5m2);

/// An operator on lanes.
pub(super) trait Combine<L: Lanes> {
    /// Whether elements are scaled when they are loaded.
    const SCALES: bool = false;
    /// Whether the final step divides by the number of ranks.
    const DIVIDES: bool = false;
    /// Whether there is a loop for [`WIDEST`] operands at once.
    const WIDE: bool = false;
    unsafe fn combine(left: L, right: L) -> L;
}

macro_rules! combine {
    ($name:ident, $lanes:ident, $method:ident $(, $flag:ident)*) => {
        pub(super) struct $name;

        impl<L: $lanes> Combine<L> for $name {
            $(const $flag: bool = true;)*
            #[inline(always)]
            unsafe fn combine(left: L, right: L) -> L {
                // SAFETY: the caller's promise.
                unsafe { left.$method(right) }
            }
        }
    };
}
combine!(Sum, Lanes, add, WIDE);
combine!(Mean, Lanes, add, DIVIDES, WIDE);
combine!(ScaledSum, Lanes, add, SCALES);
combine!(Product, Lanes, multiply);
combine!(Minimum, Lanes, minimum);
combine!(Maximum, Lanes, maximum);
combine!(And, BitLanes, and);
combine!(Or, BitLanes, or);
combine!(Xor, BitLanes, xor);

/// The body of every kernel: to be inlined into a function that has the instruction set enabled.
///
/// # Safety
/// As [`Kernel`].
#[inline(always)]
pub(super) unsafe fn fold<L: Lanes, C: Codec<L>, O: Combine<L>>(call: &Call<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match call.operands {
            [a] => fold_array::<L, C, O, 1>(&[*a], call),
            [a, b] => fold_array::<L, C, O, 2>(&[*a, *b], call),
            [a, b, c, d] if O::WIDE => fold_array::<L, C, O, WIDEST>(&[*a, *b, *c, *d], call),
            other => unreachable!("no kernel folds {} operands", other.len()),
        }
    }
}

#[inline(always)]
unsafe fn fold_array<L: Lanes, C: Codec<L>, O: Combine<L>, const K: usize>(
    operands: &[Operand; K],
    call: &Call<'_>,
) {
    let rest = call.count % L::COUNT;
    let whole = call.count - rest;
    let mut padded = [Padded([0; PADDED]); K];
    let mut padded_out = Padded([0; PADDED]);
    let (mut operands, mut out, mut end) = (*operands, call.out, whole);
    // SAFETY: groups below `whole` lie inside the operands and the output. The partial group is copied to and
    // from arrays that hold a full one. All loads of a group precede its store, so the output may be an
    // operand.
    unsafe {
        loop {
            let mut at = 0;
            while at < end {
                let group = tree::<L, C, O, K>(&operands, at);
                store::<L, C, O>(group, out, call.representation, at, call.ranks);
                at += L::COUNT;
                // No instruction. It keeps the compiler from vectorising across groups, with gathers and
                // scatters; within a group it does so with plain loads and stores.
                compiler_fence(Ordering::SeqCst);
            }
            if rest == 0 {
                return;
            }
            if out != call.out {
                break;
            }
            // Once more, for the partial group.
            for (operand, padded) in operands.iter_mut().zip(&mut padded) {
                let size = size_in::<L, C>(operand.representation);
                operand.address.add(whole * size).copy_to_nonoverlapping(padded.0.as_mut_ptr(), rest * size);
                operand.address = padded.0.as_ptr();
            }
            out = padded_out.0.as_mut_ptr();
            end = L::COUNT;
        }
        let size = size_in::<L, C>(call.representation);
        call.out.add(whole * size).copy_from_nonoverlapping(padded_out.0.as_ptr(), rest * size);
    }
}

/// Bytes of the largest group of accumulators.
const PADDED: usize = 128;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Padded([u8; PADDED]);

#[inline(always)]
fn size_in<L: Lanes, C: Codec<L>>(representation: Representation) -> usize {
    const { assert!(L::COUNT * size_of::<L::Scalar>() <= PADDED) };
    match representation {
        Representation::Element => C::SIZE,
        Representation::Accumulator => size_of::<L::Scalar>(),
    }
}

/// The canonical tree over the groups at position `at`.
#[inline(always)]
unsafe fn tree<L: Lanes, C: Codec<L>, O: Combine<L>, const K: usize>(
    operands: &[Operand; K],
    at: usize,
) -> L {
    // SAFETY: the caller's promise. `K` is constant, so one arm is left.
    unsafe {
        let a = load::<L, C, O>(&operands[0], at);
        if K == 1 {
            return a;
        }
        let ab = O::combine(a, load::<L, C, O>(&operands[1], at));
        if K == 2 {
            return ab;
        }
        let c = load::<L, C, O>(&operands[2], at);
        O::combine(ab, O::combine(c, load::<L, C, O>(&operands[3], at)))
    }
}

#[inline(always)]
unsafe fn load<L: Lanes, C: Codec<L>, O: Combine<L>>(operand: &Operand, at: usize) -> L {
    let from = operand.address.wrapping_add(at * size_in::<L, C>(operand.representation));
    let is_element = operand.representation == Representation::Element;
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = if C::SAME || !is_element { L::load(from) } else { C::load(from) };
        if O::SCALES && is_element { lanes.scale(operand.scale) } else { lanes }
    }
}

#[inline(always)]
unsafe fn store<L: Lanes, C: Codec<L>, O: Combine<L>>(
    lanes: L,
    out: *mut u8,
    representation: Representation,
    at: usize,
    ranks: u32,
) {
    let into = out.wrapping_add(at * size_in::<L, C>(representation));
    // SAFETY: the caller's promise.
    unsafe {
        match representation {
            Representation::Accumulator => lanes.store(into),
            Representation::Element if O::DIVIDES => C::store(lanes.divide(ranks), into),
            Representation::Element => C::store(lanes, into),
        }
    }
}
