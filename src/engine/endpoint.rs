//! A rank's presence in a job: its links, its operations under way, and where its threads wait.
//!
//! Whoever waits moves everything: the waiting thread reads and writes the links, advances its own operation and those
//! that nobody waits for. It spins briefly, yields for a while, then sleeps on the bell. The service thread of the
//! process steps in only for operations that nobody waits for.

use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::control::{Answer, Control};
use super::device::{DeviceExchange, Way};
use super::direct::Retired;
use super::group::Group;
use super::messages::{Messages, Mismatch, Trouble};
use super::operation::Running;
use super::recorder::Recorder;
use super::wire::Class;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::rendezvous::store::Store;
use crate::sys;
use crate::transport::Link;
use crate::transport::address::PeerAddress;
use crate::transport::bell::Bell;
use crate::transport::service::{Attendance, Identity, Options, Port, Registration};

/// How many failures of groups that are not here are kept.
const REMEMBERED: usize = 256;

/// How long a waiter is attentive before it sleeps. Yielding costs a fraction of a microsecond when nobody else is
/// ready, so it is hardly slower than spinning; and when the awaited rank shares the processor, each microsecond of
/// spinning is lost.
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

/// The same, for a device to do what it was given. Its word through a sleeper's bell takes long, and after a pause the
/// device's own first answers do.
const DEVICE: Patience = Patience { yielding: Duration::from_micros(250), ..ROOMY };

/// A sleeper looks up at least this often: a guard against a lost wake-up, not a way of working.
const NAP: Duration = Duration::from_millis(500);

/// A sleeper looks whether a device is done after an eighth of the time that it has had, within these bounds.
const DEVICE_NAP: RangeInclusive<Duration> = Duration::from_micros(50)..=Duration::from_millis(1);

/// A rank that is asked what it does tells what the kernel has refused it in this time.
const RECENT: Duration = Duration::from_secs(60);

/// Up to this many TCP peers are read directly while spinning; beyond, the kernel is asked which are ready.
const DIRECT_READS: usize = 3;

/// A rank's presence in a job.
pub struct Endpoint {
    this: Weak<Endpoint>,
    identity: Identity,
    options: Options,
    registration: OnceLock<Registration>,
    bell: OnceLock<Arc<Bell>>,
    recorder: OnceLock<Recorder>,
    messages: Mutex<Messages>,
    addresses: Mutex<HashMap<u32, PeerAddress>>,
    groups: Mutex<Groups>,
    running: Mutex<Vec<Arc<Running>>>,
    running_count: AtomicUsize,
    /// How many of them wait for devices, which ring nobody.
    on_devices: AtomicUsize,
    /// Whether any peer has left or is lost.
    lost_any: AtomicBool,
    crowded: AtomicBool,
    sleepers: Sleepers,
    /// Threads that take a last look before they sleep.
    parking: AtomicUsize,
    /// When this was made, and how many nanoseconds later a device was last given something.
    born: Instant,
    stirred: AtomicU64,
    /// What was asked, and what was answered.
    answers: Mutex<HashMap<u64, Option<Answer>>>,
    next_token: AtomicU64,
    store: OnceLock<Arc<dyn Store>>,
    retired: Arc<Retired>,
    /// Whether calls that streams do are looked after.
    watches_devices: AtomicBool,
    /// Looks in a row that found none of them.
    quiet: AtomicU32,
    fork: u32,
}

#[derive(Default)]
struct Groups {
    live: HashMap<u64, Weak<Group>>,
    /// Failures of groups that this rank has not made yet, or has no more. The oldest give way.
    early: VecDeque<(u64, Error)>,
    /// Failed groups that are gone here, whose members may not have heard of it. The oldest give way.
    ended: VecDeque<(u64, Arc<[u32]>, Error)>,
    /// Peers that are dead: groups made later must not wait for them.
    lost: HashMap<u32, Error>,
}

