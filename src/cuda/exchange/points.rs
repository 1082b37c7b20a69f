//! Transfers between pairs of ranks, as the kernels that move take them.
#![forbid(unsafe_code)]

use std::ffi::c_void;

use super::Job;
use super::arena::MAX_RANKS;
use super::arguments::{Group, LISTS, Move, Transfer};
use super::plan::{NARROW_ROOM, wide_room};
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::error::{Result, fail};
use crate::signature::Kind;

/// Transfers of a launch, what a rank sends itself counted twice: of one that has few, and the most.
const FEW: usize = 2 * MAX_RANKS;
/// See [`FEW`].
const MANY: usize = 240;
/// Collective calls of one kind that one launch has room for, whatever the size of the group.
pub(super) const CALLS: usize = MANY / LISTS;
/// Warps of a block that send, at most, and as many that receive: `MOVE_WARPS` of the kernels.
pub(super) const MOVE_WARPS: u32 = 4;

/// Which way a point's bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this rank to the peer.
    Send,
    /// From the peer to this rank.
    Receive,
}

impl Direction {
    /// That of the same bytes at their other end.
    pub fn back(self) -> Direction {
        match self {
            Direction::Send => Direction::Receive,
            Direction::Receive => Direction::Send,
        }
    }
}

/// A send or a receive of a group of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Which way.
    pub direction: Direction,
    /// The other rank, or this one.
    pub peer: u32,
    /// The first byte.
    pub address: u64,
    /// How many there are; the other side has as many.
    pub bytes: u64,
}

/// One launch of a kernel that moves.
pub(super) struct Round {
    pub(super) grid: Grid,
    pub(super) arguments: Arguments,
}

/// The parameter of either kernel: the one for few transfers keeps launches light.
#[allow(clippy::large_enum_variant)] // The common one is on the stack, the rare one on the heap.
pub(super) enum Arguments {
    Few(Move<FEW>),
    Many(Box<Move<MANY>>),
}

impl Round {
    pub(super) fn is_small(&self) -> bool {
        matches!(self.arguments, Arguments::Few(_))
    }

    /// The address of the kernel's parameter; good as long as `self` stays where it is.
    pub(super) fn parameter(&mut self) -> *mut c_void {
        match &mut self.arguments {
            Arguments::Few(arguments) => std::ptr::from_mut(arguments).cast(),
            Arguments::Many(arguments) => std::ptr::from_mut(&mut **arguments).cast(),
        }
    }
}

/// The points that a collective call is for this rank; `bytes` are those of `job.count`.
pub(super) fn of_job(job: &Job, rank: u32, size: u32, bytes: u64) -> Vec<Point> {
    let mut points = Vec::with_capacity(2 * size as usize);
    let at = |address: u64, part: u32| address.wrapping_add(bytes.wrapping_mul(part.into()));
    let mut point = |direction, peer, address| points.push(Point { direction, peer, address, bytes });
    for peer in 0..size {
        match job.kind {
            Kind::Allgather => {
                point(Direction::Send, peer, job.input);
                point(Direction::Receive, peer, at(job.output, peer));
            }
            Kind::Alltoall => {
                point(Direction::Send, peer, at(job.input, peer));
                point(Direction::Receive, peer, at(job.output, peer));
            }
            Kind::Gather if rank == job.root => {
                point(Direction::Receive, peer, at(job.output, peer));
                if peer == rank {
                    point(Direction::Send, rank, job.input);
                }
            }
            Kind::Gather if peer == job.root => point(Direction::Send, peer, job.input),
            Kind::Scatter if rank == job.root => {
                point(Direction::Send, peer, at(job.input, peer));
                if peer == rank {
                    point(Direction::Receive, rank, job.output);
                }
            }
            Kind::Scatter if peer == job.root => point(Direction::Receive, peer, job.output),
            // The root may have nowhere to put what it has.
            Kind::Broadcast if peer == rank && rank == job.root && job.output != 0 => {
                point(Direction::Send, rank, job.input);
                point(Direction::Receive, rank, job.output);
            }
            Kind::Broadcast if peer != rank && rank == job.root => point(Direction::Send, peer, job.input),
            Kind::Broadcast if peer != rank && peer == job.root => {
                point(Direction::Receive, peer, job.output);
            }
            _ => {}
        }
    }
    points
}

