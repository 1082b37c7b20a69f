//! Calls on device memory by way of the host: load, exchange, store.
//!
//! A call is cut into pieces ([`cut`]). Each is loaded from the device into pinned memory, exchanged there by
//! the operation that a call on host memory would be, and stored from pinned memory to the device. The next
//! pieces are loaded and the last ones stored meanwhile: up to [`LANES`] pieces are under way. Calls that no
//! cut of all ranks fits, since their lists may differ from rank to rank, go message by message ([`lists`]).
//!
//! A call on a stream has a courier there ([`crate::cuda::courier`]), which loads and stores as the host orders and is dismissed
//! behind the last order. The host asks the driver for nothing meanwhile ([`carrier`]).
//!
//! Otherwise loads and stores run on side streams, once the host has seen the *entry*: that the caller's stream has come to the
//! call. If the caller's stream waits, then for the *exit*, a word that the side stream of the stores releases behind the last of
//! them. The host learns of the entry and of copies by their events. A device has fewer queues than a process has streams, and
//! what waits in one stream holds up others that share its queue, and so maybe that which it waits for. Hence side streams are
//! given nothing that cannot run at once; and a stream waits for an exit only where there are queues enough
//! ([`crate::cuda::queues`]), else the thread that calls does.
//!
//! Whoever moves operations looks at couriers and events at once for half a millisecond, then after naps ([`super::endpoint`]).
//!
//! A call that is given up dismisses its courier, or enqueues the release of the exit, behind the copies that are under way: the
//! caller's stream goes on when nothing touches the caller's memory any more, and not before.
//!
//! Memory of the host that a call on devices names, or that a call ordered on a stream names, is copied by the processor
//! once the entry has been reached.

mod carrier;
mod copies;
mod cut;
mod lists;
pub mod relay;
mod resources;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use carrier::Carrier;
pub use copies::COPY;
pub use cut::{Blocks, Cut, Piece, Shape, Strip};
pub use lists::{Lists, Routes};
use resources::{Lane, Reserve};
pub use resources::{Entry, front, prepare};
pub use transfer::{Load, store};

use super::endpoint::Through;
use super::group::{Group, Turn};
use super::operation::{Completion, Exits, Operation};
use crate::cuda::context::Devices;
use crate::cuda::courier::{Desk, Errand};
use crate::cuda::local::Kernels;
use crate::cuda::word::Word;
use crate::error::{Result, fail};

/// Bytes of a piece, of all blocks together.
pub const PIECE_BYTES: usize = 4 * 1024 * 1024;

/// Pieces under way: one is loaded, one exchanged, one stored.
const LANES: u32 = 3;

/// Input and output of a piece begin at multiples of this many bytes.
const ALIGNMENT: usize = 4096;

/// How long a call that is given up waits for its copies, when no stream does.
const COPIES: Duration = Duration::from_secs(1);

/// Where one side of a call lies.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// On the call's device.
    Device(u64),
    /// On the host.
    Host(*mut u8),
}

// SAFETY: it names memory that the caller promised to be usable from the library's threads.
unsafe impl Send for Place {}

/// What a call reads or writes on this rank.
#[derive(Clone, Debug)]
pub struct Side {
    /// Where it begins.
    pub place: Place,
    /// How it is laid out. No bytes: nothing is read or written.
    pub shape: Shape,
}

impl Side {
    /// Whether it is copied by the device.
    fn is_on_device(&self) -> bool {
        matches!(self.place, Place::Device(_)) && self.shape.bytes > 0
    }
}

/// When a call may touch the caller's memory, and who waits for it.
#[derive(Debug)]
pub struct StreamOrder {
    /// The devices of the process.
    pub devices: Arc<Devices>,
    /// The one that the call is on.
    pub device: u32,
    /// When the caller's stream has come to the call.
    pub entry: Entry,
    /// What carries bytes, on the caller's stream, and is let go when nothing touches the caller's memory any more; `None`: side
    /// streams do.
    pub errand: Option<Errand>,
    /// Released when nothing touches the caller's memory any more; `None`: no stream waits for that.
    pub exit: Option<Arc<Word>>,
    /// What copies between the device and pinned memory, with [`COPY`] prepared; `None`: the copy engines, for devices that have
    /// no kernels.
    pub copier: Option<Arc<dyn Kernels>>,
}

