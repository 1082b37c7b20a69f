//! Calls of a group of one: copies, on the host at once, or in the order of a stream.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::calls::widen;
use super::context::Context;
use super::finishing::spread;
use super::staged::{StagedCall, What};
use super::survey::Survey;
use super::work::Work;
use super::{Call, Completion};
use crate::collective::checked::Checked;
use crate::collective::request::Request;
use crate::cuda::event::Event;
use crate::cuda::local::{Fold, Kernels, Operand};
use crate::cuda::memory::RegisteredBuffer;
use crate::cuda::polling;
use crate::deadline::Deadline;
use crate::engine::device::GRACE_PERIOD;
use crate::engine::staged::Place;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{Operator, Reducer, Representation};

impl Context {
    /// A group of one: the result is the input. On the stream, which may be in capture; without one it is
    /// there on return.
    ///
    /// # Safety
    /// As [`Context::start`].
    pub(super) unsafe fn alone_staged(
        &self,
        call: &StagedCall,
        request: &Request,
        options: &Call,
    ) -> Result<Work> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let (survey, What::Collective(checked)) = (&call.survey, &call.what) else {
            fail!(InvalidUsage, "a group of one has nobody to exchange messages with");
        };
        if let Some(operator) = checked.operator {
            // Refuses what larger groups refuse.
            Reducer::new(checked.dtype, operator, 1)?;
        }
        self.check_algorithm(request, options)?;
        let bytes = survey.output_bytes;
        let factor = match request.operator {
            Operator::PreMulSum(factor) if checked.operator.is_some() => Some(factor),
            _ => None,
        };
        let scaler = match factor {
            Some(factor) if bytes > 0 => self.scaler(survey, checked, factor, options.max_blocks),
            _ => None,
        };
        if survey.captured && bytes > 0 && (factor.is_some() && scaler.is_none() || !survey.on_device) {
            // A graph may run it any number of times, and the host once. Where all is to be the device's,
            // what is the host's is pinned, and the driver copies it.
            let why = "what the processors do for a group of one, scaling and copies of host memory, cannot be captured";
            survey.stream.refuse_capture("call->stream", why)?;
        }
        // Before anything is given to the stream: what fails behind that leaves the caller's memory in use.
        let event = if survey.captured { None } else { Some(Event::new(&survey.devices, survey.device)?) };
        let is_scaled_here = factor.is_some() && scaler.is_none();
        let timeout = options.timeout.unwrap_or(self.timeout());
        if let Some(event) = &event
            && (!survey.ordered || bytes > 0 && is_scaled_here)
        {
            self.come_to(event, survey, Deadline::after(timeout))?;
        }
        // What was given cannot be taken back: it has the time once more.
        let patience = Deadline::after(timeout);
        // SAFETY: the caller's promise; input and output have the same length in a group of one.
        unsafe {
            match (factor, &scaler) {
                _ if bytes == 0 => {}
                (None, _) => copy(survey, bytes)?,
                (Some(_), Some(scaler)) => scaler.give(survey, checked)?,
                (Some(_), None) => {
                    scale(survey, checked, request, patience)
                        .map_err(|error| self.unfinished(survey, error))?;
                }
            }
        }
        let Some(event) = event else {
            // It is done whenever its graph is replayed.
            return Ok(Work::ended(Ok(Completion::default())));
        };
        if let Err(error) = event.record(&survey.stream) {
            // The caller has its memory back when this returns.
            let _ = survey.stream.synchronize(Deadline::after(self.timeout()));
            return Err(error);
        }
        let event = Arc::new(event);
        let (context, in_use, ordered) = (self.clone(), InUse::of(survey, bytes), survey.ordered);
        let device = survey.device;
        let work = Work::enqueued(None, event, move |done| match context.failure() {
            Some(error) => in_use.told(error, done),
            // Whose stream is the default one waits below.
            None => (ordered && !done && patience.expired()).then(|| context.late_alone(device, timeout)),
        });
        if !survey.ordered
            && let Err(error) = work.wait(patience)
        {
            match work.peek() {
                None => return Err(self.unfinished(survey, error)),
                // It was through just then.
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    // The context may have failed before the stream has come to it.
                    let _ = survey.stream.synchronize(Deadline::after(self.timeout()));
                    return Err(error);
                }
            }
        }
        Ok(work)
    }

    /// What a work ends with whose stream is not through with it after `timeout`.
    fn late_alone(&self, device: u32, timeout: Duration) -> Error {
        let text = format!(
            "call->stream of GPU {device} is not through with a call of '{}' after {:.1} s, and has its memory in use until then. \
             Raise timeout_ms, or look at what it was given before",
            self.name(),
            timeout.as_secs_f64()
        );
        Error::new(Status::Timeout, text)
    }

    /// What a call's own work on its device ends with that is not through at its deadline; other errors as
    /// they are.
    fn unfinished(&self, survey: &Survey, error: Error) -> Error {
        if error.status() != Status::Timeout {
            return error;
        }
        let text = format!(
            "GPU {} has begun a call of '{}' and does not end it: its memory is in use until {} has done what it was given. \
             Raise timeout_ms, or look at what runs on that GPU",
            survey.device,
            self.name(),
            stream_of(survey)
        );
        Error::new(Status::Timeout, text)
    }

    /// Waits until the call's stream has come to it. This thread is to wait for what it gives the stream, and
    /// nothing says that what the stream was given before ever ends; beyond the deadline the call has touched
    /// nothing. What other threads give the default stream in between has no such bound.
    fn come_to(&self, event: &Event, survey: &Survey, deadline: Deadline) -> Result<()> {
        event.record(&survey.stream)?;
        let start = Instant::now();
        while !event.query()? {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            if deadline.expired() {
                let stream = stream_of(survey);
                fail!(
                    Timeout,
                    "{stream} of GPU {} has not come to a call of '{}' after {:.1} s: what it was given before does not end. Raise \
                     timeout_ms, or look at that",
                    survey.device,
                    self.name(),
                    start.elapsed().as_secs_f64()
                );
            }
            polling::pause(start, deadline);
        }
        Ok(())
    }

    /// What scales the call's input on its device; `None`: the host does. Loads kernels the first time.
    fn scaler(&self, survey: &Survey, checked: &Checked, factor: f64, max_blocks: u32) -> Option<Scaler> {
        let (Place::Device(from), Place::Device(to)) = survey.places() else { return None };
        if !(from | to).is_multiple_of(checked.dtype.size() as u64) {
            return None;
        }
        let kernels = self.copier(&survey.devices, survey.device, max_blocks)?;
        let operator = Operator::PreMulSum(factor);
        let prepared = kernels.prepare(&survey.devices, survey.device, checked.dtype, operator);
        prepared.is_ok().then_some(Scaler { kernels, factor, from, to })
    }
}

