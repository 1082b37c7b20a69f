//! The command line.

#![forbid(unsafe_code)]

mod choices;

use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};

pub(super) use choices::{CallStyle, Choice, Command, Library, Place, Task, Transport};
use choices::{
    Word, bytes, call, choice, dtype, library, operator, overlap, peer, place, seconds, step, switch,
    transport, word,
};

use super::operation;
use crate::cuda::exchange::Overlap;
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// Measures collective operations, checks their results, and compares.
#[derive(Parser, Debug)]
#[command(
    name = "unisono-bench",
    version,
    after_help = "Sizes take K, M and G (powers of 1024). The size of an operation in blocks (allgather, gather, \
                  scatter, reduce_scatter, alltoall) is that of all blocks together. That of sparse_allreduce is the \
                  values of a rank, rows of 64, half of which the next rank has, too; with --device a call ends with the \
                  result on the device. With several pointers per rank it is that of a pointer.\n\n\
                  Times: every rank times every iteration; the largest over the ranks counts. Over rounds, p50 and p99 \
                  are medians, min the least. On streams and in graphs a time is that of many calls, by CUDA events, \
                  divided by their number; 'host' is how long the calling thread was held by one call.\n\n\
                  What is not a collective is measured alone: links (what copies and the network allow), \
                  local-broadcast and local-reduce (across the GPUs of one process), start (ranks made, connected and \
                  through a barrier), reduce-loops (the processor's).\n\n\
                  Exit status: 0; 1 if a result was wrong; 2 if the benchmark could not run, or if what the others are \
                  compared with could do nothing; 141 if nobody reads its output any more (128 + SIGPIPE)."
)]
pub(super) struct Options {
    /// What to measure: allreduce, reduce, broadcast, allgather, gather, scatter, reduce_scatter, alltoall,
    /// barrier, sendrecv, or all [default: allreduce]; sparse_allreduce; or links, local-broadcast,
    /// local-reduce, start, reduce-loops
    #[arg(value_name = "OPERATION", value_parser = word)]
    words: Vec<Word>,

    /// Start so many ranks on this host; without it, a launcher has started this one
    #[arg(long, value_name = "N")]
    pub(super) ranks: Option<NonZeroU16>,

    /// The ranks that --ranks starts are threads of this process
    #[arg(long, requires = "ranks")]
    pub(super) threads: bool,

    /// The processes that --ranks starts take themselves for those of so many hosts
    #[arg(long, value_name = "N", requires = "ranks", conflicts_with = "threads")]
    pub(super) hosts: Option<NonZeroU16>,

    /// On device memory: rank r has GPU r modulo their number, and a non-blocking stream of its own
    #[arg(long)]
    device: bool,

    /// On device memory also as many calls captured in a CUDA graph, the same as naming graph in --calls
    #[arg(long)]
    graph: bool,

    /// On device memory, by a library with NCCL's ABI, or natively by "native"; several are measured in turn,
    /// the first being what the others are compared with. With "windows:" before the path, in buffers that
    /// the library allocates and registers as symmetric windows, not in those that all others share
    #[arg(long = "library", value_name = "[NAME=][windows:]PATH", value_parser = library)]
    libraries: Vec<Library>,

    /// On device memory: whether the same elements give the same bits at different counts (--sizes) and on
    /// every rank
    #[arg(long)]
    pub(super) bits: bool,

    /// On device memory: measure which protocols and grids suit these ranks' GPUs, and write them to FILE,
    /// for UNISONO_TUNING. What a FILE that is there says of other numbers of ranks stays. Takes at most 700
    /// measurements of --budget each, and two fifths of that to warm up: some three minutes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["libraries", "bits", "words"])]
    pub(super) tune: Option<PathBuf>,

    /// Device pointers of local-broadcast and local-reduce, and GPUs that links looks at
    /// [default: as many as there are GPUs]. With --device: each rank has so many, all ranks' dealt out to
    /// the GPUs in blocks, with a stream each; allreduce, reduce and broadcast run as algorithm objects over
    /// them
    #[arg(long, value_name = "N")]
    pub(super) pointers: Option<NonZeroU16>,

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

    /// The most thread blocks of a kernel by which GPUs exchange [default: as many as suit it]
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    pub(super) max_blocks: u32,

