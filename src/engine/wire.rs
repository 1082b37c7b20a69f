//! The frame that precedes every message on a stream: 64 bytes, little-endian.
//!
//! A frame names its transfer by a [`Key`], so that independent operations share a stream and match by key,
//! never by luck; and it carries the [`Signature`] of the call that it belongs to, so that a receiver notices
//! at once when the ranks have called different things, and can say which.

#![forbid(unsafe_code)]

use std::fmt;

use crate::error::{Result, fail};
use crate::signature::Signature;

/// Bytes of an encoded [`Frame`].
pub const FRAME_BYTES: usize = 64;

/// Which family of sequence numbers a key belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Class {
    /// Collectives in the order of the calls.
    Ordered = 0,
    /// Collectives with a tag: ordered among those of the same tag.
    Tagged = 1,
    /// Send and receive.
    PointToPoint = 2,
    /// The engine's own: bootstrap, creation of groups.
    Internal = 3,
    /// Calls in graphs, as they are captured: they are no transfers, and other ranks need not have them.
    Captured = 4,
}

/// Names one transfer between two ranks. With the peer's rank, unique for as long as the transfer exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The group's id.
    pub group: u64,
    /// The caller's tag; 0 where there is none.
    pub tag: u64,
    /// The number of the operation among those of (group, class, tag); for send and receive, of the ordered
    /// pair.
    pub sequence: u32,
    /// The message within the operation: the number of its piece in the upper half, in the lower that of the
    /// message within the piece.
    pub slot: u64,
    /// See [`Class`].
    pub class: Class,
}

/// A tag as errors show it: those that are made of fields, as gloo's are, by their digits of 4 bits.
pub struct Tag(pub u64);

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match u32::try_from(self.0) {
            Ok(number) => write!(f, "{number}"),
            Err(_) => write!(f, "{:#x}", self.0),
        }
    }
}

/// What a frame announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// The whole message follows.
    Eager = 0,
    /// A large message waits at the sender: pull it from `address`, or answer [`FrameKind::Ready`].
    Request = 1,
    /// The receiver has the buffer: send the data.
    Ready = 2,
    /// `length` bytes of a large message follow, from `offset`.
    Data = 3,
    /// The receiver has pulled the message.
    Done = 4,
    /// The receiver's call is another than the sender's of a large message: it will not be taken.
    Refuse = 5,
    /// The sender gives up a large message that it has announced.
    Withdraw = 6,
    /// The receiver does not take a large message that it was told of; why is in `offset`: what the kernel
    /// said when it read, or 0 when its group is gone; or, with bit 32 set, the sender cannot read it either.
    Decline = 7,
    /// The sender has let go of the group, or of all that it had of a line: nothing more comes for it on this
    /// lane.
    Part = 8,
}

/// What precedes every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What this is.
    pub kind: FrameKind,
    /// Whose it is.
    pub key: Key,
    /// The sender's call.
    pub signature: Signature,
    /// Bytes of the whole message.
    pub total: u64,
    /// Data: where this piece belongs. Request: the address in the sender's memory.
    pub offset: u64,
    /// Bytes that follow this frame on the stream.
    pub length: u32,
    /// Request: the number under which it stands announced ([`Stream::announce`]), if the message may be
    /// pulled. Travels with that alone.
    ///
    /// [`Stream::announce`]: crate::transport::Stream::announce
    pub announced: u32,
}

