//! Closed forms: what the busiest rank, and the busiest link of a node, have to do.

use crate::schedule::cost::{Model, Question};
use crate::schedule::{Algorithm, Kind};

/// What bounds a collective's time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Profile {
    /// Messages on the longest path, inside nodes and between them.
    inside_rounds: f64,
    across_rounds: f64,
    /// Steps of the busiest rank.
    steps: f64,
    /// Bytes through the busiest port of a rank.
    port_bytes: f64,
    /// Bytes through the busiest link between nodes.
    link_bytes: f64,
    /// Bytes that pass before the busiest port or link sees its first: the filling of a pipeline.
    fill_bytes: f64,
    /// Bytes of operands that the busiest rank combines.
    combined: f64,
    /// Bytes that it copies.
    copied: f64,
    /// In how many pieces the work comes, so that moving and combining may overlap.
    pieces: f64,
}

impl Profile {
    pub(super) fn time(&self, model: &Model) -> f64 {
        let (inside, across) = (model.inside, model.across);
        let fill_time = if self.link_bytes > 0.0 { across.byte_time } else { inside.byte_time };
        let moving = (self.port_bytes * inside.byte_time).max(self.link_bytes * across.byte_time);
        let computing =
            self.combined * model.combine_time + self.copied * model.copy_time + self.steps * model.step_time;
        self.inside_rounds * inside.latency
            + self.across_rounds * across.latency
            + self.fill_bytes * fill_time
            + moving.max(computing)
            + moving.min(computing) / self.pieces.max(1.0)
    }
}

/// What the algorithm does for the collective; none if it does not serve it.
pub(super) fn profile(algorithm: Algorithm, question: &Question, links: u32) -> Option<Profile> {
    if !algorithm.serves(question.kind) || (algorithm == Algorithm::Local && question.size > 1) {
        return None;
    }
    let group = Group::new(question, links);
    if question.size == 1 {
        return Some(Profile { steps: 1.0, copied: group.bytes, ..Profile::default() });
    }
    Some(group.profile(algorithm, question.kind))
}

/// The numbers that the forms are made of.
struct Group {
    /// Ranks, ranks of a node, nodes.
    n: f64,
    m: f64,
    nodes: f64,
    links: f64,
    /// Levels of a binary tree over all ranks, and over those of a node.
    levels: f64,
    node_levels: f64,
    /// Bytes of the vector, or of the longest block, as elements and as accumulators.
    bytes: f64,
    wide: f64,
    count: f64,
    /// What share of the longest block the blocks have on average. Exactly one where all are alike, or there
    /// are none.
    evenness: f64,
    chunk: f64,
}

/// In vectors: what goes through the busiest port until the sum is there, and from then on; the same through
/// the links of the busiest node.
struct Halving {
    up: f64,
    down: f64,
    up_link: f64,
    down_link: f64,
    /// Of the busiest rank, for an allreduce.
    steps: f64,
}

impl Group {
    fn new(question: &Question, links: u32) -> Group {
        let each = match question.ranks_per_node {
            0 => question.size,
            each => each.min(question.size),
        };
        let levels = |ranks: u32| f64::from(u32::BITS - (ranks - 1).leading_zeros());
        let count = question.count as f64;
        let evenness = match question.kind {
            Kind::Allgather | Kind::Gather | Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall => {
                question.total as f64 / (f64::from(question.size) * count).max(1.0)
            }
            Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Barrier => 1.0,
        };
        Group {
            n: f64::from(question.size),
            m: f64::from(each),
            nodes: f64::from(question.size.div_ceil(each)),
            links: f64::from(links.max(1)),
            levels: levels(question.size),
            node_levels: levels(each),
            bytes: count * question.widths.element as f64,
            wide: count * question.widths.accumulator as f64,
            count,
            evenness,
            chunk: question.chunk as f64,
        }
    }

