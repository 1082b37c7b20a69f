//! Binomial trees. `ceil(log2 n)` rounds; whoever is nearest the root moves the vector that many times.
//!
//! A reduction runs over the canonical tree itself: the blocks are aligned runs of ranks, and of two
//! neighbouring blocks the leader of one sends the block's sum to the leader of the other. A block is led by
//! the root if that is a member, by its first rank otherwise. So the sum ends at any root without a detour,
//! and the order is canonical.
//!
//! What only moves data (broadcast, gather, scatter) runs over ranks relabelled from the root on.

use crate::schedule::algorithms::{input_blocks, output_blocks, representation_of};
use crate::schedule::builder::{Builder, StepIndex};
use crate::schedule::collective::{Blocks, Shape};
use crate::schedule::ir::{Buffer, Rank, Span};

/// Reduce to rank 0, then broadcast from there: twice the rounds, `2 c` elements through most ranks.
pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        reduce_piece(b, shape, 0, input, output);
        broadcast_piece(b, shape, 0, |rank| rank, output, output);
    }
}

pub(in crate::schedule) fn reduce(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        reduce_piece(b, shape, root, input, output);
    }
}

pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        broadcast_piece(b, shape, root, |rank| rank, input, output);
        if shape.rank == root {
            b.copy(input, output);
        }
    }
}

/// Every inner rank collects the blocks of its subtree, which are neighbours, and sends them in one message.
/// Everything but the root's own block crosses up to `log2 n` links.
pub(in crate::schedule) fn gather(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let tree = Tree::new(shape, root);
    let own = Span::new(Buffer::Input, 0, counts[shape.rank as usize]);
    if tree.label == 0 {
        let output = output_blocks(counts);
        for (child, subtree) in tree.children() {
            for span in tree.spans(&output, subtree) {
                b.receive(child, span);
            }
        }
        b.copy(own, output.of(root));
        return;
    }
    let subtree = tree.subtree_len();
    let collected = if subtree == 1 {
        own
    } else {
        let blocks = tree.staged(b, counts, subtree);
        b.copy(own, blocks[0]);
        for (child, range) in tree.children() {
            b.receive(child, tree.within(&blocks, range));
        }
        tree.within(&blocks, tree.label..tree.label + subtree)
    };
    for span in tree.as_root_cuts(counts, collected) {
        b.send(tree.parent(), span);
    }
}

/// Every inner rank hears from its subtree and tells its parent. When the steps that it gives back have
/// ended, the root has heard of all.
pub(in crate::schedule) fn collect(b: &mut Builder, shape: &Shape, root: Rank) -> Vec<StepIndex> {
    let tree = Tree::new(shape, root);
    let heard: Vec<_> = tree.children().map(|(child, _)| b.await_signal(child)).collect();
    if tree.label != 0 {
        b.fence(heard.iter().copied());
        b.signal(tree.parent());
        b.fence([]);
    }
    heard
}

/// The mirror image of gather.
pub(in crate::schedule) fn scatter(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let tree = Tree::new(shape, root);
    let own = Span::new(Buffer::Output, 0, counts[shape.rank as usize]);
    if tree.label == 0 {
        let input = input_blocks(counts);
        for (child, subtree) in tree.children() {
            for span in tree.spans(&input, subtree) {
                b.send(child, span);
            }
        }
        b.copy(input.of(root), own);
        return;
    }
    let subtree = tree.subtree_len();
    if subtree == 1 {
        b.receive(tree.parent(), own);
        return;
    }
    let blocks = tree.staged(b, counts, subtree);
    for span in tree.as_root_cuts(counts, tree.within(&blocks, tree.label..tree.label + subtree)) {
        b.receive(tree.parent(), span);
    }
    for (child, range) in tree.children() {
        b.send(child, tree.within(&blocks, range));
    }
    b.copy(blocks[0], own);
}

/// What comes before a scatter of lists: who has nothing to pass on to a child, whose subtree has empty
/// blocks alone, sends a message that says so. So every rank has a first message from its parent whichever of
/// the two has it empty, and the lists are compared on every edge of the tree.
pub(in crate::schedule) fn empty_subtrees(b: &mut Builder, shape: &Shape, counts: &[u64], root: Rank) {
    let tree = Tree::new(shape, root);
    let is_empty =
        |mut labels: std::ops::Range<u32>| labels.all(|label| counts[tree.rank(label) as usize] == 0);
    if tree.label != 0 && is_empty(tree.label..tree.label + tree.subtree_len()) {
        b.await_signal(tree.parent());
    }
    for (child, subtree) in tree.children() {
        if is_empty(subtree) {
            b.signal(child);
        }
    }
}

