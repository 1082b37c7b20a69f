//! What a call's pieces lie in: how it takes its lanes, brings to them what was kept, and gives them back.

use std::sync::Arc;

use super::resources::{self, PinnedLane, SPARE_BYTES, Supply};
use super::room::Room;
use super::{Cut, LANES, Side, Staged, StreamOrder};
use crate::cuda::context::Devices;
use crate::error::{Result, fail};

/// Input and output of a piece begin at multiples of this many bytes.
const ALIGNMENT: usize = 4096;

/// Lanes that a call has before it begins; it, or others, when this is dropped.
pub struct Provision(Vec<PinnedLane>);

impl Provision {
    /// So many lanes for a call on a device between these sides, which are cut so, into elements of so many
    /// bytes; fewer if it has fewer pieces, or the driver is not to be asked now. May wait for the driver:
    /// not with a lock held, nor behind what waits for the caller.
    pub fn take(
        (devices, device): (&Arc<Devices>, u32),
        sides: &[Side; 2],
        (cut, element): (&Cut, usize),
        lanes: u32,
    ) -> Result<Provision> {
        let (bytes, supply) = (lane_bytes(sides.each_ref(), cut, element), Supply::ahead(devices, device));
        let mut provision = Provision(Vec::new());
        for _ in 0..cut.pieces().min(lanes.max(u32::from(bytes > SPARE_BYTES))) {
            let Some(lane) = supply.lane(bytes, provision.0.is_empty())? else { break };
            provision.0.push(lane);
        }
        Ok(provision)
    }
}

impl Drop for Provision {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            resources::give_back(std::mem::take(&mut self.0));
        }
    }
}

/// How long the lanes of a call are.
fn lane_bytes(sides: [&Side; 2], cut: &Cut, element: usize) -> usize {
    let largest = cut.piece(0);
    let [input, output] = sides.map(|side| side.shape.piece_bytes(largest, element));
    input.next_multiple_of(ALIGNMENT) + output
}

impl Staged {
    /// Has what was taken for it.
    pub fn with(mut self, mut provision: Provision) -> Staged {
        std::mem::take(&mut provision.0).into_iter().for_each(|lane| self.free.push(lane));
        self
    }

    /// Sees to the call's pinned memory before it begins, or its stream waits: none is made in its course,
    /// since the driver may wait for streams that wait for calls behind it. A call that a courier serves
    /// takes all that it can use if it is the `first` that the stream waits for; else one lane, and later
    /// what earlier calls have done with. Others find there what they can use when they come to it. May wait
    /// for the driver: not with a lock held.
    pub fn provided(mut self, first: bool, streams_wait: &dyn Fn() -> bool) -> Result<Staged> {
        let lanes = if first { self.most_lanes() } else { 1 };
        self.provide(lanes, streams_wait)?;
        Ok(self)
    }

    pub(super) fn provide(&mut self, lanes: u32, streams_wait: &dyn Fn() -> bool) -> Result<()> {
        if self.job.unstaged || !self.free.is_empty() {
            return Ok(());
        }
        let (bytes, supply) = (self.lane_bytes(), Supply::new(&self.job.order, streams_wait));
        // For which the spare one is too short.
        let is_long = bytes > SPARE_BYTES;
        let lanes = self.job.cut.pieces().min(lanes.max(u32::from(is_long)));
        if self.job.order.errand.is_none() && !is_long {
            return supply.stock(bytes, lanes as usize);
        }
        for _ in 0..lanes {
            let Some(lane) = supply.lane(bytes, self.free.is_empty())? else { break };
            self.free.push(lane);
        }
        Ok(())
    }

    /// Nothing of it is to be staged after all.
    pub(super) fn waive(&mut self) {
        resources::give_back(self.lanes());
    }

    /// Lanes that it can use: behind those pieces that are exchanged at once, one is loaded and one stored.
    pub(super) fn most_lanes(&self) -> u32 {
        LANES - 1 + self.job.abreast
    }

    pub(super) fn lane_bytes(&self) -> usize {
        lane_bytes([&self.job.input, &self.job.output], &self.job.cut, self.job.element)
    }

