//! Lanes of ranks that do not all share memory: each keeps copies of what it reads of the others', and
//! connections of its own bring them.
//!
//! These are links of a second endpoint, made for this crew and nothing else. Each has [`CARRIERS`]
//! connections for data, each of a thread that moves bytes both ways (see [`super::mover`]); the parts of a
//! lane go over whichever is free. So several processors copy, none combines, and the waiting thread only
//! looks at counters. One more connection, of a thread of its own, tells when a lane may be used again
//! ([`Mark::Done`]): behind data that would be late by half of what is written at a time, on both sides.

use std::io::ErrorKind;
use std::ops::Range;
#[cfg(test)]
use std::sync::atomic::AtomicU8;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::lanes::{Crew, Pinned};
use super::mover::{self, Account, Bell, Frame, Mover, Outbox, PARCEL, Parcel, Parcels, Sockets, Told};
use super::route::{LANE_BYTES, RELAY_LANES, Route};
use crate::cuda::context::Devices;
use crate::cuda::memory::RegisteredBuffer;
use crate::cuda::quiet::Quietly;
use crate::deadline::Deadline;
use crate::engine::direct::Mark;
use crate::engine::endpoint::{Visitor, lock};
use crate::engine::group::{CATCHING_UP, Group};
use crate::error::{Error, Result, Status, fail};
use crate::sys;
use crate::sys::aside::Aside;
use crate::transport::Link;
use crate::transport::address::PeerAddress;
use crate::transport::service::{Attendance, Identity, Options, Port, Registration};

/// The most ranks of a crew that is wired: each has pinned memory for all.
pub const MAX_WIRED: u32 = 8;

/// Connections to each member that carry data, each with a thread. With 4 a call of 64 MiB takes half as long
/// again. With 12 two ranks on 32 processors are faster by a tenth to a quarter, but four ranks on 64 take up
/// to seven times as long.
const CARRIERS: usize = 8;

/// The connection that takes no part in the data, and its mover.
const DONE: usize = CARRIERS;
const CONNECTIONS: usize = CARRIERS + 1;

/// Sleeping movers that are woken at a time: each takes the caller some 3 µs, so those that wake go on with
/// the others.
const WOKEN: usize = 2;

/// Parcels begin at multiples of so many bytes.
const GRAIN: usize = 4096;

/// How long links may take to open.
const OPENING: Duration = Duration::from_secs(60);

/// How often whoever waits for links asks whether they are still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// How long after the end of a member's connections the death of its process, or the failure of the group, is
/// the better cause.
const DOUBT: Duration = Duration::from_millis(250);

/// Bytes of a member's lanes.
const BYTES: usize = RELAY_LANES as usize * LANE_BYTES;

/// The connections of a crew, and the lanes behind them.
pub(super) struct Wire {
    hub: Arc<Hub>,
    /// Says goodbye when it ends.
    registration: Aside<Registration>,
}

impl Wire {
    /// Listens for the other members.
    pub(super) fn listen(group: &Group, crew: Crew) -> Result<Wire> {
        let (identity, options) = group.endpoint().identity();
        if !options.tcp {
            fail!(Unsupported, "TCP is off");
        }
        // Other crews of the group have other jobs, and the whole of it, whose step is 1.
        let job = group.id().wrapping_add(u64::from(crew.first) + (u64::from(crew.step) << 32));
        let identity = Identity { rank: crew.number, size: crew.size, job, ..identity.clone() };
        let options =
            Options { shm: false, tcp_streams: Some(CONNECTIONS), segment_bytes: 0, ..options.clone() };
        let endpoint = group.endpoint();
        let hub = Hub::new(crew, Visitor::of(&Arc::downgrade(endpoint)), endpoint.is_crowded())
            .map_err(|cause| Error::system("no descriptors for a group's movers", cause))?;
        let hub = Arc::new(hub);
        let port = Arc::downgrade(&hub) as Weak<dyn Port>;
        let registration = Registration::new(identity, options, port)?;
        let registration = Aside::new(registration, "the connections of a group are not closed");
        Ok(Wire { hub, registration })
    }

