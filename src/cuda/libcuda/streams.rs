//! Streams, events, and what streams wait for.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys;

use super::{Libcuda, raw};
use crate::cuda::driver::{
    Capture, CaptureMode, ContextHandle, EventHandle, GraphNode, GraphRecord, Priority, StreamCalls,
    StreamHandle,
};
use crate::error::{Result, fail};

impl Libcuda {
    /// The graph that a stream is captured into, and what the stream was given last there.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn captured(&self, stream: StreamHandle) -> Result<(sys::CUgraph, Vec<sys::CUgraphNode>)> {
        let (mut status, mut id, mut graph) = (0 as c_uint, 0u64, std::ptr::null_mut());
        let (mut last, mut count) = (std::ptr::null(), 0);
        // SAFETY: the caller's promise; fills the outputs.
        let result = unsafe {
            (self.calls.cuStreamGetCaptureInfo_v2)(
                raw(stream.0),
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut last,
                &raw mut count,
            )
        };
        self.check("cuStreamGetCaptureInfo", result)?;
        if status != 1 || last.is_null() {
            fail!(Cuda, "the stream is not being captured, or its capture has failed");
        }
        // SAFETY: as many nodes, until the stream is given something.
        Ok((graph, unsafe { std::slice::from_raw_parts(last, count) }.to_vec()))
    }
}

fn numbers(nodes: &[sys::CUgraphNode]) -> Vec<GraphNode> {
    nodes.iter().map(|node| GraphNode(node.expose_provenance())).collect()
}

