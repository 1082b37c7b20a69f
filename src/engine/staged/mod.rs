//! Calls on device memory by way of the host: load, exchange, store.
//!
//! A call is cut into pieces ([`cut`]). Each is loaded from the device into pinned memory, exchanged there by
//! the operation that a call on host memory would be, and stored from pinned memory to the device. The next
//! pieces are loaded and the last ones stored meanwhile: up to [`LANES`] pieces are under way. Of a message
//! several are exchanged at once, behind the first, and so many more are under way. Calls that no cut of all
//! ranks fits, since their lists may differ from rank to rank, go message by message ([`lists`]).
//!
//! A call on a stream has a courier there ([`crate::cuda::courier`]), which loads and stores as the host
//! orders and is dismissed behind the last order. The host asks the driver for nothing meanwhile
//! ([`carrier`]).
//!
//! Otherwise loads and stores run on side streams, once the host has seen the *entry*: that the caller's
//! stream has come to the call. If the caller's stream waits, then for the *exit*, a word that the side
//! stream of the stores releases behind the last of them. The host learns of the entry and of copies by their
//! events. A device has fewer queues than a process has streams, and what waits in one stream holds up others
//! that share its queue, and so maybe that which it waits for. Hence side streams are given nothing that
//! cannot run at once; and a stream waits for an exit only where there are queues enough
//! ([`crate::cuda::queues`]), else the thread that calls does. Where none waits, each side stream has one
//! copy at a time (`porter`).
//!
//! Whoever moves operations looks at couriers and events at once for half a millisecond, then after naps
//! ([`super::endpoint`]).
//!
//! A call that is given up dismisses its courier, or enqueues the release of the exit, behind the copies that
//! are under way: the caller's stream goes on when nothing touches the caller's memory any more, and not
//! before.
//!
//! Memory of the host that a call on devices names, or that a call ordered on a stream names, is copied by
//! the processor once the entry has been reached.

mod carrier;
mod copies;
mod cut;
mod few;
mod job;
mod lanes;
mod lists;
mod parting;
mod pool;
mod porter;
pub mod relay;
mod resources;
mod room;
mod standing;
mod transfer;

use std::sync::Arc;
use std::task::Poll;

use carrier::Carrier;
pub use copies::COPY;
pub use cut::{Blocks, Cut, Piece, Shape, Strip};
use few::Few;
pub use job::{Combined, Exchange, Job, Place, Side, StreamOrder};
pub use lanes::Provision;
pub use lists::{Lists, Routes};
#[cfg(test)]
pub(crate) use resources::Hoard;
use resources::PinnedLane;
pub use resources::{Entry, front, prepare, stream_beside};
use room::Room;
pub use transfer::{Load, store};

use super::endpoint::Through;
use super::group::{Group, Turn};
use super::operation::{Completion, Exits, Operation};
use crate::cuda::courier::{Courier, Desk};
use crate::cuda::word::Word;
use crate::error::{Result, fail};

/// Bytes of a piece, of all blocks together.
pub const PIECE_BYTES: usize = 4 * 1024 * 1024;

/// Pieces under way: one is loaded, one exchanged, one stored.
pub const LANES: u32 = 3;

/// Pieces of a message that are exchanged at once: each is asked for and answered before its bytes go.
pub const MESSAGE_ABREAST: u32 = 3;

/// One call under way.
pub struct Staged {
    job: Job,
    /// Set when it begins.
    turn: Option<Turn>,
    carrier: Option<Carrier>,
    /// Where pieces are that have been issued, but not stored, in their order.
    busy: Few<Room>,
    /// Lanes that no piece is in.
    free: Few<PinnedLane>,
    /// What is exchanged: the pieces from `exchanged` on.
    current: Few<Box<dyn Operation>>,
    entered: bool,
    /// Whether it exchanges before its entry, whatever it is to obtain.
    begun: bool,
    // stored <= delivered <= exchanged <= issued <= stored + most_lanes, or more where pieces are kept:
    // `busy` begins with piece `stored`.
    /// Pieces whose load has been issued,
    issued: u32,
    /// that have been exchanged,
    exchanged: u32,
    /// whose store has been issued,
    delivered: u32,
    /// whose store is complete.
    stored: u32,
    /// How many pieces of a rank's own result have had their store issued, in whatever order.
    forwarded: u32,
    completion: Completion,
    released: bool,
    /// What went wrong before anybody looked.
    early: Result<()>,
}