    fn profile(&self, algorithm: Algorithm, kind: Kind) -> Profile {
        let Group { n, levels, bytes, wide, count, .. } = *self;
        let others = n - 1.0;
        // A share of the vector for each rank, as bytes, and all but one's own.
        let (share, rest) = (bytes / n, bytes * others / n);
        // A block as long as they are on average, and by how much the longest is longer.
        let (mean, mean_wide) = (bytes * self.evenness, wide * self.evenness);
        let (excess, excess_wide) = (bytes - mean, wide - mean_wide);
        match (kind, algorithm) {
            (Kind::Allreduce, Algorithm::OneShot) => {
                let pieces = self.pieces(count);
                let direct = self.direct(1.0, others * bytes);
                Profile { steps: (2.0 * others + 1.0) * pieces, combined: n * bytes, pieces, ..direct }
            }
            (Kind::Allreduce, Algorithm::TwoShot) => {
                let pieces = self.pieces(count / n);
                let direct = self.direct(2.0, 2.0 * rest);
                Profile { steps: (4.0 * others + 1.0) * pieces, combined: bytes, pieces, ..direct }
            }
            (Kind::Reduce, Algorithm::TwoShot) => {
                let pieces = self.pieces(count / n);
                let direct = self.direct(2.0, 2.0 * rest);
                Profile { steps: (3.0 * others + 1.0) * pieces, combined: bytes, pieces, ..direct }
            }
            (Kind::Allreduce, Algorithm::Ring | Algorithm::RingChunked) => {
                let pieces = if algorithm == Algorithm::Ring { 1.0 } else { self.pieces(count / n) };
                let reduced = share + (n - 2.0) * wide / n;
                let ring = self.ring(2.0 * others, reduced + rest);
                Profile { steps: 4.0 * others * pieces, combined: reduced + rest, pieces, ..ring }
            }
            (Kind::ReduceScatter, Algorithm::Ring) => {
                let pieces = self.pieces(count);
                let reduced = mean + (n - 2.0) * mean_wide;
                let ring = self.ring(others, reduced);
                // The longest block has the whole way to go.
                let fill_bytes = (n - 2.0) * excess_wide / pieces;
                let steps = 2.0 * others * self.pieces(count * self.evenness);
                Profile { steps, fill_bytes, combined: reduced + others * mean, pieces, ..ring }
            }
            (Kind::Allgather, Algorithm::Ring) => {
                let pieces = self.pieces(count);
                let ring = self.ring(others, others * mean);
                let fill_bytes = (n - 2.0) * excess / pieces;
                let steps = 2.0 * others * self.pieces(count * self.evenness) + 1.0;
                Profile { steps, fill_bytes, copied: bytes, pieces, ..ring }
            }
            (Kind::Allreduce, Algorithm::HalvingDoubling | Algorithm::HalvingDoublingPipelined) => {
                let pieces =
                    if algorithm == Algorithm::HalvingDoubling { 1.0 } else { self.pieces(count / 2.0) };
                let Halving { up, down, up_link, down_link, steps } = self.halving();
                let reduced = bytes / 2.0 + wide * (up - 0.5);
                let crossing = (wide * up_link + bytes * down_link) / self.m;
                let rounds = 2.0 * self.doubling_rounds();
                let halving = self.doubling(rounds, 2.0, reduced + bytes * down, crossing);
                Profile { steps: steps * pieces, combined: 2.0 * reduced, pieces, ..halving }
            }
            (Kind::ReduceScatter, Algorithm::HalvingDoubling) => {
                let Halving { up, up_link, .. } = self.halving();
                // The first ranks of the largest block have the block of a rank outside of it, too, at each
                // level down to the last.
                let largest = n.log2().floor();
                let guests = n - largest.exp2();
                let share = |level: i32| (guests / 2.0_f64.powi(level)).ceil();
                let hosted = (1..=largest as i32).map(share).sum::<f64>() + 2.0 * guests.min(1.0);
                let blocks = (n * up).max(largest.exp2() - 1.0 + hosted);
                // The longest block passes at every level, from one rank of two, of four and so on.
                let rounds = self.doubling_rounds();
                let across = (rounds - self.node_levels).max(1.0);
                let longest = excess + (rounds - 1.0) * excess_wide;
                let reduced = n / 2.0 * mean + (blocks - n / 2.0) * mean_wide + longest;
                let crossing = (blocks / up * mean_wide * up_link + across * excess_wide) / self.m;
                let halving = self.doubling(rounds, 1.0, reduced, crossing);
                Profile { steps: n + 2.0 * levels, combined: 2.0 * reduced, copied: n * mean, ..halving }
            }
            (Kind::Allreduce, Algorithm::Bcube) => self.bcube(),
            (Kind::Allreduce, Algorithm::RecursiveDoubling) => {
                let pieces = self.pieces(count);
                // A short block at the end sends to several ranks of the whole one beside it.
                let extra = self.uneven_fan_out() * wide;
                let moved = bytes + (levels - 1.0) * wide + extra;
                let crossing = (levels - self.node_levels) * wide + extra;
                let doubling = self.doubling(levels, 1.0, moved, crossing);
                Profile { steps: 2.0 * levels * pieces, combined: 2.0 * moved, pieces, ..doubling }
            }
            (Kind::Allreduce, Algorithm::Binomial) => {
                let pieces = self.pieces(count);
                let tree = self.binomial(2.0, bytes + (levels - 1.0) * wide + levels * bytes);
                let combined = 2.0 * (bytes + (levels - 1.0) * wide);
                Profile { steps: 2.0 * levels * pieces, combined, pieces, ..tree }
            }
            (Kind::Reduce, Algorithm::Binomial) => {
                let pieces = self.pieces(count);
                let moved = bytes + (levels - 1.0) * wide;
                let tree = self.binomial(1.0, moved);
                Profile { steps: levels * pieces, combined: 2.0 * moved, pieces, ..tree }
            }
            (Kind::Broadcast, Algorithm::Binomial) => {
                let pieces = self.pieces(count);
                let tree = self.binomial(1.0, levels * bytes);
                Profile { steps: (levels + 1.0) * pieces, copied: bytes, pieces, ..tree }
            }
            (Kind::Allreduce, Algorithm::PipelinedTree) => {
                let pieces = self.pieces(count);
                // Who combines takes two sums in and the result, and sends its own input, a sum, and the
                // result twice. From five ranks on there is one whose node has both a parent and two children
                // that are other ranks'.
                let (inward, outward) = match self.n as u32 {
                    2 => (bytes, bytes),
                    3 => (2.0 * bytes, wide + bytes),
                    4 => (2.0 * wide, 3.0 * bytes),
                    _ => (2.0 * wide + bytes, wide + 3.0 * bytes),
                };
                let moved = inward.max(outward);
                // Of a node that has several ranks, most of that stays inside.
                let crossing = if self.m > 1.0 { 2.0 * wide + bytes } else { moved };
                let depth = 2.0 * levels;
                let fill = (depth - 2.0).max(0.0) * (bytes + wide) / pieces;
                let tree = self.spread(depth, moved, crossing, fill);
                Profile { steps: 8.0 * pieces, combined: 2.0 * wide, pieces, ..tree }
            }
            (Kind::Broadcast, Algorithm::PipelinedTree) => {
                let pieces = self.pieces(count);
                let children = 2.0_f64.min(others);
                let fill = (levels - 1.0).max(0.0) * children * bytes / pieces;
                // Neighbours have neighbouring children, far from themselves: all ranks of a node send
                // across.
                let crossing = children * bytes * self.sharing(self.m);
                let tree = self.spread(levels, children * bytes, crossing, fill);
                Profile { steps: 4.0 * pieces, copied: bytes, pieces, ..tree }
            }
            (Kind::Broadcast, Algorithm::Chain) => {
                let pieces = self.pieces(count);
                let chain = self.ring(others, bytes);
                Profile {
                    steps: 3.0 * pieces,
                    fill_bytes: (n - 2.0) * bytes / pieces,
                    copied: bytes,
                    pieces,
                    ..chain
                }
            }
            (Kind::Broadcast, Algorithm::ScatterAllgather) => {
                let pieces = self.pieces(count / others);
                let direct = self.direct(2.0_f64.min(others), bytes);
                let fill_bytes = if others > 1.0 { bytes / pieces } else { 0.0 };
                Profile { steps: 2.0 * others * pieces, fill_bytes, copied: bytes, pieces, ..direct }
            }
            (Kind::Allreduce, Algorithm::Hierarchical) => self.hierarchical_allreduce(),
            (Kind::Broadcast, Algorithm::Hierarchical) => {
                let pieces = self.pieces(count);
                let across_levels = self.nodes.log2().ceil();
                let tree_levels = across_levels + self.node_levels;
                Profile {
                    inside_rounds: self.node_levels,
                    across_rounds: across_levels,
                    steps: (tree_levels + 1.0) * pieces,
                    port_bytes: tree_levels * bytes,
                    link_bytes: across_levels * bytes,
                    fill_bytes: 0.0,
                    combined: 0.0,
                    copied: bytes,
                    pieces,
                }
            }
            (Kind::Allgather, Algorithm::Bruck) => {
                // Somebody sends the longest block in every round, and those next to it may be as long.
                let across = (levels - self.node_levels).max(1.0);
                let sent = |level: i32| 2.0_f64.powi(level).min(n - 2.0_f64.powi(level)) * bytes;
                let moved = (0..levels as i32).map(|level| sent(level).min(n * mean)).sum();
                let crossing = (n - self.m) * mean + across * excess;
                let doubling = self.doubling(levels, 1.0, moved, crossing);
                Profile { steps: 2.0 * levels + 3.0, copied: n * mean, ..doubling }
            }
            (Kind::Alltoall, Algorithm::Bruck) => {
                let moved = levels * n * bytes / 2.0;
                let crossing = (levels - self.node_levels).max(1.0) * n * bytes / 2.0;
                let doubling = self.doubling(levels, 1.0, moved, crossing);
                Profile { steps: levels * (n / 2.0 + 2.0), copied: moved + n * bytes, ..doubling }
            }
            (Kind::Alltoall, Algorithm::Pairwise) => {
                Profile { steps: 2.0 * others + 1.0, copied: bytes, ..self.direct(others, others * bytes) }
            }
            (Kind::ReduceScatter, Algorithm::Linear) => {
                let pieces = self.pieces(count);
                let direct = self.direct(1.0, others * bytes);
                Profile { steps: (2.0 * others + 1.0) * pieces, combined: n * bytes, pieces, ..direct }
            }
            (Kind::Allgather | Kind::Alltoall, _) => {
                Profile { steps: 2.0 * others + 1.0, copied: bytes, ..self.direct(1.0, others * bytes) }
            }
            (Kind::Reduce, _) => {
                let pieces = self.pieces(count);
                let star = self.star(1.0, others * bytes);
                Profile { steps: n * pieces, combined: n * bytes, pieces, ..star }
            }
            (Kind::Gather | Kind::Scatter, Algorithm::Binomial) => {
                let tree = self.binomial(1.0, others * bytes);
                Profile { steps: levels + 1.0, copied: n / 2.0 * bytes, ..tree }
            }
            (Kind::Barrier, Algorithm::Dissemination) => {
                Profile { steps: 2.0 * levels, ..self.doubling(levels, 1.0, 0.0, 0.0) }
            }
            (Kind::Barrier, _) => Profile { steps: 2.0 * others, ..self.star(2.0, 0.0) },
            // What is left is linear from or to a root.
            _ => Profile { steps: n, copied: bytes, ..self.star(1.0, others * bytes) },
        }
    }

