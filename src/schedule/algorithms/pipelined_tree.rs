//! Pipelined trees, for vectors in many chunks: every rank has two children at most, so no rank moves the
//! vector more than twice each way, however many ranks there are; the chunks follow one another through about
//! `2 log2 n` rounds.
//!
//! A reduction runs over the canonical tree itself. It has one inner node less than it has leaves, and the
//! node where the ranks are parted before rank `q` is given to rank `q`: every rank but 0 combines at one
//! node. Canonical.

use crate::schedule::algorithms::representation_of;
use crate::schedule::builder::Builder;
use crate::schedule::collective::Shape;
use crate::schedule::ir::{Buffer, Rank, Representation, Span};

/// Up the tree, then down the same one.
pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    let node = (shape.rank > 0).then(|| Node::of_rank(shape.rank, shape.size));
    let leaf_parent = leaf_parent(shape.rank, shape.size);
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        if leaf_parent != shape.rank {
            b.send(leaf_parent, input);
        }
        let Some(node) = &node else {
            b.receive(leaf_parent, output);
            continue;
        };
        combine(b, node, input, output);
        if let Some(parent) = node.parent {
            b.receive(parent, output);
        }
        for (first, end) in [(node.first, node.split), (node.split, node.end)] {
            // A leaf's rank gets the result at its own node; rank 0 has none.
            if end - first > 1 || first == 0 {
                b.send(holder(first, end), output);
            }
        }
    }
}

/// From the root down a binary tree over ranks relabelled from the root on.
pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    let label = shape.behind(root);
    let rank = |label: u32| ((u64::from(label) + u64::from(root)) % u64::from(shape.size)) as Rank;
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        let have = if label == 0 { input } else { output };
        if label > 0 {
            b.receive(rank((label - 1) / 2), output);
        }
        for child in [2 * label + 1, 2 * label + 2] {
            if child < shape.size {
                b.send(rank(child), have);
            }
        }
        if label == 0 {
            b.copy(input, output);
        }
    }
}

/// Combines at a node of this rank, and passes the sum on; the top keeps it.
fn combine(b: &mut Builder, node: &Node, input: Span, output: Span) {
    let (left, right) = (node.left(), node.right());
    let right_wire = representation_of(node.end - node.split);
    let left_wire = representation_of(node.split - node.first);
    let into = if node.parent.is_none() { output } else { b.partial(input.len) };
    if right == node.split {
        b.receive_reduce_left(left, left_wire, input, into);
    } else {
        // This rank's own input is a leaf further down, so both operands come from others. The left one has
        // as many ranks as the right one or more: both are sums.
        debug_assert_eq!((left_wire, right_wire), (Representation::Accumulator, Representation::Accumulator));
        let operand = b.partial(input.len);
        b.receive(left, operand);
        b.receive_reduce_right(right, right_wire, operand, into);
    }
    if let Some(parent) = node.parent {
        b.send(parent, into);
    }
}

/// An inner node of the canonical tree: the ranks `first..end`, parted before `split`, which is the rank it
/// is given to.
struct Node {
    first: Rank,
    split: Rank,
    end: Rank,
    parent: Option<Rank>,
}

impl Node {
    fn top(size: u32) -> Node {
        Node::over(0, size, None)
    }

    fn over(first: Rank, end: Rank, parent: Option<Rank>) -> Node {
        Node { first, split: first + (end - first).next_power_of_two() / 2, end, parent }
    }

    /// The node given to a rank other than 0.
    fn of_rank(rank: Rank, size: u32) -> Node {
        let mut node = Node::top(size);
        while node.split != rank {
            node = if rank < node.split {
                Node::over(node.first, node.split, Some(node.split))
            } else {
                Node::over(node.split, node.end, Some(node.split))
            };
        }
        node
    }

    /// Who has the left operand.
    fn left(&self) -> Rank {
        holder(self.first, self.split)
    }

    /// Who has the right operand.
    fn right(&self) -> Rank {
        holder(self.split, self.end)
    }
}

/// Who has the sum of the ranks `first..end`, a subtree.
fn holder(first: Rank, end: Rank) -> Rank {
    if end - first == 1 { first } else { Node::over(first, end, None).split }
}

/// The rank whose node takes a rank's own input.
fn leaf_parent(rank: Rank, size: u32) -> Rank {
    let mut node = Node::top(size);
    loop {
        let (first, end) = if rank < node.split { (node.first, node.split) } else { (node.split, node.end) };
        if end - first == 1 {
            return node.split;
        }
        node = Node::over(first, end, None);
    }
}
