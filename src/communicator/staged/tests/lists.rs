//! Calls whose lists differ from rank to rank, by messages: long blocks go in several, by way of few slots of
//! pinned memory.

use super::trouble::failing_calls_are_named;
use super::*;
use crate::communicator::device::{Candidate, choose, connect};
use crate::engine::device::Loads;

const KINDS: [Kind; 3] = [Kind::Gather, Kind::Scatter, Kind::Alltoall];

/// Groups that have no direct exchange, whose calls do not use it, or whose GPUs do not exchange: transports,
/// and the calls' tag.
const WAYS: [(&str, Option<u64>); 3] = [("tcp", None), ("shm", Some(7)), ("shm", None)];

/// Runs `body` on `size` ranks of such a group.
fn members<T: Send>(
    (transports, tag): (&str, Option<u64>),
    size: u32,
    order: Order,
    body: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    ranks(size, transports, order, |rank| {
        if (transports, tag) == ("shm", None) {
            rank.agree_on_none();
        }
        body(rank)
    })
}

/// What a rank's call is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Device,
    /// What it contributes is on the device, what it obtains on the host.
    Mixed,
    /// All on the host, without a stream.
    Host,
}

/// A call with a list: how many elements a rank has for another.
#[derive(Clone)]
struct Lists {
    kind: Kind,
    root: u32,
    pairs: Vec<Vec<usize>>,
}

impl Lists {
    /// `size` ranks; `len` says what the first has for the second.
    fn new(kind: Kind, size: u32, root: u32, len: impl Fn(u32, u32) -> usize) -> Lists {
        let moves = |from: u32, to: u32| match kind {
            Kind::Gather => to == root,
            Kind::Scatter => from == root,
            _ => true,
        };
        let row = |from| (0..size).map(|to| if moves(from, to) { len(from, to) } else { 0 }).collect();
        Lists { kind, root, pairs: (0..size).map(row).collect() }
    }

    /// Of all sorts: nothing, one part and several.
    fn uneven(kind: Kind, size: u32, root: u32, round: u32) -> Lists {
        const LENGTHS: [usize; 8] = [0, 700, 3, 64, 65, 0, 301, 128];
        Lists::new(kind, size, root, |from, to| LENGTHS[(from * 3 + to * 5 + round) as usize % 8])
    }

    fn size(&self) -> u32 {
        self.pairs.len() as u32
    }

    /// What one rank has for another.
    fn block(&self, from: u32, to: u32, round: u32) -> Vec<i32> {
        given(from * 64 + to, round, self.pairs[from as usize][to as usize])
    }

    fn input(&self, rank: u32, round: u32) -> Vec<i32> {
        (0..self.size()).flat_map(|to| self.block(rank, to, round)).collect()
    }

    fn output(&self, rank: u32, round: u32) -> Vec<i32> {
        (0..self.size()).flat_map(|from| self.block(from, rank, round)).collect()
    }

    /// As a rank gives them.
    fn counts(&self, rank: u32) -> Counts {
        let (rank, root) = (rank as usize, self.root as usize);
        let send = || self.pairs[rank].iter().map(|&len| len as u64);
        let receive = || self.pairs.iter().map(|row| row[rank] as u64);
        match self.kind {
            Kind::Alltoall => Counts::Exchange { send: send().collect(), receive: receive().collect() },
            // Who is not the root knows its own count.
            Kind::Gather if rank != root => {
                Counts::Blocks(vec![self.pairs[rank][root] as u64; self.pairs.len()])
            }
            Kind::Scatter if rank != root => {
                Counts::Blocks(vec![self.pairs[root][rank] as u64; self.pairs.len()])
            }
            Kind::Gather => Counts::Blocks(receive().collect()),
            _ => Counts::Blocks(send().collect()),
        }
    }

    fn request(&self, rank: u32, input: u64, output: u64) -> Request {
        Request { counts: self.counts(rank), ..request(self.kind, input, output, 0, self.root) }
    }
}

impl Rank {
    /// Has the ranks agree that their GPUs do not exchange.
    fn agree_on_none(&self) {
        let candidate = Candidate { context: &self.context, device: 0, first: None, points: true };
        let none = || Err(Error::new(Status::Unsupported, "GPUs that do not exchange"));
        connect(&[candidate], none, choose, Loads::OWN).expect("an agreement");
        assert!(matches!(self.context.device_way(), Some(Err(_))), "GPUs exchange");
    }

