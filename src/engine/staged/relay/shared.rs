//! Lanes of ranks that share memory: a part of every member's segment that all members have mapped and
//! pinned.

use std::sync::Arc;

use super::route::{LANE_BYTES, RELAY_LANES};
use crate::cuda::context::Devices;
use crate::cuda::memory::Registration;
use crate::cuda::quiet::Quietly;
use crate::engine::direct::Direct;
use crate::engine::group::Group;
use crate::error::{Result, fail};
use crate::sys::aside::Aside;

/// Bytes of a member's lanes.
const BYTES: usize = (RELAY_LANES as usize * LANE_BYTES).next_multiple_of(4096);

/// Bytes of a segment that lanes leave for what cannot do without it: boards, rings.
const SPARED: usize = 128 * 1024 * 1024;

/// The offer of a member that has no lanes.
const NONE: u64 = u64::MAX;

/// Everybody's lanes.
pub(super) struct Shared {
    /// By member.
    addresses: Vec<*mut u8>,
    pins: Aside<Pins>,
}

// SAFETY: address ranges of shared memory, mapped and pinned as long as the pins; the marks of the board say
// who touches which lane when.
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
    registrations: Vec<Quietly<Registration>>,
    /// Says goodbye to the others' memory when this is gone.
    direct: Arc<Direct>,
}

/// Makes room for this rank's lanes, and tells the others where they are.
pub(super) fn offer(group: &Group, direct: &Direct) {
    group.endpoint().retired().sweep();
    let segment = group.endpoint().registration().segment();
    direct.offer(match segment.allocate_sparing(BYTES, 4096, SPARED) {
        Some(region) => {
            let offset = region.offset() as u64;
            direct.lend(region);
            offset
        }
        None => NONE,
    });
}

/// Pins what all members have offered, in quiet, as long as it `is_wanted`.
pub(super) fn pin(
    direct: &Arc<Direct>,
    devices: &Arc<Devices>,
    device: u32,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Shared> {
    let mut pins = Pins { registrations: Vec::new(), direct: direct.clone() };
    let pinned = pins.pin_all(devices, device, is_wanted);
    let pins = Aside::new(pins, "pinned memory is not given back");
    Ok(Shared { addresses: pinned?, pins })
}

impl Pins {
    /// Where the lanes of all members are.
    fn pin_all(
        &mut self,
        devices: &Arc<Devices>,
        device: u32,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Vec<*mut u8>> {
        let mut addresses = Vec::new();
        for member in 0..self.direct.size() {
            let Some(address) = self.direct.lent_by(member, self.direct.offered(member), BYTES) else {
                fail!(OutOfMemory, "the segment of rank {member} has no room for lanes");
            };
            // SAFETY: a part of a segment, which stays mapped as long as `direct`.
            let register = || unsafe { Registration::new(devices, device, address, BYTES) };
            let Some(registration) = devices.in_quiet(is_wanted, register) else {
                fail!(Aborted, "the group has ended");
            };
            self.registrations.push(Quietly::new(devices, registration?));
            addresses.push(address);
        }
        Ok(addresses)
    }
}