/// The launches that move the points: one, if they have room there. Else the i-th has transfers i·n to
/// (i+1)·n - 1 of every pair and direction, n by the size of the group alone: it waits for no later one of
/// another rank that has several, nor for what one that has them all in one does behind these transfers.
pub(super) fn rounds(table: &Table, group: &Group, points: &[Point], blocks: Blocks) -> Result<Vec<Round>> {
    let (rank, size) = (group.rank(), group.size());
    check(rank, size, points)?;
    let mut lists = Lists::default();
    each_transfer(rank, size, points, |list, _| lists.counts[list] += 1);
    let share = match lists.counts.iter().sum::<usize>() {
        0..=MANY => MANY,
        _ => MANY / (2 * size as usize),
    };
    let limits = Limits::new(table, size, blocks);
    let launches = lists.counts.iter().max().map_or(0, |most| most.div_ceil(share));
    let mut rounds: Vec<Round> =
        (0..launches).map(|launch| limits.round(*group, lists.part(launch, share))).collect();
    let mut filled = [0; LISTS];
    each_transfer(rank, size, points, |list, transfer| {
        let Round { arguments, grid } = &mut rounds[filled[list] / share];
        arguments.put(list, filled[list] % share, transfer);
        filled[list] += 1;
        // Counted in parts, until all are known.
        grid.blocks = grid.blocks.max(limits.parts_of(transfer.bytes));
    });
    rounds.iter_mut().for_each(|round| limits.finish(round));
    Ok(rounds)
}

/// Which list the transfers of a pair are in, by the peer: kernels begin with the one after them, and end with
/// the rank itself.
fn list_of(rank: u32, size: u32, peer: u32, direction: Direction) -> usize {
    let turn = (peer + size - rank + size - 1) % size;
    2 * turn as usize + direction as usize
}

/// What there is to move, in the order of the call. What a rank sends itself comes twice, as it does for
/// others, unless it lies where it is to go.
fn each_transfer(rank: u32, size: u32, points: &[Point], mut handle: impl FnMut(usize, Transfer)) {
    let transfer = |point: &Point| Transfer { address: point.address, bytes: point.bytes };
    for point in points.iter().filter(|point| point.bytes > 0 && point.peer != rank) {
        handle(list_of(rank, size, point.peer, point.direction), transfer(point));
    }
    let [sends, receives] =
        [Direction::Send, Direction::Receive].map(|direction| own(rank, points, direction));
    for (from, to) in sends.zip(receives).filter(|(from, to)| from.address != to.address) {
        for point in [from, to] {
            handle(list_of(rank, size, rank, point.direction), transfer(point));
        }
    }
}

/// How many transfers each list has.
#[derive(Default)]
struct Lists {
    counts: [usize; LISTS],
}

impl Lists {
    /// Where the lists of a launch end, of which each has at most `share`.
    fn part(&self, launch: usize, share: usize) -> [u32; LISTS] {
        let mut end = 0;
        self.counts.map(|count| {
            // At most MANY.
            end += count.saturating_sub(launch * share).min(share) as u32;
            end
        })
    }
}

/// How many blocks a launch may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// At most; 0: as many as suit it. The same on all ranks.
    pub(super) most: u32,
    /// Whether every peer has blocks of its own even so, since ranks need not come to the same messages in the
    /// same order: one each at least. What all ranks call alike may go from peer to peer.
    pub(super) for_each_peer: bool,
}

impl Arguments {
    fn of(limits: &Limits, group: Group, ends: [u32; LISTS]) -> Arguments {
        match ends[LISTS - 1] as usize {
            0..=FEW => Arguments::Few(limits.of(group, ends)),
            _ => Arguments::Many(Box::new(limits.of(group, ends))),
        }
    }

    fn put(&mut self, list: usize, at: usize, transfer: Transfer) {
        match self {
            Arguments::Few(few) => few.put(list, at, transfer),
            Arguments::Many(many) => many.put(list, at, transfer),
        }
    }

    fn ends(&self) -> &[u32; LISTS] {
        match self {
            Arguments::Few(few) => &few.ends,
            Arguments::Many(many) => &many.ends,
        }
    }
}

/// Where a list begins, by where all end.
fn begin_of(ends: &[u32; LISTS], list: usize) -> usize {
    list.checked_sub(1).map_or(0, |before| ends[before] as usize)
}

