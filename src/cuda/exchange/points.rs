//! Transfers between pairs of ranks, as the kernels that move take them.
#![forbid(unsafe_code)]

use std::ffi::c_void;

use super::Job;
use super::arena::MAX_RANKS;
use super::arguments::{Copy, Group, Move, Transfer};
use super::plan::{NARROW_ROOM, wide_room};
use super::table::Table;
use crate::cuda::driver::Grid;
use crate::error::{Result, fail};
use crate::signature::Kind;

/// Transfers each way for each peer in one launch: `MANY` of the kernels.
pub(super) const MANY: usize = 14;
/// Threads of a block: `MOVE_THREADS` of the kernels.
const THREADS: u32 = 256;
/// Warps of a block that send, and as many that receive: `MOVE_WARPS` of the kernels.
pub(super) const MOVE_WARPS: u32 = THREADS / 64;

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
    Few(Move<1>),
    Many(Box<Move<MANY>>),
}

impl Arguments {
    /// The transfers of a direction with the peer of a slot, and how many there are.
    fn transfers(&mut self, direction: Direction, slot: usize) -> (&mut [Transfer], &mut u32) {
        match self {
            Arguments::Few(few) => few.transfers(direction, slot),
            Arguments::Many(many) => many.transfers(direction, slot),
        }
    }

    fn copies(&mut self) -> (&mut [Copy], &mut u32) {
        match self {
            Arguments::Few(few) => (&mut few.copy, &mut few.copies),
            Arguments::Many(many) => (&mut many.copy, &mut many.copies),
        }
    }
}

