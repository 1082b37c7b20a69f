//! The command line.

#![forbid(unsafe_code)]

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};

use super::operation;
use crate::reduce::{DataType, Operator};
use crate::schedule::Algorithm;
use crate::signature::Kind;

/// Measures collective operations, checks their results, and compares.
#[derive(Parser, Debug)]
#[command(
    name = "unisono-bench",
    version,
    after_help = "Sizes take K, M and G (powers of 1024). The size of an operation in blocks (allgather, gather, \
                  scatter, reduce_scatter, alltoall) is that of all blocks together.\n\n\
                  Times: every rank times every iteration; the largest over the ranks counts. Over rounds, p50 and p99 \
                  are medians, min the least.\n\n\
                  Exit status: 0; 1 if a result was wrong; 2 if the benchmark could not run."
)]
pub(super) struct Options {
    /// What to measure: allreduce, reduce, broadcast, allgather, gather, scatter, reduce_scatter, alltoall, barrier,
    /// sendrecv, or all [default: allreduce]
    #[arg(value_name = "OPERATION", value_parser = operations)]
    operations: Vec<Operations>,

    /// Start so many ranks on this host; without it, a launcher has started this one
    #[arg(long, value_name = "N")]
    pub(super) ranks: Option<NonZeroU16>,

    /// The smallest size
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8", value_parser = bytes)]
    min_bytes: u64,

    /// The largest size
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    max_bytes: u64,

    /// From one size to the next by this factor
    #[arg(short = 'f', long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,

    /// From one size to the next by so many bytes instead
    #[arg(short = 'i', long, value_name = "BYTES", value_parser = step, conflicts_with = "factor")]
    step: Option<NonZeroU64>,

    /// These sizes instead
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = bytes)]
    sizes: Vec<u64>,

    /// Element types
    #[arg(short = 'd', long, value_name = "TYPE,…", value_delimiter = ',', default_value = "float32", value_parser = dtype)]
    pub(super) types: Vec<DataType>,

    /// Operators: sum, product, min, max, average, premulsum (by 2), and, or, xor
    #[arg(short = 'o', long, value_name = "OPERATOR,…", value_delimiter = ',', default_value = "sum", value_parser = operator)]
    pub(super) operators: Vec<Operator>,

    /// Roots
    #[arg(short = 'r', long, value_name = "RANK,…", value_delimiter = ',', default_value = "0")]
    pub(super) roots: Vec<u32>,

    /// Algorithms by name, or auto
    #[arg(short = 'a', long, value_name = "NAME,…", value_delimiter = ',', default_value = "auto", value_parser = choice)]
    pub(super) algorithms: Vec<Choice>,

    /// Transports: shm, tcp
    #[arg(short = 't', long, value_name = "NAME,…", value_delimiter = ',', default_value = "shm", value_parser = transport)]
    pub(super) transports: Vec<Transport>,

    /// How operations are called: blocking, or work (started, then waited for)
    #[arg(long, value_name = "CALL,…", value_delimiter = ',', default_value = "blocking", value_parser = call)]
    pub(super) calls: Vec<CallStyle>,

    /// Where results go: out (to a buffer of their own), in (in place)
    #[arg(long, value_name = "PLACE,…", value_delimiter = ',', default_value = "out", value_parser = place)]
    pub(super) places: Vec<Place>,

    /// So many timed iterations, whatever the time
    #[arg(short = 'n', long, value_name = "N")]
    pub(super) iterations: Option<NonZeroU32>,

    /// So many iterations before the timed ones, whatever the time
    #[arg(short = 'w', long, value_name = "N")]
    pub(super) warmup: Option<u32>,

    /// Seconds of timed iterations for each case and round; warming up takes a fifth more
    #[arg(long, value_name = "SECONDS", default_value = "0.2", value_parser = seconds)]
    pub(super) budget: Duration,

    /// A barrier before each iteration, outside of its time; without it iterations run back to back
    #[arg(long)]
    pub(super) barrier: bool,

    /// Bind each rank to a processor, as mpirun does when there are enough
    #[arg(long)]
    pub(super) bind: bool,

    /// Measure everything so many times in turn
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) rounds: NonZeroU32,

    /// Check each case once before it is timed
    #[arg(short = 'c', long, value_name = "0|1", default_value = "1", action = ArgAction::Set, value_parser = switch)]
    pub(super) check: bool,

    /// Another program, run once per round by a shell; it prints lines "operation bytes p50_us p99_us"
    #[arg(long = "peer", value_name = "NAME=COMMAND", value_parser = peer)]
    pub(super) peers: Vec<Command>,

    /// Write all results to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,

    /// The deadline of each operation, and of each run of a peer
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(super) timeout: Duration,

    /// Measure nothing: prove the schedules of the operations and algorithms (default: all) for 1 to --ranks ranks
    /// (default: 16)
    #[arg(long)]
    pub(super) check_schedules: bool,
}

/// One word of the list of operations.
#[derive(Clone, Debug)]
struct Operations(Vec<Kind>);

/// An algorithm by name, or the library's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Automatic,
    Named(Algorithm),
}

/// What links are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    SharedMemory,
    Tcp,
}

/// How an operation is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallStyle {
    Blocking,
    Work,
}

/// Where its result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    In,
    Out,
}

/// Another program to compare with.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) name: String,
    pub(super) command: String,
}

