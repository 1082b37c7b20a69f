//! A rank that plays a program.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::deal::{Deal, Memory, noise, tile};
use crate::plan::{Act, Letter, Made};
use crate::support::{Random, Verb, mix};
use crate::table::{Outcome, Table};
use crate::trouble::{FAR, Trouble};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Completion, Context, Work};
use unisono::deadline::Deadline;
use unisono::error::{Result, Status};
use unisono::reduce::DataType;

/// What is in a caller's memory once a call on it has failed.
pub(crate) const REUSED: u8 = 0x5a;

/// A call under way.
struct Going {
    at: usize,
    what: String,
    memory: Memory,
    began: Instant,
    by: By,
    /// Of what is received from anybody: what it may be, by sender.
    any: Vec<(u32, Vec<u8>)>,
}

impl Going {
    fn new(at: usize, what: String, memory: Memory) -> Going {
        Going { at, what, memory, began: Instant::now(), by: By::Nobody, any: Vec::new() }
    }
}

/// Who tells that a call has ended.
enum By {
    Nobody,
    Work(Work),
    Callback(Receiver<Result<Completion>>),
}

impl By {
    /// Whoever has called it forgets the handle.
    fn forget(&mut self) {
        if let By::Work(work) = self {
            let (tell, told) = channel();
            work.on_complete(Box::new(move |result| drop(tell.send(result))));
            *self = By::Callback(told);
        }
    }
}

/// One thread of a rank.
pub(crate) struct Player {
    pub(crate) table: Arc<Table>,
    pub(crate) rank: u32,
    thread: usize,
    random: Random,
    pub(crate) teams: Vec<Option<Context>>,
    going: Vec<Going>,
    pub(crate) reused: Vec<(String, Vec<u8>)>,
    helpers: Vec<std::thread::JoinHandle<()>>,
}

impl Player {
    fn new(table: &Arc<Table>, rank: u32, thread: usize) -> Player {
        let program = &table.program;
        let teams = (0..program.teams.len()).map(|team| table.context(rank, team)).collect();
        let random = Random(mix(program.seed << 16 | u64::from(rank) << 8 | thread as u64));
        let (going, reused, helpers) = Default::default();
        Player { table: table.clone(), rank, thread, random, teams, going, reused, helpers }
    }

    fn play(mut self) -> Player {
        let table = self.table.clone();
        let program = &table.program;
        for (at, step) in program.steps.iter().enumerate() {
            self.leave(at);
            if step.thread != self.thread || !program.comes(self.rank, at) {
                continue;
            }
            self.be_late(at);
            table.note(self.rank, self.thread, || format!("step {at}, {step:?}"));
            self.abort(at, false);
            match &step.act {
                Act::Collective(_) => self.collective(at),
                Act::Letters { letters, any } => self.letters(at, letters, *any),
                Act::Child(made) if !program.is_childless(at) => self.child(at, *made),
                Act::Child(_) => {}
            }
            self.abort(at, true);
            if self.random.below(3) == 0 && !self.going.is_empty() {
                self.finish_one();
            }
        }
        self.leave(program.steps.len());
        self.end();
        self
    }

    /// Waits for all that is under way.
    fn end(&mut self) {
        while !self.going.is_empty() {
            self.finish_one();
        }
        self.table.note(self.rank, self.thread, || "all has ended".into());
        self.helpers.drain(..).for_each(|helper| helper.join().expect("an abort"));
    }

    /// Gives up its contexts, if it leaves before this step, and the handles of what is under way in them.
    fn leave(&mut self, at: usize) {
        let Trouble::Leave { rank, at: from, team } = self.table.program.trouble else { return };
        if rank != self.rank || at < from {
            return;
        }
        for (index, context) in self.teams.iter_mut().enumerate() {
            if team.is_none_or(|team| team == index) {
                *context = None;
                self.table.contexts.lock().expect("no panic").remove(&(rank, index));
                for going in
                    self.going.iter_mut().filter(|going| self.table.program.steps[going.at].team == index)
                {
                    going.by.forget();
                }
            }
        }
    }

