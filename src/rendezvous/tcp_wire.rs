//! What a TCP store and its clients say to each other. All numbers are little-endian.
//!
//! ```text
//! server: MAGIC  flags:1  instance:16  nonce:32
//! client: MAGIC  flags:1  nonce:32     tag:32        tag = HMAC(secret, "client", both nonces, instance)
//! server: verdict:1  tag:32                          tag = HMAC(secret, "server", both nonces, instance)
//! client: operation:1  key length:4  body length:4  key  body
//! server: answer:1  body length:4  body              and so on, one answer to each request, in order
//! ```
//!
//! Without a secret the tags are zeros. Both sides prove that they know the secret before either believes a
//! request or an answer; what follows is neither encrypted nor signed.

#![forbid(unsafe_code)]

use super::secret::SecretKey;

/// The first bytes of both greetings; the digit is the version.
pub(super) const MAGIC: [u8; 8] = *b"UNISTOR2";
/// What they begin with in every version.
pub(super) const FAMILY: &[u8] = MAGIC.split_at(7).0;
/// Set by a server and a client who have a secret.
pub(super) const WITH_SECRET: u8 = 1;
/// Set by a server who has no room for another client.
pub(super) const FULL: u8 = 2;

pub(super) const SERVER_HELLO: usize = 8 + 1 + 16 + 32;
pub(super) const CLIENT_HELLO: usize = 8 + 1 + 32 + 32;
pub(super) const VERDICT: usize = 1 + 32;
pub(super) const REQUEST_HEAD: usize = 1 + 4 + 4;
pub(super) const ANSWER_HEAD: usize = 1 + 4;

/// The longest key, in bytes.
pub(super) const MAX_KEY: usize = 4096;
/// The longest value, in bytes.
pub(super) const MAX_VALUE: usize = 16 << 20;
/// The longest body of a [`Operation::Will`], in bytes.
pub(super) const MAX_WILL: usize = 16 << 10;

/// A server's greeting.
#[derive(Clone, Copy)]
pub(super) struct ServerHello {
    pub(super) flags: u8,
    pub(super) instance: [u8; 16],
    pub(super) nonce: [u8; 32],
}

/// A client's greeting.
#[derive(Clone, Copy)]
pub(super) struct ClientHello {
    pub(super) flags: u8,
    pub(super) nonce: [u8; 32],
    pub(super) tag: [u8; 32],
}

/// What a server thinks of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Verdict {
    Welcome = 0,
    WrongSecret = 1,
    SecretNeeded = 2,
    NoSecretHere = 3,
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operation {
    /// The body is the value.
    Set = 1,
    /// The body is 8 bytes: how many milliseconds to wait, `u64::MAX` for ever.
    Get = 2,
    /// The body is empty.
    TryGet = 3,
    /// The body is 8 bytes: what to add.
    Add = 4,
    /// If this connection ends before the key exists, it is to have no bytes. The body is [`words`]: a key
    /// that is set first, where it does not exist.
    Will = 5,
}

/// What a server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Answer {
    /// Done; the body is the value that was asked for, the sum as 8 bytes, or nothing.
    Done = 0,
    /// The key does not exist.
    Absent = 1,
    /// The key did not exist in time.
    TimedOut = 2,
    /// Not possible; the body is a text. To who waits: another rank cannot join.
    Refused = 3,
    /// No answer, and before any: another rank cannot join; the body is [`words`].
    Words = 4,
}

/// The head of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHead {
    pub(super) operation: Operation,
    pub(super) key: usize,
    pub(super) body: usize,
}

