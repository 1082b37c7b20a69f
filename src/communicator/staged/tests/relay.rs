//! Calls that are relayed: the same expectations, other ways.

use super::*;
use crate::communicator::context::Place;
use crate::cuda::double::DoubleKernels;
use crate::cuda::fold::FoldKernels;
use crate::engine::endpoint::Through;
use crate::engine::group::Group;
use crate::engine::staged::relay::{Held, Limits};

/// Pieces of 64 elements of 4 bytes, however short the call is.
const LIMITS: Limits = Limits { piece: PIECE, above: 0 };

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
    a_driver_call_that_fails_is_named_on_all_ranks_or_does_no_harm,
    a_call_that_fails_midway_gives_the_memory_back,
    a_deadline_lets_the_stream_go_on,
    a_rank_that_leaves_is_named,
    calls_that_differ_are_told_before_anything_is_written,
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
        let start = Instant::now();
        while self.group().relay().relays().is_none() {
            assert!(start.elapsed() < PATIENCE, "no lanes");
            self.first_call();
        }
        assert_eq!(self.group().relay().relays(), Some(true));
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
        match self.context.place() {
            Place::Group(group) => group,
            Place::Solo => panic!("a group"),
        }
    }
}

/// Pieces that connections carry in many parcels, more than there are movers, and whose socket is full at times.
#[test]
fn long_pieces_are_right_in_whatever_order_their_parts_come() {
    const LONG: Limits = Limits { piece: 1 << 20, above: 0 };
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
                _ => FoldKernels::with_blocks(1),
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
            let context = rank.context.duplicate().expect("a group");
            context.cuda().pretend(&rank.devices, PIECE);
            let child = Rank {
                context,
                double: rank.double.clone(),
                devices: rank.devices.clone(),
                stream: rank.stream,
                rank: rank.rank,
                completes: AtomicBool::new(false),
            };
            child.relay();
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

// ---- trouble

fn a_driver_call_that_fails_is_named_on_all_ranks_or_does_no_harm(way: &str) {
    for failing in 0.. {
        let met = Barrier::new(2);
        let outcomes = ranks(2, way, Order::RoundRobin, |rank| {
            rank.relay();
            // Everybody is there before anything goes wrong.
            rank.run(&request(Kind::Barrier, 0, 0, 0, 0), &Call::default()).expect("a barrier");
            met.wait();
            if rank.rank == 0 {
                rank.double.fail_call(failing);
            }
            // Until the lanes are there or never will be, and once more.
            let mut last = false;
            let result = loop {
                let result = exercise(rank, Kind::Allreduce, 201, false, 0)
                    .and_then(|work| work.wait(Deadline::after(PATIENCE)));
                if last || result.is_err() {
                    break result;
                }
                last = rank.group().relay().relays().is_some();
            };
            if result.is_err() {
                assert!(rank.context.failure().is_some(), "the group has failed");
            }
            let fails = rank.double.is_to_fail();
            let complaints = rank.drain();
            let complaints = if result.is_err() { grave(complaints) } else { complaints };
            (result.err(), complaints, fails)
        });
        let errors: Vec<Error> = outcomes.iter().filter_map(|(error, ..)| error.clone()).collect();
        let never = outcomes.iter().any(|(.., fails)| *fails);
        for (_, complaints, _) in outcomes {
            assert_eq!(complaints, Vec::<String>::new(), "call {failing}: {errors:?}");
        }
        if never {
            assert!(failing > 50 && errors.is_empty(), "only {failing} calls");
            return;
        }
        for error in &errors {
            assert!(error.text().contains(" failed: CUDA_ERROR_INJECTED: "), "call {failing}: {error}");
            assert_eq!(error.status(), Status::Cuda);
        }
    }
}

fn a_call_that_fails_midway_gives_the_memory_back(way: &str) {
    for (order, first, ordered) in [
        (Order::RoundRobin, 0, false),
        (Order::Backward, 1, false),
        (Order::First(0), 2, false),
        (Order::RoundRobin, 0, true),
    ] {
        for failing in (first..).step_by(3) {
            let met = Barrier::new(2);
            let fails = relaying(2, way, order, |rank| {
                met.wait();
                let values = given(rank.rank, 0, 700);
                let (input, output) = (rank.memory(&values), rank.memory(&values));
                rank.fill(input, &values);
                if rank.rank == 0 {
                    rank.double.fail_call(failing);
                }
                let sum = request(Kind::Allreduce, input, output, 700, 0);
                let call = if ordered { rank.call() } else { Call::default() };
                let result = rank.start(&sum, &call);
                let result = result.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                let fails = rank.double.is_to_fail();
                if result.is_err() {
                    let marked = vec![-7; 700];
                    rank.fill(output, &marked);
                    assert_eq!(grave(rank.drain()), Vec::<String>::new());
                    assert!(
                        rank.double.peek(output, 2800) == bytes(&marked),
                        "call {failing}: written after its end"
                    );
                }
                fails
            });
            if fails[0] {
                assert!(failing > if ordered { 6 } else { 100 }, "only {failing} calls");
                break;
            }
        }
    }
}

/// What a call ended with that rank 1 does not take part in as it should: the caller has its memory back.
fn given_up(way: &str, kind: Kind, timeout: Duration, order: Order, other: impl Fn(&Rank) + Sync) -> Error {
    let outcomes = relaying(2, way, order, |rank| {
        if rank.rank == 1 {
            other(rank);
            return None;
        }
        let (reads, writes) = lengths(kind, 700, 2, true);
        let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
        rank.fill(input, &given(0, 0, reads));
        let call = Call { timeout: Some(timeout), ..rank.call() };
        let work = rank.start(&request(kind, input, output, 700, 0), &call).expect("it starts");
        let error = work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not follow");
        let marked = vec![-7; writes];
        rank.fill(output, &marked);
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        assert_eq!(rank.double.peek(output, writes * 4), bytes(&marked), "written after the end");
        Some(error)
    });
    outcomes.into_iter().flatten().next().expect("rank 0 answers")
}

fn a_deadline_lets_the_stream_go_on(way: &str) {
    for (kind, order) in [(Kind::Allreduce, Order::RoundRobin), (Kind::Alltoall, Order::Eager)] {
        let give_up = |timeout| {
            given_up(way, kind, timeout, order, |rank| {
                // It calls, but its stream does not come to it.
                let gate = rank.gate();
                let (reads, writes) = lengths(kind, 700, 2, false);
                let (input, output) = (rank.memory(&vec![0; reads]), rank.memory(&vec![0; writes]));
                // If rank 0 has not given up before.
                let work = rank.start(&request(kind, input, output, 700, 0), &rank.call());
                let began = work.is_ok();
                let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
                let error = result.expect_err("rank 0 has given up");
                assert!(!began || error.text().contains("; here, "), "where this rank stands: {error}");
                gate.release();
                assert_eq!(grave(rank.drain()), Vec::<String>::new());
            })
        };
        // A rank that has not come itself to where it waits for the other tells of that, and has longer then.
        let timeouts =
            (0..).map(|times| Duration::from_millis(100 << times)).take_while(|timeout| *timeout < PATIENCE);
        let mut errors = timeouts.map(give_up);
        let error = errors.find(|error| !error.text().contains("not done after")).expect("in time");
        assert_eq!(error.status(), Status::Timeout);
        for part in ["nothing from rank 1", "; here, "] {
            assert!(error.text().contains(part), "{error}");
        }
    }
}

fn a_rank_that_leaves_is_named(way: &str) {
    for order in [Order::Eager, Order::RoundRobin] {
        let error = given_up(way, Kind::Allreduce, PATIENCE, order, |_| ());
        assert_eq!(error.status(), Status::PeerFailed);
        assert!(error.text().contains("rank 1"), "{error}");
    }
}

fn calls_that_differ_are_told_before_anything_is_written(way: &str) {
    let (sum, bits) = (Kind::Allreduce, Kind::Reduce);
    for (theirs, count) in [(sum, 699), (bits, 700), (sum, 3)] {
        let error = given_up(way, sum, PATIENCE, Order::RoundRobin, |rank| {
            let memory = rank.memory(&[0; 700]);
            let work = rank.start(&request(theirs, memory, memory, count, 0), &rank.call());
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect_err("they differ");
            assert_eq!(rank.double.peek(memory, 4), [0xdb; 4], "written");
            assert_eq!(grave(rank.drain()), Vec::<String>::new());
        });
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.text().contains("allreduce(700 × int32, sum)"), "{error}");
    }
}

