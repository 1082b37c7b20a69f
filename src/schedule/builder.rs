//! Builds one rank's schedule: numbers its messages, derives what each step waits for, hands out the engine's
//! memory.

use std::collections::{BTreeMap, HashMap};

use crate::schedule::ir::{Action, Buffer, Rank, Representation, Schedule, Span, Step};

/// Index of a step in the schedule being built.
pub type StepIndex = u32;

/// How many steps the search for edges that follow from others looks at, beyond those waited for.
const MAX_SEARCH: usize = 32;

/// Takes steps in program order. A step waits for the earlier steps whose spans conflict with its own: it
/// reads what they write, or writes what they read or write. Two spans conflict by memory, not by name: with
/// an alias, Input and Output are one memory.
///
/// A span without positions moves nothing and makes no step, on either side of a message; both sides know the
/// length, so both leave it out. Messages that are only a signal are asked for by name, with
/// [`Builder::signal`] and [`Builder::await_signal`].
#[derive(Debug)]
pub struct Builder {
    alias: Option<i64>,
    actions: Vec<Action>,
    operands: Vec<Span>,
    /// What step `i` waits for is `waits[ends[i - 1]..ends[i]]`, ascending.
    waits: Vec<StepIndex>,
    ends: Vec<usize>,
    /// What every step from here on waits for, besides the conflicts of its spans.
    fence: Vec<StepIndex>,
    /// What every step that writes the Output waits for, besides.
    guard: Vec<StepIndex>,
    /// Except what receives into it.
    receives_unguarded: bool,
    /// The waits of the step being added.
    pending: Vec<StepIndex>,
    /// Steps whose waits are still to be looked at.
    queue: Vec<StepIndex>,
    /// `marks[i]` is the last step for which step `i` was found to be waited for by way of another.
    marks: Vec<StepIndex>,
    caller: Memory,
    output: Memory,
    scratch: Memory,
    partial: Memory,
    sends: HashMap<Rank, u32>,
    receives: HashMap<Rank, u32>,
    scratch_len: u64,
    partial_len: u64,
}

impl Builder {
    /// An empty schedule. With `alias`, `Output[i]` is the same memory as `Input[i + alias]`.
    pub fn new(alias: Option<i64>) -> Builder {
        Builder {
            alias,
            actions: Vec::new(),
            operands: Vec::new(),
            waits: Vec::new(),
            ends: Vec::new(),
            fence: Vec::new(),
            guard: Vec::new(),
            receives_unguarded: false,
            pending: Vec::new(),
            queue: Vec::new(),
            marks: Vec::new(),
            caller: Memory::default(),
            output: Memory::default(),
            scratch: Memory::default(),
            partial: Memory::default(),
            sends: HashMap::new(),
            receives: HashMap::new(),
            scratch_len: 0,
            partial_len: 0,
        }
    }

    /// Whether Input and Output are one memory.
    pub fn in_place(&self) -> bool {
        self.alias.is_some()
    }

    /// `len` fresh elements of the engine's.
    pub fn scratch(&mut self, len: u64) -> Span {
        let start = self.scratch_len;
        self.scratch_len += len;
        Span::new(Buffer::Scratch, start, len)
    }

    /// `len` fresh accumulators of the engine's.
    pub fn partial(&mut self, len: u64) -> Span {
        let start = self.partial_len;
        self.partial_len += len;
        Span::new(Buffer::Partial, start, len)
    }

    /// Sends a span.
    pub fn send(&mut self, to: Rank, from: Span) -> Option<StepIndex> {
        (from.len > 0).then(|| self.push_send(to, from))
    }

    /// Receives into a span.
    pub fn receive(&mut self, from: Rank, into: Span) -> Option<StepIndex> {
        (into.len > 0).then(|| self.push_receive(from, into))
    }

    /// Sends a message without content.
    pub fn signal(&mut self, to: Rank) -> StepIndex {
        self.push_send(to, Span::new(Buffer::Scratch, 0, 0))
    }

