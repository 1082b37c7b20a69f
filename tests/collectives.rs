//! Every collective over every transport and with every algorithm that serves it, ranks as threads, against a
//! plain reference.

mod support;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use support::reference::{Case, Shape};
use support::{TRANSPORTS, Verb, barrier, ranks, within};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::Call;
use unisono::error::Status;
use unisono::reduce::{DataType, Operator};
use unisono::schedule::{Algorithm, Kind as Planned};

const KINDS: [Kind; 8] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
];

const OPERATORS: [Operator; 8] = [
    Operator::Sum,
    Operator::Product,
    Operator::Min,
    Operator::Max,
    Operator::Average,
    Operator::BitAnd,
    Operator::BitOr,
    Operator::BitXor,
];

/// Over which transports this process tests: the one without process_vm_readv has nothing new to see in TCP.
fn transports() -> &'static [&'static str] {
    if std::env::var_os(CMA).is_some() { &TRANSPORTS[..1] } else { &TRANSPORTS }
}

/// Whether ranks may read each other's memory.
const CMA: &str = "UNISONO_CMA";

/// Automatic, and every algorithm that serves the operation in a group of more than one.
fn algorithms(kind: Kind) -> Vec<Option<Algorithm>> {
    let planned = match kind {
        Kind::Allreduce => Planned::Allreduce,
        Kind::Reduce => Planned::Reduce,
        Kind::Broadcast => Planned::Broadcast,
        Kind::Allgather => Planned::Allgather,
        Kind::Gather => Planned::Gather,
        Kind::Scatter => Planned::Scatter,
        Kind::ReduceScatter => Planned::ReduceScatter,
        Kind::Alltoall => Planned::Alltoall,
        _ => Planned::Barrier,
    };
    let serving = Algorithm::ALL.into_iter().filter(|&a| a != Algorithm::Local && a.serves(planned));
    std::iter::once(None).chain(serving.map(Some)).collect()
}

/// Small counts, of which some do not divide by the ranks.
fn counts(size: u32) -> Vec<u64> {
    let size = u64::from(size);
    let mut counts = vec![0, 1, size - 1, size, size + 1, 1000];
    counts.sort_unstable();
    counts.dedup();
    counts
}

#[test]
fn every_operation_with_every_algorithm() {
    for &transports in transports() {
        for size in 1..=8 {
            if transports == "tcp" && ![2, 3, 5, 8].contains(&size) {
                continue;
            }
            let mut cases = Vec::new();
            for kind in KINDS {
                for algorithm in algorithms(kind) {
                    for (turn, count) in counts(size).into_iter().enumerate() {
                        for in_place in [false, true] {
                            // All roots come up in turn, not with every count.
                            let root = (turn as u32 + u32::from(in_place)) % size;
                            cases.push(Case { algorithm, in_place, root, ..Case::new(kind, count) });
                        }
                    }
                }
            }
            ranks(size, transports, |context| cases.iter().for_each(|case| case.check(context)));
        }
    }
}

#[test]
fn every_type_and_operator() {
    for &transports in transports() {
        for size in [1, 2, 3, 5, 8] {
            let mut cases = Vec::new();
            for dtype in DataType::ALL {
                for kind in KINDS {
                    let operators = if kind.reduces() { &OPERATORS[..] } else { &OPERATORS[..1] };
                    for &operator in operators {
                        let bitwise =
                            matches!(operator, Operator::BitAnd | Operator::BitOr | Operator::BitXor);
                        if bitwise && dtype.is_float() {
                            continue;
                        }
                        cases.push(Case { dtype, operator, ..Case::new(kind, 37) });
                    }
                }
            }
            ranks(size, transports, |context| cases.iter().for_each(|case| case.check(context)));
        }
    }
}

