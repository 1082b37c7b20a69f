use super::*;
use crate::schedule::ir::{Action, Representation};
use crate::schedule::{Collective, Shape, plan};

/// A host with fast memory and a slower network.
const MODEL: Model = Model {
    inside: Link { latency: 1e-6, byte_time: 1e-10 },
    across: Link { latency: 1e-5, byte_time: 4e-10 },
    links_per_node: 1,
    step_time: 1e-7,
    combine_time: 5e-11,
    copy_time: 5e-11,
};

const F32: Widths = Widths { element: 4, accumulator: 4 };

fn question(kind: Kind, size: u32, count: u64) -> Question {
    let in_blocks =
        matches!(kind, Kind::Allgather | Kind::Gather | Kind::Scatter | Kind::ReduceScatter | Kind::Alltoall);
    let total = if in_blocks { count * u64::from(size) } else { count };
    Question { kind, size, count, total, chunk: 0, ranks_per_node: size, widths: F32 }
}

fn schedules(algorithm: Algorithm, question: &Question) -> Vec<Schedule> {
    schedules_of(algorithm, question, vec![question.count; question.size as usize])
}

fn schedules_of(algorithm: Algorithm, question: &Question, counts: Vec<u64>) -> Vec<Schedule> {
    let collective = Collective::of(question.kind, counts, 0);
    (0..question.size)
        .map(|rank| {
            let Question { chunk, ranks_per_node, .. } = *question;
            let shape = Shape { chunk, ranks_per_node, ..Shape::new(rank, question.size) };
            plan(algorithm, &collective, &shape).expect("it serves")
        })
        .collect()
}

fn simulated(model: &Model, algorithm: Algorithm, question: &Question) -> f64 {
    simulated_of(model, algorithm, question, vec![question.count; question.size as usize])
}

fn simulated_of(model: &Model, algorithm: Algorithm, question: &Question, counts: Vec<u64>) -> f64 {
    let schedules = schedules_of(algorithm, question, counts);
    let schedules: Vec<_> = schedules.iter().collect();
    model.simulate(&schedules, question.ranks_per_node, question.widths).expect("the schedules fit")
}

/// Seconds that the busiest port of a rank takes for what goes through it one way, or the busiest link of a
/// node: nothing is over sooner, in whatever order things go.
fn busiest(model: &Model, algorithm: Algorithm, question: &Question) -> f64 {
    let Question { size, ranks_per_node, widths, .. } = *question;
    let nodes = size.div_ceil(ranks_per_node) as usize;
    let (mut ports, mut links) = (vec![[0.0; 2]; size as usize], vec![[0.0; 2]; nodes]);
    for (rank, schedule) in (0..).zip(schedules(algorithm, question)) {
        for step in &schedule.steps {
            let Action::Send { to, from, .. } = step.action else { continue };
            let width = match from.representation() {
                Representation::Element => widths.element,
                Representation::Accumulator => widths.accumulator,
            };
            let bytes = (from.len * width) as f64;
            let (node, other): (u32, u32) = (rank / ranks_per_node, to / ranks_per_node);
            let link = if node == other { model.inside } else { model.across };
            ports[rank as usize][0] += bytes * link.byte_time;
            ports[to as usize][1] += bytes * link.byte_time;
            if node != other {
                links[node as usize][0] += bytes * link.byte_time / f64::from(model.links_per_node);
                links[other as usize][1] += bytes * link.byte_time / f64::from(model.links_per_node);
            }
        }
    }
    ports.into_iter().chain(links).flatten().fold(0.0, f64::max)
}

#[test]
fn one_message_takes_its_latency_and_its_bytes() {
    let question = question(Kind::Broadcast, 2, 1_000_000);
    // Two steps at the root (send, copy), of which the copy is the longer; one message.
    let message = 1e-6 + 4e6 * 1e-10;
    let time = simulated(&MODEL, Algorithm::Linear, &question);
    assert!((time - message - 1e-7).abs() < 1e-9, "{time}");
    let apart = Question { ranks_per_node: 1, ..question };
    let time = simulated(&MODEL, Algorithm::Linear, &apart);
    assert!((time - 1e-5 - 4e6 * 4e-10 - 1e-7).abs() < 1e-9, "{time}");
}

#[test]
fn ports_and_links_are_shared() {
    // Everything leaves the root through one port.
    let star = question(Kind::Broadcast, 9, 1_000_000);
    assert!(simulated(&MODEL, Algorithm::Linear, &star) > 8.0 * 4e6 * 1e-10);
    // Four ranks send to four others of another node: over one link one after the other, over four at once.
    let pairs = Question { ranks_per_node: 4, ..question(Kind::Alltoall, 8, 1_000_000) };
    let four_links = Model { links_per_node: 4, ..MODEL };
    let one = simulated(&MODEL, Algorithm::Linear, &pairs);
    let four = simulated(&four_links, Algorithm::Linear, &pairs);
    assert!(one >= 16.0 * 4e6 * 4e-10 && four < 0.5 * one, "{one} {four}");
}