    fn tagged(&self, tag: Option<u64>) -> Call {
        Call { tag, ..self.call() }
    }

    /// Starts a call on device memory, with work of the caller before and after it.
    fn start_lists(&self, lists: &Lists, tag: Option<u64>, round: u32) -> Result<Work> {
        let (values, result) = (lists.input(self.rank, round), lists.output(self.rank, round));
        let (input, output) = (self.memory(&values), self.memory(&result));
        let old = vec![-1; result.len()];
        self.fill(output, &old);
        self.expect(output, &old, "the output was written before its time");
        self.fill(input, &vec![-2; values.len()]);
        self.fill(input, &values);
        let work = self.start(&lists.request(self.rank, input, output), &self.tagged(tag))?;
        let what = format!("{:?} of {:?} on rank {}", lists.kind, lists.pairs, self.rank);
        self.expect(output, &result, &what);
        self.fill(input, &vec![-3; values.len()]);
        Ok(work)
    }

    /// Runs a call to its end, on such memory.
    fn run_lists(&self, lists: &Lists, on: On, tag: Option<u64>, round: u32) {
        if on == On::Device {
            let work = self.start_lists(lists, tag, round).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            return;
        }
        let (values, result) = (lists.input(self.rank, round), lists.output(self.rank, round));
        let mut host = vec![-1; result.len()];
        let out = host.as_mut_ptr().expose_provenance() as u64;
        let (input, call) = match on {
            On::Mixed => {
                let input = self.memory(&values);
                self.fill(input, &values);
                (input, self.tagged(tag))
            }
            _ => (values.as_ptr().expose_provenance() as u64, Call { tag, ..Call::default() }),
        };
        self.run(&lists.request(self.rank, input, out), &call).expect("it ends well");
        assert_eq!(host, result, "{:?} of {:?} on rank {}", lists.kind, lists.pairs, self.rank);
    }
}

#[test]
fn calls_with_lists_are_right_one_behind_the_other() {
    for way in WAYS {
        for size in [2, 3] {
            for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(7)] {
                let complaints = members(way, size, order, |rank| {
                    let mut works = Vec::new();
                    for (round, kind) in (0..).zip(KINDS.into_iter().cycle().take(12)) {
                        let lists = Lists::uneven(kind, size, round % size, round);
                        works.push(rank.start_lists(&lists, way.1, round).expect("it starts"));
                    }
                    for work in works {
                        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                    }
                    rank.drain()
                });
                assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}, {way:?}, {order:?}");
            }
        }
    }
}

/// One rank has done its part before all agree, the other begins behind that.
#[test]
fn ranks_that_agree_in_the_course_of_a_call_go_one_way_with_it() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        let gate = (rank.rank == 0).then(|| rank.gate());
        let lists = Lists::uneven(Kind::Alltoall, 2, 0, 1);
        let work = rank.start_lists(&lists, None, 0).expect("it starts");
        for _ in 0..if rank.rank == 1 { 20 } else { 0 } {
            assert!(work.test().is_none(), "the other has not begun");
            std::thread::sleep(Duration::from_millis(1));
        }
        rank.agree_on_none();
        if let Some(gate) = gate {
            gate.release();
        }
        work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