#[test]
fn large_messages_with_every_algorithm() {
    // More than an eager message for every rank of four, in bytes and in floats.
    for &transports in transports() {
        for size in [2, 4, 5] {
            let mut cases = Vec::new();
            for kind in KINDS {
                for (turn, algorithm) in algorithms(kind).into_iter().enumerate() {
                    let in_place = turn % 2 == 0;
                    let (dtype, root) = (DataType::U8, turn as u32 % size);
                    let case = Case { algorithm, in_place, root, dtype, ..Case::new(kind, 100_003) };
                    cases.push(case.clone());
                    cases.push(Case { skew: 1, in_place: !in_place, ..case });
                }
            }
            for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Reduce] {
                // Several pieces of a streamed message, several chunks of a pipeline.
                cases.push(Case { dtype: DataType::F64, ..Case::new(kind, 300_001) });
            }
            ranks(size, transports, |context| cases.iter().for_each(|case| case.check(context)));
        }
    }
}

#[test]
fn messages_that_several_threads_share() {
    // Each rank's part has more than 4 MiB, and more than four threads take at once.
    for &transports in transports() {
        let mut cases = Vec::new();
        for (turn, kind) in KINDS.into_iter().enumerate() {
            let count = match kind {
                Kind::Allreduce | Kind::Reduce | Kind::Broadcast => 1_100_003,
                _ => 550_001,
            };
            let (in_place, root, dtype) = (turn % 2 == 0, turn as u32 % 2, DataType::F64);
            cases.push(Case { in_place, root, dtype, ..Case::new(kind, count) });
            if kind == Kind::Allreduce {
                cases.push(Case { in_place: !in_place, dtype, ..Case::new(kind, count) });
            }
        }
        ranks(2, transports, |context| cases.iter().for_each(|case| case.check(context)));
    }
}

#[test]
fn uneven_and_empty_blocks() {
    let kinds = [Kind::Allgather, Kind::Gather, Kind::Scatter, Kind::ReduceScatter, Kind::Alltoall];
    for &transports in transports() {
        for size in [1u32, 2, 3, 5, 8] {
            let mut cases = Vec::new();
            for kind in kinds {
                let blocks = if kind == Kind::Alltoall { size * size } else { size };
                let lists: [&dyn Fn(u32) -> u64; 5] = [
                    &|i| u64::from(i * 7 % 5),
                    &|_| 0,
                    &|i| if i == blocks - 1 { 900 } else { 0 },
                    &|i| if i % 2 == 0 { 0 } else { u64::from(i) + 1 },
                    &|i| if i == 0 { 20_000 } else { 3 },
                ];
                for (turn, list) in lists.into_iter().enumerate() {
                    let counts: Vec<u64> = (0..blocks).map(list).collect();
                    for algorithm in algorithms(kind) {
                        if kind == Kind::Alltoall && algorithm == Some(Algorithm::Bruck) {
                            continue;
                        }
                        for in_place in [false, true] {
                            let counts = Shape::Uneven(counts.clone());
                            let root = turn as u32 % size;
                            cases.push(Case { counts, algorithm, in_place, root, ..Case::new(kind, 0) });
                        }
                    }
                }
            }
            ranks(size, transports, |context| cases.iter().for_each(|case| case.check(context)));
        }
    }
}

#[test]
fn long_uneven_blocks_go_in_several_messages() {
    // Nothing, one message of the longest, a bit more, and several.
    let lengths = [0, 262_144, 262_145, 700_001, 3];
    for &transports in transports() {
        let mut cases = Vec::new();
        for kind in [Kind::Gather, Kind::Scatter, Kind::Alltoall] {
            let blocks = if kind == Kind::Alltoall { 9 } else { 3 };
            for (turn, algorithm) in algorithms(kind).into_iter().enumerate() {
                if algorithm == Some(Algorithm::Bruck) {
                    continue;
                }
                let list = (0..blocks).map(|block| lengths[(block + turn) % lengths.len()]).collect();
                let (counts, root, in_place) = (Shape::Uneven(list), turn as u32 % 3, turn % 2 == 1);
                cases.push(Case { counts, algorithm, root, in_place, ..Case::new(kind, 0) });
            }
        }
        ranks(3, transports, |context| cases.iter().for_each(|case| case.check(context)));
    }
}

