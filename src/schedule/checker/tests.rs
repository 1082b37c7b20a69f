//! Every algorithm at every size, and the mistakes that the checker has to find.

use super::*;
use crate::schedule::builder::Builder;
use crate::schedule::collective::MAX_PIECES;
use crate::schedule::ir::Step;
use crate::schedule::{Agreement, Algorithm, Kind, Shape, plan};

/// One collective of a whole group.
struct Case {
    algorithm: Algorithm,
    /// As each rank sees it.
    collectives: Vec<Collective>,
    in_place: bool,
    chunk: u64,
    portion: u64,
    ranks_per_node: u32,
    agreement: Agreement,
    /// One that writes when it likes, whatever the others do.
    told: Option<Rank>,
}

impl Case {
    fn shape(&self, rank: Rank) -> Shape {
        Shape {
            rank,
            size: self.collectives.len() as u32,
            alias: self.in_place.then(|| self.collectives[rank as usize].in_place_alias(rank)),
            chunk: self.chunk,
            ranks_per_node: self.ranks_per_node,
            agreement: if self.told == Some(rank) { Agreement::Told } else { self.agreement },
            portion: self.portion,
        }
    }

    fn schedules(&self) -> Vec<Schedule> {
        (0..self.collectives.len() as Rank)
            .map(|rank| {
                plan(self.algorithm, &self.collectives[rank as usize], &self.shape(rank))
                    .unwrap_or_else(|error| panic!("{self}: {error}"))
            })
            .collect()
    }

    fn check(&self, schedules: &[Schedule]) -> Result<()> {
        let parts: Vec<_> = (0..)
            .zip(&self.collectives)
            .zip(schedules)
            .map(|((rank, collective), schedule)| Part {
                collective,
                alias: self.shape(rank).alias,
                schedule,
            })
            .collect();
        check(&parts, self.algorithm.canonical(&self.shape(0)))
    }

