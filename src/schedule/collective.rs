//! What is asked for: the operation as one rank sees it, and the group that it runs in.

use std::ops::Range;

use crate::error::{Result, fail};
use crate::schedule::ir::{Buffer, Rank, Span};

/// No address space holds more elements; so sums of counts, and counts times ranks, cannot overflow.
const MAX_ELEMENTS: u64 = 1 << 46;
/// The most ranks that a schedule is for.
const MAX_RANKS: u32 = 1 << 16;
/// The most pieces that pipelining cuts one span into, whatever the chunk: schedules stay small.
pub(super) const MAX_PIECES: u64 = 4096;

/// A collective as one rank calls it. All counts are in elements and may be zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// `Input[count]` of all ranks combined, in `Output[count]` of all.
    Allreduce {
        /// Elements of each rank.
        count: u64,
    },
    /// As allreduce; only the root has an Output.
    Reduce {
        /// Elements of each rank.
        count: u64,
        /// Who gets the result.
        root: Rank,
    },
    /// `Input[count]` of the root, in `Output[count]` of all, the root too unless its Output is its Input.
    Broadcast {
        /// Elements.
        count: u64,
        /// Who has the input.
        root: Rank,
    },
    /// `Input[counts[rank]]` of each rank, one behind the other in `Output` of all.
    Allgather {
        /// Elements of each rank, the same list on all.
        counts: Vec<u64>,
    },
    /// As allgather; only the root has an Output.
    Gather {
        /// Elements of each rank. The same list on all where blocks are passed on together (binomial); else
        /// others than the root may have anything for others.
        counts: Vec<u64>,
        /// Who gets the result.
        root: Rank,
    },
    /// The root's Input holds a block for each rank, one behind the other; each gets its own in
    /// `Output[counts[rank]]`.
    Scatter {
        /// Elements of each rank, as for a gather.
        counts: Vec<u64>,
        /// Who has the input.
        root: Rank,
    },
    /// Every Input holds a block for each rank; each gets the combination of all its blocks in
    /// `Output[counts[rank]]`.
    ReduceScatter {
        /// Elements of each rank, the same list on all.
        counts: Vec<u64>,
    },
    /// Input holds a block for each rank, Output a block from each, one behind the other.
    Alltoall {
        /// Elements that this rank sends to each.
        send_counts: Vec<u64>,
        /// Elements that this rank receives from each.
        recv_counts: Vec<u64>,
    },
    /// Nobody leaves before all have entered.
    Barrier,
}

/// Which collective, without its counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Kind {
    Allreduce,
    Reduce,
    Broadcast,
    Allgather,
    Gather,
    Scatter,
    ReduceScatter,
    Alltoall,
    Barrier,
}

/// The group, this rank's place in it, and the options of planning. `size`, `chunk`, `ranks_per_node` and
/// `portion` are the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// This rank.
    pub rank: Rank,
    /// How many ranks.
    pub size: u32,
    /// In place: `Output[i]` is the same memory as `Input[i + alias]`. Each collective has one legal value,
    /// [`Collective::in_place_alias`].
    pub alias: Option<i64>,
    /// The most elements that a pipelining algorithm moves in one piece; 0 for whole spans.
    pub chunk: u64,
    /// Ranks are numbered node by node, this many to a node; the last may have fewer. Hierarchical algorithms
    /// ask.
    pub ranks_per_node: u32,
    /// Whether the ranks tell each other what they have called before anybody's Output is written.
    pub agreement: Agreement,
    /// The most elements of a message that is a block, or a part of one, on its way from its rank to another;
    /// 0 for whole blocks. Algorithms ask that send blocks directly.
    pub portion: u64,
}

/// What a rank of an operation that only moves data (allgather, gather, alltoall) hears of the others' calls
/// before it writes its Output. Their blocks say it too, but some blocks come before others. In a reduction
/// no final result exists before all have agreed, and a broadcast or scatter gives a rank nothing but the
/// root's; these do not ask, but a scatter of a list that may differ from rank to rank: there who has nothing
/// to send to a rank says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Agreement {
    /// Nothing but their blocks. The same on all ranks.
    #[default]
    Unsaid,
    /// The ranks tell each other, and this rank writes its Output when it likes. Others may wait.
    Told,
    /// The ranks tell each other, and this rank writes its Output when it has heard from all. Others need not
    /// wait.
    Awaited,
}