/// What a call's stream is called.
fn stream_of(survey: &Survey) -> &'static str {
    if survey.ordered { "call->stream" } else { "the default stream" }
}

/// Host memory that a stream is to write. What is device memory is written in the order of streams, and so is
/// what its owner does to it.
struct InUse {
    until: Option<&'static str>,
    since: OnceLock<Instant>,
}

impl InUse {
    fn of(survey: &Survey, bytes: usize) -> InUse {
        let writes_host = bytes > 0 && matches!(survey.output, Place::Host(_));
        InUse { until: writes_host.then(|| stream_of(survey)), since: OnceLock::new() }
    }

    /// When a work ends with `error`, told whether its stream has come past it: then, since its caller has
    /// the memory back. A stream that is not to come there ever keeps nobody: its caller is told whose the
    /// memory is.
    fn told(&self, error: Error, done: bool) -> Option<Error> {
        let Some(stream) = self.until.filter(|_| !done) else { return Some(error) };
        let waited = self.since.get_or_init(Instant::now).elapsed();
        (waited > GRACE_PERIOD).then(|| error.context(format!("output is written until {stream} is through")))
    }
}

/// What scales device memory, and where that is.
struct Scaler {
    kernels: Arc<dyn Kernels>,
    factor: f64,
    from: u64,
    to: u64,
}

impl Scaler {
    /// Gives it to the call's stream.
    ///
    /// # Safety
    /// As [`copy`].
    unsafe fn give(&self, survey: &Survey, checked: &Checked) -> Result<()> {
        let Scaler { kernels, factor, from, to } = self;
        let representation = Representation::Element;
        let _entered = survey.devices.enter(survey.device)?;
        let fold = Fold {
            stream: &survey.stream,
            dtype: checked.dtype,
            operator: Operator::PreMulSum(*factor),
            ranks: 1,
            operands: &[Operand { address: *from, representation, scale: *factor }],
            out: *to,
            representation,
            count: checked.output_len(),
            max_blocks: 0,
        };
        // SAFETY: the caller's promise; both are memory of the stream's device, aligned to elements and as
        // long as the call says.
        unsafe { kernels.fold(&survey.devices, &fold) }
    }
}

