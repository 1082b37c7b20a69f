//! The table, and the same as JSON.

#![forbid(unsafe_code)]

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::case::Case;
use super::file;
use super::measure::{Sample, bandwidth};
use super::operation;
use super::options::Options;
use super::output::say;
use super::peer::Peer;
use crate::error::Result;
use crate::reduce::Operator;
use crate::signature::Kind;

/// Everything that was measured.
pub(super) struct Report<'a> {
    options: &'a Options,
    size: u32,
    rows: Vec<Row>,
    /// For each peer, all that it reported in all rounds.
    peers: Vec<Vec<Peer>>,
}

struct Row {
    case: Case,
    /// One for each round.
    samples: Vec<Sample>,
}

impl<'a> Report<'a> {
    pub(super) fn new(cases: &[Case], options: &'a Options, size: u32) -> Report<'a> {
        let rows = cases.iter().map(|&case| Row { case, samples: Vec::new() }).collect();
        Report { options, size, rows, peers: vec![Vec::new(); options.peers.len()] }
    }

    pub(super) fn add(&mut self, row: usize, sample: Sample) {
        self.rows[row].samples.push(sample);
    }

    pub(super) fn add_peer(&mut self, peer: usize, times: Vec<Peer>) {
        self.peers[peer].extend(times);
    }

    /// Wrong elements in all.
    pub(super) fn errors(&self) -> u64 {
        self.rows.iter().filter_map(Row::errors).sum()
    }

    /// Prints the head of the table.
    pub(super) fn begin(&self) {
        let rounds = self.options.rounds;
        let between = if self.options.barrier { "a barrier before each iteration" } else { "back to back" };
        say!(
            "# unisono-bench {}: {} ranks, rounds {rounds}, {between}",
            env!("CARGO_PKG_VERSION"),
            self.size
        );
        say!("# times in µs: of each iteration the slowest rank's; bandwidths in GB/s, of p50");
        let mut head = format!(
            "{:<14} {:>11} {:>10} {:<10} {:<9} {:>4} {:<4} {:<26} {:<8} {:<5} {:>10} {:>10} {:>10} {:>7} {:>7} {:>6}",
            "operation",
            "size",
            "count",
            "type",
            "operator",
            "root",
            "link",
            "algorithm",
            "call",
            "place",
            "p50",
            "p99",
            "min",
            "algbw",
            "busbw",
            "errors"
        );
        for peer in &self.options.peers {
            write!(head, " {:>12} {:>7}", peer.name, "ratio").expect("a String takes all");
        }
        say!("{head}");
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
        write(self.options, &self.json())
    }

    /// Whether lines are complete only at the end.
    fn waits_for_more(&self) -> bool {
        self.options.rounds.get() > 1 || !self.peers.is_empty()
    }

    fn line(&self, row: &Row) -> String {
        let case = &row.case;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mut line = format!(
            "{:<14} {:>11} {:>10} {:<10} {:<9} {:>4} {:<4} {:<26} {:<8} {:<5} {:>10.2} {:>10.2} {:>10.2} {:>7.3} {:>7.3} {:>6}",
            operation::name(case.kind),
            case.bytes(),
            case.count(),
            case.dtype.name(),
            case.operator.map_or("-", |operator| Operator::name_of(operator.number())),
            or_dash(case.root.map(|root| root.to_string())),
            case.transport.name(),
            case.algorithm.name(),
            case.call.name(),
            case.place.name(),
            row.p50(),
            row.p99(),
            row.min(),
            row.bandwidth(),
            row.bandwidth() * operation::bus_factor(case.kind, self.size),
            or_dash(row.errors().map(|errors| errors.to_string())),
        );
        for times in &self.peers {
            match Times::of(times, case, self.options) {
                Some(Times { p50, .. }) => {
                    write!(line, " {p50:>12.2} {:>6.2}x", p50 / row.p50()).expect("a String takes all")
                }
                None => write!(line, " {:>12} {:>7}", "-", "-").expect("a String takes all"),
            }
        }
        line
    }

    fn json(&self) -> Value {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ranks": self.size,
            "cores": cores,
            "rounds": self.options.rounds.get(),
            "barrier": self.options.barrier,
            "results": self.rows.iter().map(|row| self.row_json(row)).collect::<Vec<_>>(),
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        let case = &row.case;
        let each = |time: fn(&Sample) -> f64| row.samples.iter().map(time).collect::<Vec<_>>();
        let peers: serde_json::Map<String, Value> = self
            .options
            .peers
            .iter()
            .zip(&self.peers)
            .filter_map(|(peer, times)| {
                let Times { p50, p99, rounds } = Times::of(times, case, self.options)?;
                let value = json!({
                    "p50_us": p50,
                    "p99_us": p99,
                    "ratio": p50 / row.p50(),
                    "p50_us_of_rounds": rounds,
                });
                Some((peer.name.clone(), value))
            })
            .collect();
        let mut described = described(case);
        described["iterations"] = json!(row.samples.iter().map(|sample| sample.iterations).sum::<u64>());
        described["p50_us"] = json!(row.p50());
        described["p99_us"] = json!(row.p99());
        described["min_us"] = json!(row.min());
        described["p50_us_of_rounds"] = json!(each(|sample| sample.p50));
        described["algorithm_bandwidth_gb_s"] = json!(row.bandwidth());
        described["bus_bandwidth_gb_s"] =
            json!(row.bandwidth() * operation::bus_factor(case.kind, self.size));
        described["errors"] = json!(row.errors());
        described["peers"] = json!(peers);
        described
    }
}

impl Row {
    fn p50(&self) -> f64 {
        median(self.samples.iter().map(|sample| sample.p50))
    }

