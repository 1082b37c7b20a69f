//! Messages and calls of a group, which are few launches.

use super::*;

#[test]
fn sends_and_receives_of_a_group_meet_in_their_order() {
    check(8, |world, dice| {
        for _ in 0..2 {
            world.exchange(&any_transfers(dice, world.size()), None, dice);
        }
    });
}

/// Which block moves a transfer, and how it is cut, follows from its length alone: ranks need not group the
/// same messages.
#[test]
fn messages_of_a_group_meet_those_that_are_launched_alone() {
    check(8, |world, dice| {
        let last = world.size() - 1;
        for alone in [0, last] {
            let bytes = |dice: &mut Dice| dice.one_of(&[1, 64, 300, 1801, 3000, 4095, 9000]);
            let messages: Vec<_> = (0..5).map(|_| (0, last, bytes(dice))).collect();
            world.exchange(&messages, Some(alone), dice);
        }
    });
}

/// Ranks need not group the same messages, however many there are.
#[test]
fn many_messages_of_a_group_are_beside_each_other() {
    check(4, |world, dice| {
        let many = |from, to| [(from, to, 100); 40];
        // The second rank sends when it has received all.
        let together = |own| if own == 0 { 80 } else { 40 };
        world.exchange_by(&[many(0, 1), many(1, 0)].concat(), 0, together, dice);
    });
}

/// Nor where a rank has fewer blocks than a message has parts: it moves each message whole before it comes to
/// the next, each way for itself.
#[test]
fn long_messages_of_a_group_meet_those_that_are_launched_alone() {
    let mut table = table();
    table.tunings.iter_mut().for_each(|tuning| (tuning.parts, tuning.move_warps) = (4, 4));
    let [there, back] = [(0, 1, 5000), (1, 0, 5000)];
    // More than the slots of a part hold.
    let long = (0, 1, 100_000);
    for transfers in [[there, back], [back, there], [long, long]] {
        check_by(&table, 0, 2, |world, dice| {
            // The first rank sends and receives at once, the second one after the other.
            let together = |own| if own == 0 { 2 } else { 1 };
            world.exchange_by(&transfers, 2, together, dice);
        });
    }
}

/// Each peer of a message has a block of its own, however few the caller allows: no rank need come to its
/// messages in the order of others.
#[test]
fn messages_to_one_rank_hold_up_none_to_another() {
    check(8, |world, dice| {
        if world.size() < 3 {
            return;
        }
        for max_blocks in [1, 2] {
            // More than the slots hold. The first rank sends both at once, the others do one after the other.
            let transfers = [(0, 2, 30_000), (2, 1, 100), (0, 1, 30_000)];
            world.exchange_by(&transfers, max_blocks, |own| if own == 0 { 2 } else { 1 }, dice);
        }
    });
}

#[test]
fn calls_of_a_group_run_beside_each_other() {
    const SUMS: [Operator; 3] = [Operator::Sum, Operator::Average, Operator::PreMulSum(0.0)];
    const ALIKE: [&[Kind]; 5] = [
        &[Kind::Allreduce, Kind::ReduceScatter, Kind::Reduce],
        &[Kind::Allgather],
        &[Kind::Alltoall],
        &[Kind::Broadcast],
        &[Kind::Gather, Kind::Scatter],
    ];
    let mut shared = 0;
    check_group(20, &mut shared, |dice, size| {
        let (kinds, dtype) = (dice.one_of(&ALIKE), dice.one_of(&[DataType::F32, DataType::Bf16]));
        let most = dice.one_of(&[1500, 1500, 16_000]);
        let short = |dice: &mut Dice| {
            let case = any_call(dice, size, kinds, [1, most]);
            let operator = if case.kind.reduces() { dice.one_of(&SUMS) } else { Operator::Sum };
            let element = dtype.size() as u64;
            let [skew, apart] = [0, 1].map(|_| dice.one_of(&[0, 0, 16, element, 3 * element]));
            Case { dtype, operator, count: (case.count / 4).max(1), skew, apart, ..case }
        };
        // Calls that have one kernel follow each other, and something else.
        let mut calls: Vec<Case> = (0..4).map(|_| short(dice)).collect();
        calls.push(any_call(dice, size, &REDUCTIONS, [1, 9000]));
        calls.push(short(dice));
        calls
    });
    assert!(shared > 20, "{shared} launches had several calls");
}

/// In one step each, unless there are fewer roots than ranks.
#[test]
fn reductions_of_a_group_to_ranks_in_turn_run_beside_each_other() {
    let mut shared = 0;
    check_group(10, &mut shared, |dice, size| {
        let (count, first) = (dice.one_of(&[1100, 4000]), dice.below(size.into()) as u32);
        let case = |call| Case { root: (first + call) % size, ..Case::new(Kind::Reduce, count) };
        (0..size.min(6)).map(case).collect()
    });
    assert!(shared > 10, "{shared} launches had several calls");
}

