//! A job: its ranks from start to end.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use super::board::Board;
use super::ending;
use super::environment::Environment;
use super::options::Options;
use super::output::Lines;
use super::pipes::{Input, Pipe};
use super::sink::Sink;
use super::start::{self, Trouble};
use crate::deadline::Deadline;
use crate::sys::child::{self, Ends, Exit, Keeper, OpenFiles, Readiness, Signals};

/// The signals that the launcher takes: those that end a job, those that it only passes on, and job control.
pub(super) const SIGNALS: [i32; 8] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// A process that dies closes its connections before the kernel tells its parent of the death, so a peer that
/// gives up at once may be seen to end first. Within this time a rank that was killed takes the blame from
/// one that exited.
const DOUBT: Duration = Duration::from_millis(50);
/// After that the other ranks may still say what the failure meant for them: the library promises its errors
/// within this.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long output may still come from what the ranks left running.
const AFTERMATH: Duration = Duration::from_secs(1);
/// How long an unfinished line must rest before a terminal shows it.
const REST: Duration = Duration::from_millis(100);
/// Within this time a signal that comes a second time is the same one.
const TWICE: Duration = Duration::from_millis(200);

/// What the job came to.
pub(super) struct Verdict {
    /// The exit status.
    pub(super) status: u8,
    /// The signal that ended both a rank and, by the user's wish, the job.
    pub(super) signal: Option<i32>,
}

/// The ranks of one job, and everything that is waited for.
pub(super) struct Job {
    signals: Signals,
    keeper: Keeper,
    ends: Ends,
    board: Board,
    ranks: Vec<Rank>,
    /// Standard output and standard error.
    sinks: [Sink; 2],
    input: Option<Input>,
    phase: Phase,
    timeout: Deadline,
    grace: Duration,
    /// The rank that failed first, as far as is known.
    culprit: Option<Culprit>,
    /// Whether the time was up before the job was.
    timed_out: bool,
    /// The last signal by which the user asked for the end, and when.
    asked: Option<(i32, Instant)>,
    /// Whether something could not be written that a rank wrote.
    lost_output: bool,
    /// Whether the job ends when nobody reads standard output any more,
    end_unread: bool,
    /// and whether it has.
    unread: bool,
}

#[derive(Clone, Copy)]
struct Culprit {
    rank: usize,
    exit: Exit,
    /// How many others were running then.
    others: usize,
}

struct Rank {
    child: Child,
    exit: Option<Exit>,
    /// What it writes to standard output and standard error, until their end.
    pipes: [Option<Pipe>; 2],
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// No rank has failed.
    Running,
    /// One has failed; until then another may turn out to have failed before.
    Doubt(Deadline),
    /// The others have until then to end by themselves.
    LastWords(Deadline),
    /// All have been told to end, and are killed then.
    Ending(Deadline),
    /// All have been killed.
    Killed,
    /// All have ended; what they left running may write until then.
    Aftermath(Deadline),
    /// Nothing of the job runs; what is in the pipes is shown, as long as somebody reads by then.
    Emptying(Deadline),
}

#[derive(Clone, Copy)]
enum Event {
    Signal,
    End,
    Sink(usize),
    Output(usize, usize),
    Input,
}

