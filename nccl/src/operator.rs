//! Reduction operators: the five of NCCL, and those that clients make.

use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use unisono::reduce::{DataType, Operator};
use unisono::sys::global::Global;

use crate::abi::{ncclComm_t, ncclDataType_t, ncclRedOp, ncclRedOp_t, ncclResult_t, ncclScalarResidence_t};
use crate::collective::datatype;
use crate::communicator;
use crate::error::{Result, SUCCESS, fail, guard, out};
use crate::place::Place;

/// The operators that were made for one communicator, by their numbers.
#[derive(Default)]
pub(crate) struct Operators(Mutex<HashMap<ncclRedOp_t, PreMulSum>>);

/// Of whichever communicator: none takes another's operator for its own.
static NUMBERS: Global<Numbers> = Global::new(Numbers { next: FIRST, live: BTreeSet::new() });

/// The numbers that operators have.
struct Numbers {
    /// Behind the one that was given out last: what has been destroyed is mistaken for another as late as can
    /// be.
    next: ncclRedOp_t,
    live: BTreeSet<ncclRedOp_t>,
}

const FIRST: ncclRedOp_t = ncclRedOp::ncclNumOps as ncclRedOp_t;
const LAST: ncclRedOp_t = ncclRedOp::ncclMaxRedOp as ncclRedOp_t;

/// Multiplies this rank's input before it is summed.
#[derive(Clone, Copy)]
struct PreMulSum {
    dtype: DataType,
    factor: Factor,
}

/// What an operator multiplies by.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Factor {
    Value(f64),
    /// One element in device memory, to be read when the operation is launched.
    OnDevice(u64),
}

impl Operators {
    /// The operator behind a number, and where its factor is if the device has it.
    pub(crate) fn resolve(&self, number: ncclRedOp_t, dtype: DataType) -> Result<(Operator, Option<u64>)> {
        let operator = match number {
            0 => Operator::Sum,
            1 => Operator::Product,
            2 => Operator::Max,
            3 => Operator::Min,
            4 => Operator::Average,
            _ => {
                let Some(made) = self.lock().get(&number).copied() else {
                    fail!(
                        InvalidArgument,
                        "op {number} is unknown: 0 (sum) to 4 (avg), or an operator made for this communicator and not destroyed"
                    )
                };
                if made.dtype != dtype {
                    fail!(
                        InvalidArgument,
                        "op {number} was made for {}, but datatype is {}",
                        made.dtype.name(),
                        dtype.name()
                    );
                }
                return Ok(match made.factor {
                    Factor::Value(factor) => (Operator::PreMulSum(factor), None),
                    Factor::OnDevice(address) => (Operator::PreMulSum(1.0), Some(address)),
                });
            }
        };
        Ok((operator, None))
    }

    fn add(&self, operator: PreMulSum) -> Result<ncclRedOp_t> {
        let number = NUMBERS.write().draw()?;
        self.lock().insert(number, operator);
        Ok(number)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ncclRedOp_t, PreMulSum>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Operators {
    /// Whoever destroys a communicator need not destroy its operators.
    fn drop(&mut self) {
        let live = std::mem::take(&mut *self.lock());
        if !live.is_empty() {
            NUMBERS.write().live.retain(|number| !live.contains_key(number));
        }
    }
}

impl Numbers {
    /// One that no operator has. Behind the largest they begin anew.
    fn draw(&mut self) -> Result<ncclRedOp_t> {
        if self.live.len() > (LAST - FIRST) as usize {
            fail!(InvalidUsage, "this process has operators of all numbers up to {LAST}: destroy some");
        }
        loop {
            let number = self.next;
            self.next = if number == LAST { FIRST } else { number + 1 };
            if self.live.insert(number) {
                return Ok(number);
            }
        }
    }
}

/// Makes an operator that multiplies this rank's input by `*scalar` before it is summed with the others', and
/// writes its number to `*op`. It serves `comm` and `datatype` alone; `*scalar` is one element of that type.
/// Ranks may have different scalars. A 64-bit integer that needs more than 53 bits is refused. In device
/// memory it is read when an operation is launched, once the operation's stream has come that far: the launch
/// waits for it, and cannot be captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut ncclRedOp_t,
    scalar: *mut c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
    comm: ncclComm_t,
) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        communicator.open_group()?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(op, "op") }?;
        if scalar.is_null() {
            fail!(InvalidArgument, "scalar is NULL");
        }
        let dtype = self::datatype(datatype)?;
        let factor = match (residence, communicator.place) {
            (0, Place::Device(_)) => Factor::OnDevice(scalar.expose_provenance() as u64),
            (0 | 1, _) => {
                // SAFETY: the contract of the header: one element of the type.
                let element = unsafe { std::slice::from_raw_parts(scalar.cast_const().cast(), dtype.size()) };
                Factor::Value(self::factor(element, dtype)?)
            }
            _ => fail!(
                InvalidArgument,
                "residence {residence} is unknown: 0 (ncclScalarDevice) or 1 (ncclScalarHostImmediate)"
            ),
        };
        place.write(communicator.operators.add(PreMulSum { dtype, factor })?);
        Ok(SUCCESS)
    })
}

