//! The loads of a lane, pieces of large messages, which it leaves to its hauler.

use std::io::{self, IoSlice};

use super::reading::Incoming;
use super::writing::Outgoing;
use super::{Lane, Target};
use crate::engine::wire::FrameKind;

/// What [`Lane::haul`] has done.
#[derive(Clone, Copy, Debug)]
pub struct Hauled {
    /// Whether anything moved.
    pub moved: bool,
    /// Whether there is something for [`Lane::read`] or [`Lane::flush`] to tell.
    pub tells: bool,
    /// Whether a load is left, so that whoever hauls goes on. If not, it will be offered again.
    pub more: bool,
}

/// A piece of a large message of which at least this much is missing is a load.
const LOAD: usize = 64 * 1024;

/// Bytes that are hauled in one system call: each direction has its turn, and who wants the lane does not
/// wait long.
const HAUL: usize = 256 * 1024;

impl Lane {
    /// Leaves loads, the pieces of large messages, to [`Lane::haul`] from here on. Not where data costs no
    /// system call.
    pub fn leave_loads(&mut self) {
        self.hauled = self.reads_ahead;
    }

    /// Whether there is a load that can be moved and that its hauler has not been told of. Whoever asks tells
    /// it.
    pub fn offers(&mut self) -> bool {
        let moves = self.has_load_in() && !self.dry || self.has_load_out() && !self.blocked;
        let offers = moves && !self.offered;
        self.offered |= offers;
        offers
    }

    /// The hauler gives up loads that do not move. [`Lane::revive`] has them offered again.
    pub fn give_back(&mut self) {
        self.offered = false;
        self.dry = self.has_load_in();
    }

    /// The kernel says that something moves.
    pub fn revive(&mut self) {
        self.dry = false;
        self.blocked &= !self.has_load_out();
    }

    /// Moves a part of the loads, each direction's. Whoever has been told of them calls this until there is
    /// no more.
    pub fn haul(&mut self) -> Hauled {
        let mut moved = false;
        if self.has_load_out() {
            match self.haul_out() {
                Ok(count) => moved |= count > 0,
                Err(error) if is_for_now(&error) => {}
                Err(error) => {
                    (self.blocked, self.takes_nothing) = (false, true);
                    self.refused = Some(error);
                }
            }
        }
        if self.has_load_in()
            && let Some(incoming) = &mut self.incoming
        {
            let missing = incoming.frame.length as usize - incoming.filled;
            match incoming.read_from(&mut *self.stream, missing.min(HAUL), &mut self.buffer) {
                Ok(0) => self.shut(),
                Ok(_) => (moved, self.drained) = (true, false),
                Err(error) if is_for_now(&error) => {}
                Err(error) => self.ended = Some(error),
            }
        }
        let more = self.has_load_in() || self.has_load_out();
        self.offered = more;
        let tells = !self.has_load_in() && self.incoming.is_some()
            || !self.finished.is_empty()
            || !self.outgoing.is_empty() && !self.takes_nothing && !self.has_load_out()
            || self.closed
            || self.ended.is_some()
            || self.refused.is_some();
        Hauled { moved, tells, more }
    }

    fn haul_out(&mut self) -> io::Result<usize> {
        let Some(front) = self.outgoing.front_mut() else { return Ok(0) };
        let [header, payload] = front.rest();
        let parts = [IoSlice::new(header), IoSlice::new(&payload[..payload.len().min(HAUL)])];
        let parts = if header.is_empty() { &parts[1..] } else { &parts[..] };
        self.blocked = true;
        let count = self.stream.write(parts)?;
        self.blocked = false;
        front.written += count;
        if front.left() == 0
            && let Some(Outgoing { ticket, piece, .. }) = self.outgoing.pop_front()
        {
            match ticket {
                Some(ticket) => self.finished.push((ticket, piece)),
                None => self.owed -= 1,
            }
        }
        Ok(count)
    }

    /// Whether what comes next is the payload of a frame, and a load. The last of it is hauled with the rest.
    pub(super) fn has_load_in(&self) -> bool {
        let goes_on = |incoming: &Incoming| {
            let missing = incoming.frame.length as usize - incoming.filled;
            let begun = self.offered && missing > 0 && incoming.filled > 0;
            let is_piece =
                incoming.frame.kind == FrameKind::Data && matches!(incoming.target, Target::User(_));
            is_piece && (missing >= LOAD || begun)
        };
        self.hauled
            && self.can_haul()
            && self.start == self.end
            && self.incoming.as_ref().is_some_and(goes_on)
    }

    fn has_load_out(&self) -> bool {
        self.hauled
            && self.can_haul()
            && !self.takes_nothing
            && self.outgoing.front().is_some_and(|front| front.piece.is_some())
    }

    pub(super) fn can_haul(&self) -> bool {
        !self.closed && self.ended.is_none()
    }
}

/// Whether an error says only that nothing moves now.
fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
