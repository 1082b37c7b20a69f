//! What each rank copies and combines of a piece. The same cut on every rank; nothing here touches memory.

#![forbid(unsafe_code)]

use super::super::cut::Cut;
use crate::engine::direct::{Mark, shard};
use crate::signature::Kind;

/// Bytes of a lane that hold what its owner contributes to a piece.
pub(super) const INPUT_BYTES: usize = 4 * 1024 * 1024;

/// Where in a lane its owner's share of the result begins, and what of it there is: with two ranks, half of a
/// piece.
pub(super) const RESULT_AT: usize = INPUT_BYTES;
const RESULT_BYTES: usize = INPUT_BYTES / 2 + 4096;

/// Bytes of a lane.
pub(super) const LANE_BYTES: usize = INPUT_BYTES + RESULT_BYTES;

/// Lanes of a rank: so many pieces are under way. Each takes several steps, between which the host looks at
/// it.
pub(super) const RELAY_LANES: u64 = 4;

/// The smallest piece. With smaller ones the host's looks take longer than the copies: 1 MiB over TCP takes
/// 87 µs in two pieces, 118 in four.
const SMALLEST: usize = 512 * 1024;

/// Where nothing is combined, calls have more pieces, if these are not smaller than so: the network is idle
/// until the first has come from its device and when the last goes to others. Two H100s over TCP, a broadcast
/// of 16 MiB in eighths and in quarters, medians of seven and eight runs: 692 and 815 µs, on a stream 977
/// and 1095. What is combined takes as long or longer so.
const SMALL_MOVED: usize = 1024 * 1024;

/// The longest allreduce of two ranks that each combines whole. Above, the folds of shares are the shorter
/// ones. (A reduce has only the root's.)
const MOST_WHOLE: usize = 8 * 1024 * 1024;

/// How long pieces are, and which calls are relayed at all.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes of a piece that a rank contributes.
    pub piece: usize,
    /// Shorter calls are exchanged by the host: a rank contributes more than this. `None`: as is quickest.
    pub above: Option<usize>,
}

impl Limits {
    /// Those of a group of two ranks between which there are messages alone.
    pub fn between_two(self, kind: Kind) -> Limits {
        // Two H200s as two hosts, on a stream, relayed and staged, three rounds in turn, µs: a reduction to
        // one of 128 and 192 KiB 51 to 52 and 35 to 37, 54 to 56 and 53 to 67; a reduce_scatter of 128 and
        // 192 KiB 60 to 62 and 56, 64 and 67 to 70; a broadcast of 96 and 128 KiB 32 and 27 to 28, 33 to 34
        // and 35 to 42; an allreduce of 80 and 112 KiB 62 to 64 and 59, 64 to 66 and 70 to 72; an allgather
        // of 32 and 40 KiB of each 40 and 38 to 40, 38 to 41 and 42 to 43.
        let above = match kind {
            Kind::Reduce | Kind::ReduceScatter => 128 * 1024,
            Kind::Broadcast => 96 * 1024,
            Kind::Allreduce => 80 * 1024,
            Kind::Allgather => 32 * 1024,
            _ => ABOVE,
        };
        Limits { above: self.above.or(Some(above)), ..self }
    }
}

/// Among others shorter calls than these are not relayed.
const ABOVE: usize = 64 * 1024;

impl Default for Limits {
    fn default() -> Limits {
        Limits { piece: INPUT_BYTES, above: None }
    }
}

/// A call as one rank sees it.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    kind: Kind,
    rank: usize,
    size: usize,
    root: usize,
    /// Elements of a block.
    count: usize,
    /// Bytes of an element.
    element: usize,
    in_place: bool,
    cut: Cut,
}

/// Bytes from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    /// Where in what is read.
    pub(super) from: usize,
    /// Where in what is written.
    pub(super) to: usize,
    pub(super) bytes: usize,
}

/// What this rank combines of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Where in its own input.
    pub(super) own: usize,
    /// Where in the others' lanes.
    pub(super) lane: usize,
    /// Where the result goes in its output; `None`: to its lane, for the root.
    pub(super) output: Option<usize>,
    /// Whether others need it.
    pub(super) shared: bool,
    /// Elements.
    pub(super) count: usize,
}

