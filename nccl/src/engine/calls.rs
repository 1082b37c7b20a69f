//! Calls of a group, kept for its end: what GPUs do alone is gathered, checked, for each communicator; all
//! else waits as it was called.

use std::sync::Arc;

use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Added, Context, Launches, Ready};
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::joined;
use unisono::cuda::stream::Stream;
use unisono::reduce::DataType;

use super::{Failed, Launch, OneSided, read_factor};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::place::{Place, devices};

/// Calls of a group.
pub(crate) struct Calls {
    gathered: Vec<Gathered>,
    pub(super) others: Vec<Launch>,
    /// The streams of each communicator on a device.
    streams: Vec<Streams>,
    count: usize,
}

/// The streams that a communicator is called on.
struct Streams {
    communicator: Arc<Communicator>,
    device: u32,
    first: usize,
    others: Vec<usize>,
}

/// Calls of one communicator that its GPUs do alone.
struct Gathered {
    communicator: Arc<Communicator>,
    /// Each [`TURN`] collectives, in their order; the first has all sends and receives.
    turns: Vec<Launches>,
    /// These, once their memory is found.
    ready: Vec<Ready>,
    factors: Vec<Factor>,
    collectives: usize,
}

/// So many collectives of a rank are given to its stream before the next rank of this thread has its turn:
/// far fewer than a stream's queue has room for, or this thread would wait there for kernels that wait for
/// those of that rank. All ranks have the same turns, also those that are alone in their thread: no launch is
/// part of two.
const TURN: usize = 64;

impl Gathered {
    fn find(&mut self) -> Result<()> {
        let Gathered { communicator, turns, ready, .. } = self;
        let context = communicator.called_group()?;
        turns.drain(..).try_for_each(|launches| {
            // SAFETY: the client's streams live.
            ready.push(unsafe { launches.located(context) }?);
            Ok(())
        })
    }

    fn resolve(&mut self) -> Result<()> {
        let Gathered { communicator, ready, factors, .. } = self;
        factors.drain(..).try_for_each(|Factor { turn, number, address, dtype, stream }| {
            ready[turn].set_factor(number, read_factor(communicator, address, dtype, stream)?)
        })
    }
}

/// The factor of a PreMulSum that the device has.
struct Factor {
    /// Which of the calls it is for.
    turn: usize,
    number: usize,
    address: u64,
    dtype: DataType,
    stream: StreamHandle,
}

impl Calls {
    pub(crate) const NONE: Calls =
        Calls { gathered: Vec::new(), others: Vec::new(), streams: Vec::new(), count: 0 };

    /// Keeps a call. What is wrong with it is told here, where the caller can see which call it was.
    pub(crate) fn add(&mut self, launch: Launch) -> Result<()> {
        let context = launch.working_group()?;
        let added = self.gather(&launch, context)?;
        if added != Added::Empty && !launch.is_empty() {
            self.note_stream(&launch.communicator, launch.stream);
        }
        if added == Added::Not {
            launch.check_in(context)?;
            self.others.push(launch);
        }
        self.count += 1;
        Ok(())
    }

