//! Collectives in the order of a stream: what comes out, whatever the order of the streams, and what goes
//! wrong without a wait.

use super::*;
use crate::communicator::context::Membership;
use crate::cuda::driver::Memory;
use crate::engine::staged::relay::Limits;

/// Elements: none, one, odd, three pieces and a bit.
const COUNTS: [usize; 4] = [0, 1, 37, 201];

#[test]
fn every_collective_is_right() {
    for (size, transports) in [(2, "shm"), (3, "tcp")] {
        for order in [Order::Eager, Order::RoundRobin, Order::Random(7)] {
            let complaints = ranks(size, transports, order, |rank| {
                let mut round = 0;
                let mut works = Vec::new();
                for kind in COLLECTIVES {
                    for count in COUNTS {
                        for in_place in [false, true] {
                            works.push(exercise(rank, kind, count, in_place, round).expect("it starts"));
                            round += 1;
                        }
                    }
                }
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "{size} over {transports}, {order:?}");
        }
    }
}

#[test]
fn lists_that_all_ranks_know_come_in_pieces_too() {
    // Of blocks: none, in one piece, some longer than others, some of several pieces.
    let lists: [[usize; 3]; 5] = [[0, 0, 0], [5, 0, 7], [201, 0, 37], [64, 300, 129], [0, 0, 500]];
    for transports in ["shm", "tcp"] {
        for order in [Order::Eager, Order::RoundRobin, Order::Random(7)] {
            let complaints = ranks(3, transports, order, |rank| {
                let mut works = Vec::new();
                for kind in [Kind::Allgather, Kind::ReduceScatter] {
                    for (round, counts) in lists.iter().enumerate() {
                        works.push(exercise_list(rank, kind, counts, round as u32).expect("it starts"));
                    }
                }
                for work in works {
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
                rank.drain()
            });
            assert_eq!(complaints.concat(), Vec::<String>::new(), "over {transports}, {order:?}");
        }
    }
}

/// Pieces of a call that one rank has sent before another's stream comes to it.
const AHEAD: usize = 1100;

/// A call to which rank 1's stream comes when rank 0 has sent all of it; or, if there is a `limit` to what
/// rank 1 keeps that it has not asked for, when it keeps so much. What went wrong.
fn run_far_ahead(kind: Kind, round: u32, limit: Option<usize>) -> Vec<String> {
    let (met, is_sent) = (Barrier::new(2), AtomicBool::new(false));
    let complaints = ranks(2, "tcp", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        rank.context.cuda().pretend_limits(Limits { above: Some(usize::MAX), ..Limits::default() });
        let Membership::Group(group) = rank.context.membership() else { panic!("a group") };
        let (is_late, endpoint) = (rank.rank == 1, group.endpoint());
        if let (true, Some(limit)) = (is_late, limit) {
            endpoint.messages().limit_unexpected(limit);
        }
        met.wait();
        let gate = is_late.then(|| rank.gate());
        let work = exercise(rank, kind, 64 * AHEAD, false, round).expect("it starts");
        if let Some(gate) = gate {
            let is_ahead = || match limit {
                Some(limit) => endpoint.messages().unexpected_bytes() > limit,
                None => is_sent.load(Ordering::Acquire),
            };
            let until = Deadline::after(PATIENCE);
            while !is_ahead() && !until.expired() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Time for what comes too early.
            std::thread::sleep(Duration::from_millis(10));
            let kept = endpoint.messages().unexpected_bytes();
            gate.release();
            // One message is more than that.
            assert!(limit.is_none_or(|limit| kept <= limit + 4 * PIECE), "{kept} bytes are kept");
        }
        let result = work.wait(Deadline::after(PATIENCE));
        is_sent.store(true, Ordering::Release);
        result.expect("it ends well");
        rank.drain()
    });
    complaints.concat()
}

#[test]
fn a_rank_may_be_any_number_of_pieces_ahead_of_one_whose_stream_is_late() {
    // The root sends, or the other rank does.
    for (kind, round) in [(Kind::Scatter, 0), (Kind::Broadcast, 0), (Kind::Gather, 1)] {
        let complaints = run_far_ahead(kind, round, None);
        assert_eq!(complaints, Vec::<String>::new(), "{kind:?}");
    }
}

#[test]
fn of_what_comes_before_its_stream_a_rank_keeps_so_much_and_takes_the_rest_when_that_comes() {
    for (kind, round) in [(Kind::Scatter, 0), (Kind::Gather, 1)] {
        let complaints = run_far_ahead(kind, round, Some(1 << 15));
        assert_eq!(complaints, Vec::<String>::new(), "{kind:?}");
    }
}

#[test]
fn a_rank_with_no_bytes_in_a_piece_waits_for_no_orders_of_calls_before() {
    let complaints = ranks(2, "shm", Order::RoundRobin, |rank| {
        rank.copy_by_kernels();
        // Each of these has a courier of its own, and only the first has few orders: its desks are the next
        // call's.
        let gate = rank.gate();
        let works: Vec<_> = (0..12)
            .map(|round| exercise(rank, Kind::Allreduce, if round == 0 { 1 } else { 2000 }, false, round))
            .collect();
        gate.release();
        for work in works {
            work.expect("it starts").wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(rank.drain(), Vec::<String>::new());
        for kind in [Kind::Allgather, Kind::ReduceScatter] {
            let work = exercise_list(rank, kind, &[5, 500], 12).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        rank.drain()
    });
    assert_eq!(complaints.concat(), Vec::<String>::new());
}

/// See [`super::twice`].
fn twice(kind: Kind, order: Order, missing: Option<Missing>) -> (Vec<String>, Vec<[usize; 2]>) {
    super::twice("shm", order, missing, |rank, round| {
        exercise(rank, kind, 201, false, round).expect("it starts")
    })
}

#[test]
fn calls_are_right_in_every_order() {
    for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Alltoall] {
        for order in Order::all(3) {
            let (complaints, _) = twice(kind, order, None);
            assert!(complaints.is_empty(), "{kind:?}, {order:?}: {complaints:?}");
        }
    }
}

#[test]
fn every_wait_is_needed() {
    for kind in [Kind::Allreduce, Kind::Broadcast] {
        each_wait_is_needed(|order, missing| twice(kind, order, missing));
    }
}

#[test]
fn a_second_call_creates_nothing() {
    ranks(2, "shm", Order::RoundRobin, |rank| {
        let values = given(rank.rank, 0, 1000);
        let (input, output) = (rank.memory(&values), rank.memory(&values));
        let mut before = 0;
        for round in 0..4 {
            if round == 1 {
                before = rank.double.creations();
            }
            let sum = request(Kind::Allreduce, input, output, 1000, 0);
            let work = rank.start(&sum, &rank.call()).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
        }
        assert_eq!(rank.double.creations(), before);
        rank.drain()
    });
}

#[test]
fn a_group_of_one_scales_on_the_stream() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        ranks(1, "shm", order, |rank| {
            rank.copy_by_kernels();
            let floats = |value: f32| [f32::to_bits(value) as i32; 4];
            let (input, output) = (rank.memory(&[0; 4]), rank.memory(&[0; 4]));
            let scaled = |output: u64, factor: f64| Request {
                dtype: DataType::F32,
                operator: Operator::PreMulSum(factor),
                ..request(Kind::Allreduce, input, output, 4, 0)
            };
            // The call does not wait for its stream.
            let gate = rank.gate();
            rank.fill(input, &floats(1.5));
            let work = rank.start(&scaled(output, 2.0), &rank.call()).expect("it starts");
            let in_place = rank.start(&scaled(input, 4.0), &rank.call()).expect("it starts");
            assert_eq!(rank.double.registered(), 0, "no memory of the host's is needed");
            rank.expect(output, &floats(3.0), "scaled");
            rank.expect(input, &floats(6.0), "scaled in place");
            gate.release();
            for work in [work, in_place] {
                work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            }
            // As often as its graph runs.
            rank.double.begin_capture(rank.stream, 0);
            let work = rank.start(&scaled(output, 0.5), &rank.call()).expect("it is captured");
            work.wait(Deadline::after(PATIENCE)).expect("it is in the graph");
            let graph = rank.double.end_capture(rank.stream, 0).expect("a graph");
            for value in [2.0, 3.0] {
                rank.fill(input, &floats(value));
                rank.double.launch_graph(&graph, rank.stream, 0);
                rank.expect(output, &floats(value / 2.0), "replayed");
            }
            assert_eq!(rank.drain(), Vec::<String>::new(), "{order:?}");
        });
    }
}