    /// Everybody with everybody; all ranks of a node use its links at once, as many as have something.
    fn direct(&self, rounds: f64, port_bytes: f64) -> Profile {
        let crossing = (self.n - self.m) / (self.n - 1.0) * port_bytes;
        let busy = self.m.min(self.n * self.evenness);
        self.rounds(rounds, rounds, port_bytes, crossing * self.sharing(busy))
    }

    /// Everybody with one rank, whose node's links carry it all.
    fn star(&self, rounds: f64, port_bytes: f64) -> Profile {
        let crossing = (self.n - self.m) / (self.n - 1.0) * port_bytes;
        self.rounds(rounds, rounds, port_bytes, crossing)
    }

    /// From neighbour to neighbour: of a node's ranks, one sends across.
    fn ring(&self, rounds: f64, port_bytes: f64) -> Profile {
        self.rounds(rounds, rounds * self.nodes / self.n, port_bytes, port_bytes)
    }

    /// Doubling distances; all ranks of a node send across in the later rounds.
    fn doubling(&self, rounds: f64, times: f64, port_bytes: f64, crossing: f64) -> Profile {
        let across = (rounds - times * self.node_levels).max(times);
        self.rounds(rounds, across, port_bytes, crossing * self.sharing(self.m))
    }

    /// A tree whose upper levels cross nodes: one rank of a node sends across.
    fn binomial(&self, times: f64, port_bytes: f64) -> Profile {
        let across = self.levels - self.node_levels;
        self.rounds(times * self.levels, times * across, port_bytes, port_bytes * across / self.levels)
    }

