//! Operations across several device pointers of one process: peer copies and kernels, ordered by events
//! alone.
//!
//! An operation is prepared once for its pointers and streams ([`program::Program`]): events, scratch memory
//! and the list of driver calls. Running it enqueues and returns: it allocates nothing, never waits on the
//! host, and may be captured into a graph. Running it again is ordered after the last run by the streams
//! themselves.

mod broadcast;
mod direct;
mod program;
mod reduce;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use super::context::Devices;
use super::courier::{self, Combiner};
use super::driver::{Memory, StreamHandle, least_limit};
use super::stream::Stream;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator, Representation};

pub use broadcast::{BroadcastAlgorithm, LocalBroadcast, Rounding};
pub use reduce::{LocalReduce, ReduceAlgorithm};

/// Bytes of one of the two pinned pieces through which memory goes between devices that do not reach each
/// other.
const PIECE: usize = 4 << 20;

/// Bytes of a pointer for each pair of pointers from which on streams wait for each other in pairs rather
/// than by way of one of them: the host makes the calls for the pairs while the bytes move.
const BYTES_OF_A_PAIR: usize = 256 << 10;

/// Bytes of a pointer in the first of the chunks in which a direct reduction goes whose devices fold for each
/// other.
const FIRST_CHUNK: usize = 4 << 20;

/// Device memory of one pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub address: u64,
    /// Its size.
    pub bytes: usize,
}

/// The device pointers of an operation, each with its device and its stream. Devices and streams may repeat.
#[derive(Debug)]
pub struct Pointers {
    devices: Arc<Devices>,
    addresses: Vec<u64>,
    /// Whether what reaches the device of each reaches its memory.
    open: Vec<bool>,
    streams: Vec<Stream>,
    bytes: usize,
    piece: usize,
    pairs_from: usize,
    first_chunk: usize,
    chained: bool,
}

impl Pointers {
    /// Finds each span's device, and checks that it is device memory, as large as the others, and on the
    /// device of its stream. `streams` has one for each span, or none at all: then each gets a stream of our
    /// own, which waits for what the legacy default stream of its device was given before.
    ///
    /// # Safety
    /// The memory and the streams stay valid for as long as what is prepared from this lives and what it
    /// enqueued is not done.
    pub unsafe fn new(devices: &Arc<Devices>, spans: &[Span], streams: &[StreamHandle]) -> Result<Pointers> {
        let Some(first) = spans.first() else { fail!(InvalidArgument, "no device pointers were given") };
        if !streams.is_empty() && streams.len() != spans.len() {
            fail!(
                InvalidArgument,
                "{} streams were given for {} device pointers; give one for each, or none",
                streams.len(),
                spans.len()
            );
        }
        let mut pointers = Pointers {
            devices: devices.clone(),
            addresses: Vec::with_capacity(spans.len()),
            open: Vec::with_capacity(spans.len()),
            streams: Vec::with_capacity(spans.len()),
            bytes: first.bytes,
            piece: PIECE,
            pairs_from: BYTES_OF_A_PAIR,
            first_chunk: FIRST_CHUNK,
            chained: false,
        };
        for (index, span) in spans.iter().enumerate() {
            if span.bytes != first.bytes {
                fail!(
                    InvalidArgument,
                    "pointers[{index}] has {} bytes, but pointers[0] has {}",
                    span.bytes,
                    first.bytes
                );
            }
            let (device, open) =
                device_of(devices, span).map_err(|e| e.context(format_args!("pointers[{index}]")))?;
            let stream = match streams.get(index) {
                // SAFETY: the caller's promise.
                Some(&handle) => unsafe { Stream::borrow(devices, device, handle) },
                None => {
                    devices.check_default_stream(device).and_then(|()| Stream::new(devices, device, true))
                }
            };
            pointers.addresses.push(span.address);
            pointers.open.push(open);
            pointers.streams.push(stream.map_err(|e| e.context(format_args!("streams[{index}]")))?);
        }
        Ok(pointers)
    }

    /// For a reduction that is always followed by a broadcast from the same root, over the same pointers and
    /// streams, and for that broadcast: in between, no stream but the root's is given anything. Leaves out
    /// waits that the other makes needless.
    pub fn chained(self) -> Pointers {
        Pointers { chained: true, ..self }
    }

    /// How many pointers there are; at least one.
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Whether there are none. There never are: [`Pointers::new`] refuses.
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Bytes of each.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Their streams' handles, valid for as long as this lives.
    pub fn handles(&self) -> Vec<StreamHandle> {
        self.streams.iter().map(Stream::handle).collect()
    }

    /// The device of a pointer.
    pub fn device(&self, index: usize) -> u32 {
        self.streams[index].device()
    }

    /// Whether the devices of two pointers reach the memory of both.
    fn reach(&self, a: usize, b: usize) -> Result<bool> {
        let (one, other) = (self.device(a), self.device(b));
        if one == other {
            return Ok(true);
        }
        let open = self.open[a] && self.open[b];
        Ok(open && self.devices.reaches(one, other)? && self.devices.reaches(other, one)?)
    }