impl<const ROOM: usize> Move<ROOM> {
    fn put(&mut self, list: usize, at: usize, transfer: Transfer) {
        self.transfers[begin_of(&self.ends, list) + at] = transfer;
    }

    fn list(&self, list: usize) -> &[Transfer] {
        &self.transfers[begin_of(&self.ends, list)..self.ends[list] as usize]
    }

    /// Whether every pair sends as much as it receives, transfer by transfer, and some receive goes where its
    /// send lies.
    fn swaps(&self, size: u32) -> bool {
        let turns = 0..size as usize - 1;
        let pairs = || turns.clone().flat_map(|turn| self.list(2 * turn).iter().zip(self.list(2 * turn + 1)));
        turns.clone().all(|turn| self.list(2 * turn).len() == self.list(2 * turn + 1).len())
            && pairs().all(|(from, to)| from.bytes == to.bytes)
            && pairs().any(|(from, to)| from.address == to.address)
    }

    fn finish(&mut self, parts: u32, blocks: u32) {
        (self.parts, self.blocks) = (parts, blocks);
        self.in_place = self.swaps(self.group.size()).into();
    }
}

/// What a rank sends itself, or receives from itself.
fn own(rank: u32, points: &[Point], direction: Direction) -> impl Iterator<Item = &Point> {
    let is_own = move |point: &&Point| point.peer == rank && point.direction == direction && point.bytes > 0;
    points.iter().filter(is_own)
}

/// Refuses what is wrong with the points of a group by themselves, whatever other ranks call.
pub fn check(rank: u32, size: u32, points: &[Point]) -> Result<()> {
    for point in points {
        if point.peer >= size {
            fail!(InvalidArgument, "a transfer with rank {} of {size}", point.peer);
        }
    }
    let bytes = |direction| own(rank, points, direction).map(|point| point.bytes);
    if bytes(Direction::Send).ne(bytes(Direction::Receive)) {
        fail!(InvalidUsage, "rank {rank} sends to itself what it does not receive in the same group");
    }
    Ok(())
}

/// How transfers are cut: the same on both sides.
struct Limits {
    narrow: u64,
    wide: u64,
    line_part: u64,
    tile_part: u64,
    line_parts: u32,
    tile_parts: u32,
    /// Of a block that send, and as many that receive.
    warps: u32,
    size: u32,
    /// How many peers, or the rank itself, have blocks of their own.
    classes: u32,
    /// The most blocks of this rank's launch that wait for peers, or, of a call with a limit, that it has.
    blocks: u32,
    limited: bool,
}

impl Limits {
    fn new(table: &Table, size: u32, Blocks { most, for_each_peer }: Blocks) -> Limits {
        let (tuning, cut) = (table.tuning(size), table.cut(size, most != 0));
        let bounds = tuning.moves;
        // What is told of whole blocks.
        let part_of = |bytes: u64| (bytes * u64::from(cut.warps) / u64::from(MOVE_WARPS)).max(64);
        Limits {
            narrow: bounds.narrow.min(NARROW_ROOM * u64::from(cut.line_parts)),
            wide: bounds.wide.min(wide_room(tuning.wide) * u64::from(cut.line_parts)),
            // A part goes by whichever lines the transfer does, and there is so much room for it.
            line_part: part_of(tuning.line_part).min(NARROW_ROOM).min(wide_room(tuning.wide)),
            tile_part: part_of(tuning.tile_part),
            line_parts: cut.line_parts,
            tile_parts: cut.tile_parts,
            warps: cut.warps,
            size,
            classes: if most == 0 || for_each_peer { size } else { size.min(most) },
            blocks: if most == 0 { table.blocks * (MOVE_WARPS / cut.warps) } else { most.min(table.blocks) },
            limited: most != 0,
        }
    }

    /// Into how many parts the kernels cut a transfer: `part` of `kernels/exchange_move.cuh`.
    fn parts_of(&self, bytes: u64) -> u32 {
        let (part, most) = match bytes <= self.wide.max(self.narrow) {
            true => (self.line_part, self.line_parts),
            false => (self.tile_part, self.tile_parts),
        };
        bytes.div_ceil(part).min(most.into()) as u32
    }

