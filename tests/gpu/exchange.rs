//! The exchange between GPUs, in one process: every operation against the host's reduction bit for bit, eager
//! and replayed, and what an abort does. Ranks share the GPUs that there are. `UNISONO_EXCHANGE_TIMES` asks
//! for a table of times as well: see [`times`].

#[path = "../../src/cuda/exchange/tests/case.rs"]
mod case;
mod times;
mod world;

use unisono::cuda::exchange::{Direction, Overlap, Point, Stages};
use unisono::reduce::{DataType, Operator};
use unisono::signature::Kind;

use case::{Case, Way, parts};
use world::{Graph, World, gpus};

/// Every size of group that the machine has room for.
const SIZES: [u32; 4] = [2, 3, 4, 8];

/// Bytes of calls, around the bounds of the protocols and of the tiles.
const BYTES: [u64; 12] =
    [1, 100, 4096, 15_000, 33_000, 70_001, 300_000, 500_000, 1_100_011, 2_500_000, 5_000_011, 20_000_003];

fn operators(dtype: DataType) -> Vec<Operator> {
    let mut all = vec![
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(1.0),
    ];
    if !dtype.is_float() {
        all.extend([Operator::BitAnd, Operator::BitOr, Operator::BitXor]);
    }
    all
}

const COLLECTIVES: [Kind; 8] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::ReduceScatter,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Alltoall,
    Kind::Gather,
    Kind::Scatter,
];

#[test]
fn exchange_of_floats_at_every_size() {
    for size in SIZES {
        let world = World::new(size, 24 << 20);
        for kind in COLLECTIVES {
            for (i, bytes) in BYTES.into_iter().enumerate() {
                world.check(&Case {
                    root: i as u32 % size,
                    in_place: i % 3 == 1,
                    skew: [0, 4, 8, 0][i % 4],
                    ..Case::new(kind, bytes.div_ceil(4).div_ceil(parts(kind, size)))
                });
            }
        }
    }
}

#[test]
fn exchange_of_bytes_at_any_address() {
    for size in SIZES {
        let world = World::new(size, 4 << 20);
        for kind in [Kind::Allgather, Kind::Alltoall] {
            for (i, count) in [1, 7, 119, 121, 2049, 5000, 33_333, 130_007, 300_001].into_iter().enumerate() {
                for in_place in [false, true] {
                    let skew = [1, 0, 3][i % 3];
                    world.check(&Case { dtype: DataType::U8, in_place, skew, ..Case::new(kind, count) });
                }
            }
        }
    }
}

