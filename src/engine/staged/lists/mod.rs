//! Calls whose lists may differ from rank to rank (gatherv, scatterv, alltoallv), on device memory by way of
//! the host.
//!
//! Only the two ranks of a block know how long it is, so such a call has no cut that all ranks know. Its
//! blocks have: what two ranks have for each other travels in the messages that it travels in on host memory
//! ([`routes`]), each of which is a piece here. On its way it is in a *slot* of pinned memory: loaded into it
//! and sent, or received into it and stored. What goes to one rank and what comes from another do not wait
//! for each other, each has slots of its own, and as long as any is left a receive is posted. A rank deals
//! with [`PAIRS`] others at a time, so pinned memory is bounded however long the call and its lists are.
//!
//! Nothing is stored before all that this rank hears from have said that they have called the same, and have
//! the same count of what the two have for each other. The exit is released by the host once everything has
//! come to its end.

mod lines;
mod routes;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use self::lines::{DEPTH, Line, Slot, Spot, State, spot_of, step_of};
pub use self::routes::Routes;
use self::routes::{Part, Round, Signal};
use super::carrier::Carrier;
use super::resources::{self, PinnedLane, SPARE_BYTES, Supply};
use super::room::Room;
use super::{Job, Place, StreamOrder};
use crate::cuda::courier::Desk;
use crate::engine::endpoint::Through;
use crate::engine::group::{Group, Turn};
use crate::engine::lane::{Destination, Source, Ticket};
use crate::engine::operation::{Completion, Exits, Operation};
use crate::engine::wire::Key;
use crate::error::Result;

/// Slots of all lines together.
const SLOTS: usize = 24;

/// How many ranks are sent to at a time, and received from.
const PAIRS: usize = 6;

/// What two ranks tell each other besides parts, among the steps of a mailbox: this rank has said it,
const SAID: u32 = 1 << 30;
/// or has heard it from the rank whose number is added.
const HEARD: u32 = 1 << 31;

/// One call under way.
pub struct Lists {
    job: Job,
    /// Set when it begins.
    turn: Option<Turn>,
    routes: Routes,
    carrier: Option<Carrier>,
    mailbox: Option<u32>,
    /// Even ones go to a rank, odd ones come from one; two that follow each other are of one round.
    lines: Vec<Line>,
    entered: bool,
    /// Signals that this rank has not got rid of yet.
    unsaid: usize,
    /// Ranks that have not said what they have called.
    unheard: Vec<u32>,
    /// Slots by the order in which their copies were given to the side streams.
    loading: VecDeque<Spot>,
    storing: VecDeque<Spot>,
    /// Those whose message is to be posted.
    posts: Vec<Spot>,
    finished: Vec<u32>,
}

impl Lists {
    /// A call, which on host memory would run the plan of `routes`.
    ///
    /// # Safety
    /// Both sides of the job, of which the plan is, stay valid until the operation has ended or is abandoned,
    /// and then until the exit is released. They do not overlap, but for what is where it belongs already.
    pub unsafe fn new(job: Job, mut routes: Routes) -> Lists {
        // Of the own block in place, nothing is left to do.
        let there = |part: &Part| match (job.input.place, job.output.place) {
            (Place::Device(from), Place::Device(to)) => from + part.from as u64 == to + part.into as u64,
            (Place::Host(from), Place::Host(to)) => {
                std::ptr::eq(from.wrapping_add(part.from), to.wrapping_add(part.into))
            }
            _ => false,
        };
        let own = routes.rank;
        routes.rounds.retain_mut(|round| {
            round.out.retain(|part| round.to != own || !there(part));
            !round.is_empty()
        });
        Lists {
            job,
            turn: None,
            unsaid: routes.said.len(),
            unheard: routes.heard.iter().map(|signal| signal.peer).collect(),
            routes,
            carrier: None,
            mailbox: None,
            lines: Vec::new(),
            entered: false,
            loading: VecDeque::new(),
            storing: VecDeque::new(),
            posts: Vec::new(),
            finished: Vec::new(),
        }
    }

