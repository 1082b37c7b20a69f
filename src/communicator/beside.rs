//! Messages of a list that have streams of the library's, beside the caller's.
//!
//! Calls of a list begin before any of them is closed, so that calls by way of the host are beside each other
//! also where they have a stream in common. What GPUs do alone is given to the stream in one order with what
//! couriers of messages do there, and whichever came first would keep the other from beginning, which another
//! rank may be waiting for. So where a stream has both, messages that couriers carry are given to a stream of
//! the library's instead: it comes after what the caller's had been given before the list, and the caller's
//! goes on behind it.

use std::sync::Arc;

use super::Call;
use super::context::{Context, Membership};
use super::work::Work;
use crate::collective::request::Request;
use crate::cuda::context::Devices;
use crate::cuda::driver::{Capture, StreamHandle};
use crate::cuda::joined;
use crate::cuda::stream::Stream;
use crate::engine::device::Way;
use crate::engine::staged;
use crate::error::{Error, Result};

/// The streams that messages of a list are given to instead of those that they name.
#[must_use = "the streams that they name go on before them"]
#[derive(Default)]
pub struct Beside {
    /// Which of the streams each call has, if it has one.
    calls: Vec<Option<usize>>,
    streams: Vec<Aside>,
}

/// A stream of the library's.
struct Aside {
    stream: Arc<Stream>,
    /// The caller's.
    beside: Stream,
}

/// What a call of a list has its stream do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// Nothing that waits for other ranks in an order with what others of the list do there.
    Nothing,
    /// It carries a message, by a courier or for the host's order.
    Carries,
    /// It runs kernels that wait for those of other ranks, or may.
    Exchanges,
}

/// A call of a list.
pub type Listed<'a> = (&'a Context, &'a Request, Call);

impl Does {
    /// `all`: collectives by way of the host count as if GPUs exchanged them, since messages are closed
    /// before these begin.
    fn of(listed: &Listed<'_>, all: bool) -> Does {
        let (context, request, call) = listed;
        let Membership::Group(group) = context.membership() else { return Does::Nothing };
        let exchanges = || all || matches!(group.devices(), Some(Way::Exchange(_) | Way::Hosts(_)));
        match request.kind.point_to_point() {
            _ if call.stream.is_none() => Does::Nothing,
            true if context.is_point(request, call, all) => Does::Exchanges,
            true => Does::Carries,
            false if exchanges() => Does::Exchanges,
            false => Does::Nothing,
        }
    }
}

impl Beside {
    /// Those of so many calls of a list, before anything of it is given to its stream. `listed` is the call at
    /// a place, `device_of` the device of its stream, if that can be told: a default stream is that of this
    /// device. `all`: messages are closed before collectives begin. A message for which there is no stream
    /// keeps its own.
    ///
    /// # Safety
    /// The streams of the calls live until this has been joined.
    pub unsafe fn of<'a>(
        count: usize,
        listed: &dyn Fn(usize) -> Option<Listed<'a>>,
        all: bool,
        device_of: &dyn Fn(usize) -> Option<u32>,
    ) -> Beside {
        let does = |place: usize| listed(place).map_or(Does::Nothing, |listed| Does::of(&listed, all));
        // Most lists do one thing.
        let has = |what: Does| (0..count).any(|place| does(place) == what);
        if count < 2 || !has(Does::Carries) || !has(Does::Exchanges) {
            return Beside::default();
        }
        let mut found = Beside { calls: vec![None; count], streams: Vec::new() };
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { found.fork(listed, &does, device_of) } {
            // What is wrong with a stream its call will tell.
            log::debug!("messages are not given to streams apart: {error}");
        }
        found
    }

    /// # Safety
    /// As [`Beside::of`].
    unsafe fn fork<'a>(
        &mut self,
        listed: &dyn Fn(usize) -> Option<Listed<'a>>,
        does: &dyn Fn(usize) -> Does,
        device_of: &dyn Fn(usize) -> Option<u32>,
    ) -> Result<()> {
        let (mut exchange, mut carry) = (Vec::new(), Vec::new());
        for place in 0..self.calls.len() {
            let Some((context, _, Call { stream: Some(handle), .. })) = listed(place) else { continue };
            let handle = if handle == StreamHandle::NULL { StreamHandle::LEGACY } else { handle };
            let does = does(place);
            if does == Does::Nothing {
                continue;
            }
            // What is wrong with a stream its call will tell.
            let Some(device) = device_of(place) else { continue };
            match does {
                Does::Carries => carry.push((place, context, (device, handle))),
                _ => exchange.push((device, handle)),
            }
        }
        let mut known: Vec<(u32, StreamHandle)> = Vec::new();
        for (place, context, stream) in carry.into_iter().filter(|(.., stream)| exchange.contains(stream)) {
            let at = match known.iter().position(|other| *other == stream) {
                Some(at) => at,
                None => {
                    // SAFETY: the caller's promise.
                    let forked = unsafe { Aside::fork(context.cuda().devices()?, stream) }?;
                    let Some(aside) = forked else { continue };
                    self.streams.push(aside);
                    known.push(stream);
                    known.len() - 1
                }
            };
            self.calls[place] = Some(at);
        }
        Ok(())
    }

    /// A call of the list, as it is to begin.
    pub fn call(&self, place: usize, call: &Call) -> Call {
        let aside = self.calls.get(place).copied().flatten();
        let stream = aside.map_or(call.stream, |at| Some(self.streams[at].stream.handle()));
        Call { stream, ..call.clone() }
    }

    /// The callers' streams go on behind what those beside them were given, which is all that is to be. The
    /// places of calls that their streams go on without, and why: these are to be [`given_up`].
    pub fn join(self) -> Vec<(usize, Error)> {
        let mut without = Vec::new();
        for (at, Aside { stream, beside }) in self.streams.iter().enumerate() {
            if let Err(error) = joined::release(stream, std::slice::from_ref(beside)) {
                let error = error.context("call->stream cannot be made to wait");
                let calls = self.calls.iter().enumerate().filter(|(_, own)| **own == Some(at));
                without.extend(calls.map(|(place, _)| (place, error.clone())));
            }
        }
        without
    }
}

/// Gives a call up that nothing orders its stream behind: it must not go on.
pub fn given_up(work: Result<Work>, error: &Error) -> Result<Work> {
    if let Some(running) = work?.host() {
        running.group().fail_here(error);
        running.cancel();
    }
    Err(error.clone())
}

impl Aside {
    /// A stream that comes after what the caller's has been given. `None`: all have something to do, or the
    /// caller's is being captured, and messages by way of the host cannot be.
    ///
    /// # Safety
    /// The caller's stream lives until this is dropped.
    unsafe fn fork(devices: &Arc<Devices>, (device, handle): (u32, StreamHandle)) -> Result<Option<Aside>> {
        let _entered = devices.enter(device)?;
        // SAFETY: the caller's promise.
        let beside = unsafe { Stream::borrow(devices, device, handle) }?;
        if beside.capture()? != Capture::None {
            return Ok(None);
        }
        // SAFETY: as above.
        let number = unsafe { devices.driver().stream_id(handle) }?;
        let Some(stream) = staged::stream_beside(devices, device, number)? else { return Ok(None) };
        {
            let _rousing = devices.rousing(&stream)?;
            joined::gather(&stream, std::slice::from_ref(&beside))?;
        }
        Ok(Some(Aside { stream, beside }))
    }
}
