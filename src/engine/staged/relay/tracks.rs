//! What relayed pieces run on: streams, and an event for each piece under way, kept by the process between
//! calls ([`queued`](super::queued): where no stream waits for the call); or a courier.

use std::sync::Arc;

use super::super::parting::{self, Tail};
use super::super::pool::{self, Left};
use super::super::resources::Ringer;
use super::super::{StreamOrder, copies};
use super::Combine;
use super::lanes::Pinned;
use super::queued::{Part, Queued, Rest, Side};
use super::route::RELAY_LANES;
use crate::cuda::context::Devices;
use crate::cuda::courier::{Courier, Customer, Desk, Errand};
use crate::cuda::driver::Priority;
use crate::cuda::event::Event;
use crate::cuda::kernels::Launch;
use crate::cuda::local::{Fold, Kernels, Operand};
use crate::cuda::stream::Stream;
use crate::error::{Result, fail};
use crate::reduce::{self, Representation};

/// A stream, which calls share, and the event of one piece, whose steps run on this stream or another; the
/// host sees every step end before it gives the next.
#[derive(Debug)]
pub(super) struct PieceTrack {
    pub(super) side: Arc<Side>,
    /// After the last step of the piece.
    step: Event,
    /// Whether a step has been given that was not seen to end,
    busy: bool,
    /// and whether somebody has gone to sleep since.
    rings: bool,
}

/// What is done to a piece. All pieces have one stream for each of these, or one desk: side by side, they
/// would have the bus together and all come late, the first as late as the last.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Give,
    Work,
    Take,
}

/// Orders of a piece, if there are none.
const NOTHING: [Option<u32>; Desk::ALL.len()] = [None; Desk::ALL.len()];

impl Step {
    pub(super) const ALL: [Step; 3] = [Step::Give, Step::Work, Step::Take];

    fn desk(self) -> Desk {
        match self {
            Step::Give => Desk::Load,
            Step::Work => Desk::Work,
            Step::Take => Desk::Store,
        }
    }
}

/// What a call runs on.
pub(super) enum Tracks {
    /// Where the caller's stream waits for these streams.
    Streams(Vec<PieceTrack>),
    /// Where no stream does.
    Queued(Queued),
    Courier(Ordered),
}

/// What a courier was ordered.
pub(super) struct Ordered {
    /// Until everything has been.
    errand: Option<Errand>,
    customer: Customer,
    /// For each piece under way, the numbers of its last orders at each desk that were not seen to be carried
    /// out.
    pieces: Vec<[Option<u32>; Desk::ALL.len()]>,
}

/// What is combined in a step: as [`Fold`](crate::cuda::local::Fold), of elements.
pub(super) struct Sum<'a> {
    pub(super) combine: &'a Combine,
    pub(super) operands: &'a [Operand],
    pub(super) out: u64,
    pub(super) count: usize,
}

impl Sum<'_> {
    /// Combines in the order of a stream.
    ///
    /// # Safety
    /// As [`Tracks::combine`].
    pub(super) unsafe fn give(&self, kernels: &dyn Kernels, stream: &Stream) -> Result<()> {
        let Sum { combine: &Combine { dtype, operator }, operands, out, count } = *self;
        let (ranks, representation) = (operands.len() as u32, Representation::Element);
        let fold =
            Fold { stream, dtype, operator, ranks, operands, out, representation, count, max_blocks: 0 };
        let _entered = stream.devices().enter(stream.device())?;
        // SAFETY: the caller's promise.
        unsafe { kernels.fold(stream.devices(), &fold) }
    }
}

/// Tracks of a call that was given up before its steps had ended, and the lanes that they use.
struct Parked {
    behind: Behind,
    tracks: Vec<PieceTrack>,
    lanes: Pinned,
}

/// What has ended when all steps have.
enum Behind {
    Tail(Event),
    Courier(Arc<Courier>),
    /// These.
    Rest(Rest),
}

impl Left for Parked {
    fn is_used(&self) -> Option<bool> {
        match &self.behind {
            Behind::Tail(_) | Behind::Rest(_) => None,
            Behind::Courier(courier) => Some(!courier.is_gone()),
        }
    }

    fn has_ended(&self) -> Result<bool> {
        match &self.behind {
            Behind::Tail(tail) => tail.query(),
            Behind::Courier(courier) => Ok(courier.is_gone()),
            Behind::Rest(rest) => rest.has_ended(),
        }
    }
}