    /// Where the other members reach it.
    pub(super) fn own_address(&self) -> &PeerAddress {
        self.registration.address()
    }

    /// Connects to the others, pins the lanes, and has the movers begin. May wait for the device, and for the
    /// others as long as it `is_wanted`.
    pub(super) fn connect(
        &self,
        addresses: Vec<PeerAddress>,
        devices: &Arc<Devices>,
        device: u32,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<()> {
        for address in addresses {
            if address.rank as usize != self.hub.rank {
                self.registration.open(address, Deadline::after(OPENING));
            }
        }
        let pin = || RegisteredBuffer::new(devices, device, self.hub.size * BYTES);
        let Some(memory) = devices.in_quiet(is_wanted, pin) else { fail!(Aborted, "the group has ended") };
        let memory = Aside::new(Quietly::new(devices, memory?), "pinned memory is not given back");
        let _ = self.hub.memory.set(Arc::new(memory));
        self.start(self.hub.await_links(is_wanted)?)
    }

    /// All links are there, or will not be: the movers begin.
    fn start(&self, links: Vec<Option<Result<Link>>>) -> Result<()> {
        let size = self.hub.size;
        let mut sockets: Vec<Sockets> = (0..CONNECTIONS).map(|_| vec![None; size]).collect();
        for (member, link) in links.into_iter().enumerate() {
            if member == self.hub.rank {
                continue;
            }
            let Some(link) = link else { fail!(Internal, "no link to rank {}", self.hub.crew.rank(member)) };
            let streams = link?.streams;
            if streams.len() != CONNECTIONS {
                let who = self.hub.crew.rank(member);
                fail!(InvalidUsage, "rank {who} has {} connections, not {CONNECTIONS}", streams.len());
            }
            for (sockets, stream) in sockets.iter_mut().zip(streams) {
                sockets[member] = stream.into_socket().map(Arc::new);
            }
        }
        self.hub.begin(sockets)
    }

    /// The memory of all lanes, without what moves anything there.
    pub(super) fn pinned(&self) -> Pinned {
        // PROOF: as for a lane.
        self.hub.memory.get().expect("pinned").clone()
    }

    /// The lane of `member` with this number.
    pub(super) fn address(&self, member: usize, lane: u64) -> *mut u8 {
        self.hub.lane(member, lane)
    }

    /// Whether a member has come so far with a piece, counted over all calls.
    pub(super) fn has_come(&self, member: usize, mark: Mark, piece: u64) -> bool {
        self.hub.coming(member, mark, piece).seen.load(Ordering::Acquire) > piece
    }

    /// This rank has come so far: whoever waits for it gets what it reads.
    pub(super) fn reach(&self, route: &Route, mark: Mark, before: u64, pieces: u64, parcels: &Parcels) {
        let hub = &*self.hub;
        let (index, piece) = (pieces - 1, before + pieces - 1);
        let account = || match mark {
            Mark::Done => Account::Told(hub.told.clone(), piece + 1),
            Mark::Given | Mark::Folded => Account::Call(parcels.clone()),
        };
        let mut any = false;
        for step in 1..hub.size {
            let member = (hub.rank + step) % hub.size;
            let Some((at, bytes)) = route.read_by(member, mark, index) else { continue };
            let most = bytes.div_ceil(CARRIERS).next_multiple_of(GRAIN).clamp(GRAIN, PARCEL);
            let parcel = |start: usize| {
                let length = most.min(bytes - start) as u32;
                let frame = Frame { mark, piece, offset: (at + start) as u32, length, whole: bytes as u32 };
                let from = hub.lane(hub.rank, piece % RELAY_LANES).wrapping_add(at + start);
                // SAFETY: what a route says lies in the lane, which is written again when all members are
                // done with this piece.
                unsafe { Parcel::new(frame, from, member, account()) }
            };
            // What has no bytes tells the member, too.
            hub.post(movers(mark).start, member, (0..bytes.max(1)).step_by(most).map(parcel));
            any = true;
        }
        // Behind the others' word: who sees this here tells them what comes next, maybe in another thread.
        hub.coming(hub.rank, mark, piece).seen.store(piece + 1, Ordering::Release);
        if any {
            hub.ring(mark);
        }
    }

    /// What moves things.
    #[cfg(test)]
    pub(super) fn movers(&self) -> Weak<dyn Send + Sync> {
        let hub: Arc<dyn Send + Sync> = self.hub.clone();
        Arc::downgrade(&hub)
    }

    /// Has movers do nothing, or go on.
    #[cfg(test)]
    pub(super) fn hold(&self, held: Held) {
        self.hub.held.store(held as u8, Ordering::Relaxed);
    }

    /// There will be something to send soon: the movers are awake by then.
    pub(super) fn rouse(&self) {
        self.hub.announced.fetch_add(1, Ordering::Relaxed);
        self.hub.ring(Mark::Given);
        self.hub.ring(Mark::Done);
    }

    /// The members that have not been told that this rank is done with so many pieces of all calls, if it is.
    pub(super) fn untold(&self, pieces: u64) -> impl Iterator<Item = usize> + '_ {
        let (hub, others) = (&*self.hub, (0..self.hub.size).filter(|member| *member != self.hub.rank));
        others.filter(move |member| hub.told[*member].load(Ordering::Acquire) < pieces)
    }