impl Staged {
    /// A call.
    ///
    /// # Safety
    /// Both sides stay valid until the operation has ended or is abandoned, and then until its stream has
    /// been let go.
    pub unsafe fn new(job: Job) -> Staged {
        Staged {
            job,
            turn: None,
            carrier: None,
            busy: Few::new(),
            free: Few::new(),
            current: Few::new(),
            entered: false,
            begun: false,
            issued: 0,
            exchanged: 0,
            delivered: 0,
            stored: 0,
            forwarded: 0,
            completion: Completion::default(),
            released: false,
            early: Ok(()),
        }
    }

    /// It is the call of `turn`.
    pub fn at(mut self, turn: &Turn) -> Staged {
        self.turn = Some(*turn);
        self
    }

    fn turn(&self) -> Result<&Turn> {
        match &self.turn {
            Some(turn) => Ok(turn),
            None => fail!(Internal, "a call was moved before it began"),
        }
    }

    /// Begins at once, as a receive has to: receives of one tag keep the order of their calls.
    pub fn begun(mut self, group: &Group) -> Staged {
        self.begun = true;
        self.early = self.step(group).map(drop);
        self
    }

    /// What a stream waits for until it has ended.
    pub fn exit(&self) -> Option<&Arc<Word>> {
        self.job.order.exit.as_ref()
    }

    /// Whether nothing can be done before the entry.
    fn begins_at_entry(&self) -> bool {
        // A courier finds its first orders when it comes.
        if self.job.input.is_on_device() && self.job.order.errand.is_some() {
            return false;
        }
        // What a call obtains comes from other ranks, maybe before this one's stream has come so far.
        self.job.input.shape.bytes > 0 || self.moves_nothing() && !self.begun
    }

    /// Takes what the call runs in.
    fn set_out(&mut self, group: &Group) -> Result<()> {
        self.carrier = Some(Carrier::new(&self.job.order, group)?);
        Ok(())
    }

    /// What a piece is exchanged between: NULL where there is nothing.
    fn sides(&self, index: u32) -> (*mut u8, *mut u8) {
        if let (true, Place::Host(input), Place::Host(output)) =
            (self.job.unstaged, self.job.input.place, self.job.output.place)
        {
            return (input, output);
        }
        let address =
            |side: &Side, address| if side.shape.bytes > 0 { address } else { std::ptr::null_mut() };
        let (_, input, output) = self.room(index);
        let input = address(&self.job.input, input);
        (input, if self.job.forwards { input } else { address(&self.job.output, output) })
    }

    fn carrier(&self) -> &Carrier {
        // PROOF: `step` sets out before anything else.
        self.carrier.as_ref().expect("set out")
    }

    /// The caller's stream goes on behind what has begun.
    fn let_go(&mut self) -> Result<()> {
        if let Some(carrier) = &self.carrier {
            carrier.let_go(&mut self.job.order)?;
        }
        self.released = true;
        Ok(())
    }

    /// Whether the caller's stream has come to the call.
    fn has_entered(&mut self) -> Result<bool> {
        self.entered = self.entered || self.job.order.entry.has_come()?;
        Ok(self.entered)
    }

