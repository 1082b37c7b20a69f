//! What the library moves when nobody waits for it: operations that were started, and calls that streams do.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::attendant::{ATTENDANT_LOOK, Next};
use super::dormant::{CROWD, Dormant, Name};
use super::{Endpoint, Look, Through, lock};
use crate::deadline::Deadline;
use crate::engine::callbacks::is_calling_back;
use crate::engine::device::{DeviceExchange, Way};
use crate::engine::group::Group;
use crate::engine::messages::Wakes;
use crate::engine::operation::Running;
use crate::sys;
use crate::transport::service::Attendance;

/// How long a thread of the library leaves an operation to whoever began it,
const YOUNG: Duration = Duration::from_micros(100);
/// and, at most, a program that waits for all that it begins. What nobody waits for after all is late by that
/// much, once.
const LEAVE: Duration = Duration::from_millis(1);

/// How long whoever aborts waits for threads that are at what is to end: a look is short, a function of the
/// program's may not be.
const ENDING: Duration = Duration::from_millis(500);

/// How long the attendant watches another thread that moves what streams wait for, before it naps in between.
const STAND_BY: Duration = Duration::from_micros(250);

/// How soon the service thread looks again while it moves what the attendant cannot, and where another thread
/// is at it.
const STAND_IN: Duration = Duration::from_micros(200);

/// After so many looks at nothing it takes a call to look again.
const QUIET: u32 = 20;

/// A program that waits for what it begins, and needs no thread of the library.
#[derive(Default)]
pub(super) struct Leave {
    /// How many operations had begun.
    begun: usize,
    time: Duration,
}

impl Leave {
    /// How long to leave it alone, if any have begun since the last time.
    fn next(&mut self, begun: &AtomicUsize) -> Option<Duration> {
        let begun = begun.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.begun, begun) == begun {
            return None;
        }
        Some(self.longer())
    }

    /// How long to leave it alone, whatever has begun.
    fn longer(&mut self) -> Duration {
        self.time = (2 * self.time).clamp(YOUNG, LEAVE);
        self.time
    }

    /// It does need one.
    fn end(&mut self) {
        self.time = Duration::ZERO;
    }
}

/// Operations that were started and have not ended.
pub(super) struct Unattended {
    list: Mutex<List>,
    /// Who of those that lie dormant has got something.
    wakes: Arc<Wakes>,
    /// How many there are. Changed with the list locked.
    count: AtomicUsize,
    /// How many of them are on devices, which ring nobody.
    on_devices: AtomicUsize,
    /// How many there have been on the host, and on devices.
    begun: [AtomicUsize; 2],
    /// Those on the host, for the service thread.
    leave: Mutex<Leave>,
}

#[derive(Default)]
struct List {
    /// Those that each look looks at; all that are on devices are among them.
    awake: VecDeque<Arc<Running>>,
    dormant: Dormant<Arc<Running>>,
}

/// One is kept at its place as long as it is in the list.
fn name(running: &Running) -> Name {
    std::ptr::from_ref(running).addr() as u64
}

impl List {
    /// Takes one of those that are awake out, if it is there. Mostly it is among the first.
    fn take_awake(&mut self, running: &Running) -> Option<Arc<Running>> {
        let at = self.awake.iter().position(|other| std::ptr::eq(&**other, running))?;
        self.awake.remove(at)
    }

    fn take_dormant(&mut self, name: Name) {
        let taken = self.dormant.take(name);
        self.wake(taken);
    }

    fn wake(&mut self, taken: impl IntoIterator<Item = Arc<Running>>) {
        for running in taken {
            running.set_dormant(false);
            self.awake.push_back(running);
        }
    }

    /// Wakes those to which something has come, or that are due.
    fn wake_due(&mut self, wakes: &Wakes, now: Instant) {
        wakes.take().into_iter().for_each(|name| self.take_dormant(name));
        while let Some(due) = self.dormant.take_due(now) {
            self.wake([due]);
        }
    }

    /// Has those lie dormant that wait for the turn of others, but for the next after such as have theirs.
    /// Their turn wakes them.
    fn lay_down_waiting(&mut self, now: Instant) {
        let mut follows = false;
        // Each once, and those that stay keep their order.
        for _ in 0..self.awake.len() {
            let Some(running) = self.awake.pop_front() else { return };
            let active = running.is_active();
            let stays = std::mem::replace(&mut follows, active) || active || !is_grown(&running, now);
            // Against whoever wakes all of a group that has failed: that comes behind its failure.
            let fails = running.group().latched().is_some();
            if stays || fails || running.through() == Through::Device || running.gives_up(now) {
                self.awake.push_back(running);
                continue;
            }
            running.set_dormant(true);
            // Against whoever gives it its turn: either this sees that it has it, or that sees where it is.
            if running.is_active() {
                running.set_dormant(false);
                self.awake.push_back(running);
            } else {
                let due = running.gives_up_at();
                self.dormant.add(name(&running), running, due);
            }
        }
    }
}

