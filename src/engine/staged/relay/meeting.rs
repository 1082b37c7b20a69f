//! How the ranks meet for a call that may be relayed: they compare it, and say whether they can relay it,
//! with which scalar, and how far they have come with their lanes ([`making`](super::making)).

use std::sync::Arc;
use std::task::Poll;

use super::super::StreamOrder;
use super::lanes::Seat;
use super::making::{CAN, say_no};
use crate::engine::bootstrap::{RECORD_BYTES, read_record, record};
use crate::engine::direct::Direct;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::Operation;
use crate::error::Result;

/// Makes the operation that gathers as many bytes of each rank, from the first address, to all, at the
/// second.
pub type Gather =
    Arc<dyn Fn(&Group, &Turn, *mut u8, *mut u8, usize) -> Result<Box<dyn Operation>> + Send + Sync>;

/// Where the ranks meet.
#[derive(Clone)]
pub enum Place {
    /// On their boards: they share memory.
    Boards(Arc<Direct>),
    /// By messages.
    Messages(Gather),
}

/// What a rank says of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Say {
    /// Its scalar.
    pub(super) scale: f64,
    /// Whether it can relay the call.
    pub(super) can: bool,
    /// Bytes that it contributes.
    pub(super) bytes: u64,
}

/// How a meeting goes.
pub(super) enum Met {
    /// Waiting for this member,
    Awaits(usize),
    /// or for messages.
    Pending,
    /// The call is relayed. Everybody's scalars.
    Relays(Vec<f64>),
    /// It is not.
    Parts,
}

/// One call's meeting under way.
pub(super) struct Meeting {
    seat: Arc<Seat>,
    place: Place,
    say: Say,
    stage: Stage,
}

enum Stage {
    /// Waiting until the post of two calls ago is no more needed; the number of the call among the direct
    /// ones.
    Enter(u64),
    /// Posted; waiting for everybody's post.
    Arrive(u64),
    /// By messages: nothing is sent yet.
    Begin,
    /// What the ranks say, with their addresses as long as no lanes are being made.
    Greet(Gathering),
    Over,
}

/// The piece that these messages are: no call has so many.
const GREETING: u32 = u32::MAX;

impl Meeting {
    pub(super) fn new(seat: Arc<Seat>, place: Place, say: Say) -> Meeting {
        let stage = match place {
            Place::Boards(_) => Stage::Enter(0),
            Place::Messages(_) => Stage::Begin,
        };
        Meeting { seat, place, say, stage }
    }

    /// Goes on as far as it can.
    pub(super) fn advance(&mut self, group: &Group, turn: &Turn, order: &StreamOrder) -> Result<Met> {
        match self.place.clone() {
            Place::Boards(direct) => self.at_boards(&direct, group, turn, order),
            Place::Messages(gather) => self.by_messages(&gather, group, turn, order),
        }
    }

    /// Gives up.
    pub(super) fn abandon(&mut self, group: &Group) {
        if let Stage::Greet(gathering) = &mut self.stage {
            gathering.operation.abandon(group);
        }
        self.stage = Stage::Over;
    }

    /// The members that it waits for.
    pub(super) fn waits_for(&self, group: &Group) -> Vec<u32> {
        let absent = match (&self.place, &self.stage) {
            (Place::Boards(direct), Stage::Enter(call)) => direct.absent(call.saturating_sub(1)),
            (Place::Boards(direct), Stage::Arrive(call)) => direct.absent(*call),
            (_, Stage::Greet(gathering)) => return gathering.operation.waits_for(group),
            _ => None,
        };
        absent.into_iter().map(|member| member as u32).collect()
    }

    /// What this rank says of the call, and of its lanes.
    fn says(&self) -> u64 {
        self.seat.says() | if self.say.can { CAN } else { 0 }
    }

