//! Whom it concerns that this rank is kept from starting a call.

#![forbid(unsafe_code)]

use super::Group;
use crate::cuda::driver::Capture;
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status};

/// Whether what keeps this rank from starting a call of `class` fails it for all that would wait: the others
/// of a collective, whatever it is. A message that is not sent concerns nobody else, but a driver that
/// refuses does. What is wrong with the arguments is the caller's, and so is what a stream in capture is
/// refused, also in one that has been spoilt: then it is no call yet. `capture` asks the driver whether the
/// call's stream is in one; if that does not tell, it is in none.
pub fn is_everybodys(error: &Error, class: Class, capture: impl FnOnce() -> Result<Capture>) -> bool {
    let counts = match error.status() {
        Status::Cuda => true,
        Status::OutOfMemory | Status::Timeout => class != Class::PointToPoint,
        _ => false,
    };
    counts && !matches!(capture(), Ok(Capture::Active(_) | Capture::Invalidated))
}

impl Group {
    /// Fails what is [everybody's](is_everybodys), of a call whose stream is in no capture.
    pub fn or_fail<T>(&self, class: Class, result: Result<T>) -> Result<T> {
        self.or_fail_on(class, result, || Ok(Capture::None))
    }

    /// Fails what is [everybody's](is_everybodys).
    pub fn or_fail_on<T>(
        &self,
        class: Class,
        result: Result<T>,
        capture: impl FnOnce() -> Result<Capture>,
    ) -> Result<T> {
        result.inspect_err(|error| {
            if is_everybodys(error, class, capture) {
                self.fail_here(error);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stream_in_capture_is_refused_is_its_callers() {
        use Status::{Cuda, InvalidUsage, OutOfMemory, Timeout};
        let refused = |status, class, capture| is_everybodys(&Error::new(status, "no"), class, || capture);
        let alone: [Result<Capture>; 2] = [Ok(Capture::None), Err(Error::new(Cuda, "it does not tell"))];
        for capture in alone {
            let of = |class| {
                [Cuda, OutOfMemory, Timeout, InvalidUsage]
                    .map(|status| refused(status, class, capture.clone()))
            };
            assert_eq!(of(Class::Ordered), [true, true, true, false]);
            assert_eq!(of(Class::PointToPoint), [true, false, false, false]);
        }
        for capture in [Capture::Active(7), Capture::Invalidated] {
            for status in [Cuda, OutOfMemory, Timeout, InvalidUsage] {
                assert!(!refused(status, Class::Ordered, Ok(capture)), "{status:?} in {capture:?}");
            }
        }
    }
}
