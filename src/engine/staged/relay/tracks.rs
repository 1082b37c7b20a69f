//! What relayed pieces run on: streams, and an event for each piece under way. Kept by the process between calls.

use std::sync::{Arc, Mutex};

use super::super::resources::Ringer;
use super::lanes::Lanes;
use super::route::LANES;
use crate::cuda::context::Devices;
use crate::cuda::driver::Priority;
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::engine::endpoint::lock;
use crate::error::{Result, fail};

/// A stream, which calls share, and the event of one piece, whose steps run on this stream or another; the host sees every step
/// end before it gives the next.
#[derive(Debug)]
pub(super) struct Track {
    pub(super) stream: Arc<Stream>,
    /// After the last step of the piece.
    step: Event,
    /// Whether a step has been given that was not seen to end,
    busy: bool,
    /// and whether somebody has gone to sleep since.
    rings: bool,
}

/// Tracks of a call that was given up before its steps had ended, and the lanes that they use.
struct Parked {
    /// After all of them.
    tail: Event,
    tracks: Vec<Track>,
    lanes: Arc<Lanes>,
}

struct Pool {
    /// As many for each device as a call takes, made before any stream waits for a call.
    streams: Vec<Arc<Stream>>,
    /// Which of them is next.
    turn: usize,
    steps: Vec<Event>,
    parked: Vec<Parked>,
}

static POOL: Mutex<Pool> =
    Mutex::new(Pool { streams: Vec::new(), turn: 0, steps: Vec::new(), parked: Vec::new() });

/// Makes the streams of a device, once: see [`resources::prepare`](super::super::resources::prepare). They never wait for the
/// host.
pub(in super::super) fn prepare(devices: &Arc<Devices>, device: u32) -> Result<()> {
    let make = |_| Stream::with_priority(devices, device, false, Priority::Highest).map(Arc::new);
    let streams = (0..LANES).map(make).collect::<Result<Vec<_>>>()?;
    lock(&POOL).streams.extend(streams);
    Ok(())
}

impl Track {
    /// A track on a device.
    pub(super) fn take(devices: &Arc<Devices>, device: u32) -> Result<Track> {
        let mut pool = lock(&POOL);
        let done = pool.unpark();
        let fits = |step: &Event| step.device() == device && Arc::ptr_eq(step.devices(), devices);
        let kept = pool.steps.iter().position(fits).map(|index| pool.steps.swap_remove(index));
        pool.turn = pool.turn.wrapping_add(1);
        let of_device =
            |stream: &&Arc<Stream>| stream.device() == device && Arc::ptr_eq(stream.devices(), devices);
        let stream = pool.streams.iter().filter(of_device).nth(pool.turn % LANES as usize).cloned();
        drop(pool);
        drop(done);
        let Some(stream) = stream else { fail!(Internal, "GPU {device} has no streams for relayed calls") };
        let step = match kept {
            Some(step) => step,
            None => Event::new(devices, device)?,
        };
        Ok(Track { stream, step, busy: false, rings: false })
    }

    /// A step of the piece has been given to `stream`.
    pub(super) fn given(&mut self, stream: &Stream) -> Result<()> {
        (self.busy, self.rings) = (true, false);
        self.step.record(stream)
    }

    /// As [`Track::given`], to the stream that it has itself.
    pub(super) fn given_here(&mut self) -> Result<()> {
        (self.busy, self.rings) = (true, false);
        self.step.record(&self.stream)
    }

    /// Whether every step that was given has ended.
    pub(super) fn is_idle(&mut self) -> Result<bool> {
        if self.busy && self.step.query()? {
            self.busy = false;
        }
        Ok(!self.busy)
    }

    /// Somebody goes to sleep: has the end of the step be looked for soon.
    pub(super) fn ring(&mut self, ringer: &Arc<Ringer>) -> Result<()> {
        if self.busy && !self.rings {
            ringer.ring();
            self.rings = true;
        }
        Ok(())
    }

    /// Has `other` wait for everything here.
    pub(super) fn precede(&self, other: &Track) -> Result<()> {
        self.step.record(&self.stream)?;
        other.stream.wait(&self.step)
    }
}

/// Takes back tracks whose steps have all ended.
pub(super) fn give_back(tracks: Vec<Track>) {
    lock(&POOL).steps.extend(tracks.into_iter().map(|track| track.step));
}

/// Takes back tracks, and lets go of the lanes, once `tail` is complete.
pub(super) fn park(tail: Event, tracks: Vec<Track>, lanes: Arc<Lanes>) {
    lock(&POOL).parked.push(Parked { tail, tracks, lanes });
}

impl Pool {
    /// Looks whether the steps of calls that were given up have ended. The lanes that they used, to be dropped without
    /// the lock.
    fn unpark(&mut self) -> Vec<Arc<Lanes>> {
        let mut done = Vec::new();
        let mut index = 0;
        while index < self.parked.len() {
            match self.parked[index].tail.query() {
                Ok(true) => {
                    let Parked { tracks, lanes, .. } = self.parked.swap_remove(index);
                    self.steps.extend(tracks.into_iter().map(|track| track.step));
                    done.push(lanes);
                }
                Ok(false) => index += 1,
                // The device is lost to this process, and what it was given with it.
                Err(_) => std::mem::forget(self.parked.swap_remove(index)),
            }
        }
        done
    }
}
