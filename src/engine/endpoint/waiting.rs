//! How a thread waits: it moves everything that it may, spins briefly, yields for a while, then sleeps.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Endpoint, Through, lock};
use crate::deadline::Deadline;
use crate::sys;
use crate::transport::bell::Bell;

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

/// Threads that wait here, and those of them that sleep: one on the bell, the others on a condition that it
/// passes on.
#[derive(Default)]
pub(super) struct Sleepers {
    /// How many wait, asleep or not, for something that is not on a device: the driver holds them up nowhere.
    waiting: AtomicUsize,
    count: AtomicUsize,
    bell: Mutex<()>,
    generation: Mutex<u64>,
    woken: Condvar,
    /// How many of them take a last look before they do.
    parking: AtomicUsize,
    /// When the last of them to fall asleep wakes by itself, in the endpoint's age; 0: nobody knows, since
    /// one has woken.
    wakes_at: AtomicU64,
}

impl Sleepers {
    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Threads that wait here for something on the host, asleep or not.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Wakes those that do not sleep on the bell.
    fn pass_on(&self) {
        *lock(&self.generation) += 1;
        self.woken.notify_all();
    }
}

/// Counts a thread among those that wait, or look for the last time, until it is dropped.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl Counted<'_> {
    pub(super) fn among(count: &AtomicUsize) -> Counted<'_> {
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
        self.follow(deadline, through, || poll().map_or(Look::Waits, Look::Over))
    }

    /// As [`Endpoint::wait`], for what `poll` itself may be at work on.
    pub fn follow<T>(
        &self,
        deadline: Deadline,
        through: Through,
        mut poll: impl FnMut() -> Look<T>,
    ) -> Option<T> {
        let mut answer = None;
        self.wait_until(deadline, through, &mut || match poll() {
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
    fn wait_until(&self, deadline: Deadline, through: Through, poll: &mut dyn FnMut() -> Look<()>) {
        let bell = self.bell.get().expect("set by `new`");
        let mut waiting = None;
        let Patience { burst, spin, yielding } = self.patience(through);
        let mut idle_since: Option<Instant> = None;
        let mut round = 0u32;
        let mut yields = false;
        loop {
            let at_work = match poll() {
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
                Through::Messages | Through::Memory => Counted::among(&self.sleepers.waiting),
            });
            if self.progress(round, through) || at_work {
                (idle_since, yields) = (None, false);
                // What others send may never cease: the deadline holds all the same. And a look at work takes
                // long, whoever waits for it.
                let long = at_work || self.unattended.any();
                if (round.is_multiple_of(64) || long) && deadline.expired() {
                    poll();
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
                    poll();
                    break;
                }
                if self.sleep(bell, deadline, through, poll) {
                    break;
                }
                // Something rang: be attentive again, but not for long.
                idle_since = Some(Instant::now() - spin);
                continue;
            }
            if round.is_multiple_of(64) && deadline.expired() {
                poll();
                break;
            }
        }
        drop(waiting);
        self.leave();
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
    /// is over.
    fn sleep(
        &self,
        bell: &Bell,
        deadline: Deadline,
        through: Through,
        poll: &mut dyn FnMut() -> Look<()>,
    ) -> bool {
        self.sleepers.count.fetch_add(1, Ordering::SeqCst);
        // Before the bell is found taken: whoever has it passes on after leaving it. And before what is
        // looked at for the nap: see `remind_sleepers`.
        let before = *lock(&self.sleepers.generation);
        let nap = deadline.remaining_capped(self.nap(through == Through::Device));
        self.sleepers.wakes_at.store(self.age().saturating_add(nap.as_nanos() as u64), Ordering::SeqCst);
        let mut last_look = || {
            let _parking = Counted::among(&self.sleepers.parking);
            poll()
        };
        let look = match self.sleepers.bell.try_lock() {
            Ok(_sleeping) => {
                bell.prepare_park();
                let look = last_look();
                if look != Look::Waits || self.progress_parking(through) {
                    bell.cancel_park();
                } else {
                    let mut events = Vec::new();
                    if let Err(error) = bell.park(Some(nap), &mut events) {
                        log::error!("the bell cannot be waited for: {error}");
                    }
                    self.serve(&events);
                }
                look
            }
            Err(_) => {
                let look = last_look();
                if look == Look::Waits {
                    let generation = lock(&self.sleepers.generation);
                    let unchanged = |now: &mut u64| *now == before;
                    drop(self.sleepers.woken.wait_timeout_while(generation, nap, unchanged));
                }
                look
            }
        };
        self.sleepers.wakes_at.store(0, Ordering::SeqCst);
        self.sleepers.count.fetch_sub(1, Ordering::SeqCst);
        if self.sleepers.count.load(Ordering::SeqCst) > 0 {
            self.sleepers.pass_on();
        }
        look == Look::Over(())
    }

    /// An operation that is left to those who wait here may be due before any of them wakes, who has looked
    /// before there was that.
    pub(super) fn remind_sleepers(&self) {
        let wakes = match self.sleepers.wakes_at.load(Ordering::SeqCst) {
            0 => Deadline::NEVER,
            moment => Deadline::since(self.born, Duration::from_nanos(moment)),
        };
        if self.unattended.next_deadline().precedes(wakes) {
            self.wake();
        }
    }

    /// Whoever ends a wait leaves the others able to go on.
    fn leave(&self) {
        if self.sleepers.any() {
            self.wake();
        }
        if self.unattended.any() {
            self.kick();
        }
        self.see_out();
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
        self.sleepers.pass_on();
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Something has come that is neither a link's nor a peer's: whoever sleeps looks, or else a thread of
    /// the library does. From any thread; does not wait.
    pub fn nudge(&self) {
        // Against the sleeper: either it is counted here, or it looks after what is told here.
        fence(Ordering::SeqCst);
        if self.sleepers.count.load(Ordering::SeqCst) > 0 {
            self.wake();
        } else if self.unattended.any() {
            self.kick();
        }
    }

    /// As [`Endpoint::nudge`], for whoever looks in short intervals anyway and must not be late.
    pub fn rouse(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring_if_parked();
        }
        if self.sleepers.count.load(Ordering::SeqCst) > 1 {
            self.sleepers.pass_on();
        }
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

    /// [`Endpoint::progress`], for the last time before sleeping.
    pub(super) fn progress_parking(&self, through: Through) -> bool {
        let _parking = Counted::among(&self.sleepers.parking);
        self.progress(0, through) || self.hauling.give_back(self)
    }
}