    /// An error when what a member is waited for does not come any more, once there has been time for a
    /// better cause. No mark: it is to read.
    pub(super) fn check(&self, group: &Group, member: usize, mark: Option<Mark>) -> Result<()> {
        self.hub.check(member, mark, |rank| group.describe_rank(rank))
    }

    /// Whether nothing more comes from some member, or goes there.
    pub(super) fn is_broken(&self) -> bool {
        (0..self.hub.size).any(|member| self.hub.is_cut(member))
    }
}

/// What the thread of a mover does.
fn serve(hub: &Hub, mover: Mover) {
    let (number, served) = (mover.number, mover::run(hub, &mover));
    // The others see its connections end.
    drop(mover);
    if let Err(cause) = served {
        hub.gave_up(number, &cause);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.registration.is_ours() {
            self.hub.close();
        }
    }
}

/// The movers that a mark may go by: done by its own. A process that ends may still have data on the way,
/// which the kernel brings to its end, unless it is sent something on the same connection.
fn movers(mark: Mark) -> Range<usize> {
    match mark {
        Mark::Given | Mark::Folded => 0..CARRIERS,
        Mark::Done => DONE..CONNECTIONS,
    }
}

/// What the movers of a crew share with its calls.
pub(super) struct Hub {
    crew: Crew,
    /// This rank's number in it, and how many there are.
    rank: usize,
    size: usize,
    /// That of the group: whoever lets go of it waits for a mover that has it for a moment.
    endpoint: Visitor,
    crowded: bool,
    /// By member, until the movers begin.
    links: Mutex<Vec<Option<Result<Link>>>>,
    /// Whether there is one more.
    linked: Condvar,
    /// The lanes of all members, in their order.
    memory: OnceLock<Arc<Aside<Quietly<RegisteredBuffer>>>>,
    /// What comes of each member, by mark and by lane.
    coming: Vec<[[Coming; RELAY_LANES as usize]; Mark::ALL.len()]>,
    /// By member: what the carriers send, and what tells that lanes may be used again.
    outboxes: [Vec<Outbox>; 2],
    /// By mover.
    bells: Vec<Bell>,
    /// How often movers were told that there will be something to send.
    announced: AtomicU64,
    /// How often carriers were rung for: each that wakes rings others once for each time.
    rung: AtomicU64,
    told: Told,
    closing: AtomicBool,
    /// One of [`Held`].
    #[cfg(test)]
    held: AtomicU8,
    /// By member.
    ends: Vec<End>,
    /// Why this rank itself moves nothing more.
    trouble: OnceLock<Error>,
}

