//! What is left of an exchange that nobody calls any more: memory that kernels, here or of other ranks, may
//! still use.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::Kernels;
use super::board::Boards;
use super::exchange::OneSided;
use super::window::Windows;
use crate::cuda::context::Devices;
use crate::cuda::driver::{Priority, least_limit, retry};
use crate::cuda::event::Event;
use crate::cuda::exchange::Fault;
use crate::cuda::slab::{Arena, Kept, Opened};
use crate::cuda::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sys;

/// What the ranks have agreed on for their kernels: the least that any of them has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// The most blocks that the callers allow kernels; 0: no limit.
    pub(super) max_blocks: u32,
    /// The GPUs' multiprocessors.
    pub(super) multiprocessors: u32,
    /// The most blocks that the table has for a kernel.
    pub(super) table_blocks: u32,
    /// Whether all ranks are of one process.
    pub(super) one_process: bool,
}

impl Room {
    /// The most blocks that a call may have, which allows so many itself; 0, for both: no limit.
    pub(super) fn allowed(&self, max_blocks: u32) -> u32 {
        least_limit([self.max_blocks, max_blocks])
    }

    /// The same for kernels that fill a multiprocessor with a block: more blocks would wait for each other. 0
    /// where the table has none that do not fit.
    pub(super) fn blocks(&self, max_blocks: u32) -> u32 {
        match self.allowed(max_blocks) {
            0 if self.table_blocks <= self.multiprocessors => 0,
            0 => self.multiprocessors,
            limit => limit.min(self.multiprocessors),
        }
    }
}

/// What streams were given of calls that failed in their course, for which no other event stands.
#[derive(Debug)]
pub(super) struct Astray {
    /// Complete when they have done it.
    end: Event,
    any: AtomicBool,
    /// Whether nobody can know when that is: the driver has refused to say.
    lost: AtomicBool,
}

impl Astray {
    /// Nothing yet.
    pub(super) fn new(devices: &Arc<Devices>, device: u32) -> Result<Astray> {
        Ok(Astray {
            end: Event::new(devices, device)?,
            any: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        })
    }

    /// What `stream` has been given so far, too. For one thread at a time.
    pub(super) fn add(&self, stream: &Stream) {
        // Behind that of other streams.
        match stream.wait(&self.end).and_then(|()| self.end.record(stream)) {
            Ok(()) => self.any.store(true, Ordering::Release),
            Err(error) => self.lose(&error),
        }
    }

    /// Nobody will know when it is done.
    pub(super) fn lose(&self, error: &Error) {
        log::warn!("memory of an exchange that failed is not given back: {error}");
        self.lost.store(true, Ordering::Release);
    }

    /// Whether there has been nothing.
    pub(super) fn is_nothing(&self) -> bool {
        ![&self.any, &self.lost].into_iter().any(|flag| flag.load(Ordering::Acquire))
    }

    /// Whether the streams have done it, as far as anybody knows.
    fn is_done(&self) -> Result<bool> {
        if self.any.load(Ordering::Acquire) { self.end.query() } else { Ok(true) }
    }
}

/// The parts of an exchange that outlive it.
#[derive(Debug)]
pub(super) struct Parts {
    /// Complete when this rank's last kernel has left, as far as it was not a graph's.
    pub(super) last: Event,
    /// For one call at a time among those.
    pub(super) mark: Event,
    /// Within a capture: its last kernel.
    pub(super) within: Event,
    /// Complete when this rank has done the replays of graphs that are mixed with other calls.
    pub(super) replayed: Event,
    /// What none of these stands for.
    pub(super) astray: Astray,
    /// Of operations that are in no order with calls.
    pub(super) one_sided: OneSided,
    /// For calls that name no stream.
    pub(super) stream: Stream,
    /// For what must not wait for callers' streams, where calls go between hosts, all ranks are of one
    /// process, or there have been windows. Made beforehand: the driver may wait for those streams when it
    /// makes one.
    pub(super) urgent: OnceCell<Stream>,
    pub(super) kernels: Box<dyn Kernels>,
    /// Whether all ranks knew of the exchange before their first call.
    pub(super) points: bool,
    pub(super) room: Room,
    pub(super) windows: Mutex<Windows>,
    pub(super) fault: Arc<Fault>,
    /// The group's rank that is the first member.
    pub(super) first: u32,
    /// Here the others write, and calls between hosts work.
    pub(super) arena: Arena,
    /// There this rank writes.
    pub(super) _opened: Vec<Arc<Opened>>,
    pub(super) boards: Boards,
    pub(super) said_goodbye: AtomicBool,
    pub(super) fork: u32,
    /// Dropped behind all of that.
    pub(super) life: Arc<()>,
}

