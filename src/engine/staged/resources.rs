//! What staged calls run in: streams, events, pinned memory. Kept by the process between calls, so that a
//! call allocates nothing that an earlier one has given back, and nothing is freed while streams wait for the
//! host: freeing may wait for the device.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::parting::{self, Tail};
use super::pool::{Left, Pool, Stock};
use super::porter::{Rest, Turns};
use super::{LANES, MESSAGE_ABREAST, PIECE_BYTES, StreamOrder, relay};
use crate::cuda::by_device::ByDevice;
use crate::cuda::context::Devices;
use crate::cuda::courier::{Courier, Desk, Told};
use crate::cuda::driver::Priority;
use crate::cuda::event::Event;
use crate::cuda::memory::RegisteredBuffer;
use crate::cuda::stream::Stream;
use crate::engine::endpoint::{Endpoint, lock};
use crate::error::{Result, fail};
use crate::sys::process;

/// Side streams, which calls share: what they are given can run at once.
///
/// Theirs is the highest priority: copies are short, and others wait for them.
#[derive(Debug)]
pub(super) struct Bay {
    devices: Arc<Devices>,
    device: u32,
    /// From the device to the host.
    pub(super) load: Stream,
    /// From the host to the device.
    pub(super) store: Stream,
    /// Who gives each of them something, where no stream waits for them.
    turns: [Turns; 2],
}

/// Pinned memory for a piece, and how far it has come.
#[derive(Debug)]
pub(super) struct PinnedLane {
    devices: Arc<Devices>,
    device: u32,
    memory: RegisteredBuffer,
    /// The last load into it.
    pub(super) loaded: Event,
    /// The last store out of it.
    pub(super) stored: Event,
    /// The last orders of its call's courier for it, by the desk, if there are any.
    ordered: [Cell<Option<u32>>; Desk::ALL.len()],
    /// How many bytes that courier tells from its first byte on, and has not told as far as is known.
    telling: Cell<usize>,
    /// Whether it is the one for calls that have none.
    spare: bool,
    _made: Made,
}

