//! A rank's presence in a job: its links, its operations under way, and where its threads wait.
//!
//! Whoever waits moves everything: the waiting thread reads and writes the links, advances its own operation
//! and those that nobody waits for; those on devices only if it waits for one itself, since the driver may
//! keep it for long. It spins briefly, yields for a while, then sleeps on the bell. The service thread of the
//! process steps in only for operations on the host that nobody waits for, and the attendant for those on
//! devices.

mod attendant;
mod away;
mod dormant;
mod port;
mod questions;
mod roster;
mod sleepers;
mod unattended;
mod visitor;
mod waiting;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use attendant::Attendant;
pub use away::Away;
pub use questions::Asked;
use questions::Questions;
use roster::Roster;
pub use sleepers::Sleeper;
use sleepers::Sleepers;
use unattended::{Unattended, Watch};
pub use visitor::Visitor;
pub use waiting::Look;

use super::control::Control;
use super::direct::Retired;
use super::group::{Group, Numbers};
use super::hauling::Hauling;
use super::joint::{Alone, Team};
use super::messages::{Messages, Mismatch, Trouble};
use super::operation::LAST_WORDS;
use super::recorder::Recorder;
use super::wire::Class;
use crate::deadline::Deadline;
use crate::error::{Error, Result, Status, fail};
use crate::rendezvous::store::Store;
use crate::signature::Making;
use crate::sys;
use crate::sys::process;
use crate::transport::address::PeerAddress;
use crate::transport::bell::Bell;
use crate::transport::service::{Announced, Identity, Options, Port, Registration};

/// A rank that is asked what it does, or that waits for one that has left, tells what it has been refused in
/// this time.
pub const RECENT: Duration = Duration::from_secs(60);

/// How long who leaves waits for room for what it owes others. In the library's own tests those may be late
/// on a busy machine.
const OWED: Duration = if cfg!(test) { Duration::from_secs(5) } else { Duration::from_millis(250) };

/// Up to this many TCP peers are read directly while spinning; beyond, the kernel is asked which are ready.
const DIRECT_READS: usize = 3;

/// How long whoever has failed waits until that is said to the others, before its caller hears of it, who may
/// end the process without a goodbye. In tests so long that none takes a machine that is slow for one that
/// does not wait.
pub const TELLING: Duration = if cfg!(test) { Duration::from_secs(5) } else { Duration::from_millis(50) };

