//! How a thread polls a device: at once for a while, then with a sleep in between.

use std::time::{Duration, Instant};

use crate::deadline::Deadline;

/// How long it spins.
const SPIN: Duration = Duration::from_micros(50);

/// Its poll interval after that.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Between two polls, of a wait that began at `start`.
pub fn pause(start: Instant, deadline: Deadline) {
    if start.elapsed() < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(deadline.remaining_capped(POLL_INTERVAL));
    }
}
