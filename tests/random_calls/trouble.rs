//! What goes wrong in a program, and what that allows.

use std::time::Duration;

use crate::plan::{Act, KINDS, Program, algorithm, bytes, operator};
use crate::support::Random;
use crate::support::reference::{Case, Shape};
use unisono::collective::request::Kind;
use unisono::error::{Error, Status};
use unisono::reduce::{DataType, Operator};

/// The deadline of calls. Nothing is to end by it: that is found to hang before.
pub(crate) const FAR: Duration = Duration::from_secs(180);

/// The deadline of calls that a rank never makes, since it has left their group alone.
const NEAR: Duration = Duration::from_millis(400);

/// The deadline of calls where a rank is stopped.
const STOPPED: Duration = Duration::from_secs(3);

/// What goes wrong, if anything does. Ranks are the whole's.
#[derive(Debug)]
pub(crate) enum Trouble {
    Nothing,
    /// A rank is late.
    Late {
        rank: u32,
        at: usize,
        by: Duration,
    },
    /// A rank ends a team, so long after it has come to a step.
    Abort {
        rank: u32,
        team: usize,
        at: usize,
        after: Option<Duration>,
    },
    /// A rank cancels what it has in a step.
    Cancel {
        rank: u32,
        at: usize,
    },
    /// A rank does not wait for long in a step.
    Hasty {
        rank: u32,
        at: usize,
        timeout: Duration,
    },
    /// A rank calls this in a step.
    Differ {
        rank: u32,
        at: usize,
        case: Case,
    },
    /// A rank is gone from a step on, from one team or all.
    Leave {
        rank: u32,
        at: usize,
        team: Option<usize>,
    },
    /// The process of a rank is killed, or else stopped, at any moment.
    Lose {
        rank: u32,
        killed: bool,
    },
}

/// How a group fails: one of these, and what all texts say.
#[derive(Debug)]
pub(crate) struct Fate {
    statuses: &'static [Status],
    words: String,
}

impl Fate {
    pub(crate) fn is(fate: &Option<Fate>, error: &Error) -> bool {
        fate.as_ref()
            .is_some_and(|fate| fate.statuses.contains(&error.status()) && error.text().contains(&fate.words))
    }
}

/// Something that can go wrong in a program.
pub(crate) fn trouble(random: &mut Random, program: &Program) -> Trouble {
    let at = random.below(program.steps.len() as u64) as usize;
    let team = program.steps[at].team;
    let members = &program.teams[team].members;
    let rank = members[random.below(members.len() as u64) as usize];
    let several = members.len() > 1;
    let collective = program.is_collective(at);
    // A message of the step is the only one under its tag, and its ends are known.
    let own = program.steps[at].tag == Some(1000 + at as u64);
    let letters = matches!(program.steps[at].act, Act::Letters { any: false, .. }) && own;
    let micros = |random: &mut Random, most: u64| Duration::from_micros(random.below(most));
    match random.below(16) {
        0 => Trouble::Late { rank, at, by: micros(random, 100_000) },
        1..4 => {
            let after = (random.below(2) == 0).then(|| micros(random, 4000));
            Trouble::Abort { rank, team, at, after }
        }
        4..6 if collective || letters => Trouble::Cancel { rank, at },
        6..9 if several && (collective || letters) => {
            let timeout = [1, 100, 1000, 5000, 30_000][random.below(5) as usize];
            Trouble::Hasty { rank, at, timeout: Duration::from_micros(timeout) }
        }
        9..12 if several && collective => {
            let case = other(random, program.case(rank, at), members.len() as u32);
            Trouble::Differ { rank, at, case }
        }
        12..14 => Trouble::Leave { rank, at, team: None },
        14 if several && team > 0 => Trouble::Leave { rank, at, team: Some(team) },
        _ => Trouble::Nothing,
    }
}

/// Another call than `case`.
fn other(random: &mut Random, case: &Case, members: u32) -> Case {
    let mut other = case.clone();
    loop {
        match random.below(6) {
            0 => {
                other.kind = KINDS[random.below(KINDS.len() as u64) as usize];
                other.counts = Shape::Even(bytes(random) / 8 / u64::from(members));
                other.algorithm = None;
            }
            1 => other.dtype = DataType::ALL[random.below(DataType::ALL.len() as u64) as usize],
            2 if case.kind.reduces() => other.operator = operator(random, case.dtype),
            3 if case.kind.rooted() => other.root = random.below(members.into()) as u32,
            4 => match &mut other.counts {
                Shape::Even(count) => *count += 1 + random.below(3),
                Shape::Uneven(counts) if matches!(case.kind, Kind::Allgather | Kind::ReduceScatter) => {
                    counts[random.below(members.into()) as usize] += 1;
                }
                Shape::Uneven(_) => {}
            },
            5 if matches!(case.counts, Shape::Even(_)) => {
                other.algorithm = Some(algorithm(random, case.kind));
            }
            _ => {}
        }
        let bits = matches!(other.operator, Operator::BitAnd | Operator::BitOr | Operator::BitXor);
        let valid = !(bits && other.dtype.is_float() && other.kind.reduces());
        let barriers = other.kind == Kind::Barrier && case.kind == Kind::Barrier;
        let differs = other.kind != case.kind
            || other.algorithm != case.algorithm
            || !barriers && (other.dtype != case.dtype || format!("{other:?}") != format!("{case:?}"));
        if valid && differs {
            return other;
        }
        other = case.clone();
    }
}