    /// Sees to the call's pinned memory before it begins, as [`Staged::provided`](super::Staged::provided).
    pub fn provided(mut self, streams_wait: &dyn Fn() -> bool) -> Result<Lists> {
        let needs = self.needs();
        let supply = Supply::new(&self.job.order, streams_wait);
        if self.job.order.errand.is_some() || needs.iter().any(|(_, bytes)| *bytes > SPARE_BYTES) {
            let first = Cell::new(true);
            self.lines = lines(&needs, |bytes| supply.lane(bytes, first.replace(false)))?;
            return Ok(self);
        }
        for (index, (slots, bytes)) in needs.iter().enumerate() {
            let alike = |(_, other): &&(usize, usize)| resources::are_alike(*bytes, *other);
            let earlier: usize = needs[..index].iter().filter(alike).map(|(slots, _)| slots).sum();
            supply.stock(*bytes, earlier + slots)?;
        }
        Ok(self)
    }

    /// It is the call of `turn`.
    pub fn at(mut self, turn: &Turn) -> Lists {
        self.turn = Some(*turn);
        self
    }

    fn turn(&self) -> &Turn {
        // PROOF: nobody moves it before it has begun.
        self.turn.as_ref().expect("begun")
    }

    /// Takes what the call runs in.
    fn set_out(&mut self, group: &Group) -> Result<()> {
        self.carrier = Some(Carrier::new(&self.job.order, group)?);
        if self.lines.is_empty() {
            let StreamOrder { devices, device, .. } = &self.job.order;
            self.lines = lines(&self.needs(), |bytes| Ok(PinnedLane::take_kept(devices, *device, bytes)))?;
        }
        self.signal(group);
        Ok(())
    }

    /// The slots of each line, and the bytes of one.
    fn needs(&self) -> Vec<(usize, usize)> {
        let pairs = self.routes.rounds.len().min(PAIRS);
        let depth = (SLOTS / (2 * pairs.max(1))).clamp(*DEPTH.start(), *DEPTH.end());
        let needs = (0..2 * pairs).map(|line| self.most(line, pairs));
        needs.map(|(slots, bytes)| (slots.min(depth), bytes)).collect()
    }

    /// The most slots that any use is made of in a line of so many `pairs`, and the bytes of the longest
    /// part.
    fn most(&self, line: usize, pairs: usize) -> (usize, usize) {
        let rounds = &self.routes.rounds;
        // Where there are more rounds than pairs of lines, it has its turn with any of them.
        let mine = |&(index, _): &(usize, &Round)| rounds.len() > pairs || index == line / 2;
        let (mut slots, mut longest) = (0, 0);
        for (_, round) in rounds.iter().enumerate().filter(mine) {
            let parts = if line.is_multiple_of(2) { &round.out } else { &round.into };
            slots = slots.max(parts.len());
            let through = round.to != self.routes.rank || !self.stays_on_device();
            longest = longest.max(parts.iter().map(|part| part.bytes).max().filter(|_| through).unwrap_or(0));
        }
        (slots, longest)
    }

    /// Tells the others what this rank has called, and asks what they have.
    fn signal(&mut self, group: &Group) {
        let mut messages = group.endpoint().messages();
        let mailbox = *self.mailbox.insert(messages.mailbox());
        let peer = |signal: &Signal| group.members()[signal.peer as usize];
        for signal in &self.routes.said {
            let nothing = Source { address: std::ptr::null(), len: 0 };
            let signature = self.routes.plan.signature(self.turn().signature, signal.step);
            let ticket = Ticket { mailbox, step: SAID };
            messages.send(peer(signal), self.key(group, signal.slot), signature, nothing, ticket);
        }
        for signal in &self.routes.heard {
            let nothing = Destination { address: std::ptr::null_mut(), len: 0 };
            let signature = self.routes.plan.signature(self.turn().signature, signal.step);
            let ticket = Ticket { mailbox, step: HEARD + signal.peer };
            messages.receive(peer(signal), self.key(group, signal.slot), signature, nothing, ticket);
        }
        messages.write_out();
        drop(messages);
        group.endpoint().settle();
    }

    /// Names a message.
    fn key(&self, group: &Group, slot: u32) -> Key {
        let key = self.turn().key(group);
        Key { slot: key.slot + u64::from(slot), ..key }
    }

    fn carrier(&self) -> &Carrier {
        // PROOF: `step` sets out before anything else.
        self.carrier.as_ref().expect("set out")
    }

    /// Whether the caller's stream has come to the call.
    fn has_entered(&mut self) -> Result<bool> {
        self.entered = self.entered || self.job.order.entry.has_come()?;
        Ok(self.entered)
    }

    /// Whether the output may be written.
    fn may_write(&mut self) -> Result<bool> {
        Ok(self.unheard.is_empty() && self.has_entered()?)
    }

