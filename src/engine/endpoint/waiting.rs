//! How a thread waits: it moves everything that it may, spins briefly, yields for a while, then sleeps.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use super::away::Waits;
use super::sleepers::{Sleeper, Taken};
use super::{Endpoint, Through};
use crate::deadline::Deadline;
use crate::sys;

/// What a look at what is waited for has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look<T> {
    /// It is there.
    Over(T),
    /// Whoever looked is at work on it, and has stopped in the middle to look at everything else: the next
    /// look goes on.
    AtWork,
    /// Something has to come first.
    Waits,
}

/// Looks whether what a thread waits for is there; before the thread sleeps, it is given who does.
type Poll<'a> = dyn FnMut(Option<&Arc<Sleeper>>) -> Look<()> + 'a;

/// How long a waiter is attentive before it sleeps. Yielding costs a fraction of a microsecond when nobody
/// else is ready, so it is hardly slower than spinning; and when the awaited rank shares the processor, each
/// microsecond of spinning is lost.
struct Patience {
    /// Looks at shared memory between two looks at everything else.
    burst: u32,
    /// Spins for so long, then yields,
    spin: Duration,
    /// for so long.
    yielding: Duration,
}

/// Every rank of the host has a processor to itself.
const ROOMY: Patience =
    Patience { burst: 64, spin: Duration::from_micros(2), yielding: Duration::from_micros(80) };

/// Ranks share processors.
const CROWDED: Patience = Patience { burst: 4, spin: Duration::ZERO, yielding: Duration::from_micros(80) };

/// The same, for a device to do what it was given. Its word through a sleeper's bell takes long, and after a
/// pause the device's own first answers do. So long that a call of 16 MiB is over: a nap in it would end
/// after it.
const DEVICE: Patience = Patience { yielding: Duration::from_micros(500), ..ROOMY };

/// A sleeper looks up at least this often: a guard against a lost wake-up, not a way of working.
#[cfg(not(test))]
const NAP: Duration = Duration::from_millis(500);
/// Tests do without: a wake-up that is lost shows.
#[cfg(test)]
const NAP: Duration = Duration::from_secs(20);

/// A sleeper looks whether a device is done after an eighth of the time that it has had, within these bounds.
const DEVICE_NAP: RangeInclusive<Duration> = Duration::from_micros(50)..=Duration::from_millis(1);