impl Frame {
    /// The bytes that travel. Kind and class share one, lengths and addresses have as many as memory needs,
    /// and the number of what is announced is where others, behind which bytes follow, have their length.
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[0] = self.kind as u8 | (self.key.class as u8) << 4;
        bytes[1..5].copy_from_slice(&self.signature.code().to_le_bytes());
        bytes[5..7].copy_from_slice(&MAGIC);
        bytes[7..15].copy_from_slice(&self.key.group.to_le_bytes());
        bytes[15..23].copy_from_slice(&self.key.tag.to_le_bytes());
        bytes[23..27].copy_from_slice(&self.key.sequence.to_le_bytes());
        bytes[27..35].copy_from_slice(&self.key.slot.to_le_bytes());
        bytes[35..41].copy_from_slice(&self.total.min(LONGEST).to_le_bytes()[..6]);
        bytes[41..48].copy_from_slice(&self.offset.to_le_bytes()[..7]);
        let tail = if self.kind == FrameKind::Request { self.announced } else { self.length };
        bytes[48..52].copy_from_slice(&tail.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.signature.root.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.signature.count.to_le_bytes());
        bytes
    }

    /// What travelled. Bytes that no peer of this version sends are an error: the stream is out of step.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Frame> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let part = |at: usize, len: usize| {
            u64::from_le_bytes(std::array::from_fn(|i| if i < len { bytes[at + i] } else { 0 }))
        };
        let kind = match bytes[0] & 0xf {
            0 => FrameKind::Eager,
            1 => FrameKind::Request,
            2 => FrameKind::Ready,
            3 => FrameKind::Data,
            4 => FrameKind::Done,
            5 => FrameKind::Refuse,
            6 => FrameKind::Withdraw,
            7 => FrameKind::Decline,
            8 => FrameKind::Part,
            other => fail!(Internal, "a frame of unknown kind {other} arrived"),
        };
        let class = match bytes[0] >> 4 {
            0 => Class::Ordered,
            1 => Class::Tagged,
            2 => Class::PointToPoint,
            3 => Class::Internal,
            other => fail!(Internal, "a frame of unknown class {other} arrived"),
        };
        if bytes[5..7] != MAGIC {
            fail!(Internal, "a frame without its mark arrived");
        }
        let (length, announced) = if kind == FrameKind::Request { (0, half(48)) } else { (half(48), 0) };
        let frame = Frame {
            kind,
            key: Key { group: word(7), tag: word(15), sequence: half(23), slot: word(27), class },
            signature: Signature::decode(half(1), half(52), word(56))?,
            total: part(35, 6),
            offset: part(41, 7),
            length,
            announced,
        };
        let fits = match frame.kind {
            FrameKind::Eager => u64::from(frame.length) == frame.total,
            FrameKind::Data => {
                frame.offset.checked_add(u64::from(frame.length)).is_some_and(|end| end <= frame.total)
            }
            FrameKind::Request
            | FrameKind::Ready
            | FrameKind::Done
            | FrameKind::Refuse
            | FrameKind::Withdraw
            | FrameKind::Decline
            | FrameKind::Part => frame.length == 0,
        };
        if !fits {
            fail!(Internal, "a frame whose lengths contradict each other arrived");
        }
        Ok(frame)
    }
}

/// Marks a frame, so that a stream out of step is noticed before its lengths are believed.
const MAGIC: [u8; 2] = [0x75, 0x6e];

/// The longest message that a frame tells of, longer than any memory. What claims to be longer is told as
/// this long, and is of no length that a receiver has.
const LONGEST: u64 = (1 << 48) - 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::DataType;
    use crate::signature::Kind;
    use proptest::prelude::*;

    fn signature() -> Signature {
        Signature {
            kind: Kind::Allreduce,
            dtype: DataType::F32,
            operator: 0,
            algorithm: 0,
            root: 0,
            count: 1024,
            device: true,
        }
    }

    #[test]
    fn a_frame_survives_the_wire() {
        let frame = Frame {
            kind: FrameKind::Data,
            key: Key { group: 7, tag: u64::MAX, sequence: 9, slot: 3 | 5 << 32, class: Class::Tagged },
            signature: signature(),
            total: 1 << 40,
            offset: 1 << 39,
            length: u32::MAX,
            announced: 0,
        };
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        // An address, and all that a key can be.
        let class = Class::Internal;
        let key = Key { group: u64::MAX, tag: u64::MAX, sequence: u32::MAX, slot: u64::MAX, class };
        let (kind, offset) = (FrameKind::Request, (1 << 56) - 1);
        let frame = Frame { kind, key, total: LONGEST, offset, length: 0, announced: u32::MAX, ..frame };
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
    }

    #[test]
    fn a_length_that_no_memory_has_is_told_as_no_other() {
        let key = Key { group: 7, tag: 0, sequence: 9, slot: 3, class: Class::PointToPoint };
        let kind = FrameKind::Request;
        let frame = Frame { kind, key, signature: signature(), total: 0, offset: 0, length: 0, announced: 0 };
        for total in [1 << 48, (1 << 48) + 4, u64::MAX] {
            let told = Frame::decode(&Frame { total, ..frame }.encode()).expect("a frame");
            assert_eq!(told, Frame { total: LONGEST, ..frame });
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_consistent(
            bytes in proptest::array::uniform32(any::<u8>()),
            (kind, class) in (0u8..10, 0u8..5),
        ) {
            let mut frame = [0u8; FRAME_BYTES];
            frame[..32].copy_from_slice(&bytes);
            frame[32..].copy_from_slice(&bytes);
            frame[0] = kind | class << 4;
            frame[5..7].copy_from_slice(&MAGIC);
            if let Ok(decoded) = Frame::decode(&frame) {
                prop_assert!(u64::from(decoded.length) <= decoded.total);
            }
        }
    }
}