    fn slot(&self, (line, slot): Spot) -> &Slot {
        &self.lines[line].slots[slot]
    }

    fn slot_mut(&mut self, (line, slot): Spot) -> &mut Slot {
        &mut self.lines[line].slots[slot]
    }

    /// Whether a line's parts stay on this rank.
    fn is_own(&self, (line, _): Spot) -> bool {
        self.lines[line].peer == self.routes.rank
    }

    // ---- what has ended

    /// Looks what messages have ended. Whether any has.
    fn look(&mut self, group: &Group) -> Result<bool> {
        let Some(mailbox) = self.mailbox else { return Ok(false) };
        let mut messages = group.endpoint().messages();
        let mail = messages.look(mailbox);
        if let Some(failure) = mail.failed.take() {
            drop(messages);
            return Err(group.tell(failure));
        }
        std::mem::swap(&mut mail.done, &mut self.finished);
        drop(messages);
        let finished = std::mem::take(&mut self.finished);
        for &step in &finished {
            match step {
                HEARD.. => self.unheard.retain(|&peer| peer != step - HEARD),
                SAID => self.unsaid -= 1,
                step => {
                    let spot = spot_of(step);
                    // What has been sent is done with.
                    self.slot_mut(spot).state =
                        if spot.0.is_multiple_of(2) { State::Free } else { State::Arrived };
                }
            }
        }
        let any = !finished.is_empty();
        self.finished = finished;
        self.finished.clear();
        Ok(any)
    }

    /// Looks what copies have ended. Whether any has.
    fn look_at_device(&mut self) -> Result<bool> {
        let mut any = false;
        self.carrier().move_on(&self.job.order)?;
        while let Some(&spot) = self.loading.front()
            && self.carrier().has_ended(&self.job.order, Desk::Load, self.slot(spot).lane()?)?
        {
            self.loading.pop_front();
            // What stays on the device has nothing there, nor room for it.
            let crossed = self.is_own(spot) && self.stays_on_device();
            let Slot { room, via, part, .. } = self.slot_mut(spot);
            if let Some(via) = via.take() {
                if !crossed {
                    // SAFETY: both hold a part, and nobody else uses either.
                    unsafe { std::ptr::copy_nonoverlapping(via.address(), room.address(), part.bytes) };
                }
                resources::give_back(vec![via]);
            }
            self.loaded(spot);
            any = true;
        }
        while let Some(&spot) = self.storing.front()
            && self.carrier().has_ended(&self.job.order, Desk::Store, self.slot(spot).lane()?)?
        {
            self.storing.pop_front();
            resources::give_back(self.slot_mut(spot).via.take().into_iter().collect());
            self.slot_mut(spot).state = State::Free;
            any = true;
        }
        Ok(any)
    }

    /// A part has left the input.
    fn loaded(&mut self, spot: Spot) {
        let own = self.is_own(spot);
        let crossed = own && self.stays_on_device();
        self.slot_mut(spot).state = match own {
            true if crossed => State::Free,
            true => State::Arrived,
            false => {
                self.posts.push(spot);
                State::Posted
            }
        };
    }

    /// Whether the own block is copied from one place of the device to another.
    fn stays_on_device(&self) -> bool {
        matches!((self.job.input.place, self.job.output.place), (Place::Device(_), Place::Device(_)))
    }

    // ---- what begins

    /// Gives lines whose rounds are over the next ones.
    fn refill(&mut self) {
        for pair in self.lines.chunks_mut(2) {
            if pair.iter().all(Line::is_over)
                && let Some(Round { to, out, from, into }) = self.routes.rounds.pop_front()
            {
                (pair[0].peer, pair[0].parts) = (to, out);
                (pair[1].peer, pair[1].parts) = (from, into);
            }
        }
    }

