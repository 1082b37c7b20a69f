//! Where the memory of a call is: asked and checked before anything touches it, whichever way the call goes.

use std::sync::Arc;

use super::Call;
use super::context::{Context, Membership};
use super::cuda::Cuda;
use crate::collective::checked::{Buffers, Checked};
use crate::collective::request::{Kind, Request};
use crate::cuda::context::Devices;
use crate::cuda::driver::{Capture, Location, Memory, StreamHandle};
use crate::cuda::stream::Stream;
use crate::engine::point::Message;
use crate::engine::staged::Place;
use crate::error::{Result, fail};
use crate::transport::memory::is_readable;

/// The memory that a call names on this rank.
#[derive(Clone, Copy)]
pub(super) struct Spans {
    input: Span,
    output: Span,
}

#[derive(Clone, Copy)]
struct Span {
    /// The argument, for errors.
    name: &'static str,
    address: *mut u8,
    bytes: usize,
}

impl Span {
    fn none(name: &'static str) -> Span {
        Span { name, address: std::ptr::null_mut(), bytes: 0 }
    }

    fn start(&self) -> u64 {
        self.address.expose_provenance() as u64
    }

    fn end(&self) -> u64 {
        self.start().saturating_add(self.bytes as u64)
    }

    /// Whether all of it is in this allocation, of which CUDA says the same everywhere.
    fn lies_in(&self, known: &Location) -> bool {
        !known.mapped && known.base <= self.start() && self.end() <= known.end()
    }
}

impl Spans {
    /// Those of a collective.
    pub(super) fn of_collective(checked: &Checked) -> Spans {
        let element = checked.dtype.size();
        let buffers = Buffers {
            input: checked.input,
            input_bytes: checked.input_len() * element,
            output: checked.output,
            output_bytes: checked.output_len() * element,
        };
        Spans::of_buffers(checked.signature.kind, &buffers)
    }

    /// The same, of what is checked so far.
    pub(super) fn of_buffers(kind: Kind, buffers: &Buffers) -> Spans {
        let names = match kind {
            Kind::Broadcast => ["buffer", "buffer"],
            _ => ["sendbuf", "recvbuf"],
        };
        Spans {
            input: Span { name: names[0], address: buffers.input.cast_mut(), bytes: buffers.input_bytes },
            output: Span { name: names[1], address: buffers.output, bytes: buffers.output_bytes },
        }
    }

    /// Bytes of what it names.
    pub(super) fn bytes(&self) -> usize {
        self.input.bytes + self.output.bytes
    }

    /// The argument that names the memory, if all of it lies in one allocation of a device.
    pub(super) fn within(&self, known: &Location) -> Option<&'static str> {
        let Spans { input, output } = self;
        let lies = |span: &Span| span.bytes == 0 || span.lies_in(known);
        let first = if input.bytes > 0 { input } else { output };
        (known.memory == Memory::Device && first.bytes > 0 && lies(input) && lies(output))
            .then_some(first.name)
    }

    /// Those of a sparse tensor, which is read only: both are inputs.
    pub(super) fn of_tensor(indices: (*const i64, usize), values: (*const u8, usize)) -> Spans {
        Spans {
            input: Span { name: "indices", address: indices.0.cast_mut().cast(), bytes: indices.1 },
            output: Span { name: "values", address: values.0.cast_mut(), bytes: values.1 },
        }
    }

    /// That of a send or receive.
    pub(super) fn of_message(message: &Message) -> Spans {
        let (mut input, mut output) = (Span::none("sendbuf"), Span::none("recvbuf"));
        match *message {
            Message::Send { from, .. } => {
                (input.address, input.bytes) = (from.address.cast_mut(), from.len);
            }
            Message::Receive { into, .. } | Message::ReceiveAny { into, .. } => {
                (output.address, output.bytes) = (into.address, into.len);
            }
        }
        Spans { input, output }
    }
}

/// The same, with what CUDA knows of it.
pub(super) struct Located {
    spans: [(Span, Option<Location>); 2],
}

