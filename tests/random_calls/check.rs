//! Whether what has come of a program is what may.

use std::time::{Duration, Instant};

use crate::deal::Deal;
use crate::plan::Program;
use crate::play::{Player, REUSED};
use crate::support::{PATIENCE, Verb};
use crate::table::{Outcome, Table};
use crate::trouble::{FAR, Fate, Trouble};
use unisono::collective::request::Kind;
use unisono::communicator::{Call, Context};
use unisono::error::{Error, Status};

impl Player {
    /// Whether a call may fail so.
    pub(crate) fn check_failure(&self, at: usize, what: &str, error: &Error) {
        let program = &self.table.program;
        let team = program.steps[at].team;
        let fate = program.fate(team, self.rank);
        let of_team = Fate::is(&fate, error);
        assert!(!error.text().contains('\n'), "{what}: {error}");
        if program.is_collective(at) {
            assert!(of_team, "{what}: {error:?}; may be {fate:?}");
            let failure = self.teams[team].as_ref().map(|context| context.failure());
            if let Some(failure) = failure {
                let failure = failure.unwrap_or_else(|| panic!("{what}: {error:?}, but its group goes on"));
                assert!(
                    error.text().contains(failure.text()),
                    "{what}: {error:?}, of a group with {failure:?}"
                );
            }
            return;
        }
        // The other end may have gone first.
        let peer = error.status() == Status::PeerFailed && error.text().contains("rank ");
        let alone = match (&program.trouble, error.status()) {
            _ if !program.fails_letters(at) => false,
            (Trouble::Cancel { rank, .. }, Status::Aborted) => *rank == self.rank,
            (_, Status::Timeout) => true,
            _ => peer,
        };
        assert!(of_team || alone || fate.is_some() && peer, "{what}: {error:?}; may be {fate:?}");
    }

    /// Whether a child of a step's group may fail so.
    pub(crate) fn check_child(&self, at: usize, what: &str, error: &Error) {
        let program = &self.table.program;
        let fate = program.fate(program.steps[at].team, self.rank);
        assert!(Fate::is(&fate, error), "{what}: {error:?}; may be {fate:?}");
    }
}

/// Nothing of failed calls is written any more.
pub(crate) fn look_back(players: &[Player]) {
    for (what, bytes) in players.iter().flat_map(|player| &player.reused) {
        let touched = bytes.iter().position(|&byte| byte != REUSED);
        assert!(touched.is_none(), "{what} has failed, and byte {touched:?} was written after that");
    }
}

/// A group has failed on all of its ranks, or goes on.
pub(crate) fn settle(rank: u32, table: &Table) {
    let program = &table.program;
    let teams: Vec<(usize, Context)> =
        (0..program.teams.len()).filter_map(|team| Some((team, table.context(rank, team)?))).collect();
    for (team, context) in &teams {
        if let Some(error) = context.failure() {
            table.failures.lock().expect("no panic").insert((rank, *team), error);
        }
    }
    table.meet();
    let failed = table.failures.lock().expect("no panic").clone();
    table.meet();
    for (team, context) in &teams {
        let others: Vec<&Error> =
            failed.iter().filter(|((_, of), _)| of == team).map(|(_, error)| error).collect();
        table.note(rank, 0, || format!("looks at team {team}, which has failed with {others:?}"));
        let fate = program.fate(*team, rank);
        if let Some(first) = others.first() {
            let error = hear(context).unwrap_or_else(|| {
                panic!("rank {rank} does not hear that team {team} has failed: {first}");
            });
            assert!(Fate::is(&fate, &error), "rank {rank}, team {team}: {error:?}; may be {fate:?}");
            table.failures.lock().expect("no panic").insert((rank, *team), error);
            continue;
        }
        // Who has left takes no part.
        if fate.is_some() && matches!(program.trouble, Trouble::Leave { .. }) {
            continue;
        }
        table.note(rank, 0, || format!("calls team {team} once more"));
        let mut data = [1.0f32; 5000];
        let call = Call { timeout: Some(FAR), ..Call::default() };
        match Verb::new(Kind::Allreduce, 5000).run_in(context, &mut data, &call) {
            Ok(_) => assert_eq!(data, [context.size() as f32; 5000]),
            // It hears only now that the calls have differed.
            Err(error) => {
                let late = matches!(program.trouble, Trouble::Differ { .. });
                assert!(
                    late && Fate::is(&fate, &error),
                    "rank {rank}, team {team}, at the end: {error:?}; may be {fate:?}"
                );
            }
        }
    }
}

/// The failure of a group, when this rank has heard of it. `None`: it does not.
pub(crate) fn hear(context: &Context) -> Option<Error> {
    let until = Instant::now() + PATIENCE / 4;
    while context.failure().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    context.failure()
}

/// What can be said of all ranks together.
pub(crate) fn check(table: &Table) {
    let program = &table.program;
    let outcomes = table.outcomes.lock().expect("no panic");
    let failures = table.failures.lock().expect("no panic");
    for (at, step) in program.steps.iter().enumerate().filter(|(at, _)| program.is_collective(*at)) {
        for &rank in &program.teams[step.team].members {
            let Some(outcome) = find(&outcomes, rank, at) else {
                assert!(!program.comes(rank, at), "step {at} has not ended on rank {rank}");
                continue;
            };
            let Some(error) = &outcome.error else {
                check_success(program, outcome, &outcomes);
                continue;
            };
            let unknown = program.teams[step.team].members.iter().find(|&&member| {
                program.stays(member, step.team) && !failures.contains_key(&(member, step.team))
            });
            assert!(unknown.is_none(), "step {at}: {error}, but rank {unknown:?} has not heard of it");
        }
    }
    // The same cause everywhere, where there is one.
    for team in 0..program.teams.len() {
        let texts: Vec<&str> =
            failures.iter().filter(|((_, of), _)| *of == team).map(|(_, error)| error.text()).collect();
        let Some(shortest) = texts.iter().min_by_key(|text| text.len()) else { continue };
        if matches!(program.trouble, Trouble::Abort { .. } | Trouble::Hasty { .. }) {
            let same = texts.iter().all(|text| text.ends_with(shortest));
            assert!(same, "team {team} has failed for several causes: {texts:#?}");
        }
    }
}

fn find(outcomes: &[Outcome], rank: u32, at: usize) -> Option<&Outcome> {
    outcomes.iter().find(|outcome| (outcome.rank, outcome.at) == (rank, at))
}

/// A collective ends well only when those whose data it needs have called the same.
fn check_success(program: &Program, outcome: &Outcome, outcomes: &[Outcome]) {
    let Outcome { at, rank, .. } = *outcome;
    let members = &program.team(at).members;
    let place = members.iter().position(|&member| member == rank).expect("a member");
    let case = program.case(rank, at);
    let deal = Deal { case, salt: 0, rank: place as u32, size: members.len() as u32 };
    for needed in deal.needs() {
        let needed = members[needed as usize];
        let what = format!("step {at} has ended well on rank {rank}, {case:?}, but rank {needed}");
        let Some(theirs) = find(outcomes, needed, at) else { panic!("{what} never calls it") };
        assert!(theirs.began <= outcome.ended, "{what} calls it later");
        let refused = theirs.error.as_ref().filter(|error| error.text().contains("is refused"));
        assert!(refused.is_none(), "{what} was refused it: {refused:?}");
        if let Trouble::Differ { rank: odd, at: when, case: other } = &program.trouble
            && *when == at
        {
            assert!(rank != *odd && needed != *odd, "{what} calls something else, or not: {other:?}");
        }
    }
}
