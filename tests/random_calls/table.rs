//! What all ranks share.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use crate::plan::Program;
use unisono::communicator::Context;
use unisono::error::Error;

/// How a call has ended on a rank.
pub(crate) struct Outcome {
    pub(crate) at: usize,
    pub(crate) rank: u32,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) error: Option<Error>,
}

#[derive(Default)]
struct Meeting {
    come: u32,
    round: u32,
    off: bool,
}

pub(crate) struct Table {
    pub(crate) program: Program,
    pub(crate) began: Instant,
    meeting: Mutex<Meeting>,
    met: Condvar,
    /// By rank and team.
    pub(crate) contexts: Mutex<HashMap<(u32, usize), Context>>,
    pub(crate) failures: Mutex<HashMap<(u32, usize), Error>>,
    doing: Mutex<HashMap<(u32, usize), (Instant, String)>>,
    pub(crate) outcomes: Mutex<Vec<Outcome>>,
}

impl Table {
    pub(crate) fn new(program: Program) -> Arc<Table> {
        Arc::new(Table {
            program,
            began: Instant::now(),
            meeting: Mutex::default(),
            met: Condvar::new(),
            contexts: Mutex::default(),
            failures: Mutex::default(),
            doing: Mutex::default(),
            outcomes: Mutex::default(),
        })
    }

    /// All ranks come here before any goes on.
    pub(crate) fn meet(&self) {
        let mut meeting = self.meeting.lock().expect("no panic");
        meeting.come += 1;
        let round = meeting.round;
        if meeting.come == self.program.size {
            *meeting = Meeting { come: 0, round: round + 1, ..*meeting };
            self.met.notify_all();
        }
        while meeting.round == round && !meeting.off {
            meeting = self.met.wait(meeting).expect("no panic");
        }
        let off = meeting.off;
        drop(meeting);
        assert!(!off, "another rank has failed");
    }

    /// A rank has found something wrong: nobody waits for it.
    pub(crate) fn call_off(&self) {
        if let Ok(mut meeting) = self.meeting.lock() {
            meeting.off = true;
        }
        self.met.notify_all();
        let contexts: Vec<Context> =
            self.contexts.lock().map(|all| all.values().cloned().collect()).unwrap_or_default();
        contexts.iter().for_each(Context::abort);
    }

    pub(crate) fn context(&self, rank: u32, team: usize) -> Option<Context> {
        self.contexts.lock().expect("no panic").get(&(rank, team)).cloned()
    }

    pub(crate) fn note(&self, rank: u32, thread: usize, what: impl FnOnce() -> String) {
        let now = Instant::now();
        self.doing.lock().expect("no panic").insert((rank, thread), (now, what()));
    }

    /// What is going on.
    pub(crate) fn dump(&self) -> String {
        let mut lines = Vec::new();
        for ((rank, thread), (since, what)) in &*self.doing.lock().expect("no panic") {
            lines.push(format!("rank {rank}, thread {thread}, for {:.1?}: {what}", since.elapsed()));
        }
        for ((rank, team), context) in &*self.contexts.lock().expect("no panic") {
            lines.push(format!("rank {rank}, team {team}: {:?}", context.failure()));
        }
        lines.sort();
        lines.join("\n")
    }
}
