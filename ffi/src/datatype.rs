//! Element types and operators by number.

use std::ffi::c_void;

use unisono::error::{Result, fail};
use unisono::reduce::{Custom, DataType, Operator};

use super::call::unisono_call_t;
use super::status::guard_or;

/// An element type: one of enum unisono_dtype.
pub type unisono_dtype_t = i32;

/// The values of unisono_dtype_t. The numbers never change; they equal NCCL's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_dtype {
    /// Signed, 8 bits.
    UNISONO_INT8 = 0,
    /// Unsigned, 8 bits; plain bytes too.
    UNISONO_UINT8 = 1,
    /// Signed, 32 bits.
    UNISONO_INT32 = 2,
    /// Unsigned, 32 bits.
    UNISONO_UINT32 = 3,
    /// Signed, 64 bits.
    UNISONO_INT64 = 4,
    /// Unsigned, 64 bits.
    UNISONO_UINT64 = 5,
    /// IEEE half precision. Combined in float32, rounded once at the end.
    UNISONO_FLOAT16 = 6,
    /// IEEE single precision.
    UNISONO_FLOAT32 = 7,
    /// IEEE double precision.
    UNISONO_FLOAT64 = 8,
    /// bfloat16. Combined in float32, rounded once at the end.
    UNISONO_BFLOAT16 = 9,
    /// 8-bit float, 4 exponent bits, finite (OCP E4M3). Combined in float32, rounded once at the end.
    UNISONO_FLOAT8_E4M3 = 10,
    /// 8-bit float, 5 exponent bits (OCP E5M2). Combined in float32, rounded once at the end.
    UNISONO_FLOAT8_E5M2 = 11,
}

/// How elements are combined: one of enum unisono_op.
pub type unisono_op_t = i32;

/// The values of unisono_op_t. The numbers never change.
///
/// Whatever the operator, the order of combination depends on the number of ranks alone, so the same inputs
/// give the same bits at any size and over any transport, and every rank gets the same bits. Algorithms that
/// say so of themselves, by name, have an order of their own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_op {
    /// Sum; integers wrap.
    UNISONO_SUM = 0,
    /// Product; integers wrap.
    UNISONO_PRODUCT = 1,
    /// The larger; a NaN on either side gives NaN.
    UNISONO_MAX = 2,
    /// The smaller; a NaN on either side gives NaN.
    UNISONO_MIN = 3,
    /// Sum divided by the number of ranks; integers truncate toward zero.
    UNISONO_AVG = 4,
    /// Sum of each rank's input times that rank's unisono_call_t::scale. Integers take a whole scale that
    /// fits their type, and wrap.
    UNISONO_PREMULSUM = 5,
    /// Bitwise and; integers only.
    UNISONO_BIT_AND = 6,
    /// Bitwise or; integers only.
    UNISONO_BIT_OR = 7,
    /// Bitwise exclusive or; integers only.
    UNISONO_BIT_XOR = 8,
    /// The caller's own: unisono_call_t::function and unisono_call_t::user.
    UNISONO_CUSTOM = 9,
}

/// A reduction of the caller's own: accumulator[i] = accumulator[i] ∘ operand[i], for `count` elements of
/// `dtype`.
///
/// It is associative; it need not commute, since what comes from lower ranks always stands on the left, but
/// by the ring algorithms, which are taken by name alone. It may be called from any thread of the library,
/// several at once, until the operation completes, and calls no function of unisono. No exception may leave
/// it: the process ends. The two buffers never overlap; they are aligned to the element.
pub type unisono_reduce_function_t = Option<
    unsafe extern "C" fn(
        accumulator: *mut c_void,
        operand: *const c_void,
        count: u64,
        dtype: unisono_dtype_t,
        user: *mut c_void,
    ),
>;

/// Bytes of one element of `dtype`; 0 for an unknown type, with the cause in unisono_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_dtype_size(dtype: unisono_dtype_t) -> u64 {
    guard_or(|_| 0, || Ok(DataType::from_number(dtype)?.size() as u64))
}

/// The operator behind a number, with what the call's options add to it, for elements of `dtype`.
pub(super) fn operator(op: unisono_op_t, dtype: DataType, call: &unisono_call_t) -> Result<Operator> {
    Ok(match op {
        0 => Operator::Sum,
        1 => Operator::Product,
        2 => Operator::Max,
        3 => Operator::Min,
        4 => Operator::Average,
        5 if is_factor(dtype, call.scale) => Operator::PreMulSum(call.scale),
        5 => fail!(
            InvalidArgument,
            "call->scale is {}; for {} it is a whole number of that type",
            call.scale,
            dtype.name()
        ),
        6 => Operator::BitAnd,
        7 => Operator::BitOr,
        8 => Operator::BitXor,
        9 => match call.function {
            Some(function) => Operator::Custom(Custom { function, user: call.user }),
            None => fail!(InvalidArgument, "op is UNISONO_CUSTOM, but call->function is NULL"),
        },
        _ => fail!(InvalidArgument, "op {op} is unknown; the operators are 0 (sum) to 9 (custom)"),
    })
}

