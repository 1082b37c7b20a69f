//! Copies by themselves, on a caller's stream: from its device to pinned memory of the library, and back.
//! They need no side stream, since what the stream is given next is to wait for them anyway.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use super::resources::{self, PinnedLane};
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::endpoint::Endpoint;
use crate::engine::joint::{Team, share};
use crate::error::{Result, fail};

/// Parts of a transfer begin at multiples of this many bytes of the pinned memory.
const ALIGNMENT: usize = 64;

/// Device memory on its way to the host. Dropping it is fine at any time: the pinned memory is used again
/// when the copies are done.
#[derive(Debug)]
pub struct Load(Transfer);

impl Load {
    /// Gives `stream` the copies of `parts`, addresses and lengths, and has whoever moves the operations of
    /// `endpoint` look for their end.
    ///
    /// # Safety
    /// The parts are memory of the stream's device, and nobody writes to it until what the stream is given
    /// next.
    pub unsafe fn begin(
        stream: &Stream,
        parts: &[(u64, usize)],
        endpoint: Option<&Arc<Endpoint>>,
    ) -> Result<Load> {
        let mut transfer = Transfer::new(stream, parts.iter().map(|(_, bytes)| *bytes))?;
        for ((from, bytes), range) in parts.iter().zip(&transfer.parts) {
            let to = transfer.lane().address().wrapping_add(range.start);
            // SAFETY: the caller's promise; the lane has room for the part, and is this transfer's.
            unsafe { stream.copy_to_host(to, *from, *bytes) }?;
        }
        transfer.given(stream)?;
        if let Some(endpoint) = endpoint {
            endpoint.stir();
        }
        Ok(Load(transfer))
    }

    /// Whether the bytes are there.
    pub fn is_complete(&self) -> Result<bool> {
        let complete = self.0.behind()?.query()?;
        self.0.ended.set(complete);
        Ok(complete)
    }

    /// Waits until the bytes are there.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.0.behind()?.synchronize(deadline)
    }

    /// Where a part lies in pinned memory: as long as it was, aligned to 64 bytes. Its bytes are there once
    /// the load is complete.
    pub fn part(&self, index: usize) -> *const u8 {
        self.0.lane().address().wrapping_add(self.0.parts[index].start).cast_const()
    }
}

/// Bytes that a stream is given at once, while the next are copied; and those that a thread copies at a time.
const PIECE: usize = 4 * 1024 * 1024;
const PORTION: usize = 128 * 1024;

/// Copies host memory to the device of `stream`, in its order: `parts` are the bytes, which have been read by
/// `team` when this returns, and where they go.
///
/// # Safety
/// The destinations are memory of the stream's device that nobody else touches, until what the stream is
/// given next.
pub unsafe fn store(stream: &Stream, parts: &[(&[u8], u64)], team: &dyn Team) -> Result<()> {
    let mut transfer = Transfer::new(stream, parts.iter().map(|(bytes, _)| bytes.len()))?;
    for ((bytes, to), range) in parts.iter().zip(&transfer.parts) {
        let room = transfer.lane().address().wrapping_add(range.start);
        // SAFETY: the lane has room for the part, is this transfer's, and its memory is zeros or what calls
        // left.
        let room = unsafe { std::slice::from_raw_parts_mut(room, bytes.len()) };
        for (to, (from, room)) in (*to..).step_by(PIECE).zip(bytes.chunks(PIECE).zip(room.chunks_mut(PIECE)))
        {
            let portions = from.chunks(PORTION).zip(room.chunks_mut(PORTION)).collect();
            share(team, portions, |(from, room)| {
                room.copy_from_slice(from);
                Ok(())
            })?;
            // SAFETY: the caller's promise; nobody writes to the lane before the copy is done.
            unsafe { stream.copy_to_device(to, room.as_ptr(), room.len()) }?;
        }
    }
    transfer.given(stream)
}

/// What copies go through. When it is dropped, they may still be under way.
#[derive(Debug)]
struct Transfer {
    /// Set until the drop.
    lane: Option<PinnedLane>,
    parts: Vec<Range<usize>>,
    /// Whether the lane's `stored` is behind all the copies.
    given: bool,
    /// Whether the copies are known to be done.
    ended: Cell<bool>,
}

impl Transfer {
    fn new(stream: &Stream, lengths: impl Iterator<Item = usize>) -> Result<Transfer> {
        let mut end = 0_usize;
        let parts = lengths
            .map(|bytes| {
                let start = end.next_multiple_of(ALIGNMENT);
                end = start + bytes;
                start..end
            })
            .collect();
        let lane = Some(PinnedLane::take(stream.devices(), stream.device(), end)?);
        Ok(Transfer { lane, parts, given: false, ended: Cell::new(false) })
    }

    /// The stream has been given all the copies.
    fn given(&mut self, stream: &Stream) -> Result<()> {
        self.lane().stored.record(stream)?;
        self.given = true;
        Ok(())
    }

    fn lane(&self) -> &PinnedLane {
        // PROOF: nothing but the drop takes it.
        self.lane.as_ref().expect("held until the drop")
    }

    fn behind(&self) -> Result<&Event> {
        if !self.given {
            fail!(Internal, "a transfer has no copies to wait for");
        }
        Ok(&self.lane().stored)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let Some(lane) = self.lane.take() else { return };
        if self.ended.get() {
            resources::give_back(vec![lane]);
        } else if self.given {
            resources::park(vec![lane]);
        } else {
            // A copy may be under way, and nothing tells when it ends.
            log::warn!("a copy that failed leaves its pinned memory behind");
            std::mem::forget(lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::double::{Double, Order};
    use crate::engine::joint::Alone;

    /// A part of so many bytes goes to the host and back to another place, while the caller's stream writes
    /// before and after. What went wrong.
    fn there_and_back(order: Order) -> Vec<String> {
        let double = Double::new(1, order);
        let devices = Devices::over(double.clone()).expect("a driver");
        let handle = double.stream(0);
        // SAFETY: the double trusts no handles.
        let stream = unsafe { Stream::borrow(&devices, 0, handle) }.expect("a stream");
        let (short, long, back) = (double.memory(0, 8), double.memory(0, 100), double.memory(0, 108));
        double.fill(handle, 0, short, &[1; 8]);
        double.fill(handle, 0, long, &[2; 100]);
        // SAFETY: the double keeps its memory.
        let load = unsafe { Load::begin(&stream, &[(short, 8), (long, 100)], None) }.expect("it begins");
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
        unsafe { store(&stream, &[(&[3; 8], back), (&[4; 100], back + 8)], &Alone) }.expect("it is given");
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

    /// The caller's stream.
    const STREAMS: usize = 1;

    #[test]
    fn transfers_keep_the_order_of_the_stream() {
        for order in Order::all(STREAMS) {
            assert_eq!(there_and_back(order), Vec::<String>::new(), "{order:?}");
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
            drop(unsafe { Load::begin(&stream, &[(memory, 64)], None) }.expect("it begins"));
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
                Load::begin(&stream, &[(memory, 64)], None)
                    .map(drop)
                    .and_then(|()| store(&stream, &[(&[1; 64], memory)], &Alone))
            };
            double.drain();
            let complaints = double.complaints();
            assert_eq!(complaints, Vec::<String>::new(), "call {failing} failed: {failed:?}");
        }
    }
}
