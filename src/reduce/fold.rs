//! Folds of any number of operands: the canonical tree, cut into pieces that kernels take.

use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;

use super::kernel::{Call, Kernel, WIDEST};
use super::select::Level;
use super::{Custom, DataType, Operator, Representation};
use crate::error::{Result, fail};
use crate::sys::float::Standard;

/// Combines operands of one type by one operator, for a group of one size.
///
/// A fold is the canonical tree over its operands: `tree(lo, n) = tree(lo, m) ∘ tree(lo + m, n − m)`, where
/// `m` is the largest power of two below `n`. Its bits depend on the operands' values alone: not on the
/// processor, the alignment, the count, or how a larger tree was cut into folds through accumulators.
///
/// - Integers wrap; their average is the wrapped sum, divided and truncated toward zero; a pre-multiplied sum
///   multiplies by the scalar truncated (and saturated) to the type.
/// - `f16`, `bf16` and both `f8` accumulate in `f32` and are rounded once, to nearest, ties to even. What is
///   too large becomes infinity; in `f8e4m3`, which has none, NaN.
/// - A NaN on either side of minimum and maximum gives NaN; −0 is below +0.
/// - A NaN that is stored as an element is the type's canonical one: quiet, positive, nothing else in its
///   payload (0x7f in `f8e4m3`). In an accumulator its sign and payload are unspecified.
/// - A caller's own function works on elements, and what it writes is stored as it is.
/// - How the thread rounds, whether it flushes subnormal numbers and what it traps makes no difference, but
///   to a caller's own function.
#[derive(Clone, Copy)]
pub struct Reducer {
    dtype: DataType,
    ranks: u32,
    /// Whether the kernel folds [`WIDEST`] operands at once.
    wide: bool,
    work: Work,
}

/// One operand of a fold.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Its first position, at any alignment.
    pub address: *const u8,
    /// What its positions hold.
    pub representation: Representation,
    /// What [`Operator::PreMulSum`] multiplies elements by, in the accumulator. Accumulators are taken as
    /// scaled already, and other operators do not look at it.
    pub scale: f64,
}

#[derive(Clone, Copy)]
enum Work {
    Kernel(Kernel),
    Custom(Custom),
}

impl Reducer {
    /// Whether it calls a function of the program, which may take as long as it likes.
    pub fn calls_program(&self) -> bool {
        matches!(self.work, Work::Custom(_))
    }

    /// Refuses bitwise operators on floats, and a group of no ranks.
    pub fn new(dtype: DataType, operator: Operator, ranks: u32) -> Result<Reducer> {
        let best = Level::available().next_back().unwrap_or(Level::Baseline);
        Reducer::at_level(best, dtype, operator, ranks)
    }

    /// `level` is one of [`Level::available`].
    pub(super) fn at_level(level: Level, dtype: DataType, operator: Operator, ranks: u32) -> Result<Reducer> {
        if ranks == 0 {
            fail!(InvalidArgument, "a reduction over 0 ranks; a group has at least one");
        }
        let work = match (operator, level.kernel(dtype, &operator)) {
            (Operator::Custom(custom), _) => Work::Custom(custom),
            (_, Some(kernel)) => Work::Kernel(kernel),
            (_, None) => {
                let operator = Operator::name_of(operator.number());
                fail!(
                    InvalidArgument,
                    "operator '{operator}' works on integers only, not on {}; use an integer type of the same size",
                    dtype.name()
                )
            }
        };
        let wide = matches!(operator, Operator::Sum | Operator::Average);
        Ok(Reducer { dtype, ranks, wide, work })
    }

    /// Bytes of one element.
    pub fn element_size(&self) -> usize {
        self.dtype.size()
    }

    /// Bytes of one accumulator.
    pub fn accumulator_size(&self) -> usize {
        match self.work {
            Work::Kernel(_) => self.dtype.accumulator().size(),
            Work::Custom(_) => self.dtype.size(),
        }
    }

    /// Combines `count` positions of `operands`, in the canonical order, into `out`, which holds
    /// `representation`.
    ///
    /// Storing elements applies the final step: average divides, short floats are rounded, NaNs become
    /// canonical. Storing accumulators leaves that to a later fold. One operand is converted. A count of 0
    /// touches nothing.
    ///
    /// # Panics
    /// If there are no operands.
    ///
    /// # Safety
    /// Every operand is readable, and `out` writable, for `count` positions of its representation, at any
    /// alignment. `out` overlaps no operand, except that it may be operands: same address, same size of a
    /// position. Nobody writes the operands or touches `out` meanwhile.
    pub unsafe fn fold(
        &self,
        operands: &[Operand],
        out: *mut u8,
        representation: Representation,
        count: usize,
    ) {
        assert!(!operands.is_empty(), "a fold has at least one operand");
        if count == 0 {
            return;
        }
        let _standard = matches!(self.work, Work::Kernel(_)).then(Standard::enter);
        // SAFETY: the caller's promise; `at_level` chose a kernel that this processor can run.
        unsafe {
            match self.work {
                Work::Kernel(kernel) if self.is_direct(operands.len()) => {
                    kernel(&Call { operands, out, representation, count, ranks: self.ranks });
                }
                Work::Kernel(kernel) => {
                    for at in (0..count).step_by(BLOCK) {
                        let out = out.add(at * self.size(representation));
                        self.tree(kernel, operands, at, out, representation, BLOCK.min(count - at));
                    }
                }
                Work::Custom(custom) => {
                    for at in (0..count).step_by(BLOCK) {
                        let count = BLOCK.min(count - at);
                        let mut block = Block::UNINIT;
                        self.custom_tree(custom, operands, at, &mut block, count);
                        let size = self.element_size();
                        out.add(at * size).copy_from_nonoverlapping(block.address(), count * size);
                    }
                }
            }
        }
    }