impl Collective {
    /// Which it is.
    pub fn kind(&self) -> Kind {
        match self {
            Collective::Allreduce { .. } => Kind::Allreduce,
            Collective::Reduce { .. } => Kind::Reduce,
            Collective::Broadcast { .. } => Kind::Broadcast,
            Collective::Allgather { .. } => Kind::Allgather,
            Collective::Gather { .. } => Kind::Gather,
            Collective::Scatter { .. } => Kind::Scatter,
            Collective::ReduceScatter { .. } => Kind::ReduceScatter,
            Collective::Alltoall { .. } => Kind::Alltoall,
            Collective::Barrier => Kind::Barrier,
        }
    }

    /// Elements of this rank's Input.
    pub fn input_len(&self, rank: Rank) -> u64 {
        match self {
            Collective::Allreduce { count } | Collective::Reduce { count, .. } => *count,
            Collective::Broadcast { count, root } => only_if(rank == *root, *count),
            Collective::Allgather { counts } | Collective::Gather { counts, .. } => counts[rank as usize],
            Collective::Scatter { counts, root } => only_if(rank == *root, total(counts)),
            Collective::ReduceScatter { counts } => total(counts),
            Collective::Alltoall { send_counts, .. } => total(send_counts),
            Collective::Barrier => 0,
        }
    }

    /// Elements of this rank's Output.
    pub fn output_len(&self, rank: Rank) -> u64 {
        match self {
            Collective::Allreduce { count } | Collective::Broadcast { count, .. } => *count,
            Collective::Reduce { count, root } => only_if(rank == *root, *count),
            Collective::Allgather { counts } => total(counts),
            Collective::Gather { counts, root } => only_if(rank == *root, total(counts)),
            Collective::Scatter { counts, .. } | Collective::ReduceScatter { counts } => {
                counts[rank as usize]
            }
            Collective::Alltoall { recv_counts, .. } => total(recv_counts),
            Collective::Barrier => 0,
        }
    }

    /// Elements that a rank has for another where blocks go directly.
    pub fn sends(&self, rank: Rank, to: Rank) -> u64 {
        match self {
            Collective::Gather { counts, root } => only_if(to == *root, counts[rank as usize]),
            Collective::Scatter { counts, root } => only_if(rank == *root, counts[to as usize]),
            Collective::Alltoall { send_counts, .. } => send_counts[to as usize],
            _ => 0,
        }
    }

    /// Elements that a rank obtains from another where blocks go directly.
    pub fn receives(&self, rank: Rank, from: Rank) -> u64 {
        match self {
            Collective::Gather { counts, root } => only_if(rank == *root, counts[from as usize]),
            Collective::Scatter { counts, root } => only_if(from == *root, counts[rank as usize]),
            Collective::Alltoall { recv_counts, .. } => recv_counts[from as usize],
            _ => 0,
        }
    }

    /// The alias of an in-place call of this rank: a block that stays on its rank is where it belongs
    /// already.
    pub fn in_place_alias(&self, rank: Rank) -> i64 {
        match self {
            Collective::Allgather { counts } => -(displacement(counts, rank) as i64),
            Collective::Gather { counts, root } if rank == *root => -(displacement(counts, rank) as i64),
            Collective::ReduceScatter { counts } => displacement(counts, rank) as i64,
            Collective::Scatter { counts, root } if rank == *root => displacement(counts, rank) as i64,
            _ => 0,
        }
    }

