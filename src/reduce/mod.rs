//! Element types, operators, and the loops that combine elements.
//!
//! Three representations meet here. An *element* is what the caller's buffer holds. An *accumulator* is what
//! partial results are kept in: `f32` for `f16`, `bf16` and both `f8`, the element itself for every other
//! type and for the caller's own functions. A *result* is an accumulator after the operator's final step
//! (average divides), rounded once to an element, with NaNs made canonical.

mod convert;
mod fold;
mod kernel;
mod plain;
mod select;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::error::{Result, fail};

pub use fold::{Operand, Reducer};

/// Element types. The numbers are part of the ABI and equal NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum DataType {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    F8E4M3 = 10,
    F8E5M2 = 11,
}

impl DataType {
    /// Every type, in the order of the numbers.
    pub const ALL: [DataType; 12] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::Bf16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ];

    /// The type behind an ABI number.
    pub fn from_number(number: i32) -> Result<DataType> {
        match usize::try_from(number).ok().and_then(|n| DataType::ALL.get(n)) {
            Some(&dtype) => Ok(dtype),
            None => {
                fail!(InvalidArgument, "dtype {number} is unknown; the types are 0 (int8) to 11 (float8e5m2)")
            }
        }
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }

    /// Whether it holds a floating-point number.
    pub const fn is_float(self) -> bool {
        !matches!(
            self,
            DataType::I8 | DataType::U8 | DataType::I32 | DataType::U32 | DataType::I64 | DataType::U64
        )
    }

    /// The type that partial results are kept in.
    pub const fn accumulator(self) -> DataType {
        match self {
            DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => DataType::F32,
            other => other,
        }
    }

    /// The name that errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::I8 => "int8",
            DataType::U8 => "uint8",
            DataType::I32 => "int32",
            DataType::U32 => "uint32",
            DataType::I64 => "int64",
            DataType::U64 => "uint64",
            DataType::F16 => "float16",
            DataType::F32 => "float32",
            DataType::F64 => "float64",
            DataType::Bf16 => "bfloat16",
            DataType::F8E4M3 => "float8e4m3",
            DataType::F8E5M2 => "float8e5m2",
        }
    }
}

/// What a position of a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Representation {
    /// Elements, as in the caller's buffers.
    Element,
    /// Accumulators: wider than elements for the short float types.
    Accumulator,
}

/// The caller's own reduction: `accumulator[i] = accumulator[i] ∘ operand[i]` for `count` elements of
/// `dtype`. Associative; it need not commute, since the canonical order keeps left on the left. It may be
/// called from any thread of the library, several at once.
pub type CustomFunction = unsafe extern "C" fn(
    accumulator: *mut std::ffi::c_void,
    operand: *const std::ffi::c_void,
    count: u64,
    dtype: i32,
    user: *mut std::ffi::c_void,
);

/// A caller's function with the pointer it is called with.
#[derive(Clone, Copy, Debug)]
pub struct Custom {
    /// What combines.
    pub function: CustomFunction,
    /// Handed back on every call.
    pub user: *mut std::ffi::c_void,
}

/// Equal addresses. Copies of one function may differ in theirs, so unequal does not mean that they do
/// different things.
impl PartialEq for Custom {
    fn eq(&self, other: &Custom) -> bool {
        std::ptr::fn_addr_eq(self.function, other.function) && self.user == other.user
    }
}

// SAFETY: the contract of `CustomFunction` says that any thread may call it with `user`.
unsafe impl Send for Custom {}
// SAFETY: as above, several at once.
unsafe impl Sync for Custom {}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operator {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Product,
    /// The smaller; a NaN on either side gives NaN.
    Min,
    /// The larger; a NaN on either side gives NaN.
    Max,
    /// Sum divided by the number of ranks: integers truncate toward zero, floats divide in the accumulator.
    Average,
    /// Sum of each rank's input times that rank's scalar.
    PreMulSum(f64),
    /// Bitwise and; integers only.
    BitAnd,
    /// Bitwise or; integers only.
    BitOr,
    /// Bitwise exclusive or; integers only.
    BitXor,
    /// The caller's own.
    Custom(Custom),
}

impl Operator {
    /// The ABI number; part of a call's signature on the wire.
    pub const fn number(&self) -> u8 {
        match self {
            Operator::Sum => 0,
            Operator::Product => 1,
            Operator::Max => 2,
            Operator::Min => 3,
            Operator::Average => 4,
            Operator::PreMulSum(_) => 5,
            Operator::BitAnd => 6,
            Operator::BitOr => 7,
            Operator::BitXor => 8,
            Operator::Custom(_) => 9,
        }
    }

    /// The name behind an ABI number, for errors about calls of other ranks.
    pub const fn name_of(number: u8) -> &'static str {
        match number {
            0 => "sum",
            1 => "product",
            2 => "max",
            3 => "min",
            4 => "average",
            5 => "premulsum",
            6 => "and",
            7 => "or",
            8 => "xor",
            9 => "custom",
            _ => "unknown operator",
        }
    }
}