#[test]
fn ranks_other_than_the_root_need_only_their_own_count() {
    for &transports in transports() {
        for count in [3u64, 100_000] {
            ranks(3, transports, |context| {
                let rank = context.rank();
                for root in 0..3 {
                    // Whatever else is in the list, also what no address space could hold.
                    let mut counts = vec![if rank == root { count } else { u64::MAX - 7 }; 3];
                    counts[rank as usize] = count;
                    let mine = vec![rank as f32; count as usize];
                    let mut all = vec![-1.0f32; 3 * count as usize];
                    let verb = |kind| Verb {
                        counts: Counts::Blocks(counts.clone()),
                        ..Verb::new(kind, 0).root(root)
                    };
                    verb(Kind::Gather).run(context, &mine, &mut all, &Call::default()).expect("a gather");
                    if rank == root {
                        for (from, block) in all.chunks(count as usize).enumerate() {
                            assert!(block.iter().all(|&value| value == from as f32), "from {from}");
                        }
                    }
                    let mut own = vec![-1.0f32; count as usize];
                    verb(Kind::Scatter).run(context, &all, &mut own, &Call::default()).expect("a scatter");
                    assert_eq!(own, mine);
                }
            });
        }
    }
}

#[test]
fn lists_that_differ_are_told_where_several_blocks_are_passed_on_together() {
    // What the first half of the ranks has, and the second.
    let lists: [[&[u64]; 2]; 5] = [
        // Ranks 2 and 3 have as much together in either.
        [&[1, 1, 2, 3], &[1, 1, 3, 2]],
        // In one of the two nothing goes to them.
        [&[1, 1, 0, 0], &[1, 1, 2, 3]],
        [&[1, 1, 2, 3], &[1, 1, 0, 0]],
        [&[4, 0], &[4, 4]],
        [&[4, 4], &[4, 0]],
    ];
    for &transports in transports() {
        for (kind, lists) in lists.iter().flat_map(|lists| [(Kind::Gather, lists), (Kind::Scatter, lists)]) {
            // Unasked and asked for. Over TCP whoever takes for empty what the other has for it does not ask,
            // which may come to a deadline, and who asks for what the other takes for empty is told of no
            // lists.
            let asks = lists.iter().all(|list| list.iter().all(|&count| count > 0));
            for &scale in if asks { &[1u64, 100_000][..] } else { &[1] } {
                let size = lists[0].len() as u32;
                let errors = ranks(size, transports, |context| {
                    let list = lists[usize::from(context.rank() >= size / 2)];
                    let counts = Counts::Blocks(list.iter().map(|count| count * scale).collect());
                    let memory = 8 * scale as usize;
                    let (input, mut output) = (vec![1.0f32; memory], vec![0.0f32; memory]);
                    let call = Call { algorithm: Some(Algorithm::Binomial as i32), ..within(20_000) };
                    let verb = Verb { counts, ..Verb::new(kind, 0) };
                    // Whose part has ended before that hears of it in its next call.
                    let next = || Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &within(20_000));
                    let result = verb.run(context, &input, &mut output, &call).and_then(|_| next());
                    result.expect_err("the lists differ")
                });
                for error in errors {
                    let case = format!("{kind:?} of {scale} times {lists:?}, {transports}: {error}");
                    assert_eq!(error.status(), Status::Mismatch, "{case}");
                    assert!(error.text().contains("lists of counts differ"), "{case}");
                }
            }
        }
    }
}

#[test]
fn an_exchange_in_place_needs_blocks_that_fit_each_other() {
    for &transports in transports() {
        ranks(2, transports, |context| {
            let (send, receive) = match context.rank() {
                0 => (vec![1, 2], vec![1, 3]),
                _ => (vec![3, 1], vec![2, 1]),
            };
            let counts = Counts::Exchange { send, receive };
            let before = [1.0f32, 2.0, 3.0, 4.0];
            let mut data = before;
            let error = Verb { counts, ..Verb::new(Kind::Alltoall, 0) }
                .run_in(context, &mut data, &Call::default())
                .expect_err("blocks of different lengths lie in each other's way");
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.text().contains("in place"), "{error}");
            assert_eq!(data, before);
        });
    }
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_entered() {
    for &transports in transports() {
        for size in 1..=8 {
            let entered = AtomicU32::new(0);
            ranks(size, transports, |context| {
                for algorithm in algorithms(Kind::Barrier) {
                    let call =
                        Call { algorithm: algorithm.map(|algorithm| algorithm as i32), ..Call::default() };
                    for _ in 0..10 {
                        let before = entered.fetch_add(1, Ordering::SeqCst) / size;
                        Verb::new(Kind::Barrier, 0).run_in::<u8>(context, &mut [], &call).expect("a barrier");
                        assert!(entered.load(Ordering::SeqCst) >= (before + 1) * size);
                        barrier(context);
                    }
                }
            });
        }
    }
}