impl Job {
    /// Starts all ranks, or none.
    pub(super) fn start(
        options: &Options,
        signals: Signals,
        files: &OpenFiles,
        keeper: Keeper,
    ) -> Result<Job, Trouble> {
        let board = Board::open()?;
        let environment =
            Environment { size: options.ranks(), id: board.id(), master_port: start::master_port(options)? };
        if let Some(folder) = &options.output_dir {
            let cause =
                |cause| Trouble::new(format!("cannot create the folder {}: {cause}", folder.display()));
            fs::create_dir_all(folder).map_err(cause)?;
        }
        let mut ends = Ends::new()?;
        let mut ranks: Vec<Rank> = Vec::with_capacity(options.ranks());
        let mut input = None;
        for rank in 0..options.ranks() {
            let started = start::rank(options, &environment, rank, (&signals, files, &keeper));
            let started = started.and_then(|mut child| {
                let stdin = child.stdin.take();
                // Whatever it lacks from here on, it runs and is to be ended with the others.
                ranks.push(Rank::new(child));
                if let Some(to) = stdin {
                    input = Some(Input::new(&io::stdin(), to)?);
                }
                ends.watch(&ranks[rank].child, rank).map_err(|cause| {
                    Trouble::new(format!("cannot watch rank {rank}: {cause} (pidfd_open, of Linux 5.3)"))
                })
            });
            if let Err(trouble) = started {
                for rank in &mut ranks {
                    // One that may not be killed is not waited for.
                    if child::signal_group(&rank.child, libc::SIGKILL).is_ok() {
                        rank.child.wait()?;
                    }
                }
                keeper.dismiss();
                return Err(trouble);
            }
        }
        let lines = || {
            let prefix = |rank| if options.no_prefix { String::new() } else { format!("[{rank}] ") };
            Lines::new((0..options.ranks()).map(prefix))
        };
        Ok(Job {
            signals,
            keeper,
            ends,
            board,
            ranks,
            sinks: [Sink::new(&io::stdout(), lines())?, Sink::new(&io::stderr(), lines())?],
            input,
            phase: Phase::Running,
            timeout: options.timeout.map_or(Deadline::NEVER, Deadline::after),
            grace: options.grace,
            culprit: None,
            timed_out: false,
            asked: None,
            lost_output: false,
            end_unread: options.end_unread,
            unread: false,
        })
    }

    /// Waits for the end of all ranks and shows their output meanwhile.
    pub(super) fn run(mut self) -> Result<Verdict, Trouble> {
        loop {
            self.mind_the_clock()?;
            if self.is_over() {
                break;
            }
            let events = self.events();
            let waits: Vec<_> = events.iter().map(|event| self.wait_for(*event)).collect();
            let ready = child::poll(&waits, self.next_moment(&events))?;
            for (event, ready) in events.into_iter().zip(ready) {
                match (event, ready) {
                    (Event::Output(rank, stream), true) => self.read(rank, stream)?,
                    // Nobody is left who could write to it.
                    (Event::Output(rank, stream), false) if self.is_emptying() => self.close(rank, stream),
                    (_, false) => {}
                    (Event::Sink(stream), true) => self.write(stream)?,
                    (Event::Input, true) => self.pass_input_on(),
                    (Event::End, true) => self.note_ends()?,
                    (Event::Signal, true) => self.note_signals()?,
                }
            }
        }
        for rank in &mut self.ranks {
            rank.child.wait()?;
        }
        let is_mine = self.culprit.is_some_and(|culprit| self.is_mine(culprit.exit));
        self.keeper.dismiss();
        let status = match &self.culprit {
            _ if self.timed_out => 124,
            _ if self.unread => ending::status(Exit::Signal(libc::SIGPIPE, false)),
            Some(culprit) if !is_mine => ending::status(culprit.exit),
            _ if self.lost_output => Trouble::STATUS,
            _ => 0,
        };
        let signal = self.asked.map(|(signal, _)| signal);
        let signal = signal.filter(|signal| status == ending::status(Exit::Signal(*signal, false)));
        Ok(Verdict { status, signal })
    }

    fn is_over(&self) -> bool {
        let silent = self.ranks.iter().all(|rank| rank.pipes.iter().all(Option::is_none));
        self.is_emptying() && silent && !self.sinks.iter().any(Sink::wants_to_write)
    }

    fn is_emptying(&self) -> bool {
        matches!(self.phase, Phase::Emptying(_))
    }

    /// What is waited for now. Ends come after output, so that a rank's last words come before its end.
    fn events(&self) -> Vec<Event> {
        let mut events = vec![Event::Signal];
        events.extend((0..2).filter(|stream| self.sinks[*stream].wants_to_write()).map(Event::Sink));
        for (rank, state) in self.ranks.iter().enumerate() {
            let open = |stream: &usize| state.pipes[*stream].is_some() && self.sinks[*stream].has_room();
            events.extend((0..2).filter(open).map(|stream| Event::Output(rank, stream)));
        }
        events.extend(self.input.is_some().then_some(Event::Input));
        events.push(Event::End);
        events
    }

