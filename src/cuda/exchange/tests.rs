//! The exchange without a GPU: its plans and parameters as they are, its kernels compiled for processors,
//! played in adversarial orders over memory that is as weak as a GPU's (`kernels/double`).

mod case;
mod ends;
mod groups;
pub(in crate::cuda) mod play;
mod world;

use self::case::{Case, Way};
use self::play::{Chances, Ending, Patience, Weakness};
use self::world::{Dice, World};
use super::*;

/// Turns of a thread that no play needs.
const PATIENCE: u64 = 40_000_000;

const ADVERSE: [Chances; 3] = [
    Chances { switch: 16, stale: 0, commit: 256, freeze: 2, without: 0 },
    Chances { switch: 64, stale: 64, commit: 24, freeze: 0, without: 0 },
    Chances { switch: 8, stale: 128, commit: 2, freeze: 4, without: 0 },
];

/// Little of everything, so that short calls go by every protocol, in several rounds.
fn table() -> Table {
    let mut table = Table { blocks: 4, depth: 2, ..Table::default() };
    for tuning in &mut table.tunings {
        let bounds = Bounds { narrow: 600, wide: 1800, sharded: 4000 };
        *tuning = Tuning {
            slot: 4096,
            wide: 4096,
            tile_blocks: 2,
            line_blocks: 2,
            line_share: 256,
            parts: 2,
            line_part: 256,
            tile_part: 1024,
            move_slot: 4096,
            broadcast_sends: 6000,
            gather_moves: 900,
            reduce_spares: 3000,
            dealt_from: DealtBounds { allreduce: 2500, reduce: 2500 },
            dealt_to: DealtBounds { allreduce: 4000, reduce: 4000 },
            allreduce: bounds,
            reduce: bounds,
            reduce_scatter: bounds,
            broadcast: bounds,
            swaps: bounds,
            moves: bounds,
            windows_from: WindowBounds { moves: 1, broadcast: 1, allreduce: 1, reduce_scatter: 1 },
            ..*tuning
        };
    }
    table
}

/// What is combined, as far as it is compiled for processors.
const COMBINED: [(DataType, Operator); 7] = [
    (DataType::F32, Operator::Sum),
    (DataType::F32, Operator::Average),
    (DataType::F32, Operator::PreMulSum(0.0)),
    (DataType::Bf16, Operator::Sum),
    (DataType::I32, Operator::Min),
    (DataType::I32, Operator::Average),
    (DataType::I32, Operator::BitXor),
];

/// A call of one of these kinds with `bytes` of input or of a part, as chance has it.
fn any_call(dice: &mut Dice, size: u32, kinds: &[Kind], bytes: [u64; 2]) -> Case {
    let kind = dice.one_of(kinds);
    let (dtype, operator) =
        if kind.reduces() { dice.one_of(&COMBINED) } else { (DataType::U8, Operator::Sum) };
    let element = dtype.size() as u64;
    let bytes = bytes[0] + dice.below(bytes[1] - bytes[0]);
    Case {
        dtype,
        operator,
        root: dice.below(size.into()) as u32,
        in_place: dice.below(3) == 0,
        skew: dice.one_of(&[0, 0, 16, element, 2 * element, 3 * element, 4 * element]),
        apart: dice.one_of(&[0, 0, element, 3 * element, 7 * element]),
        max_blocks: dice.one_of(&[0, 0, 0, 1, 3]),
        ..Case::new(kind, (bytes / element).max(1))
    }
}

/// Plays some calls of a group, again and again, each time in another order: `plays` times, or so many times
/// as often as UNISONO_PLAYS says.
fn check(plays: u64, calls: impl Fn(&mut World, &mut Dice)) {
    check_by(&table(), 0, plays, calls);
}

fn how_often() -> u64 {
    std::env::var("UNISONO_PLAYS").map_or(1, |often| often.parse().expect("a number"))
}

/// [`check`] by another table, without what it does not need: some of [`Weakness`].
fn check_by(table: &Table, without: u32, plays: u64, calls: impl Fn(&mut World, &mut Dice)) {
    for seed in 0..plays * how_often() {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        dice.next();
        let mut world = World::new(dice.one_of(&[2, 2, 3, 3, 4, 5, 8]), *table);
        calls(&mut world, &mut dice);
        let chances = Chances { without, ..ADVERSE[(seed % 3) as usize] };
        let ending = world.play(seed, &chances, PATIENCE);
        assert_eq!(ending, Ending::Well, "seed {seed}: {:?}", world.records());
        assert_eq!(world.differences(), Vec::<String>::new(), "seed {seed}");
    }
}

const REDUCTIONS: [Kind; 4] = [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter, Kind::Broadcast];
const MOVES: [Kind; 4] = [Kind::Allgather, Kind::Alltoall, Kind::Gather, Kind::Scatter];

