//! What the ranks tell each other while a device exchange is set up: fixed-size messages, parsed where they
//! arrive.

#![forbid(unsafe_code)]

use crate::cuda::slab::{Identity, Place};
use crate::error::{Result, fail};
use crate::signature::Signature;

/// Bytes of every message, whatever it says.
pub const MESSAGE_BYTES: usize = 256;

const OFFER: u8 = 1;
const READY: u8 = 2;
const REFUSAL: u8 = 3;
const STUCK: u8 = 4;
const WRONG: u8 = 5;

/// One rank's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Here is what I have.
    Offer(Offer),
    /// This step has gone well.
    Ready {
        /// Whether wide lines arrive whole where this rank's GPU stores them.
        whole_lines: bool,
    },
    /// I cannot, for this reason.
    Refusal {
        /// For a person.
        why: String,
        /// My GPU may still write to the others' arenas.
        stuck: bool,
    },
    /// What I was told to do makes no sense, for this reason.
    Wrong(String),
}

/// Where a rank's arena and its board lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Which GPU, whoever asks.
    pub(super) uuid: [u8; 16],
    /// The GPU's number in its process.
    pub(super) device: u32,
    /// The process.
    pub(super) process: Identity,
    /// The arena's address in its process.
    pub(super) address: u64,
    /// The arena's size; the same on all ranks.
    pub(super) bytes: u64,
    /// Tells the rank's table from other tables.
    pub(super) table: u64,
    /// Whether somebody has chosen it.
    pub(super) chosen: bool,
    /// The board's offset in the rank's segment.
    pub(super) board: u64,
    /// The most blocks that the rank's caller allows kernels; 0: no limit.
    pub(super) max_blocks: u32,
    /// Its GPU's multiprocessors.
    pub(super) multiprocessors: u32,
    /// The call in which the rank sets the exchange up, by its number; `None`: before its calls.
    pub(super) call: Option<(u32, Signature)>,
    /// For other processes, if the driver can share memory between processes.
    pub(super) place: Option<Place>,
}

impl Message {
    pub(super) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = Vec::with_capacity(MESSAGE_BYTES);
        match self {
            Message::Ready { whole_lines } => bytes.extend([READY, u8::from(*whole_lines)]),
            Message::Refusal { why, stuck: false } => encode_text(REFUSAL, why, &mut bytes),
            Message::Refusal { why, stuck: true } => encode_text(STUCK, why, &mut bytes),
            Message::Wrong(why) => encode_text(WRONG, why, &mut bytes),
            Message::Offer(offer) => {
                bytes.push(OFFER);
                bytes.extend_from_slice(&offer.uuid);
                bytes.extend_from_slice(&offer.device.to_le_bytes());
                bytes.extend_from_slice(&offer.process);
                for word in [offer.address, offer.bytes, offer.table, offer.board] {
                    bytes.extend_from_slice(&word.to_le_bytes());
                }
                for word in [offer.max_blocks, offer.multiprocessors] {
                    bytes.extend_from_slice(&word.to_le_bytes());
                }
                bytes.push(u8::from(offer.chosen));
                bytes.push(u8::from(offer.call.is_some()));
                if let Some((number, signature)) = &offer.call {
                    for word in [signature.code(), *number, signature.root] {
                        bytes.extend_from_slice(&word.to_le_bytes());
                    }
                    bytes.extend_from_slice(&signature.count.to_le_bytes());
                }
                bytes.push(u8::from(offer.place.is_some()));
                if let Some(place) = &offer.place {
                    bytes.extend_from_slice(&place.handle);
                    bytes.extend_from_slice(&place.slab.to_le_bytes());
                    bytes.extend_from_slice(&place.offset.to_le_bytes());
                }
            }
        }
        bytes.resize(MESSAGE_BYTES, 0);
        std::array::from_fn(|i| bytes[i])
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Message> {
        let Some(message) = Message::parse(bytes) else {
            fail!(Internal, "a rank sent no message of this version; run the same unisono on all ranks")
        };
        Ok(message)
    }

