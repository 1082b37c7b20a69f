//! The benchmark, `unisono-bench`: measures operations over sizes, types, algorithms and transports, on host
//! and on device memory, checks their results, and sets them beside other programs and libraries that are run
//! in turn.
//!
//! Every rank runs [`measure::Rank`] (on device memory [`device::Rank`]) over the same list of
//! [`case::Case`]s; rank 0 prints. With `--ranks` the program starts its own ranks, as processes through the
//! launcher (`crate::run`) or as threads; else it is a rank of whoever started it.

mod case;
mod copies;
mod device;
mod file;
mod links;
mod local;
mod loops;
mod measure;
mod operation;
mod options;
mod output;
mod peer;
mod report;
mod ring;
mod schedules;
mod seat;
mod sparse;
mod start;
mod values;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use clap::Parser;

use crate::cuda::context::Devices;
use crate::error::{Error, Result, Status, fail};
use crate::rendezvous::environment::{Launch, Launcher};
use crate::rendezvous::hash::HashStore;
use crate::run;
use crate::signature::Kind;
use case::Case;
use measure::Rank;
use options::{CallStyle, Options, Task};
use peer::Peer;
use report::Report;
use seat::Seat;

/// The exit status when a result was wrong.
const WRONG: u8 = 1;
/// The exit status when something could not be measured.
const FAILED: u8 = 2;

/// The whole program. Answers 0, or 1 if a result (or a schedule) was wrong, or 2 if the benchmark could not
/// run. Ends with 141 when nobody reads its output any more.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let right = match Role::find(&options) {
        Ok(Role::Launcher(command)) => return run::launch(command),
        Ok(Role::Rank) => Seat::of_process().and_then(|seat| measure_all(&options, &seat)),
        Ok(Role::Threads(size)) => measure_by_threads(options, size),
        Ok(Role::Alone(task)) => measure_alone(&options, task),
        Ok(Role::Checker) => schedules::check(&options),
        Err(error) => Err(error),
    };
    match right {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(WRONG),
        Err(error) => {
            eprintln!("unisono-bench: {error}");
            ExitCode::from(FAILED)
        }
    }
}

/// What this process is.
enum Role {
    /// It starts the ranks, by this command line of `unisono-run`.
    Launcher(Vec<OsString>),
    /// It is one of them.
    Rank,
    /// It is all of them, this many.
    Threads(u32),
    /// It measures something that has no ranks.
    Alone(Task),
    /// It proves schedules.
    Checker,
}

impl Role {
    fn find(options: &Options) -> Result<Role> {
        if options.check_schedules {
            return Ok(Role::Checker);
        }
        let task = options.task().map_err(|text| Error::new(Status::InvalidArgument, text))?;
        if let Some(text) = options.no_size() {
            fail!(InvalidArgument, "{text}");
        }
        if let Some(name) = options.shared_name() {
            fail!(
                InvalidUsage,
                "two of --library and --peer are called '{name}': give each a name of its own, NAME=..."
            );
        }
        if let Some(option) = options.idle(task) {
            fail!(InvalidUsage, "{option}");
        }
        match (task, options.ranks) {
            (Task::LocalBroadcast | Task::LocalReduce | Task::ReduceLoops, Some(_)) => {
                fail!(InvalidUsage, "{} has no ranks; leave --ranks out", task.name())
            }
            (Task::LocalBroadcast | Task::LocalReduce | Task::ReduceLoops, None) => {
                if Launch::from_env().is_ok_and(|launch| launch.size > 1) {
                    fail!(InvalidUsage, "{} has no ranks; start it alone, by no launcher", task.name());
                }
                return Ok(Role::Alone(task));
            }
            (Task::Links, None) if Launch::from_env().is_err() => return Ok(Role::Alone(task)),
            (Task::Links, _) if options.threads => {
                fail!(InvalidUsage, "the ranks of links are processes; leave --threads out")
            }
            _ => {}
        }
        if !options.on_device()
            && options.calls().iter().any(|call| matches!(call, CallStyle::Stream | CallStyle::Graph))
        {
            fail!(InvalidUsage, "calls on a stream or in a graph are for device memory: give --device, too");
        }
        if options.on_device() && options.bind {
            fail!(
                InvalidUsage,
                "--bind is for host memory: leave it out with --device, and start the ranks bound, as by taskset or \
                 mpirun"
            );
        }
        if options.on_device() && options.barrier && options.enqueues() {
            fail!(
                InvalidUsage,
                "--barrier is for calls that wait for their end, not for those on a stream or in a graph: with --device \
                 give --calls blocking, work or both"
            );
        }
        if options.on_device() {
            // One line for all ranks.
            Devices::open()?;
        }
        let Some(ranks) = options.ranks else {
            return match Launch::from_env() {
                Ok(_) => Ok(Role::Rank),
                Err(error) => Err(error.context("neither --ranks was given nor a launcher's environment")),
            };
        };
        if options.threads {
            return Ok(Role::Threads(u32::from(ranks.get())));
        }
        match Launch::from_env() {
            // This process was started below.
            Ok(launch) if launch.launcher == Launcher::Unisono => {
                if launch.size != usize::from(ranks.get()) {
                    fail!(
                        InvalidUsage,
                        "--ranks {ranks} inside a job of {} ranks; leave it out there",
                        launch.size
                    );
                }
                Ok(Role::Rank)
            }
            _ => {
                let program = std::env::current_exe()
                    .map_err(|cause| Error::system("cannot find this program", cause))?;
                let mut command: Vec<OsString> =
                    ["unisono-run", "--no-prefix", "--end-unread", "-n", &ranks.to_string(), "--"]
                        .map(OsString::from)
                        .into();
                if let Some(hosts) = options.hosts {
                    // Each rank is told its host before it is this program.
                    let [ours, theirs] = peer::HOST_NAMES;
                    let script = format!(
                        "export {ours}=host$((UNISONO_RANK * {hosts} / UNISONO_SIZE)); \
                         export {theirs}=${ours}; exec \"$0\" \"$@\""
                    );
                    command.extend(["sh", "-c", &script].map(OsString::from));
                }
                command.push(program.into());
                command.extend(std::env::args_os().skip(1));
                Ok(Role::Launcher(command))
            }
        }
    }
}

