//! Calls of a group as few launches: those that follow each other and have a kernel for several are one, each
//! by blocks of its own, or one after the other where they only move. What all ranks agree on decides, and
//! nothing else: which calls the group has, in their order.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::Job;
use super::arguments::{Group, PackedCombine, SEVERAL, Several, Swap};
use super::functions::{Functions, Pair};
use super::plan::{Combination, Combining, Plan};
use super::points::{self, CALLS, Point};
use super::swap::Swapping;
use super::table::Table;
use super::windowed::Shared;
use crate::cuda::driver::{FunctionHandle, Grid};
use crate::signature::Kind;

/// The launch of several.
#[derive(Debug)]
pub(super) enum Launch {
    /// A kernel for several calls.
    Kernel { function: FunctionHandle, grid: Grid, arguments: Arguments },
    /// What moves, by at most so many blocks; 0 for as many as suit it.
    Points { points: Vec<Point>, max_blocks: u32 },
}

#[derive(Debug)]
pub(super) enum Arguments {
    Combine(Box<Several<PackedCombine>>),
    Swap(Box<Several<Swap>>),
}

/// Which kernels do several calls at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// By lines, and by tiles.
    Combine(Pair),
    /// Allgathers: swapped by lines; by tiles, as a broadcast from each rank.
    Gather,
    /// All-to-alls: swapped by lines; else as sends and receives, as many one way as the other.
    Swap,
    /// As sends and receives; long allgathers among them.
    Move,
}

/// Whether calls differ in nothing but their addresses.
pub(super) fn have_one_shape(one: &Job, other: &Job) -> bool {
    let Job { input: _, output: _, kind, count, dtype, operator, root, max_blocks } = one;
    // What differs most often comes first.
    (*count, *kind, *dtype, *root, *max_blocks)
        == (other.count, other.kind, other.dtype, other.root, other.max_blocks)
        && *operator == other.operator
}

/// Where calls become launches.
pub(super) struct Bundler<'a> {
    pub(super) table: &'a Table,
    pub(super) group: Group,
    pub(super) functions: &'a Functions,
    /// Whether the group may have windows. Then what gains by them is a launch of its own, also where its
    /// memory lies in none, or is in place: only this rank knows that, and all ranks must find the same
    /// launches.
    pub(super) windows: bool,
}

/// Calls that follow each other and differ in nothing but their addresses.
#[derive(Clone, Copy)]
struct Run<'a> {
    job: &'a Job,
    count: usize,
}

/// The runs of a list of calls.
fn runs_of(jobs: &[Job]) -> impl Iterator<Item = Run<'_>> + Clone {
    jobs.chunk_by(have_one_shape).map(|alike| Run { job: &alike[0], count: alike.len() })
}

/// So many calls of runs, from the first on.
fn first<'a>(runs: &[Run<'a>], count: usize) -> impl Iterator<Item = Run<'a>> + Clone {
    runs.iter().scan(count, |left, run| {
        let count = run.count.min(*left);
        *left -= count;
        (count > 0).then_some(Run { job: run.job, count })
    })
}

/// Runs without so many calls, from the first on.
fn without<'r, 'a>(runs: &'r mut [Run<'a>], mut count: usize) -> &'r mut [Run<'a>] {
    let mut whole = 0;
    while whole < runs.len() && runs[whole].count <= count {
        count -= runs[whole].count;
        whole += 1;
    }
    let left = &mut runs[whole..];
    if let Some(run) = left.first_mut() {
        run.count -= count;
    }
    left
}

