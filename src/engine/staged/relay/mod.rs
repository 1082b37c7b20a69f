//! Calls on device memory between ranks of one host whose devices do not reach each other: the devices do the work.
//!
//! Every member has *lanes* in its segment, which all members have mapped and pinned ([`lanes`]). A piece goes from the
//! device into its owner's lane, and from there straight to the devices of the others; where the ranks combine, each
//! device combines its share, reading the others' lanes in place, and gives the result through its own lane. Nothing is
//! copied by a processor, and nobody reads or writes another's private memory.
//!
//! What happens to a piece: its owner *gives* it; *works* on it, when those that it needs something of have given; and,
//! where shares were combined, *takes* the others' shares when those have been folded. A track, a stream of its own, does all
//! steps of a piece; the host gives it a step when it has seen the step before end, and says on the board how far it
//! has come ([`Mark`]). Steps are short, so whoever moves the call looks for their ends. What is under way when it goes to
//! sleep counts as given just now: naps are short then. A lane is used again when everybody is done with the piece that it held, so a rank that has ended
//! a call need not wait until the others have read what it gave.
//!
//! The ranks compare their calls before anything is written, on the board of the direct exchange, of which such a call
//! is one. There each also says whether it can relay the call; if one cannot, and also if the lanes could not be made,
//! all go the ordinary way ([`Staged`]).
//!
//! A call that is given up enqueues the release of the exit behind the steps under way. What others still read of this
//! rank's lanes harms nobody.

mod lanes;
mod route;
mod tracks;

use std::sync::Arc;
use std::task::Poll;

pub use lanes::Seat;
use lanes::{Agreement, Lanes, Outcome};
use route::{LANES, Move, RESULT_AT, Share};
pub use route::{Limits, Route};
use tracks::Track;

use super::resources::Ringer;
use super::{COPIES, Place, Staged, StreamOrder};
use crate::cuda::event::Event;
use crate::cuda::local::{Fold, Kernels, Operand};
use crate::deadline::Deadline;
use crate::engine::direct::{Direct, Mark, Watch};
use crate::engine::endpoint::Through;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::{Completion, Operation};
use crate::engine::wire::Key;
use crate::error::Result;
use crate::reduce::{DataType, Operator, Representation};
use crate::signature::Signature;
use crate::sys;

/// How the ranks' contributions are combined.
#[derive(Clone, Debug)]
pub struct Combine {
    /// What combines on the devices.
    pub kernels: Arc<dyn Kernels>,
    /// Type of the elements.
    pub dtype: DataType,
    /// With this rank's own scalar, if it has one.
    pub operator: Operator,
}

/// What a call needs to be relayed.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The members' boards.
    pub direct: Arc<Direct>,
    /// What each rank does.
    pub route: Route,
    /// Set when the operation reduces.
    pub combine: Option<Combine>,
}

impl Plan {
    /// Whether this rank can combine on `order`'s device.
    fn can_combine(&self, order: &StreamOrder) -> bool {
        let Some(Combine { kernels, dtype, operator }) = &self.combine else { return true };
        if kernels.most_operands() < self.route.size() {
            return false;
        }
        match kernels.prepare(&order.devices, order.device, *dtype, *operator) {
            Ok(()) => true,
            Err(error) => {
                log::debug!("a call is not relayed: {error}");
                false
            }
        }
    }

    /// This rank's scalar.
    fn scale(&self) -> f64 {
        match &self.combine {
            Some(Combine { operator: Operator::PreMulSum(scale), .. }) => *scale,
            _ => 1.0,
        }
    }
}

/// What a rank says of a call: it can relay it.
const CAN: u64 = 1;

/// One call under way.
pub struct Relay {
    /// The call's memory and order, and the ordinary way.
    staged: Staged,
    plan: Plan,
    key: Key,
    signature: Signature,
    /// Its number among the direct calls; 0 until its turn has come.
    call: u64,
    stage: Stage,
    watch: Watch,
    /// Of each rank.
    scales: Vec<f64>,
    running: Option<Run>,
}

