//! Operations that start together.

use super::Call;
use super::context::Context;
use super::staged::Pending;
use super::work::Work;
use crate::collective::request::Request;
use crate::error::Result;

/// Starts operations that may run beside each other, also on one stream: all are begun before the stream waits for any.
/// So a send and the receive that answers it, or both halves of an exchange, can be given to one stream. Collectives of
/// one context still run in the order of the list.
///
/// The works are in the order of the list. When one cannot be begun, those before it run on, their streams wait for them,
/// and the error is returned.
///
/// # Safety
/// As [`Context::start`], for every operation.
pub unsafe fn start_together(operations: &[(&Context, &Request, &Call)]) -> Result<Vec<Work>> {
    let mut begun = Vec::with_capacity(operations.len());
    let mut failure = None;
    for (context, request, call) in operations {
        // SAFETY: the caller's promise.
        match unsafe { context.begin(request, call) } {
            Ok(pending) => begun.push(pending),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let works: Vec<Result<Work>> = begun.into_iter().map(Pending::close).collect();
    match failure {
        Some(error) => Err(error),
        None => works.into_iter().collect(),
    }
}