impl Bundler<'_> {
    /// Which calls of a list are a launch each, in their order.
    pub(super) fn bundles(&self, jobs: &[Job]) -> Vec<Range<usize>> {
        let mut bundles = Vec::with_capacity(jobs.len() / SEVERAL + 1);
        // Those that follow each other and have the same kernels.
        let (mut runs, mut family) = (Vec::new(), None);
        for run in runs_of(jobs) {
            let other = self.family(run.job);
            if other != family {
                self.cut(&mut runs, family, &mut bundles);
                runs.clear();
                family = other;
            }
            runs.push(run);
        }
        self.cut(&mut runs, family, &mut bundles);
        bundles
    }

    /// Cuts calls that the same kernels do, or that none does several of, into launches.
    fn cut(&self, runs: &mut [Run<'_>], family: Option<Family>, bundles: &mut Vec<Range<usize>>) {
        let (mut left, mut before) = (runs, bundles.last().map_or(0, |last| last.end));
        while !left.is_empty() {
            let calls = family.map_or(1, |family| self.most(left, family));
            bundles.push(before..before + calls);
            before += calls;
            left = without(left, calls);
        }
    }

    /// How many calls, from the first on, are one launch.
    fn most(&self, runs: &[Run<'_>], family: Family) -> usize {
        let most = first(runs, SEVERAL).map(|run| run.count).sum();
        let by_lines = greatest(most, |count| self.blocks_by_lines(first(runs, count)).is_some());
        if by_lines == most {
            return most;
        }
        let otherwise = match family {
            Family::Combine(_) | Family::Gather => {
                // How many each is then.
                let times = if family == Family::Gather { self.group.size() as usize } else { 1 };
                let fits = |count| self.blocks_by_tiles(first(runs, count)) as usize >= count * times;
                greatest(most.min(SEVERAL / times), fits)
            }
            // What moves does one after the other. Two H100s, sixteen of 256 KiB for each other rank: 39.4
            // µs, by lines 25.9; of 1 MiB 99.7 and 105; of 2 MiB 133 and 190.
            Family::Swap if by_lines > 1 => by_lines,
            Family::Swap | Family::Move => CALLS.min(most),
        };
        // Lines are quicker where one launch of them does as much.
        by_lines.max(otherwise).max(1)
    }

    /// The launch of several calls that are one.
    pub(super) fn launch(&self, jobs: &[Job]) -> Option<Launch> {
        let family = self.family(jobs.first().filter(|_| jobs.len() <= SEVERAL)?)?;
        let runs = runs_of(jobs);
        if let Some(each) = self.blocks_by_lines(runs.clone()) {
            return self.by_lines(jobs, family, each);
        }
        match family {
            Family::Combine(Pair { tiles, .. }) => {
                self.by_tiles(jobs, tiles, self.blocks_by_tiles(runs), false)
            }
            Family::Gather => {
                let jobs: Option<Vec<Vec<Job>>> = jobs.iter().map(|job| self.as_broadcasts(job)).collect();
                self.by_tiles(
                    &jobs?.concat(),
                    self.functions.several_relays().tiles,
                    self.blocks_by_tiles(runs),
                    true,
                )
            }
            Family::Swap | Family::Move => self.moved(jobs),
        }
    }

    fn by_lines(&self, jobs: &[Job], family: Family, each: u32) -> Option<Launch> {
        let mut grid = Grid { blocks: 0, threads: 0, shared: 0, overlaps: false };
        let (function, mut arguments) = match family {
            Family::Combine(pair) => (pair.lines, Arguments::Combine(Box::new(Several::of(self.group)))),
            Family::Gather | Family::Swap | Family::Move => {
                (self.functions.several_swaps(), Arguments::Swap(Box::new(Several::of(self.group))))
            }
        };
        let mut place = 0;
        for alike in jobs.chunk_by(have_one_shape) {
            let call = self.call_by_lines(&alike[0], each)?;
            let one = call.grid();
            grid.threads = grid.threads.max(one.threads);
            for job in alike {
                let first = grid.blocks;
                match (&call, &mut arguments) {
                    (ByLines::Combine(combination), Arguments::Combine(all)) => {
                        let call = combination.arguments(&self.group, job, first);
                        all.set(place, first, call.packed()?)?;
                    }
                    (ByLines::Swap(swapping), Arguments::Swap(all)) => {
                        all.set(place, first, swapping.arguments(job, job.bytes()?, first))?;
                    }
                    _ => return None,
                }
                grid.blocks += one.blocks;
                place += 1;
            }
        }
        Some(Launch::Kernel { function, grid, arguments })
    }

    /// An allgather as a broadcast from each rank.
    fn as_broadcasts(&self, job: &Job) -> Option<Vec<Job>> {
        let part = job.bytes()?;
        let from = |root: u32| {
            let output = job.output.wrapping_add(part.wrapping_mul(root.into()));
            Job { kind: Kind::Broadcast, root, output, ..*job }
        };
        Some((0..self.group.size()).map(from).collect())
    }

    /// `at_once`: what everybody gets goes to everybody in one step.
    fn by_tiles(&self, jobs: &[Job], function: FunctionHandle, blocks: u32, at_once: bool) -> Option<Launch> {
        let size = self.group.size();
        let calls: Vec<Combining<'_>> = jobs
            .iter()
            .map(|job| Combining::of(self.table, job, size, job.bytes()?))
            .collect::<Option<_>>()?;
        let all = deal(blocks, &calls.iter().map(Combining::weight).collect::<Vec<_>>());
        let mut grid = Grid { blocks: 0, threads: 0, shared: 0, overlaps: false };
        let mut arguments = Box::new(Several::of(self.group));
        for (place, ((job, call), blocks)) in jobs.iter().zip(calls).zip(all).enumerate() {
            let combination = if at_once { call.by_tiles_at_once(blocks) } else { call.by_tiles_of(blocks) };
            arguments.set(
                place,
                grid.blocks,
                combination.arguments(&self.group, job, grid.blocks).packed()?,
            )?;
            grid.threads = combination.grid.threads;
            grid.blocks += combination.grid.blocks;
        }
        Some(Launch::Kernel { function, grid, arguments: Arguments::Combine(arguments) })
    }

    fn moved(&self, jobs: &[Job]) -> Option<Launch> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let mut points = Vec::new();
        for job in jobs {
            points.extend(points::of_job(job, rank, size, job.bytes()?));
        }
        let max_blocks = least(jobs.iter()).unwrap_or(0);
        Some(Launch::Points { points, max_blocks })
    }

    /// The blocks of each of these calls by lines beside the others, if all can be so with blocks enough for
    /// each.
    fn blocks_by_lines<'a>(&self, mut runs: impl Iterator<Item = Run<'a>> + Clone) -> Option<u32> {
        let count: usize = runs.clone().map(|run| run.count).sum();
        let blocks = self.table.tuning(self.group.size()).line_blocks.min(self.table.blocks);
        let limit = least(runs.clone().map(|run| run.job)).unwrap_or(blocks);
        // At most SEVERAL. No limit is none to each.
        let each = Some(blocks.min(limit) / count as u32).filter(|&each| each > 0)?;
        runs.all(|run| self.call_by_lines(run.job, each).is_some()).then_some(each)
    }

    /// The blocks that these calls may have together by tiles.
    fn blocks_by_tiles<'a>(&self, mut runs: impl Iterator<Item = Run<'a>> + Clone) -> u32 {
        let tuning = self.table.tuning(self.group.size());
        let limit = least(runs.clone().map(|run| run.job)).unwrap_or(u32::MAX);
        // The scalars of pre-multiplied sums go by lines.
        let scales = runs.any(|run| run.job.scale().is_some());
        let lines = if scales { tuning.line_blocks } else { u32::MAX };
        tuning.tile_blocks.min(self.table.blocks).min(limit).min(lines)
    }

    /// The kernels for several such calls, if there are some.
    fn family(&self, job: &Job) -> Option<Family> {
        let in_windows = || Shared::of(&Job { input: 0, output: 1, ..*job }, self.table, self.group.size());
        if job.count == 0 || self.windows && in_windows().is_some() {
            return None;
        }
        match job.kind {
            Kind::Allgather if self.is_long(job) => Some(Family::Move),
            Kind::Allgather => Some(Family::Gather),
            Kind::Alltoall => Some(Family::Swap),
            Kind::Gather | Kind::Scatter => Some(Family::Move),
            _ => self.functions.several(job).map(Family::Combine),
        }
    }

    /// Whether an allgather is moved.
    fn is_long(&self, job: &Job) -> bool {
        let least = self.table.tuning(self.group.size()).gather_moves;
        job.bytes().is_some_and(|bytes| bytes >= least)
    }

    /// A call by at most so many blocks, if it goes by lines then.
    fn call_by_lines(&self, job: &Job, max_blocks: u32) -> Option<ByLines> {
        let bytes = job.bytes()?;
        match Plan::of(self.table, &Job { max_blocks, ..*job }, self.group.size(), bytes) {
            Plan::Combine(combination) if !combination.goes_by_tiles() => Some(ByLines::Combine(combination)),
            Plan::Swap(swapping) => Some(ByLines::Swap(swapping)),
            _ => None,
        }
    }
}