    /// Refuses what no algorithm could do in this group.
    pub fn check(&self, shape: &Shape) -> Result<()> {
        let Shape { rank, size, .. } = *shape;
        if size == 0 || size > MAX_RANKS {
            fail!(InvalidArgument, "a group has 1 to {MAX_RANKS} ranks, not {size}");
        }
        if rank >= size {
            fail!(InvalidArgument, "rank {rank} is outside of the group; its ranks are 0 to {}", size - 1);
        }
        match self {
            Collective::Allreduce { count } => check_counts("count", &[*count])?,
            Collective::Reduce { count, root } | Collective::Broadcast { count, root } => {
                check_counts("count", &[*count])?;
                check_root(*root, size)?;
            }
            Collective::Allgather { counts } | Collective::ReduceScatter { counts } => {
                check_block_counts("counts", counts, size)?;
            }
            Collective::Gather { counts, root } | Collective::Scatter { counts, root } => {
                check_root(*root, size)?;
                check_blocks("counts", counts, size)?;
                // What others have is for the root to know.
                let own = rank as usize..=rank as usize;
                check_counts("counts", if rank == *root { counts } else { &counts[own] })?;
            }
            Collective::Alltoall { send_counts, recv_counts } => {
                check_block_counts("send_counts", send_counts, size)?;
                check_block_counts("recv_counts", recv_counts, size)?;
                let (own_sent, own_received) = (send_counts[rank as usize], recv_counts[rank as usize]);
                if own_sent != own_received {
                    fail!(
                        InvalidArgument,
                        "rank {rank} sends {own_sent} elements to itself, but receives {own_received}"
                    );
                }
                if shape.alias.is_some() && send_counts != recv_counts {
                    fail!(InvalidArgument, "alltoall in place needs send_counts and recv_counts to be equal");
                }
            }
            Collective::Barrier => {}
        }
        let legal = self.in_place_alias(rank);
        if let Some(alias) = shape.alias
            && alias != legal
        {
            fail!(
                InvalidArgument,
                "input and output overlap: output starts {alias} elements behind input; \
                 in place it starts {legal} elements behind, otherwise the two lie apart"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
impl Collective {
    /// With so many elements for each rank; of one vector as many as for the first.
    pub(crate) fn of(kind: Kind, counts: Vec<u64>, root: Rank) -> Collective {
        let count = counts[0];
        match kind {
            Kind::Allreduce => Collective::Allreduce { count },
            Kind::Reduce => Collective::Reduce { count, root },
            Kind::Broadcast => Collective::Broadcast { count, root },
            Kind::Allgather => Collective::Allgather { counts },
            Kind::Gather => Collective::Gather { counts, root },
            Kind::Scatter => Collective::Scatter { counts, root },
            Kind::ReduceScatter => Collective::ReduceScatter { counts },
            Kind::Alltoall => Collective::Alltoall { send_counts: counts.clone(), recv_counts: counts },
            Kind::Barrier => Collective::Barrier,
        }
    }
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Allreduce,
        Kind::Reduce,
        Kind::Broadcast,
        Kind::Allgather,
        Kind::Gather,
        Kind::Scatter,
        Kind::ReduceScatter,
        Kind::Alltoall,
        Kind::Barrier,
    ];

    /// The name that errors and tables use.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Allreduce => "allreduce",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::Allgather => "allgather",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Alltoall => "alltoall",
            Kind::Barrier => "barrier",
        }
    }
}

impl Shape {
    /// A group on one node, out of place, without pipelining.
    pub fn new(rank: Rank, size: u32) -> Shape {
        let agreement = Agreement::Unsaid;
        Shape { rank, size, alias: None, chunk: 0, ranks_per_node: size, agreement, portion: 0 }
    }

    /// The rank `distance` ahead, round the group.
    pub(super) fn ahead(&self, distance: u32) -> Rank {
        ((u64::from(self.rank) + u64::from(distance)) % u64::from(self.size)) as Rank
    }

    /// The rank `distance` behind, round the group.
    pub(super) fn behind(&self, distance: u32) -> Rank {
        self.ahead(self.size - distance % self.size)
    }

    /// Cuts `range` into pieces of at most `chunk` elements; none when it is empty.
    pub(super) fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        pieces(range, self.chunk)
    }

    /// What a block is sent in. Depends on its length alone, which is all that both of its ranks know.
    pub(super) fn portions(&self, block: Span) -> impl Iterator<Item = Span> + use<> {
        // Doubled, they begin where other portions do: at addresses that are as even.
        let doubled = block.len.div_ceil(self.portion.max(1) * MAX_PIECES).next_power_of_two();
        pieces(0..block.len, self.portion * doubled)
            .map(move |portion| block.part(portion.start, portion.end - portion.start))
    }

    /// The most [`Shape::pieces`] that one of `parts` parts of `count` elements has. The longest need not
    /// have them: where there would be too many, it has fewer and larger ones.
    pub(super) fn most_pieces(&self, count: u64, parts: u32) -> u64 {
        // They have two lengths at most.
        let ends = [0, parts - 1].map(|part| self.pieces(split(count, parts, part)).count() as u64);
        ends[0].max(ends[1])
    }

