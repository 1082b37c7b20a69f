//! How two ends of a connection prove to each other that they know the job's secret, before anything else is
//! said. Pure: bytes in, bytes out, no I/O.
//!
//! | from | message | bytes |
//! |---|---|---|
//! | initiator | hello: magic, version, purpose, lane, initiator's rank, target's rank, job, attempt, nonce | 72 |
//! | responder | challenge: magic, version, nonce | 42 |
//! | initiator | proof: tag("initiator", hello, challenge) | 32 |
//! | responder | proof: tag("responder", hello, challenge) | 32 |
//!
//! The initiator proves itself first, so a stranger that connects learns a version and a random number. Both
//! nonces are in both tags, so no tag is of use twice, and the two labels keep one side's tag from being sent
//! back as the other's.

#![forbid(unsafe_code)]

use super::wire::Reader;
use crate::error::{Error, Result, Status, fail};
use crate::rendezvous::secret::SecretKey;

/// Grows with every change of what is said on a connection.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"unisono\x01";
const HELLO: usize = 72;
const CHALLENGE: usize = 42;
const PROOF: usize = 32;

/// A random number that is used once.
pub type Nonce = [u8; 32];

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The control connection of a link.
    Control,
    /// Its data connection of this index.
    Data(u8),
}

/// Who connects to whom, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// The rank that connects.
    pub initiator: u32,
    /// The rank that it means to reach.
    pub target: u32,
    /// The job of both.
    pub job: u64,
    /// Ties the data connections of a link to its control connection: a random number for each attempt to
    /// open one.
    pub attempt: u64,
}

/// What to do after a message.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Send this; may be empty.
    pub send: Vec<u8>,
    /// The peer has proved itself, and this is what the connection is for.
    pub done: Option<Hello>,
}

/// One side of a handshake in progress.
#[derive(Debug)]
pub struct Handshake {
    secret: SecretKey,
    state: State,
}

#[derive(Debug)]
enum State {
    AwaitChallenge { hello: Hello, said: Vec<u8> },
    AwaitAnswer { hello: Hello, said: Vec<u8>, challenge: Vec<u8> },
    AwaitHello { rank: u32, job: u64, nonce: Nonce },
    AwaitProof { rank: u32, job: u64, hello: Hello, said: Vec<u8>, challenge: Vec<u8> },
    Over,
}

impl Handshake {
    /// The side that connected, and its first message. `nonce` is fresh and random.
    pub fn initiate(secret: &SecretKey, hello: Hello, nonce: Nonce) -> (Handshake, Vec<u8>) {
        let said = encode_hello(&hello, &nonce);
        let state = State::AwaitChallenge { hello, said: said.clone() };
        (Handshake { secret: secret.clone(), state }, said)
    }

    /// The side that was connected to: `rank` of `job`. `nonce` is fresh and random.
    pub fn respond(secret: &SecretKey, rank: u32, job: u64, nonce: Nonce) -> Handshake {
        Handshake { secret: secret.clone(), state: State::AwaitHello { rank, job, nonce } }
    }

    /// The length of the message that must come next; 0 when none must.
    pub fn needs(&self) -> usize {
        match self.state {
            State::AwaitHello { .. } => HELLO,
            State::AwaitChallenge { .. } => CHALLENGE,
            State::AwaitProof { .. } | State::AwaitAnswer { .. } => PROOF,
            State::Over => 0,
        }
    }

    /// Takes the peer's next message, of [`Handshake::needs`] bytes. After an error the connection must be
    /// closed and nothing more sent.
    pub fn advance(&mut self, message: &[u8]) -> Result<Step> {
        if message.len() != self.needs() {
            fail!(Internal, "a handshake message of {} bytes where {} are due", message.len(), self.needs());
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::AwaitHello { rank, job, nonce } => {
                let hello = decode_hello(message)?;
                let challenge = encode_challenge(&nonce);
                let send = challenge.clone();
                self.state = State::AwaitProof { rank, job, hello, said: message.to_vec(), challenge };
                Ok(Step { send, done: None })
            }
            State::AwaitChallenge { hello, said } => {
                decode_challenge(message)?;
                let send = self.secret.tag(&[b"initiator", &said, message]).to_vec();
                self.state = State::AwaitAnswer { hello, said, challenge: message.to_vec() };
                Ok(Step { send, done: None })
            }
            State::AwaitProof { rank, job, hello, said, challenge } => {
                if !self.secret.verify(&[b"initiator", &said, &challenge], message) {
                    fail!(PeerFailed, "it does not know the secret of this job");
                }
                if hello.job != job {
                    fail!(PeerFailed, "it belongs to job {:x}, this is job {job:x}", hello.job);
                }
                if hello.target != rank {
                    fail!(PeerFailed, "it looks for rank {}, this is rank {rank}", hello.target);
                }
                let send = self.secret.tag(&[b"responder", &said, &challenge]).to_vec();
                Ok(Step { send, done: Some(hello) })
            }
            State::AwaitAnswer { hello, said, challenge } => {
                if !self.secret.verify(&[b"responder", &said, &challenge], message) {
                    fail!(PeerFailed, "who answers there does not know the secret of this job");
                }
                Ok(Step { send: Vec::new(), done: Some(hello) })
            }
            State::Over => Ok(Step { send: Vec::new(), done: None }),
        }
    }
}

