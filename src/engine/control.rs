//! What engines tell each other beside the data: failures, and what they are doing. Travels on the control
//! connection.

#![forbid(unsafe_code)]

use super::wire::{Frame, FrameKind, Key};
use crate::error::{Error, Status};
use crate::signature::Signature;

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// The group has failed, with this root cause.
    Failure {
        /// The group's id.
        group: u64,
        /// The cause.
        error: Error,
    },
    /// What is your last call in this group?
    Query {
        /// The group's id.
        group: u64,
        /// Comes back with the answer.
        token: u64,
    },
    /// This one.
    Answer {
        /// As in the query.
        token: u64,
        /// What it is.
        answer: Answer,
    },
    /// I wait for you in this call. Is it yours too?
    Call {
        /// The call; its slot means nothing.
        key: Key,
        /// What was called.
        signature: Signature,
    },
}

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it is in a call, and so may itself wait for somebody.
    pub waits: bool,
    /// For whom, if that is known: a rank of the group.
    pub waits_for: Option<u32>,
    /// Its last call, for a person.
    pub text: String,
}

/// Texts are cut to this many bytes.
const TEXT_BYTES: usize = 4096;

/// Stands for no rank.
const NOBODY: u32 = u32::MAX;

impl Control {
    /// The bytes that travel.
    #[inline(never)] // For size: nothing that is said here is in a hurry.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        let text = match self {
            Control::Failure { group, error } => {
                bytes.push(1);
                bytes.extend_from_slice(&group.to_le_bytes());
                bytes.push(error.status() as u8);
                error.text()
            }
            Control::Query { group, token } => {
                bytes.push(2);
                bytes.extend_from_slice(&group.to_le_bytes());
                bytes.extend_from_slice(&token.to_le_bytes());
                ""
            }
            Control::Answer { token, answer } => {
                bytes.push(3);
                bytes.extend_from_slice(&token.to_le_bytes());
                bytes.push(u8::from(answer.waits));
                bytes.extend_from_slice(&answer.waits_for.unwrap_or(NOBODY).to_le_bytes());
                &answer.text
            }
            Control::Call { key, signature } => {
                bytes.push(4);
                let (key, signature) = (*key, *signature);
                let frame = Frame {
                    kind: FrameKind::Request,
                    key,
                    signature,
                    total: 0,
                    offset: 0,
                    length: 0,
                    announced: 0,
                };
                bytes.extend_from_slice(&frame.encode());
                ""
            }
        };
        let end = (0..=text.len().min(TEXT_BYTES)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        bytes.extend_from_slice(&text.as_bytes()[..end]);
        bytes
    }

    /// What travelled; `None` for bytes that are no message of this version.
    pub fn decode(bytes: &[u8]) -> Option<Control> {
        let (&kind, rest) = bytes.split_first()?;
        let (word, rest) = rest.split_first_chunk::<8>()?;
        let word = u64::from_le_bytes(*word);
        match kind {
            1 => {
                let (&status, text) = rest.split_first()?;
                let status = status_from(status)?;
                let text = String::from_utf8_lossy(text);
                Some(Control::Failure { group: word, error: Error::new(status, text) })
            }
            2 => {
                let token = u64::from_le_bytes(*rest.first_chunk::<8>()?);
                Some(Control::Query { group: word, token })
            }
            3 => {
                let (&waits, rest) = rest.split_first()?;
                let (rank, text) = rest.split_first_chunk::<4>()?;
                let waits_for = Some(u32::from_le_bytes(*rank)).filter(|&rank| rank != NOBODY);
                let text = String::from_utf8_lossy(text).into_owned();
                Some(Control::Answer { token: word, answer: Answer { waits: waits != 0, waits_for, text } })
            }
            4 => {
                let Frame { key, signature, .. } = Frame::decode(bytes[1..].first_chunk()?).ok()?;
                Some(Control::Call { key, signature })
            }
            _ => None,
        }
    }
}

fn status_from(number: u8) -> Option<Status> {
    use Status::*;
    [
        InvalidArgument,
        InvalidUsage,
        Mismatch,
        Timeout,
        PeerFailed,
        Aborted,
        NotMember,
        Unsupported,
        System,
        OutOfMemory,
        Cuda,
        Internal,
    ]
    .into_iter()
    .find(|&status| status as u8 == number)
}

#[cfg(test)]
mod tests {
    use super::super::wire::Class;
    use super::*;
    use crate::reduce::DataType;
    use crate::signature::Kind;
    use proptest::prelude::*;

    #[test]
    fn messages_survive_the_wire() {
        let key = Key { group: 5, tag: 8, sequence: 3, slot: 0, class: Class::Tagged };
        let signature = Signature {
            kind: Kind::Reduce,
            dtype: DataType::F64,
            operator: 1,
            algorithm: 2,
            root: 4,
            count: 9,
            device: true,
        };
        for message in [
            Control::Failure { group: 9, error: Error::new(Status::Timeout, "nothing from rank 3") },
            Control::Query { group: 1, token: 2 },
            Control::Answer {
                token: 7,
                answer: Answer { waits: false, waits_for: None, text: "barrier() #3, done".into() },
            },
            Control::Answer { token: 8, answer: Answer { waits: true, waits_for: Some(2), text: "".into() } },
            Control::Call { key, signature },
        ] {
            assert_eq!(Control::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "é".repeat(TEXT_BYTES);
        let bytes = Control::Failure { group: 0, error: Error::new(Status::Timeout, text) }.encode();
        assert!(bytes.len() <= TEXT_BYTES + 10);
        let Some(Control::Failure { error, .. }) = Control::decode(&bytes) else { panic!("it is a failure") };
        assert!(error.text().ends_with('é'));
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Control::decode(&bytes);
        }
    }
}