    /// Whether each of their devices reaches all others, and their memory.
    fn reach_each_other(&self) -> Result<bool> {
        for (a, b) in (0..self.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            if !self.reach(a, b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Refuses a root that is not one of them.
    fn check_root(&self, root: usize) -> Result<()> {
        if root < self.len() {
            return Ok(());
        }
        fail!(InvalidArgument, "root pointer {root} does not exist; there are {}", self.len())
    }
}

/// The device of a span that lies in one allocation of device memory, and whether what reaches that reaches
/// the memory, too.
fn device_of(devices: &Devices, span: &Span) -> Result<(u32, bool)> {
    let address = span.address;
    let Some(location) = devices.locate(address)? else {
        fail!(
            InvalidArgument,
            "{address:#x} is no memory that CUDA knows: a host pointer where a device pointer is due, or freed memory"
        )
    };
    if location.memory == Memory::Host {
        fail!(InvalidArgument, "{address:#x} is pinned host memory, but a device pointer is due");
    }
    let end =
        location.reach(address, address.saturating_add(span.bytes as u64), |next| devices.locate(next))?;
    let room = end.saturating_sub(address);
    if room < span.bytes as u64 {
        fail!(
            InvalidArgument,
            "{address:#x} has {room} bytes left in its allocation, but {} are needed",
            span.bytes
        );
    }
    // Memory of a pool, and what is mapped piece by piece, is for those whom its owner lets in.
    let open = location.memory == Memory::Managed || {
        let _entered = devices.enter(location.device)?;
        devices.driver().is_shareable(address)?
    };
    Ok((location.device, open))
}

/// What a reduction kernel reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// Device memory that the launching device reaches, aligned to its positions.
    pub address: u64,
    /// What its positions hold.
    pub representation: Representation,
    /// As in [`crate::reduce::Operand`].
    pub scale: f64,
}

impl Operand {
    /// No operand: the one before it in a list stands for a whole subtree of the canonical tree, this place
    /// included.
    pub const ABSENT: Operand =
        Operand { address: 0, representation: Representation::Accumulator, scale: 1.0 };

    /// It, for a launch.
    pub(crate) fn as_pointer(&self) -> crate::reduce::Operand {
        let Operand { address, representation, scale } = *self;
        let address = std::ptr::with_exposed_provenance(address as usize);
        crate::reduce::Operand { address, representation, scale }
    }
}

/// One fold on a device: `out[i] = operands[0][i] ∘ operands[1][i] ∘ …` in the canonical order.
#[derive(Clone, Copy, Debug)]
pub struct Fold<'a> {
    /// The stream that executes it; its device is current.
    pub stream: &'a Stream,
    /// Type of the elements.
    pub dtype: DataType,
    /// How they are combined.
    pub operator: Operator,
    /// What an average divides by.
    pub ranks: u32,
    /// What is combined; the first is not [`Operand::ABSENT`]. `out` may be one of them, with the same size
    /// of a position.
    pub operands: &'a [Operand],
    /// Device memory that the launching device reaches.
    pub out: u64,
    /// What `out` holds afterwards; storing elements applies the operator's final step.
    pub representation: Representation,
    /// Positions.
    pub count: usize,
    /// The most blocks of the launch; 0: as many as suit it.
    pub max_blocks: u32,
}

/// The kernels that fold.
pub trait Kernels: fmt::Debug + Send + Sync {
    /// Loads what folds need on `device`, so that a launch loads nothing; the first time this may wait for
    /// everything that runs there. Refuses a type and operator that it has no kernel for.
    fn prepare(&self, devices: &Arc<Devices>, device: u32, dtype: DataType, operator: Operator)
    -> Result<()>;

    /// The most operands of a fold: a power of two, 2 or more.
    fn most_operands(&self) -> usize;

    /// Enqueues a fold of what was prepared. Neither allocates nor synchronises.
    ///
    /// # Safety
    /// As [`Stream`] says of the memory.
    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()>;

    /// What a courier has to be able to do for it to combine elements of a type by an operator; `None`: none
    /// can.
    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner>;

    /// Enqueues a courier, on a device for which something was prepared and which is current. Neither
    /// allocates nor synchronises.
    ///
    /// # Safety
    /// As [`Courier::launch`](super::courier::Courier::launch).
    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()>;
}

/// `kernels`, whose folds, copies among them, have at most `max_blocks` blocks, unless that is 0.
pub fn limited(kernels: Arc<dyn Kernels>, max_blocks: u32) -> Arc<dyn Kernels> {
    if max_blocks == 0 { kernels } else { Arc::new(Limited { kernels, max_blocks }) }
}

/// Kernels for a caller who wants the multiprocessors for something else.
#[derive(Debug)]
struct Limited {
    kernels: Arc<dyn Kernels>,
    max_blocks: u32,
}

impl Kernels for Limited {
    fn prepare(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        dtype: DataType,
        operator: Operator,
    ) -> Result<()> {
        self.kernels.prepare(devices, device, dtype, operator)
    }

    fn most_operands(&self) -> usize {
        self.kernels.most_operands()
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        let fold = Fold { max_blocks: least_limit([self.max_blocks, fold.max_blocks]), ..*fold };
        // SAFETY: the caller's promise.
        unsafe { self.kernels.fold(devices, &fold) }
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        self.kernels.combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        // Its call says how many blocks it has.
        // SAFETY: the caller's promise.
        unsafe { self.kernels.carry(stream, call, combiner) }
    }
}

/// The error of bytes that are no whole number of elements.
fn ragged(bytes: usize, dtype: DataType) -> Error {
    let text = format!("{bytes} bytes are no whole number of {} elements", dtype.name());
    Error::new(Status::InvalidArgument, text)
}