    fn spread(&self, rounds: f64, port_bytes: f64, crossing: f64, fill_bytes: f64) -> Profile {
        let across = rounds * (self.levels - self.node_levels) / self.levels;
        Profile { fill_bytes, ..self.rounds(rounds, across, port_bytes, crossing) }
    }

    fn rounds(&self, rounds: f64, across: f64, port_bytes: f64, link_bytes: f64) -> Profile {
        if self.nodes == 1.0 {
            return Profile { inside_rounds: rounds, port_bytes, pieces: 1.0, ..Profile::default() };
        }
        let across_rounds = across.min(rounds);
        let inside_rounds = rounds - across_rounds;
        Profile { inside_rounds, across_rounds, port_bytes, link_bytes, pieces: 1.0, ..Profile::default() }
    }

    /// How many times over a link is used when so many ranks of a node send across.
    fn sharing(&self, ranks: f64) -> f64 {
        (ranks / self.links).max(1.0)
    }

    fn pieces(&self, count: f64) -> f64 {
        if self.chunk == 0.0 || count == 0.0 { 1.0 } else { (count / self.chunk).ceil().clamp(1.0, 4096.0) }
    }

    /// What halving-doubling takes. Ranks that are no power of two are cut into blocks that are, the largest
    /// first: each block reduces by itself, gives its sum to the one before it, and has the result of the
    /// first.
    fn halving(&self) -> Halving {
        let (size, each) = (self.n as u32, self.m as u32);
        let after = |first: u32| (first < size).then(|| (first, 1 << (size - first).ilog2()));
        let blocks: Vec<(u32, u32)> =
            std::iter::successors(after(0), |&(first, len): &(u32, u32)| after(first + len)).collect();
        let node = |rank: u32| rank / each;
        let share = |ranks: u32, len: u32| f64::from(ranks.min(len)) / f64::from(len);
        let (largest, others) = (blocks[0].1, &blocks[1..]);
        let levels = |len: u32| f64::from(len.ilog2());
        // What a block of several nodes gives and takes inside itself, over the links of each.
        let within = |len: u32| 1.0 - share(each, len);
        let joined = others.len() as f64;
        let (mut up, mut down) = (1.0 - share(1, largest), 1.0 - share(1, largest));
        let (mut up_link, mut down_link) = (within(largest), within(largest));
        let mut steps = 4.0 * levels(largest);
        if let [rest @ .., _] = others {
            // A block has its own sum, and the one that it is given, when a whole vector has passed; the next
            // one has its share of it after that.
            up = 1.0 + rest.iter().map(|&(_, len)| share(1, len)).sum::<f64>();
            down += joined * share(1, largest);
            steps += 1.0 + joined;
        }
        let mut chain = 0.0;
        for (at, &(first, len)) in others.iter().enumerate().rev() {
            let (before, before_len): (u32, u32) = blocks[at];
            if node(before) < node(first + len - 1) {
                chain += if at + 1 == others.len() { 1.0 } else { share(each, len) };
                if at == 0 {
                    up_link += share(each, largest);
                }
            }
            let messages = f64::from(before_len / len + largest / len);
            steps = steps.max(4.0 * levels(len) + messages + 1.0);
        }
        up_link = up_link.max(chain);
        // The first block's nodes give each other block its result; a node may have ranks of several.
        let outside = |&&(first, len): &&(u32, u32)| node(first + len - 1) > 0;
        down_link += share(each, largest) * others.iter().filter(outside).count() as f64;
        for &(first, len) in others {
            let here = node(first) * each..(node(first) + 1).saturating_mul(each);
            let taken = |&(first, len): &(u32, u32)| {
                let ranks = (first + len).min(here.end).saturating_sub(first.max(here.start));
                share(ranks, len)
            };
            let given = others.iter().filter(outside).map(taken).sum::<f64>();
            down_link = down_link.max(given + within(len));
        }
        Halving { up, down, up_link, down_link, steps }
    }

