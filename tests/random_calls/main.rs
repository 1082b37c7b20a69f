//! Random calls: ranks call whatever, in groups within groups, from several threads, and one of them aborts,
//! gives up, calls something else, leaves or is lost. All calls end, what ends well is right, what fails says
//! why, and what it does not concern goes on. `UNISONO_CALLS_SEEDS=1000..1100 cargo test --test random_calls`
//! tries others than the few that are tried each time; `UNISONO_CALLS_TOLD=1` tells each program before it is
//! played.

mod check;
mod deal;
mod plan;
mod play;
#[path = "../support/mod.rs"]
mod support;
mod table;
mod trouble;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use check::{check, hear, look_back, settle};
use plan::{Act, Program, Step};
use play::{gather, perform};
use support::processes::{Job, Seat, enter, report};
use support::reference::Case;
use support::{PATIENCE, Random, mix, options, sum};
use table::Table;
use trouble::{FAR, Fate, Trouble};
use unisono::collective::request::Kind;
use unisono::communicator::{Context, Options};
use unisono::rendezvous::hash::HashStore;
use unisono::rendezvous::store::Store;

/// The seeds of each time: among so few, all that can go wrong does.
const THREADS: Range<u64> = 454..484;
const PROCESSES: Range<u64> = 20..24;

/// The seed, for the process of a rank.
const SEED: &str = "UNISONO_CALLS_SEED";

#[test]
fn rank() {
    enter(&[("random calls", play_on)]);
}

#[test]
fn whatever_goes_wrong_calls_end_and_are_right_or_say_why() {
    for seed in seeds(THREADS) {
        let played = catch_unwind(|| play(seed));
        assert!(played.is_ok(), "seed {seed}");
    }
}

#[test]
fn whoever_is_lost_is_named_by_all_others() {
    for seed in seeds(PROCESSES) {
        let program = lossy(seed);
        let Trouble::Lose { rank, killed } = program.trouble else { unreachable!("a rank is lost") };
        let all: Vec<u32> = (0..program.size).collect();
        let others: Vec<u32> = all.iter().copied().filter(|&other| other != rank).collect();
        println!("seed {seed}, {} ranks over {}, rank {rank} is lost", program.size, program.transports);
        let more = [(SEED, &*seed.to_string())];
        let mut job = Job::start_with("random calls", program.size, program.transports, &more);
        job.await_all(&all, "playing");
        std::thread::sleep(Duration::from_micros(Random(seed).below(60_000)));
        job.signal(rank, if killed { libc::SIGKILL } else { libc::SIGSTOP });
        job.await_all(&others, "over");
        job.all_end_well(&others);
    }
}

/// Those that are asked for, or the few of each time.
fn seeds(few: Range<u64>) -> Range<u64> {
    let Ok(asked) = std::env::var("UNISONO_CALLS_SEEDS") else { return few };
    let (first, end) = asked.split_once("..").expect("as in 1000..1100");
    first.parse().expect("a number")..end.parse().expect("a number")
}

// ---- ranks as threads

/// All ranks, a thread each.
fn play(seed: u64) {
    let table = Table::new(Program::new(seed));
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    if std::env::var_os("UNISONO_CALLS_TOLD").is_some() {
        println!("{:#?}", table.program);
    }
    let (tell, told) = channel();
    for rank in 0..table.program.size {
        let (table, store, tell) = (table.clone(), store.clone(), tell.clone());
        std::thread::spawn(move || {
            let played = catch_unwind(AssertUnwindSafe(|| sit(rank, &table, &store)));
            if played.is_err() {
                table.call_off();
            }
            let _ = tell.send(played.is_ok());
        });
    }
    let mut well = true;
    for _ in 0..table.program.size {
        let left = PATIENCE.saturating_sub(table.began.elapsed());
        let Ok(played) = told.recv_timeout(left) else {
            panic!("seed {seed} does not end, {:?}:\n{}", table.program.trouble, table.dump());
        };
        well &= played;
    }
    assert!(well, "seed {seed}, {:?}", table.program.trouble);
    check(&table);
}