impl Route {
    /// The route of `rank` of `size`: blocks of `count` elements. `None` when the call is none that is
    /// relayed; the same answer on every rank.
    #[allow(clippy::too_many_arguments)] // All of what a call is.
    pub fn new(
        kind: Kind,
        rank: u32,
        size: u32,
        root: u32,
        count: u64,
        element: usize,
        in_place: bool,
        limits: Limits,
    ) -> Option<Route> {
        let blocks = match kind {
            Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall => size as usize,
            Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Allgather | Kind::Gather => 1,
            _ => return None,
        };
        let count = usize::try_from(count).ok()?;
        let bytes = count.checked_mul(element)?.checked_mul(blocks)?;
        if bytes <= limits.above.unwrap_or(ABOVE) {
            return None;
        }
        // So many pieces that all lanes are in use, if they are not too small for it.
        let quarter = bytes / RELAY_LANES as usize;
        let piece = if kind.reduces() { quarter } else { quarter.min((bytes / 8).max(SMALL_MOVED)) };
        let piece = piece.clamp(SMALLEST.min(limits.piece), limits.piece);
        let cut = Cut::even(count as u64, blocks as u64, element, piece);
        let (rank, size, root) = (rank as usize, size as usize, root as usize);
        let route = Route { kind, rank, size, root, count, element, in_place, cut };
        let (_, largest) = route.span(0);
        let (_, share) = shard(largest as u64, 0, size);
        (largest * element * blocks <= INPUT_BYTES && share as usize * element <= RESULT_BYTES)
            .then_some(route)
    }

    /// How many pieces.
    pub(super) fn pieces(&self) -> u64 {
        u64::from(self.cut.pieces())
    }

    pub(super) fn element(&self) -> usize {
        self.element
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Whether the ranks combine what they contribute.
    pub(super) fn reduces(&self) -> bool {
        self.kind.reduces()
    }

    /// First element of every block in a piece, and how many.
    fn span(&self, index: u64) -> (usize, usize) {
        // PROOF: pieces are counted in 32 bits.
        let piece = self.cut.piece(u32::try_from(index).unwrap_or(u32::MAX));
        if piece.whole { (0, self.count) } else { (piece.start as usize, piece.len as usize) }
    }

    fn shard(&self, len: usize, member: usize) -> (usize, usize) {
        let (start, len) = shard(len as u64, member, self.size);
        (start as usize, len as usize)
    }

    fn moved(&self, from: usize, to: usize, elements: usize) -> Move {
        Move { from: from * self.element, to: to * self.element, bytes: elements * self.element }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.size);
        // Everybody begins with another one, so that not all read from the same rank at once.
        (1..size).map(move |step| (rank + step) % size)
    }

    /// Those whose contributions this rank reads.
    pub(super) fn contributors(&self) -> impl Iterator<Item = usize> + use<> {
        let is_root = self.rank == self.root;
        let (all, root) = match self.kind {
            Kind::Broadcast | Kind::Scatter => (false, !is_root),
            Kind::Gather => (is_root, false),
            Kind::Reduce => (self.combines(), false),
            _ => (true, false),
        };
        self.others().filter(move |_| all).chain(root.then_some(self.root))
    }

    /// Whether who needs the result combines all of it, and nobody gives a share of it to others: between
    /// two, no more bytes travel so, in half the steps.
    fn is_whole(&self) -> bool {
        let bytes = self.count * self.element;
        self.size == 2 && (self.kind == Kind::Reduce || self.kind == Kind::Allreduce && bytes <= MOST_WHOLE)
    }

    /// Whether this rank combines anything.
    fn combines(&self) -> bool {
        self.kind.reduces() && (self.rank == self.root || self.kind != Kind::Reduce || !self.is_whole())
    }

