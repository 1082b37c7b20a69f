//! Copies by themselves, in the order of a stream: from its device to pinned memory of the library, and back.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use super::resources::{self, Bay, Entry, Lane, Ringer};
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::endpoint::Endpoint;
use crate::error::Result;

/// Parts of a transfer begin at multiples of this many bytes of the pinned memory.
const ALIGNMENT: usize = 64;

/// Device memory on its way to the host. Dropping it is fine at any time: what it ran in is used again when the copies
/// are done.
#[derive(Debug)]
pub struct Load(Transfer);

impl Load {
    /// Begins to copy `parts`, addresses and lengths, when `stream` has come so far, and rings `endpoint` when they are
    /// there. `holds`: what the stream is given after this waits until they have been read.
    ///
    /// # Safety
    /// The parts are memory of the stream's device, and nobody writes to it, until [`Load::is_complete`]; if the stream is
    /// held, until what it is given next.
    pub unsafe fn begin(
        stream: &Stream,
        parts: &[(u64, usize)],
        holds: bool,
        endpoint: Option<&Arc<Endpoint>>,
    ) -> Result<Load> {
        let transfer = Transfer::new(stream, Way::Load, parts.iter().map(|(_, bytes)| *bytes))?;
        let (bay, lane) = transfer.held();
        bay.load.wait(&*Entry::record(stream)?)?;
        for ((from, bytes), range) in parts.iter().zip(&transfer.parts) {
            let to = lane.address().wrapping_add(range.start);
            // SAFETY: the caller's promise; the lane has room for the part, and is this transfer's.
            unsafe { bay.load.copy_to_host(to, *from, *bytes) }?;
        }
        lane.loaded.record(&bay.load)?;
        if holds {
            stream.wait(&lane.loaded)?;
        }
        if let Some(endpoint) = endpoint {
            Ringer::new(endpoint).ring(&bay.load)?;
        }
        Ok(Load(transfer))
    }

    /// Whether the bytes are there.
    pub fn is_complete(&self) -> Result<bool> {
        let complete = self.0.held().1.loaded.query()?;
        self.0.ended.set(complete);
        Ok(complete)
    }

    /// Waits until the bytes are there.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.0.held().1.loaded.synchronize(deadline)
    }

    /// Where a part lies in pinned memory: as long as it was, aligned to 64 bytes. Its bytes are there once the load is
    /// complete.
    pub fn part(&self, index: usize) -> *const u8 {
        self.0.held().1.address().wrapping_add(self.0.parts[index].start).cast_const()
    }
}

/// Copies host memory to the device of `stream`, in its order: `parts` are the bytes, which have been read when this
/// returns, and where they go.
///
/// # Safety
/// The destinations are memory of the stream's device that nobody else touches, until what the stream is given next.
pub unsafe fn store(stream: &Stream, parts: &[(&[u8], u64)]) -> Result<()> {
    let transfer = Transfer::new(stream, Way::Store, parts.iter().map(|(bytes, _)| bytes.len()))?;
    let (bay, lane) = transfer.held();
    bay.store.wait(&*Entry::record(stream)?)?;
    for ((bytes, to), range) in parts.iter().zip(&transfer.parts) {
        let from = lane.address().wrapping_add(range.start);
        // SAFETY: the caller's promise; the lane has room for the part, and is this transfer's.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), from, bytes.len());
            bay.store.copy_to_device(*to, from.cast_const(), bytes.len())?;
        }
    }
    lane.stored.record(&bay.store)?;
    stream.wait(&lane.stored)
}

/// What copies run in. When it is dropped, they may still be under way.
#[derive(Debug)]
struct Transfer {
    /// Set until the drop.
    held: Option<(Bay, Lane)>,
    parts: Vec<Range<usize>>,
    way: Way,
    /// Whether the copies are known to be done.
    ended: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Load,
    Store,
}

impl Transfer {
    fn new(stream: &Stream, way: Way, lengths: impl Iterator<Item = usize>) -> Result<Transfer> {
        let (devices, device) = (stream.devices(), stream.device());
        let mut end = 0_usize;
        let parts = lengths
            .map(|bytes| {
                let start = end.next_multiple_of(ALIGNMENT);
                end = start + bytes;
                start..end
            })
            .collect();
        let lane = Lane::take(devices, device, end)?;
        let held = Some((Bay::take(devices, device)?, lane));
        Ok(Transfer { held, parts, way, ended: Cell::new(false) })
    }

