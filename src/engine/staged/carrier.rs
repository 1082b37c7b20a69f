//! What carries a call's bytes between its device and pinned memory: a courier on the caller's stream, or
//! side streams.

use std::sync::Arc;

use super::porter::{self, Copying, Porter};
use super::relay::Combine;
use super::resources::{Bay, PinnedLane, Ringer};
use super::{Combined, StreamOrder, resources};
use crate::cuda::courier::{Customer, Desk, Errand, PLACED, TOLD};
use crate::cuda::kernels::Launch;
use crate::engine::group::Group;
use crate::error::{Result, fail};
use crate::reduce::{Operand, Representation};

/// One call's.
pub(super) struct Carrier {
    way: Way,
    ringer: Ringer,
}

enum Way {
    Courier(Customer),
    /// Where the caller's stream waits for side streams: it goes on behind the last of what they are given.
    Bay(Arc<Bay>),
    /// Where none does.
    Porter(Porter),
}

impl Carrier {
    pub(super) fn new(order: &StreamOrder, group: &Group) -> Result<Carrier> {
        let way = match &order.errand {
            Some(errand) => Way::Courier(errand.customer().clone()),
            None => {
                let bay = Bay::take(&order.devices, order.device)?;
                match order.exit {
                    Some(_) => Way::Bay(bay),
                    None => Way::Porter(Porter::new(bay)),
                }
            }
        };
        Ok(Carrier { way, ringer: Ringer::new(group.endpoint()) })
    }

    /// Begins to copy to pinned memory, for what is in `lane`.
    ///
    /// # Safety
    /// As [`Stream`](crate::cuda::stream::Stream) says.
    pub(super) unsafe fn load(
        &self,
        order: &StreamOrder,
        lane: &PinnedLane,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        match &self.way {
            // SAFETY: the caller's promise.
            Way::Courier(_) => unsafe { carry(order, Desk::Load, lane, pinned(to), from, bytes) },
            // SAFETY: the caller's promise.
            Way::Bay(bay) => unsafe { order.copy_to_host(&bay.load, to, from, bytes) },
            // SAFETY: the caller's promise.
            Way::Porter(porter) => unsafe {
                let copy = Copying { way: porter::Way::ToHost, to: pinned(to), from, bytes };
                porter.order(order, Desk::Load, lane, copy)
            },
        }
    }

    /// As [`Carrier::load`], of all that comes to `lane` from the device, which begins there: what is short
    /// has come sooner so.
    ///
    /// # Safety
    /// As [`Carrier::load`].
    pub(super) unsafe fn load_all(
        &self,
        order: &StreamOrder,
        lane: &PinnedLane,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let to = lane.address();
        if !matches!(self.way, Way::Courier(_)) || bytes > TOLD {
            // SAFETY: the caller's promise.
            return unsafe { self.load(order, lane, to, from, bytes) };
        }
        lane.expect(bytes);
        // SAFETY: the caller's promise; a lane has room for twice as many.
        lane.note(Desk::Load, unsafe { errand(order)?.tell(pinned(to), from, bytes) });
        Ok(())
    }

    /// Begins to copy from one place of the device to another, at the desk for loads or the one for stores.
    ///
    /// # Safety
    /// As [`Carrier::load`].
    pub(super) unsafe fn shift(
        &self,
        order: &StreamOrder,
        desk: Desk,
        lane: &PinnedLane,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        match (&self.way, desk) {
            // SAFETY: the caller's promise.
            (Way::Courier(_), _) => unsafe { carry(order, desk, lane, to, from, bytes) },
            // SAFETY: the caller's promise.
            (Way::Bay(bay), Desk::Load) => unsafe { order.copy_on_device(&bay.load, to, from, bytes) },
            // SAFETY: the caller's promise.
            (Way::Bay(bay), _) => unsafe { order.copy_on_device(&bay.store, to, from, bytes) },
            // SAFETY: the caller's promise.
            (Way::Porter(porter), _) => unsafe {
                porter.order(order, desk, lane, Copying { way: porter::Way::OnDevice, to, from, bytes })
            },
        }
    }

    /// Begins to copy from pinned memory.
    ///
    /// # Safety
    /// As [`Carrier::load`].
    pub(super) unsafe fn store(
        &self,
        order: &StreamOrder,
        lane: &PinnedLane,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        match &self.way {
            Way::Courier(_) if bytes <= PLACED => {
                // SAFETY: the caller's promise: these bytes have come.
                let bytes = unsafe { std::slice::from_raw_parts(from, bytes) };
                // SAFETY: the caller's promise.
                lane.note(Desk::Store, unsafe { errand(order)?.place(to, bytes) });
                Ok(())
            }
            // SAFETY: the caller's promise.
            Way::Courier(_) => unsafe { carry(order, Desk::Store, lane, to, pinned(from), bytes) },
            // SAFETY: the caller's promise.
            Way::Bay(bay) => unsafe { order.copy_to_device(&bay.store, to, from, bytes) },
            // SAFETY: the caller's promise.
            Way::Porter(porter) => unsafe {
                let copy = Copying { way: porter::Way::ToDevice, to, from: pinned(from), bytes };
                porter.order(order, Desk::Store, lane, copy)
            },
        }
    }