/// A lane counts among those that there are until this is dropped.
#[derive(Debug)]
struct Made {
    /// Bytes of all lanes of its device.
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Made {
    fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<Made> {
        let all = MADE.get_or_make(devices, device, || Ok(Arc::default()))?;
        all.fetch_add(bytes, Ordering::Relaxed);
        Ok(Made { all, bytes })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

static MADE: ByDevice<Arc<AtomicUsize>> = ByDevice::new();

impl PinnedLane {
    /// Its first byte.
    pub(super) fn address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// Whether it is lent for one copy of the device: no call has it while other ranks are waited for.
    pub(super) fn is_spare(&self) -> bool {
        self.spare
    }

    fn is_like(&self, devices: &Arc<Devices>, device: u32, bytes: usize) -> bool {
        self.memory.bytes() == bytes && self.is_of(devices, device)
    }

    fn is_of(&self, devices: &Arc<Devices>, device: u32) -> bool {
        self.device == device && Arc::ptr_eq(&self.devices, devices)
    }

    /// The last order of its call's courier for it.
    pub(super) fn ordered(&self, desk: Desk) -> Option<u32> {
        self.ordered[desk as usize].get()
    }

    /// A courier has got an order for it.
    pub(super) fn note(&self, desk: Desk, number: u32) {
        self.ordered[desk as usize].set(Some(number));
    }

    /// Has its call's courier tell bytes from its first byte on, by an order whose number is noted then.
    pub(super) fn expect(&self, bytes: usize) {
        self.told(bytes).clear();
        self.telling.set(bytes);
    }

    /// Whether the courier is to tell something that it has not told, as far as is known.
    pub(super) fn is_telling(&self) -> bool {
        self.telling.get() > 0
    }

    /// Whether it has told that. Then the bytes lie where they were to, and that order is done with.
    pub(super) fn has_been_told(&self) -> bool {
        let has = self.ordered(Desk::Load).is_some_and(|number| self.told(self.telling.get()).take(number));
        if has {
            self.telling.set(0);
            self.ordered[Desk::Load as usize].set(None);
        }
        has
    }

    fn told(&self, bytes: usize) -> Told<'_> {
        // SAFETY: the courier writes words there, and its call accesses the bytes when they have been told.
        unsafe { Told::at(self.address(), bytes) }
    }

    /// The next call has another courier, whose orders have other numbers.
    fn forget_orders(&self) {
        self.ordered.iter().for_each(|ordered| ordered.set(None));
        self.telling.set(0);
    }
}

/// Lanes are made in powers of two, this many bytes at least.
const SMALLEST: usize = 64 * 1024;

/// Bytes of the one lane of each device that calls have that can have no other: as many as input and output
/// of a piece have.
pub(super) const SPARE_BYTES: usize = 2 * PIECE_BYTES;

/// Pinned memory of a device above this is given back to the system after use, if no stream can wait for the
/// host: what a long message to each of eight ranks and one from each take.
const KEPT_BYTES: usize = 8 * 2 * (LANES - 1 + MESSAGE_ABREAST) as usize * PIECE_BYTES;

/// Calls on a device have so much between them, and those that have no lane one each beyond that, up to twice
/// as much: more is not made. However many start together, it is bounded then. Who has none goes by the
/// spare one until others have done with theirs.
const LENT_BYTES: usize = KEPT_BYTES;

/// What is left of calls that ended before their copies.
struct Parked {
    behind: Behind,
    lanes: Vec<PinnedLane>,
}

/// What has ended when copies have.
enum Behind {
    /// Each lane's stores.
    Stores,
    /// An event after all of them.
    Tail(Event),
    /// What carries them.
    Courier(Arc<Courier>),
    /// These.
    Rest(Rest),
}

impl Left for Parked {
    fn is_used(&self) -> Option<bool> {
        match &self.behind {
            Behind::Stores | Behind::Tail(_) | Behind::Rest(_) => None,
            Behind::Courier(courier) => Some(!courier.is_gone()),
        }
    }

    fn has_ended(&self) -> Result<bool> {
        match &self.behind {
            Behind::Tail(tail) => tail.query(),
            Behind::Courier(courier) => Ok(courier.is_gone()),
            Behind::Rest(rest) => rest.has_ended(),
            Behind::Stores => {
                self.lanes.iter().try_fold(true, |ended, lane| Ok(ended && lane.stored.query()?))
            }
        }
    }
}

/// How long a call without a stream looks whether it can begin, before it asks to be told: an idle device
/// says so sooner.
const SPIN: Duration = Duration::from_micros(20);

/// What a stream was given before a call: the call does not touch the caller's memory before that is done.
/// The host looks; no stream waits for it, since what waits in a stream may hold up others that share its
/// queue.
#[derive(Debug)]
pub struct Entry {
    /// `None`: the stream had nothing left to do.
    mark: Option<Mark>,
}

/// What tells that the stream has come so far.
#[derive(Debug)]
enum Mark {
    Event(Event),
    Courier(Arc<Courier>),
}

impl Entry {
    /// What the caller's stream was given before a courier.
    pub fn of_courier(courier: &Arc<Courier>, endpoint: &Arc<Endpoint>) -> Entry {
        endpoint.stir();
        Entry { mark: Some(Mark::Courier(courier.clone())) }
    }

    /// What `stream`, which is the caller's, has been given so far. Whoever moves the operations of
    /// `endpoint` looks.
    pub fn of_caller(stream: &Stream, endpoint: &Arc<Endpoint>) -> Result<Entry> {
        // A stream that is idle may have to wait for the default stream before anything else: an event does.
        let entry = Entry::record(stream)?;
        if !entry.has_come()? {
            endpoint.stir();
        }
        Ok(entry)
    }

    /// What the default stream has been given so far, for which `front`, a stream of ours, waits.
    pub fn of_front(front: &Stream, endpoint: &Arc<Endpoint>) -> Result<Entry> {
        let entry = Entry::record(front)?;
        let start = Instant::now();
        while !entry.has_come()? {
            if start.elapsed() > SPIN {
                endpoint.stir();
                break;
            }
            std::hint::spin_loop();
        }
        Ok(entry)
    }

    /// The courier that stands for it.
    pub(super) fn courier(&self) -> Option<&Courier> {
        match &self.mark {
            Some(Mark::Courier(courier)) => Some(courier),
            _ => None,
        }
    }

    /// Whether it is done.
    pub fn has_come(&self) -> Result<bool> {
        match &self.mark {
            None => Ok(true),
            Some(Mark::Event(event)) => event.query(),
            Some(Mark::Courier(courier)) => Ok(courier.has_come()),
        }
    }

    /// Of a stream that has been given nothing.
    #[cfg(test)]
    pub(super) fn nothing() -> Entry {
        Entry { mark: None }
    }

    fn record(stream: &Stream) -> Result<Entry> {
        let mut pool = POOL.lock();
        let fits = |event: &Event| {
            event.device() == stream.device() && Arc::ptr_eq(event.devices(), stream.devices())
        };
        let entries = &mut pool.stock.entries;
        let kept = entries.iter().position(fits).map(|index| entries.swap_remove(index));
        drop(pool);
        let event = match kept {
            Some(event) => event,
            None => Event::new(stream.devices(), stream.device())?,
        };
        event.record(stream)?;
        Ok(Entry { mark: Some(Mark::Event(event)) })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(Mark::Event(event)) = self.mark.take() {
            POOL.lock().stock.entries.push(event);
        }
    }
}

/// For calls without a stream: a stream of ours, one for all on each device, which waits for its default
/// stream. Not one of those that copy, which would wait, too. [`prepare`] makes it, or whoever needs it
/// before.
pub fn front(devices: &Arc<Devices>, device: u32) -> Result<Arc<Stream>> {
    static FRONTS: ByDevice<Arc<Stream>> = ByDevice::new();
    FRONTS.get_or_make(devices, device, || {
        Stream::with_priority(devices, device, true, Priority::High).map(Arc::new)
    })
}

/// Streams of a device for messages beside what their own stream does: so many of its streams may have such
/// lists at a time.
const BESIDE: usize = 4;

/// Each with the number of the stream that it is, or was last, beside.
type StreamsBeside = Arc<Mutex<Vec<(Option<u64>, Arc<Stream>)>>>;

fn streams_beside(devices: &Arc<Devices>, device: u32) -> Result<StreamsBeside> {
    static BESIDES: ByDevice<StreamsBeside> = ByDevice::new();
    BESIDES.get_or_make(devices, device, || {
        let stream = |_| Stream::new(devices, device, false).map(|stream| (None, Arc::new(stream)));
        (0..BESIDE).map(stream).collect::<Result<_>>().map(|streams| Arc::new(Mutex::new(streams)))
    })
}

/// A stream of ours to be beside the one of this number: the same as before, if that has one, or else one that
/// has nothing to do. `None`: there is none.
pub fn stream_beside(devices: &Arc<Devices>, device: u32, number: u64) -> Result<Option<Arc<Stream>>> {
    prepare(devices, device)?;
    let streams = streams_beside(devices, device)?;
    let mut streams = lock(&streams);
    if let Some((_, stream)) = streams.iter().find(|(beside, _)| *beside == Some(number)) {
        return Ok(Some(stream.clone()));
    }
    for (beside, stream) in &mut *streams {
        // What it was given is all there when nobody has it.
        if Arc::strong_count(stream) == 1 && stream.query()? {
            *beside = Some(number);
            return Ok(Some(stream.clone()));
        }
    }
    Ok(None)
}

/// Bays of a device, taken in turn.
const BAYS: usize = 4;

/// Events for entries, and lanes of the smallest size, that a device has from the beginning.
const READY_ENTRIES: usize = 64;
const READY_LANES: usize = 16;

/// Makes what calls on `device` run in, once in the process, before any stream waits for one of them: the
/// driver may wait for the device when it makes a stream, with the lock of the context held that everything
/// needs which would end that wait. (With two streams waiting, the tenth to thirtieth stream of the highest
/// priority was not made until they went on: an H200, driver 580.)
pub fn prepare(devices: &Arc<Devices>, device: u32) -> Result<()> {
    static PREPARED: ByDevice<()> = ByDevice::new();
    PREPARED.get_or_make(devices, device, || make(devices, device))
}

/// What [`prepare`] makes.
fn make(devices: &Arc<Devices>, device: u32) -> Result<()> {
    let _entered = devices.enter(device)?;
    let bays = (0..BAYS).map(|_| Bay::new(devices, device)).collect::<Result<Vec<_>>>()?;
    let entries = (0..READY_ENTRIES).map(|_| Event::new(devices, device)).collect::<Result<Vec<_>>>()?;
    let lanes =
        (0..READY_LANES).map(|_| PinnedLane::new(devices, device, SMALLEST)).collect::<Result<_>>()?;
    let spare = PinnedLane { spare: true, ..PinnedLane::new(devices, device, SPARE_BYTES)? };
    relay::prepare(devices, device)?;
    front(devices, device)?;
    streams_beside(devices, device)?;
    drop(devices.word(device)?);
    devices.prepare_couriers(device)?;
    let stock = &mut POOL.lock().stock;
    stock.bays.extend(bays);
    stock.entries.extend(entries);
    stock.keep_lanes(lanes);
    stock.keep_lanes(vec![spare]);
    Ok(())
}

struct Kept {
    bays: Vec<Arc<Bay>>,
    /// Which of them is next.
    turn: usize,
    entries: Vec<Event>,
    /// Those used last are last.
    lanes: Vec<PinnedLane>,
    spares: Vec<PinnedLane>,
    /// Too much, and not given back yet.
    surplus: Vec<PinnedLane>,
    /// Those of whose surplus a thread is giving back.
    giving_back: Vec<Arc<Devices>>,
}

static POOL: Pool<Kept> = Pool::new(Kept {
    bays: Vec::new(),
    turn: 0,
    entries: Vec::new(),
    lanes: Vec::new(),
    spares: Vec::new(),
    surplus: Vec::new(),
    giving_back: Vec::new(),
});

impl Bay {
    fn new(devices: &Arc<Devices>, device: u32) -> Result<Arc<Bay>> {
        let load = Stream::with_priority(devices, device, false, Priority::Highest)?;
        let store = Stream::with_priority(devices, device, false, Priority::Highest)?;
        Ok(Arc::new(Bay { devices: devices.clone(), device, load, store, turns: Default::default() }))
    }

    /// The stream that does what is ordered at a desk, with its turns.
    pub(super) fn side(&self, desk: Desk) -> (&Stream, &Turns) {
        let [loads, stores] = &self.turns;
        match desk {
            Desk::Load => (&self.load, loads),
            Desk::Store | Desk::Work => (&self.store, stores),
        }
    }

    /// Side streams of a device.
    pub(super) fn take(devices: &Arc<Devices>, device: u32) -> Result<Arc<Bay>> {
        prepare(devices, device)?;
        POOL.unpark(true);
        let stock = &mut POOL.lock().stock;
        stock.turn = stock.turn.wrapping_add(1);
        let (turn, bays) = (stock.turn, &stock.bays);
        let fits = |bay: &&Arc<Bay>| bay.device == device && Arc::ptr_eq(&bay.devices, devices);
        match bays.iter().filter(fits).nth(turn % BAYS) {
            Some(bay) => Ok(bay.clone()),
            None => fail!(Internal, "GPU {device} has been prepared, but has no side streams"),
        }
    }
}

impl PinnedLane {
    /// A lane of at least `bytes` bytes.
    pub(super) fn take(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<PinnedLane> {
        POOL.unpark(true);
        match PinnedLane::kept(devices, device, bytes) {
            Some(lane) => Ok(lane),
            None => PinnedLane::new(devices, device, rounded(bytes)),
        }
    }

    /// As [`PinnedLane::take`], if there is one of which it is known without the driver that nobody uses it.
    pub(super) fn take_kept(devices: &Arc<Devices>, device: u32, bytes: usize) -> Option<PinnedLane> {
        POOL.unpark(false);
        PinnedLane::kept(devices, device, bytes)
    }

    /// One that nobody uses, as far as is known: of those the one that was used last, which processors have
    /// in their caches.
    fn kept(devices: &Arc<Devices>, device: u32, bytes: usize) -> Option<PinnedLane> {
        let bytes = rounded(bytes);
        let Kept { lanes, surplus, .. } = &mut POOL.lock().stock;
        [lanes, surplus].into_iter().find_map(|lanes| {
            let index = lanes.iter().rposition(|lane| lane.is_like(devices, device, bytes))?;
            Some(lanes.remove(index))
        })
    }

    /// The spare lane for a call, if nobody has it, as far as is known without the driver where the call does
    /// not ask it. Whoever has it gives it back as soon as the device has copied, or leaves it behind the
    /// copy.
    pub(super) fn take_spare(order: &StreamOrder) -> Option<PinnedLane> {
        let StreamOrder { devices, device, errand, .. } = order;
        PinnedLane::spare(devices, *device).or_else(|| {
            POOL.unpark(errand.is_none());
            PinnedLane::spare(devices, *device)
        })
    }

    fn spare(devices: &Arc<Devices>, device: u32) -> Option<PinnedLane> {
        let spares = &mut POOL.lock().stock.spares;
        let index = spares.iter().position(|lane| lane.is_like(devices, device, SPARE_BYTES))?;
        Some(spares.swap_remove(index))
    }

    fn new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Result<PinnedLane> {
        let memory = RegisteredBuffer::new(devices, device, bytes)?;
        let made = Made::new(devices, device, memory.bytes())?;
        let (loaded, stored) = (Event::new(devices, device)?, Event::new(devices, device)?);
        let (devices, ordered) = (devices.clone(), Default::default());
        let telling = Cell::new(0);
        Ok(PinnedLane {
            devices,
            device,
            memory,
            loaded,
            stored,
            ordered,
            telling,
            spare: false,
            _made: made,
        })
    }
}

/// How a call comes to pinned memory before it begins. Making some may wait for the driver: not with a lock
/// held.
pub(super) struct Supply<'a> {
    devices: &'a Arc<Devices>,
    device: u32,
    /// How many calls that ask the driver are the caller's own.
    own: usize,
    /// Whether streams may wait for calls.
    streams_wait: &'a dyn Fn() -> bool,
}

impl<'a> Supply<'a> {
    pub(super) fn new(order: &'a StreamOrder, streams_wait: &'a dyn Fn() -> bool) -> Supply<'a> {
        let StreamOrder { devices, device, asking, .. } = order;
        Supply { devices, device: *device, own: usize::from(asking.is_some()), streams_wait }
    }

    /// Of a call that is not known to ask the driver; streams may wait for calls.
    pub(super) fn ahead(devices: &'a Arc<Devices>, device: u32) -> Supply<'a> {
        Supply { devices, device, own: 0, streams_wait: &|| true }
    }

    /// A lane that nobody uses, or a new one; whether it is the `first` of the call. `None`: none is to be
    /// made now, and the spare one serves.
    pub(super) fn lane(&self, bytes: usize, first: bool) -> Result<Option<PinnedLane>> {
        POOL.unpark(true);
        match PinnedLane::kept(self.devices, self.device, bytes) {
            Some(lane) => Ok(Some(lane)),
            None => self.make(bytes, first),
        }
    }

    /// Sees to it that nobody uses so many lanes, unless none is to be made now.
    pub(super) fn stock(&self, bytes: usize, lanes: usize) -> Result<()> {
        POOL.unpark(true);
        let fits = |lane: &&PinnedLane| lane.is_like(self.devices, self.device, rounded(bytes));
        let there = POOL.lock().stock.lanes.iter().filter(fits).count();
        for at in there..lanes {
            let Some(lane) = self.make(bytes, at == 0)? else { break };
            give_back(vec![lane]);
        }
        Ok(())
    }

    /// `None`: the driver is not to be asked now, or calls have enough.
    fn make(&self, bytes: usize, first: bool) -> Result<Option<PinnedLane>> {
        let make = || PinnedLane::new(self.devices, self.device, rounded(bytes));
        // There is no way without it.
        if bytes > SPARE_BYTES {
            return make().map(Some);
        }
        let most = if first { 2 * LENT_BYTES } else { LENT_BYTES };
        if lent(self.devices, self.device) + rounded(bytes) > most {
            return Ok(None);
        }
        self.devices.make(self.own, self.streams_wait, make)
    }
}

/// Bytes of the lanes of a device that somebody uses.
fn lent(devices: &Arc<Devices>, device: u32) -> usize {
    let Kept { lanes, spares, surplus, .. } = &POOL.lock().stock;
    let made = MADE.get(devices, device).map_or(0, |made| made.load(Ordering::Relaxed));
    let kept = [lanes, spares, surplus].into_iter().flatten();
    let kept = kept.filter(|lane| lane.is_of(devices, device)).map(|lane| lane.memory.bytes());
    made.saturating_sub(kept.sum())
}

/// How long a lane is that has room for so many bytes.
fn rounded(bytes: usize) -> usize {
    bytes.max(SMALLEST).checked_next_power_of_two().unwrap_or(bytes)
}

/// Whether lanes of so many bytes and of so many serve for each other.
pub(super) fn are_alike(bytes: usize, others: usize) -> bool {
    rounded(bytes) == rounded(others)
}

/// Lanes, such as the shortest that nobody uses, which are given back when this is dropped.
#[cfg(test)]
pub(crate) struct Hoard(Vec<PinnedLane>);

#[cfg(test)]
impl Hoard {
    pub(crate) fn of(devices: &Arc<Devices>, device: u32) -> Hoard {
        Hoard(std::iter::from_fn(|| PinnedLane::take_kept(devices, device, 1)).collect())
    }

    /// Takes the spare one, if nobody has it.
    pub(crate) fn of_spare(devices: &Arc<Devices>, device: u32) -> Option<Hoard> {
        PinnedLane::spare(devices, device).map(|lane| Hoard(vec![lane]))
    }

    /// As much as calls may have, or as they may whose first lane it is.
    pub(crate) fn of_all(devices: &Arc<Devices>, device: u32, first: bool) -> Hoard {
        let supply = Supply::ahead(devices, device);
        let lanes = std::iter::from_fn(|| supply.lane(SPARE_BYTES, first).expect("a driver"));
        Hoard(lanes.take(2 * LENT_BYTES / SPARE_BYTES).collect())
    }

    /// One of so many bytes, which is made.
    pub(crate) fn of_new(devices: &Arc<Devices>, device: u32, bytes: usize) -> Hoard {
        Hoard(vec![PinnedLane::new(devices, device, rounded(bytes)).expect("a lane")])
    }
}

#[cfg(test)]
impl Drop for Hoard {
    fn drop(&mut self) {
        give_back(std::mem::take(&mut self.0));
    }
}

/// Takes back what a call ran in. No stream is to do anything with it any more.
pub(super) fn give_back(lanes: Vec<PinnedLane>) {
    POOL.lock().stock.keep_lanes(lanes);
}

/// Takes back what a copy on a caller's stream went through, once what each lane's `stored` is behind has
/// ended.
pub(super) fn park(lanes: Vec<PinnedLane>) {
    POOL.park(Parked { behind: Behind::Stores, lanes });
}

/// Takes back what a call ran in, once `courier` touches nothing any more.
pub(super) fn park_behind(courier: Arc<Courier>, lanes: Vec<PinnedLane>) {
    POOL.park(Parked { behind: Behind::Courier(courier), lanes });
}

/// Lets go of what a call ran in that is given up, when one copy may be under way on each side stream. The
/// caller has its memory back when those have ended, or after a while.
pub(super) fn leave_behind(rest: Rest, lanes: Vec<PinnedLane>) {
    match parting::wait(|| rest.has_ended()) {
        true => give_back(lanes),
        false => POOL.park(Parked { behind: Behind::Rest(rest), lanes }),
    }
}

/// Lets go of what a call ran in that is given up, when side streams may still use it. The caller's stream
/// goes on behind the copies under way, unless it has been let go (`released`).
pub(super) fn leave(order: &StreamOrder, bay: &Bay, lanes: Vec<PinnedLane>, released: bool) {
    let StreamOrder { devices, device, exit, .. } = order;
    let behind = || -> Result<Event> {
        // Behind everything that either side stream was given.
        let [stores, tail] = [Event::new(devices, *device)?, Event::new(devices, *device)?];
        stores.record(&bay.store)?;
        bay.load.wait(&stores)?;
        if let Some(exit) = exit
            && !released
        {
            bay.load.release_word(exit)?;
        }
        tail.record(&bay.load)?;
        Ok(tail)
    };
    match parting::part(exit.as_ref(), &[&bay.load, &bay.store], behind()) {
        Some(Tail::Event(tail)) => POOL.park(Parked { behind: Behind::Tail(tail), lanes }),
        Some(Tail::Ended) => give_back(lanes),
        None => std::mem::forget(lanes),
    }
}

impl Stock for Kept {
    type Left = Parked;
    type Rest = Vec<Behind>;

    fn keep(&mut self, left: Vec<Parked>) -> Vec<Behind> {
        let (behind, lanes): (_, Vec<_>) = left.into_iter().map(|left| (left.behind, left.lanes)).unzip();
        self.keep_lanes(lanes.into_iter().flatten().collect());
        behind
    }
}

impl Kept {
    /// Keeps lanes for the next calls. Of what is too much those go that have been used least lately: a call
    /// that is made again finds what it had. Where streams may wait for the host none goes: giving registered
    /// memory back waits for them, with a lock held that what they wait for needs. Couriers wait for the host
    /// everywhere: elsewhere it goes when none is on its way, and calls have it until then.
    fn keep_lanes(&mut self, lanes: Vec<PinnedLane>) {
        for lane in lanes {
            lane.forget_orders();
            if lane.spare {
                self.spares.push(lane);
                continue;
            }
            if lane.devices.has_many_queues() {
                self.lanes.push(lane);
                continue;
            }
            let Some(room) = KEPT_BYTES.checked_sub(lane.memory.bytes()) else {
                self.surplus.push(lane);
                continue;
            };
            let same = |kept: &PinnedLane| kept.is_of(&lane.devices, lane.device);
            let bytes = |kept: &[PinnedLane]| -> usize {
                kept.iter().filter(|kept| same(kept)).map(|kept| kept.memory.bytes()).sum()
            };
            while bytes(&self.lanes) > room
                && let Some(oldest) = self.lanes.iter().position(same)
            {
                self.surplus.push(self.lanes.remove(oldest));
            }
            self.lanes.push(lane);
        }
        self.give_surplus_back();
    }

    /// Has what is too much given back, by one thread for all that is of the same devices.
    fn give_surplus_back(&mut self) {
        for lane in &self.surplus {
            if self.giving_back.iter().any(|devices| Arc::ptr_eq(devices, &lane.devices)) {
                continue;
            }
            let devices = lane.devices.clone();
            self.giving_back.push(devices.clone());
            if let Err(error) = process::spawn("unisono-aside", move || give_surplus_back(&devices)) {
                log::warn!("pinned memory is not given back: {error}");
                self.giving_back.pop();
            }
        }
    }
}

/// Gives back in quiet what is too much of these devices, until there is none.
fn give_surplus_back(devices: &Arc<Devices>) {
    let is_theirs = |lane: &PinnedLane| Arc::ptr_eq(&lane.devices, devices);
    let is_there = || {
        let Kept { surplus, giving_back, .. } = &mut POOL.lock().stock;
        let is_there = surplus.iter().any(is_theirs);
        if !is_there {
            // Under the lock: what becomes too much after this has another thread.
            giving_back.retain(|giving| !Arc::ptr_eq(giving, devices));
        }
        is_there
    };
    let take =
        || -> Vec<PinnedLane> { POOL.lock().stock.surplus.extract_if(.., |lane| is_theirs(lane)).collect() };
    while devices.in_quiet(&is_there, || drop(take())).is_some() {}
}

/// Has whoever moves an endpoint's operations look again soon, when a stream has been given something.
///
/// No host function does that. The driver keeps a thread that gives one to any stream of a device waiting
/// while another thread waits for room in a stream's queue; and behind a wait for a value each takes as much
/// of that room as a dozen copies (a stream that waits for calls was full after 55 on an H200, driver 580).
pub(super) struct Ringer(Arc<Endpoint>);

impl Ringer {
    pub(super) fn new(endpoint: &Arc<Endpoint>) -> Ringer {
        Ringer(endpoint.clone())
    }

    /// A stream has been given something just now.
    pub(super) fn ring(&self) {
        self.0.stir();
    }
}
