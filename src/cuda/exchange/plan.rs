//! What a call becomes: who gives, who combines which part of it by which protocol, and who takes the
//! results.
#![forbid(unsafe_code)]

use super::Job;
use super::arena::NARROW_BYTES;
use super::arguments::{Combine, Group};
use super::functions::Functions;
use super::swap::Swapping;
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::reduce::Operator;
use crate::signature::Kind;

/// Bytes of data that a slot of lines holds, of narrow ones.
pub(super) const NARROW_ROOM: u64 = NARROW_BYTES as u64 / 2;

/// The same of wide ones, which have `bytes` there: a multiple of [`LINE_GRAIN`].
pub(super) const fn wide_room(bytes: u32) -> u64 {
    bytes as u64 / 128 * 120 / LINE_GRAIN * LINE_GRAIN
}

/// Shares by lines begin at multiples of this.
pub(super) const LINE_GRAIN: u64 = 64;
/// Parts of calls begin at multiples of this: wide accesses, and whole elements.
const GRAIN: u64 = 128;

/// Threads of a kernel that goes by lines, at most: `LINE_THREADS` of the kernels.
const LINE_THREADS: u32 = 512;
/// Data of a warp's wide lines. Whole ones are what parts of pieces that are dealt out have, but for the
/// last.
const WARP_DATA: u64 = 480;
/// How many such parts a block should find in a piece, one after the other, and how long they should be at
/// least. Four H200s, with items of 15 and 33.75 KiB: a reduction of 8 MiB to one rank 35.7 and 37.8 µs, of
/// 16 MiB 63.7 and 64.6, of 64 MiB 232 and 224.
const DEALT_ITEMS: u64 = 8;
/// See [`DEALT_ITEMS`].
const DEALT_SHARE: u64 = 32 * WARP_DATA;
/// What a block does at once if it is all that it has. Four ranks on two H200s, by one item and by two:
/// reductions to one rank of 2, 2.5, 3 and 4 MiB (16.3 to 32.5 KiB a block) 13.0 and 14.6 µs, 15.2 and 16.3,
/// 17.7 and 18.6, 22.3 and 22.7; three ranks 10.6 and 12.0, 12.3 and 13.5, 14.8 and 15.2, 18.7 and 17.2.
const DEALT_ONE: u64 = 54 * WARP_DATA;
/// Up to how many ranks each thread of a kernel that goes by lines serves all peers: `MUTUAL_RANKS` of the
/// kernels.
const MUTUAL_RANKS: u32 = 4;
/// Up to how many bytes a reduction to a root is one by all ranks, of which the root alone keeps the result.
/// What everybody sends to everybody needs no room made and no answer: on two H100s 8 bytes take 2.3 µs, by
/// the root alone 3.3. More bytes would be felt by what else the links carry.
pub(super) const BY_ALL: u64 = 32 << 10;
/// Threads of a kernel that goes by tiles: `TILE_THREADS` of the kernels.
const TILE_THREADS: u32 = 256;

/// How the parts of a call travel. The numbers are the kernels'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Lines of 16 bytes, 8 of them data, 8 a number.
    Narrow = 0,
    /// Lines of 128 bytes, 120 of them data, 8 a number.
    Wide = 1,
    /// Tiles, and counters that say how many there are.
    Tiles = 2,
    /// Wide lines in two steps, done side by side: pieces are dealt out to the blocks, each of which does one
    /// thing on each rank.
    Dealt = 3,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Nothing,
    Combine(Combination),
    Swap(Swapping),
    Move,
}

/// A launch of a kernel that combines. *Sources* give their input, cut into one piece for each *owner*;
/// owners combine their pieces; *takers* get what the owners made. Masks of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Combination {
    pub(super) grid: Grid,
    protocol: Protocol,
    sources: u32,
    owners: u32,
    takers: u32,
    /// Every owner's piece is the whole.
    whole: bool,
    /// An owner's result begins at its output's first byte, wherever the piece lies.
    packed: bool,
    /// Of the owners the root alone keeps the result.
    by_all: bool,
    bytes: u64,
    /// From piece to piece.
    stride: u64,
    /// What one block does of a piece: by lines; by tiles, in one round.
    share: u64,
}