#[test]
fn a_group_of_one_that_scales_by_the_host_lets_nothing_go_that_its_stream_uses() {
    for failing in 0..40 {
        let complaints = ranks(1, "shm", Order::RoundRobin, |rank| {
            let [input, output] = [2.0, 0.0].map(|value| rank.memory(&[f32::to_bits(value) as i32; 4]));
            let scaled = Request {
                dtype: DataType::F32,
                operator: Operator::PreMulSum(2.0),
                ..request(Kind::Allreduce, input, output, 4, 0)
            };
            let gate = rank.gate();
            rank.double.fail_call(failing);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(5));
                    gate.release();
                });
                // Whether it fails depends on the call.
                let _ = rank.start(&scaled, &rank.call());
            });
            rank.drain()
        });
        assert_eq!(complaints.concat(), Vec::<String>::new(), "call {failing}");
    }
}

#[test]
fn a_group_of_one_copies_pinned_memory_as_often_as_its_graph_runs() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        ranks(1, "shm", order, |rank| {
            let [input, output] = [0; 2].map(|_| rank.double.memory_of(Memory::Host, 0, 16));
            let call = Call { on_device: true, ..rank.call() };
            let capture = |output: u64| {
                rank.double.begin_capture(rank.stream, 0);
                let sum = request(Kind::Allreduce, input, output, 4, 0);
                let work = rank.start(&sum, &call).expect("it is captured");
                work.wait(Deadline::after(PATIENCE)).expect("it is in the graph");
                rank.double.end_capture(rank.stream, 0).expect("a graph")
            };
            // It is never launched.
            drop(capture(output));
            let graphs = [capture(output), capture(input)];
            for round in 1..5 {
                rank.fill(input, &[round; 4]);
                for graph in &graphs {
                    rank.double.launch_graph(graph, rank.stream, 0);
                }
                rank.expect(output, &[round; 4], "replayed");
            }
            rank.fill(input, &[7; 4]);
            let work = rank.start(&request(Kind::Allreduce, input, output, 4, 0), &call).expect("it starts");
            work.wait(Deadline::after(PATIENCE)).expect("it ends well");
            rank.expect(output, &[7; 4], "outside of a graph");
            assert_eq!(rank.drain(), Vec::<String>::new(), "{order:?}");
        });
    }
}