/// How far a call has come here.
enum Stage {
    /// Waiting until the post of two calls ago is no more needed.
    Enter,
    /// Posted; waiting for everybody's post.
    Arrive,
    /// The first call of a group: waiting for the lanes.
    Agree(Agreement),
    /// Pieces go through the lanes.
    Relay,
    /// Not relayed.
    Ordinary,
}

/// What a call runs in.
struct Run {
    lanes: Arc<Lanes>,
    ringer: Arc<Ringer>,
    tracks: Vec<Track>,
    /// Pieces of all calls before this one.
    before: u64,
    progress: Progress,
}

/// Pieces of the call that have come so far. None of them overtakes the one above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    /// This rank's contribution is on its way to its lane,
    begun: u64,
    /// and there.
    given: u64,
    /// What this rank does with the others' contributions has been given to the device,
    worked: u64,
    /// and done.
    folded: u64,
    /// The others' shares of the result are on their way,
    taken: u64,
    /// and here.
    done: u64,
}

/// What a call waits for.
enum Waits {
    /// Nothing: it has ended.
    Ended,
    /// This member.
    Member(usize),
    /// Its own device.
    Device,
}

impl Relay {
    /// The call of `turn`, which is exchanged as `plan` says, or as `staged`.
    pub fn new(group: &Group, turn: &Turn, staged: Staged, plan: Plan) -> Relay {
        Relay {
            staged,
            plan,
            key: turn.key(group),
            signature: turn.signature,
            call: 0,
            stage: Stage::Enter,
            watch: Watch::default(),
            scales: Vec::new(),
            running: None,
        }
    }

    /// Bytes that this rank contributes: what the posts compare.
    fn contribution(&self) -> u64 {
        self.staged.job.input.shape.bytes as u64
    }

    fn post(&self) {
        let job = &self.staged.job;
        let on_device = |side: &super::Side| side.shape.bytes == 0 || matches!(side.place, Place::Device(_));
        let can = on_device(&job.input) && on_device(&job.output) && self.plan.can_combine(&job.order);
        let words = [self.plan.scale().to_bits(), if can { CAN } else { 0 }];
        self.plan.direct.enter(self.call, &self.signature, words, self.contribution());
    }

    /// Moves on as far as it can.
    fn step(&mut self, group: &Group) -> Result<Waits> {
        loop {
            let direct = &self.plan.direct;
            match std::mem::replace(&mut self.stage, Stage::Enter) {
                Stage::Enter => {
                    if self.call == 0 {
                        self.call = direct.next_call();
                    }
                    if let Some(member) = direct.absent(self.call - 1) {
                        return Ok(Waits::Member(member));
                    }
                    self.post();
                    self.stage = Stage::Arrive;
                }
                Stage::Arrive => {
                    if let Some(member) = direct.absent(self.call) {
                        self.stage = Stage::Arrive;
                        return Ok(Waits::Member(member));
                    }
                    let size = direct.size();
                    for member in 0..size {
                        let own = self.contribution();
                        direct.compare(group, member, self.call, self.key, &self.signature, own)?;
                    }
                    let words: Vec<_> = (0..size).map(|member| direct.words(member, self.call)).collect();
                    self.scales = words.iter().map(|&[scale, _]| f64::from_bits(scale)).collect();
                    let all_can = words.iter().all(|&[_, can]| can == CAN);
                    let StreamOrder { devices, device, .. } = &self.staged.job.order;
                    self.stage = match group.relay().lanes() {
                        _ if !all_can => Stage::Ordinary,
                        Some(None) => Stage::Ordinary,
                        Some(Some(_)) => Stage::Relay,
                        None => Stage::Agree(Agreement::begin(group, direct, devices, *device)),
                    };
                }
                Stage::Agree(agreement) => {
                    let StreamOrder { devices, device, .. } = &self.staged.job.order;
                    match agreement.advance(group, direct, devices, *device) {
                        Outcome::Waits(member, agreement) => {
                            self.stage = Stage::Agree(agreement);
                            return Ok(Waits::Member(member));
                        }
                        Outcome::Agreed => {
                            let has_lanes = group.relay().lanes().is_some_and(Option::is_some);
                            self.stage = if has_lanes { Stage::Relay } else { Stage::Ordinary };
                        }
                    }
                }
                Stage::Relay => {
                    self.stage = Stage::Relay;
                    return self.relay(group);
                }
                Stage::Ordinary => {
                    self.stage = Stage::Ordinary;
                    let ended = self.staged.step(group)?;
                    return Ok(if ended { Waits::Ended } else { Waits::Device });
                }
            }
        }
    }