#[test]
fn what_cannot_be_is_refused_and_does_no_harm() {
    ranks(3, "shm", |context| {
        let mut data = [1.0f32; 8];
        let refused = |verb: Verb, call: &Call, words: &str| {
            let error = verb.run_in(context, &mut [1.0f32; 8], call).expect_err(words);
            assert!(
                matches!(error.status(), Status::InvalidArgument | Status::Unsupported),
                "{error:?}, but {words}"
            );
            assert!(error.text().contains(words), "{error} does not say {words}");
        };
        refused(Verb::new(Kind::Reduce, 8).root(3), &Call::default(), "root 3 is out of range");
        refused(Verb::new(Kind::Allreduce, u64::MAX), &Call::default(), "exceeds the address space");
        let pairwise = Call { algorithm: Some(Algorithm::Pairwise as i32), ..Call::default() };
        refused(Verb::new(Kind::Allreduce, 8), &pairwise, "does not serve allreduce");
        let unknown = Call { algorithm: Some(999), ..Call::default() };
        refused(Verb::new(Kind::Allreduce, 8), &unknown, "algorithm 999 is unknown");
        refused(Verb::new(Kind::Allreduce, 8).operator(Operator::BitXor), &Call::default(), "xor");
        refused(Verb::new(Kind::Send, 8).root(context.rank()), &Call::default(), "itself");
        support::sum(context, &mut data);
        assert_eq!(data, [3.0; 8]);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_on_one_group(
        size in 1u32..6,
        tcp in any::<bool>(),
        calls in prop::collection::vec((0usize..8, 0u64..40, 0usize..3, any::<[u8; 5]>()), 1..30),
    ) {
        let cases: Vec<Case> = calls
            .into_iter()
            .map(|(kind, count, scale, [dtype, operator, root, algorithm, place])| {
                let kind = KINDS[kind];
                let choice = algorithms(kind);
                let dtype = DataType::ALL[usize::from(dtype) % 12];
                let operators = if dtype.is_float() { 5 } else { 8 };
                Case {
                    dtype,
                    operator: OPERATORS[usize::from(operator) % operators],
                    root: u32::from(root) % size,
                    algorithm: choice[usize::from(algorithm) % choice.len()],
                    in_place: place & 1 == 0,
                    skew: usize::from(place) & 4,
                    ..Case::new(kind, count * [1, 17, 521][scale])
                }
            })
            .collect();
        let transports = if tcp { "tcp" } else { "shm" };
        ranks(size, transports, |context| cases.iter().for_each(|case| case.check(context)));
    }
}

/// The environment is the process's, so the tests that take the other path run in a process of their own.
#[test]
fn all_of_it_when_peers_cannot_read_each_others_memory() {
    if std::env::var_os(CMA).is_some() {
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let tests = ["every_operation_with", "large_messages", "uneven_and_empty"];
    let output = Command::new(program).args(tests).env(CMA, "0").output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("3 passed"), "{said}");
}

#[test]
fn scatters_of_ranks_that_all_take_themselves_for_the_root_are_a_mismatch() {
    for transports in transports() {
        ranks(2, transports, |context| {
            let (own, mut block) = (vec![1u8; 2 << 20], vec![0u8; 1 << 20]);
            let verb = Verb::new(Kind::Scatter, 1 << 20).dtype(DataType::U8).root(context.rank());
            let error = verb.run(context, &own, &mut block, &Call::default()).expect_err("two roots");
            assert_eq!(error.status(), Status::Mismatch, "{transports}: {error}");
        });
    }
}
