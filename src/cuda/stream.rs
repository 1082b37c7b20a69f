//! Streams: queues of work of one device, the caller's or our own.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread::ThreadId;

use super::context::Devices;
use super::driver::{Capture, GraphRecord, HostFunction, Priority, StreamHandle};
use super::event::Event;
use super::word::Word;
use crate::deadline::Deadline;
use crate::error::{Result, fail};

/// What tells a stream from the others of its device. Handles come back after a destroy, also while the
/// stream that had them still does what it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamName {
    /// The legacy default stream.
    Legacy,
    /// The default stream of this thread.
    OfThread(ThreadId),
    /// The one of this number, which the driver never uses again.
    Number(u64),
    /// One that is being captured, or of which the driver does not tell that.
    Unknown(StreamHandle),
}

impl StreamName {
    /// That of a stream of `device`.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn of(devices: &Devices, device: u32, handle: StreamHandle) -> StreamName {
        // SAFETY: the caller's promise. To ask a stream that is being captured for its number ends that.
        let number = || unsafe {
            match devices.driver().stream_capture(handle)? {
                Capture::None => devices.driver().stream_id(handle).map(Some),
                _ => Ok(None),
            }
        };
        match handle {
            StreamHandle::PER_THREAD => StreamName::OfThread(std::thread::current().id()),
            _ if handle.is_legacy() => StreamName::Legacy,
            // A thread without a context may have to have one.
            _ => number()
                .or_else(|_| devices.enter(device).and_then(|_entered| number()))
                .ok()
                .flatten()
                .map_or(StreamName::Unknown(handle), StreamName::Number),
        }
    }
}

/// A stream of one device. An owned one is destroyed on drop; a borrowed one stays its owner's.
///
/// The methods that enqueue return at once. They are unsafe where the stream will touch memory: that stays
/// valid, and nobody races with the stream for its contents, until the stream has done it.
#[derive(Debug)]
pub struct Stream {
    devices: Arc<Devices>,
    device: u32,
    handle: StreamHandle,
    owned: bool,
}

impl Stream {
    /// A stream of our own. `blocking`: it waits for what the legacy default stream was given before, and the
    /// legacy stream for it, as for any stream that a plain program makes.
    pub fn new(devices: &Arc<Devices>, device: u32, blocking: bool) -> Result<Stream> {
        Stream::with_priority(devices, device, blocking, Priority::Ordinary)
    }

    /// [`Stream::new`] with a priority.
    pub fn with_priority(
        devices: &Arc<Devices>,
        device: u32,
        blocking: bool,
        priority: Priority,
    ) -> Result<Stream> {
        let handle = {
            let _relaxed = devices.relax()?;
            let _entered = devices.enter(device)?;
            devices.driver().create_stream(blocking, priority)?
        };
        Ok(Stream { devices: devices.clone(), device, handle, owned: true })
    }

    /// The caller's stream, which is on `device`, of its primary context. A default stream's handle means the
    /// default stream of `device`.
    ///
    /// # Safety
    /// It is a stream, and lives until this is dropped.
    pub unsafe fn borrow(devices: &Arc<Devices>, device: u32, handle: StreamHandle) -> Result<Stream> {
        if handle.is_default() {
            devices.check_default_stream(device)?;
        } else {
            let found = devices.device_of_stream(handle)?;
            if found != device {
                fail!(InvalidArgument, "the memory is on device {device}, but its stream on device {found}");
            }
        }
        // A context now rather than at the first use, which may be in a capture.
        devices.context(device)?;
        Ok(Stream { devices: devices.clone(), device, handle, owned: false })
    }

    /// The devices that it is of.
    pub fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    /// Its device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Its handle, valid for as long as this lives.
    pub fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Whether both are the same queue of work.
    pub fn is(&self, other: &Stream) -> bool {
        let handle = |stream: &Stream| match stream.handle {
            StreamHandle::NULL => StreamHandle::LEGACY,
            handle => handle,
        };
        handle(self) == handle(other) && self.device == other.device
    }

    /// Whether it is being captured. The legacy default stream never is.
    pub fn capture(&self) -> Result<Capture> {
        if self.handle.is_legacy() {
            return Ok(Capture::None);
        }
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: it lives.
        unsafe { self.devices.driver().stream_capture(self.handle) }
    }

    /// Refuses a stream that is being captured: `name` is the argument that it was given as, `why` what
    /// stands against it.
    pub fn refuse_capture(&self, name: &str, why: &str) -> Result<()> {
        match self.capture()? {
            Capture::None => Ok(()),
            Capture::Active(_) | Capture::Invalidated => {
                fail!(InvalidUsage, "{name} is being captured: {why}")
            }
        }
    }

    /// What it is given after this waits until `word` is released.
    pub fn wait_word(&self, word: &Word) -> Result<()> {
        // SAFETY: the word's page lives as long as the devices, and a use ends with its release.
        unsafe { self.wait_value(word.address(), word.value()) }
    }

