//! What a call is staged from: its memory, its order, its cut, and what happens on the host.

use std::sync::Arc;

use super::cut::{Cut, Piece, Shape};
use super::relay::Combine;
use super::resources::Entry;
use crate::cuda::context::{Asking, Devices};
use crate::cuda::courier::Errand;
use crate::cuda::local::Kernels;
use crate::cuda::word::Word;
use crate::engine::group::{Group, Turn};
use crate::engine::operation::Operation;
use crate::error::Result;

/// Where one side of a call lies.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// On the call's device.
    Device(u64),
    /// On the host.
    Host(*mut u8),
}

// SAFETY: it names memory that the caller promised to be usable from the library's threads.
unsafe impl Send for Place {}

/// What a call reads or writes on this rank.
#[derive(Clone, Debug)]
pub struct Side {
    /// Where it begins.
    pub place: Place,
    /// How it is laid out. No bytes: nothing is read or written.
    pub shape: Shape,
}

impl Side {
    /// Whether it is copied by the device.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.place, Place::Device(_)) && self.shape.bytes > 0
    }
}

/// When a call may touch the caller's memory, and who waits for it.
#[derive(Debug)]
pub struct StreamOrder {
    /// The devices of the process.
    pub devices: Arc<Devices>,
    /// The one that the call is on.
    pub device: u32,
    /// When the caller's stream has come to the call.
    pub entry: Entry,
    /// What carries bytes, on the caller's stream, and is let go when nothing touches the caller's memory any
    /// more; `None`: side streams do.
    pub errand: Option<Errand>,
    /// Released when nothing touches the caller's memory any more; `None`: no stream waits for that.
    pub exit: Option<Arc<Word>>,
    /// What copies between the device and pinned memory, with [`COPY`] prepared; `None`: the copy engines,
    /// for devices that have no kernels.
    pub copier: Option<Arc<dyn Kernels>>,
    /// Where side streams carry: that the driver is asked in the call's course.
    pub asking: Option<Asking>,
}

impl StreamOrder {
    /// What the call waits for before it touches the caller's memory, for a person.
    pub(super) fn stream(&self) -> &'static str {
        if self.exit.is_some() || self.entry.courier().is_some() {
            "call->stream"
        } else {
            "the stream before the call"
        }
    }

    /// The caller's stream goes on, unless somebody else still keeps the courier.
    pub(super) fn release(&mut self) {
        self.errand = None;
        if let Some(exit) = &self.exit {
            exit.release();
        }
    }

    /// As [`StreamOrder::release`], for a call that is given up.
    pub(super) fn give_up(&mut self) {
        if let Some(errand) = self.errand.take() {
            let customer = errand.customer().clone();
            drop(errand);
            customer.give_up();
        }
        self.release();
    }
}

/// This rank's input, where a courier combines it with what one other rank has sent. It is not loaded.
#[derive(Clone, Copy, Debug)]
pub struct Combined {
    /// How.
    pub combine: Combine,
    /// Where it lies.
    pub own: u64,
    /// Whether it is the left one of the two.
    pub own_is_left: bool,
}

/// Makes the operation that exchanges a piece, between what this rank contributes (NULL if nothing) and where
/// its part of the result goes (NULL if it has none).
pub type Exchange =
    Box<dyn FnMut(&Group, &Turn, Piece, *mut u8, *mut u8) -> Result<Box<dyn Operation>> + Send>;

/// What a call is staged from.
pub struct Job {
    /// When.
    pub order: StreamOrder,
    /// What it reads.
    pub input: Side,
    /// What it writes.
    pub output: Side,
    /// Whether the result of this rank is what it has contributed: a broadcast's root.
    pub forwards: bool,
    /// What the courier combines with what has come, as it stores this.
    pub combined: Option<Combined>,
    /// Whether it is exchanged where the caller has it: both sides are the host's.
    pub unstaged: bool,
    /// Bytes of an element.
    pub element: usize,
    /// How it is cut.
    pub cut: Cut,
    /// How many pieces behind the first are exchanged at once.
    pub abreast: u32,
    /// What happens on the host.
    pub exchange: Exchange,
}
