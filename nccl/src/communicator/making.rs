//! The children that are being made of a communicator, and what it tells of those that could not be made.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Communicator;
use crate::error::Error;

/// The children of a communicator that are being made, and that could not be.
#[derive(Default)]
pub(super) struct Children {
    making: Mutex<Vec<Arc<Communicator>>>,
    unmade: Mutex<Unmade>,
}

/// What a communicator tells of its children: see [`Making`].
#[derive(Default)]
pub(super) struct Unmade {
    /// The first failure to make one that was begun since it was stopped last.
    pub(super) first: Option<Error>,
    /// How often it was stopped on purpose: that it was aborted is no failure.
    pub(super) stops: u32,
    /// Whether its client has ended it.
    pub(super) ended: bool,
}

/// A child that is being made of a communicator, until this is dropped. It does not hold the parent: whoever
/// sees that the child is made may destroy that, and is to be the last to hold it.
pub(crate) struct Making {
    /// The parent's.
    children: Arc<Children>,
    parent_blocks: bool,
    child: Arc<Communicator>,
    /// How often the parent had been stopped before.
    stops: u32,
}

impl Making {
    pub(crate) fn of(parent: &Arc<Communicator>, child: &Arc<Communicator>) -> Making {
        let mut unmade = parent.unmade();
        let stops = unmade.stops;
        if stops > 0 {
            // Whoever goes on without ranks that have failed may have to try again without more of them.
            unmade.first = None;
        }
        drop(unmade);
        parent.making().push(child.clone());
        // Who ends the parent sees this child, or it is seen here.
        if parent.unmade().ended {
            child.give_up_meeting();
        }
        let (children, parent_blocks) = (parent.children.clone(), parent.config.blocking);
        Making { children, parent_blocks, child: child.clone(), stops }
    }

    /// It has been made, or has not. Where the parent does not block, its client asks the parent, unless the
    /// client has ended the child.
    pub(crate) fn end(self, failure: Option<&Error>) {
        let Some(error) = failure.filter(|_| !self.parent_blocks && !self.child.meeting().aborted) else {
            return;
        };
        let mut unmade = self.children.unmade();
        if unmade.stops == self.stops {
            unmade.first.get_or_insert_with(|| error.clone());
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.children.making().retain(|child| !Arc::ptr_eq(child, &self.child));
    }
}

impl Children {
    fn making(&self) -> MutexGuard<'_, Vec<Arc<Communicator>>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unmade(&self) -> MutexGuard<'_, Unmade> {
        self.unmade.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Communicator {
    pub(super) fn making(&self) -> MutexGuard<'_, Vec<Arc<Communicator>>> {
        self.children.making()
    }

    pub(super) fn unmade(&self) -> MutexGuard<'_, Unmade> {
        self.children.unmade()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::error::Status;
    use crate::place::Place;

    fn never_blocks() -> Arc<Communicator> {
        Communicator::new(Place::Host(0), Config { blocking: false, ..Config::unset() }, Vec::new())
    }

    /// A communicator of this rank alone that does not block, and a child that is being made of it.
    fn parent_and_making() -> (Arc<Communicator>, Arc<Communicator>, Making) {
        let (parent, child) = (never_blocks(), never_blocks());
        parent.meet(|_| Communicator::alone(&parent).cloned().map(Some));
        let making = Making::of(&parent, &child);
        (parent, child, making)
    }

    #[test]
    fn a_child_that_its_client_ends_is_no_failure_of_the_parent() {
        let (parent, child, making) = parent_and_making();
        child.abort();
        making.end(Some(&Error::new(Status::Timeout, "the others have not come")));
        assert_eq!(parent.failure(), None);
    }

    /// Else the thread on which the child is made might be the last to hold it, behind the program's back.
    #[test]
    fn a_child_that_is_being_made_does_not_hold_the_parent() {
        let (parent, _child, making) = parent_and_making();
        assert!(Arc::into_inner(parent).is_some());
        making.end(Some(&Error::new(Status::Timeout, "the others have not come")));
    }

    #[test]
    fn who_aborts_a_parent_ends_the_children_that_are_being_made() {
        let (parent, child, _making) = parent_and_making();
        let made = never_blocks();
        let _as_good_as_over = Making::of(&parent, &made);
        made.meet(|_| Communicator::alone(&made).cloned().map(Some));
        assert_eq!(child.failure(), None);
        parent.abort();
        assert_eq!(child.failure().map(|error| error.status()), Some(Status::Aborted));
        assert_eq!(child.wait(), child.failure().map_or(Ok(()), Err));
        assert_eq!((made.failure(), made.wait()), (None, Ok(())));
        let late = never_blocks();
        let _too_late = Making::of(&parent, &late);
        assert_eq!(late.failure().map(|error| error.status()), Some(Status::Aborted));
    }

    #[test]
    fn children_of_what_was_stopped_are_made_when_it_is_stopped_again() {
        let (parent, before, _making) = parent_and_making();
        parent.stop();
        let since = never_blocks();
        let _making_too = Making::of(&parent, &since);
        parent.stop();
        assert!(before.failure().is_some() && since.failure().is_none());
    }

    /// Else a client that goes on without ranks that have failed would take what they have failed for what
    /// comes of that.
    #[test]
    fn a_parent_that_was_stopped_tells_of_children_that_were_begun_since() {
        let error = |text: &str| Error::new(Status::PeerFailed, text);
        let (parent, child, [before, late]) = {
            let (parent, child, making) = parent_and_making();
            let late = Making::of(&parent, &child);
            (parent, child, [making, late])
        };
        before.end(Some(&error("a rank is gone")));
        assert_eq!(parent.failure(), Some(error("a rank is gone")));
        parent.stop();
        assert_eq!(parent.failure(), None);
        let since = Making::of(&parent, &child);
        late.end(Some(&error("it was stopped")));
        assert_eq!(parent.failure(), None);
        since.end(Some(&error("another rank is gone")));
        assert_eq!(parent.failure(), Some(error("another rank is gone")));
        Making::of(&parent, &child).end(None);
        assert_eq!(parent.failure(), None);
    }
}