    fn prove(&self) {
        if let Err(error) = self.check(&self.schedules()) {
            panic!("{self}: {error}");
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { algorithm, collectives, in_place, chunk, portion, ranks_per_node, agreement, told } = self;
        write!(
            f,
            "{} of {} ranks: {:?}, in place {in_place}, chunk {chunk}, portion {portion}, {ranks_per_node} ranks per node, \
             {agreement:?}, told {told:?}",
            algorithm.name(),
            collectives.len(),
            collectives[0]
        )
    }
}

/// What each rank calls, with counts near `count` for collectives that have a count for each rank.
fn collectives(
    kind: Kind,
    size: u32,
    count: u64,
    root: Rank,
    in_place: bool,
    uniform: bool,
) -> Vec<Collective> {
    // Some ranks have nothing; neighbours differ; in all about `count`.
    let block = |index: u32| {
        if uniform {
            count / 8
        } else {
            (u64::from(index) * 7 + count) % (count / 4 + 2) * u64::from(index % 5 != 3)
        }
    };
    let counts: Vec<u64> = (0..size).map(block).collect();
    (0..size)
        .map(|rank| match kind {
            Kind::Allreduce => Collective::Allreduce { count },
            Kind::Reduce => Collective::Reduce { count, root },
            Kind::Broadcast => Collective::Broadcast { count, root },
            Kind::Allgather => Collective::Allgather { counts: counts.clone() },
            Kind::Gather => Collective::Gather { counts: counts.clone(), root },
            Kind::Scatter => Collective::Scatter { counts: counts.clone(), root },
            Kind::ReduceScatter => Collective::ReduceScatter { counts: counts.clone() },
            Kind::Alltoall => {
                // In place, two ranks trade blocks of one length.
                let skew = if in_place { 1 } else { 3 };
                let pair = |from: u32, to: u32| block((from ^ to) + from * to + from + skew * to);
                Collective::Alltoall {
                    send_counts: (0..size).map(|to| pair(rank, to)).collect(),
                    recv_counts: (0..size).map(|from| pair(from, rank)).collect(),
                }
            }
            Kind::Barrier => Collective::Barrier,
        })
        .collect()
}

/// Proves the algorithm for a collective, at every size and every awkward count; the options (in place,
/// chunk, root, node) are all tried at small sizes, and take turns at larger ones.
fn prove(kind: Kind, algorithm: Algorithm) {
    for size in 1..=64u32 {
        let n = u64::from(size);
        let mut counts = vec![0, 1, 2, n - 1, n, n + 1, 2 * n + 3, 1000];
        counts.dedup();
        for (turn, &count) in counts.iter().enumerate() {
            let turn = turn + size as usize;
            // The work grows with the square of the size: the largest ones take turns with the counts too.
            if size > 32 && turn.is_multiple_of(2) {
                continue;
            }
            let roots = [0, size - 1, size / 2];
            let chunks = [0, 7, 1];
            let nodes = [size, 1, 2, 3, 4, 8, 5];
            let agreements = [Agreement::Unsaid, Agreement::Awaited];
            let options = if size <= 9 { 0..6 } else { turn % 6..turn % 6 + 1 };
            for option in options {
                // A chunk of one element makes many steps: small sizes are enough for it.
                let piece = |turn: usize| match chunks[turn % 3] {
                    0 => 0,
                    1 if n * count > 64 => count / 3 + 1,
                    chunk => chunk.max(count / if size <= 16 { 12 } else { 3 }),
                };
                let mut case = Case {
                    algorithm,
                    collectives: collectives(
                        kind,
                        size,
                        count,
                        roots[(option + turn / 2) % 3],
                        option % 2 == 1,
                        needs_uniform_counts(kind, algorithm),
                    ),
                    in_place: option % 2 == 1,
                    chunk: piece(turn + option),
                    portion: piece(turn + option + usize::from(option > 2)),
                    ranks_per_node: nodes[(turn + option) % nodes.len()],
                    agreement: agreements[(turn + option / 2) % 2],
                    told: None,
                };
                case.prove();
                // The others of these take as long again.
                if hears(kind) && case.agreement == Agreement::Awaited && size <= 16 {
                    case.told = Some((turn + option) as Rank % size);
                    case.prove();
                    (case.agreement, case.told) = (Agreement::Told, None);
                    case.prove();
                }
            }
        }
    }
}

/// Whether ranks may tell each other first what they have called.
fn hears(kind: Kind) -> bool {
    matches!(kind, Kind::Allgather | Kind::Gather | Kind::Scatter | Kind::Alltoall)
}

fn needs_uniform_counts(kind: Kind, algorithm: Algorithm) -> bool {
    (kind, algorithm) == (Kind::Alltoall, Algorithm::Bruck)
}

macro_rules! prove_each {
    ($($name:ident: $kind:ident by $algorithm:ident;)*) => {
        $(
            #[test]
            fn $name() {
                prove(Kind::$kind, Algorithm::$algorithm);
            }
        )*

        /// What has a proof above.
        const PROVED: &[(Kind, Algorithm)] = &[$((Kind::$kind, Algorithm::$algorithm)),*];
    };
}

prove_each! {
    allreduce_one_shot: Allreduce by OneShot;
    allreduce_two_shot: Allreduce by TwoShot;
    allreduce_ring: Allreduce by Ring;
    allreduce_ring_chunked: Allreduce by RingChunked;
    allreduce_halving_doubling: Allreduce by HalvingDoubling;
    allreduce_halving_doubling_pipelined: Allreduce by HalvingDoublingPipelined;
    allreduce_bcube: Allreduce by Bcube;
    allreduce_recursive_doubling: Allreduce by RecursiveDoubling;
    allreduce_binomial: Allreduce by Binomial;
    allreduce_pipelined_tree: Allreduce by PipelinedTree;
    allreduce_hierarchical: Allreduce by Hierarchical;
    reduce_binomial: Reduce by Binomial;
    reduce_linear: Reduce by Linear;
    reduce_two_shot: Reduce by TwoShot;
    broadcast_linear: Broadcast by Linear;
    broadcast_binomial: Broadcast by Binomial;
    broadcast_chain: Broadcast by Chain;
    broadcast_pipelined_tree: Broadcast by PipelinedTree;
    broadcast_scatter_allgather: Broadcast by ScatterAllgather;
    broadcast_hierarchical: Broadcast by Hierarchical;
    broadcast_one_to_all: Broadcast by OneToAll;
    allgather_linear: Allgather by Linear;
    allgather_ring: Allgather by Ring;
    allgather_bruck: Allgather by Bruck;
    gather_linear: Gather by Linear;
    gather_binomial: Gather by Binomial;
    scatter_linear: Scatter by Linear;
    scatter_binomial: Scatter by Binomial;
    reduce_scatter_linear: ReduceScatter by Linear;
    reduce_scatter_halving_doubling: ReduceScatter by HalvingDoubling;
    reduce_scatter_ring: ReduceScatter by Ring;
    alltoall_linear: Alltoall by Linear;
    alltoall_pairwise: Alltoall by Pairwise;
    alltoall_bruck: Alltoall by Bruck;
    barrier_dissemination: Barrier by Dissemination;
    barrier_all_to_one: Barrier by AllToOne;
}

#[test]
fn every_algorithm_is_proved_for_everything_that_it_serves() {
    for kind in Kind::ALL {
        for algorithm in Algorithm::ALL {
            if algorithm != Algorithm::Local {
                assert_eq!(
                    algorithm.serves(kind),
                    PROVED.contains(&(kind, algorithm)),
                    "{} for {}",
                    algorithm.name(),
                    kind.name()
                );
            }
        }
    }
}

/// A rank of two-shot is at most 32 pieces ahead of another where they are on several nodes, 4 on one. So
/// many pieces take every turn of both, and go on.
#[test]
fn two_shot_goes_on_as_it_has_begun() {
    const CHUNK: u64 = 3;
    for kind in [Kind::Allreduce, Kind::Reduce] {
        for size in [2u32, 3, 5, 8] {
            for (ranks_per_node, window) in [(size, 4u64), (1, 32)] {
                for in_place in [false, true] {
                    // The last shard is shorter than the others, by a piece of one element.
                    let count = u64::from(size) * 250 - 1;
                    let case = Case {
                        algorithm: Algorithm::TwoShot,
                        collectives: collectives(kind, size, count, size - 1, in_place, false),
                        in_place,
                        chunk: CHUNK,
                        portion: 0,
                        ranks_per_node,
                        agreement: Agreement::Unsaid,
                        told: None,
                    };
                    let schedules = case.schedules();
                    for (rank, schedule) in schedules.iter().enumerate() {
                        let fold = |step: &&Step| matches!(step.action, Action::Fold { .. });
                        let folds = schedule.steps.iter().filter(fold).count();
                        assert_eq!(folds, if rank as u32 == size - 1 { 83 } else { 84 }, "{case}");
                        // Raw pieces come where those of a window ago have been; what goes to a root has room
                        // besides.
                        let results = if kind == Kind::Reduce { folds as u64 * CHUNK } else { 0 };
                        let raw = u64::from(size - 1) * window * CHUNK;
                        assert!(schedule.scratch <= raw + results, "{case}: {}", schedule.scratch);
                    }
                    if let Err(error) = case.check(&schedules) {
                        panic!("{case}: {error}");
                    }
                }
            }
        }
    }
}

/// The longer part has fewer pieces than the shorter one.
#[test]
fn parts_with_the_most_pieces_are_moved_to_their_ends() {
    let count = 2 * MAX_PIECES + 1;
    for (kind, algorithm, size) in [
        (Kind::Allreduce, Algorithm::TwoShot, 2),
        (Kind::Reduce, Algorithm::TwoShot, 2),
        (Kind::Allreduce, Algorithm::Hierarchical, 2),
        (Kind::Broadcast, Algorithm::ScatterAllgather, 3),
    ] {
        let case = Case {
            algorithm,
            collectives: collectives(kind, size, count, 0, false, false),
            in_place: false,
            chunk: 1,
            portion: 0,
            ranks_per_node: size,
            agreement: Agreement::Unsaid,
            told: None,
        };
        case.prove();
    }
}

/// A case small enough to break in every place.
fn small(kind: Kind, algorithm: Algorithm) -> Case {
    let uniform = needs_uniform_counts(kind, algorithm);
    // A dissemination of five hears some news twice, one of four does not.
    let size = if kind == Kind::Barrier { 4 } else { 5 };
    let collectives = collectives(kind, size, 24, 1, true, uniform);
    let agreement = Agreement::Unsaid;
    Case {
        algorithm,
        collectives,
        in_place: true,
        chunk: 3,
        portion: 3,
        ranks_per_node: 2,
        agreement,
        told: None,
    }
}

/// The schedule with the actions `keep` lets through, its dependencies derived anew.
fn rebuild(schedule: &Schedule, alias: Option<i64>, keep: impl Fn(usize) -> bool) -> Schedule {
    let mut b = Builder::new(alias);
    b.scratch(schedule.scratch);
    b.partial(schedule.partial);
    for (index, step) in schedule.steps.iter().enumerate().filter(|&(index, _)| keep(index)) {
        match step.action {
            Action::Send { to, from, .. } => {
                b.send(to, from);
            }
            Action::Receive { from, into, .. } => {
                b.receive(from, into);
            }
            Action::ReceiveReduce { from, wire, local, received_left: true, into, .. } => {
                b.receive_reduce_left(from, wire, local, into);
            }
            Action::ReceiveReduce { from, wire, local, received_left: false, into, .. } => {
                b.receive_reduce_right(from, wire, local, into);
            }
            Action::Fold { into, .. } => {
                let operands: Vec<_> = reads(schedule, &schedule.steps[index].action).collect();
                b.fold(&operands, into);
            }
            Action::Copy { from, into } => b.copy(from, into),
        }
    }
    b.finish()
}

/// Without the `n`-th entry of the successor list.
fn without_edge(schedule: &Schedule, n: usize) -> Schedule {
    let mut broken = schedule.clone();
    let waiting = broken.successors.remove(n);
    broken.steps[waiting as usize].waits_for -= 1;
    for step in &mut broken.steps {
        step.successors.start -= u32::from(step.successors.start as usize > n);
        step.successors.end -= u32::from(step.successors.end as usize > n);
    }
    broken
}

#[test]
fn a_missing_step_is_found_whichever_it_is() {
    for &(kind, algorithm) in PROVED.iter().filter(|(kind, _)| *kind != Kind::Barrier) {
        let case = small(kind, algorithm);
        let schedules = case.schedules();
        for (rank, schedule) in schedules.iter().enumerate() {
            for missing in 0..schedule.steps.len() {
                let mut broken = schedules.clone();
                broken[rank] = rebuild(schedule, case.shape(rank as Rank).alias, |index| index != missing);
                let place = Place { rank: rank as Rank, step: missing, schedule };
                assert!(case.check(&broken).is_err(), "{case}: without {place}");
            }
        }
    }
}

/// Also says that the builder leaves out what follows from other edges.
#[test]
fn a_missing_dependency_is_found_whichever_it_is() {
    for &(kind, algorithm) in PROVED {
        // These order more than they must: pairwise exchange its rounds, all-to-one the release of each.
        if matches!(algorithm, Algorithm::Pairwise | Algorithm::AllToOne) {
            continue;
        }
        let case = small(kind, algorithm);
        let schedules = case.schedules();
        for (rank, schedule) in schedules.iter().enumerate() {
            for edge in 0..schedule.successors.len() {
                let mut broken = schedules.clone();
                broken[rank] = without_edge(schedule, edge);
                assert!(case.check(&broken).is_err(), "{case}: rank {rank} without edge {edge}");
            }
        }
    }
}

/// Of every step, the ranks whose call is known to be the same before it begins: by way of messages, each of
/// which says what its rank has called.
fn heard_before(schedules: &[Schedule]) -> Vec<Vec<u64>> {
    let partners = match_messages(&schedules.iter().collect::<Vec<_>>()).expect("the messages meet");
    let mut before: Vec<Vec<u64>> =
        (0..).zip(schedules).map(|(rank, schedule)| vec![1 << rank; schedule.steps.len()]).collect();
    loop {
        let known = before.clone();
        for (rank, schedule) in schedules.iter().enumerate() {
            for (index, step) in schedule.steps.iter().enumerate() {
                let mut after = known[rank][index];
                if let Some((from, send)) = partners[rank][index]
                    && step.action.writes().is_some()
                {
                    after |= known[from as usize][send as usize];
                }
                let successors = step.successors.start as usize..step.successors.end as usize;
                for &next in &schedule.successors[successors] {
                    before[rank][next as usize] |= after;
                }
            }
        }
        if before == known {
            return before;
        }
    }
}

#[test]
fn who_awaits_agreement_writes_no_output_before_it_has_heard_of_all() {
    let moves = |kind| matches!(kind, Kind::Allgather | Kind::Gather | Kind::Alltoall);
    for &(kind, algorithm) in PROVED.iter().filter(|(kind, _)| moves(*kind)) {
        for size in (2..=13).chain([64]) {
            let uniform = needs_uniform_counts(kind, algorithm);
            let collectives = collectives(kind, size, 100, size / 3, size % 2 == 0, uniform);
            let in_place = size % 2 == 0;
            let case = Case {
                algorithm,
                collectives,
                in_place,
                chunk: 0,
                portion: 0,
                ranks_per_node: size,
                agreement: Agreement::Awaited,
                told: None,
            };
            let schedules = case.schedules();
            let all = u64::MAX >> (64 - size);
            for (rank, (schedule, heard)) in schedules.iter().zip(heard_before(&schedules)).enumerate() {
                for (step, heard) in heard.into_iter().enumerate() {
                    let action = schedule.steps[step].action;
                    let output = action.writes().is_some_and(|into| into.buffer == Buffer::Output);
                    // A message is compared before any of it is written.
                    let from = match action {
                        Action::Receive { from, .. } => 1 << from,
                        _ => 0,
                    };
                    let place = Place { rank: rank as Rank, step, schedule };
                    assert!(!output || heard | from == all, "{case}: {place} has heard of {heard:b} only");
                }
            }
        }
    }
}

/// Each message says what list its sender has, so lists that differ are found by the first one of a pair, if
/// both its ranks have one by their own list.
#[test]
fn the_same_ranks_of_a_gather_or_scatter_have_messages_whatever_is_empty() {
    for &(kind, algorithm) in PROVED.iter().filter(|(kind, _)| matches!(kind, Kind::Gather | Kind::Scatter)) {
        for size in 2..=13u32 {
            for (root, turn) in [0, size / 2, size - 1].into_iter().zip(1..) {
                let lengths: [&dyn Fn(u32) -> u64; 5] = [
                    &|_| 1,
                    &|_| 0,
                    &|rank| u64::from(rank % 2),
                    &|rank| u64::from(rank < size / 2),
                    &|rank| if rank == turn % size { 5 } else { 0 },
                ];
                let meetings = lengths.map(|length| {
                    let counts: Vec<u64> = (0..size).map(length).collect();
                    let collective = match kind {
                        Kind::Gather => Collective::Gather { counts, root },
                        _ => Collective::Scatter { counts, root },
                    };
                    let pairs_of = |rank: Rank| {
                        let shape = Shape { agreement: Agreement::Awaited, ..Shape::new(rank, size) };
                        let schedule = plan(algorithm, &collective, &shape).expect("a plan");
                        let pair = |step: &Step| match step.action {
                            Action::Send { to, .. } => Some((rank, to)),
                            Action::Receive { from, .. } => Some((from, rank)),
                            _ => None,
                        };
                        let mut pairs: Vec<_> = schedule.steps.iter().filter_map(pair).collect();
                        pairs.sort_unstable();
                        pairs.dedup();
                        pairs
                    };
                    (0..size).map(pairs_of).collect::<Vec<_>>()
                });
                for other in &meetings {
                    let case = format!("{kind:?} by {}, {size} ranks, root {root}", algorithm.name());
                    assert_eq!(*other, meetings[0], "{case}");
                }
            }
        }
    }
}

#[test]
fn swapped_operands_are_found() {
    for (kind, algorithm) in
        [(Kind::Allreduce, Algorithm::RecursiveDoubling), (Kind::Allreduce, Algorithm::TwoShot)]
    {
        let case = small(kind, algorithm);
        let mut schedules = case.schedules();
        let victim = &mut schedules[2];
        match victim.steps.iter_mut().find_map(|step| match &mut step.action {
            Action::ReceiveReduce { received_left, .. } => Some(received_left),
            _ => None,
        }) {
            Some(left) => *left = !*left,
            None => victim.operands.swap(0, 1),
        }
        let error = case.check(&schedules).expect_err("the order is wrong");
        assert!(error.text().contains("promised was"), "{error}");
    }
}

/// What the checker says of an allreduce of two elements by two ranks, built by hand.
fn verdict(alias: Option<i64>, build: impl Fn(&mut Builder, Rank)) -> String {
    let collective = Collective::Allreduce { count: 2 };
    let schedules: Vec<_> = (0..2)
        .map(|rank| {
            let mut b = Builder::new(alias);
            build(&mut b, rank);
            b.finish()
        })
        .collect();
    let parts: Vec<_> =
        schedules.iter().map(|schedule| Part { collective: &collective, alias, schedule }).collect();
    check(&parts, true).map_or_else(|error| error.text().to_string(), |()| "proved".to_string())
}

const INPUT: Span = Span::new(Buffer::Input, 0, 2);
const OUTPUT: Span = Span::new(Buffer::Output, 0, 2);

#[test]
fn what_the_hand_builds_right_is_proved() {
    let verdict = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT);
        if rank == 0 {
            b.receive_reduce_right(1, Representation::Element, INPUT, OUTPUT);
        } else {
            b.receive_reduce_left(0, Representation::Element, INPUT, OUTPUT);
        }
    });
    assert_eq!(verdict, "proved");
}