/// Threads that sleep here. One of them sleeps on the bell, the others on a condition that it passes on.
#[derive(Default)]
struct Sleepers {
    count: AtomicUsize,
    bell: Mutex<()>,
    generation: Mutex<u64>,
    woken: Condvar,
}

/// How a waiter's condition comes true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Through {
    /// By messages: look at the links every time.
    Messages,
    /// By shared memory: look at the links now and then.
    Memory,
    /// By a device or by messages: do not sleep soon.
    Device,
}

impl Endpoint {
    /// Listens and is reachable; knows no peer yet.
    pub fn new(identity: Identity, options: Options) -> Result<Arc<Endpoint>> {
        let endpoint = Arc::new_cyclic(|this| Endpoint {
            this: this.clone(),
            identity: identity.clone(),
            options: options.clone(),
            registration: OnceLock::new(),
            bell: OnceLock::new(),
            recorder: OnceLock::new(),
            messages: Mutex::new(Messages::new(identity.rank, identity.size)),
            addresses: Mutex::new(HashMap::new()),
            groups: Mutex::default(),
            running: Mutex::default(),
            running_count: AtomicUsize::new(0),
            on_devices: AtomicUsize::new(0),
            lost_any: AtomicBool::new(false),
            crowded: AtomicBool::new(false),
            sleepers: Sleepers::default(),
            parking: AtomicUsize::new(0),
            born: Instant::now(),
            stirred: AtomicU64::new(0),
            answers: Mutex::default(),
            next_token: AtomicU64::new(1),
            store: OnceLock::new(),
            retired: Arc::default(),
            watches_devices: AtomicBool::new(false),
            quiet: AtomicU32::new(0),
            fork: sys::fork::generation(),
        });
        let port = Arc::downgrade(&endpoint) as Weak<dyn Port>;
        let registration = Registration::new(identity, options, port)?;
        let _ = endpoint.bell.set(registration.bell().clone());
        let _ = endpoint.recorder.set(Recorder::new(registration.segment().clone()));
        let _ = endpoint.registration.set(registration);
        Ok(endpoint)
    }

    /// This rank in the job.
    pub fn rank(&self) -> u32 {
        self.identity.rank
    }

    /// The ranks of the job.
    pub fn size(&self) -> u32 {
        self.identity.size
    }

    /// Who this rank is, and how it links to others.
    pub fn identity(&self) -> (&Identity, &Options) {
        (&self.identity, &self.options)
    }

    /// The presence in the service.
    ///
    /// # Panics
    /// Never: `new` sets it before anybody sees the endpoint.
    pub fn registration(&self) -> &Registration {
        self.registration.get().expect("set by `new`")
    }

    /// This rank's flight recorder.
    pub fn recorder(&self) -> &Recorder {
        self.recorder.get().expect("set by `new`")
    }

