//! Lanes of ranks that do not all share memory: each keeps copies of what it reads of the others', and connections of its own
//! bring them.
//!
//! These are links of a second endpoint, made for this group and nothing else. Each has [`STRIPES`] connections; a part of a
//! lane is split over them, and a thread moves its bytes both ways (see [`super::mover`]). So
//! several processors copy, none combines, and the waiting thread only looks at counters.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::mover::{self, Frame, Outbox, Sockets};
use super::route::{LANE_BYTES, LANES, Route};
use crate::cuda::context::Devices;
use crate::cuda::memory::RegisteredBuffer;
use crate::deadline::Deadline;
use crate::engine::direct::Mark;
use crate::engine::endpoint::{Endpoint, lock};
use crate::engine::group::Group;
use crate::error::{Error, Result, fail};
use crate::sys;
use crate::sys::aside::Aside;
use crate::transport::Link;
use crate::transport::address::PeerAddress;
use crate::transport::service::{Attendance, Identity, Options, Port, Registration};

/// The most ranks of a group that is wired: each has pinned memory for all.
pub const MAX_MEMBERS: u32 = 8;

/// Connections to each member that carry data, each with a thread. With 4 a call of 64 MiB takes half as long again, with 12 as
/// long.
const STRIPES: usize = 8;

/// Parts of stripes begin at multiples of so many bytes.
const GRAIN: usize = 4096;

/// How long links may take to open.
const OPENING: Duration = Duration::from_secs(60);

/// How often whoever waits for links asks whether they are still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// How long after the end of a connection the death of its process, or the failure of the group, is the better cause.
const DOUBT: Duration = Duration::from_millis(250);

/// Bytes of a member's lanes.
const BYTES: usize = LANES as usize * LANE_BYTES;

/// The connections of a group, and the lanes behind them.
pub(super) struct Wire {
    hub: Arc<Hub>,
    /// Says goodbye when it ends.
    registration: Aside<Registration>,
}

impl Wire {
    /// Listens for the other members.
    pub(super) fn listen(group: &Group) -> Result<Wire> {
        let (identity, options) = group.endpoint().identity();
        if !options.tcp {
            fail!(Unsupported, "TCP is off");
        }
        let identity =
            Identity { rank: group.rank(), size: group.size(), job: group.id(), ..identity.clone() };
        let options =
            Options { shm: false, tcp_streams: Some(STRIPES + 1), segment_bytes: 0, ..options.clone() };
        let hub =
            Hub::new(group).map_err(|cause| Error::system("no descriptors for a group's movers", cause))?;
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

    /// Connects to the others, pins the lanes, and has the movers begin. May wait for the device, and for the others as long as it
    /// `is_wanted`.
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
        let memory = RegisteredBuffer::new(devices, device, self.hub.size * BYTES)?;
        let _ = self.hub.memory.set(Aside::new(memory, "pinned memory is not given back"));
        self.start(self.hub.await_links(is_wanted)?)
    }

    /// All links are there, or will not be: the movers begin.
    fn start(&self, links: Vec<Option<Result<Link>>>) -> Result<()> {
        let size = self.hub.size;
        let mut sockets: Vec<Sockets> = (0..STRIPES).map(|_| vec![None; size]).collect();
        sockets[0].resize(2 * size, None);
        for (member, link) in links.into_iter().enumerate() {
            if member == self.hub.rank {
                continue;
            }
            let Some(link) = link else { fail!(Internal, "no link to rank {member}") };
            let streams = link?.streams;
            if streams.len() != STRIPES + 1 {
                fail!(InvalidUsage, "rank {member} has {} connections, not {}", streams.len(), STRIPES + 1);
            }
            for (index, stream) in streams.into_iter().enumerate() {
                // The last is for what takes no part in the data: `Mark::Done`.
                let (stripe, at) = if index == STRIPES { (0, size + member) } else { (index, member) };
                sockets[stripe][at] = stream.into_socket().map(Arc::new);
            }
        }
        for (stripe, sockets) in sockets.into_iter().enumerate() {
            let hub = self.hub.clone();
            let run = move || {
                if let Err(cause) = mover::run(&hub, stripe, &sockets) {
                    (0..hub.size).for_each(|member| hub.ended(member, &cause));
                }
            };
            sys::process::spawn("unisono-mover", run)
                .map_err(|cause| Error::system("no thread to move a group's pieces", cause))?;
        }
        Ok(())
    }

    /// The lane of `member` with this number.
    pub(super) fn address(&self, member: usize, lane: u64) -> *mut u8 {
        self.hub.lane(member, lane)
    }

    /// With how many pieces, over all calls, a member has come so far.
    pub(super) fn reached(&self, member: usize, mark: Mark) -> u64 {
        let hub = &*self.hub;
        let seen =
            |stripe: usize| hub.seen[stripe * hub.size + member].0[mark as usize].load(Ordering::Acquire);
        let stripes = if mark == Mark::Done { 1 } else { STRIPES };
        (0..stripes).map(seen).min().unwrap_or(0)
    }

