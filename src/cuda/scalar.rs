//! Scalars in device memory that the host reads: by pinned memory that is kept, since making some may wait
//! for all that the device was given, and so for a peer of another call.

use std::time::Instant;

use super::context::Devices;
use super::event::Event;
use super::polling;
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Error, Result, fail};

/// Bytes of the largest scalar.
pub const MOST_BYTES: usize = 8;

/// Bytes of a page of slots, which are a cache line apart: devices write them.
const PAGE: usize = 4096;
const STRIDE: usize = 64;

/// Where the scalars of all devices go.
#[derive(Default)]
pub(super) struct Slots {
    pages: Vec<usize>,
    free: Vec<usize>,
}

impl Slots {
    /// The pages, for whoever frees them.
    pub(super) fn pages(&mut self) -> Vec<usize> {
        self.free.clear();
        std::mem::take(&mut self.pages)
    }
}

impl Devices {
    /// Has pinned memory ready, so that reading scalars need not ask the driver for any, as long as no more
    /// than a few threads do at the same time. `device` is any that will use it.
    pub fn prepare_scalars(&self, device: u32) -> Result<()> {
        if self.slots().pages.is_empty() { self.add_slots(device) } else { Ok(()) }
    }

    /// One that nobody uses.
    fn take_slot(&self, device: u32) -> Result<usize> {
        loop {
            let free = self.slots().free.pop();
            match free {
                Some(slot) => return Ok(slot),
                None => self.add_slots(device)?,
            }
        }
    }

    fn add_slots(&self, device: u32) -> Result<()> {
        // Without the lock: it may wait for streams that wait for whoever lets go of a slot.
        let start = self.pinned_page(device, PAGE)?;
        let mut slots = self.slots();
        slots.pages.push(start);
        slots.free.extend((0..PAGE / STRIDE).map(|index| start + index * STRIDE));
        Ok(())
    }
}

impl Stream {
    /// The `bytes` bytes at `address` of its device's memory, at most [`MOST_BYTES`], as they are when it has
    /// come this far, and zeros. Waits for that until `deadline`, or until there is a `failure`: it is not in
    /// a capture.
    ///
    /// # Safety
    /// The memory is valid until the stream has come so far.
    pub unsafe fn read_scalar(
        &self,
        address: u64,
        bytes: usize,
        deadline: Deadline,
        failure: &dyn Fn() -> Option<Error>,
    ) -> Result<[u8; MOST_BYTES]> {
        let mut scalar = [0; MOST_BYTES];
        let Some(into) = scalar.get_mut(..bytes) else {
            fail!(InvalidArgument, "a scalar of {bytes} bytes; they have {MOST_BYTES} at most")
        };
        let slot = self.devices().take_slot(self.device())?;
        let place = std::ptr::with_exposed_provenance_mut::<u8>(slot);
        // SAFETY: the caller's promise; the slot has room for it, and is nobody else's until it is given
        // back, when the stream has come to the end of the copy. What fails before that keeps it from being
        // used again. Its page lives as long as the devices, which this holds.
        unsafe { self.copy_to_host(place, address, bytes) }?;
        self.come_so_far(deadline, failure)?;
        // SAFETY: the copy is complete, and the slot this thread's.
        into.copy_from_slice(unsafe { std::slice::from_raw_parts(place.cast_const(), bytes) });
        self.devices().slots().free.push(slot);
        Ok(scalar)
    }

    /// Waits until it has done what it was given.
    fn come_so_far(&self, deadline: Deadline, failure: &dyn Fn() -> Option<Error>) -> Result<()> {
        let event = Event::new(self.devices(), self.device())?;
        event.record(self)?;
        let start = Instant::now();
        while !event.query()? {
            if let Some(error) = failure() {
                return Err(error);
            }
            if deadline.expired() {
                return event.synchronize(deadline);
            }
            polling::pause(start, deadline);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::double::{Double, Order};
    use crate::cuda::memory::DeviceBuffer;

    #[test]
    fn scalars_are_read_in_the_order_of_the_stream_without_asking_for_memory() {
        for order in Order::all(2) {
            let double = Double::new(2, order);
            let devices = Devices::over(double.clone()).expect("a driver");
            let streams = [0, 1].map(|device| Stream::new(&devices, device, false).expect("a stream"));
            let buffers = [0, 1].map(|device| DeviceBuffer::new(&devices, device, 8).expect("memory"));
            devices.prepare_scalars(0).expect("pinned memory");
            let before = (double.creations(), double.allocated(0), double.allocated(1));
            for round in 0..200u8 {
                for (stream, buffer) in streams.iter().zip(&buffers) {
                    let _entered = devices.enter(stream.device()).expect("a device");
                    double.fill(stream.handle(), stream.device(), buffer.address(), &[round; 8]);
                    // SAFETY: the buffers are as long, and live until the streams are done.
                    let scalar = unsafe {
                        stream
                            .read_scalar(buffer.address(), usize::from(round % 9), Deadline::NEVER, &|| None)
                    };
                    let wanted =
                        std::array::from_fn(|at| if at < usize::from(round % 9) { round } else { 0 });
                    assert_eq!(scalar, Ok(wanted));
                }
            }
            devices.prepare_scalars(1).expect("it is there");
            // Each makes the event that it waits for, and no memory.
            let after = (double.creations() - 2 * 200, double.allocated(0), double.allocated(1));
            assert_eq!(after, before);
            // SAFETY: nothing is read.
            let too_long =
                unsafe { streams[0].read_scalar(buffers[0].address(), 9, Deadline::NEVER, &|| None) };
            assert!(too_long.is_err());
            drop((streams, buffers, devices));
            assert_eq!(double.complaints(), Vec::<String>::new());
        }
    }

    #[test]
    fn scalars_that_are_read_at_the_same_time_do_not_meet() {
        let double = Double::new(1, Order::RoundRobin);
        let devices = Devices::over(double.clone()).expect("a driver");
        std::thread::scope(|scope| {
            for thread in 0..PAGE / STRIDE + 8 {
                let (devices, double) = (&devices, &double);
                scope.spawn(move || {
                    let stream = Stream::new(devices, 0, false).expect("a stream");
                    let buffer = DeviceBuffer::new(devices, 0, 8).expect("memory");
                    let _entered = devices.enter(0).expect("a device");
                    for _ in 0..20 {
                        double.fill(stream.handle(), 0, buffer.address(), &[thread as u8; 8]);
                        // SAFETY: the buffer is as long, and lives until the stream is done.
                        let scalar =
                            unsafe { stream.read_scalar(buffer.address(), 8, Deadline::NEVER, &|| None) };
                        assert_eq!(scalar, Ok([thread as u8; 8]));
                    }
                });
            }
        });
        assert_eq!(double.complaints(), Vec::<String>::new());
    }
}
