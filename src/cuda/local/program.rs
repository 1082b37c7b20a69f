//! A local operation as data: the driver calls of one run, with the events and the memory that they use.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Fold, Kernels, Operand, Pointers};
use crate::cuda::context::Entered;
use crate::cuda::driver::Capture;
use crate::cuda::event::Event;
use crate::cuda::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator, Representation};

/// How long dropping a program waits for the streams that still use its memory, before it rather leaks that.
const PATIENCE: Duration = Duration::from_secs(10);

/// One driver call on the stream of one pointer.
#[derive(Debug)]
struct Step {
    /// The pointer.
    on: usize,
    call: Call,
}

#[derive(Debug)]
enum Call {
    Record { event: usize },
    Wait { event: usize },
    Copy { from: u64, to: u64, device: u32, bytes: usize },
    ToHost { from: u64, to: Host, bytes: usize },
    ToDevice { from: Host, to: u64, bytes: usize },
    Fold { operands: Box<[Operand]>, out: u64, representation: Representation, count: usize },
}

/// A place in pinned memory.
#[derive(Clone, Copy, Debug)]
struct Host {
    buffer: usize,
    offset: usize,
}

/// What the folds of a program do.
pub(super) struct Folding {
    pub(super) kernels: Arc<dyn Kernels>,
    pub(super) dtype: DataType,
    pub(super) operator: Operator,
    /// What an average divides by.
    pub(super) contributions: u32,
}

/// A prepared operation.
pub(super) struct Program {
    pointers: Pointers,
    steps: Box<[Step]>,
    events: Vec<Event>,
    /// What each stream has done, for the host to wait for.
    ends: Vec<Event>,
    pinned: Vec<PinnedBuffer>,
    scratch: Vec<DeviceBuffer>,
    folding: Option<Folding>,
    /// Whether a stream may be using the memory.
    used: bool,
}

