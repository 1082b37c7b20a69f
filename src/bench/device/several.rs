//! Algorithm objects over several device pointers of each rank.

use super::memory::PIECE;
use super::rank::{Outcome, Rank};
use crate::bench::case::Case;
use crate::bench::measure::Sample;
use crate::bench::seat::{barrier, total};
use crate::bench::values;
use crate::collective::request::Kind;
use crate::communicator::{AlgorithmOptions, Call, Context, Prepared};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::Result;

/// A rank's pointers, each with a stream, and the object over them.
struct Several {
    /// Goes first: it uses the others.
    object: Prepared,
    memory: Vec<DeviceBuffer>,
    streams: Vec<Stream>,
}

impl Several {
    fn run(&self, deadline: Deadline) -> Result<()> {
        self.object.run()?;
        self.streams.iter().try_for_each(|stream| stream.synchronize(deadline))
    }
}

impl Rank<'_> {
    /// As [`Rank::measure`], with so many pointers: a call is over when all of them have the result.
    pub(super) fn measure_several(
        &mut self,
        case: &Case,
        subject: usize,
        check: bool,
        pointers: u32,
    ) -> Result<Outcome> {
        let Some(context) = self.native(case, subject).cloned() else {
            return Ok(Outcome::Refused("NCCL's ABI has one pointer per rank".to_owned()));
        };
        let made = self.several(&context, case, pointers);
        let several = match self.agree(made)? {
            Ok(several) => several,
            Err(refusal) => return Ok(Outcome::Refused(refusal)),
        };
        // Every pointer counts as a rank of its own.
        let pointer_case =
            Case { size: case.size * pointers, root: case.root.map(|root| root * pointers), ..*case };
        if check {
            self.fill_several(&pointer_case, &several)?;
        }
        barrier(self.control(), None)?;
        let first = several.run(self.deadline());
        if let Err(refusal) = self.agree(first)? {
            return Ok(Outcome::Refused(refusal));
        }
        let receives = case.kind != Kind::Reduce || case.root == Some(self.rank());
        let errors = match check {
            true => Some(self.check_several(&pointer_case, &several, receives)?),
            false => None,
        };
        let sample = self.time_by_clock(&mut || several.run(self.deadline()))?;
        Ok(Outcome::Measured(Sample { errors, ..sample }))
    }

    /// The pointers of all ranks, one rank's after the other's, are dealt out to the GPUs in blocks:
    /// processes that share a GPU would wait for their slices of its time.
    fn several(&self, context: &Context, case: &Case, pointers: u32) -> Result<Several> {
        let devices = self.devices();
        let all = self.control().size() * pointers;
        let place = |pointer: u32| self.rank() * pointers + pointer;
        let on: Vec<u32> =
            (0..pointers).map(|pointer| place(pointer) * devices.count().min(all) / all).collect();
        let bytes = case.bytes() as usize;
        let memory: Vec<DeviceBuffer> =
            on.iter().map(|&device| DeviceBuffer::new(devices, device, bytes)).collect::<Result<_>>()?;
        let streams: Vec<Stream> =
            on.iter().map(|&device| Stream::new(devices, device, false)).collect::<Result<_>>()?;
        let pointer = |buffer: &DeviceBuffer| std::ptr::without_provenance_mut(buffer.address() as usize);
        let options = AlgorithmOptions {
            kind: case.kind,
            algorithm: case.algorithm.number().unwrap_or(0),
            buffers: memory.iter().map(pointer).collect(),
            streams: streams.iter().map(Stream::handle).collect(),
            count: case.count(),
            dtype: case.dtype,
            operator: case.operator_or_sum(),
            root: case.root_or_first(),
            root_buffer: 0,
            call: Call::default(),
        };
        // SAFETY: memory and streams are dropped after the object, and whoever runs it waits for the streams.
        let object = unsafe { Prepared::new(context, options) }?;
        Ok(Several { object, memory, streams })
    }

    fn fill_several(&mut self, case: &Case, several: &Several) -> Result<()> {
        let first = self.rank() * several.memory.len() as u32;
        let (buffers, _, deadline) = self.buffers();
        for (place, (memory, stream)) in (first..).zip(several.memory.iter().zip(&several.streams)) {
            let bytes = memory.bytes();
            let period = values::period(case) as usize * case.dtype.size();
            let tile = if bytes <= PIECE { bytes.max(1) } else { (PIECE / period).max(1) * period };
            let write = |piece: &mut [u8]| values::fill(case, place, piece);
            // SAFETY: all of it is ours, on the stream's device.
            unsafe { buffers.repeat(stream, memory.address(), bytes, tile, write, deadline) }?;
        }
        Ok(())
    }

    /// How many elements are wrong on all ranks, at the ends of their pointers.
    fn check_several(&mut self, case: &Case, several: &Several, receives: bool) -> Result<u64> {
        let first = self.rank() * several.memory.len() as u32;
        let (buffers, _, deadline) = self.buffers();
        let mut wrong = 0;
        let results = several.memory.iter().zip(&several.streams).filter(|_| receives);
        for (place, (memory, stream)) in (first..).zip(results) {
            let bytes = PIECE.min(memory.bytes());
            for offset in [0, memory.bytes() - bytes] {
                let at = memory.address() + offset as u64;
                // SAFETY: ours, so long, and done.
                let found = unsafe { buffers.read(stream, at, bytes, deadline) }?;
                wrong += values::wrong(case, place, (offset / case.dtype.size()) as u64, found);
            }
        }
        total(self.control(), wrong)
    }
}