    fn relay(&mut self, group: &Group) -> Result<Waits> {
        if !self.staged.has_entered()? {
            return Ok(Waits::Device);
        }
        if self.running.is_none() {
            self.set_out(group)?;
        }
        let Relay { staged, plan, scales, running, .. } = self;
        // PROOF: it has set out.
        let run = running.as_mut().expect("set out");
        let StreamOrder { device, exit, .. } = &staged.job.order;
        let [input, output] = [staged.job.input.place, staged.job.output.place].map(|place| match place {
            Place::Device(address) => address,
            // PROOF: nothing lies there, or the call would not be relayed.
            Place::Host(_) => 0,
        });
        let call = Relayed { plan, scales, input, output, device: *device };
        loop {
            let earlier = run.progress;
            let stops = call.advance(run)?;
            if run.progress != earlier {
                group.endpoint().stir();
            }
            if run.progress.done == plan.route.pieces() {
                if let Some(exit) = exit {
                    exit.release();
                }
                group.relay().add_pieces(run.progress.done);
                tracks::give_back(std::mem::take(&mut run.tracks));
                self.running = None;
                return Ok(Waits::Ended);
            }
            if run.progress == earlier {
                if group.endpoint().is_parking() {
                    run.tracks.iter_mut().try_for_each(|track| track.ring(&run.ringer))?;
                }
                return Ok(stops.map_or(Waits::Device, Waits::Member));
            }
        }
    }

    /// Takes what the call runs in.
    fn set_out(&mut self, group: &Group) -> Result<()> {
        let StreamOrder { devices, device, .. } = &self.staged.job.order;
        // PROOF: the stage says that there are lanes.
        let lanes = group.relay().lanes().and_then(Option::as_ref).expect("lanes").clone();
        let tracks = self.plan.route.pieces().min(LANES);
        self.running = Some(Run {
            lanes,
            ringer: Ringer::new(group.endpoint()),
            tracks: (0..tracks).map(|_| Track::take(devices, *device)).collect::<Result<_>>()?,
            before: group.relay().pieces(),
            progress: Progress::default(),
        });
        Ok(())
    }

    /// Lets go of what the call ran in, when streams may still use it.
    fn leave(&mut self) {
        let StreamOrder { devices, device, exit, .. } = &self.staged.job.order;
        let running = self.running.take();
        let Some((mut tracks, last, lanes)) = running.and_then(|Run { lanes, mut tracks, .. }| {
            let last = tracks.pop()?;
            Some((tracks, last, lanes))
        }) else {
            if let Some(exit) = exit {
                exit.release();
            }
            return;
        };
        let behind = || -> Result<Event> {
            let tail = Event::new(devices, *device)?;
            tracks.iter().try_for_each(|track| track.precede(&last))?;
            if let Some(exit) = exit {
                last.stream.release_word(exit)?;
            }
            tail.record(&last.stream)?;
            Ok(tail)
        };
        let tail = behind();
        tracks.push(last);
        match tail {
            Ok(tail) => {
                let until = Deadline::after(COPIES);
                while exit.is_none() && matches!(tail.query(), Ok(false)) && !until.expired() {
                    sys::process::yield_now();
                }
                tracks::park(tail, tracks, lanes);
            }
            Err(error) => {
                // The device does nothing any more that could be waited for.
                log::warn!("a call that failed leaves its streams behind: {error}");
                if let Some(exit) = exit {
                    exit.release();
                }
                std::mem::forget((tracks, lanes));
            }
        }
    }

