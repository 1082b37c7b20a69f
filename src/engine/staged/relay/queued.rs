//! Steps of calls for which no stream waits.
//!
//! As long as some stream of the process may wait for what the host is still to do, a stream of ours has one
//! thing to do at a time, and nothing behind it, an event neither ([`porter`](super::super::porter) says
//! why). Between two pieces it idles then for as long as it takes the host to see the end of the first. Where
//! no stream waits, none begins to while it is given something more, and what it has is not held up by what
//! comes later: pieces stand behind each other, with an event each.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::copies;
use super::super::porter::Turns;
use super::super::resources::Ringer;
use super::Combine;
use super::tracks::{Step, Sum};
use crate::cuda::event::Event;
use crate::cuda::local::{Kernels, Operand};
use crate::cuda::stream::Stream;
use crate::error::Result;

/// A stream, which calls share, and who gives it something where no stream waits for that.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) stream: Stream,
    turns: Turns,
}

impl Side {
    pub(super) fn new(stream: Stream) -> Side {
        Side { stream, turns: Turns::default() }
    }
}

/// What is done at once, of a step.
pub(super) enum Part {
    Copy { to: u64, from: u64, bytes: usize },
    Combine { combine: Combine, operands: Vec<Operand>, out: u64, count: usize },
}

impl Part {
    /// # Safety
    /// As [`Tracks::copy`](super::tracks::Tracks::copy).
    unsafe fn give(&self, kernels: &dyn Kernels, stream: &Stream) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Part::Copy { to, from, bytes } => unsafe { copies::copy(kernels, stream, *to, *from, *bytes) },
            Part::Combine { combine, operands, out, count } => {
                let sum = Sum { combine, operands, out: *out, count: *count };
                // SAFETY: the caller's promise.
                unsafe { sum.give(kernels, stream) }
            }
        }
    }
}

/// What a stream has been given and is not known to have done.
struct Given {
    /// Of which of the pieces under way.
    piece: usize,
    /// As its [`Turns`] count.
    number: u64,
    /// Whether the piece's event is behind it.
    marked: bool,
}

/// What one call does in a step of its pieces.
struct Line {
    side: Arc<Side>,
    /// What the stream has not been given, and which of the pieces under way it is of, in their order.
    waiting: VecDeque<(usize, Part)>,
    /// What it has, in that order.
    under_way: VecDeque<Given>,
}

/// A piece under way.
struct Piece {
    /// After what its stream was given last, if that is marked.
    step: Event,
    /// How much was ordered that is not known to have ended.
    left: u32,
}

/// The steps of one call.
pub(super) struct Queued {
    /// By the step.
    lines: [Line; Step::ALL.len()],
    pieces: Vec<Piece>,
    /// Whether somebody has gone to sleep since a stream was given something.
    rings: bool,
}

impl Queued {
    /// Of a call with as many pieces under way as there are events.
    pub(super) fn new(sides: [Arc<Side>; Step::ALL.len()], steps: Vec<Event>) -> Queued {
        let lines = sides.map(|side| Line { side, waiting: VecDeque::new(), under_way: VecDeque::new() });
        let pieces = steps.into_iter().map(|step| Piece { step, left: 0 }).collect();
        Queued { lines, pieces, rings: false }
    }

    /// How many pieces may be under way.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Has something done, behind what was ordered in this step before, for one of the pieces under way.
    ///
    /// # Safety
    /// As [`Tracks::copy`](super::tracks::Tracks::copy), until that has ended or [`Queued::leave`] has come
    /// back.
    pub(super) unsafe fn order(
        &mut self,
        kernels: &dyn Kernels,
        (piece, step): (usize, Step),
        part: Part,
    ) -> Result<()> {
        self.lines[step as usize].waiting.push_back((piece, part));
        self.pieces[piece].left += 1;
        self.give(kernels, step).map(drop)
    }

    /// All of a step of a piece has been ordered.
    pub(super) fn ordered(&mut self, step: Step) -> Result<()> {
        let Line { side, waiting, under_way } = &mut self.lines[step as usize];
        if !waiting.is_empty() {
            return Ok(());
        }
        let mark = || mark(side, under_way, &self.pieces);
        side.stream.devices().while_no_stream_waits(mark).unwrap_or(Ok(()))
    }