/// Movers that are to do nothing.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub enum Held {
    /// None of them.
    None,
    /// None, but nobody is told that lanes are free.
    Marks,
    /// All of them.
    All,
}

/// How the connections to a member end.
struct End {
    /// Those that have not.
    open: AtomicUsize,
    /// Nothing more comes over any.
    cut: OnceLock<Cut>,
    /// Nothing more tells that the member is done with a lane.
    done: OnceLock<Cut>,
}

impl Default for End {
    fn default() -> End {
        End { open: AtomicUsize::new(CONNECTIONS), cut: OnceLock::new(), done: OnceLock::new() }
    }
}

/// When and why something comes no more.
struct Cut {
    at: Instant,
    why: String,
    /// Whether this rank knows by now what the others have said until some time after that.
    heard: OnceLock<Arc<AtomicBool>>,
}

impl Cut {
    fn new(at: Instant, why: &std::io::Error) -> Cut {
        Cut { at, why: why.to_string(), heard: OnceLock::new() }
    }
}

/// What comes of a member for a lane. Apart from others: movers write it.
#[derive(Default)]
#[repr(align(64))]
struct Coming {
    /// Bytes of the piece that comes.
    bytes: AtomicU64,
    /// One more than the number of the last that has come.
    seen: AtomicU64,
}

impl Hub {
    fn new(crew: Crew, endpoint: Visitor, crowded: bool) -> std::io::Result<Hub> {
        let (rank, size) = (crew.number as usize, crew.size as usize);
        Ok(Hub {
            crew,
            rank,
            size,
            endpoint,
            crowded,
            links: Mutex::new((0..size).map(|_| None).collect()),
            linked: Condvar::new(),
            memory: OnceLock::new(),
            coming: (0..size).map(|_| Default::default()).collect(),
            outboxes: [(); 2].map(|()| (0..size).map(|_| Outbox::default()).collect()),
            bells: (0..CONNECTIONS).map(|_| Bell::new()).collect::<std::io::Result<_>>()?,
            announced: AtomicU64::new(0),
            rung: AtomicU64::new(0),
            told: (0..size).map(|_| AtomicU64::new(0)).collect(),
            closing: AtomicBool::new(false),
            #[cfg(test)]
            held: AtomicU8::new(Held::None as u8),
            ends: (0..size).map(|_| End::default()).collect(),
            trouble: OnceLock::new(),
        })
    }

    /// Starts the movers, with the connections of each, if there is what all of them need.
    fn begin(self: &Arc<Self>, sockets: Vec<Sockets>) -> Result<()> {
        let equip = |(number, sockets)| Mover::new(self, number, sockets);
        let movers: std::io::Result<Vec<Mover>> = sockets.into_iter().enumerate().map(equip).collect();
        let movers = movers.map_err(|cause| Error::system("no descriptors for a group's movers", cause))?;
        for mover in movers {
            let hub = self.clone();
            sys::process::spawn("unisono-mover", move || serve(&hub, mover))
                .map_err(|cause| Error::system("no thread to move a group's pieces", cause))?;
        }
        Ok(())
    }

    fn lane(&self, member: usize, lane: u64) -> *mut u8 {
        // PROOF: a wire that is used has been connected.
        let memory = self.memory.get().expect("pinned").address();
        memory.wrapping_add(member * BYTES + lane as usize * LANE_BYTES)
    }

    /// What a mover is to send to a member.
    pub(super) fn outbox(&self, mover: usize, member: usize) -> &Outbox {
        &self.outboxes[usize::from(mover == DONE)][member]
    }

    /// Has the movers look that a mark may go by, if they sleep: carriers some by way of others.
    fn ring(&self, mark: Mark) {
        match mark {
            Mark::Given | Mark::Folded => {
                self.rung.fetch_add(1, Ordering::Relaxed);
                self.ring_carriers(0);
            }
            Mark::Done => {
                fence(Ordering::SeqCst);
                self.bells[DONE].rouse();
            }
        }
    }

    /// Some of those from number `first` on.
    fn ring_carriers(&self, first: usize) {
        fence(Ordering::SeqCst);
        self.bells[first..CARRIERS].iter().filter(|bell| bell.claim()).take(WOKEN).for_each(drop);
    }

