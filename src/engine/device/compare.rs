//! What a rank compares with the other members before its kernels meet theirs: its calls, in their order.

#![forbid(unsafe_code)]

use std::fmt;

use super::board::{InLaunch, MOST_BLOCKS, Note, Noted, NotedPoint, Past};
use super::retired::Parts;
use crate::cuda::exchange::{Direction, MAX_RANKS, Point};
use crate::engine::group::{Group, Turn};
use crate::engine::messages::Mismatch;
use crate::engine::wire::Key;
use crate::error::{Error, Result, Status};
use crate::signature::Signature;

/// What the kernels of all ranks must agree on beside the signature.
#[derive(Clone, Copy, Default)]
pub(super) struct Terms {
    /// See [`Noted`].
    pub(super) max_blocks: u32,
    pub(super) windowed: bool,
    pub(super) place: InLaunch,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.windowed { "its memory in windows" } else { "its memory in no windows" })?;
        match self.max_blocks {
            0 => f.write_str(" and no limit to the blocks of a kernel")?,
            most => write!(f, " and at most {most} blocks")?,
        }
        match self.place {
            InLaunch { of: 0, .. } => Ok(()),
            InLaunch { before, of } => write!(f, ", as number {} of {of} that are one group's", before + 1),
        }
    }
}

/// What ranks compare their calls by.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// How many collectives there have been,
    collectives: u32,
    /// and what they were: see [`Noted`].
    digest: u32,
    /// Messages to and from each member, by [`Direction`].
    points: [[Past; MAX_RANKS]; 2],
}

impl Calls {
    /// How many collectives there have been.
    pub(super) fn collectives(&self) -> u32 {
        self.collectives
    }

    /// One more collective: how many there were before.
    fn collective(&mut self, call: &Noted) -> u32 {
        let before = self.collectives;
        self.collectives = before.wrapping_add(1);
        self.digest = call.digest_with();
        before
    }

    /// One more message: its number, and what is to be noted.
    fn point(&mut self, point: &Point) -> (u32, NotedPoint) {
        self.points[point.direction as usize][point.peer as usize].next(point.bytes, self.collectives)
    }

    /// Notes a collective, and compares it with what the others have noted.
    pub(super) fn compare(&mut self, parts: &Parts, group: &Group, turn: &Turn, terms: Terms) -> Result<()> {
        let before = self.collectives;
        let note = self.note(parts, turn.sequence, turn.signature, terms);
        parts.boards.look();
        match parts.boards.differing(before, &note) {
            None => self.compare_messages(parts, group, before),
            Some((member, theirs)) => Err(differ(parts, group, turn, &note, member, &theirs)),
        }
    }

    /// As [`Calls::compare`], of several, the last of which has the turn `last`.
    pub(super) fn compare_several(
        &mut self,
        parts: &Parts,
        group: &Group,
        last: &Turn,
        calls: impl ExactSizeIterator<Item = (Signature, Terms)>,
    ) -> Result<()> {
        let before = self.collectives;
        let first = last.sequence.wrapping_sub(calls.len() as u32).wrapping_add(1);
        let notes: Vec<Note> = (0..)
            .zip(calls)
            .map(|(place, (signature, terms))| self.note(parts, first.wrapping_add(place), signature, terms))
            .collect();
        let Some(end) = notes.len().checked_sub(1) else { return Ok(()) };
        parts.boards.look();
        let look = |place: usize| {
            parts.boards.differing(before.wrapping_add(place as u32), &notes[place]).map(|seen| (place, seen))
        };
        // A note has the digest of all before it: who has noted our last call alike has noted all alike, but
        // for a chance of 2^-31. Who has not noted it yet will look later than this, and see ours. But who
        // groups them differently may meet our kernel before that, so the first is looked at, too: it says
        // how many are one launch. The others are left alone, so that their notes stay with the processor
        // that wrote them, unless one of these differs.
        let Some(some) = look(0).or_else(|| look(end)) else {
            return self.compare_messages(parts, group, before.wrapping_add(end as u32));
        };
        let (place, (member, theirs)) = (0..=end).find_map(look).unwrap_or(some);
        let (ours, behind) = (&notes[place], (end - place) as u32);
        let turn = last.before(behind, ours.call().map_or(last.signature, |call| call.signature));
        Err(differ(parts, group, &turn, ours, member, &theirs))
    }

    /// Notes a collective.
    fn note(&mut self, parts: &Parts, sequence: u32, signature: Signature, terms: Terms) -> Note {
        let Terms { max_blocks, windowed, place } = terms;
        let max_blocks = max_blocks.min(MOST_BLOCKS);
        let call = Noted { sequence, signature, max_blocks, place, windowed, digest: self.digest };
        let before = self.collective(&call);
        parts.boards.note(before, &call)
    }

