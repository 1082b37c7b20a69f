//! What options choose from: each with the name that the command line and the reports have for it, and its
//! parser.

use std::fmt;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use crate::bench::operation;
use crate::cuda::exchange::{Overlap, Stages};
use crate::reduce::{DataType, Operator};
use crate::schedule::Algorithm;
use crate::signature::Kind;

/// One word of the list of operations.
#[derive(Clone, Debug)]
pub(super) enum Word {
    Collectives(Vec<Kind>),
    Task(Task),
}

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Task {
    Collectives,
    Links,
    LocalBroadcast,
    LocalReduce,
    Start,
    ReduceLoops,
}

/// Who runs the operations on device memory.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bench) enum Library {
    /// This program's own library, by its own face.
    Native,
    /// One with NCCL's ABI.
    Nccl {
        name: String,
        path: PathBuf,
        /// In windows of its own.
        windows: bool,
    },
}

/// An algorithm by name, or the library's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Choice {
    Automatic,
    Named(Algorithm),
    /// A broadcast by stages, on device memory.
    Stages(Stages),
}

/// What links are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Transport {
    Automatic,
    SharedMemory,
    Tcp,
}

/// How an operation is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum CallStyle {
    Blocking,
    Work,
    Stream,
    Graph,
}

/// Where its result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Place {
    In,
    Out,
}

/// Another program to compare with.
#[derive(Clone, Debug)]
pub(in crate::bench) struct Command {
    pub(in crate::bench) name: String,
    pub(in crate::bench) command: String,
}

impl Choice {
    /// The algorithm's ABI number, if it has one.
    pub(in crate::bench) fn number(self) -> Option<i32> {
        match self {
            Choice::Automatic => None,
            Choice::Named(algorithm) => Some(algorithm as i32),
            Choice::Stages(stages) => Some(stages.number()),
        }
    }

    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Choice::Automatic => "auto",
            Choice::Named(algorithm) => algorithm.name(),
            Choice::Stages(stages) => stages.name(),
        }
    }
}

impl Task {
    const ALONE: [Task; 5] =
        [Task::Links, Task::LocalBroadcast, Task::LocalReduce, Task::Start, Task::ReduceLoops];

    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Task::Collectives => "collectives",
            Task::Links => "links",
            Task::LocalBroadcast => "local-broadcast",
            Task::LocalReduce => "local-reduce",
            Task::Start => "start",
            Task::ReduceLoops => "reduce-loops",
        }
    }
}

impl Library {
    /// As columns are headed.
    pub(in crate::bench) fn name(&self) -> &str {
        match self {
            Library::Native => "native",
            Library::Nccl { name, .. } => name,
        }
    }
}

impl Transport {
    const ALL: [Transport; 3] = [Transport::Automatic, Transport::SharedMemory, Transport::Tcp];

    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Transport::Automatic => "auto",
            Transport::SharedMemory => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

impl CallStyle {
    const ALL: [CallStyle; 4] = [CallStyle::Blocking, CallStyle::Work, CallStyle::Stream, CallStyle::Graph];

    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            CallStyle::Blocking => "blocking",
            CallStyle::Work => "work",
            CallStyle::Stream => "stream",
            CallStyle::Graph => "graph",
        }
    }
}

impl Place {
    pub(in crate::bench) fn name(self) -> &'static str {
        match self {
            Place::In => "in",
            Place::Out => "out",
        }
    }
}

pub(super) fn word(text: &str) -> Result<Word, String> {
    if let Some(task) = Task::ALONE.into_iter().find(|task| task.name() == text) {
        return Ok(Word::Task(task));
    }
    match operation::from_name(text) {
        Some(kind) => Ok(Word::Collectives(vec![kind])),
        None if text == "all" => Ok(Word::Collectives(operation::ALL.into())),
        None => {
            let kinds = operation::ALL.into_iter().chain(operation::APART);
            let names = kinds.map(operation::name).chain(["all"]);
            Err(one_of("operation", names.chain(Task::ALONE.map(Task::name))))
        }
    }
}

/// Before the path of a library that is to have windows.
const WINDOWS: &str = "windows:";

pub(super) fn library(text: &str) -> Result<Library, String> {
    if text == "native" {
        return Ok(Library::Native);
    }
    let (name, path) = match text.split_once('=') {
        Some((name, path)) => (Some(name.to_owned()), path),
        None => (None, text),
    };
    let (prefix, path) = match path.strip_prefix(WINDOWS) {
        Some(path) => (WINDOWS, path),
        None => ("", path),
    };
    let name = name.unwrap_or_else(|| format!("{prefix}{}", path.rsplit('/').next().unwrap_or(path)));
    if name.is_empty() || path.is_empty() {
        return Err("\"native\", or [NAME=][windows:]PATH".to_owned());
    }
    Ok(Library::Nccl { name, path: path.into(), windows: !prefix.is_empty() })
}

pub(super) fn bytes(text: &str) -> Result<u64, String> {
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

pub(super) fn step(text: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(bytes(text)?).ok_or("a step is at least one byte".to_owned())
}

pub(super) fn dtype(text: &str) -> Result<DataType, String> {
    let names = DataType::ALL.map(DataType::name);
    DataType::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| one_of("type", names))
}

pub(super) fn operator(text: &str) -> Result<Operator, String> {
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

pub(super) fn overlap(text: &str) -> Result<Overlap, String> {
    match text {
        "off" => Ok(Overlap::Off),
        "wait" => Ok(Overlap::Wait),
        "early" => Ok(Overlap::Early),
        _ => Err("use off, wait or early".into()),
    }
}

pub(super) fn choice(text: &str) -> Result<Choice, String> {
    match text {
        "auto" => Ok(Choice::Automatic),
        name => match Stages::ALL.into_iter().find(|stages| stages.name() == name) {
            Some(stages) => Ok(Choice::Stages(stages)),
            None => Algorithm::from_name(name).map(Choice::Named).map_err(|_| {
                let named = Algorithm::ALL.map(Algorithm::name);
                one_of("algorithm", ["auto"].into_iter().chain(named).chain(Stages::ALL.map(Stages::name)))
            }),
        },
    }
}

pub(super) fn transport(text: &str) -> Result<Transport, String> {
    let all = Transport::ALL;
    all.into_iter().find(|t| t.name() == text).ok_or_else(|| one_of("transport", all.map(Transport::name)))
}

pub(super) fn call(text: &str) -> Result<CallStyle, String> {
    let all = CallStyle::ALL;
    all.into_iter().find(|c| c.name() == text).ok_or_else(|| one_of("call", all.map(CallStyle::name)))
}

pub(super) fn place(text: &str) -> Result<Place, String> {
    let all = [Place::In, Place::Out];
    all.into_iter().find(|p| p.name() == text).ok_or_else(|| one_of("place", all.map(Place::name)))
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1".to_owned()),
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|_| "not a duration".to_owned())
}

pub(super) fn peer(text: &str) -> Result<Command, String> {
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
