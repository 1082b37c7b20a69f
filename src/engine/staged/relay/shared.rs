//! Lanes of ranks that share memory: a part of every member's segment that all members have mapped and pinned.

use std::sync::Arc;

use super::route::{LANE_BYTES, LANES};
use crate::cuda::context::Devices;
use crate::cuda::memory::Registration;
use crate::engine::direct::Direct;
use crate::engine::group::Group;
use crate::error::Result;
use crate::sys::aside::Aside;

/// Bytes of a member's lanes.
const BYTES: usize = (LANES as usize * LANE_BYTES).next_multiple_of(4096);

/// Bytes of a segment that lanes leave for what cannot do without it: boards, rings.
const SPARED: usize = 128 * 1024 * 1024;

/// The offer of a member that has no lanes.
const NONE: u64 = u64::MAX;

/// Votes.
const NO: u64 = 1;
const YES: u64 = 2;

/// Everybody's lanes.
pub(super) struct Shared {
    /// By member.
    addresses: Vec<*mut u8>,
    pins: Aside<Pins>,
}

// SAFETY: address ranges of shared memory, mapped and pinned as long as the pins; the marks of the board say who touches
// which lane when.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// The lane of `member` with this number.
    pub(super) fn address(&self, member: usize, lane: u64) -> *mut u8 {
        self.addresses[member].wrapping_add(lane as usize * LANE_BYTES)
    }

    /// The boards that say how far everybody has come.
    pub(super) fn direct(&self) -> &Direct {
        &self.pins.direct
    }
}

/// What keeps lanes mapped and pinned.
struct Pins {
    registrations: Vec<Registration>,
    /// Says goodbye to the others' memory when this is gone.
    direct: Arc<Direct>,
}

/// How far the members have agreed on their lanes.
pub(super) enum Agreement {
    /// Waiting to hear where everybody's lanes are.
    Offered(Pinning),
    /// Waiting to hear who can use them.
    Voted(Pinning),
}

/// Lanes that are not everybody's yet.
pub(super) struct Pinning {
    pins: Aside<Pins>,
    addresses: Vec<*mut u8>,
}

// SAFETY: as for `Shared`.
unsafe impl Send for Pinning {}

/// What has come of an agreement.
pub(super) enum Outcome {
    /// Waiting for this member.
    Waits(usize, Agreement),
    /// All have agreed: everybody's lanes, or that there are none.
    Agreed(Option<Shared>),
}

impl Agreement {
    /// Makes this rank's lanes, and tells the others where they are.
    pub(super) fn begin(
        group: &Group,
        direct: &Arc<Direct>,
        devices: &Arc<Devices>,
        device: u32,
    ) -> Agreement {
        let pins = Pins { registrations: Vec::new(), direct: direct.clone() };
        let pins = Aside::new(pins, "pinned memory is not given back");
        let mut pinning = Pinning { pins, addresses: Vec::new() };
        group.endpoint().retired().sweep();
        let segment = group.endpoint().registration().segment();
        let offer = match segment.allocate_sparing(BYTES, 4096, SPARED) {
            Some(region) => {
                let (offset, address) = (region.offset() as u64, region.address().as_ptr());
                direct.lend(region);
                match pinning.pin(devices, device, address) {
                    Ok(()) => offset,
                    Err(error) => {
                        log::debug!("'{}' relays nothing: {error}", group.name());
                        NONE
                    }
                }
            }
            None => {
                log::debug!("'{}' relays nothing: its segment has no room for lanes", group.name());
                NONE
            }
        };
        direct.offer(offer);
        Agreement::Offered(pinning)
    }

    /// Goes on as far as the others have.
    pub(super) fn advance(
        self,
        group: &Group,
        direct: &Direct,
        devices: &Arc<Devices>,
        device: u32,
    ) -> Outcome {
        let size = direct.size();
        let mut pinning = match self {
            Agreement::Voted(pinning) => pinning,
            Agreement::Offered(mut pinning) => {
                if let Some(member) = (0..size).find(|&member| direct.offered(member) == 0) {
                    return Outcome::Waits(member, Agreement::Offered(pinning));
                }
                if (0..size).any(|member| direct.offered(member) == NONE) {
                    return Outcome::Agreed(None);
                }
                let vote = match pinning.pin_all(direct, devices, device, group.rank() as usize) {
                    Ok(true) => YES,
                    Ok(false) => NO,
                    Err(error) => {
                        log::debug!("'{}' relays nothing: {error}", group.name());
                        NO
                    }
                };
                direct.vote(vote);
                pinning
            }
        };
        if let Some(member) = (0..size).find(|&member| direct.voted(member) == 0) {
            return Outcome::Waits(member, Agreement::Voted(pinning));
        }
        let agreed = (0..size).all(|member| direct.voted(member) == YES);
        let addresses = std::mem::take(&mut pinning.addresses);
        Outcome::Agreed(agreed.then(|| Shared { addresses, pins: pinning.pins }))
    }
}

impl Pinning {
    fn pin(&mut self, devices: &Arc<Devices>, device: u32, address: *mut u8) -> Result<()> {
        // SAFETY: a part of a segment, which stays mapped as long as `direct`.
        let registration = unsafe { Registration::new(devices, device, address, BYTES) }?;
        self.pins.registrations.push(registration);
        Ok(())
    }

    /// Pins what the others have offered. `false`: some of it is not there.
    fn pin_all(&mut self, direct: &Direct, devices: &Arc<Devices>, device: u32, rank: usize) -> Result<bool> {
        for member in 0..direct.size() {
            let Some(address) = direct.lent_by(member, direct.offered(member), BYTES) else {
                return Ok(false);
            };
            if member != rank {
                self.pin(devices, device, address)?;
            }
            self.addresses.push(address);
        }
        Ok(true)
    }
}
