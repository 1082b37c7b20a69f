//! Runs all ranks at once, on symbols. A send and its receive complete together, once both have started.

use std::collections::VecDeque;

use crate::error::{Result, fail};
use crate::schedule::checker::memory::{Cell, Memory, Promise, Run};
use crate::schedule::checker::symbols::{Symbol, Symbols};
use crate::schedule::checker::{Part, Partners, Place, Text, reads};
use crate::schedule::collective::Collective;
use crate::schedule::ir::{Action, Buffer, Rank, Representation, Span};

pub(super) struct Execution<'a> {
    parts: &'a [Part<'a>],
    partners: &'a [Partners],
    symbols: Symbols,
    memories: Vec<Memory>,
    /// For each rank and step.
    states: Vec<Vec<State>>,
    startable: VecDeque<(Rank, u32)>,
    /// For each rank and step of a barrier: the ranks that it has heard of, a bit each.
    heard: Vec<Vec<Vec<u64>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for that many steps.
    Waiting(u32),
    Started,
    Done,
}

impl<'a> Execution<'a> {
    pub(super) fn new(
        parts: &'a [Part<'a>],
        partners: &'a [Partners],
        symbols: Symbols,
        memories: Vec<Memory>,
    ) -> Execution<'a> {
        let states = parts
            .iter()
            .map(|part| part.schedule.steps.iter().map(|step| State::Waiting(step.waits_for)).collect())
            .collect();
        let heard = parts
            .iter()
            .enumerate()
            .filter(|(_, part)| *part.collective == Collective::Barrier)
            .map(|(rank, part)| {
                let mut own = vec![0; parts.len().div_ceil(64)];
                own[rank / 64] |= 1 << (rank % 64);
                vec![own; part.schedule.steps.len()]
            })
            .collect();
        Execution { parts, partners, symbols, memories, states, startable: VecDeque::new(), heard }
    }

    pub(super) fn run(mut self) -> Result<()> {
        for (rank, states) in self.states.iter().enumerate() {
            for (step, state) in states.iter().enumerate() {
                if *state == State::Waiting(0) {
                    self.startable.push_back((rank as Rank, step as u32));
                }
            }
        }
        while let Some((rank, step)) = self.startable.pop_front() {
            self.start(rank, step)?;
        }
        self.check_all_done()?;
        self.check_outputs()?;
        self.check_heard()
    }

    fn start(&mut self, rank: Rank, step: u32) -> Result<()> {
        self.states[rank as usize][step as usize] = State::Started;
        match self.partners[rank as usize][step as usize] {
            None => {
                self.combine_here(rank, step)?;
                self.complete(rank, step);
            }
            Some((peer, other)) if self.states[peer as usize][other as usize] == State::Started => {
                let ((from, send), (to, receive)) = match self.action(rank, step) {
                    Action::Send { .. } => ((rank, step), (peer, other)),
                    _ => ((peer, other), (rank, step)),
                };
                self.deliver(from, send, to, receive)?;
                self.complete(from, send);
                self.complete(to, receive);
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn complete(&mut self, rank: Rank, step: u32) {
        self.states[rank as usize][step as usize] = State::Done;
        let schedule = self.parts[rank as usize].schedule;
        let successors = schedule.steps[step as usize].successors.clone();
        for &next in &schedule.successors[successors.start as usize..successors.end as usize] {
            if let Some(heard) = self.heard.get_mut(rank as usize) {
                let (before, after) = heard.split_at_mut(next as usize);
                union(&mut after[0], &before[step as usize]);
            }
            if let State::Waiting(left) = &mut self.states[rank as usize][next as usize] {
                *left -= 1;
                if *left == 0 {
                    self.startable.push_back((rank, next));
                }
            }
        }
    }

    /// Folds and copies.
    fn combine_here(&mut self, rank: Rank, step: u32) -> Result<()> {
        let schedule = self.parts[rank as usize].schedule;
        let action = self.action(rank, step);
        let mut operands = Vec::new();
        for span in reads(schedule, &action) {
            operands.push(self.read(rank, step, span)?);
        }
        match action {
            Action::Fold { into, .. } => self.store_combined(rank, step, &operands, into),
            Action::Copy { into, .. } => self.store(rank, step, into, &operands[0]),
            _ => Ok(()),
        }
    }

    fn deliver(&mut self, from: Rank, send: u32, to: Rank, receive: u32) -> Result<()> {
        if !self.heard.is_empty() {
            let told = self.heard[from as usize][send as usize].clone();
            union(&mut self.heard[to as usize][receive as usize], &told);
        }
        let Action::Send { from: source, .. } = self.action(from, send) else { return Ok(()) };
        let message = self.read(from, send, source)?;
        match self.action(to, receive) {
            Action::Receive { into, .. } => self.store(to, receive, into, &message),
            Action::ReceiveReduce { local, received_left, into, .. } => {
                let local = self.read(to, receive, local)?;
                let operands = if received_left { [message, local] } else { [local, message] };
                self.store_combined(to, receive, &operands, into)
            }
            _ => Ok(()),
        }
    }

    fn read(&mut self, rank: Rank, step: u32, span: Span) -> Result<Vec<Run>> {
        let place = self.place(rank, step);
        let mut runs: Vec<Run> = Vec::new();
        let mut position = span.start;
        for (len, cell) in self.memories[rank as usize].cells(span) {
            if cell.holds.is_empty() {
                let unwritten = Text(Span { start: position, len, ..span }).to_string();
                fail!(Internal, "{}: reads {unwritten}, which nothing has written", place);
            }
            for run in &cell.holds {
                run.append(&mut runs);
            }
            position += len;
        }
        Ok(runs)
    }

    /// Combines the operands in the canonical order over the list, position by position.
    fn store_combined(&mut self, rank: Rank, step: u32, operands: &[Vec<Run>], into: Span) -> Result<()> {
        let mut rests: Vec<_> = operands.iter().map(|runs| (runs.iter(), Run::EMPTY)).collect();
        let mut combined = Vec::new();
        let mut left = into.len;
        while left > 0 {
            for (runs, rest) in &mut rests {
                if rest.len == 0
                    && let Some(&run) = runs.next()
                {
                    *rest = run;
                }
            }
            let element = rests[0].1.element;
            if let Some((_, other)) = rests.iter().find(|(_, rest)| rest.element != element) {
                let (a, b) = (self.symbols.describe(rests[0].1.symbol), self.symbols.describe(other.symbol));
                let place = self.place(rank, step);
                fail!(Internal, "{place}: combines element {element} of {a} with {} of {b}", other.element);
            }
            let len = rests.iter().map(|(_, rest)| rest.len).min().unwrap_or(left);
            let symbols: Vec<Symbol> = rests.iter().map(|(_, rest)| rest.symbol).collect();
            let result = self.symbols.tree(&symbols).and_then(|sum| match into.representation() {
                Representation::Element => self.symbols.finish(sum),
                // One operand converts; only a sum in progress may.
                Representation::Accumulator if self.symbols.is_finished(sum) => {
                    Err(format!("takes a finished result, {}", self.symbols.describe(sum)))
                }
                Representation::Accumulator => Ok(sum),
            });
            match result {
                Ok(symbol) => combined.push(Run { len, symbol, element }),
                Err(wrong) => fail!(Internal, "{}: {wrong}", self.place(rank, step)),
            }
            for (_, rest) in &mut rests {
                rest.len -= len;
                rest.element += len;
            }
            left -= len;
        }
        self.store(rank, step, into, &combined)
    }

    fn store(&mut self, rank: Rank, step: u32, into: Span, runs: &[Run]) -> Result<()> {
        let mut runs = runs.iter();
        let mut rest = Run::EMPTY;
        let mut position = into.start;
        let mut broken = None;
        for (len, cell) in self.memories[rank as usize].cells(into) {
            cell.holds.clear();
            let mut left = len;
            while left > 0 {
                if rest.len == 0
                    && let Some(&run) = runs.next()
                {
                    rest = run;
                }
                let taken = rest.len.min(left);
                Run { len: taken, ..rest }.append(&mut cell.holds);
                rest.len -= taken;
                rest.element += taken;
                left -= taken;
            }
            if into.buffer == Buffer::Output && !kept(&self.symbols, cell) {
                broken = broken.or(Some((Span { start: position, len, ..into }, cell.clone())));
            }
            position += len;
        }
        match broken {
            None => Ok(()),
            Some((span, cell)) => {
                fail!(Internal, "{}: {} {}", self.place(rank, step), Text(span), self.broken(&cell))
            }
        }
    }

    fn check_all_done(&self) -> Result<()> {
        for (rank, states) in self.states.iter().enumerate() {
            let stuck = |state: &State| *state == State::Started;
            let Some(step) = states.iter().position(stuck) else { continue };
            let place = self.place(rank as Rank, step as u32);
            if let Some((peer, other)) = self.partners[rank][step] {
                fail!(
                    Internal,
                    "deadlock: {place} waits for {}, which never starts",
                    self.place(peer, other)
                );
            }
        }
        match self.states.iter().position(|states| states.iter().any(|state| *state != State::Done)) {
            Some(rank) => fail!(Internal, "deadlock: rank {rank} has steps that never start"),
            None => Ok(()),
        }
    }

    fn check_outputs(&mut self) -> Result<()> {
        for rank in 0..self.parts.len() {
            let output = Span::new(Buffer::Output, 0, self.parts[rank].collective.output_len(rank as Rank));
            if output.len == 0 {
                continue;
            }
            let mut position = 0;
            let mut broken = None;
            for (len, cell) in self.memories[rank].cells(output) {
                if !kept(&self.symbols, cell) {
                    broken = broken.or(Some((Span { start: position, len, ..output }, cell.clone())));
                }
                position += len;
            }
            if let Some((span, cell)) = broken {
                fail!(Internal, "rank {rank}, at the end: {} {}", Text(span), self.broken(&cell));
            }
        }
        Ok(())
    }

    fn check_heard(&self) -> Result<()> {
        for (rank, steps) in self.heard.iter().enumerate() {
            let mut all = vec![0; self.parts.len().div_ceil(64)];
            all[rank / 64] |= 1 << (rank % 64);
            for heard in steps {
                union(&mut all, heard);
            }
            if let Some(other) = (0..self.parts.len()).find(|other| all[other / 64] >> (other % 64) & 1 == 0)
            {
                fail!(Internal, "rank {rank} leaves the barrier without having heard of rank {other}");
            }
        }
        Ok(())
    }

    fn broken(&self, cell: &Cell) -> String {
        let describe = |symbol, element| format!("element {element} of {}", self.symbols.describe(symbol));
        let holds: Vec<_> = cell.holds.iter().map(|run| describe(run.symbol, run.element)).collect();
        let holds = if holds.is_empty() { "nothing".to_string() } else { holds.join(", ") };
        let promise = match cell.promise {
            Some(Promise::Exactly(symbol, element)) => describe(symbol, element),
            Some(Promise::Complete(element)) => format!("element {element} of a finished result"),
            None => "nothing".to_string(),
        };
        format!("holds {holds}; promised was {promise}")
    }

    fn action(&self, rank: Rank, step: u32) -> Action {
        self.parts[rank as usize].schedule.steps[step as usize].action
    }

    fn place(&self, rank: Rank, step: u32) -> Place<'a> {
        Place { rank, step: step as usize, schedule: self.parts[rank as usize].schedule }
    }
}

/// Whether a cell of the output holds what was promised.
fn kept(symbols: &Symbols, cell: &Cell) -> bool {
    let Some(promise) = cell.promise else { return false };
    let mut offset = 0;
    let as_promised = cell.holds.iter().all(|run| {
        let expected = promise.at(offset);
        offset += run.len;
        match expected {
            Promise::Exactly(symbol, element) => (run.symbol, run.element) == (symbol, element),
            Promise::Complete(element) => run.element == element && symbols.is_finished(run.symbol),
        }
    });
    as_promised && !cell.holds.is_empty()
}

fn union(into: &mut [u64], from: &[u64]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into |= from;
    }
}