impl Located {
    /// Asks CUDA. `known` is what it has said of an address before.
    pub(super) fn new(spans: Spans, cuda: &Cuda, known: Option<Location>) -> Result<Located> {
        // Memory of one allocation is asked about once.
        let locate = |span: &Span, known: [Option<Location>; 2]| {
            if span.bytes == 0 {
                return Ok(None);
            }
            match known.into_iter().flatten().find(|known| span.lies_in(known)) {
                Some(known) => Ok(Some(known)),
                None => cuda.locate(span.start()),
            }
        };
        let input = locate(&spans.input, [known, None])?;
        let output = locate(&spans.output, [known, input])?;
        Ok(Located { spans: [(spans.input, input), (spans.output, output)] })
    }

    /// Memory that CUDA does not know, of a call whose stream is being captured, is taken for what the graph
    /// itself will have there: where one allocates it has addresses before there is memory behind them.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn in_graph(mut self, cuda: &Cuda, stream: Option<StreamHandle>) -> Result<Located> {
        let mut nowhere = self
            .spans
            .iter_mut()
            .filter(|(span, location)| location.is_none() && span.bytes > 0 && span.is_nowhere());
        if let Some((span, location)) = nowhere.next()
            // SAFETY: the caller's promise.
            && let Some(device) = unsafe { cuda.capturing(stream) }?
        {
            *location = Some(span.ahead(device));
            nowhere.for_each(|(span, location)| *location = Some(span.ahead(device)));
        }
        Ok(self)
    }

    /// What is known of some of it.
    pub(super) fn any(&self) -> Option<Location> {
        self.spans.iter().find_map(|(_, location)| *location)
    }

    /// Whether any of it is a device's.
    pub(super) fn is_on_device(&self) -> bool {
        self.spans.iter().any(|(_, location)| is_of_device(location))
    }

    /// The device whose memory it is, and the argument that says so; managed memory goes to whichever device
    /// asks for it. Refuses memory of two devices, and what ends before the call's bytes do. Of pinned memory
    /// the host also has what lies behind: it may be part of a buffer.
    fn device(&self, cuda: &Cuda) -> Result<Option<(u32, &'static str)>> {
        let mut device: Option<(u32, &str)> = None;
        for (span, location) in &self.spans {
            let Some(location) = location.filter(|location| location.memory != Memory::Host) else {
                continue;
            };
            span.fits(location, cuda)?;
            if location.memory == Memory::Managed {
                continue;
            }
            let (name, found) = (span.name, location.device);
            if let Some((other, first)) = device
                && other != found
            {
                fail!(
                    InvalidArgument,
                    "{first} is memory of GPU {other}, but {name} of GPU {found}: buffers of a call share a device"
                );
            }
            device.get_or_insert((found, name));
        }
        Ok(device)
    }

    /// What kernels of a device are to work on: as [`Located::device`], and refuses what no kernel reaches.
    /// The argument whose device it is, or else some argument.
    pub(super) fn reachable(&self, cuda: &Cuda) -> Result<(Option<u32>, &'static str)> {
        let device = self.device(cuda)?;
        for (span, location) in &self.spans {
            if let Some(location) = location.filter(|location| location.memory == Memory::Host) {
                span.pinned(location, cuda)?;
            }
            if location.is_none() && span.bytes > 0 {
                span.readable()?;
                let name = span.name;
                fail!(
                    InvalidArgument,
                    "{name} ({:#x}) is host memory that is not pinned, which GPUs do not reach: give memory of the GPU, or \
                     register it with CUDA",
                    span.start()
                );
            }
        }
        let names =
            || self.spans.iter().find(|(span, _)| span.bytes > 0).map_or("the memory", |(span, _)| span.name);
        Ok((device.map(|(device, _)| device), device.map_or_else(names, |(_, name)| name)))
    }

    /// The device on which managed or pinned memory was allocated.
    pub(super) fn allocated_on(&self) -> Option<u32> {
        self.spans.iter().find_map(|(_, location)| location.map(|location| location.device))
    }
}