    /// Releases `word` after everything before it.
    pub fn release_word(&self, word: &Word) -> Result<()> {
        word.give();
        // SAFETY: as above.
        unsafe { self.write_value(word.address(), word.value()) }
    }

    /// What it is given after this waits for what `event` means now.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live.
        unsafe { self.devices.driver().wait_event(self.handle, event.handle()) }
    }

    /// While it is captured: what it is given after this waits, in each replay, for what `event` means as the
    /// graph is launched.
    pub fn wait_at_launch(&self, event: &Event) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live.
        unsafe { self.devices.driver().wait_event_at_launch(self.handle, event.handle()) }
    }

    /// While it is captured: from each launch of the graph on, `event` means what the stream has been given
    /// so far in it. The node that does so is valid until the capture ends.
    pub fn record_at_launch(&self, event: &Event) -> Result<GraphRecord> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: both live.
        unsafe { self.devices.driver().record_event_at_launch(self.handle, event.handle()) }
    }

    /// While it is captured: a record of the same capture comes right behind what this stream has been given
    /// so far, which has to come behind what it came right behind until now.
    pub fn put_off(&self, record: &mut GraphRecord) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: it lives.
        unsafe { self.devices.driver().put_off(self.handle, record) }
    }

    /// Whether it has done everything that it has been given. Not while it is captured.
    pub fn query(&self) -> Result<bool> {
        let _relaxed = self.devices.relax()?;
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: it lives.
        unsafe { self.devices.driver().query_stream(self.handle) }
    }

    /// Waits on the host until it has done everything that it has been given.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        let event = Event::new(&self.devices, self.device)?;
        event.record(self)?;
        event.synchronize(deadline)
    }

    /// Copies from pinned host memory to its device.
    ///
    /// # Safety
    /// As the type says.
    pub unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().copy_to_device(to, from, bytes, self.handle) }
    }

    /// Copies from its device to pinned host memory.
    ///
    /// # Safety
    /// As the type says.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().copy_to_host(to, from, bytes, self.handle) }
    }

    /// While it is captured: copies within pinned host memory.
    ///
    /// # Safety
    /// As the type says.
    pub unsafe fn copy_on_host(&self, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().copy_on_host(to, from, bytes, self.handle) }
    }

    /// Copies from its device to the same or another, directly where [`Devices::reaches`] has made that
    /// possible.
    ///
    /// # Safety
    /// As the type says.
    pub unsafe fn copy_to_peer(&self, to: u64, device: u32, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_between((to, device), (from, self.device), bytes) }
    }

    /// Copies to its device from the same or another, as [`Stream::copy_to_peer`].
    ///
    /// # Safety
    /// As the type says.
    pub unsafe fn copy_from_peer(&self, to: u64, from: u64, device: u32, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_between((to, self.device), (from, device), bytes) }
    }

    /// Copies to memory of a device from memory of the same or another.
    ///
    /// # Safety
    /// As the type says.
    unsafe fn copy_between(
        &self,
        (to, into): (u64, u32),
        (from, of): (u64, u32),
        bytes: usize,
    ) -> Result<()> {
        let (target, source) = (self.devices.context(into)?, self.devices.context(of)?);
        let _entered = self.devices.enter(self.device)?;
        let driver = self.devices.driver();
        // SAFETY: the caller's promise; the contexts are retained.
        unsafe {
            if target == source {
                driver.copy_on_device(to, from, bytes, self.handle)
            } else {
                driver.copy_to_peer((to, target), (from, source), bytes, self.handle)
            }
        }
    }

    /// Writes a 32-bit value to device memory, or to pinned host memory, after everything before it.
    ///
    /// # Safety
    /// As the type says; `address` is a multiple of 4.
    pub unsafe fn write_value(&self, address: u64, value: u32) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().write_value(self.handle, address, value) }
    }

    /// Waits until the 32-bit value at `address` is `value` or further on, with wrap.
    ///
    /// # Safety
    /// As the type says; `address` is a multiple of 4, and somebody will write the value.
    pub unsafe fn wait_value(&self, address: u64, value: u32) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().wait_value(self.handle, address, value) }
    }

    /// Calls `function(user)` on a thread of the driver, after everything before it.
    ///
    /// # Safety
    /// As the type says; the function may be called with `user` on any thread, makes no CUDA calls, does not
    /// unwind.
    pub unsafe fn launch_host(&self, function: HostFunction, user: *mut c_void) -> Result<()> {
        let _entered = self.devices.enter(self.device)?;
        // SAFETY: the caller's promise.
        unsafe { self.devices.driver().launch_host(self.handle, function, user) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: ours, and nobody uses it after this.
            if let Err(error) = unsafe { self.devices.driver().destroy_stream(self.handle) } {
                log::warn!("{error}");
            }
        }
    }
}
