//! One-sided operations: what a rank writes into another's part of a window, signals, and waits for them.
//!
//! They are no calls of all ranks: nothing of them is compared, and they are in no order with calls but that
//! of their streams, since a wait may be for what another rank sends behind a call. What a rank sends goes in
//! the order in which it is asked for, on whatever streams; waits are beside each other. What is captured is
//! in no order with anything else.

use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use super::{Caller, DeviceExchange, Parts};
use crate::cuda::context::Devices;
use crate::cuda::driver::Capture;
use crate::cuda::event::Event;
use crate::cuda::exchange::{Counts, MAX_RANKS};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::engine::direct::HAS_LEFT;
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::engine::wire::Class;
use crate::error::{Error, Result, Status, fail};

/// What one rank writes into another's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// The first byte, in memory of this rank's GPU.
    pub from: u64,
    /// How many.
    pub bytes: u64,
    /// The number of the window.
    pub window: u64,
    /// Where they go, in bytes from the beginning of that rank's part.
    pub offset: u64,
}

/// What streams were given of one-sided operations.
#[derive(Debug)]
pub(in crate::engine::device) struct OneSided {
    /// Complete when all that was sent has been.
    sent: Event,
    /// The stream that was given the last of it, by its id. Locked while a stream is given something to send:
    /// that may take until there is room in its queue.
    sent_on: Mutex<Option<u64>>,
    /// Locked for moments, so that deadlines are kept meanwhile.
    waits: Mutex<Waits>,
}

#[derive(Debug, Default)]
struct Waits {
    under_way: Vec<Wait>,
    /// How many signals of each member streams have been given waits for.
    awaited: [u64; MAX_RANKS],
    /// How many streams are being given one.
    begun: usize,
    /// How many there have been.
    numbers: u64,
    /// Of waits that are over.
    spare: Vec<Arc<Event>>,
}

/// Signals that a stream waits for.
#[derive(Debug)]
struct Wait {
    /// No other has it: events are used again.
    number: u64,
    over: Arc<Event>,
    counts: Counts,
    since: Instant,
    deadline: Deadline,
}

impl Wait {
    /// What it is for, and how long it has waited, if that is too long.
    fn late(&self) -> Option<(Counts, Duration)> {
        self.deadline.expired().then(|| (self.counts, self.since.elapsed()))
    }
}

impl OneSided {
    /// Nothing yet.
    pub(in crate::engine::device) fn new(devices: &Arc<Devices>, device: u32) -> Result<OneSided> {
        let sent = Event::new(devices, device)?;
        Ok(OneSided { sent, sent_on: Mutex::default(), waits: Mutex::default() })
    }

    /// Whether streams have been given nothing that was not captured, or waits alone that were seen to be
    /// over. Asks nobody.
    pub(in crate::engine::device) fn is_nothing(&self) -> bool {
        let sends = self.sent_on.try_lock().map_or(true, |sent_on| sent_on.is_some());
        let waits = lock(&self.waits);
        !sends && waits.begun == 0 && waits.under_way.is_empty()
    }

    /// Whether streams have done all of it that was not captured.
    pub(in crate::engine::device) fn is_done(&self) -> Result<bool> {
        let sent_on = match self.sent_on.try_lock() {
            Ok(sent_on) => *sent_on,
            Err(TryLockError::Poisoned(poisoned)) => *poisoned.into_inner(),
            // Somebody sends something right now.
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let waits = lock(&self.waits);
        if waits.begun > 0 {
            return Ok(false);
        }
        let known = waits.known();
        // Without the lock, as the driver may not answer.
        drop(waits);
        for (_, over) in known {
            if !over.query()? {
                return Ok(false);
            }
        }
        if sent_on.is_some() { self.sent.query() } else { Ok(true) }
    }

    /// Has a stream, whose id this is, wait for all of it that was not captured.
    pub(super) fn precede(&self, stream: &Stream, id: u64) -> Result<()> {
        if lock(&self.sent_on).is_some_and(|other| other != id) {
            stream.wait(&self.sent)?;
        }
        // Without the lock, as the driver may not answer.
        let known = lock(&self.waits).known();
        known.iter().try_for_each(|(_, over)| stream.wait(over))
    }

    /// Before a stream is given a wait: its number, and an event for it, if one is spare.
    fn begin_wait(&self) -> (u64, Option<Arc<Event>>) {
        let mut waits = lock(&self.waits);
        waits.begun += 1;
        waits.numbers += 1;
        (waits.numbers, waits.spare.pop())
    }

    /// When it has been, or has not.
    fn end_wait(&self, given: Result<Wait>) -> Result<()> {
        let mut waits = lock(&self.waits);
        waits.begun -= 1;
        given.map(|wait| {
            waits.awaited.iter_mut().zip(wait.counts).for_each(|(all, count)| *all += u64::from(count));
            waits.under_way.push(wait);
        })
    }
}

impl Waits {
    /// The number of each, and what tells that it is over.
    fn known(&self) -> Vec<(u64, Arc<Event>)> {
        self.under_way.iter().map(|wait| (wait.number, wait.over.clone())).collect()
    }
}

impl DeviceExchange {
    /// Has the caller's stream write into another member's part of a window, and then signal it.
    ///
    /// # Safety
    /// The stream lives, and the memory until it has done this. What is written to is nobody else's
    /// meanwhile.
    pub unsafe fn put(&self, group: &Group, peer: u32, put: &Put, caller: Caller) -> Result<()> {
        let (Put { from, bytes, .. }, (to, device)) = (*put, self.reach(group, peer, put)?);
        let copy = |stream: &Stream| match usize::try_from(bytes) {
            Ok(0) => Ok(()),
            // SAFETY: the caller's promise; the window is mapped until no operation of this rank is under
            // way.
            Ok(bytes) => unsafe { stream.copy_to_peer(to, device, from, bytes) },
            Err(_) => fail!(InvalidArgument, "{bytes} bytes do not fit any memory"),
        };
        // SAFETY: the caller's promise.
        unsafe { self.send(group, peer, caller, copy) }
    }