fn is_of_device(location: &Option<Location>) -> bool {
    location.is_some_and(|location| matches!(location.memory, Memory::Device | Memory::Managed))
}

impl Span {
    /// Refuses a span that goes on beyond its allocation.
    fn fits(&self, location: Location, cuda: &Cuda) -> Result<()> {
        let (name, bytes) = (self.name, self.bytes);
        let end = location.reach(self.start(), self.end(), |address| cuda.locate(address))?;
        if end < self.end() {
            let room = end.saturating_sub(self.start());
            fail!(InvalidArgument, "{name} has {room} bytes left in its allocation, but {bytes} are needed");
        }
        Ok(())
    }

    /// Refuses a span that goes on beyond what is pinned, in one piece or in several, one after the other.
    fn pinned(&self, location: Location, cuda: &Cuda) -> Result<()> {
        let mut end = location.end();
        while end < self.end() {
            let next = cuda.locate(end)?.filter(|next| next.memory == Memory::Host && next.end() > end);
            let Some(next) = next else {
                let (name, bytes, room) = (self.name, self.bytes, end.saturating_sub(self.start()));
                fail!(
                    InvalidArgument,
                    "{name} has {room} bytes left that are pinned, but GPUs are to reach {bytes}: register all of it with CUDA, or \
                     give memory of the GPU"
                );
            };
            end = next.end();
        }
        Ok(())
    }

    /// What it is where a graph will have it: memory of this device.
    fn ahead(&self, device: u32) -> Location {
        let (base, bytes) = (self.start(), self.bytes as u64);
        Location { memory: Memory::Device, device, base, bytes, buffer: 0, mapped: false }
    }

    /// Host memory that a call names beside a device or a stream must be there: freed device memory looks
    /// like it.
    fn readable(&self) -> Result<()> {
        if self.is_nowhere() {
            fail!(
                InvalidArgument,
                "{} ({:#x}) is neither memory that CUDA knows nor memory of this process: has it been freed?",
                self.name,
                self.start()
            );
        }
        Ok(())
    }

    /// Whether this process has no memory there, as far as the kernel tells.
    fn is_nowhere(&self) -> bool {
        !is_readable(std::ptr::with_exposed_provenance(self.start() as usize), 1)
    }
}

/// Where a call's memory is, and the stream that it is ordered on.
pub(super) struct Survey {
    pub(super) devices: Arc<Devices>,
    pub(super) device: u32,
    /// Whether any of it is a device's.
    pub(super) on_device: bool,
    pub(super) input: Place,
    pub(super) output: Place,
    pub(super) input_bytes: usize,
    pub(super) output_bytes: usize,
    /// The caller's, or ours that waits for the default stream.
    pub(super) stream: Arc<Stream>,
    /// Whether it is the caller's,
    pub(super) ordered: bool,
    /// and being captured: in a group of one.
    pub(super) captured: bool,
}

impl Survey {
    /// Where the two spans are.
    pub(super) fn places(&self) -> (Place, Place) {
        (self.input, self.output)
    }

    /// The stream that the call is ordered on, and whether it is the caller's.
    pub(super) fn stream(&self) -> (&Stream, bool) {
        (&self.stream, self.ordered)
    }

    pub(super) fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }
}

impl Context {
    /// The device that a call is on which GPUs do not exchange, if it is on device memory or ordered on a
    /// stream, and can be made.
    pub(super) fn device_of(&self, request: &Request, call: &Call) -> Option<u32> {
        let cuda = self.cuda();
        if cuda.has_no_part_in(call) {
            return None;
        }
        let of_stream = |stream| cuda.devices().ok()?.device_of_stream(stream).ok();
        if let Some(stream) = call.stream.filter(|stream| !stream.is_default()) {
            return of_stream(stream);
        }
        let mut managed = None;
        for address in [request.output.addr(), request.input.addr()].into_iter().filter(|&at| at != 0) {
            let Some(found) = cuda.locate(address as u64).ok().flatten() else { continue };
            match found.memory {
                Memory::Device => return Some(found.device),
                Memory::Managed => managed = managed.or(Some(found.device)),
                Memory::Host => {}
            }
        }
        match call.stream {
            Some(stream) => of_stream(stream),
            None => managed.or(call.on_device.then_some(0)),
        }
    }

