//! An operation on the host that has begun, and what has its stream wait for it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::couriers;
use crate::communicator::ahead;
use crate::communicator::work::Work;
use crate::cuda::courier::Courier;
use crate::cuda::local::Kernels;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::engine::callbacks::is_calling_back;
use crate::engine::endpoint::lock;
use crate::engine::operation::Running;
use crate::error::{Error, Result, Status};
use crate::sys;

/// An operation on the host that has begun, for which its stream does not wait yet.
#[must_use = "the stream waits for the operation once this is closed"]
pub(in crate::communicator) struct Begun {
    pub(super) work: Work,
    pub(super) close: Option<Open>,
    /// Whether the thread waits for it, once it is closed.
    pub(super) crowded: bool,
}

/// What has the stream wait, for whoever comes first: who closes the call, or what [comes behind
/// it](close_ahead).
pub(super) type Open = Arc<Mutex<ToClose>>;

/// What has the stream wait, until somebody closes the call or leaves it to run.
pub(super) struct ToClose(Option<Close>);

impl Drop for ToClose {
    /// Whatever kept its thread from closing it, such as a panic: the other ranks do not wait for the call.
    fn drop(&mut self) {
        if let Some(Close { running, exit, .. }) = self.0.take() {
            let text = "a call has begun, but its stream was not made to wait for it";
            let mut copies = Copies::default();
            give_up(&running, &Error::new(Status::Internal, text), exit.word(), &mut copies);
            copies.wait();
        }
    }
}

/// Nothing orders the stream behind the call: it must not go on. Its caller has the memory back when `copies`
/// have been waited for, `exit` among them.
fn give_up(running: &Running, cause: &Error, exit: Option<Arc<Word>>, copies: &mut Copies) {
    running.group().fail_here(cause);
    running.cancel();
    exit.into_iter().for_each(|exit| copies.add(exit));
}

/// What has the stream wait.
pub(super) struct Close {
    pub(super) stream: Arc<Stream>,
    pub(super) running: Arc<Running>,
    pub(super) exit: Exit,
}

/// How a call that has begun is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator) enum End {
    /// As [`Begun::close`] says.
    Close,
    /// As that, but whoever closes it waits itself for what side streams do, since it asks the driver for
    /// more meanwhile.
    Complete,
}

/// What a stream waits for until a call has ended.
pub(super) enum Exit {
    /// A courier, once it is launched.
    Courier(Launch),
    /// A word that side streams release.
    Word(Arc<Word>),
    /// Nothing: the stream may not wait for the host, so the host waits.
    Thread,
}

impl Exit {
    fn word(self) -> Option<Arc<Word>> {
        match self {
            Exit::Word(word) => Some(word),
            Exit::Courier(_) | Exit::Thread => None,
        }
    }
}

/// A courier that is to be launched, by this call or another one that shares it. It keeps none from leaving
/// that others have launched: the thread that is to launch this one may wait in the driver for that, with a
/// lock that who frees memory has until couriers have left.
pub(in crate::communicator) struct Launch {
    courier: Arc<Courier>,
    kernels: Arc<dyn Kernels>,
}

impl Launch {
    pub(in crate::communicator) fn new(courier: Arc<Courier>, kernels: Arc<dyn Kernels>) -> Launch {
        courier.promise();
        Launch { courier, kernels }
    }

    pub(in crate::communicator) fn courier(&self) -> &Arc<Courier> {
        &self.courier
    }

    /// Gives it to `stream`, if no other call has: several share it.
    ///
    /// # Safety
    /// As [`Courier::launch`](crate::cuda::courier::Courier::launch).
    pub(in crate::communicator) unsafe fn give(self, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.courier.launch(stream, ahead::is_busy(stream), &*self.kernels) }
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        self.courier.withdraw();
    }
}

impl Begun {
    /// One that has begun, and what has its stream wait for it, if it has one. `crowded`: whether the thread
    /// waits for it, too.
    pub(super) fn new(work: Work, close: Option<Close>, crowded: bool) -> Begun {
        let close = close.map(|close| {
            let apart = close.apart();
            let open = Arc::new(Mutex::new(ToClose(Some(close))));
            apart.into_iter().for_each(|group| couriers::note_open(group, &open));
            open
        });
        Begun { work, close, crowded }
    }

    pub(in crate::communicator) fn closed(work: Work) -> Begun {
        Begun { work, close: None, crowded: false }
    }

    /// Whether it is still to be closed, and so.
    fn is_open_and(&self, so: impl FnOnce(&Close) -> bool) -> bool {
        self.close.as_ref().is_some_and(|open| lock(open).0.as_ref().is_some_and(so))
    }

    /// What has its stream wait, unless that has been done.
    fn take_close(&self) -> Option<Close> {
        self.close.as_ref().and_then(|open| lock(open).0.take())
    }

    /// Closes it in this way.
    pub(in crate::communicator) fn end(self, end: End, copies: &mut Copies) -> Result<Work> {
        match self.take_close() {
            Some(Close { exit: Exit::Word(exit), .. }) if end == End::Complete => {
                let ended = self.work.wait(Deadline::NEVER);
                ended.inspect_err(|_| copies.add(exit)).map(|_| self.work)
            }
            Some(close) => close.close(copies).map(|()| self.work),
            None => Ok(self.work),
        }
    }