    /// How many have been kept.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Whom each call is of, its kind, and the bytes of what it counts.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (&Communicator, Kind, u64)> {
        let gathered = self.gathered.iter().flat_map(|Gathered { communicator, turns, .. }| {
            let sizes = turns.iter().flat_map(Launches::sizes);
            sizes.map(|(kind, bytes)| (&**communicator, kind, bytes))
        });
        let others = self.others.iter().map(|Launch { communicator, request, .. }| {
            let count = if let Counts::Uniform(count) = request.counts { count } else { 0 };
            (&**communicator, request.kind, count.saturating_mul(request.dtype.size() as u64))
        });
        gathered.chain(others)
    }

    /// Notes that the communicator is called on this stream.
    pub(super) fn note_stream(&mut self, communicator: &Arc<Communicator>, stream: usize) {
        let Place::Device(device) = communicator.place else { return };
        let is_its = |streams: &Streams| Arc::ptr_eq(&streams.communicator, communicator);
        match self.streams.iter_mut().rfind(|streams| is_its(streams)) {
            Some(Streams { first, others, .. }) => {
                if *first != stream && !others.contains(&stream) {
                    others.push(stream);
                }
            }
            None => {
                let communicator = communicator.clone();
                self.streams.push(Streams { communicator, device, first: stream, others: Vec::new() });
            }
        }
    }

    /// The streams of each communicator that is called on several: a group is one operation, for each of
    /// them. Not those of sends and receives alone that GPUs do: they are one launch. `one_sided`: what the
    /// group has beside the calls.
    pub(super) fn joined(&self, one_sided: &[OneSided]) -> Result<Vec<Joined>> {
        let is_apart = |streams: &&Streams| {
            let is_its = |communicator: &Arc<Communicator>| Arc::ptr_eq(communicator, &streams.communicator);
            let is_gathered =
                |gathered: &Gathered| is_its(&gathered.communicator) && gathered.turns[0].has_collectives();
            !streams.others.is_empty()
                && (self.others.iter().any(|launch| is_its(&launch.communicator))
                    || one_sided.iter().any(|one| is_its(&one.communicator))
                    || self.gathered.iter().any(is_gathered))
        };
        self.streams.iter().filter(is_apart).map(Joined::new).collect()
    }

    fn gather(&mut self, launch: &Launch, context: &Context) -> Result<Added> {
        if matches!(launch.communicator.place, Place::Host(_)) || launch.is_to_itself(context) {
            return Ok(Added::Not);
        }
        let is_its = |gathered: &Gathered| Arc::ptr_eq(&gathered.communicator, &launch.communicator);
        let at = match self.gathered.iter().rposition(is_its) {
            Some(known) => known,
            None => {
                let Some(launches) = context.launches() else { return Ok(Added::Not) };
                let communicator = launch.communicator.clone();
                let (turns, ready, factors) = (vec![launches], Vec::new(), Vec::new());
                self.gathered.push(Gathered { communicator, turns, ready, factors, collectives: 0 });
                self.gathered.len() - 1
            }
        };
        let Gathered { turns, factors, collectives, .. } = &mut self.gathered[at];
        let is_message = launch.request.kind.point_to_point();
        if is_message {
            launch.check_in(context)?;
        }
        let turn = if is_message { 0 } else { *collectives / TURN };
        if turn == turns.len() {
            turns.extend(context.launches());
        }
        let added = turns[turn].add(context, &launch.request, &launch.call())?;
        if let Added::As(number) = added {
            *collectives += usize::from(!is_message);
            if let Some(address) = launch.factor {
                let (dtype, stream) = (launch.request.dtype, StreamHandle(launch.stream));
                factors.push(Factor { turn, number, address, dtype, stream });
            }
        }
        Ok(added)
    }

    /// Finds the memory of what was gathered. What is refused here, or by [`Calls::resolve`], keeps all calls
    /// of its communicator from starting, and those that other ranks of it have in the group, which would
    /// wait for them. Those of others go on: who waits for those has no part in it.
    pub(super) fn find(&mut self, failed: &mut Failed) {
        self.gathered.retain(|Gathered { turns, .. }| !turns[0].is_empty());
        for gathered in &mut self.gathered {
            if let Err(error) = gathered.find() {
                failed.stop(&gathered.communicator, error);
            }
        }
    }

    /// Has the first stream of each communicator come behind what the communicator was called for before:
    /// where there are others, they meet it, or what is launched there. What keeps it from that keeps the
    /// calls from starting, as in [`Calls::find`].
    pub(super) fn line_up(&self, failed: &mut Failed) {
        for Streams { communicator, first, .. } in &self.streams {
            let is_its = |other: &Arc<Communicator>| Arc::ptr_eq(other, communicator);
            let messages = self.gathered.iter().all(|all| all.collectives == 0 || !is_its(&all.communicator))
                && self
                    .others
                    .iter()
                    .all(|one| one.request.kind.point_to_point() || !is_its(&one.communicator));
            failed.or_start(communicator, || communicator.line_up(*first, messages));
        }
    }

    /// Reads the factors that devices have.
    pub(super) fn resolve(&mut self, failed: &mut Failed) {
        for gathered in &mut self.gathered {
            let communicator = gathered.communicator.clone();
            failed.or_start(&communicator, || gathered.resolve());
        }
        for launch in &mut self.others {
            let communicator = launch.communicator.clone();
            failed.or_start(&communicator, || launch.resolve());
        }
        if failed.stopped.is_empty() {
            return;
        }
        let goes_on = |communicator: &Arc<Communicator>| !failed.stops(communicator);
        self.gathered.retain(|gathered| goes_on(&gathered.communicator));
        self.others.retain(|launch| goes_on(&launch.communicator));
    }

    /// Puts the communicators into an order that all ranks have alike, and keeps that of each one's calls:
    /// whichever was called first here, on one stream they do not wait for each other in a circle.
    pub(super) fn order(&mut self) {
        put_in_order(&mut self.gathered, |gathered| id(&gathered.communicator));
        put_in_order(&mut self.others, |launch| id(&launch.communicator));
    }

    /// Gives the collectives that were gathered to their streams, the ranks of each communicator in turns.
    pub(super) fn give_collectives(&mut self, failed: &mut Failed) {
        for ranks in self.gathered.chunk_by_mut(|one, other| id(&one.communicator) == id(&other.communicator))
        {
            let most = ranks.iter().map(|rank| rank.ready.len()).max().unwrap_or(0);
            for turn in 0..most {
                for Gathered { communicator, ready, .. } in &mut *ranks {
                    let Some(ready) = ready.get_mut(turn) else { continue };
                    failed.or_start(communicator, || {
                        communicator.called_group()?;
                        // SAFETY: the client's promise: the buffers are valid until the calls are complete,
                        // and the streams live.
                        unsafe { ready.give_collectives() }
                    });
                }
            }
        }
    }

    /// Gives the messages that were gathered to their streams.
    pub(super) fn give_messages(&mut self, failed: &mut Failed) {
        for Gathered { communicator, ready, .. } in &mut self.gathered {
            let Some(ready) = ready.first_mut() else { continue };
            failed.or_start(communicator, || {
                communicator.called_group()?;
                // SAFETY: as above.
                unsafe { ready.give_messages() }
            });
        }
    }

    /// The call, if there is but one, and that is not gathered.
    pub(super) fn only_other(&mut self) -> Option<Launch> {
        let is_alone = self.count == 1 && self.others.len() == 1;
        if is_alone { self.others.pop() } else { None }
    }
}

