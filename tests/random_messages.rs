//! Random messages: several threads of several ranks send and receive whatever, give up at whatever moment,
//! and look at all that came. `UNISONO_MESSAGES_SEEDS=1000..1100 cargo test --test random_messages` tries
//! others than the few that are tried each time.

mod support;

use std::collections::HashSet;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use support::{PATIENCE, Random, TRANSPORTS, Verb, mix, ranks, sum};
use unisono::collective::request::{Counts, Kind};
use unisono::communicator::{Call, Context, Work};
use unisono::deadline::Deadline;
use unisono::error::{Error, Result, Status};
use unisono::reduce::DataType;

/// Lengths by tag: eager everywhere, in nothing but TCP, nowhere, and of several pieces.
const LENGTHS: [usize; 5] = [16, 1000, 100_000, 300_000, 1_500_000];

/// Threads of a rank. Each has tags of its own.
const THREADS: u64 = 2;

/// Steps of a thread.
const STEPS: usize = 40;

/// The last message of a sender under a tag.
const LAST: u32 = u32::MAX;

/// Who gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Nobody,
    Receivers,
    Everybody,
}

/// What a message is known by: sender, receiver, tag, and its number among those.
type Id = [u32; 4];

fn message(id: Id, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = id.iter().flat_map(|word| word.to_le_bytes()).collect();
    let seed = mix(id.iter().fold(0, |seed, &word| mix(seed ^ u64::from(word))));
    bytes.extend((16..len).map(|at| (seed >> (at % 57)) as u8 ^ at as u8));
    bytes
}

/// The message that this is, every byte of it.
fn id_of(bytes: &[u8]) -> Id {
    let word = |at: usize| u32::from_le_bytes(bytes[4 * at..][..4].try_into().expect("four bytes"));
    let id = [word(0), word(1), word(2), word(3)];
    assert!(message(id, bytes.len()) == bytes, "{id:?} has other bytes than were sent");
    id
}

/// A call under way, and its memory.
struct Going {
    work: Work,
    bytes: Vec<u8>,
    /// Of a receive, its place among the calls of its thread.
    place: usize,
}

/// What has come, and in which order it was called for.
struct Come {
    place: usize,
    /// The only rank that it could come from.
    named: bool,
    id: Id,
}

struct Thread<'a> {
    context: &'a Context,
    mode: Mode,
    random: Random,
    tags: std::ops::Range<u64>,
    /// How many were sent to each rank by each tag.
    sent: Vec<[u32; 2 * LENGTHS.len()]>,
    sends: Vec<Going>,
    receives: Vec<(Going, bool)>,
    come: Vec<Come>,
    calls: usize,
    /// Receives that did not end well.
    given_up: usize,
}

