//! Proves a collective before it runs: executes the schedules of all ranks on symbols instead of numbers.
//!
//! What is proved, for every order that the engine may choose:
//!
//! - *Messages meet.* The k-th send from `a` to `b` and the k-th receive at `b` agree on length and
//!   representation.
//! - *No deadlock*, even where a send completes only once its receive is posted. Which messages can meet does
//!   not depend on the order in which others met, so one run decides for all.
//! - *No race.* Of any two steps of a rank that touch one position, at least one writing, one waits for the
//!   other. The conflicts are found here again, not taken from the builder; so one run decides the values for
//!   all orders too.
//! - *Nothing is read before it is written*, spans stay inside of their buffers, and nobody writes the Input.
//! - *The result.* Output only ever takes what was promised: each input once, the operator's final step once,
//!   and for a canonical algorithm exactly the canonical tree. After a barrier, every rank has heard of every
//!   other.

mod execution;
mod memory;
mod race;
mod symbols;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::error::{Result, fail};
use crate::schedule::checker::execution::Execution;
use crate::schedule::checker::memory::{Memory, Promise, Run};
use crate::schedule::checker::symbols::Symbols;
use crate::schedule::collective::{Collective, displacements};
use crate::schedule::ir::{Action, Buffer, Rank, Representation, Schedule, Span};

/// One rank's part: how it called, and what it would do.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The collective as this rank sees it.
    pub collective: &'a Collective,
    /// As in [`Shape::alias`](crate::schedule::Shape::alias).
    pub alias: Option<i64>,
    /// What it would do.
    pub schedule: &'a Schedule,
}

