//! What a rank compares with the other members before its kernels meet theirs: its calls, in their order.

#![forbid(unsafe_code)]

use std::fmt;

use super::board::{InLaunch, MOST_BLOCKS, Noted, NotedPoint, Past};
use super::retired::Parts;
use crate::cuda::exchange::{Direction, MAX_RANKS, Point};
use crate::engine::group::{Group, Turn};
use crate::engine::messages::Mismatch;
use crate::engine::wire::Key;
use crate::error::{Error, Result, Status, fail};

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
        let Parts { boards, first, .. } = parts;
        let Terms { max_blocks, windowed, place } = terms;
        let max_blocks = max_blocks.min(MOST_BLOCKS);
        let (number, signature) = (turn.sequence, turn.signature);
        let call = Noted { sequence: number, signature, max_blocks, place, windowed, digest: self.digest };
        let before = self.collective(&call);
        let Some((member, theirs)) = boards.note(before, &call) else { return Ok(()) };
        let (own, rank, name) = (group.rank(), *first as usize + member, group.name());
        if theirs.sequence != number {
            fail!(
                Mismatch,
                "calls of '{name}' differ: rank {own} called {signature} as its call #{number}, rank {rank} {} as its call \
                 #{}; one has called something before that the other has not",
                theirs.signature,
                theirs.sequence
            );
        }
        if (Noted { digest: call.digest, ..theirs }) == call {
            fail!(
                Mismatch,
                "calls of '{name}' before #{number} differ: rank {rank} has called something else than rank {own}, which was too far \
                 from it to be compared"
            );
        }
        if theirs.signature == signature {
            fail!(
                Mismatch,
                "call #{number} of '{name}' differs: rank {own} called {signature} with {terms}, rank {rank} with {}",
                Terms { max_blocks: theirs.max_blocks, windowed: theirs.windowed, place: theirs.place }
            );
        }
        let key = Key { group: group.id(), tag: turn.tag, sequence: number, slot: 0, class: turn.class };
        let (peer, theirs) = (group.members()[rank], theirs.signature);
        let mismatch = Mismatch { peer, key, theirs, ours: Some(signature), bytes: None };
        Err(group.explain(&mismatch, group.endpoint().recorder()))
    }

    /// Notes sends and receives, and compares them with what their other ends have noted. They go through the same slots as
    /// collectives do, so the order of both has to be the same.
    pub(super) fn compare_points(&mut self, parts: &Parts, group: &Group, points: &[Point]) -> Result<()> {
        let Parts { boards, first, .. } = parts;
        // Kernels leave out what is empty.
        for point in points.iter().filter(|point| point.bytes > 0) {
            let (number, ours) = self.point(point);
            let peer = point.peer as usize;
            let Some(theirs) = boards.note_point(point.direction, peer, number, &ours) else { continue };
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