    fn wait_for(&self, event: Event) -> (BorrowedFd<'_>, Readiness) {
        match event {
            Event::Signal => (self.signals.as_fd(), Readiness::Read),
            Event::End => (self.ends.as_fd(), Readiness::Read),
            Event::Sink(stream) => (self.sinks[stream].as_fd(), Readiness::Write),
            Event::Output(rank, stream) => {
                let pipe = self.ranks[rank].pipes[stream].as_ref().expect("events lists open pipes only");
                (pipe.as_fd(), Readiness::Read)
            }
            Event::Input => {
                let input = self.input.as_ref().expect("events lists an open input only");
                input.wait_for()
            }
        }
    }

    /// When something is due even if nothing happens.
    fn next_moment(&self, events: &[Event]) -> Deadline {
        let mut next = match self.phase {
            Phase::Running => self.timeout,
            Phase::Doubt(until) | Phase::LastWords(until) => until,
            Phase::Ending(until) | Phase::Aftermath(until) => until,
            Phase::Killed => Deadline::NEVER,
            // What is not ready now never will be.
            Phase::Emptying(_) if events.iter().any(|event| matches!(event, Event::Output(..))) => {
                Deadline::after(Duration::ZERO)
            }
            Phase::Emptying(until) => until,
        };
        for (rank, state) in self.ranks.iter().enumerate() {
            for (sink, pipe) in self.sinks.iter().zip(&state.pipes) {
                if let Some(pipe) = pipe.as_ref().filter(|_| sink.prompts(rank)) {
                    next = next.min(Deadline::after(REST.saturating_sub(pipe.rested())));
                }
            }
        }
        next
    }

    /// Does what is due by now.
    fn mind_the_clock(&mut self) -> Result<(), Trouble> {
        for (rank, state) in self.ranks.iter().enumerate() {
            for (sink, pipe) in self.sinks.iter_mut().zip(&state.pipes) {
                if pipe.as_ref().is_some_and(|pipe| sink.prompts(rank) && pipe.rested() >= REST) {
                    sink.flush(rank);
                }
            }
        }
        match self.phase {
            Phase::Running if self.timeout.expired() => {
                let running = self.running();
                self.say(&format!(
                    "the time is up (--timeout); ending {}",
                    named(&running, self.ranks.len())
                ));
                self.timed_out = true;
                self.end()
            }
            Phase::Doubt(until) if until.expired() => {
                self.accuse();
                self.phase = Phase::LastWords(Deadline::after(LAST_WORDS));
                Ok(())
            }
            Phase::LastWords(until) if until.expired() => self.end(),
            Phase::Ending(until) if until.expired() => {
                let running = self.running();
                let who = named(&running, self.ranks.len());
                self.say(&format!("killing {who}, still there {:?} after being told to end", self.grace));
                self.kill()
            }
            Phase::Aftermath(until) => {
                let silent = self.ranks.iter().all(|rank| rank.pipes.iter().all(Option::is_none));
                if silent || until.expired() {
                    self.signal_all(libc::SIGKILL)?;
                    self.empty();
                }
                Ok(())
            }
            Phase::Emptying(until) if until.expired() => self.drop_output(),
            _ => Ok(()),
        }
    }

    fn read(&mut self, rank: usize, stream: usize) -> Result<(), Trouble> {
        let Some(pipe) = &mut self.ranks[rank].pipes[stream] else { return Ok(()) };
        let mut buffer = [0; 64 << 10];
        let Some(count) = pipe.read(&mut buffer)? else { return Ok(()) };
        let exhausted = matches!(self.phase, Phase::Emptying(_)) && pipe.exhausts(count);
        self.sinks[stream].feed(rank, &buffer[..count]);
        if count == 0 || exhausted {
            self.close(rank, stream);
        }
        Ok(())
    }

    fn close(&mut self, rank: usize, stream: usize) {
        self.ranks[rank].pipes[stream] = None;
        self.sinks[stream].flush(rank);
    }