    fn parse(bytes: &[u8]) -> Option<Message> {
        let (&kind, rest) = bytes.split_first()?;
        match kind {
            READY => Some(Message::Ready { whole_lines: *rest.first()? == 1 }),
            REFUSAL | STUCK | WRONG => {
                let (&len, text) = rest.split_first()?;
                let why = String::from_utf8_lossy(text.get(..usize::from(len))?).into_owned();
                Some(match kind {
                    WRONG => Message::Wrong(why),
                    _ => Message::Refusal { why, stuck: kind == STUCK },
                })
            }
            OFFER => {
                let (uuid, rest) = rest.split_first_chunk()?;
                let (device, rest) = rest.split_first_chunk()?;
                let (process, rest) = rest.split_first_chunk()?;
                let ([address, bytes, table, board], rest) = words(rest)?;
                let (max_blocks, rest) = rest.split_first_chunk()?;
                let (multiprocessors, rest) = rest.split_first_chunk()?;
                let (max_blocks, multiprocessors) =
                    (u32::from_le_bytes(*max_blocks), u32::from_le_bytes(*multiprocessors));
                let (&chosen, rest) = rest.split_first()?;
                let (&in_call, rest) = rest.split_first()?;
                let (call, rest) = match in_call {
                    0 => (None, rest),
                    _ => call(rest).map(|(call, rest)| (Some(call), rest))?,
                };
                let (&shared, rest) = rest.split_first()?;
                let (handle, rest) = rest.split_first_chunk()?;
                let ([slab, offset], _) = words(rest)?;
                let (handle, process) = (*handle, *process);
                let place = (shared == 1).then_some(Place { process, slab, handle, offset });
                let (uuid, device) = (*uuid, u32::from_le_bytes(*device));
                let chosen = chosen == 1;
                Some(Message::Offer(Offer {
                    uuid,
                    device,
                    process,
                    address,
                    bytes,
                    table,
                    chosen,
                    board,
                    max_blocks,
                    multiprocessors,
                    call,
                    place,
                }))
            }
            _ => None,
        }
    }
}

/// A kind and as much of a text as there is room for.
fn encode_text(kind: u8, text: &str, into: &mut Vec<u8>) {
    let most = text.len().min(MESSAGE_BYTES - 2);
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    // PROOF: at most 254.
    into.extend([kind, end as u8]);
    into.extend_from_slice(&text.as_bytes()[..end]);
}

fn call(bytes: &[u8]) -> Option<((u32, Signature), &[u8])> {
    let (code, rest) = bytes.split_first_chunk()?;
    let (number, rest) = rest.split_first_chunk()?;
    let (root, rest) = rest.split_first_chunk()?;
    let (count, rest) = rest.split_first_chunk()?;
    let [code, number, root] = [code, number, root].map(|word| u32::from_le_bytes(*word));
    let signature = Signature::decode(code, root, u64::from_le_bytes(*count)).ok()?;
    Some(((number, signature), rest))
}

fn words<const N: usize>(mut bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut words = [0; N];
    for word in &mut words {
        let (chunk, rest) = bytes.split_first_chunk()?;
        (*word, bytes) = (u64::from_le_bytes(*chunk), rest);
    }
    Some((words, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::DataType;
    use crate::signature::Kind;
    use proptest::prelude::*;

    #[test]
    fn messages_survive_the_wire() {
        let place = Place { process: [3; 16], slab: 4, handle: [5; 64], offset: 6 };
        let signature = Signature {
            kind: Kind::Reduce,
            dtype: DataType::F16,
            operator: 2,
            algorithm: 3,
            root: 70_000,
            count: 1 << 40,
            device: true,
        };
        let offer = Offer {
            uuid: [1; 16],
            device: 2,
            process: [3; 16],
            address: 7,
            bytes: 8,
            table: 10,
            chosen: true,
            board: 9,
            max_blocks: 10,
            multiprocessors: 11,
            call: Some((7, signature)),
            place: Some(place),
        };
        for message in [
            Message::Offer(Offer { place: None, ..offer.clone() }),
            Message::Offer(Offer { call: None, ..offer.clone() }),
            Message::Offer(offer),
            Message::Ready { whole_lines: true },
            Message::Ready { whole_lines: false },
            Message::Refusal { why: "no peer access".into(), stuck: false },
            Message::Refusal { why: String::new(), stuck: true },
            Message::Wrong("the file is empty".into()),
        ] {
            assert_eq!(Message::decode(&message.encode()).unwrap(), message);
        }
        let long = Message::Refusal { why: "é".repeat(500), stuck: false };
        let Message::Refusal { why, .. } = Message::decode(&long.encode()).unwrap() else {
            panic!("a refusal")
        };
        assert_eq!(why, "é".repeat(127));
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::decode(&bytes);
        }
    }
}