#[test]
fn lines_bring_what_was_sent() {
    check(12, |world, dice| {
        for _ in 0..4 {
            world.call(any_call(dice, world.size(), &REDUCTIONS, [1, 4000]), dice);
        }
    });
}

#[test]
fn tiles_bring_what_was_sent() {
    check(6, |world, dice| {
        for _ in 0..2 {
            world.call(any_call(dice, world.size(), &REDUCTIONS, [4001, 24_000]), dice);
        }
        // Between two ranks that is one step: the result goes where the input is still being read.
        world.call(Case { in_place: true, ..Case::new(Kind::Allreduce, 4000) }, dice);
    });
}

/// Sums whose pieces are dealt out, beside calls that use the same queues otherwise: alone they are dealt
/// out, in groups they are not.
#[test]
fn pieces_that_are_dealt_out_bring_what_was_sent() {
    let mut table = table();
    let tuning = &mut table.tunings[1];
    tuning.dealt_from = DealtBounds { allreduce: 1000, reduce: 1000 };
    tuning.dealt_to = DealtBounds { allreduce: 24_000, reduce: 24_000 };
    let sums = [(DataType::F32, Operator::Sum), (DataType::Bf16, Operator::Sum)];
    let (dealt, several) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    check_by(&table, 0, 16, |world, dice| {
        for most in [4000, 24_000] {
            let any = |dice: &mut Dice, most| {
                let (dtype, operator) = dice.one_of(&sums);
                let case = any_call(dice, world.size(), &[Kind::Allreduce, Kind::Reduce], [1000, most]);
                Case { dtype, operator, ..case }
            };
            let (sum, group) = (any(dice, most), [(); 3].map(|()| any(dice, 4000)));
            let bytes = sum.count * sum.dtype.size() as u64;
            let plan = Plan::alone(&table, &sum.job(0, [4096, 8192]), world.size(), bytes);
            if let Plan::Combine(plan) = plan
                && plan.protocol() == Protocol::Dealt
            {
                dealt.set(dealt.get() + 1);
                several.set(several.get() + usize::from(plan.items() > 1));
            }
            world.call(sum, dice);
            world.call(any_call(dice, world.size(), &REDUCTIONS, [1, 1800]), dice);
            world.group(&group, dice);
        }
    });
    assert!(
        dealt.get() > 6 && several.get() > 2,
        "{} sums were dealt out, {} by several items",
        dealt.get(),
        several.get()
    );
}

#[test]
fn moves_bring_what_was_sent() {
    check(10, |world, dice| {
        for bytes in [[1, 2000], [1800, 12_000]] {
            world.call(any_call(dice, world.size(), &MOVES, bytes), dice);
        }
        // Between two ranks long broadcasts are sent.
        world.call(any_call(dice, world.size(), &[Kind::Broadcast], [6000, 12_000]), dice);
    });
}

/// Where both are cut alike, tiles that are moved go through the slots of those that are combined.
#[test]
fn what_moves_and_what_is_combined_share_their_slots() {
    let mut table = table();
    for tuning in &mut table.tunings {
        (tuning.tile_blocks, tuning.parts, tuning.move_warps) = (4, 1, 4);
    }
    assert!((2..=8).all(|size| table.layout(size).moves == table.layout(size).inputs));
    check_by(&table, 0, 12, |world, dice| {
        for _ in 0..2 {
            world.call(any_call(dice, world.size(), &REDUCTIONS, [4001, 24_000]), dice);
            world.call(any_call(dice, world.size(), &MOVES, [1801, 24_000]), dice);
            world.exchange(&any_transfers(dice, world.size()), None, dice);
        }
    });
}

/// Sends and receives, several of a pair.
fn any_transfers(dice: &mut Dice, size: u32) -> Vec<(u32, u32, usize)> {
    let transfer = |dice: &mut Dice| {
        let [from, to] = [0, 1].map(|_| dice.below(size.into()) as u32);
        (from, to, dice.one_of(&[1, 100, 600, 601, 1500, 5000, 12_000]))
    };
    (0..8).map(|_| transfer(dice)).collect()
}

/// A call in windows.
fn any_windowed(dice: &mut Dice, size: u32, kinds: &[Kind]) -> Case {
    let case = Case { way: Way::Windowed, ..any_call(dice, size, kinds, [1, 9000]) };
    // At addresses between two elements, too.
    let between = if case.kind.reduces() && dice.below(4) == 0 { case.dtype.size() as u64 / 2 } else { 0 };
    Case { in_place: case.in_place && case.kind != Kind::Alltoall, skew: case.skew + between, ..case }
}