    /// Begins to load a piece. The entry has come, or a courier waits for it.
    fn load(&mut self, index: u32) -> Result<()> {
        let piece = self.job.cut.piece(index);
        let Side { place, ref shape } = self.job.input;
        if shape.bytes == 0 || self.job.unstaged {
            return Ok(());
        }
        let (_, to, _) = self.room(index);
        let (order, carrier) = (&self.job.order, self.carrier());
        let whole = shape.piece_bytes(piece, self.job.element);
        for Strip { at, packed, bytes } in shape.strips(piece, self.job.element) {
            let to = to.wrapping_add(packed);
            match place {
                Place::Device(from) if bytes == whole => {
                    // SAFETY: the bytes lie in the caller's memory, which has been promised, and in the lane,
                    // which is this call's.
                    unsafe { carrier.load_all(order, self.lane(index)?, from + at as u64, bytes) }?
                }
                Place::Device(from) => {
                    // SAFETY: the strips lie in the caller's memory, which has been promised, and in the
                    // lane, which is this call's and was made for its largest piece.
                    unsafe { carrier.load(order, self.lane(index)?, to, from + at as u64, bytes) }?
                }
                // SAFETY: as above.
                Place::Host(from) => unsafe {
                    std::ptr::copy_nonoverlapping(from.wrapping_add(at).cast_const(), to, bytes);
                },
            }
        }
        if let Place::Device(_) = place {
            carrier.given(Desk::Load, self.lane(index)?)?;
            // A stream need not wait for what is only sent.
            let last = index + 1 == self.job.cut.pieces();
            if last && self.job.output.shape.bytes == 0 && order.errand.is_some() {
                self.let_go()?;
            }
        }
        Ok(())
    }

    /// Where a rank has its result, and where it goes, if both are on its device.
    fn own_result(&self) -> Option<(u64, u64)> {
        match (self.job.input.place, self.job.output.place) {
            (Place::Device(from), Place::Device(to))
                if self.job.forwards && self.job.output.shape.bytes > 0 =>
            {
                Some((from, to))
            }
            _ => None,
        }
    }

    /// Begins to store a piece of such a result, which waits for no other rank. Not before it is loaded:
    /// nothing of a call that is given up is written when its stream comes. The last piece may come before
    /// one that waits for pinned memory.
    fn keep(&mut self, index: u32, (from, to): (u64, u64)) -> Result<()> {
        let (order, carrier, lane) = (&self.job.order, self.carrier(), self.lane(index)?);
        let shape = &self.job.output.shape;
        for Strip { at, bytes, .. } in shape.strips(self.job.cut.piece(index), self.job.element) {
            let (to, from) = (to + at as u64, from + at as u64);
            // SAFETY: as in `Staged::load`.
            unsafe { carrier.shift(order, Desk::Store, lane, to, from, bytes) }?;
        }
        carrier.given(Desk::Store, lane)?;
        self.forwarded += 1;
        if self.forwarded == self.job.cut.pieces() { self.let_go() } else { Ok(()) }
    }

    fn is_loaded(&mut self, index: u32) -> Result<bool> {
        let at = (index - self.stored) as usize;
        let (true, Some(Room::Lane(lane))) = (self.job.input.is_on_device(), self.busy.get(at)) else {
            return Ok(true);
        };
        if !self.carrier().has_ended(&self.job.order, Desk::Load, lane)? {
            return Ok(false);
        }
        if lane.is_spare() {
            // Others need it while this one waits for other ranks.
            let (bytes, kept) = (self.lane_bytes(), Room::kept(self.lane_bytes())?);
            // SAFETY: both hold as much, and nobody else uses either.
            unsafe { std::ptr::copy_nonoverlapping(lane.address(), kept.address(), bytes) };
            let lane = std::mem::replace(&mut self.busy[at], kept).lane();
            resources::give_back(lane.into_iter().collect());
        }
        Ok(true)
    }

