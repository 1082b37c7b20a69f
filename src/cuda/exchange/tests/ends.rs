//! How kernels end that wait in vain.

use super::*;

#[test]
fn kernels_end_when_they_are_told_and_say_whom_they_waited_for() {
    let pulled = Way::Pulled { stages: Stages::One, readable: false, overlap: Overlap::Off };
    let bytes = |kind, count| Case { dtype: DataType::U8, ..Case::new(kind, count) };
    for case in [
        Case::new(Kind::Allreduce, 100),
        Case::new(Kind::Allreduce, 400),
        Case::new(Kind::Allreduce, 900),
        Case::new(Kind::Allreduce, 5000),
        Case::new(Kind::ReduceScatter, 5000),
        bytes(Kind::Allgather, 100),
        bytes(Kind::Allgather, 1500),
        bytes(Kind::Alltoall, 9000),
        Case { way: Way::Windowed, ..Case::new(Kind::Allreduce, 5000) },
        Case { way: pulled, ..bytes(Kind::Broadcast, 5000) },
    ] {
        // A rank may wait for another that waits, and which of its threads tells is chance: of some plays one
        // names who is absent.
        let named = (5..9).any(|seed| {
            let (mut dice, mut world) = (Dice(3), World::new(3, table()));
            world.call(case, &mut dice);
            world.call_without(case, 1 << 2, &mut dice);
            assert_eq!(world.play(seed, &ADVERSE[1], 3_000_000), Ending::Aborted, "{case:?}");
            let waited: Vec<Option<u32>> =
                world.records().iter().map(|record| record.map(|record| record.peer)).collect();
            // Nobody for itself.
            assert!(
                (0..2).all(|rank| waited[rank as usize].is_some_and(|peer| peer != rank)),
                "{case:?}: {:?}",
                world.records()
            );
            waited[..2].contains(&Some(2))
        });
        assert!(named, "{case:?}: nobody says that rank 2 is absent");
    }
}

/// Whatever comes at that moment: threads of a warp, or of a block, that wait for each other leave together.
#[test]
fn kernels_end_whenever_they_are_told() {
    for seed in 0..40 * how_often() {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        dice.next();
        let mut world = World::new(dice.one_of(&[2, 2, 3, 4]), table());
        for _ in 0..4 {
            let kinds = dice.one_of(&[&REDUCTIONS, &MOVES]);
            let longest = dice.one_of(&[600, 1800, 4000, 9000]);
            world.call(any_call(&mut dice, world.size(), kinds, [1, longest]), &mut dice);
        }
        let patience = Patience { turns: dice.below(60_000), apart: 20_000, grace: PATIENCE };
        let ending = world.play(seed, &ADVERSE[(seed % 3) as usize], patience);
        assert_ne!(ending, Ending::Stuck, "seed {seed}");
    }
}

/// After two broadcasts a root waits for room in the slots of who is slow; then some threads of a warp may
/// find it, and others that they are to leave.
#[test]
fn threads_that_make_a_line_together_leave_together() {
    for (kind, bytes) in [
        (Kind::Allreduce, 1200),
        (Kind::ReduceScatter, 1200),
        (Kind::Alltoall, 1200),
        (Kind::Allgather, 1200),
    ] {
        let bytes_of = |kind, count| Case { dtype: DataType::U8, ..Case::new(kind, count) };
        for seed in 0..60 * how_often() {
            let (mut dice, mut world) = (Dice(seed | 1), World::new(2, table()));
            for _ in 0..2 {
                world.call(bytes_of(Kind::Broadcast, bytes), &mut dice);
            }
            let case = if kind.reduces() { Case::new(kind, bytes / 4) } else { bytes_of(kind, bytes) };
            world.call(case, &mut dice);
            let patience = Patience { turns: dice.below(30_000), apart: 20_000, grace: 1_000_000 };
            let ending = world.play(seed, &ADVERSE[(seed % 2) as usize], patience);
            assert_ne!(ending, Ending::Stuck, "{kind:?}, seed {seed}");
        }
    }
}

/// Of a warp that waits for one line of 128 bytes one thread alone knows whom it waits for; it is the one to
/// ask.
#[test]
fn a_kernel_of_one_warp_says_whom_it_waited_for() {
    let mut table = table();
    for tuning in &mut table.tunings {
        (tuning.allreduce.narrow, tuning.reduce_scatter.narrow) = (0, 0);
    }
    for size in [2, 3, 5, 8] {
        for (kind, operator, dtype) in [
            (Kind::Allreduce, Operator::Sum, DataType::F32),
            (Kind::Allreduce, Operator::Min, DataType::I32),
            (Kind::ReduceScatter, Operator::Sum, DataType::F32),
        ] {
            for seed in 1..5 {
                let (mut dice, mut world) = (Dice(seed), World::new(size, table));
                let case = Case { operator, dtype, ..Case::new(kind, 20) };
                world.call_without(case, 1, &mut dice);
                assert_eq!(world.play(seed, &ADVERSE[1], 300_000), Ending::Aborted);
                let records = world.records();
                assert!(
                    records[1..].iter().all(Option::is_some),
                    "{case:?} of {size}, seed {seed}: {records:?}"
                );
            }
        }
    }
}

/// The host's page is far away and answers one thread after the other: those who all ask hear nothing else.
#[test]
fn few_of_those_who_wait_ask_the_host() {
    const TURNS: u64 = 3_000_000;
    for case in [
        Case::new(Kind::Allreduce, 400),
        Case::new(Kind::Allreduce, 5000),
        Case { dtype: DataType::I32, operator: Operator::Min, ..Case::new(Kind::Allreduce, 400) },
        Case { dtype: DataType::U8, ..Case::new(Kind::Allgather, 1500) },
        Case { dtype: DataType::U8, ..Case::new(Kind::Alltoall, 9000) },
        Case { way: Way::Windowed, ..Case::new(Kind::Allreduce, 5000) },
    ] {
        let (mut dice, mut world) = (Dice(3), World::new(3, table()));
        world.call_without(case, 1 << 2, &mut dice);
        assert_eq!(world.play(5, &ADVERSE[1], TURNS), Ending::Aborted, "{case:?}");
        // Each looks 64 times before it asks anything, and what it asks is when somebody has asked the host:
        // 5 us later each time, and that is asked every 50.
        assert!((1..TURNS / 64 / 5).contains(&world.asked()), "{case:?}: {}", world.asked());
    }
}
