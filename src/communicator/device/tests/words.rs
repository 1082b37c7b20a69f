//! Kernels of the double: words that ranks write to each other's arenas.

use std::ops::Range;
use std::sync::Mutex;

use super::*;
use crate::cuda::exchange::{Counts, Seen, Shared, check_points};
use crate::cuda::stream::Stream;
use crate::engine::device::Kernels;
use crate::engine::endpoint::lock;

/// Kernels: each call tells all others its number, and waits until all have told theirs.
#[derive(Debug)]
struct Words {
    rank: usize,
    arenas: Vec<u64>,
    calls: Mutex<u32>,
    signals: Mutex<Sent>,
    fault: Arc<Fault>,
    /// Calls come to their launch only when the exchange has been aborted.
    late: bool,
}

/// How many signals were sent to each rank, and waited for.
#[derive(Debug, Default)]
struct Sent {
    sent: Counts,
    taken: Counts,
}

/// Where in an arena a rank counts the signals of another.
fn tally(member: usize) -> u64 {
    1024 + 4 * member as u64
}

impl Words {
    fn load(rank: u32, arenas: &[u64], fault: Arc<Fault>, late: bool) -> Box<dyn Kernels> {
        Box::new(Words {
            rank: rank as usize,
            arenas: arenas.to_vec(),
            calls: Mutex::new(0),
            signals: Mutex::default(),
            fault,
            late,
        })
    }

    /// The number of a call that all ranks make.
    fn meet(&self, stream: &Stream) -> Result<u32> {
        if self.late {
            until("the abort", || self.fault.is_aborted());
        }
        if self.fault.is_aborted() {
            fail!(Aborted, "as GPUs' kernels refuse");
        }
        let mut calls = lock(&self.calls);
        *calls += 1;
        for (member, arena) in self.arenas.iter().enumerate() {
            // SAFETY: arenas are mapped, and larger than this.
            unsafe {
                stream.write_value(arena + 4 * self.rank as u64, *calls)?;
                stream.wait_value(self.arenas[self.rank] + 4 * member as u64, *calls)?;
            }
        }
        Ok(*calls)
    }
}

impl Kernels for Words {
    fn serves(&self, _: Kind, dtype: DataType, _: &Operator) -> bool {
        dtype != DataType::I64
    }

    unsafe fn enqueue(&self, job: &Job, stream: &Stream) -> Result<()> {
        let number = self.meet(stream)?;
        if job.count == 0 {
            return Ok(());
        }
        // SAFETY: the output holds a word.
        unsafe { stream.write_value(job.output, number) }
    }

    /// Those that follow each other and have as many elements.
    fn bundles(&self, jobs: &[Job], _windows: bool) -> Result<Vec<Range<usize>>> {
        let mut bundles = Vec::new();
        for alike in jobs.chunk_by(|before, job| before.count == job.count) {
            let begin = bundles.last().map_or(0, |before: &Range<usize>| before.end);
            bundles.push(begin..begin + alike.len());
        }
        Ok(bundles)
    }

    unsafe fn enqueue_several(&self, jobs: &[Job], stream: &Stream) -> Result<()> {
        let number = self.meet(stream)?;
        for (place, job) in (0..).zip(jobs) {
            // SAFETY: the output holds a word.
            unsafe { stream.write_value(job.output, 100 * number + place) }?;
        }
        Ok(())
    }

    fn shares(&self, job: &Job) -> Option<Shared> {
        Shared::of(job, &Table::default(), self.arenas.len() as u32)
    }

    unsafe fn enqueue_windowed(&self, job: &Job, seen: &Seen, stream: &Stream) -> Result<()> {
        self.meet(stream)?;
        if job.kind.reduces() {
            assert_eq!(seen.input[self.rank], job.input);
            // SAFETY: the output holds a word.
            return unsafe { stream.write_value(job.output, 1000) };
        }
        for (member, address) in seen.output[..self.arenas.len()].iter().enumerate() {
            // Doubles map memory where it is: what that rank would write, at the address by which it would.
            // SAFETY: the output holds a word for each rank.
            unsafe { stream.write_value(address + 4 * member as u64, 1000 + member as u32) }?;
        }
        assert_eq!(seen.output[self.rank], job.output);
        Ok(())
    }

    unsafe fn enqueue_pull(&self, pull: &Pull, stream: &Stream) -> Result<()> {
        self.meet(stream)?;
        // SAFETY: the output holds two words.
        unsafe {
            stream.write_value(pull.output, pull.max_blocks)?;
            stream.write_value(pull.output + 4, pull.seen.is_some().into())
        }
    }

    /// Counted on the host: captured ones are sent once.
    fn enqueue_signals(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        let mut signals = lock(&self.signals);
        for (member, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            signals.sent[member] += count;
            // SAFETY: arenas are mapped, and larger than this.
            unsafe { stream.write_value(self.arenas[member] + tally(self.rank), signals.sent[member]) }?;
        }
        Ok(())
    }

    fn enqueue_wait(&self, counts: &Counts, stream: &Stream) -> Result<()> {
        let mut signals = lock(&self.signals);
        for (member, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            signals.taken[member] += count;
            // SAFETY: as above.
            unsafe { stream.wait_value(self.arenas[self.rank] + tally(member), signals.taken[member]) }?;
        }
        Ok(())
    }

    unsafe fn enqueue_points(&self, points: &[Point], _: u32, stream: &Stream) -> Result<()> {
        check_points(self.rank as u32, self.arenas.len() as u32, points)?;
        for point in points.iter().filter(|point| point.bytes > 0) {
            // SAFETY: the memory holds a word.
            unsafe { stream.write_value(point.address, points.len() as u32) }?;
        }
        Ok(())
    }
}

pub(super) fn words(
    _: &Arc<Devices>,
    _: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    _: Table,
) -> Result<Box<dyn Kernels>> {
    Ok(Words::load(rank, arenas, fault, false))
}

/// [`words`] that come to their launch only when the exchange has been aborted.
pub(super) fn late(
    _: &Arc<Devices>,
    _: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    _: Table,
) -> Result<Box<dyn Kernels>> {
    Ok(Words::load(rank, arenas, fault, true))
}

/// [`words`] of GPUs between which no wide lines go.
pub(super) fn narrow(
    devices: &Arc<Devices>,
    device: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    table: Table,
) -> Result<Box<dyn Kernels>> {
    assert_eq!(table, table.without_wide_lines());
    words(devices, device, rank, arenas, fault, table)
}

/// [`words`] of GPUs between which wide lines go.
pub(super) fn wide(
    devices: &Arc<Devices>,
    device: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    table: Table,
) -> Result<Box<dyn Kernels>> {
    assert_ne!(table, table.without_wide_lines());
    words(devices, device, rank, arenas, fault, table)
}

pub(super) fn not_on_rank_1(
    devices: &Arc<Devices>,
    device: u32,
    rank: u32,
    arenas: &[u64],
    fault: Arc<Fault>,
    table: Table,
) -> Result<Box<dyn Kernels>> {
    if rank == 1 {
        fail!(Cuda, "no kernels for this device");
    }
    words(devices, device, rank, arenas, fault, table)
}