    /// This rank has come so far: whoever waits for it gets what it reads.
    pub(super) fn reach(&self, route: &Route, mark: Mark, before: u64, pieces: u64) {
        let hub = &*self.hub;
        let (index, piece) = (pieces - 1, before + pieces - 1);
        // Done goes over a connection of its own. A process that ends may still have data on the way, which the kernel
        // brings to its end, unless it is sent something on the same connection.
        let (stripes, base) = if mark == Mark::Done { (1, hub.size) } else { (STRIPES, 0) };
        for stripe in 0..stripes {
            hub.seen[stripe * hub.size + hub.rank].0[mark as usize].store(before + pieces, Ordering::Release);
        }
        for step in 1..hub.size {
            let member = (hub.rank + step) % hub.size;
            let Some((at, bytes)) = route.read_by(member, mark, index) else { continue };
            let share = bytes.div_ceil(stripes).next_multiple_of(GRAIN);
            for stripe in 0..stripes {
                let start = (stripe * share).min(bytes);
                let length = share.min(bytes - start) as u32;
                let frame = Frame { mark, piece, offset: (at + start) as u64, length };
                let from = hub.lane(hub.rank, piece % LANES).wrapping_add(at + start);
                hub.posted.fetch_add(1, Ordering::Relaxed);
                // SAFETY: what a route says lies in the lane, which is written again when all members are done with this piece.
                unsafe { hub.outboxes[stripe].post(base + member, frame, from) };
            }
        }
    }

    /// There will be something to send soon: the movers are awake by then.
    pub(super) fn rouse(&self) {
        self.hub.outboxes.iter().for_each(Outbox::rouse);
    }

    /// Whether the kernel has all that was sent: it is delivered even if this process ends.
    pub(super) fn is_flushed(&self) -> bool {
        self.hub.written.load(Ordering::Acquire) == self.hub.posted.load(Ordering::Relaxed)
    }

    /// An error when nothing more comes from a member that is waited for, once there has been time for a better cause.
    pub(super) fn check(&self, group: &Group, member: usize) -> Result<()> {
        match self.hub.ends[member].get() {
            Some((at, why)) if at.elapsed() > DOUBT => {
                let who = group.describe_rank(member as u32);
                fail!(PeerFailed, "{who} has left, or a connection to it broke: {why}")
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.registration.is_ours() {
            self.hub.close();
        }
    }
}

/// What the movers of a group share with its calls.
pub(super) struct Hub {
    rank: usize,
    size: usize,
    endpoint: Weak<Endpoint>,
    crowded: bool,
    /// By member, until the movers begin.
    links: Mutex<Vec<Option<Result<Link>>>>,
    /// Whether there is one more.
    linked: Condvar,
    /// The lanes of all members, in their order.
    memory: OnceLock<Aside<RegisteredBuffer>>,
    /// With how many pieces, over all calls, each member has come so far, by stripe, member and mark.
    seen: Vec<Seen>,
    outboxes: Vec<Outbox>,
    closing: AtomicBool,
    /// Parcels so far.
    posted: AtomicU64,
    written: AtomicU64,
    /// When and why the first connection to a member has ended.
    ends: Vec<OnceLock<(Instant, String)>>,
}

/// With how many pieces a member has come so far over one stripe, by mark. Apart from others: each is written by another thread.
#[derive(Default)]
#[repr(align(64))]
struct Seen([AtomicU64; 3]);

impl Hub {
    fn new(group: &Group) -> std::io::Result<Hub> {
        let (rank, size) = (group.rank() as usize, group.size() as usize);
        Ok(Hub {
            rank,
            size,
            endpoint: Arc::downgrade(group.endpoint()),
            crowded: group.endpoint().is_crowded(),
            links: Mutex::new((0..size).map(|_| None).collect()),
            linked: Condvar::new(),
            memory: OnceLock::new(),
            seen: (0..STRIPES * size).map(|_| Default::default()).collect(),
            outboxes: (0..STRIPES).map(|_| Outbox::new()).collect::<std::io::Result<_>>()?,
            closing: AtomicBool::new(false),
            posted: AtomicU64::new(0),
            written: AtomicU64::new(0),
            ends: (0..size).map(|_| OnceLock::new()).collect(),
        })
    }

    fn lane(&self, member: usize, lane: u64) -> *mut u8 {
        // PROOF: a wire that is used has been connected.
        let memory = self.memory.get().expect("pinned").address();
        memory.wrapping_add(member * BYTES + lane as usize * LANE_BYTES)
    }

    pub(super) fn outbox(&self, stripe: usize) -> &Outbox {
        &self.outboxes[stripe]
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// How long to look before sleeping: not at all where ranks share processors.
    pub(super) fn spin(&self, spin: Duration) -> Duration {
        if self.crowded { Duration::ZERO } else { spin }
    }

    /// Where the bytes of a member's frame go. `None`: it does not fit its lane.
    pub(super) fn target(&self, connection: usize, frame: &Frame) -> Option<*mut u8> {
        let offset = usize::try_from(frame.offset).ok()?;
        let end = offset.checked_add(frame.length as usize)?;
        (end <= LANE_BYTES)
            .then(|| self.lane(connection % self.size, frame.piece % LANES).wrapping_add(offset))
    }

    /// A frame is whole.
    pub(super) fn arrived(&self, stripe: usize, connection: usize, frame: Frame) {
        let seen = &self.seen[stripe * self.size + connection % self.size].0[frame.mark as usize];
        seen.store(frame.piece.saturating_add(1), Ordering::Release);
        self.rouse();
    }

    /// So many parcels have been written, or never will be.
    pub(super) fn wrote(&self, parcels: u64) {
        let written = self.written.fetch_add(parcels, Ordering::AcqRel) + parcels;
        if parcels > 0 && written == self.posted.load(Ordering::Relaxed) {
            self.rouse();
        }
    }

    /// A connection has ended.
    pub(super) fn ended(&self, connection: usize, why: &std::io::Error) {
        if !self.is_closing() {
            let _ = self.ends[connection % self.size].set((Instant::now(), why.to_string()));
            self.rouse();
        }
    }

    fn rouse(&self) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.rouse();
        }
    }

    fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.outboxes.iter().for_each(Outbox::wake);
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