    /// What the kernels of broadcast-one-stage, broadcast-two-stage and broadcast-stages overlap with
    /// (programmatic dependent launch): off, wait (launched while the one before it ends), early (also lets
    /// the next one be launched)
    #[arg(long, value_name = "LEVEL", default_value = "off", value_parser = overlap)]
    pub(super) pdl: Overlap,

    /// Transports: shm, tcp, or auto, the library's choice [default: shm; with --device or --hosts auto]
    #[arg(short = 't', long, value_name = "NAME,…", value_delimiter = ',', value_parser = transport)]
    transports: Vec<Transport>,

    /// How operations are called: blocking, or work (started, then waited for); on device memory also stream
    /// (enqueued) or graph (captured) [default: blocking; with --device stream]
    #[arg(long, value_name = "CALL,…", value_delimiter = ',', value_parser = call)]
    calls: Vec<CallStyle>,

    /// Where results go: out (to a buffer of their own), in (in place)
    #[arg(long, value_name = "PLACE,…", value_delimiter = ',', default_value = "out", value_parser = place)]
    pub(super) places: Vec<Place>,

    /// On device memory: inputs and outputs begin so many bytes behind an address that suits every type
    #[arg(long, value_name = "BYTES", default_value = "0", hide_default_value = true, conflicts_with = "pointers", value_parser = clap::value_parser!(u32).range(..=4096))]
    pub(super) offset: u32,

    /// So many timed iterations, whatever the time. On streams and in graphs at least so many, in batches
    /// that are timed as one: of up to 400 calls, or launches of a graph of up to 100 calls, so that p50 and
    /// p99 are over batches; no batch is of more than N
    #[arg(short = 'n', long, value_name = "N")]
    pub(super) iterations: Option<NonZeroU32>,

    /// So many iterations before the timed ones, whatever the time
    #[arg(short = 'w', long, value_name = "N")]
    pub(super) warmup: Option<u32>,

    /// Seconds of timed iterations for each case and round; warming up takes a fifth more
    #[arg(long, value_name = "SECONDS", default_value = "0.2", value_parser = seconds)]
    pub(super) budget: Duration,

    /// A barrier before each iteration, outside of its time; without it iterations run back to back. On
    /// device memory for blocking and work only
    #[arg(long)]
    pub(super) barrier: bool,

    /// On host memory: bind each rank to a processor, as mpirun does when there are enough. The threads that
    /// help it with long calls are not bound
    #[arg(long)]
    pub(super) bind: bool,

    /// Measure everything so many times in turn
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) rounds: NonZeroU32,

    /// Check each case once before it is timed
    #[arg(short = 'c', long, value_name = "0|1", default_value = "1", action = ArgAction::Set, value_parser = switch)]
    pub(super) check: bool,

    /// Another program, run once per round by a shell, without what launchers and --hosts have told our
    /// ranks; it prints lines "operation bytes p50_us p99_us". They stand beside every case of that operation
    /// and --sizes entry; beside none where several types, operators or roots are measured, of which they
    /// tell nothing
    #[arg(long = "peer", value_name = "NAME=COMMAND", value_parser = peer)]
    pub(super) peers: Vec<Command>,

    /// Write all results to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["bits", "tune", "check_schedules"])]
    pub(super) json: Option<PathBuf>,

    /// The deadline of each operation, and of each run of a peer
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(super) timeout: Duration,

    /// Measure nothing: prove the schedules of the operations and algorithms (default: all) for 1 to --ranks
    /// ranks (default: 16)
    #[arg(long)]
    pub(super) check_schedules: bool,
}

impl Options {
    /// What to do: one thing that is no collective, or collectives.
    pub(super) fn task(&self) -> Result<Task, String> {
        let task = self.words.iter().find_map(|word| match word {
            Word::Task(task) => Some(*task),
            Word::Collectives(_) => None,
        });
        match task {
            Some(task) if self.words.len() > 1 => {
                Err(format!("{} is measured alone; name nothing beside it", task.name()))
            }
            task => Ok(task.unwrap_or(Task::Collectives)),
        }
    }