#[test]
fn a_deadlock_is_found() {
    // In place, each waits for its input to be taken before it takes the other's.
    let verdict = verdict(Some(0), |b, rank| {
        b.send(1 - rank, INPUT);
        b.receive(1 - rank, OUTPUT);
    });
    assert!(
        verdict.starts_with("deadlock: rank 0, step 0 (send Input[0..2] to rank 1, slot 0)"),
        "{verdict}"
    );
}

#[test]
fn messages_that_do_not_fit_are_found() {
    let length = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT);
        b.receive(1 - rank, OUTPUT.part(0, 1 + u64::from(rank)));
    });
    assert!(length.contains("length or representation differ"), "{length}");
    let representation = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT);
        let partial = b.partial(2);
        b.receive(1 - rank, partial);
    });
    assert!(representation.contains("length or representation differ"), "{representation}");
    let lost = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT);
    });
    assert!(lost.contains("rank 1 never receives it"), "{lost}");
}

#[test]
fn misuse_of_memory_is_found() {
    let unwritten = verdict(None, |b, _| {
        let partial = b.partial(2);
        b.fold(&[partial], OUTPUT);
    });
    assert!(unwritten.contains("reads Partial[0..2], which nothing has written"), "{unwritten}");
    let outside = verdict(None, |b, _| b.fold(&[INPUT], Span::new(Buffer::Output, 1, 2)));
    assert!(outside.contains("Output[1..3] is outside of the buffer"), "{outside}");
    let unwritten_output = verdict(None, |_, _| ());
    assert!(unwritten_output.contains("Output[0..2] holds nothing"), "{unwritten_output}");
}