    fn at_boards(
        &mut self,
        direct: &Arc<Direct>,
        group: &Group,
        turn: &Turn,
        order: &StreamOrder,
    ) -> Result<Met> {
        let Say { scale, bytes, .. } = self.say;
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Enter(number) => {
                    let call = if number == 0 { direct.next_call() } else { number };
                    if let Some(member) = direct.absent(call - 1) {
                        self.stage = Stage::Enter(call);
                        return Ok(Met::Awaits(member));
                    }
                    let words = [scale.to_bits(), self.says()];
                    direct.enter(call, &turn.signature, words, bytes);
                    self.stage = Stage::Arrive(call);
                }
                Stage::Arrive(call) => {
                    if let Some(member) = direct.absent(call) {
                        self.stage = Stage::Arrive(call);
                        return Ok(Met::Awaits(member));
                    }
                    let key = turn.key(group);
                    for member in 0..direct.size() {
                        direct.compare(group, member, call, key, &turn.signature, bytes)?;
                    }
                    let words: Vec<_> = (0..direct.size()).map(|member| direct.words(member, call)).collect();
                    let scales = words.iter().map(|&[scale, _]| f64::from_bits(scale)).collect();
                    let said: Vec<u64> = words.iter().map(|&[_, said]| said).collect();
                    let seat = &self.seat;
                    if seat.hear(group, &said) {
                        return Ok(Met::Relays(scales));
                    }
                    if seat.lanes().is_none() && said.iter().all(|said| said & CAN != 0) {
                        seat.making().meet_on_boards(group, direct, (&order.devices, order.device));
                    }
                    return Ok(Met::Parts);
                }
                _ => return Ok(Met::Parts),
            }
        }
    }

    fn by_messages(
        &mut self,
        gather: &Gather,
        group: &Group,
        turn: &Turn,
        order: &StreamOrder,
    ) -> Result<Met> {
        let seat = self.seat.clone();
        if let Stage::Begin = self.stage {
            if let Some(None) = seat.lanes() {
                self.stage = Stage::Over;
                return Ok(Met::Parts);
            }
            self.greet(gather, group, turn)?;
        }
        // In its place until all has come: whoever gives the call up finds it there, and has nothing more
        // written to its memory.
        let Stage::Greet(gathering) = &mut self.stage else { return Ok(Met::Parts) };
        match gathering.operation.advance(group) {
            Poll::Pending => return Ok(Met::Pending),
            Poll::Ready(result) => drop(result?),
        }
        let Stage::Greet(gathering) = std::mem::replace(&mut self.stage, Stage::Over) else {
            return Ok(Met::Parts);
        };
        let long = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|index| bytes[index]));
        let words: Vec<&[u8]> = gathering.all.chunks_exact(gathering.own.len()).collect();
        let scales: Vec<f64> = words.iter().map(|word| f64::from_bits(long(word))).collect();
        let said: Vec<u64> = words.iter().map(|word| long(&word[8..])).collect();
        if seat.hear(group, &said) {
            return Ok(Met::Relays(scales));
        }
        let first = gathering.own.len() > WORD_BYTES;
        if first && seat.lanes().is_none() && said.iter().all(|said| said & CAN != 0) {
            // A rank that could not listen has said nothing of an address.
            let addresses = words.iter().map(|word| read_record(&word[WORD_BYTES..]).ok()).collect();
            seat.making().connect(group, addresses, (&order.devices, order.device));
        }
        Ok(Met::Parts)
    }

    /// Begins to tell the others what this rank says, and where it listens, if no lanes are being made.
    fn greet(&mut self, gather: &Gather, group: &Group, turn: &Turn) -> Result<()> {
        let seat = &self.seat;
        let mut own = Vec::from(self.say.scale.to_bits().to_le_bytes());
        own.extend_from_slice(&self.says().to_le_bytes());
        if let Some(wire) = seat.making().listen(group, seat.crew()) {
            let mut address = [0; RECORD_BYTES];
            if let Err(error) = wire.and_then(|wire| record(wire.own_address(), &mut address)) {
                say_no(group.name(), &error);
            }
            own.extend_from_slice(&address);
        }
        let turn = turn.at_piece(GREETING);
        let gathering = Gathering::begin(gather, group, turn, own, seat.crew().size)?;
        self.stage = Stage::Greet(gathering);
        Ok(())
    }
}

/// A scalar, and what the rank says.
const WORD_BYTES: usize = 16;

/// Bytes of all of a crew on their way to all.
struct Gathering {
    operation: Box<dyn Operation>,
    own: Box<[u8]>,
    all: Box<[u8]>,
}

impl Gathering {
    fn begin(gather: &Gather, group: &Group, turn: Turn, own: Vec<u8>, size: u32) -> Result<Gathering> {
        let mut own = own.into_boxed_slice();
        let mut all = vec![0; own.len() * size as usize].into_boxed_slice();
        let operation = gather(group, &turn, own.as_mut_ptr(), all.as_mut_ptr(), own.len())?;
        Ok(Gathering { operation, own, all })
    }
}
