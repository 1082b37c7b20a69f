//! Who we are according to the environment of a launcher.
//!
//! | launcher | recognised by | where the store is |
//! |---|---|---|
//! | `unisono-run`, or by hand | `UNISONO_RANK`, `UNISONO_SIZE` | `UNISONO_ID`: served by the launcher |
//! | torchrun | `RANK`, `WORLD_SIZE` | rank 0 serves at `MASTER_ADDR`, port `UNISONO_PORT` or `MASTER_PORT` + 2 |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | one host: a directory; more: as for torchrun |
//! | MPICH | `PMI_RANK` | the same |
//! | srun | `SLURM_PROCID` | the same; without `MASTER_ADDR` the first host of the step, and a port made of the job's number |
//!
//! The first row that applies counts. PyTorch's own store may sit on `MASTER_PORT`, so ours is two above it
//! (two below where that ends): of the ports that Linux chooses, who listens gets odd ones and who connects
//! even ones, so a launcher's free port has those of others' connections beside it. `UNISONO_STORE`
//! (`file:/directory` or `tcp://host:port`) goes before all of this. A job of one rank needs no store.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use super::id::UniqueId;
use super::secret::SecretKey;
use super::slurm;
use crate::error::{Error, Result, Status, fail};

/// Shorter texts can be guessed.
const SHORTEST_SECRET: usize = 16;

/// What the environment says about this process and its job.
#[derive(Clone, Debug)]
pub struct Launch {
    /// This process among all, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// This process among those of its host, if known.
    pub local_rank: Option<usize>,
    /// The number of processes on this host, if known.
    pub local_size: Option<usize>,
    /// Who said so.
    pub launcher: Launcher,
    /// Where the ranks meet.
    pub store: How,
    /// The secret that `UNISONO_SECRET` stands for.
    pub secret: Option<SecretKey>,
}

/// Who started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `unisono-run`, or somebody who sets its variables.
    Unisono,
    /// PyTorch's torchrun, or whoever sets the same variables.
    Torchrun,
    /// Open MPI's mpirun.
    OpenMpi,
    /// MPICH's mpiexec (Hydra) and its relatives.
    Mpich,
    /// Slurm's srun.
    Slurm,
}

/// How the ranks of a job come to one store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// There is one rank.
    Alone,
    /// The id names a store that its creator serves.
    Id(Box<UniqueId>),
    /// A directory that all ranks see.
    File(PathBuf),
    /// A TCP store that somebody serves: rank 0 if the host is its own and the port is free.
    Tcp {
        /// A name or an address.
        host: String,
        /// Its port.
        port: u16,
    },
    /// A TCP store that rank 0 has to serve: if the port is taken, it is not by our job.
    Rank0 {
        /// A name or an address of rank 0's host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// All ranks are on this host: a directory under `TMPDIR` named after the user, the launcher's process
    /// and this.
    Local {
        /// The launcher's name for the job; may be empty, because the launcher's process tells jobs apart as
        /// well.
        job: String,
    },
}

impl Launch {
    /// Reads the environment of this process.
    pub fn from_env() -> Result<Launch> {
        Launch::from_os_lookup(|name| std::env::var_os(name))
    }

    /// The same for other variables. A value that is no text is refused: without its secret, a job would be
    /// open to all.
    fn from_os_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Launch> {
        let odd = RefCell::new(None);
        let launch = Launch::from_lookup(|name| match lookup(name)?.into_string() {
            Ok(text) => Some(text),
            Err(_) => {
                odd.borrow_mut().get_or_insert_with(|| name.to_owned());
                None
            }
        });
        match odd.into_inner() {
            Some(name) => fail!(InvalidArgument, "{name} is not UTF-8; set it to a text that is"),
            None => launch,
        }
    }

    /// Reads what `lookup` gives for each variable. An empty value counts as none.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Launch> {
        let environment = Environment { lookup: &lookup };
        let launcher = environment.launcher()?;
        let place = environment.place(launcher)?;
        let secret = environment.secret()?;
        let store = environment.store(launcher, &place)?;
        let Place { rank, size, local_rank, local_size } = place;
        Ok(Launch { rank, size, local_rank, local_size, launcher, store, secret })
    }
}

