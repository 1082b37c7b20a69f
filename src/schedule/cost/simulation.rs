//! Simulation of a set of schedules: who is ready first is served first, at each processor, port and link.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::error::{Result, fail};
use crate::schedule::checker::{Partners, match_messages};
use crate::schedule::cost::{Model, Widths};
use crate::schedule::ir::{Action, Rank, Representation, Schedule, Span};

pub(super) fn simulate(
    model: &Model,
    schedules: &[&Schedule],
    ranks_per_node: u32,
    widths: Widths,
) -> Result<f64> {
    let partners = match_messages(schedules)?;
    let nodes = schedules.len().div_ceil(ranks_per_node.max(1) as usize);
    let links = vec![vec![0.0; model.links_per_node.max(1) as usize]; nodes];
    let mut simulation = Simulation {
        model,
        schedules,
        partners,
        ranks_per_node: ranks_per_node.max(1),
        widths,
        events: BinaryHeap::new(),
        ready: schedules.iter().map(|schedule| vec![0.0; schedule.steps.len()]).collect(),
        waits: schedules.iter().map(|s| s.steps.iter().map(|step| step.waits_for).collect()).collect(),
        posted: schedules.iter().map(|schedule| vec![None; schedule.steps.len()]).collect(),
        processors: vec![0.0; schedules.len()],
        out_ports: vec![0.0; schedules.len()],
        in_ports: vec![0.0; schedules.len()],
        out_links: links.clone(),
        in_links: links,
        left: schedules.iter().map(|schedule| schedule.steps.len()).sum(),
        end: 0.0,
    };
    simulation.run();
    if simulation.left > 0 {
        fail!(Internal, "{} steps never complete", simulation.left);
    }
    Ok(simulation.end)
}

struct Simulation<'a> {
    model: &'a Model,
    schedules: &'a [&'a Schedule],
    partners: Vec<Partners>,
    ranks_per_node: u32,
    widths: Widths,
    events: BinaryHeap<Event>,
    /// For each rank and step: when the steps it waits for were done; how many are not yet; when it was
    /// posted.
    ready: Vec<Vec<f64>>,
    waits: Vec<Vec<u32>>,
    posted: Vec<Vec<Option<f64>>>,
    /// From when on each is free.
    processors: Vec<f64>,
    out_ports: Vec<f64>,
    in_ports: Vec<f64>,
    out_links: Vec<Vec<f64>>,
    in_links: Vec<Vec<f64>>,
    left: usize,
    end: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    time: f64,
    rank: Rank,
    step: u32,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// All that the step waits for is done.
    Ready,
    /// Both ends of the message are posted; the event is the send's.
    Transfer,
    /// The message is there; the event is the receive's.
    Arrived,
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest event is the greatest, for the heap.
    fn cmp(&self, other: &Event) -> Ordering {
        let rest = |event: &Event| (event.rank, event.step, event.what);
        other.time.total_cmp(&self.time).then_with(|| rest(other).cmp(&rest(self)))
    }
}