impl Program {
    /// Enqueues everything, in whatever each stream has been given so far. If a call fails, what was enqueued
    /// before it runs and nothing waits for what was not: the contents of the pointers are undefined, no
    /// stream hangs.
    pub(super) fn run(&mut self) -> Result<()> {
        self.check_capture()?;
        self.used = true;
        let mut here: Option<(u32, Entered<'_>)> = None;
        for step in &self.steps {
            let device = self.pointers.device(step.on);
            if here.as_ref().is_none_or(|(current, _)| *current != device) {
                // Popped before the next is pushed.
                drop(here.take());
                here = Some((device, self.pointers.devices.enter(device)?));
            }
            self.call(step)?;
        }
        Ok(())
    }

    /// Waits on the host until every stream has done what it was given.
    pub(super) fn finish(&mut self, deadline: Deadline) -> Result<()> {
        if let Capture::Active(_) = self.check_capture()? {
            fail!(InvalidUsage, "the streams are being captured: nothing runs that could be waited for");
        }
        for (end, stream) in self.ends.iter().zip(&self.pointers.streams) {
            end.record(stream)?;
        }
        self.ends.iter().try_for_each(|end| end.synchronize(deadline))?;
        self.used = false;
        Ok(())
    }

    /// Whether the streams are being captured.
    pub(super) fn is_captured(&self) -> Result<bool> {
        Ok(matches!(self.check_capture()?, Capture::Active(_)))
    }

    /// What `stream` is given after this waits for everything that any of the streams has been given.
    pub(super) fn join(&mut self, stream: &Stream) -> Result<()> {
        for (end, own) in self.ends.iter().zip(&self.pointers.streams) {
            end.record(own)?;
            stream.wait(end)?;
        }
        Ok(())
    }

    /// The state that all streams are in. They exchange events, so either all are in one capture or none is.
    fn check_capture(&self) -> Result<Capture> {
        let mut streams = self.pointers.streams.iter();
        let first = streams.next().map_or(Ok(Capture::None), |stream| stream.capture())?;
        for (index, stream) in streams.enumerate() {
            if stream.capture()? != first {
                fail!(
                    InvalidUsage,
                    "streams[0] and streams[{}] are not in the same capture; before the call let every stream wait for \
                     an event of the capturing one, and after it the capturing one for an event of each",
                    index + 1
                );
            }
        }
        if first == Capture::Invalidated {
            fail!(InvalidUsage, "the capture of the streams is invalid: an earlier call in it failed");
        }
        Ok(first)
    }

    /// Its device is current.
    fn call(&self, step: &Step) -> Result<()> {
        let devices = &self.pointers.devices;
        let driver = devices.driver();
        let owner = &self.pointers.streams[step.on];
        let stream = owner.handle();
        match step.call {
            // SAFETY: stream and event live as long as this.
            Call::Record { event } => unsafe { driver.record_event(self.events[event].handle(), stream) },
            // SAFETY: as above.
            Call::Wait { event } => unsafe { driver.wait_event(stream, self.events[event].handle()) },
            Call::Copy { from, to, device, bytes } if device == owner.device() => {
                // SAFETY: the promise of `Pointers::new`, or scratch of ours that `drop` keeps until it is
                // done with.
                unsafe { driver.copy_on_device(to, from, bytes, stream) }
            }
            Call::Copy { from, to, device, bytes } => {
                let (own, peer) = (devices.context(owner.device())?, devices.context(device)?);
                // SAFETY: as above; the contexts are retained.
                unsafe { driver.copy_to_peer((to, peer), (from, own), bytes, stream) }
            }
            Call::ToHost { from, to, bytes } => {
                let to = self.pinned[to.buffer].address().wrapping_add(to.offset);
                // SAFETY: as above.
                unsafe { driver.copy_to_host(to, from, bytes, stream) }
            }
            Call::ToDevice { from, to, bytes } => {
                let from = self.pinned[from.buffer].address().wrapping_add(from.offset);
                // SAFETY: as above.
                unsafe { driver.copy_to_device(to, from, bytes, stream) }
            }
            Call::Fold { ref operands, out, representation, count } => {
                let Some(Folding { kernels, dtype, operator, contributions }) = &self.folding else {
                    fail!(Internal, "a local operation without kernels has a fold")
                };
                let fold = Fold {
                    stream: owner,
                    dtype: *dtype,
                    operator: *operator,
                    ranks: *contributions,
                    operands,
                    out,
                    representation,
                    count,
                    max_blocks: 0,
                };
                // SAFETY: as above.
                unsafe { kernels.fold(devices, &fold) }
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let owns = !self.pinned.is_empty() || !self.scratch.is_empty();
        if !owns || !self.used {
            return;
        }
        if let Err(error) = self.finish(Deadline::after(PATIENCE)) {
            log::warn!("memory of a local operation is leaked, since a stream may still use it: {error}");
            self.pinned.drain(..).for_each(std::mem::forget);
            self.scratch.drain(..).for_each(std::mem::forget);
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("pointers", &self.pointers).field("steps", &self.steps.len()).finish()
    }
}

/// Writes a program. Calls are enqueued in the order they are written; pointers are named by their index.
pub(super) struct Builder {
    pub(super) pointers: Pointers,
    steps: Vec<Step>,
    events: Vec<Event>,
    pinned: Vec<PinnedBuffer>,
    scratch: Vec<DeviceBuffer>,
    bridges: HashMap<(usize, usize), Bridge>,
}

/// Two pinned pieces between two pointers whose devices do not reach each other.
struct Bridge {
    buffer: usize,
    /// When the target's stream has read each piece, if it was used in this program.
    free: [Option<usize>; 2],
    /// Which is next.
    next: usize,
}

impl Builder {
    pub(super) fn new(pointers: Pointers) -> Builder {
        let (steps, events, pinned, scratch) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Builder { pointers, steps, events, pinned, scratch, bridges: HashMap::new() }
    }

    pub(super) fn finish(self, folding: Option<Folding>) -> Result<Program> {
        let Builder { pointers, steps, events, pinned, scratch, bridges: _ } = self;
        let ends = pointers.streams.iter().map(|stream| Event::new(&pointers.devices, stream.device()));
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let steps = steps.into_boxed_slice();
        Ok(Program { pointers, steps, events, ends, pinned, scratch, folding, used: false })
    }

    /// The point that a pointer's stream has come to.
    pub(super) fn record(&mut self, on: usize) -> Result<usize> {
        let event = self.events.len();
        self.events.push(Event::new(&self.pointers.devices, self.pointers.device(on))?);
        self.push(on, Call::Record { event });
        Ok(event)
    }

    /// What `on`'s stream is given after this waits for the event.
    pub(super) fn wait(&mut self, on: usize, event: usize) {
        self.push(on, Call::Wait { event });
    }

    /// What `after`'s stream is given from now on waits for what `before`'s has been given. On one stream it
    /// does anyway.
    pub(super) fn order(&mut self, before: usize, after: usize) -> Result<()> {
        if !self.share_stream(before, after) {
            let event = self.record(before)?;
            self.wait(after, event);
        }
        Ok(())
    }

    /// Whether two pointers have one stream.
    pub(super) fn share_stream(&self, a: usize, b: usize) -> bool {
        self.pointers.streams[a].is(&self.pointers.streams[b])
    }

    /// Whether what two pointers have goes between their devices without the host.
    pub(super) fn direct(&self, a: usize, b: usize) -> Result<bool> {
        self.pointers.reach(a, b)
    }

    /// Copies from pointer `from`'s device to pointer `to`'s: directly, on `from`'s stream, which has to wait
    /// for what used the target before; or through the host, by both streams, where `from`'s has to wait for
    /// what `to`'s did in earlier runs. Answers whether it was direct: then `to`'s stream has still to wait
    /// for `from`'s.
    pub(super) fn transfer(
        &mut self,
        (from, source): (usize, u64),
        (to, target): (usize, u64),
        bytes: usize,
    ) -> Result<bool> {
        if self.direct(from, to)? {
            let device = self.pointers.device(to);
            self.push(from, Call::Copy { from: source, to: target, device, bytes });
            return Ok(true);
        }
        let piece = self.pointers.piece.min(self.pointers.bytes.max(1));
        for offset in (0..bytes).step_by(piece) {
            let bytes = piece.min(bytes - offset);
            let (source, target) = (source + offset as u64, target + offset as u64);
            let (place, free) = self.next_piece(from, to, piece)?;
            if let Some(free) = free {
                self.wait(from, free);
            }
            self.push(from, Call::ToHost { from: source, to: place, bytes });
            self.order(from, to)?;
            self.push(to, Call::ToDevice { from: place, to: target, bytes });
            let free = if self.share_stream(from, to) { None } else { Some(self.record(to)?) };
            if let Some(bridge) = self.bridges.get_mut(&(from, to)) {
                bridge.free[place.offset / piece] = free;
            }
        }
        Ok(false)
    }

    /// Has the program own memory that it uses.
    pub(super) fn keep(&mut self, buffer: DeviceBuffer) {
        self.scratch.push(buffer);
    }

    /// Scratch memory on a pointer's device.
    pub(super) fn scratch(&mut self, on: usize, bytes: usize) -> Result<u64> {
        let buffer = DeviceBuffer::new(&self.pointers.devices, self.pointers.device(on), bytes)?;
        let address = buffer.address();
        self.scratch.push(buffer);
        Ok(address)
    }

    /// Folds on a pointer's device.
    pub(super) fn fold(
        &mut self,
        on: usize,
        operands: &[Operand],
        (out, representation): (u64, Representation),
        count: usize,
    ) {
        self.push(on, Call::Fold { operands: operands.into(), out, representation, count });
    }

    fn push(&mut self, on: usize, call: Call) {
        self.steps.push(Step { on, call });
    }

    /// The piece to use next between two pointers, and the event to wait for before.
    fn next_piece(&mut self, from: usize, to: usize, piece: usize) -> Result<(Host, Option<usize>)> {
        if !self.bridges.contains_key(&(from, to)) {
            let buffer = self.pinned.len();
            let device = self.pointers.device(from);
            self.pinned.push(PinnedBuffer::new(&self.pointers.devices, device, 2 * piece)?);
            self.bridges.insert((from, to), Bridge { buffer, free: [None; 2], next: 0 });
        }
        let Some(bridge) = self.bridges.get_mut(&(from, to)) else {
            fail!(Internal, "a bridge between two devices vanished")
        };
        let slot = bridge.next;
        bridge.next = 1 - slot;
        Ok((Host { buffer: bridge.buffer, offset: slot * piece }, bridge.free[slot]))
    }
}