    /// Receives a message without content.
    pub fn await_signal(&mut self, from: Rank) -> StepIndex {
        self.push_receive(from, Span::new(Buffer::Scratch, 0, 0))
    }

    /// Receives the operand that stands left of `local`, and combines into `into`.
    pub fn receive_reduce_left(&mut self, from: Rank, wire: Representation, local: Span, into: Span) {
        self.push_receive_reduce(from, wire, local, true, into);
    }

    /// Receives the operand that stands right of `local`, and combines into `into`.
    pub fn receive_reduce_right(&mut self, from: Rank, wire: Representation, local: Span, into: Span) {
        self.push_receive_reduce(from, wire, local, false, into);
    }

    /// Combines the operands in the canonical tree order into `into`. All have the same length.
    pub fn fold(&mut self, operands: &[Span], into: Span) {
        debug_assert!(!operands.is_empty() && operands.iter().all(|o| o.len == into.len));
        if into.len == 0 {
            return;
        }
        let first = self.operands.len() as u32;
        self.operands.extend_from_slice(operands);
        for &operand in operands {
            self.read(operand);
        }
        self.write(into);
        self.push(Action::Fold { first, count: operands.len() as u32, into });
    }

    /// Copies. No step when both are the same memory already.
    pub fn copy(&mut self, from: Span, into: Span) {
        debug_assert!(from.len == into.len && from.representation() == into.representation());
        if into.len == 0 || self.same_memory(from, into) {
            return;
        }
        self.read(from);
        self.write(into);
        self.push(Action::Copy { from, into });
    }

    /// From here on every step also waits for `steps`: an order that no span asks for. Replaces the fence
    /// before it.
    pub fn fence(&mut self, steps: impl IntoIterator<Item = StepIndex>) {
        self.fence.clear();
        self.fence.extend(steps);
    }

    /// From here on every step that writes the Output also waits for `steps`; or, if not `receives`, every
    /// one but what receives into it.
    pub fn guard_output(&mut self, steps: impl IntoIterator<Item = StepIndex>, receives: bool) {
        self.guard.extend(steps);
        self.receives_unguarded = !receives;
    }

    /// The schedule.
    pub fn finish(self) -> Schedule {
        let steps = self.actions.len();
        let mut starts = vec![0u32; steps + 1];
        for &wait in &self.waits {
            starts[wait as usize + 1] += 1;
        }
        for step in 0..steps {
            starts[step + 1] += starts[step];
        }
        let mut successors = vec![0; self.waits.len()];
        let mut next = starts.clone();
        let mut built = Vec::with_capacity(steps);
        let mut first = 0;
        for (step, (action, &end)) in self.actions.into_iter().zip(&self.ends).enumerate() {
            for &wait in &self.waits[first..end] {
                let slot = &mut next[wait as usize];
                successors[*slot as usize] = step as StepIndex;
                *slot += 1;
            }
            let waits_for = (end - first) as u32;
            built.push(Step { action, waits_for, successors: starts[step]..starts[step + 1] });
            first = end;
        }
        Schedule {
            steps: built,
            successors,
            operands: self.operands,
            scratch: self.scratch_len,
            partial: self.partial_len,
        }
    }

    fn push_send(&mut self, to: Rank, from: Span) -> StepIndex {
        self.read(from);
        let slot = next_slot(&mut self.sends, to);
        self.push(Action::Send { to, from, slot })
    }

    fn push_receive(&mut self, from: Rank, into: Span) -> StepIndex {
        self.write(into);
        let slot = next_slot(&mut self.receives, from);
        self.push(Action::Receive { from, into, slot })
    }

    fn push_receive_reduce(
        &mut self,
        from: Rank,
        wire: Representation,
        local: Span,
        received_left: bool,
        into: Span,
    ) {
        debug_assert_eq!(local.len, into.len);
        if into.len == 0 {
            return;
        }
        self.read(local);
        self.write(into);
        let slot = next_slot(&mut self.receives, from);
        self.push(Action::ReceiveReduce { from, wire, local, received_left, into, slot });
    }

