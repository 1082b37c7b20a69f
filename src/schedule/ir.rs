//! What a schedule is made of.
//!
//! Steps run as data flow: a step starts once every step it depends on has completed, and all steps that can
//! run do run at once (sends and receives are posted together). The dependencies are derived by the builder
//! from the spans that steps read and write, so an algorithm states what it moves, in program order, and
//! cannot forget an edge. Pipelining is nothing else than smaller spans.

use std::collections::BTreeSet;

pub use crate::reduce::Representation;
use crate::schedule::collective::Collective;

/// A rank within the group that the schedule is for.
pub type Rank = u32;

/// The buffers that a schedule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// What the caller gave to send. Never written, unless it is the same memory as the output.
    Input,
    /// Where the caller wants the result. Written with final results only, so a call that fails early leaves
    /// it alone.
    Output,
    /// Elements, the engine's: other ranks' raw inputs, or results on their way to others.
    Scratch,
    /// Accumulators, the engine's: partial results.
    Partial,
}

impl Buffer {
    /// What its positions hold.
    pub const fn representation(self) -> Representation {
        match self {
            Buffer::Partial => Representation::Accumulator,
            _ => Representation::Element,
        }
    }
}

/// `len` positions of `buffer` from `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Which buffer.
    pub buffer: Buffer,
    /// First position.
    pub start: u64,
    /// How many.
    pub len: u64,
}

impl Span {
    /// `len` positions of `buffer` from `start`.
    pub const fn new(buffer: Buffer, start: u64, len: u64) -> Span {
        Span { buffer, start, len }
    }

    /// The positions `range` of `buffer`.
    pub const fn of(buffer: Buffer, range: std::ops::Range<u64>) -> Span {
        Span { buffer, start: range.start, len: range.end - range.start }
    }

    /// The position behind the last one.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }

    /// `len` positions of this span, from its position `offset`.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        debug_assert!(offset + len <= self.len);
        Span { buffer: self.buffer, start: self.start + offset, len }
    }

    /// What its positions hold.
    pub const fn representation(&self) -> Representation {
        self.buffer.representation()
    }
}

/// What a step does. A message is identified by the ordered pair of ranks and its slot: the k-th send from
/// `a` to `b` meets the k-th receive from `a` at `b`. Both sides agree on length and representation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends a span. Complete when the span may be written again.
    Send {
        /// To whom.
        to: Rank,
        /// What.
        from: Span,
        /// Which message of this ordered pair.
        slot: u32,
    },
    /// Receives into a span.
    Receive {
        /// From whom.
        from: Rank,
        /// Where to.
        into: Span,
        /// Which message of this ordered pair.
        slot: u32,
    },
    /// Receives and combines: `into = local ∘ received`, or `received ∘ local` when `received_left`. `into`
    /// may be `local`, and else does not overlap it. Storing an accumulator into an element buffer applies the operator's final step.
    ReceiveReduce {
        /// From whom.
        from: Rank,
        /// What the message holds.
        wire: Representation,
        /// The operand that is here.
        local: Span,
        /// Whether the received operand stands on the left.
        received_left: bool,
        /// Where the combination goes.
        into: Span,
        /// Which message of this ordered pair.
        slot: u32,
    },
    /// Combines the operands `operands[first..first + count]` of the schedule, in the canonical tree order
    /// over that list, into `into`. One operand converts: into an accumulator, or (final step, rounding) into
    /// an element. `into` may be one of the operands, and overlaps no other.
    Fold {
        /// Index of the first operand in [`Schedule::operands`].
        first: u32,
        /// How many operands; at least one.
        count: u32,
        /// Where the combination goes.
        into: Span,
    },
    /// Copies between spans of the same representation that do not overlap.
    Copy {
        /// What.
        from: Span,
        /// Where to.
        into: Span,
    },
}

impl Action {
    /// The span that it writes.
    pub fn writes(&self) -> Option<Span> {
        match self {
            Action::Send { .. } => None,
            Action::Receive { into, .. }
            | Action::ReceiveReduce { into, .. }
            | Action::Fold { into, .. }
            | Action::Copy { into, .. } => Some(*into),
        }
    }
}

/// A step and how many steps must complete before it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it does.
    pub action: Action,
    /// How many steps it waits for.
    pub waits_for: u32,
    /// The range of [`Schedule::successors`] that waits for it.
    pub successors: std::ops::Range<u32>,
}

/// What one rank does in one collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In program order: a step waits for earlier steps only.
    pub steps: Vec<Step>,
    /// Indices of steps, the targets of [`Step::successors`].
    pub successors: Vec<u32>,
    /// Operands of folds.
    pub operands: Vec<Span>,
    /// Elements of [`Buffer::Scratch`] that it needs.
    pub scratch: u64,
    /// Accumulators of [`Buffer::Partial`] that it needs.
    pub partial: u64,
}

impl Schedule {
    /// For each step, the elements of the block that its message is of, when blocks go directly; 0 for other
    /// steps.
    pub fn blocks(&self, collective: &Collective, rank: Rank) -> Vec<u64> {
        let block = |step: &Step| match step.action {
            Action::Send { to, .. } => collective.sends(rank, to),
            Action::Receive { from, .. } => collective.receives(rank, from),
            _ => 0,
        };
        self.steps.iter().map(block).collect()
    }

    /// Whom it exchanges messages with.
    pub fn peers(&self) -> BTreeSet<Rank> {
        let peer = |step: &Step| match step.action {
            Action::Send { to: peer, .. }
            | Action::Receive { from: peer, .. }
            | Action::ReceiveReduce { from: peer, .. } => Some(peer),
            Action::Fold { .. } | Action::Copy { .. } => None,
        };
        self.steps.iter().filter_map(peer).collect()
    }

    /// The same with other numbers for the ranks.
    pub fn renumbered(mut self, number: impl Fn(Rank) -> Rank) -> Schedule {
        for step in &mut self.steps {
            match &mut step.action {
                Action::Send { to: peer, .. }
                | Action::Receive { from: peer, .. }
                | Action::ReceiveReduce { from: peer, .. } => *peer = number(*peer),
                Action::Fold { .. } | Action::Copy { .. } => {}
            }
        }
        self
    }
}