/// The same for all ranks of a communicator; 0 for those of one rank.
pub(super) fn id(communicator: &Communicator) -> u64 {
    communicator.group().map_or(0, Context::id)
}

/// Puts calls into the order of their communicators, and leaves those of one in theirs. (The standard
/// library's stable sort is 7 KB for each kind of calls.)
fn put_in_order<T>(calls: &mut Vec<T>, id: impl Fn(&T) -> u64) {
    // Nearly always there is one.
    if calls.is_sorted_by_key(&id) {
        return;
    }
    let mut places: Vec<(u64, usize)> = calls.iter().map(&id).zip(0..).collect();
    places.sort_unstable();
    let mut unordered: Vec<Option<T>> = std::mem::take(calls).into_iter().map(Some).collect();
    calls.extend(places.into_iter().filter_map(|(_, place)| unordered[place].take()));
}

/// Streams that a group makes one.
pub(super) struct Joined {
    communicator: Arc<Communicator>,
    first: Stream,
    others: Vec<Stream>,
}

impl Joined {
    /// Refuses streams of several captures.
    fn new(streams: &Streams) -> Result<Joined> {
        let devices = devices()?;
        let borrow = |stream: usize| {
            // SAFETY: the client's streams live.
            unsafe { Stream::borrow(&devices, streams.device, StreamHandle(stream)) }
        };
        let others = streams.others.iter().map(|&stream| borrow(stream)).collect::<Result<Vec<Stream>>>()?;
        let (communicator, first) = (streams.communicator.clone(), borrow(streams.first)?);
        let joined = Joined { communicator, first, others };
        joined::in_one_capture(&joined.first, &joined.others)?;
        Ok(joined)
    }

    /// Whose they are.
    pub(super) fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// Has each wait for what all of them were given before. If that cannot be, the communicator fails: none
    /// of its calls is to begin, or what the streams are given next would not come after them.
    pub(super) fn meet(&self) -> Result<()> {
        let met = joined::meet(&self.first, &self.others);
        self.communicator.group()?.or_fail_in_list(met, || self.first.capture())
    }
}