    /// The operations, none twice.
    pub(super) fn operations(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = Vec::new();
        for word in &self.words {
            let Word::Collectives(named) = word else { continue };
            for &kind in named {
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
        }
        match (kinds.is_empty(), self.check_schedules) {
            (false, _) => kinds,
            (true, true) => operation::ALL.into(),
            (true, false) => vec![Kind::Allreduce],
        }
    }

    /// What is wrong with an option that `task` would make nothing of.
    pub(super) fn idle(&self, task: Task) -> Option<String> {
        let alone = match task {
            Task::Collectives if self.bits => Some("--bits"),
            Task::Collectives if self.tune.is_some() => Some("--tune"),
            Task::Collectives => None,
            task => Some(task.name()),
        };
        if let Some(what) = alone {
            let given = [("--peer", !self.peers.is_empty()), ("--rounds", self.rounds.get() > 1)];
            if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                return Some(format!(
                    "{option} is for collectives that are timed; {what} makes nothing of it"
                ));
            }
        }
        let looks_at_gpus = matches!(task, Task::Links | Task::LocalBroadcast | Task::LocalReduce);
        let given = [
            ("--pointers", self.pointers.is_some() && !looks_at_gpus),
            ("--pdl", self.pdl != Overlap::Off),
            ("--max-blocks", self.max_blocks > 0),
            ("--offset", self.offset > 0),
        ];
        if !self.on_device()
            && let Some((option, _)) = given.iter().find(|(_, given)| *given)
        {
            return Some(format!("{option} is for device memory: give --device, too"));
        }
        if task == Task::Collectives
            && self.operations() == [Kind::SparseAllreduce]
            && self.operators != [Operator::Sum]
        {
            return Some("sparse_allreduce only sums: leave --operators out".to_owned());
        }
        None
    }

    /// Whether ranks have several device pointers, and so run algorithm objects.
    pub(super) fn several(&self) -> bool {
        self.on_device() && self.pointers.is_some()
    }

    /// Whether buffers are on devices.
    pub(super) fn on_device(&self) -> bool {
        self.device || self.graph || self.bits || self.tune.is_some() || !self.libraries.is_empty()
    }

    /// Who runs the operations on device memory, the one to compare with first.
    pub(super) fn libraries(&self) -> Vec<Library> {
        if self.libraries.is_empty() { vec![Library::Native] } else { self.libraries.clone() }
    }

    /// The transports, as given or as usual.
    pub(super) fn transports(&self) -> Vec<Transport> {
        match (self.transports.is_empty(), self.on_device() || self.hosts.is_some()) {
            (false, _) => self.transports.clone(),
            (true, false) => vec![Transport::SharedMemory],
            (true, true) => vec![Transport::Automatic],
        }
    }