impl StreamOrder {
    /// What the call waits for before it touches the caller's memory, for a person.
    fn stream(&self) -> &'static str {
        if self.exit.is_some() || self.entry.is_courier() {
            "call->stream"
        } else {
            "the stream before the call"
        }
    }

    /// The caller's stream goes on, unless somebody else still keeps the courier.
    fn release(&mut self) {
        self.errand = None;
        if let Some(exit) = &self.exit {
            exit.release();
        }
    }

    /// As [`StreamOrder::release`], for a call that is given up.
    fn give_up(&mut self) {
        if let Some(errand) = self.errand.take() {
            let customer = errand.customer().clone();
            drop(errand);
            customer.give_up();
        }
        self.release();
    }
}

/// Makes the operation that exchanges a piece, between what this rank contributes (NULL if nothing) and where its
/// part of the result goes (NULL if it has none).
pub type Exchange =
    Box<dyn FnMut(&Group, &Turn, Piece, *mut u8, *mut u8) -> Result<Box<dyn Operation>> + Send>;

/// What a call is staged from.
pub struct Job {
    /// When.
    pub order: StreamOrder,
    /// What it reads.
    pub input: Side,
    /// What it writes.
    pub output: Side,
    /// Whether the result of this rank is what it has contributed: a broadcast's root.
    pub forwards: bool,
    /// Whether it is exchanged where the caller has it: both sides are the host's.
    pub unstaged: bool,
    /// Bytes of an element.
    pub element: usize,
    /// How it is cut.
    pub cut: Cut,
    /// What happens on the host.
    pub exchange: Exchange,
}

/// One call under way.
pub struct Staged {
    job: Job,
    /// Set when it begins.
    turn: Option<Turn>,
    carrier: Option<Carrier>,
    /// Lanes of pieces that have been issued, but not stored, in their order.
    busy: VecDeque<Lane>,
    /// Lanes that no piece is in.
    free: Vec<Lane>,
    /// Where there is one when there are no others.
    reserve: Option<Arc<Reserve>>,
    current: Option<Box<dyn Operation>>,
    entered: bool,
    /// Whether it exchanges before its entry, whatever it is to obtain.
    begun: bool,
    /// Pieces whose load has been issued,
    issued: u32,
    /// that have been exchanged,
    exchanged: u32,
    /// whose store has been issued,
    delivered: u32,
    /// whose store is complete.
    stored: u32,
    completion: Completion,
    released: bool,
    /// What went wrong before anybody looked.
    early: Result<()>,
}