/// Whether it was begun so long ago that whoever did does not mean to wait at once.
fn is_grown(running: &Running, now: Instant) -> bool {
    running.age_at(now) >= YOUNG
}

impl Unattended {
    /// None. `wakes` are told of by their mailboxes.
    pub(super) fn new(wakes: Arc<Wakes>) -> Unattended {
        Unattended {
            list: Mutex::default(),
            wakes,
            count: AtomicUsize::new(0),
            on_devices: AtomicUsize::new(0),
            begun: Default::default(),
            leave: Mutex::default(),
        }
    }

    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Whether any is on a device.
    pub(super) fn any_on_devices(&self) -> bool {
        self.on_devices.load(Ordering::Relaxed) > 0
    }

    /// How many are on the host alone.
    fn on_host(&self) -> usize {
        self.count.load(Ordering::Relaxed).saturating_sub(self.on_devices.load(Ordering::Relaxed))
    }

    /// How many on the host were begun so long ago that whoever did does not mean to wait at once.
    fn grown(&self) -> usize {
        let now = Instant::now();
        let grown = |running: &&Arc<Running>| running.through() != Through::Device && is_grown(running, now);
        let list = lock(&self.list);
        list.dormant.len() + list.awake.iter().filter(grown).count()
    }

    /// Whether streams wait for any. Whoever began that may do something else.
    fn any_for_streams(&self) -> bool {
        self.any_on_devices() && lock(&self.list).awake.iter().any(|running| running.streams_wait())
    }

    /// Whether any on a device is for the attendant: streams wait for it, or nobody does that began it some
    /// time ago.
    fn any_left_to_attendant(&self) -> bool {
        let left = |running: &Arc<Running>| {
            running.through() == Through::Device && (running.age() >= YOUNG || running.streams_wait())
        };
        lock(&self.list).awake.iter().any(left)
    }

    /// Whether any is of this group.
    fn any_of(&self, group: &Group) -> bool {
        let ours = |running: &Arc<Running>| std::ptr::eq(&**running.group(), group);
        let list = lock(&self.list);
        list.awake.iter().any(ours) || list.dormant.any(ours)
    }

    /// Whether any is on the host alone.
    pub(super) fn any_on_host(&self) -> bool {
        self.on_host() > 0
    }