    /// One of the [`Shape::pieces`]; none behind the last.
    pub(super) fn piece(&self, range: Range<u64>, index: u64) -> Option<Range<u64>> {
        piece(range, self.chunk, index)
    }
}

/// Part `part` of `count` elements in `parts` parts; the sizes differ by at most one, the larger parts come
/// first.
pub(super) fn split(count: u64, parts: u32, part: u32) -> Range<u64> {
    let (parts, part) = (u64::from(parts), u64::from(part));
    let (each, larger) = (count / parts, count % parts);
    let start = part * each + part.min(larger);
    start..start + each + u64::from(part < larger)
}

/// Cuts `range` into pieces of at most `chunk` elements (0: one piece), or into [`MAX_PIECES`] larger ones.
/// Depends on the length alone, so that both ends of a message cut alike.
pub(super) fn pieces(range: Range<u64>, chunk: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    (0..MAX_PIECES).map_while(move |index| piece(range.clone(), chunk, index))
}

/// One of the [`pieces`]; none behind the last.
pub(super) fn piece(range: Range<u64>, chunk: u64, index: u64) -> Option<Range<u64>> {
    let len = range.end - range.start;
    let chunk = if chunk == 0 { len } else { chunk };
    let chunk = chunk.max(len.div_ceil(MAX_PIECES)).clamp(1, len.max(1));
    let start = range.start + index.checked_mul(chunk)?;
    (start < range.end).then(|| start..(start + chunk).min(range.end))
}

/// Where the blocks lie: block `i` is `starts[i]..starts[i + 1]`.
pub(super) fn displacements(counts: &[u64]) -> Vec<u64> {
    let mut starts = Vec::with_capacity(counts.len() + 1);
    let mut start = 0;
    starts.push(start);
    for count in counts {
        start += count;
        starts.push(start);
    }
    starts
}

/// Blocks in one buffer, one behind the other.
pub(super) struct Blocks {
    buffer: Buffer,
    starts: Vec<u64>,
}

impl Blocks {
    /// A block for each count, from the start of the buffer on.
    pub(super) fn new(buffer: Buffer, counts: &[u64]) -> Blocks {
        Blocks { buffer, starts: displacements(counts) }
    }

    /// A block for each count, from the start of `whole` on.
    pub(super) fn within(whole: Span, counts: &[u64]) -> Blocks {
        let mut blocks = Blocks::new(whole.buffer, counts);
        blocks.starts.iter_mut().for_each(|start| *start += whole.start);
        blocks
    }

    /// One block.
    pub(super) fn of(&self, rank: Rank) -> Span {
        self.range(rank, rank + 1)
    }

    /// The blocks `first..end`, which lie together.
    pub(super) fn range(&self, first: Rank, end: Rank) -> Span {
        Span::of(self.buffer, self.starts[first as usize]..self.starts[end as usize])
    }
}

/// The elements of all blocks; `u64::MAX` where they are more than that.
pub fn total(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
}

fn displacement(counts: &[u64], rank: Rank) -> u64 {
    total(&counts[..rank as usize])
}

fn only_if(has: bool, len: u64) -> u64 {
    if has { len } else { 0 }
}

fn check_root(root: Rank, size: u32) -> Result<()> {
    if root >= size {
        fail!(InvalidArgument, "root {root} is outside of the group; its ranks are 0 to {}", size - 1);
    }
    Ok(())
}

pub(super) fn check_block_counts(name: &str, counts: &[u64], size: u32) -> Result<()> {
    check_blocks(name, counts, size)?;
    check_counts(name, counts)
}

fn check_blocks(name: &str, counts: &[u64], size: u32) -> Result<()> {
    if counts.len() != size as usize {
        fail!(InvalidArgument, "{name} has {} entries for {size} ranks", counts.len());
    }
    Ok(())
}