impl Tracks {
    /// For a call with so many pieces under way. A courier is the call's from now on.
    pub(super) fn take(order: &mut StreamOrder, pieces: u64) -> Result<Tracks> {
        let StreamOrder { devices, device, errand, exit, .. } = order;
        let Some(errand) = errand.take() else {
            if exit.is_none() {
                let sides = take_sides(devices, *device)?;
                let steps = (0..pieces).map(|_| take_step(devices, *device)).collect::<Result<_>>()?;
                return Ok(Tracks::Queued(Queued::new(sides, steps)));
            }
            let tracks = (0..pieces).map(|_| PieceTrack::take(devices, *device)).collect::<Result<_>>()?;
            return Ok(Tracks::Streams(tracks));
        };
        // First takes back what calls that were given up have left and their couriers are done with: the
        // driver is not asked.
        POOL.unpark(false);
        let (customer, pieces) = (errand.customer().clone(), vec![NOTHING; pieces as usize]);
        Ok(Tracks::Courier(Ordered { errand: Some(errand), customer, pieces }))
    }

    /// How many pieces may be under way.
    pub(super) fn len(&self) -> u64 {
        match self {
            Tracks::Streams(tracks) => tracks.len() as u64,
            Tracks::Queued(queued) => queued.len() as u64,
            Tracks::Courier(ordered) => ordered.pieces.len() as u64,
        }
    }

    fn index(&self, number: u64) -> usize {
        (number % self.len()) as usize
    }

    /// The stream of a step.
    fn stream(&self, step: Step) -> Result<&Stream> {
        match self {
            Tracks::Streams(tracks) => Ok(&tracks[self.index(step as u64)].side.stream),
            Tracks::Queued(_) => fail!(Internal, "a step was given out of turn"),
            Tracks::Courier(_) => fail!(Internal, "a courier was ordered something after it was let go"),
        }
    }

    /// Copies in a step of a piece.
    ///
    /// # Safety
    /// As [`Stream`] says; what [`COPY`](super::COPY) names has been prepared.
    pub(super) unsafe fn copy(
        &mut self,
        kernels: &dyn Kernels,
        (piece, step): (u64, Step),
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let index = self.index(piece);
        let (errand, pieces) = match self {
            Tracks::Courier(Ordered { errand: Some(errand), pieces, .. }) => (errand, pieces),
            Tracks::Queued(queued) => {
                // SAFETY: the caller's promise.
                return unsafe { queued.order(kernels, (index, step), Part::Copy { to, from, bytes }) };
            }
            // SAFETY: the caller's promise.
            _ => return unsafe { copies::copy(kernels, self.stream(step)?, to, from, bytes) },
        };
        let number = match step.desk() {
            // What is copied where operands are combined is their sum.
            // SAFETY: the caller's promise.
            Desk::Work => unsafe { errand.order_behind(to, from, bytes) },
            // SAFETY: the caller's promise.
            desk => unsafe { errand.order(desk, to, from, bytes) },
        };
        pieces[index][step.desk() as usize] = Some(number);
        Ok(())
    }

    /// Combines in the step of a piece that works.
    ///
    /// # Safety
    /// As [`Tracks::copy`]; what `sum` combines by has been prepared, and a courier can.
    pub(super) unsafe fn combine(&mut self, kernels: &dyn Kernels, piece: u64, sum: &Sum<'_>) -> Result<()> {
        let Sum { combine: combine @ Combine { dtype, operator }, operands, out, count } = *sum;
        let index = self.index(piece);
        let (errand, pieces) = match self {
            Tracks::Courier(Ordered { errand: Some(errand), pieces, .. }) => (errand, pieces),
            Tracks::Queued(queued) => {
                let part = Part::Combine { combine: *combine, operands: operands.to_vec(), out, count };
                // SAFETY: the caller's promise.
                return unsafe { queued.order(kernels, (index, Step::Work), part) };
            }
            // SAFETY: the caller's promise.
            _ => return unsafe { sum.give(kernels, self.stream(Step::Work)?) },
        };
        let (ranks, representation) = (operands.len() as u32, Representation::Element);
        let operands: Vec<reduce::Operand> = operands.iter().map(Operand::as_pointer).collect();
        let out = std::ptr::with_exposed_provenance_mut(out as usize);
        let launch = Launch::new(*dtype, operator, ranks, &operands, out, representation, count);
        // SAFETY: the caller's promise.
        pieces[index][Desk::Work as usize] = Some(unsafe { errand.combine(launch) });
        Ok(())
    }