    /// A carrier has been claimed, and has `passed` on that carriers were rung for so many times: those
    /// behind it may be asleep. Answers how many times it is now.
    pub(super) fn pass_on(&self, mover: usize, passed: u64) -> u64 {
        let rung = self.rung.load(Ordering::Relaxed);
        if rung != passed {
            // Not those before it, which may have looked and sleep again.
            self.ring_carriers(mover + 1);
        }
        rung
    }

    /// Changes when there will be something to send soon.
    pub(super) fn announced(&self) -> u64 {
        self.announced.load(Ordering::Relaxed)
    }

    /// More for a member, by this mover and those that share its outbox.
    fn post(&self, mover: usize, member: usize, parcels: impl Iterator<Item = Parcel>) {
        let outbox = self.outbox(mover, member);
        outbox.post(parcels);
        // A member is cut off before its outboxes are cleared, and these are posted before this looks whether
        // it is: one of the two clears them.
        if self.is_cut(member) {
            outbox.clear();
        }
    }

    pub(super) fn bell(&self, mover: usize) -> &Bell {
        &self.bells[mover]
    }

    fn coming(&self, member: usize, mark: Mark, piece: u64) -> &Coming {
        &self.coming[member][mark as usize][(piece % RELAY_LANES) as usize]
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Whether movers are to do nothing.
    #[cfg(test)]
    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed) == Held::All as u8
    }

    /// Whether nothing is to be sent from an outbox.
    #[cfg(test)]
    pub(super) fn holds_back(&self, outbox: &Outbox) -> bool {
        let is_marks = || self.outboxes[1].iter().any(|marks| std::ptr::eq(marks, outbox));
        self.held.load(Ordering::Relaxed) == Held::Marks as u8 && is_marks()
    }

    /// How long to look before sleeping: not at all where ranks share processors.
    pub(super) fn spin(&self, spin: Duration) -> Duration {
        if self.crowded { Duration::ZERO } else { spin }
    }

    /// Where the bytes of a member's frame go. `None`: it does not fit its lane.
    pub(super) fn target(&self, member: usize, frame: &Frame) -> Option<*mut u8> {
        let offset = frame.offset as usize;
        let end = offset.checked_add(frame.length as usize)?;
        (end <= LANE_BYTES).then(|| self.lane(member, frame.piece % RELAY_LANES).wrapping_add(offset))
    }

    /// A frame is whole. An error if its piece has more than it says.
    pub(super) fn arrived(&self, member: usize, frame: Frame) -> std::io::Result<()> {
        let coming = self.coming(member, frame.mark, frame.piece);
        let (length, whole) = (u64::from(frame.length), u64::from(frame.whole));
        let come = coming.bytes.fetch_add(length, Ordering::AcqRel) + length;
        if come > whole {
            return Err(ErrorKind::InvalidData.into());
        }
        if come == whole {
            // The next piece in this lane comes when this one is done.
            coming.bytes.store(0, Ordering::Relaxed);
            coming.seen.store(frame.piece.saturating_add(1), Ordering::Release);
            self.rouse();
        }
        Ok(())
    }

    /// A connection has ended. A member that leaves ends all of them, and what it has sent still comes over
    /// those that have not: it is cut off with the last. It is at once when one breaks, since parcels may be
    /// lost with that.
    pub(super) fn ended(&self, mover: usize, member: usize, why: &std::io::Error) {
        let left = why.kind() == ErrorKind::UnexpectedEof
            // The marks that this rank had for it are of no use to it any more.
            || mover == DONE && mover::is_gone(why);
        if mover == DONE && !self.is_cut(member) {
            // Whoever waits for a lane need not wait for the end of the others, which may be far.
            let _ = self.ends[member].done.set(Cut::new(Instant::now(), why));
            self.rouse();
        }
        let last = self.ends[member].open.fetch_sub(1, Ordering::AcqRel) == 1;
        if last || !left {
            self.cut(member, why);
        }
    }

    /// A mover has ended, since the kernel refused it something.
    fn gave_up(&self, mover: usize, why: &std::io::Error) {
        // Before the others are cut off, which is none of their doing.
        let who = self.crew.rank(self.rank);
        let trouble = format!("a thread that moves pieces for rank {who} has ended: {why}");
        let _ = self.trouble.set(Error::new(Status::System, trouble));
        for member in (0..self.size).filter(|member| *member != self.rank) {
            self.cut(member, why);
            // No other mover may be left that empties it.
            self.outbox(mover, member).clear();
        }
        self.rouse();
    }

    /// Nothing more comes from a member: all connections to it end.
    fn cut(&self, member: usize, why: &std::io::Error) {
        if self.is_closing() {
            return;
        }
        if self.ends[member].cut.set(Cut::new(Instant::now(), why)).is_ok() {
            self.bells.iter().for_each(Bell::wake);
        }
        self.rouse();
    }

    pub(super) fn is_cut(&self, member: usize) -> bool {
        self.ends[member].cut.get().is_some()
    }

    /// An error when no such mark comes of a member any more, or nothing at all, as `name` calls its rank; at
    /// once if that is this rank's own affair.
    fn check(&self, member: usize, mark: Option<Mark>, name: impl FnOnce(u32) -> String) -> Result<()> {
        if let Some(trouble) = self.trouble.get() {
            return Err(trouble.clone());
        }
        let Some(why) = self.end(member, mark) else { return Ok(()) };
        fail!(PeerFailed, "{} has left, or a connection to it broke: {why}", name(self.crew.rank(member)))
    }

    /// Why no such mark comes of a member any more, or nothing at all, once there has been time for a better
    /// cause.
    fn end(&self, member: usize, mark: Option<Mark>) -> Option<&str> {
        let End { cut, done, .. } = &self.ends[member];
        let done = if mark == Some(Mark::Done) { done.get() } else { None };
        let Cut { at, why, heard } = done.or_else(|| cut.get())?;
        if at.elapsed() <= DOUBT {
            return None;
        }
        // The service thread of this process may be behind with what has come.
        let has_heard = self.endpoint.enter().is_none_or(|endpoint| {
            heard.get_or_init(|| endpoint.registration().caught_up()).load(Ordering::Acquire)
        });
        (has_heard || at.elapsed() > DOUBT + CATCHING_UP).then_some(why)
    }

    /// Whoever waits for a call looks at it again.
    pub(super) fn rouse(&self) {
        if let Some(endpoint) = self.endpoint.enter() {
            endpoint.rouse();
        }
    }

    fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.bells.iter().for_each(Bell::wake);
    }

    fn linked(&self, peer: u32, link: Result<Link>) {
        if let Some(slot @ None) = lock(&self.links).get_mut(peer as usize) {
            *slot = Some(link);
        }
        self.linked.notify_all();
    }

    /// The links of the other members, or why there is none.
    fn await_links(&self, is_wanted: &dyn Fn() -> bool) -> Result<Vec<Option<Result<Link>>>> {
        let mut links = lock(&self.links);
        let is_missing = |(member, link): (usize, &Option<_>)| member != self.rank && link.is_none();
        while links.iter().enumerate().any(is_missing) {
            if !is_wanted() {
                fail!(Aborted, "the group has ended");
            }
            links = self.linked.wait_timeout(links, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(std::mem::take(&mut *links))
    }
}

impl Port for Hub {
    fn link_opened(&self, peer: u32, link: Link) {
        self.linked(peer, Ok(link));
    }

    fn link_refused(&self, peer: u32, why: Error) {
        self.linked(peer, Err(why));
    }

    // The group's own links tell of the end of a member, with its cause.

    fn peer_left(&self, _: u32) {}

    fn peer_lost(&self, _: u32, _: Error) {}

    fn control(&self, _: u32, _: &[u8]) {}

    fn attend(&self) -> Attendance {
        Attendance::Idle
    }
}

#[cfg(test)]
mod tests;
