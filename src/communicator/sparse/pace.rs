//! Work of a call on this rank alone, as it is looked at: it stops in the middle, so that deadlines, failures
//! and other calls have their turn, and the next look goes on. It is written as what waits is, though nothing
//! wakes it: whoever moves the call looks again.

#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use crate::engine::joint::{Team, share};
use crate::error::Result;

/// Bytes that a thread goes through in one look: some milliseconds, which is what everything else waits at
/// most.
pub(super) const LOOK_BYTES: usize = if cfg!(test) { 64 * 1024 } else { 8 * 1024 * 1024 };

/// Elements that are gone through at a time: after those it may stop.
pub(super) const STRETCH: usize = if cfg!(test) { 100 } else { 8 * 1024 };

/// What an element counts at least whose values are copied or combined,
pub(super) const ELEMENT_BYTES: usize = 64;

/// and one whose index is compared or looked up somewhere: as much as is copied in that time.
pub(super) const LOOKUP_BYTES: usize = 256;

/// Work under way.
pub(super) type Chore<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// Does all of it, and counts the looks.
#[cfg(test)]
pub(super) fn in_looks<T>(pace: &Pace, work: impl Future<Output = T>) -> (T, usize) {
    let mut work = pin!(work);
    let mut looks = 0;
    loop {
        pace.renew();
        looks += 1;
        if let Poll::Ready(done) = look(work.as_mut()) {
            return (done, looks);
        }
    }
}

/// One look at work.
pub(super) fn look<T>(work: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    work.poll(&mut Context::from_waker(Waker::noop()))
}

/// Does all of it.
pub(super) fn at_once<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    loop {
        if let Poll::Ready(done) = look(work.as_mut()) {
            return done;
        }
    }
}

/// How much a call may do in a look.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes of each thread.
    left: AtomicUsize,
}

impl Pace {
    /// That of a call that is looked at.
    pub(super) fn of_looks() -> Pace {
        Pace { left: AtomicUsize::new(LOOK_BYTES) }
    }

    /// That of one that is done at once.
    pub(super) fn free() -> Pace {
        Pace { left: AtomicUsize::new(usize::MAX) }
    }

    /// A new look begins.
    pub(super) fn renew(&self) {
        self.left.store(LOOK_BYTES, Ordering::Relaxed);
    }

    /// Each thread has gone through so many bytes. Stops if that is enough for this look.
    pub(super) async fn spend(&self, bytes: usize) {
        let left = self.left.load(Ordering::Relaxed).saturating_sub(bytes);
        self.left.store(left, Ordering::Relaxed);
        if left == 0 {
            let mut stopped = false;
            poll_fn(|_| match std::mem::replace(&mut stopped, true) {
                false => Poll::Pending,
                true => Poll::Ready(()),
            })
            .await;
        }
    }

    /// As [`share`], in as many looks as it takes. With each task comes about how many bytes it goes through,
    /// all in one look: whoever makes the tasks cuts what is longer than that.
    pub(super) async fn share<T: Send>(
        &self,
        team: &(dyn Team + Sync),
        tasks: Vec<(T, usize)>,
        work: impl Fn(T) -> Result<()> + Send + Sync,
    ) -> Result<()> {
        let (threads, mut tasks) = (team.threads(), tasks.into_iter().peekable());
        loop {
            let left = self.left.load(Ordering::Relaxed).saturating_mul(threads);
            let (mut now, mut all, mut longest) = (Vec::new(), 0_usize, 0);
            while let Some(&(_, bytes)) = tasks.peek()
                && (now.len() < threads || all.saturating_add(bytes) <= left)
            {
                now.extend(tasks.next().map(|(task, _)| task));
                all = all.saturating_add(bytes);
                longest = bytes.max(longest);
            }
            if now.is_empty() {
                return Ok(());
            }
            share(team, now, &work)?;
            self.spend(all.div_ceil(threads).max(longest)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::engine::joint::Alone;

    #[test]
    fn work_stops_when_it_has_gone_through_its_bytes_and_goes_on_at_the_next_look() {
        let pace = Pace::of_looks();
        let mut work = pin!(async {
            for _ in 0..8 {
                pace.spend(LOOK_BYTES / 4).await;
            }
            "done"
        });
        let mut looks = 0;
        let done = loop {
            pace.renew();
            looks += 1;
            if let Poll::Ready(done) = look(work.as_mut()) {
                break done;
            }
        };
        // The second stop is at the very end.
        assert_eq!((done, looks), ("done", 3));
    }

    #[test]
    fn tasks_are_shared_in_their_order_a_few_in_each_look() {
        let (pace, done) = (Pace::of_looks(), Mutex::new(Vec::new()));
        let note = |task: usize| {
            done.lock().expect("no panic").push(task);
            Ok(())
        };
        let tasks = (0..10).map(|task| (task, LOOK_BYTES / 3)).collect();
        let mut work = pin!(pace.share(&Alone, tasks, note));
        let mut lengths = Vec::new();
        loop {
            pace.renew();
            let answer = look(work.as_mut());
            lengths.push(done.lock().expect("no panic").len());
            if let Poll::Ready(answer) = answer {
                answer.expect("no task fails");
                break;
            }
        }
        assert_eq!(*done.lock().expect("no panic"), (0..10).collect::<Vec<_>>());
        assert!(lengths.len() >= 3 && lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn a_task_counts_what_it_goes_through() {
        let (pace, done) = (Pace::of_looks(), Mutex::new(Vec::new()));
        let note = |task: usize| {
            done.lock().expect("no panic").push(task);
            Ok(())
        };
        // A long one is alone with the short ones before it.
        let tasks = (0..40).map(|task| (task, if task % 10 == 9 { LOOK_BYTES } else { 1 })).collect();
        let (answer, looks) = in_looks(&pace, pace.share(&Alone, tasks, note));
        answer.expect("no task fails");
        assert_eq!(*done.lock().expect("no panic"), (0..40).collect::<Vec<_>>());
        assert_eq!(looks, 5, "the last stop is at the very end");
    }

    #[test]
    fn what_is_done_at_once_never_stops() {
        let pace = Pace::free();
        let work = pin!(async {
            for _ in 0..100 {
                pace.spend(LOOK_BYTES).await;
            }
        });
        assert!(look(work).is_ready());
    }
}