    /// Gives streams what they can be given by now, where they have one thing at a time. Whether that was
    /// anything.
    pub(super) fn move_on(&mut self, kernels: &dyn Kernels) -> Result<bool> {
        match self {
            Tracks::Queued(queued) => queued.move_on(kernels),
            Tracks::Streams(_) | Tracks::Courier(_) => Ok(false),
        }
    }

    /// A step of a piece has been given to its stream.
    pub(super) fn given(&mut self, piece: u64, step: Step) -> Result<()> {
        let (track, stream) = (self.index(piece), self.index(step as u64));
        let tracks = match self {
            Tracks::Streams(tracks) => tracks,
            Tracks::Queued(queued) => return queued.ordered(step),
            Tracks::Courier(_) => return Ok(()),
        };
        match tracks.get_disjoint_mut([track, stream]) {
            Ok([track, PieceTrack { side, .. }]) => track.given(&side.stream),
            // They are the same.
            Err(_) => tracks[track].given_here(),
        }
    }

    /// Whether all steps of a piece that were given have ended.
    pub(super) fn is_idle(&mut self, piece: u64) -> Result<bool> {
        let index = self.index(piece);
        match self {
            Tracks::Streams(tracks) => tracks[index].is_idle(),
            Tracks::Queued(queued) => Ok(queued.is_idle(index)),
            Tracks::Courier(Ordered { customer, pieces, .. }) => {
                for desk in Desk::ALL {
                    let last = &mut pieces[index][desk as usize];
                    if last.is_some_and(|last| customer.courier().has_done(desk, last)) {
                        *last = None;
                    }
                }
                Ok(pieces[index] == NOTHING)
            }
        }
    }

    /// Whether all of all pieces have.
    pub(super) fn are_idle(&mut self) -> Result<bool> {
        (0..self.len()).try_fold(true, |idle, piece| Ok(idle && self.is_idle(piece)?))
    }

    /// No more steps will be given: the caller's stream goes on behind those of a courier.
    pub(super) fn let_go(&mut self) {
        if let Tracks::Courier(ordered) = self {
            ordered.errand = None;
        }
    }

    /// Somebody goes to sleep: has the ends of steps be looked for soon.
    pub(super) fn ring(&mut self, ringer: &Ringer) -> Result<()> {
        match self {
            Tracks::Streams(tracks) => tracks.iter_mut().try_for_each(|track| track.ring(ringer)),
            Tracks::Queued(queued) => {
                queued.ring(ringer);
                Ok(())
            }
            Tracks::Courier(Ordered { pieces, .. }) => {
                if pieces.iter().any(|piece| *piece != NOTHING) {
                    ringer.ring();
                }
                Ok(())
            }
        }
    }

    /// Takes them back when their steps have all ended. The call has its courier again, if that is to go on.
    pub(super) fn give_back(self, order: &mut StreamOrder) {
        match self {
            Tracks::Streams(tracks) => POOL.lock().stock.keep_steps(tracks),
            Tracks::Queued(queued) => POOL.lock().stock.steps.extend(queued.into_steps()),
            Tracks::Courier(ordered) => order.errand = ordered.errand,
        }
    }

    /// Takes them back, and lets go of the lanes, when the steps under way have ended. The caller's stream
    /// goes on behind those.
    pub(super) fn leave(self, order: &StreamOrder, lanes: Pinned) {
        match self {
            Tracks::Courier(Ordered { errand, customer, .. }) => {
                drop(errand);
                customer.give_up();
                park(Behind::Courier(customer.courier().clone()), Vec::new(), lanes);
            }
            // The caller has its memory back when what is under way has ended, or after a while.
            Tracks::Queued(queued) => {
                let (rest, steps) = queued.leave();
                POOL.lock().stock.steps.extend(steps);
                if !parting::wait(|| rest.has_ended()) {
                    park(Behind::Rest(rest), Vec::new(), lanes);
                }
            }
            Tracks::Streams(tracks) => leave(order, tracks, lanes),
        }
    }
}

