//! Starting a rank, and what can be wrong with that.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::environment::Environment;
use super::options::Options;
use crate::cuda::queues;
use crate::settings;
use crate::sys::child::{self, Keeper, OpenFiles, Signals};

/// What went wrong with the launcher itself, and its exit status.
#[derive(Debug)]
pub(super) struct Trouble {
    text: String,
    pub(super) status: u8,
}

/// Starts one rank.
pub(super) fn rank(
    options: &Options,
    environment: &Environment,
    rank: usize,
    (signals, files, keeper): (&Signals, &OpenFiles, &Keeper),
) -> Result<Child, Trouble> {
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]).envs(environment.of_rank(rank));
    // Else the processors reduce what goes through the host on a stream and no courier combines.
    if settings::get(queues::VARIABLE).is_none() {
        let most = queues::MOST.to_string();
        command.env(queues::VARIABLE, &most).env(queues::SET_BY_LAUNCHER, &most);
    }
    command.stdin(if rank == 0 && options.stdin { Stdio::piped() } else { Stdio::null() });
    match &options.output_dir {
        None => command.stdout(Stdio::piped()).stderr(Stdio::piped()),
        Some(folder) => {
            let (out, err) = (format!("{rank}.out"), format!("{rank}.err"));
            command.stdout(create(&folder.join(out))?).stderr(create(&folder.join(err))?)
        }
    };
    child::spawn_tied(&mut command, signals, files, keeper).map_err(|cause| cannot_run(options, rank, &cause))
}

fn create(path: &Path) -> Result<File, Trouble> {
    File::create(path).map_err(|cause| Trouble::new(format!("cannot create {}: {cause}", path.display())))
}

fn cannot_run(options: &Options, rank: usize, cause: &io::Error) -> Trouble {
    let program = Path::new(&options.command[0]);
    let name = program.display();
    let has_slash =
        program.components().count() > 1 || program.is_absolute() || name.to_string().contains('/');
    let (status, text) = match cause.kind() {
        ErrorKind::NotFound if !has_slash => (127, format!("program '{name}' not found in PATH")),
        ErrorKind::NotFound if program.exists() => {
            (127, format!("program '{name}' cannot be run: the interpreter that it names does not exist"))
        }
        ErrorKind::NotFound => (127, format!("program '{name}' not found")),
        ErrorKind::PermissionDenied => {
            (126, format!("program '{name}' cannot be run: no permission to execute it"))
        }
        _ => (Trouble::STATUS, format!("rank {rank} of {} cannot be started: {cause}", options.ranks())),
    };
    Trouble { text, status }
}

/// A port that was free a moment ago: the program that is told of it opens it itself.
pub(super) fn master_port(options: &Options) -> Result<u16, Trouble> {
    let free = || Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port());
    let cause = |cause: io::Error| Trouble::new(format!("no free TCP port on 127.0.0.1: {cause}"));
    options.master_port.map_or_else(|| free().map_err(cause), Ok)
}

impl Trouble {
    /// That of the launcher itself.
    pub(super) const STATUS: u8 = 125;

    pub(super) fn new(text: impl Into<String>) -> Trouble {
        Trouble { text: text.into(), status: Trouble::STATUS }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for Trouble {
    fn from(cause: io::Error) -> Trouble {
        Trouble::new(cause.to_string())
    }
}

impl From<crate::error::Error> for Trouble {
    fn from(cause: crate::error::Error) -> Trouble {
        Trouble::new(cause.text())
    }
}