    /// Whether whoever closes it in this way waits for it meanwhile.
    pub(in crate::communicator) fn keeps_waiting(&self, end: End) -> bool {
        self.is_open_and(|close| match close.exit {
            Exit::Thread => true,
            Exit::Word(_) => end == End::Complete,
            Exit::Courier(_) => false,
        })
    }

    /// Whether it has a courier [apart](couriers::apart).
    pub(in crate::communicator) fn is_apart(&self) -> bool {
        self.is_open_and(|close| close.apart().is_some())
    }

    /// Whether whoever closes it is to wait for it: what its stream is given next may hold up what it waits
    /// for.
    pub(in crate::communicator) fn is_crowded(&self) -> bool {
        self.crowded && !is_calling_back()
    }

    /// As [`Begun::close`], but leaves it to run where its stream may not wait.
    pub(in crate::communicator) fn part(self) -> Result<Work> {
        match self.is_open_and(|close| matches!(close.exit, Exit::Thread)) {
            true => {
                drop(self.take_close());
                Ok(self.work)
            }
            false => self.close_alone(),
        }
    }

    /// As [`Begun::close`], of a call that is closed with no other.
    pub(super) fn close_alone(self) -> Result<Work> {
        let mut copies = Copies::default();
        let closed = self.close(&mut copies);
        copies.wait();
        closed
    }

    /// Has the call's stream wait for the operation, if the call named one. Returns at once; where streams
    /// may not wait for the host, when the operation is complete. If it fails its caller has the memory back
    /// when `copies` have been waited for.
    pub(in crate::communicator) fn close(self, copies: &mut Copies) -> Result<Work> {
        self.take_close().map_or(Ok(()), |close| close.close(copies)).map(|()| self.work)
    }
}

impl Close {
    /// The group of a call that is [apart](couriers::apart).
    fn apart(&self) -> Option<u64> {
        couriers::apart(self.running.group(), !self.running.is_point_to_point())
    }

    /// As [`Begun::close`].
    fn close(self, copies: &mut Copies) -> Result<()> {
        let Close { stream, running, exit } = self;
        let noted = |courier| ahead::note(&stream, &running, courier);
        let waits = match exit {
            Exit::Courier(launch) => {
                let courier = launch.courier().clone();
                // SAFETY: whoever began the call has promised its memory and its stream until it has ended.
                let given = unsafe { launch.give(&stream) };
                given.inspect(|()| noted(Some(&courier))).map_err(|error| (error, None))
            }
            Exit::Word(exit) if exit.is_released() => Ok(()),
            Exit::Word(exit) => {
                let held = stream.devices().note_held();
                running.on_complete(Box::new(move |_| drop(held)));
                stream.wait_word(&exit).inspect(|()| noted(None)).map_err(|error| (error, Some(exit)))
            }
            Exit::Thread => return Work::running(running).wait(Deadline::NEVER).map(drop),
        };
        if let Err((error, exit)) = waits {
            let error = error.context("call->stream cannot be made to wait");
            give_up(&running, &error, exit, copies);
            return Err(error);
        }
        Ok(())
    }
}

/// Closes what this thread has begun of a group's collectives: what is given to a stream now has its turn
/// behind them, and must not come before them there.
pub(in crate::communicator) fn close_ahead(group: u64) -> Result<()> {
    let mut copies = Copies::default();
    let mut ahead = couriers::take_open(group).into_iter().filter_map(|open| lock(&open).0.take());
    let closed = ahead.try_for_each(|close| close.close(&mut copies));
    copies.wait();
    closed
}

/// How long calls that their streams do not wait for are waited for on the host, once they are given up.
pub(super) const COPIES: Duration = Duration::from_secs(1);

/// The copies of calls that have failed and for which no stream waits: the words that are released behind
/// them.
#[derive(Default)]
pub(in crate::communicator) struct Copies(Vec<Arc<Word>>);

impl Copies {
    pub(super) fn add(&mut self, exit: Arc<Word>) {
        self.0.push(exit);
    }

    /// Waits for all of them, for [`COPIES`] at most: the caller has the memory back then.
    pub(in crate::communicator) fn wait(self) {
        if self.0.is_empty() {
            return;
        }
        let until = Deadline::after(COPIES);
        while !self.0.iter().all(|exit| exit.is_released()) && !until.expired() {
            sys::process::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::courier::{Duty, Errand};
    use crate::cuda::double::{Double, DoubleKernels, Order};

    /// Calls of a group share a courier, and one is closed after the other: what the driver is asked for in
    /// between may wait for it.
    #[test]
    fn who_is_still_to_launch_a_courier_keeps_it_from_nothing() {
        let double = Double::new(1, Order::Eager);
        let devices = Devices::over(double.clone()).expect("a device");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        let kernels: Arc<dyn Kernels> = Arc::new(DoubleKernels(double));
        let first = Errand::new(&devices, 0, Duty::default()).expect("a courier");
        let second = first.courier().join(Duty::default()).expect("it is there");
        let courier = first.courier().clone();
        let [one, other] =
            [&first, &second].map(|errand| Launch::new(errand.courier().clone(), kernels.clone()));
        // SAFETY: nothing is ordered.
        unsafe { one.give(&stream) }.expect("it is launched");
        drop((first, second));
        stream.synchronize(Deadline::after(Duration::from_secs(20))).expect("it leaves");
        assert!(courier.is_gone());
        drop(other);
    }
}