/// The sum of all, from `input` of each rank into `output` of the root.
fn reduce_piece(b: &mut Builder, shape: &Shape, root: Rank, input: Span, output: Span) {
    let (rank, size) = (shape.rank, shape.size);
    let mut sum = input;
    let mut half = 1;
    while half < size {
        let left = rank / (2 * half) * (2 * half);
        let right = left + half;
        if right < size {
            let end = size.min(right + half);
            let leader = |first: Rank, end: Rank| if (first..end).contains(&root) { root } else { first };
            let (left_leader, right_leader) = (leader(left, right), leader(right, end));
            let receiver = leader(left, end);
            let sender = if receiver == left_leader { right_leader } else { left_leader };
            if rank == sender {
                b.send(receiver, sum);
                return;
            }
            let into = if 2 * half >= size {
                output
            } else if sum == input {
                b.partial(input.len)
            } else {
                sum
            };
            if sender == right_leader {
                b.receive_reduce_right(sender, representation_of(end - right), sum, into);
            } else {
                b.receive_reduce_left(sender, representation_of(half), sum, into);
            }
            sum = into;
        }
        half *= 2;
    }
}

/// From `source` of the root into `output` of the other members. `rank` and `root` are members.
pub(in crate::schedule) fn broadcast_among(
    b: &mut Builder,
    rank: Rank,
    members: &[Rank],
    root: Rank,
    source: Span,
    output: Span,
) {
    let place = |rank: Rank| members.iter().take_while(|&&member| member != rank).count() as u32;
    let shape = Shape::new(place(rank), members.len() as u32);
    broadcast_piece(b, &shape, place(root), |place| members[place as usize], source, output);
}

/// From `source` of the root into `output` of all others; `rank_at` names the ranks to the transport.
fn broadcast_piece(
    b: &mut Builder,
    shape: &Shape,
    root: Rank,
    rank_at: impl Fn(Rank) -> Rank,
    source: Span,
    output: Span,
) {
    let tree = Tree::new(shape, root);
    let have = if tree.label == 0 {
        source
    } else {
        b.receive(rank_at(tree.parent()), output);
        output
    };
    // The largest subtree first: it has the longest way.
    for (child, _) in tree.children().rev() {
        b.send(rank_at(child), have);
    }
}

/// The binomial tree over labels, the distances from the root: the parent of a label is the label without its
/// lowest bit, so a subtree is a run of labels.
struct Tree {
    root: Rank,
    size: u32,
    label: u32,
}

impl Tree {
    fn new(shape: &Shape, root: Rank) -> Tree {
        Tree { root, size: shape.size, label: shape.behind(root) }
    }

    fn rank(&self, label: u32) -> Rank {
        ((u64::from(label) + u64::from(self.root)) % u64::from(self.size)) as Rank
    }

    fn parent(&self) -> Rank {
        self.rank(self.label & (self.label - 1))
    }

    fn subtree_len(&self) -> u32 {
        if self.label == 0 {
            self.size
        } else {
            (1 << self.label.trailing_zeros()).min(self.size - self.label)
        }
    }

    /// The children and the labels of their subtrees, smallest first.
    fn children(&self) -> impl DoubleEndedIterator<Item = (Rank, std::ops::Range<u32>)> + use<'_> {
        let levels = u32::BITS - (self.subtree_len() - 1).leading_zeros();
        (0..levels).map(|level| {
            let first = self.label + (1 << level);
            (self.rank(first), first..(first + (1 << level)).min(self.size))
        })
    }

    /// Where the blocks of a run of labels lie among blocks in order of rank: in one piece, or in two where
    /// the labels pass the last rank.
    fn spans(&self, blocks: &Blocks, labels: std::ops::Range<u32>) -> Vec<Span> {
        let wrap = self.size - self.root;
        let before = labels.start.min(wrap)..labels.end.min(wrap);
        let behind = labels.start.max(wrap)..labels.end.max(wrap);
        [
            blocks.range(before.start + self.root, before.end + self.root),
            blocks.range(behind.start - wrap, behind.end - wrap),
        ]
        .into_iter()
        .filter(|span| span.len > 0)
        .collect()
    }

    /// Fresh elements for the blocks of this rank's subtree, in order of label.
    fn staged(&self, b: &mut Builder, counts: &[u64], subtree: u32) -> Vec<Span> {
        (self.label..self.label + subtree).map(|label| b.scratch(counts[self.rank(label) as usize])).collect()
    }

    /// A run of labels within the staged blocks of the subtree.
    fn within(&self, blocks: &[Span], labels: std::ops::Range<u32>) -> Span {
        let blocks = &blocks[(labels.start - self.label) as usize..(labels.end - self.label) as usize];
        Span::of(Buffer::Scratch, blocks[0].start..blocks[blocks.len() - 1].end())
    }

    /// The subtree's blocks as the messages that this rank and its parent exchange: cut where the root has to
    /// cut.
    fn as_root_cuts(&self, counts: &[u64], whole: Span) -> Vec<Span> {
        if self.parent() != self.root {
            return vec![whole];
        }
        let subtree = self.label..self.label + self.subtree_len();
        let mut offset = 0;
        self.spans(&output_blocks(counts), subtree)
            .into_iter()
            .map(|span| {
                offset += span.len;
                whole.part(offset - span.len, span.len)
            })
            .collect()
    }
}
