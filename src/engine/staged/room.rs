//! Where a piece is between its ranks and its device.

use super::resources::PinnedLane;
use crate::error::{Error, Result, Status};
use crate::sys::memory::Mapping;

/// Room for one piece.
pub(super) enum Room {
    /// In pinned memory.
    Lane(PinnedLane),
    /// In memory that no device reaches, until there is a lane: a message that has come before its stream.
    Kept(Mapping),
}

impl Room {
    /// Room for `bytes` bytes that no driver is asked for.
    pub(super) fn kept(bytes: usize) -> Result<Room> {
        Mapping::private(bytes.max(1)).map(Room::Kept).map_err(|cause| {
            Error::new(
                Status::OutOfMemory,
                format!("{bytes} bytes of a message that has come early: {cause}"),
            )
        })
    }

    /// Its first byte.
    pub(super) fn address(&self) -> *mut u8 {
        match self {
            Room::Lane(lane) => lane.address(),
            // PROOF: offset 0 lies inside every mapping.
            Room::Kept(kept) => kept.address(0, 0).expect("a mapping begins").as_ptr(),
        }
    }

    pub(super) fn lane(self) -> Option<PinnedLane> {
        match self {
            Room::Lane(lane) => Some(lane),
            Room::Kept(_) => None,
        }
    }
}
