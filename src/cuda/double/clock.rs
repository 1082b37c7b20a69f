//! A driver double goes on when nobody asks it, as devices do.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A thread that runs tasks until this is dropped.
pub(crate) struct Clock(Arc<AtomicBool>);

impl Clock {
    /// Of a device that has nothing else to do.
    pub(crate) fn start(double: &Arc<Double>) -> Clock {
        Clock::with_rests(double, Duration::ZERO, Duration::from_micros(100))
    }

    /// One task now and then.
    pub(crate) fn start_slow(double: &Arc<Double>) -> Clock {
        Clock::with_rests(double, Duration::from_micros(50), Duration::from_micros(200))
    }

    /// Rests for so long after a task, and when none can run.
    fn with_rests(double: &Arc<Double>, busy: Duration, idle: Duration) -> Clock {
        let stop = Arc::new(AtomicBool::new(false));
        let (double, stopped) = (double.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut moved_at = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let moves = double.step();
                if moves || double.is_idle() {
                    moved_at = Instant::now();
                } else if moved_at.elapsed() > STUCK {
                    double.note_standstill();
                }
                std::thread::sleep(if moves { busy } else { idle });
            }
        });
        Clock(stop)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
