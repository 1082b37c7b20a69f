//! Meetings that another thread calls off.

use std::sync::Mutex;

use super::context::Context;
use crate::engine::endpoint::lock;

/// A meeting, as seen by whoever may call it off: while the ranks of a new context, or of a child, find each other and set up what
/// they have together.
#[derive(Default)]
pub struct Recall(Mutex<State>);

#[derive(Default)]
struct State {
    recalled: bool,
    /// The group, once there is one: what is set up over it ends with it.
    group: Option<Context>,
}

impl Recall {
    /// Calls the meeting off: it ends with [`Status::Aborted`](crate::error::Status), within seconds where it waits for a store, and the
    /// other ranks hear of it. From any thread; waits for nobody.
    pub fn recall(&self) {
        let mut state = lock(&self.0);
        state.recalled = true;
        let group = state.group.take();
        drop(state);
        group.inspect(Context::abort);
    }

    /// The meeting is over: nothing of it is left to call off.
    pub fn end(&self) {
        // Dropped without the lock: it may be the last of its group.
        let _group = lock(&self.0).group.take();
    }

    /// Whether it was called off.
    pub(super) fn is_recalled(&self) -> bool {
        lock(&self.0).recalled
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