fn encode_hello(hello: &Hello, nonce: &Nonce) -> Vec<u8> {
    let (purpose, lane) = match hello.purpose {
        Purpose::Control => (0, 0),
        Purpose::Data(lane) => (1, lane),
    };
    let mut bytes = Vec::with_capacity(HELLO);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[purpose, lane, 0, 0, 0, 0]);
    bytes.extend_from_slice(&hello.initiator.to_le_bytes());
    bytes.extend_from_slice(&hello.target.to_le_bytes());
    bytes.extend_from_slice(&hello.job.to_le_bytes());
    bytes.extend_from_slice(&hello.attempt.to_le_bytes());
    bytes.extend_from_slice(nonce);
    bytes
}

fn decode_hello(bytes: &[u8]) -> Result<Hello> {
    let mut reader = Reader::new(bytes);
    check_version(&mut reader)?;
    let parse = |reader: &mut Reader<'_>| {
        let (purpose, lane) = (reader.u8()?, reader.u8()?);
        let purpose = match (purpose, lane, reader.u32()?) {
            (0, 0, 0) => Purpose::Control,
            (1, lane, 0) => Purpose::Data(lane),
            _ => return None,
        };
        let (initiator, target) = (reader.u32()?, reader.u32()?);
        let (job, attempt) = (reader.u64()?, reader.u64()?);
        Some(Hello { purpose, initiator, target, job, attempt })
    };
    parse(&mut reader).ok_or_else(|| Error::new(Status::PeerFailed, "its greeting makes no sense"))
}

fn encode_challenge(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), nonce].concat()
}

fn decode_challenge(bytes: &[u8]) -> Result<()> {
    check_version(&mut Reader::new(bytes))
}

fn check_version(reader: &mut Reader<'_>) -> Result<()> {
    if reader.array() != Some(MAGIC) {
        fail!(PeerFailed, "it does not speak unisono's protocol");
    }
    match reader.u16() {
        Some(VERSION) => Ok(()),
        Some(other) => {
            fail!(PeerFailed, "it speaks version {other} of unisono's protocol, this is version {VERSION}")
        }
        None => fail!(PeerFailed, "it does not speak unisono's protocol"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HELLO_TO_2: Hello =
        Hello { purpose: Purpose::Data(3), initiator: 1, target: 2, job: 77, attempt: 5 };

    /// Runs both sides, with `alter` between them on each of the four messages.
    fn run(
        keys: [u8; 2],
        rank: u32,
        job: u64,
        mut alter: impl FnMut(usize, &mut Vec<u8>),
    ) -> (Result<Hello>, Result<Hello>) {
        let [own, other] = keys.map(|key| SecretKey::new([key; 32]));
        let mut responder = Handshake::respond(&other, rank, job, [2; 32]);
        let (mut initiator, mut message) = Handshake::initiate(&own, HELLO_TO_2, [1; 32]);
        let (mut near, mut far) = (None, None);
        let closed = || Error::new(Status::PeerFailed, "closed");
        for index in 0..4 {
            alter(index, &mut message);
            let (side, done) =
                if index % 2 == 0 { (&mut responder, &mut far) } else { (&mut initiator, &mut near) };
            match side.advance(&message) {
                Ok(step) => {
                    *done = step.done.map(Ok).or(done.take());
                    message = step.send;
                }
                Err(why) => {
                    *done = Some(Err(why));
                    break;
                }
            }
        }
        (near.unwrap_or_else(|| Err(closed())), far.unwrap_or_else(|| Err(closed())))
    }

    #[test]
    fn both_sides_agree() {
        let (near, far) = run([9, 9], 2, 77, |_, _| {});
        assert_eq!((near.unwrap(), far.unwrap()), (HELLO_TO_2, HELLO_TO_2));
    }

    #[test]
    fn a_wrong_secret_rank_or_job_gets_no_proof() {
        for (keys, rank, job, why) in [
            ([9, 8], 2, 77, "does not know the secret"),
            ([9, 9], 3, 77, "looks for rank 2, this is rank 3"),
            ([9, 9], 2, 78, "job"),
        ] {
            let mut proofs = 0;
            let (near, far) = run(keys, rank, job, |index, _| proofs += usize::from(index == 3));
            assert!(far.unwrap_err().text().contains(why));
            assert!(near.is_err());
            assert_eq!(proofs, 0);
        }
    }

    #[test]
    fn another_version_is_named() {
        let (_, far) = run([9, 9], 2, 77, |index, message| message[8] += u8::from(index == 0));
        assert!(far.unwrap_err().text().contains("version 2"));
        let (near, _) = run([9, 9], 2, 77, |index, message| message[8] += u8::from(index == 1));
        assert!(near.unwrap_err().text().contains("version 2"));
    }

    #[test]
    fn a_tag_sent_back_proves_nothing() {
        let mut tag = Vec::new();
        let (near, _) = run([9, 9], 2, 77, |index, message| match index {
            2 => tag = message.clone(),
            3 => *message = tag.clone(),
            _ => {}
        });
        assert!(near.unwrap_err().text().contains("secret"));
    }

    proptest! {
        #[test]
        fn every_altered_bit_is_noticed(message in 0usize..4, place in 0usize..72, bit in 0u8..8) {
            let (near, far) = run([9, 9], 2, 77, |index, bytes| if index == message {
                let place = place % bytes.len();
                bytes[place] ^= 1 << bit;
            });
            prop_assert!(near.is_err());
            // The last message is the initiator's to check: the responder was content before.
            prop_assert_eq!(far.is_ok(), message == 3);
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 72)) {
            let mut side = Handshake::respond(&SecretKey::new([0; 32]), 0, 0, [0; 32]);
            prop_assert!(side.advance(&bytes[..71]).is_err());
            let mut side = Handshake::respond(&SecretKey::new([0; 32]), 0, 0, [0; 32]);
            let _ = side.advance(&bytes);
            prop_assert!(side.advance(&bytes[..side.needs()]).is_err() || side.needs() == 0);
        }
    }
}