    /// Begins to store a piece. Whether it could.
    fn store(&mut self, index: u32) -> Result<bool> {
        let piece = self.job.cut.piece(index);
        let last = index + 1 == self.job.cut.pieces();
        if (self.job.output.shape.bytes > 0 || self.begun) && !self.has_entered()? {
            return Ok(false);
        }
        let on_device = self.job.output.is_on_device();
        let was_kept = self.is_kept(index);
        if on_device && !self.pin(index)? {
            return Ok(false);
        }
        let Side { place, ref shape } = self.job.output;
        if !on_device && (shape.bytes == 0 || self.job.unstaged) {
            if last {
                self.released = true;
                self.job.order.release();
            }
            return Ok(true);
        }
        if let Some(both) = self.own_result() {
            // Else that has been.
            if was_kept {
                self.keep(index, both)?;
            }
            return Ok(true);
        }
        let (_, _, from) = self.room(index);
        let (order, carrier) = (&self.job.order, self.carrier());
        for Strip { at, packed, bytes } in shape.strips(piece, self.job.element) {
            let from = from.wrapping_add(packed).cast_const();
            match (place, &self.job.combined) {
                (Place::Device(to), Some(combined)) => {
                    let (at, lane) = (at as u64, self.lane(index)?);
                    // SAFETY: as in `Staged::load`.
                    unsafe {
                        carrier.combine(order, lane, combined, (to + at, combined.own + at), from, bytes)
                    }?
                }
                (Place::Device(to), None) => {
                    // SAFETY: as in `Staged::load`.
                    unsafe { carrier.store(order, self.lane(index)?, to + at as u64, from, bytes) }?
                }
                // SAFETY: as in `Staged::load`.
                (Place::Host(to), _) => unsafe {
                    std::ptr::copy_nonoverlapping(from, to.wrapping_add(at), bytes);
                },
            }
        }
        if on_device {
            carrier.given(self.stores_at(), self.lane(index)?)?;
        }
        if last && on_device {
            self.let_go()?;
        } else if last {
            self.released = true;
            self.job.order.release();
        }
        Ok(true)
    }

    /// Which desk writes the output.
    fn stores_at(&self) -> Desk {
        if self.job.combined.is_some() { Desk::Work } else { Desk::Store }
    }

    fn is_stored(&self, index: u32) -> Result<bool> {
        if self.job.output.is_on_device() {
            self.carrier().has_ended(&self.job.order, self.stores_at(), self.lane(index)?)
        } else {
            Ok(true)
        }
    }

    /// The courier, if it serves this call alone. What starts together shares one, and may need what another
    /// stores; else the stream sees to that, whoever has the turn: the couriers of calls behind this one come
    /// when its own has left.
    fn own_courier(&self) -> Option<&Courier> {
        self.job.order.entry.courier().filter(|courier| !courier.is_shared())
    }

    /// Whether the couriers of calls behind this one come when what it stores has been stored.
    fn is_ordered_by_courier(&self) -> bool {
        self.job.order.entry.courier().is_some_and(Courier::stays_unshared)
    }

    /// Whether nothing is loaded or stored.
    fn moves_nothing(&self) -> bool {
        self.job.unstaged || self.job.input.shape.bytes == 0 && self.job.output.shape.bytes == 0
    }

    /// Pieces that may be exchanged at once: the first of a message goes by itself.
    fn abreast(&self) -> u32 {
        if self.exchanged == 0 { 1 } else { self.job.abreast }
    }

