//! How far calls by way of the host run ahead of the stream that waits for them.
//!
//! The driver has room for a few hundred things that a stream has not done. A thread that gives the stream
//! one more waits inside the driver, with the lock of the device's context held; and whoever would move the
//! calls that the stream waits for needs that lock. So that it never comes to this, a thread waits here,
//! where it moves calls itself, while its stream waits for [`FEW`] calls already.
//!
//! What a call waits for may have to be called later by the same thread, on another stream or on the host: a
//! receive whose message is the answer to what is sent next. So the first waits are short ([`PATIENCE`]), and
//! each that was in vain doubles the number of calls that the stream may wait for, up to [`MOST`]. Beyond,
//! the wait ends with the call's deadline, and the call with it.
//!
//! Only calls that a stream was told to wait for count: operations that start together are begun before that,
//! however many they are.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;
use std::time::Duration;

use crate::cuda::context::Devices;
use crate::cuda::courier::Courier;
use crate::cuda::driver::StreamHandle;
use crate::cuda::queues;
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::callbacks::is_calling_back;
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::engine::operation::Running;
use crate::error::{Result, fail};

/// So many calls a stream may wait for without more ado. Two keep it busy; the rest lets a thread that has
/// other streams to feed go on while this one lags behind. A call takes three places in the queue, and the
/// caller's own work in between the others.
const FEW: usize = 16;

/// So many at most.
const MOST: usize = 64;

/// How long a thread waits before it may be right that it must go on.
const PATIENCE: Duration = Duration::from_millis(50);

/// How long it leaves moving what it waits for to the attendant, if that does so already: two threads that
/// move the same calls are in each other's way.
const WATCHES: Duration = Duration::from_micros(500);

/// The streams that wait for calls, and for which. In a list: they are few.
static BACKLOGS: Mutex<Vec<(Key, Backlog)>> = Mutex::new(Vec::new());

/// A stream of this process.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    devices: usize,
    device: u32,
    handle: StreamHandle,
    /// Whose default stream it is, if it is a thread's.
    thread: Option<ThreadId>,
}

impl Key {
    fn of(stream: &Stream) -> Key {
        let handle = match stream.handle() {
            StreamHandle::NULL => StreamHandle::LEGACY,
            handle => handle,
        };
        let thread = (handle == StreamHandle::PER_THREAD).then(|| std::thread::current().id());
        Key { devices: Arc::as_ptr(stream.devices()).addr(), device: stream.device(), handle, thread }
    }
}

/// What one stream waits for.
struct Backlog {
    /// In the order in which the stream comes to them. The endpoint keeps those that run.
    calls: VecDeque<Weak<Running>>,
    /// How many there may be.
    allowed: usize,
    /// The courier that the stream was given last.
    courier: Weak<Courier>,
}

impl Backlog {
    /// Forgets those at its head that have ended. The first of the others. It is asked several times a call,
    /// and looks at no more: other threads write what says whether a call has ended.
    fn first(&mut self) -> Option<Arc<Running>> {
        while let Some(call) = self.calls.front() {
            let runs = call.upgrade().filter(|call| !call.has_ended());
            if runs.is_some() {
                return runs;
            }
            self.calls.pop_front();
        }
        None
    }

    /// Whether there are as many as there may be. Calls of several groups may have ended in another order.
    fn is_full(&mut self) -> bool {
        if self.calls.len() >= self.allowed {
            self.calls.retain(|call| call.upgrade().is_some_and(|call| !call.has_ended()));
        }
        if self.calls.len() < FEW {
            self.allowed = FEW;
        }
        self.calls.len() >= self.allowed
    }
}

