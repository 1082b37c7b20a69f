//! Meetings that another thread calls off.

use std::sync::Mutex;

use super::context::Context;
use crate::engine::endpoint::lock;
use crate::error::{Error, Status};

/// A meeting, as seen by whoever may call it off: while the ranks of a new context, or of a child, find each
/// other and set up what they have together.
#[derive(Default)]
pub struct Recall(Mutex<State>);

#[derive(Default)]
struct State {
    recalled: bool,
    /// The group, once there is one: what is set up over it ends with it.
    group: Option<Context>,
    /// Whose failure calls it off.
    tied_to: Option<Context>,
}

impl Recall {
    /// Calls the meeting off: it ends with [`Status::Aborted`](crate::error::Status), within seconds where it
    /// waits for a store, and the other ranks hear of it. From any thread; waits for nobody.
    pub fn recall(&self) {
        let mut state = lock(&self.0);
        state.recalled = true;
        let group = state.group.take();
        drop(state);
        group.inspect(Context::abort);
    }

    /// The meeting is over: nothing of it is left to call off.
    pub fn end(&self) {
        let mut state = lock(&self.0);
        // Dropped without the lock: they may be the last of their groups.
        let _groups = (state.group.take(), state.tied_to.take());
        drop(state);
    }

    /// The ranks of `group` are among those that meet: if it fails until they have found each other, the
    /// meeting is called off for that.
    pub fn tie(&self, group: &Context) {
        let _earlier = lock(&self.0).tied_to.replace(group.clone());
    }

    /// Whether a group's failure calls it off.
    pub(super) fn is_tied(&self) -> bool {
        lock(&self.0).tied_to.is_some()
    }

    /// Why it was called off for this rank, if it was.
    pub(super) fn reason(&self, rank: u32) -> Option<Error> {
        let state = lock(&self.0);
        if state.recalled {
            let text = format!("rank {rank} has called the meeting off");
            return Some(Error::new(Status::Aborted, text));
        }
        let group = state.tied_to.as_ref()?;
        let failure = group.failure()?;
        Some(failure.context(format_args!("group '{}' has failed before", group.name())))
    }

    /// There is a group, over which the rest is set up.
    pub(super) fn enter(&self, group: &Context) {
        let mut state = lock(&self.0);
        if state.recalled {
            drop(state);
            return group.abort();
        }
        let _earlier = state.group.replace(group.clone());
        drop(state);
    }
}