    fn p99(&self) -> f64 {
        median(self.samples.iter().map(|sample| sample.p99))
    }

    fn min(&self) -> f64 {
        self.samples.iter().map(|sample| sample.min).fold(f64::INFINITY, f64::min)
    }

    /// Of the algorithm, in GB/s: the size over the time.
    fn bandwidth(&self) -> f64 {
        bandwidth(self.case.bytes(), self.p50())
    }

    /// Wrong elements, if that was looked at.
    fn errors(&self) -> Option<u64> {
        self.samples.iter().filter_map(|sample| sample.errors).reduce(|a, b| a + b)
    }
}

/// What a peer took for the same: its lines name an operation and a size. Whether it is the same is not known
/// where cases differ in what else decides what has to be done.
pub(super) struct Times {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) rounds: Vec<f64>,
}

impl Times {
    pub(super) fn of(all: &[Peer], case: &Case, options: &Options) -> Option<Times> {
        let several = [
            (options.types.len(), case.kind != Kind::Barrier),
            (options.operators.len(), case.operator.is_some()),
            (options.roots.len(), case.root.is_some()),
        ];
        if several.iter().any(|&(named, decides)| named > 1 && decides) {
            return None;
        }
        let same: Vec<_> =
            all.iter().filter(|peer| peer.kind == case.kind && peer.bytes == case.asked).collect();
        (!same.is_empty()).then(|| Times {
            p50: median(same.iter().map(|peer| peer.p50)),
            p99: median(same.iter().map(|peer| peer.p99)),
            rounds: same.iter().map(|peer| peer.p50).collect(),
        })
    }
}

/// A case as files have it, an object to which what was found is added.
pub(super) fn described(case: &Case) -> Value {
    json!({
        "operation": operation::name(case.kind),
        "bytes": case.bytes(),
        "count": case.count(),
        "type": case.dtype.name(),
        "operator": case.operator.map(|operator| Operator::name_of(operator.number())),
        "root": case.root,
        "transport": case.transport.name(),
        "algorithm": case.algorithm.name(),
        "call": case.call.name(),
        "place": case.place.name(),
    })
}

/// Writes the file that the options ask for, if they do.
pub(super) fn write(options: &Options, results: &Value) -> Result<()> {
    let Some(path) = &options.json else { return Ok(()) };
    file::replace(path, &format!("{results:#}\n"))
}

/// The middle one, or the lower of the two in the middle; of none it is NaN.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0].into_iter()), 1.0);
        assert!(median(std::iter::empty()).is_nan());
    }
}