/// Whoever writes a file learns before anything is measured whether that can be.
fn try_out_files(options: &Options) -> Result<()> {
    options.json.iter().chain(&options.tune).try_for_each(|path| file::try_out(path))
}

/// What needs no ranks.
fn measure_alone(options: &Options, task: Task) -> Result<bool> {
    try_out_files(options)?;
    match task {
        Task::LocalBroadcast | Task::LocalReduce => local::measure(options, task),
        Task::Links => links::measure(options, None),
        _ => loops::measure(options),
    }
}

/// Ranks that are threads of this process. The first that fails ends them all.
fn measure_by_threads(options: Options, size: u32) -> Result<bool> {
    let (options, store) = (Arc::new(options), Arc::new(HashStore::new()));
    let (sender, results) = mpsc::channel();
    for rank in 0..size {
        let (options, sender) = (options.clone(), sender.clone());
        let seat = Seat::of_thread(rank, size, store.clone());
        let body = move || {
            // Whoever listens has gone only if another rank has failed.
            let _ = sender.send(measure_all(&options, &seat));
        };
        std::thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(body)
            .map_err(|cause| Error::system("cannot start a thread for each rank", cause))?;
    }
    drop(sender);
    let mut right = true;
    for _ in 0..size {
        match results.recv() {
            Ok(result) => right &= result?,
            Err(_) => fail!(Internal, "the thread of a rank has ended without a result"),
        }
    }
    Ok(right)
}

/// What one rank does. Answers whether every result of this rank was right, on rank 0 whether all ranks'
/// were.
fn measure_all(options: &Options, seat: &Seat) -> Result<bool> {
    if seat.rank == 0 {
        try_out_files(options)?;
    }
    match options.task() {
        Ok(Task::Start) if options.on_device() => return device::start(options, seat),
        Ok(Task::Start) => return start::measure(options, seat),
        Ok(Task::Links) => return links::measure(options, Some(seat)),
        _ => {}
    }
    if options.bits {
        return device::bits(options, seat);
    }
    if let Some(file) = &options.tune {
        return device::tune(options, seat, file);
    }
    let cases = options.cases(seat.size)?;
    if options.on_device() {
        return device::measure(options, seat, cases);
    }
    let mut rank = Rank::join(options, &cases, seat)?;
    let mut report = Report::new(&cases, options, seat.size);
    if rank.leads() {
        report.begin();
    }
    for round in 0..options.rounds.get() {
        for (index, case) in cases.iter().enumerate() {
            let sample = rank.measure(case, options.check && round == 0)?;
            report.add(index, sample);
            if rank.leads() {
                report.tell(index);
            }
        }
        if !options.peers.is_empty() {
            rank.unbind();
            if rank.leads() {
                run_peers(options, |peer, times| report.add_peer(peer, times))?;
            }
            rank.meet(patience(options))?;
        }
    }
    if rank.leads() {
        report.finish()?;
    }
    Ok(report.errors() == 0)
}

/// Runs the other programs one after the other, while our ranks sleep.
fn run_peers(options: &Options, mut add: impl FnMut(usize, Vec<Peer>)) -> Result<()> {
    for (index, peer) in options.peers.iter().enumerate() {
        add(index, Peer::run(peer, options.hosts.is_some(), options.timeout)?);
    }
    Ok(())
}

/// How long the other ranks wait for [`run_peers`].
fn patience(options: &Options) -> Duration {
    options.timeout.saturating_mul(options.peers.len() as u32 + 1)
}

/// Used by [`Options`] to list what is to be measured.
impl Options {
    /// Every case, in the order of measuring: what is to be compared comes next to each other. Combinations
    /// that make no sense are left out, if any is left.
    fn cases(&self, size: u32) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for kind in self.operations() {
            for sweep in case::sweeps(self, kind, size) {
                cases.extend(sweep);
            }
        }
        // A rank that is alone has nobody to send to.
        cases.retain(|case| size > 1 || case.kind != Kind::Send);
        if self.on_device() {
            // A barrier touches no memory.
            cases.retain(|case| case.kind != Kind::Barrier);
        }
        if self.several() {
            cases.retain(|case| case::over_several(case.kind) || case.kind == Kind::SparseAllreduce);
        }
        if cases.is_empty() {
            fail!(
                InvalidArgument,
                "nothing to measure: no algorithm, operator and type of those given go with an operation given"
            );
        }
        Ok(cases)
    }
}