const WINDOWED: [Kind; 5] =
    [Kind::Allreduce, Kind::ReduceScatter, Kind::Broadcast, Kind::Allgather, Kind::Alltoall];

#[test]
fn calls_in_windows_reach_each_others_memory() {
    check(10, |world, dice| {
        for _ in 0..3 {
            world.call(any_windowed(dice, world.size(), &WINDOWED), dice);
        }
    });
}

#[test]
fn broadcasts_by_stages_bring_what_was_sent() {
    check(10, |world, dice| {
        for _ in 0..2 {
            let stages = dice.one_of(&[Stages::One, Stages::Two]);
            let way = Way::Pulled { stages, readable: dice.below(2) == 0, overlap: Overlap::Off };
            let case = any_call(dice, world.size(), &[Kind::Broadcast], [1, 20_000]);
            world.call(Case { way, ..case }, dice);
        }
    });
}

/// Ranks signal whom they like and themselves; each wait ends when all that it and those before it are for
/// have come.
#[test]
fn waits_end_when_their_signals_have_come() {
    for seed in 0..40 {
        let size = 2 + (seed % 3) as u32;
        let (mut dice, mut world) = (Dice(seed + 1), World::new(size, table()));
        let mut sent = [[0; MAX_RANKS]; MAX_RANKS];
        for _ in 0..4 {
            for rank in 0..size {
                let mut counts = Counts::default();
                counts[..size as usize].fill_with(|| dice.below(3) as u32);
                (0..size as usize).for_each(|peer| sent[peer][rank as usize] += counts[peer]);
                world.signal(rank, &counts);
            }
        }
        // In two parts; the second is what the first leaves.
        let mut waits = Vec::new();
        for rank in 0..size {
            let first = sent[rank as usize].map(|count| dice.below(u64::from(count) + 1) as u32);
            let all = sent[rank as usize];
            let rest: Counts = std::array::from_fn(|peer| all[peer] - first[peer]);
            for (counts, least) in [(first, first), (rest, all)] {
                waits.push((rank, counts, least, Box::new([0; 8 * MAX_RANKS])));
            }
        }
        for (rank, counts, _, come) in &mut waits {
            world.await_signals(*rank, counts, come);
        }
        let ending = world.play(seed, &ADVERSE[seed as usize % ADVERSE.len()], PATIENCE);
        assert_eq!(ending, Ending::Well, "seed {seed}: {:?}", world.records());
        for (rank, _, least, come) in &waits {
            let come: Vec<u64> =
                come.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
            for (peer, &least) in least.iter().enumerate() {
                let come = come[peer];
                assert!(come >= least.into(), "seed {seed}: rank {rank} had {come} of {peer}, not {least}");
            }
        }
    }
}

/// Graphs of one rank that signal the same rank, in streams that nothing orders.
#[test]
fn signals_from_streams_beside_each_other_all_count() {
    for seed in 0..40 {
        let mut world = World::new(2, table());
        let mut counts = Counts::default();
        counts[1] = 2;
        world.signal(0, &counts);
        (0..3).for_each(|_| world.signal_beside(0, &counts));
        let mut all = Counts::default();
        all[0] = 8;
        let mut come = [0; 8 * MAX_RANKS];
        world.await_signals(1, &all, &mut come);
        let ending = world.play(seed, &ADVERSE[seed as usize % ADVERSE.len()], PATIENCE);
        assert_eq!(ending, Ending::Well, "seed {seed}: {:?}", world.records());
        assert_eq!(come[..8], 8_u64.to_ne_bytes(), "seed {seed}");
    }
}

/// A wait for what never comes ends when it is told to, and says what it waited for.
#[test]
fn a_wait_for_signals_ends_when_the_host_says_so() {
    let mut world = World::new(2, table());
    let mut counts = Counts::default();
    counts[1] = 3;
    world.await_signals(0, &counts, &mut [0; 8 * MAX_RANKS]);
    assert_eq!(world.play(1, &ADVERSE[0], 20_000), Ending::Aborted);
    let record = world.records()[0].expect("a record");
    assert_eq!(record.describe(0), "signals from rank 1 (#3 between the two, block 0)");
}

#[test]
fn calls_of_all_kinds_follow_each_other() {
    check(20, any_calls);
}

/// Where a link may take lines apart, nothing relies on them.
#[test]
fn without_wide_lines_no_line_has_to_arrive_as_one() {
    check_by(&table().without_wide_lines(), Weakness::Line as u32, 20, any_calls);
}