/// The least of the limits that callers have set.
fn least<'a>(jobs: impl Iterator<Item = &'a Job>) -> Option<u32> {
    jobs.map(|job| job.max_blocks).filter(|&limit| limit != 0).min()
}

/// The greatest number up to `most` that fits, if less do, too; 0 if none does.
fn greatest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    if fits(most) {
        return most;
    }
    let (mut least, mut above) = (0, most);
    while above - least > 1 {
        let middle = least.midpoint(above);
        if fits(middle) { least = middle } else { above = middle }
    }
    least
}

/// Blocks for calls by what each has to do: at least one each, and there are as many.
fn deal(blocks: u32, weights: &[u64]) -> Vec<u32> {
    let all: u128 = weights.iter().map(|&weight| u128::from(weight)).sum::<u128>().max(1);
    let spare = u128::from(blocks).saturating_sub(weights.len() as u128);
    // No more than there are to spare, a u32.
    let mut dealt: Vec<u32> =
        weights.iter().map(|&weight| 1 + (spare * u128::from(weight) / all) as u32).collect();
    // What is left over goes to whoever has most to do for a block.
    for _ in dealt.iter().sum::<u32>()..blocks {
        let most = (0..weights.len()).max_by_key(|&call| weights[call] / u64::from(dealt[call]));
        if let Some(most) = most {
            dealt[most] += 1;
        }
    }
    dealt
}