    fn be_late(&mut self, at: usize) {
        if let Trouble::Late { rank, at: when, by } = self.table.program.trouble
            && (rank, when) == (self.rank, at)
        {
            std::thread::sleep(by);
        }
        if self.random.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(self.random.below(2000)));
        }
    }

    fn abort(&mut self, at: usize, behind: bool) {
        let Trouble::Abort { rank, team, at: when, after } = self.table.program.trouble else { return };
        if (rank, when) != (self.rank, at) || after.is_some() == behind {
            return;
        }
        let context = self.teams[team].clone().expect("a member");
        match after {
            None => context.abort(),
            Some(after) => self.helpers.push(std::thread::spawn(move || {
                std::thread::sleep(after);
                context.abort();
            })),
        }
    }

    fn context(&self, at: usize) -> Context {
        self.teams[self.table.program.steps[at].team].clone().expect("a member")
    }

    fn salt(&self, at: usize) -> u64 {
        mix(self.table.program.seed << 16 | at as u64) >> 40
    }

    fn what(&self, at: usize, what: &dyn std::fmt::Debug) -> String {
        format!("rank {}, thread {}, step {at}, {what:?}", self.rank, self.thread)
    }

    fn collective(&mut self, at: usize) {
        let table = self.table.clone();
        let context = self.context(at);
        let case = table.program.case(self.rank, at);
        let deal = Deal { case, salt: self.salt(at), rank: context.rank(), size: context.size() };
        let verb = Verb {
            kind: case.kind,
            counts: deal.counts(),
            dtype: case.dtype,
            operator: case.operator,
            root: case.root,
        };
        let call = Call {
            tag: table.program.steps[at].tag,
            timeout: Some(table.program.timeout(self.rank, at)),
            algorithm: case.algorithm.map(|algorithm| algorithm as i32),
            ..Call::default()
        };
        let going = Going::new(at, self.what(at, case), Memory::of(&deal));
        self.go(going, &context, &verb, &call, true);
    }

    /// Makes a call, one of several ways.
    fn go(&mut self, mut going: Going, context: &Context, verb: &Verb, call: &Call, may_block: bool) {
        let start = going.memory.bytes.as_mut_ptr();
        let input = start.wrapping_add(going.memory.input).cast_const();
        let request = verb.over(input, start.wrapping_add(going.memory.output.start));
        let cancels = matches!(self.table.program.trouble,
            Trouble::Cancel { rank, at } if (rank, at) == (self.rank, going.at));
        going.began = Instant::now();
        if may_block && !cancels && self.random.below(2) == 0 {
            // SAFETY: both ranges lie in the memory, which outlives the call.
            let result = unsafe { context.run(&request, call) };
            return self.ended(going, result);
        }
        // SAFETY: both ranges lie in the memory, which is kept until the work has ended.
        let work = match unsafe { context.start(&request, call) } {
            Ok(work) => work,
            Err(error) => return self.ended(going, Err(error)),
        };
        if cancels {
            std::thread::sleep(Duration::from_micros(self.random.below(1000)));
            let collective = self.table.program.is_collective(going.at);
            match work.cancel() {
                Err(error) if collective => assert_eq!(error.status(), Status::InvalidUsage, "{error}"),
                cancelled => cancelled.expect("a message can be"),
            }
        }
        going.by = By::Work(work);
        if self.random.below(4) == 0 {
            going.by.forget();
        }
        match may_block && self.random.below(3) == 0 {
            true => self.finish(going),
            false => self.going.push(going),
        }
    }

    /// Waits for one of those under way.
    fn finish_one(&mut self) {
        let one = self.random.below(self.going.len() as u64) as usize;
        let going = self.going.swap_remove(one);
        self.finish(going);
    }

    /// Waits for what was started.
    fn finish(&mut self, going: Going) {
        self.table.note(self.rank, self.thread, || format!("waits for {}", going.what));
        let result = match &going.by {
            By::Nobody => unreachable!("it was started"),
            By::Callback(told) => told.recv().expect("it is called back"),
            By::Work(work) => {
                let result = match self.random.below(3) {
                    0 => loop {
                        match work.test() {
                            Some(result) => break result,
                            None => std::thread::sleep(Duration::from_micros(200)),
                        }
                    },
                    1 => loop {
                        let result = work.wait(Deadline::after(Duration::from_millis(1)));
                        if result.is_ok() || work.peek().is_some() {
                            break work.wait(Deadline::NEVER);
                        }
                    },
                    _ => work.wait(Deadline::NEVER),
                };
                let again = work.wait(Deadline::after(Duration::ZERO));
                assert_eq!(result.is_ok(), again.is_ok(), "{}: {result:?}, then {again:?}", going.what);
                result
            }
        };
        self.ended(going, result);
    }

    /// Looks at the memory of a call that has ended.
    fn ended(&mut self, going: Going, result: Result<Completion>) {
        let table = self.table.clone();
        let (program, ended) = (&table.program, Instant::now());
        let Going { at, what, mut memory, began, any, .. } = going;
        memory.check_rest(&what);
        match &result {
            Ok(Completion { source, .. }) => {
                if !any.is_empty() {
                    let sent = any.into_iter().find(|(from, _)| Some(*from) == *source);
                    memory.wanted = sent.expect("it is from one of those who send").1;
                }
                memory.check_result(&what);
            }
            Err(error) => {
                self.check_failure(at, &what, error);
                let untouched = error.status() == Status::Mismatch && program.keeps_output(self.rank, at);
                assert!(!untouched || memory.bytes == memory.before, "{what}: it has written: {error}");
                memory.bytes.fill(REUSED);
                self.reused.push((what, memory.bytes));
            }
        }
        let outcome = Outcome { at, rank: self.rank, began, ended, error: result.err() };
        table.outcomes.lock().expect("no panic").push(outcome);
    }

    fn letters(&mut self, at: usize, letters: &[Letter], any: bool) {
        let table = self.table.clone();
        let context = self.context(at);
        let own = context.rank();
        let salt = self.salt(at);
        let text = |letter: &Letter| {
            let seed = salt << 16 | u64::from(letter.from) << 8 | u64::from(letter.to);
            tile(&noise(seed, 1), 0, letter.len)
        };
        let call = Call {
            tag: table.program.steps[at].tag,
            timeout: Some(table.program.timeout(self.rank, at)),
            ..Call::default()
        };
        let from: Vec<(u32, Vec<u8>)> = letters
            .iter()
            .filter(|letter| letter.to == own)
            .map(|letter| (letter.from, text(letter)))
            .collect();
        for letter in letters.iter().filter(|letter| letter.to == own) {
            let verb = Verb::new(Kind::Receive, letter.len as u64).dtype(DataType::U8);
            let mut verb = verb.root(letter.from);
            let mut going = Going::new(at, self.what(at, &letter), Memory::new(&[], text(letter), None, 0));
            if any {
                verb.kind = Kind::ReceiveAny;
                if self.random.below(2) == 0 {
                    let ranks = from.iter().map(|(from, _)| *from).collect();
                    verb.counts = Counts::From { count: letter.len as u64, ranks };
                }
                going.any = from.clone();
            }
            self.go(going, &context, &verb, &call, false);
        }
        for letter in letters.iter().filter(|letter| letter.from == own) {
            let verb = Verb::new(Kind::Send, letter.len as u64).dtype(DataType::U8).root(letter.to);
            let memory = Memory::new(&text(letter), Vec::new(), None, 0);
            self.go(Going::new(at, self.what(at, &letter), memory), &context, &verb, &call, true);
        }
    }

    fn child(&mut self, at: usize, made: Made) {
        let context = self.context(at);
        let (rank, size) = (context.rank(), context.size());
        let what = self.what(at, &made);
        let began = Instant::now();
        let child = match made {
            Made::Split => context.split(Some(7), rank.into()).map(|child| child.expect("a member")),
            Made::Named => context.group("child", &(0..size).collect::<Vec<u32>>()),
            Made::Whole | Made::Duplicate => context.duplicate(),
        };
        let result = child.and_then(|child| {
            self.table.note(self.rank, self.thread, || format!("{what}, a sum"));
            let mut data = [rank as f32; 40];
            let call = Call { timeout: Some(FAR), ..Call::default() };
            Verb::new(Kind::Allreduce, 40).run_in(&child, &mut data, &call)?;
            assert_eq!(data, [(size * (size - 1) / 2) as f32; 40], "{what}");
            Ok(())
        });
        if let Err(error) = &result {
            self.check_child(at, &what, error);
        }
        let outcome = Outcome { at, rank: self.rank, began, ended: Instant::now(), error: result.err() };
        self.table.outcomes.lock().expect("no panic").push(outcome);
    }
}

