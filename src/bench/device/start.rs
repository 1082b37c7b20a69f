//! `start --device`: how long a communicator takes from its making to its first result, and the GPU memory
//! that it costs.

use std::time::Instant;

use serde_json::json;

use super::device_of;
use super::rank::Rank;
use crate::bench::case::Case;
use crate::bench::options::{CallStyle, Choice, Options, Place};
use crate::bench::output::say;
use crate::bench::report;
use crate::bench::seat::{Seat, barrier, combine};
use crate::cuda::context::Devices;
use crate::cuda::libcuda::Libcuda;
use crate::error::Result;
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// Measures the first communicator of each subject, and a second one. The device's context is there already.
pub(in crate::bench) fn start(options: &Options, seat: &Seat) -> Result<bool> {
    let devices = Devices::open()?;
    let device = device_of(&devices, seat)?;
    let _entered = devices.enter(device)?;
    let cuda = Libcuda::open()?;
    let case = Case {
        kind: Kind::Allreduce,
        asked: 8,
        dtype: DataType::F32,
        operator: Some(Operator::Sum),
        root: None,
        algorithm: Choice::Automatic,
        transport: options.transports()[0],
        call: CallStyle::Stream,
        place: Place::Out,
        size: seat.size,
    };
    let mut rank = Rank::join(options, seat, &devices, device, case.bytes() as usize)?;
    let mut results = Vec::new();
    if rank.leads() {
        say!("# {} ranks on device memory: until an allreduce of 8 bytes has its result", seat.size);
        say!("{:<14} {:<8} {:>12} {:>14}", "library", "which", "ms", "GPU_MiB");
    }
    let mut subject = 0;
    for library in options.libraries() {
        for which in ["first", "second"] {
            barrier(rank.control(), None)?;
            let (free, began) = (cuda.free_memory(&devices, device)?, Instant::now());
            rank.admit(&library)?;
            rank.run_once(&case, subject)?;
            let taken = began.elapsed().as_nanos() as u64;
            // Nobody goes on and takes more before everybody has looked.
            barrier(rank.control(), None)?;
            let mut most = [taken, free.saturating_sub(cuda.free_memory(&devices, device)?)];
            combine(rank.control(), Operator::Max, &mut most)?;
            let (milliseconds, mebibytes) = (most[0] as f64 / 1e6, most[1] as f64 / f64::from(1 << 20));
            if rank.leads() {
                say!("{:<14} {which:<8} {milliseconds:>12.1} {mebibytes:>14.1}", library.name());
            }
            results.push(json!({
                "library": library.name(),
                "which": which,
                "ms": milliseconds,
                "gpu_mib": mebibytes,
            }));
            subject += 1;
        }
    }
    if rank.leads() {
        report::write(options, &json!({ "task": "start", "ranks": seat.size, "results": results }))?;
    }
    rank.finish()?;
    Ok(true)
}
