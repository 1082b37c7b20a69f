//! How long a new group may take, all its steps together.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{Error, Status};

/// How much longer than the deadline ranks that have come may take for what they set up together: who comes
/// at the last moment is in time.
const SETTLING: Duration = Duration::from_secs(1);

/// By when a new group is to be there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    began: Instant,
    /// By then all its ranks have come,
    pub(super) come: Deadline,
    /// and by then they have set up what they have together.
    pub(super) settled: Deadline,
}

impl Limits {
    /// Of one that this rank begins to make now.
    pub(super) fn begin(timeout: Duration) -> Limits {
        let began = Instant::now();
        let come = Deadline::since(began, timeout);
        Limits { began, come, settled: come.postponed(SETTLING) }
    }

    /// All its ranks have come: what they still wait for each other in is a part of setting up.
    pub(super) fn have_come(self) -> Limits {
        Limits { come: self.settled, ..self }
    }

    /// Why the group of that `name` was not set up. A step has what those before it have left: the whole is
    /// told, too.
    pub(super) fn tell(&self, name: &str, error: Error) -> Error {
        match error.status() {
            Status::Timeout => {
                let after = self.began.elapsed().as_secs_f64();
                error.context(format_args!("'{name}' is not there {after:.1} s after its creation began"))
            }
            _ => error,
        }
    }
}
