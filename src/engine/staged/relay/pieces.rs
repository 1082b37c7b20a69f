//! The pieces of a call that is relayed, step by step.

use std::sync::Arc;

use super::super::resources::Ringer;
use super::lanes::Lanes;
use super::mover::Parcels;
use super::route::{Move, RELAY_LANES, RESULT_AT, Route, Share};
use super::tracks::{Step, Sum, Tracks};
use super::{Combine, RelayPlan};
use crate::cuda::local::Operand;
use crate::engine::direct::Mark;
use crate::error::Result;
use crate::reduce::Representation;

/// What a call runs in.
pub(super) struct Run {
    pub(super) lanes: Arc<Lanes>,
    pub(super) ringer: Ringer,
    pub(super) tracks: Tracks,
    /// Pieces of all calls before this one.
    pub(super) before: u64,
    pub(super) progress: Progress,
    /// Whether all has been given to the device, and nothing of other ranks is needed any more. The pieces of
    /// the next call begin behind this one's then.
    pub(super) exchanged: bool,
    /// What is on its way to other ranks.
    pub(super) parcels: Parcels,
}

/// Pieces of the call that have come so far. None of them overtakes the one above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// This rank's contribution is on its way to its lane,
    pub(super) begun: u64,
    /// and there.
    pub(super) given: u64,
    /// What this rank does with the others' contributions has been given to the device,
    pub(super) worked: u64,
    /// and done.
    pub(super) folded: u64,
    /// The others' shares of the result are on their way,
    pub(super) taken: u64,
    /// and here.
    pub(super) done: u64,
}

/// A call, as its pieces need it.
pub(super) struct Relayed<'a> {
    pub(super) plan: &'a RelayPlan,
    pub(super) scales: &'a [f64],
    pub(super) input: u64,
    pub(super) output: u64,
}

