//! The launcher, `unisono-run`: starts the ranks of a job on this host, shows their output, and ends them
//! together.
//!
//! One thread waits for everything: the ranks' output, their ends, signals, the clock. (The store that the
//! ranks meet in has threads of its own.) docs/launching.md is the user's side.

#![forbid(unsafe_code)]

mod board;
mod ending;
mod environment;
mod job;
mod options;
mod output;
mod pipes;
mod sink;
mod start;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::sys::child::{self, Keeper, OpenFiles, Signals};
use job::Job;
use options::Options;
use start::Trouble;

/// The whole program: reads the command line, runs the job, and answers with the status to exit with.
pub fn main() -> ExitCode {
    launch(std::env::args_os())
}

/// The same for a command line given (the program's own name first). Call it before the process has a second
/// thread.
pub fn launch(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let options = Options::parse_from(arguments);
    // Both before any thread exists: threads inherit the mask, and the keeper is a fork.
    let started = Signals::take(&job::SIGNALS)
        .and_then(|signals| Ok((signals, OpenFiles::most()?, Keeper::start(options.ranks())?)))
        .map_err(|cause| Trouble::new(format!("cannot prepare to start processes: {cause}")));
    let verdict =
        started.and_then(|(signals, files, keeper)| Job::start(&options, signals, &files, keeper)?.run());
    match verdict {
        Ok(verdict) => {
            if let Some(signal) = verdict.signal {
                child::die_by(signal);
            }
            ExitCode::from(verdict.status)
        }
        Err(trouble) => {
            eprintln!("unisono-run: {trouble}");
            ExitCode::from(trouble.status)
        }
    }
}