impl ServerHello {
    pub(super) fn bytes(&self) -> [u8; SERVER_HELLO] {
        let mut bytes = [0; SERVER_HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.flags;
        bytes[9..25].copy_from_slice(&self.instance);
        bytes[25..].copy_from_slice(&self.nonce);
        bytes
    }

    /// `None` when another program or another version speaks.
    pub(super) fn parse(bytes: &[u8; SERVER_HELLO]) -> Option<ServerHello> {
        let (magic, flags, instance, nonce) = (&bytes[..8], bytes[8], &bytes[9..25], &bytes[25..]);
        let hello = ServerHello { flags, instance: instance.try_into().ok()?, nonce: nonce.try_into().ok()? };
        (magic == MAGIC).then_some(hello)
    }
}

impl ClientHello {
    pub(super) fn bytes(&self) -> [u8; CLIENT_HELLO] {
        let mut bytes = [0; CLIENT_HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.flags;
        bytes[9..41].copy_from_slice(&self.nonce);
        bytes[41..].copy_from_slice(&self.tag);
        bytes
    }

    /// `None` when another program or another version speaks.
    pub(super) fn parse(bytes: &[u8; CLIENT_HELLO]) -> Option<ClientHello> {
        let (magic, flags, nonce, tag) = (&bytes[..8], bytes[8], &bytes[9..41], &bytes[41..]);
        let hello = ClientHello { flags, nonce: nonce.try_into().ok()?, tag: tag.try_into().ok()? };
        (magic == MAGIC).then_some(hello)
    }
}

impl Verdict {
    pub(super) fn parse(byte: u8) -> Option<Verdict> {
        use Verdict::*;
        [Welcome, WrongSecret, SecretNeeded, NoSecretHere].into_iter().find(|verdict| *verdict as u8 == byte)
    }
}

impl Answer {
    pub(super) fn parse(byte: u8) -> Option<Answer> {
        use Answer::*;
        [Done, Absent, TimedOut, Refused, Words].into_iter().find(|answer| *answer as u8 == byte)
    }

    /// The head of an answer whose body has `length` bytes, at most [`MAX_VALUE`].
    pub(super) fn head(self, length: usize) -> [u8; ANSWER_HEAD] {
        let [a, b, c, d] = (length as u32).to_le_bytes();
        [self as u8, a, b, c, d]
    }
}

impl RequestHead {
    /// The head; the lengths are at most [`MAX_KEY`] and [`MAX_VALUE`].
    pub(super) fn bytes(self) -> [u8; REQUEST_HEAD] {
        let mut bytes = [0; REQUEST_HEAD];
        bytes[0] = self.operation as u8;
        bytes[1..5].copy_from_slice(&(self.key as u32).to_le_bytes());
        bytes[5..].copy_from_slice(&(self.body as u32).to_le_bytes());
        bytes
    }

    /// `None` for what no client sends: an unknown operation, or a length beyond its limit.
    pub(super) fn parse(bytes: [u8; REQUEST_HEAD]) -> Option<RequestHead> {
        let [operation, k0, k1, k2, k3, b0, b1, b2, b3] = bytes;
        use Operation::*;
        let operation = [Set, Get, TryGet, Add, Will].into_iter().find(|known| *known as u8 == operation)?;
        let key = u32::from_le_bytes([k0, k1, k2, k3]) as usize;
        let body = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
        let fits = match operation {
            Set => body <= MAX_VALUE,
            Get | Add => body == 8,
            TryGet => body == 0,
            Will => body <= MAX_WILL,
        };
        (key <= MAX_KEY && fits).then_some(RequestHead { operation, key, body })
    }

    /// The whole request's length.
    pub(super) fn length(self) -> usize {
        REQUEST_HEAD + self.key + self.body
    }
}

/// What a rank says that cannot join, or that goes before it has joined, with the key that has it.
pub(super) fn words(key: &[u8], value: &[u8]) -> Vec<u8> {
    [&(key.len() as u32).to_le_bytes(), key, value].concat()
}

/// The key and the value of [`words`].
pub(super) fn parse_words(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

/// What each side signs: who speaks, and everything that makes this connection unlike any other.
pub(super) fn transcript<'a>(
    speaker: &'a str,
    server: &'a ServerHello,
    client_nonce: &'a [u8; 32],
) -> [&'a [u8]; 4] {
    [speaker.as_bytes(), &server.nonce, client_nonce, &server.instance]
}

/// The key that stores use, so that a proof made here is of no use on the job's links.
pub(super) fn store_key(secret: &SecretKey) -> SecretKey {
    secret.derive("tcp store")
}