    /// All transfers, locked.
    pub fn messages(&self) -> MutexGuard<'_, Messages> {
        lock(&self.messages)
    }

    /// Where a launcher may have written how a rank ended.
    pub fn watch_exits(&self, store: Arc<dyn Store>) {
        let _ = self.store.set(store);
    }

    /// Where `peer` is reached.
    pub fn learn(&self, address: PeerAddress) {
        lock(&self.addresses).insert(address.rank, address);
    }

    /// `rank 3 (host node7, pid 4711)`, as far as it is known.
    pub fn describe(&self, peer: u32) -> String {
        lock(&self.addresses).get(&peer).map_or_else(|| format!("rank {peer}"), PeerAddress::describe)
    }

    /// The host's name of a peer.
    pub fn hostname(&self, peer: u32) -> String {
        lock(&self.addresses).get(&peer).map_or_else(|| "?".into(), |address| address.hostname.clone())
    }

    /// What tells the host of `peer` from others, if its address is known.
    pub fn host(&self, peer: u32) -> Option<[u8; 16]> {
        lock(&self.addresses).get(&peer).map(|address| address.host)
    }

    /// Whether `peer` runs on this host, as its address says.
    pub fn is_local(&self, peer: u32) -> bool {
        lock(&self.addresses)
            .get(&peer)
            .is_some_and(|address| address.host == self.registration().address().host)
    }

    /// Whether this rank links through shared memory where it can.
    pub fn shares_memory(&self) -> bool {
        self.options.shm
    }

    /// Whether any peer has left or is lost, this job long.
    pub fn has_lost_any(&self) -> bool {
        self.lost_any.load(Ordering::Relaxed)
    }

    /// Boards of groups that are gone.
    pub fn retired(&self) -> &Arc<Retired> {
        &self.retired
    }

    /// Opens the links to `peers` and waits until they are there.
    pub fn open_links(&self, peers: &[u32], deadline: Deadline) -> Result<()> {
        let mut messages = self.messages();
        for &peer in peers {
            messages.want(peer);
        }
        drop(messages);
        self.settle();
        let answer = self.wait(deadline, Through::Messages, || {
            let messages = self.messages();
            if let Some(&peer) = peers.iter().find(|&&peer| messages.gone(peer)) {
                return Some(Err(peer));
            }
            peers.iter().all(|&peer| messages.linked(peer)).then_some(Ok(()))
        });
        match answer {
            Some(Ok(())) => Ok(()),
            Some(Err(peer)) => match lock(&self.groups).lost.get(&peer) {
                Some(why) => Err(why.clone()),
                None => fail!(PeerFailed, "{} has left", self.describe(peer)),
            },
            None => {
                let messages = self.messages();
                let missing = peers.iter().copied().find(|&peer| !messages.linked(peer));
                drop(messages);
                let missing = missing.map_or_else(String::new, |peer| self.describe(peer));
                fail!(Timeout, "no link to {missing} in time; look at it, or raise timeout_ms")
            }
        }
    }

    /// Says how many ranks of this host wait at the same time, so that waiters know whether to make way.
    pub fn share_host(&self, ranks: usize) {
        self.crowded.store(ranks > sys::process::usable_cpus(), Ordering::Relaxed);
    }

    /// Refuses to work in the child of a fork: the links belong to the parent.
    pub fn check_fork(&self) -> Result<()> {
        if self.fork != sys::fork::generation() {
            fail!(
                InvalidUsage,
                "this context was made before a fork: the child has no links. Make contexts after forking"
            );
        }
        Ok(())
    }

    // ---- groups

    /// Makes a group known, so that failures reach it. A failure that came before it is its failure.
    pub fn enrol(&self, group: &Arc<Group>) {
        let mut groups = lock(&self.groups);
        groups.live.insert(group.id(), Arc::downgrade(group));
        let early = groups.early.iter().position(|(id, _)| *id == group.id());
        let early = early.and_then(|index| groups.early.remove(index)).map(|(_, error)| error);
        let lost = group.members().iter().find_map(|peer| groups.lost.get(peer)).cloned();
        drop(groups);
        if let Some(error) = early.or(lost) {
            group.fail(error);
        }
    }

    /// Forgets a group, but not at once that it failed.
    pub fn dismiss(&self, group: &Group) {
        let mut groups = lock(&self.groups);
        groups.live.remove(&group.id());
        if let Some(error) = group.failure() {
            remember(&mut groups.ended, (group.id(), group.members().clone(), error));
        }
    }

    /// Tells a peer whose link has just opened of the failures that it could not hear of before.
    fn report(&self, peer: u32) {
        let groups = lock(&self.groups);
        let live: Vec<_> = groups.live.values().filter_map(Weak::upgrade).collect();
        let mut failures: Vec<(u64, Error)> = groups
            .ended
            .iter()
            .filter(|(_, members, _)| members.contains(&peer))
            .map(|(id, _, error)| (*id, error.clone()))
            .collect();
        drop(groups);
        for group in live {
            if let (Some(_), Some(error)) = (group.rank_of(peer), group.failure()) {
                failures.push((group.id(), error));
            }
        }
        for (group, error) in failures {
            self.registration().send_control(peer, &Control::Failure { group, error }.encode());
        }
    }

    fn group(&self, id: u64) -> Option<Arc<Group>> {
        lock(&self.groups).live.get(&id).and_then(Weak::upgrade)
    }

    /// Tells the members of a group that it has failed.
    pub fn spread(&self, group: &Group, error: &Error) {
        let message = Control::Failure { group: group.id(), error: error.clone() }.encode();
        let peers: Vec<u32> = self.messages().open_peers().to_vec();
        for peer in peers {
            if group.members().contains(&peer) {
                self.registration().send_control(peer, &message);
            }
        }
        self.wake();
    }

    // ---- operations that nobody waits for

    /// Has the library move an operation.
    pub fn adopt(&self, running: Arc<Running>) {
        let mut list = lock(&self.running);
        if running.through() == Through::Device {
            self.on_devices.fetch_add(1, Ordering::Relaxed);
        }
        list.push(running);
        // Under the lock: nobody takes it off the list before it is counted.
        self.running_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the service thread see to the operations that nobody waits for.
    pub fn kick(&self) {
        self.registration().kick();
    }

    /// An operation has ended: nobody moves it any more.
    pub fn disown(&self, running: &Running) {
        let mut list = lock(&self.running);
        let before = list.len();
        list.retain(|other| !std::ptr::eq(&**other, running));
        let gone = before - list.len();
        self.running_count.fetch_sub(gone, Ordering::Relaxed);
        if running.through() == Through::Device {
            self.on_devices.fetch_sub(gone, Ordering::Relaxed);
        }
    }

    fn advance_running(&self) -> bool {
        if self.running_count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let candidates: Vec<Arc<Running>> = lock(&self.running).clone();
        let mut moved = false;
        for running in candidates {
            if running.advance() {
                moved = true;
                self.disown(&running);
            }
        }
        moved
    }

    // ---- what streams do

    /// A stream was given a call: it is looked after until it is done. Costs next to nothing while others are.
    pub fn watch_devices(&self) {
        if !self.watches_devices.load(Ordering::Relaxed) && !self.watches_devices.swap(true, Ordering::SeqCst)
        {
            self.kick();
        }
    }

    /// Looks after calls that streams do; when to look again, if at all.
    fn attend_devices(&self) -> Option<Instant> {
        if !self.watches_devices.load(Ordering::SeqCst) {
            return None;
        }
        if self.look_at_devices() {
            self.quiet.store(0, Ordering::Relaxed);
        } else if self.quiet.fetch_add(1, Ordering::Relaxed) >= QUIET {
            self.watches_devices.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !self.look_at_devices() {
                return None;
            }
            self.watches_devices.store(true, Ordering::SeqCst);
        }
        Some(Instant::now() + LOOK)
    }

    /// Whether any may not be done.
    fn look_at_devices(&self) -> bool {
        let live: Vec<Arc<Group>> = lock(&self.groups).live.values().filter_map(Weak::upgrade).collect();
        let exchange = |group: &Arc<Group>| group.devices().and_then(Way::exchange).cloned();
        let mut busy = false;
        for group in &live {
            let exchange: Option<Arc<DeviceExchange>> = exchange(group);
            busy |= exchange.is_some_and(|exchange| exchange.attend(group));
        }
        busy
    }

    // ---- waiting

    /// Waits until `poll` answers, moving everything meanwhile; `None` when the deadline has passed.
    pub fn wait<T>(
        &self,
        deadline: Deadline,
        through: Through,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let bell = self.bell.get().expect("set by `new`");
        let Patience { burst, spin, yielding } = match through {
            _ if self.crowded.load(Ordering::Relaxed) => CROWDED,
            Through::Device => DEVICE,
            Through::Messages | Through::Memory => ROOMY,
        };
        let mut idle_since: Option<Instant> = None;
        let mut round = 0u32;
        let mut yields = false;
        let answer = loop {
            if let Some(answer) = poll() {
                break Some(answer);
            }
            round = round.wrapping_add(1);
            if through == Through::Memory && !round.is_multiple_of(burst) && !yields {
                std::hint::spin_loop();
                continue;
            }
            if self.progress(round) {
                (idle_since, yields) = (None, false);
                // What others send may never cease: the deadline holds all the same.
                if round.is_multiple_of(64) && deadline.expired() {
                    break poll();
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
                    break poll();
                }
                if let Some(answer) = self.sleep(bell, deadline, through, &mut poll) {
                    break Some(answer);
                }
                // Something rang: be attentive again, but not for long.
                idle_since = Some(Instant::now() - spin);
                continue;
            }
            if round.is_multiple_of(64) && deadline.expired() {
                break poll();
            }
        };
        self.leave();
        answer
    }

    /// How long a sleeper sleeps at most: not long where a device rings nobody when it is done.
    fn nap(&self, on_device: bool) -> Duration {
        if !on_device && self.on_devices.load(Ordering::Relaxed) == 0 {
            return NAP;
        }
        let since = Duration::from_nanos(self.since_stirred());
        (since / 8).clamp(*DEVICE_NAP.start(), *DEVICE_NAP.end())
    }

    /// Sleeps until something may have changed. An answer that came at the last moment is returned.
    fn sleep<T>(
        &self,
        bell: &Bell,
        deadline: Deadline,
        through: Through,
        poll: &mut impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let nap = deadline.remaining_capped(self.nap(through == Through::Device));
        self.sleepers.count.fetch_add(1, Ordering::SeqCst);
        let mut last_look = || {
            let _parking = Parking::begin(self);
            poll()
        };
        let answer = match self.sleepers.bell.try_lock() {
            Ok(_sleeping) => {
                bell.prepare_park();
                let answer = last_look();
                if answer.is_some() || self.progress_parking() {
                    bell.cancel_park();
                    answer
                } else {
                    let mut events = Vec::new();
                    if let Err(error) = bell.park(Some(nap), &mut events) {
                        log::error!("the bell cannot be waited for: {error}");
                    }
                    self.serve(&events);
                    None
                }
            }
            Err(_) => {
                let generation = lock(&self.sleepers.generation);
                let before = *generation;
                drop(generation);
                let answer = last_look();
                if answer.is_none() {
                    let generation = lock(&self.sleepers.generation);
                    let unchanged = |now: &mut u64| *now == before;
                    drop(self.sleepers.woken.wait_timeout_while(generation, nap, unchanged));
                }
                answer
            }
        };
        self.sleepers.count.fetch_sub(1, Ordering::SeqCst);
        if self.sleepers.count.load(Ordering::SeqCst) > 0 {
            self.pass_on();
        }
        answer
    }

    /// Whoever ends a wait leaves the others able to go on.
    fn leave(&self) {
        if self.sleepers.count.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
        if self.running_count.load(Ordering::Relaxed) > 0 {
            self.kick();
        }
    }

    /// Wakes every thread that sleeps here.
    pub fn wake(&self) {
        self.pass_on();
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Something has come that is neither a link's nor a peer's: whoever sleeps looks, or else the service thread does.
    /// From any thread; does not wait.
    pub fn nudge(&self) {
        // Against the sleeper: either it is counted here, or it looks after what is told here.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleepers.count.load(Ordering::SeqCst) > 0 {
            self.wake();
        } else if self.running_count.load(Ordering::SeqCst) > 0 {
            self.kick();
        }
    }

    /// As [`Endpoint::nudge`], for whoever looks in short intervals anyway and must not be late.
    pub fn rouse(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring_if_parked();
        }
        if self.sleepers.count.load(Ordering::SeqCst) > 1 {
            self.pass_on();
        }
    }

    /// Whether ranks share processors.
    pub fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// A device has been given something that it will have done soon: whoever moves operations looks again meanwhile.
    pub fn stir(&self) {
        self.stirred.store(self.born.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Whether somebody looks for the last time before sleeping: whatever is not going to ring has to be told to, now.
    pub fn is_parking(&self) -> bool {
        self.parking.load(Ordering::SeqCst) > 0
    }

    /// Whether a device was given something just now, and there are processors to look for its end.
    fn is_stirred(&self) -> bool {
        u128::from(self.since_stirred()) < DEVICE.yielding.as_nanos() && !self.crowded.load(Ordering::Relaxed)
    }

    /// Nanoseconds since a device was given something.
    fn since_stirred(&self) -> u64 {
        let now = self.born.elapsed().as_nanos() as u64;
        now.saturating_sub(self.stirred.load(Ordering::Relaxed))
    }

    /// [`Endpoint::progress`], for the last time before sleeping.
    fn progress_parking(&self) -> bool {
        let _parking = Parking::begin(self);
        self.progress(0)
    }

    fn pass_on(&self) {
        *lock(&self.sleepers.generation) += 1;
        self.sleepers.woken.notify_all();
    }

    /// Moves what can be moved now. Whether anything moved.
    pub fn progress(&self, round: u32) -> bool {
        let mut messages = self.messages();
        let mut moved = false;
        let mut tcp = 0;
        for index in (0..messages.open_peers().len()).rev() {
            let Some(&peer) = messages.open_peers().get(index) else { continue };
            if messages.polls(peer) {
                moved |= messages.progress(peer);
            } else if messages.expected(peer) > 0 && tcp < DIRECT_READS {
                tcp += 1;
                moved |= messages.progress(peer);
            }
        }
        let any_tcp = messages.tcp_links() > 0;
        drop(messages);
        if any_tcp
            && !moved
            && round.is_multiple_of(16)
            && let Some(bell) = self.bell.get()
        {
            let mut events = Vec::new();
            if bell.poll(&mut events).is_ok() {
                moved |= self.serve(&events);
            }
        }
        self.settle();
        moved |= self.advance_running();
        if moved && self.sleepers.count.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
        moved
    }

    /// Moves the links that the kernel says are ready.
    fn serve(&self, events: &[(u64, crate::transport::bell::Ready)]) -> bool {
        if events.is_empty() {
            return false;
        }
        let mut messages = self.messages();
        let mut moved = false;
        for (token, _) in events {
            moved |= messages.serve((token >> 8) as u32);
        }
        drop(messages);
        self.settle();
        moved
    }

    /// Does what the messages asked for: opens links, watches descriptors, spreads failures. Without their lock.
    pub fn settle(&self) {
        let mut messages = self.messages();
        if let Some(bell) = self.bell.get() {
            messages.watch(bell);
        }
        if messages.wanted.is_empty() && messages.troubles.is_empty() {
            return;
        }
        let wanted = std::mem::take(&mut messages.wanted);
        let troubles = std::mem::take(&mut messages.troubles);
        drop(messages);
        for peer in wanted {
            let address = lock(&self.addresses).get(&peer).cloned();
            if let Some(address) = address {
                // A link that is needed is needed by an operation, which has its own deadline.
                self.registration().open(address, Deadline::after(Duration::from_secs(60)));
            }
        }
        for trouble in troubles {
            match trouble {
                Trouble::Mismatch(mismatch) => self.differ(&mismatch),
                Trouble::Broken { peer, why } => {
                    let text = format!("the link to {} broke: {why}", self.describe(peer));
                    self.registration().doubt(peer, Error::new(Status::PeerFailed, text));
                }
            }
        }
    }

    fn differ(&self, mismatch: &Mismatch) {
        let Some(group) = self.group(mismatch.key.group) else { return };
        let error = group.explain(mismatch, self.recorder());
        if mismatch.key.class == Class::PointToPoint {
            log::warn!("{error}");
        } else {
            group.fail(error);
        }
    }

    /// A peer is lost. Where a launcher may know how it ended, it is asked first, on a thread of its own: that takes a
    /// while, and this may be the service thread, or one that waits for something else.
    fn lose(&self, peer: u32, why: Error) {
        let this = self.store.get().and_then(|_| self.this.upgrade());
        let asked = this.is_some_and(|this| {
            let why = why.clone();
            let ask = move || {
                let told = this.exit_cause(peer);
                let text = told.map(|cause| format!("{} {cause}", this.describe(peer)));
                this.lost(peer, text.map_or(why, |text| Error::new(Status::PeerFailed, text)));
            };
            std::thread::Builder::new().name("unisono-exit".into()).spawn(ask).is_ok()
        });
        if !asked {
            self.lost(peer, why);
        }
    }

    /// Ends a link that is of no use here, so that the peer learns of it.
    fn hang_up(&self, peer: u32, why: &Error) {
        let text = format!("rank {} has given up this link: {}", self.rank(), why.text());
        self.registration().hang_up(peer, &Error::new(Status::PeerFailed, text));
    }

    fn lost(&self, peer: u32, why: Error) {
        self.messages().link_lost(peer, why.clone());
        self.lost_any.store(true, Ordering::Relaxed);
        let mut groups = lock(&self.groups);
        groups.lost.entry(peer).or_insert_with(|| why.clone());
        let affected: Vec<_> = groups.live.values().filter_map(Weak::upgrade).collect();
        drop(groups);
        for group in affected {
            if group.rank_of(peer).is_some() {
                group.fail(group.lost(peer, why.clone()));
            }
        }
        // The peer may have opened its side, or think it still has one.
        self.hang_up(peer, &why);
        self.wake();
    }

    /// How the launcher says that a rank ended, if it tells.
    fn exit_cause(&self, peer: u32) -> Option<String> {
        let store = self.store.get()?;
        // The launcher hears of the death a moment after the socket does.
        for _ in 0..10 {
            if let Ok(Some(cause)) = store.try_get(&format!("exit/{peer}")) {
                return Some(String::from_utf8_lossy(&cause).into_owned());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// Asks `peers` what they did last in `group`; a token for each. The answers come through the service thread.
    pub fn ask(&self, group: &Group, peers: impl Iterator<Item = u32>) -> Vec<u64> {
        peers
            .map(|peer| {
                let token = self.next_token.fetch_add(1, Ordering::Relaxed);
                lock(&self.answers).insert(token, None);
                let query = Control::Query { group: group.id(), token };
                self.registration().send_control(peer, &query.encode());
                token
            })
            .collect()
    }

    /// What this rank is doing in a group.
    fn report_call(&self, group: u64) -> Answer {
        let (last, running) = (self.recorder().last(group), self.recorder().running(group));
        let text = match (&last, &running) {
            (Some(last), Some(running)) if last != running => {
                format!("its last call is {last}, behind {running}")
            }
            (Some(last), _) => format!("its last call is {last}"),
            (None, _) => "it has called nothing yet".to_string(),
        };
        let waits_for = running.and_then(|running| running.waits_for);
        Answer { waits: running.is_some(), waits_for, text: self.with_refusal(text, RECENT) }
    }

    /// `text`, and what the kernel has refused this rank lately: it may be why nothing comes.
    pub fn with_refusal(&self, text: String, within: Duration) -> String {
        match self.registration().refusal(within) {
            Some(refusal) => format!("{text}; {refusal}"),
            None => text,
        }
    }

    /// Whether there is an answer for every token; then, whether each is of a rank that may wait itself.
    pub fn have_answered(&self, tokens: &[u64]) -> Option<bool> {
        let answers = lock(&self.answers);
        let answered: Option<Vec<&Answer>> =
            tokens.iter().map(|token| answers.get(token).and_then(Option::as_ref)).collect();
        answered.map(|answers| !answers.is_empty() && answers.iter().all(|answer| answer.waits))
    }

    /// What they say, or `None` for those who have not answered. Ends the question.
    pub fn answers(&self, tokens: &[u64]) -> Vec<Option<Answer>> {
        let mut answers = lock(&self.answers);
        tokens.iter().map(|token| answers.remove(token).flatten()).collect()
    }
}

/// Counts a thread among those that look for the last time.
struct Parking<'a>(&'a AtomicUsize);

impl Parking<'_> {
    fn begin(endpoint: &Endpoint) -> Parking<'_> {
        endpoint.parking.fetch_add(1, Ordering::SeqCst);
        Parking(&endpoint.parking)
    }
}

impl Drop for Parking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Port for Endpoint {
    fn link_opened(&self, peer: u32, link: Link) {
        let mut messages = self.messages();
        messages.link_opened(peer, link);
        let gone = messages.gone(peer);
        drop(messages);
        self.report(peer);
        if gone {
            // Given up before the peer had opened its side: it must not wait.
            let why = lock(&self.groups).lost.get(&peer).cloned();
            self.hang_up(peer, &why.unwrap_or_else(|| Error::new(Status::PeerFailed, "it was too late")));
            return;
        }
        self.settle();
        self.wake();
    }

    fn link_refused(&self, peer: u32, why: Error) {
        self.lose(peer, why);
    }

    fn peer_left(&self, peer: u32) {
        self.messages().peer_left(peer);
        self.lost_any.store(true, Ordering::Relaxed);
        self.wake();
    }

    fn peer_lost(&self, peer: u32, why: Error) {
        self.lose(peer, why);
    }

    fn control(&self, peer: u32, message: &[u8]) {
        match Control::decode(message) {
            Some(Control::Failure { group, error }) => match self.group(group) {
                Some(group) => group.fail(error),
                None => {
                    let early = &mut lock(&self.groups).early;
                    if early.iter().all(|(id, _)| *id != group) {
                        remember(early, (group, error));
                    }
                }
            },
            Some(Control::Query { group, token }) => {
                let answer = self.report_call(group);
                self.registration().send_control(peer, &Control::Answer { token, answer }.encode());
            }
            Some(Control::Answer { token, answer }) => {
                if let Some(place) = lock(&self.answers).get_mut(&token) {
                    *place = Some(answer);
                }
                self.wake();
            }
            Some(Control::Call { key, signature }) => {
                if let Some(group) = self.group(key.group) {
                    group.hear(peer, key, signature);
                }
            }
            None => log::warn!("{} sent a control message of another version", self.describe(peer)),
        }
    }

    fn attend(&self) -> Attendance {
        let look = self.attend_devices();
        match (self.attend_running(), look) {
            (attendance, None) => attendance,
            (Attendance::Idle, Some(look)) => Attendance::Again(look),
            (Attendance::Again(at), Some(look)) => Attendance::Again(at.min(look)),
            (Attendance::Watch(at), Some(look)) => Attendance::Watch(at.min(look)),
        }
    }
}

impl Endpoint {
    fn attend_running(&self) -> Attendance {
        if self.running_count.load(Ordering::Relaxed) == 0 {
            return Attendance::Idle;
        }
        let soon = Instant::now();
        if self.progress(0) {
            return Attendance::Again(soon);
        }
        if self.running_count.load(Ordering::Relaxed) == 0 {
            return Attendance::Idle;
        }
        if self.is_stirred() {
            return Attendance::Again(soon);
        }
        let Some(bell) = self.bell.get() else { return Attendance::Idle };
        bell.prepare_park();
        if self.progress_parking() {
            return Attendance::Again(soon);
        }
        let next = lock(&self.running).iter().filter_map(|running| running.deadline().remaining()).min();
        let nap = self.nap(false);
        Attendance::Watch(soon + next.unwrap_or(nap).min(nap))
    }
}

/// How often calls that streams do are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// After so many looks at nothing it takes a call to look again.
const QUIET: u32 = 20;

fn remember<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == REMEMBERED {
        list.pop_front();
    }
    list.push_back(item);
}

/// Locks, also after a panic elsewhere: what the locks guard is kept consistent between statements that can panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