    fn held(&self) -> &(Bay, Lane) {
        // PROOF: nothing but the drop takes it.
        self.held.as_ref().expect("held until the drop")
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let Some((bay, lane)) = self.held.take() else { return };
        if self.ended.get() {
            return resources::give_back(bay, vec![lane]);
        }
        let stream = if self.way == Way::Load { &bay.load } else { &bay.store };
        let behind = || -> Result<Event> {
            let tail = Event::new(stream.devices(), stream.device())?;
            tail.record(stream)?;
            Ok(tail)
        };
        match behind() {
            Ok(tail) => resources::park(tail, bay, vec![lane]),
            Err(error) => {
                // The device does nothing any more that could be waited for.
                log::warn!("a copy leaves its pinned memory behind: {error}");
                std::mem::forget((bay, lane));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::double::{Double, Order};

    /// A part of so many bytes goes to the host and back to another place, while the caller's stream writes before and
    /// after. What went wrong.
    fn there_and_back(order: Order, ignored: Option<usize>) -> Vec<String> {
        let double = Double::new(1, order);
        let devices = Devices::over(double.clone()).expect("a driver");
        let handle = double.stream(0);
        // SAFETY: the double trusts no handles.
        let stream = unsafe { Stream::borrow(&devices, 0, handle) }.expect("a stream");
        let (short, long, back) = (double.memory(0, 8), double.memory(0, 100), double.memory(0, 108));
        if let Some(index) = ignored {
            double.ignore_wait(index);
        }
        double.fill(handle, 0, short, &[1; 8]);
        double.fill(handle, 0, long, &[2; 100]);
        // SAFETY: the double keeps its memory.
        let load =
            unsafe { Load::begin(&stream, &[(short, 8), (long, 100)], true, None) }.expect("it begins");
        double.fill(handle, 0, short, &[9; 8]);
        double.fill(handle, 0, long, &[9; 100]);
        // Everything runs, also what need not run before the load.
        double.drain();
        assert!(load.is_complete().expect("it came"));
        // SAFETY: the load is complete.
        let [one, two] = [(0, 8), (1, 100)]
            .map(|(part, len)| unsafe { std::slice::from_raw_parts(load.part(part), len) }.to_vec());
        let mut wrong = Vec::new();
        if one != [1; 8] || two != [2; 100] {
            wrong.push("loaded something else".to_owned());
        }
        drop(load);
        double.fill(handle, 0, back, &[7; 108]);
        double.expect(handle, 0, back, &[7; 108], "written before");
        // SAFETY: the double keeps its memory.
        unsafe { store(&stream, &[(&[3; 8], back), (&[4; 100], back + 8)]) }.expect("it is given");
        double.expect(handle, 0, back, &[3; 8], "the first part");
        double.expect(handle, 0, back + 8, &[4; 100], "the second part");
        double.fill(handle, 0, back, &[8; 108]);
        double.drain();
        if double.peek(back, 108) != [8; 108] {
            wrong.push("stored too late".to_owned());
        }
        wrong.extend(double.complaints());
        wrong
    }

    /// The caller's stream and two side streams.
    const STREAMS: usize = 3;

    #[test]
    fn transfers_keep_the_order_of_the_stream() {
        for order in Order::all(STREAMS) {
            assert_eq!(there_and_back(order, None), Vec::<String>::new(), "{order:?}");
        }
    }

    #[test]
    fn every_wait_of_a_transfer_is_needed() {
        // Into the load, out of it, into the store, out of it.
        for ignored in 0..4 {
            let found = Order::all(STREAMS).into_iter().any(|order| {
                // A wrong order may also be one in which the host waits for ever, or a copy of freed memory.
                !there_and_back(order, Some(ignored)).is_empty()
            });
            assert!(found, "no order shows that wait {ignored} is missing");
        }
    }

    #[test]
    fn a_load_that_is_dropped_lets_its_stream_go_on() {
        for order in Order::all(STREAMS) {
            let double = Double::new(1, order);
            let devices = Devices::over(double.clone()).expect("a driver");
            let handle = double.stream(0);
            // SAFETY: the double trusts no handles.
            let stream = unsafe { Stream::borrow(&devices, 0, handle) }.expect("a stream");
            let memory = double.memory(0, 64);
            // SAFETY: the double keeps its memory.
            drop(unsafe { Load::begin(&stream, &[(memory, 64)], true, None) }.expect("it begins"));
            double.fill(handle, 0, memory, &[5; 64]);
            double.drain();
            assert_eq!(double.complaints(), Vec::<String>::new(), "{order:?}");
            assert_eq!(double.peek(memory, 64), [5; 64]);
        }
    }

    #[test]
    fn whichever_call_of_the_driver_fails_nothing_is_left_to_go_wrong() {
        for failing in 0..60 {
            let double = Double::new(1, Order::RoundRobin);
            let devices = Devices::over(double.clone()).expect("a driver");
            let handle = double.stream(0);
            // SAFETY: the double trusts no handles.
            let stream = unsafe { Stream::borrow(&devices, 0, handle) }.expect("a stream");
            let memory = double.memory(0, 64);
            double.fail_call(failing);
            // SAFETY: the double keeps its memory.
            let failed = unsafe {
                Load::begin(&stream, &[(memory, 64)], true, None)
                    .map(drop)
                    .and_then(|()| store(&stream, &[(&[1; 64], memory)]))
            };
            double.drain();
            let complaints = double.complaints();
            assert_eq!(complaints, Vec::<String>::new(), "call {failing} failed: {failed:?}");
        }
    }
}
