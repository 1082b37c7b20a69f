//! `--check-schedules`: proves algorithms instead of timing them.

#![forbid(unsafe_code)]

use super::case::scheduled;
use super::operation;
use super::options::{Choice, Options};
use super::output::say;
use crate::error::{Result, fail};
use crate::schedule::checker::{Part, check as prove};
use crate::schedule::{Agreement, Algorithm, Collective, Schedule, Shape, plan};
use crate::signature::Kind;

/// Elements of a pipelined piece, and of a portion of a block: small, so that small counts have several.
const CHUNK: u64 = 5;

/// Proves and prints, a line for each operation and algorithm. Answers whether all is proved.
pub(super) fn check(options: &Options) -> Result<bool> {
    let ranks = options.ranks.map_or(16, |ranks| u32::from(ranks.get()));
    say!("# schedules of 1 to {ranks} ranks, in place and not, each root at either end");
    let (mut found, mut all_proved) = (0, true);
    for kind in options.operations() {
        let Some(scheduled) = scheduled(kind) else { continue };
        for algorithm in Algorithm::ALL.into_iter().filter(|a| a.serves(scheduled) && chosen(options, *a)) {
            found += 1;
            let name = format!("{:<14} {:<26}", operation::name(kind), algorithm.name());
            match prove_all(kind, algorithm, ranks) {
                Ok(Proved { schedules, steps }) => {
                    say!("{name} {schedules:>7} schedules, {steps:>9} steps: proved")
                }
                Err(error) => {
                    say!("{name} WRONG: {error}");
                    all_proved = false;
                }
            }
        }
    }
    if found == 0 {
        fail!(InvalidArgument, "no algorithm of those given serves an operation given");
    }
    Ok(all_proved)
}

/// What has been proved.
#[derive(Default)]
struct Proved {
    schedules: usize,
    steps: usize,
}

fn chosen(options: &Options, algorithm: Algorithm) -> bool {
    options
        .algorithms
        .iter()
        .any(|choice| matches!(choice, Choice::Automatic) || *choice == Choice::Named(algorithm))
}

fn prove_all(kind: Kind, algorithm: Algorithm, ranks: u32) -> Result<Proved> {
    let mut proved = Proved::default();
    // The algorithm of a group of one has no schedule for more.
    let ranks = if algorithm == Algorithm::Local { 1 } else { ranks };
    for size in 1..=ranks {
        let mut counts = vec![0, 1, u64::from(size) + 1, 101];
        counts.truncate(if kind == Kind::Barrier { 1 } else { counts.len() });
        let mut roots = vec![0, size - 1];
        roots.truncate(if kind.rooted() && size > 1 { 2 } else { 1 });
        for &count in &counts {
            for &root in &roots {
                for in_place in [false, true] {
                    prove_one(kind, algorithm, size, count, root, in_place, &mut proved).map_err(
                        |error| error.context(format!("{size} ranks, count {count}, root {root}")),
                    )?;
                }
            }
        }
    }
    Ok(proved)
}

fn prove_one(
    kind: Kind,
    algorithm: Algorithm,
    size: u32,
    count: u64,
    root: u32,
    in_place: bool,
    proved: &mut Proved,
) -> Result<()> {
    let collective = collective(kind, size, count, root)?;
    let shape = |rank| Shape {
        rank,
        size,
        alias: in_place.then(|| collective.in_place_alias(rank)),
        chunk: CHUNK,
        ranks_per_node: 2,
        agreement: Agreement::Awaited,
        portion: CHUNK,
    };
    let schedules: Vec<Schedule> =
        (0..size).map(|rank| plan(algorithm, &collective, &shape(rank))).collect::<Result<_>>()?;
    let parts: Vec<_> = (0..)
        .zip(&schedules)
        .map(|(rank, schedule)| Part { collective: &collective, alias: shape(rank).alias, schedule })
        .collect();
    proved.schedules += schedules.len();
    proved.steps += schedules.iter().map(|schedule| schedule.steps.len()).sum::<usize>();
    prove(&parts, algorithm.canonical(&shape(0)))
}

fn collective(kind: Kind, size: u32, count: u64, root: u32) -> Result<Collective> {
    let counts = || vec![count; size as usize];
    Ok(match kind {
        Kind::Allreduce => Collective::Allreduce { count },
        Kind::Reduce => Collective::Reduce { count, root },
        Kind::Broadcast => Collective::Broadcast { count, root },
        Kind::Allgather => Collective::Allgather { counts: counts() },
        Kind::Gather => Collective::Gather { counts: counts(), root },
        Kind::Scatter => Collective::Scatter { counts: counts(), root },
        Kind::ReduceScatter => Collective::ReduceScatter { counts: counts() },
        Kind::Alltoall => Collective::Alltoall { send_counts: counts(), recv_counts: counts() },
        Kind::Barrier => Collective::Barrier,
        Kind::Send | Kind::Receive | Kind::ReceiveAny | Kind::SparseAllreduce => {
            fail!(Internal, "{} has no schedule", kind.name())
        }
    })
}