/// Ends an operator of ncclRedOpCreatePreMulSum. Calls that were given it, also in a group that has not
/// ended, keep it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t {
    guard(|| {
        let communicator = communicator::find(comm)?;
        if (0..FIRST).contains(&op) {
            fail!(InvalidArgument, "op {op} is one of NCCL's own and cannot be destroyed");
        }
        let destroyed = communicator.operators.lock().remove(&op);
        match destroyed {
            Some(_) => {
                NUMBERS.write().live.remove(&op);
                Ok(SUCCESS)
            }
            None => {
                fail!(InvalidArgument, "op {op} is no operator of this communicator, or was destroyed before")
            }
        }
    })
}

/// The number that one element holds. `element` has as many bytes as one of the type.
pub(crate) fn factor(element: &[u8], dtype: DataType) -> Result<f64> {
    let mut wide = [0; 8];
    wide[..element.len()].copy_from_slice(element);
    let bits = u64::from_le_bytes(wide);
    Ok(match dtype {
        DataType::I8 => f64::from(bits as i8),
        DataType::U8 => f64::from(bits as u8),
        DataType::I32 => f64::from(bits as i32),
        DataType::U32 => f64::from(bits as u32),
        DataType::I64 => exact(bits as i64 as f64, i128::from(bits as i64))?,
        DataType::U64 => exact(bits as f64, i128::from(bits))?,
        DataType::F16 => small_float(bits, 5, 10, true),
        DataType::F32 => f64::from(f32::from_bits(bits as u32)),
        DataType::F64 => f64::from_bits(bits),
        DataType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        DataType::F8E4M3 => small_float(bits, 4, 3, false),
        DataType::F8E5M2 => small_float(bits, 5, 2, true),
    })
}

/// A factor is kept as a double, which has not all integers of 64 bits.
fn exact(value: f64, integer: i128) -> Result<f64> {
    if value as i128 == integer {
        return Ok(value);
    }
    fail!(InvalidArgument, "the scalar {integer} needs more than 53 bits, which factors do not have")
}