    /// Moves on as far as it can. Whether the call has ended.
    fn step(&mut self, group: &Group) -> Result<bool> {
        if self.carrier.is_none() {
            if self.begins_at_entry() && !self.has_entered()? {
                return Ok(false);
            }
            self.set_out(group)?;
        }
        let pieces = self.job.cut.pieces();
        loop {
            self.carrier().move_on(&self.job.order)?;
            while self.stored < self.delivered && self.is_stored(self.stored)? {
                self.stored += 1;
                match self.busy.pop().and_then(Room::lane) {
                    Some(lane) if lane.is_spare() => resources::give_back(vec![lane]),
                    Some(lane) => self.free.push(lane),
                    None => {}
                }
            }
            while self.issue()? {}
            if self.delivered < self.exchanged && self.store(self.delivered)? {
                self.delivered += 1;
                continue;
            }
            if self.exchanged == pieces {
                return Ok(self.stored == pieces);
            }
            while self.current.len() < self.abreast() as usize {
                let next = self.exchanged + self.current.len() as u32;
                if next == self.issued || !self.is_loaded(next)? {
                    break;
                }
                if let Some(both) = self.own_result()
                    && !self.is_kept(next)
                {
                    self.keep(next, both)?;
                }
                let turn = self.turn()?.at_piece(next);
                let (input, output) = self.sides(next);
                self.current.push((self.job.exchange)(
                    group,
                    &turn,
                    self.job.cut.piece(next),
                    input,
                    output,
                )?);
            }
            match self.current.first_mut().map(|operation| operation.advance(group)) {
                Some(Poll::Ready(result)) => {
                    self.completion = result?;
                    self.current.pop();
                    self.exchanged += 1;
                }
                _ => return Ok(false),
            }
        }
    }
}

impl Drop for Staged {
    /// Of one that has not begun, since its group refused it or something was lacking, others use the pinned
    /// memory: freeing it may wait for streams.
    fn drop(&mut self) {
        if self.carrier.is_none() && !self.free.is_empty() {
            resources::give_back(self.free.take_all().collect());
        }
    }
}

impl Operation for Staged {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        let early = std::mem::replace(&mut self.early, Ok(()));
        match early.and_then(|()| self.step(group)) {
            Ok(false) => Poll::Pending,
            Ok(true) => {
                self.carrier = None;
                resources::give_back(self.lanes());
                Poll::Ready(Ok(self.completion))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn abandon(&mut self, group: &Group) {
        self.current.take_all().for_each(|mut operation| operation.abandon(group));
        let (carrier, lanes) = (self.carrier.take(), self.lanes());
        match carrier {
            Some(carrier) => carrier.leave(&mut self.job.order, lanes, self.released),
            None => {
                self.job.order.give_up();
                resources::give_back(lanes);
            }
        }
    }

    fn withdraw(&mut self, group: &Group) {
        self.current.take_all().for_each(|mut operation| operation.abandon(group));
        // With it goes a send's place in the order; and if a part of a message has gone, the other side is
        // told.
        self.job.exchange = Box::new(|_, _, _, _, _| fail!(Internal, "a call goes on that was given up"));
    }

    /// A send whose last piece goes all the same is complete.
    fn cancel(&mut self, group: &Group) -> Option<Completion> {
        let begun = self.exchanged + self.current.len() as u32;
        let is_last = begun == self.job.cut.pieces() && self.job.output.shape.bytes == 0;
        let completion = match self.current.first_mut() {
            // It speaks for the others.
            Some(operation) if is_last => operation.cancel(group),
            _ => None,
        };
        self.abandon(group);
        completion
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.current.get(0).map_or_else(Vec::new, |operation| operation.waits_for(group))
    }

    /// A courier loads when its stream comes, whoever has the turn by then. What it needs no other lane for
    /// than those that it has.
    fn prepare(&mut self, group: &Group) {
        if self.carrier.is_none() && self.own_courier().is_some() && self.job.input.is_on_device() {
            self.early = self.set_out(group).and_then(|()| {
                while !self.free.is_empty() && self.issue()? {}
                Ok(())
            });
        }
    }

    fn has_exchanged(&self) -> bool {
        self.exchanged == self.job.cut.pieces() && self.is_ordered_by_courier()
    }

    fn is_at_work(&self) -> bool {
        self.current.get(0).is_some_and(|operation| operation.is_at_work())
    }

    fn through(&self) -> Through {
        Through::Device
    }

    fn has_courier(&self) -> bool {
        self.job.order.errand.is_some()
    }

    fn asks_driver(&self) -> bool {
        self.job.order.errand.is_none()
    }

    fn exits(&self) -> Arc<Exits> {
        Exits::of(self.exit())
    }

    fn standing(&self) -> Option<String> {
        Some(self.beside_courier(self.awaits()))
    }
}