    /// Sees what has ended, and gives each stream what it can be given by now. Whether any was given
    /// something.
    pub(super) fn move_on(&mut self, kernels: &dyn Kernels) -> Result<bool> {
        let mut moved = false;
        for step in Step::ALL {
            self.see_ends(step)?;
            moved |= self.give(kernels, step)?;
        }
        Ok(moved)
    }

    fn see_ends(&mut self, step: Step) -> Result<()> {
        let Line { side, under_way, .. } = &mut self.lines[step as usize];
        while let Some(last) = under_way.back() {
            let ended = match under_way.iter().find(|given| given.marked) {
                Some(given) if self.pieces[given.piece].step.query()? => {
                    side.turns.end(given.number);
                    given.number
                }
                None if side.turns.has_ended(&side.stream, last.number)? => last.number,
                _ => break,
            };
            while under_way.front().is_some_and(|given| given.number <= ended)
                && let Some(given) = under_way.pop_front()
            {
                self.pieces[given.piece].left -= 1;
            }
        }
        Ok(())
    }

    fn give(&mut self, kernels: &dyn Kernels, step: Step) -> Result<bool> {
        let Line { side, waiting, under_way } = &mut self.lines[step as usize];
        let Side { stream, turns } = &**side;
        let mut any = false;
        while let Some((piece, part)) = waiting.front() {
            // SAFETY: the promise that it was ordered with.
            let give = || unsafe { part.give(kernels, stream) };
            let behind = stream.devices().while_no_stream_waits(|| {
                if under_way.back().is_some_and(|last| last.piece != *piece) {
                    mark(side, under_way, &self.pieces)?;
                }
                turns.give_behind(give)
            });
            let number = match behind {
                Some(number) => number?,
                None if under_way.is_empty() => turns.give(stream, give)?,
                None => None,
            };
            let Some(number) = number else { break };
            under_way.push_back(Given { piece: *piece, number, marked: false });
            waiting.pop_front();
            (any, self.rings) = (true, false);
        }
        Ok(any)
    }

    /// Whether what was ordered for a piece was known to have ended when they were last moved on.
    pub(super) fn is_idle(&self, piece: usize) -> bool {
        self.pieces[piece].left == 0
    }

    /// Somebody goes to sleep: has the ends be looked for soon.
    pub(super) fn ring(&mut self, ringer: &Ringer) {
        // What waits for other calls is not told when those have ended.
        let waits = self.lines.iter().any(|line| line.under_way.is_empty() && !line.waiting.is_empty());
        if waits || !self.rings && self.pieces.iter().any(|piece| piece.left > 0) {
            ringer.ring();
            self.rings = true;
        }
    }

    /// The events of a call that has ended.
    pub(super) fn into_steps(self) -> Vec<Event> {
        self.pieces.into_iter().map(|piece| piece.step).collect()
    }

    /// Lets go of them when the call is given up. What waits is not done any more.
    pub(super) fn leave(self) -> (Rest, Vec<Event>) {
        let given = self.lines.each_ref().map(|line| (line.side.clone(), line.side.turns.given()));
        (Rest(given), self.into_steps())
    }
}

/// Has the event of the piece come behind what a stream has been given last, unless it does.
fn mark(side: &Side, under_way: &mut VecDeque<Given>, pieces: &[Piece]) -> Result<()> {
    let Some(last) = under_way.back_mut().filter(|last| !last.marked) else { return Ok(()) };
    pieces[last.piece].step.record(&side.stream)?;
    last.marked = true;
    Ok(())
}

/// What streams had been given when a call was given up.
pub(super) struct Rest([(Arc<Side>, u64); Step::ALL.len()]);