    /// Where another member's part of a window is written to, and on which device that is.
    pub fn reach(&self, group: &Group, peer: u32, put: &Put) -> Result<(u64, u32)> {
        let Put { window, offset, bytes, .. } = *put;
        lock(&self.parts().windows).reach(window, self.member(group, peer)?, offset, bytes)
    }

    /// Has the caller's stream signal another member, or this one itself.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn signal(&self, group: &Group, peer: u32, caller: Caller) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.send(group, peer, caller, |_| Ok(())) }
    }

    /// What comes `before` a signal, and the signal, behind all that was sent before.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn send(
        &self,
        group: &Group,
        peer: u32,
        caller: Caller,
        before: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<()> {
        let (member, mut counts) = (self.member(group, peer)?, Counts::default());
        counts[member] = 1;
        let parts = self.parts();
        // SAFETY: the caller's promise.
        let given = unsafe {
            self.give_one_sided(caller, |stream, id| {
                let Some(id) = id else {
                    before(stream)?;
                    parts.boards.note_signal(member, true);
                    return parts.kernels.enqueue_signals(&counts, stream);
                };
                let mut sent_on = lock(&parts.one_sided.sent_on);
                if sent_on.is_some_and(|other| other != id) {
                    stream.wait(&parts.one_sided.sent)?;
                }
                *sent_on = Some(id);
                before(stream)?;
                parts.boards.note_signal(member, false);
                let signals = parts.kernels.enqueue_signals(&counts, stream);
                // What is sent next would not come behind this, which the stream may have been given a part
                // of.
                signals
                    .and_then(|()| parts.one_sided.sent.record(stream))
                    .inspect_err(|error| group.fail_here(error))
            })
        };
        self.or_told(group, caller, given)
    }

