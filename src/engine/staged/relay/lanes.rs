//! Lanes: where the members' pieces lie for this rank, and how far everybody has come with them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use super::making::{CAN, Making, NEVER, READY};
use super::mover::Parcels;
use super::route::{RELAY_LANES, Route};
use super::shared::Shared;
use super::wired::Wire;
use crate::engine::direct::{Mark, Watch};
use crate::engine::endpoint::lock;
use crate::engine::group::Group;
use crate::error::Result;

/// The ranks of a group that relay calls among each other: all, or such as are equally far apart. They have
/// numbers of their own, in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crew {
    /// The rank of the group that is number 0,
    pub first: u32,
    /// and how far on each next one is.
    pub step: u32,
    /// How many there are.
    pub size: u32,
    /// This rank's number.
    pub number: u32,
}

impl Crew {
    /// All ranks of a group.
    pub fn all(rank: u32, size: u32) -> Crew {
        Crew { first: 0, step: 1, size, number: rank }
    }

    /// The rank of the group that has this number.
    pub(super) fn rank(&self, number: usize) -> u32 {
        self.first + number as u32 * self.step
    }
}

/// What a crew keeps for calls that are relayed.
pub struct Seat {
    crew: Crew,
    /// Once the members have agreed: their lanes, or that they have none.
    lanes: OnceLock<Option<Arc<Lanes>>>,
    /// Until then.
    making: Mutex<Making>,
    pieces: AtomicU64,
}

impl Seat {
    /// That of one of a crew.
    pub fn new(crew: Crew) -> Seat {
        Seat { crew, lanes: OnceLock::new(), making: Mutex::default(), pieces: AtomicU64::new(0) }
    }

    /// Who relays.
    pub fn crew(&self) -> Crew {
        self.crew
    }

    pub(super) fn lanes(&self) -> Option<&Option<Arc<Lanes>>> {
        self.lanes.get()
    }

    /// The lanes, where calls can be relayed.
    pub(super) fn agreed(&self) -> Option<&Arc<Lanes>> {
        self.lanes.get()?.as_ref()
    }

    /// How far this rank has come with its lanes, until all have theirs.
    pub(super) fn making(&self) -> MutexGuard<'_, Making> {
        lock(&self.making)
    }

    /// What this rank says of its lanes in a call.
    pub(super) fn says(&self) -> u64 {
        match self.lanes.get() {
            Some(Some(_)) => READY,
            Some(None) => NEVER,
            None => self.making().says(),
        }
    }

    /// What all members have said in a call. Each hears the same: whether the call is relayed.
    pub(super) fn hear(&self, group: &Group, said: &[u64]) -> bool {
        let all = |word| said.iter().all(|said| said & word != 0);
        if self.lanes.get().is_none() {
            if said.iter().any(|said| said & NEVER != 0) {
                self.settle(group, None);
            } else if all(READY) {
                let made = self.making().made();
                self.settle(group, made);
            }
        }
        all(CAN) && self.agreed().is_some()
    }

    fn settle(&self, group: &Group, lanes: Option<Arc<Lanes>>) {
        let how = match lanes.as_deref() {
            Some(Lanes::Shared(_)) => "relays calls on device memory: true",
            Some(Lanes::Wired(_)) if self.crew.step > 1 => "relays between hosts: true",
            Some(Lanes::Wired(_)) => "relays calls on device memory: true, over connections",
            None if self.crew.step > 1 => "relays between hosts: false",
            None => "relays calls on device memory: false",
        };
        log::debug!("'{}' {how}", group.name());
        let _ = self.lanes.set(lanes);
        *self.making() = Making::Never;
    }

    /// Whether calls are relayed. `None`: the members have not agreed yet.
    pub fn relays(&self) -> Option<bool> {
        self.lanes.get().map(Option::is_some)
    }

    /// Pieces relayed so far, over all calls.
    pub fn pieces(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }

    /// What moves pieces between ranks that share no memory, or may do so yet.
    #[cfg(test)]
    pub fn movers(&self) -> Option<std::sync::Weak<dyn Send + Sync>> {
        if let Making::Unbegun(listening) = &*self.making() {
            return listening.as_ref().map(Wire::movers);
        }
        match &**self.agreed()? {
            Lanes::Wired(wire) => Some(wire.movers()),
            Lanes::Shared(_) => None,
        }
    }

    /// Whether the others know of all pieces so far that this rank is done with them.
    #[cfg(test)]
    pub fn has_told_all(&self) -> bool {
        self.agreed().is_some_and(|lanes| lanes.untold(self.pieces()).is_empty())
    }

    /// Has some of that do nothing, or go on.
    #[cfg(test)]
    pub fn hold_movers(&self, held: super::wired::Held) {
        if let Some(Lanes::Wired(wire)) = self.agreed().map(|lanes| &**lanes) {
            wire.hold(held);
        }
    }

    /// So many are another call's, behind all others'.
    pub(super) fn add_pieces(&self, pieces: u64) {
        self.pieces.fetch_add(pieces, Ordering::Relaxed);
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Seat").field("crew", &self.crew).finish_non_exhaustive()
    }
}