/// Rank 1 calls something else, and rank 2 calls when rank 0 has given its call up: what it says then is of nobody.
#[test]
fn ranks_that_meet_in_vain_leave_no_messages_to_what_they_met_in() {
    let (met, given_up) = (Barrier::new(3), Barrier::new(2));
    let left = relaying(3, "tcp", Order::RoundRobin, |rank| {
        met.wait();
        let (memory, endpoint) = (rank.memory(&[0; 700]), rank.group().endpoint());
        if rank.rank == 2 {
            given_up.wait();
        }
        let start = Instant::now();
        while rank.rank == 0 && endpoint.messages().unexpected_bytes() == 0 && start.elapsed() < PATIENCE {
            endpoint.progress(0, Through::Messages);
        }
        let count = if rank.rank == 1 { 699 } else { 700 };
        let work = rank.start(&request(Kind::Allreduce, memory, memory, count, 0), &rank.call());
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        let operations = endpoint.messages().operations();
        if rank.rank == 0 {
            given_up.wait();
        }
        let status = result.err().map(|error| error.status());
        (status, operations, grave(rank.drain()))
    });
    assert_eq!(left, vec![(Some(Status::Mismatch), 0, vec![]); 3], "how it ended, and what is under way");
}

#[test]
fn a_call_that_waits_for_its_parcels_alone_names_whom_they_are_for() {
    let told = Barrier::new(2);
    relaying(2, "tcp", Order::RoundRobin, |rank| {
        let is_root = rank.rank == 0;
        // No more pieces than lanes: the root needs nothing of rank 1.
        let memory = rank.memory(&[0; 200]);
        rank.group().relay().hold_movers(if is_root { Held::All } else { Held::None });
        let broadcast = request(Kind::Broadcast, if is_root { memory } else { 0 }, memory, 200, 0);
        let timeout = if is_root { Duration::from_millis(300) } else { PATIENCE };
        let work = rank.start(&broadcast, &Call { timeout: Some(timeout), ..rank.call() });
        let result = work.and_then(|work| work.wait(Deadline::after(PATIENCE)));
        told.wait();
        rank.group().relay().hold_movers(Held::None);
        let error = result.expect_err("nothing moves");
        if is_root {
            assert_eq!(error.status(), Status::Timeout, "{error}");
            for part in ["nothing from rank 1 ", "parcels to rank 1 are not written"] {
                assert!(error.text().contains(part), "{error}");
            }
        }
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
    });
}

