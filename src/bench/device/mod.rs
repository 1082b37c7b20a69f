//! Operations on device memory: natively and by libraries with NCCL's ABI, in turn in one run.
//!
//! Rank r has GPU r modulo their number and a non-blocking stream of its own. Who runs the calls is a
//! *subject*; all of them use the same buffers and the same stream.

mod bits;
mod crossing;
mod library;
mod memory;
mod rank;
mod report;
mod several;
mod sparse;
mod start;
mod tune;

use super::case::Case;
use super::options::Options;
use super::seat::Seat;
use super::{patience, run_peers};
use crate::cuda::context::Devices;
use crate::error::{Result, fail};
use rank::Rank;
use report::Report;

pub(super) use bits::bits;
pub(super) use start::start;
pub(super) use tune::tune;

/// Measures every case by every subject. Answers whether all results that were looked at are right; an error
/// if the first subject could do nothing.
pub(super) fn measure(options: &Options, seat: &Seat, cases: Vec<Case>) -> Result<bool> {
    let devices = Devices::open()?;
    let device = device_of(&devices, seat)?;
    // Libraries take the device that is current.
    let _entered = devices.enter(device)?;
    let largest = cases.iter().map(Case::bytes).max().unwrap_or(0) as usize;
    let mut rank = Rank::join(options, seat, &devices, device, largest)?;
    let libraries = options.libraries();
    let subjects: Vec<String> = libraries.iter().map(|library| rank.admit(library)).collect::<Result<_>>()?;
    let mut report = Report::new(cases, options, seat.size, devices.count());
    if rank.leads() {
        report.begin(&subjects);
    }
    for round in 0..options.rounds.get() {
        for row in 0..report.rows() {
            let case = report.case(row);
            for subject in 0..subjects.len() {
                let outcome = rank.measure(&case, subject, options.check && round == 0)?;
                report.add(row, subject, outcome);
            }
            if rank.leads() {
                report.tell(row);
            }
        }
        if !options.peers.is_empty() {
            if rank.leads() {
                run_peers(options, |peer, times| report.add_peer(peer, times))?;
            }
            rank.meet(patience(options))?;
        }
    }
    if rank.leads() {
        report.finish()?;
    }
    rank.finish()?;
    if let Some(why) = report.nothing() {
        fail!(Unsupported, "{why}");
    }
    Ok(report.errors() == 0)
}

/// The device of a rank.
fn device_of(devices: &Devices, seat: &Seat) -> Result<u32> {
    match devices.count() {
        0 => fail!(Cuda, "the CUDA driver is there, but it has no device"),
        count => Ok(seat.rank % count),
    }
}
