//! How the ranks meet for a call that may be relayed: they compare it, say whether they can relay it and with which scalar, and
//! agree on their lanes in the first.

use std::sync::Arc;
use std::task::Poll;

use super::super::StreamOrder;
use super::lanes::Lanes;
use super::shared::{Agreement, Outcome};
use super::wired::Wire;
use crate::engine::bootstrap::{RECORD_BYTES, read_record, record};
use crate::engine::direct::Direct;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::Operation;
use crate::error::{Error, Result};
use crate::transport::address::PeerAddress;

/// Makes the operation that gathers as many bytes of each rank, from the first address, to all, at the second.
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
pub(super) struct Word {
    /// Its scalar.
    pub(super) scale: f64,
    /// Whether it can relay the call.
    pub(super) can: bool,
    /// Bytes that it contributes.
    pub(super) bytes: u64,
}

const CAN: u64 = 1;

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
    place: Place,
    word: Word,
    stage: Stage,
}

enum Stage {
    /// Waiting until the post of two calls ago is no more needed; the number of the call among the direct ones.
    Enter(u64),
    /// Posted; waiting for everybody's post.
    Arrive(u64),
    /// The first call of a group: waiting for the lanes.
    Agree(Agreement, Vec<f64>),
    /// By messages: nothing is sent yet.
    Begin,
    /// What the ranks say, with their addresses in the first call of a group.
    Greet(Gathering, Option<Wire>),
    /// Waiting for links.
    Connect(Wire, Vec<f64>, Result<()>),
    /// Who can use them.
    Vote(Gathering, Option<Wire>, Vec<f64>),
    Over,
}

/// Slots of these messages: no piece of the call has them at the same time.
const GREETING: u32 = u32::MAX;
const VOTE: u32 = u32::MAX - 1;

impl Meeting {
    pub(super) fn new(place: Place, word: Word) -> Meeting {
        let stage = match place {
            Place::Boards(_) => Stage::Enter(0),
            Place::Messages(_) => Stage::Begin,
        };
        Meeting { place, word, stage }
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
        if let Stage::Greet(gathering, _) | Stage::Vote(gathering, ..) = &mut self.stage {
            gathering.operation.abandon(group);
        }
        self.stage = Stage::Over;
    }

    /// The members that it waits for.
    pub(super) fn waits_for(&self, group: &Group) -> Vec<u32> {
        let size = group.size() as usize;
        let absent: Vec<usize> = match (&self.place, &self.stage) {
            (Place::Boards(direct), Stage::Enter(call)) => {
                direct.absent(call.saturating_sub(1)).into_iter().collect()
            }
            (Place::Boards(direct), Stage::Arrive(call)) => direct.absent(*call).into_iter().collect(),
            (Place::Boards(direct), Stage::Agree(Agreement::Offered(_), _)) => {
                (0..size).filter(|&member| direct.offered(member) == 0).collect()
            }
            (Place::Boards(direct), Stage::Agree(Agreement::Voted(_), _)) => {
                (0..size).filter(|&member| direct.voted(member) == 0).collect()
            }
            (_, Stage::Greet(gathering, _) | Stage::Vote(gathering, ..)) => {
                return gathering.operation.waits_for(group);
            }
            (_, Stage::Connect(wire, ..)) => wire.missing().into_iter().collect(),
            _ => Vec::new(),
        };
        absent.into_iter().map(|member| member as u32).collect()
    }

