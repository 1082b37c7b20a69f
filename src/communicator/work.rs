//! Work handles: operations under way, as the caller sees them.

use std::sync::Arc;

use super::Completion;
use crate::deadline::Deadline;
use crate::engine::operation::{Callback, Running};
use crate::error::{Result, fail};

/// An operation under way. Cheap to clone; all methods from any thread. Dropping it lets the operation run on.
#[derive(Clone)]
pub struct Work(State);

#[derive(Clone)]
enum State {
    Running(Arc<Running>),
    /// It needed nobody else.
    Ended(Result<Completion>),
}

impl Work {
    pub(super) fn running(running: Arc<Running>) -> Work {
        Work(State::Running(running))
    }

    pub(super) fn ended(result: Result<Completion>) -> Work {
        Work(State::Ended(result))
    }

    /// Waits in this thread, moving the operation. An expired `deadline` (not the operation's own) is `Timeout` and
    /// leaves the operation running.
    pub fn wait(&self, deadline: Deadline) -> Result<Completion> {
        match &self.0 {
            State::Ended(result) => result.clone(),
            State::Running(running) => match running.wait(deadline) {
                Some(result) => result,
                None => fail!(Timeout, "the work is still running; wait again, or longer"),
            },
        }
    }

    /// The result if it is there. Never blocks.
    pub fn test(&self) -> Option<Result<Completion>> {
        match &self.0 {
            State::Ended(result) => Some(result.clone()),
            State::Running(running) => {
                let endpoint = running.group().endpoint();
                if let Err(error) = endpoint.check_fork() {
                    return Some(Err(error));
                }
                endpoint.progress(0);
                running.result()
            }
        }
    }

    /// Calls `then` once with the result: at once if it is there, else from the thread that completes the operation.
    /// That may be one of the library's or one that others rely on: `then` may start operations, but must not wait for any.
    pub fn on_complete(&self, then: Callback) {
        match &self.0 {
            State::Ended(result) => then(result.clone()),
            State::Running(running) => running.on_complete(then),
        }
    }

    /// Ends this operation with `Aborted` if it still runs and is a send or a receive; a collective is everybody's and
    /// answers `InvalidUsage`.
    pub fn cancel(&self) -> Result<()> {
        match &self.0 {
            State::Ended(_) => Ok(()),
            State::Running(running) if running.result().is_some() => Ok(()),
            State::Running(running) if running.is_point_to_point() => {
                running.cancel();
                Ok(())
            }
            State::Running(_) => {
                fail!(InvalidUsage, "a collective cannot be cancelled alone; abort its context")
            }
        }
    }
}
