//! What a communicator's streams were given, and the order of that: it is in one order, whatever the streams,
//! as with NCCL.
//!
//! One stream, the *last* that was called on, comes behind all calls. A call on another one has that one come
//! behind them first: behind the works that are kept, and behind what GPUs exchange, which is not. Nothing is
//! done for that while a client stays on one stream.

use std::sync::PoisonError;

use unisono::communicator::Work;
use unisono::cuda::driver::StreamHandle;
use unisono::cuda::stream::StreamName;

use super::{Communicator, operation_timeout};
use crate::error::Result;
use crate::place::Place;

/// What was started on a stream.
pub(super) struct Started {
    stream: StreamName,
    /// The same of what was started together.
    number: u64,
    pub(super) work: Work,
}

impl Communicator {
    /// Has a stream that is about to be given calls come behind all calls before. `messages`: whether they
    /// are sends and receives alone.
    pub(crate) fn line_up(&self, stream: usize, messages: bool) -> Result<()> {
        let Place::Device(device) = self.place else { return Ok(()) };
        let (context, handle) = (self.called_group()?, StreamHandle(stream));
        let name = self.name(stream);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_behind = match *last {
            None => true,
            // There may have been another one.
            Some(before) if before != name || matches!(name, StreamName::Unknown(_)) => {
                let works = self.latest_but(name);
                // SAFETY: the client's stream lives.
                unsafe { context.line_up((device, handle), &works, messages, Some(operation_timeout())) }?
            }
            Some(_) => return Ok(()),
        };
        if is_behind {
            *last = Some(name);
        }
        Ok(())
    }

    /// What each stream but this one was given last, of what is kept: all before is done before that.
    fn latest_but(&self, stream: StreamName) -> Vec<Work> {
        let (started, mut latest) = (self.started(), Vec::<(StreamName, u64)>::new());
        let is_latest = |one: &&Started| match latest.iter().find(|(known, _)| *known == one.stream) {
            Some((_, number)) => *number == one.number,
            None => {
                latest.push((one.stream, one.number));
                true
            }
        };
        let others = started
            .iter()
            .rev()
            .filter(|one| one.stream != stream || matches!(stream, StreamName::Unknown(_)));
        others.filter(is_latest).map(|one| one.work.clone()).collect()
    }

    /// Keeps in sight what was started together on `stream`. What the stream was given before is done before
    /// it. What GPUs do alone need not be kept.
    pub(crate) fn keep(&self, stream: usize, works: impl IntoIterator<Item = Work>) {
        let mut works = works.into_iter().peekable();
        if works.peek().is_none() {
            return;
        }
        let stream = self.name(stream);
        let mut started = self.started();
        let number = started.last().map_or(0, |last| last.number + 1);
        // Only looks, and no further than to the first that runs: each call has up to 64 before it. Mostly
        // that is the first of all.
        let runs_on = |work: &Work| work.is_hosted() && !self.is_ended(work.peek());
        let first = started.iter().find(|other| other.stream == stream);
        if !first.is_some_and(|first| runs_on(&first.work)) {
            let mut runs = false;
            started.retain(|other| {
                if other.stream != stream {
                    return true;
                }
                runs |= runs_on(&other.work);
                runs && other.work.is_hosted()
            });
        }
        started.extend(works.map(|work| Started { stream, number, work }));
    }

    /// What tells a stream of its device from others. In host memory there are none.
    fn name(&self, stream: usize) -> StreamName {
        let handle = StreamHandle(stream);
        match (self.place, self.group()) {
            // SAFETY: the client's stream lives.
            (Place::Device(device), Ok(context)) => unsafe { context.stream_name(device, handle) },
            _ => StreamName::Unknown(handle),
        }
    }
}