    /// Begins to combine what has come with what is on the device, `own`, to `to`. Of couriers that can.
    ///
    /// # Safety
    /// As [`Carrier::load`], of all three.
    pub(super) unsafe fn combine(
        &self,
        order: &StreamOrder,
        lane: &PinnedLane,
        Combined { combine: Combine { dtype, operator }, own_is_left, .. }: &Combined,
        (to, own): (u64, u64),
        come: *const u8,
        bytes: usize,
    ) -> Result<()> {
        let operand = |address| Operand { address, representation: Representation::Element, scale: 1.0 };
        let own = operand(std::ptr::with_exposed_provenance(own as usize));
        let operands = if *own_is_left { [own, operand(come)] } else { [operand(come), own] };
        let (out, count) = (std::ptr::with_exposed_provenance_mut(to as usize), bytes / dtype.size());
        let launch = Launch::new(*dtype, operator, 2, &operands, out, Representation::Element, count);
        // SAFETY: the caller's promise.
        lane.note(Desk::Work, unsafe { errand(order)?.combine(launch) });
        Ok(())
    }

    /// All has begun that goes to `lane` or comes from it.
    pub(super) fn given(&self, desk: Desk, lane: &PinnedLane) -> Result<()> {
        if let Way::Bay(bay) = &self.way {
            match desk {
                Desk::Load => lane.loaded.record(&bay.load)?,
                Desk::Store | Desk::Work => lane.stored.record(&bay.store)?,
            }
        }
        self.ringer.ring();
        Ok(())
    }

    /// Begins what has been ordered and can begin by now.
    pub(super) fn move_on(&self, order: &StreamOrder) -> Result<()> {
        if let Way::Porter(porter) = &self.way
            && porter.move_on(order, Desk::Load)? | porter.move_on(order, Desk::Store)?
        {
            self.ringer.ring();
        }
        Ok(())
    }

    /// Whether that has ended.
    pub(super) fn has_ended(&self, order: &StreamOrder, desk: Desk, lane: &PinnedLane) -> Result<bool> {
        match (&self.way, desk) {
            (Way::Porter(porter), _) => {
                self.move_on(order)?;
                Ok(porter.has_ended(desk, lane))
            }
            (Way::Courier(customer), _) => {
                // Of a piece in which this rank has no bytes nothing is ordered.
                let has_done =
                    || lane.ordered(desk).is_none_or(|number| customer.courier().has_done(desk, number));
                Ok(match desk {
                    // What has no slip yet is given one where it is asked for.
                    Desk::Load if lane.is_telling() => {
                        lane.has_been_told() || has_done() && lane.has_been_told()
                    }
                    _ => has_done(),
                })
            }
            (Way::Bay(_), Desk::Load) => lane.loaded.query(),
            (Way::Bay(_), Desk::Store | Desk::Work) => lane.stored.query(),
        }
    }

    /// Everything that is to be stored has begun: the caller's stream goes on behind it.
    pub(super) fn let_go(&self, order: &mut StreamOrder) -> Result<()> {
        if let (Way::Bay(bay), Some(exit)) = (&self.way, &order.exit) {
            bay.store.release_word(exit)?;
        }
        order.errand = None;
        Ok(())
    }

    /// Lets go of what a call ran in that is given up, when copies may be under way.
    pub(super) fn leave(self, order: &mut StreamOrder, lanes: Vec<PinnedLane>, released: bool) {
        match self.way {
            Way::Courier(customer) => {
                order.errand = None;
                customer.give_up();
                resources::park_behind(customer.courier().clone(), lanes);
            }
            Way::Bay(bay) => resources::leave(order, &bay, lanes, released),
            Way::Porter(porter) => porter.leave(lanes),
        }
    }
}

/// Orders bytes to be carried for what is in `lane`.
///
/// # Safety
/// As [`Carrier::load`].
unsafe fn carry(
    order: &StreamOrder,
    desk: Desk,
    lane: &PinnedLane,
    to: u64,
    from: u64,
    bytes: usize,
) -> Result<()> {
    // SAFETY: the caller's promise.
    lane.note(desk, unsafe { errand(order)?.order(desk, to, from, bytes) });
    Ok(())
}

fn errand(order: &StreamOrder) -> Result<&Errand> {
    match &order.errand {
        Some(errand) => Ok(errand),
        None => fail!(Internal, "a courier was ordered something after it was let go"),
    }
}

/// Where a device finds pinned memory.
fn pinned<T>(address: *const T) -> u64 {
    address.expose_provenance() as u64
}
