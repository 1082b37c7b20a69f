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

/// What `of` makes of each job; it is asked once for those that follow each other and differ in nothing but their addresses.
fn each_shape<T: Clone>(jobs: &[Job], of: impl Fn(&Job) -> T) -> Vec<T> {
    let shape = |job: &Job| Job { input: 0, output: 0, ..*job };
    let mut made = Vec::with_capacity(jobs.len());
    for alike in jobs.chunk_by(|before, job| shape(before) == shape(job)) {
        made.resize(made.len() + alike.len(), of(&alike[0]));
    }
    made
}

/// Where calls become launches.
pub(super) struct Bundler<'a> {
    pub(super) table: &'a Table,
    pub(super) group: Group,
    pub(super) functions: &'a Functions,
}

impl Bundler<'_> {
    /// Which calls of a list are a launch each, in their order.
    pub(super) fn bundles(&self, jobs: &[Job]) -> Vec<Range<usize>> {
        let functions = each_shape(jobs, |job| self.function(job));
        let mut bundles = Vec::with_capacity(jobs.len());
        let mut begin = 0;
        while begin < jobs.len() {
            let alike = functions[begin..].iter().take_while(|&&other| other == functions[begin]).count();
            let end = match functions[begin] {
                Some(_) => begin + self.most(&jobs[begin..begin + alike.min(SEVERAL)]),
                None => begin + 1,
            };
            bundles.push(begin..end);
            begin = end;
        }
        bundles
    }

    /// How many of these calls, from the first on, are one launch: fewer than all where each would have too few blocks.
    fn most(&self, jobs: &[Job]) -> usize {
        let fits = |count: usize| self.lay_out(&jobs[..count]).is_some();
        if fits(jobs.len()) {
            return jobs.len();
        }
        let (mut least, mut above) = (1, jobs.len());
        while above - least > 1 {
            let middle = least.midpoint(above);
            if fits(middle) { least = middle } else { above = middle }
        }
        least
    }

    /// The launch of several calls that are one.
    pub(super) fn launch(&self, jobs: &[Job]) -> Option<Launch> {
        let function = self.function(jobs.first()?)?;
        let calls = self.lay_out(jobs)?;
        let mut grid = Grid { blocks: 0, threads: 0, shared: 0, overlaps: false };
        let (mut combines, mut swaps) = (Vec::new(), Vec::new());
        for (job, call) in jobs.iter().zip(calls) {
            let first = grid.blocks;
            grid.blocks += call.grid().blocks;
            grid.threads = grid.threads.max(call.grid().threads);
            match call {
                ByLines::Combine(combination) => {
                    combines.push((first, combination.arguments(self.group.size(), job, first)));
                }
                ByLines::Swap(swapping) => {
                    swaps.push((first, swapping.arguments(job, job.bytes()?, first)));
                }
            }
        }
        let arguments = match (Several::new(self.group, &combines), Several::new(self.group, &swaps)) {
            (Some(combines), None) => Arguments::Combine(Box::new(combines)),
            (None, Some(swaps)) => Arguments::Swap(Box::new(swaps)),
            _ => return None,
        };
        Some(Launch { function, grid, arguments })
    }

    /// These calls beside each other, if that leaves blocks enough to each.
    fn lay_out(&self, jobs: &[Job]) -> Option<Vec<ByLines>> {
        let blocks = self.table.tuning(self.group.size()).line_blocks.min(self.table.blocks);
        let limits = jobs.iter().map(|job| job.max_blocks).filter(|&limit| limit != 0);
        // At most SEVERAL.
        let each = limits.fold(blocks, u32::min) / jobs.len() as u32;
        // No limit is none to each.
        if each == 0 {
            return None;
        }
        each_shape(jobs, |job| self.by_lines(job, each)).into_iter().collect()
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
