//! How a rank leaves a group whose other members go on: as at the end of a context, but what is still called
//! here is refused.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Group;
use crate::engine::device::Way;
use crate::engine::endpoint::lock;
use crate::error::Error;
use crate::sys::process;

/// How long whoever leaves waits for what the driver says.
const ANSWER: Duration = Duration::from_millis(50);

/// Whether nothing of this rank is under way.
pub enum Rest {
    /// It is known.
    Known(bool),
    /// This asks the driver, which may be waiting for what whoever wants to know is to end: another thread
    /// does that. It decides nothing, and may come to its answer when nobody wants it any more.
    Asked(Box<dyn FnOnce() -> bool + Send>),
}

impl Rest {
    /// Whether all of these are at rest, for sure: not where the driver does not say so in that time, or no
    /// thread can ask it.
    fn are_sure(rests: [Rest; 2], patience: Duration) -> bool {
        let mut asked = Vec::new();
        for rest in rests {
            match rest {
                Rest::Known(true) => {}
                Rest::Known(false) => return false,
                Rest::Asked(ask) => asked.push(ask),
            }
        }
        if asked.is_empty() {
            return true;
        }
        let answer = process::aside("unisono-leave", || asked.into_iter().all(|ask| ask()));
        answer.is_ok_and(|told| told.recv_timeout(patience) == Ok(true))
    }
}

impl Group {
    /// Fails the group with `why` on this rank alone, if nothing of this rank is under way: what others have
    /// called may be complete by what it has sent. Those who wait for it, or come to, hear that it has left,
    /// however long this group is held here; in what has failed nothing is done. `elsewhere` looks for what the
    /// group does not know. Whether this rank has left. Asks no driver itself: that may be waiting for kernels
    /// which only an abort ends.
    pub fn leave(&self, why: &Error, elsewhere: impl FnOnce() -> Rest) -> bool {
        if self.endpoint.check_fork().is_err() {
            return false;
        }
        let before = self.orders.lock().numbers();
        // They see the calls before these numbers.
        let is_at_rest = || Rest::are_sure([self.rest_on_device(), elsewhere()], ANSWER);
        if self.endpoint.has_running(self) || !is_at_rest() {
            return false;
        }
        let orders = self.orders.lock();
        let numbers = orders.numbers();
        if numbers != before || orders.have_turns() {
            return false;
        }
        let telling = lock(&self.telling);
        if self.failure.set(why.clone()).is_err() {
            return false;
        }
        self.left.store(true, Ordering::Release);
        self.failed.store(true, Ordering::Release);
        self.endpoint.note_left(self.id, numbers, why);
        drop(telling);
        // No call has begun up to here, and none will.
        drop(orders);
        // Behind all that it has sent. Now, not as the group goes: who has kept calls of it, say, holds it for
        // long. On devices the boards tell.
        self.endpoint.messages().forget(self.id, None, self.members.clone(), false);
        self.endpoint.see_out();
        self.end_kernels();
        true
    }

    /// Whether no kernels of this rank run, and none of any rank may be launched as parts of graphs: nothing but
    /// a failure ends what waits for those.
    fn rest_on_device(&self) -> Rest {
        self.devices().and_then(Way::exchange).map_or(Rest::Known(true), |exchange| exchange.rest())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn asked(ask: impl FnOnce() -> bool + Send + 'static) -> Rest {
        Rest::Asked(Box::new(ask))
    }

    #[test]
    fn what_the_driver_says_in_time_counts_and_its_silence_is_no_rest() {
        assert!(Rest::are_sure([Rest::Known(true), Rest::Known(true)], Duration::ZERO));
        let held = Arc::new(());
        let holds = || {
            let held = held.clone();
            asked(move || Arc::strong_count(&held) > 1)
        };
        assert!(Rest::are_sure([holds(), holds()], LONG));
        assert_eq!(Arc::strong_count(&held), 1, "who has answered keeps nothing");
        for busy in [asked(|| false), asked(|| panic!("nobody knows")), Rest::Known(false)] {
            assert!(!Rest::are_sure([holds(), busy], LONG));
        }

        let (start, (end, silent)) = (Instant::now(), mpsc::channel::<()>());
        let silence = asked(move || silent.recv_timeout(LONG).is_ok());
        assert!(!Rest::are_sure([silence, holds()], ANSWER));
        end.send(()).expect("it is waited for still");
        // Nobody hears the answer.
        while Arc::strong_count(&held) > 1 {
            assert!(start.elapsed() < LONG, "something is kept");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