impl Program {
    /// Whether a rank comes to a step.
    pub(crate) fn comes(&self, rank: u32, at: usize) -> bool {
        let stays = match self.trouble {
            Trouble::Leave { rank: gone, at: from, team } => {
                gone != rank || at < from || team.is_some_and(|team| team != self.steps[at].team)
            }
            _ => true,
        };
        stays && self.team(at).members.contains(&rank)
    }

    /// Whether its children are never made whole: a rank has left it.
    pub(crate) fn is_childless(&self, at: usize) -> bool {
        match self.trouble {
            Trouble::Leave { at: from, team: Some(team), .. } => at >= from && team == self.steps[at].team,
            _ => false,
        }
    }

    /// Whether a rank has a team until the end.
    pub(crate) fn stays(&self, rank: u32, team: usize) -> bool {
        match self.trouble {
            Trouble::Leave { rank: gone, team: of, .. } => gone != rank || of.is_some_and(|of| of != team),
            _ => true,
        }
    }

    /// How a team may fail, as `here` hears of it. `None`: it does not.
    pub(crate) fn fate(&self, team: usize, here: u32) -> Option<Fate> {
        let place = |rank: &u32| self.teams[team].members.iter().position(|member| member == rank);
        let fate = |statuses, words| Some(Fate { statuses, words });
        match &self.trouble {
            Trouble::Abort { rank, team: of, .. } if *of == team => {
                fate(&[Status::Aborted], format!("rank {} aborted '", place(rank)?))
            }
            // There it tells of those that it has waited for.
            Trouble::Hasty { rank, at, .. } if self.is_collective(*at) && self.steps[*at].team == team => {
                let here = *rank == here;
                fate(&[Status::Timeout], if here { String::new() } else { format!("rank {} ", place(rank)?) })
            }
            Trouble::Differ { rank, at, .. } if self.steps[*at].team == team => {
                fate(&[Status::Mismatch], format!("rank {} called", place(rank)?))
            }
            Trouble::Leave { rank, team: None, .. } => {
                fate(&[Status::PeerFailed], format!("rank {} (", place(rank)?))
            }
            // By its number in the whole, whatever it is here.
            Trouble::Lose { rank, killed: true } => {
                place(rank)?;
                fate(&[Status::PeerFailed], format!("rank {rank} ("))
            }
            Trouble::Lose { rank, killed: false } => {
                fate(&[Status::Timeout], format!("rank {} (", place(rank)?))
            }
            // Nobody is told, but whoever has something for it.
            Trouble::Leave { rank, team: Some(of), .. } if *of == team => {
                fate(&[Status::Timeout, Status::PeerFailed], format!("rank {} (", place(rank)?))
            }
            _ => None,
        }
    }

    /// Whether the messages of a step may fail by themselves.
    pub(crate) fn fails_letters(&self, at: usize) -> bool {
        match self.trouble {
            Trouble::Hasty { at: of, .. } | Trouble::Cancel { at: of, .. } => of == at,
            Trouble::Leave { team, at: from, .. } => {
                // Who receives from whoever sends waits for the others.
                let any = matches!(self.steps[at].act, Act::Letters { any: true, .. });
                at >= from && team.map_or(any, |team| team == self.steps[at].team)
            }
            _ => false,
        }
    }

    /// The deadline of a call.
    pub(crate) fn timeout(&self, rank: u32, at: usize) -> Duration {
        match self.trouble {
            Trouble::Hasty { rank: hasty, at: of, timeout } if (hasty, of) == (rank, at) => timeout,
            _ if self.fails_letters(at) && !self.is_collective(at) => NEAR,
            _ if self.is_childless(at) => NEAR,
            Trouble::Lose { killed: false, .. } => STOPPED,
            _ => FAR,
        }
    }

    /// What a rank calls in a step.
    pub(crate) fn case(&self, rank: u32, at: usize) -> &Case {
        match (&self.trouble, &self.steps[at].act) {
            (Trouble::Differ { rank: odd, at: of, case }, _) if (*odd, *of) == (rank, at) => case,
            (_, Act::Collective(case)) => case,
            _ => unreachable!("step {at} is no collective"),
        }
    }

    /// Whether a call that fails since another differs has not written anything. It may have if it is another
    /// call of the group that fails, if it is a long one that moves the root's blocks, or one of lists that
    /// differ from rank to rank.
    pub(crate) fn keeps_output(&self, rank: u32, at: usize) -> bool {
        let Trouble::Differ { at: of, .. } = self.trouble else { return false };
        if of != at {
            return false;
        }
        let case = self.case(rank, at);
        match case.kind {
            Kind::Broadcast | Kind::Scatter => false,
            Kind::Gather | Kind::Alltoall => matches!(case.counts, Shape::Even(_)),
            _ => true,
        }
    }
}