    /// Begins what a line can. Whether there was anything.
    fn move_on(&mut self, line: usize) -> Result<bool> {
        let sends = line.is_multiple_of(2);
        let mut any = false;
        loop {
            let ready = match sends {
                true if self.lines[line].parts.is_empty() => false,
                // Where it stays on the device, it goes straight to the output.
                true if self.is_own((line, 0)) => self.may_write()?,
                true => self.has_entered()?,
                // What a call obtains comes from others, maybe before this rank's stream has come so far.
                false => true,
            };
            if !ready {
                break;
            }
            let Some((slot, part)) = self.lines[line].next() else { break };
            if sends && matches!(self.job.input.place, Place::Device(_)) && !self.equip((line, slot)) {
                break;
            }
            self.lines[line].parts.pop_front();
            self.lines[line].slots[slot].part = part;
            if sends {
                self.load((line, slot))?;
            } else {
                self.lines[line].slots[slot].state = State::Posted;
                self.posts.push((line, slot));
            }
            any = true;
        }
        for slot in 0..self.lines[line].slots.len() {
            if self.lines[line].slots[slot].state == State::Arrived && self.may_write()? {
                let on_device = matches!(self.job.output.place, Place::Device(_));
                if on_device && !self.equip((line, slot)) {
                    continue;
                }
                self.store((line, slot))?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Sees to it that there is a lane for a copy of the device that can begin. Whether there is.
    fn equip(&mut self, spot: Spot) -> bool {
        if self.slot(spot).lane().is_ok() {
            return true;
        }
        self.slot_mut(spot).via = PinnedLane::take_spare(&self.job.order);
        self.slot(spot).lane().is_ok()
    }

    /// Begins to load a part. The entry has come; of the own block, all have said what they have called.
    fn load(&mut self, spot: Spot) -> Result<()> {
        let own = self.is_own(spot);
        let (order, carrier) = (&self.job.order, self.carrier());
        let slot = self.slot(spot);
        let part = slot.part;
        match (self.job.input.place, self.job.output.place) {
            // SAFETY: both lie in the caller's memory, which has been promised, and do not overlap.
            (Place::Device(from), Place::Device(to)) if own => unsafe {
                carrier.shift(
                    order,
                    Desk::Load,
                    slot.lane()?,
                    to + part.into as u64,
                    from + part.from as u64,
                    part.bytes,
                )
            }?,
            (Place::Device(from), _) => {
                let lane = slot.lane()?;
                // SAFETY: the part lies in the caller's memory, which has been promised; the slot is free,
                // and was made for the longest part.
                unsafe { carrier.load(order, lane, lane.address(), from + part.from as u64, part.bytes) }?
            }
            (Place::Host(from), _) => {
                let from = from.wrapping_add(part.from).cast_const();
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from, slot.room.address(), part.bytes) };
                self.loaded(spot);
                return Ok(());
            }
        }
        carrier.given(Desk::Load, slot.lane()?)?;
        self.slot_mut(spot).state = State::Loading;
        self.loading.push_back(spot);
        Ok(())
    }

    /// Begins to store a part that is here. The output may be written.
    fn store(&mut self, spot: Spot) -> Result<()> {
        let (order, carrier) = (&self.job.order, self.carrier());
        let Slot { room, via, part, .. } = self.slot(spot);
        let from = room.address().cast_const();
        match self.job.output.place {
            Place::Device(to) => {
                let lane = self.slot(spot).lane()?;
                if via.is_some() {
                    // SAFETY: both hold a part, and nobody else uses either.
                    unsafe { std::ptr::copy_nonoverlapping(from, lane.address(), part.bytes) };
                }
                let from = lane.address().cast_const();
                // SAFETY: the part lies in the caller's memory, which has been promised; its bytes are in the
                // slot, which nobody writes until the store has ended.
                unsafe { carrier.store(order, lane, to + part.into as u64, from, part.bytes) }?;
                carrier.given(Desk::Store, lane)?;
                self.slot_mut(spot).state = State::Storing;
                self.storing.push_back(spot);
            }
            Place::Host(to) => {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from, to.wrapping_add(part.into), part.bytes) };
                self.slot_mut(spot).state = State::Free;
            }
        }
        Ok(())
    }

    /// Posts the messages of slots that are ready for them.
    fn post(&mut self, group: &Group) {
        let Some(mailbox) = self.mailbox else { return };
        if self.posts.is_empty() {
            return;
        }
        let mut messages = group.endpoint().messages();
        for &spot in &self.posts {
            let Slot { room, part, .. } = self.slot(spot);
            let peer = group.members()[self.lines[spot.0].peer as usize];
            let signature = self.routes.plan.signature(self.turn().signature, part.step);
            let (key, ticket) = (self.key(group, part.slot), Ticket { mailbox, step: step_of(spot) });
            let (address, len) = (room.address(), part.bytes);
            if spot.0.is_multiple_of(2) {
                messages.send(peer, key, signature, Source { address: address.cast_const(), len }, ticket);
            } else {
                messages.receive(peer, key, signature, Destination { address, len }, ticket);
            }
        }
        messages.write_out();
        drop(messages);
        self.posts.clear();
        group.endpoint().settle();
    }

    /// Moves on as far as it can. Whether the call has ended.
    fn step(&mut self, group: &Group) -> Result<bool> {
        if self.carrier.is_none() {
            if self.job.input.shape.bytes > 0 && !self.has_entered()? {
                return Ok(false);
            }
            self.set_out(group)?;
        }
        loop {
            let mut moved = self.look(group)? | self.look_at_device()?;
            self.refill();
            for line in 0..self.lines.len() {
                moved |= self.move_on(line)?;
            }
            self.post(group);
            if !moved {
                break;
            }
        }
        let moved_all = self.routes.rounds.is_empty() && self.lines.iter().all(Line::is_over);
        Ok(moved_all && self.unsaid == 0 && self.unheard.is_empty())
    }

    fn take_lanes(&mut self) -> Vec<PinnedLane> {
        let slots = self.lines.drain(..).flat_map(|line| line.slots);
        slots.flat_map(|slot| slot.via.into_iter().chain(slot.room.lane())).collect()
    }

    /// Ranks whose message is under way, to this rank or from it.
    fn under_way(&self, sends: bool) -> impl Iterator<Item = u32> + '_ {
        let waits = |line: &&Line| line.slots.iter().any(|slot| slot.state == State::Posted);
        self.lines.iter().skip(usize::from(!sends)).step_by(2).filter(waits).map(|line| line.peer)
    }

    /// What the call waits for here.
    fn awaits(&self) -> String {
        let (device, stream) = (self.job.order.device, self.job.order.stream());
        let arrived = self.lines.iter().flat_map(|line| &line.slots).any(|slot| slot.state == State::Arrived);
        match () {
            () if self.carrier.is_none() => format!("{stream} has not come to the call"),
            () if !self.unheard.is_empty() => {
                format!("{} ranks have not said what they have called", self.unheard.len())
            }
            () if !self.loading.is_empty() => format!("a copy from GPU {device} has not ended"),
            () if !self.storing.is_empty() => format!("a copy to GPU {device} has not ended"),
            () if arrived => format!("what has come is here, but {stream} has not come to the call"),
            () => "parts of its blocks wait for other ranks".to_owned(),
        }
    }
}