    /// A launch whose lists end so.
    fn round(&self, group: Group, ends: [u32; LISTS]) -> Round {
        let grid = Grid { blocks: 0, threads: 64 * self.warps, shared: 0, overlaps: false };
        Round { grid, arguments: Arguments::of(self, group, ends) }
    }

    /// The parameter of a launch that moves nothing yet.
    fn of<const ROOM: usize>(&self, group: Group, ends: [u32; LISTS]) -> Move<ROOM> {
        Move {
            group,
            narrow: self.narrow,
            wide: self.wide,
            line_part: self.line_part,
            tile_part: self.tile_part,
            line_parts: self.line_parts,
            tile_parts: self.tile_parts,
            parts: 0,
            in_place: 0,
            classes: self.classes,
            blocks: 0,
            ends,
            transfers: [Transfer::default(); ROOM],
        }
    }

    /// Each peer has as many blocks, and the rank itself: one for each part, or so few that each has as many
    /// parts as others. Blocks that wait are never more than run side by side.
    fn finish(&self, Round { grid, arguments }: &mut Round) {
        let (parts, ends) = (grid.blocks, arguments.ends());
        let has_any = |turn: &usize| ends[2 * turn + 1] as usize > begin_of(ends, 2 * turn);
        let peers = (0..self.size as usize - 1).filter(has_any).count() as u32;
        // What this rank sends itself waits for nobody.
        let sharing = if self.limited { self.classes } else { peers.max(1) };
        let most = (self.blocks / sharing).clamp(1, parts);
        let blocks = parts.div_ceil(parts.div_ceil(most));
        grid.blocks = blocks * self.classes;
        match arguments {
            Arguments::Few(few) => few.finish(parts, blocks),
            Arguments::Many(many) => many.finish(parts, blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::{DataType, Operator};

    fn group(rank: u32, size: usize) -> Group {
        Group::new(rank, &vec![4096; size], 0, &Table::default())
    }

    fn point(direction: Direction, peer: u32, bytes: u64) -> Point {
        Point { direction, peer, address: 1 << 20, bytes }
    }

    const FREE: Blocks = Blocks { most: 0, for_each_peer: true };

    /// How many are sent to others, come from others, and are copied.
    fn counts(round: &Round) -> (u32, u32, u32) {
        let ends = round.arguments.ends();
        let count = |list: usize| ends[list] - begin_of(ends, list) as u32;
        let size = match &round.arguments {
            Arguments::Few(few) => few.group.size(),
            Arguments::Many(many) => many.group.size(),
        };
        let turns = || 0..size as usize - 1;
        (
            turns().map(|t| count(2 * t)).sum(),
            turns().map(|t| count(2 * t + 1)).sum(),
            count(2 * size as usize - 1),
        )
    }

    /// What has room in one launch is one. Where a rank has more, each of its launches waits for those of the
    /// same number, or for the only one, of every other rank.
    #[test]
    fn launches_take_as_many_transfers_of_each_pair_on_both_sides() {
        let of = |rank, points: &[Point]| {
            let rounds = rounds(&Table::default(), &group(rank, 4), points, FREE).expect("points");
            rounds.iter().map(counts).collect::<Vec<_>>()
        };
        let sends = |peer, count: u64| (0..count).map(move |i| point(Direction::Send, peer, i + 1));
        let receives = |peer, count: u64| (0..count).map(move |i| point(Direction::Receive, peer, i + 1));
        let all: Vec<Point> = sends(1, 120).chain(receives(1, 120)).collect();
        assert_eq!(of(0, &all), [(120, 120, 0)]);
        let more: Vec<Point> = sends(1, 31).chain(receives(2, 210)).collect();
        assert_eq!(of(0, &more)[..2], [(30, 30, 0), (1, 30, 0)]);
        assert_eq!(of(0, &more).len(), 7);
    }

    /// Blocks that wait for peers are as many as run side by side, two kernels' beside each other; where there
    /// are fewer than parts, each has as many.
    #[test]
    fn launches_have_blocks_for_the_peers_that_they_have() {
        let blocks = |size: usize, peers: u32, blocks| {
            let points: Vec<Point> = (1..=peers).map(|peer| point(Direction::Send, peer, 1 << 30)).collect();
            let rounds = rounds(&Table::default(), &group(0, size), &points, blocks).expect("points");
            (rounds[0].grid.blocks, rounds[0].grid.threads)
        };
        assert_eq!([1, 2, 3].map(|peers| blocks(4, peers, FREE)), [(256, 128); 3]);
        assert_eq!(
            [1, 4, 5, 7].map(|peers| blocks(8, peers, FREE)),
            [512, 512, 256, 256].map(|all| (all, 128))
        );
        assert_eq!(blocks(2, 1, FREE), (128, 256));
        // What all call alike keeps to a limit, and messages have a block for each peer.
        let alike = |most| Blocks { most, for_each_peer: false };
        assert_eq!([1, 5, 64].map(|most| blocks(8, 7, alike(most)).0), [1, 5, 64]);
        let messages = |most| Blocks { most, for_each_peer: true };
        assert_eq!([1, 5, 64, 1000].map(|most| blocks(8, 7, messages(most)).0), [8, 8, 64, 128]);
        assert_eq!(blocks(8, 7, messages(64)).1, 256);
    }

    #[test]
    fn what_a_rank_sends_itself_is_copied() {
        let own = [
            point(Direction::Send, 0, 5),
            Point { address: 64, ..point(Direction::Receive, 0, 5) },
            point(Direction::Send, 1, 0),
        ];
        let planned = rounds(&Table::default(), &group(0, 2), &own, FREE).expect("points");
        assert_eq!(planned.iter().map(counts).collect::<Vec<_>>(), [(0, 0, 1)]);
        let alone = [point(Direction::Send, 0, 5)];
        assert!(rounds(&Table::default(), &group(0, 2), &alone, FREE).is_err());
        let stranger = [point(Direction::Send, 2, 5)];
        assert!(rounds(&Table::default(), &group(0, 2), &stranger, FREE).is_err());
    }

    #[test]
    fn a_broadcast_is_a_send_to_the_other_and_a_copy_where_there_is_room() {
        let job = |output| Job {
            kind: Kind::Broadcast,
            input: 64,
            output,
            count: 8,
            dtype: DataType::U8,
            operator: Operator::Sum,
            root: 1,
            max_blocks: 0,
        };
        let of = |rank, output| {
            let points = of_job(&job(output), rank, 2, 8);
            let planned = rounds(&Table::default(), &group(rank, 2), &points, FREE).expect("points");
            planned.iter().map(counts).collect::<Vec<_>>()
        };
        assert_eq!(
            [of(0, 128), of(1, 128), of(1, 64), of(1, 0)].concat(),
            [(0, 1, 0), (1, 0, 1), (1, 0, 0), (1, 0, 0)]
        );
    }

    #[test]
    fn what_goes_where_its_answer_comes_from_is_sent_first() {
        let swap = |address, bytes| {
            let to = Point { address, bytes, ..point(Direction::Receive, 1, 0) };
            let rounds = rounds(&Table::default(), &group(0, 2), &[point(Direction::Send, 1, 8), to], FREE);
            let Arguments::Few(few) = rounds.expect("points")[0].arguments else { panic!("two transfers") };
            few.in_place
        };
        assert_eq!([swap(1 << 20, 8), swap(1 << 21, 8), swap(1 << 20, 9)], [1, 0, 0]);
    }

    /// Whatever a table says of parts: a slot of lines has room for each.
    #[test]
    fn parts_that_go_by_lines_fit_their_slots() {
        for line_part in [128, 1 << 10, 4 << 10, 8 << 10, 1 << 30] {
            for (size, max_blocks) in [(2, 0), (4, 0), (8, 0), (8, 8)] {
                let mut table = Table::default();
                table.tunings.iter_mut().for_each(|tuning| tuning.line_part = line_part);
                let tuning = *table.tuning(size);
                let limits = Limits::new(&table, size, Blocks { most: max_blocks, for_each_peer: true });
                for bytes in (1..=limits.wide.max(limits.narrow)).step_by(61) {
                    let share = bytes.div_ceil(limits.parts_of(bytes).into()).next_multiple_of(64);
                    let room = if bytes <= limits.narrow { NARROW_ROOM } else { wide_room(tuning.wide) };
                    assert!(share <= room, "{bytes} of {size} with parts from {line_part} on: {share}");
                }
            }
        }
    }

    #[test]
    fn parameters_fit_a_launch() {
        assert!(size_of::<Move<MANY>>() <= 4096);
    }
}
