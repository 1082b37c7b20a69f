//! Calls that are relayed: the same expectations, other ways.

use super::*;
use crate::communicator::context::Membership;
use crate::cuda::double::DoubleKernels;
use crate::cuda::fold::FoldKernels;
use crate::engine::endpoint::Through;
use crate::engine::group::Group;
use crate::engine::staged::relay::{Held, Limits};

/// Pieces of 64 elements of 4 bytes, however short the call is.
const LIMITS: Limits = Limits { piece: PIECE, above: Some(0) };

/// Elements: one, odd, four pieces, and more pieces than lanes.
const COUNTS: [usize; 4] = [1, 37, 201, 700];

/// Every test twice: with lanes that all ranks have mapped, and with lanes of each that connections fill.
macro_rules! both_ways {
    ($($name:ident),* $(,)?) => {
        mod shared {
            $(#[test]
            fn $name() {
                super::$name("shm");
            })*
        }
        mod wired {
            $(#[test]
            fn $name() {
                super::$name("tcp");
            })*
        }
    };
}

mod queues;
mod trouble;

both_ways! {
    every_collective_is_right,
    calls_are_right_in_every_order,
    calls_without_a_stream_are_right_in_every_order,
    what_a_courier_cannot_combine_the_processors_do,
    one_queue_of_the_device_is_enough,
    the_bits_are_those_of_host_memory,
    calls_that_are_relayed_and_calls_that_are_not_keep_their_order,
    a_rank_that_cannot_relay_has_all_go_the_ordinary_way,
    calls_that_one_rank_cannot_relay_come_between_others,
    a_second_call_creates_nothing,
    a_call_that_is_not_relayed_after_all_asks_for_nothing_while_its_stream_waits,
    groups_come_and_go,
}

/// Runs `body` on ranks that relay from their first call on.
fn relaying<T: Send>(size: u32, way: &str, order: Order, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    ranks(size, way, order, |rank| {
        rank.relay();
        rank.warm_up();
        body(rank)
    })
}

impl Rank {
    pub(super) fn relay(&self) {
        self.context.cuda().pretend_limits(LIMITS);
        self.copy_by_kernels();
    }

    /// Calls until the lanes are there.
    pub(super) fn warm_up(&self) {
        assert!(self.has_lanes());
    }

    /// Calls until all ranks have their lanes, or agree that there are none. Whether they have.
    fn has_lanes(&self) -> bool {
        let start = Instant::now();
        loop {
            if let Some(has) = self.group().relay().relays() {
                return has;
            }
            assert!(start.elapsed() < PATIENCE, "no lanes");
            self.first_call();
        }
    }

    /// The same rank in another context, on the same devices and the same stream.
    fn within(&self, context: Context) -> Rank {
        context.cuda().pretend(&self.devices, PIECE);
        let rank = Rank {
            context,
            double: self.double.clone(),
            devices: self.devices.clone(),
            stream: self.stream,
            rank: self.rank,
            completes: AtomicBool::new(false),
        };
        rank.relay();
        rank
    }

    /// The same rank in another group of the same ranks.
    fn child(&self) -> Rank {
        self.within(self.context.duplicate().expect("a group"))
    }

    /// Rank 0 begins a call that it will give up.
    fn begin_alone(&self) -> Option<Work> {
        let memory = self.memory(&[0; 700]);
        // If its stream has not come to it by then, the test finds less.
        let call = Call { timeout: Some(Duration::from_millis(100)), ..self.call() };
        let sum = request(Kind::Allreduce, memory, memory, 700, 0);
        (self.rank == 0).then(|| self.start(&sum, &call).expect("it starts"))
    }

    /// A call that has ended on all ranks when any of them goes on.
    pub(super) fn first_call(&self) {
        exercise(self, Kind::Allreduce, 300, false, 0)
            .and_then(|work| work.wait(Deadline::after(PATIENCE)))
            .expect("it ends well");
        self.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default()).expect("a barrier");
    }

    /// How many pieces were relayed so far.
    fn relayed(&self) -> u64 {
        self.group().relay().pieces()
    }

    fn group(&self) -> &Arc<Group> {
        match self.context.membership() {
            Membership::Group(group) => group,
            Membership::Solo => panic!("a group"),
        }
    }
}

