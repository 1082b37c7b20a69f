//! Whether the dependencies of one rank's schedule order every conflict.

use crate::error::{Result, fail};
use crate::schedule::checker::memory::{Cell, Memory};
use crate::schedule::checker::{Place, Text, reads};
use crate::schedule::ir::{Action, Rank, Schedule, Span};

/// Finds a conflict of two steps where neither waits for the other, or a dependency that leads back.
pub(super) fn check(rank: Rank, schedule: &Schedule, memory: &mut Memory) -> Result<()> {
    let mut ancestry = Ancestry::new(rank, schedule)?;
    let mut conflicts: Vec<(u32, Span)> = Vec::new();
    for (index, step) in schedule.steps.iter().enumerate() {
        let place = Place { rank, step: index, schedule };
        let this = index as u32;
        // What combines may replace an operand, but goes through the spans from their starts, in parts.
        let replaces = !matches!(step.action, Action::Copy { .. });
        if let Some(into) = step.action.writes()
            && reads(schedule, &step.action)
                .any(|span| memory.overlap(span, into) && !(replaces && memory.coincide(span, into)))
        {
            fail!(Internal, "{place}: the spans overlap");
        }
        conflicts.clear();
        for span in reads(schedule, &step.action) {
            for (_, cell) in memory.cells(span) {
                conflicts.extend(cell.writer.map(|writer| (writer, span)));
                cell.readers.push(this);
            }
        }
        if let Some(span) = step.action.writes() {
            for (_, cell) in memory.cells(span) {
                // Its readers were found to come after its writer.
                let Cell { writer, readers, .. } = cell;
                let before = conflicts.len();
                conflicts.extend(readers.drain(..).filter(|&r| r != this).map(|reader| (reader, span)));
                if conflicts.len() == before {
                    conflicts.extend(writer.map(|writer| (writer, span)));
                }
                *writer = Some(this);
            }
        }
        if let Some((other, span)) = ancestry.first_unordered(this, &mut conflicts) {
            let other = Place { rank, step: other as usize, schedule };
            fail!(Internal, "{place}: touches {} without waiting for {other}", Text(span));
        }
    }
    Ok(())
}

/// Who waits for whom, directly or by way of others.
struct Ancestry {
    /// What each step waits for directly.
    waits: Vec<Vec<u32>>,
    /// `seen[i]`: the last step whose ancestors step `i` was found among, plus one.
    seen: Vec<u32>,
    queue: Vec<u32>,
}

impl Ancestry {
    fn new(rank: Rank, schedule: &Schedule) -> Result<Ancestry> {
        let mut waits = vec![Vec::new(); schedule.steps.len()];
        for (index, step) in schedule.steps.iter().enumerate() {
            let place = Place { rank, step: index, schedule };
            let Some(successors) =
                schedule.successors.get(step.successors.start as usize..step.successors.end as usize)
            else {
                fail!(Internal, "{place}: its successors are outside of the list");
            };
            for &next in successors {
                if next as usize <= index || next as usize >= waits.len() {
                    fail!(Internal, "{place}: step {next} waits for it, but is no later step");
                }
                waits[next as usize].push(index as u32);
            }
        }
        for (index, step) in schedule.steps.iter().enumerate() {
            if step.waits_for as usize != waits[index].len() {
                let place = Place { rank, step: index, schedule };
                fail!(Internal, "{place}: waits for {}, but follows {}", step.waits_for, waits[index].len());
            }
        }
        Ok(Ancestry { seen: vec![0; waits.len()], waits, queue: Vec::new() })
    }

    /// The first of `conflicts` that `step` does not wait for.
    fn first_unordered(&mut self, step: u32, conflicts: &mut Vec<(u32, Span)>) -> Option<(u32, Span)> {
        let earliest = conflicts.iter().map(|&(other, _)| other).min()?;
        let mark = step + 1;
        self.queue.clear();
        self.queue.push(step);
        let mut next = 0;
        // Breadth first: what a builder leaves out is rarely more than a step or two away.
        while next < self.queue.len() {
            let at = self.queue[next];
            next += 1;
            for &before in &self.waits[at as usize] {
                if before >= earliest && self.seen[before as usize] != mark {
                    self.seen[before as usize] = mark;
                    self.queue.push(before);
                }
            }
            if next.is_power_of_two() {
                conflicts.retain(|&(other, _)| self.seen[other as usize] != mark);
                if conflicts.is_empty() {
                    return None;
                }
            }
        }
        conflicts.iter().copied().find(|&(other, _)| self.seen[other as usize] != mark)
    }
}