    fn at_boards(
        &mut self,
        direct: &Arc<Direct>,
        group: &Group,
        turn: &Turn,
        order: &StreamOrder,
    ) -> Result<Met> {
        let Word { scale, can, bytes } = self.word;
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Enter(number) => {
                    let call = if number == 0 { direct.next_call() } else { number };
                    if let Some(member) = direct.absent(call - 1) {
                        self.stage = Stage::Enter(call);
                        return Ok(Met::Awaits(member));
                    }
                    let words = [scale.to_bits(), if can { CAN } else { 0 }];
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
                    if words.iter().any(|&[_, can]| can != CAN) {
                        return Ok(Met::Parts);
                    }
                    if let Some(lanes) = group.relay().lanes() {
                        return Ok(if lanes.is_some() { Met::Relays(scales) } else { Met::Parts });
                    }
                    let agreement = Agreement::begin(group, direct, &order.devices, order.device);
                    self.stage = Stage::Agree(agreement, scales);
                }
                Stage::Agree(agreement, scales) => {
                    match agreement.advance(group, direct, &order.devices, order.device) {
                        Outcome::Waits(member, agreement) => {
                            self.stage = Stage::Agree(agreement, scales);
                            return Ok(Met::Awaits(member));
                        }
                        Outcome::Agreed(shared) => {
                            let relays = shared.is_some();
                            group.relay().settle(group, shared.map(Lanes::Shared));
                            return Ok(if relays { Met::Relays(scales) } else { Met::Parts });
                        }
                    }
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
        let size = group.size() as usize;
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Begin => {
                    let wire = match group.relay().lanes() {
                        Some(None) => return Ok(Met::Parts),
                        Some(Some(_)) => None,
                        None => Some(Wire::listen(group)),
                    };
                    let mut own = Vec::from(self.word.scale.to_bits().to_le_bytes());
                    own.extend_from_slice(&u64::from(self.word.can).to_le_bytes());
                    let first = wire.is_some();
                    let wire = wire.transpose().and_then(|wire| {
                        let mut address = [0; RECORD_BYTES];
                        if let Some(wire) = &wire {
                            record(wire.own_address(), &mut address)?;
                            own.extend_from_slice(&address);
                        }
                        Ok(wire)
                    });
                    let wire = wire.unwrap_or_else(|error| {
                        say_no(group, &error);
                        None
                    });
                    own.resize(WORD_BYTES + if first { RECORD_BYTES } else { 0 }, 0);
                    self.stage =
                        Stage::Greet(Gathering::begin(gather, group, turn.at_piece(GREETING), own)?, wire);
                }
                Stage::Greet(mut gathering, wire) => {
                    match gathering.operation.advance(group) {
                        Poll::Pending => {
                            self.stage = Stage::Greet(gathering, wire);
                            return Ok(Met::Pending);
                        }
                        Poll::Ready(result) => drop(result?),
                    }
                    let long = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|index| bytes[index]));
                    let words: Vec<&[u8]> = gathering.all.chunks_exact(gathering.own.len()).collect();
                    let scales: Vec<f64> = words.iter().map(|word| f64::from_bits(long(word))).collect();
                    if words.iter().any(|word| long(&word[8..]) != CAN) {
                        return Ok(Met::Parts);
                    }
                    if group.relay().lanes().is_some() {
                        return Ok(Met::Relays(scales));
                    }
                    // A rank that could not listen has said nothing of an address.
                    let addresses: Option<Vec<PeerAddress>> =
                        words.iter().map(|word| read_record(&word[WORD_BYTES..]).ok()).collect();
                    let (Some(addresses), Some(wire)) = (addresses, wire) else {
                        group.relay().settle(group, None);
                        return Ok(Met::Parts);
                    };
                    let connected = wire.connect(addresses, &order.devices, order.device);
                    self.stage = Stage::Connect(wire, scales, connected);
                }
                Stage::Connect(wire, scales, connected) => {
                    if let Some(member) = wire.missing() {
                        self.stage = Stage::Connect(wire, scales, connected);
                        return Ok(Met::Awaits(member));
                    }
                    let started = connected.and_then(|()| wire.start());
                    let own = vec![u8::from(started.is_ok())];
                    let wire = started.map(|()| wire).inspect_err(|error| say_no(group, error)).ok();
                    let gathering = Gathering::begin(gather, group, turn.at_piece(VOTE), own)?;
                    self.stage = Stage::Vote(gathering, wire, scales);
                }
                Stage::Vote(mut gathering, wire, scales) => {
                    match gathering.operation.advance(group) {
                        Poll::Pending => {
                            self.stage = Stage::Vote(gathering, wire, scales);
                            return Ok(Met::Pending);
                        }
                        Poll::Ready(result) => drop(result?),
                    }
                    let agreed = gathering.all.len() == size && gathering.all.iter().all(|&vote| vote == 1);
                    let wire = wire.filter(|_| agreed);
                    let relays = wire.is_some();
                    group.relay().settle(group, wire.map(Lanes::Wired));
                    return Ok(if relays { Met::Relays(scales) } else { Met::Parts });
                }
                _ => return Ok(Met::Parts),
            }
        }
    }
}

fn say_no(group: &Group, error: &Error) {
    log::debug!("'{}' relays nothing: {error}", group.name());
}

/// A scalar, and whether the rank can.
const WORD_BYTES: usize = 16;

/// Bytes of all ranks on their way to all.
struct Gathering {
    operation: Box<dyn Operation>,
    own: Box<[u8]>,
    all: Box<[u8]>,
}

impl Gathering {
    fn begin(gather: &Gather, group: &Group, turn: Turn, own: Vec<u8>) -> Result<Gathering> {
        let mut own = own.into_boxed_slice();
        let mut all = vec![0; own.len() * group.size() as usize].into_boxed_slice();
        let operation = gather(group, &turn, own.as_mut_ptr(), all.as_mut_ptr(), own.len())?;
        Ok(Gathering { operation, own, all })
    }
}