/// Pieces that connections carry in many parcels, more than there are movers, and whose socket is full at
/// times.
#[test]
fn long_pieces_are_right_in_whatever_order_their_parts_come() {
    const LONG: Limits = Limits { piece: 1 << 20, above: Some(0) };
    for (size, order) in [(2, Order::Eager), (3, Order::RoundRobin)] {
        let complaints = ranks(size, "tcp", order, |rank| {
            rank.context.cuda().pretend_limits(LONG);
            rank.copy_by_kernels();
            rank.warm_up();
            let pieces = rank.relayed();
            let count = (1 << 20) + 37;
            let (own, ranks, mut calls) = (rank.rank as i32, size as i32, Vec::new());
            for round in 0..6 {
                // What each rank gives says whose it is, of which call and from where.
                let given = |from: i32| move |at: i32| at + 3 * from + 7 * round;
                let all = |value: &dyn Fn(i32) -> i32| (0..count).map(value).collect::<Vec<i32>>();
                let (sums, root) = (round % 2 == 0, round % ranks);
                let due = match sums {
                    true => all(&|at| (0..ranks).map(|from| given(from)(at)).sum()),
                    false => all(&given(root)),
                };
                let [from, to] = [rank.memory(&due), rank.memory(&due)];
                rank.fill(from, &all(&given(own)));
                let kind = if sums { Kind::Allreduce } else { Kind::Broadcast };
                let from = if sums || own == root { from } else { 0 };
                let call = request(kind, from, to, count as u64, root as u32);
                calls.push((rank.start(&call, &rank.call()).expect("it starts"), to, due));
            }
            for (work, to, due) in calls {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                assert!(rank.double.peek(to, 4 * due.len()) == bytes(&due), "other values");
            }
            // More than there are lanes.
            let relayed = rank.relayed() - pieces;
            assert!((24..200).contains(&relayed), "{relayed} pieces");
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}, {order:?}");
    }
}

fn every_collective_is_right(way: &str) {
    for (size, order) in [
        (2, Order::Eager),
        (2, Order::RoundRobin),
        (3, Order::Backward),
        (3, Order::Random(7)),
        (4, Order::Random(8)),
    ] {
        let complaints = relaying(size, way, order, |rank| {
            let (mut round, mut pieces) = (0, rank.relayed());
            let mut works = Vec::new();
            for kind in COLLECTIVES {
                for count in COUNTS {
                    for in_place in [false, true] {
                        works.push(exercise(rank, kind, count, in_place, round).expect("it starts"));
                        round += 1;
                        pieces += count.div_ceil(64) as u64;
                    }
                }
            }
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            assert!(rank.relayed() >= pieces, "{} pieces were relayed", rank.relayed());
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}, {order:?}");
    }
}

fn calls_are_right_in_every_order(way: &str) {
    for kind in COLLECTIVES {
        for order in Order::all(3) {
            let answers = relaying(2, way, order, |rank| {
                let gate = rank.gate();
                let before = [rank.double.records(), rank.double.values()];
                let works = [0, 2].map(|round| exercise(rank, kind, 700, false, round).expect("it starts"));
                // Time for what comes too early.
                std::thread::sleep(Duration::from_millis(1));
                gate.release();
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                assert!(rank.relayed() > 0);
                // Couriers do it all.
                assert_eq!(
                    [rank.double.records(), rank.double.values()],
                    before,
                    "events and values waited for"
                );
                rank.drain()
            });
            assert_eq!(answers.concat(), Vec::<String>::new(), "{kind:?}, {order:?}");
        }
    }
}

/// Two calls behind what the default stream does late, by side streams. What went wrong.
fn without_a_stream(way: &str, kind: Kind, order: Order) -> Vec<String> {
    let answers = relaying(2, way, order, |rank| {
        // As if a stream waited for another call there.
        let _held = (rank.rank == 1).then(|| rank.devices.note_held());
        // SAFETY: default streams always exist.
        let front = unsafe { Stream::borrow(&rank.devices, 0, StreamHandle::NULL) }.expect("a stream");
        let gate = rank.devices.word(0).expect("a word");
        front.wait_word(&gate).expect("it waits");
        let (reads, writes) = lengths(kind, 700, 2, rank.rank == 0);
        let rounds = [0, 2].map(|round| {
            let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
            rank.double.fill(front.handle(), 0, input, &bytes(&given(rank.rank, round, reads)));
            let from = if kind == Kind::Broadcast && rank.rank != 0 { 0 } else { input };
            (round, output, request(kind, from, if writes > 0 { output } else { 0 }, 700, 0))
        });
        let works = rounds.each_ref().map(|(_, _, request)| {
            let work = rank.start(request, &Call::default());
            work.expect("it starts")
        });
        // Time for what comes too early.
        std::thread::sleep(Duration::from_millis(1));
        gate.release();
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert!(rank.relayed() > 0);
        let mut complaints = Vec::new();
        for (round, output, _) in rounds {
            let due = expected(kind, 700, 2, rank.rank, 0, round);
            if rank.double.peek(output, writes * 4) != bytes(&due[..writes]) {
                complaints.push(format!("rank {}, round {round}", rank.rank));
            }
        }
        complaints.extend(rank.drain());
        complaints
    });
    answers.concat()
}

fn calls_without_a_stream_are_right_in_every_order(way: &str) {
    for kind in COLLECTIVES {
        for order in Order::all(3) {
            let complaints = without_a_stream(way, kind, order);
            assert_eq!(complaints, Vec::<String>::new(), "{kind:?}, {order:?}");
        }
    }
}

fn what_a_courier_cannot_combine_the_processors_do(way: &str) {
    // More ranks than it takes operands.
    for size in [2, 9] {
        let complaints = ranks(size, way, Order::Random(4), |rank| {
            rank.relay();
            if size == 2 {
                rank.warm_up();
            }
            let before = rank.relayed();
            let values: Vec<Vec<i32>> = (0..size).map(|other| given(other, 1, 300)).collect();
            let combined = |combine: fn(i32, i32) -> i32| -> Vec<i32> {
                (0..300)
                    .map(|at| values.iter().map(|values| values[at]).reduce(combine).expect("ranks"))
                    .collect()
            };
            let input = rank.memory(&values[rank.rank as usize]);
            let outputs = [0, 1].map(|_| rank.memory(&[0; 300]));
            rank.fill(input, &values[rank.rank as usize]);
            let [sum, largest] = outputs.map(|output| request(Kind::Allreduce, input, output, 300, 0));
            let largest = Request { operator: Operator::Max, ..largest };
            let call = rank.call();
            let context = &rank.context;
            // Calls that start together share a courier, which knows the operator of the first.
            // SAFETY: the double trusts no address, and keeps memory until it is dropped.
            let works = unsafe { start_together(&[(context, &sum, &call), (context, &largest, &call)]) };
            rank.expect(outputs[0], &combined(|a, b| a + b), "the sum");
            rank.expect(outputs[1], &combined(i32::max), "the largest");
            for work in works.expect("they start") {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            let relayed = before + if size == 2 { 300_u64.div_ceil(64) } else { 0 };
            assert_eq!(rank.relayed(), relayed);
            // An address between two elements, on one rank.
            let memory = rank.memory(&[0; 301]) + if rank.rank == 1 { 2 } else { 0 };
            rank.fill(memory, &values[rank.rank as usize]);
            let in_place = request(Kind::Allreduce, memory, memory, 300, 0);
            rank.run(&in_place, &rank.call()).expect("it ends well");
            rank.expect(memory, &combined(|a, b| a + b), "the sum from between two elements");
            assert_eq!(rank.relayed(), relayed);
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}");
    }
}

fn one_queue_of_the_device_is_enough(way: &str) {
    for order in [Order::Eager, Order::RoundRobin, Order::Random(3)] {
        for queues in [1, MOST] {
            let doubles = [with_queues(queues, order), with_queues(queues, order)];
            let complaints = ahead_of_streams(&doubles, way, |rank| {
                rank.relay();
                many(rank)
            });
            assert_eq!(complaints, Vec::<String>::new(), "{queues}, {order:?}");
        }
    }
}

fn the_bits_are_those_of_host_memory(way: &str) {
    let operators = |rank: &Rank| {
        // A scalar of its own for each rank.
        let scale = 0.37 + f64::from(rank.rank);
        [Operator::Sum, Operator::Average, Operator::PreMulSum(scale), Operator::Product, Operator::Max]
    };
    let dtypes =
        [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64, DataType::F8E4M3, DataType::I32];
    for size in 2..=4 {
        let complaints = relaying(size, way, Order::Random(5), |rank| {
            for dtype in dtypes {
                for operator in operators(rank) {
                    for kind in [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter] {
                        let count = 333u64;
                        let blocks = if kind == Kind::ReduceScatter { size as usize } else { 1 };
                        let len = count as usize * dtype.size();
                        let mut noise = u64::from(rank.rank) + 3;
                        let input: Vec<u8> = (0..len * blocks)
                            .map(|_| {
                                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                                // Small exponents, so that nothing overflows.
                                (noise >> 56) as u8 & 0x3f
                            })
                            .collect();
                        let mut host = vec![0u8; len];
                        let on_host = Request {
                            dtype,
                            operator,
                            input: input.as_ptr(),
                            output: host.as_mut_ptr(),
                            ..request(kind, 0, 0, count, 1)
                        };
                        rank.run(&on_host, &Call::default()).expect("on the host");
                        let (from, to) = (rank.double.memory(0, input.len()), rank.double.memory(0, len));
                        rank.double.fill(rank.stream, 0, from, &input);
                        let on_device = Request { input: pointer(from), output: pointer(to), ..on_host };
                        let before = rank.relayed();
                        rank.run(&on_device, &rank.call()).expect("on the device");
                        assert!(rank.relayed() > before);
                        if kind != Kind::Reduce || rank.rank == 1 {
                            let what = format!("{kind:?}, {dtype:?}, {operator:?}, {size} ranks");
                            rank.double.expect(rank.stream, 0, to, &host, &what);
                        }
                    }
                }
            }
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{size}");
    }
}

fn calls_that_are_relayed_and_calls_that_are_not_keep_their_order(way: &str) {
    let complaints = relaying(2, way, Order::RoundRobin, |rank| {
        let (mut works, first) = (Vec::new(), rank.relayed());
        for round in 0..6 {
            works.push(exercise(rank, Kind::Allreduce, 300, true, round).expect("it starts"));
            // By name, with a tag, from the host, empty, a message: none of them is relayed.
            let values = given(rank.rank, round, 300);
            let memory = rank.memory(&values);
            rank.fill(memory, &values);
            let sum = request(Kind::Allreduce, memory, memory, 300, 0);
            let ways = [
                Call { algorithm: Some(crate::schedule::Algorithm::Ring as i32), ..rank.call() },
                Call { tag: Some(7), ..rank.call() },
            ];
            let before = rank.relayed();
            works.push(rank.start(&sum, &ways[round as usize % 2]).expect("it starts"));
            rank.expect(memory, &expected(Kind::Allreduce, 300, 2, rank.rank, 0, round), "not relayed");
            let mut host = values.clone();
            let address = host.as_mut_ptr().expose_provenance() as u64;
            rank.run(&request(Kind::Allreduce, address, address, 300, 0), &Call::default())
                .expect("it ends well");
            assert_eq!(host, expected(Kind::Allreduce, 300, 2, rank.rank, 0, round));
            works.push(exercise(rank, Kind::Allgather, 0, true, round).expect("it starts"));
            works.extend(exchange(rank, &rank.context, round));
            // The first of them may have been relayed meanwhile.
            assert!(rank.relayed() <= before + 5);
        }
        for work in works {
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(rank.relayed(), first + 6 * 5);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

fn a_rank_that_cannot_relay_has_all_go_the_ordinary_way(way: &str) {
    for order in [Order::Eager, Order::RoundRobin] {
        let complaints = ranks(2, way, order, |rank| {
            rank.context.cuda().pretend_limits(LIMITS);
            let kernels = match rank.rank {
                0 => Arc::new(DoubleKernels(rank.double.clone())) as Arc<dyn crate::cuda::local::Kernels>,
                // The double loads no modules.
                _ => FoldKernels::apart(),
            };
            rank.context.cuda().pretend_kernels(kernels);
            let mut works = vec![exercise(rank, Kind::Allreduce, 300, false, 0).expect("it starts")];
            // One side on the host, another on each rank.
            let values = given(rank.rank, 1, 300);
            let due = expected(Kind::Allgather, 300, 2, 0, 0, 1);
            let mut host = if rank.rank == 0 { values.clone() } else { vec![0; 600] };
            let address = host.as_mut_ptr().expose_provenance() as u64;
            let device = rank.memory(&vec![0; 600]);
            let (input, output) = if rank.rank == 0 { (address, device) } else { (device, address) };
            if rank.rank == 1 {
                rank.fill(device, &values);
            }
            let gather = request(Kind::Allgather, input, output, 300, 0);
            let work = rank.start(&gather, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            if rank.rank == 0 {
                rank.expect(device, &due, "gathered");
            } else {
                assert_eq!(host, due);
            }
            assert_eq!(rank.relayed(), 0, "not so far");
            works.push(exercise(rank, Kind::Alltoall, 300, true, 2).expect("it starts"));
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            assert_eq!(rank.relayed(), 0);
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

#[test]
fn ranks_listen_once_however_many_calls_one_of_them_cannot_relay() {
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        if rank.rank == 0 {
            rank.relay();
        } else {
            rank.context.cuda().pretend_limits(LIMITS);
            // The double loads no modules.
            rank.context.cuda().pretend_kernels(FoldKernels::apart());
        }
        let listening = || rank.group().relay().movers().expect("it listens");
        rank.first_call();
        let first = listening();
        for _ in 0..10 {
            rank.first_call();
            assert!(listening().ptr_eq(&first));
        }
        assert_eq!(rank.relayed(), 0);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

fn calls_that_one_rank_cannot_relay_come_between_others(way: &str) {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        let complaints = relaying(2, way, order, |rank| {
            let (mut works, first) = (Vec::new(), rank.relayed());
            for round in 0..4 {
                works.push(exercise(rank, Kind::Allgather, 300, false, round).expect("it starts"));
                // Rank 0 has begun to give when it learns that rank 1's input is on the host.
                let values = given(rank.rank, round, 300);
                let (device, output) = (rank.memory(&values), rank.memory(&[0; 600]));
                rank.fill(device, &values);
                let host = values.as_ptr().expose_provenance() as u64;
                let input = if rank.rank == 0 { device } else { host };
                let work = rank.start(&request(Kind::Allgather, input, output, 300, 0), &rank.call());
                rank.expect(output, &expected(Kind::Allgather, 300, 2, rank.rank, 0, round), "gathered");
                rank.fill(device, &[-9; 300]);
                work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            for work in works {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            assert_eq!(rank.relayed(), first + 4 * 5);
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "{order:?}");
    }
}

fn a_second_call_creates_nothing(way: &str) {
    relaying(2, way, Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 1000);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let mut before = 0;
        for round in 0..4 {
            if round == 1 {
                before = rank.double.creations();
            }
            // The stream comes late to every call.
            let gate = rank.gate();
            let sum = request(Kind::Allreduce, input, output, 1000, 0);
            let work = rank.start(&sum, &rank.call()).expect("it starts");
            gate.release();
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(rank.double.creations(), before);
        rank.drain()
    });
}

fn a_call_that_is_not_relayed_after_all_asks_for_nothing_while_its_stream_waits(way: &str) {
    let complaints = relaying(2, way, Order::RoundRobin, |rank| {
        const COUNT: usize = 50_000;
        // In two pieces, which no call before has had memory for.
        rank.context.cuda().pretend(&rank.devices, COUNT * 4);
        let first = rank.relayed();
        let values = given(rank.rank, 1, COUNT);
        let (device, output) = (rank.memory(&values), rank.memory(&vec![0; 2 * COUNT]));
        rank.fill(device, &values);
        let host = values.as_ptr().expose_provenance() as u64;
        let gate = rank.gate();
        let input = if rank.rank == 0 { device } else { host };
        let work = rank.start(&request(Kind::Allgather, input, output, COUNT as u64, 0), &rank.call());
        let made = rank.double.creations();
        gate.release();
        work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
        assert_eq!(rank.double.creations(), made);
        rank.expect(output, &expected(Kind::Allgather, COUNT, 2, rank.rank, 0, 1), "gathered");
        assert_eq!(rank.relayed(), first);
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

fn groups_come_and_go(way: &str) {
    let complaints = relaying(2, way, Order::Random(2), |rank| {
        for round in 0..12 {
            let child = rank.child();
            // Or its lanes are being made when it ends.
            if round % 2 == 1 {
                child.warm_up();
            }
            for kind in [Kind::Allreduce, Kind::Alltoall] {
                let work = exercise(&child, kind, 300, false, round).expect("it starts");
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}