impl Options {
    /// The operations, none twice.
    pub(super) fn operations(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = Vec::new();
        for kind in self.operations.iter().flat_map(|word| &word.0) {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        match (kinds.is_empty(), self.check_schedules) {
            (false, _) => kinds,
            (true, true) => operation::ALL.into(),
            (true, false) => vec![Kind::Allreduce],
        }
    }

    /// The sizes in bytes, as given.
    pub(super) fn sizes(&self) -> Vec<u64> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let next = |&bytes: &u64| match self.step {
            Some(step) => bytes.checked_add(step.get()),
            // From nothing no factor leads on.
            None if bytes == 0 => None,
            None => bytes.checked_mul(self.factor),
        };
        std::iter::successors(Some(self.min_bytes), next)
            .take_while(|&bytes| bytes <= self.max_bytes)
            .collect()
    }
}

impl Choice {
    pub(super) fn name(self) -> &'static str {
        match self {
            Choice::Automatic => "auto",
            Choice::Named(algorithm) => algorithm.name(),
        }
    }
}

impl Transport {
    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::SharedMemory => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

impl CallStyle {
    pub(super) fn name(self) -> &'static str {
        match self {
            CallStyle::Blocking => "blocking",
            CallStyle::Work => "work",
        }
    }
}

impl Place {
    pub(super) fn name(self) -> &'static str {
        match self {
            Place::In => "in",
            Place::Out => "out",
        }
    }
}

fn operations(text: &str) -> Result<Operations, String> {
    match operation::from_name(text) {
        Some(kind) => Ok(Operations(vec![kind])),
        None if text == "all" => Ok(Operations(operation::ALL.into())),
        None => Err(one_of("operation", operation::ALL.map(operation::name).into_iter().chain(["all"]))),
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        _ => return Err("a size is a number, then K, M, G or nothing".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "a size is a number, then K, M, G or nothing".to_owned())?;
    number.checked_mul(1 << shift).filter(|&bytes| bytes <= 1 << 46).ok_or("too large".to_owned())
}

fn step(text: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(bytes(text)?).ok_or("a step is at least one byte".to_owned())
}

fn dtype(text: &str) -> Result<DataType, String> {
    let names = DataType::ALL.map(DataType::name);
    DataType::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| one_of("type", names))
}

fn operator(text: &str) -> Result<Operator, String> {
    let all = [
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(2.0),
        Operator::BitAnd,
        Operator::BitOr,
        Operator::BitXor,
    ];
    let name = |operator: Operator| Operator::name_of(operator.number());
    all.into_iter().find(|&operator| name(operator) == text).ok_or_else(|| one_of("operator", all.map(name)))
}

fn choice(text: &str) -> Result<Choice, String> {
    match text {
        "auto" => Ok(Choice::Automatic),
        name => Algorithm::from_name(name).map(Choice::Named).map_err(|error| error.to_string()),
    }
}

fn transport(text: &str) -> Result<Transport, String> {
    let all = [Transport::SharedMemory, Transport::Tcp];
    all.into_iter().find(|t| t.name() == text).ok_or_else(|| one_of("transport", all.map(Transport::name)))
}

fn call(text: &str) -> Result<CallStyle, String> {
    let all = [CallStyle::Blocking, CallStyle::Work];
    all.into_iter().find(|c| c.name() == text).ok_or_else(|| one_of("call", all.map(CallStyle::name)))
}

fn place(text: &str) -> Result<Place, String> {
    let all = [Place::In, Place::Out];
    all.into_iter().find(|p| p.name() == text).ok_or_else(|| one_of("place", all.map(Place::name)))
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|_| "not a duration".to_owned())
}

fn peer(text: &str) -> Result<Command, String> {
    match text.split_once('=') {
        Some((name, command)) if !name.is_empty() && !command.is_empty() => {
            Ok(Command { name: name.to_owned(), command: command.to_owned() })
        }
        _ => Err("NAME=COMMAND".to_owned()),
    }
}

fn one_of(what: impl fmt::Display, names: impl IntoIterator<Item = &'static str>) -> String {
    format!("no such {what}; there are {}", names.into_iter().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &[&str]) -> Options {
        Options::parse_from(["unisono-bench"].iter().chain(arguments))
    }

    #[test]
    fn the_definition_is_sound() {
        Options::command().debug_assert();
    }

    #[test]
    fn sizes_are_swept_as_asked() {
        assert_eq!(parse(&["-b", "8", "-e", "1K", "-f", "4"]).sizes(), [8, 32, 128, 512]);
        assert_eq!(parse(&["-b", "0", "-e", "24", "-i", "8"]).sizes(), [0, 8, 16, 24]);
        assert_eq!(parse(&["-b", "0"]).sizes(), [0]);
        assert_eq!(parse(&["--sizes", "1K,3,2M"]).sizes(), [1024, 3, 2 << 20]);
        for bad in ["-1", "K", "1T", "", "999999999999G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn operations_are_named_once_or_all() {
        assert_eq!(parse(&[]).operations(), [Kind::Allreduce]);
        assert_eq!(parse(&["barrier", "barrier"]).operations(), [Kind::Barrier]);
        assert_eq!(parse(&["all", "barrier"]).operations(), operation::ALL);
        assert!(Options::try_parse_from(["unisono-bench", "send"]).is_err());
    }

    #[test]
    fn a_peer_has_a_name_and_a_command() {
        let command = peer("mpi=mpirun -x A=B prog").expect("it has both");
        assert_eq!((command.name.as_str(), command.command.as_str()), ("mpi", "mpirun -x A=B prog"));
        assert!(peer("mpi").is_err() && peer("=x").is_err());
    }
}