/// Calls of all kinds, one after the other.
fn any_calls(world: &mut World, dice: &mut Dice) {
    let size = world.size();
    for _ in 0..5 {
        let case = match dice.below(7) {
            0 => any_windowed(dice, size, &WINDOWED),
            1 => {
                let way = Way::Pulled { stages: Stages::Two, readable: false, overlap: Overlap::Off };
                Case { way, ..any_call(dice, size, &[Kind::Broadcast], [1, 3000]) }
            }
            2 | 3 => any_call(dice, size, &MOVES, [1, 3000]),
            _ => any_call(dice, size, &REDUCTIONS, [1, 6000]),
        };
        world.call(case, dice);
        // What the call has told the peers by the way decides whether there is room for several items in a
        // row.
        if dice.below(2) == 0 {
            let [from, to] = [0, 1].map(|_| dice.below(size.into()) as u32);
            world.exchange(&[(from, to, 100); 3], None, dice);
        }
    }
}

/// Calls that tell by the way what they have taken leave room for one item more, and no more.
#[test]
fn items_in_a_row_wait_for_room_after_any_call() {
    let often = Chances { freeze: 24, ..ADVERSE[0] };
    let short = |kind| Case { dtype: DataType::I32, ..Case::new(kind, 20) };
    for case in [
        Case::new(Kind::Allreduce, 20),
        Case { operator: Operator::Min, ..short(Kind::Allreduce) },
        Case { operator: Operator::Min, ..short(Kind::ReduceScatter) },
        Case { dtype: DataType::U8, ..Case::new(Kind::Alltoall, 80) },
        Case { way: Way::Windowed, ..Case::new(Kind::Allreduce, 2000) },
    ] {
        for seed in 0..6 {
            let (mut dice, mut world) = (Dice(seed + 1), World::new(2, table()));
            for _ in 0..3 {
                world.call(case, &mut dice);
                world.exchange(&[(0, 1, 100), (0, 1, 100), (1, 0, 100), (1, 0, 100)], None, &mut dice);
            }
            let ending = world.play(seed, &often, PATIENCE);
            assert_eq!(ending, Ending::Well, "{case:?}, seed {seed}: {:?}", world.records());
            assert_eq!(world.differences(), Vec::<String>::new(), "{case:?}, seed {seed}");
        }
    }
}

/// Everything that orders memory is needed: what plays find when it is left out.
#[test]
fn what_is_left_out_is_missed() {
    type Calls = fn(&mut World, &mut Dice);
    let tiles: Calls = |world, dice| {
        let case = Case::new(Kind::Allreduce, 3000);
        (0..2).for_each(|_| world.call(case, dice));
    };
    let moves: Calls = |world, dice| {
        let case = Case { dtype: DataType::U8, ..Case::new(Kind::Alltoall, 12_000) };
        (0..2).for_each(|_| world.call(case, dice));
    };
    let windows: Calls = |world, dice| {
        let case = Case { way: Way::Windowed, ..Case::new(Kind::Allreduce, 4000) };
        (0..2).for_each(|_| world.call(case, dice));
    };
    let passed_on: Calls = |world, dice| {
        let case = Case { dtype: DataType::U8, ..Case::new(Kind::Broadcast, 30_000) };
        world.call(Case { way: Way::Windowed, ..case }, dice);
    };
    let lines: Calls = |world, dice| {
        let case = Case::new(Kind::Allreduce, 400);
        (0..2).for_each(|_| world.call(case, dice));
    };
    let stages: Calls = |world, dice| {
        let way = Way::Pulled { stages: Stages::Two, readable: false, overlap: Overlap::Off };
        let case = Case { dtype: DataType::U8, way, ..Case::new(Kind::Broadcast, 20_000) };
        world.call(case, dice);
    };
    for (weakness, calls, name) in [
        (Weakness::Release, tiles, "tiles"),
        (Weakness::Release, moves, "moves"),
        (Weakness::Release, passed_on, "passed on"),
        (Weakness::Release, stages, "stages"),
        (Weakness::Acquire, tiles, "tiles"),
        (Weakness::Acquire, moves, "moves"),
        (Weakness::Acquire, stages, "stages"),
        (Weakness::TeamBarrier, tiles, "tiles"),
        (Weakness::WarpBarrier, moves, "moves"),
        (Weakness::BlockBarrier, passed_on, "passed on"),
        (Weakness::BlockBarrier, stages, "stages"),
        (Weakness::Fence, windows, "windows"),
        (Weakness::Line, lines, "lines"),
    ] {
        let missed = (1..20).find(|&seed| {
            let (mut dice, mut world) = (Dice(seed), World::new(3, table()));
            calls(&mut world, &mut dice);
            let chances = Chances { without: weakness as u32, ..ADVERSE[1 + (seed % 2) as usize] };
            world.play(seed, &chances, PATIENCE) != Ending::Well || !world.differences().is_empty()
        });
        assert!(missed.is_some(), "{name} without {weakness:?}");
    }
}