#[test]
fn estimates_follow_the_simulation() {
    let mut worst = (1.0, String::new());
    for kind in Kind::ALL {
        for algorithm in Algorithm::ALL {
            for size in [2, 3, 4, 8, 13, 16, 32] {
                for (count, chunk) in [(1, 0), (1000, 0), (1 << 20, 0), (1 << 20, 1 << 17)] {
                    for ranks_per_node in [size, 4] {
                        let question = Question { chunk, ranks_per_node, ..question(kind, size, count) };
                        if algorithm == Algorithm::Local {
                            continue;
                        }
                        let Some(estimate) = MODEL.estimate(algorithm, &question) else { continue };
                        let ratio = estimate / simulated(&MODEL, algorithm, &question);
                        if ratio.max(1.0 / ratio) > worst.0 {
                            worst = (
                                ratio.max(1.0 / ratio),
                                format!("{ratio} {} {question:?}", algorithm.name()),
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(worst.0 < 3.0, "{}", worst.1);
}

#[test]
fn estimates_of_blocks_that_differ_follow_the_simulation() {
    let mut worst = (1.0, String::new());
    for (kind, algorithm) in [
        (Kind::Allgather, Algorithm::Linear),
        (Kind::Allgather, Algorithm::Ring),
        (Kind::Allgather, Algorithm::Bruck),
        (Kind::ReduceScatter, Algorithm::Linear),
        (Kind::ReduceScatter, Algorithm::Ring),
        (Kind::ReduceScatter, Algorithm::HalvingDoubling),
    ] {
        for size in [3u32, 4, 8, 13, 16, 32] {
            for (count, chunk) in [(1000, 0), (1 << 20, 0), (1 << 20, 1 << 15)] {
                let alone = |at: u32| (0..size).map(|rank| if rank == at { count } else { 0 }).collect();
                let falling: Vec<u64> = (1..=u64::from(size)).map(|rank| count / rank).collect();
                let two = (0..size).map(|rank| if rank % 7 == 2 { count } else { count / 50 }).collect();
                for (counts, ranks_per_node) in [
                    (alone(0), size),
                    (alone(size - 1), size),
                    (alone(size / 2), 4),
                    (falling.clone(), size),
                    (falling, 4),
                    (two, size),
                ] {
                    let total = counts.iter().sum();
                    let question = Question { total, chunk, ranks_per_node, ..question(kind, size, count) };
                    let estimate = MODEL.estimate(algorithm, &question).expect("it serves");
                    let ratio = estimate / simulated_of(&MODEL, algorithm, &question, counts.clone());
                    if ratio.max(1.0 / ratio) > worst.0 {
                        worst = (ratio.max(1.0 / ratio), format!("{ratio} {algorithm:?} {question:?}"));
                    }
                }
            }
        }
    }
    assert!(worst.0 < 3.0, "{}", worst.1);
}

#[test]
fn no_reduction_to_all_is_priced_below_what_ports_and_links_have_to_carry() {
    for kind in [Kind::Allreduce, Kind::ReduceScatter] {
        for algorithm in Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Local) {
            for size in (2..=9).chain([13, 16, 31, 33]) {
                for (ranks_per_node, chunk) in
                    [(size, 0), (1, 0), (2, 0), (4, 0), (8, 0), (size, 1 << 17), (1, 1 << 17)]
                {
                    let question = Question { chunk, ranks_per_node, ..question(kind, size, 1 << 20) };
                    if ranks_per_node > size {
                        continue;
                    }
                    let Some(estimate) = MODEL.estimate(algorithm, &question) else { continue };
                    let share = estimate / busiest(&MODEL, algorithm, &question);
                    assert!(share > 0.95, "{share} {} {question:?}", algorithm.name());
                }
            }
        }
    }
}

#[test]
fn small_vectors_go_in_one_shot_and_large_ones_in_two() {
    let shots = [Algorithm::OneShot, Algorithm::TwoShot];
    for size in [4, 8, 64] {
        let small = question(Kind::Allreduce, size, 2);
        let large = question(Kind::Allreduce, size, 1 << 24);
        assert_eq!(MODEL.cheapest(shots, &small).map(|best| best.0), Some(Algorithm::OneShot));
        assert_eq!(MODEL.cheapest(shots, &large).map(|best| best.0), Some(Algorithm::TwoShot));
    }
}

#[test]
fn a_slow_network_asks_for_hierarchy() {
    let question = Question { ranks_per_node: 8, ..question(Kind::Allreduce, 64, 1 << 24) };
    let candidates = [Algorithm::TwoShot, Algorithm::RecursiveDoubling, Algorithm::Hierarchical];
    let (best, _) = MODEL.cheapest(candidates, &question).expect("there are candidates");
    assert_eq!(best, Algorithm::Hierarchical);
    let simulated = |algorithm| simulated(&MODEL, algorithm, &question);
    assert!(simulated(Algorithm::Hierarchical) < simulated(Algorithm::TwoShot));
}

#[test]
fn what_if_reaches_65536_ranks() {
    let question = Question { ranks_per_node: 8, ..question(Kind::Allreduce, 65536, 1 << 20) };
    let all = Algorithm::ALL.into_iter().filter(|a| a.serves(Kind::Allreduce));
    for algorithm in all.clone().filter(|&algorithm| algorithm != Algorithm::Local) {
        let time = MODEL.estimate(algorithm, &question).expect("it serves");
        assert!(time.is_finite() && time > 1e-3, "{}: {time}", algorithm.name());
    }
    let (best, _) = MODEL.cheapest(all, &question).expect("there are candidates");
    // Not one with a message for each rank.
    assert!(
        !matches!(best, Algorithm::OneShot | Algorithm::Ring | Algorithm::RingChunked),
        "{}",
        best.name()
    );
}

#[test]
fn what_does_not_serve_is_no_candidate() {
    let question = question(Kind::Barrier, 4, 0);
    assert_eq!(MODEL.estimate(Algorithm::Ring, &question), None);
    assert_eq!(MODEL.cheapest([Algorithm::Ring], &question), None);
}