/// What a call is by lines.
#[derive(Clone)]
enum ByLines {
    Combine(Combination),
    Swap(Swapping),
}

impl ByLines {
    fn grid(&self) -> Grid {
        match self {
            ByLines::Combine(combination) => combination.grid,
            ByLines::Swap(swapping) => swapping.grid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::{DataType, Operator};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_blocks_are_dealt_and_who_has_more_to_do_has_no_fewer(
            weights in proptest::collection::vec(0_u64..1 << 50, 1..=SEVERAL), blocks in SEVERAL as u32..1024
        ) {
            let dealt = deal(blocks, &weights);
            prop_assert_eq!(dealt.iter().sum::<u32>(), blocks);
            prop_assert!(dealt.iter().all(|&blocks| blocks > 0));
            let pairs = || weights.iter().zip(&dealt);
            prop_assert!(pairs().all(|(a, m)| pairs().all(|(b, n)| a <= b || m + 1 >= *n)), "{:?}", dealt);
        }
    }

    #[test]
    fn runs_are_cut_between_calls() {
        let job = |count| Job {
            kind: Kind::Allreduce,
            input: 0,
            output: 0,
            count,
            dtype: DataType::F32,
            operator: Operator::Sum,
            root: 0,
            max_blocks: 0,
        };
        let jobs = [1, 1, 1, 2, 3, 3].map(job);
        let mut runs: Vec<Run<'_>> = runs_of(&jobs).collect();
        let told = |runs: &[Run<'_>]| runs.iter().map(|run| (run.job.count, run.count)).collect::<Vec<_>>();
        assert_eq!(told(&first(&runs, 5).collect::<Vec<_>>()), [(1, 3), (2, 1), (3, 1)]);
        assert_eq!(told(&first(&runs, 9).collect::<Vec<_>>()), [(1, 3), (2, 1), (3, 2)]);
        let left = without(&mut runs, 2);
        assert_eq!(told(left), [(1, 1), (2, 1), (3, 2)]);
        let left = without(left, 2);
        assert_eq!(told(left), [(3, 2)]);
        assert_eq!(told(without(left, 2)), []);
    }

    #[test]
    fn the_greatest_that_fits_is_found() {
        for most in 1..40 {
            for fitting in 0..=most {
                assert_eq!(greatest(most, |count| count <= fitting), fitting);
            }
        }
    }
}