impl Plan {
    /// Of a launch of its own. `bytes` are those of `job.count`.
    pub(super) fn alone(table: &Table, job: &Job, size: u32, bytes: u64) -> Plan {
        Plan::chosen(table, job, size, bytes, |call| {
            call.dealt(job).unwrap_or_else(|| call.by_lines_or_tiles())
        })
    }

    /// The same of a call that may be one of several in a launch.
    pub(super) fn of(table: &Table, job: &Job, size: u32, bytes: u64) -> Plan {
        Plan::chosen(table, job, size, bytes, |call| call.by_lines_or_tiles())
    }

    /// `combine` chooses what a call that combines goes by.
    fn chosen(
        table: &Table,
        job: &Job,
        size: u32,
        bytes: u64,
        combine: impl FnOnce(&Combining) -> Combination,
    ) -> Plan {
        if bytes == 0 {
            return Plan::Nothing;
        }
        match job.kind {
            // One pass over the bytes either way, but warps that move wait for no others.
            Kind::Broadcast if size == 2 && bytes >= table.tuning(size).broadcast_sends => Plan::Move,
            Kind::Allgather | Kind::Alltoall => {
                Swapping::of(table, job, size, bytes).map_or(Plan::Move, Plan::Swap)
            }
            _ => Combining::of(table, job, size, bytes)
                .map_or(Plan::Move, |call| Plan::Combine(combine(&call))),
        }
    }
}

/// A call that combines, before its protocol is chosen.
pub(super) struct Combining<'a> {
    table: &'a Table,
    kind: Kind,
    size: u32,
    bytes: u64,
    /// When everything is done in one step, and when it is in two.
    roles: [Roles; 2],
    /// When a reduction to a root is done by all: see [`BY_ALL`].
    by_all: Option<Roles>,
    /// The most blocks.
    limit: u32,
    /// The same by lines, and by tiles.
    blocks: [u32; 2],
}

/// Who does what: masks of ranks.
#[derive(Clone, Copy)]
struct Roles {
    sources: u32,
    owners: u32,
    takers: u32,
}

