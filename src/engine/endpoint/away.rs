//! Threads that turn to the program's code: its functions that combine, its callbacks.
//!
//! Such code takes as long as it likes, and the thread that is in it looks at nothing. Others leave to a
//! thread what it would do if it looked on:
//! - the service thread and the attendant leave operations to those that wait ([`Waits`]);
//! - the service thread leaves the bell to those that sleep ([`Sleepers::any_relied_on`]), and so does who has
//!   something that does not ring;
//! - who gives up the bell has one of those who sleep take it ([`Sleepers::hand_on`]).
//!
//! So whoever calls the program says so before ([`Endpoint::go_away`]). From then on none of them counts on
//! this thread, and what was left to it is another's: a sleeper's, or else the library's.
//!
//! [`Sleepers::any_relied_on`]: super::sleepers::Sleepers::any_relied_on
//! [`Sleepers::hand_on`]: super::sleepers::Sleepers::hand_on

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Endpoint;

thread_local! {
    /// Where the count is among which this thread is; 0: it is among none.
    static COUNTED_AT: Cell<usize> = const { Cell::new(0) };
}

fn place(count: &AtomicUsize) -> usize {
    std::ptr::from_ref(count).addr()
}

/// Counts this thread among those that wait, and move what they wait beside, until it is dropped.
pub(super) struct Waits<'a> {
    count: &'a AtomicUsize,
    /// Among whom it was before: in the program's code nobody.
    before: usize,
    /// It is of this thread.
    _thread: PhantomData<*const ()>,
}

impl Waits<'_> {
    pub(super) fn among(count: &AtomicUsize) -> Waits<'_> {
        count.fetch_add(1, Ordering::SeqCst);
        Waits { count, before: COUNTED_AT.replace(place(count)), _thread: PhantomData }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        COUNTED_AT.set(self.before);
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Nobody counts on this thread until this is dropped.
#[must_use = "it is back when this is dropped"]
pub struct Away<'a> {
    /// Among whom it counts again then.
    count: Option<&'a AtomicUsize>,
    _thread: PhantomData<*const ()>,
}

impl<'a> Away<'a> {
    /// Takes this thread out of the one of these counts among which it is. Whether it was the last.
    fn from(counts: [&'a AtomicUsize; 2]) -> (Away<'a>, bool) {
        let count = counts.into_iter().find(|count| place(count) == COUNTED_AT.get());
        let was_last = count.is_some_and(|count| {
            COUNTED_AT.set(0);
            count.fetch_sub(1, Ordering::SeqCst) == 1
        });
        (Away { count, _thread: PhantomData }, was_last)
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.count {
            count.fetch_add(1, Ordering::SeqCst);
            COUNTED_AT.set(place(count));
        }
    }
}

impl Endpoint {
    /// This thread turns to the program's code, and is back when the answer is dropped. It may be any thread,
    /// and be away already.
    pub fn go_away(&self) -> Away<'_> {
        let (away, was_last) = Away::from([&self.sleepers.waiting, self.attendant.count()]);
        self.leave_bell();
        if was_last {
            self.leave_to_library();
        }
        away
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_away_counts_among_nobody_until_it_is_back() {
        let counts = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let all = || counts.each_ref().map(|count| count.load(Ordering::SeqCst));
        let leaves = || Away::from(counts.each_ref());
        assert!(!leaves().1, "it was not among them");
        for index in [0, 1] {
            let alone = |waiting| if index == 0 { [waiting, 0] } else { [0, waiting] };
            let waits = Waits::among(&counts[index]);
            let (away, was_last) = leaves();
            assert_eq!((was_last, all()), (true, [0, 0]));
            // The program may wait in its own code, and its code be called in that.
            let within = Waits::among(&counts[index]);
            assert_eq!(all(), alone(1));
            drop(leaves());
            assert_eq!(all(), alone(1));
            drop(within);
            assert!(!leaves().1, "it is away already");
            drop(away);
            assert_eq!(all(), alone(1));
            counts[index].fetch_add(1, Ordering::SeqCst);
            assert!(!leaves().1, "another waits");
            counts[index].fetch_sub(1, Ordering::SeqCst);
            drop(waits);
            assert_eq!(all(), [0, 0]);
        }
    }
}