    /// Whether this rank has noted all messages that others have before the collective that comes after
    /// `before` others, which it has noted: kernels would take the one for the other.
    fn compare_messages(&self, parts: &Parts, group: &Group, before: u32) -> Result<()> {
        let noted = |direction: Direction, peer: usize| self.points[direction as usize][peer].messages();
        match parts.boards.missed(before, noted) {
            None => Ok(()),
            Some((direction, peer, number, collectives)) => {
                Err(passed(parts, group, [direction, direction.back()], peer, number, collectives))
            }
        }
    }

    /// Notes sends and receives, and compares them with what their other ends have noted. They go through the
    /// same slots as collectives do, so the order of both has to be the same.
    pub(super) fn compare_points(&mut self, parts: &Parts, group: &Group, points: &[Point]) -> Result<()> {
        let Parts { boards, first, .. } = parts;
        // Kernels leave out what is empty.
        for point in points.iter().filter(|point| point.bytes > 0) {
            let (number, ours) = self.point(point);
            let peer = point.peer as usize;
            let Some(theirs) = boards.note_point(point.direction, peer, number, &ours) else {
                if boards.is_passed_by(point.direction, peer, number, ours.collectives) {
                    let ends = [point.direction; 2];
                    let error = passed(parts, group, ends, peer, number, ours.collectives);
                    group.fail(error.clone());
                    return Err(error);
                }
                continue;
            };
            let (own, rank, name) = (group.rank(), first + point.peer, group.name());
            let (from, to, sent, received) = match point.direction {
                Direction::Send => (own, rank, ours, theirs),
                Direction::Receive => (rank, own, theirs, ours),
            };
            let NotedPoint { bytes, collectives, .. } = sent;
            let text = format!(
                "messages from rank {from} to rank {to} of '{name}' differ: {}",
                if bytes != received.bytes {
                    format!("#{number} has {bytes} bytes, but {} are to be received", received.bytes)
                } else if collectives != received.collectives {
                    format!(
                        "#{number} is sent after {collectives} collectives, and received after {}",
                        received.collectives
                    )
                } else {
                    format!("one before #{number} was not received as it was sent")
                }
            );
            // The other end may be under way already, and takes what comes next for this one.
            let error = Error::new(Status::Mismatch, text);
            group.fail(error.clone());
            return Err(error);
        }
        Ok(())
    }
}

/// The failure of a message with `peer` that one end has noted after so many collectives, and the other not
/// before its next. `here` is its direction at this rank, `noted` at the end that has.
#[cold]
fn passed(
    parts: &Parts,
    group: &Group,
    [here, noted]: [Direction; 2],
    peer: usize,
    number: u32,
    collectives: u32,
) -> Error {
    let (own, other) = (group.rank(), parts.first + peer as u32);
    let (from, to) = if here == Direction::Send { (own, other) } else { (other, own) };
    let (done, missing) = match noted {
        Direction::Send => ("sent", "received"),
        Direction::Receive => ("received", "sent"),
    };
    Error::new(
        Status::Mismatch,
        format!(
            "messages from rank {from} to rank {to} of '{}' differ: #{number} is {done} after {collectives} collectives, and not \
             {missing} before the next",
            group.name()
        ),
    )
}

/// The failure of a call for which `member` has noted another.
#[cold]
fn differ(parts: &Parts, group: &Group, turn: &Turn, ours: &Note, member: usize, theirs: &Noted) -> Error {
    let (number, signature) = (turn.sequence, turn.signature);
    let (own, rank, name) = (group.rank(), parts.first as usize + member, group.name());
    let mismatch = |text: String| Error::new(Status::Mismatch, text);
    if theirs.sequence != number {
        return mismatch(format!(
            "calls of '{name}' differ: rank {own} called {signature} as its call #{number}, rank {rank} {} as its call \
             #{}; one has called something before that the other has not",
            theirs.signature, theirs.sequence
        ));
    }
    let Some(ours) = ours.call() else {
        return Error::new(Status::Internal, format!("call #{number} of '{name}' was noted as none"));
    };
    if (Noted { digest: ours.digest, ..*theirs }) == ours {
        return mismatch(format!(
            "calls of '{name}' before #{number} differ: rank {rank} has called something else than rank {own}, which was too far \
             from it to be compared"
        ));
    }
    if theirs.signature == signature {
        let terms =
            |call: &Noted| Terms { max_blocks: call.max_blocks, windowed: call.windowed, place: call.place };
        return mismatch(format!(
            "call #{number} of '{name}' differs: rank {own} called {signature} with {}, rank {rank} with {}",
            terms(&ours),
            terms(theirs)
        ));
    }
    let key = Key { group: group.id(), tag: turn.tag, sequence: number, slot: 0, class: turn.class };
    let (peer, theirs) = (group.members()[rank], theirs.signature);
    let mismatch = Mismatch { peer, key, theirs, ours: Some(signature), bytes: None };
    group.explain(&mismatch, group.endpoint().recorder())
}