    /// Folds any number of operands over one block of positions from `at`. The halves of the tree go through
    /// blocks that stay in the first-level cache, so each operand is still read from memory once.
    ///
    /// # Safety
    /// As [`Reducer::fold`]; `count` is at most [`BLOCK`].
    unsafe fn tree(
        &self,
        kernel: Kernel,
        operands: &[Operand],
        at: usize,
        out: *mut u8,
        representation: Representation,
        count: usize,
    ) {
        let ranks = self.ranks;
        if self.is_direct(operands.len()) {
            let mut here = [operands[0]; WIDEST];
            for (here, operand) in here.iter_mut().zip(operands) {
                *here = self.advance(operand, at);
            }
            let operands = &here[..operands.len()];
            // SAFETY: the caller's promise.
            return unsafe { kernel(&Call { operands, out, representation, count, ranks }) };
        }
        let (left, right) = operands.split_at(left_part(operands.len()));
        let mut blocks = [Block::UNINIT; 2];
        let mut here = [operands[0]; 2];
        for ((half, block), here) in [left, right].into_iter().zip(&mut blocks).zip(&mut here) {
            *here = match half {
                [single] => self.advance(single, at),
                _ => {
                    let accumulator = Representation::Accumulator;
                    // SAFETY: the caller's promise; a block holds the largest accumulators.
                    unsafe { self.tree(kernel, half, at, block.address(), accumulator, count) };
                    Operand { address: block.address(), representation: accumulator, scale: 1.0 }
                }
            };
        }
        // SAFETY: as above. Everything of this block of `out` has been read by now, or is read by this call.
        unsafe { kernel(&Call { operands: &here, out, representation, count, ranks }) }
    }

    /// The canonical tree by the caller's function, over one block of positions from `at`, into `out`. The
    /// function sees aligned elements only, and never the output: that may be an operand which is still to be
    /// read.
    ///
    /// # Safety
    /// As [`Reducer::fold`]; `count` is at most [`BLOCK`].
    unsafe fn custom_tree(
        &self,
        custom: Custom,
        operands: &[Operand],
        at: usize,
        out: &mut Block,
        count: usize,
    ) {
        if let [single] = operands {
            let from = self.advance(single, at).address;
            // SAFETY: the caller's promise; a block holds the largest elements.
            return unsafe { out.address().copy_from_nonoverlapping(from, count * self.element_size()) };
        }
        let (left, right) = operands.split_at(left_part(operands.len()));
        let mut block = Block::UNINIT;
        // SAFETY: the caller's promise, and the contract of the caller's function.
        unsafe {
            self.custom_tree(custom, left, at, out, count);
            let operand = match right {
                [single] if self.advance(single, at).address.addr().is_multiple_of(self.element_size()) => {
                    self.advance(single, at).address
                }
                _ => {
                    self.custom_tree(custom, right, at, &mut block, count);
                    block.address()
                }
            };
            let accumulator = out.address().cast::<c_void>();
            (custom.function)(accumulator, operand.cast(), count as u64, self.dtype as i32, custom.user);
        }
    }

    /// Whether one kernel call folds this many operands.
    fn is_direct(&self, operands: usize) -> bool {
        operands <= 2 || (operands == WIDEST && self.wide)
    }

    fn size(&self, representation: Representation) -> usize {
        match representation {
            Representation::Element => self.element_size(),
            Representation::Accumulator => self.accumulator_size(),
        }
    }

    /// The operand from position `at`.
    fn advance(&self, operand: &Operand, at: usize) -> Operand {
        let address = operand.address.wrapping_add(at * self.size(operand.representation));
        Operand { address, ..*operand }
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("dtype", &self.dtype)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

/// How many of `operands`, at least two, the left half of the canonical tree has.
fn left_part(operands: usize) -> usize {
    operands.next_power_of_two() / 2
}

/// Positions that a fold of many operands works on at a time.
const BLOCK: usize = 512;

/// Room for [`BLOCK`] of the largest accumulators.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block(MaybeUninit<[u8; BLOCK * 8]>);

impl Block {
    const UNINIT: Block = Block(MaybeUninit::uninit());

    fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
