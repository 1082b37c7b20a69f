//! Calls in captures, and how the graphs that they become are ordered with other calls.
//!
//! Calls of one capture come after one another. Where graphs are *mixed* with other calls, each replay also
//! comes after what was called or replayed before it was launched, and what is called or launched later comes
//! after it, whatever the streams: the graph begins by waiting for two events as they are then, and at its
//! end it records one, in a node that nothing else in the graph waits for.

use std::collections::VecDeque;

use super::Parts;
use super::line::Id;
use crate::cuda::driver::GraphRecord;
use crate::cuda::stream::Stream;
use crate::error::{Result, fail};
use crate::settings::{self, switch};

/// Whether graphs are mixed with other calls, where nobody says.
pub(in crate::engine::device) fn mixes_by_default() -> Result<bool> {
    Ok(switch("UNISONO_GRAPH_MIXING", settings::get("UNISONO_GRAPH_MIXING").as_deref())?.unwrap_or(true))
}

/// Captures that are known, the latest ones. What is called in an older one counts as its first call.
const OPEN: usize = 32;

/// The calls of an exchange that were captured.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// The last one of each capture, the latest behind: that may still be under way.
    last: VecDeque<Last>,
    /// Whether some are mixed with other calls.
    mixed: bool,
}

/// The last call of a capture.
#[derive(Debug)]
struct Last {
    capture: u64,
    stream: Id,
    /// Where the graph records that it is done.
    record: Option<GraphRecord>,
}

impl Captured {
    /// Gives a call to `stream`, which is in `capture`.
    pub(super) fn give(
        &mut self,
        parts: &Parts,
        (stream, id): (&Stream, Id),
        capture: u64,
        mixes: bool,
        launch: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<()> {
        let place = self.last.iter().position(|last| last.capture == capture);
        match place {
            Some(place) if self.last[place].stream == id => {}
            // It means the last call that was captured, which is of this capture, or the call was not
            // admitted.
            Some(_) => stream.wait(&parts.within)?,
            None if mixes => {
                stream.wait_at_launch(&parts.last)?;
                stream.wait_at_launch(&parts.replayed)?;
            }
            None => {}
        }
        launch(stream)?;
        // Adds nothing to the graph.
        parts.within.record(stream)?;
        match place.and_then(|place| self.last.remove(place)) {
            Some(last) => self.last.push_back(Last { stream: id, ..last }),
            None => {
                if self.last.len() == OPEN {
                    self.last.pop_front();
                }
                self.last.push_back(Last { capture, stream: id, record: None });
            }
        }
        let Some(Last { record, .. }) = self.last.back_mut() else { return Ok(()) };
        match record {
            // This call comes behind the one before. With an edge from each of them the graph is no chain,
            // and takes longer.
            Some(record) => stream.put_off(record)?,
            None if place.is_none() && mixes => {
                *record = Some(stream.record_at_launch(&parts.replayed)?);
                self.mixed = true;
            }
            None => {}
        }
        Ok(())
    }

    /// Refuses a call on the stream `id`, in `capture`, that has no way to come behind the one before it in
    /// the capture.
    pub(super) fn admit(&self, id: Id, capture: u64) -> Result<()> {
        let before = self.last.iter().position(|last| last.capture == capture);
        match before.map(|place| (&self.last[place], place + 1 == self.last.len())) {
            Some((before, false)) if before.stream != id => fail!(
                InvalidUsage,
                "calls of one communicator alternate between this capture and another: they stay on one stream in each"
            ),
            _ => Ok(()),
        }
    }

    /// Has `stream` wait for the replays that were launched.
    pub(super) fn precede(&self, parts: &Parts, stream: &Stream) -> Result<()> {
        if self.mixed { stream.wait(&parts.replayed) } else { Ok(()) }
    }
}