/// Plays groups between other calls; counts the launches of several.
fn check_group(plays: u64, shared: &mut usize, calls: impl Fn(&mut Dice, u32) -> Vec<Case>) {
    let counted = std::cell::Cell::new(0);
    let table = Table { blocks: 8, ..table() };
    let tunings = table.tunings.map(|tuning| Tuning { line_blocks: 6, tile_blocks: 6, ..tuning });
    check_by(&Table { tunings, ..table }, 0, plays, |world, dice| {
        let size = world.size();
        for _ in 0..2 {
            world.call(any_call(dice, size, &REDUCTIONS, [1, 3000]), dice);
            let bundles = world.group(&calls(dice, size), dice);
            counted.set(counted.get() + bundles.iter().filter(|calls| calls.len() > 1).count());
            world.exchange(&[(0, 1, 100); 3], None, dice);
        }
    });
    *shared += counted.get();
}

/// How many calls of a group are a launch each.
fn bundles(cases: &[Case], windows: bool) -> Vec<usize> {
    let world = World::new(2, Table::default());
    let jobs: Vec<Job> = cases.iter().map(|case| case.job(0, [4096, 8192])).collect();
    world.bundles(&jobs, windows).iter().map(|calls| calls.len()).collect()
}

fn bytes(kind: Kind, count: u64) -> Case {
    Case { dtype: DataType::U8, ..Case::new(kind, count) }
}

#[test]
fn calls_of_a_group_share_launches_where_they_have_one_kernel() {
    let bundles = |cases: &[Case]| bundles(cases, false);
    let sum = |count| Case::new(Kind::Allreduce, count);
    assert_eq!(bundles(&[sum(1); 65]), [64, 1]);
    // Other types and operators have other kernels, or none.
    let half = Case { dtype: DataType::Bf16, ..sum(100) };
    let other = Case { dtype: DataType::I32, operator: Operator::Min, ..sum(100) };
    assert_eq!(bundles(&[sum(1), half, half, other, other, sum(1)]), [1, 2, 1, 1, 1]);
    // Averages and sums of a type have one kernel, also of other kinds; what only moves has one.
    let average = Case { operator: Operator::Average, ..Case::new(Kind::ReduceScatter, 7) };
    assert_eq!(bundles(&[sum(1), average, Case::new(Kind::Reduce, 9)]), [3]);
    let gather = bytes(Kind::Allgather, 100);
    let [to, from] = [Kind::Gather, Kind::Scatter].map(|kind| bytes(kind, 9));
    assert_eq!(bundles(&[gather, gather, bytes(Kind::Alltoall, 50), to, from, to]), [2, 1, 3]);
    // As few blocks as the caller allows are all that they have together.
    let limited = Case { max_blocks: 2, ..sum(1) };
    assert_eq!(bundles(&[sum(1), limited, limited, sum(1)]), [2, 2]);
    assert_eq!(bundles(&[Case { max_blocks: 1, ..sum(1) }; 2]), [1, 1]);
    assert_eq!(bundles(&[Case { max_blocks: 2, ..sum(1 << 22) }; 5]), [2, 2, 1]);
}

/// Lines do not hold much; tiles hold anything.
#[test]
fn long_calls_of_a_group_share_launches_too() {
    let bundles = |cases: &[Case]| bundles(cases, false);
    let sum = |count| Case::new(Kind::Allreduce, count);
    assert_eq!(bundles(&[bytes(Kind::Broadcast, 512 << 10); 4]), [4]);
    assert_eq!(bundles(&[bytes(Kind::Broadcast, 512 << 10); 65]), [64, 1]);
    assert_eq!(bundles(&[sum(1), sum(9), sum(1 << 22), sum(1), sum(2)]), [5]);
    // An allgather is a broadcast of each rank then.
    assert_eq!(bundles(&[bytes(Kind::Allgather, (4 << 20) - 1); 33]), [32, 1]);
    // If it is longer, and other moves are, one goes after the other, which is no gain where lines hold
    // several.
    assert_eq!(bundles(&[bytes(Kind::Allgather, 4 << 20); 33]), [15, 15, 3]);
    assert_eq!(bundles(&[bytes(Kind::Alltoall, 4 << 20); 16]), [15, 1]);
    assert_eq!(bundles(&[bytes(Kind::Alltoall, 1 << 20); 16]), [2; 8]);
    let scaled = Case { operator: Operator::PreMulSum(0.0), ..sum(1 << 22) };
    assert_eq!(bundles(&[scaled; 3]), [3]);
}

/// What may gain by windows is launched for itself where there are some.
#[test]
fn long_calls_of_a_group_that_may_be_in_windows_share_no_launches() {
    let bundles = |cases: &[Case]| bundles(cases, true);
    let sum = |count| Case::new(Kind::Allreduce, count);
    assert_eq!(bundles(&[sum(1), sum(9), sum(1 << 22), sum(1), sum(2)]), [2, 1, 2]);
    // Whether a call is in place is each rank's own affair, also of those that would be in windows if they
    // were not.
    let apart = bytes(Kind::Alltoall, 1 << 20);
    let in_place = Case { in_place: true, ..apart };
    assert_eq!(bundles(&[apart, apart]), [1, 1]);
    assert_eq!(bundles(&[in_place, in_place]), [1, 1]);
    assert_eq!(bundles(&[apart, in_place]), bundles(&[in_place, apart]));
}