fn leave(order: &StreamOrder, mut tracks: Vec<PieceTrack>, lanes: Pinned) {
    let StreamOrder { devices, device, exit, .. } = order;
    let Some(last) = tracks.pop() else { return };
    let behind = || -> Result<Event> {
        let tail = Event::new(devices, *device)?;
        tracks.iter().try_for_each(|track| track.precede(&last))?;
        if let Some(exit) = exit {
            last.side.stream.release_word(exit)?;
        }
        tail.record(&last.side.stream)?;
        Ok(tail)
    };
    let behind = behind();
    tracks.push(last);
    let streams: Vec<&Stream> = tracks.iter().map(|track| &track.side.stream).collect();
    match parting::part(exit.as_ref(), &streams, behind) {
        Some(Tail::Event(tail)) => park(Behind::Tail(tail), tracks, lanes),
        Some(Tail::Ended) => POOL.lock().stock.keep_steps(tracks),
        None => std::mem::forget((tracks, lanes)),
    }
}

struct Stock {
    /// As many for each device as a call takes, made before any stream waits for a call.
    sides: Vec<Arc<Side>>,
    /// Which of them is next.
    turn: usize,
    steps: Vec<Event>,
}

static POOL: pool::Pool<Stock> = pool::Pool::new(Stock { sides: Vec::new(), turn: 0, steps: Vec::new() });

impl Stock {
    fn keep_steps(&mut self, tracks: Vec<PieceTrack>) {
        self.steps.extend(tracks.into_iter().map(|track| track.step));
    }

    /// The next stream of a device.
    fn side(&mut self, devices: &Arc<Devices>, device: u32) -> Result<Arc<Side>> {
        self.turn = self.turn.wrapping_add(1);
        let of_device =
            |side: &&Arc<Side>| side.stream.device() == device && Arc::ptr_eq(side.stream.devices(), devices);
        match self.sides.iter().filter(of_device).nth(self.turn % RELAY_LANES as usize) {
            Some(side) => Ok(side.clone()),
            None => fail!(Internal, "GPU {device} has no streams for relayed calls"),
        }
    }
}

/// A stream for each step.
pub(super) fn take_sides(devices: &Arc<Devices>, device: u32) -> Result<[Arc<Side>; Step::ALL.len()]> {
    POOL.unpark(true);
    let pool = &mut POOL.lock().stock;
    let mut next = || pool.side(devices, device);
    Ok([next()?, next()?, next()?])
}

/// The event of a piece.
fn take_step(devices: &Arc<Devices>, device: u32) -> Result<Event> {
    let mut shelves = POOL.lock();
    let steps = &mut shelves.stock.steps;
    let fits = |step: &Event| step.device() == device && Arc::ptr_eq(step.devices(), devices);
    let kept = steps.iter().position(fits).map(|index| steps.swap_remove(index));
    drop(shelves);
    kept.map_or_else(|| Event::new(devices, device), Ok)
}

impl pool::Stock for Stock {
    type Left = Parked;
    /// What came after calls and the lanes that they used.
    type Rest = Vec<(Behind, Pinned)>;

    fn keep(&mut self, over: Vec<Parked>) -> Vec<(Behind, Pinned)> {
        let keep = |Parked { behind, tracks, lanes }| {
            self.keep_steps(tracks);
            (behind, lanes)
        };
        over.into_iter().map(keep).collect()
    }
}

/// Makes the streams of a device, once: see [`resources::prepare`](super::super::resources::prepare). They
/// never wait for the host.
pub(in super::super) fn prepare(devices: &Arc<Devices>, device: u32) -> Result<()> {
    let make = |_| {
        let stream = Stream::with_priority(devices, device, false, Priority::Highest)?;
        Ok(Arc::new(Side::new(stream)))
    };
    let sides = (0..RELAY_LANES).map(make).collect::<Result<Vec<_>>>()?;
    POOL.lock().stock.sides.extend(sides);
    Ok(())
}

impl PieceTrack {
    /// A track on a device.
    pub(super) fn take(devices: &Arc<Devices>, device: u32) -> Result<PieceTrack> {
        POOL.unpark(true);
        let side = POOL.lock().stock.side(devices, device)?;
        Ok(PieceTrack { side, step: take_step(devices, device)?, busy: false, rings: false })
    }

    /// A step of the piece has been given to `stream`.
    pub(super) fn given(&mut self, stream: &Stream) -> Result<()> {
        (self.busy, self.rings) = (true, false);
        self.step.record(stream)
    }

    /// As [`PieceTrack::given`], to the stream that it has itself.
    pub(super) fn given_here(&mut self) -> Result<()> {
        (self.busy, self.rings) = (true, false);
        self.step.record(&self.side.stream)
    }

