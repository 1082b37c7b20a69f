//! Streams of one process on several devices, and how long what they are given together takes.

use std::sync::Arc;

use super::measure::Sample;
use super::options::Options;
use crate::cuda::context::Devices;
use crate::cuda::event::Event;
use crate::cuda::libcuda::measuring::TimedEvent;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::Result;

/// Runs whose times are kept.
const RUNS: (u64, u64) = (5, 200);
/// Nanoseconds that a batch of runs takes at least.
const BATCH: u64 = 1_000_000;

/// Streams that begin together and are waited for together.
pub(super) struct Course {
    pub(super) streams: Vec<Stream>,
    start: TimedEvent,
    end: TimedEvent,
    joins: Vec<Event>,
}

impl Course {
    /// A stream on each of the devices, of which there is at least one; devices may repeat.
    pub(super) fn new(devices: &Arc<Devices>, on: &[u32]) -> Result<Course> {
        let streams: Vec<Stream> =
            on.iter().map(|&device| Stream::new(devices, device, false)).collect::<Result<_>>()?;
        let joins = on.iter().map(|&device| Event::new(devices, device)).collect::<Result<_>>()?;
        let (start, end) = (TimedEvent::new(devices, on[0])?, TimedEvent::new(devices, on[0])?);
        Ok(Course { streams, start, end, joins })
    }

    /// Times what `run` gives to the streams, again and again: the time of one run, all streams being done.
    pub(super) fn time(
        &self,
        options: &Options,
        run: &mut dyn FnMut(&[Stream]) -> Result<()>,
    ) -> Result<Sample> {
        let mut runs = 1;
        let estimate = loop {
            let time = self.batch(options, runs, run)?;
            if time >= BATCH || runs >= 256 {
                break time / runs;
            }
            runs *= 2;
        };
        let batches = (options.budget.as_nanos() as u64 / (estimate * runs).max(1)).clamp(RUNS.0, RUNS.1);
        let times: Vec<u64> = (0..batches).map(|_| self.batch(options, runs, run)).collect::<Result<_>>()?;
        Ok(Sample::of(times, runs))
    }

    /// Nanoseconds of `runs` runs.
    fn batch(
        &self,
        options: &Options,
        runs: u64,
        run: &mut dyn FnMut(&[Stream]) -> Result<()>,
    ) -> Result<u64> {
        let first = &self.streams[0];
        self.start.record(first)?;
        for stream in &self.streams[1..] {
            self.start.hold(stream)?;
        }
        for _ in 0..runs {
            run(&self.streams)?;
        }
        for (stream, join) in self.streams.iter().zip(&self.joins).skip(1) {
            join.record(stream)?;
            first.wait(join)?;
        }
        self.end.record(first)?;
        self.end.synchronize(Deadline::after(options.timeout))?;
        Ok((self.end.since(&self.start)? * 1000.0) as u64)
    }
}