    /// Whether `member` has done what this rank waits for.
    fn is_there(&self, member: usize) -> bool {
        let direct = &self.plan.direct;
        match (&self.stage, &self.running) {
            (Stage::Enter, _) => {
                direct.absent(self.call.saturating_sub(1)).is_none_or(|first| member < first)
            }
            (Stage::Arrive, _) => direct.absent(self.call).is_none_or(|first| member < first),
            (Stage::Agree(Agreement::Offered(_)), _) => direct.offered(member) != 0,
            (Stage::Agree(Agreement::Voted(_)), _) => direct.voted(member) != 0,
            (Stage::Relay, Some(Run { before, progress, .. })) => {
                let route = &self.plan.route;
                let has = |mark, piece: u64| direct.reached(member, mark) > before + piece;
                let gives = route.contributors().any(|from| from == member);
                let shares = route.sharers().any(|from| from == member);
                (!gives || progress.worked == progress.given || has(Mark::Given, progress.worked))
                    && (!shares || progress.taken == progress.folded || has(Mark::Folded, progress.taken))
                    && (progress.begun == route.pieces()
                        || direct.reached(member, Mark::Done) + LANES > before + progress.begun)
            }
            _ => true,
        }
    }
}

/// A call, as its pieces need it.
struct Relayed<'a> {
    plan: &'a Plan,
    scales: &'a [f64],
    input: u64,
    output: u64,
    device: u32,
}

impl Relayed<'_> {
    /// Moves every piece on by a step, where it can. The member that the last of the pieces waits for, if any.
    fn advance(&self, run: &mut Run) -> Result<Option<usize>> {
        let Plan { direct, route, .. } = self.plan;
        let (before, pieces, tracks) = (run.before, route.pieces(), run.tracks.len() as u64);
        let mut stops = None;
        while run.progress.done < run.progress.taken && run.is_idle(run.progress.done)? {
            run.progress.done += 1;
            direct.reach(Mark::Done, before + run.progress.done);
        }
        while run.progress.taken < run.progress.folded {
            let piece = run.progress.taken;
            let lacks = |member: &usize| direct.reached(*member, Mark::Folded) <= before + piece;
            if let Some(member) = route.sharers().find(lacks) {
                stops = stops.or(Some(member));
                break;
            }
            if route.reduces() {
                self.take(run, piece)?;
            }
            run.progress.taken += 1;
        }
        while run.progress.folded < run.progress.worked && run.is_idle(run.progress.folded)? {
            run.progress.folded += 1;
            if route.reduces() {
                direct.reach(Mark::Folded, before + run.progress.folded);
            }
        }
        while run.progress.worked < run.progress.given {
            let piece = run.progress.worked;
            let lacks = |member: &usize| direct.reached(*member, Mark::Given) <= before + piece;
            if let Some(member) = route.contributors().find(lacks) {
                stops = stops.or(Some(member));
                break;
            }
            self.work(run, piece)?;
            run.progress.worked += 1;
        }
        while run.progress.given < run.progress.begun && run.is_idle(run.progress.given)? {
            run.progress.given += 1;
            direct.reach(Mark::Given, before + run.progress.given);
        }
        while run.progress.begun < pieces && run.progress.begun < run.progress.done + tracks {
            let piece = run.progress.begun;
            let reads = |member: &usize| direct.reached(*member, Mark::Done) + LANES <= before + piece;
            if let Some(member) = (0..route.size()).find(reads) {
                stops = stops.or(Some(member));
                break;
            }
            self.give(run, piece)?;
            run.progress.begun += 1;
        }
        Ok(stops)
    }

    /// From this rank's memory to its lane.
    fn give(&self, run: &mut Run, piece: u64) -> Result<()> {
        let moves = self.plan.route.given(piece);
        let lane = run.lane(self.plan.route.rank(), piece);
        let track = run.track(piece);
        for Move { from, to, bytes } in &moves {
            // SAFETY: the caller's input holds every piece; the lane is this rank's, holds what a route says, and nobody reads
            // it, as the marks of the others have said.
            unsafe { track.stream.copy_to_host(lane.wrapping_add(*to), self.input + *from as u64, *bytes) }?;
        }
        run.given(piece, !moves.is_empty())
    }

    /// What this rank does with the others' contributions.
    fn work(&self, run: &mut Run, piece: u64) -> Result<()> {
        let Plan { route, combine, .. } = self.plan;
        if let (Some(combine), Some(share)) = (combine, route.share(piece)) {
            self.fold(run, piece, combine, share)?;
            return run.given(piece, true);
        }
        if route.reduces() {
            return Ok(());
        }
        if let Some(Move { from, to, bytes }) = route.kept(piece) {
            let (to, from) = (self.output + to as u64, self.input + from as u64);
            // SAFETY: both sides are the caller's, hold every piece, and are apart, or the call would be in place.
            unsafe { run.track(piece).stream.copy_to_peer(to, self.device, from, bytes) }?;
            run.given(piece, true)?;
        }
        self.take(run, piece)
    }

    /// Combines this rank's share.
    fn fold(&self, run: &mut Run, piece: u64, combine: &Combine, share: Share) -> Result<()> {
        let Plan { route, .. } = self.plan;
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
        let result = run.lane(route.rank(), piece).wrapping_add(RESULT_AT);
        let stream = &run.track(piece).stream;
        let out = match share.output {
            Some(at) => self.output + at as u64,
            None => result.expose_provenance() as u64,
        };
        let fold = Fold {
            stream,
            dtype: combine.dtype,
            operator: combine.operator,
            ranks: route.size() as u32,
            operands: &operands,
            out,
            representation: Representation::Element,
            count: share.count,
        };
        let entered = stream.devices().enter(self.device)?;
        // SAFETY: the others have marked their contributions, which stay in their lanes until this rank is done with the
        // piece; pinned memory is reached at its own address. The output is the caller's or this rank's lane; in place it is the
        // operand of the same place.
        unsafe { combine.kernels.fold(stream.devices(), &fold) }?;
        drop(entered);
        if share.output.is_some() && share.shared {
            let bytes = share.count * route.element();
            // SAFETY: as above, and behind the fold.
            unsafe { stream.copy_to_host(result, out, bytes) }?;
        }
        Ok(())
    }

    /// From the others' lanes to this rank's memory.
    fn take(&self, run: &mut Run, piece: u64) -> Result<()> {
        let moves = self.plan.route.taken(piece);
        for (member, Move { from, to, bytes }) in &moves {
            let lane = run.lane(*member, piece).wrapping_add(*from).cast_const();
            // SAFETY: the member has marked what is read, which stays there until this rank is done with the piece; the
            // caller's output holds every piece.
            unsafe { run.track(piece).stream.copy_to_device(self.output + *to as u64, lane, *bytes) }?;
        }
        run.given(piece, !moves.is_empty())
    }
}