/// What has lanes pinned, as long as a device may use them.
pub(super) type Pinned = Arc<dyn Send + Sync>;

/// Everybody's lanes.
pub(super) enum Lanes {
    /// In memory that all members have mapped and pinned.
    Shared(Shared),
    /// In this rank's pinned memory: what it reads of the others' is sent to it.
    Wired(Wire),
}

impl Lanes {
    /// The lane of `member` for the piece of this number.
    pub(super) fn address(&self, member: usize, piece: u64) -> *mut u8 {
        match self {
            Lanes::Shared(shared) => shared.address(member, piece % RELAY_LANES),
            Lanes::Wired(wire) => wire.address(member, piece % RELAY_LANES),
        }
    }

    /// What steps that are under way on a device still need when the call is given up, maybe longer than
    /// there is the group: nothing goes between the ranks for them.
    pub(super) fn pinned(self: &Arc<Self>) -> Pinned {
        match &**self {
            Lanes::Shared(_) => self.clone(),
            Lanes::Wired(wire) => wire.pinned(),
        }
    }

    /// Whether a member has come so far with a piece that it may be at, counted over all calls.
    pub(super) fn has_come(&self, member: usize, mark: Mark, piece: u64) -> bool {
        match self {
            Lanes::Shared(shared) => shared.direct().reached(member, mark) > piece,
            Lanes::Wired(wire) => wire.has_come(member, mark, piece),
        }
    }

    /// Whether a member is done with what was in the lane of a piece before it.
    pub(super) fn has_lane(&self, member: usize, piece: u64) -> bool {
        piece < RELAY_LANES || self.has_come(member, Mark::Done, piece - RELAY_LANES)
    }

    /// This rank has come so far with `pieces` pieces of a call, the first ones; `before` it there were so
    /// many of other calls. What is sent for it is among `parcels` until it has gone.
    pub(super) fn reach(&self, route: &Route, mark: Mark, before: u64, pieces: u64, parcels: &Parcels) {
        match self {
            Lanes::Shared(shared) => shared.direct().reach(mark, before + pieces),
            Lanes::Wired(wire) => wire.reach(route, mark, before, pieces, parcels),
        }
    }

    /// The members that have not been told that this rank is done with so many pieces of all calls, if it is.
    /// What they have been told reaches them even if this process ends, unless the network loses it just
    /// then.
    pub(super) fn untold(&self, pieces: u64) -> Vec<usize> {
        match self {
            Lanes::Shared(_) => Vec::new(),
            Lanes::Wired(wire) => wire.untold(pieces).collect(),
        }
    }

    /// A call begins: what it needs besides this thread is awake by the time that it is needed.
    pub(super) fn rouse(&self) {
        match self {
            Lanes::Shared(_) => {}
            Lanes::Wired(wire) => wire.rouse(),
        }
    }

    /// Whether nothing more goes between this rank and some member.
    pub(super) fn are_broken(&self) -> bool {
        match self {
            Lanes::Shared(_) => false,
            Lanes::Wired(wire) => wire.is_broken(),
        }
    }

    /// An error when a member that is waited for never comes so far; without a mark, never reads.
    pub(super) fn check(
        &self,
        group: &Group,
        watch: &mut Watch,
        (member, mark): (usize, Option<Mark>),
    ) -> Result<()> {
        match self {
            Lanes::Shared(_) => watch.look(group, member),
            Lanes::Wired(wire) => wire.check(group, member, mark),
        }
    }
}