/// Lines of so many slots of so many bytes, in `take`'s lanes as long as there are any.
fn lines(needs: &[(usize, usize)], take: impl Fn(usize) -> Result<Option<PinnedLane>>) -> Result<Vec<Line>> {
    let slot = |bytes| match take(bytes)? {
        Some(lane) => Ok(Slot::new(Room::Lane(lane))),
        None => Room::kept(bytes).map(Slot::new),
    };
    let line = |&(slots, bytes): &(usize, usize)| {
        let slots = (0..slots).map(|_| slot(bytes)).collect::<Result<_>>()?;
        Ok(Line { slots, ..Line::default() })
    };
    needs.iter().map(line).collect()
}

impl Drop for Lists {
    /// As [`Staged`](super::Staged)'s.
    fn drop(&mut self) {
        if self.carrier.is_none() && !self.lines.is_empty() {
            resources::give_back(self.take_lanes());
        }
    }
}

impl Operation for Lists {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        match self.step(group) {
            Ok(false) => Poll::Pending,
            Ok(true) => {
                if let Some(mailbox) = self.mailbox.take() {
                    group.endpoint().messages().close_mailbox(mailbox);
                }
                self.job.order.release();
                self.carrier = None;
                resources::give_back(self.take_lanes());
                Poll::Ready(Ok(Completion::default()))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn abandon(&mut self, group: &Group) {
        // No message touches a slot after this; copies may.
        if let Some(mailbox) = self.mailbox.take() {
            group.endpoint().messages().cancel(mailbox);
        }
        let (carrier, lanes) = (self.carrier.take(), self.take_lanes());
        match carrier {
            Some(carrier) => carrier.leave(&mut self.job.order, lanes, false),
            None => {
                self.job.order.give_up();
                resources::give_back(lanes);
            }
        }
    }

    fn waits_for(&self, _group: &Group) -> Vec<u32> {
        let mut ranks = self.unheard.clone();
        ranks.extend(self.under_way(false));
        if ranks.is_empty() {
            ranks.extend(self.under_way(true));
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
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
        Exits::of(self.job.order.exit.as_ref())
    }

    fn standing(&self) -> Option<String> {
        Some(self.awaits())
    }
}
