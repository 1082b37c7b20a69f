//! Several streams of one device as one: what is given to them together comes after all that each was given
//! before, and what each is given afterwards comes after it.

use super::driver::Capture;
use super::event::Event;
use super::stream::Stream;
use crate::error::{Result, fail};

/// Refuses streams of which some are captured and others are not, or by another graph: one that waits for
/// what is captured joins the capture, and what it is given would be in a graph that nobody may ever replay.
pub fn in_one_capture(first: &Stream, others: &[Stream]) -> Result<()> {
    let capture = first.capture()?;
    for other in others {
        if other.capture()? != capture {
            fail!(
                InvalidUsage,
                "calls that start together are on streams of which one is captured and another is not, or by another graph"
            );
        }
    }
    match capture {
        Capture::Invalidated => {
            fail!(InvalidUsage, "the capture of the call's stream has failed; end it, and begin again")
        }
        Capture::None | Capture::Active(_) => Ok(()),
    }
}

/// Gives something to `first`, as to all of them.
pub fn between(first: &Stream, others: &[Stream], give: impl FnOnce() -> Result<()>) -> Result<()> {
    gather(first, others)?;
    give()?;
    release(first, others)
}

/// Has each of the streams wait for what all of them were given before.
pub fn meet(first: &Stream, others: &[Stream]) -> Result<()> {
    gather(first, others)?;
    release(first, others)
}

/// Has `first` wait for what the others were given.
pub fn gather(first: &Stream, others: &[Stream]) -> Result<()> {
    others.iter().try_for_each(|other| {
        let given = Event::new(other.devices(), other.device())?;
        given.record(other)?;
        first.wait(&given)
    })
}

/// Has the others wait for what `first` was given.
pub fn release(first: &Stream, others: &[Stream]) -> Result<()> {
    if others.is_empty() {
        return Ok(());
    }
    let done = Event::new(first.devices(), first.device())?;
    done.record(first)?;
    others.iter().try_for_each(|other| other.wait(&done))
}