/// Whether elements of `dtype` can be multiplied by `scale`: integers are by one of theirs.
fn is_factor(dtype: DataType, scale: f64) -> bool {
    // Powers of two, so exact.
    let signed = |bits: i32| -(2f64.powi(bits - 1))..2f64.powi(bits - 1);
    let unsigned = |bits: i32| 0.0..2f64.powi(bits);
    let range = match dtype {
        DataType::I8 => signed(8),
        DataType::U8 => unsigned(8),
        DataType::I32 => signed(32),
        DataType::U32 => unsigned(32),
        DataType::I64 => signed(64),
        DataType::U64 => unsigned(64),
        _ => return true,
    };
    range.contains(&scale) && scale.fract() == 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono::error::Status;

    #[test]
    fn type_numbers_and_sizes_never_change() {
        use unisono_dtype::*;
        let pinned = [
            (UNISONO_INT8, DataType::I8, 0, 1),
            (UNISONO_UINT8, DataType::U8, 1, 1),
            (UNISONO_INT32, DataType::I32, 2, 4),
            (UNISONO_UINT32, DataType::U32, 3, 4),
            (UNISONO_INT64, DataType::I64, 4, 8),
            (UNISONO_UINT64, DataType::U64, 5, 8),
            (UNISONO_FLOAT16, DataType::F16, 6, 2),
            (UNISONO_FLOAT32, DataType::F32, 7, 4),
            (UNISONO_FLOAT64, DataType::F64, 8, 8),
            (UNISONO_BFLOAT16, DataType::Bf16, 9, 2),
            (UNISONO_FLOAT8_E4M3, DataType::F8E4M3, 10, 1),
            (UNISONO_FLOAT8_E5M2, DataType::F8E5M2, 11, 1),
        ];
        assert_eq!(pinned.len(), DataType::ALL.len());
        for (ours, inner, number, size) in pinned {
            assert_eq!((ours as i32, inner as i32), (number, number));
            assert_eq!(DataType::from_number(number).unwrap(), inner);
            assert_eq!(unisono_dtype_size(number), size);
        }
        assert_eq!(unisono_dtype_size(12), 0);
        assert_eq!(unisono_dtype_size(-1), 0);
    }

    #[test]
    fn operator_numbers_never_change() {
        use unisono_op::*;
        let call = unisono_call_t { scale: 0.5, ..unisono_call_t::default() };
        let pinned = [
            (UNISONO_SUM, Operator::Sum, 0),
            (UNISONO_PRODUCT, Operator::Product, 1),
            (UNISONO_MAX, Operator::Max, 2),
            (UNISONO_MIN, Operator::Min, 3),
            (UNISONO_AVG, Operator::Average, 4),
            (UNISONO_PREMULSUM, Operator::PreMulSum(0.5), 5),
            (UNISONO_BIT_AND, Operator::BitAnd, 6),
            (UNISONO_BIT_OR, Operator::BitOr, 7),
            (UNISONO_BIT_XOR, Operator::BitXor, 8),
        ];
        for (ours, inner, number) in pinned {
            assert_eq!((ours as i32, i32::from(inner.number())), (number, number));
            assert_eq!(operator(number, DataType::F32, &call).unwrap(), inner);
        }
        assert_eq!(UNISONO_CUSTOM as i32, 9);
        let missing = operator(9, DataType::F32, &call).unwrap_err();
        assert_eq!(missing.text(), "op is UNISONO_CUSTOM, but call->function is NULL");
        for number in [10, -1] {
            assert!(operator(number, DataType::F32, &call).is_err());
        }
    }

    #[test]
    fn integers_are_multiplied_by_their_own() {
        let scaled =
            |dtype, scale| operator(5, dtype, &unisono_call_t { scale, ..unisono_call_t::default() });
        for (dtype, scale) in [
            (DataType::I8, -128.0),
            (DataType::U8, 255.0),
            (DataType::I32, -3.0),
            (DataType::U32, 4294967295.0),
            (DataType::I64, -9223372036854775808.0),
            (DataType::U64, 9223372036854775808.0),
            (DataType::F16, 0.5),
            (DataType::F64, f64::INFINITY),
        ] {
            assert_eq!(scaled(dtype, scale), Ok(Operator::PreMulSum(scale)));
        }
        for (dtype, scale) in [
            (DataType::I8, 128.0),
            (DataType::U8, -1.0),
            (DataType::I32, 0.5),
            (DataType::I64, 9223372036854775808.0),
            (DataType::U64, f64::NAN),
        ] {
            let error = scaled(dtype, scale).expect_err("no factor");
            assert_eq!(error.status(), Status::InvalidArgument);
            assert!(error.text().contains("call->scale is "), "{error}");
        }
        assert_eq!(
            scaled(DataType::I32, 0.5).unwrap_err().text(),
            "call->scale is 0.5; for int32 it is a whole number of that type"
        );
    }
}