/// A float of `exponent` and `mantissa` bits and a sign. `infinity`: the largest exponent is kept for
/// infinity and NaN; without, only all bits set are a NaN.
fn small_float(bits: u64, exponent: u32, mantissa: u32, infinity: bool) -> f64 {
    let sign = if bits >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    let fraction = bits & ((1 << mantissa) - 1);
    let power = (bits >> mantissa & ((1 << exponent) - 1)) as i32;
    let largest = (1 << exponent) - 1;
    let bias = (1 << (exponent - 1)) - 1;
    if power == largest && infinity {
        return if fraction == 0 { sign * f64::INFINITY } else { f64::NAN };
    }
    if power == largest && fraction == (1 << mantissa) - 1 {
        return f64::NAN;
    }
    let (whole, power) = if power == 0 { (0.0, 1) } else { (1.0, power) };
    sign * (whole + fraction as f64 / f64::from(1u32 << mantissa)) * 2f64.powi(power - bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Communicator;
    use crate::config::Config;
    use crate::error::{Status, result};

    #[test]
    fn operators_of_different_communicators_have_different_numbers() {
        let [one, other] = [3.0, 5.0].map(|factor| {
            let operators = Operators::default();
            let factor = Factor::Value(factor);
            let number = operators.add(PreMulSum { dtype: DataType::F32, factor }).unwrap();
            (operators, number)
        });
        for (operators, own, others) in [(&one.0, one.1, other.1), (&other.0, other.1, one.1)] {
            assert!(own >= FIRST);
            assert!(operators.resolve(own, DataType::F32).is_ok());
            let error = operators.resolve(others, DataType::F32).unwrap_err();
            assert!(error.text().contains("is unknown"), "{error}");
        }
    }

    #[test]
    fn numbers_of_operators_begin_anew_behind_the_largest() {
        let mut numbers = Numbers { next: LAST, live: BTreeSet::from([FIRST + 1]) };
        let drawn = std::array::from_fn(|_| numbers.draw());
        assert_eq!(drawn, [Ok(LAST), Ok(FIRST), Ok(FIRST + 2)]);
        // It is free again, but others come first.
        numbers.live.remove(&FIRST);
        assert_eq!(numbers.draw(), Ok(FIRST + 3));
    }

    #[test]
    fn numbers_of_operators_that_have_gone_are_free() {
        let operator = PreMulSum { dtype: DataType::F32, factor: Factor::Value(2.0) };
        let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
        let (one, other) =
            (communicator.operators.add(operator).unwrap(), communicator.operators.add(operator).unwrap());
        let lives = |number| NUMBERS.read().live.contains(&number);
        assert!(lives(one) && lives(other));
        let comm = communicator.give_handle();
        assert_eq!(
            [ncclRedOpDestroy(one, comm), ncclRedOpDestroy(one, comm)],
            [SUCCESS, result(Status::InvalidArgument)]
        );
        assert!(!lives(one) && lives(other));
        drop(communicator);
        assert_eq!(crate::end::ncclCommAbort(comm), SUCCESS);
        assert!(!lives(other));
    }

    #[test]
    fn scalars_of_every_type_are_read() {
        let cases: [(DataType, &[u8], f64); 14] = [
            (DataType::I8, &[0xfe], -2.0),
            (DataType::U8, &[0xfe], 254.0),
            (DataType::I32, &(-3i32).to_le_bytes(), -3.0),
            (DataType::U32, &u32::MAX.to_le_bytes(), 4294967295.0),
            (DataType::I64, &(-(1i64 << 53)).to_le_bytes(), -9007199254740992.0),
            (DataType::U64, &(1u64 << 63).to_le_bytes(), 9223372036854775808.0),
            (DataType::F16, &0x3e00u16.to_le_bytes(), 1.5),
            (DataType::F16, &0x0001u16.to_le_bytes(), 1.0 / 16777216.0),
            (DataType::F32, &0.25f32.to_le_bytes(), 0.25),
            (DataType::F64, &0.1f64.to_le_bytes(), 0.1),
            (DataType::Bf16, &0xc040u16.to_le_bytes(), -3.0),
            (DataType::F8E4M3, &[0x7e], 448.0),
            (DataType::F8E4M3, &[0x38], 1.0),
            (DataType::F8E5M2, &[0x7b], 57344.0),
        ];
        for (dtype, element, value) in cases {
            assert_eq!(factor(element, dtype), Ok(value), "{}", dtype.name());
        }
        assert!(factor(&[0x7f], DataType::F8E4M3).unwrap().is_nan());
        assert_eq!(factor(&[0xfc], DataType::F8E5M2), Ok(f64::NEG_INFINITY));
        assert!(factor(&u64::MAX.to_le_bytes(), DataType::U64).is_err());
    }
}
