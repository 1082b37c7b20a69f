//! What only measuring needs of the driver: events with timing, graphs, how much memory is free. The library
//! itself never captures and never asks for times, so these are no part of [`crate::cuda::driver::Driver`].

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Libcuda, raw};
use crate::cuda::context::Devices;
use crate::cuda::driver::{EventHandle, StreamCalls};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};

/// An event with timing, of one device.
#[derive(Debug)]
pub struct TimedEvent {
    devices: Arc<Devices>,
    cuda: Arc<Libcuda>,
    device: u32,
    handle: EventHandle,
}

impl TimedEvent {
    /// An event to be recorded on streams of `device`.
    pub fn new(devices: &Arc<Devices>, device: u32) -> Result<TimedEvent> {
        let cuda = Libcuda::open()?;
        let _entered = devices.enter(device)?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint;
        // SAFETY: fills `event`.
        cuda.check("cuEventCreate", unsafe { (cuda.calls.cuEventCreate)(&raw mut event, flags) })?;
        let handle = EventHandle(event.expose_provenance());
        Ok(TimedEvent { devices: devices.clone(), cuda, device, handle })
    }

    /// From now on it means what `stream`, of its device, has been given so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live.
        unsafe { self.cuda.record_event(self.handle, stream.handle()) }
    }

    /// Has `stream`, of any device, wait for it.
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        let _entered = self.devices.enter(stream.device())?;
        // SAFETY: both live.
        unsafe { self.cuda.wait_event(stream.handle(), self.handle) }
    }

    /// Waits on the host until what it means is complete. It asks again and again: a sleep would be measured,
    /// too.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: it lives.
        while !unsafe { self.cuda.query_event(self.handle) }? {
            if deadline.expired() {
                fail!(Timeout, "device {} has not finished what it was given; raise --timeout", self.device);
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Microseconds from `start` to this. Both are complete, and of one device.
    pub fn since(&self, start: &TimedEvent) -> Result<f64> {
        let _entered = self.devices.enter(self.device)?;
        let mut milliseconds = 0.0;
        // SAFETY: both live; fills the number.
        let result = unsafe {
            (self.cuda.calls.cuEventElapsedTime)(
                &raw mut milliseconds,
                raw(start.handle.0),
                raw(self.handle.0),
            )
        };
        self.cuda.check("cuEventElapsedTime", result)?;
        Ok(f64::from(milliseconds) * 1000.0)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it after this.
        if let Err(error) = unsafe { self.cuda.destroy_event(self.handle) } {
            log::warn!("{error}");
        }
    }
}

/// What a stream was given while it was captured, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    devices: Arc<Devices>,
    cuda: Arc<Libcuda>,
    device: u32,
    executable: usize,
}

impl Graph {
    /// Captures what `record` gives to `stream`, in this thread's mode. The capture ends also when `record`
    /// fails.
    pub fn capture(
        devices: &Arc<Devices>,
        stream: &Stream,
        record: impl FnOnce() -> Result<()>,
    ) -> Result<Graph> {
        let cuda = Libcuda::open()?;
        let _entered = devices.enter(stream.device())?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
        // SAFETY: the stream lives.
        let begun = unsafe { (cuda.calls.cuStreamBeginCapture_v2)(raw(stream.handle().0), mode) };
        cuda.check("cuStreamBeginCapture", begun)?;
        let recorded = record();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives and is captured, by this thread; fills `graph`.
        let ended = unsafe { (cuda.calls.cuStreamEndCapture)(raw(stream.handle().0), &raw mut graph) };
        let ended = cuda.check("cuStreamEndCapture", ended);
        let instantiated = recorded.and(ended).and_then(|()| cuda.instantiate(graph));
        if !graph.is_null() {
            // SAFETY: ours; what was instantiated is a copy.
            cuda.check("cuGraphDestroy", unsafe { (cuda.calls.cuGraphDestroy)(graph) })?;
        }
        let executable = instantiated?;
        Ok(Graph { devices: devices.clone(), cuda, device: stream.device(), executable })
    }

    /// Gives everything captured to `stream`, of the same device.
    ///
    /// # Safety
    /// What the captured calls touch is still there, and nobody races with the stream for it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live; the caller's promise.
        let result = unsafe { (self.cuda.calls.cuGraphLaunch)(raw(self.executable), raw(stream.handle().0)) };
        self.cuda.check("cuGraphLaunch", result)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it after this.
        let result = unsafe { (self.cuda.calls.cuGraphExecDestroy)(raw(self.executable)) };
        if let Err(error) = self.cuda.check("cuGraphExecDestroy", result) {
            log::warn!("{error}");
        }
    }
}

impl Libcuda {
    /// Bytes of `device` that nobody has allocated.
    pub fn free_memory(&self, devices: &Devices, device: u32) -> Result<u64> {
        let _entered = devices.enter(device)?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: fills both.
        let result: c_int = unsafe { (self.calls.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", result)?;
        Ok(free as u64)
    }

    fn instantiate(&self, graph: sys::CUgraph) -> Result<usize> {
        let mut executable = std::ptr::null_mut();
        // SAFETY: a graph that lives; fills `executable`.
        let result = unsafe { (self.calls.cuGraphInstantiateWithFlags)(&raw mut executable, graph, 0) };
        self.check("cuGraphInstantiate", result)?;
        Ok(executable.expose_provenance())
    }
}
