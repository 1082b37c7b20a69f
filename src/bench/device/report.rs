//! The table of device memory, subjects side by side, and the same as JSON.

#![forbid(unsafe_code)]

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::rank::Outcome;
use crate::bench::case::Case;
use crate::bench::measure::{Sample, bandwidth};
use crate::bench::operation;
use crate::bench::options::Options;
use crate::bench::output::say;
use crate::bench::peer::Peer;
use crate::bench::report::{self, Times, described, median};
use crate::error::Result;
use crate::reduce::Operator;

/// Everything that was measured.
pub(super) struct Report<'a> {
    options: &'a Options,
    size: u32,
    devices: u32,
    subjects: Vec<String>,
    rows: Vec<Row>,
    /// For each peer, all that it reported in all rounds.
    peers: Vec<Vec<Peer>>,
}

struct Row {
    case: Case,
    cells: Vec<Cell>,
}

/// What one subject did.
#[derive(Default)]
struct Cell {
    /// One for each round.
    samples: Vec<Sample>,
    refusal: Option<String>,
}

impl<'a> Report<'a> {
    pub(super) fn new(cases: Vec<Case>, options: &'a Options, size: u32, devices: u32) -> Report<'a> {
        let subjects: Vec<String> =
            options.libraries().iter().map(|library| library.name().to_owned()).collect();
        let cells = || subjects.iter().map(|_| Cell::default()).collect();
        let rows = cases.into_iter().map(|case| Row { case, cells: cells() }).collect();
        Report { options, size, devices, subjects, rows, peers: vec![Vec::new(); options.peers.len()] }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn case(&self, row: usize) -> Case {
        self.rows[row].case
    }

    pub(super) fn add(&mut self, row: usize, subject: usize, outcome: Outcome) {
        let cell = &mut self.rows[row].cells[subject];
        match outcome {
            Outcome::Measured(sample) => cell.samples.push(sample),
            Outcome::Refused(why) => cell.refusal = Some(why),
        }
    }

    pub(super) fn add_peer(&mut self, peer: usize, times: Vec<Peer>) {
        self.peers[peer].extend(times);
    }

    /// Wrong elements in all.
    pub(super) fn errors(&self) -> u64 {
        self.rows.iter().flat_map(|row| &row.cells).filter_map(Cell::errors).sum()
    }

    /// Whether the first subject, which the others are compared with, could do nothing at all: why, as far as
    /// is known.
    pub(super) fn nothing(&self) -> Option<String> {
        let firsts = || self.rows.iter().map(|row| &row.cells[0]);
        let why = firsts().find_map(|cell| cell.refusal.clone());
        firsts().all(|cell| cell.samples.is_empty()).then(|| {
            let why = why.unwrap_or_else(|| "it has not been asked to".to_owned());
            format!("{} could do nothing of it: {why}", self.subjects[0])
        })
    }

    /// Prints the head of the table, and what each subject is.
    pub(super) fn begin(&self, subjects: &[String]) {
        let ranks = if self.options.threads { "threads of one process" } else { "processes" };
        say!(
            "# unisono-bench {}: {} ranks ({ranks}) on {} GPUs, rounds {}, device memory",
            env!("CARGO_PKG_VERSION"),
            self.size,
            self.devices.min(self.size),
            self.options.rounds
        );
        say!(
            "# µs, the slowest rank's; host: how long a call held its thread; GB/s of p50; ratio: time over {}'s",
            self.subjects[0]
        );
        if self.options.offset > 0 {
            say!("# inputs and outputs begin {} bytes behind an aligned address", self.options.offset);
        }
        subjects.iter().for_each(|subject| say!("# {subject}"));
        say!("{}", self.head());
    }

    /// Prints a line as soon as it is complete.
    pub(super) fn tell(&self, row: usize) {
        if !self.waits_for_more() {
            say!("{}", self.line(&self.rows[row]));
        }
    }

    /// Prints what is left, and writes the file.
    pub(super) fn finish(&self) -> Result<()> {
        if self.waits_for_more() {
            for row in &self.rows {
                say!("{}", self.line(row));
            }
        }
        report::write(self.options, &self.json())
    }

    /// Whether lines are complete only at the end.
    fn waits_for_more(&self) -> bool {
        self.options.rounds.get() > 1 || !self.peers.is_empty()
    }

    fn head(&self) -> String {
        let mut head = format!(
            "{:<14} {:>11} {:<10} {:<9} {:>4} {:<4} {:<18} {:<8} {:<5} {:>10} {:>10} {:>7} {:>7} {:>7}",
            "operation",
            "size",
            "type",
            "operator",
            "root",
            "link",
            "algorithm",
            "call",
            "place",
            self.subjects[0],
            "p99",
            "host",
            "algbw",
            "busbw"
        );
        let others = self.subjects[1..].iter().map(String::as_str);
        for name in others.chain(self.options.peers.iter().map(|peer| peer.name.as_str())) {
            write!(head, " {name:>12} {:>7}", "ratio").expect("a String takes all");
        }
        write!(head, " {:>6}", "errors").expect("a String takes all");
        head
    }

    fn line(&self, row: &Row) -> String {
        let case = &row.case;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let time = |time: Option<f64>| or_dash(time.map(|time| format!("{time:.2}")));
        let first = &row.cells[0];
        let speed = first.p50().map(|p50| bandwidth(case.bytes(), p50));
        let rate = |factor: f64| or_dash(speed.map(|speed| format!("{:.2}", speed * factor)));
        let mut line = format!(
            "{:<14} {:>11} {:<10} {:<9} {:>4} {:<4} {:<18} {:<8} {:<5} {:>10} {:>10} {:>7} {:>7} {:>7}",
            operation::name(case.kind),
            case.bytes(),
            case.dtype.name(),
            case.operator.map_or("-", |operator| Operator::name_of(operator.number())),
            or_dash(case.root.map(|root| root.to_string())),
            case.transport.name(),
            case.algorithm.name(),
            case.call.name(),
            case.place.name(),
            time(first.p50()),
            time(first.p99()),
            time(first.host()),
            rate(1.0),
            rate(operation::bus_factor(case.kind, self.size)),
        );
        let others = row.cells[1..].iter().map(Cell::p50);
        let peers =
            self.peers.iter().map(|times| Times::of(times, case, self.options).map(|times| times.p50));
        for p50 in others.chain(peers) {
            let ratio = p50.zip(first.p50()).map(|(other, own)| format!("{:.2}x", other / own));
            write!(line, " {:>12} {:>7}", time(p50), or_dash(ratio)).expect("a String takes all");
        }
        let errors = row.cells.iter().filter_map(Cell::errors).reduce(|a, b| a + b);
        write!(line, " {:>6}", or_dash(errors.map(|errors| errors.to_string()))).expect("a String takes all");
        for (name, cell) in self.subjects.iter().zip(&row.cells) {
            if let Some(why) = &cell.refusal {
                write!(line, "  # {name}: {why}").expect("a String takes all");
            }
        }
        line
    }

    fn json(&self) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "memory": "device",
            "ranks": self.size,
            "threads": self.options.threads,
            "gpus": self.devices.min(self.size),
            "rounds": self.options.rounds.get(),
            "subjects": self.subjects,
            "results": self.rows.iter().map(|row| self.row_json(row)).collect::<Vec<_>>(),
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        let case = &row.case;
        let subjects: serde_json::Map<String, Value> = self
            .subjects
            .iter()
            .zip(&row.cells)
            .map(|(name, cell)| (name.clone(), self.cell_json(case, cell)))
            .collect();
        let peers: serde_json::Map<String, Value> = self
            .options
            .peers
            .iter()
            .zip(&self.peers)
            .filter_map(|(peer, times)| {
                let Times { p50, p99, rounds } = Times::of(times, case, self.options)?;
                let value = json!({ "p50_us": p50, "p99_us": p99, "p50_us_of_rounds": rounds });
                Some((peer.name.clone(), value))
            })
            .collect();
        let mut described = described(case);
        described["subjects"] = subjects.into();
        described["peers"] = peers.into();
        described
    }

    fn cell_json(&self, case: &Case, cell: &Cell) -> Value {
        let Some((p50, p99)) = cell.p50().zip(cell.p99()) else {
            return json!({ "refusal": cell.refusal });
        };
        let speed = bandwidth(case.bytes(), p50);
        json!({
            "iterations": cell.samples.iter().map(|sample| sample.iterations).sum::<u64>(),
            "p50_us": p50,
            "p99_us": p99,
            "min_us": cell.samples.iter().map(|sample| sample.min).fold(f64::INFINITY, f64::min),
            "host_us": cell.host(),
            "p50_us_of_rounds": cell.samples.iter().map(|sample| sample.p50).collect::<Vec<_>>(),
            "algorithm_bandwidth_gb_s": speed,
            "bus_bandwidth_gb_s": speed * operation::bus_factor(case.kind, self.size),
            "errors": cell.errors(),
        })
    }
}

impl Cell {
    fn p50(&self) -> Option<f64> {
        (!self.samples.is_empty()).then(|| median(self.samples.iter().map(|sample| sample.p50)))
    }