/// Makes the groups of a rank.
pub(crate) fn gather(rank: u32, table: &Table, create: impl Fn(&str) -> Context) {
    let whole = create("");
    for (index, team) in table.program.teams.iter().enumerate() {
        table.note(rank, 0, || format!("makes team {index}"));
        let place = team.members.iter().position(|&member| member == rank);
        let context = match team.made {
            Made::Whole => Some(whole.clone()),
            Made::Duplicate => Some(whole.duplicate().expect("a duplicate")),
            Made::Split => {
                let key = place.unwrap_or(0) as i64;
                whole.split(place.map(|_| 1), key).expect("a split")
            }
            Made::Named => place.map(|_| whole.group("named", &team.members).expect("a group")),
        };
        if let Some(context) = context {
            assert_eq!(Some(context.rank() as usize), place);
            table.contexts.lock().expect("no panic").insert((rank, index), context);
        }
    }
}

/// Plays the program once, a rank by all of its threads. What they leave behind.
pub(crate) fn perform(rank: u32, table: &Arc<Table>) -> Vec<Player> {
    let players: Vec<Player> =
        (0..table.program.threads).map(|thread| Player::new(table, rank, thread)).collect();
    let threads: Vec<_> =
        players.into_iter().map(|player| std::thread::spawn(move || player.play())).collect();
    threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
}