/// A rank's presence in a job.
pub struct Endpoint {
    this: Weak<Endpoint>,
    identity: Identity,
    options: Options,
    registration: OnceLock<Registration>,
    bell: OnceLock<Arc<Bell>>,
    recorder: OnceLock<Recorder>,
    messages: Mutex<Messages>,
    /// Whether any of them may wait for room to go out.
    backlog: Arc<AtomicBool>,
    /// Whether a peer may have let go of a group that is here.
    misses: Arc<AtomicBool>,
    addresses: Mutex<HashMap<u32, PeerAddress>>,
    roster: Mutex<Roster>,
    unattended: Unattended,
    attendant: Attendant,
    hauling: Hauling,
    /// How many peers have left or are lost,
    departures: AtomicU32,
    /// and how often one has said that a group has failed that is not here.
    warnings: AtomicU32,
    crowded: AtomicBool,
    /// Whether each rank of this host has a second processor.
    roomy: AtomicBool,
    all_haul: AtomicBool,
    all_relay: AtomicBool,
    sleepers: Sleepers,
    /// When this was made, and how many nanoseconds later a device was last given something.
    born: Instant,
    stirred: AtomicU64,
    /// How many looks have moved something,
    moves: AtomicU32,
    /// and how many looks of threads that poll have not.
    vain: AtomicU32,
    /// How many nanoseconds after `born` to look again, whatever comes; passed: no such moment.
    look_at: AtomicU64,
    questions: Arc<Questions>,
    store: OnceLock<Arc<dyn Store>>,
    retired: Arc<Retired>,
    watch: Watch,
    fork: u32,
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
        let messages = Messages::new(identity.rank, identity.size);
        let endpoint = Arc::new_cyclic(|this| Endpoint {
            this: this.clone(),
            identity: identity.clone(),
            options: options.clone(),
            registration: OnceLock::new(),
            bell: OnceLock::new(),
            recorder: OnceLock::new(),
            backlog: messages.backlog.clone(),
            misses: messages.misses.clone(),
            unattended: Unattended::new(messages.wakes.clone()),
            messages: Mutex::new(messages),
            addresses: Mutex::new(HashMap::new()),
            roster: Mutex::default(),
            attendant: Attendant::new(),
            hauling: Hauling::new(),
            departures: AtomicU32::new(0),
            warnings: AtomicU32::new(0),
            crowded: AtomicBool::new(false),
            roomy: AtomicBool::new(false),
            all_haul: AtomicBool::new(false),
            all_relay: AtomicBool::new(false),
            sleepers: Sleepers::default(),
            born: Instant::now(),
            stirred: AtomicU64::new(0),
            moves: AtomicU32::new(0),
            vain: AtomicU32::new(0),
            look_at: AtomicU64::new(0),
            questions: Arc::default(),
            store: OnceLock::new(),
            retired: Arc::default(),
            watch: Watch::default(),
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

    /// The same, unless another thread has them.
    fn try_messages(&self) -> Option<MutexGuard<'_, Messages>> {
        match self.messages.try_lock() {
            Ok(messages) => Some(messages),
            Err(TryLockError::Poisoned(messages)) => Some(messages.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
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
        self.departures.load(Ordering::Relaxed) > 0
    }

    /// Whether a member of a group here may be gone from it.
    pub fn misses_any(&self) -> bool {
        self.misses.load(Ordering::Relaxed) || self.has_lost_any()
    }

    /// Grows with what may end a meeting: peers that leave or die, and what others say of groups that are not
    /// here.
    pub fn disturbances(&self) -> u32 {
        self.departures.load(Ordering::Acquire).wrapping_add(self.warnings.load(Ordering::Acquire))
    }

    /// Why a peer is dead, if one is.
    pub fn death(&self) -> Option<Error> {
        lock(&self.roster).death()
    }

    /// What a peer has said of a group that is not here yet: that it has failed.
    pub fn warning(&self, group: u64) -> Option<Error> {
        lock(&self.roster).early(group)
    }

    /// Tells all ranks that a group has failed which is not here yet, now or when their links open.
    pub fn warn(&self, group: u64, error: &Error) {
        let message = Control::Failure { group, error: error.clone() }.encode();
        let all = (0..self.identity().0.size).collect();
        self.registration().announce(all, message).wait(Deadline::after(TELLING));
    }

    /// Boards of groups that are gone.
    pub fn retired(&self) -> &Arc<Retired> {
        &self.retired
    }

    /// Opens the links to `peers` and waits until they are there, unless `fails` has an error before.
    pub fn open_links(
        &self,
        peers: &[u32],
        deadline: Deadline,
        fails: impl Fn() -> Option<Error>,
    ) -> Result<()> {
        let mut messages = self.messages();
        for &peer in peers {
            messages.want(peer);
        }
        drop(messages);
        self.settle();
        let answer = self.wait(deadline, Through::Messages, || {
            let messages = self.messages();
            if peers.iter().all(|&peer| messages.linked(peer)) {
                return Some(Ok(()));
            }
            let gone = peers.iter().copied().find(|&peer| messages.gone(peer));
            let lost = gone.and_then(|peer| messages.why_lost(peer));
            drop(messages);
            let left = || Some(Error::new(Status::PeerFailed, format!("{} has left", self.describe(gone?))));
            // That a peer is gone may come of it.
            fails().or(lost).or_else(left).map(Err)
        });
        answer.unwrap_or_else(|| {
            let missing = self.unlinked(peers).map_or_else(String::new, |peer| self.describe(peer));
            fail!(Timeout, "no link to {missing} in time; look at it, or raise {}", Making::LIMIT)
        })
    }

    /// The first of `peers` that there is no link to.
    pub fn unlinked(&self, peers: &[u32]) -> Option<u32> {
        let messages = self.messages();
        peers.iter().copied().find(|&peer| !messages.linked(peer))
    }

    /// Finds out what processors there are for each rank, once all addresses are known: whether waiters make
    /// way, and how many threads move long messages. And whether all ranks relay.
    pub fn share_processors(&self) {
        let addresses = lock(&self.addresses);
        let mut neighbours: HashMap<[u8; 16], usize> = HashMap::new();
        addresses.values().for_each(|address| *neighbours.entry(address.host).or_default() += 1);
        let threads = |address: &PeerAddress| match usize::from(address.tcp_threads) {
            0 => usize::from(address.processors) / neighbours[&address.host],
            threads => threads,
        };
        let least = addresses.values().map(threads).min().unwrap_or(1);
        self.all_haul.store(least > 1, Ordering::Relaxed);
        self.all_relay.store(addresses.values().all(|address| address.relays), Ordering::Relaxed);
        let Some(own) = addresses.get(&self.rank()) else { return };
        let (ranks, processors) = (neighbours[&own.host], usize::from(own.processors));
        self.crowded.store(ranks > processors, Ordering::Relaxed);
        // In tests half of the ranks are, wherever they run.
        let is_roomy = if cfg!(test) { self.rank() % 2 == 1 } else { 2 * ranks <= processors };
        self.roomy.store(is_roomy, Ordering::Relaxed);
        let threads = threads(own);
        drop(addresses);
        if threads > 1 {
            self.hauling.set_helpers(threads - 1);
            self.messages().leave_loads();
        }
    }

    /// Whether calls on device memory may be relayed on each rank of the job.
    pub fn all_relay(&self) -> bool {
        self.all_relay.load(Ordering::Relaxed)
    }

    /// Whether each rank of the job has several threads for long messages.
    pub fn all_haul(&self) -> bool {
        self.all_haul.load(Ordering::Relaxed)
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

    /// Refuses what needs the peers when the process has said goodbye to them: they send nothing any more.
    pub fn check_present(&self) -> Result<()> {
        if self.registration().has_left() {
            fail!(
                InvalidUsage,
                "this process is ending and has said goodbye to the other ranks: call before exit, or in a handler that is \
                 given to atexit after the first group was made"
            );
        }
        Ok(())
    }

    // ---- groups

    /// Makes a group known, so that failures reach it. A failure that came before it is its failure.
    pub fn enrol(&self, group: &Arc<Group>) {
        let failure = lock(&self.roster).enrol(group);
        if let Some(error) = failure {
            group.fail(error);
        }
    }

    /// Forgets a group, but not at once that it failed.
    pub fn dismiss(&self, group: &Group) {
        lock(&self.roster).dismiss(group);
    }

    /// A group is gone. With the last one this goes, too, and maybe by a thread of the library that others rely
    /// on: so what is still owed to peers is waited for before that, for a moment, until they have room for it.
    pub(in crate::engine) fn await_last_words(&self) {
        if process::is_relied_on() || lock(&self.roster).has_any() {
            return;
        }
        let until = Deadline::after(OWED);
        while self.owes() && !until.expired() {
            self.messages().flush_all();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// This rank has left a group, of which it has made the calls before these `numbers`.
    pub(in crate::engine) fn note_left(&self, group: u64, numbers: Numbers, why: &Error) {
        lock(&self.roster).leave(group, numbers, why);
    }

    fn group(&self, id: u64) -> Option<Arc<Group>> {
        lock(&self.roster).find(id)
    }

    /// Whether a group has failed, so that its members have been told.
    pub fn has_failed(&self, group: u64) -> bool {
        match self.group(group) {
            Some(group) => group.has_told(),
            None => lock(&self.roster).has_ended(group),
        }
    }

    /// Tells the members of a group that it has failed, now or when their links open. Who waits here has to be
    /// woken when it has.
    pub fn tell_members(&self, group: &Group, error: &Error) -> Announced {
        let message = Control::Failure { group: group.id(), error: error.clone() }.encode();
        self.registration().announce(group.members().clone(), message)
    }

    /// Moves what can be moved now, operations on devices only if `through` says so: that may be held up by
    /// the driver. Whether anything moved, be it that an operation has stopped in the middle of its work. For
    /// who looks once: what it leaves in the middle is for those who sleep, if any do.
    pub fn progress(&self, round: u32, through: Through) -> bool {
        let moved = self.look(round, through);
        if self.sleepers.any() && (moved || self.hauling.give_back(self)) {
            self.wake_mover();
        }
        moved
    }

    /// The same, for who looks on.
    fn look(&self, round: u32, through: Through) -> bool {
        self.progress_with(self.messages(), round, through)
    }

    /// The same, by a thread that has the messages.
    fn progress_with(&self, mut messages: MutexGuard<'_, Messages>, round: u32, through: Through) -> bool {
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
        moved |= self.hauling.haul(self);
        // What moves elsewhere may never cease.
        let is_due = |moved| match moved {
            true => self.moves.fetch_add(1, Ordering::Relaxed).is_multiple_of(64),
            false => round.is_multiple_of(16),
        };
        if any_tcp
            && is_due(moved)
            && let Some(bell) = self.bell.get()
        {
            let mut events = Vec::new();
            if bell.poll(&mut events).is_ok() {
                moved |= self.serve(&events);
            }
        }
        self.settle();
        let advanced = self.advance_running(through);
        if !advanced && self.unattended.any() {
            // What they have posted needs helpers, links, or that a bell rings for it; nobody may look again
            // before that has happened.
            self.settle();
        }
        moved |= advanced;
        if moved {
            // Whom a mailbox of its own concerns has been told by that.
            self.sleepers.wake_any();
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
            moved |= messages.serve((token >> 8) as u32, (token & 0xff) as usize);
        }
        drop(messages);
        self.settle();
        moved
    }

    /// Something of a lane has been hauled that concerns the messages.
    pub(super) fn attend_lane(&self, peer: u32, lane: usize) {
        self.messages().serve_lane(peer, lane);
        self.settle();
        self.nudge();
    }

    /// Has the bell watch lanes of these peers: nobody hauls them until it rings.
    pub(super) fn watch_lanes(&self, peers: &[u32]) {
        let mut messages = self.messages();
        peers.iter().for_each(|&peer| messages.note_watches(peer));
        drop(messages);
        self.settle();
    }

    /// Does what the messages asked for: opens links, watches descriptors, spreads failures. Without their
    /// lock.
    pub fn settle(&self) {
        let mut messages = self.messages();
        let moved = self.bell.get().is_some_and(|bell| messages.watch(bell));
        if moved {
            drop(messages);
            // For what has been read no bell rings any more: who sleeps and waits for it looks.
            self.nudge();
            messages = self.messages();
        }
        if let Some(moment) = messages.asks_again_at.filter(|moment| *moment > Instant::now()) {
            self.look_again_at(moment);
        }
        if messages.wanted.is_empty() && messages.troubles.is_empty() && messages.loads.is_empty() {
            return;
        }
        let wanted = std::mem::take(&mut messages.wanted);
        let troubles = std::mem::take(&mut messages.troubles);
        let loads = std::mem::take(&mut messages.loads);
        drop(messages);
        if !loads.is_empty() {
            self.hauling.offer(&self.this, loads);
        }
        for peer in wanted {
            let address = lock(&self.addresses).get(&peer).cloned();
            if let Some(address) = address {
                // A link that is needed is needed by an operation: that has a deadline, and others may have
                // later ones.
                self.registration().open(address, Deadline::NEVER);
            }
        }
        for trouble in troubles {
            match trouble {
                Trouble::Mismatch(mismatch) => self.differ(&mismatch),
                Trouble::Short { peer, bytes } => self.note_shortage(peer, bytes),
                Trouble::Broken { peer, why } => {
                    // The peer is told the same.
                    let (rank, peer_is) = (self.rank(), self.describe(peer));
                    let text = format!("the link between rank {rank} and {peer_is} broke: {why}");
                    self.registration().doubt(peer, Error::new(Status::PeerFailed, text));
                }
            }
        }
    }

    #[cold]
    fn note_shortage(&self, peer: u32, bytes: u32) {
        let (rank, peer) = (self.rank(), self.describe(peer));
        let text =
            format!("rank {rank} has no memory for the {bytes} bytes of a message that {peer} sent unasked");
        self.registration().note_refusal(text);
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

    /// Asks `peers` what they did last in `group`. The answers come through the service thread.
    pub fn ask(&self, group: &Group, peers: impl Iterator<Item = u32>) -> Asked {
        let mut asked = Asked::new(&self.questions);
        for peer in peers {
            let query = Control::Query { group: group.id(), token: self.questions.begin(&mut asked) };
            self.registration().send_control(peer, &query.encode());
        }
        asked
    }

    /// How many questions there are whose answers somebody may want.
    #[cfg(test)]
    pub fn open_questions(&self) -> usize {
        self.questions.open()
    }

    /// `text`, and what the kernel has refused this rank lately: it may be why nothing comes.
    pub fn with_refusal(&self, text: String, within: Duration) -> String {
        match self.registration().refusal(within) {
            Some(refusal) if !text.contains(&refusal) => format!("{text}; {refusal}"),
            _ => text,
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // In a forked child the links are the parent's.
        if self.check_fork().is_ok()
            && let Some(registration) = self.registration.get()
        {
            let messages = self.messages.get_mut().unwrap_or_else(PoisonError::into_inner);
            registration.close_before(Deadline::after(LAST_WORDS / 2), Box::new(messages.take_lanes()));
        }
    }
}

impl Team for Endpoint {
    fn threads(&self) -> usize {
        1 + self.hauling.helpers()
    }

    fn together(&self, parts: usize, work: &(dyn Fn(usize) + Sync)) {
        if parts > 1 && self.threads() > 1 {
            self.hauling.together(&self.this, parts, work);
        } else {
            Alone.together(parts, work);
        }
    }
}

/// Locks, also after a panic elsewhere: what the locks guard is kept consistent between statements that can
/// panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