impl Run {
    fn track(&self, piece: u64) -> &Track {
        &self.tracks[(piece % self.tracks.len() as u64) as usize]
    }

    fn lane(&self, member: usize, piece: u64) -> *mut u8 {
        self.lanes.address(member, self.before + piece)
    }

    /// A step of a piece has been given to its track, if there was something to do.
    fn given(&mut self, piece: u64, any: bool) -> Result<()> {
        if any {
            let index = (piece % self.tracks.len() as u64) as usize;
            self.tracks[index].given()?;
        }
        Ok(())
    }

    fn is_idle(&mut self, piece: u64) -> Result<bool> {
        let index = (piece % self.tracks.len() as u64) as usize;
        self.tracks[index].is_idle()
    }
}

impl Operation for Relay {
    fn advance(&mut self, group: &Group) -> Poll<Result<Completion>> {
        if let Stage::Ordinary = self.stage {
            return self.staged.advance(group);
        }
        let waits = match self.step(group) {
            // From here on it is an ordinary call.
            Ok(_) if matches!(self.stage, Stage::Ordinary) => return self.staged.advance(group),
            Ok(waits) => waits,
            Err(error) => return Poll::Ready(Err(error)),
        };
        match waits {
            Waits::Ended => Poll::Ready(Ok(Completion::default())),
            Waits::Device => Poll::Pending,
            Waits::Member(member) => match self.watch.look(group, member) {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(Err(error)),
            },
        }
    }

    fn abandon(&mut self, group: &Group) {
        match self.stage {
            Stage::Ordinary => self.staged.abandon(group),
            _ => self.leave(),
        }
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        if let Stage::Ordinary = self.stage {
            return self.staged.waits_for(group);
        }
        (0..self.plan.route.size())
            .filter(|&member| !self.is_there(member))
            .map(|member| member as u32)
            .collect()
    }

    fn through(&self) -> Through {
        Through::Device
    }
}