#[test]
fn more_ranks_than_are_dealt_with_at_a_time_get_everything() {
    for way in WAYS {
        let complaints = members(way, 9, Order::RoundRobin, |rank| {
            for (round, kind) in (0..).zip(KINDS) {
                let lists = Lists::uneven(kind, 9, round, round);
                rank.run_lists(&lists, On::Device, way.1, round);
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{way:?}");
    }
}

#[test]
fn ranks_may_differ_in_their_memory() {
    const SIZE: u32 = 4;
    for way in WAYS {
        for order in [Order::Eager, Order::RoundRobin, Order::Random(3)] {
            let complaints = members(way, SIZE, order, |rank| {
                let mut round = 0;
                for kind in KINDS {
                    for shift in 0..SIZE {
                        // One has nothing at all.
                        let idle = (shift + 2) % SIZE;
                        let lists = Lists::new(kind, SIZE, shift, |from, to| {
                            let len = [300, 0, 65, 129, 500][((from + 2 * to) % 5) as usize];
                            if from == idle || to == idle { 0 } else { len }
                        });
                        let on = [On::Device, On::Host, On::Device, On::Mixed];
                        rank.run_lists(&lists, on[((rank.rank + shift) % SIZE) as usize], way.1, round);
                        round += 1;
                    }
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{way:?}, {order:?}");
        }
    }
}

#[test]
fn a_root_in_place_keeps_its_block() {
    let complaints = ranks(3, "tcp", Order::RoundRobin, |rank| {
        for (round, kind) in (0..).zip([Kind::Gather, Kind::Scatter]) {
            let lists = Lists::new(kind, 3, 1, |from, to| 100 * (from + to) as usize + 70);
            let (values, result) = (lists.input(rank.rank, round), lists.output(rank.rank, round));
            if rank.rank != 1 {
                rank.run_lists(&lists, On::Device, None, round);
                continue;
            }
            // Rank 0's block lies before the own one.
            let before =
                4 * lists.pairs[usize::from(kind == Kind::Scatter)][usize::from(kind == Kind::Gather)];
            let all = rank.memory(&if kind == Kind::Gather { result.clone() } else { values.clone() });
            let (input, output) = match kind {
                Kind::Gather => (all + before as u64, all),
                _ => (all, all + before as u64),
            };
            rank.fill(input, &values);
            rank.run(&lists.request(1, input, output), &rank.call()).expect("it ends well");
            rank.expect(output, &result, "in place");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// See [`super::twice`].
fn twice(kind: Kind, order: Order, missing: Option<Missing>) -> (Vec<String>, Vec<[usize; 2]>) {
    super::twice("tcp", order, missing, |rank, round| {
        let lists = Lists::new(kind, 2, 0, |from, to| 500 + 100 * (from + to + round) as usize);
        rank.start_lists(&lists, None, round).expect("it starts")
    })
}

#[test]
fn calls_with_lists_are_right_in_every_order() {
    for kind in KINDS {
        for order in Order::all(3) {
            let (complaints, _) = twice(kind, order, None);
            assert!(complaints.is_empty(), "{kind:?}, {order:?}: {complaints:?}");
        }
    }
}

#[test]
fn every_wait_of_calls_with_lists_is_needed() {
    each_wait_is_needed(|order, missing| twice(Kind::Alltoall, order, missing));
}

#[test]
fn calls_with_lists_need_one_queue() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward, Order::Random(3)] {
        let complaints =
            ahead_of_streams(&[with_queues(MOST, order), with_queues(MOST, order)], "tcp", |rank| {
                let call = |round| {
                    let kind = KINDS[round as usize % 3];
                    let lists = Lists::uneven(kind, 2, round % 2, round);
                    rank.start_lists(&lists, None, round).expect("it starts")
                };
                (0..12).map(call).collect()
            });
        assert_eq!(complaints, Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn a_second_call_with_lists_creates_nothing() {
    ranks(3, "tcp", Order::RoundRobin, |rank| {
        let mut before = 0;
        for round in 0..3 {
            if round == 1 {
                before = rank.double.creations();
            }
            for kind in KINDS {
                let lists = Lists::new(kind, 3, 0, |from, to| 300 + 200 * (from + to) as usize);
                // Memory of the test itself counts.
                let creations = rank.double.creations();
                let [input, output] = [lists.input(rank.rank, round), lists.output(rank.rank, round)]
                    .map(|all| rank.memory(&all));
                before += if round > 0 { rank.double.creations() - creations } else { 0 };
                rank.run(&lists.request(rank.rank, input, output), &rank.call()).expect("it ends well");
            }
        }
        assert_eq!(rank.double.creations(), before);
        rank.drain()
    });
}

#[test]
fn pinned_memory_stays_bounded_however_long_the_call_is() {
    /// Bytes of a message as they are where nobody pretends, and of all slots of a call.
    const MESSAGE: usize = 1 << 20;
    const SLOTS: usize = 24 * MESSAGE;
    for size in [2, 4] {
        let complaints = ranks(size, "tcp", Order::Eager, |rank| {
            rank.context.cuda().pretend(&rank.devices, MESSAGE);
            rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &rank.call()).expect("a barrier");
            let prepared = rank.double.registered();
            // Each pair has about 9 MiB each way, which is more than all slots together.
            let lists = Lists::new(Kind::Alltoall, size, 0, |from, to| {
                (9 * MESSAGE) / 4 + 1000 * (from + 2 * to) as usize
            });
            rank.run_lists(&lists, On::Device, None, 0);
            let pinned = rank.double.registered() - prepared;
            assert!(pinned <= SLOTS, "{pinned} bytes are pinned");
            assert!(pinned >= 4 * MESSAGE, "only {pinned}: it went another way");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size} ranks");
    }
}

// ---- trouble

/// What becomes of two calls of a group in which rank 1 counts `sent` elements between itself and rank 0,
/// which counts `expected`: each rank's error, and whether the call that it failed in had written anything.
fn differ(way: (&str, Option<u64>), kind: Kind, sent: usize, expected: usize) -> Vec<(Error, bool)> {
    let odd = if kind == Kind::Scatter { (0, 1) } else { (1, 0) };
    let met = Barrier::new(3);
    members(way, 3, Order::RoundRobin, |rank| {
        met.wait();
        let len = if rank.rank == 1 { sent } else { expected };
        let lists = Lists::new(kind, 3, 0, |from, to| if (from, to) == odd { len } else { 200 });
        let (values, old) = (lists.input(rank.rank, 0), vec![-1; lists.output(rank.rank, 0).len()]);
        let (input, output) = (rank.memory(&values), rank.memory(&old));
        rank.fill(input, &values);
        rank.fill(output, &old);
        let mut result = rank
            .start(&lists.request(rank.rank, input, output), &rank.tagged(way.1))
            .and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let own = result.is_err();
        // Who needs nothing of the two hears of it in its next calls.
        while result.is_ok() {
            result = rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default());
        }
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        let written = own && rank.double.peek(output, old.len() * 4) != bytes(&old);
        (result.expect_err("they differ"), written)
    })
}

#[test]
fn counts_that_differ_are_named_before_anything_is_written() {
    for way in WAYS {
        for kind in KINDS {
            // The number of messages differs, or the length of the last one alone, or nothing is expected.
            for (sent, expected) in [(700, 500), (700, 701), (600, 64), (64, 600), (300, 0)] {
                // Of a scatter nothing but the block tells.
                if kind == Kind::Scatter && expected == 0 {
                    continue;
                }
                for (who, (error, written)) in differ(way, kind, sent, expected).into_iter().enumerate() {
                    let case = format!("{way:?}, {kind:?}, {sent} and {expected}, rank {who}: {error}");
                    assert_eq!(error.status(), Status::Mismatch, "{case}");
                    let counts = [(1, sent), (0, expected)].map(|(rank, count)| {
                        [
                            format!("rank {rank} counts {} bytes", 4 * count),
                            format!("rank {rank} {}", 4 * count),
                        ]
                    });
                    let named = |texts: &[String; 2]| texts.iter().any(|text| error.text().contains(text));
                    assert!(counts.iter().all(named), "{case}");
                    // What others obtain is as they count it.
                    let obtains = if kind == Kind::Scatter { 1 } else { 0 };
                    assert!(who != obtains || !written, "{case}");
                }
            }
        }
    }
}

#[test]
fn a_driver_call_that_fails_in_a_call_with_lists_is_named_on_all_ranks() {
    failing_calls_are_named("tcp", 3, |rank| {
        let lists = Lists::new(Kind::Alltoall, 2, 0, |from, to| 300 + 100 * (from + to) as usize);
        rank.start_lists(&lists, None, 0)
    });
}

#[test]
fn a_deadline_lets_the_stream_go_on_and_says_who_is_late() {
    let met = Barrier::new(3);
    let errors = ranks(3, "tcp", Order::RoundRobin, |rank| {
        let lists = Lists::uneven(Kind::Alltoall, 3, 0, 1);
        rank.run_lists(&lists, On::Device, None, 1);
        met.wait();
        if rank.rank == 2 {
            // It calls nothing until the others have given up.
            met.wait();
            return None;
        }
        let (values, result) = (lists.input(rank.rank, 0), lists.output(rank.rank, 0));
        let (input, output) = (rank.memory(&values), rank.memory(&result));
        rank.fill(input, &values);
        let call = Call { timeout: Some(Duration::from_millis(300)), ..rank.call() };
        let error = rank
            .start(&lists.request(rank.rank, input, output), &call)
            .and_then(|work| work.wait(Deadline::after(PATIENCE)))
            .expect_err("rank 2 does not call");
        met.wait();
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status(), Status::Timeout, "{error}");
        assert!(error.text().contains("nothing from rank 2"), "{error}");
    }
}