    fn write(&mut self, stream: usize) -> Result<(), Trouble> {
        match self.sinks[stream].write() {
            Ok(Some(count)) => {
                if count > 0 && self.is_emptying() {
                    self.empty();
                }
                return Ok(());
            }
            Ok(None) if stream == 0 && self.end_unread && self.phase == Phase::Running => {
                self.unread = true;
                // So that none sees another end, and says so.
                self.signal_all(libc::SIGSTOP)?;
                self.end()?;
            }
            Ok(None) => {}
            Err(cause) => {
                self.lost_output = true;
                if stream == 0 {
                    self.say(&format!("cannot write to standard output: {cause}"));
                }
            }
        }
        // Nobody reads on: the ranks get SIGPIPE, as if they had written there themselves.
        for rank in &mut self.ranks {
            rank.pipes[stream] = None;
        }
        Ok(())
    }

    fn pass_input_on(&mut self) {
        let Some(input) = &mut self.input else { return };
        // Rank 0 may close its input whenever it likes; that is its business and no failure.
        if !input.step().unwrap_or(false) {
            self.input = None;
        }
    }

    fn note_ends(&mut self) -> Result<(), Trouble> {
        while let Some(rank) = self.ends.next()? {
            self.catch_up(rank)?;
            let exit = child::exit_of(&self.ranks[rank].child)?;
            self.ranks[rank].exit = Some(exit);
            self.board.publish(rank, &ending::cause(exit));
            if exit != Exit::Code(0) {
                self.note_failure(rank, exit);
            }
            if rank == 0 {
                self.input = None;
            }
        }
        if self.running().is_empty() && !matches!(self.phase, Phase::Aftermath(_) | Phase::Emptying(_)) {
            if matches!(self.phase, Phase::Doubt(_)) {
                self.accuse();
            }
            self.phase = Phase::Aftermath(Deadline::after(AFTERMATH));
        }
        Ok(())
    }

    /// Reads what a rank that has just ended wrote before.
    fn catch_up(&mut self, rank: usize) -> Result<(), Trouble> {
        for stream in 0..2 {
            while let Some(pipe) = &self.ranks[rank].pipes[stream] {
                let now = Deadline::after(Duration::ZERO);
                let ready = child::poll(&[(pipe.as_fd(), Readiness::Read)], now)?;
                if !ready[0] || !self.sinks[stream].has_room() {
                    break;
                }
                self.read(rank, stream)?;
            }
        }
        Ok(())
    }

    fn note_failure(&mut self, rank: usize, exit: Exit) {
        let killed = matches!(exit, Exit::Signal(..));
        match &mut self.culprit {
            None => {
                self.culprit = Some(Culprit { rank, exit, others: self.running().len() });
                if self.phase == Phase::Running {
                    self.phase = Phase::Doubt(Deadline::after(DOUBT));
                }
            }
            Some(culprit) if matches!(self.phase, Phase::Doubt(_)) && killed => {
                if let Exit::Code(_) = culprit.exit {
                    *culprit = Culprit { rank, exit, others: culprit.others };
                }
            }
            Some(_) => {}
        }
    }

    /// Whether a rank ended so since what it wrote could not be written here: nobody reads from it any more.
    fn is_mine(&self, exit: Exit) -> bool {
        self.lost_output && matches!(exit, Exit::Signal(libc::SIGPIPE, _))
    }

    /// Says who failed first.
    fn accuse(&mut self) {
        let Some(Culprit { rank, exit, others }) = self.culprit else { return };
        if self.is_mine(exit) {
            // What has been said is why.
            return;
        }
        let pid = self.ranks[rank].child.id();
        let rest = if others == 0 { String::new() } else { format!("; ending the other {others}") };
        self.say(&format!("rank {rank} (pid {pid}) {}{rest}", ending::cause_in_full(exit)));
    }

    fn note_signals(&mut self) -> Result<(), Trouble> {
        while let Some(signal) = self.signals.next()? {
            match signal {
                libc::SIGTSTP => {
                    self.signal_all(signal)?;
                    child::stop_here()?;
                    self.signal_all(libc::SIGCONT)?;
                }
                libc::SIGUSR1 | libc::SIGUSR2 | libc::SIGCONT => self.signal_all(signal)?,
                _ => self.note_wish_to_end(signal)?,
            }
        }
        Ok(())
    }

