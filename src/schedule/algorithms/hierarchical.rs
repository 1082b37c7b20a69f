//! Hierarchical composition: inside the nodes, across them, inside again. What crosses between nodes is the
//! least there is, and all ranks of a node carry it.

use std::ops::Range;

use crate::schedule::algorithms::binomial;
use crate::schedule::algorithms::representation_of;
use crate::schedule::builder::Builder;
use crate::schedule::collective::{Shape, split};
use crate::schedule::ir::{Buffer, Rank, Representation, Span};

/// Inside a node each rank folds its shard of the node's inputs; the ranks of all nodes with the same shard
/// do a two-shot with the nodes' sums; then each node gathers. Four rounds; `c` elements in and out of a
/// node, twice, split evenly among its ranks.
///
/// The order is the tree over nodes of the trees inside of the nodes. That is the canonical tree if a node
/// has a power of two ranks (the last node may have any number), or if there is one node; otherwise it is NOT
/// canonical.
pub(in crate::schedule) fn allreduce(b: &mut Builder, shape: &Shape, count: u64) {
    let nodes = Nodes::new(shape);
    let node = nodes.of(shape.rank);
    // All nodes use the shards of a full one. In a short node a rank may own several.
    let shards = nodes.each;
    let piece_of = |shard: u32, index: u64| shape.piece(split(count, shards, shard), index);
    // Who comes next, so that the members do not all turn to the same owner.
    let distance = |owner: Rank| (owner + nodes.size - shape.rank) % nodes.size;
    for index in 0..shape.most_pieces(count, shards) {
        let pieces = |own: bool| {
            let is_owned = |shard: &u32| (nodes.owner(node, *shard) == shape.rank) == own;
            // By owner, and what two ranks exchange in the order of the shards.
            let place = |shard| (distance(nodes.owner(node, shard)) as usize, shard as usize);
            let mut places: Vec<_> = (0..shards).filter(is_owned).map(place).collect();
            places.sort_unstable();
            let piece = |shard| Some((nodes.owner(node, shard), shard, piece_of(shard, index)?));
            let pieces = places.into_iter().filter_map(|(_, shard)| piece(shard as u32));
            pieces.collect::<Vec<_>>()
        };
        for (owner, _, piece) in pieces(false) {
            b.send(owner, Span::of(Buffer::Input, piece));
        }
        for (_, shard, piece) in pieces(true) {
            reduce_owned(b, shape.rank, &nodes, shard, piece);
        }
        for (owner, _, piece) in pieces(false) {
            b.receive(owner, Span::of(Buffer::Output, piece));
        }
    }
}

/// How many others a rank has to do with in an allreduce: those of its node, and of each other node the owners
/// of its shards. The second one is for the last node: if that is short, a rank may have several shards.
pub(in crate::schedule) fn peers(shape: &Shape) -> (u32, u32) {
    let nodes = Nodes::new(shape);
    let peers = |members: u32| members - 1 + nodes.each.div_ceil(members) * (nodes.count - 1);
    (peers(nodes.each), peers(nodes.members(nodes.count - 1).len() as u32))
}

/// The owner of the shard in a node brings a piece through all four rounds.
fn reduce_owned(b: &mut Builder, owner: Rank, nodes: &Nodes, shard: u32, piece: Range<u64>) {
    let node = nodes.of(owner);
    let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
    let members = nodes.members(node);
    let mut operands = vec![input; members.len()];
    for member in members.clone().filter(|&member| member != owner) {
        let raw = b.scratch(input.len);
        b.receive(member, raw);
        operands[(member - members.start) as usize] = raw;
    }
    if nodes.count == 1 {
        b.fold(&operands, output);
    } else {
        let sum = if operands.len() == 1 {
            input
        } else {
            let sum = b.partial(input.len);
            b.fold(&operands, sum);
            sum
        };
        across(b, nodes, node, shard, sum, output);
    }
    let behind = members.clone().filter(|&member| member > owner);
    for member in behind.chain(members.start..owner) {
        b.send(member, output);
    }
}

/// A two-shot among the owners of a shard: each folds its part of the nodes' sums and sends it to the others.
fn across(b: &mut Builder, nodes: &Nodes, node: u32, shard: u32, sum: Span, output: Span) {
    let part = |span: Span, node: u32| {
        let range = split(span.len, nodes.count, node);
        span.part(range.start, range.end - range.start)
    };
    let others = |start: u32| (1..nodes.count).map(move |distance| (start + distance) % nodes.count);
    for other in others(node) {
        b.send(nodes.owner(other, shard), part(sum, other));
    }
    let own = part(sum, node);
    let mut operands = vec![own; nodes.count as usize];
    for other in others(node) {
        let operand = match representation_of(nodes.members(other).len() as u32) {
            Representation::Element => b.scratch(own.len),
            Representation::Accumulator => b.partial(own.len),
        };
        b.receive(nodes.owner(other, shard), operand);
        operands[other as usize] = operand;
    }
    b.fold(&operands, part(output, node));
    for other in others(node) {
        b.send(nodes.owner(other, shard), part(output, node));
    }
    for other in others(node) {
        b.receive(nodes.owner(other, shard), part(output, other));
    }
}

/// A binomial tree over the nodes' leaders, then one inside of each node. The vector enters each node once.
/// The root leads its node, the first rank each other one.
pub(in crate::schedule) fn broadcast(b: &mut Builder, shape: &Shape, count: u64, root: Rank) {
    let nodes = Nodes::new(shape);
    let node = nodes.of(shape.rank);
    let leader = |node: u32| if node == nodes.of(root) { root } else { nodes.members(node).start };
    let across: Vec<Rank> = (0..nodes.count).map(leader).collect();
    let inside: Vec<Rank> = nodes.members(node).collect();
    for piece in shape.pieces(0..count) {
        let (input, output) = (Span::of(Buffer::Input, piece.clone()), Span::of(Buffer::Output, piece));
        let source = if shape.rank == root { input } else { output };
        if shape.rank == leader(node) {
            binomial::broadcast_among(b, shape.rank, &across, root, source, output);
        }
        binomial::broadcast_among(b, shape.rank, &inside, leader(node), source, output);
        if shape.rank == root {
            b.copy(input, output);
        }
    }
}

/// Runs of ranks, one for each node.
struct Nodes {
    size: u32,
    /// Ranks of a full node.
    each: u32,
    count: u32,
}

impl Nodes {
    fn new(shape: &Shape) -> Nodes {
        let each = shape.ranks_per_node.clamp(1, shape.size);
        Nodes { size: shape.size, each, count: shape.size.div_ceil(each) }
    }

    fn of(&self, rank: Rank) -> u32 {
        rank / self.each
    }

    fn members(&self, node: u32) -> Range<Rank> {
        node * self.each..((node + 1) * self.each).min(self.size)
    }

    fn owner(&self, node: u32, shard: u32) -> Rank {
        let members = self.members(node);
        members.start + shard % members.len() as u32
    }
}