    /// A name that two columns would have.
    pub(super) fn shared_name(&self) -> Option<&str> {
        let libraries = self.libraries.iter().map(Library::name);
        let names: Vec<&str> = libraries.chain(self.peers.iter().map(|peer| peer.name.as_str())).collect();
        names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)).map(|(_, name)| *name)
    }

    /// Whether calls are measured that only enqueue, or that a graph has.
    pub(super) fn enqueues(&self) -> bool {
        let calls = self.calls();
        let enqueue = calls.iter().any(|call| matches!(call, CallStyle::Stream | CallStyle::Graph));
        // These are complete when they return, however the others are called.
        let complete = self.several() || self.operations() == [Kind::SparseAllreduce];
        enqueue && !complete
    }

    /// How operations are called, as given or as usual.
    pub(super) fn calls(&self) -> Vec<CallStyle> {
        let mut calls = match (self.calls.is_empty(), self.on_device()) {
            (false, _) => self.calls.clone(),
            (true, false) => vec![CallStyle::Blocking],
            (true, true) => vec![CallStyle::Stream],
        };
        if self.graph && !calls.contains(&CallStyle::Graph) {
            calls.push(CallStyle::Graph);
        }
        calls
    }

    /// The sizes that were listed, if any were.
    pub(super) fn listed_sizes(&self) -> Option<&[u64]> {
        (!self.sizes.is_empty()).then_some(&self.sizes[..])
    }

    /// What is wrong with the sizes: there is none.
    pub(super) fn no_size(&self) -> Option<String> {
        let none = self.sizes().is_empty();
        none.then(|| format!("-b {} is more than -e {}: there is no size", self.min_bytes, self.max_bytes))
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
        assert_eq!(parse(&["-b", "8", "-e", "8"]).no_size(), None);
        let none = parse(&["-b", "64", "-e", "8"]).no_size();
        assert_eq!(none.as_deref(), Some("-b 64 is more than -e 8: there is no size"));
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
    fn what_is_no_collective_stands_alone() {
        assert_eq!(parse(&[]).task(), Ok(Task::Collectives));
        assert_eq!(parse(&["links"]).task(), Ok(Task::Links));
        let both = parse(&["allreduce", "reduce-loops"]).task();
        assert!(both.is_err_and(|text| text.contains("reduce-loops is measured alone")));
    }

    #[test]
    fn device_memory_has_defaults_of_its_own() {
        let host = parse(&[]);
        assert_eq!(
            (host.calls(), host.transports()),
            (vec![CallStyle::Blocking], vec![Transport::SharedMemory])
        );
        let device = parse(&["--device", "--graph"]);
        assert_eq!(device.calls(), [CallStyle::Stream, CallStyle::Graph]);
        assert_eq!(
            (device.transports(), device.libraries()),
            (vec![Transport::Automatic], vec![Library::Native])
        );
        assert_eq!(parse(&["--ranks", "2", "--hosts", "2"]).transports(), [Transport::Automatic]);
        assert!(!host.on_device() && device.on_device() && parse(&["--library", "native"]).on_device());
    }

    #[test]
    fn buffers_begin_within_a_page_behind_an_aligned_address() {
        assert_eq!((parse(&[]).offset, parse(&["--offset", "4"]).offset), (0, 4));
        for bad in [&["--offset", "4097"][..], &["--offset", "4", "--device", "--pointers", "2"]] {
            assert!(Options::try_parse_from(["unisono-bench"].iter().chain(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_library_is_named_by_its_file_unless_told() {
        let nccl = |name: &str, path: &str| {
            Ok(Library::Nccl { name: name.into(), path: path.into(), windows: false })
        };
        assert_eq!(library("/a/libnccl.so.2"), nccl("libnccl.so.2", "/a/libnccl.so.2"));
        assert_eq!(library("torch=/a/libnccl.so.2"), nccl("torch", "/a/libnccl.so.2"));
        let windows = Library::Nccl { name: "w".into(), path: "/a".into(), windows: true };
        assert_eq!(library("w=windows:/a"), Ok(windows));
        // Beside the same one without windows.
        let unnamed = library("windows:/a/libnccl.so.2").expect("it has a path");
        assert_eq!(unnamed.name(), "windows:libnccl.so.2");
        assert!(library("windows:").is_err());
        assert_eq!(library("native"), Ok(Library::Native));
        assert!(library("").is_err() && library("x=").is_err());
    }

    #[test]
    fn an_unknown_algorithm_is_told_all_that_there_are() {
        let told = choice("typo").expect_err("it is none");
        for name in ["auto", "ring", "broadcast-one-stage", "broadcast-two-stage", "broadcast-stages"] {
            assert!(told.contains(name) && choice(name).is_ok(), "{name}: {told}");
        }
    }

    #[test]
    fn no_two_columns_have_one_name() {
        let shared = |arguments: &[&str]| parse(arguments).shared_name().map(str::to_owned);
        assert_eq!(shared(&["--library", "/a/x.so", "--library", "/b/x.so"]), Some("x.so".into()));
        assert_eq!(shared(&["--library", "x=/a", "--peer", "x=true"]), Some("x".into()));
        assert_eq!(shared(&["--library", "/a/x.so", "--library", "windows:/a/x.so"]), None);
        assert_eq!(shared(&["--library", "native", "--library", "/a/x.so", "--peer", "x=true"]), None);
    }

    #[test]
    fn what_is_complete_when_it_returns_does_not_enqueue() {
        assert!(parse(&["--device"]).enqueues() && parse(&["--graph", "--calls", "work"]).enqueues());
        assert!(parse(&["sparse_allreduce", "allreduce", "--device"]).enqueues());
        for complete in
            ["allreduce --device --calls blocking,work", "--device --pointers 2", "sparse_allreduce --device"]
        {
            let arguments: Vec<&str> = complete.split(' ').collect();
            assert!(!parse(&arguments).enqueues(), "{complete}");
        }
    }

    #[test]
    fn a_peer_has_a_name_and_a_command() {
        let command = peer("mpi=mpirun -x A=B prog").expect("it has both");
        assert_eq!((command.name.as_str(), command.command.as_str()), ("mpi", "mpirun -x A=B prog"));
        assert!(peer("mpi").is_err() && peer("=x").is_err());
    }
}