    fn note_wish_to_end(&mut self, signal: i32) -> Result<(), Trouble> {
        // `timeout` sends its signal to the launcher, and then to its process group.
        if self.asked.is_some_and(|(before, at)| before == signal && at.elapsed() < TWICE) {
            return Ok(());
        }
        let before = self.asked.replace((signal, Instant::now())).map(|(before, _)| before);
        match self.phase {
            Phase::Running | Phase::Doubt(_) | Phase::LastWords(_) => {
                if matches!(self.phase, Phase::Doubt(_)) {
                    self.accuse();
                }
                self.signal_all(signal)?;
                self.signal_all(libc::SIGCONT)?;
                self.phase = Phase::Ending(Deadline::after(self.grace));
            }
            Phase::Ending(_) => {
                let Some(before) = before else { return self.signal_all(signal) };
                let running = self.running();
                let what = match ending::signal_name(signal) {
                    name if before == signal => format!("{name} again"),
                    name => format!("{name} after {}", ending::signal_name(before)),
                };
                self.say(&format!("{what}; killing {}", named(&running, self.ranks.len())));
                self.kill()?;
            }
            Phase::Killed => {}
            Phase::Aftermath(_) | Phase::Emptying(_) => {
                self.signal_all(libc::SIGKILL)?;
                self.empty();
                if before.is_some() {
                    self.drop_output()?;
                }
            }
        }
        Ok(())
    }

    /// Shows what is left. From when the job is to end, a reader that rests for as long as the ranks could is
    /// not waited for.
    fn empty(&mut self) {
        let now = Deadline::at(Instant::now());
        let to_end = if self.asked.is_some() || self.timeout.expired() { now } else { self.timeout };
        self.phase = Phase::Emptying(to_end.postponed(self.grace));
    }

    /// Shows nothing more: output that nobody reads must not keep the launcher from ending.
    fn drop_output(&mut self) -> Result<(), Trouble> {
        for rank in 0..self.ranks.len() {
            self.catch_up(rank)?;
            (0..2).for_each(|stream| self.close(rank, stream));
        }
        let is_lost = self.sinks.iter().any(Sink::wants_to_write);
        self.lost_output |= is_lost;
        self.sinks[0].give_up();
        if is_lost {
            self.say("dropping what the ranks wrote and nobody has read");
            // Where that is not read either, nothing can be said.
            let _ = self.sinks[1].write();
        }
        self.sinks[1].give_up();
        Ok(())
    }

    /// Tells all that they should end.
    fn end(&mut self) -> Result<(), Trouble> {
        self.signal_all(libc::SIGTERM)?;
        // A stopped process would not notice.
        self.signal_all(libc::SIGCONT)?;
        self.phase = Phase::Ending(Deadline::after(self.grace));
        Ok(())
    }

    fn kill(&mut self) -> Result<(), Trouble> {
        self.phase = Phase::Killed;
        self.signal_all(libc::SIGKILL)
    }

    /// To the groups of all ranks: one that has ended may have left processes behind.
    fn signal_all(&self, signal: i32) -> Result<(), Trouble> {
        for (rank, state) in self.ranks.iter().enumerate() {
            match child::signal_group(&state.child, signal) {
                // It has become another user's (sudo). Once it has ended, that is no failure of the job.
                Err(cause) if state.exit.is_none() => {
                    let (name, pid) = (ending::signal_name(signal), state.child.id());
                    return Err(Trouble::new(format!(
                        "cannot send {name} to rank {rank} (pid {pid}): {cause}"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn running(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| self.ranks[*rank].exit.is_none()).collect()
    }

    fn say(&mut self, text: &str) {
        self.sinks[1].say(text);
    }
}

impl Rank {
    fn new(mut child: Child) -> Rank {
        let stdout = child.stdout.take().map(|pipe| Pipe::new(pipe.into()));
        let stderr = child.stderr.take().map(|pipe| Pipe::new(pipe.into()));
        Rank { child, exit: None, pipes: [stdout, stderr] }
    }
}

/// `all 4 ranks`, `rank 2`, `ranks 0, 1, 3`.
fn named(ranks: &[usize], size: usize) -> String {
    let list = || ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [rank] => format!("rank {rank}"),
        _ if ranks.len() == size => format!("all {size} ranks"),
        _ => format!("ranks {}", list()),
    }
}