#[test]
fn exchange_of_every_type_by_every_operator() {
    for size in [2, 4, 8] {
        let world = World::new(size, 4 << 20);
        let mut round = 0;
        for dtype in DataType::ALL {
            for operator in operators(dtype) {
                for kind in [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter] {
                    for bytes in [300, 60_000, 900_001] {
                        round += 1;
                        let element = dtype.size() as u64;
                        let case = Case {
                            dtype,
                            operator,
                            root: round % size,
                            in_place: round % 5 == 0,
                            skew: if round % 4 == 0 { element } else { 0 },
                            ..Case::new(kind, bytes / element)
                        };
                        if case.whole(size) <= 4 << 20 {
                            world.check(&case);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn exchange_in_graphs_and_between_them() {
    for size in [2, 4] {
        let world = World::new(size, 8 << 20);
        let cases: Vec<Case> = [100, 40_000, 400_000, 3_000_000]
            .into_iter()
            .flat_map(|count| COLLECTIVES.map(|kind| (kind, count)))
            .enumerate()
            .map(|(i, (kind, count))| Case {
                dtype: DataType::Bf16,
                operator: Operator::Average,
                root: i as u32 % size,
                ..Case::new(kind, count / parts(kind, size))
            })
            .collect();
        for (i, case) in cases.iter().enumerate() {
            let graph = world.captured(case);
            for replay in 0..3 {
                world.check_by(case, || graph.iter().for_each(Graph::launch));
                // An eager call of another kind in between.
                if replay == 1 {
                    world.check(&cases[(i + 5) % cases.len()]);
                }
            }
        }
    }
}

#[test]
fn exchange_of_sends_and_receives() {
    for size in [2, 3, 4] {
        let world = World::new(size, 16 << 20);
        for bytes in [1, 5000, 130_001, 3_000_000] {
            // Several transfers of different sizes to everybody, oneself too, the order of the group mixed.
            for many in [1, 3, 20] {
                let bytes = (bytes / many).max(1);
                let part = |i: u64| bytes / (i % 3 + 1) + i % 2;
                let slot = bytes + 16;
                let points = |rank: u32| -> Vec<Point> {
                    let mut points = Vec::new();
                    for peer in 0..size {
                        for i in 0..many {
                            let at = (u64::from(peer) * many + i) * slot;
                            let point = |direction, base: u64| Point {
                                direction,
                                peer,
                                address: base + at,
                                bytes: part(i),
                            };
                            points.push(point(Direction::Send, world.input(rank)));
                            points.push(point(Direction::Receive, world.output(rank)));
                        }
                    }
                    points
                };
                let input =
                    |rank: u32| world::noise(u64::from(rank) + 7, (slot * many) as usize * size as usize);
                for rank in 0..size {
                    world.fill(rank, &input(rank));
                }
                for rank in 0..size {
                    world.send_and_receive(rank, &points(rank));
                }
                world.wait();
                for rank in 0..size {
                    let got = world.result(rank, (slot * many) as usize * size as usize);
                    for peer in 0..size {
                        let sent = input(peer);
                        for i in 0..many {
                            let from = ((u64::from(rank) * many + i) * slot) as usize;
                            let to = ((u64::from(peer) * many + i) * slot) as usize;
                            let length = part(i) as usize;
                            assert!(
                                got[to..to + length] == sent[from..from + length],
                                "transfer {i} of {many} from {peer} to {rank}, {length} bytes"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn exchange_ends_when_aborted() {
    for (kind, bytes) in [Kind::Allreduce, Kind::Allgather]
        .into_iter()
        .flat_map(|kind| [64, 20_000_000].map(|bytes| (kind, bytes)))
    {
        let world = World::new(2, 48 << 20);
        let case = Case::new(kind, bytes / 4);
        let graph = world.captured(&case);
        world.enqueue(0, &case);
        std::thread::sleep(std::time::Duration::from_millis(20));
        let began = std::time::Instant::now();
        world.abort(0);
        world.wait_for(0);
        // Replays leave at once.
        graph[0].launch();
        world.wait_for(0);
        let took = began.elapsed();
        assert!(took.as_millis() < 1000, "an aborted kernel took {took:?} to end");
        let record = world.record(0).expect("what the kernel waited for");
        assert_eq!(record.peer, 1, "{record:?}");
        assert!(world.try_enqueue(0, &case).is_err());
        println!("abort of {}: {took:?}, {record:?}", kind.name());
    }
}

#[test]
fn exchange_times() {
    if std::env::var_os("UNISONO_EXCHANGE_TIMES").is_none() {
        return println!("skipped: UNISONO_EXCHANGE_TIMES asks for it");
    }
    if gpus() < 2 {
        return println!("skipped: needs 2 GPUs");
    }
    times::print();
}

#[test]
fn exchange_with_few_blocks() {
    for size in SIZES {
        let world = World::new(size, 8 << 20);
        for max_blocks in [1, 2, 3, 5, 9] {
            for kind in COLLECTIVES {
                for (i, bytes) in [100u64, 70_001, 1_100_011, 5_000_011].into_iter().enumerate() {
                    world.check(&Case {
                        root: i as u32 % size,
                        in_place: i % 2 == 1,
                        skew: [0, 4, 8, 0][i],
                        max_blocks,
                        ..Case::new(kind, bytes.div_ceil(4).div_ceil(parts(kind, size)))
                    });
                }
            }
        }
    }
}

#[test]
fn broadcasts_by_stages() {
    for size in SIZES {
        let world = World::new(size, 20 << 20);
        // A kernel that lets the next begin must not share its GPU with one that it waits for.
        let levels = if size <= gpus() { 3 } else { 2 };
        let mut round = 0;
        for max_blocks in [0, 1, 7] {
            let all = [100, 70_001, 3_000_005, 1, 15, 4096, 9_437_187, 20_000_003];
            for &bytes in &all[..if max_blocks == 0 { 8 } else { 3 }] {
                for stages in Stages::ALL {
                    for readable in [true, false] {
                        round += 1;
                        let overlap = [Overlap::Off, Overlap::Wait, Overlap::Early][round % levels];
                        world.check(&Case {
                            dtype: DataType::U8,
                            root: round as u32 % size,
                            in_place: round % 3 == 0,
                            skew: [0, 1, 4, 16, 8][round % 5],
                            max_blocks,
                            way: Way::Pulled { stages, readable, overlap },
                            ..Case::new(Kind::Broadcast, bytes)
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn broadcasts_by_stages_in_graphs_among_other_calls() {
    for size in [2, 3, 4] {
        let world = World::new(size, 20 << 20);
        let case = |root, count| Case { dtype: DataType::U8, root, ..Case::new(Kind::Broadcast, count) };
        for (overlap, readable) in
            [(Overlap::Off, true), (Overlap::Off, false), (Overlap::Wait, true), (Overlap::Wait, false)]
        {
            let broadcast = case(size - 1, 20_000_001);
            let short = case(0, 100_000);
            let pulled =
                |case, stages, readable| Case { way: Way::Pulled { stages, readable, overlap }, ..case };
            let graphs: Vec<Graph> = (0..size)
                .map(|rank| {
                    Graph::capture(world.devices(), world.stream(rank), || {
                        // The last one is the one that counts.
                        world.enqueue(rank, &pulled(short, Stages::One, readable));
                        world.enqueue(rank, &broadcast);
                        world.enqueue(rank, &pulled(short, Stages::Two, !readable));
                        world.enqueue(rank, &pulled(broadcast, Stages::Two, readable));
                    })
                })
                .collect();
            for _ in 0..3 {
                world.check_by(&broadcast, || graphs.iter().for_each(Graph::launch));
                world.check(&Case::new(Kind::Allreduce, 1_000_000));
                world.check(&pulled(short, Stages::Two, readable));
            }
        }
    }
}

/// A call in windows eagerly, in a graph among others, and beside what is staged.
fn check_in_windows(world: &World, case: &Case) {
    let windowed = Case { way: Way::Windowed, ..*case };
    world.check(&windowed);
    let graphs: Vec<Graph> = (0..world.size())
        .map(|rank| {
            Graph::capture(world.devices(), world.stream(rank), || {
                world.enqueue(rank, &windowed);
                world.enqueue(rank, case);
                world.enqueue(rank, &windowed);
            })
        })
        .collect();
    let replays = || graphs.iter().for_each(Graph::launch);
    if case.kind.reduces() && case.in_place {
        // What is in place is another's input the next time: only the bits of one call are known.
        return world.check(case);
    }
    world.check_by(case, replays);
    world.check(case);
}

#[test]
fn calls_into_windows() {
    for size in SIZES {
        let world = World::of_windows(size, 4 << 20);
        for max_blocks in [0, 3] {
            for kind in
                [Kind::Allgather, Kind::Alltoall, Kind::Broadcast, Kind::Allreduce, Kind::ReduceScatter]
            {
                for (i, bytes) in [100u64, 1 << 20, 3_000_003, 70_001].into_iter().enumerate() {
                    let dtype = if kind.reduces() { DataType::F32 } else { DataType::U8 };
                    let element = dtype.size() as u64;
                    let case = Case {
                        dtype,
                        root: i as u32 % size,
                        in_place: kind != Kind::Alltoall && i % 2 == 1,
                        skew: [0, 16, element, 0][(i + max_blocks as usize) % 4],
                        max_blocks,
                        ..Case::new(kind, bytes.div_ceil(parts(kind, size)).div_ceil(element))
                    };
                    check_in_windows(&world, &case);
                }
            }
        }
    }
}

#[test]
fn reductions_in_windows_of_every_type_by_every_operator() {
    for size in [2, 3, 4, 8] {
        let world = World::of_windows(size, 2 << 20);
        let mut round = 0;
        for dtype in DataType::ALL {
            for operator in operators(dtype) {
                for kind in [Kind::Allreduce, Kind::ReduceScatter] {
                    for bytes in [300u64, 1, 60_000, 900_001] {
                        round += 1;
                        let element = dtype.size() as u64;
                        world.check(&Case {
                            dtype,
                            operator,
                            in_place: round % 3 == 0,
                            skew: if round % 4 == 0 { element } else { 0 },
                            way: Way::Windowed,
                            ..Case::new(kind, bytes.div_ceil(parts(kind, size)).div_ceil(element))
                        });
                    }
                }
            }
        }
    }
}
