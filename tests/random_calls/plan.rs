//! Programs from a seed: groups within groups, and what their ranks do in them, step by step.

use crate::support::reference::{Case, Shape};
use crate::support::{Random, mix};
use crate::trouble::{Trouble, trouble};
use unisono::collective::request::Kind;
use unisono::reduce::{DataType, Operator};
use unisono::schedule::{self, Algorithm};

/// A group, by the ranks of the whole, in its order.
#[derive(Debug)]
pub(crate) struct Team {
    pub(crate) members: Vec<u32>,
    pub(crate) made: Made,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    Whole,
    Split,
    Named,
    Duplicate,
}

/// A message between two ranks of a team.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) len: usize,
}

/// What the members of a team do together.
#[derive(Debug)]
pub(crate) enum Act {
    Collective(Case),
    /// One a pair. `any`: of one length, and received from whoever sends.
    Letters {
        letters: Vec<Letter>,
        any: bool,
    },
    /// A group of the same ranks is made, adds, and ends.
    Child(Made),
}

/// What one thread of each member does, behind its steps before this.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) thread: usize,
    pub(crate) team: usize,
    pub(crate) tag: Option<u64>,
    pub(crate) act: Act,
}

/// What all ranks do, and what goes wrong.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) size: u32,
    pub(crate) transports: &'static str,
    /// Ranks of each host that they take themselves to be on; 0: all.
    pub(crate) hosted: u32,
    pub(crate) threads: usize,
    pub(crate) teams: Vec<Team>,
    pub(crate) steps: Vec<Step>,
    pub(crate) trouble: Trouble,
}

impl Program {
    pub(crate) fn new(seed: u64) -> Program {
        let mut random = Random(mix(seed));
        let size = 2 + random.below(4) as u32;
        let transports = ["shm", "tcp", "shm,tcp", "shm,tcp"][random.below(4) as usize];
        let hosted = if transports == "shm,tcp" { random.below(3) as u32 } else { 0 };
        let threads = 1 + random.below(2) as usize;
        let teams = teams(&mut random, size);
        let mut lanes = Vec::new();
        for team in 0..teams.len() {
            for tag in [None, Some(3), Some(u64::MAX / 3)] {
                if tag.is_none() || random.below(3) == 0 {
                    lanes.push((random.below(threads as u64) as usize, team, tag));
                }
            }
        }
        let mut steps = Vec::new();
        for at in 0..8 + random.below(25) as usize {
            let (thread, team, tag) = lanes[random.below(lanes.len() as u64) as usize];
            let members = teams[team].members.len() as u32;
            let (tag, act) = match random.below(10) {
                0..2 if members > 1 => letters(&mut random, members, thread, at),
                // Groups are made by one thread.
                2 if thread == 0 => {
                    let made = [Made::Duplicate, Made::Split, Made::Named][random.below(3) as usize];
                    (tag, Act::Child(made))
                }
                _ => (tag, Act::Collective(case(&mut random, members))),
            };
            steps.push(Step { thread, team, tag, act });
        }
        let mut program =
            Program { seed, size, transports, hosted, threads, teams, steps, trouble: Trouble::Nothing };
        program.trouble = trouble(&mut random, &program);
        program
    }

    pub(crate) fn team(&self, at: usize) -> &Team {
        &self.teams[self.steps[at].team]
    }

    pub(crate) fn is_collective(&self, at: usize) -> bool {
        matches!(self.steps[at].act, Act::Collective(_))
    }
}

/// The whole, and some others.
fn teams(random: &mut Random, size: u32) -> Vec<Team> {
    let mut teams = vec![Team { members: (0..size).collect(), made: Made::Whole }];
    for _ in 0..random.below(3) {
        let made = [Made::Duplicate, Made::Split, Made::Named][random.below(3) as usize];
        let mut members: Vec<u32> = (0..size).collect();
        if made != Made::Duplicate {
            shuffle(random, &mut members);
            members.truncate(1 + random.below(u64::from(size)) as usize);
        }
        teams.push(Team { members, made });
    }
    teams
}

fn shuffle<T>(random: &mut Random, list: &mut [T]) {
    for last in (1..list.len()).rev() {
        list.swap(last, random.below(last as u64 + 1) as usize);
    }
}

fn letters(random: &mut Random, members: u32, thread: usize, at: usize) -> (Option<u64>, Act) {
    let any = random.below(4) == 0;
    let len = |random: &mut Random| bytes(random) as usize;
    let alike = len(random);
    let mut letters = Vec::new();
    for from in 0..members {
        for to in (0..members).filter(|&to| to != from) {
            if random.below(2) == 0 {
                letters.push(Letter { from, to, len: if any { alike } else { len(random) } });
            }
        }
    }
    let own = any || random.below(2) == 0;
    (Some(if own { 1000 + at as u64 } else { thread as u64 }), Act::Letters { letters, any })
}

/// A number of bytes: none, few, some, or rarely many.
pub(crate) fn bytes(random: &mut Random) -> u64 {
    let most = match random.below(16) {
        0 => 1,
        1..6 => 200,
        6..10 => 5_000,
        10..13 => 70_000,
        13..15 => 600_000,
        _ => 5_000_000,
    };
    random.below(most)
}

pub(crate) const KINDS: [Kind; 9] = [
    Kind::Allreduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::Allgather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::Alltoall,
    Kind::Barrier,
];

pub(crate) fn operator(random: &mut Random, dtype: DataType) -> Operator {
    use Operator::{Average, BitAnd, BitOr, BitXor, Max, Min, Product, Sum};
    let operators = [Sum, Product, Min, Max, Average, BitAnd, BitOr, BitXor];
    operators[random.below(if dtype.is_float() { 5 } else { 8 }) as usize]
}

fn case(random: &mut Random, members: u32) -> Case {
    let kind = KINDS[random.below(KINDS.len() as u64) as usize];
    let dtype = DataType::ALL[random.below(DataType::ALL.len() as u64) as usize];
    let blocks = !matches!(kind, Kind::Allreduce | Kind::Reduce | Kind::Broadcast | Kind::Barrier);
    let count = |random: &mut Random| {
        let bytes = bytes(random) / if blocks { u64::from(members) } else { 1 };
        bytes / dtype.size() as u64
    };
    let pairs = if kind == Kind::Alltoall { members * members } else { members };
    let counts = match random.below(3) {
        0 if blocks => Shape::Uneven((0..pairs).map(|_| count(random)).collect()),
        _ => Shape::Even(count(random)),
    };
    let named = random.below(5) == 0 && members > 1 && matches!(counts, Shape::Even(_));
    Case {
        operator: operator(random, dtype),
        root: random.below(members.into()) as u32,
        algorithm: named.then(|| algorithm(random, kind)),
        in_place: random.below(3) == 0,
        skew: if random.below(3) == 0 { random.below(16) as usize } else { 0 },
        dtype,
        counts,
        ..Case::new(kind, 0)
    }
}

pub(crate) fn algorithm(random: &mut Random, kind: Kind) -> Algorithm {
    let shaped = schedule::Kind::ALL.into_iter().find(|shaped| shaped.name() == kind.name());
    let shaped = shaped.expect("every collective has schedules");
    let able: Vec<Algorithm> =
        Algorithm::ALL.into_iter().filter(|one| one.serves(shaped) && *one != Algorithm::Local).collect();
    able[random.below(able.len() as u64) as usize]
}
