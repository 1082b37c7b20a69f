//! What is under way to a rank, or from one: parts in slots of pinned memory.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::routes::Part;
use crate::engine::staged::resources::PinnedLane;
use crate::engine::staged::room::Room;
use crate::error::{Result, fail};

/// Slots of a line: one is on its way while the other is filled or emptied, and what the host sees late holds
/// up nothing where there are more.
pub(super) const DEPTH: RangeInclusive<usize> = 2..=4;

/// Room for a part, and how far that has come.
pub(super) struct Slot {
    pub(super) room: Room,
    /// What a copy of the device goes through if the room is not pinned.
    pub(super) via: Option<PinnedLane>,
    pub(super) part: Part,
    pub(super) state: State,
}

impl Slot {
    pub(super) fn new(room: Room) -> Slot {
        Slot { room, via: None, part: Part::default(), state: State::Free }
    }

    /// What the device copies from or to.
    pub(super) fn lane(&self) -> Result<&PinnedLane> {
        match (&self.room, &self.via) {
            (Room::Lane(lane), _) | (_, Some(lane)) => Ok(lane),
            (Room::Kept(_), None) => fail!(Internal, "a device cannot copy from memory that is not pinned"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing is in it.
    Free,
    /// It is being loaded; of the own block between two places of the device, copied.
    Loading,
    /// It is to be sent or received, or is under way.
    Posted,
    /// It is here.
    Arrived,
    /// It is being stored.
    Storing,
}

/// Parts on their way to a rank, or from one.
#[derive(Default)]
pub(super) struct Line {
    pub(super) peer: u32,
    /// Those that have not begun.
    pub(super) parts: VecDeque<Part>,
    pub(super) slots: Vec<Slot>,
}

impl Line {
    /// Whether nothing is left to begin or to end.
    pub(super) fn is_over(&self) -> bool {
        self.parts.is_empty() && self.slots.iter().all(|slot| slot.state == State::Free)
    }

    /// The next part, and a slot that is free for it.
    pub(super) fn next(&self) -> Option<(usize, Part)> {
        let index = self.slots.iter().position(|slot| slot.state == State::Free)?;
        Some((index, *self.parts.front()?))
    }
}

/// Names a slot: its line, its number there.
pub(super) type Spot = (usize, usize);

/// The step of a slot's message in the mailbox.
pub(super) fn step_of((line, slot): Spot) -> u32 {
    (line * DEPTH.end() + slot) as u32
}

/// The slot of a step.
pub(super) fn spot_of(step: u32) -> Spot {
    (step as usize / DEPTH.end(), step as usize % DEPTH.end())
}