    fn add(&self, running: Arc<Running>) {
        let mut list = lock(&self.list);
        let on_device = usize::from(running.through() == Through::Device);
        list.awake.push_back(running);
        // Under the lock: nobody takes it off the list before it is counted.
        self.count.fetch_add(1, Ordering::Relaxed);
        self.on_devices.fetch_add(on_device, Ordering::Relaxed);
        self.begun[on_device].fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self, running: &Running) {
        let mut list = lock(&self.list);
        let gone = match running.is_dormant() {
            true => list.dormant.take(name(running)),
            false => list.take_awake(running),
        };
        if gone.is_none() {
            return;
        }
        if running.through() == Through::Device {
            self.on_devices.fetch_sub(1, Ordering::Relaxed);
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// It has been looked at in vain: if all that it waits for comes to its mailbox, it lies dormant until
    /// something does.
    fn lay_down(&self, running: &Running, now: Instant) {
        if !is_grown(running, now) {
            return;
        }
        running.lie_down(name(running), |due| {
            let mut list = lock(&self.list);
            // Against whoever wakes all of a group that has failed: that comes behind its failure.
            if running.group().latched().is_some() {
                return false;
            }
            let Some(taken) = list.take_awake(running) else { return false };
            taken.set_dormant(true);
            list.dormant.add(name(running), taken, due);
            true
        });
    }

    /// When one of those on the host is to be looked at, if nothing comes for it.
    pub(super) fn next_deadline(&self) -> Deadline {
        if !self.any_on_host() {
            return Deadline::NEVER;
        }
        let list = lock(&self.list);
        let (all, due) = (list.awake.clone(), list.dormant.next_due());
        drop(list);
        let on_host = all.iter().filter(|running| running.through() != Through::Device);
        on_host.fold(due, |next, running| next.min(running.deadline()))
    }

    /// All but those that lie dormant.
    fn awake(&self) -> VecDeque<Arc<Running>> {
        lock(&self.list).awake.clone()
    }

    /// Those that may have something to do: not what waits for the turn of others, but for the next after
    /// such as have theirs. And whether there are so many that they had better lie dormant.
    fn busy(&self, now: Instant) -> (Vec<Arc<Running>>, bool) {
        let mut follows = false;
        let mut is_busy = |running: &&Arc<Running>| {
            let active = running.is_active();
            std::mem::replace(&mut follows, active) || active || running.gives_up(now)
        };
        let mut list = lock(&self.list);
        if list.dormant.len() > 0 {
            list.wake_due(&self.wakes, now);
        }
        let is_crowd = list.awake.len() > CROWD;
        if is_crowd {
            list.lay_down_waiting(now);
        }
        (list.awake.iter().filter(|running| is_busy(running)).cloned().collect(), is_crowd)
    }
}

/// Whether calls that streams do are looked after.
#[derive(Default)]
pub(super) struct Watch {
    on: AtomicBool,
    /// Looks in a row that found none of them.
    quiet: AtomicU32,
    /// When all operations on devices had last been moved, in the endpoint's age.
    moved_at: AtomicU64,
    /// Groups that nobody else holds any more, whose calls streams may still do.
    leaving: Mutex<Vec<Arc<Group>>>,
}

impl Watch {
    /// Lets go of those whose calls streams have done. Whether there are others.
    fn let_go(&self) -> bool {
        let all = lock(&self.leaving).clone();
        let (on_streams, over): (Vec<_>, Vec<_>) = all.into_iter().partition(|group| group.is_on_streams());
        lock(&self.leaving).retain(|group| !over.iter().any(|other| Arc::ptr_eq(other, group)));
        // Here, where nothing is locked, groups end.
        drop(over);
        !on_streams.is_empty()
    }
}

impl Endpoint {
    /// Has the library move an operation.
    pub fn adopt(&self, running: Arc<Running>) {
        let on_device = running.through() == Through::Device;
        self.unattended.add(running);
        if on_device {
            self.watch_devices();
        }
    }

    /// Has the library's threads see to the operations that nobody waits for.
    pub fn kick(&self) {
        // Against a thread that goes to sleep: either it sees the operation, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.needs_attendant() {
            self.attendant.engage(&self.this, self.unattended.any_for_streams());
        }
        if self.unattended.any_on_host() {
            self.registration().kick();
        }
    }

    /// An operation has ended: nobody moves it any more.
    pub fn disown(&self, running: &Running) {
        self.unattended.remove(running);
    }

    /// Whether operations of a group were started and have not ended.
    pub fn has_running(&self, group: &Group) -> bool {
        self.unattended.any_of(group)
    }

    /// How many are not looked at until something comes for them.
    #[cfg(test)]
    pub fn dormant(&self) -> usize {
        lock(&self.unattended.list).dormant.len()
    }

    /// The turn of one that lies dormant has come.
    pub fn awaken(&self, running: &Running) {
        lock(&self.unattended.list).take_dormant(name(running));
    }

    /// A group has failed: none of its operations waits for anything else.
    pub fn awaken_all(&self, group: &Group) {
        let mut list = lock(&self.unattended.list);
        let taken = list.dormant.take_all(|running| std::ptr::eq(&**running.group(), group));
        list.wake(taken);
    }

    /// Ends those of a group that has failed, so that nothing touches their memory any more, but those that may
    /// be held up in the driver. For a moment it is waited for a thread that is at one.
    pub fn end_all(&self, group: &Group) {
        let patience = Deadline::after(ENDING);
        let ours =
            |running: &&Arc<Running>| std::ptr::eq(&**running.group(), group) && !running.asks_driver();
        loop {
            // Whoever has latched the failure may not have come to that.
            self.awaken_all(group);
            let all = self.unattended.awake();
            let left = all.iter().filter(ours).filter(|running| !running.end_in_failure()).count();
            if left == 0 || patience.expired() {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.wake();
        self.see_out();
    }

    /// Moves them, those on devices only if `through` says so. Whether any has ended, or is at work. Not
    /// within a callback: callbacks of others would be called there, within each other without end. Whoever
    /// calls them goes on afterwards.
    pub(super) fn advance_running(&self, through: Through) -> bool {
        let on_devices = through == Through::Device;
        if is_calling_back() || !(self.unattended.any_on_host() || on_devices && self.unattended.any()) {
            return false;
        }
        let mut moved = false;
        let now = Instant::now();
        let (busy, is_crowd) = self.unattended.busy(now);
        for running in busy {
            if !on_devices && running.through() == Through::Device {
                continue;
            }
            let had_passed = running.has_passed();
            let look = running.advance();
            // Then another has its turn, which may not have been among these.
            moved |= look != Look::Waits || running.has_passed() != had_passed;
            if is_crowd && look == Look::Waits {
                self.unattended.lay_down(&running, now);
            }
        }
        if on_devices {
            self.watch.moved_at.store(self.age(), Ordering::Relaxed);
        }
        // For one that was laid down something may have come just before.
        moved || is_crowd && self.unattended.wakes.any()
    }

    /// Moves those on devices that need no driver, if those who move such things do not come back from it.
    /// When to look again.
    fn stand_in(&self) -> Duration {
        let left = |running: &&Arc<Running>| running.through() == Through::Device && !running.asks_driver();
        let since =
            Duration::from_nanos(self.age().saturating_sub(self.watch.moved_at.load(Ordering::Relaxed)));
        let all = self.unattended.awake();
        // Another may come back all the time that passes over what one is held up with, and over what stands
        // behind that.
        if since < 2 * ATTENDANT_LOOK && !all.iter().any(|running| running.is_held_up()) {
            return ATTENDANT_LOOK;
        }
        if !all.iter().any(|running| left(&running)) {
            return ATTENDANT_LOOK;
        }
        self.progress(0, Through::Messages);
        for running in self.unattended.awake().iter().filter(left) {
            if running.advance() != Look::Over(()) {
                running.end_in_failure();
            }
        }
        STAND_IN
    }

    // ---- what devices do

    /// A stream was given a call, or an operation on a device has begun: such are looked after until they are
    /// done. Costs next to nothing while others are.
    pub fn watch_devices(&self) {
        // Against who stops looking: either that sees the call, or this sees that it has stopped.
        fence(Ordering::SeqCst);
        if !self.watch.on.load(Ordering::Relaxed) && !self.watch.on.swap(true, Ordering::SeqCst) {
            self.attendant.engage(&self.this, false);
            self.registration().kick();
        }
    }

    /// Holds a group until streams have done its calls, which nobody else looks after.
    pub fn see_off(&self, group: Arc<Group>) {
        lock(&self.watch.leaving).push(group);
        self.watch_devices();
    }

    /// Whether there may be any.
    pub(super) fn watches_devices(&self) -> bool {
        self.watch.on.load(Ordering::SeqCst)
    }

    /// Looks at calls that streams do, and asks the driver. Whether to look again.
    pub(super) fn look_at_streams(&self) -> bool {
        if !self.watches_devices() {
            return false;
        }
        if self.look_at_exchanges() {
            self.watch.quiet.store(0, Ordering::Relaxed);
        } else if self.watch.quiet.fetch_add(1, Ordering::Relaxed) >= QUIET {
            self.watch.on.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !self.look_at_exchanges() {
                return false;
            }
            self.watch.on.store(true, Ordering::SeqCst);
            self.registration().kick();
        }
        true
    }

    /// Whether any call may not be done.
    fn look_at_exchanges(&self) -> bool {
        let mut busy = self.unattended.any_on_devices();
        for (group, exchange) in self.exchanges() {
            busy |= exchange.attend(&group);
        }
        busy | self.watch.let_go()
    }

    fn exchanges(&self) -> Vec<(Arc<Group>, Arc<DeviceExchange>)> {
        let live = lock(&self.roster).live();
        let exchange = |group: &Group| group.devices().and_then(Way::exchange).cloned();
        live.into_iter().filter_map(|group| exchange(&group).map(|exchange| (group, exchange))).collect()
    }

    /// Sees to it, without the driver, that what devices do ends, when those who ask the driver are held up
    /// there. When to look again, if at all.
    pub(super) fn oversee_devices(&self) -> Option<Instant> {
        if !self.watches_devices() {
            return None;
        }
        let mut next = ATTENDANT_LOOK;
        if self.unattended.any_on_devices() {
            for running in self.unattended.awake() {
                running.oversee();
            }
            next = self.stand_in();
        }
        if self.attendant.is_held_up() {
            for (group, exchange) in self.exchanges() {
                exchange.oversee(&group);
            }
        }
        Some(Instant::now() + next)
    }

    /// Moves operations on devices that nobody waits for until there are none, or it is time to look at calls
    /// that streams do.
    pub(super) fn attend_devices(&self, leave: &mut Leave) -> Next {
        let streams_wait = self.unattended.any_for_streams();
        if streams_wait && self.attendant.waiting() > 0 {
            self.stand_by();
            return Next::Again;
        }
        let rest = |leave: &mut Leave| leave.next(&self.unattended.begun[1]).map(Next::Leave);
        if !self.unattended.any_on_devices() || self.attendant.waiting() > 0 {
            return rest(leave).unwrap_or(Next::Rest);
        }
        if !self.unattended.any_left_to_attendant() {
            return rest(leave).unwrap_or(Next::Leave(YOUNG));
        }
        leave.end();
        let of_no_use = || !self.unattended.any_on_devices() || self.attendant.waiting() > 1;
        self.wait(Deadline::after(ATTENDANT_LOOK), Through::Device, || of_no_use().then_some(()));
        Next::Again
    }

    /// Another thread moves what streams wait for, since it waits itself. It may go at any moment, and they
    /// wait on: this is there then.
    fn stand_by(&self) {
        let begun = Instant::now();
        while self.unattended.any_on_devices() && self.attendant.waiting() > 0 {
            if begun.elapsed() >= STAND_BY || self.is_crowded() {
                std::thread::sleep(self.nap(true));
                return;
            }
            sys::process::yield_now();
        }
    }

    /// Whether streams wait for operations that nobody moves.
    pub(super) fn streams_wait(&self) -> bool {
        self.unattended.any_for_streams() && self.attendant.waiting() == 0
    }

    /// Whether the attendant moves what is on devices, on a processor of its own, unless another thread does.
    pub fn is_attended(&self) -> bool {
        self.roomy.load(Ordering::Relaxed) && self.attendant.is_awake()
    }

    /// Whether there are operations on devices, and nobody who waits for them.
    pub(super) fn needs_attendant(&self) -> bool {
        self.unattended.any_on_devices() && self.attendant.waiting() == 0
    }

    // ---- what the service thread does

    /// Moves operations on the host that nobody waits for; what is to be watched until there is more to move.
    pub(super) fn attend_running(&self) -> Attendance {
        let soon = Instant::now();
        // A thread for each of them waits, moves it, and kicks on leaving if there are any left: this one
        // would be in its way.
        let waiting = self.sleepers.waiting();
        let owes = waiting == 0 && self.owes();
        let mut leave = lock(&self.unattended.leave);
        if self.unattended.on_host() <= waiting && !owes {
            let Some(time) = leave.next(&self.unattended.begun[0]) else {
                drop(leave);
                self.remind_sleepers();
                return Attendance::Idle;
            };
            return Attendance::Leave(soon + time);
        }
        if self.unattended.grown() <= waiting && !owes {
            let time = leave.next(&self.unattended.begun[0]).unwrap_or(YOUNG);
            return Attendance::Leave(soon + time);
        }
        // One that waits moves all of them at each of its looks: this one helps only where it may be held up,
        // and never watches the bell beside it. Peers would ring for what it is about to see.
        let time = match waiting {
            0 => {
                leave.end();
                None
            }
            _ => Some(leave.longer()),
        };
        drop(leave);
        // Whoever has the messages moves everything, and may have lost its processor: waiting for it keeps
        // all ranks of the process waiting.
        let Some(messages) = self.try_messages() else { return Attendance::Again(soon + STAND_IN) };
        if self.progress_with(messages, 0, Through::Messages) {
            return match time {
                None => Attendance::Again(soon),
                Some(_) => Attendance::Leave(soon + STAND_IN),
            };
        }
        if !self.unattended.any_on_host() && !self.owes() {
            return Attendance::Idle;
        }
        let Some(bell) = self.bell.get() else { return Attendance::Idle };
        // What rings is for whoever sleeps here, who then moves everything and has this called again on
        // leaving.
        if self.sleepers.any_relied_on() {
            return Attendance::Again(self.next_look());
        }
        if let Some(time) = time {
            return Attendance::Leave(soon + time);
        }
        bell.answer();
        // Against one who has begun to sleep since: either that rang for a look of its own, or it is counted
        // here.
        fence(Ordering::SeqCst);
        if self.sleepers.any_relied_on() {
            self.wake();
            return Attendance::Again(self.next_look());
        }
        bell.prepare_park();
        if self.progress_parking(Through::Messages) {
            return Attendance::Again(soon);
        }
        Attendance::Watch(self.next_look())
    }

    /// When operations that nobody waits for are to be looked at, whatever comes.
    fn next_look(&self) -> Instant {
        Instant::now() + self.nap(false)
    }
}
