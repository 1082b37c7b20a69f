//! The benchmark, `unisono-bench`: measures operations over sizes, types, algorithms and transports, checks their
//! results, and sets them beside other programs that are run in turn.
//!
//! Every rank runs [`measure::Rank`] over the same list of [`case::Case`]s; rank 0 prints. With `--ranks` the program
//! starts its own ranks through the launcher (`crate::run`); else it is a rank of whoever started it.

mod case;
mod measure;
mod operation;
mod options;
mod peer;
mod report;
mod schedules;
mod values;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::error::{Result, fail};
use crate::rendezvous::environment::{Launch, Launcher};
use crate::run;
use case::Case;
use measure::Rank;
use options::Options;
use peer::Peer;
use report::Report;

/// The exit status when a result was wrong.
const WRONG: u8 = 1;
/// The exit status when something could not be measured.
const FAILED: u8 = 2;

/// The whole program. Answers 0, or 1 if a result (or a schedule) was wrong, or 2 if the benchmark could not run.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let right = match Role::find(&options) {
        Ok(Role::Launcher(command)) => return run::launch(command),
        Ok(Role::Rank) => measure_all(&options),
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
    /// It needs none.
    Checker,
}

impl Role {
    fn find(options: &Options) -> Result<Role> {
        if options.check_schedules {
            return Ok(Role::Checker);
        }
        let Some(ranks) = options.ranks else {
            return match Launch::from_env() {
                Ok(_) => Ok(Role::Rank),
                Err(error) => Err(error.context("neither --ranks was given nor a launcher's environment")),
            };
        };
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
                    .map_err(|cause| crate::error::Error::system("cannot find this program", cause))?;
                let mut command: Vec<OsString> =
                    ["unisono-run", "--no-prefix", "-n", &ranks.to_string(), "--"].map(OsString::from).into();
                command.push(program.into());
                command.extend(std::env::args_os().skip(1));
                Ok(Role::Launcher(command))
            }
        }
    }
}

/// What one rank does. Answers whether every result of this rank was right, on rank 0 whether all ranks' were.
fn measure_all(options: &Options) -> Result<bool> {
    let launch = Launch::from_env()?;
    let size = launch.size as u32;
    let cases = options.cases(size)?;
    let mut rank = Rank::join(options, &cases)?;
    let mut report = Report::new(&cases, options, size);
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
            run_peers(options, &mut rank, &mut report)?;
        }
    }
    if rank.leads() {
        report.finish()?;
    }
    Ok(report.errors() == 0)
}

/// Runs the other programs one after the other, while our ranks sleep.
fn run_peers(options: &Options, rank: &mut Rank, report: &mut Report) -> Result<()> {
    rank.unbind();
    if rank.leads() {
        for (index, peer) in options.peers.iter().enumerate() {
            report.add_peer(index, Peer::run(peer, options.timeout)?);
        }
    }
    rank.meet(options.timeout.saturating_mul(options.peers.len() as u32 + 1))
}

/// Used by [`Options`] to list what is to be measured.
impl Options {
    /// Every case, in the order of measuring: what is to be compared comes next to each other. Combinations that make
    /// no sense are left out, if any is left.
    fn cases(&self, size: u32) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for kind in self.operations() {
            for sweep in case::sweeps(self, kind, size) {
                cases.extend(sweep);
            }
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