    /// Those whose shares of the result this rank reads.
    pub(super) fn sharers(&self) -> impl Iterator<Item = usize> + use<> {
        let all = match self.kind {
            Kind::Allreduce => !self.is_whole(),
            Kind::Reduce => !self.is_whole() && self.rank == self.root,
            _ => false,
        };
        self.others().filter(move |_| all)
    }

    /// What `reader` reads of this rank's lane once this rank has come so far: where it begins, and its
    /// bytes. `None`: it does not wait for it.
    pub(super) fn read_by(&self, reader: usize, mark: Mark, index: u64) -> Option<(usize, usize)> {
        let (_, len) = self.span(index);
        let (is_root, to_root) = (self.rank == self.root, reader == self.root);
        let (first, count) = match (mark, self.kind) {
            (Mark::Done, _) => (0, 0),
            (Mark::Folded, _) if self.is_whole() => return None,
            (Mark::Folded, Kind::Allreduce) => (0, self.shard(len, self.rank).1),
            (Mark::Folded, Kind::Reduce) if to_root => (0, self.shard(len, self.rank).1),
            (Mark::Folded, _) => return None,
            (Mark::Given, Kind::Broadcast | Kind::Scatter) if !is_root => return None,
            (Mark::Given, Kind::Gather) if !to_root => return None,
            (Mark::Given, Kind::Reduce) if self.is_whole() && !to_root => return None,
            (Mark::Given, Kind::Allreduce | Kind::Reduce) if !self.is_whole() => self.shard(len, reader),
            (Mark::Given, Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall) => (reader * len, len),
            (Mark::Given, _) => (0, len),
        };
        let start = if mark == Mark::Folded { RESULT_AT } else { first * self.element };
        Some((start, count * self.element))
    }

    /// From this rank's input to its lane: what others need.
    pub(super) fn given(&self, index: u64) -> Vec<Move> {
        let (start, len) = self.span(index);
        let is_root = self.rank == self.root;
        let mut moves = match self.kind {
            Kind::Reduce if self.is_whole() && is_root => Vec::new(),
            Kind::Allreduce | Kind::Reduce if self.is_whole() => vec![self.moved(start, 0, len)],
            Kind::Allreduce | Kind::Reduce => {
                let (own, share) = self.shard(len, self.rank);
                let rest = own + share;
                vec![self.moved(start, 0, own), self.moved(start + rest, rest, len - rest)]
            }
            Kind::Scatter if !is_root => Vec::new(),
            Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall => {
                self.others().map(|block| self.moved(block * self.count + start, block * len, len)).collect()
            }
            Kind::Broadcast if !is_root => Vec::new(),
            Kind::Gather if is_root => Vec::new(),
            _ => vec![self.moved(start, 0, len)],
        };
        moves.retain(|found| found.bytes > 0);
        moves
    }

    /// From this rank's input to its output, which nobody else sees.
    pub(super) fn kept(&self, index: u64) -> Option<Move> {
        let (start, len) = self.span(index);
        let (is_root, block) = (self.rank == self.root, self.rank * self.count + start);
        let kept = match self.kind {
            _ if self.in_place || len == 0 => return None,
            Kind::Broadcast if is_root => self.moved(start, start, len),
            Kind::Gather if !is_root => return None,
            Kind::Allgather | Kind::Gather => self.moved(start, block, len),
            Kind::Scatter if is_root => self.moved(block, start, len),
            Kind::Alltoall => self.moved(block, block, len),
            _ => return None,
        };
        Some(kept)
    }

    /// What this rank combines.
    pub(super) fn share(&self, index: u64) -> Option<Share> {
        let (start, len) = self.span(index);
        let bytes = |elements| elements * self.element;
        if self.kind == Kind::ReduceScatter {
            let own = bytes(self.rank * self.count + start);
            let lane = bytes(self.rank * len);
            return Some(Share { own, lane, output: Some(bytes(start)), shared: false, count: len });
        }
        if !self.combines() {
            return None;
        }
        if self.is_whole() {
            let own = bytes(start);
            return Some(Share { own, lane: 0, output: Some(own), shared: false, count: len });
        }
        let (first, count) = self.shard(len, self.rank);
        let own = bytes(start + first);
        let (output, shared) = match self.kind {
            _ if count == 0 => return None,
            Kind::Allreduce => (Some(own), true),
            Kind::Reduce if self.rank == self.root => (Some(own), false),
            Kind::Reduce => (None, true),
            _ => return None,
        };
        Some(Share { own, lane: bytes(first), output, shared, count })
    }