impl<const MANY: usize> Move<MANY> {
    fn transfers(&mut self, direction: Direction, slot: usize) -> (&mut [Transfer], &mut u32) {
        match direction {
            Direction::Send => (&mut self.send[slot], &mut self.sends[slot]),
            Direction::Receive => (&mut self.receive[slot], &mut self.receives[slot]),
        }
    }
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

/// The launches that move the points. The i-th of them takes transfers i·MANY and following of every pair and
/// direction, so that on both sides of a pair the same launch has them, and no launch waits for another.
pub(super) fn rounds(table: &Table, group: &Group, points: &[Point], max_blocks: u32) -> Result<Vec<Round>> {
    let (rank, size) = (group.rank(), group.size());
    let mut counts = Counts::default();
    let mut any_own = false;
    check(rank, size, points)?;
    for point in points {
        match point.peer == rank {
            true => any_own = true,
            false if point.bytes > 0 => drop(counts.next(point.direction, point.peer)),
            false => {}
        }
    }
    let copies = if any_own { copies(rank, points) } else { Vec::new() };

    let limits = Limits::new(table, size, max_blocks);
    let mut left = counts.most.max(copies.len());
    let mut rounds = Vec::with_capacity(left.div_ceil(MANY));
    while left > 0 {
        let arguments = match left {
            1 => Arguments::Few(limits.nothing(*group)),
            _ => Arguments::Many(Box::new(limits.nothing(*group))),
        };
        rounds.push(Round {
            grid: Grid { blocks: 1, threads: THREADS, shared: 0, overlaps: false },
            arguments,
        });
        left = left.saturating_sub(MANY);
    }
    let mut filled = Counts::default();
    for point in points.iter().filter(|point| point.bytes > 0 && point.peer != rank) {
        let at = filled.next(point.direction, point.peer);
        let Round { grid, arguments } = &mut rounds[at / MANY];
        // The kernels begin with the peer after them.
        let slot = (point.peer + size - rank - 1) % size;
        let (transfers, count) = arguments.transfers(point.direction, slot as usize);
        transfers[at % MANY] = Transfer { address: point.address, bytes: point.bytes };
        *count += 1;
        grid.blocks = grid.blocks.max(limits.parts_of(point.bytes));
    }
    for (at, copy) in copies.into_iter().enumerate() {
        let Round { grid, arguments } = &mut rounds[at / MANY];
        let (copies, count) = arguments.copies();
        copies[at % MANY] = copy;
        *count += 1;
        grid.blocks = grid.blocks.max(limits.parts_of(copy.bytes));
    }
    for Round { grid, arguments } in &mut rounds {
        // A class of blocks for each peer, and one for the copies, or fewer.
        grid.blocks *= limits.classes;
        match arguments {
            Arguments::Few(few) => few.in_place = swaps(few).into(),
            Arguments::Many(many) => many.in_place = swaps(many).into(),
        }
    }
    Ok(rounds)
}

/// How many transfers there are, by direction and peer.
#[derive(Default)]
struct Counts {
    each: [[usize; MAX_RANKS]; 2],
    most: usize,
}

impl Counts {
    /// One more; how many there were.
    fn next(&mut self, direction: Direction, peer: u32) -> usize {
        let count = &mut self.each[direction as usize][peer as usize];
        *count += 1;
        self.most = self.most.max(*count);
        *count - 1
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

/// What a rank sends itself, each send with the receive of its turn.
fn copies(rank: u32, points: &[Point]) -> Vec<Copy> {
    let (sends, receives) = (own(rank, points, Direction::Send), own(rank, points, Direction::Receive));
    let pairs = sends.zip(receives).filter(|(from, to)| from.address != to.address);
    pairs.map(|(from, to)| Copy { from: from.address, to: to.address, bytes: from.bytes }).collect()
}

/// How transfers are cut: the same on both sides.
struct Limits {
    narrow: u64,
    wide: u64,
    line_part: u64,
    tile_part: u64,
    parts: u32,
    /// How many peers, or the copies, have blocks of their own.
    classes: u32,
}

impl Limits {
    fn new(table: &Table, size: u32, max_blocks: u32) -> Limits {
        let tuning = table.tuning(size);
        // Every peer and the copies have as many blocks, if there are enough.
        let (classes, most) = match max_blocks {
            0 => (size, tuning.parts),
            _ => (size.min(max_blocks), tuning.parts.min(max_blocks / size)),
        };
        let parts = most.clamp(1, table.blocks);
        let bounds = tuning.moves;
        Limits {
            narrow: bounds.narrow.min(NARROW_ROOM * u64::from(parts)),
            wide: bounds.wide.min(wide_room(tuning.wide) * u64::from(parts)),
            // A part goes by whichever lines the transfer does, and there is so much room for it.
            line_part: tuning.line_part.min(NARROW_ROOM).min(wide_room(tuning.wide)),
            tile_part: tuning.tile_part,
            parts,
            classes,
        }
    }

    /// Into how many parts the kernels cut a transfer: `parts_of` of `kernels/exchange_move.cuh`.
    fn parts_of(&self, bytes: u64) -> u32 {
        let part = if bytes <= self.wide.max(self.narrow) { self.line_part } else { self.tile_part };
        bytes.div_ceil(part).min(self.parts.into()) as u32
    }

    /// The parameter of a launch that moves nothing yet.
    fn nothing<const MANY: usize>(&self, group: Group) -> Move<MANY> {
        Move {
            group,
            narrow: self.narrow,
            wide: self.wide,
            line_part: self.line_part,
            tile_part: self.tile_part,
            parts: self.parts,
            copies: 0,
            in_place: 0,
            classes: self.classes,
            sends: [0; MAX_RANKS],
            receives: [0; MAX_RANKS],
            send: [[Transfer::default(); MANY]; MAX_RANKS - 1],
            receive: [[Transfer::default(); MANY]; MAX_RANKS - 1],
            copy: [Copy::default(); MANY],
        }
    }
}

/// Whether every pair sends as much as it receives, transfer by transfer, and some receive goes where its
/// send lies.
fn swaps<const MANY: usize>(arguments: &Move<MANY>) -> bool {
    let Move { sends, receives, send, receive, .. } = arguments;
    let pairs = || send.iter().flatten().zip(receive.iter().flatten());
    sends == receives
        && pairs().all(|(from, to)| from.bytes == to.bytes)
        && pairs().any(|(from, to)| from.bytes > 0 && from.address == to.address)
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

    fn counts(round: &Round) -> (u32, u32, u32) {
        match &round.arguments {
            Arguments::Few(few) => (few.sends.iter().sum(), few.receives.iter().sum(), few.copies),
            Arguments::Many(many) => (many.sends.iter().sum(), many.receives.iter().sum(), many.copies),
        }
    }

    #[test]
    fn rounds_take_as_many_transfers_of_each_pair_on_both_sides() {
        let many: Vec<Point> = (0..30).map(|i| point(Direction::Send, 1, i + 1)).collect();
        let mirrored: Vec<Point> =
            many.iter().map(|p| Point { direction: Direction::Receive, peer: 0, ..*p }).collect();
        let table = Table::default();
        let sends = rounds(&table, &group(0, 2), &many, 0).expect("points");
        let receives = rounds(&table, &group(1, 2), &mirrored, 0).expect("points");
        let sent: Vec<u32> = sends.iter().map(|round| counts(round).0).collect();
        let received: Vec<u32> = receives.iter().map(|round| counts(round).1).collect();
        assert_eq!(sent, received);
        assert_eq!(sent.iter().sum::<u32>(), 30);
    }

    #[test]
    fn what_a_rank_sends_itself_is_copied() {
        let own = [
            point(Direction::Send, 0, 5),
            Point { address: 64, ..point(Direction::Receive, 0, 5) },
            point(Direction::Send, 1, 0),
        ];
        let planned = rounds(&Table::default(), &group(0, 2), &own, 0).expect("points");
        assert_eq!(planned.iter().map(counts).collect::<Vec<_>>(), [(0, 0, 1)]);
        let alone = [point(Direction::Send, 0, 5)];
        assert!(rounds(&Table::default(), &group(0, 2), &alone, 0).is_err());
        let stranger = [point(Direction::Send, 2, 5)];
        assert!(rounds(&Table::default(), &group(0, 2), &stranger, 0).is_err());
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
            let planned = rounds(&Table::default(), &group(rank, 2), &points, 0).expect("points");
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
            let rounds = rounds(&Table::default(), &group(0, 2), &[point(Direction::Send, 1, 8), to], 0);
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
                let limits = Limits::new(&table, size, max_blocks);
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