    /// Whether a call is on device memory or ordered on a stream; if so, where its memory is. `None`: an
    /// ordinary call.
    pub(super) fn survey(&self, spans: Spans, call: &Call) -> Result<Option<Survey>> {
        self.survey_all(spans, call, false)
    }

    /// As [`Context::survey`], of a collective: that of a group of one is a copy, and its stream may be in
    /// capture.
    pub(super) fn survey_collective(&self, checked: &Checked, call: &Call) -> Result<Option<Survey>> {
        let is_alone = matches!(self.membership(), Membership::Solo);
        self.survey_all(Spans::of_collective(checked), call, is_alone)
    }

    fn survey_all(&self, spans: Spans, call: &Call, copies: bool) -> Result<Option<Survey>> {
        let cuda = self.cuda();
        if cuda.has_no_part_in(call) {
            return Ok(None);
        }
        // SAFETY: whoever made the call promised a stream that lives until the operation is complete.
        let located = unsafe { Located::new(spans, cuda, None)?.in_graph(cuda, call.stream) }?;
        let on_device = call.on_device || located.is_on_device();
        let unknown = || located.spans.iter().filter(|(span, location)| location.is_none() && span.bytes > 0);
        if !on_device && call.stream.is_none() {
            if let Membership::Group(group) = self.membership()
                && group.devices().is_some()
            {
                // A group that has worked on device memory may well be given some that has been freed.
                unknown().try_for_each(|(span, _)| span.readable())?;
            }
            return Ok(None);
        }
        let devices = cuda.devices()?.clone();
        let stream_device = call.stream.filter(|stream| !stream.is_default());
        let stream_device = stream_device.map(|stream| devices.device_of_stream(stream)).transpose()?;
        let device = located.device(cuda)?;
        if let (Some((memory, name)), Some(stream)) = (device, stream_device)
            && memory != stream
        {
            fail!(
                InvalidArgument,
                "call->stream is a stream of GPU {stream}, but {name} is memory of GPU {memory}"
            );
        }
        unknown().try_for_each(|(span, _)| span.readable())?;
        if call.on_device {
            located.reachable(cuda)?;
        }
        let managed = || {
            let is_managed = |location: &Location| location.memory == Memory::Managed;
            located
                .spans
                .iter()
                .find_map(|(_, location)| location.filter(is_managed))
                .map(|found| found.device)
        };
        let device = match (device, stream_device, call.stream) {
            (Some((device, _)), ..) | (None, Some(device), _) => device,
            (None, None, Some(stream)) => devices.device_of_stream(stream)?,
            (None, None, None) => managed().unwrap_or(0),
        };
        let stream = match call.stream {
            // SAFETY: whoever made the call promised a stream that lives until the operation is complete.
            Some(handle) => Arc::new(unsafe { Stream::borrow(&devices, device, handle) }?),
            None => cuda.front(device)?,
        };
        if call.stream.is_some() && !copies {
            stream.refuse_capture("call->stream", "a call by way of the host cannot be captured")?;
        }
        let captured = call.stream.is_some() && copies && stream.capture()? != Capture::None;
        let place = |(span, location): &(Span, Option<Location>)| match is_of_device(location) {
            true => Place::Device(span.start()),
            false => Place::Host(span.address),
        };
        Ok(Some(Survey {
            device,
            on_device,
            input: place(&located.spans[0]),
            output: place(&located.spans[1]),
            input_bytes: spans.input.bytes,
            output_bytes: spans.output.bytes,
            stream,
            ordered: call.stream.is_some(),
            captured,
            devices,
        }))
    }
}