#[test]
fn a_result_that_overlaps_an_operand_elsewhere_is_found() {
    let folded = verdict(None, |b, _| {
        let partial = b.partial(3);
        b.fold(&[INPUT], partial.part(0, 2));
        b.fold(&[partial.part(0, 2)], partial.part(1, 2));
    });
    assert!(folded.contains("the spans overlap"), "{folded}");
    let in_place = verdict(Some(1), |b, _| b.fold(&[INPUT], OUTPUT));
    assert!(in_place.contains("the spans overlap"), "{in_place}");
    let received = verdict(None, |b, rank| {
        let partial = b.partial(3);
        b.fold(&[INPUT], partial.part(0, 2));
        b.send(1 - rank, INPUT);
        b.receive_reduce_right(1 - rank, Representation::Element, partial.part(0, 2), partial.part(1, 2));
    });
    assert!(received.contains("the spans overlap"), "{received}");
}

#[test]
fn wrong_sums_are_found() {
    let unfinished = verdict(None, |b, _| b.fold(&[INPUT], OUTPUT));
    assert!(unfinished.contains("stores a result without rank 1"), "{unfinished}");
    let twice = verdict(None, |b, _| b.fold(&[INPUT, INPUT], OUTPUT));
    assert!(twice.contains("takes rank 0 twice"), "{twice}");
    let raw = verdict(None, |b, _| b.copy(INPUT, OUTPUT));
    assert!(raw.contains("promised was"), "{raw}");
    let shifted = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT.part(rank.into(), 1));
        let raw = b.scratch(1);
        b.receive(1 - rank, raw);
        b.fold(&[INPUT.part(rank.into(), 1), raw], OUTPUT.part(0, 1));
    });
    assert!(shifted.contains("combines element"), "{shifted}");
    let finished_twice = verdict(None, |b, rank| {
        b.send(1 - rank, INPUT);
        let raw = b.scratch(2);
        b.receive(1 - rank, raw);
        let operands = if rank == 0 { [INPUT, raw] } else { [raw, INPUT] };
        let sum = b.scratch(2);
        b.fold(&operands, sum);
        b.fold(&[sum], OUTPUT);
    });
    assert!(finished_twice.contains("finishes final(0∘1) a second time"), "{finished_twice}");
}

#[test]
fn a_ring_is_not_canonical() {
    let case = small(Kind::Allreduce, Algorithm::Ring);
    let schedules = case.schedules();
    let parts: Vec<_> = schedules
        .iter()
        .zip(&case.collectives)
        .map(|(schedule, collective)| Part { collective, alias: Some(0), schedule })
        .collect();
    assert!(check(&parts, true).is_err_and(|error| error.text().contains("promised was")));
}