/// `stream` has been told to wait for `call`, by a courier if there is one.
pub(super) fn note(stream: &Stream, call: &Arc<Running>, courier: Option<&Arc<Courier>>) {
    let key = Key::of(stream);
    let (call, courier) = (Arc::downgrade(call), courier.map(Arc::downgrade).unwrap_or_default());
    let mut backlogs = lock(&BACKLOGS);
    match backlogs.iter_mut().find(|(other, _)| *other == key) {
        Some((_, backlog)) => {
            backlog.calls.push_back(call);
            backlog.courier = courier;
        }
        None => {
            backlogs.retain_mut(|(_, backlog)| backlog.first().is_some());
            backlogs.push((key, Backlog { calls: [call].into(), allowed: FEW, courier }));
        }
    }
}

/// Whether `stream` has something to do for certain, since the courier that it was given last has not left.
pub(super) fn is_busy(stream: &Stream) -> bool {
    let key = Key::of(stream);
    let backlogs = lock(&BACKLOGS);
    let courier =
        backlogs.iter().find(|(other, _)| *other == key).and_then(|(_, backlog)| backlog.courier.upgrade());
    drop(backlogs);
    courier.is_some_and(|courier| courier.is_under_way())
}

/// Whether any stream of a process's devices has been told to wait for a call that runs.
pub(super) fn any_waits(devices: *const Devices) -> bool {
    let devices = devices.addr();
    lock(&BACKLOGS).iter_mut().any(|(key, backlog)| key.devices == devices && backlog.first().is_some())
}

/// Whether `stream` is to wait for what goes through the host, instead of the thread that calls. Not where so
/// many others of its device do that they take the queues of those who would end that. A callback must not
/// wait.
pub(super) fn may_wait(stream: &Stream) -> Result<bool> {
    let (devices, device) = (stream.devices(), stream.device());
    if is_calling_back() {
        return devices.driver().can_wait_value(device);
    }
    Ok(devices.streams_may_wait(device)? && others_that_wait(stream) < queues::WAITING)
}

/// How many other streams of its device wait.
fn others_that_wait(stream: &Stream) -> usize {
    let key = Key::of(stream);
    let mut backlogs = lock(&BACKLOGS);
    backlogs.retain_mut(|(_, backlog)| backlog.first().is_some());
    let of_device = |other: &Key| (other.devices, other.device) == (key.devices, key.device);
    backlogs.iter().filter(|(other, _)| *other != key && of_device(other)).count()
}

/// Waits until `stream` may be told to wait for one more call, of `group`: whether it has been told to wait
/// for any that runs. `Timeout` when there are too many that do not end in time. Returns at once where nobody
/// may wait, in callbacks.
pub(super) fn make_room(stream: &Stream, group: &Group, until: impl Fn() -> Deadline) -> Result<bool> {
    let key = Key::of(stream);
    let mut deadline = None;
    // Its own backlog: whoever waits here has not given the stream more meanwhile.
    while let Some((first, full)) = first_of(key) {
        let Some(allowed) = full.filter(|_| !is_calling_back()) else { return Ok(true) };
        let deadline = *deadline.get_or_insert_with(&until);
        if first.watch(WATCHES) {
            continue;
        }
        let most = allowed >= MOST;
        if first.wait(Deadline::after(PATIENCE).min(deadline)).is_some() {
            continue;
        }
        // The call itself says so.
        if group.failure().is_some() {
            return Ok(true);
        }
        if !most {
            if let Some((_, backlog)) = lock(&BACKLOGS).iter_mut().find(|(other, _)| *other == key) {
                backlog.allowed = backlog.allowed.max(allowed * 2);
            }
        } else if deadline.expired() {
            fail!(
                Timeout,
                "call->stream waits for {MOST} earlier calls by way of the host, of which none has ended in time. Look at those; or if \
                 they wait for calls that come later in this thread, make these sooner"
            );
        }
    }
    Ok(false)
}

/// The first call that a stream waits for, and for how many it may, if it waits for that many.
fn first_of(key: Key) -> Option<(Arc<Running>, Option<usize>)> {
    let mut backlogs = lock(&BACKLOGS);
    let (_, backlog) = backlogs.iter_mut().find(|(other, _)| *other == key)?;
    let first = backlog.first()?;
    Some((first, backlog.is_full().then_some(backlog.allowed)))
}