impl Combining<'_> {
    /// One of `bytes`, not 0, if it is of a kind that combines.
    pub(super) fn of<'a>(table: &'a Table, job: &Job, size: u32, bytes: u64) -> Option<Combining<'a>> {
        let all = (1 << size) - 1;
        let root = 1 << job.root;
        let others = all & !root;
        let roles = match job.kind {
            Kind::Allreduce => [(all, all, 0), (all, all, all)],
            // With a piece of its own the root takes in up to twice what it does without, but all is there
            // sooner.
            Kind::Reduce if bytes < table.tuning(size).reduce_spares => [(all, root, 0), (all, all, root)],
            Kind::Reduce => [(all, root, 0), (all, others, root)],
            Kind::ReduceScatter => [(all, all, 0), (all, all, 0)],
            Kind::Broadcast => [(root, others, 0), (root, others, others)],
            _ => return None,
        };
        let tuning = table.tuning(size);
        let limit = if job.max_blocks == 0 { table.blocks } else { job.max_blocks.min(table.blocks) };
        let line_blocks = tuning.line_blocks.min(limit);
        // The scalars of a pre-multiplied sum go by lines.
        let scales = job.kind.reduces() && matches!(job.operator, Operator::PreMulSum(_));
        let tile_blocks = tuning.tile_blocks.min(if scales { line_blocks } else { limit });
        Some(Combining {
            table,
            kind: job.kind,
            size,
            bytes,
            roles: roles.map(|(sources, owners, takers)| Roles { sources, owners, takers }),
            by_all: (job.kind == Kind::Reduce && bytes <= BY_ALL && size <= MUTUAL_RANKS && !scales)
                .then_some(Roles { sources: all, owners: all, takers: 0 }),
            limit,
            blocks: [line_blocks, tile_blocks],
        })
    }

    fn scatters(&self) -> bool {
        self.kind == Kind::ReduceScatter
    }

    /// By what every launch has.
    fn by_lines_or_tiles(&self) -> Combination {
        self.by_lines().unwrap_or_else(|| self.by_tiles())
    }

    /// By the lines that it goes by, if it does and they have room for it.
    pub(super) fn by_lines(&self) -> Option<Combination> {
        let (bounds, wide) = (self.table.bounds(self.kind, self.size), self.table.tuning(self.size).wide);
        let [one, two] = self.roles;
        let whole = !self.scatters();
        let by_all = self.by_all.map(|roles| {
            let bounds = self.table.bounds(Kind::Allreduce, self.size);
            [
                (bounds.narrow, roles, true, Protocol::Narrow, NARROW_ROOM),
                (bounds.wide, roles, true, Protocol::Wide, wide_room(wide)),
            ]
        });
        let own = [
            (bounds.narrow, one, whole, Protocol::Narrow, NARROW_ROOM),
            (bounds.wide, one, whole, Protocol::Wide, wide_room(wide)),
            (bounds.sharded, two, false, Protocol::Wide, wide_room(wide)),
        ];
        let mut choices = by_all.into_iter().flatten().chain(own);
        choices.find_map(|(bound, roles, whole, protocol, room)| {
            let combination =
                (self.bytes <= bound).then(|| self.combination(roles, whole, protocol, self.blocks[0]))?;
            (combination.share <= room).then_some(combination)
        })
    }

    /// By lines in two steps of pieces that are dealt out to the blocks, if it is for that: kernels have it
    /// for sums of few ranks, in launches of their own.
    fn dealt(&self, job: &Job) -> Option<Combination> {
        let tuning = self.table.tuning(self.size);
        let [from, to] = [&tuning.dealt_from, &tuning.dealt_to].map(|bounds| match self.kind {
            Kind::Allreduce => bounds.allreduce,
            Kind::Reduce => bounds.reduce,
            _ => 0,
        });
        let serves = job.operator == Operator::Sum && Functions::deals(job.dtype);
        // Between two ranks nothing takes a second step.
        if !(serves && (3..=MUTUAL_RANKS).contains(&self.size) && (from..=to).contains(&self.bytes)) {
            return None;
        }
        let Roles { sources, takers, owners } = self.roles[1];
        // A root only takes results.
        let owners = if self.kind == Kind::Reduce { owners & !takers } else { owners };
        let count = owners.count_ones();
        // Owners that take results have queues for those beside the ones for inputs.
        let queues = tuning.line_blocks.min(self.table.blocks) / if owners & takers == 0 { 1 } else { 2 };
        let lanes = u64::from(queues.min(self.limit / count));
        if lanes == 0 {
            return None;
        }
        let stride = self.bytes.div_ceil(count.into()).next_multiple_of(GRAIN);
        let (part, room) = (stride.div_ceil(lanes), wide_room(tuning.wide));
        let wanted = if part <= DEALT_ONE { 1 } else { part.div_ceil(DEALT_SHARE).min(DEALT_ITEMS) };
        let items = wanted.max(part.div_ceil(room));
        let share = part.div_ceil(items).next_multiple_of(WARP_DATA);
        let lanes = stride.div_ceil(share).min(lanes);
        Some(Combination {
            // At most `limit`, a u32.
            grid: Grid {
                blocks: lanes as u32 * count,
                threads: dealt_threads(share),
                shared: 0,
                overlaps: false,
            },
            protocol: Protocol::Dealt,
            sources,
            owners,
            takers,
            whole: false,
            packed: false,
            by_all: false,
            bytes: self.bytes,
            stride,
            share,
        })
    }

    /// What there is to do, beside other calls.
    pub(super) fn weight(&self) -> u64 {
        if self.scatters() { self.bytes.saturating_mul(self.size.into()) } else { self.bytes }
    }

    /// By tiles.
    pub(super) fn by_tiles(&self) -> Combination {
        self.by_tiles_of(self.blocks[1])
    }

    /// By tiles and at most so many blocks, whatever its caller allows.
    pub(super) fn by_tiles_of(&self, blocks: u32) -> Combination {
        // Between two ranks, two steps move as many bytes as one.
        if self.size == 2 && !self.scatters() {
            return self.by_tiles_at_once(blocks);
        }
        self.combination(self.roles[1], false, Protocol::Tiles, blocks)
    }

    /// The same, in one step of the whole.
    pub(super) fn by_tiles_at_once(&self, blocks: u32) -> Combination {
        self.combination(self.roles[0], true, Protocol::Tiles, blocks)
    }

    fn combination(&self, roles: Roles, whole: bool, protocol: Protocol, most: u32) -> Combination {
        let Roles { sources, owners, takers } = roles;
        let (size, bytes, scatters) = (self.size, self.bytes, self.scatters());
        let (tuning, most) = (self.table.tuning(size), u64::from(most));
        let stride = match (whole, scatters) {
            (true, _) => 0,
            (false, true) => bytes,
            (false, false) => bytes.div_ceil(owners.count_ones().into()).next_multiple_of(GRAIN),
        };
        let piece = if whole { bytes } else { stride };
        let (blocks, share, threads) = match protocol {
            Protocol::Tiles => {
                let wanted = piece.div_ceil(GRAIN).min(most);
                let rounds = piece.div_ceil(wanted * u64::from(tuning.slot));
                (wanted, piece.div_ceil(wanted * rounds).next_multiple_of(GRAIN), TILE_THREADS)
            }
            _ => {
                let wanted = piece.div_ceil(tuning.line_share).min(most).max(1);
                let share = piece.div_ceil(wanted).next_multiple_of(LINE_GRAIN);
                (piece.div_ceil(share), share, {
                    let threads = line_threads(protocol, share);
                    let mutual = whole || scatters && size <= MUTUAL_RANKS;
                    if mutual { threads } else { (threads * (size - 1)).min(LINE_THREADS) }
                })
            }
        };
        Combination {
            // At most `most`, a u32.
            grid: Grid { blocks: blocks as u32, threads, shared: 0, overlaps: false },
            protocol,
            sources,
            owners,
            takers,
            whole,
            packed: scatters,
            by_all: self.kind == Kind::Reduce && owners.count_ones() == size && takers == 0,
            bytes: self.weight(),
            stride,
            share,
        }
    }
}