impl Simulation<'_> {
    fn run(&mut self) {
        for (rank, schedule) in (0..).zip(self.schedules) {
            for (step, _) in (0..).zip(&schedule.steps).filter(|(_, step)| step.waits_for == 0) {
                self.events.push(Event { time: 0.0, rank, step, what: What::Ready });
            }
        }
        while let Some(event) = self.events.pop() {
            match event.what {
                What::Ready => self.post(event),
                What::Transfer => self.transfer(event),
                What::Arrived => self.arrive(event),
            }
        }
    }

    fn post(&mut self, event: Event) {
        let Event { time, rank, step, .. } = event;
        let work = match self.action(rank, step) {
            Action::Fold { first, count, .. } => {
                let operands =
                    &self.schedules[rank as usize].operands[first as usize..(first + count) as usize];
                operands.iter().map(|&operand| self.bytes(operand)).sum::<f64>() * self.model.combine_time
            }
            Action::Copy { from, .. } => self.bytes(from) * self.model.copy_time,
            Action::Send { .. } | Action::Receive { .. } | Action::ReceiveReduce { .. } => 0.0,
        };
        let done = self.compute(rank, time, self.model.step_time + work);
        let Some((peer, other)) = self.partners[rank as usize][step as usize] else {
            self.complete(rank, step, done);
            return;
        };
        self.posted[rank as usize][step as usize] = Some(done);
        if let Some(there) = self.posted[peer as usize][other as usize] {
            let (rank, step) = match self.action(rank, step) {
                Action::Send { .. } => (rank, step),
                _ => (peer, other),
            };
            self.events.push(Event { time: done.max(there), rank, step, what: What::Transfer });
        }
    }

    fn transfer(&mut self, event: Event) {
        let Event { time, rank, step, .. } = event;
        let (Action::Send { from, .. }, Some((to, receive))) =
            (self.action(rank, step), self.partners[rank as usize][step as usize])
        else {
            return;
        };
        let (node, other_node) = ((rank / self.ranks_per_node) as usize, (to / self.ranks_per_node) as usize);
        let mut start = time.max(self.out_ports[rank as usize]).max(self.in_ports[to as usize]);
        let link = if node == other_node { self.model.inside } else { self.model.across };
        let mut taken = None;
        if node != other_node {
            let (out, into) = (freest(&self.out_links[node]), freest(&self.in_links[other_node]));
            start = start.max(self.out_links[node][out]).max(self.in_links[other_node][into]);
            taken = Some((out, into));
        }
        if start > time {
            // Not yet: until then, others may use what is free.
            self.events.push(Event { time: start, ..event });
            return;
        }
        let sent = start + self.bytes(from) * link.byte_time;
        self.out_ports[rank as usize] = sent;
        self.in_ports[to as usize] = sent;
        if let Some((out, into)) = taken {
            self.out_links[node][out] = sent;
            self.in_links[other_node][into] = sent;
        }
        self.complete(rank, step, sent);
        self.events.push(Event { time: sent + link.latency, rank: to, step: receive, what: What::Arrived });
    }

    fn arrive(&mut self, event: Event) {
        let Event { time, rank, step, .. } = event;
        let done = match self.action(rank, step) {
            Action::ReceiveReduce { wire, local, .. } => {
                let bytes = self.width(wire) * local.len as f64 + self.bytes(local);
                self.compute(rank, time, bytes * self.model.combine_time)
            }
            _ => time,
        };
        self.complete(rank, step, done);
    }

    /// Keeps the rank's processor busy; when it is done.
    fn compute(&mut self, rank: Rank, ready: f64, seconds: f64) -> f64 {
        let free = &mut self.processors[rank as usize];
        *free = free.max(ready) + seconds;
        *free
    }

    fn complete(&mut self, rank: Rank, step: u32, time: f64) {
        self.left -= 1;
        self.end = self.end.max(time);
        let schedule = self.schedules[rank as usize];
        let successors = schedule.steps[step as usize].successors.clone();
        for &next in &schedule.successors[successors.start as usize..successors.end as usize] {
            let ready = &mut self.ready[rank as usize][next as usize];
            *ready = ready.max(time);
            let waits = &mut self.waits[rank as usize][next as usize];
            *waits -= 1;
            if *waits == 0 {
                self.events.push(Event { time: *ready, rank, step: next, what: What::Ready });
            }
        }
    }

    fn action(&self, rank: Rank, step: u32) -> Action {
        self.schedules[rank as usize].steps[step as usize].action
    }

    fn width(&self, representation: Representation) -> f64 {
        match representation {
            Representation::Element => self.widths.element as f64,
            Representation::Accumulator => self.widths.accumulator as f64,
        }
    }

    fn bytes(&self, span: Span) -> f64 {
        span.len as f64 * self.width(span.representation())
    }
}

/// The link that is free first.
fn freest(links: &[f64]) -> usize {
    (0..links.len()).min_by(|&a, &b| links[a].total_cmp(&links[b])).unwrap_or(0)
}
