//! Long calls on device memory between ranks whose devices do not reach each other: the devices do the work.
//!
//! A piece goes from the device into its owner's *lane*, and from lanes to the devices of the others; where
//! the ranks combine, each device combines its share, reading the others' lanes in place, and gives the
//! result through its own lane. Lanes are pinned. Ranks that share memory have all mapped all lanes
//! ([`shared`]): nothing is copied by a processor. Others have copies of the others' lanes, which connections
//! of their own fill ([`wired`], [`mover`]).
//!
//! What happens to a piece ([`pieces`]): its owner *gives* it; *works* on it, when those that it needs
//! something of have given; and, where shares were combined, *takes* the others' shares when those have been
//! folded. Each of these has a stream, or a desk of a courier, on which pieces follow each other; the host
//! gives it a step when it has seen the step before end, and tells how far it has come ([`Mark`]). Steps are
//! short, so whoever moves the call looks for their ends. What is under way when it goes to sleep counts as
//! given just now: naps are short then. A lane is used again when everybody is done with the piece that it
//! held, so a rank that has ended a call need not wait until the others have read what it gave.
//!
//! When all of a call has been given to its courier and no other rank is needed, the next one has its turn:
//! it meets, and gives, while this one stores and its parcels go. So two may be under way; a lane is free
//! when its last piece is done here, too.
//!
//! The ranks compare their calls before anything is written but their own lanes ([`meeting`]). There each
//! also says whether it can relay the call; if one cannot, and as long as not all have their lanes, which are
//! made beside the first calls ([`making`]), all go the ordinary way ([`Staged`]).
//!
//! A call that is given up dismisses its courier, or enqueues the release of the exit, behind the steps under
//! way. What others still read of this rank's lanes harms nobody.

mod lanes;
mod making;
mod meeting;
mod mover;
mod pieces;
mod queued;
mod route;
mod shared;
mod tracks;
mod wired;

use std::sync::Arc;
use std::task::Poll;

pub use lanes::{Crew, Seat};
pub use meeting::{Gather, Place as MeetingPlace};
use meeting::{Meeting, Met, Say};
use mover::Parcels;
use pieces::{Progress, Relayed, Run};
use route::RELAY_LANES;
pub use route::{Limits, Route};
use tracks::Tracks;
pub(super) use tracks::prepare;
#[cfg(test)]
pub use wired::Held;
pub use wired::MAX_WIRED;

use super::resources::Ringer;
use super::{COPY, Job, Place, Side, Staged, StreamOrder};
use crate::cuda::courier::{self, Combiner};
use crate::cuda::local::Kernels;
use crate::cuda::word;
use crate::engine::direct::{Mark, Watch};
use crate::engine::endpoint::Through;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::{Completion, Exits, Operation};
use crate::error::Result;
use crate::reduce::{DataType, Operator};

/// How the ranks' contributions are combined.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// Type of the elements.
    pub dtype: DataType,
    /// With this rank's own scalar, if it has one.
    pub operator: Operator,
}

/// What a call needs to be relayed.
pub struct RelayPlan {
    /// What the ranks that relay it keep. Their calls run one after the other, each from when the one before
    /// has exchanged.
    pub seat: Arc<Seat>,
    /// Where the ranks meet.
    pub place: MeetingPlace,
    /// What each rank does.
    pub route: Route,
    /// What copies and combines on the devices.
    pub kernels: Arc<dyn Kernels>,
    /// Set when the operation reduces.
    pub combine: Option<Combine>,
}

impl RelayPlan {
    /// Whether this rank can copy and combine on `order`'s device.
    fn can_run(&self, order: &StreamOrder) -> bool {
        if order.copier.is_none() && order.errand.is_none() {
            // Not even those that copy could be loaded, and all are loaded at once. Trying again would take
            // as long as it did.
            return false;
        }
        let (dtype, operator) = self.combine.map_or(COPY, |combine| (combine.dtype, combine.operator));
        if self.combine.is_some() && self.kernels.most_operands() < self.route.size() {
            return false;
        }
        match self.kernels.prepare(&order.devices, order.device, dtype, operator) {
            Ok(()) => true,
            Err(error) => {
                log::debug!("a call is not relayed: {error}");
                false
            }
        }
    }