impl Launcher {
    /// The variable that carries the rank: set for each process, never for the launcher itself.
    pub fn rank_variable(self) -> &'static str {
        match self {
            Launcher::Unisono => "UNISONO_RANK",
            Launcher::Torchrun => "RANK",
            Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Launcher::Mpich => "PMI_RANK",
            Launcher::Slurm => "SLURM_PROCID",
        }
    }

    fn size_variable(self) -> &'static str {
        match self {
            Launcher::Unisono => "UNISONO_SIZE",
            Launcher::Torchrun => "WORLD_SIZE",
            Launcher::OpenMpi => "OMPI_COMM_WORLD_SIZE",
            Launcher::Mpich => "PMI_SIZE",
            Launcher::Slurm => "SLURM_NTASKS",
        }
    }

    fn local_variables(self) -> (&'static str, &'static str) {
        match self {
            Launcher::Unisono => ("UNISONO_LOCAL_RANK", "UNISONO_LOCAL_SIZE"),
            Launcher::Torchrun => ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            Launcher::OpenMpi => ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            Launcher::Mpich => ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            // Slurm has no variable for the local size; it follows from the list of tasks.
            Launcher::Slurm => ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Unisono => "unisono-run",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mpich => "MPICH",
            Launcher::Slurm => "srun",
        })
    }
}

struct Place {
    rank: usize,
    size: usize,
    local_rank: Option<usize>,
    local_size: Option<usize>,
}

impl Place {
    fn is_local(&self) -> bool {
        self.local_size == Some(self.size)
    }
}