/// One rank, from its first group to its last.
fn sit(rank: u32, table: &Arc<Table>, store: &Arc<dyn Store>) {
    let program = &table.program;
    let create = |name: &str| {
        let host = (program.hosted > 0).then(|| format!("host {}", rank / program.hosted));
        let options = options(rank, program.size, store.clone(), program.transports);
        let options = Options { name: name.into(), timeout: FAR, host, ..options };
        Context::create(options).expect("the ranks meet")
    };
    gather(rank, table, create);
    table.meet();
    let players = perform(rank, table);
    table.note(rank, 0, || "meets at the end".into());
    table.meet();
    settle(rank, table);
    table.meet();
    look_back(&players);
    drop(players);
    table.contexts.lock().expect("no panic").retain(|(of, _), _| *of != rank);
    table.note(rank, 0, || "makes a new group".into());
    let again = create("again");
    let mut data = [rank as f32; 1000];
    sum(&again, &mut data);
    assert_eq!(data[999], (program.size * (program.size - 1) / 2) as f32);
    table.note(rank, 0, || "is done".into());
}

// ---- ranks as processes, one of which is lost

/// Programs that a rank does not outlive, the same in all processes.
fn lossy(seed: u64) -> Program {
    let mut program = Program::new(seed);
    let mut random = Random(mix(!seed));
    let rank = random.below(program.size.into()) as u32;
    let killed = random.below(8) != 0;
    program.trouble = Trouble::Lose { rank, killed };
    if !killed {
        // Who waits for one group keeps those waiting who call another.
        program.steps.retain(|step| step.team == 0 && matches!(step.act, Act::Collective(_)));
        program.steps.push(Step {
            thread: 0,
            team: 0,
            tag: Some(5),
            act: Act::Collective(Case::new(Kind::Barrier, 0)),
        });
    }
    program
}

/// Plays again and again, until something has failed.
fn play_on(seat: &Seat) {
    let seed = std::env::var(SEED).expect("it is set").parse().expect("a number");
    let table = Table::new(lossy(seed));
    let program = &table.program;
    let Trouble::Lose { rank: lost, killed } = program.trouble else { unreachable!("a rank is lost") };
    let host = (program.hosted > 0).then(|| format!("host {}", seat.rank / program.hosted));
    let create = |name: &str| {
        let options = Options { timeout: FAR, host: host.clone(), ..seat.options(name) };
        Context::create(options).expect("the ranks meet")
    };
    gather(seat.rank, &table, create);
    report("playing");
    let is_over = |team: usize| {
        let of_lost = program.teams[team].members.contains(&lost);
        !of_lost || table.context(seat.rank, team).is_none_or(|context| context.failure().is_some())
    };
    let mut played = Vec::new();
    while !table.outcomes.lock().expect("no panic").iter().any(|outcome| outcome.error.is_some()) {
        table.outcomes.lock().expect("no panic").clear();
        played = perform(seat.rank, &table);
        // A program that does not need the lost rank would not end.
        if killed && (0..program.teams.len()).all(is_over) {
            break;
        }
    }
    for team in 0..program.teams.len() {
        let Some(context) = table.context(seat.rank, team) else { continue };
        let told = killed && program.teams[team].members.contains(&lost);
        let failure = if told { hear(&context) } else { context.failure() };
        let fate = program.fate(team, seat.rank);
        assert!(failure.is_some() || !told, "team {team} goes on without rank {lost}");
        assert!(failure.iter().all(|error| Fate::is(&fate, error)), "{failure:?}; may be {fate:?}");
    }
    look_back(&played);
    table.contexts.lock().expect("no panic").clear();
    if killed && program.size > 2 {
        let rank = seat.rank - u32::from(seat.rank > lost);
        let again = Options { rank, size: program.size - 1, host, ..seat.options("again") };
        let again = Context::create(again).expect("the others meet");
        let mut data = [1.0f32; 100];
        sum(&again, &mut data);
        assert_eq!(data[99], (program.size - 1) as f32);
    }
    report("over");
}