    /// From others' lanes to this rank's output, each with its owner: contributions, or where the ranks
    /// combine, shares of the result.
    pub(super) fn taken(&self, index: u64) -> Vec<(usize, Move)> {
        let (start, len) = self.span(index);
        let is_root = self.rank == self.root;
        let mut moves: Vec<(usize, Move)> = match self.kind {
            Kind::Reduce | Kind::Gather if !is_root => Vec::new(),
            Kind::Broadcast | Kind::Scatter if is_root => Vec::new(),
            _ if self.is_whole() => Vec::new(),
            Kind::Allreduce | Kind::Reduce => {
                let share = |member| {
                    let (first, count) = self.shard(len, member);
                    let Move { to, bytes, .. } = self.moved(0, start + first, count);
                    (member, Move { from: RESULT_AT, to, bytes })
                };
                self.others().map(share).collect()
            }
            Kind::Broadcast => vec![(self.root, self.moved(0, start, len))],
            Kind::Scatter => vec![(self.root, self.moved(self.rank * len, start, len))],
            Kind::Allgather | Kind::Gather => {
                self.others().map(|from| (from, self.moved(0, from * self.count + start, len))).collect()
            }
            Kind::Alltoall => {
                let block = |from| (from, self.moved(self.rank * len, from * self.count + start, len));
                self.others().map(block).collect()
            }
            _ => Vec::new(),
        };
        moves.retain(|(_, found)| found.bytes > 0);
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out when every rank does what its route says, over bytes. `None` where nothing was written.
    fn play(kind: Kind, size: u32, root: u32, count: usize, limits: Limits) -> Vec<Vec<Option<u32>>> {
        let all = count * size as usize;
        let is_root = |rank: u32| rank == root;
        let reads = |rank| match kind {
            Kind::Scatter | Kind::Broadcast if !is_root(rank) => 0,
            Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall => all,
            _ => count,
        };
        let writes = |rank| match kind {
            Kind::Reduce | Kind::Gather if !is_root(rank) => 0,
            Kind::Allgather | Kind::Gather | Kind::Alltoall => all,
            _ => count,
        };
        let routes: Vec<Route> = (0..size)
            .map(|rank| Route::new(kind, rank, size, root, count as u64, 1, false, limits).expect("relayed"))
            .collect();
        let input = |rank: usize, at: usize| 1000 * (rank as u32 + 1) + at as u32;
        let mut outputs: Vec<Vec<Option<u32>>> = (0..size).map(|rank| vec![None; writes(rank)]).collect();
        let mut put = |rank: usize, at: usize, value: u32| {
            assert_eq!(outputs[rank][at].replace(value), None, "{kind:?}: rank {rank}, {at} twice");
        };
        for index in 0..routes[0].pieces() {
            let mut lanes = vec![std::collections::HashMap::new(); size as usize];
            for (rank, route) in routes.iter().enumerate() {
                for Move { from, to, bytes } in route.given(index) {
                    assert!(from + bytes <= reads(rank as u32) && to + bytes <= RESULT_AT);
                    lanes[rank].extend((0..bytes).map(|at| (to + at, input(rank, from + at))));
                }
                if let Some(Move { from, to, bytes }) = route.kept(index) {
                    (0..bytes).for_each(|at| put(rank, to + at, input(rank, from + at)));
                }
            }
            let mut results = Vec::new();
            for (rank, route) in routes.iter().enumerate() {
                let Some(share) = route.share(index) else { continue };
                for at in 0..share.count {
                    let operand = |from: usize| match from == rank {
                        true => input(rank, share.own + at),
                        false => lanes[from][&(share.lane + at)],
                    };
                    let sum = (0..size as usize).map(operand).sum();
                    if let Some(output) = share.output {
                        put(rank, output + at, sum);
                    }
                    if share.shared {
                        results.push((rank, RESULT_AT + at, sum));
                    }
                }
            }
            results.into_iter().for_each(|(rank, at, sum)| assert_eq!(lanes[rank].insert(at, sum), None));
            for (rank, route) in routes.iter().enumerate() {
                for (from, found) in route.taken(index) {
                    let Move { from: at, to, bytes } = found;
                    (0..bytes).for_each(|byte| put(rank, to + byte, lanes[from][&(at + byte)]));
                }
            }
        }
        outputs
    }

    #[test]
    fn every_rank_obtains_what_is_its() {
        let limits = Limits { piece: 256, above: Some(0) };
        for (size, root, count) in [(2, 0, 1), (2, 1, 1000), (3, 2, 701), (5, 1, 64), (4, 0, 513)] {
            let at = |rank: u32, index: usize| 1000 * (rank + 1) + index as u32;
            let sum = |index: usize| (0..size).map(|rank| at(rank, index)).sum::<u32>();
            let others = [Kind::Barrier, Kind::SparseAllreduce];
            let kinds = Kind::ALL.into_iter().filter(|kind| !kind.point_to_point() && !others.contains(kind));
            for kind in kinds {
                let found = play(kind, size, root, count, limits);
                for (rank, output) in (0..size).zip(found) {
                    let due = |index: usize| {
                        let (block, within) = ((index / count) as u32, index % count);
                        let own = rank as usize * count + within;
                        match kind {
                            Kind::Allreduce | Kind::Reduce => sum(index),
                            Kind::ReduceScatter => sum(own),
                            Kind::Broadcast => at(root, index),
                            Kind::Scatter => at(root, own),
                            Kind::Allgather | Kind::Gather => at(block, within),
                            _ => at(block, own),
                        }
                    };
                    let due: Vec<_> = (0..output.len()).map(|index| Some(due(index))).collect();
                    assert!(output == due, "{kind:?} of {count}, rank {rank} of {size}");
                }
            }
        }
    }

    #[test]
    fn what_two_ranks_relay_is_what_takes_them_longer_staged() {
        let relayed = |kind, limits: Limits, kib: u64| {
            Route::new(kind, 0, 2, 0, kib << 10, 1, false, limits.between_two(kind)).is_some()
        };
        let own = Limits::default();
        for (kind, kib) in
            [(Kind::Reduce, 128), (Kind::Broadcast, 96), (Kind::Allgather, 32), (Kind::Gather, 64)]
        {
            assert!(!relayed(kind, own, kib) && relayed(kind, own, kib + 1), "{kind:?}");
        }
        // Of two blocks.
        assert!(!relayed(Kind::ReduceScatter, own, 64) && relayed(Kind::ReduceScatter, own, 65));
        assert!(relayed(Kind::Reduce, Limits { above: Some(0), ..own }, 1));
    }

    #[test]
    fn pieces_fit_their_lanes_or_the_call_is_not_relayed() {
        let limits = Limits::default();
        let route = |kind, size, count, element| Route::new(kind, 0, size, 0, count, element, false, limits);
        assert!(route(Kind::Allreduce, 2, 16 * 1024, 4).is_none(), "short");
        assert!(route(Kind::Barrier, 2, 1 << 20, 4).is_none());
        for (count, pieces) in [(16 * 1024 + 1, 1), (1 << 18, 2), (1 << 24, 16), (1 << 26, 64)] {
            let route = route(Kind::Allreduce, 2, count, 4).expect("relayed");
            assert_eq!(route.pieces(), pieces, "{count}");
        }
        for (kind, pieces) in [(Kind::Allreduce, 4), (Kind::Broadcast, 8)] {
            assert_eq!(route(kind, 2, 1 << 22, 4).expect("relayed").pieces(), pieces, "{kind:?} of 16 MiB");
        }
        assert!(route(Kind::Alltoall, 64, u64::MAX / 1024, 8).is_none(), "longer than memory");
    }
}