struct Environment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Environment<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<u32>() {
            Ok(number) => Ok(Some(number as usize)),
            Err(_) => fail!(InvalidArgument, "{name} is '{text}'; set it to a number from 0 to {}", u32::MAX),
        }
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => fail!(InvalidArgument, "{name} is '{text}'; set it to a port from 1 to 65535"),
        }
    }

    fn launcher(&self) -> Result<Launcher> {
        // Under srun with PMI both Slurm's and PMI's variables are there, and Slurm's say more. Hydra,
        // started inside a Slurm job, inherits Slurm's from its proxy, where they number the proxies; its own
        // say the truth.
        let hydra = self.has("MPI_LOCALRANKID") || !self.has("SLURM_PROCID");
        let all = [
            (Launcher::Unisono, self.has("UNISONO_RANK") || self.has("UNISONO_SIZE")),
            (Launcher::Torchrun, self.has("RANK") && self.has("WORLD_SIZE")),
            (Launcher::OpenMpi, self.has("OMPI_COMM_WORLD_RANK")),
            (Launcher::Mpich, self.has("PMI_RANK") && hydra),
            (Launcher::Slurm, self.has("SLURM_PROCID")),
            // Half of a pair, and nothing better: the missing half is then named.
            (Launcher::Torchrun, self.has("RANK") || self.has("WORLD_SIZE")),
        ];
        match all.into_iter().find(|(_, applies)| *applies) {
            Some((Launcher::Slurm, _)) if !self.has("SLURM_STEP_ID") => fail!(
                InvalidUsage,
                "SLURM_PROCID is set but SLURM_STEP_ID is not: this is the batch script, not a task; start the program \
                 with srun"
            ),
            Some((launcher, _)) => Ok(launcher),
            None => fail!(
                InvalidUsage,
                "no launcher is recognised: none of UNISONO_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and \
                 SLURM_PROCID is set; start the program with unisono-run, torchrun, mpirun or srun, or set \
                 UNISONO_RANK, UNISONO_SIZE and UNISONO_STORE"
            ),
        }
    }

    fn place(&self, launcher: Launcher) -> Result<Place> {
        let needed = |name: &'static str| match self.number(name)? {
            Some(number) => Ok(number),
            None => Err(missing(launcher, name, "")),
        };
        let (rank_name, size_name) = (launcher.rank_variable(), launcher.size_variable());
        let (local_rank_name, local_size_name) = launcher.local_variables();
        let (rank, size) = (needed(rank_name)?, needed(size_name)?);
        if rank >= size {
            fail!(
                InvalidArgument,
                "{rank_name} is {rank} and {size_name} is {size}; the rank has to be below the size"
            );
        }
        let local_rank = self.number(local_rank_name)?;
        let local_size = match launcher {
            Launcher::Slurm => self.slurm_local_size(size)?,
            _ => self.number(local_size_name)?,
        };
        if let Some(local_size) = local_size
            && local_size > size
        {
            fail!(
                InvalidArgument,
                "{local_size_name} is {local_size} and {size_name} is {size}; a host cannot have more ranks than the job"
            );
        }
        if let (Some(rank), Some(size)) = (local_rank, local_size)
            && rank >= size
        {
            fail!(
                InvalidArgument,
                "{local_rank_name} is {rank} and {local_size_name} says {size}; the rank has to be below the size"
            );
        }
        Ok(Place { rank, size, local_rank, local_size })
    }

    fn slurm_local_size(&self, size: usize) -> Result<Option<usize>> {
        let name = "SLURM_STEP_TASKS_PER_NODE";
        let Some(text) = self.text(name) else { return Ok(None) };
        let Some(tasks) = slurm::tasks_per_node(&text) else {
            fail!(InvalidArgument, "{name} is '{text}', which is not a list such as 2(x3),1");
        };
        let sum: usize = tasks.iter().fold(0, |sum, tasks| sum.saturating_add(*tasks));
        if sum != size {
            fail!(
                InvalidArgument,
                "{name} is '{text}', {sum} tasks together, but SLURM_NTASKS is {size}; use srun's own"
            );
        }
        if let [all] = tasks[..] {
            return Ok(Some(all));
        }
        Ok(self.number("SLURM_NODEID")?.and_then(|node| tasks.get(node).copied()))
    }

    fn secret(&self) -> Result<Option<SecretKey>> {
        let Some(text) = self.text("UNISONO_SECRET") else { return Ok(None) };
        if text.len() < SHORTEST_SECRET {
            fail!(
                InvalidArgument,
                "UNISONO_SECRET has {} characters; set it to at least {SHORTEST_SECRET} that nobody can guess",
                text.len()
            );
        }
        Ok(Some(SecretKey::from_text(&text)))
    }

    fn store(&self, launcher: Launcher, place: &Place) -> Result<How> {
        if let Some(text) = self.text("UNISONO_STORE") {
            let store = named_store(&text)?;
            return Ok(if place.size == 1 { How::Alone } else { store });
        }
        if place.size == 1 {
            return Ok(How::Alone);
        }
        match launcher {
            Launcher::Unisono => {
                if let Some(text) = self.text("UNISONO_ID") {
                    let id = text.parse::<UniqueId>().map_err(|error| error.context("UNISONO_ID"))?;
                    return Ok(How::Id(Box::new(id)));
                }
                if place.is_local() {
                    return Ok(How::Local { job: String::new() });
                }
                Err(missing(
                    launcher,
                    "UNISONO_ID",
                    ", or UNISONO_STORE to file:/directory or tcp://host:port",
                ))
            }
            Launcher::Torchrun => match self.master()? {
                Some((host, port)) => Ok(How::Rank0 { host, port }),
                None => Err(missing(launcher, "MASTER_ADDR", ", or UNISONO_STORE to tcp://host:port")),
            },
            Launcher::OpenMpi | Launcher::Mpich => {
                if place.is_local() {
                    let names = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"];
                    let job = names
                        .iter()
                        .find_map(|name| self.text(name))
                        .filter(|_| launcher == Launcher::OpenMpi);
                    return Ok(How::Local { job: job.unwrap_or_default() });
                }
                if let Some((host, port)) = self.master()? {
                    return Ok(How::Rank0 { host, port });
                }
                let (_, local_size) = launcher.local_variables();
                let found = place.local_size.map_or("not set".to_owned(), |local| local.to_string());
                fail!(
                    InvalidUsage,
                    "the {} ranks are not known to share one host ({local_size} is {found}), and {launcher} does not \
                     say where rank 0 is; give all ranks UNISONO_STORE=tcp://HOST-OF-RANK-0:PORT, or \
                     UNISONO_STORE=file:/DIRECTORY on a file system that all see",
                    place.size
                )
            }
            Launcher::Slurm => self.slurm_store(place),
        }
    }

    fn slurm_store(&self, place: &Place) -> Result<How> {
        let id = |name: &'static str| self.number(name)?.ok_or_else(|| missing(Launcher::Slurm, name, ""));
        let (job, step) = (id("SLURM_JOB_ID")?, id("SLURM_STEP_ID")?);
        if place.is_local() {
            return Ok(How::Local { job: format!("slurm-{job}.{step}") });
        }
        if let Some((host, port)) = self.master()? {
            return Ok(How::Rank0 { host, port });
        }
        let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        let Some((name, list)) = names.iter().find_map(|name| Some((name, self.text(name)?))) else {
            return Err(missing(Launcher::Slurm, names[0], ", or UNISONO_STORE to tcp://host:port"));
        };
        let Some(host) = slurm::first_host(&list) else {
            fail!(InvalidArgument, "{name} is '{list}', which is not a list of hosts such as node[01-03,7]");
        };
        // Steps that share a host should differ. Below 32768, where Linux does not take ports by itself.
        let derived = 23_000 + (job as u64 * 131 + step as u64) % 9_000;
        let derived = u16::try_from(derived).unwrap_or(23_000);
        Ok(How::Rank0 { host, port: self.port("UNISONO_PORT")?.unwrap_or(derived) })
    }

    /// Where rank 0 is, in the variables of PyTorch, and the next port of the kind that its own is of.
    fn master(&self) -> Result<Option<(String, u16)>> {
        let Some(host) = self.text("MASTER_ADDR") else { return Ok(None) };
        let port = match (self.port("UNISONO_PORT")?, self.port("MASTER_PORT")?) {
            (Some(port), _) => port,
            (None, Some(port)) => port.checked_add(2).unwrap_or(port - 2),
            (None, None) => fail!(
                InvalidUsage,
                "MASTER_ADDR is '{host}' but neither MASTER_PORT nor UNISONO_PORT is set; set one of them"
            ),
        };
        Ok(Some((host, port)))
    }
}