    /// Whether every step that was given has ended.
    pub(super) fn is_idle(&mut self) -> Result<bool> {
        if self.busy && self.step.query()? {
            self.busy = false;
        }
        Ok(!self.busy)
    }

    /// Somebody goes to sleep: has the end of the step be looked for soon.
    pub(super) fn ring(&mut self, ringer: &Ringer) -> Result<()> {
        if self.busy && !self.rings {
            ringer.ring();
            self.rings = true;
        }
        Ok(())
    }

    /// Has `other` wait for everything here.
    pub(super) fn precede(&self, other: &PieceTrack) -> Result<()> {
        self.step.record(&self.side.stream)?;
        other.side.stream.wait(&self.step)
    }
}

/// Takes back what calls have left that were given up, if it is not used any more. Asks the driver.
pub(super) fn unpark() {
    POOL.unpark(true);
}

/// Takes back tracks, and lets go of the lanes, once what they are `behind` has ended.
fn park(behind: Behind, tracks: Vec<PieceTrack>, lanes: Pinned) {
    POOL.park(Parked { behind, tracks, lanes });
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::super::parting::tests::{memory_comes_back_behind_copies, order_of_nothing};
    use super::pool::Stock;
    use super::*;
    use crate::cuda::double::{Double, Order, Waiting};

    #[test]
    fn who_asks_the_driver_what_has_ended_holds_up_nobody_who_does_not() {
        let double = Double::new(1, Order::RoundRobin);
        let devices = Devices::over(double.clone()).expect("a driver");
        prepare(&devices, 0).expect("streams");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        let gate = devices.word(0).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        // What is left of a call that was given up.
        let tail = Event::new(&devices, 0).expect("an event");
        tail.record(&stream).expect("it is recorded");
        park(Behind::Tail(tail), Vec::new(), Arc::new(()));
        double.hold_lock(Waiting::All, Duration::from_secs(10));
        let mut is_free = false;
        std::thread::scope(|scope| {
            scope.spawn(|| double.launch_first(0));
            // By then it waits in the driver; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            scope.spawn(|| drop(PieceTrack::take(&devices, 0).expect("a track")));
            std::thread::sleep(Duration::from_millis(20));
            // Other tests have it now and then.
            let start = Instant::now();
            while !is_free && start.elapsed() < Duration::from_secs(2) {
                is_free = POOL.is_free();
            }
            gate.release();
        });
        assert!(is_free, "calls with a courier wait for the lock, too");
        double.drain();
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn what_came_after_a_call_that_was_given_up_is_not_destroyed_with_the_lock_held() {
        let double = Double::new(1, Order::RoundRobin);
        let devices = Devices::over(double.clone()).expect("a driver");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        let gate = devices.word(0).expect("a word");
        stream.wait_word(&gate).expect("it waits");
        let behind = Behind::Tail(Event::new(&devices, 0).expect("an event"));
        double.hold_lock(Waiting::All, Duration::from_secs(10));
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| double.launch_first(0));
            // By then it waits in the driver; if not, the test finds less.
            std::thread::sleep(Duration::from_millis(20));
            scope.spawn(move || {
                let over = vec![Parked { behind, tracks: Vec::new(), lanes: Arc::new(()) }];
                let done = POOL.lock().stock.keep(over);
                tell.send(()).expect("the test waits");
                drop(done);
            });
            let kept = told.recv_timeout(Duration::from_secs(2));
            gate.release();
            kept.expect("the driver is asked for something");
        });
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn lanes_are_let_go_of_at_once_where_nothing_is_under_way() {
        let devices = Devices::over(Double::new(1, Order::RoundRobin)).expect("a driver");
        prepare(&devices, 0).expect("streams");
        let queued = Queued::new(take_sides(&devices, 0).expect("streams"), Vec::new());
        let lanes = Arc::new(());
        Tracks::Queued(queued).leave(&order_of_nothing(&devices, None), lanes.clone());
        assert_eq!(Arc::strong_count(&lanes), 1);
    }

    #[test]
    fn memory_comes_back_behind_what_is_relayed_whatever_fails() {
        memory_comes_back_behind_copies(
            |devices| {
                prepare(devices, 0).expect("streams");
                (0..3).map(|_| PieceTrack::take(devices, 0).expect("a track")).collect::<Vec<_>>()
            },
            |tracks| tracks.iter().map(|track| &track.side.stream).collect(),
            |tracks, order| Tracks::Streams(tracks).leave(order, Arc::new(())),
        );
    }
}