impl Relayed<'_> {
    /// Moves every piece on by a step, where it can. The member that the last of the pieces waits for, if
    /// any, and how far it is to come.
    pub(super) fn advance(&self, run: &mut Run) -> Result<Option<(usize, Mark)>> {
        let RelayPlan { route, .. } = self.plan;
        let before = run.before;
        let mut stops = None;
        // In the order of all calls' pieces: the last one of the call before may not have been told yet.
        let is_told = |piece: u64| piece == 0 || run.lanes.has_come(route.rank(), Mark::Done, piece - 1);
        let may_tell = is_told(before + run.progress.done);
        while may_tell && run.progress.done < run.progress.taken && run.tracks.is_idle(run.progress.done)? {
            run.progress.done += 1;
            run.reach(route, Mark::Done, run.progress.done);
        }
        // First of all: others wait for it.
        while run.progress.given < run.progress.begun && run.tracks.is_idle(run.progress.given)? {
            run.progress.given += 1;
            run.reach(route, Mark::Given, run.progress.given);
        }
        while run.progress.taken < run.progress.folded {
            let piece = run.progress.taken;
            let lacks = |member: &usize| !run.lanes.has_come(*member, Mark::Folded, before + piece);
            if let Some(member) = route.sharers().find(lacks) {
                stops = stops.or(Some((member, Mark::Folded)));
                break;
            }
            if route.reduces() {
                self.take(run, piece)?;
            }
            run.progress.taken += 1;
        }
        while run.progress.folded < run.progress.worked && run.tracks.is_idle(run.progress.folded)? {
            run.progress.folded += 1;
            if route.reduces() {
                run.reach(route, Mark::Folded, run.progress.folded);
            }
        }
        while run.progress.worked < run.progress.given {
            let piece = run.progress.worked;
            let lacks = |member: &usize| !run.lanes.has_come(*member, Mark::Given, before + piece);
            if let Some(member) = route.contributors().find(lacks) {
                stops = stops.or(Some((member, Mark::Given)));
                break;
            }
            self.work(run, piece)?;
            run.progress.worked += 1;
        }
        Ok(stops.or(self.begin(run)?))
    }

    /// Begins to give the next piece, if there is a lane for it: one at a time, since what was given before
    /// it may have come to its lane when the driver has been told. The member whose lane is not free, if that
    /// is why not.
    pub(super) fn begin(&self, run: &mut Run) -> Result<Option<(usize, Mark)>> {
        let RelayPlan { route, .. } = self.plan;
        let (before, piece, tracks) = (run.before, run.progress.begun, run.tracks.len());
        if piece == route.pieces() || piece == run.progress.done + tracks {
            return Ok(None);
        }
        let reads = |member: &usize| !run.lanes.has_lane(*member, before + piece);
        if let Some(member) = (0..route.size()).find(reads) {
            return Ok((member != route.rank()).then_some((member, Mark::Done)));
        }
        self.give(run, piece)?;
        run.progress.begun += 1;
        Ok(None)
    }

    /// From this rank's memory to its lane.
    fn give(&self, run: &mut Run, piece: u64) -> Result<()> {
        let moves = self.plan.route.given(piece);
        let lane = run.lane(self.plan.route.rank(), piece).expose_provenance() as u64;
        for Move { from, to, bytes } in &moves {
            // SAFETY: the caller's input holds every piece; the lane is this rank's, holds what a route says,
            // and nobody reads it, as the marks of the others have said.
            unsafe {
                self.copy(run, (piece, Step::Give), lane + *to as u64, self.input + *from as u64, *bytes)
            }?;
        }
        run.given(piece, Step::Give, !moves.is_empty())
    }

    /// What this rank does with the others' contributions.
    fn work(&self, run: &mut Run, piece: u64) -> Result<()> {
        let RelayPlan { route, combine, .. } = self.plan;
        if let (Some(combine), Some(share)) = (combine, route.share(piece)) {
            self.fold(run, piece, combine, share)?;
            return run.given(piece, Step::Work, true);
        }
        if route.reduces() {
            return Ok(());
        }
        if let Some(Move { from, to, bytes }) = route.kept(piece) {
            let (to, from) = (self.output + to as u64, self.input + from as u64);
            // SAFETY: both sides are the caller's, hold every piece, and are apart, or the call would be in
            // place.
            unsafe { self.copy(run, (piece, Step::Take), to, from, bytes) }?;
            run.given(piece, Step::Take, true)?;
        }
        self.take(run, piece)
    }

    /// Combines this rank's share.
    fn fold(&self, run: &mut Run, piece: u64, combine: &Combine, share: Share) -> Result<()> {
        let RelayPlan { route, .. } = self.plan;
        let operands: Vec<Operand> = (0..route.size())
            .map(|member| Operand {
                address: match member == route.rank() {
                    true => self.input + share.own as u64,
                    false => run.lane(member, piece).expose_provenance() as u64 + share.lane as u64,
                },
                representation: Representation::Element,
                scale: self.scales[member],
            })
            .collect();
        let result = run.lane(route.rank(), piece).wrapping_add(RESULT_AT).expose_provenance() as u64;
        let out = match share.output {
            Some(at) => self.output + at as u64,
            None => result,
        };
        let sum = Sum { combine, operands: &operands, out, count: share.count };
        // SAFETY: the others have marked their contributions, which stay in their lanes until this rank is
        // done with the piece; pinned memory is reached at its own address. The output is the caller's or
        // this rank's lane; in place it is the operand of the same place.
        unsafe { run.tracks.combine(&*self.plan.kernels, piece, &sum) }?;
        if share.output.is_some() && share.shared {
            let bytes = share.count * route.element();
            // SAFETY: as above, and behind the fold.
            unsafe { self.copy(run, (piece, Step::Work), result, out, bytes) }?;
        }
        Ok(())
    }

    /// From the others' lanes to this rank's memory.
    fn take(&self, run: &mut Run, piece: u64) -> Result<()> {
        let moves = self.plan.route.taken(piece);
        for (member, Move { from, to, bytes }) in &moves {
            let lane = run.lane(*member, piece).wrapping_add(*from).expose_provenance() as u64;
            // SAFETY: the member has marked what is read, which stays there until this rank is done with the
            // piece; the caller's output holds every piece.
            unsafe { self.copy(run, (piece, Step::Take), self.output + *to as u64, lane, *bytes) }?;
        }
        run.given(piece, Step::Take, !moves.is_empty())
    }

    /// # Safety
    /// As [`Tracks::copy`].
    unsafe fn copy(&self, run: &mut Run, what: (u64, Step), to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise; who relays has prepared the kernels.
        unsafe { run.tracks.copy(&*self.plan.kernels, what, to, from, bytes) }
    }
}

impl Run {
    /// The members to which something is still to be written before the call may end, here and in the
    /// process, once the rest is done: what it has sent, and that lanes are free which others need to end the
    /// call. For the last pieces, one a lane, that is for later calls to wait for.
    pub(super) fn unwritten(&self, route: &Route) -> Vec<usize> {
        let mut members: Vec<usize> = self.parcels.unwritten().collect();
        if self.progress.done == route.pieces() {
            members.extend(self.lanes.untold((self.before + route.pieces()).saturating_sub(RELAY_LANES)));
            members.sort_unstable();
            members.dedup();
        }
        members
    }

    /// This rank has come so far with so many pieces of the call, the first ones.
    fn reach(&self, route: &Route, mark: Mark, pieces: u64) {
        self.lanes.reach(route, mark, self.before, pieces, &self.parcels);
    }

    fn lane(&self, member: usize, piece: u64) -> *mut u8 {
        self.lanes.address(member, self.before + piece)
    }

    /// A step of a piece has been given to its stream, if there was something to do.
    fn given(&mut self, piece: u64, step: Step, any: bool) -> Result<()> {
        if any { self.tracks.given(piece, step) } else { Ok(()) }
    }
}