fn missing(launcher: Launcher, name: &str, otherwise: &str) -> Error {
    let text = format!("{name} is not set, though the variables of {launcher} are there; set it{otherwise}");
    Error::new(Status::InvalidUsage, text)
}

/// What `UNISONO_STORE` names.
fn named_store(text: &str) -> Result<How> {
    let wrong = |why: &str| {
        let text = format!("UNISONO_STORE is '{text}': {why}; set it to file:/directory or tcp://host:port");
        Error::new(Status::InvalidArgument, text)
    };
    if let Some(path) = text.strip_prefix("file:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') {
            return Err(wrong("the directory has to begin with /"));
        }
        return Ok(How::File(path.into()));
    }
    let Some(place) = text.strip_prefix("tcp://") else {
        return Err(wrong("it is neither file: nor tcp://"));
    };
    let (host, port) =
        place.trim_end_matches('/').rsplit_once(':').ok_or_else(|| wrong("the port is missing"))?;
    let port =
        port.parse().ok().filter(|port| *port > 0).ok_or_else(|| wrong("the port is not from 1 to 65535"))?;
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6,
        None if host.contains(':') => return Err(wrong("an IPv6 address has to be in brackets")),
        None => host,
    };
    if host.is_empty() {
        return Err(wrong("the host is missing"));
    }
    Ok(How::Tcp { host: host.to_owned(), port })
}

#[cfg(test)]
mod tests;