/// Counts a thread among those that look for the last time until it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl Counted<'_> {
    fn among(count: &AtomicUsize) -> Counted<'_> {
        count.fetch_add(1, Ordering::SeqCst);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Endpoint {
    /// Waits until `poll` answers, moving everything meanwhile; `None` when the deadline has passed.
    pub fn wait<T>(
        &self,
        deadline: Deadline,
        through: Through,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.follow(deadline, through, |_| poll().map_or(Look::Waits, Look::Over))
    }

    /// As [`Endpoint::wait`], for what `poll` itself may be at work on. Before this thread sleeps `poll` is
    /// given who does: if all that it waits for comes to a mailbox, it says so
    /// ([`Endpoint::sleep_for_mail`]), and nothing else that moves wakes it.
    pub fn follow<T>(
        &self,
        deadline: Deadline,
        through: Through,
        mut poll: impl FnMut(Option<&Arc<Sleeper>>) -> Look<T>,
    ) -> Option<T> {
        let mut answer = None;
        self.wait_until(deadline, through, &mut |sleeper| match poll(sleeper) {
            Look::Over(there) => {
                answer = Some(there);
                Look::Over(())
            }
            Look::AtWork => Look::AtWork,
            Look::Waits => Look::Waits,
        });
        answer
    }

    /// Waits until `poll` says that it is over, or the deadline has passed; in that case `poll` is called
    /// after it.
    fn wait_until(&self, deadline: Deadline, through: Through, poll: &mut Poll<'_>) {
        let bell = self.bell.get().expect("set by `new`");
        let (mut waiting, mut sleeper) = (None, None);
        // Whether this thread has slept, and nobody has been woken since who would take the bell.
        let mut has_slept = false;
        let Patience { burst, spin, yielding } = self.patience(through);
        let mut idle_since: Option<Instant> = None;
        let mut round = 0u32;
        let mut yields = false;
        loop {
            let at_work = match poll(None) {
                Look::Over(()) => break,
                look => look == Look::AtWork,
            };
            round = round.wrapping_add(1);
            if through == Through::Memory && !round.is_multiple_of(burst) && !yields && !at_work {
                std::hint::spin_loop();
                continue;
            }
            // Not before: what ends in a moment would take a tenth longer.
            waiting.get_or_insert_with(|| match through {
                Through::Device => self.attendant.wait(),
                Through::Messages | Through::Memory => Waits::among(&self.sleepers.waiting),
            });
            if at_work && std::mem::take(&mut has_slept) {
                // That may take long.
                self.leave_bell();
            }
            if self.look(round, through) || at_work {
                (idle_since, yields) = (None, false);
                // What others send may never cease: the deadline holds all the same. And a look at work takes
                // long, whoever waits for it.
                let long = at_work || self.unattended.any();
                if (round.is_multiple_of(64) || long) && deadline.expired() {
                    poll(None);
                    break;
                }
                continue;
            }
            let now = Instant::now();
            let since = *idle_since.get_or_insert(now);
            let idle = now - since;
            if idle < spin {
                for _ in 0..8 {
                    std::hint::spin_loop();
                }
            } else if idle < spin + yielding {
                yields = true;
                sys::process::yield_now();
            } else {
                if deadline.expired() {
                    poll(None);
                    break;
                }
                let sleeper = sleeper.get_or_insert_with(|| Sleeper::new(bell, through == Through::Device));
                has_slept = true;
                if self.sleep(sleeper, deadline, through, poll) {
                    break;
                }
                if through == Through::Device {
                    // The driver may hold it up from here on.
                    self.leave_bell();
                    has_slept = false;
                }
                // Something rang: be attentive again, but not for long.
                idle_since = Some(Instant::now() - spin);
                continue;
            }
            if round.is_multiple_of(64) && deadline.expired() {
                poll(None);
                break;
            }
        }
        self.leave(waiting, has_slept);
    }

    /// A thread that polls has looked in vain: where ranks share processors it makes way for others now and
    /// then, before it loses its own with something that they wait for. Elsewhere that is no help: two ranks
    /// that poll beside other programs would be left on one processor.
    pub fn make_way(&self) {
        if self.is_crowded() && self.vain.fetch_add(1, Ordering::Relaxed).is_multiple_of(CROWDED.burst) {
            sys::process::yield_now();
        }
    }

    /// How often a waiter looks at shared memory between two looks at everything else.
    pub fn burst(&self) -> u32 {
        self.patience(Through::Memory).burst
    }

    fn patience(&self, through: Through) -> Patience {
        match through {
            _ if self.is_crowded() => CROWDED,
            Through::Device => DEVICE,
            Through::Messages | Through::Memory => ROOMY,
        }
    }

    /// How long a sleeper sleeps at most: not long where a device rings nobody when it is done, and not
    /// beyond the moment at which something is to be looked at whatever comes.
    pub(super) fn nap(&self, on_device: bool) -> Duration {
        if on_device {
            let since = Duration::from_nanos(self.since_stirred());
            return (since / 8).clamp(*DEVICE_NAP.start(), *DEVICE_NAP.end());
        }
        self.unattended.next_deadline().min(self.look_at()).remaining_capped(NAP)
    }

    /// Whoever sleeps here, or is about to, looks again when `moment` has come. What is moved here says so at
    /// every look before that: the next one may be another thread's.
    pub fn look_again_at(&self, moment: Instant) {
        let moment = moment.saturating_duration_since(self.born).as_nanos() as u64;
        let sooner = |agreed| (agreed <= self.age() || moment < agreed).then_some(moment);
        let _ = self.look_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sooner);
    }

    /// The next such moment.
    fn look_at(&self) -> Deadline {
        match self.look_at.load(Ordering::Relaxed) {
            moment if moment > self.age() => Deadline::since(self.born, Duration::from_nanos(moment)),
            _ => Deadline::NEVER,
        }
    }

    /// Nanoseconds since this was made.
    pub(super) fn age(&self) -> u64 {
        self.born.elapsed().as_nanos() as u64
    }

    /// Sleeps until something may have changed; not if `poll` says at the last moment that it has. Whether it
    /// is over. Nobody has to be woken by a thread that comes back from here and looks on: it has the duties
    /// of all that are awake (`endpoint::sleepers`).
    fn sleep(
        &self,
        sleeper: &Arc<Sleeper>,
        deadline: Deadline,
        through: Through,
        poll: &mut Poll<'_>,
    ) -> bool {
        let bell = self.bell.get().expect("set by `new`");
        let on_device = through == Through::Device;
        // Before the bell is found taken: whoever has it looks afterwards for one who sleeps. And before what
        // is looked at for the nap: see `remind_sleepers`.
        let lying = self.sleepers.lie_down(sleeper);
        let nap = deadline.remaining_capped(self.nap(on_device));
        if sleeper.is_relied_on() {
            self.sleepers.wakes_at.store(self.age().saturating_add(nap.as_nanos() as u64), Ordering::SeqCst);
        }
        // The driver may hold up the last look at a device: with the bell nobody would hear what rings.
        let mut taken = if on_device { None } else { self.sleepers.take_bell(sleeper) };
        // Also where another has the bell, who may not have come to this: that one looks at messages, but not
        // at shared memory that only this thread waits for, and a peer that writes there now has to ring.
        bell.prepare_park();
        let parking = Counted::among(&self.sleepers.parking);
        let look = poll(Some(sleeper));
        drop(parking);
        // That may have found when to look again.
        let nap = self.look_at().remaining_capped(nap);
        let mut waits = look == Look::Waits;
        if on_device && waits && !self.sleepers.bell_is_taken() {
            waits = !self.progress_parking(through);
            taken = self.sleepers.take_bell(sleeper);
            bell.prepare_park();
        }
        let has_bell = taken.is_some();
        if has_bell && waits {
            let asked = if on_device { Through::Messages } else { through };
            waits = !self.progress_parking(asked) && !sleeper.is_woken();
        }
        // For a callback, say, that was called meanwhile it let go of it.
        if !waits || sleeper.is_away() {
            if taken.as_ref().is_some_and(Taken::holds) {
                bell.cancel_park();
            }
        } else if !has_bell {
            sleeper.sleep(nap);
        } else {
            let mut events = Vec::new();
            if let Err(error) = bell.park(Some(nap), &mut events) {
                log::error!("the bell cannot be waited for: {error}");
            }
            self.serve(&events);
        }
        self.sleepers.wakes_at.store(0, Ordering::SeqCst);
        drop(taken);
        drop(lying);
        if has_bell {
            // It may have rung for what only they look at.
            self.sleepers.wake_any();
        }
        look == Look::Over(())
    }

    /// A thread that sleeps waits for nothing but what comes to this mailbox. Nobody but the caller may move
    /// the operation whose it is meanwhile.
    pub fn sleep_for_mail(&self, mailbox: u32, sleeper: &Arc<Sleeper>) {
        if self.messages().wake_thread_for(mailbox, sleeper) {
            self.sleepers.expects_mail(sleeper);
        }
    }

    /// An operation that is left to those who wait here may be due before any of them wakes, who has looked
    /// before there was that.
    pub(super) fn remind_sleepers(&self) {
        let wakes = match self.sleepers.wakes_at.load(Ordering::SeqCst) {
            0 => Deadline::NEVER,
            moment => Deadline::since(self.born, Duration::from_nanos(moment)),
        };
        if self.unattended.next_deadline().precedes(wakes) {
            self.wake_mover();
        }
    }

    /// Whoever ends a wait leaves the others able to go on. `has_slept`: it may have had the bell, or have
    /// been woken to take it. It counts among those that wait until it has looked for them.
    fn leave(&self, waiting: Option<Waits<'_>>, has_slept: bool) {
        if self.sleepers.any() {
            // As before sleeping: nothing is left that moves without a ring, but what another is woken for.
            // Nor a moment to look again at, which those who sleep have not heard of.
            if self.progress_parking(Through::Messages) || self.look_at() != Deadline::NEVER {
                self.wake_mover();
            } else if has_slept {
                self.leave_bell();
            }
        }
        drop(waiting);
        self.leave_to_library();
    }

    /// This thread no longer moves what nobody waits for, and there may be nobody else who does.
    pub(super) fn leave_to_library(&self) {
        if self.unattended.any() {
            self.kick();
        }
        self.see_out();
    }

    /// This thread may have the bell, have had it, or have been woken to take it, and does not look on, or not
    /// soon: another who sleeps takes it, if any does and none has it.
    pub(in crate::engine) fn leave_bell(&self) {
        if self.sleepers.hand_on() {
            self.leave_to_library();
        }
    }

    /// One of those who sleep looks at everything, if any does: who has the bell, or else one who takes it.
    pub(super) fn wake_mover(&self) {
        if !self.sleepers.bell_is_taken() {
            self.sleepers.wake_one();
        } else if let Some(bell) = self.bell.get() {
            // Who has it and is about to leave it finds the others afterwards.
            bell.ring();
        }
    }

    /// What an operation that is over still has to tell its peers goes out, though nobody waits here any
    /// more.
    pub(in crate::engine) fn see_out(&self) {
        if self.owes() {
            self.registration().kick();
        }
    }

    /// Whether words wait to go out that no operation waits for.
    pub(super) fn owes(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) && self.messages().owes()
    }

    /// Wakes every thread that sleeps here.
    pub fn wake(&self) {
        self.sleepers.wake_all();
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Wakes those that sleep here and may wait for anything that is not a message of their own.
    pub fn wake_any(&self) {
        // Against the sleeper: either it is counted there, or it looks after what was done before.
        fence(Ordering::SeqCst);
        self.sleepers.wake_any();
    }

    /// Something has come that is neither a link's nor a peer's: who sleeps and may wait for it looks, and so
    /// does one who moves everything, or else a thread of the library. From any thread; does not wait.
    pub fn nudge(&self) {
        self.wake_any();
        if self.sleepers.any() {
            self.wake_mover();
        }
        if !self.sleepers.any_relied_on() && self.unattended.any() {
            self.kick();
        }
    }

    /// As [`Endpoint::nudge`], for whoever looks in short intervals anyway and must not be late.
    pub fn rouse(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring_if_parked();
        }
        self.wake_any();
    }

    /// Whether ranks share processors.
    pub fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// A device has been given something that it will have done soon: whoever moves operations looks again
    /// meanwhile.
    pub fn stir(&self) {
        self.stirred.store(self.age(), Ordering::Relaxed);
    }

    /// Whether somebody looks for the last time before sleeping: whatever is not going to ring has to be told
    /// to, now.
    pub fn is_parking(&self) -> bool {
        self.sleepers.parking.load(Ordering::SeqCst) > 0
    }

    /// Nanoseconds since a device was given something.
    fn since_stirred(&self) -> u64 {
        self.age().saturating_sub(self.stirred.load(Ordering::Relaxed))
    }

    /// [`Endpoint::look`], for the last time before sleeping.
    pub(super) fn progress_parking(&self, through: Through) -> bool {
        let _parking = Counted::among(&self.sleepers.parking);
        self.look(0, through) || self.hauling.give_back(self)
    }

    /// How many threads wait, asleep or not, for something that is not on a device.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.sleepers.waiting()
    }

    /// How many threads sleep.
    #[cfg(test)]
    pub fn asleep(&self) -> usize {
        self.sleepers.count()
    }

    /// How often one has come back from that.
    #[cfg(test)]
    pub fn returns(&self) -> usize {
        self.sleepers.returns.load(Ordering::SeqCst)
    }

    /// Whether one of them has the bell.
    #[cfg(test)]
    pub fn bell_is_taken(&self) -> bool {
        self.sleepers.bell_is_taken()
    }
}