impl Rest {
    /// Whether that has ended.
    pub(super) fn has_ended(&self) -> Result<bool> {
        self.0
            .iter()
            .try_fold(true, |ended, (side, number)| Ok(ended && side.turns.has_ended(&side.stream, *number)?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{parting, resources};
    use super::super::tracks::take_sides;
    use super::*;
    use crate::cuda::context::Devices;
    use crate::cuda::double::{Double, DoubleKernels, Order};

    /// Steps of four pieces, of a device that does nothing until somebody asks, and the byte 7 and others.
    fn begin() -> (Arc<Double>, DoubleKernels, Queued, u64, Vec<u64>) {
        let double = Double::new(1, Order::RoundRobin);
        let devices = Devices::over(double.clone()).expect("a driver");
        resources::prepare(&devices, 0).expect("streams");
        let steps = [(); 4].map(|()| Event::new(&devices, 0).expect("an event")).into();
        let queued = Queued::new(take_sides(&devices, 0).expect("streams"), steps);
        let [from, others @ ..] = [(); 25].map(|()| double.memory(0, 1));
        double.fill(double.stream(0), 0, from, &[7]);
        double.drain();
        (double.clone(), DoubleKernels(double), queued, from, others.to_vec())
    }

    /// Copies a byte to each address, two for each piece and step.
    fn order(kernels: &DoubleKernels, queued: &mut Queued, from: u64, memory: &[u64]) -> Result<()> {
        let all = Step::ALL.into_iter().flat_map(|step| (0..4).flat_map(move |piece| [(piece, step); 2]));
        all.zip(memory).try_for_each(|(what, &to)| {
            // SAFETY: the double keeps its memory.
            unsafe { queued.order(kernels, what, Part::Copy { to, from, bytes: 1 }) }
        })
    }

    #[test]
    fn while_a_stream_waits_one_of_ours_has_one_thing_at_a_time_and_no_event() {
        let (double, kernels, mut queued, from, memory) = begin();
        let _held = queued.lines[0].side.stream.devices().note_held();
        order(&kernels, &mut queued, from, &memory).expect("it is ordered");
        while (0..4).any(|piece| !queued.is_idle(piece)) {
            assert!(double.left() <= Step::ALL.len(), "{} at a time", double.left());
            queued.move_on(&kernels).expect("it moves on");
        }
        assert!(memory.iter().all(|&at| double.peek(at, 1) == [7]));
        assert!(double.is_idle());
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn where_none_waits_one_has_all_at_once_and_an_event_for_each_piece() {
        let (double, kernels, mut queued, from, memory) = begin();
        let asked = double.synchronizations();
        order(&kernels, &mut queued, from, &memory[..8]).expect("it is ordered");
        queued.ordered(Step::Give).expect("it is marked");
        assert_eq!((double.left(), double.synchronizations()), (8 + 4, asked), "nobody asks first");
        // A stream that waits from now on comes too late to hold that up.
        let held = queued.lines[0].side.stream.devices().note_held();
        for piece in 0..4 {
            while !queued.is_idle(piece) {
                queued.move_on(&kernels).expect("it moves on");
            }
            assert!(memory[..2 * (piece + 1)].iter().all(|&at| double.peek(at, 1) == [7]));
            assert_eq!(queued.is_idle(3), piece == 3, "pieces end one by one");
        }
        drop(held);
        assert_eq!(double.complaints(), Vec::<String>::new());
    }

    #[test]
    fn what_is_given_up_writes_nothing_later_whatever_fails() {
        for (waits, failing) in [true, false].into_iter().flat_map(|waits| (0..50).map(move |at| (waits, at)))
        {
            let (double, kernels, mut queued, from, memory) = begin();
            let _held = waits.then(|| queued.lines[0].side.stream.devices().note_held());
            double.fail_call(failing);
            let ordered = order(&kernels, &mut queued, from, &memory);
            let (rest, _steps) = queued.leave();
            assert!(parting::wait(|| rest.has_ended()), "call {failing} was refused");
            let left: Vec<_> = memory.iter().map(|&at| double.peek(at, 1)).collect();
            double.drain();
            let later: Vec<_> = memory.iter().map(|&at| double.peek(at, 1)).collect();
            assert_eq!(later, left, "call {failing} was refused: {ordered:?}");
            assert_eq!(double.complaints(), Vec::<String>::new());
            assert!(!double.is_to_fail() || failing > 15, "only {failing} calls");
        }
    }
}