impl StreamCalls for Libcuda {
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        use sys::CUstreamCaptureMode as Mode;
        let mut number = match mode {
            CaptureMode::Global => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        } as c_uint;
        // SAFETY: reads and fills `number`.
        let result = unsafe { (self.calls.cuThreadExchangeStreamCaptureMode)(&raw mut number) };
        self.check("cuThreadExchangeStreamCaptureMode", result)?;
        match number {
            0 => Ok(CaptureMode::Global),
            1 => Ok(CaptureMode::ThreadLocal),
            2 => Ok(CaptureMode::Relaxed),
            _ => fail!(Cuda, "cuThreadExchangeStreamCaptureMode answered {number}, a mode we do not know"),
        }
    }

    fn create_stream(&self, blocking: bool, priority: Priority) -> Result<StreamHandle> {
        use sys::CUstream_flags as Flags;
        let flags = if blocking { Flags::CU_STREAM_DEFAULT } else { Flags::CU_STREAM_NON_BLOCKING } as c_uint;
        // The smaller, the higher. Streams are ordinary at 0.
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: fills both.
        let result = unsafe { (self.calls.cuCtxGetStreamPriorityRange)(&raw mut lowest, &raw mut highest) };
        self.check("cuCtxGetStreamPriorityRange", result)?;
        let priority = match priority {
            Priority::Ordinary => 0,
            Priority::High => highest.saturating_add(1).min(0),
            Priority::Highest => highest,
        };
        let mut stream = std::ptr::null_mut();
        // SAFETY: fills `stream`.
        let result = unsafe { (self.calls.cuStreamCreateWithPriority)(&raw mut stream, flags, priority) };
        self.check("cuStreamCreateWithPriority", result)?;
        Ok(StreamHandle(stream.expose_provenance()))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuStreamDestroy", unsafe { (self.calls.cuStreamDestroy_v2)(raw(stream.0)) })
    }

    unsafe fn stream_context(&self, stream: StreamHandle) -> Result<ContextHandle> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; fills `context`.
        let result = unsafe { (self.calls.cuStreamGetCtx)(raw(stream.0), &raw mut context) };
        self.check("cuStreamGetCtx", result)?;
        Ok(ContextHandle(context.expose_provenance()))
    }

    unsafe fn is_green(&self, stream: StreamHandle) -> Result<bool> {
        let Some(ask) = self.green_context else { return Ok(false) };
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; fills `context`.
        self.check("cuStreamGetGreenCtx", unsafe { ask(raw(stream.0), &raw mut context) })?;
        Ok(!context.is_null())
    }

    unsafe fn stream_id(&self, stream: StreamHandle) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the caller's promise; fills `id`.
        self.check("cuStreamGetId", unsafe { (self.calls.cuStreamGetId)(raw(stream.0), &raw mut id) })?;
        Ok(id)
    }

    unsafe fn query_stream(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamQuery)(raw(stream.0)) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.check("cuStreamQuery", result)?;
        Ok(true)
    }

    unsafe fn stream_capture(&self, stream: StreamHandle) -> Result<Capture> {
        let (mut status, mut id) = (0 as c_uint, 0u64);
        let none = std::ptr::null_mut;
        // SAFETY: the caller's promise; fills `status` and `id`, and the outputs that are NULL may be.
        let result = unsafe {
            (self.calls.cuStreamGetCaptureInfo_v2)(
                raw(stream.0),
                &raw mut status,
                &raw mut id,
                none(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuStreamGetCaptureInfo", result)?;
        Ok(match status {
            0 => Capture::None,
            1 => Capture::Active(id),
            _ => Capture::Invalidated,
        })
    }

    fn create_event(&self) -> Result<EventHandle> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let mut event = std::ptr::null_mut();
        // SAFETY: fills `event`.
        self.check("cuEventCreate", unsafe { (self.calls.cuEventCreate)(&raw mut event, flags) })?;
        Ok(EventHandle(event.expose_provenance()))
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventDestroy", unsafe { (self.calls.cuEventDestroy_v2)(raw(event.0)) })
    }

    unsafe fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventRecord", unsafe { (self.calls.cuEventRecord)(raw(event.0), raw(stream.0)) })
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamWaitEvent)(raw(stream.0), raw(event.0), 0) };
        self.check("cuStreamWaitEvent", result)
    }

    unsafe fn wait_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as c_uint;
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamWaitEvent)(raw(stream.0), raw(event.0), flags) };
        self.check("cuStreamWaitEvent", result)
    }

    unsafe fn record_event_at_launch(&self, stream: StreamHandle, event: EventHandle) -> Result<GraphRecord> {
        // SAFETY: the caller's promise.
        let (graph, last) = unsafe { self.captured(stream) }?;
        let mut node = std::ptr::null_mut();
        // SAFETY: fills `node`; the graph and its nodes are of the capture, which is under way.
        let result = unsafe {
            (self.calls.cuGraphAddEventRecordNode)(
                &raw mut node,
                graph,
                last.as_ptr(),
                last.len(),
                raw(event.0),
            )
        };
        self.check("cuGraphAddEventRecordNode", result)?;
        Ok(GraphRecord { node: GraphNode(node.expose_provenance()), behind: numbers(&last) })
    }

    unsafe fn put_off(&self, stream: StreamHandle, record: &mut GraphRecord) -> Result<()> {
        // SAFETY: the caller's promise.
        let (graph, last) = unsafe { self.captured(stream) }?;
        let (added, removed) = record.move_behind(numbers(&last));
        let raw_nodes = |nodes: &[GraphNode]| nodes.iter().map(|node| raw(node.0)).collect::<Vec<_>>();
        if !added.is_empty() {
            let (from, to) = (raw_nodes(&added), vec![raw(record.node.0); added.len()]);
            // SAFETY: as many of both; all are of the capture, which is under way.
            let result =
                unsafe { (self.calls.cuGraphAddDependencies)(graph, from.as_ptr(), to.as_ptr(), from.len()) };
            self.check("cuGraphAddDependencies", result)?;
        }
        if !removed.is_empty() {
            let (from, to) = (raw_nodes(&removed), vec![raw(record.node.0); removed.len()]);
            // SAFETY: likewise; these edges have been added.
            let result = unsafe {
                (self.calls.cuGraphRemoveDependencies)(graph, from.as_ptr(), to.as_ptr(), from.len())
            };
            if result != sys::CUresult::CUDA_SUCCESS as c_int {
                // As in graphs that allocate or free. An edge too many does no harm.
                record.behind.extend(removed);
            }
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuEventQuery)(raw(event.0)) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY as c_int {
            return Ok(false);
        }
        self.check("cuEventQuery", result)?;
        Ok(true)
    }

    unsafe fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        self.check("cuEventSynchronize", unsafe { (self.calls.cuEventSynchronize)(raw(event.0)) })
    }

    unsafe fn write_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        // SAFETY: the caller's promise. Flag 0 keeps the order with everything before it.
        let result = unsafe { (self.calls.cuStreamWriteValue32_v2)(raw(stream.0), address, value, 0) };
        self.check("cuStreamWriteValue32", result)
    }

    unsafe fn wait_value(&self, stream: StreamHandle, address: u64, value: u32) -> Result<()> {
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        // SAFETY: the caller's promise.
        let result = unsafe { (self.calls.cuStreamWaitValue32_v2)(raw(stream.0), address, value, flags) };
        self.check("cuStreamWaitValue32", result)
    }
}