/// Proves the schedules of all ranks, in order of rank, or says what is wrong with which step of which rank.
/// `canonical`: whether the algorithm promises the canonical order.
pub fn check(parts: &[Part<'_>], canonical: bool) -> Result<()> {
    let mut symbols = Symbols::new(parts.len() as u32);
    let inputs: Vec<_> = (0..parts.len() as Rank).map(|rank| symbols.input(rank)).collect();
    let sum = match symbols.tree(&inputs).and_then(|tree| symbols.finish(tree)) {
        Ok(sum) => sum,
        Err(wrong) => fail!(Internal, "the canonical tree: {wrong}"),
    };
    let mut memories = Vec::with_capacity(parts.len());
    for (rank, part) in parts.iter().enumerate() {
        check_spans(rank as Rank, part)?;
        let promised = promises(rank as Rank, parts, |kind| match kind {
            Wanted::Input(from, element) => Promise::Exactly(inputs[from as usize], element),
            Wanted::Sum(element) if canonical => Promise::Exactly(sum, element),
            Wanted::Sum(element) => Promise::Complete(element),
        });
        let input = Span::new(Buffer::Input, 0, part.collective.input_len(rank as Rank));
        let spans = part.schedule.steps.iter().flat_map(|step| touched(part.schedule, &step.action));
        let all = spans.chain(promised.iter().map(|(span, _)| *span)).chain([input]);
        let mut memory = Memory::new(part.alias, all);
        let mut element = 0;
        for (len, cell) in memory.cells(input) {
            cell.holds = vec![Run { len, symbol: inputs[rank], element }];
            element += len;
        }
        for (span, promise) in promised {
            let mut offset = 0;
            for (len, cell) in memory.cells(span) {
                cell.promise = Some(promise.at(offset));
                offset += len;
            }
        }
        race::check(rank as Rank, part.schedule, &mut memory)?;
        memories.push(memory);
    }
    let schedules: Vec<_> = parts.iter().map(|part| part.schedule).collect();
    let partners = match_messages(&schedules)?;
    Execution::new(parts, &partners, symbols, memories).run()
}

/// What an output position is to hold.
enum Wanted {
    /// That element of a rank's input.
    Input(Rank, u64),
    /// The combination of that element of all inputs.
    Sum(u64),
}

/// What the collective promises for the output of `rank`.
fn promises(rank: Rank, parts: &[Part<'_>], promise: impl Fn(Wanted) -> Promise) -> Vec<(Span, Promise)> {
    let output = |start, len| Span::new(Buffer::Output, start, len);
    let gathered = |counts: &[u64]| -> Vec<_> {
        let starts = displacements(counts);
        (0..counts.len())
            .map(|from| (output(starts[from], counts[from]), promise(Wanted::Input(from as Rank, 0))))
            .collect()
    };
    match parts[rank as usize].collective {
        Collective::Allreduce { count } => vec![(output(0, *count), promise(Wanted::Sum(0)))],
        Collective::Reduce { count, root } if rank == *root => {
            vec![(output(0, *count), promise(Wanted::Sum(0)))]
        }
        Collective::Broadcast { count, root } => {
            vec![(output(0, *count), promise(Wanted::Input(*root, 0)))]
        }
        Collective::Allgather { counts } => gathered(counts),
        Collective::Gather { counts, root } if rank == *root => gathered(counts),
        Collective::Scatter { counts, root } => {
            let start = displacements(counts)[rank as usize];
            vec![(output(0, counts[rank as usize]), promise(Wanted::Input(*root, start)))]
        }
        Collective::ReduceScatter { counts } => {
            let start = displacements(counts)[rank as usize];
            vec![(output(0, counts[rank as usize]), promise(Wanted::Sum(start)))]
        }
        Collective::Alltoall { recv_counts, .. } => {
            let starts = displacements(recv_counts);
            (0..parts.len())
                .filter_map(|from| match parts[from].collective {
                    Collective::Alltoall { send_counts, .. } => {
                        let element = displacements(send_counts)[rank as usize];
                        let block = output(starts[from], recv_counts[from]);
                        Some((block, promise(Wanted::Input(from as Rank, element))))
                    }
                    _ => None,
                })
                .collect()
        }
        Collective::Reduce { .. } | Collective::Gather { .. } | Collective::Barrier => Vec::new(),
    }
}

/// The spans that an action reads.
fn reads<'a>(schedule: &'a Schedule, action: &'a Action) -> impl Iterator<Item = Span> + use<'a> {
    let (one, many) = match action {
        Action::Send { from, .. } | Action::Copy { from, .. } => (Some(*from), &[][..]),
        Action::ReceiveReduce { local, .. } => (Some(*local), &[][..]),
        Action::Receive { .. } => (None, &[][..]),
        Action::Fold { first, count, .. } => {
            (None, &schedule.operands[*first as usize..(*first + *count) as usize])
        }
    };
    one.into_iter().chain(many.iter().copied())
}

fn touched<'a>(schedule: &'a Schedule, action: &'a Action) -> impl Iterator<Item = Span> + use<'a> {
    reads(schedule, action).chain(action.writes())
}

/// Lengths, buffers and ranks of each step by themselves.
fn check_spans(rank: Rank, part: &Part<'_>) -> Result<()> {
    let schedule = part.schedule;
    let len_of = |buffer| match buffer {
        Buffer::Input => part.collective.input_len(rank),
        Buffer::Output => part.collective.output_len(rank),
        Buffer::Scratch => schedule.scratch,
        Buffer::Partial => schedule.partial,
    };
    for (index, step) in schedule.steps.iter().enumerate() {
        let place = Place { rank, step: index, schedule };
        for span in touched(schedule, &step.action) {
            let len = len_of(span.buffer);
            if span.start.checked_add(span.len).is_none_or(|end| end > len) {
                fail!(Internal, "{place}: {} is outside of the buffer, which has {len}", Text(span));
            }
        }
        if let Some(into) = step.action.writes() {
            if into.buffer == Buffer::Input {
                fail!(Internal, "{place}: writes the input");
            }
            if let Some(other) = reads(schedule, &step.action).find(|span| span.len != into.len) {
                fail!(Internal, "{place}: {} and {} differ in length", Text(other), Text(into));
            }
        }
        if let Action::Fold { count: 0, .. } = step.action {
            fail!(Internal, "{place}: folds nothing");
        }
        if let Action::Copy { from, into } = step.action
            && from.representation() != into.representation()
        {
            fail!(Internal, "{place}: copies between representations");
        }
    }
    Ok(())
}

/// For each step of a rank that is a message: the peer, and its step that is the other end.
pub(super) type Partners = Vec<Option<(Rank, u32)>>;

/// For each step of each rank that is a message: the step of the peer that is its other end.
pub(super) fn match_messages(schedules: &[&Schedule]) -> Result<Vec<Partners>> {
    let size = schedules.len();
    let mut sends = vec![Vec::new(); size * size];
    let mut receives = vec![Vec::new(); size * size];
    let mut partners: Vec<_> = schedules.iter().map(|schedule| vec![None; schedule.steps.len()]).collect();
    for (rank, &schedule) in schedules.iter().enumerate() {
        for (index, step) in schedule.steps.iter().enumerate() {
            let (peer, slot, list, pair): (Rank, u32, &mut Vec<Vec<u32>>, _) = match step.action {
                Action::Send { to, slot, .. } => (to, slot, &mut sends, rank * size + to as usize),
                Action::Receive { from, slot, .. } | Action::ReceiveReduce { from, slot, .. } => {
                    (from, slot, &mut receives, from as usize * size + rank)
                }
                Action::Fold { .. } | Action::Copy { .. } => continue,
            };
            let place = Place { rank: rank as Rank, step: index, schedule };
            if peer as usize >= size || peer as usize == rank {
                fail!(Internal, "{place}: rank {peer} is no peer");
            }
            if slot as usize != list[pair].len() {
                fail!(Internal, "{place}: message {} of this pair has slot {slot}", list[pair].len());
            }
            list[pair].push(index as u32);
        }
    }
    for pair in 0..size * size {
        let (from, to) = (pair / size, pair % size);
        let (sent, received) = (&sends[pair], &receives[pair]);
        for (&send, &receive) in sent.iter().zip(received) {
            let source = Place { rank: from as Rank, step: send as usize, schedule: schedules[from] };
            let target = Place { rank: to as Rank, step: receive as usize, schedule: schedules[to] };
            if source.wire() != target.wire() {
                fail!(Internal, "{source} does not fit {target}: length or representation differ");
            }
            partners[from][send as usize] = Some((to as Rank, receive));
            partners[to][receive as usize] = Some((from as Rank, send));
        }
        if let Some(&send) = sent.get(received.len()) {
            let place = Place { rank: from as Rank, step: send as usize, schedule: schedules[from] };
            fail!(Internal, "{place}: rank {to} never receives it");
        }
        if let Some(&receive) = received.get(sent.len()) {
            let place = Place { rank: to as Rank, step: receive as usize, schedule: schedules[to] };
            fail!(Internal, "{place}: rank {from} never sends it");
        }
    }
    Ok(partners)
}

/// A step, for errors.
#[derive(Clone, Copy)]
struct Place<'a> {
    rank: Rank,
    step: usize,
    schedule: &'a Schedule,
}

impl Place<'_> {
    /// Length and representation of what travels.
    fn wire(&self) -> Option<(u64, Representation)> {
        match self.schedule.steps[self.step].action {
            Action::Send { from, .. } => Some((from.len, from.representation())),
            Action::Receive { into, .. } => Some((into.len, into.representation())),
            Action::ReceiveReduce { wire, into, .. } => Some((into.len, wire)),
            Action::Fold { .. } | Action::Copy { .. } => None,
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, step {} (", self.rank, self.step)?;
        match self.schedule.steps[self.step].action {
            Action::Send { to, from, slot } => write!(f, "send {} to rank {to}, slot {slot}", Text(from))?,
            Action::Receive { from, into, slot } => {
                write!(f, "receive {} from rank {from}, slot {slot}", Text(into))?;
            }
            Action::ReceiveReduce { from, local, received_left, into, slot, .. } => {
                let side = if received_left { "left of" } else { "right of" };
                write!(
                    f,
                    "receive from rank {from}, slot {slot}, {side} {} into {}",
                    Text(local),
                    Text(into)
                )?;
            }
            Action::Fold { count, into, .. } => write!(f, "fold {count} operands into {}", Text(into))?,
            Action::Copy { from, into } => write!(f, "copy {} to {}", Text(from), Text(into))?,
        }
        f.write_str(")")
    }
}

/// A span, for errors.
struct Text(Span);

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{}..{}]", self.0.buffer, self.0.start, self.0.start + self.0.len)
    }
}
