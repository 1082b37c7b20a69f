//! `start`: how long it takes from the last rank's beginning until all are connected and through a barrier.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::measure::Sample;
use super::options::Options;
use super::output::say;
use super::report;
use super::seat::{Seat, barrier, combine};
use crate::error::{Error, Result, Status};
use crate::reduce::Operator;

/// How often groups are made again unless told.
const AGAIN: u32 = 20;

/// Measures in this process, which has made no group yet.
pub(super) fn measure(options: &Options, seat: &Seat) -> Result<bool> {
    let again = options.iterations.map_or(AGAIN, std::num::NonZeroU32::get);
    let mut results = Vec::new();
    if seat.rank == 0 {
        say!(
            "# {} ranks, connected and through a barrier, counted from when the last rank began; µs",
            seat.size
        );
        say!("{:<6} {:>12} {:>12} {:>12} {:>12}", "link", "first", "again_p50", "again_p99", "again_min");
    }
    for (index, transport) in options.transports().into_iter().enumerate() {
        // A process is new once only: other transports find its service thread running.
        let first = once(options, seat, transport, "first")?;
        let mut times = Vec::new();
        for round in 0..again {
            times.push(once(options, seat, transport, &format!("again {round}"))?);
        }
        let sample = Sample::of(times, 1);
        let first_us = (index == 0).then_some(first as f64 / 1000.0);
        if seat.rank == 0 {
            let first = first_us.map_or("-".to_owned(), |time| format!("{time:.1}"));
            let Sample { p50, p99, min, .. } = sample;
            say!("{:<6} {first:>12} {p50:>12.1} {p99:>12.1} {min:>12.1}", transport.name());
        }
        results.push(json!({
            "transport": transport.name(),
            "first_us": first_us,
            "again_p50_us": sample.p50,
            "again_p99_us": sample.p99,
            "again_min_us": sample.min,
        }));
    }
    if seat.rank == 0 {
        report::write(options, &json!({ "task": "start", "ranks": seat.size, "results": results }))?;
    }
    Ok(true)
}

/// Nanoseconds from when the last rank began until the last was through. The clock is that of one host.
fn once(options: &Options, seat: &Seat, transport: super::options::Transport, purpose: &str) -> Result<u64> {
    let began = now()?;
    let context = seat.meet(options, transport, purpose)?;
    barrier(&context, None)?;
    let mut times = [began, now()?];
    combine(&context, Operator::Max, &mut times)?;
    // So that no rank begins the next round while another still is in this one.
    barrier(&context, None)?;
    Ok(times[1].saturating_sub(times[0]))
}

fn now() -> Result<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since: Duration =
        since.map_err(|_| Error::new(Status::System, "this host's clock is before 1970"))?;
    Ok(since.as_nanos() as u64)
}