impl Parts {
    /// Has [`Parts::urgent`] made. May wait for the GPU.
    pub(super) fn prepare_urgent(&self) -> Result<()> {
        let (devices, device) = (self.last.devices(), self.last.device());
        self.urgent.get_or_try_init(|| Stream::with_priority(devices, device, false, Priority::Highest))?;
        Ok(())
    }

    /// Whether no kernel of this rank runs, or will run. Graphs that are not mixed with other calls are their
    /// owner's to wait for.
    pub(super) fn is_idle(&self) -> Result<bool> {
        Ok(self.last.query()?
            && self.replayed.query()?
            && self.astray.is_done()?
            && self.one_sided.is_done()?)
    }

    /// Whether no stream touches any of this any more.
    fn is_left(&self) -> Result<bool> {
        // The latch is set by a stream of its own.
        let lost = self.astray.lost.load(Ordering::Acquire);
        Ok(!lost && self.is_idle()? && self.urgent.get().map_or(Ok(true), Stream::query)?)
    }
}

impl Kept for Parts {
    fn is_over(&self) -> bool {
        if !self.said_goodbye.load(Ordering::Relaxed) {
            match retry(|| self.is_left()) {
                Ok(false) => return false,
                Ok(true) => {}
                // The device is lost to this process, with everything that ran on it.
                Err(error) => log::debug!("the last call of an exchange: {error}"),
            }
            self.boards.say_goodbye();
            self.said_goodbye.store(true, Ordering::Relaxed);
        }
        self.boards.is_forsaken()
    }
}

/// How long who waits for memory does so before it looks again, at first and at most: each look may start a
/// thread.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// What tells when the parts of an exchange have been given back.
#[derive(Clone, Debug)]
pub struct HeldMemory {
    devices: Arc<Devices>,
    life: Weak<()>,
}

impl HeldMemory {
    pub(super) fn of(parts: &Parts) -> HeldMemory {
        HeldMemory { devices: parts.last.devices().clone(), life: Arc::downgrade(&parts.life) }
    }

    /// Waits until they have been, once the exchange is dropped. Whether they have, by the deadline.
    pub fn await_return(&self, deadline: Deadline) -> bool {
        let start = Instant::now();
        loop {
            self.devices.look_after_kept();
            if self.life.strong_count() == 0 {
                return true;
            }
            if deadline.expired() {
                return false;
            }
            let pause = (start.elapsed() / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            thread::sleep(deadline.remaining_capped(pause));
        }
    }
}

/// Gives the parts back as soon as nobody uses them. Never waits.
pub(super) fn retire(parts: Parts) {
    if parts.fork != sys::fork::generation() {
        // All of it is the parent's, and CUDA does not work here.
        let mut parts = ManuallyDrop::new(parts);
        parts.boards.abandon();
        return;
    }
    let devices = parts.last.devices().clone();
    // Whoever ends this may have to end others whose kernels wait on this GPU, and the driver for them.
    let has_failed = parts.fault.is_aborted();
    devices.keep(Box::new(parts), has_failed);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::cuda::double::{Double, Order};

    /// Of an exchange that failed and that a peer has not left.
    struct Asked(Arc<AtomicUsize>);

    impl Kept for Asked {
        fn is_over(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed);
            false
        }
    }

    #[test]
    fn who_waits_for_memory_has_what_has_failed_asked_less_and_less_often() {
        let devices = Devices::over(Double::new(1, Order::Eager)).expect("a device");
        let (asked, life) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
        devices.keep(Box::new(Asked(asked.clone())), true);
        let memory = HeldMemory { devices, life: Arc::downgrade(&life) };
        assert!(!memory.await_return(Deadline::after(Duration::from_millis(500))));
        let asked = asked.load(Ordering::Relaxed);
        assert!(asked < 200, "{asked} times");
        drop(life);
        assert!(memory.await_return(Deadline::NEVER));
    }
}