impl Staged {
    /// A call.
    ///
    /// # Safety
    /// Both sides stay valid until the operation has ended or is abandoned, and then until its stream has been let go.
    pub unsafe fn new(job: Job) -> Staged {
        Staged {
            job,
            turn: None,
            carrier: None,
            busy: VecDeque::new(),
            free: Vec::new(),
            reserve: None,
            current: None,
            entered: false,
            begun: false,
            issued: 0,
            exchanged: 0,
            delivered: 0,
            stored: 0,
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
        if self.job.order.errand.is_none() {
            self.take_lanes(LANES)?;
        }
        Ok(())
    }

    /// Takes the pinned memory of a call that a courier serves before its stream waits: making it may take as long. All that it can
    /// use if it is the `first` that the stream waits for; else one lane, and later what earlier calls have done with.
    /// May wait for the driver: not with a lock held.
    pub fn provided(mut self, first: bool) -> Result<Staged> {
        self.provide(first)?;
        Ok(self)
    }

    fn provide(&mut self, first: bool) -> Result<()> {
        if self.job.order.errand.is_none() || !self.free.is_empty() {
            return Ok(());
        }
        self.take_lanes(if first { LANES } else { 1 })
    }

    /// Sees to it that there is a lane in `reserve`, for when no other is to be had while the stream waits. May wait for the driver.
    fn rely_on(&mut self, reserve: &Arc<Reserve>) -> Result<()> {
        if self.job.order.errand.is_some() && !self.job.unstaged {
            let StreamOrder { devices, device, .. } = &self.job.order;
            reserve.provide(devices, *device, self.lane_bytes())?;
            self.reserve = Some(reserve.clone());
        }
        Ok(())
    }

    /// Nothing of it is to be staged after all.
    fn waive(&mut self) {
        resources::give_back(self.lanes());
    }

    fn take_lanes(&mut self, lanes: u32) -> Result<()> {
        if !self.job.unstaged {
            for _ in 0..self.job.cut.pieces().min(lanes) {
                self.free.push(self.new_lane()?);
            }
        }
        Ok(())
    }

    /// A lane for any piece.
    fn new_lane(&self) -> Result<Lane> {
        let StreamOrder { devices, device, .. } = &self.job.order;
        Lane::take(devices, *device, self.lane_bytes())
    }

    fn lane_bytes(&self) -> usize {
        let largest = self.job.cut.piece(0);
        let [input, output] =
            [&self.job.input, &self.job.output].map(|side| side.shape.piece_bytes(largest, self.job.element));
        input.next_multiple_of(ALIGNMENT) + output
    }

    /// A lane for the next piece. While a stream waits, none is made if one comes back.
    fn next_lane(&mut self, keeps: bool) -> Result<Option<Lane>> {
        if let Some(lane) = self.free.pop() {
            return Ok(Some(lane));
        }
        if self.job.order.errand.is_none() || keeps {
            return self.new_lane().map(Some);
        }
        // Calls before it may need those.
        if !self.has_entered()? {
            return Ok(None);
        }
        let (StreamOrder { devices, device, .. }, bytes) = (&self.job.order, self.lane_bytes());
        let kept = Lane::take_kept(devices, *device, bytes);
        let needs = kept.is_none() && self.busy.is_empty();
        let reserve = self.reserve.as_ref().filter(|_| needs);
        Ok(kept.or_else(|| reserve?.take(devices, *device, bytes)))
    }

    /// Takes a lane for the next piece. Whether there is one.
    fn issue(&mut self) -> Result<bool> {
        if self.issued == self.job.cut.pieces() {
            return Ok(false);
        }
        // A message that comes before the stream is kept here, all of it: who has sent it may wait for that before it
        // sends what this stream waits for.
        let full = self.issued - self.stored >= LANES;
        let keeps = (full || self.free.is_empty())
            && self.begun
            && self.exchanged == self.issued
            && !self.has_entered()?;
        if full && !keeps {
            return Ok(false);
        }
        if !self.job.unstaged {
            let Some(lane) = self.next_lane(keeps)? else { return Ok(false) };
            self.busy.push_back(lane);
        }
        self.load(self.issued)?;
        self.issued += 1;
        Ok(true)
    }

    /// The lane of a piece, its input and its output in it.
    fn lane(&self, index: u32) -> (&Lane, *mut u8, *mut u8) {
        let lane = &self.busy[(index - self.stored) as usize];
        let largest = self.job.cut.piece(0);
        let input = self.job.input.shape.piece_bytes(largest, self.job.element);
        let start = lane.address();
        if self.job.forwards {
            return (lane, start, start);
        }
        (lane, start, start.wrapping_add(input.next_multiple_of(ALIGNMENT)))
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
        let (_, input, output) = self.lane(index);
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
        let (lane, to, _) = self.lane(index);
        let (order, carrier) = (&self.job.order, self.carrier());
        for Strip { at, packed, bytes } in shape.strips(piece, self.job.element) {
            let to = to.wrapping_add(packed);
            match place {
                Place::Device(from) => {
                    // SAFETY: the strips lie in the caller's memory, which has been promised, and in the
                    // lane, which is this call's and was made for its largest piece.
                    unsafe { carrier.load(order, lane, to, from + at as u64, bytes) }?
                }
                // SAFETY: as above.
                Place::Host(from) => unsafe {
                    std::ptr::copy_nonoverlapping(from.wrapping_add(at).cast_const(), to, bytes);
                },
            }
        }
        if let Place::Device(_) = place {
            carrier.given(Desk::Load, lane)?;
            // A stream need not wait for what is only sent.
            let last = index + 1 == self.job.cut.pieces();
            if last && self.job.output.shape.bytes == 0 && order.errand.is_some() {
                self.let_go()?;
            }
        }
        Ok(())
    }

    fn is_loaded(&self, index: u32) -> Result<bool> {
        if self.job.input.is_on_device() {
            self.carrier().has_ended(Desk::Load, self.lane(index).0)
        } else {
            Ok(true)
        }
    }

    /// Begins to store a piece. Whether it could.
    fn store(&mut self, index: u32) -> Result<bool> {
        let piece = self.job.cut.piece(index);
        let last = index + 1 == self.job.cut.pieces();
        if (self.job.output.shape.bytes > 0 || self.begun) && !self.has_entered()? {
            return Ok(false);
        }
        let Side { place, ref shape } = self.job.output;
        let on_device = self.job.output.is_on_device();
        if !on_device && (shape.bytes == 0 || self.job.unstaged) {
            if last {
                self.released = true;
                self.job.order.release();
            }
            return Ok(true);
        }
        let (lane, _, from) = self.lane(index);
        let (order, carrier) = (&self.job.order, self.carrier());
        for Strip { at, packed, bytes } in shape.strips(piece, self.job.element) {
            let from = from.wrapping_add(packed).cast_const();
            match place {
                Place::Device(to) => {
                    // SAFETY: as for loads.
                    unsafe { carrier.store(order, lane, to + at as u64, from, bytes) }?
                }
                // SAFETY: as for loads.
                Place::Host(to) => unsafe {
                    std::ptr::copy_nonoverlapping(from, to.wrapping_add(at), bytes);
                },
            }
        }
        if on_device {
            carrier.given(Desk::Store, lane)?;
        }
        if last && on_device {
            self.let_go()?;
        } else if last {
            self.released = true;
            self.job.order.release();
        }
        Ok(true)
    }

    fn is_stored(&self, index: u32) -> Result<bool> {
        if self.job.output.is_on_device() {
            self.carrier().has_ended(Desk::Store, self.lane(index).0)
        } else {
            Ok(true)
        }
    }

    /// Whether nothing is loaded or stored.
    fn moves_nothing(&self) -> bool {
        self.job.unstaged || self.job.input.shape.bytes == 0 && self.job.output.shape.bytes == 0
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
            while self.stored < self.delivered && self.is_stored(self.stored)? {
                self.stored += 1;
                self.free.extend(self.busy.pop_front());
            }
            while self.issue()? {}
            if self.delivered < self.exchanged && self.store(self.delivered)? {
                self.delivered += 1;
                continue;
            }
            if self.exchanged == pieces {
                return Ok(self.stored == pieces);
            }
            if self.current.is_none() {
                let next = self.exchanged;
                if next == self.issued || !self.is_loaded(next)? {
                    return Ok(false);
                }
                let turn = self.turn()?.at_piece(next);
                let (input, output) = self.sides(next);
                self.current =
                    Some((self.job.exchange)(group, &turn, self.job.cut.piece(next), input, output)?);
            }
            match self.current.as_mut().map(|operation| operation.advance(group)) {
                Some(Poll::Ready(result)) => {
                    if result.is_ok() {
                        self.current = None;
                    }
                    self.completion = result?;
                    self.exchanged += 1;
                }
                _ => return Ok(false),
            }
        }
    }