impl Thread<'_> {
    fn len(tag: u64) -> usize {
        LENGTHS[tag as usize % LENGTHS.len()]
    }

    fn other(&mut self) -> u32 {
        let others = u64::from(self.context.size()) - 1;
        (self.context.rank() + 1 + self.random.below(others) as u32) % self.context.size()
    }

    fn tag(&mut self) -> u64 {
        self.tags.start + self.random.below(self.tags.end - self.tags.start)
    }

    fn call(&mut self, tag: u64, gives_up: bool) -> Call {
        let hasty = gives_up && self.random.below(2) == 0;
        let timeout = if hasty { Duration::from_micros(self.random.below(6000)) } else { PATIENCE };
        Call { tag: Some(tag), timeout: Some(timeout.max(Duration::from_micros(1))), ..Call::default() }
    }

    fn send(&mut self, to: u32, tag: u64, number: u32, call: &Call) {
        let len = Self::len(tag);
        let mut bytes = message([self.context.rank(), to, tag as u32, number], len);
        let verb = Verb::new(Kind::Send, len as u64).dtype(DataType::U8).root(to);
        let work = verb.start_in(self.context, &mut bytes, call).expect("a send is started");
        self.sends.push(Going { work, bytes, place: 0 });
    }

    /// A receive from one rank, from any, or from some.
    fn verb(&mut self, tag: u64) -> (Verb, bool) {
        let len = Self::len(tag) as u64;
        let verb = Verb::new(Kind::Receive, len).dtype(DataType::U8);
        match self.random.below(4) {
            0 => (Verb { kind: Kind::ReceiveAny, ..verb }, false),
            1 => {
                let ranks = [self.other(), self.other()].into();
                (Verb { kind: Kind::ReceiveAny, counts: Counts::From { count: len, ranks }, ..verb }, false)
            }
            _ => (verb.root(self.other()), true),
        }
    }

    fn step(&mut self) {
        let (tag, to) = (self.tag(), self.other());
        match self.random.below(8) {
            0..3 => {
                let call = self.call(tag, self.mode == Mode::Everybody);
                let number = self.sent[to as usize][tag as usize];
                self.sent[to as usize][tag as usize] += 1;
                self.send(to, tag, number, &call);
            }
            // Who does not give up receives behind all of this, or it might wait for what never comes.
            3..5 if self.mode != Mode::Nobody => {
                let (verb, named) = self.verb(tag);
                let (mut bytes, call) = (vec![0; Self::len(tag)], self.call(tag, true));
                self.calls += 1;
                let place = self.calls;
                if self.random.below(2) == 0 {
                    let work = verb.start_in(self.context, &mut bytes, &call).expect("a receive is started");
                    self.receives.push((Going { work, bytes, place }, named));
                } else {
                    let call =
                        Call { timeout: Some(Duration::from_millis(self.random.below(4) + 1)), ..call };
                    let result = verb.run_in(self.context, &mut bytes, &call);
                    self.note(place, named, &bytes, result.map(|completion| completion.source), true);
                }
            }
            5 if self.mode != Mode::Nobody && !self.receives.is_empty() => {
                let at = self.random.below(self.receives.len() as u64) as usize;
                self.receives[at].0.work.cancel().expect("it can be");
            }
            6 if self.mode == Mode::Everybody && !self.sends.is_empty() => {
                let at = self.random.below(self.sends.len() as u64) as usize;
                self.sends[at].work.cancel().expect("it can be");
            }
            7 => std::thread::sleep(Duration::from_micros(self.random.below(500))),
            _ => {
                for going in self.sends.iter().chain(self.receives.iter().map(|(going, _)| going)) {
                    going.work.test();
                }
            }
        }
    }

    fn note(&mut self, place: usize, named: bool, bytes: &[u8], result: Result<Option<u32>>, hasty: bool) {
        match result {
            Ok(source) => {
                let id = id_of(bytes);
                assert_eq!(id[1], self.context.rank(), "a message of another rank");
                assert!(source.is_none_or(|source| source == id[0]), "{id:?} is said to be from {source:?}");
                self.come.push(Come { place, named, id });
            }
            Err(error) => {
                assert!(hasty && may_be(&error), "a receive: {error}");
                self.given_up += 1;
            }
        }
    }

    /// Everything that was sent comes, and everything that was called ends. `all` threads of all ranks come
    /// to this.
    fn end(&mut self, all: &Barrier) {
        for (Going { work, bytes, place }, named) in std::mem::take(&mut self.receives) {
            if self.mode != Mode::Nobody {
                work.cancel().expect("it can be");
            }
            let result = work.wait(Deadline::after(PATIENCE)).map(|completion| completion.source);
            self.note(place, named, &bytes, result, true);
        }
        // Or one of those would take what is the last to come.
        all.wait();
        let others: Vec<u32> = (0..self.context.size()).filter(|&rank| rank != self.context.rank()).collect();
        for tag in self.tags.clone() {
            for &to in &others {
                self.send(to, tag, LAST, &Call { timeout: Some(PATIENCE), ..support::tagged(tag) });
            }
        }
        for tag in self.tags.clone() {
            for &from in &others {
                loop {
                    let mut bytes = vec![0; Self::len(tag)];
                    let call = Call { timeout: Some(PATIENCE), ..support::tagged(tag) };
                    self.calls += 1;
                    let result = support::receive(self.context, from, &mut bytes, &call);
                    let has_ended = result.is_ok() && id_of(&bytes)[3] == LAST;
                    if let Err(error) = &result {
                        // One that is lost, since a receive of it was given up in the middle, or the send
                        // was.
                        let lost = self.mode != Mode::Nobody && error.status() == Status::PeerFailed;
                        assert!(lost, "a last receive from rank {from}, tag {tag}: {error}");
                        continue;
                    }
                    if has_ended {
                        break;
                    }
                    self.note(self.calls, true, &bytes, Ok(Some(from)), false);
                }
            }
        }
        for Going { work, bytes, .. } in std::mem::take(&mut self.sends) {
            if let Err(error) = work.wait(Deadline::after(PATIENCE)) {
                assert!(self.mode == Mode::Everybody && may_be(&error), "{:?}: {error}", id_of(&bytes));
            }
        }
    }
}