#[test]
fn a_group_of_one_copies_on_the_stream() {
    for order in [Order::Eager, Order::RoundRobin, Order::Backward] {
        ranks(1, "shm", order, |rank| {
            for in_place in [false, true] {
                for (round, kind) in COLLECTIVES.into_iter().enumerate() {
                    let work = exercise(rank, kind, 37, in_place, round as u32).expect("it starts");
                    work.wait(Deadline::after(PATIENCE)).expect("it ends well");
                }
            }
            // As often as its graph runs.
            let (input, output) = (rank.memory(&[0; 4]), rank.memory(&[0; 4]));
            rank.double.begin_capture(rank.stream, 0);
            let sum = request(Kind::Allreduce, input, output, 4, 0);
            let work = rank.start(&sum, &rank.call()).expect("it is captured");
            work.wait(Deadline::after(PATIENCE)).expect("it is in the graph");
            let nothing = Request { counts: Counts::Uniform(0), ..sum.clone() };
            rank.run(&nothing, &rank.call()).expect("it is captured, too");
            let scaled = Request { operator: Operator::PreMulSum(2.0), ..sum.clone() };
            let error =
                rank.run(&scaled, &rank.call()).expect_err("the processors scale where there are no kernels");
            assert_eq!(error.status(), Status::InvalidUsage, "{error}");
            assert!(error.text().starts_with("call->stream is being captured: "), "{error}");
            let graph = rank.double.end_capture(rank.stream, 0).expect("a graph");
            for round in 1..4 {
                rank.fill(input, &[round; 4]);
                rank.double.launch_graph(&graph, rank.stream, 0);
                rank.expect(output, &[round; 4], "replayed");
            }
            let (input, output) = (rank.memory(&[0; 4]), rank.memory(&[0; 4]));
            rank.fill(input, &[f32::to_bits(1.5) as i32; 4]);
            let scaled = Request {
                dtype: DataType::F32,
                operator: Operator::PreMulSum(2.0),
                ..request(Kind::Allreduce, input, output, 4, 0)
            };
            rank.run(&scaled, &rank.call()).expect("it ends well");
            rank.expect(output, &[f32::to_bits(3.0) as i32; 4], "scaled");
            assert_eq!(rank.drain(), Vec::<String>::new(), "{order:?}");
        });
    }
}