    /// Has the caller's stream wait for so many signals of each member, which no other wait is for. What they
    /// were sent behind is seen by what the stream is given after this. If they do not come until the call's
    /// deadline, or a member has left without sending them, the group fails.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn await_signals(&self, group: &Group, from: &[(u32, u32)], caller: Caller) -> Result<()> {
        let mut counts = Counts::default();
        for &(peer, count) in from {
            let known = &mut counts[self.member(group, peer)?];
            let Some(sum) = known.checked_add(count) else {
                fail!(InvalidArgument, "a wait for more than {} signals of rank {peer}", u32::MAX)
            };
            *known = sum;
        }
        if counts == Counts::default() {
            return Ok(());
        }
        let (parts, since) = (self.parts(), Instant::now());
        let deadline = Deadline::since(since, caller.timeout.unwrap_or(group.timeout()));
        // SAFETY: the caller's promise.
        let given = unsafe {
            self.give_one_sided(caller, |stream, id| {
                if id.is_none() {
                    return parts.kernels.enqueue_wait(&counts, stream);
                }
                let (number, spare) = parts.one_sided.begin_wait();
                let new = || Event::new(self.devices(), self.device()).map(Arc::new);
                let given = spare.map_or_else(new, Ok).and_then(|over| {
                    {
                        let _launching = self.devices().launching();
                        parts.kernels.enqueue_wait(&counts, stream)?;
                    }
                    // Nobody would see to its deadline.
                    over.record(stream).inspect_err(|error| group.fail_here(error))?;
                    Ok(Wait { number, over, counts, since, deadline })
                });
                parts.one_sided.end_wait(given)
            })
        };
        self.or_told(group, caller, given)?;
        group.endpoint().watch_devices();
        Ok(())
    }

    /// Gives the caller's stream something, which is told its id, but in a capture.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn give_one_sided(
        &self,
        caller: Caller,
        give: impl FnOnce(&Stream, Option<u64>) -> Result<()>,
    ) -> Result<()> {
        let (parts, devices) = (self.parts(), self.devices());
        self.check_default_stream(caller)?;
        let _entered = devices.enter(self.device())?;
        let handle = caller.stream.unwrap_or(parts.stream.handle());
        // SAFETY: the caller's promise.
        let capture = unsafe { self.capture(caller) }?;
        // SAFETY: as above.
        let stream = unsafe { Stream::borrow(devices, self.device(), handle) };
        let stream = stream.map_err(|error| self.foreign(caller, error))?;
        let id = match capture {
            // SAFETY: as above.
            Capture::None => Some(unsafe { devices.driver().stream_id(handle) }?),
            Capture::Active(_) => None,
            Capture::Invalidated => {
                fail!(InvalidUsage, "the capture of the call's stream has failed; end it, and begin again")
            }
        };
        give(&stream, id).inspect_err(|_| {
            // Part of it may be there.
            if id.is_some() {
                let _one_at_a_time = lock(&self.line);
                parts.astray.add(&stream);
            }
        })
    }

    /// The member that is this rank of the group.
    fn member(&self, group: &Group, rank: u32) -> Result<usize> {
        let Some(member) = rank
            .checked_sub(self.parts().first)
            .filter(|&member| member < MAX_RANKS as u32 && (member as usize) < self.parts().boards.size())
        else {
            fail!(
                InvalidArgument,
                "peer {rank} is out of range: '{}' has {} ranks",
                group.name(),
                group.size()
            )
        };
        Ok(member as usize)
    }

    /// What the driver refuses fails the group: others may wait for it. If the group has failed before, that
    /// is the error.
    fn or_told(&self, group: &Group, caller: Caller, given: Result<()>) -> Result<()> {
        let told = self.or_fail(group, Class::PointToPoint, caller, given);
        told.map_err(|error| group.failure().unwrap_or(error))
    }

    /// Looks after waits until they are over. Whether some are not.
    pub(super) fn attend_waits(&self, group: &Group) -> bool {
        let one_sided = &self.parts().one_sided;
        let known = lock(&one_sided.waits).known();
        // Without the lock: whoever sees to deadlines when the driver does not answer needs it.
        let answers: Vec<_> = known.into_iter().map(|(number, over)| (number, over.query())).collect();
        let mut waits = lock(&one_sided.waits);
        let Waits { under_way, begun, spare, .. } = &mut *waits;
        let (mut late, mut lost) = (None, None);
        for (number, answer) in answers {
            // Somebody else may have found it over.
            let Some(at) = under_way.iter().position(|wait| wait.number == number) else { continue };
            match answer {
                Ok(true) => spare.push(under_way.swap_remove(at).over),
                Ok(false) => late = under_way[at].late().or(late),
                Err(error) => {
                    lost = Some(error);
                    under_way.swap_remove(at);
                }
            }
        }
        let any = !under_way.is_empty() || *begun > 0;
        drop(waits);
        if group.failure().is_some() {
            return any;
        }
        // At the end of a process, the driver goes before we do.
        if let Some(error) = lost.filter(|error| !error.text().contains("DEINITIALIZED")) {
            group.fail_here(&error);
        } else if let Some((counts, waited)) = late {
            group.fail(self.late_signals(group, &counts, waited));
        } else if let Some(error) = self.deserted(group) {
            group.fail(error);
        }
        any
    }

    /// A rank that has left without all the signals that streams of this one wait for: those waits never end.
    fn deserted(&self, group: &Group) -> Option<Error> {
        let Parts { boards, first, one_sided, .. } = self.parts();
        let awaited = {
            let waits = lock(&one_sided.waits);
            if waits.under_way.is_empty() {
                return None;
            }
            waits.awaited
        };
        // Before what they have noted is looked at: they note nothing more.
        let gone = self.gone(group);
        let lacks = |member: &u32| !boards.has_signalled(*member as usize, awaited[*member as usize]);
        let who = group.describe_rank(first + gone.iter().find(lacks)?);
        let text = format!(
            "rank {} of '{}' waits for a signal that never comes: {who} {HAS_LEFT}",
            group.rank(),
            group.name()
        );
        Some(Error::new(Status::PeerFailed, text))
    }

    /// The same when the driver does not answer: a wait that is late has not ended, as far as anybody knows.
    pub(super) fn oversee_waits(&self, group: &Group) {
        let late = lock(&self.parts().one_sided.waits).under_way.iter().find_map(Wait::late);
        if group.failure().is_some() {
            return;
        }
        if let Some((counts, waited)) = late {
            let unknown =
                "; the driver does not answer meanwhile, so they may have come without anybody knowing";
            let error = self.late_signals(group, &counts, waited);
            group.fail(Error::new(error.status(), format!("{}{unknown}", error.text())));
        } else if let Some(error) = self.deserted(group) {
            // Whatever has come: it is not enough.
            group.fail(error);
        }
    }

    fn late_signals(&self, group: &Group, counts: &Counts, waited: Duration) -> Error {
        let first = self.parts().first;
        let ranks: Vec<String> = (first..)
            .zip(counts)
            .filter(|&(_, &count)| count > 0)
            .map(|(rank, count)| format!("{count} of {}", group.describe_rank(rank)))
            .collect();
        let text = format!(
            "rank {} of '{}' waited {:.1} s for signals, {}, and not all have come: look at what those ranks do, or raise timeout_ms",
            group.rank(),
            group.name(),
            waited.as_secs_f64(),
            ranks.join(", ")
        );
        Error::new(Status::Timeout, text)
    }
}