fn check_counts(name: &str, counts: &[u64]) -> Result<()> {
    let total = counts.iter().try_fold(0u64, |sum, &count| sum.checked_add(count));
    match total {
        Some(total) if total <= MAX_ELEMENTS => Ok(()),
        Some(total) => fail!(InvalidArgument, "{name} asks for {total} elements; the most is {MAX_ELEMENTS}"),
        None => {
            fail!(InvalidArgument, "{name} adds up to more than 2^64 elements; the most is {MAX_ELEMENTS}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_put_the_larger_parts_first_and_leave_nothing_out() {
        for (count, parts) in [(0, 3), (2, 3), (10, 4), (1 << 33, 7)] {
            let ranges: Vec<_> = (0..parts).map(|part| split(count, parts, part)).collect();
            assert_eq!(ranges[0].start, 0);
            assert_eq!(ranges[parts as usize - 1].end, count);
            for pair in ranges.windows(2) {
                assert_eq!(pair[0].end, pair[1].start);
                assert!(pair[0].end - pair[0].start >= pair[1].end - pair[1].start);
            }
        }
        assert_eq!(split(10, 4, 1), 3..6);
    }

    #[test]
    fn pieces_cover_a_range_once_and_stay_few() {
        let cut = |range, chunk| pieces(range, chunk).collect::<Vec<_>>();
        assert_eq!(cut(5..5, 2), []);
        assert_eq!(cut(5..7, 0), vec![Range { start: 5, end: 7 }]);
        assert_eq!(cut(5..12, 3), [5..8, 8..11, 11..12]);
        assert_eq!(cut(0..7, u64::MAX), vec![Range { start: 0, end: 7 }]);
        let many = cut(0..1 << 40, 1);
        assert!(many.len() as u64 <= MAX_PIECES);
        assert_eq!(many.last().map(|piece| piece.end), Some(1 << 40));
    }

    #[test]
    fn portions_cover_a_block_once_by_its_length_alone() {
        let portions = |portion, start, len| -> Vec<Span> {
            let shape = Shape { portion, ..Shape::new(0, 2) };
            shape.portions(Span::new(Buffer::Input, start, len)).collect()
        };
        for (portion, len) in
            [(0, 9), (4, 0), (4, 1), (4, 4), (4, 5), (4, 17), (64, 1 << 40), (64, 4097 * 64)]
        {
            let (here, there) = (portions(portion, 0, len), portions(portion, 77, len));
            assert!(here.len() as u64 <= MAX_PIECES);
            assert_eq!(here.iter().map(|part| part.len).sum::<u64>(), len);
            for (index, (here, there)) in here.iter().zip(&there).enumerate() {
                assert_eq!((here.start + 77, here.len), (there.start, there.len));
                assert!(portion == 0 || here.start.is_multiple_of(portion), "{portion} of {len}: {here:?}");
                assert!(index == 0 || here.start == portions(portion, 0, len)[index - 1].end());
            }
        }
        assert_eq!(portions(4, 0, 4).len(), 1);
        assert_eq!(portions(64, 0, 4096 * 64)[0].len, 64);
        assert_eq!(portions(64, 0, 4097 * 64)[0].len, 128);
    }

    #[test]
    fn impossible_calls_are_refused_with_the_argument_named() {
        let refused = |collective: Collective, shape: &Shape| {
            let error = collective.check(shape).expect_err("it is impossible");
            assert_eq!(error.status(), crate::error::Status::InvalidArgument);
            error.text().to_string()
        };
        let shape = Shape::new(1, 4);
        assert!(refused(Collective::Broadcast { count: 1, root: 4 }, &shape).contains("root 4"));
        assert!(
            refused(Collective::Allgather { counts: vec![1; 3] }, &shape).contains("3 entries for 4 ranks")
        );
        assert!(refused(Collective::Allreduce { count: u64::MAX }, &shape).contains("count asks for"));
        assert!(
            refused(Collective::ReduceScatter { counts: vec![u64::MAX, 1, 0, 0] }, &shape)
                .contains("adds up")
        );
        let aliased = Shape { alias: Some(3), ..shape.clone() };
        assert!(refused(Collective::Allreduce { count: 10 }, &aliased).contains("overlap"));
        let uneven = Collective::Alltoall { send_counts: vec![1, 2, 3, 4], recv_counts: vec![4, 2, 3, 4] };
        assert!(refused(uneven, &Shape { alias: Some(0), ..shape }).contains("in place"));
        assert!(refused(Collective::Barrier, &Shape::new(4, 4)).contains("rank 4"));
    }
}