    /// Rounds of halving: one more for sizes other than powers of two, whose smaller blocks have fewer of
    /// their own.
    fn doubling_rounds(&self) -> f64 {
        let whole = self.n.log2().floor();
        if whole == self.levels { whole } else { whole + 1.0 }
    }

    /// How many more ranks than one a rank of a short block at the end sends to.
    fn uneven_fan_out(&self) -> f64 {
        let left = (self.levels - 1.0).exp2();
        (left / (self.n - left)).ceil() - 1.0
    }

    fn bcube(&self) -> Profile {
        let Group { n, bytes, wide, count, .. } = *self;
        let pieces = self.pieces(count);
        let (mut rest, mut range, mut profile) = (n as u64, 1.0, self.rounds(0.0, 0.0, 0.0, 0.0));
        let (mut rounds, mut port_bytes, mut crossing, mut stride) = (0.0, 0.0, 0.0, 1.0);
        while rest > 1 {
            let edge = match rest.trailing_zeros() {
                0 => rest,
                1 => 2,
                _ => 4,
            };
            let len = edge as f64;
            let width = if range == 1.0 { bytes } else { wide };
            let moved = (width + bytes) * range * (len - 1.0) / len;
            rounds += 2.0;
            port_bytes += moved;
            crossing += if stride * len > self.m { moved } else { 0.0 };
            profile.steps += (4.0 * (len - 1.0) + 1.0) * pieces;
            profile.combined += width * range;
            (rest, range, stride) = (rest / edge, range / len, stride * len);
        }
        let times = rounds * (1.0 - self.node_levels / self.levels);
        let Profile { steps, combined, .. } = profile;
        let moved = self.rounds(rounds, times.max(2.0), port_bytes, crossing * self.sharing(self.m));
        Profile { steps, combined, pieces, ..moved }
    }

    fn hierarchical_allreduce(&self) -> Profile {
        let Group { m, nodes, bytes, wide, count, .. } = *self;
        let pieces = self.pieces(count / m);
        let inside = 2.0 * bytes * (m - 1.0) / m;
        let across = (if m > 1.0 { wide } else { bytes } + bytes) / m * (nodes - 1.0) / nodes;
        let several = nodes > 1.0;
        Profile {
            inside_rounds: if m > 1.0 { 2.0 } else { 0.0 },
            across_rounds: if several { 2.0 } else { 0.0 },
            steps: (4.0 * (m - 1.0) + 4.0 * (nodes - 1.0) + 2.0) * pieces,
            port_bytes: inside + across,
            link_bytes: if several { across * self.sharing(m) } else { 0.0 },
            fill_bytes: 0.0,
            combined: bytes + if several { wide / m } else { 0.0 },
            copied: 0.0,
            pieces,
        }
    }
}