    /// What the call waits for here.
    fn awaits(&self) -> String {
        let (device, stream) = (self.job.order.device, self.job.order.stream());
        let pieces = self.job.cut.pieces();
        let late = self.job.order.entry.is_courier() && !matches!(self.job.order.entry.has_come(), Ok(true));
        let needs_it = self.current.is_none() && self.exchanged < self.issued;
        if self.carrier.is_none() || late && needs_it {
            return format!("{stream} has not come to the call");
        }
        if self.exchanged == pieces {
            return match self.delivered == pieces {
                true => {
                    format!("the copy of piece {} of {pieces} to GPU {device} has not ended", self.stored + 1)
                }
                false => format!("all {pieces} pieces are here, but {stream} has not come to the call"),
            };
        }
        let next = self.exchanged + 1;
        match &self.current {
            Some(_) => format!("piece {next} of {pieces} waits for other ranks"),
            None if self.exchanged < self.issued => {
                format!("the copy of piece {next} of {pieces} from GPU {device} has not ended")
            }
            None => {
                format!("the copy of piece {} of {pieces} to GPU {device} has not ended", self.stored + 1)
            }
        }
    }

    fn lanes(&mut self) -> Vec<Lane> {
        self.free.extend(self.busy.drain(..));
        std::mem::take(&mut self.free)
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
        if let Some(mut operation) = self.current.take() {
            operation.abandon(group);
        }
        let (carrier, lanes) = (self.carrier.take(), self.lanes());
        match carrier {
            Some(carrier) => carrier.leave(&mut self.job.order, lanes, self.released),
            None => {
                self.job.order.give_up();
                resources::give_back(lanes);
            }
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        self.current.as_ref().map_or_else(Vec::new, |operation| operation.waits_for(group))
    }

    fn through(&self) -> Through {
        Through::Device
    }

    fn has_courier(&self) -> bool {
        self.job.order.errand.is_some()
    }

    /// A message that is kept may need more pinned memory than there is.
    fn asks_driver(&self) -> bool {
        self.job.order.errand.is_none() || self.begun && self.job.cut.pieces() > LANES
    }

    fn exits(&self) -> Arc<Exits> {
        Exits::of(self.exit())
    }

    fn standing(&self) -> Option<String> {
        Some(self.awaits())
    }
}
