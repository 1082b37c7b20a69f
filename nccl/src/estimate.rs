//! What a call would take, roughly, for ncclGroupSimulateEnd.

use unisono::collective::request::Kind;

use crate::communicator::Communicator;
use crate::engine::Calls;

/// Microseconds until the first byte of a call is there, over NVLink.
const LATENCY: f32 = 4.0;
/// Bytes that a GPU sends in a microsecond over NVLink of the fourth generation, to all others at once.
const BYTES: f32 = 330_000.0;

/// Microseconds of the calls of a group, each by itself.
pub(crate) fn microseconds(calls: &Calls) -> f32 {
    calls.sizes().map(|(communicator, kind, bytes)| of_call(communicator, kind, bytes)).sum()
}

fn of_call(communicator: &Communicator, kind: Kind, bytes: u64) -> f32 {
    let Ok(context) = communicator.group() else { return 0.0 };
    let ranks = context.size() as f32;
    if ranks < 2.0 || bytes == 0 {
        return 0.0;
    }
    let bytes = bytes as f32;
    // Bytes through the busiest port.
    let through = match kind {
        Kind::Allreduce => 2.0 * bytes * (ranks - 1.0) / ranks,
        Kind::Reduce => bytes * (ranks - 1.0) / ranks + bytes / ranks,
        Kind::Broadcast | Kind::Send | Kind::Receive | Kind::ReceiveAny => bytes,
        // Counts of one block.
        Kind::Allgather | Kind::ReduceScatter | Kind::Alltoall | Kind::Gather | Kind::Scatter => {
            bytes * (ranks - 1.0)
        }
        Kind::Barrier | Kind::SparseAllreduce => 0.0,
    };
    LATENCY + through / BYTES
}