    /// A lane for the next piece.
    fn next_lane(&mut self) -> Result<Option<PinnedLane>> {
        if let Some(lane) = self.free.pop() {
            return Ok(Some(lane));
        }
        // Calls before it may need those.
        if self.job.order.errand.is_some() && !self.has_entered()? {
            return Ok(None);
        }
        let StreamOrder { devices, device, .. } = &self.job.order;
        Ok(PinnedLane::take_kept(devices, *device, self.lane_bytes()))
    }

    /// The device's spare lane for one copy that can begin: of the first piece that is under way.
    fn spare_lane(&mut self) -> Result<Option<PinnedLane>> {
        if self.lane_bytes() > SPARE_BYTES || !self.has_entered()? {
            return Ok(None);
        }
        Ok(PinnedLane::take_spare(&self.job.order))
    }

    /// Takes room for the next piece. Whether there is any.
    pub(super) fn issue(&mut self) -> Result<bool> {
        if self.issued == self.job.cut.pieces() {
            return Ok(false);
        }
        if !self.job.unstaged {
            let full = self.issued - self.stored >= self.most_lanes();
            let lane = if full { None } else { self.next_lane()? };
            let room = match lane {
                Some(lane) => Some(Room::Lane(lane)),
                None if self.keeps()? => Some(Room::kept(self.lane_bytes())?),
                // Without lanes, one piece after the other.
                None if !self.busy.is_empty() || !self.has_entered()? => None,
                None if self.job.input.is_on_device() => self.spare_lane()?.map(Room::Lane),
                None => Some(Room::kept(self.lane_bytes())?),
            };
            let Some(room) = room else { return Ok(false) };
            self.busy.push(room);
        }
        self.load(self.issued)?;
        self.issued += 1;
        Ok(true)
    }

    /// Whether the next piece is kept however much is: a message that comes before the stream, all of it. Who
    /// has sent it may wait for that before it sends what this stream waits for.
    fn keeps(&mut self) -> Result<bool> {
        Ok(self.begun && self.issued - self.exchanged < self.abreast() && !self.has_entered()?)
    }

    /// Where a piece is, its input and its output in it.
    pub(super) fn room(&self, index: u32) -> (&Room, *mut u8, *mut u8) {
        let room = &self.busy[(index - self.stored) as usize];
        let largest = self.job.cut.piece(0);
        let input = self.job.input.shape.piece_bytes(largest, self.job.element);
        let start = room.address();
        if self.job.forwards {
            return (room, start, start);
        }
        (room, start, start.wrapping_add(input.next_multiple_of(ALIGNMENT)))
    }

    /// Whether a piece is where no device reaches it.
    pub(super) fn is_kept(&self, index: u32) -> bool {
        matches!(self.busy.get((index - self.stored) as usize), Some(Room::Kept(_)))
    }

    /// The lane of a piece that is copied by the device.
    pub(super) fn lane(&self, index: u32) -> Result<&PinnedLane> {
        match self.room(index).0 {
            Room::Lane(lane) => Ok(lane),
            Room::Kept(_) => fail!(Internal, "a device cannot copy from memory that is not pinned"),
        }
    }

    /// Brings a piece that was kept to a lane, if there is one.
    pub(super) fn pin(&mut self, index: u32) -> Result<bool> {
        let at = (index - self.stored) as usize;
        if !self.is_kept(index) {
            return Ok(true);
        }
        let busy = index - self.stored >= self.most_lanes();
        let lane = if busy { None } else { self.next_lane()? };
        let lane = match lane {
            None if index == self.stored => self.spare_lane()?,
            lane => lane,
        };
        let Some(lane) = lane else { return Ok(false) };
        let (kept, bytes) = (self.busy[at].address(), self.lane_bytes());
        // SAFETY: both hold as much, and nobody else uses either.
        unsafe { std::ptr::copy_nonoverlapping(kept, lane.address(), bytes) };
        self.busy[at] = Room::Lane(lane);
        Ok(true)
    }

    pub(super) fn lanes(&mut self) -> Vec<PinnedLane> {
        self.free.take_all().chain(self.busy.take_all().filter_map(Room::lane)).collect()
    }
}
