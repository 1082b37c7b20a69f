//! The command line.

use std::ffi::OsString;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

/// Starts a program as several ranks on this host and ends them together.
#[derive(Parser, Debug)]
#[command(
    name = "unisono-run",
    version,
    after_help = "Each rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,\n\
                  MASTER_PORT) and unisono's (UNISONO_RANK, UNISONO_SIZE, UNISONO_LOCAL_RANK, UNISONO_LOCAL_SIZE,\n\
                  UNISONO_ID), and CUDA_DEVICE_MAX_CONNECTIONS=32 unless that is set.\n\n\
                  Exit status: that of the first rank that fails (128 + N for signal N); 0 if none does; 124 if the\n\
                  time is up; 125 if unisono-run itself fails; 126 or 127 if PROGRAM cannot be run or is not found."
)]
pub(super) struct Options {
    /// How many ranks to start
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    ranks: NonZeroU16,

    /// Show the ranks' lines as they are, without [RANK] before each
    #[arg(long)]
    pub(super) no_prefix: bool,

    /// Write each rank's output to DIR/RANK.out and DIR/RANK.err, byte for byte, instead of showing it
    #[arg(long, value_name = "DIR")]
    pub(super) output_dir: Option<PathBuf>,

    /// Pass standard input on to rank 0 (otherwise every rank reads nothing)
    #[arg(long)]
    pub(super) stdin: bool,

    /// How long ranks that are told to end (SIGTERM) may take before they are killed (SIGKILL); also how
    /// long, once the time is up or after a signal, whoever reads the output may rest before the rest of it
    /// is dropped
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(super) grace: Duration,

    /// End the job when it has run for so long
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) timeout: Option<Duration>,

    /// End the job, quietly and as if by SIGPIPE, when nobody reads standard output any more (for
    /// unisono-bench)
    #[arg(long, hide = true)]
    pub(super) end_unread: bool,

    /// The port in MASTER_PORT, for programs that open their own store there [default: a free one]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) master_port: Option<u16>,

    /// The program to run, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(super) command: Vec<OsString>,
}

impl Options {
    /// How many ranks to start, at least one.
    pub(super) fn ranks(&self) -> usize {
        usize::from(self.ranks.get())
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|_| "not a duration".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Options::command().debug_assert();
    }

    #[test]
    fn options_after_the_program_are_the_programs() {
        let options = Options::parse_from(["unisono-run", "-n", "2", "prog", "-n", "3", "--stdin"]);
        assert_eq!(options.ranks(), 2);
        assert_eq!(options.command, ["prog", "-n", "3", "--stdin"]);
        assert!(!options.stdin);
    }

    #[test]
    fn durations_that_cannot_be_are_refused() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for bad in ["-1", "nan", "inf", "1e300", "5s", ""] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