    /// Adds the step whose spans have been read and written just now.
    fn push(&mut self, action: Action) -> StepIndex {
        let step = self.actions.len() as StepIndex;
        self.pending.extend_from_slice(&self.fence);
        let receives = matches!(action, Action::Receive { .. });
        let output = action.writes().is_some_and(|into| into.buffer == Buffer::Output);
        if output && !(receives && self.receives_unguarded) {
            self.pending.extend_from_slice(&self.guard);
        }
        self.pending.sort_unstable();
        self.pending.dedup();
        self.marks.push(step);
        // What one of these waits for itself, directly or by way of others, need not be waited for again. The
        // search is cut short, since such a chain is rarely longer than a few steps and an edge too many does
        // no harm.
        let earliest = self.pending.first().copied().unwrap_or(step);
        self.queue.clear();
        self.queue.extend_from_slice(&self.pending);
        let mut next = 0;
        while next < self.queue.len().min(self.pending.len() + MAX_SEARCH) {
            let at = self.queue[next] as usize;
            next += 1;
            let start = if at == 0 { 0 } else { self.ends[at - 1] };
            for &before in &self.waits[start..self.ends[at]] {
                if before >= earliest && self.marks[before as usize] != step {
                    self.marks[before as usize] = step;
                    self.queue.push(before);
                }
            }
        }
        for wait in self.pending.drain(..) {
            if self.marks[wait as usize] != step {
                self.waits.push(wait);
            }
        }
        self.ends.push(self.waits.len());
        self.actions.push(action);
        step
    }

    fn read(&mut self, span: Span) {
        let step = self.actions.len() as StepIndex;
        let (memory, start) = self.locate(span);
        let mut waits = std::mem::take(&mut self.pending);
        self.memory(memory).read(start, start + span.len as i64, step, &mut waits);
        self.pending = waits;
    }

    fn write(&mut self, span: Span) {
        debug_assert_ne!(span.buffer, Buffer::Input, "nobody writes the caller's input");
        let step = self.actions.len() as StepIndex;
        let (memory, start) = self.locate(span);
        let mut waits = std::mem::take(&mut self.pending);
        self.memory(memory).write(start, start + span.len as i64, step, &mut waits);
        self.pending = waits;
    }

    fn same_memory(&self, a: Span, b: Span) -> bool {
        a.len == b.len && self.locate(a) == self.locate(b)
    }

    /// Which memory a span lies in, and where: an aliased Output lies in Input's.
    fn locate(&self, span: Span) -> (Buffer, i64) {
        match (span.buffer, self.alias) {
            (Buffer::Output, Some(alias)) => (Buffer::Input, span.start as i64 + alias),
            (buffer, _) => (buffer, span.start as i64),
        }
    }

    fn memory(&mut self, buffer: Buffer) -> &mut Memory {
        match buffer {
            Buffer::Input => &mut self.caller,
            Buffer::Output => &mut self.output,
            Buffer::Scratch => &mut self.scratch,
            Buffer::Partial => &mut self.partial,
        }
    }
}

fn next_slot(slots: &mut HashMap<Rank, u32>, peer: Rank) -> u32 {
    let next = slots.entry(peer).or_default();
    *next += 1;
    *next - 1
}

/// Who touched which positions last: segments by their start, without gaps, from the lowest position to the
/// highest.
#[derive(Debug)]
struct Memory {
    segments: BTreeMap<i64, Segment>,
}

#[derive(Clone, Debug, Default)]
struct Segment {
    writer: Option<StepIndex>,
    /// Who read it since it was written.
    readers: Vec<StepIndex>,
}

impl Memory {
    /// Makes a segment start at `position`.
    fn cut(&mut self, position: i64) {
        if let Some((&start, segment)) = self.segments.range(..=position).next_back()
            && start != position
        {
            let segment = segment.clone();
            self.segments.insert(position, segment);
        }
    }