    /// Whether the courier, if there is one, can combine what there is to combine.
    fn courier_combines(&self, job: &Job) -> bool {
        let (Some(combine), Some(errand)) = (&self.combine, &job.order.errand) else { return true };
        let combiner = self.kernels.combiner(combine.dtype, combine.operator);
        let aligned = |side: &Side| match side.place {
            Place::Device(address) => address % combine.dtype.size() as u64 == 0,
            Place::Host(_) => true,
        };
        combiner.is_some_and(|combiner| errand.courier().combines_by(combiner))
            && self.route.size() <= courier::MAX_OPERANDS
            && aligned(&job.input)
            && aligned(&job.output)
    }

    /// What a courier has to be able to do besides carrying.
    pub fn combiner(&self) -> Option<Combiner> {
        let Combine { dtype, operator } = self.combine.as_ref()?;
        self.kernels.combiner(*dtype, *operator)
    }

    /// Whether its ranks have their lanes.
    pub fn has_lanes(&self) -> bool {
        self.seat.agreed().is_some()
    }

    /// This rank's scalar.
    fn scale(&self) -> f64 {
        match &self.combine {
            Some(Combine { operator: Operator::PreMulSum(scale), .. }) => *scale,
            _ => 1.0,
        }
    }
}

/// One call under way.
pub struct Relay {
    /// The call's memory and order, and the ordinary way.
    staged: Staged,
    plan: RelayPlan,
    stage: Stage,
    watch: Watch,
    running: Option<Run>,
    /// Whether this rank can relay the call.
    can: bool,
}

/// How far a call has come here.
enum Stage {
    /// The ranks compare it, and see whether they can relay it.
    Meet(Meeting),
    /// Pieces go through the lanes. Everybody's scalars.
    Relay(Vec<f64>),
    /// Not relayed, but pieces are still on their way to the lanes.
    Part,
    /// Not relayed.
    Ordinary,
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
    /// A call, which is exchanged as `plan` says, or as `staged`. Whether it is the `first` that its stream
    /// waits for. May wait for the driver, as [`Staged::provided`].
    pub fn new(
        mut staged: Staged,
        plan: RelayPlan,
        first: bool,
        streams_wait: &dyn Fn() -> bool,
    ) -> Result<Relay> {
        let job = &staged.job;
        let on_device = |side: &Side| side.shape.bytes == 0 || matches!(side.place, Place::Device(_));
        let can = on_device(&job.input)
            && on_device(&job.output)
            && plan.courier_combines(job)
            && plan.can_run(&job.order);
        let likely = can && plan.has_lanes();
        let lanes = if first && !likely { staged.most_lanes() } else { 0 };
        staged.provide(lanes, streams_wait)?;
        let job = &staged.job;
        let say = Say { scale: plan.scale(), can, bytes: job.input.shape.bytes as u64 };
        let stage = Stage::Meet(Meeting::new(plan.seat.clone(), plan.place.clone(), say));
        Ok(Relay { staged, plan, stage, watch: Watch::default(), running: None, can })
    }

    /// What a stream waits for until it has ended.
    pub fn exit(&self) -> Option<&Arc<word::Word>> {
        self.staged.exit()
    }

    /// Whether no more of it comes to the lanes: the next call of the crew may go on, if the caller sees to
    /// the order on the stream.
    pub fn leaves_lanes(&self) -> bool {
        matches!(self.stage, Stage::Ordinary) || self.has_exchanged()
    }

    /// It is the call of `turn`.
    pub fn at(self, turn: &Turn) -> Relay {
        Relay { staged: self.staged.at(turn), ..self }
    }