/// Copies input to output in a group of one. What a captured call has on the host is pinned.
///
/// # Safety
/// Both are valid until the stream has copied.
unsafe fn copy(survey: &Survey, bytes: usize) -> Result<()> {
    let stream = &survey.stream;
    // SAFETY: the caller's promise.
    unsafe {
        match (survey.input, survey.output) {
            (Place::Device(from), Place::Device(to)) if from == to => Ok(()),
            (Place::Device(from), Place::Device(to)) => stream.copy_to_peer(to, survey.device, from, bytes),
            (Place::Device(from), Place::Host(to)) => stream.copy_to_host(to, from, bytes),
            (Place::Host(from), Place::Device(to)) => stream.copy_to_device(to, from.cast_const(), bytes),
            (Place::Host(from), Place::Host(to)) if from == to => Ok(()),
            (Place::Host(from), Place::Host(to)) if survey.captured => {
                stream.copy_on_host(to, from.cast_const(), bytes)
            }
            // The driver's own copy would not return before the stream has come to it.
            (Place::Host(from), Place::Host(to)) => {
                let job = Box::into_raw(Box::new(HostCopy { from, to, bytes }));
                let given = stream.launch_host(host_copy, job.cast());
                if given.is_err() {
                    // The stream has not taken it.
                    drop(Box::from_raw(job));
                }
                given
            }
        }
    }
}

/// A copy within the host, when a stream comes to it.
struct HostCopy {
    from: *mut u8,
    to: *mut u8,
    bytes: usize,
}

/// # Safety
/// `job` is a [`HostCopy`] in a box, given away.
unsafe extern "C" fn host_copy(job: *mut c_void) {
    // SAFETY: the promise above; the memory is the caller's, valid until the stream has come past this.
    unsafe {
        let job = Box::from_raw(job.cast::<HostCopy>());
        std::ptr::copy(job.from, job.to, job.bytes);
    }
}

/// The sum of one scaled input, where no kernel reaches it: by the host, which waits for the stream.
///
/// # Safety
/// As [`copy`].
unsafe fn scale(survey: &Survey, checked: &Checked, request: &Request, patience: Deadline) -> Result<()> {
    let bytes = survey.input_bytes;
    let memory = RegisteredBuffer::new(&survey.devices, survey.device, bytes)?;
    // SAFETY: the caller's promise, and the buffer holds `bytes` bytes.
    let scaled = unsafe { scale_in(memory.address(), survey, checked, request, patience) };
    if scaled.is_err() {
        // A copy may be under way, and nothing tells when it ends.
        log::warn!("a call that failed leaves its pinned memory behind");
        std::mem::forget(memory);
    }
    scaled
}

/// [`scale`], by way of pinned memory at `address`.
///
/// # Safety
/// As [`copy`]; the memory is as long as the input, and stays until the stream is done with it.
unsafe fn scale_in(
    address: *mut u8,
    survey: &Survey,
    checked: &Checked,
    request: &Request,
    patience: Deadline,
) -> Result<()> {
    let (bytes, stream) = (survey.input_bytes, &survey.stream);
    // SAFETY: this function's contract.
    unsafe {
        if let Place::Device(from) = survey.input {
            stream.copy_to_host(address, from, bytes)?;
        }
        stream.synchronize(patience)?;
        if let Place::Host(from) = survey.input {
            std::ptr::copy_nonoverlapping(from.cast_const(), address, bytes);
        }
        let scaled = Checked { input: address.cast_const(), output: address, ..checked.clone() };
        alone(&scaled, request.operator, &[])?;
        match survey.output {
            Place::Device(to) => {
                stream.copy_to_device(to, address.cast_const(), bytes)?;
                stream.synchronize(patience)
            }
            Place::Host(to) => {
                std::ptr::copy_nonoverlapping(address.cast_const(), to, bytes);
                Ok(())
            }
        }
    }
}

/// A group of one: the result is the input.
///
/// # Safety
/// The pointers of the call and `buffers` are valid for what the call accesses.
pub(super) unsafe fn alone(checked: &Checked, operator: Operator, buffers: &[*mut u8]) -> Result<()> {
    if let Some(operator) = checked.operator {
        // Refuses what larger groups refuse.
        Reducer::new(checked.dtype, operator, 1)?;
    }
    // SAFETY: the caller's promise; input and output have the same length in a group of one.
    unsafe {
        match widen(checked, operator, buffers, 1)? {
            Some(ends) => ends.combine(checked.output_len()),
            None => {
                let bytes = checked.output_len() * checked.dtype.size();
                spread(checked.input, &[checked.output], bytes);
                spread(checked.output, buffers, bytes);
            }
        }
    }
    Ok(())
}