/// Lanes stay pinned while a device may use them, for a call that was given up; what moves pieces between the ranks does not stay.
#[test]
fn connections_end_with_their_group_whatever_was_given_up() {
    let met = Barrier::new(2);
    let movers = relaying(2, "tcp", Order::RoundRobin, |rank| {
        if rank.rank == 0 {
            let memory = rank.memory(&[0; 700]);
            let call = Call { timeout: Some(Duration::from_millis(100)), ..rank.call() };
            let sum = request(Kind::Allreduce, memory, memory, 700, 0);
            let work = rank.start(&sum, &call).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect_err("rank 1 does not follow");
        }
        // Nobody leaves before.
        met.wait();
        assert_eq!(grave(rank.drain()), Vec::<String>::new());
        rank.group().relay().movers().expect("movers")
    });
    let start = Instant::now();
    while movers.iter().any(|movers| movers.strong_count() > 0) {
        assert!(start.elapsed() < PATIENCE, "movers are left");
        std::thread::yield_now();
    }
}

/// What lets the others use this rank's lanes may be late, but has gone when a call ends that needs it: the second of four pieces each,
/// the fifth of one.
#[test]
fn a_call_ends_when_the_others_can_end_it_whatever_becomes_of_this_rank() {
    for (bytes, calls) in [(200, 1), (16, 4)] {
        relaying(2, "tcp", Order::RoundRobin, |rank| {
            let is_root = rank.rank == 0;
            let memory = rank.memory(&vec![7; bytes as usize]);
            let broadcast = || request(Kind::Broadcast, if is_root { memory } else { 0 }, memory, bytes, 0);
            if is_root {
                let start = Instant::now();
                while !rank.group().relay().has_told_all() {
                    assert!(start.elapsed() < PATIENCE, "what was called before is not told of");
                    std::thread::yield_now();
                }
                rank.group().relay().hold_movers(Held::Marks);
            }
            let start = || rank.start(&broadcast(), &rank.call()).expect("it starts");
            for _ in 0..calls {
                start().wait(Deadline::after(PATIENCE)).expect("only later calls need the marks");
            }
            let work = start();
            if is_root {
                let early = work.wait(Deadline::after(Duration::from_millis(200)));
                assert_eq!(early.expect_err("rank 1 has no lanes for it yet").status(), Status::Timeout);
                rank.group().relay().hold_movers(Held::None);
            }
            work.wait(Deadline::after(PATIENCE)).expect("it ends");
            assert_eq!(grave(rank.drain()), Vec::<String>::new());
        });
    }
}
