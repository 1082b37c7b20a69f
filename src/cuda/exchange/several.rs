//! Calls of a group as few launches: those that follow each other and have a kernel for several are one, each by blocks of its
//! own. What all ranks agree on decides, and nothing else: which calls the group has, in their order.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::Job;
use super::arguments::{Combine, Group, SEVERAL, Several, Swap};
use super::functions::Functions;
use super::plan::{Combination, Plan};
use super::swap::Swapping;
use super::table::Table;
use super::windowed::Shared;
use crate::cuda::driver::{FunctionHandle, Grid};

/// The launch of several.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) function: FunctionHandle,
    pub(super) grid: Grid,
    pub(super) arguments: Arguments,
}

#[derive(Debug)]
pub(super) enum Arguments {
    Combine(Box<Several<Combine>>),
    Swap(Box<Several<Swap>>),
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
}

/// Calls that follow each other and differ in nothing but their addresses.
struct Run<'a> {
    job: &'a Job,
    count: usize,
}

impl Bundler<'_> {
    /// Which calls of a list are a launch each, in their order.
    pub(super) fn bundles(&self, jobs: &[Job]) -> Vec<Range<usize>> {
        let mut bundles = Vec::with_capacity(jobs.len() / SEVERAL + 1);
        // Those that follow each other and have one kernel, if it is for several.
        let (mut runs, mut kernel) = (Vec::new(), None);
        for alike in jobs.chunk_by(have_one_shape) {
            let function = self.function(&alike[0]);
            if function != kernel {
                self.cut(&runs, kernel.is_some(), &mut bundles);
                (runs, kernel) = (Vec::new(), function);
            }
            runs.push(Run { job: &alike[0], count: alike.len() });
        }
        self.cut(&runs, kernel.is_some(), &mut bundles);
        bundles
    }

    /// Cuts calls that one kernel does, or that none does several of, into launches.
    fn cut(&self, runs: &[Run<'_>], several: bool, bundles: &mut Vec<Range<usize>>) {
        let count = runs.iter().map(|run| run.count).sum();
        let (mut done, mut before) = (0, bundles.last().map_or(0, |last| last.end));
        while done < count {
            let most = if several { SEVERAL.min(count - done) } else { 1 };
            let calls = self.most(runs, done, most);
            bundles.push(before..before + calls);
            (done, before) = (done + calls, before + calls);
        }
    }

    /// How many calls, from number `begin` on and at most `most`, are one launch: fewer where each would have too few blocks.
    fn most(&self, runs: &[Run<'_>], begin: usize, most: usize) -> usize {
        let fits = |count: usize| count == 1 || self.fit(runs, begin, count);
        if fits(most) {
            return most;
        }
        let (mut least, mut above) = (1, most);
        while above - least > 1 {
            let middle = least.midpoint(above);
            if fits(middle) { least = middle } else { above = middle }
        }
        least
    }

    /// Whether so many calls, from number `begin` on, can be beside each other, with blocks enough for each.
    fn fit(&self, runs: &[Run<'_>], begin: usize, count: usize) -> bool {
        let mut before = 0;
        // Each with the number of its first call.
        let numbered = runs.iter().map(move |run| {
            let first = before;
            before += run.count;
            (first, run)
        });
        let mut theirs = numbered
            .skip_while(move |(first, run)| first + run.count <= begin)
            .take_while(move |(first, _)| *first < begin + count);
        let limits = theirs.clone().map(|(_, run)| run.job.max_blocks);
        self.blocks_of_each(limits, count)
            .is_some_and(|each| theirs.all(|(_, run)| self.by_lines(run.job, each).is_some()))
    }

    /// The launch of several calls that are one.
    pub(super) fn launch(&self, jobs: &[Job]) -> Option<Launch> {
        let first = jobs.first().filter(|_| jobs.len() <= SEVERAL)?;
        let function = self.function(first)?;
        let each = self.blocks_of_each(jobs.iter().map(|job| job.max_blocks), jobs.len())?;
        let mut grid = Grid { blocks: 0, threads: 0, shared: 0, overlaps: false };
        let mut arguments = match self.by_lines(first, each)? {
            ByLines::Combine(_) => Arguments::Combine(Box::new(Several::of(self.group))),
            ByLines::Swap(_) => Arguments::Swap(Box::new(Several::of(self.group))),
        };
        let mut place = 0;
        for alike in jobs.chunk_by(have_one_shape) {
            let call = self.by_lines(&alike[0], each)?;
            let one = call.grid();
            grid.threads = grid.threads.max(one.threads);
            for job in alike {
                let first = grid.blocks;
                match (&call, &mut arguments) {
                    (ByLines::Combine(combination), Arguments::Combine(all)) => {
                        all.set(place, first, combination.arguments(self.group.size(), job, first));
                    }
                    (ByLines::Swap(swapping), Arguments::Swap(all)) => {
                        all.set(place, first, swapping.arguments(job, job.bytes()?, first));
                    }
                    _ => return None,
                }
                grid.blocks += one.blocks;
                place += 1;
            }
        }
        Some(Launch { function, grid, arguments })
    }

    /// The most blocks that each of so many calls may have beside the others, whose callers allow so many; 0 for no limit.
    fn blocks_of_each(&self, limits: impl Iterator<Item = u32>, count: usize) -> Option<u32> {
        let blocks = self.table.tuning(self.group.size()).line_blocks.min(self.table.blocks);
        // At most SEVERAL.
        let each = limits.filter(|&limit| limit != 0).fold(blocks, u32::min) / count as u32;
        // No limit is none to each.
        (each > 0).then_some(each)
    }

    /// The kernel for several such calls, if there is one. What gains by windows has none, also in place, where it is staged
    /// all the same: only this rank knows its addresses, and all ranks must find the same launches.
    fn function(&self, job: &Job) -> Option<FunctionHandle> {
        if Shared::of(&Job { input: 0, output: 1, ..*job }, self.table, self.group.size()).is_some() {
            return None;
        }
        match self.by_lines(job, job.max_blocks)? {
            ByLines::Combine(_) => self.functions.several(job),
            ByLines::Swap(_) => Some(self.functions.several_swaps()),
        }
    }

    /// A call by at most so many blocks, if it goes by lines then.
    fn by_lines(&self, job: &Job, max_blocks: u32) -> Option<ByLines> {
        let bytes = job.bytes()?;
        match Plan::of(self.table, &Job { max_blocks, ..*job }, self.group.size(), bytes) {
            Plan::Combine(combination) if !combination.goes_by_tiles() => Some(ByLines::Combine(combination)),
            Plan::Swap(swapping) => Some(ByLines::Swap(swapping)),
            _ => None,
        }
    }
}
