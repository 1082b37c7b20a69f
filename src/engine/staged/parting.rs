//! How a call that is given up parts from side streams that may still copy for it.

use std::sync::Arc;
use std::time::Duration;

use crate::cuda::driver::retry;
use crate::cuda::event::Event;
use crate::cuda::stream::Stream;
use crate::cuda::word::Word;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sys;

/// How long it waits for its copies, when no stream does.
const COPIES: Duration = Duration::from_secs(1);

/// Waits, but not for ever, until what no stream waits for has ended. Whether it has.
pub(super) fn wait(has_ended: impl Fn() -> Result<bool>) -> bool {
    let until = Deadline::after(COPIES);
    while !until.expired() {
        match retry(&has_ended) {
            Ok(true) => return true,
            Ok(false) => sys::process::yield_now(),
            Err(_) => break,
        }
    }
    false
}

/// When nothing touches any more what the call ran in.
pub(super) enum Tail {
    /// When this is complete.
    Event(Event),
    /// That is so already.
    Ended,
}

/// Has the caller's memory come back to it behind the copies under way on `streams`. `tail` comes behind them
/// all, and so does the release of `exit`, if a stream waits for that; or the driver has refused something of
/// it. `None`: nobody will know when they end.
pub(super) fn part(exit: Option<&Arc<Word>>, streams: &[&Stream], tail: Result<Event>) -> Option<Tail> {
    let until = Deadline::after(COPIES);
    let error = match tail {
        Ok(tail) => {
            while exit.is_none() && matches!(retry(|| tail.query()), Ok(false)) && !until.expired() {
                sys::process::yield_now();
            }
            return Some(Tail::Event(tail));
        }
        Err(error) => error,
    };
    // A driver that refuses an event, say, goes on with the copies that it has taken.
    let are_idle =
        || -> Result<bool> { streams.iter().try_fold(true, |idle, stream| Ok(idle && stream.query()?)) };
    loop {
        match retry(are_idle) {
            Ok(true) => {
                if let Some(exit) = exit {
                    exit.release();
                }
                return Some(Tail::Ended);
            }
            Ok(false) if !until.expired() => sys::process::yield_now(),
            Ok(false) | Err(_) => break,
        }
    }
    log::warn!("a call that failed leaves what it ran in behind: {error}");
    // A side stream may have been given that, too.
    if let Some(exit) = exit {
        exit.force();
    }
    None
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::StreamOrder;
    use super::super::resources::{Entry, PinnedLane};
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::double::{Double, Order};

    /// Copies that each stream has been given.
    const GIVEN: usize = 10;

    /// That of a call on the first device which came behind nothing, and which has no kernels; a stream waits
    /// for `exit`.
    pub(in super::super) fn order_of_nothing(devices: &Arc<Devices>, exit: Option<Arc<Word>>) -> StreamOrder {
        let (devices, entry) = (devices.clone(), Entry::nothing());
        StreamOrder { devices, device: 0, entry, errand: None, exit, copier: None, asking: None }
    }

    /// Whatever the driver refuses while a call is given up, nothing is written when the caller has its
    /// memory back: when `leave` comes back, or when the stream goes on that waits for the call.
    pub(in super::super) fn memory_comes_back_behind_copies<T>(
        begin: impl Fn(&Arc<Devices>) -> T,
        streams: impl Fn(&T) -> Vec<&Stream>,
        leave: impl Fn(T, &StreamOrder),
    ) {
        for waits in [false, true] {
            for failing in 0.. {
                // Nothing runs before somebody asks.
                let double = Double::new(1, Order::RoundRobin);
                let devices = Devices::over(double.clone()).expect("a driver");
                let call = begin(&devices);
                let exit = waits.then(|| Arc::new(devices.word(0).expect("a word")));
                let order = order_of_nothing(&devices, exit);
                let lane = PinnedLane::take(&devices, 0, 1).expect("a lane");
                // SAFETY: it is this test's, and has as many bytes.
                unsafe { lane.address().write(7) };
                let mut memory = Vec::new();
                for stream in streams(&call) {
                    for _ in 0..GIVEN {
                        memory.push(double.memory(0, 1));
                        // SAFETY: both live until all streams are through.
                        let given =
                            unsafe { stream.copy_to_device(memory[memory.len() - 1], lane.address(), 1) };
                        given.expect("it is given");
                    }
                }
                double.fail_call(failing);
                leave(call, &order);
                let refused = !double.is_to_fail();
                while order.exit.as_ref().is_some_and(|exit| !exit.is_released()) {
                    assert!(double.step(), "call {failing} was refused: the stream waits for ever");
                }
                let late = memory.iter().filter(|&&at| double.peek(at, 1) != [7]).count();
                assert_eq!(late, 0, "call {failing} was refused, and a stream waits: {waits}");
                double.drain();
                assert_eq!(double.complaints(), Vec::<String>::new());
                if !refused {
                    assert!(failing > 5, "only {failing} calls");
                    break;
                }
            }
        }
    }
}