/// Packets of 16 bytes that carry `bytes` as lines.
pub(super) fn line_packets(protocol: Protocol, bytes: u64) -> u64 {
    match protocol {
        Protocol::Wide => bytes.div_ceil(120) * 8,
        _ => bytes.div_ceil(8),
    }
}

/// Threads of a block that moves `share` bytes by lines.
pub(super) fn line_threads(protocol: Protocol, share: u64) -> u32 {
    // At most LINE_THREADS.
    line_packets(protocol, share).min(u64::from(LINE_THREADS)).next_multiple_of(32).max(32) as u32
}

/// Threads of a block that has items of `share`: half of them may have a whole one to move.
fn dealt_threads(share: u64) -> u32 {
    // At most LINE_THREADS.
    (share.div_ceil(WARP_DATA) * 64).min(u64::from(LINE_THREADS)) as u32
}

impl Combination {
    pub(super) fn goes_by_tiles(&self) -> bool {
        self.protocol == Protocol::Tiles
    }

    pub(super) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// How many items a block has in a piece that is dealt out.
    #[cfg(test)]
    pub(super) fn items(&self) -> u64 {
        let lanes = u64::from(self.grid.blocks / self.owners.count_ones());
        self.stride.div_ceil(lanes * self.share)
    }

    /// By the blocks from `first` on.
    pub(super) fn arguments(&self, group: &Group, job: &Job, first: u32) -> Combine {
        let scale = job.scale();
        Combine {
            input: job.input,
            output: if self.by_all && group.rank() != job.root { group.own_scratch() } else { job.output },
            bytes: self.bytes,
            stride: self.stride,
            share: self.share,
            scale: scale.unwrap_or(0),
            sources: self.sources,
            owners: self.owners,
            takers: self.takers,
            root: job.root,
            protocol: self.protocol as u32,
            whole: self.whole.into(),
            packed: self.packed.into(),
            scaled: scale.is_some().into(),
            ranks: job.divisor(group.size()),
            number: job.operator.number().into(),
            first,
            blocks: self.grid.blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::{DealtBounds, Tuning};
    use super::*;
    use crate::reduce::DataType;

    fn job(kind: Kind, count: u64) -> Job {
        Job {
            kind,
            input: 0,
            output: 0,
            count,
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: 1,
            max_blocks: 0,
        }
    }

    /// Counts around every power of two that memory holds.
    fn counts() -> impl Iterator<Item = u64> {
        (0..40).flat_map(|log| [(1 << log) - 1, 1 << log, (1 << log) + 1, 5 << log >> 2])
    }

    #[test]
    fn every_part_fits_its_slot_and_all_parts_are_the_whole() {
        let table = Table::default();
        for kind in [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter, Kind::Broadcast] {
            for (size, count) in (2..=8).flat_map(|size| counts().map(move |count| (size, count))) {
                for (max_blocks, operator) in [
                    (0, Operator::PreMulSum(2.0)),
                    (0, Operator::Sum),
                    (1, Operator::Sum),
                    (7, Operator::Sum),
                ] {
                    let job = Job { max_blocks, operator, ..job(kind, count) };
                    let tuning = table.tuning(size);
                    let Plan::Combine(plan) = Plan::alone(&table, &job, size, count) else {
                        let sent = kind == Kind::Broadcast && size == 2 && count >= tuning.broadcast_sends;
                        assert!(count == 0 || sent, "{kind:?} of {count} on {size}");
                        continue;
                    };
                    let limit = if max_blocks == 0 { table.blocks } else { max_blocks };
                    assert!((1..=limit).contains(&plan.grid.blocks), "{plan:?}");
                    if matches!(plan.protocol, Protocol::Narrow | Protocol::Wide)
                        || kind.reduces() && operator != Operator::Sum
                    {
                        assert!(
                            plan.grid.blocks <= tuning.line_blocks,
                            "{kind:?} of {count} on {size}: {plan:?}"
                        );
                    }
                    let room = match plan.protocol {
                        Protocol::Narrow => NARROW_ROOM,
                        Protocol::Wide | Protocol::Dealt => wide_room(tuning.wide),
                        Protocol::Tiles => tuning.slot.into(),
                    };
                    assert!(plan.share <= room, "{kind:?} of {count} on {size}: {plan:?}");
                    let piece = if plan.whole { plan.bytes } else { plan.stride };
                    if !matches!(plan.protocol, Protocol::Tiles | Protocol::Dealt) {
                        assert!(plan.share * u64::from(plan.grid.blocks) >= piece, "{plan:?}");
                    }
                    assert!(plan.whole || plan.stride * u64::from(plan.owners.count_ones()) >= plan.bytes);
                }
            }
        }
    }

    #[test]
    fn a_short_reduction_to_a_root_is_one_by_all_and_the_root_keeps_it() {
        let table = Table::default();
        let arenas = [1 << 30, 2 << 30, 3 << 30, 4 << 30, 5 << 30];
        let call = |rank, size: u32, bytes, operator| {
            let job = Job { operator, output: 77, ..job(Kind::Reduce, bytes) };
            let Plan::Combine(plan) = Plan::of(&table, &job, size, bytes) else {
                panic!("{bytes} on {size}")
            };
            plan.arguments(&Group::new(rank, &arenas[..size as usize], 0, &table), &job, 0)
        };
        for size in 2..=4 {
            for bytes in [1, BY_ALL] {
                for rank in 0..size {
                    let call = call(rank, size, bytes, Operator::Sum);
                    assert_eq!((call.owners, call.takers), ((1 << size) - 1, 0));
                    let arena = arenas[rank as usize];
                    let apart =
                        (arena..arena + table.arena_bytes(size) as u64 - BY_ALL).contains(&call.output);
                    assert!(if rank == 1 { call.output == 77 } else { apart }, "{rank} of {size}: {call:?}");
                }
            }
        }
        // Longer ones, those of many, and those whose factors go to the root, are the root's.
        for (size, bytes, operator) in
            [(2, BY_ALL + 1, Operator::Sum), (5, 1, Operator::Sum), (2, 1, Operator::PreMulSum(2.0))]
        {
            let call = call(0, size, bytes, operator);
            assert_eq!((call.owners, call.output), (2, 77), "{bytes} on {size}");
        }
    }

    #[test]
    fn a_short_reduction_to_a_root_has_its_own_lines_where_those_of_all_do_not_go() {
        let table = Table::default().without_wide_lines();
        let plan = Plan::of(&table, &job(Kind::Reduce, BY_ALL), 4, BY_ALL);
        let Plan::Combine(plan) = plan else { panic!("{plan:?}") };
        assert_eq!((plan.protocol, plan.owners, plan.by_all), (Protocol::Narrow, 2, false));
    }

    #[test]
    fn sums_of_few_ranks_in_two_steps_are_dealt_out() {
        let table = Table::default();
        let plan = |kind, size: u32, count, dtype: DataType, operator| {
            let job = Job { dtype, operator, ..job(kind, count) };
            let Plan::Combine(plan) = Plan::alone(&table, &job, size, count * dtype.size() as u64) else {
                panic!("{job:?}")
            };
            plan.protocol
        };
        let Tuning { dealt_from, dealt_to, .. } = *table.tuning(4);
        for (kind, from, to) in [
            (Kind::Allreduce, dealt_from.allreduce / 4, dealt_to.allreduce / 4),
            (Kind::Reduce, dealt_from.reduce / 4, dealt_to.reduce / 4),
        ] {
            for size in [3, 4] {
                assert_eq!(plan(kind, size, from, DataType::F32, Operator::Sum), Protocol::Dealt);
                assert_eq!(plan(kind, size, to, DataType::F32, Operator::Sum), Protocol::Dealt);
                assert_eq!(plan(kind, size, from - 1, DataType::F32, Operator::Sum), Protocol::Wide);
                assert_eq!(plan(kind, size, to + 1, DataType::F32, Operator::Sum), Protocol::Tiles);
            }
            // Nor calls that are one launch together.
            let job = Job { dtype: DataType::F32, ..job(kind, from) };
            let Plan::Combine(among) = Plan::of(&table, &job, 4, 4 * from) else { panic!("{job:?}") };
            assert_eq!(among.protocol, Protocol::Wide);
            // What has no code for it.
            assert_eq!(plan(kind, 4, from, DataType::F32, Operator::Average), Protocol::Wide);
            assert_eq!(plan(kind, 4, from, DataType::I32, Operator::Max), Protocol::Wide);
            assert_eq!(plan(kind, 4, 4 * from, DataType::U8, Operator::Sum), Protocol::Wide);
            assert_eq!(plan(kind, 8, from, DataType::F32, Operator::Sum), Protocol::Wide);
            assert_ne!(plan(kind, 2, from, DataType::F32, Operator::Sum), Protocol::Dealt);
        }
        let from = dealt_from.allreduce / 4;
        assert_eq!(plan(Kind::Broadcast, 4, from, DataType::F32, Operator::Sum), Protocol::Wide);
    }

    /// As the kernel cuts them: blocks in turn for each owner, items of a block one after the other.
    #[test]
    fn pieces_that_are_dealt_out_have_queues_and_slots_for_all_their_parts() {
        for (wide, line_blocks, blocks) in
            [(36 << 10, 64, 128), (4096, 2, 4), (8192, 64, 12), (36 << 10, 7, 128)]
        {
            let mut table = Table { blocks, ..Table::default() };
            let tuning = &mut table.tunings[1];
            (tuning.wide, tuning.line_blocks) = (wide, line_blocks);
            (tuning.dealt_from, tuning.dealt_to) = (DealtBounds::NONE, DealtBounds::ALL);
            for (kind, size) in
                [Kind::Allreduce, Kind::Reduce].into_iter().flat_map(|kind| [(kind, 3), (kind, 4)])
            {
                for (count, max_blocks) in counts().flat_map(|count| [(count, 0), (count, 5), (count, 2)]) {
                    let bytes = 4 * count;
                    let job = Job { dtype: DataType::F32, max_blocks, ..job(kind, count) };
                    let limit = if max_blocks == 0 { blocks } else { blocks.min(max_blocks) };
                    let Plan::Combine(plan) = Plan::alone(&table, &job, size, bytes) else {
                        assert_eq!(count, 0);
                        continue;
                    };
                    let owners = if kind == Kind::Reduce { size - 1 } else { size };
                    assert_eq!(plan.protocol == Protocol::Dealt, limit >= owners, "{plan:?}");
                    if plan.protocol != Protocol::Dealt {
                        continue;
                    }
                    assert_eq!(
                        (plan.owners.count_ones(), plan.grid.blocks % owners),
                        (owners, 0),
                        "{plan:?}"
                    );
                    assert!(plan.grid.blocks <= limit && plan.share <= wide_room(wide), "{plan:?}");
                    let lanes = u64::from(plan.grid.blocks / owners);
                    let queues = if plan.owners & plan.takers == 0 { lanes } else { 2 * lanes };
                    assert!((1..=u64::from(line_blocks)).contains(&queues), "{plan:?}");
                    // Every block has something of the first piece, and all pieces are the whole.
                    assert!(plan.share * (lanes - 1) < plan.stride, "{plan:?}");
                    assert!(plan.stride * u64::from(owners) >= bytes && plan.share.is_multiple_of(WARP_DATA));
                }
            }
        }
    }

    #[test]
    fn what_is_dealt_out_is_cut_where_a_block_has_much_of_it() {
        let table = Table::default();
        let items = |mib: u64| {
            let job = Job { dtype: DataType::F32, ..job(Kind::Reduce, mib << 18) };
            let Plan::Combine(plan) = Plan::alone(&table, &job, 4, mib << 20) else { panic!("{job:?}") };
            assert_eq!(plan.protocol, Protocol::Dealt);
            plan.items()
        };
        assert_eq!([1, 2, 3, 4, 8, 16].map(items), [1, 1, 1, 3, 5, 8]);
        // As many as slots ask for.
        assert!(items(64) > 8);
    }

    #[test]
    fn what_moves_is_moved() {
        let table = Table::default();
        let sent = table.tuning(2).broadcast_sends;
        let broadcast = |size, bytes| Plan::of(&table, &job(Kind::Broadcast, bytes), size, bytes);
        assert_eq!(broadcast(2, sent), Plan::Move);
        assert!(
            [broadcast(2, sent - 1), broadcast(3, sent)].iter().all(|plan| matches!(plan, Plan::Combine(_)))
        );
        for (kind, bytes) in
            [(Kind::Gather, 9), (Kind::Scatter, 9), (Kind::Allgather, 1 << 30), (Kind::Alltoall, 1 << 30)]
        {
            assert_eq!(Plan::of(&table, &job(kind, bytes), 4, bytes), Plan::Move);
            assert_eq!(Plan::of(&table, &job(kind, 0), 4, 0), Plan::Nothing);
        }
    }

    #[test]
    fn what_is_swapped_fits_its_slots() {
        let table = Table::default();
        for kind in [Kind::Allgather, Kind::Alltoall] {
            for (size, bytes) in (2..=8).flat_map(|size| counts().map(move |count| (size, count))) {
                for max_blocks in [0, 1, 7] {
                    let job = Job { max_blocks, ..job(kind, bytes) };
                    let tuning = table.tuning(size);
                    let few = tuning.line_blocks.min(if max_blocks == 0 { u32::MAX } else { max_blocks });
                    let Plan::Swap(plan) = Plan::of(&table, &job, size, bytes) else {
                        let wide = bytes <= tuning.swaps.wide
                            && bytes <= wide_room(tuning.wide) / 2 * u64::from(few);
                        assert!(bytes == 0 || !wide, "{kind:?} of {bytes} on {size}, at most {max_blocks}");
                        continue;
                    };
                    assert!((1..=few).contains(&plan.grid.blocks), "{plan:?}");
                    let arguments = plan.arguments(&job, bytes, 0);
                    let room = if arguments.wide != 0 { wide_room(tuning.wide) } else { NARROW_ROOM };
                    assert!(arguments.share <= room, "{plan:?}");
                    // No block has nothing to do: its peers wait for an item of it.
                    let before = arguments.share * (u64::from(plan.grid.blocks) - 1);
                    assert!((before + 1..=before + arguments.share).contains(&bytes), "{plan:?}");
                    assert_eq!(plan.grid.threads % (32 * size), 0, "{plan:?}");
                }
            }
        }
    }
}