    /// Moves on as far as it can.
    fn step(&mut self, group: &Group) -> Result<Waits> {
        loop {
            match &mut self.stage {
                Stage::Meet(meeting) => {
                    let waits = match meeting.advance(group, self.staged.turn()?, &self.staged.job.order)? {
                        Met::Awaits(member) => Waits::Member(member),
                        Met::Pending => Waits::Device,
                        Met::Relays(scales) => {
                            self.staged.waive();
                            self.stage = Stage::Relay(scales);
                            continue;
                        }
                        Met::Parts => {
                            self.stage = Stage::Part;
                            continue;
                        }
                    };
                    self.give_early(group)?;
                    return Ok(waits);
                }
                Stage::Part => {
                    if let Some(run) = &mut self.running {
                        let moved = run.tracks.move_on(&*self.plan.kernels)?;
                        if !run.tracks.are_idle()? {
                            if moved {
                                group.endpoint().stir();
                            }
                            return Ok(Waits::Device);
                        }
                    }
                    if let Some(run) = self.running.take() {
                        run.tracks.give_back(&mut self.staged.job.order);
                    }
                    self.stage = Stage::Ordinary;
                }
                Stage::Relay(_) => return self.relay(group),
                Stage::Ordinary => {
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
        let Relay { staged, plan, stage, running, watch, .. } = self;
        let Stage::Relay(scales) = stage else { return Ok(Waits::Device) };
        // PROOF: it has set out.
        let run = running.as_mut().expect("set out");
        let call = relayed(staged, plan, scales);
        loop {
            let earlier = run.progress;
            let moved = run.tracks.move_on(&*plan.kernels)?;
            let stops = call.advance(run)?;
            if moved || run.progress != earlier {
                group.endpoint().stir();
            }
            let last = if plan.route.reduces() { run.progress.taken } else { run.progress.worked };
            if last == plan.route.pieces() && !run.exchanged {
                run.exchanged = true;
                run.tracks.let_go();
                plan.seat.add_pieces(last);
            }
            let is_done = run.progress.done == plan.route.pieces();
            if is_done && run.parcels.are_written() && run.unwritten(&plan.route).is_empty() {
                if let Some(run) = running.take() {
                    run.tracks.give_back(&mut staged.job.order);
                }
                staged.job.order.release();
                return Ok(Waits::Ended);
            }
            if run.progress == earlier {
                let stops = stops.map(|(member, mark)| (member, Some(mark)));
                let unread = || run.unwritten(&plan.route).first().map(|member| (*member, None));
                if let Some(awaited) = stops.or_else(unread) {
                    run.lanes.check(group, watch, awaited)?;
                }
                if group.endpoint().is_parking() {
                    run.tracks.ring(&run.ringer)?;
                }
                return Ok(Waits::Device);
            }
        }
    }

    /// Begins to give before the ranks have met: what is in a lane is nobody's business before that. It costs
    /// as long as they take to meet.
    fn give_early(&mut self, group: &Group) -> Result<()> {
        if group.failure().is_some() {
            // Others may still read what a call has given that was given up, and so has no pieces among those
            // so far.
            return Ok(());
        }
        if self.running.is_none() {
            let ready = self.can && self.plan.seat.agreed().is_some();
            if !ready || !self.staged.has_entered()? {
                return Ok(());
            }
            self.set_out(group)?;
        }
        let Relay { staged, plan, running, .. } = self;
        let Some(run) = running else { return Ok(()) };
        let earlier = run.progress;
        let moved = run.tracks.move_on(&*plan.kernels)?;
        relayed(staged, plan, &[]).begin(run)?;
        if moved || run.progress != earlier {
            group.endpoint().stir();
        }
        Ok(())
    }

    /// Takes what the call runs in.
    fn set_out(&mut self, group: &Group) -> Result<()> {
        // PROOF: the stage says that there are lanes, or whoever begins early has looked.
        let lanes = self.plan.seat.agreed().expect("lanes").clone();
        let tracks = self.plan.route.pieces().min(RELAY_LANES);
        lanes.rouse();
        self.running = Some(Run {
            lanes,
            ringer: Ringer::new(group.endpoint()),
            tracks: Tracks::take(&mut self.staged.job.order, tracks)?,
            before: self.plan.seat.pieces(),
            progress: Progress::default(),
            exchanged: false,
            parcels: Parcels::new(self.plan.route.size()),
        });
        Ok(())
    }

    /// Lets go of what the call ran in, when streams may still use it.
    fn leave(&mut self) {
        self.staged.waive();
        match self.running.take() {
            Some(Run { tracks, lanes, .. }) => tracks.leave(&self.staged.job.order, lanes.pinned()),
            None => self.staged.job.order.give_up(),
        }
    }

    /// Whether `member` has done what this rank waits for.
    fn is_there(&self, member: usize) -> bool {
        let Some(Run { lanes, before, progress, .. }) = &self.running else { return true };
        let route = &self.plan.route;
        let has = |mark, piece: u64| lanes.has_come(member, mark, before + piece);
        let gives = route.contributors().any(|from| from == member);
        let shares = route.sharers().any(|from| from == member);
        (!gives || progress.worked == progress.given || has(Mark::Given, progress.worked))
            && (!shares || progress.taken == progress.folded || has(Mark::Folded, progress.taken))
            && (progress.begun == route.pieces() || lanes.has_lane(member, before + progress.begun))
    }
}

/// A call as its pieces see it.
fn relayed<'a>(staged: &Staged, plan: &'a RelayPlan, scales: &'a [f64]) -> Relayed<'a> {
    let Job { input, output, .. } = &staged.job;
    let [input, output] = [input.place, output.place].map(|place| match place {
        Place::Device(address) => address,
        // PROOF: nothing lies there, or the call would not be relayed.
        Place::Host(_) => 0,
    });
    Relayed { plan, scales, input, output }
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
        match &mut self.stage {
            Stage::Ordinary => return self.staged.abandon(group),
            Stage::Meet(meeting) => meeting.abandon(group),
            Stage::Relay(_) | Stage::Part => {}
        }
        self.leave();
    }

    fn waits_for(&self, group: &Group) -> Vec<u32> {
        match &self.stage {
            Stage::Ordinary => return self.staged.waits_for(group),
            Stage::Meet(meeting) => return meeting.waits_for(group),
            Stage::Part => return Vec::new(),
            Stage::Relay(_) => {}
        }
        let (rank, crew) = (self.plan.route.rank(), self.plan.seat.crew());
        let others = (0..self.plan.route.size()).filter(|&member| member != rank);
        let mut members: Vec<usize> = others.filter(|&member| !self.is_there(member)).collect();
        if let (true, Some(run)) = (members.is_empty(), &self.running) {
            members.extend(run.unwritten(&self.plan.route));
        }
        members.into_iter().map(|member| crew.rank(member)).collect()
    }

    /// What is left is to see stores end, to say so, and to send what has been given: lanes are used again
    /// behind that, whichever call uses them.
    fn has_exchanged(&self) -> bool {
        match (&self.stage, &self.running) {
            (Stage::Ordinary, _) => self.staged.has_exchanged(),
            (Stage::Relay(_), Some(run)) => run.exchanged && self.staged.is_ordered_by_courier(),
            _ => false,
        }
    }

    fn is_at_work(&self) -> bool {
        matches!(self.stage, Stage::Ordinary) && self.staged.is_at_work()
    }

    fn through(&self) -> Through {
        Through::Device
    }

    fn has_courier(&self) -> bool {
        self.staged.has_courier()
    }

    fn asks_driver(&self) -> bool {
        self.staged.asks_driver()
    }

    fn exits(&self) -> Arc<Exits> {
        Exits::of(self.staged.job.order.exit.as_ref())
    }

    fn standing(&self) -> Option<String> {
        let device = self.staged.job.order.device;
        let awaited = match (&self.stage, &self.running) {
            (Stage::Ordinary, _) => self.staged.awaits(),
            (Stage::Meet(_), _) => "the ranks have not all told what they call".into(),
            (Stage::Part, _) => format!("copies from GPU {device} have not ended"),
            (Stage::Relay(_), None) => self.staged.awaits(),
            (Stage::Relay(_), Some(run)) => {
                let Progress { begun, given, worked, folded, taken, done } = run.progress;
                let pieces = self.plan.route.pieces();
                let crew = self.plan.seat.crew();
                let unwritten: Vec<String> = run
                    .unwritten(&self.plan.route)
                    .iter()
                    .map(|member| crew.rank(*member).to_string())
                    .collect();
                let unwritten = match unwritten.is_empty() {
                    true => String::new(),
                    false => format!(", and parcels to rank {} are not written", unwritten.join(", ")),
                };
                format!(
                    "of {pieces} pieces GPU {device} was told to give {begun}, to work on {worked}, to take {taken}, and has given {given}, \
                     worked on {folded}, taken {done}{unwritten}"
                )
            }
        };
        Some(self.staged.beside_courier(awaited))
    }
}