    fn read(&mut self, start: i64, end: i64, step: StepIndex, waits: &mut Vec<StepIndex>) {
        if start == end {
            return;
        }
        self.cut(start);
        self.cut(end);
        for (_, segment) in self.segments.range_mut(start..end) {
            waits.extend(segment.writer);
            segment.readers.push(step);
        }
    }

    fn write(&mut self, start: i64, end: i64, step: StepIndex, waits: &mut Vec<StepIndex>) {
        if start == end {
            return;
        }
        self.cut(start);
        self.cut(end);
        // One segment again afterwards, so that what was cut small for one step stays cheap for the next.
        let mut inner = Vec::new();
        for (&at, segment) in self.segments.range(start..end) {
            // The readers have waited for the writer already.
            let before = waits.len();
            waits.extend(segment.readers.iter().filter(|&&reader| reader != step));
            if waits.len() == before {
                waits.extend(segment.writer);
            }
            inner.push(at);
        }
        for at in inner {
            self.segments.remove(&at);
        }
        self.segments.insert(start, Segment { writer: Some(step), readers: Vec::new() });
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory { segments: BTreeMap::from([(i64::MIN, Segment::default())]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps that wait for each step.
    fn edges(schedule: &Schedule) -> Vec<Vec<u32>> {
        let range = |step: &Step| step.successors.start as usize..step.successors.end as usize;
        schedule.steps.iter().map(|step| schedule.successors[range(step)].to_vec()).collect()
    }

    fn input(start: u64, len: u64) -> Span {
        Span::new(Buffer::Input, start, len)
    }

    #[test]
    fn steps_wait_for_what_they_conflict_with_and_nothing_else() {
        let mut b = Builder::new(None);
        let partial = b.partial(10);
        b.receive(1, partial.part(0, 5)); // 0
        b.receive(2, partial.part(5, 5)); // 1
        b.send(3, partial.part(4, 2)); // 2 reads both
        b.send(3, input(0, 5)); // 3 is free
        b.receive(1, partial.part(0, 4)); // 4 replaces some of 0, which nobody read
        b.receive(1, partial); // 5 replaces all: 2 has waited for 0 and 1
        assert_eq!(edges(&b.finish()), [vec![2, 4], vec![2], vec![5], vec![], vec![5], vec![]]);
    }

    #[test]
    fn aliased_buffers_are_one_memory() {
        let output = Span::new(Buffer::Output, 0, 4);
        for (alias, waits) in
            [(None, 0), (Some(0), 1), (Some(2), 1), (Some(4), 0), (Some(-4), 0), (Some(-3), 1)]
        {
            let mut b = Builder::new(alias);
            b.send(1, input(0, 4));
            b.receive(1, output);
            assert_eq!(b.finish().steps[1].waits_for, waits, "{alias:?}");
        }
        let mut b = Builder::new(Some(-3));
        b.copy(input(0, 2), Span::new(Buffer::Output, 3, 2));
        assert_eq!(b.finish().steps, [], "it is there already");
    }

    #[test]
    fn messages_of_a_pair_are_numbered_and_empty_ones_left_out() {
        let mut b = Builder::new(None);
        b.send(1, input(0, 1));
        b.send(1, input(0, 0));
        b.send(2, input(0, 1));
        b.send(1, input(0, 1));
        b.signal(1);
        let slots: Vec<_> = b
            .finish()
            .steps
            .iter()
            .map(|step| match step.action {
                Action::Send { to, slot, .. } => (to, slot),
                _ => unreachable!("only sends were added"),
            })
            .collect();
        assert_eq!(slots, [(1, 0), (2, 0), (1, 1), (1, 2)]);
    }

    #[test]
    fn a_fence_orders_what_spans_do_not() {
        let mut b = Builder::new(None);
        let first = b.await_signal(1);
        b.fence([first]);
        b.signal(2);
        b.fence([]);
        b.signal(3);
        assert_eq!(edges(&b.finish()), [vec![1], vec![], vec![]]);
    }
}