/// Whether it is how a call ends that is given up here or at its other end.
fn may_be(error: &Error) -> bool {
    [Status::Timeout, Status::Aborted, Status::PeerFailed].contains(&error.status())
}

/// What one thread of a rank has seen.
struct Seen {
    sent: Vec<[u32; 2 * LENGTHS.len()]>,
    come: Vec<Come>,
    given_up: usize,
    rank: u32,
    tags: std::ops::Range<u64>,
}

fn play(seed: u64) {
    let mut random = Random(seed);
    let mode = [Mode::Nobody, Mode::Receivers, Mode::Everybody][random.below(3) as usize];
    let transports = TRANSPORTS[random.below(TRANSPORTS.len() as u64) as usize];
    let size = 2 + random.below(3) as u32;
    let seen = Mutex::new(Vec::new());
    let all = Barrier::new((size as u64 * THREADS) as usize);
    ranks(size, transports, |context| {
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                let (seen, all) = (&seen, &all);
                scope.spawn(move || {
                    let seed = mix(seed << 16 | u64::from(context.rank()) << 8 | number);
                    let tags = number * LENGTHS.len() as u64..(number + 1) * LENGTHS.len() as u64;
                    let mut thread = Thread {
                        context,
                        mode,
                        random: Random(seed),
                        tags: tags.clone(),
                        sent: vec![[0; 2 * LENGTHS.len()]; size as usize],
                        sends: Vec::new(),
                        receives: Vec::new(),
                        come: Vec::new(),
                        calls: 0,
                        given_up: 0,
                    };
                    (0..STEPS).for_each(|_| thread.step());
                    thread.end(all);
                    let Thread { sent, come, given_up, .. } = thread;
                    let rank = context.rank();
                    seen.lock().expect("no panic").push(Seen { sent, come, given_up, rank, tags });
                });
            }
        });
        assert!(context.failure().is_none(), "{:?}", context.failure());
        let mut data = [context.rank() as f32; 3];
        sum(context, &mut data);
        assert_eq!(data, [(size * (size - 1) / 2) as f32; 3]);
    });
    check(mode, &seen.into_inner().expect("no panic"));
}

fn check(mode: Mode, seen: &[Seen]) {
    for Seen { come, given_up, rank, tags, .. } in seen {
        let mut ids = HashSet::new();
        assert!(come.iter().all(|come| ids.insert(come.id)), "a message has come twice to rank {rank}");
        let mut lost = 0;
        for from in seen.iter().filter(|from| from.tags == *tags && from.rank != *rank) {
            for tag in tags.clone() {
                let sent = from.sent[*rank as usize][tag as usize];
                let is_of_these = |come: &&Come| come.id[0] == from.rank && u64::from(come.id[2]) == tag;
                let here: Vec<&Come> = come.iter().filter(is_of_these).collect();
                assert!(here.iter().all(|come| come.id[3] < sent), "what has come was never sent");
                lost += sent as usize - here.len();
                if mode != Mode::Everybody {
                    // Receives from this rank alone have its messages in the order of the calls.
                    let mut named: Vec<_> = here.iter().filter(|come| come.named).collect();
                    named.sort_by_key(|come| come.place);
                    let numbers: Vec<u32> = named.iter().map(|come| come.id[3]).collect();
                    assert!(numbers.is_sorted(), "from rank {} by tag {tag}: {numbers:?}", from.rank);
                }
            }
        }
        // Whoever gives up a receive in the middle loses what it would have got, and no more.
        let allowed = if mode == Mode::Everybody { usize::MAX } else { *given_up };
        assert!(lost <= allowed, "rank {rank} has lost {lost} messages, and given up {given_up} receives");
    }
}

#[test]
fn whoever_gives_up_messages_arrive_whole_once_and_in_order() {
    let asked = std::env::var("UNISONO_MESSAGES_SEEDS").ok().map(|text| {
        let (first, end) = text.split_once("..").expect("as in 1000..1100");
        first.parse().expect("a number")..end.parse().expect("a number")
    });
    for seed in asked.unwrap_or(0..12) {
        let played = std::panic::catch_unwind(|| play(seed));
        assert!(played.is_ok(), "seed {seed}");
    }
}
