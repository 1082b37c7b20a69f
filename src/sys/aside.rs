//! Values whose end is another thread's affair.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use super::{fork, process};

/// A value that is dropped on a thread of its own, since that may take a moment, or wait for what only this
/// thread can bring to its end; and by the process alone that made it, since a forked child has its parent's.
/// Where there is no thread to be had it is never dropped, which is better.
pub struct Aside<T: Send + 'static> {
    value: ManuallyDrop<T>,
    fork: u32,
    /// What it means that it is never dropped.
    otherwise: &'static str,
}

impl<T: Send + 'static> Aside<T> {
    /// Holds a value. The log has `otherwise` if it is never dropped.
    pub fn new(value: T, otherwise: &'static str) -> Aside<T> {
        Aside { value: ManuallyDrop::new(value), fork: fork::generation(), otherwise }
    }

    /// Whether this process made it.
    pub fn is_ours(&self) -> bool {
        self.fork == fork::generation()
    }
}

impl<T: Send + 'static> Drop for Aside<T> {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // SAFETY: taken once, here.
        let value = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.value) });
        let end = move || drop(ManuallyDrop::into_inner(value));
        if let Err(error) = process::spawn("unisono-aside", end) {
            log::warn!("{}: {error}", self.otherwise);
        }
    }
}

impl<T: Send + 'static> Deref for Aside<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + 'static> DerefMut for Aside<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    use super::*;

    struct Tells(mpsc::Sender<ThreadId>);

    impl Drop for Tells {
        fn drop(&mut self) {
            self.0.send(thread::current().id()).expect("the test listens");
        }
    }

    #[test]
    fn another_thread_drops_it() {
        let (tell, hear) = mpsc::channel();
        drop(Aside::new(Tells(tell), "nobody hears"));
        assert_ne!(hear.recv().expect("it is dropped"), thread::current().id());
    }

    #[test]
    fn a_child_leaves_alone_what_is_its_parents() {
        let (tell, hear) = mpsc::channel();
        let mut inherited = Aside::new(Tells(tell), "nobody hears");
        inherited.fork = inherited.fork.wrapping_sub(1);
        assert!(!inherited.is_ours());
        drop(inherited);
        // The sender is left where it is, and nothing comes.
        assert_eq!(hear.try_recv(), Err(mpsc::TryRecvError::Empty));
    }
}