    fn p99(&self) -> Option<f64> {
        (!self.samples.is_empty()).then(|| median(self.samples.iter().map(|sample| sample.p99)))
    }

    fn host(&self) -> Option<f64> {
        let known: Vec<f64> = self.samples.iter().filter_map(|sample| sample.host).collect();
        (!known.is_empty()).then(|| median(known.into_iter()))
    }

    /// Wrong elements, if that was looked at.
    fn errors(&self) -> Option<u64> {
        self.samples.iter().filter_map(|sample| sample.errors).reduce(|a, b| a + b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::case;
    use crate::signature::Kind;
    use clap::Parser;

    fn sample(p50: f64, host: Option<f64>, errors: Option<u64>) -> Outcome {
        let (p99, min) = (2.0 * p50, p50 / 2.0);
        Outcome::Measured(Sample { iterations: 10, p50, p99, min, host, errors })
    }

    #[test]
    fn a_first_subject_that_could_do_nothing_is_told() {
        let options = ["unisono-bench", "--library", "native", "--library", "x=/x", "--sizes", "8,64"];
        let options = Options::parse_from(options);
        let cases = || case::sweeps(&options, Kind::Allreduce, 2).flatten().collect::<Vec<Case>>();
        let mut report = Report::new(cases(), &options, 2, 2);
        for row in 0..2 {
            report.add(row, 0, Outcome::Refused("it is staged".into()));
            report.add(row, 1, sample(20.0, None, Some(0)));
        }
        assert_eq!(report.nothing().as_deref(), Some("native could do nothing of it: it is staged"));
        report.add(1, 0, sample(10.0, None, Some(0)));
        assert_eq!(report.nothing(), None);
        let mut report = Report::new(cases(), &options, 2, 2);
        report.add(0, 0, sample(10.0, None, Some(0)));
        report.add(1, 0, Outcome::Refused("it is staged".into()));
        assert_eq!(report.nothing(), None);
    }

    #[test]
    fn subjects_stand_side_by_side_and_refusals_say_why() {
        let options = Options::parse_from([
            "unisono-bench",
            "--library",
            "native",
            "--library",
            "nccl=/libnccl.so.2",
            "--calls",
            "stream,graph",
            "--sizes",
            "1M",
        ]);
        let cases: Vec<Case> = case::sweeps(&options, Kind::Allreduce, 4).flatten().collect();
        let mut report = Report::new(cases, &options, 4, 4);
        report.add(0, 0, sample(10.0, Some(3.0), Some(0)));
        report.add(0, 1, sample(25.0, Some(9.0), Some(1)));
        report.add(1, 0, Outcome::Refused("cannot be captured: it is staged".into()));
        report.add(1, 1, sample(20.0, None, Some(0)));
        let head: Vec<String> = report.head().split_whitespace().map(str::to_owned).collect();
        let line = |row: usize| report.line(&report.rows[row]);
        let cell = |row: usize, name: &str| {
            let column = head.iter().position(|word| word == name).unwrap();
            line(row).split_whitespace().nth(column).unwrap().to_owned()
        };
        assert_eq!(
            (cell(0, "native"), cell(0, "host"), cell(0, "nccl")),
            ("10.00".into(), "3.00".into(), "25.00".into())
        );
        assert_eq!((cell(0, "ratio"), cell(0, "errors")), ("2.50x".into(), "1".into()));
        // A mebibyte in 10 µs, and one and a half times that for a bus of four ranks.
        assert_eq!((cell(0, "algbw"), cell(0, "busbw")), ("104.86".into(), "157.29".into()));
        assert_eq!(
            (cell(1, "native"), cell(1, "ratio"), cell(1, "nccl")),
            ("-".into(), "-".into(), "20.00".into())
        );
        assert!(line(1).ends_with("  # native: cannot be captured: it is staged"), "{}", line(1));
        assert_eq!(report.errors(), 1);
        let json = report.json();
        assert_eq!(json["results"][0]["subjects"]["nccl"]["host_us"], 9.0);
        assert_eq!(json["results"][1]["subjects"]["native"]["refusal"], "cannot be captured: it is staged");
    }
}
